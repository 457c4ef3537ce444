/* The GPU: weights, and whatever is multiplied by them, in bf16; sums, residual stream, rotations and logits in f32.

   K, V and q are rounded once, to the 16 bits of the cache's tail, where they are rotated. One token multiplies by
   matvec_kernel, more by cuBLAS; attention, appending and packing are distance_kv_cuda.cu's. Everything runs on one
   stream, so a token's whole step, from its id to its logits, is captured once per cache and replayed: position, token
   and the tail's length lie on the device. Gradients are f32, and rounded where they are multiplied by weights. */
#include "device.h"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef __nv_bfloat16 bf16;

/* Tokens that pass a layer at once, rows whose logits are made at once, floats of weights that are uploaded at once,
   bytes that cuBLAS asks for on Hopper. */
static const int64_t CHUNK = 4096, LOGIT_ROWS = 256, SLAB = 1 << 24, BLAS_BYTES = 32 << 20;
enum { THREADS = 256, WARPS = THREADS / 32, MANY = 1024, AHEAD = 4 };

struct input {
    int64_t pos;
    int32_t tokens[1]; /* [n_all] */
};

struct device {
    cudaStream_t stream;
    bool overlaps;          /* kernels do: see overlap */
    cublasHandle_t blas;
    void *blas_space;
    bf16 *weights;          /* [all] */
    const bf16 *embed;      /* [V][E] among them */
    float *vectors;         /* m->vectors */
    double *inv_freq;
    float *logits;          /* [V] */
    int32_t *best;
    dkv_cuda_work work;     /* of the append that came last */
    void *block, *space;    /* its memory, and other calls' */
    size_t block_bytes, space_bytes;
    dkv_cuda_gated gated;   /* of the pass that came last, in the same memory */
    lm_memory rounded;      /* gradients in bf16 */
};

struct cache {
    dkv_cuda_cache *own;
    int64_t bytes;          /* as counted in m->kv_bytes */
    dkv_cuda_work *work;    /* [L] of one token, NULL before the first record */
    void *memory;           /* theirs: blocks, then the space that they share */
    cudaGraphExec_t graph;
};

static device *of(const lm_model *m) { return (device *)m->own; }
static cache *of(const lm_cache *c) { return (cache *)c->own; }

static bool good(lm_model *m, cudaError_t e) { return e ? lm_fail(m, "CUDA: %s", cudaGetErrorString(e)) : true; }
static bool good(lm_model *m, dkv_result r) { return r ? lm_fail(m, "attention: %s", dkv_result_string(r)) : true; }

/* Host memory is pageable, so it is free again when these return. */
static bool upload(lm_model *m, void *to, const void *from, size_t bytes) {
    return good(m, cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, of(m)->stream));
}

static bool download(lm_model *m, void *to, const void *from, size_t bytes) {
    return good(m, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, of(m)->stream));
}

static unsigned blocks(int64_t n, int64_t per_block) { return (unsigned)((n + per_block - 1) / per_block); }

template <class... P, class... A>
static bool launch(lm_model *m, void (*kernel)(P...), dim3 grid, int threads, A... arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3((unsigned)threads);
    c.stream = of(m)->stream;
    c.attrs = &attribute;
    c.numAttrs = of(m)->overlaps ? 1 : 0;
    return good(m, cudaLaunchKernelEx(&c, kernel, arguments...));
}

/* ==== kernels ==== */

/* On sm_90 the next kernel is scheduled from here on, and waits here until this one has ended. Before it a kernel reads
   only what no kernel writes. */
static __device__ void overlap() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Sum over a block of N threads, for every thread. */
template <int N>
static __device__ float block_sum(float x) {
    __shared__ float of_warp[N / 32];
    for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    __syncthreads(); /* the sum before is read */
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < N / 32; w++) x += of_warp[w];
    return x;
}

static __global__ void to_bf16_kernel(bf16 *y, const float *x, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    overlap();
    if (i < n) y[i] = __float2bfloat16(x[i]);
}

/* x[E] <- row of the embedding, rope[pairs] <- cos and sin of position * frequency, in double: float angles are off by
   1e-3 at 8K. By a block. */
static __device__ void place_token(float *x, float2 *rope, int32_t token, int64_t pos, const bf16 *embed,
                                   const double *inv_freq, int64_t E, int64_t pairs) {
    for (int64_t j = threadIdx.x; j < E; j += THREADS) x[j] = __bfloat162float(embed[token * E + j]);
    for (int64_t j = threadIdx.x; j < pairs; j += THREADS) {
        double s, c;
        sincos((double)pos * inv_freq[j], &s, &c);
        rope[j] = make_float2((float)c, (float)s);
    }
}

static __global__ void embed_kernel(float *x, float2 *rope, const input *in, const bf16 *embed, const double *inv_freq,
                                    int64_t E, int64_t pairs) {
    const int64_t i = blockIdx.x;
    overlap();
    place_token(x + i * E, rope + i * pairs, in->tokens[i], in->pos + i, embed, inv_freq, E, pairs);
}

/* y[n][E] = x[n][E] / rms(x) * gain[E]. A block per row. */
static __global__ void norm_kernel(bf16 *y, const float *x, const float *gain, int64_t E, float eps) {
    x += blockIdx.x * E;
    y += blockIdx.x * E;
    overlap();
    float sum = 0;
    for (int64_t j = threadIdx.x; j < E; j += THREADS) sum += x[j] * x[j];
    const float scale = 1 / sqrtf(block_sum<THREADS>(sum) / (float)E + eps);
    for (int64_t j = threadIdx.x; j < E; j += THREADS) y[j] = __float2bfloat16(x[j] * scale * gain[j]);
}

