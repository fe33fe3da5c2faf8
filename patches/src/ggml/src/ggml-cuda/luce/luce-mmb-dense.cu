// pyluce: the plain product of 16-bit rows, whatever type the weights had.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// dst[c, m] = sum over k of w16[m, k] * x16[c, k]: tiles of BM rows of weights by BN columns, WM x WN warps, `n_stages` tiles
// of depth 64 under way. Tiles are numbered so that neighbours in time share weights and columns in the L2 cache.
// Two terms (floats as sums of two bfloat16): three products a step; every 64 k are summed by themselves and then added, since
// matrix units cut their sums off where an addition rounds them.
#include "luce-mmb.cuh"

namespace {

constexpr int stride  = LUCE_MMB_STRIDE;
constexpr int n_group = 8; // tile columns that are walked together

template <typename T2, int n_terms, int BM, int BN, int WM, int WN, int n_stages, int n_resident>
__launch_bounds__(32*WM*WN, n_resident)
static __global__ void luce_mmb_dense_kernel(
        const luce_mmb_terms w, const luce_mmb_terms x, int M, int n_piece, int n_col, float * __restrict__ dst) {
    typedef luce_frag<T2> frag;
    constexpr int n_threads = 32*WM*WN;
    constexpr int n_w = BM*(LUCE_MMB_K/8)/n_threads; // 16-byte pieces a thread and term
    constexpr int n_x = BN*(LUCE_MMB_K/8)/n_threads;
    constexpr int FM  = BM/WM/16;
    constexpr int FN  = BN/WN/16;
    constexpr int n_term = (BM + BN)*stride; // pairs of a term of a stage
    static_assert(n_w >= 1 && n_x >= 1 && FM >= 1 && FN >= 1, "tile too small for its threads");
    extern __shared__ uint4 shared16[];
    T2 * shared = (T2 *) shared16;

    const int n_tm    = (M + BM - 1)/BM;
    const int n_tn    = (n_col + BN - 1)/BN;
    const int group   = (int) blockIdx.x/(n_group*n_tm);
    const int first   = group*n_group;
    const int n_inner = min(n_group, n_tn - first);
    const int within  = (int) blockIdx.x - first*n_tm;
    const int m0      = within/n_inner*BM;
    const int c0      = (first + within%n_inner)*BN;

    const int warp  = threadIdx.y;
    const int tid   = warp*32 + threadIdx.x;
    const int piece = tid%8;
    const int row   = tid/8;
    const int n_k   = n_piece/(LUCE_MMB_K/8);

    // rows beyond the end repeat the last one; what comes of them is not stored
    uint32_t w_row[n_w];
    uint32_t x_row[n_x];
#pragma unroll
    for (int i = 0; i < n_w; i++) {
        w_row[i] = (uint32_t) min(m0 + row + n_threads/8*i, M - 1)*(uint32_t) n_piece + piece;
    }
#pragma unroll
    for (int i = 0; i < n_x; i++) {
        x_row[i] = (uint32_t) min(c0 + row + n_threads/8*i, n_col - 1)*(uint32_t) n_piece + piece;
    }

    const int i0 = warp%WM*(BM/WM);
    const int j0 = warp/WM*(BN/WN);
    frag acc[FM][FN];
    const auto multiply = [&](const T2 * ws) {
        const T2 * xs = ws + BM*stride;
        if constexpr (n_terms == 1) {
#pragma unroll
            for (int k = 0; k < LUCE_MMB_K/2; k += 8) {
                typename frag::operand a[FM];
#pragma unroll
                for (int i = 0; i < FM; i++) {
                    ggml_cuda_mma::load_ldmatrix(a[i], ws + (i0 + 16*i)*stride + k, stride);
                }
#pragma unroll
                for (int j = 0; j < FN; j++) {
                    typename frag::operand b;
                    ggml_cuda_mma::load_ldmatrix(b, xs + (j0 + 16*j)*stride + k, stride);
#pragma unroll
                    for (int i = 0; i < FM; i++) {
                        acc[i][j].add(a[i], b);
                    }
                }
            }
        } else {
            frag part[FM][FN];
#pragma unroll
            for (int k = 0; k < LUCE_MMB_K/2; k += 8) {
                typename frag::operand a[2][FM];
#pragma unroll
                for (int t = 0; t < 2; t++) {
#pragma unroll
                    for (int i = 0; i < FM; i++) {
                        ggml_cuda_mma::load_ldmatrix(a[t][i], ws + t*n_term + (i0 + 16*i)*stride + k, stride);
                    }
                }
#pragma unroll
                for (int j = 0; j < FN; j++) {
                    typename frag::operand b[2];
#pragma unroll
                    for (int t = 0; t < 2; t++) {
                        ggml_cuda_mma::load_ldmatrix(b[t], xs + t*n_term + (j0 + 16*j)*stride + k, stride);
                    }
#pragma unroll
                    for (int i = 0; i < FM; i++) {
                        part[i][j].add(a[1][i], b[0]);
                        part[i][j].add(a[0][i], b[1]);
                        part[i][j].add(a[0][i], b[0]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < FM; i++) {
#pragma unroll
                for (int j = 0; j < FN; j++) {
                    acc[i][j].plus(part[i][j]);
                }
            }
        }
    };

#ifdef CP_ASYNC_AVAILABLE
    constexpr int n_stage = n_terms*n_term;
    const auto load = [&](int ik, T2 * to) {
#pragma unroll
        for (int t = 0; t < n_terms; t++) {
            const uint4 * ws = (const uint4 *) (t == 0 ? w.high : w.low);
            const uint4 * xs = (const uint4 *) (t == 0 ? x.high : x.low);
#pragma unroll
            for (int i = 0; i < n_w; i++) {
                luce_copy16(to + t*n_term + (row + n_threads/8*i)*stride + 4*piece, ws + w_row[i] + ik*(LUCE_MMB_K/8));
            }
#pragma unroll
            for (int i = 0; i < n_x; i++) {
                luce_copy16(to + t*n_term + (BM + row + n_threads/8*i)*stride + 4*piece, xs + x_row[i] + ik*(LUCE_MMB_K/8));
            }
        }
    };
#pragma unroll
    for (int s = 0; s < n_stages - 1; s++) {
        if (s < n_k) {
            load(s, shared + s*n_stage);
        }
        luce_copy_commit();
    }
    int now  = 0;
    int next = n_stages - 1;
    for (int ik = 0; ik < n_k; ik++) {
        luce_copy_wait<n_stages - 2>();
        __syncthreads();
        if (ik + n_stages - 1 < n_k) {
            load(ik + n_stages - 1, shared + next*n_stage);
        }
        luce_copy_commit(); // an empty group at the end keeps the count
        multiply(shared + now*n_stage);
        now  = now  == n_stages - 1 ? 0 : now  + 1;
        next = next == n_stages - 1 ? 0 : next + 1;
    }
#else
    luce_piece w_raw[n_terms][n_w];
    luce_piece x_raw[n_terms][n_x];
    const auto load = [&](int ik) {
#pragma unroll
        for (int t = 0; t < n_terms; t++) {
            const luce_piece * ws = (const luce_piece *) (t == 0 ? w.high : w.low);
            const luce_piece * xs = (const luce_piece *) (t == 0 ? x.high : x.low);
#pragma unroll
            for (int i = 0; i < n_w; i++) {
                w_raw[t][i] = ws[w_row[i] + ik*(LUCE_MMB_K/8)];
            }
#pragma unroll
            for (int i = 0; i < n_x; i++) {
                x_raw[t][i] = xs[x_row[i] + ik*(LUCE_MMB_K/8)];
            }
        }
    };
    load(0);
    for (int ik = 0; ik < n_k; ik++) {
        __syncthreads();
#pragma unroll
        for (int t = 0; t < n_terms; t++) {
#pragma unroll
            for (int i = 0; i < n_w; i++) {
                *(luce_piece *) (shared + t*n_term + (row + n_threads/8*i)*stride + 4*piece) = w_raw[t][i];
            }
#pragma unroll
            for (int i = 0; i < n_x; i++) {
                *(luce_piece *) (shared + t*n_term + (BM + row + n_threads/8*i)*stride + 4*piece) = x_raw[t][i];
            }
        }
        __syncthreads();
        if (ik + 1 < n_k) {
            load(ik + 1);
        }
        multiply(shared);
    }
#endif // CP_ASYNC_AVAILABLE

#pragma unroll
    for (int j = 0; j < FN; j++) {
#pragma unroll
        for (int i = 0; i < FM; i++) {
#pragma unroll
            for (int l = 0; l < frag::n; l++) {
                const int m = m0 + i0 + 16*i + frag::i(l);
                const int c = c0 + j0 + 16*j + frag::j(l);
                if (m < M && c < n_col) {
                    dst[(int64_t) c*M + m] = acc[i][j].value(l);
                }
            }
        }
    }
}

struct product {
    luce_mmb_terms w;
    luce_mmb_terms x;
    int M;
    int Kp;
    int n_col;
    float * dst;
    cudaStream_t stream;

    template <int BM, int BN>
    int64_t n_tiles() const {
        return (int64_t) ((M + BM - 1)/BM)*((n_col + BN - 1)/BN);
    }

    template <typename T2, int n_terms, int BM, int BN, int WM, int WN, int n_stages, int n_resident>
    void launch() const {
        constexpr size_t n_bytes = (size_t) n_stages*n_terms*(BM + BN)*stride*sizeof(uint32_t);
        CUDA_SET_SHARED_MEMORY_LIMIT((luce_mmb_dense_kernel<T2, n_terms, BM, BN, WM, WN, n_stages, n_resident>), n_bytes);
        luce_mmb_dense_kernel<T2, n_terms, BM, BN, WM, WN, n_stages, n_resident><<<(unsigned) n_tiles<BM, BN>(), dim3(32, WM*WN), n_bytes, stream>>>(
            w, x, M, Kp/8, n_col, dst);
        CUDA_CHECK(cudaGetLastError());
    }
};

#ifdef GGML_USE_HIP
constexpr bool hip = true; // 64 KiB of LDS, one stage
#else
constexpr bool hip = false;
#endif

template <typename T2>
void choose(const product & p, int n_sm) {
    if (p.n_tiles<128, 128>() >= n_sm && p.M > 64) {
        p.launch<T2, 1, 128, 128, 2, hip ? 4 : 2, hip ? 1 : 3, hip ? 1 : 2>();
    } else if (p.n_tiles<64, 64>() >= n_sm) {
        p.launch<T2, 1, 64, 64, 2, 2, hip ? 1 : 4, hip ? 2 : 3>();
    } else {
        p.launch<T2, 1, 32, 32, 2, 2, hip ? 1 : 6, hip ? 2 : 4>();
    }
}

} // namespace

void luce_mmb_dense(bool half, const void * w16, const void * x16, int M, int Kp, int n_col, float * dst, int n_sm, cudaStream_t stream) {
    const product p = { { w16, nullptr }, { x16, nullptr }, M, Kp, n_col, dst, stream };
    if (half) {
        choose<half2>(p, n_sm);
    } else {
        choose<nv_bfloat162>(p, n_sm);
    }
}

void luce_mmb_dense_terms(const luce_mmb_terms & w, const luce_mmb_terms & x, int M, int Kp, int n_col, float * dst, int n_sm, cudaStream_t stream) {
    const product p = { w, x, M, Kp, n_col, dst, stream };
    if (p.n_tiles<64, 64>() >= n_sm) {
        p.launch<nv_bfloat162, 2, 64, 64, 2, 2, hip ? 1 : 3, hip ? 1 : 2>();
    } else {
        p.launch<nv_bfloat162, 2, 32, 32, 2, 2, hip ? 1 : 4, hip ? 2 : 3>();
    }
}
