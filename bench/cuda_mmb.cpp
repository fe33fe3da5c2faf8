// pyluce: checks and times the matrix products of chunk graphs on a CUDA or HIP device.
//
//   g++ -O2 -std=c++17 bench/cuda_mmb.cpp -Ipatches/src/ggml/include -Ivendor/src/ggml/include
//       -Lbuild/cuda/bin -lggml-cuda -lggml-base -Wl,-rpath,$PWD/build/cuda/bin -o cuda_mmb && ./cuda_mmb
//   ./cuda_mmb check | time      one of the two
//
// Checks, for every type: sampled results against a double sum of the operands as the kernels round them; the bytes of the
// first 16 columns, which must be the same for every number of columns. Exit status 1 where either fails.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cuda.h"
#include "ggml-luce.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

int n_failed = 0;

std::vector<float> normal(size_t n, float scale, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution(0.0f, scale);
    std::vector<float> v(n);
    for (float & x : v) {
        x = distribution(random);
    }
    return v;
}

// rows of weights: a few distinct ones, repeated (quantising is slow)
struct matrix {
    ggml_type type;
    int64_t K, M, E;
    std::vector<uint8_t> bytes;
    std::vector<float> values; // [K, n_distinct]
    int64_t n_distinct;

    matrix(ggml_type type, int64_t K, int64_t M, int64_t E) : type(type), K(K), M(M), E(E) {
        n_distinct = std::min<int64_t>(M*E, 37);
        const std::vector<float> source = normal((size_t) (K*n_distinct), 0.05f, 1);
        const size_t row = ggml_row_size(type, K);
        std::vector<uint8_t> some(row*n_distinct);
        if (type == GGML_TYPE_F32) {
            memcpy(some.data(), source.data(), some.size());
        } else {
            ggml_quantize_chunk(type, source.data(), some.data(), 0, n_distinct, K, nullptr);
        }
        values.resize((size_t) (K*n_distinct));
        if (type == GGML_TYPE_F32) {
            values = source;
        } else {
            ggml_get_type_traits(type)->to_float(some.data(), values.data(), K*n_distinct);
        }
        bytes.resize(row*(size_t) (M*E));
        for (int64_t r = 0; r < M*E; r++) {
            memcpy(bytes.data() + r*row, some.data() + (r % n_distinct)*row, row);
        }
    }

    const float * row(int64_t e, int64_t m) const {
        return values.data() + (e*M + m) % n_distinct * K;
    }
};

float rounded(float x, ggml_type type, int64_t M) {
    if (type == GGML_TYPE_F32 || M <= 8) {
        return x;
    }
#ifdef LUCE_MMB_F16
    const bool half = type != GGML_TYPE_BF16;
#else
    const bool half = type == GGML_TYPE_F16;
#endif
    return half ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(x)) : ggml_bf16_to_fp32(ggml_fp32_to_bf16(x));
}

