// pyluce: GGML_OP_LUCE on the CPU backend, seen from ggml-cpu.c.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "ggml.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

void   ggml_luce_cpu_compute(const struct ggml_compute_params * params, struct ggml_tensor * dst);
size_t ggml_luce_cpu_work_size(const struct ggml_tensor * dst, int n_tasks);

#ifdef __cplusplus
}
#endif
