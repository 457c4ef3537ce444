/* bench_cuda: the GPU backend against this GPU's own limits, in one run.

   row of the table -> buffers of random normal numbers, as many layers as exceed the L2 cache three times
     -> checked against double precision, which reads the source and not what was packed from it
     -> one graph that launches every layer once, replayed; median, least and most of a launch
   Limits are measured in the same process: copy and read bandwidth, a bf16 matrix product through cuBLAS, and for
   decode a kernel in a graph of the same form that only reads the addresses which attention has to read. */
#include "../distance_kv.h"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <getopt.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

static const int64_t K = 1024, MB = 1 << 20;

/* What stops a row stops that row only. */
struct Failure { std::string why; };
#define FAIL_IF(bad, ...) do { \
    char t_[256]; \
    if (bad) { snprintf(t_, sizeof t_, __VA_ARGS__); throw Failure{t_}; } } while (0)
#define CUDA(call) do { cudaError_t e_ = (call); FAIL_IF(e_, "%s: %s", #call, cudaGetErrorString(e_)); } while (0)
#define DKV(call) do { dkv_result r_ = (call); FAIL_IF(r_, "%s: %s", #call, dkv_result_string(r_)); } while (0)

static cudaStream_t   stream;
static cudaDeviceProp device;
static FILE          *json;
static const char    *json_comma = "";

/* ---- memory: of one row, freed together ------------------------------------ */

struct Memory {
    std::vector<void *> blocks;
    ~Memory() { for (void *p : blocks) cudaFree(p); }
    template <class T = char> T *get(int64_t n) {
        void *p = NULL;
        CUDA(cudaMalloc(&p, (size_t)(n * (int64_t)sizeof(T)) + 256)); /* readers may look ahead */
        blocks.push_back(p);
        return (T *)p;
    }
    template <class T> T *copy(const std::vector<T> &x) {
        T *p = get<T>((int64_t)x.size());
        CUDA(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
        return p;
    }
};

/* ---- random normal numbers -------------------------------------------------- */

__device__ float load(const void *p, dkv_type type, int64_t i) {
    return type == DKV_F32 ? ((const float *)p)[i] : type == DKV_F16 ? __half2float(((const __half *)p)[i])
                                                   : __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}

__global__ void fill_normal(void *x, dkv_type type, int64_t n, uint64_t seed) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = (seed << 40) + (uint64_t)i * 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z = (z ^ z >> 27) * 0x94d049bb133111ebu, z ^= z >> 31;
        int   sum = (int)((z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48)) - 131070;
        float v = (float)sum * (1.7320508f / 65536);
        if (type == DKV_F32) ((float *)x)[i] = v;
        else if (type == DKV_F16) ((__half *)x)[i] = __float2half_rn(v);
        else ((__nv_bfloat16 *)x)[i] = __float2bfloat16_rn(v);
    }
}

static void *normal(Memory &m, dkv_type type, int64_t n) {
    static uint64_t seed;
    void *x = m.get(n * dkv_type_bytes(type));
    fill_normal<<<4 * device.multiProcessorCount, 512, 0, stream>>>(x, type, n, ++seed);
    CUDA(cudaGetLastError());
    return x;
}

/* ---- time ------------------------------------------------------------------------ */

struct Times { double median, least, most; int runs; }; /* milliseconds of one launch */

/* launch(layer) for every layer makes a graph; it is replayed until 20 runs and 0.2 s are over, 2 s at most. */
static Times time_graph(int layers, const std::function<void(int)> &launch) {
    cudaGraph_t         graph;
    cudaGraphExec_t     exec;
    cudaEvent_t         begin, end;
    std::vector<double> ms;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
        for (int i = 0; i < layers; i++) launch(i);
    } catch (Failure &) {
        cudaStreamEndCapture(stream, &graph);
        cudaGetLastError();
        throw;
    }
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    double total = 0;
    for (int i = -3; i < 1000 && (total < 2000 || (int)ms.size() < 3) && ((int)ms.size() < 20 || total < 200); i++) {
        float t;
        CUDA(cudaEventRecord(begin, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaEventRecord(end, stream));
        CUDA(cudaEventSynchronize(end));
        CUDA(cudaEventElapsedTime(&t, begin, end));
        if (i < 0 && t < 300) continue; /* warm-up, unless it is long */
        total += t;
        ms.push_back((double)t / layers);
    }
    cudaEventDestroy(begin), cudaEventDestroy(end), cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
    std::sort(ms.begin(), ms.end());
    return Times{ms[ms.size() / 2], ms.front(), ms.back(), (int)ms.size()};
}

/* ---- limits ---------------------------------------------------------------------------- */

struct Range { const uint4 *at; int64_t n; }; /* n 16-byte words */
static const int THREADS = 256, LOADS = 8; /* in flight a thread */
static const int64_t CHUNK = THREADS * LOADS * 16;

/* A CTA for every chunk: the hardware evens them out. */
__global__ void __launch_bounds__(THREADS) read_ranges(const Range *ranges, uint32_t *never) {
    const Range r = ranges[blockIdx.x];
    uint4       v[LOADS];
    uint32_t    x = 0;
#pragma unroll
    for (int u = 0, i = threadIdx.x; u < LOADS; u++, i += THREADS) v[u] = i < r.n ? __ldcs(r.at + i) : uint4();
#pragma unroll
    for (int u = 0; u < LOADS; u++) x ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    if (x == 0x9e3779b9 && never) *never = x; /* so that the loads stay */
}

static void add_range(std::vector<Range> &ranges, const void *at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CHUNK)
        ranges.push_back({(const uint4 *)((const char *)at + i), std::min(CHUNK, bytes - i) / 16});
}

static void launch_read(const Range *ranges, size_t n) {
    read_ranges<<<(unsigned)n, THREADS, 0, stream>>>(ranges, NULL);
    CUDA(cudaGetLastError());
}

/* The same copying, all of n words: where the runtime's copy takes an engine, this is the faster one. */
__global__ void __launch_bounds__(THREADS) copy_words(uint4 *to, const uint4 *from, int64_t n) {
    const int64_t first = (int64_t)blockIdx.x * THREADS * LOADS + threadIdx.x;
    uint4         v[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; u++) v[u] = __ldcs(from + min(first + u * THREADS, n - 1));
#pragma unroll
    for (int u = 0; u < LOADS; u++)
        if (first + u * THREADS < n) __stcs(to + first + u * THREADS, v[u]);
}

static struct { double copy, read, gemm; const char *gemm_why; } limit; /* bytes (copied ones twice), flops a second */

/* cuBLAS is looked for when the program runs: it is a library of half a gigabyte. */
static const char *gemm_rate(double *rate) {
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so",
                                        "/usr/local/cuda/lib64/libcublas.so"};
    void *lib = getenv("CUBLAS") ? dlopen(getenv("CUBLAS"), RTLD_NOW) : NULL;
    for (size_t i = 0; i < 4 && !lib; i++) lib = dlopen(names[i], RTLD_NOW);
    if (!lib) return "no libcublas.so: set CUBLAS to its path";
    auto create = (decltype(&cublasCreate_v2))dlsym(lib, "cublasCreate_v2");
    auto set_stream = (decltype(&cublasSetStream_v2))dlsym(lib, "cublasSetStream_v2");
    typedef cublasStatus_t Gemm(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void *,
                                const void *, cudaDataType, int, const void *, cudaDataType, int, const void *, void *,
                                cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);
    auto           gemm = (Gemm *)dlsym(lib, "cublasGemmEx");
    cublasHandle_t handle;
    if (!create || !set_stream || !gemm || create(&handle) || set_stream(handle, stream)) return "cuBLAS does not run";
    const int   n = 8192;
    const float one = 1, zero = 0;
    Memory      m;
    void       *a = normal(m, DKV_BF16, (int64_t)n * n), *b = normal(m, DKV_BF16, (int64_t)n * n);
    void       *c = m.get(2 * (int64_t)n * n);
    auto        product = [&](int) {
        FAIL_IF(gemm(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a, CUDA_R_16BF, n, b, CUDA_R_16BF, n, &zero, c,
                     CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), "cublasGemmEx fails");
    };
    product(0); /* workspaces are allocated outside of the graph */
    CUDA(cudaStreamSynchronize(stream));
    *rate = 2.0 * n * n * n / time_graph(4, product).median * 1e3;
    return NULL;
}

