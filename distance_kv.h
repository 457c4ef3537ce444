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
       if (dkv_pattern_matches(&pattern, L, H, Hkv, d)) return;   // made for another model

       size_t bytes;                                              // which positions survive: exact before prefill
       dkv_plan plan;
       dkv_plan_make(&plan, NULL, &bytes, &pattern, T_c, DKV_BEYOND_ERROR);
       void *memory = malloc(bytes);
       dkv_plan_make(&plan, memory, &bytes, &pattern, T_c, DKV_BEYOND_ERROR);

       dkv_cache *cache;                                          // packed context + room for 512 more tokens
       dkv_shape shape = {L, H, Hkv, d, d};
       dkv_cache_create(&cache, &plan, &shape, DKV_F16, 512, NULL);
       free(memory);
       for (int l = 0; l < L; l++) {                              // K, V of layer l: [T_c][Hkv][d], after RoPE
           dkv_segment dense = dkv_strided(dkv_thd(K[l], DKV_F32, Hkv, d), dkv_thd(V[l], DKV_F32, Hkv, d), T_c);
           dkv_cache_pack(cache, l, &dense);                      // layer l's dense K and V may be freed now
       }
       for (int l = 0; l < L; l++) {                              // one decoding step, at position T_c, T_c + 1, ...
           dkv_cache_append(cache, l, k, v, 1);                   // k, v: dkv_tensor of the new token, [1][Hkv][d]
           dkv_attention a = dkv_cache_attention(cache, l, q, 1, out);   // q, out: [1][H][d]
           dkv_attend(&a, 1, workspace, workspace_bytes, NULL);   // 64-byte aligned, dkv_attend_size bytes
       }

   DOES NOT: load models or differentiate them (it has the gates and the gated attention that learning needs, forward
   and backward; on CPUs), choose positions from the query, evict while decoding, re-rotate K, or print, exit, abort and
   allocate behind your back. The same API on GPUs is distance_kv_cuda.cu, declared at the end of [API].

   CONTENTS: grep for the tag
     [API]      all public types and functions; stop after it if you only want to use the library
     [BASE]     compiler, 16- and 8-bit elements, little-endian bytes, CRC, allocator
     [SIMD]     leaf kernels: scalar, AVX2+FMA+F16C, AVX-512, AMX; one table, chosen at run time
     [PATTERN]  the pattern file: read in place, checked, written
     [BINS]     position <-> relative-distance bin
     [UNION]    query-head bits -> KV-head bits
     [PLAN]     which positions survive, as runs per (layer, KV head)
     [PACK]     the packed layout: survivors in order, from any strided or packed source
     [ATTEND]   attention over packed context + tail
     [CACHE]    packed layers + growing tail that the library owns; fork, truncate, save, restore
     [SCORE]    where heads look: ranks of source tokens, from Q and K
     [GATES]    learning: Hard Concrete gates, union, penalties, AdamW, Top-K; gated attention and its gradients

   CONVENTIONS
     Letters   L layers, H query heads, Hkv KV heads, G = H / Hkv group, D bins, W bin width, S sink, R recent,
               T_c context length, N_q queries, d_k and d_v head dimensions; l, h, g, b, i index layer, query head,
               KV head, bin, position. Shapes are written [slowest]..[fastest].
     Sizes     positions, counts, strides and offsets are 64-bit signed; strides are in bytes.
     Memory    yours, unless a function takes a dkv_allocator. Passing NULL memory asks for the size. Nothing on the
               decoding path allocates.
     Errors    a dkv_result, 0 = DKV_OK. Bad data (files, sizes, shapes, memory) gives a code, and then nothing was
               written. Broken contracts (an index out of range, NULL data) hit DKV_ASSERT, or are undefined without.
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
    X(DKV_ERR_IO,      -15, "file cannot be read or written")                                            \
    X(DKV_ERR_DEVICE,  -16, "no CUDA device that this build runs on (sm_80 or newer), or the device failed")

typedef enum dkv_result {
#define DKV__ENUM(name, value, text) name = value,
    DKV_RESULTS(DKV__ENUM)
#undef DKV__ENUM
} dkv_result;

/* One English sentence for a result, never NULL. */
DKV_API const char *dkv_result_string(dkv_result r);
DKV_API const char *dkv_version(void);

/* ---- element types and tensors ------------------------------------------- */

/* Tensors are f32, f16 or bf16. Packed data may also be int8 or fp8 e4m3fn (largest value 448), with one f32 scale per
   (layer, KV head, channel), K and V apart: |error| <= scale / 2 for i8 where scale = max |x| / 127 of the channel, and
   <= max(|x| / 16, scale / 1024) for fp8 where scale = max |x| / 448. A channel of zeros has scale 1; one with a NaN or
   infinity has scale NaN, so that it shows. Queries are never quantised, and tails stay in 16 bits. */
typedef enum dkv_type { DKV_F32 = 0, DKV_F16 = 1, DKV_BF16 = 2, DKV_I8 = 3, DKV_FP8 = 4 } dkv_type;

DKV_API const char *dkv_type_name(dkv_type t);                    /* "f32", "f16", "bf16", "i8", "fp8"; else "?" */
DKV_API int64_t     dkv_type_bytes(dkv_type t);                   /* 4, 2, 2, 1, 1; 0 otherwise */
DKV_API dkv_type    dkv_tail_type(dkv_type packed);               /* of a cache's tail: f16 for i8 and fp8 */

/* dst[n] of type to <- src[n] of type from, both contiguous and of any alignment; rounds to nearest even. i8 and fp8
   have no scale here and saturate. */
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

/* Used by dkv_pattern_load and dkv_cache_* only; by forks from whatever thread calls them. NULL, or NULL functions:
   malloc and free (with DKV_NO_STDIO: DKV_ERR_MEMORY). free gets the size it was allocated with. Decoding reads all of
   a cache for every token: an allocator that gives it 2 MB pages makes that 15 to 25 % faster (measured on Sapphire
   Rapids; examples/dkv/run.c has one). */
typedef struct dkv_allocator {
    void *(*alloc)(void *user, size_t bytes);
    void (*free)(void *user, void *ptr, size_t bytes);
    void *user;
} dkv_allocator;

/* zlib's CRC32, which files of patterns and caches end with; crc: 0, or of the bytes before. */
DKV_API uint32_t dkv_crc32(uint32_t crc, const void *data, size_t bytes);

/* ---- SIMD level ---------------------------------------------------------- */

typedef enum dkv_simd {
    DKV_SIMD_SCALAR = 0, DKV_SIMD_AVX2 = 1, DKV_SIMD_AVX512 = 2, DKV_SIMD_AMX = 3, DKV_SIMD_COUNT
} dkv_simd;

/* AMX needs Linux's permission, which the first of these calls that may use it asks for, for the whole process; then
   alternate signal stacks must hold its 8 KB too. dkv_simd_limit(DKV_SIMD_AVX512) first: never asked. */
DKV_API dkv_simd    dkv_simd_supported(void);      /* highest level that CPU and operating system offer */
DKV_API dkv_simd    dkv_simd_level(void);          /* the level in use */
DKV_API dkv_simd    dkv_simd_limit(dkv_simd max);  /* use at most max from now on; returns the level then in use */
DKV_API const char *dkv_simd_name(dkv_simd level); /* "scalar", "avx2", "avx512", "amx" */

/* ---- pattern ------------------------------------------------------------- */

typedef enum dkv_budget { DKV_BUDGET_LOGICAL = 0, DKV_BUDGET_PHYSICAL = 1 } dkv_budget;

/* M[L][H][D] and where it applies (paper 3.2). Bits point into caller memory: rows [L][H] of dkv_pattern_words(D)
   little-endian 64-bit words at any alignment, bin b in bit b % 64 of word b / 64, bits past D zero. */
typedef struct dkv_pattern {
    int32_t     L, H, Hkv;  /* 1..4096 each; H % Hkv == 0 */
    int32_t     D;          /* bins, 1..2^20 */
    int32_t     d;          /* head dimension of K, 1..576; 0: any */
    int64_t     W, S, R;    /* bin width 1..2^36, sink and recent 0..2^36 (paper: 128, 128, 1024) */
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
DKV_API int     dkv_pattern_get(const dkv_pattern *p, int l, int h, int64_t b);  /* M[l][h][b], b 0..D-1 */
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
   dkv_pattern_read's errors. dkv_pattern_save (which uses malloc) writes PATH.tmp and renames it: a failure loses
   nothing. Pipes and devices are written to directly. */
DKV_API dkv_result dkv_pattern_load(dkv_pattern *out, const char *path, const dkv_allocator *alloc);
DKV_API void       dkv_pattern_free(dkv_pattern *p, const dkv_allocator *alloc); /* a zeroed or freed one: no effect */
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
   aligned (ALIGN), at least the size needed (CAPACITY). O(L * Hkv * D); does not look at K or V.

   From a pattern: Keep(l, g, i) = sink or recent or OR over the group of M[l][h][bin(i)]. T_c 0..2^36. FIELD, RANGE. */
DKV_API dkv_result dkv_plan_make(dkv_plan *plan, void *mem, size_t *bytes, const dkv_pattern *p, int64_t T_c,
                                 dkv_beyond beyond);

/* From any caller's positions: positions holds for each (l, g) in turn counts[l * Hkv + g] ascending positions in
   0..T_c-1. positions and counts NULL: everything is kept (the dense plan). ORDER (counts too: 0..T_c), FIELD. */
DKV_API dkv_result dkv_plan_from_positions(dkv_plan *plan, void *mem, size_t *bytes, int L, int Hkv, int64_t T_c,
                                           const int64_t *positions, const int64_t *counts);

/* For a second turn: what old kept, and its suffix [old->T_c, T_c), as far as the pattern keeps it at the new T_c.
   Evicted positions do not return. FIELD, RANGE, SHAPE, ORDER (T_c < old->T_c), OVERLAP (mem with old). */
DKV_API dkv_result dkv_plan_refine(dkv_plan *plan, void *mem, size_t *bytes, const dkv_plan *old,
                                   const dkv_pattern *p, int64_t T_c, dkv_beyond beyond);

/* positions[rows[l * Hkv + g]] <- original position of each packed row. */
DKV_API void    dkv_plan_positions(const dkv_plan *plan, int l, int g, int64_t *positions);
DKV_API int64_t dkv_plan_row(const dkv_plan *plan, int l, int g, int64_t pos); /* packed row of pos, -1: evicted */

/* What compression does at T_c, from the pattern alone. Two ratios, two things: memory follows the physical one. */
typedef struct dkv_stats {
    int64_t kept, total;                          /* KV positions over all (layer, KV head), whole context */
    int64_t compressible_kept, compressible;      /* the same without sink and recent */
    double  logical;        /* ones in the bins that T_c reaches / (L * H * min(D, bins_at)); 1 if there are none */
    double  physical;       /* compressible_kept / compressible; 1 if nothing is compressible */
    double  physical_total; /* kept / total; 1 if T_c = 0 */
} dkv_stats;

DKV_API dkv_result dkv_dry_run(dkv_stats *out, const dkv_pattern *p, int64_t T_c, dkv_beyond beyond); /* FIELD, RANGE */

typedef struct dkv_shape { int32_t L, H, Hkv, d_k, d_v; } dkv_shape; /* d in 1..576 */

/* Closed forms. packed = rows * (d_k + d_v) * element bytes over all (layer, KV head), and for i8 and fp8 their scales,
   (d_k + d_v) * 4 bytes each; alloc adds the padding of the packed layout; dense is packed for all T_c positions.
   Results beyond 2^63 are undefined. */
DKV_API int64_t dkv_kv_bytes_packed(const dkv_plan *plan, const dkv_shape *s, dkv_type type);
DKV_API int64_t dkv_kv_bytes_alloc(const dkv_plan *plan, const dkv_shape *s, dkv_type type);
DKV_API int64_t dkv_kv_bytes_dense(const dkv_shape *s, dkv_type type, int64_t T_c);

/* ---- pack ---------------------------------------------------------------- */

/* One layer's K and V in the packed layout, which depends on type and d only, never on the SIMD level. Per KV head:
     K  blocks of 16 tokens, whole cache lines each: f32, f16 [d_k][16]; bf16 [d_k/2][16][2]; i8, fp8 [d_k/4][16][4]
     V  by token: [d_v'], d_v' = d_v rounded up to 16; bf16 in pairs of tokens [d_v'][2]
   capacity rows each, a multiple of 16; K of all heads first, then V, then for i8 and fp8 the scales [Hkv][d_k'], then
   [Hkv][d_v'], f32. Reads never depend on bytes past rows[g]. */
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

/* Packs the survivors of layer l, in order. source holds all plan->T_c positions (row i = position i) of
   K [T_c][Hkv][d_k] and V [T_c][Hkv][d_v], K already rotated. mem NULL: *bytes = size needed. out refers to
   plan->rows: keep the plan. Rounds to type, see dkv_type (f16: beyond 65504 is infinity). CAPACITY, ALIGN, OVERLAP,
   SHAPE, TYPE. */
DKV_API dkv_result dkv_pack(dkv_packed *out, void *mem, size_t *bytes, dkv_type type, const dkv_plan *plan, int l,
                            int d_k, int d_v, const dkv_segment *source);

/* In place: moves the survivors of layer l to rows 0..rows-1 of the caller's own strided tensors, which then form the
   segment {.k, .v, .rows = plan->rows + l * Hkv}. SHAPE, TYPE, OVERLAP (k and v of one address). */
DKV_API dkv_result dkv_pack_front(dkv_tensor k, dkv_tensor v, const dkv_plan *plan, int l, int d_k, int d_v);

/* The plain way back: rows of KV head g to tensors [rows][Hkv][d], with scales applied. Exact when the types agree.
   TYPE, OVERLAP. */
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
    const float *sink;              /* NULL, or [H]: one extra logit per head that takes weight and gives no value; it
                                       counts in lse. -INFINITY: none for this head */
} dkv_attention;

/* Splits a task over threads: calls task(arg, ith, nth) for ith = 0..nth-1, returns when all are done. */
typedef struct dkv_parallel {
    void (*run)(void *user, int nth, void (*task)(void *arg, int ith, int nth), void *arg);
    void *user;
    int   nth;
} dkv_parallel;

/* a[n]: a batch of any mix of lengths, heads and layers; n = 1 for one. The workspace serves nth threads and keys of
   any length; 64-byte aligned. All checks happen before anything is written:
   SHAPE, TYPE, FIELD (scale or softcap negative or not finite), STATE (a layer not packed yet), CAPACITY (workspace),
   ALIGN, OVERLAP (out or lse with an input, each other or the workspace, from first to last byte, of each attention
   alone). dkv_attend_size looks at no memory. par NULL: OpenMP if compiled in, with as many threads as the workspace
   serves, else this thread alone. */
DKV_API dkv_result dkv_attend_size(size_t *bytes, const dkv_attention *a, int64_t n, int nth);
DKV_API dkv_result dkv_attend(const dkv_attention *a, int64_t n, void *ws, size_t ws_bytes, const dkv_parallel *par);

/* The same for an engine's own threads: every thread calls part, all wait, every thread calls combine. Work is shared
   out by equal bytes of K and V; results do not depend on nth. */
DKV_API dkv_result dkv_attend_part(const dkv_attention *a, int64_t n, void *ws, size_t ws_bytes, int ith, int nth);
DKV_API dkv_result dkv_attend_combine(const dkv_attention *a, int64_t n, void *ws, size_t ws_bytes, int ith, int nth);

/* ---- cache --------------------------------------------------------------- */

/* L packed layers (immutable once packed, shared between forks) and a tail of at most capacity tokens per layer, of
   dkv_tail_type.
   One allocation each for the shared part and the tail. Destroying the last fork frees the shared part. */
typedef struct dkv_cache dkv_cache;

/* Copies the plan, whose memory may be freed. The plan with T_c = 0 gives a plain dense cache. SHAPE, TYPE, FIELD
   (capacity), MEMORY. */
DKV_API dkv_result dkv_cache_create(dkv_cache **out, const dkv_plan *plan, const dkv_shape *shape, dkv_type type,
                                    int64_t capacity, const dkv_allocator *alloc);
DKV_API void       dkv_cache_destroy(dkv_cache *c); /* NULL is allowed */

/* Packs layer l once, from all T_c dense rows. Layers may come in any order, from several threads. STATE: packed
   already, or T_c = 0 and nothing to pack. */
DKV_API dkv_result dkv_cache_pack(dkv_cache *c, int l, const dkv_segment *source);

/* Appends n rows of K [n][Hkv][d_k] and V [n][Hkv][d_v] to the tail of layer l. CAPACITY: nothing was appended. */
DKV_API dkv_result dkv_cache_append(dkv_cache *c, int l, dkv_tensor k, dkv_tensor v, int64_t n);
DKV_API int64_t    dkv_cache_tail(const dkv_cache *c, int l);        /* rows in the tail of layer l */
DKV_API int64_t    dkv_cache_capacity(const dkv_cache *c);
DKV_API dkv_result dkv_cache_truncate(dkv_cache *c, int64_t n);      /* every layer's tail to at most n rows, n >= 0 */

/* A second cache over the same packed context, with a copy of the tail: one context, many questions. Thread-safe
   against other forks of the same context, not against appends to c. All layers must be packed (STATE). CAPACITY if
   the tail does not fit. */
DKV_API dkv_result dkv_cache_fork(dkv_cache **out, const dkv_cache *c, int64_t capacity);

/* The next turn: a new cache of the context so far (T_c + tail tokens), compressed by refining the plan (see
   dkv_plan_refine). All tails must be of one length (STATE). c is unchanged. i8 and fp8 are rounded anew. */
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

/* ---- retrieval score (paper 3.1) ----------------------------------------- */

/* rank[N_q][H] <- how many keys of query n's row come before row source[n] of the context, by logit, ties by position;
   NaN comes before everything, and last where it is the source's. A head retrieves if rank < 5. The row is causal and
   ungated, context and tail, and no row of logits is ever in memory. source[n] -1: not asked, and rank is -1 for its
   heads. Of a, only H, Hkv, d_k, N_q, q, scale and the segments' K matter; context must hold all heads' rows up to the
   source (SHAPE). Workspace, threads and errors as for dkv_attend. rank may not overlap any input. */
DKV_API dkv_result dkv_score_size(size_t *bytes, const dkv_attention *a, int nth);
DKV_API dkv_result dkv_score(int64_t *rank, const dkv_attention *a, const int64_t *source, void *ws, size_t ws_bytes,
                             const dkv_parallel *par);

/* ---- gates (paper 3.3) --------------------------------------------------- */

/* The logits a of Hard Concrete gates: [L][H][D], or tied, one per KV head: [L][Hkv][D]. A tied gate stands for all
   query heads of its group. Sizes as in dkv_pattern; a is finite. */
typedef struct dkv_gates { int32_t L, H, Hkv, D; int tied; } dkv_gates;

DKV_API dkv_result dkv_gates_check(const dkv_gates *g);        /* FIELD, SHAPE; the functions below assert it */
DKV_API int64_t    dkv_gates_count(const dkv_gates *g);        /* elements of a */

/* Philox4x32-10. The noise of a gate is word 0 of key = seed, counter = (step, context, flat gate low, high). */
DKV_API void  dkv_philox(uint32_t out[4], const uint32_t counter[4], uint64_t key);
typedef struct dkv_draw { uint64_t seed; uint32_t step, context; } dkv_draw;
DKV_API float dkv_gate_noise(dkv_draw draw, int64_t gate);     /* uniform in [1e-6, 1 - 1e-6], a multiple of 2^-24 */

/* z = clamp(1.2 sigmoid(1.5 (ln u - ln(1-u) + a)) - 0.1, 0, 1), the gate of logit a under noise u; *dz <- dz/da, 0
   where z is clamped. p = P(z > 0), and P(z = 1). The same bits on CPU and GPU. */
DKV_API float dkv_gate_z(float a, float u, float *dz);
DKV_API float dkv_gate_p(float a);
DKV_API float dkv_gate_p_one(float a);

/* a <- logits whose p is clamp(sigmoid(logit 0.7 + 6 (S - mean S)), 0.001, 0.999). S[L][H][D] are retrieval scores; a
   tied gate takes its group's largest, and the mean is over those. */
DKV_API void dkv_gates_init(float *a, const dkv_gates *g, const float *S);

/* One draw of all gates and their union over each group, u = 1 - prod(1 - z): u, ln_u [L][Hkv][D], either may be NULL.
   ln_u is -inf where u < 2^-126: closed. */
DKV_API void dkv_gates_union(float *u, float *ln_u, const dkv_gates *g, const float *a, dkv_draw draw);
/* da += d(ln u) / u * du/dz * dz/da for the same draw, d_ln_u[L][Hkv][D] as dkv_gated_backward gives it. Closed cells
   have no gradient. */
DKV_API void dkv_gates_union_backward(float *da, const dkv_gates *g, const float *a, dkv_draw draw,
                                      const float *d_ln_u);

/* Returns the expected share kept, mean p over the gates of the model (logical) or mean 1 - prod(1 - p) over cells
   (layer, KV head, bin) (physical; the same if tied), and adds lambda times its gradient to da, unless NULL. */
DKV_API double dkv_gates_penalty(float *da, const dkv_gates *g, const float *a, dkv_budget budget, float lambda);

/* x *= min(1, 1 / (norm + 1e-6)); returns the norm before. */
DKV_API double dkv_gates_clip(float *x, int64_t n);
/* Step t = 1, 2, ... with betas 0.9 and 0.999, eps 1e-8, bias correction, no decay. m, v: zero before the first. */
DKV_API void   dkv_gates_adamw(float *a, float *m, float *v, const float *da, int64_t n, int64_t t, double rate);

/* M[L][H][D] <- 1 for the chosen, exactly. Logical: the rint(rho L H D) gates of largest a. Physical, or tied: the
   rint(rho L Hkv D) cells of largest a in the group, all of the group's bits set. Ties go to the lower flat index.
   by_p: order by p in f32 instead, where saturated gates tie. *K <- ones. FIELD: rho not in 0..1. */
DKV_API dkv_result dkv_gates_top(unsigned char *M, int64_t *K, const dkv_gates *g, const float *a, dkv_budget budget,
                                 double rho, int by_p);
DKV_API void       dkv_gates_or(unsigned char *open, const dkv_gates *g, const unsigned char *M); /* [L][Hkv][D] */

/* Fills sizes, K, bits and p of out, which point to bits (L * H * dkv_pattern_words(D) * 8 bytes) and p (NULL, or
   L * H * D * 2 bytes). The other fields stay as they are. */
DKV_API void dkv_gates_export(dkv_pattern *out, void *bits, void *p, const dkv_gates *g, const unsigned char *M,
                              const float *a);

/* ---- gated attention (paper 3.3) ----------------------------------------- */

/* One question after a shared context, N_q tokens, causal; H, Hkv, d_k, d_v are the context's. Keep out and out_relaxed
   in f32: backward reads them, and rounds no better than they are. */
typedef struct dkv_suffix {
    int64_t    N_q;
    dkv_tensor q, k, v;           /* [N_q][H][d_k], [N_q][Hkv][d_k], [N_q][Hkv][d_v] */
    dkv_tensor out;               /* [N_q][H][d_v], written by forward, as are the next three */
    float     *lse;               /* [N_q][H] */
    dkv_tensor out_relaxed;       /* straight-through only: what out and lse would be with relaxed gates */
    float     *lse_relaxed;
    dkv_tensor d_out;             /* [N_q][H][d_v], the loss's gradient by out */
    dkv_tensor dq, dk, dv;        /* as q, k, v; written by backward */
} dkv_suffix;

/* One layer of a context with its gates, and its suffixes. A key's logit is scale * q . k + ln u of its KV head and
   bin; sink, recent and suffix have u = 1. ln u < -87.3366 is closed (u < 2^-126): the keys are not read.
   Straight-through, if open is given: out = P V with the open bins only, while gradients are those of
   P_relaxed + stopgrad(P_open - P_relaxed): dV of the suffix by P_open, all others by P_relaxed. K and V of the context
   get none. No softcap, no sink logit. */
typedef struct dkv_gated {
    int32_t              H, Hkv, d_k, d_v;
    int64_t              T_c, W, S, R, D; /* as in dkv_pattern; T_c <= S + R + W * D (RANGE) */
    float                scale;           /* 0: 1 / sqrt(d_k) */
    dkv_segment          context;         /* row i is position i, all T_c of them */
    const float         *ln_u;            /* [Hkv][D] */
    const unsigned char *open;            /* NULL, or [Hkv][D] */
    const dkv_suffix    *suffix;          /* [n_suffix] */
    int64_t              n_suffix;
    float               *d_ln_u;          /* [Hkv][D], written by backward */
} dkv_gated;

/* c[n]: a batch. Workspace, threads, errors as for dkv_attend; results do not depend on the number of threads.
   backward takes what forward took and wrote. */
DKV_API dkv_result dkv_gated_size(size_t *bytes, const dkv_gated *c, int64_t n, int nth);
DKV_API dkv_result dkv_gated_forward(const dkv_gated *c, int64_t n, void *ws, size_t ws_bytes, const dkv_parallel *par);
DKV_API dkv_result dkv_gated_backward(const dkv_gated *c, int64_t n, void *ws, size_t ws_bytes,
                                      const dkv_parallel *par);

/* ---- CUDA: the same API on a GPU, in distance_kv_cuda.cu ------------------ */

/* Structs are those above with device pointers inside, except that dkv_packed.rows and dkv_segment.rows stay host
   arrays; stream is a cudaStream_t. Elements lie at multiples of their size (ALIGN). Nothing waits for the device but
   cache_create, _destroy, _fork, _upload and _download, and only dkv_cuda_cache_* and dkv_cuda_plan allocate or copy
   from the host: the rest may be captured into a graph. The same call gives the same bits, run to run and beside other
   streams. DEVICE whenever the runtime reports an error. Linking this part needs the CUDA runtime; the tensor map
   encoder is asked from the driver at run time. A step of decoding, one work per layer made by dkv_cuda_prepare,
   capturable once for a whole generation:

       dkv_cuda_advance(length, 1, 1, stream);                        // device-side length of the tail
       for each layer: dkv_cuda_append(&work[l], k, v, stream), dkv_cuda_attend(&work[l], stream);

   Packed on the device: plain rows. K of head g is [round_up(rows[g], 128)][d_k'], heads one after another, then V in
   the same way with d_v', d' = d rounded up so that a row is a multiple of 16 bytes; unused rows and columns are zero.
   For i8 and fp8 the scales [Hkv][d_k'] and [Hkv][d_v'], f32, follow. f32 is not a packed type here. */

/* What this process can use: compute capability (90 for sm_90) in *arch and multiprocessors in *sms. DEVICE. */
extern dkv_result dkv_cuda_device(int *arch, int *sms);
/* From now on take a device for one of this architecture if it is newer: its kernels, and shared memory as such devices
   have. 80 forces the mma.sync path, 86 with 99 KB, as GeForce cards have. Returns the architecture then in use. */
extern int dkv_cuda_limit(int arch);

/* *on_device <- plan with its arrays in device memory mem (NULL: asks for *bytes). Copies from pageable memory: call it
   outside of a capture, and keep plan until the stream has passed. CAPACITY. */
extern dkv_result dkv_cuda_plan(dkv_plan *on_device, void *mem, size_t *bytes, const dkv_plan *plan, void *stream);

/* dkv_pack on the device: f16, bf16, i8 and fp8 from f32, f16 or bf16; d a multiple of 8, at most 256. plan on the host
   gives sizes, on_device the runs. mem 128-byte aligned. SHAPE, TYPE, CAPACITY, ALIGN. */
extern dkv_result dkv_cuda_pack(dkv_packed *out, void *mem, size_t *bytes, dkv_type type, const dkv_plan *plan,
                                const dkv_plan *on_device, int l, int d_k, int d_v, const dkv_segment *source,
                                void *stream);
/* Rows of KV head g as plain f32, f16 or bf16 tensors [rows][Hkv][d], with scales applied. */
extern dkv_result dkv_cuda_unpack(dkv_tensor k, dkv_tensor v, const dkv_packed *packed, int g, void *stream);

/* A batch of attentions made ready: private, copy it freely. */
typedef struct dkv_cuda_work {
    void   *block, *ws;
    const int64_t *lengths;
    int64_t n, items, items_at, arrived_at, rows, longest;
    int32_t ctas, blocks, split, kernel, type, d, tma, shared, overlap;
    uint64_t map[64];
} dkv_cuda_work;

/* Prepares a[0..n-1] once for any number of launches: tile lists and tensor maps go to block (device, 128-byte
   aligned), partial results of a launch to ws (device, 128-byte aligned; launches on one stream may share one).
   context: packed by dkv_cuda_pack, or strided with equal rows, or empty. tail: strided. Both f16 or both bf16, and f16
   behind i8 and fp8. d_k and d_v are multiples of 8, at most 256. Strides of 16 bytes, none negative, with stride_dim =
   element take TMA, others slower loads.
   lengths: NULL, or device array [n] of the tails' lengths, read at each launch; then tail.n is what they may grow to
   (every row up to it must be readable, and may hold anything). A length beyond it counts as it.
   ctas: 0 for all multiprocessors, or a smaller grid. SHAPE, TYPE, FIELD, CAPACITY, ALIGN; DEVICE for want of shared
   memory: d > 128 takes up to 163 KB a CTA, which sm_80 has; sm_86, sm_89 and sm_120 have 99. */
extern dkv_result dkv_cuda_attend_size(size_t *block_bytes, size_t *ws_bytes, const dkv_attention *a, int64_t n);
extern dkv_result dkv_cuda_prepare(dkv_cuda_work *work, const dkv_attention *a, int64_t n, const int64_t *lengths,
                                   void *block, size_t block_bytes, void *ws, size_t ws_bytes, int ctas, void *stream);
/* dkv_attend on the device: one launch, or two. A work runs on one stream at a time. */
extern dkv_result dkv_cuda_attend(const dkv_cuda_work *work, void *stream);

/* lengths[i] += count for i = 0..n-1: the step's tokens come into view. */
extern dkv_result dkv_cuda_advance(int64_t *lengths, int64_t n, int64_t count, void *stream);
/* Writes rows length - N_q .. length - 1 of every tail of the work: k [sum of N_q][Hkv][d_k], v likewise, the
   attentions' rows one after another; rounds to the tail's type. Call it before dkv_cuda_attend of the step. */
extern dkv_result dkv_cuda_append(const dkv_cuda_work *work, dkv_tensor k, dkv_tensor v, void *stream);

/* Gated attention of a batch made ready: private, copy it freely. */
typedef struct dkv_cuda_gated {
    void   *block, *ws;
    int64_t sizes[40];
} dkv_cuda_gated;

/* dkv_gated_forward and _backward on the device, prepared once for any number of passes while the values behind the
   pointers change: tables go to block (device, 128-byte aligned), what passes write to ws (device, 128-byte aligned;
   works whose passes run on one stream may share one). Either pass stands alone: backward takes what forward wrote to
   out, lse and the relaxed ones. The lists of open bins are made on the device: ln_u and open may come from kernels
   before.
   context: strided, or packed with all T_c rows of every head; f16 or bf16, rows of 16 bytes, none backwards (ALIGN),
   the same type in the whole batch, which is straight-through as a whole or not at all (FIELD). d_k and d_v: multiples
   of 8, at most 128. Suffixes: any strides and f32, f16 or bf16; q, k, v and d_out are rounded to the context's type.
   T_c at most 2^30. Outputs may not overlap inputs, which is not checked. A NaN in a query stays in its rows of out and
   dq; one in the k or v of a suffix (also a number that f16 does not hold) may reach rows of other suffixes of its
   context. SHAPE, TYPE, FIELD, RANGE, STATE, CAPACITY, ALIGN. */
extern dkv_result dkv_cuda_gated_size(size_t *block_bytes, size_t *ws_bytes, const dkv_gated *c, int64_t n);
extern dkv_result dkv_cuda_gated_prepare(dkv_cuda_gated *work, const dkv_gated *c, int64_t n, void *block,
                                         size_t block_bytes, void *ws, size_t ws_bytes, void *stream);
extern dkv_result dkv_cuda_gated_forward(const dkv_cuda_gated *work, void *stream);
extern dkv_result dkv_cuda_gated_backward(const dkv_cuda_gated *work, void *stream);

/* dkv_cache on the device: L packed layers and a tail of capacity tokens, at most 2^21 (FIELD), rounded up to 128.
   Create, pack (its own layer) and fork allocate device memory. One length for all layers. The plan is copied. */
typedef struct dkv_cuda_cache dkv_cuda_cache;
extern dkv_result dkv_cuda_cache_create(dkv_cuda_cache **out, const dkv_plan *plan, const dkv_shape *shape,
                                        dkv_type type, int64_t capacity);
extern void       dkv_cuda_cache_destroy(dkv_cuda_cache *c);
extern dkv_result dkv_cuda_cache_pack(dkv_cuda_cache *c, int l, const dkv_segment *source, void *stream);
extern dkv_result dkv_cuda_cache_fork(dkv_cuda_cache **out, const dkv_cuda_cache *c, int64_t capacity, void *stream);
/* Device pointer to the tail's length, 1 element, for dkv_cuda_advance and the lengths of dkv_cuda_prepare; the caller
   says what it is with truncate, and only advances it between. */
extern int64_t   *dkv_cuda_cache_length(const dkv_cuda_cache *c);
extern dkv_result dkv_cuda_cache_truncate(dkv_cuda_cache *c, int64_t n, void *stream); /* length <- n */
/* The attention of N_q queries over layer l, for dkv_cuda_prepare with dkv_cuda_cache_length. */
extern dkv_attention dkv_cuda_cache_attention(const dkv_cuda_cache *c, int l, dkv_tensor q, int64_t N_q,
                                              dkv_tensor out);
extern const dkv_plan *dkv_cuda_cache_plan(const dkv_cuda_cache *c);
extern int64_t    dkv_cuda_cache_bytes(const dkv_cuda_cache *c); /* device memory it holds now */
/* To and from the CPU's cache, tail included: saved files are the CPU's. Download waits for the stream,
   upload for the device. */
extern dkv_result dkv_cuda_cache_upload(dkv_cuda_cache **out, const dkv_cache *from, int64_t capacity, void *stream);
extern dkv_result dkv_cuda_cache_download(dkv_cache **out, const dkv_cuda_cache *c, int64_t capacity,
                                          const dkv_allocator *alloc, void *stream);

