// pyluce: checks and times the matrix products of row graphs on a CUDA or HIP device, at the real model's sizes.
//
//   g++ -O2 -std=c++17 bench/cuda_mmv.cpp -Ipatches/src/ggml/include -Ivendor/src/ggml/include
//       -Lbuild/cuda/bin -lggml-cuda -lggml-base -Wl,-rpath,$PWD/build/cuda/bin -o cuda_mmv && ./cuda_mmv
//   ./cuda_mmv check | time [ROWS...]
//
// Checks, for every type: results against a double sum of the operands as the kernels round them; the bytes of every row, which must
// be the same for every number of rows, with and without what is fused to a product. Exit status 1 where either fails.
// Times: microseconds of a step's launches, between two small kernels whose own time is subtracted; every step reads other weights.
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
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

int n_failed = 0;
ggml_backend_t backend;

std::vector<float> normal(size_t n, float scale, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution(0.0f, scale);
    std::vector<float> v(n);
    for (float & x : v) {
        x = distribution(random);
    }
    return v;
}

bool is_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

// rows of weights: some distinct ones, repeated (quantising is slow)
struct pool {
    std::vector<uint8_t> bytes;
    std::vector<float> values;
    int64_t K, n;

    pool(ggml_type type, int64_t K, int64_t n) : K(K), n(n) {
        values = normal((size_t) (K*n), 0.05f, 1);
        bytes.resize(ggml_row_size(type, K)*n);
        if (type == GGML_TYPE_F32) {
            memcpy(bytes.data(), values.data(), bytes.size());
            return;
        }
        ggml_quantize_chunk(type, values.data(), bytes.data(), 0, n, K, nullptr);
        ggml_get_type_traits(type)->to_float(bytes.data(), values.data(), K*n);
    }

    const float * row(int64_t r) const { return values.data() + r % n*K; }
};

const pool & pool_of(ggml_type type, int64_t K) {
    static std::map<std::pair<int, int64_t>, pool> pools;
    const std::pair<int, int64_t> key(type, K);
    auto found = pools.find(key);
    return found != pools.end() ? found->second : pools.emplace(key, pool(type, K, 61)).first->second;
}

// a graph, its memory and what is to be written into it
struct builder {
    ggml_context * ctx;
    ggml_cgraph * graph;
    ggml_backend_buffer_t buffer = nullptr;
    std::vector<std::pair<ggml_tensor *, std::function<void(ggml_tensor *)>>> inputs;

    explicit builder(size_t n) {
        ctx = ggml_init({ n*ggml_tensor_overhead()*2 + ggml_graph_overhead_custom(n, false), nullptr, true });
        graph = ggml_new_graph_custom(ctx, n, false);
    }
    ~builder() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    builder(const builder &) = delete;

