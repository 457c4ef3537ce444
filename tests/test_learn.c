/* Losses of questions and their gradients by gates through a frozen model (examples/llama/learn.h), on tiny random
   models: against the method's formulas in double, differentiated by central differences; against the engine's own
   evaluation over dense and over packed caches; bits for any number of threads; what is refused. */
#define _GNU_SOURCE
#include "test.h"

#include "../examples/llama/learn.h"
#include "gguf_build.h"

/* ---- models ---------------------------------------------------------------- */

enum { L = 2, HKV = 2, DIM = 8, E = 24, F = 40, V = 32, CTX = 4096, MAX_H = 6 };

typedef struct { const char *arch; int H, n_rot, tied; } kind; /* qwen2: biases, and pairs (i, i + n_rot / 2) */

static const kind kinds[] = {{"llama", 6, 8, 1}, {"qwen2", 2, 6, 0}}; /* G 3 and 1 */

static char path[] = "/tmp/test_learn_XXXXXX";

typedef struct { file keys, infos; uint64_t n_keys, n, at; float *values; int64_t n_values; } model_file;

static void put_number(model_file *f, const char *arch, const char *name, uint32_t v) {
    char key[64];
    snprintf(key, sizeof key, "%s.%s", arch, name);
    put_key_u32(&f->keys, key, v);
    f->n_keys++;
}

/* rows 0: a vector. Values of this deviation around mean. */
static void put_tensor(model_file *f, const char *name, uint64_t cols, uint64_t rows, double mean, double deviation) {
    uint64_t dims[] = {cols, rows}, n = cols * (rows ? rows : 1);
    put_info(&f->infos, name, rows ? 2 : 1, dims, 0, f->at);
    f->at += (n * 4 + 31) / 32 * 32;
    for (uint64_t i = 0; i < (n + 7) / 8 * 8; i++)
        f->values[f->n_values++] = i < n ? (float)(mean + deviation * rnd_normal()) : 0;
    f->n++;
}

static void put_layer(model_file *f, const kind *k, int l) {
    const uint64_t q = (uint64_t)(k->H * DIM), kv = HKV * DIM;
    const struct { const char *name; uint64_t cols, rows; double mean, deviation; } part[] = {
        {"attn_norm.weight", E, 0, 1, 0.2}, {"attn_q.weight", E, q, 0, 0.3}, {"attn_k.weight", E, kv, 0, 0.3},
        {"attn_v.weight", E, kv, 0, 0.2}, {"attn_output.weight", q, E, 0, 0.2}, {"ffn_norm.weight", E, 0, 1, 0.2},
        {"ffn_gate.weight", E, F, 0, 0.3}, {"ffn_up.weight", E, F, 0, 0.3}, {"ffn_down.weight", F, E, 0, 0.2},
        {"attn_q.bias", q, 0, 0, 0.5}, {"attn_k.bias", kv, 0, 0, 0.5}, {"attn_v.bias", kv, 0, 0, 0.5},
    };
    for (int i = 0; i < (strcmp(k->arch, "qwen2") ? 9 : 12); i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.%s", l, part[i].name);
        put_tensor(f, name, part[i].cols, part[i].rows, part[i].mean, part[i].deviation);
    }
}

static void write_model(const kind *k) {
    static model_file f;
    static file head;
    static float values[1 << 16];
    f.keys.n = f.infos.n = f.n = f.at = head.n = 0, f.n_values = 0, f.values = values;
    put_key_str(&f.keys, "general.architecture", k->arch), f.n_keys = 1;
    put_number(&f, k->arch, "block_count", L), put_number(&f, k->arch, "context_length", CTX);
    put_number(&f, k->arch, "embedding_length", E), put_number(&f, k->arch, "feed_forward_length", F);
    put_number(&f, k->arch, "attention.head_count", (uint32_t)k->H);
    put_number(&f, k->arch, "attention.head_count_kv", HKV);
    put_number(&f, k->arch, "attention.key_length", DIM), put_number(&f, k->arch, "attention.value_length", DIM);
    put_number(&f, k->arch, "rope.dimension_count", (uint32_t)k->n_rot), put_number(&f, k->arch, "rope.freq_base", 100);
    char key[64];
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", k->arch);
    put_key_f32(&f.keys, key, 0.01f), f.n_keys++;
    put_tensor(&f, "token_embd.weight", E, V, 0, 0.6);
    put_tensor(&f, "output_norm.weight", E, 0, 1, 0.2);
    if (!k->tied) put_tensor(&f, "output.weight", E, V, 0, 0.5);
    for (int l = 0; l < L; l++) put_layer(&f, k, l);
    put_head(&head, f.n, f.n_keys);
    put(&head, f.keys.bytes, f.keys.n), put(&head, f.infos.bytes, f.infos.n);
    pad(&head, 32);
    FILE *to = fopen(path, "wb");
    CHECK_INT(fwrite(head.bytes, 1, head.n, to), head.n);
    CHECK_INT(fwrite(values, 4, (size_t)f.n_values, to), f.n_values);
    CHECK_INT(fclose(to), 0);
}

