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

constexpr int LUCE_STREAM_THREADS = 640;

static inline ggml_cuda_kernel_launch_params luce_stream_launch(ggml_backend_cuda_context & ctx, int64_t n_row, int64_t n_stream) {
    return ggml_cuda_kernel_launch_params(
        dim3((unsigned) n_row, (unsigned) n_stream), dim3(LUCE_STREAM_THREADS), (size_t) 0, ctx.stream());
}

// One stream of a row by one thread block of LUCE_STREAM_THREADS: value(i) for i < h into `out` (may be NULL), and out / sqrt(mean
// of squares + eps) * gain into `normed` (may be NULL). Four neighbouring values a thread and step; the first steps' stay in registers.
template <typename F>
static __device__ __forceinline__ void luce_stream_norm(int h, F value, float * out, float * normed, const float * gain, float eps) {
    constexpr int n = LUCE_STREAM_THREADS;
    __shared__ float shared[n / 32];
    float kept[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    float squares = 0.0f;
    for (int i0 = 4 * threadIdx.x; i0 < h; i0 += 4 * n) {
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            v[e] = i0 + e < h ? value(i0 + e) : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (i0 + e < h) {
                if (out) {
                    out[i0 + e] = v[e];
                }
                squares = fmaf(v[e], v[e], squares);
            }
            if (i0 < 4 * n) {
                kept[e] = v[e];
            }
        }
    }
    if (!normed) {
        return;
    }
    const float scale = 1.0f / sqrtf(luce_block_sum<n>(squares, shared) / (float) h + eps);
    for (int i0 = 4 * threadIdx.x; i0 < h; i0 += 4 * n) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (i0 + e < h) {
                normed[i0 + e] = (i0 < 4 * n ? kept[e] : value(i0 + e)) * scale * gain[i0 + e];
            }
        }
    }
}

static inline const luce_row * luce_rows(const ggml_tensor * rows) {
    return (const luce_row *) rows->data;
}

// floats from one row of a tensor to the next
static inline int64_t luce_stride(const ggml_tensor * t) {
    return (int64_t) (t->nb[1] / sizeof(float));
}
