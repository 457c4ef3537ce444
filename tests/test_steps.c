/* dkv train against a plain replay of the method: one context at a time, no batches, no states; weights, schedule,
   penalty, clipping, AdamW and Top-K written out in double precision. Only the loss and its gradient by the gates come
   from the engine (test_learn.c has those). DKV is the tool; python3 makes the model. */
#define _GNU_SOURCE
#include "../examples/dkv/tool.h"
/* before cmocka, which makes a macro of fail */
#include "test.h"

#include "../examples/llama/learn.h"
#include "../examples/llama/needles.h"

enum { L = 2, H = 4, Hkv = 2, D = 4, W = 96, S = 32, R = 64, T_c = S + R + W * D, NEEDLES = 3, STEPS = 7, ROUNDS = 2 };
enum { CONTEXTS = 2 * LM_KINDS * LM_WORDINGS }; /* a round's: 4 bins in contexts of 3, the second one filled up */

static char dir[] = "/tmp/test_steps.XXXXXX", path[64];

/* What a run is told, and what that means in each step. */
typedef struct {
    const char *options;
    int ours, bins; /* bins: D, or 1 where a gate is a whole head */
    double rho[STEPS], lambda[STEPS];
    int relaxed; /* steps */
} course;

/* What else ours and the reference differ in. */
typedef struct {
    int tied, by_p, parts;
    double rate;
} manner;

static const manner manners[] = {{0, 1, 1, 0.01}, {1, 0, 2, 0.1}};

static const course courses[] = {
    {"--recipe reference --steps 3,4", 0, D, {0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25},
     {0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5}, 3},
    {"--steps 2,2 --anneal 0.8,1.5 --ramp 4", 1, D, {0.8, 0.8, 0.8, 0.503968419957949, 0.317480210393640, 0.25, 0.25},
     {0.25, 0.5, 0.75, 1, 1, 1, 1}, 2},
    /* of 4 heads 3, 2, then 2 of 4 stay; of 16 cells in the end 6: a head and two bins */
    {"--head-only --steps 2,3 --anneal 0.8,1.5 --ramp 4", 1, 1, {0.8, 0.8, 0.8, 0.503968419957949, 0.4, 0.4, 0.4},
     {0.25, 0.5, 0.75, 1, 1, 1, 1}, 2},
    /* of 8 query heads 3; of 32 bits in the end 11: two heads and three bins */
    {"--head-only --recipe reference --steps 3,4", 0, 1, {0.35, 0.35, 0.35, 0.35, 0.35, 0.35, 0.35},
     {0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5}, 3},
};

static const manner *manner_of(const course *how) { return &manners[how->ours]; }

typedef struct {
    lm_model *m;
    lm_tokenizer *t;
    lm_chat chat;
    lm_needles *needles;
    lm_learner *learner;
} engine;

typedef struct {
    int n; /* gates: [L][H or Hkv][bins] */
    float a[L * H * D];
    double x[L * H * D], m[L * H * D], v[L * H * D];
    unsigned char M[L * H * D], open[L * Hkv * D];
    double loss, expected;
} learning;

/* ---- the model, the data ------------------------------------------------- */

