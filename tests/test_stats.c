/* Intervals against closed forms: Wilson's as the roots of its quadratic and published values; the bootstrap of normal
   data against the normal interval, of clusters against their number, of a constant against itself. */
#define _GNU_SOURCE
#include "../examples/dkv/tool.h"
/* before cmocka, which makes a macro of fail */
#include "test.h"

#include "../examples/dkv/stats.h"

static void wilson_closed(void) {
    const double z = 1.959963984540054;
    for (int n = 1; n < 400; n += 13)
        for (int k = 0; k <= n; k++) {
            interval i = wilson(k, n);
            const double p = (double)k / n, ends[] = {i.low, i.high};
            const int inside[] = {k > 0, k < n}; /* 0 and 1 are exact ends */
            AT("%d of %d", k, n);
            CHECK(i.low >= 0 && i.high <= 1 && i.low <= p && p <= i.high && i.low < i.high);
            for (int e = 0; e < 2; e++) /* |p - x| = z sqrt(x (1 - x) / n) */
                if (inside[e]) CHECK(fabs(fabs(p - ends[e]) - z * sqrt(ends[e] * (1 - ends[e]) / n)) < 1e-12);
        }
    interval none = wilson(0, 10), half = wilson(5, 10); /* Newcombe 1998, Agresti and Coull 1998 */
    CHECK(none.low == 0 && fabs(none.high - 0.27753) < 1e-5);
    CHECK(fabs(half.low - 0.23659) < 1e-5 && fabs(half.high - 0.76341) < 1e-5);
}

static void bootstrap_normal(void) {
    enum { N = 2000 };
    static double x[N];
    double sum = 0, square = 0;
    for (int i = 0; i < N; i++) {
        x[i] = 3 + 2 * rnd_normal();
        sum += x[i] / N;
    }
    for (int i = 0; i < N; i++) square += (x[i] - sum) * (x[i] - sum) / N;
    const double half = 1.96 * sqrt(square / N); /* the bootstrap's own error of an end is 2 % of it */
    interval i = bootstrap(x, N, 1, 1), again = bootstrap(x, N, 1, 1), other = bootstrap(x, N, 1, 2);
    CHECK(fabs(i.low - (sum - half)) < 0.1 * half && fabs(i.high - (sum + half)) < 0.1 * half);
    CHECK(i.low == again.low && i.high == again.high && i.low != other.low);
}

/* Ten copies of a value are one observation. */
static void bootstrap_clusters(void) {
    enum { CLUSTERS = 300, SIZE = 10, N = CLUSTERS * SIZE };
    static double one[CLUSTERS], all[N];
    for (int i = 0; i < N; i++) {
        if (i % SIZE == 0) one[i / SIZE] = rnd_normal();
        all[i] = one[i / SIZE];
    }
    interval a = bootstrap(one, CLUSTERS, 1, 5), b = bootstrap(all, N, SIZE, 5), c = bootstrap(all, N, 1, 5);
    CHECK(fabs(a.low - b.low) < 1e-12 && fabs(a.high - b.high) < 1e-12);
    CHECK((b.high - b.low) / (c.high - c.low) > 2.8 && (b.high - b.low) / (c.high - c.low) < 3.6); /* sqrt 10 */
}

static void bootstrap_constant(void) {
    double x[12];
    for (int i = 0; i < 12; i++) x[i] = 0.5;
    interval i = bootstrap(x, 12, 3, 0), single = bootstrap(x, 3, 3, 0);
    CHECK(i.low == 0.5 && i.high == 0.5 && single.low == 0.5 && single.high == 0.5);
    CHECK(mean_of(x, 12) == 0.5);
}

int main(void) {
    static const test_case cases[] = {{"Wilson's interval", wilson_closed, 0},
                                      {"bootstrap of normal data", bootstrap_normal, 0},
                                      {"bootstrap of clusters", bootstrap_clusters, 0},
                                      {"bootstrap of a constant", bootstrap_constant, 0}};
    return run_cases("stats", cases, COUNT(cases));
}
