#define _GNU_SOURCE
#include "exams.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- progress ------------------------------------------------------------ */

void show_line(const char *format, ...) {
    struct winsize size = {.ws_col = 0};
    char line[512];
    if (!isatty(STDERR_FILENO)) return;
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    ioctl(STDERR_FILENO, TIOCGWINSZ, &size);
    fprintf(stderr, "\r\033[K%.*s", size.ws_col > 1 ? size.ws_col - 1 : 79, line); /* a wrapped line would stay */
    fflush(stderr);
}

const char *hms(double s) {
    static char text[2][32];
    static int turn;
    char *out = text[turn ^= 1];
    long long n = (long long)(s + 0.5);
    if (n >= 86400)
        snprintf(out, sizeof *text, "%lld d %lld:%02lld:%02lld", n / 86400, n / 3600 % 24, n / 60 % 60, n % 60);
    else if (n >= 3600) snprintf(out, sizeof *text, "%lld:%02lld:%02lld", n / 3600, n / 60 % 60, n % 60);
    else snprintf(out, sizeof *text, "%lld:%02lld", n / 60, n % 60);
    return out;
}

/* ---- states -------------------------------------------------------------- */

uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *p = data;
    if (!hash) hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

/* magic, settings, data, CRC32 of all before; of this machine's byte order: a state does not travel */
typedef struct {
    char magic[8];
    uint64_t config;
} state_head;

static const char STATE_MAGIC[8] = "DKVSTATE";

void refuse_state(const char *path) {
    fail("%s is not the state of a run, or damaged; remove it to start anew", path);
}

bool read_state(const char *path, uint64_t config, void *data, size_t bytes) {
    if (access(path, F_OK)) return false;
    size_t size;
    char *file = read_file(path, &size);
    state_head head = {{0}, 0};
    uint32_t crc = 0;
    if (size >= sizeof head + sizeof crc) {
        memcpy(&head, file, sizeof head);
        memcpy(&crc, file + size - sizeof crc, sizeof crc);
    }
    if (memcmp(head.magic, STATE_MAGIC, 8) || crc != dkv_crc32(0, file, size - sizeof crc)) refuse_state(path);
    if (head.config != config || size != sizeof head + bytes + sizeof crc)
        fail("%s is the state of a run with other settings; give the same, or remove it to start anew", path);
    memcpy(data, file + sizeof head, bytes);
    free(file);
    return true;
}

void write_state(const char *path, uint64_t config, const void *data, size_t bytes) {
    state_head head = {{0}, config};
    size_t size = sizeof head + bytes + 4;
    char *file = allocate(1, size);
    memcpy(head.magic, STATE_MAGIC, 8);
    memcpy(file, &head, sizeof head);
    memcpy(file + sizeof head, data, bytes);
    uint32_t crc = dkv_crc32(0, file, size - 4);
    memcpy(file + size - 4, &crc, 4);
    write_file(path, file, size);
    free(file);
}

/* ---- lengths ------------------------------------------------------------- */

enum { QUESTION_ROOM = 256, CPU_CONTEXT = 2048 };

int64_t whole_bins(const exam_options *o, int64_t most) {
    const int64_t ends = o->S + o->R;
    return ends + (most - ends) / o->W * o->W;
}

void find_lengths(exam_options *o, int64_t n_ctx) {
    const bool small = o->place == LM_CPU;
    if (o->W < 0) o->W = small ? 32 : 128;
    if (o->S < 0) o->S = small ? 32 : 128;
    if (o->R < 0) o->R = small ? 256 : 1024;
    int64_t ends = o->S + o->R, most = n_ctx - QUESTION_ROOM;
    if (small && most > CPU_CONTEXT && ends + o->W <= CPU_CONTEXT) most = CPU_CONTEXT;
    if (o->T_c < 0 && most < ends + o->W)
        fail("sink, recent and one bin are %lld tokens, and %lld fit; lower --sink, --recent or --bin-width",
             (long long)(ends + o->W), (long long)(most > 0 ? most : 0));
    if (o->T_c < 0) o->T_c = whole_bins(o, most);
    int64_t bins = (o->T_c - ends) / o->W, fits = whole_bins(o, n_ctx - QUESTION_ROOM);
    if (o->T_c > n_ctx - 64)
        fail("--ctx %lld leaves no room for questions: the model takes %lld tokens%s%lld", (long long)o->T_c,
             (long long)n_ctx, fits > ends ? "; at most --ctx " : ", and sink, recent and one bin are ",
             (long long)(fits > ends ? fits : ends + o->W));
    if (bins < 1 || ends + bins * o->W != o->T_c)
        fail("--ctx %lld is not sink + recent + whole bins of %lld; %lld is", (long long)o->T_c, (long long)o->W,
             (long long)(ends + (bins < 1 ? 1 : bins) * o->W));
    if (bins < o->per_context)
        fail("a context has %lld bins and asks about %lld; lower --needles", (long long)bins,
             (long long)o->per_context);
}

