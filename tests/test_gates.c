/* [GATES]: noise against published vectors; gates, union, penalties and optimizer against the method's formulas in
   double precision and their finite differences; selection against sorting. Gated attention is in test_gated.c. */
#define _GNU_SOURCE
#include "test.h"

static const double beta = 2.0 / 3, gamma_ = -0.1, zeta = 1.1;

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static double oracle_z(double a, double u) {
    double s = sigmoid((log(u) - log1p(-u) + a) / beta);
    return fmin(1, fmax(0, s * (zeta - gamma_) + gamma_));
}
static double oracle_p(double a) { return sigmoid(a - beta * log(-gamma_ / zeta)); }

/* ---- noise --------------------------------------------------------------- */

/* The vectors that Random123 publishes for philox4x32-10: counter, key, result. */
static void philox_vectors(void) {
    static const uint32_t vector[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
         0x24126ea1},
    };
    for (int i = 0; i < COUNT(vector); i++) {
        uint32_t out[4];
        AT("vector %d", i);
        dkv_philox(out, vector[i], vector[i][4] | (uint64_t)vector[i][5] << 32);
        for (int j = 0; j < 4; j++) CHECK_INT(out[j], vector[i][6 + j]);
    }
}

static void noise(void) {
    double sum = 0, square = 0;
    int n = 100000;
    for (int i = 0; i < n; i++) {
        dkv_draw draw = {rnd(), (uint32_t)rnd(), (uint32_t)rnd()};
        int64_t gate = (int64_t)(rnd() >> 20);
        uint32_t counter[4] = {draw.step, draw.context, (uint32_t)gate, (uint32_t)(gate >> 32)}, out[4];
        dkv_philox(out, counter, draw.seed);
        double u = (double)dkv_gate_noise(draw, gate), want = ldexp(out[0] >> 8, -24);
        CHECK(u == (double)(float)fmin(fmax(want, (double)1e-6f), (double)0.999999f));
        sum += u, square += u * u;
    }
    CHECK(fabs(sum / n - 0.5) < 5 * sqrt(1.0 / 12 / n));
    CHECK(fabs(square / n - 1.0 / 3) < 5 * sqrt(4.0 / 45 / n));
}

/* ---- one gate ------------------------------------------------------------ */

/* In units of 2^-24: logarithms are good to 2 of their size, which z sees through a slope of at most 0.45; s and z
   round to 4 more. The slope s (1 - s) sees the same error of x, relative to itself. */
static void gate_values(void) {
    for (int i = 0; i < 300000; i++) {
        float a = (float)(12 * rnd_normal() / 2), u = (float)fmin(fmax(rnd_uniform(), 1e-6), 0.999999), dz;
        if (i % 10 == 0) u = i % 20 ? 1e-6f : 0.999999f;
        double z = (double)dkv_gate_z(a, u, &dz), want = oracle_z((double)a, (double)u), raw = 0;
        double s = sigmoid((log((double)u) - log1p(-(double)u) + (double)a) / beta);
        AT("a %.9g, u %.9g: z %.9g, not %.9g", (double)a, (double)u, z, want);
        double logs = fabs(log((double)u)) + fabs(log1p(-(double)u)) + fabs((double)a);
        CHECK(fabs(z - want) <= ldexp(4 + logs, -24));
        raw = s * (zeta - gamma_) + gamma_;
        double slope = (zeta - gamma_) * s * (1 - s) / beta, step = 1e-6;
        if (raw > step && raw < 1 - step) CHECK(fabs((double)dz - slope) <= ldexp(4 + 4 * logs, -24) * slope);
        else if (raw < -step || raw > 1 + step) CHECK(dz == 0 && (z == 0 || z == 1));
    }
}

static void slope_is_derivative(void) {
    int inside = 0;
    for (int i = 0; i < 20000; i++) {
        double a = 3 * rnd_normal(), u = fmin(fmax(rnd_uniform(), 1e-6), 0.999999), h = 1e-5;
        float dz;
        dkv_gate_z((float)a, (float)u, &dz);
        a = (double)(float)a, u = (double)(float)u;
        double low = oracle_z(a - h, u), high = oracle_z(a + h, u);
        AT("a %.9g, u %.9g", a, u);
        if (low > 0 && high < 1) CHECK(fabs((high - low) / (2 * h) - (double)dz) < 1e-6);
        else if (high == 0 || low == 1) CHECK(dz == 0);
        inside += dz != 0;
    }
    CHECK(inside > 1000);
}

