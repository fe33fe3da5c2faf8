// pyluce: the kernel of a row graph's matrix products, for the types and sizes of most weights.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// The rows of weights of a job's values are divided among its thread blocks and their warps. A warp brings its rows into shared
// memory a tile at a time, through a ring of its own, so that no barrier stands between the memory and the sums: on Hopper
// by bulk copies, of which the first are asked for before the kernel in front has finished (weights wait for nobody). Columns are
// quantised to 8 bits once a thread block; F32, F16 and BF16 weights meet them as they are.
// Of a weight row and a column, lane l of `lanes` sums units l, l + lanes, ... of the row, then the lanes meet in a butterfly. That depends
// on the type and the row's length alone: bits are the same for any number of columns, rows or thread blocks, fused or not.
#pragma once

#include "luce-launch.cuh"
#include "luce-mmv-copy.cuh"
#include "luce-mmv-dot.cuh"
#include "luce-mmv.cuh"

#include "unary.cuh"

// column `c` of a job: a row of the graph, or with ids and an x for each pick, a pair of row and pick
static __device__ __forceinline__ const float * ring_column(const luce_job & job, int c) {
    if (job.x_pick != 0) {
        return job.x + (int64_t) (c / job.n_used) * job.x_row + (int64_t) (c % job.n_used) * job.x_pick;
    }
    return job.x + (int64_t) c * job.x_row;
}

