// pyluce: the n-gram (PLE) layer's gate and its dilated convolution.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-impl.h"

void luce_ple_gate(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * key      = dst->src[0];
    const ggml_tensor * value    = dst->src[1];
    const ggml_tensor * residual = dst->src[2];
    const float * gain_key   = (const float *) dst->src[3]->data;
    const float * gain_query = (const float *) dst->src[4]->data;
    const float * gain_conv  = (const float *) dst->src[5]->data;
    const int     n_stream   = ggml_get_op_params_i32(dst, 1);
    const float   eps        = ggml_get_op_params_f32(dst, 2);
    const int64_t n          = key->ne[0];
    const int64_t h          = n / n_stream;

    const luce_share share(dst->ne[1], params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        float * gated  = row_of(dst, r);
        float * normed = gated + n;
        for (int s = 0; s < n_stream; s++) {
            float * a = gated + s * h;   // both halves of the output serve as scratch before they are written
            float * b = normed + s * h;
            luce_rms_norm(h, a, row_of(key, r) + s * h, gain_key + s * h, eps);
            luce_rms_norm(h, b, row_of(residual, r) + s * h, gain_query + s * h, eps);
            const float dot  = luce_dot(h, a, b) * (1.0f / sqrtf((float) h));
            const float size = sqrtf(fmaxf(fabsf(dot), 1e-6f));
            const float gate = luce_sigmoid(dot > 0.0f ? size : dot < 0.0f ? -size : 0.0f);
            for (int64_t i = 0; i < h; i++) {
                a[i] = row_of(value, r)[i] * gate;
            }
            luce_rms_norm(h, b, a, gain_conv + s * h, eps);
        }
    }
}

// Threads share the channels, so each walks the rows in order and reads its own channels' history before it overwrites it.
void luce_ple_conv(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * gated    = dst->src[0];
    const ggml_tensor * residual = dst->src[1];
    const ggml_tensor * conv     = dst->src[2];
    const ggml_tensor * history  = dst->src[3];
    const luce_row * rows = (const luce_row *) dst->src[4]->data;
    const int     dilation = ggml_get_op_params_i32(dst, 1);
    const int64_t n        = dst->ne[0];
    const int64_t n_row    = dst->ne[1];
    const int64_t n_tap    = conv->ne[1];
    const int64_t ring     = history->ne[1];

    const int64_t    unit = n % 32 == 0 ? 32 : 1; // whole vectors to a thread
    const luce_share share(n / unit, params->ith, params->nth);
    const int64_t c0 = share.begin * unit;
    const int64_t nc = (share.end - share.begin) * unit;
    if (nc == 0) {
        return;
    }
    for (int64_t r = 0; r < n_row; r++) {
        float * y = row_of(dst, r) + c0;
        memset(y, 0, nc * sizeof(float));
        const int32_t slot     = rows[r].slot;
        const int64_t position = rows[r].position;
        if (slot < 0) {
            continue;
        }
        float * kept = (float *) history->data + slot * ring * n + c0;
        for (int64_t k = 0; k < n_tap; k++) {
            const int64_t back = (n_tap - 1 - k) * dilation;
            if (back > position) {
                continue;
            }
            const bool    here = back <= r && rows[r - back].slot == slot && rows[r - back].position == position - back;
            const float * x    = here ? row_of(gated, r - back) + n + c0 : kept + (position - back) % ring * n;
            const float * w    = (const float *) conv->data + k * n + c0;
            for (int64_t i = 0; i < nc; i++) {
                y[i] += x[i] * w[i];
            }
        }
        ggml_vec_silu_f32((int) nc, y, y);
        for (int64_t i = 0; i < nc; i++) {
            y[i] = row_of(residual, r)[c0 + i] + (row_of(gated, r)[c0 + i] + y[i]);
        }
        const bool overwritten = r + ring < n_row && rows[r + ring].slot == slot;
        if (!overwritten) {
            memcpy(kept + position % ring * n, row_of(gated, r) + n + c0, nc * sizeof(float));
        }
    }
}
