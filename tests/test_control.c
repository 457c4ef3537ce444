/* The structural controls: each keeps exactly as many cells as the pattern, and exactly what its rule says, ties
   included; against small patterns worked out by hand and against counts of random ones. */
#define _GNU_SOURCE
#include "../examples/dkv/tool.h"
/* before cmocka, which makes a macro of fail */
#include "test.h"

enum { L = 3, H = 6, Hkv = 2, D = 5, CELLS = L * Hkv * D };

static dkv_pattern shape = {.L = L, .H = H, .Hkv = Hkv, .D = D, .W = 128, .S = 128, .R = 1024};
static unsigned char given[CELLS], got[CELLS];

/* Rows of 0 and 1 between blanks, in the order of cells. */
static void read_rows(unsigned char *cells, const char *rows) {
    for (; *rows; rows++)
        if (*rows != ' ') *cells++ = *rows == '1';
}

static void check_rows(const char *rows) {
    unsigned char want[CELLS];
    read_rows(want, rows);
    for (int i = 0; i < CELLS; i++) {
        AT("row %d, bin %d", i / D, i % D);
        CHECK_INT(got[i], want[i]);
    }
}

static void control(int kind, const char *rows, const float *S) {
    read_rows(given, rows);
    dkv_pattern p = pattern_of_cells(&shape, given);
    make_control(got, kind, &p, S, 7);
    free((void *)(uintptr_t)p.bits);
}

static const char PATTERN[] = "10100 11000 00000 11110 01010 00001";

static void by_hand(void) {
    control(CONTROL_STREAMING, PATTERN, NULL); /* 11 cells: 6 of the nearest bin, 5 of the next */
    check_rows("11000 11000 11000 11000 11000 10000");
    control(CONTROL_HEAD_ONLY, PATTERN, NULL); /* head 3 keeps 4; heads 0, 1 and 4 tie, so 0, and one bin of 1 */
    check_rows("11111 10000 00000 11111 00000 00000");
    control(CONTROL_DISTANCE_ONLY, PATTERN, NULL); /* 4 cells, 4 cells, 3 cells; ties to the nearer bin */
    check_rows("11000 11000 11000 11000 01010 01000");
    control(CONTROL_DISTANCE_ONLY, "10100 00101 00000 11111 00000 00000", NULL); /* bin 2 of both, then bin 0 of both */
    check_rows("10100 10100 11100 11000 00000 00000");
}

static void scores(void) {
    float S[L * H * D];
    for (int i = 0; i < L * H * D; i++) S[i] = 0.25f;
    S[(1 * H + 5) * D + 4] = 1; /* one head of a group is enough: layer 1, KV head 1, bin 4 */
    S[(2 * H + 0) * D + 3] = 0.5f;
    control(CONTROL_SCORES_ONLY, PATTERN, S); /* those two, and of equals the nearest, by layer, then head */
    check_rows("11000 11000 11000 10001 10010 10000");
    control(CONTROL_SCORES_ONLY, "10000 10000 00000 00000 00000 00000", S);
    check_rows("00000 00000 00000 00001 00010 00000");
}

/* The nearest 3 bins, 8 cells of 11, and a control of those. */
static void fewer_bins(void) {
    enum { NEAR = 3 };
    read_rows(given, PATTERN);
    dkv_pattern p = pattern_of_cells(&shape, given), q = cut_pattern(&p, NEAR);
    CHECK_OK(dkv_pattern_check(&q));
    CHECK_INT(q.K, 8 * (H / Hkv));
    for (int f = 0; f < L * H; f++)
        for (int b = 0; b < NEAR; b++) {
            AT("row %d, bin %d", f, b);
            CHECK_INT(dkv_pattern_get(&q, f / H, f % H, b), dkv_pattern_get(&p, f / H, f % H, b));
        }
    make_control(got, CONTROL_HEAD_ONLY, &q, NULL, 7); /* head 3 keeps 3; 0 and 1 tie, so 0, and two bins of 1 */
    read_rows(given, "111 110 000 111 000 000");
    for (int i = 0; i < L * Hkv * NEAR; i++) CHECK_INT(got[i], given[i]);
    free((void *)(uintptr_t)q.bits);
    free((void *)(uintptr_t)p.bits);
}

