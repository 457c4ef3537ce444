/* llama2c.c: Distance-KV in the loop of a llama2.c-style engine. Reads a llama2.c v0 model, prefills all but the last
   prompt token, compresses, and decodes greedily twice: from the dense cache and from the compressed one.
   What Distance-KV adds to the engine are compress() and the six lines of attend_packed().

   cc -O2 -I.. llama2c.c -lm -o llama2c
   ./llama2c --random tiny.bin && ./llama2c tiny.bin                      a random model, a random prompt
   ./llama2c -n 32 -k 50 -s 7 stories15M.bin 1 9038 2501 263 931 ...      token ids as the tokenizer gives them */
#define _GNU_SOURCE
#define DISTANCE_KV_IMPLEMENTATION
#include "../distance_kv.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SINK = 4, RECENT = 16, BIN_WIDTH = 8, WORKSPACE = 4 << 20 }; /* small, so that a short prompt has a middle */
static void fail(const char *what, const char *why) {
    fprintf(stderr, "llama2c: %s: %s\n", what, why);
    exit(1);
}

static void try(dkv_result r, const char *what) { if (r != DKV_OK) fail(what, dkv_result_string(r)); }

static void *allocate(int64_t n, size_t size) {
    void *p = calloc((size_t)n, size);
    if (!p) fail("memory", "not enough");
    return p;
}

/* ---- model --------------------------------------------------------------- */

typedef struct {
    int32_t dim, hidden, L, H, Hkv, vocab, seq; /* vocab < 0 in the file: wcls is stored, else it is embed */
} config;

typedef struct {
    config c;
    int d;              /* head dimension */
    float *data;        /* the file behind its header; what follows points into it */
    float *embed;       /* [vocab][dim] */
    float *norm_att, *norm_ffn; /* [L][dim] */
    float *wq, *wo;     /* [L][dim][dim] */
    float *wk, *wv;     /* [L][Hkv * d][dim] */
    float *w1, *w2, *w3; /* [L][hidden][dim], [L][dim][hidden], [L][hidden][dim] */
    float *norm_final;  /* [dim] */
    float *wcls;        /* [vocab][dim] */
} model;

/* Lays the weights over data, which may be NULL. Returns how many floats they are. */
static int64_t map_weights(model *m, float *data, bool untied) {
    const int64_t L = m->c.L, dim = m->c.dim, kv = (int64_t)m->c.Hkv * m->d, hidden = m->c.hidden;
    int64_t n = 0;
    struct { float **at; int64_t floats; } parts[] = {
        {&m->embed, m->c.vocab * dim}, {&m->norm_att, L * dim},
        {&m->wq, L * dim * dim}, {&m->wk, L * kv * dim}, {&m->wv, L * kv * dim}, {&m->wo, L * dim * dim},
        {&m->norm_ffn, L * dim}, {&m->w1, L * hidden * dim}, {&m->w2, L * dim * hidden}, {&m->w3, L * hidden * dim},
        {&m->norm_final, dim}, {NULL, (int64_t)m->c.seq * m->d}, /* RoPE tables: computed here */
        {&m->wcls, untied ? m->c.vocab * dim : 0},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; n += parts[i++].floats)
        if (data && parts[i].at) *parts[i].at = data + n;
    if (!untied) m->wcls = m->embed;
    return n;
}

static void check_config(const config *c, const char *path) {
    const int32_t most = 1 << 20; /* keeps every product below 2^63 */
    if (c->dim < 1 || c->dim > most || c->hidden < 1 || c->hidden > most || c->L < 1 || c->L > 1024 || c->seq < 1 ||
        c->seq > most || c->vocab < 1 || c->vocab > most || c->H < 1 || c->Hkv < 1 || c->H % c->Hkv ||
        c->dim % c->H || c->dim / c->H % 2 || c->dim / c->H > 576)
        fail(path, "not a llama2.c v0 model (its header makes no sense)");
}

