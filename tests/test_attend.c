/* [ATTEND]: packed context + tail against masked dense attention in double precision; equal bits where promised. */
#define _GNU_SOURCE
#include "test.h"
#include "tolerance.h"

static const int dims[] = {1, 2, 3, 16, 40, 64, 80, 128, 192, 256, 576};

/* One attention of one layer, and how to lay it out. The second half is filled by build. */
typedef struct problem {
    int H, Hkv, d_k, d_v;
    int64_t T_c, n_tail, N_q;
    dkv_type type, tail_type, q_type, out_type;
    int layout, strided;          /* of all tensors; strided: the context is not packed but moved to the front */
    int tail_packed;
    double density, q_deviation;  /* 0: 1 */
    float scale, softcap;
    int sink;

    double *q, *k, *v, *tail_k, *tail_v, *want, *want_lse, magnitude, v_max;
    unsigned char *keep;
    dkv_plan plan;
    dkv_segment source;           /* of the context, before packing */
    dkv_packed context, tail;
    dkv_attention a;
    size_t ws_bytes;
    void *ws;
} problem;

static const problem plain = {.H = 6, .Hkv = 2, .d_k = 64, .d_v = 64, .T_c = 150, .n_tail = 9, .N_q = 3,
                              .density = 0.5};

static dkv_tensor tensor_of(const problem *p, dkv_type type, const double *x, int64_t T, int heads, int d) {
    dkv_tensor t = new_tensor(p->layout, type, T, heads, d);
    fill_tensor(&t, x, T, heads, d);
    return t;
}

/* The context's segment. Evicted rows of the source are NaN: they may never matter. */
static dkv_segment context_of(problem *p) {
    dkv_segment s = dkv_strided(tensor_of(p, source_type(p->type), p->k, p->T_c, p->Hkv, p->d_k),
                                tensor_of(p, source_type(p->type), p->v, p->T_c, p->Hkv, p->d_v), p->T_c);
    for (int64_t i = 0; i < p->T_c * p->Hkv; i++) {
        if (p->keep[i % p->Hkv * p->T_c + i / p->Hkv]) continue;
        for (int j = 0; j < p->d_k; j++) oracle_put(&s.k, i / p->Hkv, i % p->Hkv, j, (double)NAN);
        for (int j = 0; j < p->d_v; j++) oracle_put(&s.v, i / p->Hkv, i % p->Hkv, j, (double)NAN);
    }
    p->plan = plan_of_mask(p->keep, 1, p->Hkv, p->T_c);
    if (p->strided) {
        CHECK_OK(dkv_pack_front(s.k, s.v, &p->plan, 0, p->d_k, p->d_v));
        s.rows = p->plan.rows;
        return s;
    }
    p->source = s;
    p->context = pack_layer(&p->plan, p->type, p->d_k, p->d_v, &s);
    if (has_scales(p->type)) learn_values(&p->context, &p->plan, 0, p->k, p->v);
    return (dkv_segment){.packed = &p->context};
}

static dkv_segment tail_of(problem *p) {
    dkv_segment s = dkv_strided(tensor_of(p, p->tail_type, p->tail_k, p->n_tail, p->Hkv, p->d_k),
                                tensor_of(p, p->tail_type, p->tail_v, p->n_tail, p->Hkv, p->d_v), p->n_tail);
    if (!p->tail_packed) return s;
    dkv_plan plan = plan_of_mask(NULL, 1, p->Hkv, p->n_tail);
    p->tail = pack_layer(&plan, p->tail_type, p->d_k, p->d_v, &s);
    return (dkv_segment){.packed = &p->tail};
}

static void ask_oracle(problem *p, const float *sink) {
    double scale = p->scale != 0 ? (double)p->scale : 1 / sqrt(p->d_k);
    oracle_attention o = {p->H, p->Hkv, p->d_k, p->d_v, p->N_q, p->T_c, p->n_tail, p->q, p->k, p->v, p->tail_k,
                          p->tail_v, p->keep, scale, (double)p->softcap, sink};
    p->want = guarded((size_t)(p->N_q * p->H * p->d_v) * 8, 8);
    p->want_lse = guarded((size_t)(p->N_q * p->H) * 8, 8);
    p->magnitude = oracle_attend(&o, p->want, p->want_lse);
    p->v_max = 0;
    for (int64_t i = 0; i < p->T_c * p->Hkv * p->d_v; i++) p->v_max = fmax(p->v_max, fabs(p->v[i]));
    for (int64_t i = 0; i < p->n_tail * p->Hkv * p->d_v; i++) p->v_max = fmax(p->v_max, fabs(p->tail_v[i]));
}

