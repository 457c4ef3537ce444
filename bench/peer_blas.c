/* peer_blas.c: blocked attention in f32 from OpenBLAS calls. Tasks of (KV head, 64 queries, stretch of keys) are shared
   out over threads, each running single-threaded BLAS on tiles of 512 keys with an online softmax. */
#include "bench.h"

#include <cblas.h>
#include <math.h>
#include <omp.h>
#include <string.h>

enum { GEMV, GEMM, TILE = 512, QUERIES = 64 };

typedef struct {
    const bench_case *c;
    const bench_kv *kv;
    int mode;
    int64_t rows, blocks, splits, tasks; /* rows of a full block: G * queries */
    float *part, *scratch;               /* [tasks][rows][d + 2], [threads][rows][d + TILE] */
    float *out;
} state;

#define INLINE static inline __attribute__((always_inline))

/* s[n] <- exp(s - m), returns the sum; below -87 gives 1e-38. */
INLINE float exp_body(float *s, int64_t n, float m) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        float x = (s[i] - m < -87 ? -87 : s[i] - m) * 1.44269504f, whole = x + 12582912.f - 12582912.f;
        float f = x - whole, y = 1.33978e-3f, two_to_whole;
        y = y * f + 9.67705e-3f, y = y * f + 5.55073e-2f, y = y * f + 2.40222e-1f, y = y * f + 6.93147e-1f;
        y = y * f + 1;
        int32_t bits = ((int32_t)whole + 127) << 23;
        memcpy(&two_to_whole, &bits, 4);
        sum += s[i] = y * two_to_whole;
    }
    return sum;
}

static float exp_any(float *s, int64_t n, float m) { return exp_body(s, n, m); }
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static float exp_avx2(float *s, int64_t n, float m) { return exp_body(s, n, m); }
__attribute__((target("avx512f"))) static float exp_avx512(float *s, int64_t n, float m) { return exp_body(s, n, m); }
#define EXP (__builtin_cpu_supports("avx512f") ? exp_avx512 : __builtin_cpu_supports("avx2") ? exp_avx2 : exp_any)
#else
#define EXP exp_any
#endif

/* logits s[rows][n] = q k^T, or with values q[rows][d] += s v: by one product of matrices or a vector's per row. */
static void multiply(int mode, bool values, int64_t rows, int64_t n, int64_t d, float *q, const float *kv,
                     float *s) {
    const int R = (int)rows, N = (int)n, D = (int)d;
    if (mode == GEMM && !values)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, R, N, D, 1, q, D, kv, D, 0, s, TILE);
    else if (mode == GEMM)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, R, D, N, 1, s, TILE, kv, D, 1, q, D);
    for (int64_t r = 0; mode == GEMV && r < rows; r++)
        if (values) cblas_sgemv(CblasRowMajor, CblasTrans, N, D, 1, kv, D, s + r * TILE, 1, 1, q + r * d, 1);
        else cblas_sgemv(CblasRowMajor, CblasNoTrans, N, D, 1, kv, D, q + r * d, 1, 0, s + r * TILE, 1);
}

/* part[rows][d + 2]: sum of exp(logit - max) v as [rows][d], then the maxima and the sums. */
static void run_task(const state *s, int64_t layer, int64_t task, float *scratch) {
    const bench_case *c = s->c;
    const int64_t G = c->H / c->Hkv, d = c->d, split = task % s->splits, block = task / s->splits % s->blocks;
    const int64_t g = task / s->splits / s->blocks, n = c->n[g], first = block * QUERIES;
    const int64_t queries = c->N_q - first < QUERIES ? c->N_q - first : QUERIES, rows = queries * G;
    const int64_t end = n - c->N_q + first + queries, step = (end / s->splits / TILE + 1) * TILE;
    const int64_t at = layer % s->kv->layers * s->kv->layer_bytes + g * s->kv->head_bytes;
    const float *k = (const float *)(const void *)(s->kv->k + at), *v = (const float *)(const void *)(s->kv->v + at);
    float *q = scratch, *logits = scratch + s->rows * d, *o = s->part + task * s->rows * (d + 2);
    float *max = o + s->rows * d, *sum = max + s->rows, (*exps)(float *, int64_t, float) = EXP;
    for (int64_t r = 0; r < rows; r++) {
        const float *from = c->q + ((first + r / G) * c->H + g * G + r % G) * d;
        for (int64_t i = 0; i < d; i++) q[r * d + i] = from[i] / sqrtf((float)d), o[r * d + i] = 0;
        max[r] = -1e30f, sum[r] = 0;
    }
    for (int64_t j = split * step; j < end && j < (split + 1) * step; j += TILE) {
        const int64_t tile = end - j < TILE ? end - j : TILE;
        multiply(s->mode, false, rows, tile, d, q, k + j * d, logits);
        for (int64_t r = 0; r < rows; r++) {
            float *x = logits + r * TILE;
            const int64_t seen = n - c->N_q + 1 + first + r / G - j;
            for (int64_t i = seen < 0 ? 0 : seen; i < tile; i++) x[i] = -1e30f;
            const float m = fmaxf(max[r], x[cblas_ismax((int)tile, x, 1)]), shrink = expf(max[r] - m);
            sum[r] = sum[r] * shrink + exps(x, tile, m), max[r] = m;
            for (int64_t i = 0; i < d; i++) o[r * d + i] *= shrink;
        }
        multiply(s->mode, true, rows, tile, d, o, v + j * d, logits);
    }
}

