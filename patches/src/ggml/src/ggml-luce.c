// pyluce: constructors and shape rules of GGML_OP_LUCE; ggml-luce.h documents them.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE 1 // pread
#endif

#include "ggml-luce.h"
#include "ggml-luce-path.h"

#include "ggml-impl.h"
#include "ggml-luce-stamp.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// of the rows that one system call reads, unless a single row is longer
#define PREAD_BYTES 65536

// the op parameters of a luce node: [0] kind, [1..] of the kind
#define P_KIND 0

const char * ggml_luce_stamp(void) {
    return GGML_LUCE_STAMP;
}

const char * ggml_luce_kind_name(enum ggml_luce_kind kind) {
    static const char * names[GGML_LUCE_KIND_COUNT] = {
        "hc_init", "hc_norm", "hc_mix", "hc_combine", "norm_rope", "gdn", "qsa_pool", "qsa_select", "qsa_attn",
        "ple_gate", "ple_conv", "route", "moe_combine", "silu_scale", "argmax",
        "moe_join", "pick_split", "pick_merge",
    };
    return kind >= 0 && kind < GGML_LUCE_KIND_COUNT ? names[kind] : "unknown";
}

#define PATHS_BYTES 512

static _Thread_local bool paths_wanted = false;
static _Thread_local char paths[PATHS_BYTES];

void ggml_luce_paths_start(void) {
    paths[0] = 0;
    paths_wanted = true;
}

const char * ggml_luce_paths_stop(void) {
    paths_wanted = false;
    return paths;
}

// whether one of the notes so far is this
static bool is_noted(const char * what, size_t n_what) {
    for (const char * at = strstr(paths, what); at != NULL; at = strstr(at + 1, what)) {
        const bool begins = at == paths || at[-1] == ' ';
        const bool ends   = at[n_what] == 0 || at[n_what] == ',';
        if (begins && ends) {
            return true;
        }
    }
    return false;
}

void ggml_luce_path(const char * what) {
    if (!paths_wanted) {
        return;
    }
    const size_t n_what = strlen(what);
    const size_t n_paths = strlen(paths);
    if (is_noted(what, n_what) || n_paths + n_what + 3 > PATHS_BYTES) {
        return;
    }
    snprintf(paths + n_paths, PATHS_BYTES - n_paths, "%s%s", n_paths > 0 ? ", " : "", what);
}

static bool fits(bool condition, enum ggml_luce_kind kind, const char * rule) {
    if (!condition) {
        GGML_LOG_ERROR("luce op %s: expected %s\n", ggml_luce_kind_name(kind), rule);
    }
    return condition;
}

#define EXPECT(rule) do { if (!fits((rule), kind, #rule)) { return NULL; } } while (0)

static bool is_f32(const struct ggml_tensor * t) {
    return t != NULL && t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float);
}

// F32 [ne0, ne1], each row contiguous
static bool is_rows(const struct ggml_tensor * t, int64_t ne0, int64_t ne1) {
    return is_f32(t) && t->ne[0] == ne0 && t->ne[1] == ne1 && t->ne[2] == 1 && t->ne[3] == 1;
}

static bool is_whole(const struct ggml_tensor * t) {
    return is_f32(t) && ggml_is_contiguous(t);
}

static bool is_vector(const struct ggml_tensor * t, int64_t n) {
    return is_whole(t) && ggml_nelements(t) == n;
}

static bool is_rows_table(const struct ggml_tensor * t, int64_t n) {
    return t != NULL && t->type == GGML_TYPE_I32 && ggml_is_contiguous(t) && t->ne[0] == 4 && t->ne[1] == n;
}

static bool is_ids(const struct ggml_tensor * t, int64_t ne0, int64_t ne1) {
    return t != NULL && t->type == GGML_TYPE_I32 && ggml_is_contiguous(t) && t->ne[0] == ne0 && t->ne[1] == ne1 && t->ne[2] == 1 && t->ne[3] == 1;
}

static bool is_pages(const struct ggml_tensor * t) {
    return t != NULL && t->type == GGML_TYPE_I32 && ggml_is_contiguous(t) && t->ne[2] == 1 && t->ne[3] == 1;
}

