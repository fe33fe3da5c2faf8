// pyluce: launches of hyper-connections that also write the next product's columns in 8 bits.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-stream.cuh"

void luce_cuda_hc_init_x8(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const luce_stream_x8 & x8);
void luce_cuda_hc_norm_x8(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const luce_stream_x8 & x8);
void luce_cuda_hc_combine_x8(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const luce_stream_x8 & x8);

// moe_combine and the hc_combine (with a norm) that takes its result, in one launch; early: what it reads beside the results of experts is there before
// the kernel in front has finished
void luce_cuda_moe_hc_combine(ggml_backend_cuda_context & ctx, const ggml_tensor * moe, ggml_tensor * dst, bool early, const luce_stream_x8 & x8);
