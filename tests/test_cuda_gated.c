/* Gated attention on the GPU: outputs and gradients against the double oracle of tests/gated.h; identities that need no
   tolerance; the same bits run after run. All of it twice: by the device's best kernels, and by those for sm_80. */
#define _GNU_SOURCE
#include "cuda.h"
#include "gated.h"

static const problem small = {.H = 6, .Hkv = 2, .d_k = 64, .d_v = 64, .T_c = 700, .W = 128, .S = 128, .R = 130, .D = 4,
                              .n_suffix = 3, .N_q = {5, 1, 17}, .through = 1, .strided = 1, .type = DKV_BF16,
                              .x_type = DKV_BF16};

/* A problem's device copy: the same structs with device pointers. */
typedef struct there {
    dkv_suffix x[MAX_SUFFIXES];
    dkv_gated c;
} there;

static void poison_results(const problem *p, const there *t) {
    for (int i = 0; i < p->n_suffix; i++) {
        const dkv_suffix *x = &t->x[i];
        poison_tensor(&x->out, x->N_q, p->H, p->d_v);
        poison_tensor(&x->dq, x->N_q, p->H, p->d_k);
        poison_tensor(&x->dk, x->N_q, p->Hkv, p->d_k);
        poison_tensor(&x->dv, x->N_q, p->Hkv, p->d_v);
        if (p->through) poison_tensor(&x->out_relaxed, x->N_q, p->H, p->d_v);
        if (x->N_q) CUDA(cudaMemset(x->lse, TEST_POISON, (size_t)(x->N_q * p->H) * 4));
    }
    CUDA(cudaMemset(t->c.d_ln_u, TEST_POISON, (size_t)(p->Hkv * p->D) * 4));
}

static void send(const problem *p, there *t) {
    const int64_t cells = p->Hkv * p->D;
    t->c = p->c;
    if (p->strided) {
        t->c.context.k = upload(&p->c.context.k, p->T_c, p->Hkv, p->d_k);
        t->c.context.v = upload(&p->c.context.v, p->T_c, p->Hkv, p->d_v);
    }
    t->c.ln_u = to_device(p->ln_u, (size_t)cells * 4);
    if (p->through) t->c.open = to_device(p->open, (size_t)cells);
    t->c.d_ln_u = device((size_t)cells * 4);
    t->c.suffix = t->x;
    for (int i = 0; i < p->n_suffix; i++) {
        const dkv_suffix *from = &p->x[i];
        dkv_suffix *to = &t->x[i];
        int64_t n = from->N_q;
        *to = *from;
        to->q = upload(&from->q, n, p->H, p->d_k);
        to->k = upload(&from->k, n, p->Hkv, p->d_k);
        to->v = upload(&from->v, n, p->Hkv, p->d_v);
        to->d_out = upload(&from->d_out, n, p->H, p->d_v);
        to->out = upload(&from->out, n, p->H, p->d_v);
        to->dq = upload(&from->dq, n, p->H, p->d_k);
        to->dk = upload(&from->dk, n, p->Hkv, p->d_k);
        to->dv = upload(&from->dv, n, p->Hkv, p->d_v);
        to->lse = device((size_t)(n * p->H) * 4);
        if (!p->through) continue;
        to->out_relaxed = upload(&from->out_relaxed, n, p->H, p->d_v);
        to->lse_relaxed = device((size_t)(n * p->H) * 4);
    }
}

static void fetch(const problem *p, const there *t) {
    for (int i = 0; i < p->n_suffix; i++) {
        const dkv_suffix *from = &t->x[i], *to = &p->x[i];
        int64_t n = to->N_q;
        size_t lse = (size_t)(n * p->H) * 4;
        download(&to->out, &from->out, n, p->H, p->d_v);
        download(&to->dq, &from->dq, n, p->H, p->d_k);
        download(&to->dk, &from->dk, n, p->Hkv, p->d_k);
        download(&to->dv, &from->dv, n, p->Hkv, p->d_v);
        if (lse) CUDA(cudaMemcpy(to->lse, from->lse, lse, cudaMemcpyDeviceToHost));
        if (!p->through) continue;
        download(&to->out_relaxed, &from->out_relaxed, n, p->H, p->d_v);
        if (lse) CUDA(cudaMemcpy(to->lse_relaxed, from->lse_relaxed, lse, cudaMemcpyDeviceToHost));
    }
    CUDA(cudaMemcpy(p->c.d_ln_u, t->c.d_ln_u, (size_t)(p->Hkv * p->D) * 4, cudaMemcpyDeviceToHost));
}

