/* The CPU: f32 activations. One token multiplies by the weights as the file has them (quant.h), more by one layer's
   weights in f32, dequantised while the layer is passed. */
#define _GNU_SOURCE
#include "device.h"
#include "sample.h"
#include "team.h"

#include <cblas.h>
#include <math.h>
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
#endif

/* Tokens that pass a layer at once (sgemm copies the weights once per chunk: 256 cost a prefill 19 % more, 2048 gain
   nothing), rows of the output matrix that are dequantised at once, elements that one thread takes at once, and
   multiplications of a product that are worth a thread. */
enum { CHUNK = 1024, SLAB = 4096, SPAN = 1 << 14, WORTH = 1 << 22 };

typedef struct {
    team *team;             /* decodes; OpenMP's threads prefill */
    uint8_t *packed;        /* quantised weights in quant.h's packed form */
    size_t packed_bytes;
    float *layer_f32;       /* one layer's weights, or a slab of the output's; NULL until needed */
    void *vec;              /* the memory of the quant_vec */
    float *logits;          /* [V] */
    void *workspace;        /* dkv_attend's */
    size_t workspace_bytes;
} cpu;

/* ==== operations ==== */

static void embed(const lm_model *m, float *x, const int32_t *tokens, int64_t n) {
    const gguf_tensor *t = m->embed;
    size_t row_bytes = gguf_row_bytes(t->type, t->dims[0]);
    #pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++)
        quant_row_to_f32(x + i * m->p.E, (const char *)t->data + (size_t)tokens[i] * row_bytes, t->type, m->p.E);
}

/* row[n_rot/2][2] <- cos and sin of position * frequency, in double: float angles are off by 1e-3 at 8K */
static void rope_row(const lm_model *m, float *row, int64_t pos) {
    for (int64_t j = 0; j < m->p.n_rot / 2; j++) {
        double angle = (double)pos * m->inv_freq[j];
        row[2 * j] = (float)cos(angle);
        row[2 * j + 1] = (float)sin(angle);
    }
}

static bool input(lm_model *m, lm_activations *a, const int32_t *tokens, int64_t pos) {
    (void)m;
    a->tokens = tokens;
    a->pos = pos;
    return true;
}

static bool begin(lm_model *m, lm_cache *c, const lm_activations *a) {
    (void)c;
    #pragma omp parallel for if (a->n_all > 1)
    for (int64_t i = 0; i < a->n_all; i++) rope_row(m, a->rope + i * m->p.n_rot, a->pos + i);
    embed(m, a->x, a->tokens, a->n_all);
    return true;
}

/* y[n][E] = x[n][E] / rms(x) * gain[E] */
static bool norm(lm_model *m, void *y, const float *x, const float *gain, int64_t n) {
    int64_t E = m->p.E;
    #pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++) {
        const float *row = x + i * E;
        float *to = (float *)y + i * E, sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < E; j++) sum += row[j] * row[j];
        float scale = 1 / sqrtf(sum / (float)E + (float)m->p.eps);
        #pragma omp simd
        for (int64_t j = 0; j < E; j++) to[j] = row[j] * scale * gain[j];
    }
    return true;
}

static void add_bias(const lm_rows *y, const lm_weight *w, int64_t n) {
    int64_t rows = w->mat.rows;
    #pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < rows; r++) y->data[i * y->ld + r] += w->bias[r];
}

/* This thread's share of a product's columns: 16 at a time, and no thread for less than WORTH multiplications. Below
   10^6 OpenBLAS adds in another order, and bits would depend on the number of threads. */
static bool share(int64_t columns, int64_t of_column, int64_t *first, int64_t *n) {
    int64_t ith = omp_get_thread_num(), nth = omp_get_num_threads(), most = columns * of_column / WORTH;
    int64_t units = (columns + 15) / 16;
    if (nth > most) nth = most > 1 ? most : 1;
    if (ith >= nth) return false;
    *first = units * ith / nth * 16;
    *n = units * (ith + 1) / nth * 16 - *first;
    if (*n > columns - *first) *n = columns - *first;
    return *n > 0;
}

/* y[n][rows] = x[n][cols] w[rows][cols]^T, y's rows ldy apart. Each thread calls a one-threaded OpenBLAS for its share
   of the rows: OpenBLAS's own pool would fight with OpenMP's for the cores, and which it has differs by package. */
