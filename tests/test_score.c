/* [SCORE]: ranks of source tokens against double precision; exact where logits are exact or equal. */
#define _GNU_SOURCE
#include "test.h"
#include "tolerance.h"

typedef struct problem {
    int H, Hkv, d;
    int64_t T_c, n_tail, N_q;
    dkv_type type;
    int layout, strided, whole;   /* whole: small whole numbers, so that every logit is exact */

    double *q, *k, *tail_k;
    int64_t *source, *rank;
    dkv_plan plan;
    dkv_packed packed;
    dkv_attention a;
    size_t ws_bytes;
    void *ws;
} problem;

static const problem plain = {.H = 6, .Hkv = 2, .d = 64, .T_c = 300, .n_tail = 9, .N_q = 5};

static double *values(const problem *p, int64_t n, dkv_type type) {
    double *x = normal_values(n, type, 1);
    for (int64_t i = 0; i < n && p->whole; i++) x[i] = (double)rnd_below(5) - 2;
    return x;
}

static dkv_tensor tensor_of(const problem *p, dkv_type type, const double *x, int64_t T, int heads) {
    dkv_tensor t = new_tensor(p->layout, type, T, heads, p->d);
    fill_tensor(&t, x, T, heads, p->d);
    return t;
}

/* V is left out: scores need none. A packed context has one, of any values. */
static void build(problem *p) {
    dkv_type type = p->strided ? type_at(p->type) : source_type(p->type);
    p->q = values(p, p->N_q * p->H * p->d, DKV_F32);
    if (!p->k) p->k = values(p, p->T_c * p->Hkv * p->d, type);
    if (!p->tail_k) p->tail_k = values(p, p->n_tail * p->Hkv * p->d, DKV_F32);
    dkv_tensor k = tensor_of(p, type, p->k, p->T_c, p->Hkv), none = {0};
    dkv_segment context = dkv_strided(k, none, p->T_c);
    if (!p->strided) {
        context.v = k;
        p->plan = plan_of_mask(NULL, 1, p->Hkv, p->T_c);
        p->packed = pack_layer(&p->plan, p->type, p->d, p->d, &context);
        double *v = guarded((size_t)(p->T_c * p->Hkv * p->d) * 8, 8);
        if (has_scales(p->type)) learn_values(&p->packed, &p->plan, 0, p->k, v);
        context = (dkv_segment){.packed = &p->packed};
    }
    p->a = (dkv_attention){.H = p->H, .Hkv = p->Hkv, .d_k = p->d, .N_q = p->N_q,
                           .q = tensor_of(p, DKV_F32, p->q, p->N_q, p->H), .context = context,
                           .tail = dkv_strided(tensor_of(p, DKV_F32, p->tail_k, p->n_tail, p->Hkv), none, p->n_tail)};
    if (p->whole) p->a.scale = 0.25f;
    p->source = guarded((size_t)p->N_q * 8, 8);
    p->rank = guarded((size_t)(p->N_q * p->H) * 8, 8);
    for (int64_t n = 0; n < p->N_q; n++) p->source[n] = rnd_below(p->T_c + p->T_c / 4) % p->T_c;
    CHECK_OK(dkv_score_size(&p->ws_bytes, &p->a, 1));
    p->ws = guarded(p->ws_bytes, 64);
}

static void score(problem *p) {
    CHECK_OK(dkv_score(p->rank, &p->a, p->source, p->ws, p->ws_bytes, NULL));
}

static double logit(const problem *p, int64_t n, int h, int64_t j, double *magnitude) {
    int g = h / (p->H / p->Hkv);
    const double *k = j < p->T_c ? p->k + (j * p->Hkv + g) * p->d : p->tail_k + ((j - p->T_c) * p->Hkv + g) * p->d;
    double s = 0, a = 0, scale = p->whole ? 0.25 : 1 / sqrt(p->d);
    for (int i = 0; i < p->d; i++) {
        double x = p->q[(n * p->H + h) * p->d + i] * k[i] * scale;
        s += x;
        a += fabs(x);
    }
    *magnitude = fmax(*magnitude, a);
    return s;
}

/* The rank lies between the keys that are above by more than rounding, and those that are not below by more. Returns
   the rows whose hit or miss at 5 rounding leaves open. */