static void poison_results(problem *p) {
    for (int64_t i = 0; i < p->N_q * p->H * p->d_v; i++) {
        char *element = oracle_at(&p->a.out, i / p->d_v / p->H, i / p->d_v % p->H, i % p->d_v);
        memset(element, TEST_POISON, (size_t)oracle_bytes(p->out_type));
    }
    memset(p->a.lse, TEST_POISON, (size_t)(p->N_q * p->H) * sizeof(float));
    memset(p->ws, TEST_POISON, p->ws_bytes);
}

/* p must stay where it is: the segments point into it. */
static void build(problem *p) {
    p->q = normal_values(p->N_q * p->H * p->d_k, p->q_type, p->q_deviation != 0 ? p->q_deviation : 1);
    if (p->strided) p->type = source_type(p->type);
    p->k = normal_values(p->T_c * p->Hkv * p->d_k, source_type(p->type), 1);
    p->v = normal_values(p->T_c * p->Hkv * p->d_v, source_type(p->type), 1);
    p->tail_k = normal_values(p->n_tail * p->Hkv * p->d_k, p->tail_type, 1);
    p->tail_v = normal_values(p->n_tail * p->Hkv * p->d_v, p->tail_type, 1);
    p->keep = guarded((size_t)(p->Hkv * p->T_c), 1);
    for (int64_t i = 0; i < p->Hkv * p->T_c; i++) p->keep[i] = rnd_uniform() < p->density;
    float *sink = p->sink ? guarded((size_t)p->H * sizeof *sink, 4) : NULL;
    for (int h = 0; h < p->H && sink; h++) sink[h] = (float)rnd_normal();
    p->a = (dkv_attention){.H = p->H, .Hkv = p->Hkv, .d_k = p->d_k, .d_v = p->d_v, .N_q = p->N_q,
                           .q = tensor_of(p, p->q_type, p->q, p->N_q, p->H, p->d_k),
                           .out = new_tensor(p->layout, p->out_type, p->N_q, p->H, p->d_v),
                           .lse = guarded((size_t)(p->N_q * p->H) * sizeof(float), 4), .context = context_of(p),
                           .tail = tail_of(p), .scale = p->scale, .softcap = p->softcap, .sink = sink};
    CHECK_OK(dkv_attend_size(&p->ws_bytes, &p->a, 1, 1));
    p->ws = guarded(p->ws_bytes, 64);
    ask_oracle(p, sink);
    poison_results(p);
}

static void check_against_oracle(const problem *p) {
    tolerance tol = tolerances[p->type][dkv_simd_level()];
    for (int64_t r = 0; r < p->N_q * p->H; r++) {
        double lse = (double)p->a.lse[r], want = p->want_lse[r];
        if (!(fabs(lse - want) <= tolerance_lse(tol, p->d_k, p->magnitude, want)) && !(isinf(want) && lse == want))
            fail_msg("at %s: lse of row %d is %.9g, not %.9g", test_at, (int)r, lse, want);
        for (int i = 0; i < p->d_v; i++) {
            double out = oracle_get(&p->a.out, r / p->H, r % p->H, i), x = p->want[r * p->d_v + i];
            double bound = tolerance_out(tol, p->d_k, p->magnitude, p->v_max) + tolerance_store(p->out_type, x);
            if (!(fabs(out - x) <= bound))
                fail_msg("at %s: out[%d][%d] is %.9g, not %.9g", test_at, (int)r, i, out, x);
        }
    }
}

static void run_one(problem *p) {
    AT("H %d Hkv %d d %d %d T_c %d tail %d N_q %d types %s %s %s %s layout %d%s%s", p->H, p->Hkv, p->d_k, p->d_v,
       (int)p->T_c, (int)p->n_tail, (int)p->N_q, dkv_type_name(p->type), dkv_type_name(p->tail_type),
       dkv_type_name(p->q_type),
       dkv_type_name(p->out_type), p->layout, p->strided ? " strided" : "", p->tail_packed ? " packed tail" : "");
    build(p);
    CHECK_OK(dkv_attend(&p->a, 1, p->ws, p->ws_bytes, NULL));
    check_against_oracle(p);
}

/* Results in one block, to compare bits: out as doubles, then lse. */
static double *results_of(const problem *p) {
    int64_t rows = p->N_q * p->H;
    double *x = guarded((size_t)(rows * (p->d_v + 1)) * 8, 8);
    for (int64_t i = 0; i < rows * p->d_v; i++)
        x[i] = oracle_get(&p->a.out, i / p->d_v / p->H, i / p->d_v % p->H, i % p->d_v);
    for (int64_t r = 0; r < rows; r++) x[rows * p->d_v + r] = (double)p->a.lse[r];
    return x;
}

