/* distance_kv_cuda.cu - the CUDA backend of distance_kv.h. Same licence; see the end of that file.

   Build     nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++17 -c distance_kv_cuda.cu
             (any of sm_80 .. sm_120; of sm_90 it must be sm_90a), and link one file with DISTANCE_KV_IMPLEMENTATION.
   API       declared and documented in distance_kv.h; this file has kernels, each followed by its launcher.

   CONTENTS  the tags of the header, for the same concepts
     [BASE]     PTX: barriers, TMA, ldmatrix, mma, wgmma; elements
     [PLAN]     the plan on the device
     [PACK]     the packed layout: plain rows per KV head, heads on tiles of 128 rows
     [ATTEND]   the batch in device memory; shares of work; mma.sync kernel; wgmma kernel; combine
     [CACHE]    packed layers + tail on the device
     [SCORE]    ranks of sources, by counting
     [GATES]    draws, unions, penalties, AdamW, Top-K; gated attention, forward and backward

   ONE IDEA  Attention is a list of items (attention, KV head, block of query rows), each a list of tiles of keys:
   packed context first, then the tail. Query rows are (query, head of the group), query first, so K and V are read
   once per KV head. Few items: all tiles form one line that is cut into equal shares, one per CTA, so that a CTA may
   begin and end inside an item; what it has then goes to a fixed slot, and slots merge in order. Many items: each CTA
   takes whole ones, longest first. Shares are computed in the kernel from the plan's counts and the tail's length on
   the device, so a captured graph stays right while the tail grows.
*/
#include "distance_kv.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

namespace {

/* ==========================================================================
   [BASE]  PTX: barriers, TMA, ldmatrix, mma, wgmma; elements
   ========================================================================== */

#define DKV__DEVICE __device__ __forceinline__

constexpr float   LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr int     TILE = 128; /* rows that a head is padded to, keys of a 16-bit tile */
constexpr int64_t FAR = (int64_t)1 << 36;

template <class I> constexpr __host__ DKV__DEVICE I least(I a, I b) { return a < b ? a : b; }
template <class I> constexpr __host__ DKV__DEVICE I most(I a, I b) { return a > b ? a : b; }
__host__ DKV__DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ DKV__DEVICE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

DKV__DEVICE uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- barriers in shared memory ---- */

DKV__DEVICE void bar_init(uint64_t *bar, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
DKV__DEVICE void bar_arrive(uint64_t *bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(shared_address(bar)) : "memory");
}
DKV__DEVICE void bar_wait(uint64_t *bar, uint32_t parity) {
    uint32_t done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
#endif
    } while (!done);
}
/* For who has time: spinning takes issue slots from the warps that compute. */
DKV__DEVICE void bar_wait_idle(uint64_t *bar, uint32_t parity) {
    uint32_t done;
    for (;;) {
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
        if (done) return;
        __nanosleep(200);
    }
}
/* Arrives once this thread's cp.async so far have landed. */
DKV__DEVICE void bar_arrive_copies(uint64_t *bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}
DKV__DEVICE void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DKV__DEVICE void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* A place in a ring of stages, and how often it went round. */
template <int N> struct Ring {
    int      stage = 0;
    uint32_t phase = 0;
    DKV__DEVICE void next() {
        if (++stage == N) stage = 0, phase ^= 1;
    }
};

/* ---- copies to shared memory ---- */

/* Brings what comes first near before anyone asks for it: reads that nothing waits for. */
DKV__DEVICE void touch(const void *attentions, const void *items, const void *lengths, int lane) {
    const char *p = (const char *)lengths;
    if (lane < 12) p = (const char *)items + (lane - 8) * 128;
    if (lane < 8) p = (const char *)attentions + lane * 128;
    uint32_t x;
    if (lane < 13 && p) asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p));
}
DKV__DEVICE void copy16(uint32_t dst, const void *src, bool real) { /* zeros if not real */
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(real ? 16 : 0) : "memory");
}

/* Kernels of a stream overlap on sm_90: the next one may be scheduled from here on, and waits until this one ends. */
DKV__DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
DKV__DEVICE void bar_expect(uint64_t *bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
/* Box at (column, row, head) of a tensor [head][row][column]. policy: how long L2 shall keep it. */
DKV__DEVICE void tma_load(uint32_t dst, const CUtensorMap *map, int column, int row, int head, uint64_t *bar,
                          uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(dst), "l"(map), "r"(column), "r"(row), "r"(head),
                 "r"(shared_address(bar)), "l"(policy) : "memory");
}
DKV__DEVICE uint64_t policy_evict_first() {
    uint64_t p;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}
DKV__DEVICE uint64_t policy_evict_normal() {
    uint64_t p;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p));
    return p;
}
/* The map was written by another kernel through ordinary stores. */
DKV__DEVICE void tma_acquire(const CUtensorMap *map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
DKV__DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

/* Tiles lie in panels of 128-byte rows (64 for 8-bit rows of 64), 16-byte chunks swizzled as TMA and wgmma do. */
template <int PITCH> DKV__DEVICE uint32_t swizzled(int row, int chunk) {
    return (uint32_t)(row * PITCH + ((chunk ^ (PITCH == 128 ? row & 7 : row >> 1 & 3)) << 4));
}
template <int PITCH, int ROWS> DKV__DEVICE uint32_t tile_offset(int row, int chunk) {
    constexpr int CHUNKS = PITCH / 16;
    return (uint32_t)(chunk / CHUNKS * ROWS * PITCH) + swizzled<PITCH>(row, chunk % CHUNKS);
}

/* ---- matrix units ---- */

DKV__DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DKV__DEVICE void ldmatrix_t(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
template <class T> DKV__DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> DKV__DEVICE void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DKV__DEVICE void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- elements ---- */

DKV__DEVICE float exp2_fast(float x) { /* 2 ulp; -inf gives 0, NaN stays */
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <class T> DKV__DEVICE uint32_t pair_of(float lo, float hi);
template <> DKV__DEVICE uint32_t pair_of<__nv_bfloat16>(float lo, float hi) {
    __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&x;
}
template <> DKV__DEVICE uint32_t pair_of<__half>(float lo, float hi) {
    __half2 x = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&x;
}

/* e4m3fn as f16 at 2^-8 of its value, two of them from the high bytes of two halves: exact, subnormals too. NaN comes
   out as a number, but a channel with one has a NaN scale. */
DKV__DEVICE uint32_t fp8_pair(uint32_t high) { return (high & 0x80008000u) | (high >> 1 & 0x3f803f80u); }

/* Bytes lo and hi of x as a pair of f16; fp8 at 2^-8 of its value. */
template <int TYPE, int LO, int HI> DKV__DEVICE uint32_t bytes_pair(uint32_t x) {
    if (TYPE == DKV_FP8) return fp8_pair(__byte_perm(x, 0, 0x0404 | LO << 4 | HI << 12));
    uint32_t y = __byte_perm(x ^ 0x80808080u, 0x64646464u, 0x4040 | LO | HI << 8); /* 1024 + 128 + value */
    __half2  z = __hsub2(*(__half2 *)&y, __half2{__float2half(1152.0f), __float2half(1152.0f)});
    return *(uint32_t *)&z;
}

DKV__DEVICE float fp8_value(uint8_t b) {
    uint32_t pair = fp8_pair((uint32_t)b << 8);
    float    x = __half2float(__ushort_as_half((unsigned short)pair)) * 256.0f;
    return (b & 0x7f) == 0x7f ? NAN : x;
}
DKV__DEVICE uint8_t fp8_from(float x) { /* as dkv__fp8_from_f32: nearest even, saturating, a NaN stays one */
    uint32_t u = __float_as_uint(x), sign = u >> 24 & 0x80u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
    if (rest >= 0x43e00000u) return (uint8_t)(sign | 0x7eu);
    if (rest < 0x3c800000u) return (uint8_t)(sign | (__float_as_uint(__uint_as_float(rest) + 16384.0f) - 0x46800000u));
    return (uint8_t)(sign | (rest - 0x3c000000u + 0x7ffffu + (rest >> 20 & 1u)) >> 20);
}
DKV__DEVICE int8_t i8_from(float x) { return (int8_t)(x != x ? 0 : least(most(__float2int_rn(x), -127), 127)); }

DKV__DEVICE float element(const char *p, dkv_type type) {
    switch (type) {
    case DKV_F32: return *(const float *)p;
    case DKV_F16: return __half2float(*(const __half *)p);
    case DKV_BF16: return __bfloat162float(*(const __nv_bfloat16 *)p);
    case DKV_I8: return (float)*(const int8_t *)p;
    default: return fp8_value(*(const uint8_t *)p);
    }
}
DKV__DEVICE void set_element(char *p, dkv_type type, float x) {
    switch (type) {
    case DKV_F32: *(float *)p = x; return;
    case DKV_F16: *(__half *)p = __float2half_rn(x); return;
    case DKV_BF16: *(__nv_bfloat16 *)p = __float2bfloat16_rn(x); return;
    case DKV_I8: *(int8_t *)p = i8_from(x); return;
    default: *(uint8_t *)p = fp8_from(x); return;
    }
}
/* The same, called: where strides are odd, time matters less than the size of the code around. */
__device__ __noinline__ float element_called(const char *p, dkv_type type) { return element(p, type); }
__device__ __noinline__ void set_pair(char *p, int64_t stride, dkv_type type, float x, float y) {
    set_element(p, type, x);
    set_element(p + stride, type, y);
}
__host__ DKV__DEVICE int type_bytes(dkv_type t) { return t == DKV_F32 ? 4 : t == DKV_F16 || t == DKV_BF16 ? 2 : 1; }

DKV__DEVICE char *at(const dkv_tensor &t, int64_t token, int64_t head) {
    return (char *)t.data + token * t.stride_token + head * t.stride_head;
}

/* 16-byte rows of adjacent elements: what vector loads and TMA need. */
bool is_vector(const dkv_tensor &t) {
    return t.stride_dim == type_bytes(t.type) && ((uintptr_t)t.data | (uintptr_t)t.stride_token |
           (uintptr_t)t.stride_head) % 16 == 0;
}
/* Those that TMA takes: the next token and head lie further on. */
bool is_forward(const dkv_tensor &t) { return is_vector(t) && t.stride_token >= 0 && t.stride_head >= 0; }
/* Elements lie at multiples of their size: a device faults on others. */
bool is_whole(const dkv_tensor &t) {
    return ((uintptr_t)t.data | (uintptr_t)t.stride_token | (uintptr_t)t.stride_head | (uintptr_t)t.stride_dim) %
           (uintptr_t)type_bytes(t.type) == 0;
}
bool is_whole(const dkv_segment &s) { return s.packed || s.n == 0 || (is_whole(s.k) && is_whole(s.v)); }

/* ---- host ---- */

dkv_result did(cudaError_t e) { return e == cudaSuccess ? DKV_OK : (cudaGetLastError(), DKV_ERR_DEVICE); }

template <class T> struct Same { typedef T type; }; /* a parameter of this type is not deduced from what is passed */

/* On sm_90 the next kernel's launch overlaps the end of the one before it. Says how this launch went, whatever error
   the caller's thread still holds. */
template <class... A>
dkv_result launch(void (*kernel)(A...), dim3 grid, int threads, int shared, bool overlaps, cudaStream_t stream,
                  const typename Same<A>::type &...a) {
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3((unsigned)threads);
    c.dynamicSmemBytes = (size_t)shared;
    c.stream = stream;
    c.attrs = &overlap;
    c.numAttrs = overlaps;
    if (shared > 48 << 10) {
        dkv_result r = did(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        if (r) return r;
    }
    return did(cudaLaunchKernelEx(&c, kernel, a...));
}
template <class... A>
dkv_result launch(void (*kernel)(A...), dim3 grid, int threads, void *stream, const typename Same<A>::type &...a) {
    return launch(kernel, grid, threads, 0, false, (cudaStream_t)stream, a...);
}

struct Device {
    int  arch, sms, shared; /* compute capability, multiprocessors, bytes of shared memory a CTA may have */
    bool sm90, wgmma;       /* the code that runs has TMA and launches that overlap; wgmma */
};
int arch_limit = 1000;

/* The programming guide's: 227 KB in data centers from sm_90 on, 163 before, 99 elsewhere. */
int shared_of(int arch) {
    return (arch == 80 || arch == 87 ? 163 : arch < 90 || arch >= 120 ? 99 : 227) << 10;
}

/* What the code that runs was compiled for, JIT or not, said by the threads that this kernel may have. */
#if __CUDA_ARCH_FEAT_SM90_ALL
#define DKV__FEATURES 96
#elif __CUDA_ARCH__ >= 900
#define DKV__FEATURES 64
#else
#define DKV__FEATURES 32
#endif
__global__ void __launch_bounds__(DKV__FEATURES) features() {}
#undef DKV__FEATURES

dkv_result device_read(Device *d) {
    int                id, major, minor;
    cudaFuncAttributes code;
    if (cudaGetDevice(&id) || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id) ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id) ||
        cudaDeviceGetAttribute(&d->sms, cudaDevAttrMultiProcessorCount, id) ||
        cudaDeviceGetAttribute(&d->shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id) ||
        cudaFuncGetAttributes(&code, features)) {
        cudaGetLastError();
        return DKV_ERR_DEVICE;
    }
    d->arch = major * 10 + minor;
    if (d->arch < 80) return DKV_ERR_DEVICE;
    const int limit = __atomic_load_n(&arch_limit, __ATOMIC_RELAXED);
    if (d->arch > limit) d->arch = limit, d->shared = least(d->shared, shared_of(limit));
    d->sm90 = d->arch >= 90 && code.maxThreadsPerBlock >= 64;
    d->wgmma = d->arch == 90 && code.maxThreadsPerBlock >= 96;
    return DKV_OK;
}

/* Writes a few kilobytes to device memory through kernel parameters: no wait, no pinned memory, safe to capture. */
struct alignas(128) Parcel { unsigned char bytes[16384]; };
__global__ void deliver(unsigned char *dst, const __grid_constant__ Parcel p, int n) {
    for (int i = threadIdx.x * 16; i < n; i += blockDim.x * 16) *(uint4 *)(dst + i) = *(const uint4 *)(p.bytes + i);
}
struct Post { /* collects, then delivers; destinations are consecutive */
    unsigned char *dst;
    cudaStream_t   stream;
    Parcel         parcel;
    int            used;
    int64_t        done; /* bytes before the parcel */
    dkv_result     result;
    Post(void *to, void *on) : dst((unsigned char *)to), stream((cudaStream_t)on), used(0), done(0), result(DKV_OK) {}
    void flush() {
        if (used && !result) result = launch(deliver, 1, 256, stream, dst, parcel, (int)round_up(used, 16));
        dst += used, done += used, used = 0;
    }
    void put(const void *src, size_t n) {
        for (const unsigned char *p = (const unsigned char *)src; n > 0;) {
            size_t m = least(n, sizeof parcel.bytes - (size_t)used);
            memcpy(parcel.bytes + used, p, m);
            used += (int)m, p += m, n -= m;
            if (used == (int)sizeof parcel.bytes) flush();
        }
    }
    void align(int64_t to) { /* zeros up to byte to of all */
        const uint64_t zero[16] = {};
        while (done + used < to) put(zero, (size_t)least(to - done - used, (int64_t)sizeof zero));
    }
};

} /* namespace */

extern "C" dkv_result dkv_cuda_device(int *arch, int *sms) {
    Device     d;
    dkv_result r = device_read(&d);
    if (r) return r;
    *arch = d.arch;
    *sms = d.sms;
    return DKV_OK;
}

extern "C" int dkv_cuda_limit(int arch) {
    __atomic_store_n(&arch_limit, arch, __ATOMIC_RELAXED);
    Device d;
    return device_read(&d) ? 0 : d.arch;
}

/* ==========================================================================
   [PLAN]  the plan on the device
   ========================================================================== */

extern "C" dkv_result dkv_cuda_plan(dkv_plan *on_device, void *mem, size_t *bytes, const dkv_plan *plan, void *stream) {
    int64_t heads = (int64_t)plan->L * plan->Hkv;
    size_t  size = (size_t)((heads + 1) + heads) * 8 + (size_t)plan->first[heads] * sizeof(dkv_run);
    if (!mem) {
        *bytes = size;
        return DKV_OK;
    }
    if (*bytes < size) return DKV_ERR_CAPACITY;
    dkv_result r = did(cudaMemcpyAsync(mem, plan->first, size, cudaMemcpyHostToDevice, (cudaStream_t)stream));
    if (r) return r;
    *on_device = *plan;
    on_device->first = (const int64_t *)mem;
    on_device->rows = on_device->first + heads + 1;
    on_device->runs = (const dkv_run *)(on_device->rows + heads);
    *bytes = size;
    return DKV_OK;
}

/* ==========================================================================
   [PACK]  the packed layout: plain rows per KV head, heads on tiles of 128 rows
   in:  one layer's K and V, strided in any way, and the plan's runs on the device
   out: K [sum of round_up(rows, 128)][d_k'], V likewise, scales; every byte written
   ========================================================================== */

namespace {

struct Layout { /* bytes of a packed layer */
    int64_t rows;                 /* of all heads, padded */
    int64_t k_row, v_row;         /* bytes of a row */
    int64_t k_scale, v_scale, v;  /* offsets */
    int64_t bytes;
};

bool head_dim_ok(int d) { return d >= 8 && d <= 256 && d % 8 == 0; }

int64_t padded_d(dkv_type type, int64_t d) { return round_up(d, 16 / type_bytes(type)); }

Layout layout_of(dkv_type type, int Hkv, int d_k, int d_v, const int64_t *rows) {
    Layout y = {};
    for (int g = 0; g < Hkv; g++) y.rows += round_up(rows[g], TILE);
    y.k_row = padded_d(type, d_k) * type_bytes(type);
    y.v_row = padded_d(type, d_v) * type_bytes(type);
    y.v = round_up(y.rows * y.k_row, 128);
    y.k_scale = y.v + round_up(y.rows * y.v_row, 128);
    y.v_scale = y.k_scale + (type_bytes(type) == 1 ? Hkv * padded_d(type, d_k) * 4 : 0);
    y.bytes = round_up(y.v_scale + (type_bytes(type) == 1 ? Hkv * padded_d(type, d_v) * 4 : 0), 128);
    return y;
}

bool packable(dkv_type t) { return t == DKV_F16 || t == DKV_BF16 || t == DKV_I8 || t == DKV_FP8; }

/* One side (K or V) of a layer on its way into the packed layout. */
struct PackSide {
    dkv_tensor from;       /* [T_c][Hkv][d] */
    char      *to;         /* rows of all heads */
    float     *scale;      /* [Hkv][d'], 8-bit only: largest magnitudes until they are made scales */
    int        d, row, vector; /* row bytes; from has 16-byte rows */
};
struct PackLayer { /* grid: (shares of the tiles of all heads, sides) */
    PackSide       side[2];
    const int64_t *first, *rows; /* of the layer, on the device */
    const dkv_run *runs;
    int64_t        tiles; /* of all heads */
    int            Hkv;
    dkv_type       type;
};
struct PackTile { /* of the line of all heads' tiles, the x-th, and so the x-th of the packed layer */
    const dkv_run *runs;  /* of its head */
    int64_t        rows, tile; /* the head's; which of its tiles */
    int            n_runs, g;
};
DKV__DEVICE PackTile pack_tile_at(const PackLayer &p, int64_t x) { /* x < tiles; by whole warps */
    const int lane = threadIdx.x & 31;
    int64_t   before = 0;
    for (int g0 = 0;; g0 += 32) {
        const int     g = least(g0 + lane, p.Hkv - 1);
        const int64_t rows = g0 + lane < p.Hkv ? p.rows[g] : 0, tiles = ceil_div(rows, TILE), first = p.first[g];
        const int     n_runs = (int)(p.first[g + 1] - first);
        int64_t       upto = tiles;
        for (int j = 1; j < 32; j <<= 1) {
            int64_t y = __shfl_up_sync(~0u, upto, j);
            upto += lane >= j ? y : 0;
        }
        const unsigned open = __ballot_sync(~0u, before + upto > x);
        if (open || g0 + 32 >= p.Hkv) {
            const int i = __ffs(open | 1u << 31) - 1;
            return PackTile{p.runs + __shfl_sync(~0u, first, i), __shfl_sync(~0u, rows, i),
                            x - before - __shfl_sync(~0u, upto - tiles, i), __shfl_sync(~0u, n_runs, i), g0 + i};
        }
        before += __shfl_sync(~0u, upto, 31);
    }
}

constexpr int64_t NOWHERE = INT64_MIN; /* padding comes from there */
struct PackShared {
    int64_t offset[2][TILE]; /* of two tiles, in turns */
    dkv_run runs[TILE];
    int     found;
};

/* Offsets in the source of the 128 rows of a tile. Runs are found by a 32-ary search of one warp, and each row's run
   among those of the tile by halving. */
DKV__DEVICE void tile_offsets(const PackTile &h, const dkv_tensor &t, int64_t *offset, PackShared *sh) {
    const int     tid = threadIdx.x, lane = tid & 31;
    const int64_t tile = h.tile;
    if (tid < 32) {
        int lo = 0, n = h.n_runs; /* the last run with row <= first row of the tile is in [lo, lo + n) */
        while (n > 1) {
            int  step = (n + 31) / 32, i = lo + lane * step;
            bool before = lane * step < n && h.runs[i].row <= tile * TILE;
            int  last = 31 - __clz(__ballot_sync(~0u, before) | 1);
            lo += last * step;
            n = least(step, n - last * step);
        }
        if (lane == 0) sh->found = lo;
    }
    __syncthreads();
    if (tid < TILE && sh->found + tid < h.n_runs) sh->runs[tid] = h.runs[sh->found + tid];
    __syncthreads();
    if (tid < TILE) {
        int64_t row = tile * TILE + tid;
        int     lo = 0, n = least(h.n_runs - sh->found, TILE);
        while (n > 1) {
            int half = n / 2;
            bool before = sh->runs[lo + half].row <= row;
            lo += before ? half : 0;
            n = before ? n - half : half;
        }
        const int64_t from = (sh->runs[lo].pos + row - sh->runs[lo].row) * t.stride_token + h.g * t.stride_head;
        offset[tid] = row < h.rows ? from : NOWHERE;
    }
    __syncthreads();
}

/* A CTA's share of a side's tiles, forwards (WAY 1) or backwards (-1). The next one's offsets are found while the loads
   of the one at hand are under way: found first, they took longer than the loads. */
template <int WAY> struct PackWalk {
    const PackLayer &p;
    const PackSide  &s;
    PackShared      *sh;
    int              tile, end, g, next_g; /* heads of this tile and the next */
    DKV__DEVICE PackWalk(const PackLayer &layer, PackShared *shared) : p(layer), s(layer.side[blockIdx.y]), sh(shared) {
        const int x = (int)(p.tiles * blockIdx.x / gridDim.x), y = (int)(p.tiles * (blockIdx.x + 1) / gridDim.x);
        tile = WAY > 0 ? x : y - 1, end = WAY > 0 ? y : x - 1;
        g = next_g = find(tile);
    }
    DKV__DEVICE int find(int x) {
        const PackTile y = pack_tile_at(p, x);
        tile_offsets(y, s.from, sh->offset[x & 1], sh);
        return y.g;
    }
    DKV__DEVICE const int64_t *offset() const { return sh->offset[tile & 1]; }
    DKV__DEVICE void look_ahead() { /* by all threads, once per tile */
        if (tile + WAY != end) next_g = find(tile + WAY);
    }
    DKV__DEVICE bool ends_head() const { return tile + WAY == end || next_g != g; }
    DKV__DEVICE void step() { tile += WAY, g = next_g; }
};

struct Eight { float x[8]; };
DKV__DEVICE Eight eight_of(const uint4 &raw, dkv_type type) { /* 16-bit types */
    const uint32_t pair[4] = {raw.x, raw.y, raw.z, raw.w};
    Eight          y;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 v = type == DKV_F16 ? __half22float2(*(const __half2 *)&pair[j])
                                   : float2{__uint_as_float(pair[j] << 16), __uint_as_float(pair[j] & 0xffff0000u)};
        y.x[2 * j] = v.x, y.x[2 * j + 1] = v.y;
    }
    return y;
}
DKV__DEVICE Eight load8(const char *p, dkv_type type, int64_t stride, bool vector) {
    Eight y;
    if (!vector) {
        for (int j = 0; j < 8; j++) y.x[j] = element(p + j * stride, type);
    } else if (type == DKV_F32) {
        *(float4 *)y.x = *(const float4 *)p;
        *(float4 *)(y.x + 4) = *(const float4 *)(p + 16);
    } else {
        y = eight_of(*(const uint4 *)p, type);
    }
    return y;
}
DKV__DEVICE void store8(char *p, dkv_type type, const Eight &y) { /* 16-bit types */
    uint32_t pair[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pair[j] = type == DKV_F16 ? pair_of<__half>(y.x[2 * j], y.x[2 * j + 1])
                                  : pair_of<__nv_bfloat16>(y.x[2 * j], y.x[2 * j + 1]);
    }
    *(uint4 *)p = uint4{pair[0], pair[1], pair[2], pair[3]};
}
/* Rounded to nearest even. i8: |x| <= 127 by its scale, and then the low byte of 1.5 * 2^23 + x is x. */
template <int TYPE> DKV__DEVICE uint32_t bytes_of(const float *x) {
    if constexpr (TYPE == DKV_FP8) {
        return (uint32_t)__nv_cvt_float2_to_fp8x2(float2{x[0], x[1]}, __NV_SATFINITE, __NV_E4M3) |
               (uint32_t)__nv_cvt_float2_to_fp8x2(float2{x[2], x[3]}, __NV_SATFINITE, __NV_E4M3) << 16;
    } else {
        uint32_t y[4];
#pragma unroll
        for (int u = 0; u < 4; u++) y[u] = __float_as_uint(x[u] + 12582912.0f);
        return __byte_perm(__byte_perm(y[0], y[1], 0x0040), __byte_perm(y[2], y[3], 0x0040), 0x5410);
    }
}

DKV__DEVICE float scale_from(float top, dkv_type type) {
    float s = top / (type == DKV_I8 ? 127.0f : 448.0f);
    return s < 1.17549435e-38f ? 1.0f : s; /* zeros, or subnormal and as good as zeros; not a NaN */
}

/* A thread has eight channels of every lanes-th row. */
constexpr int PACK_ROWS = 8, PACK_CTAS = 3; /* rows whose loads are under way together; CTAs of a multiprocessor */

/* A thread's rows of a tile: the c-th eight channels of rows row, row + lanes, ... WHOLE: 16 bytes at once of 16-bit
   types, all rows' together. Rows beyond the tile are its last one then, padding its first: loads have no condition,
   since ptxas would have each wait for the one before. */
template <bool WHOLE> struct PackRows {
    const PackSide &s;
    const bool      inside; /* channels that exist */
    const char     *from;
    uint4           raw[PACK_ROWS];
    DKV__DEVICE PackRows(const PackSide &side, int c) : s(side), inside(c * 8 < side.d) {
        from = (const char *)s.from.data + (inside ? c * 8 * s.from.stride_dim : 0);
    }
    DKV__DEVICE void load(const int64_t *offset, int row, int lanes, bool again = false) { /* again: and later again */
#pragma unroll
        for (int k = 0; WHOLE && k < PACK_ROWS; k++) {
            const int64_t at = offset[least(row + k * lanes, TILE - 1)];
            const uint4  *src = (const uint4 *)(from + (at == NOWHERE ? offset[0] : at));
            raw[k] = again ? __ldcg(src) : __ldcs(src);
        }
    }
    DKV__DEVICE Eight at(int k, int64_t offset) const { /* padding is zeros */
        if (!inside || offset == NOWHERE) return Eight{};
        return WHOLE ? eight_of(raw[k], s.from.type) : load8(from + offset, s.from.type, s.from.stride_dim, s.vector);
    }
};

/* Same type: 16 bytes as they are. A CTA per tile: four fit a multiprocessor, and the hardware deals them evenly. */
template <bool WHOLE>
__global__ void __launch_bounds__(256, 4) pack_tiles(const __grid_constant__ PackLayer p) {
    __shared__ PackShared sh;
    let_next_start();
    const PackSide &s = p.side[blockIdx.y];
    const int       chunks = s.row / 16, lanes = 256 / chunks, c = threadIdx.x % chunks, row0 = threadIdx.x / chunks;
    PackRows<WHOLE> x(s, c);
    for (PackWalk<1> walk(p, &sh); walk.tile != walk.end; walk.step()) {
        char *to = s.to + (int64_t)walk.tile * TILE * s.row + c * 16;
        x.load(walk.offset(), row0, lanes);
        walk.look_ahead();
        for (int row = row0; row0 < lanes && row < TILE; row += lanes * PACK_ROWS) {
            if (row != row0) x.load(walk.offset(), row, lanes);
#pragma unroll
            for (int k = 0; k < PACK_ROWS; k++) {
                const int at = row + k * lanes;
                if (at >= TILE) break;
                const int64_t offset = walk.offset()[at];
                if (!WHOLE || s.from.type != p.type) store8(to + at * s.row, p.type, x.at(k, offset));
                else *(uint4 *)(to + at * s.row) = offset == NOWHERE || !x.inside ? uint4{0, 0, 0, 0} : x.raw[k];
            }
        }
    }
}

/* Magnitudes of two 16-bit floats at once: as integers their order is theirs. */
DKV__DEVICE void widen_top(uint32_t (&top)[4], const uint4 &x) {
    top[0] = __vmaxu2(top[0], x.x & 0x7fff7fffu), top[1] = __vmaxu2(top[1], x.y & 0x7fff7fffu);
    top[2] = __vmaxu2(top[2], x.z & 0x7fff7fffu), top[3] = __vmaxu2(top[3], x.w & 0x7fff7fffu);
}

/* Largest magnitudes of a head's channels into side.scale: as integers their order is that of the floats, so the
   maximum does not depend on the order of CTAs. What is not finite becomes NaN, the largest of all. */
template <bool WHOLE>
__global__ void __launch_bounds__(256, PACK_CTAS) measure_tiles(const __grid_constant__ PackLayer p) {
    __shared__ PackShared sh;
    __shared__ unsigned   top[256];
    let_next_start();
    const PackSide &s = p.side[blockIdx.y];
    const int       chunks = s.d / 8, lanes = 256 / chunks, c = threadIdx.x % chunks, row0 = threadIdx.x / chunks;
    unsigned        own[8] = {};
    uint32_t        pair[4] = {};
    PackRows<WHOLE> x(s, c);
    top[threadIdx.x] = 0;
    for (PackWalk<-1> walk(p, &sh); walk.tile != walk.end; walk.step()) {
        x.load(walk.offset(), row0, lanes, true);
        walk.look_ahead();
        for (int row = row0; row0 < lanes && row < TILE; row += lanes * PACK_ROWS) {
            if (row != row0) x.load(walk.offset(), row, lanes, true);
#pragma unroll
            for (int k = 0; k < PACK_ROWS; k++) { /* rows twice do no harm */
                if (WHOLE) widen_top(pair, x.raw[k]);
                if (WHOLE || row + k * lanes >= TILE) continue;
                const Eight y = x.at(k, walk.offset()[row + k * lanes]);
                for (int u = 0; u < 8; u++) own[u] = most(own[u], __float_as_uint(y.x[u]) & 0x7fffffffu);
            }
        }
        if (!walk.ends_head()) continue;
        const Eight y = eight_of(uint4{pair[0], pair[1], pair[2], pair[3]}, s.from.type);
        for (int u = 0; u < 8; u++) {
            const unsigned a = WHOLE ? __float_as_uint(y.x[u]) : own[u];
            if (a) atomicMax(&top[c * 8 + u], a >= 0x7f800000u ? 0x7fc00000u : a);
            own[u] = pair[u / 2] = 0;
        }
        __syncthreads();
        if (threadIdx.x < s.d && top[threadIdx.x]) {
            atomicMax((unsigned *)s.scale + walk.g * s.row + threadIdx.x, top[threadIdx.x]);
            top[threadIdx.x] = 0;
        }
        __syncthreads();
    }
}

/* In 8 bits: x / scale, divided exactly (Markstein: a product with the reciprocal, corrected once). Scales are still
   largest magnitudes. What was measured last is in L2, so it comes first. */
template <int TYPE, bool WHOLE>
__global__ void __launch_bounds__(256, PACK_CTAS) quantise_tiles(const __grid_constant__ PackLayer p) {
    __shared__ PackShared sh;
    __shared__ float      scales[256], inverses[256];
    let_next_start();
    const PackSide &s = p.side[blockIdx.y];
    const int       chunks = s.row / 8, lanes = 256 / chunks, c = threadIdx.x % chunks, row0 = threadIdx.x / chunks;
    float           scale[8], inverse[8];
    bool            begins_head = true;
    PackRows<WHOLE> x(s, c);
    for (PackWalk<1> walk(p, &sh); walk.tile != walk.end; walk.step()) {
        char *to = s.to + (int64_t)walk.tile * TILE * s.row + c * 8;
        x.load(walk.offset(), row0, lanes);
        if (begins_head) {
            __syncthreads();
            if (threadIdx.x < s.row) {
                const float y = scale_from(s.scale[walk.g * s.row + threadIdx.x], (dkv_type)TYPE);
                scales[threadIdx.x] = y, inverses[threadIdx.x] = __frcp_rn(y);
            }
            __syncthreads();
#pragma unroll
            for (int u = 0; u < 8; u++) scale[u] = scales[c * 8 + u], inverse[u] = inverses[c * 8 + u];
        }
        walk.look_ahead();
        begins_head = walk.ends_head();
        for (int row = row0; row0 < lanes && row < TILE; row += lanes * PACK_ROWS) {
            if (row != row0) x.load(walk.offset(), row, lanes);
#pragma unroll
            for (int k = 0; k < PACK_ROWS; k++) {
                const int at = row + k * lanes;
                if (at >= TILE) break;
                Eight y = x.at(k, walk.offset()[at]);
#pragma unroll
                for (int u = 0; u < 8; u++) {
                    const float z = y.x[u] * inverse[u];
                    y.x[u] = fmaf(fmaf(-z, scale[u], y.x[u]), inverse[u], z);
                }
                *(uint2 *)(to + at * s.row) = uint2{bytes_of<TYPE>(y.x), bytes_of<TYPE>(y.x + 4)};
            }
        }
#pragma unroll
        for (int u = 0; u < 8; u++) /* i8 knows no NaN: channels with such a scale are zeros */
            for (int row = row0; TYPE == DKV_I8 && scale[u] != scale[u] && row0 < lanes && row < TILE; row += lanes)
                to[row * s.row + u] = 0;
    }
}

__global__ void finish_scales(float *scale, int n, dkv_type type) {
    let_next_start();
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) scale[i] = scale_from(scale[i], type);
}

__global__ void unpack_rows(dkv_tensor to, const char *from, int row_bytes, dkv_type type, const float *scale, int g,
                            int64_t rows, int d) {
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < rows * d; i += (int64_t)gridDim.x * 256) {
        int64_t row = i / d;
        int     j = (int)(i % d);
        float   x = element(from + row * row_bytes + j * type_bytes(type), type);
        set_element(at(to, row, g) + j * to.stride_dim, to.type, scale ? x * scale[j] : x);
    }
}

} /* namespace */

