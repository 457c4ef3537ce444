/* quant.h: GGUF weight types to f32, and the matrix-vector product of decoding, y = W x, which reads W once from its
   quantised form.

   Packed form of a quantised matrix (bf16, f16 and f32 stay as the file has them): 16 rows interleaved, so that one
   vector register holds the same 4 columns of 16 rows and no sum runs across lanes. For each 16 rows, for each 32
   columns:
       f16 scale[16]   f16 second[16]   u8 quants
   second is the minimum of Q4_1, Q5_1, Q4_K, the scale of the upper 16 columns of Q6_K, and absent elsewhere. Quants
   of 4-bit types are [4][16][4], the low nibbles columns 4j..4j+3, the high ones 16 + 4j..; of all others [8][16][4]
   bytes, so that 5- and 6-bit weights take 8 bits. Rows are padded with zeros to a multiple of 16.

   Error: x is rounded to int8 with one scale per 32 columns, dx = max|x| / 127, so
       |y - W x| <= sum over blocks of dx/2 * sum|w|  +  f32 rounding.
   Q4_K and Q6_K scales are products rounded to f16 here: 2^-11 of sum|w||x| more (sum(|w| + 2|min|)|x| for Q4_K). */
#ifndef QUANT_H
#define QUANT_H

#include <stddef.h>
#include <stdint.h>

enum { QUANT_BLOCK = 32, QUANT_ROWS = 16 };

/* y[n] = the row; n is a multiple of the type's block, row has gguf_row_bytes(type, n) bytes. */
void quant_row_to_f32(float *y, const void *row, int type, int64_t n);

typedef struct {
    int type;
    int64_t rows, cols;    /* cols: a multiple of the type's block */
    const void *data;      /* as in the file: [rows][gguf_row_bytes(type, cols)] */
    const uint8_t *packed; /* [quant_packed_bytes], 64-byte aligned; NULL for f32, f16, bf16 */
} quant_mat;

size_t quant_packed_bytes(const quant_mat *m); /* 0 for f32, f16, bf16; a multiple of 64 */
void quant_pack(void *packed, const quant_mat *m, int ith, int nth); /* the ith of nth shares of the rows */
size_t quant_read_bytes(const quant_mat *m);   /* what one matvec reads of W */

/* An activation vector, kept in f32 and in 8 bits. */
typedef struct {
    const float *x; /* [n], the caller's */
    int64_t n;
    int8_t *q;      /* [n / 32][32] */
    float *d;       /* [n / 32] */
    int32_t *sum;   /* [n / 32][2] of q, over 16 columns each */
} quant_vec;

size_t quant_vec_bytes(int64_t n);
void quant_vec_set(quant_vec *v, void *memory, const float *x, int64_t n); /* memory: [quant_vec_bytes(n)] */

/* y[rows] = W x, the ith of nth shares of the rows: other rows are not touched. */
void quant_matvec(float *y, const quant_mat *m, const quant_vec *x, int ith, int nth);

/* The level in use: 0 scalar, 1 AVX2 + FMA + F16C, 2 AVX-512 VNNI. The limit is for tests and benches. */
int quant_simd_level(void);
void quant_simd_limit(int level);

#endif