static void probabilities(void) {
    for (int i = -200; i <= 200; i++) {
        float a = (float)i / 8;
        double p = oracle_p((double)a), one = sigmoid((double)a - beta * log((1 - gamma_) / (zeta - 1)));
        AT("a %g", (double)a);
        CHECK(fabs((double)dkv_gate_p(a) - p) <= ldexp(4 + 2 * fabs((double)a), -24) * p);
        CHECK(fabs((double)dkv_gate_p_one(a) - one) <= ldexp(4 + 2 * fabs((double)a), -24) * one);
    }
    CHECK(dkv_gate_p(200) == 1 && dkv_gate_p(-200) == 0);
}

/* 1e6 draws: shares of z > 0 and z = 1 within 5 standard deviations of their closed forms; E z by the draws' own
   deviation against an integral over u. */
static void draws(void) {
    static const double logits[] = {-4, -1.5, 0, 0.7, 2.5};
    const int n = 1000000;
    for (int i = 0; i < COUNT(logits); i++) {
        double positive = 0, ones = 0, mean = 0, want = 0;
        float a = (float)logits[i], dz;
        dkv_draw draw = {rnd(), (uint32_t)i, 3};
        for (int k = 0; k < n; k++) {
            float z = dkv_gate_z(a, dkv_gate_noise(draw, k), &dz);
            positive += z > 0, ones += z == 1, mean += (double)z / n;
            want += oracle_z((double)a, (k + 0.5) / n) / n;
        }
        double p = oracle_p((double)a), one = sigmoid((double)a - beta * log((1 - gamma_) / (zeta - 1)));
        AT("a %g: P(z > 0) %g, not %g; P(z = 1) %g, not %g", (double)a, positive / n, p, ones / n, one);
        CHECK(fabs(positive / n - p) < 5 * sqrt(p * (1 - p) / n));
        CHECK(fabs(ones / n - one) < 5 * sqrt(one * (1 - one) / n));
        CHECK(fabs(mean - want) < 5 * 0.5 / sqrt(n));
    }
}

/* ---- a tensor of gates --------------------------------------------------- */

static const dkv_gates shapes[] = {
    {2, 6, 2, 5, 0}, {1, 8, 1, 3, 0}, {3, 4, 4, 7, 0}, {2, 14, 2, 9, 0}, {2, 6, 2, 5, 1}, {1, 9, 3, 1, 1},
};

/* Gates of a cell (l, g, b), as rows of the model: where tied, one gate with no neighbours. */
static int group_of(const dkv_gates *g) { return g->tied ? 1 : g->H / g->Hkv; }
static int64_t cells_of(const dkv_gates *g) { return (int64_t)g->L * g->Hkv * g->D; }
static int64_t gate_at(const dkv_gates *g, int64_t cell, int k) {
    int64_t l = cell / g->D / g->Hkv, kv = cell / g->D % g->Hkv, rows = g->tied ? g->Hkv : g->H;
    return (l * rows + kv * group_of(g) + k) * g->D + cell % g->D;
}

static float *random_logits(int64_t n, double deviation) {
    float *a = guarded((size_t)n * 4, 4);
    for (int64_t i = 0; i < n; i++) a[i] = (float)(deviation * rnd_normal());
    return a;
}