extern "C" dkv_result dkv_cuda_pack(dkv_packed *out, void *mem, size_t *bytes, dkv_type type, const dkv_plan *plan,
                                    const dkv_plan *on_device, int l, int d_k, int d_v, const dkv_segment *source,
                                    void *stream) {
    const int64_t *rows = plan->rows + (int64_t)l * plan->Hkv;
    if (!packable(type)) return DKV_ERR_TYPE;
    if (!head_dim_ok(d_k) || !head_dim_ok(d_v)) return DKV_ERR_SHAPE;
    Layout y = layout_of(type, plan->Hkv, d_k, d_v, rows);
    if (!mem) {
        *bytes = (size_t)y.bytes;
        return DKV_OK;
    }
    if (*bytes < (size_t)y.bytes) return DKV_ERR_CAPACITY;
    if ((uintptr_t)mem % 128) return DKV_ERR_ALIGN;
    if (source->packed || source->k.type > DKV_BF16 || source->v.type > DKV_BF16) return DKV_ERR_TYPE;
    if (source->rows || source->n != plan->T_c) return DKV_ERR_SHAPE;
    if (!is_whole(source->k) || !is_whole(source->v)) return DKV_ERR_ALIGN;
    cudaStream_t st = (cudaStream_t)stream;
    char        *data = (char *)mem;
    const bool   scaled = type_bytes(type) == 1;
    Device       dev;
    PackLayer    p = {};
    dkv_result   r = device_read(&dev);
    if (r) return r;
    const bool overlap = dev.sm90;
    p.side[0] = PackSide{source->k, data, NULL, d_k, (int)y.k_row, is_vector(source->k)};
    p.side[1] = PackSide{source->v, data + y.v, NULL, d_v, (int)y.v_row, is_vector(source->v)};
    bool whole = true;
    for (const PackSide &s : p.side) whole = whole && s.vector && s.from.type != DKV_F32;
    if (scaled) p.side[0].scale = (float *)(data + y.k_scale), p.side[1].scale = (float *)(data + y.v_scale);
    p.first = on_device->first + (int64_t)l * plan->Hkv;
    p.rows = on_device->rows + (int64_t)l * plan->Hkv;
    p.runs = on_device->runs;
    p.tiles = y.rows / TILE;
    p.Hkv = plan->Hkv;
    p.type = type;
    const int64_t ctas = scaled ? (PACK_CTAS * dev.sms + 1) / 2 : p.tiles; /* of a side */
    const dim3    grid((unsigned)least(p.tiles, ctas), 2);
    auto run = [&](void (*kernel)(PackLayer)) {
        if (p.tiles && !r) r = launch(kernel, grid, 256, 0, overlap, st, p);
    };
    if (scaled) {
        const int n = (int)((y.bytes - y.k_scale) / 4);
        r = did(cudaMemsetAsync(data + y.k_scale, 0, (size_t)n * 4, st));
        run(whole ? measure_tiles<true> : measure_tiles<false>);
        if (type == DKV_I8) run(whole ? quantise_tiles<DKV_I8, true> : quantise_tiles<DKV_I8, false>);
        else run(whole ? quantise_tiles<DKV_FP8, true> : quantise_tiles<DKV_FP8, false>);
        if (!r) r = launch(finish_scales, (n + 255) / 256, 256, 0, overlap, st, (float *)(data + y.k_scale), n, type);
    } else {
        run(whole ? pack_tiles<true> : pack_tiles<false>);
    }
    if (r) return r;
    *out = dkv_packed{mem, type, plan->Hkv, d_k, d_v, rows, 0};
    *bytes = (size_t)y.bytes;
    return DKV_OK;
}

extern "C" dkv_result dkv_cuda_unpack(dkv_tensor k, dkv_tensor v, const dkv_packed *p, int g, void *stream) {
    if (!packable(p->type) || k.type > DKV_BF16 || v.type > DKV_BF16) return DKV_ERR_TYPE;
    if (!is_whole(k) || !is_whole(v)) return DKV_ERR_ALIGN;
    Layout  y = layout_of(p->type, p->Hkv, p->d_k, p->d_v, p->rows);
    int64_t before = 0, rows = p->rows[g];
    for (int i = 0; i < g; i++) before += round_up(p->rows[i], TILE);
    const char  *data = (const char *)p->data;
    const float *k_scale = (const float *)(data + y.k_scale) + g * padded_d(p->type, p->d_k);
    const float *v_scale = (const float *)(data + y.v_scale) + g * padded_d(p->type, p->d_v);
    bool         scaled = type_bytes(p->type) == 1;
    if (!rows) return DKV_OK;
    unsigned grid = (unsigned)least(ceil_div(rows * p->d_k, 256), (int64_t)4096);
    dkv_result r = launch(unpack_rows, grid, 256, stream, k, data + before * y.k_row, (int)y.k_row, p->type,
                          scaled ? k_scale : NULL, g, rows, p->d_k);
    return r ? r : launch(unpack_rows, grid, 256, stream, v, data + y.v + before * y.v_row, (int)y.v_row, p->type,
                          scaled ? v_scale : NULL, g, rows, p->d_v);
}

/* ==========================================================================
   [ATTEND]  softmax(scale * q . k) v over context and tail, K and V read once per KV head
   in:  queries of all heads; per KV head its own number of keys; the tail's length on the device
   out: outputs, LSE
   ========================================================================== */

namespace {

/* ---- the batch in device memory ---- */

enum { CONTEXT_K, CONTEXT_V, TAIL_K, TAIL_V, SOURCES };

struct alignas(128) Attention {
    CUtensorMap    map[SOURCES];      /* [head][row][d]; a packed context is one head */
    dkv_tensor     source[SOURCES];   /* the same for loads without TMA; head stride 0 if packed */
    dkv_tensor     q, out;
    const float   *sink;
    float         *lse;
    const float   *k_scale, *v_scale; /* 8-bit context: [Hkv][d'] */
    const int64_t *length;            /* tail's, or NULL: tail itself */
    int64_t        tail;
    int32_t        N_q, H, Hkv, G, d_k, d_v, k_pitch, v_pitch; /* pitches of the scales */
    int32_t        first_head, first_item, blocks; /* in heads and items; row blocks of a KV head */
    int32_t        packed, first_row; /* first_row: queries of the attentions before */
    int8_t         vector[SOURCES], q_vector, out_vector;
    float          scale, softcap;    /* scale * log2 e; softcap / scale as it stands */
};

struct Head { int64_t rows, base; }; /* of the context: how many, and the first one if packed */

/* One KV head, or in whole mode one row block of it: all that shares are computed from, in one read. */
struct Item { int32_t a, g, m, context; int64_t tail, rows, base; int32_t N_q, G; };

struct Work { /* kernel parameter */
    const Attention *attentions;
    const Item      *items;
    const int64_t   *lengths; /* of the tails, NULL: as the items say */
    int             *arrived; /* [items], zero between launches */
    float           *slots;   /* [2 * CTAs][rows of a block * (D + 2)] */
    int              n_items, blocks, split, tma, stages;
    int              single;   /* there is one attention */
    uint64_t         inverse;  /* 2^63 / (CTAs / blocks), rounded up */
    CUtensorMap      map[SOURCES]; /* of a batch of one attention: parameters need no fence */
};

DKV__DEVICE int64_t tail_length(const Work &w, const Item &x) {
    return w.lengths ? least(most(w.lengths[x.a], (int64_t)0), x.tail) : x.tail;
}
/* Tail rows that query i sees, of a tail of n. */
DKV__DEVICE int64_t visible(int64_t n, int64_t N_q, int64_t i) { return least(most(n - N_q + 1 + i, (int64_t)0), n); }

DKV__DEVICE int tiles_of(int64_t rows) { return (int)((uint64_t)(rows + TILE - 1) / TILE); }

/* Tiles of context and tail that the row block ending before row end looks at. */
DKV__DEVICE int tiles_until(const Item &x, int64_t length, int end) {
    const int last = end < x.N_q * x.G ? (end - 1) / x.G : x.N_q - 1;
    return x.context + tiles_of(visible(length, x.N_q, last));
}

/* ---- shares of work ---- */

constexpr int START = 2; /* units before an item's first tile: see Walk */

/* Unit at which group c's share begins, of n groups. Called, as are other things that run once per piece: code that is
   run once costs the time it takes to fetch it. */
__device__ __noinline__ int share(int units, int n, int c) { return units / n * c + units % n * c / n; }
/* The group whose share has unit u: the last that begins at or before it. */
DKV__DEVICE int group_of(int units, int n, int u) {
    int c = least((int)((float)u * (float)n / (float)units), n - 1);
    while (c > 0 && share(units, n, c) > u) c--;
    while (c < n - 1 && share(units, n, c + 1) <= u) c++;
    return c;
}

/* Where the pieces of an item are: in slots of groups first .. last, in order. */
struct Pieces {
    int units, groups, blocks, m, first, last;
    int late; /* the first group's piece is not the first of its CTA */
    int count;
};

/* Slot of group c's piece, -1 if it has none: where there are fewer units than groups, some shares are empty. */
DKV__DEVICE int piece_slot(const Pieces &p, int c) {
    if (c > p.last || (p.units < p.groups && share(p.units, p.groups, c) == share(p.units, p.groups, c + 1))) return -1;
    return 2 * (c * p.blocks + p.m) + (c == p.first && p.late);
}
/* Of the item with n units from unit on, the first `start` of them no tiles; by a whole warp. */
__device__ __noinline__ Pieces pieces_of(int unit, int n, int units, int groups, int blocks, int m,
                                             int start = 0) {
    Pieces p = {units, groups, blocks, m, 0, 0, 0, 0};
    p.first = group_of(units, groups, unit + start);
    p.last = group_of(units, groups, unit + n - 1);
    p.late = share(units, groups, p.first) < unit;
    for (int c = p.first; c <= p.last; c += 32)
        p.count += __popc(__ballot_sync(~0u, piece_slot(p, c + (threadIdx.x & 31)) >= 0));
    return p;
}

/* What a CTA does next: tiles [tile, end) of an item's row block m. */
struct Piece {
    const Attention *a;
    int              N_q, G, item, g, m, tile, end, context; /* context: tiles of it */
    int              query, member;                  /* of the first row: query, head of the group */
    float            inverse;                        /* 1 / G */
    int64_t          rows, base, length;             /* context rows of the head, the first of them; tail */
    bool             whole;                          /* the item has no other piece */
    int              slot;                           /* otherwise, where the piece goes */
    Pieces           all;                            /* and where all of them do */
};

/* Split mode: tiles of all KV heads form a line of units, at least one per item so that empty ones are written too, and
   START before them: what it costs a CTA to begin another item (queries, a merge), or its share would end last. Group c
   of n has units [share(c), share(c + 1)); its CTAs have one row block each and run through the same keys at the same
   time. One warp of a CTA walks, and tells the others by shared memory. */
struct Walk { int item, at, pieces, left, unit, units; };

DKV__DEVICE int item_units(const Work &w, const Item &x) {
    return START + most(x.context + tiles_of(tail_length(w, x)), 1);
}
/* Completes a piece that is not the whole item; by a whole warp. */
DKV__DEVICE void complete(Piece &p, const Walk &x, const Work &w) {
    p.all = pieces_of(p.all.first, p.all.units, x.units, gridDim.x / w.blocks, w.blocks, p.m, START);
}

DKV__DEVICE int warp_sum(int x) { return __reduce_add_sync(~0u, x); }

/* Units before item, among all; total in *units. */
DKV__DEVICE int units_before(const Work &w, int item, int *units) {
    int before = 0, all = 0;
    for (int i = 0; i < w.n_items; i += 32) {
        int lane = i + (threadIdx.x & 31), u = lane < w.n_items ? item_units(w, w.items[lane]) : 0;
        all += warp_sum(u);
        before += warp_sum(lane < item ? u : 0);
    }
    *units = all;
    return before;
}

DKV__DEVICE Walk walk_begin(const Work &w) {
    Walk      x = {};
    const int lane = threadIdx.x & 31;
    if (!w.split) {
        x.item = (int)blockIdx.x;
        return x;
    }
    const int c = w.blocks == 1 ? blockIdx.x : blockIdx.x / w.blocks;
    int       own = lane < w.n_items ? item_units(w, w.items[lane]) : 0, before = 0; /* units of this lane's item */
    x.units = own;
#pragma unroll 1
    for (int i = lane + 32; i < w.n_items; i += 32) x.units += item_units(w, w.items[i]);
    x.units = warp_sum(x.units);
    /* share(units, groups, c) and the next, by a product */
    const int begin = (int)__umul64hi((uint64_t)x.units * c << 1, w.inverse);
    x.left = (int)__umul64hi((uint64_t)x.units * (c + 1) << 1, w.inverse) - begin;
#pragma unroll 1
    for (int i = 0; i < w.n_items; i += 32) { /* the last item that starts at or before begin */
        if (i) own = i + lane < w.n_items ? item_units(w, w.items[i + lane]) : 0;
        int upto = own;
        for (int j = 1; j < 32; j <<= 1) {
            int y = __shfl_up_sync(~0u, upto, j);
            upto += lane >= j ? y : 0;
        }
        unsigned open = __ballot_sync(~0u, i + lane < w.n_items && before + upto > begin);
        if (open) {
            int first = __ffs(open) - 1;
            x.item = i + first;
            x.unit = before + __shfl_sync(~0u, upto - own, first);
            x.at = begin - x.unit;
            break;
        }
        before += __shfl_sync(~0u, upto, 31);
    }
    return x;
}

/* Whole items are dealt in rounds, every second one backwards, so that nobody always gets the longer ones. */
DKV__DEVICE int whole_item(const Walk &x, const Work &w) {
    int round = x.item / gridDim.x, rest = least((int)gridDim.x, w.n_items - round * (int)gridDim.x);
    return x.item - (int)blockIdx.x + (round & 1 ? rest - 1 - (int)blockIdx.x : (int)blockIdx.x);
}

template <int M> DKV__DEVICE bool walk_next(Walk &x, Piece &p, const Work &w) {
    if (w.split ? x.left <= 0 : x.item >= w.n_items) return false;
    const Item i = w.items[w.split ? x.item : whole_item(x, w)];
    p.a = w.attentions + i.a;
    p.N_q = i.N_q;
    p.G = i.G;
    p.item = x.item;
    p.g = i.g;
    p.m = w.split ? (int)(blockIdx.x % w.blocks) : i.m;
    p.query = p.m ? p.m * M / p.G : 0;
    p.member = p.m * M - p.query * p.G;
    p.inverse = __fdividef(1.0f, (float)p.G);
    p.context = i.context;
    p.rows = i.rows;
    p.base = i.base;
    p.length = tail_length(w, i);
    p.tile = 0;
    p.end = tiles_until(i, p.length, (p.m + 1) * M);
    p.whole = true;
    if (!w.split) {
        x.item += gridDim.x;
        return true;
    }
    const int units = item_units(w, i), n = least(x.left, units - x.at), end = x.at + n - START;
    if (end <= 0) return false; /* the share ends before the item's first tile */
    p.tile = most(x.at - START, 0);
    p.whole = end - p.tile == units - START;
    p.end = least(p.end, end);
    p.slot = 2 * blockIdx.x + (x.pieces++ > 0);
    p.all.units = units; /* what pieces_of completes: it takes divisions, and loads should start first */
    p.all.first = x.unit;
    x.left -= n;
    x.at = 0;
    x.unit += units;
    x.item++;
    return true;
}

/* ---- rows ---- */

struct Row { int64_t i; int h; bool real; }; /* query, head */
DKV__DEVICE Row row_of(const Piece &p, int r) {
    int x = p.member + r, i = (int)(((float)x + 0.5f) * p.inverse); /* x / G, exact for x < 2^20 */
    return Row{p.query + i, p.g * p.G + (x - i * p.G), p.query + i < p.N_q};
}
/* Tail rows that query row r sees. */
DKV__DEVICE int64_t row_sees(const Piece &p, int r) { return visible(p.length, p.N_q, row_of(p, r).i); }
/* Of n rows of a segment, those in the tile that begins at row. */
DKV__DEVICE int in_tile(int64_t n, int64_t row) { return (int)most(least(n - row, (int64_t)TILE * 2), (int64_t)0); }

/* Where rows go: what of an attention a merge reads, in registers before the fence that empties L1. */
struct Target {
    dkv_tensor   out;
    const float *sink;
    float       *lse;
    int          H, d_v;
    bool         out_vector;
};
DKV__DEVICE Target target_of(const Attention &a) {
    return Target{a.out, a.sink, a.lse, a.H, a.d_v, a.out_vector != 0};
}

/* The end of a row: its largest logit (in powers of 2) and sum become its LSE, which one thread of its stores; returns
   what o is multiplied by. */
template <class A> DKV__DEVICE float finish_row(const A &a, const Row &row, float top, float sum, bool stores = true) {
    float weight = 1.0f, sink = a.sink ? a.sink[row.h] * LOG2E : -INFINITY;
    if (sink > top) { /* the sink leads: everything else is weighed against it */
        weight = exp2_fast(top - sink);
        sum = sum * weight + 1.0f;
        top = sink;
    } else if (sink > -INFINITY) {
        sum += exp2_fast(sink - top);
    }
    if (stores && a.lse) a.lse[row.i * a.H + row.h] = sum == 0.0f ? -INFINITY : (top + log2f(sum)) * LN2;
    return sum == 0.0f ? 0.0f : weight / sum; /* no key at all: 0 */
}

template <int N> DKV__DEVICE void store_out(const dkv_tensor &out, bool vector, int d, const Row &row, int j,
                                            const float (&x)[N]) {
    char *p = at(out, row.i, row.h) + j * out.stride_dim;
    if (!row.real || j >= d) return;
#pragma unroll
    for (int u = 0; u < N; u += 2) {
        if (vector && out.type == DKV_F32) *(float2 *)(p + 4 * u) = float2{x[u], x[u + 1]};
        else if (vector && out.type == DKV_F16) *(uint32_t *)(p + 2 * u) = pair_of<__half>(x[u], x[u + 1]);
        else if (vector) *(uint32_t *)(p + 2 * u) = pair_of<__nv_bfloat16>(x[u], x[u + 1]);
        else set_pair(p + u * out.stride_dim, out.stride_dim, out.type, x[u], x[u + 1]);
    }
}

/* Merges columns [j0, j0 + 32 N) of row r of an item's pieces, by one warp. A piece without a finite logit holds zeros,
   or NaN to pass on. first: slot of the lane's piece among the first 32, or -1; some: any piece's, loaded in place of
   those that are not there, since ptxas has a load with a condition wait for the one before. */
template <int M, int D, int N> DKV__DEVICE void combine_row(const Target &a, const Row &row, int r, int j0,
                                                            const Pieces &p, int first, int some,
                                                            const float *slots) {
    constexpr int SLOT = M * (D + 2), FLIGHT = N > 2 ? 32 / N : M == 16 ? 20 : 12; /* slots in flight */
    const int     lane = threadIdx.x & 31, n = p.last - p.first + 1;
    float         top = -INFINITY, sum = 0.0f, o[N] = {};
#pragma unroll 1
    for (int c = p.first + 32; n > 32 && c <= p.last; c += 32) { /* the first 32 are read once, below */
        int slot = piece_slot(p, c + lane);
        if (slot >= 0) top = fmaxf(top, __ldcg(slots + (int64_t)slot * SLOT + M * D + r));
    }
    const float *columns = slots + r * D + j0 + lane * N;
#pragma unroll 1
    for (int c = 0; c < n; c += 32) {
        const int      slot = c ? piece_slot(p, p.first + c + lane) : first, safe = slot < 0 ? some : slot;
        const unsigned there = __ballot_sync(~0u, slot >= 0);
        const float   *s = slots + (int64_t)safe * SLOT + M * D + r;
        const float    own = __ldcg(s), part = __ldcg(s + M);
        float          weight = 0.0f;
#pragma unroll 1
        for (int j = 0; j < least(n - c, 32); j += FLIGHT) {
            float x[FLIGHT][N];
#pragma unroll
            for (int k = 0; k < FLIGHT; k++) {
                const float *y = columns + (int64_t)__shfl_sync(~0u, safe, j + k) * SLOT;
#pragma unroll
                for (int u = 0; u < N; u += 2) *(float2 *)&x[k][u] = __ldcg((const float2 *)(y + u));
            }
            if (j == 0) { /* while they come */
                if (c == 0) {
                    top = fmaxf(top, slot < 0 ? -INFINITY : own);
                    for (int i = 16; i; i >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
                }
                weight = own == -INFINITY ? 1.0f : exp2_fast(own - top);
                sum += slot < 0 ? 0.0f : weight * part;
            }
#pragma unroll
            for (int k = 0; k < FLIGHT; k++) {
                const float w = __shfl_sync(~0u, weight, j + k);
                if (j + k >= 32 || !(there >> (j + k & 31) & 1)) continue;
#pragma unroll
                for (int u = 0; u < N; u++) o[u] += w * x[k][u];
            }
        }
    }
    for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
    const float weight = finish_row(a, row, top, sum, lane == 0 && j0 == 0);
#pragma unroll
    for (int u = 0; u < N; u++) o[u] *= weight;
    store_out<N>(a.out, a.out_vector, a.d_v, row, j0 + lane * N, o);
}

template <int M, int D> DKV__DEVICE void combine_row(const Attention &a, const Row &row, int r, const Pieces &p,
                                                     const float *slots) {
    combine_row<M, D, D / 32>(target_of(a), row, r, 0, p, piece_slot(p, p.first + (threadIdx.x & 31)),
                              piece_slot(p, p.last), slots);
}

/* ---- softmax of a tile, in registers ---- */

/* s: N groups of 8 keys, each thread two rows by two keys as mma leaves them; becomes exp2(s * factor + bias - top).
   sees: keys of the tile that the two rows see, key: the first key of s in the tile. alpha: what the past weighs. */
template <int N>
DKV__DEVICE void softmax_tile(float (&s)[N][4], float (&top)[2], float (&sum)[2], float (&alpha)[2],
                              const float (&factor)[2], float softcap, const int (&sees)[2], int key,
                              float bias = 0.0f) {
    const int t = (threadIdx.x & 3) * 2;
    float     f[2] = {factor[0], factor[1]};
    /* tanh(y) = 1 - 2 / (1 + e^2y), here with y = logit / softcap; f then is softcap * log2 e */
    if (__builtin_expect(softcap > 0.0f, 0)) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int u = 0; u < 4; u++) {
                float y = exp2_fast(s[n][u] * factor[u >> 1] * (2.0f / softcap));
                s[n][u] = 1.0f - __fdividef(2.0f, 1.0f + y);
            }
        }
        f[0] = f[1] = softcap * LOG2E;
    }
    if (__builtin_expect(sees[0] < key + 8 * N || sees[1] < key + 8 * N, 0)) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int u = 0; u < 4; u++) {
                if (key + 8 * n + t + (u & 1) >= sees[u >> 1]) s[n][u] = -INFINITY;
            }
        }
    }
    /* Both rows at once, each by two chains: one alone waits for every maximum and shuffle. */
    float now[2], other[2], minus[2], part[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < N; n += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float x = fmaxf(s[n][2 * i], s[n][2 * i + 1]), y = fmaxf(s[n + 1][2 * i], s[n + 1][2 * i + 1]);
            now[i] = n ? fmaxf(now[i], x) : x, other[i] = n ? fmaxf(other[i], y) : y;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) now[i] = fmaxf(now[i], other[i]);
#pragma unroll
    for (int i = 0; i < 2; i++) now[i] = fmaxf(now[i], __shfl_xor_sync(~0u, now[i], 1));
#pragma unroll
    for (int i = 0; i < 2; i++) now[i] = fmaxf(now[i], __shfl_xor_sync(~0u, now[i], 2));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        now[i] = fmaxf(fmaf(now[i], f[i], bias), top[i]);
        const float from = now[i] == -INFINITY ? 0.0f : now[i]; /* nothing seen yet: exp2(-inf - 0) = 0 */
        alpha[i] = exp2_fast(top[i] - from);
        top[i] = now[i];
        minus[i] = bias - from;
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int u = 0; u < 4; u++) {
            s[n][u] = exp2_fast(fmaf(s[n][u], f[u >> 1], minus[u >> 1]));
            part[u >> 1] += s[n][u];
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) sum[i] = sum[i] * alpha[i] + part[i];
}

DKV__DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* ---- attention by mma.sync: few rows (decoding), 8-bit contexts, sm_80, any strides ------------------------------

   math    S = Q K^T and O += P V by m16n8k16, K and V as B operands, f32 accumulators; 8-bit elements become f16 in
           registers, K's scales are in q, V's are applied to O where the context ends
   shapes  RW groups of 16 query rows x TW groups of keys, a warp each; a stage is 32 KB at D = 128: 128 keys of K or
           V in 16 bits, 256 in 8
   CTA     8 warps (4 at D = 256, for registers), each 16 rows by 1 / TW of a tile's keys, with its own maximum, sum
           and O, which meet at the end of a piece; one more fills a ring of stages, by TMA or (other strides, sm_80)
           by cp.async
   why     decoding reads 32 KB per microsecond and SM: mma.sync keeps up at a quarter of its rate, and needs no P in
           shared memory; keys split over warps because rows do not fill them
   limits  D 64, 128, 256 (smaller d padded with zeros by the loads)                                               */

template <class T> struct Name;
template <> struct Name<__half> { static constexpr dkv_type type = DKV_F16; };
template <> struct Name<__nv_bfloat16> { static constexpr dkv_type type = DKV_BF16; };
template <int TYPE> struct Compute { typedef __half T; };
template <> struct Compute<DKV_BF16> { typedef __nv_bfloat16 T; };

template <int TYPE, int D, int RW> struct MmaShape {
    static constexpr int WARPS = D == 256 ? 4 : 8, THREADS = 32 * WARPS; /* that compute */
    static constexpr int M = 16 * RW, TW = WARPS / RW;
    static constexpr int BYTES = TYPE == DKV_I8 || TYPE == DKV_FP8 ? 1 : 2;
    static constexpr int KEYS = BYTES == 1 ? 2 * TILE : TILE; /* of a context tile */
    static constexpr int PITCH = BYTES * D < 128 ? BYTES * D : 128;
    static constexpr int STAGE = TILE * D * 2;
    static constexpr int MOST_STAGES = D == 64 ? 6 : 3; /* more bytes under way would only keep other loads waiting */
    static constexpr int Q = M * D * 2;
    static constexpr int RED = WARPS * 16 * 40 * 4; /* 32 columns of O of every warp, rows 40 floats apart */
    static constexpr int RED_AT = TW == 1 ? 0 : Q;  /* behind Q's begin: over it, lest M 128 want more than 99 KB */
    static constexpr int FIXED = most(Q, RED_AT + RED) + 3 * 8 * 16 * 4 + 256 + 2 * (int)sizeof(Piece);
};

/* One stage <- rows of a source, from row on, without TMA; by one warp. */
template <int BYTES, int D, int ROWS>
__device__ __noinline__ void load_rows(const Piece &p, int which, int64_t row, char *to, uint64_t *full) {
    constexpr int     PITCH = BYTES * D < 128 ? BYTES * D : 128, CHUNKS = BYTES * D / 16;
    const Attention  &a = *p.a;
    const bool        packed = which < TAIL_K && a.packed;
    const int         lane = threadIdx.x & 31;
    const dkv_tensor &t = a.source[which];
    const int64_t     rows = (which < TAIL_K ? p.rows : p.length) - row; /* that exist */
    const int         d = which & 1 ? a.d_v : a.d_k;
    const char       *from = at(t, row + (packed ? p.base : 0), packed ? 0 : p.g);
    for (int i = lane; i < ROWS * CHUNKS; i += 32) {
        int      r = i / CHUNKS, c = i % CHUNKS;
        uint32_t dst = tile_offset<PITCH, ROWS>(r, c);
        bool     real = r < rows && c * (16 / BYTES) < d;
        if (a.vector[which]) {
            copy16(shared_address(to) + dst, real ? from + r * t.stride_token + c * 16 : (const char *)t.data, real);
        } else {
            uint4 x = {0, 0, 0, 0};
            for (int j = 0; real && j < 8; j++) { /* 16-bit elements: packed data is always a vector */
                ((uint16_t *)&x)[j] = *(const uint16_t *)(from + r * t.stride_token + (c * 8 + j) * t.stride_dim);
            }
            *(uint4 *)(to + dst) = x;
        }
    }
    if (a.vector[which]) bar_arrive_copies(full);
    else bar_arrive(full);
}

/* The same by TMA where that takes it. */
template <int BYTES, int D, int ROWS>
DKV__DEVICE void load_tile(const Piece &p, int which, int64_t row, char *to, uint64_t *full, bool tma,
                           uint64_t policy, const CUtensorMap *maps = NULL) {
#if __CUDA_ARCH__ >= 900
    if (tma) {
        constexpr int    PITCH = BYTES * D < 128 ? BYTES * D : 128;
        const Attention &a = *p.a;
        const bool       packed = which < TAIL_K && a.packed;
        if ((threadIdx.x & 31) == 0) {
            bar_expect(full, ROWS * D * BYTES);
            for (int i = 0; i < BYTES * D / PITCH; i++) {
                tma_load(shared_address(to) + i * ROWS * PITCH, (maps ? maps : a.map) + which, i * (PITCH / BYTES),
                         (int)(row + (packed ? p.base : 0)), packed ? 0 : p.g, full, policy);
            }
        }
        return;
    }
#endif
    load_rows<BYTES, D, ROWS>(p, which, row, to, full);
}

/* Rows of q into shared memory, times the channel scales of an 8-bit context: by rows of a warp. Each such row is
   scaled by a power of two so that f16 holds it, whatever the scales are; factor[r]: what its logits then want.
   8-bit keys come as 4 adjacent elements a thread, so 16 elements of q lie in the order that mma pairs them with. */
template <class T, int D, int M, int WARPS>
DKV__DEVICE void load_queries(const Piece &p, char *to, float *factor, bool scaled, bool fp8) {
    constexpr int    N = D / 32, ROWS = M / WARPS, STEP = ROWS < 4 ? ROWS : 4; /* rows in flight together */
    const Attention &a = *p.a;
    const int        warp = threadIdx.x / 32, lane = threadIdx.x & 31, d = a.d_k;
    const float     *scale = a.k_scale + (int64_t)p.g * a.k_pitch, own = a.scale;
    const dkv_tensor t = a.q;
    const bool       direct = a.q_vector && t.type == Name<T>::type, inside = lane * N < d; /* 8 | d and N | 8 */
    float            w[N];
#pragma unroll
    for (int u = 0; u < N; u += 2) {
        float2 y = {1.0f, 1.0f};
        if (scaled) y = *(const float2 *)(scale + (inside ? lane * N : 0) + u);
        w[u] = scaled && fp8 ? y.x * 256.0f : y.x, w[u + 1] = scaled && fp8 ? y.y * 256.0f : y.y;
    }
    for (int k0 = 0; k0 < ROWS; k0 += STEP) {
        uint32_t raw[STEP][N / 2];
        float    x[STEP][N];
        if (direct) { /* without a condition, so that no load waits for another */
#pragma unroll
            for (int k = 0; k < STEP; k++) {
                const Row   row = row_of(p, warp * ROWS + k0 + k);
                const char *from = row.real && inside ? at(t, row.i, row.h) + lane * N * 2 : (const char *)p.a;
#pragma unroll
                for (int u = 0; u < N; u += 2) raw[k][u / 2] = ((const uint32_t *)from)[u / 2];
            }
        }
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            const Row   row = row_of(p, warp * ROWS + k0 + k);
            const char *from = at(t, row.i, row.h);
            const bool  real = row.real && inside;
#pragma unroll
            for (int u = 0; u < N; u++) {
                if (direct) x[k][u] = real ? (float)((const T *)&raw[k][u / 2])[u & 1] : 0.0f;
                else x[k][u] = real ? element_called(from + (lane * N + u) * t.stride_dim, t.type) : 0.0f;
            }
        }
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            const int r = warp * ROWS + k0 + k;
            float     peak = 0.0f;
            int       shift = 0; /* of the exponent: the largest element becomes 2^13 .. 2^14 */
#pragma unroll
            for (int u = 0; u < N; u++) {
                x[k][u] *= w[u];
                peak = fmaxf(peak, fabsf(x[k][u]));
            }
            if (scaled) {
                for (int i = 16; i; i >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, i));
                if (peak >= 1.17549435e-38f && peak < INFINITY)
                    shift = least(13 + 127 - (int)(__float_as_uint(peak) >> 23), 120);
            }
            if (lane == 0) factor[r] = own * __uint_as_float((uint32_t)(127 - shift) << 23);
            const float lift = __uint_as_float((uint32_t)(127 + shift) << 23);
#pragma unroll
            for (int u = 0; u < N; u += 2) {
                int j = lane * N + u, i = j & 15;
                if (scaled) j = (j & ~15) | (i & 2) * 4 | i / 4 * 2; /* d = 4t + e -> 2t + e, or 8 + 2t + e - 2 */
                *(uint32_t *)(to + tile_offset<128, M>(r, j / 8) + (j & 7) * 2) =
                    pair_of<T>(x[k][u] * lift, x[k][u + 1] * lift);
            }
        }
    }
}

/* Keys of a warp's share of a 16-bit tile: S. q: the 16 rows at row0 of shared memory. */
template <class T, int D, int M, int N, int PITCH>
DKV__DEVICE void scores16(float (&s)[N][4], const char *q, int row0, const char *k, int key) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
        uint32_t a[4], b[4];
        ldmatrix(a, shared_address(q) + tile_offset<128, M>(row0 + (lane & 15), 2 * c + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            int row = key + n * 8 + (lane & 7) + (lane >> 4) * 8;
            ldmatrix(b, shared_address(k) + tile_offset<PITCH, TILE>(row, 2 * c + (lane >> 3 & 1)));
            mma<T>(s[n], a, b[0], b[1]);
            mma<T>(s[n + 1], a, b[2], b[3]);
        }
    }
}

/* The same for 8 bits: one register of ldmatrix is 4 elements of a key, and a k step 16 elements = one chunk. */
template <int TYPE, int D, int M, int N, int PITCH, int KEYS>
DKV__DEVICE void scores8(float (&s)[N][4], const char *q, int row0, const char *k, int key) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < D / 16; c += 2) {
        uint32_t a[2][4], b[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ldmatrix(a[i], shared_address(q) + tile_offset<128, M>(row0 + (lane & 15), 2 * (c + i) + (lane >> 4)));
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            int row = key + n * 8 + (lane & 7) + (lane >> 4) * 8;
            ldmatrix(b, shared_address(k) + tile_offset<PITCH, KEYS>(row, c + (lane >> 3 & 1)));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                mma<__half>(s[n + i / 2], a[i & 1], bytes_pair<TYPE, 0, 1>(b[i]), bytes_pair<TYPE, 2, 3>(b[i]));
            }
        }
    }
}

/* P of 16 keys as the A operand. */
template <class T, int N> DKV__DEVICE void weights(uint32_t (&a)[4], const float (&s)[N][4], int n) {
    a[0] = pair_of<T>(s[n][0], s[n][1]);
    a[1] = pair_of<T>(s[n][2], s[n][3]);
    a[2] = pair_of<T>(s[n + 1][0], s[n + 1][1]);
    a[3] = pair_of<T>(s[n + 1][2], s[n + 1][3]);
}

/* Both, one or no half: of two keys, those below n. */
DKV__DEVICE uint32_t halves_below(int n) { return n >= 2 ? ~0u : n == 1 ? 0xffffu : 0u; }

/* O += P V for 16-bit V. Rows from `real` on may hold anything and count as zeros: 0 * NaN is NaN. */
template <class T, int D, int N, int PITCH>
DKV__DEVICE void mix16(float (&o)[D / 8][4], const float (&s)[N][4], const char *v, int key, int real) {
    const int lane = threadIdx.x & 31, t = (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t       a[4], b[4];
        const uint32_t low = halves_below(real - key - n * 8 - t), high = halves_below(real - key - n * 8 - 8 - t);
        weights<T>(a, s, n);
#pragma unroll
        for (int c = 0; c < D / 8; c += 2) {
            ldmatrix_t(b, shared_address(v) + tile_offset<PITCH, TILE>(key + n * 8 + (lane & 15), c + (lane >> 4)));
            mma<T>(o[c], a, b[0] & low, b[1] & high);
            mma<T>(o[c + 1], a, b[2] & low, b[3] & high);
        }
    }
}

/* 8-bit V: transposed in pairs, a register is elements (2n, 2n + 1) of two keys, so the even elements of a chunk are
   one product and the odd ones the next: O's columns are in pair order until they are put straight. */
template <int TYPE, int D, int N, int PITCH, int KEYS>
DKV__DEVICE void mix8(float (&o)[D / 8][4], const float (&s)[N][4], const char *v, int key) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t a[4], b[4];
        weights<__half>(a, s, n);
#pragma unroll
        for (int c = 0; c < D / 16; c += 2) {
            ldmatrix_t(b, shared_address(v) + tile_offset<PITCH, KEYS>(key + n * 8 + (lane & 15), c + (lane >> 4)));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma<__half>(o[2 * (c + i)], a, bytes_pair<TYPE, 0, 2>(b[2 * i]), bytes_pair<TYPE, 0, 2>(b[2 * i + 1]));
                mma<__half>(o[2 * (c + i) + 1], a, bytes_pair<TYPE, 1, 3>(b[2 * i]),
                            bytes_pair<TYPE, 1, 3>(b[2 * i + 1]));
            }
        }
    }
}

DKV__DEVICE const float *v_scale(const Piece &p) { return p.a->v_scale + (int64_t)p.g * p.a->v_pitch; }

/* Pair order -> straight order, times V's scales. In a chunk of 16 a thread has elements 4t .. 4t + 3, in straight
   order it gets 2t, 2t + 1 of either half. */
