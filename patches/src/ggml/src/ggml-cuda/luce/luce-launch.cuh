// pyluce: kernels that overlap with the next one.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-common.cuh"

// A kernel beside which the next one's weights shall find room: as much shared memory as a multiprocessor can have, for two
// kernels run on it at once only where they agree about that.
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#define LUCE_SET_SHARED_CARVEOUT(...)                                                                                       \
    do {                                                                                                                    \
        static bool luce_carveout_set[GGML_CUDA_MAX_DEVICES] = {};                                                          \
        const int   luce_carveout_device                     = ggml_cuda_get_device();                                      \
        if (!luce_carveout_set[luce_carveout_device]) {                                                                     \
            CUDA_CHECK(cudaFuncSetAttribute((const void *) __VA_ARGS__, cudaFuncAttributePreferredSharedMemoryCarveout,     \
                                            cudaSharedmemCarveoutMaxShared));                                               \
            luce_carveout_set[luce_carveout_device] = true;                                                                 \
        }                                                                                                                   \
    } while (0)
#else
#define LUCE_SET_SHARED_CARVEOUT(...) do {} while (0)
#endif
