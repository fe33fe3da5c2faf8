// pyluce: what a warp does with its tiles in a kernel made for a launch (luce-lean.cuh): asks for them, multiplies, and stores what follows the sums.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-lean-table.cuh"
#include "luce-mmv-copy.cuh"
#include "luce-mmv-dot.cuh"

#include "unary.cuh"

// the warp's own things
struct lean_warp {
    char *     ring;
    uint64_t * full;
    char *     x;      // columns in shared memory
    int        lane;
    int        tile;   // next to compute
    int        asked;  // next to ask for
    int        end;
    int        nobody; // bit per stage: its pick is not here
    int        pair;   // of row and pick whose expert is known
    const char * expert; // NULL: not here
};

template <class R>
static __device__ __forceinline__ void lean_request(const lean_job & job, lean_warp & p, int stage, int stage_bytes) {
    const char * from;
    if constexpr (R::ids) {
        const int pair = (int) fastdiv((uint32_t) p.asked, job.tiles_of_pick);
        if (pair != p.pair) {
            const int row = (int) fastdiv((uint32_t) pair, job.picks_of_row);
            const int id  = luce_load_l2(job.ids + row * job.ids_row + (pair - row * (int) job.picks_of_row.z));
            p.pair   = pair;
            p.expert = id >= 0 && id < job.n_expert ? job.w + id * job.w_expert : nullptr;
        }
        from = p.expert ? p.expert + (int64_t) (p.asked - pair * (int) job.tiles_of_pick.z) * job.part_bytes : nullptr;
        p.nobody = (p.nobody & ~(1 << stage)) | (from ? 0 : 1 << stage);
    } else {
        from = job.w + (int64_t) p.asked * job.part_bytes;
    }
    if (p.lane == 0) {
        luce_copy_announce(p.full + stage, from ? R::n_part * job.part_bytes : 0);
        if (from) {
            char * to = p.ring + stage * stage_bytes;
#pragma unroll
            for (int part = 0; part < R::n_part; part++) {
                luce_copy(to + part * job.part_bytes, from + part * job.part_step, job.part_bytes, p.full + stage, 0);
            }
        }
    }
    p.asked++;
}

template <class R>
static __device__ __forceinline__ void lean_start(const lean_jobs & jobs, const lean_job & job, lean_warp & p) {
    for (int i = 0; i < jobs.n_stage && p.asked < p.end; i++) {
        lean_request<R>(job, p, i, jobs.stage_bytes);
    }
}

template <int lanes, int n_w, int n_col>
static __device__ __forceinline__ void lean_meet(float (&acc)[n_w][n_col]) {
#pragma unroll
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (int r = 0; r < n_w; r++) {
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                acc[r][c] += __shfl_xor_sync(0xffffffff, acc[r][c], offset, 32);
            }
        }
    }
}

// the columns of one tile by the warp that computes it
static __device__ __forceinline__ void lean_quantise_own(const lean_job & job, const float * x, int64_t x_row, int n, int x_bytes, char * out, int lane) {
    const int plane  = luce_x_plane(job.k);
    const int n_unit = job.k / 8;
    __syncwarp(); // nobody reads the last tile's any more
#pragma unroll 1
    for (int c = 0; c < n; c++) {
        const float4 * from = (const float4 *) (x + c * x_row);
#pragma unroll 1
        for (int base = 0; base < n_unit; base += 64) {
            float4 in[2][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int unit = base + lane + 32 * i;
                in[i][0] = in[i][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (unit < n_unit) {
                    in[i][0] = from[2 * unit];
                    in[i][1] = from[2 * unit + 1];
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int unit = base + lane + 32 * i;
                if (base + 32 * i < n_unit) {
                    ring_quantise_unit(in[i][0], in[i][1], unit, job.k, plane, unit < n_unit ? out + c * x_bytes : nullptr);
                }
            }
        }
    }
    __syncwarp();
}

// what follows the sums of a tile, for columns first, first + 1, ...; xn: LUCE_HC_MIX's inputs
template <class R, int n_col, int n_w>
static __device__ __forceinline__ void lean_store(
        const lean_job & job, float * dst, int first, int n_real, int value, int lane, const float (&xn)[R::rows][n_col], const float (&acc)[n_w][n_col]) {
    const int place = lane / R::lanes;
    if constexpr (R::epilogue == LUCE_HC_MIX) {
        static_assert(n_w == R::rows, "");
        const int t = lane % R::tile; // lanes 0 .. tile - 1 have a value each
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            float gate[R::rows];
#pragma unroll
            for (int r = 0; r < R::rows; r++) {
                gate[r] = luce_sigmoid(acc[r][c]);
            }
            float mixed = 0.0f;
#pragma unroll
            for (int s = 0; s < LEAN_STREAMS; s++) {
                const int r    = s * R::tile / R::places;
                const int from = (s * R::tile % R::places + t) * R::lanes;
                mixed = fmaf(__shfl_sync(0xffffffff, xn[r][c], from, 32), __shfl_sync(0xffffffff, gate[r], from, 32), mixed);
            }
            if (lane < R::tile && first + c < n_real) {
                dst[(first + c) * job.dst_row + value + t] = mixed * (1.0f / (float) LEAN_STREAMS);
            }
        }
    } else if (lane % R::lanes == 0) {
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            if (first + c < n_real) {
                float * to = dst + (first + c) * job.dst_row + value + place;
                if constexpr (R::epilogue == LUCE_SWIGLU) {
                    *to = ggml_cuda_op_silu_single(acc[0][c]) * acc[1][c]; // as upstream's GLU kernel does
                } else {
#pragma unroll
                    for (int r = 0; r < R::rows; r++) {
                        to[r * R::places] = R::epilogue == LUCE_SILU_SCALE ? luce_silu(acc[r][c] * job.scale) : acc[r][c];
                    }
                }
            }
        }
    }
}

