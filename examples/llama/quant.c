#include "quant.h"
#include "gguf.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,f16c,fma")))
#endif
#define INLINE static inline __attribute__((always_inline))

/* ---- f16 and bf16 ---- */

INLINE float f32_from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

INLINE uint32_t f32_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

INLINE uint16_t load_u16(const void *p) {
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The f16 exponent is moved into place by a product with 2^112, which is exact, subnormals included. */
INLINE float f32_from_f16(uint16_t h) {
    uint32_t magnitude = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t u = f32_bits(f32_from_bits(magnitude << 13) * 0x1p112f);
    return f32_from_bits(u | sign | (magnitude >= 0x7c00u ? 0x7f800000u : 0));
}

/* Rounds to nearest even. */
static uint16_t f16_from_f32(float f) {
    uint32_t u = f32_bits(f) & 0x7fffffffu, sign = f32_bits(f) >> 16 & 0x8000u;
    if (u >= 0x47800000u) return (uint16_t)(sign | (u > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (u < 0x38800000u) u = f32_bits(f32_from_bits(u) + 0.5f) - f32_bits(0.5f); /* 0.5f's ulp is f16's smallest step */
    else u = (u + 0xfffu + (u >> 13 & 1) - 0x38000000u) >> 13;
    return (uint16_t)(sign | u);
}

/* ---- types: 32 weights at a time, w = d (u - bias) + m ---- */

typedef struct {
    uint8_t u[QUANT_BLOCK];
    float d[2]; /* of the lower and upper 16 */
    float m;
} block32;

INLINE int bias_of(int type) {
    return type == GGUF_Q4_0 ? 8 : type == GGUF_Q5_0 ? 16 : type == GGUF_Q8_0 ? 128 : type == GGUF_Q6_K ? 32 : 0;
}

INLINE void one_scale(block32 *o, float d, float m) { o->d[0] = o->d[1] = d, o->m = m; }

INLINE void nibbles(block32 *o, const uint8_t *q) {
    for (int i = 0; i < 16; i++) o->u[i] = q[i] & 15, o->u[16 + i] = q[i] >> 4;
}

INLINE void fifth_bits(block32 *o, const uint8_t *high) {
    for (int i = 0; i < QUANT_BLOCK; i++) o->u[i] |= (uint8_t)((high[i / 8] >> i % 8 & 1) << 4);
}

/* Q4_K: f16 d, f16 dmin, 12 bytes with 8 pairs of 6 bits (scale, min), then [4][32] bytes of two blocks' nibbles. */
INLINE void block_q4_k(block32 *o, const uint8_t *super, int64_t b) {
    const uint8_t *s = super + 4, *q = super + 16 + b / 2 * 32;
    int scale = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | s[b - 4] >> 6 << 4;
    int min = b < 4 ? s[b + 4] & 63 : s[b + 4] >> 4 | s[b] >> 6 << 4;
    one_scale(o, f32_from_f16(load_u16(super)) * (float)scale, -(f32_from_f16(load_u16(super + 2)) * (float)min));
    for (int i = 0; i < QUANT_BLOCK; i++) o->u[i] = b % 2 ? q[i] >> 4 : q[i] & 15;
}

/* Q6_K: low nibbles [2][64], high pairs of bits [2][32], 16 int8 scales, f16 d. Of each 128 weights, blocks 0 and 1 are
   the low nibbles of the 64 bytes and 2 and 3 the high ones; block k's high bits are at 2k. */
INLINE void block_q6_k(block32 *o, const uint8_t *super, int64_t b) {
    const uint8_t *low = super + b / 4 * 64 + b % 2 * 32, *high = super + 128 + b / 4 * 32;
    int64_t k = b % 4;
    for (int i = 0; i < 2; i++)
        o->d[i] = f32_from_f16(load_u16(super + 208)) * (float)(int8_t)super[192 + b * 2 + i];
    o->m = 0;
    for (int i = 0; i < QUANT_BLOCK; i++)
        o->u[i] = (uint8_t)((k < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * k & 3) << 4);
}

/* Block b of a row. */
INLINE void read_block(block32 *o, const uint8_t *row, int type, int64_t b) {
    if (type == GGUF_Q4_K) {
        block_q4_k(o, row + b / 8 * 144, b % 8);
        return;
    }
    if (type == GGUF_Q6_K) {
        block_q6_k(o, row + b / 8 * 210, b % 8);
        return;
    }
    int has_min = type == GGUF_Q4_1 || type == GGUF_Q5_1, has_fifth = type == GGUF_Q5_0 || type == GGUF_Q5_1;
    int bytes = 2 + 2 * has_min + 4 * has_fifth + (type == GGUF_Q8_0 ? 32 : 16);
    const uint8_t *p = row + b * bytes, *q = p + 2 + 2 * has_min;
    one_scale(o, f32_from_f16(load_u16(p)), has_min ? f32_from_f16(load_u16(p + 2)) : 0);
    if (type == GGUF_Q8_0)
        for (int i = 0; i < QUANT_BLOCK; i++) o->u[i] = q[i] ^ 128;
    else nibbles(o, q + 4 * has_fifth);
    if (has_fifth) fifth_bits(o, q);
}

INLINE void blocks_to_f32(float *y, const uint8_t *row, int type, int64_t n) {
    for (int64_t b = 0; b < n / QUANT_BLOCK; b++, y += QUANT_BLOCK) {
        block32 o;
        read_block(&o, row, type, b);
        for (int h = 0; h < 2; h++)
            for (int i = 0; i < 16; i++) y[16 * h + i] = o.d[h] * (float)(o.u[16 * h + i] - bias_of(type)) + o.m;
    }
}

void quant_row_to_f32(float *y, const void *row, int type, int64_t n) {
    const uint8_t *p = row;
    switch (type) {
    case GGUF_F32: memcpy(y, row, (size_t)n * sizeof *y); break;
    case GGUF_F16: for (int64_t i = 0; i < n; i++) y[i] = f32_from_f16(load_u16(p + 2 * i)); break;
    case GGUF_BF16: for (int64_t i = 0; i < n; i++) y[i] = f32_from_bits((uint32_t)load_u16(p + 2 * i) << 16); break;
    case GGUF_Q4_0: blocks_to_f32(y, row, GGUF_Q4_0, n); break;
    case GGUF_Q4_1: blocks_to_f32(y, row, GGUF_Q4_1, n); break;
    case GGUF_Q5_0: blocks_to_f32(y, row, GGUF_Q5_0, n); break;
    case GGUF_Q5_1: blocks_to_f32(y, row, GGUF_Q5_1, n); break;
    case GGUF_Q8_0: blocks_to_f32(y, row, GGUF_Q8_0, n); break;
    case GGUF_Q4_K: blocks_to_f32(y, row, GGUF_Q4_K, n); break;
    case GGUF_Q6_K: blocks_to_f32(y, row, GGUF_Q6_K, n); break;
    default: assert(0 && "a type that gguf_open lets through");
    }
}

/* ---- packing ---- */

typedef struct {
    int bits;   /* 4 or 8 */
    int second; /* NONE, MIN or SCALE */
    int bias;
} form;

enum { NONE, MIN, SCALE };

static form form_of(int type) {
    int min = type == GGUF_Q4_1 || type == GGUF_Q5_1 || type == GGUF_Q4_K;
    int bits = type == GGUF_Q4_0 || type == GGUF_Q4_1 || type == GGUF_Q4_K ? 4 : 8;
    return (form){bits, min ? MIN : type == GGUF_Q6_K ? SCALE : NONE, bias_of(type)};
}

static bool is_float(int type) { return type == GGUF_F32 || type == GGUF_F16 || type == GGUF_BF16; }

/* Of 16 rows by 32 columns. */
INLINE int64_t packed_block(int bits, int second) { return 32 + 32 * (second != NONE) + 64 * bits; }

static int64_t row_groups(const quant_mat *m) { return (m->rows + QUANT_ROWS - 1) / QUANT_ROWS; }

static int64_t packed_group(const quant_mat *m) {
    form f = form_of(m->type);
    return m->cols / QUANT_BLOCK * packed_block(f.bits, f.second);
}

size_t quant_packed_bytes(const quant_mat *m) {
    return is_float(m->type) ? 0 : ((size_t)(row_groups(m) * packed_group(m)) + 63) / 64 * 64;
}

size_t quant_read_bytes(const quant_mat *m) {
    if (is_float(m->type)) return (size_t)m->rows * gguf_row_bytes(m->type, m->cols);
    return (size_t)(row_groups(m) * packed_group(m));
}

static void put_u16(uint8_t *p, uint16_t v) { memcpy(p, &v, sizeof v); }

/* Row r of 16 into its lane of a packed block. */
static void pack_row(uint8_t *out, const block32 *o, form f, int r) {
    put_u16(out + 2 * r, f16_from_f32(o->d[0]));
    if (f.second) put_u16(out + 32 + 2 * r, f16_from_f32(f.second == MIN ? o->m : o->d[1]));
    uint8_t *q = out + (f.second ? 64 : 32) + 4 * r;
    for (int i = 0; i < QUANT_BLOCK; i++) {
        if (f.bits == 8) q[i / 4 * 64 + i % 4] = o->u[i];
        else if (i < 16) q[i / 4 * 64 + i % 4] = (uint8_t)(o->u[i] | o->u[16 + i] << 4);
    }
}

static void pack_group(uint8_t *out, const quant_mat *m, int64_t first) {
    form f = form_of(m->type);
    int64_t row_bytes = (int64_t)gguf_row_bytes(m->type, m->cols), block_bytes = packed_block(f.bits, f.second);
    for (int r = 0; r < QUANT_ROWS; r++)
        for (int64_t b = 0; b < m->cols / QUANT_BLOCK; b++) {
            block32 o = {{0}, {0, 0}, 0};
            if (first + r < m->rows) read_block(&o, (const uint8_t *)m->data + (first + r) * row_bytes, m->type, b);
            pack_row(out + b * block_bytes, &o, f, r);
        }
}

void quant_pack(void *packed, const quant_mat *m, int ith, int nth) {
    int64_t groups = row_groups(m);
    for (int64_t g = groups * ith / nth; g < groups * (ith + 1) / nth; g++)
        pack_group((uint8_t *)packed + g * packed_group(m), m, g * QUANT_ROWS);
}

/* ---- activations ---- */

size_t quant_vec_bytes(int64_t n) {
    size_t blocks = (size_t)(n / QUANT_BLOCK);
    return blocks * (QUANT_BLOCK + sizeof(float) + 2 * sizeof(int32_t));
}

/* x below this counts as 0, so that 127 / max stays finite. */
#define SMALLEST 1e-30f

/* A block with a NaN or an infinity gets scale NaN: the rows that read it become NaN, as they would in f32. Magnitudes
   are compared as integers, where a NaN is the greatest and nothing traps, so that the loop is vectorised. */
static float quantise32(int8_t *q, int32_t sum[2], const float *x) {
    int32_t most = 0;
    for (int i = 0; i < QUANT_BLOCK; i++) {
        int32_t magnitude = (int32_t)(f32_bits(x[i]) & 0x7fffffffu);
        most = magnitude > most ? magnitude : most;
    }
    float max = f32_from_bits((uint32_t)most);
    bool finite = most < 0x7f800000;
    sum[0] = sum[1] = 0;
    if (!finite || max < SMALLEST) return memset(q, 0, QUANT_BLOCK), finite ? 0 : NAN;
    for (int i = 0; i < QUANT_BLOCK; i++) /* 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits */
        q[i] = (int8_t)(f32_bits(x[i] * (127 / max) + 0x1.8p23f) - f32_bits(0x1.8p23f));
    for (int i = 0; i < 16; i++) sum[0] += q[i], sum[1] += q[16 + i];
    return max / 127;
}

void quant_vec_set(quant_vec *v, void *memory, const float *x, int64_t n) {
    int64_t blocks = n / QUANT_BLOCK;
    *v = (quant_vec){.x = x, .n = n, .q = memory};
    v->d = (float *)(void *)(v->q + blocks * QUANT_BLOCK);
    v->sum = (int32_t *)(void *)(v->d + blocks);
    for (int64_t b = 0; b < blocks; b++)
        v->d[b] = quantise32(v->q + b * QUANT_BLOCK, v->sum + 2 * b, x + b * QUANT_BLOCK);
}

/* ---- leaves: 16 packed rows against a vector, and one row of floats against a vector ----
   Sums of 32 products are exact in int32 (at most 32 * 255 * 127); blocks are added up in f32, in order. */

INLINE void rows_scalar(float *y, const uint8_t *w, const quant_vec *x, int bits, int second, int bias) {
    float acc[QUANT_ROWS] = {0};
    for (int64_t b = 0; b < x->n / QUANT_BLOCK; b++, w += packed_block(bits, second)) {
        const uint8_t *u = w + (second ? 64 : 32);
        const int8_t *q = x->q + b * QUANT_BLOCK;
        for (int r = 0; r < QUANT_ROWS; r++, u += 4) {
            int32_t s[2] = {-bias * x->sum[2 * b], -bias * x->sum[2 * b + 1]};
            for (int i = 0; i < 16; i++) {
                uint8_t low = u[i / 4 * 64 + i % 4], high = bits == 8 ? u[256 + i / 4 * 64 + i % 4] : low >> 4;
                s[0] += (bits == 8 ? low : low & 15) * q[i];
                s[1] += high * q[16 + i];
            }
            float d = f32_from_f16(load_u16(w + 2 * r)) * x->d[b];
            float e = second ? f32_from_f16(load_u16(w + 32 + 2 * r)) * x->d[b] : 0;
            if (second == SCALE) acc[r] += d * (float)s[0] + e * (float)s[1];
            else acc[r] += d * (float)(s[0] + s[1]) + e * (float)(x->sum[2 * b] + x->sum[2 * b + 1]);
        }
    }
    memcpy(y, acc, sizeof acc);
}

static void rows16_scalar(float *y, const uint8_t *w, const quant_vec *x, form f) {
    if (f.bits == 4 && f.second == NONE) rows_scalar(y, w, x, 4, NONE, f.bias);
    else if (f.bits == 4) rows_scalar(y, w, x, 4, MIN, f.bias);
    else if (f.second == NONE) rows_scalar(y, w, x, 8, NONE, f.bias);
    else if (f.second == MIN) rows_scalar(y, w, x, 8, MIN, f.bias);
    else rows_scalar(y, w, x, 8, SCALE, f.bias);
}

static float dot_scalar(const void *row, const float *x, int64_t n, int type) {
    float sum[16] = {0}, total = 0, w[16];
    size_t bytes = gguf_row_bytes(type, 1);
    for (int64_t i = 0; i < n; i += 16) {
        int len = n - i < 16 ? (int)(n - i) : 16;
        quant_row_to_f32(w, (const uint8_t *)row + (size_t)i * bytes, type, len);
        for (int j = 0; j < len; j++) sum[j] += w[j] * x[i + j];
    }
    for (int j = 0; j < 16; j++) total += sum[j];
    return total;
}

#if defined(__x86_64__)

/* Weights stream through once, and the hardware's own prefetch of a stream reaches 0.77 of the memory's rate here where
   asking for it this far ahead reaches all of it. May point past the end: a prefetch never faults. */
enum { AHEAD = 2048 };

INLINE void prefetch(const void *p) { _mm_prefetch((const char *)((uintptr_t)p + AHEAD), _MM_HINT_T0); }

/* AVX2 has s16 pair sums only. 8-bit u comes as u - 128: |u - 128| times q with the sign moved to it fits them, as
   2 * 128 * 127 < 2^15. 4-bit u needs no sign. */
AVX2 INLINE __m256i dot4_avx2(__m256i sum, __m256i u, const int8_t *q4, int bits) {
    int32_t four;
    memcpy(&four, q4, sizeof four);
    __m256i q = _mm256_set1_epi32(four);
    if (bits == 8) q = _mm256_sign_epi8(q, u), u = _mm256_abs_epi8(u);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, q), _mm256_set1_epi16(1)));
}

