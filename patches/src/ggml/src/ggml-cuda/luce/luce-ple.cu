// pyluce: the n-gram (PLE) layer's gate and its dilated convolution, on CUDA and HIP.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-common.cuh"

#define PLE_THREADS 256

// sums[0..n) of the values of a block of PLE_THREADS, the same in every thread: lanes in a butterfly, then warps in rising order
template <int n>
static __device__ __forceinline__ void ple_block_sums(float (&sums)[n], float (*shared)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) {
        sums[i] = warp_reduce_sum<32>(sums[i]);
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < n; i++) {
            shared[threadIdx.x / 32][i] = sums[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < n; i++) {
        sums[i] = shared[0][i];
#pragma unroll
        for (int w = 1; w < PLE_THREADS / 32; w++) {
            sums[i] += shared[w][i];
        }
    }
}

// values i..i+3 of n, zero beyond
static __device__ __forceinline__ float4 ple_load(const float * x, int i, int n, bool aligned) {
    if (aligned) {
        return *(const float4 *) (x + i);
    }
    return make_float4(x[i], i + 1 < n ? x[i + 1] : 0.0f, i + 2 < n ? x[i + 2] : 0.0f, i + 3 < n ? x[i + 3] : 0.0f);
}

static __device__ __forceinline__ void ple_store(float * x, int i, int n, bool aligned, float4 v) {
    if (aligned) {
        *(float4 *) (x + i) = v;
        return;
    }
    x[i] = v.x;
    if (i + 1 < n) { x[i + 1] = v.y; }
    if (i + 2 < n) { x[i + 2] = v.z; }
    if (i + 3 < n) { x[i + 3] = v.w; }
}

static __device__ __forceinline__ float ple_dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

