// pyluce: which neighbouring nodes one launch computes. Fused and plain launches give the same bits.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A row graph's products that wait for nothing of each other become jobs of one launch, and what follows them alone
// (silu of a scaled product, SwiGLU, the mean over hyper-connection streams) their epilogues. Nodes are fused only
// when nothing that the launch writes lies in memory that it reads.
#include "luce-fuse.cuh"
#include "luce-mmv.cuh"
#include "luce-stream-ops.cuh"

namespace {

bool is_product(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID;
}

bool is_row_product(const ggml_tensor * t) {
    return is_product(t) && ggml_luce_get_phase(t) == GGML_LUCE_PHASE_ROW;
}

const ggml_tensor * base_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

int64_t rows_of(const ggml_tensor * product) {
    return product->op == GGML_OP_MUL_MAT ? product->ne[1] : product->ne[2];
}

// Whether a product of experts in front of node `first` reads the same ids. Its kernel lets the next one start only when the ids are there, so
// that every kernel after it may read them at once.
bool ids_read_before(const ggml_cgraph * graph, int first, const ggml_tensor * ids) {
    for (int j = first - 1; j >= 0; j--) {
        const ggml_tensor * t = graph->nodes[j];
        if (t == ids) {
            return false;
        }
        if (t->op == GGML_OP_MUL_MAT_ID && is_row_product(t) && t->src[2] == ids) {
            return true;
        }
    }
    return false;
}

// Whether everything in `inputs` is older than ids that a product of experts in front of node `first` has read: then it is there, too.
bool older_than_ids(const ggml_cgraph * graph, int first, const ggml_tensor * ids, const std::vector<luce_extent> & inputs) {
    if (!ids_read_before(graph, first, ids)) {
        return false;
    }
    for (int j = first - 1; j >= 0 && graph->nodes[j] != ids; j--) {
        const ggml_tensor * t = graph->nodes[j];
        if (!luce_is_noop(t) && !luce_apart({ luce_extent(t) }, inputs)) {
            return false;
        }
    }
    return true;
}

// jobs with the nodes that they compute
struct batch {
    const ggml_cgraph *                graph;
    int                                first; // node that is computed first
    std::vector<luce_job>              jobs;
    std::vector<const ggml_tensor *>   products; // the product of each job
    std::vector<int>                   indices;
    std::vector<const ggml_tensor *>   outputs;  // where it ends up
    std::vector<const ggml_tensor *>   inputs;

    // the job whose plain product this is, if nobody else reads it; -1 otherwise
    int find(const ggml_tensor * t) const {
        for (size_t j = 0; j < jobs.size(); j++) {
            if (products[j] == t && outputs[j] == t && !(t->flags & GGML_TENSOR_FLAG_OUTPUT) && ggml_node_get_use_count(graph, indices[j]) == 1) {
                return (int) j;
            }
        }
        return -1;
    }

    void finish(int j, const ggml_tensor * output, luce_epilogue epilogue) {
        luce_job & job = jobs[j];
        const bool by_pick = output->ne[2] > 1 || products[j]->op == GGML_OP_MUL_MAT_ID;
        job.epilogue = epilogue;
        job.dst      = (float *) output->data;
        job.dst_row  = (int64_t) ((by_pick ? output->nb[2] : output->nb[1]) / sizeof(float));
        job.dst_pick = by_pick ? (int64_t) (output->nb[1] / sizeof(float)) : 0;
        outputs[j]   = output;
    }

    void drop(int j) {
        jobs.erase(jobs.begin() + j);
        products.erase(products.begin() + j);
        indices.erase(indices.begin() + j);
        outputs.erase(outputs.begin() + j);
    }

    bool add(const ggml_tensor * t, int index) {
        if (jobs.size() == LUCE_MAX_JOBS || (!products.empty() && rows_of(t) != rows_of(products[0]))) {
            return false;
        }
        for (int s = 1; s < 3; s++) {
            for (const ggml_tensor * p : products) {
                if (t->src[s] && base_of(t->src[s]) == p) {
                    return false;
                }
            }
        }
        jobs.push_back(luce_job_of(t));
        jobs.back().ids_early = t->op == GGML_OP_MUL_MAT_ID && ids_read_before(graph, first, t->src[2]);
        products.push_back(t);
        indices.push_back(index);
        outputs.push_back(t);
        inputs.push_back(t->src[1]);
        if (t->src[2]) {
            inputs.push_back(t->src[2]);
        }
        return true;
    }