static int count(const unsigned char *cells, int n) {
    int ones = 0;
    for (int i = 0; i < n; i++) ones += cells[i];
    return ones;
}

static void counts(void) {
    static float S[L * H * D];
    for (int round = 0; round < 300; round++) {
        int share = (int)rnd_below(101), moved = 0;
        for (int i = 0; i < CELLS; i++) given[i] = rnd_below(100) < share;
        for (int i = 0; i < L * H * D; i++) S[i] = (float)rnd_below(4) / 4;
        dkv_pattern p = pattern_of_cells(&shape, given);
        CHECK_INT(dkv_pattern_count(&p), count(given, CELLS) * (H / Hkv));
        for (int kind = 0; kind < CONTROLS; kind++) {
            AT("round %d, %s", round, control_name(kind));
            memset(got, 0x55, sizeof got);
            make_control(got, kind, &p, S, (uint64_t)round);
            CHECK_INT(count(got, CELLS), count(given, CELLS));
            for (int f = 0; kind == CONTROL_DISTANCE_SHUFFLED && f < L * Hkv; f++)
                CHECK_INT(count(got + f * D, D), count(given + f * D, D));
            for (int l = 0; kind == CONTROL_DISTANCE_ONLY && l < L; l++) {
                int split = 0;
                for (int b = 0; b < D; b++) split += got[l * Hkv * D + b] != got[(l * Hkv + 1) * D + b];
                CHECK_INT(split, count(given + l * Hkv * D, Hkv * D) % Hkv);
                CHECK_INT(count(got + l * Hkv * D, Hkv * D), count(given + l * Hkv * D, Hkv * D));
            }
            int partial = 0;
            for (int f = 0; f < L * Hkv; f++) partial += count(got + f * D, D) % D != 0;
            if (kind == CONTROL_HEAD_ONLY) CHECK_INT(partial, count(given, CELLS) % D != 0);
            moved += kind == CONTROL_FULLY_SHUFFLED && memcmp(got, given, CELLS);
        }
        CHECK(moved || count(given, CELLS) < 2 || count(given, CELLS) > CELLS - 2);
        free((void *)(uintptr_t)p.bits);
    }
}

/* Every order of the bins is as likely as another, and every seed draws its own. */
static void shuffles(void) {
    int seen[CELLS] = {0}, kinds[] = {CONTROL_RANDOM, CONTROL_DISTANCE_SHUFFLED, CONTROL_FULLY_SHUFFLED};
    for (int k = 0; k < 3; k++) {
        enum { DRAWS = 6000 };
        memset(seen, 0, sizeof seen);
        read_rows(given, "10000 10000 10000 10000 10000 10000");
        dkv_pattern p = pattern_of_cells(&shape, given);
        for (uint64_t seed = 0; seed < DRAWS; seed++) {
            make_control(got, kinds[k], &p, NULL, seed);
            for (int i = 0; i < CELLS; i++) seen[i] += got[i];
        }
        for (int i = 0; i < CELLS; i++) { /* a fifth each, standard deviation 31 */
            AT("%s, cell %d", control_name(kinds[k]), i);
            CHECK(seen[i] > DRAWS / 5 - 155 && seen[i] < DRAWS / 5 + 155);
        }
        free((void *)(uintptr_t)p.bits);
    }
}

int main(void) {
    static const test_case cases[] = {{"controls by hand", by_hand, 0},
                                      {"scores only, ties", scores, 0},
                                      {"of fewer bins", fewer_bins, 0},
                                      {"cells of random patterns", counts, 0},
                                      {"shuffles are uniform", shuffles, 0}};
    return run_cases("control", cases, COUNT(cases));
}
