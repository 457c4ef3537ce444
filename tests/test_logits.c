/* The engine's logits against llama.cpp's on the same weights in f32 (tests/logits_oracle.py): random models for every
   graph, rope variant and tensor type, made anew by tests/make_random_gguf.py, and SmolLM2 when it is there.
   VERBOSE=1 prints what was measured; DUMP=DIR writes every logit of the "chunks" path to DIR/NAME.f32, for
   logits_oracle.py --ours. */
#define _GNU_SOURCE
#include "test.h"
#include "../examples/llama/model.h"
#include "../examples/llama/quant.h"

#include <stdlib.h>
#include <string.h>

enum { TOP = 5, FIXED = 16 };

typedef struct {
    long long n, first, V;     /* tokens, first position that is checked, vocabulary */
    int32_t *ids;              /* [n] */
    int fixed[FIXED];
    struct {
        int id[TOP];           /* best first */
        float top[TOP], fixed[FIXED];
    } *at;                     /* [n - first] */
} golden;

static void skip_comments(FILE *f)
{
    int c;
    while ((c = getc(f)) == '#')
        while ((c = getc(f)) != '\n' && c != EOF) {}
    ungetc(c, f);
}

static golden golden_read(const char *name)
{
    char path[256];
    golden g;
    snprintf(path, sizeof path, "tests/data/logits_%s.txt", name);
    FILE *f = fopen(path, "r");
    if (!f) fail_msg("%s is missing: run this from the top folder", path);
    skip_comments(f);
    CHECK_INT(fscanf(f, "tokens %lld first %lld vocab %lld top 5 fixed 16", &g.n, &g.first, &g.V), 3);
    g.ids = guarded((size_t)g.n * sizeof *g.ids, sizeof *g.ids);
    g.at = guarded((size_t)(g.n - g.first) * sizeof *g.at, sizeof(int));
    for (int i = 0; i < g.n; i++) CHECK_INT(fscanf(f, "%d", &g.ids[i]), 1);
    for (int i = 0; i < FIXED; i++) CHECK_INT(fscanf(f, "%d", &g.fixed[i]), 1);
    for (int r = 0; r < g.n - g.first; r++) {
        for (int i = 0; i < TOP; i++) CHECK_INT(fscanf(f, "%d %f", &g.at[r].id[i], &g.at[r].top[i]), 2);
        for (int i = 0; i < FIXED; i++) CHECK_INT(fscanf(f, "%f", &g.at[r].fixed[i]), 1);
    }
    fclose(f);
    return g;
}

/* Standard deviation of the fixed ids' logits over all positions. */
static double golden_deviation(const golden *g)
{
    double sum = 0, squares = 0, n = (double)((g->n - g->first) * FIXED);
    for (int64_t r = 0; r < g->n - g->first; r++)
        for (int i = 0; i < FIXED; i++) {
            sum += g->at[r].fixed[i];
            squares += (double)g->at[r].fixed[i] * g->at[r].fixed[i];
        }
    return sqrt(squares / n - sum / n * (sum / n));
}

/* ---- deviation ------------------------------------------------------------ */

typedef struct {
    double max, square_sum;
    double wrong_gap; /* largest gap between the golden best two where our best is another */
    int64_t n, wrong;
} deviation;

static void deviation_add(deviation *dev, double d)
{
    dev->max = !(fabs(d) <= dev->max) ? fabs(d) : dev->max; /* a NaN stays */
    dev->square_sum += d * d;
    dev->n++;
}

static void deviation_add_row(deviation *dev, const golden *g, int64_t pos, const float *logits)
{
    int best = 0;
    for (int i = 1; i < g->V; i++)
        if (logits[i] > logits[best]) best = i;
    const int64_t r = pos - g->first;
    for (int i = 0; i < TOP; i++) deviation_add(dev, logits[g->at[r].id[i]] - g->at[r].top[i]);
    for (int i = 0; i < FIXED; i++) deviation_add(dev, logits[g->fixed[i]] - g->at[r].fixed[i]);
    if (best == g->at[r].id[0]) return;
    dev->wrong++;
    dev->wrong_gap = fmax(dev->wrong_gap, g->at[r].top[0] - g->at[r].top[1]);
}

/* ---- paths ---------------------------------------------------------------- */

/* A way through the engine: a prefill of T_c tokens, packed as type, then the others in chunks of step. */
typedef struct {
    const char *name;
    dkv_type type;
    bool prefills;        /* T_c is first, or half the tokens; else 0: all tokens lie in the tail */
    int64_t step;
    lm_logits which;      /* LM_LAST: only the last token of a chunk is checked */
    int error;            /* row of errors */
    bool smollm2, long_text;
} test_path;

