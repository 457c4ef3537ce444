/* The header's structs as bench/peers.py must have them: name and size, then each field's offset. */
#include "../../distance_kv.h"
#include <stdio.h>

#define STRUCT(s) printf("%s %d\n", #s, (int)sizeof(s))
#define FIELD(s, f) printf("%s %s %d\n", #s, #f, (int)offsetof(s, f))

int main(void) {
    STRUCT(dkv_tensor);
    FIELD(dkv_tensor, data), FIELD(dkv_tensor, type), FIELD(dkv_tensor, stride_token);
    FIELD(dkv_tensor, stride_head), FIELD(dkv_tensor, stride_dim);
    STRUCT(dkv_run);
    FIELD(dkv_run, pos), FIELD(dkv_run, len), FIELD(dkv_run, row);
    STRUCT(dkv_plan);
    FIELD(dkv_plan, L), FIELD(dkv_plan, Hkv), FIELD(dkv_plan, T_c), FIELD(dkv_plan, pattern_crc);
    FIELD(dkv_plan, first), FIELD(dkv_plan, rows), FIELD(dkv_plan, runs);
    STRUCT(dkv_packed);
    FIELD(dkv_packed, data), FIELD(dkv_packed, type), FIELD(dkv_packed, Hkv), FIELD(dkv_packed, d_k);
    FIELD(dkv_packed, d_v), FIELD(dkv_packed, rows), FIELD(dkv_packed, capacity);
    STRUCT(dkv_segment);
    FIELD(dkv_segment, packed), FIELD(dkv_segment, k), FIELD(dkv_segment, v), FIELD(dkv_segment, rows);
    FIELD(dkv_segment, n);
    STRUCT(dkv_attention);
    FIELD(dkv_attention, H), FIELD(dkv_attention, Hkv), FIELD(dkv_attention, d_k), FIELD(dkv_attention, d_v);
    FIELD(dkv_attention, N_q), FIELD(dkv_attention, q), FIELD(dkv_attention, out), FIELD(dkv_attention, lse);
    FIELD(dkv_attention, context), FIELD(dkv_attention, tail), FIELD(dkv_attention, scale);
    FIELD(dkv_attention, softcap), FIELD(dkv_attention, sink);
    STRUCT(dkv_suffix);
    FIELD(dkv_suffix, N_q), FIELD(dkv_suffix, q), FIELD(dkv_suffix, k), FIELD(dkv_suffix, v), FIELD(dkv_suffix, out);
    FIELD(dkv_suffix, lse), FIELD(dkv_suffix, out_relaxed), FIELD(dkv_suffix, lse_relaxed), FIELD(dkv_suffix, d_out);
    FIELD(dkv_suffix, dq), FIELD(dkv_suffix, dk), FIELD(dkv_suffix, dv);
    STRUCT(dkv_gated);
    FIELD(dkv_gated, H), FIELD(dkv_gated, Hkv), FIELD(dkv_gated, d_k), FIELD(dkv_gated, d_v), FIELD(dkv_gated, T_c);
    FIELD(dkv_gated, W), FIELD(dkv_gated, S), FIELD(dkv_gated, R), FIELD(dkv_gated, D), FIELD(dkv_gated, scale);
    FIELD(dkv_gated, context), FIELD(dkv_gated, ln_u), FIELD(dkv_gated, open), FIELD(dkv_gated, suffix);
    FIELD(dkv_gated, n_suffix), FIELD(dkv_gated, d_ln_u);
    printf("dkv_cuda_work fits %d\n", sizeof(dkv_cuda_work) <= 1024 ? 1024 : (int)sizeof(dkv_cuda_work));
    printf("dkv_cuda_gated fits %d\n", sizeof(dkv_cuda_gated) <= 1024 ? 1024 : (int)sizeof(dkv_cuda_gated));
    return 0;
}
