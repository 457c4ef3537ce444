/* Two private copies in one program: this one and static_b.c's. */
#define DKV_STATIC
#define DISTANCE_KV_IMPLEMENTATION
#include "../../distance_kv.h"

const char *other_version(void);

int main(void) {
    return dkv_version()[0] == other_version()[0] ? 0 : 1;
}
