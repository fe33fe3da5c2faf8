// pyluce: kernels made for launches of row products: experts of other types.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#include "luce-lean.cuh"

LEAN_INSTANTIATE(lean_gate_up_q5_k)
LEAN_INSTANTIATE(lean_gate_up_q6_k)
LEAN_INSTANTIATE(lean_gate_up_iq4_nl)
LEAN_INSTANTIATE(lean_down_q8_0)
#endif
