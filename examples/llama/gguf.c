#define _GNU_SOURCE
#include "gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "gguf.c reads little-endian files in place"
#endif

/* Value types, numbered as in the file. */
enum { V_U8, V_I8, V_U16, V_I16, V_U32, V_I32, V_F32, V_BOOL, V_STR, V_ARR, V_U64, V_I64, V_F64, V_COUNT };

static const uint8_t value_bytes[V_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* Smallest encodings: what bounds a count by the bytes that are left before anything is allocated for it. */
enum { MIN_STR = 8, MIN_KEY = MIN_STR + 4 + 1, MIN_INFO = MIN_STR + 4 + 8 + 4 + 8, DEFAULT_ALIGNMENT = 32 };

typedef struct {
    gguf_str name;
    uint32_t type;       /* of the value, or of the elements when is_array */
    bool is_array;
    uint64_t count;      /* elements; 1 for a plain value */
    const uint8_t *data; /* in the file */
    void *copy;          /* arrays: gguf_str[count] of strings, aligned int32_t[count] or float[count]; else NULL */
} key_value;

struct gguf {
    void *map; /* NULL when opened from memory */
    size_t size;
    uint64_t n_keys, n_tensors;
    key_value *keys;      /* [n_keys], by name */
    gguf_tensor *tensors; /* [n_tensors], by name */
};

/* The part not yet read, and where to say what is wrong with it. */
typedef struct {
    const uint8_t *start, *p, *end;
    char *err;
    size_t err_size;
} cursor;

__attribute__((format(printf, 2, 3))) static void explain(cursor *c, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->err, c->err_size, fmt, args);
    va_end(args);
}

#define fail(c, ...) (explain(c, __VA_ARGS__), false)

static size_t left(const cursor *c) { return (size_t)(c->end - c->p); }

/* ---- tensor types ---- */

typedef struct {
    int type;
    const char *name;
    int block; /* elements */
    int bytes; /* of a block */
} tensor_type;

static const tensor_type tensor_types[] = {
    {GGUF_F32, "F32", 1, 4},       {GGUF_F16, "F16", 1, 2},       {GGUF_BF16, "BF16", 1, 2},
    {GGUF_Q4_0, "Q4_0", 32, 18},   {GGUF_Q4_1, "Q4_1", 32, 20},   {GGUF_Q5_0, "Q5_0", 32, 22},
    {GGUF_Q5_1, "Q5_1", 32, 24},   {GGUF_Q8_0, "Q8_0", 32, 34},   {GGUF_Q4_K, "Q4_K", 256, 144},
    {GGUF_Q6_K, "Q6_K", 256, 210},
};

static const tensor_type *type_find(int type) {
    for (size_t i = 0; i < sizeof tensor_types / sizeof *tensor_types; i++)
        if (tensor_types[i].type == type) return &tensor_types[i];
    return NULL;
}

size_t gguf_row_bytes(int type, int64_t n) {
    const tensor_type *t = type_find(type);
    if (!t || n < 0 || n % t->block || n / t->block > INT64_MAX / t->bytes) return 0;
    return (size_t)(n / t->block) * (size_t)t->bytes;
}

const char *gguf_type_name(int type) {
    const tensor_type *t = type_find(type);
    return t ? t->name : "?";
}

/* ---- reading ---- */

static bool take(cursor *c, void *out, size_t n) {
    if (left(c) < n) return fail(c, "gguf: file ends inside its header, at byte %zu", (size_t)(c->end - c->start));
    memcpy(out, c->p, n);
    c->p += n;
    return true;
}

static bool take_u32(cursor *c, uint32_t *out) { return take(c, out, sizeof *out); }
static bool take_u64(cursor *c, uint64_t *out) { return take(c, out, sizeof *out); }

static bool take_str(cursor *c, gguf_str *out) {
    if (!take_u64(c, &out->len)) return false;
    if (out->len > left(c)) return fail(c, "gguf: a string at byte %zu runs past the end", (size_t)(c->p - c->start));
    out->ptr = (const char *)c->p;
    c->p += out->len;
    return true;
}

/* Names are printed cut and escaped: they are the file's, and may hold anything. */
typedef struct { char text[68]; } shown;

static shown show(gguf_str s) {
    shown out = {{0}};
    size_t n = s.len < sizeof out.text - 1 ? (size_t)s.len : sizeof out.text - 1;
    for (size_t i = 0; i < n; i++) out.text[i] = s.ptr[i] >= ' ' && s.ptr[i] <= '~' ? s.ptr[i] : '?';
    return out;
}

