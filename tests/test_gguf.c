/* The GGUF reader on files built in memory: what it must read, and everything it must refuse. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* after the above */
#include <cmocka.h>

#include "../examples/llama/gguf.h"
#include "gguf_build.h"

/* A file in a buffer of exactly its size, so that AddressSanitizer sees one byte too far. */
static int open_exact(gguf **g, const file *f, size_t n, char err[256], void **owner) {
    *owner = malloc(n ? n : 1);
    assert_non_null(*owner);
    if (n) memcpy(*owner, f->bytes, n);
    return gguf_open_memory(g, *owner, n, err, 256);
}

static void expect_refused(const file *f, const char *reason) {
    gguf *g;
    void *owner;
    char err[256] = "";
    assert_int_equal(open_exact(&g, f, f->n, err, &owner), -1);
    assert_null(g);
    if (!strstr(err, reason)) fail_msg("'%s' does not say '%s'", err, reason);
    free(owner);
}

static void put_sample(file *f) {
    put_head(f, 2, 12);
    put_key(f, "u8", T_U8); put(f, &(uint8_t){200}, 1);
    put_key(f, "i8", T_I8); put(f, &(int8_t){-5}, 1);
    put_key(f, "u16", T_U16); put(f, &(uint16_t){65000}, 2);
    put_key(f, "i64", T_I64); put(f, &(int64_t){INT64_MIN}, 8);
    put_key(f, "u64", T_U64); put_u64(f, UINT64_MAX);
    put_key(f, "bool", T_BOOL); put(f, &(uint8_t){1}, 1);
    put_key(f, "f32", T_F32); put(f, &(float){0.5f}, 4);
    put_key(f, "f64", T_F64); put(f, &(double){-0.25}, 8);
    put_key(f, "str", T_STR); put_str(f, "hello");
    put_array(f, "strs", T_STR, 3); put_str(f, "a"); put_str(f, ""); put_str(f, "ccc");
    put_array(f, "ints", T_I32, 2); put_u32(f, 7); put_u32(f, (uint32_t)-8);
    put_array(f, "reals", T_F32, 1); put(f, &(float){2.0f}, 4);
    put_info(f, "zz", 2, (uint64_t[]){2, 3}, GGUF_F32, 0);
    put_info(f, "aa", 1, (uint64_t[]){32}, GGUF_Q8_0, 32);
    pad(f, 32);
    for (int i = 0; i < 6; i++) put(f, &(float){(float)i}, 4);
    pad(f, 32);
    for (int i = 0; i < 34; i++) put(f, &(uint8_t){(uint8_t)i}, 1);
}

static void test_values(void **state) {
    (void)state;
    file f = {.n = 0};
    put_sample(&f);
    gguf *g;
    void *owner;
    char err[256] = "";
    assert_int_equal(open_exact(&g, &f, f.n, err, &owner), 0);
    int64_t i = 0;
    double r = 0;
    assert_true(gguf_get_int(g, "u8", &i) && i == 200);
    assert_true(gguf_get_int(g, "i8", &i) && i == -5);
    assert_true(gguf_get_int(g, "u16", &i) && i == 65000);
    assert_true(gguf_get_int(g, "i64", &i) && i == INT64_MIN);
    assert_true(gguf_get_int(g, "bool", &i) && i == 1);
    assert_false(gguf_get_int(g, "u64", &i)); /* beyond int64_t */
    assert_false(gguf_get_int(g, "f32", &i));
    assert_false(gguf_get_int(g, "str", &i));
    assert_false(gguf_get_int(g, "ints", &i));
    assert_false(gguf_get_int(g, "absent", &i));
    assert_true(gguf_get_real(g, "f32", &r) && r == 0.5);
    assert_true(gguf_get_real(g, "f64", &r) && r == -0.25);
    assert_true(gguf_get_real(g, "u8", &r) && r == 200.0);
    assert_false(gguf_get_real(g, "str", &r));
    assert_true(gguf_has(g, "ints") && !gguf_has(g, "absent") && !gguf_has(g, ""));
    assert_int_equal(gguf_key_count(g), 12);
    assert_memory_equal(gguf_key_at(g, 0).ptr, "bool", 4); /* by name */
    gguf_close(g);
    free(owner);
}

