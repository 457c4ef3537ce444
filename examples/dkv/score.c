/* dkv score: the same held-out questions, answered from the dense cache, through patterns, and through their controls.

   A context is prefilled once and graded under every method while its cache is there. Differences to dense are paired,
   question by question, and their intervals resample whole contexts: questions about one context are not independent.
   Perplexity: tokens of a text that follow T_c others, in windows that share no predicted token. */
#define _GNU_SOURCE
#include "exams.h"
#include "stats.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DENSE, MAX_METHODS = 256, MAX_WINDOWS = 16, WINDOW = 512 };

/* One way to attend: a pattern's cells, or everything. */
typedef struct {
    char name[160];
    unsigned char *cells;     /* [L][Hkv][D], NULL: dense */
    lm_gating gating;
    int64_t n_cells;          /* kept */
    double logical, physical, total; /* at T_c; total: with sink and recent */
    lm_grade_result *grade;   /* [questions] */
    double text_loss[MAX_WINDOWS], text_kl;
} method;

static exam_options o = {.T_c = -1, .W = -1, .S = -1, .R = -1, .per_context = 4, .queries = 500, .once = true};
static const char *patterns, *scores_path, *text_path;
static int64_t control_seed = 1;
static int split;
static bool with_controls, json;

static method methods[MAX_METHODS];
static int n_methods = 1;
static int64_t windows, window;

static const char NOTES[] =
    "physical    kept share of KV rows between sink and recent; total: with both, what memory follows\n"
    "exact       all value tokens of a question are the likeliest ones: greedy decoding would give the value\n"
    "loss        mean cross-entropy of the value's tokens, by question\n"
    "to dense    the paired difference of losses, with a 95 % interval: 10,000 resamples of whole contexts\n"
    "KL          mean divergence of the value tokens' distributions from the dense ones\n"
    "perplexity  with --text: of up to 16 windows of up to 512 tokens, each behind T tokens of the same text\n"
    "Sink, recent and bins of the questions are those of the first pattern, and so is their T unless --ctx is given.\n"
    "Wordings, keys and filler of the splits are disjoint, from each other and from those of dkv train.\n";

/* ---- methods ------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static method *add_method(const dkv_pattern *p, const char *format, ...) {
    if (n_methods == MAX_METHODS) usage("at most %d methods at a time", MAX_METHODS - 1);
    method *m = &methods[n_methods++];
    va_list args;
    va_start(args, format);
    vsnprintf(m->name, sizeof m->name, format, args);
    va_end(args);
    m->cells = allocate((size_t)p->L * (size_t)p->Hkv, (size_t)p->D);
    m->gating = (lm_gating){.gates = {p->L, p->H, p->Hkv, p->D, 1}, .W = p->W, .S = p->S, .R = p->R, .open = m->cells};
    return m;
}

static void measure_method(method *m, const dkv_pattern *p, int64_t T_c, const char *path) {
    dkv_stats s;
    dkv_result r = dkv_dry_run(&s, p, T_c, DKV_BEYOND_ERROR);
    if (r) fail("%s reaches %lld tokens, not %lld; lower --ctx", path, (long long)dkv_max_context(p), (long long)T_c);
    m->logical = s.logical, m->physical = s.physical, m->total = s.physical_total, m->n_cells = count_cells(p);
}

static void add_control(const dkv_pattern *p, int kind, const score_table *s, const char *path, int64_t T_c) {
    method *m = add_method(p, "%s %s", base_name(path), control_name(kind));
    make_control(m->cells, kind, p, s->score, (uint64_t)control_seed);
    dkv_pattern c = pattern_of_cells(p, m->cells);
    measure_method(m, &c, T_c, path);
    free((void *)(uintptr_t)c.bits);
}

static void add_pattern(const exams *x, const dkv_pattern *p, const char *path) {
    const dkv_shape *s = &lm_get_params(x->m)->shape;
    score_table scores = {0};
    if (dkv_pattern_matches(p, s->L, s->H, s->Hkv, s->d_k))
        fail("%s is for %d layers of %d query and %d KV heads; the model has %d of %d and %d", path, p->L, p->H, p->Hkv,
             s->L, s->H, s->Hkv);
    method *m = add_method(p, "%s", base_name(path));
    pattern_cells(m->cells, p);
    measure_method(m, p, x->o.T_c, path);
    if (!with_controls) return;
    if (scores_path) {
        load_scores(&scores, scores_path);
        check_scores_match(&scores, scores_path, p, path);
    }
    for (int kind = 0; kind < CONTROLS; kind++)
        if (kind != CONTROL_SCORES_ONLY || scores_path) add_control(p, kind, &scores, path, x->o.T_c);
    free_scores(&scores);
}

/* ---- grading ------------------------------------------------------------- */