/* ---- questions ----------------------------------------------------------- */

static void try(int failed, const char *err) {
    if (failed) fail("%s", err);
}

/* Of which manifest of its round a context is. */
static int manifest_of(const exams *x, int64_t context) {
    return (int)(context % x->per_round * LM_KINDS * LM_WORDINGS / x->per_round);
}

int kind_of(const exams *x, int64_t context) { return manifest_of(x, context) % LM_KINDS; }

static void make_context(const exams *x, lm_haystack *h, int32_t *ids, int64_t c) {
    const int64_t contexts = x->per_round / (LM_KINDS * LM_WORDINGS); /* of a manifest */
    char err[256];
    try(lm_needles_context(x->needles, h, ids, kind_of(x, c), manifest_of(x, c) / LM_KINDS, c / x->per_round,
                           c % contexts, err, sizeof err), err);
}

static void make_question(exams *x, const lm_haystack *h, int64_t i, int64_t at, const double *weight) {
    lm_ids suffix = {0};
    lm_question *q = &x->question[at];
    if (lm_needles_query(x->needles, h, i, &suffix, &q->first)) fail("out of memory");
    if (suffix.n > LM_QUESTION_MAX || x->o.T_c + suffix.n > lm_get_params(x->m)->n_ctx)
        fail("a question of %lld tokens does not fit behind %lld; lower --ctx", (long long)suffix.n,
             (long long)x->o.T_c);
    q->tokens = suffix.v, q->n = suffix.n;
    q->source = h->needle[i].source;
    q->weight = weight[h->needle[i].bin];
    x->bin[at] = h->needle[i].bin;
    x->suffix_tokens += q->n;
    x->data_hash = hash_bytes(x->data_hash, q->tokens, (size_t)q->n * sizeof *q->tokens);
}

static void make_questions(exams *x) {
    int32_t *ids = allocate((size_t)x->o.T_c, sizeof *ids);
    double *weight = allocate((size_t)x->D, sizeof *weight);
    lm_haystack h;
    for (int64_t c = 0; c < x->contexts; c++) {
        if (c % x->per_round == 0 && lm_needles_weights(x->needles, c / x->per_round, weight)) fail("out of memory");
        make_context(x, &h, ids, c);
        x->data_hash = hash_bytes(x->data_hash, ids, (size_t)x->o.T_c * sizeof *ids);
        for (int64_t i = 0; i < h.n; i++) make_question(x, &h, i, c * x->per_context + i, weight);
    }
    free(weight);
    free(ids);
}

static uint64_t hash_run(const exams *x) {
    struct stat file = {0};
    const lm_params *p = lm_get_params(x->m);
    stat(x->o.model_path, &file);
    const int64_t facts[] = {p->shape.L, p->shape.H, p->shape.Hkv, p->shape.d_k, p->E, p->F, p->V, file.st_size,
                             x->o.place};
    return hash_bytes(hash_bytes(x->data_hash, x->name, sizeof x->name), facts, sizeof facts);
}

/* ---- opening ------------------------------------------------------------- */

void fail_model(const exams *x) {
    const char *why = lm_error(x->m);
    const bool memory = strstr(why, "no memory") || strstr(why, "out of memory"); /* the engine's words, and CUDA's */
    fail("%s%s", why, memory ? "; lower --kv-memory" : "");
}

static void open_model(exams *x) {
    char err[512];
    model_shape shape = read_model_shape(x->o.model_path);
    memcpy(x->name, shape.name, sizeof x->name);
    int64_t threads = x->o.threads ? x->o.threads : sysconf(_SC_NPROCESSORS_ONLN);
    try(lm_open(&x->m, x->o.model_path, (lm_place)x->o.place, (int)threads, err, sizeof err), err);
    if (lm_tokenizer_open(&x->tokenizer, lm_get_gguf(x->m), err, sizeof err)) fail("%s: %s", x->o.model_path, err);
    if (lm_chat_open(&x->chat, lm_get_gguf(x->m), x->tokenizer, NULL, NULL, err, sizeof err))
        fail("%s: %s", x->o.model_path, err);
    if (lm_learner_open(&x->learner, x->m)) fail("%s", lm_error(x->m));
    find_lengths(&x->o, lm_get_params(x->m)->n_ctx);
}

