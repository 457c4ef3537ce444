/* distance_kv.h - v0.1 - KV-cache compression by relative distance, for LLM inference engines
   Public domain or MIT, whichever you prefer: see the end of this file.

   A learned bit per (layer, query head, relative-distance bin) says whether the context in that bin stays. After dense
   prefill the KV cache is compressed once: sink and recent tokens stay, GQA heads are united, survivors are packed in
   order with their RoPE untouched, and decoding goes on over packed per-KV-head caches of different lengths.

   Do this in *one* C file:            #define DISTANCE_KV_IMPLEMENTATION
   and this wherever you need it:      #include "distance_kv.h"

   Use (the whole program is examples/minimal.c):

       dkv_pattern pattern;                                       // the learned bits, read in place
       dkv_pattern_read(&pattern, file_bytes, file_size);

       size_t bytes;                                              // which positions survive: exact before prefill
       dkv_plan plan;
       dkv_plan_make(&plan, NULL, &bytes, &pattern, T_c, DKV_BEYOND_ERROR);
       dkv_plan_make(&plan, malloc(bytes), &bytes, &pattern, T_c, DKV_BEYOND_ERROR);

       dkv_cache *cache;                                          // packed context + room for 512 more tokens
       dkv_shape shape = {L, H, Hkv, d, d};
       dkv_cache_create(&cache, &plan, &shape, DKV_F16, 512, NULL);
       for (int l = 0; l < L; l++) {                              // K, V of layer l: [T_c][Hkv][d], after RoPE
           dkv_segment dense = dkv_strided(dkv_thd(K[l], DKV_F32, Hkv, d), dkv_thd(V[l], DKV_F32, Hkv, d), T_c);
           dkv_cache_pack(cache, l, &dense);                      // layer l's dense K and V may be freed now
       }
       for (int l = 0; l < L; l++) {                              // one decoding step, at position T_c, T_c + 1, ...
           dkv_cache_append(cache, l, k, v, 1);                   // k, v: dkv_tensor of the new token, [1][Hkv][d]
           dkv_attention a = dkv_cache_attention(cache, l, q, 1, out);   // q, out: [1][H][d]
           dkv_attend(&a, 1, workspace, workspace_bytes, NULL);
       }

   DOES NOT: learn patterns (yet), run on a GPU (yet), load models, choose positions from the query, evict while
   decoding, re-rotate K, quantise below 16 bits (yet), or print, exit, abort and allocate behind your back.

   CONTENTS: grep for the tag
     [API]      all public types and functions; stop after it if you only want to use the library
     [BASE]     compiler, 16-bit floats, little-endian bytes, CRC, allocator
     [SIMD]     leaf kernels: scalar, AVX2+FMA+F16C, AVX-512; one table, chosen at run time
     [PATTERN]  the pattern file: read in place, checked, written
     [BINS]     position <-> relative-distance bin
     [UNION]    query-head bits -> KV-head bits
     [PLAN]     which positions survive, as runs per (layer, KV head)
     [PACK]     the packed layout: survivors in order, from any strided or packed source
     [ATTEND]   attention over packed context + tail
     [CACHE]    packed layers + growing tail that the library owns; fork, truncate, save, restore

   CONVENTIONS
     Letters   L layers, H query heads, Hkv KV heads, G = H / Hkv group, D bins, W bin width, S sink, R recent,
               T_c context length, N_q queries, d_k and d_v head dimensions; l, h, g, b, i index layer, query head,
               KV head, bin, position. Shapes are written [slowest]..[fastest].
     Sizes     positions, counts, strides and offsets are 64-bit signed; strides are in bytes.
     Memory    yours, unless a function takes a dkv_allocator. Passing NULL memory asks for the size. Nothing on the
               decoding path allocates.
     Errors    a dkv_result, 0 = DKV_OK. Bad data (files, sizes, shapes, memory) gives a code, and then nothing was
               written. Broken contracts (NULL where a pointer is required) hit DKV_ASSERT.
     Threads   no global state but the SIMD level (atomic). Patterns, plans and packed data are immutable after they
               are made: share them freely. A cache's tail and a workspace belong to one thread at a time, except
               inside dkv_attend_part and dkv_attend_combine.
     Numerics  sums in f32; scores, exponentials and outputs within the bounds of tests/tolerance.h. The same call
               gives the same bits for any number of threads.

   MACROS, all optional
     DISTANCE_KV_IMPLEMENTATION  compile the implementation here
     DKV_STATIC                  every function static: a private copy
     DKV_API                     your own linkage, such as __declspec(dllexport)
     DKV_ASSERT(x)               instead of assert(x)
     DKV_NO_SIMD                 scalar code only
     DKV_NO_STDIO                no files and no default malloc: only string.h, math.h and stdint.h are needed

   SOURCE    "paper 3.2" cites the section of "Distance-KV: Exploiting Relative Distance for Efficient Long-Context
   Inference" that a function implements; what the paper leaves open is said where it is decided.
*/

