#define _GNU_SOURCE
#include "model.h"
#include "quant.h"
#include "team.h"

#include <cblas.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
static void omp_set_num_threads(int n) { (void)n; }
static double omp_get_wtime(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#endif

/* Tokens that pass a layer at once (sgemm copies the weights once per chunk: 256 cost a prefill 19 % more, 2048 gain
   nothing), rows of the output matrix that are dequantised at once, and elements that one thread takes at once. */
enum { CHUNK = 1024, SLAB = 4096, SPAN = 1 << 14 };

typedef struct {
    quant_mat mat;
    int64_t at;        /* where a layer's f32 buffer holds it, [rows][cols] */
    const float *bias; /* [rows] or NULL */
} weight;

enum { WQ, WK, WV, WO, GATE, UP, DOWN, LAYER_WEIGHTS };

typedef struct {
    weight w[LAYER_WEIGHTS];
    const float *attn_norm, *ffn_norm; /* [E] */
} layer;

/* Activations of up to n tokens at a time; x holds all tokens of a call, the others one chunk of them. */
typedef struct {
    int64_t n_all, n;
    float *x;          /* [n_all][E] the residual stream */
    float *rope;       /* [n_all][n_rot/2][2] cos, sin */
    float *norm;       /* [n][E] */
    float *q, *k, *v;  /* [n][H][d], [n][Hkv][d], [n][Hkv][d] */
    float *o;          /* [n][H][d] */
    float *out;        /* [n][E] */
    float *gate, *up;  /* [n][F] */
    const float *f32;  /* the layer's weights, dequantised; NULL: use them as the file has them (n_all = 1) */
    void *block;       /* what they all lie in */
} activations;

struct lm_model {
    lm_params p;
    gguf *file;
    int threads;
    team *team;               /* decodes; OpenMP's threads prefill */
    layer *layers;            /* [L] */
    const gguf_tensor *embed; /* [V][E] */
    weight output;            /* [V][E] */
    const float *output_norm; /* [E] */
    double *inv_freq;         /* [n_rot/2] radians per position */
    float *vectors;           /* norms and biases in f32 */
    uint8_t *packed;          /* quantised weights in quant.h's packed form */
    size_t packed_bytes;
    float *layer_f32;         /* one layer's weights, or a slab of the output's; NULL until needed */
    activations one;          /* of decoding: nothing is allocated there */
    void *vec;                /* the memory of its quant_vec */
    void *workspace;          /* dkv_attend's */
    size_t workspace_bytes;
    char error[256];
};

__attribute__((format(printf, 2, 3))) static int explain(lm_model *m, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(m->error, sizeof m->error, fmt, args);
    va_end(args);
    for (char *c = m->error; *c; c++) /* a tensor's name may hold anything; the line stays one */
        if ((unsigned char)*c < ' ') *c = '?';
    return -1;
}

#define fail(m, ...) (explain(m, __VA_ARGS__), false)

const lm_params *lm_get_params(const lm_model *m) { return &m->p; }
const gguf *lm_get_gguf(const lm_model *m) { return m->file; }
const char *lm_error(const lm_model *m) { return m->error; }

/* ==== operations: all that a device backend has to offer ==== */

static void op_embed(const lm_model *m, float *x, const int32_t *tokens, int64_t n) {
    const gguf_tensor *t = m->embed;
    size_t row_bytes = gguf_row_bytes(t->type, t->dims[0]);
    #pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++)
        quant_row_to_f32(x + i * m->p.E, (const char *)t->data + (size_t)tokens[i] * row_bytes, t->type, m->p.E);
}

/* y[n][E] = x[n][E] / rms(x) * gain[E] */
static void op_rmsnorm(const lm_model *m, float *y, const float *x, const float *gain, int64_t n) {
    int64_t E = m->p.E;
    #pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++) {
        const float *row = x + i * E;
        float *to = y + i * E, sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < E; j++) sum += row[j] * row[j];
        float scale = 1 / sqrtf(sum / (float)E + (float)m->p.eps);
        #pragma omp simd
        for (int64_t j = 0; j < E; j++) to[j] = row[j] * scale * gain[j];
    }
}

static void add_bias(float *y, const weight *w, int64_t n) {
    int64_t rows = w->mat.rows;
    #pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < rows; r++) y[i * rows + r] += w->bias[r];
}

/* y[n][rows] = x[n][cols] w[rows][cols]^T, y's rows ldy apart. Each thread calls a one-threaded OpenBLAS for its share
   of the rows: OpenBLAS's own pool would fight with OpenMP's for the cores, and which it has differs by package. */