// one product, run n_run times after one; n_used 0: plain
std::vector<float> run(ggml_backend_t backend, const matrix & w, const std::vector<float> & x, int64_t T, int64_t n_used, bool x_per_pick,
                       const std::vector<int32_t> & ids, int n_run, double * seconds, bool fetch) {
    ggml_context * ctx = ggml_init({ 64*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_tensor * a = n_used ? ggml_new_tensor_3d(ctx, w.type, w.K, w.M, w.E) : ggml_new_tensor_2d(ctx, w.type, w.K, w.M);
    ggml_tensor * b = n_used ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, w.K, x_per_pick ? n_used : 1, T) : ggml_new_tensor_2d(ctx, GGML_TYPE_F32, w.K, T);
    ggml_tensor * i = n_used ? ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, T) : nullptr;
    ggml_tensor * y = n_used ? ggml_mul_mat_id(ctx, a, b, i) : ggml_mul_mat(ctx, a, b);
    ggml_luce_set_phase(y, GGML_LUCE_PHASE_CHUNK);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, y);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    std::vector<float> result;
    if (buffer == nullptr || !ggml_backend_supports_op(backend, y)) {
        fprintf(stderr, "%s: not supported or no memory\n", ggml_type_name(w.type));
        n_failed++;
        result.assign(fetch ? (size_t) ggml_nelements(y) : 0, NAN);
        *seconds = NAN;
    } else {
        ggml_backend_tensor_set(a, w.bytes.data(), 0, ggml_nbytes(a));
        ggml_backend_tensor_set(b, x.data(), 0, ggml_nbytes(b));
        if (i != nullptr) {
            ggml_backend_tensor_set(i, ids.data(), 0, ggml_nbytes(i));
        }
        for (int r = 0; r < 3; r++) {
            ggml_backend_graph_compute(backend, graph);
        }
        ggml_backend_synchronize(backend);
        const auto start = std::chrono::steady_clock::now();
        for (int r = 0; r < n_run; r++) {
            ggml_backend_graph_compute_async(backend, graph);
        }
        ggml_backend_synchronize(backend);
        *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()/std::max(n_run, 1);
        if (fetch) {
            result.resize((size_t) ggml_nelements(y));
            ggml_backend_tensor_get(y, result.data(), 0, ggml_nbytes(y));
        }
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

std::vector<int32_t> picks(int64_t n_used, int64_t T, int64_t E) {
    std::mt19937 random(7);
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < T; t++) {
        std::vector<int32_t> own;
        while ((int64_t) own.size() < n_used) {
            const int32_t e = (int32_t) (random() % E);
            if (std::find(own.begin(), own.end(), e) == own.end()) {
                own.push_back(e);
            }
        }
        ids.insert(ids.end(), own.begin(), own.end());
    }
    return ids;
}

void check(ggml_backend_t backend, ggml_type type, int64_t K, int64_t M, int64_t E, int64_t n_used, bool x_per_pick, std::vector<int64_t> counts) {
    const matrix w(type, K, M, E);
    const int64_t T_max  = *std::max_element(counts.begin(), counts.end());
    const int64_t places = n_used && x_per_pick ? n_used : 1;
    const int64_t per_row = n_used ? n_used : 1;
    const std::vector<float>   x   = normal((size_t) (K*places*T_max), 1.0f, 3);
    const std::vector<int32_t> ids = n_used ? picks(n_used, T_max, E) : std::vector<int32_t>();
    std::vector<float> first;
    for (int64_t T : counts) {
        double seconds;
        const std::vector<float> y = run(backend, w, x, T, n_used, x_per_pick, ids, 0, &seconds, true);
        double worst = 0.0;
        std::mt19937 random(5);
        for (int s = 0; s < 400; s++) {
            const int64_t p = s < 40 ? per_row*T - 1 - s % (per_row*T) : random() % (per_row*T);
            const int64_t m = s % 7 == 0 ? M - 1 - s % std::min<int64_t>(M, 20) : random() % M;
            const float * wr = w.row(n_used ? ids[p] : 0, m);
            const float * xr = x.data() + (n_used ? (x_per_pick ? p : p/n_used) : p)*K;
            double sum = 0.0, norm = 0.0;
            for (int64_t k = 0; k < K; k++) {
                const double v = (double) rounded(wr[k], type, M)*rounded(xr[k], type, M);
                sum  += v;
                norm += v*v;
            }
            const double error = std::fabs(y[p*M + m] - sum)/std::sqrt(norm);
            worst = error <= worst ? worst : error; // NaN stays
        }
        const size_t n_first = (size_t) (std::min<int64_t>(T, 16)*per_row*M);
        bool same = true;
        if (first.empty()) {
            first.assign(y.begin(), y.begin() + n_first);
        } else {
            same = memcmp(first.data(), y.data(), std::min(first.size(), n_first)*sizeof(float)) == 0;
        }
        const bool right = worst < (type == GGML_TYPE_F32 || (M <= 8 && n_used == 0) ? 1e-5 : 1e-4);
        if (!right || !same) {
            n_failed++;
        }
        printf("%-7s K %5lld M %6lld E %3lld used %2lld T %5lld: error %.1e%s%s\n", ggml_type_name(type), (long long) K, (long long) M, (long long) E,
               (long long) n_used, (long long) T, worst, right ? "" : "  WRONG", same ? "" : "  DEPENDS ON T");
        fflush(stdout);
    }
}