static lm_model *open_written(int threads) {
    lm_model *m;
    char err[256] = "";
    if (lm_open(&m, path, LM_CPU, threads, err, sizeof err)) fail_msg("at %s: %s", test_at, err);
    return m;
}

/* ---- the oracle: one token after the other, in double ------------------------ */

enum { MAX_T = 64, MAX_N = 12, W = 4, S = 3, R = 5, D = 6, CELLS = L * HKV * D };

typedef struct { double k[L][MAX_T][HKV][DIM], v[L][MAX_T][HKV][DIM]; int64_t n; } memory; /* of keys and values */

/* What attention does with a context's probabilities. frozen: P_open - P_relaxed where the gates stood. */
typedef struct {
    const double *u;           /* [L][HKV][D], or NULL: all 1 */
    const unsigned char *open; /* NULL, or straight-through */
    bool freeze;
    double (*frozen)[L][MAX_H][MAX_T + MAX_N];  /* [n] */
    double (*score)[L][MAX_H][MAX_T + MAX_N];   /* NULL, or [n] logits */
} oracle_gating;

static const float *weight(const lm_model *m, int l, const char *what) {
    char name[64];
    snprintf(name, sizeof name, l < 0 ? "%.0d%s" : "blk.%d.%s", l < 0 ? 0 : l, what);
    const gguf_tensor *t = gguf_find(lm_get_gguf(m), name);
    return t ? t->data : NULL;
}

static void times(double *y, const float *w, const float *bias, const double *x, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r++) {
        y[r] = bias ? (double)bias[r] : 0;
        for (int64_t c = 0; c < cols; c++) y[r] += (double)w[r * cols + c] * x[c];
    }
}

static void normalise(double *y, const double *x, const float *gain, double eps) {
    double sum = 0;
    for (int i = 0; i < E; i++) sum += x[i] * x[i];
    for (int i = 0; i < E; i++) y[i] = x[i] / sqrt(sum / E + eps) * (double)gain[i];
}

static void turn(double *x, int64_t heads, int64_t pos, const lm_params *p) {
    for (int64_t h = 0; h < heads; h++)
        for (int64_t j = 0; j < p->n_rot / 2; j++) {
            double angle = (double)pos * pow(p->rope_base, -2.0 * (double)j / (double)p->n_rot), *head = x + h * DIM;
            double *a = head + (p->half_split ? j : 2 * j), *b = p->half_split ? a + p->n_rot / 2 : a + 1, a0 = *a;
            *a = a0 * cos(angle) - *b * sin(angle);
            *b = a0 * sin(angle) + *b * cos(angle);
        }
}

/* Bin of position j, -1 for what is always there. */
static int64_t bin_of(int64_t j, int64_t T_c) {
    return j < S || j >= T_c - R ? -1 : (T_c - R - 1 - j) / W;
}

/* out[H][DIM] of row i of the suffix behind T_c tokens, in layer l. */
static void attend_exactly(double *out, const double *q, const memory *kv, int l, int64_t T_c, int64_t i,
                           const oracle_gating *g, int H) {
    for (int h = 0; h < H; h++) {
        double s[MAX_T + MAX_N], p[2][MAX_T + MAX_N], sum[2] = {0}, max = -INFINITY;
        const int64_t group = h / (H / HKV), n = T_c + i + 1;
        for (int64_t j = 0; j < n; j++) {
            s[j] = 0;
            for (int k = 0; k < DIM; k++) s[j] += q[h * DIM + k] * kv->k[l][j][group][k] / sqrt(DIM);
            max = fmax(max, s[j]);
        }
        if (g->score) memcpy(g->score[i][l][h], s, (size_t)n * sizeof *s);
        for (int64_t j = 0; j < n; j++) {
            const int64_t b = j < T_c ? bin_of(j, T_c) : -1, cell = (l * HKV + group) * D + b;
            sum[0] += p[0][j] = exp(s[j] - max) * (b < 0 || !g->u ? 1 : g->u[cell]);
            sum[1] += p[1][j] = exp(s[j] - max) * (b < 0 || !g->open ? 1 : g->open[cell]);
        }
        memset(out + h * DIM, 0, DIM * sizeof *out);
        for (int64_t j = 0; j < n; j++) {
            double relaxed = p[0][j] / sum[0], *frozen = g->open ? &g->frozen[i][l][h][j] : NULL;
            if (g->freeze) *frozen = p[1][j] / sum[1] - relaxed;
            for (int k = 0; k < DIM; k++)
                out[h * DIM + k] += (relaxed + (frozen ? *frozen : 0)) * kv->v[l][j][group][k];
        }
    }
}

