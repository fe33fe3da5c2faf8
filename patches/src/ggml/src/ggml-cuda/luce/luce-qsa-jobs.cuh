// pyluce: what waits for the projections of a sparse attention layer alone: heads normalised and rotated, keys and values appended,
// indexer keys appended and pooled. One launch computes as many of these as the graph has in a row.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-launch.cuh"

#define LUCE_QSA_THREADS   128
#define LUCE_QSA_WARPS     (LUCE_QSA_THREADS / 32) // heads a block
#define LUCE_QSA_MAX_JOBS  6
#define LUCE_QSA_MAX_RATIO GGML_LUCE_PAGE          // tokens of a block of the indexer
#define LUCE_QSA_HEAD      256                     // values of a head that stay in registers, at most
#define LUCE_QSA_COPIED    (4 * LUCE_QSA_THREADS)  // values that a block copies

// heads of the rows, normalised and rotated, or (gain NULL) rows of d values as they are
struct luce_head_job {
    const float   * x;
    const float   * gain;
    const float   * rope;
    void          * dst;
    const int64_t * cells; // where a row goes in dst, NULL: to its own place
    uint32_t        row_stride, head_stride, rope_stride, dst_stride; // floats; values of dst
    uint32_t        n_task; // heads of all rows; parts of all rows
    uint32_t        n_head; // of a row; parts of a row
    int             d, n_rot;
    float           eps;
    bool            half_dst; // F16, else F32
};

struct luce_pool_job {
    const float    * key;
    const float    * gain;
    const float    * rope;
    float          * raw;
    float          * pooled;
    const int32_t  * pages;
    const luce_row * rows;
    float          * handle; // [n_row] zeros, or NULL when nobody reads them
    int64_t          key_stride, rope_stride, n_page_max;
    int              n_row, d, n_rot, ratio;
    float            eps;
};

struct luce_qsa_jobs {
    luce_head_job heads[LUCE_QSA_MAX_JOBS];
    int           end[LUCE_QSA_MAX_JOBS]; // one past a job's last block
    int           n_job;
    luce_pool_job pool; // the blocks after theirs, one a row
};

luce_head_job luce_norm_rope_job(const ggml_tensor * norm_rope);
luce_head_job luce_append_job(const ggml_tensor * set_rows); // rows as they are
void          luce_append_to(luce_head_job & job, const ggml_tensor * set_rows); // a job's rows into cells
luce_pool_job luce_qsa_pool_job(const ggml_tensor * qsa_pool);
int           luce_qsa_job_blocks(const luce_head_job & job);
void          luce_qsa_launch_jobs(ggml_backend_cuda_context & ctx, luce_qsa_jobs & jobs);
