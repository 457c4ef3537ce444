#!/bin/sh
# test_tool.sh: the command-line tool from end to end. Speaks TAP, closes with "N passed, N failed, N skipped".
#
#   DKV      the tool               (build/dkv)
#   LLAMA2C  the llama2.c example   (build/llama2c)
#   MODEL    SmolLM2-135M-Instruct  (build/model/SmolLM2-135M-Instruct.Q4_1.gguf); without it `run` is skipped
cd "$(dirname "$0")/.." || exit 1
DKV=${DKV:-build/dkv}
LLAMA2C=${LLAMA2C:-build/llama2c}
MODEL=${MODEL:-build/model/SmolLM2-135M-Instruct.Q4_1.gguf}
MASK=examples/patterns/smollm2-135m-kv20.txt
SHIPPED=examples/patterns/smollm2-135m-kv20.dkv
[ -x "$DKV" ] || { echo "test_tool: no $DKV; run make" >&2; exit 1; }
. tests/tap.sh

# ---- usage
equal "--version" "$("$DKV" --version | cut -d' ' -f1)" dkv
for command in run info pattern plot data import; do
    holds "$command --help" sh -c "'$DKV' $command --help | grep -q '^usage: dkv $command'"
    refused "$command: unknown option" 2 "no option --wrong" "$DKV" "$command" --wrong
done
holds "--help: choices that are long" sh -c "'$DKV' pattern --help |
    grep -qF 'full|heads|mask|streaming|random|head-only|distance-only|distance-shuffled|fully-shuffled|scores-only'"
refused "no command" 2 "which command" "$DKV"
refused "wrong command" 2 "no command 'walk'" "$DKV" walk
refused "missing value" 2 "--kind needs a value" "$DKV" pattern --kind
refused "not a number" 2 "--layers must be a whole number" "$DKV" pattern --layers 3x
refused "number out of range" 2 "--physical must be a number in 0..1" "$DKV" pattern --physical 1.5
refused "wrong choice" 2 "must be one of full|heads|mask|streaming|random|" "$DKV" pattern --kind all
refused "mask of another kind" 2 "--mask goes with" "$DKV" pattern --kind full --mask x -o "$t/x"
refused "heads of another kind" 2 "--heads goes with" "$DKV" pattern --kind mask --mask x --heads 0:0 -o "$t/x"
refused "no heads" 2 "needs --heads" "$DKV" pattern --kind heads --heads "" -o "$t/x"
"$DKV" info "$SHIPPED" >/dev/full 2>"$t/err"
equal "full disk" "$?" 1

