/* Score files, all little-endian; bytes exact, nothing may follow:

     0  8  magic "DKVS\r\n\x1a\n"          72  8  T_c
     8  4  version = 1                     80  8  seed
    12  4  header bytes = 256              88  8  data hash
    16  8  file bytes                      96 32  zero
    24 16  L, H, Hkv, D (4 each)          128 64  model
    40  8  zero                           192 64  tool
    48 24  W, S, R (8 each)               256     count: D * 4 bytes
                                                  score: L * H * D * 4 bytes, IEEE single
                                                  CRC32 (zlib's) over every byte before it, 4 bytes

   Invalid: shapes and lengths outside dkv_pattern's ranges, H % Hkv, T_c other than S + R + W * D, scores outside 0..1,
   text that is not printable, zero bytes that are not. */
#define _GNU_SOURCE
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER = 256, VERSION = 1 };
static const unsigned char MAGIC[8] = {'D', 'K', 'V', 'S', '\r', '\n', 0x1a, '\n'};

static uint64_t get(const unsigned char *p, int n) {
    uint64_t x = 0;
    while (n--) x = x << 8 | p[n];
    return x;
}

static void put(unsigned char *p, uint64_t x, int n) {
    for (; n--; x >>= 8) *p++ = (unsigned char)x;
}

/* ---- reading ------------------------------------------------------------- */

static bool zeros(const unsigned char *p, size_t n) {
    while (n && !*p) p++, n--;
    return !n;
}

static bool is_text(const unsigned char *p) {
    size_t n = 0;
    while (n < 64 && p[n] >= ' ' && p[n] <= '~') n++;
    return n < 64 && zeros(p + n, 64 - n);
}

static bool in(int64_t x, int64_t low, int64_t high) { return x >= low && x <= high; }

static bool shape_is_sane(const score_table *s) {
    const int64_t far = (int64_t)TWO_36;
    return in(s->L, 1, MAX_SIDE) && in(s->H, 1, MAX_SIDE) && in(s->Hkv, 1, s->H) && s->H % s->Hkv == 0 &&
           in(s->D, 1, MAX_BINS) && in(s->W, 1, far) && in(s->S, 0, far) && in(s->R, 0, far) &&
           s->T_c == s->S + s->R + s->W * s->D;
}

static void read_header(score_table *s, const unsigned char *in_) {
    s->L = (int32_t)get(in_ + 24, 4), s->H = (int32_t)get(in_ + 28, 4);
    s->Hkv = (int32_t)get(in_ + 32, 4), s->D = (int32_t)get(in_ + 36, 4);
    s->W = (int64_t)get(in_ + 48, 8), s->S = (int64_t)get(in_ + 56, 8), s->R = (int64_t)get(in_ + 64, 8);
    s->T_c = (int64_t)get(in_ + 72, 8), s->seed = get(in_ + 80, 8), s->data_hash = get(in_ + 88, 8);
    memcpy(s->model, in_ + 128, 64);
    memcpy(s->tool, in_ + 192, 64);
}

static size_t cells_of(const score_table *s) { return (size_t)s->L * (size_t)s->H * (size_t)s->D; }
static size_t file_bytes(const score_table *s) { return HEADER + 4 * ((size_t)s->D + cells_of(s)) + 4; }