    ggml_tensor * weights(ggml_type type, int64_t K, int64_t M, int64_t E = 1) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, type, K, M, E);
        inputs.emplace_back(t, [type, K](ggml_tensor * t) {
            const pool & p = pool_of(type, K);
            const size_t n = ggml_nbytes(t);
            std::vector<uint8_t> some(std::min<size_t>(n, p.bytes.size()*64)); // whole repetitions
            for (size_t at = 0; at < some.size(); at += p.bytes.size()) {
                memcpy(some.data() + at, p.bytes.data(), std::min(p.bytes.size(), some.size() - at));
            }
            for (size_t at = 0; at < n; at += some.size()) {
                ggml_backend_tensor_set(t, some.data(), at, std::min(some.size(), n - at));
            }
        });
        return t;
    }
    ggml_tensor * floats(int64_t K, int64_t T, const std::vector<float> & v) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, K, T);
        inputs.emplace_back(t, [v](ggml_tensor * t) { ggml_backend_tensor_set(t, v.data(), 0, ggml_nbytes(t)); });
        return t;
    }
    ggml_tensor * integers(int64_t K, int64_t T, const std::vector<int32_t> & v) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, K, T);
        inputs.emplace_back(t, [v](ggml_tensor * t) { ggml_backend_tensor_set(t, v.data(), 0, ggml_nbytes(t)); });
        return t;
    }
    ggml_tensor * product(ggml_tensor * w, ggml_tensor * x, ggml_tensor * ids = nullptr) {
        ggml_tensor * y = ids ? ggml_mul_mat_id(ctx, w, x, ids) : ggml_mul_mat(ctx, w, x);
        ggml_luce_set_phase(y, GGML_LUCE_PHASE_ROW);
        ggml_build_forward_expand(graph, y);
        return y;
    }
    ggml_tensor * expand(ggml_tensor * t) {
        ggml_build_forward_expand(graph, t);
        return t;
    }
    bool ready() {
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        if (buffer == nullptr) {
            fprintf(stderr, "no memory\n");
            n_failed++;
            return false;
        }
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            if (!ggml_backend_supports_op(backend, ggml_graph_node(graph, i))) {
                fprintf(stderr, "not supported: %s\n", ggml_op_desc(ggml_graph_node(graph, i)));
                n_failed++;
                return false;
            }
        }
        for (auto & input : inputs) {
            input.second(input.first);
        }
        ggml_luce_graph_retain(graph);
        return true;
    }
    std::vector<float> fetch(ggml_tensor * t) {
        std::vector<float> v((size_t) ggml_nelements(t));
        ggml_backend_tensor_get(t, v.data(), 0, ggml_nbytes(t));
        return v;
    }
};

std::vector<float> rounded(std::vector<float> x) {
    for (size_t at = 0; at < x.size(); at += 32) {
        float top = 0.0f;
        for (int i = 0; i < 32; i++) {
            top = std::max(top, std::fabs(x[at + i]));
        }
        for (int i = 0; i < 32; i++) {
            x[at + i] = top > 0.0f ? top/127.0f*std::nearbyint(x[at + i]*(127.0f/top)) : 0.0f;
        }
    }
    return x;
}

// What the general kernel's results may differ by: block_q8_1 has half-precision scales and sums, and its sums are of the values
// before they are rounded, which types with an offset meet. `ring`: bounds of 32-bit arithmetic.
bool by_ring(ggml_type type, int64_t K) {
    switch (type) {
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_IQ4_NL: return K % 64 == 0;
        case GGML_TYPE_Q6_K:   return K % 512 == 0;
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:   return true;
        default:               return is_float(type);
    }
}

double bound_of(ggml_type type, int64_t K) {
    return by_ring(type, K) ? 1e-4 : type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q5_0 ? 8e-2 : 1e-2;
}

double sigmoid(double x) { return 1.0/(1.0 + std::exp(-x)); }

struct fault {
    double worst = 0.0;
    bool   same  = true;
};

// sampled values of y [M, per*T] against `value(column, row, norm)`
void compare(fault & f, const std::vector<float> & y, int64_t M, const std::function<double(int64_t, int64_t, double &)> & value) {
    std::mt19937 random(5);
    const int64_t n = (int64_t) y.size()/M;
    for (int s = 0; s < 120; s++) {
        const int64_t c = s < 40 ? n - 1 - s % n : random() % n;
        const int64_t m = s % 5 == 0 ? M - 1 - s % std::min<int64_t>(M, 20) : random() % M;
        double norm = 0.0;
        const double expected = value(c, m, norm);
        const double error = std::fabs(y[c*M + m] - expected)/(std::sqrt(norm) + 1e-3);
        f.worst = error <= f.worst ? f.worst : error; // NaN stays
    }
}

