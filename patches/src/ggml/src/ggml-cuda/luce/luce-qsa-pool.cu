// pyluce: heads normalised and rotated; keys and values appended; indexer keys appended and pooled. What sizes the QSA kernels take.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-qsa-jobs.cuh"

static __device__ __forceinline__ void luce_store_value(void * row, bool half_dst, int i, float x) {
    if (half_dst) {
        ((half *) row)[i] = __float2half(x);
    } else {
        ((float *) row)[i] = x;
    }
}

// where a row's values go, from value i on
static __device__ __forceinline__ void * luce_job_row(const luce_head_job & a, const uint32_t row, const uint32_t i) {
    const uint32_t cell = a.cells ? (uint32_t) a.cells[row] : row;
    return (char *) a.dst + ((uint64_t) cell * a.dst_stride + i) * (a.half_dst ? sizeof(half) : sizeof(float));
}

// A warp a head. The sum of squares: each lane its values in rising order, then the lanes in a butterfly. Gain, angles and cells are
// nobody's results and are read while the kernel before still runs.
static __device__ __forceinline__ void luce_do_heads(const luce_head_job & a, const uint32_t block) {
    const int      lane = threadIdx.x % 32;
    const uint32_t task = block * LUCE_QSA_WARPS + threadIdx.x / 32;
    if (task >= a.n_task) {
        ggml_cuda_pdl_sync();
        return;
    }
    const uint32_t row  = task / a.n_head;
    const uint32_t head = task - row * a.n_head;
    const float  * x    = a.x + ((uint64_t) row * a.row_stride + head * a.head_stride);
    const float  * rope = a.rope + (uint64_t) row * a.rope_stride;
    void         * dst  = luce_job_row(a, row, head * a.d);

    if (a.n_rot == 64 && a.d <= LUCE_QSA_HEAD && a.d % 32 == 0) {
        constexpr int n = LUCE_QSA_HEAD / 32;
        float gain[n], y[n];
#pragma unroll
        for (int j = 0; j < n; j++) {
            gain[j] = 32 * j < a.d ? a.gain[32 * j + lane] : 0.0f;
        }
        const float cos = rope[lane];
        const float sin = rope[lane + 32];
        ggml_cuda_pdl_sync();
#pragma unroll
        for (int j = 0; j < n; j++) {
            y[j] = 32 * j < a.d ? x[32 * j + lane] : 0.0f;
        }
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < n; j++) {
            squares = fmaf(y[j], y[j], squares);
        }
        const float scale = 1.0f / sqrtf(warp_reduce_sum<32>(squares) / (float) a.d + a.eps);
#pragma unroll
        for (int j = 0; j < n; j++) {
            y[j] = y[j] * scale * gain[j];
        }
        const float u = fmaf(y[0], cos, -(y[1] * sin));
        const float v = fmaf(y[1], cos, y[0] * sin);
        y[0] = u;
        y[1] = v;
        if (a.half_dst) {
#pragma unroll
            for (int j = 0; j < n; j++) {
                if (32 * j < a.d) {
                    ((half *) dst)[32 * j + lane] = __float2half(y[j]);
                }
            }
        } else {
#pragma unroll
            for (int j = 0; j < n; j++) {
                if (32 * j < a.d) {
                    ((float *) dst)[32 * j + lane] = y[j];
                }
            }
        }
        return;
    }

    ggml_cuda_pdl_sync();
    float squares = 0.0f;
#pragma unroll 1
    for (int i = lane; i < a.d; i += 32) {
        squares = fmaf(x[i], x[i], squares);
    }
    const float scale = 1.0f / sqrtf(warp_reduce_sum<32>(squares) / (float) a.d + a.eps);

    const int half_rot = a.n_rot / 2;
#pragma unroll 1
    for (int i = lane; i < half_rot; i += 32) {
        const float u   = x[i] * scale * a.gain[i];
        const float v   = x[i + half_rot] * scale * a.gain[i + half_rot];
        const float cos = rope[i];
        const float sin = rope[i + half_rot];
        luce_store_value(dst, a.half_dst, i, fmaf(u, cos, -(v * sin)));
        luce_store_value(dst, a.half_dst, i + half_rot, fmaf(v, cos, u * sin));
    }
#pragma unroll 1
    for (int i = a.n_rot + lane; i < a.d; i += 32) {
        luce_store_value(dst, a.half_dst, i, x[i] * scale * a.gain[i]);
    }
}

