/* Weight types and the decode product: hand-computed blocks, then y = W x against double precision within the bound
   that quant.h states, for every type and SIMD level of this machine. Levels that the machine lacks are skipped. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
/* after the above */
#include <cmocka.h>

#include "../examples/llama/gguf.h"
#include "../examples/llama/quant.h"

enum { F16_ONE = 0x3c00, F16_HALF = 0x3800, F16_MINUS_TWO = 0xc000 };

static void put16(uint8_t *p, int h) { p[0] = (uint8_t)h, p[1] = (uint8_t)(h >> 8); }

static void expect_row(const uint8_t *row, int type, const float *want, int64_t n) {
    uint8_t *exact = malloc(gguf_row_bytes(type, n));
    float *got = malloc((size_t)n * sizeof *got);
    memcpy(exact, row, gguf_row_bytes(type, n));
    quant_row_to_f32(got, exact, type, n);
    for (int64_t i = 0; i < n; i++)
        if (!(got[i] == want[i])) fail_msg("%s[%d]: %g, not %g", gguf_type_name(type), (int)i, got[i], want[i]);
    free(got);
    free(exact);
}

static void test_halves(void **state) {
    (void)state;
    static const int f16[] = {0x0000, 0x8000, 0x3c00, 0xc000, 0x0001, 0x83ff, 0x0400, 0x7bff, 0x7c00, 0xfc00};
    static const float want[] = {0, -0.0f, 1, -2, 0x1p-24f, -0x3ffp-24f, 0x1p-14f, 65504, INFINITY, -INFINITY};
    uint8_t row[20], brain[6] = {0x80, 0x3f, 0x01, 0x00, 0x80, 0xff};
    for (int i = 0; i < 10; i++) put16(row + 2 * i, f16[i]);
    expect_row(row, GGUF_F16, want, 10);
    expect_row(brain, GGUF_BF16, (float[]){1.0f, 0x1p-133f, -INFINITY}, 3);
    float nan, zero;
    put16(row, 0x7e01);
    quant_row_to_f32(&nan, row, GGUF_F16, 1);
    quant_row_to_f32(&zero, row + 2, GGUF_F16, 1);
    assert_true(isnan(nan) && signbit(zero));
}

/* Quants that differ at every position, d = 0.5, m = -2: what each type must read from its bytes. */
static void test_blocks_of_32(void **state) {
    (void)state;
    uint8_t q40[18], q41[20], q50[22], q51[24], q80[34];
    const uint8_t high[4] = {0x01, 0x80, 0xf0, 0x0f}; /* fifth bits of weights 0, 15, 20..23, 24..27 */
    float want[5][32];
    put16(q40, F16_HALF), put16(q41, F16_HALF), put16(q50, F16_HALF), put16(q51, F16_HALF), put16(q80, F16_HALF);
    put16(q41 + 2, F16_MINUS_TWO), put16(q51 + 2, F16_MINUS_TWO);
    memcpy(q50 + 2, high, 4), memcpy(q51 + 4, high, 4);
    for (int i = 0; i < 16; i++) {
        uint8_t pair = (uint8_t)(i | (15 - i) << 4); /* weight i is i, weight 16 + i is 15 - i */
        q40[2 + i] = q41[4 + i] = q50[6 + i] = q51[8 + i] = pair;
    }
    for (int i = 0; i < 32; i++) {
        int u = i < 16 ? i : 31 - i, fifth = (i == 0 || i == 15 || (i >= 20 && i < 28)) ? 16 : 0;
        want[0][i] = 0.5f * (float)(u - 8);
        want[1][i] = 0.5f * (float)u - 2;
        want[2][i] = 0.5f * (float)(u + fifth - 16);
        want[3][i] = 0.5f * (float)(u + fifth) - 2;
        q80[2 + i] = (uint8_t)(i * 8 - 128);
        want[4][i] = 0.5f * (float)(i * 8 - 128);
    }
    expect_row(q40, GGUF_Q4_0, want[0], 32);
    expect_row(q41, GGUF_Q4_1, want[1], 32);
    expect_row(q50, GGUF_Q5_0, want[2], 32);
    expect_row(q51, GGUF_Q5_1, want[3], 32);
    expect_row(q80, GGUF_Q8_0, want[4], 32);
}

