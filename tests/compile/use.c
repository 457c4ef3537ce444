/* C99, C11, C17 and C++17 alike: declarations twice, then the implementation, then a few calls. */
#include "../../distance_kv.h"
#include "../../distance_kv.h"
#ifdef WITH_IMPLEMENTATION
#define DISTANCE_KV_IMPLEMENTATION
#include "../../distance_kv.h"
#endif
#include "../../distance_kv.h"
#include <stdlib.h>

int main(void) {
    float k[4] = {1, 2, 3, 4}, v[4] = {5, 6, 7, 8}, q[2] = {1, 1}, out[2] = {0, 0};
    size_t bytes = 0;
    dkv_attention a = {1, 1, 2, 2, 1, dkv_thd(q, DKV_F32, 1, 2), dkv_thd(out, DKV_F32, 1, 2), NULL,
                       dkv_strided(dkv_thd(k, DKV_F32, 1, 2), dkv_thd(v, DKV_F32, 1, 2), 1),
                       dkv_strided(dkv_thd(k + 2, DKV_F32, 1, 2), dkv_thd(v + 2, DKV_F32, 1, 2), 1), 0, 0, NULL};
    if (dkv_attend_size(&bytes, &a, 1, 1) != DKV_OK) return 1;
    char *room = (char *)malloc(bytes + 63), *ws = room + (64 - (uintptr_t)room % 64) % 64;
    if (dkv_attend(&a, 1, ws, bytes, NULL) != DKV_OK) return 2;
    free(room);
    /* logits 3 / sqrt 2 and 7 / sqrt 2: the second key has weight 0.944 */
    return out[0] > 6.88f && out[0] < 6.90f && out[1] > 7.88f && out[1] < 7.90f ? 0 : 3;
}
