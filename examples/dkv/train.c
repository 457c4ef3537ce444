/* dkv train: learns a pattern from retrieval scores (paper 3.3).

   scores -> logits a -> stage 1: relaxed gates, loss + penalty of the expected share kept
                      -> stage 2: exact Top-K forward, gradients straight through the relaxed gates
                      -> for each rho, where the budget has fallen so far: some steps more, and the same Top-K, exported

   A step asks about every bin in both kinds: a round of questions or, with a recipe of two parts, its one wording or
   the other. Rounds take turns. Everything follows from the options and the seed, so a run that goes on from its state
   ends in the same bits. */
#define _GNU_SOURCE
#include "exams.h"
#include "recipe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- options ------------------------------------------------------------- */

enum { MAX_RHOS = 32 };

static exam_options o = {.T_c = -1, .W = -1, .S = -1, .R = -1, .split = LM_TRAIN};
static recipe r;
static int recipe_name = OURS;
static double rhos[MAX_RHOS];
static int64_t n_rhos, pause_after;
static const char *scores_path, *output, *resume, *rho_list, *steps, *anneal;
static bool head_only, verbose, json, dry_run;

static const char SYNOPSIS[] = "dkv train -m MODEL.gguf [-s S.dks] --rho RATIO -o P.dkv [options]";

static const char NOTES[] =
    "recipes     ours        one gate per KV head, a budget in cells that falls from 0.6, halving every 32 steps; 8\n"
    "                        steps before, 24 after, each in one wording; lr 0.1, 8 needles in a context, 8 rounds;\n"
    "                        the penalty grows with the ninth power of expected share / budget, lambda 1\n"
    "            reference   the paper's: one gate per query head, a logical budget; 16 + 28 steps, lr 0.01,\n"
    "                        lambda 0.5, 4 needles, 4 rounds\n"
    "Other options change one thing of the recipe. Lengths and bins are those of the scores; without scores all\n"
    "gates start alike, and --ctx, --bin-width, --sink and --recent are as in dkv probe. Several --rho share the fall\n"
    "of the budget, the largest first; each becomes what it would alone, and P.dkv becomes P-RHO.dkv.\n"
    "--resume FILE writes the state there after every step and goes on from it: the same pattern, bit for bit.\n"
    "--json prints a line per step: step, stage, rho, loss, expected (share kept, of relaxed gates), logical and\n"
    "physical (of the mask), churn (share of its bits that were not in the last one), exact (share of questions\n"
    "answered exactly), norm (of the gradient, before clipping).\n";

/* P.dkv, or of several rhos P-RHO.dkv, free it. */
static char *output_name(double rho) {
    char *name;
    size_t n = strlen(output), stem = n > 4 && !strcmp(output + n - 4, ".dkv") ? n - 4 : n;
    int failed = n_rhos == 1 ? asprintf(&name, "%s", output)
                             : asprintf(&name, "%.*s-%g%s", (int)stem, output, rho, output + stem);
    if (failed < 0) fail("out of memory");
    return name;
}

/* Two ratios whose names in files are the same. */
static bool same_name(double x, double y) {
    char a[32], b[32];
    snprintf(a, sizeof a, "%g", x), snprintf(b, sizeof b, "%g", y);
    return !strcmp(a, b);
}

/* As the fall of the budget comes to them: descending, but 0, which no halving reaches, before it begins. */
static int by_reach(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x > 0 && y > 0 ? (x < y) - (x > y) : (x > 0) - (y > 0);
}

static void read_rhos(void) {
    const char *c = rho_list;
    for (char *end; *c; c = end + (*end == ',')) {
        if (n_rhos == MAX_RHOS) usage("--rho takes at most %d values", MAX_RHOS);
        rhos[n_rhos] = strtod(c, &end);
        if (end == c || (*end && *end != ',') || !(rhos[n_rhos] >= 0 && rhos[n_rhos] <= 1))
            usage("--rho must be numbers in 0..1 between commas, not '%s'", rho_list);
        for (int64_t i = 0; i < n_rhos; i++)
            if (same_name(rhos[i], rhos[n_rhos])) usage("--rho %s has %g twice", rho_list, rhos[i]);
        n_rhos++;
    }
    qsort(rhos, (size_t)n_rhos, sizeof *rhos, by_reach);
}

