// pyluce: what the kernels of the chunk products share.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// One element of a product is one chain of 16-wide matrix instructions in rising k, F32 accumulators, whatever tile it
// falls into: its bits depend on its own row of weights and its own row of x alone. So a kernel may be chosen by size.
#pragma once

#include "luce-common.cuh"
#include "luce-dequant.cuh"
#include "../mma.cuh"

// the 16-bit type of quantised weights and of the activations that meet them: bfloat16, or binary16 with -DLUCE_MMB_F16
#ifdef LUCE_MMB_F16
typedef half2 luce_t2;
#else
typedef nv_bfloat162 luce_t2;
#endif

constexpr int LUCE_MMB_K      = 64; // depth of a tile; 16-bit rows in memory are padded to a multiple with zeros
constexpr int LUCE_MMB_STRIDE = 36; // pairs from row to row in shared memory: 16 bytes of padding against bank conflicts
constexpr int LUCE_MMB_TILE   = 128; // rows, and columns at most, of a tile of the kernels that widen weights themselves
constexpr int LUCE_MMB_NARROW_TILE = 32; // columns of a tile where few are expected (CUDA alone)
constexpr int LUCE_MMB_F32_TILE = 64;
constexpr int LUCE_MMB_MAX_EXPERTS = 1024;

static inline int luce_mmb_padded(int64_t K) {
    return (int) ((K + LUCE_MMB_K - 1) / LUCE_MMB_K * LUCE_MMB_K);
}

// consecutive sorted picks of one expert
struct luce_mmb_part {
    int32_t expert;
    int32_t first; // place in the sorted picks
    int32_t n;
    int32_t reserved;
};

// the columns of a product: rows 0..n_col-1 of x, or picks sorted by expert
struct luce_mmb_cols {
    int n_col;
    int tile;                   // columns of a part at most
    const luce_mmb_part * parts; // null: plain columns
    const int32_t * n_parts;
    const int32_t * picks;      // sorted; a pick is token*n_used + place
    int picks_per_row;          // n_used where all picks of a token read one row of x
    int n_parts_max;
};

// how rows of floats are found: row r is place r % n_place of token r / n_place
struct luce_mmb_rows {
    const char * data;
    int64_t nb_place;
    int64_t nb_token;
    int n_place;

    __device__ __forceinline__ const float * row(int r) const {
        return (const float *) (data + r%n_place*nb_place + r/n_place*nb_token);
    }
};

struct luce_mmb_weights {
    const char * data;
    int64_t nb_row;
    int64_t nb_expert;
    int M;
    int K;
    bool any; // a float type whose rows are not aligned to 16 bytes, or K is no multiple of 16
};

// rows of K floats to rows of luce_mmb_padded(K) 16-bit values, rounded to nearest; low: bfloat16, and what rounding left.
// any: rows not aligned to 16 bytes
void luce_mmb_round(bool half, const luce_mmb_rows & x, int n_row, int K, bool any, void * high, void * low, cudaStream_t stream);

// weights to rows of luce_mmb_padded(K) 16-bit values, or floats
void luce_mmb_widen(ggml_type type, const luce_mmb_weights & w, bool floats, void * to, cudaStream_t stream);

// Picks sorted by expert, in rising order within one, and parts of at most `tile` picks. ids: n_used consecutive I32 a token.
// Sets cols but picks_per_row; `memory` holds luce_mmb_sort_bytes.
size_t luce_mmb_sort_bytes(int n_pick, int n_expert, int tile);
void luce_mmb_sort(const void * ids, int64_t nb_token, int n_used, int n_pick, int n_expert, int tile, void * memory, luce_mmb_cols & cols, cudaStream_t stream);

static inline int luce_mmb_parts_max(int n_pick, int n_expert, int tile) {
    return std::min(n_expert, n_pick) + n_pick/tile;
}

// columns of a tile of luce_mmb_tiles where a part holds about so many
static inline int luce_mmb_tile_columns(int n_expected) {
#ifdef GGML_USE_HIP
    GGML_UNUSED(n_expected);
    return LUCE_MMB_TILE;
#else
    return n_expected <= 24 ? LUCE_MMB_NARROW_TILE : LUCE_MMB_TILE;
#endif
}

// weights widened inside the tile; x16: rows of luce_mmb_padded(K) 16-bit values, dst: rows of M
void luce_mmb_tiles(ggml_type type, const luce_mmb_weights & w, const void * x16, const luce_mmb_cols & cols, float * dst, cudaStream_t stream);
bool luce_mmb_tiles_supports(ggml_type type);

// w16: M rows, x16: n_col rows, both of Kp 16-bit values (binary16 or bfloat16), dst: rows of M
void luce_mmb_dense(bool half, const void * w16, const void * x16, int M, int Kp, int n_col, float * dst, int n_sm, cudaStream_t stream);

// the same for floats in two bfloat16 terms each, value = high + low: high*high + high*low + low*high, within about 2^-18 of a term
struct luce_mmb_terms {
    const void * high;
    const void * low;
};
void luce_mmb_dense_terms(const luce_mmb_terms & w, const luce_mmb_terms & x, int M, int Kp, int n_col, float * dst, int n_sm, cudaStream_t stream);

