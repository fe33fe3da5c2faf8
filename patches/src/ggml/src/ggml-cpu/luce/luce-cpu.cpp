// pyluce: the table of luce kinds on the CPU backend.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-cpu.h"

#include "luce-impl.h"

#include "ggml-luce-path.h"

namespace {

struct luce_kind_entry {
    luce_kernel_t compute;
    size_t (*work_size)(const ggml_tensor * dst, int n_tasks);
};

const luce_kind_entry kinds[GGML_LUCE_KIND_COUNT] = {
    /* GGML_LUCE_HC_INIT     */ { luce_hc_init,     nullptr },
    /* GGML_LUCE_HC_NORM     */ { luce_hc_norm,     nullptr },
    /* GGML_LUCE_HC_MIX      */ { luce_hc_mix,      nullptr },
    /* GGML_LUCE_HC_COMBINE  */ { luce_hc_combine,  nullptr },
    /* GGML_LUCE_NORM_ROPE   */ { luce_norm_rope,   nullptr },
    /* GGML_LUCE_GDN         */ { luce_gdn,         luce_gdn_work_size },
    /* GGML_LUCE_QSA_POOL    */ { luce_qsa_pool,    nullptr },
    /* GGML_LUCE_QSA_SELECT  */ { luce_qsa_select,  luce_qsa_select_work_size },
    /* GGML_LUCE_QSA_ATTN    */ { luce_qsa_attn,    luce_qsa_attn_work_size },
    /* GGML_LUCE_PLE_GATE    */ { luce_ple_gate,    nullptr },
    /* GGML_LUCE_PLE_CONV    */ { luce_ple_conv,    nullptr },
    /* GGML_LUCE_ROUTE       */ { luce_route,       nullptr },
    /* GGML_LUCE_MOE_COMBINE */ { luce_moe_combine, nullptr },
    /* GGML_LUCE_SILU_SCALE  */ { luce_silu_scale,  nullptr },
    /* GGML_LUCE_ARGMAX      */ { luce_argmax,      nullptr },
    /* GGML_LUCE_MOE_JOIN    */ { luce_moe_join,    nullptr },
    /* GGML_LUCE_PICK_SPLIT  */ { luce_pick_split,  nullptr },
    /* GGML_LUCE_PICK_MERGE  */ { luce_pick_merge,  nullptr },
};

const luce_kind_entry & entry_of(const ggml_tensor * dst) {
    const int32_t kind = ggml_get_op_params_i32(dst, 0);
    GGML_ASSERT(kind >= 0 && kind < GGML_LUCE_KIND_COUNT);
    return kinds[kind];
}

} // namespace

void ggml_luce_cpu_compute(const ggml_compute_params * params, ggml_tensor * dst) {
    ggml_luce_path(ggml_luce_kind_name((ggml_luce_kind) ggml_get_op_params_i32(dst, 0)));
    entry_of(dst).compute(params, dst);
}

size_t ggml_luce_cpu_work_size(const ggml_tensor * dst, int n_tasks) {
    const luce_kind_entry & entry = entry_of(dst);
    return entry.work_size ? entry.work_size(dst, n_tasks) : 0;
}