# ---- pattern
SHAPE="--layers 3 --query-heads 6 --kv-heads 2 --bins 10"
make() { "$DKV" pattern --kind "$@" -o "$t/p.dkv"; }
# shellcheck disable=SC2086
{
    make full $SHAPE; info "$t/p.dkv"
    equal "full: every bit" "$(key "$t/info.json" ones) $(key "$t/info.json" rho)" "180 1"
    make streaming --physical 0.25 $SHAPE; info "$t/p.dkv" --ctx 1792
    equal "streaming: 15 of 60 cells" "$(key "$t/info.json" cells) $(key "$t/info.json" ones)" "15 45"
    equal "streaming: the nearest 5 bins keep 15 of 30 cells" "$(key "$t/info.json" physical_ratio)" 0.5
    make random --rho 0.3 --seed 1 $SHAPE; info "$t/p.dkv"; cp "$t/p.dkv" "$t/q.dkv"
    crc=$(key "$t/info.json" crc)
    equal "random: exactly the budget" "$(key "$t/info.json" ones) $(key "$t/info.json" budget)" "54 logical"
    make random --rho 0.3 --seed 1 $SHAPE
    holds "random: a seed is a pattern" cmp "$t/p.dkv" "$t/q.dkv"
    make random --rho 0.3 --seed 2 $SHAPE; info "$t/p.dkv"
    holds "random: another seed, another pattern" [ "$(key "$t/info.json" crc)" != "$crc" ]
    make random --physical 0.5 --seed 3 $SHAPE; info "$t/p.dkv"
    equal "random: physical" "$(key "$t/info.json" cells) $(key "$t/info.json" ones)" "30 90"
    "$DKV" pattern --kind streaming --like "$t/p.dkv" -o "$t/q.dkv"; info "$t/q.dkv"
    equal "streaming like a pattern: as many cells" "$(key "$t/info.json" cells)" 30
    make heads --heads 0:0,2:5 $SHAPE; info "$t/p.dkv"
    equal "heads: all bins of two heads" "$(key "$t/info.json" ones) $(key "$t/info.json" cells)" "20 20"
    make full --layers 3 --query-heads 6 --ctx 1281 --bin-width 64 --sink 100 --recent 500; info "$t/p.dkv"
    equal "bins from a context" "$(key "$t/info.json" bins) $(key "$t/info.json" max_context)" "11 1304"

    refused "H % Hkv" 1 "cannot share" "$DKV" pattern --kind full --layers 3 --query-heads 6 --kv-heads 4 --bins 2 -o "$t/x"
    refused "no budget" 2 "how much" "$DKV" pattern --kind streaming $SHAPE -o "$t/x"
    refused "two budgets" 2 "two budgets" "$DKV" pattern --kind random --rho 0.1 --physical 0.1 $SHAPE -o "$t/x"
    refused "no shape" 2 "which shape" "$DKV" pattern --kind full --bins 4 -o "$t/x"
    refused "no bins" 2 "how many bins" "$DKV" pattern --kind full --layers 1 --query-heads 1 -o "$t/x"
    refused "no middle" 1 "all sink and recent" "$DKV" pattern --kind full --layers 1 --query-heads 1 --ctx 9 -o "$t/x"
    refused "no output" 2 "where to" "$DKV" pattern --kind full $SHAPE
    refused "head outside" 1 "--heads 3:0 is outside" "$DKV" pattern --kind heads --heads 3:0 $SHAPE -o "$t/x"
    refused "heads unreadable" 2 "cannot read '1-2'" "$DKV" pattern --kind heads --heads 0:1,1-2 $SHAPE -o "$t/x"
    refused "unwritable" 1 "/nowhere/x" "$DKV" pattern --kind full $SHAPE -o /nowhere/x
    full() { "$DKV" pattern --kind full $SHAPE -o "$@"; }
    full "$t/p.dkv"; ln -s real.dkv "$t/link.dkv"; full "$t/link.dkv"
    holds "a link stays, what it leads to is written" cmp "$t/p.dkv" "$t/real.dkv"
    equal "a link is no file" "$(readlink "$t/link.dkv")" real.dkv
    mkfifo "$t/pipe"; timeout 10 cat "$t/pipe" > "$t/piped" & full "$t/pipe"; wait $!
    holds "a pipe" cmp "$t/p.dkv" "$t/piped"
    ln -s /dev/full "$t/device"
    refused "a device" 1 "cannot write $t/device: No space" full "$t/device"
    ln -s /dev/full "$t/y.dkv.tmp"
    refused "no space" 1 "cannot write $t/y.dkv: No space" full "$t/y.dkv"
    mkdir "$t/folder"
    refused "a folder" 1 "cannot write $t/folder: Is a directory" full "$t/folder"
    equal "failures leave nothing" "$(ls "$t" | grep -c 'tmp$')" 0
    refused "model id not ASCII" 2 "printable ASCII" "$DKV" pattern --kind full $SHAPE --model "é" -o "$t/x"
}

# ---- controls
"$DKV" pattern --kind random --rho 0.15 --seed 4 $SHAPE -o "$t/m.dkv"; info "$t/m.dkv"; cells=$(key "$t/info.json" cells)
match() { kind=$1; shift; "$DKV" pattern --kind "$kind" --match "$t/m.dkv" -o "$t/p.dkv" "$@" > "$t/said"; }
for kind in streaming random head-only distance-only distance-shuffled fully-shuffled; do
    match $kind; info "$t/p.dkv"
    equal "$kind: as many cells, whole groups" "$(for k in cells ones budget layers kv_heads bins; do
        key "$t/info.json" $k; done | xargs)" "$cells $((3 * cells)) physical 3 2 10"
    equal "$kind: says so" "$(cat "$t/said")" "$kind: $cells of 60 cells (layer, KV head, bin), as m.dkv has"
