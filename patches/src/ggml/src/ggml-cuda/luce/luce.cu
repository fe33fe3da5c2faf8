// pyluce: the table of luce kinds on a CUDA or HIP device, and which products and sizes its kernels take.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-common.cuh"

#include "ggml-luce-path.h"

namespace {

typedef void (*luce_cuda_kernel_t)(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

const luce_cuda_kernel_t kinds[GGML_LUCE_KIND_COUNT] = {
    /* GGML_LUCE_HC_INIT     */ luce_cuda_hc_init,
    /* GGML_LUCE_HC_NORM     */ luce_cuda_hc_norm,
    /* GGML_LUCE_HC_MIX      */ luce_cuda_hc_mix,
    /* GGML_LUCE_HC_COMBINE  */ luce_cuda_hc_combine,
    /* GGML_LUCE_NORM_ROPE   */ luce_cuda_norm_rope,
    /* GGML_LUCE_GDN         */ luce_cuda_gdn,
    /* GGML_LUCE_QSA_POOL    */ luce_cuda_qsa_pool,
    /* GGML_LUCE_QSA_SELECT  */ luce_cuda_qsa_select,
    /* GGML_LUCE_QSA_ATTN    */ luce_cuda_qsa_attn,
    /* GGML_LUCE_PLE_GATE    */ luce_cuda_ple_gate,
    /* GGML_LUCE_PLE_CONV    */ luce_cuda_ple_conv,
    /* GGML_LUCE_ROUTE       */ luce_cuda_route,
    /* GGML_LUCE_MOE_COMBINE */ luce_cuda_moe_combine,
    /* GGML_LUCE_SILU_SCALE  */ luce_cuda_silu_scale,
    /* GGML_LUCE_ARGMAX      */ luce_cuda_argmax,
    /* GGML_LUCE_MOE_JOIN    */ luce_cuda_moe_join,
    /* GGML_LUCE_PICK_SPLIT  */ luce_cuda_pick_split,
    /* GGML_LUCE_PICK_MERGE  */ luce_cuda_pick_merge,
};

} // namespace

bool ggml_luce_cuda_supports(int device, const ggml_tensor * op) {
    switch (ggml_get_op_params_i32(op, 0)) {
        case GGML_LUCE_GDN:
            return luce_cuda_gdn_supports(device, op);
        case GGML_LUCE_ROUTE:
            return luce_cuda_route_supports(op);
        case GGML_LUCE_NORM_ROPE:
        case GGML_LUCE_QSA_POOL:
        case GGML_LUCE_QSA_SELECT:
        case GGML_LUCE_QSA_ATTN:
            return luce_cuda_qsa_supports(device, op);
        default:
            return true;
    }
}

void ggml_luce_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const int32_t kind = ggml_get_op_params_i32(dst, 0);
    GGML_ASSERT(kind >= 0 && kind < GGML_LUCE_KIND_COUNT);
    ggml_luce_path(ggml_luce_kind_name((ggml_luce_kind) kind));
    kinds[kind](ctx, dst);
    CUDA_CHECK(cudaGetLastError());
}

bool ggml_luce_cuda_mul_mat_supports(int device, const ggml_tensor * op) {
    return ggml_luce_get_phase(op) == GGML_LUCE_PHASE_ROW ? luce_cuda_row_mul_mat_supports(device, op) :
                                                            luce_cuda_chunk_mul_mat_supports(device, op);
}

void ggml_luce_cuda_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (ggml_luce_get_phase(dst) == GGML_LUCE_PHASE_ROW) {
        luce_cuda_row_mul_mat(ctx, dst);
    } else {
        luce_cuda_chunk_mul_mat(ctx, dst);
    }
    CUDA_CHECK(cudaGetLastError());
}