/* ==========================================================================
   [API]
   ========================================================================== */
#ifndef DISTANCE_KV_H
#define DISTANCE_KV_H

#include <stddef.h>
#include <stdint.h>

#define DKV_VERSION "0.1.0"
#define DKV_PATTERN_VERSION 1 /* of the pattern file */
#define DKV_CACHE_VERSION   1 /* of the saved cache */

#ifndef DKV_API
#if defined(DKV_STATIC) && (defined(__GNUC__) || defined(__clang__))
#define DKV_API static __attribute__((unused))
#elif defined(DKV_STATIC)
#define DKV_API static
#else
#define DKV_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- results ------------------------------------------------------------- */

#define DKV_RESULTS(X)                                                                                   \
    X(DKV_OK,            0, "ok")                                                                        \
    X(DKV_ERR_MAGIC,    -1, "not a Distance-KV file of this kind (wrong magic bytes)")                   \
    X(DKV_ERR_VERSION,  -2, "written by another format version; make the file again")                    \
    X(DKV_ERR_LENGTH,   -3, "file is truncated or has trailing bytes")                                   \
    X(DKV_ERR_CRC,      -4, "file is damaged (CRC32 differs)")                                           \
    X(DKV_ERR_FIELD,    -5, "a field is outside its range")                                              \
    X(DKV_ERR_SHAPE,    -6, "layers, heads or head dimensions do not match (H must be a multiple of Hkv)") \
    X(DKV_ERR_RANGE,    -7, "context reaches beyond the pattern's last bin; choose a dkv_beyond policy") \
    X(DKV_ERR_ORDER,    -8, "positions must ascend and lie inside the context")                          \
    X(DKV_ERR_CAPACITY, -9, "buffer or cache capacity is too small")                                     \
    X(DKV_ERR_ALIGN,   -10, "buffer must be 64-byte aligned")                                            \
    X(DKV_ERR_OVERLAP, -11, "source and destination overlap")                                            \
    X(DKV_ERR_TYPE,    -12, "element type is not supported here")                                        \
    X(DKV_ERR_STATE,   -13, "layer was not packed yet, was packed before, or cannot be changed now")     \
    X(DKV_ERR_MEMORY,  -14, "out of memory")                                                             \
    X(DKV_ERR_IO,      -15, "file cannot be read or written")

typedef enum dkv_result {
#define DKV__ENUM(name, value, text) name = value,
    DKV_RESULTS(DKV__ENUM)
#undef DKV__ENUM
} dkv_result;

/* One English sentence for a result, never NULL. */
DKV_API const char *dkv_result_string(dkv_result r);
DKV_API const char *dkv_version(void);

/* ---- element types and tensors ------------------------------------------- */

typedef enum dkv_type { DKV_F32 = 0, DKV_F16 = 1, DKV_BF16 = 2 } dkv_type;

DKV_API const char *dkv_type_name(dkv_type t);                    /* "f32", "f16", "bf16"; "?" otherwise */
DKV_API int64_t     dkv_type_bytes(dkv_type t);                   /* 4, 2, 2; 0 otherwise */

/* dst[n] of type to <- src[n] of type from, both contiguous and of any alignment; rounds to nearest even. */
DKV_API void dkv_convert(void *dst, dkv_type to, const void *src, dkv_type from, int64_t n);

