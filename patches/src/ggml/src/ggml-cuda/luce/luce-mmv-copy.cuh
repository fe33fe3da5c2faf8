// pyluce: a warp's copies from global to shared memory.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// On Hopper and later lane 0 asks for bulk copies, which count their bytes on the mbarrier of the stage that they fill; elsewhere
// all lanes copy at once, and there is nothing to wait for. Addresses and sizes are multiples of 16 bytes.
#pragma once

#include "luce-common.cuh"

// What lanes wrote to shared memory before it, the warp's lanes read after it.
static __device__ __forceinline__ void luce_syncwarp() {
#ifdef GGML_USE_HIP
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
#else
    __syncwarp();
#endif
}

// a value that another kernel may just have written: not from the multiprocessor's own cache
static __device__ __forceinline__ int luce_load_l2(const int32_t * p) {
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && !defined(LUCE_EMULATED_COPY)
    return __ldcg(p);
#else
    return *p;
#endif
}

// a line that will be read soon
static __device__ __forceinline__ void luce_prefetch(const void * p) {
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && !defined(LUCE_EMULATED_COPY)
    asm volatile("prefetch.global.L1 [%0];" :: "l"(__cvta_generic_to_global(p)));
#else
    GGML_UNUSED(p);
#endif
}

#if !defined(LUCE_EMULATED_COPY)
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
constexpr bool luce_bulk_copies = true;

static __device__ __forceinline__ uint32_t luce_shared_address(const void * p) {
    return (uint32_t) __cvta_generic_to_shared(p);
}

// n barriers, each for one announcement and the bytes that it tells of
static __device__ __forceinline__ void luce_copy_init(uint64_t * barriers, int n, int lane) {
    if (lane == 0) {
        for (int i = 0; i < n; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(luce_shared_address(barriers + i)) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
}

// lane 0: so many bytes will come (0: the stage is full as it is)
static __device__ __forceinline__ void luce_copy_announce(uint64_t * barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(luce_shared_address(barrier)), "r"(bytes) : "memory");
}

// Lane 0. `once`: weights, which nobody reads again before a whole step's have passed: they shall not drive out of the L2 cache what is read again soon,
// activations and the kernels' own code.
template <bool once = true>
static __device__ __forceinline__ void luce_copy(char * to, const char * from, int n, uint64_t * barrier, int) {
    if constexpr (once) {
        uint64_t policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                     :: "r"(luce_shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(n), "r"(luce_shared_address(barrier)), "l"(policy) : "memory");
    } else {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(luce_shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(n), "r"(luce_shared_address(barrier)) : "memory");
    }
}

static __device__ __forceinline__ void luce_copy_wait(uint64_t * barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred full;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 full, [%0], %1;\n"
        "@!full bra again;\n"
        "}\n" :: "r"(luce_shared_address(barrier)), "r"(parity) : "memory");
}
#else
constexpr bool luce_bulk_copies = false;

static __device__ __forceinline__ void luce_copy_init(uint64_t *, int, int) {}
static __device__ __forceinline__ void luce_copy_announce(uint64_t *, int) {}
static __device__ __forceinline__ void luce_copy_wait(uint64_t *, int) { luce_syncwarp(); }

// all lanes
template <bool once = true>
static __device__ __forceinline__ void luce_copy(char * to, const char * from, int n, uint64_t *, int lane) {
    const auto read  = [&](int at) { return *(const uint4 *) (from + min(at, n - 16)); };
    const auto write = [&](int at, const uint4 & v) {
        if (at < n) {
            *(uint4 *) (to + at) = v;
        }
    };
    for (int at = 16 * lane; at < n; at += 4 * 512) { // four under way at once
        const uint4 v0 = read(at);
        const uint4 v1 = read(at + 512);
        const uint4 v2 = read(at + 1024);
        const uint4 v3 = read(at + 1536);
        write(at, v0);
        write(at + 512, v1);
        write(at + 1024, v2);
        write(at + 1536, v3);
    }
}
#endif
#endif
