// pyluce: the router's choice and the sum of the experts it chose.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-launch.cuh"
#include "luce-stream-ops.cuh"

namespace {

constexpr int THREADS  = 256;
constexpr int MAX_USED = 64;

// A logit as a number that rises with it; NaN as the least, above nothing.
__device__ __forceinline__ uint32_t route_key(float x) {
    const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 1;
    }
    return (bits & 0x80000000u ? ~bits : bits | 0x80000000u) + 1; // -inf is 0x00800000, so nothing wraps
}

__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    return __reduce_max_sync(0xffffffff, x);
#else
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x = max(x, (uint32_t) __shfl_xor_sync(0xffffffff, x, offset, 32));
    }
    return x;
#endif
}

// The n_used best logits of a row, the lower expert first of equal ones. Each warp takes n_used times the best of its own that is not taken (key 0), then
// the first warp the best of what they found. A lane has experts first + lane, first + lane + 32, ... in registers, so that of equal keys the lowest expert
// is the lowest of what the lanes offer.
template <int per_lane>
__device__ __forceinline__ void route_best(uint32_t (&keys)[per_lane], const int (&experts)[per_lane], int n_used, int lane, uint32_t * best_keys, int * best_experts) {
    for (int j = 0; j < n_used; j++) {
        uint32_t best = 0;
        int      at   = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < per_lane; i++) {
            if (keys[i] > best) {
                best = keys[i];
                at   = experts[i];
            }
        }
        const uint32_t top   = warp_max(best);
        const uint32_t first = ~warp_max(best == top ? ~(uint32_t) at : 0);
#pragma unroll
        for (int i = 0; i < per_lane; i++) {
            if ((uint32_t) experts[i] == first) {
                keys[i] = 0;
            }
        }
        if (lane == 0) {
            if (best_keys) {
                best_keys[j] = top;
            }
            best_experts[j] = (int) first;
        }
    }
}

constexpr int ROUTE_WARPS = 4;

template <int per_lane, int n_candidate> // of a lane: of a warp's experts, of what the warps found
__global__ void __launch_bounds__(32 * ROUTE_WARPS) route_kernel(const float * logits, int64_t stride, int32_t * ids, int n_expert, int n_used) {
    __shared__ uint32_t found_keys[ROUTE_WARPS][MAX_USED];
    __shared__ int      found[ROUTE_WARPS][MAX_USED];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const float * x = logits + (int64_t) blockIdx.x * stride;
    {
        uint32_t keys[per_lane];
        int      experts[per_lane];
#pragma unroll
        for (int i = 0; i < per_lane; i++) {
            experts[i] = (warp * per_lane + i) * 32 + lane;
            keys[i]    = experts[i] < n_expert ? route_key(x[experts[i]]) : 0;
        }
        route_best<per_lane>(keys, experts, n_used, lane, found_keys[warp], found[warp]);
    }
    __syncthreads();
    if (warp > 0) {
        return;
    }
    uint32_t keys[n_candidate];
    int      experts[n_candidate];
#pragma unroll
    for (int i = 0; i < n_candidate; i++) {
        // in the order of experts: a warp's are all below the next one's; equal keys of a warp lie in rising order already
        const int c = lane + 32 * i;
        const bool there = c < ROUTE_WARPS * n_used;
        keys[i]    = there ? found_keys[c / n_used][c % n_used] : 0;
        experts[i] = there ? found[c / n_used][c % n_used] : 0x7fffffff;
    }
    route_best<n_candidate>(keys, experts, n_used, lane, nullptr, ids + (int64_t) blockIdx.x * n_used);
}

// the weights of a row's picks: softmax over all experts at the picked ids, divided by their sum (at least 2^-14)
template <int n_threads>
__device__ __forceinline__ void pick_weights(const float * x, const int32_t * ids, int n_expert, int n_used, float * weights, float * shared) {
    float top = -INFINITY;
    for (int e = threadIdx.x; e < n_expert; e += n_threads) {
        top = fmaxf(top, x[e]);
    }
    top = warp_reduce_max<32>(top);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = top;
    }
    __syncthreads();
    for (int w = 0; w < n_threads / 32; w++) {
        top = fmaxf(top, shared[w]);
    }
    __syncthreads();
    // summed in the order of 256 threads whatever n_threads is: both callers get the same bits
    float part = 0.0f;
    for (int e = threadIdx.x; e < n_expert && threadIdx.x < THREADS; e += THREADS) {
        part += expf(x[e] - top);
    }
    const float all = luce_block_sum<n_threads>(part, shared);
    if ((int) threadIdx.x < n_used) {
        weights[threadIdx.x] = expf(x[ids[threadIdx.x]] - top) / all;
    }
    __syncthreads();
    float chosen = 0.0f;
    for (int j = 0; j < n_used; j++) {
        chosen += weights[j];
    }
    chosen = fmaxf(chosen, 0x1p-14f);
    __syncthreads();
    if ((int) threadIdx.x < n_used) {
        weights[threadIdx.x] /= chosen;
    }
    __syncthreads();
}

