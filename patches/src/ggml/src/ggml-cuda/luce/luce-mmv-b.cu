// pyluce: the row product kernel for Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL and IQ4_XS.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-mmv-kernel.cuh"

template void luce_mmv_launch<GGML_TYPE_Q4_0>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_Q4_1>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_Q5_0>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_Q5_1>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_IQ4_NL>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_IQ4_XS>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