// Columns first .. first + n - 1 into 8 bits at `out`: 4 lanes a block of 32 values, scale max |x| / 127. What a thread reads is
// under way before it uses the first of it.
template <int depth, int threads>
__device__ __forceinline__ void ring_quantise(const luce_job & job, int first, int n, char * out) {
    const int per_column = job.k / 8; // units of 8 values; a multiple of 8, so that four neighbours have one column
    const int n_unit     = per_column * n;
    const int plane      = luce_x_plane(job.k);
    const int bytes      = luce_x_bytes(job.k);
    for (int base = 0; base < n_unit; base += depth * threads) {
        float4 in[depth][2];
#pragma unroll
        for (int i = 0; i < depth; i++) {
            const int unit = base + i * threads + (int) threadIdx.x;
            in[i][0] = in[i][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (unit < n_unit) {
                const int      c  = n == 1 ? 0 : unit / per_column;
                const float4 * at = (const float4 *) (ring_column(job, first + c) + (unit - c * per_column) * 8);
                in[i][0] = at[0];
                in[i][1] = at[1];
            }
        }
#pragma unroll
        for (int i = 0; i < depth; i++) {
            if (base + i * threads >= n_unit) {
                break;
            }
            const int unit = base + i * threads + (int) threadIdx.x;
            const int c    = n == 1 ? 0 : unit / per_column;
            ring_quantise_unit(in[i][0], in[i][1], unit - c * per_column, job.k, plane, unit < n_unit ? out + c * bytes : nullptr);
        }
    }
}

// the columns as they are
template <int threads>
__device__ __forceinline__ void ring_copy_columns(const luce_job & job, int first, int n, float4 * out) {
    const int per_column = job.k / 4;
    for (int i = threadIdx.x; i < per_column * n; i += threads) {
        out[i] = ((const float4 *) ring_column(job, first + i / per_column))[i % per_column];
    }
}

// A row of weights is row `row` of part `s`: a tile has `n_sub` parts of consecutive rows. Bytes from part to part:
static __device__ __forceinline__ int64_t ring_part_step(const luce_job & job) {
    return job.w_up ? job.w_up - job.w : job.m * job.w_row;
}

// Where a warp is among its values: at task `task` of group `group` (columns of a dense job, or a pair of row and pick).
struct ring_place {
    int position;
    int group;
    int task;
    int expert;     // of a job with ids; -1: none, and the values are zero
    const char * w; // the group's first row of weights
};

static __device__ __forceinline__ void ring_enter(const luce_job & job, ring_place & at, int first_group, int expert_of_lane) {
    at.expert = job.ids ? __shfl_sync(0xffffffff, expert_of_lane, at.group - first_group, 32) : 0;
    at.w      = job.w + at.expert * job.w_expert;
}

// tasks of the tile that begins there
static __device__ __forceinline__ int ring_count(const luce_job & job, const ring_place & at, int end) {
    return min(min(job.tile, end - at.position), job.m - at.task);
}

static __device__ __forceinline__ void ring_advance(
        const luce_job & job, ring_place & at, int n, int end, int first_group, int expert_of_lane) {
    at.position += n;
    at.task     += n;
    if (at.task == job.m) {
        at.task = 0;
        at.group++;
        if (at.position < end) {
            ring_enter(job, at, first_group, expert_of_lane);
        }
    }
}

static __device__ __forceinline__ void ring_request(
        const luce_job & job, const ring_place & at, int n, int64_t part_step, char * stage, uint64_t * full, int lane) {
    if (luce_bulk_copies && lane != 0) {
        return;
    }
    const int    n_part = at.expert < 0 ? 0 : job.n_sub;
    const int    length = n * (int) job.w_row;
    const char * from   = at.w + (int64_t) at.task * (int) job.w_row;
    const auto   bytes  = [&](const char * part) { return ((int) ((uintptr_t) part & 15) + length + 15) & ~15; };
    int total = 0;
    for (int part = 0; part < n_part; part++) {
        total += bytes(from + part * part_step);
    }
    luce_copy_announce(full, total);
    for (int part = 0; part < n_part; part++) {
        luce_copy(stage, (const char *) ((uintptr_t) from & ~(uintptr_t) 15), bytes(from), full, lane);
        stage += job.part_bytes;
        from  += part_step;
    }
}

// value of task t of a tile from the sums of its rows; xv: LUCE_HC_MIX's inputs of the task
static __device__ __forceinline__ float ring_value(const luce_job & job, const float * sums, int n, int n_col, int t, const float * xv) {
    const float one = sums[t * n_col];
    switch (job.epilogue) {
        case LUCE_SILU_SCALE:
            return luce_silu(one * job.scale);
        case LUCE_SWIGLU:
            return ggml_cuda_op_silu_single(one) * sums[(n + t) * n_col]; // as upstream's GLU kernel does
        case LUCE_HC_MIX: {
            float mixed = 0.0f;
            for (int s = 0; s < job.n_sub; s++) {
                mixed = fmaf(xv[(int64_t) s * job.m], luce_sigmoid(sums[(s * n + t) * n_col]), mixed);
            }
            return mixed * (1.0f / (float) job.n_sub);
        }
        default:
            return one;
    }
}

// what a warp has of a job
struct ring_warp {
    char *     ring;
    uint64_t * full;
    float *    sums;
    const char * x;     // the thread block's columns in shared memory
    int x_bytes;        // a column
    int first_column;   // that is there
    int first_group;    // that the thread block has
    int n_row;          // of the graph
    int expert_of_lane; // of group first_group + lane
    ring_place at;      // next to compute
    ring_place asked;   // next to ask for
    int64_t part_step;
    int end;
    int lane;
};

// Two rows at once share what is read of the columns; where a register file of 128 a thread has no room for that, one after the other.
template <ggml_type type, int n_col, bool roomy>
__device__ __forceinline__ void ring_two(
        const luce_job & job, const char * const (&w)[2], bool both, const ring_x<n_col> & x, int l, float (&acc)[2][n_col]) {
    constexpr bool together = roomy || n_col <= 2 || type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_K;
    if (together && both) {
        ring_dot<type, n_col, 2>(job.k, job.lanes, w, x, l, acc);
        return;
    }
#pragma unroll
    for (int r = 0; r < (together ? 1 : 2); r++) {
        if (r == 0 || both) {
            const char * const one[1] = { w[r] };
            float sum[1][n_col];
            ring_dot<type, n_col, 1>(job.k, job.lanes, one, x, l, sum);
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                acc[r][c] = sum[0][c];
            }
        }
    }
}