static void gemm(float *y, int64_t ldy, const float *x, const float *w, int64_t n, int64_t rows, int64_t cols) {
    #pragma omp parallel if (n * rows * cols >= 2 * WORTH)
    {
        int64_t first, own;
        if (share(rows, n * cols, &first, &own))
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n, (int)own, (int)cols, 1, x, (int)cols,
                        w + first * cols, (int)cols, 0, y + first, (int)ldy);
    }
}

/* dx[n][cols] = dy[n][rows] w[rows][cols], or += */
static void gemm_back(float *dx, lm_rows dy, const float *w, int64_t n, int64_t rows, int64_t cols, bool add) {
    #pragma omp parallel if (n * rows * cols >= 2 * WORTH)
    {
        int64_t first, own;
        if (share(cols, n * rows, &first, &own))
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)own, (int)rows, 1, dy.data, (int)dy.ld,
                        w + first, (int)cols, add ? 1 : 0, dx + first, (int)cols);
    }
}

/* One row by the weights as they are: each is read once. */
typedef struct {
    const lm_rows *y;
    const lm_weight *w;
    int n_w;
    quant_vec x;
} matvec_work;

static void matvec_part(void *arg, int ith, int nth) {
    const matvec_work *a = arg;
    for (int k = 0; k < a->n_w; k++) quant_matvec(a->y[k].data, &a->w[k].mat, &a->x, ith, nth);
}

static void matvec(const lm_model *m, const lm_rows *y, const lm_weight *w, int n_w, const float *x) {
    const cpu *o = m->own;
    matvec_work work = {.y = y, .w = w, .n_w = n_w};
    quant_vec_set(&work.x, o->vec, x, w->mat.cols);
    team_run(o->team, team_size(o->team), matvec_part, &work);
}

static bool matmul(lm_model *m, const lm_activations *a, const lm_rows *y, const lm_weight *w, int n_w,
                   const void *from, int64_t n) {
    if (!a->f32) matvec(m, y, w, n_w, from);
    for (int k = 0; k < n_w; k++) {
        if (a->f32) gemm(y[k].data, y[k].ld, from, a->f32 + w[k].at, n, w[k].mat.rows, w[k].mat.cols);
        if (w[k].bias) add_bias(&y[k], &w[k], n);
    }
    return true;
}

static bool matmul_add(lm_model *m, const lm_activations *a, float *x, const lm_weight *w, const void *from,
                       int64_t n) {
    const int64_t E = m->p.E, count = n * E;
    const float *out = a->out;
    matmul(m, a, &(lm_rows){a->out, E}, w, 1, from, n);
    #pragma omp parallel for simd if (count > SPAN)
    for (int64_t i = 0; i < count; i++) x[i] += out[i];
    return true;
}

/* x[n][heads][d], rotated in place by table[n][n_rot/2][2], or back. */
static void rotate_heads(const lm_model *m, lm_rows x, int64_t heads, const float *table, int64_t n, float way) {
    int64_t d = m->p.shape.d_k, pairs = m->p.n_rot / 2;
    int64_t step = m->p.half_split ? 1 : 2, other = m->p.half_split ? pairs : 1;
    #pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < heads; h++) {
            float *head = x.data + i * x.ld + h * d;
            const float *angle = table + i * pairs * 2;
            for (int64_t j = 0; j < pairs; j++) {
                float a = head[j * step], b = head[j * step + other], c = angle[2 * j], s = way * angle[2 * j + 1];
                head[j * step] = a * c - b * s;
                head[j * step + other] = a * s + b * c;
            }
        }
}

static bool rotate(lm_model *m, const lm_activations *a, const float *rope, int64_t n, lm_target to) {
    rotate_heads(m, a->k, m->p.shape.Hkv, rope, n, 1);
    if (!to.kv_only) rotate_heads(m, a->q, m->p.shape.H, rope, n, 1);
    return true;
}

