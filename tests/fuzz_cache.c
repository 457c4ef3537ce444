/* libFuzzer target: saved caches as raw bytes, and valid images with edits under a CRC that is right. What is restored
   must save to the same bytes and survive every use. Built as fuzz_pattern.c is. */
#include "fuzz.h"

enum { CAPACITY = 4 };

static void attend(dkv_cache *c, int l) {
    const dkv_shape *s = dkv_cache_shape(c);
    int H = s->H ? s->H : s->Hkv;
    float *q = calloc((size_t)H, 576 * sizeof *q), *out = malloc((size_t)H * 576 * sizeof *out);
    dkv_attention a = dkv_cache_attention(c, l, dkv_thd(q, DKV_F32, H, s->d_k), 1, dkv_thd(out, DKV_F32, H, s->d_v));
    a.H = H;
    size_t bytes;
    REQUIRE(dkv_attend_size(&bytes, &a, 1, 1) == DKV_OK);
    void *ws = aligned_alloc(64, (bytes + 64) / 64 * 64);
    REQUIRE(dkv_attend(&a, 1, ws, bytes, NULL) == DKV_OK);
    free(ws);
    free(q);
    free(out);
}

static uint8_t *save(const dkv_cache *c, size_t bytes) {
    size_t n = bytes;
    uint8_t *image = malloc(bytes);
    REQUIRE(dkv_cache_save(image, &n, c) == DKV_OK && n == bytes);
    return image;
}

/* Saving what was restored gives the same bytes, but for signalling NaNs, which become quiet once. */
static void round_trip(const dkv_cache *c, size_t bytes) {
    dkv_cache *again;
    uint8_t *quiet = save(c, bytes), *copy;
    REQUIRE(dkv_cache_restore(&again, quiet, bytes, CAPACITY, NULL) == DKV_OK);
    copy = save(again, bytes);
    REQUIRE(!memcmp(copy, quiet, bytes));
    dkv_cache_destroy(again);
    free(quiet);
    free(copy);
}

static void restore(const uint8_t *image, size_t bytes) {
    dkv_cache *c, *fork;
    if (dkv_cache_restore(&c, image, bytes, CAPACITY, NULL) != DKV_OK) return;
    round_trip(c, bytes);
    const dkv_shape *s = dkv_cache_shape(c);
    if ((int64_t)s->H * s->L < 4096)
        for (int l = 0; l < s->L; l++) attend(c, l);
    REQUIRE(dkv_cache_fork(&fork, c, CAPACITY) == DKV_OK);
    dkv_cache_destroy(c);
    REQUIRE(dkv_cache_truncate(fork, 0) == DKV_OK);
    dkv_cache_destroy(fork);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    restore(data, size);
    if (size < 4) return 0;
    static const float x[64] = {1, -2, 3};
    int L = 1 + data[0] % 2, Hkv = 1 + data[1] % 2;
    int64_t positions[16], counts[4], n = 0, n_tail = data[3] % (CAPACITY + 1);
    for (int f = 0; f < L * Hkv; f++) {
        counts[f] = 0;
        for (int i = 0; i < 4; i++)
            if (data[2] >> i & 1 || i == f) positions[n++] = i, counts[f]++;
    }
    _Alignas(8) char mem[1024];
    dkv_plan plan;
    size_t bytes = sizeof mem;
    REQUIRE(dkv_plan_from_positions(&plan, mem, &bytes, L, Hkv, 4, positions, counts) == DKV_OK);
    dkv_shape shape = {L, 2 * Hkv, Hkv, 1 + data[3] / 16 % 4, 1 + data[3] / 64};
    dkv_segment s = dkv_strided(dkv_thd(x, DKV_F32, Hkv, shape.d_k), dkv_thd(x, DKV_F32, Hkv, shape.d_v), 4);
    dkv_cache *c;
    REQUIRE(dkv_cache_create(&c, &plan, &shape, (dkv_type)(data[0] / 2 % 5), CAPACITY, NULL) == DKV_OK);
    for (int l = 0; l < L; l++) {
        REQUIRE(dkv_cache_pack(c, l, &s) == DKV_OK);
        REQUIRE(dkv_cache_append(c, l, s.k, s.v, n_tail) == DKV_OK);
    }
    REQUIRE(dkv_cache_save(NULL, &bytes, c) == DKV_OK);
    uint8_t *image = malloc(bytes);
    REQUIRE(dkv_cache_save(image, &bytes, c) == DKV_OK);
    dkv_cache_destroy(c);
    edit(image, bytes, data + 4, size - 4);
    restore(image, bytes);
    free(image);
    return 0;
}