static void check_same_bits(const problem *p, const double *results) {
    CHECK(!memcmp(results_of(p), results, (size_t)(p->N_q * p->H * (p->d_v + 1)) * 8));
}

/* ---- against the oracle --------------------------------------------------- */

static void types_groups_queries(void) {
    static const int G[] = {1, 3, 4, 7, 8}, N_q[] = {1, 2, 5, 32, 67};
    for (int c = 0; c < 5 * COUNT(G) * COUNT(N_q); c++) {
        problem p = plain;
        p.type = packed_at(c);
        p.Hkv = 1 + c % 2;
        p.H = p.Hkv * G[c / 5 % COUNT(G)];
        p.N_q = N_q[c / 5 / COUNT(G)];
        p.n_tail = p.N_q + rnd_below(20);
        p.T_c = 1 + rnd_below(200);
        p.d_k = p.d_v = 4 + 4 * (int)rnd_below(12);
        p.tail_type = type_at(c / 2);
        p.q_type = type_at(c / 5);
        p.out_type = type_at(c / 7);
        run_one(&p);
        CHECK(test_release());
    }
}

static void dimensions(void) {
    for (int c = 0; c < 5 * COUNT(dims) * 3; c++) {
        problem p = plain;
        p.type = packed_at(c);
        p.tail_type = type_at(c);
        p.d_k = dims[c / 5 % COUNT(dims)];
        p.d_v = dims[(c / 5 + c / 5 / COUNT(dims) * 4) % COUNT(dims)];
        p.N_q = 1 + c % 4 * 5;
        p.n_tail = p.N_q + 3;
        run_one(&p);
        CHECK(test_release());
    }
}

/* Around 16-row blocks and every chunk size that could matter: packed rows x tail rows. */
static void lengths(void) {
    static const int at[] = {0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513};
    for (int c = 0; c < COUNT(at) * COUNT(at); c++) {
        problem p = plain;
        p.H = 3, p.Hkv = 1, p.density = 1, p.d_k = 8, p.d_v = 20;
        p.T_c = at[c % COUNT(at)];
        p.n_tail = at[c / COUNT(at)];
        p.N_q = 1 + c % 3 * 5;
        p.type = packed_at(c / 2);
        p.tail_type = type_at(c / 2);
        p.strided = c / 3 % 2;
        run_one(&p);
        CHECK(test_release());
    }
}

static void layouts(void) {
    for (int c = 0; c < LAYOUTS * 5 * 4; c++) {
        problem p = plain;
        p.layout = c % LAYOUTS;
        p.type = packed_at(c / LAYOUTS);
        p.tail_type = type_at(c + 1);
        p.q_type = p.out_type = type_at(c + 2);
        p.strided = c / LAYOUTS / 5 % 2;
        p.tail_packed = c / LAYOUTS / 10;
        p.d_k = 33, p.d_v = 47, p.N_q = 4 + c % 2 * 2;
        run_one(&p);
        CHECK(test_release());
    }
}

/* Rows past rows[g] may hold anything, in the same block and in the same bf16 pair. */
static void slack(void) {
    for (int c = 0; c < 3 * 40; c++) {
        problem p = plain;
        p.type = type_at(c), p.T_c = c / 3, p.density = 1, p.d_k = 33, p.N_q = 3 + c % 2 * 3;
        run_one(&p);
        dkv_tensor k = new_tensor(THD, p.type, 48, p.Hkv, p.d_k), v = new_tensor(THD, p.type, 48, p.Hkv, p.d_v);
        fill_tensor(&k, p.k, p.T_c, p.Hkv, p.d_k); /* the other rows stay NaN */
        fill_tensor(&v, p.v, p.T_c, p.Hkv, p.d_v);
        dkv_segment longer = dkv_strided(k, v, 48);
        dkv_plan all = plan_of_mask(NULL, 1, p.Hkv, 48);
        int64_t rows[] = {p.T_c, p.T_c};
        p.context = pack_layer(&all, p.type, p.d_k, p.d_v, &longer);
        p.context.rows = rows, p.context.capacity = 48;
        poison_results(&p);
        CHECK_OK(dkv_attend(&p.a, 1, p.ws, p.ws_bytes, NULL));
        check_against_oracle(&p);
        CHECK(test_release());
    }
}

