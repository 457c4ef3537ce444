/* [CUDA], learning: gates against the CPU's functions, bit for bit where the header says so; ranks against double
   precision, on every path (wgmma + TMA and mma.sync). */
#define _GNU_SOURCE
#include "cuda.h"
#include "tolerance.h"

/* ---- gates: shapes, inputs -------------------------------------------------- */

static const dkv_gates shapes[] = {
    {2, 6, 2, 5, 0},   {1, 8, 1, 3, 0},  {3, 4, 4, 7, 0},   {2, 14, 2, 131, 0}, {2, 6, 2, 129, 1},
    {1, 9, 3, 1, 1},   {1, 1, 1, 1, 0},  {1, 71, 1, 33, 0}, {2, 18, 2, 17, 0},  {5, 12, 3, 1013, 0},
    {30, 9, 3, 53, 0}, {1, 16, 2, 300, 0},
};
static const dkv_gates large = {32, 32, 8, 1013, 0}; /* Llama-3.1-8B at 128K */

static int64_t cells_of(const dkv_gates *g) { return (int64_t)g->L * g->Hkv * g->D; }
static int64_t bits_of(const dkv_gates *g) { return (int64_t)g->L * g->H * g->D; }

static float *normal_floats(int64_t n, double deviation) {
    float *x = guarded((size_t)n * 4, 4);
    for (int64_t i = 0; i < n; i++) x[i] = (float)(deviation * rnd_normal());
    return x;
}

/* Every kind of logit: usual ones, saturated ones, zeros of both signs and ties. */
static float *logits(int64_t n) {
    float *a = normal_floats(n, 2);
    for (int64_t i = 0; i < n; i++) {
        int64_t kind = rnd_below(16);
        if (kind == 0) a[i] *= 30;
        if (kind == 1) a[i] = (float)(rnd_below(3) - 1);
        if (kind == 2) a[i] = i % 2 ? -0.0f : 0.0f;
    }
    return a;
}

static void check_bits(const char *what, const float *got, const float *want, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(got + i, want + i, 4))
            fail_msg("at %s: %s[%lld] is %.9g, not %.9g", test_at, what, (long long)i, (double)got[i],
                     (double)want[i]);
}

static void at_shape(const dkv_gates *g) {
    AT("L %d H %d Hkv %d D %d%s", g->L, g->H, g->Hkv, g->D, g->tied ? " tied" : "");
}

static const dkv_draw some_draw = {0x123456789abcdefu, 7, 0xfffffffeu}; /* contexts go round past 2^32 */

/* ---- draws and unions --------------------------------------------------------- */

static void check_union(const dkv_gates *g, int64_t n) {
    int64_t cells = cells_of(g), count = dkv_gates_count(g);
    float *a = logits(count), *want = guarded((size_t)cells * 4, 4), *want_ln = guarded((size_t)cells * 4, 4);
    float *a_there = to_device(a, (size_t)count * 4), *u = device((size_t)(n * cells) * 4);
    float *ln = device((size_t)(n * cells) * 4), *alone = device((size_t)(n * cells) * 4);
    at_shape(g);
    CHECK_OK(dkv_cuda_gates_union(u, ln, g, a_there, some_draw, n, NULL));
    CHECK_OK(dkv_cuda_gates_union(NULL, alone, g, a_there, some_draw, n, NULL));
    CHECK_OK(dkv_cuda_gates_union(NULL, NULL, g, a_there, some_draw, 0, NULL));
    const float *got = to_host(u, (size_t)(n * cells) * 4), *got_ln = to_host(ln, (size_t)(n * cells) * 4);
    CHECK(!memcmp(got_ln, to_host(alone, (size_t)(n * cells) * 4), (size_t)(n * cells) * 4));
    for (int64_t i = 0; i < n; i++) {
        dkv_draw draw = some_draw;
        draw.context += (uint32_t)i;
        dkv_gates_union(want, want_ln, g, a, draw);
        check_bits("u", got + i * cells, want, cells);
        check_bits("ln u", got_ln + i * cells, want_ln, cells);
    }
    CHECK(release_all());
}

static void unions(void) {
    NEEDS_DEVICE;
    for (int i = 0; i < COUNT(shapes); i++) check_union(&shapes[i], 5);
    check_union(&large, 2); /* 2e6 draws */
}

/* da of one launch over n contexts, from the same start. */
static float *backward_on_device(const dkv_gates *g, const float *start, const float *a, int64_t n,
                                 const float *d_ln_u) {
    size_t bytes = (size_t)dkv_gates_count(g) * 4;
    float *da = to_device(start, bytes);
    CHECK_OK(dkv_cuda_gates_union_backward(da, g, a, some_draw, n, d_ln_u, NULL));
    return to_host(da, bytes);
}

static void check_union_backward(const dkv_gates *g, int64_t n) {
    int64_t cells = cells_of(g), count = dkv_gates_count(g);
    float *a = logits(count), *d = normal_floats(n * cells, 1), *start = normal_floats(count, 1e-3);
    float *want = guarded((size_t)count * 4, 4);
    float *a_there = to_device(a, (size_t)count * 4), *d_there = to_device(d, (size_t)(n * cells) * 4);
    at_shape(g);
    memcpy(want, start, (size_t)count * 4);
    for (int64_t i = 0; i < n; i++) {
        dkv_draw draw = some_draw;
        draw.context += (uint32_t)i;
        dkv_gates_union_backward(want, g, a, draw, d + i * cells);
    }
    check_bits("da", backward_on_device(g, start, a_there, n, d_there), want, count);
    CHECK(release_all());
}