// Candidates as one number that is larger for a better one: the value's order-preserving bits, then the index, reversed. A
// NaN beats everything or loses to everything.
__device__ __forceinline__ unsigned long long candidate(float x, int i, bool nan_wins) {
    const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        order = nan_wins ? 0xffffffffu : 0;
    }
    return (unsigned long long) order << 32 | (0xffffffffu - (uint32_t) i);
}

__device__ __forceinline__ unsigned long long block_max(unsigned long long best, unsigned long long * shared) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const unsigned long long other = __shfl_xor_sync(0xffffffff, best, offset, 32);
        best = other > best ? other : best;
    }
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = best;
    }
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) {
        best = shared[w] > best ? shared[w] : best;
    }
    return best;
}

__global__ void __launch_bounds__(THREADS) argmax_parts_kernel(
        const float * x, int64_t stride, int n, bool nan_wins, unsigned long long * parts) {
    constexpr int ahead = 8;
    __shared__ unsigned long long shared[THREADS / 32];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    x += (int64_t) blockIdx.y * stride;
    const int step = gridDim.x * THREADS;
    unsigned long long best = 0;
    for (int first = blockIdx.x * THREADS + threadIdx.x; first < n; first += ahead * step) {
        float v[ahead];
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            v[i] = x[min(first + i * step, n - 1)];
        }
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            const unsigned long long c = candidate(v[i], min(first + i * step, n - 1), nan_wins);
            best = c > best ? c : best;
        }
    }
    best = block_max(best, shared);
    if (threadIdx.x == 0) {
        parts[blockIdx.y * gridDim.x + blockIdx.x] = best;
    }
}

// refuses: no place for a row with a NaN that won or whose largest value is infinite
__global__ void __launch_bounds__(THREADS) argmax_kernel(const unsigned long long * parts, int n_part, bool refuses, int32_t * ids) {
    __shared__ unsigned long long shared[THREADS / 32];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    unsigned long long best = 0;
    for (int i = threadIdx.x; i < n_part; i += THREADS) {
        best = parts[blockIdx.x * n_part + i] > best ? parts[blockIdx.x * n_part + i] : best;
    }
    best = block_max(best, shared);
    if (threadIdx.x == 0) {
        constexpr uint32_t plus_infinity  = 0xff800000u; // as `candidate` orders them, NaN above and nothing below
        constexpr uint32_t minus_infinity = 0x007fffffu;
        const uint32_t order = (uint32_t) (best >> 32);
        ids[blockIdx.x] = refuses && (order >= plus_infinity || order <= minus_infinity) ? -1 : (int32_t) (0xffffffffu - (uint32_t) best);
    }
}

struct moe_args {
    const float *   picks;
    int64_t         pick_stride, pick_row; // floats
    const float *   logits;
    int64_t         logits_row;
    const int32_t * ids;
    const float *   shared;                // NULL, as gate is: the picks' sum alone
    int64_t         shared_row;
    const float *   gate;
    int64_t         gate_row;
    int             n, n_expert, n_used;
};

moe_args args_of(const ggml_tensor * dst) {
    const ggml_tensor * picks = dst->src[0];
    moe_args a;
    a.picks       = (const float *) picks->data;
    a.pick_stride = (int64_t) (picks->nb[1] / sizeof(float));
    a.pick_row    = (int64_t) (picks->nb[2] / sizeof(float));
    a.logits      = (const float *) dst->src[1]->data;
    a.logits_row  = luce_stride(dst->src[1]);
    a.ids         = (const int32_t *) dst->src[2]->data;
    a.shared      = dst->src[3] ? (const float *) dst->src[3]->data : nullptr;
    a.shared_row  = dst->src[3] ? luce_stride(dst->src[3]) : 0;
    a.gate        = dst->src[4] ? (const float *) dst->src[4]->data : nullptr;
    a.gate_row    = dst->src[4] ? luce_stride(dst->src[4]) : 0;
    a.n           = (int) dst->ne[0];
    a.n_expert    = (int) dst->src[1]->ne[0];
    a.n_used      = (int) picks->ne[1];
    return a;
}

