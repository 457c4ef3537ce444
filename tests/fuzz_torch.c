/* libFuzzer target: files that torch.save may have written, as raw bytes, and raw pickles in a zip beside a storage.
   What is accepted must lie inside the file. */
#include "fuzz.h"

#include "../examples/dkv/torch.c"

static unsigned sum; /* keeps the reads */

static void read_file(const uint8_t *data, size_t size) {
    torch_pattern t;
    char err[256];
    if (torch_read_pattern(&t, data, size, err, sizeof err)) {
        REQUIRE(memchr(err, 0, sizeof err) && strlen(err) > 8);
        return;
    }
    for (int64_t corner = 0; corner < 8; corner++) {
        int64_t at = 0;
        for (int i = 0; i < 3; i++) at += (corner >> i & 1) * (t.dim[i] - 1) * t.stride[i];
        REQUIRE(t.values + at >= data && t.values + at < data + size);
        sum += t.values[at];
    }
}

static uint8_t *put(uint8_t *to, const char *magic, const char *name, size_t size, size_t at, int central) {
    size_t n = strlen(name), head = central ? 46 : 30;
    memset(to, 0, head);
    memcpy(to, magic, 4);
    for (size_t i = 0; i < 4; i++) {
        to[(central ? 20 : 18) + i] = to[(central ? 24 : 22) + i] = (uint8_t)(size >> 8 * i);
        if (central) to[42 + i] = (uint8_t)(at >> 8 * i);
    }
    to[central ? 28 : 26] = (uint8_t)n;
    memcpy(to + head, name, n);
    return to + head + n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char pickle[] = "x/data.pkl", storage[] = "x/data/0";
    read_file(data, size);
    uint8_t *file = malloc(size + 512), *at = put(file, "PK\3\4", pickle, size, 0, 0);
    if (size) memcpy(at, data, size);
    uint8_t *second = at + size;
    at = put(second, "PK\3\4", storage, 40, 0, 0);
    memset(at, 1, 40);
    uint8_t *start = at + 40;
    at = put(start, "PK\1\2", pickle, size, 0, 1);
    at = put(at, "PK\1\2", storage, 40, (size_t)(second - file), 1);
    memset(at, 0, 22);
    memcpy(at, "PK\5\6", 4);
    at[8] = at[10] = 2;
    for (int i = 0; i < 4; i++) at[16 + i] = (uint8_t)((size_t)(start - file) >> 8 * i);
    size_t n = (size_t)(at + 22 - file);
    uint8_t *exact = malloc(n); /* so that the sanitizer sees every byte beyond */
    memcpy(exact, file, n);
    read_file(exact, n);
    free(exact);
    free(file);
    return 0;
}
