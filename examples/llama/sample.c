#include "sample.h"

#include <math.h>
#include <stdbool.h>

static int32_t argmax(const float *logits, int32_t V) {
    int32_t best = 0;
    for (int32_t i = 1; i < V; i++)
        if (logits[i] > logits[best] || (isnan(logits[best]) && !isnan(logits[i]))) best = i;
    return best;
}

/* splitmix64: uniform in [0, 1) */
static double next_uniform(uint64_t *seed) {
    uint64_t z = *seed += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* A heap with the most likely candidate on top: popping k of n costs n + k log n, sorting all would cost more than a
   token of a small model. */
static bool before(lm_candidate a, lm_candidate b) { return a.p > b.p || (a.p == b.p && a.id < b.id); }

static void sift(lm_candidate *heap, int32_t n, int32_t i) {
    for (int32_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], heap[i])) return;
        lm_candidate swap = heap[i];
        heap[i] = heap[child], heap[child] = swap;
    }
}

/* Moves the top behind the n - 1 that remain: after k pops, heap[n - k .. n) ascend. */
static lm_candidate pop(lm_candidate *heap, int32_t n) {
    lm_candidate top = heap[0];
    heap[0] = heap[n - 1], heap[n - 1] = top;
    sift(heap, n - 1, 0);
    return top;
}

/* Weights exp((logit - most) / temperature), and their sum. */
static double weigh(lm_candidate *c, const float *logits, int32_t V, float temperature) {
    float most = logits[argmax(logits, V)];
    double sum = 0;
    for (int32_t i = 0; i < V; i++) {
        float p = logits[i] == most ? 1 : expf((logits[i] - most) / temperature); /* also where both are infinite */
        c[i] = (lm_candidate){isnan(p) ? 0 : p, i};
        sum += (double)c[i].p;
    }
    return sum;
}

int32_t lm_sample(lm_sampler *s, const float *logits, int32_t V, lm_candidate *c) {
    if (!(s->temperature > 0)) return argmax(logits, V);
    double total = weigh(c, logits, V, s->temperature), mass = 0;
    int32_t k = s->top_k > 0 && s->top_k < V ? s->top_k : V, kept = 0;
    for (int32_t i = V / 2 - 1; i >= 0; i--) sift(c, V, i);
    if (k < V) { /* of the k most likely, the sum is known only when they are out */
        total = 0;
        while (kept < k) total += (double)pop(c, V - kept++).p;
        kept = 0;
        while (kept < k && (!kept || mass < (double)s->top_p * total)) mass += (double)c[V - 1 - kept++].p;
    } else {
        while (kept < V && (!kept || mass < (double)s->top_p * total)) mass += (double)pop(c, V - kept++).p;
    }
    double left = next_uniform(&s->seed) * mass;
    int32_t i = 0;
    while (i < kept - 1 && (left -= (double)c[V - 1 - i].p) >= 0) i++;
    return c[V - 1 - i].id;
}
