/* The engine on a tiny random model: what it refuses to open and to run, and by what name; what prefill keeps in
   memory; that the ways to the same logits agree. Its logits against other engines: test_logits.c. */
#define _GNU_SOURCE
#include "test.h"

#include "../examples/llama/model.h"
#include "../examples/llama/sample.h"
#include "gguf_build.h"

enum { L = 2, H = 4, HKV = 2, DIM = 16, E = 32, F = 64, V = 48, CTX = 4096 };

/* What to make wrong: a key that is left out, replaced by a string or by another number; a tensor left out, reshaped or
   renamed. */
typedef struct {
    const char *arch, *skip_key, *text_key, *number_key, *skip_tensor, *reshape, *rename, *extra_text_key, *extra_text;
    uint32_t number;
} flaw;

static bool is(const char *a, const char *b) { return a && !strcmp(a, b); }

static void put_number(file *f, const flaw *w, const char *name, uint32_t v, uint64_t *n) {
    char key[64];
    snprintf(key, sizeof key, "%s.%s", w->arch, name);
    if (is(w->skip_key, name)) return;
    ++*n;
    if (is(w->text_key, name)) put_key_str(f, key, "many");
    else put_key_u32(f, key, is(w->number_key, name) ? w->number : v);
}

static uint64_t put_keys(file *f, const flaw *w) {
    uint64_t n = 1;
    char key[64];
    put_key_str(f, "general.architecture", w->arch);
    put_number(f, w, "block_count", L, &n);
    put_number(f, w, "context_length", CTX, &n);
    put_number(f, w, "embedding_length", E, &n);
    put_number(f, w, "feed_forward_length", F, &n);
    put_number(f, w, "attention.head_count", H, &n);
    put_number(f, w, "attention.head_count_kv", HKV, &n);
    put_number(f, w, "attention.key_length", DIM, &n);
    put_number(f, w, "attention.value_length", DIM, &n);
    put_number(f, w, "rope.dimension_count", DIM, &n);
    put_number(f, w, "rope.freq_base", 10000, &n);
    put_number(f, w, "attention.layer_norm_rms_epsilon", 1, &n); /* large, but a number */
    if (w->extra_text_key) {
        snprintf(key, sizeof key, "%s.%s", w->arch, w->extra_text_key);
        put_key_str(f, key, w->extra_text), n++;
    }
    return n;
}

typedef struct { file infos; uint64_t n, at; } tensors;

static void add(tensors *t, const flaw *w, const char *name, uint64_t cols, uint64_t rows) {
    uint64_t dims[] = {cols, is(w->reshape, name) ? rows + 1 : rows};
    if (is(w->skip_tensor, name)) return;
    put_info(&t->infos, is(w->rename, name) ? "stranger.weight" : name, 2, dims, GGUF_F32, t->at);
    t->at += (dims[0] * dims[1] * 4 + 31) / 32 * 32;
    t->n++;
}

static void add_layer(tensors *t, const flaw *w, int l) {
    const struct { const char *name; uint64_t cols, rows; } part[] = {
        {"attn_norm", E, 1},  {"attn_q", E, H * DIM},      {"attn_k", E, HKV * DIM}, {"attn_v", E, HKV * DIM},
        {"ffn_norm", E, 1},   {"attn_output", H * DIM, E}, {"ffn_gate", E, F},       {"ffn_up", E, F},
        {"ffn_down", F, E},
    };
    for (int i = 0; i < COUNT(part); i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.%s.weight", l, part[i].name);
        add(t, w, name, part[i].cols, part[i].rows);
    }
}

static char path[] = "/tmp/test_model_XXXXXX";