/* Runs a token at the end of kv, whose first T_c tokens are the context; logits[V], or NULL. */
static void oracle_token(const lm_model *m, memory *kv, int64_t T_c, int32_t token, const oracle_gating *g,
                         double *logits) {
    const lm_params *p = lm_get_params(m);
    const int H = p->shape.H;
    const int64_t pos = kv->n++;
    double x[E], y[E], q[MAX_H * DIM], o[MAX_H * DIM], gate[F], up[F];
    for (int i = 0; i < E; i++) x[i] = (double)weight(m, -1, "token_embd.weight")[token * E + i];
    for (int l = 0; l < L; l++) {
        double *k = kv->k[l][pos][0], *v = kv->v[l][pos][0];
        normalise(y, x, weight(m, l, "attn_norm.weight"), p->eps);
        times(q, weight(m, l, "attn_q.weight"), weight(m, l, "attn_q.bias"), y, H * DIM, E);
        times(k, weight(m, l, "attn_k.weight"), weight(m, l, "attn_k.bias"), y, HKV * DIM, E);
        times(v, weight(m, l, "attn_v.weight"), weight(m, l, "attn_v.bias"), y, HKV * DIM, E);
        turn(q, H, pos, p), turn(k, HKV, pos, p);
        attend_exactly(o, q, kv, l, T_c, pos - T_c, g, H);
        times(y, weight(m, l, "attn_output.weight"), NULL, o, E, H * DIM);
        for (int i = 0; i < E; i++) x[i] += y[i];
        normalise(y, x, weight(m, l, "ffn_norm.weight"), p->eps);
        times(gate, weight(m, l, "ffn_gate.weight"), NULL, y, F, E);
        times(up, weight(m, l, "ffn_up.weight"), NULL, y, F, E);
        for (int i = 0; i < F; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
        times(y, weight(m, l, "ffn_down.weight"), NULL, gate, E, F);
        for (int i = 0; i < E; i++) x[i] += y[i];
    }
    if (!logits) return;
    const float *out = weight(m, -1, "output.weight");
    normalise(y, x, weight(m, -1, "output_norm.weight"), p->eps);
    times(logits, out ? out : weight(m, -1, "token_embd.weight"), NULL, y, V, E);
}

static double cross_entropy(const double *logits, int32_t target) {
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < V; i++) max = fmax(max, logits[i]);
    for (int i = 0; i < V; i++) sum += exp(logits[i] - max);
    return max + log(sum) - logits[target];
}

/* Mean over the value of a question behind kv. */
static double oracle_question(const lm_model *m, const memory *context, const lm_question *q, const oracle_gating *g) {
    static memory kv;
    double logits[V], loss = 0;
    kv = *context;
    for (int64_t i = 0; i < q->n; i++) {
        oracle_token(m, &kv, context->n, q->tokens[i], g, logits);
        if (i >= q->first - 1 && i < q->n - 1) loss += cross_entropy(logits, q->tokens[i + 1]);
    }
    return loss / (double)(q->n - q->first);
}

/* u[L][HKV][D] of the draw, from METHOD's formulas. */
static void oracle_union(double *u, const dkv_gates *g, const double *a, dkv_draw draw) {
    const int G = g->tied ? 1 : g->H / g->Hkv;
    for (int c = 0; c < CELLS; c++) {
        double closed = 1;
        for (int k = 0; k < G; k++) {
            int64_t i = ((int64_t)(c / D) * G + k) * D + c % D;
            double r = (double)dkv_gate_noise(draw, i), s = 1 / (1 + exp(-(log(r) - log1p(-r) + a[i]) * 1.5));
            closed *= 1 - fmin(1, fmax(0, s * 1.2 - 0.1));
        }
        u[c] = 1 - closed;
    }
}

/* ---- a small world: contexts, questions, gates ------------------------------- */

enum { EXAMS = 3, QUESTIONS = 5, SEED = 77, STEP = 3 };

typedef struct {
    lm_model *m;
    int64_t T_c[EXAMS];
    int32_t *context[EXAMS];
    lm_question question[QUESTIONS];
    lm_exam exam[EXAMS];
    memory dense[EXAMS];
    float a[L * MAX_H * D];
    unsigned char open[CELLS];
    lm_gating g;
} world;

static int32_t *random_tokens(int64_t n) {
    int32_t *ids = guarded((size_t)n * sizeof *ids, sizeof *ids);
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)rnd_below(V);
    return ids;
}

static lm_cache *prefilled(lm_model *m, const dkv_plan *plan, dkv_type type, const int32_t *ids, int64_t capacity) {
    lm_cache *c;
    CHECK_OK(lm_cache_create(&c, m, plan, type, capacity, NULL));
    if (lm_prefill(m, &c, 1, ids, plan->T_c, NULL)) fail_msg("at %s: %s", test_at, lm_error(m));
    return c;
}

static lm_question random_question(int64_t n, int64_t first, double share, int64_t T_c) {
    return (lm_question){random_tokens(n), n, first, share, rnd_below(T_c - (n - first) + 1)};
}