AVX2 INLINE __m256 scales_avx2(const uint8_t *f16x8, float by) {
    __m256 s = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)f16x8));
    return _mm256_mul_ps(s, _mm256_set1_ps(by));
}

/* s[h] = sums over the lower and upper 16 columns of 8 rows; half: 0 or 1 of the 16 rows */
AVX2 INLINE void sums_avx2(__m256i s[2], const uint8_t *u, const int8_t *q, int bits, int half) {
    const __m256i low_mask = _mm256_set1_epi8(15), top = _mm256_set1_epi8((char)128);
    for (int j = 0; j < bits; j++) {
        if (half == 0) prefetch(u + 64 * j);
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(u + 64 * j + 32 * half));
        if (bits == 8) {
            s[j / 4] = dot4_avx2(s[j / 4], _mm256_xor_si256(v, top), q + 4 * j, 8);
        } else {
            s[0] = dot4_avx2(s[0], _mm256_and_si256(v, low_mask), q + 4 * j, 4);
            s[1] = dot4_avx2(s[1], _mm256_and_si256(_mm256_srli_epi16(v, 4), low_mask), q + 16 + 4 * j, 4);
        }
    }
}

AVX2 INLINE void rows_avx2(float *y, const uint8_t *w, const quant_vec *x, int bits, int second, int bias) {
    __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    int zero = bits == 8 ? bias - 128 : bias; /* 8-bit u are read as u - 128 */
    for (int64_t b = 0; b < x->n / QUANT_BLOCK; b++, w += packed_block(bits, second))
        for (int half = 0; half < 2; half++) {
            const int32_t *sum = x->sum + 2 * b;
            __m256i s[2] = {_mm256_set1_epi32(-zero * sum[0]), _mm256_set1_epi32(-zero * sum[1])};
            sums_avx2(s, w + (second ? 64 : 32), x->q + b * QUANT_BLOCK, bits, half);
            __m256 d = scales_avx2(w + 16 * half, x->d[b]), a = acc[half];
            if (second == SCALE) {
                a = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(s[0]), a);
                a = _mm256_fmadd_ps(scales_avx2(w + 32 + 16 * half, x->d[b]), _mm256_cvtepi32_ps(s[1]), a);
            } else {
                a = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(_mm256_add_epi32(s[0], s[1])), a);
                float scaled_sum = x->d[b] * (float)(sum[0] + sum[1]);
                if (second == MIN) a = _mm256_add_ps(a, scales_avx2(w + 32 + 16 * half, scaled_sum));
            }
            acc[half] = a;
        }
    _mm256_storeu_ps(y, acc[0]);
    _mm256_storeu_ps(y + 8, acc[1]);
}

