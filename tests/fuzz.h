/* What the fuzz targets share. */
#ifndef FUZZ_H
#define FUZZ_H

#include "../distance_kv.h"
#include "oracle.h"
#include <stdio.h>
#include <stdlib.h>

#define REQUIRE(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); abort(); } } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* data: triples (offset low, offset high, byte to xor). Then the CRC32 at the end is made right again. */
static inline void edit(uint8_t *image, size_t bytes, const uint8_t *data, size_t size) {
    for (size_t i = 0; i + 3 <= size; i += 3) image[(data[i] | (size_t)data[i + 1] << 8) % (bytes - 4)] ^= data[i + 2];
    uint32_t crc = oracle_crc32(image, bytes - 4);
    for (int i = 0; i < 4; i++) image[bytes - 4 + (size_t)i] = (uint8_t)(crc >> 8 * i);
}

#endif
