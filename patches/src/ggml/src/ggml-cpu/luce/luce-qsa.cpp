// pyluce: sparse attention over selected blocks (QSA): pooled block keys, block choice, attention.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-impl.h"

#include <algorithm>

void luce_qsa_pool(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * key   = dst->src[0];
    const ggml_tensor * rope  = dst->src[2];
    const ggml_tensor * pages = dst->src[5];
    const float * gain   = (const float *) dst->src[1]->data;
    float       * raw    = (float *) dst->src[3]->data;
    float       * pooled = (float *) dst->src[4]->data;
    const luce_row * rows = (const luce_row *) dst->src[6]->data;
    const int     ratio = ggml_get_op_params_i32(dst, 1);
    const float   eps   = ggml_get_op_params_f32(dst, 2);
    const int64_t d     = key->ne[0];

    // A row writes its own raw key and, when it completes a block, the block's pooled key; what it needs of this step's
    // rows it reads from the input, so rows need no order.
    const luce_share share(dst->ne[1], params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        row_of(dst, r)[0] = 0.0f;
        const luce_row row = rows[r];
        if (row.slot < 0) {
            continue;
        }
        const int64_t cell = cell_of(pages, row.slot, row.position);
        memcpy(raw + cell * d, row_of(key, r), d * sizeof(float));
        if ((row.position + 1) % ratio != 0) {
            continue;
        }
        float * mean = pooled + cell / ratio * d;
        for (int64_t back = ratio - 1; back >= 0; back--) {
            const int64_t position = row.position - back;
            const bool    here = back <= r && rows[r - back].slot == row.slot && rows[r - back].position == position;
            const float * x    = here ? row_of(key, r - back) : raw + cell_of(pages, row.slot, position) * d;
            if (back == ratio - 1) {
                memcpy(mean, x, d * sizeof(float));
            } else {
                ggml_vec_acc_f32((int) d, mean, x);
            }
        }
        for (int64_t i = 0; i < d; i++) {
            mean[i] *= 1.0f / (float) ratio;
        }
        luce_rms_norm(d, mean, mean, gain, eps);
        luce_rotate(rope->ne[0], mean, row_of(rope, r));
    }
}

namespace {

struct select_shape {
    int64_t d, n_head, n_row, n_top, n_block_max;
    int     ratio;
    explicit select_shape(const ggml_tensor * dst) {
        d           = dst->src[0]->ne[0];
        n_head      = dst->src[0]->ne[1];
        n_row       = dst->src[0]->ne[2];
        ratio       = ggml_get_op_params_i32(dst, 1);
        n_top       = ggml_get_op_params_i32(dst, 2);
        n_block_max = ggml_get_op_params_i32(dst, 3);
    }
    // few rows: the threads share each row's blocks; many: each takes rows of its own
    bool share_blocks(int n_tasks) const { return n_row < 2 * n_tasks; }
    size_t keys(int n_tasks) const { return (size_t) n_block_max * (size_t) (share_blocks(n_tasks) ? n_row : n_tasks); }
};

// A score and an index as one number that sorts best first: scores are never negative, so their bits rise with them.
uint64_t sort_key(float score, int64_t block, bool high_first) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof(bits));
    const uint32_t index = (uint32_t) block;
    return (uint64_t) (0xffffffffu - bits) << 32 | (high_first ? 0xffffffffu - index : index);
}

void score_blocks(const ggml_tensor * dst, const select_shape & s, int64_t r, int32_t slot, int64_t begin, int64_t end, uint64_t * keys) {
    const ggml_tensor * q     = dst->src[0];
    const ggml_tensor * pages = dst->src[3];
    const float * pooled     = (const float *) dst->src[1]->data;
    const bool    high_first = ggml_get_op_params_i32(dst, 4) == GGML_LUCE_FAULT_TIE_HIGH;
    for (int64_t b = begin; b < end; b++) {
        const float * key = pooled + cell_of(pages, slot, b * s.ratio) / s.ratio * s.d;
        float score = 0.0f;
        for (int64_t h = 0; h < s.n_head; h++) {
            const float dot = luce_dot(s.d, (const float *) ((const char *) q->data + r * q->nb[2] + h * q->nb[1]), key);
            score += dot > 0.0f ? dot : 0.0f;
        }
        keys[b] = sort_key(score, b, high_first);
    }
}

