// pyluce: a stream of hyper-connections and the norm on it, by one thread block.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-common.cuh"
#include "luce-mmv-unit.cuh"

constexpr int LUCE_STREAM_PARTS = 640; // that a stream's sum of squares is made of, each of the values 4*i .. 4*i + 3 and those 4*LUCE_STREAM_PARTS on

// what follows of a product's columns, in 8 bits as the product would round them; memory NULL: nobody asked
struct luce_stream_x8 {
    char * memory; // a column for each row of the graph
    int    pitch;  // bytes from column to column
};

template <int per> // parts of a thread
static inline ggml_cuda_kernel_launch_params luce_stream_launch(ggml_backend_cuda_context & ctx, int64_t n_row, int64_t n_stream) {
    return ggml_cuda_kernel_launch_params(
        dim3((unsigned) n_row, (unsigned) n_stream), dim3(LUCE_STREAM_PARTS / per), (size_t) 0, ctx.stream());
}

// The gains of the thread's first values, NULL: none. Weights, so before the kernel in front has finished.
template <int per>
static __device__ __forceinline__ void luce_stream_gain(const float * gain, int h, float4 (&own)[per]) {
#pragma unroll
    for (int v = 0; v < per; v++) {
        const int i0 = 4 * ((int) threadIdx.x + v * (LUCE_STREAM_PARTS / per));
        own[v] = gain && i0 < h ? luce_load4(gain, i0, h, h % 4 == 0 && luce_aligned(gain)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Values i .. i + 3 of a column of k into 8 bits: 8 neighbouring lanes have a block of 32. As ring_quantise_unit (luce-mmv-dot.cuh) has them.
static __device__ __forceinline__ void luce_stream_quantise(float4 x, int i, int k, char * column) {
    float top = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, offset, 32));
    }
    const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    const float v[4] = { x.x, x.y, x.z, x.w };
    int packed = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        packed |= (int) ((uint32_t) (uint8_t) (int8_t) __float2int_rn(v[e] * inverse) << (8 * e));
    }
    int sum = ggml_cuda_dp4a(packed, 0x01010101, 0);
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, offset, 32);
    }
    const int plane = luce_x_plane(k);
    const int block = i / 32;
    const int word  = i % 32 / 4;
    *(int *) (column + ((block & 1) + word / 4 * 2) * plane + (block >> 1) * 16 + word % 4 * 4) = packed;
    if (word == 0) {
        float *     scales = (float *) (column + 4 * plane);
        const float d      = top / 127.0f;
        scales[block]          = d;
        scales[k / 32 + block] = d * (float) sum;
    }
}

// One stream of a row by one thread block of LUCE_STREAM_PARTS / per threads: value(v, i0, whole) gives values i0 .. i0 + 3 of h into `out` (may be
// NULL), and out / sqrt(mean of squares + eps) * gain goes into `normed` (may be NULL). A thread's first `per` fours stay in registers, and `own` are their
// gains. column (may be NULL): the row's column of `all` values in 8 bits, of which this stream has those from `first` on; h is a multiple of 128 then.
template <int per, typename F>
static __device__ __forceinline__ void luce_stream_norm(
        int h, bool whole, F value, float * out, float * normed, const float * gain, const float4 (&own)[per], float eps, char * column, int first, int all) {
    constexpr int n      = LUCE_STREAM_PARTS;
    constexpr int n_warp = n / 32;
    __shared__ float shared[n_warp];
    whole = whole && h % 4 == 0;
    float4 kept[per];
    float  squares[per];
#pragma unroll
    for (int v = 0; v < per; v++) {
        kept[v]    = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        squares[v] = 0.0f;
    }
    for (int base = 0; base < h; base += 4 * n) {
#pragma unroll
        for (int v = 0; v < per; v++) {
            const int i0 = base + 4 * ((int) threadIdx.x + v * (n / per));
            if (i0 < h) {
                const float4 x = value(v, i0, whole);
                if (out) {
                    luce_store4(out, i0, h, whole, x);
                }
                squares[v] = fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, fmaf(x.x, x.x, squares[v]))));
                if (base == 0) {
                    kept[v] = x;
                }
            }
        }
    }
    if (!normed) {
        return;
    }
#pragma unroll
    for (int v = 0; v < per; v++) {
        squares[v] = warp_reduce_sum<32>(squares[v]);
        if (threadIdx.x % 32 == 0) {
            shared[threadIdx.x / 32 + v * (n_warp / per)] = squares[v];
        }
    }
    __syncthreads();
    float sum = shared[0];
#pragma unroll
    for (int w = 1; w < n_warp; w++) {
        sum += shared[w];
    }
    __syncthreads();
    const float scale = 1.0f / sqrtf(sum / (float) h + eps);
    for (int base = 0; base < h; base += 4 * n) {
#pragma unroll
        for (int v = 0; v < per; v++) {
            const int i0 = base + 4 * ((int) threadIdx.x + v * (n / per));
            if (i0 < h) {
                const float4 x = base == 0 ? kept[v] : value(v, i0, whole);
                const float4 g = base == 0 ? own[v] : luce_load4(gain, i0, h, whole);
                const float4 y = make_float4(x.x * scale * g.x, x.y * scale * g.y, x.z * scale * g.z, x.w * scale * g.w);
                luce_store4(normed, i0, h, whole, y);
                if (column) {
                    luce_stream_quantise(y, first + i0, all, column);
                }
            }
        }
    }
}
