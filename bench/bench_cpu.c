/* bench_cpu: attention on the CPU against the machine's limits and against its peers, in one run.

   row of the table -> case (random normal q, K, V) -> contenders: ours, ggml, OpenBLAS, torch
     each is checked against double precision first; then they take turns, on layers that are together twice the
     last-level cache; medians. Read bandwidth and GEMM rate are measured again before each row: they are its limit. */
#define _GNU_SOURCE
#include "bench.h"

#include <cblas.h>
#include <getopt.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { K = 1024, MAX_RUNS = 40, ROUNDS = 5, MAX_CONTENDERS = 16 };

/* What we pack, and what peers and our tail store: the same, but f16 for 8-bit rows, which have scales that peers lack.
   error: the greatest difference to double precision over the greatest output; random normal data of any length. Peers
   may round weights, ggml with flash attention adds up f16 in f16: 2e-2 at 8K. */
static const struct {
    const char *name;
    dkv_type packed, type;
    double error, error_peer;
} types[] = {{"f16", DKV_F16, DKV_F16, 1e-5, 0.3}, {"bf16", DKV_BF16, DKV_BF16, 1e-5, 2e-2},
             {"f32", DKV_F32, DKV_F32, 1e-5, 1e-4}, {"i8", DKV_I8, DKV_F16, 1e-5, 0.3},
             {"fp8", DKV_FP8, DKV_F16, 1e-5, 0.3}};

static const struct {
    const char *name;
    int H, Hkv, d;
    int64_t max; /* longest context of the models of this shape */
} shapes[] = {{"32/8 d128", 32, 8, 128, 128 * K}, {"28/4 d128", 28, 4, 128, 128 * K}, {"9/3 d64", 9, 3, 64, 8 * K},
              {"32/32 d128", 32, 32, 128, 32 * K}};

/* Each for every shape, type, N_q and length up to the shape's longest, which stands for all beyond it. */
static const struct {
    const char *what, *types;
    int64_t N_q[2], lengths[4];
    double kept; /* of the length, 1: by all heads alike; else by unequal ones, from 0.2 to 1.8 times as much */
    bool dense;
} rows[] = {
    {"decode", "f16", {1}, {2 * K, 8 * K, 32 * K, 128 * K}, 1, false},
    {"decode", "bf16 f32 i8 fp8", {1}, {32 * K}, 1, false},
    {"ragged", "f16 bf16 i8", {1}, {128 * K}, 0.3, false},
    {"suffix", "f16 bf16 i8", {8, 32}, {32 * K}, 1, false},
    {"prefill", "f16 bf16", {512}, {2 * K, 8 * K, 32 * K}, 1, true},
    {"prefill", "f16", {2048}, {2 * K, 8 * K}, 1, true},
};

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define die(...) (fprintf(stderr, "bench_cpu: " __VA_ARGS__), fputc('\n', stderr), exit(2))

static int threads;
static bool quick;

double bench_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- memory -------------------------------------------------------------- */

static char *arena;
static int64_t arena_bytes, arena_used;

static void arena_open(void) {
    arena_bytes = sysconf(_SC_AVPHYS_PAGES) / 4 * 3 * sysconf(_SC_PAGESIZE); /* torch's process wants some too */
    arena = mmap(NULL, (size_t)arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) die("no memory");
    madvise(arena, (size_t)arena_bytes, MADV_HUGEPAGE);
}

void *bench_alloc(int64_t bytes) {
    const int64_t align = bytes > 1 << 20 ? 2 << 20 : 64, at = (arena_used + align - 1) / align * align;
    if (at > arena_bytes || bytes > arena_bytes - at) return NULL;
    arena_used = at + bytes;
    return arena + at;
}

int64_t bench_layers(int64_t bytes) {
    const int64_t cache = sysconf(_SC_LEVEL3_CACHE_SIZE), all = (quick ? 1 : 2) * (cache > 32 << 20 ? cache : 32 << 20);
    return (all + bytes - 1) / bytes;
}

/* ---- limits: bytes and flops per second ---------------------------------- */

typedef struct { double read_one, read, gemm; } rates;

typedef uint64_t vector __attribute__((vector_size(64), may_alias));

