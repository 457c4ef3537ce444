/* Gated attention's problems and their oracle: outputs and gradients in dense double precision, straight from the
   method. Used by the CPU's tests, which check the oracle's gradients too, and by the GPU's. */
#ifndef GATED_H
#define GATED_H

#include "test.h"
#include "tolerance.h"

enum { MAX_SUFFIXES = 5 };

/* One context with gates and suffixes. The second part is filled by build; results of the oracle begin with want. */
typedef struct problem {
    int H, Hkv, d_k, d_v;
    int64_t T_c, W, S, R, D;
    int n_suffix;
    int64_t N_q[MAX_SUFFIXES];
    int through;                  /* straight-through: with open */
    dkv_type type, x_type;        /* of the context, of the suffixes' inputs */
    int layout, strided;
    double deviation;             /* of q; 0: 1 */
    float scale;
    int ones;                     /* component 0 of every key is 1, so that dq[0] is scale times the sum of dS */

    double *k, *v;                /* [T_c][Hkv][d] */
    double *q, *sk, *sv, *d_out;  /* of all suffixes: [all N_q][H][d], [all N_q][Hkv][d] */
    float *ln_u;
    unsigned char *open;
    int64_t all;                  /* queries */
    dkv_plan plan;
    dkv_packed packed;
    dkv_suffix x[MAX_SUFFIXES];
    dkv_gated c;
    size_t ws_bytes;
    void *ws;
} problem;

static const problem plain = {.H = 6, .Hkv = 2, .d_k = 32, .d_v = 48, .T_c = 500, .W = 96, .S = 50, .R = 130, .D = 4,
                              .n_suffix = 3, .N_q = {5, 1, 17}, .through = 1, .strided = 1};

/* What the method computes, and for each number the sum of its terms' magnitudes, the unit of its rounding. */
typedef struct result { double *x, *size; } result;
typedef struct results {
    result out, out_relaxed, lse, lse_relaxed, dq, dk, dv, d_ln_u, abs_ds; /* abs_ds: sum |dS| of a row */
    double magnitude;
} results;

static inline result new_result(int64_t n) {
    result r = {guarded((size_t)n * 8, 8), guarded((size_t)n * 8, 8)};
    memset(r.x, 0, (size_t)n * 8);
    memset(r.size, 0, (size_t)n * 8);
    return r;
}

static inline void add(result *r, int64_t i, double x, double size) {
    r->x[i] += x;
    r->size[i] += fabs(size);
}

/* ---- the oracle ---------------------------------------------------------- */

typedef struct inputs { double *q, *sk, *sv, *ln_u; } inputs;

static inline int64_t bin_of(const problem *p, int64_t j) {
    return j < p->S || j >= p->T_c - p->R ? -1 : (p->T_c - p->R - 1 - j) / p->W;
}

/* Key or value j of the suffix that begins at query first of all: the context's, then its own. */
static const double *key_of(const problem *p, int64_t first, int64_t j, int g, const double *context,
                            const double *own, int d) {
    return j < p->T_c ? context + (j * p->Hkv + g) * d : own + ((first + j - p->T_c) * p->Hkv + g) * d;
}

/* Logits of one row: s relaxed, b open, -inf where closed. Without straight-through there is one of them, s. */
static inline void row_logits(const problem *p, const inputs *in, int64_t first, int64_t i, int h, double *s, double *b,
                       double *magnitude) {
    int g = h / (p->H / p->Hkv);
    double scale = p->scale > 0 ? (double)p->scale : 1 / sqrt(p->d_k);
    for (int64_t j = 0; j <= p->T_c + i; j++) {
        const double *k = key_of(p, first, j, g, p->k, in->sk, p->d_k);
        int64_t bin = j < p->T_c ? bin_of(p, j) : -1;
        double x = 0, size = 0;
        for (int e = 0; e < p->d_k; e++) {
            double term = scale * in->q[((first + i) * p->H + h) * p->d_k + e] * k[e];
            x += term, size += fabs(term);
        }
        if (size > *magnitude) *magnitude = size;
        double ln = bin < 0 ? 0 : in->ln_u[g * p->D + bin];
        s[j] = ln < -126 * log(2) ? -(double)INFINITY : x + ln;
        b[j] = !p->through ? s[j] : bin < 0 || p->open[g * p->D + bin] ? x : -(double)INFINITY;
    }
}