void choose_blocks(ggml_tensor * dst, const select_shape & s, int64_t r, int64_t n, uint64_t * keys) {
    int32_t * out = (int32_t *) ((char *) dst->data + r * dst->nb[1]);
    const int64_t n_chosen = std::min(n, s.n_top);
    const bool high_first = ggml_get_op_params_i32(dst, 4) == GGML_LUCE_FAULT_TIE_HIGH;
    out[0] = (int32_t) n_chosen;
    if (n_chosen == n) {
        for (int64_t i = 0; i < n; i++) {
            out[1 + i] = (int32_t) i;
        }
    } else {
        std::nth_element(keys, keys + n_chosen - 1, keys + n);
        for (int64_t i = 0; i < n_chosen; i++) {
            const uint32_t index = (uint32_t) keys[i];
            out[1 + i] = (int32_t) (high_first ? 0xffffffffu - index : index);
        }
        std::sort(out + 1, out + 1 + n_chosen);
    }
    for (int64_t i = n_chosen; i < s.n_top; i++) {
        out[1 + i] = -1;
    }
}

int64_t complete_blocks(const select_shape & s, const luce_row & row) {
    return row.slot < 0 ? 0 : std::min<int64_t>((row.position + 1) / s.ratio, s.n_block_max);
}

} // namespace

size_t luce_qsa_select_work_size(const ggml_tensor * dst, int n_tasks) {
    return select_shape(dst).keys(n_tasks) * sizeof(uint64_t) + CACHE_LINE_SIZE;
}

void luce_qsa_select(const ggml_compute_params * params, ggml_tensor * dst) {
    const select_shape s(dst);
    const luce_row * rows = (const luce_row *) dst->src[4]->data;
    uint64_t * keys = (uint64_t *) params->wdata;

    if (s.share_blocks(params->nth)) {
        for (int64_t r = 0; r < s.n_row; r++) {
            const int64_t n = complete_blocks(s, rows[r]);
            if (n > s.n_top) {
                const luce_share share(n, params->ith, params->nth);
                score_blocks(dst, s, r, rows[r].slot, share.begin, share.end, keys + r * s.n_block_max);
            }
        }
        ggml_barrier(params->threadpool);
        for (int64_t r = params->ith; r < s.n_row; r += params->nth) {
            choose_blocks(dst, s, r, complete_blocks(s, rows[r]), keys + r * s.n_block_max);
        }
        return;
    }
    keys += params->ith * s.n_block_max;
    for (int64_t r = params->ith; r < s.n_row; r += params->nth) {
        const int64_t n = complete_blocks(s, rows[r]);
        if (n > s.n_top) {
            score_blocks(dst, s, r, rows[r].slot, 0, n, keys);
        }
        choose_blocks(dst, s, r, n, keys);
    }
}

namespace {

struct attn_shape {
    int64_t d, n_head, n_kv, n_row, n_key_max, n_value; // n_value: values of a cache row
    int     ratio;
    explicit attn_shape(const ggml_tensor * dst) {
        d         = dst->src[0]->ne[0];
        n_head    = dst->src[0]->ne[1];
        n_row     = dst->src[0]->ne[2];
        n_value   = dst->src[1]->ne[0];
        n_kv      = n_value / d;
        ratio     = ggml_get_op_params_i32(dst, 1);
        n_key_max = (dst->src[3]->ne[0] - 1) * ratio + ratio - 1;
    }
    // cells of the keys, scores of a head group, one widened key or value
    size_t scratch_floats() const {
        return whole_lines((size_t) (2 * n_key_max + n_key_max * (n_head / n_kv) + d));
    }
};

// the cells a row attends to, in rising position; how many
int64_t gather_cells(const ggml_tensor * dst, const attn_shape & s, int64_t r, const luce_row & row, int64_t * cells) {
    const ggml_tensor * selected = dst->src[3];
    const ggml_tensor * pages    = dst->src[5];
    const int32_t * blocks = (const int32_t *) ((const char *) selected->data + r * selected->nb[1]);
    int64_t n = 0;
    for (int32_t b = 0; b < blocks[0]; b++) {
        const int64_t cell = cell_of(pages, row.slot, (int64_t) blocks[1 + b] * s.ratio);
        for (int i = 0; i < s.ratio; i++) {
            cells[n++] = cell + i;
        }
    }
    for (int64_t p = (row.position + 1) / s.ratio * s.ratio; p <= row.position; p++) {
        cells[n++] = cell_of(pages, row.slot, p);
    }
    return n;
}

const float * widen(const ggml_tensor * cache, int64_t cell, int64_t offset, int64_t d, float * scratch) {
    const char * row = (const char *) cache->data + cell * cache->nb[1];
    if (cache->type == GGML_TYPE_F32) {
        return (const float *) row + offset;
    }
    ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) row + offset, scratch, d);
    return scratch;
}

