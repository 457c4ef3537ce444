/* [CACHE]: the life of a cache, layer by layer, against the oracle and against itself bit for bit. */
#define _GNU_SOURCE
#include "test.h"
#include "tolerance.h"

enum { L = 3, H = 6, HKV = 2, D_K = 24, D_V = 20, LONGEST = 200, N_Q = 3 };

/* Keys and values of a whole conversation: position i of layer l at [i][Hkv][d]. A cache holds its first tokens. */
typedef struct world {
    dkv_type type;
    int64_t T_c;
    double *k[L], *v[L], *q;
    oracle_pattern o;
    dkv_pattern pattern;
    dkv_plan plan;
    unsigned char *keep; /* [L][Hkv][T_c] */
    test_heap heap;
    dkv_allocator alloc;
} world;

static const dkv_shape shape = {L, H, HKV, D_K, D_V};

static void keep_by_oracle(world *w) {
    w->keep = guarded((size_t)(L * HKV * w->T_c), 1);
    for (int64_t i = 0; i < L * HKV * w->T_c; i++) {
        int f = (int)(i / w->T_c);
        w->keep[i] = (unsigned char)oracle_keep(&w->o, w->T_c, DKV_BEYOND_DROP, f / HKV, f % HKV, i % w->T_c);
    }
}

static void make_world(world *w, dkv_type type, int64_t T_c) {
    *w = (world){.type = type, .T_c = T_c, .o = random_pattern(L, H, HKV, 9, 7, 4, 11, 0.3), .heap = {.fail_at = -1},
                 .q = normal_values(N_Q * H * D_K, DKV_F32, 1), .alloc = {test_heap_alloc, test_heap_free, NULL}};
    w->alloc.user = &w->heap;
    w->pattern = pattern_of(&w->o);
    w->plan = plan_of(&w->pattern, T_c, DKV_BEYOND_DROP);
    for (int l = 0; l < L; l++) {
        w->k[l] = normal_values(LONGEST * HKV * D_K, dkv_tail_type(type), 1);
        w->v[l] = normal_values(LONGEST * HKV * D_V, dkv_tail_type(type), 1);
    }
    keep_by_oracle(w);
}

static void end_world(const world *w) {
    CHECK_INT(w->heap.live, 0);
    CHECK(!w->heap.wrong_size);
    CHECK(test_release());
}

/* Tokens [from, from + n) of layer l. */
static dkv_segment tokens(const world *w, int l, int64_t from, int64_t n, int layout) {
    dkv_tensor k = new_tensor(layout, source_type(w->type), n, HKV, D_K);
    dkv_tensor v = new_tensor(layout, source_type(w->type), n, HKV, D_V);
    fill_tensor(&k, w->k[l] + from * HKV * D_K, n, HKV, D_K);
    fill_tensor(&v, w->v[l] + from * HKV * D_V, n, HKV, D_V);
    return dkv_strided(k, v, n);
}

static dkv_result append_layer(const world *w, dkv_cache *c, int l, int64_t n) {
    dkv_segment s = tokens(w, l, w->T_c + dkv_cache_tail(c, l), n, (int)rnd_below(LAYOUTS));
    return dkv_cache_append(c, l, s.k, s.v, n);
}

static void append(const world *w, dkv_cache *c, int64_t n) {
    for (int l = 0; l < L; l++) CHECK_OK(append_layer(w, c, l, n));
}

/* With scales, the world is what the cache made of it; rounding is checked where packing is. */
static void learn(world *w, const dkv_cache *c) {
    for (int l = 0; l < L && has_scales(w->type); l++)
        learn_values(dkv_cache_context(c, l).packed, dkv_cache_plan(c), l, w->k[l], w->v[l]);
}

static dkv_cache *make_cache(world *w, int64_t capacity) {
    dkv_cache *c;
    CHECK_OK(dkv_cache_create(&c, &w->plan, &shape, w->type, capacity, &w->alloc));
    for (int i = 0; i < L && w->T_c; i++) { /* no context: nothing to pack */
        dkv_segment s = tokens(w, (i + 2) % L, 0, w->T_c, i % LAYOUTS);
        CHECK_OK(dkv_cache_pack(c, (i + 2) % L, &s));
    }
    learn(w, c);
    return c;
}

