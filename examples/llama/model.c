#define _GNU_SOURCE
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static void omp_set_num_threads(int n) { (void)n; }
#endif

const lm_params *lm_get_params(const lm_model *m) { return &m->p; }
const gguf *lm_get_gguf(const lm_model *m) { return m->file; }
const char *lm_error(const lm_model *m) { return m->error; }
const char *lm_where(const lm_model *m) { return m->where; }
int64_t lm_kv_peak(const lm_model *m) { return m->kv_peak; }

/* ==== the graph ==== */

bool lm_project(lm_model *m, const lm_layer *l, const lm_activations *a, const float *x, const float *rope, int64_t n,
                lm_target to) {
    const lm_device *d = m->device;
    const lm_rows qkv[] = {a->q, a->k, a->v};
    int first = to.kv_only ? WK : WQ;
    return d->norm(m, a->norm, x, l->attn_norm, n) &&
           d->matmul(m, a, qkv + first, &l->w[first], WO - first, a->norm, n) && d->rotate(m, a, rope, n, to);
}

bool lm_feed(lm_model *m, const lm_layer *l, const lm_activations *a, const float *x, int64_t n) {
    const lm_device *d = m->device;
    const lm_rows ffn[] = {a->gate, a->up};
    return d->norm(m, a->norm, x, l->ffn_norm, n) && d->matmul(m, a, ffn, &l->w[GATE], 2, a->norm, n) &&
           d->swiglu(m, a, n);
}

/* n tokens through one layer; x, rope: where they are in a */
static bool layer_forward(lm_model *m, const lm_layer *l, const lm_activations *a, float *x, const float *rope,
                          int64_t n, lm_target to) {
    const lm_device *d = m->device;
    if (!lm_project(m, l, a, x, rope, n, to) || !d->append(m, a, n, to)) return false;
    if (to.kv_only) return true;
    return d->attend(m, a, n, to) && d->matmul_add(m, a, x, &l->w[WO], a->o, n) && lm_feed(m, l, a, x, n) &&
           d->matmul_add(m, a, x, &l->w[DOWN], a->act, n);
}

/* All tokens through layer l, a chunk at a time; done: what to report to, or NULL. */
static bool run_layer(lm_model *m, const lm_activations *a, int l, lm_target to, const lm_prefill_options *done) {
    const lm_layer *layer = &m->layers[l];
    const int64_t before = to.at;
    if (m->device->load && !m->device->load(m, layer, a)) return false;
    for (int64_t i = 0; i < a->n_all; i += a->n) {
        int64_t n = a->n_all - i < a->n ? a->n_all - i : a->n;
        to.at = before + i;
        if (!layer_forward(m, layer, a, a->x + i * m->p.E, a->rope + i * m->p.n_rot, n, to)) return false;
        if (done && done->progress)
            done->progress(done->user, (l + (double)(i + n) / (double)a->n_all) / m->p.shape.L);
    }
    return true;
}

static bool run_layers(lm_model *m, lm_cache *c, const lm_activations *a) {
    if (!m->device->begin(m, c, a)) return false;
    for (int l = 0; l < m->p.shape.L; l++)
        if (!run_layer(m, a, l, (lm_target){c, l, c->tail, false}, NULL)) return false;
    return true;
}

/* One token, and its logits: what a device may record. */
static bool forward_one(lm_model *m, lm_cache *c) {
    return run_layers(m, c, &m->one) && m->device->logits(m, &m->one, m->one.x);
}

/* ==== caches ==== */

static dkv_result open_cache(lm_cache **out, lm_model *m, const dkv_plan *plan, const dkv_shape *shape, dkv_type type,
                             int64_t capacity, const dkv_allocator *alloc) {
    lm_cache *c = calloc(1, sizeof *c);
    *out = NULL;
    if (!c) return DKV_ERR_MEMORY;
    c->m = m, c->type = type, c->capacity = capacity;
    dkv_result r = m->device->cache_open(c, plan, shape, alloc);
    if (r) free(c);
    else *out = c;
    return r;
}

