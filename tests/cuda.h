/* The device side of the harness: poisoned blocks between poisoned guards, and tensors there and back. Every CUDA call
   is checked; a machine without a device skips by name. */
#ifndef CUDA_H
#define CUDA_H

#include "test.h"
#include <cuda_runtime_api.h>

#define CUDA(call) do { \
    cudaError_t error_ = (call); \
    if (error_) fail_msg("at %s: %s: %s", test_at, #call, cudaGetErrorString(error_)); } while (0)

#define NEEDS_DEVICE do { if (!has_device()) skip(); } while (0)

static inline int has_device(void) {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

/* ---- blocks: NaN inside and on both sides, so that a read past the end shows, too ---- */

typedef struct device_block { struct device_block *next; char *base; size_t bytes; } device_block;

static device_block *device_blocks;
enum { DEVICE_GUARD = 512 }; /* keeps the block aligned as cudaMalloc does */

static inline void *device(size_t bytes) {
    device_block *b = malloc(sizeof *b);
    *b = (device_block){device_blocks, NULL, bytes};
    CUDA(cudaMalloc((void **)&b->base, bytes + 2 * DEVICE_GUARD));
    CUDA(cudaMemset(b->base, TEST_POISON, bytes + 2 * DEVICE_GUARD));
    device_blocks = b;
    return b->base + DEVICE_GUARD;
}

static inline void *to_device(const void *src, size_t bytes) {
    void *p = device(bytes);
    CUDA(cudaMemcpy(p, src, bytes, cudaMemcpyHostToDevice));
    return p;
}

static inline void *to_host(const void *src, size_t bytes) {
    void *p = guarded(bytes, 16);
    CUDA(cudaMemcpy(p, src, bytes, cudaMemcpyDeviceToHost));
    return p;
}

static inline int is_poison_on_device(const void *p, size_t bytes) {
    char *copy = malloc(bytes + 1);
    int same = cudaMemcpy(copy, p, bytes, cudaMemcpyDeviceToHost) == cudaSuccess && is_poison(copy, bytes);
    free(copy);
    return same;
}

/* Frees every block; 0 if a byte beside one was written, or the device has failed. */
static inline int device_release(void) {
    int intact = !device_blocks || cudaDeviceSynchronize() == cudaSuccess;
    for (device_block *b = device_blocks, *next; b; b = next) {
        next = b->next;
        intact &= is_poison_on_device(b->base, DEVICE_GUARD);
        intact &= is_poison_on_device(b->base + DEVICE_GUARD + b->bytes, DEVICE_GUARD);
        intact &= cudaFree(b->base) == cudaSuccess;
        free(b);
    }
    device_blocks = NULL;
    return intact;
}

static inline int release_all(void) {
    return device_release() & test_release();
}

/* ---- tensors ------------------------------------------------------------- */

enum { ODD = UNALIGNED }; /* whole elements here: rows of d + 3, one element more per token, so TMA cannot load it */

static inline dkv_tensor host_tensor(int layout, dkv_type type, int64_t T, int64_t heads, int64_t d) {
    if (layout != ODD) return new_tensor(layout, type, T, heads, d);
    int64_t e = oracle_bytes(type), token = heads * (d + 3) + 1;
    return (dkv_tensor){guarded((size_t)(T * token * e), 1), type, token * e, (d + 3) * e, e};
}

static inline dkv_tensor upload(const dkv_tensor *host, int64_t T, int64_t heads, int64_t d) {
    int64_t low;
    size_t bytes = tensor_span(host, T, heads, d, &low);
    dkv_tensor t = *host;
    t.data = bytes ? (char *)to_device((char *)host->data + low, bytes) - low : NULL;
    return t;
}

static inline void download(const dkv_tensor *host, const dkv_tensor *dev, int64_t T, int64_t heads, int64_t d) {
    int64_t low;
    size_t bytes = tensor_span(host, T, heads, d, &low);
    if (bytes) CUDA(cudaMemcpy((char *)host->data + low, (char *)dev->data + low, bytes, cudaMemcpyDeviceToHost));
}

static inline void poison_tensor(const dkv_tensor *dev, int64_t T, int64_t heads, int64_t d) {
    int64_t low;
    size_t bytes = tensor_span(dev, T, heads, d, &low);
    if (bytes) CUDA(cudaMemset((char *)dev->data + low, TEST_POISON, bytes));
}

/* Between the elements of a host tensor is poison; forgets the elements. */
static inline int gaps_are_poison(const dkv_tensor *t, int64_t T, int64_t heads, int64_t d) {
    int64_t low;
    size_t bytes = tensor_span(t, T, heads, d, &low);
    for (int64_t i = 0; i < T * heads * d; i++)
        memset(oracle_at(t, i / d / heads, i / d % heads, i % d), TEST_POISON, (size_t)oracle_bytes(t->type));
    return is_poison((char *)t->data + low, bytes);
}

/* ---- plans and packing on the device -------------------------------------- */

static inline dkv_plan plan_on_device(const dkv_plan *plan) {
    dkv_plan out;
    size_t bytes;
    CHECK_OK(dkv_cuda_plan(&out, NULL, &bytes, plan, NULL));
    CHECK_OK(dkv_cuda_plan(&out, device(bytes), &bytes, plan, NULL));
    CUDA(cudaStreamSynchronize(NULL));
    return out;
}

/* Layer l of source, whose tensors are on the device. */
static inline dkv_packed pack_on_device(const dkv_plan *plan, int l, dkv_type type, int d_k, int d_v,
                                        const dkv_segment *source) {
    dkv_plan there = plan_on_device(plan);
    dkv_packed out;
    size_t bytes;
    CHECK_OK(dkv_cuda_pack(&out, NULL, &bytes, type, plan, &there, l, d_k, d_v, source, NULL));
    CHECK_OK(dkv_cuda_pack(&out, device(bytes), &bytes, type, plan, &there, l, d_k, d_v, source, NULL));
    CUDA(cudaStreamSynchronize(NULL));
    return out;
}

/* The rows of KV head g as f32, on the host. */
static inline dkv_segment unpack_to_host(const dkv_packed *packed, int g, dkv_type to) {
    int64_t n = packed->rows[g];
    dkv_segment s = dkv_strided(host_tensor(THD, to, n, packed->Hkv, packed->d_k),
                                host_tensor(THD, to, n, packed->Hkv, packed->d_v), n);
    dkv_tensor k = upload(&s.k, n, packed->Hkv, packed->d_k), v = upload(&s.v, n, packed->Hkv, packed->d_v);
    CHECK_OK(dkv_cuda_unpack(k, v, packed, g, NULL));
    CUDA(cudaStreamSynchronize(NULL));
    download(&s.k, &k, n, packed->Hkv, packed->d_k);
    download(&s.v, &v, n, packed->Hkv, packed->d_v);
    return s;
}

#endif