static __device__ float dot8(uint4 a, uint4 b, float sum) {
    const __nv_bfloat162 *p = (const __nv_bfloat162 *)&a, *q = (const __nv_bfloat162 *)&b;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = __bfloat1622float2(p[i]), v = __bfloat1622float2(q[i]);
        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
    return sum;
}

/* y[rows] = W[rows][cols] x + bias (NULL: none), or += . A warp per row reads it once, 16 bytes a lane and load where
   rows are aligned to that; the first loads of W are on their way before the kernel that makes x has ended. */
template <bool ADD>
static __global__ void matvec_kernel(float *y, const bf16 *W, const bf16 *x, const float *bias, int64_t rows,
                                     int64_t cols) {
    const int64_t r = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const bf16 *w = W + r * cols;
    const int64_t n8 = r >= rows || cols % 8 || (uintptr_t)W % 16 ? 0 : cols / 8;
    const uint4 *w8 = (const uint4 *)w, *x8 = (const uint4 *)x;
    uint4 first[AHEAD];
    #pragma unroll
    for (int k = 0; k < AHEAD; k++)
        if (lane + 32 * k < n8) first[k] = w8[lane + 32 * k];
    overlap();
    if (r >= rows) return;
    float sum = 0;
    #pragma unroll
    for (int k = 0; k < AHEAD; k++)
        if (lane + 32 * k < n8) sum = dot8(first[k], x8[lane + 32 * k], sum);
    #pragma unroll 4
    for (int64_t i = lane + 32 * AHEAD; i < n8; i += 32) sum = dot8(w8[i], x8[i], sum);
    for (int64_t i = n8 * 8 + lane; i < cols; i += 32) sum = fmaf(__bfloat162float(w[i]), __bfloat162float(x[i]), sum);
    for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (lane == 0) y[r] = ADD ? y[r] + sum : bias ? bias[r] + sum : sum;
}

/* y[n][rows] <- bias[rows], rows of y ld apart: what a product is then added to. Grid: pieces of a row, n. */
static __global__ void bias_kernel(float *y, int64_t ld, const float *bias, int64_t rows) {
    const int64_t r = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    overlap();
    if (r < rows) y[blockIdx.y * ld + r] = bias[r];
}

static __device__ void store(bf16 *to, float x) { *to = __float2bfloat16(x); }
static __device__ void store(__half *to, float x) { *to = __float2half(x); }

/* Rounds q, k, v [n][heads][d] to 16 bits, the first n_rot dimensions of all but v's heads rotated. Grid: pieces of the
   heads from first on, n; a thread per pair of an even d. half_split: pairs are (j, j + pairs), else (2j, 2j + 1).
   Blocks of MANY: a block per head and token is started more slowly than it reads and writes. */
template <typename T>
static __global__ void rotate_kernel(T *to, const float *from, const float2 *rope, int first, int heads, int rotated,
                                     int d, int pairs, bool half_split) {
    const int i = first * (d / 2) + (int)(blockIdx.x * MANY + threadIdx.x), h = i / (d / 2), j = i % (d / 2);
    const bool split = half_split && j < pairs;
    const int64_t a = ((int64_t)blockIdx.y * heads + h) * d + (split ? j : 2 * j), b = a + (split ? pairs : 1);
    overlap();
    if (h >= heads) return;
    float x = from[a], y = from[b];
    if (h < rotated && j < pairs) {
        const float2 angle = rope[(int64_t)blockIdx.y * pairs + j];
        const float turned = x * angle.x - y * angle.y;
        y = x * angle.y + y * angle.x;
        x = turned;
    }
    store(to + a, x);
    store(to + b, y);
}

/* act[n][F] = silu(gate) * up, from [n][gate F, up F]. Grid: pieces of a row, n; AHEAD elements a thread, whose loads
   are in flight together. */
static __global__ void swiglu_kernel(bf16 *act, const float *gate_up, int64_t F) {
    const float *gate = gate_up + (int64_t)blockIdx.y * 2 * F, *up = gate + F;
    const int64_t first = (int64_t)blockIdx.x * AHEAD * THREADS + threadIdx.x;
    float g[AHEAD], u[AHEAD];
    overlap();
    for (int i = 0; i < AHEAD; i++) {
        const int64_t j = first + i * THREADS;
        g[i] = j < F ? gate[j] : 0;
        u[i] = j < F ? up[j] : 0;
    }
    for (int i = 0; i < AHEAD; i++)
        if (first + i * THREADS < F)
            act[blockIdx.y * F + first + i * THREADS] = __float2bfloat16(g[i] / (1 + expf(-g[i])) * u[i]);
}

/* Index of the greatest of x[n], the first of equals, never a NaN unless all are (then 0), for a block of MANY. */
static __device__ int32_t block_best(const float *x, int32_t n) {
    __shared__ float value[MANY];
    __shared__ int32_t index[MANY];
    const int t = (int)threadIdx.x;
    float v = -CUDART_INF_F;
    int32_t at = n;
    for (int64_t i = t; i < n; i += MANY)
        if (x[i] > v || (x[i] == v && at == n)) v = x[i], at = (int32_t)i;
    __syncthreads(); /* the index before is read */
    value[t] = v, index[t] = at;
    for (int half = MANY / 2; half; half /= 2) {
        __syncthreads();
        if (t >= half) continue;
        const float w = value[t + half];
        if (w > value[t] || (w == value[t] && index[t + half] < index[t])) value[t] = w, index[t] = index[t + half];
    }
    __syncthreads();
    return index[0] < n ? index[0] : 0;
}

static __global__ void best_kernel(int32_t *best, const float *x, int32_t n) {
    overlap();
    const int32_t at = block_best(x, n);
    if (threadIdx.x == 0) *best = at;
}

/* ==== operations ==== */

