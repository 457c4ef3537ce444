#!/bin/sh
# cuda_model.sh: on a machine with a GPU, and without building anything: the engine's tests, then dkv run on the GPU and
# on the CPU over the demo's text. Unpacks build/bundle_cuda.tar.xz (make bundle-cuda) if build/bundle_cuda is not there.
#
#   MODEL   (build/model/SmolLM2-135M-Instruct.Q4_1.gguf)
#   TOKENS  length of the context (7900)
#   DEVICES what to run dkv on ("cuda cpu")
cd "$(dirname "$0")/.." || exit 1
export MODEL="${MODEL:-build/model/SmolLM2-135M-Instruct.Q4_1.gguf}" TOKENS="${TOKENS:-7900}" DKV=build/bundle_cuda/dkv-cuda
[ -d build/bundle_cuda ] || tar -xJf build/bundle_cuda.tar.xz -C build || exit 1
export LD_LIBRARY_PATH="build/bundle_cuda/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
failed=0

VERBOSE=1 sh tests/run.sh build/bundle_cuda/test_model_cuda || failed=1
[ -r "$MODEL" ] || { echo "no $MODEL: dkv run was left out"; exit $failed; }
run() { echo; echo "==== dkv run $1"; shift; "$@" || failed=1; }
for device in ${DEVICES:-cuda cpu}; do
    run "--device $device" sh examples/dkv/demo.sh --device "$device"
    run "--device $device, 256 tokens from one cache" "$DKV" run -m "$MODEL" -p examples/patterns/smollm2-135m-kv20.dkv \
        -c build/demo.txt -q "Tell me a long story." --ctx "$TOKENS" -n 256 --json --device "$device"
    for type in f16 i8 fp8; do
        [ "$device" = cpu ] || run "--device cuda --type $type" sh examples/dkv/demo.sh --device cuda --type $type
    done
done
exit $failed
