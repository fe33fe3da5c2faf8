// pyluce: experts on two devices: which picks are where, and bringing them together again.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "luce-common.cuh"

#include <cstdlib>

namespace {

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) pick_split_kernel(
        const int32_t * __restrict__ ids, const int32_t * __restrict__ slots, int n_pick, int n_expert, int32_t * __restrict__ here) {
    const int p = blockIdx.x * THREADS + threadIdx.x;
    ggml_cuda_pdl_sync();
    if (p >= n_pick) {
        return;
    }
    const int  id    = ids[p];
    const bool known = id >= 0 && id < n_expert;
    const int  slot  = known ? slots[id] : -1;
    here[p]          = slot;
    here[n_pick + p] = known && slot < 0 ? id : -1;
}

// a thread block has a pick
__global__ void __launch_bounds__(THREADS) pick_merge_kernel(
        const float * __restrict__ here, const float * __restrict__ there, const int32_t * __restrict__ places, int n, float * __restrict__ y) {
    const int64_t p = blockIdx.x;
    ggml_cuda_pdl_sync();
    const float * x = (places[p] < 0 ? there : here) + p * n;
    y += p * n;
    const bool whole = n % 4 == 0 && luce_aligned(here) && luce_aligned(there) && luce_aligned(y);
    for (int i0 = 4 * (int) threadIdx.x; i0 < n; i0 += 4 * THREADS) {
        luce_store4(y, i0, n, whole, luce_load4(x, i0, n, whole));
    }
}

// a thread block has four values a thread of a row
__global__ void __launch_bounds__(THREADS) moe_join_kernel(
        const float * __restrict__ sum, int64_t sum_row, const float * __restrict__ shared, int64_t shared_row, const float * __restrict__ gate,
        int64_t gate_row, int n, float * __restrict__ y) {
    const int64_t row = blockIdx.x;
    const int     i0  = 4 * (int) (blockIdx.y * THREADS + threadIdx.x);
    ggml_cuda_pdl_sync();
    if (i0 >= n) {
        return;
    }
    sum    += row * sum_row;
    shared += row * shared_row;
    y      += row * n;
    const bool whole = n % 4 == 0 && luce_aligned(sum) && luce_aligned(shared) && luce_aligned(y);
    // the last step of moe_combine's chain
    luce_store4(y, i0, n, whole, luce_fma4(luce_load4(shared, i0, n, whole), luce_sigmoid(gate[row * gate_row]), luce_load4(sum, i0, n, whole)));
}

} // namespace

void luce_cuda_pick_split(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const int n_pick = (int) ggml_nelements(dst->src[0]);
    const ggml_cuda_kernel_launch_params params(dim3((n_pick + THREADS - 1) / THREADS), dim3(THREADS), (size_t) 0, ctx.stream());
    ggml_cuda_kernel_launch(pick_split_kernel, params, (const int32_t *) dst->src[0]->data, (const int32_t *) dst->src[1]->data, n_pick,
        (int) dst->src[1]->ne[0], (int32_t *) dst->data);
}

void luce_cuda_pick_merge(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_cuda_kernel_launch_params params(dim3((unsigned) (dst->ne[1] * dst->ne[2])), dim3(THREADS), (size_t) 0, ctx.stream());
    ggml_cuda_kernel_launch(pick_merge_kernel, params, (const float *) dst->src[0]->data, (const float *) dst->src[1]->data,
        (const int32_t *) dst->src[2]->data, (int) dst->ne[0], (float *) dst->data);
}

void luce_cuda_moe_join(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const int n = (int) dst->ne[0];
    const ggml_cuda_kernel_launch_params params(
        dim3((unsigned) dst->ne[1], (unsigned) ((n + 4 * THREADS - 1) / (4 * THREADS))), dim3(THREADS), (size_t) 0, ctx.stream());
    ggml_cuda_kernel_launch(moe_join_kernel, params, (const float *) dst->src[0]->data, luce_stride(dst->src[0]), (const float *) dst->src[1]->data,
        luce_stride(dst->src[1]), (const float *) dst->src[2]->data, luce_stride(dst->src[2]), n, (float *) dst->data);
}

// Peer access in both directions, or none any more. False where the pair cannot, or where they are one device. Not with GGML_CUDA_P2P, which
// is for the whole process
extern "C" {
GGML_BACKEND_API bool ggml_luce_peer_access(int a, int b, bool on);
}

bool ggml_luce_peer_access(int a, int b, bool on) {
    const auto & info = ggml_cuda_info();
    if (a < 0 || b < 0 || a >= info.device_count || b >= info.device_count) {
        return false;
    }
    const int pair[2] = { info.devices[a].physical_device, info.devices[b].physical_device };
    if (pair[0] == pair[1]) {
        return false;
    }
    if (getenv("GGML_CUDA_P2P") != nullptr) {
        return true;
    }
    int before = 0;
    CUDA_CHECK(cudaGetDevice(&before));
    bool done = true;
    for (int i = 0; i < 2 && done; i++) {
        int can = 0;
        CUDA_CHECK(cudaDeviceCanAccessPeer(&can, pair[i], pair[1 - i]));
        CUDA_CHECK(cudaSetDevice(pair[i]));
        const cudaError_t status = !can ? cudaErrorPeerAccessNotEnabled :
                                   on   ? cudaDeviceEnablePeerAccess(pair[1 - i], 0) : cudaDeviceDisablePeerAccess(pair[1 - i]);
        done = status == cudaSuccess || (on && status == cudaErrorPeerAccessAlreadyEnabled) || (!on && status == cudaErrorPeerAccessNotEnabled);
        (void) cudaGetLastError(); // an error that is an answer
    }
    CUDA_CHECK(cudaSetDevice(before));
    return done;
}
