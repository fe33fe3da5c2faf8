// pyluce: sixteen consecutive weights of a row, of every type that the chunk products take.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// luce_w16<type> holds the bytes of weights k..k+15 of a row (k a multiple of 16) as they lie in memory, so that a kernel may
// load early (`load`) and widen late (`get`, with the same k). Rows begin where the type's blocks may begin in memory that is
// aligned to 16 bytes; F32, F16 and BF16 want rows aligned to 16 bytes for `load`, and `load_any` takes what it finds.
// Products and sums are written out (fmaf), so that every kernel that widens a weight gets the same float.
#pragma once

#include "../common.cuh"
#include "../convert.cuh"
#include "../vecdotq.cuh"

#include <cstring>

template <ggml_type type> struct luce_w16;

// how many consecutive weights share a header
template <ggml_type type> static constexpr int luce_block_size =
    type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ? 1 :
    type == GGML_TYPE_Q2_0 ? QK2_0 :
    type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_0 ||
    type == GGML_TYPE_Q5_1 || type == GGML_TYPE_IQ4_NL ? 32 : QK_K;

// four bytes at an address aligned to two
static __device__ __forceinline__ uint32_t luce_u32_2(const void * p) {
    const uint16_t * h = (const uint16_t *) p;
    return h[0] | ((uint32_t) h[1] << 16);
}

// sixteen bytes at an address aligned to two, by the aligned words that hold them
static __device__ __forceinline__ void luce_bytes16_2(uint32_t * q, const void * p) {
    const uint32_t * w = (const uint32_t *) ((uintptr_t) p & ~(uintptr_t) 3);
    const bool odd = ((uintptr_t) p & 2) != 0;
    uint32_t x[5];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = w[i];
    }
    x[4] = 0;
    if (odd) {
        x[4] = w[4];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        q[i] = odd ? (x[i] >> 16) | (x[i + 1] << 16) : x[i];
    }
}

// sixteen bytes at an address aligned to 16, to four
static __device__ __forceinline__ void luce_bytes16(uint32_t * q, const void * p) {
    const uint4 x = *(const uint4 *) p;
    q[0] = x.x;
    q[1] = x.y;
    q[2] = x.z;
    q[3] = x.w;
}

static __device__ __forceinline__ void luce_bytes16_4(uint32_t * q, const void * p) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        q[i] = ((const uint32_t *) p)[i];
    }
}

// byte i of a register, unsigned and signed, as a float
static __device__ __forceinline__ float luce_u8(uint32_t x, int i) {
    return (float) ((x >> (8*i)) & 0xFF);
}

static __device__ __forceinline__ float luce_s8(uint32_t x, int i) {
    return (float) (int8_t) (x >> (8*i));
}

// one 16-bit float of a pair held in a register
static __device__ __forceinline__ float luce_f16(uint32_t x, int i) {
    const uint16_t bits = (uint16_t) (x >> (16*i));
    half h;
    memcpy(&h, &bits, sizeof(h));
    return __half2float(h);
}

template <> struct luce_w16<GGML_TYPE_F32> {
    float q[16];
    __device__ __forceinline__ void load(const char * row, int k) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 x = *(const float4 *) (row + 4*(int64_t) k + 16*i);
            q[4*i + 0] = x.x;
            q[4*i + 1] = x.y;
            q[4*i + 2] = x.z;
            q[4*i + 3] = x.w;
        }
    }
    __device__ __forceinline__ void load_any(const char * row, int k, int K) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            q[i] = k + i < K ? ((const float *) row)[k + i] : 0.0f;
        }
    }
    __device__ __forceinline__ void get(float * v, int) const {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = q[i];
        }
    }
};

// the two 16-bit float types
struct luce_w16_16 {
    uint32_t q[8];
    __device__ __forceinline__ void load(const char * row, int k) {
        luce_bytes16(q,     row + 2*(int64_t) k);
        luce_bytes16(q + 4, row + 2*(int64_t) k + 16);
    }
    __device__ __forceinline__ void load_any(const char * row, int k, int K) {
        const uint16_t * p = (const uint16_t *) row + k;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t lo = k + 2*i     < K ? p[2*i]     : 0;
            const uint32_t hi = k + 2*i + 1 < K ? p[2*i + 1] : 0;
            q[i] = lo | (hi << 16);
        }
    }
};

