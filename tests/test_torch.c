/* The reader of reference patterns: files laid out byte by byte as torch.save lays them out, every truncation of one,
   damaged ones, and pickles that want to do something. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* after the above */
#include <cmocka.h>

#include "../examples/dkv/torch.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct { size_t n; uint8_t p[1 << 16]; } buffer;

static void put(buffer *b, const void *p, size_t n) {
    assert_true(n <= sizeof b->p - b->n);
    memcpy(b->p + b->n, p, n);
    b->n += n;
}
static void put_byte(buffer *b, int x) { uint8_t c = (uint8_t)x; put(b, &c, 1); }
static void put_int(buffer *b, uint64_t x, int n) { for (; n > 0; n--, x >>= 8) put_byte(b, (int)(x & 255)); }
static void put_str(buffer *b, const char *s) { put(b, s, strlen(s)); }

/* ---- pickle, protocol 2, as Python writes it: every object is memoised ---- */

static int memo;

static void put_memo(buffer *b) { put_byte(b, 'q'); put_byte(b, memo++); }
static void put_unicode(buffer *b, const char *s) {
    put_byte(b, 'X'), put_int(b, strlen(s), 4), put_str(b, s), put_memo(b);
}
static void put_global(buffer *b, const char *name) { put_byte(b, 'c'); put_str(b, name); put_memo(b); }

static void put_number(buffer *b, int64_t x) {
    int n = x >= 0 && x < 256 ? 1 : x >= 0 && x < 65536 ? 2 : x == (int32_t)x ? 4 : 7;
    put_byte(b, n == 1 ? 'K' : n == 2 ? 'M' : n == 4 ? 'J' : 0x8a);
    if (n == 7) put_byte(b, n);
    put_int(b, (uint64_t)x, n);
}

static void put_real(buffer *b, double x) {
    uint64_t u;
    memcpy(&u, &x, 8);
    put_byte(b, 'G');
    for (int i = 8; i-- > 0;) put_byte(b, (int)(u >> 8 * i & 255));
}

typedef struct { int64_t dim[3], stride[3], offset, numel; double ratio; const char *class, *call, *name; } tensor;

static const tensor plain = {{2, 4, 5}, {20, 5, 1}, 0, 40, 0.25, "torch\nByteStorage\n",
                             "torch._utils\n_rebuild_tensor_v2\n", "pattern"};

static void put_three(buffer *b, const int64_t *x) {
    for (int i = 0; i < 3; i++) put_number(b, x[i]);
    put_byte(b, 0x87);
    put_memo(b);
}

static void put_pickle(buffer *b, const tensor *t) {
    memo = 0;
    put(b, "\x80\2}", 3), put_memo(b), put_byte(b, '(');
    put_unicode(b, t->name);
    put_global(b, t->call);
    put(b, "((", 2);
    put_unicode(b, "storage"), put_global(b, t->class), put_unicode(b, "0"), put_unicode(b, "cpu");
    put_number(b, t->numel), put_byte(b, 't'), put_memo(b), put_byte(b, 'Q');
    put_number(b, t->offset), put_three(b, t->dim), put_three(b, t->stride), put_byte(b, 0x89);
    put_global(b, "collections\nOrderedDict\n");
    put(b, ")R", 2), put_memo(b), put_byte(b, 't'), put_memo(b), put_byte(b, 'R'), put_memo(b);
    if (t->ratio >= 0) put_unicode(b, "keep_ratio"), put_real(b, t->ratio);
    put(b, "u.", 2);
}

/* ---- zip ----------------------------------------------------------------- */

typedef struct { const char *name; const void *data; size_t n; size_t at; int method; } entry;