static void measure_limits() {
    Memory             m;
    const int64_t      bytes = 4096 * MB;
    char              *a = (char *)normal(m, DKV_F32, bytes / 4), *b = m.get(bytes);
    std::vector<Range> ranges;
    add_range(ranges, a, bytes);
    const Range *there = m.copy(ranges);
    auto         copy = [&](int) { CUDA(cudaMemcpyAsync(b, a, (size_t)bytes, cudaMemcpyDeviceToDevice, stream)); };
    auto         copy_all = [&](int) {
        copy_words<<<(unsigned)(bytes / CHUNK), THREADS, 0, stream>>>((uint4 *)b, (const uint4 *)a, bytes / 16);
        CUDA(cudaGetLastError());
    };
    limit.copy = 2.0 * (double)bytes / 1e-3 / std::min(time_graph(1, copy).median, time_graph(1, copy_all).median);
    limit.read = (double)bytes / 1e-3 / time_graph(1, [&](int) { launch_read(there, ranges.size()); }).median;
    limit.gemm_why = gemm_rate(&limit.gemm);
}

/* ---- a row -------------------------------------------------------------------------------- */

struct Row {
    std::string name;
    dkv_type    type;
    Times       ours;
    double      bytes, flops, limit_ms, error, read_ms; /* read_ms: of the same addresses; 0: not measured */
    const char *limit_what;
};

static void set_limit(Row &r) {
    const double read = 1e3 * r.bytes / limit.read, math = limit.gemm > 0 ? 1e3 * r.flops / limit.gemm : 0;
    r.limit_ms = std::max(read, math);
    r.limit_what = read >= math ? "read" : "gemm";
}

static void print_head() {
    int runtime = 0, driver = 0, clock = 0, memory_clock = 0;
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver);
    cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, 0);
    cudaDeviceGetAttribute(&memory_clock, cudaDevAttrMemoryClockRate, 0);
    printf("%s, %d multiprocessors, %d MB L2, clocks up to %d and %d MHz\n", device.name, device.multiProcessorCount,
           (int)(device.l2CacheSize / MB), clock / 1000, memory_clock / 1000);
    printf("distance_kv %s, CUDA %d, driver %d, nvcc %d.%d\n", dkv_version(), runtime, driver, __CUDACC_VER_MAJOR__,
           __CUDACC_VER_MINOR__);
    printf("copy %.2f TB/s (read + written), read %.2f TB/s, bf16 product: ", limit.copy / 1e12, limit.read / 1e12);
    if (limit.gemm_why) printf("%s\n", limit.gemm_why);
    else printf("%.0f TF/s\n", limit.gemm / 1e12);
    printf("\n%-40s %-4s %9s %9s %9s %7s %6s %9s %6s %9s %6s %8s\n", "", "", "ours ms", "min", "max", "TB/s", "TF/s",
           "limit ms", "share", "read ms", "x read", "error");
    fflush(stdout);
}

static void report(const Row &r) {
    const double ms = r.ours.median;
    printf("%-40s %-4s %9.4f %9.4f %9.4f %7.3f %6.0f %9.4f %5.0f%%", r.name.c_str(), dkv_type_name(r.type), ms,
           r.ours.least, r.ours.most, r.bytes / ms / 1e9, r.flops / ms / 1e9, r.limit_ms, 100 * r.limit_ms / ms);
    if (r.read_ms > 0) printf(" %9.4f %5.2fx", r.read_ms, r.ours.median / r.read_ms);
    else printf(" %9s %6s", "", "");
    printf(" %8.1e\n", r.error);
    fflush(stdout);
    if (!json) return;
    fprintf(json, "%s{\"case\": \"%s\", \"device\": \"%s\", \"dtype\": \"%s\", \"ours_ms\": %.5f, "
            "\"ours_min_ms\": %.5f, \"ours_max_ms\": %.5f, \"runs\": %d, \"limit_ms\": %.5f, \"limit_what\": \"%s\", "
            "\"peers\": {", json_comma, r.name.c_str(), device.name, dkv_type_name(r.type), ms, r.ours.least,
            r.ours.most, r.ours.runs, r.limit_ms, r.limit_what);
    if (r.read_ms > 0) fprintf(json, "\"read the same addresses\": %.5f", r.read_ms);
    fprintf(json, "}, \"max_err\": %.2e, \"bytes\": %.0f, \"flops\": %.0f}", r.error, r.bytes, r.flops);
    fflush(json);
    json_comma = ",\n";
}

/* ---- attention: the case, its buffers, its reference ----------------------------------------- */

struct Case {
    const char *name;
    dkv_type    type;
    int         B;          /* sequences */
    int64_t     T_c;        /* context that is packed; 0: none */
    double      kept;       /* 1: all of it; else by unequal heads, from 0.2 to 1.8 times as much */
    int64_t     n_tail, N_q;
    int         d = 128, H = 32, Hkv = 8;
};

static dkv_type tail_type(const Case &c) { return c.T_c ? dkv_tail_type(c.type) : c.type; }

/* Which positions head g keeps: sink, recent, and bins of 128 by a hash. The same for every layer and sequence. */
static std::vector<int64_t> kept_positions(const Case &c, int g) {
    const double         share = c.kept < 1 ? c.kept * (0.2 + 1.6 * g / (c.Hkv - 1)) : 1;
    std::vector<int64_t> at;
    for (int64_t i = 0; i < c.T_c; i++) {
        uint32_t h = (uint32_t)((c.T_c - 1 - i) / 128 * c.Hkv + g) * 2654435761u;
        h = (h ^ h >> 15) * 2246822519u, h ^= h >> 13;
        if (i < 128 || i >= c.T_c - 1024 || (double)h < share * 4294967296.0) at.push_back(i);
    }
    return at;
}

struct Plan { std::vector<char> memory; dkv_plan host, dev; std::vector<int64_t> positions, first; };

static void make_plan(Plan &p, const Case &c, Memory &m) {
    std::vector<int64_t> counts;
    p.first = {0};
    for (int g = 0; g < c.Hkv; g++) {
        std::vector<int64_t> at = kept_positions(c, g);
        p.positions.insert(p.positions.end(), at.begin(), at.end());
        counts.push_back((int64_t)at.size());
        p.first.push_back((int64_t)p.positions.size());
    }
    size_t bytes;
    DKV(dkv_plan_from_positions(&p.host, NULL, &bytes, 1, c.Hkv, c.T_c, p.positions.data(), counts.data()));
    p.memory.resize(bytes);
    DKV(dkv_plan_from_positions(&p.host, p.memory.data(), &bytes, 1, c.Hkv, c.T_c, p.positions.data(), counts.data()));
    DKV(dkv_cuda_plan(&p.dev, NULL, &bytes, &p.host, stream));
    DKV(dkv_cuda_plan(&p.dev, m.get((int64_t)bytes), &bytes, &p.host, stream));
    CUDA(cudaStreamSynchronize(stream));
}

