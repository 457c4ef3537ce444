/* model.h: a Llama-family transformer over a Distance-KV cache: Llama, Qwen2 and SmolLM2 graphs from a GGUF file.

   lm_model *m; char err[256];
   if (lm_open(&m, "model.gguf", 2, err, sizeof err)) ...
   lm_prefill(m, &cache, 1, context, T_c, NULL);          // cache: dkv_cache_create from a plan of T_c positions
   lm_eval(m, cache, question, n, T_c, logits, LM_LAST);  // then one token at a time, at T_c + n, ...

   Prefill is layer-major: all T_c tokens pass layer l, whose K and V lie dense in one buffer; the layer is packed into
   the caller's caches, and the buffer serves layer l + 1. Peak KV memory is what is packed plus ONE dense layer.
   Attention is distance_kv.h's alone.

   Letters are those of distance_kv.h; E embedding, F feed-forward, V vocabulary size.
   n = 1 multiplies by the weights as the file has them, activations in 8 bits where those are quantised (the bound is
   in quant.h); n > 1 multiplies dequantised f32 weights by f32 activations. LM_LAST's logits take the first way. */
#ifndef MODEL_H
#define MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "../../distance_kv.h"
#include "gguf.h"

typedef struct lm_model lm_model; /* serves one thread at a time; its work is shared out to threads inside */

typedef struct {
    dkv_shape shape;      /* L, H, Hkv, d_k = d_v */
    int64_t E, F, V;
    int64_t n_ctx;        /* positions the model was made for */
    int64_t n_rot;        /* of each head's dimensions, the first n_rot are rotated */
    bool half_split;      /* pairs are (i, i + n_rot/2), not (2i, 2i + 1) */
    double eps, rope_base, rope_scale; /* positions are divided by rope_scale */
} lm_params;

/* 0 = ok; else *out is NULL and err holds one line that names the key or tensor. threads >= 1. */
int lm_open(lm_model **out, const char *path, int threads, char *err, size_t err_size);
void lm_close(lm_model *m);

const lm_params *lm_get_params(const lm_model *m);
const gguf *lm_get_gguf(const lm_model *m);
const char *lm_error(const lm_model *m); /* the last failure, one line */

typedef struct {
    const dkv_allocator *alloc;                       /* of the dense layer; NULL: malloc */
    void (*progress)(void *user, double done_of_one); /* NULL, or called now and then, last with 1 */
    void *user;
    double *pack_s;                                   /* NULL, or gets the seconds spent packing added */
} lm_prefill_options;

/* Runs tokens[n], the context from position 0 on, and packs every layer into each of the n_caches >= 1 caches, which
   have one element type, plans of n positions and no layer packed. options may be NULL. 0 = ok. After a failure half
   way some layers are packed: destroy the caches. */
int lm_prefill(lm_model *m, dkv_cache *const *caches, int n_caches, const int32_t *tokens, int64_t n,
               const lm_prefill_options *options);

/* logits: none (may be NULL), [V] of the last token, or [n][V] of all. */
typedef enum { LM_NONE, LM_LAST, LM_ALL } lm_logits;

/* Runs tokens[n] at positions pos.. after what the cache holds, and appends their K and V to it. 0 = ok; after an error
   that is found before any work (capacity, position, token) the cache is as it was. */
int lm_eval(lm_model *m, dkv_cache *cache, const int32_t *tokens, int64_t n, int64_t pos, float *logits,
            lm_logits which);

#endif
