/* [CUDA]: the GPU against the double oracle and against the CPU, on every path (wgmma + TMA and mma.sync).
   test_cuda no-device is what one of the tests runs in a process that sees no GPU. */
#define _GNU_SOURCE
#include "cuda.h"
#include "tolerance.h"
#include <sys/wait.h>

static const dkv_type packed_types[] = {DKV_BF16, DKV_F16, DKV_I8, DKV_FP8};

static dkv_type packed_type_at(int64_t i) {
    return packed_types[i % COUNT(packed_types)];
}

/* The paths of this device: its own best, and mma.sync with 99 and 163 KB of shared memory, where it has that. */
enum { PATHS = 3 };

static int archs(int arch[PATHS]) {
    static const int less[] = {86, 80};
    int n = 0, own = arch[n++] = dkv_cuda_limit(1000);
    for (int i = 0; i < COUNT(less); i++)
        if (less[i] < own) arch[n++] = less[i];
    return n;
}

/* ---- one attention of one layer -------------------------------------------- */

typedef struct problem {
    int H, Hkv, d_k, d_v;
    int64_t T_c, n_tail, N_q;
    int64_t room;              /* rows that the tail may grow to, NaN from n_tail on; 0: n_tail, and no device length */
    dkv_type type, x, out;     /* of the packed context; of q, the tail and a strided context; of the output */
    int layout, strided;       /* of tensors; strided: nothing is evicted or packed */
    double density, q_deviation;  /* q_deviation 0: 1 */
    float scale, softcap;
    int sink, no_lse, by_cpu;  /* by_cpu: large, so the CPU backend is the reference */

    double *q, *k, *v, *tail_k, *tail_v;
    double *want, *want_lse, *spread, magnitude, v_max; /* spread: see tolerance_gpu_out */
    unsigned char *keep;
    float *sink_host;
    dkv_plan plan;
    dkv_packed context;
    dkv_tensor out_host;
    dkv_attention a;           /* on the device */
} problem;

static const problem plain = {.H = 8, .Hkv = 2, .d_k = 128, .d_v = 128, .T_c = 200, .n_tail = 9, .N_q = 1,
                              .type = DKV_BF16, .x = DKV_BF16, .out = DKV_F32, .density = 0.5};

/* bf16 behind bf16, f16 behind the others. */
static problem plain_of(dkv_type type) {
    problem p = plain;
    p.type = type;
    p.x = dkv_tail_type(type);
    return p;
}

static double scale_of(const problem *p) {
    return p->scale != 0 ? (double)p->scale : 1 / sqrt(p->d_k);
}

/* rows rows, the first n of them from x, the others NaN. */
static dkv_tensor fill_on_device(int layout, dkv_type type, const double *x, int64_t n, int64_t rows, int heads,
                                 int d) {
    dkv_tensor host = host_tensor(layout, type, rows, heads, d);
    if (x) fill_tensor(&host, x, n, heads, d);
    return upload(&host, rows, heads, d);
}

/* Evicted rows of the source are NaN. A source of another type than the packed one now and then. */
static dkv_segment context_of(problem *p) {
    dkv_type from = p->strided ? p->x : has_scales(p->type) || p->T_c % 2 ? DKV_F32 : p->type;
    dkv_tensor t[2];
    for (int i = 0; i < 2; i++) {
        int d = i ? p->d_v : p->d_k;
        dkv_tensor host = host_tensor(p->layout, from, p->T_c, p->Hkv, d);
        for (int64_t r = 0; r < p->T_c * p->Hkv; r++)
            for (int j = 0; j < d && p->keep[r % p->Hkv * p->T_c + r / p->Hkv]; j++)
                oracle_put(&host, r / p->Hkv, r % p->Hkv, j, (i ? p->v : p->k)[r * d + j]);
        t[i] = upload(&host, p->T_c, p->Hkv, d);
    }
    dkv_segment source = dkv_strided(t[0], t[1], p->T_c);
    if (p->strided || (!p->T_c && !has_scales(p->type))) return source;
    p->plan = plan_of_mask(p->keep, 1, p->Hkv, p->T_c);
    p->context = pack_on_device(&p->plan, 0, p->type, p->d_k, p->d_v, &source);
    return (dkv_segment){.packed = &p->context};
}

/* What 8-bit rows stand for: packing has its own tests. */
static void learn_from_device(problem *p) {
    for (int g = 0; g < p->Hkv && p->T_c && !p->strided && has_scales(p->type); g++) {
        dkv_segment s = unpack_to_host(&p->context, g, DKV_F32);
        int64_t row = 0;
        for (int64_t i = 0; i < p->T_c; i++) {
            if (!p->keep[g * p->T_c + i]) continue;
            for (int j = 0; j < p->d_k; j++) p->k[(i * p->Hkv + g) * p->d_k + j] = oracle_get(&s.k, row, g, j);
            for (int j = 0; j < p->d_v; j++) p->v[(i * p->Hkv + g) * p->d_v + j] = oracle_get(&s.v, row, g, j);
            row++;
        }
    }
}

/* oracle_attend with a thread for every core. */
static double oracle_attend_parallel(const oracle_attention *o, double *out, double *lse) {
    double magnitude = 0;
#pragma omp parallel for schedule(dynamic) reduction(max : magnitude)
    for (int64_t r = 0; r < o->N_q * o->H; r++) {
        double m = 0, *s = malloc(sizeof(double) * (size_t)(o->T_c + o->n_tail + 1));
        lse[r] = oracle_row(o, r / o->H, (int)(r % o->H), s, out + r * o->d_v, &m);
        free(s);
        magnitude = fmax(magnitude, m);
    }
    return magnitude;
}

static double *squares(const double *x, int64_t n) {
    double *y = guarded((size_t)n * 8, 8);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * x[i];
    return y;
}

static double largest(const double *x, int64_t n, double so_far) {
    for (int64_t i = 0; i < n; i++) so_far = fmax(so_far, fabs(x[i]));
    return so_far;
}

static void allocate_wanted(problem *p) {
    size_t rows = (size_t)(p->N_q * p->H);
    p->want = guarded(rows * (size_t)p->d_v * 8, 8);
    p->spread = guarded(rows * (size_t)p->d_v * 8, 8);
    p->want_lse = guarded(rows * 8, 8);
    p->v_max = largest(p->v, p->T_c * p->Hkv * p->d_v, largest(p->tail_v, p->n_tail * p->Hkv * p->d_v, 0));
}

/* spread[r] from squares of v weighted by squares of p: those are exponentials of twice the logits. */
static void finish_spread(problem *p, const double *lse_2) {
    for (int64_t r = 0; r < p->N_q * p->H; r++) {
        double weight = isinf(lse_2[r]) ? 0 : exp(lse_2[r] - 2 * p->want_lse[r]);
        for (int i = 0; i < p->d_v; i++) p->spread[r * p->d_v + i] = sqrt(weight * p->spread[r * p->d_v + i]);
    }
}

static void ask_oracle(problem *p) {
    oracle_attention o = {p->H, p->Hkv, p->d_k, p->d_v, p->N_q, p->T_c, p->n_tail, p->q, p->k, p->v, p->tail_k,
                          p->tail_v, p->keep, scale_of(p), (double)p->softcap, p->sink_host};
    double *lse_2 = guarded((size_t)(p->N_q * p->H) * 8, 8);
    p->magnitude = oracle_attend_parallel(&o, p->want, p->want_lse);
    o.scale *= 2, o.softcap *= 2, o.sink = NULL;
    o.v = squares(p->v, p->T_c * p->Hkv * p->d_v), o.tail_v = squares(p->tail_v, p->n_tail * p->Hkv * p->d_v);
    oracle_attend_parallel(&o, p->spread, lse_2);
    finish_spread(p, lse_2);
}

static dkv_tensor filled(const double *x, int64_t T, int heads, int d) {
    dkv_tensor t = new_tensor(THD, DKV_F32, T, heads, d);
    fill_tensor(&t, x, T, heads, d);
    return t;
}

/* out [N_q][H][d_v], lse from the CPU backend in f32; v_2: with squares of v and twice the logits. */
static void run_cpu(const problem *p, int squared, double *out, double *lse) {
    double *v = squared ? squares(p->v, p->T_c * p->Hkv * p->d_v) : p->v;
    double *tail_v = squared ? squares(p->tail_v, p->n_tail * p->Hkv * p->d_v) : p->tail_v;
    dkv_tensor t[] = {filled(p->k, p->T_c, p->Hkv, p->d_k),           filled(v, p->T_c, p->Hkv, p->d_v),
                      filled(p->tail_k, p->n_tail, p->Hkv, p->d_k),   filled(tail_v, p->n_tail, p->Hkv, p->d_v),
                      filled(p->q, p->N_q, p->H, p->d_k),             new_tensor(THD, DKV_F32, p->N_q, p->H, p->d_v)};
    dkv_segment source = dkv_strided(t[0], t[1], p->T_c);
    dkv_plan plan = plan_of_mask(p->keep, 1, p->Hkv, p->T_c);
    dkv_packed packed = pack_layer(&plan, DKV_F32, p->d_k, p->d_v, &source);
    float *lse_f32 = guarded((size_t)(p->N_q * p->H) * 4, 4);
    dkv_attention a = {.H = p->H, .Hkv = p->Hkv, .d_k = p->d_k, .d_v = p->d_v, .N_q = p->N_q, .q = t[4], .out = t[5],
                       .lse = lse_f32, .context.packed = &packed, .tail = dkv_strided(t[2], t[3], p->n_tail),
                       .scale = (float)scale_of(p) * (squared ? 2 : 1), .softcap = p->softcap * (squared ? 2 : 1),
                       .sink = squared ? NULL : p->sink_host};
    size_t bytes;
    CHECK_OK(dkv_attend_size(&bytes, &a, 1, 64));
    CHECK_OK(dkv_attend(&a, 1, guarded(bytes, 64), bytes, NULL));
    for (int64_t i = 0; i < p->N_q * p->H * p->d_v; i++) out[i] = (double)((float *)t[5].data)[i];
    for (int64_t r = 0; r < p->N_q * p->H; r++) lse[r] = (double)lse_f32[r];
}

static double longest_row(const double *x, int64_t rows, int d) {
    double most = 0;
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int i = 0; i < d; i++) sum += x[r * d + i] * x[r * d + i];
        most = fmax(most, sum);
    }
    return sqrt(most);
}

static void ask_cpu(problem *p) {
    double *lse_2 = guarded((size_t)(p->N_q * p->H) * 8, 8), rows = longest_row(p->k, p->T_c * p->Hkv, p->d_k);
    run_cpu(p, 0, p->want, p->want_lse);
    run_cpu(p, 1, p->spread, lse_2);
    finish_spread(p, lse_2);
    p->magnitude = scale_of(p) * longest_row(p->q, p->N_q * p->H, p->d_k) * /* sum |q_i k_i| <= |q| |k| */
                   fmax(rows, longest_row(p->tail_k, p->n_tail * p->Hkv, p->d_k));
}

