// pyluce: a device's table of choices, measured by `luce tune`.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A choice is looked up when a launch is captured or made, by what the product is: never by what else runs.
#include "luce-tune.cuh"

#include "luce-common.cuh"

#include <map>
#include <mutex>
#include <tuple>

namespace {

typedef std::tuple<int, int, int64_t, int64_t, int64_t, int64_t> key; // kind, type, k, m, n_used, rows

struct choices {
    std::mutex         mutex;
    std::map<key, int> of[GGML_CUDA_MAX_DEVICES];
};

choices & table() {
    static choices * made = new choices;
    return *made;
}

bool known(int device, int kind, int type, int64_t k, int64_t m, int64_t n_used, int64_t rows) {
    return device >= 0 && device < ggml_cuda_info().device_count && kind >= 0 && kind < LUCE_TUNE_KIND_COUNT && type >= 0 &&
        type < GGML_TYPE_COUNT && ggml_blck_size((ggml_type) type) > 0 && k > 0 && k <= INT32_MAX && m > 0 && m <= INT32_MAX && n_used >= 0 &&
        n_used <= INT32_MAX && (kind == LUCE_TUNE_ROW ? rows == 0 : rows == luce_tune_rows(rows));
}

} // namespace

int64_t luce_tune_rows(int64_t rows) {
    int64_t n = 16;
    while (n < rows) {
        n *= 2;
    }
    return n;
}

int luce_tune_of(int device, luce_tune_kind kind, ggml_type type, int64_t k, int64_t m, int64_t n_used, int64_t rows, int otherwise) {
    choices & t = table();
    std::lock_guard<std::mutex> lock(t.mutex);
    const std::map<key, int> & of = t.of[device];
    if (of.empty()) {
        return otherwise;
    }
    const auto found = of.find(key(kind, type, k, m, n_used, kind == LUCE_TUNE_ROW ? 0 : luce_tune_rows(rows)));
    return found != of.end() ? found->second : otherwise;
}

int ggml_luce_tune_candidates(int device, int kind, int type, int64_t k, int64_t m, int64_t n_used, int64_t rows, int * values, int n_max) {
    if (!known(device, kind, type, k, m, n_used, rows)) {
        return -1;
    }
    return kind == LUCE_TUNE_ROW ? luce_mmv_candidates(device, (ggml_type) type, k, m, n_used, values, n_max) :
                                   luce_mmb_candidates(device, (ggml_type) type, k, m, n_used, rows, values, n_max);
}

bool ggml_luce_tune_set(int device, int kind, int type, int64_t k, int64_t m, int64_t n_used, int64_t rows, int value) {
    int values[64];
    const int n = std::min(64, ggml_luce_tune_candidates(device, kind, type, k, m, n_used, rows, values, 64));
    for (int i = 0; i < n; i++) {
        if (values[i] == value) {
            choices & t = table();
            std::lock_guard<std::mutex> lock(t.mutex);
            t.of[device][key(kind, type, k, m, n_used, rows)] = value;
            return true;
        }
    }
    return false;
}

void ggml_luce_tune_clear(int device) {
    if (device >= 0 && device < GGML_CUDA_MAX_DEVICES) {
        choices & t = table();
        std::lock_guard<std::mutex> lock(t.mutex);
        t.of[device].clear();
    }
}

int ggml_luce_tune_driver(void) {
    int version = 0;
#ifdef GGML_USE_HIP
    const bool found = hipDriverGetVersion(&version) == hipSuccess;
#else
    const bool found = cudaDriverGetVersion(&version) == cudaSuccess;
#endif
    return found ? version : 0;
}
