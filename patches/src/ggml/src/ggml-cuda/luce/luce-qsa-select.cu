// pyluce: the blocks a row attends to: scores, then the n_top best of them by a radix select.
//
// The score of (row, block) is the same bits in every kernel of this file: per head one chain of fused multiply-adds over
// d from 0 up, then the positive ones added in head order. So the choice of kernel may depend on the number of rows.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-common.cuh"

#define LUCE_SCORE_THREADS  256
#define LUCE_SELECT_THREADS 1024
#define LUCE_SELECT_BITS    11
#define LUCE_SELECT_BINS    (1 << LUCE_SELECT_BITS)
#define LUCE_SELECT_HELD    16           // scores a thread of the select kernel keeps in registers
#define LUCE_SCORE_BYTES    (64u << 20)  // of scores at a time

struct luce_select_args {
    const float    * q;      // [d, n_head, n_row]
    const float    * pooled; // [d, n_cell/ratio]
    const int32_t  * pages;  // [n_page_max, n_slot]
    const luce_row * rows;   // [n_row]
    float          * scores; // [score_stride, rows of this batch]
    int32_t        * dst;    // [1 + n_top, n_row]
    int64_t          n_page_max, score_stride;
    int              d, n_head, n_row, row0, n_batch, ratio, n_top, n_block_max;
    bool             high_first;
};

// complete blocks of a row
static __device__ __forceinline__ int luce_complete_blocks(const luce_select_args & a, const luce_row & row) {
    return row.slot < 0 ? 0 : min((row.position + 1) / a.ratio, a.n_block_max);
}

// the pooled key of block b
static __device__ __forceinline__ const float * luce_block_key(const luce_select_args & a, int32_t slot, int b) {
    const int     a_page = GGML_LUCE_PAGE / a.ratio;
    const int64_t page   = a.pages[slot * a.n_page_max + b / a_page];
    return a.pooled + (page * a_page + b % a_page) * a.d;
}

