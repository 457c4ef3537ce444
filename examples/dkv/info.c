/* dkv info: what a pattern is, and what it does to a context of T tokens; what a score file says. */
#define _GNU_SOURCE
#include "tool.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int64_t context = -1;
static int beyond = DKV_BEYOND_ERROR;
static bool json;

static const char *const BUDGET_NAMES[] = {"logical", "physical"};

/* The cache of a context, f16: kept and all rows, of K and V. 0 when the pattern serves any head dimension. */
static int64_t f16_bytes(const dkv_pattern *p, int64_t rows) { return rows * 2 * p->d * dkv_type_bytes(DKV_F16); }

static dkv_stats measure(const dkv_pattern *p, const char *path) {
    dkv_stats s;
    double bytes = 4. * p->L * p->Hkv * (p->d ? p->d : 1) * (double)context;
    if (bytes > TWO_53) fail("a context of %lld tokens is too long to count its bytes", (long long)context);
    dkv_result r = dkv_dry_run(&s, p, context, (dkv_beyond)beyond);
    if (r == DKV_ERR_RANGE)
        fail("%s reaches %lld tokens, not %lld; choose --beyond clamp, keep or drop", path,
             (long long)dkv_max_context(p), (long long)context);
    if (r != DKV_OK) fail("%s: %s", path, dkv_result_string(r));
    return s;
}

/* ---- json ---------------------------------------------------------------- */

static void number(cJSON *o, const char *key, int64_t value) { cJSON_AddNumberToObject(o, key, (double)value); }

/* As text: a double does not hold 64 bits. */
static void provenance(cJSON *o, uint64_t data_hash, uint64_t seed) {
    char text[24];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)data_hash);
    cJSON_AddStringToObject(o, "data_hash", text);
    snprintf(text, sizeof text, "%llu", (unsigned long long)seed);
    cJSON_AddStringToObject(o, "seed", text);
}

static void print_json(const dkv_pattern *p, const dkv_stats *s) {
    char hex[20];
    cJSON *o = cJSON_CreateObject();
    number(o, "layers", p->L);
    number(o, "heads", p->H);
    number(o, "kv_heads", p->Hkv);
    number(o, "bins", p->D);
    number(o, "head_dim", p->d);
    number(o, "bin_width", p->W);
    number(o, "sink", p->S);
    number(o, "recent", p->R);
    number(o, "max_context", dkv_max_context(p));
    cJSON_AddStringToObject(o, "budget", BUDGET_NAMES[p->budget]);
    cJSON_AddNumberToObject(o, "rho", p->rho);
    number(o, "ones", p->K);
    number(o, "cells", count_cells(p));
    cJSON_AddStringToObject(o, "model", p->model);
    cJSON_AddStringToObject(o, "tool", p->tool);
    snprintf(hex, sizeof hex, "%08x", dkv_pattern_crc(p));
    cJSON_AddStringToObject(o, "crc", hex);
    provenance(o, p->data_hash, p->seed);
    if (s) {
        number(o, "context_tokens", context);
        cJSON_AddNumberToObject(o, "logical_ratio", s->logical);
        cJSON_AddNumberToObject(o, "physical_ratio", s->physical);
        cJSON_AddNumberToObject(o, "physical_ratio_total", s->physical_total);
    }
    if (s && p->d) {
        number(o, "kv_bytes_dense", f16_bytes(p, s->total));
        number(o, "kv_bytes_packed", f16_bytes(p, s->kept));
    }
    print_json_object(o);
}

/* ---- text ---------------------------------------------------------------- */

