/* device.h: what model.c, load.c and the devices share.

   The layers' loop exists once, in model.c. What differs between processors is this table of the operations that a
   layer is made of: device_cpu.c computes in f32 over the weights as the file has them, device_cuda.cu in bf16 with
   sums in f32. Between two operations a device may keep anything in any form of its own; the residual stream x, the
   rotation's table and the outputs of products are f32 everywhere.

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

/* Where a layer's K and V go, behind at tokens of tail, and whether anything else of it is used: of a prefill's last
   layer nothing is. */
typedef struct {
    lm_cache *cache;
    int layer;
    int64_t at;
    bool kv_only;
} lm_target;

struct lm_device {
    /* open: everything was found in the file, and the weights go where they are used. close: also after a failed open. */
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
           swiglu      a->act = silu(a->gate) * a->up
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

    /* wait: until all that was enqueued is done; gives the seconds of a clock. fetch: the kept logits [V], or the index
       of the greatest, the first of equals; either may be NULL. */
    bool (*wait)(lm_model *m, double *now);
    bool (*fetch)(lm_model *m, float *logits, int32_t *best);

    /* NULL, or a faster way to run one token: record what forward does after input, once per cache, then replay it. */
    bool (*record)(lm_model *m, lm_cache *c, bool (*forward)(lm_model *m, lm_cache *c));
    bool (*replay)(lm_model *m, lm_cache *c);
};

extern const lm_device lm_cpu;
extern const lm_device lm_cuda __attribute__((weak)); /* linked in or not */

__attribute__((format(printf, 2, 3))) int lm_explain(lm_model *m, const char *fmt, ...); /* -1 */
#define lm_fail(m, ...) (lm_explain(m, __VA_ARGS__), false)

bool lm_load(lm_model *m);                                                             /* load.c */
void lm_dequantise(float *to, const quant_mat *w, int64_t first, int64_t rows);        /* [rows][cols] */

#ifdef __cplusplus
}
#endif
#endif
