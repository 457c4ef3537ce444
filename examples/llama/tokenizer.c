/* tokenizer.c: see tokenizer.h.   [FAMILY]  [VOCAB]  [MERGES]  [OPEN]  [PIECES]  [MERGE]  [ENCODE] */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer.h"

#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* [FAMILY] one regex each, matched where the piece before ended. SPACE is Unicode's White_Space; PCRE2's own \s would
   also take U+180E. Every character is in one of the classes, so that something always matches.
   smollm splits off single digits first and the rest afterwards; since no piece of the rest can then see past a digit,
   its lookahead takes a digit for the end of the text. */
#define SPACE  "\\t-\\r\\x{85}\\p{Z}"
#define OTHER  "[^" SPACE "\\p{L}\\p{N}]"
#define GAP    "[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"
#define SUFFIX "'(?:[sdmt]|ll|ve|re)"
#define WORD   "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
#define LINE   " ?" OTHER "+[\\r\\n]*|[" SPACE "]*[\\r\\n]+|" GAP

typedef struct {
    const char *names[4];
    const char *regex;
    bool whole_pieces; /* a piece that is a token is taken as it is, even where merges would not lead there */
    bool add_bos;      /* when the file does not say */
} family;

static const family families[] = {
    {{"gpt2", "gpt-2"}, SUFFIX "| ?\\p{L}+| ?\\p{N}+| ?" OTHER "+|" GAP, false, false},
    {{"llama3", "llama-v3", "llama-bpe"}, WORD "|\\p{N}{1,3}|" LINE, true, true},
    {{"qwen2"}, WORD "|\\p{N}|" LINE, false, false},
    {{"smollm"}, "\\p{N}|" SUFFIX "| ?\\p{L}+| ?" OTHER "+|[" SPACE "]+(?![^" SPACE "\\p{N}])|[" SPACE "]+",
     false, false},
};

typedef struct {
    const char *name; /* [len], len > 0 */
    size_t len;
    int32_t id;
} special;

typedef struct {
    int32_t left, right; /* token ids; left = -1: an empty slot */
    int32_t rank;        /* lower ranks merge first */
    int32_t merged;
} pair;

struct lm_tokenizer {
    const family *family;
    pcre2_code *regex;
    pcre2_match_context *limits;
    int32_t n_tokens;
    int32_t bos, eos;
    int32_t byte_id[256];   /* -1 where a byte is no token */
    size_t *start;          /* [n_tokens + 1] offsets into bytes */
    char *bytes;            /* every token's bytes in order of id */
    int32_t *vocab;         /* [vocab_mask + 1] ids of the ordinary tokens, hashed by their bytes; -1 = empty */
    uint64_t vocab_mask;
    pair *pairs;            /* [pair_mask + 1], hashed by (left, right) */
    uint64_t pair_mask;
    special *specials;      /* [n_special] by first byte, then longest first */
    size_t n_special;
    size_t special_of[257]; /* those that start with byte c: specials[special_of[c] .. special_of[c + 1]) */
};

static bool str_is(gguf_str s, const char *z) {
    return s.len == strlen(z) && !memcmp(s.ptr, z, s.len);
}

static const family *find_family(gguf_str pre) {
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        for (const char *const *name = families[i].names; name < families[i].names + 4 && *name; name++)
            if (str_is(pre, *name)) return &families[i];
    return NULL;
}

/* [VOCAB] */

/* An ordinary token is spelled in an alphabet of 256 printable characters, one per byte: printable Latin-1 bytes stand
   for themselves, the others are numbered from U+0100 upwards. */
static void spell_bytes(int16_t byte_of[512]) {
    int16_t next = 256;
    memset(byte_of, -1, 512 * sizeof *byte_of);
    for (int16_t b = 0; b < 256; b++) {
        bool printable = (b > 32 && b < 127) || (b > 160 && b != 173);
        byte_of[printable ? b : next++] = b;
    }
}

