/* plot.h: what the pictures of patterns and of scores share. Each draw_ writes data and a script for gnuplot. */
#ifndef PLOT_H
#define PLOT_H

#include "tool.h"

#include <stdio.h>

/* gnuplot draws no image narrower than two: a single row or bin is written twice, the second outside the axes. */
static inline int64_t at_least_two(int64_t n) { return n < 2 ? 2 : n; }

/* summary = 'model: shape' */
void write_title(FILE *out, const char *model, int64_t L, int64_t H, int64_t Hkv, int64_t D, int64_t W);

void draw_scores(FILE *out, const score_table *s);

#endif