static dkv_cuda_gated prepared(const dkv_gated *c, int64_t n) {
    dkv_cuda_gated work;
    size_t block, ws;
    CHECK_OK(dkv_cuda_gated_size(&block, &ws, c, n));
    CHECK_OK(dkv_cuda_gated_prepare(&work, c, n, device(block), block, device(ws), ws, NULL));
    return work;
}

static void pass(const dkv_cuda_gated *work) {
    CHECK_OK(dkv_cuda_gated_forward(work, NULL));
    CHECK_OK(dkv_cuda_gated_backward(work, NULL));
    CUDA(cudaDeviceSynchronize());
}

/* Products round weights, dO and dS to 16 bits; delta has O's error. */
static double rounding(const problem *p) { return p->type == DKV_BF16 ? 3.0 / 512 : 3.0 / 4096; }

static void solve_built(problem *p) {
    there t;
    send(p, &t);
    dkv_cuda_gated work = prepared(&t.c, 1);
    poison_results(p, &t);
    pass(&work);
    fetch(p, &t);
    check(p, rounding(p));
}

static void solve(problem *p) {
    build(p);
    solve_built(p);
    device_release();
}

/* ---- cases --------------------------------------------------------------- */

static void widths(void) {
    static const int64_t table[][5] = { /* W, S, R, D, T_c */
        {128, 128, 256, 4, 896}, {64, 128, 192, 8, 800}, {96, 50, 130, 9, 500}, {128, 100, 128, 4, 700},
        {256, 0, 0, 3, 600}, {1, 3, 5, 40, 48}, {1000, 1, 1, 1, 400}, {300, 129, 127, 3, 1100},
    };
    NEEDS_DEVICE;
    for (int i = 0; i < COUNT(table); i++)
        for (int k = 0; k < 4; k++) {
            problem p = small;
            p.W = table[i][0], p.S = table[i][1], p.R = table[i][2], p.D = table[i][3], p.T_c = table[i][4];
            p.through = k / 2, p.type = p.x_type = k % 2 ? DKV_F16 : DKV_BF16;
            AT("widths %d, kind %d", i, k);
            solve(&p);
        }
}

static void lengths(void) {
    static const int64_t table[] = {0, 1, 127, 128, 129, 257, 258, 259, 386, 387};
    NEEDS_DEVICE;
    for (int i = 0; i < COUNT(table); i++) {
        problem p = small;
        p.T_c = table[i], p.through = i % 2;
        AT("T_c %d", (int)p.T_c);
        solve(&p);
    }
}

static void suffixes(void) {
    static const int64_t table[][MAX_SUFFIXES] = {{1}, {129}, {140, 1, 130}, {2, 64, 3, 33, 31}, {0, 4, 0},
                                                  {70, 5, 131}};
    static const int groups[] = {1, 3, 4, 7};
    NEEDS_DEVICE;
    for (int i = 0; i < COUNT(table); i++)
        for (int k = 0; k < COUNT(groups); k++) {
            problem p = small;
            p.T_c = 190, p.through = (i + k) % 2, p.n_suffix = i < 2 ? 1 : i == 3 ? 5 : 3;
            p.D = 2, p.Hkv = 1 + k % 2, p.H = groups[k] * p.Hkv;
            if (k > 1) p.d_k = p.d_v = 128;
            memcpy(p.N_q, table[i], sizeof p.N_q);
            AT("suffixes %d, G %d", i, groups[k]);
            solve(&p);
        }
}

/* Context and suffixes in every layout whose rows TMA takes; a packed context; d that fill a tile or not. */
static void layouts(void) {
    static const int dims[][2] = {{64, 64}, {128, 128}, {8, 16}, {80, 96}, {40, 128}};
    NEEDS_DEVICE;
    for (int i = 0; i < COUNT(dims); i++)
        for (int k = 0; k < 4; k++) {
            problem p = small;
            p.d_k = dims[i][0], p.d_v = dims[i][1], p.through = k % 2, p.layout = k / 2 ? HEAD_MAJOR : THD;
            p.type = p.x_type = i % 2 ? DKV_F16 : DKV_BF16;
            AT("d %d, %d, layout %d", p.d_k, p.d_v, p.layout);
            solve(&p);
        }
    for (int k = 0; k < 2; k++) {
        problem p = small;
        p.through = k;
        build(&p);
        there t;
        send(&p, &t);
        dkv_plan plan = plan_of_mask(NULL, 1, p.Hkv, p.T_c);
        dkv_packed packed = pack_on_device(&plan, 0, p.type, p.d_k, p.d_v, &t.c.context);
        t.c.context = (dkv_segment){.packed = &packed};
        dkv_cuda_gated work = prepared(&t.c, 1);
        poison_results(&p, &t);
        pass(&work);
        fetch(&p, &t);
        AT("packed, through %d", k);
        check(&p, rounding(&p));
        device_release();
    }
}

