#!/bin/sh
# demo.sh: a long real text with two facts planted in it, a question about one of them, and the answers from the dense
# cache, from the compressed one, and from a streaming cache of the same size. `make run` calls it.
#
#   DKV       the tool                          (build/dkv)
#   MODEL     a GGUF model                      (build/model/SmolLM2-135M-Instruct.Q4_1.gguf)
#   PATTERN   its pattern                       (examples/patterns/smollm2-135m-kv20.dkv)
#   TOKENS    length of the context             (7900; 4000 where the CPU has no AVX-512)
#   CONTEXT   a text file instead of the demo's
#   QUESTION  what to ask
set -eu
cd "$(dirname "$0")/../.."

if grep -qw avx512f /proc/cpuinfo; then tokens=7900; else tokens=4000; fi
DKV=${DKV:-build/dkv}
MODEL=${MODEL:-build/model/SmolLM2-135M-Instruct.Q4_1.gguf}
PATTERN=${PATTERN:-examples/patterns/smollm2-135m-kv20.dkv}
TOKENS=${TOKENS:-$tokens}
QUESTION=${QUESTION:-What is the access code for the north warehouse?}
CODE="The access code for the north warehouse is 482 915."
LOCKER="Marta's locker number at the railway station is 7364."
LICENSES="/usr/share/common-licenses/GPL-3 /usr/share/common-licenses/LGPL-2.1"

# Two licences on one line, somewhat longer than the demo, each fact behind the first sentence that ends at or after its
# place. A token of this text is 4.6 characters; dkv cuts to TOKENS exactly.
plant_facts() {
    awk -v tokens="$TOKENS" -v code="$CODE" -v locker="$LOCKER" '
        function plant(at, fact) {
            at += index(substr(text, at), ". ")
            text = substr(text, 1, at) fact " " substr(text, at + 1)
        }
        { text = text $0 " " }
        END {
            gsub(/[ \t\f]+/, " ", text)
            text = substr(text, 1, 6 * tokens)
            plant(int(0.65 * 4.6 * tokens), locker)
            plant(int(0.50 * 4.6 * tokens), code)
            print text
        }' $LICENSES
}

if [ -z "${CONTEXT:-}" ]; then
    for file in $LICENSES; do
        [ -r "$file" ] || { echo "demo: no $file (Debian's base-files); give CONTEXT=some-long-text.txt" >&2; exit 1; }
    done
    CONTEXT=build/demo.txt
    mkdir -p build
    plant_facts > "$CONTEXT"
    echo "Context:  the GNU GPL-3 and LGPL-2.1 ($CONTEXT), cut to $TOKENS tokens; planted halfway and further on:"
    echo "          \"$CODE\" \"$LOCKER\""
fi
echo "Question: $QUESTION"
echo
exec "$DKV" run -m "$MODEL" -p "$PATTERN" -c "$CONTEXT" -q "$QUESTION" --ctx "$TOKENS" -n 17 --control streaming "$@"
