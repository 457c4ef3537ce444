/* libFuzzer target: pattern files as raw bytes, and valid files with edits under a CRC that is right. What is accepted
   must survive every use. clang -fsanitize=fuzzer,address,undefined, linked with the implementation. */
#include "fuzz.h"

static void use(const dkv_pattern *p, const uint8_t *image, size_t bytes) {
    size_t n = bytes;
    uint8_t *copy = malloc(bytes);
    REQUIRE(dkv_pattern_check(p) == DKV_OK);
    REQUIRE(dkv_pattern_write(copy, &n, p) == DKV_OK && n == bytes && !memcmp(copy, image, bytes));
    free(copy);
    for (int beyond = 0; beyond < 4; beyond++) {
        int64_t T_c = (int64_t)(p->seed % ((uint64_t)dkv_max_context(p) + 1)) + (beyond ? p->W : 0);
        if (T_c > (int64_t)1 << 36) T_c = (int64_t)1 << 36; /* the longest context of a plan */
        dkv_stats stats;
        dkv_plan plan;
        REQUIRE(dkv_dry_run(&stats, p, T_c, (dkv_beyond)beyond) == DKV_OK);
        REQUIRE(dkv_plan_make(&plan, NULL, &n, p, T_c, (dkv_beyond)beyond) == DKV_OK);
        void *mem = malloc(n);
        REQUIRE(dkv_plan_make(&plan, mem, &n, p, T_c, (dkv_beyond)beyond) == DKV_OK);
        int64_t kept = 0;
        for (int64_t f = 0; f < (int64_t)p->L * p->Hkv; f++) kept += plan.rows[f];
        REQUIRE(kept == stats.kept && stats.physical >= 0 && stats.physical <= 1);
        free(mem);
    }
}

static void read_one(const uint8_t *image, size_t bytes) {
    dkv_pattern p;
    if (dkv_pattern_read(&p, image, bytes) == DKV_OK) use(&p, image, bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    read_one(data, size);
    if (size < 4) return 0;
    uint64_t words[4] = {0x2B}, p16[64] = {0}; /* bits, and p for any D */
    dkv_pattern p = {.L = 1, .H = 4, .Hkv = 2, .D = 6 + data[0] % 59, .W = 1 + data[1], .S = data[2], .R = data[3],
                     .rho = 0.5, .bits = words, .p = data[3] & 1 ? p16 : NULL};
    p.K = dkv_pattern_count(&p);
    size_t bytes;
    REQUIRE(dkv_pattern_write(NULL, &bytes, &p) == DKV_OK);
    uint8_t *image = malloc(bytes);
    REQUIRE(dkv_pattern_write(image, &bytes, &p) == DKV_OK);
    edit(image, bytes, data + 4, size - 4);
    read_one(image, bytes);
    free(image);
    return 0;
}