#define READ(name, target)                                            \
    target static uint64_t name(const vector *p, int64_t n) {         \
        vector a = {0}, b = a, c = a, e = a;                          \
        for (int64_t i = 0; i < n; i += 4)                            \
            a ^= p[i], b ^= p[i + 1], c ^= p[i + 2], e ^= p[i + 3];   \
        a ^= b ^ c ^ e;                                               \
        return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7]; \
    }
READ(read_any, )
#if defined(__x86_64__)
READ(read_avx2, __attribute__((target("avx2"))))
READ(read_avx512, __attribute__((target("avx512f"))))
#define READ_BEST (__builtin_cpu_supports("avx512f") ? read_avx512 \
                   : __builtin_cpu_supports("avx2") ? read_avx2 : read_any)
#else
#define READ_BEST read_any
#endif

static double read_rate(const vector *buffer, int64_t bytes, int n_threads) {
    const int64_t part = bytes / n_threads / 256 * 4;
    uint64_t all = 0;
    double start = bench_seconds();
#pragma omp parallel num_threads(n_threads) reduction(^ : all)
    all ^= READ_BEST(buffer + part * omp_get_thread_num(), part);
    if (all == 1) die("bug: a buffer of ones is not one"); /* so that the loads stay */
    return (double)(part * 64 * n_threads) / (bench_seconds() - start);
}

static double gemm_rate(void) {
    enum { N = 2048 };
    static float a[N * N], c[N * N];
    for (int i = 0; i < N * N; i++) a[i] = 1.f / (float)(i % 97 + 1);
    openblas_set_num_threads(threads);
    double start = bench_seconds();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, N, N, 1, a, N, a, N, 0, c, N);
    return 2. * N * N * N / (bench_seconds() - start);
}

static rates measure_rates(void) {
    static vector *buffer; /* lies below every case */
    const int64_t bytes = bench_layers(1 << 20) << 20;
    rates best = {0};
    if (!buffer && !(buffer = bench_alloc(bytes))) die("no memory");
    if (!((char *)buffer)[0]) memset(buffer, 1, (size_t)bytes), gemm_rate();
    for (int i = 0; i < 3; i++) {
        best.read = fmax(best.read, read_rate(buffer, bytes, threads));
        best.read_one = fmax(best.read_one, read_rate(buffer, bytes / 4, 1));
        best.gemm = fmax(best.gemm, gemm_rate());
    }
    return best;
}

/* ---- the case's numbers -------------------------------------------------- */

/* x[n] <- sums of four uniform numbers, of variance 1, rounded to type. */
static float *random_normal(int64_t n, uint64_t seed, dkv_type type) {
    float *x = bench_alloc(n * 4);
#pragma omp parallel for num_threads(threads)
    for (int64_t at = 0; at < (x ? n : 0); at += K) {
        const int64_t m = n - at < K ? n - at : K;
        float rounded[K];
        for (int64_t i = 0; i < m; i++) {
            uint64_t z = (seed << 40) + (uint64_t)(at + i) * 0x9e3779b97f4a7c15u;
            z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z = (z ^ z >> 27) * 0x94d049bb133111ebu, z ^= z >> 31;
            int sum = (int)((z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48)) - 131070;
            x[at + i] = (float)sum * (1.7320508f / 65536);
        }
        dkv_convert(rounded, type, x + at, DKV_F32, m);
        dkv_convert(x + at, DKV_F32, rounded, type, m);
    }
    return x;
}

static int64_t first_row(const bench_case *c, int64_t g) { return (g + 1) * c->n_max - c->n[g]; }

/* The first, middle and last query are checked. */
static int sampled(const bench_case *c) { return (c->N_q > 1 ? 3 : 1) * c->H; }
static int64_t sampled_row(const bench_case *c, int i) { return i / c->H * (c->N_q - 1) / 2 * c->H + i % c->H; }

/* ref[sampled][d]. Logits are small, |q k| / sqrt(d) < 30, and need no maximum. */
static void oracle(const bench_case *c, double *ref) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int s = 0; s < sampled(c); s++) {
        const int64_t d = c->d, row = sampled_row(c, s), g = row % c->H / (c->H / c->Hkv);
        const float *q = c->q + row * d, *k = c->k + first_row(c, g) * d, *v = c->v + first_row(c, g) * d;
        double *out = ref + s * d, sum = 0;
        memset(out, 0, (size_t)d * sizeof *out);
        for (int64_t j = 0; j < c->n[g] - c->N_q + 1 + row / c->H; j++) {
            double dot = 0;
            for (int64_t i = 0; i < d; i++) dot += (double)q[i] * (double)k[j * d + i];
            const double w = exp(dot / sqrt((double)d));
            sum += w;
            for (int64_t i = 0; i < d; i++) out[i] += w * (double)v[j * d + i];
        }
        for (int64_t i = 0; i < d; i++) out[i] /= sum;
    }
}

