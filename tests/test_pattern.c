/* [PATTERN]: the file format against golden bytes, and everything that must be refused. */
#define _GNU_SOURCE
#include "test.h"
#include <sys/stat.h>

#define GOLDEN "tests/data/golden_pattern.hex"
enum { ONE_BYTES = 292, TWO_BYTES = 288 };

/* The hex file's images, one after the other; # starts a comment. */
static unsigned char *golden(int which) {
    unsigned char *all = guarded(ONE_BYTES + TWO_BYTES, 1);
    size_t n = 0;
    char line[256];
    FILE *f = fopen(GOLDEN, "r");
    if (!f) fail_msg("cannot read " GOLDEN ": run the tests from the project's top folder");
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "#")] = 0;
        unsigned byte;
        for (char *at = line; n < ONE_BYTES + TWO_BYTES && sscanf(at, " %2x", &byte) == 1; at += strspn(at, " ") + 2)
            all[n++] = (unsigned char)byte;
    }
    fclose(f);
    CHECK_INT(n, ONE_BYTES + TWO_BYTES);
    unsigned char *image = guarded(which ? TWO_BYTES : ONE_BYTES, 1);
    memcpy(image, which ? all + ONE_BYTES : all, which ? TWO_BYTES : ONE_BYTES);
    return image;
}

static void fix_crc(unsigned char *image, size_t bytes) {
    uint32_t crc = oracle_crc32(image, bytes - 4);
    for (int i = 0; i < 4; i++) image[bytes - 4 + (size_t)i] = (unsigned char)(crc >> 8 * i);
}

/* Refused with this code, and *out untouched. */
static void check_refused(const unsigned char *image, size_t bytes, dkv_result want) {
    dkv_pattern p, before;
    memset(&before, 0x5A, sizeof before);
    memcpy(&p, &before, sizeof p);
    CHECK_RESULT(dkv_pattern_read(&p, image, bytes), want);
    CHECK(!memcmp(&p, &before, sizeof p));
}

static void golden_read(void) {
    dkv_pattern p;
    const unsigned char *one = golden(0), *two = golden(1);
    CHECK_OK(dkv_pattern_read(&p, one, ONE_BYTES));
    CHECK(p.L == 1 && p.H == 2 && p.Hkv == 1 && p.D == 66 && p.d == 64 && p.budget == DKV_BUDGET_LOGICAL);
    CHECK(p.W == 128 && p.S == 128 && p.R == 1024 && p.rho == 0.25 && p.K == 5);
    CHECK(p.data_hash == 0x1122334455667788u && p.seed == 42);
    CHECK(!strcmp(p.model, "golden") && !strcmp(p.tool, "by hand"));
    CHECK(p.bits == one + 256 && p.p == NULL);
    CHECK_INT(dkv_pattern_crc(&p), 0xAF05A472u);
    for (int h = 0; h < 2; h++)
        for (int b = 0; b < 66; b++)
            CHECK_INT(dkv_pattern_get(&p, 0, h, b), h ? b == 8 || b == 64 : b == 0 || b == 63 || b == 65);
    CHECK_INT(dkv_pattern_count(&p), 5);
    CHECK_INT(dkv_max_context(&p), 128 + 1024 + 128 * 66);

    CHECK_OK(dkv_pattern_read(&p, two, TWO_BYTES));
    CHECK(p.Hkv == 2 && p.D == 3 && p.d == 0 && p.budget == DKV_BUDGET_PHYSICAL && p.W == 7 && p.S == 0 && p.R == 5);
    CHECK(p.rho == 0.5 && p.K == 3 && !p.data_hash && p.seed == UINT64_MAX && !p.model[0] && strlen(p.tool) == 63);
    CHECK(p.bits == two + 256 && p.p == two + 272);
    CHECK_INT(dkv_pattern_crc(&p), 0x417296E1u);
}

