// pyluce: kernels made for launches of row products: projections.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#include "luce-lean.cuh"

LEAN_INSTANTIATE(lean_few_rows)
LEAN_INSTANTIATE(lean_many_rows)
#endif