/* Contexts that fill their bins, end inside one, and have none but sink and recent. */
static world *new_world(const kind *k, int threads, int tied, dkv_type type) {
    static const int64_t T_c[EXAMS] = {S + R + W * D, S + R + W * 3 - 2, S + R - 1};
    static world w;
    memset(&w, 0, sizeof w);
    write_model(k);
    w.m = open_written(threads);
    for (int i = 0; i < EXAMS; i++) {
        dkv_plan plan = plan_of_mask(NULL, L, HKV, T_c[i]);
        w.T_c[i] = T_c[i];
        w.context[i] = random_tokens(T_c[i]);
        for (int64_t t = 0; t < T_c[i]; t++)
            oracle_token(w.m, &w.dense[i], 0, w.context[i][t], &(oracle_gating){0}, NULL);
        w.exam[i] = (lm_exam){prefilled(w.m, &plan, type, w.context[i], 0), &w.question[i + (i > 0)],
                              i == 0 || i == 2 ? 2 : 1, (uint32_t)(40 + i)};
    }
    w.question[0] = random_question(9, 4, 0.3, T_c[0]), w.question[1] = random_question(6, 5, 0.2, T_c[0]);
    w.question[2] = random_question(12, 1, 0.5, T_c[1]);
    w.question[3] = random_question(2, 1, 0, T_c[2]), w.question[4] = random_question(7, 3, 1, T_c[2]);
    w.g = (lm_gating){{L, k->H, HKV, D, tied}, W, S, R, w.a, NULL, SEED, STEP};
    for (int i = 0; i < L * MAX_H * D; i++) w.a[i] = (float)(1.5 * rnd_normal());
    for (int i = 0; i < CELLS; i++) w.open[i] = rnd() & 1;
    return &w;
}

static void close_world(world *w) {
    for (int i = 0; i < EXAMS; i++) lm_cache_destroy(w->exam[i].context);
    lm_close(w->m);
}

static lm_learner *new_learner(lm_model *m) {
    lm_learner *x;
    CHECK_INT(lm_learner_open(&x, m), 0);
    return x;
}

#define RUN(m, call) do { if (call) fail_msg("at %s: %s: %s", test_at, #call, lm_error(m)); } while (0)

/* ---- gradients --------------------------------------------------------------- */

/* The oracle's loss of all exams with logits a; frozen [QUESTIONS][MAX_N].. is filled or used. */
static double oracle_loss(world *w, const double *a, double (*frozen)[MAX_N][L][MAX_H][MAX_T + MAX_N], bool freeze,
                          double *each) {
    double u[CELLS], sum = 0;
    for (int i = 0, k = 0; i < EXAMS; i++) {
        oracle_union(u, &w->g.gates, a, (dkv_draw){SEED, STEP, w->exam[i].id});
        for (int j = 0; j < w->exam[i].n_questions; j++, k++) {
            oracle_gating g = {u, w->g.open, w->g.open && freeze, frozen[k], NULL};
            each[k] = oracle_question(w->m, &w->dense[i], &w->question[k], &g);
            sum += w->question[k].weight * each[k];
        }
    }
    return sum;
}

static void check_gradient(const kind *k, int tied, int straight) {
    static double frozen[QUESTIONS][MAX_N][L][MAX_H][MAX_T + MAX_N];
    world *w = new_world(k, 1, tied, DKV_F32);
    const int64_t n = dkv_gates_count(&w->g.gates);
    float da[L * MAX_H * D];
    double a[L * MAX_H * D], each[QUESTIONS], unused[QUESTIONS], loss, most = 0, size = 0;
    lm_grade_result result[QUESTIONS], graded[QUESTIONS];
    lm_learner *x = new_learner(w->m);
    w->g.open = straight ? w->open : NULL;
    for (int64_t i = 0; i < n; i++) a[i] = (double)w->a[i], da[i] = 2;
    RUN(w->m, lm_learn(x, w->exam, EXAMS, &w->g, da, &loss, result));
    double want = oracle_loss(w, a, frozen, true, each);
    CHECK(fabs(loss - want) <= 3e-6 * want);
    for (int i = 0; i < QUESTIONS; i++) CHECK(fabs(result[i].loss - each[i]) <= 3e-6 * each[i]);
    for (int64_t i = 0; i < n; i++) {
        const double h = 1e-4, kept = a[i];
        a[i] = kept + h;
        double up = oracle_loss(w, a, frozen, false, unused);
        a[i] = kept - h;
        double slope = (up - oracle_loss(w, a, frozen, false, unused)) / (2 * h);
        a[i] = kept;
        most = fmax(most, fabs((double)da[i] - 2 - slope));
        size = fmax(size, fabs(slope));
    }
    AT("%s, tied %d, straight %d: off by %.2g of %.2g", k->arch, tied, straight, most, size);
    if (getenv("VERBOSE")) print_message("%s\n", test_at);
    CHECK(size > 1e-3);
    CHECK(most <= 1e-5 * size + 3e-7); /* f32 forward and back; da began at 2, whose last place is 2.4e-7 */
    RUN(w->m, lm_grade(x, w->exam, EXAMS, &w->g, graded));
    CHECK(!memcmp(graded, result, sizeof result));
    lm_learner_close(x);
    close_world(w);
}