static void initialisation(void) {
    for (int i = 0; i < COUNT(shapes); i++) {
        const dkv_gates *g = &shapes[i];
        int64_t all = (int64_t)g->L * g->H * g->D, n = dkv_gates_count(g);
        float *S = guarded((size_t)all * 4, 4), *a = guarded((size_t)n * 4, 4);
        double *own = guarded((size_t)n * 8, 8), mean = 0;
        for (int64_t k = 0; k < all; k++) S[k] = k % 7 ? 0 : (float)rnd_uniform();
        for (int64_t c = 0; c < cells_of(g); c++)
            for (int h = 0; h < g->H / g->Hkv; h++) {
                int64_t row = c / g->D / g->Hkv * g->H + c / g->D % g->Hkv * (g->H / g->Hkv) + h;
                double s = (double)S[row * g->D + c % g->D];
                if (!g->tied) own[gate_at(g, c, h)] = s;
                else if (h == 0 || s > own[c]) own[c] = s;
            }
        for (int64_t k = 0; k < n; k++) mean += own[k] / (double)n;
        dkv_gates_init(a, g, S);
        for (int64_t k = 0; k < n; k++) {
            double p = fmin(fmax(sigmoid(log(0.7 / 0.3) + 6 * (own[k] - mean)), 1e-3), 0.999);
            AT("shape %d, gate %d", i, (int)k);
            CHECK(fabs(oracle_p((double)a[k]) - p) < 1e-6);
        }
    }
}

/* u and its logarithm of a cell in double, for logits a with one changed by h. */
static double oracle_u(const dkv_gates *g, const float *a, dkv_draw draw, int64_t cell, int which, double h) {
    double none = 1;
    for (int k = 0; k < group_of(g); k++) {
        int64_t i = gate_at(g, cell, k);
        none *= 1 - oracle_z((double)a[i] + (k == which ? h : 0), (double)dkv_gate_noise(draw, i));
    }
    return 1 - none;
}

static void union_forward(void) {
    for (int i = 0; i < COUNT(shapes); i++) {
        const dkv_gates *g = &shapes[i];
        int64_t n = cells_of(g);
        float *a = random_logits(dkv_gates_count(g), 3), *u = random_logits(n, 1), *ln = random_logits(n, 1);
        for (uint32_t step = 0; step < 50; step++) {
            dkv_draw draw = {77, step, 5};
            dkv_gates_union(u, ln, g, a, draw);
            for (int64_t c = 0; c < n; c++) {
                double want = oracle_u(g, a, draw, c, -1, 0), got = (double)u[c];
                AT("shape %d, step %d, cell %d: %.9g, not %.9g", i, (int)step, (int)c, got, want);
                CHECK(fabs(got - want) <= ldexp(4 * group_of(g) + 2, -24));
                if (u[c] > 0) CHECK(fabs((double)ln[c] - log(got)) <= ldexp(2 * fabs(log(got)), -24));
                else CHECK(isinf(ln[c]) && ln[c] < 0);
            }
            dkv_gates_union(NULL, u, g, a, draw);
            CHECK(!memcmp(u, ln, (size_t)n * 4));
        }
    }
}

/* d/da of sum c ln u, by central differences of the oracle. Where a gate is within the step of its clamp the quotient
   means nothing: those are passed over, and must be few. */
static void union_backward(void) {
    int64_t used = 0, passed = 0, ones = 0;
    for (int i = 0; i < COUNT(shapes); i++) {
        const dkv_gates *g = &shapes[i];
        int64_t n = dkv_gates_count(g);
        float *a = random_logits(n, 2), *da = guarded((size_t)n * 4, 4), *c = random_logits(cells_of(g), 1);
        for (uint32_t step = 0; step < 50; step++) {
            dkv_draw draw = {rnd(), step, 0};
            const double h = 1e-6;
            for (int64_t k = 0; k < n; k++) da[k] = 0.25f; /* gradients are added */
            dkv_gates_union_backward(da, g, a, draw, c);
            for (int64_t cell = 0; cell < cells_of(g); cell++)
                for (int k = 0; k < group_of(g); k++) {
                    int64_t at = gate_at(g, cell, k);
                    double z = oracle_z((double)a[at], (double)dkv_gate_noise(draw, at)), want = 0;
                    double u = oracle_u(g, a, draw, cell, -1, 0);
                    if ((z > 0 && z < 1e-4) || (z < 1 && z > 1 - 1e-4) || (u > 0 && u < 1e-3)) { passed++; continue; }
                    double high = oracle_u(g, a, draw, cell, k, h), low = oracle_u(g, a, draw, cell, k, -h);
                    if (u > 0 && z > 0 && z < 1) want = (double)c[cell] * (high - low) / (2 * h) / u;
                    AT("shape %d, cell %d, gate %d: %.9g, not %.9g", i, (int)cell, k, (double)da[at] - 0.25, want);
                    CHECK(fabs((double)da[at] - 0.25 - want) <= 1e-6 + 2e-5 * fabs(want));
                    used++, ones += u == 1;
                }
        }
    }
    CHECK(passed * 50 < used);
    CHECK(ones > 100); /* cells where division by 1 - z would have failed */
}