static void grade_batch(void *user, const lm_exam *e, int64_t n, int64_t first) {
    exams *x = user;
    const int64_t at = first * x->per_context;
    if (lm_grade_reference(x->learner, e, n, methods[DENSE].grade + at)) fail("%s", lm_error(x->m));
    for (method *m = methods + 1; m < methods + n_methods; m++)
        if (lm_grade(x->learner, e, n, &m->gating, m->grade + at)) fail("%s", lm_error(x->m));
    show_line("score: %lld of %lld contexts, %s left", (long long)(first + n), (long long)x->contexts,
              hms((seconds() - x->opened) / (double)(first + n) * (double)(x->contexts - first - n)));
}

/* Window k: T_c tokens from k * window on are the context, the next ones the question. */
static void grade_window(exams *x, const int32_t *tokens, int64_t k) {
    const lm_question q = {.tokens = tokens + k * window + x->o.T_c, .n = window, .first = 1};
    lm_cache *cache = prefill_context(x, tokens + k * window);
    const lm_exam e = {cache, &q, 1, 0};
    lm_grade_result g;
    for (method *m = methods; m < methods + n_methods; m++) {
        if (m == methods ? lm_grade_reference(x->learner, &e, 1, &g) : lm_grade(x->learner, &e, 1, &m->gating, &g))
            fail("%s", lm_error(x->m));
        m->text_loss[k] = g.loss;
        m->text_kl += g.kl;
    }
    lm_cache_destroy(cache);
    show_line("text: %lld of %lld windows", (long long)k + 1, (long long)windows);
}

static void grade_text(exams *x) {
    char *text = read_text(text_path);
    const size_t bytes = strlen(text);
    int32_t *tokens = allocate(bytes + 1, sizeof *tokens);
    const int64_t bos = lm_bos(x->tokenizer) >= 0, room = lm_get_params(x->m)->n_ctx - x->o.T_c;
    if (bos) tokens[0] = lm_bos(x->tokenizer);
    int64_t n = lm_encode(x->tokenizer, text, bytes, false, tokens + bos, (int64_t)bytes) + bos;
    window = room < WINDOW ? room : WINDOW;
    if (n - x->o.T_c < window) window = n - x->o.T_c;
    if (window < 2)
        fail("%s has %lld tokens; --text needs more than %lld", text_path, (long long)n, (long long)x->o.T_c);
    windows = (n - x->o.T_c) / window < MAX_WINDOWS ? (n - x->o.T_c) / window : MAX_WINDOWS;
    for (int64_t k = 0; k < windows; k++) grade_window(x, tokens, k);
    free(tokens);
    free(text);
}

/* ---- report -------------------------------------------------------------- */

/* Of a method's questions of one kind, or of all: LM_KINDS. */
typedef struct {
    int64_t n, exact;
    interval exact_in;
    double loss, difference, kl;
    interval difference_in;
} summary;

static summary sum_up(const exams *x, const method *m, int kind) {
    const int64_t all = x->contexts * x->per_context;
    double *difference = allocate((size_t)all, sizeof *difference);
    summary s = {0};
    for (int64_t i = 0; i < all; i++) {
        const lm_grade_result *g = &m->grade[i];
        if (kind != LM_KINDS && kind_of(x, i / x->per_context) != kind) continue;
        difference[s.n++] = g->loss - methods[DENSE].grade[i].loss;
        s.exact += g->right == g->n_value;
        s.loss += g->loss, s.kl += g->kl;
    }
    s.loss /= (double)s.n, s.kl /= (double)s.n;
    s.exact_in = wilson(s.exact, s.n);
    s.difference = mean_of(difference, s.n);
    s.difference_in = bootstrap(difference, s.n, x->per_context, (uint64_t)x->o.seed);
    free(difference);
    return s;
}

static const char *const KINDS[] = {"num", "word", "all"};
static const int ORDER[] = {LM_KINDS, LM_NUM, LM_WORD};