dkv_result lm_cache_create(lm_cache **out, lm_model *m, const dkv_plan *plan, dkv_type type, int64_t capacity,
                           const dkv_allocator *alloc) {
    return open_cache(out, m, plan, &m->p.shape, type, capacity, alloc);
}

void lm_cache_destroy(lm_cache *c) {
    if (!c) return;
    c->m->device->cache_close(c);
    free(c);
}

const dkv_plan *lm_cache_plan(const lm_cache *c) { return c->plan; }
int64_t lm_cache_tail(const lm_cache *c) { return c->tail; }

dkv_result lm_cache_truncate(lm_cache *c, int64_t n) {
    if (n < c->tail) c->tail = n;
    return c->m->device->cache_truncate(c);
}

/* A cache of one layer with nothing packed: n positions of tail. */
static lm_cache *dense_layer(lm_model *m, dkv_type type, int64_t n, const dkv_allocator *alloc) {
    dkv_shape shape = m->p.shape;
    dkv_plan plan;
    lm_cache *cache = NULL;
    size_t bytes = 0;
    shape.L = 1;
    dkv_result r = dkv_plan_from_positions(&plan, NULL, &bytes, 1, shape.Hkv, 0, NULL, NULL);
    void *memory = r ? NULL : malloc(bytes);
    if (!r && !memory) r = DKV_ERR_MEMORY;
    if (!r) r = dkv_plan_from_positions(&plan, memory, &bytes, 1, shape.Hkv, 0, NULL, NULL);
    if (!r) r = open_cache(&cache, m, &plan, &shape, type, n, alloc);
    free(memory);
    return r ? lm_explain(m, "dense layer: %s", dkv_result_string(r)), NULL : cache;
}

/* ==== running ==== */

static bool check_run(lm_model *m, const int32_t *tokens, int64_t n, int64_t pos) {
    if (n < 1) return lm_fail(m, "no tokens to run");
    if (pos < 0 || n > m->p.n_ctx - pos)
        return lm_fail(m, "%lld tokens at position %lld exceed the model's context of %lld", (long long)n,
                       (long long)pos, (long long)m->p.n_ctx);
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= m->p.V) return lm_fail(m, "token %d is not in the vocabulary", tokens[i]);
    return true;
}

static bool check_cache(lm_model *m, const lm_cache *cache) {
    return cache->m == m ? true : lm_fail(m, "the cache was made for another model");
}

static bool eval_one(lm_model *m, lm_cache *c, const int32_t *token, int64_t pos, bool logits) {
    const lm_device *d = m->device;
    if (d->record && !d->record(m, c, forward_one)) return false;
    if (!d->input(m, &m->one, token, pos)) return false;
    if (d->replay) return d->replay(m, c);
    return logits ? forward_one(m, c) : run_layers(m, c, &m->one);
}

/* Afterwards the device is ready for single tokens. */
static bool eval_many(lm_model *m, lm_cache *c, const int32_t *tokens, int64_t n, int64_t pos, float *logits,
                      lm_logits which) {
    const lm_device *d = m->device;
    lm_activations a;
    if (!d->make(m, &a, n)) return false;
    bool ok = d->input(m, &a, tokens, pos) && run_layers(m, c, &a);
    if (ok && which == LM_LAST) ok = d->logits(m, &a, a.x + (n - 1) * m->p.E);
    if (ok && which == LM_ALL) ok = d->logits_all(m, &a, logits);
    d->release(m, &a);
    return ok && (!d->record || d->record(m, c, forward_one));
}

/* logits, or if not NULL best. A failure takes back what was appended. */
static int eval(lm_model *m, lm_cache *c, const int32_t *tokens, int64_t n, int64_t pos, float *logits, lm_logits which,
                int32_t *best) {
    const lm_device *d = m->device;
    const bool kept = which == LM_LAST || (which == LM_ALL && n == 1);
    double now;
    if (!check_run(m, tokens, n, pos) || !check_cache(m, c)) return -1;
    if (n > c->capacity - c->tail)
        return lm_explain(m, "%lld more tokens do not fit the cache's tail of %lld", (long long)n,
                          (long long)c->capacity);
    bool ok = n == 1 ? eval_one(m, c, tokens, pos, kept) : eval_many(m, c, tokens, n, pos, logits, which);
    ok = ok && (kept ? d->fetch(m, logits, best) : d->wait(m, &now));
    if (ok) c->tail += n;
    else d->cache_truncate(c);
    return ok ? 0 : -1;
}