/* Writes at most s.len bytes. A text with a character outside the alphabet stands for itself. */
static size_t unspell(const int16_t byte_of[512], gguf_str s, char *out) {
    size_t n = 0;
    for (size_t i = 0; i < s.len; i++) {
        unsigned c = (unsigned char)s.ptr[i];
        int byte = -1;
        if (c < 0x80) byte = byte_of[c];
        else if (c >= 0xc2 && c <= 0xc7 && i + 1 < s.len) byte = byte_of[(c & 31) << 6 | (s.ptr[++i] & 63)];
        if (byte < 0) return memcpy(out, s.ptr, s.len), s.len;
        out[n++] = (char)byte;
    }
    return n;
}

static size_t token_len(const lm_tokenizer *t, int32_t id) {
    return t->start[id + 1] - t->start[id];
}

static bool token_is(const lm_tokenizer *t, int32_t id, const char *text, size_t len) {
    return token_len(t, id) == len && !memcmp(t->bytes + t->start[id], text, len);
}

/* The slot of an ordinary token, or the empty slot where it belongs. */
static int32_t *vocab_slot(const lm_tokenizer *t, const char *text, size_t len) {
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < len; i++) h = (h ^ (unsigned char)text[i]) * 0x100000001b3u;
    h ^= h >> 32;
    while (t->vocab[h & t->vocab_mask] >= 0 && !token_is(t, t->vocab[h & t->vocab_mask], text, len)) h++;
    return &t->vocab[h & t->vocab_mask];
}

static int compare_specials(const void *x, const void *y) {
    const special *a = x, *b = y;
    if (*a->name != *b->name) return (unsigned char)*a->name < (unsigned char)*b->name ? -1 : 1;
    if (a->len != b->len) return a->len > b->len ? -1 : 1;
    return (a->id > b->id) - (a->id < b->id);
}

static void index_specials(lm_tokenizer *t) {
    qsort(t->specials, t->n_special, sizeof *t->specials, compare_specials);
    for (size_t i = 0; i < t->n_special; i++) t->special_of[(unsigned char)*t->specials[i].name + 1]++;
    for (int c = 0; c < 256; c++) t->special_of[c + 1] += t->special_of[c];
}

int32_t lm_find_special(const lm_tokenizer *t, const char *text, size_t len, size_t *at) {
    for (*at = 0; *at < len; ++*at) {
        const size_t *range = &t->special_of[(unsigned char)text[*at]];
        for (const special *s = t->specials + range[0]; s < t->specials + range[1]; s++)
            if (s->len <= len - *at && !memcmp(s->name, text + *at, s->len)) return s->id;
    }
    return -1;
}

int32_t lm_token_id(const lm_tokenizer *t, const char *text, size_t len) {
    for (const special *s = t->specials; s < t->specials + t->n_special; s++)
        if (s->len == len && !memcmp(s->name, text, len)) return s->id;
    return *vocab_slot(t, text, len);
}

const char *lm_decode(const lm_tokenizer *t, int32_t id, size_t *len) {
    *len = token_len(t, id);
    return t->bytes + t->start[id];
}

int32_t lm_vocab_size(const lm_tokenizer *t) { return t->n_tokens; }
int32_t lm_bos(const lm_tokenizer *t) { return t->bos; }
int32_t lm_eos(const lm_tokenizer *t) { return t->eos; }

/* [MERGES] */

/* The pair's slot, or the empty slot where it belongs. */
static pair *pair_slot(const lm_tokenizer *t, int32_t left, int32_t right) {
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
    h ^= h >> 32;
    while (t->pairs[h & t->pair_mask].left >= 0
           && (t->pairs[h & t->pair_mask].left != left || t->pairs[h & t->pair_mask].right != right)) h++;
    return &t->pairs[h & t->pair_mask];
}

/* [OPEN] */

enum { TYPE_CONTROL = 3, TYPE_USER_DEFINED = 4 };
enum { MAX_COUNT = 1 << 24 }; /* a rank and a position share 64 bits, see [MERGE] */

