/* [PACK]: survivors in order, from any layout to any type; nothing else is read. */
#define _GNU_SOURCE
#include "test.h"
#include "tolerance.h"

static const int dims[] = {1, 2, 3, 16, 40, 64, 80, 128, 192, 256, 576};

typedef struct problem {
    int Hkv, d_k, d_v;
    int64_t T_c;
    double *k, *v;       /* [T_c][Hkv][d] */
    unsigned char *keep; /* [Hkv][T_c] */
    dkv_plan plan;
    dkv_segment source;  /* NaN wherever evicted */
} problem;

static void put_kept(const problem *p, const dkv_tensor *t, const double *x, int d) {
    for (int64_t i = 0; i < p->T_c; i++)
        for (int g = 0; g < p->Hkv; g++)
            for (int j = 0; j < d && p->keep[g * p->T_c + i]; j++) oracle_put(t, i, g, j, x[(i * p->Hkv + g) * d + j]);
}

static problem make(dkv_type type, int layout, int64_t T_c, int Hkv, int d_k, int d_v) {
    problem p = {Hkv, d_k, d_v, T_c, normal_values(T_c * Hkv * d_k, type, 1), normal_values(T_c * Hkv * d_v, type, 1),
                 guarded((size_t)(Hkv * T_c), 1), {0}, {0}};
    for (int64_t i = 0; i < Hkv * T_c; i++) p.keep[i] = rnd_below(5) < 2 + i / T_c % 3;
    p.plan = plan_of_mask(p.keep, 1, Hkv, T_c);
    p.source = dkv_strided(new_tensor(layout, type, T_c, Hkv, d_k),
                           new_tensor((layout + 1) % LAYOUTS, type, T_c, Hkv, d_v), T_c);
    put_kept(&p, &p.source.k, p.k, d_k);
    put_kept(&p, &p.source.v, p.v, d_v);
    return p;
}

static dkv_packed pack(const problem *p, dkv_type type) {
    return pack_layer(&p->plan, type, p->d_k, p->d_v, &p->source);
}

static double channel_max(const problem *p, const double *x, int g, int d, int j) {
    double max = 0;
    for (int64_t i = 0; i < p->T_c; i++)
        if (p->keep[g * p->T_c + i]) max = fmax(max, fabs(x[(i * p->Hkv + g) * d + j]));
    return max;
}

/* Row r of KV head g in t[rows][Hkv][d] is the r-th kept position of x, rounded to the packed type, then to t's. */
static void check_rows(const problem *p, const dkv_tensor *t, dkv_type packed, const double *x, int g, int d) {
    int64_t row = 0;
    for (int64_t i = 0; i < p->T_c; i++) {
        for (int j = 0; j < d && p->keep[g * p->T_c + i]; j++) {
            double value = x[(i * p->Hkv + g) * d + j], got = oracle_get(t, row, g, j), bound = 0;
            double want = has_scales(packed) ? value : oracle_round(t->type, oracle_round(packed, value));
            if (has_scales(packed))
                bound = tolerance_pack(packed, value, channel_max(p, x, g, d, j)) + tolerance_store(t->type, got);
            if (!(fabs(got - want) <= bound))
                fail_msg("at %s: head %d row %d dim %d: %a, not %a", test_at, g, (int)row, j, got, want);
        }
        row += p->keep[g * p->T_c + i];
    }
}

static void check_unpack(const problem *p, const dkv_packed *packed, dkv_type to, int layout) {
    int64_t rows = 0;
    for (int g = 0; g < p->Hkv; g++) rows = p->plan.rows[g] > rows ? p->plan.rows[g] : rows;
    dkv_tensor k = new_tensor(layout, to, rows, p->Hkv, p->d_k), v = new_tensor(layout, to, rows, p->Hkv, p->d_v);
    for (int g = 0; g < p->Hkv; g++) {
        CHECK_OK(dkv_unpack(k, v, packed, g));
        check_rows(p, &k, packed->type, p->k, g, p->d_k);
        check_rows(p, &v, packed->type, p->v, g, p->d_v);
    }
}

static void types_and_layouts(void) {
    for (int c = 0; c < 15 * LAYOUTS * 2; c++) {
        dkv_type from = type_at(c), to = packed_at(c / 3);
        int layout = c / 15 % LAYOUTS;
        problem p = make(from, layout, 1 + rnd_below(100), 1 + c % 3, 1 + (int)rnd_below(70), 1 + (int)rnd_below(70));
        AT("%s to %s, layout %d, d %d %d, T_c %d", dkv_type_name(from), dkv_type_name(to), layout, p.d_k, p.d_v,
           (int)p.T_c);
        dkv_packed packed = pack(&p, to);
        CHECK(packed.type == to && packed.Hkv == p.Hkv && packed.d_k == p.d_k && packed.d_v == p.d_v);
        CHECK(packed.rows == p.plan.rows);
        check_unpack(&p, &packed, source_type(to), layout);
        check_unpack(&p, &packed, from, THD);
        CHECK(test_release());
    }
}