static dkv_packed pack(Memory &m, dkv_type type, const Plan &p, int d, const dkv_segment &source) {
    dkv_packed out;
    size_t     bytes;
    DKV(dkv_cuda_pack(&out, NULL, &bytes, type, &p.host, &p.dev, 0, d, d, &source, stream));
    void *mem = m.get((int64_t)bytes);
    DKV(dkv_cuda_pack(&out, mem, &bytes, type, &p.host, &p.dev, 0, d, d, &source, stream));
    return out;
}

/* Weights of one (query, head), a CTA each: exp(scale q . k) of the keys it sees, in double; logits of random normal
   numbers need no maximum. Then the outputs, a thread each. */
struct Reference {
    const void    *q, *k, *v, *tail_k, *tail_v; /* [N_q][H][d]; source [T_c][Hkv][d]; tail likewise */
    const int64_t *positions, *first;
    const int64_t *queries;                     /* [samples / H] */
    dkv_type       x, source;
    int            H, Hkv, d;
    int64_t        n_tail, N_q, most;
    double        *weights, *out;               /* [samples][most], [samples][d] */
};

__global__ void reference(Reference r) {
    const int     h = blockIdx.x % r.H, g = h / (r.H / r.Hkv);
    const int64_t query = r.queries[blockIdx.x / r.H], context = r.first ? r.first[g + 1] - r.first[g] : 0;
    const int64_t n = context + r.n_tail - r.N_q + 1 + query;
    double       *w = r.weights + blockIdx.x * r.most;
    __shared__ double q[256];
    for (int i = threadIdx.x; i < r.d; i += blockDim.x) q[i] = load(r.q, r.x, (query * r.H + h) * r.d + i);
    __syncthreads();
    auto row = [&](int64_t j) {
        return ((j < context ? r.positions[r.first[g] + j] : j - context) * r.Hkv + g) * r.d;
    };
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        double s = 0;
        for (int i = 0; i < r.d; i++)
            s += q[i] * (j < context ? load(r.k, r.source, row(j) + i) : load(r.tail_k, r.x, row(j) + i));
        w[j] = exp(s / sqrt((double)r.d));
    }
    __syncthreads();
    if (threadIdx.x >= r.d) return;
    double sum = 0, o = 0;
    for (int64_t j = 0; j < n; j++) {
        sum += w[j];
        const int64_t at = row(j) + threadIdx.x;
        o += w[j] * (j < context ? load(r.v, r.source, at) : load(r.tail_v, r.x, at));
    }
    r.out[blockIdx.x * r.d + threadIdx.x] = o / sum;
}

/* Greatest error over the greatest output, of the first, middle and last query. What 8 bits leave out is in it. */
static double error_of(const Case &c, Memory &m, Reference r, const void *out) {
    std::vector<int64_t> queries = {0};
    if (c.N_q > 1) queries = {0, c.N_q / 2, c.N_q - 1};
    const int samples = (int)queries.size() * c.H;
    r.queries = m.copy(queries);
    r.weights = m.get<double>(samples * r.most), r.out = m.get<double>(samples * c.d);
    reference<<<samples, 256, 0, stream>>>(r);
    std::vector<double>   want((size_t)(samples * c.d));
    std::vector<uint16_t> got((size_t)(c.H * c.d));
    std::vector<float>    got_f32(got.size());
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(want.data(), r.out, want.size() * 8, cudaMemcpyDeviceToHost));
    double error = 0, greatest = 0;
    for (size_t i = 0; i < queries.size(); i++) {
        const uint16_t *row = (const uint16_t *)out + queries[i] * c.H * c.d;
        CUDA(cudaMemcpy(got.data(), row, got.size() * 2, cudaMemcpyDeviceToHost));
        dkv_convert(got_f32.data(), DKV_F32, got.data(), r.x, (int64_t)got.size());
        for (size_t j = 0; j < got.size(); j++) {
            const double e = std::fabs((double)got_f32[j] - want[i * got.size() + j]);
            if (!(e <= error)) error = e; /* a NaN stays */
            greatest = std::max(greatest, std::fabs(want[i * got.size() + j]));
        }
    }
    return error / greatest;
}

/* bf16 and f16: P and the output are rounded. 8 bits: so are K and V, i8 to 1 in 250 of a channel's largest, fp8 to 1
   in 16 of each number. */
static double allowed(dkv_type type) { return type == DKV_FP8 ? 0.15 : type == DKV_I8 ? 0.06 : 0.02; }

struct Layer {
    std::vector<dkv_packed>    packed;
    std::vector<dkv_attention> a;
    dkv_cuda_work              work;
    std::vector<Range>         reads;
};

static double visible_keys(const Case &c, const Plan &p) { /* summed over query heads and queries */
    const double context = c.T_c ? (double)p.positions.size() / c.Hkv : 0;
    return (double)c.B * c.H * (double)c.N_q * (context + (double)c.n_tail - (double)(c.N_q - 1) / 2);
}

static void add_reads(Layer &y, const Case &c, const dkv_attention &a) {
    if (a.context.packed) {
        const char *at = (const char *)a.context.packed->data;
        for (int side = 0; side < 2; side++)
            for (int g = 0; g < c.Hkv; g++) {
                const int64_t rows = a.context.packed->rows[g], bytes = c.d * dkv_type_bytes(c.type);
                add_range(y.reads, at, rows * bytes);
                at += (rows + 127) / 128 * 128 * bytes;
            }
    }
    for (const dkv_tensor *t : {&a.tail.k, &a.tail.v}) add_range(y.reads, t->data, c.n_tail * t->stride_token);
}