static void closed(void) {
    NEEDS_DEVICE;
    for (int i = 0; i < 6; i++) {
        problem p = small;
        if (i % 2) p.S = p.R = 0, p.D = 6;
        if (i == 5) p.W = 64, p.D = 11;
        p.through = i < 4;
        int64_t but = i < 2 ? -1 : 3;
        set_gates(&p, i == 4 ? 1e-38 : 0, 0, but, 0.3, 1);
        AT("closed %d", i);
        build(&p);
        poison_bins(&p, but);
        solve_built(&p);
        for (int64_t b = 0; b < p.Hkv * p.D; b++) CHECK(b % p.D == but || p.c.d_ln_u[b] == 0);
        device_release();
    }
}

/* All results of a problem as one string of bits. */
static unsigned digest(const problem *p) {
    uint32_t crc = dkv_crc32(0, p->c.d_ln_u, (size_t)(p->Hkv * p->D) * 4);
    for (int i = 0; i < p->n_suffix; i++) {
        const dkv_suffix *x = &p->x[i];
        const dkv_tensor *t[] = {&x->out, &x->dq, &x->dk, &x->dv, &x->out_relaxed};
        const int heads[] = {p->H, p->H, p->Hkv, p->Hkv, p->H}, d[] = {p->d_v, p->d_k, p->d_k, p->d_v, p->d_v};
        for (int k = 0; k < 4 + p->through; k++)
            for (int64_t e = 0; e < x->N_q * heads[k] * d[k]; e++)
                crc = dkv_crc32(crc, oracle_at(t[k], e / d[k] / heads[k], e / d[k] % heads[k], e % d[k]), 4);
        crc = dkv_crc32(crc, x->lse, (size_t)(x->N_q * p->H) * 4);
    }
    return crc;
}

/* u = 1 in every bin is no gate at all: the same bits as a context that is all sink and recent. */
static void all_open(void) {
    NEEDS_DEVICE;
    problem p = small;
    p.T_c = 128 * 7, p.R = 256, p.D = 4, p.through = 0;
    set_gates(&p, 1, 1, -1, 1, 1);
    build(&p);
    solve_built(&p);
    unsigned dq[2];
    for (int k = 0; k < 2; k++) {
        if (k) p.c.S = 128 * 5, p.S = p.c.S;
        memset(p.c.d_ln_u, 0, (size_t)(p.Hkv * p.D) * 4);
        solve_built(&p);
        memset(p.c.d_ln_u, 0, (size_t)(p.Hkv * p.D) * 4); /* of bins that are no more */
        dq[k] = digest(&p);
    }
    CHECK(dq[0] == dq[1]);
    device_release();
}

/* Binary gates that are open where the bits are: two softmaxes of the same bits. */
static void binary_gates(void) {
    NEEDS_DEVICE;
    for (int k = 0; k < 2; k++) {
        problem p = small;
        if (k) p.T_c = 4000, p.D = 30, p.d_k = p.d_v = 128, p.n_suffix = 2;
        build(&p);
        for (int64_t i = 0; i < p.Hkv * p.D; i++) p.ln_u[i] = p.open[i] ? 0.0f : -INFINITY;
        solve_built(&p);
        check_same_softmaxes(&p);
        device_release();
    }
}

static void rows_sum_to_zero(void) {
    NEEDS_DEVICE;
    for (int through = 0; through < 2; through++) {
        problem p = small;
        p.ones = 1, p.through = through, p.deviation = 2;
        build(&p);
        solve_built(&p);
        check_rows_sum_to_zero(&p, 0.02); /* weights of 8 bits, in O and in dS */
        device_release();
    }
}

/* A key 60 above all others, in a tile that is open in one softmax only, or hardly. */
static void towering_key(void) {
    NEEDS_DEVICE;
    for (int i = 0; i < COUNT(towers); i++)
        for (int through = 0; through < 2; through++) {
            problem p = small;
            p.through = through, p.n_suffix = 1, p.N_q[0] = 4;
            set_gates(&p, 0.5, 1, 2, towers[i].u, towers[i].open); /* bin 2 is another */
            build(&p);
            raise_tower(&p);
            AT("u %g, open %d, through %d", towers[i].u, towers[i].open, through);
            solve_built(&p);
            device_release();
        }
}