static void tail_shorter_than_queries(void) {
    for (int c = 0; c < 24; c++) {
        problem p = plain;
        p.N_q = 5;
        p.H = c % 2 ? 6 : 8;
        p.n_tail = c % 6;
        p.T_c = c / 6 % 2 ? 0 : 40; /* 0: the first queries see no key at all */
        p.tail_packed = c / 12;
        p.sink = c / 3 % 2; /* with a sink and no key, lse is the sink's logit */
        run_one(&p);
        CHECK(p.T_c || p.sink || p.n_tail == 5 || p.a.lse[0] == -INFINITY);
        CHECK(test_release());
    }
}

static void options(void) {
    for (int c = 0; c < 60; c++) {
        problem p = plain;
        p.type = packed_at(c);
        p.sink = c & 1;
        p.N_q = c / 12 % 2 ? 8 : 3;
        p.softcap = c / 2 % 2 ? 1.5f : 0;
        p.scale = 0.37f * (float)(c / 4 % 3);
        p.q_deviation = 2;
        run_one(&p);
        CHECK(test_release());
    }
}

/* Logits up to about +-6e4: one key wins, and nothing overflows. */
static void huge_logits(void) {
    for (int c = 0; c < 20; c++) {
        problem p = plain;
        p.type = packed_at(c);
        p.q_deviation = 2e4;
        p.N_q = c % 2 ? 8 : 3;
        p.softcap = c / 5 % 2 ? 50 : 0;
        p.sink = c / 10;
        run_one(&p);
        CHECK(test_release());
    }
}

/* Two keys, at logits 0 (value 0) and x (value 1): out is e^x / (1 + e^x), and shows exp where nothing averages out. */
static void exponentials(void) {
    enum { N = 4096 };
    static float q[N], out[N];
    float k[] = {0, 1}, v[] = {0, 1};
    for (int i = 0; i < N; i++) q[i] = -100.0f * (float)i / N;
    dkv_attention a = {.H = 1, .Hkv = 1, .d_k = 1, .d_v = 1, .N_q = N, .q = dkv_thd(q, DKV_F32, 1, 1), .scale = 1,
                       .out = dkv_thd(out, DKV_F32, 1, 1),
                       .context = dkv_strided(dkv_thd(k, DKV_F32, 1, 1), dkv_thd(v, DKV_F32, 1, 1), 2)};
    size_t bytes;
    CHECK_OK(dkv_attend_size(&bytes, &a, 1, 1));
    CHECK_OK(dkv_attend(&a, 1, guarded(bytes, 64), bytes, NULL));
    for (int i = 0; i < N; i++) {
        double want = 1 / (1 + exp(-(double)q[i]));
        if (!(fabs((double)out[i] - want) <= tolerance_exp * ldexp(want, -24) + (q[i] < -87.3f ? 2e-38 : 0)))
            fail_msg("exp(%g): %.9g, not %.9g", (double)q[i], (double)out[i], want);
    }
}

/* Products that overflow to -inf weigh nothing; a row of nothing else is a row without keys. */
static void infinite_logits(void) {
    enum { D = 20, KEYS = 21, H = 16 };
    for (int c = 0; c < 4; c++) { /* odd: and one tail key at logit 0 */
        dkv_type type = c / 2 ? DKV_BF16 : DKV_F32;
        float q[H * D], out[H * D], lse[H];
        dkv_tensor k = new_tensor(THD, type, KEYS, 1, D), v = new_tensor(THD, type, KEYS, 1, D);
        dkv_tensor zero = new_tensor(THD, type, 1, 1, D);
        for (int i = 0; i < H * D; i++) q[i] = -1e30f;
        for (int i = 0; i < D; i++) oracle_put(&zero, 0, 0, i, 0);
        for (int i = 0; i < KEYS * D; i++) {
            oracle_put(&k, i / D, 0, i % D, 1e30);
            oracle_put(&v, i / D, 0, i % D, rnd_normal());
        }
        dkv_attention a = {.H = H, .Hkv = 1, .d_k = D, .d_v = D, .N_q = 1, .q = dkv_thd(q, DKV_F32, H, D),
                           .out = dkv_thd(out, DKV_F32, H, D), .lse = lse, .context = dkv_strided(k, v, KEYS),
                           .tail = dkv_strided(zero, v, c % 2)};
        size_t bytes;
        CHECK_OK(dkv_attend_size(&bytes, &a, 1, 1));
        CHECK_OK(dkv_attend(&a, 1, guarded(bytes, 64), bytes, NULL));
        for (int h = 0; h < H; h++) {
            CHECK(lse[h] == (c % 2 ? 0 : -INFINITY));
            for (int i = 0; i < D; i++) CHECK((double)out[h * D + i] == (c % 2 ? oracle_get(&v, 0, 0, i) : 0));
        }
        CHECK(test_release());
    }
}

