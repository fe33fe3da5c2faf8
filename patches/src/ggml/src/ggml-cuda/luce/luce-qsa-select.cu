// pyluce: the blocks a row attends to: the n_top best by a radix select of their scores.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-launch.cuh"
#include "luce-qsa-select.cuh"

#include "ggml-luce-path.h"

#define LUCE_SELECT_THREADS 1024
#define LUCE_SELECT_BITS    11
#define LUCE_SELECT_BINS    (1 << LUCE_SELECT_BITS)
#define LUCE_SELECT_HELD    16           // scores a thread keeps in registers
#define LUCE_SCORE_BYTES    (64u << 20)  // of scores at a time
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
        const uint32_t * bits, const int n, const int n_top, const bool high_first, int32_t * __restrict__ out,
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
    const int      from    = high_first ? n_equal - rank : 0;
    const uint32_t earlier = (1u << lane) - 1; // lanes
    for_each([&](int index, bool here, uint32_t x) {
        const uint32_t lanes_above = luce_lanes(here && x > prefix);
        const uint32_t lanes_equal = luce_lanes(here && x == prefix);
        const int      at_above    = above + __popc(lanes_above & earlier);
        const int      at_equal    = equal + __popc(lanes_equal & earlier) - from;
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
    ggml_cuda_pdl_lc();

    const int64_t r   = a.row0 + blockIdx.x;
    int32_t     * out = a.dst + r * (1 + a.n_top);
    const int     n   = luce_complete_blocks(a, a.rows[r]);
    ggml_cuda_pdl_sync();
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
    a.score_stride = GGML_PAD(a.n_block_max, 32);

    LUCE_SET_SHARED_CARVEOUT(luce_select_kernel);
    const auto launch = [&](int64_t n) {
        return ggml_cuda_kernel_launch_params(dim3((unsigned) n), dim3(LUCE_SELECT_THREADS), (size_t) 0, ctx.stream());
    };
    if (a.n_block_max <= a.n_top) { // every complete block is chosen
        ggml_luce_path("all blocks");
        ggml_cuda_kernel_launch(luce_select_kernel, launch(n_row), a);
        return;
    }
    const int64_t fitting = LUCE_SCORE_BYTES / (a.score_stride * sizeof(float)) / 32 * 32;
    const int64_t n_batch = std::min<int64_t>({ n_row, std::max<int64_t>(fitting, 32), 32768 });
    ggml_cuda_pool_alloc<float> scores(ctx.pool(), n_batch * a.score_stride);
    a.scores = scores.get();

    for (a.row0 = 0; a.row0 < n_row; a.row0 += (int) n_batch) {
        a.n_batch = (int) std::min<int64_t>(n_batch, n_row - a.row0);
        luce_score_blocks(a, ctx.stream());
        ggml_cuda_kernel_launch(luce_select_kernel, launch(a.n_batch), a);
    }
}
