// pyluce: the kernel of a row graph's matrix products: each row gets what it would get alone.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A group of warps computes two rows of weights (four for LUCE_HC_MIX) against up to 8 columns; how many warps depends on the
// product's sizes and the device. Lane, order and instructions of
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

// Columns x [k] of F32 into 8 bits: 4 lanes a block of 32 values, d = max |x| / 127. What a thread reads is under way before it
// uses the first of it.
template <int n_col>
__device__ __forceinline__ void quantise_columns(const float * x, int64_t stride, int n_real, int k, block_q8_1 * out) {
    constexpr int depth = n_col == 1 ? 5 : 4;
    const int n_unit = k / 8 * n_col; // units of 8 values
    for (int base = 0; base < n_unit; base += depth * MMV_THREADS) {
        float4 in[depth][2];
#pragma unroll
        for (int d = 0; d < depth; d++) {
            const int unit = base + d * MMV_THREADS + (int) threadIdx.x;
            if (unit < n_unit) {
                const float4 * at = (const float4 *) (x + (int64_t) min(unit / (k / 8), n_real - 1) * stride + unit % (k / 8) * 8);
                in[d][0] = at[0];
                in[d][1] = at[1];
            } else {
                in[d][0] = in[d][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
        }
#pragma unroll
        for (int i = 0; i < depth; i++) {
            const int unit = base + i * MMV_THREADS + (int) threadIdx.x;
            if (base + i * MMV_THREADS >= n_unit) {
                break;
            }
            const float v[8] = { in[i][0].x, in[i][0].y, in[i][0].z, in[i][0].w, in[i][1].x, in[i][1].y, in[i][1].z, in[i][1].w };
            float top = 0.0f;
            float sum = 0.0f;
#pragma unroll
            for (int e = 0; e < 8; e++) {
                top = fmaxf(top, fabsf(v[e]));
                sum += v[e];
            }
#pragma unroll
            for (int offset = 1; offset < 4; offset *= 2) {
                top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, offset, 32));
                sum += __shfl_xor_sync(0xffffffff, sum, offset, 32);
            }
            const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
            uint32_t packed[2] = { 0, 0 };
#pragma unroll
            for (int e = 0; e < 8; e++) {
                packed[e / 4] |= (uint32_t) (uint8_t) (int8_t) __float2int_rn(v[e] * inverse) << (8 * (e % 4));
            }
            if (unit < n_unit) {
                const int    at    = unit % (k / 8);
                block_q8_1 * block = out + unit / (k / 8) * (k / 32) + at / 4;
                ((uint32_t *) block->qs)[at % 4 * 2 + 0] = packed[0];
                ((uint32_t *) block->qs)[at % 4 * 2 + 1] = packed[1];
                if (at % 4 == 0) {
                    block->ds = make_half2(__float2half(top / 127.0f), __float2half(sum));
                }
            }
        }
    }
}

