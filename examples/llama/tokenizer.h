/* tokenizer.h: byte-level BPE as a GGUF describes it, text to token ids and back.

   lm_tokenizer *t; char err[256];
   if (lm_tokenizer_open(&t, gguf, err, sizeof err)) return fprintf(stderr, "%s\n", err), 1;
   int64_t n = lm_encode(t, text, len, false, ids, cap);

   text -> (special tokens, when asked) -> pieces, by the regex that tokenizer.ggml.pre names -> bytes -> merges -> ids

   Families: gpt2 (also gpt-2), llama3 (llama-v3, llama-bpe), qwen2, smollm. The ids are those of the Hugging Face
   tokenizer of the same family, except:
   - Text is taken as it stands. Qwen2's tokenizer first normalises to NFC; here the ids agree for text that already is
     NFC, and any other text keeps its bytes.
   - Invalid UTF-8 (overlong forms and surrogates too) has no text: each such byte is a piece and a token of its own,
     and the valid stretches between are encoded apart from each other.
   - Letters, digits and spaces are what the Unicode version of the linked PCRE2 says.
   A byte for which the vocabulary has no token leaves no id, as there: SmolLM2 lacks 0xff and 20 more, none of them
   printable text. Where all 256 exist, decoding gives back every input exactly.

   Nothing changes after lm_tokenizer_open: any number of threads may use one tokenizer. It does not need the gguf. */
#ifndef LM_TOKENIZER_H
#define LM_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gguf.h"

typedef struct lm_tokenizer lm_tokenizer;

/* 0 = ok; else *out is NULL and err holds one line. */
int lm_tokenizer_open(lm_tokenizer **out, const gguf *g, char *err, size_t err_size);
void lm_tokenizer_close(lm_tokenizer *t);

/* Returns the number of ids, which is at most len, and writes the first cap of them; -1 when out of memory.
   No BOS is added. Time is n log n in the longest piece and linear in the text.

   parse_special   the text's control and user-defined tokens become their ids, the earliest first and of those the
                   longest; otherwise they are text like any other
   ids             [cap], may be NULL when cap is 0 */
int64_t lm_encode(const lm_tokenizer *t, const char *text, size_t len, bool parse_special, int32_t *ids, int64_t cap);

/* The bytes of one token, [*len], owned by t; a special token's are its name. id must lie in the vocabulary. */
const char *lm_decode(const lm_tokenizer *t, int32_t id, size_t *len);

/* The id of the token with exactly these bytes, special tokens first; -1 when there is none. */
int32_t lm_token_id(const lm_tokenizer *t, const char *text, size_t len);

/* The first special token in text: its id, and where it starts; -1 and *at = len when there is none. */
int32_t lm_find_special(const lm_tokenizer *t, const char *text, size_t len, size_t *at);

int32_t lm_vocab_size(const lm_tokenizer *t);
int32_t lm_bos(const lm_tokenizer *t); /* the id that every prompt starts with; -1 when the model wants none */
int32_t lm_eos(const lm_tokenizer *t); /* -1 when the file names none */

/* The pieces alone: how many, and the byte offset of each one's end in ends[cap]; -1 when out of memory. */
int64_t lm_pieces(const lm_tokenizer *t, const char *text, size_t len, size_t *ends, int64_t cap);

#endif
