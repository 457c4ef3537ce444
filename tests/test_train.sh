#!/bin/sh
# test_train.sh: from a model to a tested pattern, probe, train, score and plot, on a small model with random weights.
# Speaks TAP, closes with "N passed, N failed, N skipped". DKV is the tool (build/dkv); python3 makes the model.
cd "$(dirname "$0")/.." || exit 1
DKV=${DKV:-build/dkv}
[ -x "$DKV" ] || { echo "test_train: no $DKV; run make" >&2; exit 1; }
. tests/tap.sh

about() { info "$1"; shift; for k; do key "$t/info.json" "$k"; done | xargs; }

# ---- arguments
for command in probe train score; do
    holds "$command --help" sh -c "'$DKV' $command --help | grep -q '^usage: dkv $command'"
    refused "$command: unknown option" 2 "no option --wrong" "$DKV" $command --wrong
    refused "$command: no model" 2 "which model" "$DKV" $command
done
helps() { holds "$1 --help: $2" sh -c "'$DKV' $1 --help | grep -q -- '$2'"; }
helps probe "--ctx T .*(default: what fits; cpu: up to 2048)"
helps probe "--needles N .*(default: 4)"
helps train "--needles N .*(default: the recipe.s)"
helps score "--bin-width W .*(default: the pattern.s)"
refused "probe: no output" 2 "where to" "$DKV" probe -m x
refused "probe: no such model" 1 "$t/none" "$DKV" probe -m "$t/none" -o "$t/x"
refused "train: no budget" 2 "how much" "$DKV" train -m x -s x
refused "train: no output" 2 "where to" "$DKV" train -m x -s x --rho 0.2
wrong() { name=$1 status=$2 text=$3; shift 3; refused "train: $name" $status "$text" "$DKV" train -m x -s x -o y "$@"; }
wrong "a ratio above 1" 2 "--rho must be" --rho 0.2,1.5
wrong "no ratio" 2 "--rho must be" --rho 0.2,x
wrong "one number of steps" 2 "--steps must be A,B" --rho 0.2 --steps 5
wrong "an empty ratio" 2 "how much may stay" --rho ""
wrong "a ratio twice" 2 "--rho 0.2,0.3,0.20000001 has 0.2 twice" --rho 0.2,0.3,0.20000001
wrong "annealing" 2 "--anneal must be FROM,N" --rho 0.2 --anneal 0.6,-1
wrong "cells under a logical budget" 2 "--budget logical needs --gates query" --rho 0.2 --gates kv --budget logical
wrong "a logical budget alone" 2 "--budget logical needs --gates query" --rho 0.2 --budget logical
wrong "a pause without a state" 2 "--pause-after needs --resume" --rho 0.2 --pause-after 3
wrong "lengths beside scores" 2 "leave --ctx" --rho 0.2 --ctx 480
wrong "no scores there" 1 "cannot read x" --rho 0.2
mkdir "$t/folder.dkv" "$t/r-0.3.dkv"
for command in probe "train --rho 0.2"; do # before the model, which is not there, is looked for
    # shellcheck disable=SC2086
    early() { text=$1; shift; refused "$command: $text" 1 "$text" "$DKV" $command -m x "$@"; }
    early "cannot write $t/folder.dkv: Is a directory" -o "$t/folder.dkv"
    early "cannot write /nowhere/x: No such file" -o /nowhere/x
    early "cannot write $t/folder.dkv: Is a directory" -o "$t/x" --resume "$t/folder.dkv"
    early "cannot write README.md/x: Not a directory" -o README.md/x
    early "a file to write needs a name" -o ""
done
refused "train: the second name is a folder" 1 "cannot write $t/r-0.3.dkv: Is a directory" \
    "$DKV" train -m x --rho 0.2,0.3 -o "$t/r.dkv"
rmdir "$t/r-0.3.dkv"
refused "score: no patterns" 2 "which patterns" "$DKV" score -m x
refused "score: no such pattern" 1 "cannot read x" "$DKV" score -m x -p x
refused "score: scores for nothing" 2 "--scores goes with --controls" "$DKV" score -m x -p x --scores x

