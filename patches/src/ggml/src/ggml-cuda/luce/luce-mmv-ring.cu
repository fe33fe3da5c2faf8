// pyluce: how the ring kernel divides a launch's products among thread blocks, warps and stages. None of it changes a bit.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-mmv.cuh"
#include "luce-mmv-unit.cuh"

namespace {

constexpr int MANY_BYTES   = 131072; // of weights that a thread block reads: from there on it has 16 warps and its multiprocessor alone
constexpr int STAGE_BYTES  = 5888;   // of a stage, about: two rows of 2560 in Q8_0, four in Q4_K
constexpr int LONGEST_ROW  = 11264;  // bytes; the hyper-connections' 10240 in Q8_0 have 10880
constexpr int PAIRS        = 24;     // of row and pick in a thread block, about, at most: a lane has the expert of one
constexpr int MAX_COLUMNS  = LUCE_MMV_COLUMNS;

bool is_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

// Lanes that share a row: as many as leave few of their steps empty, a fifth of Q8_0's, which are short, and a tenth of the others'. Of type and length
// alone: the order of sums.
int lanes_of(ggml_type type, int k) {
    if (is_float(type)) {
        return 32;
    }
    const int n_unit = k / (type == GGML_TYPE_Q8_0 ? 32 : 64);
    const int most  = type == GGML_TYPE_Q8_0 ? n_unit + n_unit / 4 : n_unit + n_unit / 9;
    int lanes = 32;
    while (lanes > 1 && (n_unit + lanes - 1) / lanes * lanes > most) {
        lanes /= 2;
    }
    return lanes;
}

int round_up(int x, int n) {
    return (x + n - 1) / n * n;
}

struct device_limits {
    int  n_block; // of a launch
    int  most;    // bytes of shared memory that a thread block can have beside the kernel's own
    int  share;   // that leave room for another thread block
    int  stage;   // bytes of a stage, about
    bool async;   // copies run beside the sums
};

device_limits limits_of(int device, int n_col, int n_warp) {
    const auto & info = ggml_cuda_info().devices[device];
    const int own = n_warp * ((int) sizeof(float) * LUCE_RING_ROWS * n_col + (int) sizeof(uint64_t) * LUCE_RING_STAGES);
    device_limits l;
    l.async   = GGML_CUDA_CC_IS_NVIDIA(info.cc) && info.cc >= GGML_CUDA_CC_HOPPER;
    l.n_block = l.async ? info.nsm : 2 * info.nsm;
    l.most    = (int) info.smpbo - own - 1024;
    l.stage   = l.async && n_col > 4 ? 2 * STAGE_BYTES : STAGE_BYTES;
    l.share   = n_col > 4 || n_warp > 8 ? l.most : ((int) info.smpbo - 1024) / 2 - own;
    return l;
}

// bytes of weights that the job's groups read
double weight_of(const luce_job & job) {
    return (double) job.n_group * job.m * job.n_sub * job.w_row;
}

// Columns of a group: rows of the graph that one reading of the weights serves. Fewer where every thread block's reading of the
// columns is the larger part.
int columns_of(const luce_jobs & jobs, int n_row, int device) {
    const int n_block = limits_of(device, 1, 8).n_block;
    int    best      = 1;
    double best_cost = INFINITY;
    for (int n = 1; n <= MAX_COLUMNS && (n == 1 || n / 2 < n_row); n *= 2) {
        const int n_group = (n_row + n - 1) / n;
        double weights = 0.0;
        double columns = 0.0;
        bool   fits    = true;
        for (int j = 0; j < jobs.n_job; j++) {
            const luce_job & job = jobs.job[j];
            if (!job.ids) {
                weights += (double) job.m * job.n_sub * job.w_row * n_group;
                columns = std::max(columns, 4.0 * job.k * std::min(n, n_row) * n_block);
                fits    = fits && (n == 1 || is_float(job.type) || luce_x_bytes(job.k) * n <= limits_of(device, n, 16).most / 2);
            }
        }
        if (fits && weights + columns < best_cost) {
            best_cost = weights + columns;
            best      = n;
        }
    }
    return best;
}

// Thread blocks for every job, as its share of the bytes is; returns how many in all.
int divide(luce_jobs & jobs, int n_block) {
    int used = 0;
    for (int j = 0; j < jobs.n_job; j++) {
        luce_job & job = jobs.job[j];
        const int pairs = std::max(1, std::min(PAIRS, 16384 / luce_x_bytes(job.k)));
        job.n_block = job.ids ? (job.n_group + pairs - 1) / pairs : 1;
        used += job.n_block * (job.ids ? 1 : job.n_group);
    }
    for (;;) {
        int    most = -1;
        double load = 0.0;
        for (int j = 0; j < jobs.n_job; j++) {
            const luce_job & job = jobs.job[j];
            const int step = job.ids ? 1 : job.n_group;
            if (used + step <= n_block && job.n_block < (job.ids ? (int64_t) job.n_group * job.m : job.m) &&
                weight_of(job) / (job.n_block * step) > load) {
                load = weight_of(job) / (job.n_block * step);
                most = j;
            }
        }
        if (most < 0) {
            break;
        }
        used += jobs.job[most].ids ? 1 : jobs.job[most].n_group;
        jobs.job[most].n_block++;
    }
    int first = 0;
    for (int j = 0; j < jobs.n_job; j++) {
        jobs.job[j].first_block = first;
        first += jobs.job[j].n_block * (jobs.job[j].ids ? 1 : jobs.job[j].n_group);
    }
    return first;
}

// columns that a thread block holds at once, at most
int columns_held(const luce_job & job) {
    if (!job.ids) {
        return job.columns;
    }
    const int64_t values = ((int64_t) job.n_group * job.m + job.n_block - 1) / job.n_block;
    const int     pairs  = (int) std::min<int64_t>((values + job.m - 2) / job.m + 1, job.n_group);
    const int     per    = job.x_pick != 0 ? 1 : job.n_used;
    return std::min((pairs + per - 2) / per + 1, (job.n_group + per - 1) / per);
}

// Tile, stages and warps of a job within `share` bytes, or as few bytes as it can do with; returns the bytes.
int fit(luce_job & job, const device_limits & limits, int n_warp) {
    if (job.wide) {
        return 0;
    }
    const int64_t all    = (int64_t) job.n_group * job.m;
    const int     blocks = job.n_block * (job.ids ? 1 : job.n_group);
    const int     values = (int) ((all + blocks - 1) / blocks); // of a thread block, at most
    const int     places = 32 / job.lanes;
    const int     stage  = limits.stage;
    job.n_value  = (int) ((job.ids ? all : job.m) / job.n_block);
    job.n_more   = (int) ((job.ids ? all : job.m) % job.n_block);
    job.n_active = std::min(n_warp, values);
    const int of_warp = (values + job.n_active - 1) / job.n_active;
    job.tile = std::max(1, std::min(stage / (int) (job.n_sub * job.w_row), LUCE_RING_ROWS / job.n_sub));
    const int step = std::max(1, 2 * places / job.n_sub); // values that a warp computes at once
    if (job.tile > step) {
        job.tile -= job.tile % step;
    }
    job.tile        = std::min(job.tile, of_warp);
    job.part_bytes  = round_up(job.tile * (int) job.w_row, 16) + 16;
    job.stage_bytes = job.n_sub * job.part_bytes;
    job.n_stage     = limits.async ? std::min(LUCE_RING_STAGES, (of_warp + job.tile - 1) / job.tile) : 1;
    const int held  = columns_held(job);
    job.x_bytes = is_float(job.type) ? 4 * job.k : luce_x_bytes(job.k);
    if (is_float(job.type) && job.x_bytes * held > limits.share / 2) {
        job.x_bytes = 0;
    }
    job.ring_at = job.x_bytes * held;
    const auto total = [&]() { return job.ring_at + job.n_active * job.n_stage * job.stage_bytes; };
    const int share = limits.share;
    while (total() > share && job.n_stage > 2) {
        job.n_stage--;
    }
    while (total() > share && job.n_active > 4) {
        job.n_active--;
    }
    if (total() > share && total() <= limits.most) {
        return total(); // alone on its multiprocessor, then
    }
    while (total() > limits.most && (job.n_stage > 1 || job.n_active > 1)) {
        if (job.n_stage > 1) {
            job.n_stage--;
        } else {
            job.n_active--;
        }
    }
    return total();
}

template <int threads>
void launch(ggml_backend_cuda_context & ctx, const luce_jobs & jobs, int n_col, int n_block, size_t bytes) {
    switch (n_col) {
        case 1: luce_ring_launch<1, threads>(ctx, jobs, n_block, bytes); break;
        case 2: luce_ring_launch<2, threads>(ctx, jobs, n_block, bytes); break;
        case 4: luce_ring_launch<4, threads>(ctx, jobs, n_block, bytes); break;
#ifndef GGML_USE_HIP
        case 8: luce_ring_launch<8, 256>(ctx, jobs, n_block, bytes); break;
#endif
        default: GGML_ABORT("row product: no kernel for %d columns", n_col);
    }
}

// Warps of a thread block: 16 where there is much to read and nothing is left for the next kernel's thread blocks, 8 where those
// shall find room beside them.
int warps_of(const luce_jobs & jobs, int n_col, int n_block, bool async) {
    double bytes = 0.0;
    bool   wide  = false;
    for (int j = 0; j < jobs.n_job; j++) {
        bytes += weight_of(jobs.job[j]);
        wide   = wide || jobs.job[j].wide;
    }
    if (!async || wide || n_col > 4) {
        return 8;
    }
    return bytes / n_block > MANY_BYTES ? 16 : 8;
}

} // namespace