/* out[N_q][H][d] from the parts of a (KV head, block), which stand one behind the other. */
static void combine(const state *s, int64_t g, int64_t block) {
    const bench_case *c = s->c;
    const int64_t G = c->H / c->Hkv, d = c->d, first = block * QUERIES, size = s->rows * (d + 2);
    const float *part = s->part + (g * s->blocks + block) * s->splits * size;
    for (int64_t r = 0; r < s->rows && first + r / G < c->N_q; r++) {
        float *out = s->out + ((first + r / G) * c->H + g * G + r % G) * d, m = -1e30f, sum = 0;
        for (int64_t p = 0; p < s->splits; p++) m = fmaxf(m, part[p * size + s->rows * d + r]);
        memset(out, 0, (size_t)d * sizeof *out);
        for (int64_t p = 0; p < s->splits; p++) {
            const float *o = part + p * size, w = expf(o[s->rows * d + r] - m);
            sum += w * o[s->rows * (d + 1) + r];
            for (int64_t i = 0; i < d; i++) out[i] += w * o[r * d + i];
        }
        for (int64_t i = 0; i < d; i++) out[i] /= sum;
    }
}

static const char *blas_open(void **out, const bench_case *c, int mode) {
    const int64_t G = c->H / c->Hkv, queries = c->N_q < QUERIES ? c->N_q : QUERIES;
    const int64_t blocks = (c->N_q + QUERIES - 1) / QUERIES;
    const int64_t splits = blocks == 1 ? 2 * c->threads : 1, tasks = c->Hkv * blocks * splits, rows = G * queries;
    if (mode == GEMV && G * c->N_q > 32) return "";
    state *s = *out = bench_alloc(sizeof *s);
    const bench_kv *kv = bench_kv_of(c, DKV_F32);
    if (!s || !kv) return "no memory";
    *s = (state){c, kv, mode, rows, blocks, splits, tasks, bench_alloc(tasks * rows * (c->d + 2) * 4),
                 bench_alloc(c->threads * rows * (c->d + TILE) * 4), bench_alloc(c->N_q * c->H * c->d * 4)};
    return s->part && s->scratch && s->out ? NULL : "no memory";
}

static double blas_run(void *p, int64_t layer) {
    state *s = p;
    openblas_set_num_threads(1);
    double start = bench_seconds();
#pragma omp parallel for schedule(dynamic) num_threads(s->c->threads)
    for (int64_t t = 0; t < s->tasks; t++)
        run_task(s, layer, t, s->scratch + omp_get_thread_num() * s->rows * (s->c->d + TILE));
#pragma omp parallel for num_threads(s->c->threads)
    for (int64_t t = 0; t < s->c->Hkv * s->blocks; t++) combine(s, t / s->blocks, t % s->blocks);
    return bench_seconds() - start;
}

static void blas_read(void *p, float *out) {
    const state *s = p;
    memcpy(out, s->out, (size_t)(s->c->N_q * s->c->H * s->c->d) * sizeof *out);
}

const bench_peer peers_blas[] = {
    {"openblas gemv", GEMV, blas_open, blas_run, blas_read, NULL},
    {"openblas gemm", GEMM, blas_open, blas_run, blas_read, NULL},
    {0},
};
