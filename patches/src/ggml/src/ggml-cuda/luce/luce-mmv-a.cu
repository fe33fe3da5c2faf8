// pyluce: the row product kernel for F32, F16, BF16, Q8_0 and Q4_K.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-mmv-kernel.cuh"

template void luce_mmv_launch<GGML_TYPE_F32>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_F16>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_BF16>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_Q8_0>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_Q4_K>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
