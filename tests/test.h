/* The harness: cmocka, plus what it lacks. Every test program is one group; a case marked `levels` runs once per SIMD
   level, and a level that this machine lacks is skipped by name. SEED=n changes the random data, ONLY="*text*" chooses
   cases. */
#ifndef TEST_H
#define TEST_H

#include "../distance_kv.h"
#include "oracle.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
/* cmocka wants the standard headers above it */
#include <cmocka.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* Types of tensors and types of packed data; what a tensor to be packed is made of. */
static inline dkv_type type_at(int64_t i) {
    return (dkv_type)(i % 3);
}
static inline dkv_type packed_at(int64_t i) {
    return (dkv_type)(i % 5);
}
static inline int has_scales(dkv_type type) {
    return type == DKV_I8 || type == DKV_FP8;
}
static inline dkv_type source_type(dkv_type type) {
    return has_scales(type) ? DKV_F32 : type;
}

/* ---- checks: every failure says where in its tables the test stood -------- */

static char test_at[256] = "-";
#define AT(...) ((void)snprintf(test_at, sizeof test_at, __VA_ARGS__))

#define CHECK(x) do { if (!(x)) fail_msg("at %s: %s", test_at, #x); } while (0)

#define CHECK_INT(got, want) do { \
    long long got_ = (long long)(got), want_ = (long long)(want); \
    if (got_ != want_) fail_msg("at %s: %s is %lld, not %lld", test_at, #got, got_, want_); } while (0)

#define CHECK_RESULT(call, want) do { \
    dkv_result got_ = (call); \
    if (got_ != (want)) fail_msg("at %s: %s: %s, not %s", test_at, #call, dkv_result_string(got_), #want); } while (0)

#define CHECK_OK(call) CHECK_RESULT(call, DKV_OK)

/* ---- random numbers: splitmix64 ------------------------------------------ */

static uint64_t test_state;

static inline uint64_t rnd(void) {
    uint64_t z = test_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static inline int64_t rnd_below(int64_t n) {
    return (int64_t)(rnd() % (uint64_t)n);
}

static inline double rnd_uniform(void) {
    return (double)(rnd() >> 11) * 0x1p-53;
}

/* Nearly normal, within 3.5: the sum of four uniform numbers. */
static inline double rnd_normal(void) {
    uint64_t z = rnd();
    return ((double)((z & 0xFFFF) + (z >> 16 & 0xFFFF) + (z >> 32 & 0xFFFF) + (z >> 48)) / 65536 - 2) * sqrt(3);
}

/* ---- memory: guard pages on both sides, NaN (all ones) inside ------------ */

typedef struct test_block {
    struct test_block *next;
    char *map, *data; /* [page][canary .. data[bytes] .. canary][page] */
    size_t map_bytes, bytes;
} test_block;

static test_block *test_blocks;
enum { TEST_PAGE = 4096, TEST_CANARY = 0xA5, TEST_POISON = 0xFF };

/* Its last byte touches the guard page whenever bytes is a multiple of align. Lives until test_release. */
static inline void *guarded(size_t bytes, size_t align) {
    size_t pages = (bytes + align + TEST_PAGE - 1) / TEST_PAGE * TEST_PAGE;
    test_block *b = malloc(sizeof *b);
    char *map = mmap(NULL, pages + 2 * TEST_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!b || map == MAP_FAILED) abort();
    char *end = map + TEST_PAGE + pages, *data = end - bytes;
    data -= (uintptr_t)data % align;
    memset(map + TEST_PAGE, TEST_CANARY, pages);
    memset(data, TEST_POISON, bytes);
    mprotect(map, TEST_PAGE, PROT_NONE);
    mprotect(end, TEST_PAGE, PROT_NONE);
    *b = (test_block){test_blocks, map, data, pages + 2 * TEST_PAGE, bytes};
    test_blocks = b;
    return data;
}

static inline int test_is_byte(const char *p, const char *end, int byte) {
    while (p < end && (unsigned char)*p == byte) p++;
    return p == end;
}

/* Frees every guarded block; 0 if a byte beside one was written. */
static inline int test_release(void) {
    int intact = 1;
    for (test_block *b = test_blocks, *next; b; b = next) {
        next = b->next;
        intact &= test_is_byte(b->map + TEST_PAGE, b->data, TEST_CANARY);
        intact &= test_is_byte(b->data + b->bytes, b->map + b->map_bytes - TEST_PAGE, TEST_CANARY);
        munmap(b->map, b->map_bytes);
        free(b);
    }
    test_blocks = NULL;
    return intact;
}

/* Addresses without memory, zero where touched. The caller unmaps. */
static inline char *reserve(int64_t bytes) {
    char *map = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) fail_msg("cannot reserve %lld bytes of addresses", (long long)bytes);
    return map;
}

static inline int is_poison(const void *data, size_t bytes) {
    return test_is_byte(data, (const char *)data + bytes, TEST_POISON);
}

/* An allocator that counts, checks sizes on free, and fails above 1 GiB and at call fail_at (from 0; -1: never). */
typedef struct test_heap { int calls, fail_at, live, wrong_size; } test_heap;

static inline void *test_heap_alloc(void *user, size_t bytes) {
    test_heap *h = user;
    if (__atomic_fetch_add(&h->calls, 1, __ATOMIC_SEQ_CST) == h->fail_at || bytes > (size_t)1 << 30) return NULL;
    char *p = malloc(bytes + 64);
    memcpy(p, &bytes, sizeof bytes);
    __atomic_fetch_add(&h->live, 1, __ATOMIC_SEQ_CST);
    return (char *)memset(p + 64, TEST_POISON, bytes);
}

static inline void test_heap_free(void *user, void *ptr, size_t bytes) {
    test_heap *h = user;
    size_t allocated;
    memcpy(&allocated, (char *)ptr - 64, sizeof allocated);
    if (allocated != bytes) h->wrong_size = 1;
    __atomic_fetch_sub(&h->live, 1, __ATOMIC_SEQ_CST);
    free((char *)ptr - 64);
}

/* ---- tensors in every layout --------------------------------------------- */

enum { THD, HEAD_MAJOR, TRANSPOSED, REVERSED, BACKWARDS, UNALIGNED, LAYOUTS };

/* The bytes from the lowest element to the end of the highest; *low is where they begin, counted from t->data. */
static inline size_t tensor_span(const dkv_tensor *t, int64_t T, int64_t heads, int64_t d, int64_t *low) {
    int64_t last[] = {(T - 1) * t->stride_token, (heads - 1) * t->stride_head, (d - 1) * t->stride_dim}, high = 0;
    *low = 0;
    if (T <= 0 || heads <= 0 || d <= 0) return 0;
    for (int i = 0; i < 3; i++) {
        *low += last[i] < 0 ? last[i] : 0;
        high += last[i] > 0 ? last[i] : 0;
    }
    return (size_t)(high - *low + oracle_bytes(t->type));
}

/* [T][heads][d] in an exact guarded block of NaNs. REVERSED: all strides negative; BACKWARDS: the tokens' alone;
   UNALIGNED: odd byte strides. */
static inline dkv_tensor new_tensor(int layout, dkv_type type, int64_t T, int64_t heads, int64_t d) {
    int64_t e = oracle_bytes(type), odd = e + 1, head = d * odd + 2, token = heads * head + 4;
    dkv_tensor t[LAYOUTS] = {
        {NULL, type, heads * d * e, d * e, e},    {NULL, type, d * e, T * d * e, e}, {NULL, type, e, d * T * e, T * e},
        {NULL, type, -heads * d * e, -d * e, -e}, {NULL, type, -heads * d * e, d * e, e},
        {NULL, type, token, head, odd},
    }, *x = &t[layout];
    int64_t low;
    size_t bytes = tensor_span(x, T, heads, d, &low);
    if (bytes) x->data = (char *)guarded(bytes, 1) - low;
    return *x;
}

static inline void fill_tensor(const dkv_tensor *t, const double *x, int64_t T, int64_t heads, int64_t d) {
    for (int64_t n = 0; n < T; n++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < d; i++) oracle_put(t, n, h, i, x[(n * heads + h) * d + i]);
}

/* n values of the type, normal with this standard deviation. */
static inline double *normal_values(int64_t n, dkv_type type, double deviation) {
    double *x = guarded((size_t)n * sizeof *x, sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = oracle_round(type, deviation * rnd_normal());
    return x;
}

/* ---- patterns and plans -------------------------------------------------- */

/* Bits in clumps, so that there are short and long runs. */
static inline oracle_pattern random_pattern(int L, int H, int Hkv, int D, int64_t W, int64_t S, int64_t R,
                                            double density) {
    int64_t n = (int64_t)L * H * D;
    oracle_pattern o = {L, H, Hkv, D, W, S, R, guarded((size_t)n, 1)};
    for (int64_t i = 0; i < n; i++) o.M[i] = i && rnd() & 1 ? o.M[i - 1] : rnd_uniform() < density;
    return o;
}

/* The same as a dkv_pattern; bits set by shifts, at an address that is not aligned. */
static inline dkv_pattern pattern_of(const oracle_pattern *o) {
    int64_t row_bytes = (o->D + 63) / 64 * 8, K = 0;
    unsigned char *bits = guarded((size_t)(o->L * o->H * row_bytes), 1);
    memset(bits, 0, (size_t)(o->L * o->H * row_bytes));
    for (int64_t r = 0; r < o->L * o->H; r++)
        for (int b = 0; b < o->D; b++) {
            bits[r * row_bytes + b / 8] |= (unsigned char)(o->M[r * o->D + b] << b % 8);
            K += o->M[r * o->D + b];
        }
    return (dkv_pattern){.L = o->L, .H = o->H, .Hkv = o->Hkv, .D = o->D, .W = o->W, .S = o->S, .R = o->R,
                         .rho = (double)K / ((double)o->L * o->H * o->D), .K = K, .model = "test", .tool = "test.h",
                         .bits = bits};
}

/* A call that tells its size while mem is NULL, and then fills memory of exactly that size. */
#define EXACTLY(mem, align, bytes, call) \
    do { void *mem = NULL; CHECK_OK(call); mem = guarded(bytes, align); CHECK_OK(call); } while (0)

static inline dkv_plan plan_of(const dkv_pattern *p, int64_t T_c, dkv_beyond beyond) {
    dkv_plan plan;
    size_t bytes;
    EXACTLY(mem, 8, bytes, dkv_plan_make(&plan, mem, &bytes, p, T_c, beyond));
    return plan;
}

/* keep [L][Hkv][T_c] -> the plan of exactly these positions; NULL: of all. */
static inline dkv_plan plan_of_mask(const unsigned char *keep, int L, int Hkv, int64_t T_c) {
    int64_t n = 0, heads = (int64_t)L * Hkv, *counts = guarded((size_t)heads * 8, 8);
    int64_t *at = keep ? guarded((size_t)(heads * T_c) * 8, 8) : NULL;
    memset(counts, 0, (size_t)heads * 8);
    for (int64_t i = 0; i < heads * T_c && keep; i++) {
        if (!keep[i]) continue;
        at[n++] = i % T_c;
        counts[i / T_c]++;
    }
    dkv_plan plan;
    size_t bytes;
    EXACTLY(mem, 8, bytes, dkv_plan_from_positions(&plan, mem, &bytes, L, Hkv, T_c, at, keep ? counts : NULL));
    return plan;
}

static inline dkv_packed pack_layer(const dkv_plan *plan, dkv_type type, int d_k, int d_v, const dkv_segment *source) {
    dkv_packed out;
    size_t bytes;
    EXACTLY(mem, 64, bytes, dkv_pack(&out, mem, &bytes, type, plan, 0, d_k, d_v, source));
    return out;
}

/* What packed rows stand for, into the kept positions of k [T_c][Hkv][d_k] and v: scales are the code's choice. */
static inline void learn_values(const dkv_packed *packed, const dkv_plan *plan, int l, double *k, double *v) {
    int64_t Hkv = packed->Hkv, d_k = packed->d_k, d_v = packed->d_v;
    for (int g = 0; g < Hkv; g++) {
        int64_t n = packed->rows[g], *at = guarded((size_t)n * 8, 8);
        dkv_tensor kt = new_tensor(THD, DKV_F32, n, Hkv, d_k), vt = new_tensor(THD, DKV_F32, n, Hkv, d_v);
        dkv_plan_positions(plan, l, g, at);
        CHECK_OK(dkv_unpack(kt, vt, packed, g));
        for (int64_t r = 0; r < n; r++) {
            for (int j = 0; j < d_k; j++) k[(at[r] * Hkv + g) * d_k + j] = oracle_get(&kt, r, g, j);
            for (int j = 0; j < d_v; j++) v[(at[r] * Hkv + g) * d_v + j] = oracle_get(&vt, r, g, j);
        }
    }
}

/* ---- threads ------------------------------------------------------------- */

typedef struct test_thread { void (*task)(void *arg, int ith, int nth); void *arg; int ith, nth; } test_thread;

static inline void *test_thread_main(void *arg) {
    test_thread *t = arg;
    t->task(t->arg, t->ith, t->nth);
    return NULL;
}

/* A dkv_parallel's run. */
static inline void run_pthreads(void *user, int nth, void (*task)(void *arg, int ith, int nth), void *arg) {
    (void)user;
    pthread_t id[64];
    test_thread t[64];
    for (int i = 0; i < nth; i++) {
        t[i] = (test_thread){task, arg, i, nth};
        if (pthread_create(&id[i], NULL, test_thread_main, &t[i])) abort();
    }
    for (int i = 0; i < nth; i++) pthread_join(id[i], NULL);
}

/* ---- running ------------------------------------------------------------- */

typedef struct test_case { const char *name; void (*run)(void); int levels; } test_case;
typedef struct test_job { const test_case *what; int level; char name[96]; } test_job;

static inline void test_run_job(void **state) {
    const test_job *job = *state;
    if (job->level > (int)dkv_simd_supported()) skip();
    CHECK_INT(dkv_simd_limit((dkv_simd)job->level), job->what->levels ? job->level : (int)dkv_simd_supported());
    const char *seed = getenv("SEED");
    test_state = seed ? strtoull(seed, NULL, 0) : 1;
    AT("-");
    job->what->run();
    CHECK(test_release());
}

static inline int test_end_job(void **state) {
    (void)state;
    test_release();
    dkv_simd_limit((dkv_simd)(DKV_SIMD_COUNT - 1));
    return 0;
}

static inline int run_cases(const char *group, const test_case *cases, int n) {
    static test_job jobs[256];
    static struct CMUnitTest tests[256];
    int count = 0, top = (int)dkv_simd_supported();
    for (int i = 0; i < n; i++)
        for (int level = 0; level < (cases[i].levels ? DKV_SIMD_COUNT : 1); level++, count++) {
            test_job *job = &jobs[count];
            job->what = &cases[i];
            job->level = cases[i].levels ? level : top;
            snprintf(job->name, sizeof job->name, cases[i].levels ? "%s: %s [%s]" : "%s: %s", group, cases[i].name,
                     dkv_simd_name((dkv_simd)level));
            tests[count] = (struct CMUnitTest){job->name, test_run_job, NULL, test_end_job, job};
        }
    if (getenv("ONLY")) cmocka_set_test_filter(getenv("ONLY"));
    return _cmocka_run_group_tests(group, tests, (size_t)count, NULL, NULL) != 0;
}

#endif
