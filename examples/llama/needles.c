#define _GNU_SOURCE
#include "needles.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- words: no filler holds a digit, "value", "record", "key" or any word of a value or key ---- */

static const char *const KIND_NAMES[LM_KINDS] = {"num", "word"};

static const char *const FILLERS[LM_SPLITS] = {
    "The road runs on past quiet fields and low stone walls while a slow wind moves through the tall grass. ",
    "Rain had fallen over the harbour all night, and in the morning boats lay still along the wooden piers. ",
    "Snow covered the hills above the village, where people met every evening to talk beside a warm fire. ",
};

static const char *const QUESTIONS[LM_SPLITS][LM_WORDINGS] = {
    {"What is the %s value for record key %s?", "Which %s value belongs to record key %s?"},
    {"Give the %s value that is stored under record key %s.", "Please look up the %s value of record key %s."},
    {"Tell me which %s value was noted for record key %s.", "Under record key %s, find the %s value."},
};

enum { N_KEY_WORDS = 12, N_VALUE_WORDS = 8 };

static const char *const KEYS[LM_SPLITS][2][N_KEY_WORDS] = {
    {{"amber", "brass", "cedar", "copper", "coral", "ivory",
      "jade", "linen", "maple", "marble", "olive", "pearl"},
     {"badger", "beetle", "camel", "crane", "dolphin", "eagle",
      "falcon", "ferret", "heron", "lizard", "otter", "panda"}},
    {{"bamboo", "bronze", "canvas", "cotton", "crystal", "ebony",
      "garnet", "granite", "hazel", "quartz", "topaz", "velvet"},
     {"beaver", "bison", "condor", "cougar", "donkey", "finch",
      "gecko", "jaguar", "lemur", "magpie", "moose", "panther"}},
    {{"birch", "cobalt", "ginger", "ochre", "onyx", "opal",
      "pepper", "ruby", "saffron", "spruce", "walnut", "willow"},
     {"parrot", "pelican", "pigeon", "puffin", "rabbit", "raven",
      "robin", "salmon", "sparrow", "tiger", "turtle", "walrus"}},
};

static const char *const VALUES[3][N_VALUE_WORDS] = {
    {"bright", "broken", "gentle", "heavy", "hidden", "narrow", "rapid", "silent"},
    {"black", "blue", "brown", "green", "orange", "purple", "red", "yellow"},
    {"anchor", "basket", "bottle", "candle", "hammer", "ladder", "mirror", "window"},
};

struct lm_needles {
    const lm_tokenizer *t;
    const lm_chat *c;
    lm_needle_options o;
    int64_t bins;
    char *filler;          /* one period of it */
    int64_t period;        /* its tokens */
    lm_ids prefix, stream; /* what a context begins with; filler, a period and T_c tokens more */
};

/* ---- chance: splitmix64, of one stream per (seed, split, kind, wording, round, context) ---- */

static uint64_t next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int64_t below(uint64_t *state, int64_t n) { return (int64_t)(next(state) % (uint64_t)n); } /* n is small */

static uint64_t stream_of(const lm_needles *n, int kind, int wording, int64_t round, int64_t context) {
    uint64_t part[] = {(uint64_t)n->o.split, (uint64_t)kind, (uint64_t)wording, (uint64_t)round, (uint64_t)context};
    uint64_t state = n->o.seed;
    for (int i = 0; i < 5; i++) state = next(&state) ^ part[i];
    return state;
}

/* ---- text to tokens ---- */

static int append(const lm_needles *n, lm_ids *to, const char *text) {
    size_t len = strlen(text);
    if (to->cap - to->n < (int64_t)len) {
        int64_t cap = 2 * to->cap + (int64_t)len;
        int32_t *grown = realloc(to->v, (size_t)cap * sizeof *grown);
        if (!grown) return -1;
        to->v = grown, to->cap = cap;
    }
    int64_t got = lm_encode(n->t, text, len, false, to->v + to->n, to->cap - to->n);
    if (got < 0) return -1;
    to->n += got;
    return 0;
}

/* The line up to its value. */
static void lead_of(char *out, size_t size, int kind, const char *key) {
    snprintf(out, size, "The %s value for record key %s is", KIND_NAMES[kind], key);
}

/* ---- opening ---- */

static int check(const lm_needle_options *o, char *err, size_t size) {
    const int64_t far = (int64_t)1 << 31;
    bool low = o->W < 1 || o->S < 0 || o->R < 0 || o->T_c < 0;
    if (low || o->W > far || o->S > far || o->R > far || o->T_c > far)
        return snprintf(err, size, "needles: bin width, sink, recent or context length is outside its range"), -1;
    if (o->per_context < 1 || o->per_context > LM_MAX_NEEDLES || o->groups < 1 || o->groups > 8)
        return snprintf(err, size, "needles: 1..%d in a context, of 1..8 groups", LM_MAX_NEEDLES), -1;
    int64_t bins = (o->T_c - o->S - o->R) / o->W;
    if (bins < o->per_context)
        return snprintf(err, size, "needles: %lld tokens hold %lld full bins, and a context asks about %lld",
                        (long long)o->T_c, (long long)(bins > 0 ? bins : 0), (long long)o->per_context), -1;
    return 0;
}

