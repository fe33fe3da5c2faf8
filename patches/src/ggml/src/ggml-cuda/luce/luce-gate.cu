// pyluce: a gate in a backend's stream: what is launched behind it waits until the host opens it.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A step of a row graph is launched while the one before computes; its inputs are copied behind the gate, so they may be
// written until it opens. Until then they describe a step that changes nothing. A gate that nobody opens opens by itself
// after a while: no wait on the stream, whoever waits, lasts longer than that.
#include "luce-common.cuh"
#include "luce-reset.cuh"

#include "ggml-backend-impl.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && !defined(_WIN32)
#define LUCE_HAS_GATES
#include <dlfcn.h>
#endif

#ifdef LUCE_HAS_GATES

typedef CUresult (*luce_wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

struct ggml_luce_gate {
    enum state_t { OPEN, SHUT, CLAIMED };

    ggml_backend_cuda_context * ctx;
    luce_wait_value             wait_value;
    uint32_t *                  flag; // page-locked; the stream waits until it reaches the gate's number
    CUdeviceptr                 flag_device;
    std::chrono::milliseconds   patience;

    std::mutex              mutex;
    std::condition_variable changed;
    state_t                 state  = OPEN;
    uint32_t                number = 0;
    bool                    ends   = false;
    std::chrono::steady_clock::time_point opens_at;
    std::thread             opener;

    // with the mutex
    void open() {
        __atomic_store_n(flag, number, __ATOMIC_RELEASE);
        state = OPEN;
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!ends) {
            if (state != SHUT) {
                changed.wait(lock);
            } else if (std::chrono::steady_clock::now() >= opens_at) {
                open();
            } else {
                changed.wait_until(lock, opens_at);
            }
        }
    }
};

static luce_wait_value find_wait_value() {
    void * driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void * found  = driver != nullptr ? dlsym(driver, "cuStreamWaitValue32_v2") : nullptr;
    return (luce_wait_value) found;
}

#else

struct ggml_luce_gate;

#endif // LUCE_HAS_GATES

// Called by Python, which finds them by name. A gate belongs to one thread, that of its backend, and is freed before the backend.
extern "C" {

// NULL where the device or its driver has no such thing; milliseconds: after so many a gate that is shut opens by itself
GGML_BACKEND_API ggml_luce_gate * ggml_luce_gate_new(ggml_backend_t backend, int milliseconds);
GGML_BACKEND_API void ggml_luce_gate_free(ggml_luce_gate * gate);
// What is launched from now on waits. False, with nothing changed: the driver refuses, or it is shut already.
GGML_BACKEND_API bool ggml_luce_gate_shut(ggml_luce_gate * gate);
// The gate stays shut until ggml_luce_gate_open, however long that takes. False: it has opened by itself.
GGML_BACKEND_API bool ggml_luce_gate_claim(ggml_luce_gate * gate);
// nothing happens when it is open
GGML_BACKEND_API void ggml_luce_gate_open(ggml_luce_gate * gate);

}

#ifdef LUCE_HAS_GATES

ggml_luce_gate * ggml_luce_gate_new(ggml_backend_t backend, int milliseconds) {
    if (!ggml_backend_is_cuda(backend) || milliseconds <= 0) {
        return nullptr;
    }
    const luce_wait_value wait_value = find_wait_value();
    if (wait_value == nullptr) {
        return nullptr;
    }
    ggml_backend_cuda_context * ctx = (ggml_backend_cuda_context *) backend->context;
    ggml_cuda_set_device(ctx->device);
    void * flag   = nullptr;
    void * mapped = nullptr;
    if (ggml_luce_cuda_malloc_host(&flag, 64) != cudaSuccess) {
        (void) cudaGetLastError();
        return nullptr;
    }
    *(uint32_t *) flag = 0;
    // does the device take it? This wait is over at once.
    if (cudaHostGetDevicePointer(&mapped, flag, 0) != cudaSuccess ||
        wait_value(ctx->stream(), (CUdeviceptr) mapped, 0, CU_STREAM_WAIT_VALUE_GEQ) != CUDA_SUCCESS ||
        cudaStreamSynchronize(ctx->stream()) != cudaSuccess) {
        (void) cudaGetLastError();
        (void) ggml_luce_cuda_free_host(flag);
        return nullptr;
    }
    ggml_luce_gate * gate = new ggml_luce_gate;
    gate->ctx         = ctx;
    gate->wait_value  = wait_value;
    gate->flag        = (uint32_t *) flag;
    gate->flag_device = (CUdeviceptr) mapped;
    gate->patience    = std::chrono::milliseconds(milliseconds);
    gate->opener      = std::thread([gate] { gate->run(); });
    return gate;
}

void ggml_luce_gate_free(ggml_luce_gate * gate) {
    {
        std::lock_guard<std::mutex> lock(gate->mutex);
        gate->open();
        gate->ends = true;
    }
    gate->changed.notify_one();
    gate->opener.join();
    ggml_cuda_set_device(gate->ctx->device);
    CUDA_CHECK(cudaStreamSynchronize(gate->ctx->stream())); // the wait has read the flag
    CUDA_CHECK(ggml_luce_cuda_free_host(gate->flag));
    delete gate;
}

bool ggml_luce_gate_shut(ggml_luce_gate * gate) {
    std::lock_guard<std::mutex> lock(gate->mutex);
    if (gate->state != ggml_luce_gate::OPEN) {
        return false;
    }
    ggml_cuda_set_device(gate->ctx->device);
    const uint32_t next = gate->number + 1;
    if (gate->wait_value(gate->ctx->stream(), gate->flag_device, next, CU_STREAM_WAIT_VALUE_GEQ) != CUDA_SUCCESS) {
        return false;
    }
    gate->number   = next;
    gate->state    = ggml_luce_gate::SHUT;
    gate->opens_at = std::chrono::steady_clock::now() + gate->patience;
    gate->changed.notify_one();
    return true;
}

bool ggml_luce_gate_claim(ggml_luce_gate * gate) {
    std::lock_guard<std::mutex> lock(gate->mutex);
    if (gate->state == ggml_luce_gate::OPEN) {
        return false;
    }
    gate->state = ggml_luce_gate::CLAIMED;
    return true;
}

void ggml_luce_gate_open(ggml_luce_gate * gate) {
    std::lock_guard<std::mutex> lock(gate->mutex);
    if (gate->state != ggml_luce_gate::OPEN) {
        gate->open();
    }
}

#else

ggml_luce_gate * ggml_luce_gate_new(ggml_backend_t backend, int milliseconds) {
    GGML_UNUSED(backend);
    GGML_UNUSED(milliseconds);
    return nullptr;
}

void ggml_luce_gate_free(ggml_luce_gate * gate) {
    GGML_UNUSED(gate);
}

bool ggml_luce_gate_shut(ggml_luce_gate * gate) {
    GGML_UNUSED(gate);
    return false;
}

bool ggml_luce_gate_claim(ggml_luce_gate * gate) {
    GGML_UNUSED(gate);
    return false;
}

void ggml_luce_gate_open(ggml_luce_gate * gate) {
    GGML_UNUSED(gate);
}

#endif // LUCE_HAS_GATES
