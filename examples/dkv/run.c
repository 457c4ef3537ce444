/* dkv run: answers a question about a long text from its compressed cache, with --compare from the dense one too.

   context -> tokens[T_c] -> prefill, layer by layer -> one cache per column -> question, answer

   All caches are packed from one prefill, layer by layer as it goes: the same bits alone and compared. A cache's own
   peak is packed + one dense layer + tail. */
#define _GNU_SOURCE
#include "tool.h"

#include "../llama/chat.h"
#include "../llama/model.h"
#include "../llama/sample.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* One way to answer: which rows stay, what that costs, what comes out. */
typedef struct {
    const char *name;
    lm_cache *cache;
    dkv_stats stats;
    int64_t bytes_packed, bytes_peak, tokens;
    double compress_s, decode_tok_s;
    char *text;
} column;

enum { DENSE, COMPRESSED, STREAMING, COLUMNS };

static const char *model_path, *pattern_path, *context_path, *question, *format;
static int64_t n_answer = 64, threads, cut, seed;
static int type = -1, beyond = DKV_BEYOND_ERROR, control = -1, place = LM_CPU;
static double temperature, top_p = 1;
static bool compare, json, ignore_eos;

static const char SYNOPSIS[] = "dkv run -m MODEL.gguf -p PATTERN.dkv -c CONTEXT.txt -q QUESTION [options]";

static const char NOTES[] =
    "--json prints, with --compare once per column under \"dense\", \"compressed\" and \"streaming\":\n"
    "  context_tokens         tokens before the question\n"
    "  logical_ratio          kept share of (layer, query head, bin)\n"
    "  physical_ratio         kept share of KV rows between sink and recent\n"
    "  physical_ratio_total   the same with sink and recent: what memory follows\n"
    "  kv_bytes_dense         the context's KV cache uncompressed\n"
    "  kv_bytes_packed        and as kept\n"
    "  kv_bytes_peak          what this column alone needs at most: packed, one dense layer, question and answer\n"
    "  prefill_s, compress_s  seconds; packing is not counted as prefill\n"
    "  answer_tokens          tokens of the answer\n"
    "  decode_tok_s           and how many of them a second\n"
    "  text                   the answer\n";

static void try(dkv_result r, const char *what) {
    if (r != DKV_OK) fail("%s: %s", what, dkv_result_string(r));
}

/* ---- memory -------------------------------------------------------------- */

/* Counts what caches and prefill hold. */
typedef struct {
    int64_t now, peak;
} counter;

/* Memory in 2 MB pages where it is large: a walk through 4 KB pages reads up to a quarter slower. */
static void *large_pages(size_t bytes) {
    const size_t page = (size_t)2 << 20;
    if (bytes < 2 * page || bytes > SIZE_MAX - page) return malloc(bytes);
    void *p = aligned_alloc(page, (bytes + page - 1) / page * page);
    if (p) madvise(p, bytes, MADV_HUGEPAGE); /* for speed only: may fail */
    return p;
}

static void *counted_alloc(void *user, size_t bytes) {
    counter *c = user;
    void *p = large_pages(bytes);
    if (p) c->now += (int64_t)bytes;
    if (c->now > c->peak) c->peak = c->now;
    return p;
}

static void counted_free(void *user, void *p, size_t bytes) {
    counter *c = user;
    if (p) c->now -= (int64_t)bytes;
    free(p);
}

/* ---- prompt -------------------------------------------------------------- */

static bool is_blank(const char *text) { return !text[strspn(text, " \t\r\n")]; }

static void encode_prompt(const lm_chat *chat, const char *text, lm_ids *context, lm_ids *suffix) {
    char *asked = NULL;
    if (asprintf(&asked, "\n\n%s", question) < 0) fail("out of memory");
    if (lm_chat_prefix(chat, text, strlen(text), context) || lm_chat_suffix(chat, asked, strlen(asked), suffix))
        fail("out of memory");
    free(asked);
    if (cut && context->n > cut) context->n = cut;
}