static void gemm(float *y, int64_t ldy, const float *x, const float *w, int64_t n, int64_t rows, int64_t cols) {
    #pragma omp parallel
    {
        int64_t ith = omp_get_thread_num(), nth = omp_get_num_threads(), units = (rows + 15) / 16;
        int64_t first = units * ith / nth * 16, end = units * (ith + 1) / nth * 16, ld = cols;
        if (end > rows) end = rows;
        if (first < end)
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n, (int)(end - first), (int)cols, 1, x, (int)ld,
                        w + first * ld, (int)ld, 0, y + first, (int)ldy);
    }
}

/* One row by the weights as they are: each is read once. */
typedef struct {
    float *const *y;
    const weight *w;
    int n_w;
    quant_vec x;
} matvec_work;

static void matvec_part(void *arg, int ith, int nth) {
    const matvec_work *a = arg;
    for (int k = 0; k < a->n_w; k++) quant_matvec(a->y[k], &a->w[k].mat, &a->x, ith, nth);
}

static void matvec(const lm_model *m, float *const *y, const weight *w, int n_w, const float *x) {
    matvec_work work = {.y = y, .w = w, .n_w = n_w};
    quant_vec_set(&work.x, m->vec, x, w->mat.cols);
    team_run(m->team, team_size(m->team), matvec_part, &work);
}

/* y[k][n][rows of w k] = x[n][cols] W_k^T + bias_k, for n_w weights of one input; f32: the layer's, NULL if n = 1 */
static void op_matmul(const lm_model *m, float *const *y, const weight *w, int n_w, const float *x, int64_t n,
                      const float *f32) {
    if (!f32) matvec(m, y, w, n_w, x);
    for (int k = 0; k < n_w; k++) {
        if (f32) gemm(y[k], w[k].mat.rows, x, f32 + w[k].at, n, w[k].mat.rows, w[k].mat.cols);
        if (w[k].bias) add_bias(y[k], &w[k], n);
    }
}

/* x[n][heads][d], rotated in place by table[n][n_rot/2][2] */
static void op_rope(const lm_model *m, float *x, int64_t heads, const float *table, int64_t n) {
    int64_t d = m->p.shape.d_k, pairs = m->p.n_rot / 2;
    int64_t step = m->p.half_split ? 1 : 2, other = m->p.half_split ? pairs : 1;
    #pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < heads; h++) {
            float *head = x + (i * heads + h) * d;
            const float *angle = table + i * pairs * 2;
            for (int64_t j = 0; j < pairs; j++) {
                float a = head[j * step], b = head[j * step + other], c = angle[2 * j], s = angle[2 * j + 1];
                head[j * step] = a * c - b * s;
                head[j * step + other] = a * s + b * c;
            }
        }
}