done
match distance-shuffled --seed 1; cp "$t/p.dkv" "$t/q.dkv"; match distance-shuffled --seed 1
holds "controls: a seed is a pattern" cmp "$t/p.dkv" "$t/q.dkv"
match distance-shuffled --seed 2
holds "controls: another seed, another pattern" sh -c "! cmp -s '$t/p.dkv' '$t/q.dkv'"
wrong() { name=$1 status=$2 text=$3; shift 3; refused "controls: $name" "$status" "$text" "$DKV" pattern -o "$t/x" "$@"; }
wrong "no pattern" 2 "needs --match" --kind head-only --like "$t/m.dkv"
wrong "a shape as well" 2 "--match gives shape" --kind head-only --match "$t/m.dkv" --bins 3
wrong "a budget as well" 2 "--match gives the budget" --kind head-only --match "$t/m.dkv" --rho 0.1
wrong "not a control" 2 "--match goes with the controls" --kind full --match "$t/m.dkv"
wrong "a seed for nothing" 2 "--seed goes with" --kind head-only --match "$t/m.dkv" --seed 1
wrong "no scores" 2 "--scores goes with" --kind scores-only --match "$t/m.dkv"
wrong "scores for nothing" 2 "--scores goes with" --kind head-only --match "$t/m.dkv" --scores x
wrong "scores that are none" 1 "not a score file" --kind scores-only --match "$t/m.dkv" --scores "$t/m.dkv"

# ---- mask
mask() { "$DKV" pattern --kind mask --mask "$t/mask" --layers 2 --query-heads 4 --kv-heads 2 -o "$t/p.dkv" "$@"; }
printf '# by KV head\n1 1 0001\r\n0 0 1000 # near\n\n0 1 0100\n1 0 0010\n' > "$t/mask"
mask; info "$t/p.dkv"
equal "mask by KV head" "$(key "$t/info.json" cells) $(key "$t/info.json" ones) $(key "$t/info.json" budget)" "4 8 physical"
for l in 0 1; do for h in 0 1 2 3; do echo "$l $h 1$((h & 1))0"; done; done > "$t/mask"
mask; info "$t/p.dkv"
equal "mask by query head" "$(key "$t/info.json" cells) $(key "$t/info.json" ones) $(key "$t/info.json" budget)" "8 12 logical"
bad_mask() { printf "$2" > "$t/mask"; refused "mask: $1" 1 "$3" mask; }
bad_mask "rows missing" '0 0 1\n0 1 1\n1 0 1\n' "has 3 rows; 2 layers need 4 (by KV head) or 8 (by query head)"
bad_mask "ragged" '0 0 11\n0 1 1\n1 0 11\n1 1 11\n' "mask:2: 1 bins, the rows above have 2"
bad_mask "twice" '0 0 1\n0 1 1\n1 0 1\n1 0 1\n' "mask:4: this row came before"
bad_mask "head outside" '0 0 1\n0 1 1\n1 0 1\n1 2 1\n' "mask:4: no layer 1 head 2"
bad_mask "other characters" '0 0 1\n0 1 2\n1 0 1\n1 1 1\n' "mask:2: expected LAYER HEAD"
bad_mask "row cut by a line end" '0\n0 1\n0 1 1\n1 0 1\n1 1 1\n' "mask:1: expected LAYER HEAD"
bad_mask "text behind the bits" '0 0 1 x\n' "mask:1: expected LAYER HEAD"
bad_mask "empty" '# nothing\n' "has 0 rows"
bad_mask "binary" '0 0 1\n\000' "is not a text file"
refused "mask: no such file" 1 "cannot read $t/none" "$DKV" pattern --kind mask --mask "$t/none" --layers 1 --query-heads 1 -o "$t/x"

# ---- the shipped pattern
"$DKV" pattern --kind mask --mask $MASK --layers 30 --query-heads 9 --kv-heads 3 --head-dim 64 \
    --model SmolLM2-135M-Instruct -o "$t/p.dkv"
holds "the shipped pattern is its mask" cmp -i 256 -n $((30 * 9 * 8)) "$t/p.dkv" $SHIPPED # the bits; not who made them
info $SHIPPED --ctx 7900
equal "shipped: shape" "$(for k in layers heads kv_heads bins head_dim bin_width sink recent rho model; do
    key "$t/info.json" $k; done | tr '\n' ' ')" "30 9 3 53 64 128 128 1024 0.2 Smollm2 135M 8k Lc100K Mix1 Ep2 "