static struct ggml_tensor * finish(struct ggml_tensor * dst, enum ggml_luce_kind kind, const struct ggml_tensor * const * src, int n_src) {
    dst->op = GGML_OP_LUCE;
    ggml_set_op_params_i32(dst, P_KIND, (int32_t) kind);
    for (int i = 0; i < n_src; i++) {
        dst->src[i] = (struct ggml_tensor *) (uintptr_t) src[i];
    }
    return dst;
}

#define FINISH(dst, ...)                                              \
    do {                                                              \
        const struct ggml_tensor * const src_[] = { __VA_ARGS__ };    \
        return finish(dst, kind, src_, (int) (sizeof(src_) / sizeof(src_[0]))); \
    } while (0)

struct ggml_tensor * ggml_luce_hc_init(
        struct ggml_context * ctx, struct ggml_tensor * embd, struct ggml_tensor * norm, int n_stream, float eps) {
    const enum ggml_luce_kind kind = GGML_LUCE_HC_INIT;
    EXPECT(is_rows(embd, embd->ne[0], embd->ne[1]) && n_stream > 0);
    EXPECT(is_vector(norm, embd->ne[0] * n_stream));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_stream * embd->ne[0], 2 * embd->ne[1]);
    ggml_set_op_params_i32(dst, 1, n_stream);
    ggml_set_op_params_f32(dst, 2, eps);
    FINISH(dst, embd, norm);
}

struct ggml_tensor * ggml_luce_hc_norm(
        struct ggml_context * ctx, struct ggml_tensor * residual, struct ggml_tensor * norm, int n_stream, float eps) {
    const enum ggml_luce_kind kind = GGML_LUCE_HC_NORM;
    EXPECT(is_rows(residual, residual->ne[0], residual->ne[1]) && n_stream > 0 && residual->ne[0] % n_stream == 0);
    EXPECT(is_vector(norm, residual->ne[0]));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, residual->ne[0], residual->ne[1]);
    ggml_set_op_params_i32(dst, 1, n_stream);
    ggml_set_op_params_f32(dst, 2, eps);
    FINISH(dst, residual, norm);
}

struct ggml_tensor * ggml_luce_hc_mix(
        struct ggml_context * ctx, struct ggml_tensor * xn, struct ggml_tensor * gate, int n_stream) {
    const enum ggml_luce_kind kind = GGML_LUCE_HC_MIX;
    EXPECT(is_rows(xn, xn->ne[0], xn->ne[1]) && n_stream > 0 && xn->ne[0] % n_stream == 0);
    EXPECT(is_rows(gate, xn->ne[0], xn->ne[1]));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, xn->ne[0] / n_stream, xn->ne[1]);
    ggml_set_op_params_i32(dst, 1, n_stream);
    FINISH(dst, xn, gate);
}

struct ggml_tensor * ggml_luce_hc_combine(
        struct ggml_context * ctx, struct ggml_tensor * residual, struct ggml_tensor * block, struct ggml_tensor * inject,
        struct ggml_tensor * norm, float eps) {
    const enum ggml_luce_kind kind = GGML_LUCE_HC_COMBINE;
    const int64_t n = residual->ne[0];
    const int64_t t = residual->ne[1];
    EXPECT(is_rows(residual, n, t) && inject != NULL && inject->ne[0] > 0 && n % inject->ne[0] == 0);
    EXPECT(is_rows(inject, inject->ne[0], t));
    EXPECT(is_rows(block, n / inject->ne[0], t));
    EXPECT(norm == NULL || is_vector(norm, n));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, norm ? 2 * t : t);
    ggml_set_op_params_i32(dst, 1, (int32_t) inject->ne[0]);
    ggml_set_op_params_f32(dst, 2, eps);
    FINISH(dst, residual, block, inject, norm);
}

struct ggml_tensor * ggml_luce_norm_rope(
        struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * norm, struct ggml_tensor * rope,
        int n_head, int head_stride, float eps) {
    const enum ggml_luce_kind kind = GGML_LUCE_NORM_ROPE;
    EXPECT(is_whole(norm) && n_head > 0 && head_stride >= ggml_nelements(norm));
    const int64_t d = ggml_nelements(norm);
    EXPECT(is_rows(x, x->ne[0], x->ne[1]) && x->ne[0] >= (int64_t) head_stride * (n_head - 1) + d);
    EXPECT(is_rows(rope, rope->ne[0], x->ne[1]) && rope->ne[0] % 2 == 0 && rope->ne[0] <= d);
    struct ggml_tensor * dst = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, n_head, x->ne[1]);
    ggml_set_op_params_i32(dst, 1, head_stride);
    ggml_set_op_params_f32(dst, 2, eps);
    FINISH(dst, x, norm, rope);
}

