// pyluce: one Gated-DeltaNet layer between its projections, on CUDA and HIP.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// With S a value head's state as [dk, dv], q and k of unit length, a row does, for each j of dv:
//     u = beta * (v_j - decay * <S_j, k>);  o_j = (decay * <S_j, q> + u * <k, q>) / sqrt(d);  S_j = decay * S_j + u * k
// so both dot products read the old state and one reduction serves them. The dv are independent of one another. A state
// row of dk values belongs to 8 lanes, each with groups of four values; every dot product runs along a lane's own values,
// then over the 8 lanes in a butterfly: an order that depends on d alone.
//
// Row graphs: one launch; a thread block owns a sequence's rows of one value head, with the head's state in registers.
// Chunk graphs: (1) convolution, unit length and gates of all rows into temporary memory, (2) the scan, thread blocks
// sharing the value heads and 16 columns each, (3) output norm and gate, and the convolution's history.
#include "luce-launch.cuh"

#include "ggml-luce-path.h"

#define GDN_LANES        8   // lanes that share one state row
#define GDN_MAX_D        128
#define GDN_MAX_TAPS     8
#define GDN_CLUSTER      2   // thread blocks that share a value head in row graphs, on devices with clusters
#define GDN_PREP_ROWS    8   // rows a warp of the first chunk kernel walks
#define GDN_SCAN_COLS    16  // columns of dv a block of the scan owns
#define GDN_SCAN_ROWS    16  // rows the scan stages at a time
#define GDN_SCAN_SLOTS   8   // sequences scanned at the same time

namespace {

struct gdn_args {
    const float * qkv;
    const float * z;
    const float * beta;
    const float * alpha;
    const float * conv;
    const float * misc;
    float       * state;
    float       * history;
    float       * dst;
    const luce_row * rows;
    int64_t qkv_stride, z_stride, beta_stride, alpha_stride;
    int   d, nk, nv, channels, n_row, n_tap, state_ring, history_ring, n_slot;
    int   keep_rows;
    int   leak; // GGML_LUCE_FAULT_NAN_LEAK
    int   aligned; // qkv, z and their rows start on 16 bytes, d % 4 == 0
    float eps;
};

// temporary memory of a chunk graph; rows are padded to DP values and start on 16 bytes
struct gdn_temp {
    float * qk;   // [2*DP + 4, nk, T]: q / sqrt(d) | k | <k, q>, 0, 0, 0
    float * v;    // [DP + 4, nv, T]: v | decay, beta, 0, 0
    int   * runs; // [2, n_slot]: a sequence's first row and the row after its last; -1: none
};

} // namespace

static __device__ __forceinline__ float gdn_softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

// decay and beta of one row and value head
static __device__ __forceinline__ float2 gdn_gates(const gdn_args & a, int64_t r, int hv) {
    const float dt = a.alpha[r * a.alpha_stride + hv] + a.misc[hv];
    return make_float2(expf(gdn_softplus(dt) * a.misc[a.nv + hv]), luce_sigmoid(a.beta[r * a.beta_stride + hv]));
}

static __device__ __forceinline__ float * gdn_state(const gdn_args & a, int slot, int position, int hv) {
    const int64_t head = (int64_t) a.d * a.d;
    return a.state + (((int64_t) slot * a.state_ring + position % a.state_ring) * a.nv + hv) * head;
}

static __device__ __forceinline__ float * gdn_history(const gdn_args & a, int slot, int position) {
    return a.history + ((int64_t) slot * a.history_ring + position % a.history_ring) * a.channels;
}

// F values of state row `col`: values 4*(lane + 8*m) .. +3, m = 0..F/4-1
template <int F, bool exact>
static __device__ __forceinline__ void gdn_load_state(const float * head, int d, int col, int lane, float (&s)[F]) {
#pragma unroll
    for (int m = 0; m < F / 4; m++) {
        const int i = 4 * (lane + GDN_LANES * m);
        if (exact) {
            const float4 x = *(const float4 *) (head + col * d + i);
            s[4 * m] = x.x; s[4 * m + 1] = x.y; s[4 * m + 2] = x.z; s[4 * m + 3] = x.w;
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[4 * m + e] = col < d && i + e < d ? head[col * d + i + e] : 0.0f;
            }
        }
    }
}

template <int F, bool exact>
static __device__ __forceinline__ void gdn_store_state(float * head, int d, int col, int lane, const float (&s)[F]) {
#pragma unroll
    for (int m = 0; m < F / 4; m++) {
        const int i = 4 * (lane + GDN_LANES * m);
        if (exact) {
            *(float4 *) (head + col * d + i) = make_float4(s[4 * m], s[4 * m + 1], s[4 * m + 2], s[4 * m + 3]);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (col < d && i + e < d) {
                    head[col * d + i + e] = s[4 * m + e];
                }
            }
        }
    }
}