static double oracle_penalty(const dkv_gates *g, const float *a, dkv_budget budget, int64_t which, double h) {
    double sum = 0;
    for (int64_t c = 0; c < cells_of(g); c++) {
        double none = 1;
        for (int k = 0; k < group_of(g); k++) {
            int64_t i = gate_at(g, c, k);
            double p = oracle_p((double)a[i] + (i == which ? h : 0));
            none *= 1 - p;
            if (budget == DKV_BUDGET_LOGICAL) sum += p / group_of(g);
        }
        if (budget == DKV_BUDGET_PHYSICAL) sum += 1 - none;
    }
    return sum / (double)cells_of(g);
}

static void penalties(void) {
    const double h = 1e-5, lambda = 0.5;
    for (int i = 0; i < COUNT(shapes); i++)
        for (int budget = 0; budget < 2; budget++) {
            const dkv_gates *g = &shapes[i];
            int64_t n = dkv_gates_count(g);
            float *a = random_logits(n, 2), *da = guarded((size_t)n * 4, 4);
            memset(da, 0, (size_t)n * 4);
            double got = dkv_gates_penalty(da, g, a, (dkv_budget)budget, (float)lambda);
            AT("shape %d, budget %d", i, budget);
            CHECK(fabs(got - oracle_penalty(g, a, (dkv_budget)budget, -1, 0)) < 1e-6);
            CHECK(got == dkv_gates_penalty(NULL, g, a, (dkv_budget)budget, 0));
            for (int64_t k = 0; k < n; k++) {
                double high = oracle_penalty(g, a, (dkv_budget)budget, k, h);
                double want = lambda * (high - oracle_penalty(g, a, (dkv_budget)budget, k, -h)) / (2 * h);
                CHECK(fabs((double)da[k] - want) <= 1e-5 * fabs(want) + 1e-9);
            }
        }
}

/* ---- optimizer ----------------------------------------------------------- */

static void clipping(void) {
    float small[] = {0.3f, -0.4f}, big[] = {3, -4, 12}, zero[] = {0, 0};
    CHECK(fabs(dkv_gates_clip(small, 2) - 0.5) < 1e-7 && small[0] == 0.3f && small[1] == -0.4f);
    CHECK(dkv_gates_clip(big, 3) == 13);
    CHECK(big[0] == (float)(3 / (13 + 1e-6)) && big[1] == (float)(-4 / (13 + 1e-6)));
    CHECK(dkv_gates_clip(zero, 2) == 0 && zero[0] == 0);
}

static void adamw(void) {
    enum { n = 5 };
    float a[n], m[n] = {0}, v[n] = {0}, da[n];
    double x[n], first[n] = {0}, second[n] = {0};
    for (int i = 0; i < n; i++) x[i] = (double)(a[i] = (float)rnd_normal());
    for (int t = 1; t <= 60; t++) {
        for (int i = 0; i < n; i++) da[i] = (float)(ldexp(rnd_normal(), -6 * i) + (i == 0));
        dkv_gates_adamw(a, m, v, da, n, t, 0.01);
        for (int i = 0; i < n; i++) {
            double g = (double)da[i];
            first[i] = 0.9 * first[i] + 0.1 * g;
            second[i] = 0.999 * second[i] + 0.001 * g * g;
            x[i] -= 0.01 * first[i] / (1 - pow(0.9, t)) / (sqrt(second[i] / (1 - pow(0.999, t))) + 1e-8);
            AT("step %d, parameter %d", t, i);
            CHECK(fabs((double)a[i] - x[i]) < 2e-6);
        }
    }
}

/* ---- selection ----------------------------------------------------------- */

typedef struct ranked { double key; int64_t at; } ranked;

static int by_rank(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    return x->key != y->key ? (x->key < y->key ? 1 : -1) : x->at < y->at ? -1 : 1;
}