template <int D> DKV__DEVICE void straighten(float (&o)[D / 8][4], const float *scale, int d, float lift) {
    const int lane = threadIdx.x & 31, t = lane & 3, src = (lane & ~3) | t / 2;
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
        const float4 y = *(const float4 *)(scale + (16 * c < d ? 16 * c : 0) + 4 * t); /* beyond d, O is 0 */
#pragma unroll
        for (int i = 0; i < 4; i += 2) { /* rows */
            float x[4] = {o[2 * c][i] * y.x, o[2 * c + 1][i] * y.y, o[2 * c][i + 1] * y.z, o[2 * c + 1][i + 1] * y.w};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float a = __shfl_sync(~0u, x[0], src + 2 * half), b = __shfl_sync(~0u, x[1], src + 2 * half);
                float e = __shfl_sync(~0u, x[2], src + 2 * half), f = __shfl_sync(~0u, x[3], src + 2 * half);
                o[2 * c + half][i] = (t & 1 ? e : a) * lift;
                o[2 * c + half][i + 1] = (t & 1 ? f : b) * lift;
            }
        }
    }
}

template <int N> DKV__DEVICE void scale_rows(float (&o)[N][4], const float (&w)[2]) {
    if (__all_sync(~0u, w[0] == 1.0f && w[1] == 1.0f)) return;
#pragma unroll
    for (int n = 0; n < N; n++) {
        o[n][0] *= w[0], o[n][1] *= w[0];
        o[n][2] *= w[1], o[n][3] *= w[1];
    }
}

/* Rows of block m that are queries. */
template <int M> DKV__DEVICE int real_rows(const Piece &p) { return least(M, p.N_q * p.G - p.m * M); }

/* All warps' parts of a piece meet: into the output, or the piece's slot. Columns in passes: few rows take one.
   pairs: o is in pair order, and wants V's scales. */
template <int TYPE, int D, int RW>
DKV__DEVICE void finish_piece(const Piece &p, const Work &w, const float (&o)[D / 8][4], const float (&top)[2],
                              const float (&sum)[2], float *red, float *tops, float *sums, bool pairs) {
    typedef MmaShape<TYPE, D, RW> S;
    constexpr int                 M = S::M, TW = S::TW;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid & 31, t = lane & 3, r = lane / 4;
    const int real = real_rows<M>(p), bits = least(real <= 4 ? 7 : real <= 8 ? 6 : 5, D == 64 ? 6 : 7);
    const int wide = 1 << bits, pitch = wide + 8; /* columns of a pass */
    const int height = real <= 4 ? 4 : real <= 8 ? 8 : 16; /* rows of a warp */
    for (int i = 0; i < 2; i++) {
        float all = quad_sum(sum[i]);
        if (t == 0) tops[warp * 16 + r + 8 * i] = top[i], sums[warp * 16 + r + 8 * i] = all;
    }
    float           *slot = w.slots + (int64_t)p.slot * M * (D + 2);
    const dkv_tensor out = p.a->out;
    const bool       vector = p.a->out_vector;
    const int        d = p.a->d_v;
#pragma unroll 1
    for (int d0 = 0; d0 < D; d0 += wide) {
        if (d0 || S::RED_AT == 0) named_sync(1, S::THREADS); /* red, or Q there, is read no more */
        float *to = red + (warp * height + r) * pitch - d0;
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) { /* registers want constant indices */
            if (8 * n < d0 || 8 * n >= d0 + wide) continue;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (i ? height < 16 : r >= height) continue;
                float       *y = to + 8 * (i * pitch + n);
                const float2 a = {o[n][2 * i], o[n][2 * i + 1]}, b = {o[n + 1][2 * i], o[n + 1][2 * i + 1]};
                if (pairs) *(float4 *)(y + 4 * t) = float4{a.x, b.x, a.y, b.y};
                else *(float2 *)(y + 2 * t) = a, *(float2 *)(y + 8 + 2 * t) = b;
            }
        }
        float2 times = {1.0f, 1.0f}; /* a thread's columns are the same for all its rows: wide divides 2 THREADS */
        if (pairs) times = *(const float2 *)(v_scale(p) + least(d0 + (2 * tid & (wide - 1)), d - 2));
        if (pairs && TYPE == DKV_FP8) times.x *= 256.0f, times.y *= 256.0f;
        named_sync(1, S::THREADS);
#pragma unroll 1
        for (int i = tid; i < real * wide / 2; i += S::THREADS) {
            const int row = 2 * i >> bits, j = 2 * i & (wide - 1);
            float     x[2] = {0.0f, 0.0f}, all = -INFINITY, total = 0.0f;
#pragma unroll
            for (int k = 0; k < TW; k++) all = fmaxf(all, tops[row + 16 * RW * k]);
#pragma unroll
            for (int k = 0; k < TW; k++) {
                const float  own = tops[row + 16 * RW * k], weight = own == -INFINITY ? 1.0f : exp2_fast(own - all);
                const float2 y = *(float2 *)(red + ((row / 16 + RW * k) * height + row % 16) * pitch + j);
                x[0] += weight * y.x, x[1] += weight * y.y;
                total += weight * sums[row + 16 * RW * k];
            }
            x[0] *= times.x, x[1] *= times.y;
            if (p.whole) {
                const Row   q = row_of(p, row);
                const float weight = finish_row(*p.a, q, all, total, d0 + j == 0);
                x[0] *= weight, x[1] *= weight;
                store_out<2>(out, vector, d, q, d0 + j, x);
            } else {
                *(float2 *)(slot + row * D + d0 + j) = float2{x[0], x[1]};
                if (d0 + j == 0) slot[M * D + row] = all, slot[M * (D + 1) + row] = total;
            }
        }
    }
}

/* The CTA that finds itself the last of an item's pieces merges them all, in order; by all consumer warps. */
template <class S, int D> DKV__DEVICE void combine_last(const Piece &p, const Work &w, int *flag) {
    const Target to = target_of(*p.a);
    named_sync(1, S::THREADS);
    if (threadIdx.x == 0) {
        int before; /* releases all the warps' writes before the barrier */
        asm volatile("atom.release.gpu.global.add.s32 %0, [%1], 1;"
                     : "=r"(before) : "l"(w.arrived + p.item) : "memory");
        *flag = before == p.all.count - 1;
        if (*flag) asm volatile("fence.acq_rel.gpu;" ::: "memory"); /* which empties L1 */
        if (*flag) w.arrived[p.item] = 0;
    }
    const Pieces all = p.all; /* meanwhile */
    const int    first = piece_slot(all, all.first + (threadIdx.x & 31)), some = piece_slot(all, all.last);
    named_sync(1, S::THREADS);
    if (!*flag) return;
    constexpr int PARTS = D / 64;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < real_rows<S::M>(p) * PARTS; i += S::WARPS) {
        const int r = i / PARTS;
        combine_row<S::M, D, 2>(to, row_of(p, r), r, i % PARTS * 64, all, first, some, w.slots);
    }
}

template <int TYPE, int D, int RW>
__global__ void __launch_bounds__(MmaShape<TYPE, D, RW>::THREADS + 32, 1) attend_mma(const __grid_constant__ Work w) {
    typedef MmaShape<TYPE, D, RW>      S;
    typedef typename Compute<TYPE>::T  T;
    constexpr int                      M = S::M;
    constexpr bool                     EIGHT = S::BYTES == 1;
    extern __shared__ __align__(1024) char shared[];
    char     *ring = shared, *q = ring + w.stages * S::STAGE;
    float    *red = (float *)(q + S::RED_AT), *tops = (float *)(q + most(S::Q, S::RED_AT + S::RED));
    float    *sums = tops + 128, *weight = sums + 128;
    uint64_t *full = (uint64_t *)(weight + 128), *empty = full + S::MOST_STAGES;
    uint64_t *piece_full = empty + S::MOST_STAGES, *piece_empty = piece_full + 2;
    int      *flag = (int *)(piece_empty + 2);
    Piece    *pieces = (Piece *)(full + 32); /* what to do comes from the producer; no attention: the end */
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    if (warp == S::WARPS) {
        if (lane < w.stages) bar_init(full + lane, w.tma ? 1 : 32), bar_init(empty + lane, S::WARPS);
        if (lane < 2) bar_init(piece_full + lane, 1), bar_init(piece_empty + lane, S::WARPS);
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    let_next_start();
    Ring<2>  turn;
    int      stage = 0;
    uint32_t phase = 0;

    if (warp == S::WARPS) { /* the producer */
        uint64_t           policy = 0;
        const Attention   *known = w.attentions; /* whose tensor maps may be used */
        const CUtensorMap *maps = w.single ? w.map : w.attentions->map;
#if __CUDA_ARCH__ >= 900
        policy = w.blocks == 1 ? policy_evict_first() : policy_evict_normal();
        if (w.tma && !w.single && lane < SOURCES) tma_acquire(&maps[lane]);
        __syncwarp();
#endif
        touch(w.attentions, w.items, w.lengths, lane); /* after the fence, which empties L1 */
        Walk  walk = walk_begin(w);
        Piece p;
        for (;; turn.next()) {
            if (!walk_next<M>(walk, p, w)) p.a = NULL;
            else if (!p.whole && p.tile >= p.end) complete(p, walk, w);
            bar_wait(piece_empty + turn.stage, turn.phase ^ 1);
            if (lane == 0) {
                pieces[turn.stage] = p;
                bar_arrive(piece_full + turn.stage);
            }
            if (!p.a) return;
#if __CUDA_ARCH__ >= 900
            if (w.tma && p.a != known) {
                known = p.a, maps = p.a->map;
                if (lane < SOURCES) tma_acquire(&maps[lane]);
                __syncwarp();
            }
#endif
            const int full_ring = least(2 * p.tile + w.stages, 2 * p.end) - 1;
#pragma unroll 1
            for (int i = 2 * p.tile; i < 2 * p.end; i++) {
                const int tile = i / 2, v = i & 1;
                if (i == full_ring && !p.whole) { /* seen by all with the tile that follows */
                    complete(p, walk, w);
                    if (lane == 0) pieces[turn.stage].all = p.all;
                    __syncwarp();
                }
                bar_wait(empty + stage, phase ^ 1);
                char *to = ring + stage * S::STAGE;
                if (tile < p.context) {
                    load_tile<S::BYTES, D, S::KEYS>(p, CONTEXT_K + v, (int64_t)tile * S::KEYS, to, full + stage, w.tma,
                                                    policy, maps);
                } else {
                    load_tile<2, D, TILE>(p, TAIL_K + v, (int64_t)(tile - p.context) * TILE, to, full + stage, w.tma,
                                          policy, maps);
                }
                if (++stage == w.stages) stage = 0, phase ^= 1;
            }
        }
    }

    const int rw = warp % RW, tw = warp / RW, r = lane / 4;
    auto release = [&](int i) {
        __syncwarp();
        if (lane == 0) bar_arrive(empty + i);
    };
    for (;; turn.next()) {
        const Piece &p = pieces[turn.stage];
        bar_wait(piece_full + turn.stage, turn.phase);
        if (!p.a) return;
        float         top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, o[D / 8][4] = {}, factor[2];
        const float   softcap = p.a->softcap;
        const int64_t visible[2] = {row_sees(p, 16 * rw + r), row_sees(p, 16 * rw + r + 8)};
        for (int tile = p.tile; tile < p.end; tile++) {
            const bool tail = tile >= p.context;
            if (tile == p.tile || tile == p.context) { /* a segment begins */
                bool scaled = EIGHT && !tail;
                if (EIGHT && tail && tile != p.tile) {
                    straighten<D>(o, v_scale(p), p.a->d_v, TYPE == DKV_FP8 ? 256.0f : 1.0f);
                }
                if (tile == p.tile || EIGHT) {
                    named_sync(1, S::THREADS); /* q and weight are read no more */
                    load_queries<T, D, M, S::WARPS>(p, q, weight, scaled, TYPE == DKV_FP8);
                    named_sync(1, S::THREADS);
                    factor[0] = weight[16 * rw + r];
                    factor[1] = weight[16 * rw + r + 8];
                }
            }
            const char    *k = ring + stage * S::STAGE;
            const int      next = stage + 1 == w.stages ? 0 : stage + 1; /* V's stage */
            const uint32_t next_phase = phase ^ (next == 0);
            float          alpha[2];
            if (EIGHT && !tail) {
                constexpr int N = S::KEYS / S::TW / 8, STEP = N < 4 ? N : 4; /* keys in eights; of a step */
                bar_wait(full + stage, phase);
                const int     first = tw * (S::KEYS / S::TW);
                const int64_t row = (int64_t)tile * S::KEYS;
                const int     sees[2] = {in_tile(p.rows, row), in_tile(p.rows, row)};
                for (int n = 0; n < N; n += STEP) {
                    float s[STEP][4] = {};
                    scores8<TYPE, D, M, STEP, S::PITCH, S::KEYS>(s, q, 16 * rw, k, first + 8 * n);
                    if (n + STEP == N) release(stage);
                    softmax_tile<STEP>(s, top, sum, alpha, factor, softcap, sees, first + 8 * n);
                    scale_rows(o, alpha);
                    if (n == 0) bar_wait(full + next, next_phase);
                    mix8<TYPE, D, STEP, S::PITCH, S::KEYS>(o, s, ring + next * S::STAGE, first + 8 * n);
                }
            } else {
                constexpr int N = TILE / S::TW / 8, STEP = N < 8 ? N : 8;
                bar_wait(full + stage, phase);
                const int     first = tw * (TILE / S::TW);
                const int64_t row = (int64_t)(tail ? tile - p.context : tile) * TILE;
                const int     sees[2] = {in_tile(tail ? visible[0] : p.rows, row),
                                         in_tile(tail ? visible[1] : p.rows, row)};
                const int     real = in_tile(tail ? p.length : p.rows, row);
                for (int n = 0; n < N; n += STEP) {
                    float s[STEP][4] = {};
                    scores16<T, D, M, STEP, 128>(s, q, 16 * rw, k, first + 8 * n);
                    if (n + STEP == N) release(stage);
                    softmax_tile<STEP>(s, top, sum, alpha, factor, softcap, sees, first + 8 * n);
                    scale_rows(o, alpha);
                    if (n == 0) bar_wait(full + next, next_phase);
                    mix16<T, D, STEP, 128>(o, s, ring + next * S::STAGE, first + 8 * n, real);
                }
            }
            release(next);
            stage = next + 1 == w.stages ? 0 : next + 1;
            phase = next_phase ^ (stage == 0);
        }
        const bool pairs = EIGHT && p.tile < p.end && p.end <= p.context; /* no tail has put O straight */
        if (p.tile >= p.end) named_sync(1, S::THREADS); /* what the piece before left is read no more */
        finish_piece<TYPE, D, RW>(p, w, o, top, sum, red, tops, sums, pairs);
        if (!p.whole && w.arrived) combine_last<S, D>(p, w, flag);
        __syncwarp();
        if (lane == 0) bar_arrive(piece_empty + turn.stage);
    }
}

/* ---- attention by wgmma: many rows (query prefill, dense prefill, training) on sm_90 -----------------------------

   math    S = Q K^T with Q and K in shared memory, O += P V with P in registers, f32 accumulators
   shapes  64 query rows a warpgroup, D 128: 2 warpgroups, D 64: 3; tiles of 128 keys; Q double buffered
   CTA     warpgroup 0: one warp loads K and V by TMA into two rings, three gather the rows of the next Q; the others
           compute: S of tile i and P V of tile i - 1 are in flight together, the softmax of one warpgroup runs under
           the products of the other, in turns
   why     wgmma reaches twice the rate of mma.sync; rows are (query, head), so any G fills the tile
   limits  16-bit keys, D 64 and 128, sources that TMA takes                                                       */

#define DKV__REGS64 "{" \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
    "}"
#define DKV__REGS32 "{" \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
    "}"
#define DKV__F4(x, n)  "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])
#define DKV__F16(x, n) DKV__F4(x, n), DKV__F4(x, n + 1), DKV__F4(x, n + 2), DKV__F4(x, n + 3)
#define DKV__F32(x)    DKV__F16(x, 0), DKV__F16(x, 4)
#define DKV__F64(x)    DKV__F32(x), DKV__F16(x, 8), DKV__F16(x, 12)

#if __CUDA_ARCH_FEAT_SM90_ALL
DKV__DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DKV__DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DKV__DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from reading accumulators before the wait above it. */
template <int N> DKV__DEVICE void settle(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : DKV__F4(x, n)::"memory");
}

/* Matrix descriptors, 128-byte swizzle: rows of 128 bytes in groups of 8. K-major operands advance 32 bytes a k step
   within a panel; V lies with its N dimension adjacent, panels `lead` bytes apart. */
DKV__DEVICE uint64_t descriptor(uint32_t address, uint32_t lead) {
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(lead >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}
/* Bytes further on: one addition, where a descriptor made anew takes ten instructions that its product waits for. */
DKV__DEVICE uint64_t further(uint64_t x, int bytes) {
    return (x & ~0xffffffffull) | (uint32_t)((uint32_t)x + (uint32_t)(bytes >> 4));
}

/* S (+)= Q K^T, one k step: [64][16] x [128][16]. */
template <class T> DKV__DEVICE void wgmma_scores(float (&s)[16][4], uint64_t q, uint64_t k, int add);
/* O (+)= P V, one k step: [64][16] x [16][D]. */
template <class T> DKV__DEVICE void wgmma_mix(float (&o)[16][4], const uint32_t (&p)[4], uint64_t v, int add);
template <class T> DKV__DEVICE void wgmma_mix(float (&o)[8][4], const uint32_t (&p)[4], uint64_t v, int add);

#define DKV__WGMMA(T, name) \
    template <> DKV__DEVICE void wgmma_scores<T>(float(&s)[16][4], uint64_t q, uint64_t k, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." name \
                     "." name " " DKV__REGS64 ", %64, %65, p, 1, 1, 0, 0; }" \
                     : DKV__F64(s) \
                     : "l"(q), "l"(k), "r"(add)); \
    } \
    template <> DKV__DEVICE void wgmma_mix<T>(float(&o)[16][4], const uint32_t(&p)[4], uint64_t v, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." name \
                     "." name " " DKV__REGS64 ", {%64, %65, %66, %67}, %68, p, 1, 1, 1; }" \
                     : DKV__F64(o) \
                     : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v), "r"(add)); \
    } \
    template <> DKV__DEVICE void wgmma_mix<T>(float(&o)[8][4], const uint32_t(&p)[4], uint64_t v, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." name \
                     "." name " " DKV__REGS32 ", {%32, %33, %34, %35}, %36, p, 1, 1, 1; }" \
                     : DKV__F32(o) \
                     : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v), "r"(add)); \
    }
DKV__WGMMA(__nv_bfloat16, "bf16")
DKV__WGMMA(__half, "f16")
#endif

template <int D> struct WgmmaShape {
    static constexpr int GROUPS = D == 64 ? 3 : 2, M = 64 * GROUPS;
    static constexpr int K_STAGES = D == 64 ? 4 : 3, V_STAGES = D == 64 ? 4 : 2;
    static constexpr int THREADS = 128 * (GROUPS + 1), STAGE = TILE * D * 2, Q = M * D * 2;
    static constexpr int RINGS = (K_STAGES + V_STAGES) * STAGE + 2 * Q, SHARED = RINGS + 256 + 2 * (int)sizeof(Piece);
};

/* Rows r and r + 8 of a thread, as wgmma and mma leave them, to a slot: [M][D]. */
template <int D> DKV__DEVICE void store_part(float *slot, int r, const float (&o)[D / 8][4]) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        *(float2 *)(slot + r * D + 8 * n + 2 * t) = float2{o[n][0], o[n][1]};
        *(float2 *)(slot + (r + 8) * D + 8 * n + 2 * t) = float2{o[n][2], o[n][3]};
    }
}

#if __CUDA_ARCH_FEAT_SM90_ALL
/* Q's rows of a piece into shared memory, by 96 threads. */
template <class T, int D, int M> DKV__DEVICE void gather_queries(const Piece &p, char *to, int tid) {
    const Attention &a = *p.a;
    const dkv_tensor t = a.q;
    const int        c = tid % (D / 8), d = a.d_k; /* 96 is a multiple of the chunks of a row */
    const bool       direct = a.q_vector && t.type == Name<T>::type;
#pragma unroll 1 /* registers */
    for (int r = tid / (D / 8); r < M; r += 96 / (D / 8)) {
        Row         row = row_of(p, r);
        bool        real = row.real && c * 8 < d;
        const char *from = real ? at(t, row.i, row.h) + c * 8 * t.stride_dim : (const char *)t.data;
        uint32_t    dst = tile_offset<128, M>(r, c);
        if (direct) {
            copy16(shared_address(to) + dst, from, real);
        } else {
            float x[8];
            for (int u = 0; u < 8; u++) x[u] = real ? element(from + u * t.stride_dim, t.type) : 0.0f;
            *(uint4 *)(to + dst) =
                uint4{pair_of<T>(x[0], x[1]), pair_of<T>(x[2], x[3]), pair_of<T>(x[4], x[5]), pair_of<T>(x[6], x[7])};
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_async();
}

/* K and V of a piece into their rings: K of a tile before V of the tile before, as they are used. By one thread. */
template <int D>
DKV__DEVICE void load_keys(const Piece &p, char *ks, char *vs, Ring<WgmmaShape<D>::K_STAGES> &k,
                           Ring<WgmmaShape<D>::V_STAGES> &v, uint64_t *k_full, uint64_t *k_empty, uint64_t *v_full,
                           uint64_t *v_empty) {
    constexpr int  STAGE = TILE * D * 2;
    const uint64_t policy = policy_evict_normal();
    const int      end = p.end, context = p.context;
    auto load = [&](int tile, int v, char *to, uint64_t *full) {
        const bool    tail = tile >= context;
        const int64_t row = (int64_t)(tail ? tile - context : tile) * TILE;
        load_tile<2, D, TILE>(p, (tail ? TAIL_K : CONTEXT_K) + v, row, to, full, true, policy);
    };
    for (int tile = p.tile; tile <= end && p.tile < end; tile++) {
        if (tile < end) {
            bar_wait(k_empty + k.stage, k.phase ^ 1);
            load(tile, 0, ks + k.stage * STAGE, k_full + k.stage);
            k.next();
        }
        if (tile == p.tile) continue;
        bar_wait(v_empty + v.stage, v.phase ^ 1);
        load(tile - 1, 1, vs + v.stage * STAGE, v_full + v.stage);
        v.next();
    }
}

/* What follows the last key of a tile may be anything: zeros, since 0 * NaN is NaN. By THREADS, who then meet. */
template <int D, int ROWS, int THREADS> DKV__DEVICE void clear_rows(char *tile, int from, int tid, int barrier) {
    for (int i = tid; i < (ROWS - from) * (D / 8); i += THREADS) {
        *(uint4 *)(tile + tile_offset<128, ROWS>(from + i / (D / 8), i % (D / 8))) = uint4{0, 0, 0, 0};
    }
    fence_async();
    named_sync(barrier, THREADS);
}
/* Shared memory: rings of K and V tiles, two blocks of Q, their barriers. */
template <int D> struct WgmmaPlaces {
    typedef WgmmaShape<D> S;
    char     *ks, *vs, *qs;
    uint64_t *k_full, *k_empty, *v_full, *v_empty, *more; /* more: barriers of Q */
    DKV__DEVICE WgmmaPlaces() {
        extern __shared__ __align__(1024) char shared[];
        ks = shared, vs = ks + S::K_STAGES * S::STAGE, qs = vs + S::V_STAGES * S::STAGE;
        k_full = (uint64_t *)(qs + 2 * S::Q), k_empty = k_full + S::K_STAGES, v_full = k_empty + S::K_STAGES;
        v_empty = v_full + S::V_STAGES, more = v_empty + S::V_STAGES;
    }
};

/* O = softmax(S) V of a warpgroup's 64 rows of Q, over tiles begin .. end - 1, the next of the rings: S of tile i and
   P V of tile i - 1 are in flight together, and the softmax of one warpgroup runs under the products of the other, in
   turns. look(i): tile i has come; soften(i): s becomes weights, sum and alpha follow; between(v), last(v): before a V
   is used, and before the last one is. tid and own, thread and warpgroup among those that compute, come as arguments:
   found here again they cost registers that are not there. */
template <class T, int D, class Look, class Soften, class Between, class Last>
DKV__DEVICE void attend_keys(float (&o)[D / 8][4], float (&s)[16][4], float (&sum)[2], float (&alpha)[2], uint32_t q_at,
                             Ring<WgmmaShape<D>::K_STAGES> &k, Ring<WgmmaShape<D>::V_STAGES> &v, int begin, int end,
                             int tid, int own, Look look, Soften soften, Between between, Last last) {
    typedef WgmmaShape<D> S;
    const WgmmaPlaces<D>  x;
    uint32_t              weight[8][4];
    auto scores = [&] {
        const uint64_t to = descriptor(q_at, 1), from = descriptor(shared_address(x.ks + k.stage * S::STAGE), 1);
#pragma unroll
        for (int c = 0; c < D / 16; c++)
            wgmma_scores<T>(s, further(to, c / 4 * S::M * 128 + c % 4 * 32),
                            further(from, c / 4 * TILE * 128 + c % 4 * 32), c > 0);
        wgmma_commit();
    };
    auto mix = [&](int add) {
        const uint64_t from = descriptor(shared_address(x.vs + v.stage * S::STAGE), TILE * 128);
#pragma unroll
        for (int j = 0; j < 8; j++) wgmma_mix<T>(o, weight[j], further(from, j * 16 * 128), add | j);
        wgmma_commit();
    };
    auto weigh = [&] {
#pragma unroll
        for (int j = 0; j < 8; j++) weights<T>(weight[j], s, 2 * j);
    };
    if (begin < end) {
        bar_wait(x.k_full + k.stage, k.phase);
        look(begin);
        wgmma_fence();
        scores();
        wgmma_wait<0>();
        settle(s);
        if (tid % 128 == 0) bar_arrive(x.k_empty + k.stage);
        k.next();
        soften(begin);
        weigh();
        for (int i = begin + 1; i < end; i++) {
            bar_wait(x.k_full + k.stage, k.phase);
            look(i);
            between(x.vs + v.stage * S::STAGE);
            named_sync(1 + own, 256); /* my turn */
            wgmma_fence();
            scores();
            bar_wait(x.v_full + v.stage, v.phase);
            mix(i > begin + 1);
            named_arrive(1 + (own + 1) % S::GROUPS, 256);
            wgmma_wait<1>();
            settle(s);
            if (tid % 128 == 0) bar_arrive(x.k_empty + k.stage);
            k.next();
            soften(i);
            if (sum[0] + sum[1] < 0.0f)
                __trap(); /* never: it keeps ptxas from sinking the exponentials below the wait */
            wgmma_wait<0>();
            settle(o);
            if (tid % 128 == 0) bar_arrive(x.v_empty + v.stage);
            v.next();
            scale_rows(o, alpha);
            weigh();
        }
        bar_wait(x.v_full + v.stage, v.phase);
        last(x.vs + v.stage * S::STAGE);
        wgmma_fence();
        mix(end - begin > 1);
        wgmma_wait<0>();
        settle(o);
        if (tid % 128 == 0) bar_arrive(x.v_empty + v.stage);
        v.next();
    } else {
#pragma unroll
        for (int j = 0; j < D / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.0f;
    }
}
#endif

template <class T, int D>
__global__ void __launch_bounds__(WgmmaShape<D>::THREADS, 1) attend_wgmma(const __grid_constant__ Work w) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    typedef WgmmaShape<D> S;
    constexpr int         M = S::M, GROUPS = S::GROUPS, CONSUMING = 128 * GROUPS;
    extern __shared__ __align__(1024) char shared[]; /* as WgmmaPlaces, with which ptxas orders the softmax otherwise */
    char     *ks = shared, *vs = ks + S::K_STAGES * S::STAGE, *qs = vs + S::V_STAGES * S::STAGE;
    uint64_t *k_full = (uint64_t *)(qs + 2 * S::Q), *k_empty = k_full + S::K_STAGES, *v_full = k_empty + S::K_STAGES,
             *v_empty = v_full + S::V_STAGES, *q_full = v_empty + S::V_STAGES, *q_empty = q_full + 2,
             *piece_full = q_empty + 2;
    Piece    *pieces = (Piece *)(k_full + 32); /* a piece comes with its queries; none: the end */
    const int group = threadIdx.x / 128, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::K_STAGES; i++) bar_init(k_full + i, 1), bar_init(k_empty + i, GROUPS);
        for (int i = 0; i < S::V_STAGES; i++) bar_init(v_full + i, 1), bar_init(v_empty + i, GROUPS);
        for (int i = 0; i < 2; i++)
            bar_init(q_full + i, 96), bar_init(q_empty + i, GROUPS), bar_init(piece_full + i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::GROUPS == 3 ? 32 : 88));
        const int         warp = threadIdx.x / 32;
        Ring<S::K_STAGES> k;
        Ring<S::V_STAGES> v;
        Ring<2>           q;
        Walk         walk;
        const Attention *known = NULL; /* whose tensor maps may be used */
        if (warp == 1) {
            touch(w.attentions, w.items, w.lengths, lane);
            walk = walk_begin(w);
        }
        for (;; q.next()) {
            if (warp == 1) { /* says what is next */
                Piece next;
                if (!walk_next<M>(walk, next, w)) next.a = NULL;
                bar_wait_idle(q_empty + q.stage, q.phase ^ 1);
                if (lane == 0) {
                    pieces[q.stage] = next;
                    bar_arrive(piece_full + q.stage);
                }
            }
            bar_wait_idle(piece_full + q.stage, q.phase);
            const Piece &p = pieces[q.stage];
            if (warp == 0) {
                if (!p.a) break;
                if (p.a != known && lane < SOURCES) tma_acquire(&p.a->map[lane]);
                known = p.a;
                __syncwarp();
                if (lane == 0) load_keys<D>(p, ks, vs, k, v, k_full, k_empty, v_full, v_empty);
                __syncwarp();
            } else {
                if (p.a) gather_queries<T, D, M>(p, qs + q.stage * S::Q, threadIdx.x - 32);
                bar_arrive(q_full + q.stage);
                if (!p.a) break;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::GROUPS == 3 ? 160 : 208));
        const int own = group - 1, tid = threadIdx.x - 128, warp = tid / 32 % 4, r = own * 64 + warp * 16 + lane / 4;
        Ring<S::K_STAGES> k;
        Ring<S::V_STAGES> v;
        Ring<2>      q;
        if (own == GROUPS - 1) named_arrive(1, 256); /* the first group may begin */
        for (;;) {
            const Piece &p = pieces[q.stage];
            bar_wait(q_full + q.stage, q.phase);
            if (!p.a) break;
            float     s[16][4], o[D / 8][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, alpha[2];
            const float    factor[2] = {p.a->scale, p.a->scale}, softcap = p.a->softcap;
            const int      visible[2] = {(int)row_sees(p, r), (int)row_sees(p, r + 8)}, rows = (int)p.rows;
            const int      begin = p.tile, end = p.end, context = p.context;
            const uint32_t q_at = shared_address(qs + q.stage * S::Q) + own * 64 * 128;

            auto soften = [&](int tile) {
                const bool tail = tile >= context;
                const int  row = (tail ? tile - context : tile) * TILE;
                const int  sees[2] = {(tail ? visible[0] : rows) - row, (tail ? visible[1] : rows) - row};
                softmax_tile<16>(s, top, sum, alpha, factor, softcap, sees, 0);
            };
            auto last_values = [&](char *v_tile) {
                const int64_t left = p.length - (int64_t)(end - 1 - context) * TILE;
                if (end > context && left < TILE) clear_rows<D, TILE, CONSUMING>(v_tile, (int)left, tid, 8);
            };
            attend_keys<T, D>(o, s, sum, alpha, q_at, k, v, begin, end, tid, own, [](int) {}, soften, [](char *) {},
                              last_values);

            /* out, or to the slot */
            const int t = lane & 3;
            float     last[2];
            for (int i = 0; i < 2; i++) {
                Row row = row_of(p, r + 8 * i);
                sum[i] = quad_sum(sum[i]);
                if (p.whole && row.real && t == 0) last[i] = finish_row(*p.a, row, top[i], sum[i]);
                last[i] = __shfl_sync(~0u, last[i], lane & ~3);
            }
            if (!p.whole) {
                float *slot = w.slots + (int64_t)p.slot * M * (D + 2);
                store_part<D>(slot, r, o);
                for (int i = 0; i < 2 && t == 0; i++) {
                    slot[M * D + r + 8 * i] = top[i], slot[M * (D + 1) + r + 8 * i] = sum[i];
                }
            } else if (p.a->out_vector && p.a->out.type == Name<T>::type) {
                char *mine = qs + q.stage * S::Q; /* Q's rows of this warp, read no more, take its output */
                named_sync(4 + own, 128);
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    *(uint32_t *)(mine + tile_offset<128, M>(r, n) + 4 * t) =
                        pair_of<T>(o[n][0] * last[0], o[n][1] * last[0]);
                    *(uint32_t *)(mine + tile_offset<128, M>(r + 8, n) + 4 * t) =
                        pair_of<T>(o[n][2] * last[1], o[n][3] * last[1]);
                }
                __syncwarp();
                const dkv_tensor out = p.a->out;
                const int        c = lane % (D / 8), d = p.a->d_v;
#pragma unroll
                for (int i = 0; i < D / 16; i++) {
                    int row = own * 64 + warp * 16 + i * (256 / D) + lane / (D / 8);
                    Row to = row_of(p, row);
                    if (to.real && c * 8 < d) {
                        *(uint4 *)(at(out, to.i, to.h) + c * 16) = *(const uint4 *)(mine + tile_offset<128, M>(row, c));
                    }
                }
            } else {
                const dkv_tensor out = p.a->out;
                const bool       vector = p.a->out_vector;
                const int        d = p.a->d_v;
                const Row        row[2] = {row_of(p, r), row_of(p, r + 8)};
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float x[2] = {o[n][2 * i] * last[i], o[n][2 * i + 1] * last[i]};
                        store_out<2>(out, vector, d, row[i], 8 * n + 2 * t, x);
                    }
                }
            }
            named_sync(4 + own, 128);
            if (tid % 128 == 0) bar_arrive(q_empty + q.stage);
            q.next();
        }
    }
#else
    __trap(); /* compiled for sm_90 without the a: better an error than no output */
#endif
}

/* Slots into outputs when the pieces are large: a row a warp; grid: (rows of a block / 8, items, blocks). */
template <int M, int D> __global__ void __launch_bounds__(256) combine(const __grid_constant__ Work w, int ctas) {
    let_next_start();
    const int    item = blockIdx.y, r = blockIdx.x * 8 + threadIdx.x / 32;
    const Item  &x = w.items[item];
    int          units, unit = units_before(w, item, &units);
    const Pieces q = pieces_of(unit, item_units(w, x), units, ctas / w.blocks, w.blocks, blockIdx.z, START);
    if (q.count == 1) return;
    const int R = (int)blockIdx.z * M + r, i = R / x.G;
    const Row row = {i, x.g * x.G + R - i * x.G, i < x.N_q};
    if (row.real) combine_row<M, D>(w.attentions[x.a], row, r, q, w.slots);
}

/* ---- preparing a batch: checks, tensor maps, the block ---- */

enum { MMA16, MMA32, MMA_MANY, WGMMA };

struct Batch { /* what all attentions of a batch have in common */
    dkv_type type;           /* of the context; the tail's where there is none */
    int      kernel, d, M;   /* kernel, head dimension class, rows of a block */
    int      tma;
    int64_t  heads, items;   /* KV heads and row blocks, over all */
    int64_t  blocks;         /* row blocks of a KV head if all have as many, else 0 */
    int64_t  rows;           /* query rows of a KV head, at most */
    int64_t  queries;        /* of all */
};

bool is_empty(const dkv_segment &s) { return !s.packed && s.n == 0; }

/* Coordinates of TMA are 32 bits; its strides are not negative. */
bool takes_tma(const dkv_segment &s) {
    const int64_t most_rows = INT32_MAX - 2 * TILE;
    if (s.packed) return layout_of(s.packed->type, s.packed->Hkv, 8, 8, s.packed->rows).rows <= most_rows;
    return !s.n || (is_forward(s.k) && is_forward(s.v) && s.n <= most_rows);
}