static void open_needles(exams *x) {
    char err[256], *filler = x->o.filler_path ? read_text(x->o.filler_path) : NULL;
    lm_needle_options n = {.T_c = x->o.T_c, .W = x->o.W, .S = x->o.S, .R = x->o.R, .per_context = x->o.per_context,
                           .split = x->o.split, .seed = (uint64_t)x->o.seed, .filler = filler};
    try(lm_needles_open(&x->needles, x->tokenizer, &x->chat, &n, err, sizeof err), err);
    free(filler);
}

enum { ONCE = 16 }; /* contexts in a batch: some thousand tokens of questions */

/* As many caches as memory holds: the first contexts keep theirs, and a quarter of the room is for the others in turn,
   so that a batch is large. Where contexts come only once, none stays. Sizes follow from the options alone: so do
   batches, and every bit of the results. */
static void share_memory(exams *x) {
    double gb = x->o.kv_gb > 0 ? x->o.kv_gb : x->o.place == LM_CUDA ? 64 : 8;
    int64_t room = (int64_t)(gb * 1e9 / (double)context_bytes(x));
    if (room < 1)
        fail("a context's cache takes %.2f GB, more than --kv-memory %g", (double)context_bytes(x) / 1e9, gb);
    x->group = room / 4 > 0 ? room / 4 : 1;
    x->kept = room >= x->contexts ? x->contexts : room - x->group;
    if (x->o.once) x->kept = 0, x->group = room < ONCE ? room : ONCE;
}

void open_exams(exams *x, const exam_options *o) {
    *x = (exams){.o = *o};
    open_model(x);
    open_needles(x);
    x->D = lm_needles_bins(x->needles);
    x->per_context = o->per_context;
    x->per_round = lm_needles_contexts(x->needles) * LM_KINDS * LM_WORDINGS;
    int64_t round = x->per_round * x->per_context; /* queries */
    x->contexts = (o->rounds ? o->rounds : (o->queries + round - 1) / round) * x->per_round;
    x->question = allocate((size_t)(x->contexts * x->per_context), sizeof *x->question);
    x->bin = allocate((size_t)(x->contexts * x->per_context), sizeof *x->bin);
    x->cache = allocate((size_t)x->contexts, sizeof *x->cache);
    make_questions(x);
    x->run_hash = hash_run(x);
    share_memory(x);
    x->opened = seconds();
}

void close_exams(exams *x) {
    for (int64_t c = 0; c < x->contexts; c++) lm_cache_destroy(x->cache[c]);
    for (int64_t i = 0; i < x->contexts * x->per_context; i++) free((void *)(uintptr_t)x->question[i].tokens);
    free(x->cache);
    free(x->bin);
    free(x->question);
    lm_learner_close(x->learner);
    lm_needles_close(x->needles);
    lm_chat_close(&x->chat);
    lm_tokenizer_close(x->tokenizer);
    lm_close(x->m);
}

/* ---- caches -------------------------------------------------------------- */

static dkv_type cache_type(const exams *x) { return x->o.place == LM_CUDA ? DKV_BF16 : DKV_F16; }

int64_t context_bytes(const exams *x) {
    return dkv_kv_bytes_dense(&lm_get_params(x->m)->shape, cache_type(x), x->o.T_c);
}

lm_cache *prefill_context(exams *x, const int32_t *tokens, int64_t n) {
    const dkv_shape *s = &lm_get_params(x->m)->shape;
    const double start = seconds();
    size_t bytes;
    dkv_plan plan;
    lm_cache *cache;
    dkv_result r = dkv_plan_from_positions(&plan, NULL, &bytes, s->L, s->Hkv, n, NULL, NULL);
    void *memory = allocate(1, r ? 1 : bytes);
    if (!r) r = dkv_plan_from_positions(&plan, memory, &bytes, s->L, s->Hkv, n, NULL, NULL);
    if (!r) r = lm_cache_create(&cache, x->m, &plan, cache_type(x), 0, NULL);
    if (r) fail("a context's cache: %s%s", dkv_result_string(r), r == DKV_ERR_MEMORY ? "; lower --kv-memory" : "");
    if (lm_prefill(x->m, &cache, 1, tokens, n, NULL)) fail_model(x);
    free(memory);
    x->prefill_s += seconds() - start;
    x->prefilled++;
    return cache;
}

