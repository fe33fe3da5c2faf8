// pyluce: which launches of row products have a kernel made for them, and how their tiles are divided among warps. None of it changes a bit.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#include "luce-lean-table.cuh"
#include "luce-mmv-unit.cuh"

#include "ggml-luce-path.h"

namespace {

constexpr double LARGE_BYTES = 128e6; // of weights: from there on the ring kernel reads as fast as the memory allows

// what a launch needs to know of a job's role
struct role_facts {
    int  role;
    int  tile;   // values; 0: rows of F32, 1 of them at a time
    int  n_part;
    bool wide;
};

template <class R> bool is_role(const luce_job & job, int lanes) {
    if constexpr (R::wide) {
        return luce_mmv_path_of(job) == LUCE_MMV_WIDE && job.epilogue == LUCE_STORE;
    } else if constexpr (R::is_float) {
        return job.type == GGML_TYPE_F32 && luce_mmv_path_of(job) == LUCE_MMV_RING && job.epilogue == LUCE_STORE && !job.ids;
    } else {
        const int64_t step  = R::epilogue == LUCE_SWIGLU ? (job.w_up ? job.w_up - job.w : -1) : R::epilogue == LUCE_HC_MIX ? job.m * job.w_row : 0;
        return luce_mmv_path_of(job) == LUCE_MMV_RING && job.type == R::type && lanes == R::lanes && job.epilogue == R::epilogue &&
               (job.ids != nullptr) == R::ids && job.m % R::tile == 0 && R::tile * job.w_row % 16 == 0 && (uintptr_t) job.w % 16 == 0 &&
               job.w_expert % 16 == 0 && step % 16 == 0 && (R::epilogue != LUCE_HC_MIX || job.n_stream == LEAN_STREAMS);
    }
}

template <class R> role_facts facts_of(int role) {
    if constexpr (R::wide || R::is_float) {
        return { role, 0, 1, R::wide };
    } else {
        return { role, R::tile, R::n_part, false };
    }
}

lean_job job_of(const luce_job & from, const role_facts & facts) {
    lean_job job = {};
    job.w          = from.w;
    job.part_step  = from.epilogue == LUCE_SWIGLU ? from.w_up - from.w : from.epilogue == LUCE_HC_MIX ? from.m * from.w_row : 0;
    job.w_expert   = from.w_expert;
    job.x          = from.x;
    job.x_row      = from.x_row;
    job.x_pick     = from.x_pick;
    job.ids        = from.ids;
    job.ids_row    = from.ids_row;
    job.dst        = from.dst;
    job.dst_row    = from.dst_row;
    job.dst_pick   = from.dst_pick;
    job.xn         = from.xn;
    job.xn_row     = from.xn_row;
    job.scale      = from.scale;
    job.k          = from.k;
    job.m          = from.m;
    job.w_row      = (int) from.w_row;
    job.n_expert   = from.n_expert;
    job.part_bytes = (int) (std::max(1, facts.tile) * from.w_row);
    job.role       = facts.role;
    if (from.ids) {
        job.tiles_of_pick = init_fastdiv_values((uint64_t) (from.m / facts.tile));
        job.picks_of_row  = init_fastdiv_values((uint64_t) from.n_used);
    }
    return job;
}

// Warps for every job, as its share of the bytes is, and tiles for its warps; returns the most tiles that a warp has. Rows of F32 beside others have
// a warp each, for a warp takes longer for one than for a tile.
int divide(lean_jobs & jobs, const role_facts * facts, const int * n_tile, int n_warp) {
    const auto bytes = [&](int j) { return (double) jobs.job[j].part_bytes * facts[j].n_part; };
    int left = n_warp;
    for (int j = 0; j < jobs.n_job; j++) {
        jobs.job[j].n_warp = facts[j].wide ? 0 : facts[j].tile == 0 && 8 * n_tile[j] <= n_warp ? n_tile[j] : 1;
        left -= jobs.job[j].n_warp;
    }
    for (; left > 0; left--) {
        int    most = -1;
        double load = 0.0;
        for (int j = 0; j < jobs.n_job; j++) {
            const int    per  = facts[j].wide ? 0 : (n_tile[j] + jobs.job[j].n_warp - 1) / jobs.job[j].n_warp;
            const double here = per > 1 ? bytes(j) * n_tile[j] / jobs.job[j].n_warp : 0.0;
            if (here > load) {
                load = here;
                most = j;
            }
        }
        if (most < 0) {
            break;
        }
        jobs.job[most].n_warp++;
    }
    int first = 0;
    int most  = 1;
    for (int j = 0; j < jobs.n_job; j++) {
        lean_job & job = jobs.job[j];
        job.first_warp = first;
        first += job.n_warp;
        if (job.n_warp > 0) {
            job.n_value = n_tile[j] / job.n_warp;
            job.n_more  = n_tile[j] % job.n_warp;
            if (facts[j].tile > 0) {
                most = std::max(most, job.n_value + (job.n_more > 0 ? 1 : 0));
            }
        }
    }
    return most;
}

template <class K> bool launch(ggml_backend_cuda_context & ctx, const luce_job * from, int n_job, int n_row, const char * x8) {
    typedef typename K::first  R0;
    typedef typename K::second R1;
    role_facts facts[LUCE_MAX_JOBS] = {};
    int        n_tile[LUCE_MAX_JOBS] = {};
    lean_jobs  jobs = {};
    int n_wide = 0;
    int tile_bytes = 0;
    int columns_k  = 0;
    const float * columns_x = nullptr;
    for (int j = 0; j < n_job; j++) {
        const int lanes = luce_ring_lanes_of(ctx.device, from[j]);
        if (is_role<R0>(from[j], lanes)) {
            facts[j] = facts_of<R0>(0);
        } else if (is_role<R1>(from[j], lanes)) {
            facts[j] = facts_of<R1>(1);
        } else {
            return false;
        }
        lean_job & job = jobs.job[j] = job_of(from[j], facts[j]);
        n_tile[j] = facts[j].tile > 0 ? from[j].m / facts[j].tile * (from[j].ids ? n_row * from[j].n_used : 1) : from[j].m;
        if (facts[j].wide) {
            if (n_wide > 0) {
                return false;
            }
            jobs.wide = j;
            n_wide    = from[j].m;
        } else if (facts[j].tile > 0) {
            tile_bytes = std::max(tile_bytes, job.part_bytes * facts[j].n_part);
            if (K::columns == LEAN_COLUMNS_BLOCK) {
                if (columns_x && (columns_x != job.x || columns_k != job.k || jobs.job[0].x_row != job.x_row)) {
                    return false;
                }
                if (from[j].x_pick != 0) {
                    return false;
                }
            } else if (job.k > 1024 || (columns_k && columns_k != job.k)) {
                return false;
            }
            columns_x = job.x;
            columns_k = job.k;
        }
        jobs.late = jobs.late || (from[j].ids && !from[j].ids_early);
    }
    if (facts[0].tile == 0 && K::columns == LEAN_COLUMNS_BLOCK) {
        return false; // the first job's columns are the thread block's
    }
    const bool copies = K::columns == LEAN_COLUMNS_NONE && n_row >= LEAN_GROUP - 1;
    for (int j = 0; j < n_job && copies; j++) {
        if (from[j].x != from[0].x || from[j].x_row != from[0].x_row || from[j].k != from[0].k || (uintptr_t) from[j].x % 16 != 0 || from[j].x_row % 4 != 0) {
            return false;
        }
    }
    constexpr int n_warp = K::threads / 32;
    const int n_sm = ggml_cuda_info().devices[ctx.device].nsm;
    jobs.n_job   = n_job;
    jobs.n_row   = n_row;
    jobs.n_main  = n_sm - n_wide;
    jobs.x_bytes = columns_k > 0 ? luce_lean_pitch(columns_k) : copies ? 4 * from[0].k : 0;
    jobs.x8      = K::columns == LEAN_COLUMNS_BLOCK ? x8 : nullptr;
    jobs.units   = init_fastdiv_values((uint64_t) std::max(1, columns_k / 8));
    if (jobs.n_main < 1) {
        return false;
    }
    const int most = divide(jobs, facts, n_tile, n_warp * jobs.n_main);
    if (K::single && most > 1) {
        return false;
    }
    const int n_column = K::columns == LEAN_COLUMNS_BLOCK || copies ? n_row : 0;
    const int own      = K::columns == LEAN_COLUMNS_WARP ? n_row * jobs.x_bytes : 0;
    jobs.ring_at     = n_column * jobs.x_bytes;
    jobs.stage_bytes = (tile_bytes + 127) / 128 * 128;
    const auto total = [&](int n_stage) { return jobs.ring_at + n_warp * (n_stage * jobs.stage_bytes + own); };
    jobs.n_stage = tile_bytes > 0 ? std::min(LEAN_STAGES, most) : 0;
    while (jobs.n_stage > 1 && total(jobs.n_stage) > LEAN_SHARED_BYTES) {
        jobs.n_stage--;
    }
    if (total(jobs.n_stage) > LEAN_SHARED_BYTES) {
        return false;
    }
    jobs.warp_bytes = jobs.n_stage * jobs.stage_bytes + own;
    const int n_unit = columns_k / 8 * n_row;
    K::launch(ctx, jobs, n_unit <= K::threads, jobs.n_main + n_wide, (size_t) total(jobs.n_stage));
    return true;
}

double bytes_of(const luce_job & job, int n_row) {
    return (double) job.w_row * job.m_all * (job.ids ? job.n_used * n_row : 1);
}

bool launch_rows(ggml_backend_cuda_context & ctx, const luce_job * all, int n_job, int first, int n_row, const char * x8) {
    luce_job jobs[LUCE_MAX_JOBS];
    for (int j = 0; j < n_job; j++) {
        jobs[j] = all[j];
        jobs[j].x   += first * jobs[j].x_row;
        jobs[j].dst += first * jobs[j].dst_row;
        jobs[j].xn   = jobs[j].xn ? jobs[j].xn + first * jobs[j].xn_row : nullptr;
        jobs[j].ids  = jobs[j].ids ? jobs[j].ids + first * jobs[j].ids_row : nullptr;
    }
    const char * own = x8 ? x8 + (int64_t) first * luce_lean_pitch(jobs[0].k) : nullptr;
    bool done = false;
#define LUCE_TRY(...) done = done || launch<__VA_ARGS__>(ctx, jobs, n_job, n_row, own);
    LEAN_KERNELS(LUCE_TRY)
#undef LUCE_TRY
    // columns that do not fit are computed in parts, each reading the weights again
    const int half = (n_row + 1) / 2;
    if (!done && n_row > LEAN_GROUP && launch_rows(ctx, all, n_job, first, half, x8)) {
        const bool rest = launch_rows(ctx, all, n_job, first + half, n_row - half, x8);
        GGML_ASSERT(rest);
        return true;
    }
    return done;
}

} // namespace

