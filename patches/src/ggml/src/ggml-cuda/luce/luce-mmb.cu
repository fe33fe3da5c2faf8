// pyluce: matrix products of chunk graphs: which kernels, and their inputs.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
//   up to 8 rows of weights    floats, a warp for four columns, x as it is                      here
//   F32 weights                two bfloat16 terms each (luce-mmb-dense.cu); experts: floats     here
//   experts, or a wide matrix  weights widened in the tile                                      luce-mmb-tile.cu
//     with few columns
//   other dense products       weights widened once to 16-bit rows, then a plain product        luce-mmb-dense.cu
//
// The last two give the same bits, so a table (luce-tune.cuh) may choose between them; the others are chosen by the weights alone. Neighbouring products of the same x share its
// rounded rows and its sorted picks.
#include "luce-mmb.cuh"
#include "luce-tune.cuh"

#include "ggml-impl.h"
#include "ggml-luce-path.h"

namespace {

constexpr int n_threads     = 256;
constexpr int n_narrow_max  = 8;
constexpr int n_narrow_cols = 4;    // columns a warp
#ifdef GGML_USE_HIP
constexpr int n_col_few     = 256;  // up to so many columns ..
constexpr int n_row_wide    = 4096; // .. of at least so many rows of weights, these are widened in the tile
#else
constexpr int n_col_few     = 32;   // as `luce tune` found on an H200
constexpr int n_row_wide    = 8192;
#endif

// M <= 8: a warp owns four columns; lane l sums k = 4*l .. 4*l+3 of every 128 in rising order, then the lanes add up
template <int M_max>
__launch_bounds__(n_threads)
static __global__ void luce_mmb_narrow(const float * __restrict__ w, int w_stride, const luce_mmb_rows x, float * __restrict__ dst, int M, int K, int n_col, bool any) {
    const int lane = threadIdx.x%32;
    const int c0   = (blockIdx.x*(n_threads/32) + threadIdx.x/32)*n_narrow_cols;
    if (c0 >= n_col) {
        return;
    }
    const float * xs[n_narrow_cols];
#pragma unroll
    for (int c = 0; c < n_narrow_cols; c++) {
        xs[c] = x.row(min(c0 + c, n_col - 1));
    }
    float acc[M_max][n_narrow_cols] = {};
    for (int k = 4*lane; k < K; k += 128) {
        float4 xv[n_narrow_cols];
#pragma unroll
        for (int c = 0; c < n_narrow_cols; c++) {
            if (any) {
                xv[c].x = xs[c][k];
                xv[c].y = k + 1 < K ? xs[c][k + 1] : 0.0f;
                xv[c].z = k + 2 < K ? xs[c][k + 2] : 0.0f;
                xv[c].w = k + 3 < K ? xs[c][k + 3] : 0.0f;
            } else {
                xv[c] = *(const float4 *) (xs[c] + k);
            }
        }
#pragma unroll
        for (int m = 0; m < M_max; m++) {
            const float * wr = w + (int64_t) min(m, M - 1)*w_stride + k;
            float4 wv;
            if (any) {
                wv.x = wr[0];
                wv.y = k + 1 < K ? wr[1] : 0.0f;
                wv.z = k + 2 < K ? wr[2] : 0.0f;
                wv.w = k + 3 < K ? wr[3] : 0.0f;
            } else {
                wv = *(const float4 *) wr;
            }
#pragma unroll
            for (int c = 0; c < n_narrow_cols; c++) {
                float s = acc[m][c];
                s = fmaf(wv.x, xv[c].x, s);
                s = fmaf(wv.y, xv[c].y, s);
                s = fmaf(wv.z, xv[c].z, s);
                s = fmaf(wv.w, xv[c].w, s);
                acc[m][c] = s;
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M_max; m++) {
#pragma unroll
        for (int c = 0; c < n_narrow_cols; c++) {
            const float s = warp_reduce_sum<32>(acc[m][c]);
            if (lane == 0 && m < M && c0 + c < n_col) {
                dst[(int64_t) (c0 + c)*M + m] = s;
            }
        }
    }
}

// F32 experts: tiles of 64 rows by 64 columns, each thread 4 x 4, one chain of fmaf in rising k an element
__launch_bounds__(n_threads)
static __global__ void luce_mmb_f32(const luce_mmb_weights w, const luce_mmb_rows x, const luce_mmb_cols cols, float * __restrict__ dst, bool any) {
    constexpr int tile   = LUCE_MMB_F32_TILE;
    constexpr int depth  = 16;
    constexpr int stride = tile + 4;
    __shared__ __align__(16) float w_shared[depth][stride];
    __shared__ __align__(16) float x_shared[depth][stride];

    luce_mmb_part part = { 0, (int) blockIdx.y*tile, 0, 0 };
    if (cols.parts != nullptr) {
        if ((int) blockIdx.y >= *cols.n_parts) {
            return;
        }
        part = cols.parts[blockIdx.y];
    } else {
        part.n = min(tile, cols.n_col - part.first);
    }
    const int m0   = blockIdx.x*tile;
    const int tid  = threadIdx.x;
    const int row  = tid/4;
    const int quad = tid%4*4;
    const int K    = w.K;

    const float * w_row = (const float *) (w.data + part.expert*w.nb_expert + min(m0 + row, w.M - 1)*w.nb_row);
    int from = part.first + min(row, part.n - 1);
    if (cols.picks != nullptr) {
        from = cols.picks[from]/cols.picks_per_row;
    }
    const float * x_row = x.row(from);

    const auto load = [&](const float * p, int k) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!any && k + 4 <= K) {
            v = *(const float4 *) (p + k);
        } else {
            v.x = k + 0 < K ? p[k + 0] : 0.0f;
            v.y = k + 1 < K ? p[k + 1] : 0.0f;
            v.z = k + 2 < K ? p[k + 2] : 0.0f;
            v.w = k + 3 < K ? p[k + 3] : 0.0f;
        }
        return v;
    };

    const int i0 = tid%16*4;
    const int j0 = tid/16*4;
    float acc[4][4] = {};
    float4 wv = load(w_row, quad);
    float4 xv = load(x_row, quad);
    for (int k0 = 0; k0 < K; k0 += depth) {
        __syncthreads();
        w_shared[quad + 0][row] = wv.x;
        w_shared[quad + 1][row] = wv.y;
        w_shared[quad + 2][row] = wv.z;
        w_shared[quad + 3][row] = wv.w;
        x_shared[quad + 0][row] = xv.x;
        x_shared[quad + 1][row] = xv.y;
        x_shared[quad + 2][row] = xv.z;
        x_shared[quad + 3][row] = xv.w;
        __syncthreads();
        if (k0 + depth < K) {
            wv = load(w_row, k0 + depth + quad);
            xv = load(x_row, k0 + depth + quad);
        }
#pragma unroll
        for (int k = 0; k < depth; k++) {
            const float4 a4 = *(const float4 *) &w_shared[k][i0];
            const float4 b4 = *(const float4 *) &x_shared[k][j0];
            const float a[4] = { a4.x, a4.y, a4.z, a4.w };
            const float b[4] = { b4.x, b4.y, b4.z, b4.w };
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j0 + j < part.n) {
            const int at = part.first + j0 + j;
            float * out = dst + (int64_t) (cols.picks != nullptr ? cols.picks[at] : at)*w.M + m0 + i0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (m0 + i0 + i < w.M) {
                    out[i] = acc[i][j];
                }
            }
        }
    }
}