/* A strided view [token][head][dim] of memory that stays yours. Byte strides may be anything, also negative or
   unaligned, so that every engine's layout is read in place:
     [T][Hkv][d]            dkv_thd(data, type, Hkv, d)     llama2.c, calm, llama.cpp K
     [Hkv][T][d]            {data, type, d*e, T*d*e, e}     Hugging Face        (e = element bytes)
     transposed V           {data, type, e, d*T*e, T*e}     llama.cpp without flash attention */
typedef struct dkv_tensor {
    void    *data;
    dkv_type type;
    int64_t  stride_token, stride_head, stride_dim;
} dkv_tensor;

DKV_API dkv_tensor dkv_thd(const void *data, dkv_type type, int64_t heads, int64_t d); /* contiguous [..][heads][d] */

/* ---- allocator ----------------------------------------------------------- */

/* Used by dkv_pattern_load and dkv_cache_* only. NULL, or NULL functions: malloc and free (with DKV_NO_STDIO:
   DKV_ERR_MEMORY). free gets the size it was allocated with. */
typedef struct dkv_allocator {
    void *(*alloc)(void *user, size_t bytes);
    void (*free)(void *user, void *ptr, size_t bytes);
    void *user;
} dkv_allocator;

/* ---- SIMD level ---------------------------------------------------------- */

typedef enum dkv_simd { DKV_SIMD_SCALAR = 0, DKV_SIMD_AVX2 = 1, DKV_SIMD_AVX512 = 2, DKV_SIMD_COUNT } dkv_simd;

DKV_API dkv_simd    dkv_simd_supported(void);      /* highest level that CPU and operating system offer */
DKV_API dkv_simd    dkv_simd_level(void);          /* the level in use */
DKV_API dkv_simd    dkv_simd_limit(dkv_simd max);  /* use at most max from now on; returns the level then in use */
DKV_API const char *dkv_simd_name(dkv_simd level); /* "scalar", "avx2", "avx512" */

/* ---- pattern ------------------------------------------------------------- */

typedef enum dkv_budget { DKV_BUDGET_LOGICAL = 0, DKV_BUDGET_PHYSICAL = 1 } dkv_budget;

/* M[L][H][D] and where it applies (paper 3.2). Bits point into caller memory: rows [L][H] of dkv_pattern_words(D)
   little-endian 64-bit words at any alignment, bin b in bit b % 64 of word b / 64, bits past D zero. */
typedef struct dkv_pattern {
    int32_t     L, H, Hkv;  /* 1..65536 each; H % Hkv == 0 */
    int32_t     D;          /* bins, 1..2^20 */
    int32_t     d;          /* head dimension of K, 0..65536; 0: any */
    int64_t     W, S, R;    /* bin width 1..2^40, sink 0..2^40, recent 0..2^40 (paper: 128, 128, 1024) */
    dkv_budget  budget;     /* what rho counts: bits of M, or (layer, KV head, bin) cells */
    double      rho;        /* target ratio, 0..1 */
    int64_t     K;          /* ones in M */
    char        model[64];  /* zero-terminated printable ASCII, zero-padded; as are the next two */
    char        tool[64];   /* what made the file */
    uint64_t    data_hash;  /* provenance of the training data; 0: none */
    uint64_t    seed;
    const void *bits;       /* [L][H][words] */
    const void *p;          /* NULL, or [L][H][D] f16 probabilities P(z > 0), each in 0..1 */
} dkv_pattern;

DKV_API int64_t dkv_pattern_words(int64_t D);                               /* 64-bit words in a row of bits */
DKV_API int     dkv_pattern_get(const dkv_pattern *p, int l, int h, int64_t b);  /* M[l][h][b], 0 or 1 */
DKV_API void    dkv_bits_set(void *bits, const dkv_pattern *p, int l, int h, int64_t b, int value);
DKV_API int64_t dkv_pattern_count(const dkv_pattern *p);                    /* ones in M */

/* Checks every field, the padding bits and K == dkv_pattern_count. DKV_ERR_FIELD or DKV_ERR_SHAPE. */
DKV_API dkv_result dkv_pattern_check(const dkv_pattern *p);
/* DKV_ERR_SHAPE unless the pattern was made for this model shape. */
DKV_API dkv_result dkv_pattern_matches(const dkv_pattern *p, int L, int H, int Hkv, int d);