static inline __attribute__((always_inline)) float with_bits(int32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline __attribute__((always_inline)) int32_t bits_of(float f) {
    int32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

/* e^x within 2 ulp for |x| <= 87; beyond, and for a NaN, |x| counts as 87. It is cut off as an integer: a loop with
   float comparisons, which may trap, is not vectorised. 2^n is made by adding n to an exponent. */
static inline __attribute__((always_inline)) float exp_f32(float x) {
    const int32_t magnitude = bits_of(x) & INT32_MAX, most = 0x42ae0000; /* 87 */
    x = with_bits((magnitude < most ? magnitude : most) | (bits_of(x) & INT32_MIN));
    float shifted = x * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f; /* n = rint(x / ln 2) */
    float r = x - n * 0.693359375f + n * 2.12194440e-4f, e = 1.0f / 5040; /* ln 2 in two parts */
    e = e * r + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1;
    e = e * r + 1;
    return e * with_bits((int32_t)(((uint32_t)bits_of(shifted) + 127) << 23)); /* the low bits of shifted are n */
}

/* One loop, compiled for each level of quant.h. */
static inline __attribute__((always_inline)) void swiglu(float *gate, const float *up, int64_t count) {
    #pragma omp simd
    for (int64_t i = 0; i < count; i++) gate[i] = gate[i] / (1 + exp_f32(-gate[i])) * up[i];
}

#if defined(__x86_64__)
#define LEVEL(target_isa) static __attribute__((target(target_isa)))
#else
#define LEVEL(target_isa) static
#endif

static void swiglu_scalar(float *gate, const float *up, int64_t count) { swiglu(gate, up, count); }
LEVEL("avx2") void swiglu_avx2(float *gate, const float *up, int64_t count) { swiglu(gate, up, count); }
LEVEL("avx512f") void swiglu_avx512(float *gate, const float *up, int64_t count) { swiglu(gate, up, count); }

/* gate[count] = silu(gate) * up */
static void op_swiglu(float *gate, const float *up, int64_t count) {
    void (*const leaf[])(float *, const float *, int64_t) = {swiglu_scalar, swiglu_avx2, swiglu_avx512};
    int level = quant_simd_level();
    #pragma omp parallel for if (count > SPAN)
    for (int64_t i = 0; i < count; i += SPAN) leaf[level](gate + i, up + i, count - i < SPAN ? count - i : SPAN);
}

/* x[count] += y */
static void op_add(float *x, const float *y, int64_t count) {
    #pragma omp parallel for simd if (count > SPAN)
    for (int64_t i = 0; i < count; i++) x[i] += y[i];
}

static void run_threads(void *user, int nth, void (*task)(void *arg, int ith, int nth), void *arg) {
    (void)user;
    #pragma omp parallel for num_threads(nth) schedule(static, 1)
    for (int ith = 0; ith < nth; ith++) task(arg, ith, nth);
}

/* Appends k, v [n][Hkv][d] to a layer of the cache. */
static bool op_append(lm_model *m, dkv_cache *cache, int kv_layer, const activations *a, int64_t n) {
    const dkv_shape *s = &m->p.shape;
    dkv_tensor k = dkv_thd(a->k, DKV_F32, s->Hkv, s->d_k), v = dkv_thd(a->v, DKV_F32, s->Hkv, s->d_v);
    dkv_result r = dkv_cache_append(cache, kv_layer, k, v, n);
    return r ? fail(m, "cache: %s", dkv_result_string(r)) : true;
}

/* out [n][H][d] <- q [n][H][d], whose own keys were just appended, over all of a layer of the cache */
static bool op_attend(lm_model *m, dkv_cache *cache, int kv_layer, const activations *a, int64_t n) {
    const dkv_shape *s = &m->p.shape;
    dkv_tensor q = dkv_thd(a->q, DKV_F32, s->H, s->d_k), o = dkv_thd(a->o, DKV_F32, s->H, s->d_v);
    dkv_attention call = dkv_cache_attention(cache, kv_layer, q, n, o);
    dkv_parallel threads = {n > 1 ? run_threads : team_run, m->team, m->threads};
    size_t bytes;
    dkv_result r = dkv_attend_size(&bytes, &call, 1, m->threads);
    if (!r && bytes > m->workspace_bytes) {
        free(m->workspace);
        m->workspace_bytes = (bytes + bytes / 4 + 63) / 64 * 64; /* a growing tail must not reallocate every token */
        m->workspace = aligned_alloc(64, m->workspace_bytes);
        if (!m->workspace) return m->workspace_bytes = 0, fail(m, "no memory for attention");
    }
    if (!r) r = dkv_attend(&call, 1, m->workspace, m->workspace_bytes, &threads);
    return r ? fail(m, "attention: %s", dkv_result_string(r)) : true;
}

/* ==== the graph ==== */

/* Where a layer's K and V go, and whether anything else of it is used: of a prefill's last layer nothing is. */
typedef struct {
    dkv_cache *cache;
    int layer;
    bool kv_only;
} target;

/* x[n][E] through one layer */
static bool layer_forward(lm_model *m, const layer *l, const activations *a, float *x, const float *rope, int64_t n,
                          target to) {
    float *qkv[] = {a->q, a->k, a->v};
    int first = to.kv_only ? WK : WQ;
    op_rmsnorm(m, a->norm, x, l->attn_norm, n);
    op_matmul(m, qkv + first, &l->w[first], WO - first, a->norm, n, a->f32);
    op_rope(m, a->k, m->p.shape.Hkv, rope, n);
    if (!op_append(m, to.cache, to.layer, a, n)) return false;
    if (to.kv_only) return true;

    op_rope(m, a->q, m->p.shape.H, rope, n);
    if (!op_attend(m, to.cache, to.layer, a, n)) return false;
    op_matmul(m, &(float *){a->out}, &l->w[WO], 1, a->o, n, a->f32);
    op_add(x, a->out, n * m->p.E);

    op_rmsnorm(m, a->norm, x, l->ffn_norm, n);
    op_matmul(m, (float *[]){a->gate, a->up}, &l->w[GATE], 2, a->norm, n, a->f32);
    op_swiglu(a->gate, a->up, n * m->p.F);
    op_matmul(m, &(float *){a->out}, &l->w[DOWN], 1, a->gate, n, a->f32);
    op_add(x, a->out, n * m->p.E);
    return true;
}

static void dequantise(float *to, const quant_mat *w, int64_t first, int64_t rows) {
    size_t row_bytes = gguf_row_bytes(w->type, w->cols);
    #pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        quant_row_to_f32(to + r * w->cols, (const char *)w->data + (size_t)(first + r) * row_bytes, w->type, w->cols);
}

static void load_layer(const lm_model *m, const layer *l) {
    for (int k = 0; k < LAYER_WEIGHTS; k++)
        dequantise(m->layer_f32 + l->w[k].at, &l->w[k].mat, 0, l->w[k].mat.rows);
}

/* The buffer that load_layer and logits_all fill: all layers have the same shapes. */
static bool need_layer_f32(lm_model *m) {
    if (m->layer_f32) return true;
    int64_t count = SLAB * m->p.E, sum = 0;
    for (int k = 0; k < LAYER_WEIGHTS; k++) sum += m->layers[0].w[k].mat.rows * m->layers[0].w[k].mat.cols;
    if (sum > count) count = sum;
    m->layer_f32 = malloc((size_t)count * sizeof *m->layer_f32);
    return m->layer_f32 ? true : fail(m, "no memory for a layer's weights in f32");
}

static void logits_last(lm_model *m, float *logits, const float *x, const activations *a) {
    op_rmsnorm(m, a->norm, x, m->output_norm, 1);
    op_matmul(m, &logits, &m->output, 1, a->norm, 1, NULL);
}

static void logits_all(lm_model *m, float *logits, const activations *a) {
    const quant_mat *w = &m->output.mat;
    op_rmsnorm(m, a->x, a->x, m->output_norm, a->n_all);
    for (int64_t first = 0; first < w->rows; first += SLAB) {
        int64_t rows = w->rows - first < SLAB ? w->rows - first : SLAB;
        dequantise(m->layer_f32, w, first, rows);
        gemm(logits + first, w->rows, a->x, m->layer_f32, a->n_all, rows, w->cols);
    }
}

/* ==== activations ==== */

static int64_t pad16(int64_t n) { return (n + 15) / 16 * 16; } /* floats, to 64 bytes */

static bool activations_make(activations *a, const lm_params *p, int64_t n_all) {
    int64_t n = n_all < CHUNK ? n_all : CHUNK, q = n * p->shape.H * p->shape.d_k, kv = n * p->shape.Hkv * p->shape.d_k;
    float **at[] = {&a->x, &a->rope, &a->norm, &a->q, &a->k, &a->v, &a->o, &a->out, &a->gate, &a->up};
    int64_t count[] = {n_all * p->E, n_all * p->n_rot, n * p->E, q, kv, kv, q, n * p->E, n * p->F, n * p->F}, total = 0;
    for (int i = 0; i < 10; i++) total += pad16(count[i]);
    float *next = aligned_alloc(64, (size_t)total * sizeof *next);
    *a = (activations){.n_all = n_all, .n = n, .block = next};
    if (!next) return false;
    for (int i = 0; i < 10; i++) *at[i] = next, next += pad16(count[i]);
    return true;
}

/* table[n][n_rot/2][2] <- cos and sin of position * frequency, in double: float angles are off by 1e-3 at 8K */
static void rope_table(const lm_model *m, float *table, int64_t pos, int64_t n) {
    int64_t pairs = m->p.n_rot / 2;
    #pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < pairs; j++) {
            double angle = (double)(pos + i) * m->inv_freq[j];
            table[(i * pairs + j) * 2] = (float)cos(angle);
            table[(i * pairs + j) * 2 + 1] = (float)sin(angle);
        }
}

/* ==== running ==== */

static bool check_run(lm_model *m, const int32_t *tokens, int64_t n, int64_t pos) {
    if (n < 1) return fail(m, "no tokens to run");
    if (pos < 0 || n > m->p.n_ctx - pos)
        return fail(m, "%lld tokens at position %lld exceed the model's context of %lld", (long long)n, (long long)pos,
                    (long long)m->p.n_ctx);
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= m->p.V) return fail(m, "token %d is not in the vocabulary", tokens[i]);
    return true;
}

