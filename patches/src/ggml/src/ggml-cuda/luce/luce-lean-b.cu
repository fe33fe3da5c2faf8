// pyluce: kernels made for launches of row products: router and hyper-connections.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#include "luce-lean.cuh"

LEAN_INSTANTIATE(lean_router)
LEAN_INSTANTIATE(lean_hc_down)
LEAN_INSTANTIATE(lean_hc_up)
#endif
