/* [BASE] [SIMD]: results, types, conversion, views, levels. */
#define _GNU_SOURCE
#include "test.h"

static void results(void) {
    const char *text[64];
    int n = 0;
#define ONE(name, value, string) \
    CHECK_INT(name, value); text[n++] = dkv_result_string(name); CHECK(!strcmp(text[n - 1], string));
    DKV_RESULTS(ONE)
#undef ONE
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++) CHECK(strcmp(text[i], text[j]) != 0);
    CHECK(dkv_result_string((dkv_result)-100)[0] && dkv_result_string((dkv_result)1)[0]);
    CHECK(!strcmp(dkv_version(), DKV_VERSION));
}

static void types_and_views(void) {
    static const struct { int type; const char *name; int bytes; } want[] = {
        {DKV_F32, "f32", 4}, {DKV_F16, "f16", 2}, {DKV_BF16, "bf16", 2}, {DKV_I8, "i8", 1},
        {DKV_FP8, "fp8", 1}, {5, "?", 0}, {-1, "?", 0},
    };
    for (int i = 0; i < COUNT(want); i++) {
        AT("type %d", want[i].type);
        CHECK(!strcmp(dkv_type_name((dkv_type)want[i].type), want[i].name));
        CHECK_INT(dkv_type_bytes((dkv_type)want[i].type), want[i].bytes);
    }
    for (int i = 0; i < 5; i++) CHECK_INT(dkv_tail_type(packed_at(i)), i < 3 ? i : DKV_F16);
    char byte;
    dkv_tensor t = dkv_thd(&byte, DKV_BF16, 3, 80);
    CHECK(t.data == &byte && t.type == DKV_BF16);
    CHECK(t.stride_token == 480 && t.stride_head == 160 && t.stride_dim == 2);
    t = dkv_thd(&byte, DKV_F32, 65536, 65536);
    CHECK(t.stride_token == (int64_t)1 << 34);
}

static void levels(void) {
    int top = (int)dkv_simd_supported();
    static const char *names[] = {"scalar", "avx2", "avx512", "amx"};
    for (int level = 0; level < DKV_SIMD_COUNT; level++) {
        AT("level %d", level);
        CHECK(!strcmp(dkv_simd_name((dkv_simd)level), names[level]));
        CHECK_INT(dkv_simd_limit((dkv_simd)level), level < top ? level : top);
        CHECK_INT(dkv_simd_level(), level < top ? level : top);
        CHECK_INT(dkv_simd_supported(), top);
    }
}

/* Values where rounding decides: every value of the small types, the midpoint above it, and its two f32 neighbours. */
static int64_t edge_values(float **out) {
    float *x = guarded((65536 + 256) * 2 * 4 * sizeof *x, sizeof *x);
    int64_t n = 0;
    for (uint32_t bits = 0; bits < 65536; bits++)
        for (dkv_type type = DKV_F16; type <= (bits < 256 ? DKV_FP8 : DKV_BF16); type = (dkv_type)(type + 1)) {
            uint16_t here = (uint16_t)bits, next = (uint16_t)(bits + 1);
            double a = oracle_load(&here, type), b = oracle_load(&next, type);
            float mid = (float)((a + b) / 2);
            x[n++] = (float)a;
            x[n++] = mid;
            x[n++] = nextafterf(mid, 0);
            x[n++] = nextafterf(mid, INFINITY);
        }
    *out = x;
    return n;
}

static int same_value(double a, double b) {
    return isnan(a) || isnan(b) ? isnan(a) && isnan(b) : a == b && !signbit(a) == !signbit(b);
}

static void convert_values(void) {
    float *x;
    int64_t n = edge_values(&x);
    char *from = guarded((size_t)n * 4, 1), *to = guarded((size_t)n * 4, 1);
    for (dkv_type a = DKV_F32; a <= DKV_FP8; a = (dkv_type)(a + 1))
        for (dkv_type b = DKV_F32; b <= DKV_FP8; b = (dkv_type)(b + 1)) {
            for (int64_t i = 0; i < n; i++) oracle_store(from + i * oracle_bytes(a), a, oracle_round(a, (double)x[i]));
            dkv_convert(to, b, from, a, n);
            for (int64_t i = 0; i < n; i++) {
                double source = oracle_load(from + i * oracle_bytes(a), a);
                if (same_value(oracle_load(to + i * oracle_bytes(b), b), oracle_round(b, source))) continue;
                fail_msg("%s to %s: %a gives %a", dkv_type_name(a), dkv_type_name(b), source,
                         oracle_load(to + i * oracle_bytes(b), b));
            }
        }
}

/* A NaN whose payload lies below what the target holds must not become an infinity. */
static void convert_nan(void) {
    const uint32_t payloads[] = {0x7F800001, 0xFF800001, 0x7F801000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000};
    for (dkv_type type = DKV_F32; type <= DKV_FP8; type = (dkv_type)(type + 1))
        for (int i = 0; i < COUNT(payloads); i++) {
            uint32_t out = 0;
            dkv_convert(&out, type, &payloads[i], DKV_F32, 1);
            AT("%08x to %s", payloads[i], dkv_type_name(type));
            CHECK(type == DKV_I8 ? out == 0 : isnan(oracle_load(&out, type)));
        }
}

/* Every short length, ends on the guard page, starts at an odd address. */
static void convert_lengths(void) {
    for (int n = 0; n < 70; n++)
        for (int pair = 0; pair < 25; pair++) {
            dkv_type a = packed_at(pair / 5), b = packed_at(pair);
            int64_t ea = oracle_bytes(a), eb = oracle_bytes(b);
            AT("%d from %s to %s", n, dkv_type_name(a), dkv_type_name(b));
            char *src = guarded((size_t)(n * ea) + 1, 1), *dst = guarded((size_t)(n * eb) + 1, 1);
            for (int at = 0; at < 2; at++) {
                for (int i = 0; i < n; i++) oracle_store(src + at + i * ea, a, oracle_round(a, i - 20.25));
                dkv_convert(dst + at, b, src + at, a, n);
                for (int i = 0; i < n; i++)
                    CHECK(oracle_load(dst + at + i * eb, b) == oracle_round(b, oracle_load(src + at + i * ea, a)));
            }
            CHECK(is_poison(dst, 1) || n);
            CHECK(test_release());
        }
}

int main(void) {
    static const test_case cases[] = {
        {"results", results, 0},
        {"types and views", types_and_views, 0},
        {"levels", levels, 0},
        {"convert, every value where rounding decides", convert_values, 1},
        {"convert NaN", convert_nan, 1},
        {"convert, every short length", convert_lengths, 1},
    };
    return run_cases("base", cases, COUNT(cases));
}