static bool rotate_back(lm_model *m, lm_rows dq, lm_rows dk, const float *rope, int64_t n) {
    rotate_heads(m, dk, m->p.shape.Hkv, rope, n, -1);
    rotate_heads(m, dq, m->p.shape.H, rope, n, -1);
    return true;
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

/* Loops compiled for each level of quant.h. */
#define LOOP static inline __attribute__((always_inline))

/* act = silu(gate) * up; act may be gate */
LOOP void silu_mul(float *act, const float *gate, const float *up, int64_t count) {
    #pragma omp simd
    for (int64_t i = 0; i < count; i++) act[i] = gate[i] / (1 + exp_f32(-gate[i])) * up[i];
}

LOOP void silu_mul_back(float *d_gate, float *d_up, const float *d_act, const float *gate, const float *up,
                        int64_t count) {
    #pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float s = 1 / (1 + exp_f32(-gate[i]));
        d_up[i] = d_act[i] * gate[i] * s;
        d_gate[i] = d_act[i] * up[i] * s * (1 + gate[i] * (1 - s));
    }
}

enum { SUM = 256 }; /* terms that are added in f32 */

/* sum of exp(x - shift) * (x - y), or y NULL: without that factor */
LOOP double exp_sum(const float *x, float shift, const float *y, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i += SUM) {
        int64_t n = count - i < SUM ? count - i : SUM;
        float part = 0;
        if (y) {
            #pragma omp simd reduction(+ : part)
            for (int64_t j = i; j < i + n; j++) part += exp_f32(x[j] - shift) * (x[j] - y[j]);
        } else {
            #pragma omp simd reduction(+ : part)
            for (int64_t j = i; j < i + n; j++) part += exp_f32(x[j] - shift);
        }
        sum += (double)part;
    }
    return sum;
}

/* x <- scale * exp(x - shift) */
LOOP void scaled_exp(float *x, float shift, float scale, int64_t count) {
    #pragma omp simd
    for (int64_t i = 0; i < count; i++) x[i] = scale * exp_f32(x[i] - shift);
}

typedef struct {
    void (*silu_mul)(float *act, const float *gate, const float *up, int64_t count);
    void (*silu_mul_back)(float *d_gate, float *d_up, const float *d_act, const float *gate, const float *up,
                          int64_t count);
    double (*exp_sum)(const float *x, float shift, const float *y, int64_t count);
    void (*scaled_exp)(float *x, float shift, float scale, int64_t count);
} loops;

#if defined(__x86_64__)
#define TARGET(isa) __attribute__((target(isa)))
#else
#define TARGET(isa)
#endif

/* loops_scalar, loops_avx2, loops_avx512 */
#define LEVEL(name, attributes) \
    static attributes void silu_mul_##name(float *act, const float *gate, const float *up, int64_t count) { \
        silu_mul(act, gate, up, count); \
    } \
    static attributes void silu_mul_back_##name(float *d_gate, float *d_up, const float *d_act, const float *gate, \
                                                const float *up, int64_t count) { \
        silu_mul_back(d_gate, d_up, d_act, gate, up, count); \
    } \
    static attributes double exp_sum_##name(const float *x, float shift, const float *y, int64_t count) { \
        return exp_sum(x, shift, y, count); \
    } \
    static attributes void scaled_exp_##name(float *x, float shift, float scale, int64_t count) { \
        scaled_exp(x, shift, scale, count); \
    } \
    static const loops loops_##name = {silu_mul_##name, silu_mul_back_##name, exp_sum_##name, scaled_exp_##name};

LEVEL(scalar, )
LEVEL(avx2, TARGET("avx2"))
LEVEL(avx512, TARGET("avx512f"))

static const loops *level(void) {
    static const loops *const of[] = {&loops_scalar, &loops_avx2, &loops_avx512};
    return of[quant_simd_level()];
}

static bool swiglu(lm_model *m, const lm_activations *a, int64_t n) {
    const loops *leaf = level();
    const int64_t F = m->p.F;
    float *act = a->act;
    #pragma omp parallel for collapse(2) if (n * F > SPAN)
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < F; j += SPAN)
            leaf->silu_mul(act + i * F + j, a->gate.data + i * a->gate.ld + j, a->up.data + i * a->up.ld + j,
                           F - j < SPAN ? F - j : SPAN);
    return true;
}

/* ==== attention ==== */

static void run_threads(void *user, int nth, void (*task)(void *arg, int ith, int nth), void *arg) {
    (void)user;
    #pragma omp parallel for num_threads(nth) schedule(static, 1)
    for (int ith = 0; ith < nth; ith++) task(arg, ith, nth);
}