static bool input_cuda(lm_model *m, lm_activations *a, const int32_t *tokens, int64_t pos) {
    const input first = {pos, {tokens[0]}};
    input *in = (input *)a->input;
    return upload(m, in, &first, sizeof first) &&
           (a->n_all == 1 || upload(m, in->tokens, tokens, (size_t)a->n_all * sizeof *tokens));
}

/* The tail's length becomes what it is after this call: replays count for themselves. */
static bool begin(lm_model *m, lm_cache *c, const lm_activations *a) {
    device *g = of(m);
    cache *k = of(c);
    const int64_t E = m->p.E, pairs = m->p.n_rot / 2;
    if (!launch(m, embed_kernel, (unsigned)a->n_all, THREADS, a->x, (float2 *)a->rope, (const input *)a->input,
                g->embed, g->inv_freq, E, pairs)) return false;
    if (a == &m->one) return good(m, dkv_cuda_advance(dkv_cuda_cache_length(k->own), 1, 1, g->stream));
    return good(m, dkv_cuda_cache_truncate(k->own, c->tail + a->n_all, g->stream));
}

static bool norm(lm_model *m, void *y, const float *x, const float *gain, int64_t n) {
    return launch(m, norm_kernel, (unsigned)n, THREADS, (bf16 *)y, x, gain, m->p.E, (float)m->p.eps);
}

/* y[n][rows] = x[n][cols] W^T, or += */
static bool gemm(lm_model *m, float *y, int64_t ld, const bf16 *W, const bf16 *x, int64_t n, int64_t rows, int64_t cols,
                 bool add) {
    const float one = 1, beta = add ? 1 : 0;
    cublasStatus_t e = cublasGemmEx(of(m)->blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)rows, (int)n, (int)cols, &one, W,
                                    CUDA_R_16BF, (int)cols, x, CUDA_R_16BF, (int)cols, &beta, y, CUDA_R_32F, (int)ld,
                                    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return e ? lm_fail(m, "cuBLAS: %s", cublasGetStatusString(e)) : true;
}

/* The n_w weights lie one behind the other, and so do their outputs in a row of y[0] and their biases: one product. */
static bool matmul(lm_model *m, const lm_activations *a, const lm_rows *y, const lm_weight *w, int n_w,
                   const void *from, int64_t n) {
    (void)a;
    const bf16 *W = (const bf16 *)w->bf16, *x = (const bf16 *)from;
    const float *bias = w->bias;
    int64_t rows = 0, cols = w->mat.cols;
    for (int k = 0; k < n_w; k++) rows += w[k].mat.rows;
    if (n == 1) return launch(m, matvec_kernel<false>, blocks(rows, WARPS), THREADS, y->data, W, x, bias, rows, cols);
    const dim3 grid(blocks(rows, THREADS), (unsigned)n);
    if (bias && !launch(m, bias_kernel, grid, THREADS, y->data, y->ld, bias, rows)) return false;
    return gemm(m, y->data, y->ld, W, x, n, rows, cols, bias != NULL);
}

static bool matmul_add(lm_model *m, const lm_activations *a, float *x, const lm_weight *w, const void *from,
                       int64_t n) {
    (void)a;
    const bf16 *W = (const bf16 *)w->bf16, *in = (const bf16 *)from;
    const int64_t rows = w->mat.rows, cols = w->mat.cols;
    if (n > 1) return gemm(m, x, rows, W, in, n, rows, cols, true);
    return launch(m, matvec_kernel<true>, blocks(rows, WARPS), THREADS, x, W, in, (const float *)NULL, rows, cols);
}

/* v is rounded here too; of kv_only, q is left out. */
static bool rotate(lm_model *m, const lm_activations *a, const float *rope, int64_t n, lm_target to) {
    const lm_params *p = &m->p;
    const int H = p->shape.H, Hkv = p->shape.Hkv, d = p->shape.d_k, pairs = (int)p->n_rot / 2;
    const int first = to.kv_only ? H : 0, heads = H + 2 * Hkv;
    const dim3 grid(blocks((heads - first) * (d / 2), MANY), (unsigned)n);
    const float2 *angle = (const float2 *)rope;
    const float *from = a->q.data;
    if (dkv_tail_type(to.cache->type) == DKV_F16)
        return launch(m, rotate_kernel<__half>, grid, MANY, (__half *)a->qkv, from, angle, first, heads, H + Hkv, d,
                      pairs, p->half_split);
    return launch(m, rotate_kernel<bf16>, grid, MANY, (bf16 *)a->qkv, from, angle, first, heads, H + Hkv, d, pairs,
                  p->half_split);
}

static bool swiglu(lm_model *m, const lm_activations *a, int64_t n) {
    const dim3 grid(blocks(m->p.F, AHEAD * THREADS), (unsigned)n);
    return launch(m, swiglu_kernel, grid, THREADS, (bf16 *)a->act, (const float *)a->gate.data, m->p.F);
}

/* ==== attention ==== */

/* The view of a->qkv that starts at this head. */
static dkv_tensor view(const lm_model *m, const lm_cache *c, const lm_activations *a, int head) {
    const dkv_shape *s = &m->p.shape;
    const dkv_type type = dkv_tail_type(c->type);
    const int64_t e = dkv_type_bytes(type), row = (s->H + 2 * s->Hkv) * s->d_k * e;
    return {(char *)a->qkv + head * s->d_k * e, type, row, s->d_k * e, e};
}

static dkv_attention attention(const lm_model *m, const lm_activations *a, int64_t n, const lm_cache *c, int layer) {
    const dkv_shape *s = &m->p.shape;
    return dkv_cuda_cache_attention(of(c)->own, layer, view(m, c, a, 0), n, dkv_thd(a->o, DKV_BF16, s->H, s->d_v));
}

