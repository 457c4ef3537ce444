/* dkv import: patterns of others as pattern files.

   DuoAttention   a folder with full_attention_heads.tsv, L lines of Hkv numbers, and config.json with sink_size and
                  recent_size: a KV head is kept in every bin, or in none.
   reference .pt  a bit per (layer, query head, bin), as torch.save wrote it; read without executing it. */
#define _GNU_SOURCE
#include "tool.h"
#include "torch.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static int64_t H, Hkv, d, D, context, W = 128, S = -1, R = -1;
static double physical = -1, threshold = -1;
static const char *like, *model, *output;

static const char NOTES[] =
    "SOURCE is a DuoAttention folder (full_attention_heads.tsv and config.json) or a reference pattern (.pt).\n"
    "A DuoAttention head that is a full one keeps all bins, others none; full are those above --threshold (0.5), or\n"
    "the largest --physical share of them, ties in order. Its query heads come from --like or --query-heads, and its\n"
    "bins from --ctx or --bins. Its recent window slides while decoding; here it ends with the context.\n"
    "A .pt file gives bits and bins; the KV heads come from --like or --kv-heads.\n";

/* A pattern of this shape with no bit set; bits are the caller's to free. */
static dkv_pattern empty_pattern(const char *source, int64_t layers) {
    dkv_pattern p = {.L = (int32_t)layers, .H = (int32_t)H, .Hkv = (int32_t)Hkv, .D = (int32_t)D, .d = (int32_t)d,
                     .W = W, .S = S, .R = R, .rho = -1};
    if (layers < 1 || layers > MAX_SIDE || H < 1 || H > MAX_SIDE || D < 1 || D > MAX_BINS)
        fail("%s: %lld layers, %lld heads, %lld bins are not a pattern", source, (long long)layers, (long long)H,
             (long long)D);
    if (Hkv < 1 || H % Hkv)
        fail("%s: %lld query heads cannot share %lld KV heads evenly", source, (long long)H, (long long)Hkv);
    snprintf(p.model, sizeof p.model, "%s", model ? model : "");
    snprintf(p.tool, sizeof p.tool, "dkv %s import", dkv_version());
    p.bits = allocate((size_t)(layers * H), (size_t)dkv_pattern_words(D) * 8);
    return p;
}

/* --like MODEL.gguf must agree with what the source says of its layers. */
static void shape_of_like(const char *source, int64_t layers) {
    static model_shape m; /* model points into it */
    if (!like) return;
    m = read_model_shape(like);
    if (m.L != layers) fail("%s has %lld layers, %s has %lld", source, (long long)layers, like, (long long)m.L);
    H = m.H, Hkv = m.Hkv, d = m.d;
    if (!model) model = m.name;
    if (!context && !D) context = m.context;
}

/* ---- DuoAttention -------------------------------------------------------- */

/* Lines of numbers between blanks: x[rows][columns]. */
typedef struct {
    double *x;
    int64_t rows, columns;
} table;

static table read_table(const char *path) {
    char *text = read_text(path), *c = text;
    table t = {allocate(strlen(text) / 2 + 1, sizeof *t.x), 0, 0};
    int64_t n = 0, line = 1, before;
    for (; *c; c += *c == '\n', line++) {
        for (before = n; *(c += strspn(c, " \t\r")) && *c != '\n'; n++) {
            char *end;
            t.x[n] = strtod(c, &end);
            if (end == c || !isfinite(t.x[n])) fail("%s:%lld: expected numbers", path, (long long)line);
            c = end;
        }
        if (n == before) continue; /* an empty line */
        if (t.rows++ && n - before != t.columns)
            fail("%s:%lld: %lld numbers, the line above has %lld", path, (long long)line, (long long)(n - before),
                 (long long)t.columns);
        t.columns = n - before;
    }
    if (!n) fail("%s holds no numbers", path);
    free(text);
    return t;
}

static int64_t config_int(const cJSON *config, const char *path, const char *key) {
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(config, key);
    double x = cJSON_IsNumber(v) ? v->valuedouble : -1;
    if (!(x >= 0 && x <= TWO_36) || rint(x) != x) fail("%s gives no usable %s", path, key);
    return (int64_t)x;
}

static void read_config(const char *path) {
    char *text = read_text(path);
    cJSON *config = cJSON_Parse(text);
    if (!cJSON_IsObject(config)) fail("%s is not a JSON object", path);
    if (S < 0) S = config_int(config, path, "sink_size");
    if (R < 0) R = config_int(config, path, "recent_size");
    cJSON_Delete(config);
    free(text);
}

/* What the wanted largest of n numbers are not below; *ties <- how many of that size are among them. */
static double cut_of(const table *t, int64_t wanted, int64_t *ties) {
    int64_t n = t->rows * t->columns;
    for (int64_t i = 0; i < n; i++) { /* tables are small: 32 * 8 */
        int64_t above = 0, equal = 0;
        for (int64_t k = 0; k < n; k++) above += t->x[k] > t->x[i], equal += t->x[k] == t->x[i];
        if (above < wanted && above + equal >= wanted) return *ties = wanted - above, t->x[i];
    }
    return *ties = 0, (double)INFINITY;
}