    // takes a node that follows the products as the epilogue of one (or two); false: it is none
    bool take(const ggml_tensor * t) {
        if (luce_is_kind(t, GGML_LUCE_SILU_SCALE)) {
            const int j = find(t->src[0]);
            if (j < 0) {
                return false;
            }
            finish(j, t, LUCE_SILU_SCALE);
            jobs[j].scale = ggml_get_op_params_f32(t, 1);
            return true;
        }
        if (luce_is_kind(t, GGML_LUCE_HC_MIX)) {
            const int j = find(t->src[1]);
            if (j < 0 || jobs[j].m != t->src[0]->ne[0]) {
                return false;
            }
            finish(j, t, LUCE_HC_MIX);
            jobs[j].n_stream = ggml_get_op_params_i32(t, 1);
            jobs[j].m        = (int) t->ne[0];
            jobs[j].xn       = (const float *) t->src[0]->data;
            jobs[j].xn_row   = luce_stride(t->src[0]);
            inputs.push_back(t->src[0]);
            return true;
        }
        if (t->op != GGML_OP_GLU || ggml_get_glu_op(t) != GGML_GLU_OP_SWIGLU || ggml_get_op_params_i32(t, 1) != 0) {
            return false;
        }
        const int gate = find(t->src[0]);
        if (gate < 0) {
            return false;
        }
        if (t->src[1] == nullptr) {
            finish(gate, t, LUCE_SWIGLU);
            jobs[gate].m    = (int) t->ne[0];
            jobs[gate].w_up = jobs[gate].w + t->ne[0] * jobs[gate].w_row;
            return true;
        }
        const int up = find(t->src[1]);
        if (up < 0 || up == gate) {
            return false;
        }
        const luce_job & a = jobs[gate];
        const luce_job & b = jobs[up];
        if (a.type != b.type || a.k != b.k || a.m != b.m || a.x != b.x || a.x_row != b.x_row || a.ids != b.ids || a.w_row != b.w_row || a.w_expert != b.w_expert) {
            return false;
        }
        finish(gate, t, LUCE_SWIGLU);
        jobs[gate].w_up = b.w;
        drop(up);
        return true;
    }