static void write_model(const flaw *w) {
    static file keys, head;
    static tensors t;
    keys.n = head.n = t.infos.n = t.n = t.at = 0;
    uint64_t n_keys = put_keys(&keys, w);
    add(&t, w, "token_embd.weight", E, V);
    add(&t, w, "output_norm.weight", E, 1);
    for (int l = 0; l < L; l++) add_layer(&t, w, l);
    put_head(&head, t.n, n_keys);
    put(&head, keys.bytes, keys.n);
    put(&head, t.infos.bytes, t.infos.n);
    pad(&head, 32);
    FILE *f = fopen(path, "wb");
    CHECK_INT(fwrite(head.bytes, 1, head.n, f), head.n);
    for (uint64_t i = 0; i < t.at / 4; i++) {
        float x = (float)(0.3 * rnd_normal());
        CHECK_INT(fwrite(&x, sizeof x, 1, f), 1);
    }
    fclose(f);
}

static lm_model *open_model(const flaw *w, int threads) {
    lm_model *m;
    char err[256] = "";
    write_model(w);
    if (lm_open(&m, path, LM_CPU, threads, err, sizeof err)) fail_msg("at %s: %s", test_at, err);
    return m;
}

static const flaw none = {.arch = "llama"};

/* ---- opening ---- */

static void refuses_bad_models(void) {
    static const struct { flaw w; const char *says; } bad[] = {
        {{.arch = "gpt2"}, "general.architecture"},
        {{.arch = "llama", .skip_key = "block_count"}, "llama.block_count"},
        {{.arch = "llama", .skip_key = "context_length"}, "llama.context_length"},
        {{.arch = "llama", .skip_key = "embedding_length"}, "llama.embedding_length"},
        {{.arch = "llama", .skip_key = "feed_forward_length"}, "llama.feed_forward_length"},
        {{.arch = "llama", .skip_key = "attention.head_count"}, "llama.attention.head_count"},
        {{.arch = "qwen2", .skip_key = "attention.layer_norm_rms_epsilon"}, "qwen2.attention.layer_norm_rms_epsilon"},
        {{.arch = "llama", .text_key = "block_count"}, "llama.block_count"},
        {{.arch = "llama", .text_key = "attention.head_count_kv"}, "llama.attention.head_count_kv"},
        {{.arch = "llama", .text_key = "rope.freq_base"}, "llama.rope.freq_base"},
        {{.arch = "llama", .number_key = "block_count", .number = 0}, "1..65536"},
        {{.arch = "llama", .number_key = "block_count", .number = 65537}, "1..65536"},
        {{.arch = "llama", .number_key = "block_count", .number = 3}, "blk.2.attn_q.weight is missing"},
        {{.arch = "llama", .number_key = "block_count", .number = 1}, "blk.1."},
        {{.arch = "llama", .number_key = "embedding_length", .number = UINT32_MAX}, "llama.embedding_length"},
        {{.arch = "llama", .number_key = "embedding_length", .number = 64}, "tensor token_embd.weight has shape"},
        {{.arch = "llama", .number_key = "context_length", .number = 0}, "llama.context_length"},
        {{.arch = "llama", .number_key = "attention.head_count", .number = 0}, "llama.attention.head_count"},
        {{.arch = "llama", .number_key = "attention.head_count_kv", .number = 3}, "does not divide"},
        {{.arch = "llama", .number_key = "attention.head_count_kv", .number = 8}, "llama.attention.head_count_kv"},
        {{.arch = "llama", .number_key = "attention.key_length", .number = 577}, "llama.attention.key_length"},
        {{.arch = "llama", .number_key = "attention.value_length", .number = 4}, "llama.attention.value_length"},
        {{.arch = "llama", .number_key = "rope.dimension_count", .number = 7}, "odd"},
        {{.arch = "llama", .number_key = "rope.dimension_count", .number = 18}, "llama.rope.dimension_count"},
        {{.arch = "llama", .number_key = "rope.freq_base", .number = 0}, "llama.rope.freq_base"},
        {{.arch = "llama", .extra_text_key = "rope.scaling.type", .extra_text = "yarn"}, "llama.rope.scaling.type"},
        {{.arch = "llama", .extra_text_key = "rope.scaling.factor", .extra_text = "2"}, "llama.rope.scaling.factor"},
        {{.arch = "llama", .skip_tensor = "token_embd.weight"}, "token_embd.weight is missing"},
        {{.arch = "llama", .skip_tensor = "output_norm.weight"}, "output_norm.weight is missing"},
        {{.arch = "llama", .skip_tensor = "blk.1.ffn_down.weight"}, "blk.1.ffn_down.weight is missing"},
        {{.arch = "llama", .reshape = "blk.0.attn_k.weight"}, "blk.0.attn_k.weight has shape [33][32], not [32][32]"},
        {{.arch = "llama", .reshape = "blk.1.attn_norm.weight"}, "blk.1.attn_norm.weight has shape"},
        {{.arch = "llama", .rename = "blk.0.ffn_up.weight"}, "blk.0.ffn_up.weight is missing"},
    };
    for (int i = 0; i < COUNT(bad); i++) {
        lm_model *m;
        char err[256] = "";
        AT("case %d: %s", i, bad[i].says);
        write_model(&bad[i].w);
        CHECK_INT(lm_open(&m, path, LM_CPU, 1, err, sizeof err), -1);
        CHECK(!m);
        if (!strstr(err, bad[i].says) || !strstr(err, path)) fail_msg("'%s' does not say '%s'", err, bad[i].says);
    }
    lm_model *m;
    char err[256] = "";
    CHECK_INT(lm_open(&m, "/nonexistent.gguf", LM_CPU, 1, err, sizeof err), -1);
    CHECK(!m && strstr(err, "/nonexistent.gguf"));
    write_model(&none);
    CHECK_INT(lm_open(&m, path, LM_CUDA, 1, err, sizeof err), -1); /* not linked in here */
    CHECK(!m && strstr(err, "make cuda"));
}