dkv_result check_attention(Batch *b, const dkv_attention &a) {
    const float huge = 3.0e38f;
    if (a.H < 1 || a.Hkv < 1 || a.H > 4096 || a.H % a.Hkv || a.N_q < 0 || a.N_q > (1 << 24)) return DKV_ERR_SHAPE;
    if (!head_dim_ok(a.d_k) || !head_dim_ok(a.d_v)) return DKV_ERR_SHAPE;
    if (!(a.scale >= 0.0f && a.scale <= huge) || !(a.softcap >= 0.0f && a.softcap <= huge)) return DKV_ERR_FIELD;
    if (a.q.type > DKV_BF16 || a.out.type > DKV_BF16) return DKV_ERR_TYPE;
    if (a.tail.packed || a.tail.rows || (!a.context.packed && a.context.rows)) return DKV_ERR_TYPE;
    if (a.context.packed && !a.context.packed->data) return DKV_ERR_STATE; /* a layer that was not packed yet */
    if (a.tail.n < 0 || a.tail.n > FAR) return DKV_ERR_SHAPE;
    if (!a.context.packed && (a.context.n < 0 || a.context.n > FAR)) return DKV_ERR_SHAPE;
    if (!is_whole(a.q) || !is_whole(a.out)) return DKV_ERR_ALIGN;
    const bool none = is_empty(a.context) && is_empty(a.tail);
    dkv_type type = a.context.packed ? a.context.packed->type : !is_empty(a.context) ? a.context.k.type : a.tail.k.type;
    if (none) type = b->type == DKV_F32 ? DKV_BF16 : b->type;
    dkv_type tail = type_bytes(type) == 1 ? DKV_F16 : type;
    if (!packable(type) || (b->type != DKV_F32 && b->type != type)) return DKV_ERR_TYPE;
    if (!a.context.packed && !is_empty(a.context) &&
        (type_bytes(type) != 2 || a.context.k.type != type || a.context.v.type != type)) return DKV_ERR_TYPE;
    if (!is_empty(a.tail) && (a.tail.k.type != tail || a.tail.v.type != tail)) return DKV_ERR_TYPE;
    if (a.context.packed) {
        const dkv_packed &p = *a.context.packed;
        if (p.Hkv != a.Hkv || p.d_k != a.d_k || p.d_v != a.d_v) return DKV_ERR_SHAPE;
        if ((uintptr_t)p.data % 128) return DKV_ERR_ALIGN;
        for (int g = 0; g < p.Hkv; g++) {
            if (p.rows[g] < 0 || p.rows[g] > FAR) return DKV_ERR_SHAPE;
        }
    }
    if ((int64_t)(a.H / a.Hkv) * a.N_q > 1 << 30) return DKV_ERR_SHAPE;
    if (!is_whole(a.context) || !is_whole(a.tail)) return DKV_ERR_ALIGN;
    if (!none) b->type = type; /* no key: of any type */
    int d = most(a.d_k, a.d_v);
    b->d = most(b->d, d <= 64 ? 64 : d <= 128 ? 128 : 256);
    b->heads += a.Hkv;
    b->rows = most(b->rows, a.H / a.Hkv * a.N_q);
    b->queries += a.N_q;
    b->tma &= takes_tma(a.context) && takes_tma(a.tail);
    return b->queries > INT32_MAX ? DKV_ERR_SHAPE : DKV_OK;
}

/* Shared memory without which attend_mma does not start; the same for all types. */
template <int D, int RW> constexpr int least_shared() {
    typedef MmaShape<DKV_BF16, D, RW> S;
    return S::FIXED + 2 * S::STAGE;
}
int least_shared(int kernel, int d) {
    if (d == 64 || kernel == WGMMA) return 0; /* every device has that */
    if (kernel == MMA16) return d == 128 ? least_shared<128, 1>() : least_shared<256, 1>();
    if (kernel == MMA32) return d == 128 ? least_shared<128, 2>() : least_shared<256, 2>();
    return d == 128 ? least_shared<128, 8>() : least_shared<256, 4>();
}

dkv_result batch_read(Batch *b, const dkv_attention *a, int64_t n, const Device &dev) {
    *b = Batch{DKV_F32, 0, 64, 0, dev.sm90, 0, 0, 0, 0, 0};
    for (int64_t i = 0; i < n; i++) {
        dkv_result r = check_attention(b, a[i]);
        if (r) return r;
    }
    b->kernel = b->rows <= 16 ? MMA16 : b->rows <= 32 ? MMA32 : MMA_MANY;
    if (b->kernel == MMA_MANY && dev.wgmma && b->tma && b->d <= 128 && type_bytes(b->type) == 2) b->kernel = WGMMA;
    if (least_shared(b->kernel, b->d) > dev.shared) return DKV_ERR_DEVICE;
    b->M = b->kernel == MMA16                 ? 16
           : b->kernel == MMA32               ? 32
           : b->d == 256                      ? 64
           : b->kernel == WGMMA && b->d == 64 ? 192
                                              : 128;
    for (int64_t i = 0; i < n; i++) {
        int64_t blocks = ceil_div(a[i].H / a[i].Hkv * a[i].N_q, b->M);
        b->items += blocks * a[i].Hkv;
        b->blocks = i == 0 || b->blocks == blocks ? blocks : 0;
    }
    if (b->items > 1 << 28) return DKV_ERR_SHAPE;
    if (b->type == DKV_F32) b->type = DKV_BF16; /* nobody has a key */
    return DKV_OK;
}

typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* [heads][rows][d], boxes of a panel of columns by box_rows. */
dkv_result encode_map(CUtensorMap *map, const dkv_tensor &t, int64_t d, int64_t rows, int64_t heads, int D,
                      int box_rows) {
    static Encode encode = NULL;
    if (!__atomic_load_n(&encode, __ATOMIC_ACQUIRE)) {
        void                           *f = NULL;
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) || !f) {
            cudaGetLastError();
            return DKV_ERR_DEVICE;
        }
        __atomic_store_n(&encode, (Encode)f, __ATOMIC_RELEASE);
    }
    int         e = type_bytes(t.type), panel = least(128, D * e);
    cuuint64_t  size[3] = {(cuuint64_t)d, (cuuint64_t)rows, (cuuint64_t)heads};
    cuuint64_t  stride[2] = {(cuuint64_t)t.stride_token, (cuuint64_t)(heads > 1 ? t.stride_head : 16)};
    cuuint32_t  box[3] = {(cuuint32_t)(panel / e), (cuuint32_t)box_rows, 1}, step[3] = {1, 1, 1};
    CUresult r = encode(map, e == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, t.data, size,
                        stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        panel == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? DKV_OK : DKV_ERR_DEVICE;
}

dkv_tensor rows_of(const char *data, dkv_type type, int64_t row_bytes) {
    return dkv_tensor{(void *)data, type, row_bytes, 0, type_bytes(type)};
}

dkv_result describe(Attention *x, const dkv_attention &a, const Batch &b, const int64_t *length) {
    const dkv_segment *segment[2] = {&a.context, &a.tail};
    memset((void *)x, 0, sizeof *x);
    if (a.context.packed) {
        const dkv_packed &p = *a.context.packed;
        Layout            y = layout_of(p.type, p.Hkv, p.d_k, p.d_v, p.rows);
        const char       *data = (const char *)p.data;
        x->packed = 1;
        x->source[CONTEXT_K] = rows_of(data, p.type, y.k_row);
        x->source[CONTEXT_V] = rows_of(data + y.v, p.type, y.v_row);
        x->k_scale = (const float *)(data + y.k_scale);
        x->v_scale = (const float *)(data + y.v_scale);
        x->k_pitch = (int32_t)padded_d(p.type, p.d_k);
        x->v_pitch = (int32_t)padded_d(p.type, p.d_v);
    }
    for (int i = 0; i < SOURCES; i++) {
        const dkv_segment &s = *segment[i / 2];
        bool               packed = i < TAIL_K && x->packed;
        if (!packed && is_empty(s)) continue;
        if (!packed) x->source[i] = i & 1 ? s.v : s.k;
        x->vector[i] = is_vector(x->source[i]);
        if (!b.tma) continue;
        int64_t rows = s.n, d = i & 1 ? a.d_v : a.d_k;
        if (packed) rows = layout_of(s.packed->type, a.Hkv, a.d_k, a.d_v, s.packed->rows).rows;
        if (packed) d = x->source[i].stride_token / type_bytes(x->source[i].type);
        int box = type_bytes(x->source[i].type) == 1 ? 2 * TILE : TILE;
        if (!rows) continue;
        dkv_result r = encode_map(&x->map[i], x->source[i], d, rows, packed ? 1 : a.Hkv, b.d, box);
        if (r) return r;
    }
    x->q = a.q;
    x->out = a.out;
    x->q_vector = is_vector(a.q);
    x->out_vector = is_vector(a.out);
    x->sink = a.sink;
    x->lse = a.lse;
    x->length = length;
    x->tail = is_empty(a.tail) ? 0 : a.tail.n;
    x->N_q = (int32_t)a.N_q;
    x->H = a.H;
    x->Hkv = a.Hkv;
    x->G = a.H / a.Hkv;
    x->d_k = a.d_k;
    x->d_v = a.d_v;
    x->scale = (a.scale > 0.0f ? a.scale : 1.0f / sqrtf((float)a.d_k)) * LOG2E;
    x->softcap = a.softcap;
    return DKV_OK;
}

/* Items in the order they are taken: with few of them KV heads, with many row blocks, those with most keys first. */
__global__ void make_items(const Attention *attentions, const Head *heads, Item *items, int *arrived, int n,
                           int n_items, int keys, int whole) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n_items; i += gridDim.x * blockDim.x) {
        int a = 0, last = n - 1;
        while (a < last) { /* the last attention whose items begin at or before i */
            int half = (a + last + 1) / 2;
            if (attentions[half].first_item <= i) a = half;
            else last = half - 1;
        }
        const Attention &x = attentions[a];
        int              j = i - x.first_item;
        Item             y;
        y.a = a;
        y.g = j % x.Hkv;
        y.m = whole ? x.blocks - 1 - j / x.Hkv : 0;
        y.tail = x.tail;
        y.rows = heads[x.first_head + y.g].rows;
        y.base = heads[x.first_head + y.g].base;
        y.context = (int)ceil_div(y.rows, keys);
        y.N_q = x.N_q;
        y.G = x.G;
        items[i] = y;
        arrived[i] = 0;
    }
}

constexpr int64_t TOUCHED = 1024; /* what touch may read behind the end */

struct Sizes { int64_t heads, items, arrived, block, ws; int64_t n_items; int split, ctas, blocks; };

int64_t block_bytes_of(int64_t items_at, int64_t n_items) {
    return round_up(items_at + n_items * (int64_t)sizeof(Item), 128) + round_up(n_items * 4, 128) + TOUCHED;
}
int64_t slots_bytes(const Batch &b, int ctas) { return round_up((int64_t)ctas * 2 * b.M * (b.d + 2) * 4, 128); }

Sizes sizes_of(const Batch &b, int64_t n, const Device &dev, int ctas) {
    Sizes s = {};
    ctas = ctas > 0 ? least(ctas, dev.sms) : dev.sms;
    s.split = b.items < 4 * (int64_t)ctas; /* few: cut them; the cut wants as many row blocks everywhere, or M rows */
    s.blocks = (int)(b.blocks ? b.blocks : 1);
    if (s.split && (b.blocks == 0 || b.blocks > ctas)) s.split = 0;
    s.n_items = s.split ? b.heads : b.items;
    s.ctas = s.split ? ctas / s.blocks * s.blocks : (int)most(least(s.n_items, (int64_t)ctas), (int64_t)1);
    s.heads = n * (int64_t)sizeof(Attention);
    s.items = round_up(s.heads + b.heads * (int64_t)sizeof(Head), 128);
    s.arrived = round_up(s.items + s.n_items * (int64_t)sizeof(Item), 128);
    s.block = block_bytes_of(s.items, s.n_items);
    s.ws = s.split ? slots_bytes(b, s.ctas) : 128;
    return s;
}

} /* namespace */

extern "C" dkv_result dkv_cuda_attend_size(size_t *block_bytes, size_t *ws_bytes, const dkv_attention *a, int64_t n) {
    Device     dev;
    Batch      b;
    dkv_result r = device_read(&dev);
    if (!r) r = batch_read(&b, a, n, dev);
    if (r) return r;
    Sizes s = sizes_of(b, n, dev, 0);
    /* whichever way a smaller grid takes them */
    *block_bytes = (size_t)block_bytes_of(s.items, most(b.items, b.heads));
    *ws_bytes = (size_t)slots_bytes(b, dev.sms);
    return DKV_OK;
}

extern "C" dkv_result dkv_cuda_prepare(dkv_cuda_work *work, const dkv_attention *a, int64_t n, const int64_t *lengths,
                                       void *block, size_t block_bytes, void *ws, size_t ws_bytes, int ctas,
                                       void *stream) {
    Device     dev;
    Batch      b;
    dkv_result r = device_read(&dev);
    if (!r) r = batch_read(&b, a, n, dev);
    if (r) return r;
    Sizes s = sizes_of(b, n, dev, ctas);
    if (block_bytes < (size_t)s.block || ws_bytes < (size_t)s.ws) return DKV_ERR_CAPACITY;
    if ((uintptr_t)block % 128 || (uintptr_t)ws % 128) return DKV_ERR_ALIGN;
    char     *base = (char *)block;
    Post      post(base, stream);
    Attention x;
    int32_t   head = 0, row = 0;
    int64_t   item = 0, longest = 0;
    for (int64_t i = 0; i < n && !r; i++)
        r = describe(&x, a[i], b, lengths ? lengths + i : NULL); /* before any write */
    if (r) return r;
    for (int64_t i = 0; i < n; i++) {
        describe(&x, a[i], b, lengths ? lengths + i : NULL);
        x.blocks = (int32_t)ceil_div((int64_t)x.G * x.N_q, b.M);
        x.first_head = head;
        x.first_item = (int32_t)item;
        x.first_row = row;
        head += x.Hkv;
        row += x.N_q;
        item += s.split ? x.Hkv : (int64_t)x.blocks * x.Hkv;
        longest = most(longest, (int64_t)x.N_q);
        post.put(&x, sizeof x);
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t first = 0;
        for (int g = 0; g < a[i].Hkv; g++) {
            Head h = {a[i].context.packed ? a[i].context.packed->rows[g] : a[i].context.n, first};
            first += round_up(h.rows, TILE);
            post.put(&h, sizeof h);
        }
    }
    post.flush();
    r = post.result;
    if (s.n_items && !r)
        r = launch(make_items, (unsigned)least(ceil_div(s.n_items, 128), (int64_t)256), 128, stream,
                   (const Attention *)base, (const Head *)(base + s.heads), (Item *)(base + s.items),
                   (int *)(base + s.arrived), (int)n, (int)s.n_items, type_bytes(b.type) == 1 ? 2 * TILE : TILE,
                   !s.split);
    if (r) return r;
    memset(work, 0, sizeof *work);
    work->block = block;
    work->ws = ws;
    work->n = n;
    work->items = s.n_items;
    work->lengths = lengths;
    work->items_at = s.items;
    work->arrived_at = s.arrived;
    work->rows = row;
    work->longest = longest;
    work->ctas = s.ctas;
    work->blocks = s.blocks;
    work->split = s.split;
    work->kernel = b.kernel;
    work->type = b.type;
    work->d = b.d;
    work->tma = b.tma;
    if (n == 1) memcpy(work->map, x.map, sizeof work->map);
    work->shared = dev.shared;
    work->overlap = dev.sm90;
    return DKV_OK;
}

namespace {

template <int TYPE, int D, int RW> dkv_result launch_mma(Work w, const dkv_cuda_work &k, cudaStream_t stream) {
    typedef MmaShape<TYPE, D, RW> S;
    w.stages = least(S::MOST_STAGES, (k.shared - S::FIXED) / S::STAGE); /* at least 2: see batch_read */
    if (RW > 2) w.arrived = NULL; /* pieces too large for one CTA to merge in passing */
    dkv_result r = launch(attend_mma<TYPE, D, RW>, dim3(k.ctas), S::THREADS + 32, w.stages * S::STAGE + S::FIXED,
                          k.overlap, stream, w);
    if (!r && RW > 2 && w.split)
        r = launch(combine<S::M, D>, dim3(S::M / 8, w.n_items, w.blocks), 256, 0, k.overlap, stream, w, k.ctas);
    return r;
}

template <class T, int D> dkv_result launch_wgmma(Work w, const dkv_cuda_work &k, cudaStream_t stream) {
    typedef WgmmaShape<D> S;
    dkv_result            r = launch(attend_wgmma<T, D>, dim3(k.ctas), S::THREADS, S::SHARED, k.overlap, stream, w);
    if (!r && w.split)
        r = launch(combine<S::M, D>, dim3(S::M / 8, w.n_items, w.blocks), 256, 0, k.overlap, stream, w, k.ctas);
    return r;
}

template <int TYPE, int D> dkv_result launch_type(const Work &w, const dkv_cuda_work &k, cudaStream_t stream) {
    if (k.kernel == MMA16) return launch_mma<TYPE, D, 1>(w, k, stream);
    if (k.kernel == MMA32) return launch_mma<TYPE, D, 2>(w, k, stream);
    return launch_mma<TYPE, D, D == 256 ? 4 : 8>(w, k, stream);
}

template <int D> dkv_result launch_d(const Work &w, const dkv_cuda_work &k, cudaStream_t stream) {
    if (D <= 128 && k.kernel == WGMMA) {
        constexpr int d = D <= 128 ? D : 128;
        return k.type == DKV_BF16 ? launch_wgmma<__nv_bfloat16, d>(w, k, stream)
                                  : launch_wgmma<__half, d>(w, k, stream);
    }
    switch (k.type) {
    case DKV_BF16: return launch_type<DKV_BF16, D>(w, k, stream);
    case DKV_F16: return launch_type<DKV_F16, D>(w, k, stream);
    case DKV_I8: return launch_type<DKV_I8, D>(w, k, stream);
    default: return launch_type<DKV_FP8, D>(w, k, stream);
    }
}

} /* namespace */

extern "C" dkv_result dkv_cuda_attend(const dkv_cuda_work *k, void *stream) {
    if (!k->items || !k->longest) return DKV_OK;
    char *base = (char *)k->block;
    Work  w = {(const Attention *)base,
               (const Item *)(base + k->items_at),
               k->lengths,
               (int *)(base + k->arrived_at),
               (float *)k->ws,
               (int)k->items,
               k->blocks,
               k->split,
               k->tma,
               0,
               k->n == 1,
               ((uint64_t)1 << 63) / (uint64_t)most(k->ctas / k->blocks, 1) + 1};
    memcpy(w.map, k->map, sizeof w.map);
    if (k->d == 64) return launch_d<64>(w, *k, (cudaStream_t)stream);
    if (k->d == 128) return launch_d<128>(w, *k, (cudaStream_t)stream);
    return launch_d<256>(w, *k, (cudaStream_t)stream);
}

/* ---- the step: lengths and new rows ---- */

namespace {

__global__ void advance(int64_t *lengths, int64_t n, int64_t count) {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) lengths[i] += count;
}

/* Eight elements a thread, K then V; grid: (attentions, chunks of the longest suffix). */
__global__ void append(const Attention *attentions, dkv_tensor k, dkv_tensor v, int k_vector, int v_vector) {
    const Attention &a = attentions[blockIdx.x];
    const int64_t    length = a.length ? least(most(*a.length, (int64_t)0), a.tail) : a.tail;
    for (int side = 0; side < 2; side++) {
        const dkv_tensor &from = side ? v : k, &to = a.source[TAIL_K + side];
        const int         d = side ? a.d_v : a.d_k, chunks = d / 8;
        const int64_t     n = (int64_t)a.N_q * a.Hkv * chunks;
        for (int64_t i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.y * blockDim.x) {
            int     c = (int)(i % chunks), g = (int)(i / chunks % a.Hkv);
            int64_t q = i / chunks / a.Hkv, row = length - a.N_q + q;
            if (row < 0) continue;
            Eight x = load8(at(from, a.first_row + q, g) + c * 8 * from.stride_dim, from.type, from.stride_dim,
                            side ? v_vector : k_vector);
            char *p = at(to, row, g) + c * 8 * to.stride_dim;
            if (a.vector[TAIL_K + side]) store8(p, to.type, x);
            else for (int u = 0; u < 8; u++) set_element(p + u * to.stride_dim, to.type, x.x[u]);
        }
    }
}

} /* namespace */

extern "C" dkv_result dkv_cuda_advance(int64_t *lengths, int64_t n, int64_t count, void *stream) {
    return n > 0 ? launch(advance, 1, 128, stream, lengths, n, count) : DKV_OK;
}

extern "C" dkv_result dkv_cuda_append(const dkv_cuda_work *w, dkv_tensor k, dkv_tensor v, void *stream) {
    if (k.type > DKV_BF16 || v.type > DKV_BF16) return DKV_ERR_TYPE;
    if (!is_whole(k) || !is_whole(v)) return DKV_ERR_ALIGN;
    if (!w->rows) return DKV_OK;
    unsigned x = (unsigned)most(least(w->longest * 8, (int64_t)512), (int64_t)1);
    return launch(append, dim3((unsigned)w->n, x), 128, stream, (const Attention *)w->block, k, v, is_vector(k),
                  is_vector(v));
}

/* ==========================================================================
   [CACHE]  packed layers and a growing tail on the device
   in:  dense layers, one at a time; new tokens by dkv_cuda_append
   out: attentions for dkv_cuda_prepare
   invariant: the packed context is written once per layer and then only read, so forks share it by reference
   ========================================================================== */

namespace {

struct Context { /* shared by forks */
    int        refs;
    dkv_plan   plan, on_device;
    void      *plan_memory;      /* host; on the device: on_device.first */
    dkv_shape  shape;
    dkv_type   type;
    int64_t    bytes;            /* device memory */
    dkv_packed layers[1];        /* [L]; data NULL: not packed yet */
};

bool all_packed(const Context *x) {
    for (int l = 0; l < x->shape.L; l++) {
        if (!x->layers[l].data && x->plan.T_c) return false;
    }
    return true;
}

void context_release(Context *x) {
    if (!x || __atomic_sub_fetch(&x->refs, 1, __ATOMIC_ACQ_REL)) return;
    for (int l = 0; l < x->shape.L; l++) cudaFree(x->layers[l].data);
    cudaFree((void *)x->on_device.first);
    free(x->plan_memory);
    free(x);
}

dkv_result context_create(Context **out, const dkv_plan *plan, const dkv_shape *s, dkv_type type) {
    int64_t  heads = (int64_t)plan->L * plan->Hkv;
    size_t   bytes;
    dkv_cuda_plan(NULL, NULL, &bytes, plan, NULL);
    Context *x = (Context *)calloc(1, sizeof *x + sizeof(dkv_packed) * (size_t)plan->L);
    void    *memory = malloc(bytes), *device = NULL;
    if (x) x->refs = 1;
    if (!x || !memory) {
        free(memory), free(x);
        return DKV_ERR_MEMORY;
    }
    memcpy(memory, plan->first, bytes);
    x->plan_memory = memory;
    x->plan = *plan;
    x->plan.first = (const int64_t *)memory;
    x->plan.rows = x->plan.first + heads + 1;
    x->plan.runs = (const dkv_run *)(x->plan.rows + heads);
    x->shape = *s;
    x->type = type;
    x->bytes = (int64_t)bytes;
    dkv_result r = cudaMalloc(&device, bytes) ? (cudaGetLastError(), DKV_ERR_MEMORY) : DKV_OK;
    if (!r) r = dkv_cuda_plan(&x->on_device, device, &bytes, &x->plan, NULL);
    if (!r) r = did(cudaStreamSynchronize(NULL));
    if (r) {
        if (!x->on_device.first) cudaFree(device);
        context_release(x);
        return r;
    }
    *out = x;
    return DKV_OK;
}

} /* namespace */

struct dkv_cuda_cache {
    Context *context;
    int64_t  capacity;
    char    *tail;     /* [L] x K [Hkv][capacity][d_k], V [Hkv][capacity][d_v]; then the length */
    int64_t  layer;    /* bytes of one */
};

namespace {

constexpr int64_t MOST_CAPACITY = (int64_t)1 << 21; /* rows of 512 bytes: less than a copy's pitch may be, 2^31 */

int64_t tail_k_bytes(const dkv_cuda_cache *c) {
    return (int64_t)c->context->shape.Hkv * c->capacity * c->context->shape.d_k * 2;
}

/* Takes over one reference of x. */
dkv_result tail_create(dkv_cuda_cache **out, Context *x, int64_t capacity, cudaStream_t stream) {
    dkv_cuda_cache *c = (dkv_cuda_cache *)calloc(1, sizeof *c);
    if (!c) {
        context_release(x);
        return DKV_ERR_MEMORY;
    }
    c->context = x;
    c->capacity = round_up(capacity, TILE);
    c->layer = (int64_t)x->shape.Hkv * c->capacity * (x->shape.d_k + x->shape.d_v) * 2;
    if (cudaMalloc((void **)&c->tail, (size_t)(c->layer * x->shape.L + 128)) ||
        cudaMemsetAsync(c->tail + c->layer * x->shape.L, 0, 8, stream)) {
        cudaGetLastError();
        dkv_cuda_cache_destroy(c);
        return DKV_ERR_MEMORY;
    }
    *out = c;
    return DKV_OK;
}

__global__ void set_length(int64_t *length, int64_t n) { *length = n; }

/* As attention takes it: one beyond the capacity counts as that. */
dkv_result read_length(int64_t *n, const dkv_cuda_cache *c, cudaStream_t stream) {
    dkv_result r = did(cudaMemcpyAsync(n, dkv_cuda_cache_length(c), 8, cudaMemcpyDeviceToHost, stream));
    if (!r) r = did(cudaStreamSynchronize(stream));
    if (!r) *n = least(most(*n, (int64_t)0), c->capacity);
    return r;
}

dkv_tensor tail_side(const dkv_cuda_cache *c, int l, bool v) {
    const Context *x = c->context;
    int64_t        d = v ? x->shape.d_v : x->shape.d_k;
    return dkv_tensor{c->tail + l * c->layer + (v ? tail_k_bytes(c) : 0), type_bytes(x->type) == 1 ? DKV_F16 : x->type,
                      d * 2, c->capacity * d * 2, 2};
}

} /* namespace */

extern "C" void dkv_cuda_cache_destroy(dkv_cuda_cache *c) {
    if (!c) return;
    cudaFree(c->tail);
    context_release(c->context);
    free(c);
}

extern "C" dkv_result dkv_cuda_cache_create(dkv_cuda_cache **out, const dkv_plan *plan, const dkv_shape *s,
                                            dkv_type type, int64_t capacity) {
    Device     dev;
    dkv_result r = device_read(&dev);
    if (r) return r;
    if (!packable(type)) return DKV_ERR_TYPE;
    if (s->L != plan->L || s->Hkv != plan->Hkv || s->Hkv < 1 || s->H < 1 || s->H % s->Hkv) return DKV_ERR_SHAPE;
    if (!head_dim_ok(s->d_k) || !head_dim_ok(s->d_v)) return DKV_ERR_SHAPE;
    if (capacity < 0 || capacity > MOST_CAPACITY) return DKV_ERR_FIELD;
    Context        *x;
    dkv_cuda_cache *c;
    r = context_create(&x, plan, s, type);
    if (!r) r = tail_create(&c, x, capacity, NULL);
    if (r) return r;
    r = did(cudaStreamSynchronize(NULL)); /* the length is 0 before another stream says what it is */
    if (r) dkv_cuda_cache_destroy(c);
    else *out = c;
    return r;
}

extern "C" dkv_result dkv_cuda_cache_pack(dkv_cuda_cache *c, int l, const dkv_segment *source, void *stream) {
    Context *x = c->context;
    if (x->layers[l].data || !x->plan.T_c) return DKV_ERR_STATE;
    size_t     bytes;
    void      *memory = NULL;
    dkv_packed p;
    dkv_result r = dkv_cuda_pack(NULL, NULL, &bytes, x->type, &x->plan, &x->on_device, l, x->shape.d_k, x->shape.d_v,
                                 source, stream);
    if (r) return r;
    if (cudaMalloc(&memory, bytes ? bytes : 128)) {
        cudaGetLastError();
        return DKV_ERR_MEMORY;
    }
    r = dkv_cuda_pack(&p, memory, &bytes, x->type, &x->plan, &x->on_device, l, x->shape.d_k, x->shape.d_v, source,
                      stream);
    if (r) {
        cudaFree(memory);
        return r;
    }
    x->layers[l] = p;
    __atomic_add_fetch(&x->bytes, (int64_t)bytes, __ATOMIC_RELAXED);
    return DKV_OK;
}

extern "C" dkv_result dkv_cuda_cache_fork(dkv_cuda_cache **out, const dkv_cuda_cache *c, int64_t capacity,
                                          void *stream) {
    const Context  *x = c->context;
    dkv_cuda_cache *fork = NULL;
    int64_t         n;
    if (!all_packed(x)) return DKV_ERR_STATE;
    if (capacity < 0 || capacity > MOST_CAPACITY) return DKV_ERR_FIELD;
    dkv_result r = read_length(&n, c, (cudaStream_t)stream);
    if (r) return r;
    if (n > round_up(capacity, TILE)) return DKV_ERR_CAPACITY;
    __atomic_add_fetch(&c->context->refs, 1, __ATOMIC_RELAXED);
    r = tail_create(&fork, c->context, capacity, (cudaStream_t)stream);
    for (int l = 0; l < x->shape.L && !r && n; l++) {
        for (int v = 0; v < 2 && !r; v++) {
            dkv_tensor to = tail_side(fork, l, v), from = tail_side(c, l, v);
            r = did(cudaMemcpy2DAsync(to.data, (size_t)to.stride_head, from.data, (size_t)from.stride_head,
                                      (size_t)(n * from.stride_token), (size_t)x->shape.Hkv, cudaMemcpyDeviceToDevice,
                                      (cudaStream_t)stream));
        }
    }
    if (!r) r = dkv_cuda_cache_truncate(fork, n, stream);
    if (r) dkv_cuda_cache_destroy(fork);
    else *out = fork;
    return r;
}

extern "C" int64_t *dkv_cuda_cache_length(const dkv_cuda_cache *c) {
    return (int64_t *)(c->tail + c->layer * c->context->shape.L);
}

extern "C" dkv_result dkv_cuda_cache_truncate(dkv_cuda_cache *c, int64_t n, void *stream) {
    if (n < 0 || n > c->capacity) return DKV_ERR_CAPACITY;
    return launch(set_length, 1, 1, stream, dkv_cuda_cache_length(c), n);
}

extern "C" dkv_attention dkv_cuda_cache_attention(const dkv_cuda_cache *c, int l, dkv_tensor q, int64_t N_q,
                                                  dkv_tensor out) {
    const Context *x = c->context;
    dkv_attention  a;
    memset(&a, 0, sizeof a);
    a.H = x->shape.H;
    a.Hkv = x->shape.Hkv;
    a.d_k = x->shape.d_k;
    a.d_v = x->shape.d_v;
    a.N_q = N_q;
    a.q = q;
    a.out = out;
    if (x->plan.T_c) a.context.packed = &x->layers[l];
    a.tail.k = tail_side(c, l, false);
    a.tail.v = tail_side(c, l, true);
    a.tail.n = c->capacity;
    return a;
}

extern "C" const dkv_plan *dkv_cuda_cache_plan(const dkv_cuda_cache *c) { return &c->context->plan; }

extern "C" int64_t dkv_cuda_cache_bytes(const dkv_cuda_cache *c) {
    return c->context->bytes + c->layer * c->context->shape.L + 128;
}

/* ---- to and from the CPU's saved image (its bytes: see [CACHE] in distance_kv.h) ---- */

namespace {

constexpr size_t IMAGE_HEADER = 128;

struct Rows { char *device; int64_t pitch, row, n; }; /* n rows of row bytes, pitch bytes apart */

/* The parts of a head in the order of the image: scales, K, V, tail's K and V. */
int head_parts(Rows (&part)[6], const dkv_cuda_cache *c, int l, int g, int64_t tail) {
    const Context &x = *c->context;
    const int64_t *rows = x.plan.rows + (int64_t)l * x.shape.Hkv;
    const Layout   y = layout_of(x.type, x.shape.Hkv, x.shape.d_k, x.shape.d_v, rows);
    char          *data = (char *)x.layers[l].data;
    const int64_t  e = type_bytes(x.type);
    int64_t        before = 0;
    int            n = 0;
    for (int i = 0; i < g; i++) before += round_up(rows[i], TILE);
    if (e == 1 && x.plan.T_c) {
        part[n++] = Rows{data + y.k_scale + g * padded_d(x.type, x.shape.d_k) * 4, 0, x.shape.d_k * 4, 1};
        part[n++] = Rows{data + y.v_scale + g * padded_d(x.type, x.shape.d_v) * 4, 0, x.shape.d_v * 4, 1};
    }
    part[n++] = Rows{data + before * y.k_row, y.k_row, x.shape.d_k * e, rows[g]};
    part[n++] = Rows{data + y.v + before * y.v_row, y.v_row, x.shape.d_v * e, rows[g]};
    for (int v = 0; v < 2; v++) {
        dkv_tensor t = tail_side(c, l, v);
        part[n++] = Rows{(char *)t.data + g * t.stride_head, t.stride_token, t.stride_token, tail};
    }
    return n;
}

size_t image_rows_bytes(const dkv_cuda_cache *c, int64_t tail) {
    const Context &x = *c->context;
    size_t         bytes = 0;
    Rows           part[6];
    for (int f = 0; f < x.shape.L * x.shape.Hkv; f++) {
        int n = head_parts(part, c, f / x.shape.Hkv, f % x.shape.Hkv, tail);
        for (int i = 0; i < n; i++) bytes += (size_t)(part[i].row * part[i].n);
        if (type_bytes(x.type) == 1 && !x.plan.T_c) bytes += (size_t)(x.shape.d_k + x.shape.d_v) * 4;
    }
    return bytes;
}

/* Copies the rows of all heads between an image and the device, one way or the other. */
dkv_result move_rows(uint8_t *image, const dkv_cuda_cache *c, int64_t tail, bool to_device, cudaStream_t stream) {
    const Context &x = *c->context;
    Rows           part[6];
    dkv_result     r = DKV_OK;
    for (int f = 0; f < x.shape.L * x.shape.Hkv && !r; f++) {
        if (type_bytes(x.type) == 1 && !x.plan.T_c) { /* nothing was measured: scales of 1 */
            for (int i = 0; i < x.shape.d_k + x.shape.d_v; i++, image += 4) {
                const float one = 1.0f;
                if (!to_device) memcpy(image, &one, 4);
            }
        }
        int n = head_parts(part, c, f / x.shape.Hkv, f % x.shape.Hkv, tail);
        for (int i = 0; i < n && !r; i++) {
            Rows  &p = part[i];
            size_t row = (size_t)p.row, pitch = (size_t)most(p.pitch, p.row);
            if (p.n && to_device) {
                r = did(
                    cudaMemcpy2DAsync(p.device, pitch, image, row, row, (size_t)p.n, cudaMemcpyHostToDevice, stream));
            } else if (p.n) {
                r = did(
                    cudaMemcpy2DAsync(image, row, p.device, pitch, row, (size_t)p.n, cudaMemcpyDeviceToHost, stream));
            }
            image += row * (size_t)p.n;
        }
    }
    return r ? r : did(cudaStreamSynchronize(stream));
}

template <class I> uint8_t *put(uint8_t *to, I x) { /* hosts of CUDA are little-endian */
    memcpy(to, &x, sizeof x);
    return to + sizeof x;
}

} /* namespace */

extern "C" dkv_result dkv_cuda_cache_download(dkv_cache **out, const dkv_cuda_cache *c, int64_t capacity,
                                              const dkv_allocator *alloc, void *stream) {
    const Context &x = *c->context;
    const int64_t  heads = (int64_t)x.shape.L * x.shape.Hkv, runs = x.plan.first[heads];
    int64_t        tail;
    if (!all_packed(&x)) return DKV_ERR_STATE;
    dkv_result r = read_length(&tail, c, (cudaStream_t)stream);
    if (r) return r;
    size_t   bytes = IMAGE_HEADER + (size_t)(heads * 8 + runs * 16 + x.shape.L * 8) + image_rows_bytes(c, tail) + 4;
    uint8_t *image = (uint8_t *)calloc(1, bytes), *at = image;
    if (!image) return DKV_ERR_MEMORY;
    memcpy(at, "DKVC\r\n\x1a\n", 8);
    at = put(at + 8, (uint32_t)DKV_CACHE_VERSION);
    at = put(at, (uint32_t)IMAGE_HEADER);
    at = put(at, (uint64_t)bytes);
    for (int32_t v : {x.shape.L, x.shape.H, x.shape.Hkv, x.shape.d_k, x.shape.d_v, (int32_t)x.type}) at = put(at, v);
    at = put(at, x.plan.T_c);
    at = put(at, runs);
    put(at, x.plan.pattern_crc);
    at = image + IMAGE_HEADER;
    for (int64_t f = 0; f < heads; f++) at = put(at, x.plan.first[f + 1] - x.plan.first[f]);
    for (int64_t i = 0; i < runs; i++) at = put(put(at, x.plan.runs[i].pos), x.plan.runs[i].len);
    for (int l = 0; l < x.shape.L; l++) at = put(at, tail);
    r = move_rows(at, c, tail, false, (cudaStream_t)stream);
    put(image + bytes - 4, dkv_crc32(0, image, bytes - 4));
    if (!r) r = dkv_cache_restore(out, image, bytes, capacity, alloc);
    free(image);
    return r;
}

