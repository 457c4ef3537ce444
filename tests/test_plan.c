/* [BINS] [UNION] [PLAN]: against the formulas, position by position. */
#define _GNU_SOURCE
#include "test.h"

static const struct { int64_t W, S, R; int D; } regions[] = {
    {1, 0, 0, 5}, {3, 5, 7, 70}, {16, 4, 32, 9}, {5, 0, 11, 64}, {7, 13, 0, 3}, {128, 128, 1024, 2},
};

/* Context lengths where something changes; fills T, returns how many. */
static int edge_lengths(const oracle_pattern *o, int64_t *T) {
    int64_t at[] = {0, o->S, o->R, o->S + o->R, o->S + o->R + o->W, o->S + o->R + 2 * o->W, o->S + o->R + o->W * o->D,
                    o->S + o->R + o->W * (o->D + 2)};
    int n = 0;
    for (int i = 0; i < COUNT(at); i++)
        for (int off = -1; off <= 1; off++)
            if (at[i] + off >= 0) T[n++] = at[i] + off;
    return n;
}

/* keep [L][Hkv][T_c] by the oracle. */
static unsigned char *mask_of(const oracle_pattern *o, int64_t T_c, dkv_beyond beyond) {
    unsigned char *keep = guarded((size_t)(o->L * o->Hkv * T_c), 1), *at = keep;
    for (int l = 0; l < o->L; l++)
        for (int g = 0; g < o->Hkv; g++)
            for (int64_t i = 0; i < T_c; i++) *at++ = (unsigned char)oracle_keep(o, T_c, beyond, l, g, i);
    return keep;
}

/* Runs: sorted, apart, numbered; and the same positions as keep [L][Hkv][T_c] in every view of the plan. */
static void check_plan(const dkv_plan *plan, const unsigned char *keep, int L, int Hkv, int64_t T_c) {
    CHECK(plan->L == L && plan->Hkv == Hkv && plan->T_c == T_c && plan->first[0] == 0);
    CHECK(plan->rows == plan->first + L * Hkv + 1 && (const void *)plan->runs == (const void *)(plan->rows + L * Hkv));
    int64_t *positions = guarded((size_t)T_c * 8, 8);
    for (int f = 0; f < L * Hkv; f++, keep += T_c) {
        int64_t row = 0, end = -1;
        for (int64_t r = plan->first[f]; r < plan->first[f + 1]; r++) {
            dkv_run run = plan->runs[r];
            CHECK(run.pos > end && run.len > 0 && run.row == row);
            row += run.len;
            end = run.pos + run.len;
        }
        CHECK(end <= T_c);
        CHECK_INT(plan->rows[f], row);
        dkv_plan_positions(plan, f / Hkv, f % Hkv, positions);
        row = 0;
        for (int64_t i = 0; i < T_c; i++) {
            CHECK_INT(dkv_plan_row(plan, f / Hkv, f % Hkv, i), keep[i] ? row : -1);
            if (keep[i]) CHECK_INT(positions[row++], i);
        }
        CHECK_INT(plan->rows[f], row);
    }
}

static void bins(void) {
    for (int c = 0; c < COUNT(regions); c++) {
        oracle_pattern o = random_pattern(1, 1, 1, regions[c].D, regions[c].W, regions[c].S, regions[c].R, 0.5);
        dkv_pattern p = pattern_of(&o);
        int64_t T[32], n = edge_lengths(&o, T);
        CHECK_INT(dkv_max_context(&p), o.S + o.R + o.W * o.D);
        for (int64_t k = 0; k < n; k++) {
            int64_t count[128] = {0}, first[128], begin, end, most = -1;
            AT("W %d S %d R %d T_c %d", (int)o.W, (int)o.S, (int)o.R, (int)T[k]);
            for (int64_t i = 0; i < T[k]; i++) {
                int64_t b = oracle_bin(&o, T[k], i);
                CHECK_INT(dkv_bin(&p, T[k], i), b < 0 ? DKV_ALWAYS : b);
                if (b > most) most = b;
                if (b >= 0 && !count[b]++) first[b] = i;
            }
            CHECK_INT(dkv_bins_at(&p, T[k]), most + 1);
            for (int64_t b = 0; b < 100; b++) {
                dkv_bin_span(&p, T[k], b, &begin, &end);
                CHECK_INT(end - begin, count[b]);
                if (count[b]) CHECK_INT(begin, first[b]);
            }
        }
        CHECK(test_release());
    }
}

