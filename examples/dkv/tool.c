#define _GNU_SOURCE
#include "tool.h"

#include "../llama/gguf.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- errors -------------------------------------------------------------- */

static void complain(const char *format, va_list args) {
    fflush(stdout);
    fputs("dkv: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    complain(format, args);
    va_end(args);
    exit(1);
}

void usage(const char *format, ...) {
    va_list args;
    va_start(args, format);
    complain(format, args);
    va_end(args);
    exit(2);
}

void *allocate(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size ? size : 1);
    if (!memory) fail("out of memory (%zu * %zu bytes)", count, size);
    return memory;
}

/* ---- options ------------------------------------------------------------- */

enum { MAX_OPTIONS = 32, LONG_ONLY = 256 };

static void print_help(const tool_option *options, const char *synopsis, const char *notes) {
    printf("usage: %s\n\n", synopsis);
    for (const tool_option *o = options; o->type != OPT_END; o++) {
        int n = o->key ? printf("  -%c, ", o->key) : printf("      ");
        n += printf("--%s %s", o->name, o->value ? o->value : "");
        if (n > 30) putchar('\n'), n = 0;
        printf("%*s%s\n", 32 - n, "", o->help);
    }
    printf("  %-28s  %s\n", "    --help", "print this");
    if (notes) printf("\n%s", notes);
    exit(0);
}

static int choice_index(const tool_option *o, const char *text) {
    size_t n = strlen(text);
    const char *c = o->value;
    for (int i = 0; c; i++, c = strchr(c, '|')) {
        c += *c == '|';
        if (n && n == strcspn(c, "|") && memcmp(c, text, n) == 0) return i;
    }
    usage("--%s must be one of %s, not '%s'", o->name, o->value, text);
}

static void store_value(const tool_option *o, const char *text) {
    char *end = NULL;
    errno = 0;
    switch (o->type) {
    case OPT_FLAG: *(bool *)o->target = true; return;
    case OPT_TEXT: *(const char **)o->target = text; return;
    case OPT_CHOICE: *(int *)o->target = choice_index(o, text); return;
    case OPT_INT: {
        long long value = strtoll(text, &end, 10);
        if (end == text || *end || errno || !((double)value >= o->min && (double)value <= o->max))
            usage("--%s must be a whole number in %.0f..%.0f, not '%s'", o->name, o->min, o->max, text);
        *(int64_t *)o->target = value;
        return;
    }
    case OPT_REAL: {
        double value = strtod(text, &end);
        if (end == text || *end || !(value >= o->min && value <= o->max))
            usage("--%s must be a number in %g..%g, not '%s'", o->name, o->min, o->max, text);
        *(double *)o->target = value;
        return;
    }
    case OPT_END: break;
    }
}

char **parse_options(int *argc, char **argv, const tool_option *options, const char *synopsis, const char *notes) {
    struct option longs[MAX_OPTIONS + 2] = {{"help", no_argument, NULL, 'h'}};
    char shorts[2 * MAX_OPTIONS + 3] = ":h", *s = shorts + 2;
    for (int i = 0; options[i].type != OPT_END; i++) {
        bool flag = options[i].type == OPT_FLAG;
        longs[i + 1] = (struct option){options[i].name, flag ? no_argument : required_argument, NULL, LONG_ONLY + i};
        if (options[i].key) *s++ = options[i].key;
        if (options[i].key && !flag) *s++ = ':';
    }
    opterr = 0;
    for (int c; (c = getopt_long(*argc, argv, shorts, longs, NULL)) != -1;) {
        if (c == 'h') print_help(options, synopsis, notes);
        if (c == ':') usage("%s needs a value; see dkv %s --help", argv[optind - 1], argv[0]);
        if (c == '?' && (optopt >= LONG_ONLY || optopt == 'h'))
            usage("%s takes no value; see dkv %s --help", argv[optind - 1], argv[0]);
        if (c == '?' && optopt) usage("no option -%c; see dkv %s --help", optopt, argv[0]);
        if (c == '?') usage("no option %s; see dkv %s --help", argv[optind - 1], argv[0]);
        int i = c - LONG_ONLY;
        if (c < LONG_ONLY)
            for (i = 0; options[i].key != c;) i++;
        store_value(&options[i], optarg);
    }
    *argc -= optind;
    return argv + optind;
}

/* ---- files --------------------------------------------------------------- */

char *read_file(const char *path, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    if (!f) fail("cannot read %s: %s", path, strerror(errno));
    char *data = NULL;
    size_t n = 0, capacity = 0, got;
    do {
        capacity = 2 * capacity + 65536;
        if (!(data = realloc(data, capacity))) fail("out of memory reading %s", path);
        n += got = fread(data + n, 1, capacity - 1 - n, f);
    } while (got);
    if (ferror(f)) fail("cannot read %s: %s", path, strerror(errno));
    fclose(f);
    data[n] = 0;
    *bytes = n;
    return data;
}