static void dimensions(void) {
    for (int c = 0; c < COUNT(dims) * COUNT(dims); c++) {
        problem p = make(type_at(c), c % LAYOUTS, 15 + c % 4, 2, dims[c % COUNT(dims)], dims[c / COUNT(dims)]);
        AT("d %d and %d from %s", p.d_k, p.d_v, dkv_type_name(type_at(c)));
        dkv_packed packed = pack(&p, packed_at(c / 2));
        check_unpack(&p, &packed, DKV_F32, HEAD_MAJOR);
        CHECK(test_release());
    }
}

/* Where the header says that element (row, j) of K or V lies, in elements from the head's start. */
static int64_t k_place(dkv_type type, int64_t row, int64_t j, int64_t d) {
    int64_t line = 4 / oracle_bytes(type), pack = has_scales(type) ? 4 : type == DKV_BF16 ? 2 : 1;
    int64_t block = row / 16 * 16 * ((d + line - 1) / line * line); /* of whole cache lines */
    return block + (j / pack * 16 + row % 16) * pack + j % pack;
}

static int64_t v_place(dkv_type type, int64_t row, int64_t j, int64_t d) {
    int64_t width = (d + 15) / 16 * 16;
    return type == DKV_BF16 ? (row / 2 * width + j) * 2 + row % 2 : row * width + j;
}

static void check_element(const char *at, dkv_type type, const float *scale, double x) {
    double unit = has_scales(type) ? (double)*scale : 1;
    CHECK(fabs(oracle_load(at, type) * unit - x) <= tolerance_pack(type, x, unit * (type == DKV_I8 ? 127 : 448)));
}

static void documented_layout(void) {
    for (int c = 0; c < 30; c++) {
        dkv_type type = packed_at(c);
        problem p = make(source_type(type), THD, 70, 3, 1 + c % 7, 10 + c);
        dkv_packed packed = pack(&p, type);
        const char *k = packed.data, *v;
        const float *k_scale, *v_scale;
        int64_t e = oracle_bytes(type), blocks = 0;
        for (int g = 0; g < 3; g++) blocks += (p.plan.rows[g] + 15) / 16;
        v = k + k_place(type, 16 * blocks, 0, p.d_k) * e;
        k_scale = (const float *)(const void *)(v + v_place(type, 16 * blocks, 0, p.d_v) * e);
        v_scale = k_scale + 3 * ((p.d_k + 15) / 16 * 16);
        for (int g = 0; g < 3; g++) {
            for (int64_t i = 0, row = 0; i < 70; row += p.keep[g * 70 + i++]) {
                AT("%s head %d row %d", dkv_type_name(type), g, (int)row);
                const double *want_k = p.k + (i * 3 + g) * p.d_k, *want_v = p.v + (i * 3 + g) * p.d_v;
                for (int j = 0; j < p.d_k && p.keep[g * 70 + i]; j++)
                    check_element(k + k_place(type, row, j, p.d_k) * e, type, k_scale + j, want_k[j]);
                for (int j = 0; j < p.d_v && p.keep[g * 70 + i]; j++)
                    check_element(v + v_place(type, row, j, p.d_v) * e, type, v_scale + j, want_v[j]);
            }
            k += k_place(type, (p.plan.rows[g] + 15) / 16 * 16, 0, p.d_k) * e;
            v += v_place(type, (p.plan.rows[g] + 15) / 16 * 16, 0, p.d_v) * e;
            k_scale += (p.d_k + 15) / 16 * 16;
            v_scale += (p.d_v + 15) / 16 * 16;
        }
        CHECK(test_release());
    }
}

/* One layout for every level: the same bytes. */
static void same_bytes_at_every_level(void) {
    for (int c = 0; c < 45; c++) {
        problem p = make(type_at(c), c % LAYOUTS, 60, 2, dims[c % COUNT(dims)], dims[(c + 4) % COUNT(dims)]);
        size_t bytes;
        AT("case %d", c);
        dkv_simd_limit(DKV_SIMD_SCALAR);
        CHECK_OK(dkv_pack(&(dkv_packed){0}, NULL, &bytes, type_at(c / 3), &p.plan, 0, p.d_k, p.d_v, &p.source));
        dkv_packed scalar = pack(&p, type_at(c / 3));
        for (int level = 1; level <= (int)dkv_simd_supported(); level++) {
            dkv_simd_limit((dkv_simd)level);
            dkv_packed other = pack(&p, type_at(c / 3));
            CHECK(!memcmp(scalar.data, other.data, bytes));
        }
        CHECK(test_release());
    }
}