bool aligned(const void * p, int64_t nb, int n) {
    return (uintptr_t) p % n == 0 && nb % n == 0;
}

bool is_half(ggml_type type) {
    return type == GGML_TYPE_F16 || (type != GGML_TYPE_BF16 && std::is_same_v<luce_t2, half2>);
}

luce_mmb_weights weights_of(const ggml_tensor * t) {
    luce_mmb_weights w;
    w.data      = (const char *) t->data;
    w.nb_row    = (int64_t) t->nb[1];
    w.nb_expert = (int64_t) t->nb[2];
    w.M         = (int) t->ne[1];
    w.K         = (int) t->ne[0];
    w.any       = ggml_blck_size(t->type) == 1 && (w.K%16 != 0 || !aligned(w.data, w.nb_row, 16) || !aligned(w.data, w.nb_expert, 16));
    return w;
}

luce_mmb_rows rows_of(const ggml_tensor * x, bool by_expert) {
    luce_mmb_rows r;
    r.data     = (const char *) x->data;
    r.n_place  = by_expert ? (int) x->ne[1] : 1;
    r.nb_token = (int64_t) x->nb[by_expert ? 2 : 1];
    r.nb_place = r.n_place > 1 ? (int64_t) x->nb[1] : 0;
    return r;
}

// what the products of one x share; memory is given back in reverse order
class inputs {
public:
    inputs(ggml_backend_cuda_context & ctx, const ggml_tensor * product) :
        ctx(ctx), stream(ctx.stream()), x(rows_of(product->src[1], product->op == GGML_OP_MUL_MAT_ID)),
        n_row((int) (product->src[1]->ne[1]*product->src[1]->ne[2])), K((int) product->src[1]->ne[0]),
        any(!aligned(x.data, x.nb_place, 16) || !aligned(x.data, x.nb_token, 16)) {}