/* All sequences share the source and the tail's numbers, in memory of their own. */
static void run_case(const Case &c) {
    const dkv_type x = tail_type(c);
    Memory         m;
    Plan           p;
    Row            row = {c.name, c.type, {}, 0, 0, 0, 0, 0, ""};
    const int64_t  tail = c.n_tail * c.Hkv * c.d, rows = c.N_q * c.H * c.d;
    dkv_segment    source = {};
    if (c.T_c) {
        make_plan(p, c, m);
        source = dkv_strided(dkv_thd(normal(m, DKV_BF16, c.T_c * c.Hkv * c.d), DKV_BF16, c.Hkv, c.d),
                             dkv_thd(normal(m, DKV_BF16, c.T_c * c.Hkv * c.d), DKV_BF16, c.Hkv, c.d), c.T_c);
    }
    const double packed = (double)p.positions.size() * 2 * c.d * (double)dkv_type_bytes(c.type);
    row.bytes = c.B * (packed + 4.0 * (double)tail);
    row.flops = 4.0 * c.d * visible_keys(c, p);
    const int layers = row.flops > 4e12 ? 1 : row.bytes > 2e9 ? 2 /* else at least 4 launches a graph */
                       : (int)std::min(16.0, std::max(4.0, 1 + 3.0 * device.l2CacheSize / row.bytes));
    row.bytes += c.B * 4.0 * (double)rows; /* q and out */
    set_limit(row);
    std::vector<Layer> layer((size_t)layers);
    size_t             block_bytes = 0, ws_bytes = 0;
    void              *ws = NULL;
    void              *tail_k = normal(m, x, tail), *tail_v = normal(m, x, tail), *q = normal(m, x, rows);
    auto               copy_of = [&](const void *from, int64_t n) {
        void *to = m.get(n * 2);
        CUDA(cudaMemcpyAsync(to, from, (size_t)n * 2, cudaMemcpyDeviceToDevice, stream));
        return to;
    };
    std::vector<int64_t> lengths((size_t)c.B, c.n_tail);
    const int64_t       *lengths_there = m.copy(lengths);
    for (Layer &y : layer) {
        y.packed.resize((size_t)c.B);
        for (int b = 0; b < c.B; b++) {
            if (c.T_c) y.packed[(size_t)b] = pack(m, c.type, p, c.d, source);
            dkv_attention a = {};
            a.H = c.H, a.Hkv = c.Hkv, a.d_k = a.d_v = c.d, a.N_q = c.N_q;
            a.q = dkv_thd(copy_of(q, rows), x, c.H, c.d);
            a.out = dkv_thd(m.get(rows * 2), x, c.H, c.d);
            CUDA(cudaMemsetAsync(a.out.data, 0xff, (size_t)rows * 2, stream));
            if (c.T_c) a.context.packed = &y.packed[(size_t)b];
            a.tail = dkv_strided(dkv_thd(copy_of(tail_k, tail), x, c.Hkv, c.d),
                                 dkv_thd(copy_of(tail_v, tail), x, c.Hkv, c.d), c.n_tail);
            y.a.push_back(a);
            add_reads(y, c, a);
        }
        DKV(dkv_cuda_attend_size(&block_bytes, &ws_bytes, y.a.data(), c.B));
        if (!ws) ws = m.get((int64_t)ws_bytes);
        DKV(dkv_cuda_prepare(&y.work, y.a.data(), c.B, lengths_there, m.get((int64_t)block_bytes), block_bytes, ws,
                             ws_bytes, 0, stream));
    }
    for (Layer &y : layer) DKV(dkv_cuda_attend(&y.work, stream));
    CUDA(cudaStreamSynchronize(stream));
    Reference r = {q, source.k.data, source.v.data, tail_k, tail_v, NULL, NULL, NULL, x, DKV_BF16, c.H, c.Hkv, c.d,
                   c.n_tail, c.N_q, c.T_c + c.n_tail, NULL, NULL};
    if (c.T_c) r.positions = m.copy(p.positions), r.first = m.copy(p.first);
    for (const Layer *y : {&layer.front(), &layer.back()}) /* of the first and last sequence */
        for (const dkv_attention *a : {&y->a.front(), &y->a.back()})
            row.error = std::max(row.error, error_of(c, m, r, a->out.data));
    FAIL_IF(!(row.error <= allowed(c.type)), "wrong: error %.1e", row.error);
    row.ours = time_graph(layers, [&](int i) { DKV(dkv_cuda_attend(&layer[(size_t)i].work, stream)); });
    if (row.limit_what[0] == 'r') {
        std::vector<const Range *> there;
        for (Layer &y : layer) there.push_back(m.copy(y.reads));
        auto read = [&](int i) { launch_read(there[(size_t)i], layer[(size_t)i].reads.size()); };
        row.read_ms = time_graph(layers, read).median;
    }
    report(row);
}

/* ---- packing ------------------------------------------------------------------------------------ */

/* The limit is a copy of as many bytes: each survivor read once and written once. */
static void run_pack(const char *name, dkv_type type, bool head_major) {
    const Case    c = {name, type, 1, 128 * K, 0.4, 0, 1};
    Memory        m;
    Plan          p;
    Row           row = {name, type, {}, 0, 0, 0, 0, 0, "copy"};
    const int64_t n = c.T_c * c.Hkv * c.d;
    const dkv_type from = type == DKV_F16 ? DKV_F16 : DKV_BF16;
    make_plan(p, c, m);
    dkv_tensor t[2];
    for (dkv_tensor &x : t) {
        x = dkv_thd(normal(m, from, n), from, c.Hkv, c.d);
        if (head_major) x.stride_token = c.d * 2, x.stride_head = c.T_c * c.d * 2;
    }
    const dkv_segment source = dkv_strided(t[0], t[1], c.T_c);
    dkv_packed        packed[2];
    size_t            bytes;
    for (dkv_packed &x : packed) x = pack(m, type, p, c.d, source);
    row.bytes = (double)p.positions.size() * 2 * c.d * (2.0 + (double)dkv_type_bytes(type));
    row.limit_ms = 1e3 * row.bytes / limit.copy;
    const int64_t rows = p.host.rows[0]; /* checked: the first head's K, against the source on the host */
    dkv_tensor    k = dkv_thd(m.get(rows * c.Hkv * c.d * 4), DKV_F32, c.Hkv, c.d);
    dkv_tensor    v = dkv_thd(m.get(rows * c.Hkv * c.d * 4), DKV_F32, c.Hkv, c.d);
    DKV(dkv_cuda_unpack(k, v, &packed[1], 0, stream));
    std::vector<float>    got((size_t)(rows * c.Hkv * c.d));
    std::vector<uint16_t> want((size_t)n);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(got.data(), k.data, got.size() * 4, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(want.data(), t[0].data, want.size() * 2, cudaMemcpyDeviceToHost));
    for (int64_t r = 0; r < rows; r++) {
        float x[128];
        dkv_convert(x, DKV_F32, want.data() + p.positions[(size_t)r] * t[0].stride_token / 2, from, c.d);
        for (int j = 0; j < c.d; j++)
            row.error = std::max(row.error, (double)std::fabs(x[j] - got[(size_t)(r * c.Hkv * c.d + j)]));
    }
    FAIL_IF(!(row.error <= (type == DKV_FP8 ? 0.25 : type == DKV_I8 ? 0.02 : 0)), "wrong: error %.1e", row.error);
    row.ours = time_graph(2, [&](int i) {
        dkv_packed out;
        bytes = (size_t)-1 / 2;
        DKV(dkv_cuda_pack(&out, packed[i].data, &bytes, type, &p.host, &p.dev, 0, c.d, c.d, &source, stream));
    });
    report(row);
}

/* ---- memory: layers are made, packed and freed one after another ---------------------------------- */

static void run_memory(const char *name, int64_t T_c) {
    const Case c = {name, DKV_BF16, 1, T_c, 0.4, 0, 1};
    enum { LAYERS = 32 };
    Plan                 one, p;
    std::vector<int64_t> counts, positions;
    size_t               bytes, free_before, free_now, total, least = (size_t)-1;
    {
        Memory m;
        make_plan(one, c, m);
    }
    for (int l = 0; l < LAYERS; l++) {
        for (int g = 0; g < c.Hkv; g++) counts.push_back(one.host.rows[g]);
        positions.insert(positions.end(), one.positions.begin(), one.positions.end());
    }
    DKV(dkv_plan_from_positions(&p.host, NULL, &bytes, LAYERS, c.Hkv, T_c, positions.data(), counts.data()));
    p.memory.resize(bytes);
    DKV(dkv_plan_from_positions(&p.host, p.memory.data(), &bytes, LAYERS, c.Hkv, T_c, positions.data(), counts.data()));
    const dkv_shape shape = {LAYERS, c.H, c.Hkv, c.d, c.d};
    dkv_cuda_cache *cache = NULL;
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemGetInfo(&free_before, &total));
    DKV(dkv_cuda_cache_create(&cache, &p.host, &shape, DKV_BF16, 512));
    std::string why;
    for (int l = 0; l < LAYERS && why.empty(); l++) {
        try { /* the prefill's K and V of this layer */
            Memory            m;
            const int64_t     n = T_c * c.Hkv * c.d;
            const dkv_segment source = dkv_strided(dkv_thd(normal(m, DKV_BF16, n), DKV_BF16, c.Hkv, c.d),
                                                   dkv_thd(normal(m, DKV_BF16, n), DKV_BF16, c.Hkv, c.d), T_c);
            DKV(dkv_cuda_cache_pack(cache, l, &source, stream));
            CUDA(cudaStreamSynchronize(stream));
            CUDA(cudaMemGetInfo(&free_now, &total));
            least = std::min(least, free_now);
        } catch (Failure &f) { why = f.why; }
    }
    const double peak = (double)free_before - (double)least, packed = (double)dkv_cuda_cache_bytes(cache);
    dkv_cuda_cache_destroy(cache);
    FAIL_IF(!why.empty(), "%s", why.c_str());
    const double layer = (double)T_c * c.Hkv * c.d * 4, dense = layer * LAYERS;
    printf("%-40s peak %.3f GB = packed %.3f + one layer %.3f + %.1f MB; dense %.1f GB, %.2fx\n", name, peak / 1e9,
           packed / 1e9, layer / 1e9, (peak - packed - layer) / 1e6, dense / 1e9, dense / peak);
    fflush(stdout);
    if (json)
        fprintf(json, "%s{\"case\": \"%s\", \"device\": \"%s\", \"dtype\": \"bf16\", \"peak_bytes\": %.0f, "
                "\"packed_bytes\": %.0f, \"layer_bytes\": %.0f, \"dense_bytes\": %.0f}", json_comma, name, device.name,
                peak, packed, layer, dense);
    json_comma = ",\n";
}