static void reads_parameters(void) {
    flaw few = {.arch = "qwen2", .skip_key = "attention.head_count_kv"};
    lm_model *m = open_model(&none, 1);
    const lm_params *p = lm_get_params(m);
    CHECK(p->shape.L == L && p->shape.H == H && p->shape.Hkv == HKV && p->shape.d_k == DIM && p->shape.d_v == DIM);
    CHECK(p->E == E && p->F == F && p->V == V && p->n_ctx == CTX && p->n_rot == DIM && !p->half_split);
    CHECK(p->eps == 1 && p->rope_base == 10000 && p->rope_scale == 1);
    lm_close(m);
    char err[256] = "";
    write_model(&few); /* Hkv defaults to H, so K's shape is wrong then */
    CHECK_INT(lm_open(&m, path, LM_CPU, 1, err, sizeof err), -1);
    CHECK(strstr(err, "blk.0.attn_k.weight has shape [32][32], not [64][32]"));
    m = open_model(&(flaw){.arch = "qwen2", .number_key = "rope.dimension_count", .number = 4}, 1);
    CHECK(lm_get_params(m)->half_split && lm_get_params(m)->n_rot == 4);
    lm_close(m);
}

/* ---- running ---- */

static lm_cache *new_cache(lm_model *m, int64_t T_c, int64_t capacity, dkv_type type, const dkv_allocator *alloc) {
    dkv_plan plan;
    lm_cache *c;
    size_t bytes;
    CHECK_OK(dkv_plan_from_positions(&plan, NULL, &bytes, L, HKV, T_c, NULL, NULL));
    CHECK_OK(dkv_plan_from_positions(&plan, guarded(bytes, 8), &bytes, L, HKV, T_c, NULL, NULL));
    CHECK_OK(lm_cache_create(&c, m, &plan, type, capacity, alloc));
    return c;
}

static int32_t *random_tokens(int64_t n) {
    int32_t *ids = guarded((size_t)n * sizeof *ids, sizeof *ids);
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)rnd_below(V);
    return ids;
}

static void expect_close(const float *got, const float *want, int64_t n, double most) {
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - (double)want[i]) <= most))
            fail_msg("at %s: [%d] %g, not %g", test_at, (int)i, (double)got[i], (double)want[i]);
}

/* All at once, one by one, and layer-major prefill with a suffix: f32 weights, f32 cache, so only rounding differs. The
   prefill passes one chunk, or two of which the second is a single token. */