char *read_text(const char *path) {
    size_t bytes;
    char *text = read_file(path, &bytes);
    if (strlen(text) != bytes) fail("%s is not a text file (it holds a zero byte)", path);
    return text;
}

const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

__attribute__((noreturn)) static void cannot_write(const char *path) {
    fail("cannot write %s: %s", path, strerror(errno));
}

/* A plain file, or a new one. Devices, pipes and symbolic links are written to as they are. */
static bool replaceable(const char *path) {
    struct stat s;
    return lstat(path, &s) || S_ISREG(s.st_mode);
}

/* What is renamed to path when it is complete. */
static char *beside_of(const char *path) {
    char *beside;
    if (asprintf(&beside, "%s.tmp", path) < 0) fail("out of memory");
    return beside;
}

/* Whether a file that is not there can be made; where a link leads to, too. */
static bool creatable(const char *path) {
    FILE *f = fopen(path, "ab");
    char *made = f ? realpath(path, NULL) : NULL;
    if (f) fclose(f);
    if (made) remove(made);
    free(made);
    return f;
}

/* The folder that a file is or would be in, without links; NULL: there is none. */
static char *folder_of(const char *path) {
    char *folder;
    if (asprintf(&folder, "%.*s.", (int)(base_name(path) - path), path) < 0) fail("out of memory");
    char *real = realpath(folder, NULL);
    free(folder);
    return real;
}

/* A file beside path can be written and renamed to it. */
static bool can_replace(const char *path) {
    struct stat s;
    char *beside = beside_of(path), *folder = folder_of(path);
    bool can = folder && !access(folder, W_OK);
    if (can && lstat(beside, &s)) can = creatable(beside);
    else if (can && !S_ISREG(s.st_mode)) fail("cannot write %s: %s is in the way", path, beside);
    else can = can && !access(beside, W_OK);
    const int why = errno;
    free(beside);
    free(folder);
    errno = why;
    return can;
}

void check_writable(const char *path) {
    struct stat s;
    if (!*path) fail("a file to write needs a name");
    const bool there = !stat(path, &s);
    if (there && S_ISDIR(s.st_mode)) errno = EISDIR, cannot_write(path);
    if (replaceable(path) ? !can_replace(path) : there ? access(path, W_OK) : !creatable(path)) cannot_write(path);
}

/* Two names of one file, whether it is there or not. */
static bool same_file(const char *a, const char *b) {
    char *x = folder_of(a), *y = folder_of(b);
    const bool same = x && y && !strcmp(x, y) && !strcmp(base_name(a), base_name(b));
    free(x);
    free(y);
    return same;
}

void check_apart(const char *path, const char *option, const char *other) {
    if (other && same_file(path, other)) usage("-o and %s name the same file, %s; give another", option, path);
}

void write_file(const char *path, const void *data, size_t bytes) {
    const bool replaced = replaceable(path);
    char *beside = beside_of(path);
    FILE *f = fopen(replaced ? beside : path, "wb");
    if (!f) cannot_write(path);
    bool written = fwrite(data, 1, bytes, f) == bytes;
    written &= !fclose(f); /* the last bytes may fail only here */
    if (!written || (replaced && rename(beside, path))) {
        const int why = errno;
        if (replaced) remove(beside);
        errno = why;
        cannot_write(path);
    }
    free(beside);
}

void load_pattern(dkv_pattern *out, const char *path) {
    errno = 0;
    dkv_result r = dkv_pattern_load(out, path, NULL);
    if (r == DKV_ERR_IO) fail("cannot read %s: %s", path, strerror(errno));
    if (r != DKV_OK) fail("%s: %s", path, dkv_result_string(r));
}

/* ---- models ------------------------------------------------------------- */

static bool printable(char c) { return c >= ' ' && c <= '~'; }

static int64_t model_int(const gguf *g, gguf_str arch, const char *name, int64_t absent) {
    char key[128];
    int64_t value;
    snprintf(key, sizeof key, "%.*s.%s", (int)arch.len, arch.ptr, name);
    return gguf_get_int(g, key, &value) ? value : absent;
}