/* out [L][N_q][H][d_v], then lse [L][N_q][H]: what w->q reads from every layer. */
enum { N_OUT = L * N_Q * H * D_V, N_LSE = L * N_Q * H };

static void attend(const world *w, const dkv_cache *c, float *out) {
    float q[N_Q * H * D_K];
    for (int i = 0; i < COUNT(q); i++) q[i] = (float)w->q[i];
    for (int l = 0; l < L; l++) {
        dkv_attention a = dkv_cache_attention(c, l, dkv_thd(q, DKV_F32, H, D_K), N_Q,
                                              dkv_thd(out + l * N_Q * H * D_V, DKV_F32, H, D_V));
        a.lse = out + N_OUT + l * N_Q * H;
        size_t bytes;
        dkv_result r = dkv_attend_size(&bytes, &a, 1, 1);
        void *ws = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
        if (!r) r = dkv_attend(&a, 1, ws, bytes, NULL);
        if (r) memset(out, TEST_POISON, sizeof *out); /* no cmocka here: threads call this, too */
        free(ws);
    }
}

static void check_cache(const world *w, const dkv_cache *c, int64_t n_tail) {
    float got[N_OUT + N_LSE];
    double want[N_OUT / L], lse[N_LSE / L];
    attend(w, c, got);
    for (int l = 0; l < L; l++) {
        CHECK_INT(dkv_cache_tail(c, l), n_tail);
        oracle_attention o = {H, HKV, D_K, D_V, N_Q, w->T_c, n_tail, w->q, w->k[l], w->v[l],
                              w->k[l] + w->T_c * HKV * D_K, w->v[l] + w->T_c * HKV * D_V,
                              w->keep + l * HKV * w->T_c, 1 / sqrt(D_K), 0, NULL};
        double magnitude = oracle_attend(&o, want, lse), v_max = 6;
        tolerance tol = tolerances[w->type][dkv_simd_level()];
        for (int i = 0; i < N_OUT / L; i++) {
            double x = (double)got[l * N_OUT / L + i];
            if (!(fabs(x - want[i]) <= tolerance_out(tol, D_K, magnitude, v_max)))
                fail_msg("at %s: layer %d out %d is %g, not %g", test_at, l, i, x, want[i]);
        }
        for (int i = 0; i < N_LSE / L; i++) {
            double x = (double)got[N_OUT + l * N_LSE / L + i];
            CHECK(x == lse[i] || fabs(x - lse[i]) <= tolerance_lse(tol, D_K, magnitude, lse[i]));
        }
    }
}

static void check_same(const world *w, const dkv_cache *a, const dkv_cache *b) {
    float x[N_OUT + N_LSE], y[N_OUT + N_LSE];
    attend(w, a, x);
    attend(w, b, y);
    CHECK(!memcmp(x, y, sizeof x));
    for (int l = 0; l < L; l++) CHECK_INT(dkv_cache_tail(a, l), dkv_cache_tail(b, l));
}

/* NaN in every row of the tail that is not in use: grown into, and cut off again. */
static void poison_slack(const world *w, dkv_cache *c) {
    int64_t used = dkv_cache_tail(c, 0), n = dkv_cache_capacity(c) - used;
    dkv_tensor k = new_tensor(THD, source_type(w->type), n, HKV, D_K); /* all NaN */
    dkv_tensor v = new_tensor(THD, source_type(w->type), n, HKV, D_V);
    for (int l = 0; l < L; l++) CHECK_OK(dkv_cache_append(c, l, k, v, n));
    CHECK_OK(dkv_cache_truncate(c, used));
}

