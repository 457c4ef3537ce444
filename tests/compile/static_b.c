#define DKV_STATIC
#define DISTANCE_KV_IMPLEMENTATION
#include "../../distance_kv.h"

const char *other_version(void);

const char *other_version(void) {
    return dkv_version();
}