template <> struct luce_w16<GGML_TYPE_F16> : luce_w16_16 {
    __device__ __forceinline__ void get(float * v, int) const {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = luce_f16(q[i/2], i%2);
        }
    }
};

template <> struct luce_w16<GGML_TYPE_BF16> : luce_w16_16 {
    __device__ __forceinline__ void get(float * v, int) const {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = __uint_as_float(i%2 == 0 ? q[i/2] << 16 : q[i/2] & 0xFFFF0000);
        }
    }
};

template <> struct luce_w16<GGML_TYPE_Q8_0> {
    uint32_t q[4];
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q8_0 * b = (const block_q8_0 *) row + k/32;
        d = b->d;
        luce_bytes16_2(q, b->qs + k%32);
    }
    __device__ __forceinline__ void get(float * v, int) const {
        const float s = __half2float(d);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = luce_s8(q[i/4], i%4) * s;
        }
    }
};

template <> struct luce_w16<GGML_TYPE_Q4_0> {
    uint32_t q[4];
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q4_0 * b = (const block_q4_0 *) row + k/32;
        d = b->d;
        luce_bytes16_2(q, b->qs);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float s = __half2float(d);
        const int shift = k%32/16*4;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = (luce_u8((q[i/4] >> shift) & 0x0F0F0F0F, i%4) - 8.0f) * s;
        }
    }
};

template <> struct luce_w16<GGML_TYPE_Q4_1> {
    uint32_t q[4];
    half2 dm;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q4_1 * b = (const block_q4_1 *) row + k/32;
        dm = b->dm;
        luce_bytes16_4(q, b->qs);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float2 s = __half22float2(dm);
        const int shift = k%32/16*4;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = fmaf(luce_u8((q[i/4] >> shift) & 0x0F0F0F0F, i%4), s.x, s.y);
        }
    }
};

// bits j..j+3 of x as bit 4 of four bytes
static __device__ __forceinline__ uint32_t luce_spread5(uint32_t x, int j) {
    const uint32_t b = x >> j;
    return ((b & 1) << 4) | ((b & 2) << 11) | ((b & 4) << 18) | ((b & 8) << 25);
}

template <> struct luce_w16<GGML_TYPE_Q5_0> {
    uint32_t q[4];
    uint32_t h;
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q5_0 * b = (const block_q5_0 *) row + k/32;
        d = b->d;
        h = luce_u32_2(b->qh);
        luce_bytes16_2(q, b->qs);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float s = __half2float(d);
        const int shift = k%32/16*4;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = (luce_u8(((q[i/4] >> shift) & 0x0F0F0F0F) | luce_spread5(h, k%32 + i/4*4), i%4) - 16.0f) * s;
        }
    }
};

template <> struct luce_w16<GGML_TYPE_Q5_1> {
    uint32_t q[4];
    uint32_t h;
    half2 dm;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q5_1 * b = (const block_q5_1 *) row + k/32;
        dm = b->dm;
        h = luce_u32_2(b->qh);
        luce_bytes16_4(q, b->qs);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float2 s = __half22float2(dm);
        const int shift = k%32/16*4;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = fmaf(luce_u8(((q[i/4] >> shift) & 0x0F0F0F0F) | luce_spread5(h, k%32 + i/4*4), i%4), s.x, s.y);
        }
    }
};

template <> struct luce_w16<GGML_TYPE_IQ4_NL> {
    uint32_t q[4];
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_iq4_nl * b = (const block_iq4_nl *) row + k/32;
        d = b->d;
        luce_bytes16_2(q, b->qs);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float s     = __half2float(d);
        const int   shift = k%32/16*4;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t t = get_int_from_table_16((q[j] >> shift) & 0x0F0F0F0F, kvalues_iq4nl).x;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[4*j + i] = luce_s8(t, i) * s;
            }
        }
    }
};

template <> struct luce_w16<GGML_TYPE_Q2_0> {
    uint32_t q;
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q2_0 * b = (const block_q2_0 *) row + k/QK2_0;
        d = b->d;
        q = luce_u32_2(b->qs + k%QK2_0/4);
    }
    __device__ __forceinline__ void get(float * v, int) const {
        const float s = __half2float(d);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = (float) ((int) ((q >> (2*i)) & 3) - 1) * s;
        }
    }
};