/* p must stay where it is: the segments point into it. */
static void build(problem *p) {
    int64_t rows = p->room ? p->room : p->n_tail;
    dkv_type values = p->strided ? p->x : source_type(p->type);
    p->q = normal_values(p->N_q * p->H * p->d_k, p->x, p->q_deviation != 0 ? p->q_deviation : 1);
    p->k = normal_values(p->T_c * p->Hkv * p->d_k, values, 1);
    p->v = normal_values(p->T_c * p->Hkv * p->d_v, values, 1);
    p->tail_k = normal_values(p->n_tail * p->Hkv * p->d_k, p->x, 1);
    p->tail_v = normal_values(p->n_tail * p->Hkv * p->d_v, p->x, 1);
    p->keep = guarded((size_t)(p->Hkv * p->T_c), 1);
    for (int64_t i = 0; i < p->Hkv * p->T_c; i++) p->keep[i] = p->strided || rnd_uniform() < p->density;
    p->sink_host = p->sink ? guarded((size_t)p->H * 4, 4) : NULL;
    for (int h = 0; h < p->H && p->sink; h++) p->sink_host[h] = (float)rnd_normal();
    p->out_host = host_tensor(p->layout, p->out, p->N_q, p->H, p->d_v);
    p->a = (dkv_attention){
        .H = p->H, .Hkv = p->Hkv, .d_k = p->d_k, .d_v = p->d_v, .N_q = p->N_q,
        .q = fill_on_device(p->layout, p->x, p->q, p->N_q, p->N_q, p->H, p->d_k),
        .out = upload(&p->out_host, p->N_q, p->H, p->d_v),
        .lse = p->no_lse ? NULL : device((size_t)(p->N_q * p->H) * 4), .context = context_of(p),
        .tail = dkv_strided(fill_on_device(p->layout, p->x, p->tail_k, p->n_tail, rows, p->Hkv, p->d_k),
                            fill_on_device(p->layout, p->x, p->tail_v, p->n_tail, rows, p->Hkv, p->d_v), rows),
        .scale = p->scale, .softcap = p->softcap,
        .sink = p->sink ? to_device(p->sink_host, (size_t)p->H * 4) : NULL};
    learn_from_device(p);
    allocate_wanted(p);
    if (p->by_cpu) ask_cpu(p);
    else ask_oracle(p);
}

/* ---- launches ---------------------------------------------------------------- */

typedef struct launch { dkv_cuda_work work; int64_t *lengths; void *block, *ws; size_t block_bytes, ws_bytes; } launch;

/* All of it dirty: device() poisons. */
static launch prepare(const problem *p, int n, int ctas) {
    launch l = {.lengths = NULL};
    dkv_attention a[8];
    int64_t lengths[8];
    for (int i = 0; i < n; i++) a[i] = p[i].a, lengths[i] = p[i].n_tail;
    if (p->room) l.lengths = to_device(lengths, (size_t)n * 8);
    CHECK_OK(dkv_cuda_attend_size(&l.block_bytes, &l.ws_bytes, a, n));
    l.block = device(l.block_bytes), l.ws = device(l.ws_bytes);
    CHECK_OK(dkv_cuda_prepare(&l.work, a, n, l.lengths, l.block, l.block_bytes, l.ws, l.ws_bytes, ctas, NULL));
    return l;
}

static void poison_results(const problem *p) {
    poison_tensor(&p->a.out, p->N_q, p->H, p->d_v);
    if (p->a.lse) CUDA(cudaMemset(p->a.lse, TEST_POISON, (size_t)(p->N_q * p->H) * 4));
}

static void check_lse(const problem *p) {
    const float *lse = p->a.lse ? to_host(p->a.lse, (size_t)(p->N_q * p->H) * 4) : NULL;
    for (int64_t r = 0; r < p->N_q * p->H && lse; r++) {
        double want = p->want_lse[r], bound = tolerance_gpu_lse(p->type, p->d_k, p->magnitude, want);
        if (!(fabs((double)lse[r] - want) <= bound) && !(isinf(want) && (double)lse[r] == want))
            fail_msg("at %s: lse of row %d is %.9g, not %.9g (+-%.2g)", test_at, (int)r, (double)lse[r], want, bound);
    }
}

static void check_results(const problem *p) {
    download(&p->out_host, &p->a.out, p->N_q, p->H, p->d_v);
    for (int64_t r = 0; r < p->N_q * p->H; r++)
        for (int i = 0; i < p->d_v; i++) {
            double out = oracle_get(&p->out_host, r / p->H, r % p->H, i), want = p->want[r * p->d_v + i];
            double bound = tolerance_gpu_out(p->type, p->d_k, p->magnitude, p->v_max, p->spread[r * p->d_v + i],
                                             p->T_c + p->n_tail) + tolerance_store(p->out, want);
            if (!(fabs(out - want) <= bound))
                fail_msg("at %s: out[%d][%d] is %.9g, not %.9g (+-%.2g)", test_at, (int)r, i, out, want, bound);
        }
    CHECK(gaps_are_poison(&p->out_host, p->N_q, p->H, p->d_v));
    check_lse(p);
}

static void run_prepared(const problem *p, int n, const launch *l) {
    for (int i = 0; i < n; i++) poison_results(&p[i]);
    CUDA(cudaDeviceSynchronize());
    CHECK_OK(dkv_cuda_attend(&l->work, NULL));
    CUDA(cudaStreamSynchronize(NULL));
    for (int i = 0; i < n; i++) check_results(&p[i]);
}

static void describe(const problem *p, int n, int arch, int ctas) {
    AT("%d x H %d Hkv %d d %d %d T_c %d tail %d of %d N_q %d %s %s %s layout %d%s ctas %d sm_%d", n, p->H, p->Hkv,
       p->d_k, p->d_v, (int)p->T_c, (int)p->n_tail, (int)p->room, (int)p->N_q, dkv_type_name(p->type),
       dkv_type_name(p->x), dkv_type_name(p->out), p->layout, p->strided ? " strided" : "", ctas, arch);
}

/* Heads of more than 128 dimensions want 163 KB. */
static int too_wide(const problem *p, int n, int arch) {
    int id, shared, d = 0;
    CUDA(cudaGetDevice(&id));
    CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id));
    for (int i = 0; i < n; i++) {
        if (p[i].d_k > d) d = p[i].d_k;
        if (p[i].d_v > d) d = p[i].d_v;
    }
    return d > 128 && (arch == 86 || shared < 163 << 10);
}

static void check_refused(const problem *p, int n) {
    size_t block_bytes = 7, ws_bytes = 7;
    dkv_attention a[8];
    for (int i = 0; i < n; i++) a[i] = p[i].a;
    CHECK_RESULT(dkv_cuda_attend_size(&block_bytes, &ws_bytes, a, n), DKV_ERR_DEVICE);
    CHECK(block_bytes == 7 && ws_bytes == 7);
}

/* p[n] are built. */
static void run_built(const problem *p, int n, int ctas) {
    int arch[PATHS], paths = archs(arch);
    for (int i = paths - 1; i >= 0; i--) {
        CHECK_INT(dkv_cuda_limit(arch[i]), arch[i]);
        describe(p, n, arch[i], ctas);
        if (too_wide(p, n, arch[i])) {
            check_refused(p, n);
            continue;
        }
        launch l = prepare(p, n, ctas);
        run_prepared(p, n, &l);
    }
}

static void run_one(problem *p) {
    describe(p, 1, 0, 0);
    build(p);
    run_built(p, 1, 0);
    CHECK(release_all());
}

/* ---- the device ---------------------------------------------------------------- */

static void device_is_what_the_runtime_says(void) {
    NEEDS_DEVICE;
    int arch = 0, sms = 0, major, minor, count, id;
    CUDA(cudaGetDevice(&id));
    CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id));
    CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id));
    CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, id));
    CHECK_INT(dkv_cuda_limit(1000), 10 * major + minor);
    CHECK_OK(dkv_cuda_device(&arch, &sms));
    CHECK_INT(arch, 10 * major + minor);
    CHECK_INT(sms, count);
    CHECK_INT(dkv_cuda_limit(80), 80);
    CHECK_INT(dkv_cuda_limit(arch), arch);
}

/* The exit status says which call did not refuse. Memory stands in for device memory: nothing may touch it. */
static int without_device(void) {
    int arch = 7, sms = 7;
    if (has_device()) return 10;
    if (dkv_cuda_device(&arch, &sms) != DKV_ERR_DEVICE || arch != 7 || sms != 7) return 11;
    dkv_cuda_limit(90);
    dkv_shape shape = {1, 2, 1, 64, 64};
    size_t bytes = 0;
    dkv_plan plan, there;
    static int64_t memory[1 << 12];
    if (dkv_plan_from_positions(&plan, NULL, &bytes, 1, 1, 16, NULL, NULL) || bytes > sizeof memory) return 12;
    if (dkv_plan_from_positions(&plan, memory, &bytes, 1, 1, 16, NULL, NULL)) return 13;
    dkv_cuda_cache *cache = NULL;
    if (dkv_cuda_cache_create(&cache, &plan, &shape, DKV_BF16, 64) != DKV_ERR_DEVICE || cache) return 14;
    dkv_cuda_cache_destroy(NULL);
    static char image[4096];
    bytes = sizeof image;
    if (dkv_cuda_plan(&there, image, &bytes, &plan, NULL) != DKV_ERR_DEVICE) return 15;
    if (dkv_cuda_advance(memory, 1, 1, NULL) != DKV_ERR_DEVICE) return 16;
    return 0;
}