static bool check_cache(lm_model *m, const dkv_cache *cache) {
    const dkv_shape *have = dkv_cache_shape(cache), *want = &m->p.shape;
    if (have->L == want->L && have->Hkv == want->Hkv && have->d_k == want->d_k && have->d_v == want->d_v) return true;
    return fail(m, "the cache was made for another model shape");
}

/* All tokens through layer l, CHUNK at a time; done: what to report to, or NULL. */
static bool run_layer(lm_model *m, const activations *a, int l, target to, const lm_prefill_options *done) {
    if (a->f32) load_layer(m, &m->layers[l]);
    for (int64_t i = 0; i < a->n_all; i += a->n) {
        int64_t n = a->n_all - i < a->n ? a->n_all - i : a->n;
        if (!layer_forward(m, &m->layers[l], a, a->x + i * m->p.E, a->rope + i * m->p.n_rot, n, to)) return false;
        if (done && done->progress)
            done->progress(done->user, (l + (double)(i + n) / (double)a->n_all) / m->p.shape.L);
    }
    return true;
}

static bool activations_start(lm_model *m, activations *a, const int32_t *tokens, int64_t n, int64_t pos) {
    if (n == 1) *a = m->one;
    else if (!need_layer_f32(m)) return false;
    else if (!activations_make(a, &m->p, n)) return fail(m, "no memory for %lld tokens", (long long)n);
    else a->f32 = m->layer_f32;
    rope_table(m, a->rope, pos, n);
    op_embed(m, a->x, tokens, n);
    return true;
}