    bool safe() const {
        std::vector<luce_extent> written;
        std::vector<luce_extent> read;
        for (const ggml_tensor * t : outputs) {
            written.emplace_back(t);
        }
        for (const ggml_tensor * t : inputs) {
            read.emplace_back(t);
        }
        return luce_apart(written, read);
    }
};

// The products from node i on that one launch computes, with what follows them alone; returns how many nodes after i that are, or -1: none.
int gather_products(const ggml_cgraph * graph, int i, batch & found) {
    batch plain = {};
    plain.graph = graph;
    plain.first = i;
    int end = i; // one past the last product taken
    for (int j = i; j < graph->n_nodes; j++) {
        const ggml_tensor * t = graph->nodes[j];
        if (luce_is_noop(t)) {
            continue;
        }
        if (!is_row_product(t) || !plain.add(t, j)) {
            break;
        }
        end = j + 1;
    }
    found = plain;
    int last = end;
    for (int j = end; j < graph->n_nodes; j++) {
        const ggml_tensor * t = graph->nodes[j];
        if (luce_is_noop(t)) {
            continue;
        }
        if (!found.take(t)) {
            break;
        }
        last = j + 1;
    }
    if (last > end && found.safe()) {
        return last - i - 1;
    }
    found = plain;
    return plain.jobs.size() > 0 && plain.safe() ? end - i - 1 : -1;
}

int fuse_products(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    batch found;
    const int n = gather_products(graph, i, found);
    if (n <= 0) {
        return 0; // alone, as it is
    }
    luce_launch_jobs(ctx, found.jobs.data(), (int) found.jobs.size(), (int) rows_of(found.products[0]));
    return n;
}

// Hyper-connection node i (by `launch`), whose norm ends in `normed`, with the products of the norm that come next: it writes their columns in 8
// bits beside it, which then need not be made by every thread block that reads them. Returns how many nodes after i that were; `launch` is called once.
template <typename F>
int with_next_products(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i, const float * normed, int64_t n_row, int k, int h, F launch) {
    constexpr int SHORT_COLUMN = 4096; // values that the products make as fast themselves
    int j = i + 1;
    while (j < graph->n_nodes && luce_is_noop(graph->nodes[j])) {
        j++;
    }
    batch found;
    int   n = -1;
    if (k >= SHORT_COLUMN && h % 128 == 0 && n_row <= LUCE_LEAN_ROWS && luce_lean_pitch(k) > 0 && j < graph->n_nodes && is_row_product(graph->nodes[j])) {
        n = gather_products(graph, j, found);
    }
    const bool wanted = n >= 0 && found.jobs[0].x == normed && found.jobs[0].k == k && found.jobs[0].x_row == k &&
                        rows_of(found.products[0]) == n_row && ggml_is_quantized(found.jobs[0].type) && !found.jobs[0].ids;
    if (!wanted) {
        launch({});
        return 0;
    }
    const int pitch = luce_lean_pitch(k);
    ggml_cuda_pool_alloc<char> columns(ctx.pool(), (size_t) n_row * pitch);
    launch({ columns.get(), pitch });
    luce_launch_jobs(ctx, found.jobs.data(), (int) found.jobs.size(), (int) n_row, columns.get());
    return j + n - i;
}

// a hyper-connection that ends in a norm: node i
int fuse_norm(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    ggml_tensor * t = graph->nodes[i];
    const bool init    = luce_is_kind(t, GGML_LUCE_HC_INIT);
    const bool combine = luce_is_kind(t, GGML_LUCE_HC_COMBINE);
    if (!(init || luce_is_kind(t, GGML_LUCE_HC_NORM) || (combine && t->src[3]))) {
        return 0;
    }
    const int     n_stream = ggml_get_op_params_i32(t, 1);
    const int64_t n_row    = t->src[0]->ne[1];
    const int64_t k        = t->src[0]->ne[0] * (init ? n_stream : 1);
    const float * normed   = (const float *) t->data + (init || combine ? n_row * k : 0);
    bool launched = false;
    const int n = with_next_products(ctx, graph, i, normed, n_row, (int) k, (int) (k / n_stream), [&](const luce_stream_x8 & x8) {
        if (x8.memory == nullptr) {
            return; // as the node alone is
        }
        launched = true;
        init ? luce_cuda_hc_init_x8(ctx, t, x8) : combine ? luce_cuda_hc_combine_x8(ctx, t, x8) : luce_cuda_hc_norm_x8(ctx, t, x8);
    });
    return launched ? n : 0;
}

int fuse_moe_combine(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    const ggml_tensor * moe = graph->nodes[i];
    int j = i + 1;
    while (j < graph->n_nodes && luce_is_noop(graph->nodes[j])) {
        j++;
    }
    if (j == graph->n_nodes || !luce_is_kind(graph->nodes[j], GGML_LUCE_HC_COMBINE)) {
        return 0;
    }
    ggml_tensor * combine = graph->nodes[j];
    if (combine->src[1] != moe || combine->src[3] == nullptr || (moe->flags & GGML_TENSOR_FLAG_OUTPUT) || ggml_node_get_use_count(graph, i) != 1) {
        return 0;
    }
    std::vector<luce_extent> read;
    for (int s = 0; s < 5; s++) {
        read.emplace_back(moe->src[s]);
    }
    read.emplace_back(combine->src[0]);
    read.emplace_back(combine->src[2]);
    if (!luce_apart({ luce_extent(combine) }, read)) {
        return 0;
    }
    const std::vector<luce_extent> older = { luce_extent(moe->src[1]), luce_extent(moe->src[2]), luce_extent(moe->src[4]), luce_extent(combine->src[0]), luce_extent(combine->src[2]) };
    const bool    early = older_than_ids(graph, i, moe->src[2], older);
    const int64_t k     = combine->src[0]->ne[0];
    const int64_t n_row = combine->src[0]->ne[1];
    return j - i + with_next_products(ctx, graph, j, (const float *) combine->data + n_row * k, n_row, (int) k, (int) moe->ne[0],
        [&](const luce_stream_x8 & x8) { luce_cuda_moe_hc_combine(ctx, moe, combine, early, x8); });
}

} // namespace

bool ggml_luce_cuda_owns(const ggml_cgraph * graph, int i) {
    const ggml_tensor * t = graph->nodes[i];
    return t->op == GGML_OP_LUCE || (is_product(t) && ggml_luce_get_phase(t) != GGML_LUCE_PHASE_UPSTREAM);
}

int ggml_luce_cuda_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    static const bool disabled = getenv("LUCE_DISABLE_FUSION") != nullptr;
    if (disabled) {
        return 0;
    }
    const ggml_tensor * t = graph->nodes[i];
    int skipped = 0;
    if (is_row_product(t)) {
        skipped = fuse_products(ctx, graph, i);
    } else if (is_product(t) && ggml_luce_get_phase(t) == GGML_LUCE_PHASE_CHUNK) {
        skipped = luce_cuda_chunk_mul_mat_run(ctx, graph, i);
    } else if (luce_is_kind(t, GGML_LUCE_MOE_COMBINE)) {
        skipped = fuse_moe_combine(ctx, graph, i);
    } else if (t->op == GGML_OP_LUCE) {
        skipped = fuse_norm(ctx, graph, i);
        skipped = skipped > 0 ? skipped : luce_cuda_qsa_run(ctx, graph, i);
    }
    if (skipped > 0) {
        CUDA_CHECK(cudaGetLastError());
    }
    return skipped;
}