// the same products in graphs of 1, 2, ... rows, dense, with what is fused to them, and of experts
void check(ggml_type type, int64_t K, int64_t M, const std::vector<int64_t> & counts, int64_t S) {
    const int64_t T_max = 16, E = 24, used = 3;
    const pool & p = pool_of(type, K);
    const std::vector<float> x_all = normal((size_t) (K*T_max), 1.0f, 3), xn_all = normal((size_t) (S*M*T_max), 1.0f, 4), h_all = normal((size_t) (K*used*T_max), 1.0f, 6);
    std::vector<int32_t> id_all((size_t) (used*T_max));
    std::mt19937 random(7);
    for (int32_t & id : id_all) {
        id = (int32_t) (random() % E);
    }
    id_all[4] = -1; // a pick that another device has
    std::map<std::string, std::vector<float>> first;
    fault f;
    for (int64_t T : counts) {
        const std::vector<float>   x(x_all.begin(), x_all.begin() + K*T), xn(xn_all.begin(), xn_all.begin() + S*M*T), h(h_all.begin(), h_all.begin() + K*used*T);
        const std::vector<int32_t> ids(id_all.begin(), id_all.begin() + used*T);
        const std::vector<float>   xr = is_float(type) ? x : rounded(x), hr = is_float(type) ? h : rounded(h);
        builder b(64);
        ggml_tensor * xt = b.floats(K, T, x);
        ggml_tensor * idt = b.integers(used, T, ids);
        ggml_tensor * w = b.weights(type, K, M), * up = b.weights(type, K, M + 1), * down = b.weights(type, K, M), * mix = b.weights(type, K, S*M);
        ggml_tensor * we = b.weights(type, K, M, E), * ue = b.weights(type, K, M, E);
        ggml_tensor * inject = b.weights(GGML_TYPE_F32, K, 4);
        std::map<std::string, ggml_tensor *> out;
        out["plain"]  = b.product(w, xt);
        out["plain2"] = b.product(up, xt);
        out["inject"] = b.product(inject, xt);
        ggml_tensor * gap = b.expand(ggml_luce_silu_scale(b.ctx, b.floats(32, 1, std::vector<float>(32, 1.0f)), 1.0f));
        out["silu"]   = b.expand(ggml_luce_silu_scale(b.ctx, b.product(down, xt), 0.25f));
        out["swiglu"] = b.expand(ggml_swiglu_split(b.ctx, b.product(w, xt), b.product(down, xt)));
        ggml_tensor * xnt = b.floats(S*M, T, xn);
        out["mix"]    = b.expand(ggml_luce_hc_mix(b.ctx, xnt, b.product(mix, xt), (int) S));
        ggml_tensor * x3 = ggml_reshape_3d(b.ctx, xt, K, 1, T);
        ggml_tensor * ht = ggml_reshape_3d(b.ctx, b.floats(K*used, T, h), K, used, T);
        ggml_tensor * ge = b.product(we, x3, idt);
        out["experts"] = b.expand(ggml_swiglu_split(b.ctx, ge, b.product(ue, x3, idt)));
        out["picks"]   = b.product(we, ht, idt);
        (void) gap;
        if (!b.ready()) {
            return;
        }
        ggml_backend_graph_compute(backend, b.graph);
        const auto dot = [&](int64_t r, const float * v, double & norm) {
            double sum = 0.0;
            for (int64_t k = 0; k < K; k++) {
                const double term = (double) p.row(r)[k]*v[k];
                sum  += term;
                norm += term*term;
            }
            return sum;
        };
        for (auto & o : out) {
            const std::string & name = o.first;
            const std::vector<float> y = b.fetch(o.second);
            compare(f, y, o.second->ne[0], [&](int64_t c, int64_t m, double & norm) {
                const float * v = xr.data() + (name == "experts" ? c/used : c)*K;
                if (name == "silu") {
                    const double d = 0.25*dot(m, v, norm);
                    return d*sigmoid(d);
                }
                if (name == "swiglu") {
                    const double d = dot(m, v, norm);
                    norm *= 1.0 + 4.0*d*d; // an error of d grows by as much
                    return d*sigmoid(d)*d;
                }
                if (name == "mix") {
                    double sum = 0.0;
                    for (int64_t s = 0; s < S; s++) {
                        sum += xn[c*S*M + s*M + m]*sigmoid(dot(s*M + m, v, norm));
                    }
                    return sum/S;
                }
                if (name == "inject") {
                    double sum = 0.0;
                    for (int64_t k = 0; k < K; k++) {
                        const double term = (double) pool_of(GGML_TYPE_F32, K).row(m)[k]*x[c*K + k];
                        sum  += term;
                        norm += term*term;
                    }
                    return sum;
                }
                if (name == "experts" || name == "picks") {
                    if (ids[c] < 0) {
                        return 0.0;
                    }
                    const double d = dot(ids[c]*M + m, name == "picks" ? hr.data() + c*K : v, norm);
                    norm *= name == "picks" ? 1.0 : 1.0 + 4.0*d*d;
                    return name == "picks" ? d : d*sigmoid(d)*d;
                }
                return dot(m, v, norm);
            });
            std::vector<float> & known = first[name];
            f.same = f.same && memcmp(known.data(), y.data(), std::min(known.size(), y.size())*sizeof(float)) == 0;
            if (known.size() < y.size()) {
                known = y;
            }
        }
    }
    const bool right = f.worst < bound_of(type, K);
    n_failed += !right || !f.same;
    printf("%-7s K %5lld M %5lld: error %.1e%s%s\n", ggml_type_name(type), (long long) K, (long long) M, f.worst, right ? "" : "  WRONG", f.same ? "" : "  DEPENDS ON ROWS");
    fflush(stdout);
}

