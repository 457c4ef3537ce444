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
    };
    return run_cases("cuda learn", cases, COUNT(cases));
}