static void read_model(model *m, const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) fail(path, "cannot be opened");
    if (fread(&m->c, sizeof m->c, 1, f) != 1) fail(path, "too short for a header");
    bool untied = m->c.vocab < 0;
    if (untied && m->c.vocab != INT32_MIN) m->c.vocab = -m->c.vocab;
    check_config(&m->c, path);
    m->d = m->c.dim / m->c.H;
    int64_t n = map_weights(m, NULL, untied);
    fseek(f, 0, SEEK_END);
    if (ftell(f) != (long)sizeof m->c + 4 * n) fail(path, "its size is not what its header says");
    fseek(f, (long)sizeof m->c, SEEK_SET);
    m->data = allocate(n, sizeof(float));
    if (fread(m->data, sizeof(float), (size_t)n, f) != (size_t)n) fail(path, "cannot be read");
    fclose(f);
    map_weights(m, m->data, untied);
}

static void write_random(const char *path) {
    model m = {.c = {.dim = 64, .hidden = 160, .L = 3, .H = 4, .Hkv = 2, .vocab = 128, .seq = 256}, .d = 16};
    int64_t n = map_weights(&m, NULL, true);
    m.c.vocab = -m.c.vocab;
    FILE *f = fopen(path, "wb");
    if (!f) fail(path, "cannot be written");
    fwrite(&m.c, sizeof m.c, 1, f);
    while (n--) fwrite(&(float){(float)rand() / (float)RAND_MAX / 2 - .25f}, sizeof(float), 1, f);
    if (fclose(f)) fail(path, "cannot be written");
}

/* ---- layers -------------------------------------------------------------- */

static void matmul(float *y, const float *w, const float *x, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r++) {
        float sum = 0;
        for (int64_t c = 0; c < cols; c++) sum += w[r * cols + c] * x[c];
        y[r] = sum;
    }
}

static void rmsnorm(float *y, const float *x, const float *weight, int n) {
    float square = 0;
    for (int i = 0; i < n; i++) square += x[i] * x[i];
    for (int i = 0; i < n; i++) y[i] = weight[i] * x[i] / sqrtf(square / (float)n + 1e-5f);
}

static void rope(float *x, int heads, int d, int64_t pos) {
    for (int i = 0; i < heads * d; i += 2) {
        double angle = (double)pos * pow(10000, -(double)(i % d) / d);
        float c = (float)cos(angle), s = (float)sin(angle), re = x[i], im = x[i + 1];
        x[i] = re * c - im * s;
        x[i + 1] = re * s + im * c;
    }
}

/* ---- attention: dense, and packed ---------------------------------------- */

typedef struct {
    float *memory;             /* of everything below but the cache and its workspace */
    float *K, *V;              /* [L][seq][Hkv][d], dense */
    dkv_cache *packed;         /* NULL: attend to K and V */
    void *workspace;           /* [WORKSPACE] */
    float *x, *xb, *q, *k, *v, *h1, *h3, *scores, *logits;
} state;

static void attend_dense(const model *m, state *s, int l, int64_t pos) {
    const int d = m->d, Hkv = m->c.Hkv, G = m->c.H / Hkv;
    const int64_t row = (int64_t)Hkv * d;
    float *K = s->K + l * m->c.seq * row, *V = s->V + l * m->c.seq * row;
    memcpy(K + pos * row, s->k, (size_t)row * sizeof(float));
    memcpy(V + pos * row, s->v, (size_t)row * sizeof(float));
    for (int h = 0; h < m->c.H; h++) {
        float *out = s->xb + h * d, most = -INFINITY, sum = 0;
        for (int64_t i = 0; i <= pos; i++) {
            matmul(&s->scores[i], K + i * row + h / G * d, s->q + h * d, 1, d);
            most = fmaxf(most, s->scores[i] /= sqrtf((float)d));
        }
        for (int64_t i = 0; i <= pos; i++) sum += s->scores[i] = expf(s->scores[i] - most);
        for (int j = 0; j < d; j++) {
            out[j] = 0;
            for (int64_t i = 0; i <= pos; i++) out[j] += s->scores[i] / sum * V[i * row + h / G * d + j];
        }
    }
}

static void attend_packed(const model *m, state *s, int l) {
    const int H = m->c.H, Hkv = m->c.Hkv, d = m->d;
    dkv_tensor k = dkv_thd(s->k, DKV_F32, Hkv, d), v = dkv_thd(s->v, DKV_F32, Hkv, d);
    dkv_tensor q = dkv_thd(s->q, DKV_F32, H, d), out = dkv_thd(s->xb, DKV_F32, H, d);
    try(dkv_cache_append(s->packed, l, k, v, 1), "append");
    dkv_attention a = dkv_cache_attention(s->packed, l, q, 1, out);
    try(dkv_attend(&a, 1, s->workspace, WORKSPACE, NULL), "attend");
}

