// pyluce: which neighbouring nodes one launch computes. Fused and plain launches give the same bits.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// A row graph's products that wait for nothing of each other become jobs of one launch, and what follows them alone
// (silu of a scaled product, SwiGLU, the mean over hyper-connection streams) their epilogues. Nodes are fused only
// when nothing that the launch writes lies in memory that it reads.
#include "luce-mmv.cuh"

#include "ggml-impl.h"

namespace {

bool is_noop(const ggml_tensor * t) {
    return ggml_is_empty(t) || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_TRANSPOSE || t->op == GGML_OP_VIEW ||
           t->op == GGML_OP_PERMUTE || t->op == GGML_OP_NONE;
}

bool is_product(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID;
}

bool is_row_product(const ggml_tensor * t) {
    return is_product(t) && ggml_luce_get_phase(t) == GGML_LUCE_PHASE_ROW;
}

bool is_kind(const ggml_tensor * t, ggml_luce_kind kind) {
    return t->op == GGML_OP_LUCE && ggml_get_op_params_i32(t, 0) == kind;
}

const ggml_tensor * base_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

int64_t rows_of(const ggml_tensor * product) {
    return product->op == GGML_OP_MUL_MAT ? product->ne[1] : product->ne[2];
}

// memory that a launch reads or writes
struct extent {
    const char * begin;
    const char * end;
    explicit extent(const ggml_tensor * t) : begin((const char *) t->data), end(begin + ggml_nbytes(t)) {}
    bool meets(const extent & other) const { return begin < other.end && other.begin < end; }
};

bool apart(const std::vector<extent> & written, const std::vector<extent> & read) {
    for (size_t i = 0; i < written.size(); i++) {
        for (const extent & r : read) {
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
        if (is_kind(t, GGML_LUCE_SILU_SCALE)) {
            const int j = find(t->src[0]);
            if (j < 0) {
                return false;
            }
            finish(j, t, LUCE_SILU_SCALE);
            jobs[j].scale = ggml_get_op_params_f32(t, 1);
            return true;
        }
        if (is_kind(t, GGML_LUCE_HC_MIX)) {
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
        std::vector<extent> written;
        std::vector<extent> read;
        for (const ggml_tensor * t : outputs) {
            written.emplace_back(t);
        }
        for (const ggml_tensor * t : inputs) {
            read.emplace_back(t);
        }
        return apart(written, read);
    }
};

int fuse_products(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    batch plain = {};
    plain.graph = graph;
    plain.first = i;
    int end = i; // one past the last product taken
    for (int j = i; j < graph->n_nodes; j++) {
        const ggml_tensor * t = graph->nodes[j];
        if (is_noop(t)) {
            continue;
        }
        if (!is_row_product(t) || !plain.add(t, j)) {
            break;
        }
        end = j + 1;
    }
    const int n_row = (int) rows_of(plain.products[0]);

    batch whole = plain;
    int last = end;
    for (int j = end; j < graph->n_nodes; j++) {
        const ggml_tensor * t = graph->nodes[j];
        if (is_noop(t)) {
            continue;
        }
        if (!whole.take(t)) {
            break;
        }
        last = j + 1;
    }
    if (last > end && whole.safe()) {
        luce_launch_jobs(ctx, whole.jobs.data(), (int) whole.jobs.size(), n_row);
        return last - i - 1;
    }
    if (plain.jobs.size() > 1 && plain.safe()) {
        luce_launch_jobs(ctx, plain.jobs.data(), (int) plain.jobs.size(), n_row);
        return end - i - 1;
    }
    return 0;
}

int fuse_moe_combine(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    const ggml_tensor * moe = graph->nodes[i];
    int j = i + 1;
    while (j < graph->n_nodes && is_noop(graph->nodes[j])) {
        j++;
    }
    if (j == graph->n_nodes || !is_kind(graph->nodes[j], GGML_LUCE_HC_COMBINE)) {
        return 0;
    }
    ggml_tensor * combine = graph->nodes[j];
    if (combine->src[1] != moe || combine->src[3] == nullptr || (moe->flags & GGML_TENSOR_FLAG_OUTPUT) || ggml_node_get_use_count(graph, i) != 1) {
        return 0;
    }
    std::vector<extent> read;
    for (int s = 0; s < 5; s++) {
        read.emplace_back(moe->src[s]);
    }
    read.emplace_back(combine->src[0]);
    read.emplace_back(combine->src[2]);
    if (!apart({ extent(combine) }, read)) {
        return 0;
    }
    luce_cuda_moe_hc_combine(ctx, moe, combine);
    return j - i;
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
    } else if (is_kind(t, GGML_LUCE_MOE_COMBINE)) {
        skipped = fuse_moe_combine(ctx, graph, i);
    }
    if (skipped > 0) {
        CUDA_CHECK(cudaGetLastError());
    }
    return skipped;
}