static void tool(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void tool(const char *format, ...) {
    char command[1024];
    int at = snprintf(command, sizeof command, "%s ", getenv("DKV") ? getenv("DKV") : "build/dkv");
    va_list args;
    va_start(args, format);
    vsnprintf(command + at, sizeof command - (size_t)at, format, args);
    va_end(args);
    if (system(command)) fail_msg("%s", command);
}

static void open_engine(engine *e) {
    char err[256];
    lm_needle_options o = {.T_c = T_c, .W = W, .S = S, .R = R, .per_context = NEEDLES, .seed = 3};
    if (lm_open(&e->m, path, LM_CPU, 1, err, sizeof err)) fail_msg("%s", err);
    if (lm_tokenizer_open(&e->t, lm_get_gguf(e->m), err, sizeof err)) fail_msg("%s", err);
    if (lm_chat_open(&e->chat, lm_get_gguf(e->m), e->t, NULL, NULL, err, sizeof err)) fail_msg("%s", err);
    if (lm_needles_open(&e->needles, e->t, &e->chat, &o, err, sizeof err)) fail_msg("%s", err);
    if (lm_learner_open(&e->learner, e->m)) fail_msg("%s", lm_error(e->m));
}

static void close_engine(engine *e) {
    lm_learner_close(e->learner);
    lm_needles_close(e->needles);
    lm_chat_close(&e->chat);
    lm_tokenizer_close(e->t);
    lm_close(e->m);
}

static lm_cache *prefill(engine *e, const int32_t *ids) {
    dkv_plan plan = plan_of_mask(NULL, L, Hkv, T_c);
    lm_cache *cache;
    CHECK_OK(lm_cache_create(&cache, e->m, &plan, DKV_F16, 0, NULL));
    if (lm_prefill(e->m, &cache, 1, ids, T_c, NULL)) fail_msg("%s", lm_error(e->m));
    return cache;
}

/* Context c of a round under the gates: adds to da and to the loss. */
static void learn_context(engine *e, learning *x, const course *how, int t, int c, const int *count, float *da) {
    static int32_t ids[T_c];
    lm_haystack h;
    char err[256];
    const manner *m = manner_of(how);
    if (lm_needles_context(e->needles, &h, ids, c / 2 % 2, c / 4, t / m->parts % ROUNDS, c % 2, err, sizeof err))
        fail_msg("%s", err);
    lm_question q[NEEDLES];
    for (int i = 0; i < NEEDLES; i++) {
        lm_ids suffix = {0};
        CHECK(!lm_needles_query(e->needles, &h, i, &suffix, &q[i].first));
        q[i].tokens = suffix.v, q[i].n = suffix.n;
        q[i].weight = m->parts / (double)(D * count[h.needle[i].bin]);
    }
    lm_exam exam = {prefill(e, ids), q, NEEDLES, (uint32_t)c};
    lm_gating g = {{L, H, Hkv, how->bins, m->tied}, D / how->bins * W, S, R, x->a, t < how->relaxed ? NULL : x->open, 3,
                   (uint32_t)t};
    double loss;
    if (lm_learn(e->learner, &exam, 1, &g, da, &loss, NULL)) fail_msg("%s", lm_error(e->m));
    x->loss += loss;
    lm_cache_destroy(exam.context);
    for (int i = 0; i < NEEDLES; i++) free((void *)(uintptr_t)q[i].tokens);
}

/* How often a round asks about each bin. */
static void count_bins(engine *e, int round, int *count) {
    static int32_t ids[T_c];
    char err[256];
    lm_haystack h;
    for (int b = 0; b < D; b++) count[b] = 0;
    for (int c = 0; c < CONTEXTS; c++) {
        CHECK(!lm_needles_context(e->needles, &h, ids, c / 4, c / 2 % 2, round, c % 2, err, sizeof err));
        for (int i = 0; i < NEEDLES; i++) count[h.needle[i].bin]++;
    }
}

/* ---- the method ---------------------------------------------------------- */

static const double BETA = 2. / 3;

static double p_of(double a) { return 1 / (1 + exp(-(a + BETA * log(1.1 / 0.1)))); }

/* Score of query head f's gate of bin b, or of all bins. */
static double score_of(const float *score, const course *how, int f, int b) {
    double sum = 0;
    for (int k = 0; k < D; k++) sum += (double)score[f * D + k] / D;
    return how->bins == 1 ? sum : (double)score[f * D + b];
}

static void init(learning *x, const float *score, const course *how) {
    const int tied = manner_of(how)->tied, bins = how->bins;
    double s[L * H * D], mean = 0;
    x->n = (tied ? L * Hkv : L * H) * bins;
    for (int i = 0; i < x->n; i++) {
        const int f = i / bins, b = i % bins;
        s[i] = tied ? fmax(score_of(score, how, 2 * f, b), score_of(score, how, 2 * f + 1, b))
                    : score_of(score, how, f, b);
        mean += s[i] / x->n;
    }
    for (int i = 0; i < x->n; i++) {
        double p = fmin(0.999, fmax(0.001, 1 / (1 + exp(-(log(7. / 3) + 6 * (s[i] - mean))))));
        x->x[i] = log(p / (1 - p)) - BETA * log(11);
    }
}

/* The k largest gates, in order. */
static void pick(const learning *x, const course *how, long k, int *gate) {
    unsigned char in[L * H * D] = {0};
    for (; k > 0; k--) {
        int best = -1;
        for (int i = 0; i < x->n; i++) {
            const int by_p = manner_of(how)->by_p;
            float key = by_p ? dkv_gate_p(x->a[i]) : x->a[i];
            if (!in[i] && (best < 0 || key > (by_p ? dkv_gate_p(x->a[best]) : x->a[best]))) best = i;
        }
        if (best >= 0) in[best] = 1, *gate++ = best;
    }
}

static void choose(learning *x, const course *how, double rho) {
    int gate[L * H * D];
    const long k = lrint(rho * x->n);
    pick(x, how, k, gate);
    memset(x->open, 0, sizeof x->open);
    for (long i = 0; i < k; i++) {
        const int f = gate[i] / how->bins;
        x->open[(manner_of(how)->tied ? f : f / 2) * how->bins + gate[i] % how->bins] = 1;
    }
}

/* The budget counts bins, all of a gate together; the last gate's are the nearest. */
static void finish(learning *x, const course *how, double rho) {
    const int each = D / how->bins;
    int gate[L * H * D];
    long left = lrint(rho * x->n * each);
    pick(x, how, x->n, gate);
    memset(x->M, 0, sizeof x->M);
    for (int i = 0; left > 0; i++)
        for (int b = 0; b < each && left > 0; b++, left--) {
            const int cell = gate[i] * each + b;
            const int tied = manner_of(how)->tied;
            unsigned char *to = x->M + (tied ? cell / D * 2 * D + cell % D : cell);
            to[0] = 1;
            if (tied) to[D] = 1;
        }
}

static void step(engine *e, learning *x, const course *how, int t) {
    const manner *m = manner_of(how);
    const int per = CONTEXTS / m->parts;
    float da[L * H * D] = {0};
    double d[L * H * D], norm = 0;
    int count[D];
    for (int i = 0; i < x->n; i++) x->a[i] = (float)x->x[i];
    choose(x, how, how->rho[t]);
    count_bins(e, t / m->parts % ROUNDS, count);
    x->loss = x->expected = 0;
    for (int c = 0; c < per; c++) learn_context(e, x, how, t, t % m->parts * per + c, count, da);
    for (int i = 0; i < x->n; i++) x->expected += p_of((double)x->a[i]) / x->n;
    const double slope = how->ours ? pow(x->expected / how->rho[t], 8) / how->rho[t] : 1;
    for (int i = 0; i < x->n; i++) {
        const double p = p_of((double)x->a[i]);
        d[i] = ((double)da[i] + how->lambda[t] * slope / x->n * p * (1 - p)) / m->parts;
        norm += d[i] * d[i];
    }
    for (int i = 0; i < x->n; i++) {
        d[i] *= fmin(1, 1 / (sqrt(norm) + 1e-6));
        x->m[i] = 0.9 * x->m[i] + 0.1 * d[i];
        x->v[i] = 0.999 * x->v[i] + 0.001 * d[i] * d[i];
        x->x[i] -= m->rate * (x->m[i] / (1 - pow(0.9, t + 1))) / (sqrt(x->v[i] / (1 - pow(0.999, t + 1))) + 1e-8);
    }
}

/* ---- the comparison ------------------------------------------------------ */

/* The log's lines: losses and shares step by step. */
static void check_log(FILE *log, const learning *x, int t) {
    char line[512];
    double loss, expected;
    do CHECK(fgets(line, sizeof line, log)); while (line[0] != '{');
    CHECK(sscanf(line, "{\"step\":%*d,\"stage\":%*d,\"rho\":%*f,\"loss\":%lf,\"expected\":%lf", &loss, &expected) == 2);
    CHECK(fabs(loss - x->loss) < 1e-6 * x->loss); /* f32 sums in another order */
    CHECK(fabs(expected - x->expected) < 1e-6);
    if (getenv("VERBOSE")) printf("step %d: loss %.9f, %.9f; expected %.9f, %.9f\n", t, loss, x->loss, expected,
                                  x->expected);
}

static void replay(void) {
    char file[128];
    score_table s;
    snprintf(file, sizeof file, "%s/s.dks", dir);
    tool("probe -m %s --ctx %d --bin-width %d --sink %d --recent %d --needles 2 --rounds 1 -o %s >/dev/null", path, T_c,
         W, S, R, file);
    load_scores(&s, file);
    engine e;
    open_engine(&e);
    for (int k = 0; k < COUNT(courses); k++) {
        const course *how = &courses[k];
        tool("train -m %s -s %s --needles %d --rounds %d --seed 3 --rho %g %s --json -o %s/p.dkv >%s/log", path, file,
             NEEDLES, ROUNDS, how->rho[STEPS - 1], how->options, dir, dir);
        char name[128];
        snprintf(name, sizeof name, "%s/log", dir);
        FILE *log = fopen(name, "r");
        CHECK(log);
        static learning x;
        memset(&x, 0, sizeof x);
        init(&x, s.score, how);
        for (int t = 0; t < STEPS; t++) {
            AT("%s, step %d", how->options, t);
            step(&e, &x, how, t);
            check_log(log, &x, t);
        }
        fclose(log);
        for (int i = 0; i < x.n; i++) x.a[i] = (float)x.x[i];
        finish(&x, how, how->rho[STEPS - 1]);
        dkv_pattern p;
        snprintf(name, sizeof name, "%s/p.dkv", dir);
        load_pattern(&p, name);
        for (int i = 0; i < L * H * D; i++) CHECK_INT(dkv_pattern_get(&p, i / D / H, i / D % H, i % D), x.M[i]);
        dkv_pattern_free(&p, NULL);
    }
    close_engine(&e);
    free_scores(&s);
    CHECK(test_release());
}

int main(void) {
    static const test_case cases[] = {{"dkv train, replayed", replay, 0}};
    char command[256];
    if (!mkdtemp(dir)) return 1;
    snprintf(path, sizeof path, "%s/f32.gguf", dir);
    snprintf(command, sizeof command, "python3 tests/make_random_gguf.py %s f32", dir);
    int failed = system(command) ? 1 : run_cases("steps", cases, COUNT(cases));
    snprintf(command, sizeof command, "rm -r %s", dir);
    return system(command) || failed;
}
