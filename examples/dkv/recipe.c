#include "recipe.h"

#include "../../distance_kv.h"

#include <math.h>

const recipe recipes[RECIPES] = {
    [OURS] = {8, 8, 2, 8, 24, 8, 9, 0.1, 0.1, 1, 0.6, 32, PER_KV_HEAD, DKV_BUDGET_PHYSICAL, 0},
    [REFERENCE] = {4, 4, 1, 16, 28, 4, 0, 0.01, 0.01, 0.5, 0, 0, PER_QUERY_HEAD, DKV_BUDGET_LOGICAL, 1},
};

int64_t reach(const recipe *r, double rho) {
    return r->A + (r->from > rho && rho > 0 ? (int64_t)ceil(r->half * log2(r->from / rho)) : 0);
}

/* From a to b as x goes from 0 to 1, and no further. */
static double between(double a, double b, double x) { return x <= 0 ? a : x >= 1 ? b : a + (b - a) * x; }

step_plan schedule(const recipe *r, int64_t t, double rho) {
    const int64_t into = t - r->A, held = t - reach(r, rho); /* steps */
    const double top = r->from > 0 ? r->from : rho;
    return (step_plan){
        .through = into >= 0,
        .rho = held >= 0 ? rho : into <= 0 ? top : top * exp2(-(double)into / r->half),
        .rate = between(r->rate, r->rate_end, r->B > 1 ? (double)held / (double)(r->B - 1) : 0),
        .lambda = between(0, r->lambda, r->ramp ? (double)(t + 1) / (double)r->ramp : 1),
    };
}

double penalty_slope(const recipe *r, const step_plan *p, double expected, int64_t units) {
    const double rho = fmax(p->rho, 1 / (double)units), share = expected / rho;
    return r->power ? p->lambda * pow(share, (double)(r->power - 1)) / rho : p->lambda;
}
