// pyluce: attention over the tokens of the selected blocks and the tail of the incomplete one, times sigmoid(gate).
//
// A row's keys, in rising position, are cut into splits of a fixed number of keys; a split's partial result is the maximum, the
// sum and the weighted values of its own keys, and a second kernel adds the splits in rising order. So a row's
// result depends on its own keys alone, and on the phase of the graph: a row graph has splits of one step of 64 keys, to
// occupy the device with one row; a chunk graph about three splits a row, each walked in steps with a running maximum.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-common.cuh"
#include "mma.cuh"

#define LUCE_ATTN_STEP    64   // keys
#define LUCE_ATTN_KEYS    1024 // of a split, at most
#define LUCE_ATTN_SPLITS  1024 // of a row, at most
#define LUCE_ATTN_THREADS 256
#define LUCE_ATTN_GROUP   16   // heads a K/V head, at most
#define LUCE_ATTN_SLAB    64   // values of a key in shared memory at a time
#define LUCE_ATTN_D       256  // at most
#define LUCE_ATTN_BYTES   ((size_t) 64 << 20) // of splits at a time

struct luce_attn_args {
    const float    * q;        // [d, n_head, n_row]
    const void     * k;        // [d*n_kv, n_cell]
    const void     * v;
    const int32_t  * selected; // [1 + n_top, n_row]
    const float    * gate;
    const int32_t  * pages;    // [n_page_max, n_slot]
    const luce_row * rows;
    float          * values;   // [d, n_split, n_head, n_row] of the splits
    float2         * sums;     // [n_split, n_head, n_row]: maximum, sum
    float          * dst;      // [d*n_head, n_row]
    int64_t          n_page_max, gate_row, gate_head;
    int              d, n_head, n_kv, group, n_row, n_top, ratio;
    int              n_split;  // of a row, at most
    int              n_step;   // of a split, at most
    float            scale;
    bool             backwards; // the fault: values added in falling position
};

// keys of a row: of its blocks, and in all
struct luce_row_keys {
    int n_block_keys, n;
};

static __device__ __forceinline__ luce_row_keys luce_keys_of(const luce_attn_args & a, int64_t r, const luce_row & row) {
    const int n_block_keys = a.selected[r * (1 + a.n_top)] * a.ratio;
    return { n_block_keys, n_block_keys + (row.position + 1) % a.ratio };
}

// the cell of key i of a row
static __device__ __forceinline__ int64_t luce_key_cell(const luce_attn_args & a, int64_t r, const luce_row & row, const luce_row_keys & keys, int i) {
    int position;
    if (i < keys.n_block_keys) {
        position = a.selected[r * (1 + a.n_top) + 1 + i / a.ratio] * a.ratio + i % a.ratio;
    } else {
        position = (row.position + 1) / a.ratio * a.ratio + i - keys.n_block_keys;
    }
    return luce_cell(a.pages, a.n_page_max, row.slot, position);
}

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

// Heads of 256 values, F16 keys and values, on matrix units: 16 heads (padded) x 64 keys a step. A warp scores 16 of the keys over
// all their values, then adds up 64 of the 256 values over all the keys. Both read keys and values straight
// into registers, 16 and 8 bytes a lane: a product may take its inner index in any order that both operands share, and the
// columns of its result in any order that the store undoes.
#if defined(TURING_MMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)
#define LUCE_ATTN_MMA
#endif // defined(TURING_MMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)

#define LUCE_ATTN_WARPS    4
#define LUCE_ATTN_MMA_D    256
#define LUCE_ATTN_Q_STRIDE (LUCE_ATTN_MMA_D / 2 + 16) // half2; rows i and i + 1 in different halves of the banks
#define LUCE_ATTN_S_STRIDE (LUCE_ATTN_STEP + 16)      // float
#define LUCE_ATTN_P_STRIDE (LUCE_ATTN_STEP / 2 + 4)   // half2

#ifdef LUCE_ATTN_MMA
using namespace ggml_cuda_mma;

typedef tile<16, 8, half2, get_input_data_layout()> luce_tile_in;
#ifdef AMD_WMMA_AVAILABLE
typedef tile<16, 16, float, DATA_LAYOUT_J_MAJOR> luce_tile_acc;
static constexpr int luce_tile_rows = 1; // that a lane has of an input tile
#else
typedef tile<16, 16, float> luce_tile_acc;
static constexpr int luce_tile_rows = 2;
#endif // AMD_WMMA_AVAILABLE

// 32 values of each of 16 rows as two tiles; row[i]: where the values of row luce_tile_in::get_i(i) begin
static __device__ __forceinline__ void luce_load_rows(luce_tile_in (&t)[2], const half2 * const (&row)[luce_tile_rows]) {
#if !defined(AMD_WMMA_AVAILABLE)
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4   x = *(const uint4 *) (row[i] + 4 * (threadIdx.x % 4));
        const half2 * h = (const half2 *) &x;
        t[0].x[i + 0] = h[0];
        t[0].x[i + 2] = h[1];
        t[1].x[i + 0] = h[2];
        t[1].x[i + 2] = h[3];
    }
