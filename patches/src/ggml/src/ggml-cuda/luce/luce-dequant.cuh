// pyluce: eight consecutive weights of a row, of every type that the chunk products take.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// luce_w8<type> holds the bytes of weights k..k+7 of a row (k a multiple of 8) as they lie in memory, so that a kernel may
// load early (`load`) and widen late (`get`, with the same k). Rows are aligned to 2 bytes at least; for F32, F16 and BF16
// `load` wants 16 bytes, `load_any` takes what it finds. Products and sums are written out (fmaf), so that every kernel
// that widens a weight gets the same float.
#pragma once

#include "../common.cuh"
#include "../convert.cuh"
#include "../vecdotq.cuh"

#include <cstring>

template <ggml_type type> struct luce_w8;

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

template <> struct luce_w8<GGML_TYPE_F32> {
    float4 a, b;
    __device__ __forceinline__ void load(const char * row, int k) {
        a = *(const float4 *) (row + 4*(int64_t) k);
        b = *(const float4 *) (row + 4*(int64_t) k + 16);
    }
    __device__ __forceinline__ void load_any(const char * row, int k, int K) {
        const float * p = (const float *) row + k;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = k + i < K ? p[i] : 0.0f;
        }
        a = make_float4(v[0], v[1], v[2], v[3]);
        b = make_float4(v[4], v[5], v[6], v[7]);
    }
    __device__ __forceinline__ void get(float * v, int) const {
        v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
        v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
    }
};

// the two 16-bit float types
struct luce_w8_16 {
    uint4 q;
    __device__ __forceinline__ void load(const char * row, int k) {
        q = *(const uint4 *) (row + 2*(int64_t) k);
    }
    __device__ __forceinline__ void load_any(const char * row, int k, int K) {
        const uint16_t * p = (const uint16_t *) row + k;
        uint32_t h[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            h[i] = k + i < K ? p[i] : 0;
        }
        q = make_uint4(h[0] | (h[1] << 16), h[2] | (h[3] << 16), h[4] | (h[5] << 16), h[6] | (h[7] << 16));
    }
};

template <> struct luce_w8<GGML_TYPE_F16> : luce_w8_16 {
    __device__ __forceinline__ void get(float * v, int) const {
        const uint32_t x[4] = { q.x, q.y, q.z, q.w };
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = luce_f16(x[i/2], i%2);
        }
    }
};

template <> struct luce_w8<GGML_TYPE_BF16> : luce_w8_16 {
    __device__ __forceinline__ void get(float * v, int) const {
        const uint32_t x[4] = { q.x, q.y, q.z, q.w };
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = __uint_as_float(i%2 == 0 ? x[i/2] << 16 : x[i/2] & 0xFFFF0000);
        }
    }
};

template <> struct luce_w8<GGML_TYPE_Q8_0> {
    uint32_t q[2];
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q8_0 * b = (const block_q8_0 *) row + k/32;
        d    = b->d;
        q[0] = luce_u32_2(b->qs + k%32);
        q[1] = luce_u32_2(b->qs + k%32 + 4);
    }
    __device__ __forceinline__ void get(float * v, int) const {
        const float s = __half2float(d);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = luce_s8(q[i/4], i%4) * s;
        }
    }
};

template <> struct luce_w8<GGML_TYPE_Q4_0> {
    uint32_t q[2];
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q4_0 * b = (const block_q4_0 *) row + k/32;
        d    = b->d;
        q[0] = luce_u32_2(b->qs + k%16);
        q[1] = luce_u32_2(b->qs + k%16 + 4);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float s     = __half2float(d);
        const int   shift = (k%32)/16*4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = (luce_u8((q[i/4] >> shift) & 0x0F0F0F0F, i%4) - 8.0f) * s;
        }
    }
};

template <> struct luce_w8<GGML_TYPE_Q4_1> {
    uint32_t q[2];
    half2 dm;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q4_1 * b = (const block_q4_1 *) row + k/32;
        dm   = b->dm;
        q[0] = luce_u32_2(b->qs + k%16);
        q[1] = luce_u32_2(b->qs + k%16 + 4);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float2 s     = __half22float2(dm);
        const int    shift = (k%32)/16*4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = fmaf(luce_u8((q[i/4] >> shift) & 0x0F0F0F0F, i%4), s.x, s.y);
        }
    }
};

