/* model.h: a Llama-family transformer over a Distance-KV cache: Llama, Qwen2 and SmolLM2 graphs from a GGUF file.

   lm_model *m; char err[256];
   if (lm_open(&m, "model.gguf", LM_CPU, 2, err, sizeof err)) ...
   lm_cache *cache;
   lm_cache_create(&cache, m, &plan, DKV_F16, 512, NULL); // plan: of T_c positions
   lm_prefill(m, &cache, 1, context, T_c, NULL);
   lm_eval(m, cache, question, n, T_c, logits, LM_LAST);  // then one token at a time, at T_c + n, ...

   Prefill is layer-major: all T_c tokens pass layer l, whose K and V lie dense in one buffer; the layer is packed into
   the caller's caches, and the buffer serves layer l + 1. Peak KV memory is what is packed plus ONE dense layer.
   Attention is distance_kv.h's alone.

   Letters are those of distance_kv.h; E embedding, F feed-forward, V vocabulary size.
   CPU: n = 1 multiplies by the weights as the file has them, activations in 8 bits where those are quantised (the bound
   is in quant.h); n > 1 multiplies dequantised f32 weights by f32 activations. LM_LAST's logits take the first way.
   CUDA: weights, and what is multiplied by them, are rounded to bf16 once; sums, residual stream and logits are f32.
   Single tokens replay one captured graph per cache. */
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

typedef enum { LM_CPU, LM_CUDA } lm_place;

/* 0 = ok; else *out is NULL and err holds one line that names the key or tensor, or says why there is no CUDA: this
   build has none, or the machine. threads >= 1. */
int lm_open(lm_model **out, const char *path, lm_place place, int threads, char *err, size_t err_size);
void lm_close(lm_model *m); /* after its caches */

const lm_params *lm_get_params(const lm_model *m);
const gguf *lm_get_gguf(const lm_model *m);
const char *lm_error(const lm_model *m); /* the last failure, one line */
const char *lm_where(const lm_model *m); /* what it runs on, for people: "2 threads, avx512" */
int64_t lm_kv_peak(const lm_model *m);   /* device memory that all caches and dense layers took at most; 0 on the CPU,
                                            where it comes from dkv_allocators */

/* A dkv_cache or dkv_cuda_cache, in the memory of the model's device. */
typedef struct lm_cache lm_cache;

/* The plan is copied. CPU: all types and dkv_cache_create's errors; CUDA: no f32 (TYPE), alloc is not used. */
dkv_result lm_cache_create(lm_cache **out, lm_model *m, const dkv_plan *plan, dkv_type type, int64_t capacity,
                           const dkv_allocator *alloc);
void lm_cache_destroy(lm_cache *c); /* NULL is allowed */
const dkv_plan *lm_cache_plan(const lm_cache *c);
int64_t lm_cache_tail(const lm_cache *c);                   /* tokens behind the packed context */
dkv_result lm_cache_truncate(lm_cache *c, int64_t n);       /* the tail to at most n tokens, n >= 0 */

typedef struct {
    const dkv_allocator *alloc;                       /* of the dense layer; NULL: malloc */
    void (*progress)(void *user, double done_of_one); /* NULL, or called now and then, last with 1 */
    void *user;
    double *pack_s;                                   /* NULL, or [n_caches]: seconds spent packing each are added */
} lm_prefill_options;

/* Runs tokens[n], the context from position 0 on, and packs every layer into each of the n_caches >= 1 caches, which
   have one element type, plans of n positions and no layer packed. options may be NULL. 0 = ok. After a failure half
   way some layers are packed: destroy the caches. */
int lm_prefill(lm_model *m, lm_cache *const *caches, int n_caches, const int32_t *tokens, int64_t n,
               const lm_prefill_options *options);

/* logits: none (may be NULL), [V] of the last token, or [n][V] of all. */
typedef enum { LM_NONE, LM_LAST, LM_ALL } lm_logits;

/* Runs tokens[n] at positions pos.. after what the cache holds, and appends their K and V to it. 0 = ok; else the cache
   is as it was. */
int lm_eval(lm_model *m, lm_cache *cache, const int32_t *tokens, int64_t n, int64_t pos, float *logits,
            lm_logits which);

/* The same, but only *best <- the index of the last token's greatest logit, as lm_sample takes it at temperature 0: the
   logits stay on the device. */
int lm_eval_best(lm_model *m, lm_cache *cache, const int32_t *tokens, int64_t n, int64_t pos, int32_t *best);

#endif
