// pyluce: what the device kernels share.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-cuda.cuh"

#include "common.cuh"

// one entry of the `rows` table
struct luce_row {
    int32_t slot;
    int32_t position;
    int32_t reserved[2];
};

// the physical cell of a token; pages: I32 [n_page_max, n_slot]
static __device__ __forceinline__ int64_t luce_cell(const int32_t * pages, int64_t n_page_max, int32_t slot, int32_t position) {
    return (int64_t) pages[slot * n_page_max + position / GGML_LUCE_PAGE] * GGML_LUCE_PAGE + position % GGML_LUCE_PAGE;
}

static __device__ __forceinline__ float luce_sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

static __device__ __forceinline__ float luce_silu(float x) {
    return x * luce_sigmoid(x);
}

// The sum over a block of n_threads (a multiple of 32), the same in every thread: lanes in a butterfly, then warps in
// rising order. `shared` holds n_threads/32 floats; two barriers, so it may be used again at once.
template <int n_threads>
static __device__ __forceinline__ float luce_block_sum(float x, float * shared) {
    static_assert(n_threads % 32 == 0, "whole warps");
    x = warp_reduce_sum<32>(x);
    if (n_threads == 32) {
        return x;
    }
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = x;
    }
    __syncthreads();
    float sum = shared[0];
#pragma unroll
    for (int w = 1; w < n_threads / 32; w++) {
        sum += shared[w];
    }
    __syncthreads();
    return sum;
}

// Four neighbouring floats at x[i0], those beyond n as 0; `whole`: n and the address allow 16-byte accesses.
static __device__ __forceinline__ float4 luce_load4(const float * x, int i0, int n, bool whole) {
    if (whole) {
        return *(const float4 *) (x + i0);
    }
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    v.x = i0 + 0 < n ? x[i0 + 0] : 0.0f;
    v.y = i0 + 1 < n ? x[i0 + 1] : 0.0f;
    v.z = i0 + 2 < n ? x[i0 + 2] : 0.0f;
    v.w = i0 + 3 < n ? x[i0 + 3] : 0.0f;
    return v;
}

static __device__ __forceinline__ void luce_store4(float * x, int i0, int n, bool whole, float4 v) {
    if (whole) {
        *(float4 *) (x + i0) = v;
        return;
    }
    const float part[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
    for (int e = 0; e < 4; e++) {
        if (i0 + e < n) {
            x[i0 + e] = part[e];
        }
    }
}

static __device__ __forceinline__ float4 luce_fma4(float4 x, float w, float4 y) {
    return make_float4(fmaf(x.x, w, y.x), fmaf(x.y, w, y.y), fmaf(x.z, w, y.z), fmaf(x.w, w, y.w));
}

static __device__ __forceinline__ bool luce_aligned(const void * p) {
    return (uintptr_t) p % 16 == 0;
}

static inline const luce_row * luce_rows(const ggml_tensor * rows) {
    return (const luce_row *) rows->data;
}

// floats from one row of a tensor to the next
static inline int64_t luce_stride(const ggml_tensor * t) {
    return (int64_t) (t->nb[1] / sizeof(float));
}
