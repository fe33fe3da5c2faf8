// pyluce: sparse attention on matrix units: heads of 256 values, F16 keys and values.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-launch.cuh"
#include "luce-qsa-attn.cuh"
#include "mma.cuh"

// 16 heads (padded) x 64 keys a step. A warp scores 16 of the keys over
// all their values, then adds up 64 of the 256 values over all the keys. Both read keys and values straight
// into registers, 16 and 8 bytes a lane: a product may take its inner index in any order that both operands share, and the
// columns of its result in any order that the store undoes.
#if defined(TURING_MMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)
#define LUCE_ATTN_MMA
#endif // defined(TURING_MMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)

#define LUCE_ATTN_WARPS    4
#define LUCE_ATTN_MMA_D    256
#define LUCE_ATTN_ROWS     3   // of a block of a chunk graph on CUDA: as many as its registers allow
#define LUCE_ATTN_Q_STRIDE (LUCE_ATTN_MMA_D / 2 + 16) // half2; rows i and i + 1 in different halves of the banks
#define LUCE_ATTN_Q_PAIR   (LUCE_ATTN_MMA_D + 4)      // half2 of rows i and i + 8, in turn
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

// Four values, from value 4*i on, of heads g and g + 8 into shared memory; and 32 values of each head from value 32*c on as two tiles. Where a
// lane has two rows of a tile they lie there in the order of its registers.
static __device__ __forceinline__ void luce_store_query(half2 * qs, const int g, const int i, const float4 low, const float4 high) {
    __align__(16) const half2 x[2][2] = { { make_half2(low.x, low.y), make_half2(low.z, low.w) }, { make_half2(high.x, high.y), make_half2(high.z, high.w) } };
#if !defined(AMD_WMMA_AVAILABLE)
    __align__(16) const half2 turns[4] = { x[0][0], x[1][0], x[0][1], x[1][1] };
    *(uint4 *) (qs + g * LUCE_ATTN_Q_PAIR + 4 * i) = *(const uint4 *) turns;
#else
#pragma unroll
    for (int r = 0; r < 2; r++) {
        *(uint2 *) (qs + (g + 8 * r) * LUCE_ATTN_Q_STRIDE + 2 * i) = *(const uint2 *) x[r];
    }
#endif // !defined(AMD_WMMA_AVAILABLE)
}

static __device__ __forceinline__ void luce_load_query(luce_tile_in (&t)[2], const half2 * qs, const int c) {
#if !defined(AMD_WMMA_AVAILABLE)
    const half2 * from = qs + threadIdx.x / 4 * LUCE_ATTN_Q_PAIR + 32 * c + 8 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        *(uint4 *) t[i].x = *(const uint4 *) (from + 4 * i);
    }
#else
    const half2 * from[luce_tile_rows] = { qs + luce_tile_in::get_i(0) * LUCE_ATTN_Q_STRIDE + 16 * c };
    luce_load_rows(t, from);
#endif // !defined(AMD_WMMA_AVAILABLE)
}

// the values of a cell, of n_bytes each
static __device__ __forceinline__ const half * luce_cell_row(const half * pool, const int cell, const uint32_t n_bytes) {
    return (const half *) ((const char *) pool + (uint64_t) (uint32_t) cell * n_bytes);
}

// asks the second-level cache for the 128 bytes there: nothing is read, so it need not wait for who wrote them
static __device__ __forceinline__ void luce_ask_for(const void * p) {
#ifndef GGML_USE_HIP
    asm volatile("prefetch.global.L2 [%0];" : : "l"(p));
#else
    GGML_UNUSED(p);
#endif // GGML_USE_HIP
}

// 16 keys of 64 values: what a lane has of them, and tile u of four, whose column i is value 4*i + u
struct luce_values {
    uint2 x[luce_tile_in::ne][2];