AVX2 static void rows16_avx2(float *y, const uint8_t *w, const quant_vec *x, form f) {
    if (f.bits == 4 && f.second == NONE) rows_avx2(y, w, x, 4, NONE, f.bias);
    else if (f.bits == 4) rows_avx2(y, w, x, 4, MIN, f.bias);
    else if (f.second == NONE) rows_avx2(y, w, x, 8, NONE, f.bias);
    else if (f.second == MIN) rows_avx2(y, w, x, 8, MIN, f.bias);
    else rows_avx2(y, w, x, 8, SCALE, f.bias);
}

AVX2 INLINE __m256 load_avx2(const uint8_t *p, int64_t i, int type) {
    if (type == GGUF_F32) return _mm256_loadu_ps((const float *)(const void *)(p + 4 * i));
    __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(p + 2 * i));
    if (type == GGUF_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

AVX2 INLINE float dot_floats_avx2(const uint8_t *row, const float *x, int64_t n, int type) {
    __m256 sum[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        for (int k = 0; k < (type == GGUF_F32 ? 2 : 1); k++) prefetch(row + i * (type == GGUF_F32 ? 4 : 2) + 64 * k);
        for (int k = 0; k < 4; k++)
            sum[k] = _mm256_fmadd_ps(load_avx2(row, i + 8 * k, type), _mm256_loadu_ps(x + i + 8 * k), sum[k]);
    }
    float lanes[8], total = dot_scalar(row + i * (int64_t)gguf_row_bytes(type, 1), x + i, n - i, type);
    _mm256_storeu_ps(lanes, _mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3])));
    for (int k = 0; k < 8; k++) total += lanes[k];
    return total;
}