luce_mmv_path luce_mmv_path_of(const luce_job & job) {
    const int64_t row = (int64_t) ggml_row_size(job.type, job.k);
    const auto aligned = [&](int64_t n) {
        return (uintptr_t) job.w % n == 0 && job.w_row % n == 0 && job.w_expert % n == 0;
    };
    if (job.w_row != row || job.k % 64 != 0) {
        return LUCE_MMV_GENERAL;
    }
    switch (job.type) {
        case GGML_TYPE_F32:
            if (!aligned(16)) {
                return LUCE_MMV_GENERAL;
            }
            return row <= LONGEST_ROW ? LUCE_MMV_RING : job.ids ? LUCE_MMV_GENERAL : LUCE_MMV_WIDE;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
            return row <= LONGEST_ROW && aligned(16) ? LUCE_MMV_RING : LUCE_MMV_GENERAL;
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_IQ4_NL:
            return row <= LONGEST_ROW && aligned(4) ? LUCE_MMV_RING : LUCE_MMV_GENERAL;
        case GGML_TYPE_Q6_K:
            return row <= LONGEST_ROW && job.k % 512 == 0 && aligned(4) ? LUCE_MMV_RING : LUCE_MMV_GENERAL;
        default:
            return LUCE_MMV_GENERAL;
    }
}