/* dkv_score on the device for questions about one context: the attentions a[n] share H, Hkv, d_k, type and context (16
   bits, packed or strided with equal rows), and each has its own queries and tail. K is read once for all of them.
   source is a host array, read during the call, of the questions' queries one after another, and rank[sum of N_q][H]
   is on the device likewise. The workspace is on the device, 128-byte aligned. SHAPE, TYPE, FIELD, STATE, CAPACITY,
   ALIGN. */
extern dkv_result dkv_cuda_score_size(size_t *ws_bytes, const dkv_attention *a, int64_t n);
extern dkv_result dkv_cuda_score(int64_t *rank, const dkv_attention *a, int64_t n, const int64_t *source, void *ws,
                                 size_t ws_bytes, void *stream);

/* The functions of gates, arrays on the device and sums in a fixed order; at most 2^31 - 1 gates (SHAPE). What they
   write has the CPU's bits, given the same inputs, but for the order of the sums in penalty's mean and clip's norm.
   ws: DKV_CUDA_GATES_WS bytes on the device, 16-byte aligned; calls on one stream may share it. FIELD, SHAPE. */
#define DKV_CUDA_GATES_WS 16384

/* The draws of n contexts of a step, draw.context .. draw.context + n - 1: u, ln_u [n][L][Hkv][D], either NULL. */
extern dkv_result dkv_cuda_gates_union(float *u, float *ln_u, const dkv_gates *g, const float *a, dkv_draw draw,
                                       int64_t n, void *stream);
/* da += the gradients of the same n draws, in the order of contexts; d_ln_u [n][L][Hkv][D]. */
extern dkv_result dkv_cuda_gates_union_backward(float *da, const dkv_gates *g, const float *a, dkv_draw draw, int64_t n,
                                                const float *d_ln_u, void *stream);
/* *mean (device, or NULL) <- the expected share kept; da, unless NULL, += lambda times its gradient. */
extern dkv_result dkv_cuda_gates_penalty(double *mean, float *da, const dkv_gates *g, const float *a, dkv_budget budget,
                                         float lambda, void *ws, void *stream);
/* *norm (device, or NULL) <- the norm before. */
extern dkv_result dkv_cuda_gates_clip(double *norm, float *x, int64_t n, void *ws, void *stream);
extern dkv_result dkv_cuda_gates_adamw(float *a, float *m, float *v, const float *da, int64_t n, int64_t t, double rate,
                                       void *stream);
/* M is on the device; *K, on the host, is known at once. */
extern dkv_result dkv_cuda_gates_top(unsigned char *M, int64_t *K, const dkv_gates *g, const float *a,
                                     dkv_budget budget, double rho, int by_p, void *ws, void *stream);
extern dkv_result dkv_cuda_gates_or(unsigned char *open, const dkv_gates *g, const unsigned char *M, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* DISTANCE_KV_H */

#ifdef DISTANCE_KV_IMPLEMENTATION
#ifndef DKV__IMPLEMENTED
#define DKV__IMPLEMENTED

/* ==========================================================================
   [BASE]  compiler, element conversion, little-endian bytes, CRC, allocator
   in:  bytes of any alignment
   out: values; nothing here knows what they mean
   ========================================================================== */
#include <math.h>
#include <string.h>

#ifndef DKV_ASSERT
#include <assert.h>
#define DKV_ASSERT(x) assert(x)
#endif

#ifndef DKV_NO_STDIO
#include <stdio.h>
#include <stdlib.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/stat.h>
#endif
#endif

#if defined(__GNUC__) || defined(__clang__)
#define DKV__PRIVATE static __attribute__((unused))
#define DKV__INLINE  static inline __attribute__((always_inline, unused))
#define DKV__ATOMIC_LOAD(p)     __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define DKV__ATOMIC_STORE(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define DKV__ATOMIC_ADD(p, v)   __atomic_add_fetch(p, v, __ATOMIC_ACQ_REL) /* the new value */
#else
#ifdef _MSC_VER
#include <intrin.h>
#define DKV__ATOMIC_ADD(p, v)   (_InterlockedExchangeAdd((volatile long *)(p), v) + (v))
#endif
#define DKV__PRIVATE static
#define DKV__INLINE  static inline
#define DKV__ATOMIC_LOAD(p)     (*(volatile int *)(p))
#define DKV__ATOMIC_STORE(p, v) (*(volatile int *)(p) = (v))
#endif

#if defined(__clang__)
#define DKV__UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define DKV__UNROLL _Pragma("GCC unroll 16")
#else
#define DKV__UNROLL
#endif

#define DKV__ALIGN 64   /* of every buffer that leaves read: a cache line, a 512-bit register */
#define DKV__MAX_D 576  /* largest head dimension (MLA's latent K) */
#define DKV__MAX_HEADS 4096 /* and layers */
#define DKV__FAR   ((int64_t)1 << 36) /* limit of lengths that a file or caller may name: totals stay in 64 bits */

DKV__INLINE int64_t dkv__min(int64_t a, int64_t b) { return a < b ? a : b; }
DKV__INLINE int64_t dkv__max(int64_t a, int64_t b) { return a > b ? a : b; }
DKV__INLINE int64_t dkv__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; } /* a >= 0, b > 0 */
DKV__INLINE int64_t dkv__round_up(int64_t a, int64_t b) { return dkv__ceil_div(a, b) * b; }

DKV_API const char *dkv_version(void) { return DKV_VERSION; }

DKV_API const char *dkv_result_string(dkv_result r) {
    switch (r) {
#define DKV__TEXT(name, value, text) case name: return text;
        DKV_RESULTS(DKV__TEXT)
#undef DKV__TEXT
    }
    return "unknown result";
}

DKV_API const char *dkv_type_name(dkv_type t) {
    static const char *const names[] = {"f32", "f16", "bf16", "i8", "fp8"};
    return (unsigned)t <= DKV_FP8 ? names[t] : "?";
}

DKV_API int64_t dkv_type_bytes(dkv_type t) {
    static const int8_t bytes[] = {4, 2, 2, 1, 1};
    return (unsigned)t <= DKV_FP8 ? bytes[t] : 0;
}

DKV__INLINE int dkv__tensor_type_ok(dkv_type t) { return (unsigned)t <= DKV_BF16; }
DKV__INLINE int dkv__scaled(dkv_type t) { return t == DKV_I8 || t == DKV_FP8; }

DKV_API dkv_type dkv_tail_type(dkv_type packed) { return dkv__scaled(packed) ? DKV_F16 : packed; }

DKV_API dkv_tensor dkv_thd(const void *data, dkv_type type, int64_t heads, int64_t d) {
    int64_t    e = dkv_type_bytes(type);
    dkv_tensor t;
    t.data = (void *)(uintptr_t)data; /* inputs are only read: see each function */
    t.type = type;
    t.stride_token = heads * d * e;
    t.stride_head = d * e;
    t.stride_dim = e;
    return t;
}

/* ---- 16-bit and 8-bit elements ---- */

DKV__INLINE uint32_t dkv__bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
DKV__INLINE float dkv__float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

DKV__INLINE float dkv__f32_from_bf16(uint16_t h) { return dkv__float_of((uint32_t)h << 16); }

DKV__INLINE uint16_t dkv__bf16_from_f32(float x) {
    uint32_t u = dkv__bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u); /* quiet: rounding must not make it inf */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

DKV__INLINE float dkv__f32_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest > 0x7c00u) return dkv__float_of(sign | 0x7fc00000u | (rest & 0x3ffu) << 13);
    if (rest == 0x7c00u) return dkv__float_of(sign | 0x7f800000u);
    if (rest >= 0x0400u) return dkv__float_of(sign | ((rest << 13) + 0x38000000u));
    return dkv__float_of(sign | dkv__bits_of((float)rest * 5.9604644775390625e-8f)); /* rest * 2^-24, exact */
}

DKV__INLINE uint16_t dkv__f16_from_f32(float x) {
    uint32_t u = dkv__bits_of(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 2^16 or more */
    if (rest < 0x38800000u) { /* below 2^-14: adding 0.5 rounds to a multiple of 2^-24, to nearest even */
        return (uint16_t)(sign | (dkv__bits_of(dkv__float_of(rest) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13));
}

/* Saturates: the largest is 448 = 0x7e, 0x7f is NaN. */
DKV__INLINE uint8_t dkv__fp8_from_f32(float x) {
    uint32_t u = dkv__bits_of(x), sign = u >> 24 & 0x80u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
    if (rest >= 0x43e00000u) return (uint8_t)(sign | 0x7eu);
    if (rest < 0x3c800000u) { /* below 2^-6: adding 2^14 rounds to a multiple of 2^-9, to nearest even */
        return (uint8_t)(sign | (dkv__bits_of(dkv__float_of(rest) + 16384.0f) - 0x46800000u));
    }
    return (uint8_t)(sign | ((rest - 0x3c000000u + 0x7ffffu + (rest >> 20 & 1u)) >> 20));
}

/* The bits as an f32 exponent and mantissa, 120 powers of two too low. */
DKV__INLINE float dkv__f32_from_fp8(uint8_t b) {
    if ((b & 0x7fu) == 0x7fu) return dkv__float_of((uint32_t)(b & 0x80u) << 24 | 0x7fc00000u);
    return dkv__float_of((uint32_t)(b & 0x80u) << 24 | (uint32_t)(b & 0x7fu) << 20) * 0x1p120f;
}

/* Saturates at 127 either way; NaN is 0 (its scale is NaN). Adding 1.5 * 2^23 rounds to nearest even. */
DKV__INLINE int8_t dkv__i8_from_f32(float x) {
    if (!(x > -127.0f)) return (int8_t)(x <= -127.0f ? -127 : 0);
    return x >= 127.0f ? 127 : (int8_t)(int32_t)(dkv__bits_of(x + 12582912.0f) - 0x4b400000u);
}

/* ---- little-endian bytes of any alignment ---- */

DKV__INLINE uint32_t dkv__get32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
DKV__INLINE uint64_t dkv__get64(const uint8_t *p) { return dkv__get32(p) | (uint64_t)dkv__get32(p + 4) << 32; }
DKV__INLINE void dkv__put32(uint8_t *p, uint32_t v) { for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> 8 * i); }
DKV__INLINE void dkv__put64(uint8_t *p, uint64_t v) { for (int i = 0; i < 8; i++) p[i] = (uint8_t)(v >> 8 * i); }

DKV__INLINE int dkv__popcount(uint64_t v) {
    v -= v >> 1 & 0x5555555555555555u;
    v = (v & 0x3333333333333333u) + (v >> 2 & 0x3333333333333333u);
    return (int)(((v + (v >> 4)) & 0x0f0f0f0f0f0f0f0fu) * 0x0101010101010101u >> 56);
}

/* CRC32 with zlib's polynomial, 8 bytes a step: table[k][x] advances byte x over k further zero bytes. */
DKV_API uint32_t dkv_crc32(uint32_t crc, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    uint32_t       table[8][256];
    for (uint32_t x = 0; x < 256; x++) {
        uint32_t c = x;
        for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (0xedb88320u & (0u - (c & 1u)));
        table[0][x] = c;
    }
    for (int k = 1; k < 8; k++) {
        for (uint32_t x = 0; x < 256; x++) table[k][x] = table[k - 1][x] >> 8 ^ table[0][table[k - 1][x] & 255u];
    }
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t a = crc ^ dkv__get32(p), b = dkv__get32(p + 4);
        crc = table[7][a & 255u] ^ table[6][a >> 8 & 255u] ^ table[5][a >> 16 & 255u] ^ table[4][a >> 24] ^
              table[3][b & 255u] ^ table[2][b >> 8 & 255u] ^ table[1][b >> 16 & 255u] ^ table[0][b >> 24];
    }
    for (; n > 0; n--, p++) crc = crc >> 8 ^ table[0][(crc ^ *p) & 255u];
    return ~crc;
}

/* ---- memory ---- */

DKV__PRIVATE void *dkv__alloc(const dkv_allocator *a, size_t bytes) {
    if (a && a->alloc) return a->alloc(a->user, bytes);
#ifndef DKV_NO_STDIO
    return malloc(bytes);
#else
    return NULL;
#endif
}

DKV__PRIVATE void dkv__free(const dkv_allocator *a, void *ptr, size_t bytes) {
    if (a && a->alloc) { /* the pair belongs together: without free, the allocator never frees */
        if (a->free) a->free(a->user, ptr, bytes);
        return;
    }
#ifndef DKV_NO_STDIO
    free(ptr);
#endif
}

DKV__INLINE int dkv__aligned(const void *p, size_t to) { return ((uintptr_t)p & (to - 1)) == 0; }

/* Strides may be nonsense until the tensor is read: their products must not be undefined. */
DKV__INLINE int64_t dkv__wrapping_mul(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

/* The address range that a strided tensor can touch; empty when a count is 0. */
typedef struct dkv__range { uintptr_t begin, end; } dkv__range;

DKV__PRIVATE dkv__range dkv__tensor_range(const dkv_tensor *t, int64_t tokens, int64_t heads, int64_t d) {
    dkv__range r = {0, 0};
    if (tokens <= 0 || heads <= 0 || d <= 0) return r;
    uintptr_t low = 0, high = 0;
    int64_t   last[3], i;
    last[0] = dkv__wrapping_mul(tokens - 1, t->stride_token);
    last[1] = dkv__wrapping_mul(heads - 1, t->stride_head);
    last[2] = dkv__wrapping_mul(d - 1, t->stride_dim);
    for (i = 0; i < 3; i++) {
        low += (uintptr_t)dkv__min(last[i], 0);
        high += (uintptr_t)dkv__max(last[i], 0);
    }
    r.begin = (uintptr_t)t->data + low;
    r.end = (uintptr_t)t->data + high + (uintptr_t)dkv_type_bytes(t->type);
    return r;
}

DKV__INLINE int dkv__overlap(dkv__range a, dkv__range b) { return a.begin < b.end && b.begin < a.end; }
DKV__INLINE dkv__range dkv__byte_range(const void *p, size_t bytes) {
    dkv__range r = {(uintptr_t)p, (uintptr_t)p + bytes};
    return r;
}

/* ==========================================================================
   [SIMD]  leaf kernels on one tile of keys, one set per instruction set
   in:  f32 query rows (already scaled), packed K and V of a tile
   out: scores, probabilities, accumulated outputs, all f32
   invariant: each row is summed by itself and in the same order, whatever rows share the call; with tiles, in an order
              that depends on its place among the rows, which is a matter of shapes
   ========================================================================== */

#define DKV__BLOCK 16  /* tokens in a K block: one 512-bit register of f32 lanes */
#define DKV__TILE  256 /* keys between two rescalings of a row; S of 24 rows and V of 64 keys stay in L1 */
#define DKV__TILE_ROWS 16 /* rows of an AMX tile, */
#define DKV__TILE_KEYS 32 /* and the keys (or dimensions) that a product takes at a step */
#define DKV__STRIP 64  /* keys that mix passes over per column strip, so that V is read from memory once */

/* A matrix of f32 as the sum of n matrices of bf16. */
typedef struct dkv__parts {
    char   *at;
    int64_t n, bytes; /* bytes: from a part to the next */
} dkv__parts;

/* Products of parts, of at most DKV__TILE_ROWS rows; wk: d rounded up to DKV__TILE_KEYS; the rest as below. */
typedef struct dkv__tile_kernels {
    /* parts of [m][n], n % DKV__TILE_KEYS == 0; of packed K as [n/16][wk/2][16][2]; of packed V as [n/2][dv][2] */
    void (*split_rows)(dkv__parts x, int64_t ldx, const float *from, int64_t ldf, int64_t m, int64_t n);
    void (*split_k)(dkv__parts k, const void *from, dkv_type type, int64_t d, int64_t n);
    void (*split_v)(dkv__parts v, const void *from, dkv_type type, int64_t dv, int64_t n);
    void (*scores)(float *s, dkv__parts q, int64_t ldq, int64_t m, dkv__parts k, int64_t wk, int64_t n);
    void (*mix)(float *o, int64_t ldo, const float *p, const float *alpha, int64_t m, dkv__parts v, int64_t dv,
                int64_t n); /* n % DKV__TILE_KEYS == 0 */
} dkv__tile_kernels;

/* All rows of a call see the same n keys, 1..DKV__TILE. Strides in floats; s and p rows are DKV__TILE apart. */
typedef struct dkv__kernels {
    /* s[m][n] <- q[m][d] . k; computes whole blocks, so lanes n.. of s are undefined */
    void (*scores)(float *s, const float *q, int64_t ldq, int64_t m, const void *k, dkv_type type, int64_t d,
                   int64_t n);
    /* one online-softmax step: s[m][n] -> exp(s - max) in place; updates max[m], sum[m], and gives
       alpha[m] = exp(old max - new max) */
    void (*softmax)(float *s, float *max, float *sum, float *alpha, int64_t m, int64_t n, float softcap);
    /* o[m][dv] <- alpha[m] * o + p[m][n] v, dv a multiple of 16 */
    void (*mix)(float *o, int64_t ldo, const float *p, const float *alpha, int64_t m, const void *v, dkv_type type,
                int64_t dv, int64_t n);
    void (*axpy)(float *o, float w, const float *x, int64_t n);                    /* o[n] += w * x[n] */
    void (*load)(float *dst, const void *src, dkv_type type, int64_t n);          /* contiguous, any alignment */
    void (*store)(void *dst, dkv_type type, const float *src, int64_t n);
    const dkv__tile_kernels *tiles; /* for calls of DKV__TILE_ROWS rows and more, or NULL */
} dkv__kernels;

/* Rows a leaf takes at once out of the rest: equal groups of at most max, so that no group of one trails. */
DKV__INLINE int64_t dkv__group_rows(int64_t rest, int64_t max) { return dkv__ceil_div(rest, dkv__ceil_div(rest, max)); }

/* Dimensions in 64 bytes of a K block: leaves take as many in a step, so a block is whole cache lines. */
DKV__INLINE int dkv__k_step(dkv_type type) { return type == DKV_F32 ? 1 : dkv__scaled(type) ? 4 : 2; }

DKV__INLINE int64_t dkv__k_block_bytes(dkv_type type, int64_t d) { return dkv__ceil_div(d, dkv__k_step(type)) * 64; }
DKV__INLINE int64_t dkv__v_width(int64_t d) { return dkv__round_up(d, 16); }
DKV__INLINE int64_t dkv__q_width(int64_t d) { return dkv__round_up(d, DKV__TILE_KEYS); }

/* Parts that are exactly a value of a 16- or 8-bit type. */
DKV__INLINE int dkv__parts_of(dkv_type type) { return type == DKV_F16 ? 2 : 1; }

/* Bytes to prefetch ahead, into L2: without it memory waits while exponentials are taken, and f16 decoding reads 6.9
   instead of 10.3 GB/s a core where plain loads read 12 (Sapphire Rapids; 4 and 8 KB ahead: 8.5 and 9.9). */
#define DKV__AHEAD 16384
#define DKV__ROWS 24 /* query rows that share a pass over a tile */

/* alpha of rows that were scaled before */
static const float dkv__ones[DKV__ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* ---- exp ---- */

#define DKV__EXP_MIN (-87.33f) /* e^x below is subnormal: taken as 0 */
#define DKV__LOG2E   1.44269504f
#define DKV__LN2_HI  0.693359375f /* 10 bits: n * LN2_HI is exact */
#define DKV__LN2_LO  (-2.12194440e-4f)

/* e^x for x <= 0 or NaN: x = n ln2 + r, |r| <= ln2/2, Taylor to r^7 (remainder 5e-9); within 2 ulp, 0 below EXP_MIN. */
DKV__INLINE float dkv__exp(float x) {
    if (x < DKV__EXP_MIN) return 0.0f;
    if (!(x <= 0.0f)) return x; /* NaN (a positive x does not come here) */
    int32_t n = (int32_t)(x * DKV__LOG2E - 0.5f);
    float   r = x - (float)n * DKV__LN2_HI - (float)n * DKV__LN2_LO;
    float   p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * dkv__float_of((uint32_t)(n + 127) << 23);
}

/* c tanh(s / c) = c sign(s) (1 - e) / (1 + e), e = exp(-2 |s| / c): absolute error c * 2^-23 */
DKV__INLINE float dkv__softcap(float s, float c) {
    float e = dkv__exp(-2.0f / c * fabsf(s));
    return copysignf(c * (1.0f - e) / (1.0f + e), s);
}

/* ---- scalar ---- */

/* lane t of K dimension j in a packed block */
DKV__INLINE int64_t dkv__k_index(dkv_type type, int64_t j, int64_t t) {
    const int64_t pack = type == DKV_BF16 ? 2 : dkv__scaled(type) ? 4 : 1; /* dimensions side by side */
    return (j / pack * DKV__BLOCK + t) * pack + j % pack;
}
/* dimension j of V row t, width dv */
DKV__INLINE int64_t dkv__v_index(dkv_type type, int64_t dv, int64_t t, int64_t j) {
    return type == DKV_BF16 ? (t / 2 * dv + j) * 2 + t % 2 : t * dv + j;
}

DKV__INLINE float dkv__element(const void *p, dkv_type type) { /* any alignment */
    float    x;
    uint16_t h;
    if (type == DKV_F32) {
        memcpy(&x, p, 4);
        return x;
    }
    if (type == DKV_I8) return (float)*(const int8_t *)p;
    if (type == DKV_FP8) return dkv__f32_from_fp8(*(const uint8_t *)p);
    memcpy(&h, p, 2);
    return type == DKV_F16 ? dkv__f32_from_f16(h) : dkv__f32_from_bf16(h);
}

DKV__INLINE void dkv__set_element(void *p, dkv_type type, float x) {
    uint16_t h;
    switch (type) {
    case DKV_F32: memcpy(p, &x, 4); return;
    case DKV_I8: *(int8_t *)p = dkv__i8_from_f32(x); return;
    case DKV_FP8: *(uint8_t *)p = dkv__fp8_from_f32(x); return;
    default:
        h = type == DKV_F16 ? dkv__f16_from_f32(x) : dkv__bf16_from_f32(x);
        memcpy(p, &h, 2);
    }
}

DKV__PRIVATE void dkv__load_scalar(float *dst, const void *src, dkv_type type, int64_t n) {
    const char *p = (const char *)src;
    for (int64_t i = 0; i < n; i++) dst[i] = dkv__element(p + i * dkv_type_bytes(type), type);
}

DKV__PRIVATE void dkv__store_scalar(void *dst, dkv_type type, const float *src, int64_t n) {
    char *p = (char *)dst;
    for (int64_t i = 0; i < n; i++) dkv__set_element(p + i * dkv_type_bytes(type), type, src[i]);
}

DKV__PRIVATE void dkv__scores_scalar(float *s, const float *q, int64_t ldq, int64_t m, const void *k, dkv_type type,
                                     int64_t d, int64_t n) {
    int64_t e = dkv_type_bytes(type);
    for (int64_t t0 = 0; t0 < n; t0 += DKV__BLOCK) {
        const char *block = (const char *)k + t0 / DKV__BLOCK * dkv__k_block_bytes(type, d);
        for (int64_t r = 0; r < m; r++) {
            float sum[DKV__BLOCK] = {0};
            for (int64_t j = 0; j < d; j++) {
                for (int64_t t = 0; t < DKV__BLOCK; t++) {
                    sum[t] += q[r * ldq + j] * dkv__element(block + dkv__k_index(type, j, t) * e, type);
                }
            }
            memcpy(s + r * DKV__TILE + t0, sum, sizeof sum);
        }
    }
}

DKV__PRIVATE void dkv__softmax_scalar(float *s, float *max, float *sum, float *alpha, int64_t m, int64_t n,
                                      float softcap) {
    for (int64_t r = 0; r < m; r++, s += DKV__TILE) {
        float top = max[r], safe, add = 0.0f;
        for (int64_t t = 0; t < n; t++) {
            if (softcap > 0.0f) s[t] = dkv__softcap(s[t], softcap);
            top = s[t] > top ? s[t] : top;
        }
        safe = top == -INFINITY ? 0.0f : top; /* -inf - -inf would be NaN: a row with no finite logit weighs 0 */
        for (int64_t t = 0; t < n; t++) {
            s[t] = dkv__exp(s[t] - safe);
            add += s[t];
        }
        alpha[r] = dkv__exp(max[r] - safe);
        sum[r] = sum[r] * alpha[r] + add;
        max[r] = top;
    }
}

DKV__PRIVATE void dkv__mix_scalar(float *o, int64_t ldo, const float *p, const float *alpha, int64_t m, const void *v,
                                  dkv_type type, int64_t dv, int64_t n) {
    int64_t e = dkv_type_bytes(type);
    for (int64_t r = 0; r < m; r++, o += ldo, p += DKV__TILE) {
        for (int64_t j = 0; j < dv; j++) o[j] *= alpha[r];
        for (int64_t t = 0; t < n; t++) {
            for (int64_t j = 0; j < dv; j++) {
                o[j] += p[t] * dkv__element((const char *)v + dkv__v_index(type, dv, t, j) * e, type);
            }
        }
    }
}

DKV__PRIVATE void dkv__axpy_scalar(float *o, float w, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) o[i] += w * x[i];
}

/* ---- x86: AVX2 + FMA + F16C ---- */

#if !defined(DKV_NO_SIMD) && defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define DKV__X86 1
#include <cpuid.h>
#include <immintrin.h>

/* call, which names T, with T the constant that type is: one copy of an inlined body per type */
#define DKV__BY_TYPE(type, call)                                \
    switch (type) {                                             \
    case DKV_F32: { const dkv_type T = DKV_F32; call; } break;  \
    case DKV_F16: { const dkv_type T = DKV_F16; call; } break;  \
    case DKV_BF16: { const dkv_type T = DKV_BF16; call; } break; \
    case DKV_I8: { const dkv_type T = DKV_I8; call; } break;    \
    case DKV_FP8: { const dkv_type T = DKV_FP8; call; } break;  \
    }

#define DKV__AVX2        __attribute__((target("avx2,fma,f16c")))
#define DKV__AVX2_INLINE static inline __attribute__((always_inline, unused, target("avx2,fma,f16c")))

DKV__AVX2_INLINE __m256 dkv__load8_avx2(const void *p, dkv_type type) { /* 8 consecutive elements, not bytes */
    if (type == DKV_F32) return _mm256_loadu_ps((const float *)p);
    __m128i h = _mm_loadu_si128((const __m128i *)p);
    if (type == DKV_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* 8 lanes of element 0 or 1 of bf16 pairs */
DKV__AVX2_INLINE __m256 dkv__pair8_avx2(__m256i pairs, int which) {
    return _mm256_castsi256_ps(which ? _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u))
                                     : _mm256_slli_epi32(pairs, 16));
}

/* 8 lanes of fp8 in the upper bits, as in dkv__f32_from_fp8 but for NaN: sign in bit 31, the rest in bits 26..20 */
DKV__AVX2_INLINE __m256 dkv__fp8x8_avx2(__m256i x) {
    x = _mm256_and_si256(x, _mm256_set1_epi32((int)0x87f00000u));
    return _mm256_mul_ps(_mm256_castsi256_ps(x), _mm256_set1_ps(0x1p120f));
}

/* What is a one of what the next one, and its like for 16 tokens, give: i8 stays in the upper byte, one shift less. */
DKV__INLINE float dkv__k_unit(dkv_type type) { return type == DKV_I8 ? 0x1p-24f : 1.0f; }

/* 8 tokens, from t on, of dimension i of a 64-byte line of a K block */
DKV__AVX2_INLINE __m256 dkv__k8_avx2(const char *line, dkv_type type, int t, int i) {
    if (type == DKV_F32 || type == DKV_F16) {
        return dkv__load8_avx2(line + (i * DKV__BLOCK + t) * dkv_type_bytes(type), type);
    }
    __m256i x = _mm256_loadu_si256((const __m256i *)(line + t * 4));
    if (type == DKV_BF16) return dkv__pair8_avx2(x, i);
    x = i == 3 ? x : _mm256_sllv_epi32(x, _mm256_set1_epi32(24 - 8 * i));
    if (type == DKV_FP8) return dkv__fp8x8_avx2(_mm256_srai_epi32(x, 4));
    return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xff000000u)));
}

/* 8 columns of row t of V, dv wide */
DKV__AVX2_INLINE __m256 dkv__v8_avx2(const char *v, dkv_type type, int64_t dv, int64_t t, int64_t column) {
    if (type == DKV_BF16) {
        return dkv__pair8_avx2(_mm256_loadu_si256((const __m256i *)(v + (t / 2 * dv + column) * 4)), (int)(t % 2));
    }
    const char *p = v + (t * dv + column) * dkv_type_bytes(type);
    if (!dkv__scaled(type)) return dkv__load8_avx2(p, type);
    __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return type == DKV_I8 ? _mm256_cvtepi32_ps(x) : dkv__fp8x8_avx2(_mm256_slli_epi32(x, 20));
}

DKV__PRIVATE DKV__AVX2 void dkv__load_avx2(float *dst, const void *src, dkv_type type, int64_t n) {
    const char *p = (const char *)src;
    int64_t     i = 0, e = dkv_type_bytes(type);
    for (; !dkv__scaled(type) && i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, dkv__load8_avx2(p + i * e, type));
    _mm256_zeroupper(); /* gcc leaves it out before a tail call, and SSE code after that crawls */
    dkv__load_scalar(dst + i, p + i * e, type, n - i);
}

/* 8 f32 -> 8 bf16, to nearest even, NaN quiet: dkv__bf16_from_f32 on lanes */
DKV__AVX2_INLINE __m128i dkv__bf16x8_avx2(__m256 x) {
    __m256i u = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), one);
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i h = _mm256_blendv_epi8(rounded, quiet, nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

DKV__PRIVATE DKV__AVX2 void dkv__store_avx2(void *dst, dkv_type type, const float *src, int64_t n) {
    char   *p = (char *)dst;
    int64_t i = 0, e = dkv_type_bytes(type);
    if (type == DKV_F32) {
        memcpy(dst, src, (size_t)n * 4);
        return;
    }
    for (; !dkv__scaled(type) && i + 8 <= n; i += 8) {
        __m256  x = _mm256_loadu_ps(src + i);
        __m128i h = type == DKV_F16 ? _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT) : dkv__bf16x8_avx2(x);
        _mm_storeu_si128((__m128i *)(p + i * e), h);
    }
    _mm256_zeroupper();
    dkv__store_scalar(p + i * e, type, src + i, n - i);
}

/* R rows x NB blocks of scores, kept in 2 * R * NB registers */
DKV__AVX2_INLINE void dkv__scores_body_avx2(float *s, const float *q, int64_t ldq, const char *k, dkv_type type,
                                            int64_t d, const int R, const int NB) {
    const int64_t block = dkv__k_block_bytes(type, d);
    const int     step = dkv__k_step(type);
    const char   *ahead = k + DKV__AHEAD;
    __m256        sum[6][2][2];
    DKV__UNROLL for (int r = 0; r < R; r++) {
        DKV__UNROLL for (int b = 0; b < NB; b++) sum[r][b][0] = sum[r][b][1] = _mm256_setzero_ps();
    }
    for (int64_t j = 0; j < d; j += step, k += 64, ahead += 64 * NB) {
        DKV__UNROLL for (int b = 0; b < NB; b++) {
            const char *p = k + b * block;
            _mm_prefetch(ahead + b * 64, _MM_HINT_T1);
            DKV__UNROLL for (int i = 0; i < step; i++) {
                __m256 lo = dkv__k8_avx2(p, type, 0, i), hi = dkv__k8_avx2(p, type, 8, i);
                DKV__UNROLL for (int r = 0; r < R; r++) {
                    __m256 x = _mm256_broadcast_ss(q + r * ldq + j + i);
                    sum[r][b][0] = _mm256_fmadd_ps(x, lo, sum[r][b][0]);
                    sum[r][b][1] = _mm256_fmadd_ps(x, hi, sum[r][b][1]);
                }
            }
        }
    }
    const __m256 unit = _mm256_set1_ps(dkv__k_unit(type));
    DKV__UNROLL for (int r = 0; r < R; r++) {
        DKV__UNROLL for (int b = 0; b < NB; b++) {
            _mm256_storeu_ps(s + r * DKV__TILE + b * DKV__BLOCK, _mm256_mul_ps(unit, sum[r][b][0]));
            _mm256_storeu_ps(s + r * DKV__TILE + b * DKV__BLOCK + 8, _mm256_mul_ps(unit, sum[r][b][1]));
        }
    }
}

DKV__AVX2_INLINE void dkv__scores_blocks_avx2(float *s, const float *q, int64_t ldq, const char *k, dkv_type type,
                                              int64_t d, int64_t n, const int R) {
    const int NB = R <= 3 ? 2 : 1;
    int64_t   t = 0;
    for (; t + (NB - 1) * DKV__BLOCK < n; t += NB * DKV__BLOCK) {
        dkv__scores_body_avx2(s + t, q, ldq, k + t / DKV__BLOCK * dkv__k_block_bytes(type, d), type, d, R, NB);
    }
    if (t < n) dkv__scores_body_avx2(s + t, q, ldq, k + t / DKV__BLOCK * dkv__k_block_bytes(type, d), type, d, R, 1);
}

DKV__AVX2_INLINE void dkv__scores_rows_avx2(float *s, const float *q, int64_t ldq, int64_t m, const char *k,
                                            dkv_type type, int64_t d, int64_t n) {
    for (int64_t r = 0, R; r < m; r += R, s += R * DKV__TILE, q += R * ldq) {
        R = dkv__group_rows(m - r, 6);
        switch (R) {
        case 1: dkv__scores_blocks_avx2(s, q, ldq, k, type, d, n, 1); break;
        case 2: dkv__scores_blocks_avx2(s, q, ldq, k, type, d, n, 2); break;
        case 3: dkv__scores_blocks_avx2(s, q, ldq, k, type, d, n, 3); break;
        case 4: dkv__scores_blocks_avx2(s, q, ldq, k, type, d, n, 4); break;
        case 5: dkv__scores_blocks_avx2(s, q, ldq, k, type, d, n, 5); break;
        default: dkv__scores_blocks_avx2(s, q, ldq, k, type, d, n, 6); break;
        }
    }
}

