/* device.h: what model.c, load.c and the devices share.

   The layers' loop exists once, in model.c, and once more, there and back, in learn.c. What differs between processors
   is this table of the operations that a layer is made of: device_cpu.c computes in f32 over the weights as the file
   has them, device_cuda.cu in bf16 with sums in f32. Between two operations a device may keep anything in any form of
   its own; the residual stream x, the rotation's table, the outputs of products and all gradients are f32 everywhere.

   Every operation returns false after lm_explain said why. Those of a GPU only enqueue, so that all that stands between
   two calls of wait can be captured and replayed. */
#ifndef DEVICE_H
#define DEVICE_H

#ifdef __cplusplus
extern "C" {
#endif

#include "model.h"
#include "quant.h"

typedef struct {
    quant_mat mat;
    int64_t at;        /* where a layer's f32 buffer holds it, [rows][cols] */
    const float *bias; /* [rows] or NULL */
    const void *bf16;  /* CUDA: [rows][cols], weights of one layer one behind the other */
} lm_weight;

enum { WQ, WK, WV, WO, GATE, UP, DOWN, LAYER_WEIGHTS };

typedef struct {
    lm_weight w[LAYER_WEIGHTS];
    const float *attn_norm, *ffn_norm; /* [E] */
} lm_layer;

/* Rows of f32 that are ld floats apart. */
typedef struct {
    float *data;
    int64_t ld;
} lm_rows;

/* Activations of up to n tokens at a time; x and rope hold all tokens of a call, the others one chunk of them. */
typedef struct {
    int64_t n_all, n;
    float *x;              /* [n_all][E] the residual stream */
    float *rope;           /* [n_all][n_rot/2][2] cos, sin */
    void *norm;            /* [n][E] */
    lm_rows q, k, v;       /* [n][H][d], [n][Hkv][d], [n][Hkv][d] */
    void *o;               /* [n][H][d] */
    lm_rows gate, up;      /* [n][F] */
    void *act;             /* [n][F] silu(gate) * up */
    void *block;           /* what they all lie in */
    /* CPU */
    const int32_t *tokens; /* the call's, [n_all] */
    int64_t pos;
    float *out;            /* [n][E] what is added to x */
    const float *f32;      /* the layer's weights, dequantised; NULL: use them as the file has them (n_all = 1) */
    /* CUDA */
    void *input;           /* i64 position, i32 tokens[n_all] */
    void *qkv;             /* [n][H + 2 Hkv][d] q, k, v in the 16 bits of the cache's tail */
} lm_activations;

typedef struct lm_device lm_device;

struct lm_model {
    lm_params p;
    gguf *file;
    int threads;
    const lm_device *device;
    void *own;                /* the device's */
    char where[96];           /* what it runs on, for people */
    lm_layer *layers;         /* [L] */
    const gguf_tensor *embed; /* [V][E] */
    lm_weight output;         /* [V][E] */
    const float *output_norm; /* [E] */
    double *inv_freq;         /* [n_rot/2] radians per position */
    float *vectors;           /* norms and biases in f32, [n_vectors] */
    int64_t n_vectors;
    lm_activations one;       /* of decoding: nothing is allocated there */
    int64_t kv_bytes, kv_peak;
    char error[256];
};

struct lm_cache {
    lm_model *m;
    int64_t tail, capacity;
    dkv_type type;
    const dkv_plan *plan;
    void *own; /* the device's */
};

/* Grows, and forgets what it held. */
typedef struct {
    void *data;
    size_t bytes;
} lm_memory;

/* What a value token's logits give: cross-entropy, KL from the reference's distribution, 1 if it is their argmax. */
typedef struct {
    double loss, kl;
    int64_t right;
} lm_mark;

/* Where a layer's K and V go, behind at tokens of tail, and whether anything else of it is used: of a prefill's last
   layer nothing is. */
typedef struct {
    lm_cache *cache;
    int layer;
    int64_t at;
    bool kv_only;
} lm_target;

struct lm_device {
    /* open: all was found in the file, and the weights go where they are used. close: also after a failed open. */
    bool (*open)(lm_model *m);
    void (*close)(lm_model *m);

    dkv_result (*cache_open)(lm_cache *c, const dkv_plan *plan, const dkv_shape *shape, const dkv_allocator *alloc);
    void (*cache_close)(lm_cache *c);
    dkv_result (*cache_truncate)(lm_cache *c);                     /* to c->tail */
    dkv_result (*cache_pack)(lm_cache *c, int l, lm_cache *dense); /* layer l <- dense's only one, plan->T_c tokens */

    bool (*make)(lm_model *m, lm_activations *a, int64_t n_all);
    void (*release)(lm_model *m, lm_activations *a);

    /* A call is input, begin, then the layers, then logits of one row, kept for fetch, or of all. Within a layer n
       tokens of one chunk, whose residual stream is at x and whose rotations are at rope:
           begin       a->x, a->rope <- input
           load        what this layer needs; NULL: nothing
           norm        y[n][E] = x / rms(x) * gain
           matmul      y[k][n][rows] = from[n][cols] W_k^T + bias_k, k < n_w
           matmul_add  x[n][E] += from[n][cols] W^T
           rotate      a->q, a->k by their positions
           append      a->k, a->v behind the cache's tail of to.at tokens
           attend      a->o = attention of a->q over the cache, its own keys being the last n
           swiglu      a->act[n][F] = silu(a->gate) * a->up
           logits_all  to[n_all][V], the caller's */
    bool (*input)(lm_model *m, lm_activations *a, const int32_t *tokens, int64_t pos);
    bool (*begin)(lm_model *m, lm_cache *c, const lm_activations *a);
    bool (*load)(lm_model *m, const lm_layer *l, const lm_activations *a);
    bool (*norm)(lm_model *m, void *y, const float *x, const float *gain, int64_t n);
    bool (*matmul)(lm_model *m, const lm_activations *a, const lm_rows *y, const lm_weight *w, int n_w,
                   const void *from, int64_t n);
    bool (*matmul_add)(lm_model *m, const lm_activations *a, float *x, const lm_weight *w, const void *from, int64_t n);
    bool (*rotate)(lm_model *m, const lm_activations *a, const float *rope, int64_t n, lm_target to);
    bool (*append)(lm_model *m, const lm_activations *a, int64_t n, lm_target to);
    bool (*attend)(lm_model *m, const lm_activations *a, int64_t n, lm_target to);
    bool (*swiglu)(lm_model *m, const lm_activations *a, int64_t n);
    bool (*logits)(lm_model *m, const lm_activations *a, const float *x);
    bool (*logits_all)(lm_model *m, const lm_activations *a, float *to);

    /* wait: until all that was enqueued is done; gives the seconds of a clock. fetch: waits too; the kept logits [V],
       or the index of the greatest, the first of equals; either may be NULL. */
    bool (*wait)(lm_model *m, double *now);
    bool (*fetch)(lm_model *m, float *logits, int32_t *best);

    /* NULL, or a faster way to run one token: record once per cache what forward does after input, then replay. */
    bool (*record)(lm_model *m, lm_cache *c, bool (*forward)(lm_model *m, lm_cache *c));
    bool (*replay)(lm_model *m, lm_cache *c);

    /* Learning: learn.c makes the activations of any rows, and keeps them for the way back. All pointers are the
       device's, but copy's may be the host's, too. element: bytes of each of norm, o, act and qkv; where it is 4, qkv
       is q.data and o is what gated writes. Gradients are f32. rows: of activations at most.
           start         a->x[i], a->rope[i] <- token[i] at pos[i], n_all of them, and what matmul needs of a
           gates         ln_u, or da += its gradient: dkv_gates_union, dkv_gates_union_backward
           context       layer l of a cache that keeps all, for gated
           gated         a batch of suffixes whose outs lie one behind the other, [a->n][H][d] f32; a->o = these
           gated_back    its gradients
           score         rank[sum of N_q][H] <- dkv_score of n questions about one context, one behind the other;
                         source is the host's
           pick          y[n][E] = x[index[n]]
           logits_some   y[n][V] = norm[n][E] W^T
           judge         mark[n] of logits[n][V], and unless scale is NULL, logits <- scale * d loss / d logits;
                         reference: NULL, or [n][V] logits
           logits_back   d_norm[n][E] = d_logits[n][V] W
           matmul_back   dx[n][cols] = sum over k < n_w of dy[k][n][rows] W_k; a as for matmul
           norm_back     dx[r][E] += d norm / dx at x[r], r = index[n] or, if NULL, the first n rows
           rotate_back   dq, dk by minus their angles
           swiglu_back   d_gate, d_up, rows as a->gate's, from d_act[n][F] */
    int64_t element, rows;
    bool (*hold)(lm_model *m, lm_memory *y, size_t bytes);
    void (*drop)(lm_model *m, lm_memory *y);
    bool (*copy)(lm_model *m, void *to, const void *from, size_t bytes);
    bool (*zero)(lm_model *m, void *to, size_t bytes);
    bool (*start)(lm_model *m, lm_activations *a, const int32_t *token, const int64_t *pos);
    bool (*gates)(lm_model *m, float *ln_u, const dkv_gates *g, const float *logit, dkv_draw draw);
    bool (*gates_back)(lm_model *m, float *da, const dkv_gates *g, const float *logit, dkv_draw draw,
                       const float *d_ln_u);
    dkv_segment (*context)(const lm_cache *c, int l);
    bool (*gated)(lm_model *m, const lm_activations *a, const dkv_gated *c, int64_t n);
    bool (*gated_back)(lm_model *m, const dkv_gated *c, int64_t n);
    bool (*score)(lm_model *m, int64_t *rank, const dkv_attention *a, int64_t n, const int64_t *source);
    bool (*pick)(lm_model *m, float *y, const float *x, const int32_t *index, int64_t n);
    bool (*logits_some)(lm_model *m, float *y, const void *norm, int64_t n);
    bool (*judge)(lm_model *m, lm_mark *mark, float *logits, const int32_t *target, const float *scale,
                  const float *reference, int64_t n);
    bool (*logits_back)(lm_model *m, float *d_norm, float *d_logits, int64_t n);
    bool (*matmul_back)(lm_model *m, const lm_activations *a, float *dx, const lm_weight *w, int n_w, const lm_rows *dy,
                        int64_t n);
    bool (*norm_back)(lm_model *m, float *dx, const float *dy, const float *x, const int32_t *index, const float *gain,
                      int64_t n);
    bool (*rotate_back)(lm_model *m, lm_rows dq, lm_rows dk, const float *rope, int64_t n);
    bool (*swiglu_back)(lm_model *m, const lm_activations *a, lm_rows d_gate, lm_rows d_up, const float *d_act,
                        int64_t n);
};

extern const lm_device lm_cpu;
extern const lm_device lm_cuda __attribute__((weak)); /* linked in or not */

__attribute__((format(printf, 2, 3))) int lm_explain(lm_model *m, const char *fmt, ...); /* -1 */
#define lm_fail(m, ...) (lm_explain(m, __VA_ARGS__), false)

/* model.c, of a layer: a->q, a->k, a->v, rotated, from x; a->act from x */
bool lm_project(lm_model *m, const lm_layer *l, const lm_activations *a, const float *x, const float *rope, int64_t n,
                lm_target to);
bool lm_feed(lm_model *m, const lm_layer *l, const lm_activations *a, const float *x, int64_t n);

bool lm_load(lm_model *m);                                                             /* load.c */
void lm_dequantise(float *to, const quant_mat *w, int64_t first, int64_t rows);        /* [rows][cols] */

#ifdef __cplusplus
}
#endif
#endif
