/* recipe.h: how a pattern is learned: what train.c does in each step. */
#ifndef RECIPE_H
#define RECIPE_H

#include <stdbool.h>
#include <stdint.h>

enum { OURS, REFERENCE, RECIPES };
enum { PER_KV_HEAD, PER_QUERY_HEAD };

/* Stage 1 of A steps with relaxed gates, stage 2 of B straight through an exact budget. The rate goes linearly to
   rate_end in stage 2; lambda rises over the first `ramp` steps; the budget falls linearly from `from` to rho over the
   first `share` of stage 2 (0: it does not). */
typedef struct {
    int64_t needles, A, B, ramp; /* needles in a context */
    double rate, rate_end, lambda, from, share;
    int gates, budget;           /* PER_..., dkv_budget */
    int by_p;                    /* Top-K sorts f32 probabilities, where saturated gates tie: as the reference does */
} recipe;

extern const recipe recipes[RECIPES];

typedef struct {
    bool through; /* stage 2 */
    double rho, rate, lambda;
} step_plan;

step_plan schedule(const recipe *r, int64_t t, double rho); /* of step t = 0, 1, .., A + B - 1 */

#endif