static void fill_cache(exams *x, int64_t c, int32_t *ids) {
    lm_haystack h;
    if (x->cache[c]) return;
    show_line("context %lld of %lld%s%s", (long long)c + 1, (long long)x->contexts, x->prefilled ? ", each " : "",
              x->prefilled ? hms(x->prefill_s / (double)x->prefilled) : "");
    make_context(x, &h, ids, c);
    x->cache[c] = prefill_context(x, ids, x->o.T_c);
}

/* One batch from context first on, at most n: ends where the room for caches that do not stay is used up. */
static int64_t run_batch(exams *x, int64_t first, int64_t n, batch_work *work, void *user) {
    int32_t *ids = allocate((size_t)x->o.T_c, sizeof *ids);
    lm_exam *e = allocate((size_t)n, sizeof *e);
    int64_t size = 0, passing = 0;
    for (; size < n && (passing < x->group || first + size < x->kept); size++) {
        const int64_t c = first + size;
        passing += c >= x->kept;
        fill_cache(x, c, ids);
        e[size] = (lm_exam){x->cache[c], x->question + c * x->per_context, x->per_context,
                            (uint32_t)(c % x->per_round)};
    }
    work(user, e, size, first);
    for (int64_t c = first; c < first + size; c++)
        if (c >= x->kept) lm_cache_destroy(x->cache[c]), x->cache[c] = NULL;
    free(e);
    free(ids);
    return size;
}

void each_batch(exams *x, int64_t first, int64_t n, batch_work *work, void *user) {
    for (int64_t done = 0; done < n;) done += run_batch(x, first + done, n - done, work, user);
}

/* ---- cost ---------------------------------------------------------------- */

/* Products of weights count 2 per weight and token, attention 4 d per head, key and token. The way back has one more
   product of each weight, as weights get no gradient, and three halves more of attention: the scores again, dP, dQ. */
void say_cost(const exams *x, const char *what, int64_t prefills, int64_t questions, bool back) {
    const lm_params *p = lm_get_params(x->m);
    const double heads = p->shape.H, T = (double)x->o.T_c;
    const double tokens = (double)x->suffix_tokens / (double)(x->contexts * x->per_context); /* of a question */
    const double weights = p->shape.L * ((double)p->E * (2 * heads + 2 * p->shape.Hkv) * p->shape.d_k +
                                         3 * (double)p->E * (double)p->F);
    const double pair = 4 * heads * p->shape.d_k * p->shape.L; /* of one query and one key */
    const double prefill = (double)prefills * (2 * weights * T + pair * T * T / 2);
    const double ask = tokens * (double)questions * (back ? 4 * weights + 2.5 * pair * T : 2 * weights + pair * T);
    fprintf(stderr, "%s: %lld prefills of %lld tokens, %.3g GB of cache each, %lld in memory; %lld questions "
            "of %.0f tokens; %.3g + %.3g PFLOP\n", what, (long long)prefills, (long long)x->o.T_c,
            (double)context_bytes(x) / 1e9, (long long)(x->kept + (x->kept < x->contexts ? x->group : 0)),
            (long long)questions, tokens, prefill / 1e15, ask / 1e15);
}

/* The second time. */
typedef struct {
    batch_work *work;
    void *user;
    double seconds;
} timed_work;

static void work_twice(void *user, const lm_exam *e, int64_t n, int64_t first) {
    timed_work *t = user;
    t->work(t->user, e, n, first);
    const double start = seconds();
    t->work(t->user, e, n, first);
    t->seconds = seconds() - start;
}

/* A few tokens first, for what a device does only once. On a GPU a context alone is slower than its share of more. */
pace time_batch(exams *x, batch_work *work, void *user) {
    enum { FEW = 64 };
    const int32_t few[FEW] = {0};
    lm_cache_destroy(prefill_context(x, few, FEW));
    x->prefill_s = 0, x->prefilled = 0;
    timed_work t = {work, user, 0};
    int64_t n = x->o.place == LM_CPU ? 1 : x->group < ONCE ? x->group : ONCE;
    if (n > x->per_round) n = x->per_round;
    each_batch(x, 0, n, work_twice, &t);
    return (pace){x->prefill_s / (double)n, t.seconds / (double)n};
}
