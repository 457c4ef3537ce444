/* sample.h: the next token from logits. */
#ifndef SAMPLE_H
#define SAMPLE_H

#include <stdint.h>

/* temperature 0: greedy, and nothing else is read. Otherwise logits / temperature, then the top_k most likely (0: all),
   then of those the fewest whose probabilities add up to top_p (1: all). The same seed gives the same tokens. */
typedef struct {
    float temperature; /* >= 0 */
    int32_t top_k;     /* >= 0 */
    float top_p;       /* 0..1; at least one token always stays */
    uint64_t seed;     /* advances with every token */
} lm_sampler;

typedef struct { float p; int32_t id; } lm_candidate;

/* logits [V]; scratch [V], unused when greedy. Ties go to the lower id; a NaN is never chosen unless all are. */
int32_t lm_sample(lm_sampler *s, const float *logits, int32_t V, lm_candidate *scratch);

#endif
