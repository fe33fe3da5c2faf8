// pyluce: who uses a device, and giving back what this process's context takes of its memory (park).
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A context with the modules of ggml-cuda takes half a GB on a data-centre GPU, and it stays when every buffer was freed. A reset
// destroys it. What of ggml-cuda outlives that:
//
//   backends (streams, events, graphs, pools, cuBLAS handles), buffers, page-locked memory, events: counted here; a reset is
//       refused while there is one
//   attributes of kernels, behind static flags that say "set already" (CUDA_SET_SHARED_MEMORY_LIMIT, fattn-mma-f16.cuh): the link
//       wraps cudaFuncSetAttribute, what was set is noted and set again before the next backend is opened
//   the scheduling flag of compute capability 12.1: set again
//   peer access (GGML_CUDA_P2P): a reset is refused
//   facts about devices and kernels (ggml_cuda_info, whether a kernel may use PDL), buffer types: hold no device state
#include "common.cuh"

#include "luce-reset.cuh"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && !defined(_WIN32)
#define LUCE_WRAPS_ATTRIBUTES
#endif

namespace {

// indices are physical devices
struct device_use {
    std::mutex mutex;
    int        users[GGML_CUDA_MAX_DEVICES] = {};
    bool       reset[GGML_CUDA_MAX_DEVICES] = {};
    std::unordered_map<const void *, int> host; // page-locked memory -> the device whose context it belongs to
};

device_use & use() {
    static device_use * made = new device_use; // never destroyed: buffers may be freed while the process ends
    return *made;
}

int physical(int device) {
    return ggml_cuda_info().devices[device].physical_device;
}

void add_user(int id, int n) {
    device_use & u = use();
    std::lock_guard<std::mutex> lock(u.mutex);
    u.users[id] += n;
    GGML_ASSERT(u.users[id] >= 0);
}

#ifdef LUCE_WRAPS_ATTRIBUTES

struct attribute_notes {
    std::mutex mutex;
    std::map<std::pair<const void *, int>, int> values[GGML_CUDA_MAX_DEVICES];
};

attribute_notes & notes() {
    static attribute_notes * made = new attribute_notes;
    return *made;
}

#endif // LUCE_WRAPS_ATTRIBUTES

} // namespace

#ifdef LUCE_WRAPS_ATTRIBUTES

// the linker puts these in place of every call of cudaFuncSetAttribute (--wrap in CMakeLists.txt)
extern "C" cudaError_t __real_cudaFuncSetAttribute(const void * func, cudaFuncAttribute attr, int value);
extern "C" cudaError_t __wrap_cudaFuncSetAttribute(const void * func, cudaFuncAttribute attr, int value);

extern "C" cudaError_t __wrap_cudaFuncSetAttribute(const void * func, cudaFuncAttribute attr, int value) {
    const cudaError_t err = __real_cudaFuncSetAttribute(func, attr, value);
    int id = 0;
    if (err == cudaSuccess && cudaGetDevice(&id) == cudaSuccess && id >= 0 && id < GGML_CUDA_MAX_DEVICES) {
        attribute_notes & n = notes();
        std::lock_guard<std::mutex> lock(n.mutex);
        n.values[id][std::make_pair(func, (int) attr)] = value;
    }
    return err;
}

#endif // LUCE_WRAPS_ATTRIBUTES

// the device's context anew, with what was set in the one before; false, with the reason in the log, when it cannot be had
static bool restore(int device) {
    const int id = physical(device);
    cudaError_t err = cudaSetDevice(id);
#ifdef LUCE_WRAPS_ATTRIBUTES
    if (err == cudaSuccess && ggml_cuda_info().devices[device].cc == 1210) {
        err = cudaSetDeviceFlags(cudaDeviceScheduleSpin);
    }
    attribute_notes & n = notes();
    std::lock_guard<std::mutex> lock(n.mutex);
    for (const auto & note : n.values[id]) {
        if (err == cudaSuccess) {
            err = __real_cudaFuncSetAttribute(note.first.first, (cudaFuncAttribute) note.first.second, note.second);
        }
    }
#endif // LUCE_WRAPS_ATTRIBUTES
    if (err != cudaSuccess) {
        (void) cudaGetLastError();
        GGML_LOG_ERROR("%s: device %d cannot be used again after its reset: %s\n", __func__, id, cudaGetErrorString(err));
    }
    return err == cudaSuccess;
}

void ggml_luce_cuda_hold(int device) {
    add_user(physical(device), 1);
}

void ggml_luce_cuda_release(int device) {
    add_user(physical(device), -1);
}

bool ggml_luce_cuda_open(int device) {
    const int    id = physical(device);
    device_use & u  = use();
    std::lock_guard<std::mutex> lock(u.mutex);
    if (u.reset[id]) {
        if (!restore(device)) {
            return false;
        }
        u.reset[id] = false;
    }
    u.users[id]++;
    return true;
}

cudaError_t ggml_luce_cuda_malloc_host(void ** ptr, size_t size) {
    const int id = ggml_cuda_get_device();
    add_user(id, 1);
    const cudaError_t err = cudaMallocHost(ptr, size);
    if (err != cudaSuccess) {
        add_user(id, -1);
        return err;
    }
    device_use & u = use();
    std::lock_guard<std::mutex> lock(u.mutex);
    u.host[*ptr] = id;
    return err;
}

cudaError_t ggml_luce_cuda_free_host(void * ptr) {
    device_use & u = use();
    int id = -1;
    {
        std::lock_guard<std::mutex> lock(u.mutex);
        const auto found = u.host.find(ptr);
        if (found != u.host.end()) {
            id = found->second;
            u.host.erase(found); // before the memory is free: its address may be given to another thread then
        }
    }
    const cudaError_t err = cudaFreeHost(ptr);
    if (id >= 0) {
        add_user(id, -1);
    }
    return err;
}

const char * ggml_luce_device_reset(int device) {
    static thread_local char reason[256];
    if (device < 0 || device >= ggml_cuda_info().device_count) {
        snprintf(reason, sizeof(reason), "expected a device from 0 to %d, found %d", ggml_cuda_info().device_count - 1, device);
        return reason;
    }
#if !defined(LUCE_WRAPS_ATTRIBUTES) && !defined(GGML_USE_HIP)
    return "expected a library that notes the attributes of kernels, found one that was linked without that";
#endif
    const int    id = physical(device);
    device_use & u  = use();
    std::lock_guard<std::mutex> lock(u.mutex);
    if (u.users[id] > 0) {
        snprintf(reason, sizeof(reason), "%d backends, buffers or events of this process still use the device", u.users[id]);
        return reason;
    }
    if (getenv("GGML_CUDA_P2P") != nullptr) {
        return "GGML_CUDA_P2P is set: the devices access each other's memory";
    }
    cudaError_t err = ggml_cuda_get_device() == id ? cudaSuccess : cudaSetDevice(id);
#if defined(GGML_USE_HIP)
    err = err == hipSuccess ? hipDeviceReset() : err;
#else
    err = err == cudaSuccess ? cudaDeviceReset() : err;
#endif // defined(GGML_USE_HIP)
    if (err != cudaSuccess) {
        (void) cudaGetLastError();
        snprintf(reason, sizeof(reason), "the driver refuses: %s", cudaGetErrorString(err));
        return reason;
    }
    u.reset[id] = true;
    return nullptr;
}