static void activations_end(const lm_model *m, activations *a) {
    if (a->block != m->one.block) free(a->block);
}

static bool eval(lm_model *m, dkv_cache *cache, const activations *a, float *logits, lm_logits which) {
    for (int l = 0; l < m->p.shape.L; l++)
        if (!run_layer(m, a, l, (target){cache, l, false}, NULL)) return false;
    if (which == LM_LAST || (which == LM_ALL && a->n_all == 1))
        logits_last(m, logits, a->x + (a->n_all - 1) * m->p.E, a);
    else if (which == LM_ALL) logits_all(m, logits, a);
    return true;
}

int lm_eval(lm_model *m, dkv_cache *cache, const int32_t *tokens, int64_t n, int64_t pos, float *logits,
            lm_logits which) {
    activations a;
    if (!check_run(m, tokens, n, pos) || !check_cache(m, cache)) return -1;
    if (n > dkv_cache_capacity(cache) - dkv_cache_tail(cache, 0))
        return explain(m, "%lld more tokens do not fit the cache's tail of %lld", (long long)n,
                       (long long)dkv_cache_capacity(cache));
    if (!activations_start(m, &a, tokens, n, pos)) return -1;
    bool ok = eval(m, cache, &a, logits, which);
    activations_end(m, &a);
    return ok ? 0 : -1;
}

/* A cache of one layer with nothing packed: n positions of tail. */
static dkv_cache *dense_layer(lm_model *m, dkv_type type, int64_t n, const dkv_allocator *alloc) {
    dkv_shape shape = m->p.shape;
    dkv_plan plan;
    dkv_cache *cache = NULL;
    size_t bytes = 0;
    shape.L = 1;
    dkv_result r = dkv_plan_from_positions(&plan, NULL, &bytes, 1, shape.Hkv, 0, NULL, NULL);
    void *memory = r ? NULL : malloc(bytes);
    if (!r && !memory) r = DKV_ERR_MEMORY;
    if (!r) r = dkv_plan_from_positions(&plan, memory, &bytes, 1, shape.Hkv, 0, NULL, NULL);
    if (!r) r = dkv_cache_create(&cache, &plan, &shape, type, n, alloc);
    free(memory);
    return r ? explain(m, "dense layer: %s", dkv_result_string(r)), NULL : cache;
}

static bool prefill(lm_model *m, dkv_cache *const *caches, int n_caches, const activations *a, dkv_cache *dense,
                    const lm_prefill_options *options) {
    for (int l = 0; l < m->p.shape.L; l++) {
        if (!run_layer(m, a, l, (target){dense, 0, l == m->p.shape.L - 1}, options)) return false;
        dkv_segment kv = dkv_cache_tail_segment(dense, 0);
        double start = omp_get_wtime();
        for (int i = 0; i < n_caches; i++) {
            dkv_result r = dkv_cache_pack(caches[i], l, &kv);
            if (r) return fail(m, "packing layer %d: %s", l, dkv_result_string(r));
        }
        if (options && options->pack_s) *options->pack_s += omp_get_wtime() - start;
        dkv_cache_truncate(dense, 0);
    }
    return true;
}