/* How far logits may be from the golden ones; the last relative to their standard deviation.
   f32: sums of a different order. Measured 1e-4, and 5e-4 at 2,300 tokens, of which most is llama.cpp's: it takes rope
     angles in f32, and the float64 graph is 8e-4 away from it there.
   f16, bf16: K and V are rounded to 11 and 8 bits, so the second is 8 times the first. Measured 0.018 and 0.16.
   int8: a product rounds its input with one scale per 32 columns: an error of max|x| / 127 / sqrt(12), 0.5 % of a
     normal input's deviation, in each of the layer's seven products, carried on by the residual stream. Measured
     rms 3.1 % of the deviation after 2 layers of random weights, 3.8 % after SmolLM2's 30, and at most 33 %;
     llama.cpp, which rounds alike, has rms 4.3 %, 3.7 % and at most 39 % over the whole vocabulary. */
enum { ERROR_F32, ERROR_F16, ERROR_BF16, ERROR_INT8 };
static const struct { double max, rms; } errors[] = {{2e-3, 2e-3}, {0.04, 0.04}, {0.32, 0.32}, {0.5, 0.05}};

static const test_path paths[] = {
    {"chunks",               DKV_F32,  false, 700, LM_ALL,  ERROR_F32,  true,  true},
    {"small chunks",         DKV_F32,  false, 6,   LM_ALL,  ERROR_F32,  false, false},
    {"prefill",              DKV_F32,  true,  700, LM_ALL,  ERROR_F32,  true,  true},
    {"prefill, f16 cache",   DKV_F16,  true,  700, LM_ALL,  ERROR_F16,  true,  false},
    {"prefill, bf16 cache",  DKV_BF16, true,  700, LM_ALL,  ERROR_BF16, true,  false},
    {"last of small chunks", DKV_F32,  true,  6,   LM_LAST, ERROR_INT8, false, false},
    {"decode",               DKV_F32,  false, 1,   LM_LAST, ERROR_INT8, true,  false},
    {"prefill and decode",   DKV_F32,  true,  1,   LM_LAST, ERROR_INT8, false, true},
};

static deviation run_path(lm_model *m, const golden *g, const test_path *path, FILE *dump)
{
    const lm_params *p = lm_get_params(m);
    deviation dev = {0};
    dkv_plan plan;
    size_t bytes;
    lm_cache *cache;
    const int64_t T_c = !path->prefills ? 0 : g->first ? g->first : g->n / 2 + 1; /* odd: the last block is not full */
    CHECK_OK(dkv_plan_from_positions(&plan, NULL, &bytes, p->shape.L, p->shape.Hkv, T_c, NULL, NULL));
    CHECK_OK(dkv_plan_from_positions(&plan, guarded(bytes, 8), &bytes, p->shape.L, p->shape.Hkv, T_c, NULL, NULL));
    CHECK_OK(lm_cache_create(&cache, m, &plan, path->type, g->n - T_c, NULL));
    if (T_c && lm_prefill(m, &cache, 1, g->ids, T_c, NULL)) fail_msg("at %s: %s", test_at, lm_error(m));

    float *logits = malloc((size_t)(path->step * p->V) * sizeof *logits);
    for (int64_t pos = T_c, n; pos < g->n; pos += n) {
        n = g->n - pos < path->step ? g->n - pos : path->step;
        lm_logits which = pos + n <= g->first ? LM_NONE : path->which;
        if (lm_eval(m, cache, g->ids + pos, n, pos, logits, which)) fail_msg("at %s: %s", test_at, lm_error(m));
        int64_t rows = which == LM_ALL ? n : 1;
        for (int64_t i = pos + n - rows; i < pos + n; i++) {
            if (i < g->first) continue;
            const float *row = logits + (i - (pos + n - rows)) * p->V;
            deviation_add_row(&dev, g, i, row);
            if (dump) CHECK_INT(fwrite(row, sizeof *row, (size_t)p->V, dump), p->V);
        }
    }
    free(logits);
    lm_cache_destroy(cache);
    return dev;
}

/* weights_round: the model's type is quantised. Otherwise decoding rounds nothing. */
static void expect_path(const golden *g, const test_path *path, bool weights_round, deviation dev)
{
    int error = path->error == ERROR_INT8 && !weights_round ? ERROR_F32 : path->error;
    double unit = error == ERROR_INT8 ? golden_deviation(g) : 1;
    double max = errors[error].max * unit, rms = errors[error].rms * unit, got = sqrt(dev.square_sum / (double)dev.n);
    if (getenv("VERBOSE"))
        print_message("%s, %s: max %.2g, rms %.2g, of %.2g and %.2g; top-1 differs %d times, gap %.2g\n", test_at,
                      path->name, dev.max, got, max, rms, (int)dev.wrong, dev.wrong_gap);
    if (!(dev.max <= max && got <= rms))
        fail_msg("at %s, %s: max %g, not %g; rms %g, not %g", test_at, path->name, dev.max, max, got, rms);
    if (dev.wrong_gap > 4 * rms)
        fail_msg("at %s, %s: top-1 differs at a gap of %g", test_at, path->name, dev.wrong_gap);
}

/* ---- cases ---------------------------------------------------------------- */

/* rounds: the matrices are quantised, so that decoding rounds activations; long_text: several chunks of prefill. */
typedef struct { const char *name; bool rounds, smollm2, long_text; } test_model;