// Lane `lane` of part `part` of `split` takes every split * 32/lanes-th block.
template <ggml_type type, int n_col, int n_w>
__device__ __forceinline__ void dot_quantised(
        const char * const (&w)[n_w], const block_q8_1 * x, int k, int part, int split, int lane, float (&acc)[n_w][n_col]) {
    using traits = ggml_cuda_type_traits<type>;
    constexpr int vdr     = dot_traits<type>::vdr;
    constexpr int lanes   = traits::qi / vdr; // of one block
    const int     n_block = k / traits::qk;
    const int     q       = vdr * (lane % lanes);
#pragma unroll (n_col == 1 ? 5 : n_col == 2 ? 3 : 2)
    for (int block = part * (32 / lanes) + lane / lanes; block < n_block; block += split * (32 / lanes)) {
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            const block_q8_1 * y = x + c * (k / 32) + block * (traits::qk / 32);
#pragma unroll
            for (int i = 0; i < n_w; i++) {
                acc[i][c] += dot_traits<type>::dot(w[i], y, block, q);
            }
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

template <typename T, int n_col, int n_w>
__device__ __forceinline__ void dot_float(
        const char * const (&w)[n_w], const float * x, int64_t stride, int n_real, int k, int part, int split, int lane,
        float (&acc)[n_w][n_col]) {
#pragma unroll (n_col == 1 ? 4 : n_col == 2 ? 2 : 1)
    for (int i = part * 32 + lane; i < k / 4; i += split * 32) {
        float4 a[n_w];
#pragma unroll
        for (int j = 0; j < n_w; j++) {
            a[j] = widen4((const T *) w[j], i);
        }
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            const float4 v = ((const float4 *) (x + (int64_t) min(c, n_real - 1) * stride))[i];
#pragma unroll
            for (int j = 0; j < n_w; j++) {
                acc[j][c] = fmaf(a[j].w, v.w, fmaf(a[j].z, v.z, fmaf(a[j].y, v.y, fmaf(a[j].x, v.x, acc[j][c]))));
            }
        }
    }
}

__host__ __device__ constexpr bool is_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

constexpr int MMV_WEIGHTS = 4; // rows of weights that a task has at most

// The products of n_w weight rows with every column: a group of `split` warps shares the columns' length. The sums, in all lanes
// of the group's first warp: each warp's by a butterfly, then the warps' in rising order.
template <ggml_type type, int n_col, int n_w>
__device__ __forceinline__ void dot_rows(
        const luce_job & job, const char * const (&w)[n_w], const block_q8_1 * xq, const float * x, int n_real, bool active,
        float (&acc)[n_w][n_col]) {
    __shared__ float sums[MMV_WARPS][MMV_WEIGHTS * n_col];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int part = warp % job.split;
#pragma unroll
    for (int i = 0; i < n_w; i++) {
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            acc[i][c] = 0.0f;
        }
    }
    if (active) {
        if constexpr (type == GGML_TYPE_F32) {
            dot_float<float, n_col, n_w>(w, x, job.x_row, n_real, job.k, part, job.split, lane, acc);
        } else if constexpr (type == GGML_TYPE_F16) {
            dot_float<half, n_col, n_w>(w, x, job.x_row, n_real, job.k, part, job.split, lane, acc);
        } else if constexpr (type == GGML_TYPE_BF16) {
            dot_float<nv_bfloat16, n_col, n_w>(w, x, job.x_row, n_real, job.k, part, job.split, lane, acc);
        } else {
            dot_quantised<type, n_col, n_w>(w, xq, job.k, part, job.split, lane, acc);
        }
    }
#pragma unroll
    for (int i = 0; i < n_w; i++) {
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            acc[i][c] = warp_reduce_sum<32>(acc[i][c]);
        }
    }
    if (job.split == 1) {
        return;
    }
    __syncthreads(); // the sums before these are read
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < n_w; i++) {
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                sums[warp][i * n_col + c] = acc[i][c];
            }
        }
    }
    __syncthreads();
    if (part == 0) {
#pragma unroll
        for (int i = 0; i < n_w; i++) {
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                float sum = sums[warp][i * n_col + c];
                for (int p = 1; p < job.split; p++) {
                    sum += sums[warp + p][i * n_col + c];
                }
                acc[i][c] = sum;
            }
        }
    }
}

// value `task` of LUCE_HC_MIX for every column
template <ggml_type type, int n_col>
__device__ __forceinline__ void mix_streams(
        const luce_job & job, const char * w, const block_q8_1 * xq, const float * x, int n_real, float * y, const float * xn, int task,
        bool active, bool writer) {
    constexpr int n_w = n_col <= 2 && !is_float(type) ? 4 : 2; // streams at once
    const int lane = threadIdx.x % 32;
    float mixed[n_col];
#pragma unroll
    for (int c = 0; c < n_col; c++) {
        mixed[c] = 0.0f;
    }
    for (int s = 0; s < job.n_stream; s += n_w) {
        const char * rows[n_w];
#pragma unroll
        for (int i = 0; i < n_w; i++) {
            rows[i] = w + ((int64_t) min(s + i, job.n_stream - 1) * job.m + task) * job.w_row;
        }
        float acc[n_w][n_col];
        dot_rows<type, n_col, n_w>(job, rows, xq, x, n_real, active, acc);
        if (!writer) {
            continue;
        }
#pragma unroll
        for (int i = 0; i < n_w; i++) {
            if (s + i < job.n_stream) {
#pragma unroll
                for (int c = 0; c < n_col; c++) {
                    const float v = xn[(int64_t) min(c, n_real - 1) * job.xn_row + (int64_t) (s + i) * job.m + task];
                    mixed[c] = fmaf(v, luce_sigmoid(acc[i][c]), mixed[c]);
                }
            }
        }
    }
#pragma unroll
    for (int c = 0; c < n_col; c++) {
        if (writer && lane == c && c < n_real) {
            y[(int64_t) c * job.dst_row + task] = mixed[c] * (1.0f / (float) job.n_stream);
        }
    }
}

