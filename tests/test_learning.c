/* [GATES] as a whole: learning finds a pattern that was planted. The values of a context are zero outside three bins of
   each KV head, and the target is what attention gives when only those bins are there. From gates that know nothing, by
   the steps of the method (relaxed, then straight-through), the mask must come out exactly. */
#define _GNU_SOURCE
#include "test.h"

enum { L = 4, H = 8, Hkv = 2, D = 16, W = 4, S = 4, R = 8, T_c = S + R + D * W, N_q = 8, d = 16, CONTEXTS = 2 };
enum { CELLS = L * Hkv * D, GATES = L * H * D, PLANTED = 3, STEPS = 24 };

typedef struct layer { /* of one context */
    float k[T_c * Hkv * d], v[T_c * Hkv * d], q[N_q * H * d], sk[N_q * Hkv * d], sv[N_q * Hkv * d];
    float target[N_q * H * d], out[N_q * H * d], relaxed[N_q * H * d], d_out[N_q * H * d], dq[N_q * H * d];
    float dk[N_q * Hkv * d], dv[N_q * Hkv * d], lse[N_q * H], lse_relaxed[N_q * H], d_ln_u[Hkv * D];
    dkv_suffix x;
} layer;

typedef struct world {
    layer of[CONTEXTS][L];
    unsigned char planted[CELLS];
    float ln_u[CELLS], ones[CELLS];
    void *ws;
    size_t ws_bytes;
} world;

static void fill(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = (float)rnd_normal();
}

static dkv_tensor of_heads(const float *x, int heads) { return dkv_thd(x, DKV_F32, heads, d); }

static dkv_gated gated_of(layer *y, const float *ln_u, const unsigned char *open) {
    y->x = (dkv_suffix){N_q, of_heads(y->q, H), of_heads(y->sk, Hkv), of_heads(y->sv, Hkv), of_heads(y->out, H),
                        y->lse, of_heads(y->relaxed, H), y->lse_relaxed, of_heads(y->d_out, H), of_heads(y->dq, H),
                        of_heads(y->dk, Hkv), of_heads(y->dv, Hkv)};
    return (dkv_gated){H, Hkv, d, d, T_c, W, S, R, D, 0, dkv_strided(of_heads(y->k, Hkv), of_heads(y->v, Hkv), T_c),
                       ln_u, open, &y->x, 1, y->d_ln_u};
}

static void plant(world *w) {
    memset(w->planted, 0, sizeof w->planted);
    for (int f = 0; f < L * Hkv; f++)
        for (int n = 0; n < PLANTED;) {
            int64_t b = rnd_below(D);
            n += !w->planted[f * D + b];
            w->planted[f * D + b] = 1;
        }
    memset(w->ones, 0, sizeof w->ones); /* ln 1 */
}

static void make_layer(world *w, int context, int l) {
    layer *y = &w->of[context][l];
    fill(y->k, T_c * Hkv * d), fill(y->v, T_c * Hkv * d), fill(y->q, N_q * H * d);
    fill(y->sk, N_q * Hkv * d), fill(y->sv, N_q * Hkv * d);
    for (int i = 0; i < T_c * Hkv * d; i++) {
        int j = i / d / Hkv, g = i / d % Hkv, b = (T_c - R - 1 - j) / W;
        int kept = j >= S && j < T_c - R && w->planted[(l * Hkv + g) * D + b];
        if (!kept) y->v[i] = 0;
    }
    dkv_gated c = gated_of(y, w->ones, w->planted + l * Hkv * D);
    if (!w->ws) {
        CHECK_OK(dkv_gated_size(&w->ws_bytes, &c, 1, 1)); /* all layers have the same shape */
        w->ws = guarded(w->ws_bytes, 64);
    }
    CHECK_OK(dkv_gated_forward(&c, 1, w->ws, w->ws_bytes, NULL));
    memcpy(y->target, y->out, sizeof y->target);
}

