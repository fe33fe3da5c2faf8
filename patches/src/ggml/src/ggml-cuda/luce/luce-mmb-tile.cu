// pyluce: chunk products whose weights are widened to 16 bits inside the tile: experts, and few columns.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A tile is 128 rows of weights by up to 128 columns, and steps over those 16 columns that hold none: a tile of 20 costs 32.
// CUDA: four warps of 32 rows; a lane widens the weights of its own operands in registers, only x passes through shared
// memory; tiles of up to 32 columns keep two steps of weights under way. HIP: eight warps, 32 rows and every other 16 columns each; both operands pass through shared memory.
#include "luce-mmb.cuh"

namespace {

constexpr int tile    = LUCE_MMB_TILE;
constexpr int stride  = LUCE_MMB_STRIDE;
#ifdef GGML_USE_HIP
constexpr int n_warps = 8;
#else
constexpr int n_warps  = 4;
constexpr int n_stages = 3;
#endif
constexpr int n_threads = 32*n_warps;

// the part of this block; n = 0: none
static __device__ __forceinline__ luce_mmb_part luce_own_part(const luce_mmb_cols & cols) {
    if (cols.parts == nullptr) {
        const int first = blockIdx.y*cols.tile;
        return { 0, first, min(cols.tile, cols.n_col - first), 0 };
    }
    if ((int) blockIdx.y < *cols.n_parts) {
        return cols.parts[blockIdx.y];
    }
    return { 0, 0, 0, 0 };
}

#ifdef GGML_USE_HIP

template <ggml_type type, typename T2, int n_columns>
__launch_bounds__(n_threads, 1)
static __global__ void luce_mmb_tile_kernel(const luce_mmb_weights w, const uint4 * __restrict__ x16, const luce_mmb_cols cols, float * __restrict__ dst) {
    typedef luce_frag<T2> frag;
    constexpr int n_w = tile*(LUCE_MMB_K/16)/n_threads; // sixteen weights each
    constexpr int n_x = tile*(LUCE_MMB_K/8)/n_threads;  // 16 bytes each
    extern __shared__ uint4 shared16[];
    __shared__ int rows[tile];

    const luce_mmb_part part = luce_own_part(cols);
    const int n = part.n;
    if (n == 0) {
        return;
    }
    const int m0   = blockIdx.x*tile;
    const int warp = threadIdx.y;
    const int tid  = warp*32 + threadIdx.x;
    const int K    = w.K;
    const int n_k  = (K + LUCE_MMB_K - 1)/LUCE_MMB_K;

    T2 * w_shared = (T2 *) shared16;
    T2 * x_shared = w_shared + tile*stride;

    const char * w_tile = w.data + part.expert*w.nb_expert + m0*w.nb_row;
    uint32_t w_row[n_w];
    uint32_t x_row[n_x];
#pragma unroll
    for (int i = 0; i < n_w; i++) {
        w_row[i] = (uint32_t) ((min(m0 + tid/4 + n_threads/4*i, w.M - 1) - m0)*w.nb_row);
    }
#pragma unroll
    for (int i = 0; i < n_x; i++) {
        int from = part.first + min(tid/8 + n_threads/8*i, n - 1);
        if (cols.picks != nullptr) {
            from = cols.picks[from]/cols.picks_per_row;
        }
        x_row[i] = (uint32_t) from*(uint32_t) (n_k*(LUCE_MMB_K/8)) + tid%8;
    }
    if (tid < tile) {
        const int at = part.first + min(tid, n - 1);
        rows[tid] = cols.picks != nullptr ? cols.picks[at] : at;
    }

    luce_w16<type> raw[n_w];
    luce_piece x_raw[n_x];
    const auto load = [&](int ik) {
        const int k = ik*LUCE_MMB_K + tid%4*16;
        if (k < K) {
#pragma unroll
            for (int i = 0; i < n_w; i++) {
                luce_load16<type>(raw[i], w_tile + w_row[i], k, K, w.any);
            }
        }
#pragma unroll
        for (int i = 0; i < n_x; i++) {
            x_raw[i] = ((const luce_piece *) x16)[x_row[i] + ik*(LUCE_MMB_K/8)];
        }
    };

    const int i0 = warp%4*32;
    frag acc[2][4];
    load(0);
    for (int ik = 0; ik < n_k; ik++) {
        const int k0 = ik*LUCE_MMB_K + tid%4*16;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < n_w; i++) {
            uint32_t p[8] = { 0 };
            if (k0 < K) {
                luce_w16_pack<type, T2>(p, raw[i], k0);
            }
            uint4 * to = (uint4 *) (w_shared + (tid/4 + n_threads/4*i)*stride + tid%4*8);
            to[0] = make_uint4(p[0], p[1], p[2], p[3]);
            to[1] = make_uint4(p[4], p[5], p[6], p[7]);
        }
#pragma unroll
        for (int i = 0; i < n_x; i++) {
            *(luce_piece *) (x_shared + (tid/8 + n_threads/8*i)*stride + tid%8*4) = x_raw[i];
        }
        __syncthreads();
        if (ik + 1 < n_k) {
            load(ik + 1);
        }
#pragma unroll
        for (int k = 0; k < LUCE_MMB_K/2; k += 8) {
            typename frag::operand a[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ggml_cuda_mma::load_ldmatrix(a[i], w_shared + (i0 + 16*i)*stride + k, stride);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int j0 = 16*(2*j + warp/4);
                if (j0 < n) { // the same for the whole warp
                    typename frag::operand b;
                    ggml_cuda_mma::load_ldmatrix(b, x_shared + j0*stride + k, stride);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        acc[i][j].add(a[i], b);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int j0 = 16*(2*j + warp/4);
        if (j0 < n) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int l = 0; l < frag::n; l++) {
                    const int m = m0 + i0 + 16*i + frag::i(l);
                    const int c = j0 + frag::j(l);
                    if (m < w.M && c < n) {
                        dst[(int64_t) rows[c]*w.M + m] = acc[i][j].value(l);
                    }
                }
            }
        }
    }
}