int lm_prefill(lm_model *m, dkv_cache *const *caches, int n_caches, const int32_t *tokens, int64_t n,
               const lm_prefill_options *options) {
    activations a;
    if (!check_run(m, tokens, n, 0)) return -1;
    for (int i = 0; i < n_caches; i++) {
        if (!check_cache(m, caches[i])) return -1;
        if (dkv_cache_type(caches[i]) != dkv_cache_type(caches[0]) || dkv_cache_plan(caches[i])->T_c != n)
            return explain(m, "caches to prefill must share a type and have plans of %lld positions", (long long)n);
    }
    dkv_cache *dense = dense_layer(m, dkv_cache_type(caches[0]), n, options ? options->alloc : NULL);
    bool ok = dense && activations_start(m, &a, tokens, n, 0);
    if (ok) {
        ok = prefill(m, caches, n_caches, &a, dense, options);
        activations_end(m, &a);
    }
    dkv_cache_destroy(dense);
    return ok ? 0 : -1;
}

/* ==== opening ==== */

typedef struct {
    lm_model *m;
    char arch[16];
    bool *used;   /* [tensors of the file] */
    float *next;  /* free part of m->vectors */
} loader;

typedef struct { char text[96]; } name;

static name arch_key(const loader *o, const char *key) {
    name s;
    snprintf(s.text, sizeof s.text, "%s.%s", o->arch, key);
    return s;
}

/* An integer key in least..most; when it is absent, *out as it is, which must be in that range too. */
static bool get_size(const loader *o, const char *key, int64_t least, int64_t most, int64_t *out) {
    name k = arch_key(o, key);
    if (gguf_has(o->m->file, k.text) && !gguf_get_int(o->m->file, k.text, out)) *out = least - 1;
    if (*out >= least && *out <= most) return true;
    return fail(o->m, "key %s is missing or not in %lld..%lld", k.text, (long long)least, (long long)most);
}

static bool get_positive(const loader *o, const char *key, double *out) {
    name k = arch_key(o, key);
    if (gguf_has(o->m->file, k.text) && !gguf_get_real(o->m->file, k.text, out)) *out = 0;
    if (*out > 0 && *out < 1e30) return true;
    return fail(o->m, "key %s is missing or not a positive number", k.text);
}

static bool str_is(gguf_str s, const char *text) { return s.len == strlen(text) && !memcmp(s.ptr, text, s.len); }

static bool get_arch(loader *o) {
    static const struct { const char *name; bool half_split; } known[] = {{"llama", false}, {"qwen2", true}};
    gguf_str s = {0};
    gguf_get_str(o->m->file, "general.architecture", &s);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (str_is(s, known[i].name)) {
            snprintf(o->arch, sizeof o->arch, "%s", known[i].name);
            o->m->p.half_split = known[i].half_split;
            return true;
        }
    return fail(o->m, "key general.architecture is neither llama nor qwen2");
}

static bool get_shape(const loader *o) {
    lm_params *p = &o->m->p;
    int64_t L = 0, H = 0, d, d_v;
    if (!get_size(o, "block_count", 1, 65536, &L) || !get_size(o, "attention.head_count", 1, 65536, &H) ||
        !get_size(o, "embedding_length", 1, 1 << 24, &p->E) || !get_size(o, "feed_forward_length", 1, 1 << 24, &p->F) ||
        !get_size(o, "context_length", 1, INT32_MAX, &p->n_ctx)) return false;
    int64_t Hkv = H;
    d = p->E / H;
    if (!get_size(o, "attention.head_count_kv", 1, H, &Hkv)) return false;
    if (H % Hkv) return fail(o->m, "key %s.attention.head_count_kv does not divide head_count", o->arch);
    if (!get_size(o, "attention.key_length", 1, 576, &d)) return false;
    p->n_rot = d_v = d;
    if (!get_size(o, "attention.value_length", d, d, &d_v) || !get_size(o, "rope.dimension_count", 2, d, &p->n_rot))
        return false;
    if (p->n_rot % 2) return fail(o->m, "key %s.rope.dimension_count is odd", o->arch);
    p->shape = (dkv_shape){(int32_t)L, (int32_t)H, (int32_t)Hkv, (int32_t)d, (int32_t)d};
    return true;
}

static bool get_numbers(const loader *o) {
    lm_params *p = &o->m->p;
    name scaling = arch_key(o, "rope.scaling.type");
    gguf_str type = {0};
    p->rope_base = 10000;
    p->rope_scale = 1;
    if (!get_positive(o, "attention.layer_norm_rms_epsilon", &p->eps)) return false;
    if (!get_positive(o, "rope.freq_base", &p->rope_base)) return false;
    if (gguf_has(o->m->file, scaling.text)) {
        gguf_get_str(o->m->file, scaling.text, &type);
        if (str_is(type, "none")) return true;
        if (!str_is(type, "linear")) return fail(o->m, "key %s is neither none nor linear", scaling.text);
    }
    if (!get_positive(o, "rope.scale_linear", &p->rope_scale)) return false; /* its name in older files */
    return get_positive(o, "rope.scaling.factor", &p->rope_scale);
}