/* Several contexts of different lengths in one batch, run again and again, replayed as a graph, in a dirty workspace:
   the same bits, and what each gives is right. */
static void batches(void) {
    enum { N = 5 };
    static const int64_t T[N] = {700, 0, 1100, 388, 2600};
    NEEDS_DEVICE;
    for (int through = 0; through < 2; through++) {
        problem p[N];
        there t[N];
        dkv_gated c[N];
        unsigned bits[N] = {0};
        for (int i = 0; i < N; i++) {
            p[i] = small;
            p[i].through = through, p[i].T_c = T[i], p[i].D = 20, p[i].n_suffix = i == 3 ? 0 : 1 + i % 3;
            p[i].N_q[0] = 10 + 9 * i;
            build(&p[i]);
            send(&p[i], &t[i]);
            c[i] = t[i].c;
        }
        dkv_cuda_gated work = prepared(c, N);
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CUDA(cudaStreamCreate(&stream));
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        CHECK_OK(dkv_cuda_gated_forward(&work, stream));
        CHECK_OK(dkv_cuda_gated_backward(&work, stream));
        CUDA(cudaStreamEndCapture(stream, &graph));
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        for (int again = 0; again < 50; again++) {
            for (int i = 0; i < N; i++) poison_results(&p[i], &t[i]);
            if (again % 2) CUDA(cudaGraphLaunch(exec, stream));
            else pass(&work);
            CUDA(cudaDeviceSynchronize());
            for (int i = 0; i < N; i++) {
                AT("through %d, context %d, turn %d", through, i, again);
                if (again > 2 && again % 10) continue;
                fetch(&p[i], &t[i]);
                if (again == 0) bits[i] = digest(&p[i]), check(&p[i], rounding(&p[i]));
                CHECK(digest(&p[i]) == bits[i]);
            }
        }
        CUDA(cudaGraphExecDestroy(exec));
        CUDA(cudaGraphDestroy(graph));
        CUDA(cudaStreamDestroy(stream));
        device_release();
    }
}

/* Rows without a gradient beside rows with tiny ones: in f16 they share the scale of their sums. */
static void tiny_gradients(void) {
    NEEDS_DEVICE;
    for (int k = 0; k < 2; k++) {
        problem p = small;
        p.type = p.x_type = k ? DKV_BF16 : DKV_F16, p.d_k = p.d_v = 128;
        build(&p);
        int64_t first = 0;
        for (int i = 0; i < p.n_suffix; first += p.N_q[i++])
            for (int64_t e = 0; e < p.N_q[i] * p.H * p.d_v; e++) {
                int64_t row = e / p.d_v / p.H, at = first * p.H * p.d_v + e;
                p.d_out[at] = row % 3 ? 0 : p.d_out[at] > 0 ? ldexp(1, -19) : -ldexp(1, -20);
                oracle_put(&p.x[i].d_out, row, e / p.d_v % p.H, e % p.d_v, p.d_out[at]);
            }
        AT("tiny gradients, %s", dkv_type_name(p.type));
        solve_built(&p);
        device_release();
    }
}

/* A context that nobody asks about has gradients, too: none. */
static void no_questions(void) {
    NEEDS_DEVICE;
    problem p = small;
    there t;
    p.n_suffix = 0;
    build(&p);
    send(&p, &t);
    dkv_cuda_gated work = prepared(&t.c, 1);
    poison_results(&p, &t);
    pass(&work);
    fetch(&p, &t);
    for (int64_t i = 0; i < p.Hkv * p.D; i++) CHECK(p.c.d_ln_u[i] == 0);
}

static void nan_query(void) {
    NEEDS_DEVICE;
    problem p = small;
    there t;
    build(&p);
    oracle_put(&p.x[2].q, 9, 1, 0, (double)NAN);
    send(&p, &t);
    dkv_cuda_gated work = prepared(&t.c, 1);
    pass(&work);
    fetch(&p, &t);
    check_nan_rows(&p);
}

