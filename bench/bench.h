/* bench.h: one attention case, and what a contender must do to be timed on it. */
#ifndef BENCH_H
#define BENCH_H

#include "../distance_kv.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* softmax(q k^T / sqrt(d)) v: query i sees the first n[g] - N_q + 1 + i keys of its KV head g, so the last N_q are its
   own. q, K and V hold values of type, or of 8-bit rows with scales: then packed and type, which peers take, differ. */
typedef struct bench_case {
    char         name[64];
    int          id, H, Hkv, d, threads;
    dkv_type     packed, type;
    bool         dense;        /* prefill: nothing is packed */
    int64_t      N_q, n_max;
    int64_t      n[64];        /* [Hkv], multiples of 256, at most n_max */
    const float *q;            /* [N_q][H][d] */
    const float *k, *v;        /* [Hkv][n_max][d], head g's keys are the last n[g] rows */
} bench_case;

/* One way to compute a case. Memory comes from bench_alloc, which is emptied after each case. */
typedef struct bench_peer {
    const char  *name;                                                  /* family, mode */
    int          mode;
    const char *(*open)(void **state, const bench_case *c, int mode);   /* NULL; why not; "": there is no such mode */
    double      (*run)(void *state, int64_t layer);                     /* seconds; layer counts up */
    void        (*read)(void *state, float *out);                       /* out [N_q][H][d] of the last run */
    void        (*close)(void *state);                                  /* may be NULL */
} bench_peer;

extern const bench_peer peers_ggml[], peers_blas[], peers_torch[]; /* each ends with a name of NULL */
const char *bench_ggml_version(void);

double  bench_seconds(void);
void   *bench_alloc(int64_t bytes);       /* 64-byte aligned, large ones in 2 MB pages; NULL: no memory */
int64_t bench_layers(int64_t bytes);      /* layers of so many bytes that are twice the last-level cache */

/* The case as peers keep it: K, V [layers][Hkv][n_max][d], V also as [layers][Hkv][d][n_max] if type is the case's own;
   here head g's keys are its first n[g]. Made once for a case. NULL: no memory. */
typedef struct bench_kv {
    int64_t layers, head_bytes, layer_bytes;
    char   *k, *v, *v_transposed;
} bench_kv;

const bench_kv *bench_kv_of(const bench_case *c, dkv_type type);

#endif