// bits j..j+3 of x as bit 4 of four bytes
static __device__ __forceinline__ uint32_t luce_spread5(uint32_t x, int j) {
    const uint32_t b = x >> j;
    return ((b & 1) << 4) | ((b & 2) << 11) | ((b & 4) << 18) | ((b & 8) << 25);
}

template <> struct luce_w8<GGML_TYPE_Q5_0> {
    uint32_t q[2];
    uint32_t h;
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q5_0 * b = (const block_q5_0 *) row + k/32;
        d    = b->d;
        h    = luce_u32_2(b->qh);
        q[0] = luce_u32_2(b->qs + k%16);
        q[1] = luce_u32_2(b->qs + k%16 + 4);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float s     = __half2float(d);
        const int   shift = (k%32)/16*4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = (luce_u8(((q[i/4] >> shift) & 0x0F0F0F0F) | luce_spread5(h, k%32 + i/4*4), i%4) - 16.0f) * s;
        }
    }
};

template <> struct luce_w8<GGML_TYPE_Q5_1> {
    uint32_t q[2];
    uint32_t h;
    half2 dm;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q5_1 * b = (const block_q5_1 *) row + k/32;
        dm   = b->dm;
        h    = luce_u32_2(b->qh);
        q[0] = luce_u32_2(b->qs + k%16);
        q[1] = luce_u32_2(b->qs + k%16 + 4);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float2 s     = __half22float2(dm);
        const int    shift = (k%32)/16*4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = fmaf(luce_u8(((q[i/4] >> shift) & 0x0F0F0F0F) | luce_spread5(h, k%32 + i/4*4), i%4), s.x, s.y);
        }
    }
};

template <> struct luce_w8<GGML_TYPE_IQ4_NL> {
    uint32_t q[2];
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_iq4_nl * b = (const block_iq4_nl *) row + k/32;
        d    = b->d;
        q[0] = luce_u32_2(b->qs + k%16);
        q[1] = luce_u32_2(b->qs + k%16 + 4);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const float s     = __half2float(d);
        const int   shift = (k%32)/16*4;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t t = get_int_from_table_16((q[j] >> shift) & 0x0F0F0F0F, kvalues_iq4nl).x;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[4*j + i] = luce_s8(t, i) * s;
            }
        }
    }
};

template <> struct luce_w8<GGML_TYPE_Q2_0> {
    uint16_t q;
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q2_0 * b = (const block_q2_0 *) row + k/64;
        d = b->d;
        q = *(const uint16_t *) (b->qs + (k%64)/4);
    }
    __device__ __forceinline__ void get(float * v, int) const {
        const float s = __half2float(d);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = (float) ((int) ((q >> (2*i)) & 3) - 1) * s;
        }
    }
};

// 6-bit scale and minimum number j (0..7) of the 12 bytes s[0..2]
static __device__ __forceinline__ void luce_scale_k4(const uint32_t * s, int j, int & scale, int & minimum) {
    const int      b  = 8*(j%4);
    const uint32_t lo = s[0] >> b;
    const uint32_t mi = s[1] >> b;
    const uint32_t hi = s[2] >> b;
    scale   = j < 4 ? lo & 63 : (hi & 15) | ((lo & 0xC0) >> 2);
    minimum = j < 4 ? mi & 63 : ((hi >> 4) & 15) | ((mi & 0xC0) >> 2);
}

template <> struct luce_w8<GGML_TYPE_Q4_K> {
    uint32_t q[2];
    uint32_t s[3];
    uint32_t dm;
    __device__ __forceinline__ void load(const char * row, int k) {
        const uint32_t * b = (const uint32_t *) ((const block_q4_K *) row + k/QK_K);
        const int j = (k%QK_K)/64*8 + (k%32)/4;
        dm   = b[0];
        s[0] = b[1];
        s[1] = b[2];
        s[2] = b[3];
        q[0] = b[4 + j];
        q[1] = b[5 + j];
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const int j = (k%QK_K)/32;
        int scale, minimum;
        luce_scale_k4(s, j, scale, minimum);
        const float d = luce_f16(dm, 0) * (float) scale;
        const float m = luce_f16(dm, 1) * (float) minimum;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = fmaf(luce_u8((q[i/4] >> (j%2*4)) & 0x0F0F0F0F, i%4), d, -m);
        }
    }
};