// the F values of a vector in shared memory that meet a lane's state values
template <int F>
static __device__ __forceinline__ void gdn_load_vector(const float * x, int lane, float (&y)[F]) {
#pragma unroll
    for (int m = 0; m < F / 4; m++) {
        const float4 v = *(const float4 *) (x + 4 * (lane + GDN_LANES * m));
        y[4 * m] = v.x; y[4 * m + 1] = v.y; y[4 * m + 2] = v.z; y[4 * m + 3] = v.w;
    }
}

// a lane's part of a dot product: four sums, then (0 + 1) + (2 + 3)
template <int F>
static __device__ __forceinline__ float gdn_part(const float (&x)[F], const float (&y)[F]) {
    float sum[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
    for (int i = 0; i < F; i++) {
        sum[i % 4] = fmaf(x[i], y[i], sum[i % 4]);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// ---------------------------------------------------------------------------------------------------------------------
// row graphs
// ---------------------------------------------------------------------------------------------------------------------

// CL thread blocks, a cluster, share a head's dv; 1 where there are no clusters
template <int DP, int CL>
struct gdn_row_block {
    static constexpr int n_threads = DP / CL * GDN_LANES < 512 ? DP / CL * GDN_LANES : 512;
};

// a cluster's barrier in two parts; the first pair orders no memory
static __device__ __forceinline__ void gdn_cluster_arrive() {
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
#else
    NO_DEVICE_CODE;
#endif
}

static __device__ __forceinline__ void gdn_cluster_wait() {
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
#else
    NO_DEVICE_CODE;
#endif
}

static __device__ __forceinline__ void gdn_cluster_sync() {
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" : : : "memory");
#else
    NO_DEVICE_CODE;
#endif
}

// writes x where block `rank` of the cluster has this shared variable; only clusters call it
[[maybe_unused]] static __device__ __forceinline__ void gdn_cluster_put(float * shared, int rank, float x) {
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    const unsigned int here = (unsigned int) __cvta_generic_to_shared(shared);
    unsigned int there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" : : "r"(there), "f"(x) : "memory");
#else
    GGML_UNUSED_VARS(shared, rank, x);
    NO_DEVICE_CODE;
#endif
}

// grid (T, nv, CL), clusters of (1, 1, CL). A block whose row is not its sequence's first has nothing to do. A thread owns one
// channel of q, k or v and keeps its taps in registers. The q and k channels of a key head are read by nv/nk clusters, and
// the first of them keeps them in the history: a run so long that this would overwrite what another has yet to read is
// walked by that cluster alone, one value head after the other. May start before the kernel before it has ended: until
// the synchronisation it reads only the rows table, weights and what earlier graphs left in the state.
template <int DP, int KT, bool exact, int CL>
static __global__ void __launch_bounds__((gdn_row_block<DP, CL>::n_threads), CL == 2 && KT == 4 ? 2 : 1) luce_gdn_row_kernel(const gdn_args a) {
    constexpr int cols      = DP / CL;
    constexpr int n_threads = gdn_row_block<DP, CL>::n_threads;
    constexpr int n_cols    = cols * GDN_LANES / n_threads; // a thread's state rows
    constexpr int F         = DP / GDN_LANES;
    static_assert(n_threads > 2 * DP + cols && cols % 32 == 0, "a thread a channel, and one for the gates");

    __shared__ __align__(16) float qkv[2 * DP + cols];
    __shared__ float out[cols];
    __shared__ float gates[2];
    __shared__ float parts[2][CL]; // of the sum of squares; rows take turns

    ggml_cuda_pdl_lc(); // the next product's weights wait for nobody

    const int      d    = exact ? DP : a.d;
    const int      t    = threadIdx.x;
    const int      r0   = blockIdx.x;
    const int      rank = CL == 1 ? 0 : blockIdx.z;
    const int      j0   = rank * cols; // this block's first dv
    const luce_row row  = a.rows[r0];
    const int      slot = row.slot;
    const int      p0   = row.position;

    if (slot < 0) {
        ggml_cuda_pdl_sync();
        if (t < cols && j0 + t < d) {
            a.dst[((int64_t) r0 * a.nv + blockIdx.y) * d + j0 + t] = 0.0f;
        }
        return;
    }
    if (r0 > 0 && a.rows[r0 - 1].slot == slot) {
        return;
    }
    const int  reach      = r0 + a.history_ring - a.n_tap + 1;
    const bool one_by_one = reach < a.n_row && a.rows[reach].slot == slot;
    if (one_by_one && (int) blockIdx.y >= a.nk) {
        return;
    }
    bool starting = CL > 1; // the other blocks may not run yet
    if (CL > 1) {
        gdn_cluster_arrive();
    }

    const int  lane = t % GDN_LANES;
    const int  col0 = t / GDN_LANES;
    const int  part = t < DP ? 0 : t < 2 * DP ? 1 : t < 2 * DP + cols ? 2 : 3; // q, k, v, none
    const int  i    = part == 0 ? t : part == 1 ? t - DP : j0 + t - 2 * DP;
    const bool owns = part < 3 && i < d;
    int        turn = 0;

#pragma unroll 1
    for (int hv = blockIdx.y; hv < a.nv; hv += a.nk) {
        const int  hk = hv % a.nk;
        const int  c  = (part == 0 ? hk : part == 1 ? a.nk + hk : 2 * a.nk + hv) * d + i;
        const bool keeps_qk = rank == 0 && (one_by_one ? hv + a.nk >= a.nv : hv < a.nk);
        const bool keeps    = owns && (part == 2 || keeps_qk);

        float s[n_cols][F];
        if (p0 == 0 && !a.leak) {
#pragma unroll
            for (int n = 0; n < n_cols; n++) {
#pragma unroll
                for (int f = 0; f < F; f++) {
                    s[n][f] = 0.0f;
                }
            }
        } else {
            const float * from = gdn_state(a, slot, p0, hv);
#pragma unroll
            for (int n = 0; n < n_cols; n++) {
                gdn_load_state<F, exact>(from, d, j0 + col0 + n * (n_threads / GDN_LANES), lane, s[n]);
            }
        }

        float w[KT];   // by how far back, 0 the row itself
        float x[KT];
        float x_next = 0.0f;
#pragma unroll
        for (int b = 0; b < KT; b++) {
            w[b] = owns && b < a.n_tap ? a.conv[(int64_t) (a.n_tap - 1 - b) * a.channels + c] : 0.0f;
            x[b] = owns && b > 0 && b < a.n_tap && b <= p0 ? gdn_history(a, slot, p0 - b)[c] : 0.0f;
        }
        if (CL > 1 && one_by_one) { // block 0 overwrites no history that the others have yet to read
            if (starting) {
                gdn_cluster_wait();
                starting = false;
            }
            gdn_cluster_sync();
        }
        ggml_cuda_pdl_sync();
        if (owns) {
            x_next = a.qkv[r0 * a.qkv_stride + c];
        }

#pragma unroll 1
        for (int r = r0; ; r++) {
            const int  position = p0 + (r - r0);
            const bool last     = r + 1 >= a.n_row || a.rows[r + 1].slot != slot;
            const bool keep     = last || (a.keep_rows && !(r + a.state_ring < a.n_row && a.rows[r + a.state_ring].slot == slot));

            x[0] = x_next;
            if (owns && !last) {
                x_next = a.qkv[(r + 1) * a.qkv_stride + c];
            }
            float zi = 0.0f;
            if (t < cols && j0 + t < d) {
                zi = a.z[r * a.z_stride + hv * d + j0 + t];
            }
            if (part < 3) {
                float y = 0.0f;
#pragma unroll
                for (int b = KT - 1; b >= 0; b--) {
                    y = fmaf(x[b], w[b], y);
                }
                qkv[t] = luce_silu(y); // zero beyond d
            } else if (t == 2 * DP + cols) {
                const float2 g = gdn_gates(a, r, hv);
                gates[0] = g.x;
                gates[1] = g.y;
            }
            if (keeps) {
                gdn_history(a, slot, position)[c] = x[0];
            }
#pragma unroll
            for (int b = KT - 1; b > 0; b--) {
                x[b] = x[b - 1];
            }
            __syncthreads();

            {
                float q[F], k[F];
                gdn_load_vector<F>(qkv, lane, q);
                gdn_load_vector<F>(qkv + DP, lane, k);
                const float qq = warp_reduce_sum<GDN_LANES>(gdn_part<F>(q, q));
                const float kk = warp_reduce_sum<GDN_LANES>(gdn_part<F>(k, k));
                const float kq = warp_reduce_sum<GDN_LANES>(gdn_part<F>(k, q));
                const float fq = rsqrtf((float) d) * rsqrtf(qq + a.eps);
                const float fk = rsqrtf(kk + a.eps);
                const float decay = gates[0];
                const float beta  = gates[1];
#pragma unroll
                for (int n = 0; n < n_cols; n++) {
                    const int   col = col0 + n * (n_threads / GDN_LANES);
                    const float sk  = warp_reduce_sum<GDN_LANES>(gdn_part<F>(s[n], k)) * fk;
                    const float sq  = warp_reduce_sum<GDN_LANES>(gdn_part<F>(s[n], q)) * fq;
                    const float u   = beta * fmaf(-decay, sk, qkv[2 * DP + col]);
                    const float uk  = u * fk;
#pragma unroll
                    for (int f = 0; f < F; f++) {
                        s[n][f] = fmaf(k[f], uk, s[n][f] * decay);
                    }
                    if (lane == 0) {
                        out[col] = fmaf(decay, sq, u * (kq * fk * fq));
                    }
                }
                if (keep) {
                    float * to = gdn_state(a, slot, position + 1, hv);
#pragma unroll
                    for (int n = 0; n < n_cols; n++) {
                        gdn_store_state<F, exact>(to, d, j0 + col0 + n * (n_threads / GDN_LANES), lane, s[n]);
                    }
                }
            }
            __syncthreads();

            float sum = 0.0f;
            if (t < cols) { // whole warps; each sums the block's part of the head by itself
#pragma unroll
                for (int m = 0; m < cols / 32; m++) {
                    const float o = out[t % 32 + 32 * m]; // zero beyond d
                    sum = fmaf(o, o, sum);
                }
                sum = warp_reduce_sum<32>(sum);
            }
            if constexpr (CL > 1) {
                if (starting) {
                    gdn_cluster_wait();
                    starting = false;
                }
                if (t < CL) {
                    gdn_cluster_put(&parts[turn][rank], t, sum);
                }
                gdn_cluster_sync();
                sum = parts[turn][0];
#pragma unroll
                for (int n = 1; n < CL; n++) {
                    sum += parts[turn][n];
                }
                turn ^= 1;
            }
            if (t < cols && j0 + t < d) {
                const float y = out[t] * rsqrtf(sum / d + a.eps) * a.misc[2 * a.nv + j0 + t];
                a.dst[((int64_t) r * a.nv + hv) * d + j0 + t] = y * luce_sigmoid(zi);
            }
            if (last) {
                break;
            }
        }
        if (!one_by_one) {
            break;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// chunk graphs
// ---------------------------------------------------------------------------------------------------------------------

// E channels from channel c on, of which those below the head's end count
template <int E>
static __device__ __forceinline__ void gdn_load_channels(const float * x, int i, int d, bool aligned, float (&y)[E]) {
    if (E == 4 && aligned) {
        const float4 v = i < d ? *(const float4 *) (x + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        y[0] = v.x; y[1 % E] = v.y; y[2 % E] = v.z; y[3 % E] = v.w;
    } else {
#pragma unroll
        for (int e = 0; e < E; e++) {
            y[e] = i + e < d ? x[i + e] : 0.0f;
        }
    }
}

template <int E>
static __device__ __forceinline__ void gdn_store_channels(float * x, const float (&y)[E], float scale) {
    if constexpr (E == 4) {
        *(float4 *) x = make_float4(y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale);
    } else {
#pragma unroll
        for (int e = 0; e < E; e++) {
            x[e] = y[e] * scale;
        }
    }
}

// the taps of E channels as a warp walks down the rows
template <int E, int KT>
struct gdn_window {
    float w[KT][E]; // by how far back, 0 the row itself
    float x[KT][E];

    __device__ __forceinline__ void load_taps(const gdn_args & a, int c0, int i) {
#pragma unroll
        for (int b = 0; b < KT; b++) {
            if (b < a.n_tap) {
                gdn_load_channels<E>(a.conv + (int64_t) (a.n_tap - 1 - b) * a.channels + c0, i, a.d, a.aligned, w[b]);
            } else {
#pragma unroll
                for (int e = 0; e < E; e++) {
                    w[b][e] = 0.0f;
                }
            }
        }
    }

    // what stands before row r, from this graph's rows or from the history
    __device__ __forceinline__ void load_before(const gdn_args & a, int64_t r, const luce_row & row, int c0, int i) {
#pragma unroll
        for (int b = 1; b < KT; b++) {
            if (b < a.n_tap && b <= row.position) {
                const bool here = b <= r && a.rows[r - b].slot == row.slot;
                const float * from = here ? a.qkv + (r - b) * a.qkv_stride : gdn_history(a, row.slot, row.position - b);
                gdn_load_channels<E>(from + c0, i, a.d, a.aligned, x[b]);
            } else {
#pragma unroll
                for (int e = 0; e < E; e++) {
                    x[b][e] = 0.0f;
                }
            }
        }
    }

    __device__ __forceinline__ void load_row(const gdn_args & a, int64_t r, int c0, int i) {
        gdn_load_channels<E>(a.qkv + r * a.qkv_stride + c0, i, a.d, a.aligned, x[0]);
    }

    __device__ __forceinline__ void shift() {
#pragma unroll
        for (int b = KT - 1; b > 0; b--) {
#pragma unroll
            for (int e = 0; e < E; e++) {
                x[b][e] = x[b - 1][e];
            }
        }
    }

    __device__ __forceinline__ void convolve(float (&y)[E]) const {
#pragma unroll
        for (int e = 0; e < E; e++) {
            float sum = 0.0f;
#pragma unroll
            for (int b = KT - 1; b >= 0; b--) {
                sum = fmaf(x[b][e], w[b][e], sum);
            }
            y[e] = luce_silu(sum);
        }
    }
};

template <int E>
static __device__ __forceinline__ float gdn_warp_dot(const float (&x)[E], const float (&y)[E]) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < E; e++) {
        sum = fmaf(x[e], y[e], sum);
    }
    return warp_reduce_sum<32>(sum);
}

// grid (ceil((nk + nv) / 4), ceil(T / GDN_PREP_ROWS)); a warp: q and k of a key head, or v and the gates of a value head
template <int DP, int KT>
static __global__ void __launch_bounds__(128) luce_gdn_prepare_kernel(const gdn_args a, const gdn_temp temp) {
    constexpr int E = DP / 32;
    const int lane = threadIdx.x % 32;
    const int head = blockIdx.x * 4 + threadIdx.x / 32;
    const int r0   = blockIdx.y * GDN_PREP_ROWS;
    const int r1   = min(r0 + GDN_PREP_ROWS, a.n_row);
    const int i    = lane * E;
    if (head >= a.nk + a.nv) {
        return;
    }

    if (head < a.nk) {
        gdn_window<E, KT> q, k;
        const int cq = head * a.d;
        const int ck = (a.nk + head) * a.d;
        q.load_taps(a, cq, i);
        k.load_taps(a, ck, i);
        int before = -1;
        for (int r = r0; r < r1; r++) {
            const luce_row row = a.rows[r];
            if (row.slot < 0) {
                before = -1;
                continue;
            }
            if (row.slot == before) {
                q.shift();
                k.shift();
            } else {
                q.load_before(a, r, row, cq, i);
                k.load_before(a, r, row, ck, i);
            }
            before = row.slot;
            q.load_row(a, r, cq, i);
            k.load_row(a, r, ck, i);
            float yq[E], yk[E];
            q.convolve(yq);
            k.convolve(yk);
            const float fq = rsqrtf((float) a.d) * rsqrtf(gdn_warp_dot<E>(yq, yq) + a.eps);
            const float fk = rsqrtf(gdn_warp_dot<E>(yk, yk) + a.eps);
            const float kq = gdn_warp_dot<E>(yk, yq) * (fk * fq);
            float * to = temp.qk + ((int64_t) r * a.nk + head) * (2 * DP + 4);
            gdn_store_channels<E>(to + i, yq, fq);
            gdn_store_channels<E>(to + DP + i, yk, fk);
            if (lane == 0) {
                *(float4 *) (to + 2 * DP) = make_float4(kq, 0.0f, 0.0f, 0.0f);
            }
            if (head == 0 && lane == 0) {
                if (r == 0 || a.rows[r - 1].slot != row.slot) {
                    temp.runs[2 * row.slot] = r;
                }
                if (r + 1 == a.n_row || a.rows[r + 1].slot != row.slot) {
                    temp.runs[2 * row.slot + 1] = r + 1;
                }
            }
        }
    } else {
        const int hv = head - a.nk;
        const int cv = (2 * a.nk + hv) * a.d;
        gdn_window<E, KT> v;
        v.load_taps(a, cv, i);
        int before = -1;
        for (int r = r0; r < r1; r++) {
            const luce_row row = a.rows[r];
            if (row.slot < 0) {
                before = -1;
                continue;
            }
            if (row.slot == before) {
                v.shift();
            } else {
                v.load_before(a, r, row, cv, i);
            }
            before = row.slot;
            v.load_row(a, r, cv, i);
            float y[E];
            v.convolve(y);
            float * to = temp.v + ((int64_t) r * a.nv + hv) * (DP + 4);
            gdn_store_channels<E>(to + i, y, 1.0f);
            if (lane == 0) {
                const float2 g = gdn_gates(a, r, hv);
                *(float4 *) (to + DP) = make_float4(g.x, g.y, 0.0f, 0.0f);
            }
        }
    }
}

// 16 bytes from global to shared memory; visible after gdn_copied and a barrier
static __device__ __forceinline__ void gdn_copy_16(float * to, const float * from) {
#ifdef CP_ASYNC_AVAILABLE
    const unsigned int address = (unsigned int) __cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(address), "l"(from) : "memory");
#else
    *(float4 *) to = *(const float4 *) from;
#endif
}

static __device__ __forceinline__ void gdn_copies_end() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// all but the last group of copies are there
static __device__ __forceinline__ void gdn_copied() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.wait_group 1;" : : : "memory");
#endif
}

template <int DP>
struct gdn_tile {
    float qk[GDN_SCAN_ROWS][2 * DP + 4];
    float v[GDN_SCAN_ROWS][GDN_SCAN_COLS + 4];
};

// stages rows [r, r + n) of key head hk and of the columns from col on of value head hv
template <int DP>
static __device__ __forceinline__ void gdn_stage(
        const gdn_args & a, const gdn_temp & temp, gdn_tile<DP> & tile, int64_t r, int n, int hk, int hv, int col) {
    constexpr int n_threads = GDN_SCAN_COLS * GDN_LANES;
    constexpr int per_qk    = (2 * DP + 4) / 4;
    constexpr int per_v     = (GDN_SCAN_COLS + 4) / 4;
    for (int j = threadIdx.x; j < n * per_qk; j += n_threads) {
        const int row = j / per_qk;
        const int i   = j % per_qk * 4;
        gdn_copy_16(&tile.qk[row][i], temp.qk + ((r + row) * a.nk + hk) * (2 * DP + 4) + i);
    }
    for (int j = threadIdx.x; j < n * per_v; j += n_threads) {
        const int row = j / per_v;
        const int i   = j % per_v * 4;
        gdn_copy_16(&tile.v[row][i], temp.v + ((r + row) * a.nv + hv) * (DP + 4) + (i < GDN_SCAN_COLS ? col + i : DP));
    }
}

// grid (DP / GDN_SCAN_COLS, nv, min(n_slot, GDN_SCAN_SLOTS)); a sequence's rows in order, the state in registers. Leaves the
// outputs before norm and gate in dst.
template <int DP, bool exact>
static __global__ void __launch_bounds__(GDN_SCAN_COLS * GDN_LANES, 3) luce_gdn_scan_kernel(const gdn_args a, const gdn_temp temp) {
    constexpr int n_threads = GDN_SCAN_COLS * GDN_LANES;
    constexpr int F         = DP / GDN_LANES;

    __shared__ __align__(16) gdn_tile<DP> tiles[2];
    __shared__ float out[GDN_SCAN_ROWS][GDN_SCAN_COLS];

    const int d    = exact ? DP : a.d;
    const int lane = threadIdx.x % GDN_LANES;
    const int mine = threadIdx.x / GDN_LANES;
    const int col0 = blockIdx.x * GDN_SCAN_COLS;
    const int hv   = blockIdx.y;
    const int hk   = hv % a.nk;
    if (col0 >= d) {
        return;
    }

    for (int slot = blockIdx.z; slot < a.n_slot; slot += gridDim.z) {
        const int first = temp.runs[2 * slot];
        const int end   = temp.runs[2 * slot + 1];
        if (first < 0) {
            continue;
        }
        const int p0 = a.rows[first].position;

        float s[F];
        if (p0 == 0 && !a.leak) {
#pragma unroll
            for (int f = 0; f < F; f++) {
                s[f] = 0.0f;
            }
        } else {
            gdn_load_state<F, exact>(gdn_state(a, slot, p0, hv), d, col0 + mine, lane, s);
        }

        gdn_stage<DP>(a, temp, tiles[0], first, min(GDN_SCAN_ROWS, end - first), hk, hv, col0);
        gdn_copies_end();
        int at = 0;
        for (int r = first; r < end; r += GDN_SCAN_ROWS, at ^= 1) {
            const int n    = min(GDN_SCAN_ROWS, end - r);
            const int next = r + GDN_SCAN_ROWS;
            if (next < end) {
                gdn_stage<DP>(a, temp, tiles[at ^ 1], next, min(GDN_SCAN_ROWS, end - next), hk, hv, col0);
            }
            gdn_copies_end();
            gdn_copied();
            __syncthreads();

            const gdn_tile<DP> & tile = tiles[at];
            for (int j = 0; j < n; j++) {
                float q[F], k[F];
                gdn_load_vector<F>(tile.qk[j], lane, q);
                gdn_load_vector<F>(tile.qk[j] + DP, lane, k);
                const float kq    = tile.qk[j][2 * DP];
                const float decay = tile.v[j][GDN_SCAN_COLS];
                const float beta  = tile.v[j][GDN_SCAN_COLS + 1];
                const float sk = warp_reduce_sum<GDN_LANES>(gdn_part<F>(s, k));
                const float sq = warp_reduce_sum<GDN_LANES>(gdn_part<F>(s, q));
                const float u  = beta * fmaf(-decay, sk, tile.v[j][mine]);
#pragma unroll
                for (int f = 0; f < F; f++) {
                    s[f] = fmaf(k[f], u, s[f] * decay);
                }
                if (lane == 0) {
                    out[j][mine] = fmaf(decay, sq, u * kq);
                }
            }
            __syncthreads();
            for (int j = threadIdx.x; j < n * GDN_SCAN_COLS; j += n_threads) {
                const int row = j / GDN_SCAN_COLS;
                const int col = j % GDN_SCAN_COLS;
                if (col0 + col < d) {
                    a.dst[((int64_t) (r + row) * a.nv + hv) * d + col0 + col] = out[row][col];
                }
            }
        }
        gdn_store_state<F, exact>(gdn_state(a, slot, p0 + (end - first), hv), d, col0 + mine, lane, s);
        __syncthreads(); // the outputs of the last tile are read before the next sequence writes any
    }
}

// grid (T, ceil(nv / 4)); a warp: a value head's outputs of one row, and what the history keeps of it
template <int DP>
static __global__ void __launch_bounds__(128) luce_gdn_finish_kernel(const gdn_args a) {
    constexpr int E = DP / 32;
    const int     lane = threadIdx.x % 32;
    const int     hv   = blockIdx.y * 4 + threadIdx.x / 32;
    const int64_t r    = blockIdx.x;
    if (hv >= a.nv) {
        return;
    }
    const luce_row row = a.rows[r];
    const int      i   = lane * E;
    float        * y   = a.dst + (r * a.nv + hv) * a.d;

    float x[E], z[E];
    if (row.slot >= 0) {
        gdn_load_channels<E>(y, i, a.d, a.aligned, x);
        gdn_load_channels<E>(a.z + r * a.z_stride + hv * a.d, i, a.d, a.aligned, z);
        const float scale = rsqrtf(gdn_warp_dot<E>(x, x) / a.d + a.eps);
#pragma unroll
        for (int e = 0; e < E; e++) {
            const float gain = i + e < a.d ? a.misc[2 * a.nv + i + e] : 0.0f;
            x[e] = x[e] * scale * gain * luce_sigmoid(z[e]);
        }
    } else {
#pragma unroll
        for (int e = 0; e < E; e++) {
            x[e] = 0.0f;
        }
    }
    if (E == 4 && a.aligned) {
        if (i < a.d) {
            *(float4 *) (y + i) = make_float4(x[0], x[1 % E], x[2 % E], x[3 % E]);
        }
    } else {
#pragma unroll
        for (int e = 0; e < E; e++) {
            if (i + e < a.d) {
                y[i + e] = x[e];
            }
        }
    }

    if (row.slot < 0 || (r + a.history_ring < a.n_row && a.rows[r + a.history_ring].slot == row.slot)) {
        return;
    }
    float       * kept = gdn_history(a, row.slot, row.position);
    const float * raw  = a.qkv + r * a.qkv_stride;
    for (int part = hv < a.nk ? 0 : 2; part < 3; part++) {
        const int c0 = (part == 0 ? hv : part == 1 ? a.nk + hv : 2 * a.nk + hv) * a.d;
        for (int c = lane; c < a.d; c += 32) {
            kept[c0 + c] = raw[c0 + c];
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------

static gdn_args gdn_arguments(const ggml_tensor * dst) {
    gdn_args a = {};
    a.qkv          = (const float *) dst->src[0]->data;
    a.z            = (const float *) dst->src[1]->data;
    a.beta         = (const float *) dst->src[2]->data;
    a.alpha        = (const float *) dst->src[3]->data;
    a.conv         = (const float *) dst->src[4]->data;
    a.misc         = (const float *) dst->src[5]->data;
    a.state        = (float *) dst->src[6]->data;
    a.history      = (float *) dst->src[7]->data;
    a.dst          = (float *) dst->data;
    a.rows         = luce_rows(dst->src[8]);
    a.qkv_stride   = luce_stride(dst->src[0]);
    a.z_stride     = luce_stride(dst->src[1]);
    a.beta_stride  = luce_stride(dst->src[2]);
    a.alpha_stride = luce_stride(dst->src[3]);
    a.nk           = ggml_get_op_params_i32(dst, 1);
    a.nv           = (int) dst->src[2]->ne[0];
    a.d            = (int) (dst->ne[0] / a.nv);
    a.channels     = (int) dst->src[0]->ne[0];
    a.n_row        = (int) dst->ne[1];
    a.n_tap        = (int) dst->src[4]->ne[1];
    a.state_ring   = (int) dst->src[6]->ne[1];
    a.history_ring = (int) dst->src[7]->ne[1];
    a.n_slot       = (int) dst->src[6]->ne[2];
    a.eps          = ggml_get_op_params_f32(dst, 2);
    a.keep_rows    = ggml_get_op_params_i32(dst, 3) != 0;
    a.leak         = ggml_get_op_params_i32(dst, 4) == GGML_LUCE_FAULT_NAN_LEAK;
    const uintptr_t starts = (uintptr_t) a.qkv | (uintptr_t) a.z | (uintptr_t) a.conv | (uintptr_t) a.history | (uintptr_t) a.dst;
    a.aligned = a.d % 4 == 0 && a.qkv_stride % 4 == 0 && a.z_stride % 4 == 0 && starts % 16 == 0;
    return a;
}

// the row kernel, its start overlapping the end of the kernel before it where the device can
template <int DP, int KT, bool exact, int CL>
static void gdn_launch_rows(cudaStream_t stream, const gdn_args & a) {
    const dim3 grid(a.n_row, a.nv, CL);
    const int  n_threads = gdn_row_block<DP, CL>::n_threads;
#if defined(GGML_CUDA_USE_PDL)
    static const bool overlap = []() {
        const char * env = getenv("GGML_CUDA_PDL");
        return env == nullptr || atoi(env) != 0;
    }();
    void (*kernel)(const gdn_args) = luce_gdn_row_kernel<DP, KT, exact, CL>;
    LUCE_SET_SHARED_CARVEOUT(kernel);
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t  config = {};
    config.gridDim  = grid;
    config.blockDim = dim3(n_threads);
    config.stream   = stream;
    config.attrs    = attributes;
    if (CL > 1) {
        attributes[config.numAttrs].id               = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim.x = 1;
        attributes[config.numAttrs].val.clusterDim.y = 1;
        attributes[config.numAttrs].val.clusterDim.z = CL;
        config.numAttrs++;
    }
    if (overlap && ggml_cuda_kernel_can_use_pdl((const void *) kernel)) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs++;
    }
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, a));
#else
    luce_gdn_row_kernel<DP, KT, exact, CL><<<grid, n_threads, 0, stream>>>(a);
    CUDA_CHECK(cudaGetLastError());
#endif
}

template <int DP, int KT, bool exact>
static void gdn_launch(ggml_backend_cuda_context & ctx, const gdn_args & a) {
    cudaStream_t stream = ctx.stream();
    if (a.keep_rows) {
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
        if constexpr (exact) {
            const int cc = ggml_cuda_info().devices[ctx.device].cc;
            if (ggml_cuda_highest_compiled_arch(cc) >= GGML_CUDA_CC_HOPPER) {
                ggml_luce_path("rows in clusters");
                gdn_launch_rows<DP, KT, exact, GDN_CLUSTER>(stream, a);
                return;
            }
        }
#endif
        ggml_luce_path("rows");
        gdn_launch_rows<DP, KT, exact, 1>(stream, a);
        return;
    }
    ggml_luce_path("chunk scan");
    ggml_cuda_pool_alloc<float> qk(ctx.pool(), (size_t) a.n_row * a.nk * (2 * DP + 4));
    ggml_cuda_pool_alloc<float> v(ctx.pool(), (size_t) a.n_row * a.nv * (DP + 4));
    ggml_cuda_pool_alloc<int>   runs(ctx.pool(), (size_t) a.n_slot * 2);
    const gdn_temp temp = { qk.get(), v.get(), runs.get() };

    CUDA_CHECK(cudaMemsetAsync(temp.runs, 0xff, (size_t) a.n_slot * 2 * sizeof(int), stream));
    const dim3 prepare((a.nk + a.nv + 3) / 4, (a.n_row + GDN_PREP_ROWS - 1) / GDN_PREP_ROWS);
    luce_gdn_prepare_kernel<DP, KT><<<prepare, 128, 0, stream>>>(a, temp);
    CUDA_CHECK(cudaGetLastError());
    const dim3 scan(DP / GDN_SCAN_COLS, a.nv, std::min(a.n_slot, GDN_SCAN_SLOTS));
    luce_gdn_scan_kernel<DP, exact><<<scan, GDN_SCAN_COLS * GDN_LANES, 0, stream>>>(a, temp);
    CUDA_CHECK(cudaGetLastError());
    luce_gdn_finish_kernel<DP><<<dim3(a.n_row, (a.nv + 3) / 4), 128, 0, stream>>>(a);
    CUDA_CHECK(cudaGetLastError());
}

template <int DP, bool exact>
static void gdn_launch(ggml_backend_cuda_context & ctx, const gdn_args & a) {
    if (a.n_tap <= 4) {
        gdn_launch<DP, 4, exact>(ctx, a);
    } else {
        gdn_launch<DP, GDN_MAX_TAPS, exact>(ctx, a);
    }
}

void luce_cuda_gdn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const gdn_args a = gdn_arguments(dst);
    GGML_ASSERT(a.d <= GDN_MAX_D && a.n_tap <= GDN_MAX_TAPS);
    if (a.n_row == 0) {
        return;
    }
    if (a.d == 128 && (uintptr_t) a.state % 16 == 0) {
        gdn_launch<128, true>(ctx, a);
    } else if (a.d > 64) {
        gdn_launch<128, false>(ctx, a);
    } else if (a.d > 32) {
        gdn_launch<64, false>(ctx, a);
    } else {
        gdn_launch<32, false>(ctx, a);
    }
}

bool luce_cuda_gdn_supports(int device, const ggml_tensor * op) {
    GGML_UNUSED(device);
    const int64_t nv = op->src[2]->ne[0];
    const int64_t d  = op->ne[0] / nv;
    if (d > GDN_MAX_D) {
        GGML_LOG_ERROR("luce op gdn: expected heads of at most %d values on this device, found %d\n", GDN_MAX_D, (int) d);
        return false;
    }
    if (nv > 65535 || op->ne[1] > 65535 * GDN_PREP_ROWS) {
        GGML_LOG_ERROR("luce op gdn: expected at most 65535 heads and %d rows, found %d and %d\n", 65535 * GDN_PREP_ROWS,
                       (int) nv, (int) op->ne[1]);
        return false;
    }
    return true;
}