static void union_gradients(void) {
    NEEDS_DEVICE;
    for (int i = 0; i < COUNT(shapes); i++) {
        check_union_backward(&shapes[i], 4);
        check_union_backward(&shapes[i], 0);
    }
    check_union_backward(&large, 2);
}

static void union_gradient_reruns(void) {
    NEEDS_DEVICE;
    const dkv_gates g = {4, 8, 2, 1013, 0};
    int64_t count = dkv_gates_count(&g), n = 56;
    float *a = to_device(logits(count), (size_t)count * 4), *start = normal_floats(count, 1);
    float *d = to_device(normal_floats(n * cells_of(&g), 1), (size_t)(n * cells_of(&g)) * 4);
    float *once = backward_on_device(&g, start, a, n, d);
    CHECK(memcmp(once, start, (size_t)count * 4));
    for (int i = 0; i < 20; i++)
        CHECK(!memcmp(once, backward_on_device(&g, start, a, n, d), (size_t)count * 4));
    CHECK(release_all());
}

/* ---- penalty and optimizer ------------------------------------------------------ */

static void check_penalty(const dkv_gates *g, dkv_budget budget) {
    int64_t count = dkv_gates_count(g);
    float *a = logits(count), *da = normal_floats(count, 1e-4), *a_there = to_device(a, (size_t)count * 4);
    float *da_there = to_device(da, (size_t)count * 4);
    double *means = device(2 * sizeof(double)), want = dkv_gates_penalty(da, g, a, budget, 0.37f);
    void *ws = device(DKV_CUDA_GATES_WS);
    at_shape(g);
    CHECK_OK(dkv_cuda_gates_penalty(means, NULL, g, a_there, budget, 0.37f, ws, NULL));
    CHECK_OK(dkv_cuda_gates_penalty(means + 1, da_there, g, a_there, budget, 0.37f, ws, NULL));
    double *got = to_host(means, 2 * sizeof(double));
    CHECK(fabs(got[0] - want) <= 1e-12 * want);
    CHECK(got[1] == got[0]);
    check_bits("da", to_host(da_there, (size_t)count * 4), da, count);
    CHECK_OK(dkv_cuda_gates_penalty(NULL, da_there, g, a_there, budget, 0, ws, NULL));
    CHECK(release_all());
}

static void penalties(void) {
    NEEDS_DEVICE;
    for (int i = 0; i < COUNT(shapes); i++)
        for (int physical = 0; physical < 2; physical++)
            check_penalty(&shapes[i], physical ? DKV_BUDGET_PHYSICAL : DKV_BUDGET_LOGICAL);
    check_penalty(&large, DKV_BUDGET_LOGICAL);
    check_penalty(&large, DKV_BUDGET_PHYSICAL);
}

/* The order of the sum moves the norm by some 1e-13 of itself, so a quotient may round to a neighbour. */
static void clipping(void) {
    NEEDS_DEVICE;
    static const int64_t lengths[] = {1, 255, 512, 131073, 1037312};
    for (int i = 0; i < COUNT(lengths); i++)
        for (int small = 0; small < 2; small++) {
            int64_t n = lengths[i];
            AT("%lld, %s", (long long)n, small ? "norm below 1" : "norm above 1");
            float *x = normal_floats(n, small ? 0.2 / sqrt((double)n) : 2), *was = guarded((size_t)n * 4, 4);
            x[0] = small ? 0.125f : 1.5f;
            memcpy(was, x, (size_t)n * 4);
            float *there = to_device(x, (size_t)n * 4);
            double *norm = device(8), want = dkv_gates_clip(x, n);
            void *ws = device(DKV_CUDA_GATES_WS);
            CHECK_OK(dkv_cuda_gates_clip(norm, there, n, ws, NULL));
            float *got = to_host(there, (size_t)n * 4);
            CHECK(fabs(*(double *)to_host(norm, 8) - want) <= 1e-12 * want);
            if (small) check_bits("x", got, was, n);
            for (int64_t k = 0; k < n; k++)
                CHECK(fabs((double)got[k] - (double)x[k]) <= ldexp(fabs((double)x[k]), -23));
            if (!small) CHECK(memcmp(got, was, (size_t)n * 4));
            CHECK_OK(dkv_cuda_gates_clip(NULL, there, n, ws, NULL));
            CHECK(release_all());
        }
}

