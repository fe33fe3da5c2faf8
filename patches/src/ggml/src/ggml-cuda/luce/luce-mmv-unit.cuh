// pyluce: weights as the row products read them from shared memory: 32 or 64 of a row at once, against activations in 8 bits.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// luce_unit<type> has n_block blocks of 32 weights: load(row, u) fetches unit u of a row as aligned words, get(h, q) gives
// weights of its block h as 32 signed bytes, block(u, h) says which block of the row that is, and add(...) is one step of the sum.
// The arithmetic is written out, so that every kernel that has a row and a column gets the same bits.
#pragma once

#include "luce-common.cuh"

#include "vecdotq.cuh"

// Activations of one column in 8 bits: of block b words 0-3 lie at plane b % 2, words 4-7 two planes on, 16 bytes a pair of
// blocks; then a scale a block and the sum a block. A plane ends 64 bytes beside a multiple of 128, so that neighbouring
// lanes' reads meet different banks.
__host__ __device__ constexpr int luce_x_plane(int k) {
    return (k / 64 * 16 + 63) / 128 * 128 + 64;
}

__host__ __device__ constexpr int luce_x_bytes(int k) {
    return 4 * luce_x_plane(k) + (k / 32 * 8 + 15) / 16 * 16;
}

struct luce_x8 {
    int   q[8];
    float d;
    float sum;
};

// block b of the column at `x`, a column of k values
template <bool with_sum>
static __device__ __forceinline__ void luce_load_x(luce_x8 & v, const char * x, int plane, int n_block, int b) {
    const char * at = x + (b & 1) * plane + (b >> 1) * 16;
    const int4   lo = *(const int4 *) at;
    const int4   hi = *(const int4 *) (at + 2 * plane);
    v.q[0] = lo.x; v.q[1] = lo.y; v.q[2] = lo.z; v.q[3] = lo.w;
    v.q[4] = hi.x; v.q[5] = hi.y; v.q[6] = hi.z; v.q[7] = hi.w;
    const float * scales = (const float *) (x + 4 * plane);
    v.d   = scales[b];
    v.sum = with_sum ? scales[n_block + b] : 0.0f;
}

// words first, first + 1, ... of two blocks of 32; whole numbers, so their order does not matter
template <int first, int n>
static __device__ __forceinline__ int luce_dot(const int * q, const luce_x8 & x) {
    int a = 0;
    int b = 0;
#pragma unroll
    for (int i = first; i < first + n; i += 2) {
        a = ggml_cuda_dp4a(q[i], x.q[i], a);
        b = ggml_cuda_dp4a(q[i + 1], x.q[i + 1], b);
    }
    return a + b;
}

static __device__ __forceinline__ float luce_half_low(uint32_t bits) {
    const uint16_t low = (uint16_t) bits;
    half h;
    memcpy(&h, &low, sizeof(h));
    return __half2float(h);
}

// four bytes of two words, from byte `first` on: the selector, and the bytes
static __device__ __forceinline__ uint32_t luce_bytes_from(int first) {
#ifdef GGML_USE_HIP
    return 0x03020100u + 0x01010101u * first;
#else
    return 0x3210u + 0x1111u * first;
#endif
}

static __device__ __forceinline__ uint32_t luce_bytes_at(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef GGML_USE_HIP
    return __builtin_amdgcn_perm(high, low, selector);
#else
    return __byte_perm(low, high, selector);
#endif
}

template <ggml_type type> struct luce_unit;

template <> struct luce_unit<GGML_TYPE_Q8_0> {
    static constexpr int  n_block  = 1;
    static constexpr bool with_sum = false;
    uint32_t q[8];
    float    d;
    __device__ __forceinline__ void load(const char * row, int u) {
        const uint32_t * w = (const uint32_t *) row + (17 * u >> 1);
        const bool odd = u & 1; // then the block begins in the middle of a word
        const uint32_t pick = luce_bytes_from(odd ? 4 : 2);
        uint32_t v[9];
#pragma unroll
        for (int i = 0; i < 9; i++) {
            v[i] = w[i];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[i] = luce_bytes_at(v[i], v[i + 1], pick);
        }
        d = luce_half_low(odd ? v[0] >> 16 : v[0]);
    }
    static __device__ __forceinline__ int block(int u, int) { return u; }
    __device__ __forceinline__ void get(int, int * out) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = (int) q[i];
        }
    }
    __device__ __forceinline__ float add(int, const int * w, const luce_x8 & x, float acc) const {
        return fmaf(d * x.d, (float) luce_dot<0, 8>(w, x), acc);
    }
};

#ifndef GGML_USE_HIP
// bytes of a (0-3) and b (4-7); no digit of the selector is above 7, so that none need be masked as __byte_perm does
static __device__ __forceinline__ uint32_t luce_pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
#else
    return __byte_perm(a, b, selector);
#endif
}
#endif