static bool need(lm_model *m, void **memory, size_t *have, size_t bytes) {
    if (bytes <= *have) return true;
    cudaFree(*memory); /* waits for what uses it */
    *memory = NULL, *have = 0;
    if (!good(m, cudaMalloc(memory, bytes))) return false;
    *have = bytes;
    return true;
}

/* The work of n tokens behind to.at of tail: a recorded one, or one for this call only. */
static const dkv_cuda_work *prepare(lm_model *m, const lm_activations *a, int64_t n, lm_target to) {
    device *g = of(m);
    if (a == &m->one) return &of(to.cache)->work[to.layer];
    dkv_attention call = attention(m, a, n, to.cache, to.layer);
    size_t block, space;
    call.tail.n = to.at + n;
    if (!good(m, dkv_cuda_attend_size(&block, &space, &call, 1)) || !need(m, &g->block, &g->block_bytes, block) ||
        !need(m, &g->space, &g->space_bytes, space) ||
        !good(m, dkv_cuda_prepare(&g->work, &call, 1, NULL, g->block, block, g->space, space, 0, g->stream)))
        return NULL;
    return &g->work;
}

static bool append(lm_model *m, const lm_activations *a, int64_t n, lm_target to) {
    const int H = m->p.shape.H, Hkv = m->p.shape.Hkv;
    const dkv_cuda_work *work = prepare(m, a, n, to);
    return work && good(m, dkv_cuda_append(work, view(m, to.cache, a, H), view(m, to.cache, a, H + Hkv),
                                           of(m)->stream));
}

/* By the work that append prepared. */
static bool attend(lm_model *m, const lm_activations *a, int64_t n, lm_target to) {
    (void)n;
    const dkv_cuda_work *work = a == &m->one ? &of(to.cache)->work[to.layer] : &of(m)->work;
    return good(m, dkv_cuda_attend(work, of(m)->stream));
}

/* ==== caches ==== */

static void count_bytes(lm_cache *c, int64_t bytes) {
    lm_model *m = c->m;
    m->kv_bytes += bytes - of(c)->bytes;
    of(c)->bytes = bytes;
    if (m->kv_bytes > m->kv_peak) m->kv_peak = m->kv_bytes;
}

static void cache_close(lm_cache *c) {
    cache *k = of(c);
    cudaStreamSynchronize(of(c->m)->stream);
    count_bytes(c, 0);
    if (k->graph) cudaGraphExecDestroy(k->graph);
    cudaFree(k->memory);
    free(k->work);
    dkv_cuda_cache_destroy(k->own);
    free(k);
}

static dkv_result cache_open(lm_cache *c, const dkv_plan *plan, const dkv_shape *shape, const dkv_allocator *alloc) {
    (void)alloc;
    cache *k = (cache *)calloc(1, sizeof *k);
    if (!k) return DKV_ERR_MEMORY;
    c->own = k;
    dkv_result r = dkv_cuda_cache_create(&k->own, plan, shape, c->type, c->capacity);
    if (r) return cache_close(c), r;
    c->plan = dkv_cuda_cache_plan(k->own);
    count_bytes(c, dkv_cuda_cache_bytes(k->own));
    return DKV_OK;
}

static dkv_result cache_truncate(lm_cache *c) { return dkv_cuda_cache_truncate(of(c)->own, c->tail, of(c->m)->stream); }

static dkv_result cache_pack(lm_cache *c, int l, lm_cache *dense) {
    const dkv_tensor unused = {NULL, dkv_tail_type(c->type), 0, 0, 0};
    dkv_segment kv = dkv_cuda_cache_attention(of(dense)->own, 0, unused, 1, unused).tail;
    kv.n = c->plan->T_c;
    dkv_result r = dkv_cuda_cache_pack(of(c)->own, l, &kv, of(c->m)->stream);
    count_bytes(c, dkv_cuda_cache_bytes(of(c)->own));
    return r;
}

/* Works of one token for all layers, whose tails' length is read at each launch. */
static bool prepare_one(lm_model *m, lm_cache *c) {
    device *g = of(m);
    cache *k = of(c);
    const int L = m->p.shape.L;
    size_t block = 0, space = 0, b, s;
    for (int l = 0; l < L; l++) {
        dkv_attention call = attention(m, &m->one, 1, c, l);
        if (!good(m, dkv_cuda_attend_size(&b, &s, &call, 1))) return false;
        if (b > block) block = (b + 127) / 128 * 128;
        if (s > space) space = s;
    }
    k->work = (dkv_cuda_work *)calloc((size_t)L, sizeof *k->work);
    if (!k->work) return lm_fail(m, "no memory for %d layers", L);
    if (!good(m, cudaMalloc(&k->memory, (size_t)L * block + space))) return false;
    char *at = (char *)k->memory, *shared = at + (size_t)L * block;
    for (int l = 0; l < L; l++, at += block) {
        dkv_attention call = attention(m, &m->one, 1, c, l);
        if (!good(m, dkv_cuda_prepare(&k->work[l], &call, 1, dkv_cuda_cache_length(k->own), at, block, shared, space, 0,
                                      g->stream))) return false;
    }
    return true;
}

/* A failure leaves no work, so that the next call tries again. */
static bool prepared(lm_model *m, lm_cache *c) {
    cache *k = of(c);
    if (k->work || prepare_one(m, c)) return true;
    cudaFree(k->memory);
    free(k->work);
    k->memory = NULL, k->work = NULL;
    return false;
}

static bool record(lm_model *m, lm_cache *c, bool (*forward)(lm_model *m, lm_cache *c)) {
    device *g = of(m);
    cache *k = of(c);
    cudaGraph_t graph = NULL;
    if (k->graph) return true;
    /* relaxed: a kernel's first launch may load it */
    if (!prepared(m, c) || !good(m, cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeRelaxed))) return false;
    bool ok = forward(m, c);
    cudaError_t end = cudaStreamEndCapture(g->stream, &graph);
    ok = ok && good(m, end) && good(m, cudaGraphInstantiate(&k->graph, graph, 0));
    if (graph) cudaGraphDestroy(graph);
    return ok;
}