/* The model's bits M[L][H][D] by sorting. */
static int64_t oracle_top(unsigned char *M, const dkv_gates *g, const float *a, dkv_budget budget, double rho,
                          int by_p) {
    int G = g->H / g->Hkv, cells = g->tied || budget == DKV_BUDGET_PHYSICAL;
    int64_t all = (int64_t)g->L * g->H * g->D, n = cells ? all / G : all, K = (int64_t)nearbyint(rho * (double)n);
    ranked *r = guarded((size_t)n * sizeof *r, 8);
    for (int64_t i = 0; i < n; i++) {
        double key = -(double)INFINITY;
        for (int k = 0; k < (cells ? group_of(g) : 1); k++) {
            float x = a[cells ? gate_at(g, i, k) : i];
            key = fmax(key, (double)(by_p ? dkv_gate_p(x) : x));
        }
        r[i] = (ranked){key, i};
    }
    qsort(r, (size_t)n, sizeof *r, by_rank);
    memset(M, 0, (size_t)all);
    for (int64_t i = 0; i < K; i++)
        for (int h = 0; h < (cells ? G : 1); h++) {
            int64_t row = r[i].at / g->D;
            M[(cells ? row * G + h : row) * g->D + r[i].at % g->D] = 1;
        }
    return K * (cells ? G : 1);
}

static void selection(void) {
    static const double rhos[] = {0, 1e-9, 0.05, 0.1, 0.2, 0.25, 0.35, 0.5, 0.77, 1};
    for (int i = 0; i < COUNT(shapes); i++)
        for (int kind = 0; kind < 6; kind++)
            for (int r = 0; r < COUNT(rhos); r++) {
                const dkv_gates *g = &shapes[i];
                int64_t n = dkv_gates_count(g), all = (int64_t)g->L * g->H * g->D, K;
                float *a = random_logits(n, kind < 2 ? 3 : 20); /* 20: p saturates at both ends */
                unsigned char *M = guarded((size_t)all, 1), *want = guarded((size_t)all, 1);
                for (int64_t k = 0; k < n && kind > 3; k++) a[k] = k % 3 ? 0.0f : -0.0f; /* all tie */
                AT("shape %d, kind %d, rho %g", i, kind, rhos[r]);
                CHECK_OK(dkv_gates_top(M, &K, g, a, (dkv_budget)(kind % 2), rhos[r], kind == 2 || kind == 3));
                CHECK_INT(K, oracle_top(want, g, a, (dkv_budget)(kind % 2), rhos[r], kind == 2 || kind == 3));
                CHECK(!memcmp(M, want, (size_t)all));
            }
}

/* p of large logits is 1 in f32: they tie, and the lower index goes first; by a they do not. */
static void saturated_ties(void) {
    const dkv_gates g = {1, 4, 4, 1, 0};
    const float a[] = {18, 30, 25, -2};
    unsigned char M[4];
    int64_t K;
    CHECK_OK(dkv_gates_top(M, &K, &g, a, DKV_BUDGET_LOGICAL, 0.25, 0));
    CHECK(K == 1 && !M[0] && M[1] && !M[2] && !M[3]);
    CHECK_OK(dkv_gates_top(M, &K, &g, a, DKV_BUDGET_LOGICAL, 0.25, 1));
    CHECK(K == 1 && M[0] && !M[1] && !M[2] && !M[3]);
    CHECK_RESULT(dkv_gates_top(M, &K, &g, a, DKV_BUDGET_LOGICAL, 1.5, 0), DKV_ERR_FIELD);
    CHECK_RESULT(dkv_gates_top(M, &K, &g, a, DKV_BUDGET_LOGICAL, (double)NAN, 0), DKV_ERR_FIELD);
}