model_shape read_model_shape(const char *path) {
    char err[256];
    model_shape m = {0};
    gguf *g;
    gguf_str arch, title;
    if (gguf_open(&g, path, err, sizeof err)) fail("%s", err);
    if (!gguf_get_str(g, "general.architecture", &arch) || arch.len > 64) fail("%s names no architecture", path);
    m.L = model_int(g, arch, "block_count", 0);
    m.H = model_int(g, arch, "attention.head_count", 0);
    m.Hkv = model_int(g, arch, "attention.head_count_kv", m.H);
    if (m.L < 1 || m.H < 1 || m.Hkv < 1 || m.L > MAX_SIDE || m.H > MAX_SIDE || m.Hkv > m.H)
        fail("%s gives no usable layers or heads; use --layers, --query-heads, --kv-heads", path);
    m.d = model_int(g, arch, "attention.key_length", model_int(g, arch, "embedding_length", 0) / m.H);
    m.context = model_int(g, arch, "context_length", 0);
    if (!gguf_get_str(g, "general.name", &title)) title.len = 0;
    for (size_t i = 0; i < title.len && i + 1 < sizeof m.name; i++)
        m.name[i] = printable(title.ptr[i]) ? title.ptr[i] : '?';
    gguf_close(g);
    return m;
}

void check_model_id(const char *model) {
    if (model && strlen(model) > 63) usage("--model holds at most 63 characters");
    for (const char *c = model; c && *c; c++)
        if (!printable(*c)) usage("--model must be printable ASCII");
}

/* ---- patterns ------------------------------------------------------------ */

void set_row_bit(dkv_pattern *p, int64_t l, int64_t row, int64_t rows, int64_t b) {
    for (int64_t h = row * (p->H / rows); h < (row + 1) * (p->H / rows); h++)
        dkv_bits_set((void *)(uintptr_t)p->bits, p, (int)l, (int)h, b, 1);
}

void mark_nearest(unsigned char *to, int64_t rows, int64_t D, int64_t left) {
    for (int64_t b = 0; left; b++)
        for (int64_t row = 0; row < rows && left; row++, left--) to[row * D + b] = 1;
}

int64_t count_cells(const dkv_pattern *p) {
    int64_t cells = 0;
    for (int l = 0; l < p->L; l++)
        for (int g = 0; g < p->Hkv; g++)
            for (int64_t b = 0; b < p->D; b++) cells += dkv_union_get(p, l, g, b);
    return cells;
}

void save_pattern(dkv_pattern *p, const char *path) {
    p->K = dkv_pattern_count(p);
    if (p->rho < 0) p->rho = (double)p->K / (double)((int64_t)p->L * p->H * p->D);
    size_t bytes;
    dkv_result r = dkv_pattern_write(NULL, &bytes, p);
    void *image = allocate(1, r ? 1 : bytes);
    if (!r) r = dkv_pattern_write(image, &bytes, p);
    if (r) fail("%s: %s", path, dkv_result_string(r));
    write_file(path, image, bytes);
    free(image);
}

dkv_pattern cut_pattern(const dkv_pattern *p, int64_t D) {
    dkv_pattern q = *p;
    q.D = (int32_t)D;
    q.p = NULL;
    q.bits = allocate((size_t)q.L * (size_t)q.H, (size_t)dkv_pattern_words(D) * 8);
    for (int64_t i = 0; i < (int64_t)q.L * q.H * D; i++) {
        const int l = (int)(i / D / q.H), h = (int)(i / D % q.H);
        dkv_bits_set((void *)(uintptr_t)q.bits, &q, l, h, i % D, dkv_pattern_get(p, l, h, i % D));
    }
    q.K = dkv_pattern_count(&q);
    q.rho = (double)q.K / (double)((int64_t)q.L * q.H * D);
    return q;
}

void pattern_cells(unsigned char *cells, const dkv_pattern *p) {
    for (int l = 0; l < p->L; l++)
        for (int g = 0; g < p->Hkv; g++)
            for (int64_t b = 0; b < p->D; b++) *cells++ = (unsigned char)dkv_union_get(p, l, g, b);
}

dkv_pattern pattern_of_cells(const dkv_pattern *like, const unsigned char *cells) {
    dkv_pattern p = *like;
    int64_t n = (int64_t)p.L * p.Hkv * p.D, kept = 0;
    p.bits = allocate((size_t)p.L * (size_t)p.H, (size_t)dkv_pattern_words(p.D) * 8);
    for (int64_t i = 0; i < n; i++)
        if (cells[i]) set_row_bit(&p, i / p.D / p.Hkv, i / p.D % p.Hkv, p.Hkv, i % p.D), kept++;
    p.K = kept * (p.H / p.Hkv);
    p.budget = DKV_BUDGET_PHYSICAL;
    p.rho = (double)kept / (double)n;
    p.p = NULL;
    return p;
}

/* ---- output, time and chance --------------------------------------------- */

double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void print_json_object(cJSON *o) {
    char *text = cJSON_Print(o);
    if (!text) fail("out of memory");
    puts(text);
    cJSON_free(text);
    cJSON_Delete(o);
}

double uniform(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) / TWO_53;
}
