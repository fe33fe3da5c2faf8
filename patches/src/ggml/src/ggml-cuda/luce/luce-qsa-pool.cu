// pyluce: heads normalised and rotated; indexer keys appended and pooled. What sizes the QSA kernels take.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-common.cuh"

#define LUCE_QSA_WARPS 4    // heads a block of norm_rope
#define LUCE_QSA_POOL_THREADS 128

// A warp a head. The sum of squares: each lane its values in rising order, then the lanes in a butterfly.
static __global__ __launch_bounds__(LUCE_QSA_WARPS * 32) void luce_norm_rope_kernel(
        const float * __restrict__ x, const float * __restrict__ gain, const float * __restrict__ rope, float * __restrict__ dst,
        const int d, const int n_head, const int n_rot, const int64_t n_task, const int64_t head_stride, const int64_t row_stride,
        const int64_t rope_stride, const float eps) {
    const int     lane = threadIdx.x % 32;
    const int64_t task = (int64_t) blockIdx.x * LUCE_QSA_WARPS + threadIdx.x / 32;
    if (task >= n_task) {
        return;
    }
    const int64_t row  = task / n_head;
    const int     head = (int) (task - row * n_head);
    x    += row * row_stride + head * head_stride;
    rope += row * rope_stride;
    dst  += task * d;

    float squares = 0.0f;
    for (int i = lane; i < d; i += 32) {
        squares = fmaf(x[i], x[i], squares);
    }
    const float scale = 1.0f / sqrtf(warp_reduce_sum<32>(squares) / (float) d + eps);

    const int half_rot = n_rot / 2;
    for (int i = lane; i < half_rot; i += 32) {
        const float a   = x[i] * scale * gain[i];
        const float b   = x[i + half_rot] * scale * gain[i + half_rot];
        const float cos = rope[i];
        const float sin = rope[i + half_rot];
        dst[i]            = a * cos - b * sin;
        dst[i + half_rot] = b * cos + a * sin;
    }
    for (int i = n_rot + lane; i < d; i += 32) {
        dst[i] = x[i] * scale * gain[i];
    }
}

void luce_cuda_norm_rope(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * x    = dst->src[0];
    const ggml_tensor * rope = dst->src[2];
    const int64_t n_task = dst->ne[1] * dst->ne[2];
    if (n_task == 0) {
        return;
    }
    const unsigned blocks = (unsigned) ((n_task + LUCE_QSA_WARPS - 1) / LUCE_QSA_WARPS);
    luce_norm_rope_kernel<<<blocks, LUCE_QSA_WARPS * 32, 0, ctx.stream()>>>(
        (const float *) x->data, (const float *) dst->src[1]->data, (const float *) rope->data, (float *) dst->data,
        (int) dst->ne[0], (int) dst->ne[1], (int) rope->ne[0], n_task, ggml_get_op_params_i32(dst, 1),
        luce_stride(x), luce_stride(rope), ggml_get_op_params_f32(dst, 2));
}