static void adamw(void) {
    NEEDS_DEVICE;
    int64_t n = 131075;
    size_t bytes = (size_t)n * 4;
    float *x[3] = {normal_floats(n, 1), normal_floats(n, 0), normal_floats(n, 0)}, *there[3];
    for (int j = 0; j < 3; j++) there[j] = to_device(x[j], bytes);
    for (int64_t t = 1; t <= 44; t += t < 4 ? 1 : 10) {
        float *da = normal_floats(n, t % 2 ? 1e-3 : 1e-7);
        AT("t %d", (int)t);
        da[5] = 0;
        dkv_gates_adamw(x[0], x[1], x[2], da, n, t, 0.01);
        CHECK_OK(dkv_cuda_gates_adamw(there[0], there[1], there[2], to_device(da, bytes), n, t, 0.01, NULL));
        for (int j = 0; j < 3; j++) check_bits(j == 0 ? "a" : j == 1 ? "m" : "v", to_host(there[j], bytes), x[j], n);
    }
    CHECK_RESULT(dkv_cuda_gates_adamw(there[0], there[1], there[2], there[0], n, 0, 0.01, NULL), DKV_ERR_FIELD);
    CHECK(release_all());
}

/* ---- Top-K ------------------------------------------------------------------------ */

enum { FEW_VALUES, ALL_EQUAL, SATURATED, USUAL, KINDS };

static float *ranked(int kind, int64_t n) {
    float *a = logits(n);
    for (int64_t i = 0; i < n; i++) {
        if (kind == FEW_VALUES) a[i] = (float)(rnd_below(5) - 2) / 4;
        if (kind == ALL_EQUAL) a[i] = -1.5f;
        if (kind == SATURATED) a[i] = 20 + (float)rnd_below(1000); /* p is 1 for all */
    }
    return a;
}

static void check_top(const dkv_gates *g, int kind) {
    static const double rhos[] = {0, 1e-9, 0.05, 0.2, 0.5, 0.777, 1};
    int64_t count = dkv_gates_count(g), bits = bits_of(g), K, K_there;
    float *a = ranked(kind, count), *a_there = to_device(a, (size_t)count * 4);
    unsigned char *want = guarded((size_t)bits, 1), *open = guarded((size_t)cells_of(g), 1);
    unsigned char *M = device((size_t)bits), *open_there = device((size_t)cells_of(g));
    void *ws = device(DKV_CUDA_GATES_WS);
    for (int i = 0; i < COUNT(rhos) * 4; i++) {
        dkv_budget budget = i & 1 ? DKV_BUDGET_PHYSICAL : DKV_BUDGET_LOGICAL;
        int by_p = i >> 1 & 1;
        double rho = rhos[i / 4];
        AT("L %d H %d Hkv %d D %d%s, logits %d, rho %g, %s%s", g->L, g->H, g->Hkv, g->D, g->tied ? " tied" : "", kind,
           rho, i & 1 ? "physical" : "logical", by_p ? ", by p" : "");
        CHECK_OK(dkv_gates_top(want, &K, g, a, budget, rho, by_p));
        CHECK_OK(dkv_cuda_gates_top(M, &K_there, g, a_there, budget, rho, by_p, ws, NULL));
        CHECK_INT(K_there, K);
        CHECK(!memcmp(to_host(M, (size_t)bits), want, (size_t)bits));
        dkv_gates_or(open, g, want);
        CHECK_OK(dkv_cuda_gates_or(open_there, g, M, NULL));
        CHECK(!memcmp(to_host(open_there, (size_t)cells_of(g)), open, (size_t)cells_of(g)));
    }
    CHECK(release_all());
}

static void top(void) {
    NEEDS_DEVICE;
    for (int i = 0; i < COUNT(shapes); i++)
        for (int kind = 0; kind < KINDS; kind++) check_top(&shapes[i], kind);
    check_top(&large, FEW_VALUES);
    check_top(&large, USUAL);
}

/* ---- a step, captured -------------------------------------------------------------- */

typedef struct step {
    dkv_gates g;
    float *a, *m, *v, *da, *ln_u;
    unsigned char *M, *open;
    void *ws;
    double *sums;
} step;

static step make_step(const float *a) {
    step s = {.g = shapes[9]};
    size_t n = (size_t)dkv_gates_count(&s.g) * 4, cells = (size_t)cells_of(&s.g);
    s.a = to_device(a, n), s.m = device(n), s.v = device(n), s.da = device(n), s.ln_u = device(3 * cells * 4);
    s.M = device(n / 4), s.open = device(cells), s.ws = device(DKV_CUDA_GATES_WS), s.sums = device(16);
    CUDA(cudaMemset(s.m, 0, n));
    CUDA(cudaMemset(s.v, 0, n));
    return s;
}

static void take_step(const step *s, cudaStream_t stream) {
    int64_t n = dkv_gates_count(&s->g), K;
    CUDA(cudaMemsetAsync(s->da, 0, (size_t)n * 4, stream));
    CHECK_OK(dkv_cuda_gates_union(NULL, s->ln_u, &s->g, s->a, some_draw, 3, stream));
    CHECK_OK(dkv_cuda_gates_union_backward(s->da, &s->g, s->a, some_draw, 3, (float *)s->a, stream));
    CHECK_OK(dkv_cuda_gates_penalty(s->sums, s->da, &s->g, s->a, DKV_BUDGET_PHYSICAL, 0.5f, s->ws, stream));
    CHECK_OK(dkv_cuda_gates_clip(s->sums + 1, s->da, n, s->ws, stream));
    CHECK_OK(dkv_cuda_gates_adamw(s->a, s->m, s->v, s->da, n, 3, 0.01, stream));
    CHECK_OK(dkv_cuda_gates_top(s->M, &K, &s->g, s->a, DKV_BUDGET_PHYSICAL, 0.3, 0, s->ws, stream));
    CHECK_OK(dkv_cuda_gates_or(s->open, &s->g, s->M, stream));
}

