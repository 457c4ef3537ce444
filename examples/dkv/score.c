/* dkv score: the same held-out questions, answered from the dense cache, through patterns, and through their controls.

   A context is prefilled once and graded under every method while its cache is there. Differences to dense are paired,
   question by question, and their intervals resample whole contexts: questions about one context are not independent.
   Perplexity: tokens of a text that follow T_c others, in windows that share no predicted token. */
#define _GNU_SOURCE
#include "score.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static exam_options o = {.T_c = -1, .W = -1, .S = -1, .R = -1, .per_context = 4, .queries = 500, .once = true};
static const char *patterns, *scores_path, *text_path;
static int64_t control_seed = 1;
static int split;
static bool with_controls, json;

static method methods[MAX_METHODS];
static int n_methods = 1; /* DENSE */
static const char *paths[MAX_METHODS];
static int n_paths;
static int64_t windows, window;

static const char NOTES[] =
    "physical    kept share of KV rows between sink and recent; total: with both, what memory follows\n"
    "loss        mean cross-entropy of the value's tokens, by question\n"
    "to dense    the paired difference of losses, with a 95 % interval: 10,000 resamples of whole contexts; in the\n"
    "            same way of a control to its pattern, and of a pattern to the first of as many cells, else the first\n"
    "KL          mean divergence of the value tokens' distributions from the dense ones\n"
    "exact       all value tokens of a question are the likeliest ones: greedy decoding would give the value; with\n"
    "            Wilson's 95 % interval\n"
    "perplexity  with --text: of up to 16 windows of up to 512 tokens, each behind T tokens of the same text\n"
    "Sink, recent and bins of the questions are those of the first pattern, and so is their T unless --ctx is given.\n"
    "Wordings, keys and filler of the splits are disjoint, from each other and from those of dkv train.\n";

/* ---- methods ------------------------------------------------------------- */

/* A file's name, or where several share it the path. */
static const char *name_of(const char *path) {
    for (int i = 0; i < n_paths; i++)
        if (paths[i] != path && !strcmp(base_name(paths[i]), base_name(path))) return path;
    return base_name(path);
}

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

static void measure_method(method *m, const dkv_pattern *p, int64_t T_c) {
    dkv_stats s;
    dkv_dry_run(&s, p, T_c, DKV_BEYOND_ERROR); /* T_c is within reach */
    m->logical = s.logical, m->physical = s.physical, m->total = s.physical_total, m->n_cells = count_cells(p);
}

static void add_control(const dkv_pattern *p, int of, int kind, const score_table *s, const char *path, int64_t T_c) {
    method *m = add_method(p, "%s %s", name_of(path), control_name(kind));
    m->against = of;
    make_control(m->cells, kind, p, s->score, (uint64_t)control_seed);
    dkv_pattern c = pattern_of_cells(p, m->cells);
    measure_method(m, &c, T_c);
    free((void *)(uintptr_t)c.bits);
}

/* Scores of the nearest D bins only. */
static void cut_scores(score_table *s, int64_t D) {
    for (int64_t f = 0; f < (int64_t)s->L * s->H; f++)
        memmove(s->score + f * D, s->score + f * s->D, (size_t)D * sizeof *s->score);
    s->D = (int32_t)D;
}

static void check_pattern(const exams *x, const dkv_pattern *p, const char *path) {
    const dkv_shape *s = &lm_get_params(x->m)->shape;
    if (dkv_pattern_matches(p, s->L, s->H, s->Hkv, s->d_k))
        fail("%s is for %d layers of %d query and %d KV heads; the model has %d of %d and %d", path, p->L, p->H, p->Hkv,
             s->L, s->H, s->Hkv);
    if (dkv_max_context(p) < x->o.T_c)
        fail("%s reaches %lld tokens, not %lld; lower --ctx", path, (long long)dkv_max_context(p), (long long)x->o.T_c);
}

static void add_controls(const dkv_pattern *p, int of, const score_table *s, const char *path, int64_t T_c) {
    for (int kind = 0; kind < CONTROLS; kind++)
        if (kind != CONTROL_SCORES_ONLY || scores_path) add_control(p, of, kind, s, path, T_c);
}

/* What a pattern is compared with: the first of as many cells of its width, or else the first of all. */
static int rival(int index) {
    if (index == FIRST) return DENSE;
    for (int i = FIRST; i < index; i++)
        if (methods[i].n_cells == methods[index].n_cells && methods[i].gating.W == methods[index].gating.W) return i;
    return FIRST;
}