AVX2 static float dot_avx2(const void *row, const float *x, int64_t n, int type) {
    if (type == GGUF_F32) return dot_floats_avx2(row, x, n, GGUF_F32);
    if (type == GGUF_F16) return dot_floats_avx2(row, x, n, GGUF_F16);
    return dot_floats_avx2(row, x, n, GGUF_BF16);
}

VNNI INLINE __m512i dot4_vnni(__m512i sum, __m512i u, const int8_t *q4) {
    int32_t four;
    memcpy(&four, q4, sizeof four);
    return _mm512_dpbusd_epi32(sum, u, _mm512_set1_epi32(four));
}

VNNI INLINE __m512 scales_vnni(const uint8_t *f16x16, float by) {
    __m512 s = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)f16x16));
    return _mm512_mul_ps(s, _mm512_set1_ps(by));
}

VNNI INLINE void sums_vnni(__m512i s[2], const uint8_t *u, const int8_t *q, int bits) {
    const __m512i low_mask = _mm512_set1_epi8(15);
    for (int j = 0; j < bits; j++) {
        prefetch(u + 64 * j);
        __m512i v = _mm512_loadu_si512(u + 64 * j);
        if (bits == 8) {
            s[j / 4] = dot4_vnni(s[j / 4], v, q + 4 * j);
        } else {
            s[0] = dot4_vnni(s[0], _mm512_and_si512(v, low_mask), q + 4 * j);
            s[1] = dot4_vnni(s[1], _mm512_and_si512(_mm512_srli_epi16(v, 4), low_mask), q + 16 + 4 * j);
        }
    }
}

