// pyluce: the ring kernel for up to four columns, 16 warps a thread block.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#ifndef GGML_USE_HIP
#include "luce-mmv-ring.cuh"

template void luce_ring_launch<4, 512>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
#endif