DKV__PRIVATE DKV__AVX2 void dkv__scores_avx2(float *s, const float *q, int64_t ldq, int64_t m, const void *k,
                                             dkv_type type, int64_t d, int64_t n) {
    DKV__BY_TYPE(type, dkv__scores_rows_avx2(s, q, ldq, m, (const char *)k, T, d, n));
}

/* dkv__exp on 8 lanes; max keeps a NaN as its second operand */
DKV__AVX2_INLINE __m256 dkv__exp8_avx2(__m256 x) {
    __m256 live = _mm256_cmp_ps(x, _mm256_set1_ps(DKV__EXP_MIN), _CMP_NLT_UQ);
    x = _mm256_max_ps(_mm256_set1_ps(DKV__EXP_MIN), x);
    __m256 n = _mm256_mul_ps(x, _mm256_set1_ps(DKV__LOG2E));
    n = _mm256_round_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(DKV__LN2_HI), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(DKV__LN2_LO), r);
    __m256 p = _mm256_set1_ps(1.0f / 5040.0f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    __m256i two_n = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(live, _mm256_mul_ps(p, _mm256_castsi256_ps(two_n)));
}

DKV__AVX2_INLINE __m256 dkv__softcap8_avx2(__m256 s, float c) {
    __m256 sign = _mm256_and_ps(s, _mm256_set1_ps(-0.0f)), one = _mm256_set1_ps(1.0f);
    __m256 e = dkv__exp8_avx2(_mm256_mul_ps(_mm256_set1_ps(-2.0f / c), _mm256_andnot_ps(_mm256_set1_ps(-0.0f), s)));
    __m256 t = _mm256_div_ps(_mm256_mul_ps(_mm256_set1_ps(c), _mm256_sub_ps(one, e)), _mm256_add_ps(one, e));
    return _mm256_or_ps(t, sign);
}

DKV__AVX2_INLINE float dkv__sum8_avx2(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

DKV__AVX2_INLINE float dkv__max8_avx2(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

DKV__PRIVATE DKV__AVX2 void dkv__softmax_avx2(float *s, float *max, float *sum, float *alpha, int64_t m, int64_t n,
                                              float softcap) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int64_t n_pad = dkv__round_up(n, DKV__BLOCK);
    for (int64_t r = 0; r < m; r++, s += DKV__TILE) {
        __m256 top8 = _mm256_set1_ps(-INFINITY), add8 = _mm256_setzero_ps();
        for (int64_t t = 0; t < n_pad; t += 8) {
            __m256  x = _mm256_loadu_ps(s + t);
            __m256i in = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n - t)), lane);
            if (softcap > 0.0f) x = dkv__softcap8_avx2(x, softcap);
            x = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(in));
            _mm256_storeu_ps(s + t, x);
            top8 = _mm256_max_ps(x, top8); /* a NaN is passed over here and comes back through exp */
        }
        float top = dkv__max8_avx2(top8);
        top = max[r] > top ? max[r] : top;
        float safe = top == -INFINITY ? 0.0f : top;
        for (int64_t t = 0; t < n_pad; t += 8) {
            __m256 p = dkv__exp8_avx2(_mm256_sub_ps(_mm256_loadu_ps(s + t), _mm256_set1_ps(safe)));
            _mm256_storeu_ps(s + t, p);
            add8 = _mm256_add_ps(add8, p);
        }
        alpha[r] = dkv__exp(max[r] - safe);
        sum[r] = sum[r] * alpha[r] + dkv__sum8_avx2(add8);
        max[r] = top;
    }
}

/* R rows x NC strips of 16 columns of o, kept in 2 * R * NC registers */
DKV__AVX2_INLINE void dkv__mix_body_avx2(float *o, int64_t ldo, const float *p, const float *alpha, const char *v,
                                         const char *ahead, dkv_type type, int64_t dv, int64_t n, const int R,
                                         const int NC) {
    const int64_t line = dkv_type_bytes(type) * 16;
    __m256        sum[6][2][2];
    DKV__UNROLL for (int r = 0; r < R; r++) {
        DKV__UNROLL for (int c = 0; c < NC; c++) {
            __m256 a = _mm256_broadcast_ss(alpha + r);
            sum[r][c][0] = _mm256_mul_ps(a, _mm256_loadu_ps(o + r * ldo + c * 16));
            sum[r][c][1] = _mm256_mul_ps(a, _mm256_loadu_ps(o + r * ldo + c * 16 + 8));
        }
    }
    for (int64_t t = 0; t < n; t++) {
        DKV__UNROLL for (int c = 0; c < NC; c++) {
            __m256 lo = dkv__v8_avx2(v, type, dv, t, c * 16), hi = dkv__v8_avx2(v, type, dv, t, c * 16 + 8);
            if (c * line % 64 == 0) _mm_prefetch(ahead + (t * NC + c) * line, _MM_HINT_T1);
            DKV__UNROLL for (int r = 0; r < R; r++) {
                __m256 w = _mm256_broadcast_ss(p + r * DKV__TILE + t);
                sum[r][c][0] = _mm256_fmadd_ps(w, lo, sum[r][c][0]);
                sum[r][c][1] = _mm256_fmadd_ps(w, hi, sum[r][c][1]);
            }
        }
    }
    DKV__UNROLL for (int r = 0; r < R; r++) {
        DKV__UNROLL for (int c = 0; c < NC; c++) {
            _mm256_storeu_ps(o + r * ldo + c * 16, sum[r][c][0]);
            _mm256_storeu_ps(o + r * ldo + c * 16 + 8, sum[r][c][1]);
        }
    }
}

DKV__AVX2_INLINE void dkv__mix_columns_avx2(float *o, int64_t ldo, const float *p, const float *alpha, const char *v,
                                            dkv_type type, int64_t dv, int64_t n, const int R) {
    const int     NC = R <= 3 ? 2 : 1;
    const int64_t e = dkv_type_bytes(type), column = type == DKV_BF16 ? 4 : e;
    const char   *ahead = v + dkv__max(DKV__AHEAD, DKV__STRIP * dv * e); /* a strip is passed over several times */
    int64_t       j = 0;
    for (; j + NC * 16 <= dv; j += NC * 16, ahead += NC * 16 * n * e) {
        dkv__mix_body_avx2(o + j, ldo, p, alpha, v + j * column, ahead, type, dv, n, R, NC);
    }
    if (j < dv) dkv__mix_body_avx2(o + j, ldo, p, alpha, v + j * column, ahead, type, dv, n, R, 1);
}

DKV__AVX2_INLINE void dkv__mix_rows_avx2(float *o, int64_t ldo, const float *p, const float *alpha, int64_t m,
                                         const char *v, dkv_type type, int64_t dv, int64_t n) {
    for (int64_t r = 0, R; r < m; r += R, o += R * ldo, p += R * DKV__TILE, alpha += R) {
        R = dkv__group_rows(m - r, 6);
        switch (R) {
        case 1: dkv__mix_columns_avx2(o, ldo, p, alpha, v, type, dv, n, 1); break;
        case 2: dkv__mix_columns_avx2(o, ldo, p, alpha, v, type, dv, n, 2); break;
        case 3: dkv__mix_columns_avx2(o, ldo, p, alpha, v, type, dv, n, 3); break;
        case 4: dkv__mix_columns_avx2(o, ldo, p, alpha, v, type, dv, n, 4); break;
        case 5: dkv__mix_columns_avx2(o, ldo, p, alpha, v, type, dv, n, 5); break;
        default: dkv__mix_columns_avx2(o, ldo, p, alpha, v, type, dv, n, 6); break;
        }
    }
}

DKV__PRIVATE DKV__AVX2 void dkv__mix_avx2(float *o, int64_t ldo, const float *p, const float *alpha, int64_t m,
                                          const void *v, dkv_type type, int64_t dv, int64_t n) {
    const int64_t row = dkv_type_bytes(type) * dv;
    for (int64_t t = 0; t < n; t += DKV__STRIP, p += DKV__STRIP, alpha = dkv__ones) {
        const char *vt = (const char *)v + t * row;
        int64_t     k = dkv__min(n - t, DKV__STRIP);
        DKV__BY_TYPE(type, dkv__mix_rows_avx2(o, ldo, p, alpha, m, vt, T, dv, k));
    }
}

DKV__PRIVATE DKV__AVX2 void dkv__axpy_avx2(float *o, float w, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(o + i, _mm256_fmadd_ps(_mm256_set1_ps(w), _mm256_loadu_ps(x + i), _mm256_loadu_ps(o + i)));
    }
    dkv__axpy_scalar(o + i, w, x + i, n - i);
}

/* ---- x86: AVX-512F. Same loops as above, with twice the lanes and registers ----
   Prefetches of neighbouring lines back to back cost memory a third of its rate: scores of 4 rows of f16 keys read
   12.7 GB/s with four lines at once and 17.5 with two apart, although out of L2 they do 33 and 31 (plain loads out of
   memory: 15; Sapphire Rapids). So a step asks for one line with each dimension, or each row of V. */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" /* g++ 12 warns of its own intrinsics' undefined registers */
#endif

#define DKV__AVX512        __attribute__((target("avx512f,avx2,fma,f16c")))
#define DKV__AVX512_INLINE static inline __attribute__((always_inline, unused, target("avx512f,avx2,fma,f16c")))

/* One line into L2; the asm keeps gcc from moving it beside the next. */
DKV__INLINE void dkv__prefetch(const char *p) {
    _mm_prefetch(p, _MM_HINT_T1);
    __asm__ volatile("");
}

DKV__AVX512_INLINE __m512 dkv__pair16_avx512(__m512i pairs, int which) {
    return _mm512_castsi512_ps(which ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u))
                                     : _mm512_slli_epi32(pairs, 16));
}

DKV__AVX512_INLINE __m512 dkv__fp8x16_avx512(__m512i x) {
    x = _mm512_and_si512(x, _mm512_set1_epi32((int)0x87f00000u));
    return _mm512_mul_ps(_mm512_castsi512_ps(x), _mm512_set1_ps(0x1p120f));
}

/* the 16 tokens of dimension i of a 64-byte line of a K block */
DKV__AVX512_INLINE __m512 dkv__k16_avx512(const char *line, dkv_type type, int i) {
    if (type == DKV_F32) return _mm512_loadu_ps(line);
    if (type == DKV_F16) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(line + i * 32)));
    __m512i x = _mm512_loadu_si512(line);
    if (type == DKV_BF16) return dkv__pair16_avx512(x, i);
    x = i == 3 ? x : _mm512_sllv_epi32(x, _mm512_set1_epi32(24 - 8 * i));
    if (type == DKV_FP8) return dkv__fp8x16_avx512(_mm512_srai_epi32(x, 4));
    return _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xff000000u)));
}

/* 16 columns of row t + i of V, dv wide; bf16: t even */
DKV__AVX512_INLINE __m512 dkv__v16_avx512(const char *v, dkv_type type, int64_t dv, int64_t t, int i, int64_t column) {
    if (type == DKV_BF16) return dkv__pair16_avx512(_mm512_loadu_si512(v + (t / 2 * dv + column) * 4), i);
    const char *p = v + ((t + i) * dv + column) * dkv_type_bytes(type);
    if (type == DKV_F32) return _mm512_loadu_ps(p);
    if (type == DKV_F16) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
    __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
    return type == DKV_I8 ? _mm512_cvtepi32_ps(x) : dkv__fp8x16_avx512(_mm512_slli_epi32(x, 20));
}

/* R rows x NB blocks of scores, kept in R * NB <= 16 registers. Odd d: q and the block end in a zero. */
DKV__AVX512_INLINE void dkv__scores_body_avx512(float *s, const float *q, int64_t ldq, const char *k, dkv_type type,
                                                int64_t d, const int R, const int NB) {
    const int64_t block = dkv__k_block_bytes(type, d);
    const int     step = dkv__k_step(type);
    const __m512  unit = _mm512_set1_ps(dkv__k_unit(type));
    const char   *ahead = k + DKV__AHEAD;
    __m512        sum[8][4];
    DKV__UNROLL for (int r = 0; r < R; r++) {
        DKV__UNROLL for (int b = 0; b < NB; b++) sum[r][b] = _mm512_setzero_ps();
    }
    for (int64_t j = 0; j < d; j += step, k += 64, ahead += 64 * NB) {
        DKV__UNROLL for (int i = 0; i < step; i++) {
            __m512 kb[4];
            DKV__UNROLL for (int b = 0; b < NB; b++) {
                kb[b] = dkv__k16_avx512(k + b * block, type, i);
                if (b * step / NB == i) dkv__prefetch(ahead + b * 64);
            }
            DKV__UNROLL for (int r = 0; r < R; r++) {
                __m512 x = _mm512_set1_ps(q[r * ldq + j + i]);
                DKV__UNROLL for (int b = 0; b < NB; b++) sum[r][b] = _mm512_fmadd_ps(x, kb[b], sum[r][b]);
            }
        }
    }
    DKV__UNROLL for (int r = 0; r < R; r++) {
        DKV__UNROLL for (int b = 0; b < NB; b++) {
            _mm512_storeu_ps(s + r * DKV__TILE + b * DKV__BLOCK, _mm512_mul_ps(unit, sum[r][b]));
        }
    }
}

DKV__AVX512_INLINE void dkv__scores_blocks_avx512(float *s, const float *q, int64_t ldq, const char *k, dkv_type type,
                                                  int64_t d, int64_t n, const int R) {
    const int64_t block = dkv__k_block_bytes(type, d);
    const int     NB = R <= 4 ? dkv__k_step(type) : 2;
    int64_t       t = 0;
    for (; t + (NB - 1) * DKV__BLOCK < n; t += NB * DKV__BLOCK) {
        dkv__scores_body_avx512(s + t, q, ldq, k + t / DKV__BLOCK * block, type, d, R, NB);
    }
    for (; t < n; t += DKV__BLOCK) {
        dkv__scores_body_avx512(s + t, q, ldq, k + t / DKV__BLOCK * block, type, d, R, 1);
    }
}

DKV__AVX512_INLINE void dkv__scores_rows_avx512(float *s, const float *q, int64_t ldq, int64_t m, const char *k,
                                                dkv_type type, int64_t d, int64_t n) {
    for (int64_t r = 0, R; r < m; r += R, s += R * DKV__TILE, q += R * ldq) {
        R = dkv__group_rows(m - r, 8);
        switch (R) {
        case 1: dkv__scores_blocks_avx512(s, q, ldq, k, type, d, n, 1); break;
        case 2: dkv__scores_blocks_avx512(s, q, ldq, k, type, d, n, 2); break;
        case 3: dkv__scores_blocks_avx512(s, q, ldq, k, type, d, n, 3); break;
        case 4: dkv__scores_blocks_avx512(s, q, ldq, k, type, d, n, 4); break;
        case 5: dkv__scores_blocks_avx512(s, q, ldq, k, type, d, n, 5); break;
        case 6: dkv__scores_blocks_avx512(s, q, ldq, k, type, d, n, 6); break;
        case 7: dkv__scores_blocks_avx512(s, q, ldq, k, type, d, n, 7); break;
        default: dkv__scores_blocks_avx512(s, q, ldq, k, type, d, n, 8); break;
        }
    }
}

DKV__PRIVATE DKV__AVX512 void dkv__scores_avx512(float *s, const float *q, int64_t ldq, int64_t m, const void *k,
                                                 dkv_type type, int64_t d, int64_t n) {
    DKV__BY_TYPE(type, dkv__scores_rows_avx512(s, q, ldq, m, (const char *)k, T, d, n));
}

DKV__AVX512_INLINE __m512 dkv__exp16_avx512(__m512 x) { /* dkv__exp on 16 lanes */
    __mmask16 live = _mm512_cmp_ps_mask(x, _mm512_set1_ps(DKV__EXP_MIN), _CMP_NLT_UQ);
    __m512    n = _mm512_cvtepi32_ps(_mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(DKV__LOG2E))));
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(DKV__LN2_HI), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(DKV__LN2_LO), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040.0f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(live, p, n);
}

DKV__AVX512_INLINE __m512 dkv__softcap16_avx512(__m512 s, float c) {
    __m512i sign = _mm512_and_si512(_mm512_castps_si512(s), _mm512_set1_epi32((int)0x80000000u));
    __m512  one = _mm512_set1_ps(1.0f);
    __m512  e = dkv__exp16_avx512(_mm512_mul_ps(_mm512_set1_ps(-2.0f / c), _mm512_abs_ps(s)));
    __m512  t = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(c), _mm512_sub_ps(one, e)), _mm512_add_ps(one, e));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(t), sign));
}

DKV__PRIVATE DKV__AVX512 void dkv__softmax_avx512(float *s, float *max, float *sum, float *alpha, int64_t m, int64_t n,
                                                  float softcap) {
    for (int64_t r = 0; r < m; r++, s += DKV__TILE) {
        __m512 top16 = _mm512_set1_ps(-INFINITY), add16 = _mm512_setzero_ps();
        for (int64_t t = 0; t < n; t += 16) {
            __mmask16 in = (__mmask16)(n - t >= 16 ? 0xffffu : (1u << (n - t)) - 1u);
            __m512    x = _mm512_loadu_ps(s + t);
            if (softcap > 0.0f) x = dkv__softcap16_avx512(x, softcap);
            x = _mm512_mask_blend_ps(in, _mm512_set1_ps(-INFINITY), x);
            _mm512_storeu_ps(s + t, x);
            top16 = _mm512_max_ps(x, top16); /* a NaN is passed over here and comes back through exp */
        }
        float top = _mm512_reduce_max_ps(top16);
        top = max[r] > top ? max[r] : top;
        float safe = top == -INFINITY ? 0.0f : top;
        for (int64_t t = 0; t < n; t += 16) {
            __m512 p = dkv__exp16_avx512(_mm512_sub_ps(_mm512_loadu_ps(s + t), _mm512_set1_ps(safe)));
            _mm512_storeu_ps(s + t, p);
            add16 = _mm512_add_ps(add16, p);
        }
        alpha[r] = dkv__exp(max[r] - safe);
        sum[r] = sum[r] * alpha[r] + _mm512_reduce_add_ps(add16);
        max[r] = top;
    }
}

/* R rows x NC strips of 16 columns of o, kept in R * NC <= 16 registers */
DKV__AVX512_INLINE void dkv__mix_body_avx512(float *o, int64_t ldo, const float *p, const float *alpha, const char *v,
                                             const char *ahead, dkv_type type, int64_t dv, int64_t n, const int R,
                                             const int NC) {
    const int64_t e = dkv_type_bytes(type);
    const int     step = type == DKV_BF16 ? 2 : 1, line = (int)e * 16 * step, lines = (NC * line + 63) / 64;
    __m512        sum[8][4];
    DKV__UNROLL for (int r = 0; r < R; r++) {
        DKV__UNROLL for (int c = 0; c < NC; c++) {
            sum[r][c] = _mm512_mul_ps(_mm512_set1_ps(alpha[r]), _mm512_loadu_ps(o + r * ldo + c * 16));
        }
    }
    for (int64_t t = 0; t < n; t += step) {
        DKV__UNROLL for (int i = 0; i < step; i++) {
            if (t + i == n) break; /* the second half of the last pair is slack: 0 * NaN would leak */
            __m512 vc[4];
            DKV__UNROLL for (int c = 0; c < NC; c++) vc[c] = dkv__v16_avx512(v, type, dv, t, i, c * 16);
            DKV__UNROLL for (int l = 0; l < lines; l++) {
                if (l * step / lines == i) dkv__prefetch(ahead + t / step * NC * line + l * 64);
            }
            DKV__UNROLL for (int r = 0; r < R; r++) {
                __m512 w = _mm512_set1_ps(p[r * DKV__TILE + t + i]);
                DKV__UNROLL for (int c = 0; c < NC; c++) sum[r][c] = _mm512_fmadd_ps(w, vc[c], sum[r][c]);
            }
        }
    }
    DKV__UNROLL for (int r = 0; r < R; r++) {
        DKV__UNROLL for (int c = 0; c < NC; c++) _mm512_storeu_ps(o + r * ldo + c * 16, sum[r][c]);
    }
}

DKV__AVX512_INLINE void dkv__mix_columns_avx512(float *o, int64_t ldo, const float *p, const float *alpha,
                                                const char *v, dkv_type type, int64_t dv, int64_t n, const int R) {
    const int64_t e = dkv_type_bytes(type), column = type == DKV_BF16 ? 4 : e;
    const int     NC = R > 4 ? 2 : type == DKV_BF16 ? 1 : 4 / (int)e; /* up to 4 rows: one line */
    const char   *ahead = v + dkv__max(DKV__AHEAD, DKV__STRIP * dv * e); /* a strip is passed over several times */
    int64_t       j = 0;
    for (; j + NC * 16 <= dv; j += NC * 16, ahead += NC * 16 * n * e) {
        dkv__mix_body_avx512(o + j, ldo, p, alpha, v + j * column, ahead, type, dv, n, R, NC);
    }
    for (; j < dv; j += 16, ahead += 16 * n * e) {
        dkv__mix_body_avx512(o + j, ldo, p, alpha, v + j * column, ahead, type, dv, n, R, 1);
    }
}

DKV__AVX512_INLINE void dkv__mix_rows_avx512(float *o, int64_t ldo, const float *p, const float *alpha, int64_t m,
                                             const char *v, dkv_type type, int64_t dv, int64_t n) {
    for (int64_t r = 0, R; r < m; r += R, o += R * ldo, p += R * DKV__TILE, alpha += R) {
        R = dkv__group_rows(m - r, 8);
        switch (R) {
        case 1: dkv__mix_columns_avx512(o, ldo, p, alpha, v, type, dv, n, 1); break;
        case 2: dkv__mix_columns_avx512(o, ldo, p, alpha, v, type, dv, n, 2); break;
        case 3: dkv__mix_columns_avx512(o, ldo, p, alpha, v, type, dv, n, 3); break;
        case 4: dkv__mix_columns_avx512(o, ldo, p, alpha, v, type, dv, n, 4); break;
        case 5: dkv__mix_columns_avx512(o, ldo, p, alpha, v, type, dv, n, 5); break;
        case 6: dkv__mix_columns_avx512(o, ldo, p, alpha, v, type, dv, n, 6); break;
        case 7: dkv__mix_columns_avx512(o, ldo, p, alpha, v, type, dv, n, 7); break;
        default: dkv__mix_columns_avx512(o, ldo, p, alpha, v, type, dv, n, 8); break;
        }
    }
}

DKV__PRIVATE DKV__AVX512 void dkv__mix_avx512(float *o, int64_t ldo, const float *p, const float *alpha, int64_t m,
                                              const void *v, dkv_type type, int64_t dv, int64_t n) {
    const int64_t row = dkv_type_bytes(type) * dv;
    for (int64_t t = 0; t < n; t += DKV__STRIP, p += DKV__STRIP, alpha = dkv__ones) {
        const char *vt = (const char *)v + t * row;
        int64_t     k = dkv__min(n - t, DKV__STRIP);
        DKV__BY_TYPE(type, dkv__mix_rows_avx512(o, ldo, p, alpha, m, vt, T, dv, k));
    }
}

/* ---- x86: AMX, for 16 rows and more of 16- and 8-bit keys ----
   A value is cut off after 8 significant bits, not rounded, what remains likewise, and so on: f32 is 3 parts exactly,
   f16 2, the other types 1. Of queries and weights 3 are taken. Of the products, only that of the last parts is left
   out: 2^-22 of the whole at most, 2^-25 on average, and the bounds of f32 arithmetic hold. Subnormal parts count as 0;
   infinite queries, keys and values as NaN.
   A product of 16 rows, 16 keys and 32 dimensions takes 3 (f16: 5) times 16 cycles, where AVX-512 takes 256. f32 keys
   would be 6 products and 3 parts to make: 1.15 times as fast as AVX-512 at 192 rows, slower at 16. */

#if defined(__linux__) && defined(__LP64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define DKV__TILES (&dkv__tiles_amx)
#define DKV__AMX   __attribute__((target("amx-tile,amx-bf16,avx512bw,avx512f,avx2,fma,f16c")))
#define DKV__AMX_INLINE \
    static inline __attribute__((always_inline, unused, target("amx-tile,amx-bf16,avx512bw,avx512f,avx2,fma,f16c")))

/* What a part leaves of x. */
DKV__AMX_INLINE __m512 dkv__rest16_amx(__m512 x) {
    __m512i part = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xffff0000u));
    return _mm512_sub_ps(x, _mm512_castsi512_ps(part));
}

DKV__PRIVATE DKV__AMX void dkv__split_rows_amx(dkv__parts x, int64_t ldx, const float *from, int64_t ldf, int64_t m,
                                               int64_t n) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i odd = _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x40004)),
                                         _mm512_set1_epi32(0x30001)); /* words 1, 3 .. 63 of a and b: high halves */
    for (int64_t r = 0; r < m; r++, from += ldf, x.at += ldx * 2) {
        for (int64_t i = 0; i < n; i += 32) {
            __m512 a = _mm512_loadu_ps(from + i), b = _mm512_loadu_ps(from + i + 16);
            for (int64_t part = 0; part < 3; part++, a = dkv__rest16_amx(a), b = dkv__rest16_amx(b)) {
                __m512i words = _mm512_permutex2var_epi16(_mm512_castps_si512(a), odd, _mm512_castps_si512(b));
                _mm512_storeu_si512(x.at + part * x.bytes + i * 2, words);
            }
        }
    }
}

/* Lanes of a and b as pairs. */
DKV__AMX_INLINE void dkv__split_pairs_amx(char *at, int64_t bytes, __m512 a, __m512 b, const int n) {
    DKV__UNROLL for (int part = 0; part < n; part++, a = dkv__rest16_amx(a), b = dkv__rest16_amx(b)) {
        __m512i high = _mm512_and_si512(_mm512_castps_si512(b), _mm512_set1_epi32((int)0xffff0000u));
        _mm512_storeu_si512(at + part * bytes, _mm512_or_si512(high, _mm512_srli_epi32(_mm512_castps_si512(a), 16)));
    }
}

DKV__AMX_INLINE void dkv__split_k_body_amx(dkv__parts k, const char *from, dkv_type type, int64_t d, int64_t n) {
    const int64_t block = dkv__k_block_bytes(type, d), step = dkv__k_step(type), wk = dkv__q_width(d);
    const __m512  zero = _mm512_setzero_ps(), unit = _mm512_set1_ps(dkv__k_unit(type));
    for (int64_t t = 0; t < n; t += DKV__BLOCK, from += block) {
        for (int64_t j = 0; j < wk; j += 2, k.at += 64) {
            const char *line = from + j / step * 64;
            const int   i = (int)(j % step);
            __m512      a = j < d ? dkv__k16_avx512(line, type, i) : zero;
            __m512      b = j < d ? dkv__k16_avx512(line, type, i + 1) : zero;
            dkv__split_pairs_amx(k.at, k.bytes, _mm512_mul_ps(unit, a), _mm512_mul_ps(unit, b), dkv__parts_of(type));
        }
    }
}

DKV__PRIVATE DKV__AMX void dkv__split_k_amx(dkv__parts k, const void *from, dkv_type type, int64_t d, int64_t n) {
    DKV__BY_TYPE(type, dkv__split_k_body_amx(k, (const char *)from, T, d, n));
}

DKV__AMX_INLINE void dkv__split_v_body_amx(dkv__parts v, const char *from, dkv_type type, int64_t dv, int64_t n) {
    for (int64_t t = 0; t < n; t += 2) {
        for (int64_t j = 0; j < dv; j += 16, v.at += 64) {
            __m512 a = dkv__v16_avx512(from, type, dv, t, 0, j), b = dkv__v16_avx512(from, type, dv, t, 1, j);
            dkv__split_pairs_amx(v.at, v.bytes, a, b, dkv__parts_of(type));
        }
    }
}

DKV__PRIVATE DKV__AMX void dkv__split_v_amx(dkv__parts v, const void *from, dkv_type type, int64_t dv, int64_t n) {
    DKV__BY_TYPE(type, dkv__split_v_body_amx(v, (const char *)from, T, dv, n));
}

/* Where the tiles of a factor lie, in bytes: a tile's next row, the tile of the next step, column and part. */
typedef struct dkv__factor {
    const char *at;
    int64_t     row, step, column, part;
} dkv__factor;

/* Tiles 0, 1: c [m][16]; 2..4: the parts of a, [m][32]; 5..7: parts of b, [16][16][2], in turn, so that a load need not
   wait for the product before it. */
DKV__AMX_INLINE void dkv__tiles_begin_amx(int64_t m) {
    uint8_t config[64] = {1};
    for (int i = 0; i < 8; i++) {
        config[16 + 2 * i] = 64;
        config[48 + i] = (uint8_t)(i < 5 ? m : 16);
    }
    __asm__ volatile("" : : "r"(config) : "memory"); /* gcc's intrinsic says that it reads 8 bytes */
    _tile_loadconfig(config);
}

/* tile C += the parts of a times those of b, in tiles X and Y */
#define DKV__AMX_COLUMN(C, X, Y)                                        \
    _tile_loadd(X, b.at + C * b.column, b.row);                         \
    _tile_dpbf16ps(C, 2, X);                                            \
    _tile_dpbf16ps(C, 3, X);                                            \
    _tile_dpbf16ps(C, 4, X);                                            \
    if (parts == 2) {                                                   \
        _tile_loadd(Y, b.at + C * b.column + b.part, b.row);            \
        _tile_dpbf16ps(C, 2, Y);                                        \
        _tile_dpbf16ps(C, 3, Y);                                        \
    }

/* c[m][NC * 16] <- a b, or keep: + a b. ldc in bytes */
DKV__AMX_INLINE void dkv__product_amx(float *c, int64_t ldc, dkv__factor a, dkv__factor b, int64_t steps,
                                      const int keep, const int parts, const int NC) {
    __asm__ volatile("" : : : "memory"); /* gcc's tile intrinsics do not say that they read and write memory */
    _tile_zero(0);
    _tile_zero(1);
    if (keep) _tile_loadd(0, c, ldc);
    if (keep && NC == 2) _tile_loadd(1, c + 16, ldc);
    for (int64_t i = 0; i < steps; i++, a.at += a.step, b.at += b.step) {
        _tile_loadd(2, a.at, a.row);
        _tile_loadd(3, a.at + a.part, a.row);
        _tile_loadd(4, a.at + 2 * a.part, a.row);
        DKV__AMX_COLUMN(0, 5, 6)
        if (NC == 2) { DKV__AMX_COLUMN(1, 7, 5) }
    }
    _tile_stored(0, c, ldc);
    if (NC == 2) _tile_stored(1, c + 16, ldc);
    __asm__ volatile("" : : : "memory");
}

/* c [m][columns * 16]. The tiles are released after use: else the system would save them with the thread. */
DKV__AMX_INLINE void dkv__products_amx(float *c, int64_t ldc, int64_t m, dkv__factor a, dkv__factor b, int64_t steps,
                                       int64_t columns, const int keep, const int parts) {
    dkv__tiles_begin_amx(m);
    for (; columns >= 2; columns -= 2, c += 32, b.at += 2 * b.column) {
        dkv__product_amx(c, ldc, a, b, steps, keep, parts, 2);
    }
    if (columns) dkv__product_amx(c, ldc, a, b, steps, keep, parts, 1);
    _tile_release();
}

DKV__PRIVATE DKV__AMX void dkv__scores_amx(float *s, dkv__parts q, int64_t ldq, int64_t m, dkv__parts k, int64_t wk,
                                           int64_t n) {
    const int64_t steps = wk / DKV__TILE_KEYS, blocks = dkv__ceil_div(n, DKV__BLOCK);
    dkv__factor   a = {q.at, ldq * 2, 64, 0, q.bytes}, b = {k.at, 64, 1024, wk * 32, k.bytes};
    if (k.n == 1) dkv__products_amx(s, DKV__TILE * 4, m, a, b, steps, blocks, 0, 1);
    else dkv__products_amx(s, DKV__TILE * 4, m, a, b, steps, blocks, 0, 2);
}

DKV__PRIVATE DKV__AMX void dkv__mix_amx(float *o, int64_t ldo, const float *p, const float *alpha, int64_t m,
                                        dkv__parts v, int64_t dv, int64_t n) {
    enum { LD = DKV__TILE + 32 }; /* rows a power of two apart would meet in few lines of L1: 30 % slower */
    char          parts[3 * DKV__TILE_ROWS * LD * 2] __attribute__((aligned(64)));
    dkv__parts    w = {parts, 3, DKV__TILE_ROWS * LD * 2};
    dkv__factor   a = {parts, LD * 2, 64, 0, w.bytes}, b = {v.at, dv * 4, dv * 64, 64, v.bytes};
    const int64_t steps = n / DKV__TILE_KEYS;
    for (int64_t r = 0; r < m; r++) {
        for (int64_t j = 0; j < dv; j += 16) {
            float *x = o + r * ldo + j;
            _mm512_storeu_ps(x, _mm512_mul_ps(_mm512_set1_ps(alpha[r]), _mm512_loadu_ps(x)));
        }
    }
    dkv__split_rows_amx(w, LD, p, DKV__TILE, m, n);
    if (v.n == 1) dkv__products_amx(o, ldo * 4, m, a, b, steps, dv / 16, 1, 1);
    else dkv__products_amx(o, ldo * 4, m, a, b, steps, dv / 16, 1, 2);
}

static const dkv__tile_kernels dkv__tiles_amx = {
    dkv__split_rows_amx, dkv__split_k_amx, dkv__split_v_amx, dkv__scores_amx, dkv__mix_amx,
};

/* Linux gives a process tiles when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
DKV__PRIVATE int dkv__tiles_permitted(void) {
    long r;
    __asm__ volatile("syscall" : "=a"(r) : "0"(158L), "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    return r == 0;
}
#else
#define DKV__TILES NULL
DKV__PRIVATE int dkv__tiles_permitted(void) { return 0; }
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif /* x86 */

/* ---- the table, and the level in use ---- */

static const dkv__kernels dkv__table[DKV_SIMD_COUNT] = {
    {dkv__scores_scalar, dkv__softmax_scalar, dkv__mix_scalar, dkv__axpy_scalar, dkv__load_scalar, dkv__store_scalar,
     NULL},
#ifdef DKV__X86
    {dkv__scores_avx2,   dkv__softmax_avx2,   dkv__mix_avx2,   dkv__axpy_avx2,   dkv__load_avx2,   dkv__store_avx2,
     NULL},
    {dkv__scores_avx512, dkv__softmax_avx512, dkv__mix_avx512, dkv__axpy_avx2,   dkv__load_avx2,   dkv__store_avx2,
     NULL},
    {dkv__scores_avx512, dkv__softmax_avx512, dkv__mix_avx512, dkv__axpy_avx2,   dkv__load_avx2,   dkv__store_avx2,
     DKV__TILES},
#endif
};