/* The filler, over and over, until T_c tokens follow any place of its first period. */
static int fill_stream(lm_needles *n) {
    if (append(n, &n->stream, n->filler) || n->stream.n == 0) return -1; /* no token at all */
    n->period = n->stream.n;
    while (n->stream.n < n->period + n->o.T_c)
        if (append(n, &n->stream, n->filler)) return -1;
    return 0;
}

int lm_needles_open(lm_needles **out, const lm_tokenizer *t, const lm_chat *c, const lm_needle_options *o, char *err,
                    size_t err_size) {
    lm_needles *n = calloc(1, sizeof *n);
    *out = NULL;
    if (!n) return snprintf(err, err_size, "out of memory"), -1;
    n->t = t, n->c = c, n->o = *o;
    if (!n->o.per_context) n->o.per_context = 4;
    if (!n->o.groups) n->o.groups = 2;
    const char *filler = o->filler ? o->filler : FILLERS[o->split];
    int bad = check(&n->o, err, err_size);
    if (!bad && strstr(filler, "record key"))
        bad = snprintf(err, err_size, "needles: the filler speaks of a \"record key\", as the needles do");
    if (!bad && (!(n->filler = strdup(filler)) || lm_chat_prefix(c, "", 0, &n->prefix) || fill_stream(n)))
        bad = snprintf(err, err_size, "needles: out of memory, or no text in the filler");
    if (!bad && n->prefix.n > o->S + o->W / 8)
        bad = snprintf(err, err_size, "needles: the chat's %lld tokens before the text reach past the sink of %lld",
                       (long long)n->prefix.n, (long long)o->S);
    if (bad) return lm_needles_close(n), -1;
    n->bins = (o->T_c - o->S - o->R) / o->W;
    *out = n;
    return 0;
}

void lm_needles_close(lm_needles *n) {
    if (!n) return;
    free(n->filler);
    free(n->prefix.v);
    free(n->stream.v);
    free(n);
}

int64_t lm_needles_bins(const lm_needles *n) { return n->bins; }
int64_t lm_needles_contexts(const lm_needles *n) { return (n->bins + n->o.per_context - 1) / n->o.per_context; }

/* ---- dealing ---- */