static void unions(void) {
    static const int G[] = {1, 3, 4, 7, 8};
    for (int c = 0; c < COUNT(G) * 3; c++) {
        int Hkv = 1 + c / COUNT(G), H = Hkv * G[c % COUNT(G)], D = 50 + 40 * (c % 3);
        oracle_pattern o = random_pattern(2, H, Hkv, D, 1, 0, 0, 0.2);
        dkv_pattern p = pattern_of(&o);
        uint64_t row[4];
        for (int f = 0; f < 2 * Hkv; f++) {
            memset(row, TEST_POISON, sizeof row);
            dkv_union_row(&p, f / Hkv, f % Hkv, row);
            for (int b = 0; b < D; b++) {
                AT("H %d Hkv %d row %d bin %d", H, Hkv, f, b);
                int want = oracle_keep(&o, D, DKV_BEYOND_ERROR, f / Hkv, f % Hkv, D - 1 - b);
                CHECK_INT(dkv_union_get(&p, f / Hkv, f % Hkv, b), want);
                CHECK_INT(row[b / 64] >> b % 64 & 1, want);
            }
            for (int b = D; b < (D + 63) / 64 * 64; b++) CHECK_INT(row[b / 64] >> b % 64 & 1, 0);
            CHECK(is_poison(row + (D + 63) / 64, sizeof row - (size_t)(D + 63) / 64 * 8));
        }
        CHECK(test_release());
    }
}

/* The exact size does; a byte less, or a byte off, changes nothing. */
static void check_plan_memory(const dkv_pattern *p, int64_t T_c, dkv_beyond beyond) {
    dkv_plan plan, untouched;
    memset(&untouched, 0x5A, sizeof untouched);
    memcpy(&plan, &untouched, sizeof plan);
    size_t need, less;
    CHECK_OK(dkv_plan_make(&plan, NULL, &need, p, T_c, beyond));
    char *mem = guarded(need + 1, 1);
    char *aligned = mem - (uintptr_t)mem % 8 + 8;
    less = need - 1;
    if ((uintptr_t)mem % 8 != 0) CHECK_RESULT(dkv_plan_make(&plan, mem, &need, p, T_c, beyond), DKV_ERR_ALIGN);
    CHECK_RESULT(dkv_plan_make(&plan, aligned, &less, p, T_c, beyond), DKV_ERR_CAPACITY);
    CHECK(!memcmp(&plan, &untouched, sizeof plan) && is_poison(mem, need + 1));
    CHECK_OK(dkv_plan_make(&plan, aligned, &need, p, T_c, beyond));
    int64_t heads = plan.L * plan.Hkv;
    CHECK_INT(need, (2 * heads + 1) * 8 + plan.first[heads] * (int64_t)sizeof(dkv_run));
}

static void check_stats(const oracle_pattern *o, const dkv_pattern *p, const unsigned char *keep, int64_t T_c,
                        dkv_beyond b) {
    int64_t kept = 0, compressible = 0, compressible_kept = 0, ones = 0, reached = 0;
    for (int f = 0; f < o->L * o->Hkv; f++)
        for (int64_t i = 0; i < T_c; i++) {
            kept += keep[f * T_c + i];
            compressible += oracle_bin(o, T_c, i) >= 0;
            compressible_kept += oracle_bin(o, T_c, i) >= 0 && keep[f * T_c + i];
        }
    for (int bin = 0; bin < o->D; bin++)
        for (int r = 0; r < o->L * o->H && o->S + o->R + o->W * bin < T_c; r++, reached++) ones += o->M[r * o->D + bin];
    dkv_stats s;
    CHECK_OK(dkv_dry_run(&s, p, T_c, b));
    CHECK_INT(s.kept, kept);
    CHECK_INT(s.total, o->L * o->Hkv * T_c);
    CHECK_INT(s.compressible, compressible);
    CHECK_INT(s.compressible_kept, compressible_kept);
    CHECK(fabs(s.logical - (reached ? (double)ones / (double)reached : 1)) < 1e-15);
    CHECK(fabs(s.physical - (compressible ? (double)compressible_kept / (double)compressible : 1)) < 1e-15);
    CHECK(fabs(s.physical_total - (T_c ? (double)kept / (double)s.total : 1)) < 1e-15);
}

