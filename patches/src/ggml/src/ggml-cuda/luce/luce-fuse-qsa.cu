// pyluce: which nodes of a sparse attention layer one launch computes. Fused and plain launches give the same bits.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
//
// After the projections a layer normalises and rotates its queries, keys and the indexer's queries, appends keys and values, and
// appends and pools the indexer's keys: none of these waits for another, but for the keys, which are appended as they are made.
#include "luce-fuse.cuh"
#include "luce-qsa-jobs.cuh"

namespace {

constexpr int64_t MAX_ROWS = 64; // of a graph that is fused; more fill the device anyway

// a run of nodes as jobs
struct run {
    const ggml_cgraph *              graph;
    luce_qsa_jobs                    jobs    = {};
    int                              n_node  = 0;
    int                              last    = -1;
    int64_t                          n_row   = 0;
    const ggml_tensor *              outputs[LUCE_QSA_MAX_JOBS] = {}; // of the jobs
    int                              indices[LUCE_QSA_MAX_JOBS] = {}; // of the nodes that are computed
    const ggml_tensor *              pool    = nullptr;
    bool                             handle  = false; // of the pool: somebody reads its zeros
    std::vector<const ggml_tensor *> inputs;

    explicit run(const ggml_cgraph * graph) : graph(graph) {}

    bool only_reader(int node) const {
        return !(graph->nodes[node]->flags & GGML_TENSOR_FLAG_OUTPUT) && ggml_node_get_use_count(graph, node) == 1;
    }

    bool same_rows(int64_t n) {
        if (n_node == 0) {
            n_row = n;
        }
        return n == n_row && n > 0 && n <= MAX_ROWS;
    }

    void read(const ggml_tensor * t, int first, int n) {
        for (int s = first; s < first + n; s++) {
            inputs.push_back(t->src[s]);
        }
    }

    bool safe() const {
        std::vector<luce_extent> written;
        std::vector<luce_extent> reads;
        for (int j = 0; j < jobs.n_job; j++) {
            written.emplace_back(outputs[j]);
        }
        if (pool) {
            written.emplace_back(pool->src[3]);
            written.emplace_back(pool->src[4]);
            if (handle) {
                written.emplace_back(pool);
            }
        }
        for (const ggml_tensor * t : inputs) {
            reads.emplace_back(t);
        }
        return luce_apart(written, reads);
    }

    bool take_norm_rope(int i) {
        const ggml_tensor * t = graph->nodes[i];
        if (jobs.n_job == LUCE_QSA_MAX_JOBS || !same_rows(t->ne[2])) {
            return false;
        }
        outputs[jobs.n_job] = t;
        indices[jobs.n_job] = i;
        jobs.heads[jobs.n_job++] = luce_norm_rope_job(t);
        read(t, 0, 3);
        return true;
    }

    bool take_set_rows(int i) {
        const ggml_tensor * t = graph->nodes[i];
        const ggml_tensor * x = t->src[0];
        const ggml_tensor * cells = t->src[1];
        if (x->type != GGML_TYPE_F32 || cells->type != GGML_TYPE_I64 || (t->type != GGML_TYPE_F16 && t->type != GGML_TYPE_F32) ||
            !ggml_is_contiguous(x) || !ggml_is_contiguous(cells) || t->nb[0] != ggml_type_size(t->type) || t->nb[1] % t->nb[0] != 0 ||
            ggml_nrows(x) != x->ne[1] || ggml_nelements(cells) != x->ne[1] || ggml_nrows(t) != t->ne[1] || !same_rows(x->ne[1])) {
            return false;
        }
        for (int j = 0; j < jobs.n_job; j++) {
            if (x != outputs[j] && x->view_src != outputs[j]) {
                continue;
            }
            // the rows of a job, as a whole and read by nobody else: they go where they are appended
            if (!luce_is_kind(outputs[j], GGML_LUCE_NORM_ROPE) || x->op != GGML_OP_RESHAPE || x->data != outputs[j]->data ||
                x->ne[0] != outputs[j]->ne[0] * outputs[j]->ne[1] || !only_reader(indices[j])) {
                return false;
            }
            int view = i - 1;
            while (view > indices[j] && graph->nodes[view] != x) {
                view--;
            }
            if (view == indices[j] || !only_reader(view)) {
                return false;
            }
            luce_append_to(jobs.heads[j], t);
            outputs[j] = t;
            read(t, 1, 1);
            return true;
        }
        if (jobs.n_job == LUCE_QSA_MAX_JOBS) {
            return false;
        }
        outputs[jobs.n_job] = t;
        indices[jobs.n_job] = i;
        jobs.heads[jobs.n_job++] = luce_append_job(t);
        read(t, 0, 2);
        return true;
    }