static double error_of(const bench_case *c, const double *ref, const float *out) {
    double error = 0, greatest = 0;
    for (int s = 0; s < sampled(c); s++)
        for (int64_t i = 0; i < c->d; i++) {
            const double e = fabs((double)out[sampled_row(c, s) * c->d + i] - ref[s * c->d + i]);
            if (!(e <= error)) error = e; /* a NaN stays */
            greatest = fmax(greatest, fabs(ref[s * c->d + i]));
        }
    return error / greatest;
}

static void fill_layer(const bench_case *c, const bench_kv *kv, dkv_type type) {
    const int64_t e = dkv_type_bytes(type), d = c->d;
#pragma omp parallel for num_threads(threads)
    for (int64_t g = 0; g < c->Hkv; g++) {
        const int64_t at = g * kv->head_bytes, from = first_row(c, g) * d;
        dkv_convert(kv->k + at, type, c->k + from, DKV_F32, c->n[g] * d);
        dkv_convert(kv->v + at, type, c->v + from, DKV_F32, c->n[g] * d);
        for (int64_t j = 0; kv->v_transposed && j < c->n[g]; j++)
            for (int64_t i = 0; i < d; i++)
                memcpy(kv->v_transposed + at + (i * c->n_max + j) * e, kv->v + at + (j * d + i) * e, (size_t)e);
    }
}

const bench_kv *bench_kv_of(const bench_case *c, dkv_type type) {
    static struct { bench_kv kv; int id; } made[COUNT(types)];
    bench_kv *kv = &made[type].kv;
    char **parts[] = {&kv->k, &kv->v, &kv->v_transposed};
    if (made[type].id == c->id) return kv->k ? kv : NULL;
    made[type].id = c->id;
    const int64_t row = c->d * dkv_type_bytes(type);
    int64_t keys = 0;
    for (int g = 0; g < c->Hkv; g++) keys += c->n[g];
    *kv = (bench_kv){bench_layers(2 * keys * row), c->n_max * row, c->Hkv * c->n_max * row, NULL, NULL, NULL};
    for (int i = 0; i < (type == c->type ? 3 : 2); i++)
        if (!(*parts[i] = bench_alloc(kv->layers * kv->layer_bytes))) return kv->k = NULL, NULL;
    fill_layer(c, kv, type);
#pragma omp parallel for num_threads(threads)
    for (int64_t l = 1; l < kv->layers; l++)
        for (int i = 0; i < 3 && *parts[i]; i++)
            memcpy(*parts[i] + l * kv->layer_bytes, *parts[i], (size_t)kv->layer_bytes);
    return kv;
}

/* ---- ours ---------------------------------------------------------------- */

typedef struct {
    const bench_case *c;
    dkv_cache *cache;
    float *out;
    void *workspace;
    size_t bytes;
} our_state;

static void *cache_alloc(void *user, size_t bytes) { return (void)user, bench_alloc((int64_t)bytes); }
static void cache_free(void *user, void *p, size_t bytes) { (void)user, (void)p, (void)bytes; }

static dkv_attention our_attention(const our_state *s, int64_t layer) {
    const bench_case *c = s->c;
    const dkv_tensor q = dkv_thd(c->q, DKV_F32, c->H, c->d), out = dkv_thd(s->out, DKV_F32, c->H, c->d);
    return dkv_cache_attention(s->cache, (int)(layer % dkv_cache_shape(s->cache)->L), q, c->N_q, out);
}

static double bytes_of(const bench_case *c) {
    double keys = 0;
    for (int g = 0; g < c->Hkv; g++) keys += (double)c->n[g];
    return keys * (double)(2 * c->d * dkv_type_bytes(c->packed)); /* but for the scales and the tail */
}

