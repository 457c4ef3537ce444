/* The score file: back as written, every truncation in an exact-size buffer, every byte changed, and fields that lie
   although the CRC is right. */
#define _GNU_SOURCE
#include "../examples/dkv/tool.h"
/* before cmocka, which makes a macro of fail */
#include "test.h"

enum { L = 2, H = 4, Hkv = 2, D = 3, N = L * H * D, HEADER = 256, BYTES = HEADER + 4 * (D + N) + 4 };

static char path[] = "/tmp/test_scores.XXXXXX";
static unsigned char image[BYTES];

static score_table table(void) {
    score_table s = {.L = L, .H = H, .Hkv = Hkv, .D = D, .W = 32, .S = 16, .R = 64, .T_c = 16 + 64 + 3 * 32,
                     .seed = UINT64_MAX - 1, .data_hash = 0x0123456789abcdef, .model = "a model", .tool = "a test"};
    s.count = allocate(D, sizeof *s.count);
    s.score = allocate(N, sizeof *s.score);
    for (int b = 0; b < D; b++) s.count[b] = (uint32_t)(1000 * b + 7);
    for (int i = 0; i < N; i++) s.score[i] = (float)i / (N - 1);
    return s;
}

static int make_file(void **state) {
    (void)state;
    int fd = mkstemp(path);
    assert_true(fd >= 0 && close(fd) == 0);
    score_table s = table();
    save_scores(&s, path);
    free_scores(&s);
    size_t bytes;
    char *data = read_file(path, &bytes);
    assert_int_equal(bytes, BYTES);
    memcpy(image, data, BYTES);
    free(data);
    return 0;
}

static int drop_file(void **state) {
    (void)state;
    return unlink(path);
}

static void back_again(void **state) {
    (void)state;
    score_table s = table(), t;
    assert_true(is_score_file(path));
    assert_false(is_score_file("README.md"));
    load_scores(&t, path);
    assert_int_equal(memcmp(t.score, s.score, N * sizeof *s.score) | memcmp(t.count, s.count, D * sizeof *s.count), 0);
    assert_true(t.L == L && t.H == H && t.Hkv == Hkv && t.D == D && t.W == s.W && t.S == s.S && t.R == s.R);
    assert_true(t.T_c == s.T_c && t.seed == s.seed && t.data_hash == s.data_hash);
    assert_string_equal(t.model, s.model);
    assert_string_equal(t.tool, s.tool);
    free_scores(&s);
    free_scores(&t);
}

/* What reading an exact-size copy says. */
static const char *verdict(const void *data, size_t bytes) {
    score_table s;
    void *copy = malloc(bytes ? bytes : 1);
    memcpy(copy, data, bytes);
    const char *wrong = read_scores(&s, copy, bytes);
    if (!wrong) free_scores(&s);
    free(copy);
    return wrong;
}

static void cut_or_changed(void **state) {
    (void)state;
    unsigned char longer[BYTES + 1] = {0};
    memcpy(longer, image, BYTES);
    assert_null(verdict(image, BYTES));
    assert_non_null(verdict(longer, BYTES + 1));
    for (size_t n = 0; n < BYTES; n++) assert_non_null(verdict(image, n));
    for (size_t i = 0; i < BYTES; i++) {
        memcpy(longer, image, BYTES);
        longer[i] ^= (unsigned char)(1 << i % 8);
        assert_non_null(verdict(longer, BYTES));
    }
}

static void put(unsigned char *p, uint64_t x, int n) {
    for (; n--; x >>= 8) *p++ = (unsigned char)x;
}

/* A field of n bytes at `at` becomes x, and the CRC right again. */
static const char *with(int at, uint64_t x, int n) {
    unsigned char bent[BYTES];
    memcpy(bent, image, BYTES);
    put(bent + at, x, n);
    put(bent + BYTES - 4, dkv_crc32(0, bent, BYTES - 4), 4);
    return verdict(bent, BYTES);
}

static void fields(void **state) {
    (void)state;
    static const uint64_t far[] = {0, 1, 5, 1u << 30, 0x7fffffff, 1u << 31, 0xffffffff, (uint64_t)1 << 63, UINT64_MAX};
    assert_null(with(24, L, 4));
    assert_string_equal(with(8, 2, 4), "written by another format version; make the file again");
    for (int at = 24; at < 40; at += 4) /* sizes: no other fits the length of the file, but one KV head does */
        for (int i = 0; i < COUNT(far); i++)
            if (at != 32 || far[i] != 1) assert_non_null(with(at, far[i], 4));
    for (int at = 48; at < 80; at += 8) /* lengths: no other adds up to T_c */
        for (int i = 0; i < COUNT(far); i++) assert_non_null(with(at, far[i], 8));
    for (int at = 12; at < 128; at++)
        if (at < 16 || (at >= 40 && at < 48) || at >= 96) assert_non_null(with(at, 3, 1));
    assert_non_null(with(128, 7, 1));               /* not printable */
    assert_non_null(with(128 + 63, 'x', 1));        /* behind its end */
    assert_null(with(HEADER, UINT32_MAX, 4));       /* a count may be anything */
    static const uint32_t bad[] = {0x3f800001, 0xbf800000, 0x7f800000, 0x7fc00000, 0xff800000};
    for (int i = 0; i < COUNT(bad); i++)
        assert_string_equal(with(HEADER + 4 * D, bad[i], 4), "a score is outside 0..1");
    assert_null(with(HEADER + 4 * D, 0x3f800000, 4));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(back_again), cmocka_unit_test(cut_or_changed),
                                       cmocka_unit_test(fields)};
    return cmocka_run_group_tests_name("scores", tests, make_file, drop_file);
}