static inline double softmax(double *s, int64_t n) {
    double top = -(double)INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) top = fmax(top, s[j]);
    for (int64_t j = 0; j < n; j++) sum += exp(s[j] - top);
    for (int64_t j = 0; j < n; j++) s[j] = exp(s[j] - top) / sum;
    return top + log(sum);
}

static inline void gated_row(const problem *p, const inputs *in, int64_t first, int64_t i, int h, double *s, double *b,
                       results *r, int gradients) {
    int g = h / (p->H / p->Hkv);
    int64_t row = (first + i) * p->H + h, n = p->T_c + i + 1;
    double scale = p->scale > 0 ? (double)p->scale : 1 / sqrt(p->d_k), delta = 0, delta_size = 0;
    row_logits(p, in, first, i, h, s, b, &r->magnitude);
    r->lse_relaxed.x[row] = softmax(s, n);
    r->lse.x[row] = softmax(b, n);
    for (int64_t j = 0; j < n; j++)
        for (int e = 0; e < p->d_v; e++) {
            double v = key_of(p, first, j, g, p->v, in->sv, p->d_v)[e];
            add(&r->out_relaxed, row * p->d_v + e, s[j] * v, s[j] * v);
            add(&r->out, row * p->d_v + e, b[j] * v, b[j] * v);
        }
    if (!gradients) return;
    for (int e = 0; e < p->d_v; e++) {
        delta += r->out_relaxed.x[row * p->d_v + e] * p->d_out[row * p->d_v + e];
        delta_size += fabs(r->out_relaxed.size[row * p->d_v + e] * p->d_out[row * p->d_v + e]);
    }
    for (int64_t j = 0; j < n; j++) {
        const double *k = key_of(p, first, j, g, p->k, in->sk, p->d_k);
        const double *v = key_of(p, first, j, g, p->v, in->sv, p->d_v);
        int64_t bin = j < p->T_c ? bin_of(p, j) : -1, own = ((first + j - p->T_c) * p->Hkv + g);
        double dp = 0, dp_size = 0;
        for (int e = 0; e < p->d_v; e++) {
            dp += p->d_out[row * p->d_v + e] * v[e];
            dp_size += fabs(p->d_out[row * p->d_v + e] * v[e]);
        }
        double ds = s[j] * (dp - delta), size = s[j] * (dp_size + delta_size);
        r->abs_ds.x[row] += fabs(ds);
        if (bin >= 0) add(&r->d_ln_u, g * p->D + bin, ds, size);
        for (int e = 0; e < p->d_k; e++) {
            double x = in->q[row * p->d_k + e];
            add(&r->dq, row * p->d_k + e, scale * ds * k[e], scale * size * k[e]);
            if (j >= p->T_c) add(&r->dk, own * p->d_k + e, scale * ds * x, scale * size * x);
        }
        for (int e = 0; e < p->d_v && j >= p->T_c; e++) {
            double x = p->d_out[row * p->d_v + e];
            add(&r->dv, own * p->d_v + e, b[j] * x, b[j] * x);
        }
    }
}

static inline results gated_oracle(const problem *p, const inputs *in, int gradients) {
    int64_t rows = p->all * p->H, keys = p->all * p->Hkv, first = 0, most = 0;
    results r = {new_result(rows * p->d_v), new_result(rows * p->d_v), new_result(rows), new_result(rows),
                 new_result(rows * p->d_k), new_result(keys * p->d_k), new_result(keys * p->d_v),
                 new_result(p->Hkv * p->D), new_result(rows), 0};
    for (int i = 0; i < p->n_suffix; i++) most = p->N_q[i] > most ? p->N_q[i] : most;
    double *s = guarded((size_t)(p->T_c + most) * 8, 8), *b = guarded((size_t)(p->T_c + most) * 8, 8);
    for (int x = 0; x < p->n_suffix; first += p->N_q[x++])
        for (int64_t i = 0; i < p->N_q[x]; i++)
            for (int h = 0; h < p->H; h++) gated_row(p, in, first, i, h, s, b, &r, gradients);
    return r;
}

