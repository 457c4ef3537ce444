/* peer_ggml.c: ggml's attention as llama.cpp calls it, with and without flash attention, and either with the G query
   heads of a group as rows of one matrix, which llama.cpp does not do but ggml could. Equal heads are one node of the
   graph, ragged ones a node each, so that ggml reads only what was kept. */
#include "bench.h"

#ifdef BENCH_GGML
#include <ggml-cpu.h>
#include <ggml.h>
#include <math.h>
#include <string.h>

enum { FLASH = 1, GROUPED = 2, MAX_NODES = 64 };

typedef struct {
    const bench_case *c;
    const bench_kv *kv;
    int mode, nodes;
    int64_t heads, rows; /* a node's: KV heads if grouped, else query heads; rows of q for each */
    struct ggml_context *ctx;
    struct ggml_cgraph *graph;
    struct ggml_threadpool *pool;
    struct ggml_cplan plan;
    struct ggml_tensor *k[MAX_NODES], *v[MAX_NODES], *out[MAX_NODES];
} state;

static const enum ggml_type types[] = {[DKV_F32] = GGML_TYPE_F32, [DKV_F16] = GGML_TYPE_F16,
                                       [DKV_BF16] = GGML_TYPE_BF16};

const char *bench_ggml_version(void) { return ggml_version(); }

static void place(struct ggml_tensor *t) { t->data = bench_alloc((int64_t)ggml_nbytes(t)); }

/* f16 [N_q][n]: 0, or -inf where a key lies ahead of the query. NULL: every key is seen. */
static struct ggml_tensor *causal_mask(const state *s, int64_t n) {
    const int64_t N_q = s->c->N_q;
    if (N_q == 1) return NULL;
    struct ggml_tensor *mask = ggml_new_tensor_2d(s->ctx, GGML_TYPE_F16, n, N_q);
    place(mask);
    for (int64_t i = 0; mask->data && i < N_q; i++)
        for (int64_t j = 0; j < n; j++) ((uint16_t *)mask->data)[i * n + j] = j < n - N_q + 1 + i ? 0 : 0xfc00;
    return mask;
}

/* In ggml's order of dimensions: q [d, rows, heads] a view, K [d, n, KV heads], V the same or [n, d, KV heads]. */
static void add_node(state *s, struct ggml_tensor *all_q, int i) {
    const bench_case *c = s->c;
    const int64_t G = c->H / c->Hkv, n = c->n[i], d = c->d, kv_heads = c->Hkv / s->nodes;
    const size_t head = (size_t)d * 4, row = s->mode & GROUPED ? head : (size_t)c->H * head;
    const float scale = 1 / sqrtf((float)d);
    struct ggml_tensor *q = ggml_view_3d(s->ctx, all_q, d, s->rows, s->heads, row,
                                         s->mode & GROUPED ? (size_t)G * head : head, (size_t)(i * G) * head);
    struct ggml_tensor *k = ggml_new_tensor_3d(s->ctx, types[c->type], d, n, kv_heads), *mask = causal_mask(s, n), *v;
    if (s->mode & FLASH) {
        v = ggml_new_tensor_3d(s->ctx, types[c->type], d, n, kv_heads);
        s->out[i] = ggml_flash_attn_ext(s->ctx, q, k, v, mask, scale, 0, 0);
    } else {
        v = ggml_new_tensor_3d(s->ctx, types[c->type], n, d, kv_heads);
        v->nb[1] = (size_t)(c->n_max * dkv_type_bytes(c->type));
        struct ggml_tensor *logits = ggml_mul_mat(s->ctx, k, q);
        struct ggml_tensor *p = ggml_soft_max_ext(s->ctx, logits, mask, scale, 0);
        place(logits);
        p->data = logits->data; /* in place, as llama.cpp's allocator has it */
        s->out[i] = ggml_mul_mat(s->ctx, v, p);
    }
    place(s->out[i]);
    s->k[i] = k, s->v[i] = v;
    ggml_build_forward_expand(s->graph, s->out[i]);
}

