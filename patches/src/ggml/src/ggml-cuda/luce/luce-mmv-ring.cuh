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
#include "luce-mmv-unit.cuh"
#include "luce-mmv.cuh"

#include "unary.cuh"

constexpr int RING_THREADS = 256;
constexpr int RING_WARPS   = RING_THREADS / 32;

// column `c` of a job: a row of the graph, or with ids and an x for each pick, a pair of row and pick
static __device__ __forceinline__ const float * ring_column(const luce_job & job, int c) {
    if (job.x_pick != 0) {
        return job.x + (int64_t) (c / job.n_used) * job.x_row + (int64_t) (c % job.n_used) * job.x_pick;
    }
    return job.x + (int64_t) c * job.x_row;
}

// Columns first .. first + n - 1 into 8 bits at `out`: 4 lanes a block of 32 values, scale max |x| / 127. What a thread reads is
// under way before it uses the first of it.
template <int depth>
__device__ __forceinline__ void ring_quantise(const luce_job & job, int first, int n, char * out) {
    const int per_column = job.k / 8; // units of 8 values; a multiple of 8, so that four neighbours have one column
    const int n_unit     = per_column * n;
    const int plane      = luce_x_plane(job.k);
    const int bytes      = luce_x_bytes(job.k);
    for (int base = 0; base < n_unit; base += depth * RING_THREADS) {
        float4 in[depth][2];
#pragma unroll
        for (int i = 0; i < depth; i++) {
            const int unit = base + i * RING_THREADS + (int) threadIdx.x;
            in[i][0] = in[i][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (unit < n_unit) {
                const float4 * at = (const float4 *) (ring_column(job, first + unit / per_column) + unit % per_column * 8);
                in[i][0] = at[0];
                in[i][1] = at[1];
            }
        }
#pragma unroll
        for (int i = 0; i < depth; i++) {
            if (base + i * RING_THREADS >= n_unit) {
                break;
            }
            const int   unit = base + i * RING_THREADS + (int) threadIdx.x;
            const float v[8] = { in[i][0].x, in[i][0].y, in[i][0].z, in[i][0].w, in[i][1].x, in[i][1].y, in[i][1].z, in[i][1].w };
            float top = 0.0f;
#pragma unroll
            for (int e = 0; e < 8; e++) {
                top = fmaxf(top, fabsf(v[e]));
            }
#pragma unroll
            for (int offset = 1; offset < 4; offset *= 2) {
                top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, offset, 32));
            }
            const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
            int packed[2] = { 0, 0 };
#pragma unroll
            for (int e = 0; e < 8; e++) {
                packed[e / 4] |= (int) ((uint32_t) (uint8_t) (int8_t) __float2int_rn(v[e] * inverse) << (8 * (e % 4)));
            }
            int sum = ggml_cuda_dp4a(packed[0], 0x01010101, ggml_cuda_dp4a(packed[1], 0x01010101, 0));
#pragma unroll
            for (int offset = 1; offset < 4; offset *= 2) {
                sum += __shfl_xor_sync(0xffffffff, sum, offset, 32);
            }
            if (unit < n_unit) {
                char *    column = out + unit / per_column * bytes;
                const int block  = unit % per_column / 4;
                const int part   = unit % 4;
                *(int2 *) (column + ((block & 1) * 2 + part / 2) * plane + (block >> 1) * 16 + part % 2 * 8) = make_int2(packed[0], packed[1]);
                if (part == 0) {
                    float *     scales = (float *) (column + 4 * plane);
                    const float d      = top / 127.0f;
                    scales[block]               = d;
                    scales[job.k / 32 + block] = d * (float) sum;
                }
            }
        }
    }
}

// the columns as they are
static __device__ __forceinline__ void ring_copy_columns(const luce_job & job, int first, int n, float4 * out) {
    const int per_column = job.k / 4;
    for (int i = threadIdx.x; i < per_column * n; i += RING_THREADS) {
        out[i] = ((const float4 *) ring_column(job, first + i / per_column))[i % per_column];
    }
}

__host__ __device__ constexpr bool ring_is_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

template <ggml_type type> struct ring_float { typedef float t; };
template <> struct ring_float<GGML_TYPE_F16>  { typedef half t; };
template <> struct ring_float<GGML_TYPE_BF16> { typedef nv_bfloat16 t; };

// the columns that a thread block computes with; those beyond the real ones read the last one
template <int n_col> struct ring_x {
    const char * shared;    // in shared memory, quantised or as they are
    const char * global;    // not NULL: floats where they lie
    int          at[n_col]; // bytes
};