static bool take_str_array(cursor *c, key_value *k) {
    if (k->count > left(c) / MIN_STR) return fail(c, "gguf: array %s runs past the end", show(k->name).text);
    gguf_str *strs = malloc((size_t)k->count * sizeof *strs + 1);
    if (!strs) return fail(c, "gguf: no memory for array %s", show(k->name).text);
    k->copy = strs;
    for (uint64_t i = 0; i < k->count; i++)
        if (!take_str(c, &strs[i])) return false;
    return true;
}

static bool take_number_array(cursor *c, key_value *k) {
    size_t width = value_bytes[k->type];
    if (k->count > left(c) / width) return fail(c, "gguf: array %s runs past the end", show(k->name).text);
    size_t bytes = (size_t)k->count * width;
    if (width == sizeof(int32_t)) {
        k->copy = malloc(bytes + 1);
        if (!k->copy) return fail(c, "gguf: no memory for array %s", show(k->name).text);
        memcpy(k->copy, c->p, bytes);
    }
    c->p += bytes;
    return true;
}

static bool take_array(cursor *c, key_value *k) {
    k->is_array = true;
    if (!take_u32(c, &k->type) || !take_u64(c, &k->count)) return false;
    if (k->type == V_ARR) return fail(c, "gguf: key %s is an array of arrays", show(k->name).text);
    if (k->type >= V_COUNT) return fail(c, "gguf: key %s has unknown type %u", show(k->name).text, k->type);
    return k->type == V_STR ? take_str_array(c, k) : take_number_array(c, k);
}

static bool take_key(cursor *c, key_value *k) {
    gguf_str skipped;
    if (!take_str(c, &k->name) || !take_u32(c, &k->type)) return false;
    if (k->type == V_ARR) return take_array(c, k);
    if (k->type >= V_COUNT) return fail(c, "gguf: key %s has unknown type %u", show(k->name).text, k->type);
    k->count = 1;
    k->data = c->p;
    if (k->type == V_STR) return take_str(c, &skipped);
    if (left(c) < value_bytes[k->type]) return fail(c, "gguf: file ends inside key %s", show(k->name).text);
    c->p += value_bytes[k->type];
    return true;
}

/* Leaves data pointing at NULL and bytes set; *offset is checked when the start of the data is known. */
static bool take_info(cursor *c, gguf_tensor *t, uint64_t *offset) {
    uint32_t n_dims, type;
    if (!take_str(c, &t->name) || !take_u32(c, &n_dims)) return false;
    if (n_dims < 1 || n_dims > GGUF_MAX_DIMS)
        return fail(c, "gguf: tensor %s has %u dimensions, not 1 to %d", show(t->name).text, n_dims, GGUF_MAX_DIMS);
    t->n_dims = (int)n_dims;
    int64_t rows = 1;
    for (int i = 0; i < GGUF_MAX_DIMS; i++) {
        t->dims[i] = 1;
        if (i < t->n_dims && !take(c, &t->dims[i], sizeof t->dims[i])) return false;
        if (t->dims[i] < 1 || (i && __builtin_mul_overflow(rows, t->dims[i], &rows)))
            return fail(c, "gguf: tensor %s has an impossible shape", show(t->name).text);
    }
    if (!take_u32(c, &type) || !take_u64(c, offset)) return false;
    if (type > INT32_MAX || !type_find((int)type))
        return fail(c, "gguf: tensor %s has type %u, which is not supported", show(t->name).text, type);
    t->type = (int)type;
    size_t row = gguf_row_bytes(t->type, t->dims[0]);
    if (!row) return fail(c, "gguf: tensor %s has rows of %lld, no whole number of %s blocks", show(t->name).text,
                          (long long)t->dims[0], gguf_type_name(t->type));
    if (__builtin_mul_overflow(row, (size_t)rows, &t->bytes))
        return fail(c, "gguf: tensor %s is too large", show(t->name).text);
    return true;
}

/* ---- lookup: both tables are sorted by name ---- */

static int str_compare(gguf_str a, gguf_str b) {
    size_t n = (size_t)(a.len < b.len ? a.len : b.len);
    int order = n ? memcmp(a.ptr, b.ptr, n) : 0;
    return order ? order : (a.len > b.len) - (a.len < b.len);
}

/* Both structs begin with their name. */
static int by_name(const void *a, const void *b) { return str_compare(*(const gguf_str *)a, *(const gguf_str *)b); }

static bool sort_names(cursor *c, void *items, uint64_t n, size_t item_bytes, const char *what) {
    if (n) qsort(items, (size_t)n, item_bytes, by_name);
    for (uint64_t i = 1; i < n; i++) {
        const char *item = (const char *)items + i * item_bytes;
        if (by_name(item - item_bytes, item) == 0)
            return fail(c, "gguf: %s %s occurs twice", what, show(*(const gguf_str *)item).text);
    }
    return true;
}