static dkv_pattern import_duo(const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/config.json", folder);
    if (S < 0 || R < 0) read_config(path);
    snprintf(path, sizeof path, "%s/full_attention_heads.tsv", folder);
    table t = read_table(path);
    shape_of_like(path, t.rows);
    if (Hkv && Hkv != t.columns)
        fail("%s has %lld KV heads, %s says %lld", path, (long long)t.columns, like ? like : "--kv-heads",
             (long long)Hkv);
    if (!H) usage("how many query heads? give --like MODEL.gguf or --query-heads");
    Hkv = t.columns;
    if (!D && context > S + R) D = (context - S - R + W - 1) / W;
    if (!D) usage("how many bins? give --bins, or --ctx with the longest context, beyond sink and recent");
    dkv_pattern p = empty_pattern(path, t.rows);
    int64_t ties = INT64_MAX;
    double cut = threshold >= 0 ? threshold : 0.5;
    if (physical >= 0) cut = cut_of(&t, llrint(physical * (double)(t.rows * t.columns)), &ties);
    for (int64_t i = 0; i < t.rows * t.columns; i++) {
        bool full = t.x[i] > cut || (physical >= 0 && t.x[i] == cut && ties-- > 0);
        for (int64_t b = 0; full && b < D; b++) set_row_bit(&p, i / Hkv, i % Hkv, Hkv, b);
    }
    p.budget = DKV_BUDGET_PHYSICAL;
    if (physical >= 0) p.rho = physical;
    free(t.x);
    return p;
}

/* ---- reference ----------------------------------------------------------- */

static dkv_pattern import_torch(const char *path) {
    char err[256];
    size_t size;
    torch_pattern t;
    char *file = read_file(path, &size);
    if (torch_read_pattern(&t, file, size, err, sizeof err)) fail("%s: %s", path, err);
    if (physical >= 0 || threshold >= 0) usage("--physical and --threshold are for DuoAttention; a .pt file has bits");
    if (D || context) usage("a .pt file has its bins; leave --bins and --ctx out");
    shape_of_like(path, t.dim[0]);
    if (H && H != t.dim[1])
        fail("%s has %lld query heads, %s says %lld", path, (long long)t.dim[1], like ? like : "--query-heads",
             (long long)H);
    if (!Hkv) usage("how many KV heads? give --like MODEL.gguf or --kv-heads");
    H = t.dim[1], D = t.dim[2];
    if (S < 0) S = 128;
    if (R < 0) R = 1024;
    dkv_pattern p = empty_pattern(path, t.dim[0]);
    for (int64_t i = 0; i < t.dim[0] * H * D; i++) {
        int64_t l = i / D / H, h = i / D % H, b = i % D;
        uint8_t value = t.values[l * t.stride[0] + h * t.stride[1] + b * t.stride[2]];
        if (value > 1) fail("%s: element [%lld][%lld][%lld] is %d, not 0 or 1", path, (long long)l, (long long)h,
                            (long long)b, value);
        if (value) set_row_bit(&p, l, h, H, b);
    }
    if (t.keep_ratio >= 0 && t.keep_ratio <= 1) p.rho = t.keep_ratio;
    free(file);
    return p;
}

int command_import(int argc, char **argv) {
    const tool_option options[] = {
        {'o', "output", "FILE", OPT_TEXT, &output, 0, 0, "the pattern file to write"},
        {0, "like", "MODEL.gguf", OPT_TEXT, &like, 0, 0, "the model: heads, head dimension, name"},
        {0, "query-heads", "H", OPT_INT, &H, 1, MAX_SIDE, "or query heads per layer (DuoAttention)"},
        {0, "kv-heads", "HKV", OPT_INT, &Hkv, 1, MAX_SIDE, "or KV heads per layer (.pt)"},
        {0, "head-dim", "d", OPT_INT, &d, 1, MAX_DIM, "head dimension (default: any)"},
        {0, "bins", "D", OPT_INT, &D, 1, MAX_BINS, "distance bins (DuoAttention)"},
        {0, "ctx", "T", OPT_INT, &context, 1, TWO_36, "or as many as a context of T tokens has"},
        {0, "bin-width", "W", OPT_INT, &W, 1, TWO_36, "tokens per bin (default: 128)"},
        {0, "sink", "S", OPT_INT, &S, 0, TWO_36, "instead of config.json's, or of 128"},
        {0, "recent", "R", OPT_INT, &R, 0, TWO_36, "instead of config.json's, or of 1024"},
        {0, "threshold", "X", OPT_REAL, &threshold, 0, 1, "full heads are those above (default: 0.5)"},
        {0, "physical", "RATIO", OPT_REAL, &physical, 0, 1, "or the largest share of the KV heads"},
        {0, "model", "TEXT", OPT_TEXT, &model, 0, 0, "model id to store (default: the GGUF's name)"},
        {0, NULL, NULL, OPT_END, NULL, 0, 0, NULL},
    };
    argv = parse_options(&argc, argv, options, "dkv import SOURCE -o FILE [options]", NOTES);
    struct stat s;
    if (argc != 1) usage("give one source; see dkv import --help");
    if (!output) usage("where to? give -o FILE.dkv");
    if (D && context) usage("--bins and --ctx say the same thing; give one");
    if (physical >= 0 && threshold >= 0) usage("--physical and --threshold say the same thing; give one");
    if (like && (H || Hkv || d)) usage("--like gives the shape; leave --query-heads and the others out");
    check_model_id(model);
    if (stat(argv[0], &s)) fail("cannot read %s: %s", argv[0], strerror(errno));
    dkv_pattern p = S_ISDIR(s.st_mode) ? import_duo(argv[0]) : import_torch(argv[0]);
    save_pattern(&p, output);
    free((void *)(uintptr_t)p.bits);
    return 0;
}