static double perplexity(const method *m) { return exp(mean_of(m->text_loss, windows)); }

enum { NAME = 34 }; /* columns */

/* Nothing that prints as -0.000. */
static double shown(double x) { return fabs(x) < 0.0005 ? 0 : x; }

static void print_rows(const exams *x, int kind) {
    printf("\n%-*s  physical  total  exact (95 %%)             loss   to dense (95 %%)              KL\n", NAME,
           KINDS[kind]);
    for (const method *m = methods; m < methods + n_methods; m++) {
        const summary s = sum_up(x, m, kind);
        printf("%-*s  %8.3f  %5.3f  %5.3f (%5.3f..%5.3f)  %7.3f", NAME, m->name, m->physical, m->total,
               (double)s.exact / (double)s.n, s.exact_in.low, s.exact_in.high, s.loss);
        if (m > methods)
            printf("  %+7.3f (%+7.3f..%+7.3f)  %6.3f", shown(s.difference), shown(s.difference_in.low),
                   shown(s.difference_in.high), shown(s.kl));
        putchar('\n');
    }
}

static void print_text_rows(void) {
    printf("\n%-*s  physical  total  perplexity      KL   (%lld windows of %lld tokens)\n", NAME, base_name(text_path),
           (long long)windows, (long long)window);
    for (const method *m = methods; m < methods + n_methods; m++)
        printf("%-*s  %8.3f  %5.3f  %10.3f  %6.3f\n", NAME, m->name, m->physical, m->total, perplexity(m),
               shown(m->text_kl / (double)windows));
}

static void print_table(const exams *x) {
    printf("%lld questions about %lld contexts of %lld tokens, split %s, seed %lld, %s: %s\n",
           (long long)(x->contexts * x->per_context), (long long)x->contexts, (long long)x->o.T_c,
           split ? "report" : "choose", (long long)x->o.seed, x->name, lm_where(x->m));
    for (int k = 0; k < 3; k++) print_rows(x, ORDER[k]);
    if (windows) print_text_rows();
}

static cJSON *pair_json(interval i) {
    const double ends[] = {i.low, i.high};
    return cJSON_CreateDoubleArray(ends, 2);
}

static cJSON *summary_json(const summary *s) {
    cJSON *out = cJSON_CreateObject();
    cJSON_AddNumberToObject(out, "questions", (double)s->n);
    cJSON_AddNumberToObject(out, "exact", (double)s->exact);
    cJSON_AddNumberToObject(out, "accuracy", (double)s->exact / (double)s->n);
    cJSON_AddItemToObject(out, "accuracy_95", pair_json(s->exact_in));
    cJSON_AddNumberToObject(out, "loss", s->loss);
    cJSON_AddNumberToObject(out, "loss_to_dense", s->difference);
    cJSON_AddItemToObject(out, "loss_to_dense_95", pair_json(s->difference_in));
    cJSON_AddNumberToObject(out, "kl", s->kl);
    return out;
}

static cJSON *method_json(const exams *x, const method *m) {
    cJSON *out = cJSON_CreateObject();
    cJSON_AddStringToObject(out, "name", m->name);
    if (m->cells) cJSON_AddNumberToObject(out, "cells", (double)m->n_cells);
    cJSON_AddNumberToObject(out, "logical_ratio", m->logical);
    cJSON_AddNumberToObject(out, "physical_ratio", m->physical);
    cJSON_AddNumberToObject(out, "physical_ratio_total", m->total);
    for (int k = 0; k < 3; k++) {
        summary s = sum_up(x, m, ORDER[k]);
        cJSON_AddItemToObject(out, KINDS[ORDER[k]], summary_json(&s));
    }
    if (windows) cJSON_AddNumberToObject(out, "perplexity", perplexity(m));
    if (windows) cJSON_AddNumberToObject(out, "text_kl", m->text_kl / (double)windows);
    return out;
}