// the sums of n_w rows with every column, all of a row in its `lanes` lanes
template <ggml_type type, int n_col, int n_w>
__device__ __forceinline__ void ring_dot(
        const luce_job & job, const char * const (&w)[n_w], const ring_x<n_col> & x, int l, float (&acc)[n_w][n_col]) {
#pragma unroll
    for (int r = 0; r < n_w; r++) {
#pragma unroll
        for (int c = 0; c < n_col; c++) {
            acc[r][c] = 0.0f;
        }
    }
    if constexpr (ring_is_float(type)) {
        typedef typename ring_float<type>::t T;
        constexpr int n_ahead = n_col <= 2 ? 4 : 1;
#pragma unroll n_ahead
        for (int i = l; i < job.k / 4; i += job.lanes) {
            float4 a[n_w];
#pragma unroll
            for (int r = 0; r < n_w; r++) {
                a[r] = luce_widen4((const T *) w[r], i);
            }
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                const float4 v = x.global ? ((const float4 *) (x.global + x.at[c]))[i] : ((const float4 *) (x.shared + x.at[c]))[i];
#pragma unroll
                for (int r = 0; r < n_w; r++) {
                    acc[r][c] = luce_dot4(a[r], v, acc[r][c]);
                }
            }
        }
    } else {
        const int plane   = luce_x_plane(job.k);
        const int n_block = job.k / 32;
        const int n_unit  = n_block / luce_unit<type>::n_block;
        for (int u = l; u < n_unit; u += job.lanes) {
            luce_unit<type> unit[n_w];
#pragma unroll
            for (int r = 0; r < n_w; r++) {
                unit[r].load(w[r], u);
            }
#pragma unroll
            for (int h = 0; h < luce_unit<type>::n_block; h++) {
                int q[n_w][8];
#pragma unroll
                for (int r = 0; r < n_w; r++) {
                    unit[r].get(h, q[r]);
                }
#pragma unroll
                for (int c = 0; c < n_col; c++) {
                    luce_x8 v;
                    luce_load_x<luce_unit<type>::with_sum>(v, x.shared + x.at[c], plane, n_block, luce_unit<type>::block(u, h));
#pragma unroll
                    for (int r = 0; r < n_w; r++) {
                        acc[r][c] = unit[r].add(h, q[r], v, acc[r][c]);
                    }
                }
            }
        }
    }
    for (int offset = job.lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (int r = 0; r < n_w; r++) {
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                acc[r][c] += __shfl_xor_sync(0xffffffff, acc[r][c], offset, 32);
            }
        }
    }
}

// where row `row` of part `s` of a tile's weights lies in memory; a tile has `n_sub` parts of consecutive rows
static __device__ __forceinline__ const char * ring_source(const luce_job & job, int64_t expert, int s, int row) {
    const char *  w  = s == 1 && job.w_up ? job.w_up : job.w;
    const int64_t at = job.w_up ? row : (int64_t) s * job.m + row;
    return w + expert * job.w_expert + at * job.w_row;
}

// A step of a warp: tasks task .. task + n - 1 of group `group` (columns of a dense job, or a pair of row and pick).
struct ring_step {
    int group;
    int task;
    int n;
    int expert; // of a job with ids; -1: none, and the values are zero
};

static __device__ __forceinline__ ring_step ring_step_at(const luce_job & job, int position, int end, int first_group, int expert_of_lane) {
    ring_step s;
    s.group  = position / job.m;
    s.task   = position - s.group * job.m;
    s.n      = min(min(job.tile, end - position), job.m - s.task);
    s.expert = job.ids ? __shfl_sync(0xffffffff, expert_of_lane, s.group - first_group, 32) : 0;
    return s;
}

static __device__ __forceinline__ void ring_request(const luce_job & job, const ring_step & s, char * stage, uint64_t * full, int lane) {
    if (luce_bulk_copies && lane != 0) {
        return;
    }
    const int  n_part = s.expert < 0 ? 0 : job.n_sub;
    const auto begin  = [&](int part) { return (uintptr_t) ring_source(job, s.expert, part, s.task) & ~(uintptr_t) 15; };
    const auto bytes  = [&](int part) {
        return (int) (((uintptr_t) ring_source(job, s.expert, part, s.task) + s.n * job.w_row + 15 - begin(part)) & ~(uintptr_t) 15);
    };
    int total = 0;
    for (int part = 0; part < n_part; part++) {
        total += bytes(part);
    }
    luce_copy_announce(full, total);
    for (int part = 0; part < n_part; part++) {
        luce_copy(stage + part * job.part_bytes, (const char *) begin(part), bytes(part), full, lane);
    }
}

