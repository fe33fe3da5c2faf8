// pyluce: a device's table of choices, measured by `luce tune`.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "ggml-backend.h"

#include <cstdint>

enum luce_tune_kind {
    LUCE_TUNE_ROW = 0, // a row product: lanes or warps that share a row of weights (luce-mmv.cuh); bits depend on it, so it is never one of `rows`
    LUCE_TUNE_CHUNK,   // a chunk product: luce_tune_chunk, for up to `rows` columns; bits do not depend on it
    LUCE_TUNE_KIND_COUNT,
};

enum luce_tune_chunk {
    LUCE_CHUNK_NARROW = 1, // weights widened tile by tile, tiles of few columns (CUDA alone)
    LUCE_CHUNK_TILES,      // the same, tiles of many
    LUCE_CHUNK_WIDENED,    // all of the weights widened first, then a product of 16-bit matrices (dense ones alone)
};

// The table's choice for products of weights [k, m] of a type, n_used picks a row (0: dense), or `otherwise` where it has none.
// rows: columns of a chunk product, 0 for a row product. The answer is one of the kind's candidates, or `otherwise`.
int luce_tune_of(int device, luce_tune_kind kind, ggml_type type, int64_t k, int64_t m, int64_t n_used, int64_t rows, int otherwise);

// the smallest power of two that holds so many columns, 16 at least: products of as many have one choice
int64_t luce_tune_rows(int64_t rows);

// What a kind's kernels can do for a product, the values that luce_tune_of may return: how many, the first n_max of them in `values`.
int luce_mmv_candidates(int device, ggml_type type, int64_t k, int64_t m, int64_t n_used, int * values, int n_max);
int luce_mmb_candidates(int device, ggml_type type, int64_t k, int64_t m, int64_t n_used, int64_t rows, int * values, int n_max);

// Called by Python, which finds them by name. Graphs that were captured before a change keep the choices they were captured with.
extern "C" {

// the candidates of a product; -1 for a kind, type or device that is unknown
GGML_BACKEND_API int ggml_luce_tune_candidates(
        int device, int kind, int type, int64_t k, int64_t m, int64_t n_used, int64_t rows, int * values, int n_max);
// false: not a candidate
GGML_BACKEND_API bool ggml_luce_tune_set(int device, int kind, int type, int64_t k, int64_t m, int64_t n_used, int64_t rows, int value);
GGML_BACKEND_API void ggml_luce_tune_clear(int device);
// of the driver; 0 when it does not say
GGML_BACKEND_API int ggml_luce_tune_driver(void);

}
