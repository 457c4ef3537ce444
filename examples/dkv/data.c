/* dkv data: shows what patterns are learned from and scored on, in a model's own tokens. */
#define _GNU_SOURCE
#include "tool.h"

#include "../llama/needles.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *model_path, *filler_path;
static int64_t T_c = 7936, W = 128, S = 128, R = 1024, per_context = 4, groups = 2, seed;
static int64_t show = 1, first_context, round_;
static int split = LM_TRAIN, kind = LM_NUM, wording;

static const char NOTES[] =
    "Each context is the chat's opening, filler, and one line per needle; each needle is asked about in a suffix\n"
    "of its own, which ends in the line up to the value, and the value. What is learned is between [ and ].\n"
    "A manifest asks about every bin once; a round is the manifests of both wordings and both kinds.\n";

static const lm_tokenizer *tokens;

/* Text of ids, with the ones from `from` to `to` between brackets, each line behind a margin. */
static void print_text(const int32_t *ids, int64_t n, int64_t from, int64_t to) {
    fputs("    | ", stdout);
    for (int64_t i = 0; i < n; i++) {
        size_t len;
        const char *text = lm_decode(tokens, ids[i], &len);
        if (i == from) putchar('[');
        for (size_t k = 0; k < len; k++) {
            putchar(text[k]);
            if (text[k] == '\n') fputs("    | ", stdout);
        }
        if (i + 1 == to) putchar(']');
    }
    putchar('\n');
}

static void print_needle(const lm_needles *n, const lm_haystack *h, const int32_t *ids, int64_t i) {
    const lm_needle *x = &h->needle[i];
    const int64_t end = T_c - R - W * x->bin, around = 8;
    const int64_t at = x->begin > around ? x->begin - around : 0, to = x->end + around < T_c ? x->end + around : T_c;
    int64_t first;
    lm_ids suffix = {0};
    printf("\n  bin %lld, positions %lld..%lld; line %lld..%lld, value %lld..%lld, %lld tokens from the end\n",
           (long long)x->bin, (long long)(end - W), (long long)end - 1, (long long)x->begin, (long long)x->end - 1,
           (long long)x->source, (long long)(x->source + x->n_value - 1), (long long)(T_c - x->source));
    print_text(ids + at, to - at, x->source - at, x->source + x->n_value - at);
    if (lm_needles_query(n, h, i, &suffix, &first)) fail("out of memory");
    printf("  its suffix, %lld tokens\n", (long long)suffix.n);
    print_text(suffix.v, suffix.n, first, suffix.n);
    free(suffix.v);
}

static void print_context(const lm_needles *n, int64_t index, int32_t *ids) {
    char err[256];
    lm_haystack h;
    if (lm_needles_context(n, &h, ids, kind, wording, round_, index, err, sizeof err)) fail("%s", err);
    printf("\ncontext %lld: begins\n", (long long)index);
    print_text(ids, T_c < 64 ? T_c : 64, -1, -1);
    for (int64_t i = 0; i < h.n; i++) print_needle(n, &h, ids, i);
}

static void print_summary(const lm_needles *n) {
    int64_t bins = lm_needles_bins(n), contexts = lm_needles_contexts(n);
    printf("%lld tokens: sink %lld, %lld full bins of %lld, recent %lld\n", (long long)T_c, (long long)S,
           (long long)bins, (long long)W, (long long)R);
    printf("a manifest: %lld contexts of %lld needles; a round: %lld contexts, %lld queries\n", (long long)contexts,
           (long long)per_context, (long long)(contexts * LM_KINDS * LM_WORDINGS),
           (long long)(contexts * per_context * LM_KINDS * LM_WORDINGS));
}

int command_data(int argc, char **argv) {
    const tool_option options[] = {
        {'m', "model", "MODEL.gguf", OPT_TEXT, &model_path, 0, 0, "the model whose tokens count"},
        {0, "show", "N", OPT_INT, &show, 0, 1e9, "contexts to show (default: 1)"},
        {0, "first", "I", OPT_INT, &first_context, 0, 1e9, "the first of them (default: 0)"},
        {0, "kind", "num|word", OPT_CHOICE, &kind, 0, 0, "what values are (default: num)"},
        {0, "wording", "0|1", OPT_CHOICE, &wording, 0, 0, "of the questions (default: 0)"},
        {0, "round", "N", OPT_INT, &round_, 0, 1e9, "another shuffle of the bins (default: 0)"},
        {0, "split", "train|choose|report", OPT_CHOICE, &split, 0, 0, "wordings, keys and filler (default: train)"},
        {0, "ctx", "T", OPT_INT, &T_c, 1, TWO_31, "tokens of a context (default: 7936)"},
        {0, "bin-width", "W", OPT_INT, &W, 1, TWO_31, "tokens of a bin (default: 128)"},
        {0, "sink", "S", OPT_INT, &S, 0, TWO_31, "first tokens, always kept (default: 128)"},
        {0, "recent", "R", OPT_INT, &R, 0, TWO_31, "last tokens, always kept (default: 1024)"},
        {0, "needles", "N", OPT_INT, &per_context, 1, LM_MAX_NEEDLES, "in a context, each in its bin (default: 4)"},
        {0, "digits", "N", OPT_INT, &groups, 1, 8, "groups of three in a number (default: 2)"},
        {0, "filler", "FILE", OPT_TEXT, &filler_path, 0, 0, "a text around the needles (default: a sentence)"},
        {0, "seed", "N", OPT_INT, &seed, 0, TWO_53, "of everything that is random (default: 0)"},
        {0, NULL, NULL, OPT_END, NULL, 0, 0, NULL},
    };
    parse_options(&argc, argv, options, "dkv data -m MODEL.gguf [options]", NOTES);
    if (argc || !model_path) usage("give a model with -m; see dkv data --help");
    char err[256];
    gguf *g;
    lm_tokenizer *t;
    lm_chat chat;
    lm_needles *n;
    lm_needle_options o = {.T_c = T_c, .W = W, .S = S, .R = R, .per_context = per_context, .groups = groups,
                           .split = split, .seed = (uint64_t)seed};
    char *filler = filler_path ? read_text(filler_path) : NULL;
    o.filler = filler;
    if (gguf_open(&g, model_path, err, sizeof err)) fail("%s", err);
    if (lm_tokenizer_open(&t, g, err, sizeof err)) fail("%s: %s", model_path, err);
    if (lm_chat_open(&chat, g, t, NULL, NULL, err, sizeof err)) fail("%s: %s", model_path, err);
    if (lm_needles_open(&n, t, &chat, &o, err, sizeof err)) fail("%s", err);
    if (show && first_context >= lm_needles_contexts(n))
        usage("--first must be below %lld, the contexts of a manifest", (long long)lm_needles_contexts(n));
    tokens = t;
    print_summary(n);
    int32_t *ids = allocate((size_t)T_c, sizeof *ids);
    for (int64_t i = first_context; i < first_context + show && i < lm_needles_contexts(n); i++)
        print_context(n, i, ids);
    free(ids);
    free(filler);
    lm_needles_close(n);
    lm_chat_close(&chat);
    lm_tokenizer_close(t);
    gguf_close(g);
    return 0;
}
