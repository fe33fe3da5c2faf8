// pyluce: hyper-connections and the norms around them. A thread block has one stream of one row.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-launch.cuh"
#include "luce-stream-ops.cuh"

namespace {

constexpr int THREADS = 256;

__global__ void __launch_bounds__(LUCE_STREAM_PARTS) hc_norm_kernel(
        const float * x, int64_t x_stride, const float * gain, float * residual, float * normed, int h, float eps, bool copy, luce_stream_x8 x8) {
    const int64_t row    = blockIdx.x;
    const int     stream = blockIdx.y;
    const int64_t n      = (int64_t) gridDim.y * h;
    ggml_cuda_pdl_lc();
    float4 own[1];
    luce_stream_gain<1>(gain + stream * h, h, own);
    ggml_cuda_pdl_sync();
    // an embedding is one stream wide: every stream starts from it
    const float * in  = x + row * x_stride + (copy ? 0 : stream * h);
    float *       out = copy ? residual + row * n + stream * h : nullptr;
    const bool whole = luce_aligned(in) && luce_aligned(normed) && luce_aligned(gain) && (!copy || luce_aligned(residual));
    luce_stream_norm<1>(h, whole, [=](int, int i0, bool w4) { return luce_load4(in, i0, h, w4); }, out, normed + row * n + stream * h,
                        gain + stream * h, own, eps, x8.memory ? x8.memory + row * x8.pitch : nullptr, stream * h, (int) n);
}

__global__ void __launch_bounds__(THREADS) hc_mix_kernel(
        const float * x, int64_t x_stride, const float * gate, int64_t gate_stride, float * y, int n_stream, int h) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= h) {
        return;
    }
    x    += (int64_t) blockIdx.y * x_stride;
    gate += (int64_t) blockIdx.y * gate_stride;
    float sum = 0.0f;
    for (int s = 0; s < n_stream; s++) {
        sum = fmaf(x[s * h + i], luce_sigmoid(gate[s * h + i]), sum);
    }
    y[(int64_t) blockIdx.y * h + i] = sum * (1.0f / (float) n_stream);
}

__global__ void __launch_bounds__(LUCE_STREAM_PARTS) hc_combine_kernel(
        const float * x, int64_t x_stride, const float * block, int64_t block_stride, const float * inject, int64_t inject_stride,
        const float * gain, float * y, float * normed, int h, float eps, luce_stream_x8 x8) {
    const int64_t row    = blockIdx.x;
    const int     stream = blockIdx.y;
    const int64_t n      = (int64_t) gridDim.y * h;
    ggml_cuda_pdl_lc();
    float4 own[1];
    luce_stream_gain<1>(gain ? gain + stream * h : nullptr, h, own);
    ggml_cuda_pdl_sync();
    const float w = 2.0f * luce_sigmoid(inject[row * inject_stride + stream] / (float) gridDim.y);
    x     += row * x_stride + stream * h;
    block += row * block_stride;
    const bool whole = luce_aligned(x) && luce_aligned(block) && luce_aligned(y) && luce_aligned(gain);
    luce_stream_norm<1>(h, whole, [=](int, int i0, bool w4) { return luce_fma4(luce_load4(block, i0, h, w4), w, luce_load4(x, i0, h, w4)); },
                        y + row * n + stream * h, gain ? normed + row * n + stream * h : nullptr, gain ? gain + stream * h : nullptr, own, eps,
                        x8.memory ? x8.memory + row * x8.pitch : nullptr, stream * h, (int) n);
}

__global__ void __launch_bounds__(THREADS) silu_scale_kernel(const float * x, int64_t x_stride, float * y, int n, float scale) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        y[(int64_t) blockIdx.y * n + i] = luce_silu(x[(int64_t) blockIdx.y * x_stride + i] * scale);
    }
}

const float * data_of(const ggml_tensor * t) {
    return t ? (const float *) t->data : nullptr;
}

} // namespace

void luce_cuda_hc_init(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    luce_cuda_hc_init_x8(ctx, dst, {});
}

void luce_cuda_hc_norm(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    luce_cuda_hc_norm_x8(ctx, dst, {});
}

void luce_cuda_hc_combine(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    luce_cuda_hc_combine_x8(ctx, dst, {});
}

void luce_cuda_hc_init_x8(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const luce_stream_x8 & x8) {
    const ggml_tensor * embd = dst->src[0];
    const int   n_stream = ggml_get_op_params_i32(dst, 1);
    const float eps      = ggml_get_op_params_f32(dst, 2);
    const int   h        = (int) embd->ne[0];
    const int   n_row    = (int) embd->ne[1];
    float *     y        = (float *) dst->data;
    LUCE_SET_SHARED_CARVEOUT(hc_norm_kernel);
    ggml_cuda_kernel_launch(hc_norm_kernel, luce_stream_launch<1>(ctx, n_row, n_stream),
        data_of(embd), luce_stride(embd), data_of(dst->src[1]), y, y + (int64_t) n_row * n_stream * h, h, eps, true, x8);
}

void luce_cuda_hc_norm_x8(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const luce_stream_x8 & x8) {
    const ggml_tensor * x = dst->src[0];
    const int   n_stream = ggml_get_op_params_i32(dst, 1);
    const float eps      = ggml_get_op_params_f32(dst, 2);
    LUCE_SET_SHARED_CARVEOUT(hc_norm_kernel);
    ggml_cuda_kernel_launch(hc_norm_kernel, luce_stream_launch<1>(ctx, x->ne[1], n_stream),
        data_of(x), luce_stride(x), data_of(dst->src[1]), (float *) nullptr, (float *) dst->data, (int) x->ne[0] / n_stream, eps, false, x8);
}

void luce_cuda_hc_mix(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * x    = dst->src[0];
    const ggml_tensor * gate = dst->src[1];
    const int h = (int) dst->ne[0];
    hc_mix_kernel<<<dim3((h + THREADS - 1) / THREADS, (unsigned) dst->ne[1]), THREADS, 0, ctx.stream()>>>(
        data_of(x), luce_stride(x), data_of(gate), luce_stride(gate), (float *) dst->data, ggml_get_op_params_i32(dst, 1), h);
}

void luce_cuda_hc_combine_x8(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const luce_stream_x8 & x8) {
    const ggml_tensor * x      = dst->src[0];
    const ggml_tensor * block  = dst->src[1];
    const ggml_tensor * inject = dst->src[2];
    const int   n_stream = ggml_get_op_params_i32(dst, 1);
    const float eps      = ggml_get_op_params_f32(dst, 2);
    const int   n_row    = (int) x->ne[1];
    float *     y        = (float *) dst->data;
    LUCE_SET_SHARED_CARVEOUT(hc_combine_kernel);
    ggml_cuda_kernel_launch(hc_combine_kernel, luce_stream_launch<1>(ctx, n_row, n_stream),
        data_of(x), luce_stride(x), data_of(block), luce_stride(block), data_of(inject), luce_stride(inject), data_of(dst->src[3]),
        y, y + n_row * x->ne[0], (int) x->ne[0] / n_stream, eps, x8);
}

void luce_cuda_silu_scale(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * x = dst->src[0];
    const int n = (int) dst->ne[0];
    silu_scale_kernel<<<dim3((n + THREADS - 1) / THREADS, (unsigned) dst->ne[1]), THREADS, 0, ctx.stream()>>>(
        data_of(x), luce_stride(x), (float *) dst->data, n, ggml_get_op_params_f32(dst, 1));
}
