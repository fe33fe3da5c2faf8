// pyluce: the ring kernel for up to four columns.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-mmv-ring.cuh"

template void luce_ring_launch<4, 256>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
