/* The oracle: the method's formulas position by position, in double precision over dense masks. It shares no function
   with distance_kv.h; it only reads the structs dkv_tensor and dkv_type. Slow and plain on purpose. */
#ifndef ORACLE_H
#define ORACLE_H

#include "../distance_kv.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- element types ------------------------------------------------------- */

typedef struct oracle_format { int exponent, mantissa, bias; double max; } oracle_format; /* of a small float */

static inline oracle_format oracle_format_of(dkv_type type) {
    return type == DKV_F16 ? (oracle_format){5, 10, 15, 65504} : type == DKV_FP8 ? (oracle_format){4, 3, 7, 448}
                           : (oracle_format){8, 7, 127, ldexp(255, 120)};
}

/* The nearest value of the type, ties to even. f16 and bf16 overflow to infinity, i8 and fp8 to their largest. */
static inline double oracle_round(dkv_type type, double x) {
    if (type == DKV_F32) return (double)(float)x;
    if (type == DKV_I8) return isnan(x) ? 0 : fmax(-127, fmin(127, rint(x))) + 0.0; /* there is no -0 */
    oracle_format f = oracle_format_of(type);
    if (x == 0 || isnan(x)) return x;
    int e;
    frexp(x, &e);
    double ulp = ldexp(1, (e < 2 - f.bias ? 2 - f.bias : e) - 1 - f.mantissa), r = isinf(x) ? x : rint(x / ulp) * ulp;
    return fabs(r) <= f.max ? r : copysign(type == DKV_FP8 ? f.max : (double)INFINITY, x);
}

/* fp8 e4m3fn has no infinity, and NaN only where all bits are one. */
static inline double oracle_decode(dkv_type type, unsigned bits) {
    oracle_format f = oracle_format_of(type);
    int e = (int)(bits >> f.mantissa) & ((1 << f.exponent) - 1), m = (int)bits & ((1 << f.mantissa) - 1);
    int top = e == (1 << f.exponent) - 1, nan = top && (type == DKV_FP8 ? m == 7 : m != 0);
    double a = nan ? (double)NAN : top && type != DKV_FP8 ? (double)INFINITY
             : e ? ldexp((1 << f.mantissa) + m, e - f.bias - f.mantissa) : ldexp(m, 1 - f.bias - f.mantissa);
    return bits >> (f.exponent + f.mantissa) & 1 ? -a : a;
}

/* x must be a value of the type. */
static inline unsigned oracle_encode(dkv_type type, double x) {
    oracle_format f = oracle_format_of(type);
    int e;
    double a = fabs(x);
    frexp(a, &e);
    unsigned ones = (1u << (f.exponent + f.mantissa)) - 1, fraction = (1u << f.mantissa) - 1;
    unsigned bits = isnan(x) ? ones : isinf(x) ? ones - fraction
                  : a < ldexp(1, 1 - f.bias) ? (unsigned)ldexp(a, f.bias - 1 + f.mantissa)
                  : (unsigned)(e - 1 + f.bias) << f.mantissa | ((unsigned)ldexp(a, f.mantissa + 1 - e) & fraction);
    return bits | (unsigned)(signbit(x) != 0) << (f.exponent + f.mantissa);
}

static inline int64_t oracle_bytes(dkv_type type) {
    return type == DKV_F32 ? 4 : type == DKV_F16 || type == DKV_BF16 ? 2 : 1;
}

static inline double oracle_load(const void *src, dkv_type type) {
    float f;
    uint16_t half;
    int8_t byte;
    if (type == DKV_F32) return memcpy(&f, src, 4), (double)f;
    if (oracle_bytes(type) == 2) return memcpy(&half, src, 2), oracle_decode(type, half);
    memcpy(&byte, src, 1);
    return type == DKV_I8 ? byte : oracle_decode(type, (uint8_t)byte);
}

static inline void oracle_store(void *dst, dkv_type type, double x) {
    float f = (float)x;
    uint16_t half;
    if (type == DKV_F32) {
        memcpy(dst, &f, 4);
    } else if (oracle_bytes(type) == 2) {
        half = (uint16_t)oracle_encode(type, x);
        memcpy(dst, &half, 2);
    } else {
        *(uint8_t *)dst = (uint8_t)(type == DKV_I8 ? (int)x : (int)oracle_encode(type, x));
    }
}

static inline char *oracle_at(const dkv_tensor *t, int64_t token, int64_t head, int64_t i) {
    return (char *)t->data + token * t->stride_token + head * t->stride_head + i * t->stride_dim;
}

static inline double oracle_get(const dkv_tensor *t, int64_t token, int64_t head, int64_t i) {
    return oracle_load(oracle_at(t, token, head, i), t->type);
}

static inline void oracle_put(const dkv_tensor *t, int64_t token, int64_t head, int64_t i, double x) {
    oracle_store(oracle_at(t, token, head, i), t->type, oracle_round(t->type, x));
}