template <int n_col, bool roomy>
__device__ __forceinline__ void ring_run(const luce_job & job, ring_warp & p) {
    const bool mixes  = job.epilogue == LUCE_HC_MIX;
    const bool paired = job.epilogue == LUCE_SWIGLU; // then the two rows of a value are computed together
    const int  l      = p.lane & (job.lanes - 1);
    const int  place  = p.lane / job.lanes;
    const int  places = 32 / job.lanes;
    const int  w_row  = (int) job.w_row;
    int stage  = 0;
    int parity = 0;
    int group  = -1;
    int n_real = 1;
    int64_t       row = 0; // the group's first, of the graph
    float *       dst = nullptr;
    ring_x<n_col> x;
    x.shared = p.x;
    x.global = nullptr;
    while (p.at.position < p.end) {
        const int n    = ring_count(job, p.at, p.end);
        const int task = p.at.task;
        if (p.at.group != group) {
            group = p.at.group;
            if (n_col == 1 && job.ids) {
                row = group / job.n_used;
                const int pick   = group - (int) row * job.n_used;
                const int column = job.x_pick != 0 ? group : (int) row;
                dst      = job.dst + row * job.dst_row + pick * job.dst_pick;
                x.global = p.x_bytes ? nullptr : (const char *) ring_column(job, column);
                x.at[0]  = (column - p.first_column) * p.x_bytes;
            } else {
                row      = (int64_t) group * job.columns;
                n_real   = min(job.columns, p.n_row - (int) row);
                dst      = job.dst + row * job.dst_row;
                x.global = p.x_bytes ? nullptr : (const char *) (job.x + row * job.x_row);
#pragma unroll
                for (int c = 0; c < n_col; c++) {
                    x.at[c] = min(c, n_real - 1) * (p.x_bytes ? p.x_bytes : (int) (job.x_row * sizeof(float)));
                }
            }
        }
        if (mixes && p.lane < n * n_real) {
            const float * xn = job.xn + (row + p.lane / n) * job.xn_row + task + p.lane % n;
            for (int i = 0; i < job.n_sub; i++) {
                luce_prefetch(xn + (int64_t) i * job.m);
            }
        }
        char * from = p.ring + stage * job.stage_bytes;
        luce_copy_wait(p.full + stage, parity);
        const auto release = [&]() { // the stage is read
            luce_syncwarp();
            if (p.asked.position < p.end) {
                const int next = ring_count(job, p.asked, p.end);
                ring_request(job, p.asked, next, p.part_step, from, p.full + stage, p.lane);
                ring_advance(job, p.asked, next, p.end, p.first_group, p.expert_of_lane);
            }
        };
        if (p.at.expert < 0) {
            release();
            for (int t = p.lane; t < n; t += 32) {
                dst[task + t] = 0.0f;
            }
        } else {
            const int      n_row = mixes ? n * job.n_sub : n;
            const int      step  = paired ? places : 2 * places;
            const uint32_t low   = (uint32_t) (uintptr_t) p.at.w + (uint32_t) (task * w_row); // of the tile's address
            for (int first = 0; first < n_row; first += step) {
                const bool   both = paired || first + places < n_row;
                const char * w[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    int at   = min(first + place + (paired ? 0 : r * places), n_row - 1);
                    int part = paired ? r : 0;
                    if (mixes) {
                        while (at >= n) {
                            at -= n;
                            part++;
                        }
                    }
                    w[r] = from + part * job.part_bytes + ((low + part * (uint32_t) p.part_step) & 15) + at * w_row;
                }
                float acc[2][n_col];
#pragma unroll
                for (int c = 0; c < n_col; c++) {
                    acc[0][c] = acc[1][c] = 0.0f;
                }
                switch (job.type) {
#define LUCE_CASE(TYPE) case TYPE: ring_two<TYPE, n_col, roomy>(job, w, both, x, l, acc); break;
                    LUCE_RING_TYPES(LUCE_CASE)
#undef LUCE_CASE
                    default: break;
                }
                if (first + step >= n_row) {
                    release();
                }
                for (int offset = job.lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
#pragma unroll
                        for (int c = 0; c < n_col; c++) {
                            acc[r][c] += __shfl_xor_sync(0xffffffff, acc[r][c], offset, 32);
                        }
                    }
                }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int at = first + place + r * places;
                    if (l == 0 && at < n_row && !(paired && r == 1)) {
#pragma unroll
                        for (int c = 0; c < n_col; c++) {
                            if (mixes) {
                                p.sums[at * n_col + c] = acc[r][c];
                            } else if (c < n_real) {
                                float value = acc[r][c];
                                if (paired) {
                                    value = ggml_cuda_op_silu_single(value) * acc[1][c]; // as upstream's GLU kernel does
                                } else if (job.epilogue == LUCE_SILU_SCALE) {
                                    value = luce_silu(value * job.scale);
                                }
                                dst[c * job.dst_row + task + at] = value;
                            }
                        }
                    }
                }
            }
            if (mixes) {
                luce_syncwarp(); // the sums are there
                for (int e = p.lane; e < n * n_real; e += 32) {
                    const int     c  = e / n;
                    const int     t  = e - c * n;
                    const float * xn = job.xn + (row + c) * job.xn_row + task + t;
                    dst[c * job.dst_row + task + t] = ring_value(job, p.sums + c, n, n_col, t, xn);
                }
                luce_syncwarp(); // and read
            }
        }
        ring_advance(job, p.at, n, p.end, p.first_group, p.expert_of_lane);
        if (++stage == job.n_stage) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// Long F32 rows, a thread block a row: thread i sums values 4*i .. 4*i + 3 and those every 4*LUCE_WIDE_THREADS values on, lanes meet in a
