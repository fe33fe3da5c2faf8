// pyluce: scores of blocks for sparse attention.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-launch.cuh"
#include "luce-qsa-select.cuh"

#include "ggml-luce-path.h"

#define LUCE_SCORE_THREADS 256

// One row and n_key blocks; a thread a (block, head). grid: (tiles of n_key blocks, rows of the batch). d4: quarter of d, or 0
template <int n_key, int d4_fixed>
static __global__ __launch_bounds__(LUCE_SCORE_THREADS) void luce_score_rows_kernel(const luce_select_args a) {
    constexpr int n_lane = LUCE_SCORE_THREADS / n_key; // heads at a time
    ggml_cuda_pdl_lc();
    const luce_row row = a.rows[a.row0 + blockIdx.y];
    const int      n   = luce_complete_blocks(a, row);
    const int      b0  = blockIdx.x * n_key;
    if (n <= a.n_top || b0 >= n) {
        ggml_cuda_pdl_sync();
        return;
    }
    extern __shared__ float4 luce_score_shared[];
    __shared__ const float4 * from[n_key];
    const int d4     = d4_fixed > 0 ? d4_fixed : a.d / 4;
    const int stride = d4 | 1; // float4; odd, so that eight keys in turn lie in different banks
    float4 * keys = luce_score_shared;       // [n_key][stride]
    float4 * q    = keys + n_key * stride;   // [n_head][d4]
    float  * dots = (float *) (q + a.n_head * d4); // [n_head][n_key]

    if (threadIdx.x < n_key) {
        // past the last block: its key again, whose scores there are not kept
        from[threadIdx.x] = (const float4 *) luce_block_key(a, row.slot, min(b0 + (int) threadIdx.x, n - 1));
    }
    ggml_cuda_pdl_sync();
    const float4 * q_row = (const float4 *) (a.q + (int64_t) (a.row0 + blockIdx.y) * a.n_head * a.d);
    for (int i = threadIdx.x; i < a.n_head * d4; i += LUCE_SCORE_THREADS) {
        q[i] = q_row[i];
    }
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < n_key * d4; i += LUCE_SCORE_THREADS) {
        const int k = i / d4;
        const int c = i - k * d4;
        keys[k * stride + c] = from[k][c];
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

static __device__ __forceinline__ int luce_warp_max(int x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x = max(x, __shfl_xor_sync(0xffffffff, x, offset, 32));
    }
    return x;
}

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

    // each warp looks at all the rows, a lane a row; scored: blocks that a row needs scores of
    const int      lane   = threadIdx.x % 32;
    const luce_row own    = lane < n_row ? a.rows[a.row0 + r0 + lane] : luce_row{ -1, 0, { 0, 0 } };
    const int      n_own  = luce_complete_blocks(a, own);
    const int      scored = n_own > a.n_top ? n_own : 0;

    // the rows of one slot at a time
    for (int begin = 0; begin < n_row;) {
        const int32_t  slot   = __shfl_sync(0xffffffff, own.slot, begin, 32);
        const uint32_t others = luce_lanes(lane >= n_row || own.slot != slot) & (0xffffffffu << begin);
        const int      end    = others == 0 ? n_row : __ffs(others) - 1;
        const int      n_max  = luce_warp_max(lane >= begin && lane < end ? scored : 0);
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

template <int n_key, int d4_fixed>
static void luce_score_rows(const luce_select_args & a, cudaStream_t stream) {
    const size_t n_shared = ((size_t) n_key * (a.d / 4 | 1) + (size_t) a.n_head * (a.d / 4)) * sizeof(float4) +
        (size_t) a.n_head * n_key * sizeof(float);
    const dim3 grid((a.n_block_max + n_key - 1) / n_key, a.n_batch);
    const auto kernel = luce_score_rows_kernel<n_key, d4_fixed>;
    LUCE_SET_SHARED_CARVEOUT(kernel);
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(grid, dim3(LUCE_SCORE_THREADS), n_shared, stream), a);
}

void luce_score_blocks(const luce_select_args & a, cudaStream_t stream) {
    if (a.n_row >= LUCE_TILE_ROWS && a.n_head == 4 && a.d % LUCE_TILE_D == 0) {
        ggml_luce_path("tile scores");
        const dim3 grid((a.n_block_max + LUCE_TILE_KEYS - 1) / LUCE_TILE_KEYS, (a.n_batch + LUCE_TILE_ROWS - 1) / LUCE_TILE_ROWS);
        luce_score_tile_kernel<<<grid, LUCE_SCORE_THREADS, 0, stream>>>(a);
    } else if (a.d == 128) {
        ggml_luce_path("row scores");
        luce_score_rows<64, 32>(a, stream);
    } else if (a.d < 128) {
        ggml_luce_path("row scores");
        luce_score_rows<64, 0>(a, stream);
    } else {
        ggml_luce_path("row scores");
        luce_score_rows<32, 0>(a, stream);
    }
}
