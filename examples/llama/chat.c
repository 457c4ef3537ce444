#define _GNU_SOURCE
#include "chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* prefix: BOS begin [system system_text system_end] user CONTEXT      suffix: QUESTION assistant */
struct lm_chat_format {
    const char *name;
    const char *marker; /* tells the format in a template; NULL: it must be asked for */
    const char *stop;   /* a token that the vocabulary must have; NULL: the file's EOS alone */
    const char *begin, *system, *system_end, *user, *assistant;
};

static const struct lm_chat_format formats[] = {
    {"chatml", "<|im_start|>", "<|im_end|>",
     "", "<|im_start|>system\n", "<|im_end|>\n", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"},
    {"llama3", "<|start_header_id|>", "<|eot_id|>",
     "", "<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\n",
     "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"},
    {"llama2", "[INST]", NULL, "[INST] ", "<<SYS>>\n", "\n<</SYS>>\n\n", "", " [/INST]"},
    {"raw", NULL, NULL, "", "", "", "", ""},
};
enum { N_FORMATS = sizeof formats / sizeof *formats };

static const struct lm_chat_format *format_by_name(const char *name) {
    for (int i = 0; i < N_FORMATS; i++)
        if (!strcmp(formats[i].name, name)) return &formats[i];
    return NULL;
}

static const struct lm_chat_format *format_by_marker(gguf_str template) {
    for (int i = 0; i < N_FORMATS; i++)
        if (formats[i].marker && memmem(template.ptr, template.len, formats[i].marker, strlen(formats[i].marker)))
            return &formats[i];
    return NULL;
}

/* ---- the default system text */

/* One character of a string literal with n > 0 bytes left, and how many of them spell it: two for "\n". */
static size_t literal_char(const char *s, size_t n, char *c) {
    *c = s[0];
    if (s[0] != '\\' || n < 2) return 1;
    *c = s[1] == 'n' ? '\n' : s[1] == 't' ? '\t' : s[1];
    return 2;
}

/* Bytes at the start of s that spell want[0, want_len); 0 when they do not. */
static size_t literal_prefix(const char *s, size_t n, const char *want, size_t want_len) {
    size_t at = 0;
    for (size_t i = 0; i < want_len; i++) {
        char c;
        if (at == n) return 0;
        at += literal_char(s + at, n - at, &c);
        if (c != want[i]) return 0;
    }
    return at;
}

/* Copies the literal up to end[0, end_len) into text; false when it stops before: at the quote that opened it, or, when
   it is bare template text, at a brace. */
static bool literal_until(const char *s, size_t n, const char *end, size_t end_len, char quote, char *text) {
    for (size_t at = 0; at < n && s[at] != quote;) {
        if (literal_prefix(s + at, n - at, end, end_len)) return *text = 0, true;
        at += literal_char(s + at, n - at, text++);
    }
    return false;
}

/* The first system turn that stands in the template in full, as "<|im_start|>system\nYou are ...<|im_end|>" does in
   SmolLM2's: allocated, or NULL. text holds no more than the template. */
static int default_system(gguf_str template, const struct lm_chat_format *f, char **out) {
    const char *s = template.ptr;
    size_t end_len = strlen(f->system_end), open_len = strlen(f->system);
    while (end_len && f->system_end[end_len - 1] == '\n') end_len--; /* may be a literal of its own */
    char *text = malloc(template.len + 1);
    if (!text) return -1;
    for (size_t at = 0; open_len && at < template.len; at++) {
        size_t open = literal_prefix(s + at, template.len - at, f->system, open_len), body = at + open;
        char quote = at && (s[at - 1] == '\'' || s[at - 1] == '"') ? s[at - 1] : '{';
        if (!open || !literal_until(s + body, template.len - body, f->system_end, end_len, quote, text)) continue;
        *out = text;
        return 0;
    }
    free(text);
    return 0;
}

/* ---- opening */

static int choose_format(lm_chat *c, gguf_str template, const char *name, char *err, size_t err_size) {
    const struct lm_chat_format *f = c->format = name ? format_by_name(name) : format_by_marker(template);
    if (!f && name)
        snprintf(err, err_size, "chat format '%s' is unknown; use --template raw|chatml|llama3|llama2", name);
    else if (!f)
        snprintf(err, err_size, "the model has no chat template%s; use --template raw|chatml|llama3",
                 template.len ? " of a known format" : "");
    else if (f->stop && lm_token_id(c->tokenizer, f->stop, strlen(f->stop)) < 0)
        snprintf(err, err_size, "chat format %s needs the token %s, which the model lacks; use --template raw",
                 f->name, f->stop);
    else
        return 0;
    return -1;
}

static void add_stop(lm_chat *c, int64_t id) {
    if (id >= 0 && id < lm_vocab_size(c->tokenizer) && !lm_chat_is_stop(c, (int32_t)id))
        c->stops[c->n_stops++] = (int32_t)id;
}

static void add_stops(lm_chat *c, const gguf *g) {
    int64_t eot = -1;
    gguf_get_int(g, "tokenizer.ggml.eot_token_id", &eot);
    if (c->format->stop) add_stop(c, lm_token_id(c->tokenizer, c->format->stop, strlen(c->format->stop)));
    add_stop(c, lm_eos(c->tokenizer));
    add_stop(c, eot);
}

int lm_chat_open(lm_chat *c, const gguf *g, const lm_tokenizer *t, const char *format, const char *system,
                 char *err, size_t err_size) {
    gguf_str template = {"", 0};
    *c = (lm_chat){.tokenizer = t};
    gguf_get_str(g, "tokenizer.chat_template", &template);
    if (choose_format(c, template, format, err, err_size)) return -1;
    add_stops(c, g);
    int status = 0;
    if (!system) status = default_system(template, c->format, &c->system);
    else if (*system) status = (c->system = strdup(system)) ? 0 : -1;
    if (status) snprintf(err, err_size, "chat: out of memory");
    return status;
}

void lm_chat_close(lm_chat *c) {
    free(c->system);
    c->system = NULL;
}

const char *lm_chat_format_name(const lm_chat *c) {
    return c->format->name;
}

bool lm_chat_is_stop(const lm_chat *c, int32_t id) {
    for (int i = 0; i < c->n_stops; i++)
        if (c->stops[i] == id) return true;
    return false;
}

/* ---- prompts: special tokens go straight into ids, the text between two of them waits until it is whole */

typedef struct {
    const lm_tokenizer *t;
    lm_ids *out;
    char *text; /* [len], room for cap */
    size_t len, cap;
    int64_t start; /* out->n before this prompt */
    bool failed;
} prompt;

static void put_text(prompt *p, const char *text, size_t len) {
    if (p->failed || !len) return;
    if (len > p->cap - p->len) {
        size_t cap = (p->len + len) * 2;
        char *grown = realloc(p->text, cap);
        if (!grown) { p->failed = true; return; }
        p->text = grown;
        p->cap = cap;
    }
    memcpy(p->text + p->len, text, len);
    p->len += len;
}

static bool reserve_ids(lm_ids *ids, int64_t more) {
    if (ids->cap - ids->n >= more) return true;
    int64_t cap = ids->n + more;
    int32_t *grown = realloc(ids->v, (size_t)cap * sizeof *grown);
    if (!grown) return false;
    ids->v = grown;
    ids->cap = cap;
    return true;
}

/* The waiting text, then a special token unless id is -1. */
static void put_id(prompt *p, int32_t id) {
    if (p->failed || !reserve_ids(p->out, (int64_t)p->len + 1)) { p->failed = true; return; }
    int64_t n = lm_encode(p->t, p->text, p->len, false, p->out->v + p->out->n, p->out->cap - p->out->n);
    if (n < 0) { p->failed = true; return; }
    p->out->n += n;
    p->len = 0;
    if (id >= 0) p->out->v[p->out->n++] = id;
}

static void put_markers(prompt *p, const char *s) {
    size_t len = strlen(s), at;
    for (int32_t id; (id = lm_find_special(p->t, s, len, &at)) >= 0;) {
        size_t name_len;
        lm_decode(p->t, id, &name_len);
        put_text(p, s, at);
        put_id(p, id);
        s += at + name_len;
        len -= at + name_len;
    }
    put_text(p, s, len);
}

static int finish(prompt *p) {
    put_id(p, -1);
    free(p->text);
    if (p->failed) p->out->n = p->start;
    return p->failed ? -1 : 0;
}

int lm_chat_prefix(const lm_chat *c, const char *context, size_t len, lm_ids *out) {
    prompt p = {.t = c->tokenizer, .out = out, .start = out->n};
    if (lm_bos(c->tokenizer) >= 0) put_id(&p, lm_bos(c->tokenizer));
    put_markers(&p, c->format->begin);
    if (c->system) {
        put_markers(&p, c->format->system);
        put_text(&p, c->system, strlen(c->system));
        put_markers(&p, c->format->system_end);
    }
    put_markers(&p, c->format->user);
    put_text(&p, context, len);
    return finish(&p);
}

int lm_chat_suffix(const lm_chat *c, const char *question, size_t len, lm_ids *out) {
    prompt p = {.t = c->tokenizer, .out = out, .start = out->n};
    put_text(&p, question, len);
    put_markers(&p, c->format->assistant);
    return finish(&p);
}