static void random_mix(void) {
    for (int c = 0; c < 100; c++) {
        problem p = {.Hkv = 1 + (int)rnd_below(3), .d_k = 1 + (int)rnd_below(100), .d_v = 1 + (int)rnd_below(100),
                     .T_c = rnd_below(300), .n_tail = rnd_below(150), .N_q = 1 + rnd_below(12),
                     .density = rnd_uniform(),
                     .type = packed_at(rnd_below(5)), .tail_type = type_at(rnd_below(3)),
                     .q_type = type_at(rnd_below(3)),
                     .out_type = type_at(rnd_below(3)), .layout = (int)rnd_below(LAYOUTS), .strided = rnd() & 1,
                     .tail_packed = rnd_below(4) == 0, .sink = rnd_below(4) == 0};
        p.H = p.Hkv * (1 + (int)rnd_below(9));
        run_one(&p);
        CHECK(test_release());
    }
}

/* ---- bit for bit ----------------------------------------------------------- */

typedef struct shared_run { problem *p; size_t bytes; void *ws; pthread_barrier_t ready; int bad; } shared_run;

/* An engine's own threads: part, wait, combine. */
static void part_and_combine(void *arg, int ith, int nth) {
    shared_run *run = arg;
    dkv_result part = dkv_attend_part(&run->p->a, 1, run->ws, run->bytes, ith, nth);
    pthread_barrier_wait(&run->ready);
    if (part || dkv_attend_combine(&run->p->a, 1, run->ws, run->bytes, ith, nth)) run->bad = 1;
}

static void check_threads(problem *p, const double *want, int nth) {
    shared_run run = {.p = p};
    dkv_parallel par = {run_pthreads, NULL, nth};
    CHECK_OK(dkv_attend_size(&run.bytes, &p->a, 1, nth));
    run.ws = guarded(run.bytes, 64);
    poison_results(p);
    for (int i = nth - 1; i >= 0; i--) CHECK_OK(dkv_attend_part(&p->a, 1, run.ws, run.bytes, i, nth));
    for (int i = 0; i < nth; i++) CHECK_OK(dkv_attend_combine(&p->a, 1, run.ws, run.bytes, i, nth));
    check_same_bits(p, want);
    memset(run.ws, TEST_POISON, run.bytes);
    poison_results(p);
    CHECK_OK(dkv_attend(&p->a, 1, run.ws, run.bytes, &par));
    check_same_bits(p, want);
    poison_results(p);
    pthread_barrier_init(&run.ready, NULL, (unsigned)nth);
    run_pthreads(NULL, nth, part_and_combine, &run);
    pthread_barrier_destroy(&run.ready);
    CHECK(!run.bad);
    check_same_bits(p, want);
}

static void threads(void) {
    static const struct { int H, Hkv; int64_t T_c, n_tail, N_q; } table[] = {
        {9, 3, 700, 40, 1}, {4, 1, 3000, 1, 1}, {8, 8, 100, 300, 5}, {6, 2, 600, 70, 67}, {2, 2, 0, 30, 30},
        {3, 1, 0, 0, 2},
    };
    static const int nth[] = {1, 2, 3, 7, 16};
    for (int c = 0; c < COUNT(table) * 4; c++) {
        problem p = plain;
        p.H = table[c / 4].H, p.Hkv = table[c / 4].Hkv, p.T_c = table[c / 4].T_c;
        p.n_tail = table[c / 4].n_tail, p.N_q = table[c / 4].N_q;
        p.type = packed_at(c);
        p.strided = c % 2;
        run_one(&p);
        double *want = results_of(&p);
        for (int i = 0; i < COUNT(nth); i++) check_threads(&p, want, nth[i]);
        CHECK(test_release());
    }
}