/* Packing what was packed: the survivors of the survivors. */
static void from_packed(void) {
    for (int c = 0; c < 45; c++) {
        problem p = make(type_at(c), THD, 1 + rnd_below(90), 2, dims[c % COUNT(dims)], dims[(c + 3) % COUNT(dims)]);
        dkv_type first = type_at(c / 3), second = packed_at(c / 9);
        AT("case %d, %s then %s", c, dkv_type_name(first), dkv_type_name(second));
        dkv_plan all = plan_of_mask(NULL, 1, 2, p.T_c);
        dkv_packed dense = pack_layer(&all, first, p.d_k, p.d_v, &p.source); /* its evicted rows are NaN, too */
        p.source = (dkv_segment){.packed = &dense};
        dkv_packed packed = pack(&p, second);
        for (int64_t i = 0; i < p.T_c * 2 * p.d_k; i++) p.k[i] = oracle_round(first, p.k[i]);
        for (int64_t i = 0; i < p.T_c * 2 * p.d_v; i++) p.v[i] = oracle_round(first, p.v[i]);
        check_unpack(&p, &packed, DKV_F32, THD);
        CHECK(test_release());
    }
}

static void front(void) {
    for (int c = 0; c < 6 * LAYOUTS; c++) {
        dkv_type type = type_at(c);
        int d_k = dims[c % COUNT(dims)], d_v = dims[(c + 5) % COUNT(dims)];
        problem p = make(type, c % LAYOUTS, 1 + rnd_below(100), 1 + c % 3, d_k, d_v);
        AT("case %d, layout %d", c, c % LAYOUTS);
        CHECK_OK(dkv_pack_front(p.source.k, p.source.v, &p.plan, 0, p.d_k, p.d_v));
        for (int g = 0; g < p.Hkv; g++) {
            check_rows(&p, &p.source.k, type, p.k, g, p.d_k);
            check_rows(&p, &p.source.v, type, p.v, g, p.d_v);
        }
        CHECK(test_release());
    }
}

/* The values that have no neighbour: infinities, overflow, subnormals, NaN, negative zero. */
static void special_values(void) {
    const float x[] = {INFINITY, -INFINITY, 65519, 65520, -1e30f, 3e38f, 1e-7f, 2e-8f, 1e-40f, -0.0f, NAN, 1};
    enum { N = COUNT(x) };
    for (int c = 0; c < 5; c++) {
        dkv_type type = packed_at(c);
        problem p = {.Hkv = 1, .d_k = N, .d_v = N, .T_c = 1};
        p.plan = plan_of_mask(&(unsigned char){1}, 1, 1, 1);
        p.source = dkv_strided(dkv_thd(x, DKV_F32, 1, N), dkv_thd(x, DKV_F32, 1, N), 1);
        dkv_packed packed = pack(&p, type);
        float k[N], v[N];
        CHECK_OK(dkv_unpack(dkv_thd(k, DKV_F32, 1, N), dkv_thd(v, DKV_F32, 1, N), &packed, 0));
        for (int i = 0; i < N; i++) {
            double want = oracle_round(source_type(type), (double)x[i]);
            double bound = has_scales(type) ? 1e-40 + 1e-6 * fabs(want) : 0; /* each is its channel's largest */
            if (has_scales(type) && isinf(want)) want = (double)NAN;
            AT("%s of %g", dkv_type_name(type), (double)x[i]);
            if (isnan(want)) CHECK(isnan(k[i]) && isnan(v[i]));
            else if (isinf(want)) CHECK((double)k[i] == want && (double)v[i] == want);
            else CHECK(fabs((double)k[i] - want) <= bound && fabs((double)v[i] - want) <= bound);
            CHECK(isnan(want) || has_scales(type) || !signbit(k[i]) == !signbit(x[i]));
        }
    }
}

/* A channel so small that its scale is subnormal or no f32 at all: small errors, and no NaN from 0 / 0. */
static void tiny_channels(void) {
    for (float tiny = 1e-36f; tiny > 0; tiny /= 3)
        for (dkv_type type = DKV_I8; type <= DKV_FP8; type = (dkv_type)(type + 1)) {
            float x[] = {tiny, 0, -tiny / 2}, k[3], v[3];
            problem p = {.Hkv = 1, .d_k = 1, .d_v = 1, .T_c = 3, .plan = plan_of_mask(NULL, 1, 1, 3)};
            p.source = dkv_strided(dkv_thd(x, DKV_F32, 1, 1), dkv_thd(x, DKV_F32, 1, 1), 3);
            dkv_packed packed = pack(&p, type);
            CHECK_OK(dkv_unpack(dkv_thd(k, DKV_F32, 1, 1), dkv_thd(v, DKV_F32, 1, 1), &packed, 0));
            AT("%s of %g", dkv_type_name(type), (double)tiny);
            for (int i = 0; i < 3; i++) CHECK(fabsf(k[i] - x[i]) <= tiny && fabsf(v[i] - x[i]) <= tiny);
        }
}