// the sums of a tile's rows with every column: sums[row * n_col + column], rows of a part together
template <ggml_type type, int n_col, int n_w>
__device__ __forceinline__ void ring_tile(
        const luce_job & job, const ring_step & s, const char * stage, const ring_x<n_col> & x, float * sums, int lane, int first) {
    const int l      = lane & (job.lanes - 1);
    const int place  = lane / job.lanes;
    const int places = 32 / job.lanes;
    const int n_row  = s.n * job.n_sub;
    const char * w[n_w];
#pragma unroll
    for (int r = 0; r < n_w; r++) {
        const int row  = min(first + place + r * places, n_row - 1);
        int part = 0;
        int at   = row;
        while (at >= s.n) {
            at -= s.n;
            part++;
        }
        const int beside = (int) ((uintptr_t) ring_source(job, s.expert, part, s.task) & 15);
        w[r] = stage + part * job.part_bytes + beside + at * (int) job.w_row;
    }
    float acc[n_w][n_col];
    ring_dot<type, n_col, n_w>(job, w, x, l, acc);
#pragma unroll
    for (int r = 0; r < n_w; r++) {
        const int row = first + place + r * places;
        if (l == 0 && row < n_row) {
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                sums[row * n_col + c] = acc[r][c];
            }
        }
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
    int position;       // next to compute
    int asked;          // next to ask for
    int end;
    int lane;
};

// sums of a tile, rows `places` or twice as many at a time
template <ggml_type type, int n_col>
__device__ __forceinline__ void ring_sums(
        const luce_job & job, const ring_step & s, const char * stage, const ring_x<n_col> & x, float * sums, int lane) {
    // two at once share what is read of the columns; a register file of 128 a thread has no room for it in every type
    constexpr bool twice = n_col > 4 || (n_col == 4 && (type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_K));
    const int places = 32 / job.lanes;
    const int n_row  = s.n * job.n_sub;
    int first = 0;
    if constexpr (twice) {
        for (; first + places < n_row; first += 2 * places) {
            ring_tile<type, n_col, 2>(job, s, stage, x, sums, lane, first);
        }
    }
    for (; first < n_row; first += places) {
        ring_tile<type, n_col, 1>(job, s, stage, x, sums, lane, first);
    }
}