/* What attention works in, and its threads. */
static bool need_workspace(lm_model *m, size_t bytes) {
    cpu *c = m->own;
    if (bytes <= c->workspace_bytes) return true;
    free(c->workspace);
    c->workspace_bytes = (bytes + bytes / 4 + 63) / 64 * 64; /* a growing tail must not reallocate every token */
    c->workspace = aligned_alloc(64, c->workspace_bytes);
    return c->workspace ? true : (c->workspace_bytes = 0, lm_fail(m, "no memory for attention"));
}

static bool attended(lm_model *m, dkv_result r) {
    return r ? lm_fail(m, "attention: %s", dkv_result_string(r)) : true;
}

static bool append(lm_model *m, const lm_activations *a, int64_t n, lm_target to) {
    const dkv_shape *s = &m->p.shape;
    dkv_tensor k = dkv_thd(a->k.data, DKV_F32, s->Hkv, s->d_k), v = dkv_thd(a->v.data, DKV_F32, s->Hkv, s->d_v);
    dkv_result r = dkv_cache_append(to.cache->own, to.layer, k, v, n);
    return r ? lm_fail(m, "cache: %s", dkv_result_string(r)) : true;
}

static bool attend(lm_model *m, const lm_activations *a, int64_t n, lm_target to) {
    const dkv_shape *s = &m->p.shape;
    cpu *c = m->own;
    dkv_tensor q = dkv_thd(a->q.data, DKV_F32, s->H, s->d_k), o = dkv_thd(a->o, DKV_F32, s->H, s->d_v);
    dkv_attention call = dkv_cache_attention(to.cache->own, to.layer, q, n, o);
    dkv_parallel threads = {n > 1 ? run_threads : team_run, c->team, m->threads};
    size_t bytes;
    dkv_result r = dkv_attend_size(&bytes, &call, 1, m->threads);
    return attended(m, r) && need_workspace(m, bytes) &&
           attended(m, dkv_attend(&call, 1, c->workspace, c->workspace_bytes, &threads));
}

static dkv_result cache_open(lm_cache *c, const dkv_plan *plan, const dkv_shape *shape, const dkv_allocator *alloc) {
    dkv_cache *own = NULL;
    dkv_result r = dkv_cache_create(&own, plan, shape, c->type, c->capacity, alloc);
    c->own = own;
    if (!r) c->plan = dkv_cache_plan(own);
    return r;
}

static void cache_close(lm_cache *c) { dkv_cache_destroy(c->own); }
static dkv_result cache_truncate(lm_cache *c) { return dkv_cache_truncate(c->own, c->tail); }

static dkv_result cache_pack(lm_cache *c, int l, lm_cache *dense) {
    dkv_segment kv = dkv_cache_tail_segment(dense->own, 0);
    return dkv_cache_pack(c->own, l, &kv);
}

/* ==== logits ==== */

static bool logits(lm_model *m, const lm_activations *a, const float *x) {
    const cpu *c = m->own;
    norm(m, a->norm, x, m->output_norm, 1);
    matvec(m, &(lm_rows){c->logits, m->p.V}, &m->output, 1, a->norm);
    return true;
}

static bool logits_some(lm_model *m, float *y, const void *x, int64_t n) {
    const quant_mat *w = &m->output.mat;
    const cpu *c = m->own;
    for (int64_t first = 0; first < w->rows; first += SLAB) {
        int64_t rows = w->rows - first < SLAB ? w->rows - first : SLAB;
        lm_dequantise(c->layer_f32, w, first, rows);
        gemm(y + first, w->rows, x, c->layer_f32, n, rows, w->cols);
    }
    return true;
}

static bool logits_all(lm_model *m, const lm_activations *a, float *to) {
    norm(m, a->x, a->x, m->output_norm, a->n_all);
    return logits_some(m, to, a->x, a->n_all);
}

static bool wait_now(lm_model *m, double *now) {
    (void)m;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *now = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    return true;
}

static bool fetch(lm_model *m, float *to, int32_t *best) {
    const cpu *c = m->own;
    if (to) memcpy(to, c->logits, (size_t)m->p.V * sizeof *to);
    if (best) *best = lm_sample(&(lm_sampler){.temperature = 0}, c->logits, (int32_t)m->p.V, NULL);
    return true;
}