static void set_layer(state *s, int64_t layer) {
    char *v = s->mode & FLASH ? s->kv->v : s->kv->v_transposed;
    for (int i = 0; i < s->nodes; i++) {
        const int64_t at = layer % s->kv->layers * s->kv->layer_bytes + i * s->kv->head_bytes;
        s->k[i]->data = s->kv->k + at, s->v[i]->data = v + at;
    }
}

static void peer_close(void *p) {
    state *s = p;
    ggml_threadpool_free(s->pool);
    ggml_free(s->ctx);
}

static const char *peer_open(void **out, const bench_case *c, int mode) {
    const int64_t G = c->H / c->Hkv;
    if (mode & GROUPED && (c->N_q > 1 || G == 1)) return ""; /* nothing to group, or not as a view */
    if (c->type >= sizeof types / sizeof types[0]) return "ggml has no such type";
    state *s = *out = bench_alloc(sizeof *s);
    const bench_kv *kv = bench_kv_of(c, c->type);
    if (!s || !kv) return "no memory";
    int nodes = 1;
    for (int g = 0; g < c->Hkv; g++) nodes = c->n[g] < c->n_max ? c->Hkv : nodes;
    *s = (state){.c = c, .kv = kv, .mode = mode, .nodes = nodes, .rows = mode & GROUPED ? G : c->N_q,
                 .heads = (mode & GROUPED ? c->Hkv : c->H) / nodes};
    ggml_cpu_init();
    const size_t overhead = ggml_tensor_overhead() * 8 * MAX_NODES + ggml_graph_overhead();
    s->ctx = ggml_init((struct ggml_init_params){overhead, NULL, true});
    s->graph = ggml_new_graph(s->ctx);
    struct ggml_tensor *q = ggml_new_tensor_3d(s->ctx, GGML_TYPE_F32, c->d, c->H, c->N_q);
    q->data = (void *)(uintptr_t)c->q;
    for (int i = 0; i < nodes; i++) add_node(s, q, i);
    set_layer(s, 0);
    struct ggml_threadpool_params params = ggml_threadpool_params_default(c->threads);
    s->pool = ggml_threadpool_new(&params);
    s->plan = ggml_graph_plan(s->graph, c->threads, s->pool);
    s->plan.work_data = bench_alloc((int64_t)s->plan.work_size + 64);
    bool placed = s->plan.work_data != NULL;
    for (struct ggml_tensor *t = ggml_get_first_tensor(s->ctx); t; t = ggml_get_next_tensor(s->ctx, t))
        placed = placed && t->data;
    return placed ? NULL : (peer_close(s), "no memory");
}

static double peer_run(void *p, int64_t layer) {
    state *s = p;
    set_layer(s, layer);
    double start = bench_seconds();
    ggml_graph_compute(s->graph, &s->plan);
    return bench_seconds() - start;
}

/* A node's output is [rows][heads][d] with flash attention, [heads][rows][d] without. */
static void peer_read(void *p, float *out) {
    const state *s = p;
    const int64_t G = s->c->H / s->c->Hkv, d = s->c->d;
    for (int i = 0; i < s->nodes; i++)
        for (int64_t j = 0; j < s->heads; j++)
            for (int64_t r = 0; r < s->rows; r++) {
                const int64_t from = s->mode & FLASH ? r * s->heads + j : j * s->rows + r;
                const int64_t to = i * G + (s->mode & GROUPED ? j * G + r : r * s->c->H + j);
                memcpy(out + to * d, (float *)s->out[i]->data + from * d, (size_t)d * 4);
            }
}
#else
const char *bench_ggml_version(void) { return "missing"; }

static const char *peer_open(void **state, const bench_case *c, int mode) {
    (void)state, (void)c;
    return mode == 1 ? "missing: make peers, then make bench" : ""; /* said once */
}

#define peer_run   NULL
#define peer_read  NULL
#define peer_close NULL
#endif

const bench_peer peers_ggml[] = {
    {"ggml fa", 1, peer_open, peer_run, peer_read, peer_close},
    {"ggml mm", 0, peer_open, peer_run, peer_read, peer_close},
    {"ggml fa grouped", 3, peer_open, peer_run, peer_read, peer_close},
    {"ggml mm grouped", 2, peer_open, peer_run, peer_read, peer_close},
    {0},
};
