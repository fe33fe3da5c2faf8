// pyluce: GGML_OP_LUCE on the CPU backend, seen from ggml-cpu.c.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

void   ggml_luce_cpu_compute(const struct ggml_compute_params * params, struct ggml_tensor * dst);
size_t ggml_luce_cpu_work_size(const struct ggml_tensor * dst, int n_tasks);

// Of a product in a row graph, weight rows [w_begin, w_end) times rows [x_begin, x_end), in tiles, each with the bits that vec_dot gives.
// The rows are in params->wdata, converted to the weights' vec_dot type. False, and nothing is done, where vec_dot is as good.
bool ggml_luce_cpu_row_products(
        const struct ggml_compute_params * params, struct ggml_tensor * dst,
        int64_t w_begin, int64_t w_end, int64_t x_begin, int64_t x_end);

#ifdef __cplusplus
}
#endif