// A thread block's part of a job: columns x..., n_real of them, outputs y + column * job.dst_row.
template <ggml_type type, int n_col>
__device__ __forceinline__ void run_job(const luce_job & job, const char * w, const char * w_up, const float * x, int n_real, float * y,
                        const float * xn, int block, block_q8_1 * xq) {
    if constexpr (!is_float(type)) {
        quantise_columns<n_col>(x, job.x_row, n_real, job.k, xq);
        __syncthreads();
    }
    ggml_cuda_pdl_lc();
    const int lane    = threadIdx.x % 32;
    const int warp    = threadIdx.x / 32;
    const int n_group = MMV_WARPS / job.split;
    for (int first = block * n_group; first < job.n_task; first += job.n_block * n_group) {
        const int  own    = first + warp / job.split;
        const bool active = own < job.n_task;
        const bool writer = active && warp % job.split == 0;
        const int  task   = min(own, job.n_task - 1);
        if (job.epilogue == LUCE_HC_MIX) {
            mix_streams<type, n_col>(job, w, xq, x, n_real, y, xn, task, active, writer);
            continue;
        }
        const bool gated = job.epilogue == LUCE_SWIGLU;
        const int  a     = gated ? task : 2 * task;
        const int  b     = gated ? task : min(a + 1, job.m - 1);
        const char * rows[2] = { w + a * job.w_row, (gated ? w_up : w) + b * job.w_row };
        float acc[2][n_col];
        dot_rows<type, n_col, 2>(job, rows, xq, x, n_real, active, acc);
        if (!writer) {
            continue;
        }
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            if (c >= n_real) {
                continue;
            }
            float * out = y + (int64_t) c * job.dst_row;
            if (gated) {
                if (lane == c) {
                    out[task] = ggml_cuda_op_silu_single(acc[0][c]) * acc[1][c]; // as upstream's GLU kernel does
                }
            } else {
                float one = acc[0][c];
                float two = acc[1][c];
                if (job.epilogue == LUCE_SILU_SCALE) {
                    one = luce_silu(one * job.scale);
                    two = luce_silu(two * job.scale);
                }
                if (lane == 2 * c) {
                    out[a] = one;
                }
                if (lane == 2 * c + 1 && b != a) {
                    out[b] = two;
                }
            }
        }
    }
}

// Jobs of weights of `type`; dense ones may have F32 weights instead.
template <ggml_type type, int n_col>
__global__ void __launch_bounds__(MMV_THREADS, n_col <= 4 ? 2 : 1) mmv_kernel(const luce_jobs jobs) {
    extern __shared__ block_q8_1 xq[];
    int j = 0;
    while (j + 1 < jobs.n_job && (int) blockIdx.x >= jobs.job[j + 1].first_block) {
        j++;
    }
    const luce_job & job  = jobs.job[j];
    const int        here = (int) blockIdx.x - job.first_block;
    const int64_t    row0 = jobs.first_row;
    ggml_cuda_pdl_sync();
    if (job.ids == nullptr) {
        const float * x  = job.x + row0 * job.x_row;
        float *       y  = job.dst + row0 * job.dst_row;
        const float * xn = job.xn ? job.xn + row0 * job.xn_row : nullptr;
        if (type != GGML_TYPE_F32 && job.type == GGML_TYPE_F32) {
            run_job<GGML_TYPE_F32, n_col>(job, job.w, job.w_up, x, jobs.n_row, y, xn, here, xq);
        } else {
            run_job<type, n_col>(job, job.w, job.w_up, x, jobs.n_row, y, xn, here, xq);
        }
        return;
    }
    const int     pair   = here / job.n_block;
    const int64_t row    = row0 + pair / job.n_used;
    const int     pick   = pair % job.n_used;
    const int64_t expert = job.ids[row * job.ids_row + pick];
    if (expert < 0 || expert >= job.n_expert) { // a pick that another device has
        float * y = job.dst + row * job.dst_row + pick * job.dst_pick;
        for (int i = here % job.n_block * MMV_THREADS + (int) threadIdx.x; i < job.m; i += job.n_block * MMV_THREADS) {
            y[i] = 0.0f;
        }
        return;
    }
    run_job<type, 1>(job, job.w + expert * job.w_expert, job.w_up ? job.w_up + expert * job.w_expert : nullptr,
                     job.x + row * job.x_row + pick * job.x_pick, 1, job.dst + row * job.dst_row + pick * job.dst_pick, nullptr,
                     here % job.n_block, xq);
}

template <ggml_type type, int n_col>
void mmv_launch_columns(ggml_backend_cuda_context & ctx, const luce_jobs & jobs, int n_block, size_t column_bytes) {
    CUDA_SET_SHARED_MEMORY_LIMIT((mmv_kernel<type, n_col>), ggml_cuda_info().devices[ctx.device].smpbo / 2);
    const ggml_cuda_kernel_launch_params params(dim3(n_block), dim3(MMV_THREADS), column_bytes * n_col, ctx.stream());
    ggml_cuda_kernel_launch(mmv_kernel<type, n_col>, params, jobs);
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