static void check_lengths(const lm_ids *context, const lm_ids *suffix, int64_t n_ctx) {
    if (context->n + suffix->n + n_answer > n_ctx)
        fail("context, question and answer are %lld + %lld + %lld tokens, the model takes %lld; cut with --ctx or -n",
             (long long)context->n, (long long)suffix->n, (long long)n_answer, (long long)n_ctx);
}

/* ---- patterns and caches ------------------------------------------------- */

static void check_pattern(const dkv_pattern *p, const dkv_shape *s, int64_t T_c) {
    if (dkv_pattern_matches(p, s->L, s->H, s->Hkv, s->d_k) != DKV_OK)
        fail("%s is for %d layers of %d query and %d KV heads of dimension %d; the model has %d of %d and %d of %d",
             base_name(pattern_path), p->L, p->H, p->Hkv, p->d, s->L, s->H, s->Hkv, s->d_k);
    if (beyond == DKV_BEYOND_ERROR && T_c > dkv_max_context(p))
        fail("%s reaches %lld tokens, the context has %lld; cut with --ctx, or choose --beyond clamp, keep or drop",
             base_name(pattern_path), (long long)dkv_max_context(p), (long long)T_c);
}

/* The three plans. Each returns the plan's memory, the caller's to free. */

static void *plan_pattern(dkv_plan *plan, const dkv_pattern *p, int64_t T_c) {
    size_t bytes;
    try(dkv_plan_make(plan, NULL, &bytes, p, T_c, (dkv_beyond)beyond), "plan");
    void *memory = allocate(1, bytes);
    try(dkv_plan_make(plan, memory, &bytes, p, T_c, (dkv_beyond)beyond), "plan");
    return memory;
}

static void *plan_positions(dkv_plan *plan, const dkv_shape *s, int64_t T_c, const int64_t *positions,
                            const int64_t *counts) {
    size_t bytes;
    try(dkv_plan_from_positions(plan, NULL, &bytes, s->L, s->Hkv, T_c, positions, counts), "plan");
    void *memory = allocate(1, bytes);
    try(dkv_plan_from_positions(plan, memory, &bytes, s->L, s->Hkv, T_c, positions, counts), "plan");
    return memory;
}

/* Streaming at equal bytes: sink, recent, and before recent as many rows as the pattern keeps, alike for all heads. */
static void *plan_streaming(dkv_plan *plan, const dkv_shape *s, const dkv_pattern *p, const dkv_stats *kept,
                            int64_t T_c) {
    const int64_t n = (int64_t)s->L * s->Hkv, sink = p->S < T_c ? p->S : T_c;
    const int64_t recent = p->R < T_c - sink ? p->R : T_c - sink;
    int64_t *counts = allocate((size_t)n, sizeof *counts);
    int64_t *positions = allocate((size_t)kept->kept, sizeof *positions), *next = positions;
    for (int64_t i = 0; i < n; i++) {
        int64_t middle = kept->compressible_kept / n + (i < kept->compressible_kept % n);
        counts[i] = sink + middle + recent;
        for (int64_t k = 0; k < sink; k++) *next++ = k;
        for (int64_t k = T_c - recent - middle; k < T_c; k++) *next++ = k;
    }
    void *memory = plan_positions(plan, s, T_c, positions, counts);
    free(positions);
    free(counts);
    return memory;
}

/* Bytes are closed forms, without padding; the peak is that of this column alone: context, one dense layer, tail. */
static void open_column(column *c, lm_model *m, int which, const dkv_pattern *p, int64_t T_c, int64_t capacity,
                        const dkv_allocator *alloc) {
    const dkv_shape *s = &lm_get_params(m)->shape;
    double start = seconds();
    dkv_plan plan;
    void *memory = which == DENSE      ? plan_positions(&plan, s, T_c, NULL, NULL)
                 : which == COMPRESSED ? plan_pattern(&plan, p, T_c)
                                       : plan_streaming(&plan, s, p, &c->stats, T_c);
    try(lm_cache_create(&c->cache, m, &plan, (dkv_type)type, capacity, alloc), "cache");
    c->compress_s = seconds() - start;
    c->bytes_packed = dkv_kv_bytes_packed(&plan, s, (dkv_type)type);
    dkv_type tail = dkv_tail_type((dkv_type)type); /* of the dense layer too */
    c->bytes_peak = c->bytes_packed + dkv_kv_bytes_dense(s, tail, T_c) / s->L + dkv_kv_bytes_dense(s, tail, capacity);
    free(memory);
}