int luce_lean_pitch(int k) {
    return (luce_x_bytes(k) + 127) / 128 * 128;
}

bool luce_launch_lean(ggml_backend_cuda_context & ctx, const luce_job * jobs, int n_job, int n_row, const char * x8) {
    static const bool disabled = getenv("LUCE_DISABLE_LEAN") != nullptr;
    const auto & device = ggml_cuda_info().devices[ctx.device];
    if (disabled || !GGML_CUDA_CC_IS_NVIDIA(device.cc) || device.cc < GGML_CUDA_CC_HOPPER || n_row > LUCE_LEAN_ROWS || n_job > LUCE_MAX_JOBS) {
        return false;
    }
    double bytes = 0.0;
    for (int j = 0; j < n_job; j++) {
        bytes += jobs[j].ids ? 0.0 : bytes_of(jobs[j], n_row);
    }
    if (bytes > LARGE_BYTES && n_row <= LEAN_GROUP) {
        return false;
    }
    const bool done = launch_rows(ctx, jobs, n_job, 0, n_row, x8);
    if (done) {
        ggml_luce_path("row lean");
    }
    return done;
}
#else
#include "luce-mmv.cuh"

int luce_lean_pitch(int) {
    return 0;
}

bool luce_launch_lean(ggml_backend_cuda_context &, const luce_job *, int, int, const char *) {
    return false;
}
#endif
