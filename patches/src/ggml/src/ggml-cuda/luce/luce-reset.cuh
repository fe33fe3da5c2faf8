// pyluce: who uses a device, and giving back what this process's context takes of its memory.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

// needs common.cuh, which ggml-cuda.cu has and finds under another name

// A backend is opened and released, a buffer or an event held and released; page-locked memory belongs to the current device.
// Opening returns false, with the reason in the log, when the device cannot be used again after a reset.
bool        ggml_luce_cuda_open       (int device);
void        ggml_luce_cuda_hold       (int device);
void        ggml_luce_cuda_release    (int device);
cudaError_t ggml_luce_cuda_malloc_host(void ** ptr, size_t size);
cudaError_t ggml_luce_cuda_free_host  (void * ptr);

// Destroys this process's context on a device, with all that the driver holds for it there; the next backend makes a new one.
// NULL, or why it was not done: somebody uses the device. Found by its name through ggml_backend_reg_get_proc_address.
// It is for the caller to know that no other library of this process uses the device.
const char * ggml_luce_device_reset(int device);