static void errors(void) {
    NEEDS_DEVICE;
    problem p = small;
    there t;
    size_t block, ws;
    build(&p);
    send(&p, &t);
    CHECK_OK(dkv_cuda_gated_size(&block, &ws, &t.c, 1));
    char *b = device(block), *w = device(ws);
    dkv_suffix x[MAX_SUFFIXES];
    dkv_cuda_gated work;
#define BAD(change, want) do { \
        dkv_gated c = t.c; \
        memcpy(x, t.x, sizeof x); \
        c.suffix = x; \
        change; \
        CHECK_RESULT(dkv_cuda_gated_prepare(&work, &c, 1, b, block, w, ws, NULL), want); \
        CHECK(is_poison_on_device(b, block)); } while (0)
    BAD(c.H = 5, DKV_ERR_SHAPE);
    BAD(c.d_k = 136, DKV_ERR_SHAPE);
    BAD(c.d_v = 12, DKV_ERR_SHAPE);
    BAD(c.n_suffix = -1, DKV_ERR_SHAPE);
    BAD(c.D = 0, DKV_ERR_FIELD);
    BAD(c.W = 0, DKV_ERR_FIELD);
    BAD(c.R = -1, DKV_ERR_FIELD);
    BAD(c.scale = -1, DKV_ERR_FIELD);
    BAD(c.D = 3, DKV_ERR_RANGE);
    BAD(c.T_c = 699, DKV_ERR_SHAPE);
    BAD(c.context.k.type = DKV_F16, DKV_ERR_TYPE);
    BAD(c.context.k.type = c.context.v.type = DKV_F32, DKV_ERR_TYPE);
    BAD(c.context.k.stride_token += 2, DKV_ERR_ALIGN);
    BAD(x[1].q.type = DKV_FP8, DKV_ERR_TYPE);
    BAD(x[1].N_q = -1, DKV_ERR_SHAPE);
#undef BAD
    CHECK_RESULT(dkv_cuda_gated_prepare(&work, &t.c, 1, b, block - 1, w, ws, NULL), DKV_ERR_CAPACITY);
    CHECK_RESULT(dkv_cuda_gated_prepare(&work, &t.c, 1, b, block, w, ws - 1, NULL), DKV_ERR_CAPACITY);
    CHECK_RESULT(dkv_cuda_gated_prepare(&work, &t.c, 1, b + 64, block, w, ws, NULL), DKV_ERR_ALIGN);
    dkv_gated two[2] = {t.c, t.c};
    two[1].open = NULL;
    CHECK_RESULT(dkv_cuda_gated_size(&block, &ws, two, 2), DKV_ERR_FIELD);
    CHECK_OK(dkv_cuda_gated_size(&block, &ws, NULL, 0));
}

static void random_mix(void) {
    NEEDS_DEVICE;
    for (int i = 0; i < 24; i++) {
        problem p = small;
        p.Hkv = 1 + (int)rnd_below(3), p.H = p.Hkv * (1 + (int)rnd_below(8));
        p.d_k = 8 * (1 + (int)rnd_below(16)), p.d_v = 8 * (1 + (int)rnd_below(16));
        p.W = 1 + rnd_below(300), p.S = rnd_below(200), p.R = rnd_below(300);
        p.T_c = rnd_below(900), p.D = 1 + p.T_c / p.W + rnd_below(3);
        p.n_suffix = 1 + (int)rnd_below(MAX_SUFFIXES);
        for (int k = 0; k < p.n_suffix; k++) p.N_q[k] = rnd_below(24);
        p.type = p.x_type = rnd_below(2) ? DKV_F16 : DKV_BF16;
        p.layout = rnd_below(2) ? HEAD_MAJOR : THD, p.through = (int)rnd_below(2);
        AT("mix %d", i);
        solve(&p);
    }
}

int main(void) {
    static const test_case cases[] = {
        {"bin widths", widths, 0},
        {"lengths", lengths, 0},
        {"suffixes x groups", suffixes, 0},
        {"layouts and dimensions", layouts, 0},
        {"closed bins are not read", closed, 0},
        {"all open is ungated, bit for bit", all_open, 0},
        {"binary gates, bit for bit", binary_gates, 0},
        {"rows of dS sum to 0", rows_sum_to_zero, 0},
        {"a towering key", towering_key, 0},
        {"batches, graphs, 50 turns of the same bits", batches, 0},
        {"tiny gradients", tiny_gradients, 0},
        {"no questions", no_questions, 0},
        {"NaN in a query", nan_query, 0},
        {"random mix", random_mix, 0},
        {"errors", errors, 0},
    };
    int failed = run_cases("cuda gated", cases, COUNT(cases));
    dkv_cuda_limit(80);
    failed |= run_cases("cuda gated by mma.sync", cases, COUNT(cases));
    if (getenv("WORST")) fprintf(stderr, "greatest error: %g of its bound\n", worst);
    return failed;
}