VNNI INLINE void rows_vnni(float *y, const uint8_t *w, const quant_vec *x, int bits, int second, int bias) {
    __m512 acc = _mm512_setzero_ps();
    for (int64_t b = 0; b < x->n / QUANT_BLOCK; b++, w += packed_block(bits, second)) {
        const int32_t *sum = x->sum + 2 * b;
        __m512i s[2] = {_mm512_set1_epi32(-bias * sum[0]), _mm512_set1_epi32(-bias * sum[1])};
        sums_vnni(s, w + (second ? 64 : 32), x->q + b * QUANT_BLOCK, bits);
        __m512 d = scales_vnni(w, x->d[b]);
        if (second == SCALE) {
            acc = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(s[0]), acc);
            acc = _mm512_fmadd_ps(scales_vnni(w + 32, x->d[b]), _mm512_cvtepi32_ps(s[1]), acc);
        } else {
            acc = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(_mm512_add_epi32(s[0], s[1])), acc);
            if (second == MIN) acc = _mm512_add_ps(acc, scales_vnni(w + 32, x->d[b] * (float)(sum[0] + sum[1])));
        }
    }
    _mm512_storeu_ps(y, acc);
}

VNNI static void rows16_vnni(float *y, const uint8_t *w, const quant_vec *x, form f) {
    if (f.bits == 4 && f.second == NONE) rows_vnni(y, w, x, 4, NONE, f.bias);
    else if (f.bits == 4) rows_vnni(y, w, x, 4, MIN, f.bias);
    else if (f.second == NONE) rows_vnni(y, w, x, 8, NONE, f.bias);
    else if (f.second == MIN) rows_vnni(y, w, x, 8, MIN, f.bias);
    else rows_vnni(y, w, x, 8, SCALE, f.bias);
}