static void print_pattern(const dkv_pattern *p, const char *path) {
    char dim[32] = "any";
    if (p->d) snprintf(dim, sizeof dim, "%d", p->d);
    printf("%s\n", base_name(path));
    printf("  model     %s\n", p->model[0] ? p->model : "(none named)");
    printf("  shape     %d layers, %d query heads, %d KV heads, head dimension %s\n", p->L, p->H, p->Hkv, dim);
    printf("  bins      %d of %lld tokens, sink %lld, recent %lld: contexts up to %lld tokens\n", p->D,
           (long long)p->W, (long long)p->S, (long long)p->R, (long long)dkv_max_context(p));
    printf("  budget    %s, rho %g\n", BUDGET_NAMES[p->budget], p->rho);
    printf("  keeps     %lld of %lld (layer, query head, bin), %lld of %lld (layer, KV head, bin)\n", (long long)p->K,
           (long long)p->L * p->H * p->D, (long long)count_cells(p), (long long)p->L * p->Hkv * p->D);
    printf("  made by   %s, CRC %08x\n", p->tool[0] ? p->tool : "(unknown)", dkv_pattern_crc(p));
}

static void print_stats(const dkv_pattern *p, const dkv_stats *s) {
    printf("\nAt a context of %lld tokens\n", (long long)context);
    printf("  logical ratio     %.3f   of (layer, query head, bin)\n", s->logical);
    printf("  physical ratio    %.3f   of KV rows between sink and recent\n", s->physical);
    printf("    with both       %.3f   of all KV rows: what memory follows\n", s->physical_total);
    if (p->d)
        printf("  KV cache, f16     %.1f MB dense, %.1f MB packed\n", (double)f16_bytes(p, s->total) / 1e6,
               (double)f16_bytes(p, s->kept) / 1e6);
}

/* Share of the KV heads of layer l that keep bins [from, to). */
static double share(const dkv_pattern *p, int l, int64_t from, int64_t to) {
    int64_t kept = 0;
    for (int g = 0; g < p->Hkv; g++)
        for (int64_t b = from; b < to; b++) kept += dkv_union_get(p, l, g, b);
    return (double)kept / (double)((to - from) * p->Hkv);
}

static const char *shade(double share_kept) {
    static const char *const blocks[] = {"·", "░", "▒", "▓", "█"};
    return blocks[(int)ceil(4 * share_kept)]; /* "·" only for nothing */
}

/* A row per layer, a column per bin, or per few bins when the terminal is narrow. */
static void print_heat_map(const dkv_pattern *p) {
    struct winsize size = {.ws_col = 80};
    ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    int64_t room = size.ws_col > 40 ? size.ws_col - 16 : 24, per = (p->D + room - 1) / room;
    int columns = (int)((p->D + per - 1) / per);
    printf("\nKept by layer and distance from the context's end (· none, ░ a quarter of the KV heads, █ all)\n"
           "  layer  %-*lld%*lld\n", columns / 2, (long long)p->R, columns - columns / 2,
           (long long)(p->R + p->W * p->D));
    for (int l = 0; l < p->L; l++) {
        printf("  %5d  ", l);
        for (int64_t b = 0; b < p->D; b += per)
            fputs(shade(share(p, l, b, b + per < p->D ? b + per : p->D)), stdout);
        printf(" %3.0f %%\n", 100 * share(p, l, 0, p->D));
    }
}

/* ---- scores -------------------------------------------------------------- */

typedef struct {
    double mean, top;
    int top_l, top_h;      /* the head with the highest mean over its bins */
    int64_t peaks[3];      /* heads that reach 0.1, by the third of the bins that they peak in */
    uint32_t least, most;  /* examples per bin */
} score_facts;

static score_facts look_at_scores(const score_table *s) {
    score_facts f = {.least = UINT32_MAX};
    const int64_t D = s->D, heads = (int64_t)s->L * s->H;
    for (int64_t b = 0; b < D; b++) {
        if (s->count[b] < f.least) f.least = s->count[b];
        if (s->count[b] > f.most) f.most = s->count[b];
    }
    for (int64_t i = 0; i < heads; i++) {
        const float *x = s->score + i * D;
        double sum = 0;
        int64_t peak = 0;
        for (int64_t b = 0; b < D; b++) {
            sum += (double)x[b];
            if (x[b] > x[peak]) peak = b;
        }
        f.mean += sum / (double)(heads * D);
        if (x[peak] >= 0.1f) f.peaks[3 * peak / D]++;
        if (sum / (double)D > f.top) f.top = sum / (double)D, f.top_l = (int)(i / s->H), f.top_h = (int)(i % s->H);
    }
    return f;
}