#else

template <ggml_type type, typename T2, int n_columns>
__launch_bounds__(n_threads, n_columns == tile ? 2 : 3)
static __global__ void luce_mmb_tile_kernel(const luce_mmb_weights w, const uint4 * __restrict__ x16, const luce_mmb_cols cols, float * __restrict__ dst) {
    typedef luce_frag<T2> frag;
    constexpr int n_j   = n_columns/16;
    constexpr int n_x   = n_columns*(LUCE_MMB_K/8)/n_threads; // 16-byte pieces of x a thread
    // steps of weights under way, as registers allow
    constexpr int n_raw = n_columns < tile && sizeof(luce_w16<type>) <= 32 && luce_block_size<type> > 1 ? 2 : 1;
    extern __shared__ uint4 shared16[];
    __shared__ int rows[n_columns];      // of dst
    __shared__ uint32_t from[n_columns]; // of x, in pieces

    const luce_mmb_part part = luce_own_part(cols);
    const int n = part.n;
    if (n == 0) {
        return;
    }
    const int m0   = blockIdx.x*tile;
    const int lane = threadIdx.x;
    const int warp = threadIdx.y;
    const int tid  = warp*32 + lane;
    const int K    = w.K;
    const int n_k  = (K + LUCE_MMB_K - 1)/LUCE_MMB_K;
    T2 * x_shared  = (T2 *) shared16;

    if (tid < n_columns) {
        const int at = part.first + min(tid, n - 1);
        const int p  = cols.picks != nullptr ? cols.picks[at] : at;
        rows[tid] = p;
        from[tid] = (uint32_t) (p/cols.picks_per_row)*(uint32_t) (n_k*(LUCE_MMB_K/8));
    }
    __syncthreads();

    // lane l holds rows l/4 + 8*i of its warp's 32, weights 16*(l%4) .. +15 of 64
    const char * w_tile = w.data + part.expert*w.nb_expert + m0*w.nb_row;
    uint32_t w_row[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w_row[i] = (uint32_t) ((min(m0 + warp*32 + lane/4 + 8*i, w.M - 1) - m0)*w.nb_row);
    }
    luce_w16<type> raw[n_raw][4];
    const auto load_w = [&](int ik, luce_w16<type> (&to)[4]) {
        const int k = ik*LUCE_MMB_K + lane%4*16;
        if (k < K) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                luce_load16<type>(to[i], w_tile + w_row[i], k, K, w.any);
            }
        }
    };
    const auto load_x = [&](int ik) {
        if (ik < n_k) {
            T2 * to = x_shared + ik%n_stages*n_columns*stride;
#pragma unroll
            for (int i = 0; i < n_x; i++) {
                const int row = tid/8 + n_threads/8*i;
                if (n_threads/8*i < n) { // 16 rows at a time
                    luce_copy16(to + row*stride + tid%8*4, x16 + from[row] + ik*(LUCE_MMB_K/8) + tid%8);
                }
            }
        }
        luce_copy_commit(); // an empty group at the end keeps the count
    };
    static_assert(n_threads/8 == 16, "the rows that a step of load_x covers");

    frag acc[2][n_j];
#pragma unroll
    for (int s = 0; s < n_stages - 1; s++) {
        load_x(s);
    }