#endif

typedef struct {
    void (*rows16)(float *y, const uint8_t *w, const quant_vec *x, form f);    /* y[16], w one packed group */
    float (*dot)(const void *row, const float *x, int64_t n, int type);        /* row: f32, f16 or bf16 [n] */
} leaves;

/* One core's loads of plain rows saturate memory with 256-bit registers: dot has no wider form. */
static const leaves table[] = {
    {rows16_scalar, dot_scalar},
#if defined(__x86_64__)
    {rows16_avx2, dot_avx2},
    {rows16_vnni, dot_avx2},
#endif
};

static int limit = 2;

int quant_simd_level(void) {
    int level = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) level = 1; /* no such CPU lacks F16C */
    if (level && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni")) level = 2;
#endif
    return level < limit ? level : limit;
}

void quant_simd_limit(int level) { limit = level; }

/* ---- the product ---- */

static void matvec_packed(float *y, const quant_mat *m, const quant_vec *x, const leaves *use, int ith, int nth) {
    form f = form_of(m->type);
    int64_t groups = row_groups(m), bytes = packed_group(m);
    for (int64_t g = groups * ith / nth; g < groups * (ith + 1) / nth; g++) {
        float out[QUANT_ROWS];
        int64_t rows = m->rows - g * QUANT_ROWS < QUANT_ROWS ? m->rows - g * QUANT_ROWS : QUANT_ROWS;
        use->rows16(out, m->packed + g * bytes, x, f);
        memcpy(y + g * QUANT_ROWS, out, (size_t)rows * sizeof *out);
    }
}

void quant_matvec(float *y, const quant_mat *m, const quant_vec *x, int ith, int nth) {
    const leaves *use = &table[quant_simd_level()];
    if (!is_float(m->type)) {
        matvec_packed(y, m, x, use, ith, nth);
        return;
    }
    size_t row_bytes = gguf_row_bytes(m->type, m->cols);
    for (int64_t r = m->rows * ith / nth; r < m->rows * (ith + 1) / nth; r++)
        y[r] = use->dot((const uint8_t *)m->data + (size_t)r * row_bytes, x->x, m->cols, m->type);
}
