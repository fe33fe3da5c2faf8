// pyluce: one Gated-DeltaNet layer between its projections: convolution, norms, gates, delta rule, gated output norm.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A thread owns a key head with the value heads that read it and walks the rows in order, so nothing is shared and the
// order of every sum is fixed: taps oldest first, then along the head. With S the state as [dk, dv] (a value's row of dk
// values is contiguous), a row does, for each j of dv:
//     S_j *= exp(g);  u = beta * (v_j - <S_j, k>);  S_j += u * k;  o_j = <S_j, q>
#include "luce-impl.h"

namespace {

struct gdn_shape {
    int64_t d, nk, nv, n_row, channels, n_tap, state_ring, history_ring;
    explicit gdn_shape(const ggml_tensor * dst) {
        nk           = ggml_get_op_params_i32(dst, 1);
        nv           = dst->src[2]->ne[0];
        d            = dst->ne[0] / nv;
        n_row        = dst->ne[1];
        channels     = dst->src[0]->ne[0];
        n_tap        = dst->src[4]->ne[1];
        state_ring   = dst->src[6]->ne[1];
        history_ring = dst->src[7]->ne[1];
    }
    // q, k, v of one head, its output, and a working state for each value head of the group
    size_t scratch_floats() const { return whole_lines((size_t) (4 * d + d * d * (nv / nk))); }
};

float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

} // namespace

size_t luce_gdn_work_size(const ggml_tensor * dst, int n_tasks) {
    const gdn_shape s(dst);
    return s.scratch_floats() * sizeof(float) * (size_t) n_tasks;
}

// silu of the convolution at row r of the `d` channels from c0 on
static void convolve(const ggml_tensor * dst, const gdn_shape & s, const luce_row * rows, int64_t r, int64_t c0, float * y) {
    const ggml_tensor * qkv = dst->src[0];
    const float * conv = (const float *) dst->src[4]->data;
    const float * kept = (const float *) dst->src[7]->data + rows[r].slot * s.history_ring * s.channels;
    const int64_t position = rows[r].position;
    memset(y, 0, s.d * sizeof(float));
    for (int64_t k = 0; k < s.n_tap; k++) {
        const int64_t back = s.n_tap - 1 - k;
        if (back > position) {
            continue;
        }
        const bool    here = back <= r && rows[r - back].slot == rows[r].slot && rows[r - back].position == position - back;
        const float * x    = here ? row_of(qkv, r - back) : kept + (position - back) % s.history_ring * s.channels;
        const float * w    = conv + k * s.channels;
        for (int64_t i = 0; i < s.d; i++) {
            y[i] += x[c0 + i] * w[c0 + i];
        }
    }
    ggml_vec_silu_f32((int) s.d, y, y);
}

static void keep_history(const ggml_tensor * dst, const gdn_shape & s, const luce_row & row, int64_t r, int64_t c0) {
    float * kept = (float *) dst->src[7]->data + (row.slot * s.history_ring + row.position % s.history_ring) * s.channels;
    memcpy(kept + c0, row_of(dst->src[0], r) + c0, s.d * sizeof(float));
}

// x /= sqrt(sum x^2 + eps), then times scale
static void unit_length(int64_t n, float * x, float eps, float scale) {
    const float f = scale / sqrtf(luce_dot(n, x, x) + eps);
    for (int64_t i = 0; i < n; i++) {
        x[i] *= f;
    }
}

// one row of one value head: reads the state at `from` (NULL: zero), leaves the next at `to` (may be the same)
static void delta_rule(int64_t d, const float * from, float * to, const float * q, const float * k, const float * v,
                       float decay, float beta, float * out) {
    for (int64_t j = 0; j < d; j++) {
        float * row = to + j * d;
        if (from) {
            for (int64_t i = 0; i < d; i++) {
                row[i] = from[j * d + i] * decay;
            }
        } else {
            memset(row, 0, d * sizeof(float));
        }
        const float u = beta * (v[j] - luce_dot(d, row, k));
        ggml_vec_mad_f32((int) d, row, k, u);
        out[j] = luce_dot(d, row, q);
    }
}

