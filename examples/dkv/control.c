/* Structural controls (paper, Table 3): a pattern without part of what it learned, at exactly its number of cells
   (layer, KV head, bin), so at its memory and cost. Cells are [L][Hkv][D] of 0 and 1, row f = l * Hkv + g. */
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is ranked: the largest key first, equal keys by order. */
typedef struct {
    double key;
    int64_t order;
} ranked;

static int by_rank(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? 1 : -1;
    return x->order < y->order ? -1 : x->order > y->order;
}

static int64_t sum(const unsigned char *cells, int64_t n) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) total += cells[i];
    return total;
}

/* Fisher and Yates */
static void shuffle(unsigned char *x, int64_t n, uint64_t *state) {
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = (int64_t)(uniform(state) * (double)(i + 1));
        unsigned char t = x[i];
        x[i] = x[j], x[j] = t;
    }
}

/* Whole heads, those that keep most in the pattern first; the last one its nearest bins. */
static void head_only(unsigned char *to, const unsigned char *from, int64_t rows, int64_t D) {
    ranked *head = allocate((size_t)rows, sizeof *head);
    int64_t left = sum(from, rows * D);
    for (int64_t f = 0; f < rows; f++) head[f] = (ranked){(double)sum(from + f * D, D), f};
    qsort(head, (size_t)rows, sizeof *head, by_rank);
    for (int64_t i = 0; left; i++) {
        int64_t n = left < D ? left : D;
        memset(to + head[i].order * D, 1, (size_t)n);
        left -= n;
    }
    free(head);
}

/* One mask for all heads of a layer, of the bins that most of them keep, and as many cells as the layer has: its last
   bin may reach its first heads only. */
static void distance_only(unsigned char *to, const unsigned char *from, const dkv_pattern *p) {
    const int64_t D = p->D, Hkv = p->Hkv;
    ranked *bin = allocate((size_t)D, sizeof *bin);
    for (int l = 0; l < p->L; l++, to += Hkv * D, from += Hkv * D) {
        int64_t left = sum(from, Hkv * D);
        for (int64_t b = 0; b < D; b++) {
            bin[b] = (ranked){0, b};
            for (int64_t g = 0; g < Hkv; g++) bin[b].key += from[g * D + b];
        }
        qsort(bin, (size_t)D, sizeof *bin, by_rank);
        for (int64_t i = 0; left; i++)
            for (int64_t g = 0; g < Hkv && left; g++, left--) to[g * D + bin[i].order] = 1;
    }
    free(bin);
}

/* The highest score in the group; ties to the nearer bin, then by layer, then by head. */
static void scores_only(unsigned char *to, const dkv_pattern *p, const float *S, int64_t left) {
    const int64_t D = p->D, rows = (int64_t)p->L * p->Hkv, G = p->H / p->Hkv;
    ranked *cell = allocate((size_t)(rows * D), sizeof *cell);
    for (int64_t i = 0; i < rows * D; i++) {
        const float *s = S + i % rows * G * D + i / rows;
        cell[i] = (ranked){(double)s[0], i};
        for (int64_t h = 1; h < G; h++)
            if ((double)s[h * D] > cell[i].key) cell[i].key = (double)s[h * D];
    }
    qsort(cell, (size_t)(rows * D), sizeof *cell, by_rank);
    for (int64_t i = 0; i < left; i++) to[cell[i].order % rows * D + cell[i].order / rows] = 1;
    free(cell);
}

void make_control(unsigned char *to, int kind, const dkv_pattern *p, const float *S, uint64_t seed) {
    const int64_t D = p->D, rows = (int64_t)p->L * p->Hkv, n = count_cells(p);
    unsigned char *from = allocate((size_t)(rows * D), 1);
    pattern_cells(from, p);
    memset(to, 0, (size_t)(rows * D));
    switch (kind) {
    case CONTROL_STREAMING: mark_nearest(to, rows, D, n); break;
    case CONTROL_RANDOM:
        memset(to, 1, (size_t)n);
        shuffle(to, rows * D, &seed);
        break;
    case CONTROL_HEAD_ONLY: head_only(to, from, rows, D); break;
    case CONTROL_DISTANCE_ONLY: distance_only(to, from, p); break;
    case CONTROL_DISTANCE_SHUFFLED:
        memcpy(to, from, (size_t)(rows * D));
        for (int64_t f = 0; f < rows; f++) shuffle(to + f * D, D, &seed);
        break;
    case CONTROL_FULLY_SHUFFLED:
        memcpy(to, from, (size_t)(rows * D));
        shuffle(to, rows * D, &seed);
        break;
    case CONTROL_SCORES_ONLY: scores_only(to, p, S, n); break;
    }
    if (sum(to, rows * D) != n) fail("bug: a control of %lld cells for a pattern of %lld", (long long)sum(to, rows * D),
                                     (long long)n);
    free(from);
}

const char *control_name(int kind) {
    static const char *const names[CONTROLS] = {"streaming", "random", "head-only", "distance-only",
                                                "distance-shuffled", "fully-shuffled", "scores-only"};
    return names[kind];
}