static void test_strings_and_arrays(void **state) {
    (void)state;
    file f = {.n = 0};
    put_sample(&f);
    gguf *g;
    void *owner;
    char err[256] = "";
    assert_int_equal(open_exact(&g, &f, f.n, err, &owner), 0);
    gguf_str s = {0};
    assert_true(gguf_get_str(g, "str", &s));
    assert_int_equal(s.len, 5);
    assert_memory_equal(s.ptr, "hello", 5);
    assert_false(gguf_get_str(g, "strs", &s));
    const gguf_str *strs;
    const int32_t *ints;
    const float *reals;
    assert_int_equal(gguf_get_strs(g, "strs", &strs), 3);
    assert_int_equal(strs[1].len, 0);
    assert_memory_equal(strs[2].ptr, "ccc", 3);
    assert_int_equal(gguf_get_ints(g, "ints", &ints), 2);
    assert_int_equal(ints[1], -8);
    assert_int_equal(gguf_get_reals(g, "reals", &reals), 1);
    assert_true(reals[0] == 2.0f);
    assert_int_equal(gguf_get_ints(g, "reals", &ints), -1);
    assert_int_equal(gguf_get_strs(g, "str", &strs), -1);
    assert_int_equal(gguf_get_reals(g, "absent", &reals), -1);
    gguf_close(g);
    free(owner);
}

static void test_tensors(void **state) {
    (void)state;
    file f = {.n = 0};
    put_sample(&f);
    gguf *g;
    void *owner;
    char err[256] = "";
    assert_int_equal(open_exact(&g, &f, f.n, err, &owner), 0);
    const gguf_tensor *t = gguf_find(g, "zz");
    assert_non_null(t);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->dims[0], 2);
    assert_int_equal(t->dims[1], 3);
    assert_int_equal(t->dims[3], 1);
    assert_int_equal(t->bytes, 24);
    assert_memory_equal(t->data, ((float[]){0, 1, 2, 3, 4, 5}), 24);
    t = gguf_find(g, "aa");
    assert_int_equal(t->type, GGUF_Q8_0);
    assert_int_equal(t->bytes, 34);
    assert_int_equal(((const uint8_t *)t->data)[33], 33);
    assert_null(gguf_find(g, "a"));
    assert_null(gguf_find(g, "zzz"));
    assert_int_equal(gguf_tensor_count(g), 2);
    assert_ptr_equal(gguf_tensor_at(g, 0), t);
    gguf_close(g);
    free(owner);
}

static void test_every_truncation(void **state) {
    (void)state;
    file f = {.n = 0};
    put_sample(&f);
    for (size_t n = 0; n < f.n; n++) {
        gguf *g;
        void *owner;
        char err[256] = "";
        assert_int_equal(open_exact(&g, &f, n, err, &owner), -1);
        assert_null(g);
        assert_true(err[0] && !strchr(err, '\n'));
        free(owner);
    }
}

static void test_header(void **state) {
    (void)state;
    file f = {.n = 0};
    put_head(&f, 0, 0);
    f.bytes[0] = 'g';
    expect_refused(&f, "not a GGUF file");
    f.bytes[0] = 'G';
    f.bytes[4] = 2;
    expect_refused(&f, "version is 2");
    f.bytes[4] = 0, f.bytes[7] = 3; /* big-endian */
    expect_refused(&f, "little-endian");
}

static void test_counts_beyond_file(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 2, UINT32_MAX, (uint64_t)1 << 60, UINT64_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        file keys = {.n = 0}, tensors = {.n = 0}, str = {.n = 0};
        put_head(&keys, 0, counts[i]);
        expect_refused(&keys, "keys");
        put_head(&tensors, counts[i], 0);
        expect_refused(&tensors, "tensors");
        put_head(&str, 0, 1);
        put_u64(&str, counts[i] + 4096);
        put(&str, "12345678", 8);
        expect_refused(&str, i == 4 ? "" : "runs past the end");
        for (uint32_t type = T_U8; type <= T_F64; type++) {
            file array = {.n = 0};
            put_head(&array, 0, 1);
            put_array(&array, "k", type, counts[i]);
            expect_refused(&array, type == T_ARR ? "array of arrays" : "runs past the end");
        }
    }
}

