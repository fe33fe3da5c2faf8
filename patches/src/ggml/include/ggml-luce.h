// pyluce: the ops of a qwen4exp row or chunk graph that find their sequence's state through inputs.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// Shapes are written as ggml prints them, fastest axis first. T is the number of rows of the graph (tokens, in any
// mix of sequences), H the hidden size, S the hyper-connection streams, D a head size. Every op treats its rows so
// that the result of a row depends on the row's own sequence alone: never on T, on its place, or on the threads.
//
// `rows` is I32 [4, T] in every op that has state: { slot, position, 0, 0 }. Rows of one slot stand together, in order of
// consecutive positions. A slot of -1 marks padding: such a row writes no state, and its output is zero.
//
// Recurrent state is addressed by position: a ring of R entries a slot, the state after `n` tokens in entry n % R, and a
// convolution's input of position p in entry p % R'. So clearing is starting again at position 0 (what is in the ring
// is never read), and rolling back k < R tokens is using a smaller position.
//
// Attention and indexer rows live in one pool a layer, in pages of GGML_LUCE_PAGE tokens; `pages` is I32 [n_page_max, n_slot].
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_LUCE_PAGE         64
#define GGML_LUCE_PHASE_PARAM   8  // index into op_params of MUL_MAT and MUL_MAT_ID
#define GGML_LUCE_SPINS_BEFORE_YIELD 20000 // of a waiting CPU thread; about 0.1 to 0.5 ms

enum ggml_luce_phase {
    GGML_LUCE_PHASE_UPSTREAM = 0,  // kernels chosen as upstream chooses them, by the number of rows too
    GGML_LUCE_PHASE_ROW      = 1,  // each row as if it were alone
    GGML_LUCE_PHASE_CHUNK    = 2,  // matrix kernels only; the graph pads T to a multiple of 16
};

enum ggml_luce_kind {
    GGML_LUCE_HC_INIT = 0,
    GGML_LUCE_HC_NORM,
    GGML_LUCE_HC_MIX,
    GGML_LUCE_HC_COMBINE,
    GGML_LUCE_NORM_ROPE,
    GGML_LUCE_GDN,
    GGML_LUCE_QSA_POOL,
    GGML_LUCE_QSA_SELECT,
    GGML_LUCE_QSA_ATTN,
    GGML_LUCE_PLE_GATE,
    GGML_LUCE_PLE_CONV,
    GGML_LUCE_ROUTE,
    GGML_LUCE_MOE_COMBINE,
    GGML_LUCE_SILU_SCALE,
    GGML_LUCE_ARGMAX,
    GGML_LUCE_MOE_JOIN,
    GGML_LUCE_PICK_SPLIT,
    GGML_LUCE_PICK_MERGE,
    GGML_LUCE_KIND_COUNT,
};

// Faults that the tests plant to see their comparisons fail; 0 in every real graph.
enum ggml_luce_fault {
    GGML_LUCE_FAULT_NONE       = 0,
    GGML_LUCE_FAULT_NAN_LEAK   = 1,  // a sequence that starts reads what its slot held before
    GGML_LUCE_FAULT_TIE_HIGH   = 2,  // equal block scores: the higher index wins
    GGML_LUCE_FAULT_SCAN_ORDER = 3,  // attention sums its values in an order that depends on T
    GGML_LUCE_FAULT_THREADS    = 4,  // attention sums its values in an order that depends on the threads
};

// what the library was built from: "pin=... patches=... flags=... compiler=..."
GGML_API const char * ggml_luce_stamp(void);
GGML_API const char * ggml_luce_kind_name(enum ggml_luce_kind kind);

// Every constructor returns NULL, with the reason in the log, when a shape or type does not fit.

// embd [H, T] -> [S*H, 2*T]: rows 0..T-1 the embedding on every stream, rows T..2T-1 its stream-wise RMS norm times
// norm [S*H] (two blocks of whole rows: matrix products want theirs contiguous)
GGML_API struct ggml_tensor * ggml_luce_hc_init(
        struct ggml_context * ctx, struct ggml_tensor * embd, struct ggml_tensor * norm, int n_stream, float eps);