struct step {
    const char * name;
    size_t       bytes; // of weights that a step reads, but for experts that two rows share
    bool         experts;
    std::function<void(builder &, int64_t, int, std::map<std::string, ggml_tensor *> &)> add; // rows, which repetition, tensors that all share
};

ggml_tensor * shared_tensor(std::map<std::string, ggml_tensor *> & all, const char * name, const std::function<ggml_tensor *()> & make) {
    ggml_tensor *& t = all[name];
    if (t == nullptr) {
        t = make();
    }
    return t;
}

double seconds_of(builder & b, int n_run) {
    double best = INFINITY;
    for (int r = 0; r < 3; r++) {
        ggml_backend_graph_compute(backend, b.graph);
    }
    for (int r = 0; r < 5; r++) {
        ggml_backend_synchronize(backend);
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < n_run; i++) {
            ggml_backend_graph_compute_async(backend, b.graph);
        }
        ggml_backend_synchronize(backend);
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()/n_run);
    }
    return best;
}

// a small kernel between two steps, so that their products are not taken together
void gap(builder & b, std::map<std::string, ggml_tensor *> & all) {
    ggml_tensor * residual = shared_tensor(all, "gap", [&] { return b.floats(256, 1, std::vector<float>(256, 1.0f)); });
    ggml_tensor * gain     = shared_tensor(all, "gain", [&] { return b.floats(256, 1, std::vector<float>(256, 1.0f)); });
    b.expand(ggml_luce_hc_norm(b.ctx, residual, ggml_view_1d(b.ctx, gain, 256, 0), 4, 1e-6f));
}

void time_steps(const std::vector<step> & steps, const std::vector<int64_t> & rows) {
    for (const step & s : steps) {
        printf("%-34s", s.name);
        for (int64_t T : rows) {
            const int n_step = s.experts ? 24 : std::max<int>(4, std::min<int>(64, (int) (150e6/s.bytes) + 1));
            double seconds[2];
            for (int with = 0; with < 2; with++) {
                builder b(2048);
                std::map<std::string, ggml_tensor *> all;
                for (int i = 0; i < n_step; i++) {
                    gap(b, all);
                    if (with) {
                        s.add(b, T, i, all);
                    }
                }
                gap(b, all);
                if (!b.ready()) {
                    return;
                }
                seconds[with] = seconds_of(b, std::max(4, 200/n_step));
            }
            const double us = (seconds[1] - seconds[0])/n_step*1e6;
            const double bytes = (double) s.bytes*(s.experts ? T : 1);
            printf("  %2lld: %6.1f us %5.0f GB/s", (long long) T, us, bytes/us*1e-3);
        }
        printf("\n");
        fflush(stdout);
    }
}