static void read_pairs(void) {
    char rest;
    long long A, B;
    if (steps && (sscanf(steps, "%lld,%lld%c", &A, &B, &rest) != 2 || A < 0 || B < 0 || A > 1 << 20 || B > 1 << 20))
        usage("--steps must be A,B: steps of stage 1, and at the end of stage 2, not '%s'", steps);
    if (steps) r.A = A, r.B = B;
    if (anneal && (sscanf(anneal, "%lf,%lf%c", &r.from, &r.half, &rest) != 2 || !(r.from >= 0 && r.from <= 1) ||
                   !(r.half >= 0 && r.half <= 1 << 20)))
        usage("--anneal must be FROM,N: a ratio, and in how many steps it halves (0: at once), not '%s'", anneal);
}

/* The recipe, then what other options say of it. */
static void choose_recipe(const recipe *given) {
    r = recipes[recipe_name];
    if (given->gates >= 0) r.gates = given->gates;
    if (r.gates == PER_KV_HEAD && given->budget == DKV_BUDGET_LOGICAL)
        usage("--gates kv counts cells; --budget logical needs --gates query");
    if (r.gates == PER_KV_HEAD) r.budget = DKV_BUDGET_PHYSICAL;
    if (given->budget >= 0) r.budget = given->budget;
    if (given->rate > 0) r.rate = r.rate_end = given->rate;
    if (given->rate_end >= 0) r.rate_end = given->rate_end;
    if (given->lambda >= 0) r.lambda = given->lambda;
    if (given->power >= 0) r.power = given->power;
    if (given->ramp >= 0) r.ramp = given->ramp;
    if (!o.per_context) o.per_context = r.needles;
    if (!o.rounds) o.rounds = r.rounds;
    read_pairs();
}

/* Before any work. */
static void check_outputs(void) {
    for (int64_t i = 0; i < n_rhos && !dry_run; i++) {
        char *name = output_name(rhos[i]);
        check_writable(name);
        check_apart(name, "--resume", resume);
        check_apart(name, "-s", scores_path);
        free(name);
    }
    if (resume) check_writable(resume);
}

static void check_arguments(const recipe *given) {
    if (!o.model_path) usage("which model? give -m MODEL.gguf");
    if (scores_path && (o.T_c >= 0 || o.W >= 0 || o.S >= 0 || o.R >= 0))
        usage("the scores say what lengths are; leave --ctx, --bin-width, --sink and --recent out");
    if (!rho_list || !*rho_list) usage("how much may stay? give --rho RATIO");
    if (!output && !dry_run) usage("where to? give -o P.dkv");
    if (pause_after && !resume) usage("--pause-after needs --resume FILE to go on from");
    read_rhos();
    choose_recipe(given);
    check_outputs();
}

/* ---- training ------------------------------------------------------------ */

/* What a run goes on from: one block. Parameters, AdamW's two moments; the same where the fall of the budget had come
   to this rho, and the next one goes on. */
typedef struct {
    int64_t rho, step;  /* which of the rhos; steps taken */
    float x[];          /* [2][3][n], then the last mask, [L][H][g.D] bytes */
} train_state;

typedef struct {
    exams *x;
    dkv_gates g;                 /* with --head-only of one bin, all between sink and recent */
    int64_t W, n, bits;          /* tokens of its bins; gates; bits of a mask, L * H * g.D */
    train_state *state;
    size_t state_bytes;
    uint64_t config;
    float *da;                   /* [n] */
    unsigned char *M, *open;     /* [L][H][g.D], [L][Hkv][g.D] */
    double seconds;              /* of this process's steps, prefills not counted */
    int64_t steps, prefills;     /* of this process; of the whole run, as far as it is ahead */
} trainer;

typedef struct {
    double loss, expected, logical, physical, churn, exact, norm;
    int64_t questions;
} report;

static float *now(const trainer *t) { return t->state->x; }
static float *fallen(trainer *t) { return t->state->x + 3 * t->n; }
static unsigned char *last_mask(trainer *t) { return (void *)(t->state->x + 6 * t->n); }

/* A batch of a step. */
typedef struct {
    trainer *t;
    const lm_gating *g;
    report *out;
} step_part;

static void learn_batch(void *user, const lm_exam *e, int64_t n, int64_t first) {
    (void)first;
    step_part *s = user;
    const exams *x = s->t->x;
    const int64_t questions = n * x->per_context;
    lm_grade_result *grade = allocate((size_t)questions, sizeof *grade);
    double loss;
    if (lm_learn(x->learner, e, n, s->g, s->t->da, &loss, grade)) fail_model(x);
    s->out->loss += loss;
    s->out->questions += questions;
    for (int64_t i = 0; i < questions; i++) s->out->exact += grade[i].right == grade[i].n_value;
    free(grade);
}