static void captured_step(void) {
    NEEDS_DEVICE;
    int64_t n = dkv_gates_count(&shapes[9]);
    float *a = logits(n);
    step direct = make_step(a), replayed = make_step(a);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    for (int i = 0; i < 3; i++) take_step(&direct, NULL);
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    take_step(&replayed, stream);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaDeviceSynchronize());
    check_bits("a", to_host(replayed.a, (size_t)n * 4), to_host(direct.a, (size_t)n * 4), n);
    CHECK(!memcmp(to_host(replayed.sums, 16), to_host(direct.sums, 16), 16));
    CHECK(!memcmp(to_host(replayed.M, (size_t)n), to_host(direct.M, (size_t)n), (size_t)n));
    CHECK(memcmp(to_host(replayed.a, (size_t)n * 4), a, (size_t)n * 4));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    CHECK(release_all());
}

static void gates_refuse(void) {
    NEEDS_DEVICE;
    dkv_gates g = {2, 6, 2, 5, 0}, odd = {2, 5, 2, 5, 0}, none = {0, 6, 2, 5, 0}, huge = {4096, 4096, 1, 1 << 20, 0};
    int64_t n = dkv_gates_count(&g), K = 77;
    float *x = device((size_t)n * 4);
    unsigned char *M = device((size_t)n);
    void *ws = device(DKV_CUDA_GATES_WS);
    const struct { const dkv_gates *g; dkv_result want; } bad[] = {
        {&odd, DKV_ERR_SHAPE}, {&none, DKV_ERR_FIELD}, {&huge, DKV_ERR_SHAPE}};
    for (int i = 0; i < COUNT(bad); i++) {
        AT("%d", i);
        CHECK_RESULT(dkv_cuda_gates_union(x, x, bad[i].g, x, some_draw, 1, NULL), bad[i].want);
        CHECK_RESULT(dkv_cuda_gates_union_backward(x, bad[i].g, x, some_draw, 1, x, NULL), bad[i].want);
        CHECK_RESULT(dkv_cuda_gates_penalty(NULL, x, bad[i].g, x, DKV_BUDGET_LOGICAL, 1, ws, NULL), bad[i].want);
        CHECK_RESULT(dkv_cuda_gates_top(M, &K, bad[i].g, x, DKV_BUDGET_LOGICAL, 0.5, 0, ws, NULL), bad[i].want);
        CHECK_RESULT(dkv_cuda_gates_or(M, bad[i].g, M, NULL), bad[i].want);
    }
    CHECK_RESULT(dkv_cuda_gates_union(x, x, &g, x, some_draw, -1, NULL), DKV_ERR_SHAPE);
    CHECK_RESULT(dkv_cuda_gates_union_backward(x, &g, x, some_draw, -1, x, NULL), DKV_ERR_SHAPE);
    CHECK_RESULT(dkv_cuda_gates_top(M, &K, &g, x, DKV_BUDGET_LOGICAL, 1.01, 0, ws, NULL), DKV_ERR_FIELD);
    CHECK_RESULT(dkv_cuda_gates_top(M, &K, &g, x, DKV_BUDGET_LOGICAL, (double)NAN, 0, ws, NULL), DKV_ERR_FIELD);
    CHECK_INT(K, 77);
    CUDA(cudaDeviceSynchronize());
    CHECK(is_poison_on_device(x, (size_t)n * 4) && is_poison_on_device(M, (size_t)n));
    CHECK(release_all());
}

/* ---- ranks: questions about one context ---------------------------------------------- */

enum { MOST_QUESTIONS = 12 };

typedef struct problem {
    int H, Hkv, d, n;                        /* n: questions */
    int64_t T_c, N_q, n_tail;                /* of question x: N_q + x % 3 and n_tail + 40 x */
    dkv_type type, q_type;
    int layout, packed, whole, equal;        /* packed: 1, or 2 where heads keep different rows; whole: exact logits */

    double *k, *q[MOST_QUESTIONS], *tail_k[MOST_QUESTIONS];
    dkv_plan plan;
    dkv_packed context;
    int64_t *row, rows;                      /* [Hkv][T_c] positions of the context's rows; their least number */
    dkv_attention a[MOST_QUESTIONS];
    int64_t *source, queries;
} problem;

static const problem plain = {.H = 8, .Hkv = 2, .d = 128, .n = 1, .T_c = 300, .N_q = 5, .n_tail = 9,
                              .type = DKV_BF16, .q_type = DKV_BF16};

static double *values(const problem *p, int64_t n, dkv_type type) {
    double *x = normal_values(n, type, 1);
    for (int64_t i = 0; i < n && p->whole; i++) x[i] = (double)rnd_below(5) - 2;
    return x;
}

static dkv_tensor on_device(int layout, dkv_type type, const double *x, int64_t T, int heads, int d) {
    dkv_tensor host = host_tensor(layout, type, T, heads, d);
    fill_tensor(&host, x, T, heads, d);
    return upload(&host, T, heads, d);
}