    bool fits(const ggml_tensor * product) const {
        const ggml_tensor * t = product->src[1];
        const luce_mmb_rows r = rows_of(t, product->op == GGML_OP_MUL_MAT_ID);
        return r.data == x.data && r.n_place == x.n_place && r.nb_token == x.nb_token && r.nb_place == x.nb_place &&
            t->ne[1]*t->ne[2] == n_row && t->ne[0] == K;
    }

    void compute(ggml_tensor * dst) {
        const ggml_tensor * src0 = dst->src[0];
        const ggml_tensor * ids  = dst->op == GGML_OP_MUL_MAT_ID ? dst->src[2] : nullptr;
        const luce_mmb_weights w = weights_of(src0);
        float * out = (float *) dst->data;
        if (n_row == 0 || w.M == 0) {
            return;
        }
        const int n_sm = ggml_cuda_info().devices[ctx.device].nsm;
        const int Kp   = luce_mmb_padded(K);
        if (ids == nullptr && w.M <= n_narrow_max) {
            ggml_luce_path("chunk narrow");
            narrow(src0->type, w, out);
        } else if (src0->type == GGML_TYPE_F32 && ids == nullptr) {
            ggml_luce_path("chunk dense of two terms");
            const luce_mmb_terms x_terms = terms();
            ggml_cuda_pool_alloc<uint16_t> w16(ctx.pool(), (size_t) 2*w.M*Kp);
            const luce_mmb_terms w_terms = { w16.get(), w16.get() + (size_t) w.M*Kp };
            const luce_mmb_rows  w_rows  = { w.data, 0, w.nb_row, 1 };
            luce_mmb_round(false, w_rows, w.M, K, w.any, w16.get(), w16.get() + (size_t) w.M*Kp, stream);
            luce_mmb_dense_terms(w_terms, x_terms, w.M, Kp, n_row, out, n_sm, stream);
        } else if (src0->type == GGML_TYPE_F32) {
            ggml_luce_path("chunk f32 experts");
            const luce_mmb_cols & c = sorted(ids, (int) src0->ne[2], LUCE_MMB_F32_TILE);
            const dim3 grid((w.M + LUCE_MMB_F32_TILE - 1)/LUCE_MMB_F32_TILE, c.n_parts_max);
            luce_mmb_f32<<<grid, n_threads, 0, stream>>>(w, x, c, out, w.any || any);
            CUDA_CHECK(cudaGetLastError());
        } else if (ids != nullptr) {
            const luce_tune_chunk how = choice(src0, (int) ids->ne[0], ids->ne[1]);
            const int tile = how != 0 ? tile_of(how) : luce_mmb_tile_columns((int) (ids->ne[0]*ids->ne[1]/src0->ne[2]));
            const luce_mmb_cols & c = sorted(ids, (int) src0->ne[2], tile);
            ggml_luce_path(c.tile == LUCE_MMB_NARROW_TILE ? "chunk tile of few columns" : "chunk tile");
            luce_mmb_tiles(src0->type, w, rounded(is_half(src0->type)), c, out, stream);
        } else if (const luce_tune_chunk how = choice(src0, 0, n_row);
                   how != 0 ? how != LUCE_CHUNK_WIDENED : n_row <= n_col_few && w.M >= n_row_wide) {
            luce_mmb_cols c = {};
            c.n_col         = n_row;
            c.tile          = how != 0 ? tile_of(how) : luce_mmb_tile_columns(n_row);
            c.picks_per_row = 1;
            ggml_luce_path(c.tile == LUCE_MMB_NARROW_TILE ? "chunk tile of few columns" : "chunk tile");
            luce_mmb_tiles(src0->type, w, rounded(is_half(src0->type)), c, out, stream);
        } else {
            ggml_luce_path("chunk dense of widened");
            const void * x16 = rounded(is_half(src0->type));
            ggml_cuda_pool_alloc<uint16_t> w16(ctx.pool(), (size_t) w.M*Kp);
            luce_mmb_widen(src0->type, w, false, w16.get(), stream);
            luce_mmb_dense(is_half(src0->type), w16.get(), x16, w.M, Kp, n_row, out, n_sm, stream);
        }
    }

private:
    // the table's, 0 where it has none
    luce_tune_chunk choice(const ggml_tensor * weights, int n_used, int64_t n_col) const {
        return (luce_tune_chunk) luce_tune_of(ctx.device, LUCE_TUNE_CHUNK, weights->type, weights->ne[0], weights->ne[1], n_used, n_col, 0);
    }