/* ---- ranks of sources: K of a context once for several questions ------------------------------------ */

struct ScoreCase {
    const char *name;
    int         n, tokens, H, Hkv, d; /* questions; tokens asked of each */
    int64_t     T_c;
    bool        by_token = false;     /* K is [T_c][Hkv][d], not [Hkv][T_c][d] as in a cache */
};
enum { QUESTION = 32 };               /* tokens of each, all of them its tail */

/* Keys above a source by more than rounding, and those about as high; a CTA for each (asked token, head). */
struct RankBounds {
    const void    *q, *k, *tail_k;    /* [n][QUESTION][H][d]; the context's; [n][QUESTION][Hkv][d] */
    const int64_t *source;            /* [n][QUESTION] */
    int            tokens, H, Hkv, d;
    int64_t        T_c, token, head;  /* steps in k */
    int           *above, *near;      /* [n][tokens][H] */
};

__global__ void rank_bounds(RankBounds r) {
    const int     h = blockIdx.x % r.H, g = h / (r.H / r.Hkv), asked = blockIdx.x / r.H, x = asked / r.tokens;
    const int     i = QUESTION - r.tokens + asked % r.tokens, d = r.d;
    const int64_t row = ((int64_t)x * QUESTION + i) * r.H + h, source = r.source[x * QUESTION + i];
    auto          logit = [&](int64_t j) {
        double s = 0;
        for (int c = 0; c < d; c++)
            s += (double)load(r.q, DKV_BF16, row * d + c) *
                 (j < r.T_c ? load(r.k, DKV_BF16, j * r.token + g * r.head + c)
                            : load(r.tail_k, DKV_BF16, ((x * QUESTION + j - r.T_c) * r.Hkv + g) * d + c));
        return s;
    };
    const double own = logit(source), bound = 5e-4; /* tolerance_gpu_logit, twice */
    int          above = 0, near = 0;
    for (int64_t j = threadIdx.x; j <= r.T_c + i; j += blockDim.x) {
        const double s = logit(j);
        above += j != source && s > own + bound;
        near += j != source && fabs(s - own) <= bound;
    }
    atomicAdd(r.above + blockIdx.x, above);
    atomicAdd(r.near + blockIdx.x, near);
}