static inline inputs inputs_of(const problem *p) {
    inputs in = {p->q, p->sk, p->sv, guarded((size_t)(p->Hkv * p->D) * 8, 8)};
    for (int64_t i = 0; i < p->Hkv * p->D; i++) in.ln_u[i] = (double)p->ln_u[i];
    return in;
}

/* ---- problems ------------------------------------------------------------ */

static inline dkv_tensor filled(const problem *p, const double *x, int64_t n, int heads, int d) {
    dkv_tensor t = new_tensor(p->layout, p->x_type, n, heads, d);
    fill_tensor(&t, x, n, heads, d);
    return t;
}

/* Gates closed (-inf), tiny, inside, and one; open bits of their own. */
static inline void random_gates(problem *p) {
    static const double u[] = {0, 1e-6, 0.1, 0.5, 0.9, 1};
    p->ln_u = guarded((size_t)(p->Hkv * p->D) * 4, 4);
    p->open = guarded((size_t)(p->Hkv * p->D), 1);
    for (int64_t i = 0; i < p->Hkv * p->D; i++) {
        p->ln_u[i] = (float)log(u[rnd_below(COUNT(u))]);
        p->open[i] = rnd() & 1;
    }
}

static inline void new_suffixes(problem *p) {
    int64_t first = 0;
    for (int i = 0; i < p->n_suffix; first += p->N_q[i++]) {
        int64_t n = p->N_q[i];
        dkv_type f32 = DKV_F32;
        p->x[i] = (dkv_suffix){
            .N_q = n, .q = filled(p, p->q + first * p->H * p->d_k, n, p->H, p->d_k),
            .k = filled(p, p->sk + first * p->Hkv * p->d_k, n, p->Hkv, p->d_k),
            .v = filled(p, p->sv + first * p->Hkv * p->d_v, n, p->Hkv, p->d_v),
            .d_out = filled(p, p->d_out + first * p->H * p->d_v, n, p->H, p->d_v),
            .out = new_tensor(p->layout, f32, n, p->H, p->d_v), .lse = guarded((size_t)(n * p->H) * 4, 4),
            .dq = new_tensor(p->layout, f32, n, p->H, p->d_k), .dk = new_tensor(p->layout, f32, n, p->Hkv, p->d_k),
            .dv = new_tensor(p->layout, f32, n, p->Hkv, p->d_v)};
        if (!p->through) continue;
        p->x[i].out_relaxed = new_tensor(p->layout, f32, n, p->H, p->d_v);
        p->x[i].lse_relaxed = guarded((size_t)(n * p->H) * 4, 4);
    }
}

/* Random values; ln_u and open stay if the caller made them. p must stay where it is. */
static inline void build(problem *p) {
    dkv_type type = source_type(p->type);
    p->all = 0;
    for (int i = 0; i < p->n_suffix; i++) p->all += p->N_q[i];
    p->k = normal_values(p->T_c * p->Hkv * p->d_k, type, 1);
    p->v = normal_values(p->T_c * p->Hkv * p->d_v, type, 1);
    p->q = normal_values(p->all * p->H * p->d_k, p->x_type, p->deviation > 0 ? p->deviation : 1);
    p->sk = normal_values(p->all * p->Hkv * p->d_k, p->x_type, 1);
    p->sv = normal_values(p->all * p->Hkv * p->d_v, p->x_type, 1);
    p->d_out = normal_values(p->all * p->H * p->d_v, p->x_type, 1);
    for (int64_t i = 0; i < p->T_c * p->Hkv && p->ones; i++) p->k[i * p->d_k] = 1;
    for (int64_t i = 0; i < p->all * p->Hkv && p->ones; i++) p->sk[i * p->d_k] = 1;
    if (!p->ln_u) random_gates(p);
    dkv_tensor k = new_tensor(p->layout, type, p->T_c, p->Hkv, p->d_k);
    dkv_tensor v = new_tensor(p->layout, type, p->T_c, p->Hkv, p->d_v);
    fill_tensor(&k, p->k, p->T_c, p->Hkv, p->d_k);
    fill_tensor(&v, p->v, p->T_c, p->Hkv, p->d_v);
    dkv_segment context = dkv_strided(k, v, p->T_c);
    if (!p->strided) {
        p->plan = plan_of_mask(NULL, 1, p->Hkv, p->T_c);
        p->packed = pack_layer(&p->plan, p->type, p->d_k, p->d_v, &context);
        if (has_scales(p->type)) learn_values(&p->packed, &p->plan, 0, p->k, p->v);
        context = (dkv_segment){.packed = &p->packed};
    }
    new_suffixes(p);
    p->c = (dkv_gated){.H = p->H, .Hkv = p->Hkv, .d_k = p->d_k, .d_v = p->d_v, .T_c = p->T_c, .W = p->W, .S = p->S,
                       .R = p->R, .D = p->D, .scale = p->scale, .context = context, .ln_u = p->ln_u,
                       .open = p->through ? p->open : NULL, .suffix = p->x, .n_suffix = p->n_suffix,
                       .d_ln_u = guarded((size_t)(p->Hkv * p->D) * 4, 4)};
}