/* The tensor [rows][cols], or NULL with the error set. */
static const gguf_tensor *get_tensor(loader *o, const char *what, int64_t rows, int64_t cols) {
    const gguf_tensor *t = gguf_find(o->m->file, what);
    if (!t) return explain(o->m, "tensor %s is missing", what), NULL;
    if (t->dims[0] != cols || t->dims[1] != rows || t->dims[2] != 1 || t->dims[3] != 1)
        return explain(o->m, "tensor %s has shape [%lld][%lld], not [%lld][%lld]", what, (long long)t->dims[1],
                       (long long)t->dims[0], (long long)rows, (long long)cols), NULL;
    o->used[t - gguf_tensor_at(o->m->file, 0)] = true;
    return t;
}

static bool get_vector(loader *o, const float **out, const char *what, int64_t n) {
    const gguf_tensor *t = get_tensor(o, what, 1, n);
    if (!t) return false;
    quant_row_to_f32(o->next, t->data, t->type, n);
    *out = o->next;
    o->next += n;
    return true;
}

static bool get_matrix(loader *o, weight *w, const char *what, int64_t rows, int64_t cols) {
    const gguf_tensor *t = get_tensor(o, what, rows, cols);
    if (t) w->mat = (quant_mat){.type = t->type, .rows = rows, .cols = cols, .data = t->data};
    return t != NULL;
}

static name layer_tensor(int l, const char *what) {
    name s;
    snprintf(s.text, sizeof s.text, "blk.%d.%s", l, what);
    return s;
}

static bool get_layer(loader *o, int l) {
    const lm_params *p = &o->m->p;
    layer *to = &o->m->layers[l];
    int64_t q = p->shape.H * p->shape.d_k, kv = p->shape.Hkv * p->shape.d_k, at = 0;
    const struct { const char *matrix, *bias; int64_t rows, cols; } part[LAYER_WEIGHTS] = {
        [WQ] = {"attn_q.weight", "attn_q.bias", q, p->E},
        [WK] = {"attn_k.weight", "attn_k.bias", kv, p->E},
        [WV] = {"attn_v.weight", "attn_v.bias", kv, p->E},
        [WO] = {"attn_output.weight", NULL, p->E, q},
        [GATE] = {"ffn_gate.weight", NULL, p->F, p->E},
        [UP] = {"ffn_up.weight", NULL, p->F, p->E},
        [DOWN] = {"ffn_down.weight", NULL, p->E, p->F},
    };
    for (int k = 0; k < LAYER_WEIGHTS; k++) {
        if (!get_matrix(o, &to->w[k], layer_tensor(l, part[k].matrix).text, part[k].rows, part[k].cols)) return false;
        to->w[k].at = at;
        at += part[k].rows * part[k].cols;
        name bias = layer_tensor(l, part[k].bias ? part[k].bias : "");
        if (part[k].bias && gguf_find(o->m->file, bias.text) && !get_vector(o, &to->w[k].bias, bias.text, part[k].rows))
            return false;
    }
    return get_vector(o, &to->attn_norm, layer_tensor(l, "attn_norm.weight").text, p->E) &&
           get_vector(o, &to->ffn_norm, layer_tensor(l, "ffn_norm.weight").text, p->E);
}

/* Radians per position of each pair; rope_freqs.weight (Llama 3.1's scaling) divides them. */
static bool get_rope(loader *o) {
    lm_model *m = o->m;
    int64_t pairs = m->p.n_rot / 2;
    const float *divide = NULL;
    if (gguf_find(m->file, "rope_freqs.weight") && !get_vector(o, &divide, "rope_freqs.weight", pairs)) return false;
    for (int64_t j = 0; j < pairs; j++) {
        double factor = divide ? (double)divide[j] : 1;
        if (!(factor > 0)) return fail(m, "tensor rope_freqs.weight holds a number that is not positive");
        m->inv_freq[j] = pow(m->p.rope_base, -2.0 * (double)j / (double)m->p.n_rot) / m->p.rope_scale / factor;
    }
    return true;
}