/* All of it over the bins that T_c reaches: only there do controls of as many cells keep as much. */
static void add_pattern(const exams *x, const dkv_pattern *whole, const char *path) {
    const int64_t T_c = x->o.T_c, reached = dkv_bins_at(whole, T_c), D = reached ? reached : 1;
    score_table scores = {0};
    check_pattern(x, whole, path);
    if (with_controls && scores_path) {
        load_scores(&scores, scores_path);
        check_scores_match(&scores, scores_path, whole, path);
        cut_scores(&scores, D);
    }
    dkv_pattern p = cut_pattern(whole, D);
    const int index = n_methods;
    method *m = add_method(&p, "%s", name_of(path));
    pattern_cells(m->cells, &p);
    measure_method(m, &p, T_c);
    m->against = rival(index);
    if (with_controls) add_controls(&p, index, &scores, path, T_c);
    free_scores(&scores);
    free((void *)(uintptr_t)p.bits);
}

/* ---- grading ------------------------------------------------------------- */

static void grade_batch(void *user, const lm_exam *e, int64_t n, int64_t first) {
    exams *x = user;
    const int64_t at = first * x->per_context;
    if (lm_grade_reference(x->learner, e, n, methods[DENSE].grade + at)) fail_model(x);
    for (int64_t i = at; i < at + n * x->per_context; i++)
        if (!isfinite(methods[DENSE].grade[i].loss))
            fail("%s answers with what is no number; is it damaged?", o.model_path);
    for (method *m = methods + 1; m < methods + n_methods; m++)
        if (lm_grade(x->learner, e, n, &m->gating, m->grade + at)) fail_model(x);
    show_line("score: %lld of %lld contexts, %s left", (long long)(first + n), (long long)x->contexts,
              hms((seconds() - x->opened) / (double)(first + n) * (double)(x->contexts - first - n)));
}

/* Window k: T_c tokens from k * window on are the context, the next ones the question. Where contexts begin with BOS,
   it replaces the first, which no later window has. */
static void grade_window(exams *x, int32_t *tokens, int64_t k) {
    int32_t *context = tokens + k * window, bos = lm_bos(x->tokenizer);
    if (bos >= 0) context[0] = bos;
    const lm_question q = {.tokens = context + x->o.T_c, .n = window, .first = 1};
    lm_cache *cache = prefill_context(x, context, x->o.T_c);
    const lm_exam e = {cache, &q, 1, 0};
    lm_grade_result g;
    for (method *m = methods; m < methods + n_methods; m++) {
        if (m == methods ? lm_grade_reference(x->learner, &e, 1, &g) : lm_grade(x->learner, &e, 1, &m->gating, &g))
            fail_model(x);
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

/* ---- the command --------------------------------------------------------- */

/* Lengths of the first pattern where none are given; of the context, as many whole bins as it reaches. */
static void lengths_of(const dkv_pattern *p, const char *path) {
    if (o.W < 0) o.W = p->W;
    if (o.S < 0) o.S = p->S;
    if (o.R < 0) o.R = p->R;
    const int64_t ends = o.S + o.R, reach = dkv_max_context(p);
    if (o.T_c < 0 && reach < ends + o.W)
        fail("%s reaches %lld tokens; sink, recent and one bin are %lld", path, (long long)reach,
             (long long)(ends + o.W));
    if (o.T_c < 0) o.T_c = whole_bins(&o, reach);
}

/* Patterns of a list between commas, which is cut into their paths. */
static void load_list(dkv_pattern *p, char *list) {
    for (char *path; (path = strsep(&list, ",")); n_paths++) {
        if (n_paths == MAX_METHODS) usage("at most %d patterns at a time", MAX_METHODS);
        if (!*path) usage("-p has a comma without a name beside it");
        load_pattern(&p[n_paths], paths[n_paths] = path);
    }
}

int command_score(int argc, char **argv) {
    const tool_option options[] = {
        EXAM_OPTIONS(o, "4"),
        LENGTH_OPTIONS(o, "the pattern's", "the pattern's", "the pattern's", "the pattern's"),
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
    char *list = strdup(patterns);
    load_list(p, list);
    lengths_of(&p[0], paths[0]);
    o.split = split ? LM_REPORT : LM_CHOOSE;
    exams x;
    open_exams(&x, &o);
    methods[DENSE] = (method){.name = "dense", .logical = 1, .physical = 1, .total = 1};
    for (int i = 0; i < n_paths; i++) add_pattern(&x, &p[i], paths[i]);
    for (method *m = methods; m < methods + n_methods; m++)
        m->grade = allocate((size_t)(x.contexts * x.per_context), sizeof *m->grade);
    if (isatty(STDERR_FILENO))
        say_cost(&x, "score", x.contexts, x.contexts * x.per_context * n_methods, false);
    each_batch(&x, 0, x.contexts, grade_batch, &x);
    if (text_path) grade_text(&x);
    show_line("%s", "");
    const gradings g = {&x, methods, n_methods, windows, window, text_path, split ? "report" : "choose"};
    if (json) print_gradings_json(&g);
    else print_gradings(&g);
    for (method *m = methods; m < methods + n_methods; m++) free(m->cells), free(m->grade);
    for (int i = 0; i < n_paths; i++) dkv_pattern_free(&p[i], NULL);
    free(list);
    close_exams(&x);
    return 0;
}