// residual [S*H, T] (rows may be strided) -> [S*H, T]: stream-wise RMS norm times norm [S*H]
GGML_API struct ggml_tensor * ggml_luce_hc_norm(
        struct ggml_context * ctx, struct ggml_tensor * residual, struct ggml_tensor * norm, int n_stream, float eps);

// xn [S*H, T], gate [S*H, T] -> [H, T]: mean over the streams of xn * sigmoid(gate)
GGML_API struct ggml_tensor * ggml_luce_hc_mix(
        struct ggml_context * ctx, struct ggml_tensor * xn, struct ggml_tensor * gate, int n_stream);

// residual [S*H, T], block [H, T], inject [S, T] -> [S*H, 2*T]: rows 0..T-1 residual_s + block * 2*sigmoid(inject_s / S), rows
// T..2T-1 its stream-wise RMS norm times norm [S*H]; norm may be NULL: [S*H, T], the residual alone
GGML_API struct ggml_tensor * ggml_luce_hc_combine(
        struct ggml_context * ctx, struct ggml_tensor * residual, struct ggml_tensor * block, struct ggml_tensor * inject,
        struct ggml_tensor * norm, float eps);

// x: n_head heads of D values a row, head h at offset h*head_stride -> [D, n_head, T]: RMS norm times norm [D], then the first
// n_rot values rotated in pairs (i, i + n_rot/2) by rope [n_rot, T] = cos | sin of the row's angles
GGML_API struct ggml_tensor * ggml_luce_norm_rope(
        struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * norm, struct ggml_tensor * rope,
        int n_head, int head_stride, float eps);

// qkv [2*D*nk + D*nv, T], z [D*nv, T], beta [nv, T], alpha [nv, T] (all raw projections),
// conv [2*D*nk + D*nv, K] (taps slowest, oldest first), misc [2*nv + D] = dt bias | a | gain of the output norm,
// state F32 [D*D*nv, R, n_slot] (a head's state as [dk, dv]), history F32 [2*D*nk + D*nv, R', n_slot] -> [D*nv, T]
// convolution, silu, q and k divided by their length, delta rule, gated norm; value head j reads key head j % nk.
// keep_rows: leave the state after each row in the ring (a row graph), not only after a sequence's last (a chunk graph)
GGML_API struct ggml_tensor * ggml_luce_gdn(
        struct ggml_context * ctx, struct ggml_tensor * qkv, struct ggml_tensor * z, struct ggml_tensor * beta,
        struct ggml_tensor * alpha, struct ggml_tensor * conv, struct ggml_tensor * misc, struct ggml_tensor * state,
        struct ggml_tensor * history, struct ggml_tensor * rows, int n_k_head, float eps, bool keep_rows, int fault);

// k [D, T] raw indexer keys, norm [D], rope [n_rot, T] at the first position of the row's block, raw F32 [D, n_cell],
// pooled F32 [D, n_cell / ratio] -> [1, T] zeros (a handle that orders what reads the pool after this).
// Appends the raw keys; a row that completes a block writes rope(rms_norm(mean of the block's raw keys) * norm).
GGML_API struct ggml_tensor * ggml_luce_qsa_pool(
        struct ggml_context * ctx, struct ggml_tensor * k, struct ggml_tensor * norm, struct ggml_tensor * rope,
        struct ggml_tensor * raw, struct ggml_tensor * pooled, struct ggml_tensor * pages, struct ggml_tensor * rows,
        int ratio, float eps);

// q [D, n_head, T], pooled F32 [D, n_cell / ratio], after = the handle of ggml_luce_qsa_pool -> I32 [1 + n_top, T]: how many
// blocks, then their indices in rising order: the n_top best of the row's n = (position + 1) / ratio complete blocks by the
// sum over heads of relu(q . k); of equal scores the lower index wins. n_block_max bounds n.
GGML_API struct ggml_tensor * ggml_luce_qsa_select(
        struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * pooled, struct ggml_tensor * after,
        struct ggml_tensor * pages, struct ggml_tensor * rows, int ratio, int n_top, int n_block_max, int fault);