/* ==== memory ==== */

static int64_t pad16(int64_t n) { return (n + 15) / 16 * 16; } /* floats, to 64 bytes */

/* The buffer that load and logits_all fill: all layers have the same shapes. */
static bool need_layer_f32(lm_model *m) {
    cpu *c = m->own;
    if (c->layer_f32) return true;
    int64_t count = SLAB * m->p.E, sum = 0;
    for (int k = 0; k < LAYER_WEIGHTS; k++) sum += m->layers[0].w[k].mat.rows * m->layers[0].w[k].mat.cols;
    if (sum > count) count = sum;
    c->layer_f32 = malloc((size_t)count * sizeof *c->layer_f32);
    return c->layer_f32 ? true : lm_fail(m, "no memory for a layer's weights in f32");
}

static bool make(lm_model *m, lm_activations *a, int64_t n_all) {
    const lm_params *p = &m->p;
    const int64_t n = n_all < CHUNK ? n_all : CHUNK, q = p->shape.H * p->shape.d_k, kv = p->shape.Hkv * p->shape.d_k;
    float *at[10], *next;
    int64_t count[] = {n_all * p->E, n_all * p->n_rot, n * p->E, n * q, n * kv, n * kv, n * q, n * p->E,
                       n * p->F, n * p->F}, total = 0;
    if (n_all > 1 && !need_layer_f32(m)) return false;
    for (int i = 0; i < 10; i++) total += pad16(count[i]);
    if (!(next = aligned_alloc(64, (size_t)total * sizeof *next)))
        return lm_fail(m, "no memory for %lld tokens", (long long)n_all);
    *a = (lm_activations){.n_all = n_all, .n = n, .block = next};
    for (int i = 0; i < 10; i++) at[i] = next, next += pad16(count[i]);
    a->x = at[0], a->rope = at[1], a->norm = at[2];
    a->q = (lm_rows){at[3], q}, a->k = (lm_rows){at[4], kv}, a->v = (lm_rows){at[5], kv};
    a->o = at[6], a->out = at[7];
    a->gate = (lm_rows){at[8], p->F}, a->up = (lm_rows){at[9], p->F}, a->act = at[8];
    if (n_all > 1) a->f32 = ((cpu *)m->own)->layer_f32;
    return true;
}

static void release(lm_model *m, lm_activations *a) {
    (void)m;
    free(a->block);
}

static bool load(lm_model *m, const lm_layer *l, const lm_activations *a) {
    const cpu *c = m->own;
    for (int k = 0; k < LAYER_WEIGHTS && a->f32; k++)
        lm_dequantise(c->layer_f32 + l->w[k].at, &l->w[k].mat, 0, l->w[k].mat.rows);
    return true;
}

/* Gives w its packed place, or only counts when packed is NULL. */
static void pack_weight(lm_weight *w, uint8_t *packed, size_t *at) {
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
    cpu *c = m->own;
    size_t bytes = pack_all(m, NULL);
    if (!bytes) return true;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return lm_fail(m, "no memory for %zu bytes of packed weights", bytes);
    madvise(p, bytes, MADV_HUGEPAGE); /* for speed only: may fail */
    c->packed = p;
    c->packed_bytes = bytes;
    pack_all(m, p);
    return true;
}

static bool open_cpu(lm_model *m) {
    const lm_params *p = &m->p;
    int64_t widest = p->shape.H * (int64_t)p->shape.d_k; /* input of a matrix */
    if (p->E > widest) widest = p->E;
    if (p->F > widest) widest = p->F;
    cpu *c = m->own = calloc(1, sizeof *c);
    if (!c || !(c->team = team_open(m->threads)) || !(c->vec = malloc(quant_vec_bytes(widest) + 1)) ||
        !(c->logits = malloc((size_t)p->V * sizeof *c->logits)) || !make(m, &m->one, 1))
        return lm_fail(m, "no memory for a model of this shape");
    openblas_set_num_threads(1); /* see gemm */
    snprintf(m->where, sizeof m->where, "%d threads, %s", m->threads, dkv_simd_name(dkv_simd_level()));
    return pack_weights(m);
}