/* Each layer keeps of its first T_c positions the last n[g] - (n_max - T_c). */
static dkv_result our_plan(const bench_case *c, int L, int64_t T_c, dkv_plan *plan) {
    int64_t *counts = bench_alloc(L * c->Hkv * 8), *positions = bench_alloc(L * c->Hkv * T_c * 8 + 8), *at = positions;
    size_t bytes;
    if (!counts || !positions) return DKV_ERR_MEMORY;
    for (int64_t f = 0; f < L * c->Hkv; f++) {
        const int64_t first = c->n_max - c->n[f % c->Hkv];
        counts[f] = T_c ? T_c - first : 0;
        for (int64_t i = 0; i < counts[f]; i++) *at++ = first + i;
    }
    dkv_result r = dkv_plan_from_positions(plan, NULL, &bytes, L, c->Hkv, T_c, positions, counts);
    void *memory = r ? NULL : bench_alloc((int64_t)bytes);
    return r ? r : !memory ? DKV_ERR_MEMORY
                           : dkv_plan_from_positions(plan, memory, &bytes, L, c->Hkv, T_c, positions, counts);
}

/* Head-major source rows from row on. */
static dkv_tensor rows_from(const bench_case *c, const float *x, int64_t row) {
    return (dkv_tensor){(void *)(uintptr_t)(x + row * c->d), DKV_F32, c->d * 4, c->n_max * c->d * 4, 4};
}

static int64_t context_of(const bench_case *c) { return c->dense ? 0 : c->n_max - c->N_q; }

/* K and V of the context <- what their packed rows stand for, so that all contenders compute the same. */
static dkv_result round_as_packed(const bench_case *c) {
    const int64_t T_c = context_of(c), mark = arena_used;
    const dkv_segment source = dkv_strided(rows_from(c, c->k, 0), rows_from(c, c->v, 0), T_c);
    dkv_plan plan;
    dkv_packed packed;
    size_t bytes;
    dkv_result r = our_plan(c, 1, T_c, &plan);
    if (!r) r = dkv_pack(&packed, NULL, &bytes, c->packed, &plan, 0, c->d, c->d, &source);
    void *memory = r ? NULL : bench_alloc((int64_t)bytes);
    if (!r) r = memory ? dkv_pack(&packed, memory, &bytes, c->packed, &plan, 0, c->d, c->d, &source) : DKV_ERR_MEMORY;
    for (int g = 0; !r && g < c->Hkv; g++) {
        const int64_t first = c->n_max - c->n[g];
        r = dkv_unpack(rows_from(c, c->k, first), rows_from(c, c->v, first), &packed, g);
    }
    arena_used = mark;
    return r;
}

static const char *our_open(void **state, const bench_case *c, int mode) {
    const int L = (int)bench_layers((int64_t)bytes_of(c));
    const int64_t T_c = context_of(c);
    const dkv_segment source = dkv_strided(rows_from(c, c->k, 0), rows_from(c, c->v, 0), T_c);
    our_state *s = *state = bench_alloc(sizeof *s);
    dkv_plan plan;
    (void)mode;
    if (!s || !(s->out = bench_alloc(c->N_q * c->H * c->d * 4))) return "no memory";
    s->c = c;
    dkv_result r = our_plan(c, L, T_c, &plan);
    if (!r) r = dkv_cache_create(&s->cache, &plan, &(dkv_shape){L, c->H, c->Hkv, c->d, c->d}, c->packed, c->n_max - T_c,
                                 &(dkv_allocator){cache_alloc, cache_free, NULL});
    for (int l = 0; !r && l < L; l++) {
        if (T_c) r = dkv_cache_pack(s->cache, l, &source);
        if (!r) r = dkv_cache_append(s->cache, l, rows_from(c, c->k, T_c), rows_from(c, c->v, T_c), c->n_max - T_c);
    }
    if (r) return dkv_result_string(r);
    const dkv_attention a = our_attention(s, 0);
    r = dkv_attend_size(&s->bytes, &a, 1, threads);
    s->workspace = bench_alloc((int64_t)s->bytes);
    return r ? dkv_result_string(r) : s->workspace ? NULL : "no memory";
}

static double our_run(void *p, int64_t layer) {
    our_state *s = p;
    const dkv_attention a = our_attention(s, layer);
    double start = bench_seconds();
    dkv_attend(&a, 1, s->workspace, s->bytes, NULL);
    return bench_seconds() - start;
}

static void our_read(void *p, float *out) {
    const our_state *s = p;
    memcpy(out, s->out, (size_t)(s->c->N_q * s->c->H * s->c->d) * sizeof *out);
}

