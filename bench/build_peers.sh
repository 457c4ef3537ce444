#!/bin/sh
# Builds llama.cpp, the CPU peer of the benches and the oracle of tests/logits_oracle.py, from the PyPI sdist of
# llama-cpp-python: libllama and llama-bench for exactly this host's instruction sets. Cached: a second run does nothing.
#
#   PEERS=build/peers JOBS=2 bench/build_peers.sh
#
# Leaves $PEERS/llama-cpp (the sdist), $PEERS/llama-cpp-build/bin (libraries, llama-bench) and $PEERS/bin/llama_logits.
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

for tool in python3 cmake c++ sha256sum; do
    command -v $tool >/dev/null || { echo "build_peers: $tool is missing: apt-get install python3-pip cmake g++" >&2; exit 1; }
done

[ -f "$sdist" ] || python3 -m pip download -q --no-deps --no-binary :all: -d "$PEERS" llama-cpp-python==$VERSION
echo "$SHA256  $sdist" | sha256sum -c --quiet || { echo "build_peers: $sdist is damaged: delete it" >&2; exit 1; }
if [ ! -d "$tree" ]; then
    rm -rf "$tree.part" && mkdir "$tree.part"
    tar xzf "$sdist" --strip-components=1 -C "$tree.part"
    mv "$tree.part" "$tree"
fi

# GGML_NATIVE would add AMX where the CPU lists it, and ggml's AMX path dies with SIGILL at its first tile instruction on
# hosts whose kernel has not granted the tiles. Every other instruction set is asked for by name.
has() { grep -m1 '^flags' /proc/cpuinfo | grep -qw "$1" && echo ON || echo OFF; }
flags="-DGGML_AVX=$(has avx) -DGGML_AVX2=$(has avx2) -DGGML_FMA=$(has fma) -DGGML_F16C=$(has f16c) -DGGML_BMI2=$(has bmi2)
 -DGGML_AVX512=$(has avx512f) -DGGML_AVX512_VBMI=$(has avx512vbmi) -DGGML_AVX512_VNNI=$(has avx512_vnni)
 -DGGML_AVX512_BF16=$(has avx512_bf16)"
if [ "$(cat "$out/flags" 2>/dev/null)" != "$flags" ]; then
    # shellcheck disable=SC2086  # $flags is a list
    cmake -S "$tree/vendor/llama.cpp" -B "$out" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF $flags \
        -DGGML_OPENMP=ON -DGGML_CCACHE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF >"$PEERS/cmake.log" 2>&1 || { tail -20 "$PEERS/cmake.log" >&2; exit 1; }
    echo "$flags" >"$out/flags"
fi
cmake --build "$out" -j "$JOBS" --target llama llama-bench >"$PEERS/build.log" 2>&1 || { tail -20 "$PEERS/build.log" >&2; exit 1; }
echo "build_peers: $out/bin/llama-bench ($(echo $flags | grep -o '[A-Z0-9_]*=ON' | cut -d= -f1 | tr '\n' ' '))"