static const void *find(const void *items, uint64_t n, size_t item_bytes, const char *name) {
    gguf_str key = {name, strlen(name)};
    return n ? bsearch(&key, items, (size_t)n, item_bytes, by_name) : NULL;
}

static const key_value *find_key(const gguf *g, const char *key) {
    return find(g->keys, g->n_keys, sizeof *g->keys, key);
}

/* ---- opening ---- */

static bool read_keys(gguf *g, cursor *c, uint64_t n) {
    if (n > left(c) / MIN_KEY)
        return fail(c, "gguf: claims %llu keys, more than the file holds", (unsigned long long)n);
    g->keys = calloc((size_t)n + 1, sizeof *g->keys);
    if (!g->keys) return fail(c, "gguf: no memory for the keys");
    for (g->n_keys = 0; g->n_keys < n;) /* counted first, so that a key that fails is freed too */
        if (!take_key(c, &g->keys[g->n_keys++])) return false;
    return sort_names(c, g->keys, n, sizeof *g->keys, "key");
}

static bool read_infos(gguf *g, cursor *c, uint64_t n, uint64_t *offsets) {
    g->tensors = calloc((size_t)n + 1, sizeof *g->tensors);
    if (!g->tensors) return fail(c, "gguf: no memory for the tensors");
    for (; g->n_tensors < n; g->n_tensors++)
        if (!take_info(c, &g->tensors[g->n_tensors], &offsets[g->n_tensors])) return false;
    return true;
}

static bool read_alignment(const gguf *g, cursor *c, uint64_t *out) {
    int64_t alignment = DEFAULT_ALIGNMENT;
    if (find_key(g, "general.alignment") && !gguf_get_int(g, "general.alignment", &alignment)) alignment = 0;
    if (alignment < 1 || (alignment & (alignment - 1)))
        return fail(c, "gguf: general.alignment is not a power of two");
    *out = (uint64_t)alignment;
    return true;
}

static bool place_tensors(gguf *g, cursor *c, const uint64_t *offsets) {
    uint64_t alignment, head = (uint64_t)(c->p - c->start);
    if (!read_alignment(g, c, &alignment)) return false;
    uint64_t start = head + (alignment - head % alignment) % alignment; /* < 2^63 + 2^62: cannot wrap */
    uint64_t room = start < g->size ? g->size - start : 0;
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        gguf_tensor *t = &g->tensors[i];
        if (offsets[i] % alignment) return fail(c, "gguf: tensor %s is not aligned", show(t->name).text);
        if (offsets[i] > room || t->bytes > room - offsets[i])
            return fail(c, "gguf: tensor %s runs past the end; is the file cut short?", show(t->name).text);
        t->data = c->start + start + offsets[i];
    }
    return true;
}

static bool read_tensors(gguf *g, cursor *c, uint64_t n) {
    if (n > left(c) / MIN_INFO)
        return fail(c, "gguf: claims %llu tensors, more than the file holds", (unsigned long long)n);
    uint64_t *offsets = malloc((size_t)n * sizeof *offsets + 1);
    if (!offsets) return fail(c, "gguf: no memory for the tensors");
    bool ok = read_infos(g, c, n, offsets) && place_tensors(g, c, offsets);
    free(offsets);
    return ok && sort_names(c, g->tensors, n, sizeof *g->tensors, "tensor");
}

static bool read_file(gguf *g, cursor *c) {
    uint32_t magic, version;
    uint64_t n_tensors, n_keys;
    if (left(c) < 4 || memcmp(c->p, "GGUF", 4)) return fail(c, "gguf: not a GGUF file");
    if (!take_u32(c, &magic) || !take_u32(c, &version)) return false;
    if (version != 3) return fail(c, "gguf: version is %u, only 3 (little-endian) is read", version);
    return take_u64(c, &n_tensors) && take_u64(c, &n_keys) && read_keys(g, c, n_keys) && read_tensors(g, c, n_tensors);
}

int gguf_open_memory(gguf **out, const void *data, size_t size, char *err, size_t err_size) {
    const uint8_t *bytes = data;
    cursor c = {bytes, bytes, bytes + size, err, err_size};
    gguf *g = calloc(1, sizeof *g);
    *out = g;
    if (!g) return explain(&c, "gguf: no memory"), -1;
    g->size = size;
    if (read_file(g, &c)) return 0;
    gguf_close(g);
    *out = NULL;
    return -1;
}

