/* stats.h: how sure one can be of counts and of differences. */
#ifndef STATS_H
#define STATS_H

#include <stdint.h>

typedef struct {
    double low, high;
} interval;

/* Wilson's 95 % interval of a share, of which k of n were seen; n >= 1. */
interval wilson(int64_t k, int64_t n);

/* The 95 % percentile interval of the mean of x[n], n >= 1, by 10,000 resamples of whole clusters: x[i] belongs to
   cluster i / size, and n is a multiple of size. The same seed gives the same interval. */
interval bootstrap(const double *x, int64_t n, int64_t size, uint64_t seed);

double mean_of(const double *x, int64_t n);

#endif
