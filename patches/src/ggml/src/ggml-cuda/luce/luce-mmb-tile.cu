// pyluce: chunk products whose weights are widened to 16 bits inside the tile: experts, and few columns.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A tile is 128 rows of weights by up to 128 columns, 8 warps. A warp owns 32 rows and every other 16 columns, and steps over
// those 16 that hold no column: a tile of 20 columns costs two of them. Weights go from memory to registers, are widened
// there, and wait in shared memory; while a tile of depth 64 is multiplied, the next one is under way.
#include "luce-mmb.cuh"

namespace {

constexpr int n_warps   = 8;
constexpr int n_threads = 32*n_warps;
constexpr int tile      = LUCE_MMB_TILE;
constexpr int stride    = LUCE_MMB_STRIDE;
constexpr int n_load    = tile*(LUCE_MMB_K/8)/n_threads; // 16-byte pieces of an operand that a thread brings in
#ifdef GGML_USE_HIP
constexpr int n_stages  = 1; // 64 KiB of LDS
#else
constexpr int n_stages  = 2;
#endif
constexpr size_t n_bytes_shared = (size_t) n_stages*2*tile*stride*sizeof(uint32_t);

template <ggml_type type, typename T2>
__launch_bounds__(n_threads, 2)
static __global__ void luce_mmb_tile_kernel(const luce_mmb_weights w, const uint4 * __restrict__ x16, const luce_mmb_cols cols, float * __restrict__ dst) {
    typedef luce_frag<T2> frag;
    extern __shared__ uint4 shared16[];
    __shared__ int rows[tile];

    luce_mmb_part part = { 0, (int) blockIdx.y*tile, 0, 0 };
    if (cols.parts != nullptr) {
        if ((int) blockIdx.y >= *cols.n_parts) {
            return;
        }
        part = cols.parts[blockIdx.y];
    } else {
        part.n = min(tile, cols.n_col - part.first);
    }
    const int n    = part.n;
    const int m0   = blockIdx.x*tile;
    const int lane = threadIdx.x;
    const int warp = threadIdx.y;
    const int tid  = warp*32 + lane;
    const int K    = w.K;
    const int n_k  = (K + LUCE_MMB_K - 1)/LUCE_MMB_K;

    T2 * w_shared = (T2 *) shared16;
    T2 * x_shared = w_shared + n_stages*tile*stride;

    // a thread brings in piece tid%8 of rows tid/8 + 32*i
    const int piece = tid%8;
    const int row   = tid/8;
    const char * w_tile = w.data + part.expert*w.nb_expert + m0*w.nb_row;
    uint32_t w_row[n_load];
    uint32_t x_row[n_load];
#pragma unroll
    for (int i = 0; i < n_load; i++) {
        w_row[i] = (uint32_t) ((min(m0 + row + 32*i, w.M - 1) - m0)*w.nb_row);
        int from = part.first + min(row + 32*i, n - 1);
        if (cols.picks != nullptr) {
            from = cols.picks[from]/cols.picks_per_row;
        }
        x_row[i] = (uint32_t) from*(uint32_t) (n_k*(LUCE_MMB_K/8)) + piece;
    }
    if (tid < tile) {
        const int at = part.first + min(tid, n - 1);
        rows[tid] = cols.picks != nullptr ? cols.picks[at] : at;
    }

    luce_w8<type> raw[n_load];
    const auto load_w = [&](int ik) {
        const int k = ik*LUCE_MMB_K + 8*piece;
        if (k < K) {
#pragma unroll
            for (int i = 0; i < n_load; i++) {
                luce_load8<type>(raw[i], w_tile + w_row[i], k, K, w.any);
            }
        }
    };
    const auto store_w = [&](int ik, T2 * to) {
        const int k = ik*LUCE_MMB_K + 8*piece;
#pragma unroll
        for (int i = 0; i < n_load; i++) {
            *(uint4 *) (to + (row + 32*i)*stride + 4*piece) = k < K ? luce_w8_pack<type, T2>(raw[i], k) : make_uint4(0, 0, 0, 0);
        }
    };

    const int i0 = (warp%4)*32;
    frag acc[2][4];
    const auto multiply = [&](const T2 * ws, const T2 * xs) {
#pragma unroll
        for (int k = 0; k < LUCE_MMB_K/2; k += 8) {
            typename frag::operand a[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ggml_cuda_mma::load_ldmatrix(a[i], ws + (i0 + 16*i)*stride + k, stride);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int j0 = 16*(2*j + warp/4);
                if (j0 < n) { // the same for the whole warp
                    typename frag::operand b;
                    ggml_cuda_mma::load_ldmatrix(b, xs + j0*stride + k, stride);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        acc[i][j].add(a[i], b);
                    }
                }
            }
        }
    };

#ifdef CP_ASYNC_AVAILABLE
    const auto load_x = [&](int ik, T2 * to) {
#pragma unroll
        for (int i = 0; i < n_load; i++) {
            if (32*i + row/16*16 < n) {
                luce_copy16(to + (row + 32*i)*stride + 4*piece, x16 + x_row[i] + ik*(LUCE_MMB_K/8));
            }
        }
        luce_copy_commit();
    };
    load_x(0, x_shared);
    load_w(0);
    store_w(0, w_shared);
    for (int ik = 0; ik < n_k; ik++) {
        const int now  = ik%2*tile*stride;
        const int next = (ik + 1)%2*tile*stride;
        luce_copy_wait<0>();
        __syncthreads();
        if (ik + 1 < n_k) {
            load_x(ik + 1, x_shared + next);
            load_w(ik + 1);
        }
        multiply(w_shared + now, x_shared + now);
        if (ik + 1 < n_k) {
            store_w(ik + 1, w_shared + next);
        }
    }
#else
    luce_piece x_raw[n_load];
    const auto load_x = [&](int ik) {
#pragma unroll
        for (int i = 0; i < n_load; i++) {
            x_raw[i] = ((const luce_piece *) x16)[x_row[i] + ik*(LUCE_MMB_K/8)];
        }
    };
    load_x(0);
    load_w(0);
    for (int ik = 0; ik < n_k; ik++) {
        __syncthreads();
        store_w(ik, w_shared);
#pragma unroll
        for (int i = 0; i < n_load; i++) {
            *(luce_piece *) (x_shared + (row + 32*i)*stride + 4*piece) = x_raw[i];
        }
        __syncthreads();
        if (ik + 1 < n_k) {
            load_x(ik + 1);
            load_w(ik + 1);
        }
        multiply(w_shared, x_shared);
    }
#endif // CP_ASYNC_AVAILABLE

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

template <ggml_type type, typename T2>
void launch(const luce_mmb_weights & w, const void * x16, const luce_mmb_cols & cols, float * dst, cudaStream_t stream) {
    const dim3 grid((w.M + tile - 1)/tile, cols.parts != nullptr ? cols.n_parts_max : (cols.n_col + tile - 1)/tile);
    CUDA_SET_SHARED_MEMORY_LIMIT((luce_mmb_tile_kernel<type, T2>), n_bytes_shared);
    luce_mmb_tile_kernel<type, T2><<<grid, dim3(32, n_warps), n_bytes_shared, stream>>>(w, (const uint4 *) x16, cols, dst);
    CUDA_CHECK(cudaGetLastError());
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