static void ways_agree(void) {
    lm_model *m = open_model(&none, 2);
    static const int64_t lengths[] = {40, 1030};
    for (int k = 0; k < COUNT(lengths); k++) {
        int64_t n = lengths[k], T_c = k ? 1025 : 33;
        int32_t *ids = random_tokens(n);
        float *all = guarded((size_t)(n * V) * 4, 4), *rest = guarded((size_t)((n - T_c) * V) * 4, 4), one[V];
        lm_cache *a = new_cache(m, 0, n, DKV_F32, NULL), *b = new_cache(m, 0, n, DKV_F32, NULL);
        lm_cache *c = new_cache(m, T_c, n - T_c, DKV_F32, NULL);
        CHECK_INT(lm_eval(m, a, ids, n, 0, all, LM_ALL), 0);
        for (int64_t i = 0; i < n; i++) {
            AT("token %d of %d", (int)i, (int)n);
            CHECK_INT(lm_eval(m, b, ids + i, 1, i, one, i % 2 ? LM_LAST : LM_ALL), 0);
            expect_close(one, all + i * V, V, 1e-4);
        }
        CHECK_INT(lm_prefill(m, &c, 1, ids, T_c, NULL), 0);
        CHECK_INT(lm_eval(m, c, ids + T_c, n - T_c, T_c, rest, LM_ALL), 0);
        expect_close(rest, all + T_c * V, (n - T_c) * V, 1e-4);
        CHECK_OK(lm_cache_truncate(c, 0));
        CHECK_INT(lm_eval(m, c, ids + T_c, n - T_c, T_c, one, LM_LAST), 0);
        expect_close(one, all + (n - 1) * V, V, 1e-4);
        lm_cache_destroy(a), lm_cache_destroy(b), lm_cache_destroy(c);
    }
    lm_close(m);
}

/* The same bits for any number of threads, but for OpenBLAS, which sees the same sizes and yet may sum otherwise. */
static void threads_agree(void) {
    float logits[3][V];
    int32_t *ids = random_tokens(50);
    for (int t = 1; t <= 3; t++) {
        test_state = 1;
        lm_model *m = open_model(&none, t);
        lm_cache *c = new_cache(m, 49, 1, DKV_F16, NULL);
        CHECK_INT(lm_prefill(m, &c, 1, ids, 49, NULL), 0);
        CHECK_INT(lm_eval(m, c, ids + 49, 1, 49, logits[t - 1], LM_LAST), 0);
        expect_close(logits[t - 1], logits[0], V, 1e-5);
        lm_cache_destroy(c);
        lm_close(m);
    }
}

typedef struct { int64_t now, peak; } meter;

static void *meter_alloc(void *user, size_t bytes) {
    meter *m = user;
    m->now += (int64_t)bytes;
    if (m->now > m->peak) m->peak = m->now;
    return malloc(bytes);
}

static void meter_free(void *user, void *ptr, size_t bytes) {
    ((meter *)user)->now -= (int64_t)bytes;
    free(ptr);
}

typedef struct { int calls; double last; } progress;

static void note_progress(void *user, double done) {
    progress *p = user;
    CHECK(done > p->last && done <= 1);
    p->last = done;
    p->calls++;
}