// butterfly, warps in rising order.
template <int n_col>
__device__ __forceinline__ void ring_wide(const luce_job & job, int n_row, int part, float * sums) {
    const int n_block = job.n_block;
    const int group   = part / n_block;
    const int n4      = job.k / 4;
    part -= group * n_block;
    const auto source = [&](int s, int task) {
        return (const float *) (job.w + s * ring_part_step(job) + (int64_t) task * job.w_row);
    };
    for (int s = 0; s < job.n_sub; s++) {
        for (int at = 32 * (int) threadIdx.x; at < job.k; at += 32 * LUCE_WIDE_THREADS) {
            luce_prefetch(source(s, part) + at);
        }
    }
    ggml_cuda_pdl_sync();
    const int     row    = group * job.columns;
    const int     n_real = min(job.columns, n_row - row);
    const float * x      = job.x + row * job.x_row;
    float * values = sums + (LUCE_WIDE_THREADS / 32) * n_col; // [n_sub][n_col]
    for (int task = part; task < job.m; task += n_block) {
        for (int s = 0; s < job.n_sub; s++) {
            const float4 * w = (const float4 *) source(s, task);
            float acc[n_col];
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                acc[c] = 0.0f;
            }
            constexpr int n_ahead = n_col == 1 ? 5 : n_col == 2 ? 4 : 1;
#pragma unroll n_ahead
            for (int at = (int) threadIdx.x; at < n4; at += LUCE_WIDE_THREADS) {
                const float4 v = w[at];
#pragma unroll
                for (int c = 0; c < n_col; c++) {
                    acc[c] = luce_dot4(v, ((const float4 *) (x + min(c, n_real - 1) * job.x_row))[at], acc[c]);
                }
            }
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                acc[c] = warp_reduce_sum<32>(acc[c]);
                if (threadIdx.x % 32 == 0) {
                    sums[threadIdx.x / 32 * n_col + c] = acc[c];
                }
            }
            __syncthreads();
            if ((int) threadIdx.x < n_col) {
                float sum = sums[threadIdx.x];
                for (int i = 1; i < (LUCE_WIDE_THREADS / 32); i++) {
                    sum += sums[i * n_col + (int) threadIdx.x];
                }
                values[s * n_col + (int) threadIdx.x] = sum;
            }
            __syncthreads();
        }
        if ((int) threadIdx.x < n_real) {
            const int64_t c  = row + (int) threadIdx.x;
            const float * xn = job.xn ? job.xn + c * job.xn_row + task : nullptr;
            job.dst[c * job.dst_row + task] = ring_value(job, values + threadIdx.x, 1, n_col, 0, xn);
        }
    }
}