// One row and n_key blocks; a thread a (block, head). grid: (tiles of n_key blocks, rows of the batch)
template <int n_key>
static __global__ __launch_bounds__(LUCE_SCORE_THREADS) void luce_score_rows_kernel(const luce_select_args a) {
    constexpr int n_lane = LUCE_SCORE_THREADS / n_key; // heads at a time
    const luce_row row = a.rows[a.row0 + blockIdx.y];
    const int      n   = luce_complete_blocks(a, row);
    const int      b0  = blockIdx.x * n_key;
    if (n <= a.n_top || b0 >= n) {
        return;
    }
    extern __shared__ float4 luce_score_shared[];
    const int d4     = a.d / 4;
    const int stride = d4 | 1; // float4; odd, so that eight keys in turn lie in different banks
    float4 * keys = luce_score_shared;       // [n_key][stride]
    float4 * q    = keys + n_key * stride;   // [n_head][d4]
    float  * dots = (float *) (q + a.n_head * d4); // [n_head][n_key]

    const float4 * q_row = (const float4 *) (a.q + (int64_t) (a.row0 + blockIdx.y) * a.n_head * a.d);
    for (int i = threadIdx.x; i < a.n_head * d4; i += LUCE_SCORE_THREADS) {
        q[i] = q_row[i];
    }
    for (int i = threadIdx.x; i < n_key * d4; i += LUCE_SCORE_THREADS) {
        const int k = i / d4;
        const int c = i - k * d4;
        keys[k * stride + c] = b0 + k < n ? ((const float4 *) luce_block_key(a, row.slot, b0 + k))[c] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __syncthreads();

    const int k = threadIdx.x % n_key;
    for (int h = threadIdx.x / n_key; h < a.n_head; h += n_lane) {
        const float4 * x = q + h * d4;
        const float4 * y = keys + k * stride;
        float dot = 0.0f;
#pragma unroll 8
        for (int c = 0; c < d4; c++) {
            const float4 u = x[c];
            const float4 v = y[c];
            dot = fmaf(u.x, v.x, dot);
            dot = fmaf(u.y, v.y, dot);
            dot = fmaf(u.z, v.z, dot);
            dot = fmaf(u.w, v.w, dot);
        }
        dots[h * n_key + k] = dot;
    }
    __syncthreads();

    if (threadIdx.x < n_key && b0 + k < n) {
        float score = 0.0f;
        for (int h = 0; h < a.n_head; h++) {
            const float dot = dots[h * n_key + k];
            score += dot > 0.0f ? dot : 0.0f;
        }
        a.scores[blockIdx.y * a.score_stride + b0 + k] = score;
    }
}

// 32 rows and 128 blocks for 4 heads: a thread 2 rows x 4 heads x 8 blocks. grid: (tiles of blocks, tiles of rows)
#define LUCE_TILE_ROWS 32
#define LUCE_TILE_KEYS 128
#define LUCE_TILE_D    16
#define LUCE_TILE_PAD  4

static __global__ __launch_bounds__(LUCE_SCORE_THREADS) void luce_score_tile_kernel(const luce_select_args a) {
    constexpr int n_head = 4;
    constexpr int width  = 128 + LUCE_TILE_PAD;
    __shared__ float qs[LUCE_TILE_D][width]; // [d][row*4 + head]
    __shared__ float ks[LUCE_TILE_D][width]; // [d][block]

    const int r0    = blockIdx.y * LUCE_TILE_ROWS;                 // of the batch
    const int n_row = min(LUCE_TILE_ROWS, a.n_batch - r0);
    const int b0    = blockIdx.x * LUCE_TILE_KEYS;
    const int tx    = threadIdx.x % 16;
    const int ty    = threadIdx.x / 16;

    // the rows of one slot at a time
    for (int begin = 0; begin < n_row;) {
        const int32_t slot = a.rows[a.row0 + r0 + begin].slot;
        int end   = begin;
        int n_max = 0; // blocks that a row of these needs scores of
        while (end < n_row) {
            const luce_row row = a.rows[a.row0 + r0 + end];
            if (row.slot != slot) {
                break;
            }
            const int n = luce_complete_blocks(a, row);
            n_max = n > a.n_top ? max(n_max, n) : n_max;
            end++;
        }
        if (b0 >= n_max) {
            begin = end;
            continue;
        }

        // a thread fetches 4 values of two queries' heads and of two keys a step
        const int fetch_row = threadIdx.x / 4; // and that + 64
        const int fetch_d   = threadIdx.x % 4 * 4;
        const float * q_from[2];
        const float * k_from[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int m = fetch_row + 64 * i;
            const int b = b0 + m;
            q_from[i] = m / n_head < n_row ? a.q + ((int64_t) (a.row0 + r0) * n_head + m) * a.d + fetch_d : nullptr;
            k_from[i] = b < n_max ? luce_block_key(a, slot, b) + fetch_d : nullptr;
        }
        float acc[2][n_head][8] = {};
        for (int d0 = 0; d0 < a.d; d0 += LUCE_TILE_D) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                const float4 u = q_from[i] != nullptr ? *(const float4 *) (q_from[i] + d0) : zero;
                const float4 v = k_from[i] != nullptr ? *(const float4 *) (k_from[i] + d0) : zero;
                const int m = fetch_row + 64 * i;
                qs[fetch_d + 0][m] = u.x;
                qs[fetch_d + 1][m] = u.y;
                qs[fetch_d + 2][m] = u.z;
                qs[fetch_d + 3][m] = u.w;
                ks[fetch_d + 0][m] = v.x;
                ks[fetch_d + 1][m] = v.y;
                ks[fetch_d + 2][m] = v.z;
                ks[fetch_d + 3][m] = v.w;
            }
            __syncthreads();
#pragma unroll
            for (int d = 0; d < LUCE_TILE_D; d++) {
                float u[2][4];
                float v[8];
                *(float4 *) u[0]    = *(const float4 *) &qs[d][4 * ty];
                *(float4 *) u[1]    = *(const float4 *) &qs[d][4 * ty + 64];
                *(float4 *) (v + 0) = *(const float4 *) &ks[d][4 * tx];
                *(float4 *) (v + 4) = *(const float4 *) &ks[d][4 * tx + 64];
#pragma unroll
                for (int r = 0; r < 2; r++) {
#pragma unroll
                    for (int h = 0; h < n_head; h++) {
#pragma unroll
                        for (int k = 0; k < 8; k++) {
                            acc[r][h][k] = fmaf(u[r][h], v[k], acc[r][h][k]);
                        }
                    }
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = ty + 16 * r;
            if (row < begin || row >= end) {
                continue;
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const int b = b0 + 4 * tx + 64 * (k / 4) + k % 4;
                float score = 0.0f;
#pragma unroll
                for (int h = 0; h < n_head; h++) {
                    score += acc[r][h][k] > 0.0f ? acc[r][h][k] : 0.0f;
                }
                if (b < n_max) {
                    a.scores[(r0 + row) * a.score_stride + b] = score;
                }
            }
        }
        begin = end;
    }
}

#define LUCE_SELECT_WARPS (LUCE_SELECT_THREADS / 32)
static_assert(LUCE_SELECT_WARPS == 32, "a lane a warp in the second step of a prefix sum");

static __device__ __forceinline__ int luce_warp_prefix(int x) { // inclusive, in lane order
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int y = __shfl_up_sync(0xffffffff, x, offset, 32);
        x += (int) threadIdx.x % 32 >= offset ? y : 0;
    }
    return x;
}