/* One context of a step: adds the gradient of the mean squared distance to da, and returns the distance. */
static double learn_from(world *w, float *da, const dkv_gates *g, const float *a, dkv_draw draw, int context,
                         const unsigned char *open) {
    float d_ln_u[CELLS];
    double loss = 0;
    dkv_gates_union(NULL, w->ln_u, g, a, draw);
    for (int l = 0; l < L; l++) {
        layer *y = &w->of[context][l];
        dkv_gated c = gated_of(y, w->ln_u + l * Hkv * D, open ? open + l * Hkv * D : NULL);
        CHECK_OK(dkv_gated_forward(&c, 1, w->ws, w->ws_bytes, NULL));
        for (int i = 0; i < N_q * H * d; i++) {
            float off = y->out[i] - y->target[i];
            loss += (double)off * (double)off / CONTEXTS;
            y->d_out[i] = 2 * off / CONTEXTS;
        }
        CHECK_OK(dkv_gated_backward(&c, 1, w->ws, w->ws_bytes, NULL));
        memcpy(d_ln_u + l * Hkv * D, y->d_ln_u, sizeof y->d_ln_u);
    }
    dkv_gates_union_backward(da, g, a, draw, d_ln_u);
    return loss;
}

/* Returns how many of the cells chosen at the end were planted. */
static int learn(uint64_t seed, int tied, int relaxed) {
    static world w;
    const dkv_gates g = {L, H, Hkv, D, tied};
    const double rho = (double)PLANTED / D;
    int64_t n = dkv_gates_count(&g), K;
    static float a[GATES], da[GATES], m[GATES], v[GATES], score[GATES];
    unsigned char M[GATES], open[CELLS];
    test_state = seed;
    plant(&w);
    for (int c = 0; c < CONTEXTS; c++)
        for (int l = 0; l < L; l++) make_layer(&w, c, l);
    memset(score, 0, sizeof score), memset(m, 0, sizeof m), memset(v, 0, sizeof v);
    dkv_gates_init(a, &g, score);
    double loss = 0;
    for (int t = 0; t < STEPS; t++) {
        memset(da, 0, sizeof da);
        CHECK_OK(dkv_gates_top(M, &K, &g, a, DKV_BUDGET_PHYSICAL, rho, 0));
        dkv_gates_or(open, &g, M);
        loss = 0;
        for (int c = 0; c < CONTEXTS; c++)
            loss += learn_from(&w, da, &g, a, (dkv_draw){seed, (uint32_t)t, (uint32_t)c}, c, t < relaxed ? NULL : open);
        dkv_gates_penalty(da, &g, a, DKV_BUDGET_PHYSICAL, (float)(0.5 * fmin(1, (t + 1) / 4.0)));
        dkv_gates_clip(da, n);
        dkv_gates_adamw(a, m, v, da, n, t + 1, 0.1);
        if (getenv("VERBOSE")) printf("step %d loss %g\n", t, loss);
    }
    CHECK_OK(dkv_gates_top(M, &K, &g, a, DKV_BUDGET_PHYSICAL, rho, 0));
    dkv_gates_or(open, &g, M);
    int found = 0;
    for (int i = 0; i < CELLS; i++) found += open[i] && w.planted[i];
    CHECK(test_release());
    w.ws = NULL;
    return found;
}

/* 16 relaxed steps find it; straight-through steps alone find it too, from a mask that is wrong at first. */
static void planted_pattern(void) {
    for (uint64_t seed = 1; seed <= 20; seed++)
        for (int kind = 0; kind < 4; kind++) {
            int found = learn(seed, kind % 2, kind < 2 ? 16 : 0);
            AT("seed %d, kind %d", (int)seed, kind);
            if (getenv("VERBOSE")) printf("seed %d kind %d: %d\n", (int)seed, kind, found);
            else CHECK_INT(found, L * Hkv * PLANTED);
        }
}

int main(void) {
    static const test_case cases[] = {{"a planted pattern", planted_pattern, 0}};
    return run_cases("learning", cases, COUNT(cases));
}