template <int n_col, int threads>
__global__ void __launch_bounds__(threads, threads == 256 && n_col <= 4 ? 2 : 1) ring_kernel(const luce_jobs jobs) {
    extern __shared__ __align__(128) char shared[];
    __shared__ float    sums[threads / 32][LUCE_RING_ROWS * n_col];
    __shared__ uint64_t full[threads / 32][LUCE_RING_STAGES];
    int j = 0;
    while (j + 1 < jobs.n_job && (int) blockIdx.x >= jobs.job[j + 1].first_block) {
        j++;
    }
    const luce_job & job = jobs.job[j];
    const int part = (int) blockIdx.x - job.first_block;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const bool late = job.ids && !job.ids_early; // the kernel in front makes the ids
    if (!late) {
        ggml_cuda_pdl_lc();
    }
    if constexpr (threads == LUCE_WIDE_THREADS) {
        if (job.wide) {
            ring_wide<n_col>(job, jobs.n_row, part, &sums[0][0]);
            return;
        }
    }
    // the thread block's values, and the warp's among them
    const int group  = job.ids || job.n_group == 1 ? 0 : part / job.n_block;
    const int within = part - group * job.n_block;
    const int begin  = group * job.m + within * job.n_value + min(within, job.n_more);
    const int end    = begin + job.n_value + (within < job.n_more ? 1 : 0);
    ring_warp p;
    p.lane        = lane;
    p.n_row       = jobs.n_row;
    p.first_group = begin / job.m;
    const int last_group = max(end - 1, begin) / job.m;
    p.at.position = warp < job.n_active ? begin + (end - begin) * warp / job.n_active : 0;
    p.end      = warp < job.n_active ? begin + (end - begin) * (warp + 1) / job.n_active : 0;
    p.at.group = p.at.position / job.m;
    p.at.task  = p.at.position - p.at.group * job.m;
    p.part_step = ring_part_step(job);
    p.ring     = shared + job.ring_at + warp * job.n_stage * job.stage_bytes;
    p.full     = full[warp];
    p.sums     = sums[warp];
    p.expert_of_lane = 0;
    luce_copy_init(p.full, job.n_stage, lane);
    if (late) {
        ggml_cuda_pdl_sync();
        ggml_cuda_pdl_lc(); // here: who comes after this kernel may read the ids at once
    }
    if (job.ids) {
        if (p.first_group + lane <= last_group) {
            const int pair = p.first_group + lane;
            const int id   = luce_load_l2(job.ids + (int64_t) (pair / job.n_used) * job.ids_row + pair % job.n_used);
            p.expert_of_lane = id >= 0 && id < job.n_expert ? id : -1;
        }
    }
    if (p.at.position < p.end) {
        ring_enter(job, p.at, p.first_group, p.expert_of_lane);
    }
    p.asked = p.at;
    for (int i = 0; i < job.n_stage && p.asked.position < p.end; i++) {
        const int n = ring_count(job, p.asked, p.end);
        ring_request(job, p.asked, n, p.part_step, p.ring + i * job.stage_bytes, p.full + i, lane);
        ring_advance(job, p.asked, n, p.end, p.first_group, p.expert_of_lane);
    }
    if (!late) {
        ggml_cuda_pdl_sync();
    }
    // its columns
    int n_column;
    if (job.ids) {
        const int per = job.x_pick != 0 ? 1 : job.n_used;
        p.first_column = p.first_group / per;
        n_column       = last_group / per - p.first_column + 1;
    } else {
        p.first_column = p.first_group * job.columns;
        n_column       = min(job.columns, jobs.n_row - p.first_column);
    }
    p.x       = shared;
    p.x_bytes = job.x_bytes;
    if (ring_is_float(job.type)) {
        if (job.x_bytes) {
            ring_copy_columns<threads>(job, p.first_column, n_column, (float4 *) shared);
        }
    } else {
        ring_quantise<n_col == 1 && threads == 256 ? 5 : 4, threads>(job, p.first_column, n_column, shared);
    }
    __syncthreads();
    if (job.ids) {
        ring_run<1, false>(job, p);
    } else {
        ring_run<n_col, n_col == 8 && threads == 256>(job, p);
    }
}

template <int n_col, int threads>
void luce_ring_launch(ggml_backend_cuda_context & ctx, const luce_jobs & jobs, int n_block, size_t shared_bytes) {
    constexpr size_t own = sizeof(float) * (threads / 32) * LUCE_RING_ROWS * n_col + 1024;
    CUDA_SET_SHARED_MEMORY_LIMIT((ring_kernel<n_col, threads>), ggml_cuda_info().devices[ctx.device].smpbo - own);
    LUCE_SET_SHARED_CARVEOUT((ring_kernel<n_col, threads>));
    const ggml_cuda_kernel_launch_params params(dim3(n_block, 1, 1), dim3(threads, 1, 1), shared_bytes, ctx.stream());
    ggml_cuda_kernel_launch(ring_kernel<n_col, threads>, params, jobs);
}