/* After prefill: T_c tokens of every layer into one packed cache with room for n more. */
static void compress(const model *m, state *s, const dkv_pattern *p, int64_t T_c, int64_t n) {
    const int64_t layer = (int64_t)m->c.seq * m->c.Hkv * m->d;
    dkv_shape shape = {m->c.L, m->c.H, m->c.Hkv, m->d, m->d};
    dkv_plan plan;
    size_t bytes;
    try(dkv_plan_make(&plan, NULL, &bytes, p, T_c, DKV_BEYOND_ERROR), "plan");
    void *memory = allocate(1, bytes);
    try(dkv_plan_make(&plan, memory, &bytes, p, T_c, DKV_BEYOND_ERROR), "plan");
    try(dkv_cache_create(&s->packed, &plan, &shape, DKV_F32, n, NULL), "cache");
    free(memory); /* the cache has its own copy */
    for (int l = 0; l < m->c.L; l++) {
        dkv_segment dense = dkv_strided(dkv_thd(s->K + l * layer, DKV_F32, m->c.Hkv, m->d),
                                        dkv_thd(s->V + l * layer, DKV_F32, m->c.Hkv, m->d), T_c);
        try(dkv_cache_pack(s->packed, l, &dense), "pack");
    }
    s->workspace = aligned_alloc(64, WORKSPACE);
    if (!s->workspace) fail("memory", "not enough");
}

/* ---- forward ------------------------------------------------------------- */

static void forward(const model *m, state *s, int token, int64_t pos) {
    const int dim = m->c.dim, hidden = m->c.hidden, kv = m->c.Hkv * m->d;
    memcpy(s->x, m->embed + (int64_t)token * dim, (size_t)dim * sizeof(float));
    for (int64_t l = 0; l < m->c.L; l++) {
        rmsnorm(s->xb, s->x, m->norm_att + l * dim, dim);
        matmul(s->q, m->wq + l * dim * dim, s->xb, dim, dim);
        matmul(s->k, m->wk + l * kv * dim, s->xb, kv, dim);
        matmul(s->v, m->wv + l * kv * dim, s->xb, kv, dim);
        rope(s->q, m->c.H, m->d, pos);
        rope(s->k, m->c.Hkv, m->d, pos);
        if (s->packed) attend_packed(m, s, (int)l);
        else attend_dense(m, s, (int)l, pos);
        matmul(s->q, m->wo + l * dim * dim, s->xb, dim, dim);
        for (int i = 0; i < dim; i++) s->x[i] += s->q[i];
        rmsnorm(s->xb, s->x, m->norm_ffn + l * dim, dim);
        matmul(s->h1, m->w1 + l * dim * hidden, s->xb, hidden, dim);
        matmul(s->h3, m->w3 + l * dim * hidden, s->xb, hidden, dim);
        for (int i = 0; i < hidden; i++) s->h1[i] *= s->h3[i] / (1 + expf(-s->h1[i]));
        matmul(s->q, m->w2 + l * dim * hidden, s->h1, dim, hidden);
        for (int i = 0; i < dim; i++) s->x[i] += s->q[i];
    }
    rmsnorm(s->x, s->x, m->norm_final, dim);
    matmul(s->logits, m->wcls, s->x, m->c.vocab, dim);
}

static void generate(const model *m, state *s, int token, int64_t pos, int64_t n, const char *name) {
    printf("%-10s", name);
    while (n--) {
        forward(m, s, token, pos++);
        token = 0;
        for (int t = 1; t < m->c.vocab; t++)
            if (s->logits[t] > s->logits[token]) token = t;
        printf(" %d", token);
    }
    printf("\n");
}

/* ---- command line -------------------------------------------------------- */