/* Two caches from one prefill; the dense layer is one layer, and it is gone at the end. */
static void prefill_keeps_one_layer(void) {
    enum { T_C = 2100 };
    meter bytes = {0}, dense = {0};
    progress seen = {0};
    dkv_allocator counted = {meter_alloc, meter_free, &bytes}, layer = {meter_alloc, meter_free, &dense};
    lm_model *m = open_model(&none, 2);
    int32_t *ids = random_tokens(T_C + 1);
    float a[V], b[V];
    lm_cache *c[] = {new_cache(m, T_C, 1, DKV_F16, &counted), new_cache(m, T_C, 8, DKV_F16, &counted)};
    int64_t before = bytes.now;
    double pack_s[2] = {0};
    lm_prefill_options options = {&layer, note_progress, &seen, pack_s};
    CHECK_INT(lm_prefill(m, c, 2, ids, T_C, &options), 0);
    CHECK(pack_s[0] > 0 && pack_s[1] > 0);
    CHECK_INT(bytes.now, before);
    CHECK_INT(bytes.peak, before);
    CHECK_INT(dense.now, 0);
    int64_t one_layer = dkv_kv_bytes_dense(&(dkv_shape){1, H, HKV, DIM, DIM}, DKV_F16, T_C);
    AT("peak %d, one layer %d", (int)dense.peak, (int)one_layer);
    CHECK(dense.peak >= one_layer && dense.peak <= one_layer + 4096);
    CHECK(seen.last == 1 && seen.calls == L * 3);
    CHECK_INT(lm_eval(m, c[0], ids + T_C, 1, T_C, a, LM_LAST), 0);
    CHECK_INT(lm_eval(m, c[1], ids + T_C, 1, T_C, b, LM_LAST), 0);
    CHECK(!memcmp(a, b, sizeof a));
    int32_t best;
    CHECK_OK(lm_cache_truncate(c[1], 0));
    CHECK_INT(lm_eval_best(m, c[1], ids + T_C, 1, T_C, &best), 0);
    CHECK_INT(best, lm_sample(&(lm_sampler){0}, a, V, NULL));
    lm_cache_destroy(c[0]), lm_cache_destroy(c[1]);
    CHECK_INT(bytes.now, 0);
    lm_close(m);
}

static void expect_error(const lm_model *m, int result, const char *says) {
    CHECK_INT(result, -1);
    if (!strstr(lm_error(m), says)) fail_msg("'%s' does not say '%s'", lm_error(m), says);
}

static void refuses_bad_runs(void) {
    lm_model *m = open_model(&none, 1), *twin = open_model(&none, 1);
    int32_t ids[8] = {1, 2, 3, 4, 5, 6, 7, V};
    float logits[V];
    lm_cache *c = new_cache(m, 0, 4, DKV_F32, NULL), *packed = new_cache(m, 4, 4, DKV_F16, NULL);
    lm_cache *mixed[] = {packed, c}, *other = new_cache(twin, 0, 4, DKV_F32, NULL);
    CHECK_INT(lm_eval(m, c, ids, 3, 0, logits, LM_LAST), 0);
    expect_error(m, lm_eval(m, c, ids, 0, 3, logits, LM_LAST), "no tokens");
    expect_error(m, lm_eval(m, c, ids, 2, 3, logits, LM_LAST), "do not fit");
    expect_error(m, lm_eval(m, c, ids, 1, CTX, logits, LM_LAST), "context of 4096");
    expect_error(m, lm_eval(m, c, ids, 1, -1, logits, LM_LAST), "context of 4096");
    expect_error(m, lm_eval(m, c, ids, 1, INT64_MAX, logits, LM_LAST), "context of 4096");
    expect_error(m, lm_eval(m, c, ids + 7, 1, 3, logits, LM_LAST), "token 48");
    expect_error(m, lm_eval(m, c, &(int32_t){-1}, 1, 3, logits, LM_LAST), "token -1");
    expect_error(m, lm_eval(m, other, ids, 1, 0, logits, LM_LAST), "another model");
    expect_error(m, lm_prefill(m, &packed, 1, ids, 5, NULL), "plans of 5");
    expect_error(m, lm_prefill(m, mixed, 2, ids, 4, NULL), "share a type");
    expect_error(m, lm_prefill(m, &packed, 1, ids, CTX + 1, NULL), "context of 4096");
    CHECK_INT(lm_cache_tail(c), 3);
    CHECK_INT(lm_eval(m, c, ids + 3, 1, 3, logits, LM_LAST), 0);
    CHECK_INT(lm_prefill(m, &packed, 1, ids, 4, NULL), 0);
    expect_error(m, lm_prefill(m, &packed, 1, ids, 4, NULL), "packing layer 0");
    lm_cache_destroy(c), lm_cache_destroy(packed), lm_cache_destroy(other);
    lm_close(m), lm_close(twin);
}

/* ---- sampling ---- */

static const float five[5] = {1, 3, 2, 3, -INFINITY};

