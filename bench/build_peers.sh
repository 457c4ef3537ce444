#!/bin/sh
# Builds llama.cpp, the CPU peer of the benches and the oracle of tests/logits_oracle.py, from the PyPI sdist of
# llama-cpp-python: libllama and llama-bench for this host's instruction sets. Cached.
#
#   PEERS=build/peers JOBS=2 ISA= bench/build_peers.sh      ISA=avx2: nothing above AVX2, as for PEERS=build/peers-avx2
#
# Leaves $PEERS/llama-cpp (the sdist), $PEERS/llama-cpp-build/bin (llama-bench) and $PEERS/bin/llama_logits.
set -eu
cd "$(dirname "$0")/.."

VERSION=0.3.36
SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
PEERS=${PEERS:-build/peers}
JOBS=${JOBS:-2}
sdist=$PEERS/llama_cpp_python-$VERSION.tar.gz
tree=$PEERS/llama-cpp
out=$PEERS/llama-cpp-build
mkdir -p "$PEERS/bin"

die() { echo "build_peers: $*" >&2; exit 1; }
logged() { log=$1; shift; "$@" >"$log" 2>&1 || { tail -20 "$log" >&2; die "$log has the rest"; }; }

for tool in python3 cmake c++ sha256sum; do
    command -v $tool >/dev/null || die "$tool is missing: apt-get install python3-pip cmake g++"
done

[ -f "$sdist" ] || python3 -m pip download -q --no-deps --no-binary :all: -d "$PEERS" llama-cpp-python==$VERSION
echo "$SHA256  $sdist" | sha256sum -c --quiet || die "$sdist is damaged: delete it"
if [ ! -d "$tree" ]; then
    rm -rf "$tree.part" && mkdir "$tree.part"
    tar xzf "$sdist" --strip-components=1 -C "$tree.part"
    mv "$tree.part" "$tree"
fi

# GGML_NATIVE would add AMX where the CPU lists it, and ggml's AMX path dies with SIGILL at its first tile instruction
# where the process has not asked the kernel for the tiles. Every other instruction set is asked for by name.
flags=
while read -r option flag; do
    grep -m1 '^flags' /proc/cpuinfo | grep -qw "$flag" && on=ON || on=OFF
    case "${ISA:-} $option" in "avx2 AVX512"*) on=OFF ;; esac
    flags="$flags -DGGML_$option=$on"
done <<END
AVX avx
AVX2 avx2
FMA fma
F16C f16c
BMI2 bmi2
AVX512 avx512bw
AVX512_VBMI avx512vbmi
AVX512_VNNI avx512_vnni
AVX512_BF16 avx512_bf16
END
if [ "$(cat "$out/flags" 2>/dev/null)" != "$flags" ]; then
    # shellcheck disable=SC2086  # $flags is a list
    logged "$PEERS/cmake.log" cmake -S "$tree/vendor/llama.cpp" -B "$out" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF \
        $flags -DGGML_OPENMP=ON -DGGML_CCACHE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
    echo "$flags" >"$out/flags"
fi
logged "$PEERS/build.log" cmake --build "$out" -j "$JOBS" --target llama llama-bench
include=$tree/vendor/llama.cpp
logged "$PEERS/cc.log" cc -O2 -I"$include/include" -I"$include/ggml/include" tests/llama_logits.c \
    -o "$PEERS/bin/llama_logits" -L"$out/bin" -Wl,-rpath,"$(cd "$out/bin" && pwd)" -lllama -lggml -lggml-base
echo "build_peers: $out/bin/llama-bench$(echo "$flags" | sed 's/ -DGGML_[A-Z0-9_]*=OFF//g; s/-DGGML_//g; s/=ON//g')"
