#!/bin/sh
# lint.sh: what a compiler does not check. Speaks TAP.
cd "$(dirname "$0")/.." || exit 1
n=0 failed=0
verdict() { # verdict NAME COMPLAINTS: passes when there are none
    n=$((n + 1))
    if [ -z "$2" ]; then echo "ok $n - lint: $1"; else echo "not ok $n - lint: $1"; echo "$2" | head -10; failed=1; fi
}
sources=$(git ls-files '*.c' '*.h' '*.cu' '*.sh' '*.py' Makefile README.md)
code=$(git ls-files '*.c' '*.h' '*.cu')

verdict "lines are at most 120 columns" "$(awk 'length > 120 {print FILENAME ":" FNR ": " length " columns"}' $code)"
verdict "no tabs in code, no trailing blanks" "$(grep -nP '\t' $code; grep -nE ' +$' $sources)"
verdict "README has at most 200 lines" "$(awk 'END {if (NR > 200) print NR " lines"}' README.md)"

# A section of the header may call only what stands above it: no public function before the section that defines it.
verdict "header sections call forward only" "$(awk '
    /^   \[[A-Z]+\] / && implementation {tag = $1}
    /^#ifdef DISTANCE_KV_IMPLEMENTATION/ {implementation = 1}
    implementation && /^DKV_API .*\) \{/ {
        line = $0; sub(/\(.*/, "", line); sub(/.*[ *]/, "", line); defined[line] = NR
    }
    implementation {text[NR] = $0}
    END {
        for (i in text) for (name in defined)
            if (defined[name] > i + 0 && text[i] ~ ("[^_a-z]" name "\\(") && text[i] !~ /^(DKV_API|   )/)
                if (text[i] !~ /^ *(\/\*|\*)/) print "distance_kv.h:" i ": calls " name ", defined at " defined[name]
    }' distance_kv.h)"

verdict "no paths or names of a workplace" "$(grep -nE '/work/|/root/|\.library' $sources | grep -v '^tests/lint.sh')"
verdict "no skipped or empty test" "$(grep -nE 'assert_true\(1\)|assert_true\(true\)|#if 0' $code)"
echo "1..$n"
exit $failed