static bool get_tensors(loader *o) {
    lm_model *m = o->m;
    const gguf_tensor *embed = gguf_find(m->file, "token_embd.weight");
    m->p.V = embed ? embed->dims[1] : 1;
    if (m->p.V > INT32_MAX) return fail(m, "tensor token_embd.weight has too many rows");
    m->embed = get_tensor(o, "token_embd.weight", m->p.V, m->p.E);
    const char *output = gguf_find(m->file, "output.weight") ? "output.weight" : "token_embd.weight"; /* tied */
    if (!m->embed || !get_matrix(o, &m->output, output, m->p.V, m->p.E) ||
        !get_vector(o, &m->output_norm, "output_norm.weight", m->p.E) || !get_rope(o)) return false;
    for (int l = 0; l < m->p.shape.L; l++)
        if (!get_layer(o, l)) return false;
    for (int64_t i = 0; i < gguf_tensor_count(m->file); i++) { /* another graph's: running on would be wrong */
        gguf_str s = gguf_tensor_at(m->file, i)->name;
        if (!o->used[i]) return fail(m, "tensor %.*s has no place in this graph", s.len < 64 ? (int)s.len : 64, s.ptr);
    }
    return true;
}

/* Gives w its packed place, or only counts when packed is NULL. */
static void pack_weight(weight *w, uint8_t *packed, size_t *at) {
    size_t bytes = quant_packed_bytes(&w->mat);
    if (packed && bytes) {
        w->mat.packed = packed + *at;
        #pragma omp parallel
        quant_pack(packed + *at, &w->mat, omp_get_thread_num(), omp_get_num_threads());
    }
    *at += bytes;
}

static size_t pack_all(lm_model *m, uint8_t *packed) {
    size_t at = 0;
    for (int l = 0; l < m->p.shape.L; l++)
        for (int k = 0; k < LAYER_WEIGHTS; k++) pack_weight(&m->layers[l].w[k], packed, &at);
    pack_weight(&m->output, packed, &at);
    return at;
}

static bool pack_weights(lm_model *m) {
    size_t bytes = pack_all(m, NULL);
    if (!bytes) return true;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return fail(m, "no memory for %zu bytes of packed weights", bytes);
    madvise(p, bytes, MADV_HUGEPAGE); /* for speed only: may fail */
    m->packed = p;
    m->packed_bytes = bytes;
    pack_all(m, p);
    return true;
}

static bool load(loader *o) {
    lm_model *m = o->m;
    if (!get_arch(o) || !get_shape(o) || !get_numbers(o)) return false;
    const dkv_shape *s = &m->p.shape;
    int64_t layer_floats = 2 * m->p.E + (s->H + 2 * (int64_t)s->Hkv) * s->d_k; /* norms and biases */
    int64_t widest = s->H * (int64_t)s->d_k; /* input of a matrix */
    if (m->p.E > widest) widest = m->p.E;
    if (m->p.F > widest) widest = m->p.F;
    m->vec = malloc(quant_vec_bytes(widest) + 1);
    m->layers = calloc((size_t)s->L, sizeof *m->layers);
    m->inv_freq = malloc((size_t)(m->p.n_rot / 2) * sizeof *m->inv_freq);
    m->vectors = malloc((size_t)(s->L * layer_floats + m->p.E + m->p.n_rot / 2) * sizeof *m->vectors);
    o->used = calloc((size_t)gguf_tensor_count(m->file) + 1, sizeof *o->used);
    o->next = m->vectors;
    if (!m->vec || !m->layers || !m->inv_freq || !m->vectors || !o->used || !activations_make(&m->one, &m->p, 1))
        return fail(m, "no memory for a model of this shape");
    return get_tensors(o) && pack_weights(m);
}

int lm_open(lm_model **out, const char *path, int threads, char *err, size_t err_size) {
    lm_model *m = calloc(1, sizeof *m);
    loader o = {.m = m};
    *out = NULL;
    if (!m) return snprintf(err, err_size, "%s: no memory", path), -1;
    m->threads = threads;
    omp_set_num_threads(threads);
    openblas_set_num_threads(1); /* see gemm */
    m->team = team_open(threads);
    if (!m->team) return snprintf(err, err_size, "no %d threads", threads), lm_close(m), -1;
    if (gguf_open(&m->file, path, err, err_size)) return lm_close(m), -1;
    bool ok = load(&o);
    free(o.used);
    if (!ok) {
        snprintf(err, err_size, "%s: %s", path, m->error);
        return lm_close(m), -1;
    }
    *out = m;
    return 0;
}

void lm_close(lm_model *m) {
    if (!m) return;
    team_close(m->team);
    if (m->packed) munmap(m->packed, m->packed_bytes);
    free(m->one.block);
    free(m->vec);
    free(m->workspace);
    free(m->layer_f32);
    free(m->vectors);
    free(m->inv_freq);
    free(m->layers);
    gguf_close(m->file);
    free(m);
}