// what the warps before this one hold in `per_warp`, and in total, what all hold; published by a barrier before the call
static __device__ __forceinline__ int luce_before_warp(const int * per_warp, int & total) {
    const int sum  = luce_warp_prefix(per_warp[threadIdx.x % 32]);
    const int warp = threadIdx.x / 32;
    const int upto = __shfl_sync(0xffffffff, sum, warp > 0 ? warp - 1 : 0, 32);
    total = __shfl_sync(0xffffffff, sum, 31, 32);
    return warp > 0 ? upto : 0;
}

static __device__ __forceinline__ int luce_lanes(bool x) { // bit l: x of lane l
#ifdef GGML_USE_HIP
    return (int) __ballot(x);
#else
    return (int) __ballot_sync(0xffffffff, x);
#endif // GGML_USE_HIP
}

struct luce_select_shared {
    int bins[LUCE_SELECT_BINS];
    int above[LUCE_SELECT_WARPS];
    int equal[LUCE_SELECT_WARPS];
    int found[2];
};

// Finds the bits of the n_top-th largest of the n scores, digit by digit, then writes the chosen indices. A warp has
// 32*each blocks in turn, lane l those at l, l + 32, ...; held: in registers (each <= LUCE_SELECT_HELD), else read in every pass.
template <bool held>
static __device__ __forceinline__ void luce_select_row(
        const uint32_t * __restrict__ bits, const int n, const int n_top, const bool high_first, int32_t * __restrict__ out,
        luce_select_shared & s) {
    const int lane  = threadIdx.x % 32;
    const int warp  = threadIdx.x / 32;
    const int each  = (n + LUCE_SELECT_THREADS - 1) / LUCE_SELECT_THREADS;
    const int first = warp * 32 * each + lane;

    uint32_t own[held ? LUCE_SELECT_HELD : 1];
    if (held) {
#pragma unroll
        for (int i = 0; i < LUCE_SELECT_HELD; i++) {
            own[i] = i < each && first + 32 * i < n ? bits[first + 32 * i] : 0;
        }
    }
    // calls f(index, whether there is such a block, bits), all lanes of a warp together, indices rising
    const auto for_each = [&](auto && f) {
        if (held) {
#pragma unroll
            for (int i = 0; i < LUCE_SELECT_HELD; i++) {
                if (i < each) {
                    f(first + 32 * i, first + 32 * i < n, own[i]);
                }
            }
        } else {
            for (int i = 0; i < each; i++) {
                const int  index = first + 32 * i;
                const bool here  = index < n;
                f(index, here, here ? bits[index] : 0u);
            }
        }
    };

    uint32_t prefix = 0;     // the digits found, in their place
    int      rank   = n_top; // of the score looked for, among those with this prefix, from the largest = 1
#pragma unroll
    for (int pass = 0; pass < 3; pass++) {
        const int      width = pass < 2 ? LUCE_SELECT_BITS : 32 - 2 * LUCE_SELECT_BITS;
        const int      shift = pass == 0 ? 32 - LUCE_SELECT_BITS : pass == 1 ? 32 - 2 * LUCE_SELECT_BITS : 0;
        const uint32_t known = pass == 0 ? 0u : ~0u << (shift + width);
        for (int i = threadIdx.x; i < LUCE_SELECT_BINS; i += LUCE_SELECT_THREADS) {
            s.bins[i] = 0;
        }
        __syncthreads();
        for_each([&](int, bool here, uint32_t x) {
            if (here && (x & known) == prefix) {
                atomicAdd(&s.bins[(x >> shift) & ((1u << width) - 1)], 1);
            }
        });
        __syncthreads();
        // thread t has the bins 2*(last - t) + 1 and 2*(last - t): falling digits in rising threads
        const int bin  = 2 * (LUCE_SELECT_THREADS - 1 - (int) threadIdx.x);
        const int high = s.bins[bin + 1];
        const int low  = s.bins[bin];
        const int upto = luce_warp_prefix(high + low);
        if (lane == 31) {
            s.above[warp] = upto;
        }
        __syncthreads();
        int total;
        const int before = luce_before_warp(s.above, total) + upto - high - low;
        if (before < rank && before + high + low >= rank) {
            const bool in_high = before + high >= rank;
            s.found[0] = in_high ? bin + 1 : bin;
            s.found[1] = in_high ? before : before + high;
        }
        __syncthreads();
        prefix |= (uint32_t) s.found[0] << shift;
        rank   -= s.found[1];
    }

    int above = 0;
    int equal = 0;
    for_each([&](int, bool here, uint32_t x) {
        above += __popc(luce_lanes(here && x > prefix));
        equal += __popc(luce_lanes(here && x == prefix));
    });
    if (lane == 0) {
        s.above[warp] = above;
        s.equal[warp] = equal;
    }
    __syncthreads();
    int n_above;
    int n_equal;
    above = luce_before_warp(s.above, n_above);
    equal = luce_before_warp(s.equal, n_equal);
    // of the equal ones, in index order, those at [from, from + rank)
    const int from    = high_first ? n_equal - rank : 0;
    const int earlier = (int) ((1u << lane) - 1); // lanes
    for_each([&](int index, bool here, uint32_t x) {
        const int lanes_above = luce_lanes(here && x > prefix);
        const int lanes_equal = luce_lanes(here && x == prefix);
        const int at_above    = above + __popc(lanes_above & earlier);
        const int at_equal    = equal + __popc(lanes_equal & earlier) - from;
        if (here && (x > prefix || (x == prefix && at_equal >= 0 && at_equal < rank))) {
            out[at_above + max(0, min(at_equal, rank))] = index;
        }
        above += __popc(lanes_above);
        equal += __popc(lanes_equal);
    });
}

