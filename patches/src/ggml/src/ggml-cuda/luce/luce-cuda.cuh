// pyluce: GGML_OP_LUCE on CUDA and HIP, and the matrix products of marked graphs.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "ggml-luce.h"

struct ggml_backend_cuda_context;

// what ggml-cuda.cu calls

bool ggml_luce_cuda_supports(int device, const ggml_tensor * op);
void ggml_luce_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// MUL_MAT and MUL_MAT_ID whose phase is ROW or CHUNK
bool ggml_luce_cuda_mul_mat_supports(int device, const ggml_tensor * op);
void ggml_luce_cuda_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// whether node i is of a graph of ours: then upstream's fusions, which depend on the number of rows, stay away from it
bool ggml_luce_cuda_owns(const ggml_cgraph * graph, int i);

// computes node i with as many of the following ones as one launch covers; how many of those, 0 when nothing was computed
int ggml_luce_cuda_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i);

// one entry a kind

void luce_cuda_hc_init    (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_hc_norm    (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_hc_mix     (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_hc_combine (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_norm_rope  (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_gdn        (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_qsa_pool   (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_qsa_select (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_qsa_attn   (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_ple_gate   (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_ple_conv   (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_route      (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_moe_combine(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_silu_scale (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_argmax     (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_moe_join   (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_pick_split (ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void luce_cuda_pick_merge (ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// whether the device kernels take these sizes; the reason is logged once a call when they do not
bool luce_cuda_route_supports(const ggml_tensor * op);
bool luce_cuda_gdn_supports(int device, const ggml_tensor * op);
bool luce_cuda_qsa_supports(int device, const ggml_tensor * op); // norm_rope, qsa_pool, qsa_select, qsa_attn

// products of a chunk graph: src0 any quantised or float type listed in `supports`, src1 F32; MUL_MAT and MUL_MAT_ID
bool luce_cuda_chunk_mul_mat_supports(int device, const ggml_tensor * op);
void luce_cuda_chunk_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
// node i, a chunk product, with the products of the same x that follow it; how many nodes after i that was, 0: nothing done
int luce_cuda_chunk_mul_mat_run(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i);


// qsa_attn of a qsa_select that chooses every complete block, whose result is not there
void luce_cuda_qsa_attn_all(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// node i and the neighbours that wait for the projections of a sparse attention layer alone, or a selection of everything with its
// attention; how many nodes after i that was, 0: nothing done
int luce_cuda_qsa_run(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i);

// products of a row graph, each row as if it were alone
bool luce_cuda_row_mul_mat_supports(int device, const ggml_tensor * op);
void luce_cuda_row_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
