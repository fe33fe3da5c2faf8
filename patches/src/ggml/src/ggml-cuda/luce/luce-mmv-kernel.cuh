// pyluce: the kernel of a row graph's matrix products: each row gets what it would get alone.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A warp computes two rows of weights (for LUCE_HC_MIX twice two) against up to 8 columns. Lane, order and instructions of
// a (weight row, column) pair do not depend on how many columns there are, so neither do its bits. Quantised weights meet
// activations quantised to 8 bits in blocks of 32 (block_q8_1), made once a thread block in shared memory; F32, F16
// and BF16 weights meet them as they are.
#pragma once

#include "luce-mmv.cuh"

#include "unary.cuh"
#include "vecdotq.cuh"

constexpr int MMV_THREADS = 256;
constexpr int MMV_WARPS   = MMV_THREADS / 32;

template <ggml_type type> struct dot_traits;

#define LUCE_DOT(TYPE, VDR, FUNCTION)                                                                        \
    template <> struct dot_traits<TYPE> {                                                                    \
        static constexpr int vdr = VDR;                                                                      \
        static __device__ __forceinline__ float dot(const char * w, const block_q8_1 * x, int block, int q) { \
            return FUNCTION(w, x, block, q);                                                                 \
        }                                                                                                    \
    }

LUCE_DOT(GGML_TYPE_Q2_0,    VDR_Q2_0_Q8_1_MMVQ,    vec_dot_q2_0_q8_1);
LUCE_DOT(GGML_TYPE_Q4_0,    VDR_Q4_0_Q8_1_MMVQ,    vec_dot_q4_0_q8_1);
LUCE_DOT(GGML_TYPE_Q4_1,    VDR_Q4_1_Q8_1_MMVQ,    vec_dot_q4_1_q8_1);
LUCE_DOT(GGML_TYPE_Q5_0,    VDR_Q5_0_Q8_1_MMVQ,    vec_dot_q5_0_q8_1);
LUCE_DOT(GGML_TYPE_Q5_1,    VDR_Q5_1_Q8_1_MMVQ,    vec_dot_q5_1_q8_1);
LUCE_DOT(GGML_TYPE_Q8_0,    VDR_Q8_0_Q8_1_MMVQ,    vec_dot_q8_0_q8_1);
LUCE_DOT(GGML_TYPE_Q2_K,    VDR_Q2_K_Q8_1_MMVQ,    vec_dot_q2_K_q8_1);
LUCE_DOT(GGML_TYPE_Q3_K,    VDR_Q3_K_Q8_1_MMVQ,    vec_dot_q3_K_q8_1);
LUCE_DOT(GGML_TYPE_Q4_K,    VDR_Q4_K_Q8_1_MMVQ,    vec_dot_q4_K_q8_1);
LUCE_DOT(GGML_TYPE_Q5_K,    VDR_Q5_K_Q8_1_MMVQ,    vec_dot_q5_K_q8_1);
LUCE_DOT(GGML_TYPE_Q6_K,    VDR_Q6_K_Q8_1_MMVQ,    vec_dot_q6_K_q8_1);
LUCE_DOT(GGML_TYPE_IQ4_NL,  VDR_IQ4_NL_Q8_1_MMVQ,  vec_dot_iq4_nl_q8_1);
LUCE_DOT(GGML_TYPE_IQ4_XS,  VDR_IQ4_XS_Q8_1_MMVQ,  vec_dot_iq4_xs_q8_1);
LUCE_DOT(GGML_TYPE_IQ3_S,   VDR_IQ3_S_Q8_1_MMVQ,   vec_dot_iq3_s_q8_1);
LUCE_DOT(GGML_TYPE_IQ3_XXS, VDR_IQ3_XXS_Q8_1_MMVQ, vec_dot_iq3_xxs_q8_1);

// Columns x [k] of F32 into 8 bits: 4 lanes a block of 32 values, d = max |x| / 127.
template <int n_col>
__device__ void quantise_columns(const float * x, int64_t stride, int n_real, int k, block_q8_1 * out) {
    const int n_unit = k / 8 * n_col; // units of 8 values
    for (int base = 0; base < n_unit; base += MMV_THREADS) {
        const int  unit = min(base + (int) threadIdx.x, n_unit - 1);
        const int  col  = unit / (k / 8);
        const int  at   = unit % (k / 8);
        const float4 * in = (const float4 *) (x + (int64_t) min(col, n_real - 1) * stride + at * 8);
        const float4 a = in[0];
        const float4 b = in[1];
        const float v[8] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w };
        float top = 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            top = fmaxf(top, fabsf(v[i]));
            sum += v[i];
        }
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, offset, 32));
            sum += __shfl_xor_sync(0xffffffff, sum, offset, 32);
        }
        const float d       = top / 127.0f;
        const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
        uint32_t packed[2] = { 0, 0 };
