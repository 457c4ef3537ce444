/* Schedules against the numbers of the paper and of the recipes, step by step. */
#define _GNU_SOURCE
#include "test.h"

#include "../examples/dkv/recipe.h"

#define CHECK_NEAR(got, want) CHECK(fabs((got) - (want)) < 1e-12)

static void reference(void) {
    const recipe *r = &recipes[REFERENCE];
    const double ramp[] = {0.125, 0.25, 0.375, 0.5};
    CHECK(r->A == 16 && r->B == 28 && r->needles == 4 && r->gates == PER_QUERY_HEAD);
    CHECK(r->budget == DKV_BUDGET_LOGICAL && r->by_p);
    for (int t = 0; t < 44; t++) {
        step_plan p = schedule(r, t, 0.2);
        AT("step %d", t);
        CHECK(p.through == (t >= 16) && p.rho == 0.2 && p.rate == 0.01);
        CHECK_NEAR(p.lambda, t < 4 ? ramp[t] : 0.5);
    }
}

static void ours(void) {
    const recipe *r = &recipes[OURS];
    CHECK(r->A == 4 && r->B == 56 && r->gates == PER_KV_HEAD && r->budget == DKV_BUDGET_PHYSICAL && !r->by_p);
    for (int t = 0; t < 60; t++) { /* the budget falls for 33.6 steps */
        step_plan p = schedule(r, t, 0.2);
        AT("step %d", t);
        CHECK(p.through == (t >= 4) && p.rate == 0.1);
        CHECK_NEAR(p.lambda, t < 4 ? t + 1 : 4);
        CHECK_NEAR(p.rho, t < 4 ? 0.6 : t < 38 ? 0.6 - 0.4 * (t - 4) / 33.6 : 0.2);
    }
    CHECK_NEAR(schedule(r, 0, 0.8).rho, 0.8); /* it never rises */
}

static void others(void) {
    recipe r = {.A = 2, .B = 5, .ramp = 0, .rate = 0.2, .rate_end = 0, .lambda = 3, .from = 0.9, .share = 1};
    const double rate[] = {0.2, 0.2, 0.2, 0.15, 0.1, 0.05, 0}, rho[] = {0.9, 0.9, 0.9, 0.74, 0.58, 0.42, 0.26};
    for (int t = 0; t < 7; t++) {
        step_plan p = schedule(&r, t, 0.1);
        AT("step %d", t);
        CHECK_NEAR(p.rate, rate[t]);
        CHECK_NEAR(p.rho, rho[t]);
        CHECK(p.lambda == 3);
    }
    r.share = 0, r.A = 0, r.B = 1;
    CHECK(schedule(&r, 0, 0.1).through && schedule(&r, 0, 0.1).rho == 0.1 && schedule(&r, 0, 0.1).rate == 0.2);
}

int main(void) {
    static const test_case cases[] = {{"the reference recipe", reference, 0}, {"ours", ours, 0}, {"others", others, 0}};
    return run_cases("recipe", cases, COUNT(cases));
}