static void close_cpu(lm_model *m) {
    cpu *c = m->own;
    if (!c) return;
    team_close(c->team);
    if (c->packed) munmap(c->packed, c->packed_bytes);
    free(m->one.block);
    free(c->vec);
    free(c->logits);
    free(c->workspace);
    free(c->layer_f32);
    free(c);
}

/* ==== learning ==== */

static void drop(lm_model *m, lm_memory *y) {
    (void)m;
    free(y->data);
    *y = (lm_memory){NULL, 0};
}

static bool hold(lm_model *m, lm_memory *y, size_t bytes) {
    if (bytes <= y->bytes) return true;
    drop(m, y);
    y->data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!y->data) return lm_fail(m, "no memory for %zu bytes of activations", bytes);
    y->bytes = bytes;
    return true;
}

static bool copy(lm_model *m, void *to, const void *from, size_t bytes) {
    (void)m;
    memcpy(to, from, bytes);
    return true;
}

static bool zero(lm_model *m, void *to, size_t bytes) {
    (void)m;
    memset(to, 0, bytes);
    return true;
}

static bool start(lm_model *m, lm_activations *a, const int32_t *token, const int64_t *pos) {
    if (!need_layer_f32(m)) return false;
    a->f32 = ((cpu *)m->own)->layer_f32;
    embed(m, a->x, token, a->n_all);
    #pragma omp parallel for
    for (int64_t i = 0; i < a->n_all; i++) rope_row(m, a->rope + i * m->p.n_rot, pos[i]);
    return true;
}

static bool gates(lm_model *m, float *ln_u, const dkv_gates *g, const float *logit, dkv_draw draw) {
    (void)m;
    dkv_gates_union(NULL, ln_u, g, logit, draw);
    return true;
}

static bool gates_back(lm_model *m, float *da, const dkv_gates *g, const float *logit, dkv_draw draw,
                       const float *d_ln_u) {
    (void)m;
    dkv_gates_union_backward(da, g, logit, draw, d_ln_u);
    return true;
}

static dkv_segment context(const lm_cache *c, int l) { return dkv_cache_context(c->own, l); }

static bool gated_pass(lm_model *m, const dkv_gated *c, int64_t n,
                       dkv_result (*pass)(const dkv_gated *c, int64_t n, void *ws, size_t ws_bytes,
                                          const dkv_parallel *par)) {
    const cpu *own = m->own;
    const dkv_parallel threads = {run_threads, NULL, m->threads};
    size_t bytes = 0;
    return attended(m, dkv_gated_size(&bytes, c, n, m->threads)) && need_workspace(m, bytes) &&
           attended(m, pass(c, n, own->workspace, own->workspace_bytes, &threads));
}

static bool gated(lm_model *m, const lm_activations *a, const dkv_gated *c, int64_t n) {
    (void)a;
    return gated_pass(m, c, n, dkv_gated_forward);
}

static bool gated_back(lm_model *m, const dkv_gated *c, int64_t n) { return gated_pass(m, c, n, dkv_gated_backward); }

static bool score(lm_model *m, int64_t *rank, const dkv_attention *a, int64_t n, const int64_t *source) {
    const cpu *own = m->own;
    const dkv_parallel threads = {run_threads, NULL, m->threads};
    size_t bytes = 0;
    for (const dkv_attention *end = a + n; a < end; rank += a->N_q * a->H, source += a->N_q, a++)
        if (!attended(m, dkv_score_size(&bytes, a, m->threads)) || !need_workspace(m, bytes) ||
            !attended(m, dkv_score(rank, a, source, own->workspace, own->workspace_bytes, &threads))) return false;
    return true;
}

static bool pick(lm_model *m, float *y, const float *x, const int32_t *index, int64_t n) {
    const int64_t E = m->p.E;
    for (int64_t i = 0; i < n; i++) memcpy(y + i * E, x + index[i] * E, (size_t)E * sizeof *y);
    return true;
}

static int32_t best_of(const float *x, int64_t n) {
    return lm_sample(&(lm_sampler){.temperature = 0}, x, (int32_t)n, NULL);
}

/* ln of the sum of exp(x), max <- of them */
static double log_sum(const loops *leaf, const float *x, float max, int64_t n) {
    return (double)max + log(leaf->exp_sum(x, max, NULL, n));
}

