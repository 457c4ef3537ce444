/* Builds GGUF files in memory, valid ones and others, as examples/llama/gguf.h draws them: for the tests and the fuzz
   target. */
#ifndef GGUF_BUILD_H
#define GGUF_BUILD_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { T_U8, T_I8, T_U16, T_I16, T_U32, T_I32, T_F32, T_BOOL, T_STR, T_ARR, T_U64, T_I64, T_F64 };

typedef struct {
    size_t n;
    unsigned char bytes[1 << 16];
} file;

static inline void put(file *f, const void *p, size_t n) {
    if (n > sizeof f->bytes - f->n) abort();
    if (n) memcpy(f->bytes + f->n, p, n);
    f->n += n;
}

static inline void put_u32(file *f, uint32_t v) { put(f, &v, sizeof v); }
static inline void put_u64(file *f, uint64_t v) { put(f, &v, sizeof v); }
static inline void put_str(file *f, const char *s) { put_u64(f, strlen(s)), put(f, s, strlen(s)); }
static inline void put_key(file *f, const char *name, uint32_t type) { put_str(f, name), put_u32(f, type); }

static inline void put_key_u32(file *f, const char *name, uint32_t v) { put_key(f, name, T_U32), put_u32(f, v); }
static inline void put_key_f32(file *f, const char *name, float v) { put_key(f, name, T_F32), put(f, &v, sizeof v); }
static inline void put_key_str(file *f, const char *name, const char *v) { put_key(f, name, T_STR), put_str(f, v); }

static inline void put_array(file *f, const char *name, uint32_t type, uint64_t count) {
    put_key(f, name, T_ARR);
    put_u32(f, type);
    put_u64(f, count);
}

static inline void put_head(file *f, uint64_t n_tensors, uint64_t n_keys) {
    put(f, "GGUF", 4);
    put_u32(f, 3);
    put_u64(f, n_tensors);
    put_u64(f, n_keys);
}

static inline void put_info(file *f, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type,
                            uint64_t offset) {
    put_str(f, name);
    put_u32(f, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) put_u64(f, dims[i]);
    put_u32(f, type);
    put_u64(f, offset);
}

static inline void pad(file *f, size_t alignment) {
    while (f->n % alignment) put(f, "", 1);
}

#endif
