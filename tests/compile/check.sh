#!/bin/sh
# Builds the header in every form it promises, with gcc and clang, all warnings as errors; speaks TAP.
cd "$(dirname "$0")" || exit 1
dir=$(mktemp -d) && trap 'rm -rf "$dir"' EXIT
warn="-Wall -Wextra -Wconversion -Wshadow -pedantic -Werror"
n=0 failed=0

check() { # check NAME COMMAND...
    name=$1; n=$((n + 1)); shift
    if "$@" > "$dir/log" 2>&1; then echo "ok $n - compile: $name"
    else echo "not ok $n - compile: $name"; head -20 "$dir/log"; failed=1; fi
}
skip() { n=$((n + 1)); echo "ok $n # SKIP compile: $1"; }
program() { # program COMPILER... : builds and runs
    "$@" -o "$dir/program" -lm && "$dir/program"
}
implementation() { # implementation COMPILER... : one object from the header alone
    "$@" -DDISTANCE_KV_IMPLEMENTATION -c ../../distance_kv.h -o "$dir/dkv.o"
}
prefixed() { ! nm -g --defined-only "$dir/dkv.o" | grep -v ' dkv_'; }
layout() { # the C structs and Python's copies of them
    gcc -std=c11 $warn layout.c -o "$dir/layout" && "$dir/layout" > "$dir/c" &&
        python3 ../../bench/peers.py --layout | diff "$dir/c" -
}
bare() { # bare COMPILER : the undefined names are those of string.h and math.h
    $1 -std=c99 -O1 $warn -c bare.c -o "$dir/bare.o" || return 1
    ! nm -u "$dir/bare.o" | grep -vE ' (bcmp|mem(cpy|set|move|cmp)|strlen|(exp|log|sqrt|tanh|fabs|copysign|fma|rint)f?|_.*)$'
}

for cc in gcc clang; do
    if ! command -v $cc > /dev/null; then skip "$cc"; continue; fi
    for form in "c99 -O0" "c11 -O1" "c17 -O3"; do
        check "$cc $form, implementation" implementation $cc -x c -std=$form $warn
        check "$cc $form, only dkv_ symbols" prefixed
        check "$cc $form, declarations" program $cc -std=$form $warn use.c "$dir/dkv.o"
    done
    check "$cc c++17, declarations" program $cc -x c++ -std=c++17 $warn use.c -x none "$dir/dkv.o" -lstdc++
    check "$cc c++17, implementation" program $cc -x c++ -std=c++17 -O1 $warn -DWITH_IMPLEMENTATION use.c -lstdc++
    check "$cc, two static copies" program $cc -std=c11 -O1 $warn static_a.c static_b.c
    check "$cc, DKV_NO_SIMD" program $cc -std=c99 -O1 $warn -DDKV_NO_SIMD -DWITH_IMPLEMENTATION use.c
    check "$cc, DKV_NO_STDIO, DKV_ASSERT, DKV_API" program $cc -std=c99 -O1 $warn bare.c
    check "$cc, nothing but string.h and math.h" bare $cc
    check "$cc, -fopenmp" implementation $cc -x c -std=c11 -O1 $warn -fopenmp
    check "$cc, -mavx2 -mavx512f for all" implementation $cc -x c -std=c11 -O1 $warn -mavx2 -mfma -mavx512f
    if grep -q avx512f /proc/cpuinfo; then check "$cc, and it runs" program $cc -std=c11 $warn use.c "$dir/dkv.o"
    else skip "$cc, and it runs (no avx512f)"; fi
done
check "structs in bench/peers.py" layout
echo "1..$n"
exit $failed
