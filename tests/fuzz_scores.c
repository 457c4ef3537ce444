/* libFuzzer target: score files as raw bytes, and a valid file with edits under a right CRC. What is accepted is
   written back in the same bytes. */
#define _GNU_SOURCE
#include "fuzz.h"

#include "../examples/dkv/scores.c"

/* What scores.c takes from the tool, with files in memory. */
static uint8_t *written;
static size_t n_written;

void fail(const char *format, ...) { REQUIRE(!format); abort(); }
void *allocate(size_t count, size_t size) { return calloc(count, size); }
char *read_file(const char *path, size_t *bytes) { REQUIRE(!path && !bytes); return NULL; }
void write_file(const char *path, const void *data, size_t bytes) {
    (void)path;
    REQUIRE((written = malloc(bytes)) != NULL);
    memcpy(written, data, bytes);
    n_written = bytes;
}

static void read_one(const uint8_t *image, size_t bytes) {
    score_table s;
    if (read_scores(&s, image, bytes)) return;
    save_scores(&s, "");
    REQUIRE(n_written == bytes && !memcmp(written, image, bytes));
    free(written);
    free_scores(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    read_one(data, size);
    if (size < 4) return 0;
    uint32_t count[8] = {3};
    float score[2 * 4 * 8] = {0.5f, 1};
    score_table s = {.L = 1 + data[0] % 2, .H = 4, .Hkv = 2, .D = 1 + data[1] % 8, .W = 1 + data[2], .R = data[3],
                     .count = count, .score = score};
    s.T_c = s.R + s.W * s.D;
    save_scores(&s, "");
    uint8_t *image = written;
    size_t bytes = n_written;
    read_one(image, bytes);
    edit(image, bytes, data + 4, size - 4);
    read_one(image, bytes);
    free(image);
    return 0;
}