static const test_model models[] = {
    {"qwen2", 0, 0, 0},   {"llama3", 0, 0, 0}, {"linear", 0, 0, 0}, {"mha", 0, 0, 0},  {"nemo", 0, 0, 0},
    {"f32", 0, 0, 0},     {"f16", 0, 0, 0},    {"bf16", 0, 0, 0},   {"q8_0", 1, 0, 0}, {"q4_0", 1, 0, 0},
    {"q4_1", 1, 0, 0},    {"q5_0", 1, 0, 0},   {"q5_1", 1, 0, 0},   {"q4_k", 1, 0, 0}, {"q6_k", 1, 0, 0},
    {"smollm2", 1, 1, 0}, {"smollm2_long", 1, 1, 1},
};

typedef struct { const test_model *model; int level; char name[64]; } logits_job;

static char random_dir[] = "/tmp/test_logits_XXXXXX";

/* The path of the model's file; false when it is SmolLM2's and not there, or MODEL is another. */
static bool find_model(const test_model *t, char *path, size_t size)
{
    static const char file[] = "SmolLM2-135M-Instruct.Q4_1.gguf";
    const char *env = getenv("MODEL"), *name = env ? strrchr(env, '/') : NULL;
    if (t->smollm2) snprintf(path, size, "%s%s", env ? env : "build/model/", env ? "" : file);
    else snprintf(path, size, "%s/%s.gguf", random_dir, t->name);
    return !t->smollm2 || (access(path, R_OK) == 0 && (!env || !strcmp(name ? name + 1 : env, file)));
}

static FILE *open_dump(const char *name)
{
    char path[4096];
    const char *dir = getenv("DUMP");
    if (!dir) return NULL;
    snprintf(path, sizeof path, "%s/%s.f32", dir, name);
    return fopen(path, "wb");
}

static void test_logits(void **state)
{
    const logits_job *job = *state;
    const test_model *t = job->model;
    char path[4096], err[256];
    lm_model *m;
    if (job->level > (int)dkv_simd_supported() || !find_model(t, path, sizeof path)) skip();
    dkv_simd_limit((dkv_simd)job->level);
    quant_simd_limit(job->level);
    AT("%s", job->name);
    golden g = golden_read(t->name);
    int threads = job->level == (int)dkv_simd_supported() ? 2 : 1;
    if (lm_open(&m, path, LM_CPU, threads, err, sizeof err)) fail_msg("at %s: %s", test_at, err);
    CHECK_INT(lm_get_params(m)->V, g.V);

    for (int i = 0; i < COUNT(paths); i++) {
        if (t->smollm2 && !(t->long_text ? paths[i].long_text : paths[i].smollm2)) continue;
        FILE *dump = i ? NULL : open_dump(t->name);
        expect_path(&g, &paths[i], t->rounds, run_path(m, &g, &paths[i], dump));
        if (dump) fclose(dump);
    }
    lm_close(m);
    CHECK(test_release());
}

static int restore_levels(void **state)
{
    (void)state;
    test_release();
    dkv_simd_limit((dkv_simd)(DKV_SIMD_COUNT - 1));
    quant_simd_limit(DKV_SIMD_COUNT - 1);
    return 0;
}

static int make_models(void **state)
{
    (void)state;
    char command[512];
    if (!mkdtemp(random_dir)) return -1;
    int at = snprintf(command, sizeof command, "python3 tests/make_random_gguf.py %s", random_dir);
    for (int i = 0; i < COUNT(models); i++)
        if (!models[i].smollm2) at += snprintf(command + at, sizeof command - (size_t)at, " %s", models[i].name);
    return system(command);
}

static int remove_models(void **state)
{
    (void)state;
    char path[4096];
    for (int i = 0; i < COUNT(models); i++)
        if (!models[i].smollm2 && find_model(&models[i], path, sizeof path)) unlink(path);
    return rmdir(random_dir);
}

/* Every level on the random models. SmolLM2 is too large for scalar code beside a better level, its long text for any
   but the best. */
static bool runs_at(const test_model *t, int level)
{
    int best = (int)dkv_simd_supported();
    if (t->long_text) return level == best && level > DKV_SIMD_SCALAR;
    return !t->smollm2 || level == best || (level == DKV_SIMD_AVX2 && level < best);
}

int main(void)
{
    static logits_job jobs[COUNT(models) * DKV_SIMD_COUNT];
    static struct CMUnitTest tests[COUNT(jobs)];
    int n = 0;
    for (int i = 0; i < COUNT(models); i++)
        for (int level = 0; level < DKV_SIMD_COUNT; level++) {
            if (!runs_at(&models[i], level)) continue;
            logits_job *job = &jobs[n];
            *job = (logits_job){.model = &models[i], .level = level};
            snprintf(job->name, sizeof job->name, "%s [%s]", models[i].name, dkv_simd_name((dkv_simd)level));
            tests[n++] = (struct CMUnitTest){job->name, test_logits, NULL, restore_levels, job};
        }
    return _cmocka_run_group_tests("logits", tests, (size_t)n, make_models, remove_models) != 0;
}