// One row, one K/V head, query heads [h0, h1) of its group. Scores key by key, then softmax (max, exp, sum in key order),
// then values key by key: the order of every sum is the order of positions.
void attend(ggml_tensor * dst, const attn_shape & s, int64_t r, int64_t kv, int64_t h0, int64_t h1, const int64_t * cells, int64_t n,
            bool backwards, float * scratch) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * gate = dst->src[4];
    const int   gate_stride = ggml_get_op_params_i32(dst, 2);
    const float scale       = ggml_get_op_params_f32(dst, 3);
    float * wide   = scratch;
    float * scores = scratch + s.d;

    for (int64_t i = 0; i < n; i++) {
        const float * key = widen(k, cells[i], kv * s.d, s.d, wide);
        for (int64_t h = h0; h < h1; h++) {
            scores[(h - h0) * n + i] = scale * luce_dot(s.d, (const float *) ((const char *) q->data + r * q->nb[2] + h * q->nb[1]), key);
        }
    }
    for (int64_t h = h0; h < h1; h++) {
        float * p = scores + (h - h0) * n;
        float top = p[0];
        for (int64_t i = 1; i < n; i++) {
            top = p[i] > top ? p[i] : top;
        }
        const float sum = (float) ggml_vec_soft_max_f32((int) n, p, p, top);
        ggml_vec_scale_f32((int) n, p, 1.0f / sum);
        memset(row_of(dst, r) + h * s.d, 0, s.d * sizeof(float));
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t at    = backwards ? n - 1 - i : i;
        const float * value = widen(v, cells[at], kv * s.d, s.d, wide);
        for (int64_t h = h0; h < h1; h++) {
            ggml_vec_mad_f32((int) s.d, row_of(dst, r) + h * s.d, value, scores[(h - h0) * n + at]);
        }
    }
    for (int64_t h = h0; h < h1; h++) {
        float * y = row_of(dst, r) + h * s.d;
        luce_mul_sigmoid(s.d, y, y, row_of(gate, r) + h * gate_stride);
    }
}

} // namespace

size_t luce_qsa_attn_work_size(const ggml_tensor * dst, int n_tasks) {
    return attn_shape(dst).scratch_floats() * sizeof(float) * (size_t) n_tasks;
}

void luce_qsa_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    const attn_shape s(dst);
    const luce_row * rows = (const luce_row *) dst->src[6]->data;
    int64_t * cells   = (int64_t *) ((float *) params->wdata + s.scratch_floats() * (size_t) params->ith);
    float   * scratch = (float *) (cells + s.n_key_max);

    const int  fault     = ggml_get_op_params_i32(dst, 4);
    const bool backwards = (fault == GGML_LUCE_FAULT_SCAN_ORDER && s.n_row % 2 == 0) || (fault == GGML_LUCE_FAULT_THREADS && params->nth > 1);

    // heads are independent, so splitting a group further than its K/V head changes no result
    const int64_t group = s.n_head / s.n_kv;
    int64_t parts = 1;
    while (parts < group && s.n_row * s.n_kv * parts < 4 * params->nth && group % (2 * parts) == 0) {
        parts *= 2;
    }
    const luce_share share(s.n_row * s.n_kv * parts, params->ith, params->nth);
    int64_t gathered = -1;
    int64_t n        = 0;
    for (int64_t i = share.begin; i < share.end; i++) {
        const int64_t r    = i / (s.n_kv * parts);
        const int64_t kv   = i / parts % s.n_kv;
        const int64_t part = i % parts;
        const int64_t h0   = kv * group + part * (group / parts);
        const int64_t h1   = h0 + group / parts;
        if (rows[r].slot < 0) {
            memset(row_of(dst, r) + h0 * s.d, 0, (h1 - h0) * s.d * sizeof(float));
            continue;
        }
        if (gathered != r) {
            n        = gather_cells(dst, s, r, rows[r], cells);
            gathered = r;
        }
        attend(dst, s, r, kv, h0, h1, cells, n, backwards, scratch);
    }
}