static bool judge(lm_model *m, lm_mark *mark, float *logit, const int32_t *target, const float *scale,
                  const float *reference, int64_t n) {
    const int64_t V = m->p.V;
    const loops *leaf = level();
    #pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        float *x = logit + i * V;
        int32_t best = best_of(x, V);
        double lse = log_sum(leaf, x, x[best], V);
        mark[i] = (lm_mark){lse - (double)x[target[i]], 0, best == target[i]};
        if (reference) {
            const float *y = reference + i * V;
            double own = log_sum(leaf, y, y[best_of(y, V)], V);
            mark[i].kl = leaf->exp_sum(y, (float)own, x, V) - own + lse;
        }
        if (!scale) continue;
        leaf->scaled_exp(x, (float)lse, scale[i], V);
        x[target[i]] -= scale[i];
    }
    return true;
}

static bool logits_back(lm_model *m, float *d_norm, float *d_logits, int64_t n) {
    const quant_mat *w = &m->output.mat;
    const cpu *c = m->own;
    for (int64_t first = 0; first < w->rows; first += SLAB) {
        int64_t rows = w->rows - first < SLAB ? w->rows - first : SLAB;
        lm_dequantise(c->layer_f32, w, first, rows);
        gemm_back(d_norm, (lm_rows){d_logits + first, w->rows}, c->layer_f32, n, rows, w->cols, first > 0);
    }
    return true;
}

static bool matmul_back(lm_model *m, const lm_activations *a, float *dx, const lm_weight *w, int n_w, const lm_rows *dy,
                        int64_t n) {
    (void)m;
    for (int k = 0; k < n_w; k++) gemm_back(dx, dy[k], a->f32 + w[k].at, n, w[k].mat.rows, w[k].mat.cols, k > 0);
    return true;
}

/* y = x r g, r = 1 / rms: dx += r (g dy - x r^2 mean(g dy x)) */
static bool norm_back(lm_model *m, float *dx, const float *dy, const float *x, const int32_t *index, const float *gain,
                      int64_t n) {
    const int64_t E = m->p.E;
    #pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = (index ? index[i] : i) * E;
        const float *row = x + at, *d = dy + i * E;
        float *to = dx + at, squares = 0, sum = 0;
        #pragma omp simd reduction(+ : squares, sum)
        for (int64_t j = 0; j < E; j++) squares += row[j] * row[j], sum += gain[j] * d[j] * row[j];
        float r = 1 / sqrtf(squares / (float)E + (float)m->p.eps), pull = r * r * r * sum / (float)E;
        #pragma omp simd
        for (int64_t j = 0; j < E; j++) to[j] += r * gain[j] * d[j] - pull * row[j];
    }
    return true;
}

static bool swiglu_back(lm_model *m, const lm_activations *a, lm_rows d_gate, lm_rows d_up, const float *d_act,
                        int64_t n) {
    const loops *leaf = level();
    const int64_t F = m->p.F;
    #pragma omp parallel for
    for (int64_t i = 0; i < n; i++)
        leaf->silu_mul_back(d_gate.data + i * d_gate.ld, d_up.data + i * d_up.ld, d_act + i * F,
                            a->gate.data + i * a->gate.ld, a->up.data + i * a->up.ld, F);
    return true;
}

const lm_device lm_cpu = {
    .open = open_cpu, .close = close_cpu,
    .cache_open = cache_open, .cache_close = cache_close, .cache_truncate = cache_truncate, .cache_pack = cache_pack,
    .make = make, .release = release, .input = input, .begin = begin, .load = load,
    .norm = norm, .matmul = matmul, .matmul_add = matmul_add, .rotate = rotate, .append = append, .attend = attend,
    .swiglu = swiglu, .logits = logits, .logits_all = logits_all, .wait = wait_now, .fetch = fetch,
    .element = sizeof(float), .rows = CHUNK, .hold = hold, .drop = drop, .copy = copy, .zero = zero, .start = start,
    .gates = gates, .gates_back = gates_back, .context = context, .gated = gated, .gated_back = gated_back,
    .score = score, .pick = pick, .logits_some = logits_some, .judge = judge, .logits_back = logits_back,
    .matmul_back = matmul_back, .norm_back = norm_back, .rotate_back = rotate_back, .swiglu_back = swiglu_back,
};