std::vector<step> model_steps() {
    const auto vec = [](int64_t K, int64_t T) { return normal((size_t) (K*T), 1.0f, 9); };
    const auto x_of = [vec](builder & b, std::map<std::string, ggml_tensor *> & all, int64_t K, int64_t T) {
        return shared_tensor(all, ("x" + std::to_string(K)).c_str(), [&] { return b.floats(K, T, vec(K, T)); });
    };
    const auto size = [](ggml_type type, int64_t K, int64_t M) { return ggml_row_size(type, K)*M; };
    const ggml_type Q8 = GGML_TYPE_Q8_0, F = GGML_TYPE_F32;
    const int64_t H = 2560, FF = 640, E = 512, used = 10;
    std::vector<step> steps;
    const auto dense = [&](const char * name, std::vector<std::tuple<ggml_type, int64_t>> parts, int64_t K) {
        size_t bytes = 0;
        for (auto & p : parts) {
            bytes += size(std::get<0>(p), K, std::get<1>(p));
        }
        steps.push_back({ name, bytes, false, [=](builder & b, int64_t T, int, std::map<std::string, ggml_tensor *> & all) {
            for (auto & p : parts) {
                b.product(b.weights(std::get<0>(p), K, std::get<1>(p)), x_of(b, all, K, T));
            }
        } });
    };
    dense("GDN in (qkv z beta alpha)", { { Q8, 10240 }, { Q8, 6144 }, { F, 48 }, { F, 48 } }, H);
    dense("attention in", { { Q8, 128 }, { Q8, 512 }, { Q8, 12288 }, { Q8, 512 }, { Q8, 512 } }, H);
    dense("out Q8_0", { { Q8, H } }, 6144);
    steps.push_back({ "hc down silu, inject", size(Q8, 4*H, 320) + size(F, 4*H, 4), false, [=](builder & b, int64_t T, int, std::map<std::string, ggml_tensor *> & all) {
        ggml_tensor * x = x_of(b, all, 4*H, T);
        ggml_tensor * down = b.product(b.weights(Q8, 4*H, 320), x);
        b.product(b.weights(F, 4*H, 4), x);
        b.expand(ggml_luce_silu_scale(b.ctx, down, 0.25f));
    } });
    steps.push_back({ "hc up, mix", size(Q8, 320, 4*H), false, [=](builder & b, int64_t T, int, std::map<std::string, ggml_tensor *> & all) {
        ggml_tensor * up = b.product(b.weights(Q8, 320, 4*H), x_of(b, all, 320, T));
        b.expand(ggml_luce_hc_mix(b.ctx, x_of(b, all, 4*H, T), up, 4));
    } });
    dense("router, shared gate F32", { { F, 512 }, { F, 1 } }, H);
    for (ggml_type type : { GGML_TYPE_Q4_K, GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, Q8 }) {
        static std::map<int, std::string> names;
        names[type] = std::string("gate up ") + ggml_type_name(type) + ", shared Q8_0";
        steps.push_back({ names[type].c_str(), used*size(type, H, 2*FF) + size(Q8, H, 2*FF), true, [=](builder & b, int64_t T, int i, std::map<std::string, ggml_tensor *> & all) {
            std::mt19937 random(i);
            std::vector<int32_t> ids((size_t) (used*T));
            for (int32_t & id : ids) {
                id = (int32_t) (random() % E);
            }
            ggml_tensor * x = x_of(b, all, H, T), * x3 = ggml_reshape_3d(b.ctx, x, H, 1, T), * idt = b.integers(used, T, ids);
            ggml_tensor * g = shared_tensor(all, "gate", [&] { return b.weights(type, H, FF, E); }), * u = shared_tensor(all, "up", [&] { return b.weights(type, H, FF, E); });
            ggml_tensor * gate = b.product(g, x3, idt), * up = b.product(u, x3, idt);
            ggml_tensor * sg = b.product(b.weights(Q8, H, FF), x), * su = b.product(b.weights(Q8, H, FF), x);
            b.expand(ggml_swiglu_split(b.ctx, gate, up));
            b.expand(ggml_swiglu_split(b.ctx, sg, su));
        } });
    }
    for (ggml_type type : { GGML_TYPE_IQ4_NL, Q8 }) {
        static std::map<int, std::string> names;
        names[type] = std::string("down ") + ggml_type_name(type) + ", shared Q8_0";
        steps.push_back({ names[type].c_str(), used*size(type, FF, H) + size(Q8, FF, H), true, [=](builder & b, int64_t T, int i, std::map<std::string, ggml_tensor *> & all) {
            std::mt19937 random(i);
            std::vector<int32_t> ids((size_t) (used*T));
            for (int32_t & id : ids) {
                id = (int32_t) (random() % E);
            }
            ggml_tensor * w = shared_tensor(all, "down", [&] { return b.weights(type, FF, H, E); });
            ggml_tensor * x = shared_tensor(all, "hidden", [&] { return b.floats(FF*used, T, vec(FF*used, T)); });
            b.product(w, ggml_reshape_3d(b.ctx, x, FF, used, T), b.integers(used, T, ids));
            b.product(b.weights(Q8, FF, H), x_of(b, all, FF, T));
        } });
    }
    dense("head Q8_0", { { Q8, 248320 } }, H);
    return steps;
}

} // namespace

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (!what.empty() && what != "check" && what != "time") {
        fprintf(stderr, "usage: %s [check | time [ROWS...]]\n", argv[0]);
        return 2;
    }
    backend = ggml_backend_cuda_init(0);
    if (backend == nullptr) {
        fprintf(stderr, "no device\n");
        return 2;
    }
    if (what.empty() || what == "check") {
        for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K,
                                GGML_TYPE_Q4_0, GGML_TYPE_Q5_0, GGML_TYPE_IQ3_S, GGML_TYPE_Q2_0 }) {
            for (int64_t K : { 64, 96, 320, 512, 640, 2560, 6144, 10240 }) {
                if (K % ggml_blck_size(type) == 0) {
                    check(type, K, K <= 640 ? 130 : 70, { 1, 2, 3, 5, 8, 16 }, 4);
                }
            }
        }
        check(GGML_TYPE_Q8_0, 2560, 4160, { 1, 2, 4, 8, 16 }, 2);
        check(GGML_TYPE_Q4_K, 2560, 640, { 1, 2, 4, 8, 16 }, 3);
        check(GGML_TYPE_IQ4_NL, 640, 2560, { 1, 2, 4, 8, 16 }, 4);
        // sizes of kernels made for a launch (up to 4 rows) beside those that take any
        check(GGML_TYPE_Q8_0, 320, 2560, { 1, 2, 3, 4, 8 }, 4);
        check(GGML_TYPE_Q8_0, 640, 2560, { 1, 2, 3, 4, 8 }, 4);
        check(GGML_TYPE_Q8_0, 6144, 2560, { 1, 2, 3, 4, 8 }, 2);
        check(GGML_TYPE_Q8_0, 10240, 320, { 1, 2, 3, 4, 8 }, 2);
        check(GGML_TYPE_F32, 2560, 512, { 1, 2, 3, 4, 8 }, 4);
        printf("%s\n", n_failed ? "FAILED" : "all right");
    }
    std::vector<int64_t> rows;
    for (int i = 2; i < argc; i++) {
        rows.push_back(atoi(argv[i]));
    }
    if (what != "check") {
        time_steps(model_steps(), rows.empty() ? std::vector<int64_t>{ 1, 2, 4, 8, 16 } : rows);
    }
    ggml_backend_free(backend);
    return n_failed ? 1 : 0;
}