/* The file, all little-endian; bytes exact, nothing may follow:
     0  8  magic "DKVP\r\n\x1a\n"         104  8  seed
     8  4  version = 1                    112  4  flags: bit 0 = p present, others 0
    12  4  header bytes = 256             116 12  zero
    16  8  file bytes                     128 64  model
    24  4  L                              192 64  tool
    28  4  H                              256     bits: L * H * ceil(D/64) * 8 bytes
    32  4  Hkv                                    p:    L * H * D * 2 bytes, if present
    36  4  D                                      CRC32 (zlib's) over every byte before it, 4 bytes
    40  4  d
    44  4  budget                          Invalid: any field outside the ranges above, bits past D, K other than
    48 24  W, S, R (8 each)                the number of ones, text that is not printable, zero bytes that are not.
    72  8  rho (IEEE double)
    80  8  K
    88  8  data hash
    96  8  zero

   Reads a file image in place: out->bits and out->p point into data, which may have any alignment and must outlive
   the pattern. Safe for untrusted bytes. Errors: MAGIC, VERSION, LENGTH, CRC, FIELD, SHAPE. */
DKV_API dkv_result dkv_pattern_read(dkv_pattern *out, const void *data, size_t bytes);

/* Writes the file image of a valid pattern. dst NULL: *bytes = size needed. Otherwise *bytes is dst's capacity
   before, and the written size after. Errors: those of dkv_pattern_check, CAPACITY, OVERLAP. */
DKV_API dkv_result dkv_pattern_write(void *dst, size_t *bytes, const dkv_pattern *p);

/* The pattern's identity: CRC32 that its file ends with. */
DKV_API uint32_t dkv_pattern_crc(const dkv_pattern *p);

#ifndef DKV_NO_STDIO
/* Reads a file into one allocation, to be freed by dkv_pattern_free with the same allocator. IO, MEMORY, and
   dkv_pattern_read's errors. dkv_pattern_save writes beside the target and renames: a failure loses nothing. */
DKV_API dkv_result dkv_pattern_load(dkv_pattern *out, const char *path, const dkv_allocator *alloc);
DKV_API void       dkv_pattern_free(dkv_pattern *p, const dkv_allocator *alloc);
DKV_API dkv_result dkv_pattern_save(const dkv_pattern *p, const char *path);
#endif

/* ---- bins (paper 3.4) ---------------------------------------------------- */

/* What to do with positions farther than the pattern's last bin, T_c > dkv_max_context(p). */
typedef enum dkv_beyond {
    DKV_BEYOND_ERROR = 0, /* refuse: DKV_ERR_RANGE */
    DKV_BEYOND_CLAMP = 1, /* treat them as bin D - 1 */
    DKV_BEYOND_KEEP  = 2, /* keep them all */
    DKV_BEYOND_DROP  = 3  /* drop them all */
} dkv_beyond;

#define DKV_ALWAYS (-1) /* sink or recent: always kept */

DKV_API int64_t dkv_max_context(const dkv_pattern *p);              /* S + R + W * D */
/* Bin of position i in 0..T_c-1: (T_c - R - 1 - i) / W, which may be >= D; DKV_ALWAYS for sink and recent. */
DKV_API int64_t dkv_bin(const dkv_pattern *p, int64_t T_c, int64_t i);
/* Bins that a context of T_c tokens reaches: ceil((T_c - S - R) / W), not limited to D. */
DKV_API int64_t dkv_bins_at(const dkv_pattern *p, int64_t T_c);
/* Positions [*begin, *end) of bin b; empty when the context does not reach it. */
DKV_API void    dkv_bin_span(const dkv_pattern *p, int64_t T_c, int64_t b, int64_t *begin, int64_t *end);

/* ---- union (paper 3.4) --------------------------------------------------- */

/* row[dkv_pattern_words(D)] <- OR of the G query heads of KV head g: what must physically stay. */
DKV_API void dkv_union_row(const dkv_pattern *p, int l, int g, uint64_t *row);
DKV_API int  dkv_union_get(const dkv_pattern *p, int l, int g, int64_t b);

/* ---- plan ---------------------------------------------------------------- */

/* len consecutive positions pos.. that go to the packed rows row.. */
typedef struct dkv_run { int64_t pos, len, row; } dkv_run;