static int dkv__level = -1; /* -1: not asked yet. Atomic; racing first calls store the same value */

DKV_API const char *dkv_simd_name(dkv_simd level) {
    static const char *const names[DKV_SIMD_COUNT] = {"scalar", "avx2", "avx512", "amx"};
    return (unsigned)level < DKV_SIMD_COUNT ? names[level] : "?";
}

/* The highest level that there is; AMX only if it is within max. */
DKV__PRIVATE dkv_simd dkv__simd_best(dkv_simd max) {
    (void)max;
#ifdef DKV__X86
    unsigned a, b, c, d, xcr0, xcr0_high;
    const unsigned need1 = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29; /* FMA, OSXSAVE, AVX, F16C */
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & need1) != need1) return DKV_SIMD_SCALAR;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0)); /* which registers the system saves */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 5 & 1u) || (xcr0 & 0x6u) != 0x6u) return DKV_SIMD_SCALAR;
    if (!(b >> 16 & 1u) || (xcr0 & 0xe6u) != 0xe6u) return DKV_SIMD_AVX2;
    const unsigned tiles = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE; and AVX-512 BW */
    if (!(b >> 30 & 1u) || (d & tiles) != tiles || (xcr0 & 0x60000u) != 0x60000u) return DKV_SIMD_AVX512;
    return max >= DKV_SIMD_AMX && dkv__tiles_permitted() ? DKV_SIMD_AMX : DKV_SIMD_AVX512;
#else
    return DKV_SIMD_SCALAR;
#endif
}

DKV_API dkv_simd dkv_simd_supported(void) { return dkv__simd_best(DKV_SIMD_AMX); }

DKV_API dkv_simd dkv_simd_limit(dkv_simd max) {
    dkv_simd best = dkv__simd_best(max), level = max < best ? max : best;
    DKV__ATOMIC_STORE(&dkv__level, (int)level);
    return level;
}

DKV_API dkv_simd dkv_simd_level(void) {
    int level = DKV__ATOMIC_LOAD(&dkv__level);
    return level < 0 ? dkv_simd_limit(DKV_SIMD_AMX) : (dkv_simd)level;
}

DKV__INLINE const dkv__kernels *dkv__simd(void) { return &dkv__table[dkv_simd_level()]; }

DKV_API void dkv_convert(void *dst, dkv_type to, const void *src, dkv_type from, int64_t n) {
    const dkv__kernels *f = dkv__simd();
    float               x[256];
    for (int64_t i = 0; i < n; i += 256) {
        int64_t k = dkv__min(n - i, 256);
        f->load(x, (const char *)src + i * dkv_type_bytes(from), from, k);
        f->store((char *)dst + i * dkv_type_bytes(to), to, x, k);
    }
}

/* ==========================================================================
   [PATTERN]  the bits M[L][H][D] and their file
   in:  file bytes, untrusted
   out: a checked dkv_pattern that points into them
   ========================================================================== */

#define DKV__PATTERN_HEADER 256
static const uint8_t dkv__pattern_magic[8] = {'D', 'K', 'V', 'P', '\r', '\n', 0x1a, '\n'};

DKV_API int64_t dkv_pattern_words(int64_t D) { return dkv__ceil_div(D, 64); }

DKV__INLINE const uint8_t *dkv__bits_row(const dkv_pattern *p, int64_t row) { /* row = l * H + h */
    return (const uint8_t *)p->bits + row * dkv_pattern_words(p->D) * 8;
}

DKV_API int dkv_pattern_get(const dkv_pattern *p, int l, int h, int64_t b) {
    DKV_ASSERT(l >= 0 && l < p->L && h >= 0 && h < p->H && b >= 0 && b < p->D);
    return dkv__bits_row(p, (int64_t)l * p->H + h)[b / 8] >> (b % 8) & 1;
}

DKV_API void dkv_bits_set(void *bits, const dkv_pattern *p, int l, int h, int64_t b, int value) {
    DKV_ASSERT(l >= 0 && l < p->L && h >= 0 && h < p->H && b >= 0 && b < p->D);
    uint8_t *byte = (uint8_t *)bits + ((int64_t)l * p->H + h) * dkv_pattern_words(p->D) * 8 + b / 8;
    unsigned mask = 1u << (b % 8);
    *byte = (uint8_t)(value ? *byte | mask : *byte & ~mask);
}

DKV__INLINE int64_t dkv__bits_bytes(const dkv_pattern *p) { return (int64_t)p->L * p->H * dkv_pattern_words(p->D) * 8; }
DKV__INLINE int64_t dkv__p_bytes(const dkv_pattern *p) { return p->p ? (int64_t)p->L * p->H * p->D * 2 : 0; }

DKV_API int64_t dkv_pattern_count(const dkv_pattern *p) {
    const uint8_t *bits = (const uint8_t *)p->bits;
    int64_t        ones = 0;
    for (int64_t i = 0; i < dkv__bits_bytes(p); i += 8) ones += dkv__popcount(dkv__get64(bits + i));
    return ones;
}

/* Terminated, printable, and zero to the end: safe to print, one image per pattern. */
DKV__PRIVATE int dkv__text_ok(const char *text, int64_t size) {
    int64_t i = 0;
    while (i < size && text[i] >= 0x20 && text[i] < 0x7f) i++;
    if (i == size) return 0;
    while (i < size && text[i] == 0) i++;
    return i == size;
}

DKV__PRIVATE dkv_result dkv__pattern_check_fields(const dkv_pattern *p) {
    const int32_t most = DKV__MAX_HEADS;
    if (p->L < 1 || p->L > most || p->H < 1 || p->H > most || p->Hkv < 1 || p->Hkv > most) return DKV_ERR_FIELD;
    if (p->H % p->Hkv) return DKV_ERR_SHAPE;
    if (p->D < 1 || p->D > 1 << 20 || p->d < 0 || p->d > DKV__MAX_D) return DKV_ERR_FIELD;
    if (p->W < 1 || p->W > DKV__FAR || p->S < 0 || p->S > DKV__FAR || p->R < 0 || p->R > DKV__FAR) return DKV_ERR_FIELD;
    if (p->budget != DKV_BUDGET_LOGICAL && p->budget != DKV_BUDGET_PHYSICAL) return DKV_ERR_FIELD;
    if (!(p->rho >= 0.0 && p->rho <= 1.0)) return DKV_ERR_FIELD;
    if (!dkv__text_ok(p->model, sizeof p->model) || !dkv__text_ok(p->tool, sizeof p->tool)) return DKV_ERR_FIELD;
    return DKV_OK;
}

DKV_API dkv_result dkv_pattern_check(const dkv_pattern *p) {
    dkv_result r = dkv__pattern_check_fields(p);
    if (r) return r;
    if (p->K != dkv_pattern_count(p)) return DKV_ERR_FIELD;
    for (int64_t row = 0; p->D % 64 && row < (int64_t)p->L * p->H; row++) {
        if (dkv__get64(dkv__bits_row(p, row) + p->D / 64 * 8) >> (p->D % 64)) return DKV_ERR_FIELD;
    }
    for (int64_t i = 0; i < dkv__p_bytes(p); i += 2) { /* f16 in 0..1: the bits 0..0x3c00 */
        const uint8_t *h = (const uint8_t *)p->p + i;
        if ((h[0] | h[1] << 8) > 0x3c00) return DKV_ERR_FIELD;
    }
    return DKV_OK;
}

DKV_API dkv_result dkv_pattern_matches(const dkv_pattern *p, int L, int H, int Hkv, int d) {
    return p->L == L && p->H == H && p->Hkv == Hkv && (p->d == 0 || p->d == d) ? DKV_OK : DKV_ERR_SHAPE;
}

DKV__INLINE int64_t dkv__pattern_bytes(const dkv_pattern *p) {
    return DKV__PATTERN_HEADER + dkv__bits_bytes(p) + dkv__p_bytes(p) + 4;
}

DKV__PRIVATE void dkv__pattern_header(uint8_t *out, const dkv_pattern *p) {
    uint64_t rho;
    memcpy(&rho, &p->rho, 8);
    memset(out, 0, DKV__PATTERN_HEADER);
    memcpy(out, dkv__pattern_magic, 8);
    dkv__put32(out + 8, DKV_PATTERN_VERSION);
    dkv__put32(out + 12, DKV__PATTERN_HEADER);
    dkv__put64(out + 16, (uint64_t)dkv__pattern_bytes(p));
    dkv__put32(out + 24, (uint32_t)p->L);
    dkv__put32(out + 28, (uint32_t)p->H);
    dkv__put32(out + 32, (uint32_t)p->Hkv);
    dkv__put32(out + 36, (uint32_t)p->D);
    dkv__put32(out + 40, (uint32_t)p->d);
    dkv__put32(out + 44, (uint32_t)p->budget);
    dkv__put64(out + 48, (uint64_t)p->W);
    dkv__put64(out + 56, (uint64_t)p->S);
    dkv__put64(out + 64, (uint64_t)p->R);
    dkv__put64(out + 72, rho);
    dkv__put64(out + 80, (uint64_t)p->K);
    dkv__put64(out + 88, p->data_hash);
    dkv__put64(out + 104, p->seed);
    dkv__put32(out + 112, p->p ? 1u : 0u);
    memcpy(out + 128, p->model, 64);
    memcpy(out + 192, p->tool, 64);
}

DKV_API uint32_t dkv_pattern_crc(const dkv_pattern *p) {
    uint8_t header[DKV__PATTERN_HEADER];
    dkv__pattern_header(header, p);
    uint32_t crc = dkv_crc32(0, header, sizeof header);
    crc = dkv_crc32(crc, p->bits, (size_t)dkv__bits_bytes(p));
    return p->p ? dkv_crc32(crc, p->p, (size_t)dkv__p_bytes(p)) : crc;
}

DKV_API dkv_result dkv_pattern_write(void *dst, size_t *bytes, const dkv_pattern *p) {
    dkv_result r = dkv_pattern_check(p);
    if (r) return r;
    size_t need = (size_t)dkv__pattern_bytes(p), bits = (size_t)dkv__bits_bytes(p);
    if (!dst) {
        *bytes = need;
        return DKV_OK;
    }
    if (*bytes < need) return DKV_ERR_CAPACITY;
    dkv__range to = dkv__byte_range(dst, need);
    if (dkv__overlap(to, dkv__byte_range(p->bits, bits)) ||
        (p->p && dkv__overlap(to, dkv__byte_range(p->p, (size_t)dkv__p_bytes(p))))) {
        return DKV_ERR_OVERLAP;
    }
    uint8_t *out = (uint8_t *)dst;
    dkv__pattern_header(out, p);
    memcpy(out + DKV__PATTERN_HEADER, p->bits, bits);
    if (p->p) memcpy(out + DKV__PATTERN_HEADER + bits, p->p, (size_t)dkv__p_bytes(p));
    dkv__put32(out + need - 4, dkv_crc32(0, out, need - 4));
    *bytes = need;
    return DKV_OK;
}

DKV__PRIVATE int dkv__all_zero(const uint8_t *p, int64_t n) {
    int any = 0;
    for (int64_t i = 0; i < n; i++) any |= p[i];
    return !any;
}

/* A count that must fit a non-negative int32: anything else becomes -1, which no field admits. */
DKV__INLINE int32_t dkv__get_i32(const uint8_t *p) { return dkv__get32(p) > INT32_MAX ? -1 : (int32_t)dkv__get32(p); }
DKV__INLINE int64_t dkv__get_i64(const uint8_t *p) { return dkv__get64(p) > INT64_MAX ? -1 : (int64_t)dkv__get64(p); }

/* Magic, version, header size, length and CRC: what every file of ours begins with, and ends with. */
DKV__PRIVATE dkv_result dkv__file_check(const uint8_t *in, size_t bytes, const uint8_t magic[8], uint32_t version,
                                        uint32_t header) {
    if (memcmp(in, magic, bytes < 8 ? bytes : 8)) return DKV_ERR_MAGIC;
    if (bytes < header + 4) return DKV_ERR_LENGTH;
    if (dkv__get32(in + 8) != version || dkv__get32(in + 12) != header) return DKV_ERR_VERSION;
    if (dkv__get64(in + 16) != bytes) return DKV_ERR_LENGTH;
    if (dkv__get32(in + bytes - 4) != dkv_crc32(0, in, bytes - 4)) return DKV_ERR_CRC;
    return DKV_OK;
}

DKV_API dkv_result dkv_pattern_read(dkv_pattern *out, const void *data, size_t bytes) {
    const uint8_t *in = (const uint8_t *)data;
    dkv_pattern    p;
    dkv_result     r = dkv__file_check(in, bytes, dkv__pattern_magic, DKV_PATTERN_VERSION, DKV__PATTERN_HEADER);
    if (r) return r;
    memset(&p, 0, sizeof p);
    p.L = dkv__get_i32(in + 24);
    p.H = dkv__get_i32(in + 28);
    p.Hkv = dkv__get_i32(in + 32);
    p.D = dkv__get_i32(in + 36);
    p.d = dkv__get_i32(in + 40);
    p.W = dkv__get_i64(in + 48);
    p.S = dkv__get_i64(in + 56);
    p.R = dkv__get_i64(in + 64);
    p.K = dkv__get_i64(in + 80);
    p.data_hash = dkv__get64(in + 88);
    p.seed = dkv__get64(in + 104);
    uint64_t rho = dkv__get64(in + 72);
    uint32_t budget = dkv__get32(in + 44), flags = dkv__get32(in + 112);
    memcpy(&p.rho, &rho, 8);
    memcpy(p.model, in + 128, 64);
    memcpy(p.tool, in + 192, 64);
    if (budget > 1 || flags > 1 || !dkv__all_zero(in + 96, 8) || !dkv__all_zero(in + 116, 12)) return DKV_ERR_FIELD;
    p.budget = (dkv_budget)budget;
    if ((r = dkv__pattern_check_fields(&p))) return r;
    p.bits = in + DKV__PATTERN_HEADER;
    p.p = flags ? in : NULL; /* only whether, until the length is known to hold it */
    if ((size_t)dkv__pattern_bytes(&p) != bytes) return DKV_ERR_LENGTH;
    if (flags) p.p = in + DKV__PATTERN_HEADER + dkv__bits_bytes(&p);
    if ((r = dkv_pattern_check(&p))) return r;
    *out = p;
    return DKV_OK;
}

#ifndef DKV_NO_STDIO
/* The whole file in one allocation. */
DKV__PRIVATE dkv_result dkv__file_load(void **data, size_t *bytes, const char *path, const dkv_allocator *alloc) {
    FILE *f = fopen(path, "rb");
    if (!f) return DKV_ERR_IO;
    int  folder = fgetc(f) == EOF && ferror(f); /* opens, but does not read; its size would be nonsense */
    long size = folder || fseek(f, 0, SEEK_END) ? -1 : ftell(f);
    dkv_result r = size < 0 || fseek(f, 0, SEEK_SET) ? DKV_ERR_IO : size == 0 ? DKV_ERR_LENGTH : DKV_OK;
    void *p = r ? NULL : dkv__alloc(alloc, (size_t)size);
    if (!r && !p) r = DKV_ERR_MEMORY;
    if (!r && fread(p, 1, (size_t)size, f) != (size_t)size) r = DKV_ERR_IO;
    fclose(f);
    if (r && p) dkv__free(alloc, p, (size_t)size);
    if (r) return r;
    *data = p;
    *bytes = (size_t)size;
    return DKV_OK;
}

DKV_API dkv_result dkv_pattern_load(dkv_pattern *out, const char *path, const dkv_allocator *alloc) {
    void  *data;
    size_t bytes;
    dkv_result r = dkv__file_load(&data, &bytes, path, alloc);
    if (r) return r;
    if ((r = dkv_pattern_read(out, data, bytes))) dkv__free(alloc, data, bytes);
    return r;
}

DKV_API void dkv_pattern_free(dkv_pattern *p, const dkv_allocator *alloc) {
    if (!p->bits) return;
    dkv__free(alloc, (void *)((uintptr_t)p->bits - DKV__PATTERN_HEADER), (size_t)dkv__pattern_bytes(p));
    p->bits = p->p = NULL;
}

/* A pipe or a device is written to; only a plain file, or a new one, may be replaced by a rename. */
DKV__PRIVATE int dkv__replaceable(const char *path) {
#if defined(__unix__) || defined(__APPLE__)
    struct stat s;
    return stat(path, &s) != 0 || S_ISREG(s.st_mode);
#else
    (void)path;
    return 1;
#endif
}

DKV__PRIVATE dkv_result dkv__file_write(const char *path, const void *data, size_t bytes) {
    FILE *f = fopen(path, "wb");
    if (!f) return DKV_ERR_IO;
    int bad = fwrite(data, 1, bytes, f) != bytes;
    bad |= fclose(f) != 0; /* the last bytes may fail only here */
    return bad ? DKV_ERR_IO : DKV_OK;
}

DKV_API dkv_result dkv_pattern_save(const dkv_pattern *p, const char *path) {
    size_t     bytes, n = strlen(path);
    dkv_result r = dkv_pattern_write(NULL, &bytes, p);
    if (r) return r;
    char *image = (char *)malloc(bytes), *beside = (char *)malloc(n + 5);
    if (!image || !beside) r = DKV_ERR_MEMORY;
    if (!r) {
        memcpy(beside, path, n);
        memcpy(beside + n, ".tmp", 5);
        r = dkv_pattern_write(image, &bytes, p);
    }
    if (!r && !dkv__replaceable(path)) {
        r = dkv__file_write(path, image, bytes);
    } else if (!r) {
        r = dkv__file_write(beside, image, bytes);
        if (!r && rename(beside, path)) r = DKV_ERR_IO;
        if (r) remove(beside);
    }
    free(image);
    free(beside);
    return r;
}
#endif

/* ==========================================================================
   [BINS]  position <-> relative-distance bin (paper 3.4)
   in:  W, S, R of a pattern and a context length
   out: bins counted from the context's end, so that a ragged one lies beside the sink
   ========================================================================== */

DKV_API int64_t dkv_max_context(const dkv_pattern *p) { return p->S + p->R + p->W * p->D; }

DKV_API int64_t dkv_bin(const dkv_pattern *p, int64_t T_c, int64_t i) {
    return i < p->S || i >= T_c - p->R ? DKV_ALWAYS : (T_c - p->R - 1 - i) / p->W;
}

DKV_API int64_t dkv_bins_at(const dkv_pattern *p, int64_t T_c) {
    return dkv__ceil_div(dkv__max(T_c - p->S - p->R, 0), p->W);
}

DKV_API void dkv_bin_span(const dkv_pattern *p, int64_t T_c, int64_t b, int64_t *begin, int64_t *end) {
    if (b >= dkv_bins_at(p, T_c)) {
        *begin = *end = 0;
        return;
    }
    *end = T_c - p->R - p->W * b;
    *begin = dkv__max(*end - p->W, p->S);
}

/* ==========================================================================
   [UNION]  query-head bits -> KV-head bits (paper 3.4)
   invariant: a KV head keeps a bin if any query head of its group does
   ========================================================================== */

DKV__PRIVATE uint64_t dkv__union_word(const dkv_pattern *p, int l, int g, int64_t word) {
    int64_t  G = p->H / p->Hkv, first = (int64_t)l * p->H + g * G;
    uint64_t bits = 0;
    for (int64_t h = 0; h < G; h++) bits |= dkv__get64(dkv__bits_row(p, first + h) + word * 8);
    return bits;
}

DKV_API void dkv_union_row(const dkv_pattern *p, int l, int g, uint64_t *row) {
    for (int64_t w = 0; w < dkv_pattern_words(p->D); w++) row[w] = dkv__union_word(p, l, g, w);
}

DKV_API int dkv_union_get(const dkv_pattern *p, int l, int g, int64_t b) {
    DKV_ASSERT(l >= 0 && l < p->L && g >= 0 && g < p->Hkv && b >= 0 && b < p->D);
    return (int)(dkv__union_word(p, l, g, b / 64) >> (b % 64) & 1u);
}

/* ==========================================================================
   [PLAN]  which positions survive, and where they go
   in:  a pattern, positions, or an older plan; T_c
   out: runs of kept positions per (layer, KV head), and their packed rows
   invariant: runs are sorted, disjoint, and never touch; sizes and contents come from one walk
   ========================================================================== */

/* Collects spans in ascending order into runs; out NULL: only counts. */
typedef struct dkv__runs {
    dkv_run *out;
    int64_t  n;    /* runs so far, all heads */
    int64_t  rows; /* of this head so far */
    int64_t  end;  /* of the last span of this head; -1 before the first */
    int64_t  at;   /* elements of a flat source used so far, all heads */
} dkv__runs;

DKV__PRIVATE void dkv__emit(dkv__runs *to, int64_t begin, int64_t end) {
    if (begin >= end) return;
    if (begin == to->end) {
        if (to->out) to->out[to->n - 1].len += end - begin;
    } else {
        if (to->out) {
            dkv_run run = {begin, end - begin, to->rows};
            to->out[to->n] = run;
        }
        to->n++;
    }
    to->rows += end - begin;
    to->end = end;
}

/* What a maker knows; each walk emits the spans of flat head f = l * Hkv + g in ascending order. */
typedef struct dkv__maker {
    void (*walk)(dkv__runs *to, const struct dkv__maker *m, int64_t f);
    const dkv_pattern *p;
    int64_t            T_c;
    dkv_beyond         beyond;
    const dkv_plan    *old;
    const int64_t     *positions, *counts;
    const uint8_t     *file_counts, *file_spans; /* the same, as a saved cache holds them: see [CACHE] */
} dkv__maker;

/* The first run of head f that ends after pos; first[f + 1] if there is none. */
DKV__PRIVATE int64_t dkv__run_after(const dkv_plan *plan, int64_t f, int64_t pos) {
    int64_t lo = plan->first[f], hi = plan->first[f + 1];
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        if (plan->runs[mid].pos + plan->runs[mid].len > pos) hi = mid;
        else lo = mid + 1;
    }
    return lo;
}

/* Emits [begin, end) as far as the old plan still has it (all of its suffix), or as it is. */
DKV__PRIVATE void dkv__emit_kept(dkv__runs *to, const dkv__maker *m, int64_t f, int64_t begin, int64_t end) {
    if (!m->old) {
        dkv__emit(to, begin, end);
        return;
    }
    int64_t i = dkv__run_after(m->old, f, begin);
    for (; i < m->old->first[f + 1] && m->old->runs[i].pos < end; i++) {
        dkv_run r = m->old->runs[i];
        dkv__emit(to, dkv__max(begin, r.pos), dkv__min(end, r.pos + r.len));
    }
    dkv__emit(to, dkv__max(begin, m->old->T_c), end);
}

/* Keep(l, g, i) = sink or recent or the union's bit (paper 3.4), from far to near. */
DKV__PRIVATE void dkv__walk_pattern(dkv__runs *to, const dkv__maker *m, int64_t f) {
    const dkv_pattern *p = m->p;
    int                l = (int)(f / p->Hkv), g = (int)(f % p->Hkv);
    int64_t            bins = dkv_bins_at(p, m->T_c), b = dkv__min(bins, p->D), begin, end;
    if (!bins) { /* T_c <= S + R: sink and recent cover everything */
        dkv__emit_kept(to, m, f, 0, m->T_c);
        return;
    }
    dkv__emit_kept(to, m, f, 0, p->S);
    if (bins > p->D) {
        int keep = m->beyond == DKV_BEYOND_KEEP || (m->beyond == DKV_BEYOND_CLAMP && dkv_union_get(p, l, g, p->D - 1));
        if (keep) dkv__emit_kept(to, m, f, p->S, m->T_c - p->R - p->W * p->D);
    }
    uint64_t bits = dkv__union_word(p, l, g, (b - 1) / 64);
    while (b-- > 0) {
        if (b % 64 == 63) bits = dkv__union_word(p, l, g, b / 64);
        if (!(bits >> (b % 64) & 1u)) continue;
        dkv_bin_span(p, m->T_c, b, &begin, &end);
        dkv__emit_kept(to, m, f, begin, end);
    }
    dkv__emit_kept(to, m, f, m->T_c - p->R, m->T_c);
}

DKV__PRIVATE void dkv__walk_positions(dkv__runs *to, const dkv__maker *m, int64_t f) {
    if (!m->positions) {
        dkv__emit(to, 0, m->T_c);
        return;
    }
    for (int64_t i = 0; i < m->counts[f]; i++, to->at++) dkv__emit(to, m->positions[to->at], m->positions[to->at] + 1);
}

DKV__INLINE void dkv__walk_head(dkv__runs *to, const dkv__maker *m, int64_t f) {
    to->rows = 0;
    to->end = -1;
    m->walk(to, m, f);
}

DKV__INLINE size_t dkv__plan_bytes(const dkv_plan *plan) {
    int64_t heads = (int64_t)plan->L * plan->Hkv;
    return (size_t)(2 * heads + 1) * sizeof(int64_t) + (size_t)plan->first[heads] * sizeof(dkv_run);
}

DKV__PRIVATE dkv_result dkv__plan_build(dkv_plan *plan, void *mem, size_t *bytes, const dkv__maker *m, int L, int Hkv) {
    int64_t   heads = (int64_t)L * Hkv;
    dkv__runs to = {NULL, 0, 0, 0, 0};
    for (int64_t f = 0; f < heads; f++) dkv__walk_head(&to, m, f);
    size_t need = (size_t)(2 * heads + 1) * sizeof(int64_t) + (size_t)to.n * sizeof(dkv_run);
    if (!mem) {
        *bytes = need;
        return DKV_OK;
    }
    if (*bytes < need) return DKV_ERR_CAPACITY;
    if (!dkv__aligned(mem, 8)) return DKV_ERR_ALIGN;
    if (m->old && dkv__overlap(dkv__byte_range(mem, need), dkv__byte_range(m->old->first, dkv__plan_bytes(m->old)))) {
        return DKV_ERR_OVERLAP;
    }
    int64_t *first = (int64_t *)mem, *rows = first + heads + 1;
    to.out = (dkv_run *)(void *)(rows + heads);
    to.n = to.at = 0;
    for (int64_t f = 0; f < heads; f++) {
        first[f] = to.n;
        dkv__walk_head(&to, m, f);
        rows[f] = to.rows;
    }
    first[heads] = to.n;
    plan->L = L;
    plan->Hkv = Hkv;
    plan->T_c = m->T_c;
    plan->pattern_crc = m->p ? dkv_pattern_crc(m->p) : 0;
    plan->first = first;
    plan->rows = rows;
    plan->runs = to.out;
    return DKV_OK;
}

/* A pattern applied at T_c: checks what every user of one must. */
DKV__PRIVATE dkv_result dkv__maker_pattern(dkv__maker *m, const dkv_pattern *p, int64_t T_c, dkv_beyond beyond) {
    dkv_result r = dkv__pattern_check_fields(p);
    memset(m, 0, sizeof *m);
    m->walk = dkv__walk_pattern;
    m->p = p;
    m->T_c = T_c;
    m->beyond = beyond;
    if (r) return r;
    if (T_c < 0 || T_c > DKV__FAR || (int)beyond < DKV_BEYOND_ERROR || beyond > DKV_BEYOND_DROP) return DKV_ERR_FIELD;
    return beyond == DKV_BEYOND_ERROR && dkv_bins_at(p, T_c) > p->D ? DKV_ERR_RANGE : DKV_OK;
}

DKV_API dkv_result dkv_plan_make(dkv_plan *plan, void *mem, size_t *bytes, const dkv_pattern *p, int64_t T_c,
                                 dkv_beyond beyond) {
    dkv__maker m;
    dkv_result r = dkv__maker_pattern(&m, p, T_c, beyond);
    return r ? r : dkv__plan_build(plan, mem, bytes, &m, p->L, p->Hkv);
}

DKV_API dkv_result dkv_plan_from_positions(dkv_plan *plan, void *mem, size_t *bytes, int L, int Hkv, int64_t T_c,
                                           const int64_t *positions, const int64_t *counts) {
    dkv__maker m;
    if (L < 1 || L > DKV__MAX_HEADS || Hkv < 1 || Hkv > DKV__MAX_HEADS) return DKV_ERR_FIELD;
    if (T_c < 0 || T_c > DKV__FAR) return DKV_ERR_FIELD;
    DKV_ASSERT(!positions == !counts);
    const int64_t *at = positions;
    for (int64_t f = 0; positions && f < (int64_t)L * Hkv; f++) {
        if (counts[f] < 0 || counts[f] > T_c) return DKV_ERR_ORDER;
        for (int64_t i = 0, last = -1; i < counts[f]; i++, last = *at++) {
            if (*at <= last || *at >= T_c) return DKV_ERR_ORDER;
        }
    }
    memset(&m, 0, sizeof m);
    m.walk = dkv__walk_positions;
    m.T_c = T_c;
    m.positions = positions;
    m.counts = counts;
    return dkv__plan_build(plan, mem, bytes, &m, L, Hkv);
}

DKV_API dkv_result dkv_plan_refine(dkv_plan *plan, void *mem, size_t *bytes, const dkv_plan *old,
                                   const dkv_pattern *p, int64_t T_c, dkv_beyond beyond) {
    dkv__maker m;
    dkv_result r = dkv__maker_pattern(&m, p, T_c, beyond);
    if (r) return r;
    if (old->L != p->L || old->Hkv != p->Hkv) return DKV_ERR_SHAPE;
    if (T_c < old->T_c) return DKV_ERR_ORDER;
    m.old = old;
    return dkv__plan_build(plan, mem, bytes, &m, p->L, p->Hkv);
}

DKV_API void dkv_plan_positions(const dkv_plan *plan, int l, int g, int64_t *positions) {
    int64_t f = (int64_t)l * plan->Hkv + g;
    for (int64_t i = plan->first[f]; i < plan->first[f + 1]; i++) {
        for (int64_t j = 0; j < plan->runs[i].len; j++) *positions++ = plan->runs[i].pos + j;
    }
}

DKV_API int64_t dkv_plan_row(const dkv_plan *plan, int l, int g, int64_t pos) {
    int64_t f = (int64_t)l * plan->Hkv + g, i = dkv__run_after(plan, f, pos);
    if (i == plan->first[f + 1] || plan->runs[i].pos > pos) return -1;
    return plan->runs[i].row + pos - plan->runs[i].pos;
}

DKV__PRIVATE double dkv__ratio(int64_t part, int64_t whole) { return whole ? (double)part / (double)whole : 1.0; }

DKV_API dkv_result dkv_dry_run(dkv_stats *out, const dkv_pattern *p, int64_t T_c, dkv_beyond beyond) {
    dkv__maker m;
    dkv_result r = dkv__maker_pattern(&m, p, T_c, beyond);
    if (r) return r;
    int64_t   heads = (int64_t)p->L * p->Hkv, bins = dkv__min(dkv_bins_at(p, T_c), p->D), ones = 0;
    dkv_stats s;
    memset(&s, 0, sizeof s);
    for (int64_t f = 0; f < heads; f++) {
        dkv__runs to = {NULL, 0, 0, 0, 0};
        dkv__walk_head(&to, &m, f);
        s.kept += to.rows;
    }
    for (int64_t row = 0; row < (int64_t)p->L * p->H; row++) {
        for (int64_t b = 0; b < bins; b += 64) {
            uint64_t reached = bins - b >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << (bins - b)) - 1;
            ones += dkv__popcount(dkv__get64(dkv__bits_row(p, row) + b / 8) & reached);
        }
    }
    s.total = heads * T_c;
    s.compressible = heads * dkv__max(T_c - p->S - p->R, 0);
    s.compressible_kept = s.kept - (s.total - s.compressible);
    s.logical = dkv__ratio(ones, (int64_t)p->L * p->H * bins);
    s.physical = dkv__ratio(s.compressible_kept, s.compressible);
    s.physical_total = dkv__ratio(s.kept, s.total);
    *out = s;
    return DKV_OK;
}

DKV__PRIVATE int64_t dkv__rows_total(const int64_t *rows, int64_t n) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += rows[i];
    return sum;
}

DKV_API int64_t dkv_kv_bytes_packed(const dkv_plan *plan, const dkv_shape *s, dkv_type type) {
    int64_t heads = (int64_t)plan->L * plan->Hkv, d = s->d_k + s->d_v;
    return dkv__rows_total(plan->rows, heads) * d * dkv_type_bytes(type) + (dkv__scaled(type) ? heads * d * 4 : 0);
}

DKV_API int64_t dkv_kv_bytes_dense(const dkv_shape *s, dkv_type type, int64_t T_c) {
    int64_t heads = (int64_t)s->L * s->Hkv, d = s->d_k + s->d_v;
    return heads * T_c * d * dkv_type_bytes(type) + (dkv__scaled(type) ? heads * d * 4 : 0);
}

/* ==========================================================================
   [PACK]  the packed layout, and the one way rows get into it
   in:  any segment: strided in any way, or packed
   out: packed rows in order; opening a block of 16 rows clears it, so slack is zero or stale, never wild
   invariant: a function of (type, d) only
   ========================================================================== */

DKV__INLINE int64_t dkv__capacity(const dkv_packed *p, int64_t g) {
    return p->capacity ? p->capacity : dkv__round_up(p->rows[g], DKV__BLOCK);
}

DKV__PRIVATE int64_t dkv__rows_before(const dkv_packed *p, int64_t g) { /* capacity of the heads before g */
    int64_t sum = p->capacity * g;
    for (int64_t i = 0; !p->capacity && i < g; i++) sum += dkv__capacity(p, i);
    return sum;
}

DKV__INLINE int64_t dkv__v_row_bytes(dkv_type type, int64_t d) { return dkv__v_width(d) * dkv_type_bytes(type); }

DKV__INLINE int64_t dkv__k_bytes(const dkv_packed *p) { /* all heads, padded so that V starts a cache line */
    return dkv__round_up(dkv__rows_before(p, p->Hkv) / DKV__BLOCK * dkv__k_block_bytes(p->type, p->d_k), DKV__ALIGN);
}