static int check_row(const problem *p, int64_t n, int h) {
    double magnitude = 0, own = logit(p, n, h, p->source[n], &magnitude);
    int64_t tail = p->n_tail - p->N_q + 1 + n, sees = p->T_c + (tail < 0 ? 0 : tail);
    int64_t above = 0, near = 0, rank = p->rank[n * p->H + h];
    for (int64_t j = 0; j < sees; j++) logit(p, n, h, j, &magnitude);
    tolerance t = tolerances[p->type][dkv_simd_level()];
    double bound = p->whole && !has_scales(p->type) ? 0 : 2 * ldexp(t.lse * sqrt(p->d) * magnitude, -24);
    for (int64_t j = 0; j < sees; j++) {
        double s = logit(p, n, h, j, &magnitude);
        if (j == p->source[n]) continue;
        above += bound > 0 ? s > own + bound : s > own || (s == own && j < p->source[n]);
        near += bound > 0 && fabs(s - own) <= bound;
    }
    if (rank < above || rank > above + near)
        fail_msg("at %s: rank of query %d, head %d is %lld, not %lld..%lld", test_at, (int)n, h, (long long)rank,
                 (long long)above, (long long)(above + near));
    return above < 5 && above + near >= 5;
}

static int check(const problem *p) {
    int open = 0;
    for (int64_t n = 0; n < p->N_q; n++)
        for (int h = 0; h < p->H; h++) {
            if (p->source[n] < 0) CHECK_INT(p->rank[n * p->H + h], -1);
            else open += check_row(p, n, h);
        }
    return open;
}

static void types_and_groups(void) {
    static const int groups[] = {1, 3, 4, 7};
    int open = 0, rows = 0;
    for (int type = 0; type < 5; type++)
        for (int i = 0; i < COUNT(groups); i++)
            for (int strided = 0; strided < 2; strided++) {
                problem p = plain;
                p.H = groups[i] * p.Hkv, p.type = packed_at(type), p.strided = strided, p.layout = i;
                if (strided) p.type = type_at(type);
                AT("type %d, G %d, strided %d", type, groups[i], strided);
                build(&p);
                score(&p);
                open += check(&p);
                rows += (int)p.N_q * p.H;
            }
    AT("-");
    CHECK(open * 100 < rows);
}

/* Whole numbers: logits are exact and often equal, and the position decides. */
static void ties(void) {
    for (int type = 0; type < 3; type++)
        for (int strided = 0; strided < 2; strided++) {
            problem p = plain;
            p.whole = 1, p.type = type_at(type), p.strided = strided, p.d = 4, p.T_c = 700;
            AT("type %d, strided %d", type, strided);
            build(&p);
            score(&p);
            check(&p);
        }
}

/* All keys equal: whatever path a logit takes, only the position can tell them apart. */
static void equal_keys(void) {
    static const int64_t lengths[] = {1, 15, 16, 17, 255, 256, 257, 1000};
    for (int type = 0; type < 5; type++)
        for (int i = 0; i < COUNT(lengths); i++)
            for (int strided = 0; strided < 2; strided++) {
                problem p = plain;
                p.type = strided ? type_at(type) : packed_at(type), p.strided = strided, p.T_c = lengths[i], p.d = 40;
                p.k = normal_values(p.T_c * p.Hkv * p.d, strided ? p.type : source_type(p.type), 1);
                for (int64_t j = p.Hkv * p.d; j < p.T_c * p.Hkv * p.d; j++) p.k[j] = p.k[j - p.Hkv * p.d];
                AT("type %d, T_c %d, strided %d", type, (int)p.T_c, strided);
                build(&p);
                p.a.tail.n = 0;
                score(&p);
                for (int64_t r = 0; r < p.N_q * p.H; r++) CHECK_INT(p.rank[r], p.source[r / p.H]);
            }
}

static void shapes(void) {
    static const problem table[] = {
        {.H = 1, .Hkv = 1, .d = 1, .T_c = 1, .n_tail = 0, .N_q = 1},
        {.H = 9, .Hkv = 3, .d = 64, .T_c = 513, .n_tail = 90, .N_q = 90},  /* more rows than a block */
        {.H = 8, .Hkv = 1, .d = 96, .T_c = 257, .n_tail = 300, .N_q = 40},
        {.H = 2, .Hkv = 2, .d = 576, .T_c = 31, .n_tail = 2, .N_q = 4},    /* a tail shorter than the queries */
    };
    for (int i = 0; i < COUNT(table); i++) {
        problem p = table[i];
        p.strided = i % 2;
        AT("shape %d", i);
        build(&p);
        score(&p);
        check(&p);
    }
}