// q [D, n_head, T], k and v F32 or F16 [D*n_kv, n_cell], selected from ggml_luce_qsa_select, gate: head h of a row at offset
// h*gate_stride -> [D*n_head, T]: attention over the tokens of the selected blocks and the tail of the incomplete one,
// in rising position, times sigmoid(gate)
GGML_API struct ggml_tensor * ggml_luce_qsa_attn(
        struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k, struct ggml_tensor * v,
        struct ggml_tensor * selected, struct ggml_tensor * gate, struct ggml_tensor * pages, struct ggml_tensor * rows,
        int ratio, int gate_stride, float scale, int fault);

// key [S*H, T], value [H, T], residual [S*H, T], three gains [S*H] -> [2*S*H, T]: gated value, then its norm (the
// convolution's input). Per stream s = <norm(key), norm(residual)> / sqrt(H), gate = sigmoid(sign(s) * sqrt(max(|s|, 1e-6)))
GGML_API struct ggml_tensor * ggml_luce_ple_gate(
        struct ggml_context * ctx, struct ggml_tensor * key, struct ggml_tensor * value, struct ggml_tensor * residual,
        struct ggml_tensor * norm_key, struct ggml_tensor * norm_query, struct ggml_tensor * norm_conv, int n_stream, float eps);

// gated [2*S*H, T] from ggml_luce_ple_gate, residual [S*H, T], conv [S*H, K] (taps slowest, oldest first),
// history F32 [S*H, R', n_slot] -> [S*H, T]: residual + gated + silu(causal depthwise convolution with this dilation)
GGML_API struct ggml_tensor * ggml_luce_ple_conv(
        struct ggml_context * ctx, struct ggml_tensor * gated, struct ggml_tensor * residual, struct ggml_tensor * conv,
        struct ggml_tensor * history, struct ggml_tensor * rows, int dilation);

// logits [E, T] -> I32 [n_used, T]: the largest, in falling order; of equal ones the lower index first
GGML_API struct ggml_tensor * ggml_luce_route(struct ggml_context * ctx, struct ggml_tensor * logits, int n_used);

// picks [H, n_used, T], logits [E, T], ids I32 [n_used, T], shared [H, T], shared_gate [1, T] -> [H, T]:
// the sum in pick order of w_j * pick_j, plus shared * sigmoid(shared_gate); w = softmax over all E at the picked ids, divided by
// its sum over the picks, that sum being at least 2^-14. shared and shared_gate both NULL: the picks' sum alone
GGML_API struct ggml_tensor * ggml_luce_moe_combine(
        struct ggml_context * ctx, struct ggml_tensor * picks, struct ggml_tensor * logits, struct ggml_tensor * ids,
        struct ggml_tensor * shared, struct ggml_tensor * shared_gate);

// sum [H, T] of ggml_luce_moe_combine without a shared expert, shared [H, T], shared_gate [1, T] -> [H, T]: what it gives with one
GGML_API struct ggml_tensor * ggml_luce_moe_join(
        struct ggml_context * ctx, struct ggml_tensor * sum, struct ggml_tensor * shared, struct ggml_tensor * shared_gate);

// Experts on two devices. ids I32 [n_used, T], slots I32 [E]: an expert's place among those here, -1 for one that is not here ->
// I32 [n_used, 2*T]: rows 0..T-1 the places of the picks that are here, rows T..2T-1 the ids of the others; -1 in the other half. A
// row graph's MUL_MAT_ID skips an id of -1: the pick's row is zero
GGML_API struct ggml_tensor * ggml_luce_pick_split(struct ggml_context * ctx, struct ggml_tensor * ids, struct ggml_tensor * slots);

// here, there F32 [H, n_used, T], places I32 [n_used, T] (the first half of ggml_luce_pick_split) -> [H, n_used, T]: the pick of `here` where
// its place is not -1, of `there` where it is
GGML_API struct ggml_tensor * ggml_luce_pick_merge(
        struct ggml_context * ctx, struct ggml_tensor * here, struct ggml_tensor * there, struct ggml_tensor * places);

// x [n, T] -> [n, T]: silu(x * scale)
GGML_API struct ggml_tensor * ggml_luce_silu_scale(struct ggml_context * ctx, struct ggml_tensor * x, float scale);