/* Fills M and open with the Top-K mask at rho. */
static void choose_mask(trainer *t, double rho, report *out) {
    const int64_t cells = (int64_t)t->g.L * t->g.Hkv * t->g.D;
    int64_t K, fresh = 0, kept = 0;
    dkv_gates_top(t->M, &K, &t->g, now(t), (dkv_budget)r.budget, rho, r.by_p);
    dkv_gates_or(t->open, &t->g, t->M);
    for (int64_t i = 0; i < t->bits; i++) fresh += t->M[i] && !last_mask(t)[i];
    for (int64_t i = 0; i < cells; i++) kept += t->open[i];
    memcpy(last_mask(t), t->M, (size_t)t->bits);
    out->churn = K ? (double)fresh / (double)K : 0;
    out->logical = (double)K / (double)t->bits;
    out->physical = (double)kept / (double)cells;
}

static lm_gating gating(const trainer *t, bool through) {
    return (lm_gating){t->g, t->W, t->x->o.S, t->x->o.R, now(t), through ? t->open : NULL, (uint64_t)t->x->o.seed,
                       (uint32_t)t->state->step};
}

static report take_step(trainer *t) {
    const int64_t step = t->state->step, turn = step % (t->x->o.rounds * r.parts), part = t->x->per_round / r.parts;
    const dkv_budget budget = (dkv_budget)r.budget;
    const step_plan p = schedule(&r, step, rhos[t->state->rho]);
    report out = {.expected = dkv_gates_penalty(NULL, &t->g, now(t), budget, 0)};
    choose_mask(t, p.rho, &out);
    const lm_gating g = gating(t, p.through);
    memset(t->da, 0, (size_t)t->n * sizeof *t->da);
    each_batch(t->x, turn * part, part, learn_batch, &(step_part){t, &g, &out});
    const double slope = penalty_slope(&r, &p, out.expected, t->n); /* a part's questions weigh 1 / parts together */
    if (!isfinite((float)slope))
        fail("step %lld: the penalty's slope is %g; lower --power or --lambda", (long long)step + 1, slope);
    dkv_gates_penalty(t->da, &t->g, now(t), budget, (float)(slope / (double)r.parts));
    out.loss *= (double)r.parts;
    out.exact /= (double)out.questions;
    out.norm = dkv_gates_clip(t->da, t->n);
    if (!isfinite(out.loss) || !isfinite(out.norm))
        fail("step %lld: the loss is %g, its gradient's norm %g; lower --lr", (long long)step + 1, out.loss, out.norm);
    dkv_gates_adamw(now(t), now(t) + t->n, now(t) + 2 * t->n, t->da, t->n, step + 1, p.rate);
    t->state->step++;
    return out;
}

/* ---- beginning ----------------------------------------------------------- */

/* A gate of several bins has their mean score. */
static void init_gates(trainer *t, const score_table *s) {
    const int64_t each = s->D / t->g.D;
    float *S = allocate((size_t)t->bits, sizeof *S);
    for (int64_t i = 0; i < t->bits; i++) {
        double sum = 0;
        for (int64_t b = 0; b < each; b++) sum += (double)s->score[i * each + b];
        S[i] = (float)(sum / (double)each);
    }
    dkv_gates_init(now(t), &t->g, S);
    free(S);
}

/* Everything that results depend on. */
static uint64_t hash_config(const trainer *t, const score_table *s) {
    const double all[] = {(double)r.parts, (double)r.A, (double)r.B, (double)r.ramp, r.rate, r.rate_end, r.lambda,
                          r.from, r.half, r.gates, r.budget, (double)r.power, r.by_p, head_only, (double)o.rounds,
                          (double)o.seed, (double)t->x->kept, (double)t->x->group};
    uint64_t hash = hash_bytes(t->x->run_hash, all, sizeof all);
    hash = hash_bytes(hash, rhos, (size_t)n_rhos * sizeof *rhos);
    return hash_bytes(hash, s->score, (size_t)s->L * (size_t)s->H * (size_t)s->D * sizeof *s->score);
}