/* ---- comparison ---------------------------------------------------------- */

/* Units of 2^-24 of a number's size. A weight errs by its logit and its LSE: sqrt(d) times the greatest logit's terms,
   and |lse|; exponentials, sums over tiles and the products of a gradient add a few. */
static inline double unit_of(const problem *p, const results *r, double lse) {
    tolerance t = tolerances[p->type][dkv_simd_level()];
    return ldexp(2 * t.lse * sqrt(p->d_k) * r->magnitude + fabs(lse) + 16, -24);
}

static inline double most_lse(const problem *p, const results *r) {
    double most = 0;
    for (int64_t i = 0; i < p->all * p->H; i++)
        most = fmax(most, fmax(fabs(r->lse.x[i]), fabs(r->lse_relaxed.x[i])));
    return most;
}

static double worst; /* of all comparisons, as a share of the bound */

static inline void close_to(double got, double want, double bound, const char *what, int64_t at) {
    double off = fabs(got - want);
    if (!(off <= bound)) fail_msg("at %s: %s [%d] is %.9g, not %.9g", test_at, what, (int)at, got, want);
    if (bound > 0) worst = fmax(worst, off / bound);
}

/* Tensor x of suffix i, which holds rows first.. of want [all][heads][d]. */
static inline void check_tensor(const dkv_tensor *t, const result *want, int64_t first, int64_t n, int heads, int d,
                         double unit, const char *what) {
    for (int64_t i = 0; i < n * heads * d; i++) {
        int64_t at = first * heads * d + i;
        double got = oracle_get(t, i / d / heads, i / d % heads, i % d);
        close_to(got, want->x[at], unit * want->size[at] + 1e-37, what, at);
    }
}

/* rounding: of weights and gradients to 16 bits between products, 0 if they are not. */
static inline void check(const problem *p, double rounding) {
    inputs in = inputs_of(p);
    results r = gated_oracle(p, &in, 1);
    double unit = unit_of(p, &r, most_lse(p, &r)) + rounding;
    int64_t first = 0;
    for (int i = 0; i < p->n_suffix; first += p->N_q[i++]) {
        const dkv_suffix *x = &p->x[i];
        check_tensor(&x->out, &r.out, first, x->N_q, p->H, p->d_v, unit, "out");
        check_tensor(&x->dq, &r.dq, first, x->N_q, p->H, p->d_k, unit, "dq");
        check_tensor(&x->dk, &r.dk, first, x->N_q, p->Hkv, p->d_k, unit, "dk");
        check_tensor(&x->dv, &r.dv, first, x->N_q, p->Hkv, p->d_v, unit, "dv");
        if (p->through) check_tensor(&x->out_relaxed, &r.out_relaxed, first, x->N_q, p->H, p->d_v, unit, "relaxed");
        for (int64_t k = 0; k < x->N_q * p->H; k++) {
            close_to((double)x->lse[k], r.lse.x[first * p->H + k], unit, "lse", k);
            if (p->through) close_to((double)x->lse_relaxed[k], r.lse_relaxed.x[first * p->H + k], unit, "lse_r", k);
        }
    }
    for (int64_t i = 0; i < p->Hkv * p->D; i++)
        close_to((double)p->c.d_ln_u[i], r.d_ln_u.x[i], unit * r.d_ln_u.size[i], "d_ln_u", i);
}