static void golden_write(void) {
    for (int which = 0; which < 2; which++) {
        size_t want = which ? TWO_BYTES : ONE_BYTES, bytes = 0;
        const unsigned char *image = golden(which);
        dkv_pattern p;
        AT("golden %d", which);
        CHECK_OK(dkv_pattern_read(&p, image, want));
        CHECK_OK(dkv_pattern_write(NULL, &bytes, &p));
        CHECK_INT(bytes, want);
        void *copy = guarded(bytes, 1);
        bytes--;
        CHECK_RESULT(dkv_pattern_write(copy, &bytes, &p), DKV_ERR_CAPACITY);
        CHECK(is_poison(copy, want));
        bytes = want + 100;
        CHECK_OK(dkv_pattern_write(copy, &bytes, &p));
        CHECK_INT(bytes, want);
        CHECK(!memcmp(copy, image, want));
        CHECK_RESULT(dkv_pattern_write((char *)(uintptr_t)p.bits - 8, &bytes, &p), DKV_ERR_OVERLAP);
    }
}

static void truncations(void) {
    for (int which = 0; which < 2; which++) {
        size_t full = which ? TWO_BYTES : ONE_BYTES;
        const unsigned char *image = golden(which);
        unsigned char *copy = guarded(full + 1, 1);
        for (size_t n = 0; n <= full + 1; n++) {
            AT("golden %d, %zu bytes", which, n);
            unsigned char *end = memcpy(copy + full + 1 - n, image, n < full ? n : full);
            if (n == full) CHECK_OK(dkv_pattern_read(&(dkv_pattern){0}, end, n));
            else check_refused(end, n, DKV_ERR_LENGTH);
        }
    }
}

static void bit_flips(void) {
    for (int which = 0; which < 2; which++) {
        size_t full = which ? TWO_BYTES : ONE_BYTES;
        unsigned char *image = golden(which);
        for (size_t bit = 0; bit < full * 8; bit++) {
            AT("golden %d, bit %zu", which, bit);
            image[bit / 8] ^= (unsigned char)(1 << bit % 8);
            check_refused(image, full, bit < 64 ? DKV_ERR_MAGIC : bit < 128 ? DKV_ERR_VERSION
                                       : bit < 192 ? DKV_ERR_LENGTH : DKV_ERR_CRC);
            image[bit / 8] ^= (unsigned char)(1 << bit % 8);
        }
    }
}

