// pyluce: matrix products of a row graph as jobs, several in one launch.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-common.cuh"

enum luce_epilogue {
    LUCE_STORE = 0,
    LUCE_SILU_SCALE, // silu(scale * value)
    LUCE_SWIGLU,     // silu(row m of w) * (row m of w_up)
    LUCE_HC_MIX,     // mean over the streams of xn * sigmoid(value): rows m, m + H, ... of w give value m
};

// One product: w [k, m] or, with ids, w [k, m, n_expert] for each pick.
struct luce_job {
    const char *    w;
    const char *    w_up;        // LUCE_SWIGLU: the second matrix
    int64_t         w_row;       // bytes from row to row
    int64_t         w_expert;    // bytes from expert to expert
    const float *   x;
    int64_t         x_row;       // floats from a row of the graph to the next
    int64_t         x_pick;      // floats from pick to pick, 0: all picks read the same
    const int32_t * ids;         // NULL: dense
    int64_t         ids_row;
    bool            ids_early;   // the ids are there before the kernel in front of this one has finished
    float *         dst;
    int64_t         dst_row;
    int64_t         dst_pick;
    const float *   xn;          // LUCE_HC_MIX
    int64_t         xn_row;
    ggml_type       type;
    int             k, m;        // m: values that are stored for a row
    int             m_all;       // rows of the matrix
    int             n_used;      // picks of a row, 1 when dense
    int             n_expert;    // with ids: an id outside 0 .. n_expert - 1 is no pick here, and its values are zero
    int             n_stream;    // LUCE_HC_MIX
    float           scale;       // LUCE_SILU_SCALE
    luce_epilogue   epilogue;
    // set by luce_launch_jobs
    int             n_block;     // thread blocks of a group of columns or of a pick; of the ring: of a group, or of the job when it has ids
    int             first_block;
    // of the general kernel
    int             n_task;      // pairs of rows (STORE, SILU_SCALE) or values
    int             split;       // warps that share a task
    // of the ring
    bool            wide;        // long rows of F32: a thread block a row
    int             n_sub;       // rows of weights of a value
    int             lanes;       // that share a row
    int             columns;     // of a group, dense
    int             n_group;     // groups of columns, or pairs of row and pick
    int             n_value;     // values of a thread block, one more of the first n_more
    int             n_more;
    int             n_active;    // warps that have values
    int             n_stage;     // stages of a warp's ring
    int             tile;        // values of a stage
    int             part_bytes;  // of a stage, of the rows that a value has at one place
    int             stage_bytes;
    int             ring_at;     // bytes of shared memory before the rings
    int             x_bytes;     // of a column in shared memory, 0: it stays where it is
};

constexpr int LUCE_MAX_JOBS = 8;

// columns of one launch; with 8 the AMD compilers spill
#ifdef GGML_USE_HIP
constexpr int LUCE_MMV_COLUMNS = 4;
#else
constexpr int LUCE_MMV_COLUMNS = 8;
#endif

bool luce_mmv_supports_type(ggml_type type);

// the job of a MUL_MAT or MUL_MAT_ID node
luce_job luce_job_of(const ggml_tensor * dst);

// computes jobs whose outputs nobody among them reads, for n_row rows of the graph; x8: see luce_launch_lean
void luce_launch_jobs(ggml_backend_cuda_context & ctx, luce_job * jobs, int n_job, int n_row, const char * x8 = nullptr);

// what the kernel is launched with: jobs of one type of weights
struct luce_jobs {
    luce_job job[LUCE_MAX_JOBS];
    int      n_job;
    int      first_row; // of this group of columns
    int      n_row;     // in it
};

// which kernel computes a product: of type, row length and ids alone, for bits depend on it
enum luce_mmv_path {
    LUCE_MMV_GENERAL = 0,
    LUCE_MMV_RING,
    LUCE_MMV_WIDE, // the ring's launch, a thread block a row
};

luce_mmv_path luce_mmv_path_of(const luce_job & job);

// The table's choice for a job (luce-tune.cuh): lanes that share a row of the ring, or LUCE_TUNE_GENERAL + warps that share a task of the
// general kernel; 0 where it has none.
constexpr int LUCE_TUNE_GENERAL = 64;
int luce_mmv_choice(int device, const luce_job & job);
// lanes that the ring may share a row of this type and length by, how many, the default among them
int luce_ring_lanes(ggml_type type, int k, int * values, int n_max);

// jobs of luce_mmv_path RING and WIDE, of any types, in one launch
void luce_launch_ring(ggml_backend_cuda_context & ctx, luce_jobs & jobs, int n_row);

// lanes that share a row of weights of a ring's job, as the table or the default has it
int luce_ring_lanes_of(int device, const luce_job & job);

// Jobs that a kernel is made for (luce-lean.cuh), with the ring's bits, in one launch; false: none is, and nothing was launched.
// x8: the columns of the first job in 8 bits, luce_lean_pitch(k) bytes each, NULL: nobody has made them.
bool luce_launch_lean(ggml_backend_cuda_context & ctx, const luce_job * jobs, int n_job, int n_row, const char * x8);
int luce_lean_pitch(int k);
constexpr int LUCE_LEAN_ROWS = 16; // of the graph, at most

constexpr int LUCE_WIDE_THREADS = 256; // that share a long row of F32
constexpr int LUCE_RING_STAGES = 4;
constexpr int LUCE_RING_ROWS   = 32; // rows of weights of a stage, at most

template <int n_col, int threads>
void luce_ring_launch(ggml_backend_cuda_context & ctx, const luce_jobs & jobs, int n_block, size_t shared_bytes);

#define LUCE_RING_TYPES(X)                                                                                  \
    X(GGML_TYPE_F32) X(GGML_TYPE_F16) X(GGML_TYPE_BF16) X(GGML_TYPE_Q8_0) X(GGML_TYPE_IQ4_NL) X(GGML_TYPE_Q4_K) \
    X(GGML_TYPE_Q5_K) X(GGML_TYPE_Q6_K)

template <ggml_type type>
void luce_mmv_launch(ggml_backend_cuda_context & ctx, const luce_jobs & jobs, int n_block, size_t column_bytes);

// X(type) for every type of weights that the kernel takes
#define LUCE_MMV_TYPES(X)                                                                                          \
    X(GGML_TYPE_F32) X(GGML_TYPE_F16) X(GGML_TYPE_BF16) X(GGML_TYPE_Q2_0) X(GGML_TYPE_Q4_0) X(GGML_TYPE_Q4_1)      \
    X(GGML_TYPE_Q5_0) X(GGML_TYPE_Q5_1) X(GGML_TYPE_Q8_0) X(GGML_TYPE_Q2_K) X(GGML_TYPE_Q3_K) X(GGML_TYPE_Q4_K)    \
    X(GGML_TYPE_Q5_K) X(GGML_TYPE_Q6_K) X(GGML_TYPE_IQ4_NL) X(GGML_TYPE_IQ4_XS) X(GGML_TYPE_IQ3_S)                 \
    X(GGML_TYPE_IQ3_XXS)
