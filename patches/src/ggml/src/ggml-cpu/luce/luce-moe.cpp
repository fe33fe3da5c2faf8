// pyluce: the router's choice and the sum of the experts it chose.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-impl.h"

// Insertion into a list of the n_used best so far: an equal logit never displaces an earlier index.
void luce_route(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * logits = dst->src[0];
    const int64_t n_used   = dst->ne[0];
    const int64_t n_expert = logits->ne[0];

    const luce_share share(dst->ne[1], params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        const float * x   = row_of(logits, r);
        int32_t     * ids = (int32_t *) ((char *) dst->data + r * dst->nb[1]);
        int64_t n = 0;
        for (int64_t e = 0; e < n_expert; e++) {
            if (n == n_used && !(x[e] > x[ids[n - 1]])) {
                continue;
            }
            int64_t at = n < n_used ? n++ : n - 1;
            for (; at > 0 && x[e] > x[ids[at - 1]]; at--) {
                ids[at] = ids[at - 1];
            }
            ids[at] = (int32_t) e;
        }
    }
}

void luce_moe_combine(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * picks  = dst->src[0];
    const ggml_tensor * logits = dst->src[1];
    const ggml_tensor * ids    = dst->src[2];
    const ggml_tensor * shared = dst->src[3];
    const ggml_tensor * gate   = dst->src[4];
    const int64_t n        = dst->ne[0];
    const int64_t n_used   = picks->ne[1];
    const int64_t n_expert = logits->ne[0];

    const luce_share share(dst->ne[1], params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        const float   * x  = row_of(logits, r);
        const int32_t * id = (const int32_t *) ((const char *) ids->data + r * ids->nb[1]);
        float           w[64];

        float top = x[0];
        for (int64_t e = 1; e < n_expert; e++) {
            top = x[e] > top ? x[e] : top;
        }
        float all = 0.0f;
        for (int64_t e = 0; e < n_expert; e++) {
            all += expf(x[e] - top);
        }
        float chosen = 0.0f;
        for (int64_t j = 0; j < n_used; j++) {
            w[j] = expf(x[id[j]] - top) / all;
            chosen += w[j];
        }
        chosen = chosen < 0x1p-14f ? 0x1p-14f : chosen;

        float * y = row_of(dst, r);
        memset(y, 0, n * sizeof(float));
        for (int64_t j = 0; j < n_used; j++) {
            const float * pick = (const float *) ((const char *) picks->data + r * picks->nb[2] + j * picks->nb[1]);
            ggml_vec_mad_f32((int) n, y, pick, w[j] / chosen);
        }
        if (shared) {
            ggml_vec_mad_f32((int) n, y, row_of(shared, r), luce_sigmoid(row_of(gate, r)[0]));
        }
    }
}

void luce_moe_join(const ggml_compute_params * params, ggml_tensor * dst) {
    const int64_t n = dst->ne[0];
    const luce_share share(dst->ne[1], params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        float * y = row_of(dst, r);
        memcpy(y, row_of(dst->src[0], r), n * sizeof(float));
        ggml_vec_mad_f32((int) n, y, row_of(dst->src[1], r), luce_sigmoid(row_of(dst->src[2], r)[0]));
    }
}

void luce_pick_split(const ggml_compute_params * params, ggml_tensor * dst) {
    const int32_t * ids   = (const int32_t *) dst->src[0]->data;
    const int32_t * slots = (const int32_t *) dst->src[1]->data;
    const int64_t n_pick   = ggml_nelements(dst->src[0]);
    const int64_t n_expert = dst->src[1]->ne[0];
    int32_t * here  = (int32_t *) dst->data;
    int32_t * there = here + n_pick;

    const luce_share share(n_pick, params->ith, params->nth);
    for (int64_t p = share.begin; p < share.end; p++) {
        const bool known = ids[p] >= 0 && ids[p] < n_expert;
        here[p]  = known ? slots[ids[p]] : -1;
        there[p] = known && here[p] < 0 ? ids[p] : -1;
    }
}

void luce_pick_merge(const ggml_compute_params * params, ggml_tensor * dst) {
    const int64_t n = dst->ne[0];
    const int32_t * places = (const int32_t *) dst->src[2]->data;

    const luce_share share(dst->ne[1] * dst->ne[2], params->ith, params->nth);
    for (int64_t p = share.begin; p < share.end; p++) {
        const float * from = (const float *) dst->src[places[p] < 0 ? 1 : 0]->data;
        memcpy((float *) dst->data + p * n, from + p * n, n * sizeof(float));
    }
}

void luce_argmax(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * logits = dst->src[0];
    const int64_t n = logits->ne[0];

    const luce_share share(dst->ne[1], params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        const float * x = row_of(logits, r);
        int64_t best = 0;
        bool    nan  = false;
        for (int64_t i = 0; i < n; i++) {
            nan |= x[i] != x[i];
            best = x[i] > x[best] ? i : best;
        }
        ((int32_t *) dst->data)[r] = nan || std::isinf(x[best]) ? -1 : (int32_t) best;
    }
}
