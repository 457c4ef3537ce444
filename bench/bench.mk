# bench.mk: the benches. Their peers are built apart, by `make peers`; without them the rows say so.
PEERS ?= build/peers
GGML   = $(wildcard $(PEERS)/llama-cpp-build/bin/libggml-cpu.so)
ifneq ($(GGML),)
GGML_CFLAGS = -DBENCH_GGML -isystem $(PEERS)/llama-cpp/vendor/llama.cpp/ggml/include
GGML_LIBS   = -L$(dir $(GGML)) -Wl,-rpath,$(abspath $(dir $(GGML))) -lggml-cpu -lggml-base
endif
BENCH = $(addprefix $B/o/bench/,bench_cpu.o peer_blas.o peer_ggml.o peer_torch.o)

bench: build/bench_cpu build/dkv
	@echo "build/bench_cpu [--quick] [--json FILE]     attention against its limits, ggml, OpenBLAS and torch; --help"
	@echo "bench/vs_llama_cpp.sh                       dkv run against llama-bench"

$B/o/bench/%.o: bench/%.c $(GGML) | build/deps
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(GGML_CFLAGS) -MMD -MP -c $< -o $@

$B/bench_cpu: $(BENCH) $B/dkv.o
	$(CC) $(CFLAGS) $^ -o $@ $(GGML_LIBS) $(LIBS)

.PHONY: bench