extern "C" dkv_result dkv_cuda_cache_upload(dkv_cuda_cache **out, const dkv_cache *from, int64_t capacity,
                                            void *stream) {
    const dkv_plan  *plan = dkv_cache_plan(from);
    const dkv_shape *s = dkv_cache_shape(from);
    const int64_t    heads = (int64_t)s->L * s->Hkv, tail = dkv_cache_tail(from, 0);
    dkv_cuda_cache  *c = NULL;
    size_t           bytes;
    for (int l = 0; l < s->L; l++) {
        if (dkv_cache_tail(from, l) != tail) return DKV_ERR_STATE;
    }
    if (tail > round_up(capacity, TILE)) return DKV_ERR_CAPACITY;
    dkv_result r = dkv_cache_save(NULL, &bytes, from);
    if (!r) r = dkv_cuda_cache_create(&c, plan, s, dkv_cache_type(from), capacity);
    if (r) return r;
    uint8_t *image = (uint8_t *)malloc(bytes);
    r = image ? dkv_cache_save(image, &bytes, from) : DKV_ERR_MEMORY;
    for (int l = 0; l < s->L && !r && plan->T_c; l++) {
        Context &x = *c->context;
        Layout   y = layout_of(x.type, s->Hkv, s->d_k, s->d_v, x.plan.rows + (int64_t)l * s->Hkv);
        void    *memory = NULL;
        if (cudaMalloc(&memory, (size_t)most(y.bytes, (int64_t)128)) || cudaMemset(memory, 0, (size_t)y.bytes)) {
            cudaFree(memory);
            cudaGetLastError();
            r = DKV_ERR_MEMORY;
            break;
        }
        x.layers[l] = dkv_packed{memory, x.type, s->Hkv, s->d_k, s->d_v, x.plan.rows + (int64_t)l * s->Hkv, 0};
        x.bytes += y.bytes;
    }
    if (!r) r = did(cudaDeviceSynchronize()); /* the zeros, before another stream writes rows */
    if (!r)
        r = move_rows(image + IMAGE_HEADER + heads * 8 + plan->first[heads] * 16 + s->L * 8, c, tail, true,
                      (cudaStream_t)stream);
    if (!r) r = dkv_cuda_cache_truncate(c, tail, stream);
    free(image);
    if (r) dkv_cuda_cache_destroy(c);
    else *out = c;
    return r;
}

/* ==========================================================================
   [SCORE]  how many keys outrank the source of what a query is about to predict (paper 3.1)
   in:  queries of several questions, K of their context and of each one's tail, the source's row for each query
   out: ranks: counts, added up as integers, so that keys may come in any order and from any CTA
   invariant: a source's logit comes from the products that give all the others, so that equal keys tie exactly
   ========================================================================== */

namespace {

/* ---- counting ----------------------------------------------------------------------------------------------------

   math    S = Q K^T in f32, unscaled: a positive scale keeps the order; rank = how many s are not <= the source's s,
           and how many are equal before it
   shapes  rows (asked query, head of the group) in blocks of 256, 64 a warpgroup and accumulator; tiles of 128 keys.
           mma.sync: 128 rows, 64 at D = 256
   CTA     two warpgroups count while a warp loads K. Each has two accumulators: one is counted while the other is
           being multiplied. They are two groups of rows, or where these are few, of one group's tiles every second.
           The first stages are lent by the producer: consumers gather the sources' keys in them, and S's diagonal is
           what they compare with
   why     256 rows for every K that comes from L2, and products in flight while others are counted: 4,096 rows over
           130816 keys at D 128 run at 734 TF/s on an H200 where cuBLAS has 687. CTAs of all row blocks run through the
           same keys together, so K is read once: 64 rows take 70 us, reading alone 61
   limits  16-bit keys, at most 2^31 of them; wgmma: D 64 and 128, sources that TMA takes                          */

struct Asked { int32_t x, i; int64_t source; }; /* question, its query, row of the context */

struct Probe { /* kernel parameter */
    const Attention *questions; /* NULL: they come with the launch, as what follows does */
    const Head      *heads;  /* of the context */
    const Asked     *asked;  /* [n], question after question */
    int64_t         *rank;   /* [queries of all][H], -1 before */
    int32_t          n, n_questions, bytes, G, H, Hkv, d, blocks, ctas, tma, stages; /* ctas: of a head and row block */
    DKV__DEVICE void look_at(const void *block) { /* questions, heads and asked, one after another */
        questions = (const Attention *)block;
        heads = (const Head *)(questions + n_questions);
        asked = (const Asked *)(heads + Hkv);
    }
};

template <int D, bool WGMMA> struct ProbeShape {
    static constexpr int GROUPS = D == 256 ? 1 : 2, HALF = 64 * GROUPS, SLOTS = WGMMA ? 2 : 1, M = HALF * SLOTS;
    static constexpr int CONSUMING = 128 * GROUPS, THREADS = CONSUMING + (WGMMA ? 128 : 32);
    static constexpr int KEYS = WGMMA ? 128 : 64; /* multiplied together: registers */
    static constexpr int STAGE = TILE * D * 2, Q = M * D * 2, MOST_STAGES = 8;
};

struct Turn { /* a place in a ring of n stages */
    int      stage, n;
    uint32_t phase;
    DKV__DEVICE void next() {
        if (++stage == n) stage = 0, phase ^= 1;
    }
};

/* Brings the block near before anyone asks for it. */
DKV__DEVICE void touch_block(const void *block, int bytes) {
    uint32_t x;
    if ((int)threadIdx.x * 128 < bytes)
        asm volatile("ld.u32 %0, [%1];" : "=r"(x) : "l"((const char *)block + threadIdx.x * 128));
}

struct RowBlock { int first, rows; }; /* of all rows, those of a CTA */

DKV__DEVICE Asked asked(const Probe &p, const RowBlock &b, int row) { /* rows behind the end are like the last */
    return p.asked[least((b.first + row) / p.G, p.n - 1)];
}
DKV__DEVICE int head_of(const Probe &p, const RowBlock &b, int g, int row) { return g * p.G + (b.first + row) % p.G; }

/* A CTA runs through every ctas-th tile of a line: those of the context under its head, then of the tails of the
   questions that its rows belong to. CTAs of a head read what lies together, not as many far places. */
struct Stretch { int x, tile, n, tiles; }; /* n tiles from `tile` on, of the context, x < 0, or question x's tail */

DKV__DEVICE int of_warp(int x) { return __shfl_sync(~0u, x, 0); } /* tells the compiler that all lanes have the same */

DKV__DEVICE Stretch stretch(const Probe &p, int g, int x, int tile) {
    const int     last = p.n_questions - 1; /* at the end x is one more */
    const int64_t rows = x < 0 ? p.heads[g].rows : p.questions[least(x, last)].tail;
    const int     tiles = of_warp((int)ceil_div(rows, TILE));
    return Stretch{x, tile, most((tiles - tile + p.ctas - 1) / p.ctas, 0), tiles};
}
DKV__DEVICE Stretch stretch_after(const Probe &p, int g, const Stretch &s, int first) {
    return stretch(p, g, s.x < 0 ? first : s.x + 1, s.tile + s.n * p.ctas - s.tiles);
}

/* Every second chunk of a row into row r of a tile, as T; from NULL: zeros. */
template <class T, int D, int ROWS>
DKV__DEVICE void gather_row(char *to, int r, int half, const char *from, const dkv_tensor &t, bool vector, int d) {
#pragma unroll 2
    for (int c = half; c < D / 8; c += 2) {
        const uint32_t dst = tile_offset<128, ROWS>(r, c);
        const bool     real = from && c * 8 < d;
        if (vector && t.type == Name<T>::type) {
            copy16(shared_address(to) + dst, real ? from + c * 16 : (const char *)t.data, real);
        } else {
            float x[8];
            for (int u = 0; u < 8; u++)
                x[u] = real ? element_called(from + (c * 8 + u) * t.stride_dim, t.type) : 0.0f;
            *(uint4 *)(to + dst) =
                uint4{pair_of<T>(x[0], x[1]), pair_of<T>(x[2], x[3]), pair_of<T>(x[4], x[5]), pair_of<T>(x[6], x[7])};
        }
    }
}

/* Queries of the block's rows under KV head g; the keys of half of the rows' sources. By threads that compute. */
template <class T, int D, int M>
DKV__DEVICE void gather_queries(const Probe &p, const RowBlock &b, int g, char *to, int threads) {
    for (int row = threadIdx.x / 2; row < round_up(b.rows, 64); row += threads / 2) {
        const Asked      who = asked(p, b, row);
        const Attention &a = p.questions[who.x];
        gather_row<T, D, M>(to, row, threadIdx.x & 1, row < b.rows ? at(a.q, who.i, head_of(p, b, g, row)) : NULL, a.q,
                            a.q_vector, p.d);
    }
}
template <class T, int D, int HALF>
DKV__DEVICE void gather_sources(const Probe &p, const RowBlock &b, int g, int half, char *to, int threads) {
    const Attention  &a = *p.questions;
    const dkv_tensor &k = a.source[CONTEXT_K];
    for (int row = threadIdx.x / 2; row < least(HALF, b.rows - half * HALF); row += threads / 2) {
        const int64_t source = asked(p, b, half * HALF + row).source + (a.packed ? p.heads[g].base : 0);
        gather_row<T, D, TILE>(to, row, threadIdx.x & 1, at(k, source, a.packed ? 0 : g), k, a.vector[CONTEXT_K], p.d);
    }
}

/* Lends a stage for every half of the rows, then fills them; by one warp. */
template <int D>
DKV__DEVICE void feed(const Probe &p, bool acquire, int g, int first, int last, int halves, char *ring, uint64_t *full,
                      uint64_t *empty) {
    const int lane = threadIdx.x & 31;
    uint64_t  policy = 0;
    Piece     piece = {};
    Turn      turn = {0, p.stages, 0};
#if __CUDA_ARCH__ >= 900
    policy = p.blocks == 1 ? policy_evict_first() : policy_evict_normal();
#endif
    for (int i = 0; i < halves; i++, turn.next()) {
        if (lane == 0 || !p.tma) bar_arrive(full + turn.stage);
    }
    piece.g = g;
    piece.rows = p.heads[g].rows;
    piece.base = p.heads[g].base;
    for (Stretch y = stretch(p, g, -1, (int)blockIdx.x / p.blocks % p.ctas); y.x <= last;
         y = stretch_after(p, g, y, first)) {
        const int which = y.x < 0 ? CONTEXT_K : TAIL_K;
        piece.a = p.questions + most(y.x, 0);
        piece.length = piece.a->tail;
#if __CUDA_ARCH__ >= 900
        if (acquire && y.n) tma_acquire(&piece.a->map[which]);
#endif
        for (int i = 0; i < y.n; i++, turn.next()) {
            bar_wait(empty + turn.stage, turn.phase ^ 1);
            load_tile<2, D, TILE>(piece, which, (int64_t)(y.tile + i * p.ctas) * TILE, ring + turn.stage * TILE * D * 2,
                                  full + turn.stage, p.tma, policy);
        }
    }
}

/* The next float down, so that x < s is x <= below(s), also for a NaN of either. Below -infinity is NaN. */
DKV__DEVICE float below(float s) {
    const uint32_t bits = __float_as_uint(s);
    return s == 0.0f ? -1.4e-45f : s != s ? s : __uint_as_float(s > 0.0f ? bits - 1 : bits + 1);
}

/* 1 if not x <= y: a NaN never makes a hit. Compares and integer sums share a pipe of half the rate, so floats add. */
DKV__DEVICE float beyond(float x, float y) {
    float one;
    asm("set.gtu.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(x), "f"(y));
    return one;
}

/* Two rows' keys, of 8 N, that come before their sources. sees: keys that the rows see; ties: those that win a tie. */
template <int N>
DKV__DEVICE void count_keys(int (&count)[2], const float (&s)[N][4], const float (&own)[2], const float (&less)[2],
                            const int (&sees)[2], const int (&ties)[2]) {
    const int  t = (threadIdx.x & 3) * 2;
    const bool mixed = sees[0] < 8 * N || sees[1] < 8 * N || (ties[0] > 0 && ties[0] < 8 * N) ||
                       (ties[1] > 0 && ties[1] < 8 * N);
    if (__builtin_expect(mixed, 0)) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int u = 0; u < 4; u++) {
                const int i = u >> 1, key = 8 * n + t + (u & 1);
                count[i] += key < sees[i] && !(s[n][u] <= (key < ties[i] ? less[i] : own[i]));
            }
        }
    } else {
        const float cut[2] = {ties[0] > 0 ? less[0] : own[0], ties[1] > 0 ? less[1] : own[1]};
        float       part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int u = 0; u < 4; u++) part[u] += beyond(s[n][u], cut[u >> 1]);
        }
        count[0] += (int)(part[0] + part[1]);
        count[1] += (int)(part[2] + part[3]);
    }
}

template <class T, int D, bool WGMMA>
__global__ void __launch_bounds__(ProbeShape<D, WGMMA>::THREADS, 1) probe(const __grid_constant__ Probe given,
                                                                                const __grid_constant__ Parcel parcel) {
#if !__CUDA_ARCH_FEAT_SM90_ALL
    if (WGMMA) __trap(); /* what follows is left out: compiled for sm_90 without the a */
#endif
    typedef ProbeShape<D, WGMMA> S;
    constexpr int                M = S::M, HALF = S::HALF, SLOTS = S::SLOTS, N = S::KEYS / 8;
    Probe                        p = given;
    extern __shared__ __align__(1024) char shared[];
    char      *q = shared, *ring = q + S::Q;
    uint64_t  *full = (uint64_t *)(ring + p.stages * S::STAGE), *empty = full + S::MOST_STAGES;
    const int  warp = of_warp((int)threadIdx.x / 32);
    const int  lane = threadIdx.x & 31, from = (int)(blockIdx.x % p.blocks) * M;
    const RowBlock b = {from, least(p.n * p.G - from, M)};
    const int  halves = (b.rows + HALF - 1) / HALF, groups = b.rows > 64 ? S::GROUPS : 1; /* warpgroups with rows */
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; i++) bar_init(full + i, p.tma ? 1 : 32), bar_init(empty + i, 4 * groups);
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    if (given.questions) let_next_start(); /* the block is there */
    p.look_at(given.questions ? (const void *)given.questions : parcel.bytes);
    touch_block(p.questions, p.bytes);
    const int part = (int)blockIdx.x / p.blocks % p.ctas, g = (int)blockIdx.x / p.blocks / p.ctas;
    const int first_x = of_warp(asked(p, b, 0).x), last_x = of_warp(asked(p, b, b.rows - 1).x);

    if (warp >= S::CONSUMING / 32) {
#if __CUDA_ARCH_FEAT_SM90_ALL /* a launch has 168 each: what the others take, twice, must be left */
        if constexpr (WGMMA) asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
#endif
        if (warp == S::CONSUMING / 32)
            feed<D>(p, p.tma && given.questions, g, first_x, last_x, halves, ring, full, empty);
        return;
    }
#if __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (WGMMA) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
#endif
    if (warp / 4 >= groups) return;

    /* Rows of slot j: 64 from row first[j] on; with one group of rows, both slots are the same. */
    const int  own = warp / 4, threads = 128 * groups;
    const bool two = own * 64 + HALF < b.rows;
    const int  first[2] = {own * 64, two ? own * 64 + HALF : own * 64}, r = warp % 4 * 16 + lane / 4;
    float      s[SLOTS][N][4], logit[2][2], less[2][2]; /* of the sources, and the next float below */
    int        count[2][2] = {}, sees[2][2], ties[2][2];
    Turn       turn = {0, p.stages, 0};
    auto       release = [&](int stage) {
        __syncwarp();
        if (lane == 0) bar_arrive(empty + stage);
    };
#if __CUDA_ARCH_FEAT_SM90_ALL
    const uint64_t q_first = descriptor(shared_address(q) + first[0] * 128, 1); /* offsets are added: it takes time */
    const uint64_t q_second = descriptor(shared_address(q) + first[1] * 128, 1);
    const uint64_t k_ring = descriptor(shared_address(ring), 1);
#endif
    auto multiply = [&](float (&x)[N][4], int j, int stage, int key) { /* rows of slot j */
        if constexpr (WGMMA) {
#if __CUDA_ARCH_FEAT_SM90_ALL
            const uint64_t q_at = j ? q_second : q_first, k_at = k_ring + (uint32_t)(stage * (S::STAGE >> 4));
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < D / 16; c++)
                wgmma_scores<T>(x, q_at + (c / 4 * M * 8 + c % 4 * 2), k_at + (c / 4 * TILE * 8 + c % 4 * 2), c > 0);
            wgmma_commit();
#endif
        } else {
#pragma unroll
            for (int n = 0; n < N; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.0f;
            scores16<T, D, M, N, 128>(x, q, first[j] + warp % 4 * 16, ring + stage * S::STAGE, key);
        }
    };
    auto look = [&](const Stretch &y) { /* what the rows see of it */
        const Attention &a = p.questions[most(y.x, 0)];
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const Asked who = asked(p, b, first[j] + r + 8 * i);
                sees[j][i] = (int)(y.x < 0 ? p.heads[g].rows : who.x == y.x ? visible(a.tail, a.N_q, who.i) : 0);
                ties[j][i] = y.x < 0 ? (int)who.source : 0;
            }
        }
    };
    auto score = [&](const float (&x)[N][4], int j, int at) {
        const int see[2] = {sees[j][0] - at, sees[j][1] - at};
        const int tie[2] = {ties[j][0] - at, ties[j][1] - at};
        count_keys<N>(count[j], x, logit[j], less[j], see, tie);
    };

    /* the queries, and the logits of their sources */
    gather_queries<T, D, M>(p, b, g, q, threads);
    for (int half = 0; half < halves; half++, turn.next()) {
        bar_wait(full + turn.stage, turn.phase);
        gather_sources<T, D, HALF>(p, b, g, half, ring + turn.stage * S::STAGE, threads);
        asm volatile("cp.async.wait_all;" ::: "memory");
#if __CUDA_ARCH__ >= 900
        fence_async();
#endif
        named_sync(1, threads);
        if (half == 0 || two) {
            float own_s[2] = {0.0f, 0.0f};
            const int key = own * 64 / S::KEYS * S::KEYS; /* the rows' own columns are among those from key on */
            multiply(s[0], half, turn.stage, key);
#if __CUDA_ARCH_FEAT_SM90_ALL
            if constexpr (WGMMA) wgmma_wait<0>(), settle(s[0]);
#endif
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (8 * n == own * 64 - key + warp % 4 * 16 + 8 * i)
                        own_s[i] = lane >> 2 & 1 ? s[0][n][2 * i + 1] : s[0][n][2 * i];
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                logit[1][i] = __shfl_sync(~0u, own_s[i], (lane & ~3) | lane >> 3);
                less[1][i] = below(logit[1][i]);
                if (half == 0) logit[0][i] = logit[1][i], less[0][i] = less[1][i];
            }
        }
        release(turn.stage);
    }

    for (Stretch y = stretch(p, g, -1, part); y.x <= last_x; y = stretch_after(p, g, y, first_x)) {
        if (!y.n) continue;
        look(y);
        if constexpr (WGMMA) {
#if __CUDA_ARCH_FEAT_SM90_ALL
            /* jobs: a tile's two groups of rows one after the other, or tiles one after another, in turns of slots */
            const int jobs = y.n << two;
            Turn      ahead = turn;
            auto      start = [&](int j) {
                if (!two || j == 0) bar_wait(full + ahead.stage, ahead.phase);
                multiply(s[j], j, ahead.stage, 0);
                if (!two || j == 1) ahead.next();
            };
            auto end = [&](int j, int i) {
                settle(s[j]);
                if (!two || j == 1) release(turn.stage), turn.next();
                score(s[j], j, (y.tile + (i >> two) * p.ctas) * TILE);
            };
            int i = 0;
            start(0);
            for (; i + 2 < jobs; i += 2) {
                start(1);
                wgmma_wait<1>();
                end(0, i);
                start(0);
                wgmma_wait<1>();
                end(1, i + 1);
            }
            if (i + 1 < jobs) {
                start(1);
                wgmma_wait<1>();
                end(0, i++);
                wgmma_wait<0>();
                end(1, i);
            } else {
                wgmma_wait<0>();
                end(0, i);
            }
#endif
        } else {
            for (int i = 0; i < y.n; i++, turn.next()) {
                bar_wait(full + turn.stage, turn.phase);
                for (int key = 0; key < TILE; key += S::KEYS) {
                    multiply(s[0], 0, turn.stage, key);
                    if (key + S::KEYS == TILE) release(turn.stage);
                    score(s[0], 0, (y.tile + i * p.ctas) * TILE + key);
                }
            }
        }
    }

    /* ranks, from -1 on */
    let_next_start(); /* until here ranks need not have been cleared */
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int total = count[j][i] + (two ? 0 : count[1][i]), row = first[j] + r + 8 * i;
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if ((lane & 3) || row >= b.rows || (j && !two)) continue;
            const Asked   who = asked(p, b, row);
            const int64_t query = p.questions[who.x].first_row + who.i;
            atomicAdd((unsigned long long *)p.rank + query * p.H + head_of(p, b, g, row),
                      (unsigned long long)(total + (part == 0)));
        }
    }
}

__global__ void no_ranks(int64_t *rank, int64_t n) {
    let_next_start();
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (int64_t)gridDim.x * 256) rank[i] = -1;
}

/* ---- launcher ---- */

/* The same attention with values that nobody reads. */
dkv_attention keys_only(const dkv_attention &a) {
    dkv_attention keys = a;
    keys.d_v = a.context.packed ? a.context.packed->d_v : a.d_k;
    keys.context.v = a.context.k;
    keys.tail.v = a.tail.k;
    keys.out = a.q;
    keys.lse = NULL;
    keys.softcap = 0.0f;
    return keys;
}

bool same_context(const dkv_attention &a, const dkv_attention &b) {
    const dkv_tensor &x = a.context.k, &y = b.context.k;
    if (a.H != b.H || a.Hkv != b.Hkv || a.d_k != b.d_k || a.context.packed != b.context.packed) return false;
    return a.context.packed || (a.context.n == b.context.n && x.data == y.data && x.type == y.type &&
           x.stride_token == y.stride_token && x.stride_head == y.stride_head && x.stride_dim == y.stride_dim);
}

/* Of all: queries; context rows that every head has; keys of a head, at most, with every tail. */
struct Questions { Batch b; int64_t queries, rows, keys; };

dkv_result questions_read(Questions *out, const dkv_attention *a, int64_t n, const Device &dev) {
    int64_t longest = 0;
    *out = Questions{{DKV_F32, 0, 64, 0, dev.sm90, 0, 0, 0, 0, 0}, 0, INT64_MAX, 0};
    for (int64_t i = 0; i < n; i++) {
        dkv_result r = check_attention(&out->b, keys_only(a[i]));
        if (r) return r;
        if (type_bytes(out->b.type) == 1) return DKV_ERR_TYPE;
        if (!same_context(a[0], a[i])) return DKV_ERR_SHAPE;
        out->queries += a[i].N_q;
        out->keys += a[i].tail.n + TILE;
    }
    for (int g = 0; g < (n ? a->Hkv : 0); g++) {
        const int64_t rows = a->context.packed ? a->context.packed->rows[g] : a->context.n;
        out->rows = least(out->rows, rows);
        longest = most(longest, rows);
    }
    out->keys += longest;
    if (out->b.type == DKV_F32) out->b.type = DKV_BF16; /* nobody has a key */
    typedef ProbeShape<256, false> Largest; /* others take what every device has */
    if (n && a->d_k > 128 && Largest::Q + 256 + 2 * Largest::STAGE > dev.shared) return DKV_ERR_DEVICE;
    if (n && (out->queries * a->H > 1 << 30 || out->keys > INT32_MAX || out->keys * a->Hkv / TILE > INT32_MAX))
        return DKV_ERR_SHAPE;
    return DKV_OK;
}

int64_t score_bytes(const dkv_attention *a, int64_t n, int64_t queries) {
    return n * (int64_t)sizeof(Attention) + (n ? a->Hkv : 0) * (int64_t)sizeof(Head) + queries * (int64_t)sizeof(Asked);
}

template <class T, int D, bool WGMMA>
dkv_result launch_probe(Probe p, const Parcel &parcel, const Device &dev, int64_t keys, cudaStream_t stream) {
    typedef ProbeShape<D, WGMMA> S;
    int64_t                      best = INT64_MAX, tiles = ceil_div(keys, TILE);
    p.ctas = 1;
    p.blocks = (int)ceil_div((int64_t)p.n * p.G, S::M);
    p.stages = least((int)S::MOST_STAGES, (dev.shared - S::Q - 256) / S::STAGE);
    for (int i = 1; i <= dev.sms; i++) { /* rounds of CTAs times what one does; to begin is worth 4 tiles */
        int64_t time = ceil_div((int64_t)i * p.blocks * p.Hkv, dev.sms) * (ceil_div(tiles, i) + 4);
        if (time < best) best = time, p.ctas = i;
    }
    return launch(probe<T, D, WGMMA>, dim3((unsigned)(p.ctas * p.blocks * p.Hkv)), S::THREADS,
                  p.stages * S::STAGE + S::Q + 256, dev.sm90, stream, p, parcel);
}

template <class T>
dkv_result launch_probe_d(const Probe &p, const Parcel &parcel, const Device &dev, int64_t keys, cudaStream_t stream) {
    auto launch = p.d > 128 ? launch_probe<T, 256, false> : p.d > 64 ? launch_probe<T, 128, false>
                                                                     : launch_probe<T, 64, false>;
    if (dev.wgmma && p.tma && p.d <= 64) launch = launch_probe<T, 64, true>;
    else if (dev.wgmma && p.tma && p.d <= 128) launch = launch_probe<T, 128, true>;
    return launch(p, parcel, dev, keys, stream);
}

} /* namespace */

extern "C" dkv_result dkv_cuda_score_size(size_t *ws_bytes, const dkv_attention *a, int64_t n) {
    Device     dev;
    Questions  q;
    dkv_result r = device_read(&dev);
    if (!r) r = questions_read(&q, a, n, dev);
    if (!r) *ws_bytes = (size_t)score_bytes(a, n, q.queries);
    return r;
}

extern "C" dkv_result dkv_cuda_score(int64_t *rank, const dkv_attention *a, int64_t n, const int64_t *source, void *ws,
                                     size_t ws_bytes, void *stream) {
    Device     dev;
    Questions  q;
    Post       post(ws, stream);
    Attention  x;
    Probe      p = {};
    dkv_result r = device_read(&dev);
    if (!r) r = questions_read(&q, a, n, dev);
    for (int64_t i = 0; i < n && !r; i++) r = describe(&x, keys_only(a[i]), q.b, NULL); /* before any write */
    if (r) return r;
    if (ws_bytes < (size_t)score_bytes(a, n, q.queries)) return DKV_ERR_CAPACITY;
    if ((uintptr_t)ws % 128) return DKV_ERR_ALIGN;
    for (int64_t i = 0; i < q.queries; i++) {
        if (source[i] < -1 || source[i] >= q.rows) return DKV_ERR_SHAPE;
        p.n += source[i] >= 0;
    }
    if (!q.queries) return DKV_OK;
    const int64_t ranks = q.queries * a->H, bytes = score_bytes(a, n, p.n);
    const bool    small = bytes < (int64_t)sizeof post.parcel; /* goes with the launch */
    int64_t first = 0;
    for (int64_t i = 0; i < n; i++) {
        describe(&x, keys_only(a[i]), q.b, NULL);
        x.first_row = (int32_t)first;
        first += a[i].N_q;
        post.put(&x, sizeof x);
    }
    first = 0;
    for (int g = 0; g < a->Hkv; g++) {
        Head h = {a->context.packed ? a->context.packed->rows[g] : a->context.n, first};
        first += round_up(h.rows, TILE);
        post.put(&h, sizeof h);
    }
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < a[i].N_q; j++, source++) {
            Asked y = {(int32_t)i, (int32_t)j, *source};
            if (*source >= 0) post.put(&y, sizeof y);
        }
    }
    if (!small) post.flush();
    const dim3 grid((unsigned)least(ceil_div(ranks, 256), (int64_t)dev.sms));
    r = post.result;
    if (!r) r = launch(no_ranks, grid, 256, 0, dev.sm90, post.stream, rank, ranks);
    if (r || !p.n) return r;
    p.questions = small ? NULL : (const Attention *)ws;
    p.n_questions = (int32_t)n;
    p.bytes = (int32_t)least(bytes, (int64_t)1 << 20);
    p.rank = rank;
    p.H = a->H;
    p.Hkv = a->Hkv;
    p.G = a->H / a->Hkv;
    p.d = a->d_k;
    p.tma = q.b.tma;
    return (q.b.type == DKV_BF16 ? launch_probe_d<__nv_bfloat16> : launch_probe_d<__half>)(
        p, post.parcel, dev, q.keys, (cudaStream_t)stream);
}

/* ==========================================================================
   [GATES]  Hard Concrete gates: draws, unions, penalties, AdamW, Top-K
   in:  logits, counters of the noise, gradients by ln u
   out: the CPU's bits: the arithmetic is the header's, what else feeds a sum is rounded by itself, and sums over
        gates are taken in one order whatever the device
   ========================================================================== */

namespace {

/* ---- draws and unions ------------------------------------------------------------------------------------------

   math    z of every gate of a cell (layer, KV head, bin), u = 1 - prod(1 - z), ln u; backward du/dz by products of
           the gates before and after
   shapes  ln u [contexts][L][Hkv][D], a [L][Hkv][gates of a cell][D]
   CTA     128 cells; forward of one context; backward 8 gates of each, contexts one after another
   why     noise is drawn again in backward, not kept: 254 contexts of the 8B shape at 128K (1,037,312 gates) take 2.8
           ms forward and 3.4 ms backward on an H200, z and dz alone would be 2 GB
   limits  2^31 - 1 gates; groups above 8 draw their other gates once more for every 8                             */

struct Gates { uint32_t cells, D, G; }; /* G: gates of a cell, D apart */
DKV__DEVICE uint32_t first_gate(const Gates &g, uint32_t cell) { return cell + cell / g.D * (g.G - 1) * g.D; }

constexpr int OWN = 8, CELLS = 128; /* gates of a cell that a thread keeps; cells of a CTA */

__global__ void __launch_bounds__(CELLS) gates_union(float *u, float *ln_u, Gates g, const float *a, dkv_draw draw,
                                                     int64_t n) {
    const uint32_t cell = blockIdx.x * CELLS + threadIdx.x;
    if (cell >= g.cells) return;
    for (int64_t i = blockIdx.y; i < n; i += gridDim.y) {
        float    x = 0.0f, slope;
        uint32_t gate = first_gate(g, cell);
        for (uint32_t k = 0; k < g.G; k++, gate += g.D) {
            float noise = dkv__gate_noise(draw.seed, draw.step, draw.context + (uint32_t)i, gate);
            x = dkv__gate_union(x, dkv__gate_z(a[gate], noise, &slope));
        }
        if (u) u[i * g.cells + cell] = x;
        if (ln_u) ln_u[i * g.cells + cell] = x < DKV__GATE_OPEN ? -INFINITY : dkv__gate_log(x);
    }
}

/* What a thread knows of its gates k0 .. k0 + 7 of a cell. In shared memory, for registers want unrolled loops and
   eight copies of the draw. */
struct Own { /* rest: the product of 1 - x over the others */
    float x[OWN][CELLS], slope[OWN][CELLS], rest[OWN][CELLS], sum[OWN][CELLS];
};

/* draw(k, &slope) gives gate k's x, z or p. Fills x, slope and rest; returns the union. */
template <class F> DKV__DEVICE float draw_cell(Own &own, uint32_t k0, uint32_t G, const F &draw) {
    float u = 0.0f, before = 1.0f, after = 1.0f, slope;
    for (uint32_t k = 0; k < G; k++) {
        const float x = draw(k, &slope);
        if (k - k0 < OWN) {
            own.x[k - k0][threadIdx.x] = x;
            own.slope[k - k0][threadIdx.x] = slope;
            own.rest[k - k0][threadIdx.x] = before;
        }
        u = dkv__gate_union(u, x);
        before *= 1.0f - x;
    }
    for (uint32_t k = G; k-- > k0;) {
        const float x = k - k0 < OWN ? own.x[k - k0][threadIdx.x] : draw(k, &slope);
        if (k - k0 < OWN) own.rest[k - k0][threadIdx.x] *= after;
        after *= 1.0f - x;
    }
    return u;
}

__global__ void __launch_bounds__(CELLS) gates_union_backward(float *da, Gates g, const float *a, dkv_draw draw,
                                                              int64_t n, const float *d_ln_u) {
    __shared__ Own own;
    const uint32_t cell = blockIdx.x * CELLS + threadIdx.x;
    const uint32_t k0 = blockIdx.y * OWN, mine = least(g.G - k0, (uint32_t)OWN);
    if (cell >= g.cells) return;
    const uint32_t first = first_gate(g, cell);
    float         *to = da + first + k0 * g.D;
    for (uint32_t j = 0; j < mine; j++) own.sum[j][threadIdx.x] = to[j * g.D];
    for (int64_t i = 0; i < n; i++) {
        const float u = draw_cell(own, k0, g.G, [&](uint32_t k, float *dz) {
            const uint32_t gate = first + k * g.D;
            return dkv__gate_z(a[gate], dkv__gate_noise(draw.seed, draw.step, draw.context + (uint32_t)i, gate), dz);
        });
        if (u < DKV__GATE_OPEN) continue;
        const float du = d_ln_u[i * g.cells + cell] / u;
        for (uint32_t j = 0; j < mine; j++) {
            float &sum = own.sum[j][threadIdx.x];
            sum = __fadd_rn(sum, du * own.rest[j][threadIdx.x] * own.slope[j][threadIdx.x]);
        }
    }
    for (uint32_t j = 0; j < mine; j++) to[j * g.D] = own.sum[j][threadIdx.x];
}

/* ---- sums over all gates: a fixed grid, each CTA's partial in its place ---- */

constexpr int PARTS = 512, THREADS = 256; /* CTAs of such a grid, also for ranking; their threads, where not CELLS */

/* Of all threads' x, to all of them. */
template <class T> DKV__DEVICE T sum_of_threads(T x) {
    __shared__ T warps[32];
    for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (uint32_t i = 0; i < blockDim.x / 32; i++) x += warps[i];
    __syncthreads();
    return x;
}
template <class T> DKV__DEVICE T sum_of_parts(const T *parts, uint32_t n) {
    T x = 0;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) x += parts[i];
    return sum_of_threads(x);
}

__global__ void finish_mean(double *mean, const double *parts, double count) {
    const double sum = sum_of_parts(parts, PARTS);
    if (threadIdx.x == 0) *mean = sum / count;
}