template <> struct luce_w8<GGML_TYPE_Q5_K> {
    uint32_t q[2];
    uint32_t h[2];
    uint32_t s[3];
    uint32_t dm;
    __device__ __forceinline__ void load(const char * row, int k) {
        const uint32_t * b = (const uint32_t *) ((const block_q5_K *) row + k/QK_K);
        const int j = (k%QK_K)/64*8 + (k%32)/4;
        dm   = b[0];
        s[0] = b[1];
        s[1] = b[2];
        s[2] = b[3];
        h[0] = b[4 + (k%32)/4];
        h[1] = b[5 + (k%32)/4];
        q[0] = b[12 + j];
        q[1] = b[13 + j];
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const int j = (k%QK_K)/32;
        int scale, minimum;
        luce_scale_k4(s, j, scale, minimum);
        const float d = luce_f16(dm, 0) * (float) scale;
        const float m = luce_f16(dm, 1) * (float) minimum;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t x = ((q[i/4] >> (j%2*4)) & 0x0F0F0F0F) | (((h[i/4] >> j) & 0x01010101) << 4);
            v[i] = fmaf(luce_u8(x, i%4), d, -m);
        }
    }
};

template <> struct luce_w8<GGML_TYPE_Q6_K> {
    uint32_t q[2];
    uint32_t h[2];
    int8_t s;
    half d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_q6_K * b = (const block_q6_K *) row + k/QK_K;
        const int n = (k%QK_K)/128; // half
        const int j = (k%128)/32;   // quarter of the half
        const int l = k%32;
        d    = b->d;
        s    = b->scales[(k%QK_K)/16];
        q[0] = luce_u32_2(b->ql + 64*n + 32*(j%2) + l);
        q[1] = luce_u32_2(b->ql + 64*n + 32*(j%2) + l + 4);
        h[0] = luce_u32_2(b->qh + 32*n + l);
        h[1] = luce_u32_2(b->qh + 32*n + l + 4);
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const int   j = (k%128)/32;
        const float c = __half2float(d) * (float) s;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t x = ((q[i/4] >> (j/2*4)) & 0x0F0F0F0F) | (((h[i/4] >> (2*j)) & 0x03030303) << 4);
            v[i] = (luce_u8(x, i%4) - 32.0f) * c;
        }
    }
};

template <> struct luce_w8<GGML_TYPE_IQ3_S> {
    uint16_t q;
    uint8_t  h;
    uint8_t  sign;
    uint8_t  s;
    half     d;
    __device__ __forceinline__ void load(const char * row, int k) {
        const block_iq3_s * b = (const block_iq3_s *) row + k/QK_K;
        const int j = (k%QK_K)/32;
        const int l = (k%32)/8;
        d    = b->d;
        q    = *(const uint16_t *) (b->qs + 8*j + 2*l);
        h    = b->qh[j];
        sign = b->signs[4*j + l];
        s    = b->scales[j/2];
    }
    __device__ __forceinline__ void get(float * v, int k) const {
        const int   j = (k%QK_K)/32;
        const int   l = (k%32)/8;
        const float c = __half2float(d) * (float) (1 + 2*((s >> (4*(j%2))) & 15));
        const uint32_t g[2] = {
            iq3s_grid[(q & 0xFF) | ((h << (8 - 2*l)) & 256)],
            iq3s_grid[(q >> 8)   | ((h << (7 - 2*l)) & 256)],
        };
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x = luce_u8(g[i/4], i%4) * c;
            v[i] = sign >> i & 1 ? -x : x;
        }
    }
};

// loads weights k..k+7 of a row of K; k + 8 <= K but for a float type, which `any` says to read element by element
template <ggml_type type>
static __device__ __forceinline__ void luce_load8(luce_w8<type> & w, const char * row, int k, int K, bool any) {
    if constexpr (luce_block_size<type> == 1) {
        if (any) {
            w.load_any(row, k, K);
            return;
        }
    }
    w.load(row, k);
    GGML_UNUSED_VARS(K, any);
}