static void errors(void) {
    problem p = make(DKV_F32, THD, 40, 2, 24, 8);
    size_t need, n;
    dkv_packed out, before;
    memset(&before, 0x5A, sizeof before);
    memcpy(&out, &before, sizeof out);
    CHECK_OK(dkv_pack(&out, NULL, &need, DKV_F16, &p.plan, 0, 24, 8, &p.source));
    char *mem = guarded(need + 64, 64);
#define BAD(want, at, size, type, d_k, d_v, source) \
    n = (size); CHECK_RESULT(dkv_pack(&out, at, &n, type, &p.plan, 0, d_k, d_v, source), want); \
    CHECK(!memcmp(&out, &before, sizeof out) && is_poison(mem, need + 64))
    dkv_segment s = p.source, shorter = s;
    shorter.n = 39;
    int64_t rows[2] = {40, 39};
    dkv_segment uneven = s;
    uneven.rows = rows;
    BAD(DKV_ERR_CAPACITY, mem, need - 1, DKV_F16, 24, 8, &s);
    BAD(DKV_ERR_CAPACITY, mem, 0, DKV_F16, 24, 8, &s);
    BAD(DKV_ERR_ALIGN, mem + 32, need, DKV_F16, 24, 8, &s);
    BAD(DKV_ERR_ALIGN, mem + 1, need, DKV_F16, 24, 8, &s);
    BAD(DKV_ERR_SHAPE, mem, need, DKV_F16, 0, 8, &s);
    BAD(DKV_ERR_SHAPE, mem, need, DKV_F16, 577, 8, &s);
    BAD(DKV_ERR_SHAPE, mem, need, DKV_F16, 24, 0, &s);
    BAD(DKV_ERR_SHAPE, mem, need, DKV_F16, 24, 577, &s);
    BAD(DKV_ERR_SHAPE, mem, need, DKV_F16, 24, 8, &shorter);
    BAD(DKV_ERR_SHAPE, mem, need, DKV_F16, 24, 8, &uneven);
    BAD(DKV_ERR_TYPE, mem, need, (dkv_type)5, 24, 8, &s);
    s.k.type = DKV_I8; /* of packed data only */
    BAD(DKV_ERR_TYPE, mem, need, DKV_F16, 24, 8, &s);
    s = p.source;
    s.v.data = mem + need - 4; /* its first byte inside mem */
    BAD(DKV_ERR_OVERLAP, mem, need, DKV_F16, 24, 8, &s);
    s.v = p.source.v;
    s.k.data = mem + 3 - 40 * 2 * 24 * 4; /* its last byte at mem + 2 */
    BAD(DKV_ERR_OVERLAP, mem, need, DKV_F16, 24, 8, &s);
#undef BAD
}

/* Strides past 2^31 and 2^32 bytes, over memory that is mostly never touched. */
static void far_strides(void) {
    const int64_t far = ((int64_t)3 << 30) + 12;
    char *map = reserve(far * 6);
    for (int c = 0; c < 3; c++) {
        problem p = make(DKV_F32, THD, 3, 2, 3, 2);
        dkv_tensor k = {map, DKV_F32, far, 64, 4}, v = {map + 4096, DKV_F32, 64, far, far * 2};
        if (c == 1) k = (dkv_tensor){map + far * 5, DKV_F16, -far, -3 * far, 2};
        if (c == 2) k = (dkv_tensor){map, DKV_BF16, 64, 32, far};
        memset(p.keep, 1, 6);
        p.plan = plan_of_mask(p.keep, 1, 2, 3);
        fill_tensor(&k, p.k, 3, 2, 3);
        fill_tensor(&v, p.v, 3, 2, 2);
        for (int i = 0; i < 18; i++) p.k[i] = oracle_round(k.type, p.k[i]);
        p.source = dkv_strided(k, v, 3);
        dkv_packed packed = pack(&p, DKV_F32);
        check_unpack(&p, &packed, DKV_F32, THD);
    }
    munmap(map, (size_t)(far * 6));
}

int main(void) {
    static const test_case cases[] = {
        {"types and layouts", types_and_layouts, 1},
        {"dimensions", dimensions, 1},
        {"documented layout", documented_layout, 1},
        {"same bytes at every level", same_bytes_at_every_level, 0},
        {"from packed", from_packed, 1},
        {"front-packed in place", front, 1},
        {"special values", special_values, 1},
        {"tiny channels", tiny_channels, 1},
        {"errors", errors, 0},
        {"strides past 2^32", far_strides, 1},
    };
    return run_cases("pack", cases, COUNT(cases));
}