template <class R, lean_columns columns, int n_col_dense>
static __device__ __forceinline__ void lean_run(const lean_jobs & jobs, const lean_job & job, lean_warp & p) {
    constexpr int  n_col  = R::ids ? 1 : n_col_dense;
    constexpr bool groups = n_col >= LEAN_GROUP; // of columns, one after the other
    const int l      = p.lane % R::lanes;
    const int place  = p.lane / R::lanes;
    const int n_real = R::ids ? 1 : jobs.n_row;
    int stage  = 0;
    int parity = 0;
    int known  = -1; // pair whose column the warp has
    ring_x<n_col> x;
    x.shared = p.x;
    x.global = nullptr;
    if constexpr (!R::ids && columns == LEAN_COLUMNS_WARP) {
        if (p.tile < p.end) {
            lean_quantise_own(job, job.x, job.x_row, n_real, jobs.x_bytes, p.x, p.lane);
        }
    }
#pragma unroll 1
    for (; p.tile < p.end; p.tile++) {
        int     value = p.tile * R::tile; // the tile's first
        int64_t row   = 0;
        float * dst   = job.dst;
        if constexpr (R::ids) {
            const int pair = (int) fastdiv((uint32_t) p.tile, job.tiles_of_pick);
            row   = fastdiv((uint32_t) pair, job.picks_of_row);
            value = (p.tile - pair * (int) job.tiles_of_pick.z) * R::tile;
            const int pick = pair - (int) row * (int) job.picks_of_row.z;
            dst += row * job.dst_row + pick * job.dst_pick;
            if (columns == LEAN_COLUMNS_WARP && pair != known && !(p.nobody >> stage & 1)) {
                lean_quantise_own(job, job.x + row * job.x_row + pick * job.x_pick, 0, 1, jobs.x_bytes, p.x, p.lane);
                known = pair;
            }
        }
        const char * from = p.ring + stage * jobs.stage_bytes;
        const bool nobody = R::ids && (p.nobody >> stage & 1);
        bool waits = true;
#pragma unroll 1
        for (int first = 0; first < n_real; first += n_col) {
            const bool last = !groups || first + n_col >= n_real;
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                x.at[c] = (R::ids ? (columns == LEAN_COLUMNS_BLOCK ? (int) row : 0) : min(first + c, n_real - 1)) * jobs.x_bytes;
            }
            float xn[R::rows][n_col];
            if constexpr (R::epilogue == LUCE_HC_MIX) { // rows are values t of streams s: number s * tile + t is row number / places of lane group number % places
#pragma unroll
                for (int r = 0; r < R::rows; r++) {
                    const int at = place + r * R::places;
#pragma unroll
                    for (int c = 0; c < n_col; c++) {
                        xn[r][c] = job.xn[min(first + c, n_real - 1) * job.xn_row + (int64_t) (at / R::tile) * job.m + value + at % R::tile];
                    }
                }
            }
            if (waits) {
                luce_copy_wait(p.full + stage, parity);
                waits = false;
            }
            constexpr int n_w = R::epilogue == LUCE_SWIGLU ? 2 : R::rows;
            float acc[n_w][n_col];
            if (!nobody) {
                const char * w[n_w];
#pragma unroll
                for (int r = 0; r < n_w; r++) {
                    const int at = place + (R::epilogue == LUCE_SWIGLU ? 0 : r * R::places);
                    if constexpr (R::epilogue == LUCE_STORE || R::epilogue == LUCE_SILU_SCALE) {
                        w[r] = from + at * job.w_row;
                    } else {
                        const int part = R::epilogue == LUCE_SWIGLU ? r : at / R::tile;
                        w[r] = from + part * job.part_bytes + at % R::tile * job.w_row;
                    }
                }
                ring_dot<R::type, n_col, n_w>(job.k, R::lanes, w, x, l, acc);
            }
            if (last) {
                __syncwarp(); // the stage is read
                if (p.asked < p.end) {
                    lean_request<R>(job, p, stage, jobs.stage_bytes);
                }
            }
            if (nobody) {
                for (int t = p.lane; t < R::tile; t += 32) {
                    dst[value + t] = 0.0f;
                }
                break;
            }
            lean_meet<R::lanes, n_w, n_col>(acc);
            lean_store<R, n_col>(job, dst, first, n_real, value, p.lane, xn, acc);
            if (last) {
                break;
            }
        }
        if (++stage == jobs.n_stage) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// Rows of F32: lane l sums groups of four l, l + 32, ... Before the kernel in front has finished a warp reads the first `ahead` of its first row, or where
// registers are few asks for them.
template <int ahead>
static __device__ __forceinline__ void lean_float_read(const lean_job & job, int row, int base, int lane, float4 (&w)[ahead]) {
    const float4 * from = (const float4 *) (job.w + (int64_t) row * job.w_row);
#pragma unroll
    for (int i = 0; i < ahead; i++) {
        const int at = base + lane + 32 * i;
        w[i] = at < job.k / 4 ? from[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// column c of a job of floats: where it lies, or where the thread block has it
static __device__ __forceinline__ const float4 * lean_float_column(const lean_jobs & jobs, const lean_job & job, const char * shared, int c) {
    return shared ? (const float4 *) (shared + c * jobs.x_bytes) : (const float4 *) (job.x + c * job.x_row);
}

template <int n_col, int ahead, bool early>
static __device__ __forceinline__ void lean_float_run(const lean_jobs & jobs, const lean_job & job, lean_warp & p, const char * shared, float4 (&w)[ahead]) {
    const int n4 = job.k / 4;
    bool here = early; // the row's first part has been read
#pragma unroll 1
    for (; p.tile < p.end; p.tile++) {
#pragma unroll 1
        for (int first = 0; first < jobs.n_row; first += n_col) {
            float acc[1][n_col];
            const float4 * x[n_col];
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                acc[0][c] = 0.0f;
                x[c] = lean_float_column(jobs, job, shared, min(first + c, jobs.n_row - 1));
            }
#pragma unroll 1
            for (int base = 0; base < n4; base += 32 * ahead) {
                if (!here) {
                    lean_float_read<ahead>(job, p.tile, base, p.lane, w);
                }
                here = n4 <= 32 * ahead; // for the next columns
#pragma unroll
                for (int i = 0; i < ahead; i++) {
                    const int at = base + p.lane + 32 * i;
                    if (at < n4) {
#pragma unroll
                        for (int c = 0; c < n_col; c++) {
                            acc[0][c] = luce_dot4(w[i], x[c][at], acc[0][c]);
                        }
                    }
                }
            }
            lean_meet<32, 1, n_col>(acc);
            if (p.lane == 0) {
#pragma unroll
                for (int c = 0; c < n_col; c++) {
                    if (first + c < jobs.n_row) {
                        job.dst[(first + c) * job.dst_row + p.tile] = acc[0][c];
                    }
                }
            }
        }
        here = false;
    }
}

// A long row of F32 by a thread block: thread i sums groups of four i, i + threads, ..., lanes meet in a butterfly, warps in rising order.
template <int n_col, int threads>
static __device__ __forceinline__ void lean_wide_row(const lean_jobs & jobs) {
    static_assert(threads == LUCE_WIDE_THREADS, "the order of sums");
    constexpr int ahead = 10;
    __shared__ float sums[threads / 32][n_col];
    const lean_job & job = jobs.job[jobs.wide];
    const int      row  = (int) blockIdx.x - jobs.n_main;
    const int      n4   = job.k / 4;
    const float4 * from = (const float4 *) (job.w + (int64_t) row * job.w_row);
    float4 w[ahead];
    bool   synced = false;
#pragma unroll 1
    for (int first = 0; first < jobs.n_row; first += n_col) {
        float acc[n_col];
        const float4 * x[n_col];
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            acc[c] = 0.0f;
            x[c]   = lean_float_column(jobs, job, nullptr, min(first + c, jobs.n_row - 1));
        }
#pragma unroll 1
        for (int base = 0; base < n4; base += ahead * threads) {
#pragma unroll
            for (int i = 0; i < ahead; i++) {
                const int at = base + i * threads + (int) threadIdx.x;
                w[i] = at < n4 ? from[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
            if (!synced) {
                ggml_cuda_pdl_sync();
                synced = true;
            }
#pragma unroll
            for (int i = 0; i < ahead; i++) {
                const int at = base + i * threads + (int) threadIdx.x;
                if (at < n4) {
#pragma unroll
                    for (int c = 0; c < n_col; c++) {
                        acc[c] = luce_dot4(w[i], x[c][at], acc[c]);
                    }
                }
            }
        }
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            acc[c] = warp_reduce_sum<32>(acc[c]);
            if (threadIdx.x % 32 == 0) {
                sums[threadIdx.x / 32][c] = acc[c];
            }
        }
        __syncthreads();
        const int c = (int) threadIdx.x;
        if (c < n_col && first + c < jobs.n_row) {
            float sum = sums[0][c];
            for (int i = 1; i < threads / 32; i++) {
                sum += sums[i][c];
            }
            job.dst[(first + c) * job.dst_row + row] = sum;
        }
        __syncthreads();
    }
}