// A block LUCE_QSA_COPIED values of a row.
static __device__ __forceinline__ void luce_do_copy(const luce_head_job & a, const uint32_t block) {
    const uint32_t row = block / a.n_head;
    const int      i0  = (int) (block - row * a.n_head) * LUCE_QSA_COPIED + threadIdx.x;
    const float  * x   = a.x + (uint64_t) row * a.row_stride;
    void         * dst = luce_job_row(a, row, 0);
    constexpr int  n   = LUCE_QSA_COPIED / LUCE_QSA_THREADS;
    float y[n];
    ggml_cuda_pdl_sync();
#pragma unroll
    for (int j = 0; j < n; j++) {
        const int i = i0 + j * LUCE_QSA_THREADS;
        y[j] = i < a.d ? x[i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < n; j++) {
        const int i = i0 + j * LUCE_QSA_THREADS;
        if (i < a.d) {
            luce_store_value(dst, a.half_dst, i, y[j]);
        }
    }
}

// A block a row. What a completing row needs of this step's rows it reads from `key`, so blocks need no order.
static __device__ __forceinline__ void luce_do_pool(const luce_pool_job & a, const int64_t r) {
    extern __shared__ float mean[]; // [d]
    __shared__ float sums[LUCE_QSA_THREADS / 32];
    __shared__ const float * from[LUCE_QSA_MAX_RATIO];

    const int      t   = threadIdx.x;
    const luce_row row = a.rows[r];
    int64_t cell = 0;
    if (row.slot >= 0) {
        cell = luce_cell(a.pages, a.n_page_max, row.slot, row.position);
    }
    const bool complete = row.slot >= 0 && (row.position + 1) % a.ratio == 0;
    if (complete && t < a.ratio) { // where the block's keys are, in rising position
        const int  back     = a.ratio - 1 - t;
        const int  position = row.position - back;
        const bool here     = back <= r && a.rows[r - back].slot == row.slot && a.rows[r - back].position == position;
        from[t] = here ? a.key + (r - back) * a.key_stride : a.raw + luce_cell(a.pages, a.n_page_max, row.slot, position) * a.d;
    }
    ggml_cuda_pdl_sync();
    if (t == 0 && a.handle) {
        a.handle[r] = 0.0f;
    }
    if (row.slot < 0) {
        return;
    }
    for (int i = t; i < a.d; i += LUCE_QSA_THREADS) {
        a.raw[cell * a.d + i] = a.key[r * a.key_stride + i];
    }
    if (!complete) {
        return;
    }
    __syncthreads();
    float squares = 0.0f;
    for (int i = t; i < a.d; i += LUCE_QSA_THREADS) {
        float sum = 0.0f;
        for (int k0 = 0; k0 < a.ratio; k0 += 4) {
            float x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                x[k] = k0 + k < a.ratio ? from[k0 + k][i] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (k0 + k < a.ratio) {
                    sum = k0 + k == 0 ? x[k] : sum + x[k];
                }
            }
        }
        sum *= 1.0f / (float) a.ratio;
        mean[i] = sum;
        squares = fmaf(sum, sum, squares);
    }
    // its barriers also publish `mean`
    const float scale = 1.0f / sqrtf(luce_block_sum<LUCE_QSA_THREADS>(squares, sums) / (float) a.d + a.eps);

    const int     half_rot = a.n_rot / 2;
    const float * rope     = a.rope + r * a.rope_stride;
    float       * pooled   = a.pooled + cell / a.ratio * a.d;
#pragma unroll 1
    for (int i = t; i < half_rot; i += LUCE_QSA_THREADS) {
        const float u   = mean[i] * scale * a.gain[i];
        const float v   = mean[i + half_rot] * scale * a.gain[i + half_rot];
        const float cos = rope[i];
        const float sin = rope[i + half_rot];
        pooled[i]            = fmaf(u, cos, -(v * sin));
        pooled[i + half_rot] = fmaf(v, cos, u * sin);
    }
#pragma unroll 1
    for (int i = a.n_rot + t; i < a.d; i += LUCE_QSA_THREADS) {
        pooled[i] = mean[i] * scale * a.gain[i];
    }
}

static __global__ __launch_bounds__(LUCE_QSA_THREADS) void luce_norm_rope_kernel(const luce_head_job job) {
    ggml_cuda_pdl_lc();
    luce_do_heads(job, blockIdx.x);
}

static __global__ __launch_bounds__(LUCE_QSA_THREADS) void luce_qsa_pool_kernel(const luce_pool_job job) {
    ggml_cuda_pdl_lc();
    luce_do_pool(job, blockIdx.x);
}

// grid: the blocks of all jobs in turn
static __global__ __launch_bounds__(LUCE_QSA_THREADS) void luce_qsa_jobs_kernel(const luce_qsa_jobs jobs) {
    ggml_cuda_pdl_lc();
    const int block = blockIdx.x;
    int       first = 0;
    int       j     = 0;
    while (j < jobs.n_job && block >= jobs.end[j]) {
        first = jobs.end[j++];
    }
    if (j == jobs.n_job) {
        luce_do_pool(jobs.pool, block - first);
    } else if (jobs.heads[j].gain) {
        luce_do_heads(jobs.heads[j], block - first);
    } else {
        luce_do_copy(jobs.heads[j], block - first);
    }
}