/* Which positions are rows, of all or of two thirds. V is not there, or packed with it. */
static void build_context(problem *p, dkv_segment *context) {
    dkv_tensor k = on_device(p->layout, p->type, p->k, p->T_c, p->Hkv, p->d), none = {0};
    unsigned char *keep = guarded((size_t)(p->Hkv * p->T_c), 1);
    p->row = guarded((size_t)(p->Hkv * p->T_c) * 8, 8);
    p->rows = p->T_c;
    for (int g = 0; g < p->Hkv; g++) {
        int64_t n = 0;
        for (int64_t i = 0; i < p->T_c; i++) {
            keep[g * p->T_c + i] = p->packed < 2 || rnd_below(3) > 0;
            if (keep[g * p->T_c + i]) p->row[g * p->T_c + n++] = i;
        }
        if (n < p->rows) p->rows = n;
    }
    *context = dkv_strided(k, none, p->T_c);
    if (!p->packed) return;
    context->v = k;
    p->plan = plan_of_mask(keep, 1, p->Hkv, p->T_c);
    p->context = pack_on_device(&p->plan, 0, p->type, p->d, p->d, context);
    *context = (dkv_segment){.packed = &p->context};
}

/* p must stay where it is. Sources: the first row, the last, any, and a query in six is not asked. */
static void build(problem *p) {
    dkv_segment context;
    p->k = values(p, p->T_c * p->Hkv * p->d, p->type);
    for (int64_t i = p->Hkv * p->d; i < p->T_c * p->Hkv * p->d && p->equal; i++) p->k[i] = p->k[i - p->Hkv * p->d];
    build_context(p, &context);
    p->queries = 0;
    p->source = guarded((size_t)(p->n * (p->N_q + 2)) * 8, 8);
    for (int x = 0; x < p->n; x++) {
        int64_t N_q = p->N_q + x % 3, tail = p->n_tail + 40 * x;
        p->q[x] = values(p, N_q * p->H * p->d, p->q_type);
        p->tail_k[x] = values(p, tail * p->Hkv * p->d, p->type);
        dkv_tensor k = on_device(p->layout, p->type, p->tail_k[x], tail, p->Hkv, p->d), none = {0};
        p->a[x] = (dkv_attention){.H = p->H, .Hkv = p->Hkv, .d_k = p->d, .N_q = N_q, .context = context,
                                  .q = on_device(p->layout, p->q_type, p->q[x], N_q, p->H, p->d),
                                  .tail = dkv_strided(k, none, tail)};
        for (int64_t i = 0; i < N_q; i++) {
            int64_t kind = rnd_below(6), *source = &p->source[p->queries++];
            *source = kind == 0 || !p->rows ? -1 : kind == 1 ? 0 : kind == 2 ? p->rows - 1 : rnd_below(p->rows);
        }
    }
}

typedef struct workspace { void *p; size_t bytes; } workspace;

static workspace workspace_of(const problem *p) {
    workspace ws;
    CHECK_OK(dkv_cuda_score_size(&ws.bytes, p->a, p->n));
    ws.p = device(ws.bytes);
    return ws;
}

static int64_t *score(const problem *p) {
    workspace ws = workspace_of(p);
    size_t bytes = (size_t)(p->queries * p->H) * 8;
    int64_t *rank = device(bytes);
    CHECK_OK(dkv_cuda_score(rank, p->a, p->n, p->source, ws.p, ws.bytes, NULL));
    CUDA(cudaStreamSynchronize(NULL));
    return to_host(rank, bytes);
}

/* Row j of what head h of query i of question x sees: the context's rows, then the tail's. */
static double logit(const problem *p, int x, int64_t i, int h, int64_t j, double *magnitude) {
    int g = h / (p->H / p->Hkv);
    int64_t rows = p->packed ? p->plan.rows[g] : p->T_c;
    const double *q = p->q[x] + (i * p->H + h) * p->d;
    const double *k = j < rows ? p->k + (p->row[g * p->T_c + j] * p->Hkv + g) * p->d
                               : p->tail_k[x] + ((j - rows) * p->Hkv + g) * p->d;
    double s = 0, a = 0;
    for (int c = 0; c < p->d; c++) s += q[c] * k[c], a += fabs(q[c] * k[c]);
    *magnitude = fmax(*magnitude, a);
    return s;
}

/* The rank lies between the keys that are above by more than rounding, and those that are not below by more. Returns
   whether rounding leaves hit or miss at 5 open. */