static void asked_or_not(void) {
    problem p = plain;
    build(&p);
    p.source[0] = p.source[3] = -1;
    score(&p);
    check(&p);
    for (int64_t n = 0; n < p.N_q; n++) p.source[n] = -1;
    score(&p);
    check(&p);
    p.a.N_q = 0;
    score(&p);
}

static void threads(void) {
    problem p = plain;
    p.T_c = 3000, p.type = DKV_F16;
    build(&p);
    score(&p);
    int64_t *once = guarded((size_t)(p.N_q * p.H) * 8, 8);
    memcpy(once, p.rank, (size_t)(p.N_q * p.H) * 8);
    for (int nth = 2; nth <= 17; nth += 5) {
        dkv_parallel par = {run_pthreads, NULL, nth};
        size_t bytes;
        AT("%d threads", nth);
        CHECK_OK(dkv_score_size(&bytes, &p.a, nth));
        void *ws = guarded(bytes, 64);
        CHECK_OK(dkv_score(p.rank, &p.a, p.source, ws, bytes, &par));
        CHECK(!memcmp(once, p.rank, (size_t)(p.N_q * p.H) * 8));
        CHECK_RESULT(dkv_score(p.rank, &p.a, p.source, ws, bytes - 64, &par), DKV_ERR_CAPACITY);
    }
}

/* A NaN makes no hit: every key beats a source that is NaN, and a key that is NaN beats every source. */
static void not_numbers(void) {
    problem p = plain;
    p.strided = 1;
    build(&p);
    for (int64_t n = 0; n < p.N_q; n++) p.source[n] = 7;
    score(&p);
    double magnitude = 0;
    int64_t before = p.rank[0], was_above = logit(&p, 0, 0, 250, &magnitude) > logit(&p, 0, 0, 7, &magnitude);
    oracle_put(&p.a.context.k, 250, 0, 3, (double)NAN);
    score(&p);
    CHECK_INT(p.rank[0], before + !was_above);
    oracle_put(&p.a.context.k, 7, 0, 3, (double)NAN);
    score(&p);
    CHECK_INT(p.rank[0], p.T_c + p.n_tail - p.N_q + 1);
    CHECK_INT(p.rank[1], p.T_c + p.n_tail - p.N_q + 1);
    CHECK(p.rank[5] < p.T_c);
}

static void errors(void) {
    problem p = plain;
    build(&p);
    memset(p.rank, TEST_POISON, (size_t)(p.N_q * p.H) * 8);
#define BAD(change, want) do { \
        dkv_attention a = p.a; \
        change; \
        CHECK_RESULT(dkv_score(p.rank, &a, p.source, p.ws, p.ws_bytes, NULL), want); \
        CHECK(is_poison(p.rank, (size_t)(p.N_q * p.H) * 8)); } while (0)
    BAD(a.H = 5, DKV_ERR_SHAPE);
    BAD(a.d_k = 577, DKV_ERR_SHAPE);
    BAD(a.scale = -1, DKV_ERR_FIELD);
    BAD(a.q.type = DKV_I8, DKV_ERR_TYPE);
    BAD(a.q.data = p.ws, DKV_ERR_OVERLAP);
    BAD(a.q.data = p.rank, DKV_ERR_OVERLAP);
    BAD(a.tail.k.data = p.ws, DKV_ERR_OVERLAP);
    for (int i = 0; i < 2; i++) {
        p.source[2] = i ? p.T_c : -2;
        BAD(a = p.a, DKV_ERR_SHAPE);
    }
    p.source[2] = 0;
    CHECK_RESULT(dkv_score(p.rank, &p.a, p.source, p.ws, p.ws_bytes - 64, NULL), DKV_ERR_CAPACITY);
    CHECK_RESULT(dkv_score(p.rank, &p.a, p.source, (char *)p.ws + 4, p.ws_bytes, NULL), DKV_ERR_ALIGN);
    CHECK_RESULT(dkv_score(p.rank, &p.a, p.rank, p.ws, p.ws_bytes, NULL), DKV_ERR_OVERLAP);
    CHECK(is_poison(p.rank, (size_t)(p.N_q * p.H) * 8));
#undef BAD
}

int main(void) {
    static const test_case cases[] = {
        {"types x groups", types_and_groups, 1},
        {"exact ties", ties, 1},
        {"equal keys", equal_keys, 1},
        {"shapes", shapes, 1},
        {"asked or not", asked_or_not, 1},
        {"threads", threads, 1},
        {"NaN", not_numbers, 1},
        {"errors", errors, 0},
    };
    return run_cases("score", cases, COUNT(cases));
}