static trainer open_trainer(exams *x, const score_table *s) {
    trainer t = {.x = x, .g = {s->L, s->H, s->Hkv, head_only ? 1 : s->D, r.gates == PER_KV_HEAD}};
    t.W = x->o.W * (s->D / t.g.D);
    t.n = dkv_gates_count(&t.g);
    t.bits = (int64_t)s->L * s->H * t.g.D;
    t.state_bytes = sizeof *t.state + 6 * (size_t)t.n * sizeof(float) + (size_t)t.bits;
    t.state = allocate(1, t.state_bytes);
    t.da = allocate((size_t)t.n, sizeof *t.da);
    t.M = allocate((size_t)t.bits, 1);
    t.open = allocate((size_t)s->L * (size_t)s->Hkv * (size_t)t.g.D, 1);
    t.config = hash_config(&t, s);
    init_gates(&t, s);
    return t;
}

static void close_trainer(trainer *t) {
    free(t->open);
    free(t->M);
    free(t->da);
    free(t->state);
}

/* Of no scores file: zeros. */
static void check_scores(score_table *s, const exams *x) {
    const dkv_shape *m = &lm_get_params(x->m)->shape;
    if (!scores_path) {
        *s = (score_table){.L = m->L, .H = m->H, .Hkv = m->Hkv, .D = (int32_t)x->D};
        s->score = allocate((size_t)m->L * (size_t)m->H, (size_t)x->D * sizeof *s->score);
    }
    if (s->L != m->L || s->H != m->H || s->Hkv != m->Hkv)
        fail("%s is of a model with %d layers of %d and %d heads; this one has %d of %d and %d", scores_path, s->L,
             s->H, s->Hkv, m->L, m->H, m->Hkv);
    check_scored_model(s, scores_path, x->name);
}

/* Steps of the run of one of the rhos: from where it leaves the one before. */
static int64_t first_step(int64_t i) { return i ? reach(&r, rhos[i - 1]) : 0; }
static int64_t last_step(int64_t i) { return reach(&r, rhos[i]) + r.B; }

/* Goes on from a state, if there is one. */
static void read_progress(trainer *t) {
    train_state *s = t->state;
    if (!resume || !read_state(resume, t->config, s, t->state_bytes)) return;
    if (s->rho < 0 || s->rho >= n_rhos || s->step < first_step(s->rho) || s->step > last_step(s->rho))
        refuse_state(resume);
    for (int64_t i = 0; i < s->rho && !dry_run; i++) {
        char *name = output_name(rhos[i]);
        if (access(name, F_OK))
            fail("%s is missing, and %s is past it; bring it back, or remove the state to start anew", name, resume);
        free(name);
    }
}

static int64_t steps_left(const trainer *t) {
    int64_t left = last_step(t->state->rho) - t->state->step;
    for (int64_t i = t->state->rho + 1; i < n_rhos; i++) left += last_step(i) - first_step(i);
    return left;
}

/* ---- telling ------------------------------------------------------------- */

static double seconds_left(const trainer *t) {
    const exams *x = t->x;
    const double prefill = x->prefilled ? x->prefill_s / (double)x->prefilled : 0;
    return t->seconds / (double)t->steps * (double)steps_left(t) + prefill * (double)(t->prefills - x->prefilled);
}

/* Seconds of a context in either stage. */
typedef struct {
    trainer *t;
    double stage[2];
} stage_times;

static void time_stages(void *user, const lm_exam *e, int64_t n, int64_t first) {
    stage_times *s = user;
    for (int through = 0; through < 2; through++) {
        report none = {0};
        const lm_gating g = gating(s->t, through);
        const double start = seconds();
        learn_batch(&(step_part){s->t, &g, &none}, e, n, first);
        s->stage[through] = (seconds() - start) / (double)n;
    }
}

/* What is left, by the time of a batch. Nothing is learned from it. */
static void say_time(trainer *t) {
    exams *x = t->x;
    stage_times s = {.t = t};
    report none;
    choose_mask(t, rhos[t->state->rho], &none);
    const double prefill = time_batch(x, time_stages, &s).prefill, left = (double)steps_left(t);
    const double relaxed = t->state->step < r.A ? (double)(r.A - t->state->step) : 0;
    const int64_t contexts = x->per_round / r.parts; /* of a step */
    const double learning = (double)contexts * (relaxed * s.stage[0] + (left - relaxed) * s.stage[1]);
    const double all = prefill * (double)t->prefills + learning;
    fprintf(stderr, "train: a context takes %.3g s to prefill, and %.3g or, in stage 2, %.3g s to learn from; a step "
            "of %lld contexts %s, all %s\n", prefill, s.stage[0], s.stage[1], (long long)contexts, hms(all / left),
            hms(all));
}