/* Which positions survive, per layer and KV head (flat index l * Hkv + g). Runs are sorted, disjoint and never touch.
   The arrays lie in one block of caller memory in the order first, rows, runs; CPU and CUDA share it byte for byte. */
typedef struct dkv_plan {
    int32_t        L, Hkv;
    int64_t        T_c;
    uint32_t       pattern_crc; /* 0: made from positions */
    const int64_t *first;       /* [L*Hkv + 1] runs of (l, g): runs[first[f]] .. runs[first[f + 1] - 1] */
    const int64_t *rows;        /* [L*Hkv] positions kept */
    const dkv_run *runs;        /* [first[L*Hkv]] */
} dkv_plan;

/* Each maker: mem NULL asks, *bytes = size needed and *plan is untouched. Otherwise mem must hold *bytes, 8-byte
   aligned (ALIGN), at least the size needed (CAPACITY). O(L * Hkv * D / W's runs); does not look at K or V.

   From a pattern: Keep(l, g, i) = sink or recent or OR over the group of M[l][h][bin(i)]. T_c >= 0. FIELD, RANGE. */
DKV_API dkv_result dkv_plan_make(dkv_plan *plan, void *mem, size_t *bytes, const dkv_pattern *p, int64_t T_c,
                                 dkv_beyond beyond);

/* From any caller's positions: positions holds for each (l, g) in turn counts[l * Hkv + g] ascending positions in
   0..T_c-1. positions and counts NULL: everything is kept (the dense plan). ORDER, FIELD. */
DKV_API dkv_result dkv_plan_from_positions(dkv_plan *plan, void *mem, size_t *bytes, int L, int Hkv, int64_t T_c,
                                           const int64_t *positions, const int64_t *counts);

/* For a second turn: what old kept, and its suffix [old->T_c, T_c), as far as the pattern keeps it at the new T_c.
   Evicted positions do not return. FIELD, RANGE, SHAPE, ORDER (T_c < old->T_c). */
DKV_API dkv_result dkv_plan_refine(dkv_plan *plan, void *mem, size_t *bytes, const dkv_plan *old,
                                   const dkv_pattern *p, int64_t T_c, dkv_beyond beyond);

/* positions[rows[l * Hkv + g]] <- original position of each packed row. */
DKV_API void    dkv_plan_positions(const dkv_plan *plan, int l, int g, int64_t *positions);
DKV_API int64_t dkv_plan_row(const dkv_plan *plan, int l, int g, int64_t pos); /* packed row of pos, -1: evicted */

/* What compression does at T_c, from the pattern alone. The two ratios are different things: memory follows physical. */
typedef struct dkv_stats {
    int64_t kept, total;                          /* KV positions over all (layer, KV head), whole context */
    int64_t compressible_kept, compressible;      /* the same without sink and recent */
    double  logical;        /* ones in the bins that T_c reaches / (L * H * min(D, bins_at)); 1 if there are none */
    double  physical;       /* compressible_kept / compressible; 1 if nothing is compressible */
    double  physical_total; /* kept / total; 1 if T_c = 0 */
} dkv_stats;

DKV_API dkv_result dkv_dry_run(dkv_stats *out, const dkv_pattern *p, int64_t T_c, dkv_beyond beyond); /* FIELD, RANGE */

typedef struct dkv_shape { int32_t L, H, Hkv, d_k, d_v; } dkv_shape; /* d in 1..576 */

/* Closed forms. packed = rows * (d_k + d_v) * element bytes over all (layer, KV head); alloc adds the padding of the
   packed layout; dense is packed for all T_c positions. */
DKV_API int64_t dkv_kv_bytes_packed(const dkv_plan *plan, const dkv_shape *s, dkv_type type);
DKV_API int64_t dkv_kv_bytes_alloc(const dkv_plan *plan, const dkv_shape *s, dkv_type type);
DKV_API int64_t dkv_kv_bytes_dense(const dkv_shape *s, dkv_type type, int64_t T_c);

/* ---- pack ---------------------------------------------------------------- */

/* One layer's K and V in the packed layout, which depends on type and d only, never on the SIMD level. Per KV head:
     K  blocks of 16 tokens: f32, f16 [d_k][16]; bf16 [ceil(d_k/2)][16][2]
     V  by token: f32, f16 [d_v'][..]; bf16 in token pairs [d_v'][2]; d_v' = d_v rounded up to 16
   capacity rows each, a multiple of 16; K of all heads first, then V. Reads never depend on bytes past rows[g]. */