static bool replay(lm_model *m, lm_cache *c) { return good(m, cudaGraphLaunch(of(c)->graph, of(m)->stream)); }

/* ==== logits ==== */

static bool logits(lm_model *m, const lm_activations *a, const float *x) {
    const lm_rows y = {of(m)->logits, m->p.V};
    return norm(m, a->norm, x, m->output_norm, 1) && matmul(m, a, &y, &m->output, 1, a->norm, 1);
}

static bool logits_all(lm_model *m, const lm_activations *a, float *to) {
    const int64_t V = m->p.V, E = m->p.E;
    float *y;
    if (!good(m, cudaMalloc(&y, (size_t)(LOGIT_ROWS * V) * sizeof *y))) return false;
    bool ok = true;
    for (int64_t i = 0, n; i < a->n_all && ok; i += n) {
        n = a->n_all - i < LOGIT_ROWS ? a->n_all - i : LOGIT_ROWS;
        if (n > a->n) n = a->n;
        const lm_rows rows = {y, V};
        ok = norm(m, a->norm, a->x + i * E, m->output_norm, n) && matmul(m, a, &rows, &m->output, 1, a->norm, n) &&
             download(m, to + i * V, y, (size_t)(n * V) * sizeof *y);
    }
    cudaFree(y);
    return ok;
}

static bool wait_cuda(lm_model *m, double *now) {
    bool ok = good(m, cudaStreamSynchronize(of(m)->stream));
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *now = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    return ok;
}

static bool fetch(lm_model *m, float *to, int32_t *best) {
    device *g = of(m);
    if (best && (!launch(m, best_kernel, 1, MANY, g->best, (const float *)g->logits, (int32_t)m->p.V) ||
                 !download(m, best, g->best, sizeof *best))) return false;
    return (!to || download(m, to, g->logits, (size_t)m->p.V * sizeof *to)) &&
           good(m, cudaStreamSynchronize(g->stream));
}

/* ==== memory ==== */

/* Offsets into one block, each aligned for any load. */
static size_t place(size_t *total, int64_t bytes) {
    size_t at = *total;
    *total += ((size_t)bytes + 255) / 256 * 256;
    return at;
}

static bool make(lm_model *m, lm_activations *a, int64_t n_all) {
    const lm_params *p = &m->p;
    const int64_t n = n_all < CHUNK ? n_all : CHUNK, H = p->shape.H, Hkv = p->shape.Hkv, d = p->shape.d_k;
    const int64_t row = (H + 2 * Hkv) * d, F = p->F;
    size_t total = 0;
    const size_t x = place(&total, n_all * p->E * 4), rope = place(&total, n_all * p->n_rot * 4),
                 norm = place(&total, n * p->E * 2), q = place(&total, n * row * 4), qkv = place(&total, n * row * 2),
                 o = place(&total, n * H * d * 2), gate = place(&total, n * 2 * F * 4), act = place(&total, n * F * 2),
                 in = place(&total, (int64_t)sizeof(input) + n_all * 4);
    void *block;
    if (!good(m, cudaMalloc(&block, total))) return false;
    char *at = (char *)block;
    *a = lm_activations{};
    a->n_all = n_all, a->n = n, a->block = block;
    a->x = (float *)(at + x), a->rope = (float *)(at + rope), a->norm = at + norm;
    a->q = {(float *)(at + q), row}, a->k = {a->q.data + H * d, row}, a->v = {a->k.data + Hkv * d, row};
    a->qkv = at + qkv, a->o = at + o;
    a->gate = {(float *)(at + gate), 2 * F}, a->up = {a->gate.data + F, 2 * F}, a->act = at + act;
    a->input = at + in;
    return true;
}

static void release(lm_model *m, lm_activations *a) {
    (void)m;
    cudaFree(a->block); /* waits for what uses it */
}

/* ==== learning ==== */

static __global__ void start_kernel(float *x, float2 *rope, const int32_t *token, const int64_t *pos, const bf16 *embed,
                                    const double *inv_freq, int64_t E, int64_t pairs) {
    const int64_t i = blockIdx.x;
    overlap();
    place_token(x + i * E, rope + i * pairs, token[i], pos[i], embed, inv_freq, E, pairs);
}

/* y[n][E] = x[index[n]]. A block per row. */
static __global__ void pick_kernel(float *y, const float *x, const int32_t *index, int64_t E) {
    const int64_t i = blockIdx.x;
    overlap();
    for (int64_t j = threadIdx.x; j < E; j += THREADS) y[i * E + j] = x[index[i] * E + j];
}

/* ln of the sum of exp(x[n]) for a block of MANY, max the greatest. */
static __device__ float block_log_sum(const float *x, float max, int64_t n) {
    float sum = 0;
    for (int64_t j = threadIdx.x; j < n; j += MANY) sum += expf(x[j] - max);
    return max + logf(block_sum<MANY>(sum));
}

/* mark[n] of x[n][V], and unless scale is NULL x <- scale (softmax(x) - one at target). A block of MANY per row. */
static __global__ void judge_kernel(lm_mark *mark, float *x, const int32_t *target, const float *scale,
                                    const float *reference, int64_t V) {
    const int64_t i = blockIdx.x;
    overlap();
    x += i * V;
    const int32_t best = block_best(x, (int32_t)V), want = target[i];
    const float lse = block_log_sum(x, x[best], V);
    float kl = 0;
    if (reference) {
        const float *y = reference + i * V, own = block_log_sum(y, y[block_best(y, (int32_t)V)], V);
        for (int64_t j = threadIdx.x; j < V; j += MANY) kl += expf(y[j] - own) * (y[j] - own - x[j] + lse);
        kl = block_sum<MANY>(kl);
    }
    if (threadIdx.x == 0) mark[i] = {(double)lse - (double)x[want], (double)kl, best == want};
    if (!scale) return;
    __syncthreads(); /* the mark has read x */
    for (int64_t j = threadIdx.x; j < V; j += MANY) x[j] = scale[i] * (expf(x[j] - lse) - (j == want ? 1.0f : 0.0f));
}

