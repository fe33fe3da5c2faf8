// pyluce: hyper-connections and the norms around them, a row at a time.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-impl.h"

// the stream-wise norm of a residual [S*H]
static void stream_norm(int64_t n, int n_stream, float * y, const float * x, const float * gain, float eps) {
    const int64_t h = n / n_stream;
    for (int s = 0; s < n_stream; s++) {
        luce_rms_norm(h, y + s * h, x + s * h, gain + s * h, eps);
    }
}

void luce_hc_init(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * embd = dst->src[0];
    const float * gain     = (const float *) dst->src[1]->data;
    const int     n_stream = ggml_get_op_params_i32(dst, 1);
    const float   eps      = ggml_get_op_params_f32(dst, 2);
    const int64_t h        = embd->ne[0];
    const int64_t n_row    = embd->ne[1];

    const luce_share share(n_row, params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        float * y = row_of(dst, r);
        for (int s = 0; s < n_stream; s++) {
            memcpy(y + s * h, row_of(embd, r), h * sizeof(float));
        }
        stream_norm(n_stream * h, n_stream, row_of(dst, n_row + r), y, gain, eps);
    }
}

void luce_hc_norm(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * residual = dst->src[0];
    const float * gain     = (const float *) dst->src[1]->data;
    const int     n_stream = ggml_get_op_params_i32(dst, 1);
    const float   eps      = ggml_get_op_params_f32(dst, 2);

    const luce_share share(dst->ne[1], params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        stream_norm(dst->ne[0], n_stream, row_of(dst, r), row_of(residual, r), gain, eps);
    }
}

// out = (sum over streams, first to last, of xn_s * sigmoid(gate_s)) / S
void luce_hc_mix(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * xn   = dst->src[0];
    const ggml_tensor * gate = dst->src[1];
    const int     n_stream = ggml_get_op_params_i32(dst, 1);
    const int64_t h        = dst->ne[0];
    const float   mean     = 1.0f / (float) n_stream;

    const luce_share share(dst->ne[1], params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        const float * x = row_of(xn, r);
        const float * g = row_of(gate, r);
        float       * y = row_of(dst, r);
        int64_t i = 0;
#if defined(__AVX2__) && defined(__FMA__)
        const __m256 one = _mm256_set1_ps(1.0f);
        for (; i + 8 <= h; i += 8) {
            __m256 sum = _mm256_setzero_ps();
            for (int s = 0; s < n_stream; s++) {
                const __m256 e = ggml_v_expf(_mm256_sub_ps(_mm256_setzero_ps(), _mm256_loadu_ps(g + s * h + i)));
                sum = _mm256_add_ps(sum, _mm256_div_ps(_mm256_loadu_ps(x + s * h + i), _mm256_add_ps(one, e)));
            }
            _mm256_storeu_ps(y + i, _mm256_mul_ps(sum, _mm256_set1_ps(mean)));
        }
#endif
        for (; i < h; i++) {
            float sum = 0.0f;
            for (int s = 0; s < n_stream; s++) {
                sum += x[s * h + i] * luce_sigmoid(g[s * h + i]);
            }
            y[i] = sum * mean;
        }
    }
}

void luce_hc_combine(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * residual = dst->src[0];
    const ggml_tensor * block    = dst->src[1];
    const ggml_tensor * inject   = dst->src[2];
    const ggml_tensor * norm     = dst->src[3];
    const int     n_stream = ggml_get_op_params_i32(dst, 1);
    const float   eps      = ggml_get_op_params_f32(dst, 2);
    const int64_t n        = residual->ne[0];
    const int64_t h        = n / n_stream;
    const int64_t n_row    = residual->ne[1];

    const luce_share share(n_row, params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        const float * x = row_of(residual, r);
        const float * b = row_of(block, r);
        float       * y = row_of(dst, r);
        for (int s = 0; s < n_stream; s++) {
            const float w = 2.0f * luce_sigmoid(row_of(inject, r)[s] / (float) n_stream);
            for (int64_t i = 0; i < h; i++) {
                y[s * h + i] = x[s * h + i] + b[i] * w;
            }
        }
        if (norm) {
            stream_norm(n, n_stream, row_of(dst, n_row + r), y, (const float *) norm->data, eps);
        }
    }
}

void luce_norm_rope(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * x    = dst->src[0];
    const ggml_tensor * rope = dst->src[2];
    const float * gain        = (const float *) dst->src[1]->data;
    const int     head_stride = ggml_get_op_params_i32(dst, 1);
    const float   eps         = ggml_get_op_params_f32(dst, 2);
    const int64_t d           = dst->ne[0];
    const int64_t n_head      = dst->ne[1];

    const luce_share share(dst->ne[2] * n_head, params->ith, params->nth);
    for (int64_t i = share.begin; i < share.end; i++) {
        const int64_t r = i / n_head;
        const int64_t j = i % n_head;
        float * y = (float *) ((char *) dst->data + r * dst->nb[2] + j * dst->nb[1]);
        luce_rms_norm(d, y, row_of(x, r) + j * head_stride, gain, eps);
        luce_rotate(rope->ne[0], y, row_of(rope, r));
    }
}

void luce_silu_scale(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * x = dst->src[0];
    const float   scale = ggml_get_op_params_f32(dst, 1);
    const int64_t n     = dst->ne[0];

    const luce_share share(dst->ne[1], params->ith, params->nth);
    for (int64_t r = share.begin; r < share.end; r++) {
        float * y = row_of(dst, r);
        for (int64_t i = 0; i < n; i++) {
            y[i] = row_of(x, r)[i] * scale;
        }
        ggml_vec_silu_f32((int) n, y, y);
    }
}
