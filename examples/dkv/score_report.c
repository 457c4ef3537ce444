#define _GNU_SOURCE
#include "score.h"
#include "stats.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const KINDS[] = {"num", "word", "all"};
static const int ORDER[] = {LM_KINDS, LM_NUM, LM_WORD}; /* LM_KINDS: all */

/* ---- sums ---------------------------------------------------------------- */

static bool is_of(const exams *x, int64_t question, int kind) {
    return kind == LM_KINDS || kind_of(x, question / x->per_context) == kind;
}

/* Of a method's questions of one kind whose bin is in [from, to). */
typedef struct {
    int64_t n, exact;
    double loss, kl;
} sums;

static sums sum_up(const exams *x, const method *m, int kind, int64_t from, int64_t to) {
    sums s = {0};
    for (int64_t i = 0; i < x->contexts * x->per_context; i++) {
        const lm_grade_result *g = &m->grade[i];
        if (!is_of(x, i, kind) || x->bin[i] < from || x->bin[i] >= to) continue;
        s.n++;
        s.exact += g->right == g->n_value;
        s.loss += g->loss, s.kl += g->kl;
    }
    s.loss /= (double)s.n, s.kl /= (double)s.n;
    return s;
}

typedef struct {
    double mean;
    interval in;
} difference;

/* Loss of a less loss of b, question by question; contexts have one kind and equally many questions. */
static difference compare(const exams *x, const method *a, const method *b, int kind) {
    const int64_t all = x->contexts * x->per_context;
    double *d = allocate((size_t)all, sizeof *d);
    int64_t n = 0;
    for (int64_t i = 0; i < all; i++)
        if (is_of(x, i, kind)) d[n++] = a->grade[i].loss - b->grade[i].loss;
    difference out = {mean_of(d, n), bootstrap(d, n, x->per_context, (uint64_t)x->o.seed)};
    free(d);
    return out;
}

static double perplexity(const gradings *g, const method *m) { return exp(mean_of(m->text_loss, g->windows)); }

/* ---- table --------------------------------------------------------------- */

enum { NAME = 34, DIFFERENCE = 28 }; /* columns */

/* Nothing that prints as -0.000. */
static double shown(double x) { return fabs(x) < 0.0005 ? 0 : x; }

static void print_difference(difference d) {
    printf("  %+7.3f (%+7.3f..%+7.3f)", shown(d.mean), shown(d.in.low), shown(d.in.high));
}

static void print_rows(const gradings *g, int kind) {
    printf("\n%-*s  physical  total     loss  to dense (95 %%)             exact              (95 %%)"
           "              KL\n", NAME, KINDS[kind]);
    for (const method *m = g->m; m < g->m + g->n; m++) {
        const sums s = sum_up(g->x, m, kind, 0, g->x->D);
        const interval in = wilson(s.exact, s.n);
        printf("%-*s  %8.3f  %5.3f  %7.3f", NAME, m->name, m->physical, m->total, s.loss);
        if (m->cells) print_difference(compare(g->x, m, g->m, kind));
        else printf("%*s", DIFFERENCE, "");
        printf("  %5lld/%-5lld  %.3f (%.3f..%.3f)", (long long)s.exact, (long long)s.n,
               (double)s.exact / (double)s.n, in.low, in.high);
        if (m->cells) printf("  %6.3f", shown(s.kl));
        putchar('\n');
    }
}

static void print_comparisons(const gradings *g) {
    if (g->n == 2) return; /* dense and one pattern */
    printf("\n%-*s  loss (95 %%)                   less that of\n", NAME, KINDS[LM_KINDS]);
    for (const method *m = g->m; m < g->m + g->n; m++) {
        if (m->against == DENSE) continue;
        printf("%-*s", NAME, m->name);
        print_difference(compare(g->x, m, g->m + m->against, LM_KINDS));
        printf("   %s\n", g->m[m->against].name);
    }
}

static void print_text_rows(const gradings *g) {
    printf("\n%-*s  physical  total  perplexity      KL   (%lld windows of %lld tokens)\n", NAME, base_name(g->text),
           (long long)g->windows, (long long)g->window);
    for (const method *m = g->m; m < g->m + g->n; m++)
        printf("%-*s  %8.3f  %5.3f  %10.3f  %6.3f\n", NAME, m->name, m->physical, m->total, perplexity(g, m),
               shown(m->text_kl / (double)g->windows));
}

