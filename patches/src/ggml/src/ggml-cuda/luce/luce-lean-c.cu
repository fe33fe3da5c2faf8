// pyluce: kernels made for launches of row products: experts.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#include "luce-lean.cuh"

LEAN_INSTANTIATE(lean_gate_up_q4_k)
LEAN_INSTANTIATE(lean_gate_up_q8_0)
LEAN_INSTANTIATE(lean_down_iq4_nl)
#endif