int lm_eval(lm_model *m, lm_cache *c, const int32_t *tokens, int64_t n, int64_t pos, float *logits, lm_logits which) {
    return eval(m, c, tokens, n, pos, logits, which, NULL);
}

int lm_eval_best(lm_model *m, lm_cache *c, const int32_t *tokens, int64_t n, int64_t pos, int32_t *best) {
    return eval(m, c, tokens, n, pos, NULL, LM_LAST, best);
}

/* Layer l of every cache from the dense layer. */
static bool pack_layer(lm_model *m, lm_cache *const *caches, int n_caches, int l, lm_cache *dense, double *pack_s) {
    double start, end;
    for (int i = 0; i < n_caches; i++) {
        if (!m->device->wait(m, &start)) return false;
        dkv_result r = m->device->cache_pack(caches[i], l, dense);
        if (r) return lm_fail(m, "packing layer %d: %s", l, dkv_result_string(r));
        if (!m->device->wait(m, &end)) return false;
        if (pack_s) pack_s[i] += end - start;
    }
    return true;
}

static bool prefill(lm_model *m, lm_cache *const *caches, int n_caches, const lm_activations *a, lm_cache *dense,
                    const lm_prefill_options *options) {
    if (!m->device->begin(m, dense, a)) return false;
    for (int l = 0; l < m->p.shape.L; l++) {
        lm_target to = {dense, 0, 0, l == m->p.shape.L - 1};
        if (!run_layer(m, a, l, to, options) ||
            !pack_layer(m, caches, n_caches, l, dense, options ? options->pack_s : NULL)) return false;
        dkv_result r = m->device->cache_truncate(dense);
        if (r) return lm_fail(m, "dense layer: %s", dkv_result_string(r));
    }
    return true;
}

int lm_prefill(lm_model *m, lm_cache *const *caches, int n_caches, const int32_t *tokens, int64_t n,
               const lm_prefill_options *options) {
    lm_activations a;
    if (!check_run(m, tokens, n, 0)) return -1;
    for (int i = 0; i < n_caches; i++) {
        if (!check_cache(m, caches[i])) return -1;
        if (caches[i]->type != caches[0]->type || caches[i]->plan->T_c != n)
            return lm_explain(m, "caches to prefill must share a type and have plans of %lld positions", (long long)n);
    }
    lm_cache *dense = dense_layer(m, caches[0]->type, n, options ? options->alloc : NULL);
    bool ok = dense && m->device->make(m, &a, n);
    if (ok) {
        ok = m->device->input(m, &a, tokens, 0) && prefill(m, caches, n_caches, &a, dense, options);
        m->device->release(m, &a);
    }
    lm_cache_destroy(dense);
    return ok ? 0 : -1;
}

/* ==== opening ==== */

static bool choose_device(lm_model *m, lm_place place) {
    m->device = place == LM_CUDA ? &lm_cuda : &lm_cpu;
    return m->device ? true : lm_fail(m, "this program was built without CUDA; make cuda builds one with it");
}

int lm_open(lm_model **out, const char *path, lm_place place, int threads, char *err, size_t err_size) {
    lm_model *m = calloc(1, sizeof *m);
    *out = NULL;
    if (!m) return snprintf(err, err_size, "%s: no memory", path), -1;
    m->threads = threads;
    omp_set_num_threads(threads);
    if (gguf_open(&m->file, path, err, err_size)) return lm_close(m), -1;
    if (!choose_device(m, place) || !lm_load(m) || !m->device->open(m)) {
        snprintf(err, err_size, "%s: %s", path, m->error);
        return lm_close(m), -1;
    }
    *out = m;
    return 0;
}

void lm_close(lm_model *m) {
    if (!m) return;
    if (m->device) m->device->close(m);
    free(m->vectors);
    free(m->inv_freq);
    free(m->layers);
    gguf_close(m->file);
    free(m);
}