if python3 -c '' 2> /dev/null && python3 tests/make_random_gguf.py "$t" f32 qwen2; then
    M=$t/f32.gguf
    # 4 bins of 96 bytes, 2 layers, 4 query heads, 2 KV heads: 16 cells
    # bend STATE WORD VALUE FILE: 64-bit words of a state's data, its CRC32 made right again
    bend() { python3 - "$@" <<'EOF'
import struct, sys, zlib
state, word, value, to = sys.argv[1:]
bytes_ = bytearray(open(state, "rb").read()[:-4])
struct.pack_into("<q", bytes_, 16 + 8 * int(word), int(value))
open(to, "wb").write(bytes_ + struct.pack("<I", zlib.crc32(bytes_)))
EOF
    }
    probe() { "$DKV" probe -m "$M" --ctx 480 --bin-width 96 --sink 32 --recent 64 --needles 2 "$@"; }

    # ---- probe
    holds "probe" probe -o "$t/s.dks"
    equal "probe: nothing but the result on a pipe" "$(wc -l < "$t/out" | tr -d ' ')" 1
    equal "probe: what it measured" "$(about "$t/s.dks" layers heads kv_heads bins bin_width sink recent context_tokens \
        examples_per_bin)" "2 4 2 4 96 32 64 480 16"
    probe -o "$t/again.dks" > /dev/null
    holds "probe: the same again" cmp "$t/s.dks" "$t/again.dks"
    probe -o "$t/other.dks" --seed 1 > /dev/null
    holds "probe: another seed, other scores" sh -c "! cmp -s '$t/s.dks' '$t/other.dks'"
    probe -o "$t/again.dks" --resume "$t/probed" > /dev/null
    probe -o "$t/resumed.dks" --resume "$t/probed" > /dev/null
    holds "probe: from its state" cmp "$t/s.dks" "$t/resumed.dks"
    for bent in "0 -1" "0 17" "1 33" "1 -1"; do # conditions taken, of 16; cells, 32
        # shellcheck disable=SC2086
        bend "$t/probed" $bent "$t/bent"
        refused "probe: a state with $bent" 1 "or damaged" probe -o "$t/x" --resume "$t/bent"
    done
    probe --dry-run --resume "$t/probed" 2> "$t/err"
    holds "probe: --dry-run at the end" grep -q '^probe: 0 prefills of .* 0 questions of [1-9].*; 0 + 0 PFLOP' "$t/err"
    refused "probe: another run's state" 1 "other settings" probe -o "$t/x" --resume "$t/probed" --seed 1
    refused "probe: not whole bins" 1 "--ctx 500 is not sink + recent + whole bins of 96; 480 is" probe -o "$t/x" --ctx 500
    refused "probe: no room for questions" 1 "takes 2048 tokens; at most --ctx 1728" probe -o "$t/x" --ctx 2016
    holds "probe: what has room" probe --dry-run --ctx 1728
    refused "probe: no room for any" 1 "and sink, recent and one bin are 1960" probe -o "$t/x" --ctx 2056 --recent 1832
    refused "probe: more needles than bins" 1 "4 bins and asks about 5; lower --needles" probe -o "$t/x" --needles 5
    refused "probe: no room for a cache" 1 "more than --kv-memory" probe -o "$t/x" --kv-memory 0.000001
    refused "probe: unwritable" 1 "cannot write /nowhere/x" probe -o /nowhere/x
    refused "probe: one file for both" 2 "name the same file" probe -o "$t/x" --resume "$t/x"
    refused "probe: bins that never fit" 1 "one bin are 2288 tokens, and 1792 fit" "$DKV" probe -m "$M" -o "$t/x" --sink 2000
    probe --dry-run > "$t/out" 2> "$t/err"
    holds "probe: --dry-run" grep -q '^probe: 32 prefills of 480 tokens.*64 questions' "$t/err"
    adds_up() { # adds_up FORMULA: of the numbers of the last line of err, with its last, a time, within 1 % and a second
        tail -1 "$t/err" | awk '{n = split($NF, part, ":"); for (i = 1; i <= n; i++) all = 60 * all + part[i]
            if ($(NF - 1) == "d") all += 86400 * $(NF - 2)
            gsub(",", ""); want = '"$1"'; exit !(want > 10 && (all - want) ^ 2 <= (1 + want / 100) ^ 2)}'
    }
    probe --dry-run --rounds 1000 2> "$t/err"
    holds "probe: what it takes" adds_up '8000 * ($5 + $10)'
    if command -v gnuplot > /dev/null; then
        holds "plot: scores" "$DKV" plot "$t/s.dks" -o "$t/s.png"
        equal "plot: a PNG" "$(head -c 8 "$t/s.png" | od -An -tx1 | tr -d ' ')" 89504e470d0a1a0a
    else
        skip "plot: scores" "no gnuplot"
    fi

    # ---- train
    # ratios of 0.5 and 0.25 leave the fall after 3 and 5 steps, and end after 6 and 8
    train() { "$DKV" train -m "$M" -s "$t/s.dks" --needles 2 --anneal 0.6,2 --steps 2,3 --rounds 2 "$@"; }
    holds "train" train --rho 0.25 -o "$t/p.dkv"
    equal "train: nothing but the result on a pipe" "$(cat "$t/out")" \
        "p.dkv: 8 of 32 bits, logical 0.2500, physical 0.2500"
    equal "train: what it learned" "$(about "$t/p.dkv" layers heads kv_heads head_dim bins bin_width sink recent budget \
        cells ones seed model)" "2 4 2 32 4 96 32 64 physical 4 8 0 random f32"
    equal "train: where from" "$(key "$t/info.json" tool)" "$("$DKV" --version) train --recipe ours"
    train --rho 0.25 -o "$t/again.dkv" > /dev/null
    holds "train: the same again" cmp "$t/p.dkv" "$t/again.dkv"
    train --rho 0.25 -o "$t/again.dkv" --threads 1 > /dev/null
    holds "train: the same on one thread" cmp "$t/p.dkv" "$t/again.dkv"
    train --rho 0.25,0.5 -o "$t/q.dkv" > /dev/null
    holds "train: several ratios, as if alone" cmp "$t/p.dkv" "$t/q-0.25.dkv"
    equal "train: and the other" "$(about "$t/q-0.5.dkv" cells rho)" "8 0.5"
    # no halving reaches 0: it comes first, after 2 + 3 steps, and 0.1 takes 6 + 3 from there
    train --rho 0.1 -o "$t/again.dkv" > /dev/null
    train --rho 0.1,0 -o "$t/q.dkv" > /dev/null
    holds "train: beside nothing, as if alone" cmp "$t/again.dkv" "$t/q-0.1.dkv"
    train --rho 0.1,0 --dry-run 2> "$t/err"
    holds "train: and what both take" grep -q '; 112 questions' "$t/err"
    train --rho 0.25 -o "$t/j.dkv" --json > "$t/log"
    equal "train: a line per step" "$(sed -n 's/{"step":\([0-9]*\),"stage":\([12]\),.*/\1:\2/p' "$t/log" | xargs)" \
        "1:1 2:1 3:2 4:2 5:2 6:2 7:2 8:2"
    equal "train: the budget falls" "$(sed -n 's/.*"physical":\([0-9.]*\),.*/\1/p' "$t/log" | xargs)" \
        "0.625 0.625 0.625 0.4375 0.3125 0.25 0.25 0.25"
    train --rho 0.25 -o "$t/v.dkv" --verbose > /dev/null 2> "$t/err"
    equal "train: --verbose" "$(grep -c '^rho 0.25 stage [12] step' "$t/err")" 8
    # the caches of 3 contexts instead of all 16
    train --rho 0.25 -o "$t/again.dkv" --kv-memory 0.0008 > /dev/null
    equal "train: short memory" "$(about "$t/again.dkv" cells)" 4

    # interrupted: in stage 1, between, in stage 2, between ratios, and killed somewhere
    rm -f "$t/r-0.5.dkv" "$t/r-0.25.dkv"
    for pause in 1 1 2 2 4; do
        train --rho 0.5,0.25 -o "$t/r.dkv" --resume "$t/state" --pause-after $pause --json >> "$t/resumed" 2> "$t/err" ||
            flunk "pause"
    done
    equal "train: says that it paused" "$(cat "$t/err")" "paused after 4 steps; the same command goes on from $t/state"
    holds "train: not yet finished" [ ! -e "$t/r-0.25.dkv" ]
    train --rho 0.5,0.25 -o "$t/r.dkv" --resume "$t/state" --json >> "$t/resumed"
    holds "train: interrupted and resumed, the same pattern" cmp "$t/q-0.5.dkv" "$t/r-0.5.dkv"
    holds "train: and the next" cmp "$t/q-0.25.dkv" "$t/r-0.25.dkv"
    train --rho 0.5,0.25 -o "$t/q.dkv" --json > "$t/log"
    holds "train: and the same steps, nothing else" cmp "$t/log" "$t/resumed"
    long() { train --rho 0.5,0.25 --steps 2,20 "$@"; } # 23 steps and 22
    rm -f "$t/state"
    "$DKV" train -m "$M" -s "$t/s.dks" --needles 2 --anneal 0.6,2 --steps 2,20 --rounds 2 --rho 0.5,0.25 -o "$t/k.dkv" \
        --resume "$t/state" > /dev/null 2>&1 & # not by long(), whose process would be a shell's
    n=0
    until [ -e "$t/state" ] || [ $n -gt 300 ]; do sleep 0.1; n=$((n + 1)); done
    kill -9 $!
    { wait $!; } 2> /dev/null
    equal "train: killed before its end" "$? $(ls "$t" | grep -c '^k-')" "137 0"
    long -o "$t/q.dkv" > /dev/null
    long -o "$t/k.dkv" --resume "$t/state" > /dev/null
    holds "train: killed and resumed, the same pattern" cmp "$t/q-0.25.dkv" "$t/k-0.25.dkv"
    long --dry-run --resume "$t/state" 2> "$t/err"
    holds "train: --dry-run at the end" grep -q '^train: 0 prefills of .* 0 questions of [1-9].*; 0 + 0 PFLOP' "$t/err"
    equal "train: nor any time" "$(wc -l < "$t/err" | tr -d ' ')" 1
    long -o "$t/k.dkv" --resume "$t/state" > /dev/null
    holds "train: at the end, the same again" cmp "$t/q-0.25.dkv" "$t/k-0.25.dkv"
    rm "$t/k-0.5.dkv"
    refused "train: a pattern gone, and its steps taken" 1 \
        "k-0.5.dkv is missing, and $t/state is past it; bring it back, or remove the state to start anew" \
        long -o "$t/k.dkv" --resume "$t/state"
    for bent in "0 -1" "0 2" "1 2" "1 26"; do # which ratio, of 2; steps, 3 .. 25 as it is the second
        # shellcheck disable=SC2086
        bend "$t/state" $bent "$t/bent"
        refused "train: a state with $bent" 1 "or damaged" long -o "$t/x" --resume "$t/bent"
    done
    refused "train: another run's state" 1 "other settings" train --rho 0.25 -o "$t/x" --resume "$t/state"
    head -c 100 "$t/state" > "$t/cut"
    refused "train: a cut state" 1 "remove it to start anew" long -o "$t/x" --resume "$t/cut"
    refused "train: a state that is none" 1 "is not the state" train --rho 0.25 -o "$t/x" --resume README.md

    holds "train: without scores" "$DKV" train -m "$M" --ctx 480 --bin-width 96 --sink 32 --recent 64 --needles 2 \
        --steps 1,1 --anneal 0,0 --rounds 1 --rho 0.25 -o "$t/blind.dkv"
    equal "train: which has bins as told" "$(about "$t/blind.dkv" cells bins bin_width sink recent)" "4 4 96 32 64"
    holds "train: the reference recipe" train --recipe reference --rho 0.25 -o "$t/ref.dkv"
    equal "train: which is logical" "$(about "$t/ref.dkv" budget ones rho tool)" \
        "logical 8 0.25 $("$DKV" --version) train --recipe reference"
    refused "train: one file for both" 2 "name the same file" train --rho 0.25 -o "$t/x" --resume "$t/./x"
    refused "train: over its scores" 2 "name the same file" train --rho 0.25 -o "$t/s.dks"
    mkdir "$t/way.dkv.tmp"
    refused "train: a folder in the way" 1 "way.dkv.tmp is in the way" train --rho 0.25 -o "$t/way.dkv"
    refused "train: a slope beyond numbers" 1 "lower --power or --lambda" train --rho 0.1 -o "$t/x" --power 64 --anneal 0,0
    ln -s nothing.dkv "$t/link.dkv"
    holds "train: a link to what is not there" train --rho 0.25 -o "$t/link.dkv" --steps 0,0 --anneal 0,0
    holds "train: which is then" test -f "$t/nothing.dkv"
    holds "train: query heads, cells" train --gates query --rho 0.25 -o "$t/query.dkv"
    equal "train: whole groups" "$(about "$t/query.dkv" budget cells ones)" "physical 4 8"
    holds "train: heads only" train --head-only --rho 0.4 -o "$t/head.dkv"
    equal "train: a head, and two bins of another" "$(about "$t/head.dkv" cells rho)" "6 0.4"
    "$DKV" pattern --kind head-only --match "$t/head.dkv" -o "$t/x.dkv" > /dev/null
    bits() { tail -c +257 "$1" | head -c -4 | od -An -tx1; }
    equal "train: heads only are whole heads" "$(bits "$t/head.dkv")" "$(bits "$t/x.dkv")"
    cp "$M" "$t/broken.gguf"
    printf '\0\0\300\177' | dd of="$t/broken.gguf" bs=1 seek=$(($(wc -c < "$M") - 4)) conv=notrunc 2> /dev/null # NaN
    refused "train: no number" 1 "dkv: step 1: the loss is" "$DKV" train -m "$t/broken.gguf" -s "$t/s.dks" --needles 2 \
        --rho 0.2 -o "$t/x" --resume "$t/never"
    holds "train: and no state of it" [ ! -e "$t/never" ]
    sed 's/random f32/random f64/' "$M" > "$t/named.gguf"
    refused "train: a model of another name" 1 "s.dks holds scores of random f32, not of random f64" \
        "$DKV" train -m "$t/named.gguf" -s "$t/s.dks" --needles 2 --rho 0.2 -o "$t/x"
    "$DKV" pattern --kind random --match "$t/p.dkv" --model other -o "$t/other.dkv" > /dev/null
    refused "pattern: scores of a model of another name" 1 "s.dks holds scores of random f32, not of other" \
        "$DKV" pattern --kind scores-only --match "$t/other.dkv" --scores "$t/s.dks" -o "$t/x"
    refused "train: another model's scores" 1 "is of a model with 2 layers of 4 and 2 heads" \
        "$DKV" train -m "$t/qwen2.gguf" -s "$t/s.dks" --needles 2 --rho 0.2 -o "$t/x"
    train --rho 0.25 --dry-run 2> "$t/err"
    holds "train: --dry-run" grep -q '^train: 16 prefills of 480 tokens.*; 64 questions' "$t/err"
    train --rho 0.25 --dry-run --steps 1,0 --anneal 0,0 2> "$t/err"
    holds "train: --dry-run of fewer steps than turns" grep -q '^train: 4 prefills of 480 tokens.*; 8 questions' "$t/err"
    train --rho 0.25 --dry-run --steps 2000,5000 2> "$t/err" # and 3 steps of the fall; 4 contexts a step
    holds "train: what it takes" adds_up '16 * $5 + 4 * (2000 * $10 + 5003 * $15)'
    train --rho 0.5,0.25 --dry-run --steps 2000,5000 --kv-memory 0.0008 2> "$t/err" # the second from the end of 1
    holds "train: of two ratios, in short memory" adds_up '(2 + 14 * 12003 / 4) * $5 + 4 * (2000 * $10 + 10003 * $15)'

    # ---- score
    score() { "$DKV" score -m "$M" --needles 2 -n 20 "$@"; }
    "$DKV" pattern --kind full --like "$t/p.dkv" -o "$t/full.dkv"
    head -c 1500 README.md > "$t/text"
    holds "score" score -p "$t/p.dkv,$t/full.dkv" --controls --scores "$t/s.dks" --text "$t/text"
    cp "$t/out" "$t/table"
    equal "score: a row each, all, num, word and perplexity" "$(grep -c '^p.dkv ' "$t/table")" 39
    equal "score: controls beside their patterns" "$(sed -n 's/^\(.*\) random .* \(.*dkv\)$/\1 \2/p' "$t/table" | xargs)" "p.dkv p.dkv full.dkv full.dkv"
    holds "score: everything kept is dense" sh -c \
        "grep '^full.dkv  ' '$t/table' | head -3 | grep -c '+0.000 ( *+0.000.. *+0.000) .* 0.000$' | grep -qx 3"
    ratios() { sed -n 's/.*"physical_ratio":[[:space:]]*\(.*\),/\1/p' "$1" | sort -u | xargs; }
    score -p "$t/query.dkv" --controls --scores "$t/s.dks" --json > "$t/j"
    equal "score: dense, and controls that keep as much" "$(ratios "$t/j")" "0.25 1"
    "$DKV" pattern --kind mask --mask /dev/stdin --like "$t/p.dkv" -o "$t/far.dkv" <<'EOF'