#pragma unroll
    for (int r = 0; r < n_raw; r++) {
        load_w(r, raw[r]);
    }
    const auto step = [&](int ik, luce_w16<type> (&own)[4]) {
        const int k0 = ik*LUCE_MMB_K + lane%4*16;
        uint32_t p[4][8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (k0 < K) {
                luce_w16_pack<type, T2>(p[i], own[i], k0);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    p[i][j] = 0;
                }
            }
        }
        load_w(ik + n_raw, own);
        luce_copy_wait<n_stages - 2>();
        __syncthreads();
        load_x(ik + n_stages - 1); // into the stage that every warp has left behind
        const T2 * xs = x_shared + ik%n_stages*n_columns*stride;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            typename frag::operand a[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t * bits = (uint32_t *) a[i].x;
                bits[0] = p[2*i + 0][2*s + 0];
                bits[1] = p[2*i + 1][2*s + 0];
                bits[2] = p[2*i + 0][2*s + 1];
                bits[3] = p[2*i + 1][2*s + 1];
            }
#pragma unroll
            for (int j = 0; j < n_j; j++) {
                if (16*j < n) { // the same for the whole block
                    typename frag::operand b;
                    ggml_cuda_mma::load_ldmatrix(b, xs + 16*j*stride + 8*s, stride);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        acc[i][j].add(a[i], b);
                    }
                }
            }
        }
    };
    for (int ik = 0; ik < n_k; ik += n_raw) {
#pragma unroll
        for (int r = 0; r < n_raw; r++) {
            if (ik + r < n_k) {
                step(ik + r, raw[r]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < n_j; j++) {
        if (16*j < n) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int l = 0; l < frag::n; l++) {
                    const int m = m0 + warp*32 + 16*i + frag::i(l);
                    const int c = 16*j + frag::j(l);
                    if (m < w.M && c < n) {
                        dst[(int64_t) rows[c]*w.M + m] = acc[i][j].value(l);
                    }
                }
            }
        }
    }
}

#endif // GGML_USE_HIP

template <ggml_type type, typename T2, int n_columns>
void launch(const luce_mmb_weights & w, const void * x16, const luce_mmb_cols & cols, float * dst, cudaStream_t stream) {
#ifdef GGML_USE_HIP
    constexpr size_t n_bytes = (size_t) (tile + n_columns)*stride*sizeof(uint32_t); // of 64 KiB of LDS
#else
    constexpr size_t n_bytes = (size_t) n_stages*n_columns*stride*sizeof(uint32_t);
#endif
    const dim3 grid((w.M + tile - 1)/tile, cols.parts != nullptr ? cols.n_parts_max : (cols.n_col + cols.tile - 1)/cols.tile);
    CUDA_SET_SHARED_MEMORY_LIMIT((luce_mmb_tile_kernel<type, T2, n_columns>), n_bytes);
    luce_mmb_tile_kernel<type, T2, n_columns><<<grid, dim3(32, n_warps), n_bytes, stream>>>(w, (const uint4 *) x16, cols, dst);
    CUDA_CHECK(cudaGetLastError());
}

template <ggml_type type, typename T2>
void launch(const luce_mmb_weights & w, const void * x16, const luce_mmb_cols & cols, float * dst, cudaStream_t stream) {
#ifndef GGML_USE_HIP
    if (cols.tile == LUCE_MMB_NARROW_TILE) {
        launch<type, T2, LUCE_MMB_NARROW_TILE>(w, x16, cols, dst, stream);
        return;
    }
#endif
    GGML_ASSERT(cols.tile == tile);
    launch<type, T2, tile>(w, x16, cols, dst, stream);
}

} // namespace

bool luce_mmb_tiles_supports(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_IQ3_S:
        case GGML_TYPE_Q2_0:
            return true;
        default:
            return false;
    }
}

void luce_mmb_tiles(ggml_type type, const luce_mmb_weights & w, const void * x16, const luce_mmb_cols & cols, float * dst, cudaStream_t stream) {
    switch (type) {
        case GGML_TYPE_F16:    launch<GGML_TYPE_F16,    half2       >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_BF16:   launch<GGML_TYPE_BF16,   nv_bfloat162>(w, x16, cols, dst, stream); break;
        case GGML_TYPE_Q8_0:   launch<GGML_TYPE_Q8_0,   luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_Q4_0:   launch<GGML_TYPE_Q4_0,   luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_Q4_1:   launch<GGML_TYPE_Q4_1,   luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_Q5_0:   launch<GGML_TYPE_Q5_0,   luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_Q5_1:   launch<GGML_TYPE_Q5_1,   luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_Q4_K:   launch<GGML_TYPE_Q4_K,   luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_Q5_K:   launch<GGML_TYPE_Q5_K,   luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_Q6_K:   launch<GGML_TYPE_Q6_K,   luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_IQ4_NL: launch<GGML_TYPE_IQ4_NL, luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_IQ3_S:  launch<GGML_TYPE_IQ3_S,  luce_t2     >(w, x16, cols, dst, stream); break;
        case GGML_TYPE_Q2_0:   launch<GGML_TYPE_Q2_0,   luce_t2     >(w, x16, cols, dst, stream); break;
        default: GGML_ABORT("luce_mmb_tiles: type %s is not supported", ggml_type_name(type));
    }
}