/* Bytes 0-3 are the 6 bits of scales 0-3 with the top 2 bits of scales 4-7 above, bytes 4-7 the same of mins, bytes
   8-11 the low nibbles of scales and mins 4-7. */
static void test_q4_k(void **state) {
    (void)state;
    uint8_t row[144] = {0};
    float want[256];
    int scale[8], min[8];
    for (int b = 0; b < 8; b++) scale[b] = 5 * (b + 1), min[b] = 40 - 3 * b;
    put16(row, F16_HALF), put16(row + 2, F16_ONE);
    for (int b = 0; b < 4; b++) {
        row[4 + b] = (uint8_t)(scale[b] | (scale[b + 4] >> 4) << 6);
        row[8 + b] = (uint8_t)(min[b] | (min[b + 4] >> 4) << 6);
        row[12 + b] = (uint8_t)((scale[b + 4] & 15) | (min[b + 4] & 15) << 4);
    }
    for (int b = 0; b < 8; b++)
        for (int i = 0; i < 32; i++) {
            int u = (i + b) % 16;
            row[16 + b / 2 * 32 + i] |= (uint8_t)(b % 2 ? u << 4 : u);
            want[b * 32 + i] = 0.5f * (float)(scale[b] * u) - (float)min[b];
        }
    expect_row(row, GGUF_Q4_K, want, 256);
}

/* 6-bit weight w of half s (128 weights): w = 32 c + i, c = 0..3; low nibbles in byte 64 s + 32 (c % 2) + i, in its
   high half when c >= 2; the top 2 bits in byte 32 s + i at 2 c; one int8 scale per 16. */
static void test_q6_k(void **state) {
    (void)state;
    uint8_t row[210] = {0};
    float want[256];
    put16(row + 208, F16_HALF);
    for (int w = 0; w < 256; w++) {
        int s = w / 128, c = w % 128 / 32, i = w % 32, u = (w * 37 + 11) % 64, scale = w / 16 * 17 - 128;
        row[64 * s + 32 * (c % 2) + i] |= (uint8_t)((u & 15) << (c >= 2 ? 4 : 0));
        row[128 + 32 * s + i] |= (uint8_t)((u >> 4) << 2 * c);
        row[192 + w / 16] = (uint8_t)scale;
        want[w] = 0.5f * (float)scale * (float)(u - 32);
    }
    expect_row(row, GGUF_Q6_K, want, 256);
}

/* ---- the product ---- */

static uint32_t seed = 1;
static uint32_t random_u32(void) {
    seed ^= seed << 13, seed ^= seed >> 17, seed ^= seed << 5;
    return seed;
}
static float random_real(void) { return (float)(int32_t)random_u32() * 0x1p-31f; } /* [-1, 1) */

/* Scales are +-[2^-7, 2^-6), minima +-[2^-3, 2^-2) and, of Q4_K, 63 times its dmin of at most 2^-8. */
enum { SCALE_BITS = 0x2000, MIN_BITS = 0x3000, DMIN_BITS = 0x1800 };
static const double min_most = 0.25;

static void random_half(uint8_t *p, uint32_t bits) { put16(p, (int)(bits | (random_u32() & 0x83ff))); }

static void random_block(uint8_t *p, int type, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) p[i] = (uint8_t)(random_u32() >> 11);
    if (type == GGUF_F32) memcpy(p, &(float){random_real()}, 4);
    else if (type == GGUF_F16) random_half(p, SCALE_BITS);
    else if (type == GGUF_BF16) put16(p, (int)(0x3c00u | (random_u32() & 0x83ff)));
    else random_half(type == GGUF_Q6_K ? p + 208 : p, type == GGUF_Q6_K ? DMIN_BITS : SCALE_BITS);
    if (type == GGUF_Q4_1 || type == GGUF_Q5_1) random_half(p + 2, MIN_BITS);
    if (type == GGUF_Q4_K) random_half(p, DMIN_BITS), random_half(p + 2, DMIN_BITS);
}

typedef struct {
    quant_mat m;
    void *data, *packed, *vec_memory;
    float *x, *y;
    quant_vec v;
} product;