/* K = rint(rho n) at the paper's sizes and at exact halves, which go to even. */
static void half_to_even(void) {
    static const struct { dkv_gates g; double rho; int64_t K; } table[] = {
        {{1, 10, 10, 1, 0}, 0.25, 2}, {{1, 10, 10, 1, 0}, 0.35, 4}, {{1, 1, 1, 3, 0}, 0.5, 2},
        {{1, 1, 1, 5, 0}, 0.5, 2},
        {{32, 32, 8, 1013, 0}, 0.2, 207462}, {{28, 28, 4, 1013, 0}, 0.2, 158838}, {{32, 32, 32, 245, 0}, 0.2, 50176},
    };
    for (int i = 0; i < COUNT(table); i++) {
        int64_t n = dkv_gates_count(&table[i].g), K, ones = 0;
        unsigned char *M = guarded((size_t)n, 1);
        AT("case %d", i);
        CHECK_OK(dkv_gates_top(M, &K, &table[i].g, random_logits(n, 1), DKV_BUDGET_LOGICAL, table[i].rho, 0));
        for (int64_t k = 0; k < n; k++) ones += M[k];
        CHECK_INT(K, table[i].K);
        CHECK_INT(ones, K);
    }
}

static void or_and_export(void) {
    for (int i = 0; i < COUNT(shapes); i++) {
        const dkv_gates *g = &shapes[i];
        int64_t all = (int64_t)g->L * g->H * g->D, K;
        float *a = random_logits(dkv_gates_count(g), 2);
        unsigned char *M = guarded((size_t)all, 1), *open = guarded((size_t)cells_of(g), 1);
        dkv_pattern p = {.W = 128, .S = 128, .R = 1024, .rho = 0.3, .model = "m", .tool = "t"};
        char *bits = guarded((size_t)(g->L * g->H * dkv_pattern_words(g->D) * 8), 1);
        char *probability = guarded((size_t)all * 2, 1);
        AT("shape %d", i);
        CHECK_OK(dkv_gates_top(M, &K, g, a, DKV_BUDGET_LOGICAL, 0.3, 0));
        dkv_gates_or(open, g, M);
        dkv_gates_export(&p, bits, i % 2 ? probability : NULL, g, M, a);
        CHECK_OK(dkv_pattern_check(&p));
        CHECK_INT(p.K, K);
        for (int64_t k = 0; k < all; k++) {
            int64_t row = k / g->D, l = row / g->H, kv = row % g->H / (g->H / g->Hkv), b = k % g->D;
            CHECK_INT(dkv_pattern_get(&p, (int)l, (int)(row % g->H), b), M[k]);
            CHECK_INT(dkv_union_get(&p, (int)l, (int)kv, b), open[(l * g->Hkv + kv) * g->D + b]);
            float x = a[g->tied ? (l * g->Hkv + kv) * g->D + b : k];
            if (i % 2) CHECK(oracle_load(probability + 2 * k, DKV_F16) == oracle_round(DKV_F16, (double)dkv_gate_p(x)));
        }
    }
}

static void shape_errors(void) {
    static const struct { dkv_gates g; dkv_result want; } table[] = {
        {{0, 1, 1, 1, 0}, DKV_ERR_FIELD}, {{1, 4097, 1, 1, 0}, DKV_ERR_FIELD}, {{1, 4, 0, 1, 0}, DKV_ERR_FIELD},
        {{1, 4, 3, 1, 0}, DKV_ERR_SHAPE}, {{1, 4, 2, 0, 0}, DKV_ERR_FIELD}, {{1, 4, 2, 1 << 20, 1}, DKV_OK},
        {{1, 4, 2, (1 << 20) + 1, 1}, DKV_ERR_FIELD},
    };
    for (int i = 0; i < COUNT(table); i++) {
        AT("case %d", i);
        CHECK_RESULT(dkv_gates_check(&table[i].g), table[i].want);
    }
}

int main(void) {
    static const test_case cases[] = {
        {"philox, published vectors", philox_vectors, 0},
        {"noise", noise, 0},
        {"z and its slope", gate_values, 0},
        {"slope by differences", slope_is_derivative, 0},
        {"P(z > 0), P(z = 1)", probabilities, 0},
        {"a million draws", draws, 0},
        {"initialisation", initialisation, 0},
        {"union", union_forward, 0},
        {"union, backward", union_backward, 0},
        {"penalties", penalties, 0},
        {"clipping", clipping, 0},
        {"AdamW", adamw, 0},
        {"Top-K", selection, 0},
        {"Top-K of saturated p", saturated_ties, 0},
        {"K, half to even", half_to_even, 0},
        {"OR, export", or_and_export, 0},
        {"shapes", shape_errors, 0},
    };
    return run_cases("gates", cases, COUNT(cases));
}