static const bench_peer ours[] = {{"ours", 0, our_open, our_run, our_read, NULL}, {0}};
static const struct {
    const char *name;
    const bench_peer *peers;
} families[] = {{"ours", ours}, {"ggml", peers_ggml}, {"openblas", peers_blas}, {"torch", peers_torch}};

/* ---- timing -------------------------------------------------------------- */

typedef struct {
    const bench_peer *peer;
    void *state;
    char why[128]; /* it failed */
    double error, ms[MAX_RUNS];
    int64_t runs, wanted;
} contender;

/* False: there is no such mode. */
static bool enter(contender *e, const bench_case *c, const double *ref, float *out, double tolerance) {
    const char *why = e->peer->open(&e->state, c, e->peer->mode);
    if (why) return snprintf(e->why, sizeof e->why, "%s", why), e->state = NULL, *why;
    const double budget = (quick ? 0.2 : 3) / e->peer->run(e->state, 0);
    e->wanted = budget < 3 ? 3 : budget < MAX_RUNS ? (int64_t)budget : MAX_RUNS;
    e->peer->read(e->state, out);
    e->error = error_of(c, ref, out);
    if (!(e->error <= tolerance)) snprintf(e->why, sizeof e->why, "wrong: error %.1e", e->error);
    return true;
}

/* Bursts in turn. Each begins when the threads of the one before have gone to sleep, and with a run that is not counted
   unless it is long. */
static void take_turns(contender *all, int n) {
    static int64_t layer;
    for (int round = 0; round < ROUNDS; round++)
        for (contender *e = all; e < all + n; e++) {
            if (*e->why) continue;
            usleep(50000);
            if (e->wanted > 20) e->peer->run(e->state, layer++);
            while (e->runs < e->wanted * (round + 1) / ROUNDS) e->ms[e->runs++] = 1e3 * e->peer->run(e->state, layer++);
        }
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const contender *e) { return e->ms[e->runs / 2]; } /* sorted */

/* ---- report -------------------------------------------------------------- */

static FILE *json;
static int status;

static const char *cpu_name(void) {
    static char line[256] = "model name: unknown";
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f) && strncmp(line, "model name", 10)) continue;
    if (f) fclose(f);
    line[strcspn(line, "\n")] = 0;
    return strchr(line, ':') + 2;
}

static void print_head(const rates *r) {
    double load = 0;
    getloadavg(&load, 1);
    printf("%s, %ld processors, %ld MB last-level cache, %d threads, %s\n", cpu_name(), sysconf(_SC_NPROCESSORS_ONLN),
           sysconf(_SC_LEVEL3_CACHE_SIZE) >> 20, threads, dkv_simd_name(dkv_simd_level()));
    printf("distance_kv %s, ggml %s, %s (kernels: %s), compiler %s\n", dkv_version(), bench_ggml_version(),
           openblas_get_config(), openblas_get_corename(), __VERSION__);
    printf("read %.1f GB/s by one thread, %.1f by all; sgemm %.0f GF/s\n", r->read_one / 1e9, r->read / 1e9,
           r->gemm / 1e9);
    if (load > 0.5) printf("Load %.1f: other programs are running, these times are worth nothing.\n", load);
    printf("\n%-28s %9s %9s %9s %6s %5s %6s %5s %9s %6s", "", "ours ms", "min", "max", "GB/s", "read", "GF/s", "sgemm",
           "limit ms", "error");
    for (size_t f = 1; f < COUNT(families); f++) printf(" %9s ms      ", families[f].name);
    printf("\n");
}

static const contender *best_of(const contender *all, int n, const char *family) {
    const contender *best = NULL;
    for (const contender *e = all; e < all + n; e++)
        if (!*e->why && !strncmp(e->peer->name, family, strlen(family)))
            if (!best || median(e) < median(best)) best = e;
    return best;
}

static double flops_of(const bench_case *c) {
    double seen = 0;
    for (int g = 0; g < c->Hkv; g++) seen += (double)c->N_q * ((double)c->n[g] - (double)(c->N_q - 1) / 2);
    return 4 * seen * c->d * (c->H / c->Hkv);
}