static void no_device_is_an_error(void) {
    pid_t child = fork();
    int status = -1;
    CHECK(child >= 0);
    if (!child) {
        setenv("CUDA_VISIBLE_DEVICES", "-1", 1);
        execl("/proc/self/exe", "test_cuda", "no-device", (char *)NULL);
        _exit(99);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_INT(WEXITSTATUS(status), 0);
}

/* ---- pack --------------------------------------------------------------------- */

typedef struct packing { int Hkv, d_k, d_v; int64_t T_c; dkv_plan plan; dkv_segment host, dev; } packing;

/* Evicted rows are NaN; K and V lie differently. */
static packing make_packing(dkv_type from, int layout, int64_t T_c, int Hkv, int d_k, int d_v, double density) {
    packing p = {Hkv, d_k, d_v, T_c, {0}, {0}, {0}};
    unsigned char *keep = guarded((size_t)(Hkv * T_c), 1);
    for (int64_t i = 0; i < Hkv * T_c; i++) keep[i] = rnd_uniform() < density * (double)(1 + i / T_c % 3) / 2;
    p.plan = plan_of_mask(keep, 1, Hkv, T_c);
    dkv_tensor t[] = {host_tensor(layout, from, T_c, Hkv, d_k),
                      host_tensor((layout + 1) % LAYOUTS, from, T_c, Hkv, d_v)};
    for (int i = 0; i < 2; i++)
        for (int64_t r = 0; r < T_c * Hkv; r++)
            for (int j = 0; j < (i ? d_v : d_k) && keep[r % Hkv * T_c + r / Hkv]; j++)
                oracle_put(&t[i], r / Hkv, r % Hkv, j, rnd_normal() * (j % 5 == 2 ? 20 : 1));
    p.host = dkv_strided(t[0], t[1], T_c);
    p.dev = dkv_strided(upload(&t[0], T_c, Hkv, d_k), upload(&t[1], T_c, Hkv, d_v), T_c);
    return p;
}

/* The packed element in the CPU's documented layout. */
static const char *cpu_element(const dkv_packed *c, int g, int v, int64_t row, int j) {
    int64_t e = oracle_bytes(c->type), pair = c->type == DKV_BF16 ? 2 : 1, pack = e == 1 ? 4 : pair;
    int64_t block = (c->d_k + 4 / e - 1) / (4 / e) * 64, wide = (c->d_v + 15) / 16 * 16, at = 0;
    for (int i = 0; i < g; i++) at += (c->rows[i] + 15) / 16;
    if (!v) return (char *)c->data + (at + row / 16) * block + ((j / pack * 16 + row % 16) * pack + j % pack) * e;
    int64_t all = 0;
    for (int i = 0; i < c->Hkv; i++) all += (c->rows[i] + 15) / 16;
    return (char *)c->data + all * block + at * 16 * wide * e + ((row / pair * wide + j) * pair + row % pair) * e;
}

/* The CPU's scales of KV head g: after K and V, [Hkv][d_k'] and [Hkv][d_v'], both rounded up to 16. */
static const float *cpu_scales(const dkv_packed *c, int g, int v) {
    int64_t k_block = (c->d_k + 3) / 4 * 64, wide_k = (c->d_k + 15) / 16 * 16, wide_v = (c->d_v + 15) / 16 * 16;
    int64_t all = 0;
    for (int i = 0; i < c->Hkv; i++) all += (c->rows[i] + 15) / 16;
    const float *s = (const float *)(const void *)((char *)c->data + all * (k_block + 16 * wide_v));
    return v ? s + c->Hkv * wide_k + g * wide_v : s + g * wide_k;
}

/* Elements of a row on the device. */
static int64_t row_width(const dkv_packed *c, int v) {
    int64_t to = 16 / oracle_bytes(c->type);
    return ((v ? c->d_v : c->d_k) + to - 1) / to * to;
}

/* The whole image that the header documents, made from what the CPU packed: rows to 128, widths to 16 bytes, zeros. */
static char *image_from_cpu(const dkv_packed *c, size_t *bytes) {
    int64_t e = oracle_bytes(c->type), d[] = {c->d_k, c->d_v}, wide[] = {row_width(c, 0), row_width(c, 1)}, rows = 0;
    for (int g = 0; g < c->Hkv; g++) rows += (c->rows[g] + 127) / 128 * 128;
    *bytes = (size_t)((rows * e + (has_scales(c->type) ? 4 * c->Hkv : 0)) * (wide[0] + wide[1]));
    char *image = guarded(*bytes, 16), *at = image;
    memset(image, 0, *bytes);
    for (int v = 0; v < 2; v++)
        for (int g = 0; g < c->Hkv; at += (c->rows[g++] + 127) / 128 * 128 * wide[v] * e)
            for (int64_t i = 0; i < c->rows[g]; i++)
                for (int j = 0; j < d[v]; j++)
                    memcpy(at + (i * wide[v] + j) * e, cpu_element(c, g, v, i, j), (size_t)e);
    for (int v = 0; v < 2 && has_scales(c->type); v++)
        for (int g = 0; g < c->Hkv; g++, at += 4 * wide[v]) memcpy(at, cpu_scales(c, g, v), (size_t)d[v] * 4);
    return image;
}

/* Padding channels' scales are of no consequence. */
static void check_image(const dkv_packed *dev, const dkv_packed *cpu) {
    size_t bytes;
    const char *want = image_from_cpu(cpu, &bytes), *got = to_host(dev->data, bytes);
    int64_t wide[] = {row_width(cpu, 0), row_width(cpu, 1)};
    size_t scales = has_scales(cpu->type) ? (size_t)(4 * cpu->Hkv * (wide[0] + wide[1])) : 0, rows = bytes - scales;
    for (size_t i = 0; i < rows; i++)
        if (got[i] != want[i])
            fail_msg("at %s: byte %zu of %zu is %d, not %d", test_at, i, rows, got[i] & 255, want[i] & 255);
    const float *x = (const float *)(const void *)(got + rows), *y = (const float *)(const void *)(want + rows);
    for (int v = 0; v < 2 && scales; v++)
        for (int64_t i = 0; i < cpu->Hkv * wide[v]; i++, x++, y++)
            if (i % wide[v] < (v ? cpu->d_v : cpu->d_k) && memcmp(x, y, 4))
                fail_msg("at %s: scale %d of %c is %.9g, not %.9g", test_at, (int)i, "KV"[v], (double)*x, (double)*y);
}

static void check_unpacked(const dkv_packed *dev, const dkv_packed *cpu, dkv_type to) {
    for (int g = 0; g < cpu->Hkv; g++) {
        int64_t n = cpu->rows[g];
        dkv_segment s = unpack_to_host(dev, g, to);
        dkv_tensor k = new_tensor(THD, to, n, cpu->Hkv, cpu->d_k), v = new_tensor(THD, to, n, cpu->Hkv, cpu->d_v);
        CHECK_OK(dkv_unpack(k, v, cpu, g));
        if (!n) continue;
        CHECK(!memcmp(k.data, s.k.data, (size_t)(n * k.stride_token))); /* the other heads' rows are poison in both */
        CHECK(!memcmp(v.data, s.v.data, (size_t)(n * v.stride_token)));
    }
}

static void check_packing(packing *p, dkv_type type) {
    dkv_packed dev = pack_on_device(&p->plan, 0, type, p->d_k, p->d_v, &p->dev);
    dkv_packed cpu = pack_layer(&p->plan, type, p->d_k, p->d_v, &p->host);
    CHECK(dev.type == type && dev.Hkv == p->Hkv && dev.d_k == p->d_k && dev.d_v == p->d_v && dev.rows == p->plan.rows);
    check_image(&dev, &cpu);
    for (dkv_type to = DKV_F32; to <= DKV_BF16; to = (dkv_type)(to + 1)) check_unpacked(&dev, &cpu, to);
    CHECK(release_all());
}

static void packs_like_the_cpu(void) {
    NEEDS_DEVICE;
    static const int dims[] = {8, 16, 40, 64, 72, 96, 128, 200, 256};
    for (int c = 0; c < 12 * LAYOUTS * 3; c++) {
        dkv_type from = type_at(c), to = packed_type_at(c / 3);
        int64_t T_c = c % 7 ? 1 + rnd_below(400) : 129;
        packing p = make_packing(from, c / 12 % LAYOUTS, T_c, 1 + c % 4, dims[rnd_below(COUNT(dims))],
                                 dims[rnd_below(COUNT(dims))], 0.6);
        AT("%s to %s, layout %d, d %d %d, T_c %d", dkv_type_name(from), dkv_type_name(to), c / 12 % LAYOUTS, p.d_k,
           p.d_v, (int)T_c);
        check_packing(&p, to);
    }
}

/* Rows at the edges of a tile, none at all, and all. */
static void pack_lengths(void) {
    NEEDS_DEVICE;
    static const int at[] = {0, 1, 15, 127, 128, 129, 255, 256, 257, 1000};
    for (int c = 0; c < 4 * COUNT(at) * 2; c++) {
        packing p = make_packing(DKV_BF16, THD, at[c / 4 % COUNT(at)], 2, 128, 64, c / 4 < COUNT(at) ? 2 : 0);
        AT("%s, T_c %d, %s", dkv_type_name(packed_type_at(c)), (int)p.T_c, c / 4 < COUNT(at) ? "all" : "none");
        check_packing(&p, packed_type_at(c));
    }
}

/* Infinities, overflow, subnormals, NaN, ties: the CPU's bits. */
static void pack_special_values(void) {
    NEEDS_DEVICE;
    const float x[] = {INFINITY, -INFINITY, 65519, 65520, -1e30f, 3e38f, 1e-7f, 2e-8f, 1e-40f, -0.0f, NAN, 1,
                       1.00390625f, 1.01171875f, 2049, 2051};
    enum { N = COUNT(x) };
    for (int c = 0; c < 4; c++) {
        packing p = {1, N, N, 2, plan_of_mask(NULL, 1, 1, 2), {0}, {0}};
        float both[2 * N];
        for (int i = 0; i < 2 * N; i++) both[i] = i < N ? x[i] : x[i - N] / 3;
        p.host = dkv_strided(dkv_thd(both, DKV_F32, 1, N), dkv_thd(both, DKV_F32, 1, N), 2);
        p.dev = dkv_strided(upload(&p.host.k, 2, 1, N), upload(&p.host.v, 2, 1, N), 2);
        AT("%s", dkv_type_name(packed_types[c]));
        dkv_packed dev = pack_on_device(&p.plan, 0, packed_types[c], N, N, &p.dev);
        dkv_packed cpu = pack_layer(&p.plan, packed_types[c], N, N, &p.host);
        for (int i = 0; i < 2 * N; i++) { /* values, as a NaN has many bits */
            dkv_segment got = unpack_to_host(&dev, 0, DKV_F32);
            dkv_tensor k = new_tensor(THD, DKV_F32, 2, 1, N), v = new_tensor(THD, DKV_F32, 2, 1, N);
            CHECK_OK(dkv_unpack(k, v, &cpu, 0));
            float a = ((float *)got.k.data)[i], b = ((float *)k.data)[i];
            if (!(a == b) && !(isnan(a) && isnan(b)))
                fail_msg("at %s: %a is %a, not %a", test_at, (double)both[i], (double)a, (double)b);
        }
        CHECK(release_all());
    }
}

static void pack_refuses(void) {
    NEEDS_DEVICE;
    packing p = make_packing(DKV_BF16, THD, 40, 2, 64, 32, 1);
    dkv_plan there = plan_on_device(&p.plan);
    dkv_segment s = p.dev;
    size_t need, n;
    dkv_packed out, before;
    CHECK_OK(dkv_cuda_pack(&out, NULL, &need, DKV_F16, &p.plan, &there, 0, 64, 32, &s, NULL));
    memset(&before, 0x5A, sizeof before);
    memcpy(&out, &before, sizeof out);
    char *mem = device(need + 128);
#define BAD(want, at, size, type, d_k, d_v, source) \
    AT("%s %d %d", #want, d_k, d_v); n = (size); \
    CHECK_RESULT(dkv_cuda_pack(&out, at, &n, type, &p.plan, &there, 0, d_k, d_v, source, NULL), want); \
    CHECK(!memcmp(&out, &before, sizeof out) && is_poison_on_device(mem, need + 128))
    dkv_segment shorter = s;
    shorter.n = 39;
    BAD(DKV_ERR_CAPACITY, mem, need - 1, DKV_F16, 64, 32, &s);
    BAD(DKV_ERR_CAPACITY, mem, 0, DKV_F16, 64, 32, &s);
    BAD(DKV_ERR_ALIGN, mem + 64, need, DKV_F16, 64, 32, &s);
    BAD(DKV_ERR_SHAPE, mem, need, DKV_F16, 0, 32, &s);
    BAD(DKV_ERR_SHAPE, mem, need, DKV_F16, 64, 577, &s);
    BAD(DKV_ERR_SHAPE, mem, need, DKV_F16, 64, 32, &shorter);
    BAD(DKV_ERR_TYPE, mem, need, DKV_F32, 64, 32, &s);
    BAD(DKV_ERR_TYPE, mem, need, (dkv_type)5, 64, 32, &s);
    s.k.type = DKV_I8; /* of packed data only */
    BAD(DKV_ERR_TYPE, mem, need, DKV_F16, 64, 32, &s);
#undef BAD
    CHECK(release_all());
}

/* ---- attention against the oracle ------------------------------------------------ */

static void groups_and_queries(void) {
    NEEDS_DEVICE;
    static const int G[] = {1, 2, 3, 4, 7, 8}, N_q[] = {1, 2, 5, 8, 32, 33};
    for (int c = 0; c < 4 * COUNT(G) * COUNT(N_q); c++) {
        problem p = plain_of(packed_type_at(c));
        p.Hkv = 1 + c / 4 % 2;
        p.H = p.Hkv * G[c / 4 % COUNT(G)];
        p.N_q = N_q[c / 4 / COUNT(G)];
        p.n_tail = p.N_q + rnd_below(150);
        p.T_c = 1 + rnd_below(400);
        p.d_k = p.d_v = c / 8 % 2 ? 64 : 128;
        p.out = c / 4 % 3 ? DKV_F32 : p.x;
        p.room = c / 24 % 2 ? p.n_tail + rnd_below(200) : 0;
        run_one(&p);
    }
}

static void dimensions(void) {
    NEEDS_DEVICE;
    static const int d[] = {8, 16, 40, 64, 72, 96, 128, 192, 200, 256};
    for (int c = 0; c < 4 * COUNT(d) * 3; c++) {
        problem p = plain_of(packed_type_at(c));
        p.d_k = d[c / 4 % COUNT(d)];
        p.d_v = d[(c / 4 + c / 4 / COUNT(d) * 3) % COUNT(d)]; /* equal in the first third */
        p.N_q = c / 4 % 2 ? 1 : 17;
        p.n_tail = p.N_q + 20;
        p.density = 0.8;
        run_one(&p);
    }
}

/* Around tiles: rows kept x rows of the tail. */
static void lengths(void) {
    NEEDS_DEVICE;
    static const int at[] = {0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257};
    for (int c = 0; c < COUNT(at) * COUNT(at); c++) {
        problem p = plain_of(packed_type_at(c));
        p.H = 4, p.Hkv = 1, p.density = 1;
        p.d_k = p.d_v = c % 2 ? 64 : 128;
        p.T_c = at[c % COUNT(at)];
        p.n_tail = at[c / COUNT(at)];
        p.N_q = c % 3 || p.n_tail < 40 ? 1 : 40;
        p.room = c % 5 == 1 && p.n_tail ? p.n_tail + 130 : 0;
        run_one(&p);
    }
}

/* Blocks of rows: G * N_q around 64 and 128, and thousands; few heads, as the oracle is slow. */
static void many_queries(void) {
    NEEDS_DEVICE;
    static const int N_q[] = {16, 21, 22, 42, 43, 63, 64, 65, 127, 128, 129, 300, 1024};
    for (int c = 0; c < COUNT(N_q) * 4; c++) {
        problem p = plain_of(packed_type_at(c));
        p.Hkv = 1, p.H = c / COUNT(N_q) % 2 ? 1 : 3;
        p.N_q = N_q[c % COUNT(N_q)];
        p.n_tail = p.N_q + (c % 2 ? 0 : rnd_below(200));
        p.T_c = 129 + rnd_below(100);
        p.d_k = p.d_v = c % 3 ? 128 : 64;
        run_one(&p);
    }
}

/* No context: all queries (square), a block of them at an offset, and fewer keys than queries. */
static void dense_causal(void) {
    NEEDS_DEVICE;
    static const int keys[] = {1, 2, 63, 64, 65, 127, 128, 129, 200, 257, 513};
    for (int c = 0; c < COUNT(keys) * 6; c++) {
        problem p = plain_of(c % 2 ? DKV_BF16 : DKV_F16);
        p.T_c = 0;
        p.n_tail = keys[c / 6];
        p.N_q = c % 6 < 2 ? p.n_tail : c % 6 < 4 ? 1 + p.n_tail / 3 : p.n_tail + 3;
        p.H = 3, p.Hkv = c / 6 % 2 ? 1 : 3;
        p.d_k = p.d_v = c / 6 % 3 ? 128 : 64;
        p.layout = c % 3 ? THD : HEAD_MAJOR;
        run_one(&p);
    }
}

/* Every stride that is no TMA load: transposed, reversed, odd; packed and strided contexts. */
static void layouts(void) {
    NEEDS_DEVICE;
    for (int c = 0; c < LAYOUTS * 4 * 2 * 3; c++) {
        problem p = plain_of(packed_type_at(c / LAYOUTS));
        p.layout = c % LAYOUTS;
        p.strided = c / LAYOUTS / 4 % 2 && !has_scales(p.type);
        p.d_k = p.d_v = c / LAYOUTS / 8 == 0 ? 64 : c / LAYOUTS / 8 == 1 ? 128 : 72;
        p.N_q = c % 3 ? 1 : 20;
        p.n_tail = p.N_q + 130;
        p.out = c % 2 ? DKV_F32 : p.x;
        p.room = c % 4 ? 0 : 200;
        run_one(&p);
    }
}

static void options(void) {
    NEEDS_DEVICE;
    for (int c = 0; c < 96; c++) {
        problem p = plain_of(packed_type_at(c));
        p.sink = c / 4 & 1;
        p.softcap = c / 8 & 1 ? 1.5f : 0;
        p.scale = 0.37f * (float)(c / 16 % 3);
        p.q_deviation = 2;
        p.N_q = c / 48 ? 33 : 1;
        p.n_tail = p.N_q + 4;
        p.no_lse = c % 5 == 0;
        run_one(&p);
    }
}

/* Logits up to about +-1e3 (f16's range allows no more for q): one key wins, and nothing overflows. */
static void huge_logits(void) {
    NEEDS_DEVICE;
    for (int c = 0; c < 24; c++) {
        problem p = plain_of(packed_type_at(c));
        p.q_deviation = 300;
        p.softcap = c / 4 % 2 ? 50 : 0;
        p.N_q = c / 8 ? 40 : 1;
        p.n_tail = p.N_q + 4;
        run_one(&p);
    }
}

/* Some KV heads or all keep nothing; with a sink and no key, lse is the sink's logit. */
static void nothing_to_see(void) {
    NEEDS_DEVICE;
    for (int c = 0; c < 64; c++) {
        problem p = plain_of(packed_type_at(c));
        p.density = 0;
        p.T_c = c / 4 % 2 ? 100 : 0;
        p.n_tail = c / 8 % 2 ? 2 : 0;
        p.N_q = c / 16 % 2 ? 5 : 1;
        p.sink = c / 32;
        run_one(&p);
    }
}

static void random_mix(void) {
    NEEDS_DEVICE;
    for (int c = 0; c < 150; c++) {
        problem p = plain_of(packed_type_at(rnd_below(4)));
        p.Hkv = 1 + (int)rnd_below(4);
        p.H = p.Hkv * (1 + (int)rnd_below(9));
        p.d_k = 8 * (1 + (int)rnd_below(32));
        p.d_v = rnd_below(3) ? p.d_k : 8 * (1 + (int)rnd_below(32));
        p.T_c = rnd_below(500);
        p.N_q = 1 + (rnd_below(3) ? rnd_below(8) : rnd_below(80));
        p.n_tail = p.N_q + rnd_below(200);
        p.room = rnd_below(2) ? p.n_tail + rnd_below(300) : 0;
        p.density = rnd_uniform();
        p.layout = rnd_below(2) ? THD : (int)rnd_below(LAYOUTS);
        p.strided = !has_scales(p.type) && !rnd_below(3);
        p.sink = !rnd_below(4);
        p.out = rnd_below(2) ? DKV_F32 : p.x;
        run_one(&p);
    }
}

static void batches(void) {
    NEEDS_DEVICE;
    for (int c = 0; c < 32; c++) {
        problem p[8];
        int n = 2 + (int)rnd_below(7);
        for (int i = 0; i < n; i++) {
            p[i] = plain_of(packed_type_at(c));
            p[i].T_c = rnd_below(4) ? rnd_below(600) : 0;
            p[i].N_q = c / 4 % 2 ? 1 : 1 + rnd_below(30);
            p[i].n_tail = p[i].N_q + (rnd_below(3) ? rnd_below(300) : 0);
            p[i].room = c / 8 % 2 ? p[i].n_tail + rnd_below(100) : 0;
            p[i].density = rnd_uniform();
            p[i].d_k = p[i].d_v = c / 16 ? 128 : 64;
            build(&p[i]);
        }
        run_built(p, n, 0);
        CHECK(release_all());
    }
}

/* An attention without a key has no type of its own, wherever it stands in a batch. */
static void keyless_in_a_batch(void) {
    NEEDS_DEVICE;
    for (int c = 0; c < 12; c++) {
        problem p[3];
        for (int i = 0; i < 3; i++) {
            p[i] = plain_of(packed_type_at(c));
            if (i == c / 4) p[i].T_c = p[i].n_tail = 0;
            build(&p[i]);
        }
        run_built(p, 3, 0);
        CHECK(release_all());
    }
}

/* However the work is cut. */
static void splits(void) {
    NEEDS_DEVICE;
    static const int ctas[] = {1, 2, 3, 5, 8, 13, 31, 64, 127, 128, 131, 132};
    for (int c = 0; c < 8; c++) {
        problem p = plain_of(packed_type_at(c));
        p.T_c = 2500, p.n_tail = 300, p.density = 0.4;
        p.N_q = c / 4 ? 12 : 1;
        p.H = 6;
        build(&p);
        for (int i = 0; i < COUNT(ctas); i++) run_built(&p, 1, ctas[i]);
        CHECK(release_all());
    }
}

/* Lengths of real use against the CPU backend. */
static void large(void) {
    NEEDS_DEVICE;
    for (int c = 0; c < 12; c++) {
        problem p = plain_of(packed_type_at(c));
        p.by_cpu = 1;
        p.H = c / 4 ? 8 : 32, p.Hkv = c / 4 ? 2 : 8;
        p.T_c = c / 4 == 2 ? 0 : 9000, p.density = 0.4;
        p.N_q = c / 4 == 0 ? 1 : c / 4 == 1 ? 1024 : 2048;
        p.n_tail = p.N_q + (c % 2 ? 1000 : 0);
        if (!p.T_c) p.type = p.x;
        run_one(&p);
    }
}

/* ---- NaN, bits, streams ------------------------------------------------------------ */

/* Results as bytes: out, then lse. */
static char *results_of(const problem *p, size_t *bytes) {
    size_t out = (size_t)(p->N_q * p->H * p->d_v * oracle_bytes(p->out)), lse = (size_t)(p->N_q * p->H) * 4;
    char *x = guarded(out + lse, 16);
    CUDA(cudaMemcpy(x, p->a.out.data, out, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(x + out, p->a.lse, lse, cudaMemcpyDeviceToHost));
    *bytes = out + lse;
    return x;
}

static void nan_in_one_query(void) {
    NEEDS_DEVICE;
    int arch[PATHS], paths = archs(arch);
    for (int c = 0; c < 8 * paths; c++) {
        problem p = plain_of(packed_type_at(c / 2));
        p.N_q = c % 2 ? 40 : 5, p.n_tail = p.N_q + 10;
        CHECK_INT(dkv_cuda_limit(arch[c / 8]), arch[c / 8]);
        describe(&p, 1, arch[c / 8], 0);
        build(&p);
        const int64_t row = (p.N_q / 2) * p.H + 3; /* one head of one query */
        uint16_t nan = 0x7fff;
        CUDA(cudaMemcpy((char *)p.a.q.data + row * p.d_k * 2 + 34, &nan, 2, cudaMemcpyHostToDevice));
        launch l = prepare(&p, 1, 0);
        CHECK_OK(dkv_cuda_attend(&l.work, NULL));
        CUDA(cudaStreamSynchronize(NULL));
        const float *out = to_host(p.a.out.data, (size_t)(p.N_q * p.H * p.d_v) * 4);
        const float *lse = to_host(p.a.lse, (size_t)(p.N_q * p.H) * 4);
        for (int64_t r = 0; r < p.N_q * p.H; r++) {
            CHECK(!isnan(lse[r]) == (r != row));
            for (int i = 0; i < p.d_v; i++) CHECK(!isnan(out[r * p.d_v + i]) == (r != row));
        }
        CHECK(release_all());
    }
}

/* The same bits in 50 launches, each over the workspace that others left dirty. */
static void reruns(void) {
    NEEDS_DEVICE;
    int arch[PATHS], paths = archs(arch);
    for (int c = 0; c < 12 * paths; c++) {
        problem p = plain_of(packed_type_at(c));
        p.T_c = 3000, p.n_tail = 200, p.N_q = c / 4 % 3 == 0 ? 1 : c / 4 % 3 == 1 ? 8 : 130;
        p.by_cpu = 1;
        CHECK_INT(dkv_cuda_limit(arch[c / 12]), arch[c / 12]);
        describe(&p, 1, arch[c / 12], 0);
        build(&p);
        launch l = prepare(&p, 1, 0);
        run_prepared(&p, 1, &l);
        poison_results(&p);
        CHECK_OK(dkv_cuda_attend(&l.work, NULL));
        CUDA(cudaStreamSynchronize(NULL));
        size_t bytes;
        const char *first = results_of(&p, &bytes);
        for (int i = 0; i < 50; i++) {
            poison_results(&p);
            if (i % 10 == 0) CUDA(cudaMemset(l.ws, TEST_POISON, l.ws_bytes));
            CHECK_OK(dkv_cuda_attend(&l.work, NULL));
            CUDA(cudaStreamSynchronize(NULL));
            CHECK(!memcmp(results_of(&p, &bytes), first, bytes));
        }
        CHECK(release_all());
    }
}

static void attend_all(const launch *l, int n, int wait) {
    for (int i = 0; i < n; i++) {
        CHECK_OK(dkv_cuda_attend(&l[i].work, NULL));
        if (wait) CUDA(cudaDeviceSynchronize());
    }
}

/* Layers as an engine runs them: each one's queries are the output of the one before, all share a workspace, and no one
   waits in between. The same bits as one by one. */
static void chained_launches(void) {
    NEEDS_DEVICE;
    static const int N_q[] = {1, 8, 130};
    int arch[PATHS], paths = archs(arch);
    for (int c = 0; c < COUNT(N_q) * paths; c++) {
        problem p[3];
        launch l[3];
        CHECK_INT(dkv_cuda_limit(arch[c / COUNT(N_q)]), arch[c / COUNT(N_q)]);
        for (int i = 0; i < 3; i++) {
            p[i] = plain_of(DKV_BF16);
            p[i].out = DKV_BF16, p[i].T_c = 400 + 700 * i, p[i].by_cpu = 1;
            p[i].N_q = N_q[c % COUNT(N_q)], p[i].n_tail = p[i].N_q + 50, p[i].room = i == 1 ? p[i].n_tail + 100 : 0;
            describe(&p[i], 1, arch[c / COUNT(N_q)], 0);
            build(&p[i]);
            if (i) p[i].a.q = p[i - 1].a.out;
            l[i] = prepare(&p[i], 1, 0);
        }
        for (int i = 0; i < 2; i++) /* the largest workspace serves all */
            CHECK_OK(dkv_cuda_prepare(&l[i].work, &p[i].a, 1, l[i].lengths, l[i].block, l[i].block_bytes, l[2].ws,
                                      l[2].ws_bytes, 0, NULL));
        for (int i = 0; i < 3; i++) poison_results(&p[i]);
        attend_all(l, 3, 1);
        check_results(&p[0]);
        size_t bytes;
        const char *alone = results_of(&p[2], &bytes);
        for (int turn = 0; turn < 50; turn++) {
            for (int i = 0; i < 3; i++) poison_results(&p[i]);
            attend_all(l, 3, 0);
            CHECK(!memcmp(results_of(&p[2], &bytes), alone, bytes));
        }
        for (int turn = 0; turn < 50; turn++) attend_all(l, 3, 0); /* and each overtaken by itself */
        CHECK(!memcmp(results_of(&p[2], &bytes), alone, bytes));
        CHECK(release_all());
    }
}

/* Two works on two streams, 50 times at once, then compared with what each gives alone. */
static void two_streams(void) {
    NEEDS_DEVICE;
    int arch[PATHS], paths = archs(arch);
    for (int c = 0; c < 2 * paths; c++) {
        problem p[] = {plain_of(DKV_BF16), plain_of(c % 2 ? DKV_I8 : DKV_F16)};
        launch l[2];
        cudaStream_t stream[2];
        const char *alone[2];
        size_t bytes[2];
        CHECK_INT(dkv_cuda_limit(arch[c / 2]), arch[c / 2]);
        for (int i = 0; i < 2; i++) {
            p[i].T_c = 3000, p[i].by_cpu = 1, p[i].N_q = 1 + 20 * i, p[i].n_tail = 100;
            describe(&p[i], 1, arch[c / 2], 0);
            build(&p[i]);
            l[i] = prepare(&p[i], 1, 0);
            run_prepared(&p[i], 1, &l[i]);
            poison_results(&p[i]);
            CHECK_OK(dkv_cuda_attend(&l[i].work, NULL));
            CUDA(cudaStreamSynchronize(NULL));
            alone[i] = results_of(&p[i], &bytes[i]);
            poison_results(&p[i]);
            CUDA(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
        }
        CUDA(cudaDeviceSynchronize());
        for (int turn = 0; turn < 100; turn++) CHECK_OK(dkv_cuda_attend(&l[turn % 2].work, stream[turn % 2]));
        for (int i = 0; i < 2; i++) CUDA(cudaStreamSynchronize(stream[i]));
        for (int i = 0; i < 2; i++) {
            CHECK(!memcmp(results_of(&p[i], &bytes[i]), alone[i], bytes[i]));
            CUDA(cudaStreamDestroy(stream[i]));
        }
        CHECK(release_all());
    }
}

/* ---- a generation: one graph, replayed while the tail grows --------------------------- */

typedef struct generation {
    problem p;               /* n_tail is the current length */
    double *all_k, *all_v;   /* [ROOM][Hkv][d]: what will be appended */
    dkv_tensor new_k, new_v; /* staging, [N_q][Hkv][d] f32 on the device */
    launch l;
    cudaStream_t stream;
    cudaGraphExec_t graph;
} generation;

enum { ROOM = 320 };

static void capture(generation *g) {
    cudaGraph_t graph;
    CUDA(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
    CUDA(cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal));
    CHECK_OK(dkv_cuda_advance(g->l.lengths, 1, g->p.N_q, g->stream));
    CHECK_OK(dkv_cuda_append(&g->l.work, g->new_k, g->new_v, g->stream));
    CHECK_OK(dkv_cuda_attend(&g->l.work, g->stream));
    CUDA(cudaStreamEndCapture(g->stream, &graph));
    CUDA(cudaGraphInstantiate(&g->graph, graph, 0));
    CUDA(cudaGraphDestroy(graph));
}

/* The tail's N_q rows from row from on, as f32 in the staging buffer. */
static void stage(const dkv_tensor *t, const double *all, int64_t from, int64_t n, int heads, int d) {
    float *x = guarded((size_t)(n * heads * d) * 4, 4);
    for (int64_t i = 0; i < n * heads * d; i++) x[i] = (float)all[from * heads * d + i];
    CUDA(cudaMemcpy(t->data, x, (size_t)(n * heads * d) * 4, cudaMemcpyHostToDevice));
}

/* A step as an engine takes it: new tokens, new queries, one graph launch; then the oracle's opinion. */
static void step(generation *g) {
    problem *p = &g->p;
    stage(&g->new_k, g->all_k, p->n_tail, p->N_q, p->Hkv, p->d_k);
    stage(&g->new_v, g->all_v, p->n_tail, p->N_q, p->Hkv, p->d_v);
    dkv_tensor q = host_tensor(p->layout, p->x, p->N_q, p->H, p->d_k);
    p->q = normal_values(p->N_q * p->H * p->d_k, p->x, 1);
    fill_tensor(&q, p->q, p->N_q, p->H, p->d_k);
    int64_t low;
    size_t bytes = tensor_span(&q, p->N_q, p->H, p->d_k, &low);
    CUDA(cudaMemcpy((char *)p->a.q.data + low, (char *)q.data + low, bytes, cudaMemcpyHostToDevice));
    poison_results(p);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaGraphLaunch(g->graph, g->stream));
    CUDA(cudaStreamSynchronize(g->stream));
    p->n_tail += p->N_q;
    AT("%s N_q %d layout %d length %d", dkv_type_name(p->type), (int)p->N_q, p->layout, (int)p->n_tail);
    allocate_wanted(p);
    ask_oracle(p);
    check_results(p);
}

static void set_length(generation *g, int64_t n) {
    g->p.n_tail = n;
    CUDA(cudaMemcpy(g->l.lengths, &n, 8, cudaMemcpyHostToDevice));
}

/* All of the tail past its length becomes NaN. */
static void poison_slack(const generation *g) {
    const problem *p = &g->p;
    dkv_tensor k = p->a.tail.k, v = p->a.tail.v;
    for (int64_t row = p->n_tail; row < ROOM; row++)
        for (int h = 0; h < p->Hkv; h++) {
            CUDA(cudaMemset(oracle_at(&k, row, h, 0), TEST_POISON, (size_t)(p->d_k * oracle_bytes(p->x))));
            CUDA(cudaMemset(oracle_at(&v, row, h, 0), TEST_POISON, (size_t)(p->d_v * oracle_bytes(p->x))));
        }
}

static void generate(dkv_type type, int64_t N_q, int layout, int T_c) {
    generation g = {.p = plain_of(type)};
    problem *p = &g.p;
    p->N_q = N_q, p->layout = layout, p->T_c = T_c, p->n_tail = 0, p->room = ROOM;
    p->H = 6, p->d_k = p->d_v = 64;
    build(p);
    g.all_k = p->tail_k = normal_values(ROOM * p->Hkv * p->d_k, p->x, 1);
    g.all_v = p->tail_v = normal_values(ROOM * p->Hkv * p->d_v, p->x, 1);
    g.new_k = fill_on_device(THD, DKV_F32, NULL, 0, N_q, p->Hkv, p->d_k);
    g.new_v = fill_on_device(THD, DKV_F32, NULL, 0, N_q, p->Hkv, p->d_v);
    g.l = prepare(p, 1, 0);
    capture(&g);
    while (p->n_tail < 300) step(&g);
    set_length(&g, 100);
    poison_slack(&g);
    while (p->n_tail < 150) step(&g);
    set_length(&g, 0);
    poison_slack(&g);
    for (int i = 0; i < 3; i++) step(&g);
    CUDA(cudaGraphExecDestroy(g.graph));
    CUDA(cudaStreamDestroy(g.stream));
    CHECK(release_all());
}

static void graph_replays(void) {
    NEEDS_DEVICE;
    int arch[PATHS], paths = archs(arch);
    for (int i = 0; i < paths; i++) {
        CHECK_INT(dkv_cuda_limit(arch[i]), arch[i]);
        generate(DKV_BF16, 1, THD, 150);
        generate(DKV_F16, 1, HEAD_MAJOR, 0);
        generate(DKV_I8, 3, HEAD_MAJOR, 257);
        generate(DKV_FP8, 1, THD, 128);
        generate(DKV_BF16, 25, HEAD_MAJOR, 40);
    }
}

/* A device length beyond the tail counts as the tail's, one below 0 as 0; below N_q, the first queries see less. */
static void wild_lengths(void) {
    NEEDS_DEVICE;
    const int64_t wild[] = {141, INT64_MAX, 140, 5, 4, 1, 0, -1, INT64_MIN};
    int arch[PATHS], paths = archs(arch);
    for (int c = 0; c < 4; c++) {
        problem p = plain_of(packed_type_at(c));
        p.N_q = 5, p.room = p.n_tail = 140;
        build(&p);
        for (int j = 0; j < COUNT(wild) * paths; j++) {
            int64_t length = wild[j / paths];
            CHECK_INT(dkv_cuda_limit(arch[j % paths]), arch[j % paths]);
            p.n_tail = length > 140 ? 140 : length < 0 ? 0 : length;
            describe(&p, 1, arch[j % paths], 0);
            allocate_wanted(&p);
            ask_oracle(&p);
            launch l = prepare(&p, 1, 0);
            CUDA(cudaMemcpy(l.lengths, &length, 8, cudaMemcpyHostToDevice));
            run_prepared(&p, 1, &l);
        }
        CHECK(release_all());
    }
}

/* The tail's last N_q rows are those of added [N_q][Hkv][d], the ones before are as they were, those behind NaN. */
static void check_appended(const problem *p, const dkv_tensor *tail, const double *old, const double *added,
                           dkv_type from) {
    int64_t rows = p->room ? p->room : p->n_tail, row_size = p->Hkv * p->d_k, begin = (p->n_tail - p->N_q) * row_size;
    dkv_tensor host = host_tensor(p->layout, p->x, rows, p->Hkv, p->d_k);
    download(&host, tail, rows, p->Hkv, p->d_k);
    for (int64_t i = 0; i < rows * row_size; i++) {
        double got = oracle_get(&host, i / row_size, i / p->d_k % p->Hkv, i % p->d_k);
        if (i >= p->n_tail * row_size) CHECK(isnan(got));
        else if (i < begin) CHECK(got == old[i]);
        else CHECK(got == oracle_round(p->x, oracle_round(from, added[i - begin])));
    }
    CHECK(gaps_are_poison(&host, rows, p->Hkv, p->d_k));
}

/* Of a batch: one attention after another, at each one's own length. */
static void append_to_a_batch(void) {
    NEEDS_DEVICE;
    static const int N_q[] = {1, 4, 2};
    for (int c = 0; c < 4 * LAYOUTS * 3; c++) {
        problem p[3];
        dkv_type from = type_at(c);
        int d = c / 12 % 2 ? 72 : 128;
        double *k = normal_values(7 * 2 * d, DKV_F32, 1), *v = normal_values(7 * 2 * d, DKV_F32, 1);
        for (int i = 0; i < 3; i++) {
            p[i] = plain_of(packed_type_at(c));
            p[i].N_q = N_q[i], p[i].n_tail = N_q[i] + rnd_below(10), p[i].room = c % 5 ? p[i].n_tail + 3 : 0;
            p[i].layout = c / 4 % LAYOUTS, p[i].d_k = p[i].d_v = d;
            build(&p[i]);
        }
        describe(&p[1], 3, 0, 0);
        launch l = prepare(p, 3, 0);
        dkv_tensor new_k = fill_on_device((c + 1) % LAYOUTS, from, k, 7, 7, 2, d);
        dkv_tensor new_v = fill_on_device((c + 2) % LAYOUTS, from, v, 7, 7, 2, d);
        CHECK_OK(dkv_cuda_append(&l.work, new_k, new_v, NULL));
        CUDA(cudaStreamSynchronize(NULL));
        for (int i = 0, first = 0; i < 3; first += N_q[i++]) {
            check_appended(&p[i], &p[i].a.tail.k, p[i].tail_k, k + first * 2 * d, from);
            check_appended(&p[i], &p[i].a.tail.v, p[i].tail_v, v + first * 2 * d, from);
        }
        CHECK(release_all());
    }
}

/* ---- offsets past 2^31 and 2^32 elements ------------------------------------------------ */

static void *far_memory(size_t bytes) {
    void *p = NULL;
    size_t free_bytes, total;
    CUDA(cudaMemGetInfo(&free_bytes, &total));
    if (free_bytes < bytes + ((size_t)1 << 30)) skip(); /* a small device */
    CUDA(cudaMalloc(&p, bytes));
    return p;
}

/* Strided tensors whose heads or tokens lie 2^32 elements apart, over memory that is mostly never touched. */
static void far_strides(void) {
    NEEDS_DEVICE;
    const int64_t far = ((int64_t)1 << 33) + 256, step_bytes = (int64_t)1 << 26; /* 2^32 and 2^25 elements of 2 bytes */
    char *map = far_memory((size_t)(2 * far + 4096));
    for (int c = 0; c < 4; c++) {
        problem p = plain_of(c % 2 ? DKV_BF16 : DKV_F16);
        p.strided = 1, p.Hkv = 2, p.H = 4, p.T_c = 130, p.d_k = p.d_v = c / 2 ? 64 : 128;
        build(&p);
        dkv_tensor k = {map, p.x, p.d_k * 2, far, 2}, v = {map + far / 2 + (1 << 20), p.x, step_bytes, p.d_v * 2, 2};
        for (int64_t i = 0; i < p.T_c * p.Hkv; i++) {
            CUDA(cudaMemcpy(oracle_at(&k, i / p.Hkv, i % p.Hkv, 0), oracle_at(&p.a.context.k, i / p.Hkv, i % p.Hkv, 0),
                            (size_t)p.d_k * 2, cudaMemcpyDeviceToDevice));
            CUDA(cudaMemcpy(oracle_at(&v, i / p.Hkv, i % p.Hkv, 0), oracle_at(&p.a.context.v, i / p.Hkv, i % p.Hkv, 0),
                            (size_t)p.d_v * 2, cudaMemcpyDeviceToDevice));
        }
        dkv_segment source = dkv_strided(k, v, p.T_c);
        p.a.context = source;
        run_built(&p, 1, 0);
        p.plan = plan_of_mask(p.keep, 1, p.Hkv, p.T_c); /* and as the source of packing */
        p.context = pack_on_device(&p.plan, 0, p.type, p.d_k, p.d_v, &source);
        p.a.context = (dkv_segment){.packed = &p.context};
        run_built(&p, 1, 0);
        CHECK(release_all());
    }
    CUDA(cudaFree(map));
}

/* 5.4e9 packed elements: all rows of a head are alike (a source of token stride 0), so that an offset that wraps around
   lands in another head and shows. */
static void far_rows(void) {
    NEEDS_DEVICE;
    enum { HEADS = 40, D = 64 };
    const int64_t T_c = (int64_t)1 << 20;
    dkv_plan plan = plan_of_mask(NULL, 1, HEADS, T_c), there = plan_on_device(&plan);
    double *x = normal_values(HEADS * D, DKV_BF16, 1);
    dkv_tensor q = fill_on_device(THD, DKV_BF16, x, 1, 1, HEADS, D), kv = q;
    kv.stride_token = 0;
    dkv_segment source = dkv_strided(kv, kv, T_c);
    dkv_packed packed;
    size_t bytes;
    CHECK_OK(dkv_cuda_pack(&packed, NULL, &bytes, DKV_BF16, &plan, &there, 0, D, D, &source, NULL));
    void *memory = far_memory(bytes);
    CHECK_OK(dkv_cuda_pack(&packed, memory, &bytes, DKV_BF16, &plan, &there, 0, D, D, &source, NULL));
    problem p = {.a = {.H = HEADS, .Hkv = HEADS, .d_k = D, .d_v = D, .N_q = 1, .q = q, .lse = device(HEADS * 4),
                       .out = fill_on_device(THD, DKV_F32, NULL, 0, 1, HEADS, D), .context.packed = &packed}};
    int arch[PATHS], paths = archs(arch);
    for (int i = 0; i < paths; i++) {
        CHECK_INT(dkv_cuda_limit(arch[i]), arch[i]);
        launch l = prepare(&p, 1, 0);
        CHECK_OK(dkv_cuda_attend(&l.work, NULL));
        CUDA(cudaStreamSynchronize(NULL));
        const float *out = to_host(p.a.out.data, HEADS * D * 4), *lse = to_host(p.a.lse, HEADS * 4);
        for (int h = 0; h < HEADS; h++) {
            double s = 0;
            for (int j = 0; j < D; j++) s += x[h * D + j] * x[h * D + j] / 8;
            AT("head %d sm_%d", h, arch[i]);
            CHECK(fabs((double)lse[h] - s - 20 * log(2)) < 1e-3);
            for (int j = 0; j < D; j++) CHECK(fabs((double)out[h * D + j] - x[h * D + j]) <= fabs(x[h * D + j]) / 64);
        }
    }
    CUDA(cudaFree(memory));
    CHECK(release_all());
}

/* ---- refusals ---------------------------------------------------------------------------- */

static void refusals(void) {
    NEEDS_DEVICE;
    problem p = plain_of(DKV_F16), eight = plain_of(DKV_I8);
    build(&p);
    build(&eight);
    launch good = prepare(&p, 1, 0);
    char *block = device(good.block_bytes + 128), *ws = device(good.ws_bytes + 128);
    dkv_cuda_work work, before;
    memset(&before, 0x5A, sizeof before);
    memcpy(&work, &before, sizeof work);
    dkv_attention a;
    size_t b, w;
#define TRY(want, block_at, b_bytes, ws_at, w_bytes) \
    CHECK_RESULT(dkv_cuda_prepare(&work, &a, 1, NULL, block_at, b_bytes, ws_at, w_bytes, 0, NULL), want); \
    CHECK(!memcmp(&work, &before, sizeof work)); \
    CHECK(is_poison_on_device(block, good.block_bytes + 128) && is_poison_on_device(ws, good.ws_bytes + 128))
#define BAD(want, change) \
    a = p.a; change; AT("%s: %s", #want, #change); b = w = 77; \
    CHECK_RESULT(dkv_cuda_attend_size(&b, &w, &a, 1), want); CHECK(b == 77 && w == 77); \
    TRY(want, block, good.block_bytes, ws, good.ws_bytes)
    BAD(DKV_ERR_SHAPE, a.H = 7);            BAD(DKV_ERR_SHAPE, a.Hkv = 0);           BAD(DKV_ERR_SHAPE, a.N_q = -1);
    BAD(DKV_ERR_SHAPE, a.d_k = 12);         BAD(DKV_ERR_SHAPE, a.d_v = 264);         BAD(DKV_ERR_SHAPE, a.d_k = 0);
    BAD(DKV_ERR_SHAPE, a.d_v = 64);         BAD(DKV_ERR_SHAPE, a.tail.n = -1);       BAD(DKV_ERR_FIELD, a.scale = -1);
    BAD(DKV_ERR_FIELD, a.scale = NAN);      BAD(DKV_ERR_FIELD, a.softcap = -1);
    BAD(DKV_ERR_FIELD, a.softcap = INFINITY);
    BAD(DKV_ERR_TYPE, a.q.type = DKV_I8);   BAD(DKV_ERR_TYPE, a.out.type = DKV_FP8);
    BAD(DKV_ERR_TYPE, a.tail.k.type = DKV_F32); BAD(DKV_ERR_TYPE, a.tail.v.type = DKV_BF16);
    BAD(DKV_ERR_TYPE, a.tail.k.type = a.tail.v.type = DKV_BF16);
    BAD(DKV_ERR_TYPE, a.context = eight.a.context; a.tail.k.type = a.tail.v.type = DKV_BF16);
    BAD(DKV_ERR_ALIGN, a.q.data = (char *)a.q.data + 1); BAD(DKV_ERR_ALIGN, a.out.stride_token += 1);
    BAD(DKV_ERR_ALIGN, a.tail.k.stride_head += 1);       BAD(DKV_ERR_ALIGN, a.tail.v.stride_dim = 3);
#undef BAD
    a = p.a;
    a.context.rows = p.context.rows, a.context.n = -1; /* of no meaning beside packed */
    CHECK_OK(dkv_cuda_attend_size(&b, &w, &a, 1));
    a = p.a;
    AT("buffers");
    TRY(DKV_ERR_CAPACITY, block, 127, ws, good.ws_bytes);
    TRY(DKV_ERR_ALIGN, block + 64, good.block_bytes, ws, good.ws_bytes);
    if (good.ws_bytes) {
        TRY(DKV_ERR_CAPACITY, block, good.block_bytes, ws, 127);
        TRY(DKV_ERR_ALIGN, block, good.block_bytes, ws + 64, good.ws_bytes);
    }
#undef TRY
    run_prepared(&p, 1, &good);
    CHECK(release_all());
}

/* An error that the caller's thread still holds is not ours. */
static void errors_of_others(void) {
    NEEDS_DEVICE;
    void *none = NULL;
    int64_t two = 2, *length = to_device(&two, 8);
    CHECK(cudaMalloc(&none, (size_t)1 << 60) != cudaSuccess && cudaPeekAtLastError() != cudaSuccess);
    CHECK_OK(dkv_cuda_advance(length, 1, 3, NULL));
    CHECK(cudaGetLastError() != cudaSuccess);
    CHECK_INT(*(int64_t *)to_host(length, 8), 5);
    CHECK(release_all());
}

/* ---- cache --------------------------------------------------------------------------------- */

enum { L = 2, H = 6, HKV = 2, LONGEST = 400, CAP = 60 };

/* The same conversation on both sides. */
typedef struct world {
    dkv_type type;
    dkv_shape shape;
    dkv_plan plan;
    int64_t T_c;
    dkv_tensor k[L], v[L], dev_k[L], dev_v[L]; /* f32 [LONGEST][HKV][d] */
} world;

static world make_world(dkv_type type, int64_t T_c, int d_k, int d_v) {
    world w = {.type = type, .shape = {L, H, HKV, d_k, d_v}, .T_c = T_c};
    unsigned char *keep = guarded((size_t)(L * HKV * T_c), 1);
    for (int64_t i = 0; i < L * HKV * T_c; i++) keep[i] = rnd_uniform() < 0.5;
    w.plan = plan_of_mask(keep, L, HKV, T_c);
    for (int l = 0; l < L; l++)
        for (int i = 0; i < 2; i++) {
            dkv_tensor *t = i ? &w.v[l] : &w.k[l];
            int d = i ? d_v : d_k;
            *t = new_tensor(THD, DKV_F32, LONGEST, HKV, d);
            fill_tensor(t, normal_values(LONGEST * HKV * d, DKV_F32, 1), LONGEST, HKV, d);
            *(i ? &w.dev_v[l] : &w.dev_k[l]) = upload(t, LONGEST, HKV, d);
        }
    return w;
}

static dkv_tensor from_token(dkv_tensor t, int64_t token) {
    t.data = (char *)t.data + token * t.stride_token;
    return t;
}

static dkv_cache *cpu_cache(const world *w) {
    dkv_cache *c;
    CHECK_OK(dkv_cache_create(&c, &w->plan, &w->shape, w->type, CAP, NULL));
    for (int l = 0; l < L && w->T_c; l++) {
        dkv_segment s = dkv_strided(w->k[l], w->v[l], w->T_c);
        CHECK_OK(dkv_cache_pack(c, l, &s));
    }
    return c;
}

static dkv_cuda_cache *gpu_cache(const world *w) {
    dkv_cuda_cache *c = NULL;
    CHECK_OK(dkv_cuda_cache_create(&c, &w->plan, &w->shape, w->type, CAP));
    int64_t before = dkv_cuda_cache_bytes(c);
    for (int l = L - 1; l >= 0 && w->T_c; l--) {
        dkv_segment s = dkv_strided(w->dev_k[l], w->dev_v[l], w->T_c);
        CHECK_OK(dkv_cuda_cache_pack(c, l, &s, NULL));
        CHECK_RESULT(dkv_cuda_cache_pack(c, l, &s, NULL), DKV_ERR_STATE);
    }
    CHECK(dkv_cuda_cache_bytes(c) >= before + (w->T_c ? dkv_kv_bytes_packed(&w->plan, &w->shape, w->type) : 0));
    CHECK(dkv_cuda_cache_plan(c)->T_c == w->T_c && dkv_cuda_cache_plan(c)->runs != w->plan.runs);
    CHECK_OK(dkv_cuda_cache_truncate(c, 0, NULL));
    return c;
}

/* A step of both: the next n tokens are appended to every layer and asked about. Outputs agree; that attention is right
   is shown above, here every output may move by its spread's greatest. */
static void step_both(const world *w, dkv_cuda_cache *gpu, dkv_cache *cpu, int64_t n) {
    const int d_k = w->shape.d_k, d_v = w->shape.d_v;
    const int64_t at = w->T_c + dkv_cache_tail(cpu, 0);
    dkv_type x = dkv_tail_type(w->type);
    CHECK_OK(dkv_cuda_advance(dkv_cuda_cache_length(gpu), 1, n, NULL));
    for (int l = 0; l < L; l++) {
        double *q = normal_values(n * H * d_k, x, 1);
        dkv_tensor host_q = new_tensor(THD, DKV_F32, n, H, d_k), host_out = new_tensor(THD, DKV_F32, n, H, d_v);
        dkv_tensor out = upload(&host_out, n, H, d_v), got = new_tensor(THD, DKV_F32, n, H, d_v);
        fill_tensor(&host_q, q, n, H, d_k);
        dkv_attention a = dkv_cuda_cache_attention(gpu, l, fill_on_device(THD, x, q, n, n, H, d_k), n, out);
        launch g = {.lengths = dkv_cuda_cache_length(gpu)};
        CHECK(a.H == H && a.Hkv == HKV && a.d_k == d_k && a.d_v == d_v && a.N_q == n);
        CHECK_OK(dkv_cuda_attend_size(&g.block_bytes, &g.ws_bytes, &a, 1));
        g.block = device(g.block_bytes), g.ws = device(g.ws_bytes);
        CHECK_OK(dkv_cuda_prepare(&g.work, &a, 1, g.lengths, g.block, g.block_bytes, g.ws, g.ws_bytes, 0, NULL));
        CHECK_OK(dkv_cuda_append(&g.work, from_token(w->dev_k[l], at), from_token(w->dev_v[l], at), NULL));
        CHECK_OK(dkv_cuda_attend(&g.work, NULL));
        CUDA(cudaStreamSynchronize(NULL));
        download(&got, &out, n, H, d_v);
        CHECK_OK(dkv_cache_append(cpu, l, from_token(w->k[l], at), from_token(w->v[l], at), n));
        a = dkv_cache_attention(cpu, l, host_q, n, host_out);
        size_t bytes;
        CHECK_OK(dkv_attend_size(&bytes, &a, 1, 64));
        CHECK_OK(dkv_attend(&a, 1, guarded(bytes, 64), bytes, NULL));
        for (int64_t i = 0; i < n * H * d_v; i++) {
            double x_gpu = (double)((float *)got.data)[i], x_cpu = (double)((float *)host_out.data)[i];
            if (!(fabs(x_gpu - x_cpu) <= tolerance_gpu_out(w->type, d_k, d_k, 4, 1, LONGEST)))
                fail_msg("at %s: layer %d out %d is %g, not %g", test_at, l, (int)i, x_gpu, x_cpu);
        }
    }
}

static char *image_of(const dkv_cache *c, size_t *bytes) {
    CHECK_OK(dkv_cache_save(NULL, bytes, c));
    char *image = guarded(*bytes, 1);
    CHECK_OK(dkv_cache_save(image, bytes, c));
    return image;
}

/* What the GPU holds is what the CPU's cache would save: packed bytes, scales, tail. */
static void check_same_image(const dkv_cuda_cache *gpu, const dkv_cache *cpu) {
    dkv_cache *down = NULL;
    size_t a, b;
    CHECK_OK(dkv_cuda_cache_download(&down, gpu, dkv_cache_capacity(cpu), NULL, NULL));
    const char *got = image_of(down, &a), *want = image_of(cpu, &b);
    dkv_cache_destroy(down);
    CHECK_INT(a, b);
    for (size_t i = 0; i < a; i++)
        if (got[i] != want[i]) fail_msg("at %s: images differ at byte %zu of %zu", test_at, i, a);
}

static size_t device_memory_free(void) {
    size_t free_bytes, total;
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemGetInfo(&free_bytes, &total));
    return free_bytes;
}

static void cache_life(void) {
    NEEDS_DEVICE;
    static const int T_c[] = {0, 1, 127, 300};
    enum { CASES = 4 * COUNT(T_c) };
    int arch[PATHS], paths = archs(arch);
    size_t before = 0;
    for (int i = 0; i < 2 * CASES; i++) { /* twice: the first time, kernels are loaded into device memory */
        if (i == CASES) before = device_memory_free();
        int c = i % CASES;
        CHECK_INT(dkv_cuda_limit(arch[c / 4 % paths]), arch[c / 4 % paths]);
        world w = make_world(packed_type_at(c), T_c[c / 4], c % 3 ? 64 : 40, c % 3 ? 64 : 24);
        AT("%s T_c %d", dkv_type_name(w.type), (int)w.T_c);
        dkv_cuda_cache *gpu = gpu_cache(&w), *fork = NULL, *up = NULL;
        dkv_cache *cpu = cpu_cache(&w), *cpu_fork = NULL;
        check_same_image(gpu, cpu);
        for (int n = 1; n <= 7; n += 3) {
            step_both(&w, gpu, cpu, n);
            check_same_image(gpu, cpu);
        }
        CHECK_OK(dkv_cuda_cache_fork(&fork, gpu, 2 * CAP, NULL));
        CHECK_OK(dkv_cache_fork(&cpu_fork, cpu, 2 * CAP));
        step_both(&w, gpu, cpu, 9);
        CHECK_OK(dkv_cuda_cache_truncate(fork, 5, NULL));
        CHECK_OK(dkv_cache_truncate(cpu_fork, 5));
        step_both(&w, fork, cpu_fork, 2);
        check_same_image(fork, cpu_fork);
        check_same_image(gpu, cpu);
        dkv_cuda_cache_destroy(gpu); /* the fork keeps the packed part */
        step_both(&w, fork, cpu_fork, 70);
        check_same_image(fork, cpu_fork);
        CHECK_OK(dkv_cuda_cache_upload(&up, cpu_fork, 2 * CAP, NULL));
        check_same_image(up, cpu_fork);
        step_both(&w, up, cpu_fork, 3);
        check_same_image(up, cpu_fork);
        dkv_cuda_cache_destroy(up);
        dkv_cuda_cache_destroy(fork);
        dkv_cache_destroy(cpu);
        dkv_cache_destroy(cpu_fork);
        CHECK(release_all());
    }
    CHECK_INT(device_memory_free(), before); /* nothing is left behind */
}

/* What one stream does with a cache does not wait for another, and is not undone by it. */
static void cache_streams(void) {
    NEEDS_DEVICE;
    enum { BUSY = 64 };
    const size_t much = (size_t)1 << 28;
    world w = make_world(DKV_BF16, 127, 64, 64);
    dkv_cuda_cache *gpu = gpu_cache(&w), *fork;
    dkv_cache *cpu = cpu_cache(&w), *down;
    cudaStream_t stream;
    void *busy;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc(&busy, much));
    step_both(&w, gpu, cpu, 7);
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < BUSY; i++) CUDA(cudaMemsetAsync(busy, i, much, NULL));
    CHECK_OK(dkv_cuda_cache_fork(&fork, gpu, CAP, stream));
    CUDA(cudaDeviceSynchronize());
    check_same_image(fork, cpu);
    CHECK_OK(dkv_cuda_advance(dkv_cuda_cache_length(fork), 1, INT64_MAX - 7, stream)); /* beyond the capacity, 128 */
    CHECK_OK(dkv_cuda_cache_download(&down, fork, 200, NULL, stream));
    CHECK_INT(dkv_cache_tail(down, 0), 128);
    dkv_cache_destroy(down);
    dkv_cuda_cache_destroy(fork);
    dkv_cuda_cache_destroy(gpu);
    dkv_cache_destroy(cpu);
    CUDA(cudaFree(busy));
    CUDA(cudaStreamDestroy(stream));
    CHECK(release_all());
}

static void cache_refuses(void) {
    NEEDS_DEVICE;
    world w = make_world(DKV_F16, 61, 64, 64);
    dkv_cuda_cache *c = NULL, *other = NULL;
    dkv_shape bad;
#define BAD(change, type, want) \
    bad = w.shape; change; AT("%s", #change); \
    CHECK_RESULT(dkv_cuda_cache_create(&c, &w.plan, &bad, type, 9), want); CHECK(!c)
    BAD(bad.L = L + 1, DKV_F16, DKV_ERR_SHAPE);  BAD(bad.Hkv = 1, DKV_F16, DKV_ERR_SHAPE);
    BAD(bad.H = 5, DKV_F16, DKV_ERR_SHAPE);      BAD(bad.d_k = 12, DKV_F16, DKV_ERR_SHAPE);
    BAD(bad.d_v = 264, DKV_F16, DKV_ERR_SHAPE);  BAD((void)bad, DKV_F32, DKV_ERR_TYPE);
    BAD((void)bad, (dkv_type)5, DKV_ERR_TYPE);
#undef BAD
    CHECK_RESULT(dkv_cuda_cache_create(&c, &w.plan, &w.shape, DKV_F16, -1), DKV_ERR_FIELD);
    CHECK_RESULT(dkv_cuda_cache_create(&c, &w.plan, &w.shape, DKV_F16, ((int64_t)1 << 21) + 1), DKV_ERR_FIELD);
    CHECK_OK(dkv_cuda_cache_create(&c, &w.plan, &w.shape, DKV_F16, 9));
    dkv_segment s = dkv_strided(w.dev_k[0], w.dev_v[0], 60);
    CHECK_RESULT(dkv_cuda_cache_pack(c, 0, &s, NULL), DKV_ERR_SHAPE);
    CHECK_RESULT(dkv_cuda_cache_fork(&other, c, 9, NULL), DKV_ERR_STATE); /* nothing is packed */
    dkv_cache *down = NULL;
    CHECK_RESULT(dkv_cuda_cache_download(&down, c, 9, NULL, NULL), DKV_ERR_STATE);
    CHECK(!other && !down);
    dkv_cuda_cache_destroy(c);
    dkv_cuda_cache_destroy(NULL);
    CHECK(release_all());
}

int main(int argc, char **argv) {
    static const test_case cases[] = {
        {"no device is an error", no_device_is_an_error, 0},
        {"device", device_is_what_the_runtime_says, 0},
        {"pack: the CPU's bytes", packs_like_the_cpu, 0},
        {"pack: lengths", pack_lengths, 0},
        {"pack: special values", pack_special_values, 0},
        {"pack: errors", pack_refuses, 0},
        {"groups and queries", groups_and_queries, 0},
        {"dimensions", dimensions, 0},
        {"lengths", lengths, 0},
        {"many queries", many_queries, 0},
        {"dense causal", dense_causal, 0},
        {"layouts", layouts, 0},
        {"options", options, 0},
        {"huge logits", huge_logits, 0},
        {"nothing to see", nothing_to_see, 0},
        {"random mix", random_mix, 0},
        {"batches", batches, 0},
        {"without a key in a batch", keyless_in_a_batch, 0},
        {"splits", splits, 0},
        {"large, against the CPU", large, 0},
        {"NaN in one query", nan_in_one_query, 0},
        {"50 reruns, the same bits", reruns, 0},
        {"chained launches", chained_launches, 0},
        {"two streams", two_streams, 0},
        {"graph replays", graph_replays, 0},
        {"wild lengths", wild_lengths, 0},
        {"append to a batch", append_to_a_batch, 0},
        {"strides past 2^32", far_strides, 0},
        {"rows past 2^32", far_rows, 0},
        {"errors", refusals, 0},
        {"errors of others", errors_of_others, 0},
        {"cache life", cache_life, 0},
        {"cache and streams", cache_streams, 0},
        {"cache errors", cache_refuses, 0},
    };
    if (argc > 1 && !strcmp(argv[1], "no-device")) return without_device();
    return run_cases("cuda", cases, COUNT(cases));
}