// values i0 .. i0 + 3 of a row's mixture: picks in order, then the shared expert; `ahead` picks are read at once
template <int ahead = 10>
__device__ __forceinline__ float4 mixture(const moe_args & a, int64_t row, int i0, bool whole, const float * weights, float shared_weight) {
    const float * picks = a.picks + row * a.pick_row;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll ahead
    for (int j = 0; j < a.n_used; j++) {
        sum = luce_fma4(luce_load4(picks + j * a.pick_stride, i0, a.n, whole), weights[j], sum);
    }
    return a.shared ? luce_fma4(luce_load4(a.shared + row * a.shared_row, i0, a.n, whole), shared_weight, sum) : sum;
}

__device__ __forceinline__ bool is_whole(const moe_args & a) {
    return a.n % 4 == 0 && a.pick_row % 4 == 0 && a.pick_stride % 4 == 0 && a.shared_row % 4 == 0 && luce_aligned(a.picks) && luce_aligned(a.shared);
}

__global__ void __launch_bounds__(THREADS) moe_combine_kernel(const moe_args a, float * y) {
    __shared__ float weights[MAX_USED];
    __shared__ float shared[THREADS / 32];
    const int64_t row = blockIdx.x;
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    pick_weights<THREADS>(a.logits + row * a.logits_row, a.ids + row * a.n_used, a.n_expert, a.n_used, weights, shared);
    const float w = a.gate ? luce_sigmoid(a.gate[row * a.gate_row]) : 0.0f;
    const bool whole = is_whole(a) && luce_aligned(y);
    for (int i0 = 4 * (blockIdx.y * THREADS + threadIdx.x); i0 < a.n; i0 += 4 * gridDim.y * THREADS) {
        luce_store4(y + row * a.n, i0, a.n, whole, mixture(a, row, i0, whole, weights, w));
    }
}

// The mixture and the hyper-connection that takes it, the same arithmetic as one after the other. A thread block has n_stream
// streams of a row: one where rows are few, all where reading the picks once counts. With `per` parts a thread it is small enough to start beside the
// kernel in front. `early`: all but the experts' and the shared one's results are there before that has finished.
template <int n_stream, int per>
__global__ void __launch_bounds__(LUCE_STREAM_PARTS / per, per) moe_hc_combine_kernel(
        const moe_args a, const float * residual, int64_t residual_row, const float * inject, int64_t inject_row, const float * gain,
        float * y, float * normed, float eps, bool early, luce_stream_x8 x8) {
    constexpr int threads = LUCE_STREAM_PARTS / per;
    __shared__ float weights[MAX_USED];
    __shared__ float shared[threads / 32];
    const int64_t row   = blockIdx.x;
    const int     h     = a.n;
    const int     all   = (int) gridDim.y * n_stream;
    const int     first = (int) blockIdx.y * n_stream;
    ggml_cuda_pdl_lc();
    float4 own[per];
    if (n_stream == 1) {
        luce_stream_gain<per>(gain + first * h, h, own);
    }
    if (n_stream > 1 || !early) {
        ggml_cuda_pdl_sync();
    }
    pick_weights<threads>(a.logits + row * a.logits_row, a.ids + row * a.n_used, a.n_expert, a.n_used, weights, shared);
    const float shared_weight = luce_sigmoid(a.gate[row * a.gate_row]);
    const float w_first       = 2.0f * luce_sigmoid(inject[row * inject_row + first] / (float) all);
    residual += row * residual_row;
    y        += row * all * h;
    normed   += row * all * h;
    const bool   whole = is_whole(a) && luce_aligned(residual) && luce_aligned(y) && luce_aligned(normed) && luce_aligned(gain);
    const float4 zero  = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 x_first[per];
#pragma unroll
    for (int v = 0; v < per; v++) {
        const int i0 = 4 * ((int) threadIdx.x + v * threads);
        x_first[v] = n_stream == 1 && i0 < h ? luce_load4(residual + first * h, i0, h, whole) : zero;
    }
    if (n_stream == 1 && early) {
        ggml_cuda_pdl_sync();
    }
    // the mixture of a thread's first values, read once for all its streams
    float4 kept[per];
#pragma unroll
    for (int v = 0; v < per; v++) {
        const int i0 = 4 * ((int) threadIdx.x + v * threads);
        kept[v] = i0 < h ? mixture<per == 1 ? 10 : 5>(a, row, i0, whole, weights, shared_weight) : zero;
    }
    for (int s = 0; s < n_stream; s++) {
        const int     stream = first + s;
        const float   w      = n_stream == 1 ? w_first : 2.0f * luce_sigmoid(inject[row * inject_row + stream] / (float) all);
        const float * x      = residual + stream * h;
        if (n_stream > 1) {
            luce_stream_gain<per>(gain + stream * h, h, own);
        }
        luce_stream_norm<per>(h, whole,
            [&](int v, int i0, bool w4) {
                const bool   held  = i0 < 4 * LUCE_STREAM_PARTS;
                const float4 mixed = held ? kept[v] : mixture<1>(a, row, i0, w4, weights, shared_weight);
                return luce_fma4(mixed, w, held && n_stream == 1 ? x_first[v] : luce_load4(x, i0, h, w4));
            },
            y + stream * h, normed + stream * h, gain + stream * h, own, eps, x8.memory ? x8.memory + row * x8.pitch : nullptr, stream * h, all * h);
    }
}

} // namespace