static void write_list(const contender *all, int n, bool failed) {
    const char *comma = "";
    fprintf(json, ", \"%s\": {", failed ? "peers_failed" : "peers");
    for (const contender *e = all + 1; e < all + n; e++) {
        if (!*e->why == failed) continue;
        fprintf(json, failed ? "%s\"%s\": \"%s\"" : "%s\"%s\": ", comma, e->peer->name, e->why);
        if (!failed) fprintf(json, "%.4f", median(e));
        comma = ", ";
    }
    fputc('}', json);
}

/* The table says of each family the best mode, JSON all. */
static void report(const bench_case *c, const rates *r, const contender *all, int n) {
    static const char *comma = "";
    const double bytes = bytes_of(c), flops = flops_of(c), ms = median(all);
    const double read_ms = 1e3 * bytes / r->read, gemm_ms = 1e3 * flops / r->gemm, limit_ms = fmax(read_ms, gemm_ms);
    if (*all->why) printf("%-28s %s", c->name, all->why);
    else printf("%-28s %9.3f %9.3f %9.3f %6.1f %4.0f%% %6.0f %4.0f%% %9.3f %6.0e", c->name, ms, all->ms[0],
                all->ms[all->runs - 1], bytes / ms / 1e6, 100 * read_ms / ms, flops / ms / 1e6, 100 * gemm_ms / ms,
                limit_ms, all->error);
    for (size_t f = 1; f < COUNT(families); f++) {
        const contender *best = best_of(all, n, families[f].name);
        if (best) printf(" %9.3f %6.2fx  ", median(best), median(best) / ms);
        else printf(" %9s          ", "-");
    }
    for (const contender *e = all + 1; e < all + n; e++)
        if (*e->why && strncmp(e->why, "missing", 7)) printf(" %s %s;", e->peer->name, e->why);
    printf("\n");
    fflush(stdout);
    if (!json) return;
    fprintf(json, "%s{\"case\": \"%s\", \"device\": \"%s\", \"isa\": \"%s\", \"dtype\": \"%s\", \"threads\": %d, "
            "\"ours_ms\": %.4f, \"ours_min_ms\": %.4f, \"ours_max_ms\": %.4f, \"runs\": %d, \"limit_ms\": %.4f, "
            "\"limit_what\": \"%s\"", comma, c->name, cpu_name(), dkv_simd_name(dkv_simd_level()),
            dkv_type_name(c->packed), threads, ms, all->ms[0], all->ms[all->runs ? all->runs - 1 : 0], (int)all->runs,
            limit_ms, read_ms >= gemm_ms ? "read" : "sgemm");
    write_list(all, n, false);
    write_list(all, n, true);
    fprintf(json, ", \"max_err\": %.2e, \"bytes\": %.0f, \"flops\": %.0f}", all->error, bytes, flops);
    comma = ",\n";
}

/* ---- rows ---------------------------------------------------------------- */

static void run_case(bench_case *c, size_t t) {
    static contender all[MAX_CONTENDERS];
    const rates r = measure_rates();
    const int64_t mark = arena_used;
    int n = 0;
    double *ref = bench_alloc(sampled(c) * c->d * 8);
    float *out = bench_alloc(c->N_q * c->H * c->d * 4);
    c->q = random_normal(c->N_q * c->H * c->d, 1, c->type);
    c->k = random_normal(c->Hkv * c->n_max * c->d, 2, c->type);
    c->v = random_normal(c->Hkv * c->n_max * c->d, 3, c->type);
    if (ref && out && c->q && c->k && c->v && (c->packed == c->type || !round_as_packed(c))) {
        oracle(c, ref);
        for (size_t f = 0; f < COUNT(families); f++)
            for (const bench_peer *p = families[f].peers; p->name; p++) {
                all[n] = (contender){.peer = p};
                n += enter(&all[n], c, ref, out, f ? types[t].error_peer : types[t].error);
            }
        take_turns(all, n);
        for (contender *e = all; e < all + n; e++) qsort(e->ms, (size_t)e->runs, sizeof *e->ms, ascending);
        if (*all->why) status = 1;
        report(c, &r, all, n);
        for (contender *e = all; e < all + n; e++)
            if (e->state && e->peer->close) e->peer->close(e->state);
    } else printf("%-28s no memory\n", c->name);
    arena_used = mark;
}

