// pyluce: attention over the tokens of the selected blocks and the tail of the incomplete one, times sigmoid(gate).
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-launch.cuh"
#include "luce-qsa-attn.cuh"

#include "ggml-luce-path.h"

#define LUCE_ATTN_THREADS 256
#define LUCE_ATTN_SLAB    64  // values of a key in shared memory at a time
#define LUCE_ATTN_D       256 // at most
#define LUCE_ATTN_BYTES   ((size_t) 64 << 20) // of splits at a time

static __device__ __forceinline__ float luce_widen(float x) { return x; }
static __device__ __forceinline__ float luce_widen(half x) { return __half2float(x); }

// Any sizes, one step a split. grid: (splits, K/V heads, rows). A thread a (key, quarter of the heads) for the scores, a value for the values.
template <typename T>
static __global__ __launch_bounds__(LUCE_ATTN_THREADS) void luce_attn_any_kernel(const luce_attn_args a) {
    constexpr int per_thread = LUCE_ATTN_GROUP / 4;
    __shared__ float   qs[LUCE_ATTN_GROUP][LUCE_ATTN_D];
    __shared__ float   ks[LUCE_ATTN_STEP][LUCE_ATTN_SLAB + 1];
    __shared__ float   ps[LUCE_ATTN_GROUP][LUCE_ATTN_STEP];
    __shared__ int64_t cells[LUCE_ATTN_STEP];

    const int      split = blockIdx.x;
    const int      kv    = blockIdx.y;
    const int64_t  r     = blockIdx.z;
    const int      t     = threadIdx.x;
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const luce_row row   = a.rows[r];
    if (row.slot < 0) {
        return;
    }
    const luce_row_keys keys = luce_keys_of(a, r, row);
    const int n = min(keys.n - split * LUCE_ATTN_STEP, LUCE_ATTN_STEP); // keys of this split
    if (n <= 0) {
        return;
    }
    if (t < n) {
        cells[t] = luce_key_cell(a, r, row, keys, split * LUCE_ATTN_STEP + t);
    }
    const float * q = a.q + (r * a.n_head + (int64_t) kv * a.group) * a.d;
    for (int i = t; i < a.group * a.d; i += LUCE_ATTN_THREADS) {
        qs[i / a.d][i % a.d] = q[i];
    }
    __syncthreads();

    const int     key     = t % LUCE_ATTN_STEP;
    const int     quarter = t / LUCE_ATTN_STEP; // of the heads: quarter, quarter + 4, ...
    const int64_t width   = (int64_t) a.d * a.n_kv;
    const T     * k       = (const T *) a.k + (int64_t) kv * a.d;
    const T     * v       = (const T *) a.v + (int64_t) kv * a.d;
    float dot[per_thread] = {};
    for (int d0 = 0; d0 < a.d; d0 += LUCE_ATTN_SLAB) {
        const int n_d = min(LUCE_ATTN_SLAB, a.d - d0);
        for (int i = t; i < n * LUCE_ATTN_SLAB; i += LUCE_ATTN_THREADS) {
            const int c = i % LUCE_ATTN_SLAB;
            const int j = i / LUCE_ATTN_SLAB;
            if (c < n_d) {
                ks[j][c] = luce_widen(k[cells[j] * width + d0 + c]);
            }
        }
        __syncthreads();
        if (key < n) {
            for (int c = 0; c < n_d; c++) {
                const float x = ks[key][c];
#pragma unroll
                for (int i = 0; i < per_thread; i++) {
                    if (quarter + 4 * i < a.group) {
                        dot[i] = fmaf(qs[quarter + 4 * i][d0 + c], x, dot[i]);
                    }
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < per_thread; i++) {
        if (key < n && quarter + 4 * i < a.group) {
            ps[quarter + 4 * i][key] = dot[i] * a.scale;
        }
    }
    __syncthreads();

    const int lane = t % 32;
    for (int h = t / 32; h < a.group; h += LUCE_ATTN_THREADS / 32) {
        float top = -INFINITY;
        for (int i = lane; i < n; i += 32) {
            top = fmaxf(top, ps[h][i]);
        }
        top = warp_reduce_max<32>(top);
        float sum = 0.0f;
        for (int i = lane; i < n; i += 32) {
            const float p = expf(ps[h][i] - top);
            ps[h][i] = p;
            sum += p;
        }
        sum = warp_reduce_sum<32>(sum);
        if (lane == 0) {
            a.sums[(r * a.n_head + kv * a.group + h) * a.n_split + split] = make_float2(top, sum);
        }
    }
    __syncthreads();

    for (int d = t; d < a.d; d += LUCE_ATTN_THREADS) {
        float acc[LUCE_ATTN_GROUP] = {};
        for (int i = 0; i < n; i++) {
            const int   at = a.backwards ? n - 1 - i : i;
            const float x  = luce_widen(v[cells[at] * width + d]);
#pragma unroll
            for (int h = 0; h < LUCE_ATTN_GROUP; h++) {
                if (h < a.group) {
                    acc[h] = fmaf(ps[h][at], x, acc[h]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < LUCE_ATTN_GROUP; h++) {
            if (h < a.group) {
                a.values[((r * a.n_head + kv * a.group + h) * a.n_split + split) * a.d + d] = acc[h];
            }
        }
    }
}

// A block a (head, row), a thread a value: the splits added in rising order, times sigmoid(gate). Each warp works out the weights for itself,
// a lane a split, 32 at a time, so that nothing waits for other warps; the first splits' values are on their way meanwhile.
#define LUCE_MERGE_AHEAD 8
static __global__ __launch_bounds__(LUCE_ATTN_THREADS) void luce_attn_merge_kernel(const luce_attn_args a) {
    const int      h    = blockIdx.x;
    const int64_t  r    = blockIdx.y;
    const int      lane = threadIdx.x % 32;
    const int      d    = threadIdx.x;
    ggml_cuda_pdl_lc(); // the next product's weights wait for nobody
    const luce_row row  = a.rows[r];
    ggml_cuda_pdl_sync();
    float * dst = a.dst + (r * a.n_head + h) * a.d;
    if (row.slot < 0) {
        if (d < a.d) {
            dst[d] = 0.0f;
        }
        return;
    }
    int n = (luce_keys_of(a, r, row).n + LUCE_ATTN_STEP - 1) / LUCE_ATTN_STEP;
    if (a.n_step > 1) {
        n = (n + a.n_step - 1) / a.n_step;
    }
    // in the order of the sum
    const int      first  = a.backwards ? n - 1 : 0;
    const int      step   = a.backwards ? -1 : 1;
    const float2 * sums   = a.sums + (r * a.n_head + h) * a.n_split + first;
    const int      at     = min(d, a.d - 1);
    const char   * values = (const char *) (a.values + ((r * a.n_head + h) * a.n_split + first) * a.d + at);
    const int      n_byte = step * a.d * (int) sizeof(float); // from one split to the next
    const float    gate   = a.gate[r * a.gate_row + h * a.gate_head + at];
    float v[LUCE_MERGE_AHEAD];
#pragma unroll
    for (int i = 0; i < LUCE_MERGE_AHEAD; i++) {
        v[i] = i < n ? *(const float *) (values + (int64_t) i * n_byte) : 0.0f;
    }
    float top = -INFINITY;
#pragma unroll 1
    for (int i = lane; i < n; i += 32) {
        top = fmaxf(top, sums[step * i].x);
    }
    top = warp_reduce_max<32>(top);
    float sum = 0.0f;
    float y   = 0.0f;
#pragma unroll 1
    for (int i0 = 0; i0 < n; i0 += 32) {
        const float2 own    = i0 + lane < n ? sums[step * (i0 + lane)] : make_float2(0.0f, 0.0f);
        const float  weight = expf(own.x - top);
#pragma unroll 1
        for (int i1 = i0; i1 < min(i0 + 32, n); i1 += LUCE_MERGE_AHEAD) {
            const int left = n - i1;
            float next[LUCE_MERGE_AHEAD] = {};
            values += (int64_t) LUCE_MERGE_AHEAD * n_byte;
            if (left > LUCE_MERGE_AHEAD) {
#pragma unroll
                for (int i = 0; i < LUCE_MERGE_AHEAD; i++) {
                    next[i] = LUCE_MERGE_AHEAD + i < left ? *(const float *) (values + (int64_t) i * n_byte) : 0.0f;
                }
            }
#pragma unroll
            for (int i = 0; i < LUCE_MERGE_AHEAD; i++) {
                const float w    = __shfl_sync(0xffffffff, weight, i1 - i0 + i, 32);
                const float part = __shfl_sync(0xffffffff, own.y, i1 - i0 + i, 32);
                if (i < left) {
                    sum = fmaf(w, part, sum);
                    y   = fmaf(w, v[i], y);
                }
                v[i] = next[i];
            }
        }
    }
    if (d < a.d) {
        dst[d] = y / sum * luce_sigmoid(gate);
    }
}

// all: every complete block is selected
static void luce_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst, bool all) {
    const ggml_tensor * q        = dst->src[0];
    const ggml_tensor * k        = dst->src[1];
    const ggml_tensor * selected = dst->src[3];
    const ggml_tensor * gate     = dst->src[4];
    const ggml_tensor * pages    = dst->src[5];
    if (q->ne[2] == 0) {
        return;
    }
    luce_attn_args a;
    a.q          = (const float *) q->data;
    a.k          = k->data;
    a.v          = dst->src[2]->data;
    a.selected   = (const int32_t *) selected->data;
    a.gate       = (const float *) gate->data;
    a.pages      = (const int32_t *) pages->data;
    a.rows       = luce_rows(dst->src[6]);
    a.dst        = (float *) dst->data;
    a.n_page_max = pages->ne[0];
    a.gate_row   = luce_stride(gate);
    a.d          = (int) q->ne[0];
    a.n_head     = (int) q->ne[1];
    a.n_row      = (int) q->ne[2];
    a.n_kv       = (int) (k->ne[0] / q->ne[0]);
    a.group      = a.n_head / a.n_kv;
    a.n_top      = (int) selected->ne[0] - 1;
    a.ratio      = ggml_get_op_params_i32(dst, 1);
    a.gate_head  = ggml_get_op_params_i32(dst, 2);
    a.scale      = ggml_get_op_params_f32(dst, 3);
    a.backwards  = ggml_get_op_params_i32(dst, 4) == GGML_LUCE_FAULT_SCAN_ORDER && a.n_row % 2 == 0;

    // complete blocks of a row, at most
    const bool chosen      = selected->op == GGML_OP_LUCE && ggml_get_op_params_i32(selected, 0) == GGML_LUCE_QSA_SELECT;
    const int  n_block_max = chosen ? std::min(a.n_top, ggml_get_op_params_i32(selected, 3)) : a.n_top;
    a.n_all      = all ? n_block_max : 0;
    a.by_ratio   = init_fastdiv_values(a.ratio);

    const bool mma   = luce_attn_mma_fits(ctx.device, a.d, k->type);
    const int  steps = (a.n_top * a.ratio + a.ratio - 1 + LUCE_ATTN_STEP - 1) / LUCE_ATTN_STEP;
    ggml_luce_path(mma ? "mma" : k->type == GGML_TYPE_F16 ? "scalar f16" : "scalar f32");
    a.n_step = 1;
    if (mma && ggml_get_op_params_i32(dst, 5) == GGML_LUCE_PHASE_CHUNK) {
        a.n_step = std::min((steps + 2) / 3, LUCE_ATTN_KEYS / LUCE_ATTN_STEP);
    }
    const int n_key = n_block_max * a.ratio + a.ratio - 1;
    a.n_split = (n_key + a.n_step * LUCE_ATTN_STEP - 1) / (a.n_step * LUCE_ATTN_STEP);

    const int n_total = a.n_row;
    const size_t n_bytes = (size_t) a.n_head * a.n_split * a.d * sizeof(float); // of a row
    const int    n_batch = (int) std::min<size_t>({ (size_t) n_total, std::max<size_t>(1, LUCE_ATTN_BYTES / n_bytes), 32768 });
    ggml_cuda_pool_alloc<float>  values(ctx.pool(), (size_t) n_batch * a.n_head * a.n_split * a.d);
    ggml_cuda_pool_alloc<float2> sums(ctx.pool(), (size_t) n_batch * a.n_head * a.n_split);
    a.values = values.get();
    a.sums   = sums.get();
    const int n_threads = std::min(LUCE_ATTN_THREADS, (int) GGML_PAD(a.d, 32));
    LUCE_SET_SHARED_CARVEOUT(luce_attn_merge_kernel);
    for (int row0 = 0; row0 < n_total; row0 += n_batch) {
        a.n_row = std::min(n_batch, n_total - row0);
        const dim3 grid(a.n_split, a.n_kv, a.n_row);
        if (mma) {
            luce_attn_mma(a, ctx.stream());
        } else if (k->type == GGML_TYPE_F16) {
            ggml_cuda_kernel_launch(luce_attn_any_kernel<half>, ggml_cuda_kernel_launch_params(grid, dim3(LUCE_ATTN_THREADS), (size_t) 0, ctx.stream()), a);
        } else {
            ggml_cuda_kernel_launch(luce_attn_any_kernel<float>, ggml_cuda_kernel_launch_params(grid, dim3(LUCE_ATTN_THREADS), (size_t) 0, ctx.stream()), a);
        }
        ggml_cuda_kernel_launch(luce_attn_merge_kernel,
            ggml_cuda_kernel_launch_params(dim3(a.n_head, a.n_row), dim3(n_threads), (size_t) 0, ctx.stream()), a);
        a.q        += (int64_t) a.n_row * a.n_head * a.d;
        a.selected += (int64_t) a.n_row * (1 + a.n_top);
        a.gate     += a.n_row * a.gate_row;
        a.rows     += a.n_row;
        a.dst      += (int64_t) a.n_row * a.n_head * a.d;
    }
}

void luce_cuda_qsa_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    luce_attn(ctx, dst, false);
}

void luce_cuda_qsa_attn_all(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    ggml_luce_path("all blocks");
    luce_attn(ctx, dst, true);
}