struct ggml_tensor * ggml_luce_gdn(
        struct ggml_context * ctx, struct ggml_tensor * qkv, struct ggml_tensor * z, struct ggml_tensor * beta,
        struct ggml_tensor * alpha, struct ggml_tensor * conv, struct ggml_tensor * misc, struct ggml_tensor * state,
        struct ggml_tensor * history, struct ggml_tensor * rows, int n_k_head, float eps, bool keep_rows, int fault) {
    const enum ggml_luce_kind kind = GGML_LUCE_GDN;
    const int64_t t  = qkv->ne[1];
    const int64_t nv = beta->ne[0];
    EXPECT(nv > 0 && n_k_head > 0 && nv % n_k_head == 0 && z->ne[0] % nv == 0);
    const int64_t d = z->ne[0] / nv;
    const int64_t c = 2 * d * n_k_head + d * nv;
    EXPECT(is_rows(qkv, c, t) && is_rows(z, d * nv, t) && is_rows(beta, nv, t) && is_rows(alpha, nv, t));
    EXPECT(is_whole(conv) && conv->ne[0] == c && conv->ne[1] >= 1 && conv->ne[1] <= 8 && conv->ne[2] == 1);
    EXPECT(is_vector(misc, 2 * nv + d));
    EXPECT(is_whole(state) && state->ne[0] == d * d * nv && state->ne[1] >= 1);
    EXPECT(is_whole(history) && history->ne[0] == c && history->ne[1] >= conv->ne[1] && history->ne[2] == state->ne[2]);
    EXPECT(is_rows_table(rows, t));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d * nv, t);
    ggml_set_op_params_i32(dst, 1, n_k_head);
    ggml_set_op_params_f32(dst, 2, eps);
    ggml_set_op_params_i32(dst, 3, keep_rows);
    ggml_set_op_params_i32(dst, 4, fault);
    FINISH(dst, qkv, z, beta, alpha, conv, misc, state, history, rows);
}

struct ggml_tensor * ggml_luce_qsa_pool(
        struct ggml_context * ctx, struct ggml_tensor * k, struct ggml_tensor * norm, struct ggml_tensor * rope,
        struct ggml_tensor * raw, struct ggml_tensor * pooled, struct ggml_tensor * pages, struct ggml_tensor * rows,
        int ratio, float eps) {
    const enum ggml_luce_kind kind = GGML_LUCE_QSA_POOL;
    const int64_t d = k->ne[0];
    const int64_t t = k->ne[1];
    EXPECT(is_rows(k, d, t) && is_vector(norm, d));
    EXPECT(is_rows(rope, rope->ne[0], t) && rope->ne[0] % 2 == 0 && rope->ne[0] <= d);
    EXPECT(ratio > 0 && GGML_LUCE_PAGE % ratio == 0);
    EXPECT(is_whole(raw) && raw->ne[0] == d && raw->ne[1] % GGML_LUCE_PAGE == 0);
    EXPECT(is_whole(pooled) && pooled->ne[0] == d && pooled->ne[1] * ratio == raw->ne[1]);
    EXPECT(is_pages(pages) && is_rows_table(rows, t));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 1, t);
    ggml_set_op_params_i32(dst, 1, ratio);
    ggml_set_op_params_f32(dst, 2, eps);
    FINISH(dst, k, norm, rope, raw, pooled, pages, rows);
}

struct ggml_tensor * ggml_luce_qsa_select(
        struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * pooled, struct ggml_tensor * after,
        struct ggml_tensor * pages, struct ggml_tensor * rows, int ratio, int n_top, int n_block_max, int fault) {
    const enum ggml_luce_kind kind = GGML_LUCE_QSA_SELECT;
    EXPECT(is_whole(q) && q->ne[3] == 1);
    EXPECT(is_whole(pooled) && pooled->ne[0] == q->ne[0]);
    EXPECT(ratio > 0 && GGML_LUCE_PAGE % ratio == 0 && n_top > 0 && n_block_max > 0);
    EXPECT(after != NULL && is_pages(pages) && is_rows_table(rows, q->ne[2]));
    EXPECT((int64_t) n_block_max * ratio <= pages->ne[0] * GGML_LUCE_PAGE);
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1 + n_top, q->ne[2]);
    ggml_set_op_params_i32(dst, 1, ratio);
    ggml_set_op_params_i32(dst, 2, n_top);
    ggml_set_op_params_i32(dst, 3, n_block_max);
    ggml_set_op_params_i32(dst, 4, fault);
    FINISH(dst, q, pooled, after, pages, rows);
}

