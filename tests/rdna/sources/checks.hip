// Kernels with known results, and kernels with planted faults, for the interpreter's own tests.
#include <hip/hip_runtime.h>
#include <hip/hip_fp16.h>

extern "C" __global__ void divide(const float * a, const float * b, float * c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        c[i] = a[i] / b[i];
    }
}

extern "C" __global__ void square_root(const float * a, float * c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        c[i] = sqrtf(a[i]);
    }
}

extern "C" __global__ void integers(const int * a, const int * b, long long * c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        const long long wide = (long long) a[i] * b[i];
        c[5 * i + 0] = b[i] != 0 ? (unsigned) a[i] / (unsigned) b[i] : 0;
        c[5 * i + 1] = wide + ((long long) a[i] << 20);
        c[5 * i + 2] = __popc(a[i]) * 1000 + __clz(b[i]) * 100 + __ffs(a[i]);
        c[5 * i + 3] = b[i] != 0 ? a[i] % (short) (b[i] | 1) : 0;
        c[5 * i + 4] = wide >> (b[i] & 31);
    }
}

extern "C" __global__ void halves(const __half * a, const __half * b, float * c, __half * d, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        const float x = __half2float(a[i]);
        c[i] = fmaf(x, __half2float(b[i]), 0.5f);
        d[i] = __hfma(a[i], b[i], a[i]);
    }
}

// a sum over the workgroup; without the barrier the waves race
template <bool BARRIER> __device__ void sum(const float * a, float * c) {
    __shared__ float s[256];
    s[threadIdx.x] = a[blockIdx.x * 256 + threadIdx.x];
    for (int k = 128; k > 0; k /= 2) {
        if (BARRIER) {
            __syncthreads();
        }
        if ((int) threadIdx.x < k) {
            s[threadIdx.x] += s[threadIdx.x + k];
        }
    }
    if (threadIdx.x == 0) {
        c[blockIdx.x] = s[0];
    }
}

extern "C" __global__ void sum_right(const float * a, float * c) { sum<true>(a, c); }
extern "C" __global__ void sum_racing(const float * a, float * c) { sum<false>(a, c); }

// every thread writes, and the neighbour reads, through global memory
extern "C" __global__ void neighbours(int * a, int barrier) {
    a[threadIdx.x] = threadIdx.x;
    if (barrier) {
        __syncthreads();
    }
    const int x = a[threadIdx.x ^ 32];
    __syncthreads();
    a[threadIdx.x] = x;
}

extern "C" __global__ void reads_past_the_end(const float * a, float * c, int n) {
    const int i = threadIdx.x;
    c[i] = a[i] + a[i < n ? i + 1 : i];
}

extern "C" __global__ void histogram(const int * a, int * counts, float * total, int n) {
    __shared__ int bins[16];
    if (threadIdx.x < 16) {
        bins[threadIdx.x] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        atomicAdd(&bins[a[i] & 15], 1);
    }
    __syncthreads();
    if (threadIdx.x < 16) {
        atomicAdd(&counts[threadIdx.x], bins[threadIdx.x]);
        atomicAdd(total, (float) bins[threadIdx.x]);
    }
}

// lanes and waves that leave a loop at different times
extern "C" __global__ void collatz(int * steps, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) {
        return;
    }
    unsigned x = i + 1;
    int count = 0;
    while (x != 1) {
        x = x % 2 ? 3 * x + 1 : x / 2;
        count++;
    }
    steps[i] = count;
}

// an array that is indexed at run time: scratch memory
extern "C" __global__ void scratch(const int * order, int * c) {
    int local[24];
    for (int k = 0; k < 24; k++) {
        local[order[k]] = k * 100 + threadIdx.x;
    }
    for (int k = 0; k < 24; k++) {
        c[threadIdx.x * 24 + k] = local[(k + threadIdx.x) % 24];
    }
}

// lanes: shuffles, ballots, reductions
extern "C" __global__ void lanes(const int * a, int * c) {
    const int t = threadIdx.x;
    const int x = a[t];
    c[0 * 64 + t] = __shfl_xor(x, 5);
    c[1 * 64 + t] = __shfl_up(x, 3);
    c[2 * 64 + t] = __shfl(x, (t * 7) & 31);
    c[3 * 64 + t] = __popcll(__ballot(x & 1));
    c[4 * 64 + t] = __builtin_amdgcn_readfirstlane(x);
    c[5 * 64 + t] = __builtin_amdgcn_update_dpp(0, x, 0x111, 0xf, 0xf, true);   // row_shr:1
    c[6 * 64 + t] = __builtin_amdgcn_update_dpp(-1, x, 0x142 - 1, 0xf, 0xf, false); // row_half_mirror
    c[7 * 64 + t] = __builtin_amdgcn_ds_swizzle(x, 0x041f);                     // lane ^ 1
}

typedef float f8 __attribute__((ext_vector_type(8)));
typedef _Float16 h16 __attribute__((ext_vector_type(16)));
typedef _Float16 h8 __attribute__((ext_vector_type(8)));

// 16x16x16: c[row][column] = sum over k of a[row][k] * b[k][column], one wave. WRONG: C's rows as the other target has them
template <bool WRONG> __device__ void multiply(const _Float16 * a, const _Float16 * b, float * c) {
    const int l = threadIdx.x, r = l % 16, h = l / 16;
    f8 d = {};
#if defined(__GFX12__)
    h8 x, y;
    for (int k = 0; k < 8; k++) {
        x[k] = a[r * 16 + 8 * h + k];
        y[k] = b[(8 * h + k) * 16 + r];
    }
    d = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(x, y, d);
#else
    h16 x, y;
    for (int k = 0; k < 16; k++) {
        x[k] = a[r * 16 + k];
        y[k] = b[k * 16 + r];
    }
    d = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x, y, d);
#endif
    for (int i = 0; i < 8; i++) {
#if defined(__GFX12__)
        const int row = WRONG ? 2 * i + h : 8 * h + i;
#else
        const int row = WRONG ? 8 * h + i : 2 * i + h;
#endif
        c[row * 16 + r] = d[i];
    }
}

extern "C" __global__ void multiply_right(const _Float16 * a, const _Float16 * b, float * c) { multiply<false>(a, b, c); }
extern "C" __global__ void multiply_wrong(const _Float16 * a, const _Float16 * b, float * c) { multiply<true>(a, b, c); }

#if !defined(__GFX12__)
// RDNA3 wants both halves of the wave to hold the whole fragment; here each holds its part only
extern "C" __global__ void half_fragment(const _Float16 * a, float * c) {
    const int l = threadIdx.x;
    h16 x = {};
    for (int k = 0; k < 8; k++) {
        x[8 * (l / 16) + k] = a[(l % 16) * 16 + 8 * (l / 16) + k];
    }
    f8 d = {};
    d = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x, x, d);
    c[l] = d[0];
}
#endif