#else
#pragma unroll
    for (int s = 0; s < 2; s++) {
#ifdef RDNA3
        *(uint4 *) (t[s].x + 0) = *(const uint4 *) (row[0] + 8 * s + 0);
        *(uint4 *) (t[s].x + 4) = *(const uint4 *) (row[0] + 8 * s + 4);
#else
        *(uint4 *) (t[s].x + 0) = *(const uint4 *) (row[0] + 8 * (threadIdx.x / 16) + 4 * s);
#endif // RDNA3
    }
#endif // !defined(AMD_WMMA_AVAILABLE)
}

// 16 keys of 64 values: what a lane has of them, and tile u of four, whose column i is value 4*i + u
struct luce_values {
    uint2 x[luce_tile_in::ne][2];

    __device__ __forceinline__ void load(const half * v, const int64_t width, const int * cells) {
#pragma unroll
        for (int l = 0; l < luce_tile_in::ne; l++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[l][i] = *(const uint2 *) (v + cells[2 * luce_tile_in::get_j(l) + i] * width + 4 * luce_tile_in::get_i(l));
            }
        }
    }

    __device__ __forceinline__ void get(luce_tile_in & t, const int u) const {
#pragma unroll
        for (int l = 0; l < luce_tile_in::ne; l++) {
            const half2 a = ((const half2 *) &x[l][0])[u / 2];
            const half2 b = ((const half2 *) &x[l][1])[u / 2];
            t.x[l] = u % 2 == 0 ? __lows2half2(a, b) : __highs2half2(a, b);
        }
    }
};
#endif // LUCE_ATTN_MMA