# Rows kept at 7900 tokens, counted from the text: the farthest bin is 36 tokens short.
rows=$(awk '!/^#/ { for (b = 1; b <= length($3); b++) if (substr($3, b, 1) == "1") n += b == 53 ? 92 : 128; n += 1152 }
    END { print n }' $MASK)
equal "shipped: bytes at 7900 tokens" "$(key "$t/info.json" kv_bytes_packed) $(key "$t/info.json" kv_bytes_dense)" \
    "$((rows * 256)) $((7900 * 23040))"
equal "shipped: ratios at 7900 tokens" "$(key "$t/info.json" physical_ratio | cut -c1-8) $(
    key "$t/info.json" physical_ratio_total | cut -c1-8)" \
    "$(awk "BEGIN { printf \"%.10f\", ($rows - 90 * 1152) / (90 * 6748) }" | cut -c1-8) $(
    awk "BEGIN { printf \"%.10f\", $rows / (90 * 7900) }" | cut -c1-8)"
if [ -r "$MODEL" ]; then
    "$DKV" pattern --kind full --like "$MODEL" -o "$t/q.dkv"; info "$t/q.dkv"
    equal "shape of a model" "$(for k in layers heads kv_heads head_dim bins; do key "$t/info.json" $k; done |
        tr '\n' ' ')" "30 9 3 64 55 "
else
    skip "shape of a model" "no $MODEL"
fi

# ---- info
refused "info: no file" 1 "cannot read $t/none" "$DKV" info "$t/none"
refused "info: not a pattern" 1 "$MASK: " "$DKV" info $MASK
head -c 1000 $SHIPPED > "$t/cut.dkv"
refused "info: truncated" 1 "truncated" "$DKV" info "$t/cut.dkv"
{ head -c 1000 $SHIPPED; printf '\125'; tail -c +1002 $SHIPPED; } > "$t/bent.dkv"
refused "info: damaged" 1 "CRC32 differs" "$DKV" info "$t/bent.dkv"
refused "info: beyond the last bin" 1 "reaches 7936 tokens, not 7937" "$DKV" info $SHIPPED --ctx 7937
for policy in clamp keep drop; do
    holds "info: --beyond $policy" "$DKV" info $SHIPPED --ctx 9000 --beyond $policy
done
info $SHIPPED --ctx 1152
equal "info: nothing to compress" "$(key "$t/info.json" logical_ratio) $(key "$t/info.json" physical_ratio)" "1 1"
"$DKV" info $SHIPPED --ctx 7900 > "$t/info.txt"
holds "info: text names both ratios" sh -c "grep -q 'logical ratio' '$t/info.txt' && grep -q 'physical ratio' '$t/info.txt'"

refused "an unknown letter among others" 2 "no option -x" "$DKV" info -xz $SHIPPED
refused "a value where none goes" 2 "--json=3 takes no value" "$DKV" info --json=3 $SHIPPED
refused "nor here" 2 "--help=3 takes no value" "$DKV" info --help=3

# ---- plot
if command -v gnuplot > /dev/null; then
    holds "plot" "$DKV" plot $SHIPPED -o "$t/a '\$b.png"
    equal "plot: nothing on the terminal" "$(cat "$t/out")" ""
    equal "plot: a PNG" "$(head -c 8 "$t/a '\$b.png" | od -An -tx1 | tr -d ' ')" 89504e470d0a1a0a
    refused "plot: unwritable" 1 "cannot write /nowhere/x.png" "$DKV" plot $SHIPPED -o /nowhere/x.png
    refused "plot: a full disk" 1 "cannot write /dev/full: No space" "$DKV" plot $SHIPPED -o /dev/full
    echo old > "$t/old.png"
    mkdir "$t/half"
    printf '#!/bin/sh\nexec head -c 100\n' > "$t/half/gnuplot"
    chmod +x "$t/half/gnuplot"
    refused "plot: half a picture" 1 "could not write all" env PATH="$t/half:$PATH" "$DKV" plot $SHIPPED -o "$t/old.png"
    equal "plot: which ruins nothing" "$(cat "$t/old.png")" old
else
    skip "plot" "no gnuplot"
fi
mkdir "$t/bin"
refused "plot: no gnuplot" 1 "needs gnuplot" env PATH="$t/bin" "$DKV" plot $SHIPPED -o "$t/x.png"