DKV__INLINE int64_t dkv__kv_bytes(const dkv_packed *p) { /* K and V: where the scales begin */
    return dkv__round_up(dkv__k_bytes(p) + dkv__rows_before(p, p->Hkv) * dkv__v_row_bytes(p->type, p->d_v), DKV__ALIGN);
}

DKV__PRIVATE int64_t dkv__packed_bytes(const dkv_packed *p) {
    int64_t scales = dkv__scaled(p->type) ? p->Hkv * (dkv__v_width(p->d_k) + dkv__v_width(p->d_v)) * 4 : 0;
    return dkv__kv_bytes(p) + dkv__round_up(scales, DKV__ALIGN);
}

/* One KV head of a packed layer. */
typedef struct dkv__head {
    char    *k, *v;          /* its first block, its first row */
    dkv_type type;
    int64_t  d_k, d_v;
    int64_t  k_block, v_row; /* bytes */
    float   *k_scale, *v_scale; /* [d_k], [d_v], or NULL where elements are the values */
} dkv__head;

DKV__PRIVATE dkv__head dkv__head_of(const dkv_packed *p, int64_t g) {
    dkv__head h;
    int64_t   before = dkv__rows_before(p, g);
    h.type = p->type;
    h.d_k = p->d_k;
    h.d_v = p->d_v;
    h.k_block = dkv__k_block_bytes(p->type, p->d_k);
    h.v_row = dkv__v_row_bytes(p->type, p->d_v);
    h.k = (char *)p->data + before / DKV__BLOCK * h.k_block;
    h.v = (char *)p->data + dkv__k_bytes(p) + before * h.v_row;
    h.k_scale = h.v_scale = NULL;
    if (dkv__scaled(p->type)) {
        float *scales = (float *)(void *)((char *)p->data + dkv__kv_bytes(p));
        h.k_scale = scales + g * dkv__v_width(p->d_k);
        h.v_scale = scales + p->Hkv * dkv__v_width(p->d_k) + g * dkv__v_width(p->d_v);
    }
    return h;
}

DKV_API int64_t dkv_kv_bytes_alloc(const dkv_plan *plan, const dkv_shape *s, dkv_type type) {
    dkv_packed p = {NULL, type, plan->Hkv, s->d_k, s->d_v, NULL, 0};
    int64_t    sum = 0;
    for (int64_t l = 0; l < plan->L; l++) {
        p.rows = plan->rows + l * plan->Hkv;
        sum += dkv__packed_bytes(&p);
    }
    return sum;
}

DKV_API dkv_segment dkv_strided(dkv_tensor k, dkv_tensor v, int64_t n) {
    dkv_segment s;
    s.packed = NULL;
    s.k = k;
    s.v = v;
    s.rows = NULL;
    s.n = n;
    return s;
}

DKV__INLINE int64_t dkv__segment_rows(const dkv_segment *s, int64_t g) {
    return s->packed ? s->packed->rows[g] : s->rows ? s->rows[g] : s->n;
}

DKV__INLINE const char *dkv__at(const dkv_tensor *t, int64_t token, int64_t head) {
    return (const char *)t->data + token * t->stride_token + head * t->stride_head;
}

/* x[d] <- one strided row */
DKV__PRIVATE void dkv__load_row(float *x, const dkv_tensor *t, int64_t token, int64_t head, int64_t d,
                                const dkv__kernels *f) {
    const char *p = dkv__at(t, token, head);
    if (t->stride_dim == dkv_type_bytes(t->type)) f->load(x, p, t->type, d);
    else for (int64_t j = 0; j < d; j++) x[j] = dkv__element(p + j * t->stride_dim, t->type);
}

DKV__PRIVATE void dkv__store_row(const dkv_tensor *t, int64_t token, int64_t head, const float *x, int64_t d,
                                 const dkv__kernels *f) {
    char *p = (char *)(uintptr_t)dkv__at(t, token, head);
    if (t->stride_dim == dkv_type_bytes(t->type)) f->store(p, t->type, x, d);
    else for (int64_t j = 0; j < d; j++) dkv__set_element(p + j * t->stride_dim, t->type, x[j]);
}

/* One row of K and V of a packed head as it is stored, without scales. Exact, as f32 holds every type. */
DKV__PRIVATE void dkv__head_get(float *k, float *v, const dkv__head *h, int64_t row) {
    const char *kb = h->k + row / DKV__BLOCK * h->k_block;
    int64_t     e = dkv_type_bytes(h->type), t = row % DKV__BLOCK, dv = dkv__v_width(h->d_v);
    for (int64_t j = 0; j < h->d_k; j++) k[j] = dkv__element(kb + dkv__k_index(h->type, j, t) * e, h->type);
    for (int64_t j = 0; j < h->d_v; j++) v[j] = dkv__element(h->v + dkv__v_index(h->type, dv, row, j) * e, h->type);
}

/* Opens the block that row begins: slack is zero until it is written. */
DKV__PRIVATE void dkv__head_open(const dkv__head *h, int64_t row) {
    memset(h->k + row / DKV__BLOCK * h->k_block, 0, (size_t)h->k_block);
    memset(h->v + row * h->v_row, 0, (size_t)(DKV__BLOCK * h->v_row));
}

/* One row. K goes into block, which lays a whole block out in f32 to be converted in one go, or (NULL) to its place. */
DKV__PRIVATE void dkv__head_set(const dkv__head *h, int64_t row, const float *k, const float *v, float *block,
                                const dkv__kernels *f) {
    const int64_t e = dkv_type_bytes(h->type), dv = dkv__v_width(h->d_v), t = row % DKV__BLOCK;
    char         *kb = h->k + row / DKV__BLOCK * h->k_block, *vb = h->v + row * h->v_row;
    uint16_t      x[DKV__MAX_D];
    for (int64_t j = 0; j < h->d_k; j++) {
        int64_t i = dkv__k_index(h->type, j, t);
        if (block) block[i] = k[j];
        else dkv__set_element(kb + i * e, h->type, k[j]);
    }
    if (h->type != DKV_BF16) {
        f->store(vb, h->type, v, h->d_v);
        return;
    }
    f->store(x, DKV_BF16, v, h->d_v);
    vb = h->v + (row - row % 2) * h->v_row;
    for (int64_t j = 0; j < h->d_v; j++) memcpy(vb + dkv__v_index(DKV_BF16, dv, row % 2, j) * 2, x + j, 2);
}

DKV__INLINE void dkv__scale_row(float *x, const float *scale, int64_t d) {
    for (int64_t j = 0; scale && j < d; j++) x[j] *= scale[j];
}
DKV__INLINE void dkv__unscale_row(float *x, const float *scale, int64_t d) {
    for (int64_t j = 0; scale && j < d; j++) x[j] /= scale[j];
}

/* One row of KV head g of a segment, as values; from: its packed head, if it is packed. */
DKV__PRIVATE void dkv__segment_get(float *k, float *v, const dkv_segment *s, const dkv__head *from, int64_t g,
                                   int64_t row, int64_t d_k, int64_t d_v, const dkv__kernels *f) {
    if (s->packed) {
        dkv__head_get(k, v, from, row);
        dkv__scale_row(k, from->k_scale, d_k);
        dkv__scale_row(v, from->v_scale, d_v);
    } else {
        dkv__load_row(k, &s->k, row, g, d_k, f);
        dkv__load_row(v, &s->v, row, g, d_v, f);
    }
}

/* n rows of KV head g of a segment, from row src on, to rows dst.. of a packed head: at most a block at a time. */
DKV__PRIVATE void dkv__copy_rows(const dkv__head *to, int64_t dst, const dkv_segment *s, int64_t g, int64_t src,
                                 int64_t n, const dkv__kernels *f) {
    const int64_t floats = to->k_block / dkv_type_bytes(to->type); /* of a K block, padding included: */
    const int64_t line = 64 / dkv_type_bytes(to->type);             /* padding is in its last cache line */
    float         k[DKV__MAX_D], v[DKV__MAX_D], block[DKV__BLOCK * DKV__MAX_D];
    dkv__head     from = s->packed ? dkv__head_of(s->packed, g) : *to;
    for (int64_t m; n > 0; n -= m, dst += m, src += m) {
        m = dkv__min(n, DKV__BLOCK - dst % DKV__BLOCK);
        int whole = m == DKV__BLOCK;
        if (dst % DKV__BLOCK == 0) dkv__head_open(to, dst);
        if (whole) memset(block + floats - line, 0, (size_t)line * sizeof(float));
        for (int64_t i = 0; i < m; i++) {
            dkv__segment_get(k, v, s, &from, g, src + i, to->d_k, to->d_v, f);
            dkv__unscale_row(k, to->k_scale, to->d_k);
            dkv__unscale_row(v, to->v_scale, to->d_v);
            dkv__head_set(to, dst + i, k, v, whole ? block : NULL, f);
        }
        if (whole) f->store(to->k + dst / DKV__BLOCK * to->k_block, to->type, block, floats);
    }
}

/* most[d] <- max |x|; NaN once a value is not finite (x - x is NaN then). */
DKV__INLINE void dkv__track(float *most, const float *x, int64_t d) {
    for (int64_t j = 0; j < d; j++) {
        float a = fabsf(x[j]) + (x[j] - x[j]);
        most[j] = a <= most[j] ? most[j] : a + (most[j] - most[j]);
    }
}

/* Largest magnitudes -> scales of an 8-bit head (see dkv_type). */
DKV__PRIVATE void dkv__scales_from(float *scale, dkv_type type, int64_t d) {
    for (int64_t j = 0; j < d; j++) {
        scale[j] /= type == DKV_I8 ? 127.0f : 448.0f;
        if (scale[j] < 1.17549435e-38f) scale[j] = 1.0f; /* zeros, or subnormal and as good as zeros; not a NaN */
    }
}

DKV__INLINE int dkv__d_ok(int64_t d) { return d >= 1 && d <= DKV__MAX_D; }

/* Whether a segment can be read as [rows][Hkv][d]: shapes, types, counts. */
DKV__PRIVATE dkv_result dkv__segment_check(const dkv_segment *s, int64_t Hkv, int64_t d_k, int64_t d_v) {
    int empty = !s->packed && !s->rows && s->n == 0;
    if (empty) return DKV_OK; /* nothing is read: tensors may be left zero */
    if (s->packed && (s->packed->Hkv != Hkv || s->packed->d_k != d_k || s->packed->d_v != d_v)) return DKV_ERR_SHAPE;
    if (s->packed && !dkv_type_bytes(s->packed->type)) return DKV_ERR_TYPE;
    if (!s->packed && (!dkv__tensor_type_ok(s->k.type) || !dkv__tensor_type_ok(s->v.type))) return DKV_ERR_TYPE;
    for (int64_t g = 0; g < Hkv; g++) {
        int64_t rows = dkv__segment_rows(s, g);
        if (rows < 0 || rows > DKV__FAR) return DKV_ERR_SHAPE;
        if (s->packed && s->packed->capacity && (rows > s->packed->capacity || s->packed->capacity % DKV__BLOCK)) {
            return DKV_ERR_CAPACITY;
        }
    }
    return DKV_OK;
}

/* And whether there is something to read. */
DKV__PRIVATE dkv_result dkv__segment_memory(const dkv_segment *s, int64_t Hkv) {
    int64_t rows = 0;
    for (int64_t g = 0; g < Hkv; g++) rows = dkv__max(rows, dkv__segment_rows(s, g));
    if (!rows) return DKV_OK;
    if (!s->packed) {
        DKV_ASSERT(s->k.data && s->v.data);
        return DKV_OK;
    }
    if (!s->packed->data) return DKV_ERR_STATE; /* a layer that was not packed yet */
    return dkv__aligned(s->packed->data, DKV__ALIGN) ? DKV_OK : DKV_ERR_ALIGN;
}

DKV__PRIVATE int dkv__segment_overlaps(const dkv_segment *s, int64_t Hkv, int64_t d_k, int64_t d_v, dkv__range r) {
    if (s->packed) return dkv__overlap(r, dkv__byte_range(s->packed->data, (size_t)dkv__packed_bytes(s->packed)));
    int64_t most = s->rows ? 0 : s->n;
    for (int64_t g = 0; s->rows && g < Hkv; g++) most = dkv__max(most, s->rows[g]);
    return dkv__overlap(r, dkv__tensor_range(&s->k, most, Hkv, d_k)) ||
           dkv__overlap(r, dkv__tensor_range(&s->v, most, Hkv, d_v));
}

/* Where the rows of a plan's runs come from: a whole context, or a packed one and the suffix after its T_c. */
typedef struct dkv__rows_of {
    const dkv_segment *context, *suffix; /* suffix NULL: context holds every position as a row */
    const dkv_plan    *old;              /* of context, when there is a suffix */
} dkv__rows_of;

/* Takes n rows of KV head g of a segment, from row src on, into account in the magnitudes kept where scales will be. */
DKV__PRIVATE void dkv__measure_rows(const dkv__head *to, const dkv_segment *s, int64_t g, int64_t src, int64_t n,
                                    const dkv__kernels *f) {
    float     k[DKV__MAX_D], v[DKV__MAX_D];
    dkv__head from = s->packed ? dkv__head_of(s->packed, g) : *to;
    for (int64_t i = 0; i < n; i++) {
        dkv__segment_get(k, v, s, &from, g, src + i, to->d_k, to->d_v, f);
        dkv__track(to->k_scale, k, to->d_k);
        dkv__track(to->v_scale, v, to->d_v);
    }
}

DKV__INLINE void dkv__pack_rows(const dkv__head *to, int64_t dst, const dkv_segment *s, int64_t g, int64_t src,
                                int64_t n, int measure, const dkv__kernels *f) {
    if (measure) dkv__measure_rows(to, s, g, src, n, f);
    else dkv__copy_rows(to, dst, s, g, src, n, f);
}

DKV__PRIVATE void dkv__pack_head(const dkv__head *to, const dkv_plan *plan, int l, int g, const dkv__rows_of *source,
                                 int measure) {
    const dkv__kernels *f = dkv__simd();
    int64_t             flat = (int64_t)l * plan->Hkv + g;
    for (int64_t i = plan->first[flat]; i < plan->first[flat + 1]; i++) {
        dkv_run r = plan->runs[i];
        if (!source->suffix) {
            dkv__pack_rows(to, r.row, source->context, g, r.pos, r.len, measure, f);
            continue;
        }
        int64_t packed = dkv__min(dkv__max(source->old->T_c - r.pos, 0), r.len); /* of one old run: they never touch */
        if (packed) {
            dkv__pack_rows(to, r.row, source->context, g, dkv_plan_row(source->old, l, g, r.pos), packed, measure, f);
        }
        int64_t row = r.pos + packed - source->old->T_c;
        dkv__pack_rows(to, r.row + packed, source->suffix, g, row, r.len - packed, measure, f);
    }
}

DKV__PRIVATE void dkv__pack_layer(const dkv_packed *to, const dkv_plan *plan, int l, const dkv__rows_of *source) {
    for (int g = 0; g < plan->Hkv; g++) {
        dkv__head head = dkv__head_of(to, g);
        if (head.k_scale) {
            memset(head.k_scale, 0, (size_t)dkv__v_width(head.d_k) * sizeof(float));
            memset(head.v_scale, 0, (size_t)dkv__v_width(head.d_v) * sizeof(float));
            dkv__pack_head(&head, plan, l, g, source, 1);
            dkv__scales_from(head.k_scale, head.type, head.d_k);
            dkv__scales_from(head.v_scale, head.type, head.d_v);
        }
        dkv__pack_head(&head, plan, l, g, source, 0);
    }
}

/* Source of a whole context: exactly T_c rows for every KV head. */
DKV__PRIVATE dkv_result dkv__source_check(const dkv_segment *s, const dkv_plan *plan, int64_t d_k, int64_t d_v) {
    dkv_result r = dkv__segment_check(s, plan->Hkv, d_k, d_v);
    if (!r) r = dkv__segment_memory(s, plan->Hkv);
    for (int64_t g = 0; !r && g < plan->Hkv; g++) {
        if (dkv__segment_rows(s, g) != plan->T_c) r = DKV_ERR_SHAPE;
    }
    return r;
}

DKV_API dkv_result dkv_pack(dkv_packed *out, void *mem, size_t *bytes, dkv_type type, const dkv_plan *plan, int l,
                            int d_k, int d_v, const dkv_segment *source) {
    DKV_ASSERT(l >= 0 && l < plan->L);
    if (!dkv__d_ok(d_k) || !dkv__d_ok(d_v)) return DKV_ERR_SHAPE;
    if (!dkv_type_bytes(type)) return DKV_ERR_TYPE;
    dkv_packed p = {mem, type, plan->Hkv, d_k, d_v, plan->rows + (int64_t)l * plan->Hkv, 0};
    size_t     need = (size_t)dkv__max(dkv__packed_bytes(&p), DKV__ALIGN); /* malloc(0) may be NULL, which asks */
    if (!mem) {
        *bytes = need;
        return DKV_OK;
    }
    if (*bytes < need) return DKV_ERR_CAPACITY;
    if (!dkv__aligned(mem, DKV__ALIGN)) return DKV_ERR_ALIGN;
    dkv_result r = dkv__source_check(source, plan, d_k, d_v);
    if (r) return r;
    if (dkv__segment_overlaps(source, plan->Hkv, d_k, d_v, dkv__byte_range(mem, need))) return DKV_ERR_OVERLAP;
    dkv__rows_of all = {source, NULL, NULL};
    dkv__pack_layer(&p, plan, l, &all);
    *out = p;
    return DKV_OK;
}

DKV__PRIVATE void dkv__move_row(const dkv_tensor *t, int64_t to, int64_t from, int64_t head, int64_t d) {
    char       *dst = (char *)(uintptr_t)dkv__at(t, to, head);
    const char *src = dkv__at(t, from, head);
    int64_t     e = dkv_type_bytes(t->type);
    if (t->stride_dim == e) memmove(dst, src, (size_t)(d * e));
    else for (int64_t j = 0; j < d; j++) memmove(dst + j * t->stride_dim, src + j * t->stride_dim, (size_t)e);
}

DKV_API dkv_result dkv_pack_front(dkv_tensor k, dkv_tensor v, const dkv_plan *plan, int l, int d_k, int d_v) {
    DKV_ASSERT(l >= 0 && l < plan->L);
    if (!dkv__d_ok(d_k) || !dkv__d_ok(d_v)) return DKV_ERR_SHAPE;
    if (!dkv__tensor_type_ok(k.type) || !dkv__tensor_type_ok(v.type)) return DKV_ERR_TYPE;
    if (plan->T_c && k.data == v.data) return DKV_ERR_OVERLAP; /* rows would move twice */
    for (int64_t g = 0; g < plan->Hkv; g++) {
        int64_t flat = (int64_t)l * plan->Hkv + g;
        for (int64_t i = plan->first[flat]; i < plan->first[flat + 1]; i++) {
            dkv_run r = plan->runs[i];
            for (int64_t j = 0; j < r.len && r.row != r.pos; j++) { /* row <= pos: ascending is safe */
                dkv__move_row(&k, r.row + j, r.pos + j, g, d_k);
                dkv__move_row(&v, r.row + j, r.pos + j, g, d_v);
            }
        }
    }
    return DKV_OK;
}

DKV_API dkv_result dkv_unpack(dkv_tensor k, dkv_tensor v, const dkv_packed *packed, int g) {
    DKV_ASSERT(g >= 0 && g < packed->Hkv);
    if (!dkv__tensor_type_ok(k.type) || !dkv__tensor_type_ok(v.type)) return DKV_ERR_TYPE;
    dkv__range from = dkv__byte_range(packed->data, (size_t)dkv__packed_bytes(packed));
    if (dkv__overlap(from, dkv__tensor_range(&k, packed->rows[g], g + 1, packed->d_k)) ||
        dkv__overlap(from, dkv__tensor_range(&v, packed->rows[g], g + 1, packed->d_v))) {
        return DKV_ERR_OVERLAP;
    }
    const dkv__kernels *f = dkv__simd();
    dkv__head           head = dkv__head_of(packed, g);
    float               kx[DKV__MAX_D], vx[DKV__MAX_D];
    for (int64_t row = 0; row < packed->rows[g]; row++) {
        dkv__head_get(kx, vx, &head, row);
        dkv__scale_row(kx, head.k_scale, head.d_k);
        dkv__scale_row(vx, head.v_scale, head.d_v);
        dkv__store_row(&k, row, g, kx, packed->d_k, f);
        dkv__store_row(&v, row, g, vx, packed->d_v, f);
    }
    return DKV_OK;
}

/* ==========================================================================
   [ATTEND]  softmax(scale * q . k) v over context and tail, K and V read once per KV head
   in:  queries of all heads; per KV head its own number of keys
   out: outputs, LSE
   A work item is (KV head, block of query rows, chunk of tiles). Rows are (query, head of the group), query first.
   Items of a row block that is cut into chunks leave partial (max, sum, o) in slots, which combine merges in chunk
   order: the cut depends on sizes only, never on the number of threads, so neither do the bits.
   ========================================================================== */

#define DKV__ROW_BLOCK 192 /* query rows that share one conversion of a strided tile; q and o stay in L2 */
#define DKV__CHUNKS    64  /* at most, of one row block: balance over as many threads; */
#define DKV__CHUNK     8   /* tiles, unless that gives fewer than 16 chunks; chunks of 4 are 2 to 5 % slower */
#define DKV__PARTIALS  1024 /* partial rows of one KV head, at most: bounds the workspace, whatever N_q */

typedef struct dkv__item {
    const dkv_attention *a;
    int64_t              g, row, rows;    /* KV head; query rows row .. row + rows - 1 of its G * N_q */
    int64_t              tile, tiles;     /* tiles tile .. tile + tiles - 1 of context, then tail */
    int64_t              chunk, chunks;   /* which part of the row block's tiles */
    int64_t              slot;            /* of chunk 0, in floats, when chunks > 1 */
} dkv__item;

typedef struct dkv__schedule {
    const dkv_attention *a;
    int64_t              n;
    double               weight;          /* of all items: keys times rows times d */
    int64_t              slots;           /* floats, at most */
    int64_t              rows, wk, wv;    /* largest row block, K and V width in floats */
    int                  strided;         /* some segment needs converting */
} dkv__schedule;

DKV__INLINE int64_t dkv__query_rows(const dkv_attention *a) { return a->H / a->Hkv * a->N_q; }

/* Tail rows that query i sees. */
DKV__INLINE int64_t dkv__visible(const dkv_attention *a, int64_t g, int64_t i) {
    int64_t n = dkv__segment_rows(&a->tail, g);
    return dkv__min(dkv__max(n - a->N_q + 1 + i, 0), n);
}

DKV__INLINE int64_t dkv__context_tiles(const dkv_attention *a, int64_t g) {
    return dkv__ceil_div(dkv__segment_rows(&a->context, g), DKV__TILE);
}

/* Tiles that the row block ending at row end - 1 looks at. */
DKV__INLINE int64_t dkv__tiles(const dkv_attention *a, int64_t g, int64_t end) {
    int64_t last = (end - 1) / (a->H / a->Hkv);
    return dkv__context_tiles(a, g) + dkv__ceil_div(dkv__visible(a, g, last), DKV__TILE);
}

/* Chunks that a row block is cut into at most: a matter of its own attention alone, so that a batch gives the bits of
   single calls. Many rows are parallel as they are. */
DKV__INLINE int64_t dkv__most_chunks(const dkv_attention *a) {
    return dkv__min(dkv__max(DKV__PARTIALS / dkv__query_rows(a), 1), DKV__CHUNKS);
}

/* What one chunk leaves: o [rows][wv], max [rows], sum [rows], in floats. */
DKV__INLINE int64_t dkv__slot_floats(const dkv_attention *a, int64_t rows) {
    return dkv__round_up(rows * (dkv__v_width(a->d_v) + 2), 16);
}

/* The next item in order; start with a zeroed item whose a is the first attention. */
DKV__PRIVATE int dkv__next_item(dkv__item *it, const dkv__schedule *s) {
    if (it->chunk + 1 < it->chunks) {
        it->chunk++;
    } else {
        if (it->chunks > 1) it->slot += it->chunks * dkv__slot_floats(it->a, it->rows);
        it->chunk = 0;
        it->row += it->rows;
        if (it->rows && it->row == dkv__query_rows(it->a)) {
            it->row = 0;
            it->g++;
        }
        while (it->a < s->a + s->n && (it->g == it->a->Hkv || !it->a->N_q)) {
            it->a++;
            it->g = it->row = 0;
        }
        if (it->a == s->a + s->n) return 0;
        it->rows = dkv__min(dkv__query_rows(it->a) - it->row, DKV__ROW_BLOCK);
    }
    int64_t tiles = dkv__tiles(it->a, it->g, it->row + it->rows);
    int64_t few = dkv__min(dkv__ceil_div(tiles, 16), DKV__CHUNK);
    int64_t step = dkv__max(dkv__max(dkv__ceil_div(tiles, dkv__most_chunks(it->a)), few), 1);
    it->chunks = dkv__max(dkv__ceil_div(tiles, step), 1);
    it->tile = it->chunk * step;
    it->tiles = dkv__min(tiles - it->tile, step);
    return 1;
}

DKV__INLINE dkv__item dkv__first_item(const dkv__schedule *s) {
    dkv__item it;
    memset(&it, 0, sizeof it);
    it.a = s->a;
    return it;
}

DKV__INLINE double dkv__item_weight(const dkv__item *it) {
    return (double)dkv__max(it->tiles, 1) * (double)it->rows * (it->a->d_k + it->a->d_v);
}

DKV__PRIVATE dkv__schedule dkv__schedule_make(const dkv_attention *a, int64_t n) {
    dkv__schedule s;
    dkv__item     it;
    memset(&s, 0, sizeof s);
    s.a = a;
    s.n = n;
    for (it = dkv__first_item(&s); dkv__next_item(&it, &s);) s.weight += dkv__item_weight(&it);
    for (; n > 0; n--, a++) {
        int64_t rows = dkv__query_rows(a), block = dkv__min(rows, DKV__ROW_BLOCK);
        int64_t chunks = rows ? dkv__most_chunks(a) : 0;
        if (chunks > 1) s.slots += a->Hkv * dkv__ceil_div(rows, block) * chunks * dkv__slot_floats(a, block);
        s.rows = dkv__max(s.rows, block);
        s.wk = dkv__max(s.wk, dkv__q_width(a->d_k));
        s.wv = dkv__max(s.wv, dkv__v_width(a->d_v));
        s.strided |= !a->context.packed || !a->tail.packed;
    }
    return s;
}

/* Workspace: slots, then one scratch per thread; in floats, all multiples of 16. Lengths do not matter. */
DKV__INLINE int64_t dkv__tile_floats(const dkv__schedule *s) { return s->strided ? DKV__TILE * (s->wk + s->wv) : 0; }

/* Where there are rows enough: 3 parts of the queries, 2 of a tile. */
DKV__INLINE int64_t dkv__q_parts_floats(const dkv__schedule *s) {
    return s->rows >= DKV__TILE_ROWS ? dkv__round_up(s->rows, 16) * s->wk * 3 / 2 : 0;
}
DKV__INLINE int64_t dkv__tile_parts_floats(const dkv__schedule *s) {
    return s->rows >= DKV__TILE_ROWS ? DKV__TILE * (s->wk + s->wv) : 0;
}

DKV__INLINE int64_t dkv__scratch_floats(const dkv__schedule *s) {
    return dkv__round_up(s->rows, 16) * (s->wk + s->wv + 2) + DKV__ROWS * DKV__TILE + dkv__tile_floats(s) +
           dkv__q_parts_floats(s) + dkv__tile_parts_floats(s);
}

DKV__INLINE int64_t dkv__workspace_bytes(const dkv__schedule *s, int64_t nth) {
    return (s->slots + nth * dkv__scratch_floats(s)) * (int64_t)sizeof(float);
}

/* One thread's scratch. */
typedef struct dkv__scratch {
    float *q, *o;        /* [rows][wk], [rows][v_width] */
    float *max, *sum;    /* [rows] */
    float *s;            /* [DKV__ROWS][DKV__TILE] */
    float *tile;         /* one strided tile, packed */
    dkv__parts q_parts, k_parts, v_parts; /* 3 of q [rows][wk], 2 of a tile's K and V */
    int64_t wk;
} dkv__scratch;

DKV__PRIVATE dkv__scratch dkv__scratch_of(const dkv__schedule *s, void *ws, int ith) {
    dkv__scratch x;
    int64_t      rows = dkv__round_up(s->rows, 16);
    x.q = (float *)ws + s->slots + ith * dkv__scratch_floats(s);
    x.o = x.q + rows * s->wk;
    x.max = x.o + rows * s->wv;
    x.sum = x.max + rows;
    x.s = x.sum + rows;
    x.tile = x.s + DKV__ROWS * DKV__TILE;
    x.q_parts.at = (char *)(x.tile + dkv__tile_floats(s));
    x.k_parts.at = x.q_parts.at + dkv__q_parts_floats(s) * (int64_t)sizeof(float);
    x.v_parts.at = x.k_parts.at + 2 * DKV__TILE * s->wk * 2;
    x.q_parts.bytes = rows * s->wk * 2;
    x.k_parts.bytes = DKV__TILE * s->wk * 2;
    x.v_parts.bytes = DKV__TILE * s->wv * 2;
    x.q_parts.n = 3;
    x.wk = s->wk;
    return x;
}

/* A tile of packed keys: where they lie, and how many. */
typedef struct dkv__keys {
    const char *k, *v;
    dkv_type    type;
    int64_t     n, start; /* start: row in the segment */
    int         tail;
    const float *k_scale, *v_scale;
    const dkv__tile_kernels *tiles; /* NULL, or what to multiply these parts with: */
    dkv__parts  k_parts, v_parts;
} dkv__keys;

/* What an item's rows and keys of this type are multiplied with, or NULL. */
DKV__INLINE const dkv__tile_kernels *dkv__tiles_for(const dkv__item *it, dkv_type type, const dkv__kernels *f) {
    return it->rows >= DKV__TILE_ROWS && type != DKV_F32 ? f->tiles : NULL;
}

/* What a strided tile is converted to: f32, unless tiles can have it as it is. */
DKV__INLINE dkv_type dkv__strided_type(const dkv__item *it, const dkv_segment *s, const dkv__kernels *f) {
    return s->k.type == s->v.type && dkv__tiles_for(it, s->k.type, f) ? s->k.type : DKV_F32;
}

/* bf16 is its own part, where K is not padded: it is multiplied as it lies. */
DKV__PRIVATE void dkv__split_keys(dkv__keys *y, const dkv_attention *a, const dkv__scratch *x) {
    const int64_t wv = dkv__v_width(a->d_v);
    y->k_parts = x->k_parts;
    y->v_parts = x->v_parts;
    y->k_parts.n = y->v_parts.n = dkv__parts_of(y->type);
    if (y->type != DKV_BF16 || a->d_k % DKV__TILE_KEYS) y->tiles->split_k(y->k_parts, y->k, y->type, a->d_k, y->n);
    else y->k_parts.at = (char *)(uintptr_t)y->k;
    if (y->type != DKV_BF16) y->tiles->split_v(y->v_parts, y->v, y->type, wv, y->n - y->n % DKV__TILE_KEYS);
    else y->v_parts.at = (char *)(uintptr_t)y->v;
}

DKV__PRIVATE dkv__keys dkv__tile_keys(const dkv__item *it, int64_t tile, const dkv__scratch *x, const dkv__kernels *f) {
    const dkv_attention *a = it->a;
    int64_t              before = dkv__context_tiles(a, it->g);
    const dkv_segment   *s = tile < before ? &a->context : &a->tail;
    dkv__keys            y;
    y.tail = tile >= before;
    y.start = (y.tail ? tile - before : tile) * DKV__TILE;
    y.n = dkv__min(dkv__segment_rows(s, it->g) - y.start, DKV__TILE);
    dkv_packed own = {x->tile, dkv__strided_type(it, s, f), 1, a->d_k, a->d_v, NULL, DKV__TILE};
    dkv__head  head = s->packed ? dkv__head_of(s->packed, it->g) : dkv__head_of(&own, 0);
    int64_t    row = s->packed ? y.start : 0;
    if (!s->packed) dkv__copy_rows(&head, 0, s, it->g, y.start, y.n, f); /* converted once for all rows of the block */
    y.k = head.k + row / DKV__BLOCK * head.k_block;
    y.v = head.v + row * head.v_row;
    y.type = head.type;
    y.k_scale = s->packed ? head.k_scale : NULL;
    y.v_scale = s->packed ? head.v_scale : NULL;
    y.tiles = dkv__tiles_for(it, y.type, f);
    if (y.tiles) dkv__split_keys(&y, a, x);
    return y;
}

/* Keys of a tile that row r of the item sees: ascending in r. */
DKV__INLINE int64_t dkv__seen(const dkv__item *it, const dkv__keys *y, int64_t r) {
    if (!y->tail) return y->n;
    return dkv__min(dkv__visible(it->a, it->g, (it->row + r) / (it->a->H / it->a->Hkv)) - y->start, y->n);
}

/* Of rows from r on and below end, the first that may see other keys of the tile. */
DKV__INLINE int64_t dkv__alike(const dkv__item *it, const dkv__keys *y, int64_t r, int64_t end) {
    const int64_t G = it->a->H / it->a->Hkv;
    return y->tail ? dkv__min(((it->row + r) / G + 1) * G - it->row, end) : end;
}

/* x->s of rows r..end - 1, for keys that any of them sees */
DKV__PRIVATE void dkv__score_rows(const dkv__item *it, const dkv__keys *y, const dkv__scratch *x, int64_t r,
                                  int64_t end, const dkv__kernels *f) {
    const int64_t m = end - r, d = it->a->d_k, n = dkv__seen(it, y, end - 1);
    dkv__parts    q = x->q_parts;
    q.at += r * x->wk * 2;
    if (y->tiles) y->tiles->scores(x->s, q, x->wk, m, y->k_parts, dkv__q_width(d), n);
    else f->scores(x->s, x->q + r * x->wk, x->wk, m, y->k, y->type, d, n);
}

/* x->o of rows r..end - 1: the keys that all of them see, then for each query those that only it and later ones see. A
   value that a row does not see is never multiplied, so what lies there (a later query's NaN) cannot reach it. */