static void test_unknown_types(void **state) {
    (void)state;
    file f = {.n = 0}, array = {.n = 0};
    put_head(&f, 0, 1);
    put_key(&f, "k\n", 13);
    put_u64(&f, 0);
    expect_refused(&f, "key k? has unknown type 13");
    put_head(&array, 0, 1);
    put_array(&array, "k", UINT32_MAX, 0);
    expect_refused(&array, "unknown type");
}

static void test_duplicates(void **state) {
    (void)state;
    file keys = {.n = 0}, tensors = {.n = 0};
    put_head(&keys, 0, 2);
    for (int i = 0; i < 2; i++) put_key(&keys, "twice", T_U8), put(&keys, "", 1);
    expect_refused(&keys, "key twice occurs twice");
    put_head(&tensors, 2, 0);
    for (int i = 0; i < 2; i++) put_info(&tensors, "t", 1, (uint64_t[]){1}, GGUF_F32, 0);
    pad(&tensors, 32);
    put_u32(&tensors, 0);
    expect_refused(&tensors, "tensor t occurs twice");
}

/* One tensor "t" over 64 bytes of data. */
static void expect_tensor(uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset, const char *reason) {
    file f = {.n = 0};
    put_head(&f, 1, 0);
    put_info(&f, "t", n_dims, dims, type, offset);
    pad(&f, 32);
    put(&f, (char[64]){0}, 64);
    if (reason) {
        expect_refused(&f, reason);
        return;
    }
    gguf *g;
    void *owner;
    char err[256] = "";
    assert_int_equal(open_exact(&g, &f, f.n, err, &owner), 0);
    gguf_close(g);
    free(owner);
}

static void test_tensor_bounds(void **state) {
    (void)state;
    const uint64_t huge = (uint64_t)1 << 32, most = INT64_MAX;
    expect_tensor(1, (uint64_t[]){16}, GGUF_F32, 0, NULL);
    expect_tensor(4, (uint64_t[]){1, 2, 1, 8}, GGUF_F32, 0, NULL);
    expect_tensor(1, (uint64_t[]){8}, GGUF_F32, 32, NULL);
    expect_tensor(1, (uint64_t[]){17}, GGUF_F32, 0, "past the end");
    expect_tensor(1, (uint64_t[]){9}, GGUF_F32, 32, "past the end");
    expect_tensor(1, (uint64_t[]){1}, GGUF_F32, 64, "past the end");
    expect_tensor(1, (uint64_t[]){1}, GGUF_F32, 4, "aligned");
    expect_tensor(1, (uint64_t[]){1}, GGUF_F32, UINT64_MAX - 31, "past the end");
    expect_tensor(0, NULL, GGUF_F32, 0, "0 dimensions");
    expect_tensor(5, (uint64_t[]){1, 1, 1, 1, 1}, GGUF_F32, 0, "5 dimensions");
    expect_tensor(2, (uint64_t[]){4, 0}, GGUF_F32, 0, "shape");
    expect_tensor(2, (uint64_t[]){4, UINT64_MAX}, GGUF_F32, 0, "shape");
    expect_tensor(3, (uint64_t[]){1, huge, huge}, GGUF_F32, 0, "shape");
    expect_tensor(2, (uint64_t[]){huge, most / 4}, GGUF_F32, 0, "too large");
    expect_tensor(1, (uint64_t[]){most}, GGUF_F32, 0, "rows of");
    expect_tensor(2, (uint64_t[]){huge, huge >> 2}, GGUF_F32, 0, "too large"); /* product 2^64 */
    expect_tensor(1, (uint64_t[]){33}, GGUF_Q8_0, 0, "no whole number of Q8_0 blocks");
    expect_tensor(1, (uint64_t[]){32}, GGUF_Q4_K, 0, "no whole number of Q4_K blocks");
    expect_tensor(1, (uint64_t[]){256}, 10, 0, "type 10"); /* Q2_K */
    expect_tensor(1, (uint64_t[]){256}, UINT32_MAX, 0, "not supported");
}