// the values of IQ4_NL of a word's low nibbles, and of its high ones
static __device__ __forceinline__ int2 luce_values_iq4(uint32_t q) {
#ifndef GGML_USE_HIP
    constexpr uint32_t t0 = 0xBFAD9881u, t1 = 0xF6EADDCFu, t2 = 0x26190D01u, t3 = 0x71594535u; // kvalues_iq4nl
    const uint32_t at   = q & 0x77777777u;
    const uint32_t half = ((q >> 1) & 0x44444444u) | 0x32103210u; // which eight of the values
    const uint32_t even = luce_pick_bytes(luce_pick_bytes(t0, t1, at), luce_pick_bytes(t2, t3, at), half);
    const uint32_t odd  = luce_pick_bytes(luce_pick_bytes(t0, t1, at >> 16), luce_pick_bytes(t2, t3, at >> 16), half >> 16);
    return make_int2((int) luce_pick_bytes(even, odd, 0x6420), (int) luce_pick_bytes(even, odd, 0x7531));
#else
    return get_int_from_table_16((int) q, kvalues_iq4nl);
#endif
}

template <> struct luce_unit<GGML_TYPE_IQ4_NL> {
    static constexpr int  n_block  = 2;
    static constexpr bool with_sum = false;
    uint32_t q[2][4];
    float    d[2];
    __device__ __forceinline__ void load(const char * row, int u) {
        const uint32_t * w = (const uint32_t *) row + 9 * u;
        uint32_t v[9];
#pragma unroll
        for (int i = 0; i < 9; i++) {
            v[i] = w[i];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q[0][i] = luce_bytes_at(v[i], v[i + 1], luce_bytes_from(2));
            q[1][i] = v[5 + i];
        }
        d[0] = luce_half_low(v[0]);
        d[1] = luce_half_low(v[4] >> 16);
    }
    static __device__ __forceinline__ int block(int u, int h) { return 2 * u + h; }
    __device__ __forceinline__ void get(int h, int * out) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int2 v = luce_values_iq4(q[h][i]);
            out[i]     = v.x;
            out[4 + i] = v.y;
        }
    }
    __device__ __forceinline__ float add(int h, const int * w, const luce_x8 & x, float acc) const {
        return fmaf(d[h] * x.d, (float) luce_dot<0, 8>(w, x), acc);
    }
};

// Two neighbouring blocks' scales and minima of a super-block of Q4_K or Q5_K: numbers 2*j and 2*j + 1, j < 4; head: its first 16 bytes
struct luce_scales_k {
    float scale0, scale1;
    float minimum0, minimum1;
    __device__ __forceinline__ void load(const uint4 & head, int j) {
        const int      shift = 16 * (j & 1);
        const uint32_t lo = head.y >> shift;
        const uint32_t mi = head.z >> shift;
        const uint32_t hi = head.w >> shift;
        const uint32_t s = j < 2 ? lo & 0x3F3F : (hi & 0x0F0F) | ((lo & 0xC0C0) >> 2);
        const uint32_t m = j < 2 ? mi & 0x3F3F : ((hi >> 4) & 0x0F0F) | ((mi & 0xC0C0) >> 2);
        const float d    = luce_half_low(head.x);
        const float dmin = luce_half_low(head.x >> 16);
        scale0   = d * (float) (s & 0xFF);
        scale1   = d * (float) ((s >> 8) & 0xFF);
        minimum0 = dmin * (float) (m & 0xFF);
        minimum1 = dmin * (float) ((m >> 8) & 0xFF);
    }
    __device__ __forceinline__ float add(int h, const int * w, const luce_x8 & x, float acc) const {
        const float scale   = h == 0 ? scale0 : scale1;
        const float minimum = h == 0 ? minimum0 : minimum1;
        return fmaf(-minimum, x.sum, fmaf(scale * x.d, (float) luce_dot<0, 8>(w, x), acc));
    }
};

template <> struct luce_unit<GGML_TYPE_Q4_K> {
    static constexpr int  n_block  = 2;
    static constexpr bool with_sum = true;
    uint32_t      q[8];
    luce_scales_k s;
    __device__ __forceinline__ void load(const char * row, int u) {
        const char * super = row + (u >> 2) * 144;
        const uint4 * at = (const uint4 *) (super + 16 + 32 * (u & 3));
        const uint4 a = at[0];
        const uint4 b = at[1];
        q[0] = a.x; q[1] = a.y; q[2] = a.z; q[3] = a.w;
        q[4] = b.x; q[5] = b.y; q[6] = b.z; q[7] = b.w;
        s.load(*(const uint4 *) super, u & 3);
    }
    static __device__ __forceinline__ int block(int u, int h) { return 2 * u + h; }
    __device__ __forceinline__ void get(int h, int * out) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = (int) ((q[i] >> (4 * h)) & 0x0F0F0F0F);
        }
    }
    __device__ __forceinline__ float add(int h, const int * w, const luce_x8 & x, float acc) const { return s.add(h, w, x, acc); }
};

