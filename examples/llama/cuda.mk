# cuda.mk: the engine on a GPU. build/dkv-cuda is dkv with --device cuda; the same objects, and two more.
NVCC      ?= /usr/local/cuda/bin/nvcc
CUDA_LIB   = $(patsubst %/bin/nvcc,%/lib64,$(NVCC))
CUDA_LIBS  = -L$(CUDA_LIB) -Wl,-rpath,$(CUDA_LIB) -lcublas -lcudart_static -lrt -ldl -lstdc++
NVFLAGS    = -std=c++17 -O3 -gencode arch=compute_80,code=[sm_80,compute_80] -gencode arch=compute_90a,code=sm_90a \
             -Xcompiler -Wall,-Wextra,-Wshadow $(if $(filter 1,$(werror)),-Werror all-warnings)
DEVICE     = $B/o/llama/device_cuda.o $B/distance_kv_cuda.o

cuda: build/dkv-cuda $B/cuda/test_model

$B/o/llama/device_cuda.o: examples/llama/device_cuda.cu $(wildcard examples/llama/*.h) distance_kv.h | build/deps
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -c $< -o $@

$B/distance_kv_cuda.o: distance_kv_cuda.cu distance_kv.h | build/deps
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -c $< -o $@

$B/dkv-cuda: $(DKV) $(LLAMA) $B/dkv.o $(DEVICE)
	$(CC) $(CFLAGS) $^ -o $@ $(LIBS) $(CUDA_LIBS)

$B/cuda/test_model: tests/test_model_cuda.c $(LLAMA) $B/dkv.o $(DEVICE)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $^ -o $@ -lcmocka $(LIBS) $(CUDA_LIBS)

# For a machine that has a GPU and the CUDA toolkit, but none of the packages: tests/cuda_model.sh runs it.
bundle-cuda: build/cuda.tar.xz
STATIC = $(subst -lpcre2-8,-l:libpcre2-8.a,$(subst -lopenblas,-l:libopenblas.a,$(LIBS)))
build/cuda.tar.xz: tests/test_model_cuda.c $(DKV) $(LLAMA) $B/dkv.o $(DEVICE)
	@mkdir -p build/cuda/lib
	$(CC) $(CFLAGS) -s $(filter %.o,$^) -o build/cuda/dkv-cuda $(STATIC) $(CUDA_LIBS)
	$(CC) $(CFLAGS) -s $< $(LLAMA) $B/dkv.o $(DEVICE) -o build/cuda/test_model -lcmocka $(STATIC) $(CUDA_LIBS)
	cp -L $(shell for l in libcjson.so.1 libcmocka.so.0 libgomp.so.1; do $(CC) -print-file-name=$$l; done) build/cuda/lib
	tar -C build -cf - cuda | xz -T1 -1 >$@

.PHONY: cuda bundle-cuda