static void run_row(size_t s, size_t r, size_t t, int64_t N_q, int64_t length, const char *only) {
    static int id;
    bench_case c = {.id = ++id, .H = shapes[s].H, .Hkv = shapes[s].Hkv, .d = shapes[s].d, .threads = threads,
                    .packed = types[t].packed, .type = types[t].type, .dense = rows[r].dense, .N_q = N_q};
    char what[32];
    snprintf(what, sizeof what, N_q > 1 ? "%s%lld" : "%s", rows[r].what, (long long)N_q);
    snprintf(c.name, sizeof c.name, "%s %s %lldK %s", what, shapes[s].name, (long long)length / K, types[t].name);
    for (int g = 0; g < c.Hkv; g++) { /* multiples of 256, as llama.cpp pads its cache */
        const double share = rows[r].kept < 1 ? rows[r].kept * (0.2 + 1.6 * g / (c.Hkv - 1)) : 1;
        c.n[g] = (int64_t)(share * (double)length + 255) / 256 * 256;
        if (c.n[g] > c.n_max) c.n_max = c.n[g];
    }
    if (strstr(c.name, only)) run_case(&c, t);
}

static bool has_word(const char *list, const char *word) {
    const char *at = strstr(list, word);
    return at && (at == list || at[-1] == ' ');
}

static void run_rows(const char *only) {
    for (size_t s = 0; s < COUNT(shapes); s++)
        for (size_t r = 0; r < COUNT(rows); r++)
            for (size_t t = 0; t < COUNT(types); t++)
                for (int i = 0; i < 8 && has_word(rows[r].types, types[t].name); i++) {
                    const int64_t N_q = rows[r].N_q[i / 4], length = rows[r].lengths[i % 4], max = shapes[s].max;
                    if (!N_q || !length || (i % 4 && rows[r].lengths[i % 4 - 1] >= max)) continue;
                    if (quick && (length < 8 * K || max > 8 * K || N_q > 512)) continue;
                    run_row(s, r, t, N_q, length < max ? length : max, only);
                }
}

static void set_isa(const char *name) {
    int i = 0;
    while (i < DKV_SIMD_COUNT && strcmp(name, dkv_simd_name((dkv_simd)i))) i++;
    if (i == DKV_SIMD_COUNT) die("--isa takes scalar, avx2, avx512 or amx, not '%s'", name);
    if ((int)dkv_simd_limit((dkv_simd)i) != i) die("this processor has no %s", name);
    if (i == DKV_SIMD_AVX2) setenv("ATEN_CPU_CAPABILITY", "avx2", 0), setenv("ONEDNN_MAX_CPU_ISA", "AVX2", 0);
}

static const char usage[] =
    "usage: bench_cpu [--json FILE] [--only TEXT] [--quick] [--threads N] [--isa scalar|avx2|avx512|amx]\n"
    "  --only TEXT  the rows whose name has TEXT, such as \"decode\", \"32/8 d128\", \"128K bf16\"\n"
    "  --quick      few rows and runs, a minute\n"
    "  --isa        limits ours; with avx2 torch too. OpenBLAS: set OPENBLAS_CORETYPE=Haswell; ggml: as it was built\n";

int main(int argc, char **argv) {
    static const struct option options[] = {{"json", 1, 0, 'j'}, {"only", 1, 0, 'o'}, {"quick", 0, 0, 'q'},
                                            {"threads", 1, 0, 't'}, {"isa", 1, 0, 'i'}, {"help", 0, 0, 'h'}, {0}};
    const char *only = "", *json_path = NULL;
    char *end = "";
    threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) >= 0;)
        if (o == 'j') json_path = optarg;
        else if (o == 'o') only = optarg;
        else if (o == 'q') quick = true;
        else if (o == 't') threads = (int)strtol(optarg, &end, 10);
        else if (o == 'i') set_isa(optarg);
        else return fputs(usage, o == 'h' ? stdout : stderr), o == 'h' ? 0 : 2;
    if (optind < argc) die("what is '%s'? see --help", argv[optind]);
    if (*end || threads < 1 || threads > K) die("--threads takes 1..1024");
    if (json_path && !(json = fopen(json_path, "w"))) die("cannot write %s", json_path);
    if (json) fputs("[\n", json);
    arena_open();
    const rates r = measure_rates();
    print_head(&r);
    run_rows(only);
    if (json && (fputs("\n]\n", json) < 0 || fclose(json))) die("cannot write %s", json_path);
    return status;
}