static void tell_step(const trainer *t, const report *x) {
    const int64_t step = t->state->step;
    const int stage = step <= r.A ? 1 : 2;
    const double rho = rhos[t->state->rho];
    char line[256];
    snprintf(line, sizeof line, "rho %g stage %d step %lld/%lld  loss %.4f  exact %.3f  expected %.3f  logical %.3f  "
             "physical %.3f  churn %.3f  %.2f s", rho, stage, (long long)step, (long long)last_step(t->state->rho),
             x->loss, x->exact, x->expected, x->logical, x->physical, x->churn, t->seconds / (double)t->steps);
    if (json)
        printf("{\"step\":%lld,\"stage\":%d,\"rho\":%.17g,\"loss\":%.17g,\"expected\":%.9g,\"logical\":%.9g,"
               "\"physical\":%.9g,\"churn\":%.9g,\"exact\":%.9g,\"norm\":%.9g}\n", (long long)step, stage, rho, x->loss,
               x->expected, x->logical, x->physical, x->churn, x->exact, x->norm);
    if (json) fflush(stdout);
    if (verbose) show_line("%s", ""), fprintf(stderr, "%s\n", line);
    show_line("%s, %s left", line, hms(seconds_left(t)));
}

/* Fills p's sizes and bits with the Top-K over all D bins. A gate of several bins has the same logit in each, and ties
   go to the nearer bin: whole heads in order, of the last one as many of the nearest bins as the budget has left. */
static void export_mask(trainer *t, dkv_pattern *p, void *bits) {
    dkv_gates g = t->g;
    g.D = (int32_t)t->x->D;
    const int64_t each = g.D / t->g.D, n = t->n * each;
    float *a = allocate((size_t)n, sizeof *a);
    unsigned char *M = allocate((size_t)(t->bits * each), 1);
    int64_t K;
    for (int64_t i = 0; i < n; i++) a[i] = now(t)[i / each];
    dkv_gates_top(M, &K, &g, a, (dkv_budget)r.budget, p->rho, r.by_p);
    dkv_gates_export(p, bits, NULL, &g, M, a);
    free(M);
    free(a);
}

static void export_pattern(trainer *t) {
    const exams *x = t->x;
    const dkv_shape *s = &lm_get_params(x->m)->shape;
    const double rho = rhos[t->state->rho];
    const int64_t cells = s->L * s->Hkv * x->D, all = s->L * s->H * x->D;
    dkv_pattern p = {.d = s->d_k, .W = x->o.W, .S = x->o.S, .R = x->o.R, .rho = rho, .budget = (dkv_budget)r.budget,
                     .data_hash = x->data_hash, .seed = (uint64_t)x->o.seed};
    void *bits = allocate((size_t)s->L * (size_t)s->H, (size_t)dkv_pattern_words(x->D) * 8);
    export_mask(t, &p, bits);
    memcpy(p.model, x->name, sizeof p.model);
    snprintf(p.tool, sizeof p.tool, "dkv %s train --recipe %s%s", dkv_version(),
             recipe_name == OURS ? "ours" : "reference", head_only ? " --head-only" : "");
    char *name = output_name(rho);
    save_pattern(&p, name);
    show_line("%s", "");
    if (!json)
        printf("%s: %lld of %lld bits, logical %.4f, physical %.4f\n", base_name(name), (long long)p.K,
               (long long)all, (double)p.K / (double)all, (double)count_cells(&p) / (double)cells);
    free(name);
    free(bits);
}

/* ---- the command --------------------------------------------------------- */

/* False: paused. */
static bool train(trainer *t) {
    train_state *s = t->state;
    const size_t bytes = 3 * (size_t)t->n * sizeof *s->x;
    for (; s->rho < n_rhos; s->rho++) {
        const int64_t branch = reach(&r, rhos[s->rho]);
        for (;;) {
            if (s->step == branch) memcpy(fallen(t), now(t), bytes);
            if (s->step == last_step(s->rho)) break;
            const double start = seconds() - t->x->prefill_s;
            report done = take_step(t);
            t->seconds += seconds() - t->x->prefill_s - start;
            t->steps++;
            tell_step(t, &done);
            if (resume) write_state(resume, t->config, s, t->state_bytes);
            if (t->steps == pause_after) return false;
        }
        export_pattern(t);
        s->step = branch;
        memcpy(now(t), fallen(t), bytes);
    }
    return true;
}