typedef struct dkv_packed {
    void          *data;  /* 64-byte aligned */
    dkv_type       type;
    int32_t        Hkv, d_k, d_v;
    const int64_t *rows;     /* [Hkv] rows in use */
    int64_t        capacity; /* rows per head; 0: rows[g] rounded up to 16, exactly */
} dkv_packed;

/* A stretch of keys and values: strided tensors of n rows (or rows[g] per KV head), or packed ones. */
typedef struct dkv_segment {
    const dkv_packed *packed; /* if not NULL, the rest is ignored */
    dkv_tensor        k, v;
    const int64_t    *rows;   /* [Hkv], or NULL: n for every KV head */
    int64_t           n;
} dkv_segment;

DKV_API dkv_segment dkv_strided(dkv_tensor k, dkv_tensor v, int64_t n);

/* Packs the survivors of layer l, in order. source holds all plan->T_c positions (row i = position i) of K [T_c][Hkv][d_k]
   and V [T_c][Hkv][d_v], K already rotated. mem NULL: *bytes = size needed. out refers to plan->rows: keep the plan.
   Rounds to type; a NaN stays a NaN. CAPACITY, ALIGN, OVERLAP (source against mem), SHAPE, TYPE. */
DKV_API dkv_result dkv_pack(dkv_packed *out, void *mem, size_t *bytes, dkv_type type, const dkv_plan *plan, int l,
                            int d_k, int d_v, const dkv_segment *source);

/* In place: moves the survivors of layer l to rows 0..rows-1 of the caller's own strided tensors, which then form the
   segment {.k, .v, .rows = plan->rows + l * Hkv}. */
DKV_API dkv_result dkv_pack_front(dkv_tensor k, dkv_tensor v, const dkv_plan *plan, int l, int d_k, int d_v);

/* The plain way back: rows of KV head g to tensors [rows][Hkv][d]. Exact when the types agree. */
DKV_API dkv_result dkv_unpack(dkv_tensor k, dkv_tensor v, const dkv_packed *packed, int g);

/* ---- attention ----------------------------------------------------------- */

/* One layer of one sequence: out = softmax(scale * q . k) v over context, then tail (method: paper 3.4).
   Every query sees the whole context; query i sees the first n_tail - N_q + 1 + i rows of the tail, so the queries' own
   keys are the tail's last N_q rows. All G query heads of a group read what their KV head kept. No visible key: out 0,
   lse -inf. A NaN in one query's row stays in that query's rows. Zero-initialise; leave out what you do not use. */
typedef struct dkv_attention {
    int32_t      H, Hkv, d_k, d_v;  /* H % Hkv == 0, d in 1..576 */
    int64_t      N_q;
    dkv_tensor   q;                 /* [N_q][H][d_k] */
    dkv_tensor   out;               /* [N_q][H][d_v], written; may not overlap any input */
    float       *lse;               /* NULL, or [N_q][H], written: natural log of the sum of exp(logits) */
    dkv_segment  context;           /* empty: dense causal attention */
    dkv_segment  tail;
    float        scale;             /* 0: 1 / sqrt(d_k) */
    float        softcap;           /* logits <- softcap * tanh(logits / softcap); 0: off */
    const float *sink;              /* NULL, or [H]: one extra logit per head that takes weight and gives no value */
} dkv_attention;

/* Splits a task over threads: calls task(arg, ith, nth) for ith = 0..nth-1, returns when all are done. */
typedef struct dkv_parallel {
    void (*run)(void *user, int nth, void (*task)(void *arg, int ith, int nth), void *arg);
    void *user;
    int   nth;
} dkv_parallel;

/* a[n]: a batch of any mix of lengths, heads and layers; n = 1 for one. The workspace serves up to nth threads and any
   tail that is not longer; 64-byte aligned. All checks happen before anything is written:
   SHAPE, TYPE, CAPACITY (workspace), ALIGN, OVERLAP. par NULL: OpenMP if compiled in, else this thread alone. */
DKV_API dkv_result dkv_attend_size(size_t *bytes, const dkv_attention *a, int64_t n, int nth);
DKV_API dkv_result dkv_attend(const dkv_attention *a, int64_t n, void *ws, size_t ws_bytes, const dkv_parallel *par);