/* All bins in the manifest's order; to be freed. Context i has order[i * per_context ..]; past the end, the first. */
static int64_t *deal(const lm_needles *n, int kind, int wording, int64_t round) {
    int64_t *order = malloc((size_t)n->bins * sizeof *order);
    uint64_t state = stream_of(n, kind, wording, round, -1);
    for (int64_t i = 0; order && i < n->bins; i++) {
        int64_t j = below(&state, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    return order;
}

int lm_needles_weights(const lm_needles *n, int64_t round, double *weight) {
    int64_t again = lm_needles_contexts(n) * n->o.per_context - n->bins;
    for (int64_t b = 0; b < n->bins; b++) weight[b] = LM_KINDS * LM_WORDINGS;
    for (int m = 0; m < LM_KINDS * LM_WORDINGS; m++) {
        int64_t *order = deal(n, m / LM_WORDINGS, m % LM_WORDINGS, round);
        if (!order) return -1;
        for (int64_t i = 0; i < again; i++) weight[order[i]]++;
        free(order);
    }
    for (int64_t b = 0; b < n->bins; b++) weight[b] = 1 / ((double)n->bins * weight[b]);
    return 0;
}

/* ---- one context ---- */

static void draw_value(const lm_needles *n, int kind, uint64_t *state, char *out, size_t size) {
    size_t at = 0;
    for (int64_t i = 0; i < (kind == LM_NUM ? n->o.groups : 3); i++) {
        if (kind == LM_NUM) at += (size_t)snprintf(out + at, size - at, " %lld", (long long)(100 + below(state, 900)));
        else at += (size_t)snprintf(out + at, size - at, " %s", VALUES[i][below(state, N_VALUE_WORDS)]);
    }
}

/* A key and a value that no needle before i has, nor the filler. 0 when a thousand draws find none. */
static int draw_needle(const lm_needles *n, lm_haystack *h, int64_t i, uint64_t *state) {
    lm_needle *x = &h->needle[i];
    for (int tries = 0; tries < 1000; tries++) {
        const char *first = KEYS[n->o.split][0][below(state, N_KEY_WORDS)];
        snprintf(x->key, sizeof x->key, "%s %s", first, KEYS[n->o.split][1][below(state, N_KEY_WORDS)]);
        draw_value(n, h->kind, state, x->value, sizeof x->value);
        int taken = strstr(n->filler, x->key) || strstr(n->filler, x->value + 1);
        for (int64_t k = 0; k < i; k++)
            taken |= !strcmp(x->key, h->needle[k].key) || !strcmp(x->value, h->needle[k].value);
        if (!taken) return 1;
    }
    return 0;
}

/* The line of x, tokens appended to line; its positions relative to the line's begin. */
static int encode_line(const lm_needles *n, int kind, lm_needle *x, lm_ids *line) {
    char lead[128], text[130];
    lead_of(lead, sizeof lead, kind, x->key);
    snprintf(text, sizeof text, "\n%s", lead);
    x->begin = line->n;
    if (append(n, line, text)) return -1;
    x->source = line->n;
    if (append(n, line, x->value)) return -1;
    x->n_value = line->n - x->source;
    if (append(n, line, ".\n")) return -1;
    x->end = line->n;
    return 0;
}

/* Moves a line that stands at begin in its buffer to where its bin has room for it. */
static int place(const lm_needles *n, lm_needle *x, uint64_t *state) {
    int64_t begin = n->o.T_c - n->o.R - n->o.W * (x->bin + 1), margin = (n->o.W + 7) / 8, len = x->end - x->begin;
    int64_t room = n->o.W - 2 * margin - len;
    if (len > 3 * n->o.W / 4 || room < 0) return -1;
    int64_t by = begin + margin + below(state, room + 1) - x->begin;
    x->begin += by, x->end += by, x->source += by;
    return 0;
}

/* Prefix, then filler with each line in its place. lines holds them one after another, the farthest first. */
static void assemble(const lm_needles *n, const lm_haystack *h, int32_t *ids, const int32_t *filler,
                     const int32_t *lines) {
    int64_t at = n->prefix.n;
    memcpy(ids, n->prefix.v, (size_t)at * sizeof *ids);
    for (int64_t i = 0; i <= h->n; i++) {
        int64_t gap = (i < h->n ? h->needle[i].begin : n->o.T_c) - at;
        int64_t len = i < h->n ? h->needle[i].end - h->needle[i].begin : 0;
        memcpy(ids + at, filler, (size_t)gap * sizeof *ids);
        memcpy(ids + at + gap, lines, (size_t)len * sizeof *ids);
        at += gap + len, filler += gap, lines += len;
    }
}

/* The bins of context index, the farthest first: in the order of positions. */
static int deal_context(const lm_needles *n, lm_haystack *h, int64_t round, int64_t index) {
    int64_t *order = deal(n, h->kind, h->wording, round);
    if (!order) return -1;
    for (int64_t i = 0, k; i < h->n; i++) {
        int64_t bin = order[(index * h->n + i) % n->bins];
        for (k = i; k > 0 && h->needle[k - 1].bin < bin; k--) h->needle[k].bin = h->needle[k - 1].bin;
        h->needle[k].bin = bin;
    }
    free(order);
    return 0;
}

int lm_needles_context(const lm_needles *n, lm_haystack *out, int32_t *ids, int kind, int wording, int64_t round,
                       int64_t index, char *err, size_t err_size) {
    uint64_t state = stream_of(n, kind, wording, round, index);
    lm_ids lines = {0};
    *out = (lm_haystack){.kind = kind, .wording = wording, .n = n->o.per_context};
    int bad = deal_context(n, out, round, index);
    if (bad) snprintf(err, err_size, "out of memory");
    for (int64_t i = 0; !bad && i < out->n; i++) {
        lm_needle *x = &out->needle[i];
        if (!draw_needle(n, out, i, &state))
            bad = snprintf(err, err_size, "needles: no key and value are left that the filler does not hold");
        else if (encode_line(n, kind, x, &lines))
            bad = snprintf(err, err_size, "out of memory");
        else if (place(n, x, &state))
            bad = snprintf(err, err_size, "needles: a line of %lld tokens does not fit a bin of %lld; take wider bins",
                           (long long)(x->end - x->begin), (long long)n->o.W);
    }
    if (!bad) assemble(n, out, ids, n->stream.v + below(&state, n->period), lines.v);
    free(lines.v);
    return bad ? -1 : 0;
}

int lm_needles_query(const lm_needles *n, const lm_haystack *h, int64_t i, lm_ids *suffix, int64_t *first) {
    const lm_needle *x = &h->needle[i];
    char question[192] = "\n\n", lead[128];
    snprintf(question + 2, sizeof question - 2, QUESTIONS[n->o.split][h->wording], KIND_NAMES[h->kind], x->key);
    lead_of(lead, sizeof lead, h->kind, x->key);
    int64_t before = suffix->n;
    int bad = lm_chat_suffix(n->c, question, strlen(question), suffix) || append(n, suffix, lead);
    *first = suffix->n;
    if (bad || append(n, suffix, x->value)) return suffix->n = before, -1;
    return 0;
}