# ---- run
Q="What is the access code?"
run() { "$DKV" run -m "$MODEL" -p "$P" -c "$t/context" -q "$Q" -n 8 "$@"; }
json() { run --json "$@" > "$t/run.json" 2> "$t/err" || flunk "run $*" "$(cat "$t/err")"; }
of() { sed -n "/\"$1\":[[:space:]]*{/,/}/p" "$t/run.json" > "$t/part.json"; key "$t/part.json" "$2"; }
P=$SHIPPED
yes "The north gate opens at nine and closes at six, except on Mondays." | head -n 150 | tr '\n' ' ' > "$t/context"

refused "run: no model" 2 "which model" "$DKV" run -p $P -c "$t/context" -q "$Q"
refused "run: f32 on a GPU" 2 "--device cuda keeps f16, bf16, i8 or fp8" \
    "$DKV" run -m "$MODEL" -p $P -c "$t/context" -q "$Q" --device cuda --type f32
refused "run: no pattern" 2 "which pattern" "$DKV" run -m "$MODEL" -c "$t/context" -q "$Q"
refused "run: no context" 2 "which context" "$DKV" run -m "$MODEL" -p $P -q "$Q"
refused "run: no question" 2 "what is the question" "$DKV" run -m "$MODEL" -p $P -c "$t/context"
refused "run: model missing" 1 "$t/none" "$DKV" run -m "$t/none" -p $P -c "$t/context" -q "$Q"
refused "run: model is no GGUF" 1 "" "$DKV" run -m $MASK -p $P -c "$t/context" -q "$Q"
refused "run: pattern missing" 1 "cannot read $t/none" "$DKV" run -m "$MODEL" -p "$t/none" -c "$t/context" -q "$Q"

if [ -r "$MODEL" ]; then
    refused "run: context missing" 1 "cannot read $t/none" run -c "$t/none"
    : > "$t/empty"
    refused "run: context empty" 1 "is empty" run -c "$t/empty"
    refused "run: question empty" 1 "question is empty" run -q " "
    refused "run: no such template" 1 "llama3" run --template mistral
    refused "run: context beyond the model" 1 "the model takes 8192" run -n 8000
    "$DKV" pattern --kind full --layers 30 --query-heads 9 --kv-heads 3 --head-dim 128 --bins 9 -o "$t/q.dkv"
    refused "run: another model's pattern" 1 "q.dkv is for 30 layers" run -p "$t/q.dkv"
    "$DKV" pattern --kind full --like "$MODEL" --bins 1 -o "$t/q.dkv"
    refused "run: beyond the last bin" 1 "q.dkv reaches 1280 tokens, the context has 1400" run -p "$t/q.dkv" --ctx 1400

    json --ctx 300
    equal "run: all keys" "$(sed -n 's/^[[:space:]]*"\([a-z_]*\)":.*/\1/p' "$t/run.json" | tr '\n' ' ')" \
        "context_tokens logical_ratio physical_ratio physical_ratio_total kv_bytes_dense kv_bytes_packed kv_bytes_peak \
prefill_s compress_s answer_tokens decode_tok_s text "
    equal "run: context cut" "$(key "$t/run.json" context_tokens)" 300
    equal "run: no bar on a file" "$(cat "$t/err")" ""
    if command -v script > /dev/null; then
        P=$P t=$t script -qec "'$DKV' run -m '$MODEL' -p $P -c '$t/context' -q Hello -n 1 --ctx 200" /dev/null > "$t/tty"
        holds "run: a bar on a terminal" grep -q 'prefill \[####' "$t/tty"
    else
        skip "run: a bar on a terminal" "no script(1)"
    fi

    # Small windows, so that a short context has a middle.
    small() { "$DKV" pattern --like "$MODEL" --bins 12 --bin-width 32 --sink 16 --recent 64 -o "$t/small.dkv" "$@"; }
    P=$t/small.dkv
    small --kind full
    json --ctx 400 --compare
    equal "run: a full pattern answers as dense" "$(of compressed text)" "$(of dense text)"
    holds "run: and it answers" [ -n "$(of compressed text)" ]
    equal "run: a full pattern keeps all" "$(of compressed kv_bytes_packed)" "$((400 * 23040))"
    small --kind random --physical 0.3 --seed 5
    json --ctx 400 --control streaming
    cp "$t/run.json" "$t/all.json"
    info "$P" --ctx 400
    for k in logical_ratio physical_ratio physical_ratio_total kv_bytes_packed kv_bytes_dense; do
        equal "run: $k as info says" "$(of compressed $k)" "$(key "$t/info.json" $k)"
    done
    equal "run: streaming at equal bytes" "$(of streaming kv_bytes_packed)" "$(of compressed kv_bytes_packed)"
    json --ctx 400
    cp "$t/run.json" "$t/alone.json" && cp "$t/all.json" "$t/run.json"
    for k in text kv_bytes_packed kv_bytes_peak; do
        equal "run: $k alone and compared" "$(of compressed $k)" "$(key "$t/alone.json" $k)"
    done
    layer=$((400 * 23040 / 30)) tail=$(($(key "$t/alone.json" kv_bytes_peak) - $(key "$t/alone.json" kv_bytes_packed)))
    holds "run: peak is packed, one layer and a tail of up to 64" [ $tail -gt $layer -a $tail -lt $((layer + 64 * 23040)) ]
    json --ctx 200 --temp 1 --seed 3 && cp "$t/run.json" "$t/first.json"
    json --ctx 200 --temp 1 --seed 3
    equal "run: a seed is an answer" "$(key "$t/run.json" text)" "$(key "$t/first.json" text)"
    json --ctx 200 -n 64
    holds "run: an answer ends" [ "$(key "$t/run.json" answer_tokens)" -lt 64 ]
    json --ctx 200 -n 64 --ignore-eos
    equal "run: --ignore-eos" "$(key "$t/run.json" answer_tokens)" 64
    json --ctx 600 --beyond keep
    equal "run: --beyond keep" "$(key "$t/run.json" context_tokens)" 600
    json --ctx 200 --type bf16
    equal "run: --type bf16" "$(key "$t/run.json" kv_bytes_dense)" $((200 * 23040))
    json --ctx 200 --type f32
    equal "run: --type f32" "$(key "$t/run.json" kv_bytes_dense)" $((200 * 23040 * 2))