/* Share of ranks that are out of their bounds. */
static double wrong_ranks(const ScoreCase &c, Memory &m, RankBounds r, const int64_t *rank) {
    const int64_t        rows = (int64_t)c.n * c.tokens * c.H;
    std::vector<int>     zero((size_t)rows, 0), above(zero), near(zero);
    std::vector<int64_t> got((size_t)c.n * QUESTION * c.H);
    int64_t              bad = 0;
    r.above = m.copy(zero), r.near = m.copy(zero);
    rank_bounds<<<(unsigned)rows, 256, 0, stream>>>(r);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(above.data(), r.above, above.size() * 4, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(near.data(), r.near, near.size() * 4, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(got.data(), rank, got.size() * 8, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < rows; i++) {
        const int64_t asked = i / c.H, at = asked / c.tokens * QUESTION + QUESTION - c.tokens + asked % c.tokens;
        const int64_t rank_of = got[(size_t)(at * c.H + i % c.H)], a = above[(size_t)i];
        bad += rank_of < a || rank_of > a + near[(size_t)i];
    }
    return (double)bad / (double)rows;
}

static void run_score(const ScoreCase &c) {
    Memory        m;
    Row           row = {c.name, DKV_BF16, {}, 0, 0, 0, 0, 0, ""};
    const int64_t keys = c.T_c * c.Hkv * c.d, tail = (int64_t)QUESTION * c.Hkv * c.d, q = (int64_t)QUESTION * c.H * c.d;
    row.bytes = 2.0 * (double)(keys + c.n * (tail + q));
    row.flops = 2.0 * c.d * (double)c.n * c.tokens * c.H * (double)c.T_c;
    set_limit(row);
    const int layers = (int)std::min(16.0, std::max(2.0, 1 + 3.0 * device.l2CacheSize / row.bytes));
    std::vector<std::vector<dkv_attention>> a((size_t)layers);
    std::vector<int64_t>                    source;
    std::vector<Range>                      reads;
    std::vector<const Range *>              there;
    void                                   *tails = normal(m, DKV_BF16, c.n * tail), *qs = normal(m, DKV_BF16, c.n * q);
    const int64_t token = c.by_token ? c.Hkv * c.d : c.d, head = c.by_token ? c.d : c.T_c * c.d;
    RankBounds    r = {qs, NULL, tails, NULL, c.tokens, c.H, c.Hkv, c.d, c.T_c, token, head, NULL, NULL};
    for (auto &y : a) {
        const dkv_tensor k = {normal(m, DKV_BF16, keys), DKV_BF16, token * 2, head * 2, 2};
        for (int x = 0; x < c.n; x++) {
            dkv_attention one = {};
            one.H = c.H, one.Hkv = c.Hkv, one.d_k = c.d, one.N_q = QUESTION;
            one.q = dkv_thd((char *)qs + x * q * 2, DKV_BF16, c.H, c.d);
            one.context = dkv_strided(k, dkv_tensor(), c.T_c);
            one.tail = dkv_strided(dkv_thd((char *)tails + x * tail * 2, DKV_BF16, c.Hkv, c.d), dkv_tensor(), QUESTION);
            y.push_back(one);
        }
        reads.clear();
        add_range(reads, k.data, keys * 2);
        there.push_back(m.copy(reads));
    }
    for (int i = 0; i < c.n * QUESTION; i++)
        source.push_back(i % QUESTION < QUESTION - c.tokens ? -1 : (int64_t)(i * 2654435761u % (uint32_t)c.T_c));
    size_t bytes;
    DKV(dkv_cuda_score_size(&bytes, a[0].data(), c.n));
    void    *ws = m.get((int64_t)bytes);
    int64_t *rank = m.get<int64_t>((int64_t)c.n * QUESTION * c.H);
    auto     launch = [&](int i) {
        DKV(dkv_cuda_score(rank, a[(size_t)i].data(), c.n, source.data(), ws, bytes, stream));
    };
    launch(layers - 1);
    r.k = a.back()[0].context.k.data, r.source = m.copy(source);
    row.error = wrong_ranks(c, m, r, rank);
    FAIL_IF(row.error > 0, "wrong: %.1f%% of ranks", 100 * row.error);
    row.ours = time_graph(layers, launch);
    row.read_ms = time_graph(layers, [&](int i) { launch_read(there[(size_t)i], reads.size()); }).median;
    report(row);
}

/* ---- gates of a step: 8B shape at 128K, 254 contexts -------------------------------------------------- */

static const int GATE_CONTEXTS = 254;

/* Limits: reading what is read and written as fast as reads are. */
static void run_gates(const char *only) {
    const dkv_gates g = {32, 32, 8, 1013, 0};
    const int64_t   n = dkv_gates_count(&g), cells = n / 4;
    const dkv_draw  draw = {1, 2, 3};
    Memory          m;
    float   *a = (float *)normal(m, DKV_F32, n), *da = (float *)normal(m, DKV_F32, n), *mean = m.get<float>(n);
    float   *square = m.get<float>(n), *ln_u = m.get<float>(cells * GATE_CONTEXTS);
    double  *sums = m.get<double>(2);
    uint8_t *M = m.get<uint8_t>(n), *open = m.get<uint8_t>(cells);
    void    *ws = m.get(DKV_CUDA_GATES_WS);
    int64_t  K;
    CUDA(cudaMemsetAsync(mean, 0, (size_t)n * 4, stream));
    CUDA(cudaMemsetAsync(square, 0, (size_t)n * 4, stream));
    const struct { const char *name; double bytes; std::function<void(int)> launch; } parts[] = {
        {"gates: union of 254 contexts", 4.0 * (double)(cells * GATE_CONTEXTS + n),
         [&](int) { DKV(dkv_cuda_gates_union(NULL, ln_u, &g, a, draw, GATE_CONTEXTS, stream)); }},
        {"gates: its gradient", 4.0 * (double)(cells * GATE_CONTEXTS + 3 * n),
         [&](int) { DKV(dkv_cuda_gates_union_backward(da, &g, a, draw, GATE_CONTEXTS, ln_u, stream)); }},
        {"gates: penalty", 12.0 * (double)n,
         [&](int) { DKV(dkv_cuda_gates_penalty(sums, da, &g, a, DKV_BUDGET_PHYSICAL, 0.5f, ws, stream)); }},
        {"gates: clip", 12.0 * (double)n, [&](int) { DKV(dkv_cuda_gates_clip(sums, da, n, ws, stream)); }},
        {"gates: AdamW", 28.0 * (double)n,
         [&](int) { DKV(dkv_cuda_gates_adamw(a, mean, square, da, n, 1, 1e-3, stream)); }},
        {"gates: Top-K", 5.0 * (double)n,
         [&](int) { DKV(dkv_cuda_gates_top(M, &K, &g, a, DKV_BUDGET_LOGICAL, 0.2, 0, ws, stream)); }},
        {"gates: or", 1.25 * (double)n, [&](int) { DKV(dkv_cuda_gates_or(open, &g, M, stream)); }},
    };
    for (const auto &x : parts) {
        Row row = {x.name, DKV_F32, {}, x.bytes, 0, 0, 0, 0, ""};
        if (!strstr(x.name, only)) continue;
        set_limit(row);
        row.ours = time_graph(1, x.launch);
        report(row);
    }
}

/* ---- rows -------------------------------------------------------------------------------------------- */

/* ---- gated attention: a step's forward and backward over one layer ---- */

struct GatedCase {
    const char *name;
    int         contexts, suffixes, H, Hkv, d;
    int64_t     T_c, N_q;
    double      open;  /* share of bins that are open, spread at random, u uniform in 0.1 .. 1 */
    double      bits;  /* 0: relaxed; straight-through: share of those whose bit is set */
};

/* What dkv_gated computes, of one context and its first suffix, in double precision: out of the last query of every
   head; d ln u of the nearest, the middle and the farthest bin of every KV head, by all suffixes, from the outputs and
   LSEs that are to be graded. */
struct GatedReference {
    dkv_gated c;             /* device pointers; suffixes, too */
    double   *weights, *out; /* [H][T_c + N_q], [H][d] */
    double   *gates;         /* [Hkv][3] */
    bool      bits;
};

__host__ __device__ static int64_t bin_of(const dkv_gated &c, int64_t i) {
    return i < c.S || i >= c.T_c - c.R ? -1 : (c.T_c - c.R - 1 - i) / c.W;
}
__device__ static double value_at(const dkv_tensor &t, int64_t token, int64_t head, int i) {
    return load((const char *)t.data + token * t.stride_token + head * t.stride_head, t.type, i);
}

__global__ void gated_outputs(GatedReference r) {
    const dkv_gated  &c = r.c;
    const dkv_suffix &x = c.suffix[0];
    const int         h = blockIdx.x, g = h / (c.H / c.Hkv);
    const int64_t     n = c.T_c + x.N_q;
    double           *w = r.weights + h * n, sum = 0, o = 0;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        const bool    own = j >= c.T_c;
        const int64_t bin = own ? -1 : bin_of(c, j), cell = g * c.D + bin;
        double        s = 0;
        for (int i = 0; i < c.d_k; i++)
            s += value_at(x.q, x.N_q - 1, h, i) * value_at(own ? x.k : c.context.k, own ? j - c.T_c : j, g, i);
        const double u = bin < 0 ? 1 : r.bits ? c.open[cell] : exp((double)c.ln_u[cell]);
        w[j] = u * exp(s / sqrt((double)c.d_k));
    }
    __syncthreads();
    for (int64_t j = 0; j < n && threadIdx.x < c.d_v; j++) {
        sum += w[j];
        o += w[j] * value_at(j < c.T_c ? c.context.v : x.v, j < c.T_c ? j : j - c.T_c, g, threadIdx.x);
    }
    if (threadIdx.x < c.d_v) r.out[h * c.d_v + threadIdx.x] = o / sum;
}

__global__ void gated_gates(GatedReference r) { /* grid (3, Hkv) */
    const dkv_gated &c = r.c;
    const int        G = c.H / c.Hkv, g = blockIdx.y;
    const int64_t    bin = blockIdx.x * (c.D - 1) / 2, end = c.T_c - c.R - bin * c.W, begin = max(end - c.W, c.S);
    __shared__ double sums[256];
    double            sum = 0;
    for (int64_t task = threadIdx.x; task < c.n_suffix * c.suffix[0].N_q * G * (end - begin); task += blockDim.x) {
        const int64_t     row = task / (end - begin), j = begin + task % (end - begin), query = row / G;
        const dkv_suffix &x = c.suffix[query / c.suffix[0].N_q];
        const int64_t     i = query % c.suffix[0].N_q;
        const int         h = g * G + (int)(row % G);
        double            s = 0, dp = 0;
        for (int e = 0; e < c.d_k; e++) {
            s += value_at(x.q, i, h, e) * value_at(c.context.k, j, g, e);
            dp += value_at(x.d_out, i, h, e) *
                  (value_at(c.context.v, j, g, e) - value_at(r.bits ? x.out_relaxed : x.out, i, h, e));
        }
        const float *lse = r.bits ? x.lse_relaxed : x.lse;
        sum += exp(s / sqrt((double)c.d_k) + c.ln_u[g * c.D + bin] - lse[i * c.H + h]) * dp;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int i = 1; i < 256 && threadIdx.x == 0; i++) sums[0] += sums[i];
    if (threadIdx.x == 0) r.gates[g * 3 + blockIdx.x] = c.ln_u[g * c.D + bin] > -80 ? sums[0] : 0;
}

/* The greater of both errors, each over the greatest number of its kind. */
static double gated_error(Memory &m, const dkv_gated &c, const std::vector<dkv_suffix> &suffixes) {
    GatedReference r = {c, NULL, NULL, NULL, c.open != NULL};
    const int64_t  row = c.H * c.d_v, n = c.T_c + suffixes[0].N_q;
    r.c.suffix = m.copy(suffixes);
    r.weights = m.get<double>(c.H * n), r.out = m.get<double>(row), r.gates = m.get<double>(c.Hkv * 3);
    gated_outputs<<<c.H, 256, 0, stream>>>(r);
    gated_gates<<<dim3(3, (unsigned)c.Hkv), 256, 0, stream>>>(r);
    std::vector<double> want((size_t)row), gates((size_t)c.Hkv * 3);
    std::vector<float>  got((size_t)row), d_ln_u((size_t)(c.Hkv * c.D));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(want.data(), r.out, want.size() * 8, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(gates.data(), r.gates, gates.size() * 8, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(got.data(), (float *)suffixes[0].out.data + (suffixes[0].N_q - 1) * row, got.size() * 4,
                    cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(d_ln_u.data(), c.d_ln_u, d_ln_u.size() * 4, cudaMemcpyDeviceToHost));
    double error[2] = {0, 0}, greatest[2] = {0, 0};
    auto   compare = [&](int kind, double x, double y) {
        if (!(std::fabs(x - y) <= error[kind])) error[kind] = std::fabs(x - y);
        greatest[kind] = std::max(greatest[kind], std::fabs(y));
    };
    for (size_t i = 0; i < got.size(); i++) compare(0, got[i], want[i]);
    for (int64_t i = 0; i < c.Hkv * 3; i++)
        compare(1, d_ln_u[(size_t)(i / 3 * c.D + i % 3 * (c.D - 1) / 2)], gates[(size_t)i]);
    return std::max(error[0] / greatest[0], greatest[1] > 0 ? error[1] / greatest[1] : 0);
}

static dkv_suffix new_suffix(Memory &m, const GatedCase &c) {
    auto inputs = [&](int heads) { return dkv_thd(normal(m, DKV_BF16, c.N_q * heads * c.d), DKV_BF16, heads, c.d); };
    auto floats = [&](int heads) { return dkv_thd(m.get<float>(c.N_q * heads * c.d), DKV_F32, heads, c.d); };
    return dkv_suffix{c.N_q, inputs(c.H), inputs(c.Hkv), inputs(c.Hkv), floats(c.H), m.get<float>(c.N_q * c.H),
                      floats(c.H), m.get<float>(c.N_q * c.H), inputs(c.H), floats(c.H), floats(c.Hkv), floats(c.Hkv)};
}

static dkv_gated new_gated(Memory &m, const GatedCase &c, const std::vector<dkv_suffix> &suffixes) {
    const int64_t W = 128, S = 128, R = 1024, D = (c.T_c - S - R + W - 1) / W, n = c.Hkv * D;
    auto          head_major = [&] {
        return dkv_tensor{normal(m, DKV_BF16, c.T_c * c.Hkv * c.d), DKV_BF16, c.d * 2, c.T_c * c.d * 2, 2};
    };
    std::vector<float>         ln_u((size_t)n);
    std::vector<unsigned char> open((size_t)n);
    for (int64_t i = 0; i < n; i++) {
        const bool on = rand() < c.open * RAND_MAX;
        ln_u[(size_t)i] = on ? logf(0.1f + 0.9f * (float)rand() / (float)RAND_MAX) : -INFINITY;
        open[(size_t)i] = on && rand() < c.bits * RAND_MAX;
    }
    const dkv_tensor k = head_major(), v = head_major();
    return dkv_gated{c.H, c.Hkv, c.d, c.d, c.T_c, W, S, R, D, 0, dkv_strided(k, v, c.T_c), m.copy(ln_u),
                     c.bits > 0 ? m.copy(open) : NULL, suffixes.data(), (int64_t)suffixes.size(), m.get<float>(n)};
}

static void run_gated(const GatedCase &c) {
    Memory       m;
    const double keys = c.contexts * c.open * (double)c.T_c, queries = (double)(c.N_q * c.suffixes);
    Row          row = {c.name, DKV_BF16, {}, 0, 0, 0, 0, 0, ""};
    row.bytes = 2 * keys * c.Hkv * c.d * 4 * (1 + c.bits / 2); /* forward, the open bins once more, backward */
    row.flops = queries * keys * c.H * c.d * (4 + 4 * c.bits + 6);
    set_limit(row);
    const int layers = (double)c.contexts * c.T_c * c.Hkv * c.d * 4 < 2.0 * device.l2CacheSize ? 3 : 1;
    std::vector<std::vector<std::vector<dkv_suffix>>> x((size_t)layers);
    std::vector<std::vector<dkv_gated>>               g((size_t)layers);
    std::vector<dkv_cuda_gated>                       work((size_t)layers);
    for (size_t i = 0; i < (size_t)layers; i++) {
        x[i].resize((size_t)c.contexts);
        for (auto &suffixes : x[i]) {
            for (int k = 0; k < c.suffixes; k++) suffixes.push_back(new_suffix(m, c));
            g[i].push_back(new_gated(m, c, suffixes));
        }
        size_t block, ws;
        DKV(dkv_cuda_gated_size(&block, &ws, g[i].data(), c.contexts));
        char *tables = m.get((int64_t)block), *space = m.get((int64_t)ws);
        DKV(dkv_cuda_gated_prepare(&work[i], g[i].data(), c.contexts, tables, block, space, ws, stream));
    }
    auto launch = [&](int i) {
        DKV(dkv_cuda_gated_forward(&work[(size_t)i], stream));
        DKV(dkv_cuda_gated_backward(&work[(size_t)i], stream));
    };
    launch(0);
    row.error = gated_error(m, g[0][0], x[0][0]);
    FAIL_IF(!(row.error <= 0.03), "wrong: error %g", row.error);
    row.ours = time_graph(layers, launch);
    report(row);
}

static const Case cases[] = {
    {"uniform decode B1 32K", DKV_BF16, 1, 32 * K, 1, 1, 1},
    {"uniform decode B1 128K", DKV_BF16, 1, 128 * K, 1, 1, 1},
    {"uniform decode B8 128K", DKV_BF16, 8, 128 * K, 1, 1, 1},
    {"ragged decode B1 40% of 128K, tail 1", DKV_BF16, 1, 128 * K, 0.4, 1, 1},
    {"ragged decode B1 40% of 128K, tail 1K", DKV_BF16, 1, 128 * K, 0.4, 1 * K, 1},
    {"ragged decode B1 40% of 128K, tail 8K", DKV_BF16, 1, 128 * K, 0.4, 8 * K, 1},
    {"fp8 decode B1 64K", DKV_FP8, 1, 64 * K, 1, 1, 1},
    {"fp8 decode B1 128K", DKV_FP8, 1, 128 * K, 1, 1, 1},
    {"fp8 decode B8 128K", DKV_FP8, 8, 128 * K, 1, 1, 1},
    {"i8 decode B1 64K", DKV_I8, 1, 64 * K, 1, 1, 1},
    {"i8 decode B1 128K", DKV_I8, 1, 128 * K, 1, 1, 1},
    {"i8 decode B8 128K", DKV_I8, 8, 128 * K, 1, 1, 1},
    {"suffix 2 over 128K", DKV_BF16, 1, 128 * K, 1, 2, 2},
    {"suffix 4 over 128K", DKV_BF16, 1, 128 * K, 1, 4, 4},
    {"suffix 8 over 128K", DKV_BF16, 1, 128 * K, 1, 8, 8},
    {"suffix 32 over 128K", DKV_BF16, 1, 128 * K, 1, 32, 32},
    {"suffix 128 over 128K", DKV_BF16, 1, 128 * K, 1, 128, 128},
    {"suffix 2 over 40% of 128K", DKV_BF16, 1, 128 * K, 0.4, 2, 2},
    {"suffix 4 over 40% of 128K", DKV_BF16, 1, 128 * K, 0.4, 4, 4},
    {"suffix 8 over 40% of 128K", DKV_BF16, 1, 128 * K, 0.4, 8, 8},
    {"suffix 32 over 40% of 128K", DKV_BF16, 1, 128 * K, 0.4, 32, 32},
    {"suffix 128 over 40% of 128K", DKV_BF16, 1, 128 * K, 0.4, 128, 128},
    {"prefill d128 8K", DKV_BF16, 1, 0, 1, 8 * K, 8 * K},
    {"prefill d128 32K", DKV_BF16, 1, 0, 1, 32 * K, 32 * K},
    {"prefill d128 128K", DKV_BF16, 1, 0, 1, 128 * K, 128 * K},
    {"prefill d64 8K", DKV_BF16, 1, 0, 1, 8 * K, 8 * K, 64},
    {"prefill d64 32K", DKV_BF16, 1, 0, 1, 32 * K, 32 * K, 64},
    {"prefill d64 128K", DKV_BF16, 1, 0, 1, 128 * K, 128 * K, 64},
    {"prefill chunk of 8K over 128K", DKV_BF16, 1, 0, 1, 128 * K, 8 * K},
};

static const struct { const char *name; dkv_type type; bool head_major; } packs[] = {
    {"pack from head-major to bf16", DKV_BF16, true}, {"pack from [T][Hkv][d] to bf16", DKV_BF16, false},
    {"pack from head-major to f16", DKV_F16, true},   {"pack from [T][Hkv][d] to f16", DKV_F16, false},
    {"pack from head-major to i8", DKV_I8, true},     {"pack from [T][Hkv][d] to i8", DKV_I8, false},
    {"pack from head-major to fp8", DKV_FP8, true},   {"pack from [T][Hkv][d] to fp8", DKV_FP8, false},
};

static const ScoreCase scores[] = {
    {"score 4 x 2 tokens over 130816", 4, 2, 32, 8, 128, 130816},
    {"score 4 x 4 tokens over 130816", 4, 4, 32, 8, 128, 130816},
    {"score 4 x 8 tokens over 130816", 4, 8, 32, 8, 128, 130816},
    {"score 4 x 12 tokens over 130816", 4, 12, 32, 8, 128, 130816},
    {"score 4 x 16 tokens over 130816", 4, 16, 32, 8, 128, 130816},
    {"score 16 x 16 tokens over 130816", 16, 16, 32, 8, 128, 130816},
    {"score 64 x 16 tokens over 130816", 64, 16, 32, 8, 128, 130816},
    {"score 4 x 4 tokens over [130816][8][128]", 4, 4, 32, 8, 128, 130816, true},
    {"score 4 x 4 tokens over 130816, d 64", 4, 4, 32, 8, 64, 130816},
    {"score 64 x 16 tokens over 130816, d 64", 64, 16, 32, 8, 64, 130816},
    {"score 4 x 4 tokens over 7936, d 64, G 3", 4, 4, 9, 3, 64, 7936},
    {"score 64 x 8 tokens over 7936, d 64, G 3", 64, 8, 9, 3, 64, 7936},
};

static const GatedCase gated[] = {
    {"gated 32 over 128K", 1, 1, 32, 8, 128, 130816, 32, 1, 0},
    {"gated 128 over 128K", 1, 1, 32, 8, 128, 130816, 128, 1, 0},
    {"gated 512 over 128K", 1, 1, 32, 8, 128, 130816, 512, 1, 0},
    {"gated 128 over 130749 keys", 1, 1, 32, 8, 128, 130749, 128, 1, 0},
    {"gated 128 over 128K, 0.5 open", 1, 1, 32, 8, 128, 130816, 128, 0.5, 0},
    {"gated 128 over 128K, 0.2 open", 1, 1, 32, 8, 128, 130816, 128, 0.2, 0},
    {"gated 128 over 128K, 0.05 open", 1, 1, 32, 8, 128, 130816, 128, 0.05, 0},
    {"gated through 32 over 128K", 1, 1, 32, 8, 128, 130816, 32, 1, 1},
    {"gated through 128 over 128K", 1, 1, 32, 8, 128, 130816, 128, 1, 1},
    {"gated through 128 over 128K, bits 0.2", 1, 1, 32, 8, 128, 130816, 128, 1, 0.2},
    {"gated 32 over 8K", 1, 1, 32, 8, 128, 8192, 32, 1, 0},
    {"gated 128 over 8K", 1, 1, 32, 8, 128, 8192, 128, 1, 0},
    {"gated 32 over 32K", 1, 1, 32, 8, 128, 32768, 32, 1, 0},
    {"gated 4 x 32 over 128K", 1, 4, 32, 8, 128, 130816, 32, 1, 0},
    {"gated 16 x 128 over 128K", 1, 16, 32, 8, 128, 130816, 128, 1, 0},
    {"gated 128 over 128K, d 64", 1, 1, 32, 8, 64, 130816, 128, 1, 0},
    {"gated 56 x 4 x 45 over 7936, 9/3 d 64", 56, 4, 9, 3, 64, 7936, 45, 1, 0},
    {"gated 4 x 32 over 32512, 32/32", 1, 4, 32, 32, 128, 32512, 32, 1, 0},
};

static int failed;

static void try_row(const char *only, const char *name, const std::function<void()> &run) {
    if (!strstr(name, only)) return;
    try {
        run();
    } catch (Failure &f) {
        printf("%-40s %s\n", name, f.why.c_str());
        fflush(stdout);
        cudaGetLastError();
        failed = 1;
    }
}

static const char usage[] = "usage: bench_cuda [--json FILE] [--only TEXT] [--arch 80]\n"
                            "  --only TEXT  the rows whose name has TEXT, such as \"decode\", \"pack\", \"gated\"\n"
                            "  --arch 80    the mma.sync kernels\n";

int main(int argc, char **argv) {
    static const struct option options[] = {{"json", 1, 0, 'j'}, {"only", 1, 0, 'o'}, {"arch", 1, 0, 'a'},
                                            {"help", 0, 0, 'h'}, {0, 0, 0, 0}};
    const char *only = "";
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) >= 0;)
        if (o == 'j' && (json = fopen(optarg, "w"))) fputs("[\n", json);
        else if (o == 'o') only = optarg;
        else if (o == 'a') dkv_cuda_limit(atoi(optarg));
        else if (o == 'h') return fputs(usage, stdout), 0;
        else return fputs(o == 'j' ? "bench_cuda: cannot write that file\n" : usage, stderr), 2;
    int arch, sms;
    if (dkv_cuda_device(&arch, &sms)) return fprintf(stderr, "bench_cuda: %s\n", dkv_result_string(DKV_ERR_DEVICE)), 2;
    try {
        CUDA(cudaGetDeviceProperties(&device, 0));
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        measure_limits();
    } catch (Failure &f) { return fprintf(stderr, "bench_cuda: %s\n", f.why.c_str()), 2; }
    print_head();
    for (const Case &c : cases) try_row(only, c.name, [&] { run_case(c); });
    for (const auto &x : packs) try_row(only, x.name, [&] { run_pack(x.name, x.type, x.head_major); });
    for (const ScoreCase &c : scores) try_row(only, c.name, [&] { run_score(c); });
    for (const GatedCase &c : gated) try_row(only, c.name, [&] { run_gated(c); });
    try_row("", "gates", [&] { run_gates(only); });
    try_row(only, "memory of 128K", [] { run_memory("memory of 128K", 128 * K); });
    try_row(only, "memory of 1M", [] { run_memory("memory of 1M", 1024 * K); });
    if (json && (fputs("\n]\n", json) < 0 || fclose(json))) return 2;
    return failed;
}