static bool is_special(const int32_t *types, int64_t id) {
    return types && (types[id] == TYPE_CONTROL || types[id] == TYPE_USER_DEFINED);
}

/* At most half of a table is used. */
static uint64_t table_mask(int64_t n) {
    uint64_t size = 1;
    while (size < (uint64_t)n * 2 + 1) size *= 2;
    return size - 1;
}

static int fail(char *err, size_t err_size, const char *what) {
    snprintf(err, err_size, "tokenizer: %s", what);
    return -1;
}

static int load_tokens(lm_tokenizer *t, const gguf_str *tokens, const int32_t *types, char *err, size_t err_size) {
    int16_t byte_of[512];
    size_t total = 0;
    spell_bytes(byte_of);
    for (int32_t id = 0; id < t->n_tokens; id++) total += tokens[id].len;
    t->vocab_mask = table_mask(t->n_tokens);
    t->start = malloc(((size_t)t->n_tokens + 1) * sizeof *t->start);
    t->bytes = malloc(total + 1);
    t->vocab = malloc((t->vocab_mask + 1) * sizeof *t->vocab);
    t->specials = malloc((size_t)t->n_tokens * sizeof *t->specials);
    if (!t->start || !t->bytes || !t->vocab || !t->specials) return fail(err, err_size, "out of memory");

    memset(t->vocab, -1, (t->vocab_mask + 1) * sizeof *t->vocab);
    t->start[0] = 0;
    for (int32_t id = 0; id < t->n_tokens; id++) {
        char *out = t->bytes + t->start[id];
        size_t n = is_special(types, id) ? tokens[id].len : unspell(byte_of, tokens[id], out);
        t->start[id + 1] = t->start[id] + n;
        if (!is_special(types, id)) {
            *vocab_slot(t, out, n) = id;
        } else if (n) {
            memcpy(out, tokens[id].ptr, n);
            t->specials[t->n_special++] = (special){out, n, id};
        }
    }
    for (int b = 0; b < 256; b++) t->byte_id[b] = *vocab_slot(t, &(char){(char)b}, 1);
    index_specials(t);
    return 0;
}

/* A merge is spelled "left right"; the alphabet has no space. buf holds the longest merge. */
static bool add_merge(lm_tokenizer *t, const int16_t byte_of[512], gguf_str merge, int32_t rank, char *buf) {
    const char *space = merge.len ? memchr(merge.ptr, ' ', merge.len) : NULL;
    if (!space) return false;
    uint64_t left_len = (uint64_t)(space - merge.ptr);
    size_t n = unspell(byte_of, (gguf_str){merge.ptr, left_len}, buf);
    size_t m = unspell(byte_of, (gguf_str){space + 1, merge.len - left_len - 1}, buf + n);
    int32_t left = *vocab_slot(t, buf, n), right = *vocab_slot(t, buf + n, m), merged = *vocab_slot(t, buf, n + m);
    if (left < 0 || right < 0 || merged < 0) return false;
    *pair_slot(t, left, right) = (pair){left, right, rank, merged};
    return true;
}

static int load_merges(lm_tokenizer *t, const gguf_str *merges, int64_t n, char *err, size_t err_size) {
    int16_t byte_of[512];
    size_t longest = 0;
    spell_bytes(byte_of);
    for (int64_t i = 0; i < n; i++) longest = merges[i].len > longest ? merges[i].len : longest;
    t->pair_mask = table_mask(n);
    t->pairs = malloc((t->pair_mask + 1) * sizeof *t->pairs);
    char *buf = malloc(longest + 1);
    if (!t->pairs || !buf) return free(buf), fail(err, err_size, "out of memory");
    for (uint64_t i = 0; i <= t->pair_mask; i++) t->pairs[i].left = -1;
    for (int64_t i = 0; i < n; i++) {
        if (add_merge(t, byte_of, merges[i], (int32_t)i, buf)) continue;
        snprintf(err, err_size, "tokenizer: merge %lld is not two tokens that join into a third", (long long)i);
        return free(buf), -1;
    }
    free(buf);
    return 0;
}