// scale and minimum of 32 weights, number j (0..7), of a super-block's first 16 bytes: two F16, then 6-bit numbers in 12 bytes
static __device__ __forceinline__ void luce_scale_k4(const uint32_t * head, int j, float & scale, float & minimum) {
    const int      b  = 8*(j%4);
    const uint32_t lo = head[1] >> b;
    const uint32_t mi = head[2] >> b;
    const uint32_t hi = head[3] >> b;
    const int s = j < 4 ? lo & 63 : (hi & 15) | ((lo & 0xC0) >> 2);
    const int m = j < 4 ? mi & 63 : ((hi >> 4) & 15) | ((mi & 0xC0) >> 2);
    scale   = luce_f16(head[0], 0) * (float) s;
    minimum = luce_f16(head[0], 1) * (float) m;
}

template <> struct luce_w16<GGML_TYPE_Q4_K> {
    uint32_t q[4];
    uint32_t head[4];
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q4_K * b = (const block_q4_K *) row + k/QK_K;
        luce_bytes16(head, b);
        luce_bytes16(q, b->qs + k%QK_K/64*32 + k%32);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const int j = k%QK_K/32;
        float scale, minimum;
        luce_scale_k4(head, j, scale, minimum);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i] = fmaf(luce_u8((q[i/4] >> (j%2*4)) & 0x0F0F0F0F, i%4), scale, -minimum);
        }
    }
};

template <> struct luce_w16<GGML_TYPE_Q5_K> {
    uint32_t q[4];
    uint32_t h[4];
    uint32_t head[4];
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q5_K * b = (const block_q5_K *) row + k/QK_K;
        luce_bytes16(head, b);
        luce_bytes16(h, b->qh + k%32);
        luce_bytes16(q, b->qs + k%QK_K/64*32 + k%32);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const int j = k%QK_K/32;
        float scale, minimum;
        luce_scale_k4(head, j, scale, minimum);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t x = ((q[i/4] >> (j%2*4)) & 0x0F0F0F0F) | (((h[i/4] >> j) & 0x01010101) << 4);
            v[i] = fmaf(luce_u8(x, i%4), scale, -minimum);
        }
    }
};

template <> struct luce_w16<GGML_TYPE_Q6_K> {
    uint32_t q[4];
    uint32_t h[4];
    int8_t s;
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q6_K * b = (const block_q6_K *) row + k/QK_K;
        const int n = k%QK_K/128; // half
        const int j = k%128/32;   // quarter of the half
        d = b->d;
        s = b->scales[k%QK_K/16];
        luce_bytes16_2(q, b->ql + 64*n + 32*(j%2) + k%32);
        luce_bytes16_2(h, b->qh + 32*n + k%32);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const int   j = k%128/32;
        const float c = __half2float(d) * (float) s;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t x = ((q[i/4] >> (j/2*4)) & 0x0F0F0F0F) | (((h[i/4] >> (2*j)) & 0x03030303) << 4);
            v[i] = (luce_u8(x, i%4) - 32.0f) * c;
        }
    }
};

template <> struct luce_w16<GGML_TYPE_IQ3_S> {
    uint32_t q;
    uint16_t sign;
    uint8_t  h;
    uint8_t  s;
    half     d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_iq3_s * b = (const block_iq3_s *) row + k/QK_K;
        const int j = k%QK_K/32;
        const int l = k%32/8; // 0 or 2
        d    = b->d;
        q    = luce_u32_2(b->qs + 8*j + 2*l);
        sign = *(const uint16_t *) (b->signs + 4*j + l);
        h    = b->qh[j];
        s    = b->scales[j/2];
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const int   j = k%QK_K/32;
        const float c = __half2float(d) * (float) (1 + 2*((s >> (4*(j%2))) & 15));
        const int  h4 = h >> (k%32/4); // ninth bit of four grid indices
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const uint32_t x = iq3s_grid[((q >> (8*g)) & 0xFF) | (((h4 >> g) & 1) << 8)];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float y = luce_u8(x, i) * c;
                v[4*g + i] = (sign >> (4*g + i)) & 1 ? -y : y;
            }
        }
    }
};

// loads weights k..k+15 of a row of K; k + 16 <= K but for a float type, which `any` says to read element by element
template <ggml_type type>
static __device__ __forceinline__ void luce_load16(luce_w16<type> & w, const char * row, int k, int K, bool any) {
    if constexpr (luce_block_size<type> == 1) {
        if (any) {
            w.load_any(row, k, K);
            return;
        }
    }
    w.load(row, k);
    GGML_UNUSED_VARS(K, any);
}