0 0 1001
0 1 0101
1 0 0001
1 1 0011
EOF
    score -p "$t/far.dkv" --controls --scores "$t/s.dks" --ctx 384 --json > "$t/j"
    equal "score: nor do they with fewer bins" "$(ratios "$t/j" | cut -c1-6) $(grep -c '"cells":[[:space:]]*3,' "$t/j")" "0.25 1 8"
    score -p "$t/p.dkv" --json > "$t/j"
    equal "score: methods" "$(sed -n 's/.*"name":[[:space:]]*"\(.*\)",/\1/p' "$t/j" | xargs)" "dense p.dkv"
    equal "score: questions" "$(key "$t/j" questions | xargs)" "32 32 16 16 8 8 16 32 16 16 8 8 16"
    equal "score: lengths of the pattern" "$(key "$t/j" context_tokens)" 480
    score -p "$t/p.dkv" --json > "$t/j2"
    holds "score: the same again" cmp "$t/j" "$t/j2"
    score -p "$t/p.dkv" --split report --json > "$t/j2"
    holds "score: another split, other questions" [ "$(key "$t/j" data_hash)" != "$(key "$t/j2" data_hash)" ]
    refused "score: another model's pattern" 1 "kv20.dkv is for 30 layers" \
        "$DKV" score -m "$M" --ctx 480 -p examples/patterns/smollm2-135m-kv20.dkv --bin-width 96 --sink 32 --recent 64
    score -p "$t/full.dkv,$t/p.dkv,$t/query.dkv" --json > "$t/j2" # the last two keep as many cells
    equal "score: beside the first of as many cells" "$(key "$t/j2" pattern | xargs)" "full.dkv p.dkv"
    mkdir "$t/a" && cp "$t/p.dkv" "$t/a"
    score -p "$t/p.dkv,$t/a/p.dkv" --json > "$t/j2"
    equal "score: files of one name" "$(key "$t/j2" name | xargs)" "dense $t/p.dkv $t/a/p.dkv"
    score -p "$t/p.dkv" --recent 160 --json > "$t/j2"
    equal "score: as much as the pattern reaches" "$(key "$t/j2" context_tokens)" 480
    refused "score: less than a bin" 1 "reaches 480 tokens; sink, recent and one bin are 528" score -p "$t/p.dkv" --recent 400
    refused "score: an empty name" 2 "a comma without a name" score -p "$t/p.dkv,"
    refused "score: beyond the pattern" 1 "p.dkv reaches 480 tokens, not 576" score -p "$t/p.dkv" --ctx 576
    "$DKV" pattern --kind full --like "$M" -o "$t/all.dkv"
    refused "score: a pattern of all that the model takes" 1 "takes 2048 tokens; at most --ctx 1792" \
        "$DKV" score -m "$M" -p "$t/all.dkv"
    # windows of 512 tokens, here bytes: capitals merge with nothing
    sed 's/add_bos_token\(....\)\x00/add_bos_token\1\x01/' "$M" > "$t/bos.gguf"
    window() { # window FROM BYTES: ln of the perplexity of that piece of a text
        tr a-z A-Z < README.md | tr -cd 'A-Z .' | tail -c +$1 | head -c $2 > "$t/text"
        "$DKV" score -m "$t/bos.gguf" --needles 2 -n 1 -p "$t/p.dkv" --text "$t/text" --json > "$t/j"
        sed -n 's/.*"perplexity":[[:space:]]*\(.*\),/\1/p' "$t/j" | awk 'NR == 2 {printf "%.9f", log($1)}'
    }
    equal "score: every window of a text begins with BOS" "$(window 1 1503)" \
        "$(echo "$(window 1 991) $(window 513 991)" | awk '{printf "%.9f", ($1 + $2) / 2}')"
    holds "score: which matters" [ "$(window 1 991)" != "$(M=$t/f32.gguf; cp "$M" "$t/bos.gguf"; window 1 991)" ]
    echo "Too short." > "$t/short"
    refused "score: a short text" 1 "--text needs more than 480" score -p "$t/p.dkv" --text "$t/short"
else
    skip "probe, train, score" "no python3"
fi

echo "1..$((passed + failed + skipped))"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