static void plans(void) {
    static const int G[] = {1, 3, 4, 7, 8};
    static const double density[] = {0, 0.2, 0.7, 1};
    for (int c = 0; c < COUNT(regions) * COUNT(G) * COUNT(density); c++) {
        int r = c % COUNT(regions), G_now = G[c / COUNT(regions) % COUNT(G)], Hkv = 1 + c % 3;
        oracle_pattern o = random_pattern(2, G_now * Hkv, Hkv, regions[r].D, regions[r].W, regions[r].S, regions[r].R,
                                          density[c / COUNT(regions) / COUNT(G)]);
        dkv_pattern p = pattern_of(&o);
        int64_t T[32], n = edge_lengths(&o, T);
        for (int64_t k = 0; k < n * 4; k++) {
            int64_t T_c = T[k / 4];
            dkv_beyond beyond = (dkv_beyond)(k % 4);
            if (T_c <= o.S + o.R + o.W * o.D && k % 4 != k / 4 % 4) continue; /* all four are one then */
            AT("case %d G %d T_c %d beyond %d", c, G_now, (int)T_c, (int)beyond);
            if (beyond == DKV_BEYOND_ERROR && T_c > o.S + o.R + o.W * o.D) {
                CHECK_RESULT(dkv_plan_make(&(dkv_plan){0}, NULL, &(size_t){0}, &p, T_c, beyond), DKV_ERR_RANGE);
                CHECK_RESULT(dkv_dry_run(&(dkv_stats){0}, &p, T_c, beyond), DKV_ERR_RANGE);
                continue;
            }
            unsigned char *keep = mask_of(&o, T_c, beyond);
            dkv_plan plan = plan_of(&p, T_c, beyond);
            check_plan(&plan, keep, o.L, o.Hkv, T_c);
            CHECK_INT(plan.pattern_crc, dkv_pattern_crc(&p));
            check_stats(&o, &p, keep, T_c, beyond);
            check_plan_memory(&p, T_c, beyond);
        }
        CHECK(test_release());
    }
    oracle_pattern o = random_pattern(1, 1, 1, 4, 8, 2, 3, 0.5);
    dkv_pattern p = pattern_of(&o);
    CHECK_RESULT(dkv_plan_make(&(dkv_plan){0}, NULL, &(size_t){0}, &p, -1, DKV_BEYOND_ERROR), DKV_ERR_FIELD);
    CHECK_RESULT(dkv_dry_run(&(dkv_stats){0}, &p, -1, DKV_BEYOND_ERROR), DKV_ERR_FIELD);
    CHECK_RESULT(dkv_plan_make(&(dkv_plan){0}, NULL, &(size_t){0}, &p, 9, (dkv_beyond)4), DKV_ERR_FIELD);
}