struct ggml_tensor * ggml_luce_qsa_attn(
        struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k, struct ggml_tensor * v,
        struct ggml_tensor * selected, struct ggml_tensor * gate, struct ggml_tensor * pages, struct ggml_tensor * rows,
        int ratio, int gate_stride, float scale, int fault) {
    const enum ggml_luce_kind kind = GGML_LUCE_QSA_ATTN;
    const int64_t d      = q->ne[0];
    const int64_t n_head = q->ne[1];
    const int64_t t      = q->ne[2];
    EXPECT(is_whole(q) && q->ne[3] == 1);
    EXPECT(k->type == v->type && (k->type == GGML_TYPE_F32 || k->type == GGML_TYPE_F16));
    EXPECT(ggml_is_contiguous(k) && ggml_is_contiguous(v) && k->ne[0] == v->ne[0] && k->ne[1] == v->ne[1]);
    EXPECT(k->ne[0] % d == 0 && n_head % (k->ne[0] / d) == 0);
    EXPECT(ratio > 0 && GGML_LUCE_PAGE % ratio == 0);
    EXPECT(selected->type == GGML_TYPE_I32 && ggml_is_contiguous(selected) && selected->ne[1] == t);
    EXPECT(is_rows(gate, gate->ne[0], t) && gate->ne[0] >= (n_head - 1) * (int64_t) gate_stride + d);
    EXPECT(is_pages(pages) && is_rows_table(rows, t));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d * n_head, t);
    ggml_set_op_params_i32(dst, 1, ratio);
    ggml_set_op_params_i32(dst, 2, gate_stride);
    ggml_set_op_params_f32(dst, 3, scale);
    ggml_set_op_params_i32(dst, 4, fault);
    FINISH(dst, q, k, v, selected, gate, pages, rows);
}

struct ggml_tensor * ggml_luce_ple_gate(
        struct ggml_context * ctx, struct ggml_tensor * key, struct ggml_tensor * value, struct ggml_tensor * residual,
        struct ggml_tensor * norm_key, struct ggml_tensor * norm_query, struct ggml_tensor * norm_conv, int n_stream, float eps) {
    const enum ggml_luce_kind kind = GGML_LUCE_PLE_GATE;
    const int64_t n = key->ne[0];
    const int64_t t = key->ne[1];
    EXPECT(n_stream > 0 && n % n_stream == 0);
    EXPECT(is_rows(key, n, t) && is_rows(residual, n, t) && is_rows(value, n / n_stream, t));
    EXPECT(is_vector(norm_key, n) && is_vector(norm_query, n) && is_vector(norm_conv, n));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 2 * n, t);
    ggml_set_op_params_i32(dst, 1, n_stream);
    ggml_set_op_params_f32(dst, 2, eps);
    FINISH(dst, key, value, residual, norm_key, norm_query, norm_conv);
}

struct ggml_tensor * ggml_luce_ple_conv(
        struct ggml_context * ctx, struct ggml_tensor * gated, struct ggml_tensor * residual, struct ggml_tensor * conv,
        struct ggml_tensor * history, struct ggml_tensor * rows, int dilation) {
    const enum ggml_luce_kind kind = GGML_LUCE_PLE_CONV;
    const int64_t n = residual->ne[0];
    const int64_t t = residual->ne[1];
    EXPECT(is_rows(residual, n, t) && is_rows(gated, 2 * n, t) && dilation > 0);
    EXPECT(is_whole(conv) && conv->ne[0] == n && conv->ne[1] >= 1 && conv->ne[1] <= 8 && conv->ne[2] == 1);
    EXPECT(is_whole(history) && history->ne[0] == n && history->ne[1] >= (conv->ne[1] - 1) * dilation + 1);
    EXPECT(is_rows_table(rows, t));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, t);
    ggml_set_op_params_i32(dst, 1, dilation);
    FINISH(dst, gated, residual, conv, history, rows);
}

