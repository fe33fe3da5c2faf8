// pyluce: matrix products of chunk graphs: which kernels, and their inputs.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
//   up to 8 rows of weights      floats, a warp for four columns, x as it is                    luce_mmb_narrow
//   F32 weights                  floats, one rising chain of fmaf an element                    luce_mmb_f32
//   experts, or few columns      weights widened in the tile                                    luce-mmb-tile.cu
//   other dense products         weights widened once to 16-bit rows, then a plain product      luce-mmb-dense.cu
//
// The last two give the same bits; the first two are chosen by the weights alone.
#include "luce-mmb.cuh"

namespace {

constexpr int n_threads     = 256;
constexpr int n_sort        = 512;  // picks that one block sorts
constexpr int n_expert_max  = 1024;
constexpr int n_narrow_max  = 8;
constexpr int n_narrow_cols = 4;    // columns a warp
constexpr int n_col_few     = 256;  // up to so many columns weights are widened in the tile

// how rows of x are found: row r is place r % n_place of token r / n_place
struct x_rows {
    const char * data;
    int64_t nb_place;
    int64_t nb_token;
    int n_place;

    __device__ __forceinline__ const float * row(int r) const {
        return (const float *) (data + r%n_place*nb_place + r/n_place*nb_token);
    }
};

// x to 16-bit rows of Kp values, zeros beyond K; a thread writes four pairs
template <typename T2>
__launch_bounds__(n_threads)
static __global__ void luce_mmb_x16(const x_rows x, uint4 * __restrict__ x16, int n_row, int K, int Kp, bool any) {
    const int64_t i = (int64_t) blockIdx.x*n_threads + threadIdx.x;
    const int n_piece = Kp/8;
    if (i >= (int64_t) n_row*n_piece) {
        return;
    }
    const int r = (int) (i/n_piece);
    const int c = (int) (i%n_piece);
    const float * from = x.row(r);
    uint32_t p[4];
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
        p[j] = luce_pack<T2>(v.x, v.y);
    }
    x16[i] = make_uint4(p[0], p[1], p[2], p[3]);
}