luce_head_job luce_norm_rope_job(const ggml_tensor * dst) {
    const ggml_tensor * x    = dst->src[0];
    const ggml_tensor * rope = dst->src[2];
    luce_head_job job = {};
    job.x           = (const float *) x->data;
    job.gain        = (const float *) dst->src[1]->data;
    job.rope        = (const float *) rope->data;
    job.dst         = dst->data;
    job.row_stride  = (uint32_t) luce_stride(x);
    job.head_stride = (uint32_t) ggml_get_op_params_i32(dst, 1);
    job.rope_stride = (uint32_t) luce_stride(rope);
    job.dst_stride  = (uint32_t) (dst->ne[0] * dst->ne[1]);
    job.n_task      = (uint32_t) (dst->ne[1] * dst->ne[2]);
    job.d           = (int) dst->ne[0];
    job.n_head      = (uint32_t) dst->ne[1];
    job.n_rot       = (int) rope->ne[0];
    job.eps         = ggml_get_op_params_f32(dst, 2);
    return job;
}

luce_head_job luce_append_job(const ggml_tensor * set_rows) {
    const ggml_tensor * x = set_rows->src[0];
    luce_head_job job = {};
    job.x          = (const float *) x->data;
    job.row_stride = (uint32_t) luce_stride(x);
    job.d          = (int) x->ne[0];
    job.n_head     = (job.d + LUCE_QSA_COPIED - 1) / LUCE_QSA_COPIED;
    job.n_task     = (uint32_t) x->ne[1] * job.n_head;
    luce_append_to(job, set_rows);
    return job;
}

void luce_append_to(luce_head_job & job, const ggml_tensor * set_rows) {
    job.dst        = set_rows->data;
    job.cells      = (const int64_t *) set_rows->src[1]->data;
    job.half_dst   = set_rows->type == GGML_TYPE_F16;
    job.dst_stride = (uint32_t) (set_rows->nb[1] / set_rows->nb[0]);
}

luce_pool_job luce_qsa_pool_job(const ggml_tensor * dst) {
    const ggml_tensor * key   = dst->src[0];
    const ggml_tensor * rope  = dst->src[2];
    const ggml_tensor * pages = dst->src[5];
    luce_pool_job job = {};
    job.key         = (const float *) key->data;
    job.gain        = (const float *) dst->src[1]->data;
    job.rope        = (const float *) rope->data;
    job.raw         = (float *) dst->src[3]->data;
    job.pooled      = (float *) dst->src[4]->data;
    job.pages       = (const int32_t *) pages->data;
    job.rows        = luce_rows(dst->src[6]);
    job.handle      = (float *) dst->data;
    job.key_stride  = luce_stride(key);
    job.rope_stride = luce_stride(rope);
    job.n_page_max  = pages->ne[0];
    job.n_row       = (int) key->ne[1];
    job.d           = (int) key->ne[0];
    job.n_rot       = (int) rope->ne[0];
    job.ratio       = ggml_get_op_params_i32(dst, 1);
    job.eps         = ggml_get_op_params_f32(dst, 2);
    return job;
}

int luce_qsa_job_blocks(const luce_head_job & job) {
    return (int) (job.gain ? (job.n_task + LUCE_QSA_WARPS - 1) / LUCE_QSA_WARPS : job.n_task);
}

static ggml_cuda_kernel_launch_params luce_qsa_launch(ggml_backend_cuda_context & ctx, int n_block, int n_float) {
    return ggml_cuda_kernel_launch_params(dim3((unsigned) n_block), dim3(LUCE_QSA_THREADS), n_float * sizeof(float), ctx.stream());
}

void luce_qsa_launch_jobs(ggml_backend_cuda_context & ctx, luce_qsa_jobs & jobs) {
    int n_block = 0;
    for (int j = 0; j < jobs.n_job; j++) {
        n_block += luce_qsa_job_blocks(jobs.heads[j]);
        jobs.end[j] = n_block;
    }
    LUCE_SET_SHARED_CARVEOUT(luce_qsa_jobs_kernel);
    ggml_cuda_kernel_launch(luce_qsa_jobs_kernel, luce_qsa_launch(ctx, n_block + jobs.pool.n_row, jobs.pool.d), jobs);
}

void luce_cuda_norm_rope(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const luce_head_job job = luce_norm_rope_job(dst);
    if (job.n_task > 0) {
        LUCE_SET_SHARED_CARVEOUT(luce_norm_rope_kernel);
        ggml_cuda_kernel_launch(luce_norm_rope_kernel, luce_qsa_launch(ctx, luce_qsa_job_blocks(job), 0), job);
    }
}

void luce_cuda_qsa_pool(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const luce_pool_job job = luce_qsa_pool_job(dst);
    if (job.n_row > 0) {
        LUCE_SET_SHARED_CARVEOUT(luce_qsa_pool_kernel);
        ggml_cuda_kernel_launch(luce_qsa_pool_kernel, luce_qsa_launch(ctx, job.n_row, job.d), job);
    }
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