    static int tile_of(luce_tune_chunk how) {
        return how == LUCE_CHUNK_NARROW ? LUCE_MMB_NARROW_TILE : LUCE_MMB_TILE;
    }

    void * memory(size_t n_bytes) {
        GGML_ASSERT(n_buffers < n_buffers_max);
        return buffers[n_buffers++].alloc(ctx.pool(), n_bytes);
    }

    size_t n_bytes_rows() const {
        return (size_t) n_row*luce_mmb_padded(K)*sizeof(uint16_t);
    }

    const void * rounded(bool half) {
        void * & r = half ? binary16 : bfloat16;
        if (r == nullptr) {
            r = memory(n_bytes_rows());
            luce_mmb_round(half, x, n_row, K, any, r, nullptr, stream);
        }
        return r;
    }

    luce_mmb_terms terms() {
        if (low == nullptr) {
            if (bfloat16 == nullptr) {
                bfloat16 = memory(n_bytes_rows());
            }
            low = memory(n_bytes_rows());
            luce_mmb_round(false, x, n_row, K, any, bfloat16, low, stream);
        }
        return { bfloat16, low };
    }

    const luce_mmb_cols & sorted(const ggml_tensor * ids, int n_expert, int tile) {
        for (int i = 0; i < n_sorts; i++) {
            const sort & s = sorts[i];
            if (s.data == ids->data && s.nb_token == ids->nb[1] && s.n_expert == n_expert && s.cols.tile == tile && s.cols.n_col == ids->ne[0]*ids->ne[1]) {
                return s.cols;
            }
        }
        GGML_ASSERT(n_sorts < n_sorts_max);
        GGML_ASSERT(x.n_place == 1 || x.n_place == ids->ne[0]);
        sort & s   = sorts[n_sorts++];
        s.data     = ids->data;
        s.nb_token = ids->nb[1];
        s.n_expert = n_expert;
        const int n_pick = (int) (ids->ne[0]*ids->ne[1]);
        s.cols.picks_per_row = x.n_place == 1 ? (int) ids->ne[0] : 1;
        luce_mmb_sort(ids->data, (int64_t) ids->nb[1], (int) ids->ne[0], n_pick, n_expert, tile,
            memory(luce_mmb_sort_bytes(n_pick, n_expert, tile)), s.cols, stream);
        return s.cols;
    }

    void narrow(ggml_type type, const luce_mmb_weights & w, float * out) {
        ggml_cuda_pool_alloc<float> wide(ctx.pool());
        const float * data = (const float *) w.data;
        int  w_stride = (int) (w.nb_row/sizeof(float));
        bool one      = any || K%4 != 0; // elements read one by one
        if (type != GGML_TYPE_F32) {
            w_stride = luce_mmb_padded(K);
            data     = wide.alloc((size_t) w.M*w_stride);
            luce_mmb_widen(type, w, true, wide.get(), stream);
        } else {
            one = one || !aligned(w.data, w.nb_row, 16);
        }
        const int n_cols_block = n_threads/32*n_narrow_cols;
        const dim3 grid((n_row + n_cols_block - 1)/n_cols_block);
        if (w.M == 1) {
            luce_mmb_narrow<1><<<grid, n_threads, 0, stream>>>(data, w_stride, x, out, w.M, K, n_row, one);
        } else if (w.M <= 4) {
            luce_mmb_narrow<4><<<grid, n_threads, 0, stream>>>(data, w_stride, x, out, w.M, K, n_row, one);
        } else {
            luce_mmb_narrow<8><<<grid, n_threads, 0, stream>>>(data, w_stride, x, out, w.M, K, n_row, one);
        }
        CUDA_CHECK(cudaGetLastError());
    }

