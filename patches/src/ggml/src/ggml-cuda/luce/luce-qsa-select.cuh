// pyluce: what the kernels of block selection share.
//
// The score of (row, block) is the same bits in every kernel: per head one chain of fused multiply-adds over d from 0 up,
// then the positive ones added in head order. So the choice of kernel may depend on the number of rows.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-common.cuh"

struct luce_select_args {
    const float    * q;      // [d, n_head, n_row]
    const float    * pooled; // [d, n_cell/ratio]
    const int32_t  * pages;  // [n_page_max, n_slot]
    const luce_row * rows;   // [n_row]
    float          * scores; // [score_stride, rows of this batch]
    int32_t        * dst;    // [1 + n_top, n_row]
    int64_t          n_page_max, score_stride;
    int              d, n_head, n_row, row0, n_batch, ratio, n_top, n_block_max;
    bool             high_first;
};

// complete blocks of a row
static __device__ __forceinline__ int luce_complete_blocks(const luce_select_args & a, const luce_row & row) {
    return row.slot < 0 ? 0 : min((row.position + 1) / a.ratio, a.n_block_max);
}

// the pooled key of block b
static __device__ __forceinline__ const float * luce_block_key(const luce_select_args & a, int32_t slot, int b) {
    const int     a_page = GGML_LUCE_PAGE / a.ratio;
    const int64_t page   = a.pages[slot * a.n_page_max + b / a_page];
    return a.pooled + (page * a_page + b % a_page) * a.d;
}

static __device__ __forceinline__ uint32_t luce_lanes(bool x) { // bit l: x of lane l
#ifdef GGML_USE_HIP
    return (uint32_t) __ballot(x);
#else
    return __ballot_sync(0xffffffff, x);
#endif // GGML_USE_HIP
}

// the scores of a batch of rows, of those with more than n_top complete blocks
void luce_score_blocks(const luce_select_args & a, cudaStream_t stream);