static product product_make(int type, int64_t rows, int64_t cols) {
    product p = {.m = {.type = type, .rows = rows, .cols = cols}};
    size_t row_bytes = gguf_row_bytes(type, cols), block_bytes = 0;
    for (int64_t block = 1; !block_bytes; block *= 2) block_bytes = gguf_row_bytes(type, block);
    p.data = malloc((size_t)rows * row_bytes);
    for (size_t at = 0; at < (size_t)rows * row_bytes; at += block_bytes)
        random_block((uint8_t *)p.data + at, type, block_bytes);
    p.m.data = p.data;
    size_t packed_bytes = quant_packed_bytes(&p.m);
    if (packed_bytes) {
        p.packed = aligned_alloc(64, packed_bytes);
        for (int i = 0; i < 3; i++) quant_pack(p.packed, &p.m, i, 3);
        p.m.packed = p.packed;
    }
    p.x = malloc((size_t)cols * sizeof *p.x);
    p.y = malloc((size_t)rows * sizeof *p.y);
    for (int64_t i = 0; i < cols; i++) p.x[i] = random_real() * (i % 64 < 32 ? 1.0f : 30.0f);
    p.vec_memory = malloc(quant_vec_bytes(cols) + 1);
    quant_vec_set(&p.v, p.vec_memory, p.x, cols);
    return p;
}

static void product_free(product *p) {
    free(p->data);
    free(p->packed);
    free(p->vec_memory);
    free(p->x);
    free(p->y);
}

/* The bound of quant.h; f32 rounding is taken as 2^-24 per block and operation on what is added up. */
static void expect_row_product(const product *p, int64_t r) {
    int type = p->m.type, is_float = !p->packed;
    int has_min = type == GGUF_Q4_1 || type == GGUF_Q5_1 || type == GGUF_Q4_K;
    int64_t n = p->m.cols;
    float *w = malloc((size_t)n * sizeof *w);
    quant_row_to_f32(w, (uint8_t *)p->data + (size_t)r * gguf_row_bytes(type, n), type, n);
    double want = 0, bound = 0, size = 0;
    for (int64_t b = 0; b < n; b += 32) {
        double dx = 0;
        for (int64_t i = b; i < n && i < b + 32; i++) dx = fmax(dx, fabs((double)p->x[i]) / 127);
        for (int64_t i = b; i < n && i < b + 32; i++) {
            want += (double)w[i] * (double)p->x[i];
            if (!is_float) bound += dx / 2 * fabs((double)w[i]);
            size += (fabs((double)w[i]) + 2 * min_most * has_min) * (fabs((double)p->x[i]) + dx);
        }
    }
    bound += size * ldexp((double)(n / 32 + 8), -24);
    if (type == GGUF_Q4_K || type == GGUF_Q6_K) bound += size * ldexp(1, -11);
    if (!(fabs((double)p->y[r] - want) <= bound))
        fail_msg("%s row %d: %g, not %g within %g", gguf_type_name(type), (int)r, (double)p->y[r], want, bound);
    free(w);
}

static const int types[] = {GGUF_F32,  GGUF_F16,  GGUF_BF16, GGUF_Q4_0, GGUF_Q4_1,
                            GGUF_Q5_0, GGUF_Q5_1, GGUF_Q8_0, GGUF_Q4_K, GGUF_Q6_K};
enum { N_TYPES = sizeof types / sizeof *types };

static void check_level(int level) {
    quant_simd_limit(level);
    if (quant_simd_level() != level) skip();
    for (int t = 0; t < N_TYPES; t++)
        for (int64_t rows = 1; rows <= 49; rows += 12) { /* 1, 13, 25, 37, 49: partial groups, too */
            int64_t cols = (types[t] == GGUF_Q4_K || types[t] == GGUF_Q6_K) ? 512 : t < 3 ? 607 : 576;
            product p = product_make(types[t], rows, cols);
            for (int i = 2; i >= 0; i--) quant_matvec(p.y, &p.m, &p.v, i, 3);
            for (int64_t r = 0; r < rows; r++) expect_row_product(&p, r);
            product_free(&p);
        }
    quant_simd_limit(2);
}

static void test_scalar(void **state) { (void)state; check_level(0); }
static void test_avx2(void **state) { (void)state; check_level(1); }
static void test_vnni(void **state) { (void)state; check_level(2); }

