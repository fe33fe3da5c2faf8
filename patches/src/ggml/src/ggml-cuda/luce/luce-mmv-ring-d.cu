// pyluce: the ring kernel for one and two columns, 16 warps a thread block.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#ifndef GGML_USE_HIP
#include "luce-mmv-ring.cuh"

template void luce_ring_launch<1, 512>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_ring_launch<2, 512>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
#endif
