/* [GATES], gated attention: outputs and gradients against dense double precision, whose gradients are checked against
   finite differences of its outputs; identities that need no tolerance; equal bits where promised. */
#define _GNU_SOURCE
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

static result new_result(int64_t n) {
    result r = {guarded((size_t)n * 8, 8), guarded((size_t)n * 8, 8)};
    memset(r.x, 0, (size_t)n * 8);
    memset(r.size, 0, (size_t)n * 8);
    return r;
}

static void add(result *r, int64_t i, double x, double size) {
    r->x[i] += x;
    r->size[i] += fabs(size);
}

/* ---- the oracle ---------------------------------------------------------- */

typedef struct inputs { double *q, *sk, *sv, *ln_u; } inputs;

static int64_t bin_of(const problem *p, int64_t j) {
    return j < p->S || j >= p->T_c - p->R ? -1 : (p->T_c - p->R - 1 - j) / p->W;
}

/* Key or value j of the suffix that begins at query first of all: the context's, then its own. */
static const double *key_of(const problem *p, int64_t first, int64_t j, int g, const double *context,
                            const double *own, int d) {
    return j < p->T_c ? context + (j * p->Hkv + g) * d : own + ((first + j - p->T_c) * p->Hkv + g) * d;
}

/* Logits of one row: s relaxed, b open, -inf where closed. Without straight-through there is one of them, s. */
static void row_logits(const problem *p, const inputs *in, int64_t first, int64_t i, int h, double *s, double *b,
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

static double softmax(double *s, int64_t n) {
    double top = -(double)INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) top = fmax(top, s[j]);
    for (int64_t j = 0; j < n; j++) sum += exp(s[j] - top);
    for (int64_t j = 0; j < n; j++) s[j] = exp(s[j] - top) / sum;
    return top + log(sum);
}

