// pyluce: what the kernels of sparse attention share.
//
// A row's keys, in rising position, are cut into splits of a fixed number of keys; a split's partial result is the maximum, the
// sum and the weighted values of its own keys, and a second kernel adds the splits in rising order. So a row's
// result depends on its own keys alone, and on the phase of the graph: a row graph has splits of one step of 64 keys, to
// occupy the device with one row; a chunk graph about three splits a row, each walked in steps with a running maximum.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-common.cuh"

#define LUCE_ATTN_STEP    64   // keys
#define LUCE_ATTN_KEYS    1024 // of a split, at most
#define LUCE_ATTN_GROUP   16   // heads a K/V head, at most

struct luce_attn_args {
    const float    * q;        // [d, n_head, n_row]
    const void     * k;        // [d*n_kv, n_cell]
    const void     * v;
    const int32_t  * selected; // [1 + n_top, n_row]
    const float    * gate;
    const int32_t  * pages;    // [n_page_max, n_slot]
    const luce_row * rows;
    float          * values;   // [d, n_split, n_head, n_row] of the splits
    float2         * sums;     // [n_split, n_head, n_row]: maximum, sum
    float          * dst;      // [d*n_head, n_row]
    int64_t          n_page_max, gate_row, gate_head;
    int              d, n_head, n_kv, group, n_row, n_top, ratio;
    int              n_split;  // of a row, at most
    int              n_step;   // of a split, at most
    int              n_all;    // > 0: every complete block is selected, there are at most so many, and `selected` is not read
    uint3            by_ratio; // for divisions by it
    float            scale;
    bool             backwards; // the fault: values added in falling position
};

// keys of a row: of its blocks, and in all
struct luce_row_keys {
    int n_block_keys, n;
};

static __device__ __forceinline__ luce_row_keys luce_keys_of(const luce_attn_args & a, int64_t r, const luce_row & row) {
    const uint2 whole        = fast_div_modulo((uint32_t) (row.position + 1), a.by_ratio);
    const int   n_block_keys = (a.n_all > 0 ? min((int) whole.x, a.n_all) : a.selected[r * (1 + a.n_top)]) * a.ratio;
    return { n_block_keys, n_block_keys + (int) whole.y };
}

// the cell of key i of a row
static __device__ __forceinline__ int64_t luce_key_cell(const luce_attn_args & a, int64_t r, const luce_row & row, const luce_row_keys & keys, int i) {
    int position;
    if (i >= keys.n_block_keys) {
        position = row.position + 1 - keys.n + i; // the tail ends at the row's own position
    } else if (a.n_all > 0) {
        position = i;
    } else {
        const uint2 at = fast_div_modulo((uint32_t) i, a.by_ratio);
        position = a.selected[r * (1 + a.n_top) + 1 + at.x] * a.ratio + (int) at.y;
    }
    return luce_cell(a.pages, a.n_page_max, row.slot, position);
}

// the splits of n_row rows, on matrix units; whether the device and the sizes allow it
bool luce_attn_mma_fits(int device, int d, ggml_type type);
void luce_attn_mma(const luce_attn_args & a, cudaStream_t stream);
