/* libFuzzer target: GGUF files as raw bytes, and a valid file of every tensor type with edits. What is accepted must
   survive every getter, every byte of the data, and one row of each tensor to f32 and into the decode product. */
#include "fuzz.h"

#include "../examples/llama/gguf.h"
#include "../examples/llama/quant.h"
#include "gguf_build.h"

static unsigned sink; /* keeps the reads */

static void touch(const void *p, size_t n) {
    for (size_t i = 0; i < n; i++) sink += ((const unsigned char *)p)[i];
}

static void use_key(const gguf *g, gguf_str name) {
    char *key = malloc(name.len + 1);
    int64_t i, n;
    double r;
    gguf_str s;
    const gguf_str *strs;
    const int32_t *ints;
    const float *reals;
    memcpy(key, name.ptr, name.len);
    key[name.len] = 0;
    REQUIRE(gguf_has(g, key) || strlen(key) < name.len);
    if (gguf_get_int(g, key, &i)) REQUIRE(gguf_get_real(g, key, &r) && r == (double)i);
    if (gguf_get_str(g, key, &s)) touch(s.ptr, s.len);
    if ((n = gguf_get_strs(g, key, &strs)) > 0)
        for (i = 0; i < n; i++) touch(strs[i].ptr, strs[i].len);
    if ((n = gguf_get_ints(g, key, &ints)) > 0) touch(ints, (size_t)n * sizeof *ints);
    if ((n = gguf_get_reals(g, key, &reals)) > 0) touch(reals, (size_t)n * sizeof *reals);
    free(key);
}

static void use_product(const gguf_tensor *t, const float *x) {
    float y;
    quant_mat m = {.type = t->type, .rows = 1, .cols = t->dims[0], .data = t->data};
    quant_vec v;
    void *memory = malloc(quant_vec_bytes(m.cols) + 1), *packed = aligned_alloc(64, quant_packed_bytes(&m));
    quant_vec_set(&v, memory, x, m.cols);
    if (quant_packed_bytes(&m)) quant_pack(packed, &m, 0, 1), m.packed = packed;
    quant_matvec(&y, &m, &v, 0, 1);
    touch(&y, sizeof y);
    free(packed);
    free(memory);
}

static void use_tensor(const gguf_tensor *t) {
    size_t row = gguf_row_bytes(t->type, t->dims[0]);
    REQUIRE(row && t->bytes % row == 0 && strcmp(gguf_type_name(t->type), "?"));
    touch(t->data, t->bytes);
    float *x = malloc((size_t)t->dims[0] * sizeof *x);
    quant_row_to_f32(x, (const char *)t->data + t->bytes - row, t->type, t->dims[0]);
    use_product(t, x);
    free(x);
}

static void open_one(const uint8_t *data, size_t size) {
    gguf *g;
    char err[128] = "";
    if (gguf_open_memory(&g, data, size, err, sizeof err)) {
        REQUIRE(!g && err[0] && !strchr(err, '\n'));
        return;
    }
    for (int64_t i = 0; i < gguf_key_count(g); i++) use_key(g, gguf_key_at(g, i));
    for (int64_t i = 0; i < gguf_tensor_count(g); i++) use_tensor(gguf_tensor_at(g, i));
    gguf_close(g);
}

/* Every kind of value, and one row of every tensor type. */
static void put_valid(file *f) {
    static const uint32_t types[] = {0, 1, 2, 3, 6, 7, 8, 12, 14, 30};
    const size_t n_types = sizeof types / sizeof *types;
    put_head(f, n_types, 8);
    put_key_str(f, "general.architecture", "llama");
    put_key_u32(f, "general.alignment", 32);
    put_key_f32(f, "rope.freq_base", 1e4f);
    put_key(f, "flag", T_BOOL), put(f, "\1", 1);
    put_key(f, "wide", T_U64), put_u64(f, 7);
    put_array(f, "tokens", T_STR, 3), put_str(f, "a"), put_str(f, ""), put_str(f, "bc");
    put_array(f, "kinds", T_I32, 2), put_u32(f, 1), put_u32(f, 3);
    put_array(f, "scores", T_F32, 1), put_u32(f, 0x3f800000);
    for (size_t i = 0, at = 0; i < n_types; i++) {
        char name[] = {'t', (char)('0' + i), 0};
        put_info(f, name, 1 + i % 4, (uint64_t[]){256, 1, 1, 1}, types[i], at);
        at += (gguf_row_bytes((int)types[i], 256) + 31) / 32 * 32;
    }
    pad(f, 32);
    for (size_t i = 0; i < n_types; i++) {
        for (size_t n = gguf_row_bytes((int)types[i], 256); n--;) put(f, &(uint8_t){(uint8_t)(n * 37)}, 1);
        pad(f, 32);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static file valid;
    if (!valid.n) put_valid(&valid), open_one(valid.bytes, valid.n);
    open_one(data, size);
    if (size < 3) return 0;
    size_t bytes = valid.n - data[0] % 4 * data[1]; /* cut, too */
    uint8_t *image = malloc(bytes);
    memcpy(image, valid.bytes, bytes);
    for (size_t i = 0; i + 3 <= size; i += 3) image[(data[i] | (size_t)data[i + 1] << 8) % bytes] ^= data[i + 2];
    open_one(image, bytes);
    free(image);
    return 0;
}