#pragma unroll
        for (int i = 0; i < 8; i++) {
            packed[i / 4] |= (uint32_t) (uint8_t) (int8_t) __float2int_rn(v[i] * inverse) << (8 * (i % 4));
        }
        if (base + (int) threadIdx.x < n_unit) {
            block_q8_1 * block = out + col * (k / 32) + at / 4;
            ((uint32_t *) block->qs)[at % 4 * 2 + 0] = packed[0];
            ((uint32_t *) block->qs)[at % 4 * 2 + 1] = packed[1];
            if (at % 4 == 0) {
                block->ds = make_half2(__float2half(d), __float2half(sum));
            }
        }
    }
}

template <ggml_type type, int n_col>
__device__ __forceinline__ void dot_quantised(
        const char * wa, const char * wb, const block_q8_1 * x, int k, int lane, float (&acc)[2][n_col]) {
    using traits = ggml_cuda_type_traits<type>;
    constexpr int vdr      = dot_traits<type>::vdr;
    constexpr int lanes    = traits::qi / vdr;  // of one block
    const int     n_block  = k / traits::qk;
    const int     q        = vdr * (lane % lanes);
#pragma unroll 2
    for (int block = lane / lanes; block < n_block; block += 32 / lanes) {
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            const block_q8_1 * y = x + c * (k / 32) + block * (traits::qk / 32);
            acc[0][c] += dot_traits<type>::dot(wa, y, block, q);
            acc[1][c] += dot_traits<type>::dot(wb, y, block, q);
        }
    }
}

__device__ __forceinline__ float4 widen4(const float * w, int i) {
    return ((const float4 *) w)[i];
}

__device__ __forceinline__ float4 widen4(const half * w, int i) {
    const float2 a = __half22float2(((const half2 *) w)[2 * i]);
    const float2 b = __half22float2(((const half2 *) w)[2 * i + 1]);
    return make_float4(a.x, a.y, b.x, b.y);
}

__device__ __forceinline__ float4 widen4(const nv_bfloat16 * w, int i) {
    const uint2 v = ((const uint2 *) w)[i];
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                       __uint_as_float(v.y & 0xffff0000u));
}

template <typename T, int n_col>
__device__ __forceinline__ void dot_float(
        const char * wa, const char * wb, const float * x, int64_t stride, int n_real, int k, int lane, float (&acc)[2][n_col]) {
#pragma unroll 2
    for (int i = lane; i < k / 4; i += 32) {
        const float4 a = widen4((const T *) wa, i);
        const float4 b = widen4((const T *) wb, i);
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            const float4 v = ((const float4 *) (x + (int64_t) min(c, n_real - 1) * stride))[i];
            acc[0][c] = fmaf(a.w, v.w, fmaf(a.z, v.z, fmaf(a.y, v.y, fmaf(a.x, v.x, acc[0][c]))));
            acc[1][c] = fmaf(b.w, v.w, fmaf(b.z, v.z, fmaf(b.y, v.y, fmaf(b.x, v.x, acc[1][c]))));
        }
    }
}

// the products of two weight rows with every column, in all lanes
template <ggml_type type, int n_col>
__device__ __forceinline__ void dot_rows(
        const luce_job & job, const char * wa, const char * wb, const block_q8_1 * xq, const float * x, int n_real, int lane,
        float (&acc)[2][n_col]) {
#pragma unroll
    for (int c = 0; c < n_col; c++) {
        acc[0][c] = acc[1][c] = 0.0f;
    }
    if constexpr (type == GGML_TYPE_F32) {
        dot_float<float, n_col>(wa, wb, x, job.x_row, n_real, job.k, lane, acc);
    } else if constexpr (type == GGML_TYPE_F16) {
        dot_float<half, n_col>(wa, wb, x, job.x_row, n_real, job.k, lane, acc);
    } else if constexpr (type == GGML_TYPE_BF16) {
        dot_float<nv_bfloat16, n_col>(wa, wb, x, job.x_row, n_real, job.k, lane, acc);
    } else {
        dot_quantised<type, n_col>(wa, wb, xq, job.k, lane, acc);
    }
#pragma unroll
    for (int c = 0; c < n_col; c++) {
        acc[0][c] = warp_reduce_sum<32>(acc[0][c]);
        acc[1][c] = warp_reduce_sum<32>(acc[1][c]);
    }
}

__host__ __device__ constexpr bool is_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

