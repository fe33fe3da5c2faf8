// pyluce: matrix products of a row graph: which kernel, how many thread blocks.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-mmv.cuh"
#include "luce-tune.cuh"

#include "ggml-backend.h"
#include "ggml-luce-path.h"

bool luce_mmv_supports_type(ggml_type type) {
    switch (type) {
#define LUCE_CASE(TYPE) case TYPE: return true;
        LUCE_MMV_TYPES(LUCE_CASE)
#undef LUCE_CASE
        default: return false;
    }
}

luce_job luce_job_of(const ggml_tensor * dst) {
    const ggml_tensor * w   = dst->src[0];
    const ggml_tensor * x   = dst->src[1];
    const ggml_tensor * ids = dst->op == GGML_OP_MUL_MAT_ID ? dst->src[2] : nullptr;
    luce_job job = {};
    job.w        = (const char *) w->data;
    job.w_row    = (int64_t) w->nb[1];
    job.w_expert = (int64_t) w->nb[2];
    job.x        = (const float *) x->data;
    job.x_row    = (int64_t) ((ids ? x->nb[2] : x->nb[1]) / sizeof(float));
    job.x_pick   = ids && x->ne[1] > 1 ? (int64_t) (x->nb[1] / sizeof(float)) : 0;
    job.ids      = ids ? (const int32_t *) ids->data : nullptr;
    job.ids_row  = ids ? (int64_t) (ids->nb[1] / sizeof(int32_t)) : 0;
    job.dst      = (float *) dst->data;
    job.dst_row  = (int64_t) ((ids ? dst->nb[2] : dst->nb[1]) / sizeof(float));
    job.dst_pick = ids ? (int64_t) (dst->nb[1] / sizeof(float)) : 0;
    job.type     = w->type;
    job.k        = (int) w->ne[0];
    job.m        = (int) w->ne[1];
    job.m_all    = (int) w->ne[1];
    job.n_used   = ids ? (int) ids->ne[0] : 1;
    job.n_expert = ids ? (int) w->ne[2] : 1;
    job.epilogue = LUCE_STORE;
    return job;
}

namespace {

constexpr int WARPS = 8; // of a thread block of the kernel

int n_task(const luce_job & job) {
    return job.epilogue == LUCE_STORE || job.epilogue == LUCE_SILU_SCALE ? (job.m + 1) / 2 : job.m;
}

// Warps that share a task: enough for 24 warps a multiprocessor, while a warp has two steps or more of its own. Of sizes and
// device alone, since the order of sums depends on it.
int split_of(const luce_job & job, int n_sm) {
    const int n_step = job.k / (ggml_is_quantized(job.type) ? 256 : 128);
    int split = 1;
    while (split < WARPS && n_task(job) * job.n_used * split < 24 * n_sm && n_step / (2 * split) >= 2) {
        split *= 2;
    }
    return split;
}

void launch_type(ggml_backend_cuda_context & ctx, ggml_type type, const luce_jobs & jobs, int n_block, size_t column_bytes) {
    switch (type) {
#define LUCE_CASE(TYPE) case TYPE: luce_mmv_launch<TYPE>(ctx, jobs, n_block, column_bytes); break;
        LUCE_MMV_TYPES(LUCE_CASE)
#undef LUCE_CASE
        default: GGML_ABORT("row product: no kernel for %s", ggml_type_name(type));
    }
}

// whether a job that is not done has weights of another type than F32
bool has_other(const luce_job * jobs, const bool * done, int n_job) {
    for (int j = 0; j < n_job; j++) {
        if (!done[j] && jobs[j].type != GGML_TYPE_F32) {
            return true;
        }
    }
    return false;
}

} // namespace

int luce_mmv_choice(int device, const luce_job & job) {
    return luce_tune_of(device, LUCE_TUNE_ROW, job.type, job.k, job.m_all, job.ids ? job.n_used : 0, 0, 0);
}

int luce_mmv_candidates(int device, ggml_type type, int64_t k, int64_t m, int64_t n_used, int * values, int n_max) {
    GGML_UNUSED(device);
    if (!luce_mmv_supports_type(type) || k % 32 != 0 || k > INT32_MAX / 8) {
        return 0;
    }
    luce_job job = {};
    job.type     = type;
    job.k        = (int) k;
    job.m        = (int) m;
    job.w_row    = (int64_t) ggml_row_size(type, k);
    job.w_expert = job.w_row * m;
    const int32_t pick = 0;
    job.ids      = n_used > 0 ? &pick : nullptr;
    if (luce_mmv_path_of(job) != LUCE_MMV_GENERAL) {
        return luce_ring_lanes(type, job.k, values, n_max);
    }
    const int n_step = job.k / (ggml_is_quantized(type) ? 256 : 128);
    int n = 0;
    for (int split = 1; split <= WARPS && (split == 1 || n_step >= split); split *= 2) {
        if (n < n_max) {
            values[n] = LUCE_TUNE_GENERAL + split;
        }
        n++;
    }
    return n;
}

