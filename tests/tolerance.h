/* How far results may be from the oracle, in units of 2^-24. Inputs are rounded to their types before both see them, so
   f32 arithmetic alone makes the difference, whatever the type of the packed keys. */
#ifndef TOLERANCE_H
#define TOLERANCE_H

#include "../distance_kv.h"
#include <math.h>

/* |lse - oracle| <= lse * sqrt(d) * magnitude + sum + |lse|     magnitude: the greatest scale * sum |q_i k_i|
   |out - oracle| <= max |v| * (out * sqrt(d) * magnitude + sum) */
typedef struct tolerance { double lse, out, sum; } tolerance;

/* lse: q * scale is rounded once, then d products are added one after the other; d roundings of either sign make
        sqrt(d) times one (measured 0.5 at d = 64). One key may own the row: its error is the row's.
   out: the same errors, but only their differences between keys move an output (measured 0.08).
   sum: exp is good to 2 units; sums over keys restart at every tile, so that thousands of keys lose no more. */
static const tolerance tolerances[5][DKV_SIMD_COUNT] = {
    /* scalar          avx2            avx512   lanes are tokens: every level adds in the same order */
    {{1, 0.25, 6}, {1, 0.25, 6}, {1, 0.25, 6}}, /* f32 */
    {{1, 0.25, 6}, {1, 0.25, 6}, {1, 0.25, 6}}, /* f16, widened exactly */
    {{1, 0.25, 6}, {1, 0.25, 6}, {1, 0.25, 6}}, /* bf16, widened exactly */
    {{1, 0.25, 6}, {1, 0.25, 6}, {1, 0.25, 6}}, /* i8: the oracle has what unpacking gives; scales round once more */
    {{1, 0.25, 6}, {1, 0.25, 6}, {1, 0.25, 6}}, /* fp8, likewise */
};

enum { tolerance_exp = 4 }; /* of e^x / (1 + e^x), in units: 2 ulp of exp, measured 3 */

static inline double tolerance_lse(tolerance t, int d, double magnitude, double lse) {
    return ldexp(t.lse * sqrt(d) * magnitude + t.sum + fabs(lse), -24);
}

static inline double tolerance_out(tolerance t, int d, double magnitude, double v_max) {
    return v_max * ldexp(t.out * sqrt(d) * magnitude + t.sum, -24);
}

/* ---- on a GPU ----

   Tensor cores multiply 16-bit numbers exactly and add in f32. So two roundings more than on the CPU show:
   P   probabilities are rounded to the type of V in the multiplication (bf16, or f16 for f16, i8 and fp8) before they
       meet V: each by at most u_p = 2^-8 or 2^-11 of itself, either way and independently, so an output moves by about
       0.4 u_p * spread, spread = sqrt(sum of p_j^2 v_j^2); 3 u_p are seven of those. f16 probabilities below 2^-14 of
       the largest lose up to 2^-25, independently.
   q   for i8 and fp8, q times K's channel scales is rounded to f16, u_q = 2^-11: a logit is a sum of d such products
       and moves by about 0.4 u_q sqrt(sum of (q_i k_i)^2) < 0.7 u_q magnitude / sqrt(d); 4 are six of those. As it
       differs from key to key independently of v, an output moves by that times spread.
   The rest is f32: sums of products in an order of the hardware's choice (4 where the CPU has 1), ex2.approx (2 ulp)
   with its argument rounded, and partial sums of tiles and splits: 32 units. */
static inline double tolerance_gpu_logit(dkv_type type, int d, double magnitude) {
    double u_q = type == DKV_I8 || type == DKV_FP8 ? ldexp(1, -11) : 0;
    return magnitude * (4 * u_q / sqrt(d) + ldexp(4 * sqrt(d), -24));
}

static inline double tolerance_gpu_lse(dkv_type type, int d, double magnitude, double lse) {
    return tolerance_gpu_logit(type, d, magnitude) + ldexp(32 + fabs(lse), -24);
}

/* spread of this output; keys that its row sees. */
static inline double tolerance_gpu_out(dkv_type type, int d, double magnitude, double v_max, double spread,
                                       int64_t keys) {
    double u_p = ldexp(1, type == DKV_BF16 ? -8 : -11), tiny = type == DKV_BF16 ? 0 : ldexp(sqrt((double)keys), -23);
    return 3 * (u_p + tolerance_gpu_logit(type, d, magnitude)) * spread +
           v_max * (tiny + ldexp(32 + sqrt(d) * magnitude, -24));
}

/* What packing x may change in a channel whose largest magnitude is max: the header's bounds, scales rounded to f32. */
static inline double tolerance_pack(dkv_type type, double x, double max) {
    double bound = type == DKV_I8 ? max / 127 / 2 : type == DKV_FP8 ? fmax(fabs(x) / 16, max / 448 / 1024) : 0;
    return bound + (type == DKV_I8 || type == DKV_FP8 ? ldexp(max, -22) : 0);
}

/* What storing x in the output's type may add: half a unit in the last place, or half the smallest subnormal. */
static inline double tolerance_store(dkv_type type, double x) {
    return type == DKV_F32 ? 0 : type == DKV_F16 ? ldexp(fabs(x), -11) + ldexp(1, -25) : ldexp(fabs(x), -8);
}

#endif
