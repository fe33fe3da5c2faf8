// pyluce: what the chunk products need before they multiply: rounded rows, widened weights, picks sorted by expert.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-mmb.cuh"

namespace {

constexpr int n_threads = 256;
constexpr int n_sort    = 512; // picks that one block sorts

// rows of floats to 16-bit rows of Kp values, zeros beyond K; a thread writes four pairs. Two terms: what rounding left, too
template <typename T2, int n_terms>
__launch_bounds__(n_threads)
static __global__ void luce_mmb_round_kernel(const luce_mmb_rows x, uint4 * __restrict__ high, uint4 * __restrict__ low, int n_row, int K, int Kp, bool any) {
    const int64_t i = (int64_t) blockIdx.x*n_threads + threadIdx.x;
    const int n_piece = Kp/8;
    if (i >= (int64_t) n_row*n_piece) {
        return;
    }
    const int r = (int) (i/n_piece);
    const int c = (int) (i%n_piece);
    const float * from = x.row(r);
    uint32_t p[4];
    [[maybe_unused]] uint32_t rest[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
#ifdef GGML_USE_HIP
        const int k = 8*c + 2*j;
#else
        const int k = c/8*LUCE_MMB_K + 16*j + c%8*2; // the inverse of luce_pair_place
#endif
        float2 v;
        if (!any && k + 2 <= K) {
            v = *(const float2 *) (from + k);
        } else {
            v.x = k     < K ? from[k]     : 0.0f;
            v.y = k + 1 < K ? from[k + 1] : 0.0f;
        }
        const T2 rounded = ggml_cuda_cast<T2>(v);
        memcpy(&p[j], &rounded, sizeof(p[j]));
        if constexpr (n_terms == 2) {
            const float2 h = ggml_cuda_cast<float2>(rounded);
            rest[j] = luce_pack<T2>(v.x - h.x, v.y - h.y);
        }
    }
    high[i] = make_uint4(p[0], p[1], p[2], p[3]);
    if constexpr (n_terms == 2) {
        low[i] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
}

// weights to 16-bit rows of Kp values, zeros beyond K; a thread widens sixteen
template <ggml_type type, typename T2>
__launch_bounds__(n_threads)
static __global__ void luce_mmb_w16(const luce_mmb_weights w, uint4 * __restrict__ to, int Kp) {
    __shared__ __align__(16) uint32_t shared[n_threads/4*LUCE_MMB_STRIDE];
    const int     tid    = threadIdx.x;
    const int     n_unit = Kp/16;
    const int64_t n      = (int64_t) w.M*n_unit;
    const int64_t u      = (int64_t) blockIdx.x*n_threads + tid;
    const int     k      = (int) (u%n_unit)*16;
    uint32_t p[8] = { 0 };
    if (u < n && k < w.K) {
        luce_w16<type> raw;
        luce_load16<type>(raw, w.data + u/n_unit*w.nb_row, k, w.K, w.any);
        luce_w16_pack<type, T2>(p, raw, k);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        shared[tid/4*LUCE_MMB_STRIDE + luce_pair_place(tid%4, j)] = p[j];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int     o  = tid + r*n_threads; // pieces of four pairs; two a thread
        const int64_t at = (int64_t) blockIdx.x*(2*n_threads) + o;
        if (at < 2*n) {
            to[at] = *(const uint4 *) &shared[o/8*LUCE_MMB_STRIDE + o%8*4];
        }
    }
}

// weights to rows of Kp floats, in their own order, zeros beyond K
template <ggml_type type>
__launch_bounds__(n_threads)
static __global__ void luce_mmb_w32(const luce_mmb_weights w, float * __restrict__ to, int Kp) {
    const int     n_unit = Kp/16;
    const int64_t u      = (int64_t) blockIdx.x*n_threads + threadIdx.x;
    const int     k      = (int) (u%n_unit)*16;
    if (u >= (int64_t) w.M*n_unit) {
        return;
    }
    float v[16] = { 0.0f };
    if (k < w.K) {
        luce_w16<type> raw;
        luce_load16<type>(raw, w.data + u/n_unit*w.nb_row, k, w.K, w.any);
        raw.get(v, k);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        *(float4 *) (to + 16*u + 4*i) = make_float4(v[4*i], v[4*i + 1], v[4*i + 2], v[4*i + 3]);
    }
}

// Picks sorted by expert, in rising order of the pick within an expert: three kernels, no atomics but on counts.

// ids of pick p: token p / n_used, place p % n_used; -1 for an id that is no expert
static __device__ __forceinline__ int luce_pick_expert(const char * ids, int64_t nb_token, int n_used, int n_expert, int p) {
    const int id = *(const int32_t *) (ids + p/n_used*nb_token + p%n_used*sizeof(int32_t));
    return id >= 0 && id < n_expert ? id : -1;
}

__launch_bounds__(n_sort)
static __global__ void luce_mmb_count(const char * ids, int64_t nb_token, int n_used, int n_pick, int n_expert, int32_t * __restrict__ counts) {
    __shared__ int count[LUCE_MMB_MAX_EXPERTS];
    for (int e = threadIdx.x; e < n_expert; e += n_sort) {
        count[e] = 0;
    }
    __syncthreads();
    const int p = blockIdx.x*n_sort + threadIdx.x;
    if (p < n_pick) {
        const int e = luce_pick_expert(ids, nb_token, n_used, n_expert, p);
        if (e >= 0) {
            atomicAdd(&count[e], 1);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n_expert; e += n_sort) {
        counts[(int64_t) blockIdx.x*n_expert + e] = count[e];
    }
}

// counts [n_expert, n_block] -> places of each block's first pick of an expert; parts of at most `tile` picks
__launch_bounds__(LUCE_MMB_MAX_EXPERTS)
static __global__ void luce_mmb_place(int32_t * __restrict__ counts, int n_block, int n_expert, int tile, luce_mmb_part * __restrict__ parts, int32_t * __restrict__ n_parts) {
    __shared__ int picks_below[LUCE_MMB_MAX_EXPERTS];
    __shared__ int parts_below[LUCE_MMB_MAX_EXPERTS];
    const int e = threadIdx.x;
    int total = 0;
    if (e < n_expert) {
#pragma unroll 16
        for (int b = 0; b < n_block; b++) {
            total += counts[(int64_t) b*n_expert + e];
        }
    }
    const int n_own = (total + tile - 1)/tile;
    picks_below[e] = total;
    parts_below[e] = n_own;
    __syncthreads();
    for (int step = 1; step < LUCE_MMB_MAX_EXPERTS; step *= 2) {
        const int a = e >= step ? picks_below[e - step] : 0;
        const int b = e >= step ? parts_below[e - step] : 0;
        __syncthreads();
        picks_below[e] += a;
        parts_below[e] += b;
        __syncthreads();
    }
    const int first      = picks_below[e] - total;
    const int first_part = parts_below[e] - n_own;
    for (int i = 0; i < n_own; i++) {
        parts[first_part + i] = { e, first + i*tile, min(tile, total - i*tile), 0 };
    }
    if (e == LUCE_MMB_MAX_EXPERTS - 1) {
        *n_parts = parts_below[e];
    }
    if (e < n_expert) {
        int at = first;
#pragma unroll 16
        for (int b = 0; b < n_block; b++) {
            const int n = counts[(int64_t) b*n_expert + e];
            counts[(int64_t) b*n_expert + e] = at;
            at += n;
        }
    }
}

__launch_bounds__(n_sort)
static __global__ void luce_mmb_scatter(const char * ids, int64_t nb_token, int n_used, int n_pick, int n_expert, const int32_t * __restrict__ places, int32_t * __restrict__ picks) {
    __shared__ uint16_t count[n_sort/32][LUCE_MMB_MAX_EXPERTS];
    const int warp = threadIdx.x/32;
    const int lane = threadIdx.x%32;
    for (int e = lane; e < n_expert; e += 32) {
        count[warp][e] = 0;
    }
    __syncthreads();
    const int p = blockIdx.x*n_sort + threadIdx.x;
    const int e = p < n_pick ? luce_pick_expert(ids, nb_token, n_used, n_expert, p) : -1;
    int  rank = 0;
    bool last = true;
#pragma unroll
    for (int l = 0; l < 32; l++) {
        const bool same = __shfl_sync(0xFFFFFFFF, e, l, 32) == e;
        rank += same && l < lane ? 1 : 0;
        last  = last && !(same && l > lane);
    }
    if (e >= 0 && last) {
        count[warp][e] = (uint16_t) (rank + 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_expert; i += n_sort) {
        int below = 0;
#pragma unroll
        for (int w = 0; w < n_sort/32; w++) {
            const int n = count[w][i];
            count[w][i] = (uint16_t) below;
            below += n;
        }
    }
    __syncthreads();
    if (e >= 0) {
        picks[places[(int64_t) blockIdx.x*n_expert + e] + count[warp][e] + rank] = p;
    }
}

// all weights of a matrix as 16-bit rows; T2 float2: as floats
template <ggml_type type, typename T2>
void widen(const luce_mmb_weights & w, void * to, int Kp, cudaStream_t stream) {
    const int64_t  n      = (int64_t) w.M*(Kp/16);
    const unsigned n_grid = (unsigned) ((n + n_threads - 1)/n_threads);
    if constexpr (std::is_same_v<T2, float2>) {
        luce_mmb_w32<type><<<n_grid, n_threads, 0, stream>>>(w, (float *) to, Kp);
    } else {
        luce_mmb_w16<type, T2><<<n_grid, n_threads, 0, stream>>>(w, (uint4 *) to, Kp);
    }
    CUDA_CHECK(cudaGetLastError());
}

template <bool floats>
void widen_any(ggml_type type, const luce_mmb_weights & w, void * to, int Kp, cudaStream_t stream) {
#define LUCE_WIDEN(TYPE, T2) case TYPE: widen<TYPE, std::conditional_t<floats, float2, T2>>(w, to, Kp, stream); break
    switch (type) {
        LUCE_WIDEN(GGML_TYPE_F16,    half2);
        LUCE_WIDEN(GGML_TYPE_BF16,   nv_bfloat162);
        LUCE_WIDEN(GGML_TYPE_Q8_0,   luce_t2);
        LUCE_WIDEN(GGML_TYPE_Q4_0,   luce_t2);
        LUCE_WIDEN(GGML_TYPE_Q4_1,   luce_t2);
        LUCE_WIDEN(GGML_TYPE_Q5_0,   luce_t2);
        LUCE_WIDEN(GGML_TYPE_Q5_1,   luce_t2);
        LUCE_WIDEN(GGML_TYPE_Q4_K,   luce_t2);
        LUCE_WIDEN(GGML_TYPE_Q5_K,   luce_t2);
        LUCE_WIDEN(GGML_TYPE_Q6_K,   luce_t2);
        LUCE_WIDEN(GGML_TYPE_IQ4_NL, luce_t2);
        LUCE_WIDEN(GGML_TYPE_IQ3_S,  luce_t2);
        LUCE_WIDEN(GGML_TYPE_Q2_0,   luce_t2);
        default: GGML_ABORT("chunk product: type %s is not supported", ggml_type_name(type));
    }
#undef LUCE_WIDEN
}

} // namespace

void luce_mmb_round(bool half, const luce_mmb_rows & x, int n_row, int K, bool any, void * high, void * low, cudaStream_t stream) {
    const int     Kp     = luce_mmb_padded(K);
    const int64_t n      = (int64_t) n_row*(Kp/8);
    const unsigned n_grid = (unsigned) ((n + n_threads - 1)/n_threads);
    if (low != nullptr) {
        luce_mmb_round_kernel<nv_bfloat162, 2><<<n_grid, n_threads, 0, stream>>>(x, (uint4 *) high, (uint4 *) low, n_row, K, Kp, any);
    } else if (half) {
        luce_mmb_round_kernel<half2, 1><<<n_grid, n_threads, 0, stream>>>(x, (uint4 *) high, nullptr, n_row, K, Kp, any);
    } else {
        luce_mmb_round_kernel<nv_bfloat162, 1><<<n_grid, n_threads, 0, stream>>>(x, (uint4 *) high, nullptr, n_row, K, Kp, any);
    }
    CUDA_CHECK(cudaGetLastError());
}

void luce_mmb_widen(ggml_type type, const luce_mmb_weights & w, bool floats, void * to, cudaStream_t stream) {
    if (floats) {
        widen_any<true>(type, w, to, luce_mmb_padded(w.K), stream);
    } else {
        widen_any<false>(type, w, to, luce_mmb_padded(w.K), stream);
    }
}

size_t luce_mmb_sort_bytes(int n_pick, int n_expert, int tile) {
    const size_t n_block = (n_pick + n_sort - 1)/n_sort;
    return luce_mmb_parts_max(n_pick, n_expert, tile)*sizeof(luce_mmb_part) + (n_block*n_expert + n_pick + 1)*sizeof(int32_t);
}

void luce_mmb_sort(const void * ids, int64_t nb_token, int n_used, int n_pick, int n_expert, int tile, void * memory, luce_mmb_cols & cols, cudaStream_t stream) {
    const int n_block = (n_pick + n_sort - 1)/n_sort;
    cols.n_parts_max = luce_mmb_parts_max(n_pick, n_expert, tile);
    luce_mmb_part * parts = (luce_mmb_part *) memory;
    int32_t * counts  = (int32_t *) (parts + cols.n_parts_max);
    int32_t * picks   = counts + (size_t) n_block*n_expert;
    int32_t * n_parts = picks + n_pick;
    luce_mmb_count  <<<n_block, n_sort, 0, stream>>>((const char *) ids, nb_token, n_used, n_pick, n_expert, counts);
    luce_mmb_place  <<<1, LUCE_MMB_MAX_EXPERTS, 0, stream>>>(counts, n_block, n_expert, tile, parts, n_parts);
    luce_mmb_scatter<<<n_block, n_sort, 0, stream>>>((const char *) ids, nb_token, n_used, n_pick, n_expert, counts, picks);
    CUDA_CHECK(cudaGetLastError());
    cols.n_col   = n_pick;
    cols.tile    = tile;
    cols.parts   = parts;
    cols.n_parts = n_parts;
    cols.picks   = picks;
}