/* Eight gates of a cell at a time, in turns; physical sums count a cell by its first eight. */
__global__ void __launch_bounds__(CELLS) gates_penalty(double *parts, float *da, Gates g, const float *a, int logical,
                                                       double weight) {
    __shared__ Own own;
    const uint64_t rows = (g.G + OWN - 1) / OWN, units = rows * ceil_div(g.cells, CELLS);
    double         sum = 0.0;
    for (uint64_t unit = blockIdx.x; unit < units; unit += PARTS) {
        const uint32_t cell = (uint32_t)(unit / rows) * CELLS + threadIdx.x, k0 = (uint32_t)(unit % rows) * OWN;
        if (cell >= g.cells) continue;
        const uint32_t first = first_gate(g, cell), mine = least(g.G - k0, (uint32_t)OWN);
        const float    u = draw_cell(own, k0, g.G,
                                     [&](uint32_t k, float *slope) { return dkv__gate_p(a[first + k * g.D], slope); });
        if (!logical && k0 == 0) sum += (double)u;
        for (uint32_t j = 0; j < mine; j++) {
            if (logical) sum += (double)own.x[j][threadIdx.x];
            double to = (double)own.slope[j][threadIdx.x] * (logical ? 1.0 : (double)own.rest[j][threadIdx.x]);
            const uint32_t gate = first + (k0 + j) * g.D;
            if (da) da[gate] = __fadd_rn(da[gate], (float)__dmul_rn(weight, to));
        }
    }
    sum = sum_of_threads(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

/* ---- optimizer ---- */

__global__ void __launch_bounds__(THREADS) sum_squares(double *parts, const float *x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += PARTS * THREADS)
        sum += (double)x[i] * (double)x[i];
    sum = sum_of_threads(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(THREADS) gates_clip(double *norm, float *x, int64_t n, const double *parts) {
    const double all = sqrt(sum_of_parts(parts, PARTS)), over = all + 1e-6;
    if (norm && blockIdx.x == 0 && threadIdx.x == 0) *norm = all;
    if (over <= 1.0) return;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += PARTS * THREADS)
        x[i] = (float)((double)x[i] / over);
}

__global__ void __launch_bounds__(THREADS) gates_adamw(float *a, float *m, float *v, const float *da, int64_t n,
                                                       double bias1, double bias2, double rate) {
    const double b1 = 0.9, b2 = 0.999;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += PARTS * THREADS) {
        const double x = (double)da[i];
        m[i] = (float)__dadd_rn(__dmul_rn(b1, (double)m[i]), __dmul_rn(1.0 - b1, x));
        v[i] = (float)__dadd_rn(__dmul_rn(b2, (double)v[i]), __dmul_rn(__dmul_rn(1.0 - b2, x), x));
        const double root = sqrt((double)v[i] / bias2) + 1e-8;
        a[i] = (float)__dsub_rn((double)a[i], __dmul_rn(rate, (double)m[i] / bias1) / root);
    }
}

/* ---- exact Top-K -----------------------------------------------------------------------------------------------

   math    keys are floats as unsigned integers in their order; the K-th is found byte by byte from four histograms,
           then ties are taken in the order of their index
   CTA     the same stretch of keys in all of six launches; histograms in shared memory, added up as integers
   why     a million keys are in L2 after the first reading: 44 us, mostly launches
   limits  2^31 - 1 keys                                                                                           */

struct Ranking { /* keys: of gates, or of cells by their best gate; by p instead of a */
    Gates        g;
    const float *a;
    uint32_t     n, K, chunk; /* keys, those wanted, a CTA's */
    int          cells, by_p;
    uint32_t    *bins, *ties; /* [4][256], zero before; [PARTS] keys of a CTA that equal the K-th */
};

DKV__DEVICE uint32_t rank_key(const Ranking &r, uint32_t i) { /* as dkv__rank_key */
    const float *first = r.a + (r.cells ? first_gate(r.g, i) : i);
    float        slope, x = first[0];
    for (uint32_t k = 1; r.cells && k < r.g.G; k++) x = first[k * r.g.D] > x ? first[k * r.g.D] : x;
    if (r.by_p) x = dkv__gate_p(x, &slope);
    const uint32_t bits = __float_as_uint(x + 0.0f); /* -0 counts as 0 */
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The K-th key as far as `passes` bytes; ties: how many of those that begin with it are among the K. */
struct Cut { uint32_t key, ties; };
DKV__DEVICE Cut rank_cut(const Ranking &r, int passes) {
    __shared__ Cut cut;
    if (threadIdx.x < 32) {
        const int lane = (int)threadIdx.x;
        Cut       c = {0, r.K};
        for (int pass = 0; pass < passes; pass++) {
            const uint32_t *top = r.bins + 256 * pass + 255 - 8 * lane; /* a lane has eight bins, lane 0 the highest */
            uint32_t        own = 0, byte = 255u - 8u * (uint32_t)lane;
            for (int j = 0; j < 8; j++) own += top[-j];
            uint32_t upto = own;
            for (int j = 1; j < 32; j <<= 1) {
                uint32_t y = __shfl_up_sync(~0u, upto, j);
                upto += lane >= j ? y : 0;
            }
            const int at = __ffs((int)__ballot_sync(~0u, upto >= c.ties)) - 1;
            uint32_t  left = c.ties - (upto - own);
            for (; lane == at && left > *top; top--, byte--) left -= *top;
            c.ties = __shfl_sync(~0u, left, at);
            c.key |= __shfl_sync(~0u, byte, at) << (24 - 8 * pass);
        }
        if (lane == 0) cut = c;
    }
    __syncthreads();
    return cut;
}

__global__ void __launch_bounds__(THREADS) rank_bins(Ranking r, int pass) {
    __shared__ uint32_t bins[256];
    const uint32_t      known = pass ? ~0u << (32 - 8 * pass) : 0, begin = blockIdx.x * r.chunk;
    const Cut           cut = rank_cut(r, pass);
    bins[threadIdx.x] = 0;
    __syncthreads();
    for (uint32_t i = begin + threadIdx.x; i < least(begin + r.chunk, r.n); i += THREADS) {
        uint32_t key = rank_key(r, i);
        if ((key & known) == cut.key) atomicAdd(&bins[key >> (24 - 8 * pass) & 255u], 1u);
    }
    __syncthreads();
    if (bins[threadIdx.x]) atomicAdd(r.bins + 256 * pass + threadIdx.x, bins[threadIdx.x]);
}

__global__ void __launch_bounds__(THREADS) rank_ties(Ranking r) {
    const Cut      cut = rank_cut(r, 4);
    const uint32_t begin = blockIdx.x * r.chunk;
    uint32_t       n = 0;
    for (uint32_t i = begin; i < least(begin + r.chunk, r.n); i += THREADS)
        n += (uint32_t)__syncthreads_count(i + threadIdx.x < r.n && rank_key(r, i + threadIdx.x) == cut.key);
    if (threadIdx.x == 0) r.ties[blockIdx.x] = n;
}

__global__ void __launch_bounds__(THREADS) rank_write(Ranking r, unsigned char *M, uint32_t copies) {
    __shared__ uint32_t warps[THREADS / 32];
    const Cut           cut = rank_cut(r, 4);
    const uint32_t      begin = blockIdx.x * r.chunk, warp = threadIdx.x / 32, below = (1u << threadIdx.x % 32) - 1u;
    uint32_t            before = sum_of_parts(r.ties, blockIdx.x); /* ties of lower index */
    for (uint32_t i0 = begin; i0 < least(begin + r.chunk, r.n); i0 += THREADS) {
        const uint32_t i = i0 + threadIdx.x, key = i < r.n ? rank_key(r, i) : 0;
        const uint32_t ties = __ballot_sync(~0u, i < r.n && key == cut.key);
        if (threadIdx.x % 32 == 0) warps[warp] = (uint32_t)__popc(ties);
        __syncthreads();
        uint32_t own = before + (uint32_t)__popc(ties & below);
        for (uint32_t j = 0; j < THREADS / 32; j++) {
            own += j < warp ? warps[j] : 0;
            before += warps[j];
        }
        __syncthreads();
        const unsigned char in = key > cut.key || (key == cut.key && own < cut.ties);
        for (uint32_t h = 0; i < r.n && h < copies; h++) M[(i / r.g.D * copies + h) * r.g.D + i % r.g.D] = in;
    }
}

__global__ void __launch_bounds__(CELLS) gates_or(unsigned char *open, Gates g, const unsigned char *M) {
    const uint32_t cell = blockIdx.x * CELLS + threadIdx.x;
    if (cell >= g.cells) return;
    unsigned char any = 0;
    for (uint32_t k = 0; k < g.G; k++) any |= M[first_gate(g, cell) + k * g.D];
    open[cell] = any;
}

/* ---- launchers ---- */

/* G: gates of a cell, one if tied; or bits of M. */
dkv_result gates_read(Gates *out, const dkv_gates *g, bool bits) {
    dkv_result r = dkv_gates_check(g);
    if (r) return r;
    const int64_t cells = (int64_t)g->L * g->Hkv * g->D, all = (int64_t)g->L * g->H * g->D;
    if (all > INT32_MAX) return DKV_ERR_SHAPE;
    *out = Gates{(uint32_t)cells, (uint32_t)g->D, g->tied && !bits ? 1u : (uint32_t)(g->H / g->Hkv)};
    return DKV_OK;
}
unsigned grid_of(const Gates &g) { return (unsigned)ceil_div(g.cells, CELLS); }

} /* namespace */

extern "C" dkv_result dkv_cuda_gates_union(float *u, float *ln_u, const dkv_gates *g, const float *a, dkv_draw draw,
                                           int64_t n, void *stream) {
    Gates      x;
    dkv_result r = gates_read(&x, g, false);
    if (r) return r;
    if (n < 0 || n > UINT32_MAX) return DKV_ERR_SHAPE;
    if (n == 0) return DKV_OK;
    const dim3 grid(grid_of(x), (unsigned)least(n, (int64_t)65535));
    return launch(gates_union, grid, CELLS, stream, u, ln_u, x, a, draw, n);
}

extern "C" dkv_result dkv_cuda_gates_union_backward(float *da, const dkv_gates *g, const float *a, dkv_draw draw,
                                                    int64_t n, const float *d_ln_u, void *stream) {
    Gates      x;
    dkv_result r = gates_read(&x, g, false);
    if (r) return r;
    if (n < 0 || n > UINT32_MAX) return DKV_ERR_SHAPE;
    const dim3 grid(grid_of(x), (unsigned)ceil_div(x.G, OWN));
    return launch(gates_union_backward, grid, CELLS, stream, da, x, a, draw, n, d_ln_u);
}

extern "C" dkv_result dkv_cuda_gates_penalty(double *mean, float *da, const dkv_gates *g, const float *a,
                                             dkv_budget budget, float lambda, void *ws, void *stream) {
    Gates      x;
    dkv_result r = gates_read(&x, g, false);
    if (r) return r;
    const int    logical = budget == DKV_BUDGET_LOGICAL;
    const double count = logical ? (double)x.cells * x.G : (double)x.cells;
    r = launch(gates_penalty, PARTS, CELLS, stream, (double *)ws, da, x, a, logical, (double)lambda / count);
    return r || !mean ? r : launch(finish_mean, 1, PARTS, stream, mean, (const double *)ws, count);
}

extern "C" dkv_result dkv_cuda_gates_clip(double *norm, float *x, int64_t n, void *ws, void *stream) {
    dkv_result r = launch(sum_squares, PARTS, THREADS, stream, (double *)ws, x, n);
    return r ? r : launch(gates_clip, PARTS, THREADS, stream, norm, x, n, (const double *)ws);
}

extern "C" dkv_result dkv_cuda_gates_adamw(float *a, float *m, float *v, const float *da, int64_t n, int64_t t,
                                           double rate, void *stream) {
    const double bias1 = 1.0 - exp((double)t * log(0.9)), bias2 = 1.0 - exp((double)t * log(0.999));
    if (t < 1) return DKV_ERR_FIELD;
    return launch(gates_adamw, PARTS, THREADS, stream, a, m, v, da, n, bias1, bias2, rate);
}

extern "C" dkv_result dkv_cuda_gates_top(unsigned char *M, int64_t *K, const dkv_gates *g, const float *a,
                                         dkv_budget budget, double rho, int by_p, void *ws, void *stream) {
    Ranking    x = {};
    dkv_result r = gates_read(&x.g, g, false);
    if (r) return r;
    if (!(rho >= 0.0 && rho <= 1.0)) return DKV_ERR_FIELD;
    x.cells = g->tied || budget == DKV_BUDGET_PHYSICAL;
    const uint32_t copies = x.cells ? (uint32_t)(g->H / g->Hkv) : 1;
    x.n = x.cells ? x.g.cells : x.g.cells * x.g.G;
    x.K = (uint32_t)rint(rho * (double)x.n);
    x.chunk = (uint32_t)round_up(ceil_div(x.n, PARTS), THREADS);
    x.a = a;
    x.by_p = by_p;
    x.bins = (uint32_t *)ws;
    x.ties = x.bins + 4 * 256;
    const unsigned parts = (unsigned)ceil_div(x.n, x.chunk);
    r = did(cudaMemsetAsync(x.bins, 0, 4 * 256 * 4, (cudaStream_t)stream));
    for (int pass = 0; pass < 4 && !r; pass++) r = launch(rank_bins, parts, THREADS, stream, x, pass);
    if (!r) r = launch(rank_ties, parts, THREADS, stream, x);
    if (!r) r = launch(rank_write, parts, THREADS, stream, x, M, copies);
    if (!r) *K = (int64_t)x.K * copies;
    return r;
}

extern "C" dkv_result dkv_cuda_gates_or(unsigned char *open, const dkv_gates *g, const unsigned char *M,
                                        void *stream) {
    Gates      x;
    dkv_result r = gates_read(&x, g, true);
    if (r) return r;
    return launch(gates_or, grid_of(x), CELLS, stream, open, x, M);
}

/* ==========================================================================
   [GATES]  gated attention of suffixes over a shared context, forward and backward
   in:  K and V of whole contexts; ln u and open bits of (KV head, bin) on the device; queries, keys, values of suffixes
   out: outputs and LSEs; gradients by queries, by the suffixes' keys and values, by ln u
   ========================================================================== */

namespace {

/* ---- contexts in device memory, and what a launch prepares of them ----------------------------------------------

   A context's keys are cut into tiles of at most 128 that never cross a bin, so that a tile has one gate: sink, each
   bin and recent backwards from their ends. Per softmax (relaxed, and straight-through also the open one) and KV head
   the tiles with an open gate are listed before each pass; a line of all lists, and behind each the suffixes' own
   tiles, is what shares are cut from: equal numbers of open tiles for everyone, whatever the gates are.

   Query rows of a KV head are (suffix, query, head of the group) over all suffixes of the context, gathered into dense
   blocks of M rows, as are the suffixes' keys and values, each suffix from a row of its own that is a multiple of 128.
   blocks CTAs side by side run through the same tiles, so K and V come from memory once.                           */

constexpr int   CHUNK = 64;                   /* rows of a part that is gathered, and of a box of TMA here */
constexpr int   KEYS = 16;                    /* of a suffix whose gradients a CTA makes */

struct Tile { int32_t row, len, bin; };              /* keys row .. row + len - 1 of the context; bin -1: no gate */
struct Open { int32_t row, len, tile; float bias; }; /* one that takes part: bias = log2 u */
struct OwnTile { int32_t row, first, last, edge; };  /* own keys row ..; query i, first .. last - 1, sees i - edge */
struct Question { int32_t suffix, i; };              /* a query of a context: which one of which suffix */
struct Part { int32_t of, g, row; };                 /* rows: context or suffix, KV head, the first of them */

struct alignas(128) GatedContext {
    CUtensorMap          k, v;                               /* for TMA */
    dkv_tensor           source[2];                          /* the same without */
    const float         *ln_u;
    const unsigned char *open;
    float               *d_ln_u;
    int64_t              T_c, W, S, R;
    int64_t              first_tile, first_open, first_own;  /* of its tables */
    int64_t              first_row, first_key;               /* of what is gathered */
    int32_t              D, H, Hkv, G, d_k, d_v, queries, first_question, blocks, first_block, tiles;
    int32_t              own_tiles, own_keys;                /* of a block, of a KV head */
    float                scale, times;                       /* of logits, and in powers of 2 */
};

struct Suffix {
    dkv_suffix x;
    int32_t    context, first, key; /* first query, and gathered key, among the context's */
};

struct GatedWork { /* kernel parameter */
    CUtensorMap         q, d_out, own_k, own_v;
    const GatedContext *contexts;
    const Suffix       *suffixes;
    const Question     *questions;
    const OwnTile      *own;       /* [context][block][own_tiles] */
    const int32_t      *own_count; /* [context][block] of them used */
    const Tile         *tiles;     /* [context][tiles] */
    const int2         *heads;     /* [heads] context, KV head */
    const Part         *q_parts, *own_parts, *key_parts; /* of CHUNK rows, CHUNK rows, KEYS keys */
    Open               *opens;     /* [side][head][tiles] */
    int                *before;    /* [side][heads + 1] units */
    int                *arrived;   /* lists made, zero between passes */
    char               *q_rows, *d_out_rows, *own_k_rows, *own_v_rows;
    float4             *stats;     /* of gathered rows: relaxed LSE / ln 2, delta, 2^-lift, LSE / ln 2 */
    float              *slots;     /* [2 * CTAs] parts of items */
    float              *partial;   /* [head][tile][block][warp] sums of dS */
    int64_t             opens_of_side;
    int                 n_heads, sides, groups, blocks, n_q_parts, n_own_parts, n_key_parts, most_cells;
    int                 sms, sm90, wgmma;
};

/* How many tiles the parts of a context are cut into: sink, the farthest bin, each of the other bins, recent. */
struct Cutting { int64_t far, bins, farthest; int sink, of_farthest, of_bin, recent; };
__host__ DKV__DEVICE Cutting cutting(int64_t T_c, int64_t W, int64_t S, int64_t R) {
    Cutting x = {T_c - R, 0, 0, 0, 0, 0, (int)ceil_div(T_c, TILE)};
    if (S >= x.far) return x; /* all sink and recent: as if all were recent */
    x.bins = ceil_div(x.far - S, W);
    x.farthest = x.far - S - (x.bins - 1) * W;
    x.sink = (int)ceil_div(S, TILE);
    x.of_farthest = (int)ceil_div(x.farthest, TILE);
    x.of_bin = (int)ceil_div(W, TILE);
    x.recent = (int)ceil_div(R, TILE);
    return x;
}
__host__ DKV__DEVICE int64_t all_tiles(const Cutting &x) {
    return x.sink + x.of_farthest + (x.bins ? x.bins - 1 : 0) * x.of_bin + x.recent;
}
/* Bin b's n tiles from first on; none if the context does not reach it. */
DKV__DEVICE void tiles_of_bin(const Cutting &x, int b, int *first, int *n) {
    const bool farthest = b == x.bins - 1;
    *n = b >= x.bins ? 0 : farthest ? x.of_farthest : x.of_bin;
    *first = farthest ? x.sink : x.sink + x.of_farthest + (int)(x.bins - 2 - b) * x.of_bin;
}
/* Tile t: within its part, tiles end where the part ends, less whole tiles. */
DKV__DEVICE Tile tile_at(const GatedContext &c, int t) {
    const Cutting x = cutting(c.T_c, c.W, c.S, c.R);
    int64_t       begin = 0, end = c.T_c;
    int           bin = -1, n = x.recent, k = t - (int)(all_tiles(x) - x.recent);
    if (x.bins && k >= 0) {
        begin = x.far;
    } else if (t < x.sink) {
        end = c.S, n = x.sink, k = t;
    } else if (x.bins && k < 0) {
        const int later = t - x.sink - x.of_farthest;
        bin = (int)x.bins - 1 - (later < 0 ? 0 : 1 + later / x.of_bin);
        end = x.far - bin * c.W, begin = most(end - c.W, c.S);
        n = later < 0 ? x.of_farthest : x.of_bin, k = later < 0 ? t - x.sink : later % x.of_bin;
    }
    const int64_t last = end - (int64_t)(n - 1 - k) * TILE, row = most(begin, last - TILE);
    return Tile{(int32_t)row, (int32_t)(last - row), bin};
}
__global__ void make_tiles(const GatedContext *contexts, Tile *tiles) {
    const GatedContext &c = contexts[blockIdx.y];
    const int           t = blockIdx.x * 256 + threadIdx.x;
    if (t < c.tiles) tiles[c.first_tile + t] = tile_at(c, t);
}

/* The list of side's softmax for one KV head; by 256 threads. Returns how many are open. */
DKV__DEVICE int list_open(const GatedContext &c, int g, int side, const Tile *tiles, Open *list) {
    /* the tiles stand in the block: they may be read before the kernels before this one have ended */
    __shared__ int count[8];
    const float         *ln_u = c.ln_u + (int64_t)g * c.D;
    const unsigned char *open = c.open + (int64_t)g * c.D;
    const int            warp = threadIdx.x / 32, lane = threadIdx.x & 31, all = c.tiles;
    int                  n = 0;
    if (!all) let_next_start();
    for (int t0 = 0; t0 < all; t0 += 1024) { /* four tiles a thread; no load has a condition, or it would wait */
        Tile  x[4];
        float bias[4];
        bool  is_open[4];
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = tiles[least(t0 + k * 256 + (int)threadIdx.x, all - 1)];
        if (t0 == 0) let_next_start();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int  b = most(x[k].bin, 0);
            const bool bit = side == 0 || open[b] != 0;
            bias[k] = side == 0 ? ln_u[b] : 0.0f;
            is_open[k] = x[k].bin < 0 || (bit && bias[k] >= DKV__GATE_OPEN_LN);
            bias[k] = x[k].bin < 0 ? 0.0f : bias[k] * LOG2E;
            is_open[k] = is_open[k] && t0 + k * 256 + (int)threadIdx.x < all;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const unsigned mask = __ballot_sync(~0u, is_open[k]);
            if (lane == 0) count[warp] = __popc(mask);
            __syncthreads();
            int at = n + __popc(mask & ((1u << lane) - 1));
            for (int i = 0; i < 8; i++) {
                if (i < warp) at += count[i];
                n += count[i];
            }
            if (is_open[k]) list[at] = Open{x[k].row, x[k].len, t0 + k * 256 + (int)threadIdx.x, bias[k]};
            __syncthreads();
        }
    }
    return n;
}

/* A gathered row: which query of the context, head, and whose it is; not real: padding. */
struct GatedRow { int64_t at; int h; bool real; const Suffix *s; int64_t i; };
template <int M> DKV__DEVICE GatedRow gated_row(const GatedWork &w, const GatedContext &c, int g, int row) {
    const int qi = row / c.G;
    GatedRow  y = {c.first_row + (int64_t)g * c.blocks * M + row, g * c.G + row - qi * c.G, qi < c.queries, NULL, 0};
    if (!y.real) return y;
    const Question q = w.questions[c.first_question + qi];
    y.s = w.suffixes + q.suffix;
    y.i = q.i;
    return y;
}

/* Eight elements from d0 on, zeros behind d. */
DKV__DEVICE Eight eight_at(const dkv_tensor &t, int64_t token, int64_t head, int d0, int d) {
    Eight x = {};
    if (d0 >= d) return x;
    const char *p = at(t, token, head) + d0 * t.stride_dim;
    const bool  vector = t.stride_dim == type_bytes(t.type) && (uintptr_t)p % 16 == 0;
    return load8(p, t.type, t.stride_dim, vector);
}

template <class T> DKV__DEVICE void store_row8(char *to, const Eight &x) {
    *(uint4 *)to = uint4{pair_of<T>(x.x[0], x.x[1]), pair_of<T>(x.x[2], x.x[3]), pair_of<T>(x.x[4], x.x[5]),
                         pair_of<T>(x.x[6], x.x[7])};
}

/* What backward needs of a row besides Q: dO in T, lifted by a power of two in f16, where small products would flush to
   zero; delta = O_relaxed . dO of the same rounded dO, so that a row's dS sum to zero as far as O is exact. By the
   D / 8 adjacent lanes that share a row. */
template <class T, int D>
DKV__DEVICE void gather_gradient(const GatedWork &w, const GatedContext &c, const GatedRow &y, int chunk) {
    const bool through = c.open != NULL;
    Eight      g = {}, o = {};
    if (y.real) {
        g = eight_at(y.s->x.d_out, y.i, y.h, chunk * 8, c.d_v);
        o = eight_at(through ? y.s->x.out_relaxed : y.s->x.out, y.i, y.h, chunk * 8, c.d_v);
    }
    float peak = 0.0f, delta = 0.0f, lift = 1.0f;
    for (int u = 0; u < 8; u++) peak = fmaxf(peak, fabsf(g.x[u]));
    for (int i = D / 16; i; i >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, i));
    if (Name<T>::type == DKV_F16 && peak < INFINITY) /* the largest becomes 2 .. 4; a row of zeros is lifted most, so
                                                        that it never decides what common_unlift is */
        lift = __uint_as_float((uint32_t)(127 + 127 + 1 - (__float_as_uint(fmaxf(peak, 1.0e-30f)) >> 23)) << 23);
    for (int u = 0; u < 8; u++) {
        g.x[u] = (float)(T)(g.x[u] * lift);
        delta += g.x[u] * o.x[u];
    }
    for (int i = D / 16; i; i >>= 1) delta += __shfl_xor_sync(~0u, delta, i);
    store_row8<T>(w.d_out_rows + (y.at * D + chunk * 8) * 2, g);
    if (chunk) return;
    float4 x = {INFINITY, delta, 1.0f / lift, INFINITY}; /* padding weighs nothing */
    if (y.real) {
        const int64_t at = y.i * c.H + y.h;
        x.x = (through ? y.s->x.lse_relaxed : y.s->x.lse)[at] * LOG2E;
        x.w = y.s->x.lse[at] * LOG2E;
    }
    w.stats[y.at] = x;
}

/* Kernels of a pass overlap: what the one before does not write may be read before let_next_start, and so may what the
   one before that wrote, which the one before waited for. */

/* Before a pass: lists of open tiles, and rows into the order that the passes take them in. Grid: a CTA per list, and
   per 2048 / D query rows or own keys, one for a thread: a second would wait for the loads of the first. The last list
   to be done sums them up. */
template <int D> struct GatherShape { static constexpr int C = D / 8, ROWS = 256 / C, OF_PART = CHUNK / ROWS; };
template <class T, int D, bool BACKWARD>
__global__ void __launch_bounds__(256) gated_gather(const __grid_constant__ GatedWork w) {
    __shared__ int last;
    typedef GatherShape<D> S;
    constexpr int  C = S::C;
    const int      sides = BACKWARD ? 1 : w.sides, lists = w.n_heads * sides, c = threadIdx.x % C;
    int            job = (int)blockIdx.x - lists;
    if (job < 0) {
        const int      head = blockIdx.x % w.n_heads, side = blockIdx.x / w.n_heads;
        const int2     where = w.heads[head];
        const GatedContext &x = w.contexts[where.x];
        const int n = list_open(x, where.y, side, w.tiles + x.first_tile,
                                w.opens + side * w.opens_of_side + x.first_open + (int64_t)where.y * x.tiles);
        if (threadIdx.x == 0) {
            w.before[side * (w.n_heads + 1) + head + 1] = x.queries ? n + x.own_tiles : 0;
            __threadfence();
            last = atomicAdd(w.arrived, 1) == lists - 1;
            if (last) *w.arrived = 0;
        }
        __syncthreads();
        if (!last || threadIdx.x >= 32) return;
        __threadfence();
        for (int s = 0; s < sides; s++) {
            volatile int *before = w.before + s * (w.n_heads + 1);
            int           sum = 0;
            if (threadIdx.x == 0) before[0] = 0;
            for (int i = 0; i < w.n_heads; i += 32) {
                const int at = i + (int)threadIdx.x;
                int       own = at < w.n_heads ? before[at + 1] : 0;
                for (int j = 1; j < 32; j <<= 1) {
                    int y = __shfl_up_sync(~0u, own, j);
                    own += (int)threadIdx.x >= j ? y : 0;
                }
                if (at < w.n_heads) before[at + 1] = sum + own;
                sum += __shfl_sync(~0u, own, 31);
            }
        }
        return;
    }
    const bool query = job < w.n_q_parts * S::OF_PART;
    if (!query) job -= w.n_q_parts * S::OF_PART;
    const Part part = (query ? w.q_parts : w.own_parts)[job / S::OF_PART];
    const int  row = part.row + job % S::OF_PART * S::ROWS + (int)threadIdx.x / C;
    if (query) {
        const GatedContext &x = w.contexts[part.of];
        const GatedRow      y = gated_row<WgmmaShape<D>::M>(w, x, part.g, row);
        let_next_start();
        Eight q = {};
        if (y.real) q = eight_at(y.s->x.q, y.i, y.h, c * 8, x.d_k);
        store_row8<T>(w.q_rows + (y.at * D + c * 8) * 2, q);
        if (BACKWARD) gather_gradient<T, D>(w, x, y, c);
        return;
    }
    const Suffix       &s = w.suffixes[part.of];
    const GatedContext &x = w.contexts[s.context];
    const int64_t       to = x.first_key + (int64_t)part.g * x.own_keys + s.key + row;
    Eight               k = {}, v = {};
    let_next_start();
    if (row < s.x.N_q) k = eight_at(s.x.k, row, part.g, c * 8, x.d_k), v = eight_at(s.x.v, row, part.g, c * 8, x.d_v);
    store_row8<T>(w.own_k_rows + (to * D + c * 8) * 2, k);
    store_row8<T>(w.own_v_rows + (to * D + c * 8) * 2, v);
}

/* ---- shares ---- */

/* The line of one side: n groups share its units. Both sides get as many when their lists agree, and then the same
   cuts and the same bits. */
struct Line { int units, groups, base; const int *before; };
DKV__DEVICE Line line_of(const GatedWork &w, int sides, int side) {
    const int *before = w.before;
    const int  all = __ldcg(before + w.n_heads), more = sides > 1 ? __ldcg(before + 2 * w.n_heads + 1) : 0;
    Line       x = {all, w.groups, 0, before};
    if (sides > 1) {
        const double per = (double)w.groups / ((double)all + more);
        const int    first = least(most((int)(per * all), 1), w.groups - 1);
        x.groups = side == 0 ? first : least(most((int)(per * more), 1), w.groups - first);
        if (side) x.units = more, x.base = first, x.before = before + w.n_heads + 1;
    }
    return x;
}

/* The last head whose units begin at or before unit; by a whole warp. */
DKV__DEVICE int head_at(const Line &x, int n_heads, int unit) {
    int lo = 0, n = n_heads;
    while (n > 1) {
        const int  step = (n + 31) / 32, lane = threadIdx.x & 31, i = lo + lane * step;
        const bool begun = lane * step < n && __ldcg(x.before + i) <= unit;
        const int  last = 31 - __clz(__ballot_sync(~0u, begun) | 1);
        lo += last * step;
        n = least(step, n - last * step);
    }
    return lo;
}

struct GatedPiece { /* tiles [tile, end) of a head's list, the last own of them the suffixes' */
    const GatedContext *c; /* NULL: the end */
    int            g, m, side, tile, end, opens, slot;
    bool           whole;
    const Open    *list;
    const OwnTile     *own;
};
struct GatedWalk { Line line; int side, head, at, left, pieces; };

DKV__DEVICE GatedWalk gated_walk(const GatedWork &w, int sides) {
    GatedWalk x = {};
    int       c = blockIdx.x / w.blocks;
    x.line = line_of(w, sides, 0);
    if (sides > 1 && c >= x.line.groups) {
        x.side = 1;
        x.line = line_of(w, sides, 1);
        c -= x.line.base;
    }
    if (c >= x.line.groups) return x;
    const int begin = share(x.line.units, x.line.groups, c);
    x.left = share(x.line.units, x.line.groups, c + 1) - begin;
    x.head = head_at(x.line, w.n_heads, begin);
    x.at = begin - __ldcg(x.line.before + x.head);
    return x;
}

DKV__DEVICE void gated_next(GatedWalk &x, GatedPiece &p, const GatedWork &w) {
    p.c = NULL;
    if (x.left <= 0) return;
    int units = __ldcg(x.line.before + x.head + 1) - __ldcg(x.line.before + x.head);
    while (units == 0) { /* a context without questions */
        x.head++;
        units = __ldcg(x.line.before + x.head + 1) - __ldcg(x.line.before + x.head);
    }
    const int2     where = w.heads[x.head];
    const GatedContext &c = w.contexts[where.x];
    const int      n = least(x.left, units - x.at);
    p.c = &c;
    p.g = where.y;
    p.m = blockIdx.x % w.blocks;
    p.side = x.side;
    p.opens = units - c.own_tiles;
    p.tile = x.at;
    p.end = p.m < c.blocks ? p.opens + w.own_count[c.first_block + p.m] : 0;
    p.end = least(p.end, x.at + n);
    p.whole = n == units;
    p.slot = 2 * blockIdx.x + (x.pieces++ > 0);
    p.list = w.opens + x.side * w.opens_of_side + c.first_open + (int64_t)p.g * c.tiles;
    p.own = w.own + c.first_own + p.m * c.own_tiles;
    x.left -= n;
    x.at = 0;
    x.head++;
}

/* What consumers must know of a tile in the ring. */
struct alignas(16) Sight { int len, first, last, edge, tile; float bias; };
DKV__DEVICE int sees(const Sight &x, int qi) {
    const int n = least(x.len, qi - x.edge);
    return qi < x.first || qi >= x.last ? 0 : n;
}

/* Tile i of a piece: where its keys are, and who sees them. Entries are read 32 at a time, one per lane. */
struct TileReader {
    int4 entry; /* of this lane */
    DKV__DEVICE void read(const GatedPiece &p, int i) {
        const int at = i + (int)(threadIdx.x & 31);
        entry = int4{0, 0, 0, 0};
        if (at < p.opens) entry = __ldcg((const int4 *)p.list + at);
        else if (at < p.end) entry = __ldg((const int4 *)p.own + at - p.opens);
    }
    DKV__DEVICE int4 get(int lane) const {
        return int4{__shfl_sync(~0u, entry.x, lane), __shfl_sync(~0u, entry.y, lane),
                    __shfl_sync(~0u, entry.z, lane), __shfl_sync(~0u, entry.w, lane)};
    }
};
DKV__DEVICE Sight sight_of(const GatedPiece &p, int i, const int4 &e) {
    if (i < p.opens) return Sight{e.y, 0, INT_MAX, -(1 << 30), e.z, __int_as_float(e.w)};
    return Sight{least(TILE, e.z - e.w - 1), e.y, e.z, e.w, -1, 0.0f};
}

/* Pairs of elements can be stored at once. */
DKV__DEVICE bool is_even(const dkv_tensor &t) {
    return t.stride_dim == type_bytes(t.type) && ((uintptr_t)t.data | (uintptr_t)t.stride_token |
           (uintptr_t)t.stride_head) % 8 == 0;
}
/* Where a finished row goes, as finish_row and store_out take it. */
DKV__DEVICE Attention target_of(const GatedContext &c, const Suffix &s, int side) {
    Attention  a;
    const bool relaxed = side == 0 && c.open;
    a.out = relaxed ? s.x.out_relaxed : s.x.out;
    a.lse = relaxed ? s.x.lse_relaxed : s.x.lse;
    a.out_vector = is_even(a.out);
    a.sink = NULL;
    a.H = c.H;
    a.d_v = c.d_v;
    return a;
}

/* Where a piece's rows of Q are among the gathered ones; blocks that its context does not have read the last one. */
template <int M> DKV__DEVICE int64_t first_row(const GatedPiece &p) {
    return p.c->first_row + ((int64_t)p.g * p.c->blocks + least(p.m, p.c->blocks - 1)) * M;
}

/* Row r + 8 i of them, times weight, to where it belongs. */
template <int D>
DKV__DEVICE void store_row(const dkv_tensor &to, bool vector, int d, const Row &row, const float (&o)[D / 8][4], int i,
                           float weight) {
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        const float x[2] = {o[n][2 * i] * weight, o[n][2 * i + 1] * weight};
        store_out<2>(to, vector, d, row, 8 * n + 2 * (threadIdx.x & 3), x);
    }
}

/* The thread's number, of which the compiler does not know that it stays: what follows from it is computed where it is
   used, and not kept in registers that loops need. */
DKV__DEVICE int this_thread() {
    int x = threadIdx.x;
    asm volatile("" : "+r"(x));
    return x;
}

/* Rows, bytes `stride` apart, into shared memory as mma and ldmatrix take them, zeros from row n and column d on. */
template <int D, int ROWS, int THREADS>
DKV__DEVICE void copy_rows(char *to, const char *from, int64_t stride, int n, int d) {
    constexpr int STEP = THREADS / (D / 8);
    const int     thread = this_thread(), c = thread % (D / 8);
    int           row = thread / (D / 8);
    const char   *p = from + row * stride + c * 16; /* not read where nothing is real */
    if (c * 8 >= d) n = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, row += STEP, p += STEP * stride)
        if (ROWS % STEP == 0 || row < ROWS) copy16(shared_address(to) + tile_offset<128, ROWS>(row, c), p, row < n);
}

