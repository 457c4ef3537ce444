/* recipe.h: how a pattern is learned: what train.c does in each step. */
#ifndef RECIPE_H
#define RECIPE_H

#include <stdbool.h>
#include <stdint.h>

enum { OURS, REFERENCE, RECIPES };
enum { PER_KV_HEAD, PER_QUERY_HEAD };

/* Stage 1 of A steps with relaxed gates; then stage 2, straight through an exact budget. It falls from `from` to rho,
   halving every `half` steps, and stays there for B, in which the rate goes linearly to rate_end. The fall is the same
   for every rho, as far as it goes. */
typedef struct {
    int64_t rounds, needles;     /* of questions; in a context */
    int64_t parts;               /* steps that share a round: 1, or 2 of one wording each */
    int64_t A, B, ramp, power;   /* penalty of an expected share e: power 0: lambda e; n: lambda / n (e / rho)^n */
    double rate, rate_end, lambda, from, half;
    int gates, budget;           /* PER_..., dkv_budget */
    int by_p;                    /* Top-K sorts f32 probabilities, where saturated gates tie: as the reference does */
} recipe;

extern const recipe recipes[RECIPES];

typedef struct {
    bool through;                /* stage 2 */
    double rho, rate, lambda;    /* lambda rises over the first `ramp` steps */
} step_plan;

int64_t reach(const recipe *r, double rho);                /* the first step at rho itself; B follow, the last */
step_plan schedule(const recipe *r, int64_t t, double rho); /* of step t = 0, 1, .., reach + B - 1 */

/* What the gradient of the expected share e is multiplied with. Why a power: Top-K tells open gates apart only where e
   is about rho; where e is larger it cuts through gates that are all sure to be open. So the slope grows with e / rho,
   and e follows rho at any budget, the closer the higher the power. A budget below one of `units` counts as one. */
double penalty_slope(const recipe *r, const step_plan *p, double expected, int64_t units);

#endif