void print_gradings(const gradings *g) {
    const exams *x = g->x;
    printf("%lld questions about %lld contexts of %lld tokens, split %s, seed %lld, %s: %s\n",
           (long long)(x->contexts * x->per_context), (long long)x->contexts, (long long)x->o.T_c, g->split,
           (long long)x->o.seed, x->name, lm_where(x->m));
    for (int k = 0; k < 3; k++) print_rows(g, ORDER[k]);
    print_comparisons(g);
    if (g->windows) print_text_rows(g);
}

/* ---- json ---------------------------------------------------------------- */

static void add_interval(cJSON *o, const char *key, interval i) {
    const double ends[] = {i.low, i.high};
    cJSON_AddItemToObject(o, key, cJSON_CreateDoubleArray(ends, 2));
}

static void add_sums(cJSON *o, const sums *s) {
    cJSON_AddNumberToObject(o, "questions", (double)s->n);
    cJSON_AddNumberToObject(o, "exact", (double)s->exact);
    cJSON_AddNumberToObject(o, "accuracy", (double)s->exact / (double)s->n);
    add_interval(o, "accuracy_95", wilson(s->exact, s->n));
    cJSON_AddNumberToObject(o, "loss", s->loss);
    cJSON_AddNumberToObject(o, "kl", s->kl);
}

static void add_kind(cJSON *o, const gradings *g, const method *m, int kind) {
    cJSON *of = cJSON_AddObjectToObject(o, KINDS[kind]);
    const sums s = sum_up(g->x, m, kind, 0, g->x->D);
    const difference d = compare(g->x, m, g->m, kind);
    add_sums(of, &s);
    cJSON_AddNumberToObject(of, "loss_to_dense", d.mean);
    add_interval(of, "loss_to_dense_95", d.in);
    if (m->against == DENSE) return;
    const difference e = compare(g->x, m, g->m + m->against, kind);
    cJSON_AddNumberToObject(of, "loss_to_pattern", e.mean);
    add_interval(of, "loss_to_pattern_95", e.in);
}

/* All kinds by where they were asked about: the nearest, the middle and the farthest third of the bins. */
static void add_thirds(cJSON *o, const gradings *g, const method *m) {
    static const char *const names[] = {"near", "middle", "far"};
    const int64_t D = g->x->D;
    for (int64_t k = 0; k < 3 && D >= 3; k++) {
        const sums s = sum_up(g->x, m, LM_KINDS, k * D / 3, (k + 1) * D / 3);
        add_sums(cJSON_AddObjectToObject(o, names[k]), &s);
    }
}

static cJSON *method_json(const gradings *g, const method *m) {
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "name", m->name);
    if (m->against != DENSE) cJSON_AddStringToObject(o, "pattern", g->m[m->against].name);
    if (m->cells) cJSON_AddNumberToObject(o, "cells", (double)m->n_cells);
    cJSON_AddNumberToObject(o, "logical_ratio", m->logical);
    cJSON_AddNumberToObject(o, "physical_ratio", m->physical);
    cJSON_AddNumberToObject(o, "physical_ratio_total", m->total);
    for (int k = 0; k < 3; k++) add_kind(o, g, m, ORDER[k]);
    add_thirds(o, g, m);
    if (g->windows) cJSON_AddNumberToObject(o, "perplexity", perplexity(g, m));
    if (g->windows) cJSON_AddNumberToObject(o, "text_kl", m->text_kl / (double)g->windows);
    return o;
}

void print_gradings_json(const gradings *g) {
    const exams *x = g->x;
    cJSON *o = cJSON_CreateObject();
    char hex[20];
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)x->data_hash);
    cJSON_AddStringToObject(o, "model", x->name);
    cJSON_AddStringToObject(o, "split", g->split);
    cJSON_AddStringToObject(o, "data_hash", hex);
    cJSON_AddNumberToObject(o, "seed", (double)x->o.seed);
    cJSON_AddNumberToObject(o, "context_tokens", (double)x->o.T_c);
    cJSON_AddNumberToObject(o, "contexts", (double)x->contexts);
    cJSON_AddNumberToObject(o, "questions", (double)(x->contexts * x->per_context));
    if (g->windows) cJSON_AddNumberToObject(o, "text_tokens", (double)(g->windows * (g->window - 1)));
    cJSON *list = cJSON_AddArrayToObject(o, "methods");
    for (const method *m = g->m; m < g->m + g->n; m++) cJSON_AddItemToArray(list, method_json(g, m));
    print_json_object(o);
}