void time_one(ggml_backend_t backend, ggml_type type, int64_t K, int64_t M, int64_t E, int64_t n_used, bool x_per_pick, int64_t T) {
    const matrix w(type, K, M, E);
    const std::vector<float>   x   = normal((size_t) (K*(n_used && x_per_pick ? n_used : 1)*T), 1.0f, 3);
    const std::vector<int32_t> ids = n_used ? picks(n_used, T, E) : std::vector<int32_t>();
    double seconds;
    run(backend, w, x, T, n_used, x_per_pick, ids, 20, &seconds, false);
    const double flop = 2.0*K*M*T*(n_used ? n_used : 1);
    printf("%-7s K %5lld M %6lld E %3lld used %2lld T %5lld: %9.1f us %7.1f TFLOP/s %7.1f GB/s of weights\n", ggml_type_name(type), (long long) K, (long long) M,
           (long long) E, (long long) n_used, (long long) T, seconds*1e6, flop/seconds*1e-12, w.bytes.size()/seconds*1e-9);
    fflush(stdout);
}

} // namespace

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (!what.empty() && what != "check" && what != "time") {
        fprintf(stderr, "usage: %s [check | time]\n", argv[0]);
        return 2;
    }
    ggml_backend_t backend = ggml_backend_cuda_init(0);
    if (backend == nullptr) {
        fprintf(stderr, "no device\n");
        return 2;
    }
    const std::vector<ggml_type> types = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0,
        GGML_TYPE_Q5_1, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ3_S, GGML_TYPE_Q2_0 };
    if (what != "time") {
        for (ggml_type type : types) {
            const int64_t block = ggml_blck_size(type);
            check(backend, type, 2560, 640, 1, 0, false, { 16, 48, 256, 272, 1040, 4096 });
            check(backend, type, 768, 48, 1, 0, false, { 16, 272, 1040 });
            check(backend, type, 768, 4, 1, 0, false, { 16, 272, 1040 });
            check(backend, type, 768, 1, 1, 0, false, { 16, 272 });
            check(backend, type, 768, 130, 1, 0, false, { 16, 112, 272 });
            check(backend, type, 768, 4160, 1, 0, false, { 16, 48, 256, 272 });
            if (block <= 32) {
                check(backend, type, 96, 70, 1, 0, false, { 16, 272 });
            }
            if (block == 1) {
                check(backend, type, 83, 70, 1, 0, false, { 16, 272 });
                check(backend, type, 83, 3, 1, 0, false, { 16, 272 });
            }
            check(backend, type, 768, 640, 64, 10, false, { 16, 48, 512, 1040 });
            check(backend, type, 768, 130, 8, 4, true, { 16, 48, 1040 });
        }
        printf("%s\n", n_failed ? "FAILED" : "all right");
    }
    if (what != "check") {
        for (int64_t T : { 16, 512, 4096 }) {
            for (ggml_type type : { GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL }) {
                time_one(backend, type, 2560, 10240, 1, 0, false, T);
                time_one(backend, type, 6144, 2560, 1, 0, false, T);
            }
            time_one(backend, GGML_TYPE_BF16, 2560, 10240, 1, 0, false, T);
            time_one(backend, GGML_TYPE_Q8_0, 10240, 320, 1, 0, false, T);
            time_one(backend, GGML_TYPE_Q8_0, 320, 10240, 1, 0, false, T);
            time_one(backend, GGML_TYPE_Q8_0, 10240, 4, 1, 0, false, T);
            time_one(backend, GGML_TYPE_F32, 10240, 4, 1, 0, false, T);
            time_one(backend, GGML_TYPE_Q8_0, 2560, 48, 1, 0, false, T);
            time_one(backend, GGML_TYPE_F32, 2560, 512, 1, 0, false, T);
            for (ggml_type type : { GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ3_S }) {
                time_one(backend, type, 2560, 640, 512, 10, false, T);
                if (ggml_blck_size(type) <= 32) { // 640 is no multiple of 256
                    time_one(backend, type, 640, 2560, 512, 10, true, T);
                }
            }
        }
        time_one(backend, GGML_TYPE_Q6_K, 2560, 248320, 1, 0, false, 16);
        time_one(backend, GGML_TYPE_Q8_0, 2560, 248320, 1, 0, false, 16);
    }
    ggml_backend_free(backend);
    return n_failed ? 1 : 0;
}