template <> struct luce_unit<GGML_TYPE_Q5_K> {
    static constexpr int  n_block  = 2;
    static constexpr bool with_sum = true;
    uint32_t      q[8];
    uint32_t      top[8]; // bit 0 of each byte: the fifth bit of block 0, bit 1: of block 1
    luce_scales_k s;
    __device__ __forceinline__ void load(const char * row, int u) {
        const char * super = row + (u >> 2) * 176;
        const uint4 * at = (const uint4 *) (super + 48 + 32 * (u & 3));
        const uint4 * hi = (const uint4 *) (super + 16);
        const uint4 a = at[0];
        const uint4 b = at[1];
        const uint4 c = hi[0];
        const uint4 e = hi[1];
        q[0] = a.x; q[1] = a.y; q[2] = a.z; q[3] = a.w;
        q[4] = b.x; q[5] = b.y; q[6] = b.z; q[7] = b.w;
        top[0] = c.x; top[1] = c.y; top[2] = c.z; top[3] = c.w;
        top[4] = e.x; top[5] = e.y; top[6] = e.z; top[7] = e.w;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            top[i] >>= 2 * (u & 3);
        }
        s.load(*(const uint4 *) super, u & 3);
    }
    static __device__ __forceinline__ int block(int u, int h) { return 2 * u + h; }
    __device__ __forceinline__ void get(int h, int * out) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = (int) (((q[i] >> (4 * h)) & 0x0F0F0F0F) | (((top[i] >> h) & 0x01010101) << 4));
        }
    }
    __device__ __forceinline__ float add(int h, const int * w, const luce_x8 & x, float acc) const { return s.add(h, w, x, acc); }
};

// A unit has the low and the high nibbles of 32 bytes: two blocks that are 64 weights apart. Rows are of whole pairs of super-blocks.
template <> struct luce_unit<GGML_TYPE_Q6_K> {
    static constexpr int  n_block  = 2;
    static constexpr bool with_sum = false;
    uint32_t q[8];
    uint32_t top[8]; // bits 0-1 of each byte: the upper bits of block 0, bits 4-5: of block 1
    int      s[2][2];
    float    d;
    __device__ __forceinline__ void load(const char * row, int u) {
        const int  super = u >> 2;
        const int  half_ = (u >> 1) & 1;
        const int  j     = u & 1;
        const bool odd   = super & 1; // then the super-block begins in the middle of a word
        const uint32_t pick = luce_bytes_from(odd ? 2 : 0);
        const uint32_t * w  = (const uint32_t *) row + (105 * super >> 1);
        const uint32_t * ql = w + 16 * half_ + 8 * j;
        const uint32_t * qh = w + 32 + 8 * half_;
        uint32_t a[9];
        uint32_t b[9];
#pragma unroll
        for (int i = 0; i < 9; i++) {
            a[i] = ql[i];
            b[i] = qh[i];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[i]   = luce_bytes_at(a[i], a[i + 1], pick);
            top[i] = luce_bytes_at(b[i], b[i + 1], pick) >> (2 * j);
        }
        const int8_t * scales = (const int8_t *) row + 210 * super + 192 + 8 * half_ + 2 * j;
        s[0][0] = scales[0];
        s[0][1] = scales[1];
        s[1][0] = scales[4];
        s[1][1] = scales[5];
        d = luce_half_low(*(const uint16_t *) (row + 210 * super + 208));
    }
    static __device__ __forceinline__ int block(int u, int h) { return 8 * (u >> 2) + 4 * ((u >> 1) & 1) + (u & 1) + 2 * h; }
    __device__ __forceinline__ void get(int h, int * out) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t v = ((q[i] >> (4 * h)) & 0x0F0F0F0F) | (((top[i] >> (4 * h)) & 0x03030303) << 4);
            out[i] = (int) (((v | 0x80808080) - 0x20202020) ^ 0x80808080); // each byte less 32
        }
    }
    __device__ __forceinline__ float add(int h, const int * w, const luce_x8 & x, float acc) const {
        return fmaf(d * x.d, (float) (s[h][0] * luce_dot<0, 4>(w, x) + s[h][1] * luce_dot<4, 4>(w, x)), acc);
    }
};

// four floats of a row of F32, F16 or BF16
static __device__ __forceinline__ float4 luce_widen4(const float * w, int i) {
    return ((const float4 *) w)[i];
}

static __device__ __forceinline__ float4 luce_widen4(const half * w, int i) {
    const uint2  v = ((const uint2 *) w)[i];
    return make_float4(luce_half_low(v.x), luce_half_low(v.x >> 16), luce_half_low(v.y), luce_half_low(v.y >> 16));
}

static __device__ __forceinline__ float4 luce_widen4(const nv_bfloat16 * w, int i) {
    const uint2 v = ((const uint2 *) w)[i];
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                       __uint_as_float(v.y & 0xffff0000u));
}

static __device__ __forceinline__ float luce_dot4(float4 a, float4 v, float acc) {
    return fmaf(a.w, v.w, fmaf(a.z, v.z, fmaf(a.y, v.y, fmaf(a.x, v.x, acc))));
}
