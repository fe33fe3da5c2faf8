// pyluce: the launches of row products that have a kernel made for them, and what such a kernel is given.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-mmv.cuh"

constexpr int LEAN_STAGES  = 4;
constexpr int LEAN_GROUP   = 4; // columns at once, at most
constexpr int LEAN_STREAMS = 4; // of LUCE_HC_MIX
constexpr int LEAN_SHARED_BYTES = 227 * 1024 - 1024; // that a thread block can have beside the barriers

enum lean_columns {
    LEAN_COLUMNS_NONE = 0, // floats where they lie, or copied
    LEAN_COLUMNS_BLOCK,    // quantised by the thread block, for all its warps
    LEAN_COLUMNS_WARP,     // by each warp for itself: products that do not share their columns
};

// What the jobs of a kernel have in common. rows: of weights that a lane group computes at once, STORE and SILU_SCALE.
template <ggml_type type_, int lanes_, luce_epilogue epilogue_, bool ids_, int rows_> struct lean_role {
    static constexpr ggml_type     type     = type_;
    static constexpr int           lanes    = lanes_;
    static constexpr luce_epilogue epilogue = epilogue_;
    static constexpr bool          ids      = ids_;
    static constexpr int           places   = 32 / lanes_;
    static constexpr int           n_part   = epilogue_ == LUCE_SWIGLU ? 2 : epilogue_ == LUCE_HC_MIX ? LEAN_STREAMS : 1;
    static constexpr int           rows     = rows_;
    static constexpr int           tile     = epilogue_ == LUCE_SWIGLU ? places : epilogue_ == LUCE_HC_MIX ? places * rows_ / LEAN_STREAMS : places * rows_; // values
    static constexpr bool          wide     = false;
    static constexpr bool          is_float = false;
    static_assert(tile > 0, "a tile has whole values");
};

struct lean_float { // rows of F32, a warp each, read where they lie
    static constexpr bool is_float = true;
    static constexpr bool wide     = false;
    static constexpr bool ids      = false;
};

struct lean_wide { // long rows of F32, a thread block each
    static constexpr bool is_float = false;
    static constexpr bool wide     = true;
    static constexpr bool ids      = false;
};

struct lean_job {
    const char *    w;
    int64_t         part_step; // bytes from part to part of a tile
    int64_t         w_expert;
    const float *   x;
    int64_t         x_row, x_pick;
    const int32_t * ids;
    int64_t         ids_row;
    float *         dst;
    int64_t         dst_row, dst_pick;
    const float *   xn;
    int64_t         xn_row;
    uint3           tiles_of_pick; // divisors
    uint3           picks_of_row;
    float           scale;
    int             k, m;
    int             w_row;
    int             n_expert;
    int             part_bytes;
    int             role;
    int             first_warp;
    int             n_warp;
    int             n_value;       // tiles of a warp, one more of the first n_more
    int             n_more;
};

struct lean_jobs {
    lean_job job[LUCE_MAX_JOBS];
    int      n_job;
    int      n_row;
    int      n_main;    // thread blocks that have tiles; those behind them have a wide row each
    int      wide;      // the first wide job
    int      n_stage;
    int      stage_bytes;
    int      x_bytes;   // of a column in shared memory
    const char * x8;    // LEAN_COLUMNS_BLOCK: the columns as they shall be there, NULL: to be quantised
    int      ring_at;   // bytes in front of the rings: LEAN_COLUMNS_BLOCK
    int      warp_bytes; // of a warp: its ring, then its columns
    bool     late;      // the kernel in front makes the ids
    uint3    units;     // of 8 values in a column
};