static __device__ __forceinline__ float4 ple_mul(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

static __device__ __forceinline__ float4 ple_scale(float4 a, float b) {
    return make_float4(a.x * b, a.y * b, a.z * b, a.w * b);
}

// grid (T, S), PLE_THREADS threads; h values a stream. A thread takes groups of four values, one in PLE_THREADS, so the order
// of the sums depends on h alone. One pass gives |key|^2, |residual|^2, |value|^2 and the gated dot product.
static __global__ void __launch_bounds__(PLE_THREADS) luce_ple_gate_kernel(
        const float * __restrict__ key, const float * __restrict__ value, const float * __restrict__ residual,
        const float * __restrict__ gain_key, const float * __restrict__ gain_query, const float * __restrict__ gain_conv,
        float * __restrict__ dst, int64_t key_stride, int64_t value_stride, int64_t residual_stride, int h, float eps, bool aligned) {
    __shared__ float shared[PLE_THREADS / 32][4];

    const int64_t r = blockIdx.x;
    const int64_t n = (int64_t) gridDim.y * h;
    const int64_t s = (int64_t) blockIdx.y * h;
    key        += r * key_stride + s;
    residual   += r * residual_stride + s;
    value      += r * value_stride;
    gain_key   += s;
    gain_query += s;
    gain_conv  += s;

    float sums[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    for (int i = 4 * threadIdx.x; i < h; i += 4 * PLE_THREADS) {
        const float4 k = ple_load(key, i, h, aligned);
        const float4 q = ple_load(residual, i, h, aligned);
        const float4 v = ple_load(value, i, h, aligned);
        sums[0] = ple_dot(k, k, sums[0]);
        sums[1] = ple_dot(q, q, sums[1]);
        sums[2] = ple_dot(v, v, sums[2]);
        sums[3] = ple_dot(ple_mul(k, ple_load(gain_key, i, h, aligned)), ple_mul(q, ple_load(gain_query, i, h, aligned)), sums[3]);
    }
    ple_block_sums<4>(sums, shared);

    const float scale_key   = rsqrtf(sums[0] / h + eps);
    const float scale_query = rsqrtf(sums[1] / h + eps);
    const float dot   = sums[3] * scale_key * scale_query * rsqrtf((float) h);
    const float size  = sqrtf(fmaxf(fabsf(dot), 1e-6f));
    const float gate  = luce_sigmoid(dot > 0.0f ? size : dot < 0.0f ? -size : 0.0f);
    const float scale = rsqrtf(gate * gate * (sums[2] / h) + eps);

    float * gated  = dst + r * 2 * n + s;
    float * normed = gated + n;
    for (int i = 4 * threadIdx.x; i < h; i += 4 * PLE_THREADS) {
        const float4 v = ple_scale(ple_load(value, i, h, aligned), gate);
        ple_store(gated, i, h, aligned, v);
        ple_store(normed, i, h, aligned, ple_mul(ple_scale(v, scale), ple_load(gain_conv, i, h, aligned)));
    }
}

// grid (T, ceil(n / PLE_THREADS)); a thread: one channel of one row. keep: this launch may write the history, because no
// row's position can reach the place of one that another row reads.
static __global__ void __launch_bounds__(PLE_THREADS) luce_ple_conv_kernel(
        const float * gated, const float * residual, const float * conv, float * history, const luce_row * rows, float * dst,
        int64_t gated_stride, int64_t residual_stride, int n, int n_tap, int ring, int dilation, bool keep) {
    const int64_t r = blockIdx.x;
    const int     c = blockIdx.y * PLE_THREADS + threadIdx.x;
    if (c >= n) {
        return;
    }
    const int slot     = rows[r].slot;
    const int position = rows[r].position;
    if (slot < 0) {
        dst[r * n + c] = 0.0f;
        return;
    }
    float * kept = history + (int64_t) slot * ring * n + c;
    float   y    = 0.0f;
    for (int k = 0; k < n_tap; k++) {
        const int back = (n_tap - 1 - k) * dilation;
        if (back > position) {
            continue;
        }
        const bool  here = back <= r && rows[r - back].slot == slot && rows[r - back].position == position - back;
        const float x    = here ? gated[(r - back) * gated_stride + n + c] : kept[(int64_t) ((position - back) % ring) * n];
        y = fmaf(x, conv[(int64_t) k * n + c], y);
    }
    y = luce_silu(y);
    dst[r * n + c] = residual[r * residual_stride + c] + (gated[r * gated_stride + c] + y);
    if (keep) {
        kept[(int64_t) (position % ring) * n] = gated[r * gated_stride + n + c];
    }
}

// grid (T, ceil(n / PLE_THREADS)): the inputs that the next step may read
static __global__ void __launch_bounds__(PLE_THREADS) luce_ple_history_kernel(
        const float * gated, float * history, const luce_row * rows, int64_t gated_stride, int n_row, int n, int ring) {
    const int64_t r = blockIdx.x;
    const int     c = blockIdx.y * PLE_THREADS + threadIdx.x;
    const int     slot = rows[r].slot;
    if (c >= n || slot < 0 || (r + ring < n_row && rows[r + ring].slot == slot)) {
        return;
    }
    history[((int64_t) slot * ring + rows[r].position % ring) * n + c] = gated[r * gated_stride + n + c];
}

void luce_cuda_ple_gate(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * key      = dst->src[0];
    const ggml_tensor * value    = dst->src[1];
    const ggml_tensor * residual = dst->src[2];
    const int   n_stream = ggml_get_op_params_i32(dst, 1);
    const float eps      = ggml_get_op_params_f32(dst, 2);
    const int   h        = (int) (key->ne[0] / n_stream);
    if (dst->ne[1] == 0) {
        return;
    }
    bool aligned = h % 4 == 0 && (uintptr_t) dst->data % 16 == 0;
    for (int i = 0; i < 6; i++) {
        aligned = aligned && (uintptr_t) dst->src[i]->data % 16 == 0 && (i >= 3 || dst->src[i]->nb[1] % 16 == 0);
    }
    luce_ple_gate_kernel<<<dim3(dst->ne[1], n_stream), PLE_THREADS, 0, ctx.stream()>>>(
        (const float *) key->data, (const float *) value->data, (const float *) residual->data, (const float *) dst->src[3]->data,
        (const float *) dst->src[4]->data, (const float *) dst->src[5]->data, (float *) dst->data,
        luce_stride(key), luce_stride(value), luce_stride(residual), h, eps, aligned);
    CUDA_CHECK(cudaGetLastError());
}

void luce_cuda_ple_conv(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * gated    = dst->src[0];
    const ggml_tensor * residual = dst->src[1];
    const ggml_tensor * conv     = dst->src[2];
    const ggml_tensor * history  = dst->src[3];
    const int     dilation = ggml_get_op_params_i32(dst, 1);
    const int     n        = (int) dst->ne[0];
    const int64_t n_row    = dst->ne[1];
    const int     n_tap    = (int) conv->ne[1];
    const int     ring     = (int) history->ne[1];
    if (n_row == 0) {
        return;
    }
    // positions first - (n_tap - 1)*dilation .. first + n_row - 1 all have places of their own
    const bool keep = n_row + (int64_t) (n_tap - 1) * dilation <= ring;
    const dim3 grid(n_row, (n + PLE_THREADS - 1) / PLE_THREADS);
    luce_ple_conv_kernel<<<grid, PLE_THREADS, 0, ctx.stream()>>>(
        (const float *) gated->data, (const float *) residual->data, (const float *) conv->data, (float *) history->data,
        luce_rows(dst->src[4]), (float *) dst->data, luce_stride(gated), luce_stride(residual), n, n_tap, ring, dilation, keep);
    CUDA_CHECK(cudaGetLastError());
    if (!keep) {
        luce_ple_history_kernel<<<grid, PLE_THREADS, 0, ctx.stream()>>>(
            (const float *) gated->data, (float *) history->data, luce_rows(dst->src[4]), luce_stride(gated), (int) n_row, n, ring);
        CUDA_CHECK(cudaGetLastError());
    }
}