static void open_columns(column *columns, lm_model *m, const dkv_pattern *p, int64_t T_c, int64_t capacity,
                         const dkv_allocator *alloc) {
    const bool wanted[COLUMNS] = {compare, true, control >= 0};
    dkv_stats kept;
    try(dkv_dry_run(&kept, p, T_c, (dkv_beyond)beyond), "pattern");
    for (int i = 0; i < COLUMNS; i++) columns[i].stats = kept;
    columns[DENSE].stats = (dkv_stats){.logical = 1, .physical = 1, .physical_total = 1};
    columns[STREAMING].stats.logical = kept.physical;
    for (int i = 0; i < COLUMNS; i++)
        if (wanted[i]) open_column(&columns[i], m, i, p, T_c, capacity, alloc);
}

/* ---- prefill ------------------------------------------------------------- */

static void show_progress(void *user, double done) {
    enum { WIDTH = 40 };
    static const char bar[] = "########################################";
    (void)user;
    fprintf(stderr, "\rprefill [%-*.*s] %3.0f %%", WIDTH, (int)(WIDTH * done), bar, 100 * done);
    if (done >= 1) fprintf(stderr, "\r%*s\r", WIDTH + 20, "");
}

/* ---- answer -------------------------------------------------------------- */

/* Length of the UTF-8 sequence at s, 0 if it is none. s is zero-terminated. */
static int utf8_length(const unsigned char *s) {
    int n = *s < 0x80 ? 1 : *s < 0xc2 ? 0 : *s < 0xe0 ? 2 : *s < 0xf0 ? 3 : *s < 0xf5 ? 4 : 0;
    for (int i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    bool bad = (*s == 0xe0 && s[1] < 0xa0) || (*s == 0xed && s[1] > 0x9f) || (*s == 0xf0 && s[1] < 0x90) ||
               (*s == 0xf4 && s[1] > 0x8f);
    return bad ? 0 : n;
}

/* JSON and terminals want UTF-8: whatever else the model wrote, such as half a character at the end, is replaced. */
static char *clean_utf8(const char *raw, size_t bytes) {
    char *text;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (!out) fail("out of memory");
    for (const char *s = raw; s < raw + bytes;) {
        int n = *s ? utf8_length((const unsigned char *)s) : 0;
        if (n) fwrite(s, 1, (size_t)n, out);
        else fputs("\xef\xbf\xbd", out);
        s += n ? n : 1;
    }
    fclose(out);
    return text;
}

typedef struct {
    lm_model *m;
    lm_cache *cache;
    lm_sampler sampler;
    float *logits;         /* [V] */
    lm_candidate *scratch; /* [V] */
} speaker;

/* Runs tokens[n] at pos.. and chooses the next one: the likeliest, whose logits stay on the device, or by chance. */
static int32_t next_token(speaker *s, const int32_t *tokens, int64_t n, int64_t pos) {
    const bool likeliest = s->sampler.temperature <= 0;
    int32_t best = 0;
    int failed = likeliest ? lm_eval_best(s->m, s->cache, tokens, n, pos, &best)
                           : lm_eval(s->m, s->cache, tokens, n, pos, s->logits, LM_LAST);
    if (failed) fail("%s", lm_error(s->m));
    return likeliest ? best : lm_sample(&s->sampler, s->logits, (int32_t)lm_get_params(s->m)->V, s->scratch);
}

static void answer(lm_model *m, const lm_chat *chat, column *c, const lm_ids *suffix, int64_t T_c) {
    const size_t V = (size_t)lm_get_params(m)->V;
    speaker s = {.m = m, .cache = c->cache, .logits = allocate(V, sizeof *s.logits)};
    s.scratch = allocate(V, sizeof *s.scratch);
    s.sampler = (lm_sampler){.temperature = (float)temperature, .top_p = (float)top_p, .seed = (uint64_t)seed};
    char *raw;
    size_t bytes;
    FILE *text = open_memstream(&raw, &bytes);
    if (!text) fail("out of memory");
    int32_t token = next_token(&s, suffix->v, suffix->n, T_c);
    double start = seconds();
    int64_t n = 0;
    for (; n < n_answer && (ignore_eos || !lm_chat_is_stop(chat, token)); n++) {
        size_t length;
        const char *piece = lm_decode(chat->tokenizer, token, &length);
        fwrite(piece, 1, length, text);
        token = next_token(&s, &token, 1, T_c + suffix->n + n);
    }
    c->tokens = n;
    c->decode_tok_s = n ? (double)n / (seconds() - start) : 0;
    fclose(text);
    c->text = clean_utf8(raw, bytes);
    free(raw);
    free(s.scratch);
    free(s.logits);
}

/* ---- report -------------------------------------------------------------- */

static double micro(double x) { return rint(x * 1e6) / 1e6; } /* six decimals are what a clock is good for */

static cJSON *column_json(const column *c, int64_t T_c, int64_t bytes_dense, double prefill_s) {
    cJSON *o = cJSON_CreateObject();
    cJSON_AddNumberToObject(o, "context_tokens", (double)T_c);
    cJSON_AddNumberToObject(o, "logical_ratio", c->stats.logical);
    cJSON_AddNumberToObject(o, "physical_ratio", c->stats.physical);
    cJSON_AddNumberToObject(o, "physical_ratio_total", c->stats.physical_total);
    cJSON_AddNumberToObject(o, "kv_bytes_dense", (double)bytes_dense);
    cJSON_AddNumberToObject(o, "kv_bytes_packed", (double)c->bytes_packed);
    cJSON_AddNumberToObject(o, "kv_bytes_peak", (double)c->bytes_peak);
    cJSON_AddNumberToObject(o, "prefill_s", micro(prefill_s));
    cJSON_AddNumberToObject(o, "compress_s", micro(c->compress_s));
    cJSON_AddNumberToObject(o, "answer_tokens", (double)c->tokens);
    cJSON_AddNumberToObject(o, "decode_tok_s", micro(c->decode_tok_s));
    cJSON_AddStringToObject(o, "text", c->text);
    return o;
}

static void print_json(const column *columns, int64_t T_c, int64_t bytes_dense, double prefill_s) {
    cJSON *all = cJSON_CreateObject();
    for (const column *c = columns; compare && c < columns + COLUMNS; c++)
        if (c->cache) cJSON_AddItemToObject(all, c->name, column_json(c, T_c, bytes_dense, prefill_s));
    if (!compare) {
        cJSON_Delete(all);
        all = column_json(&columns[COMPRESSED], T_c, bytes_dense, prefill_s);
    }
    print_json_object(all);
}

static void print_table(const column *columns) {
    static const struct {
        const char *what;
        int decimals;
    } rows[] = {{"logical ratio", 3}, {"physical ratio", 3}, {"  with sink and recent", 3},
                {"KV cache of the context, MB", 1}, {"  peak, MB", 1}, {"decode, tokens/s", 1}, {"compress, ms", 0}};
    printf("%-28s", "");
    for (int i = 0; i < COLUMNS; i++)
        if (columns[i].cache) printf("  %12s", columns[i].name);
    for (int r = 0; r < (int)(sizeof rows / sizeof *rows); r++) {
        printf("\n%-28s", rows[r].what);
        for (const column *c = columns; c < columns + COLUMNS; c++) {
            const double values[] = {c->stats.logical, c->stats.physical, c->stats.physical_total,
                                     (double)c->bytes_packed / 1e6, (double)c->bytes_peak / 1e6, c->decode_tok_s,
                                     1e3 * c->compress_s};
            if (c->cache) printf("  %12.*f", rows[r].decimals, values[r]);
        }
    }
    printf("\n");
}

static void report(const column *columns, const lm_model *m, int64_t T_c, double prefill_s) {
    int64_t bytes_dense = dkv_kv_bytes_dense(&lm_get_params(m)->shape, (dkv_type)type, T_c);
    if (json) {
        print_json(columns, T_c, bytes_dense, prefill_s);
        return;
    }
    for (int i = 0; i < COLUMNS; i++)
        if (columns[i].cache) printf("%s: %s\n", columns[i].name, columns[i].text);
    printf("\n%lld tokens of context, prefill %.*f s, %s cache, dense %.1f MB, %s\n\n", (long long)T_c,
           prefill_s < 1 ? 3 : 1, prefill_s, dkv_type_name((dkv_type)type), (double)bytes_dense / 1e6, lm_where(m));
    print_table(columns);
}

/* ---- the command --------------------------------------------------------- */

static void check_arguments(void) {
    if (!model_path) usage("which model? give -m MODEL.gguf");
    if (!pattern_path) usage("which pattern? give -p PATTERN.dkv");
    if (!context_path) usage("which context? give -c CONTEXT.txt");
    if (!question) usage("what is the question? give -q TEXT");
    if (control >= 0) compare = true;
    if (type < 0) type = place == LM_CUDA ? DKV_BF16 : DKV_F16;
    if (place == LM_CUDA && type == DKV_F32) usage("--device cuda keeps f16, bf16, i8 or fp8, not f32");
    if (!threads) threads = sysconf(_SC_NPROCESSORS_ONLN);
}

/* One prefill packs all columns. Returns its seconds, packing not counted. */
static double fill_columns(column *columns, lm_model *m, const lm_ids *context, const dkv_allocator *alloc) {
    lm_cache *caches[COLUMNS];
    column *to[COLUMNS];
    double pack_s[COLUMNS] = {0};
    int n = 0;
    for (column *c = columns; c < columns + COLUMNS; c++)
        if (c->cache) to[n] = c, caches[n++] = c->cache;
    lm_prefill_options options = {.alloc = alloc, .pack_s = pack_s};
    if (isatty(STDERR_FILENO)) options.progress = show_progress;
    double start = seconds();
    if (lm_prefill(m, caches, n, context->v, context->n, &options)) fail("%s", lm_error(m));
    double prefill_s = seconds() - start;
    for (int i = 0; i < n; i++) to[i]->compress_s += pack_s[i], prefill_s -= pack_s[i];
    return prefill_s;
}

/* A run without --compare holds bytes_peak, and beyond that only padding, of context, dense layer and tail to blocks of
   rows (16, or 128 on a GPU) and of dimensions (16), and the caches' own records of each layer, head and run. */
static void assert_peak(const column *c, const dkv_shape *s, int64_t peak) {
    const dkv_plan *plan = lm_cache_plan(c->cache);
    const int64_t heads = (int64_t)s->L * s->Hkv, e = dkv_type_bytes(dkv_tail_type((dkv_type)type));
    const int64_t row = (s->d_k + s->d_v) * e, padded_row = ((s->d_k + 1) / 2 * 2 + (s->d_v + 15) / 16 * 16) * e;
    const int64_t records = 4096 + 256 * heads + plan->first[heads] * (int64_t)sizeof(dkv_run);
    const int64_t block = place == LM_CUDA ? 128 : 16, most = (c->bytes_peak / row + 3 * block * heads) * padded_row;
    if (peak < c->bytes_peak || peak > most + records)
        fail("bug: the KV cache took %lld bytes, not %lld..%lld; please report this", (long long)peak,
             (long long)c->bytes_peak, (long long)(most + records));
}

static void run(lm_model *m, const lm_chat *chat, const dkv_pattern *p, const char *text) {
    const dkv_shape *shape = &lm_get_params(m)->shape;
    lm_ids context = {0}, suffix = {0};
    encode_prompt(chat, text, &context, &suffix);
    check_lengths(&context, &suffix, lm_get_params(m)->n_ctx);
    check_pattern(p, shape, context.n);

    counter count = {0};
    dkv_allocator alloc = {counted_alloc, counted_free, &count};
    column columns[COLUMNS] = {{.name = "dense"}, {.name = "compressed"}, {.name = "streaming"}};
    open_columns(columns, m, p, context.n, suffix.n + n_answer, &alloc);
    double prefill_s = fill_columns(columns, m, &context, &alloc);
    for (int i = 0; i < COLUMNS; i++)
        if (columns[i].cache) answer(m, chat, &columns[i], &suffix, context.n);
    if (!compare) assert_peak(&columns[COMPRESSED], shape, place == LM_CUDA ? lm_kv_peak(m) : count.peak);
    report(columns, m, context.n, prefill_s);
    for (int i = 0; i < COLUMNS; i++) {
        lm_cache_destroy(columns[i].cache);
        free(columns[i].text);
    }
    free(context.v);
    free(suffix.v);
}

int command_run(int argc, char **argv) {
    const tool_option options[] = {
        {'m', "model", "MODEL.gguf", OPT_TEXT, &model_path, 0, 0, "a Llama-family model"},
        {'p', "pattern", "FILE.dkv", OPT_TEXT, &pattern_path, 0, 0, "a pattern made for it"},
        {'c', "context", "FILE.txt", OPT_TEXT, &context_path, 0, 0, "the long text"},
        {'q', "question", "TEXT", OPT_TEXT, &question, 0, 0, "what to ask about it"},
        {'n', "tokens", "N", OPT_INT, &n_answer, 1, 1048576, "length of the answer at most (default: 64)"},
        {0, "ignore-eos", NULL, OPT_FLAG, &ignore_eos, 0, 0, "answer N tokens, past the end of text: to time it"},
        {0, "ctx", "N", OPT_INT, &cut, 1, 68719476736., "cut the context to N tokens"},
        {0, "compare", NULL, OPT_FLAG, &compare, 0, 0, "answer from the dense cache too"},
        {0, "control", "streaming", OPT_CHOICE, &control, 0, 0, "and from the nearest tokens, as many (--compare)"},
        {0, "json", NULL, OPT_FLAG, &json, 0, 0, "print JSON"},
        {0, "type", TYPE_CHOICES, OPT_CHOICE, &type, 0, 0, "of the cache (default: f16; cuda: bf16)"},
        {0, "beyond", BEYOND_CHOICES, OPT_CHOICE, &beyond, 0, 0, "positions beyond the last bin (default: error)"},
        {0, "template", "raw|chatml|llama3|llama2", OPT_TEXT, &format, 0, 0, "chat format (default: the model's)"},
        {0, "temp", "T", OPT_REAL, &temperature, 0, 100, "sampling temperature (default: 0, the likeliest token)"},
        {0, "top-p", "P", OPT_REAL, &top_p, 0, 1, "sample from the likeliest tokens of this total (default: 1)"},
        {0, "seed", "N", OPT_INT, &seed, 0, TWO_53, "of sampling (default: 0)"},
        {0, "device", "cpu|cuda", OPT_CHOICE, &place, 0, 0, "where to run (default: cpu)"},
        {'t', "threads", "N", OPT_INT, &threads, 1, 1024, "(default: all processors)"},
        {0, NULL, NULL, OPT_END, NULL, 0, 0, NULL},
    };
    argv = parse_options(&argc, argv, options, SYNOPSIS, NOTES);
    if (argc) usage("what is '%s'? see dkv run --help", argv[0]);
    check_arguments();

    char err[512];
    dkv_pattern p;
    lm_model *m;
    lm_tokenizer *tokenizer;
    lm_chat chat;
    char *text = read_text(context_path);
    if (is_blank(text)) fail("%s is empty; -c needs a text", context_path);
    if (is_blank(question)) fail("the question is empty; ask with -q");
    load_pattern(&p, pattern_path);
    if (lm_open(&m, model_path, (lm_place)place, (int)threads, err, sizeof err)) fail("%s", err);
    if (lm_tokenizer_open(&tokenizer, lm_get_gguf(m), err, sizeof err)) fail("%s: %s", model_path, err);
    if (lm_chat_open(&chat, lm_get_gguf(m), tokenizer, format, NULL, err, sizeof err))
        fail("%s: %s", model_path, err);
    run(m, &chat, &p, text);
    free(text);
    lm_chat_close(&chat);
    lm_tokenizer_close(tokenizer);
    lm_close(m);
    dkv_pattern_free(&p, NULL);
    return 0;
}