/* Gates of one value in all bins, or in all but one. */
static inline void set_gates(problem *p, double u, int open, int64_t but, double other_u, int other_open) {
    p->ln_u = guarded((size_t)(p->Hkv * p->D) * 4, 4);
    p->open = guarded((size_t)(p->Hkv * p->D), 1);
    for (int64_t i = 0; i < p->Hkv * p->D; i++) {
        p->ln_u[i] = (float)log(i % p->D == but ? other_u : u);
        p->open[i] = (unsigned char)(i % p->D == but ? other_open : open);
    }
}

/* Positions of closed bins become NaN: what is closed is not read. */
static inline void poison_bins(problem *p, int64_t but) {
    for (int64_t j = 0; j < p->T_c; j++) {
        if (bin_of(p, j) < 0 || bin_of(p, j) == but) continue;
        for (int g = 0; g < p->Hkv; g++) {
            for (int e = 0; e < p->d_k; e++) oracle_put(&p->c.context.k, j, g, e, (double)NAN);
            for (int e = 0; e < p->d_v; e++) oracle_put(&p->c.context.v, j, g, e, (double)NAN);
        }
    }
}

/* ---- parts of cases that the CPU and the GPU share ---- */

static inline int same_tensor(const dkv_tensor *a, const dkv_tensor *b, int64_t n, int heads, int d) {
    int same = 1;
    for (int64_t i = 0; i < n * heads * d; i++) {
        const char *x = oracle_at(a, i / d / heads, i / d % heads, i % d);
        same &= !memcmp(x, oracle_at(b, i / d / heads, i / d % heads, i % d), 4);
    }
    return same;
}

/* Both softmaxes have the same bits. */
static inline void check_same_softmaxes(const problem *p) {
    for (int i = 0; i < p->n_suffix; i++) {
        CHECK(same_tensor(&p->x[i].out, &p->x[i].out_relaxed, p->N_q[i], p->H, p->d_v));
        CHECK(!memcmp(p->x[i].lse, p->x[i].lse_relaxed, (size_t)(p->N_q[i] * p->H) * 4));
    }
}

/* With ones in component 0 of all keys, dq[0] is scale times the sum of dS over the row: 0 beside the sum of |dS|. */
static inline void check_rows_sum_to_zero(const problem *p, double bound) {
    inputs in = inputs_of(p);
    results r = gated_oracle(p, &in, 1);
    int64_t first = 0;
    for (int i = 0; i < p->n_suffix; first += p->N_q[i++])
        for (int64_t k = 0; k < p->N_q[i] * p->H; k++) {
            AT("through %d, suffix %d, row %d", p->through, i, (int)k);
            double sum = oracle_get(&p->x[i].dq, k / p->H, k % p->H, 0) * sqrt(p->d_k);
            CHECK(fabs(sum) <= bound * r.abs_ds.x[first * p->H + k]);
        }
}

/* A problem with one suffix gets a key 60 above all others in bin 2, along every query's component 0. */
static inline void raise_tower(problem *p) {
    int64_t j = p->T_c - p->R - 2 * p->W - 5;
    for (int64_t r = 0; r < p->all * p->H; r++) {
        p->q[r * p->d_k] = 3;
        oracle_put(&p->x[0].q, r / p->H, r % p->H, 0, 3);
    }
    for (int g = 0; g < p->Hkv; g++) {
        double *k = &p->k[(j * p->Hkv + g) * p->d_k];
        *k = oracle_round(source_type(p->type), 20 * sqrt(p->d_k));
        oracle_put(&p->c.context.k, j, g, 0, *k);
    }
}

/* u and bit of the tower's bin. */
static const struct { double u; int open; } towers[] = {{0, 1}, {0.7, 0}, {1e-6, 1}, {1e-6, 0}, {1, 1}};

/* A NaN in head 1 of query 9 of suffix 2 is in its rows of out, LSE and dq alone. */
static inline void check_nan_rows(const problem *p) {
    for (int64_t r = 0; r < p->N_q[2] * p->H; r++) {
        int bad = r == 9 * p->H + 1;
        AT("row %d", (int)r);
        CHECK(isnan(oracle_get(&p->x[2].out, r / p->H, r % p->H, 0)) == bad);
        CHECK(isnan(oracle_get(&p->x[2].dq, r / p->H, r % p->H, 0)) == bad);
        CHECK(isnan(p->x[2].lse[r]) == bad);
    }
}

#endif