static void print_json(const exams *x) {
    cJSON *out = cJSON_CreateObject();
    char hex[20];
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)x->data_hash);
    cJSON_AddStringToObject(out, "model", x->name);
    cJSON_AddStringToObject(out, "split", split ? "report" : "choose");
    cJSON_AddStringToObject(out, "data_hash", hex);
    cJSON_AddNumberToObject(out, "seed", (double)x->o.seed);
    cJSON_AddNumberToObject(out, "context_tokens", (double)x->o.T_c);
    cJSON_AddNumberToObject(out, "contexts", (double)x->contexts);
    cJSON_AddNumberToObject(out, "questions", (double)(x->contexts * x->per_context));
    if (windows) cJSON_AddNumberToObject(out, "text_tokens", (double)(windows * (window - 1)));
    cJSON *list = cJSON_AddArrayToObject(out, "methods");
    for (const method *m = methods; m < methods + n_methods; m++) cJSON_AddItemToArray(list, method_json(x, m));
    print_json_object(out);
}

/* ---- the command --------------------------------------------------------- */

/* Lengths of the first pattern where none are given. */
static void lengths_of(const dkv_pattern *p) {
    if (o.W < 0) o.W = p->W;
    if (o.S < 0) o.S = p->S;
    if (o.R < 0) o.R = p->R;
    if (o.T_c < 0 && o.W == p->W && o.S == p->S && o.R == p->R) o.T_c = dkv_max_context(p);
}

/* Patterns of a list between commas, which is cut into their names. Returns how many. */
static int load_list(dkv_pattern *p, const char **path, char *list) {
    int n = 0;
    for (char *name; (name = strsep(&list, ",")); n++) {
        if (n == MAX_METHODS) usage("at most %d patterns at a time", MAX_METHODS);
        load_pattern(&p[n], path[n] = name);
    }
    return n;
}

int command_score(int argc, char **argv) {
    const tool_option options[] = {
        EXAM_OPTIONS(o),
        LENGTH_OPTIONS(o),
        {'p', "patterns", "P.dkv,...", OPT_TEXT, &patterns, 0, 0, "what to compare with dense"},
        {0, "controls", NULL, OPT_FLAG, &with_controls, 0, 0, "and the controls of each: see dkv pattern"},
        {0, "scores", "S.dks", OPT_TEXT, &scores_path, 0, 0, "of the control scores-only"},
        {0, "control-seed", "N", OPT_INT, &control_seed, 0, TWO_53, "of controls that draw (default: 1)"},
        {'n', "queries", "N", OPT_INT, &o.queries, 1, 1e9, "at least so many, in whole rounds (default: 500)"},
        {0, "split", "choose|report", OPT_CHOICE, &split, 0, 0, "choose among patterns, or report once at the end"},
        {0, "text", "FILE", OPT_TEXT, &text_path, 0, 0, "perplexity on this text"},
        {0, "json", NULL, OPT_FLAG, &json, 0, 0, "print JSON"},
        {0, NULL, NULL, OPT_END, NULL, 0, 0, NULL},
    };
    argv = parse_options(&argc, argv, options, "dkv score -m MODEL.gguf -p P.dkv[,Q.dkv...] [options]", NOTES);
    if (argc) usage("what is '%s'? see dkv score --help", argv[0]);
    if (!o.model_path) usage("which model? give -m MODEL.gguf");
    if (!patterns || !*patterns) usage("which patterns? give -p P.dkv,Q.dkv,...");
    if (scores_path && !with_controls) usage("--scores goes with --controls");
    dkv_pattern p[MAX_METHODS];
    const char *path[MAX_METHODS];
    char *list = strdup(patterns);
    int n = load_list(p, path, list);
    lengths_of(&p[0]);
    o.split = split ? LM_REPORT : LM_CHOOSE;
    exams x;
    open_exams(&x, &o);
    methods[DENSE] = (method){.name = "dense", .logical = 1, .physical = 1, .total = 1};
    for (int i = 0; i < n; i++) add_pattern(&x, &p[i], path[i]);
    for (method *m = methods; m < methods + n_methods; m++)
        m->grade = allocate((size_t)(x.contexts * x.per_context), sizeof *m->grade);
    if (isatty(STDERR_FILENO))
        say_cost(&x, "score", x.contexts, x.contexts * x.per_context * n_methods, 1);
    each_batch(&x, 0, x.contexts, grade_batch, &x);
    if (text_path) grade_text(&x);
    show_line("%s", "");
    if (json) print_json(&x);
    else print_table(&x);
    for (method *m = methods; m < methods + n_methods; m++) free(m->cells), free(m->grade);
    for (int i = 0; i < n; i++) dkv_pattern_free(&p[i], NULL);
    free(list);
    close_exams(&x);
    return 0;
}
