/* minimal.c: compress a KV cache, decode one step from it, and check it against a masked softmax over all of it.

   cc -I.. minimal.c -lm && ./a.out */
#define DISTANCE_KV_IMPLEMENTATION
#include "../distance_kv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { L = 2, H = 4, Hkv = 2, G = H / Hkv, d = 32, D = 6, W = 16, S = 8, R = 32, T_c = 125, CAPACITY = 64 };

static float K[L][T_c + 1][Hkv][d], V[L][T_c + 1][Hkv][d], Q[L][H][d], OUT[L][H][d]; /* row T_c: the decoded token */

static void fill(float *x, size_t n) {
    while (n--) *x++ = (float)rand() / (float)RAND_MAX * 2 - 1;
}

static void try(dkv_result r, const char *what) {
    if (r == DKV_OK) return;
    fprintf(stderr, "%s: %s\n", what, dkv_result_string(r));
    exit(1);
}

/* Does KV head g keep position i? Straight from the definition. */
static int keep(const dkv_pattern *p, int l, int g, int i) {
    int kept = i < S || i >= T_c - R;
    for (int h = g * G; !kept && h < (g + 1) * G; h++) kept = dkv_pattern_get(p, l, h, (T_c - R - 1 - i) / W);
    return kept;
}

static double masked_error(const dkv_pattern *p, int l, int h) {
    double sum = 0, out[d] = {0}, error = 0;
    for (int i = 0, g = h / G; i <= T_c; i++) {
        double dot = 0;
        for (int k = 0; k < d; k++) dot += (double)Q[l][h][k] * (double)K[l][i][g][k];
        double weight = keep(p, l, g, i) ? exp(dot / sqrt(d)) : 0;
        sum += weight;
        for (int k = 0; k < d; k++) out[k] += weight * (double)V[l][i][g][k];
    }
    for (int k = 0; k < d; k++) error = fmax(error, fabs(out[k] / sum - (double)OUT[l][h][k]));
    return error;
}

int main(void) {
    uint64_t bits[L][H] = {{0x01, 0x03, 0x10, 0x00}, {0x08, 0x21, 0x00, 0x00}}; /* bin b is bit b, nearest first */
    dkv_pattern pattern = {.L = L, .H = H, .Hkv = Hkv, .D = D, .W = W, .S = S, .R = R, .K = 7, .bits = bits};
    fill(K[0][0][0], sizeof K / sizeof(float)), fill(V[0][0][0], sizeof V / sizeof(float));
    fill(Q[0][0], sizeof Q / sizeof(float));

    size_t bytes; /* which positions survive: known before prefill */
    dkv_plan plan;
    try(dkv_plan_make(&plan, NULL, &bytes, &pattern, T_c, DKV_BEYOND_ERROR), "plan");
    void *memory = malloc(bytes);
    try(dkv_plan_make(&plan, memory, &bytes, &pattern, T_c, DKV_BEYOND_ERROR), "plan");

    dkv_cache *cache; /* packed context + room for new tokens */
    dkv_shape shape = {L, H, Hkv, d, d};
    try(dkv_cache_create(&cache, &plan, &shape, DKV_F16, CAPACITY, NULL), "cache");
    for (int l = 0; l < L; l++) { /* after prefill of layer l: its dense K and V may be freed after this */
        dkv_segment dense = dkv_strided(dkv_thd(K[l], DKV_F32, Hkv, d), dkv_thd(V[l], DKV_F32, Hkv, d), T_c);
        try(dkv_cache_pack(cache, l, &dense), "pack");
    }
    static _Alignas(64) char workspace[1 << 20];
    double error = 0;
    for (int l = 0; l < L; l++) { /* one decoding step, at position T_c */
        try(dkv_cache_append(cache, l, dkv_thd(K[l][T_c], DKV_F32, Hkv, d), dkv_thd(V[l][T_c], DKV_F32, Hkv, d), 1),
            "append");
        dkv_tensor q = dkv_thd(Q[l], DKV_F32, H, d), out = dkv_thd(OUT[l], DKV_F32, H, d);
        dkv_attention a = dkv_cache_attention(cache, l, q, 1, out);
        try(dkv_attend(&a, 1, workspace, sizeof workspace, NULL), "attend");
        for (int h = 0; h < H; h++) error = fmax(error, masked_error(&pattern, l, h));
    }
    printf("KV bytes: %lld dense, %lld packed; max error %.1e\n", (long long)dkv_kv_bytes_dense(&shape, DKV_F16, T_c),
           (long long)dkv_kv_bytes_packed(dkv_cache_plan(cache), &shape, DKV_F16), error);
    dkv_cache_destroy(cache);
    free(memory);
    return error < 1e-3 ? 0 : 1; /* K and V were rounded to 11 bits */
}