/* Data begins at multiples of 64, by padding in the local extra field. */
static void put_zip(buffer *z, entry *e, int n) {
    z->n = 0;
    for (int i = 0; i < n; i++) {
        size_t name = strlen(e[i].name), pad = (64 - (z->n + 30 + name) % 64) % 64;
        e[i].at = z->n;
        put(z, "PK\3\4", 4), put_int(z, 0, 4), put_int(z, (uint64_t)e[i].method, 2), put_int(z, 0, 8);
        put_int(z, e[i].n, 4), put_int(z, e[i].n, 4), put_int(z, name, 2), put_int(z, pad, 2);
        put_str(z, e[i].name);
        while (pad--) put_byte(z, 'Z');
        put(z, e[i].data, e[i].n);
    }
    size_t start = z->n;
    for (int i = 0; i < n; i++) {
        size_t name = strlen(e[i].name);
        put(z, "PK\1\2", 4), put_int(z, 0, 6), put_int(z, (uint64_t)e[i].method, 2), put_int(z, 0, 8);
        put_int(z, e[i].n, 4), put_int(z, e[i].n, 4), put_int(z, name, 2), put_int(z, 0, 12), put_int(z, e[i].at, 4);
        put_str(z, e[i].name);
    }
    size_t size = z->n - start;
    put(z, "PK\5\6", 4), put_int(z, 0, 4), put_int(z, (uint64_t)n, 2), put_int(z, (uint64_t)n, 2);
    put_int(z, size, 4), put_int(z, start, 4), put_int(z, 0, 2);
}

static void put_file(buffer *z, const buffer *pickle, const void *data, size_t n, int method) {
    entry e[] = {{"bits/data.pkl", pickle->p, pickle->n, 0, 0}, {"bits/byteorder", "little", 6, 0, 0},
                 {"bits/data/0", data, n, 0, method}, {"bits/version", "3\n", 2, 0, 0}};
    put_zip(z, e, COUNT(e));
}

static uint8_t values[40];

static void make(buffer *z, const tensor *t) {
    static buffer pickle;
    pickle.n = 0;
    for (int i = 0; i < 40; i++) values[i] = i * 7 % 5 < 2;
    put_pickle(&pickle, t);
    put_file(z, &pickle, values, sizeof values, 0);
}

/* The file in memory of exactly its size. */
static int read_exactly(torch_pattern *out, const uint8_t *p, size_t n, char err[256]) {
    uint8_t *exact = malloc(n ? n : 1);
    memcpy(exact, p, n);
    int r = torch_read_pattern(out, exact, n, err, 256);
    volatile uint8_t last = 0;
    for (int64_t l = 0; r == 0 && l < out->dim[0]; l++)
        for (int64_t h = 0; h < out->dim[1]; h++)
            last = out->values[l * out->stride[0] + h * out->stride[1] + (out->dim[2] - 1) * out->stride[2]];
    (void)last;
    free(exact);
    return r;
}

/* ---- tests --------------------------------------------------------------- */

static buffer z;

static void reads(void **state) {
    (void)state;
    static const tensor table[] = {
        {{2, 4, 5}, {20, 5, 1}, 0, 40, 0.25, "torch\nByteStorage\n", "torch._utils\n_rebuild_tensor_v2\n", "pattern"},
        {{5, 4, 2}, {1, 5, 20}, 0, 40, 0.2, "torch\nBoolStorage\n", "torch._utils\n_rebuild_tensor_v2\n", "pattern"},
        {{1, 3, 5}, {20, 5, 1}, 25, 40, -1, "torch\nByteStorage\n", "torch._utils\n_rebuild_tensor_v2\n", "pattern"},
    };
    for (int i = 0; i < COUNT(table); i++) {
        const tensor *t = &table[i];
        torch_pattern got;
        char err[256];
        make(&z, t);
        if (torch_read_pattern(&got, z.p, z.n, err, sizeof err)) fail_msg("case %d: %s", i, err);
        assert_memory_equal(got.dim, t->dim, sizeof t->dim);
        assert_memory_equal(got.stride, t->stride, sizeof t->stride);
        assert_true(got.keep_ratio == t->ratio);
        for (int64_t k = 0; k < t->dim[0] * t->dim[1] * t->dim[2]; k++) {
            int64_t l = k / t->dim[2] / t->dim[1], h = k / t->dim[2] % t->dim[1], b = k % t->dim[2];
            int64_t at = l * t->stride[0] + h * t->stride[1] + b * t->stride[2];
            assert_int_equal(got.values[at], values[t->offset + at]);
        }
    }
}

