// pyluce: a row graph's matrix products where a launch takes microseconds: kernels made for a launch's types and what follows its products.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// The ring kernel (luce-mmv-ring.cuh) takes any mixture of jobs; at the sizes of a decode step its choices, made while it runs, cost more
// than the sums. Here a kernel is compiled for two roles, each with its type of weights, the lanes that share a row and its epilogue. Weights come as tiles: the
// rows of a few values, whole multiples of 16 bytes, by bulk copies of which the first are asked for before the kernel in front has finished. A warp
// owns a range of a job's tiles. Hopper and later; sums are luce-mmv-dot.cuh's, so bits are the ring kernel's.
#pragma once

#include "luce-launch.cuh"
#include "luce-lean-run.cuh"

template <class R0, class R1, lean_columns columns, int n_col, int threads, int depth, int n_beside>
__global__ void __launch_bounds__(threads, n_beside) lean_kernel(const lean_jobs jobs) {
    constexpr int n_warp = threads / 32;
    constexpr bool early = threads <= 128;
    constexpr int  ahead = early ? 20 : 5;
    constexpr bool copies = columns == LEAN_COLUMNS_NONE && n_col >= LEAN_GROUP; // many columns of floats are read once
    extern __shared__ __align__(128) char shared[];
    __shared__ uint64_t full[n_warp][LEAN_STAGES];
    __shared__ uint64_t columns_full;
    lean_warp p;
    p.lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    if constexpr (R1::wide) {
        if ((int) blockIdx.x >= jobs.n_main) {
            ggml_cuda_pdl_lc();
            lean_wide_row<n_col, threads>(jobs);
            return;
        }
    }
    const int g = warp * jobs.n_main + (int) blockIdx.x;
    int j = 0;
    while (j + 1 < jobs.n_job && g >= jobs.job[j + 1].first_warp) {
        j++;
    }
    const lean_job & job = jobs.job[j];
    const bool second = job.role == 1;
    const int  at     = g - job.first_warp;
    p.tile   = at * job.n_value + min(at, job.n_more);
    p.end    = at < job.n_warp ? p.tile + job.n_value + (at < job.n_more ? 1 : 0) : p.tile;
    p.asked  = p.tile;
    p.ring   = shared + jobs.ring_at + warp * jobs.warp_bytes;
    p.full   = full[warp];
    p.x      = columns == LEAN_COLUMNS_WARP ? p.ring + jobs.n_stage * jobs.stage_bytes : shared;
    p.nobody = 0;
    p.pair   = -1;
    p.expert = nullptr;
    float4 w[ahead];
    if (!jobs.late) {
        ggml_cuda_pdl_lc();
    }
    luce_copy_init(p.full, jobs.n_stage, p.lane);
    if (columns == LEAN_COLUMNS_BLOCK || copies) {
        if (warp == 0) {
            luce_copy_init(&columns_full, 1, p.lane);
        }
        __syncthreads();
    }
    if (R0::ids && !second && jobs.late) {
        ggml_cuda_pdl_sync();
    }
    if constexpr (R0::is_float) {
        if (p.tile < p.end) {
            lean_float_read<ahead>(job, p.tile, 0, p.lane, w);
        }
    } else {
        if (!second) {
            lean_start<R0>(jobs, job, p);
        }
    }
    if constexpr (R1::is_float && early) {
        if (second && p.tile < p.end) {
            lean_float_read<ahead>(job, p.tile, 0, p.lane, w);
        }
    } else if constexpr (R1::is_float) {
        if (second && p.tile < p.end) {
            for (int at = 32 * p.lane; at < job.k; at += 1024) {
                luce_prefetch((const float *) (job.w + (int64_t) p.tile * job.w_row) + at);
            }
        }
    } else if constexpr (!R1::wide) {
        if (second) {
            lean_start<R1>(jobs, job, p);
        }
    }
    ggml_cuda_pdl_sync();
    if (jobs.late) {
        ggml_cuda_pdl_lc(); // here: who comes after this kernel may read the ids at once
    }
    if (copies || (columns == LEAN_COLUMNS_BLOCK && jobs.x8)) {
        if (threadIdx.x == 0) {
            luce_copy_announce(&columns_full, jobs.n_row * jobs.x_bytes);
            if (copies) {
                for (int c = 0; c < jobs.n_row; c++) {
                    luce_copy<false>(shared + c * jobs.x_bytes, (const char *) (jobs.job[0].x + c * jobs.job[0].x_row), jobs.x_bytes, &columns_full, 0);
                }
            } else {
                luce_copy<false>(shared, jobs.x8, jobs.n_row * jobs.x_bytes, &columns_full, 0);
            }
        }
        luce_copy_wait(&columns_full, 0);
    } else if constexpr (columns == LEAN_COLUMNS_BLOCK) {
        const lean_job & first = jobs.job[0];
        const int per    = first.k / 8;
        const int n_unit = per * jobs.n_row;
        const int plane  = luce_x_plane(first.k);
#pragma unroll 1
        for (int base = 0; base < n_unit; base += depth * threads) {
            float4 in[depth][2];
            int    column[depth];
#pragma unroll
            for (int i = 0; i < depth; i++) {
                const int unit = base + i * threads + (int) threadIdx.x;
                column[i] = n_col == 1 ? 0 : (int) fastdiv((uint32_t) unit, jobs.units);
                in[i][0] = in[i][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (unit < n_unit) {
                    const float4 * from = (const float4 *) (first.x + column[i] * first.x_row) + 2 * (unit - column[i] * per);
                    in[i][0] = from[0];
                    in[i][1] = from[1];
                }
            }
#pragma unroll
            for (int i = 0; i < depth; i++) {
                const int unit = base + i * threads + (int) threadIdx.x;
                if (base + i * threads < n_unit) {
                    ring_quantise_unit(in[i][0], in[i][1], unit - column[i] * per, first.k, plane, unit < n_unit ? shared + column[i] * jobs.x_bytes : nullptr);
                }
            }
        }
        __syncthreads();
    }
    if constexpr (R0::is_float) {
        lean_float_run<n_col, ahead, early>(jobs, job, p, copies ? shared : nullptr, w);
    } else {
        if (!second) {
            lean_run<R0, columns, n_col>(jobs, job, p);
        }
    }
    if constexpr (R1::is_float) {
        if (second) {
            lean_float_run<n_col, ahead, early>(jobs, job, p, copies ? shared : nullptr, w);
        }
    } else if constexpr (!R1::wide) {
        if (second) {
            lean_run<R1, columns, n_col>(jobs, job, p);
        }
    }
}

template <class R0, class R1, lean_columns columns, int n_col, int threads, int depth, int n_beside>
void lean_launch(ggml_backend_cuda_context & ctx, const lean_jobs & jobs, int n_block, size_t shared_bytes) {
    CUDA_SET_SHARED_MEMORY_LIMIT((lean_kernel<R0, R1, columns, n_col, threads, depth, n_beside>), LEAN_SHARED_BYTES);
    LUCE_SET_SHARED_CARVEOUT((lean_kernel<R0, R1, columns, n_col, threads, depth, n_beside>));
    const ggml_cuda_kernel_launch_params params(dim3(n_block, 1, 1), dim3(threads, 1, 1), shared_bytes, ctx.stream());
    ggml_cuda_kernel_launch(lean_kernel<R0, R1, columns, n_col, threads, depth, n_beside>, params, jobs);
}

template <class R0, class R1, lean_columns columns, int threads, int few, int many, int beside, bool single>
template <int n_col>
void lean_kind<R0, R1, columns, threads, few, many, beside, single>::of_depth(
        ggml_backend_cuda_context & ctx, const lean_jobs & jobs, bool is_few, int n_block, size_t bytes) {
    constexpr int room = n_col > 2 && threads > 256 ? 1 : beside;
    if (is_few) {
        lean_launch<R0, R1, columns, n_col, threads, few, room>(ctx, jobs, n_block, bytes);
    } else {
        lean_launch<R0, R1, columns, n_col, threads, many, room>(ctx, jobs, n_block, bytes);
    }
}

#define LEAN_INSTANTIATE(KIND)                                                                                 \
    template void KIND::of_depth<1>(ggml_backend_cuda_context &, const lean_jobs &, bool, int, size_t);       \
    template void KIND::of_depth<2>(ggml_backend_cuda_context &, const lean_jobs &, bool, int, size_t);       \
    template void KIND::of_depth<4>(ggml_backend_cuda_context &, const lean_jobs &, bool, int, size_t);
