// pyluce: a row of weights in shared memory times the columns of a thread block.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// Of a weight row and a column, lane l of `lanes` sums units l, l + lanes, ... of the row; the caller lets the lanes meet in a butterfly. Every kernel
// of row products takes its sums from here, so that they have the same bits.
#pragma once

#include "luce-mmv-unit.cuh"

// Unit `unit` (8 values) of a column of k into 8 bits: 4 neighbouring lanes have a block of 32, scale max |x| / 127. All lanes of a warp call it;
// column NULL: nothing to write.
static __device__ __forceinline__ void ring_quantise_unit(float4 a, float4 b, int unit, int k, int plane, char * column) {
    const float v[8] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w };
    float top = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        top = fmaxf(top, fabsf(v[e]));
    }
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, offset, 32));
    }
    const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    int packed[2] = { 0, 0 };
#pragma unroll
    for (int e = 0; e < 8; e++) {
        packed[e / 4] |= (int) ((uint32_t) (uint8_t) (int8_t) __float2int_rn(v[e] * inverse) << (8 * (e % 4)));
    }
    int sum = ggml_cuda_dp4a(packed[0], 0x01010101, ggml_cuda_dp4a(packed[1], 0x01010101, 0));
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, offset, 32);
    }
    if (column) {
        const int block = unit / 4;
        const int part  = unit % 4;
        *(int2 *) (column + ((block & 1) + part / 2 * 2) * plane + (block >> 1) * 16 + part % 2 * 8) = make_int2(packed[0], packed[1]);
        if (part == 0) {
            float *     scales = (float *) (column + 4 * plane);
            const float d      = top / 127.0f;
            scales[block]          = d;
            scales[k / 32 + block] = d * (float) sum;
        }
    }
}

__host__ __device__ constexpr bool ring_is_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

template <ggml_type type> struct ring_float { typedef float t; };
template <> struct ring_float<GGML_TYPE_F16>  { typedef half t; };
template <> struct ring_float<GGML_TYPE_BF16> { typedef nv_bfloat16 t; };

// the columns that a thread block computes with; those beyond the real ones read the last one
template <int n_col> struct ring_x {
    const char * shared;    // in shared memory, quantised or as they are
    const char * global;    // not NULL: floats where they lie
    int          at[n_col]; // bytes
};

// Unit that lane l takes in the step that begins at unit `base`. Blocks of Q8_0 have 8.5 words: half-warps 32 units apart meet other
// banks, those 16 apart the same ones.
template <ggml_type type>
__device__ __forceinline__ int ring_unit(int base, int l, int apart, int n_unit) {
    if (type == GGML_TYPE_Q8_0 && apart >= 0 && base < (n_unit & ~63)) {
        return (base & ~63) + ((base & 32) >> 1) + apart;
    }
    return base + l;
}

// what a lane sums of n_w rows with every column
template <ggml_type type, int n_col, int n_w>
__device__ __forceinline__ void ring_dot(
        int k, int lanes, const char * const (&w)[n_w], const ring_x<n_col> & x, int l, float (&acc)[n_w][n_col]) {
#pragma unroll
    for (int r = 0; r < n_w; r++) {
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            acc[r][c] = 0.0f;
        }
    }
    if constexpr (ring_is_float(type)) {
        typedef typename ring_float<type>::t T;
        constexpr int n_ahead = n_col <= 2 ? 4 : 1;
#pragma unroll n_ahead
        for (int i = l; i < k / 4; i += lanes) {
            float4 a[n_w];
#pragma unroll
            for (int r = 0; r < n_w; r++) {
                a[r] = luce_widen4((const T *) w[r], i);
            }
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                const float4 v = x.global ? ((const float4 *) (x.global + x.at[c]))[i] : ((const float4 *) (x.shared + x.at[c]))[i];
#pragma unroll
                for (int r = 0; r < n_w; r++) {
                    acc[r][c] = luce_dot4(a[r], v, acc[r][c]);
                }
            }
        }
    } else {
        const int plane   = luce_x_plane(k);
        const int n_block = k / 32;
        const int n_unit  = n_block / luce_unit<type>::n_block;
        const int apart   = lanes == 32 ? (l & 15) + ((l & 16) << 1) : -1;
        for (int base = 0; base < n_unit; base += lanes) {
            const int u = ring_unit<type>(base, l, apart, n_unit);
            if (u >= n_unit) {
                break; // the last step
            }
            luce_unit<type> unit[n_w];
#pragma unroll
            for (int r = 0; r < n_w; r++) {
                unit[r].load(w[r], u);
            }
#pragma unroll
            for (int h = 0; h < luce_unit<type>::n_block; h++) {
                int q[n_w][8];
#pragma unroll
                for (int r = 0; r < n_w; r++) {
                    unit[r].get(h, q[r]);
                }
#pragma unroll
                for (int c = 0; c < n_col; c++) {
                    luce_x8 v;
                    luce_load_x<luce_unit<type>::with_sum>(v, x.shared + x.at[c], plane, n_block, luce_unit<type>::block(u, h));
#pragma unroll
                    for (int r = 0; r < n_w; r++) {
                        acc[r][c] = unit[r].add(h, q[r], v, acc[r][c]);
                    }
                }
            }
        }
    }
}
