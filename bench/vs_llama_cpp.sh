#!/bin/sh
# vs_llama_cpp.sh: dkv run against llama.cpp's llama-bench, tokens per second on the same model, in one run: prefill of a
# whole context and decoding behind it. llama.cpp with and without flash attention; ours dense, then with random patterns
# of these physical ratios (what they keep does not matter for speed). Contenders take turns; medians of ROUNDS.
#
#   MODEL=build/model/SmolLM2-135M-Instruct.Q4_1.gguf DEPTHS="0 2048 7600" RATIOS="0.5 0.3 0.2" ROUNDS=3 THREADS=$(nproc)
#   DKV=build/dkv PEERS=build/peers CONTEXT=some-long-text.txt
set -eu
cd "$(dirname "$0")/.."
MODEL=${MODEL:-build/model/SmolLM2-135M-Instruct.Q4_1.gguf}
DEPTHS=${DEPTHS:-0 2048 7600}
RATIOS=${RATIOS:-0.5 0.3 0.2}
ROUNDS=${ROUNDS:-3}
THREADS=${THREADS:-$(nproc)}
DKV=${DKV:-build/dkv}
PEERS=${PEERS:-build/peers}
LLAMA=$PEERS/llama-cpp-build/bin/llama-bench
TOKENS=64 # decoded
SHORT=512 # prefill at depth 0

die() { echo "vs_llama_cpp: $*" >&2; exit 1; }
[ -x "$DKV" ] || die "no $DKV: run make"
[ -r "$MODEL" ] || die "no $MODEL: run make model"
[ -x "$LLAMA" ] || die "no $LLAMA: run make peers"
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
cat "${CONTEXT:-/usr/share/common-licenses/GPL-3}" ${CONTEXT:+/dev/null} /usr/share/common-licenses/LGPL-2.1 |
    tr -s ' \t\n\f' ' ' >"$t/context"

for ratio in 1 $RATIOS; do
    "$DKV" pattern --kind random --like "$MODEL" --ctx 8192 --physical "$ratio" -o "$t/$ratio.dkv" >/dev/null
done

# llama FA ARGUMENTS...: tokens per second
llama() {
    fa=$1
    shift
    "$LLAMA" -m "$MODEL" -t "$THREADS" -fa "$fa" -r 1 -o jsonl "$@" 2>"$t/err" | sed -n 's/.*"avg_ts": \([0-9.]*\).*/\1/p'
}

# ours RATIO CONTEXT KEY: a number of the JSON of a run
ours() { sed -n "s/^[[:space:]]*\"$3\":[[:space:]]*\([0-9.]*\),*$/\1/p" "$t/$1.$2.json"; }

# note WORK DEPTH CONTENDER VALUE
note() {
    [ -n "$4" ] || { cat "$t/err" >&2; die "$3 did not $1 at depth $2"; }
    echo "$4" >>"$t/$1.$2.$3"
}

run_ours() { # RATIO CONTEXT TOKENS
    "$DKV" run -m "$MODEL" -p "$t/$1.dkv" -c "$t/context" -q "The licence" --template raw --ctx "$2" -n "$3" -t "$THREADS" \
        --ignore-eos --json >"$t/$1.$2.json" 2>"$t/err" || { cat "$t/err" >&2; die "dkv run failed"; }
    [ "$(ours "$1" "$2" context_tokens)" = "$2" ] || die "the text is shorter than $2 tokens"
}

for round in $(seq "$ROUNDS"); do
    for depth in $DEPTHS; do
        context=$depth
        [ "$depth" -gt 0 ] || context=$SHORT
        for fa in off on; do
            note prefill "$depth" "llama-$fa" "$(llama $fa -p "$context" -n 0)"
            note decode "$depth" "llama-$fa" "$(llama $fa -p 0 -n $TOKENS -d "$depth")"
        done
        for ratio in 1 $RATIOS; do
            run_ours "$ratio" "$context" $TOKENS
            note prefill "$depth" "$ratio" "$(ours "$ratio" "$context" prefill_s | awk -v n="$context" '{print n / $1}')"
            [ "$depth" -gt 0 ] || { context=1; run_ours "$ratio" 1 $TOKENS; }
            note decode "$depth" "$ratio" "$(ours "$ratio" "$context" decode_tok_s)"
            [ "$depth" -gt 0 ] || context=$SHORT
        done
        echo "round $round of $ROUNDS, depth $depth" >&2
    done
done

# median WORK DEPTH CONTENDER
median() { sort -g "$t/$1.$2.$3" | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

grep -m1 '^model name' /proc/cpuinfo | sed 's/.*: //' | tr '\n' ' '
echo "$THREADS threads, $("$DKV" --version), $("$LLAMA" --version 2>&1 | head -1), $(basename "$MODEL"), median of $ROUNDS"
printf '%-16s %9s %9s' "tokens/s" "llama.cpp" "with fa"
printf ' %9s  times' dense
for ratio in $RATIOS; do printf ' %9s  times' "$ratio"; done
echo "   (times: llama.cpp's better mode)"
for work in prefill decode; do
    for depth in $DEPTHS; do
        off=$(median $work "$depth" llama-off) on=$(median $work "$depth" llama-on)
        printf '%-16s %9.1f %9.1f' "$work $depth" "$off" "$on"
        for ratio in 1 $RATIOS; do
            median $work "$depth" "$ratio" | awk -v a="$off" -v b="$on" '{printf " %9.1f %5.2fx", $1, $1 / (a > b ? a : b)}'
        done
        echo
    done
done
