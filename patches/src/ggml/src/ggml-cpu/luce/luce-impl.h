// pyluce: what the CPU kernels of GGML_OP_LUCE share. They are the reference for every device: plain loops over ggml's
// vector functions, each value reduced in one order that depends on the model's widths alone.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ggml-luce.h"
#include "ops.h"
#include "vec.h"

#include <cmath>
#include <cstdint>
#include <cstring>

typedef void (*luce_kernel_t)(const ggml_compute_params * params, ggml_tensor * dst);

void luce_hc_init    (const ggml_compute_params * params, ggml_tensor * dst);
void luce_hc_norm    (const ggml_compute_params * params, ggml_tensor * dst);
void luce_hc_mix     (const ggml_compute_params * params, ggml_tensor * dst);
void luce_hc_combine (const ggml_compute_params * params, ggml_tensor * dst);
void luce_norm_rope  (const ggml_compute_params * params, ggml_tensor * dst);
void luce_gdn        (const ggml_compute_params * params, ggml_tensor * dst);
void luce_qsa_pool   (const ggml_compute_params * params, ggml_tensor * dst);
void luce_qsa_select (const ggml_compute_params * params, ggml_tensor * dst);
void luce_qsa_attn   (const ggml_compute_params * params, ggml_tensor * dst);
void luce_ple_gate   (const ggml_compute_params * params, ggml_tensor * dst);
void luce_ple_conv   (const ggml_compute_params * params, ggml_tensor * dst);
void luce_route      (const ggml_compute_params * params, ggml_tensor * dst);
void luce_moe_combine(const ggml_compute_params * params, ggml_tensor * dst);
void luce_silu_scale (const ggml_compute_params * params, ggml_tensor * dst);
void luce_argmax     (const ggml_compute_params * params, ggml_tensor * dst);
void luce_moe_join   (const ggml_compute_params * params, ggml_tensor * dst);
void luce_pick_split (const ggml_compute_params * params, ggml_tensor * dst);
void luce_pick_merge (const ggml_compute_params * params, ggml_tensor * dst);

size_t luce_gdn_work_size       (const ggml_tensor * dst, int n_tasks);
size_t luce_qsa_select_work_size(const ggml_tensor * dst, int n_tasks);
size_t luce_qsa_attn_work_size  (const ggml_tensor * dst, int n_tasks);

// one entry of the `rows` table
struct luce_row {
    int32_t slot;
    int32_t position;
    int32_t reserved[2];
};

static inline const float * row_of(const ggml_tensor * t, int64_t r) {
    return (const float *) ((const char *) t->data + r * t->nb[1]);
}

static inline float * row_of(ggml_tensor * t, int64_t r) {
    return (float *) ((char *) t->data + r * t->nb[1]);
}

// the physical cell of a token
static inline int64_t cell_of(const ggml_tensor * pages, int32_t slot, int64_t position) {
    const int32_t * table = (const int32_t *) pages->data + slot * pages->ne[0];
    return (int64_t) table[position / GGML_LUCE_PAGE] * GGML_LUCE_PAGE + position % GGML_LUCE_PAGE;
}

// n floats rounded up to whole cache lines
static inline size_t whole_lines(size_t n) {
    return (n + CACHE_LINE_SIZE_F32 - 1) / CACHE_LINE_SIZE_F32 * CACHE_LINE_SIZE_F32;
}

// the part [begin, end) of n items that thread ith of nth takes
struct luce_share {
    int64_t begin;
    int64_t end;
    luce_share(int64_t n, int ith, int nth) : begin(n * ith / nth), end(n * (ith + 1) / nth) {}
};

static inline float luce_dot(int64_t n, const float * x, const float * y) {
    float sum;
    ggml_vec_dot_f32((int) n, &sum, 0, x, 0, y, 0, 1);
    return sum;
}

static inline float luce_sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

// y = x * sigmoid(g), element by element
static inline void luce_mul_sigmoid(int64_t n, float * y, const float * x, const float * g) {
    int64_t i = 0;
#if defined(__AVX2__) && defined(__FMA__)
    const __m256 one = _mm256_set1_ps(1.0f);
    for (; i + 8 <= n; i += 8) {
        const __m256 e = ggml_v_expf(_mm256_sub_ps(_mm256_setzero_ps(), _mm256_loadu_ps(g + i)));
        _mm256_storeu_ps(y + i, _mm256_div_ps(_mm256_loadu_ps(x + i), _mm256_add_ps(one, e)));
    }
#endif
    for (; i < n; i++) {
        y[i] = x[i] * luce_sigmoid(g[i]);
    }
}

// y = x / sqrt(mean(x^2) + eps) * gain
static inline void luce_rms_norm(int64_t n, float * y, const float * x, const float * gain, float eps) {
    const float scale = 1.0f / sqrtf(luce_dot(n, x, x) / (float) n + eps);
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[i] * scale * gain[i];
    }
}

// rotates the pairs (i, i + n_rot/2) of x by the angles whose cos | sin are in `rope`
static inline void luce_rotate(int64_t n_rot, float * x, const float * rope) {
    const int64_t half = n_rot / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i];
        const float b = x[i + half];
        x[i]        = a * rope[i] - b * rope[half + i];
        x[i + half] = b * rope[i] + a * rope[half + i];
    }
}