DKV__PRIVATE void dkv__mix_rows(const dkv__item *it, const dkv__keys *y, const dkv__scratch *x, int64_t r, int64_t end,
                                const float *alpha, const dkv__kernels *f) {
    const int64_t wv = dkv__v_width(it->a->d_v), v_row = dkv__v_row_bytes(y->type, it->a->d_v);
    const int64_t step = y->tiles ? DKV__TILE_KEYS : 2; /* bf16 values come in pairs of keys */
    const int64_t common = dkv__seen(it, y, r) / step * step;
    if (common && y->tiles) y->tiles->mix(x->o + r * wv, wv, x->s, alpha, end - r, y->v_parts, wv, common);
    else if (common) f->mix(x->o + r * wv, wv, x->s, alpha, end - r, y->v, y->type, wv, common);
    for (int64_t i = r, next; i < end; i = next) {
        const float *s = x->s + (i - r) * DKV__TILE + common, *scale = common ? dkv__ones : alpha + (i - r);
        int64_t      rest = dkv__seen(it, y, i) - common;
        next = dkv__alike(it, y, i, end);
        if (rest) f->mix(x->o + i * wv, wv, s, scale, next - i, y->v + common * v_row, y->type, wv, rest);
    }
}

/* Scores, softmax and output of one tile for all rows of the item, in groups that share a pass over its keys. */
DKV__PRIVATE void dkv__attend_tile(const dkv__item *it, const dkv__keys *y, const dkv__scratch *x,
                                   const dkv__kernels *f) {
    float alpha[DKV__ROWS];
    for (int64_t r = 0, end; r < it->rows; r = end) {
        end = dkv__min(r + (y->tiles ? DKV__TILE_ROWS : DKV__ROWS), it->rows);
        if (dkv__seen(it, y, r) <= 0) {
            end = dkv__alike(it, y, r, end);
            continue;
        }
        dkv__score_rows(it, y, x, r, end, f);
        for (int64_t i = r, next; i < end; i = next) {
            next = dkv__alike(it, y, i, end);
            f->softmax(x->s + (i - r) * DKV__TILE, x->max + i, x->sum + i, alpha + (i - r), next - i,
                       dkv__seen(it, y, i), it->a->softcap);
        }
        dkv__mix_rows(it, y, x, r, end, alpha, f);
    }
}

DKV__INLINE float dkv__scale_or_default(float scale, int64_t d) {
    return scale > 0.0f ? scale : 1.0f / sqrtf((float)d);
}

/* x[wk], zeros behind d <- query i of head h, times scale and the channel scales of the keys that it will meet. */
DKV__PRIVATE void dkv__load_query(float *x, int64_t wk, const dkv_tensor *q, int64_t i, int64_t h, int64_t d,
                                  float scale, const float *k_scale, const dkv__kernels *f) {
    dkv__load_row(x, q, i, h, d, f);
    for (int64_t j = 0; j < d; j++) x[j] *= scale;
    dkv__scale_row(x, k_scale, d);
    for (int64_t j = d; j < wk; j++) x[j] = 0.0f;
}

/* Queries times scale, and times the channel scales of the segment that begins with these keys. */
DKV__PRIVATE void dkv__load_queries(const dkv__item *it, const dkv__scratch *x, const dkv__keys *y,
                                    const dkv__kernels *f) {
    const dkv_attention *a = it->a;
    const int64_t        G = a->H / a->Hkv;
    const float          scale = dkv__scale_or_default(a->scale, a->d_k);
    for (int64_t r = 0; r < it->rows; r++) {
        int64_t i = (it->row + r) / G, h = it->g * G + (it->row + r) % G;
        dkv__load_query(x->q + r * x->wk, x->wk, &a->q, i, h, a->d_k, scale, y->k_scale, f);
    }
    if (y->tiles) y->tiles->split_rows(x->q_parts, x->wk, x->q, x->wk, it->rows, x->wk);
}

/* Row r of the item's block is done: o is normalised in place and written. */
DKV__PRIVATE void dkv__finish_row(const dkv__item *it, int64_t r, float *o, float max, float sum,
                                  const dkv__kernels *f) {
    const dkv_attention *a = it->a;
    const int64_t        G = a->H / a->Hkv, i = (it->row + r) / G, h = it->g * G + (it->row + r) % G;
    float                weigh = 1.0f;
    if (a->sink && a->sink[h] > max) { /* the sink leads: everything else is weighed against it */
        weigh = dkv__exp(max - a->sink[h]);
        sum = sum * weigh + 1.0f;
        max = a->sink[h];
    } else if (a->sink && a->sink[h] != -INFINITY) {
        sum += dkv__exp(a->sink[h] - max);
    }
    weigh = sum == 0.0f ? 0.0f : weigh / sum; /* no key at all: 0 */
    for (int64_t j = 0; j < a->d_v; j++) o[j] *= weigh;
    dkv__store_row(&a->out, i, h, o, a->d_v, f);
    if (a->lse) a->lse[i * a->H + h] = sum == 0.0f ? -INFINITY : (float)((double)max + log((double)sum));
}

DKV__PRIVATE void dkv__attend_item(const dkv__item *it, const dkv__scratch *x, void *ws, const dkv__kernels *f) {
    const int64_t wv = dkv__v_width(it->a->d_v);
    for (int64_t r = 0; r < it->rows; r++) {
        x->max[r] = -INFINITY;
        x->sum[r] = 0.0f;
    }
    memset(x->o, 0, (size_t)(it->rows * wv) * sizeof(float));
    const float *v_scale = NULL; /* that o still lacks */
    for (int64_t t = it->tile; t < it->tile + it->tiles; t++) {
        dkv__keys y = dkv__tile_keys(it, t, x, f);
        if (t == it->tile || (y.tail && y.start == 0)) { /* a segment begins */
            for (int64_t r = 0; r < it->rows; r++) dkv__scale_row(x->o + r * wv, v_scale, it->a->d_v);
            dkv__load_queries(it, x, &y, f);
            v_scale = y.v_scale;
        }
        dkv__attend_tile(it, &y, x, f);
    }
    for (int64_t r = 0; r < it->rows; r++) dkv__scale_row(x->o + r * wv, v_scale, it->a->d_v);
    if (it->chunks == 1) {
        for (int64_t r = 0; r < it->rows; r++) dkv__finish_row(it, r, x->o + r * wv, x->max[r], x->sum[r], f);
        return;
    }
    float *slot = (float *)ws + it->slot + it->chunk * dkv__slot_floats(it->a, it->rows);
    memcpy(slot, x->o, (size_t)(it->rows * wv) * sizeof(float));
    memcpy(slot + it->rows * wv, x->max, (size_t)it->rows * sizeof(float));
    memcpy(slot + it->rows * (wv + 1), x->sum, (size_t)it->rows * sizeof(float));
}

/* Merges row r of all chunks, in chunk order, into x->o. */
DKV__PRIVATE void dkv__combine_row(const dkv__item *it, int64_t r, const dkv__scratch *x, const void *ws,
                                   const dkv__kernels *f) {
    const int64_t wv = dkv__v_width(it->a->d_v), step = dkv__slot_floats(it->a, it->rows);
    const float  *o = (const float *)ws + it->slot + r * wv;
    const float  *top = (const float *)ws + it->slot + it->rows * wv + r, *part = top + it->rows;
    float         max = -INFINITY, sum = 0.0f;
    for (int64_t c = 0; c < it->chunks; c++) max = top[c * step] > max ? top[c * step] : max;
    memset(x->o, 0, (size_t)wv * sizeof(float));
    for (int64_t c = 0; c < it->chunks; c++) { /* a chunk without a finite logit holds zeros, or NaN to pass on */
        float w = top[c * step] == -INFINITY ? 1.0f : dkv__exp(top[c * step] - max);
        sum += w * part[c * step];
        f->axpy(x->o, w, o + c * step, wv);
    }
    dkv__finish_row(it, r, x->o, max, sum, f);
}

DKV__PRIVATE int dkv__input_overlaps(const dkv_attention *a, dkv__range r) {
    dkv__range sink = dkv__byte_range(a->sink, a->sink ? (size_t)a->H * sizeof(float) : 0);
    return dkv__overlap(r, dkv__tensor_range(&a->q, a->N_q, a->H, a->d_k)) || dkv__overlap(r, sink) ||
           dkv__segment_overlaps(&a->context, a->Hkv, a->d_k, a->d_v, r) ||
           dkv__segment_overlaps(&a->tail, a->Hkv, a->d_k, a->d_v, r);
}

/* What the workspace depends on: shapes, types and counts, not memory. */
DKV__PRIVATE dkv_result dkv__attention_shape(const dkv_attention *a) {
    const float most = 3.0e38f;
    if (a->H < 1 || a->H > DKV__MAX_HEADS || a->Hkv < 1 || a->H % a->Hkv) return DKV_ERR_SHAPE;
    if (a->N_q < 0 || a->N_q > DKV__FAR || !dkv__d_ok(a->d_k) || !dkv__d_ok(a->d_v)) return DKV_ERR_SHAPE;
    if (!dkv__tensor_type_ok(a->q.type) || !dkv__tensor_type_ok(a->out.type)) return DKV_ERR_TYPE;
    if (!(a->scale >= 0.0f && a->scale <= most) || !(a->softcap >= 0.0f && a->softcap <= most)) return DKV_ERR_FIELD;
    dkv_result r = dkv__segment_check(&a->context, a->Hkv, a->d_k, a->d_v);
    return r ? r : dkv__segment_check(&a->tail, a->Hkv, a->d_k, a->d_v);
}

/* And, once the shape is known to be right, the memory. */
DKV__PRIVATE dkv_result dkv__attention_memory(const dkv_attention *a, dkv__range ws) {
    dkv_result r = dkv__segment_memory(&a->context, a->Hkv);
    if (!r) r = dkv__segment_memory(&a->tail, a->Hkv);
    if (r) return r;
    DKV_ASSERT(a->N_q == 0 || (a->q.data && a->out.data));
    dkv__range out = dkv__tensor_range(&a->out, a->N_q, a->H, a->d_v);
    dkv__range lse = dkv__byte_range(a->lse, a->lse ? (size_t)(a->N_q * a->H) * sizeof(float) : 0);
    if (dkv__input_overlaps(a, out) || dkv__input_overlaps(a, lse) || dkv__overlap(out, lse)) return DKV_ERR_OVERLAP;
    return dkv__input_overlaps(a, ws) || dkv__overlap(out, ws) || dkv__overlap(lse, ws) ? DKV_ERR_OVERLAP : DKV_OK;
}

DKV__PRIVATE dkv_result dkv__attend_check(dkv__schedule *s, const dkv_attention *a, int64_t n, const void *ws,
                                          size_t ws_bytes, int nth) {
    DKV_ASSERT(n >= 0 && ws);
    for (int64_t i = 0; i < n; i++) {
        dkv_result r = dkv__attention_shape(&a[i]);
        if (r) return r;
    }
    *s = dkv__schedule_make(a, n);
    if (nth < 1 || ws_bytes < (size_t)dkv__workspace_bytes(s, nth)) return DKV_ERR_CAPACITY;
    if (!dkv__aligned(ws, DKV__ALIGN)) return DKV_ERR_ALIGN;
    for (int64_t i = 0; i < n; i++) {
        dkv_result r = dkv__attention_memory(&a[i], dkv__byte_range(ws, (size_t)dkv__workspace_bytes(s, nth)));
        if (r) return r;
    }
    return DKV_OK;
}

DKV__PRIVATE void dkv__part(const dkv__schedule *s, void *ws, int ith, int nth) {
    const dkv__kernels *f = dkv__simd();
    dkv__scratch        x = dkv__scratch_of(s, ws, ith);
    double              before = 0.0;
    dkv__item           it;
    for (it = dkv__first_item(s); dkv__next_item(&it, s);) { /* an item belongs to the share that its middle lies in */
        double w = dkv__item_weight(&it);
        if ((int)((before + w / 2.0) / s->weight * nth) == ith) dkv__attend_item(&it, &x, ws, f);
        before += w;
    }
}

DKV__PRIVATE void dkv__combine(const dkv__schedule *s, void *ws, int ith, int nth) {
    const dkv__kernels *f = dkv__simd();
    dkv__scratch        x = dkv__scratch_of(s, ws, ith);
    int64_t             row = 0;
    dkv__item           it;
    for (it = dkv__first_item(s); dkv__next_item(&it, s);) {
        for (int64_t r = 0; it.chunks > 1 && it.chunk == 0 && r < it.rows; r++, row++) {
            if (row % nth == ith) dkv__combine_row(&it, r, &x, ws, f);
        }
    }
}

DKV_API dkv_result dkv_attend_part(const dkv_attention *a, int64_t n, void *ws, size_t ws_bytes, int ith, int nth) {
    dkv__schedule s;
    dkv_result    r = dkv__attend_check(&s, a, n, ws, ws_bytes, nth);
    DKV_ASSERT(ith >= 0 && ith < nth);
    if (!r) dkv__part(&s, ws, ith, nth);
    return r;
}

DKV_API dkv_result dkv_attend_combine(const dkv_attention *a, int64_t n, void *ws, size_t ws_bytes, int ith, int nth) {
    dkv__schedule s;
    dkv_result    r = dkv__attend_check(&s, a, n, ws, ws_bytes, nth);
    DKV_ASSERT(ith >= 0 && ith < nth);
    if (!r) dkv__combine(&s, ws, ith, nth);
    return r;
}

#ifdef _OPENMP
#include <omp.h>
#endif

DKV__PRIVATE int dkv__default_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

DKV__PRIVATE void dkv__default_run(void *user, int nth, void (*task)(void *arg, int ith, int nth), void *arg) {
    (void)user;
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) num_threads(nth)
#endif
    for (int ith = 0; ith < nth; ith++) task(arg, ith, nth);
}

typedef struct dkv__call { const dkv__schedule *s; void *ws; } dkv__call;
DKV__PRIVATE void dkv__part_task(void *arg, int ith, int nth) {
    dkv__part(((dkv__call *)arg)->s, ((dkv__call *)arg)->ws, ith, nth);
}
DKV__PRIVATE void dkv__combine_task(void *arg, int ith, int nth) {
    dkv__combine(((dkv__call *)arg)->s, ((dkv__call *)arg)->ws, ith, nth);
}

DKV_API dkv_result dkv_attend_size(size_t *bytes, const dkv_attention *a, int64_t n, int nth) {
    for (int64_t i = 0; i < n; i++) {
        dkv_result r = dkv__attention_shape(&a[i]);
        if (r) return r;
    }
    dkv__schedule s = dkv__schedule_make(a, n);
    s.strided = 1; /* a later call of the same shapes may have other segments */
    *bytes = (size_t)dkv__workspace_bytes(&s, nth > 0 ? nth : dkv__default_threads());
    return DKV_OK;
}

/* par, or as many of the default threads as a workspace of fixed + nth * each bytes serves; nth 0: not even one. */
DKV__PRIVATE dkv_parallel dkv__threads(const dkv_parallel *par, size_t ws_bytes, int64_t fixed, int64_t each) {
    dkv_parallel own = {dkv__default_run, NULL, dkv__default_threads()};
    size_t       fit = ws_bytes < (size_t)fixed ? 0 : (ws_bytes - (size_t)fixed) / (size_t)each;
    if (!par && (size_t)own.nth > fit) own.nth = (int)fit;
    if (par) own = *par;
    if (own.nth < 1 || (size_t)own.nth > fit) own.nth = 0;
    return own;
}

DKV_API dkv_result dkv_attend(const dkv_attention *a, int64_t n, void *ws, size_t ws_bytes, const dkv_parallel *par) {
    dkv__schedule s;
    dkv_result    r = dkv__attend_check(&s, a, n, ws, ws_bytes, par ? par->nth : 1);
    if (r) return r;
    int64_t      slots = dkv__workspace_bytes(&s, 0);
    dkv_parallel run = dkv__threads(par, ws_bytes, slots, dkv__workspace_bytes(&s, 1) - slots);
    dkv__call    call = {&s, ws};
    run.run(run.user, run.nth, dkv__part_task, &call);
    if (s.slots) run.run(run.user, run.nth, dkv__combine_task, &call);
    return DKV_OK;
}

/* ==========================================================================
   [CACHE]  packed layers and a growing tail, owned by the library
   in:  dense layers, one at a time; new tokens
   out: segments for ATTEND
   invariant: the packed context is written once per layer and then only read, so forks share it by reference
   ========================================================================== */

/* The shared part, followed in the same allocation by what the pointers name. */
typedef struct dkv__context {
    int           refs;   /* atomic */
    dkv_allocator alloc;
    size_t        bytes;
    dkv_plan      plan;
    dkv_shape     shape;
    dkv_type      type;
    char         *data;   /* where layer 0 goes */
    dkv_packed   *layers; /* [L]; data is NULL until the layer is packed */
} dkv__context;

struct dkv_cache {
    dkv__context *context;
    size_t        bytes;
    int64_t       capacity;
    int64_t      *rows;   /* [L][Hkv], the same for all heads of a layer */
    dkv_packed   *tail;   /* [L] */
};

DKV__INLINE size_t dkv__take(size_t *at, size_t bytes, size_t align) { /* the next aligned offset of an allocation */
    size_t begin = (*at + align - 1) / align * align;
    *at = begin + bytes;
    return begin;
}

DKV__INLINE char *dkv__align_up(char *p) { return p + (DKV__ALIGN - (uintptr_t)p % DKV__ALIGN) % DKV__ALIGN; }

DKV__PRIVATE dkv__context *dkv__context_create(const dkv_plan *plan, const dkv_shape *shape, dkv_type type,
                                               const dkv_allocator *alloc) {
    int64_t heads = (int64_t)plan->L * plan->Hkv;
    size_t  at = sizeof(dkv__context), plan_bytes = dkv__plan_bytes(plan);
    size_t  plan_at = dkv__take(&at, plan_bytes, 8);
    size_t  layers_at = dkv__take(&at, (size_t)plan->L * sizeof(dkv_packed), 8);
    size_t  bytes = at + DKV__ALIGN + (size_t)dkv_kv_bytes_alloc(plan, shape, type);
    char   *mem = (char *)dkv__alloc(alloc, bytes);
    if (!mem) return NULL;
    dkv__context *c = (dkv__context *)(void *)mem;
    memset(c, 0, sizeof *c);
    c->refs = 1;
    if (alloc) c->alloc = *alloc;
    c->bytes = bytes;
    c->plan = *plan;
    c->shape = *shape;
    c->type = type;
    c->layers = (dkv_packed *)(void *)(mem + layers_at);
    memcpy(mem + plan_at, plan->first, plan_bytes); /* a plan's arrays are one block */
    c->plan.first = (const int64_t *)(void *)(mem + plan_at);
    c->plan.rows = c->plan.first + heads + 1;
    c->plan.runs = (const dkv_run *)(const void *)(c->plan.rows + heads);
    c->data = dkv__align_up(mem + at);
    for (int64_t l = 0; l < plan->L; l++) {
        dkv_packed p = {NULL, type, plan->Hkv, shape->d_k, shape->d_v, c->plan.rows + l * plan->Hkv, 0};
        c->layers[l] = p;
    }
    return c;
}

/* Layer l with its place in the allocation, which layers[l] gets when its rows are there. */
DKV__PRIVATE dkv_packed dkv__context_layer(const dkv__context *c, int64_t l) {
    dkv_packed p = c->layers[l];
    p.data = c->data;
    for (int64_t i = 0; i < l; i++) p.data = (char *)p.data + dkv__packed_bytes(&c->layers[i]);
    return p;
}

DKV__PRIVATE void dkv__context_pack(dkv__context *c, int l, const dkv__rows_of *source) {
    dkv_packed p = dkv__context_layer(c, l);
    dkv__pack_layer(&p, &c->plan, l, source);
    c->layers[l].data = p.data; /* nothing else changes: other threads read the sizes of this layer to find theirs */
}

DKV__PRIVATE void dkv__context_release(dkv__context *c) {
    if (DKV__ATOMIC_ADD(&c->refs, -1) == 0) {
        dkv_allocator alloc = c->alloc;
        dkv__free(&alloc, c, c->bytes);
    }
}

/* A cache over context, whose reference it takes over (also when it fails). */
DKV__PRIVATE dkv_result dkv__cache_over(dkv_cache **out, dkv__context *context, int64_t capacity) {
    const dkv_shape *s = &context->shape;
    int64_t          heads = (int64_t)s->L * s->Hkv;
    dkv_packed       p = {NULL, dkv_tail_type(context->type), s->Hkv, s->d_k, s->d_v, NULL,
                          dkv__round_up(capacity, DKV__BLOCK)};
    size_t           layer = capacity ? (size_t)dkv__packed_bytes(&p) : 0, at = sizeof(dkv_cache);
    size_t           rows_at = dkv__take(&at, (size_t)heads * sizeof(int64_t), 8);
    size_t           tail_at = dkv__take(&at, (size_t)s->L * sizeof(dkv_packed), 8);
    size_t           bytes = at + DKV__ALIGN + (size_t)s->L * layer;
    char            *mem = (char *)dkv__alloc(&context->alloc, bytes);
    if (!mem) {
        dkv__context_release(context);
        return DKV_ERR_MEMORY;
    }
    dkv_cache *c = (dkv_cache *)(void *)mem;
    c->context = context;
    c->bytes = bytes;
    c->capacity = capacity;
    c->rows = (int64_t *)(void *)(mem + rows_at);
    c->tail = (dkv_packed *)(void *)(mem + tail_at);
    memset(c->rows, 0, (size_t)heads * sizeof(int64_t));
    char *data = dkv__align_up(mem + at);
    for (int64_t l = 0; l < s->L; l++, data += layer) {
        p.data = data;
        p.rows = c->rows + l * s->Hkv;
        c->tail[l] = p;
    }
    *out = c;
    return DKV_OK;
}

DKV_API dkv_result dkv_cache_create(dkv_cache **out, const dkv_plan *plan, const dkv_shape *shape, dkv_type type,
                                    int64_t capacity, const dkv_allocator *alloc) {
    if (shape->Hkv < 1 || shape->L != plan->L || shape->Hkv != plan->Hkv) return DKV_ERR_SHAPE;
    if (shape->H < 0 || shape->H > DKV__MAX_HEADS || shape->H % shape->Hkv) return DKV_ERR_SHAPE;
    if (!dkv__d_ok(shape->d_k) || !dkv__d_ok(shape->d_v)) return DKV_ERR_SHAPE;
    if (!dkv_type_bytes(type)) return DKV_ERR_TYPE;
    if (capacity < 0 || capacity > DKV__FAR) return DKV_ERR_FIELD;
    int64_t heads = (int64_t)plan->L * plan->Hkv;
    double  rows = (double)dkv__rows_total(plan->rows, heads) + (double)heads * (double)(capacity + DKV__BLOCK);
    if (rows * (shape->d_k + shape->d_v + 32) * 4.0 > 4e18) return DKV_ERR_MEMORY; /* sizes would wrap */
    dkv__context *context = dkv__context_create(plan, shape, type, alloc);
    if (!context) return DKV_ERR_MEMORY;
    dkv__rows_of nothing = {NULL, NULL, NULL};
    for (int l = 0; plan->T_c == 0 && l < shape->L; l++) dkv__context_pack(context, l, &nothing);
    return dkv__cache_over(out, context, capacity);
}

DKV_API void dkv_cache_destroy(dkv_cache *c) {
    if (!c) return;
    dkv__context *context = c->context;
    dkv__free(&context->alloc, c, c->bytes);
    dkv__context_release(context);
}

DKV_API dkv_result dkv_cache_pack(dkv_cache *c, int l, const dkv_segment *source) {
    dkv__context *x = c->context;
    DKV_ASSERT(l >= 0 && l < x->shape.L);
    if (x->layers[l].data) return DKV_ERR_STATE;
    dkv_result r = dkv__source_check(source, &x->plan, x->shape.d_k, x->shape.d_v);
    if (r) return r;
    dkv__rows_of all = {source, NULL, NULL};
    dkv__context_pack(x, l, &all);
    return DKV_OK;
}

DKV_API dkv_result dkv_cache_append(dkv_cache *c, int l, dkv_tensor k, dkv_tensor v, int64_t n) {
    const dkv_shape    *s = &c->context->shape;
    const dkv__kernels *f = dkv__simd();
    DKV_ASSERT(l >= 0 && l < s->L);
    int64_t    *rows = c->rows + (int64_t)l * s->Hkv;
    dkv_segment source = dkv_strided(k, v, n);
    dkv_result  r = dkv__segment_check(&source, s->Hkv, s->d_k, s->d_v);
    if (!r) r = dkv__segment_memory(&source, s->Hkv);
    if (r) return r;
    if (n > c->capacity - rows[0]) return DKV_ERR_CAPACITY;
    for (int64_t g = 0; g < s->Hkv; g++) {
        dkv__head head = dkv__head_of(&c->tail[l], g);
        dkv__copy_rows(&head, rows[g], &source, g, 0, n, f);
        rows[g] += n;
    }
    return DKV_OK;
}

DKV_API int64_t dkv_cache_tail(const dkv_cache *c, int l) { return c->rows[(int64_t)l * c->context->shape.Hkv]; }
DKV_API int64_t dkv_cache_capacity(const dkv_cache *c) { return c->capacity; }
DKV_API const dkv_plan *dkv_cache_plan(const dkv_cache *c) { return &c->context->plan; }
DKV_API const dkv_shape *dkv_cache_shape(const dkv_cache *c) { return &c->context->shape; }
DKV_API dkv_type dkv_cache_type(const dkv_cache *c) { return c->context->type; }

DKV_API dkv_result dkv_cache_truncate(dkv_cache *c, int64_t n) {
    if (n < 0) return DKV_ERR_FIELD;
    int64_t heads = (int64_t)c->context->shape.L * c->context->shape.Hkv;
    for (int64_t f = 0; f < heads; f++) c->rows[f] = dkv__min(c->rows[f], n);
    return DKV_OK;
}

DKV__PRIVATE dkv_segment dkv__packed_segment(const dkv_packed *p) {
    dkv_segment s;
    memset(&s, 0, sizeof s);
    s.packed = p;
    return s;
}

DKV_API dkv_segment dkv_cache_context(const dkv_cache *c, int l) { return dkv__packed_segment(&c->context->layers[l]); }
DKV_API dkv_segment dkv_cache_tail_segment(const dkv_cache *c, int l) { return dkv__packed_segment(&c->tail[l]); }

DKV_API dkv_attention dkv_cache_attention(const dkv_cache *c, int l, dkv_tensor q, int64_t N_q, dkv_tensor out) {
    const dkv_shape *s = &c->context->shape;
    dkv_attention    a;
    memset(&a, 0, sizeof a);
    a.H = s->H;
    a.Hkv = s->Hkv;
    a.d_k = s->d_k;
    a.d_v = s->d_v;
    a.N_q = N_q;
    a.q = q;
    a.out = out;
    a.context = dkv_cache_context(c, l);
    a.tail = dkv_cache_tail_segment(c, l);
    return a;
}

DKV__PRIVATE int dkv__all_packed(const dkv_cache *c) {
    for (int64_t l = 0; l < c->context->shape.L; l++) {
        if (!c->context->layers[l].data) return 0;
    }
    return 1;
}

/* Tail rows of every head of every layer, bit for bit: only whole blocks in use are copied. */
DKV__PRIVATE void dkv__copy_tails(dkv_cache *to, const dkv_cache *from) {
    const dkv_shape *s = &from->context->shape;
    for (int64_t f = 0; f < (int64_t)s->L * s->Hkv; f++) {
        int64_t   blocks = dkv__ceil_div(from->rows[f], DKV__BLOCK);
        dkv__head a, b;
        if (!blocks) continue;
        a = dkv__head_of(&to->tail[f / s->Hkv], f % s->Hkv);
        b = dkv__head_of(&from->tail[f / s->Hkv], f % s->Hkv);
        memcpy(a.k, b.k, (size_t)(blocks * a.k_block));
        memcpy(a.v, b.v, (size_t)(blocks * DKV__BLOCK * a.v_row));
        to->rows[f] = from->rows[f];
    }
}

DKV_API dkv_result dkv_cache_fork(dkv_cache **out, const dkv_cache *c, int64_t capacity) {
    if (!dkv__all_packed(c)) return DKV_ERR_STATE;
    if (capacity < 0 || capacity > DKV__FAR) return DKV_ERR_FIELD;
    for (int l = 0; l < c->context->shape.L; l++) {
        if (dkv_cache_tail(c, l) > capacity) return DKV_ERR_CAPACITY;
    }
    DKV__ATOMIC_ADD(&c->context->refs, 1);
    dkv_result r = dkv__cache_over(out, c->context, capacity);
    if (!r) dkv__copy_tails(*out, c);
    return r;
}

DKV_API dkv_result dkv_cache_recompress(dkv_cache **out, const dkv_cache *c, const dkv_pattern *p, dkv_beyond beyond,
                                        int64_t capacity) {
    const dkv_allocator *alloc = &c->context->alloc;
    int64_t              tail = dkv_cache_tail(c, 0), T_c = c->context->plan.T_c + tail;
    dkv_plan             plan;
    size_t               bytes;
    if (!dkv__all_packed(c)) return DKV_ERR_STATE;
    for (int l = 0; l < c->context->shape.L; l++) {
        if (dkv_cache_tail(c, l) != tail) return DKV_ERR_STATE;
    }
    const dkv_shape *s = &c->context->shape;
    dkv_result       r = dkv_pattern_matches(p, s->L, s->H, s->Hkv, s->d_k);
    if (!r) r = dkv_plan_refine(&plan, NULL, &bytes, &c->context->plan, p, T_c, beyond);
    if (r) return r;
    void *mem = dkv__alloc(alloc, bytes);
    if (!mem) return DKV_ERR_MEMORY;
    dkv_cache *fresh = NULL;
    r = dkv_plan_refine(&plan, mem, &bytes, &c->context->plan, p, T_c, beyond);
    if (!r) r = dkv_cache_create(&fresh, &plan, &c->context->shape, c->context->type, capacity, alloc);
    for (int l = 0; !r && l < plan.L; l++) {
        dkv_segment  context = dkv_cache_context(c, l), suffix = dkv_cache_tail_segment(c, l);
        dkv__rows_of both = {&context, &suffix, &c->context->plan};
        dkv__context_pack(fresh->context, l, &both);
    }
    dkv__free(alloc, mem, bytes);
    if (!r) *out = fresh;
    return r;
}

/* ---- save and restore ----

     0  8  magic "DKVC\r\n\x1a\n"           64  4  pattern CRC32
     8  4  version = 1                      68 60  zero
    12  4  header bytes = 128              128     runs of each (layer, KV head): L * Hkv * 8 bytes
    16  8  file bytes                              the runs: position, length, 8 bytes each
    24  4  L                                       tail rows of each layer: L * 8 bytes
    28  4  H                                       per (layer, KV head): scales [d_k] and [d_v] f32 (i8, fp8 only),
    32  4  Hkv                                         K [rows][d_k], V [rows][d_v], tail K [n][d_k], tail V [n][d_v]
    36  8  d_k, d_v (4 each)                       CRC32 over every byte before it, 4 bytes
    44  4  type
    48  8  T_c                             Elements are little-endian, as every host that this was built for is.
    56  8  runs in all                                                                                              */

#define DKV__CACHE_HEADER 128
static const uint8_t dkv__cache_magic[8] = {'D', 'K', 'V', 'C', '\r', '\n', 0x1a, '\n'};

/* One packed head in an image: scales, K, V. */
DKV__INLINE int64_t dkv__image_head_bytes(dkv_type type, int64_t d_k, int64_t d_v, int64_t rows) {
    return (rows * dkv_type_bytes(type) + (dkv__scaled(type) ? 4 : 0)) * (d_k + d_v);
}

DKV__PRIVATE size_t dkv__cache_image_bytes(const dkv_cache *c) {
    const dkv__context *x = c->context;
    int64_t             heads = (int64_t)x->shape.L * x->shape.Hkv;
    int64_t             bytes = DKV__CACHE_HEADER + heads * 8 + x->plan.first[heads] * 16 + x->shape.L * 8 + 4;
    for (int64_t f = 0; f < heads; f++) {
        bytes += dkv__image_head_bytes(x->type, x->shape.d_k, x->shape.d_v, x->plan.rows[f]);
        bytes += dkv__image_head_bytes(dkv_tail_type(x->type), x->shape.d_k, x->shape.d_v, c->rows[f]);
    }
    return (size_t)bytes;
}

DKV__PRIVATE void dkv__cache_header(uint8_t *out, const dkv_cache *c, size_t bytes) {
    const dkv__context *x = c->context;
    memset(out, 0, DKV__CACHE_HEADER);
    memcpy(out, dkv__cache_magic, 8);
    dkv__put32(out + 8, DKV_CACHE_VERSION);
    dkv__put32(out + 12, DKV__CACHE_HEADER);
    dkv__put64(out + 16, bytes);
    dkv__put32(out + 24, (uint32_t)x->shape.L);
    dkv__put32(out + 28, (uint32_t)x->shape.H);
    dkv__put32(out + 32, (uint32_t)x->shape.Hkv);
    dkv__put32(out + 36, (uint32_t)x->shape.d_k);
    dkv__put32(out + 40, (uint32_t)x->shape.d_v);
    dkv__put32(out + 44, (uint32_t)x->type);
    dkv__put64(out + 48, (uint64_t)x->plan.T_c);
    dkv__put64(out + 56, (uint64_t)x->plan.first[(int64_t)x->shape.L * x->shape.Hkv]);
    dkv__put32(out + 64, x->plan.pattern_crc);
}

DKV__PRIVATE uint8_t *dkv__image_put(uint8_t *out, const dkv_packed *p, int64_t g) {
    const dkv__kernels *f = dkv__simd();
    dkv__head           h = dkv__head_of(p, g);
    int64_t             k_row = h.d_k * dkv_type_bytes(h.type), v_row = h.d_v * dkv_type_bytes(h.type);
    float               k[DKV__MAX_D], v[DKV__MAX_D];
    if (h.k_scale) {
        memcpy(out, h.k_scale, (size_t)h.d_k * 4);
        memcpy(out + h.d_k * 4, h.v_scale, (size_t)h.d_v * 4);
        out += (h.d_k + h.d_v) * 4;
    }
    uint8_t *v_out = out + p->rows[g] * k_row;
    for (int64_t row = 0; row < p->rows[g]; row++) {
        dkv__head_get(k, v, &h, row);
        f->store(out + row * k_row, h.type, k, h.d_k);
        f->store(v_out + row * v_row, h.type, v, h.d_v);
    }
    return v_out + p->rows[g] * v_row;
}