namespace {

void best_of_each_row(ggml_backend_cuda_context & ctx, ggml_tensor * dst, bool nan_wins) {
    const ggml_tensor * logits = dst->src[0];
    const int n      = (int) logits->ne[0];
    const int n_row  = (int) logits->ne[1];
    const int n_part = std::min((n + THREADS - 1) / THREADS, ggml_cuda_info().devices[ctx.device].nsm);
    ggml_cuda_pool_alloc<unsigned long long> parts(ctx.pool(), (size_t) n_part * n_row);
    ggml_cuda_kernel_launch(argmax_parts_kernel, ggml_cuda_kernel_launch_params(dim3(n_part, n_row), dim3(THREADS), (size_t) 0, ctx.stream()),
        (const float *) logits->data, luce_stride(logits), n, nan_wins, parts.get());
    ggml_cuda_kernel_launch(argmax_kernel, ggml_cuda_kernel_launch_params(dim3(n_row), dim3(THREADS), (size_t) 0, ctx.stream()),
        (const unsigned long long *) parts.get(), n_part, nan_wins, (int32_t *) dst->data);
}

} // namespace

bool luce_cuda_route_supports(const ggml_tensor * op) {
    return op->ne[0] == 1 || (op->src[0]->ne[0] <= 1024 && op->ne[0] <= MAX_USED);
}

void luce_cuda_route(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * logits = dst->src[0];
    if (dst->ne[0] == 1) {
        best_of_each_row(ctx, dst, false);
        return;
    }
    const ggml_cuda_kernel_launch_params params(dim3((unsigned) dst->ne[1]), dim3(32 * ROUTE_WARPS), (size_t) 0, ctx.stream());
    const auto launch = [&](auto kernel) {
        ggml_cuda_kernel_launch(kernel, params, (const float *) logits->data, luce_stride(logits), (int32_t *) dst->data, (int) logits->ne[0], (int) dst->ne[0]);
    };
    if (logits->ne[0] <= 512 && dst->ne[0] <= 16) {
        LUCE_SET_SHARED_CARVEOUT((route_kernel<4, 2>));
        launch(route_kernel<4, 2>);
    } else {
        LUCE_SET_SHARED_CARVEOUT((route_kernel<8, 8>));
        launch(route_kernel<8, 8>);
    }
}

void luce_cuda_moe_combine(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const moe_args a = args_of(dst);
    const unsigned n_part = std::min<unsigned>((a.n + 4 * THREADS - 1) / (4 * THREADS), dst->ne[1] < 64 ? 16 : 1);
    const ggml_cuda_kernel_launch_params params(dim3((unsigned) dst->ne[1], n_part), dim3(THREADS), (size_t) 0, ctx.stream());
    ggml_cuda_kernel_launch(moe_combine_kernel, params, a, (float *) dst->data);
}

void luce_cuda_moe_hc_combine(ggml_backend_cuda_context & ctx, const ggml_tensor * moe, ggml_tensor * dst, bool early, const luce_stream_x8 & x8) {
    const moe_args a = args_of(moe);
    const ggml_tensor * residual = dst->src[0];
    const ggml_tensor * inject   = dst->src[2];
    float * y = (float *) dst->data;
    const int64_t n_row    = residual->ne[1];
    const int64_t n_stream = inject->ne[0];
    const auto launch = [&](auto kernel, const ggml_cuda_kernel_launch_params & params) {
        ggml_cuda_kernel_launch(kernel, params, a, (const float *) residual->data, luce_stride(residual), (const float *) inject->data, luce_stride(inject),
            (const float *) dst->src[3]->data, y, y + residual->ne[0] * residual->ne[1], ggml_get_op_params_f32(dst, 2), early, x8);
    };
    if (n_stream == 4 && n_row >= 64) {
        launch(moe_hc_combine_kernel<4, 1>, luce_stream_launch<1>(ctx, n_row, 1));
        return;
    }
    LUCE_SET_SHARED_CARVEOUT((moe_hc_combine_kernel<1, 2>));
    launch(moe_hc_combine_kernel<1, 2>, luce_stream_launch<2>(ctx, n_row, n_stream));
}

void luce_cuda_argmax(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    best_of_each_row(ctx, dst, true);
}