// A block a row. What a completing row needs of this step's rows it reads from `key`, so blocks need no order.
static __global__ __launch_bounds__(LUCE_QSA_POOL_THREADS) void luce_qsa_pool_kernel(
        const float * __restrict__ key, const float * __restrict__ gain, const float * __restrict__ rope, float * raw, float * pooled,
        const int32_t * __restrict__ pages, const luce_row * __restrict__ rows, float * __restrict__ dst, const int d, const int n_rot,
        const int64_t key_stride, const int64_t rope_stride, const int64_t n_page_max, const int ratio, const float eps) {
    extern __shared__ float mean[]; // [d]
    __shared__ float sums[LUCE_QSA_POOL_THREADS / 32];

    const int64_t r = blockIdx.x;
    const int     t = threadIdx.x;
    if (t == 0) {
        dst[r] = 0.0f;
    }
    const luce_row row = rows[r];
    if (row.slot < 0) {
        return;
    }
    const int64_t cell = luce_cell(pages, n_page_max, row.slot, row.position);
    for (int i = t; i < d; i += LUCE_QSA_POOL_THREADS) {
        raw[cell * d + i] = key[r * key_stride + i];
    }
    if ((row.position + 1) % ratio != 0) {
        return;
    }
    for (int back = ratio - 1; back >= 0; back--) {
        const int     position = row.position - back;
        const bool    here     = back <= r && rows[r - back].slot == row.slot && rows[r - back].position == position;
        const float * x        = here ? key + (r - back) * key_stride : raw + luce_cell(pages, n_page_max, row.slot, position) * d;
        for (int i = t; i < d; i += LUCE_QSA_POOL_THREADS) {
            mean[i] = back == ratio - 1 ? x[i] : mean[i] + x[i];
        }
    }
    float squares = 0.0f;
    for (int i = t; i < d; i += LUCE_QSA_POOL_THREADS) {
        mean[i] *= 1.0f / (float) ratio;
        squares = fmaf(mean[i], mean[i], squares);
    }
    // its barriers also publish `mean`
    const float scale = 1.0f / sqrtf(luce_block_sum<LUCE_QSA_POOL_THREADS>(squares, sums) / (float) d + eps);

    const int half_rot = n_rot / 2;
    rope   += r * rope_stride;
    pooled += cell / ratio * d;
    for (int i = t; i < half_rot; i += LUCE_QSA_POOL_THREADS) {
        const float a   = mean[i] * scale * gain[i];
        const float b   = mean[i + half_rot] * scale * gain[i + half_rot];
        const float cos = rope[i];
        const float sin = rope[i + half_rot];
        pooled[i]            = a * cos - b * sin;
        pooled[i + half_rot] = b * cos + a * sin;
    }
    for (int i = n_rot + t; i < d; i += LUCE_QSA_POOL_THREADS) {
        pooled[i] = mean[i] * scale * gain[i];
    }
}

void luce_cuda_qsa_pool(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * key   = dst->src[0];
    const ggml_tensor * rope  = dst->src[2];
    const ggml_tensor * pages = dst->src[5];
    if (key->ne[1] == 0) {
        return;
    }
    luce_qsa_pool_kernel<<<(unsigned) key->ne[1], LUCE_QSA_POOL_THREADS, key->ne[0] * sizeof(float), ctx.stream()>>>(
        (const float *) key->data, (const float *) dst->src[1]->data, (const float *) rope->data, (float *) dst->src[3]->data,
        (float *) dst->src[4]->data, (const int32_t *) pages->data, luce_rows(dst->src[6]), (float *) dst->data, (int) key->ne[0],
        (int) rope->ne[0], luce_stride(key), luce_stride(rope), pages->ne[0], ggml_get_op_params_i32(dst, 1), ggml_get_op_params_f32(dst, 2));
}

// true, or false with the reason in the log
static bool luce_qsa_fits(bool condition, const char * rule) {
    if (!condition) {
        GGML_LOG_ERROR("luce on this device: expected %s\n", rule);
    }
    return condition;
}

bool luce_cuda_qsa_supports(int device, const ggml_tensor * op) {
    GGML_UNUSED(device);
    switch ((ggml_luce_kind) ggml_get_op_params_i32(op, 0)) {
        case GGML_LUCE_NORM_ROPE:
            return true;
        case GGML_LUCE_QSA_POOL:
            return luce_qsa_fits(op->src[0]->ne[0] <= 8192, "qsa_pool: indexer keys of at most 8192 values");
        case GGML_LUCE_QSA_SELECT: {
            const int64_t d      = op->src[0]->ne[0];
            const int64_t n_head = op->src[0]->ne[1];
            return luce_qsa_fits(d % 4 == 0 && d <= 256, "qsa_select: indexer keys of 4 to 256 values, a multiple of 4") &&
                   luce_qsa_fits(n_head <= 16 && n_head * d <= 2048, "qsa_select: at most 16 indexer heads, 2048 values together");
        }
        case GGML_LUCE_QSA_ATTN: {
            const int64_t d     = op->src[0]->ne[0];
            const int64_t group = op->src[0]->ne[1] / (op->src[1]->ne[0] / d);
            const int64_t n_key = op->src[3]->ne[0] * ggml_get_op_params_i32(op, 1);
            return luce_qsa_fits(d <= 256, "qsa_attn: heads of at most 256 values") &&
                   luce_qsa_fits(n_key <= 65536, "qsa_attn: at most 65536 selected tokens") &&
                   luce_qsa_fits(group <= 16, "qsa_attn: at most 16 heads a K/V head");
        }
        default:
            return false;
    }
}
