/* chat.h: a context and a question as the prompt of a chat model, cut in two where the question begins.

   lm_chat c; lm_ids prefix = {0}, suffix = {0};
   if (lm_chat_open(&c, gguf, tokenizer, NULL, NULL, err, sizeof err)) return fprintf(stderr, "%s\n", err), 1;
   lm_chat_prefix(&c, context, context_len, &prefix);      BOS, system turn, opening of the user turn, context
   lm_chat_suffix(&c, question, question_len, &suffix);    question, end of the user turn, opening of the answer

   prefix.n is T_c. The two are tokenised apart, so that no merge crosses the boundary and one compressed context serves
   any number of questions. The question joins the context as it is: begin it with the line breaks it should have.
   Only the format's own markers become special tokens. A context or question that holds "<|im_end|>" holds those ten
   characters; within a text the ids are those of the whole turn, as when a template is filled in first.

   Formats: chatml, llama3, llama2, raw (no markers at all). No Jinja is interpreted: a template's format is told by its
   markers, and its default system text is one that stands in it in full. What a template computes, such as the dates in
   Llama 3.1's system turn, is left out. Where a vocabulary has no token for a marker (Llama 2's [INST]), the marker is
   text, and no one can tell it from the same text in a context. */
#ifndef LM_CHAT_H
#define LM_CHAT_H

#include "gguf.h"
#include "tokenizer.h"

/* Token ids that grow at the end; {0} is empty, free(ids.v) ends it. */
typedef struct {
    int32_t *v; /* [n], room for cap */
    int64_t n, cap;
} lm_ids;

typedef struct {
    const lm_tokenizer *tokenizer;
    const struct lm_chat_format *format;
    char *system;      /* zero-terminated; NULL: no system turn */
    int32_t stops[3];  /* the tokens that end an answer */
    int n_stops;
} lm_chat;

/* 0 = ok; else err holds one line. The tokenizer must outlive the chat, the gguf need not.

   format   a name, or NULL for the one whose marker is in the file's template
   system   the system text, "" for none, or NULL for the template's default */
int lm_chat_open(lm_chat *c, const gguf *g, const lm_tokenizer *t, const char *format, const char *system,
                 char *err, size_t err_size);
void lm_chat_close(lm_chat *c);
const char *lm_chat_format_name(const lm_chat *c);

/* Append to out; 0 = ok, -1 = out of memory. */
int lm_chat_prefix(const lm_chat *c, const char *context, size_t len, lm_ids *out);
int lm_chat_suffix(const lm_chat *c, const char *question, size_t len, lm_ids *out);

bool lm_chat_is_stop(const lm_chat *c, int32_t id);

#endif