static int compile_regex(lm_tokenizer *t, char *err, size_t err_size) {
    int code;
    PCRE2_SIZE at;
    t->regex = pcre2_compile((PCRE2_SPTR)t->family->regex, PCRE2_ZERO_TERMINATED,
                             PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &code, &at, NULL);
    t->limits = pcre2_match_context_create(NULL);
    if (!t->regex || !t->limits) return fail(err, err_size, "PCRE2 lacks Unicode support, or out of memory");
    pcre2_jit_compile(t->regex, PCRE2_JIT_COMPLETE); /* where there is no JIT, the interpreter runs */
    pcre2_set_match_limit(t->limits, UINT32_MAX); /* matching is linear; the default would cap a run of spaces */
    return 0;
}

/* The value of an id key; -1 when it is absent. */
static int read_id(const lm_tokenizer *t, const gguf *g, const char *key, int32_t *id, char *err, size_t err_size) {
    int64_t value = -1;
    *id = -1;
    if (gguf_get_int(g, key, &value) && (value < 0 || value >= t->n_tokens)) {
        snprintf(err, err_size, "tokenizer: %s is %lld, outside the vocabulary", key, (long long)value);
        return -1;
    }
    *id = (int32_t)value;
    return 0;
}

static int read_bos_eos(lm_tokenizer *t, const gguf *g, char *err, size_t err_size) {
    int64_t add_bos = t->family->add_bos;
    gguf_get_int(g, "tokenizer.ggml.add_bos_token", &add_bos);
    if (read_id(t, g, "tokenizer.ggml.bos_token_id", &t->bos, err, err_size)) return -1;
    if (read_id(t, g, "tokenizer.ggml.eos_token_id", &t->eos, err, err_size)) return -1;
    if (!add_bos) t->bos = -1;
    return 0;
}

static int read_family(lm_tokenizer *t, const gguf *g, char *err, size_t err_size) {
    gguf_str model = {"", 0}, pre = {"", 0};
    gguf_get_str(g, "tokenizer.ggml.model", &model);
    gguf_get_str(g, "tokenizer.ggml.pre", &pre);
    t->family = find_family(pre);
    if (!str_is(model, "gpt2"))
        snprintf(err, err_size, "tokenizer.ggml.model is '%.*s'; only gpt2 (byte-level BPE) is supported",
                 (int)(model.len < 64 ? model.len : 64), model.ptr);
    else if (!t->family)
        snprintf(err, err_size, "tokenizer.ggml.pre is '%.*s'; supported are gpt2, llama3, qwen2 and smollm",
                 (int)(pre.len < 64 ? pre.len : 64), pre.ptr);
    else
        return 0;
    return -1;
}

static int read_vocab(lm_tokenizer *t, const gguf *g, char *err, size_t err_size) {
    const gguf_str *tokens, *merges;
    const int32_t *types = NULL;
    int64_t n_tokens = gguf_get_strs(g, "tokenizer.ggml.tokens", &tokens);
    int64_t n_merges = gguf_get_strs(g, "tokenizer.ggml.merges", &merges);
    int64_t n_types = gguf_get_ints(g, "tokenizer.ggml.token_type", &types);
    if (n_tokens < 1 || n_tokens > MAX_COUNT) return fail(err, err_size, "no tokens, or more than 2^24");
    if (n_merges < 0 || n_merges > MAX_COUNT) return fail(err, err_size, "no merges, or more than 2^24");
    if (n_types >= 0 && n_types != n_tokens) return fail(err, err_size, "as many token types as tokens are needed");
    t->n_tokens = (int32_t)n_tokens;
    if (load_tokens(t, tokens, n_types < 0 ? NULL : types, err, err_size)) return -1;
    return load_merges(t, merges, n_merges, err, err_size);
}