int command_train(int argc, char **argv) {
    recipe given = {.ramp = -1, .rate_end = -1, .lambda = -1, .power = -1, .gates = -1, .budget = -1};
    const tool_option options[] = {
        EXAM_OPTIONS(o, "the recipe's"),
        FREE_LENGTHS(o),
        {'s', "scores", "S.dks", OPT_TEXT, &scores_path, 0, 0, "retrieval scores of dkv probe"},
        {'o', "output", "P.dkv", OPT_TEXT, &output, 0, 0, "the pattern file to write"},
        {0, "rho", "RATIO,...", OPT_TEXT, &rho_list, 0, 0, "what may stay; of several, a pattern each"},
        {0, "recipe", "ours|reference", OPT_CHOICE, &recipe_name, 0, 0, "see below (default: ours)"},
        {0, "gates", "kv|query", OPT_CHOICE, &given.gates, 0, 0, "one gate per KV head or per query head"},
        {0, "budget", "logical|physical", OPT_CHOICE, &given.budget, 0, 0, "what rho and the penalty count"},
        {0, "steps", "A,B", OPT_TEXT, &steps, 0, 0, "of stage 1, and of stage 2 at rho itself"},
        {0, "lr", "X", OPT_REAL, &given.rate, 1e-9, 100, "learning rate"},
        {0, "lr-end", "X", OPT_REAL, &given.rate_end, 0, 100, "and at the last of B, linearly (default: the same)"},
        {0, "lambda", "X", OPT_REAL, &given.lambda, 0, 1e6, "weight of the penalty"},
        {0, "power", "N", OPT_INT, &given.power, 0, 64, "of share / budget that it grows with; 0: as the share"},
        {0, "ramp", "N", OPT_INT, &given.ramp, 0, 1e6, "steps until lambda is reached (default: the recipe's)"},
        {0, "anneal", "FROM,N", OPT_TEXT, &anneal, 0, 0, "the budget falls to rho, halving every N steps"},
        {0, "head-only", NULL, OPT_FLAG, &head_only, 0, 0, "one gate for all bins of a head: a control"},
        {0, "rounds", "N", OPT_INT, &o.rounds, 1, 1000, "of questions that take turns (default: the recipe's)"},
        {0, "resume", "FILE", OPT_TEXT, &resume, 0, 0, "keep the state there, and go on from it"},
        {0, "pause-after", "N", OPT_INT, &pause_after, 1, 1e9, "stop after N steps; --resume goes on"},
        {0, "verbose", NULL, OPT_FLAG, &verbose, 0, 0, "a line per step on standard error"},
        {0, "json", NULL, OPT_FLAG, &json, 0, 0, "a line of JSON per step"},
        {0, "dry-run", NULL, OPT_FLAG, &dry_run, 0, 0, "say what it would cost"},
        {0, NULL, NULL, OPT_END, NULL, 0, 0, NULL},
    };
    argv = parse_options(&argc, argv, options, SYNOPSIS, NOTES);
    if (argc) usage("what is '%s'? see dkv train --help", argv[0]);
    check_arguments(&given);
    score_table s = {0};
    if (scores_path) {
        load_scores(&s, scores_path);
        o.T_c = s.T_c, o.W = s.W, o.S = s.S, o.R = s.R;
    }
    exams x;
    open_exams(&x, &o);
    check_scores(&s, &x);
    trainer t = open_trainer(&x, &s);
    read_progress(&t);
    const int64_t left = steps_left(&t), turns = o.rounds * r.parts; /* after those, contexts come again */
    t.prefills = (x.kept * (left < turns ? left : turns) + (x.contexts - x.kept) * left) / turns;
    if (dry_run || verbose || isatty(STDERR_FILENO))
        say_cost(&x, "train", t.prefills, left * x.per_round / r.parts * x.per_context, true);
    if (dry_run && left) say_time(&t);
    bool finished = dry_run || train(&t);
    show_line("%s", "");
    if (!finished)
        fprintf(stderr, "paused after %lld steps; the same command goes on from %s\n", (long long)t.steps, resume);
    close_trainer(&t);
    close_exams(&x);
    free_scores(&s);
    return 0;
}
