#!/bin/sh
# test_readme.sh: every snippet and number of README.md. Speaks TAP.
#   DKV  the tool (build/dkv)
cd "$(dirname "$0")/.." || exit 1
DKV=${DKV:-build/dkv}
t=$(mktemp -d) || exit 1
trap 'rm -rf "$t"' EXIT
n=0 failed=0
holds() { # holds NAME COMMAND...
    name=$1; n=$((n + 1)); shift
    if "$@" >"$t/log" 2>&1; then echo "ok $n - readme: $name"; else echo "not ok $n - readme: $name"; head -20 "$t/log"; failed=1; fi
}
block() { awk -v tag='```'"$1" '$0 == tag {on = 1; next} $0 == "```" {on = 0} on' README.md; }

# The C snippet is the header's usage block, and compiles with the variables that it takes for granted.
block c >"$t/readme.c"
awk '/^   Use \(/ {on = 1; next} /^   DOES NOT/ {on = 0} on' distance_kv.h | sed 's/^       //' | sed '1d;$d' >"$t/header.c"
holds "snippet is the header's" diff "$t/readme.c" "$t/header.c"
{
    echo '#include "distance_kv.h"'
    echo '#include <stdlib.h>'
    echo 'void usage(void *file_bytes, size_t file_size, int64_t T_c, int L, int H, int Hkv, int d, float **K, float **V,'
    echo '    dkv_tensor k, dkv_tensor v, dkv_tensor q, dkv_tensor out, void *workspace, size_t workspace_bytes);'
    echo 'void usage(void *file_bytes, size_t file_size, int64_t T_c, int L, int H, int Hkv, int d, float **K, float **V,'
    echo '    dkv_tensor k, dkv_tensor v, dkv_tensor q, dkv_tensor out, void *workspace, size_t workspace_bytes) {'
    cat "$t/readme.c"
    echo '}'
} >"$t/use.c"
holds "snippet compiles" "${CC:-gcc}" -std=c11 -Wall -Wextra -Werror -I. -c "$t/use.c" -o "$t/use.o"
holds "minimal.c is at most 80 lines and right" sh -c '[ "$(wc -l <examples/minimal.c)" -le 80 ] && '"${CC:-gcc}"' -I. examples/minimal.c -o "$0/m" -lm && "$0/m"' "$t"

# Every line of the shell block runs.
block sh >"$t/commands"
while read -r line; do
    holds "$line" sh -c "$(echo "$line" | sed "s|^build/dkv|$DKV|; s|build/\([a-z]*\)\.\(dkv\|png\)|$t/\1.\2|g")" </dev/null
done <"$t/commands"
[ -s "$t/commands" ] || { n=$((n + 1)); failed=1; echo "not ok $n - readme: has a shell block"; }

# The table's numbers are those of the command that is named above it.
info=$("$DKV" info examples/patterns/smollm2-135m-kv20.dkv --ctx 7900 --json | tr -d '\t' |
    awk -F: '{gsub(/,/, "", $2); v[$1] = $2} END {printf "| %.3f | %.3f | %.3f | %.1f MB | %.1f MB |", v["\"logical_ratio\""],
        v["\"physical_ratio\""], v["\"physical_ratio_total\""], v["\"kv_bytes_dense\""] / 1e6, v["\"kv_bytes_packed\""] / 1e6}')
holds "memory table" grep -qF "$info" README.md
holds "954 of 4,770 cells" sh -c "$DKV"' info examples/patterns/smollm2-135m-kv20.dkv | grep -q "954 of 4770" && grep -q "954 of 4,770" README.md'
holds "make targets exist" sh -c 'for x in $(grep -o "^| .make[ a-z]*" README.md | sed "s/^| .make//"); do make -n $x >/dev/null || exit 1; done'
holds "files exist" sh -c 'for x in $(grep -o "](\([^)]*\))" README.md | tr -d "]()"); do [ -e "$x" ] || { echo "$x"; exit 1; }; done'
echo "1..$n"
exit $failed
