/* DKV_NO_STDIO with the caller's own assert and linkage. check.sh looks at the names that the object still needs. */
static int failed_assertions;
#define DKV_NO_STDIO
#define DKV_ASSERT(x) ((void)((x) || ++failed_assertions))
#define DKV_API extern __attribute__((visibility("hidden")))
#define DISTANCE_KV_IMPLEMENTATION
#include "../../distance_kv.h"

int main(void) {
    dkv_plan plan;
    dkv_cache *cache = NULL;
    dkv_shape shape = {1, 1, 1, 2, 2};
    int64_t mem[32];
    size_t bytes = sizeof mem;
    if (dkv_plan_from_positions(&plan, mem, &bytes, 1, 1, 0, NULL, NULL) != DKV_OK) return 1;
    if (dkv_cache_create(&cache, &plan, &shape, DKV_F32, 4, NULL) != DKV_ERR_MEMORY) return 2; /* no malloc */
    return failed_assertions;
}
