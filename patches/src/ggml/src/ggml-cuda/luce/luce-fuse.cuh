// pyluce: what the recognition of neighbouring nodes shares.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#pragma once

#include "luce-common.cuh"

#include "ggml-impl.h"

static inline bool luce_is_noop(const ggml_tensor * t) {
    return ggml_is_empty(t) || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_TRANSPOSE || t->op == GGML_OP_VIEW ||
           t->op == GGML_OP_PERMUTE || t->op == GGML_OP_NONE;
}

static inline bool luce_is_kind(const ggml_tensor * t, ggml_luce_kind kind) {
    return t->op == GGML_OP_LUCE && ggml_get_op_params_i32(t, 0) == kind;
}

// memory that a launch reads or writes
struct luce_extent {
    const char * begin;
    const char * end;
    explicit luce_extent(const ggml_tensor * t) : begin((const char *) t->data), end(begin + ggml_nbytes(t)) {}
    bool meets(const luce_extent & other) const { return begin < other.end && other.begin < end; }
};

// whether what is written meets neither what is read nor anything else that is written
static inline bool luce_apart(const std::vector<luce_extent> & written, const std::vector<luce_extent> & read) {
    for (size_t i = 0; i < written.size(); i++) {
        for (const luce_extent & r : read) {
            if (written[i].meets(r)) {
                return false;
            }
        }
        for (size_t j = i + 1; j < written.size(); j++) {
            if (written[i].meets(written[j])) {
                return false;
            }
        }
    }
    return true;
}