static void gated_row(const problem *p, const inputs *in, int64_t first, int64_t i, int h, double *s, double *b,
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

static results gated_oracle(const problem *p, const inputs *in, int gradients) {
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

static inputs inputs_of(const problem *p) {
    inputs in = {p->q, p->sk, p->sv, guarded((size_t)(p->Hkv * p->D) * 8, 8)};
    for (int64_t i = 0; i < p->Hkv * p->D; i++) in.ln_u[i] = (double)p->ln_u[i];
    return in;
}

/* ---- problems ------------------------------------------------------------ */

static dkv_tensor filled(const problem *p, const double *x, int64_t n, int heads, int d) {
    dkv_tensor t = new_tensor(p->layout, p->x_type, n, heads, d);
    fill_tensor(&t, x, n, heads, d);
    return t;
}

/* Gates closed (-inf), tiny, inside, and one; open bits of their own. */
static void random_gates(problem *p) {
    static const double u[] = {0, 1e-6, 0.1, 0.5, 0.9, 1};
    p->ln_u = guarded((size_t)(p->Hkv * p->D) * 4, 4);
    p->open = guarded((size_t)(p->Hkv * p->D), 1);
    for (int64_t i = 0; i < p->Hkv * p->D; i++) {
        p->ln_u[i] = (float)log(u[rnd_below(COUNT(u))]);
        p->open[i] = rnd() & 1;
    }
}

static void new_suffixes(problem *p) {
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

static void new_workspace(problem *p, int nth) {
    CHECK_OK(dkv_gated_size(&p->ws_bytes, &p->c, 1, nth));
    p->ws = guarded(p->ws_bytes, 64);
}

/* Random values; ln_u and open stay if the caller made them. p must stay where it is. */
static void build(problem *p) {
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
    new_workspace(p, 1);
}

static void run(problem *p) {
    CHECK_OK(dkv_gated_forward(&p->c, 1, p->ws, p->ws_bytes, NULL));
    memset(p->ws, TEST_POISON, p->ws_bytes);
    CHECK_OK(dkv_gated_backward(&p->c, 1, p->ws, p->ws_bytes, NULL));
}

/* ---- comparison ---------------------------------------------------------- */

/* Units of 2^-24 of a number's size. A weight errs by its logit and its LSE: sqrt(d) times the greatest logit's terms,
   and |lse|; exponentials, sums over tiles and the products of a gradient add a few. */
static double unit_of(const problem *p, const results *r, double lse) {
    tolerance t = tolerances[p->type][dkv_simd_level()];
    return ldexp(2 * t.lse * sqrt(p->d_k) * r->magnitude + fabs(lse) + 16, -24);
}

static double most_lse(const problem *p, const results *r) {
    double most = 0;
    for (int64_t i = 0; i < p->all * p->H; i++)
        most = fmax(most, fmax(fabs(r->lse.x[i]), fabs(r->lse_relaxed.x[i])));
    return most;
}

static double worst; /* of all comparisons, as a share of the bound */

static void close_to(double got, double want, double bound, const char *what, int64_t at) {
    double off = fabs(got - want);
    if (!(off <= bound)) fail_msg("at %s: %s [%d] is %.9g, not %.9g", test_at, what, (int)at, got, want);
    if (bound > 0) worst = fmax(worst, off / bound);
}

/* Tensor x of suffix i, which holds rows first.. of want [all][heads][d]. */
static void check_tensor(const dkv_tensor *t, const result *want, int64_t first, int64_t n, int heads, int d,
                         double unit, const char *what) {
    for (int64_t i = 0; i < n * heads * d; i++) {
        int64_t at = first * heads * d + i;
        double got = oracle_get(t, i / d / heads, i / d % heads, i % d);
        close_to(got, want->x[at], unit * want->size[at] + 1e-37, what, at);
    }
}

static void check(const problem *p) {
    inputs in = inputs_of(p);
    results r = gated_oracle(p, &in, 1);
    double unit = unit_of(p, &r, most_lse(p, &r));
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

static void solve(problem *p) {
    build(p);
    run(p);
    check(p);
}

/* ---- cases --------------------------------------------------------------- */

static double inner(const problem *p, const double *out) {
    double sum = 0;
    for (int64_t i = 0; i < p->all * p->H * p->d_v; i++) sum += p->d_out[i] * out[i];
    return sum;
}

/* The oracle's own gradients: of sum dO O_relaxed by q, K of the suffix and ln u; of sum dO O by V of the suffix. */
static void differences(void) {
    for (int through = 0; through < 2; through++) {
        problem p = plain;
        p.T_c = 90, p.W = 16, p.S = 9, p.R = 21, p.D = 4, p.d_k = 6, p.d_v = 5, p.H = 4, p.through = through;
        p.N_q[0] = 3, p.N_q[1] = 1, p.N_q[2] = 2;
        solve(&p);
        inputs in = inputs_of(&p);
        results r = gated_oracle(&p, &in, 1);
        const struct { double *x; const result *gradient; int64_t n; } of[] = {
            {in.q, &r.dq, p.all * p.H * p.d_k}, {in.sk, &r.dk, p.all * p.Hkv * p.d_k},
            {in.sv, &r.dv, p.all * p.Hkv * p.d_v}, {in.ln_u, &r.d_ln_u, p.Hkv * p.D},
        };
        for (int k = 0; k < COUNT(of); k++)
            for (int64_t i = 0; i < of[k].n; i++) {
                double x = of[k].x[i], h = 1e-5, side[2];
                if (isinf(x)) continue;
                for (int s = 0; s < 2; s++) {
                    of[k].x[i] = s ? x + h : x - h;
                    results at = gated_oracle(&p, &in, 0);
                    side[s] = inner(&p, k == 2 ? at.out.x : at.out_relaxed.x);
                }
                of[k].x[i] = x;
                AT("through %d, input %d, element %d", through, k, (int)i);
                double got = (side[1] - side[0]) / (2 * h), bound = 1e-7 * (1 + of[k].gradient->size[i]);
                CHECK(fabs(got - of[k].gradient->x[i]) < bound);
            }
    }
}

static void widths(void) {
    static const int64_t table[][5] = { /* W, S, R, D, T_c */
        {64, 128, 192, 8, 800}, {96, 50, 130, 9, 500}, {128, 100, 128, 4, 700}, {256, 0, 0, 3, 600},
        {1, 3, 5, 40, 48}, {1000, 1, 1, 1, 400},
    };
    for (int i = 0; i < COUNT(table); i++)
        for (int through = 0; through < 2; through++) {
            problem p = plain;
            p.W = table[i][0], p.S = table[i][1], p.R = table[i][2], p.D = table[i][3], p.T_c = table[i][4];
            p.through = through;
            AT("widths %d, through %d", i, through);
            solve(&p);
        }
}

/* No context; less than sink and recent; at the edges of the first bin. */
static void lengths(void) {
    static const int64_t table[] = {0, 1, 49, 50, 131, 179, 180, 181, 276, 277};
    for (int i = 0; i < COUNT(table); i++) {
        problem p = plain;
        p.T_c = table[i], p.through = i % 2;
        AT("T_c %d", (int)p.T_c);
        solve(&p);
    }
}

static void suffixes(void) {
    static const int64_t table[][MAX_SUFFIXES] = {{1}, {129}, {140, 1, 130}, {2, 64, 3, 33, 31}, {0, 4, 0}};
    static const int groups[] = {1, 3, 4, 7};
    for (int i = 0; i < COUNT(table); i++)
        for (int k = 0; k < COUNT(groups); k++) {
            problem p = plain;
            p.T_c = 150, p.through = (i + k) % 2, p.n_suffix = i < 2 ? 1 : i == 3 ? 5 : 3;
            p.d_k = 4, p.d_v = 3, p.D = 2, p.S = p.R = 20, p.Hkv = 1 + k % 2, p.H = groups[k] * p.Hkv;
            memcpy(p.N_q, table[i], sizeof p.N_q);
            AT("suffixes %d, G %d", i, groups[k]);
            solve(&p);
        }
}

static void types_and_layouts(void) {
    for (int type = 0; type < 5; type++)
        for (int layout = 0; layout < LAYOUTS; layout++) {
            problem p = plain;
            p.strided = layout % 2 && type < 3, p.type = packed_at(type), p.x_type = type_at(layout);
            p.layout = layout, p.T_c = 300, p.N_q[2] = 9, p.through = (type + layout) % 2;
            AT("type %d, layout %d", type, layout);
            solve(&p);
        }
}

static void dimensions(void) {
    static const int table[][2] = {{1, 1}, {2, 17}, {64, 64}, {80, 80}, {128, 96}, {576, 512}};
    for (int i = 0; i < COUNT(table); i++) {
        problem p = plain;
        p.d_k = table[i][0], p.d_v = table[i][1], p.T_c = 220, p.n_suffix = 1, p.H = 2, p.scale = i % 2 ? 0.2f : 0;
        AT("d %d, %d", p.d_k, p.d_v);
        solve(&p);
    }
}

/* Gates of one value in all bins, or in all but one. */
static void set_gates(problem *p, double u, int open, int64_t but, double other_u, int other_open) {
    p->ln_u = guarded((size_t)(p->Hkv * p->D) * 4, 4);
    p->open = guarded((size_t)(p->Hkv * p->D), 1);
    for (int64_t i = 0; i < p->Hkv * p->D; i++) {
        p->ln_u[i] = (float)log(i % p->D == but ? other_u : u);
        p->open[i] = (unsigned char)(i % p->D == but ? other_open : open);
    }
}

/* Positions of closed bins become NaN: what is closed is not read. */
static void poison_bins(problem *p, int64_t but) {
    for (int64_t j = 0; j < p->T_c; j++) {
        if (bin_of(p, j) < 0 || bin_of(p, j) == but) continue;
        for (int g = 0; g < p->Hkv; g++) {
            for (int e = 0; e < p->d_k; e++) oracle_put(&p->c.context.k, j, g, e, (double)NAN);
            for (int e = 0; e < p->d_v; e++) oracle_put(&p->c.context.v, j, g, e, (double)NAN);
        }
    }
}

static void closed(void) {
    for (int i = 0; i < 6; i++) {
        problem p = plain;
        if (i % 2) p.S = p.R = 0, p.D = 6; /* only the suffix is left */
        p.through = i < 4;
        int64_t but = i < 2 ? -1 : 3;
        set_gates(&p, i == 4 ? 1e-38 : 0, 0, but, 0.3, 1); /* 1e-38 is below 2^-126 */
        AT("closed %d", i);
        build(&p);
        poison_bins(&p, but);
        run(&p);
        check(&p);
        for (int64_t b = 0; b < p.Hkv * p.D; b++) CHECK(b % p.D == but || p.c.d_ln_u[b] == 0);
    }
}

/* u = 1: the attention of the whole context, ungated. */
static void all_open(void) {
    problem p = plain;
    p.n_suffix = 1, p.N_q[0] = 21;
    set_gates(&p, 1, 1, -1, 1, 1);
    solve(&p);
    dkv_tensor out = new_tensor(THD, DKV_F32, 21, p.H, p.d_v);
    float *lse = guarded((size_t)(21 * p.H) * 4, 4);
    size_t bytes;
    dkv_attention a = {.H = p.H, .Hkv = p.Hkv, .d_k = p.d_k, .d_v = p.d_v, .N_q = 21, .q = p.x[0].q, .out = out,
                       .lse = lse, .context = p.c.context, .tail = dkv_strided(p.x[0].k, p.x[0].v, 21)};
    CHECK_OK(dkv_attend_size(&bytes, &a, 1, 1));
    CHECK_OK(dkv_attend(&a, 1, guarded(bytes, 64), bytes, NULL));
    for (int64_t i = 0; i < 21 * p.H * p.d_v; i++) {
        double x = oracle_get(&out, i / p.d_v / p.H, i / p.d_v % p.H, i % p.d_v);
        close_to(oracle_get(&p.x[0].out, i / p.d_v / p.H, i / p.d_v % p.H, i % p.d_v), x, 4e-6, "out", i);
    }
    for (int64_t i = 0; i < 21 * p.H; i++) close_to((double)p.x[0].lse[i], (double)lse[i], 4e-6, "lse", i);
}

static int same_tensor(const dkv_tensor *a, const dkv_tensor *b, int64_t n, int heads, int d) {
    int same = 1;
    for (int64_t i = 0; i < n * heads * d; i++) {
        const char *x = oracle_at(a, i / d / heads, i / d % heads, i % d);
        same &= !memcmp(x, oracle_at(b, i / d / heads, i / d % heads, i % d), 4);
    }
    return same;
}

/* Binary gates that are open where the bits are: two softmaxes of the same bits. */
static void binary_gates(void) {
    problem p = plain;
    build(&p);
    for (int64_t i = 0; i < p.Hkv * p.D; i++) p.ln_u[i] = p.open[i] ? 0.0f : -INFINITY;
    run(&p);
    check(&p);
    for (int i = 0; i < p.n_suffix; i++) {
        CHECK(same_tensor(&p.x[i].out, &p.x[i].out_relaxed, p.N_q[i], p.H, p.d_v));
        CHECK(!memcmp(p.x[i].lse, p.x[i].lse_relaxed, (size_t)(p.N_q[i] * p.H) * 4));
    }
}

/* With ones in component 0 of all keys, dq[0] is scale times the sum of dS over the row: 0 beside the sum of |dS|. */
static void rows_sum_to_zero(void) {
    for (int through = 0; through < 2; through++) {
        problem p = plain;
        p.ones = 1, p.through = through, p.deviation = 2;
        solve(&p);
        inputs in = inputs_of(&p);
        results r = gated_oracle(&p, &in, 1);
        int64_t first = 0;
        for (int i = 0; i < p.n_suffix; first += p.N_q[i++])
            for (int64_t k = 0; k < p.N_q[i] * p.H; k++) {
                AT("through %d, suffix %d, row %d", through, i, (int)k);
                double sum = oracle_get(&p.x[i].dq, k / p.H, k % p.H, 0) * sqrt(p.d_k);
                CHECK(fabs(sum) <= 1e-5 * r.abs_ds.x[first * p.H + k]); /* dP and delta are rounded by their terms */
            }
    }
}

/* A key 60 above all others, in a tile that is open in one softmax only, or hardly. */
static void towering_key(void) {
    static const struct { double u; int open; } table[] = {{0, 1}, {0.7, 0}, {1e-6, 1}, {1e-6, 0}, {1, 1}};
    for (int i = 0; i < COUNT(table); i++)
        for (int through = 0; through < 2; through++) {
            problem p = plain;
            p.through = through, p.n_suffix = 1, p.N_q[0] = 4;
            set_gates(&p, 0.5, 1, 2, table[i].u, table[i].open); /* bin 2 is another */
            build(&p);
            int64_t j = p.T_c - p.R - 2 * p.W - 5; /* in bin 2; the key is along every query's component 0 */
            for (int64_t r = 0; r < p.all * p.H; r++) {
                p.q[r * p.d_k] = 3;
                oracle_put(&p.x[0].q, r / p.H, r % p.H, 0, 3);
            }
            for (int g = 0; g < p.Hkv; g++) {
                p.k[(j * p.Hkv + g) * p.d_k] = 20 * sqrt(p.d_k);
                p.k[(j * p.Hkv + g) * p.d_k] = oracle_round(DKV_F32, p.k[(j * p.Hkv + g) * p.d_k]);
                oracle_put(&p.c.context.k, j, g, 0, p.k[(j * p.Hkv + g) * p.d_k]);
            }
            AT("u %g, open %d, through %d", table[i].u, table[i].open, through);
            run(&p);
            check(&p);
        }
}

static void *copy_of(const void *data, size_t bytes) { return memcpy(guarded(bytes, 1), data, bytes); }

/* Threads, and company in the batch, change no bit. */
static void threads(void) {
    problem p = plain, other = plain;
    p.N_q[2] = 90, p.H = 8, p.Hkv = 2; /* 384 rows are a block: here are two */
    other.T_c = 400, other.d_k = 80, other.through = 0, other.n_suffix = 2, other.type = DKV_BF16, other.strided = 0;
    build(&p);
    build(&other);
    run(&p);
    float *gate = copy_of(p.c.d_ln_u, (size_t)(p.Hkv * p.D) * 4);
    dkv_suffix before[MAX_SUFFIXES];
    memcpy(before, p.x, sizeof before);
    new_suffixes(&p); /* the same inputs, other outputs */
    dkv_gated batch[] = {other.c, p.c, other.c};
    problem again = other;
    new_suffixes(&again);
    batch[2].suffix = again.x;
    batch[2].d_ln_u = guarded((size_t)(p.Hkv * p.D) * 4, 4);
    for (int nth = 1; nth <= 8; nth += nth < 3 ? 1 : 5) {
        dkv_parallel par = {run_pthreads, NULL, nth};
        size_t bytes;
        CHECK_OK(dkv_gated_size(&bytes, batch, 3, nth));
        void *ws = guarded(bytes, 64);
        AT("%d threads", nth);
        CHECK_OK(dkv_gated_forward(batch, 3, ws, bytes, &par));
        CHECK_OK(dkv_gated_backward(batch, 3, ws, bytes, &par));
        CHECK(!memcmp(gate, p.c.d_ln_u, (size_t)(p.Hkv * p.D) * 4));
        for (int i = 0; i < p.n_suffix; i++) {
            CHECK(same_tensor(&before[i].out, &p.x[i].out, p.N_q[i], p.H, p.d_v));
            CHECK(same_tensor(&before[i].out_relaxed, &p.x[i].out_relaxed, p.N_q[i], p.H, p.d_v));
            CHECK(same_tensor(&before[i].dq, &p.x[i].dq, p.N_q[i], p.H, p.d_k));
            CHECK(same_tensor(&before[i].dk, &p.x[i].dk, p.N_q[i], p.Hkv, p.d_k));
            CHECK(same_tensor(&before[i].dv, &p.x[i].dv, p.N_q[i], p.Hkv, p.d_v));
            CHECK(!memcmp(before[i].lse, p.x[i].lse, (size_t)(p.N_q[i] * p.H) * 4));
        }
        CHECK(!memcmp(batch[0].d_ln_u, batch[2].d_ln_u, (size_t)(other.Hkv * other.D) * 4));
        CHECK_RESULT(dkv_gated_forward(batch, 3, ws, bytes - 64, &par), DKV_ERR_CAPACITY);
    }
    check(&other);
}

/* A NaN in one query stays in its rows of O and dQ. */
static void nan_query(void) {
    problem p = plain;
    build(&p);
    oracle_put(&p.x[2].q, 9, 1, 0, (double)NAN);
    run(&p);
    for (int64_t r = 0; r < p.N_q[2] * p.H; r++) {
        int bad = r == 9 * p.H + 1;
        AT("row %d", (int)r);
        CHECK(isnan(oracle_get(&p.x[2].out, r / p.H, r % p.H, 0)) == bad);
        CHECK(isnan(oracle_get(&p.x[2].dq, r / p.H, r % p.H, 0)) == bad);
        CHECK(isnan(p.x[2].lse[r]) == bad);
    }
    for (int64_t i = 0; i < p.N_q[2] * p.Hkv; i++)
        CHECK(isnan(oracle_get(&p.x[2].dv, i / p.Hkv, i % p.Hkv, 0)) == (i / p.Hkv <= 9 && i % p.Hkv == 0));
}

static void errors(void) {
    problem p = plain;
    build(&p);
    CHECK_OK(dkv_gated_forward(&p.c, 1, p.ws, p.ws_bytes, NULL));
    dkv_suffix x[MAX_SUFFIXES];
    char *end = (char *)p.ws + p.ws_bytes;
#define BAD(change, want) do { \
        dkv_gated c = p.c; \
        memcpy(x, p.x, sizeof x); \
        c.suffix = x; \
        change; \
        memset(p.c.d_ln_u, TEST_POISON, (size_t)(p.Hkv * p.D) * 4); \
        CHECK_RESULT(dkv_gated_backward(&c, 1, p.ws, p.ws_bytes, NULL), want); \
        CHECK(is_poison(p.c.d_ln_u, (size_t)(p.Hkv * p.D) * 4)); \
        CHECK(is_poison(oracle_at(&p.x[0].dk, 0, 0, 0), 4)); } while (0)
    BAD(c.H = 5, DKV_ERR_SHAPE);
    BAD(c.d_k = 577, DKV_ERR_SHAPE);
    BAD(c.n_suffix = -1, DKV_ERR_SHAPE);
    BAD(c.D = 0, DKV_ERR_FIELD);
    BAD(c.W = 0, DKV_ERR_FIELD);
    BAD(c.S = -1, DKV_ERR_FIELD);
    BAD(c.scale = -1, DKV_ERR_FIELD);
    BAD(c.D = 3, DKV_ERR_RANGE);
    BAD(c.T_c = 499, DKV_ERR_SHAPE);
    BAD(c.context.k.type = DKV_I8, DKV_ERR_TYPE);
    BAD(x[1].q.type = DKV_FP8, DKV_ERR_TYPE);
    BAD(x[1].dv.type = DKV_FP8, DKV_ERR_TYPE);
    BAD(x[1].N_q = -1, DKV_ERR_SHAPE);
    BAD(x[1].dq.data = x[1].d_out.data, DKV_ERR_OVERLAP);
    BAD(x[1].dk.data = p.c.context.k.data, DKV_ERR_OVERLAP);
    BAD(x[1].dk.data = x[1].dv.data, DKV_ERR_OVERLAP);
    BAD(x[1].dv.data = end - 8, DKV_ERR_OVERLAP);
    BAD(c.ln_u = (float *)(void *)(end - 64), DKV_ERR_OVERLAP);
    BAD(c.d_ln_u = p.ln_u, DKV_ERR_OVERLAP);
#undef BAD
    CHECK_RESULT(dkv_gated_forward(&p.c, 1, p.ws, p.ws_bytes - 64, NULL), DKV_ERR_CAPACITY);
    new_workspace(&p, 2);
    CHECK_RESULT(dkv_gated_forward(&p.c, 1, (char *)p.ws + 4, p.ws_bytes - 4, NULL), DKV_ERR_ALIGN);
    p.c.T_c = 50 + 130 + 4 * 96 + 1;
    CHECK_RESULT(dkv_gated_size(&p.ws_bytes, &p.c, 1, 1), DKV_ERR_RANGE);
}

/* Random shapes, all things at once. */
static void random_mix(void) {
    for (int i = 0; i < 20; i++) {
        problem p = plain;
        p.Hkv = 1 + (int)rnd_below(3), p.H = p.Hkv * (1 + (int)rnd_below(5));
        p.d_k = 1 + (int)rnd_below(36), p.d_v = 1 + (int)rnd_below(36);
        p.W = 1 + rnd_below(200), p.S = rnd_below(150), p.R = rnd_below(150);
        p.T_c = rnd_below(400), p.D = 1 + p.T_c / p.W + rnd_below(3);
        p.n_suffix = 1 + (int)rnd_below(MAX_SUFFIXES);
        for (int k = 0; k < p.n_suffix; k++) p.N_q[k] = rnd_below(20);
        p.strided = (int)rnd_below(2), p.type = p.strided ? type_at(rnd_below(3)) : packed_at(rnd_below(5));
        p.x_type = type_at(rnd_below(3)), p.layout = (int)rnd_below(LAYOUTS), p.through = (int)rnd_below(2);
        AT("mix %d", i);
        solve(&p);
    }
}

int main(void) {
    static const test_case cases[] = {
        {"threads and batch, bit for bit", threads, 1},
        {"gradients by differences", differences, 0},
        {"bin widths", widths, 1},
        {"lengths", lengths, 1},
        {"suffixes x groups", suffixes, 1},
        {"types x layouts", types_and_layouts, 1},
        {"dimensions", dimensions, 1},
        {"closed bins are not read", closed, 1},
        {"all open is ungated", all_open, 1},
        {"binary gates, bit for bit", binary_gates, 1},
        {"rows of dS sum to 0", rows_sum_to_zero, 1},
        {"a towering key", towering_key, 1},
        {"NaN in a query", nan_query, 1},
        {"random mix", random_mix, 1},
        {"errors", errors, 0},
    };
#ifdef __SANITIZE_THREAD__
    int n = 1; /* the one with threads: with this sanitizer all of them take minutes */
#else
    int n = COUNT(cases);
#endif
    int failed = run_cases("gated", cases, n);
    if (getenv("WORST")) fprintf(stderr, "greatest error: %g of its bound\n", worst);
    return failed;
}