template <typename T2>
static __device__ __forceinline__ uint32_t luce_pack(float a, float b) {
#ifdef GGML_USE_HIP
    // HIP's own conversion branches for each value; NaN stays NaN here too, other values have the same bits
    if constexpr (std::is_same_v<T2, nv_bfloat162>) {
        const uint32_t ua = __float_as_uint(a);
        const uint32_t ub = __float_as_uint(b);
        const uint32_t ra = a != a ? ua | 0x10000 : ua + 0x7fff + ((ua >> 16) & 1);
        const uint32_t rb = b != b ? ub | 0x10000 : ub + 0x7fff + ((ub >> 16) & 1);
        return (ra >> 16) | (rb & 0xffff0000);
    }
#endif // GGML_USE_HIP
    const T2 p = ggml_cuda_cast<T2>(make_float2(a, b));
    uint32_t bits;
    memcpy(&bits, &p, sizeof(bits));
    return bits;
}

// sixteen weights as pairs of 16-bit values; the two float types of 16 bits pass as they are
template <ggml_type type, typename T2>
static __device__ __forceinline__ void luce_w16_pack(uint32_t * p, const luce_w16<type> & w, int k) {
    if constexpr ((type == GGML_TYPE_F16 && std::is_same_v<T2, half2>) || (type == GGML_TYPE_BF16 && std::is_same_v<T2, nv_bfloat162>)) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            p[i] = w.q[i];
        }
        GGML_UNUSED(k);
    } else {
        float v[16];
        w.get(v, k);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            p[i] = luce_pack<T2>(v[2*i], v[2*i + 1]);
        }
    }
}

// Where pair j (0..7) of sixteen values, number q (0..3) of 64, stands in a row of 16-bit values. CUDA: a lane of a matrix
// instruction wants values 2q, 2q+1, 2q+8, 2q+9 of its row, so these are made consecutive in memory: then a lane that has
// widened sixteen weights holds its own operands of four instructions. Both operands are stored alike.
static __device__ __forceinline__ constexpr int luce_pair_place(int q, int j) {
#ifdef GGML_USE_HIP
    return 8*q + j;
#else
    return 8*(j/2) + 4*(j%2) + q;
#endif
}

// 16 bytes on their way through registers; in an array HIP's uint4 would take the way through scratch memory
#ifdef GGML_USE_HIP
typedef uint32_t luce_piece __attribute__((ext_vector_type(4)));
#else
typedef uint4 luce_piece;
#endif

// 16 bytes from global to shared memory without a register; luce_copy_commit closes a group, luce_copy_wait<n> leaves the n
// youngest groups under way
static __device__ __forceinline__ void luce_copy16(void * shared, const void * global) {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
        : : "r"((unsigned) __cvta_generic_to_shared(shared)), "l"(global) : "memory");
#else
    *(uint4 *) shared = *(const uint4 *) global;
#endif
}

static __device__ __forceinline__ void luce_copy_commit() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

template <int n>
static __device__ __forceinline__ void luce_copy_wait() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.wait_group %0;" : : "n"(n) : "memory");
#endif
}

// A 16 x 16 piece of the result: i runs over rows of weights, j over columns (rows of x). Operands are 16 x 16 pieces, k fastest.
template <typename T2>
struct luce_frag {
#ifdef AMD_WMMA_AVAILABLE
    typedef ggml_cuda_mma::tile<16, 8, T2, ggml_cuda_mma::get_input_data_layout()> operand;
    typedef ggml_cuda_mma::tile<16, 16, float, ggml_cuda_mma::DATA_LAYOUT_I_MAJOR> result;
    static constexpr int n = result::ne;

    result c;
    __device__ __forceinline__ void add(const operand & w, const operand & x) {
        ggml_cuda_mma::mma(c, x, w); // the second operand's row is the lane: neighbouring lanes store neighbouring rows of weights
    }
    static __device__ __forceinline__ int i(int l) { return result::get_i(l); }
    static __device__ __forceinline__ int j(int l) { return result::get_j(l); }
    __device__ __forceinline__ float value(int l) const { return c.x[l]; }
    __device__ __forceinline__ void plus(const luce_frag & other) {
#pragma unroll
        for (int l = 0; l < n; l++) {
            c.x[l] += other.c.x[l];
        }
    }
#else
    typedef ggml_cuda_mma::tile<16, 8, T2>    operand;
    typedef ggml_cuda_mma::tile<8, 8, T2>     column;
    typedef ggml_cuda_mma::tile<16, 8, float> result;
    static constexpr int n = 2*result::ne;

    result c[2];
    __device__ __forceinline__ void add(const operand & w, const operand & x) {
        column half8;
        half8.x[0] = x.x[0];
        half8.x[1] = x.x[2];
        ggml_cuda_mma::mma(c[0], w, half8);
        half8.x[0] = x.x[1];
        half8.x[1] = x.x[3];
        ggml_cuda_mma::mma(c[1], w, half8);
    }
    static __device__ __forceinline__ int i(int l) { return result::get_i(l % result::ne); }
    static __device__ __forceinline__ int j(int l) { return l / result::ne * 8 + result::get_j(l % result::ne); }
    __device__ __forceinline__ float value(int l) const { return c[l / result::ne].x[l % result::ne]; }
    __device__ __forceinline__ void plus(const luce_frag & other) {
#pragma unroll
        for (int l = 0; l < n; l++) {
            c[l / result::ne].x[l % result::ne] += other.c[l / result::ne].x[l % result::ne];
        }
    }
#endif // AMD_WMMA_AVAILABLE
};