    struct sort {
        const void * data;
        size_t nb_token;
        int n_expert;
        luce_mmb_cols cols;
    };

    ggml_backend_cuda_context & ctx;
    cudaStream_t stream;
    const luce_mmb_rows x;
    const int  n_row;
    const int  K;
    const bool any; // rows not aligned to 16 bytes

    static constexpr int n_sorts_max   = 3; // one for each width of tile
    static constexpr int n_buffers_max = 3 + n_sorts_max;
    int    n_sorts   = 0;
    int    n_buffers = 0;
    void * binary16  = nullptr;
    void * bfloat16  = nullptr;
    void * low       = nullptr;
    sort   sorts[n_sorts_max] = {};
    ggml_cuda_pool_alloc<char> buffers[n_buffers_max];
};

bool is_chunk_product(const ggml_tensor * t) {
    return (t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID) && ggml_luce_get_phase(t) == GGML_LUCE_PHASE_CHUNK;
}

bool is_passed_over(const ggml_tensor * t) {
    return ggml_is_empty(t) || t->op == GGML_OP_NONE || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE ||
        t->op == GGML_OP_TRANSPOSE || !(t->flags & GGML_TENSOR_FLAG_COMPUTE);
}

// whether the picks of a product are those of another, or there are none
bool same_ids(const ggml_tensor * a, const ggml_tensor * b) {
    return a->src[2] == nullptr || b->src[2] == nullptr || a->src[2] == b->src[2];
}

} // namespace

int luce_mmb_candidates(int device, ggml_type type, int64_t k, int64_t m, int64_t n_used, int64_t rows, int * values, int n_max) {
    GGML_UNUSED(device);
    GGML_UNUSED(k);
    GGML_UNUSED(rows);
    if (type == GGML_TYPE_F32 || !luce_mmb_tiles_supports(type) || (n_used == 0 && m <= n_narrow_max)) {
        return 0;
    }
    int n = 0;
    const auto add = [&](luce_tune_chunk how) {
        if (n < n_max) {
            values[n] = how;
        }
        n++;
    };
#ifndef GGML_USE_HIP
    add(LUCE_CHUNK_NARROW);
#endif
    add(LUCE_CHUNK_TILES);
    if (n_used == 0) {
        add(LUCE_CHUNK_WIDENED);
    }
    return n;
}

bool luce_cuda_chunk_mul_mat_supports(int device, const ggml_tensor * op) {
    GGML_UNUSED(device);
    const ggml_tensor * w   = op->src[0];
    const ggml_tensor * x   = op->src[1];
    const bool          ids = op->op == GGML_OP_MUL_MAT_ID;
    if ((w->type != GGML_TYPE_F32 && !luce_mmb_tiles_supports(w->type)) || x->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32) {
        return false;
    }
    if (w->nb[0] != ggml_type_size(w->type) || x->nb[0] != sizeof(float) || !ggml_is_contiguous(op) || w->ne[3] != 1 || x->ne[3] != 1) {
        return false;
    }
    if (ids) {
        return w->ne[2] <= LUCE_MMB_MAX_EXPERTS && op->src[2]->type == GGML_TYPE_I32 && op->src[2]->nb[0] == sizeof(int32_t);
    }
    return w->ne[2] == 1 && x->ne[2] == 1;
}

void luce_cuda_chunk_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    inputs(ctx, dst).compute(dst);
}

int luce_cuda_chunk_mul_mat_run(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    inputs shared(ctx, graph->nodes[i]);
    std::vector<ggml_tensor *> products = { graph->nodes[i] };
    const ggml_tensor * with_ids = graph->nodes[i];
    int last = i;
    for (int j = i + 1; j < graph->n_nodes; j++) {
        ggml_tensor * t = graph->nodes[j];
        if (is_passed_over(t)) {
            continue;
        }
        if (!is_chunk_product(t) || !shared.fits(t) || !same_ids(with_ids, t)) {
            break;
        }
        if (t->src[2] != nullptr) {
            with_ids = t;
        }
        products.push_back(t);
        last = j;
    }
    if (products.size() > 1) {
        for (ggml_tensor * t : products) {
            shared.compute(t);
        }
    }
    return last - i;
}