static void *map_file(const char *path, size_t *size, cursor *c) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    void *map = MAP_FAILED;
    if (fd < 0 || fstat(fd, &st)) explain(c, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode) || st.st_size < 1) explain(c, "%s: empty or not a regular file", path);
    else if ((map = mmap(NULL, *size = (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        explain(c, "%s: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    return map == MAP_FAILED ? NULL : map;
}

int gguf_open(gguf **out, const char *path, char *err, size_t err_size) {
    size_t size = 0;
    char why[192];
    cursor c = {.err = err, .err_size = err_size};
    *out = NULL;
    void *map = map_file(path, &size, &c);
    if (!map) return -1;
    if (gguf_open_memory(out, map, size, why, sizeof why)) {
        munmap(map, size);
        return explain(&c, "%s: %s", path, why), -1;
    }
    (*out)->map = map;
    return 0;
}

void gguf_close(gguf *g) {
    if (!g) return;
    for (uint64_t i = 0; i < g->n_keys; i++) free(g->keys[i].copy);
    if (g->map) munmap(g->map, g->size);
    free(g->keys);
    free(g->tensors);
    free(g);
}

/* ---- values ---- */

static const key_value *find_plain(const gguf *g, const char *key) {
    const key_value *k = find_key(g, key);
    return k && !k->is_array ? k : NULL;
}

bool gguf_has(const gguf *g, const char *key) { return find_key(g, key) != NULL; }

#define LOAD(type, p) __extension__({ type v_; memcpy(&v_, p, sizeof v_); v_; })

bool gguf_get_int(const gguf *g, const char *key, int64_t *out) {
    const key_value *k = find_plain(g, key);
    switch (k ? k->type : V_COUNT) {
    case V_U8: *out = LOAD(uint8_t, k->data); return true;
    case V_I8: *out = LOAD(int8_t, k->data); return true;
    case V_U16: *out = LOAD(uint16_t, k->data); return true;
    case V_I16: *out = LOAD(int16_t, k->data); return true;
    case V_U32: *out = LOAD(uint32_t, k->data); return true;
    case V_I32: *out = LOAD(int32_t, k->data); return true;
    case V_I64: *out = LOAD(int64_t, k->data); return true;
    case V_BOOL: *out = *k->data != 0; return true;
    case V_U64: return (*out = LOAD(int64_t, k->data)) >= 0;
    default: return false;
    }
}

bool gguf_get_real(const gguf *g, const char *key, double *out) {
    const key_value *k = find_plain(g, key);
    int64_t i;
    if (k && k->type == V_F32) *out = (double)LOAD(float, k->data);
    else if (k && k->type == V_F64) *out = LOAD(double, k->data);
    else if (gguf_get_int(g, key, &i)) *out = (double)i;
    else return false;
    return true;
}

bool gguf_get_str(const gguf *g, const char *key, gguf_str *out) {
    const key_value *k = find_plain(g, key);
    if (!k || k->type != V_STR) return false;
    *out = (gguf_str){(const char *)k->data + sizeof(uint64_t), LOAD(uint64_t, k->data)};
    return true;
}

static int64_t get_array(const gguf *g, const char *key, uint32_t type_a, uint32_t type_b, const void **out) {
    const key_value *k = find_key(g, key);
    if (!k || !k->is_array || (k->type != type_a && k->type != type_b)) return -1;
    *out = k->copy;
    return (int64_t)k->count;
}

int64_t gguf_get_strs(const gguf *g, const char *key, const gguf_str **out) {
    const void *p = NULL;
    int64_t n = get_array(g, key, V_STR, V_STR, &p);
    if (n >= 0) *out = p;
    return n;
}

int64_t gguf_get_ints(const gguf *g, const char *key, const int32_t **out) {
    const void *p = NULL;
    int64_t n = get_array(g, key, V_I32, V_U32, &p);
    if (n >= 0) *out = p;
    return n;
}

int64_t gguf_get_reals(const gguf *g, const char *key, const float **out) {
    const void *p = NULL;
    int64_t n = get_array(g, key, V_F32, V_F32, &p);
    if (n >= 0) *out = p;
    return n;
}

const gguf_tensor *gguf_find(const gguf *g, const char *name) {
    return find(g->tensors, g->n_tensors, sizeof *g->tensors, name);
}

int64_t gguf_tensor_count(const gguf *g) { return (int64_t)g->n_tensors; }
const gguf_tensor *gguf_tensor_at(const gguf *g, int64_t i) { return &g->tensors[i]; }
int64_t gguf_key_count(const gguf *g) { return (int64_t)g->n_keys; }
gguf_str gguf_key_at(const gguf *g, int64_t i) { return g->keys[i].name; }