/* Rows of cols floats, ld apart, to bf16, to_ld apart. Grid: pieces of a row, n. */
static __global__ void round_kernel(bf16 *to, int64_t to_ld, const float *from, int64_t ld, int64_t cols) {
    const int64_t j = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    overlap();
    if (j < cols) to[blockIdx.y * to_ld + j] = __float2bfloat16(from[blockIdx.y * ld + j]);
}

/* y = x r g, r = 1 / rms: dx += r (g dy - x r^2 mean(g dy x)), rows of x and dx by index. A block per row. */
static __global__ void norm_back_kernel(float *dx, const float *dy, const float *x, const int32_t *index,
                                        const float *gain, int64_t E, float eps) {
    overlap();
    const int64_t at = (index ? index[blockIdx.x] : (int64_t)blockIdx.x) * E;
    float squares = 0, sum = 0;
    x += at, dx += at, dy += blockIdx.x * E;
    for (int64_t j = threadIdx.x; j < E; j += THREADS) squares += x[j] * x[j], sum += gain[j] * dy[j] * x[j];
    const float r = 1 / sqrtf(block_sum<THREADS>(squares) / (float)E + eps);
    const float pull = r * r * r * block_sum<THREADS>(sum) / (float)E;
    for (int64_t j = threadIdx.x; j < E; j += THREADS) dx[j] += r * gain[j] * dy[j] - pull * x[j];
}

/* x[n][heads][d], rotated back in place. Grid: heads, n; a thread per pair. */
static __global__ void rotate_back_kernel(float *x, int64_t ld, const float2 *rope, int d, int pairs, bool half_split) {
    float *head = x + blockIdx.y * ld + (int64_t)blockIdx.x * d;
    overlap();
    for (int j = (int)threadIdx.x; j < pairs; j += (int)blockDim.x) {
        const float2 angle = rope[(int64_t)blockIdx.y * pairs + j];
        float *a = head + (half_split ? j : 2 * j), *b = a + (half_split ? pairs : 1);
        const float p = *a, q = *b;
        *a = p * angle.x + q * angle.y;
        *b = q * angle.x - p * angle.y;
    }
}

/* Grid: pieces of a row, n; gate, up and their gradients lie in rows of 2 F. */
static __global__ void swiglu_back_kernel(float *d_gate_up, const float *d_act, const float *gate_up, int64_t F) {
    const int64_t i = blockIdx.y, j = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    overlap();
    if (j >= F) return;
    const float g = gate_up[i * 2 * F + j], u = gate_up[i * 2 * F + F + j], d = d_act[i * F + j];
    const float s = 1 / (1 + expf(-g));
    d_gate_up[i * 2 * F + j] = d * u * s * (1 + g * (1 - s));
    d_gate_up[i * 2 * F + F + j] = d * g * s;
}

static bool hold(lm_model *m, lm_memory *y, size_t bytes) { return need(m, &y->data, &y->bytes, bytes); }

static void drop(lm_model *m, lm_memory *y) {
    (void)m;
    cudaFree(y->data); /* waits for what uses it */
    *y = {NULL, 0};
}

static bool copy(lm_model *m, void *to, const void *from, size_t bytes) {
    return good(m, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, of(m)->stream));
}

static bool zero(lm_model *m, void *to, size_t bytes) { return good(m, cudaMemsetAsync(to, 0, bytes, of(m)->stream)); }

static bool start(lm_model *m, lm_activations *a, const int32_t *token, const int64_t *pos) {
    const device *g = of(m);
    return launch(m, start_kernel, (unsigned)a->n_all, THREADS, a->x, (float2 *)a->rope, token, pos, g->embed,
                  (const double *)g->inv_freq, m->p.E, m->p.n_rot / 2);
}

static bool gates(lm_model *m, float *ln_u, const dkv_gates *g, const float *logit, dkv_draw draw) {
    return good(m, dkv_cuda_gates_union(NULL, ln_u, g, logit, draw, 1, of(m)->stream));
}

static bool gates_back(lm_model *m, float *da, const dkv_gates *g, const float *logit, dkv_draw draw,
                       const float *d_ln_u) {
    return good(m, dkv_cuda_gates_union_backward(da, g, logit, draw, 1, d_ln_u, of(m)->stream));
}

static dkv_segment context(const lm_cache *c, int l) {
    const dkv_tensor unused = {NULL, dkv_tail_type(c->type), 0, 0, 0};
    return dkv_cuda_cache_attention(of(c)->own, l, unused, 1, unused).context;
}

static bool prepare_gated(lm_model *m, const dkv_gated *c, int64_t n) {
    device *g = of(m);
    size_t block, space;
    return good(m, dkv_cuda_gated_size(&block, &space, c, n)) && need(m, &g->block, &g->block_bytes, block) &&
           need(m, &g->space, &g->space_bytes, space) &&
           good(m, dkv_cuda_gated_prepare(&g->gated, c, n, g->block, block, g->space, space, g->stream));
}

static bool gated(lm_model *m, const lm_activations *a, const dkv_gated *c, int64_t n) {
    const int64_t count = a->n * m->p.shape.H * m->p.shape.d_v;
    return prepare_gated(m, c, n) && good(m, dkv_cuda_gated_forward(&of(m)->gated, of(m)->stream)) &&
           launch(m, to_bf16_kernel, blocks(count, THREADS), THREADS, (bf16 *)a->o,
                  (const float *)c->suffix->out.data, count);
}