/* zlib's CRC32, bit by bit. */
static inline uint32_t oracle_crc32(const unsigned char *data, size_t n) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < n; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
    }
    return ~crc;
}

/* ---- which positions stay ------------------------------------------------ */

typedef struct oracle_pattern {
    int L, H, Hkv, D;
    int64_t W, S, R;
    unsigned char *M; /* [L][H][D], 0 or 1 */
} oracle_pattern;

/* -1 for sink and recent. */
static inline int64_t oracle_bin(const oracle_pattern *o, int64_t T_c, int64_t i) {
    return i < o->S || i >= T_c - o->R ? -1 : (T_c - o->R - 1 - i) / o->W;
}

/* Keep_kv(l, g, i): an OR over all query heads h with h / G = g. */
static inline int oracle_keep(const oracle_pattern *o, int64_t T_c, dkv_beyond beyond, int l, int g, int64_t i) {
    int64_t b = oracle_bin(o, T_c, i);
    if (b < 0) return 1;
    if (b >= o->D && beyond == DKV_BEYOND_KEEP) return 1;
    if (b >= o->D && beyond == DKV_BEYOND_DROP) return 0;
    if (b >= o->D) b = o->D - 1;
    int any = 0;
    for (int h = 0; h < o->H; h++)
        if (h / (o->H / o->Hkv) == g) any |= o->M[((int64_t)l * o->H + h) * o->D + b];
    return any;
}

/* ---- attention ----------------------------------------------------------- */

typedef struct oracle_attention {
    int H, Hkv, d_k, d_v;
    int64_t N_q, T_c, n_tail;
    const double *q;               /* [N_q][H][d_k] */
    const double *k, *v;           /* [T_c][Hkv][d] */
    const double *tail_k, *tail_v; /* [n_tail][Hkv][d] */
    const unsigned char *keep;     /* [Hkv][T_c] */
    double scale, softcap;         /* softcap 0: off */
    const float *sink;             /* NULL or [H] */
} oracle_attention;

static inline double oracle_logit(const oracle_attention *o, const double *q, const double *k, double *magnitude) {
    double s = 0, a = 0;
    for (int i = 0; i < o->d_k; i++) {
        s += q[i] * k[i];
        a += fabs(q[i] * k[i]);
    }
    if (a * o->scale > *magnitude) *magnitude = a * o->scale;
    s *= o->scale;
    return o->softcap > 0 ? o->softcap * tanh(s / o->softcap) : s;
}

/* One row: s[T_c + n_tail] is scratch, -inf where masked. Returns the LSE; with no key, -inf or the sink's logit. */
static inline double oracle_row(const oracle_attention *o, int64_t n, int h, double *s, double *out,
                                double *magnitude) {
    int g = h / (o->H / o->Hkv);
    int64_t T = o->T_c + o->n_tail;
    double m = o->sink ? (double)o->sink[h] : -(double)INFINITY, sum = 0;
    for (int64_t j = 0; j < T; j++) {
        int64_t t = j - o->T_c;
        int seen = t < 0 ? o->keep[g * o->T_c + j] : t < o->n_tail - o->N_q + 1 + n;
        const double *k = (t < 0 ? o->k + j * o->Hkv * o->d_k : o->tail_k + t * o->Hkv * o->d_k) + g * o->d_k;
        s[j] = seen ? oracle_logit(o, o->q + (n * o->H + h) * o->d_k, k, magnitude) : -(double)INFINITY;
        m = fmax(m, s[j]);
    }
    for (int i = 0; i < o->d_v; i++) out[i] = 0;
    if (isinf(m)) return m;
    if (o->sink) sum = exp((double)o->sink[h] - m);
    for (int64_t j = 0; j < T; j++) sum += exp(s[j] - m);
    for (int64_t j = 0; j < T; j++) {
        if (isinf(s[j])) continue;
        double p = exp(s[j] - m) / sum;
        int64_t t = j - o->T_c;
        const double *v = (t < 0 ? o->v + j * o->Hkv * o->d_v : o->tail_v + t * o->Hkv * o->d_v) + g * o->d_v;
        for (int i = 0; i < o->d_v; i++) out[i] += p * v[i];
    }
    return m + log(sum);
}

/* out [N_q][H][d_v], lse [N_q][H]. Returns the greatest scale * sum |q_i k_i|, the unit of a logit's rounding error. */
static inline double oracle_attend(const oracle_attention *o, double *out, double *lse) {
    double magnitude = 0, *s = malloc(sizeof(double) * (size_t)(o->T_c + o->n_tail + 1));
    for (int64_t n = 0; n < o->N_q; n++)
        for (int h = 0; h < o->H; h++)
            lse[n * o->H + h] = oracle_row(o, n, h, s, out + (n * o->H + h) * o->d_v, &magnitude);
    free(s);
    return magnitude;
}

#endif