else
    skip "run" "no $MODEL"
fi

# ---- import
mkdir "$t/duo"
printf '{"sink_size": 64, "recent_size": 256}' > "$t/duo/config.json"
printf '0.9\t0.2\n1.01\t0.5\n-0.01\t0.9\n' > "$t/duo/full_attention_heads.tsv"
duo() { "$DKV" import "$t/duo" --query-heads 6 -o "$t/d.dkv" "$@" 2> "$t/err"; info "$t/d.dkv"; }
duo --ctx 1344
equal "import: shape" "$(for k in layers heads kv_heads bins sink recent; do key "$t/info.json" $k; done | xargs)" "3 6 2 8 64 256"
equal "import: heads above 0.5" "$(key "$t/info.json" cells)" 24
equal "import: of all query heads of a group" "$(key "$t/info.json" ones)" 72
duo --bins 4 --threshold 0.95 --sink 10
equal "import: --threshold" "$(key "$t/info.json" cells) $(key "$t/info.json" sink)" "4 10"
duo --bins 1 --physical 0.3334
equal "import: --physical, ties in order" "$(key "$t/info.json" cells)" 2
"$DKV" pattern --kind heads --layers 3 --query-heads 6 --kv-heads 2 --bins 1 --sink 64 --recent 256 \
    --heads 0:0,0:1,0:2,1:0,1:1,1:2 -o "$t/e.dkv"
bits() { tail -c +257 "$1" | head -c -4 | od -An -tx1; }
equal "import: the heads chosen" "$(bits "$t/d.dkv")" "$(bits "$t/e.dkv")"
refused "import: no source" 2 "give one source" "$DKV" import -o "$t/x.dkv"
refused "import: no output" 2 "where to" "$DKV" import "$t/duo"
refused "import: two ways to choose" 2 "give one" "$DKV" import "$t/duo" --query-heads 6 --bins 4 --physical 0.5 --threshold 0.4 \
    -o "$t/x.dkv"
refused "import: other KV heads" 1 "has 2 KV heads, --kv-heads says 3" "$DKV" import "$t/duo" --query-heads 6 --kv-heads 3 \
    --bins 4 -o "$t/x.dkv"
mkdir "$t/duo2" && cp "$t/duo/full_attention_heads.tsv" "$t/duo2"
holds "import: sink and recent instead of config.json" "$DKV" import "$t/duo2" --query-heads 6 --bins 4 --sink 8 --recent 16 \
    -o "$t/x.dkv"