// grid: (splits, K/V heads, rows); threads (32, 4)
static __global__ __launch_bounds__(LUCE_ATTN_WARPS * 32) void luce_attn_mma_kernel(const luce_attn_args a) {
#ifdef LUCE_ATTN_MMA
    __shared__ __align__(16) half2 qs[LUCE_ATTN_GROUP * LUCE_ATTN_Q_STRIDE];
    __shared__ __align__(16) float ss[LUCE_ATTN_GROUP * LUCE_ATTN_S_STRIDE];
    __shared__ __align__(16) half2 ps[LUCE_ATTN_GROUP * LUCE_ATTN_P_STRIDE];
    __shared__ float alphas[LUCE_ATTN_GROUP];
    __shared__ int   cells[LUCE_ATTN_KEYS];

    const int      split = blockIdx.x;
    const int      kv    = blockIdx.y;
    const int64_t  r     = blockIdx.z;
    const int      lane  = threadIdx.x;
    const int      warp  = threadIdx.y;
    const int      t     = warp * 32 + lane;
    const luce_row row   = a.rows[r];
    if (row.slot < 0) {
        return;
    }
    const luce_row_keys keys = luce_keys_of(a, r, row);
    const int first  = split * a.n_step * LUCE_ATTN_STEP;
    const int n      = min(keys.n - first, a.n_step * LUCE_ATTN_STEP); // keys of this split
    const int n_step = (n + LUCE_ATTN_STEP - 1) / LUCE_ATTN_STEP;
    if (n <= 0) {
        return;
    }
    // the last step is filled up with the split's first key, whose scores there are then masked
    for (int i = t; i < n_step * LUCE_ATTN_STEP; i += LUCE_ATTN_WARPS * 32) {
        cells[i] = (int) luce_key_cell(a, r, row, keys, first + (i < n ? i : 0));
    }
    const float2 * q = (const float2 *) (a.q + (r * a.n_head + (int64_t) kv * a.group) * LUCE_ATTN_MMA_D);
    for (int i = t; i < LUCE_ATTN_GROUP * LUCE_ATTN_MMA_D / 2; i += LUCE_ATTN_WARPS * 32) {
        const int    h = i / (LUCE_ATTN_MMA_D / 2);
        const float2 x = h < a.group ? q[i] : make_float2(0.0f, 0.0f);
        qs[h * LUCE_ATTN_Q_STRIDE + i % (LUCE_ATTN_MMA_D / 2)] = make_half2(x.x, x.y);
    }
    __syncthreads();

    const int64_t width = (int64_t) LUCE_ATTN_MMA_D * a.n_kv;
    const half  * k     = (const half *) a.k + kv * LUCE_ATTN_MMA_D;
    const half  * v     = (const half *) a.v + kv * LUCE_ATTN_MMA_D + 64 * warp;
    // of the softmax, eight lanes a head
    const int head  = 4 * warp + lane / 8;
    const int eight = lane % 8;
    float top = -INFINITY;
    float sum = 0.0f;
    luce_tile_acc acc[4];

    for (int i_step = 0; i_step < n_step; i_step++) {
        const int step = a.backwards ? n_step - 1 - i_step : i_step;
        const int left = n - step * LUCE_ATTN_STEP; // keys from this step on
        const int * at = cells + step * LUCE_ATTN_STEP;

        luce_tile_acc scores[2];
        {
            luce_tile_in key[LUCE_ATTN_MMA_D / 32][2];
#pragma unroll
            for (int c = 0; c < LUCE_ATTN_MMA_D / 32; c++) {
                const half2 * from[luce_tile_rows];
#pragma unroll
                for (int i = 0; i < luce_tile_rows; i++) {
                    from[i] = (const half2 *) (k + at[16 * warp + luce_tile_in::get_i(i)] * width) + 16 * c;
                }
                luce_load_rows(key[c], from);
            }
#pragma unroll
            for (int c = 0; c < LUCE_ATTN_MMA_D / 32; c++) {
                const half2 * from[luce_tile_rows];
#pragma unroll
                for (int i = 0; i < luce_tile_rows; i++) {
                    from[i] = qs + luce_tile_in::get_i(i) * LUCE_ATTN_Q_STRIDE + 16 * c;
                }
                luce_tile_in query[2];
                luce_load_rows(query, from);
                mma(scores[0], query[0], key[c][0]);
                mma(scores[1], query[1], key[c][1]);
            }
        }
#ifndef AMD_WMMA_AVAILABLE
        luce_values value[LUCE_ATTN_STEP / 16]; // on their way during the softmax
#pragma unroll
        for (int i = 0; i < LUCE_ATTN_STEP / 16; i++) {
            value[i].load(v, width, at + 16 * i);
        }
#endif // AMD_WMMA_AVAILABLE
#pragma unroll
        for (int l = 0; l < luce_tile_acc::ne; l++) {
            const int i = 16 * warp + luce_tile_acc::get_j(l);
            ss[luce_tile_acc::get_i(l) * LUCE_ATTN_S_STRIDE + i] =
                i < left ? (scores[0].x[l] + scores[1].x[l]) * a.scale : -INFINITY;
        }
        __syncthreads();

        float s[LUCE_ATTN_STEP / 8];
        float before = top;
#pragma unroll
        for (int i = 0; i < LUCE_ATTN_STEP / 16; i++) {
            const float2 x = *(const float2 *) &ss[head * LUCE_ATTN_S_STRIDE + 16 * i + 2 * eight];
            s[2 * i + 0] = x.x;
            s[2 * i + 1] = x.y;
            top = fmaxf(top, fmaxf(x.x, x.y));
        }
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, offset, 32));
        }
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < LUCE_ATTN_STEP / 16; i++) {
            const half2 p = make_half2(expf(s[2 * i + 0] - top), expf(s[2 * i + 1] - top));
            ps[head * LUCE_ATTN_P_STRIDE + 8 * i + eight] = p;
            part += __low2float(p) + __high2float(p);
        }
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) {
            part += __shfl_xor_sync(0xffffffff, part, offset, 32);
        }
        const float alpha = expf(before - top);
        sum = fmaf(sum, alpha, part);
        if (eight == 0) {
            alphas[head] = alpha;
        }
        __syncthreads();

#pragma unroll
        for (int l = 0; l < luce_tile_acc::ne; l++) {
            const float x = alphas[luce_tile_acc::get_i(l)];
#pragma unroll
            for (int u = 0; u < 4; u++) {
                acc[u].x[l] *= x;
            }
        }
#pragma unroll
        for (int i = 0; i < LUCE_ATTN_STEP / 16; i++) {
#ifdef AMD_WMMA_AVAILABLE
            luce_values value[LUCE_ATTN_STEP / 16];
            value[i].load(v, width, at + 16 * i);
#endif // AMD_WMMA_AVAILABLE
            luce_tile_in weights;
            load_ldmatrix(weights, ps + 8 * i, LUCE_ATTN_P_STRIDE);
#pragma unroll
            for (int u = 0; u < 4; u++) {
                luce_tile_in x;
                value[i].get(x, u);
                mma(acc[u], weights, x);
            }
        }
    }

    if (eight == 0 && head < a.group) {
        a.sums[(r * a.n_head + kv * a.group + head) * a.n_split + split] = make_float2(top, sum);
    }
#pragma unroll
    for (int l = 0; l < luce_tile_acc::ne; l++) {
        const int h = luce_tile_acc::get_i(l);
        if (h < a.group) {
            float * to = a.values + ((r * a.n_head + kv * a.group + h) * a.n_split + split) * LUCE_ATTN_MMA_D;
            *(float4 *) (to + 64 * warp + 4 * luce_tile_acc::get_j(l)) =
                make_float4(acc[0].x[l], acc[1].x[l], acc[2].x[l], acc[3].x[l]);
        }
    }