// logits [V, T] -> I32 [1, T]: where the largest is, of equal ones the lowest; -1 for a row that has a NaN or whose largest
// is infinite: no token can be chosen from it
GGML_API struct ggml_tensor * ggml_luce_argmax(struct ggml_context * ctx, struct ggml_tensor * logits);

// a graph that is computed again and again as it is: a device that captured it need not compare its nodes with the last time's.
// To be called again whenever a tensor of it has moved.
GGML_API void ggml_luce_graph_retain(struct ggml_cgraph * graph);

// A graph of `target` whose routed experts another device has, too: it is computed in parts, and between them tensors travel.
//
// For each layer in order: nodes up to `send_at` (one past the last) on the target; `from` is copied to `to` on the expert device, which
// computes `layer`; meanwhile the target computes its nodes up to `receive_at`; `result` is copied to `into` on the target. After the last
// layer the rest of the graph. Devices of one kind copy by themselves, in their streams' order; elsewhere the host waits and copies.
// Tensors have memory, `to`, `result` and `into` may be the same for all layers. The graphs must stay as they are.
struct ggml_luce_split;

GGML_API struct ggml_luce_split * ggml_luce_split_new(ggml_backend_t target, ggml_backend_t expert, struct ggml_cgraph * graph);
// false when the nodes are not in order, or no memory can be had
GGML_API bool ggml_luce_split_add(
        struct ggml_luce_split * split, int send_at, int receive_at, struct ggml_cgraph * layer, int n_send,
        struct ggml_tensor * const * from, struct ggml_tensor * const * to, struct ggml_tensor * result, struct ggml_tensor * into);
// As ggml_backend_graph_compute_async of the target: when that is idle, the expert device is. GGML_STATUS_FAILED when the expert device
// has gone; after a failure both are idle
GGML_API enum ggml_status ggml_luce_split_compute(struct ggml_luce_split * split);
// Several graphs at once, all of the same layers and devices, layer by layer: a graph's layer may use what those before it left in the same
// layer, and the end of it what they left at theirs. No two of them share graph memory on either device
GGML_API enum ggml_status ggml_luce_split_compute_streams(struct ggml_luce_split * const * splits, int n);
// bytes that a computation sends to the expert device, and gets from it
GGML_API void ggml_luce_split_bytes(const struct ggml_luce_split * split, int64_t * sent, int64_t * received);
// For measurements: events that the devices record in every computation from now on; NULL: none any more. target [3*L + 2]: at the start, for
// each layer before sending, after what it computes beside the expert device and when the result is there, at the end; expert [2*L + 1]:
// at the start, for each layer when it has what was sent, and its result
GGML_API void ggml_luce_split_record(struct ggml_luce_split * split, ggml_backend_event_t * target, ggml_backend_event_t * expert);
GGML_API void ggml_luce_split_free(struct ggml_luce_split * split);

// marks a MUL_MAT or MUL_MAT_ID; false when the tensor is neither
GGML_API bool                 ggml_luce_set_phase(struct ggml_tensor * tensor, enum ggml_luce_phase phase);
GGML_API enum ggml_luce_phase ggml_luce_get_phase(const struct ggml_tensor * tensor);

// rows ids[0..n) of a table of row_bytes a row at `base`, widened to F32 [ne0, n] at dst; ids NULL: rows 0..n. False: no such type
GGML_API bool ggml_luce_dequantize_rows(
        enum ggml_type type, const void * base, size_t row_bytes, const int64_t * ids, int64_t n, int64_t ne0, float * dst);

// The same from a file: rows ids[0..n) of a table at `offset` of `fd`, row i widened to F32 [ne0] at dst + to[i] * ne0; to NULL: at
// dst + i * ne0. An id that repeats the one before it is read once, ids that count up are read by one call: give them sorted.
// Returns n; less when the file ends before the end of row ids[result]; -errno when a read fails, -EINVAL for a type, a size
// or an id that cannot be. *n_reads is raised by the number of system calls. Any number of threads may call it at once, with one fd.
GGML_API int64_t ggml_luce_pread_rows(
        int fd, int64_t offset, size_t row_bytes, enum ggml_type type, const int64_t * ids, const int64_t * to, int64_t n,
        int64_t ne0, float * dst, int64_t * n_reads);

#ifdef __cplusplus
}
#endif