/* Lengths that only 64 bits hold, from the pattern alone. */
static void long_contexts(void) {
    oracle_pattern o = random_pattern(1, 2, 1, 4, (int64_t)1 << 32, (int64_t)1 << 33, (int64_t)1 << 34, 1);
    memset(o.M, 0, 8);
    o.M[2] = 1; /* bin 2 only */
    dkv_pattern p = pattern_of(&o);
    int64_t W = o.W, T_c = o.S + o.R + 3 * W;
    dkv_plan plan = plan_of(&p, T_c, DKV_BEYOND_ERROR);
    CHECK_INT(plan.first[1], 2);
    CHECK(plan.runs[0].pos == 0 && plan.runs[0].len == o.S + W && plan.runs[0].row == 0);
    CHECK(plan.runs[1].pos == T_c - o.R && plan.runs[1].len == o.R && plan.runs[1].row == o.S + W);
    CHECK_INT(dkv_plan_row(&plan, 0, 0, T_c - 1), o.S + W + o.R - 1);
    dkv_stats s;
    CHECK_OK(dkv_dry_run(&s, &p, T_c, DKV_BEYOND_ERROR));
    CHECK_INT(s.kept, o.S + o.R + W);
    dkv_shape shape = {1, 2, 1, 128, 64};
    CHECK_INT(dkv_kv_bytes_packed(&plan, &shape, DKV_F16), (o.S + o.R + W) * 192 * 2);
    CHECK_INT(dkv_kv_bytes_dense(&shape, DKV_F32, T_c), T_c * 192 * 4);
}

static void from_positions(void) {
    for (int c = 0; c < 200; c++) {
        int L = 1 + c % 3, Hkv = 1 + c % 4;
        int64_t T_c = rnd_below(300);
        double density = rnd_uniform();
        unsigned char *keep = guarded((size_t)(L * Hkv * T_c), 1);
        for (int64_t i = 0; i < L * Hkv * T_c; i++) keep[i] = rnd_uniform() < density;
        AT("case %d T_c %d", c, (int)T_c);
        dkv_plan plan = plan_of_mask(keep, L, Hkv, T_c);
        check_plan(&plan, keep, L, Hkv, T_c);
        CHECK_INT(plan.pattern_crc, 0);
        plan = plan_of_mask(NULL, L, Hkv, T_c);
        memset(keep, 1, (size_t)(L * Hkv * T_c));
        check_plan(&plan, keep, L, Hkv, T_c);
        CHECK(test_release());
    }
}

static void from_positions_errors(void) {
    static const struct { int L, Hkv, T_c; int64_t at[3], counts[2]; dkv_result want; } table[] = {
        {1, 2, 9, {3, 4, 0}, {2, 1}, DKV_OK},          {1, 2, 9, {3, 3, 0}, {2, 1}, DKV_ERR_ORDER},
        {1, 2, 9, {4, 3, 0}, {2, 1}, DKV_ERR_ORDER},   {1, 2, 9, {3, 9, 0}, {2, 1}, DKV_ERR_ORDER},
        {1, 2, 9, {-1, 3, 0}, {2, 1}, DKV_ERR_ORDER},  {1, 2, 9, {3, 8, 9}, {2, 1}, DKV_ERR_ORDER},
        {0, 2, 9, {3, 4, 0}, {2, 1}, DKV_ERR_FIELD},   {1, 0, 9, {3, 4, 0}, {2, 1}, DKV_ERR_FIELD},
        {1, 2, -1, {3, 4, 0}, {2, 1}, DKV_ERR_FIELD},  {1, 2, 9, {3, 4, 0}, {-1, 1}, DKV_ERR_ORDER},
        {-1, 2, 9, {3, 4, 0}, {2, 1}, DKV_ERR_FIELD},
    };
    for (int i = 0; i < COUNT(table); i++) {
        AT("row %d", i);
        char mem[512];
        size_t bytes = sizeof mem;
        dkv_plan plan;
        memset(mem, TEST_POISON, sizeof mem);
        char *aligned = mem + (8 - (uintptr_t)mem % 8) % 8;
        bytes -= 8;
        CHECK_RESULT(dkv_plan_from_positions(&plan, aligned, &bytes, table[i].L, table[i].Hkv, table[i].T_c,
                                             table[i].at, table[i].counts), table[i].want);
        if (table[i].want) CHECK(is_poison(mem, sizeof mem));
    }
}