/* A NaN that packing cannot have stored: its channel's scale is finite. Instruction sets read it differently. */
DKV__PRIVATE int dkv__odd_nan(const float *x, const float *scale, int64_t d) {
    int odd = 0;
    for (int64_t j = 0; scale && j < d; j++) odd |= x[j] != x[j] && scale[j] == scale[j];
    return odd;
}

/* Returns where the next head begins, or NULL. */
DKV__PRIVATE const uint8_t *dkv__image_get(const uint8_t *in, const dkv_packed *p, int64_t g, int64_t rows) {
    const dkv__kernels *f = dkv__simd();
    dkv__head           h = dkv__head_of(p, g);
    int64_t             k_row = h.d_k * dkv_type_bytes(h.type), v_row = h.d_v * dkv_type_bytes(h.type);
    float               k[DKV__MAX_D], v[DKV__MAX_D];
    if (h.k_scale) {
        memcpy(h.k_scale, in, (size_t)h.d_k * 4);
        memcpy(h.v_scale, in + h.d_k * 4, (size_t)h.d_v * 4);
        in += (h.d_k + h.d_v) * 4;
    }
    const uint8_t *v_in = in + rows * k_row;
    for (int64_t row = 0; row < rows; row++) {
        f->load(k, in + row * k_row, h.type, h.d_k);
        f->load(v, v_in + row * v_row, h.type, h.d_v);
        if (dkv__odd_nan(k, h.k_scale, h.d_k) || dkv__odd_nan(v, h.v_scale, h.d_v)) return NULL;
        if (row % DKV__BLOCK == 0) dkv__head_open(&h, row);
        dkv__head_set(&h, row, k, v, NULL, f);
    }
    return v_in + rows * v_row;
}

DKV_API dkv_result dkv_cache_save(void *dst, size_t *bytes, const dkv_cache *c) {
    const dkv__context *x = c->context;
    int64_t             heads = (int64_t)x->shape.L * x->shape.Hkv;
    size_t              need = dkv__cache_image_bytes(c);
    if (!dkv__all_packed(c)) return DKV_ERR_STATE;
    if (!dst) {
        *bytes = need;
        return DKV_OK;
    }
    if (*bytes < need) return DKV_ERR_CAPACITY;
    dkv__range to = dkv__byte_range(dst, need);
    if (dkv__overlap(to, dkv__byte_range(c, c->bytes))) return DKV_ERR_OVERLAP;
    if (dkv__overlap(to, dkv__byte_range(x, x->bytes))) return DKV_ERR_OVERLAP;
    uint8_t *out = (uint8_t *)dst;
    dkv__cache_header(out, c, need);
    out += DKV__CACHE_HEADER;
    for (int64_t f = 0; f < heads; f++, out += 8) dkv__put64(out, (uint64_t)(x->plan.first[f + 1] - x->plan.first[f]));
    for (int64_t i = 0; i < x->plan.first[heads]; i++, out += 16) {
        dkv__put64(out, (uint64_t)x->plan.runs[i].pos);
        dkv__put64(out + 8, (uint64_t)x->plan.runs[i].len);
    }
    for (int l = 0; l < x->shape.L; l++, out += 8) dkv__put64(out, (uint64_t)dkv_cache_tail(c, l));
    for (int64_t f = 0; f < heads; f++) {
        out = dkv__image_put(out, &x->layers[f / x->shape.Hkv], f % x->shape.Hkv);
        out = dkv__image_put(out, &c->tail[f / x->shape.Hkv], f % x->shape.Hkv);
    }
    dkv__put32(out, dkv_crc32(0, dst, need - 4));
    *bytes = need;
    return DKV_OK;
}

/* What an image says of itself, checked against its length before anything is allocated. */
typedef struct dkv__image {
    dkv_shape      shape;
    dkv_type       type;
    int64_t        T_c, runs;
    uint32_t       pattern_crc;
    const uint8_t *counts, *spans, *tails, *rows; /* where the parts lie */
} dkv__image;

/* Spans of one head, as the image holds them: ascending, apart, inside T_c. Returns their rows, or -1. */
DKV__PRIVATE int64_t dkv__image_span_rows(const uint8_t *span, int64_t n, int64_t T_c) {
    int64_t rows = 0, end = -1;
    for (int64_t i = 0; i < n; i++, span += 16) {
        int64_t pos = dkv__get_i64(span), len = dkv__get_i64(span + 8);
        if (pos < 0 || pos <= end || len < 1 || len > T_c || pos > T_c - len) return -1;
        end = pos + len;
        rows += len;
    }
    return rows;
}

DKV__PRIVATE dkv_result dkv__image_read(dkv__image *m, const uint8_t *in, size_t bytes) {
    dkv_result r = dkv__file_check(in, bytes, dkv__cache_magic, DKV_CACHE_VERSION, DKV__CACHE_HEADER);
    if (r) return r;
    const int32_t most = DKV__MAX_HEADS;
    dkv_shape     s = {dkv__get_i32(in + 24), dkv__get_i32(in + 28), dkv__get_i32(in + 32), dkv__get_i32(in + 36),
                       dkv__get_i32(in + 40)};
    if (s.L < 1 || s.L > most || s.Hkv < 1 || s.Hkv > most || s.H < 0 || s.H > most) return DKV_ERR_FIELD;
    if (s.H % s.Hkv || !dkv__d_ok(s.d_k) || !dkv__d_ok(s.d_v)) return DKV_ERR_SHAPE;
    if (dkv__get32(in + 44) > DKV_FP8) return DKV_ERR_TYPE;
    m->shape = s;
    m->type = (dkv_type)dkv__get32(in + 44);
    m->T_c = dkv__get_i64(in + 48);
    m->runs = dkv__get_i64(in + 56);
    m->pattern_crc = dkv__get32(in + 64);
    if (m->T_c < 0 || m->T_c > DKV__FAR || m->runs < 0 || !dkv__all_zero(in + 68, 60)) return DKV_ERR_FIELD;
    int64_t heads = (int64_t)s.L * s.Hkv, left = (int64_t)bytes - DKV__CACHE_HEADER - 4;
    if (m->runs > left / 16 || (left -= heads * 8 + m->runs * 16 + s.L * 8) < 0) return DKV_ERR_LENGTH;
    m->counts = in + DKV__CACHE_HEADER;
    m->spans = m->counts + heads * 8;
    m->tails = m->spans + m->runs * 16;
    m->rows = m->tails + (int64_t)s.L * 8;
    int64_t run = 0;
    for (int64_t f = 0; f < heads; f++) {
        int64_t n = dkv__get_i64(m->counts + f * 8), tail = dkv__get_i64(m->tails + f / s.Hkv * 8);
        if (n < 0 || n > m->runs - run) return DKV_ERR_FIELD;
        int64_t rows = dkv__image_span_rows(m->spans + run * 16, n, m->T_c);
        if (rows < 0 || tail < 0) return DKV_ERR_FIELD;
        if (tail > left || rows > left) return DKV_ERR_LENGTH; /* a row takes more than a byte: products stay small */
        left -= dkv__image_head_bytes(m->type, s.d_k, s.d_v, rows);
        left -= dkv__image_head_bytes(dkv_tail_type(m->type), s.d_k, s.d_v, tail);
        if (left < 0) return DKV_ERR_LENGTH;
        run += n;
    }
    return run != m->runs ? DKV_ERR_FIELD : left ? DKV_ERR_LENGTH : DKV_OK;
}

DKV__PRIVATE void dkv__walk_image(dkv__runs *to, const dkv__maker *m, int64_t f) {
    for (int64_t n = dkv__get_i64(m->file_counts + f * 8); n > 0; n--, to->at++) {
        const uint8_t *span = m->file_spans + to->at * 16;
        int64_t        pos = dkv__get_i64(span);
        dkv__emit(to, pos, pos + dkv__get_i64(span + 8));
    }
}

DKV__PRIVATE dkv_result dkv__image_fill(dkv_cache *c, const dkv__image *m) {
    dkv__context  *x = c->context;
    const uint8_t *in = m->rows;
    for (int64_t l = 0; l < m->shape.L; l++) {
        dkv_packed layer = dkv__context_layer(x, l);
        int64_t    tail = dkv__get_i64(m->tails + l * 8);
        for (int64_t g = 0; g < m->shape.Hkv; g++) {
            in = dkv__image_get(in, &layer, g, layer.rows[g]);
            if (in) in = dkv__image_get(in, &c->tail[l], g, tail);
            if (!in) return DKV_ERR_FIELD;
            c->rows[l * m->shape.Hkv + g] = tail;
        }
        x->layers[l].data = layer.data;
    }
    return DKV_OK;
}

DKV_API dkv_result dkv_cache_restore(dkv_cache **out, const void *data, size_t bytes, int64_t capacity,
                                     const dkv_allocator *alloc) {
    dkv__image m;
    dkv_plan   plan;
    dkv__maker maker;
    size_t     plan_bytes;
    dkv_result r = dkv__image_read(&m, (const uint8_t *)data, bytes);
    if (r) return r;
    for (int64_t l = 0; l < m.shape.L; l++) {
        if (dkv__get_i64(m.tails + l * 8) > capacity) return DKV_ERR_CAPACITY;
    }
    memset(&maker, 0, sizeof maker);
    maker.walk = dkv__walk_image;
    maker.T_c = m.T_c;
    maker.file_counts = m.counts;
    maker.file_spans = m.spans;
    dkv__plan_build(&plan, NULL, &plan_bytes, &maker, m.shape.L, m.shape.Hkv);
    void *mem = dkv__alloc(alloc, plan_bytes);
    if (!mem) return DKV_ERR_MEMORY;
    dkv_cache *c = NULL;
    r = dkv__plan_build(&plan, mem, &plan_bytes, &maker, m.shape.L, m.shape.Hkv);
    plan.pattern_crc = m.pattern_crc;
    if (!r) r = dkv_cache_create(&c, &plan, &m.shape, m.type, capacity, alloc);
    dkv__free(alloc, mem, plan_bytes);
    if (!r) r = dkv__image_fill(c, &m);
    if (r) dkv_cache_destroy(c);
    else *out = c;
    return r;
}

/* ==========================================================================
   [SCORE]  how many keys outrank the source of what a query is about to predict (paper 3.1)
   in:  queries, K of context and tail, the source's row for each query
   out: ranks per (query, head): counts, so that keys may come in any order and from any thread
   invariant: a source's logit comes from the leaf that gives all the others, so that equal keys tie exactly
   ========================================================================== */

/* Rows are (asked query, head of the group), query first. Workspace: asked, then for each thread its counts and its
   scratch, of which q, max (the sources' logits), s and tile are used. */
typedef struct dkv__probe {
    const dkv_attention *a;
    const int64_t       *source;
    int64_t             *asked, rows; /* queries with a source; G times as many rows */
    char                *threads;
} dkv__probe;

DKV__INLINE int64_t dkv__probe_fixed(const dkv_attention *a) { return dkv__round_up(a->N_q * 8, DKV__ALIGN); }

DKV__INLINE int64_t dkv__probe_counts(const dkv_attention *a) { return dkv__round_up(a->N_q * a->H * 8, DKV__ALIGN); }

DKV__INLINE int64_t dkv__probe_each(const dkv_attention *a) {
    int64_t wk = dkv__v_width(a->d_k), wv = dkv__v_width(a->d_v);
    return dkv__probe_counts(a) + (DKV__ROW_BLOCK * (wk + 1) + DKV__ROWS * DKV__TILE + DKV__TILE * (wk + wv)) * 4;
}

DKV__PRIVATE dkv__scratch dkv__probe_scratch(const dkv__probe *p, int ith) {
    dkv__scratch x;
    memset(&x, 0, sizeof x);
    x.wk = dkv__v_width(p->a->d_k);
    x.q = (float *)(void *)(p->threads + ith * dkv__probe_each(p->a) + dkv__probe_counts(p->a));
    x.max = x.q + DKV__ROW_BLOCK * x.wk;
    x.s = x.max + DKV__ROW_BLOCK;
    x.tile = x.s + DKV__ROWS * DKV__TILE;
    return x;
}

/* The same attention with values that nobody reads. */
DKV__PRIVATE dkv_attention dkv__keys_only(const dkv_attention *a) {
    const dkv_packed *p = a->context.packed ? a->context.packed : a->tail.packed;
    dkv_attention     keys = *a;
    keys.d_v = p ? p->d_v : 1;
    keys.context.v = keys.context.k;
    keys.tail.v = keys.tail.k;
    keys.out = keys.q;
    keys.softcap = 0.0f;
    return keys;
}

DKV__PRIVATE void dkv__probe_queries(const dkv__probe *p, const dkv__item *it, const dkv__scratch *x,
                                     const float *k_scale, const dkv__kernels *f) {
    const dkv_attention *a = p->a;
    const int64_t        G = a->H / a->Hkv;
    const float          scale = dkv__scale_or_default(a->scale, a->d_k);
    for (int64_t r = 0; r < it->rows; r++) {
        int64_t i = p->asked[(it->row + r) / G], h = it->g * G + (it->row + r) % G;
        dkv__load_query(x->q + r * x->wk, x->wk, &a->q, i, h, a->d_k, scale, k_scale, f);
    }
}

/* The sources' logits: from the packed block that holds the key, or a block of its own. */
DKV__PRIVATE void dkv__probe_sources(const dkv__probe *p, const dkv__item *it, const dkv__scratch *x,
                                     const dkv__kernels *f) {
    const dkv_attention *a = p->a;
    dkv_packed           own = {x->tile, DKV_F32, 1, a->d_k, a->d_v, NULL, DKV__TILE};
    dkv__head            head = a->context.packed ? dkv__head_of(a->context.packed, it->g) : dkv__head_of(&own, 0);
    dkv__probe_queries(p, it, x, a->context.packed ? head.k_scale : NULL, f);
    for (int64_t r = 0; r < it->rows; r++) {
        int64_t row = p->source[p->asked[(it->row + r) / (a->H / a->Hkv)]];
        if (!a->context.packed) {
            dkv__copy_rows(&head, 0, &a->context, it->g, row, 1, f);
            row = 0;
        }
        const char *block = head.k + row / DKV__BLOCK * head.k_block;
        f->scores(x->s, x->q + r * x->wk, x->wk, 1, block, head.type, a->d_k, DKV__BLOCK);
        x->max[r] = x->s[row % DKV__BLOCK];
    }
}

/* Adds the keys of a tile that come before the sources of the item's rows. */
DKV__PRIVATE void dkv__probe_tile(const dkv__probe *p, const dkv__item *it, const dkv__keys *y, int64_t *count,
                                  const dkv__scratch *x, const dkv__kernels *f) {
    const dkv_attention *a = p->a;
    const int64_t        G = a->H / a->Hkv;
    for (int64_t r = 0; r < it->rows; r++) {
        if (r % DKV__ROWS == 0) {
            int64_t m = dkv__min(it->rows - r, DKV__ROWS);
            f->scores(x->s, x->q + r * x->wk, x->wk, m, y->k, y->type, a->d_k, y->n);
        }
        int64_t      i = p->asked[(it->row + r) / G], h = it->g * G + (it->row + r) % G, before = 0;
        int64_t      n = y->tail ? dkv__min(dkv__visible(a, it->g, i) - y->start, y->n) : y->n;
        int64_t      ties = y->tail ? 0 : dkv__min(p->source[i] - y->start, n); /* keys that would win a tie */
        const float *s = x->s + r % DKV__ROWS * DKV__TILE, own = x->max[r];
        for (int64_t t = 0; t < n; t++) before += !(s[t] <= own); /* a NaN never makes a hit */
        for (int64_t t = 0; t < ties; t++) before += s[t] == own;
        count[i * a->H + h] += before;
    }
}

/* A thread's share of the tiles of every KV head. */
DKV__PRIVATE void dkv__probe_task(void *arg, int ith, int nth) {
    const dkv__probe    *p = (const dkv__probe *)arg;
    const dkv_attention *a = p->a;
    dkv__kernels         rows = *dkv__simd(), *f = &rows;
    dkv__scratch         x = dkv__probe_scratch(p, ith);
    int64_t             *count = (int64_t *)(void *)(p->threads + ith * dkv__probe_each(a));
    dkv__item            it;
    rows.tiles = NULL; /* one key by itself, as a source is asked for, would not give a tile's bits */
    memset(count, 0, (size_t)dkv__probe_counts(a));
    memset(&it, 0, sizeof it);
    it.a = a;
    for (; it.g < a->Hkv; it.g++) {
        const int64_t tiles = dkv__tiles(a, it.g, dkv__query_rows(a));
        const int64_t begin = tiles * ith / nth, end = tiles * (ith + 1) / nth;
        for (it.row = 0; it.row < p->rows && begin < end; it.row += it.rows) {
            it.rows = dkv__min(p->rows - it.row, DKV__ROW_BLOCK);
            dkv__probe_sources(p, &it, &x, f);
            for (int64_t t = begin; t < end; t++) {
                dkv__keys y = dkv__tile_keys(&it, t, &x, f);
                if (t == begin || (y.tail && y.start == 0)) dkv__probe_queries(p, &it, &x, y.k_scale, f);
                dkv__probe_tile(p, &it, &y, count, &x, f);
            }
        }
    }
}

DKV_API dkv_result dkv_score_size(size_t *bytes, const dkv_attention *a, int nth) {
    dkv_attention keys = dkv__keys_only(a);
    dkv_result    r = dkv__attention_shape(&keys);
    if (r) return r;
    *bytes = (size_t)(dkv__probe_fixed(&keys) + (nth > 0 ? nth : dkv__default_threads()) * dkv__probe_each(&keys));
    return DKV_OK;
}

/* A query with a source asks for a row of the context. */
DKV__PRIVATE dkv_result dkv__sources_check(const dkv_attention *a, const int64_t *source) {
    int64_t rows = INT64_MAX;
    for (int64_t g = 0; g < a->Hkv; g++) rows = dkv__min(rows, dkv__segment_rows(&a->context, g));
    for (int64_t i = 0; i < a->N_q; i++) {
        if (source[i] < -1 || source[i] >= rows) return DKV_ERR_SHAPE;
    }
    return DKV_OK;
}

DKV__PRIVATE dkv_result dkv__probe_check(const dkv_attention *keys, const int64_t *source) {
    dkv_result r = dkv__attention_shape(keys);
    if (!r) r = dkv__segment_memory(&keys->context, keys->Hkv);
    if (!r) r = dkv__segment_memory(&keys->tail, keys->Hkv);
    return r ? r : dkv__sources_check(keys, source);
}

DKV_API dkv_result dkv_score(int64_t *rank, const dkv_attention *a, const int64_t *source, void *ws, size_t ws_bytes,
                             const dkv_parallel *par) {
    dkv_attention keys = dkv__keys_only(a);
    dkv_result    r = dkv__probe_check(&keys, source);
    if (r) return r;
    DKV_ASSERT(ws && (a->N_q == 0 || (a->q.data && rank && source)));
    dkv_parallel run = dkv__threads(par, ws_bytes, dkv__probe_fixed(&keys), dkv__probe_each(&keys));
    dkv__range   to = dkv__byte_range(rank, (size_t)(a->N_q * a->H * 8)), space = dkv__byte_range(ws, ws_bytes);
    dkv__range   from = dkv__byte_range(source, (size_t)(a->N_q * 8));
    if (!run.nth) return DKV_ERR_CAPACITY;
    if (!dkv__aligned(ws, DKV__ALIGN)) return DKV_ERR_ALIGN;
    if (dkv__overlap(to, space) || dkv__overlap(to, from) || dkv__overlap(space, from)) return DKV_ERR_OVERLAP;
    if (dkv__input_overlaps(&keys, to) || dkv__input_overlaps(&keys, space)) return DKV_ERR_OVERLAP;
    dkv__probe p = {&keys, source, (int64_t *)ws, 0, (char *)ws + dkv__probe_fixed(&keys)};
    for (int64_t i = 0; i < a->N_q; i++) {
        if (source[i] >= 0) p.asked[p.rows++] = i;
    }
    p.rows *= a->H / a->Hkv;
    run.run(run.user, run.nth, dkv__probe_task, &p);
    for (int64_t i = 0; i < a->N_q * a->H; i++) {
        int64_t sum = 0;
        for (int t = 0; t < run.nth; t++) sum += ((int64_t *)(void *)(p.threads + t * dkv__probe_each(&keys)))[i];
        rank[i] = source[i / a->H] < 0 ? -1 : sum;
    }
    return DKV_OK;
}
#endif /* DKV__IMPLEMENTED */
#endif /* DISTANCE_KV_IMPLEMENTATION */

/* ==========================================================================
   [GATES]  arithmetic, for the host and, in a .cu file, for the device
   in:  counters; logits and noise
   out: the same bits everywhere: no product feeds a sum but through fmaf, so no compiler can contract one
   ========================================================================== */
#if (defined(DISTANCE_KV_IMPLEMENTATION) || defined(__CUDACC__)) && !defined(DKV__GATE_ARITHMETIC)
#define DKV__GATE_ARITHMETIC
#include <math.h>
#include <string.h>

#if defined(__CUDACC__)
#define DKV__BOTH static __host__ __device__ inline
#elif defined(__GNUC__) || defined(__clang__)
#define DKV__BOTH static inline __attribute__((unused))
#else
#define DKV__BOTH static inline
#endif

DKV__BOTH void dkv__philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)b;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)a;
    }
}

DKV__BOTH float dkv__gate_noise(uint64_t seed, uint32_t step, uint32_t context, int64_t gate) {
    uint32_t c[4] = {step, context, (uint32_t)gate, (uint32_t)((uint64_t)gate >> 32)};
    dkv__philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
    float u = (float)(c[0] >> 8) * 5.9604644775390625e-8f; /* 2^-24, exact */
    return u < 1e-6f ? 1e-6f : u > 0.999999f ? 0.999999f : u;
}

/* ln(1 + f) for 1 + f in sqrt(1/2)..sqrt(2): with s = f / (2 + f), 2 atanh s = f + s (2 r - f), where r is what
   follows s in atanh's series over s; to s^9, remainder 2e-9. */
DKV__BOTH float dkv__gate_log1p_near(float f) {
    float s = f / (2.0f + f), t = s * s;
    float r = fmaf(t, 1.0f / 9.0f, 1.0f / 7.0f);
    r = fmaf(t, r, 0.2f);
    r = fmaf(t, r, 1.0f / 3.0f);
    return fmaf(s, fmaf(2.0f * t, r, -f), f);
}

/* ln x, x > 0 and normal: x = 2^n m, m in sqrt(1/2)..sqrt(2). Within 1 ulp. */
DKV__BOTH float dkv__gate_log(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    int32_t n = (bits - 0x3f3504f3) >> 23; /* sqrt(1/2); an arithmetic shift */
    bits -= (int32_t)((uint32_t)n << 23);
    memcpy(&x, &bits, 4);
    float y = fmaf((float)n, -2.12194440e-4f, dkv__gate_log1p_near(x - 1.0f));
    return fmaf((float)n, 0.693359375f, y);
}

/* ln(1 - u), 0 <= u < 1: 1 - u is rounded; what was lost comes back as a quotient. */
DKV__BOTH float dkv__gate_log1m(float u) {
    float w = 1.0f - u;
    if (w >= 0.70710678f) return dkv__gate_log1p_near(-u);
    return dkv__gate_log(w) + ((1.0f - w) - u) / w;
}

