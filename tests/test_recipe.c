/* Schedules against the numbers of the paper and of the recipes, step by step. */
#define _GNU_SOURCE
#include "test.h"

#include "../examples/dkv/recipe.h"

#define CHECK_NEAR(got, want) CHECK(fabs((got) - (want)) < 1e-12)

static void reference(void) {
    const recipe *r = &recipes[REFERENCE];
    const double ramp[] = {0.125, 0.25, 0.375, 0.5};
    CHECK(r->A == 16 && r->B == 28 && r->needles == 4 && r->rounds == 4 && r->parts == 1 && r->gates == PER_QUERY_HEAD);
    CHECK(r->budget == DKV_BUDGET_LOGICAL && r->by_p && reach(r, 0.2) == 16);
    for (int t = 0; t < 44; t++) {
        step_plan p = schedule(r, t, 0.2);
        AT("step %d", t);
        CHECK(p.through == (t >= 16) && p.rho == 0.2 && p.rate == 0.01);
        CHECK_NEAR(p.lambda, t < 4 ? ramp[t] : 0.5);
        CHECK(penalty_slope(r, &p, 0.7, 100) == p.lambda);
    }
}

static void ours(void) {
    const recipe *r = &recipes[OURS];
    CHECK(r->A == 8 && r->B == 24 && r->needles == 8 && r->rounds == 8 && r->parts == 2 && r->gates == PER_KV_HEAD);
    CHECK(r->budget == DKV_BUDGET_PHYSICAL && !r->by_p);
    CHECK(reach(r, 0.2) == 59); /* the budget falls for 50.7 steps */
    for (int t = 0; t < 83; t++) {
        step_plan p = schedule(r, t, 0.2);
        AT("step %d", t);
        CHECK(p.through == (t >= 8) && p.rate == 0.1);
        CHECK_NEAR(p.lambda, t < 8 ? (t + 1) / 8. : 1);
        CHECK_NEAR(p.rho, t < 8 ? 0.6 : t < 59 ? 0.6 * pow(2, -(t - 8) / 32.) : 0.2);
        CHECK(t >= 59 || schedule(r, t, 0.05).rho == p.rho); /* the fall is shared */
    }
    CHECK(reach(r, 0.8) == 8 && reach(r, 0) == 8 && reach(r, 0.6) == 8 && reach(r, 0.3) == 40);
    CHECK_NEAR(schedule(r, 7, 0.8).rho, 0.6);
    CHECK_NEAR(schedule(r, 8, 0.8).rho, 0.8);
}

static void others(void) {
    recipe r = {.A = 2, .B = 3, .rate = 0.2, .rate_end = 0, .lambda = 3, .from = 0.8, .half = 1.25};
    const double rate[] = {0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.1, 0};
    for (int t = 0; t < 9; t++) {
        step_plan p = schedule(&r, t, 0.1);
        AT("step %d", t);
        CHECK_NEAR(p.rate, rate[t]);
        CHECK_NEAR(p.rho, t < 2 ? 0.8 : t < 6 ? 0.8 * pow(2, (2 - t) / 1.25) : 0.1);
        CHECK(p.lambda == 3);
    }
    CHECK(reach(&r, 0.1) == 6);
    r.half = 0, r.A = 0, r.B = 1;
    CHECK(schedule(&r, 0, 0.1).through && schedule(&r, 0, 0.1).rho == 0.1 && schedule(&r, 0, 0.1).rate == 0.2);
}

/* The slope is that of the penalty, by its difference. */
static void powers(void) {
    for (int n = 1; n <= 9; n += 2) {
        const recipe r = {.power = n};
        const step_plan p = {.rho = 0.1, .lambda = 0.6}, none = {.rho = 0, .lambda = 0.6};
        for (double e = 0.05; e < 1; e += 0.1) {
            const double step = 1e-5, up = pow((e + step) / 0.1, n), down = pow((e - step) / 0.1, n);
            const double want = 0.6 / n * (up - down) / (2 * step);
            AT("power %d, expected %g", n, e);
            CHECK(fabs(want - penalty_slope(&r, &p, e, 1000)) < 1e-6 * want);
        }
        CHECK_NEAR(penalty_slope(&r, &none, 0.25, 4), 0.6 * 4); /* a cell of four */
    }
}

int main(void) {
    static const test_case cases[] = {
        {"the reference recipe", reference, 0}, {"ours", ours, 0}, {"others", others, 0}, {"powers", powers, 0}};
    return run_cases("recipe", cases, COUNT(cases));
}
