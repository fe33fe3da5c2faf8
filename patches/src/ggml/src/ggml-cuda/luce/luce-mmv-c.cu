// pyluce: the row product kernel for Q2_0, Q2_K, Q3_K, Q5_K, Q6_K, IQ3_S and IQ3_XXS.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-mmv-kernel.cuh"

template void luce_mmv_launch<GGML_TYPE_Q2_0>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_Q2_K>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_Q3_K>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_Q5_K>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_Q6_K>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_IQ3_S>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
template void luce_mmv_launch<GGML_TYPE_IQ3_XXS>(ggml_backend_cuda_context &, const luce_jobs &, int, size_t);