static void make_state(state *s, const model *m) {
    const int64_t dim = m->c.dim, cache = (int64_t)m->c.L * m->c.seq * m->c.Hkv * m->d;
    struct { float **at; int64_t floats; } parts[11] = {
        {&s->K, cache}, {&s->V, cache}, {&s->x, dim}, {&s->xb, dim}, {&s->q, dim}, {&s->k, dim}, {&s->v, dim},
        {&s->h1, m->c.hidden}, {&s->h3, m->c.hidden}, {&s->scores, m->c.seq}, {&s->logits, m->c.vocab},
    };
    int64_t total = 0;
    for (int i = 0; i < 11; i++) total += parts[i].floats;
    float *at = s->memory = allocate(total, sizeof(float));
    for (int i = 0; i < 11; at += parts[i++].floats) *parts[i].at = at;
}

/* A random pattern that keeps percent of its bits; bins for contexts up to T_c. */
static dkv_pattern make_pattern(const model *m, int64_t T_c, int64_t percent) {
    dkv_pattern p = {.L = m->c.L, .H = m->c.H, .Hkv = m->c.Hkv, .d = m->d, .W = BIN_WIDTH, .S = SINK, .R = RECENT};
    p.D = T_c > SINK + RECENT ? (int32_t)((T_c - SINK - RECENT + BIN_WIDTH - 1) / BIN_WIDTH) : 1;
    void *bits = allocate((int64_t)p.L * p.H * dkv_pattern_words(p.D), 8);
    p.bits = bits;
    for (int l = 0; l < p.L; l++)
        for (int h = 0; h < p.H; h++)
            for (int64_t b = 0; b < p.D; b++) dkv_bits_set(bits, &p, l, h, b, rand() % 100 < percent);
    p.K = dkv_pattern_count(&p);
    return p;
}

static int64_t read_number(const char *text, int64_t max, const char *what) {
    char *end;
    long long n = strtoll(text, &end, 10);
    if (end == text || *end || n < 0 || n > max) fail(what, text);
    return n;
}

static void run(const char *path, char **words, int n_words, int64_t n, int64_t percent) {
    model m;
    state s = {0};
    read_model(&m, path);
    make_state(&s, &m);
    int64_t T_c = n_words ? n_words - 1 : 2 * m.c.seq / 3;
    if (T_c + n > m.c.seq) fail(path, "prompt and answer are longer than the model's context");
    int *prompt = allocate(T_c + 1, sizeof *prompt);
    for (int64_t i = 0; i <= T_c; i++)
        prompt[i] = n_words ? (int)read_number(words[i], m.c.vocab - 1, "no such token id") : rand() % m.c.vocab;
    for (int64_t i = 0; i < T_c; i++) forward(&m, &s, prompt[i], i);

    generate(&m, &s, prompt[T_c], T_c, n, "dense");
    dkv_pattern pattern = make_pattern(&m, T_c, percent);
    compress(&m, &s, &pattern, T_c, n);
    generate(&m, &s, prompt[T_c], T_c, n, "compressed");
    const dkv_shape *shape = dkv_cache_shape(s.packed);
    printf("KV bytes   %lld dense, %lld packed\n", (long long)dkv_kv_bytes_dense(shape, DKV_F32, T_c),
           (long long)dkv_kv_bytes_packed(dkv_cache_plan(s.packed), shape, DKV_F32));
    dkv_cache_destroy(s.packed);
    void *memory[] = {(void *)(uintptr_t)pattern.bits, prompt, m.data, s.memory, s.workspace};
    for (int i = 0; i < 5; i++) free(memory[i]);
}

int main(int argc, char **argv) {
    int64_t n = 16, percent = 50;
    if (argc == 3 && !strcmp(argv[1], "--random")) return write_random(argv[2]), 0;
    for (int c; (c = getopt(argc, argv, "n:k:s:")) != -1;) switch (c) {
        case 'n': n = read_number(optarg, 1 << 20, "-n"); break;
        case 'k': percent = read_number(optarg, 100, "-k"); break;
        case 's': srand((unsigned)read_number(optarg, 1 << 30, "-s")); break;
        default: optind = argc;
    }
    if (optind < argc) return run(argv[optind], argv + optind + 1, argc - optind - 1, n, percent), 0;
    fputs("usage: llama2c [-n tokens] [-k percent kept] [-s seed] MODEL.bin [token id ...]\n"
          "       llama2c --random MODEL.bin\n", stderr);
    return 2;
}