static int check_rank(const problem *p, int x, int64_t i, int h, int64_t source, int64_t rank) {
    int64_t tail = p->a[x].tail.n - p->a[x].N_q + 1 + i, above = 0, near = 0;
    int64_t sees = (p->packed ? p->plan.rows[h / (p->H / p->Hkv)] : p->T_c) + (tail < 0 ? 0 : tail);
    double magnitude = 0, own = logit(p, x, i, h, source, &magnitude), *s = malloc((size_t)sees * 8);
    for (int64_t j = 0; j < sees; j++) s[j] = logit(p, x, i, h, j, &magnitude);
    double bound = p->whole ? 0 : 2 * tolerance_gpu_logit(p->type, p->d, magnitude);
    for (int64_t j = 0; j < sees; j++) {
        if (j == source) continue;
        above += bound > 0 ? s[j] > own + bound : s[j] > own || (s[j] == own && j < source);
        near += bound > 0 && fabs(s[j] - own) <= bound;
    }
    free(s);
    if (rank < above || rank > above + near)
        fail_msg("at %s: rank of question %d, query %d, head %d with source %lld is %lld, not %lld..%lld", test_at, x,
                 (int)i, h, (long long)source, (long long)rank, (long long)above, (long long)(above + near));
    return above < 5 && above + near >= 5;
}

/* Returns the rows left open. */
static int check_ranks(const problem *p, const int64_t *rank) {
    int open = 0;
    for (int64_t x = 0, n = 0; x < p->n; x++)
        for (int64_t i = 0; i < p->a[x].N_q; i++, n++)
            for (int h = 0; h < p->H; h++) {
                if (p->source[n] < 0) CHECK_INT(rank[n * p->H + h], -1);
                else open += check_rank(p, (int)x, i, h, p->source[n], rank[n * p->H + h]);
            }
    return open;
}

/* The paths of this device: mma.sync always, and its own best. */
static int archs(int arch[2]) {
    arch[0] = dkv_cuda_limit(1000);
    arch[1] = 80;
    return arch[0] > 80 ? 2 : 1;
}

static int run_one(problem *p) {
    int arch[2], open = 0;
    build(p);
    for (int i = archs(arch) - 1; i >= 0; i--) {
        CHECK_INT(dkv_cuda_limit(arch[i]), arch[i]);
        AT("H %d Hkv %d d %d T_c %d, %d x %d queries, tail %d, %s, q %s, layout %d packed %d whole %d equal %d, sm_%d",
           p->H, p->Hkv, p->d, (int)p->T_c, p->n, (int)p->N_q, (int)p->n_tail, dkv_type_name(p->type),
           dkv_type_name(p->q_type), p->layout, p->packed, p->whole, p->equal, arch[i]);
        open = check_ranks(p, score(p));
    }
    CHECK(release_all());
    return open;
}

static void rank_types_and_groups(void) {
    NEEDS_DEVICE;
    static const int groups[] = {1, 3, 4, 7, 8};
    int open = 0, rows = 0;
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < COUNT(groups); i++)
            for (int packed = 0; packed < 3; packed++) {
                problem p = plain;
                p.H = groups[i] * p.Hkv, p.packed = packed, p.layout = packed ? THD : (i + half) % LAYOUTS;
                p.type = half ? DKV_F16 : DKV_BF16, p.q_type = i % 3 == 2 ? DKV_F32 : p.type;
                p.n = 1 + i % 3;
                if (p.q_type == DKV_F32) p.whole = 1; /* f32 queries are rounded to the keys' type */
                open += run_one(&p);
                rows += (int)p.queries * p.H;
            }
    AT("%d of %d rows are open at 5", open, rows);
    CHECK(open * 50 < rows);
}

static void rank_dimensions(void) {
    NEEDS_DEVICE;
    static const int dims[] = {8, 40, 64, 72, 96, 128, 136, 256};
    for (int i = 0; i < COUNT(dims); i++)
        for (int packed = 0; packed < 2; packed++) {
            problem p = plain;
            p.d = dims[i], p.packed = packed, p.n = 2;
            run_one(&p);
        }
}

static void rank_lengths(void) {
    NEEDS_DEVICE;
    static const int64_t lengths[] = {0, 1, 2, 127, 128, 129, 255, 256, 257, 1000}, tails[] = {0, 1, 88, 127, 128, 129};
    for (int i = 0; i < COUNT(lengths); i++)
        for (int packed = 0; packed < 3; packed++)
            for (int whole = 0; whole < 2; whole++) {
                problem p = plain;
                if (!lengths[i] && packed) continue; /* nothing to pack */
                p.T_c = lengths[i], p.packed = packed, p.whole = whole, p.n = 1 + i % 3;
                p.n_tail = tails[(i + packed) % COUNT(tails)], p.d = i % 2 ? 128 : 64, p.Hkv = 4;
                run_one(&p);
            }
}

/* Row blocks from one to several, full and with a few rows; more questions than a block has. */
static void rank_blocks(void) {
    NEEDS_DEVICE;
    static const struct { int n, H, Hkv; int64_t N_q; } table[] = {
        {1, 8, 2, 1},  {1, 8, 2, 16}, {1, 8, 2, 20},  {1, 4, 4, 160}, {2, 12, 4, 60},
        {9, 8, 1, 30}, {12, 8, 2, 3}, {12, 4, 2, 1},  {4, 16, 1, 70}, {3, 3, 3, 129},
    };
    for (int i = 0; i < COUNT(table); i++)
        for (int d = 64; d <= 256; d *= 2) {
            problem p = plain;
            p.n = table[i].n, p.H = table[i].H, p.Hkv = table[i].Hkv, p.N_q = table[i].N_q, p.d = d;
            p.n_tail = p.N_q - 1 + i % 2 * 5, p.T_c = 500, p.packed = i % 2, p.whole = i % 3 == 0;
            run_one(&p);
        }
}