// A thread block's part of a job: columns x..., n_real of them, outputs y + column * job.dst_row.
template <ggml_type type, int n_col>
__device__ __forceinline__ void run_job(const luce_job & job, const char * w, const char * w_up, const float * x, int n_real, float * y,
                        const float * xn, int part, block_q8_1 * xq) {
    if constexpr (!is_float(type)) {
        quantise_columns<n_col>(x, job.x_row, n_real, job.k, xq);
        __syncthreads();
    }
    const int  lane   = threadIdx.x % 32;
    const bool paired = job.epilogue == LUCE_STORE || job.epilogue == LUCE_SILU_SCALE;
    const int  n_task = paired ? (job.m + 1) / 2 : job.m;
    for (int task = part * MMV_WARPS + threadIdx.x / 32; task < n_task; task += job.n_block * MMV_WARPS) {
        float acc[2][n_col];
        if (job.epilogue == LUCE_HC_MIX) {
            float mixed[n_col];
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                mixed[c] = 0.0f;
            }
            for (int s = 0; s < job.n_stream; s += 2) {
                const int64_t a = (int64_t) s * job.m + task;
                const int64_t b = s + 1 < job.n_stream ? a + job.m : a;
                dot_rows<type, n_col>(job, w + a * job.w_row, w + b * job.w_row, xq, x, n_real, lane, acc);
#pragma unroll
                for (int c = 0; c < n_col; c++) {
                    const float * v = xn + (int64_t) min(c, n_real - 1) * job.xn_row;
                    mixed[c] = fmaf(v[a], luce_sigmoid(acc[0][c]), mixed[c]);
                    if (s + 1 < job.n_stream) {
                        mixed[c] = fmaf(v[b], luce_sigmoid(acc[1][c]), mixed[c]);
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                if (lane == c && c < n_real) {
                    y[(int64_t) c * job.dst_row + task] = mixed[c] * (1.0f / (float) job.n_stream);
                }
            }
            continue;
        }
        const int    a  = paired ? 2 * task : task;
        const int    b  = paired ? min(a + 1, job.m - 1) : task;
        const char * wa = w + a * job.w_row;
        const char * wb = (job.epilogue == LUCE_SWIGLU ? w_up : w) + b * job.w_row;
        dot_rows<type, n_col>(job, wa, wb, xq, x, n_real, lane, acc);
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            if (c >= n_real) {
                continue;
            }
            float * out = y + (int64_t) c * job.dst_row;
            if (job.epilogue == LUCE_SWIGLU) {
                if (lane == c) {
                    out[task] = ggml_cuda_op_silu_single(acc[0][c]) * acc[1][c]; // as upstream's GLU kernel does
                }
            } else {
                float first  = acc[0][c];
                float second = acc[1][c];
                if (job.epilogue == LUCE_SILU_SCALE) {
                    first  = luce_silu(first * job.scale);
                    second = luce_silu(second * job.scale);
                }
                if (lane == 2 * c) {
                    out[a] = first;
                }
                if (lane == 2 * c + 1 && b != a) {
                    out[b] = second;
                }
            }
        }
    }
}

template <ggml_type type, int n_col>
__global__ void __launch_bounds__(MMV_THREADS, n_col <= 2 ? 3 : n_col <= 4 ? 2 : 1) mmv_kernel(const luce_jobs jobs) {
    extern __shared__ block_q8_1 xq[];
    int j = 0;
    while (j + 1 < jobs.n_job && (int) blockIdx.x >= jobs.job[j + 1].first_block) {
        j++;
    }
    const luce_job & job  = jobs.job[j];
    const int        here = (int) blockIdx.x - job.first_block;
    const int64_t    row0 = jobs.first_row;
    if (job.ids == nullptr) {
        run_job<type, n_col>(job, job.w, job.w_up, job.x + row0 * job.x_row, jobs.n_row, job.dst + row0 * job.dst_row,
                       job.xn ? job.xn + row0 * job.xn_row : nullptr, here, xq);
        return;
    }
    const int     pair   = here / job.n_block;
    const int64_t row    = row0 + pair / job.n_used;
    const int     pick   = pair % job.n_used;
    const int64_t expert = job.ids[row * job.ids_row + pick];
    run_job<type, 1>(job, job.w + expert * job.w_expert, job.w_up ? job.w_up + expert * job.w_expert : nullptr,
               job.x + row * job.x_row + pick * job.x_pick, 1, job.dst + row * job.dst_row + pick * job.dst_pick, nullptr,
               here % job.n_block, xq);
}

template <ggml_type type, int n_col>
void mmv_launch_columns(ggml_backend_cuda_context & ctx, const luce_jobs & jobs, int n_block, size_t column_bytes) {
    CUDA_SET_SHARED_MEMORY_LIMIT((mmv_kernel<type, n_col>), ggml_cuda_info().devices[ctx.device].smpbo);
    mmv_kernel<type, n_col><<<n_block, MMV_THREADS, column_bytes * n_col, ctx.stream()>>>(jobs);
}

template <ggml_type type>
void luce_mmv_launch(ggml_backend_cuda_context & ctx, const luce_jobs & jobs, int n_block, size_t column_bytes) {
    if (jobs.n_row == 1) {
        mmv_launch_columns<type, 1>(ctx, jobs, n_block, column_bytes);
    } else if (jobs.n_row == 2) {
        mmv_launch_columns<type, 2>(ctx, jobs, n_block, column_bytes);
    } else if (LUCE_MMV_COLUMNS == 4 || jobs.n_row <= 4) {
        mmv_launch_columns<type, 4>(ctx, jobs, n_block, column_bytes);
    } else {
        mmv_launch_columns<type, LUCE_MMV_COLUMNS>(ctx, jobs, n_block, column_bytes);
    }
}