    __device__ __forceinline__ void load(const half * v, const uint32_t n_bytes, const int * cells) {
#pragma unroll
        for (int l = 0; l < luce_tile_in::ne; l++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[l][i] = *(const uint2 *) (luce_cell_row(v, cells[2 * luce_tile_in::get_j(l) + i], n_bytes) + 4 * luce_tile_in::get_i(l));
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

// what the four warps of a row share
struct __align__(16) luce_attn_shared {
    half2 q[LUCE_ATTN_GROUP * LUCE_ATTN_Q_STRIDE]; // no less than 8 pairs
    float s[LUCE_ATTN_GROUP * LUCE_ATTN_S_STRIDE];
    half2 p[LUCE_ATTN_GROUP * LUCE_ATTN_P_STRIDE];
    float alpha[LUCE_ATTN_GROUP];
    int   cells[LUCE_ATTN_KEYS];
};

// the four warps of a row wait for one another
template <int rows>
static __device__ __forceinline__ void luce_row_barrier() {
#ifndef GGML_USE_HIP
    if (rows > 1) {
        asm volatile("bar.sync %0, %1;" : : "r"(threadIdx.z + 1), "n"(LUCE_ATTN_WARPS * 32) : "memory");
        return;
    }
#endif // GGML_USE_HIP
    __syncthreads();
}

// grid: (splits, K/V heads, row groups); threads (32, 4, rows). Rows of a block only share the first-level cache: neighbours
// of one sequence read much the same keys. one_step: a split is one step (and rows is 1), so that there is no maximum before it.
#ifdef LUCE_ATTN_MMA
template <int rows, bool one_step>
static __device__ __forceinline__ void luce_attn_mma_splits(const luce_attn_args & a) {
    static_assert(rows == 1 || !one_step, "rows of a block have splits of several steps");
    constexpr int ahead = luce_tile_rows == 1 ? 0 : LUCE_ATTN_STEP / 16; // loads of values before the softmax, 16 keys each
    extern __shared__ luce_attn_shared luce_attn_block[]; // [rows]
    luce_attn_shared & shared = luce_attn_block[threadIdx.z];
    half2 * qs     = shared.q;
    float * ss     = shared.s;
    half2 * ps     = shared.p;
    float * alphas = shared.alpha;
    int   * cells  = shared.cells;

    const int      split = blockIdx.x;
    const int      kv    = blockIdx.y;
    const int64_t  r     = (int64_t) blockIdx.z * rows + threadIdx.z;
    const int      lane  = threadIdx.x;
    const int      warp  = threadIdx.y;
    const int      t     = warp * 32 + lane;
    // rows and pages are the step's inputs: which keys there are is known before the kernel in front has ended, if all are selected
    const bool     early = one_step && a.n_all > 0;
    if (one_step) {
        ggml_cuda_pdl_lc();
    }
    if (!early) {
        ggml_cuda_pdl_sync();
    }
    if (r >= a.n_row) {
        return;
    }
    const luce_row      row  = a.rows[r];
    const luce_row_keys keys = luce_keys_of(a, r, row);
    const int first  = split * a.n_step * LUCE_ATTN_STEP;
    const int n      = min(keys.n - first, a.n_step * LUCE_ATTN_STEP); // keys of this split
    const int n_step = one_step ? 1 : (n + LUCE_ATTN_STEP - 1) / LUCE_ATTN_STEP;
    if (row.slot < 0 || n <= 0) {
        if (early) {
            ggml_cuda_pdl_sync();
        }
        return;
    }
    // bytes of a cell; a head's keys, and the values that a warp adds up
    const uint32_t width = (uint32_t) (LUCE_ATTN_MMA_D * a.n_kv * sizeof(half));
    const half   * k     = (const half *) a.k + kv * LUCE_ATTN_MMA_D;
    const half   * v     = (const half *) a.v + kv * LUCE_ATTN_MMA_D + 64 * warp;
    // the last step is filled up with the split's first key, whose scores there are then masked
    if (one_step) {
        if (t < LUCE_ATTN_STEP) {
            const int cell = (int) luce_key_cell(a, r, row, keys, first + (t < n ? t : 0));
            cells[t] = cell;
            if (early && t < n) {
#pragma unroll
                for (int i = 0; i < LUCE_ATTN_MMA_D; i += 64) {
                    luce_ask_for(luce_cell_row(k, cell, width) + i);
                    luce_ask_for(luce_cell_row((const half *) a.v + kv * LUCE_ATTN_MMA_D, cell, width) + i);
                }
            }
        }
        if (early) {
            ggml_cuda_pdl_sync();
        }
    }
    constexpr int per_head = LUCE_ATTN_MMA_D / 4; // threads, four values each
    constexpr int at_once  = LUCE_ATTN_WARPS * 32 / per_head;
    const float4 * q = (const float4 *) (a.q + (r * a.n_head + (int64_t) kv * a.group) * LUCE_ATTN_MMA_D) + t;
    float4 query[8 / at_once][2];
#pragma unroll
    for (int j = 0; j < 8 / at_once; j++) { // on their way while the cells are found
#pragma unroll
        for (int i = 0; i < 2; i++) {
            query[j][i] = at_once * j + t / per_head + 8 * i < a.group ? q[(at_once * j + 8 * i) * per_head] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    if (!one_step) {
        for (int i = t; i < n_step * LUCE_ATTN_STEP; i += LUCE_ATTN_WARPS * 32) {
            cells[i] = (int) luce_key_cell(a, r, row, keys, first + (i < n ? i : 0));
        }
    }
#pragma unroll
    for (int j = 0; j < 8 / at_once; j++) {
        luce_store_query(qs, at_once * j + t / per_head, t % per_head, query[j][0], query[j][1]);
    }
    luce_row_barrier<rows>();

    const int     flip  = a.backwards ? LUCE_ATTN_STEP / 16 - 1 : 0; // the fault: a step's sixteens in falling order
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
                    from[i] = (const half2 *) luce_cell_row(k, at[16 * warp + luce_tile_in::get_i(i)], width) + 16 * c;
                }
                luce_load_rows(key[c], from);
            }
#pragma unroll
            for (int c = 0; c < LUCE_ATTN_MMA_D / 32; c++) {
                luce_tile_in query[2];
                luce_load_query(query, qs, c);
                mma(scores[0], query[0], key[c][0]);
                mma(scores[1], query[1], key[c][1]);
            }
        }
        luce_values value[LUCE_ATTN_STEP / 16];
#pragma unroll
        for (int i = 0; i < ahead; i++) { // on their way during the softmax
            value[i].load(v, width, at + 16 * (i ^ flip));
        }
#pragma unroll
        for (int l = 0; l < luce_tile_acc::ne; l++) {
            const int i = 16 * warp + luce_tile_acc::get_j(l);
            ss[luce_tile_acc::get_i(l) * LUCE_ATTN_S_STRIDE + i] =
                i < left ? (scores[0].x[l] + scores[1].x[l]) * a.scale : -INFINITY;
        }
        luce_row_barrier<rows>();

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
        if (one_step) {
            sum = part;
        } else {
            const float alpha = expf(before - top);
            sum = fmaf(sum, alpha, part);
            if (eight == 0) {
                alphas[head] = alpha;
            }
        }
        luce_row_barrier<rows>();

        if (!one_step) {
#pragma unroll
            for (int l = 0; l < luce_tile_acc::ne; l++) {
                const float x = alphas[luce_tile_acc::get_i(l)];
#pragma unroll
                for (int u = 0; u < 4; u++) {
                    acc[u].x[l] *= x;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < LUCE_ATTN_STEP / 16; i++) {
            if (i >= ahead) {
                value[i].load(v, width, at + 16 * (i ^ flip));
            }
            luce_tile_in weights;
            load_ldmatrix(weights, ps + 8 * (i ^ flip), LUCE_ATTN_P_STRIDE);
#pragma unroll
            for (int u = 0; u < 4; u++) {
                luce_tile_in x;
                value[i].get(x, u);
                mma(acc[u], weights, x);
            }
#ifdef RDNA3
            if (i % 2 == 1) {
                __builtin_amdgcn_sched_barrier(0); // the next values are not read any earlier: there are no registers for them
            }
#endif // RDNA3
        }
    }

    if (eight == 0 && head < a.group) {
        a.sums[(r * a.n_head + kv * a.group + head) * a.n_split + split] = make_float2(top, sum);
    }
    const uint32_t head_stride = (uint32_t) a.n_split * LUCE_ATTN_MMA_D;
    float        * values      = a.values + ((r * a.n_head + (int64_t) kv * a.group) * a.n_split + split) * LUCE_ATTN_MMA_D + 64 * warp;
#pragma unroll
    for (int l = 0; l < luce_tile_acc::ne; l++) {
        const int h = luce_tile_acc::get_i(l);
        if (h < a.group) {
            *(float4 *) (values + h * head_stride + 4 * luce_tile_acc::get_j(l)) =
                make_float4(acc[0].x[l], acc[1].x[l], acc[2].x[l], acc[3].x[l]);
        }
    }
}
#endif // LUCE_ATTN_MMA

template <int rows>
static __global__ __launch_bounds__(LUCE_ATTN_WARPS * 32 * rows) void luce_attn_mma_kernel(const luce_attn_args a) {
#ifdef LUCE_ATTN_MMA
    luce_attn_mma_splits<rows, false>(a);
#else
    GGML_UNUSED(a);
    NO_DEVICE_CODE;
#endif // LUCE_ATTN_MMA
}

static __global__ __launch_bounds__(LUCE_ATTN_WARPS * 32) void luce_attn_row_kernel(const luce_attn_args a) {
#ifdef LUCE_ATTN_MMA
    luce_attn_mma_splits<1, true>(a);
#else
    GGML_UNUSED(a);
    NO_DEVICE_CODE;
#endif // LUCE_ATTN_MMA
}

bool luce_attn_mma_fits(int device, int d, ggml_type type) {
    const int cc = ggml_cuda_info().devices[device].cc;
    return d == LUCE_ATTN_MMA_D && type == GGML_TYPE_F16 && (turing_mma_available(cc) || amd_wmma_available(cc));
}

void luce_attn_mma(const luce_attn_args & a, cudaStream_t stream) {
    const dim3 threads(32, LUCE_ATTN_WARPS, 1);
    if (a.n_step == 1) {
        LUCE_SET_SHARED_CARVEOUT(luce_attn_row_kernel);
        ggml_cuda_kernel_launch(luce_attn_row_kernel, ggml_cuda_kernel_launch_params(dim3(a.n_split, a.n_kv, a.n_row), threads, sizeof(luce_attn_shared), stream), a);
        return;
    }
#ifndef GGML_USE_HIP
    // the same bits either way: few rows are spread over the device, many share its first-level caches
    if (a.n_row >= 128) {
        constexpr int    rows     = LUCE_ATTN_ROWS;
        constexpr size_t n_shared = rows * sizeof(luce_attn_shared);
        CUDA_SET_SHARED_MEMORY_LIMIT(luce_attn_mma_kernel<rows>, n_shared);
        luce_attn_mma_kernel<rows><<<dim3(a.n_split, a.n_kv, (a.n_row + rows - 1) / rows), dim3(32, LUCE_ATTN_WARPS, rows), n_shared, stream>>>(a);
        return;
    }
#endif // GGML_USE_HIP
    luce_attn_mma_kernel<1><<<dim3(a.n_split, a.n_kv, a.n_row), threads, sizeof(luce_attn_shared), stream>>>(a);
}