/* Integer sums are exact and f32 sums run in the same order: levels differ by fused rounding only. */
static void test_levels_agree(void **state) {
    (void)state;
    quant_simd_limit(2);
    int best = quant_simd_level();
    for (int t = 3; t < N_TYPES; t++) {
        product p = product_make(types[t], 16, 512);
        float y[3][16];
        for (int level = 0; level <= best; level++) {
            quant_simd_limit(level);
            quant_matvec(y[level], &p.m, &p.v, 0, 1);
        }
        for (int level = 1; level <= best; level++)
            for (int r = 0; r < 16; r++) assert_true(fabsf(y[level][r] - y[0][r]) <= 1e-3f);
        product_free(&p);
    }
    quant_simd_limit(2);
}

/* The extreme of every product, where 16-bit pair sums would saturate: w = -128 or 127, q = +-127. */
static void test_extreme_q8(void **state) {
    (void)state;
    uint8_t row[34];
    float x[32], y;
    quant_mat m = {.type = GGUF_Q8_0, .rows = 1, .cols = 32, .data = row};
    void *packed = aligned_alloc(64, quant_packed_bytes(&m));
    uint8_t memory[64];
    assert_true(quant_vec_bytes(32) <= sizeof memory);
    m.packed = packed;
    put16(row, F16_ONE);
    for (int level = 0; level <= 2; level++) {
        quant_simd_limit(level);
        for (int sign = -1; sign <= 1; sign += 2) {
            quant_vec v;
            for (int i = 0; i < 32; i++) row[2 + i] = sign < 0 ? 0x80 : 0x7f, x[i] = i % 4 < 2 ? 127 : -127;
            for (int i = 0; i < 4; i++) x[i] = 127;
            quant_pack(packed, &m, 0, 1);
            quant_vec_set(&v, memory, x, 32);
            quant_matvec(&y, &m, &v, 0, 1);
            assert_true(y == (sign < 0 ? -128.0f : 127.0f) * 127 * 4);
        }
    }
    quant_simd_limit(2);
    free(packed);
}

/* Bad activations poison the result, as in f32, and zeros and the tiniest values do not. */
static void test_odd_activations(void **state) {
    (void)state;
    static const float odd[] = {NAN, INFINITY, -INFINITY, 0, 1e-38f, 1e-45f};
    for (int level = 0; level <= 2; level++)
        for (int k = 0; k < 6; k++) {
            product p = product_make(GGUF_Q4_1, 16, 64);
            quant_simd_limit(level);
            for (int i = 0; i < 64; i++) p.x[i] = i == 40 ? odd[k] : 0;
            quant_vec_set(&p.v, p.vec_memory, p.x, 64);
            quant_matvec(p.y, &p.m, &p.v, 0, 1);
            for (int r = 0; r < 16; r++) assert_true(k < 3 ? isnan(p.y[r]) : fabsf(p.y[r]) <= 1e-30f * 64);
            product_free(&p);
        }
    quant_simd_limit(2);
}

/* Each share writes its own rows and no others; together they write all. */
static void test_shares(void **state) {
    (void)state;
    product p = product_make(GGUF_Q8_0, 40, 64);
    for (int nth = 1; nth <= 5; nth++) {
        int written[40] = {0};
        for (int ith = 0; ith < nth; ith++) {
            for (int r = 0; r < 40; r++) p.y[r] = -12345;
            quant_matvec(p.y, &p.m, &p.v, ith, nth);
            for (int r = 0; r < 40; r++) written[r] += p.y[r] != -12345;
        }
        for (int r = 0; r < 40; r++) assert_int_equal(written[r], 1);
    }
    product_free(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_halves),          cmocka_unit_test(test_blocks_of_32), cmocka_unit_test(test_q4_k),
        cmocka_unit_test(test_q6_k),            cmocka_unit_test(test_scalar),       cmocka_unit_test(test_avx2),
        cmocka_unit_test(test_vnni),            cmocka_unit_test(test_levels_agree), cmocka_unit_test(test_extreme_q8),
        cmocka_unit_test(test_odd_activations), cmocka_unit_test(test_shares),
    };
    return cmocka_run_group_tests_name("quant", tests, NULL, NULL);
}