/* A batch of different lengths, shapes and types is its parts. */
static void batch(void) {
    enum { N = 5 };
    static problem p[N];
    for (int nth = 1; nth <= 16; nth += 5) {
        dkv_attention a[N];
        double *want[N];
        for (int i = 0; i < N; i++) {
            p[i] = plain;
            p[i].T_c = 37 * i * i, p[i].n_tail = 4 * i, p[i].N_q = 1 + 2 * i;
            p[i].type = packed_at(i);
            p[i].H = 2 + 2 * i, p[i].d_k = 16 + 9 * i;
            run_one(&p[i]);
            want[i] = results_of(&p[i]);
            poison_results(&p[i]);
            a[i] = p[i].a;
        }
        size_t bytes;
        CHECK_OK(dkv_attend_size(&bytes, a, N, nth));
        void *ws = guarded(bytes, 64);
        CHECK_OK(dkv_attend(a, N, ws, bytes, &(dkv_parallel){run_pthreads, NULL, nth}));
        for (int i = 0; i < N; i++) check_same_bits(&p[i], want[i]);
        CHECK_OK(dkv_attend_size(&bytes, a, 0, nth)); /* the empty batch */
        CHECK_OK(dkv_attend(a, 0, ws, bytes, NULL));
        CHECK(test_release());
    }
}

/* A long sequence among a hundred short ones is cut as it is alone. */
static void big_batch(void) {
    enum { N = 100 };
    problem p = plain;
    p.T_c = 5000;
    run_one(&p);
    double *want = results_of(&p);
    dkv_attention a[N] = {p.a};
    for (int i = 1; i < N; i++) {
        a[i] = p.a;
        a[i].tail.n = i % 10;
        a[i].context = (dkv_segment){.n = 0};
        a[i].out = new_tensor(THD, DKV_F32, p.N_q, p.H, p.d_v);
        a[i].lse = NULL;
    }
    size_t bytes;
    CHECK_OK(dkv_attend_size(&bytes, a, N, 1));
    poison_results(&p);
    CHECK_OK(dkv_attend(a, N, guarded(bytes, 64), bytes, NULL));
    check_same_bits(&p, want);
}

/* All ones, and contexts that sink and recent cover: the same bits as the dense plan. */
static void equal_to_dense(void) {
    for (int c = 0; c < 10; c++) {
        int64_t T_c = c / 5 ? 40 : 400; /* S + R = 48 */
        problem p = plain;
        p.T_c = T_c, p.density = 1, p.type = packed_at(c);
        run_one(&p); /* the dense plan: all positions */
        double *dense = results_of(&p);
        oracle_pattern o = random_pattern(1, p.H, p.Hkv, 40, 10, 16, 32, T_c == 40 ? 0.1 : 1);
        dkv_pattern pattern = pattern_of(&o);
        p.plan = plan_of(&pattern, T_c, DKV_BEYOND_ERROR);
        p.context = pack_layer(&p.plan, p.type, p.d_k, p.d_v, &p.source);
        poison_results(&p);
        CHECK_OK(dkv_attend(&p.a, 1, p.ws, p.ws_bytes, NULL));
        check_same_bits(&p, dense);
        CHECK(test_release());
    }
}

/* lse NULL, or rows of a longer tail than was asked for: the same bits. A shorter tail fits the same workspace. */
static void workspace_and_lse(void) {
    problem p = plain;
    p.n_tail = 200;
    run_one(&p);
    size_t smaller;
    p.a.tail.n = 10;
    CHECK_OK(dkv_attend_size(&smaller, &p.a, 1, 1));
    CHECK(smaller <= p.ws_bytes);
    CHECK_OK(dkv_attend(&p.a, 1, p.ws, p.ws_bytes, NULL));
    double *want = results_of(&p);
    poison_results(&p);
    float *lse = p.a.lse;
    p.a.lse = NULL;
    CHECK_OK(dkv_attend(&p.a, 1, p.ws, p.ws_bytes, NULL));
    CHECK(is_poison(lse, (size_t)(p.N_q * p.H) * 4));
    CHECK(!memcmp(results_of(&(problem){.H = p.H, .N_q = p.N_q, .d_v = p.d_v, .a = {.out = p.a.out, .lse = lse}}), want,
                  (size_t)(p.N_q * p.H * p.d_v) * 8));
}

/* A NaN in one query head's row changes that row alone. */
static void nan_rows(void) {
    for (int c = 0; c < 15; c++) {
        problem p = plain;
        p.N_q = c % 2 ? 7 : 5, p.n_tail = 12, p.type = packed_at(c), p.strided = c / 5 == 1;
        run_one(&p);
        double *want = results_of(&p);
        int64_t rows = p.N_q * p.H, sick = rnd_below(rows);
        AT("case %d row %d", c, (int)sick);
        oracle_put(&p.a.q, sick / p.H, sick % p.H, rnd_below(p.d_k), (double)NAN);
        poison_results(&p);
        CHECK_OK(dkv_attend(&p.a, 1, p.ws, p.ws_bytes, NULL));
        double *got = results_of(&p);
        for (int64_t r = 0; r < rows; r++) {
            if (r != sick) CHECK(got[rows * p.d_v + r] == want[rows * p.d_v + r]);
            else CHECK(isnan(got[rows * p.d_v + r]));
            for (int i = 0; i < p.d_v; i++)
                CHECK(r == sick ? isnan(got[r * p.d_v + i]) : got[r * p.d_v + i] == want[r * p.d_v + i]);
        }
        CHECK(test_release());
    }
}