static void life_cycle(void) {
    static const int T_c[] = {0, 1, 15, 16, 61, 100};
    for (int c = 0; c < COUNT(T_c) * 5; c++) {
        world w;
        make_world(&w, packed_at(c), T_c[c / 5]);
        AT("%s T_c %d", dkv_type_name(w.type), (int)w.T_c);
        dkv_cache *cache = make_cache(&w, 40);
        const dkv_shape *s = dkv_cache_shape(cache);
        CHECK(s->L == L && s->H == H && s->Hkv == HKV && s->d_k == D_K && s->d_v == D_V);
        CHECK(dkv_cache_type(cache) == w.type && dkv_cache_capacity(cache) == 40);
        const dkv_plan *plan = dkv_cache_plan(cache);
        CHECK(plan->T_c == w.T_c && plan->runs != w.plan.runs && plan->pattern_crc == w.plan.pattern_crc);
        dkv_segment again = tokens(&w, 1, 0, w.T_c, THD);
        CHECK_RESULT(dkv_cache_pack(cache, 1, &again), DKV_ERR_STATE);
        check_cache(&w, cache, 0);
        int64_t n = 0;
        for (int step = 1; step < 8; step += 3) {
            poison_slack(&w, cache);
            append(&w, cache, step);
            check_cache(&w, cache, n += step);
        }
        CHECK_OK(dkv_cache_truncate(cache, 100));
        check_cache(&w, cache, 12);
        for (int64_t to = 8; to >= 0; to -= 4) {
            CHECK_OK(dkv_cache_truncate(cache, to));
            poison_slack(&w, cache);
            check_cache(&w, cache, to);
        }
        append(&w, cache, 40);
        check_cache(&w, cache, 40);
        CHECK_RESULT(append_layer(&w, cache, 1, 1), DKV_ERR_CAPACITY);
        check_cache(&w, cache, 40);
        dkv_cache_destroy(cache);
        dkv_cache_destroy(NULL);
        end_world(&w);
    }
}