template <int n_col>
__device__ __forceinline__ void ring_run(const luce_job & job, ring_warp & p) {
    int stage  = 0;
    int parity = 0;
    while (p.position < p.end) {
        const ring_step s = ring_step_at(job, p.position, p.end, p.first_group, p.expert_of_lane);
        int n_real = 1;
        ring_x<n_col> x;
        int64_t       row;
        int64_t       out;
        x.shared = p.x;
        if (n_col == 1 && job.ids) {
            const int column = job.x_pick != 0 ? s.group : s.group / job.n_used;
            row = s.group / job.n_used;
            out = row * job.dst_row + (int64_t) (s.group % job.n_used) * job.dst_pick;
            x.global = p.x_bytes ? nullptr : (const char *) ring_column(job, column);
            x.at[0]  = (column - p.first_column) * p.x_bytes;
        } else {
            row    = (int64_t) s.group * job.columns;
            n_real = min(job.columns, p.n_row - (int) row);
            out    = row * job.dst_row;
            x.global = p.x_bytes ? nullptr : (const char *) (job.x + row * job.x_row);
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                x.at[c] = min(c, n_real - 1) * (p.x_bytes ? p.x_bytes : (int) (job.x_row * sizeof(float)));
            }
        }
        if (job.epilogue == LUCE_HC_MIX && p.lane < s.n * n_real) {
            const float * xn = job.xn + (row + p.lane / s.n) * job.xn_row + s.task + p.lane % s.n;
            for (int i = 0; i < job.n_sub; i++) {
                luce_prefetch(xn + (int64_t) i * job.m);
            }
        }
        char * at = p.ring + stage * job.stage_bytes;
        luce_copy_wait(p.full + stage, parity);
        if (s.expert >= 0) {
            switch (job.type) {
#define LUCE_CASE(TYPE) case TYPE: ring_sums<TYPE, n_col>(job, s, at, x, p.sums, p.lane); break;
                LUCE_RING_TYPES(LUCE_CASE)
#undef LUCE_CASE
                default: break;
            }
        }
        luce_syncwarp(); // the sums are there, and the stage is read
        if (p.asked < p.end) {
            const ring_step next = ring_step_at(job, p.asked, p.end, p.first_group, p.expert_of_lane);
            ring_request(job, next, at, p.full + stage, p.lane);
            p.asked += next.n;
        }
        for (int e = p.lane; e < s.n * n_real; e += 32) {
            const int     c  = e / s.n;
            const int     t  = e - c * s.n;
            const float * xn = job.xn ? job.xn + (row + c) * job.xn_row + s.task + t : nullptr;
            job.dst[out + c * job.dst_row + s.task + t] = s.expert < 0 ? 0.0f : ring_value(job, p.sums + c, s.n, n_col, t, xn);
        }
        luce_syncwarp(); // the sums are read
        p.position += s.n;
        if (++stage == job.n_stage) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// Long F32 rows, a thread block a row: thread i sums values 4*i .. 4*i + 3 and those every 4*RING_THREADS values on, lanes meet in a
// butterfly, warps in rising order.
template <int n_col>
__device__ __forceinline__ void ring_wide(const luce_job & job, int n_row, int part, float * sums) {
    const int n_block = job.n_block;
    const int group   = part / n_block;
    const int n4      = job.k / 4;
    part -= group * n_block;
    for (int s = 0; s < job.n_sub; s++) {
        for (int at = 32 * (int) threadIdx.x; at < job.k; at += 32 * RING_THREADS) {
            luce_prefetch((const float *) ring_source(job, 0, s, part) + at);
        }
    }
    ggml_cuda_pdl_sync();
    const int     row    = group * job.columns;
    const int     n_real = min(job.columns, n_row - row);
    const float * x      = job.x + row * job.x_row;
    float * values = sums + RING_WARPS * n_col; // [n_sub][n_col]
    for (int task = part; task < job.m; task += n_block) {
        for (int s = 0; s < job.n_sub; s++) {
            const float4 * w = (const float4 *) ring_source(job, 0, s, task);
            float acc[n_col];
#pragma unroll
            for (int c = 0; c < n_col; c++) {
                acc[c] = 0.0f;
            }
            constexpr int n_ahead = n_col == 1 ? 5 : n_col == 2 ? 4 : 1;
#pragma unroll n_ahead
            for (int at = (int) threadIdx.x; at < n4; at += RING_THREADS) {
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
                for (int i = 1; i < RING_WARPS; i++) {
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

template <int n_col>
__global__ void __launch_bounds__(RING_THREADS, n_col <= 4 ? 2 : 1) ring_kernel(const luce_jobs jobs) {
    extern __shared__ __align__(128) char shared[];
    __shared__ float    sums[RING_WARPS][LUCE_RING_ROWS * n_col];
    __shared__ uint64_t full[RING_WARPS][LUCE_RING_STAGES];
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
    if (job.wide) {
        ring_wide<n_col>(job, jobs.n_row, part, &sums[0][0]);
        return;
    }
    // the thread block's values, and the warp's among them
    const int64_t all   = (int64_t) job.n_group * job.m;
    const int     begin = (int) (all * part / (job.n_block * (job.ids ? 1 : job.n_group)));
    const int     end   = (int) (all * (part + 1) / (job.n_block * (job.ids ? 1 : job.n_group)));
    ring_warp p;
    p.lane        = lane;
    p.n_row       = jobs.n_row;
    p.first_group = begin / job.m;
    const int last_group = max(end - 1, begin) / job.m;
    p.position = warp < job.n_active ? begin + (end - begin) * warp / job.n_active : 0;
    p.end      = warp < job.n_active ? begin + (end - begin) * (warp + 1) / job.n_active : 0;
    p.asked    = p.position;
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
    for (int i = 0; i < job.n_stage && p.asked < p.end; i++) {
        const ring_step s = ring_step_at(job, p.asked, p.end, p.first_group, p.expert_of_lane);
        ring_request(job, s, p.ring + i * job.stage_bytes, p.full + i, lane);
        p.asked += s.n;
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
            ring_copy_columns(job, p.first_column, n_column, (float4 *) shared);
        }
    } else {
        ring_quantise<n_col == 1 ? 5 : 4>(job, p.first_column, n_column, shared);
    }
    __syncthreads();
    if (job.ids) {
        ring_run<1>(job, p);
    } else {
        ring_run<n_col>(job, p);
    }
}

template <int n_col>
void luce_ring_launch(ggml_backend_cuda_context & ctx, const luce_jobs & jobs, int n_block, size_t shared_bytes) {
    CUDA_SET_SHARED_MEMORY_LIMIT(ring_kernel<n_col>, ggml_cuda_info().devices[ctx.device].smpbo - sizeof(float) * RING_WARPS * LUCE_RING_ROWS * n_col - 1024);
    LUCE_SET_SHARED_CARVEOUT(ring_kernel<n_col>);
    const ggml_cuda_kernel_launch_params params(dim3(n_block), dim3(RING_THREADS), shared_bytes, ctx.stream());
    ggml_cuda_kernel_launch(ring_kernel<n_col>, params, jobs);
}