// columns_: how they come. few, many: units of 8 values of the columns that a thread reads at once, where all threads have at most one and where they have more. beside: thread
// blocks that shall find room on a multiprocessor. single: only where a warp has one tile at most.
template <class R0, class R1, lean_columns columns_, int threads_, int few, int many, int beside, bool single_> struct lean_kind {
    typedef R0 first;
    typedef R1 second;
    static constexpr lean_columns columns = columns_;
    static constexpr int          threads = threads_;
    static constexpr bool         single  = single_;

    static void launch(ggml_backend_cuda_context & ctx, const lean_jobs & jobs, bool is_few, int n_block, size_t bytes) {
        switch (jobs.n_row) {
            case 1:  of_depth<1>(ctx, jobs, is_few, n_block, bytes); break;
            case 2:  of_depth<2>(ctx, jobs, is_few, n_block, bytes); break;
            default: of_depth<LEAN_GROUP>(ctx, jobs, is_few, n_block, bytes); break;
        }
    }

    template <int n_col>
    static void of_depth(ggml_backend_cuda_context & ctx, const lean_jobs & jobs, bool is_few, int n_block, size_t bytes);
};

template <ggml_type type, int lanes> using lean_dense  = lean_role<type, lanes, LUCE_STORE, false, 1>;
template <ggml_type type, int lanes> using lean_swiglu = lean_role<type, lanes, LUCE_SWIGLU, true, 1>;
template <ggml_type type, int lanes, int rows> using lean_picks  = lean_role<type, lanes, LUCE_STORE, true, rows>;

// projections: of at most a row a warp, and more
typedef lean_kind<lean_dense<GGML_TYPE_Q8_0, 32>, lean_float, LEAN_COLUMNS_BLOCK, 640, 1, 3, 1, true>  lean_few_rows;
typedef lean_kind<lean_dense<GGML_TYPE_Q8_0, 32>, lean_float, LEAN_COLUMNS_BLOCK, 512, 1, 3, 2, false> lean_many_rows;
// router and gate of the shared expert
typedef lean_kind<lean_float, lean_float, LEAN_COLUMNS_NONE, 128, 1, 1, 2, false> lean_router;
// hyper-connections
typedef lean_kind<lean_role<GGML_TYPE_Q8_0, 32, LUCE_SILU_SCALE, false, 1>, lean_wide, LEAN_COLUMNS_BLOCK, 256, 5, 5, 2, false> lean_hc_down;
typedef lean_kind<lean_role<GGML_TYPE_Q8_0, 4, LUCE_HC_MIX, false, 2>, lean_float, LEAN_COLUMNS_BLOCK, 256, 1, 3, 2, false>     lean_hc_up;
// experts with the shared one
template <ggml_type type, int lanes, int threads>
using lean_gate_up = lean_kind<lean_swiglu<type, lanes>, lean_role<GGML_TYPE_Q8_0, 32, LUCE_SWIGLU, false, 1>, LEAN_COLUMNS_BLOCK, threads, 1, 3, 1, false>;
template <ggml_type type, int lanes>
using lean_down = lean_kind<lean_picks<type, lanes, 1>, lean_role<GGML_TYPE_Q8_0, 8, LUCE_STORE, false, 1>, LEAN_COLUMNS_WARP, 512, 1, 1, 2, false>;
typedef lean_gate_up<GGML_TYPE_Q4_K, 8, 512>   lean_gate_up_q4_k;
typedef lean_gate_up<GGML_TYPE_Q5_K, 8, 384>   lean_gate_up_q5_k;
typedef lean_gate_up<GGML_TYPE_Q6_K, 8, 384>   lean_gate_up_q6_k;
typedef lean_gate_up<GGML_TYPE_IQ4_NL, 8, 512> lean_gate_up_iq4_nl;
typedef lean_gate_up<GGML_TYPE_Q8_0, 32, 512>  lean_gate_up_q8_0;
typedef lean_down<GGML_TYPE_IQ4_NL, 2>         lean_down_iq4_nl;
typedef lean_down<GGML_TYPE_Q8_0, 8>           lean_down_q8_0;

#define LEAN_KERNELS(X) \
    X(lean_few_rows) X(lean_many_rows) X(lean_router) X(lean_hc_down) X(lean_hc_up) \
    X(lean_gate_up_q4_k) X(lean_gate_up_q5_k) X(lean_gate_up_q6_k) X(lean_gate_up_iq4_nl) X(lean_gate_up_q8_0) X(lean_down_iq4_nl) X(lean_down_q8_0)