/* Each field of golden 2 at a value outside its range, under a CRC that is right. */
static void fields(void) {
    static const struct { const char *what; int at, bytes; uint64_t value; dkv_result want; } table[] = {
        {"version 0", 8, 4, 0, DKV_ERR_VERSION},        {"version 2", 8, 4, 2, DKV_ERR_VERSION},
        {"header bytes", 12, 4, 255, DKV_ERR_VERSION},    {"file bytes", 16, 8, TWO_BYTES - 1, DKV_ERR_LENGTH},
        {"file bytes", 16, 8, (uint64_t)-1, DKV_ERR_LENGTH},
        {"L 0", 24, 4, 0, DKV_ERR_FIELD},               {"L -1", 24, 4, UINT32_MAX, DKV_ERR_FIELD},
        {"L 4097", 24, 4, 4097, DKV_ERR_FIELD},       {"L 2", 24, 4, 2, DKV_ERR_LENGTH},
        {"H 0", 28, 4, 0, DKV_ERR_FIELD},               {"H 4097", 28, 4, 4097, DKV_ERR_FIELD},
        {"H -2", 28, 4, (uint32_t)-2, DKV_ERR_FIELD},   {"Hkv 0", 32, 4, 0, DKV_ERR_FIELD},
        {"Hkv -1", 32, 4, UINT32_MAX, DKV_ERR_FIELD},   {"H % Hkv", 32, 4, 3, DKV_ERR_SHAPE},
        {"Hkv 4097", 32, 4, 4097, DKV_ERR_FIELD},     {"D 0", 36, 4, 0, DKV_ERR_FIELD},
        {"D 2^20 + 1", 36, 4, (1 << 20) + 1, DKV_ERR_FIELD}, {"D 2^20", 36, 4, 1 << 20, DKV_ERR_LENGTH},
        {"D -1", 36, 4, UINT32_MAX, DKV_ERR_FIELD},     {"d -1", 40, 4, UINT32_MAX, DKV_ERR_FIELD},
        {"d 577", 40, 4, 577, DKV_ERR_FIELD},       {"budget 2", 44, 4, 2, DKV_ERR_FIELD},
        {"budget -1", 44, 4, UINT32_MAX, DKV_ERR_FIELD}, {"W 0", 48, 8, 0, DKV_ERR_FIELD},
        {"W -1", 48, 8, UINT64_MAX, DKV_ERR_FIELD},     {"W 2^36 + 1", 48, 8, (1ull << 36) + 1, DKV_ERR_FIELD},
        {"W 2^36", 48, 8, 1ull << 36, DKV_OK},          {"S -1", 56, 8, UINT64_MAX, DKV_ERR_FIELD},
        {"S 2^36 + 1", 56, 8, (1ull << 36) + 1, DKV_ERR_FIELD}, {"S 2^36", 56, 8, 1ull << 36, DKV_OK},
        {"R -1", 64, 8, UINT64_MAX, DKV_ERR_FIELD},     {"R 2^36 + 1", 64, 8, (1ull << 36) + 1, DKV_ERR_FIELD},
        {"rho NaN", 72, 8, 0x7FF8000000000000u, DKV_ERR_FIELD}, {"rho inf", 72, 8, 0x7FF0000000000000u, DKV_ERR_FIELD},
        {"rho > 1", 72, 8, 0x3FF0000000000001u, DKV_ERR_FIELD}, {"rho < 0", 72, 8, 0xBFF0000000000000u, DKV_ERR_FIELD},
        {"rho 1", 72, 8, 0x3FF0000000000000u, DKV_OK},  {"K 2", 80, 8, 2, DKV_ERR_FIELD},
        {"K 4", 80, 8, 4, DKV_ERR_FIELD},               {"K -1", 80, 8, UINT64_MAX, DKV_ERR_FIELD},
        {"zero at 96", 96, 8, 1ull << 63, DKV_ERR_FIELD}, {"flags 3", 112, 4, 3, DKV_ERR_FIELD},
        {"flags 0", 112, 4, 0, DKV_ERR_LENGTH},         {"flags bit 31", 112, 4, 0x80000001u, DKV_ERR_FIELD},
        {"zero at 116", 116, 1, 1, DKV_ERR_FIELD},      {"zero at 127", 127, 1, 255, DKV_ERR_FIELD},
        {"text after zero", 191, 1, 'x', DKV_ERR_FIELD}, {"text control", 192, 1, 31, DKV_ERR_FIELD},
        {"text 127", 200, 1, 127, DKV_ERR_FIELD},       {"text 128", 200, 1, 128, DKV_ERR_FIELD},
        {"text hole", 200, 1, 0, DKV_ERR_FIELD},        {"text space", 200, 1, ' ', DKV_OK},
        {"text without end", 255, 1, 't', DKV_ERR_FIELD}, {"padding bit 3", 256, 1, 0x0D, DKV_ERR_FIELD},
        {"padding bit 63", 263, 1, 0x80, DKV_ERR_FIELD}, {"p > 1", 272, 2, 0x3C01, DKV_ERR_FIELD},
        {"p NaN", 276, 2, 0x7E00, DKV_ERR_FIELD},       {"p inf", 282, 2, 0x7C00, DKV_ERR_FIELD},
        {"p < 0", 282, 2, 0x8001, DKV_ERR_FIELD},       {"p smallest", 282, 2, 1, DKV_OK},
    };
    for (int i = 0; i < COUNT(table); i++) {
        unsigned char *image = golden(1);
        for (int k = 0; k < table[i].bytes; k++) image[table[i].at + k] = (unsigned char)(table[i].value >> 8 * k);
        AT("%s, old CRC", table[i].what);
        check_refused(image, TWO_BYTES, table[i].at <= 16 ? table[i].want : DKV_ERR_CRC);
        fix_crc(image, TWO_BYTES);
        AT("%s", table[i].what);
        if (table[i].want) check_refused(image, TWO_BYTES, table[i].want);
        else CHECK_OK(dkv_pattern_read(&(dkv_pattern){0}, image, TWO_BYTES));
    }
}

