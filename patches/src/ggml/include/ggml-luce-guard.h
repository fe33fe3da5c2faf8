// pyluce: files that are mapped and become shorter, or cannot be read, while they are in use.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// While a mapping is guarded, an access that the system cannot serve from the file does not end the process: from that page on the mapping
// becomes zeros, and is counted. Whoever computes with it must look at the count before a result is used. For accesses elsewhere the
// handler of SIGBUS that was there before is called. False: no handler, or too many mappings; nothing is guarded then.
GGML_API bool ggml_luce_guard_add(const void * base, size_t size);

// Before the mapping goes. What was turned into zeros stays so.
GGML_API void ggml_luce_guard_remove(const void * base);

// How often that happened in a guarded mapping, in all mappings of the process since its start with NULL.
GGML_API int ggml_luce_guard_faults(const void * base);

#ifdef __cplusplus
}
#endif