/* The ends of a piece's rows r and r + 8, of softmax's parts: into outputs, or the piece's slot. */
template <int D>
DKV__DEVICE void store_outputs(const GatedWork &w, const GatedPiece &p, int r, const float (&o)[D / 8][4],
                               const float (&top)[2], float (&sum)[2]) {
    constexpr int M = WgmmaShape<D>::M;
    sum[0] = quad_sum(sum[0]), sum[1] = quad_sum(sum[1]);
    if (!p.whole) {
        float *slot = w.slots + (int64_t)p.slot * M * (D + 2);
        store_part<D>(slot, r, o);
        for (int i = 0; i < 2 && threadIdx.x % 4 == 0; i++)
            slot[M * D + r + 8 * i] = top[i], slot[M * (D + 1) + r + 8 * i] = sum[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const GatedRow y = gated_row<M>(w, *p.c, p.g, p.m * M + r + 8 * i);
        if (!y.real) continue;
        const Attention a = target_of(*p.c, *y.s, p.side);
        const Row       row = {y.i, y.h, true};
        store_row<D>(a.out, a.out_vector, a.d_v, row, o, i, finish_row(a, row, top[i], sum[i]));
    }
}

/* The same of their gradients. */
template <int D>
DKV__DEVICE void store_gradients(const GatedWork &w, const GatedPiece &p, int r, const float (&dq)[D / 8][4],
                                 const float (&unlift)[2]) {
    constexpr int M = WgmmaShape<D>::M;
    if (!p.whole) {
        store_part<D>(w.slots + (int64_t)p.slot * M * D, r, dq);
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const GatedRow y = gated_row<M>(w, *p.c, p.g, p.m * M + r + 8 * i);
        if (!y.real) continue;
        store_row<D>(y.s->x.dq, is_even(y.s->x.dq), p.c->d_k, Row{y.i, y.h, true}, dq, i, p.c->scale * unlift[i]);
    }
}

/* ---- forward -----------------------------------------------------------------------------------------------------

   math    softmax over [scale q . k + ln u, scale q . k of the own suffix] times V; ln u is the addend that the
           exponentials' FMA has anyway
   CTA     attend_wgmma's consumers on gathered rows; one warp of the first warpgroup walks and loads everything
   why     the gates cost nothing, closed tiles are never read, and straight-through's two softmaxes are two rows of
           blocks: in one pass a common maximum would underflow one of them, and two accumulators exceed the registers
   limits  sm_90, 16-bit keys, d a multiple of 8 up to 128                                                          */

template <int D> struct GatedShape {
    typedef WgmmaShape<D> S;
    static constexpr int SHARED = S::RINGS + 256 + (int)(S::K_STAGES * sizeof(Sight) + 2 * sizeof(GatedPiece));
};

#if __CUDA_ARCH_FEAT_SM90_ALL
/* Rows of 16-bit elements [rows][D], gathered or a context's, as panels of 64 rows each. */
template <int D, int ROWS, int STRIDE>
DKV__DEVICE void load_boxes(char *to, const CUtensorMap *map, int row, int head, uint64_t *full, uint64_t policy) {
#pragma unroll
    for (int c = 0; c < D / 64; c++) {
#pragma unroll
        for (int r = 0; r < ROWS; r += CHUNK)
            tma_load(shared_address(to) + (c * STRIDE + r) * 128, map, c * 64, row + r, head, full, policy);
    }
}
#endif

#if __CUDA_ARCH_FEAT_SM90_ALL
DKV__DEVICE void acquire_maps(const GatedPiece &p, const GatedContext *&known) {
    if (p.c != known && (threadIdx.x & 31) == 0) tma_acquire(&p.c->k), tma_acquire(&p.c->v);
    known = p.c;
}

/* Walks, and keeps the rings full: pieces with their Q, K of a tile before V of the tile before. By one warp. */
template <int D>
DKV__DEVICE void load_forward(const GatedWork &w, const WgmmaPlaces<D> &x, Sight *sights, GatedPiece *pieces) {
    typedef WgmmaShape<D> S;
    constexpr int         M = S::M;
    uint64_t *const       q_full = x.more, *const q_empty = q_full + 2;
    const uint64_t        policy = w.blocks == 1 ? policy_evict_first() : policy_evict_normal();
    const bool            leads = (threadIdx.x & 31) == 0;
    Ring<S::K_STAGES>     k;
    Ring<S::V_STAGES>     v;
    Ring<2>               q;
    GatedPiece            p;
    GatedWalk             walk = gated_walk(w, w.sides);
    const GatedContext   *known = NULL;
    for (;; q.next()) {
        gated_next(walk, p, w);
        bar_wait(q_empty + q.stage, q.phase ^ 1);
        if (leads) {
            pieces[q.stage] = p;
            if (!p.c) bar_arrive(q_full + q.stage);
            else bar_expect(q_full + q.stage, S::Q);
        }
        if (!p.c) return;
        acquire_maps(p, known);
        const int key0 = (int)p.c->first_key + p.g * p.c->own_keys;
        if (leads)
            load_boxes<D, M, M>(x.qs + q.stage * S::Q, &w.q, (int)first_row<M>(p), 0, q_full + q.stage,
                                policy_evict_normal());
        TileReader reader;
        int        row = 0; /* of the tile before, whose V follows this one's K */
        auto       load_v = [&](bool own) {
            bar_wait(x.v_empty + v.stage, v.phase ^ 1);
            bar_expect(x.v_full + v.stage, S::STAGE);
            load_boxes<D, TILE, TILE>(x.vs + v.stage * S::STAGE, own ? &w.own_v : &p.c->v, row, own ? 0 : p.g,
                                      x.v_full + v.stage, policy);
            v.next();
        };
        for (int i = p.tile; i < p.end; i++) {
            if ((i - p.tile) % 32 == 0) reader.read(p, i);
            const int4 e = reader.get((i - p.tile) % 32);
            if (!leads) continue;
            const bool own = i >= p.opens;
            const int  now = own ? key0 + e.x : e.x;
            bar_wait(x.k_empty + k.stage, k.phase ^ 1);
            sights[k.stage] = sight_of(p, i, e);
            bar_expect(x.k_full + k.stage, S::STAGE);
            load_boxes<D, TILE, TILE>(x.ks + k.stage * S::STAGE, own ? &w.own_k : &p.c->k, now, own ? 0 : p.g,
                                      x.k_full + k.stage, policy);
            k.next();
            if (i > p.tile) load_v(i - 1 >= p.opens);
            row = now;
        }
        if (leads && p.tile < p.end) load_v(p.end - 1 >= p.opens);
        __syncwarp();
    }
}
#endif

template <class T, int D>
__global__ void __launch_bounds__(WgmmaShape<D>::THREADS, 1) gated_forward(const __grid_constant__ GatedWork w) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    typedef WgmmaShape<D> S;
    const WgmmaPlaces<D>  x;
    constexpr int         M = S::M, GROUPS = S::GROUPS;
    uint64_t *const       q_full = x.more, *const q_empty = q_full + 2;
    Sight *const          sights = (Sight *)(x.k_full + 32);
    GatedPiece *const     pieces = (GatedPiece *)(sights + S::K_STAGES);
    const int             group = threadIdx.x / 128, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::K_STAGES; i++) bar_init(x.k_full + i, 1), bar_init(x.k_empty + i, GROUPS);
        for (int i = 0; i < S::V_STAGES; i++) bar_init(x.v_full + i, 1), bar_init(x.v_empty + i, GROUPS);
        for (int i = 0; i < 2; i++) bar_init(q_full + i, 1), bar_init(q_empty + i, GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 3 ? 32 : 88));
        if (threadIdx.x < 32) load_forward<D>(w, x, sights, pieces);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 3 ? 160 : 208));
    const int own = group - 1, tid = threadIdx.x - 128, warp = tid / 32 % 4, r = own * 64 + warp * 16 + lane / 4;
    Ring<S::K_STAGES> k;
    Ring<S::V_STAGES> v;
    Ring<2>           q;
    if (own == GROUPS - 1) named_arrive(1, 256); /* the first group may begin */
    for (;; q.next()) {
        const GatedPiece &p = pieces[q.stage];
        bar_wait(q_full + q.stage, q.phase);
        if (!p.c) break;
        float               s[16][4], o[D / 8][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, alpha[2];
        const GatedContext &c = *p.c;
        const float         factor[2] = {c.times, c.times};
        const int           qi[2] = {(p.m * M + r) / c.G, (p.m * M + r + 8) / c.G};
        const uint32_t      q_at = shared_address(x.qs + q.stage * S::Q) + own * 64 * 128;
        int                 seen[2], len = 0, len_before;
        float               bias;
        auto look = [&](int) {
            const Sight y = sights[k.stage];
            len_before = len, len = y.len;
            seen[0] = sees(y, qi[0]), seen[1] = sees(y, qi[1]), bias = y.bias;
        };
        auto soften = [&](int) { softmax_tile<16>(s, top, sum, alpha, factor, 0.0f, seen, 0, bias); };
        auto clean = [&](char *tile, int n) { /* what follows a short tile may be closed, and NaN */
            if (n == TILE) return;
            bar_wait(x.v_full + v.stage, v.phase);
            clear_rows<D, TILE, 128>(tile, n, tid % 128, 4 + own);
        };
        auto between = [&](char *tile) { clean(tile, len_before); };
        auto last = [&](char *tile) { clean(tile, len); };
        attend_keys<T, D>(o, s, sum, alpha, q_at, k, v, p.tile, p.end, tid, own, look, soften, between, last);

        store_outputs<D>(w, p, r, o, top, sum);
        named_sync(4 + own, 128);
        if (tid % 128 == 0) bar_arrive(q_empty + q.stage);
    }
#else
    __trap(); /* compiled for sm_90 without the a: better an error than no output */
#endif
}

/* Heads that are cut into pieces: job j is a head where these are fewer than groups, else the head that group j is the
   first to begin inside of. Where its pieces are; by a whole warp. */
struct HeadCut { int side, head, base; Pieces pieces; };
__host__ DKV__DEVICE int cuts_of(const GatedWork &w, int sides) { return least(w.n_heads * sides, w.groups); }
DKV__DEVICE bool cut_head(const GatedWork &w, int sides, int j, int m, HeadCut *x) {
    const bool by_head = w.n_heads * sides <= w.groups;
    Line       line = line_of(w, sides, 0);
    x->side = by_head ? j / w.n_heads : j >= line.groups;
    if (x->side) line = line_of(w, sides, 1);
    x->base = line.base;
    if (by_head) {
        x->head = j - x->side * w.n_heads;
    } else {
        const int c = j - line.base;
        if (c == 0 || c >= line.groups) return false;
        const int unit = share(line.units, line.groups, c);
        x->head = head_at(line, w.n_heads, least(unit, line.units - 1));
        const int first = __ldcg(line.before + x->head);
        if (unit <= first || unit >= line.units || share(line.units, line.groups, c - 1) > first) return false;
    }
    const int first = __ldcg(line.before + x->head), n = __ldcg(line.before + x->head + 1) - first;
    if (n == 0) return false;
    x->pieces = pieces_of(first, n, line.units, line.groups, w.blocks, m);
    return x->pieces.count > 1;
}

/* Slots into outputs: grid (rows of a block / 8, cuts, blocks), a warp a row. */
template <int M, int D> __global__ void __launch_bounds__(256) gated_combine(const __grid_constant__ GatedWork w) {
    const int m = blockIdx.z, r = blockIdx.x * 8 + threadIdx.x / 32;
    HeadCut       cut;
    const bool is_cut = cut_head(w, w.sides, blockIdx.y, m, &cut);
    const int2 where = w.heads[is_cut ? cut.head : 0];
    const GatedContext &c = w.contexts[where.x];
    const GatedRow y = gated_row<M>(w, c, where.y, m * M + r);
    let_next_start();
    if (!is_cut || m >= c.blocks || !y.real) return;
    combine_row<M, D>(target_of(c, *y.s, cut.side), Row{y.i, y.h, true}, r, cut.pieces,
                      w.slots + (int64_t)cut.base * w.blocks * 2 * M * (D + 2));
}

/* ---- backward over the context and the suffixes' own keys: dQ, and the sums of dS per tile ------------------------

   math    P = exp(scale q . k + ln u - LSE), dP = dO V^T, dS = P (dP - delta), dQ = scale dS K; d ln u of a cell is the
           sum of dS over its keys, all queries and the heads of the group
   shapes  64 rows a warpgroup, steps of 64 keys; dS is a register operand, and at D 128 so is Q: from shared memory a
           step of 64 keys reads as much of A as of B, which takes all the time that its products do (at D 64 ptxas 13.0
           loses a Q that is kept in registers)
   CTA     as forward; a stage is K and V of 64 keys. dQ of an item cut by shares goes to slots and is summed in order;
           each warp leaves its sum of dS per tile at a place of its own: no atomics, no barrier in the loop
   limits  as forward                                                                                              */

template <int D> struct BackwardShape {
    static constexpr int GROUPS = D == 64 ? 3 : 2, M = 64 * GROUPS, THREADS = 128 * (GROUPS + 1), WARPS = 4 * GROUPS;
    static constexpr int STAGE = 2 * CHUNK * D * 2, ROWS = M * D * 2, STAGES = D == 64 ? 8 : 5;
    static constexpr int LOADER = D == 64 ? 56 : 72, COMPUTER = D == 64 ? 152 : 216; /* registers of a thread */
    static constexpr int TOLD = (int)(STAGES * sizeof(Sight) + 2 * sizeof(GatedPiece));
    static constexpr int SHARED = STAGES * STAGE + 2 * ROWS + 256 + TOLD;
};

#if __CUDA_ARCH_FEAT_SM90_ALL
/* A (+)= B with the weights as they lie in registers: one k step of [64][16] x [64][16]^T. */
template <class T> DKV__DEVICE void wgmma_scores(float (&s)[8][4], const uint32_t (&a)[4], uint64_t k, int add);
#define DKV__WGMMA_ROWS(T, name) \
    template <> DKV__DEVICE void wgmma_scores<T>(float(&s)[8][4], const uint32_t(&a)[4], uint64_t k, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." name \
                     "." name " " DKV__REGS32 ", {%32, %33, %34, %35}, %36, p, 1, 1, 0; }" \
                     : DKV__F32(s) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(k), "r"(add)); \
    }
/* The same with both operands in shared memory. */
template <class T> DKV__DEVICE void wgmma_scores(float (&s)[8][4], uint64_t a, uint64_t k, int add);
#define DKV__WGMMA_HALF(T, name) \
    template <> DKV__DEVICE void wgmma_scores<T>(float(&s)[8][4], uint64_t a, uint64_t k, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." name \
                     "." name " " DKV__REGS32 ", %32, %33, p, 1, 1, 0, 0; }" \
                     : DKV__F32(s) \
                     : "l"(a), "l"(k), "r"(add)); \
    }
DKV__WGMMA_ROWS(__nv_bfloat16, "bf16")
DKV__WGMMA_ROWS(__half, "f16")
DKV__WGMMA_HALF(__nv_bfloat16, "bf16")
DKV__WGMMA_HALF(__half, "f16")
#endif

#if __CUDA_ARCH_FEAT_SM90_ALL
template <int D> struct BackwardPlaces { /* shared memory: a ring of K with V, Q, dO, barriers, what to do */
    typedef BackwardShape<D> S;
    char       *ring, *qs, *gs;
    uint64_t   *full, *empty, *row_full, *row_empty;
    Sight      *sights;
    GatedPiece *pieces;
    DKV__DEVICE BackwardPlaces() {
        extern __shared__ __align__(1024) char shared[];
        ring = shared, qs = ring + S::STAGES * S::STAGE, gs = qs + S::ROWS;
        full = (uint64_t *)(gs + S::ROWS), empty = full + S::STAGES;
        row_full = empty + S::STAGES, row_empty = row_full + 1;
        sights = (Sight *)(full + 32), pieces = (GatedPiece *)(sights + S::STAGES);
    }
};

/* As load_forward; short tiles may lack their second half. */
template <int D> DKV__DEVICE void load_backward(const GatedWork &w, const BackwardPlaces<D> &x) {
    typedef BackwardShape<D> S;
    constexpr int            M = S::M;
    const uint64_t           policy = w.blocks == 1 ? policy_evict_first() : policy_evict_normal();
    const bool               leads = (threadIdx.x & 31) == 0;
    Ring<S::STAGES>          k;
    GatedPiece               p;
    GatedWalk                walk = gated_walk(w, 1);
    const GatedContext      *known = NULL;
    for (int turn = 0;; turn ^= 1) {
        gated_next(walk, p, w);
        bar_wait(x.row_empty, turn ^ 1); /* Q and dO of the piece before are read no more */
        if (leads) {
            x.pieces[turn] = p;
            if (!p.c) bar_arrive(x.row_full);
            else bar_expect(x.row_full, 2 * S::ROWS);
        }
        if (!p.c) return;
        acquire_maps(p, known);
        const int key0 = (int)p.c->first_key + p.g * p.c->own_keys;
        if (leads) {
            load_boxes<D, M, M>(x.qs, &w.q, (int)first_row<M>(p), 0, x.row_full, policy_evict_normal());
            load_boxes<D, M, M>(x.gs, &w.d_out, (int)first_row<M>(p), 0, x.row_full, policy_evict_normal());
        }
        TileReader reader;
        for (int i = p.tile; i < p.end; i++) {
            if ((i - p.tile) % 32 == 0) reader.read(p, i);
            const int4  e = reader.get((i - p.tile) % 32);
            const bool  own = i >= p.opens;
            const Sight sight = sight_of(p, i, e);
            for (int at = 0; at < sight.len && leads; at += CHUNK) {
                char     *to = x.ring + k.stage * S::STAGE;
                const int row = (own ? key0 : 0) + e.x + at, head = own ? 0 : p.g;
                bar_wait(x.empty + k.stage, k.phase ^ 1);
                x.sights[k.stage] = sight;
                bar_expect(x.full + k.stage, S::STAGE);
                load_boxes<D, CHUNK, CHUNK>(to, own ? &w.own_k : &p.c->k, row, head, x.full + k.stage, policy);
                load_boxes<D, CHUNK, CHUNK>(to + S::STAGE / 2, own ? &w.own_v : &p.c->v, row, head, x.full + k.stage,
                                            policy);
                k.next();
            }
        }
        __syncwarp();
    }
}
#endif

template <class T, int D>
__global__ void __launch_bounds__(BackwardShape<D>::THREADS, 1) gated_backward(const __grid_constant__ GatedWork w) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    typedef BackwardShape<D> S;
    constexpr int            M = S::M, GROUPS = S::GROUPS, STAGES = S::STAGES;
    const BackwardPlaces<D>  x;
    const int                group = threadIdx.x / 128, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) bar_init(x.full + i, 1), bar_init(x.empty + i, GROUPS);
        bar_init(x.row_full, 1), bar_init(x.row_empty, GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::LOADER));
        if (threadIdx.x < 32) load_backward<D>(w, x);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::COMPUTER));
    const int own = group - 1, tid = threadIdx.x - 128, warp = tid / 32, r = warp * 16 + lane / 4, t = lane & 3;
    Ring<STAGES> k;
    for (int turn = 0;; turn ^= 1) {
        const GatedPiece &p = x.pieces[turn];
        bar_wait(x.row_full, turn);
        if (!p.c) break;
        const GatedContext &c = *p.c;
        const float         times = c.times;
        const int           qi[2] = {(p.m * M + r) / c.G, (p.m * M + r + 8) / c.G}, end = p.end, begin = p.tile;
        const float4       *stats = w.stats + first_row<M>(p) + r, stat0 = __ldcg(stats), stat1 = __ldcg(stats + 8);
        const float         lse[2] = {stat0.x, stat1.x}, delta[2] = {stat0.y, stat1.y}, unlift[2] = {stat0.z, stat1.z};
        const uint64_t      q_at = descriptor(shared_address(x.qs) + own * 64 * 128, 1);
        const uint64_t      g_at = descriptor(shared_address(x.gs) + own * 64 * 128, 1);
        uint32_t            q[D / 16][4], weight[4][4];
        float               dq[D / 8][4], s[8][4], dp[8][4], sum[2] = {0.0f, 0.0f};
        int                 before = -1; /* the stage whose K the last product still reads */
        float               all = 0.0f;  /* this thread's sum of dS of the last tile that is done */
        int                 tile = -1;   /* and which one that is */
        auto leave = [&] {
            for (int j = 16; j; j >>= 1) all += __shfl_xor_sync(~0u, all, j);
            const int64_t cell = c.first_open + (int64_t)p.g * c.tiles + tile;
            if (lane == 0 && tile >= 0) w.partial[(cell * w.blocks + p.m) * S::WARPS + warp] = all;
        };
#pragma unroll
        for (int i = 0; i < D / 16 && D == 128; i++)
            ldmatrix(q[i], shared_address(x.qs) + tile_offset<128, M>(warp * 16 + (lane & 15), 2 * i + (lane >> 4)));

        for (int i = begin; i < end; i++) {
            int len = TILE;
#pragma unroll 1
            for (int h = 0; h < len; h += CHUNK) {
                const uint32_t at = shared_address(x.ring + k.stage * S::STAGE);
                bar_wait(x.full + k.stage, k.phase);
                const Sight y = x.sights[k.stage];
                len = y.len;
                if (len - h < CHUNK) /* what follows may be closed, and NaN, which no 0 of dS hides */
                    clear_rows<D, CHUNK, 128>(x.ring + k.stage * S::STAGE, len - h, tid % 128, 4 + own);
                const uint64_t k_at = descriptor(at, 1), v_at = further(k_at, S::STAGE / 2);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < D / 16; j++) {
                    const uint64_t kj = further(k_at, j / 4 * CHUNK * 128 + j % 4 * 32);
                    if (D == 128) wgmma_scores<T>(s, q[j], kj, j > 0);
                    else wgmma_scores<T>(s, further(q_at, j * 32), kj, j > 0);
                }
                wgmma_commit();
#pragma unroll
                for (int j = 0; j < D / 16; j++)
                    wgmma_scores<T>(dp, further(g_at, j / 4 * M * 128 + j % 4 * 32),
                                    further(v_at, j / 4 * CHUNK * 128 + j % 4 * 32), j > 0);
                wgmma_commit();
                if (h == 0 && i > begin) leave(); /* while they run */
                const int   seen[2] = {sees(y, qi[0]) - h, sees(y, qi[1]) - h};
                const float from[2] = {lse[0] - y.bias, lse[1] - y.bias};
                wgmma_wait<1>();
                settle(s);
                if (before >= 0 && tid % 128 == 0) bar_arrive(x.empty + before); /* dQ before it is done, too */
                before = k.stage;
                int signs = 0;
#pragma unroll
                for (int n = 0; n < 8; n++) {
#pragma unroll
                    for (int u = 0; u < 4; u++) {
                        s[n][u] = exp2_fast(fmaf(s[n][u], times, -from[u >> 1]));
                        signs |= __float_as_int(s[n][u]);
                    }
                }
                if (signs < 0) __trap(); /* never: it keeps ptxas from sinking the exponentials below the wait */
                wgmma_wait<0>();
                settle(dp);
#pragma unroll
                for (int n = 0; n < 8; n++) {
#pragma unroll
                    for (int u = 0; u < 4; u++) s[n][u] *= dp[n][u] - delta[u >> 1];
                }
                if (seen[0] < CHUNK || seen[1] < CHUNK) {
#pragma unroll
                    for (int n = 0; n < 8; n++) {
#pragma unroll
                        for (int u = 0; u < 4; u++)
                            if (8 * n + 2 * t + (u & 1) >= seen[u >> 1]) s[n][u] = 0.0f;
                    }
                }
#pragma unroll
                for (int n = 0; n < 8; n++) sum[0] += s[n][0] + s[n][1], sum[1] += s[n][2] + s[n][3];
#pragma unroll
                for (int j = 0; j < 4; j++) weights<T>(weight[j], s, 2 * j);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int add = (i > begin || h > 0) | j;
                    wgmma_mix<T>(dq, weight[j], further(descriptor(at, CHUNK * 128), j * 16 * 128), add);
                }
                wgmma_commit();
                k.next();
                if (h + CHUNK < len) continue;
                all = sum[0] * unlift[0] + sum[1] * unlift[1], tile = y.tile;
                sum[0] = sum[1] = 0.0f;
            }
        }
        if (begin < end) leave();
        wgmma_wait<0>();
        settle(dq);
        if (before >= 0 && tid % 128 == 0) bar_arrive(x.empty + before);
        named_sync(4 + own, 128);
        if (tid % 128 == 0) bar_arrive(x.row_empty);
        if (begin >= end) {
#pragma unroll
            for (int n = 0; n < D / 8; n++) dq[n][0] = dq[n][1] = dq[n][2] = dq[n][3] = 0.0f;
        }
        store_gradients<D>(w, p, r, dq, unlift);
    }
#else
    __trap(); /* compiled for sm_90 without the a: better an error than no output */
#endif
}

/* ---- forward and backward by mma.sync: sm_80 .. sm_120 -----------------------------------------------------------

   math    as the two kernels above
   shapes  32 rows a warp, so that two products share what ldmatrix brings of K and V; steps of 64 keys forward and 32
           backward, for registers: D 128 takes 255 a thread, D 64 168
   CTA     M / 32 warps, which all copy K and V of the next step and compute this one: one barrier a step. Two CTAs a
           multiprocessor where they fit (99 KB each at D 128, 60 and 68 at D 64): the exponentials of one run under
           the products of the other
   why     on an H200, for 32/8 heads over 130816 keys, both passes take 1.57 (N_q 32) and 1.64 (N_q 128) times as long
           as by wgmma, at d 64 1.73 times: products, and what ldmatrix reads for them, take about as long
   limits  as above, but for sm_90; 99 KB of shared memory                                                          */

struct alignas(16) Keys { const char *first; int64_t stride; int d; }; /* a row, bytes between rows, elements of one */
struct alignas(16) MmaTile { Keys keys[2]; Sight sight; };              /* K, V; len 0: behind the last tile */
struct alignas(16) RowStat { float lse, delta, unlift; int query; };    /* forward takes only the last */

template <int M> struct Desk { /* in shared memory: what a CTA works at */
    RowStat    rows[M];    /* of the piece */
    MmaTile    tiles[4];   /* i % 4: tile i of the piece's list, for the present one and the next two */
    int4       entries[4]; /* i % 4: entry i of the list, two further ones */
    Keys       keys[2][2]; /* of the piece: context, own keys; K, V */
    GatedPiece piece;
    GatedWalk  walk;
    const GatedWork *work; /* from here it takes no registers */
};

template <int DIM, bool BACK> struct GatedMmaShape {
    static constexpr bool BACKWARD = BACK;
    static constexpr int  D = DIM, M = WgmmaShape<D>::M, THREADS = M, KEYS = BACK ? 32 : 64; /* keys of a step */
    static constexpr int  ROWS = M * D * 2, STAGE = KEYS * D * 2;
    static constexpr int  RING = BACK ? 2 * ROWS : ROWS, DESK = RING + 4 * STAGE; /* behind Q and dO; two of K and V */
    static constexpr int  SHARED = DESK + (int)sizeof(Desk<M>);
    static_assert(SHARED <= 99 << 10, "what every device has");
};
template <class S> DKV__DEVICE Desk<S::M> &desk() {
    extern __shared__ __align__(1024) char shared[];
    return *(Desk<S::M> *)(shared + S::DESK);
}

DKV__DEVICE const int4 *entry_of(const GatedPiece &p, int i) {
    return i < p.opens ? (const int4 *)p.list + i : (const int4 *)p.own + (i - p.opens);
}

/* Puts tile i on the desk, for after the next barrier; by one thread. Entries come along with the copies of keys. */
template <class S> DKV__DEVICE void put_tile(int i) {
    Desk<S::M>       &d = desk<S>();
    const GatedPiece &p = d.piece;
    MmaTile          &x = d.tiles[i % 4];
    x.sight.len = 0;
    if (i >= p.end) return;
    const int4 entry = d.entries[i % 4];
    if (i + 2 < p.end) copy16(shared_address(d.entries + (i + 2) % 4), entry_of(p, i + 2), true);
    x.sight = sight_of(p, i, entry);
    for (int v = 0; v < 2; v++) {
        x.keys[v] = d.keys[i >= p.opens][v];
        x.keys[v].first += entry.x * x.keys[v].stride;
    }
}

template <class S> DKV__DEVICE void begin_walk(const GatedWork &w) {
    let_next_start();
    if (threadIdx.x >= 32) return;
    const GatedWalk walk = gated_walk(w, S::BACKWARD ? 1 : w.sides);
    if (threadIdx.x == 0) desk<S>().walk = walk, desk<S>().work = &w;
}

/* Puts the next piece on the desk, with its first two tiles; false: there is none. By all threads. */
template <class S> __device__ __noinline__ bool next_piece() {
    Desk<S::M>       &d = desk<S>();
    const GatedPiece &p = d.piece;
    const int         thread = threadIdx.x;
    __syncthreads(); /* the piece before is done */
    const GatedWork &w = *d.work;
    if (thread == 0) gated_next(d.walk, d.piece, w);
    __syncthreads();
    if (!p.c) return false;
    RowStat &row = d.rows[thread];
    row.query = (p.m * S::M + thread) / p.c->G;
    if (S::BACKWARD) {
        const float4 x = __ldcg(w.stats + first_row<S::M>(p) + thread);
        row.lse = x.x, row.delta = x.y, row.unlift = x.z;
    }
    if (thread < 4) {
        const int         own = thread / 2, v = thread % 2, i = p.tile + thread;
        const dkv_tensor &t = p.c->source[v];
        const int64_t     key = p.c->first_key + (int64_t)p.g * p.c->own_keys;
        d.keys[own][v] = own ? Keys{(v ? w.own_v_rows : w.own_k_rows) + key * S::D * 2, S::D * 2, S::D}
                             : Keys{at(t, 0, p.g), t.stride_token, v ? p.c->d_v : p.c->d_k};
        if (thread < 2 && i < p.end) d.entries[i % 4] = __ldcg(entry_of(p, i));
        __syncwarp(15);
        if (thread == 0) put_tile<S>(i), put_tile<S>(i + 1);
    }
    __syncthreads();
    return true;
}

/* A step is its first key, TILE * i + at: KEYS keys of tile i from the at-th on, of which len_at are there. */
template <class S> DKV__DEVICE int len_at(unsigned key) {
    return desk<S>().tiles[key / TILE % 4].sight.len - (int)(key % TILE);
}
template <class S> DKV__DEVICE unsigned next_step(unsigned key) {
    return len_at<S>(key) > S::KEYS ? key + S::KEYS : (key | (TILE - 1)) + 1;
}
/* Begins to copy K and V of a step to place n. */
template <class S> DKV__DEVICE void copy_step(unsigned key, int n) {
    extern __shared__ __align__(1024) char shared[];
#pragma unroll
    for (int v = 0; v < 2; v++) {
        const Keys k = desk<S>().tiles[key / TILE % 4].keys[v];
        copy_rows<S::D, S::KEYS, S::THREADS>(shared + S::RING + (2 * n + v) * S::STAGE, k.first + key % TILE * k.stride,
                                             k.stride, len_at<S>(key), k.d);
    }
}
/* Begins to copy what a piece starts with, Q, backward dO, and the keys of its first step; returns that. */
template <class S> DKV__DEVICE unsigned begin_piece(const GatedWork &w) {
    extern __shared__ __align__(1024) char shared[];
    const GatedPiece &p = desk<S>().piece;
    const int64_t     from = first_row<S::M>(p) * S::D * 2;
    const unsigned    key = p.tile * TILE;
    copy_rows<S::D, S::M, S::M>(shared, w.q_rows + from, S::D * 2, S::M, S::D);
    if (S::BACKWARD) copy_rows<S::D, S::M, S::M>(shared + S::ROWS, w.d_out_rows + from, S::D * 2, S::M, S::D);
    copy_step<S>(key, 0);
    return key;
}
/* Waits for a step's keys, and puts a tile down for later ones; false: the piece ended before. */
template <class S> DKV__DEVICE bool begin_step(unsigned key) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads(); /* and what the step before has read may be overwritten */
    if (len_at<S>(key) <= 0) return false;
    if (key % TILE == 0 && threadIdx.x == 0) put_tile<S>(key / TILE + 2);
    return true;
}

/* The first of the four rows of a piece that a thread has, 8 apart. */
DKV__DEVICE int my_row() {
    const int thread = this_thread();
    return (thread & ~31) + (thread & 31) / 4;
}
/* Where a lane's chunk is, c chunks on in its row, if `first` is where it is for c = 0; c is even. */
template <int ROWS> DKV__DEVICE uint32_t chunk_at(uint32_t first, int c) {
    return (first ^ (uint32_t)(c % 8 * 16)) + (uint32_t)(c / 8 * ROWS * 128);
}

/* S = Q K^T of a warp's rows by 8 N keys. */
template <class T, int D, int M, int N>
DKV__DEVICE void scores32(float (&s)[2][N][4], const char *q, const char *k) {
    const int      thread = this_thread(), lane = thread & 31;
    const uint32_t q_at = shared_address(q) + tile_offset<128, M>((thread & ~31) + (lane & 15), lane >> 4);
    const uint32_t k_at = shared_address(k) + tile_offset<128, N * 8>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int u = 0; u < 4; u++) s[0][n][u] = s[1][n][u] = 0.0f;
    }
#pragma unroll D == 64 && N == 8 ? 1 : 8 /* registers */
    for (int c = 0; c < D / 8; c += 2) {
        uint32_t a[2][4], b[4];
        ldmatrix(a[0], chunk_at<M>(q_at, c));
        ldmatrix(a[1], chunk_at<M>(q_at, c) + 16 * 128);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix(b, chunk_at<N * 8>(k_at, c) + n * 8 * 128);
#pragma unroll
            for (int h = 0; h < 2; h++) mma<T>(s[h][n], a[h], b[0], b[1]), mma<T>(s[h][n + 1], a[h], b[2], b[3]);
        }
    }
}

/* O += P V by 16 N keys. */
template <class T, int D, int N>
DKV__DEVICE void mix32(float (&o)[2][D / 8][4], const uint32_t (&p)[2][N][4], const char *v) {
    const int      lane = this_thread() & 31;
    const uint32_t v_at = shared_address(v) + tile_offset<128, N * 16>(lane & 15, lane >> 4);
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (int c = 0; c < D / 8; c += 2) {
            uint32_t b[4];
            ldmatrix_t(b, chunk_at<N * 16>(v_at, c) + j * 16 * 128);
#pragma unroll
            for (int h = 0; h < 2; h++) mma<T>(o[h][c], p[h][j], b[0], b[1]), mma<T>(o[h][c + 1], p[h][j], b[2], b[3]);
        }
    }
}

template <class T, int D>
__global__ void __launch_bounds__(WgmmaShape<D>::M, 2) gated_forward_mma(const __grid_constant__ GatedWork w) {
    typedef GatedMmaShape<D, false> S;
    constexpr int                   M = S::M, KEYS = S::KEYS;
    extern __shared__ __align__(1024) char shared[];
    const Desk<M>                  &d = desk<S>();
    const GatedPiece               &p = d.piece;
    begin_walk<S>(w);
    while (next_piece<S>()) {
        float    s[2][KEYS / 8][4], o[2][D / 8][4] = {}, sum[2][2] = {}, alpha[2];
        float    top[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
        uint32_t weight[2][KEYS / 16][4];
        unsigned key = begin_piece<S>(w);
        for (int n = 0; begin_step<S>(key); n ^= 1, key = next_step<S>(key)) {
            const char *const k = shared + S::RING + 2 * n * S::STAGE;
            copy_step<S>(next_step<S>(key), n ^ 1);
            scores32<T, D, M>(s, shared, k);
            const Sight y = d.tiles[key / TILE % 4].sight;
            const int   at = key % TILE;
            const float factor[2] = {p.c->times, p.c->times};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const RowStat *const row = d.rows + my_row() + 16 * h;
                const int            seen[2] = {sees(y, row[0].query) - at, sees(y, row[8].query) - at};
                softmax_tile(s[h], top[h], sum[h], alpha, factor, 0.0f, seen, 0, y.bias);
                scale_rows(o[h], alpha);
#pragma unroll
                for (int j = 0; j < KEYS / 16; j++) weights<T>(weight[h][j], s[h], 2 * j);
            }
            mix32<T, D>(o, weight, k + S::STAGE);
        }
        store_outputs<D>(w, p, my_row(), o[0], top[0], sum[0]);
        store_outputs<D>(w, p, my_row() + 16, o[1], top[1], sum[1]);
    }
}