int luce_ring_lanes(ggml_type type, int k, int * values, int n_max) {
    const int otherwise = lanes_of(type, k);
    if (is_float(type)) {
        values[0] = otherwise;
        return n_max > 0 ? 1 : 0;
    }
    const int n_unit = k / (type == GGML_TYPE_Q8_0 ? 32 : 64);
    int n = 0;
    for (int lanes = std::max(1, otherwise / 4); lanes <= 32 && (lanes <= otherwise || lanes <= n_unit); lanes *= 2) {
        if (n < n_max) {
            values[n] = lanes;
        }
        n++;
    }
    return n;
}

int luce_ring_lanes_of(int device, const luce_job & job) {
    const int choice = luce_mmv_choice(device, job);
    return choice > 0 && choice <= 32 ? choice : lanes_of(job.type, job.k);
}

void luce_launch_ring(ggml_backend_cuda_context & ctx, luce_jobs & jobs, int n_row) {
    const int n_sm = limits_of(ctx.device, 1, 8).n_block;
    for (int j = 0; j < jobs.n_job; j++) {
        luce_job & job = jobs.job[j];
        job.n_sub = job.epilogue == LUCE_SWIGLU ? 2 : job.epilogue == LUCE_HC_MIX ? job.n_stream : 1;
        job.lanes = luce_ring_lanes_of(ctx.device, job);
        job.wide  = luce_mmv_path_of(job) == LUCE_MMV_WIDE;
    }
    const int n_col = columns_of(jobs, n_row, ctx.device);
    for (int j = 0; j < jobs.n_job; j++) {
        luce_job & job = jobs.job[j];
        job.n_group = job.ids ? n_row * job.n_used : (n_row + n_col - 1) / n_col;
        job.columns = job.ids ? 1 : (n_row + job.n_group - 1) / job.n_group;
    }
    jobs.first_row = 0;
    jobs.n_row     = n_row;
    const int n_block = divide(jobs, n_sm);
    const int n_warp  = warps_of(jobs, n_col, n_block, limits_of(ctx.device, n_col, 8).async);
    const device_limits limits = limits_of(ctx.device, n_col, n_warp);
    int bytes = 0;
    for (int j = 0; j < jobs.n_job; j++) {
        bytes = std::max(bytes, fit(jobs.job[j], limits, n_warp));
    }
    GGML_ASSERT(bytes <= limits.most);
#ifndef GGML_USE_HIP
    if (n_warp > 8) {
        launch<512>(ctx, jobs, n_col, n_block, (size_t) bytes);
        return;
    }
#endif
    launch<256>(ctx, jobs, n_col, n_block, (size_t) bytes);
}
