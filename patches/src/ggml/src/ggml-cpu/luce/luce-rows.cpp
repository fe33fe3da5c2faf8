// pyluce: products of the rows of a row graph, several rows and weight rows at a time.
//
// A tile shares what its products have in common: loads, absolute values and scales of the weights. Each product is computed as ggml's
// vec_dot computes it, operation by operation, so neither its tile nor the number of rows shows in its bits.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-cpu.h"

#include "luce-impl.h"

#include "ggml-luce-path.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "quants.h"

#include <type_traits>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

namespace {

// the sums of the 8 lanes of four vectors, each in the order of vec_dot: halves, then pairs, then the two that are left
inline __m128 sums_of_four(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m128 a4 = _mm_add_ps(_mm256_extractf128_ps(a, 1), _mm256_castps256_ps128(a));
    const __m128 b4 = _mm_add_ps(_mm256_extractf128_ps(b, 1), _mm256_castps256_ps128(b));
    const __m128 c4 = _mm_add_ps(_mm256_extractf128_ps(c, 1), _mm256_castps256_ps128(c));
    const __m128 d4 = _mm_add_ps(_mm256_extractf128_ps(d, 1), _mm256_castps256_ps128(d));
    const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a4, b4), _mm_unpackhi_ps(a4, b4));  // a0+a2, b0+b2, a1+a3, b1+b3
    const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c4, d4), _mm_unpackhi_ps(c4, d4));
    return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}

template <int LANE> inline __m256 lane_everywhere(__m256 scales) {
    return _mm256_shuffle_ps(scales, scales, LANE * 0x55);
}

// sum + scale * (q . x), lane by lane: each lane four values
inline __m256 add_block(__m256 sum, __m256 scale, __m256i magnitude, __m256i q, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, q));
    return _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_set1_epi16(1), pairs)), sum);
}

// the products of a block's scales: of four weight rows and a row
inline __m256 scales_of(__m128 w_scales, const block_q8_0 & x) {
    const __m128 product = _mm_mul_ps(w_scales, _mm_cvtph_ps(_mm_set1_epi16((short) x.d)));
    return _mm256_insertf128_ps(_mm256_castps128_ps256(product), product, 1);
}

inline __m256i values_of(const block_q8_0 & b) {
    return _mm256_loadu_si256((const __m256i *) b.qs);
}

// out[j * out_stride + i] = w_i . x_j for four weight rows w_i and N rows x_j (1 or 2) of n_block blocks
template <int N>
void q8_0_tile(int64_t n_block, const block_q8_0 * w, size_t w_stride, const block_q8_0 * x, float * out, size_t out_stride) {
    const block_q8_0 * w1 = w + w_stride;
    const block_q8_0 * w2 = w + w_stride * 2;
    const block_q8_0 * w3 = w + w_stride * 3;
    const block_q8_0 * y  = x + n_block;
    __m256 x0 = _mm256_setzero_ps(), x1 = x0, x2 = x0, x3 = x0;
    __m256 y0 = x0, y1 = x0, y2 = x0, y3 = x0;
    for (int64_t b = 0; b < n_block; b++) {
        const uint64_t halves = (uint64_t) w[b].d | (uint64_t) w1[b].d << 16 | (uint64_t) w2[b].d << 32 | (uint64_t) w3[b].d << 48;
        const __m128  w_scales = _mm_cvtph_ps(_mm_cvtsi64_si128((int64_t) halves));
        const __m256  x_scales = scales_of(w_scales, x[b]);
        const __m256  y_scales = N == 2 ? scales_of(w_scales, y[b]) : x_scales;
        const __m256i xq = values_of(x[b]);
        const __m256i yq = N == 2 ? values_of(y[b]) : xq;
        const auto both = [&](const block_q8_0 & wb, auto lane, __m256 & x_sum, __m256 & y_sum) {
            const __m256i q = values_of(wb);
            const __m256i magnitude = _mm256_sign_epi8(q, q);
            x_sum = add_block(x_sum, _mm256_permute_ps(x_scales, lane * 0x55), magnitude, q, xq);
            if (N == 2) {
                y_sum = add_block(y_sum, _mm256_permute_ps(y_scales, lane * 0x55), magnitude, q, yq);
            }
        };
        both(w[b],  std::integral_constant<int, 0>(), x0, y0);
        both(w1[b], std::integral_constant<int, 1>(), x1, y1);
        both(w2[b], std::integral_constant<int, 2>(), x2, y2);
        both(w3[b], std::integral_constant<int, 3>(), x3, y3);
    }
    _mm_storeu_ps(out, sums_of_four(x0, x1, x2, x3));
    if (N == 2) {
        _mm_storeu_ps(out + out_stride, sums_of_four(y0, y1, y2, y3));
    }
}

// products of the weight rows [begin, end) with N rows
template <int N>
void q8_0_rows(const ggml_tensor * weight, int64_t begin, int64_t end, const block_q8_0 * x, float * out, size_t out_stride) {
    const int64_t n_block = weight->ne[0] / QK8_0;
    const size_t w_stride = weight->nb[1] / sizeof(block_q8_0);
    const block_q8_0 * w = (const block_q8_0 *) weight->data;
    int64_t i = begin;
    for (; i + 4 <= end; i += 4) {
        q8_0_tile<N>(n_block, w + i * w_stride, w_stride, x, out + i, out_stride);
    }
    for (; i < end; i++) {
        for (int j = 0; j < N; j++) {
            ggml_vec_dot_q8_0_q8_0((int) weight->ne[0], out + j * out_stride + i, 0, w + i * w_stride, 0, x + j * n_block, 0, 1);
        }
    }
}

} // namespace

bool ggml_luce_cpu_row_products(
        const ggml_compute_params * params, ggml_tensor * dst, int64_t w_begin, int64_t w_end, int64_t x_begin, int64_t x_end) {
    const ggml_tensor * weight = dst->src[0];
    const bool matrices = ggml_n_dims(weight) <= 2 && ggml_n_dims(dst) <= 2;
    if (weight->type != GGML_TYPE_Q8_0 || dst->src[1]->type != GGML_TYPE_F32 || !matrices) {
        return false;
    }
    ggml_luce_path("row tiles");
    const size_t x_stride = weight->ne[0] / QK8_0;
    const size_t out_stride = dst->nb[1] / sizeof(float);
    for (int64_t j = x_begin; j < x_end; j += 2) {
        const block_q8_0 * x = (const block_q8_0 *) params->wdata + j * x_stride;
        float * out = (float *) dst->data + j * out_stride;
        if (j + 1 < x_end) {
            q8_0_rows<2>(weight, w_begin, w_end, x, out, out_stride);
        } else {
            q8_0_rows<1>(weight, w_begin, w_end, x, out, out_stride);
        }
    }
    return true;
}

#else

bool ggml_luce_cpu_row_products(const ggml_compute_params *, ggml_tensor *, int64_t, int64_t, int64_t, int64_t) {
    return false;
}

#endif
