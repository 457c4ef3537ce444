#include "stats.h"

#include "tool.h"

#include <math.h>
#include <stdlib.h>

static const double Z = 1.959963984540054; /* 97.5 % of the normal distribution */
enum { RESAMPLES = 10000 };

interval wilson(int64_t k, int64_t n) {
    const double N = (double)n, p = (double)k / N, z2 = Z * Z / N;
    const double middle = (p + z2 / 2) / (1 + z2), half = Z / (1 + z2) * sqrt(p * (1 - p) / N + z2 / (4 * N));
    return (interval){k ? middle - half : 0, k < n ? middle + half : 1}; /* exact at the ends, where it may round */
}

double mean_of(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return sum / (double)n;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The q-quantile of ascending x[n], between its neighbours. */
static double quantile(const double *x, int64_t n, double q) {
    const double at = q * (double)(n - 1);
    const int64_t i = (int64_t)at, next = i + 1 < n ? i + 1 : i;
    return x[i] + (at - (double)i) * (x[next] - x[i]);
}

interval bootstrap(const double *x, int64_t n, int64_t size, uint64_t seed) {
    const int64_t clusters = n / size;
    double *cluster = allocate((size_t)clusters, sizeof *cluster), *mean = allocate(RESAMPLES, sizeof *mean);
    for (int64_t c = 0; c < clusters; c++) cluster[c] = mean_of(x + c * size, size);
    for (int64_t r = 0; r < RESAMPLES; r++) {
        for (int64_t c = 0; c < clusters; c++) mean[r] += cluster[(int64_t)(uniform(&seed) * (double)clusters)];
        mean[r] /= (double)clusters;
    }
    qsort(mean, RESAMPLES, sizeof *mean, ascending);
    interval i = {quantile(mean, RESAMPLES, 0.025), quantile(mean, RESAMPLES, 0.975)};
    free(mean);
    free(cluster);
    return i;
}