static void greedy_takes_the_first_best(void) {
    lm_sampler s = {0};
    CHECK_INT(lm_sample(&s, five, 5, NULL), 1);
    CHECK_INT(lm_sample(&s, (float[]){NAN, -2, NAN, -1}, 4, NULL), 3);
    CHECK_INT(lm_sample(&s, (float[]){NAN, NAN}, 2, NULL), 0);
    CHECK_INT(lm_sample(&s, (float[]){-INFINITY, -INFINITY}, 2, NULL), 0);
}

/* Counts of n draws per id. */
static void draw(int count[5], lm_sampler s, const float *logits, int n) {
    lm_candidate scratch[5];
    memset(count, 0, 5 * sizeof *count);
    for (int i = 0; i < n; i++) {
        int32_t id = lm_sample(&s, logits, 5, scratch);
        CHECK(id >= 0 && id < 5);
        count[id]++;
    }
}

static void sampling_follows_probabilities(void) {
    enum { N = 40000 };
    int count[5];
    double p[5], sum = 0;
    for (int i = 0; i < 5; i++) sum += p[i] = exp((double)five[i] / 0.7);
    draw(count, (lm_sampler){.temperature = 0.7f, .top_p = 1, .seed = 5}, five, N);
    for (int i = 0; i < 5; i++) /* within 5 standard deviations */
        CHECK(fabs(count[i] - N * p[i] / sum) <= 5 * sqrt(N * p[i] / sum) + 1e-9);
}

static void sampling_cuts(void) {
    int a[5], b[5];
    draw(a, (lm_sampler){.temperature = 1, .top_k = 1, .top_p = 1}, five, 200);
    CHECK_INT(a[1], 200); /* of equals, the lower id */
    draw(a, (lm_sampler){.temperature = 1, .top_k = 3, .top_p = 1}, five, 2000);
    CHECK(a[0] == 0 && a[1] && a[2] && a[3]);
    draw(a, (lm_sampler){.temperature = 1, .top_k = 0, .top_p = 0}, five, 200);
    CHECK_INT(a[1], 200);
    draw(a, (lm_sampler){.temperature = 1, .top_k = 0, .top_p = 0.5f}, five, 2000); /* 0.40 + 0.40 > 0.5 */
    CHECK(a[1] && a[3] && a[1] + a[3] == 2000);
    draw(a, (lm_sampler){.temperature = 1, .top_k = 2, .top_p = 0.5f}, five, 200); /* 0.5 of two equals: one */
    CHECK_INT(a[1], 200);
    draw(a, (lm_sampler){.temperature = 1, .top_p = 1, .seed = 9}, five, 500);
    draw(b, (lm_sampler){.temperature = 1, .top_p = 1, .seed = 9}, five, 500);
    CHECK(!memcmp(a, b, sizeof a));
    draw(a, (lm_sampler){.temperature = 1, .top_p = 1}, (float[]){NAN, 1, NAN, 1, -INFINITY}, 200);
    CHECK(a[1] && a[3] && a[1] + a[3] == 200);
    draw(a, (lm_sampler){.temperature = 1, .top_p = 1}, (float[]){0, INFINITY, 0, 0, 0}, 50);
    CHECK_INT(a[1], 50);
}

int main(void) {
    static const test_case cases[] = {
        {"refuses bad models", refuses_bad_models, 0},
        {"reads parameters", reads_parameters, 0},
        {"ways to the same logits agree", ways_agree, 0},
        {"thread counts agree", threads_agree, 0},
        {"prefill keeps one layer", prefill_keeps_one_layer, 0},
        {"refuses bad runs", refuses_bad_runs, 0},
        {"greedy takes the first best", greedy_takes_the_first_best, 0},
        {"sampling follows probabilities", sampling_follows_probabilities, 0},
        {"sampling cuts", sampling_cuts, 0},
    };
    int fd = mkstemp(path);
    if (fd < 0 || close(fd)) return 1;
    int failed = run_cases("model", cases, COUNT(cases));
    unlink(path);
    return failed;
}