struct ggml_tensor * ggml_luce_route(struct ggml_context * ctx, struct ggml_tensor * logits, int n_used) {
    const enum ggml_luce_kind kind = GGML_LUCE_ROUTE;
    EXPECT(is_rows(logits, logits->ne[0], logits->ne[1]) && n_used > 0 && n_used <= logits->ne[0]);
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, logits->ne[1]);
    FINISH(dst, logits);
}

struct ggml_tensor * ggml_luce_moe_combine(
        struct ggml_context * ctx, struct ggml_tensor * picks, struct ggml_tensor * logits, struct ggml_tensor * ids,
        struct ggml_tensor * shared, struct ggml_tensor * shared_gate) {
    const enum ggml_luce_kind kind = GGML_LUCE_MOE_COMBINE;
    const int64_t n = picks->ne[0];
    const int64_t u = picks->ne[1];
    const int64_t t = picks->ne[2];
    EXPECT(is_whole(picks) && picks->ne[3] == 1 && u <= 64);
    EXPECT(is_rows(logits, logits->ne[0], t) && (shared == NULL) == (shared_gate == NULL));
    EXPECT(shared == NULL || (is_rows(shared, n, t) && is_rows(shared_gate, 1, t)));
    EXPECT(is_ids(ids, u, t));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, t);
    FINISH(dst, picks, logits, ids, shared, shared_gate);
}

struct ggml_tensor * ggml_luce_moe_join(
        struct ggml_context * ctx, struct ggml_tensor * sum, struct ggml_tensor * shared, struct ggml_tensor * shared_gate) {
    const enum ggml_luce_kind kind = GGML_LUCE_MOE_JOIN;
    EXPECT(is_rows(sum, sum->ne[0], sum->ne[1]) && is_rows(shared, sum->ne[0], sum->ne[1]) && is_rows(shared_gate, 1, sum->ne[1]));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, sum->ne[0], sum->ne[1]);
    FINISH(dst, sum, shared, shared_gate);
}

struct ggml_tensor * ggml_luce_pick_split(struct ggml_context * ctx, struct ggml_tensor * ids, struct ggml_tensor * slots) {
    const enum ggml_luce_kind kind = GGML_LUCE_PICK_SPLIT;
    EXPECT(is_ids(ids, ids->ne[0], ids->ne[1]) && is_ids(slots, slots->ne[0], 1));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, ids->ne[0], 2 * ids->ne[1]);
    FINISH(dst, ids, slots);
}

struct ggml_tensor * ggml_luce_pick_merge(
        struct ggml_context * ctx, struct ggml_tensor * here, struct ggml_tensor * there, struct ggml_tensor * places) {
    const enum ggml_luce_kind kind = GGML_LUCE_PICK_MERGE;
    EXPECT(is_whole(here) && is_whole(there) && ggml_are_same_shape(here, there) && here->ne[3] == 1);
    EXPECT(is_ids(places, here->ne[1], here->ne[2]));
    struct ggml_tensor * dst = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, here->ne[0], here->ne[1], here->ne[2]);
    FINISH(dst, here, there, places);
}

struct ggml_tensor * ggml_luce_silu_scale(struct ggml_context * ctx, struct ggml_tensor * x, float scale) {
    const enum ggml_luce_kind kind = GGML_LUCE_SILU_SCALE;
    EXPECT(is_rows(x, x->ne[0], x->ne[1]));
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1]);
    ggml_set_op_params_f32(dst, 1, scale);
    FINISH(dst, x);
}

struct ggml_tensor * ggml_luce_argmax(struct ggml_context * ctx, struct ggml_tensor * logits) {
    const enum ggml_luce_kind kind = GGML_LUCE_ARGMAX;
    EXPECT(is_rows(logits, logits->ne[0], logits->ne[1]) && logits->ne[0] > 0);
    struct ggml_tensor * dst = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, logits->ne[1]);
    FINISH(dst, logits);
}

void ggml_luce_graph_retain(struct ggml_cgraph * graph) {
    graph->uid = ggml_graph_next_uid();
}

bool ggml_luce_set_phase(struct ggml_tensor * tensor, enum ggml_luce_phase phase) {
    if (tensor->op != GGML_OP_MUL_MAT && tensor->op != GGML_OP_MUL_MAT_ID) {
        return false;
    }
    ggml_set_op_params_i32(tensor, GGML_LUCE_PHASE_PARAM, (int32_t) phase);
    return true;
}