/* All keys equal: wherever a key lies, only the position can tell it from its source. */
static void rank_equal_keys(void) {
    NEEDS_DEVICE;
    static const int64_t lengths[] = {1, 130, 777, 5000};
    int arch[2];
    for (int i = 0; i < COUNT(lengths) * 6; i++) {
        problem p = plain;
        p.T_c = lengths[i / 6], p.packed = i % 2, p.d = 64 << i / 2 % 3, p.equal = 1, p.N_q = 70, p.n_tail = 0;
        build(&p);
        for (int path = archs(arch) - 1; path >= 0; path--) {
            dkv_cuda_limit(arch[path]);
            AT("T_c %d d %d packed %d sm_%d", (int)p.T_c, p.d, p.packed, arch[path]);
            int64_t *rank = score(&p);
            for (int64_t r = 0; r < p.queries * p.H; r++) CHECK_INT(rank[r], p.source[r / p.H]);
        }
        CHECK(release_all());
    }
}

/* A NaN makes no hit: every key beats a source that is NaN, and a key that is NaN beats every source. An infinite
   source ties with its equals. */
static void rank_not_numbers(void) {
    NEEDS_DEVICE;
    int arch[2];
    for (int packed = 0; packed < 2; packed++) {
        problem p = plain;
        dkv_segment context;
        double unused = 0;
        p.packed = packed, p.whole = 1, p.T_c = 400;
        build(&p);
        for (int64_t i = 0; i < p.queries; i++) p.source[i] = 7;
        int64_t above = logit(&p, 0, 0, 0, 250, &unused) > logit(&p, 0, 0, 0, 7, &unused);
        for (int path = archs(arch) - 1; path >= 0; path--) {
            dkv_cuda_limit(arch[path]);
            AT("packed %d, sm_%d", packed, arch[path]);
            double was = p.k[250 * p.Hkv * p.d], source = p.k[7 * p.Hkv * p.d];
            int64_t before = score(&p)[0];
            p.k[250 * p.Hkv * p.d] = (double)NAN;
            build_context(&p, &context);
            p.a[0].context = context;
            int64_t *rank = score(&p);
            CHECK_INT(rank[0], before + !above);
            p.k[7 * p.Hkv * p.d] = (double)NAN;
            build_context(&p, &context);
            p.a[0].context = context;
            rank = score(&p);
            for (int h = 0; h < p.H / p.Hkv; h++) CHECK_INT(rank[h], p.T_c + p.n_tail - p.N_q + 1);
            CHECK(rank[p.H / p.Hkv] < p.T_c);
            p.k[250 * p.Hkv * p.d] = was, p.k[7 * p.Hkv * p.d] = source;
            build_context(&p, &context);
            p.a[0].context = context;
        }
        CHECK(release_all());
    }
}

/* Whole numbers, so that the CPU's ranks are the GPU's, at lengths the oracle is too slow for. */
static void rank_large(void) {
    NEEDS_DEVICE;
    static const problem table[] = {
        {.H = 8, .Hkv = 2, .d = 128, .n = 4, .T_c = 130816, .N_q = 9, .n_tail = 30, .type = DKV_BF16},
        {.H = 9, .Hkv = 3, .d = 64, .n = 4, .T_c = 7936, .N_q = 40, .n_tail = 60, .type = DKV_F16},
        {.H = 4, .Hkv = 4, .d = 128, .n = 3, .T_c = 32512, .N_q = 9, .n_tail = 140, .type = DKV_BF16, .packed = 1},
    };
    int arch[2];
    for (int i = 0; i < COUNT(table); i++) {
        problem p = table[i];
        p.whole = 1, p.q_type = p.type;
        build(&p);
        dkv_tensor k = new_tensor(THD, DKV_F32, p.T_c, p.Hkv, p.d);
        fill_tensor(&k, p.k, p.T_c, p.Hkv, p.d);
        int64_t *want = guarded((size_t)(p.queries * p.H) * 8, 8), *to = want, *source = p.source;
        for (int x = 0; x < p.n; x++) {
            dkv_attention a = p.a[x];
            size_t bytes;
            a.q = new_tensor(THD, DKV_F32, a.N_q, p.H, p.d);
            a.tail.k = new_tensor(THD, DKV_F32, a.tail.n, p.Hkv, p.d);
            fill_tensor(&a.q, p.q[x], a.N_q, p.H, p.d);
            fill_tensor(&a.tail.k, p.tail_k[x], a.tail.n, p.Hkv, p.d);
            a.context = dkv_strided(k, (dkv_tensor){0}, p.T_c);
            a.scale = 0.25f;
            CHECK_OK(dkv_score_size(&bytes, &a, 64));
            CHECK_OK(dkv_score(to, &a, source, guarded(bytes, 64), bytes, NULL));
            to += a.N_q * p.H, source += a.N_q;
        }
        for (int path = archs(arch) - 1; path >= 0; path--) {
            dkv_cuda_limit(arch[path]);
            AT("problem %d, sm_%d", i, arch[path]);
            int64_t *rank = score(&p);
            for (int64_t r = 0; r < p.queries * p.H; r++) CHECK_INT(rank[r], want[r]);
        }
        CHECK(release_all());
    }
}