static void refusals(void) {
    world w;
    make_world(&w, DKV_F16, 61);
    dkv_cache *c = NULL, *other = NULL;
    dkv_shape bad = shape;
#define BAD(change, type, want) \
    bad = shape; change; AT("%s", #change); \
    CHECK_RESULT(dkv_cache_create(&c, &w.plan, &bad, type, 9, &w.alloc), want); CHECK(!c && !w.heap.live)
    BAD(bad.L = L + 1, DKV_F16, DKV_ERR_SHAPE);  BAD(bad.Hkv = 1, DKV_F16, DKV_ERR_SHAPE);
    BAD(bad.H = 5, DKV_F16, DKV_ERR_SHAPE);      BAD(bad.d_k = 0, DKV_F16, DKV_ERR_SHAPE);
    BAD(bad.d_v = 577, DKV_F16, DKV_ERR_SHAPE);  BAD((void)bad, (dkv_type)5, DKV_ERR_TYPE);
#undef BAD
    dkv_plan wide = plan_of_mask(NULL, 256, 256, 0); /* 2^16 heads * 2^36 rows * 2^12 bytes must not wrap around */
    bad = (dkv_shape){256, 256, 256, 512, 512};
    CHECK_RESULT(dkv_cache_create(&c, &wide, &bad, DKV_F32, (int64_t)1 << 36, &w.alloc), DKV_ERR_MEMORY);
    bad = shape;
    bad.H = 0; /* unused is allowed */
    CHECK_OK(dkv_cache_create(&c, &w.plan, &bad, DKV_F16, 9, &w.alloc));
    dkv_cache_destroy(c);
    CHECK_OK(dkv_cache_create(&c, &w.plan, &shape, DKV_F16, 9, &w.alloc));
    dkv_segment s = tokens(&w, 0, 0, 60, THD), full = tokens(&w, 0, 0, 61, THD);
    CHECK_RESULT(dkv_cache_pack(c, 0, &s), DKV_ERR_SHAPE);
    CHECK_OK(dkv_cache_pack(c, 0, &full));
    size_t bytes = 0;
    CHECK_RESULT(dkv_cache_fork(&other, c, 9), DKV_ERR_STATE); /* layers 1 and 2 are not packed */
    CHECK_RESULT(dkv_cache_save(NULL, &bytes, c), DKV_ERR_STATE);
    CHECK_RESULT(dkv_cache_recompress(&other, c, &w.pattern, DKV_BEYOND_DROP, 9), DKV_ERR_STATE);
    for (int l = 1; l < L; l++) {
        full = tokens(&w, l, 0, 61, THD);
        CHECK_OK(dkv_cache_pack(c, l, &full));
    }
    CHECK_OK(append_layer(&w, c, 1, 3));
    CHECK_RESULT(dkv_cache_recompress(&other, c, &w.pattern, DKV_BEYOND_DROP, 9), DKV_ERR_STATE); /* tails differ */
    CHECK_RESULT(dkv_cache_fork(&other, c, 2), DKV_ERR_CAPACITY);
    CHECK(!other);
    dkv_cache_destroy(c);
    end_world(&w);
}

static void forks(void) {
    for (int round = 0; round < 25; round++) {
        world w, other;
        make_world(&other, packed_at(round), 61);
        make_world(&w, other.type, 61);
        other.plan = w.plan, other.keep = w.keep;
        dkv_cache *c[4] = {make_cache(&w, 20)};
        for (int l = 0; l < L; l++) { /* the same context, another conversation after token 64 */
            memcpy(other.k[l], w.k[l], 64 * HKV * D_K * sizeof(double));
            memcpy(other.v[l], w.v[l], 64 * HKV * D_V * sizeof(double));
        }
        AT("round %d", round);
        append(&w, c[0], 3);
        for (int i = 1; i < 4; i++) CHECK_OK(dkv_cache_fork(&c[i], c[i - 1], 10 * i));
        CHECK_INT(dkv_cache_capacity(c[3]), 30);
        check_same(&w, c[0], c[3]);
        for (int l = 0; l < L; l++) CHECK(dkv_cache_context(c[0], l).packed == dkv_cache_context(c[3], l).packed);
        append(&w, c[0], 5);
        append(&other, c[1], 6);
        CHECK_OK(dkv_cache_truncate(c[2], 1));
        check_cache(&w, c[0], 8);
        check_cache(&other, c[1], 9);
        check_cache(&w, c[2], 1);
        check_cache(&w, c[3], 3);
        for (int left = 4; left; left--) { /* in any order */
            int i = (int)rnd_below(left);
            dkv_cache_destroy(c[i]);
            c[i] = c[left - 1];
            if (left == 2) check_cache(dkv_cache_tail(c[0], 0) == 9 ? &other : &w, c[0], dkv_cache_tail(c[0], 0));
        }
        CHECK_INT(other.heap.live, 0);
        end_world(&w);
    }
}

/* Rounded anew, and no farther than the types may: scales come from values that are already rounded. */
static void learn_again(world *w, const dkv_cache *c) {
    for (int l = 0; l < L && has_scales(w->type); l++) {
        double *k = w->k[l], *v = w->v[l];
        w->k[l] = memcpy(guarded(LONGEST * HKV * D_K * 8, 8), k, LONGEST * HKV * D_K * 8);
        w->v[l] = memcpy(guarded(LONGEST * HKV * D_V * 8, 8), v, LONGEST * HKV * D_V * 8);
        learn_values(dkv_cache_context(c, l).packed, dkv_cache_plan(c), l, w->k[l], w->v[l]);
        for (int i = 0; i < LONGEST * HKV * D_K; i++)
            CHECK(fabs(w->k[l][i] - k[i]) <= tolerance_pack(w->type, k[i], 6));
        for (int i = 0; i < LONGEST * HKV * D_V; i++)
            CHECK(fabs(w->v[l][i] - v[i]) <= tolerance_pack(w->type, v[i], 6));
    }
}

/* Three turns: what was evicted stays away, the suffix enters as kept, and then the pattern decides. */
static void recompress(void) {
    for (int c = 0; c < 15; c++) {
        world w;
        make_world(&w, packed_at(c), 50);
        dkv_cache *cache = make_cache(&w, 30), *next;
        for (int turn = 0; turn < 3; turn++) {
            int64_t n = 3 + 10 * (c / 5) + turn, T_1 = w.T_c;
            AT("case %d turn %d", c, turn);
            append(&w, cache, n);
            check_cache(&w, cache, n);
            CHECK_OK(dkv_cache_recompress(&next, cache, &w.pattern, DKV_BEYOND_DROP, 30));
            check_cache(&w, cache, n);
            dkv_cache_destroy(cache);
            cache = next;
            const unsigned char *before = w.keep;
            w.T_c += n;
            keep_by_oracle(&w);
            for (int64_t i = 0; i < L * HKV * T_1; i++) w.keep[i / T_1 * w.T_c + i % T_1] &= before[i];
            CHECK_INT(dkv_cache_plan(cache)->T_c, w.T_c);
            learn_again(&w, cache);
            check_cache(&w, cache, 0);
        }
        dkv_cache_destroy(cache);
        end_world(&w);
    }
}

static unsigned char *save(const dkv_cache *c, size_t *bytes) {
    CHECK_OK(dkv_cache_save(NULL, bytes, c));
    size_t full = *bytes, less = full - 1;
    unsigned char *image = guarded(full, 1);
    CHECK_RESULT(dkv_cache_save(image, &less, c), DKV_ERR_CAPACITY);
    CHECK(is_poison(image, full));
    CHECK_OK(dkv_cache_save(image, bytes, c));
    CHECK_INT(*bytes, full);
    return image;
}

static void save_and_restore(void) {
    for (int c = 0; c < 20; c++) {
        world w;
        make_world(&w, packed_at(c), c / 5 % 2 ? 61 : 0);
        AT("case %d", c);
        dkv_cache *cache = make_cache(&w, 30), *restored = NULL;
        append(&w, cache, c);
        size_t bytes, again;
        unsigned char *image = save(cache, &bytes);
        if (c) CHECK_RESULT(dkv_cache_restore(&restored, image, bytes, c - 1, &w.alloc), DKV_ERR_CAPACITY);
        CHECK(!restored);
        CHECK_OK(dkv_cache_restore(&restored, image, bytes, c + 5, &w.alloc));
        CHECK_INT(dkv_cache_plan(restored)->pattern_crc, w.plan.pattern_crc);
        check_same(&w, cache, restored);
        CHECK(!memcmp(save(restored, &again), image, bytes) && again == bytes);
        append(&w, restored, 5);
        append(&w, cache, 5);
        check_same(&w, cache, restored);
        dkv_cache_destroy(cache);
        check_cache(&w, restored, c + 5);
        dkv_cache_destroy(restored);
        end_world(&w);
    }
}

/* One layer, one head, 3 of 4 positions in 2 runs, one tail row: an image small enough to break everywhere. */
static unsigned char *small_image(size_t *bytes) {
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    dkv_plan plan = plan_of_mask((const unsigned char[]){1, 0, 1, 1}, 1, 1, 4);
    dkv_segment s = dkv_strided(dkv_thd(x, DKV_F32, 1, 2), dkv_thd(x, DKV_F32, 1, 1), 4);
    dkv_cache *c;
    CHECK_OK(dkv_cache_create(&c, &plan, &(dkv_shape){1, 1, 1, 2, 1}, DKV_F32, 2, NULL));
    CHECK_OK(dkv_cache_pack(c, 0, &s));
    CHECK_OK(dkv_cache_append(c, 0, s.k, s.v, 1));
    unsigned char *image = save(c, bytes);
    dkv_cache_destroy(c);
    return image;
}

static void broken_images(void) {
    test_heap heap = {.fail_at = -1};
    dkv_allocator alloc = {test_heap_alloc, test_heap_free, &heap};
    dkv_cache *restored = NULL;
    size_t bytes;
    unsigned char *image = small_image(&bytes), *copy = guarded(bytes + 1, 1);
    for (size_t n = 0; n <= bytes + 1; n++) {
        AT("%zu of %zu bytes", n, bytes);
        unsigned char *end = memcpy(copy + bytes + 1 - n, image, n < bytes ? n : bytes);
        dkv_result r = dkv_cache_restore(&restored, end, n, 2, &alloc);
        CHECK(n == bytes ? !r : r == DKV_ERR_LENGTH && !restored);
        dkv_cache_destroy(restored);
        restored = NULL;
    }
    for (size_t bit = 0; bit < bytes * 8; bit++) {
        AT("bit %zu", bit);
        image[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK_RESULT(dkv_cache_restore(&restored, image, bytes, 2, &alloc),
                     bit < 64 ? DKV_ERR_MAGIC : bit < 128 ? DKV_ERR_VERSION : bit < 192 ? DKV_ERR_LENGTH : DKV_ERR_CRC);
        image[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    CHECK(!restored && !heap.live && !heap.wrong_size);
}

/* Each field at a value that cannot be, under a CRC that is right. */
static void broken_fields(void) {
    static const struct { const char *what; int at; int64_t value; dkv_result want; } table[] = {
        {"L 0", 24, 0, DKV_ERR_FIELD}, {"L 2", 24, 2, DKV_ERR_FIELD}, {"L -1", 24, -1, DKV_ERR_FIELD},
        {"H -1", 28, -1, DKV_ERR_FIELD}, {"Hkv 0", 32, 0, DKV_ERR_FIELD}, {"Hkv 2", 32, 2, DKV_ERR_SHAPE},
        {"d_k 0", 36, 0, DKV_ERR_SHAPE}, {"d_k 3", 36, 3, DKV_ERR_LENGTH}, {"d_v 577", 40, 577, DKV_ERR_SHAPE},
        {"type 5", 44, 5, DKV_ERR_TYPE}, {"T_c 3", 48, 3, DKV_ERR_FIELD}, {"T_c -1", 48, -1, DKV_ERR_FIELD},
        {"runs 1", 56, 1, DKV_ERR_FIELD}, {"runs 3", 56, 3, DKV_ERR_LENGTH}, {"runs 2^31", 56, -1, DKV_ERR_LENGTH},
        {"runs 2^60", 60, 1 << 28, DKV_ERR_LENGTH},
        {"zero", 68, 1, DKV_ERR_FIELD}, {"zero", 124, 1, DKV_ERR_FIELD}, {"run count 1", 128, 1, DKV_ERR_FIELD},
        {"run count 3", 128, 3, DKV_ERR_FIELD}, {"position 3", 136, 3, DKV_ERR_FIELD},
        {"touching", 152, 1, DKV_ERR_FIELD}, {"length 0", 144, 0, DKV_ERR_FIELD}, {"length 3", 160, 3, DKV_ERR_FIELD},
        {"length 1", 160, 1, DKV_ERR_LENGTH}, {"tail 2", 168, 2, DKV_ERR_LENGTH},
        {"tail 2^31", 168, -1, DKV_ERR_LENGTH}, {"tail 0", 168, 0, DKV_ERR_LENGTH},
    };
    size_t bytes;
    unsigned char *image = small_image(&bytes), *copy = guarded(bytes, 1);
    for (int i = 0; i < COUNT(table); i++) {
        dkv_cache *restored = NULL;
        memcpy(copy, image, bytes);
        for (int k = 0; k < 4; k++) copy[table[i].at + k] = (unsigned char)(table[i].value >> 8 * k);
        if (table[i].at == 48 && table[i].value < 0) memset(copy + 48, 0xFF, 8);
        uint32_t crc = oracle_crc32(copy, bytes - 4);
        for (int k = 0; k < 4; k++) copy[bytes - 4 + (size_t)k] = (unsigned char)(crc >> 8 * k);
        AT("%s", table[i].what);
        CHECK_RESULT(dkv_cache_restore(&restored, copy, bytes, 2, NULL), table[i].want);
        CHECK(!restored);
    }
}

/* Every allocation of every maker fails once; nothing leaks, nothing changes. */
static void failing_allocator(void) {
    for (int maker = 0; maker < 4; maker++) {
        world w;
        make_world(&w, DKV_FP8, 61);
        dkv_cache *c = make_cache(&w, 20), *out = NULL;
        append(&w, c, 5);
        size_t bytes;
        unsigned char *image = save(c, &bytes);
        int live = w.heap.live;
        dkv_result r = DKV_ERR_MEMORY;
        for (int fail = 0; r == DKV_ERR_MEMORY; fail++) {
            AT("maker %d, allocation %d", maker, fail);
            CHECK(fail < 20);
            w.heap.calls = 0, w.heap.fail_at = fail;
            r = maker == 0 ? dkv_cache_create(&out, &w.plan, &shape, DKV_FP8, 20, &w.alloc)
              : maker == 1 ? dkv_cache_fork(&out, c, 20)
              : maker == 2 ? dkv_cache_recompress(&out, c, &w.pattern, DKV_BEYOND_DROP, 20)
                           : dkv_cache_restore(&out, image, bytes, 20, &w.alloc);
            if (r) CHECK(!out && w.heap.live == live);
            CHECK(!r || fail < w.heap.calls); /* it did fail, and so at least one allocation was tried */
        }
        CHECK_INT(r, DKV_OK);
        CHECK(w.heap.calls > 0);
        w.heap.fail_at = -1;
        dkv_cache_destroy(out);
        check_cache(&w, c, 5);
        dkv_cache_destroy(c);
        end_world(&w);
    }
}

typedef struct shared { const world *w; dkv_cache *c; dkv_segment source[L]; float out[8][N_OUT + N_LSE]; } shared;

static void pack_in_thread(void *arg, int ith, int nth) {
    shared *s = arg;
    if (ith < nth) dkv_cache_pack(s->c, ith, &s->source[ith]);
}

/* A question of its own on the shared context: 20 forks, each grown, read, and destroyed. */
static void ask_in_thread(void *arg, int ith, int nth) {
    shared *s = arg;
    float k[HKV * D_K] = {0}, v[HKV * D_V] = {0};
    for (int round = 0; round < 20 && nth; round++) {
        dkv_cache *fork;
        if (dkv_cache_fork(&fork, s->c, 9)) return;
        for (int n = 0; n < 1 + ith; n++)
            for (int l = 0; l < L; l++) {
                for (int i = 0; i < COUNT(k); i++) k[i] = (float)(0.1 * sin(i + 7 * n + l));
                for (int i = 0; i < COUNT(v); i++) v[i] = (float)cos(i + 5 * n + l);
                dkv_cache_append(fork, l, dkv_thd(k, DKV_F32, HKV, D_K), dkv_thd(v, DKV_F32, HKV, D_V), 1);
            }
        attend(s->w, fork, s->out[ith]);
        dkv_cache_destroy(fork);
    }
}

static void parallel_forks(void) {
    static shared s, alone;
    world w;
    make_world(&w, DKV_F16, 61);
    s.w = &w;
    CHECK_OK(dkv_cache_create(&s.c, &w.plan, &shape, w.type, 4, &w.alloc));
    for (int l = 0; l < L; l++) s.source[l] = tokens(&w, l, 0, w.T_c, THD);
    run_pthreads(NULL, L, pack_in_thread, &s);
    check_cache(&w, s.c, 0);
    alone = s;
    run_pthreads(NULL, 8, ask_in_thread, &s);
    for (int i = 0; i < 8; i++) ask_in_thread(&alone, i, 8);
    CHECK(!memcmp(s.out, alone.out, sizeof s.out));
    CHECK(s.out[7][0] == s.out[7][0] && memcmp(s.out[6], s.out[7], sizeof s.out[7]) != 0);
    dkv_cache_destroy(s.c);
    end_world(&w);
}

int main(void) {
    static const test_case cases[] = {
        {"life cycle", life_cycle, 1},
        {"refusals", refusals, 0},
        {"forks", forks, 0},
        {"recompress", recompress, 1},
        {"save and restore, bit for bit", save_and_restore, 1},
        {"broken images", broken_images, 0},
        {"broken fields", broken_fields, 0},
        {"failing allocator", failing_allocator, 0},
        {"threads", parallel_forks, 0},
    };
    return run_cases("cache", cases, COUNT(cases));
}