#else
    GGML_UNUSED(a);
    NO_DEVICE_CODE;
#endif // LUCE_ATTN_MMA
}

// A block a (head, row): the splits added in rising order, times sigmoid(gate).
static __global__ __launch_bounds__(LUCE_ATTN_THREADS) void luce_attn_merge_kernel(const luce_attn_args a) {
    __shared__ float weights[LUCE_ATTN_SPLITS];
    const int      h   = blockIdx.x;
    const int64_t  r   = blockIdx.y;
    const luce_row row = a.rows[r];
    float        * dst = a.dst + (r * a.n_head + h) * a.d;
    if (row.slot < 0) {
        for (int d = threadIdx.x; d < a.d; d += blockDim.x) {
            dst[d] = 0.0f;
        }
        return;
    }
    const int      n_key  = a.n_step * LUCE_ATTN_STEP; // of a split
    const int      n      = (luce_keys_of(a, r, row).n + n_key - 1) / n_key;
    const float2 * sums   = a.sums + (r * a.n_head + h) * a.n_split;
    const float  * values = a.values + (r * a.n_head + h) * a.n_split * a.d;
    const float  * gate   = a.gate + r * a.gate_row + h * a.gate_head;
    float top = -INFINITY;
    for (int i = 0; i < n; i++) {
        top = fmaxf(top, sums[i].x);
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        weights[i] = expf(sums[i].x - top);
    }
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < n; i++) {
        const int at = a.backwards ? n - 1 - i : i;
        sum = fmaf(weights[at], sums[at].y, sum);
    }
    for (int d = threadIdx.x; d < a.d; d += blockDim.x) {
        float y = 0.0f;
#pragma unroll 8
        for (int i = 0; i < n; i++) {
            const int at = a.backwards ? n - 1 - i : i;
            y = fmaf(weights[at], values[(int64_t) at * a.d + d], y);
        }
        dst[d] = y / sum * luce_sigmoid(gate[d]);
    }
}

void luce_cuda_qsa_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
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

    const int  cc    = ggml_cuda_info().devices[ctx.device].cc;
    const bool mma   = k->type == GGML_TYPE_F16 && a.d == LUCE_ATTN_MMA_D && (turing_mma_available(cc) || amd_wmma_available(cc));
    const int  steps = (a.n_top * a.ratio + a.ratio - 1 + LUCE_ATTN_STEP - 1) / LUCE_ATTN_STEP;
    a.n_step = 1;
    if (mma && ggml_get_op_params_i32(dst, 5) == GGML_LUCE_PHASE_CHUNK) {
        a.n_step = std::min((steps + 2) / 3, LUCE_ATTN_KEYS / LUCE_ATTN_STEP);
    }
    a.n_split = (steps + a.n_step - 1) / a.n_step;

    const int n_total = a.n_row;
    const int n_batch = (int) std::min<size_t>(n_total, std::max<size_t>(1, LUCE_ATTN_BYTES / ((size_t) a.n_head * a.n_split * a.d * sizeof(float))));
    ggml_cuda_pool_alloc<float>  values(ctx.pool(), (size_t) n_batch * a.n_head * a.n_split * a.d);
    ggml_cuda_pool_alloc<float2> sums(ctx.pool(), (size_t) n_batch * a.n_head * a.n_split);
    a.values = values.get();
    a.sums   = sums.get();
    const int n_threads = std::min(LUCE_ATTN_THREADS, (int) GGML_PAD(a.d, 32));
    for (int row0 = 0; row0 < n_total; row0 += n_batch) {
        a.n_row = std::min(n_batch, n_total - row0);
        const dim3 grid(a.n_split, a.n_kv, a.n_row);
        if (mma) {
            luce_attn_mma_kernel<<<grid, dim3(32, LUCE_ATTN_WARPS), 0, ctx.stream()>>>(a);
        } else if (k->type == GGML_TYPE_F16) {
            luce_attn_any_kernel<half><<<grid, LUCE_ATTN_THREADS, 0, ctx.stream()>>>(a);
        } else {
            luce_attn_any_kernel<float><<<grid, LUCE_ATTN_THREADS, 0, ctx.stream()>>>(a);
        }
        luce_attn_merge_kernel<<<dim3(a.n_head, a.n_row), n_threads, 0, ctx.stream()>>>(a);
        a.q        += (int64_t) a.n_row * a.n_head * a.d;
        a.selected += (int64_t) a.n_row * (1 + a.n_top);
        a.gate     += a.n_row * a.gate_row;
        a.rows     += a.n_row;
        a.dst      += (int64_t) a.n_row * a.n_head * a.d;
    }
}