static void gradients(int straight) {
    for (int i = 0; i < COUNT(kinds); i++)
        for (int tied = 0; tied < 2; tied++) check_gradient(&kinds[i], tied, straight);
}

static void relaxed_gradient(void) { gradients(0); }
static void straight_through_gradient(void) { gradients(1); }

/* ---- against the engine's own evaluation --------------------------------------- */

/* Logits [n][V] of the question's tokens over a cache, whose tail is emptied again. */
static float *evaluated(lm_model *m, lm_cache *c, const lm_question *q) {
    float *logits = guarded((size_t)(q->n * V) * sizeof *logits, 4);
    RUN(m, lm_eval(m, c, q->tokens, q->n, lm_cache_plan(c)->T_c, logits, LM_ALL));
    CHECK_OK(lm_cache_truncate(c, 0));
    return logits;
}

static void as_double(double *to, const float *from) {
    for (int i = 0; i < V; i++) to[i] = (double)from[i];
}

static int best_of(const double *x) {
    int best = 0;
    for (int i = 1; i < V; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* What grading must find, from logits; kl from those of dense. */
static lm_grade_result expected(const lm_question *q, const float *logits, const float *dense) {
    lm_grade_result r = {0, 0, 0, q->n - q->first};
    for (int64_t i = q->first - 1; i < q->n - 1; i++) {
        double x[V], y[V], kl = 0;
        as_double(x, logits + i * V), as_double(y, dense + i * V);
        r.loss += cross_entropy(x, q->tokens[i + 1]) / (double)r.n_value;
        r.right += best_of(x) == q->tokens[i + 1];
        for (int j = 0; j < V; j++)
            kl += exp(-cross_entropy(y, j)) * (cross_entropy(x, j) - cross_entropy(y, j));
        r.kl += kl / (double)r.n_value;
    }
    return r;
}

static void expect_grade(lm_grade_result got, lm_grade_result want, double off) {
    AT("loss %g, not %g; kl %g, not %g", got.loss, want.loss, got.kl, want.kl);
    CHECK(fabs(got.loss - want.loss) <= off * (1 + want.loss));
    CHECK(fabs(got.kl - want.kl) <= off * (want.kl > 0 ? 1 + want.kl : 0));
    CHECK_INT(got.right, want.right);
    CHECK_INT(got.n_value, want.n_value);
}

/* The most likely tokens as the value, so that some are right. */
static void answer_well(world *w, int exam, lm_question *q) {
    int32_t *tokens = guarded((size_t)q->n * 4, 4);
    lm_cache *c;
    dkv_plan plan = plan_of_mask(NULL, L, HKV, w->T_c[exam]);
    memcpy(tokens, q->tokens, (size_t)q->n * 4);
    q->tokens = tokens;
    for (int64_t i = q->first; i < q->n; i += 2) {
        c = prefilled(w->m, &plan, DKV_F32, w->context[exam], q->n);
        double x[V];
        as_double(x, evaluated(w->m, c, q) + (i - 1) * V);
        tokens[i] = best_of(x);
        lm_cache_destroy(c);
    }
}

/* A cache that keeps what is always there and the open bins of each KV head. */
static lm_cache *packed_cache(world *w, int exam, const unsigned char *open, dkv_type type, int64_t capacity) {
    const int64_t T_c = w->T_c[exam];
    unsigned char *keep = guarded((size_t)(L * HKV * T_c), 1);
    for (int64_t i = 0; i < L * HKV * T_c; i++) {
        int64_t b = bin_of(i % T_c, T_c);
        keep[i] = b < 0 || !open || open[i / T_c * D + b];
    }
    dkv_plan plan = plan_of_mask(keep, L, HKV, T_c);
    return prefilled(w->m, &plan, type, w->context[exam], capacity);
}

/* Dense and binary grades are those of the caches that really have these positions. A learner's q, k and v stay in f32,
   where a 16-bit cache's tail rounds them. */
static void grades_of_packed_caches(void) {
    static const struct { dkv_type type; double off; } types[] = {{DKV_F32, 3e-6}, {DKV_F16, 1e-3}, {DKV_I8, 1e-3}};
    for (int t = 0; t < COUNT(types); t++) {
        world *w = new_world(&kinds[t % 2], 1, 0, types[t].type);
        lm_grade_result dense[QUESTIONS], again[QUESTIONS], binary[QUESTIONS], closed[QUESTIONS];
        unsigned char none[CELLS] = {0};
        int64_t right = 0;
        lm_learner *x = new_learner(w->m);
        answer_well(w, 0, &w->question[0]), answer_well(w, 1, &w->question[2]);
        w->g.a = NULL;
        RUN(w->m, lm_grade(x, w->exam, EXAMS, &w->g, again));
        RUN(w->m, lm_grade_reference(x, w->exam, EXAMS, dense));
        for (int i = 0; i < QUESTIONS; i++) {
            AT("dense loss %.9g and %.9g", dense[i].loss, again[i].loss);
            CHECK(fabs(dense[i].loss - again[i].loss) <= 3e-6 * dense[i].loss); /* other bins: sums restart elsewhere */
            CHECK(dense[i].kl == 0 && again[i].kl == 0);
        }
        RUN(w->m, lm_grade(x, w->exam, EXAMS, &w->g, again));
        for (int i = 0; i < QUESTIONS; i++) CHECK(fabs(again[i].kl) <= 1e-6);
        w->g.open = w->open;
        RUN(w->m, lm_grade(x, w->exam, EXAMS, &w->g, binary));
        w->g.open = none;
        RUN(w->m, lm_grade(x, w->exam, EXAMS, &w->g, closed));
        for (int i = 0, k = 0; i < EXAMS; i++) {
            lm_cache *c[] = {packed_cache(w, i, NULL, types[t].type, MAX_N),
                             packed_cache(w, i, w->open, types[t].type, MAX_N),
                             packed_cache(w, i, none, types[t].type, MAX_N)};
            for (int j = 0; j < w->exam[i].n_questions; j++, k++) {
                const lm_question *q = &w->question[k];
                const float *all = evaluated(w->m, c[0], q);
                expect_grade(dense[k], expected(q, all, all), types[t].off);
                right += dense[k].right;
                if (types[t].type == DKV_I8) continue; /* its scales depend on what is packed */
                expect_grade(binary[k], expected(q, evaluated(w->m, c[1], q), all), types[t].off);
                expect_grade(closed[k], expected(q, evaluated(w->m, c[2], q), all), types[t].off);
            }
            for (int j = 0; j < 3; j++) lm_cache_destroy(c[j]);
        }
        CHECK(right >= 4);
        CHECK(binary[0].kl > 1e-3 && closed[0].kl > 1e-3);
        RUN(w->m, lm_grade(x, w->exam, 1, &w->g, again)); /* not the same exams: no reference */
        CHECK(again[0].kl == 0 && again[0].loss == closed[0].loss);
        lm_learner_close(x);
        close_world(w);
    }
}

/* ---- scores -------------------------------------------------------------------- */

/* Hits from the oracle's logits; -1 where two keys around the fifth place are too close for f32. */
static double oracle_hit(const double *s, int64_t n, int64_t source) {
    int64_t before = 0;
    double near = INFINITY;
    for (int64_t j = 0; j < n; j++)
        if (j != source) before += s[j] > s[source] || (s[j] == s[source] && j < source),
                         near = fmin(near, fabs(s[j] - s[source]));
    return near < 1e-5 ? -1 : before < 5;
}

static void ranks_of_sources(void) {
    static double score[MAX_N][L][MAX_H][MAX_T + MAX_N];
    int64_t skipped = 0, hit = 0, asked = 0;
    for (int t = 0; t < COUNT(kinds); t++) {
        world *w = new_world(&kinds[t], 1, 0, DKV_F32);
        const int H = kinds[t].H;
        float *hits = guarded((size_t)(QUESTIONS * L * H) * sizeof *hits, 4);
        lm_learner *x = new_learner(w->m);
        RUN(w->m, lm_rank(x, w->exam, EXAMS, hits));
        for (int i = 0, k = 0; i < EXAMS; i++)
            for (int j = 0; j < w->exam[i].n_questions; j++, k++) {
                const lm_question *q = &w->question[k];
                oracle_question(w->m, &w->dense[i], q, &(oracle_gating){.score = score});
                for (int c = 0; c < L * H; c++) {
                    double want = 0, close = 0;
                    for (int64_t r = q->first - 1, source = q->source; r < q->n - 1; r++, source++) {
                        double one = oracle_hit(score[r][c / H][c % H], w->T_c[i] + r + 1, source);
                        want += fmax(0, one), close += one < 0;
                    }
                    AT("question %d, layer %d, head %d", k, c / H, c % H);
                    const double n_value = (double)(q->n - q->first), got = (double)hits[k * L * H + c] * n_value;
                    CHECK(got >= want - 1e-5 && got <= want + close + 1e-5);
                    skipped += (int64_t)close, hit += (int64_t)want, asked += q->n - q->first;
                }
            }
        lm_learner_close(x);
        close_world(w);
    }
    AT("%d hits of %d, %d too close", (int)hit, (int)asked, (int)skipped);
    CHECK(hit > asked / 20 && hit < asked / 2 && skipped < asked / 50);
}

/* ---- bits ----------------------------------------------------------------------- */

typedef struct { double loss; float da[L * MAX_H * D]; lm_grade_result result[QUESTIONS]; } outcome;

static outcome learned(world *w, lm_learner *x) {
    outcome o;
    memset(&o, 0, sizeof o);
    RUN(w->m, lm_learn(x, w->exam, EXAMS, &w->g, o.da, &o.loss, o.result));
    return o;
}

/* For any number of threads, and of a learner that was used for something else before. */
static void threads_agree(void) {
    static const dkv_type types[] = {DKV_F32, DKV_BF16, DKV_F16, DKV_I8};
    static outcome first, o;
    for (int t = 0; t < COUNT(types); t++)
        for (int threads = 1; threads <= 4; threads++) {
            test_state = 5;
            world *w = new_world(&kinds[t % 2], threads, 0, types[t]);
            lm_learner *x = new_learner(w->m);
            lm_grade_result result[QUESTIONS];
            float hits[QUESTIONS * L * MAX_H];
            w->g.open = t % 2 ? w->open : NULL;
            if (threads == 3) RUN(w->m, lm_rank(x, w->exam + 1, 1, hits));
            if (threads == 4) RUN(w->m, lm_grade_reference(x, w->exam, 2, result));
            o = learned(w, x);
            if (threads == 1) first = o;
            AT("%s, %d threads", dkv_type_name(types[t]), threads);
            CHECK(!memcmp(&o, &first, sizeof o));
            o = learned(w, x);
            CHECK(!memcmp(&o, &first, sizeof o));
            lm_learner_close(x);
            close_world(w);
        }
}

/* Questions that take several chunks, one of which parts an exam, have the losses and gradients of questions asked one
   by one. */
static void chunks_agree(void) {
    enum { MANY = 7 };
    static const int64_t n[MANY] = {LM_QUESTION_MAX, 600, 300, 200, 824, 1000, 30};
    world *w = new_world(&kinds[0], 1, 0, DKV_F16);
    lm_question q[MANY];
    lm_grade_result all[MANY], one;
    float together[L * MAX_H * D] = {0}, apart[L * MAX_H * D] = {0};
    double loss, sum = 0, part, most = 0, off = 0;
    lm_learner *x = new_learner(w->m);
    for (int i = 0; i < MANY; i++) {
        q[i] = (lm_question){random_tokens(n[i]), n[i], i == 4 ? 500 : n[i] - 3, 1.0 / (i + 1), 0};
    }
    lm_exam e[] = {{w->exam[0].context, q, 3, 1}, {w->exam[1].context, q + 3, 4, 2}};
    RUN(w->m, lm_learn(x, e, 2, &w->g, together, &loss, all));
    for (int i = 0; i < MANY; i++) {
        lm_exam single = {e[i >= 3].context, &q[i], 1, e[i >= 3].id};
        RUN(w->m, lm_learn(x, &single, 1, &w->g, apart, &part, &one));
        AT("question %d", i);
        CHECK(fabs(one.loss - all[i].loss) <= 1e-5 * one.loss);
        CHECK(one.right == all[i].right && one.n_value == all[i].n_value);
        sum += part;
    }
    for (int64_t i = 0; i < dkv_gates_count(&w->g.gates); i++) {
        most = fmax(most, fabs((double)apart[i]));
        off = fmax(off, fabs((double)apart[i] - (double)together[i]));
    }
    AT("loss %g and %g, gradient off by %.2g of %.2g", loss, sum, off, most);
    CHECK(fabs(loss - sum) <= 1e-5 * sum);
    CHECK(most > 1e-4 && off <= 1e-5 * most);
    lm_learner_close(x);
    close_world(w);
}

/* ---- what is refused -------------------------------------------------------------- */

enum { GRADE, LEARN, REFERENCE, RANK, ALL };

/* Every way to ask says so, and writes nothing. */
static void refused(world *w, lm_learner *x, int64_t n, const char *says, int first, int last) {
    for (int way = first; way <= last; way++) {
        char poison[sizeof(lm_grade_result[QUESTIONS])];
        lm_grade_result result[QUESTIONS];
        float da[L * MAX_H * D], hits[QUESTIONS * L * MAX_H];
        double loss;
        memset(poison, TEST_POISON, sizeof poison);
        memset(result, TEST_POISON, sizeof result), memset(da, TEST_POISON, sizeof da);
        memset(hits, TEST_POISON, sizeof hits), memset(&loss, TEST_POISON, sizeof loss);
        AT("%s, way %d", says, way);
        int r = way == LEARN ? lm_learn(x, w->exam, n, &w->g, da, &loss, result)
              : way == GRADE ? lm_grade(x, w->exam, n, &w->g, result)
              : way == RANK ? lm_rank(x, w->exam, n, hits) : lm_grade_reference(x, w->exam, n, result);
        CHECK_INT(r, -1);
        if (!strstr(lm_error(w->m), says)) fail_msg("'%s' does not say '%s'", lm_error(w->m), says);
        CHECK(is_poison(result, sizeof result) && is_poison(da, sizeof da) && is_poison(hits, sizeof hits));
        CHECK(is_poison(&loss, sizeof loss));
    }
}

static void refuses_bad_questions(void) {
    world *w = new_world(&kinds[0], 1, 0, DKV_F32);
    lm_learner *x = new_learner(w->m);
    const lm_question good = w->question[2];
    lm_question *q = &w->question[2];
    int32_t tokens[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, V, 11};
    refused(w, x, 0, "no exams", GRADE, RANK);
    q->first = 0, refused(w, x, 3, "1 <= first < n <= 1024", GRADE, RANK), *q = good;
    q->first = q->n, refused(w, x, 3, "1 <= first < n <= 1024", GRADE, RANK), *q = good;
    q->n = LM_QUESTION_MAX + 1, refused(w, x, 3, "1 <= first < n <= 1024", GRADE, RANK), *q = good;
    q->tokens = tokens, refused(w, x, 3, "token 32 is not in the vocabulary", GRADE, RANK), *q = good;
    q->source = -1, refused(w, x, 3, "source at -1", RANK, RANK), *q = good;
    q->source = w->T_c[1] - 10, refused(w, x, 3, "source at", RANK, RANK), *q = good;
    w->exam[1].n_questions = 0, refused(w, x, 3, "without questions", GRADE, RANK), w->exam[1].n_questions = 1;
    learned(w, x); /* and what is in order still runs */
    lm_learner_close(x);
    close_world(w);
}

static void refuses_bad_contexts(void) {
    world *w = new_world(&kinds[0], 1, 0, DKV_F16);
    lm_learner *x = new_learner(w->m);
    lm_model *twin = open_written(1);
    dkv_plan full = plan_of_mask(NULL, L, HKV, w->T_c[1]), long_one = plan_of_mask(NULL, L, HKV, CTX - 3);
    lm_cache *own = w->exam[1].context, *bad[] = {
        packed_cache(w, 1, w->open, DKV_F16, 0), prefilled(twin, &full, DKV_F16, w->context[1], 0),
        prefilled(w->m, &full, DKV_F32, w->context[1], 0), prefilled(w->m, &full, DKV_F16, w->context[1], 1), NULL,
        prefilled(w->m, &long_one, DKV_F16, random_tokens(CTX - 3), 0)};
    static const char *const says[] = {"keep all its positions", "another model", "one type", "no tail", "packed",
                                       "context of 4096"};
    CHECK_OK(lm_cache_create(&bad[4], w->m, &full, DKV_F16, 0, NULL));
    RUN(w->m, lm_eval(w->m, bad[3], w->context[1], 1, w->T_c[1], NULL, LM_NONE));
    for (int i = 0; i < COUNT(bad); i++) {
        w->exam[1].context = bad[i];
        refused(w, x, 3, says[i], GRADE, RANK);
        lm_cache_destroy(bad[i]);
    }
    w->exam[1].context = own;
    learned(w, x);
    lm_learner_close(x);
    lm_close(twin);
    close_world(w);
}

static void refuses_bad_gates(void) {
    world *w = new_world(&kinds[0], 1, 0, DKV_F32);
    lm_learner *x = new_learner(w->m);
    const lm_gating good = w->g;
    w->g.gates.L = 3, refused(w, x, 3, "another model", GRADE, LEARN), w->g = good;
    w->g.gates.H = 4, refused(w, x, 3, "another model", GRADE, LEARN), w->g = good;
    w->g.gates.Hkv = 1, refused(w, x, 3, "another model", GRADE, LEARN), w->g = good;
    w->g.gates.D = 0, refused(w, x, 3, "another model", GRADE, LEARN), w->g = good;
    w->g.a = NULL, refused(w, x, 3, "without logits", LEARN, LEARN), w->g = good;
    w->g.gates.D = D - 1, refused(w, x, 3, "attention: ", GRADE, LEARN), w->g = good; /* too few bins */
    w->g.W = 0, refused(w, x, 3, "attention: ", GRADE, LEARN), w->g = good;
    learned(w, x);
    lm_learner_close(x);
    close_world(w);
}

int main(void) {
    static const test_case cases[] = {
        {"gradient of relaxed gates", relaxed_gradient, 1},
        {"gradient of straight-through gates", straight_through_gradient, 1},
        {"grades are those of packed caches", grades_of_packed_caches, 0},
        {"ranks of sources", ranks_of_sources, 0},
        {"thread counts agree", threads_agree, 0},
        {"chunks agree", chunks_agree, 0},
        {"refuses bad questions", refuses_bad_questions, 0},
        {"refuses bad contexts", refuses_bad_contexts, 0},
        {"refuses bad gates", refuses_bad_gates, 0},
    };
    int fd = mkstemp(path);
    if (fd < 0 || close(fd)) return 1;
    int failed = run_cases("learn", cases, COUNT(cases));
    unlink(path);
    return failed;
}