/* NaNs in the keys and values of later tokens change no bit of earlier ones. */
static void nan_to_come(void) {
    for (int c = 0; c < 24; c++) {
        problem p = plain;
        p.H = 2 * (c % 4 + 1), p.T_c = 40, p.N_q = 50, p.n_tail = 60 + c * 20, p.type = packed_at(c);
        p.tail_type = type_at(c), p.tail_packed = c / 3 % 2;
        run_one(&p);
        double *want = results_of(&p), *got;
        int64_t last = rnd_below(p.N_q - 1), seen = p.n_tail - p.N_q + 1 + last; /* by the last query before them */
        for (int64_t i = seen * p.Hkv * p.d_k; i < p.n_tail * p.Hkv * p.d_k; i++) p.tail_k[i] = (double)NAN;
        for (int64_t i = seen * p.Hkv * p.d_v; i < p.n_tail * p.Hkv * p.d_v; i++) p.tail_v[i] = (double)NAN;
        p.a.tail = tail_of(&p);
        poison_results(&p);
        CHECK_OK(dkv_attend(&p.a, 1, p.ws, p.ws_bytes, NULL));
        got = results_of(&p);
        CHECK(!memcmp(got, want, (size_t)((last + 1) * p.H * p.d_v) * 8));
        for (int64_t i = (last + 1) * p.H * p.d_v; i < p.N_q * p.H * p.d_v; i++) CHECK(isnan(got[i]));
        CHECK(test_release());
    }
}

/* ---- places --------------------------------------------------------------- */

/* Strides past 2^31 and 2^32 bytes in the tail, the queries and the output. */
static void far_strides(void) {
    const int64_t far = ((int64_t)5 << 29) + 64;
    char *map = reserve(far * 8);
    problem p = plain;
    p.H = 2, p.Hkv = 1, p.d_k = 4, p.d_v = 4, p.N_q = 3, p.n_tail = 3, p.T_c = 5;
    build(&p);
    p.a.tail.k = (dkv_tensor){map, DKV_F32, far, 0, 4};
    p.a.tail.v = (dkv_tensor){map + far * 6, DKV_F32, -far, 0, 8};
    p.a.q = (dkv_tensor){map + 4096, DKV_F32, far * 2, far, 4};
    p.a.out = (dkv_tensor){map + far * 6 + 4096, DKV_F32, 64, 256, 4};
    fill_tensor(&p.a.tail.k, p.tail_k, 3, 1, 4);
    fill_tensor(&p.a.tail.v, p.tail_v, 3, 1, 4);
    fill_tensor(&p.a.q, p.q, 3, 2, 4);
    AT("far tail and queries");
    CHECK_OK(dkv_attend(&p.a, 1, p.ws, p.ws_bytes, NULL));
    check_against_oracle(&p);
    p.a.q = tensor_of(&p, DKV_F32, p.q, 3, 2, 4);
    p.a.tail.k = tensor_of(&p, DKV_F32, p.tail_k, 3, 1, 4);
    p.a.tail.v = tensor_of(&p, DKV_F32, p.tail_v, 3, 1, 4);
    p.a.out = (dkv_tensor){map, DKV_F32, far * 2, far, 4};
    AT("far output");
    CHECK_OK(dkv_attend(&p.a, 1, p.ws, p.ws_bytes, NULL));
    check_against_oracle(&p);
    munmap(map, (size_t)(far * 8));
}