static bool gated_back(lm_model *m, const dkv_gated *c, int64_t n) {
    return prepare_gated(m, c, n) && good(m, dkv_cuda_gated_backward(&of(m)->gated, of(m)->stream));
}

static bool score(lm_model *m, int64_t *rank, const dkv_attention *a, int64_t n, const int64_t *source) {
    device *g = of(m);
    size_t space;
    return good(m, dkv_cuda_score_size(&space, a, n)) && need(m, &g->space, &g->space_bytes, space) &&
           good(m, dkv_cuda_score(rank, a, n, source, g->space, space, g->stream));
}

static bool pick(lm_model *m, float *y, const float *x, const int32_t *index, int64_t n) {
    return launch(m, pick_kernel, (unsigned)n, THREADS, y, x, index, m->p.E);
}

static bool logits_some(lm_model *m, float *y, const void *x, int64_t n) {
    const lm_rows rows = {y, m->p.V};
    return matmul(m, NULL, &rows, &m->output, 1, x, n);
}

static bool judge(lm_model *m, lm_mark *mark, float *logit, const int32_t *target, const float *scale,
                  const float *reference, int64_t n) {
    return launch(m, judge_kernel, (unsigned)n, MANY, mark, logit, target, scale, reference, m->p.V);
}

/* One product for all n_w, whose weights lie one behind the other, over gradients rounded to bf16. */
static bool matmul_back(lm_model *m, const lm_activations *a, float *dx, const lm_weight *w, int n_w, const lm_rows *dy,
                        int64_t n) {
    (void)a;
    const float one = 1, none = 0;
    const int64_t cols = w->mat.cols;
    int64_t rows = 0, at = 0;
    for (int k = 0; k < n_w; k++) rows += w[k].mat.rows;
    if (!hold(m, &of(m)->rounded, (size_t)(n * rows) * sizeof(bf16))) return false;
    bf16 *y = (bf16 *)of(m)->rounded.data;
    for (int k = 0; k < n_w; at += w[k++].mat.rows) {
        const dim3 grid(blocks(w[k].mat.rows, THREADS), (unsigned)n);
        if (!launch(m, round_kernel, grid, THREADS, y + at, rows, (const float *)dy[k].data, dy[k].ld, w[k].mat.rows))
            return false;
    }
    cublasStatus_t e = cublasGemmEx(of(m)->blas, CUBLAS_OP_N, CUBLAS_OP_N, (int)cols, (int)n, (int)rows, &one, w->bf16,
                                    CUDA_R_16BF, (int)cols, y, CUDA_R_16BF, (int)rows, &none, dx, CUDA_R_32F, (int)cols,
                                    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return e ? lm_fail(m, "cuBLAS: %s", cublasGetStatusString(e)) : true;
}

static bool logits_back(lm_model *m, float *d_norm, float *d_logits, int64_t n) {
    const lm_rows dy = {d_logits, m->p.V};
    return matmul_back(m, NULL, d_norm, &m->output, 1, &dy, n);
}

static bool norm_back(lm_model *m, float *dx, const float *dy, const float *x, const int32_t *index, const float *gain,
                      int64_t n) {
    return launch(m, norm_back_kernel, (unsigned)n, THREADS, dx, dy, x, index, gain, m->p.E, (float)m->p.eps);
}

static bool rotate_back(lm_model *m, lm_rows dq, lm_rows dk, const float *rope, int64_t n) {
    const dkv_shape *s = &m->p.shape;
    const int pairs = (int)m->p.n_rot / 2;
    const dim3 q((unsigned)s->H, (unsigned)n), k((unsigned)s->Hkv, (unsigned)n);
    const float2 *angle = (const float2 *)rope;
    return launch(m, rotate_back_kernel, q, 64, dq.data, dq.ld, angle, (int)s->d_k, pairs, m->p.half_split) &&
           launch(m, rotate_back_kernel, k, 64, dk.data, dk.ld, angle, (int)s->d_k, pairs, m->p.half_split);
}

static bool swiglu_back(lm_model *m, const lm_activations *a, lm_rows d_gate, lm_rows d_up, const float *d_act,
                        int64_t n) {
    (void)d_up; /* as a->up, it lies behind */
    const dim3 grid(blocks(m->p.F, THREADS), (unsigned)n);
    return launch(m, swiglu_back_kernel, grid, THREADS, d_gate.data, d_act, (const float *)a->gate.data, m->p.F);
}

/* ==== opening ==== */

/* What matrices pass through on their way to the device, a slab of rows at a time. */
struct slab {
    int64_t floats;
    float *host, *dev; /* [floats] */
};

static bool upload_matrix(lm_model *m, bf16 *to, const quant_mat *w, slab through) {
    const int64_t step = through.floats / w->cols;
    for (int64_t first = 0, rows; first < w->rows; first += rows) {
        rows = w->rows - first < step ? w->rows - first : step;
        const int64_t n = rows * w->cols;
        lm_dequantise(through.host, w, first, rows);
        if (!upload(m, through.dev, through.host, (size_t)n * sizeof(float))) return false;
        bf16 *slab_of = to + first * w->cols;
        if (!launch(m, to_bf16_kernel, blocks(n, THREADS), THREADS, slab_of, (const float *)through.dev, n) ||
            !good(m, cudaStreamSynchronize(of(m)->stream))) return false;
    }
    return true;
}

static quant_mat embedding(const lm_model *m) { return {m->embed->type, m->p.V, m->p.E, m->embed->data, NULL}; }
static bool is_tied(const lm_model *m) { return m->embed->data == m->output.mat.data; }

static int64_t weight_count(const lm_model *m) {
    int64_t n = (is_tied(m) ? 1 : 2) * m->p.V * m->p.E;
    for (int k = 0; k < LAYER_WEIGHTS; k++)
        n += m->p.shape.L * m->layers[0].w[k].mat.rows * m->layers[0].w[k].mat.cols;
    return n;
}

/* Layers in order, then output and embedding, which may be one. */
static bool upload_all(lm_model *m, slab through) {
    bf16 *at = of(m)->weights;
    for (int i = 0; i < m->p.shape.L * LAYER_WEIGHTS; i++) {
        lm_weight *w = &m->layers[i / LAYER_WEIGHTS].w[i % LAYER_WEIGHTS];
        w->bf16 = at;
        if (!upload_matrix(m, at, &w->mat, through)) return false;
        at += w->mat.rows * w->mat.cols;
    }
    m->output.bf16 = of(m)->embed = at;
    if (!upload_matrix(m, at, &m->output.mat, through)) return false;
    if (is_tied(m)) return true;
    of(m)->embed = at += m->p.V * m->p.E;
    const quant_mat embed = embedding(m);
    return upload_matrix(m, at, &embed, through);
}

static bool upload_weights(lm_model *m) {
    slab through = {m->p.shape.H * (int64_t)m->p.shape.d_k, NULL, NULL}; /* at least a row of any matrix */
    if (through.floats < m->p.E) through.floats = m->p.E;
    if (through.floats < m->p.F) through.floats = m->p.F;
    if (through.floats < SLAB) through.floats = SLAB;
    const size_t bytes = (size_t)through.floats * sizeof(float);
    through.host = (float *)malloc(bytes);
    bool ok = through.host && good(m, cudaMalloc(&of(m)->weights, (size_t)weight_count(m) * sizeof(bf16))) &&
              good(m, cudaMalloc(&through.dev, bytes)) && upload_all(m, through);
    cudaFree(through.dev);
    free(through.host);
    return ok || through.host ? ok : lm_fail(m, "no memory for a slab of weights");
}

/* The model's vectors are the device's from here on. */
static bool upload_vectors(lm_model *m) {
    device *g = of(m);
    const size_t bytes = (size_t)m->n_vectors * sizeof *g->vectors;
    const size_t pairs = (size_t)m->p.n_rot / 2 * sizeof *g->inv_freq;
    if (!good(m, cudaMalloc(&g->vectors, bytes)) || !upload(m, g->vectors, m->vectors, bytes) ||
        !good(m, cudaMalloc(&g->inv_freq, pairs)) || !upload(m, g->inv_freq, m->inv_freq, pairs)) return false;
    for (int l = 0; l < m->p.shape.L; l++) {
        lm_layer *to = &m->layers[l];
        to->attn_norm = g->vectors + (to->attn_norm - m->vectors);
        to->ffn_norm = g->vectors + (to->ffn_norm - m->vectors);
        for (int k = 0; k < LAYER_WEIGHTS; k++)
            if (to->w[k].bias) to->w[k].bias = g->vectors + (to->w[k].bias - m->vectors);
    }
    m->output_norm = g->vectors + (m->output_norm - m->vectors);
    return true;
}

static bool open_blas(lm_model *m) {
    device *g = of(m);
    cublasStatus_t e = cublasCreate(&g->blas);
    if (!e) e = cublasSetStream(g->blas, g->stream);
    if (!e) e = cublasSetWorkspace(g->blas, g->blas_space, BLAS_BYTES);
    return e ? lm_fail(m, "cuBLAS: %s", cublasGetStatusString(e)) : true;
}

static bool open_cuda(lm_model *m) {
    device *g = (device *)calloc(1, sizeof *g);
    int arch, sms, at;
    cudaDeviceProp about;
    cudaFuncAttributes kernel;
    if (!(m->own = g)) return lm_fail(m, "no memory for a model of this shape");
    dkv_result r = dkv_cuda_device(&arch, &sms);
    if (r) return lm_fail(m, "%s", dkv_result_string(r));
    if (!good(m, cudaGetDevice(&at)) || !good(m, cudaGetDeviceProperties(&about, at)) ||
        !good(m, cudaFuncGetAttributes(&kernel, norm_kernel)) ||
        !good(m, cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking)) ||
        !good(m, cudaMalloc(&g->blas_space, BLAS_BYTES)) || !open_blas(m) ||
        !good(m, cudaMalloc(&g->logits, (size_t)m->p.V * sizeof *g->logits)) ||
        !good(m, cudaMalloc(&g->best, sizeof *g->best)) || !make(m, &m->one, 1)) return false;
    g->overlaps = kernel.ptxVersion >= 90; /* what was compiled, not what runs it, has overlap's instructions */
    snprintf(m->where, sizeof m->where, "%.90s", about.name);
    return upload_weights(m) && upload_vectors(m) && good(m, cudaStreamSynchronize(g->stream));
}

static void close_cuda(lm_model *m) {
    device *g = of(m);
    if (!g) return;
    release(m, &m->one);
    drop(m, &g->rounded);
    if (g->blas) cublasDestroy(g->blas);
    void *const memory[] = {g->blas_space, g->weights, g->vectors, g->inv_freq, g->logits, g->best, g->block, g->space};
    for (void *p : memory) cudaFree(p);
    if (g->stream) cudaStreamDestroy(g->stream);
    free(g);
}

extern "C" const lm_device lm_cuda = {
    open_cuda, close_cuda, cache_open, cache_close, cache_truncate, cache_pack, make, release, input_cuda, begin, NULL,
    norm, matmul, matmul_add, rotate, append, attend, swiglu, logits, logits_all, wait_cuda, fetch, record, replay,
    sizeof(bf16), CHUNK, hold, drop, copy, zero, start, gates, gates_back, context, gated, gated_back, score, pick,
    logits_some, judge, logits_back, matmul_back, norm_back, rotate_back, swiglu_back,
};
