#include "recipe.h"

#include "../../distance_kv.h"

const recipe recipes[RECIPES] = {
    [OURS] = {8, 4, 56, 4, 0.1, 0.1, 4, 0.6, 0.6, PER_KV_HEAD, DKV_BUDGET_PHYSICAL, 0},
    [REFERENCE] = {4, 16, 28, 4, 0.01, 0.01, 0.5, 0, 0, PER_QUERY_HEAD, DKV_BUDGET_LOGICAL, 1},
};

/* From a to b as x goes from 0 to 1, and no further. */
static double between(double a, double b, double x) { return x <= 0 ? a : x >= 1 ? b : a + (b - a) * x; }

step_plan schedule(const recipe *r, int64_t t, double rho) {
    const double into = (double)(t - r->A), fall = r->share * (double)r->B; /* steps */
    return (step_plan){
        .through = t >= r->A,
        .rho = between(r->from > rho ? r->from : rho, rho, fall > 0 ? into / fall : 1),
        .rate = between(r->rate, r->rate_end, r->B > 1 ? into / (double)(r->B - 1) : 0),
        .lambda = between(0, r->lambda, r->ramp ? (double)(t + 1) / (double)r->ramp : 1),
    };
}