/* e^x, x <= 0: dkv__exp's reduction and series, by fmaf. Adding 1.5 * 2^23 rounds to an integer. */
DKV__BOTH float dkv__gate_exp(float x) {
    if (x < -87.33f) return 0.0f;
    float t = fmaf(x, 1.44269504f, 12582912.0f), n = t - 12582912.0f;
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
    float p = fmaf(r, 1.0f / 5040.0f, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float    two_n;
    memcpy(&two_n, &bits, 4);
    return p * two_n;
}

/* 1 / (1 + e^-x), and its derivative, which is exact to a few ulp at both ends. */
DKV__BOTH float dkv__gate_sigmoid(float x, float *slope) {
    float e = dkv__gate_exp(-fabsf(x)), r = 1.0f / (1.0f + e);
    *slope = e * r * r;
    return x < 0.0f ? e * r : r;
}

/* beta = 2/3, gamma = -0.1, zeta = 1.1 */
DKV__BOTH float dkv__gate_z(float a, float u, float *dz) {
    float slope, s = dkv__gate_sigmoid(1.5f * (dkv__gate_log(u) - dkv__gate_log1m(u) + a), &slope);
    float z = fmaf(s, 1.2f, -0.1f);
    *dz = z > 0.0f && z < 1.0f ? 1.8f * slope : 0.0f;
    return z < 0.0f ? 0.0f : z > 1.0f ? 1.0f : z;
}

#define DKV__GATE_SHIFT 1.59859685f /* beta ln(zeta / -gamma) = beta ln((1 - gamma) / (zeta - 1)) = 2/3 ln 11 */

DKV__BOTH float dkv__gate_p(float a, float *slope) { return dkv__gate_sigmoid(a + DKV__GATE_SHIFT, slope); }

/* u + z - u z: exactly z for u = 0, u for z = 0, 1 for either 1. */
DKV__BOTH float dkv__gate_union(float u, float z) { return fmaf(z, 1.0f - u, u); }

#define DKV__GATE_OPEN    1.17549435e-38f /* 2^-126: less is closed */
#define DKV__GATE_OPEN_LN (-87.3366f)
#endif

#ifdef DISTANCE_KV_IMPLEMENTATION
#ifndef DKV__GATES_IMPLEMENTED
#define DKV__GATES_IMPLEMENTED

/* ---- sampling, union, penalty: cells are (layer, KV head, bin), with n gates each ---- */

DKV__INLINE int64_t dkv__gate_group(const dkv_gates *g) { return g->tied ? 1 : g->H / g->Hkv; }
DKV__INLINE int64_t dkv__gate_cells(const dkv_gates *g) { return (int64_t)g->L * g->Hkv * g->D; }

/* Gate k of a cell; its neighbours in the group are D apart. */
DKV__INLINE int64_t dkv__gate_index(const dkv_gates *g, int64_t cell, int64_t k) {
    return (cell / g->D * dkv__gate_group(g) + k) * g->D + cell % g->D;
}

DKV_API dkv_result dkv_gates_check(const dkv_gates *g) {
    const int32_t most = DKV__MAX_HEADS;
    if (g->L < 1 || g->L > most || g->H < 1 || g->H > most || g->Hkv < 1 || g->Hkv > most) return DKV_ERR_FIELD;
    if (g->D < 1 || g->D > 1 << 20) return DKV_ERR_FIELD;
    return g->H % g->Hkv ? DKV_ERR_SHAPE : DKV_OK;
}

DKV_API int64_t dkv_gates_count(const dkv_gates *g) {
    DKV_ASSERT(!dkv_gates_check(g));
    return dkv__gate_cells(g) * dkv__gate_group(g);
}

DKV_API void dkv_philox(uint32_t out[4], const uint32_t counter[4], uint64_t key) {
    memcpy(out, counter, 16);
    dkv__philox(out, (uint32_t)key, (uint32_t)(key >> 32));
}

DKV_API float dkv_gate_noise(dkv_draw draw, int64_t gate) {
    return dkv__gate_noise(draw.seed, draw.step, draw.context, gate);
}

DKV_API float dkv_gate_z(float a, float u, float *dz) { return dkv__gate_z(a, u, dz); }

DKV_API float dkv_gate_p(float a) {
    float slope;
    return dkv__gate_p(a, &slope);
}

DKV_API float dkv_gate_p_one(float a) {
    float slope;
    return dkv__gate_sigmoid(a - DKV__GATE_SHIFT, &slope);
}

/* What a tied gate goes by: the largest of its group in x[L][H][D]. */
DKV__PRIVATE float dkv__group_max(const dkv_gates *g, const float *x, int64_t cell) {
    const int64_t G = g->H / g->Hkv;
    const float  *first = x + cell / g->D * G * g->D + cell % g->D;
    float         top = first[0];
    for (int64_t h = 1; h < G; h++) top = first[h * g->D] > top ? first[h * g->D] : top;
    return top;
}

DKV_API void dkv_gates_init(float *a, const dkv_gates *g, const float *S) {
    const int64_t n = dkv_gates_count(g);
    double        mean = 0.0;
    for (int64_t i = 0; i < n; i++) {
        a[i] = g->tied ? dkv__group_max(g, S, i) : S[i];
        mean += (double)a[i] / (double)n;
    }
    for (int64_t i = 0; i < n; i++) {
        double p = 1.0 / (1.0 + exp(-(log(0.7 / 0.3) + 6.0 * ((double)a[i] - mean))));
        p = p < 1e-3 ? 1e-3 : p > 0.999 ? 0.999 : p;
        a[i] = (float)(log(p / (1.0 - p)) - 2.0 / 3.0 * log(11.0));
    }
}

/* z and dz/da of the gates of a cell. */
DKV__PRIVATE void dkv__cell_draw(float *z, float *dz, const dkv_gates *g, const float *a, dkv_draw draw, int64_t cell) {
    for (int64_t k = 0; k < dkv__gate_group(g); k++) {
        int64_t i = dkv__gate_index(g, cell, k);
        z[k] = dkv__gate_z(a[i], dkv_gate_noise(draw, i), &dz[k]);
    }
}

/* rest[k] <- product of 1 - x over all others, without division, which 1 - x = 0 would forbid. Returns the union. */
DKV__PRIVATE float dkv__cell_union(float *rest, const float *x, int64_t n) {
    float before = 1.0f, after = 1.0f, u = 0.0f;
    for (int64_t k = 0; k < n; k++) {
        rest[k] = before;
        before *= 1.0f - x[k];
        u = dkv__gate_union(u, x[k]);
    }
    for (int64_t k = n; k-- > 0;) {
        rest[k] *= after;
        after *= 1.0f - x[k];
    }
    return u;
}

DKV_API void dkv_gates_union(float *u, float *ln_u, const dkv_gates *g, const float *a, dkv_draw draw) {
    float z[DKV__MAX_HEADS], dz[DKV__MAX_HEADS];
    DKV_ASSERT(!dkv_gates_check(g));
    for (int64_t cell = 0; cell < dkv__gate_cells(g); cell++) {
        float x = 0.0f;
        dkv__cell_draw(z, dz, g, a, draw, cell);
        for (int64_t k = 0; k < dkv__gate_group(g); k++) x = dkv__gate_union(x, z[k]);
        if (u) u[cell] = x;
        if (ln_u) ln_u[cell] = x < DKV__GATE_OPEN ? -INFINITY : dkv__gate_log(x);
    }
}

DKV_API void dkv_gates_union_backward(float *da, const dkv_gates *g, const float *a, dkv_draw draw,
                                      const float *d_ln_u) {
    float z[DKV__MAX_HEADS], dz[DKV__MAX_HEADS], rest[DKV__MAX_HEADS];
    DKV_ASSERT(!dkv_gates_check(g));
    for (int64_t cell = 0; cell < dkv__gate_cells(g); cell++) {
        dkv__cell_draw(z, dz, g, a, draw, cell);
        float u = dkv__cell_union(rest, z, dkv__gate_group(g));
        if (u < DKV__GATE_OPEN) continue;
        for (int64_t k = 0; k < dkv__gate_group(g); k++) {
            da[dkv__gate_index(g, cell, k)] += d_ln_u[cell] / u * rest[k] * dz[k];
        }
    }
}

DKV_API double dkv_gates_penalty(float *da, const dkv_gates *g, const float *a, dkv_budget budget, float lambda) {
    float         p[DKV__MAX_HEADS], slope[DKV__MAX_HEADS], rest[DKV__MAX_HEADS];
    const int64_t n = dkv__gate_group(g), cells = dkv__gate_cells(g);
    const int     logical = budget == DKV_BUDGET_LOGICAL;
    const double  count = (double)(logical ? cells * n : cells);
    double        sum = 0.0;
    DKV_ASSERT(!dkv_gates_check(g));
    for (int64_t cell = 0; cell < cells; cell++) {
        for (int64_t k = 0; k < n; k++) {
            p[k] = dkv__gate_p(a[dkv__gate_index(g, cell, k)], &slope[k]);
            if (logical) sum += (double)p[k];
        }
        double u = (double)dkv__cell_union(rest, p, n);
        if (!logical) sum += u;
        for (int64_t k = 0; da && k < n; k++) {
            double to = (double)slope[k] * (logical ? 1.0 : (double)rest[k]);
            da[dkv__gate_index(g, cell, k)] += (float)((double)lambda / count * to);
        }
    }
    return sum / count;
}

/* ---- optimizer ---- */

DKV_API double dkv_gates_clip(float *x, int64_t n) {
    double norm = 0.0;
    for (int64_t i = 0; i < n; i++) norm += (double)x[i] * (double)x[i];
    norm = sqrt(norm);
    for (int64_t i = 0; norm + 1e-6 > 1.0 && i < n; i++) x[i] = (float)((double)x[i] / (norm + 1e-6));
    return norm;
}

DKV_API void dkv_gates_adamw(float *a, float *m, float *v, const float *da, int64_t n, int64_t t, double rate) {
    const double b1 = 0.9, b2 = 0.999;
    const double bias1 = 1.0 - exp((double)t * log(b1)), bias2 = 1.0 - exp((double)t * log(b2));
    DKV_ASSERT(t >= 1);
    for (int64_t i = 0; i < n; i++) {
        double x = (double)da[i];
        m[i] = (float)(b1 * (double)m[i] + (1.0 - b1) * x);
        v[i] = (float)(b2 * (double)v[i] + (1.0 - b2) * x * x);
        a[i] = (float)((double)a[i] - rate * ((double)m[i] / bias1) / (sqrt((double)v[i] / bias2) + 1e-8));
    }
}

/* ---- exact Top-K: radix selection of the K-th key, then ties in order; no memory ---- */

typedef struct dkv__ranking {
    const dkv_gates *g;
    const float     *a;
    int              cells, by_p; /* rank cells by their best gate; by p instead of a */
} dkv__ranking;

/* Unsigned integers in the order of the floats; -0 counts as 0. */
DKV__INLINE uint32_t dkv__rank_key(const dkv__ranking *r, int64_t i) {
    float    slope, x = !r->cells || r->g->tied ? r->a[i] : dkv__group_max(r->g, r->a, i);
    uint32_t bits;
    if (r->by_p) x = dkv__gate_p(x, &slope);
    bits = dkv__bits_of(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The key of the last of the K first of n; *ties <- how many of that key are among them. */
DKV__PRIVATE uint32_t dkv__rank_cut(const dkv__ranking *r, int64_t n, int64_t K, int64_t *ties) {
    uint32_t cut = 0, known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t  bins[256] = {0};
        uint32_t byte = 255;
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = dkv__rank_key(r, i);
            if ((key & known) == cut) bins[key >> shift & 255u]++;
        }
        for (; K > bins[byte]; byte--) K -= bins[byte];
        cut |= byte << shift;
        known |= 255u << shift;
    }
    *ties = K;
    return cut;
}

DKV_API dkv_result dkv_gates_top(unsigned char *M, int64_t *K, const dkv_gates *g, const float *a, dkv_budget budget,
                                 double rho, int by_p) {
    const dkv__ranking r = {g, a, g->tied || budget == DKV_BUDGET_PHYSICAL, by_p};
    DKV_ASSERT(!dkv_gates_check(g));
    if (!(rho >= 0.0 && rho <= 1.0)) return DKV_ERR_FIELD;
    const int64_t G = g->H / g->Hkv, n = r.cells ? dkv__gate_cells(g) : dkv__gate_cells(g) * G;
    const int64_t copies = r.cells ? G : 1, want = (int64_t)rint(rho * (double)n);
    int64_t       ties;
    uint32_t      cut = dkv__rank_cut(&r, n, want, &ties);
    for (int64_t i = 0; i < n; i++) {
        uint32_t       key = dkv__rank_key(&r, i);
        unsigned char *to = M + i / g->D * copies * g->D + i % g->D, in = key > cut || (key == cut && ties-- > 0);
        for (int64_t h = 0; h < copies; h++) to[h * g->D] = in;
    }
    *K = want * copies;
    return DKV_OK;
}

DKV_API void dkv_gates_or(unsigned char *open, const dkv_gates *g, const unsigned char *M) {
    const int64_t G = g->H / g->Hkv;
    for (int64_t cell = 0; cell < dkv__gate_cells(g); cell++) {
        const unsigned char *first = M + cell / g->D * G * g->D + cell % g->D;
        open[cell] = 0;
        for (int64_t h = 0; h < G; h++) open[cell] |= first[h * g->D];
    }
}

DKV_API void dkv_gates_export(dkv_pattern *out, void *bits, void *p, const dkv_gates *g, const unsigned char *M,
                              const float *a) {
    const int64_t G = g->H / g->Hkv;
    out->L = g->L;
    out->H = g->H;
    out->Hkv = g->Hkv;
    out->D = g->D;
    out->bits = bits;
    out->p = p;
    memset(bits, 0, (size_t)dkv__bits_bytes(out));
    for (int64_t i = 0; i < dkv__gate_cells(g) * G; i++) {
        int64_t row = i / g->D, gate = g->tied ? row / G * g->D + i % g->D : i;
        if (M[i]) dkv_bits_set(bits, out, (int)(row / g->H), (int)(row % g->H), i % g->D, 1);
        if (p) dkv__set_element((char *)p + 2 * i, DKV_F16, dkv_gate_p(a[gate]));
    }
    out->K = dkv_pattern_count(out);
}

/* ---- gated attention ----
   Work items, each one thread's: a block of query rows of a KV head, over all keys; and in backward the own keys of a
   suffix, over all their rows. Rows are (suffix, query, head of the group), suffix first. Sizes alone cut items, and
   what blocks share (d ln u) is summed in their order, so that bits do not depend on threads. */

#define DKV__GATED_TILE 128 /* keys looked at together; a tile never crosses a bin, so it has one gate */
#define DKV__GATED_ROWS 384 /* query rows that share one conversion of a tile; their q and o stay in L2 */

typedef struct dkv__gated_item {
    const dkv_gated *c;
    int64_t          g, row, rows; /* rows row .. row + rows - 1 of KV head g */
    int64_t          x;            /* or, if not -1, the keys of this suffix */
    double          *sums;         /* [D], for d ln u */
} dkv__gated_item;

/* A pass over a batch. Workspace: sums of every row block, then one scratch per thread. */
typedef struct dkv__gated_pass {
    const dkv_gated *c;
    int64_t          n, rows, wk, wv; /* of c; the largest row block, K and V width */
    int64_t          sums;            /* doubles */
    int              backward;
    void            *ws;
} dkv__gated_pass;

/* One thread's scratch. Softmax 0 is the relaxed one, 1 the open one. Backward has dO in o[0], LSEs in max. */
typedef struct dkv__gated_work {
    const dkv__kernels *f;
    const dkv_gated    *c;
    int64_t             wk, wv;
    int                 backward;
    float *q, *dq;                      /* [rows][wk] */
    float *o[2], *max[2], *sum[2];      /* [rows][wv], [rows], [rows] */
    float *delta;                       /* [rows] rowsum(O_relaxed * dO) */
    float *s[2];                        /* [DKV__ROWS][DKV__TILE] */
    float *k, *v, *k_blocks, *v_blocks; /* a tile as rows of wk and wv, and as packed K */
    float *dk, *dv;                     /* a tile, as k and v */
    double *sums;
    float  ones[DKV__ROWS];
} dkv__gated_work;

typedef struct dkv__gated_tile {
    int64_t n, bin; /* keys; bin -1: gate 1 */
    float   ln_u;
    int     on[2];  /* which softmax has them */
} dkv__gated_tile;

DKV__INLINE int64_t dkv__gated_rows(const dkv_gated *c) { /* of one KV head */
    int64_t queries = 0;
    for (int64_t i = 0; i < c->n_suffix; i++) queries += c->suffix[i].N_q;
    return queries * (c->H / c->Hkv);
}

DKV__INLINE int64_t dkv__gated_blocks(const dkv_gated *c) { return dkv__ceil_div(dkv__gated_rows(c), DKV__GATED_ROWS); }

DKV__PRIVATE dkv__gated_pass dkv__gated_pass_of(const dkv_gated *c, int64_t n, int backward) {
    dkv__gated_pass p;
    memset(&p, 0, sizeof p);
    p.c = c;
    p.n = n;
    p.backward = backward;
    for (; n > 0; n--, c++) {
        p.rows = dkv__max(p.rows, dkv__round_up(dkv__min(dkv__gated_rows(c), DKV__GATED_ROWS), 16));
        p.wk = dkv__max(p.wk, dkv__v_width(c->d_k));
        p.wv = dkv__max(p.wv, dkv__v_width(c->d_v));
        p.sums += c->Hkv * dkv__gated_blocks(c) * c->D;
    }
    p.sums = dkv__round_up(p.sums, 8);
    return p;
}

DKV__INLINE int64_t dkv__gated_floats(const dkv__gated_pass *p) {
    return p->rows * (2 * p->wk + 2 * p->wv + 5) + 2 * DKV__ROWS * DKV__TILE + 3 * DKV__GATED_TILE * (p->wk + p->wv);
}

DKV__INLINE float *dkv__take_floats(float **at, int64_t n) {
    float *p = *at;
    *at += n;
    return p;
}

DKV__PRIVATE dkv__gated_work dkv__gated_work_of(const dkv__gated_pass *p, int ith) {
    const int64_t   rows = p->rows, tile = DKV__GATED_TILE;
    float          *at = (float *)p->ws + p->sums * 2 + ith * dkv__gated_floats(p);
    dkv__gated_work w;
    memset(&w, 0, sizeof w);
    w.f = dkv__simd();
    w.backward = p->backward;
    w.q = dkv__take_floats(&at, rows * p->wk);
    w.dq = dkv__take_floats(&at, rows * p->wk);
    for (int i = 0; i < 2; i++) {
        w.o[i] = dkv__take_floats(&at, rows * p->wv);
        w.max[i] = dkv__take_floats(&at, rows);
        w.sum[i] = dkv__take_floats(&at, rows);
        w.s[i] = dkv__take_floats(&at, DKV__ROWS * DKV__TILE);
    }
    w.delta = dkv__take_floats(&at, rows);
    w.k = dkv__take_floats(&at, tile * p->wk);
    w.dk = dkv__take_floats(&at, tile * p->wk);
    w.k_blocks = dkv__take_floats(&at, tile * p->wk);
    w.v = dkv__take_floats(&at, tile * p->wv);
    w.dv = dkv__take_floats(&at, tile * p->wv);
    w.v_blocks = dkv__take_floats(&at, tile * p->wv);
    for (int r = 0; r < DKV__ROWS; r++) w.ones[r] = 1.0f;
    return w;
}

/* The tile that begins at pos: sink, bins and recent are each cut backwards from their ends. */
DKV__PRIVATE dkv__gated_tile dkv__gated_tile_at(const dkv_gated *c, int64_t g, int64_t pos) {
    const int64_t   far = c->T_c - c->R;
    int64_t         end = c->T_c;
    dkv__gated_tile t = {0, -1, 0.0f, {1, c->open != NULL}};
    if (c->S < far && pos < c->S) {
        end = c->S;
    } else if (c->S < far && pos < far) {
        t.bin = (far - 1 - pos) / c->W;
        t.ln_u = c->ln_u[g * c->D + t.bin];
        t.on[0] = t.ln_u >= DKV__GATE_OPEN_LN;
        t.on[1] = c->open && c->open[g * c->D + t.bin];
        end = far - c->W * t.bin;
    }
    t.n = (end - pos - 1) % DKV__GATED_TILE + 1;
    return t;
}

/* Rows [n][d], ld apart, as packed K in f32: blocks of 16 keys, slack zero. */
DKV__PRIVATE void dkv__to_blocks(float *out, const float *x, int64_t ld, int64_t d, int64_t n) {
    for (int64_t t0 = 0; t0 < n; t0 += DKV__BLOCK) {
        int64_t m = dkv__min(n - t0, DKV__BLOCK);
        for (int64_t j = 0; j < d; j++, out += DKV__BLOCK) {
            for (int64_t t = 0; t < m; t++) out[t] = x[(t0 + t) * ld + j];
            for (int64_t t = m; t < DKV__BLOCK; t++) out[t] = 0.0f;
        }
    }
}

DKV__PRIVATE void dkv__gated_keys(dkv__gated_work *w, const dkv_segment *s, int64_t g, int64_t pos, int64_t n) {
    const int64_t d_k = w->c->d_k, d_v = w->c->d_v;
    dkv__head     from;
    memset(&from, 0, sizeof from);
    if (s->packed) from = dkv__head_of(s->packed, g);
    for (int64_t i = 0; i < n; i++) {
        float *k = w->k + i * w->wk, *v = w->v + i * w->wv;
        dkv__segment_get(k, v, s, &from, g, pos + i, d_k, d_v, w->f);
        memset(k + d_k, 0, (size_t)(w->wk - d_k) * sizeof *k);
        memset(v + d_v, 0, (size_t)(w->wv - d_v) * sizeof *v);
    }
    dkv__to_blocks(w->k_blocks, w->k, w->wk, d_k, n);
    if (w->backward) dkv__to_blocks(w->v_blocks, w->v, w->wv, d_v, n);
}

typedef struct dkv__gated_row { const dkv_suffix *x; int64_t i, h; } dkv__gated_row;

DKV__PRIVATE dkv__gated_row dkv__gated_row_at(const dkv_gated *c, int64_t g, int64_t row) {
    const int64_t  G = c->H / c->Hkv;
    dkv__gated_row at = {c->suffix, 0, 0};
    for (; row >= at.x->N_q * G; at.x++) row -= at.x->N_q * G;
    at.i = row / G;
    at.h = g * G + row % G;
    return at;
}

/* Rows row .. of KV head g into rows 0 .. of the scratch: queries, and what backward starts from. */
DKV__PRIVATE void dkv__gated_load(dkv__gated_work *w, int64_t g, int64_t row, int64_t n) {
    const dkv_gated *c = w->c;
    const float      scale = dkv__scale_or_default(c->scale, c->d_k);
    for (int64_t r = 0; r < n; r++) {
        dkv__gated_row at = dkv__gated_row_at(c, g, row + r);
        float         *d_out = w->o[0] + r * w->wv, *out = w->o[1] + r * w->wv;
        dkv__load_query(w->q + r * w->wk, w->wk, &at.x->q, at.i, at.h, c->d_k, scale, NULL, w->f);
        if (!w->backward) continue;
        double delta = 0.0;
        dkv__load_row(d_out, &at.x->d_out, at.i, at.h, c->d_v, w->f);
        dkv__load_row(out, c->open ? &at.x->out_relaxed : &at.x->out, at.i, at.h, c->d_v, w->f);
        for (int64_t j = 0; j < c->d_v; j++) delta += (double)out[j] * (double)d_out[j];
        w->delta[r] = (float)delta;
        w->max[1][r] = at.x->lse[at.i * c->H + at.h];
        w->max[0][r] = c->open ? at.x->lse_relaxed[at.i * c->H + at.h] : w->max[1][r];
    }
}

/* What is done with the first n keys of a tile, for m rows of the scratch from r on. */
typedef void dkv__gated_visit(dkv__gated_work *w, const dkv__gated_tile *t, int64_t r, int64_t m, int64_t n);

DKV__PRIVATE void dkv__gated_over_context(dkv__gated_work *w, const dkv__gated_item *it, dkv__gated_visit *visit) {
    dkv__gated_tile t;
    for (int64_t pos = 0; pos < it->c->T_c; pos += t.n) {
        t = dkv__gated_tile_at(it->c, it->g, pos);
        if (!t.on[0] && (w->backward || !t.on[1])) continue; /* K and V of what is closed are never read */
        dkv__gated_keys(w, &it->c->context, it->g, pos, t.n);
        for (int64_t r = 0; r < it->rows; r += DKV__ROWS) visit(w, &t, r, dkv__min(it->rows - r, DKV__ROWS), t.n);
    }
}

/* Visits the own keys of a suffix from pos on, which are loaded, for its rows begin .. end - 1, which are rows at .. of
   the scratch: in groups that see equally many, so that no row multiplies a key that it does not see. */
DKV__PRIVATE void dkv__gated_causal(dkv__gated_work *w, int64_t pos, int64_t n, int64_t begin, int64_t end, int64_t at,
                                    dkv__gated_visit *visit) {
    const int64_t   G = w->c->H / w->c->Hkv;
    dkv__gated_tile t = {n, -1, 0.0f, {1, w->c->open != NULL}};
    for (int64_t row = dkv__max(begin, pos * G), m; row < end; row += m) {
        int64_t seen = dkv__min(row / G + 1 - pos, n), last = seen < n ? dkv__min((row / G + 1) * G, end) : end;
        m = dkv__min(last - row, DKV__ROWS);
        visit(w, &t, at + row - begin, m, seen);
    }
}

DKV__PRIVATE void dkv__gated_over_suffixes(dkv__gated_work *w, const dkv__gated_item *it, dkv__gated_visit *visit) {
    const int64_t G = it->c->H / it->c->Hkv;
    int64_t       first = 0;
    for (int64_t i = 0; i < it->c->n_suffix; i++) {
        const dkv_suffix *x = &it->c->suffix[i];
        dkv_segment       own = dkv_strided(x->k, x->v, x->N_q);
        int64_t           begin = dkv__max(it->row - first, 0), end = dkv__min(it->row + it->rows - first, x->N_q * G);
        for (int64_t pos = 0, keys = dkv__ceil_div(end, G); begin < end && pos < keys; pos += DKV__GATED_TILE) {
            int64_t n = dkv__min(keys - pos, DKV__GATED_TILE);
            dkv__gated_keys(w, &own, it->g, pos, n);
            dkv__gated_causal(w, pos, n, begin, end, first + begin - it->row, visit);
        }
        first += x->N_q * G;
    }
}

DKV__INLINE void dkv__add_gate(float *s, int64_t m, int64_t n, float ln_u) {
    for (int64_t r = 0; ln_u != 0.0f && r < m; r++, s += DKV__TILE) {
        for (int64_t t = 0; t < n; t++) s[t] += ln_u;
    }
}

/* ---- forward: both softmaxes from one pass over the scores ---- */

DKV__PRIVATE void dkv__gated_attend_rows(dkv__gated_work *w, const dkv__gated_tile *t, int64_t r, int64_t m,
                                         int64_t n) {
    float alpha[DKV__ROWS];
    w->f->scores(w->s[!t->on[0]], w->q + r * w->wk, w->wk, m, w->k_blocks, DKV_F32, w->c->d_k, n);
    if (t->on[0] && t->on[1]) memcpy(w->s[1], w->s[0], (size_t)(m * DKV__TILE) * sizeof(float));
    if (t->on[0]) dkv__add_gate(w->s[0], m, n, t->ln_u);
    for (int i = 0; i < 2; i++) {
        if (!t->on[i]) continue;
        w->f->softmax(w->s[i], w->max[i] + r, w->sum[i] + r, alpha, m, n, 0.0f);
        w->f->mix(w->o[i] + r * w->wv, w->wv, w->s[i], alpha, m, w->v, DKV_F32, w->wv, n);
    }
}

DKV__PRIVATE void dkv__gated_store(dkv__gated_work *w, int64_t r, int side, const dkv_tensor *out, float *lse,
                                   const dkv__gated_row *at) {
    float *o = w->o[side] + r * w->wv, sum = w->sum[side][r];
    for (int64_t j = 0; j < w->c->d_v; j++) o[j] /= sum; /* a row sees its own key: sum > 0, or NaN */
    dkv__store_row(out, at->i, at->h, o, w->c->d_v, w->f);
    lse[at->i * w->c->H + at->h] = (float)((double)w->max[side][r] + log((double)sum));
}

DKV__PRIVATE void dkv__gated_attend_block(dkv__gated_work *w, const dkv__gated_item *it) {
    dkv__gated_load(w, it->g, it->row, it->rows);
    for (int i = 0; i < 2; i++) {
        memset(w->o[i], 0, (size_t)(it->rows * w->wv) * sizeof(float));
        for (int64_t r = 0; r < it->rows; r++) {
            w->max[i][r] = -INFINITY;
            w->sum[i][r] = 0.0f;
        }
    }
    dkv__gated_over_context(w, it, dkv__gated_attend_rows);
    dkv__gated_over_suffixes(w, it, dkv__gated_attend_rows);
    for (int64_t r = 0; r < it->rows; r++) {
        dkv__gated_row at = dkv__gated_row_at(it->c, it->g, it->row + r);
        int            side = it->c->open != NULL;
        dkv__gated_store(w, r, side, &at.x->out, at.x->lse, &at);
        if (side) dkv__gated_store(w, r, 0, &at.x->out_relaxed, at.x->lse_relaxed, &at);
    }
}

/* ---- backward: P from the LSE, dP = dO V^T, dS = P (dP - delta) ---- */

/* s[m][n] <- P. An LSE below the row's greatest logit, by rounding, gives way to it: no weight is above 1. */
DKV__PRIVATE void dkv__gated_weights(dkv__gated_work *w, float *s, const float *lse, float ln_u, int64_t r, int64_t m,
                                     int64_t n) {
    float max[DKV__ROWS], sum[DKV__ROWS] = {0}, alpha[DKV__ROWS];
    memcpy(max, lse + r, (size_t)m * sizeof *max);
    w->f->scores(s, w->q + r * w->wk, w->wk, m, w->k_blocks, DKV_F32, w->c->d_k, n);
    dkv__add_gate(s, m, n, ln_u);
    w->f->softmax(s, max, sum, alpha, m, n, 0.0f);
}

/* s[0] <- P relaxed, s[1] <- dS. Returns the sum of dS: in f32 by 16 lanes, each of at most 24 * 8 terms. */
DKV__PRIVATE double dkv__gated_ds(dkv__gated_work *w, const dkv__gated_tile *t, int64_t r, int64_t m, int64_t n) {
    float  lane[16] = {0};
    double sum = 0.0;
    dkv__gated_weights(w, w->s[0], w->max[0], t->ln_u, r, m, n);
    w->f->scores(w->s[1], w->o[0] + r * w->wv, w->wv, m, w->v_blocks, DKV_F32, w->c->d_v, n);
    for (int64_t k = 0; k < m; k++) {
        const float *p = w->s[0] + k * DKV__TILE, delta = w->delta[r + k];
        float       *ds = w->s[1] + k * DKV__TILE;
        int64_t      i = 0;
        for (; i + 16 <= n; i += 16) {
            for (int64_t j = 0; j < 16; j++) lane[j] += ds[i + j] = p[i + j] * (ds[i + j] - delta);
        }
        for (; i < n; i++) lane[i % 16] += ds[i] = p[i] * (ds[i] - delta);
    }
    for (int j = 0; j < 16; j++) sum += (double)lane[j];
    return sum;
}

DKV__PRIVATE void dkv__gated_query_rows(dkv__gated_work *w, const dkv__gated_tile *t, int64_t r, int64_t m,
                                        int64_t n) {
    double sum = dkv__gated_ds(w, t, r, m, n);
    if (t->bin >= 0) w->sums[t->bin] += sum;
    w->f->mix(w->dq + r * w->wk, w->wk, w->s[1], w->ones, m, w->k, DKV_F32, w->wk, n);
}

DKV__PRIVATE void dkv__gated_query_block(dkv__gated_work *w, const dkv__gated_item *it) {
    const float scale = dkv__scale_or_default(it->c->scale, it->c->d_k);
    w->sums = it->sums;
    memset(w->sums, 0, (size_t)it->c->D * sizeof(double));
    memset(w->dq, 0, (size_t)(it->rows * w->wk) * sizeof(float));
    dkv__gated_load(w, it->g, it->row, it->rows);
    dkv__gated_over_context(w, it, dkv__gated_query_rows);
    dkv__gated_over_suffixes(w, it, dkv__gated_query_rows);
    for (int64_t r = 0; r < it->rows; r++) {
        dkv__gated_row at = dkv__gated_row_at(it->c, it->g, it->row + r);
        float         *dq = w->dq + r * w->wk;
        for (int64_t j = 0; j < it->c->d_k; j++) dq[j] *= scale;
        dkv__store_row(&at.x->dq, at.i, at.h, dq, it->c->d_k, w->f);
    }
}

/* dK += dS^T scale Q, dV += P^T dO, with the P that made the output. */
DKV__PRIVATE void dkv__gated_key_rows(dkv__gated_work *w, const dkv__gated_tile *t, int64_t r, int64_t m, int64_t n) {
    dkv__gated_ds(w, t, r, m, n);
    if (w->c->open) dkv__gated_weights(w, w->s[0], w->max[1], 0.0f, r, m, n);
    for (int64_t k = 0; k < m; k++) {
        const float *p = w->s[0] + k * DKV__TILE, *ds = w->s[1] + k * DKV__TILE;
        for (int64_t i = 0; i < n; i++) {
            w->f->axpy(w->dk + i * w->wk, ds[i], w->q + (r + k) * w->wk, w->c->d_k);
            w->f->axpy(w->dv + i * w->wv, p[i], w->o[0] + (r + k) * w->wv, w->c->d_v);
        }
    }
}

DKV__PRIVATE void dkv__gated_key_block(dkv__gated_work *w, const dkv__gated_item *it) {
    const dkv_suffix *x = &it->c->suffix[it->x];
    const int64_t     G = it->c->H / it->c->Hkv, end = x->N_q * G;
    dkv_segment       own = dkv_strided(x->k, x->v, x->N_q);
    int64_t           first = 0;
    for (int64_t i = 0; i < it->x; i++) first += it->c->suffix[i].N_q * G;
    for (int64_t pos = 0, n; pos < x->N_q; pos += n) {
        n = dkv__min(x->N_q - pos, DKV__GATED_TILE);
        dkv__gated_keys(w, &own, it->g, pos, n);
        memset(w->dk, 0, (size_t)(n * w->wk) * sizeof(float));
        memset(w->dv, 0, (size_t)(n * w->wv) * sizeof(float));
        for (int64_t row = pos * G, rows; row < end; row += rows) {
            rows = dkv__min(end - row, DKV__GATED_ROWS);
            dkv__gated_load(w, it->g, first + row, rows);
            dkv__gated_causal(w, pos, n, row, row + rows, 0, dkv__gated_key_rows);
        }
        for (int64_t i = 0; i < n; i++) {
            dkv__store_row(&x->dk, pos + i, it->g, w->dk + i * w->wk, it->c->d_k, w->f);
            dkv__store_row(&x->dv, pos + i, it->g, w->dv + i * w->wv, it->c->d_v, w->f);
        }
    }
}

/* Sums of the row blocks, in their order. */
DKV__PRIVATE void dkv__gated_gate_gradients(const dkv__gated_pass *p) {
    const double *sums = (const double *)p->ws;
    for (const dkv_gated *c = p->c; c < p->c + p->n; c++) {
        const int64_t blocks = dkv__gated_blocks(c);
        for (int64_t i = 0; i < c->Hkv * c->D; i++) {
            double sum = 0.0;
            for (int64_t b = 0; b < blocks; b++) sum += sums[(i / c->D * blocks + b) * c->D + i % c->D];
            c->d_ln_u[i] = (float)sum;
        }
        sums += c->Hkv * blocks * c->D;
    }
}

/* ---- the passes ---- */

/* Item i of a context: row blocks first, by KV head, then suffixes. */
DKV__PRIVATE dkv__gated_item dkv__gated_item_at(const dkv_gated *c, int64_t i, double *sums) {
    const int64_t   blocks = dkv__gated_blocks(c), all = dkv__gated_rows(c);
    dkv__gated_item it = {c, 0, 0, 0, -1, sums + i * c->D};
    if (i < c->Hkv * blocks) {
        int64_t step = dkv__ceil_div(all, blocks);
        it.g = i / blocks;
        it.row = i % blocks * step;
        it.rows = dkv__min(all - it.row, step);
    } else {
        it.g = (i - c->Hkv * blocks) / c->n_suffix;
        it.x = (i - c->Hkv * blocks) % c->n_suffix;
    }
    return it;
}

DKV__PRIVATE void dkv__gated_task(void *arg, int ith, int nth) {
    const dkv__gated_pass *p = (const dkv__gated_pass *)arg;
    dkv__gated_work        w = dkv__gated_work_of(p, ith);
    double                *sums = (double *)p->ws;
    int64_t                turn = 0;
    for (const dkv_gated *c = p->c; c < p->c + p->n; c++) {
        int64_t blocks = c->Hkv * dkv__gated_blocks(c), items = blocks + (p->backward ? c->Hkv * c->n_suffix : 0);
        w.c = c;
        w.wk = dkv__v_width(c->d_k);
        w.wv = dkv__v_width(c->d_v);
        for (int64_t i = 0; i < items; i++, turn++) {
            if (turn % nth != ith) continue;
            dkv__gated_item it = dkv__gated_item_at(c, i, sums);
            if (it.x >= 0) dkv__gated_key_block(&w, &it);
            else if (w.backward) dkv__gated_query_block(&w, &it);
            else dkv__gated_attend_block(&w, &it);
        }
        sums += blocks * c->D;
    }
}

DKV__PRIVATE dkv_result dkv__suffix_check(const dkv_gated *c, const dkv_suffix *x, int backward) {
    dkv_segment own = dkv_strided(x->k, x->v, x->N_q), grad = dkv_strided(x->dk, x->dv, x->N_q);
    dkv_result  r = x->N_q < 0 || x->N_q > INT32_MAX ? DKV_ERR_SHAPE : dkv__segment_check(&own, c->Hkv, c->d_k, c->d_v);
    int         ok = dkv__tensor_type_ok(x->q.type) && dkv__tensor_type_ok(x->out.type);
    if (c->open) ok = ok && dkv__tensor_type_ok(x->out_relaxed.type);
    if (backward) ok = ok && dkv__tensor_type_ok(x->d_out.type) && dkv__tensor_type_ok(x->dq.type);
    if (!r && backward) r = dkv__segment_check(&grad, c->Hkv, c->d_k, c->d_v);
    return r ? r : ok ? DKV_OK : DKV_ERR_TYPE;
}

/* Shapes and types; the context's rows. */
DKV__PRIVATE dkv_result dkv__gated_check(const dkv_gated *c, int backward) {
    const dkv_gates gates = {1, c->H, c->Hkv, (int32_t)dkv__min(c->D, INT32_MAX), 0};
    dkv_result      r = c->D < 1 ? DKV_ERR_FIELD : dkv_gates_check(&gates);
    if (r) return r;
    if (!dkv__d_ok(c->d_k) || !dkv__d_ok(c->d_v) || c->n_suffix < 0) return DKV_ERR_SHAPE;
    if (c->T_c < 0 || c->T_c > DKV__FAR || c->W < 1 || c->W > DKV__FAR) return DKV_ERR_FIELD;
    if (c->S < 0 || c->S > DKV__FAR || c->R < 0 || c->R > DKV__FAR) return DKV_ERR_FIELD;
    if (!(c->scale >= 0.0f && c->scale <= 3.0e38f)) return DKV_ERR_FIELD;
    if (c->T_c > c->S + c->R + c->W * c->D) return DKV_ERR_RANGE;
    r = dkv__segment_check(&c->context, c->Hkv, c->d_k, c->d_v);
    for (int64_t g = 0; !r && g < c->Hkv; g++) {
        if (dkv__segment_rows(&c->context, g) != c->T_c) r = DKV_ERR_SHAPE;
    }
    for (int64_t i = 0; !r && i < c->n_suffix; i++) r = dkv__suffix_check(c, &c->suffix[i], backward);
    return r;
}

/* Whether something that a pass writes, or its workspace, meets something else that it writes or reads. */
DKV__PRIVATE int dkv__suffix_overlaps(const dkv_gated *c, const dkv_suffix *x, int backward, dkv__range ws) {
    const size_t     cells = (size_t)(c->Hkv * c->D), lse = (size_t)(x->N_q * c->H) * sizeof(float);
    const dkv__range none = {0, 0};
    const dkv__range made[4] = {dkv__tensor_range(&x->out, x->N_q, c->H, c->d_v), dkv__byte_range(x->lse, lse),
                                c->open ? dkv__tensor_range(&x->out_relaxed, x->N_q, c->H, c->d_v) : none,
                                c->open ? dkv__byte_range(x->lse_relaxed, lse) : none};
    const dkv__range grad[4] = {dkv__tensor_range(&x->dq, x->N_q, c->H, c->d_k),
                                dkv__tensor_range(&x->dk, x->N_q, c->Hkv, c->d_k),
                                dkv__tensor_range(&x->dv, x->N_q, c->Hkv, c->d_v),
                                dkv__byte_range(c->d_ln_u, cells * 4)};
    const dkv__range read[6] = {dkv__tensor_range(&x->q, x->N_q, c->H, c->d_k),
                                dkv__tensor_range(&x->k, x->N_q, c->Hkv, c->d_k),
                                dkv__tensor_range(&x->v, x->N_q, c->Hkv, c->d_v), dkv__byte_range(c->ln_u, cells * 4),
                                dkv__byte_range(c->open, c->open ? cells : 0),
                                dkv__tensor_range(&x->d_out, x->N_q, c->H, c->d_v)};
    dkv__range       all[15] = {ws}; /* 5 written, 5 read; backward reads 5 more */
    int              meet = 0;
    memcpy(all + 1, backward ? grad : made, sizeof made);
    memcpy(all + 5, read, sizeof read);
    memcpy(all + 11, made, sizeof made);
    for (int i = 0; i < 5; i++) {
        for (int j = i + 1; j < (backward ? 15 : 10); j++) meet |= dkv__overlap(all[i], all[j]);
        meet |= dkv__segment_overlaps(&c->context, c->Hkv, c->d_k, c->d_v, all[i]);
    }
    return meet;
}

DKV__PRIVATE dkv_result dkv__gated_run(const dkv_gated *c, int64_t n, void *ws, size_t ws_bytes,
                                       const dkv_parallel *par, int backward) {
    dkv_result r = DKV_OK;
    DKV_ASSERT(n >= 0 && ws);
    for (int64_t i = 0; !r && i < n; i++) r = dkv__gated_check(&c[i], backward);
    for (int64_t i = 0; !r && i < n; i++) r = dkv__segment_memory(&c[i].context, c[i].Hkv);
    if (r) return r;
    dkv__gated_pass p = dkv__gated_pass_of(c, n, backward);
    dkv_parallel    run = dkv__threads(par, ws_bytes, p.sums * 8, dkv__gated_floats(&p) * 4);
    if (!run.nth) return DKV_ERR_CAPACITY;
    if (!dkv__aligned(ws, DKV__ALIGN)) return DKV_ERR_ALIGN;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t x = 0; x < c[i].n_suffix; x++) {
            if (dkv__suffix_overlaps(&c[i], &c[i].suffix[x], backward, dkv__byte_range(ws, ws_bytes))) {
                return DKV_ERR_OVERLAP;
            }
        }
    }
    p.ws = ws;
    run.run(run.user, run.nth, dkv__gated_task, &p);
    if (backward) dkv__gated_gate_gradients(&p);
    return DKV_OK;
}

DKV_API dkv_result dkv_gated_size(size_t *bytes, const dkv_gated *c, int64_t n, int nth) {
    dkv_result r = DKV_OK;
    for (int64_t i = 0; !r && i < n; i++) r = dkv__gated_check(&c[i], 0);
    if (r) return r;
    dkv__gated_pass p = dkv__gated_pass_of(c, n, 1);
    int64_t         threads = nth > 0 ? nth : dkv__default_threads();
    *bytes = (size_t)(p.sums * 8 + threads * dkv__max(dkv__gated_floats(&p) * 4, DKV__ALIGN));
    return DKV_OK;
}

DKV_API dkv_result dkv_gated_forward(const dkv_gated *c, int64_t n, void *ws, size_t ws_bytes,
                                     const dkv_parallel *par) {
    return dkv__gated_run(c, n, ws, ws_bytes, par, 0);
}

DKV_API dkv_result dkv_gated_backward(const dkv_gated *c, int64_t n, void *ws, size_t ws_bytes,
                                      const dkv_parallel *par) {
    return dkv__gated_run(c, n, ws, ws_bytes, par, 1);
}
#endif /* DKV__GATES_IMPLEMENTED */
#endif /* DISTANCE_KV_IMPLEMENTATION */

/* Licence: MIT or public domain (www.unlicense.org), at your choice. The full texts stand in LICENSE; this notice and
   the copyright line "Copyright (c) 2026 The Distance-KV authors" satisfy the MIT alternative. */