/* The block of a few questions goes with the launch, that of many through the workspace. */
static void rank_replays(void) {
    NEEDS_DEVICE;
    for (int many = 0; many < 2; many++) {
        problem p = plain;
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        AT("%s questions", many ? "many" : "few");
        p.n = many ? 12 : 3, p.N_q = many ? 120 : 30, p.H = many ? 2 : 8, p.T_c = many ? 2000 : 9000, p.n_tail = p.N_q;
        p.d = many ? 64 : 128;
        build(&p);
        dkv_cuda_limit(1000);
        int64_t *once = score(&p);
        size_t bytes = (size_t)(p.queries * p.H) * 8;
        check_ranks(&p, once);
        workspace ws = workspace_of(&p);
        int64_t *rank = device(bytes);
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        CHECK_OK(dkv_cuda_score(rank, p.a, p.n, p.source, ws.p, ws.bytes, stream));
        CUDA(cudaStreamEndCapture(stream, &graph));
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        for (int i = 0; i < 20; i++) {
            CUDA(cudaMemsetAsync(rank, 0x33, bytes, stream));
            CUDA(cudaMemsetAsync(ws.p, 0xff, ws.bytes, stream));
            CUDA(cudaGraphLaunch(exec, stream));
            CUDA(cudaStreamSynchronize(stream));
            CHECK(!memcmp(once, to_host(rank, bytes), bytes));
        }
        CUDA(cudaGraphExecDestroy(exec));
        CUDA(cudaGraphDestroy(graph));
        CUDA(cudaStreamDestroy(stream));
        CHECK(release_all());
    }
}

static void rank_refuses(void) {
    NEEDS_DEVICE;
    problem p = plain;
    p.n = 2;
    build(&p);
    workspace ws = workspace_of(&p);
    size_t bytes = (size_t)(p.queries * p.H) * 8;
    int64_t *rank = device(bytes);
    dkv_packed eight = {rank, DKV_FP8, p.Hkv, p.d, p.d, &p.T_c, 0};
#define BAD(change, want) do { \
        dkv_attention a[2] = {p.a[0], p.a[1]}; \
        change; \
        CHECK_RESULT(dkv_cuda_score(rank, a, 2, p.source, ws.p, ws.bytes, NULL), want); } while (0)
    BAD(a[0].H = a[1].H = 5, DKV_ERR_SHAPE);
    BAD(a[0].d_k = a[1].d_k = 12, DKV_ERR_SHAPE);
    BAD(a[1].context.n--, DKV_ERR_SHAPE); /* another context */
    BAD(a[1].context.k.stride_token += 16, DKV_ERR_SHAPE);
    BAD(a[0].scale = -1, DKV_ERR_FIELD);
    BAD(a[1].q.type = DKV_I8, DKV_ERR_TYPE);
    BAD(a[1].tail.k.type = DKV_F16, DKV_ERR_TYPE);
    BAD(a[0].context = a[1].context = (dkv_segment){.packed = &eight}, DKV_ERR_TYPE);
    for (int i = 0; i < 2; i++) {
        int64_t was = p.source[2];
        p.source[2] = i ? p.T_c : -2;
        BAD((void)a, DKV_ERR_SHAPE);
        p.source[2] = was;
    }
    CHECK_RESULT(dkv_cuda_score(rank, p.a, 2, p.source, ws.p, ws.bytes - 64, NULL), DKV_ERR_CAPACITY);
    CHECK_RESULT(dkv_cuda_score(rank, p.a, 2, p.source, (char *)ws.p + 16, ws.bytes, NULL), DKV_ERR_ALIGN);
    CHECK_OK(dkv_cuda_score(rank, p.a, 0, p.source, ws.p, ws.bytes, NULL));
    CUDA(cudaDeviceSynchronize());
    CHECK(is_poison_on_device(rank, bytes) && is_poison_on_device(ws.p, ws.bytes));
    CHECK(release_all());
#undef BAD
}

int main(void) {
    static const test_case cases[] = {
        {"gates: draws and unions", unions, 0},
        {"gates: gradients of unions", union_gradients, 0},
        {"gates: 20 reruns, the same bits", union_gradient_reruns, 0},
        {"gates: penalties", penalties, 0},
        {"gates: clipping", clipping, 0},
        {"gates: AdamW", adamw, 0},
        {"gates: Top-K", top, 0},
        {"gates: a captured step", captured_step, 0},
        {"gates: errors", gates_refuse, 0},
        {"ranks: types x groups", rank_types_and_groups, 0},
        {"ranks: dimensions", rank_dimensions, 0},
        {"ranks: lengths", rank_lengths, 0},
        {"ranks: row blocks", rank_blocks, 0},
        {"ranks: equal keys", rank_equal_keys, 0},
        {"ranks: NaN", rank_not_numbers, 0},
        {"ranks: large, against the CPU", rank_large, 0},
        {"ranks: 20 replays, the same", rank_replays, 0},
        {"ranks: errors", rank_refuses, 0},
    };
    return run_cases("cuda learn", cases, COUNT(cases));
}
