/* [GATES], gated attention: outputs and gradients against dense double precision, whose gradients are checked against
   finite differences of its outputs; identities that need no tolerance; equal bits where promised. */
#define _GNU_SOURCE
#include "gated.h"

static void new_workspace(problem *p, int nth) {
    CHECK_OK(dkv_gated_size(&p->ws_bytes, &p->c, 1, nth));
    p->ws = guarded(p->ws_bytes, 64);
}

static void run(problem *p) {
    new_workspace(p, 1);
    CHECK_OK(dkv_gated_forward(&p->c, 1, p->ws, p->ws_bytes, NULL));
    memset(p->ws, TEST_POISON, p->ws_bytes);
    CHECK_OK(dkv_gated_backward(&p->c, 1, p->ws, p->ws_bytes, NULL));
}

static void solve(problem *p) {
    build(p);
    run(p);
    check(p, 0);
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
        check(&p, 0);
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

/* Binary gates that are open where the bits are: two softmaxes of the same bits. */
static void binary_gates(void) {
    problem p = plain;
    build(&p);
    for (int64_t i = 0; i < p.Hkv * p.D; i++) p.ln_u[i] = p.open[i] ? 0.0f : -INFINITY;
    run(&p);
    check(&p, 0);
    check_same_softmaxes(&p);
}

static void rows_sum_to_zero(void) {
    for (int through = 0; through < 2; through++) {
        problem p = plain;
        p.ones = 1, p.through = through, p.deviation = 2;
        solve(&p);
        check_rows_sum_to_zero(&p, 1e-5); /* dP and delta are rounded by their terms */
    }
}

/* A key 60 above all others, in a tile that is open in one softmax only, or hardly. */
static void towering_key(void) {
    for (int i = 0; i < COUNT(towers); i++)
        for (int through = 0; through < 2; through++) {
            problem p = plain;
            p.through = through, p.n_suffix = 1, p.N_q[0] = 4;
            set_gates(&p, 0.5, 1, 2, towers[i].u, towers[i].open); /* bin 2 is another */
            build(&p);
            raise_tower(&p);
            AT("u %g, open %d, through %d", towers[i].u, towers[i].open, through);
            run(&p);
            check(&p, 0);
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
    check(&other, 0);
}

/* A NaN in one query stays in its rows of O and dQ. */
static void nan_query(void) {
    problem p = plain;
    build(&p);
    oracle_put(&p.x[2].q, 9, 1, 0, (double)NAN);
    run(&p);
    check_nan_rows(&p);
    for (int64_t i = 0; i < p.N_q[2] * p.Hkv; i++)
        CHECK(isnan(oracle_get(&p.x[2].dv, i / p.Hkv, i % p.Hkv, 0)) == (i / p.Hkv <= 9 && i % p.Hkv == 0));
}

static void errors(void) {
    problem p = plain;
    build(&p);
    new_workspace(&p, 1);
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
