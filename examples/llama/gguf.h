/* gguf.h: read GGUF v3 files (little-endian) in place.

   gguf *g; char err[256];
   if (gguf_open(&g, "model.gguf", err, sizeof err)) return fprintf(stderr, "%s\n", err), 1;
   const gguf_tensor *t = gguf_find(g, "token_embd.weight");

   A file is untrusted: every count, length and offset is checked against its size when it is opened, so that whatever
   the getters return lies inside the file. Refused, with one line that says what and where: other versions and byte
   orders, tensor types that are not listed below, arrays of arrays, names that occur twice, misaligned tensor data.

   file:  "GGUF"  u32 version  u64 n_tensors  u64 n_keys  keys  tensor infos  padding  data
   key:   string name  u32 type  value          array:  u32 element type  u64 count  elements
   info:  string name  u32 n_dims  u64 dims[n_dims]  u32 type  u64 offset from the start of data
   string: u64 length  bytes, no terminator */
#ifndef GGUF_H
#define GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GGUF_MAX_DIMS = 4 };

/* Tensor types, numbered as in the file. */
enum {
    GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7, GGUF_Q8_0 = 8,
    GGUF_Q4_K = 12, GGUF_Q6_K = 14, GGUF_BF16 = 30
};

typedef struct gguf gguf;

typedef struct {
    const char *ptr; /* [len], not zero-terminated */
    uint64_t len;
} gguf_str;

typedef struct {
    gguf_str name;
    int type;
    int n_dims;
    int64_t dims[GGUF_MAX_DIMS]; /* dims[0] varies fastest; 1 beyond n_dims */
    const void *data;            /* [bytes], aligned to the file's alignment within the file */
    size_t bytes;
} gguf_tensor;

/* 0 = ok; else *out is NULL and err holds one line. data must outlive the gguf and may have any alignment. */
int gguf_open(gguf **out, const char *path, char *err, size_t err_size);
int gguf_open_memory(gguf **out, const void *data, size_t size, char *err, size_t err_size);
void gguf_close(gguf *g);

/* Values by key; false when the key is absent or its value of another kind. Integers: any width, and bool; a u64 beyond
   int64_t does not count as one. Reals: f32, f64 or integer. */
bool gguf_has(const gguf *g, const char *key);
bool gguf_get_int(const gguf *g, const char *key, int64_t *out);
bool gguf_get_real(const gguf *g, const char *key, double *out);
bool gguf_get_str(const gguf *g, const char *key, gguf_str *out);

/* Arrays by key: the count, or -1 when absent or of another element kind; *out is aligned and lives as long as g.
   ints: int32 or uint32 elements. reals: f32 elements. */
int64_t gguf_get_strs(const gguf *g, const char *key, const gguf_str **out);
int64_t gguf_get_ints(const gguf *g, const char *key, const int32_t **out);
int64_t gguf_get_reals(const gguf *g, const char *key, const float **out);

const gguf_tensor *gguf_find(const gguf *g, const char *name); /* NULL when absent */
int64_t gguf_tensor_count(const gguf *g);
const gguf_tensor *gguf_tensor_at(const gguf *g, int64_t i);   /* 0 <= i < gguf_tensor_count */
int64_t gguf_key_count(const gguf *g);
gguf_str gguf_key_at(const gguf *g, int64_t i);                /* 0 <= i < gguf_key_count */

/* Bytes of a row of n elements of a type; 0 when the type is unknown or n is no multiple of its block. */
size_t gguf_row_bytes(int type, int64_t n);
const char *gguf_type_name(int type); /* "?" when unknown */

#endif