// grid: rows of the batch
static __global__ __launch_bounds__(LUCE_SELECT_THREADS) void luce_select_kernel(const luce_select_args a) {
    static_assert(LUCE_SELECT_BINS == 2 * LUCE_SELECT_THREADS, "two bins a thread");
    __shared__ luce_select_shared shared;

    const int64_t r   = a.row0 + blockIdx.x;
    int32_t     * out = a.dst + r * (1 + a.n_top);
    const int     n   = luce_complete_blocks(a, a.rows[r]);
    if (threadIdx.x == 0) {
        out[0] = min(n, a.n_top);
    }
    out++;
    if (n <= a.n_top) {
        for (int i = threadIdx.x; i < a.n_top; i += LUCE_SELECT_THREADS) {
            out[i] = i < n ? i : -1;
        }
        return;
    }
    const uint32_t * bits = (const uint32_t *) (a.scores + blockIdx.x * a.score_stride);
    if (n <= LUCE_SELECT_HELD * LUCE_SELECT_THREADS) {
        luce_select_row<true>(bits, n, a.n_top, a.high_first, out, shared);
    } else {
        luce_select_row<false>(bits, n, a.n_top, a.high_first, out, shared);
    }
}

void luce_cuda_qsa_select(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * q     = dst->src[0];
    const ggml_tensor * pages = dst->src[3];
    const int64_t n_row = q->ne[2];
    if (n_row == 0) {
        return;
    }
    luce_select_args a;
    a.q          = (const float *) q->data;
    a.pooled     = (const float *) dst->src[1]->data;
    a.pages      = (const int32_t *) pages->data;
    a.rows       = luce_rows(dst->src[4]);
    a.scores     = nullptr;
    a.dst        = (int32_t *) dst->data;
    a.n_page_max = pages->ne[0];
    a.d          = (int) q->ne[0];
    a.n_head     = (int) q->ne[1];
    a.n_row      = (int) n_row;
    a.row0       = 0;
    a.n_batch    = (int) n_row;
    a.ratio       = ggml_get_op_params_i32(dst, 1);
    a.n_top       = ggml_get_op_params_i32(dst, 2);
    a.n_block_max = ggml_get_op_params_i32(dst, 3);
    a.high_first  = ggml_get_op_params_i32(dst, 4) == GGML_LUCE_FAULT_TIE_HIGH;
    a.score_stride = GGML_PAD(a.n_block_max, LUCE_TILE_KEYS);

    if (a.n_block_max <= a.n_top) { // every complete block is chosen
        luce_select_kernel<<<(unsigned) n_row, LUCE_SELECT_THREADS, 0, ctx.stream()>>>(a);
        return;
    }
    const int64_t fitting = LUCE_SCORE_BYTES / (a.score_stride * sizeof(float)) / LUCE_TILE_ROWS * LUCE_TILE_ROWS;
    const int64_t n_batch = std::min<int64_t>({ n_row, std::max<int64_t>(fitting, LUCE_TILE_ROWS), 32768 });
    ggml_cuda_pool_alloc<float> scores(ctx.pool(), n_batch * a.score_stride);
    a.scores = scores.get();

    const bool tiles = n_row >= LUCE_TILE_ROWS && a.n_head == 4 && a.d % LUCE_TILE_D == 0;
    const int  n_key = a.d <= 128 ? 64 : 32;
    const size_t n_shared = ((size_t) n_key * (a.d / 4 | 1) + (size_t) a.n_head * (a.d / 4)) * sizeof(float4) +
        (size_t) a.n_head * n_key * sizeof(float);
    for (a.row0 = 0; a.row0 < n_row; a.row0 += (int) n_batch) {
        a.n_batch = (int) std::min<int64_t>(n_batch, n_row - a.row0);
        if (tiles) {
            const dim3 grid((a.n_block_max + LUCE_TILE_KEYS - 1) / LUCE_TILE_KEYS, (a.n_batch + LUCE_TILE_ROWS - 1) / LUCE_TILE_ROWS);
            luce_score_tile_kernel<<<grid, LUCE_SCORE_THREADS, 0, ctx.stream()>>>(a);
        } else {
            const dim3 grid((a.n_block_max + n_key - 1) / n_key, a.n_batch);
            if (n_key == 64) {
                luce_score_rows_kernel<64><<<grid, LUCE_SCORE_THREADS, n_shared, ctx.stream()>>>(a);
            } else {
                luce_score_rows_kernel<32><<<grid, LUCE_SCORE_THREADS, n_shared, ctx.stream()>>>(a);
            }
        }
        luce_select_kernel<<<a.n_batch, LUCE_SELECT_THREADS, 0, ctx.stream()>>>(a);
    }
}