template <class T, int D>
__global__ void __launch_bounds__(WgmmaShape<D>::M, 2) gated_backward_mma(const __grid_constant__ GatedWork w) {
    typedef GatedMmaShape<D, true> S;
    constexpr int                  M = S::M, KEYS = S::KEYS;
    extern __shared__ __align__(1024) char shared[];
    const Desk<M>                 &d = desk<S>();
    const GatedPiece              &p = d.piece;
    begin_walk<S>(w);
    while (next_piece<S>()) {
        float       s[2][KEYS / 8][4], dp[2][KEYS / 8][4], dq[2][D / 8][4] = {}, sum[2] = {};
        uint32_t    weight[2][KEYS / 16][4];
        unsigned    key = begin_piece<S>(w);
        for (int n = 0; begin_step<S>(key); n ^= 1) {
            const char *const k = shared + S::RING + 2 * n * S::STAGE;
            scores32<T, D, M>(s, shared, k);
            copy_step<S>(next_step<S>(key), n ^ 1); /* here: registers */
            scores32<T, D, M>(dp, shared + S::ROWS, k + S::STAGE);
            const Sight y = d.tiles[key / TILE % 4].sight;
            const int   lane = this_thread() & 31;
            const float times = p.c->times;
            const bool  partly = y.tile < 0 || len_at<S>(key) < KEYS; /* not all rows see all keys */
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int     h = i / 2, u = i % 2 * 2;
                const RowStat row = d.rows[my_row() + 8 * i];
                const float   from = row.lse - y.bias;
                float         part = 0.0f;
#pragma unroll
                for (int j = 0; j < KEYS / 4; j++) {
                    float &x = s[h][j / 2][u + j % 2];
                    x = exp2_fast(fmaf(x, times, -from)) * (dp[h][j / 2][u + j % 2] - row.delta);
                }
                if (partly) {
                    const int seen = sees(y, row.query) - (int)(key % TILE) - lane % 4 * 2;
#pragma unroll
                    for (int j = 0; j < KEYS / 4; j++)
                        if (j / 2 * 8 + j % 2 >= seen) s[h][j / 2][u + j % 2] = 0.0f;
                }
#pragma unroll
                for (int j = 0; j < KEYS / 4; j++) part += s[h][j / 2][u + j % 2];
                sum[h] += part * (Name<T>::type == DKV_F16 ? row.unlift : 1.0f);
            }
#pragma unroll
            for (int j = 0; j < KEYS / 16; j++)
                weights<T>(weight[0][j], s[0], 2 * j), weights<T>(weight[1][j], s[1], 2 * j);
            mix32<T, D>(dq, weight, k);
            key = next_step<S>(key);
            if (key % TILE) continue;
#pragma unroll
            for (int h = 0; h < 2; h++) { /* the tile is done */
                for (int j = 16; j; j >>= 1) sum[h] += __shfl_xor_sync(~0u, sum[h], j);
                const int64_t cell = p.c->first_open + (int64_t)p.g * p.c->tiles + y.tile;
                if (lane == 0 && y.tile >= 0)
                    w.partial[(cell * w.blocks + p.m) * (M / 16) + my_row() / 16 + h] = sum[h];
                sum[h] = 0.0f;
            }
        }
        const RowStat *const row = d.rows + my_row();
        const float          unlift[2][2] = {{row[0].unlift, row[8].unlift}, {row[16].unlift, row[24].unlift}};
        store_gradients<D>(w, p, my_row(), dq[0], unlift[0]);
        store_gradients<D>(w, p, my_row() + 16, dq[1], unlift[1]);
    }
}

/* ---- backward over the suffixes' own keys: dK and dV --------------------------------------------------------------

   math    dK = scale dS^T Q and dV = P^T dO over the rows of the suffix, P of the softmax that made the output
   CTA     16 keys of a suffix and KV head; 4 warps for dK and 4 for dV share 128 rows out, and their sums meet at the
           end. Scores are made transposed, so that P^T and dS^T are operands as they come out of mma.sync
   why     N_q keys by G N_q rows: nothing beside the context, which gets no such gradient; so small and many CTAs   */

template <int D> struct OwnShape {
    static constexpr int OWN = KEYS * D * 2, ROWS = TILE * D * 2;
    static constexpr int SHARED = 2 * OWN + 2 * ROWS + TILE * (int)(sizeof(float4) + sizeof(float2));
};

/* The least lift of a suffix's rows of one KV head, as 2^-lift: what its sums over rows are kept at. */
DKV__DEVICE float common_unlift(const float4 *stats, int rows) {
    __shared__ float most_of[8];
    float            x = 0.0f;
    for (int i = threadIdx.x; i < rows; i += 256) x = fmaxf(x, __ldcg(stats + i).z);
    for (int i = 16; i; i >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    if (threadIdx.x % 32 == 0) most_of[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < 8; i++) x = fmaxf(x, most_of[i]);
    return x;
}

template <class T, int D> DKV__DEVICE void own_gradients(const GatedWork &w, const Part &part) {
    typedef OwnShape<D> S;
    constexpr int       M = WgmmaShape<D>::M;
    extern __shared__ __align__(1024) char shared[];
    char   *ks = shared, *vs = ks + S::OWN, *qs = vs + S::OWN, *gs = qs + S::ROWS;
    float4 *stat = (float4 *)(gs + S::ROWS);
    float2 *sight = (float2 *)(stat + TILE); /* keys of the suffix that a row sees; what its dO is weighed by */
    const int  warp = threadIdx.x / 32, lane = threadIdx.x & 31, r = lane / 4, t = lane & 3;
    const bool values = warp >= 4;
    const Suffix       &s = w.suffixes[part.of];
    const GatedContext &c = w.contexts[s.context];
    const int           key0 = part.row;
    const int64_t head_row = c.first_row + (int64_t)part.g * c.blocks * M;
    const int     first = s.first * c.G, end = (s.first + (int)s.x.N_q) * c.G;
    const float   unlift = Name<T>::type == DKV_F16 ? common_unlift(w.stats + head_row + first, end - first) : 1.0f;
    const int64_t key = c.first_key + (int64_t)part.g * c.own_keys + s.key + key0;
    copy_rows<D, KEYS, 256>(ks, w.own_k_rows + key * D * 2, D * 2, KEYS, D);
    copy_rows<D, KEYS, 256>(vs, w.own_v_rows + key * D * 2, D * 2, KEYS, D);
    float sum[D / 8][4] = {};
    for (int row0 = first + key0 * c.G; row0 < end; row0 += TILE) {
        const int n = least(end - row0, TILE), at = warp % 4 * 32;
        __syncthreads(); /* what is there is read no more */
        copy_rows<D, TILE, 256>(qs, w.q_rows + (head_row + row0) * D * 2, D * 2, n, D);
        copy_rows<D, TILE, 256>(gs, w.d_out_rows + (head_row + row0) * D * 2, D * 2, n, D);
        if (threadIdx.x < TILE) {
            const int row = row0 + (int)threadIdx.x;
            stat[threadIdx.x] = float4{INFINITY, 0.0f, 1.0f, INFINITY};
            if ((int)threadIdx.x < n) stat[threadIdx.x] = __ldcg(w.stats + head_row + row);
            sight[threadIdx.x] = float2{(int)threadIdx.x < n ? (float)(row / c.G - s.first - key0) : -1.0f,
                                        stat[threadIdx.x].z / unlift};
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
#pragma unroll 1
        for (int step = at; step < least(n, at + 32); step += 16) {
            float x[2][4] = {}, dp[2][4] = {};
            scores16<T, D, KEYS, 2, 128>(x, ks, 0, qs, step);
            if (!values) scores16<T, D, KEYS, 2, 128>(dp, vs, 0, gs, step);
#pragma unroll
            for (int n8 = 0; n8 < 2; n8++) {
#pragma unroll
                for (int u = 0; u < 4; u++) {
                    const int    row = step + 8 * n8 + 2 * t + (u & 1);
                    const float4 y = stat[row];
                    const float  p = exp2_fast(x[n8][u] * c.times - (values ? y.w : y.x)) * sight[row].y;
                    const bool   seen = (float)(r + (u >> 1) * 8) <= sight[row].x;
                    x[n8][u] = !seen ? 0.0f : values ? p : p * (dp[n8][u] - y.y);
                }
            }
            mix16<T, D, 2, 128>(sum, x, values ? gs : qs, step, TILE);
        }
    }
    float *sums = (float *)qs; /* [8 warps][D / 8][32 lanes][4] */
    __syncthreads();
#pragma unroll
    for (int n8 = 0; n8 < D / 8; n8++) *(float4 *)(sums + ((warp * (D / 8) + n8) * 32 + lane) * 4) = *(float4 *)sum[n8];
    __syncthreads();
    const dkv_tensor &to = values ? s.x.dv : s.x.dk;
    const bool        vector = is_even(to);
    const float       weight = values ? unlift : unlift * c.scale;
    for (int n8 = warp % 4; n8 < D / 8; n8 += 4) {
        float4 y = {};
        for (int i = 0; i < 4; i++) {
            const float4 z = *(float4 *)(sums + (((values * 4 + i) * (D / 8) + n8) * 32 + lane) * 4);
            y.x += z.x, y.y += z.y, y.z += z.z, y.w += z.w;
        }
        const float lo[2] = {y.x * weight, y.y * weight}, hi[2] = {y.z * weight, y.w * weight};
        const int   row = key0 + r, d = values ? c.d_v : c.d_k;
        store_out<2>(to, vector, d, Row{row, part.g, row < s.x.N_q}, 8 * n8 + 2 * t, lo);
        store_out<2>(to, vector, d, Row{row + 8, part.g, row + 8 < s.x.N_q}, 8 * n8 + 2 * t, hi);
    }
}

/* dQ of a head that was cut: its slots summed in order; a warp a row. */
template <int M, int D> DKV__DEVICE void sum_queries(const GatedWork &w, int job) {
    constexpr int N = D / 32;
    const int     lane = threadIdx.x & 31, r = job % (M / 8) * 8 + (int)threadIdx.x / 32, m = job / (M / 8) % w.blocks;
    HeadCut           cut;
    const bool          is_cut = cut_head(w, 1, job / (M / 8) / w.blocks, m, &cut);
    const int2          where = w.heads[is_cut ? cut.head : 0];
    const GatedContext &c = w.contexts[where.x];
    const GatedRow      y = gated_row<M>(w, c, where.y, m * M + r);
    const float         weight = c.scale * __ldcg(&w.stats[y.real ? y.at : 0].z);
    let_next_start();
    if (!is_cut || m >= c.blocks || !y.real) return;
    const Pieces &p = cut.pieces;
    const int     n = p.last - p.first + 1, some = piece_slot(p, p.last);
    const float  *columns = w.slots + r * D + lane * N;
    float         sum[N] = {};
    for (int i = 0; i < n; i += 32) {
        const int      slot = piece_slot(p, p.first + i + lane), safe = slot < 0 ? some : slot;
        const unsigned there = __ballot_sync(~0u, slot >= 0);
        for (int j = 0; j < least(n - i, 32); j += 8) {
            float x[8][N];
#pragma unroll
            for (int k = 0; k < 8; k++) { /* without a condition, so that no load waits for another */
                const float *from = columns + (int64_t)__shfl_sync(~0u, safe, j + k) * M * D;
#pragma unroll
                for (int u = 0; u < N; u += 2) *(float2 *)&x[k][u] = __ldcg((const float2 *)(from + u));
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
#pragma unroll
                for (int u = 0; u < N; u++) sum[u] += there >> (j + k) & 1 ? x[k][u] : 0.0f;
            }
        }
    }
#pragma unroll
    for (int u = 0; u < N; u++) sum[u] *= weight;
    store_out<N>(y.s->x.dq, is_even(y.s->x.dq), c.d_k, Row{y.i, y.h, true}, lane * N, sum);
}

/* d ln u of a cell: the sums of its tiles, row blocks and warps in a fixed order; by 8 lanes. Cells are counted over
   the heads of all contexts, as many for each as the largest D. */
template <int M> DKV__DEVICE void sum_cell(const GatedWork &w, int64_t cell) {
    constexpr int       WARPS = M / 16;
    const bool          real = cell < (int64_t)w.n_heads * w.most_cells;
    const int2          where = w.heads[real ? cell / w.most_cells : 0];
    const GatedContext &c = w.contexts[where.x];
    const int           b = real ? (int)(cell % w.most_cells) : c.D, lane = threadIdx.x & 7;
    const int64_t       at = (int64_t)where.y * c.D + b;
    float               sum = 0.0f;
    if (b < c.D && c.ln_u[at] >= DKV__GATE_OPEN_LN) {
        int first, n;
        tiles_of_bin(cutting(c.T_c, c.W, c.S, c.R), b, &first, &n);
        const float *from = w.partial + (c.first_open + (int64_t)where.y * c.tiles + first) * w.blocks * WARPS;
        const int64_t parts = (int64_t)n * w.blocks * WARPS;
        for (int64_t i = lane; i < parts; i += 8)
            if ((int)(i / WARPS % w.blocks) < c.blocks) sum += __ldcg(from + i);
    }
    for (int i = 4; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
    if (lane == 0 && b < c.D) c.d_ln_u[at] = sum;
}

/* The ends of backward, one behind the other in the grid: own keys; heads that were cut; and the cells,
   shared out among the rest. */
template <class T, int D> __global__ void __launch_bounds__(256, 2) gated_finish(const __grid_constant__ GatedWork w) {
    constexpr int M = WgmmaShape<D>::M;
    const int cuts = cuts_of(w, 1) * w.blocks * (M / 8), cut = (int)blockIdx.x - w.n_key_parts, cell = cut - cuts;
    if (cut < 0) {
        own_gradients<T, D>(w, w.key_parts[blockIdx.x]); /* needs nothing of the kernel before, and ends beside it */
        let_next_start();
    } else if (cell < 0) {
        sum_queries<M, D>(w, cut);
    } else {
        let_next_start();
        const int64_t step = (int64_t)(gridDim.x - w.n_key_parts - cuts) * 32, all = (int64_t)w.n_heads * w.most_cells;
        for (int64_t i = (int64_t)cell * 32 + threadIdx.x / 32 * 4; i < all; i += step)
            sum_cell<M>(w, i + threadIdx.x % 32 / 8);
    }
}

/* ---- preparing a batch: checks, tables, maps ---- */

int64_t tiles_of(const dkv_gated &c) { return all_tiles(cutting(c.T_c, c.W, c.S, c.R)); }
int64_t rows_of(const dkv_gated &c) { /* of a KV head */
    int64_t n = 0;
    for (int64_t i = 0; i < c.n_suffix; i++) n += c.suffix[i].N_q;
    return n * (c.H / c.Hkv);
}

/* K and V of the context as strided tensors, packed ones too. */
dkv_result context_of(const dkv_gated &c, dkv_tensor *k, dkv_tensor *v) {
    const dkv_segment &x = c.context;
    *k = x.k, *v = x.v;
    if (!x.packed) return x.rows || x.n != c.T_c ? DKV_ERR_SHAPE : DKV_OK;
    const dkv_packed &p = *x.packed;
    if (!p.data) return DKV_ERR_STATE;
    if (p.Hkv != c.Hkv || p.d_k != c.d_k || p.d_v != c.d_v) return DKV_ERR_SHAPE;
    for (int g = 0; g < p.Hkv; g++)
        if (p.rows[g] != c.T_c) return DKV_ERR_SHAPE;
    const Layout  y = layout_of(p.type, p.Hkv, p.d_k, p.d_v, p.rows);
    const int64_t rows = round_up(c.T_c, TILE), e = type_bytes(p.type);
    *k = dkv_tensor{p.data, p.type, y.k_row, rows * y.k_row, e};
    *v = dkv_tensor{(char *)p.data + y.v, p.type, y.v_row, rows * y.v_row, e};
    return DKV_OK;
}

dkv_result check_suffix(const dkv_gated &c, const dkv_suffix &x) {
    if (x.N_q < 0 || x.N_q > 1 << 20) return DKV_ERR_SHAPE;
    int ok = x.q.type <= DKV_BF16 && x.k.type <= DKV_BF16 && x.v.type <= DKV_BF16 && x.out.type <= DKV_BF16;
    ok = ok && x.d_out.type <= DKV_BF16 && x.dq.type <= DKV_BF16 && x.dk.type <= DKV_BF16 && x.dv.type <= DKV_BF16;
    if (!ok || (c.open && x.out_relaxed.type > DKV_BF16)) return DKV_ERR_TYPE;
    ok = is_whole(x.q) && is_whole(x.k) && is_whole(x.v) && is_whole(x.out) && is_whole(x.d_out) && is_whole(x.dq);
    return ok && is_whole(x.dk) && is_whole(x.dv) && (!c.open || is_whole(x.out_relaxed)) ? DKV_OK : DKV_ERR_ALIGN;
}

dkv_result check_gated(const dkv_gated &c, dkv_type *type) {
    dkv_tensor k, v;
    if (c.H < 1 || c.Hkv < 1 || c.H > 4096 || c.H % c.Hkv || c.n_suffix < 0) return DKV_ERR_SHAPE;
    if (c.d_k < 8 || c.d_k > 128 || c.d_k % 8 || c.d_v < 8 || c.d_v > 128 || c.d_v % 8) return DKV_ERR_SHAPE;
    if (c.D < 1 || c.D > 1 << 20 || c.T_c < 0 || c.T_c > 1 << 30 || c.W < 1 || c.W > FAR) return DKV_ERR_FIELD;
    if (c.S < 0 || c.S > FAR || c.R < 0 || c.R > FAR) return DKV_ERR_FIELD;
    if (!(c.scale >= 0.0f && c.scale <= 2.0e38f)) return DKV_ERR_FIELD; /* times log2 e it is finite */
    if (c.T_c > c.S + c.R + c.W * c.D) return DKV_ERR_RANGE;
    dkv_result r = context_of(c, &k, &v);
    for (int64_t i = 0; !r && i < c.n_suffix; i++) r = check_suffix(c, c.suffix[i]);
    if (!r && rows_of(c) > 1 << 24) r = DKV_ERR_SHAPE;
    if (r || !c.T_c) return r;
    if (k.type != v.type || (k.type != DKV_F16 && k.type != DKV_BF16)) return DKV_ERR_TYPE;
    if (*type != DKV_F32 && *type != k.type) return DKV_ERR_TYPE;
    if (!is_forward(k) || !is_forward(v)) return DKV_ERR_ALIGN;
    *type = k.type;
    return DKV_OK;
}

/* What a batch comes to, and where things lie: tables in the block, what passes write in the workspace. */
struct GatedSizes {
    dkv_type type;
    int      D, M, sides, groups, sms, sm90, wgmma;
    int64_t  heads, suffixes, queries, keys, rows, blocks, all_blocks, own, opens, cells, tiles, most_tiles;
    int64_t  q_parts, own_parts, key_parts;
    int64_t  arrived_at, tile_at, suffix_at, question_at, head_at, own_at, count_at; /* in the block */
    int64_t  q_part_at, own_part_at, key_part_at, block;
    int64_t  open_at, before_at, stats_at, q_at, g_at, k_at, v_at, partial_at, slots_at, ws; /* in the workspace */
};

int64_t place(int64_t *at, int64_t bytes) {
    const int64_t here = *at;
    *at = round_up(here + bytes, 128);
    return here;
}

/* Tiles of its own keys that a row block looks at: of suffixes that it has rows of, up to their last query there. */
template <class F> int64_t own_tiles(const dkv_gated &c, int64_t M, int64_t m, F each) {
    const int64_t G = c.H / c.Hkv;
    int64_t       n = 0, first = 0, key = 0;
    for (int64_t i = 0; i < c.n_suffix; i++) {
        const int64_t N_q = c.suffix[i].N_q, last = least(((m + 1) * M - 1) / G - first, N_q - 1);
        if (first * G < (m + 1) * M && (first + N_q) * G > m * M) {
            for (int64_t j = 0; j <= last; j += TILE, n++)
                each(OwnTile{(int32_t)(key + j), (int32_t)first, (int32_t)(first + N_q), (int32_t)(first + j - 1)});
        }
        first += N_q;
        key += round_up(N_q, TILE);
    }
    return n;
}
int64_t most_own_tiles(const dkv_gated &c, int64_t M) {
    int64_t n = 0;
    for (int64_t m = 0; m * M < rows_of(c); m++) n = most(n, own_tiles(c, M, m, [](const OwnTile &) {}));
    return n;
}

/* CTAs in groups of blocks: as many groups as fill whole waves best. */
int groups_of(int64_t blocks, int sides, int sms) {
    int    best = sides;
    double least_time = 1e30;
    for (int g = sides; g == sides || g * blocks <= 4 * (int64_t)sms; g++) {
        double time = (double)ceil_div(g * blocks, sms) / g;
        if (time < least_time * 0.98) best = g, least_time = time;
    }
    return best;
}

dkv_result gated_sizes(GatedSizes *s, const dkv_gated *c, int64_t n, const Device &dev) {
    *s = GatedSizes{DKV_F32, 64};
    s->sm90 = dev.sm90, s->wgmma = dev.wgmma;
    for (int64_t i = 0; i < n; i++) {
        dkv_result r = check_gated(c[i], &s->type);
        if (r) return r;
        if (most(c[i].d_k, c[i].d_v) > 64) s->D = 128;
        if (i && !c[i].open != !c[0].open) return DKV_ERR_FIELD; /* a batch is straight-through as a whole */
    }
    if (s->type == DKV_F32) s->type = DKV_BF16;
    s->M = s->D == 64 ? 192 : 128;
    s->sms = dev.sms;
    s->sides = n && c[0].open ? 2 : 1;
    for (int64_t i = 0; i < n; i++) {
        const int64_t blocks = ceil_div(rows_of(c[i]), s->M), Hkv = c[i].Hkv;
        s->heads += Hkv;
        s->suffixes += c[i].n_suffix;
        s->queries += rows_of(c[i]) / (c[i].H / Hkv);
        for (int64_t x = 0; x < c[i].n_suffix; x++) {
            s->keys += round_up(c[i].suffix[x].N_q, TILE) * Hkv;
            s->key_parts += ceil_div(c[i].suffix[x].N_q, KEYS) * Hkv;
        }

        s->rows += blocks * s->M * Hkv;
        s->blocks = most(s->blocks, blocks);
        s->all_blocks += blocks;
        s->own += most_own_tiles(c[i], s->M) * blocks;
        s->opens += tiles_of(c[i]) * Hkv;
        s->cells = most(s->cells, c[i].D);
        s->tiles += tiles_of(c[i]);
        s->most_tiles = most(s->most_tiles, tiles_of(c[i]));
    }
    s->own_parts = s->keys / CHUNK;
    s->q_parts = s->rows / CHUNK;
    if (n > UINT16_MAX || s->rows > 1 << 30 || s->keys > 1 << 30 || s->opens > 1 << 28 || s->own > 1 << 24)
        return DKV_ERR_SHAPE;
    const int ctas = dev.wgmma ? dev.sms : 2 * dev.sms; /* that run together, by wgmma and by mma.sync */
    s->groups = s->rows ? groups_of(s->blocks, s->sides, ctas) : s->sides;
    int64_t at = 0;
    place(&at, n * (int64_t)sizeof(GatedContext));
    s->suffix_at = place(&at, s->suffixes * (int64_t)sizeof(Suffix));
    s->question_at = place(&at, s->queries * (int64_t)sizeof(Question));
    s->head_at = place(&at, s->heads * (int64_t)sizeof(int2));
    s->own_at = place(&at, s->own * (int64_t)sizeof(OwnTile));
    s->count_at = place(&at, s->all_blocks * 4);
    s->q_part_at = place(&at, s->q_parts * (int64_t)sizeof(Part));
    s->own_part_at = place(&at, s->own_parts * (int64_t)sizeof(Part));
    s->key_part_at = place(&at, s->key_parts * (int64_t)sizeof(Part));
    s->tile_at = place(&at, s->tiles * (int64_t)sizeof(Tile));
    s->arrived_at = place(&at, 4);
    s->block = at;
    at = 0;
    s->before_at = place(&at, s->sides * (s->heads + 1) * 4);
    s->open_at = place(&at, s->sides * s->opens * (int64_t)sizeof(Open));
    s->stats_at = place(&at, s->rows * (int64_t)sizeof(float4));
    s->q_at = place(&at, s->rows * s->D * 2);
    s->g_at = place(&at, s->rows * s->D * 2);
    s->k_at = place(&at, s->keys * s->D * 2);
    s->v_at = place(&at, s->keys * s->D * 2);
    s->partial_at = place(&at, s->opens * s->blocks * (s->M / 16) * 4);
    s->slots_at = place(&at, s->groups * s->blocks * 2 * s->M * (s->D + 2) * 4);
    s->ws = at;
    return DKV_OK;
}

dkv_result describe_context(GatedContext *x, const dkv_gated &c, const GatedSizes &s) {
    dkv_tensor k, v;
    memset((void *)x, 0, sizeof *x);
    dkv_result r = context_of(c, &k, &v);
    const bool tma = s.wgmma && c.T_c;
    if (!r && tma) r = encode_map(&x->k, k, c.d_k, c.T_c, c.Hkv, s.D, CHUNK);
    if (!r && tma) r = encode_map(&x->v, v, c.d_v, c.T_c, c.Hkv, s.D, CHUNK);
    x->source[0] = k, x->source[1] = v;
    x->ln_u = c.ln_u;
    x->open = c.open;
    x->d_ln_u = c.d_ln_u;
    x->T_c = c.T_c, x->W = c.W, x->S = c.S, x->R = c.R;
    x->D = (int32_t)c.D, x->H = c.H, x->Hkv = c.Hkv, x->G = c.H / c.Hkv, x->d_k = c.d_k, x->d_v = c.d_v;
    x->queries = (int32_t)(rows_of(c) / x->G);
    x->blocks = (int32_t)ceil_div(rows_of(c), s.M);
    x->tiles = (int32_t)tiles_of(c);
    x->own_tiles = (int32_t)most_own_tiles(c, s.M);
    for (int64_t i = 0; i < c.n_suffix; i++) x->own_keys += (int32_t)round_up(c.suffix[i].N_q, TILE);
    x->scale = c.scale > 0.0f ? c.scale : 1.0f / sqrtf((float)c.d_k);
    x->times = x->scale * LOG2E;
    return r;
}

/* ---- the block's tables, in its order ---- */

void post_contexts(Post *post, const dkv_gated *c, int64_t n, const GatedSizes &s) {
    GatedContext x, all = {};
    for (int64_t i = 0; i < n; i++) {
        describe_context(&x, c[i], s);
        x.first_tile = all.first_tile, x.first_open = all.first_open, x.first_own = all.first_own;
        x.first_row = all.first_row, x.first_key = all.first_key;
        x.first_question = all.first_question, x.first_block = all.first_block;
        all.first_tile += x.tiles, all.first_open += (int64_t)x.tiles * x.Hkv;
        all.first_own += (int64_t)x.own_tiles * x.blocks;
        all.first_row += (int64_t)x.blocks * s.M * x.Hkv;
        all.first_key += (int64_t)x.own_keys * x.Hkv;
        all.first_question += x.queries, all.first_block += x.blocks;
        post->put(&x, sizeof x);
    }
}

void post_suffixes(Post *post, const dkv_gated &c, int32_t context) {
    Suffix y = {};
    y.context = context;
    for (int64_t j = 0; j < c.n_suffix; j++) {
        y.x = c.suffix[j];
        post->put(&y, sizeof y);
        y.first += (int32_t)y.x.N_q, y.key += (int32_t)round_up(y.x.N_q, TILE);
    }
}

void post_own_tiles(Post *post, const dkv_gated &c, int64_t M) {
    const int64_t all = most_own_tiles(c, M);
    const OwnTile none = {};
    for (int64_t m = 0; m * M < rows_of(c); m++) {
        int64_t k = own_tiles(c, M, m, [&](const OwnTile &y) { post->put(&y, sizeof y); });
        for (; k < all; k++) post->put(&none, sizeof none);
    }
}

void post_parts(Post *post, int32_t of, int32_t Hkv, int64_t rows, int step) {
    for (int32_t g = 0; g < Hkv; g++) {
        for (int64_t row = 0; row < rows; row += step) {
            const Part y = {of, g, (int32_t)row};
            post->put(&y, sizeof y);
        }
    }
}

template <class F> void each_suffix(const dkv_gated *c, int64_t n, F f) { /* f(context, suffix, index of all) */
    int32_t all = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < c[i].n_suffix; j++) f(c[i], c[i].suffix[j], all++);
}

void post_gated(Post *post, const dkv_gated *c, int64_t n, const GatedSizes &s) {
    post_contexts(post, c, n, s);
    post->align(s.suffix_at);
    for (int64_t i = 0; i < n; i++) post_suffixes(post, c[i], (int32_t)i);
    post->align(s.question_at);
    each_suffix(c, n, [&](const dkv_gated &, const dkv_suffix &x, int32_t all) {
        for (Question q = {all, 0}; q.i < x.N_q; q.i++) post->put(&q, sizeof q);
    });
    post->align(s.head_at);
    for (int64_t i = 0; i < n; i++)
        for (int2 head = {(int)i, 0}; head.y < c[i].Hkv; head.y++) post->put(&head, sizeof head);
    post->align(s.own_at);
    for (int64_t i = 0; i < n; i++) post_own_tiles(post, c[i], s.M);
    post->align(s.count_at);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t m = 0; m * s.M < rows_of(c[i]); m++) {
            const int32_t k = (int32_t)own_tiles(c[i], s.M, m, [](const OwnTile &) {});
            post->put(&k, sizeof k);
        }
    }
    post->align(s.q_part_at);
    for (int64_t i = 0; i < n; i++) post_parts(post, (int32_t)i, c[i].Hkv, round_up(rows_of(c[i]), s.M), CHUNK);
    post->align(s.own_part_at);
    each_suffix(c, n, [&](const dkv_gated &of, const dkv_suffix &x, int32_t all) {
        post_parts(post, all, of.Hkv, round_up(x.N_q, TILE), CHUNK);
    });
    post->align(s.key_part_at);
    each_suffix(c, n, [&](const dkv_gated &of, const dkv_suffix &x, int32_t all) {
        post_parts(post, all, of.Hkv, x.N_q, KEYS);
    });
    post->flush();
}

/* ---- the passes ---- */

/* Rows of 16 bits, gathered: [rows][D]. */
dkv_result encode_rows(CUtensorMap *map, char *data, dkv_type type, int D, int64_t rows) {
    return encode_map(map, dkv_tensor{data, type, D * 2, 0, 2}, D, rows, 1, D, CHUNK);
}

dkv_result gated_work(GatedWork *w, const dkv_cuda_gated *k) {
    char         *block = (char *)k->block, *ws = (char *)k->ws;
    GatedSizes    s;
    memcpy(&s, k->sizes, sizeof s);
    memset((void *)w, 0, sizeof *w);
    dkv_result r = DKV_OK;
    if (s.wgmma) {
        r = encode_rows(&w->q, ws + s.q_at, s.type, s.D, s.rows);
        if (!r) r = encode_rows(&w->d_out, ws + s.g_at, s.type, s.D, s.rows);
        if (!r) r = encode_rows(&w->own_k, ws + s.k_at, s.type, s.D, s.keys);
        if (!r) r = encode_rows(&w->own_v, ws + s.v_at, s.type, s.D, s.keys);
    }
    w->contexts = (const GatedContext *)block;
    w->suffixes = (const Suffix *)(block + s.suffix_at);
    w->questions = (const Question *)(block + s.question_at);
    w->tiles = (const Tile *)(block + s.tile_at);
    w->heads = (const int2 *)(block + s.head_at);
    w->own = (const OwnTile *)(block + s.own_at);
    w->own_count = (const int32_t *)(block + s.count_at);
    w->q_parts = (const Part *)(block + s.q_part_at);
    w->own_parts = (const Part *)(block + s.own_part_at);
    w->key_parts = (const Part *)(block + s.key_part_at);
    w->arrived = (int *)(block + s.arrived_at);
    w->before = (int *)(ws + s.before_at);
    w->opens = (Open *)(ws + s.open_at);
    w->stats = (float4 *)(ws + s.stats_at);
    w->q_rows = ws + s.q_at;
    w->d_out_rows = ws + s.g_at;
    w->own_k_rows = ws + s.k_at;
    w->own_v_rows = ws + s.v_at;
    w->partial = (float *)(ws + s.partial_at);
    w->slots = (float *)(ws + s.slots_at);
    w->opens_of_side = s.opens;
    w->n_heads = (int)s.heads;
    w->sides = s.sides;
    w->groups = s.groups;
    w->blocks = (int)s.blocks;
    w->n_q_parts = (int)s.q_parts;
    w->n_own_parts = (int)s.own_parts;
    w->n_key_parts = (int)s.key_parts;
    w->most_cells = (int)s.cells;
    w->sms = s.sms;
    w->sm90 = s.sm90, w->wgmma = s.wgmma;
    return r;
}

template <class T, int D> dkv_result run_gated(const GatedWork &w, bool backward, cudaStream_t stream) {
    constexpr int M = WgmmaShape<D>::M;
    const int     lists = w.n_heads * (backward ? 1 : w.sides);
    const int     cells = (int)least(ceil_div(w.n_heads * (int64_t)w.most_cells, 32), (int64_t)w.sms);
    const dim3    gather(lists + (w.n_q_parts + w.n_own_parts) * GatherShape<D>::OF_PART), grid(w.groups * w.blocks);
    dkv_result    r = DKV_OK;
    auto next = [&](void (*kernel)(GatedWork), dim3 ctas, int threads, int shared) {
        if (!r) r = launch(kernel, ctas, threads, shared, w.sm90, stream, w);
    };
    if (backward) {
        next(gated_gather<T, D, true>, gather, 256, 0);
        if (w.wgmma) next(gated_backward<T, D>, grid, BackwardShape<D>::THREADS, BackwardShape<D>::SHARED);
        else next(gated_backward_mma<T, D>, grid, M, GatedMmaShape<D, true>::SHARED);
        next(gated_finish<T, D>, w.n_key_parts + cuts_of(w, 1) * w.blocks * (M / 8) + cells, 256, OwnShape<D>::SHARED);
    } else {
        next(gated_gather<T, D, false>, gather, 256, 0);
        if (w.wgmma) next(gated_forward<T, D>, grid, WgmmaShape<D>::THREADS, GatedShape<D>::SHARED);
        else next(gated_forward_mma<T, D>, grid, M, GatedMmaShape<D, false>::SHARED);
        if (w.groups > w.sides) next(gated_combine<M, D>, dim3(M / 8, cuts_of(w, w.sides), w.blocks), 256, 0);
    }
    return r;
}

/* d ln u without any query; grid: heads. */
__global__ void gated_zeros(const GatedContext *contexts, const int2 *heads) {
    const GatedContext &c = contexts[heads[blockIdx.x].x];
    for (int b = threadIdx.x; b < c.D; b += 256) c.d_ln_u[(int64_t)heads[blockIdx.x].y * c.D + b] = 0.0f;
}

dkv_result gated_pass(const dkv_cuda_gated *k, bool backward, void *stream) {
    GatedSizes   s;
    GatedWork    w;
    cudaStream_t st = (cudaStream_t)stream;
    memcpy(&s, k->sizes, sizeof s);
    const char *block = (const char *)k->block;
    if (!s.rows) {
        if (!backward || !s.heads) return DKV_OK;
        return launch(gated_zeros, (unsigned)s.heads, 256, stream, (const GatedContext *)block,
                      (const int2 *)(block + s.head_at));
    }
    dkv_result r = gated_work(&w, k);
    if (r) return r;
    if (s.type == DKV_F16)
        return s.D == 64 ? run_gated<__half, 64>(w, backward, st) : run_gated<__half, 128>(w, backward, st);
    return s.D == 64 ? run_gated<__nv_bfloat16, 64>(w, backward, st) : run_gated<__nv_bfloat16, 128>(w, backward, st);
}

} /* namespace */

extern "C" dkv_result dkv_cuda_gated_size(size_t *block_bytes, size_t *ws_bytes, const dkv_gated *c, int64_t n) {
    Device     dev;
    GatedSizes s;
    dkv_result r = device_read(&dev);
    if (!r) r = gated_sizes(&s, c, n, dev);
    if (r) return r;
    *block_bytes = (size_t)most(s.block, (int64_t)128);
    *ws_bytes = (size_t)most(s.ws, (int64_t)128);
    return DKV_OK;
}

extern "C" dkv_result dkv_cuda_gated_prepare(dkv_cuda_gated *work, const dkv_gated *c, int64_t n, void *block,
                                             size_t block_bytes, void *ws, size_t ws_bytes, void *stream) {
    static_assert(sizeof(GatedSizes) <= sizeof work->sizes, "sizes");
    Device       dev;
    GatedSizes   s;
    GatedContext x;
    Post         post(block, stream);
    dkv_result   r = device_read(&dev);
    if (!r) r = gated_sizes(&s, c, n, dev);
    if (r) return r;
    if (block_bytes < (size_t)s.block || ws_bytes < (size_t)s.ws) return DKV_ERR_CAPACITY;
    if ((uintptr_t)block % 128 || (uintptr_t)ws % 128) return DKV_ERR_ALIGN;
    for (int64_t i = 0; i < n && !r; i++) r = describe_context(&x, c[i], s); /* before any write */
    if (r) return r;
    if (s.heads) {
        post_gated(&post, c, n, s);
        r = post.result;
        if (s.most_tiles && !r)
            r = launch(make_tiles, dim3((unsigned)ceil_div(s.most_tiles, 256), (unsigned)n), 256, stream,
                       (const GatedContext *)block, (Tile *)((char *)block + s.tile_at));
        /* last: what comes behind it waits for all of the above, although kernels read their tables before they wait */
        if (!r) r = did(cudaMemsetAsync((char *)block + s.arrived_at, 0, 4, (cudaStream_t)stream));
    }
    if (r) return r;
    memset(work, 0, sizeof *work);
    work->block = block;
    work->ws = ws;
    memcpy(work->sizes, &s, sizeof s);
    return DKV_OK;
}

extern "C" dkv_result dkv_cuda_gated_forward(const dkv_cuda_gated *work, void *stream) {
    return gated_pass(work, false, stream);
}

extern "C" dkv_result dkv_cuda_gated_backward(const dkv_cuda_gated *work, void *stream) {
    return gated_pass(work, true, stream);
}
