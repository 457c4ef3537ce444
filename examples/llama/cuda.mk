# cuda.mk: the engine on a GPU. build/dkv-cuda is dkv with --device cuda: its objects, and two more.
CUDA_LIB = $(patsubst %/bin/nvcc,%/lib64,$(realpath $(NVCC)))
DEVICE   = $B/o/llama/device_cuda.o $C/distance_kv_cuda.o
DEVLIBS  = -L$(CUDA_LIB) -Wl,-rpath,/usr/local/cuda/lib64:$(CUDA_LIB) -lcublas -lcudart_static -lrt -ldl -lstdc++

cuda: build/dkv-cuda

$B/o/llama/device_cuda.o: examples/llama/device_cuda.cu $(wildcard examples/llama/*.h) distance_kv.h | nvcc
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -Xcompiler -Wall,-Wextra,-Wshadow $(if $(filter 1,$(werror)),-Werror all-warnings) -c $< -o $@

$B/dkv-cuda: $(DKV) $(LLAMA) $B/dkv.o $(DEVICE)
	$(CC) $(CFLAGS) $^ -o $@ $(LIBS) $(DEVLIBS)

build/test_model_cuda: tests/test_model_cuda.c $(LLAMA) $B/dkv.o $(DEVICE)
	$(CC) $(CFLAGS) $^ -o $@ -lcmocka $(LIBS) $(DEVLIBS)

# For a machine with a GPU and the CUDA toolkit but without the packages; tests/cuda_model.sh runs it there.
STATIC = $(subst -lpcre2-8,-l:libpcre2-8.a,$(subst -lopenblas,-l:libopenblas.a,$(LIBS)))
bundle-cuda: build/bundle_cuda.tar.xz
build/bundle_cuda.tar.xz: tests/test_model_cuda.c $(DKV) $(LLAMA) $B/dkv.o $(DEVICE)
	@mkdir -p build/bundle_cuda/lib
	$(CC) $(CFLAGS) -s $(filter %.o,$^) -o build/bundle_cuda/dkv-cuda $(STATIC) $(DEVLIBS)
	$(CC) $(CFLAGS) -s $< $(LLAMA) $B/dkv.o $(DEVICE) -o build/bundle_cuda/test_model_cuda -lcmocka $(STATIC) $(DEVLIBS)
	cp -L $$(for l in libcjson.so.1 libcmocka.so.0 libgomp.so.1; do $(CC) -print-file-name=$$l; done) build/bundle_cuda/lib
	tar -C build -cf - bundle_cuda | xz -T1 -1 >$@

.PHONY: bundle-cuda