void luce_gdn(const ggml_compute_params * params, ggml_tensor * dst) {
    const gdn_shape s(dst);
    const ggml_tensor * z     = dst->src[1];
    const ggml_tensor * beta  = dst->src[2];
    const ggml_tensor * alpha = dst->src[3];
    const float * misc  = (const float *) dst->src[5]->data;
    float       * state = (float *) dst->src[6]->data;
    const luce_row * rows = (const luce_row *) dst->src[8]->data;
    const float eps       = ggml_get_op_params_f32(dst, 2);
    const bool  keep_rows = ggml_get_op_params_i32(dst, 3) != 0;
    const int   fault     = ggml_get_op_params_i32(dst, 4);
    const int64_t d      = s.d;
    const int64_t group  = s.nv / s.nk;
    const int64_t entry  = d * d * s.nv;
    const float * gain   = misc + 2 * s.nv;

    float * q   = (float *) params->wdata + s.scratch_floats() * (size_t) params->ith;
    float * k   = q + d;
    float * v   = k + d;
    float * out = v + d;
    float * work = out + d; // a state for each value head of the group

    const luce_share share(s.nk, params->ith, params->nth);
    for (int64_t hk = share.begin; hk < share.end; hk++) {
        for (int64_t r = 0; r < s.n_row; r++) {
            const luce_row row = rows[r];
            if (row.slot < 0) {
                for (int64_t g = 0; g < group; g++) {
                    memset(row_of(dst, r) + (g * s.nk + hk) * d, 0, d * sizeof(float));
                }
                continue;
            }
            const bool first = r == 0 || rows[r - 1].slot != row.slot;
            const bool last  = r + 1 == s.n_row || rows[r + 1].slot != row.slot;
            const bool keep  = last || (keep_rows && !(r + s.state_ring < s.n_row && rows[r + s.state_ring].slot == row.slot));

            convolve(dst, s, rows, r, hk * d, q);
            convolve(dst, s, rows, r, (s.nk + hk) * d, k);
            unit_length(d, q, eps, 1.0f / sqrtf((float) d));
            unit_length(d, k, eps, 1.0f);

            float * ring = state + row.slot * s.state_ring * entry;
            for (int64_t g = 0; g < group; g++) {
                const int64_t hv = g * s.nk + hk;
                convolve(dst, s, rows, r, (2 * s.nk + hv) * d, v);

                const float * before = ring + row.position % s.state_ring * entry + hv * d * d;
                float       * after  = ring + (row.position + 1) % s.state_ring * entry + hv * d * d;
                float       * mine   = work + g * d * d;
                const float * from   = first ? before : mine;
                if (first && row.position == 0 && fault != GGML_LUCE_FAULT_NAN_LEAK) {
                    from = nullptr;
                }
                // alone and last: straight from ring to ring; else by the working copy
                float * to = first && last ? after : mine;
                const float decay = expf(softplus(row_of(alpha, r)[hv] + misc[hv]) * misc[s.nv + hv]);
                delta_rule(d, from, to, q, k, v, decay, luce_sigmoid(row_of(beta, r)[hv]), out);
                if (keep && to != after) {
                    memcpy(after, to, d * d * sizeof(float));
                }

                float * y = row_of(dst, r) + hv * d;
                luce_rms_norm(d, out, out, gain, eps);
                luce_mul_sigmoid(d, y, out, row_of(z, r) + hv * d);
            }
        }
        // the rows are read: now the raw columns of the last ones may replace older history
        for (int64_t r = 0; r < s.n_row; r++) {
            if (rows[r].slot < 0 || (r + s.history_ring < s.n_row && rows[r + s.history_ring].slot == rows[r].slot)) {
                continue;
            }
            keep_history(dst, s, rows[r], r, hk * d);
            keep_history(dst, s, rows[r], r, (s.nk + hk) * d);
            for (int64_t g = 0; g < group; g++) {
                keep_history(dst, s, rows[r], r, (2 * s.nk + g * s.nk + hk) * d);
            }
        }
    }
}