static void print_scores_json(const score_table *s, const score_facts *f) {
    cJSON *o = cJSON_CreateObject();
    number(o, "layers", s->L);
    number(o, "heads", s->H);
    number(o, "kv_heads", s->Hkv);
    number(o, "bins", s->D);
    number(o, "bin_width", s->W);
    number(o, "sink", s->S);
    number(o, "recent", s->R);
    number(o, "context_tokens", s->T_c);
    number(o, "examples_per_bin", f->least);
    cJSON_AddNumberToObject(o, "mean", f->mean);
    cJSON_AddNumberToObject(o, "best_head_mean", f->top);
    number(o, "best_head_layer", f->top_l);
    number(o, "best_head", f->top_h);
    number(o, "heads_peak_near", f->peaks[0]);
    number(o, "heads_peak_middle", f->peaks[1]);
    number(o, "heads_peak_far", f->peaks[2]);
    cJSON_AddStringToObject(o, "model", s->model);
    cJSON_AddStringToObject(o, "tool", s->tool);
    provenance(o, s->data_hash, s->seed);
    print_json_object(o);
}

static void print_scores(const score_table *s, const score_facts *f, const char *path) {
    printf("%s: retrieval scores\n", base_name(path));
    printf("  model     %s\n", s->model[0] ? s->model : "(none named)");
    printf("  shape     %d layers, %d query heads, %d KV heads\n", s->L, s->H, s->Hkv);
    printf("  bins      %d of %lld tokens, sink %lld, recent %lld: a context of %lld tokens\n", s->D, (long long)s->W,
           (long long)s->S, (long long)s->R, (long long)s->T_c);
    printf("  examples  %u to %u in each bin\n", f->least, f->most);
    printf("  mean      %.4f; the best head is L%dH%d with %.3f\n", f->mean, f->top_l, f->top_h, f->top);
    printf("  peaks     of the heads that reach 0.1: %lld near, %lld in the middle, %lld far (thirds of the bins)\n",
           (long long)f->peaks[0], (long long)f->peaks[1], (long long)f->peaks[2]);
    printf("  made by   %s, seed %llu\n", s->tool[0] ? s->tool : "(unknown)", (unsigned long long)s->seed);
}

static void show_scores(const char *path) {
    score_table s;
    if (context >= 0) usage("--ctx goes with patterns; %s holds scores", base_name(path));
    load_scores(&s, path);
    score_facts f = look_at_scores(&s);
    if (json) print_scores_json(&s, &f);
    else print_scores(&s, &f, path);
    free_scores(&s);
}

/* ---- the command --------------------------------------------------------- */

int command_info(int argc, char **argv) {
    const tool_option options[] = {
        {0, "ctx", "T", OPT_INT, &context, 0, 68719476736., "show ratios and bytes at a context of T tokens"},
        {0, "beyond", BEYOND_CHOICES, OPT_CHOICE, &beyond, 0, 0, "positions beyond the last bin (default: error)"},
        {0, "json", NULL, OPT_FLAG, &json, 0, 0, "print JSON"},
        {0, NULL, NULL, OPT_END, NULL, 0, 0, NULL},
    };
    argv = parse_options(&argc, argv, options, "dkv info PATTERN.dkv|SCORES.dks [options]", NULL);
    if (argc != 1) usage("give one pattern or score file; see dkv info --help");
    if (is_score_file(argv[0])) return show_scores(argv[0]), 0;
    dkv_pattern p;
    load_pattern(&p, argv[0]);
    dkv_stats stats = {0};
    if (context >= 0) stats = measure(&p, argv[0]);
    if (json) {
        print_json(&p, context >= 0 ? &stats : NULL);
    } else {
        print_pattern(&p, argv[0]);
        if (context >= 0) print_stats(&p, &stats);
        if (isatty(STDOUT_FILENO)) print_heat_map(&p);
    }
    dkv_pattern_free(&p, NULL);
    return 0;
}