refused "import: no query heads" 2 "how many query heads" "$DKV" import "$t/duo" --bins 4 -o "$t/x.dkv"
refused "import: no bins" 2 "how many bins" "$DKV" import "$t/duo" --query-heads 6 -o "$t/x.dkv"
refused "import: uneven heads" 1 "evenly" "$DKV" import "$t/duo" --query-heads 5 --bins 4 -o "$t/x.dkv"
refused "import: a text file" 1 "torch.save" "$DKV" import README.md --kv-heads 2 -o "$t/x.dkv"
printf '0.9\t0.2\n1.01\n' > "$t/duo/full_attention_heads.tsv"
refused "import: a short line" 1 "heads.tsv:2: 1 numbers" "$DKV" import "$t/duo" --query-heads 6 --bins 4 -o "$t/x.dkv"
printf '0.9\tx\n' > "$t/duo/full_attention_heads.tsv"
refused "import: no number" 1 "expected numbers" "$DKV" import "$t/duo" --query-heads 6 --bins 4 -o "$t/x.dkv"
printf '{"sink_size": 64}' > "$t/duo/config.json"
refused "import: no recent size" 1 "recent_size" "$DKV" import "$t/duo" --query-heads 6 --bins 4 -o "$t/x.dkv"

# ---- data
refused "data: no model" 2 "give a model" "$DKV" data
refused "data: no GGUF file" 1 "README.md" "$DKV" data -m README.md
if [ -r "$MODEL" ]; then
    data() { "$DKV" data -m "$MODEL" --ctx 2048 --recent 256 "$@" > "$t/data"; }
    data --show 4
    equal "data: each bin once" "$(sed -n 's/^  bin \([0-9]*\),.*/\1/p' "$t/data" | sort -un | wc -l | tr -d ' ')" 13
    equal "data: a value in its line and in its suffix" "$(grep -c 'is\[ [0-9]\{3\} [0-9]\{3\}\]' "$t/data")" 32
    cp "$t/data" "$t/before"; data --show 4
    holds "data: the same again" cmp "$t/before" "$t/data"
    data --show 1 --kind word --split report --needles 2 --seed 7
    equal "data: words" "$(grep -c 'is\[ [a-z]* [a-z]* [a-z]*\]' "$t/data")" 4
    echo "Whales sing at night." > "$t/whales"
    data --show 1 --filler "$t/whales"
    holds "data: another filler" grep -q 'Whales sing at night.$' "$t/data"
    refused "data: too short" 1 "full bins" "$DKV" data -m "$MODEL" --ctx 1300
    refused "data: no such context" 2 "must be below 4" "$DKV" data -m "$MODEL" --ctx 2048 --recent 256 --first 9
    "$DKV" data -m "$MODEL" --ctx 480 --bin-width 32 --sink 32 --recent 0 --show 9 > "$t/data"
    holds "data: a needle at the end" grep -q 'bin 0, positions 448..479' "$t/data"
    holds "data: no further than that" sh -c "! grep -q endoftext '$t/data'"
else
    skip "data" "no $MODEL"
fi

# ---- llama2.c example
if [ -x "$LLAMA2C" ]; then
    holds "llama2c: a random model" "$LLAMA2C" --random "$t/tiny.bin"
    lines() { "$LLAMA2C" -n 24 -k "$1" "$t/tiny.bin" > "$t/tokens"; sed -n 's/^dense *//p' "$t/tokens" > "$t/dense"
        sed -n 's/^compressed *//p' "$t/tokens" > "$t/compressed"; }
    lines 100
    holds "llama2c: everything kept, the same tokens" cmp "$t/dense" "$t/compressed"
    equal "llama2c: 24 tokens" "$(wc -w < "$t/dense" | tr -d ' ')" 24
    equal "llama2c: everything kept, the same bytes" "$(grep -c '^KV bytes *130560 dense, 130560 packed' "$t/tokens")" 1
    lines 0
    holds "llama2c: nothing kept between sink and recent" grep -q '130560 dense, 15360 packed' "$t/tokens"
    head -c 5000 "$t/tiny.bin" > "$t/cut.bin"
    holds "llama2c: a cut model is refused" sh -c "! '$LLAMA2C' '$t/cut.bin' 2>&1 | grep -q dense"
else
    skip "llama2c" "no $LLAMA2C"
fi

echo "1..$((passed + failed + skipped))"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