static void errors(void) {
    problem p = plain;
    build(&p);
    dkv_attention a;
    size_t bytes;
    int64_t out_bytes = p.N_q * p.H * p.d_v * 4;
#define BAD(change, want, mem, size) \
    a = p.a; change; AT("%s", #change); \
    CHECK_RESULT(dkv_attend(&a, 1, mem, size, NULL), want); \
    CHECK_RESULT(dkv_attend_part(&a, 1, mem, size, 0, 1), want); \
    CHECK(is_poison(p.a.lse, (size_t)(p.N_q * p.H) * 4) && is_poison(p.a.out.data, (size_t)out_bytes) && \
          is_poison(p.ws, p.ws_bytes))
#define BAD_CALL(change, want) \
    BAD(change, want, p.ws, p.ws_bytes); CHECK_RESULT(dkv_attend_size(&bytes, &a, 1, 1), want)
    BAD_CALL(a.H = 5, DKV_ERR_SHAPE);                     BAD_CALL(a.H = 0, DKV_ERR_SHAPE);
    BAD_CALL(a.Hkv = 0, DKV_ERR_SHAPE);                   BAD_CALL(a.Hkv = -1, DKV_ERR_SHAPE);
    BAD_CALL(a.d_k = 0, DKV_ERR_SHAPE);                   BAD_CALL(a.d_k = 577, DKV_ERR_SHAPE);
    BAD_CALL(a.d_v = 0, DKV_ERR_SHAPE);                   BAD_CALL(a.d_v = 577, DKV_ERR_SHAPE);
    BAD_CALL(a.d_k = 63, DKV_ERR_SHAPE);                  BAD_CALL(a.d_v = 63, DKV_ERR_SHAPE); /* not the packed ones */
    BAD_CALL(a.H = 12; a.Hkv = 4, DKV_ERR_SHAPE);         BAD_CALL(a.N_q = -1, DKV_ERR_SHAPE);
    BAD_CALL(a.tail.n = -1, DKV_ERR_SHAPE);               BAD_CALL(a.q.type = DKV_I8, DKV_ERR_TYPE);
    BAD_CALL(a.out.type = (dkv_type)-1, DKV_ERR_TYPE);    BAD_CALL(a.tail.k.type = DKV_FP8, DKV_ERR_TYPE);
    BAD_CALL(a.tail.v.type = (dkv_type)9, DKV_ERR_TYPE);
    BAD((void)a, DKV_ERR_CAPACITY, p.ws, p.ws_bytes - 1); BAD((void)a, DKV_ERR_CAPACITY, p.ws, 0);
    BAD((void)a, DKV_ERR_ALIGN, (char *)p.ws + 32, p.ws_bytes);
    char *end = (char *)p.a.out.data + out_bytes;
    BAD(a.q.data = end - 1, DKV_ERR_OVERLAP, p.ws, p.ws_bytes);
    BAD(a.tail.k.data = end - 1, DKV_ERR_OVERLAP, p.ws, p.ws_bytes);
    BAD(a.tail.v.data = p.a.out.data, DKV_ERR_OVERLAP, p.ws, p.ws_bytes);
    BAD(a.sink = (float *)(void *)(end - 4), DKV_ERR_OVERLAP, p.ws, p.ws_bytes);
    dkv_packed inside = p.context;
    inside.data = p.a.out.data;
    BAD(a.context.packed = &inside, DKV_ERR_OVERLAP, p.ws, p.ws_bytes);
    int64_t too_many[] = {p.plan.rows[0], 161};
    dkv_packed ragged = p.context, short_of = p.context, shifted = p.context;
    ragged.capacity = 168, short_of.capacity = 160, short_of.rows = too_many;
    shifted.data = (char *)shifted.data + 32;
    BAD(a.context.packed = &ragged, DKV_ERR_CAPACITY, p.ws, p.ws_bytes);
    BAD(a.context.packed = &short_of, DKV_ERR_CAPACITY, p.ws, p.ws_bytes);
    BAD(a.context.packed = &shifted, DKV_ERR_ALIGN, p.ws, p.ws_bytes);
#undef BAD_CALL
#undef BAD
}

int main(void) {
    static const test_case cases[] = {
        {"types x groups x queries", types_groups_queries, 1},
        {"dimensions", dimensions, 1},
        {"lengths", lengths, 1},
        {"layouts", layouts, 1},
        {"NaN in slack", slack, 1},
        {"tail shorter than the queries", tail_shorter_than_queries, 1},
        {"scale, softcap, sink", options, 1},
        {"huge logits", huge_logits, 1},
        {"exponentials", exponentials, 1},
        {"infinite logits", infinite_logits, 1},
        {"random mix", random_mix, 1},
        {"threads, bit for bit", threads, 1},
        {"batch, bit for bit", batch, 1},
        {"big batch, bit for bit", big_batch, 1},
        {"equal to dense, bit for bit", equal_to_dense, 1},
        {"workspace and lse", workspace_and_lse, 1},
        {"NaN in a query row", nan_rows, 1},
        {"NaN in later tokens", nan_to_come, 1},
        {"strides past 2^32", far_strides, 1},
        {"errors", errors, 0},
    };
    return run_cases("attend", cases, COUNT(cases));
}