/* A second turn: kept before or new, and kept by the pattern at the new length. */
static void refine(void) {
    for (int c = 0; c < 200; c++) {
        int r = c % (COUNT(regions) - 1), Hkv = 1 + c % 3;
        oracle_pattern o = random_pattern(2, 3 * Hkv, Hkv, regions[r].D, regions[r].W, regions[r].S, regions[r].R, 0.6);
        dkv_pattern p = pattern_of(&o);
        int64_t limit = o.S + o.R + o.W * (o.D + 1), T_1 = rnd_below(limit + 1), T_2 = T_1 + rnd_below(2 * o.W + 3);
        dkv_beyond beyond = (dkv_beyond)(1 + c % 3);
        AT("case %d T_c %d then %d", c, (int)T_1, (int)T_2);
        unsigned char *before = mask_of(&o, T_1, beyond), *after = mask_of(&o, T_2, beyond);
        for (int f = 0; f < 2 * Hkv; f++)
            for (int64_t i = 0; i < T_1; i++) after[f * T_2 + i] &= before[f * T_1 + i];
        dkv_plan old = plan_of(&p, T_1, beyond), plan;
        size_t bytes;
        EXACTLY(mem, 8, bytes, dkv_plan_refine(&plan, mem, &bytes, &old, &p, T_2, beyond));
        check_plan(&plan, after, 2, Hkv, T_2);
        if (T_1) CHECK_RESULT(dkv_plan_refine(&plan, NULL, &bytes, &old, &p, T_1 - 1, beyond), DKV_ERR_ORDER);
        CHECK_RESULT(dkv_plan_refine(&plan, NULL, &bytes, &old, &p, limit + T_2, DKV_BEYOND_ERROR), DKV_ERR_RANGE);
        old.L = 1;
        CHECK_RESULT(dkv_plan_refine(&plan, NULL, &bytes, &old, &p, T_2, beyond), DKV_ERR_SHAPE);
        CHECK(test_release());
    }
}

/* The closed forms: packed from rows, alloc equal to what packing asks for. */
static void bytes_of_plans(void) {
    for (int c = 0; c < 60; c++) {
        dkv_type type = type_at(c);
        dkv_shape s = {2, 6, 3, 1 + (int)rnd_below(200), 1 + (int)rnd_below(200)};
        unsigned char keep[6 * 70];
        for (int i = 0; i < COUNT(keep); i++) keep[i] = rnd() & 1;
        dkv_plan plan = plan_of_mask(keep, 2, 3, 70);
        int64_t rows = 0, alloc = 0, e = oracle_bytes(type);
        for (int f = 0; f < 6; f++) rows += plan.rows[f];
        for (int l = 0; l < 2; l++) {
            size_t bytes;
            dkv_tensor k = new_tensor(THD, type, 70, 3, s.d_k), v = new_tensor(THD, type, 70, 3, s.d_v);
            dkv_segment source = dkv_strided(k, v, 70);
            CHECK_OK(dkv_pack(&(dkv_packed){0}, NULL, &bytes, type, &plan, l, s.d_k, s.d_v, &source));
            alloc += (int64_t)bytes;
        }
        CHECK_INT(dkv_kv_bytes_packed(&plan, &s, type), rows * (s.d_k + s.d_v) * e);
        CHECK_INT(dkv_kv_bytes_alloc(&plan, &s, type), alloc);
        CHECK(alloc >= dkv_kv_bytes_packed(&plan, &s, type));
        CHECK(alloc <= (rows + 6 * 15) * (s.d_k + 1 + s.d_v + 15) * e + 2 * 2 * 63);
        CHECK_INT(dkv_kv_bytes_dense(&s, type, 70), 6 * 70 * (s.d_k + s.d_v) * e);
        CHECK(test_release());
    }
}

int main(void) {
    static const test_case cases[] = {
        {"bins", bins, 0},
        {"unions", unions, 0},
        {"plans and ratios", plans, 0},
        {"64-bit lengths", long_contexts, 0},
        {"from positions", from_positions, 0},
        {"from positions, errors", from_positions_errors, 0},
        {"refine", refine, 0},
        {"bytes", bytes_of_plans, 0},
    };
    return run_cases("plan", cases, COUNT(cases));
}
