// pyluce: which kernels a thread's ops really took, for the self-test.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// Forget what was noted on this thread, and note from now on.
GGML_API void ggml_luce_paths_start(void);

// Note nothing any more. Returns the distinct notes in the order of the first of each, separated by ", "; valid until the next start on
// this thread.
GGML_API const char * ggml_luce_paths_stop(void);

// A kernel is about to run, or to be launched, by this thread. Without a start this only looks at a flag.
GGML_API void ggml_luce_path(const char * what);

#ifdef __cplusplus
}
#endif