int lm_tokenizer_open(lm_tokenizer **out, const gguf *g, char *err, size_t err_size) {
    lm_tokenizer *t = *out = calloc(1, sizeof *t);
    if (!t) return fail(err, err_size, "out of memory");
    if (!read_family(t, g, err, err_size) && !read_vocab(t, g, err, err_size) && !read_bos_eos(t, g, err, err_size)
        && !compile_regex(t, err, err_size)) return 0;
    lm_tokenizer_close(t);
    *out = NULL;
    return -1;
}

void lm_tokenizer_close(lm_tokenizer *t) {
    if (!t) return;
    pcre2_code_free(t->regex);
    pcre2_match_context_free(t->limits);
    free(t->start);
    free(t->bytes);
    free(t->vocab);
    free(t->pairs);
    free(t->specials);
    free(t);
}

/* [PIECES] */

/* Bytes of the character at s, of which n > 0 may be read; 0 when it is invalid. */
static size_t utf8_len(const unsigned char *s, size_t n) {
    if (s[0] < 0x80) return 1;
    size_t len = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (s[0] < 0xc2 || s[0] > 0xf4 || len > n) return 0;
    for (size_t i = 1; i < len; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xed && s[1] > 0x9f, too_large = s[0] == 0xf4 && s[1] > 0x8f;
    return overlong || surrogate || too_large ? 0 : len;
}

/* Walks over the pieces of text[0, len). */
typedef struct {
    const lm_tokenizer *t;
    pcre2_match_data *match;
    const char *text;
    size_t len;
    size_t start, end; /* the current piece */
    size_t valid_end;  /* text[end, valid_end) is known to be UTF-8, so that PCRE2 need not look again at every piece */
} walker;

static void find_valid_end(walker *w) {
    size_t n = 1;
    for (w->valid_end = w->start; w->valid_end < w->len && n; w->valid_end += n)
        n = utf8_len((const unsigned char *)w->text + w->valid_end, w->len - w->valid_end);
}

/* 1 = a piece, 0 = the text has ended, -1 = out of memory. */
static int next_piece(walker *w) {
    w->start = w->end;
    if (w->start == w->len) return 0;
    if (w->start >= w->valid_end) find_valid_end(w);
    w->end = w->start + 1;
    if (w->start == w->valid_end) return 1;
    if (pcre2_match(w->t->regex, (PCRE2_SPTR)w->text + w->start, w->valid_end - w->start, 0, PCRE2_NO_UTF_CHECK,
                    w->match, w->t->limits) < 0) return -1;
    w->end = w->start + pcre2_get_ovector_pointer(w->match)[1];
    return 1;
}

int64_t lm_pieces(const lm_tokenizer *t, const char *text, size_t len, size_t *ends, int64_t cap) {
    walker w = {.t = t, .match = pcre2_match_data_create(1, NULL), .text = text, .len = len};
    int64_t n = 0;
    int more = w.match ? 1 : -1;
    while (more > 0 && (more = next_piece(&w)) > 0) {
        if (n < cap) ends[n] = w.end;
        n++;
    }
    pcre2_match_data_free(w.match);
    return more < 0 ? -1 : n;
}

/* [MERGE] one piece: a linked list of tokens, and a heap of the pairs that can merge, lowest rank and then leftmost
   first. A pair that another merge has changed in the meantime is found out when it is popped. */

typedef struct {
    int64_t prev, next; /* -1 and the number of bytes at the ends */
    int32_t id;         /* -1: merged into the one before */
} node;

typedef struct {
    const lm_tokenizer *t;
    node *nodes;      /* [room] */
    uint64_t *heap;   /* [2 room]: one per neighbouring pair, and each merge removes one and adds at most two */
    int64_t n_heap;
    size_t room;      /* the longest piece so far */
    int32_t *ids;     /* [cap] */
    int64_t n, cap;
} encoder;

enum { POSITION_BITS = 40 };

static void emit(encoder *e, int32_t id) {
    if (e->n < e->cap) e->ids[e->n] = id;
    e->n++;
}

static void heap_push(encoder *e, uint64_t key) {
    int64_t i = e->n_heap++;
    for (; i > 0 && e->heap[(i - 1) / 2] > key; i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = key;
}

static uint64_t heap_pop(encoder *e) {
    uint64_t top = e->heap[0], last = e->heap[--e->n_heap];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < e->n_heap; i = child) {
        if (child + 1 < e->n_heap && e->heap[child + 1] < e->heap[child]) child++;
        if (e->heap[child] >= last) break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = last;
    return top;
}

static void push_pair(encoder *e, int64_t left, int64_t right) {
    const pair *p = pair_slot(e->t, e->nodes[left].id, e->nodes[right].id);
    if (p->left >= 0) heap_push(e, (uint64_t)p->rank << POSITION_BITS | (uint64_t)left);
}

/* n tokens in nodes; n may be 0. */
static void merge_nodes(encoder *e, int64_t n) {
    node *nodes = e->nodes;
    for (int64_t i = 0; i + 1 < n; i++) push_pair(e, i, i + 1);
    while (e->n_heap) {
        uint64_t key = heap_pop(e);
        int64_t left = (int64_t)(key & ((UINT64_C(1) << POSITION_BITS) - 1)), right = nodes[left].next;
        if (nodes[left].id < 0 || right == n) continue;
        const pair *p = pair_slot(e->t, nodes[left].id, nodes[right].id);
        if (p->left < 0 || (uint64_t)p->rank != key >> POSITION_BITS) continue;
        nodes[left].id = p->merged;
        nodes[left].next = nodes[right].next;
        nodes[right].id = -1;
        if (nodes[left].next < n) {
            nodes[nodes[left].next].prev = left;
            push_pair(e, left, nodes[left].next);
        }
        if (nodes[left].prev >= 0) push_pair(e, nodes[left].prev, left);
    }
}

static bool reserve_nodes(encoder *e, size_t n) {
    if (n <= e->room) return true;
    free(e->nodes);
    free(e->heap);
    e->room = n < 256 ? 256 : n + n / 2;
    e->nodes = malloc(e->room * sizeof *e->nodes);
    e->heap = malloc(e->room * 2 * sizeof *e->heap);
    return e->nodes && e->heap;
}

/* [ENCODE] */

static bool encode_piece(encoder *e, const char *piece, size_t len) {
    int32_t whole = e->t->family->whole_pieces ? *vocab_slot(e->t, piece, len) : -1;
    if (whole >= 0) return emit(e, whole), true;
    if (!reserve_nodes(e, len)) return false;
    int64_t n = 0;
    for (size_t i = 0; i < len; i++) {
        int32_t id = e->t->byte_id[(unsigned char)piece[i]];
        if (id < 0) continue;
        e->nodes[n] = (node){n - 1, n + 1, id};
        n++;
    }
    merge_nodes(e, n);
    for (int64_t i = 0; i < n; i = e->nodes[i].next) emit(e, e->nodes[i].id);
    return true;
}

static bool encode_text(encoder *e, pcre2_match_data *match, const char *text, size_t len) {
    walker w = {.t = e->t, .match = match, .text = text, .len = len};
    int more;
    while ((more = next_piece(&w)) > 0)
        if (!encode_piece(e, text + w.start, w.end - w.start)) return false;
    return more == 0;
}

int64_t lm_encode(const lm_tokenizer *t, const char *text, size_t len, bool parse_special, int32_t *ids, int64_t cap) {
    encoder e = {.t = t, .ids = ids, .cap = cap};
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    bool ok = match != NULL;
    while (ok && len) {
        size_t plain = len;
        int32_t id = parse_special ? lm_find_special(t, text, len, &plain) : -1;
        ok = encode_text(&e, match, text, plain);
        if (id >= 0) {
            emit(&e, id);
            plain += token_len(t, id);
        }
        text += plain;
        len -= plain;
    }
    pcre2_match_data_free(match);
    free(e.nodes);
    free(e.heap);
    return ok ? e.n : -1;
}