    bool take_pool(int i) {
        const ggml_tensor * t = graph->nodes[i];
        if (pool || t->src[0]->ne[0] > 4096 || !same_rows(t->src[0]->ne[1])) {
            return false;
        }
        // nobody reads the handle when a selection is all that waits for it
        int next = i + 1;
        while (next < graph->n_nodes && luce_is_noop(graph->nodes[next])) {
            next++;
        }
        handle = next == graph->n_nodes || !luce_is_kind(graph->nodes[next], GGML_LUCE_QSA_SELECT) ||
                 graph->nodes[next]->src[2] != t || !only_reader(i);
        pool      = t;
        jobs.pool = luce_qsa_pool_job(t);
        if (!handle) {
            jobs.pool.handle = nullptr;
        }
        read(t, 0, 3);
        read(t, 5, 2);
        return true;
    }

    bool take(int i) {
        const ggml_tensor * t = graph->nodes[i];
        const bool taken = luce_is_kind(t, GGML_LUCE_NORM_ROPE) ? take_norm_rope(i) :
                           luce_is_kind(t, GGML_LUCE_QSA_POOL)  ? take_pool(i) :
                           t->op == GGML_OP_SET_ROWS            ? take_set_rows(i) : false;
        if (!taken || !safe()) {
            return false;
        }
        n_node++;
        last = i;
        return true;
    }
};

int fuse_jobs(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    run taken(graph);
    for (int j = i; j < graph->n_nodes; j++) {
        if (luce_is_noop(graph->nodes[j])) {
            continue;
        }
        run more = taken;
        if (!more.take(j)) {
            break;
        }
        taken = more;
    }
    if (taken.n_node < 2) {
        return 0;
    }
    luce_qsa_launch_jobs(ctx, taken.jobs);
    return taken.last - i;
}

// a selection that has to choose nothing, in front of the attention that alone reads it
int fuse_select(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    const ggml_tensor * select = graph->nodes[i];
    if (ggml_get_op_params_i32(select, 3) > ggml_get_op_params_i32(select, 2) || ggml_get_op_params_i32(select, 3) <= 0) {
        return 0;
    }
    int j = i + 1;
    while (j < graph->n_nodes && luce_is_noop(graph->nodes[j])) {
        j++;
    }
    if (j == graph->n_nodes || !luce_is_kind(graph->nodes[j], GGML_LUCE_QSA_ATTN)) {
        return 0;
    }
    ggml_tensor * attn = graph->nodes[j];
    if (attn->src[3] != select || ggml_get_op_params_i32(attn, 1) != ggml_get_op_params_i32(select, 1) || attn->src[6] != select->src[4] ||
        (select->flags & GGML_TENSOR_FLAG_OUTPUT) || ggml_node_get_use_count(graph, i) != 1) {
        return 0;
    }
    luce_cuda_qsa_attn_all(ctx, attn);
    return j - i;
}

} // namespace

int luce_cuda_qsa_run(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    const ggml_tensor * t = graph->nodes[i];
    if (luce_is_kind(t, GGML_LUCE_NORM_ROPE) || luce_is_kind(t, GGML_LUCE_QSA_POOL)) {
        return fuse_jobs(ctx, graph, i);
    }
    return luce_is_kind(t, GGML_LUCE_QSA_SELECT) ? fuse_select(ctx, graph, i) : 0;
}
