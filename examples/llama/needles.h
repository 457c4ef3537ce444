/* needles.h: contexts with facts in them and questions about the facts, which patterns are learned from and scored on.

   lm_needles *n; char err[256]; lm_haystack hay; lm_ids suffix = {0}; int64_t first;
   lm_needle_options o = {.T_c = 7936, .W = 128, .S = 128, .R = 1024};
   if (lm_needles_open(&n, tokenizer, &chat, &o, err, sizeof err)) return fprintf(stderr, "%s\n", err), 1;
   lm_needles_context(n, &hay, ids, LM_NUM, 0, round, i, err, sizeof err);     ids [T_c]
   lm_needles_query(n, &hay, 2, &suffix, &first);      teacher-forced: suffix.v[first ..] is the value

   context   chat prefix, filler, and lines such as "The num value for record key amber falcon is 482 915.", T_c tokens
   suffix    question, opening of the answer, the line up to the value, the value
   A line lies inside one full bin of W tokens, breaks included, at least W/8 from both its edges, and is at most 3W/4
   long. Context and suffix are tokenised apart, and the value apart from what is around it: its tokens are the same in
   both, and source positions exact.

   A manifest, of one kind, wording and round, is as many contexts as it takes to ask about every bin once: bins are
   shuffled and dealt; the last context is filled up with bins dealt before. A step is the manifests of both kinds and
   both wordings. Everything follows from the options: any context can be made alone, on any thread.

   The three splits share no wording of questions, no key, no filler and no random number. */
#ifndef LM_NEEDLES_H
#define LM_NEEDLES_H

#include "chat.h"

enum { LM_NUM, LM_WORD, LM_KINDS };
enum { LM_TRAIN, LM_CHOOSE, LM_REPORT, LM_SPLITS };
enum { LM_WORDINGS = 2, LM_MAX_NEEDLES = 64 };

typedef struct {
    int64_t T_c, W, S, R;
    int64_t per_context; /* needles, each in a bin of its own, 1..LM_MAX_NEEDLES; 0: 4 */
    int64_t groups;      /* of three digits in a number, 1..8; 0: 2 */
    int split;
    uint64_t seed;
    const char *filler;  /* text, repeated as needed, in which every context begins somewhere else; copied;
                            NULL: the split's own sentence */
} lm_needle_options;

typedef struct {
    int64_t bin, begin, end; /* the line's tokens, breaks included: [begin, end) of the context */
    int64_t source, n_value; /* the value's tokens: context positions source .. source + n_value - 1 */
    char key[32], value[64]; /* value begins with a space */
} lm_needle;

typedef struct {
    int kind, wording;
    int64_t n;
    lm_needle needle[LM_MAX_NEEDLES];
} lm_haystack;

typedef struct lm_needles lm_needles;

/* 0 = ok; else *out is NULL and err holds one line. tokenizer and chat must outlive it. */
int lm_needles_open(lm_needles **out, const lm_tokenizer *t, const lm_chat *c, const lm_needle_options *o, char *err,
                    size_t err_size);
void lm_needles_close(lm_needles *n);

int64_t lm_needles_bins(const lm_needles *n);     /* full bins of T_c: all are covered */
int64_t lm_needles_contexts(const lm_needles *n); /* in a manifest */

/* Context index of the manifest: ids[T_c], and where the needles are. 0 = ok; else err holds one line. */
int lm_needles_context(const lm_needles *n, lm_haystack *out, int32_t *ids, int kind, int wording, int64_t round,
                       int64_t index, char *err, size_t err_size);

/* Appends the suffix that asks for needle i; *first <- where its value begins in it. 0 = ok, -1 = out of memory. */
int lm_needles_query(const lm_needles *n, const lm_haystack *h, int64_t i, lm_ids *suffix, int64_t *first);

/* weight[bins] of a query about each bin, 1 / (bins * queries about it in the step): a step's queries sum to 1.
   0 = ok, -1 = out of memory. */
int lm_needles_weights(const lm_needles *n, int64_t round, double *weight);

#endif