const char *read_scores(score_table *out, const void *data, size_t bytes) {
    const unsigned char *p = data;
    score_table s = {0};
    if (bytes < 8 || memcmp(p, MAGIC, 8)) return "not a score file (wrong magic bytes)";
    if (bytes < HEADER + 4 || get(p + 16, 8) != bytes) return "file is truncated or has trailing bytes";
    if (get(p + 8, 4) != VERSION) return "written by another format version; make the file again";
    if (get(p + bytes - 4, 4) != dkv_crc32(0, p, bytes - 4)) return "file is damaged (CRC32 differs)";
    read_header(&s, p);
    if (get(p + 12, 4) != HEADER || !zeros(p + 40, 8) || !zeros(p + 96, 32) || !is_text(p + 128) || !is_text(p + 192) ||
        !shape_is_sane(&s) || file_bytes(&s) != bytes)
        return "a field is outside its range";
    s.count = allocate((size_t)s.D, sizeof *s.count);
    s.score = allocate(cells_of(&s), sizeof *s.score);
    for (int64_t b = 0; b < s.D; b++) s.count[b] = (uint32_t)get(p + HEADER + 4 * b, 4);
    p += HEADER + 4 * (size_t)s.D;
    for (size_t i = 0; i < cells_of(&s); i++) {
        uint32_t word = (uint32_t)get(p + 4 * i, 4);
        memcpy(&s.score[i], &word, 4);
        if (!(s.score[i] >= 0 && s.score[i] <= 1)) return free_scores(&s), "a score is outside 0..1";
    }
    *out = s;
    return NULL;
}

void load_scores(score_table *out, const char *path) {
    size_t bytes;
    char *data = read_file(path, &bytes);
    const char *wrong = read_scores(out, data, bytes);
    if (wrong) fail("%s: %s", path, wrong);
    free(data);
}

void free_scores(score_table *s) {
    free(s->count);
    free(s->score);
    *s = (score_table){0};
}

bool is_score_file(const char *path) {
    unsigned char head[8] = {0};
    FILE *f = fopen(path, "rb");
    bool is = f && fread(head, 1, 8, f) == 8 && !memcmp(head, MAGIC, 8);
    if (f) fclose(f);
    return is;
}

/* ---- writing ------------------------------------------------------------- */

void save_scores(const score_table *s, const char *path) {
    size_t bytes = file_bytes(s);
    unsigned char *p = allocate(bytes, 1), *to = p + HEADER;
    const int64_t fields[] = {s->W, s->S, s->R, s->T_c, (int64_t)s->seed, (int64_t)s->data_hash};
    const int32_t sizes[] = {s->L, s->H, s->Hkv, s->D};
    memcpy(p, MAGIC, 8);
    put(p + 8, VERSION, 4), put(p + 12, HEADER, 4), put(p + 16, bytes, 8);
    for (int i = 0; i < 4; i++) put(p + 24 + 4 * i, (uint32_t)sizes[i], 4);
    for (int i = 0; i < 6; i++) put(p + 48 + 8 * i, (uint64_t)fields[i], 8);
    memcpy(p + 128, s->model, strnlen(s->model, 63));
    memcpy(p + 192, s->tool, strnlen(s->tool, 63));
    for (int64_t b = 0; b < s->D; b++, to += 4) put(to, s->count[b], 4);
    for (size_t i = 0; i < cells_of(s); i++, to += 4) {
        uint32_t word;
        memcpy(&word, &s->score[i], 4);
        put(to, word, 4);
    }
    put(to, dkv_crc32(0, p, bytes - 4), 4);
    write_file(path, p, bytes);
    free(p);
}

void check_scored_model(const score_table *s, const char *path, const char *model) {
    if (*s->model && *model && strcmp(s->model, model))
        fail("%s holds scores of %s, not of %s", path, s->model, model);
}

void check_scores_match(const score_table *s, const char *s_path, const dkv_pattern *p, const char *p_path) {
    if (s->L != p->L || s->H != p->H || s->Hkv != p->Hkv || s->D != p->D)
        fail("%s has %d layers, %d and %d heads, %d bins; %s has %d, %d and %d, %d", s_path, s->L, s->H, s->Hkv, s->D,
             p_path, p->L, p->H, p->Hkv, p->D);
    if (s->W != p->W || s->S != p->S || s->R != p->R)
        fail("%s has bins of %lld, sink %lld, recent %lld; %s has %lld, %lld, %lld", s_path, (long long)s->W,
             (long long)s->S, (long long)s->R, p_path, (long long)p->W, (long long)p->S, (long long)p->R);
    check_scored_model(s, s_path, p->model);
}