enum ggml_luce_phase ggml_luce_get_phase(const struct ggml_tensor * tensor) {
    return (enum ggml_luce_phase) ggml_get_op_params_i32(tensor, GGML_LUCE_PHASE_PARAM);
}

bool ggml_luce_dequantize_rows(
        enum ggml_type type, const void * base, size_t row_bytes, const int64_t * ids, int64_t n, int64_t ne0, float * dst) {
    if (type < 0 || type >= GGML_TYPE_COUNT) {
        return false;
    }
    const struct ggml_type_traits * traits = ggml_get_type_traits(type);
    for (int64_t i = 0; i < n; i++) {
        const char * row = (const char *) base + (size_t) (ids ? ids[i] : i) * row_bytes;
        if (type == GGML_TYPE_F32) {
            memcpy(dst + i * ne0, row, (size_t) ne0 * sizeof(float));
        } else if (traits->to_float != NULL) {
            traits->to_float(row, dst + i * ne0, ne0);
        } else {
            return false;
        }
    }
    return true;
}

// `size` bytes at `offset`: how many of them there are (fewer at the end of the file), or -errno
static int64_t pread_all(int fd, char * dst, size_t size, int64_t offset, int64_t * n_reads) {
    size_t done = 0;
    while (done < size) {
        const ssize_t got = pread(fd, dst + done, size - done, (off_t) (offset + (int64_t) done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return -(int64_t) errno;
        }
        ++*n_reads;
        if (got == 0) {
            break;
        }
        done += (size_t) got;
    }
    return (int64_t) done;
}

int64_t ggml_luce_pread_rows(
        int fd, int64_t offset, size_t row_bytes, enum ggml_type type, const int64_t * ids, const int64_t * to, int64_t n,
        int64_t ne0, float * dst, int64_t * n_reads) {
    if (type < 0 || type >= GGML_TYPE_COUNT || offset < 0 || n < 0 || ne0 <= 0 || ggml_blck_size(type) <= 0 ||
        ne0 % ggml_blck_size(type) != 0 || row_bytes != ggml_row_size(type, ne0)) {
        return -EINVAL;
    }
    const ggml_to_float_t to_float = ggml_get_type_traits(type)->to_float;
    if (type != GGML_TYPE_F32 && to_float == NULL) {
        return -EINVAL;
    }
    const int64_t n_most = row_bytes < PREAD_BYTES ? (int64_t) (PREAD_BYTES / row_bytes) : 1;
    char * raw = malloc((size_t) n_most * row_bytes);
    if (raw == NULL) {
        return -ENOMEM;
    }
    int64_t result = 0; // rows done, or what went wrong
    while (result >= 0 && result < n) {
        const int64_t first = result;
        int64_t end = first + 1;
        int64_t n_distinct = 1;
        for (; end < n; end++) {
            if (ids[end] == ids[end - 1]) {
                continue;
            }
            if (ids[end] - 1 != ids[end - 1] || n_distinct == n_most) {
                break;
            }
            n_distinct++;
        }
        if (ids[first] < 0 || ids[first] > (INT64_MAX - offset) / (int64_t) row_bytes - n_distinct) {
            result = -EINVAL;
            break;
        }
        const int64_t got = pread_all(fd, raw, (size_t) n_distinct * row_bytes, offset + ids[first] * (int64_t) row_bytes, n_reads);
        if (got < 0) {
            result = got;
            break;
        }
        const int64_t n_whole = got / (int64_t) row_bytes;
        for (; result < end && ids[result] - ids[first] < n_whole; result++) {
            float * row = dst + (to ? to[result] : result) * ne0;
            if (result > first && ids[result] == ids[result - 1]) {
                memcpy(row, dst + (to ? to[result - 1] : result - 1) * ne0, (size_t) ne0 * sizeof(float));
            } else if (type == GGML_TYPE_F32) {
                memcpy(row, raw + (ids[result] - ids[first]) * (int64_t) row_bytes, row_bytes);
            } else {
                to_float(raw + (ids[result] - ids[first]) * (int64_t) row_bytes, row, ne0);
            }
        }
        if (result < end) {
            break;
        }
    }
    free(raw);
    return result;
}