// weights to 16-bit rows of Kp values, zeros beyond K; a thread widens sixteen
template <ggml_type type, typename T2>
__launch_bounds__(n_threads)
static __global__ void luce_mmb_w16(const luce_mmb_weights w, uint4 * __restrict__ to, int Kp) {
    __shared__ uint32_t shared[n_threads/4*LUCE_MMB_STRIDE];
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

// M <= 8: a warp owns four columns; lane l sums k = 4*l .. 4*l+3 of every 128 in rising order, then the lanes add up
template <int M_max>
__launch_bounds__(n_threads)
static __global__ void luce_mmb_narrow(const float * __restrict__ w, int w_stride, const x_rows x, float * __restrict__ dst, int M, int K, int n_col, bool any) {
    const int lane = threadIdx.x%32;
    const int c0   = (blockIdx.x*(n_threads/32) + threadIdx.x/32)*n_narrow_cols;
    if (c0 >= n_col) {
        return;
    }
    const float * xs[n_narrow_cols];
#pragma unroll
    for (int c = 0; c < n_narrow_cols; c++) {
        xs[c] = x.row(min(c0 + c, n_col - 1));
    }
    float acc[M_max][n_narrow_cols] = {};
    for (int k = 4*lane; k < K; k += 128) {
        float4 xv[n_narrow_cols];
#pragma unroll
        for (int c = 0; c < n_narrow_cols; c++) {
            if (any) {
                xv[c].x = xs[c][k];
                xv[c].y = k + 1 < K ? xs[c][k + 1] : 0.0f;
                xv[c].z = k + 2 < K ? xs[c][k + 2] : 0.0f;
                xv[c].w = k + 3 < K ? xs[c][k + 3] : 0.0f;
            } else {
                xv[c] = *(const float4 *) (xs[c] + k);
            }
        }
#pragma unroll
        for (int m = 0; m < M_max; m++) {
            const float * wr = w + (int64_t) min(m, M - 1)*w_stride + k;
            float4 wv;
            if (any) {
                wv.x = wr[0];
                wv.y = k + 1 < K ? wr[1] : 0.0f;
                wv.z = k + 2 < K ? wr[2] : 0.0f;
                wv.w = k + 3 < K ? wr[3] : 0.0f;
            } else {
                wv = *(const float4 *) wr;
            }
#pragma unroll
            for (int c = 0; c < n_narrow_cols; c++) {
                float s = acc[m][c];
                s = fmaf(wv.x, xv[c].x, s);
                s = fmaf(wv.y, xv[c].y, s);
                s = fmaf(wv.z, xv[c].z, s);
                s = fmaf(wv.w, xv[c].w, s);
                acc[m][c] = s;
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M_max; m++) {
#pragma unroll
        for (int c = 0; c < n_narrow_cols; c++) {
            const float s = warp_reduce_sum<32>(acc[m][c]);
            if (lane == 0 && m < M && c0 + c < n_col) {
                dst[(int64_t) (c0 + c)*M + m] = s;
            }
        }
    }
}

// F32 weights: tiles of 64 rows by 64 columns, each thread 4 x 4, one chain of fmaf in rising k an element
__launch_bounds__(n_threads)
static __global__ void luce_mmb_f32(const luce_mmb_weights w, const x_rows x, const luce_mmb_cols cols, float * __restrict__ dst, bool any) {
    constexpr int tile   = LUCE_MMB_F32_TILE;
    constexpr int depth  = 16;
    constexpr int stride = tile + 4;
    __shared__ float w_shared[depth][stride];
    __shared__ float x_shared[depth][stride];

    luce_mmb_part part = { 0, (int) blockIdx.y*tile, 0, 0 };
    if (cols.parts != nullptr) {
        if ((int) blockIdx.y >= *cols.n_parts) {
            return;
        }
        part = cols.parts[blockIdx.y];
    } else {
        part.n = min(tile, cols.n_col - part.first);
    }
    const int m0   = blockIdx.x*tile;
    const int tid  = threadIdx.x;
    const int row  = tid/4;
    const int quad = tid%4*4;
    const int K    = w.K;

    const float * w_row = (const float *) (w.data + part.expert*w.nb_expert + min(m0 + row, w.M - 1)*w.nb_row);
    int from = part.first + min(row, part.n - 1);
    if (cols.picks != nullptr) {
        from = cols.picks[from]/cols.picks_per_row;
    }
    const float * x_row = x.row(from);

    const auto load = [&](const float * p, int k) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!any && k + 4 <= K) {
            v = *(const float4 *) (p + k);
        } else {
            v.x = k + 0 < K ? p[k + 0] : 0.0f;
            v.y = k + 1 < K ? p[k + 1] : 0.0f;
            v.z = k + 2 < K ? p[k + 2] : 0.0f;
            v.w = k + 3 < K ? p[k + 3] : 0.0f;
        }
        return v;
    };

    const int i0 = tid%16*4;
    const int j0 = tid/16*4;
    float acc[4][4] = {};
    float4 wv = load(w_row, quad);
    float4 xv = load(x_row, quad);
    for (int k0 = 0; k0 < K; k0 += depth) {
        __syncthreads();
        w_shared[quad + 0][row] = wv.x;
        w_shared[quad + 1][row] = wv.y;
        w_shared[quad + 2][row] = wv.z;
        w_shared[quad + 3][row] = wv.w;
        x_shared[quad + 0][row] = xv.x;
        x_shared[quad + 1][row] = xv.y;
        x_shared[quad + 2][row] = xv.z;
        x_shared[quad + 3][row] = xv.w;
        __syncthreads();
        if (k0 + depth < K) {
            wv = load(w_row, k0 + depth + quad);
            xv = load(x_row, k0 + depth + quad);
        }
#pragma unroll
        for (int k = 0; k < depth; k++) {
            const float4 a4 = *(const float4 *) &w_shared[k][i0];
            const float4 b4 = *(const float4 *) &x_shared[k][j0];
            const float a[4] = { a4.x, a4.y, a4.z, a4.w };
            const float b[4] = { b4.x, b4.y, b4.z, b4.w };
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j0 + j < part.n) {
            const int at = part.first + j0 + j;
            float * out = dst + (int64_t) (cols.picks != nullptr ? cols.picks[at] : at)*w.M + m0 + i0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (m0 + i0 + i < w.M) {
                    out[i] = acc[i][j];
                }
            }
        }
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
    __shared__ int count[n_expert_max];
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
__launch_bounds__(n_expert_max)
static __global__ void luce_mmb_place(int32_t * __restrict__ counts, int n_block, int n_expert, int tile, luce_mmb_part * __restrict__ parts, int32_t * __restrict__ n_parts) {
    __shared__ int picks_below[n_expert_max];
    __shared__ int parts_below[n_expert_max];
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
    for (int step = 1; step < n_expert_max; step *= 2) {
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
    if (e == n_expert_max - 1) {
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
    __shared__ uint16_t count[n_sort/32][n_expert_max];
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

bool aligned(const void * p, int64_t nb, int n) {
    return (uintptr_t) p % n == 0 && nb % n == 0;
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
void widen(ggml_type type, const luce_mmb_weights & w, void * to, int Kp, cudaStream_t stream) {
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

bool is_half(ggml_type type) {
    return type == GGML_TYPE_F16 || (type != GGML_TYPE_BF16 && std::is_same_v<luce_t2, half2>);
}

void narrow(ggml_backend_cuda_context & ctx, ggml_type type, const luce_mmb_weights & w, const x_rows & x, bool x_any, float * dst, int n_col) {
    cudaStream_t stream = ctx.stream();
    ggml_cuda_pool_alloc<float> wide(ctx.pool());
    const float * data = (const float *) w.data;
    int  stride = (int) (w.nb_row/sizeof(float));
    bool any    = x_any || w.K%4 != 0;
    if (type != GGML_TYPE_F32) {
        stride = luce_mmb_padded(w.K);
        data   = wide.alloc((size_t) w.M*stride);
        widen<true>(type, w, wide.get(), stride, stream);
    } else {
        any = any || w.any;
    }
    const int n_cols_block = n_threads/32*n_narrow_cols;
    const dim3 grid((n_col + n_cols_block - 1)/n_cols_block);
    if (w.M == 1) {
        luce_mmb_narrow<1><<<grid, n_threads, 0, stream>>>(data, stride, x, dst, w.M, w.K, n_col, any);
    } else if (w.M <= 4) {
        luce_mmb_narrow<4><<<grid, n_threads, 0, stream>>>(data, stride, x, dst, w.M, w.K, n_col, any);
    } else {
        luce_mmb_narrow<8><<<grid, n_threads, 0, stream>>>(data, stride, x, dst, w.M, w.K, n_col, any);
    }
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

bool luce_cuda_chunk_mul_mat_supports(int device, const ggml_tensor * op) {
    GGML_UNUSED(device);
    const ggml_tensor * w   = op->src[0];
    const ggml_tensor * x   = op->src[1];
    const bool          ids = op->op == GGML_OP_MUL_MAT_ID;
    if ((w->type != GGML_TYPE_F32 && !luce_mmb_tiles_supports(w->type)) || x->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32) {
        return false;
    }
    if (w->nb[0] != ggml_type_size(w->type) || x->nb[0] != sizeof(float) || !ggml_is_contiguous(op) || w->ne[3] != 1 || x->ne[3] != 1) {
        return false;
    }
    if (ids) {
        return w->ne[2] <= n_expert_max && op->src[2]->type == GGML_TYPE_I32 && op->src[2]->nb[0] == sizeof(int32_t);
    }
    return w->ne[2] == 1 && x->ne[2] == 1;
}

void luce_cuda_chunk_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const ggml_tensor * ids  = dst->op == GGML_OP_MUL_MAT_ID ? dst->src[2] : nullptr;
    cudaStream_t stream = ctx.stream();

    luce_mmb_weights w;
    w.data      = (const char *) src0->data;
    w.nb_row    = (int64_t) src0->nb[1];
    w.nb_expert = (int64_t) src0->nb[2];
    w.M         = (int) src0->ne[1];
    w.K         = (int) src0->ne[0];
    w.any       = ggml_blck_size(src0->type) == 1 &&
        (w.K%16 != 0 || !aligned(w.data, w.nb_row, 16) || !aligned(w.data, w.nb_expert, 16));
    float * out = (float *) dst->data;

    x_rows x;
    x.data     = (const char *) src1->data;
    x.nb_place = (int64_t) src1->nb[1];
    x.nb_token = (int64_t) src1->nb[2];
    x.n_place  = (int) src1->ne[1];
    const int  n_row = (int) (src1->ne[1]*src1->ne[2]);
    const bool x_any = !aligned(x.data, x.nb_place, 16) || !aligned(x.data, x.nb_token, 16);
    if (n_row == 0 || w.M == 0) {
        return;
    }

    luce_mmb_cols cols;
    cols.n_col = n_row;

    ggml_cuda_pool_alloc<int32_t>       counts (ctx.pool());
    ggml_cuda_pool_alloc<int32_t>       picks  (ctx.pool());
    ggml_cuda_pool_alloc<luce_mmb_part> parts  (ctx.pool());
    ggml_cuda_pool_alloc<int32_t>       n_parts(ctx.pool());
    if (ids != nullptr) {
        const int tile     = src0->type == GGML_TYPE_F32 ? LUCE_MMB_F32_TILE : LUCE_MMB_TILE;
        const int n_expert = (int) src0->ne[2];
        const int n_used   = (int) ids->ne[0];
        const int n_pick   = (int) (ids->ne[0]*ids->ne[1]);
        const int n_block  = (n_pick + n_sort - 1)/n_sort;
        cols.n_col         = n_pick;
        cols.n_parts_max   = std::min(n_expert, n_pick) + n_pick/tile;
        cols.picks_per_row = x.n_place == 1 ? n_used : 1;
        GGML_ASSERT(x.n_place == 1 || x.n_place == n_used);
        counts.alloc((size_t) n_block*n_expert);
        picks.alloc(n_pick);
        parts.alloc(cols.n_parts_max);
        n_parts.alloc(1);
        const char * id = (const char *) ids->data;
        const int64_t nb = (int64_t) ids->nb[1];
        luce_mmb_count  <<<n_block, n_sort, 0, stream>>>(id, nb, n_used, n_pick, n_expert, counts.get());
        luce_mmb_place  <<<1, n_expert_max, 0, stream>>>(counts.get(), n_block, n_expert, tile, parts.get(), n_parts.get());
        luce_mmb_scatter<<<n_block, n_sort, 0, stream>>>(id, nb, n_used, n_pick, n_expert, counts.get(), picks.get());
        CUDA_CHECK(cudaGetLastError());
        cols.parts   = parts.get();
        cols.n_parts = n_parts.get();
        cols.picks   = picks.get();
    } else if (w.M <= n_narrow_max) {
        narrow(ctx, src0->type, w, x, x_any, out, n_row);
        return;
    }

    if (src0->type == GGML_TYPE_F32) {
        const dim3 grid((w.M + LUCE_MMB_F32_TILE - 1)/LUCE_MMB_F32_TILE,
            ids != nullptr ? cols.n_parts_max : (n_row + LUCE_MMB_F32_TILE - 1)/LUCE_MMB_F32_TILE);
        luce_mmb_f32<<<grid, n_threads, 0, stream>>>(w, x, cols, out, w.any || x_any);
        CUDA_CHECK(cudaGetLastError());
        return;
    }

    const int  Kp   = luce_mmb_padded(w.K);
    const bool half = is_half(src0->type);
    ggml_cuda_pool_alloc<uint16_t> x16(ctx.pool(), (size_t) n_row*Kp);
    const unsigned n_x = (unsigned) (((int64_t) n_row*(Kp/8) + n_threads - 1)/n_threads);
    if (half) {
        luce_mmb_x16<half2><<<n_x, n_threads, 0, stream>>>(x, (uint4 *) x16.get(), n_row, w.K, Kp, x_any);
    } else {
        luce_mmb_x16<nv_bfloat162><<<n_x, n_threads, 0, stream>>>(x, (uint4 *) x16.get(), n_row, w.K, Kp, x_any);
    }
    CUDA_CHECK(cudaGetLastError());

    if (ids != nullptr || n_row <= n_col_few) {
        luce_mmb_tiles(src0->type, w, x16.get(), cols, out, stream);
        return;
    }
    ggml_cuda_pool_alloc<uint16_t> w16(ctx.pool(), (size_t) w.M*Kp);
    widen<false>(src0->type, w, w16.get(), Kp, stream);
    luce_mmb_dense(half, w16.get(), x16.get(), w.M, Kp, n_row, out, ggml_cuda_info().devices[ctx.device].nsm, stream);
}