void luce_launch_jobs(ggml_backend_cuda_context & ctx, luce_job * jobs, int n_job, int n_row, const char * x8) {
    GGML_ASSERT(n_job <= LUCE_MAX_JOBS);
    if (luce_launch_lean(ctx, jobs, n_job, n_row, x8)) {
        return;
    }
    const auto & device = ggml_cuda_info().devices[ctx.device];
    bool done[LUCE_MAX_JOBS] = {};
    luce_jobs ring;
    ring.n_job = 0;
    for (int j = 0; j < n_job; j++) {
        if (luce_mmv_path_of(jobs[j]) != LUCE_MMV_GENERAL) {
            ring.job[ring.n_job++] = jobs[j];
            done[j] = true;
            continue;
        }
        jobs[j].n_task = n_task(jobs[j]);
        const int choice = luce_mmv_choice(ctx.device, jobs[j]);
        jobs[j].split  = choice > LUCE_TUNE_GENERAL ? choice - LUCE_TUNE_GENERAL : split_of(jobs[j], device.nsm);
    }
    if (ring.n_job > 0) {
        ggml_luce_path("row ring");
        luce_launch_ring(ctx, ring, n_row);
    }
    if (ring.n_job < n_job) {
        ggml_luce_path("row general");
    }
    for (int left = n_job - ring.n_job; left > 0;) {
        // one type at a time, dense F32 jobs with the first of another type
        int lead = 0;
        while (done[lead] || (jobs[lead].type == GGML_TYPE_F32 && has_other(jobs, done, n_job))) {
            lead++;
        }
        const ggml_type type = jobs[lead].type;
        size_t column_bytes = 0;
        luce_jobs same;
        same.n_job = 0;
        for (int j = 0; j < n_job; j++) {
            if (!done[j] && (jobs[j].type == type || (jobs[j].type == GGML_TYPE_F32 && !jobs[j].ids))) {
                done[j] = true;
                left--;
                same.job[same.n_job++] = jobs[j];
                if (ggml_is_quantized(jobs[j].type)) {
                    column_bytes = std::max(column_bytes, jobs[j].k / 32 * sizeof(block_q8_1));
                }
            }
        }
        // as many columns at once as their shared memory leaves room for two thread blocks on a multiprocessor
        int group = LUCE_MMV_COLUMNS;
        while (group > 1 && column_bytes * group > device.smpbo / 2) {
            group /= 2;
        }
        for (int first = 0; first < n_row; first += group) {
            same.first_row = first;
            same.n_row     = std::min(group, n_row - first);
            int n_block = 0;
            for (int j = 0; j < same.n_job; j++) {
                luce_job & job     = same.job[j];
                const int  n_pair  = job.ids ? job.n_used * same.n_row : 1;
                const int  n_group = WARPS / job.split;
                job.first_block = n_block;
                job.n_block     = std::min((job.n_task + n_group - 1) / n_group, std::max(1, 2 * device.nsm / n_pair));
                n_block += job.n_block * n_pair;
            }
            launch_type(ctx, type, same, n_block, column_bytes);
        }
    }
}

bool luce_cuda_row_mul_mat_supports(int device, const ggml_tensor * op) {
    GGML_UNUSED(device);
    const ggml_tensor * w = op->src[0];
    const ggml_tensor * x = op->src[1];
    if (!luce_mmv_supports_type(w->type) || x->type != GGML_TYPE_F32 || w->ne[0] % 32 != 0 || x->nb[1] % 16 != 0 || w->nb[0] != ggml_type_size(w->type)) {
        return false;
    }
    return op->op == GGML_OP_MUL_MAT ? x->ne[2] == 1 && x->ne[3] == 1 && w->ne[2] == 1 && w->ne[3] == 1 : x->ne[3] == 1 && w->ne[3] == 1;
}

void luce_cuda_row_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    luce_job job = luce_job_of(dst);
    luce_launch_jobs(ctx, &job, 1, (int) (dst->op == GGML_OP_MUL_MAT ? dst->ne[1] : dst->ne[2]));
}