static void expect_alignment(uint32_t type, uint64_t alignment, const char *reason) {
    file f = {.n = 0};
    put_head(&f, 1, 1);
    put_key(&f, "general.alignment", type);
    put(&f, &alignment, type == T_U64 ? 8 : 4);
    put_info(&f, "t", 1, (uint64_t[]){1}, GGUF_F32, 64);
    pad(&f, 64);
    put(&f, (char[68]){0}, 68);
    if (reason) {
        expect_refused(&f, reason);
        return;
    }
    gguf *g;
    void *owner;
    char err[256] = "";
    assert_int_equal(open_exact(&g, &f, f.n, err, &owner), 0);
    assert_ptr_equal(gguf_find(g, "t")->data, (char *)owner + f.n - 4);
    gguf_close(g);
    free(owner);
}

static void test_alignment(void **state) {
    (void)state;
    expect_alignment(T_U32, 64, NULL);
    expect_alignment(T_U32, 0, "power of two");
    expect_alignment(T_U32, 48, "power of two");
    expect_alignment(T_F32, 0x3f800000, "power of two");
    expect_alignment(T_U64, (uint64_t)1 << 62, "not aligned");
    expect_alignment(T_U64, UINT64_MAX, "power of two");
}

static void test_row_bytes(void **state) {
    (void)state;
    assert_int_equal(gguf_row_bytes(GGUF_F32, 3), 12);
    assert_int_equal(gguf_row_bytes(GGUF_BF16, 3), 6);
    assert_int_equal(gguf_row_bytes(GGUF_Q4_1, 64), 40);
    assert_int_equal(gguf_row_bytes(GGUF_Q6_K, 512), 420);
    assert_int_equal(gguf_row_bytes(GGUF_Q6_K, 128), 0);
    assert_int_equal(gguf_row_bytes(GGUF_F32, INT64_MAX), 0);
    assert_int_equal(gguf_row_bytes(GGUF_F32, -1), 0);
    assert_int_equal(gguf_row_bytes(99, 32), 0);
    assert_string_equal(gguf_type_name(GGUF_Q4_K), "Q4_K");
    assert_string_equal(gguf_type_name(99), "?");
}

static void test_files(void **state) {
    (void)state;
    gguf *g;
    char err[256] = "", path[] = "/tmp/test_gguf_XXXXXX";
    assert_int_equal(gguf_open(&g, "/nonexistent/model.gguf", err, sizeof err), -1);
    assert_string_equal(err, "/nonexistent/model.gguf: No such file or directory");
    assert_int_equal(gguf_open(&g, "/tmp", err, sizeof err), -1);
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(gguf_open(&g, path, err, sizeof err), -1);
    assert_non_null(strstr(err, "empty"));
    file f = {.n = 0};
    put_sample(&f);
    assert_int_equal(write(fd, f.bytes, f.n), f.n);
    assert_int_equal(gguf_open(&g, path, err, sizeof err), 0);
    assert_int_equal(gguf_tensor_count(g), 2);
    gguf_close(g);
    assert_int_equal(ftruncate(fd, (off_t)f.n - 1), 0);
    assert_int_equal(gguf_open(&g, path, err, sizeof err), -1);
    assert_non_null(strstr(err, path));
    assert_non_null(strstr(err, "past the end"));
    close(fd);
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),        cmocka_unit_test(test_strings_and_arrays),
        cmocka_unit_test(test_tensors),       cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_header),        cmocka_unit_test(test_counts_beyond_file),
        cmocka_unit_test(test_unknown_types), cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_tensor_bounds), cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_row_bytes),     cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests_name("gguf", tests, NULL, NULL);
}