static void expect_refused(const char *reason) {
    torch_pattern got;
    char err[256] = "";
    assert_int_equal(read_exactly(&got, z.p, z.n, err), -1);
    if (!strstr(err, reason)) fail_msg("'%s', not '%s'", err, reason);
}

static void refuses(void **state) {
    (void)state;
#define WITH(change, reason) do { tensor t = plain; change; make(&z, &t); expect_refused(reason); } while (0)
    WITH(t.dim[0] = 3, "no uint8 tensor");                /* beyond the storage */
    WITH(t.offset = 1, "no uint8 tensor");
    WITH(t.dim[1] = 0, "no uint8 tensor");
    WITH(t.stride[0] = -20, "no uint8 tensor");
    WITH(t.stride[0] = (int64_t)1 << 39, "no uint8 tensor");
    WITH(t.name = "other", "no uint8 tensor");
    WITH(t.class = "torch\nFloatStorage\n", "not what a dict");
    WITH(t.call = "os\nsystem\n", "not what a dict");
    WITH(t.call = "torch._utils\n_rebuild_tensor_v3\n", "not what a dict");
#undef WITH
#define PICKLE(text) {text, sizeof text - 1}
    static const struct { const char *p; size_t n; } pickles[] = {
        PICKLE(""), PICKLE("."), PICKLE("\x80\2."), PICKLE("cos\nsystem\n(X\4\0\0\0truetR."), PICKLE("}o."),
        PICKLE("ibuiltins\nexec\n."), PICKLE("h\5."), PICKLE("u."), PICKLE("t."), PICKLE("R."), PICKLE("Q."),
        PICKLE("\x80\2}(X\xff\xff\xff\xffpattern"), PICKLE("\x80\2}q\xff"), PICKLE("G\1\2."), PICKLE("cos"),
        PICKLE("\x8a\x08\1\1\1\1\1\1\1\1."), PICKLE("}X\7\0\0\0patternNs."), PICKLE("\x80"),
    };
#undef PICKLE
    for (int i = 0; i < COUNT(pickles); i++) {
        static buffer pickle;
        pickle.n = 0;
        put(&pickle, pickles[i].p, pickles[i].n);
        put_file(&z, &pickle, values, sizeof values, 0);
        expect_refused(i < 3 || i == 16 ? "" : "not what a dict");
    }
    static buffer pickle; /* deeper than the machine's stack */
    pickle.n = 0;
    for (int i = 0; i < 1000; i++) put_byte(&pickle, '(');
    put_file(&z, &pickle, values, sizeof values, 0);
    expect_refused("byte 64");
    pickle.n = 0;
    put_pickle(&pickle, &plain);
    put_file(&z, &pickle, values, sizeof values, 8); /* says that it is compressed */
    expect_refused("no uint8 tensor");
    z.n = 3;
    expect_refused("a zip");
}

/* No truncation is read, and no damage is read outside the file: the sanitizer watches. */
static void truncated_and_damaged(void **state) {
    (void)state;
    torch_pattern got;
    char err[256];
    make(&z, &plain);
    for (size_t n = 0; n < z.n; n++) assert_int_equal(read_exactly(&got, z.p, n, err), -1);
    uint32_t x = 12345;
    for (int i = 0; i < 20000; i++) {
        static uint8_t copy[sizeof z.p];
        memcpy(copy, z.p, z.n);
        for (int k = 0; k <= i % 3; k++) {
            x = x * 1664525u + 1013904223u;
            copy[(x >> 8) % z.n] = (uint8_t)(x >> 3);
        }
        read_exactly(&got, copy, z.n, err);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads), cmocka_unit_test(refuses), cmocka_unit_test(truncated_and_damaged),
    };
    return cmocka_run_group_tests_name("torch", tests, NULL, NULL);
}