/* The same ranges for a pattern made in memory: writing and checking refuse what reading would. */
static void check_in_memory(void) {
    dkv_pattern good, p;
    CHECK_OK(dkv_pattern_read(&good, golden(1), TWO_BYTES));
    CHECK_OK(dkv_pattern_check(&good));
#define BAD(change, want) \
    p = good; change; AT("%s", #change); \
    CHECK_RESULT(dkv_pattern_check(&p), want); CHECK_RESULT(dkv_pattern_write(NULL, &(size_t){0}, &p), want)
    BAD(p.L = 0, DKV_ERR_FIELD);            BAD(p.H = 4098, DKV_ERR_FIELD);  BAD(p.Hkv = 3, DKV_ERR_SHAPE);
    BAD(p.D = 0, DKV_ERR_FIELD);            BAD(p.D = 1, DKV_ERR_FIELD);      BAD(p.d = -1, DKV_ERR_FIELD);
    BAD(p.W = 0, DKV_ERR_FIELD);            BAD(p.S = -1, DKV_ERR_FIELD);     BAD(p.R = -1, DKV_ERR_FIELD);
    BAD(p.budget = (dkv_budget)2, DKV_ERR_FIELD);  BAD(p.rho = -0.001, DKV_ERR_FIELD);  BAD(p.K = 4, DKV_ERR_FIELD);
    BAD(p.model[63] = 'x', DKV_ERR_FIELD);  BAD(p.tool[5] = '\n', DKV_ERR_FIELD);
#undef BAD
}

/* Sizes around the word boundary; bits_set against the oracle's bits, at 8 alignments. */
static void round_trip(void) {
    static const int D[] = {1, 2, 63, 64, 65, 127, 128, 129, 1013};
    for (int i = 0; i < 4 * COUNT(D); i++) {
        int Hkv = 1 + (int)rnd_below(3), H = Hkv * (1 + (int)rnd_below(4)), L = 1 + i % 3, n = D[i % COUNT(D)];
        AT("L %d H %d Hkv %d D %d", L, H, Hkv, n);
        oracle_pattern o = random_pattern(L, H, Hkv, n, 1 + rnd_below(200), rnd_below(200), rnd_below(2000), 0.4);
        dkv_pattern p = pattern_of(&o), q;
        size_t bits = (size_t)(L * H * dkv_pattern_words(n) * 8), bytes, full;
        CHECK_INT(dkv_pattern_words(n), (n + 63) / 64);
        char *own = guarded(bits + 8, 8), *image;
        p.bits = memcpy(own + i % 8, p.bits, bits);
        for (int k = 0; k < L * H * n; k++) {
            int l = k / (H * n), h = k / n % H, b = k % n;
            CHECK_INT(dkv_pattern_get(&p, l, h, b), o.M[k]);
            dkv_bits_set(own + i % 8, &p, l, h, b, !o.M[k]);
            CHECK_INT(dkv_pattern_get(&p, l, h, b), !o.M[k]);
            dkv_bits_set(own + i % 8, &p, l, h, b, o.M[k]);
        }
        uint16_t *prob = guarded((size_t)(L * H * n) * 2, 2);
        for (int k = 0; k < L * H * n; k++) prob[k] = (uint16_t)rnd_below(0x3C01);
        if (i & 1) p.p = prob;
        CHECK_INT(dkv_pattern_count(&p), p.K);
        CHECK_OK(dkv_pattern_write(NULL, &full, &p));
        CHECK_INT(full, 260 + bits + (p.p ? (size_t)(L * H * n) * 2 : 0));
        image = guarded(bytes = full + (size_t)i % 8, 1);
        image += i % 8;
        CHECK_OK(dkv_pattern_write(image, &bytes, &p));
        CHECK_OK(dkv_pattern_read(&q, image, full));
        CHECK_INT(dkv_pattern_crc(&p), oracle_crc32((unsigned char *)image, full - 4));
        CHECK_INT(dkv_pattern_crc(&q), dkv_pattern_crc(&p));
        CHECK(!memcmp(q.bits, p.bits, bits) && !q.p == !p.p && (!p.p || !memcmp(q.p, p.p, (size_t)(L * H * n) * 2)));
        p.bits = q.bits, p.p = q.p;
        CHECK(p.L == q.L && p.H == q.H && p.Hkv == q.Hkv && p.D == q.D && p.d == q.d && p.K == q.K && p.rho == q.rho);
        CHECK(p.W == q.W && p.S == q.S && p.R == q.R && p.seed == q.seed && !memcmp(p.model, q.model, 128));
        CHECK(test_release());
    }
}

static void matches(void) {
    dkv_pattern p;
    CHECK_OK(dkv_pattern_read(&p, golden(0), ONE_BYTES));
    CHECK_OK(dkv_pattern_matches(&p, 1, 2, 1, 64));
    CHECK_RESULT(dkv_pattern_matches(&p, 2, 2, 1, 64), DKV_ERR_SHAPE);
    CHECK_RESULT(dkv_pattern_matches(&p, 1, 4, 1, 64), DKV_ERR_SHAPE);
    CHECK_RESULT(dkv_pattern_matches(&p, 1, 2, 2, 64), DKV_ERR_SHAPE);
    CHECK_RESULT(dkv_pattern_matches(&p, 1, 2, 1, 128), DKV_ERR_SHAPE);
    p.d = 0;
    CHECK_OK(dkv_pattern_matches(&p, 1, 2, 1, 128));
}

static void load_and_save(void) {
    char dir[] = "/tmp/dkv_test_XXXXXX", path[64], folder[64];
    CHECK(mkdtemp(dir) != NULL);
    snprintf(path, sizeof path, "%s/a.dkv", dir);
    snprintf(folder, sizeof folder, "%s/folder", dir);
    CHECK_INT(mkdir(folder, 0700), 0);
    test_heap heap = {.fail_at = -1};
    dkv_allocator alloc = {test_heap_alloc, test_heap_free, &heap};
    dkv_pattern p, q;
    CHECK_OK(dkv_pattern_read(&p, golden(1), TWO_BYTES));
    CHECK_RESULT(dkv_pattern_load(&q, path, NULL), DKV_ERR_IO);
    CHECK_RESULT(dkv_pattern_load(&q, folder, NULL), DKV_ERR_IO);
    CHECK_OK(dkv_pattern_save(&p, path));
    CHECK_OK(dkv_pattern_save(&p, path));
    CHECK_OK(dkv_pattern_load(&q, path, &alloc));
    CHECK_INT(dkv_pattern_crc(&q), 0x417296E1u);
    dkv_pattern_free(&q, &alloc);
    CHECK_OK(dkv_pattern_load(&q, path, NULL));
    dkv_pattern_free(&q, NULL);
    for (heap.fail_at = heap.calls = 0; heap.fail_at < 1; heap.fail_at++)
        CHECK_RESULT(dkv_pattern_load(&q, path, &alloc), DKV_ERR_MEMORY);
    heap.fail_at = -1;

    p.K++; /* an invalid pattern, a folder in the way, no such folder: nothing is lost or left behind */
    CHECK_RESULT(dkv_pattern_save(&p, path), DKV_ERR_FIELD);
    p.K--;
    CHECK_RESULT(dkv_pattern_save(&p, folder), DKV_ERR_IO);
    CHECK_RESULT(dkv_pattern_save(&p, "/nowhere/at/all.dkv"), DKV_ERR_IO);
    CHECK_OK(dkv_pattern_load(&q, path, &alloc));
    dkv_pattern_free(&q, &alloc);

    CHECK_INT(truncate(path, 100), 0);
    CHECK_RESULT(dkv_pattern_load(&q, path, &alloc), DKV_ERR_LENGTH);
    CHECK_INT(truncate(path, 0), 0);
    CHECK_RESULT(dkv_pattern_load(&q, path, &alloc), DKV_ERR_LENGTH);
    CHECK(!heap.live && !heap.wrong_size);
    CHECK(!unlink(path) && !rmdir(folder) && !rmdir(dir)); /* fails if a save left a file behind */
}

int main(void) {
    static const test_case cases[] = {
        {"golden bytes, read", golden_read, 0},
        {"golden bytes, write", golden_write, 0},
        {"every truncation", truncations, 0},
        {"every bit flip", bit_flips, 0},
        {"every field out of range", fields, 0},
        {"check in memory", check_in_memory, 0},
        {"round trip", round_trip, 0},
        {"matches", matches, 0},
        {"load and save", load_and_save, 0},
    };
    return run_cases("pattern", cases, COUNT(cases));
}