/* The same for an engine's own threads: every thread calls part, all wait, every thread calls combine. Work is shared
   out by equal bytes of K and V; results do not depend on nth. */
DKV_API dkv_result dkv_attend_part(const dkv_attention *a, int64_t n, void *ws, size_t ws_bytes, int ith, int nth);
DKV_API dkv_result dkv_attend_combine(const dkv_attention *a, int64_t n, void *ws, size_t ws_bytes, int ith, int nth);

/* ---- cache --------------------------------------------------------------- */

/* L packed layers (immutable once packed, shared between forks) and a tail of at most capacity tokens per layer.
   One allocation each for the shared part and the tail. Destroying the last fork frees the shared part. */
typedef struct dkv_cache dkv_cache;

/* Copies the plan. The plan with T_c = 0 gives a plain dense cache. shape->H may be 0 if unused. SHAPE, TYPE, MEMORY. */
DKV_API dkv_result dkv_cache_create(dkv_cache **out, const dkv_plan *plan, const dkv_shape *shape, dkv_type type,
                                    int64_t capacity, const dkv_allocator *alloc);
DKV_API void       dkv_cache_destroy(dkv_cache *c); /* NULL is allowed */

/* Packs layer l once, from all T_c dense rows. Layers may come in any order, from several threads. STATE if done before. */
DKV_API dkv_result dkv_cache_pack(dkv_cache *c, int l, const dkv_segment *source);

/* Appends n rows of K [n][Hkv][d_k] and V [n][Hkv][d_v] to the tail of layer l. CAPACITY: nothing was appended. */
DKV_API dkv_result dkv_cache_append(dkv_cache *c, int l, dkv_tensor k, dkv_tensor v, int64_t n);
DKV_API int64_t    dkv_cache_tail(const dkv_cache *c, int l);        /* rows in the tail of layer l */
DKV_API int64_t    dkv_cache_capacity(const dkv_cache *c);
DKV_API dkv_result dkv_cache_truncate(dkv_cache *c, int64_t n);      /* every layer's tail to at most n rows, n >= 0 */

/* A second cache over the same packed context, with a copy of the tail: one context, many questions. Thread-safe
   against other forks of the same context. All layers must be packed (STATE). CAPACITY if the tail does not fit. */
DKV_API dkv_result dkv_cache_fork(dkv_cache **out, const dkv_cache *c, int64_t capacity);

/* The next turn: a new cache of the context so far (T_c + tail tokens), compressed by refining the plan (see
   dkv_plan_refine). All tails must be of one length (STATE). c is unchanged. */
DKV_API dkv_result dkv_cache_recompress(dkv_cache **out, const dkv_cache *c, const dkv_pattern *p, dkv_beyond beyond,
                                        int64_t capacity);

DKV_API const dkv_plan  *dkv_cache_plan(const dkv_cache *c);
DKV_API const dkv_shape *dkv_cache_shape(const dkv_cache *c);
DKV_API dkv_type         dkv_cache_type(const dkv_cache *c);
/* Segments of layer l, valid until the cache is destroyed; the tail's length follows the cache. */
DKV_API dkv_segment      dkv_cache_context(const dkv_cache *c, int l);
DKV_API dkv_segment      dkv_cache_tail_segment(const dkv_cache *c, int l);
/* The attention of N_q queries whose keys were just appended: fills shape and segments. */
DKV_API dkv_attention    dkv_cache_attention(const dkv_cache *c, int l, dkv_tensor q, int64_t N_q, dkv_tensor out);

/* Plain, versioned image: plan, rows [n][d] of K then V per (layer, KV head), tails, CRC32. dst NULL asks for the size.
   Restoring gives the same bits in every later result. Safe for untrusted bytes. Errors as for patterns, and STATE. */
DKV_API dkv_result dkv_cache_save(void *dst, size_t *bytes, const dkv_cache *c);
DKV_API dkv_result dkv_cache_restore(dkv_cache **out, const void *data, size_t bytes, int64_t capacity,
                                     const dkv_allocator *alloc);

#ifdef __cplusplus
}
#endif
#endif /* DISTANCE_KV_H */
