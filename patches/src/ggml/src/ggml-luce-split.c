// pyluce: a graph whose routed experts are on a second device, computed in parts; ggml-luce.h says how.
//
// Copyright (c) 2026 the pyluce authors. MIT licence.
#include "ggml-luce.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <stdlib.h>
#include <string.h>

#define MAX_SEND 4

// a layer: the target's nodes before what is sent, those beside the expert device, and what it computes
struct layer {
    struct ggml_cgraph    before;
    struct ggml_cgraph    beside;
    struct ggml_cgraph *  expert;
    struct ggml_tensor *  from[MAX_SEND];
    struct ggml_tensor *  to[MAX_SEND];
    int                   n_send;
    struct ggml_tensor *  result;
    struct ggml_tensor *  into;
};

struct ggml_luce_split {
    ggml_backend_t         target;
    ggml_backend_t         expert;
    struct ggml_cgraph *   graph;
    struct ggml_cgraph     rest;      // the target's nodes after the last layer
    struct layer *         layers;
    int                    n_layer;
    int                    n_done;    // nodes that belong to a layer
    bool                   by_itself; // the devices copy to each other in their streams' order
    bool (*is_lost)(ggml_backend_t);  // NULL: a device that does not go
    ggml_backend_buffer_t  staging;   // host memory between the devices
    size_t                 n_staging;
    ggml_backend_event_t   done;      // the expert device has a result; NULL where one waits for all that it does
    ggml_backend_t         copier;    // a stream of the expert device for results, NULL: its own stream
    ggml_backend_event_t * target_events; // for measurements, NULL: none
    ggml_backend_event_t * expert_events;
    ggml_backend_event_t * target_next;
    ggml_backend_event_t * expert_next;
};

static bool on_host(const struct ggml_tensor * t) {
    return ggml_backend_buffer_is_host(t->view_src ? t->view_src->buffer : t->buffer);
}

static bool is_cpu(ggml_backend_t backend) {
    return ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

static struct ggml_cgraph part(struct ggml_cgraph * graph, int begin, int end) {
    struct ggml_cgraph view = ggml_graph_view(graph, begin, end);
    ggml_luce_graph_retain(&view);
    return view;
}

struct ggml_luce_split * ggml_luce_split_new(ggml_backend_t target, ggml_backend_t expert, struct ggml_cgraph * graph) {
    struct ggml_luce_split * split = calloc(1, sizeof(*split));
    if (split == NULL) {
        return NULL;
    }
    split->target = target;
    split->expert = expert;
    split->graph  = graph;
    split->rest   = part(graph, 0, graph->n_nodes);
    ggml_backend_reg_t target_reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(target));
    ggml_backend_reg_t expert_reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(expert));
    split->by_itself = target_reg == expert_reg && !is_cpu(target) && expert->iface.cpy_tensor_async != NULL;
    split->is_lost   = (bool (*)(ggml_backend_t)) (uintptr_t) ggml_backend_reg_get_proc_address(expert_reg, "ggml_backend_rpc_is_lost");
    return split;
}

// room for the host's copies of what a layer sends or gets
static bool reserve(struct ggml_luce_split * split, size_t n_bytes) {
    if (split->by_itself || n_bytes <= split->n_staging) {
        return true;
    }
    ggml_backend_buffer_free(split->staging);
    ggml_backend_dev_t device = ggml_backend_get_device(split->target);
    ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device);
    if (type == NULL) {
        type = ggml_backend_cpu_buffer_type();
    }
    split->staging   = ggml_backend_buft_alloc_buffer(type, n_bytes);
    split->n_staging = split->staging ? n_bytes : 0;
    return split->staging != NULL;
}

bool ggml_luce_split_add(
        struct ggml_luce_split * split, int send_at, int receive_at, struct ggml_cgraph * layer, int n_send,
        struct ggml_tensor * const * from, struct ggml_tensor * const * to, struct ggml_tensor * result, struct ggml_tensor * into) {
    if (send_at < split->n_done || receive_at < send_at || receive_at > split->graph->n_nodes || n_send < 0 || n_send > MAX_SEND) {
        return false;
    }
    size_t n_sent = 0;
    for (int i = 0; i < n_send; i++) {
        if (ggml_nbytes(from[i]) != ggml_nbytes(to[i])) {
            return false;
        }
        n_sent += ggml_nbytes(from[i]);
    }
    if (ggml_nbytes(result) != ggml_nbytes(into) || !reserve(split, n_sent > ggml_nbytes(result) ? n_sent : ggml_nbytes(result))) {
        return false;
    }
    struct layer * layers = realloc(split->layers, (split->n_layer + 1) * sizeof(*layers));
    if (layers == NULL) {
        return false;
    }
    split->layers = layers;
    struct layer * l = &layers[split->n_layer++];
    memset(l, 0, sizeof(*l));
    l->before = part(split->graph, split->n_done, send_at);
    l->beside = part(split->graph, send_at, receive_at);
    l->expert = layer;
    l->n_send = n_send;
    memcpy(l->from, from, n_send * sizeof(from[0]));
    memcpy(l->to,   to,   n_send * sizeof(to[0]));
    l->result = result;
    l->into   = into;
    split->n_done = receive_at;
    split->rest   = part(split->graph, receive_at, split->graph->n_nodes);
    return true;
}

static enum ggml_status compute(ggml_backend_t backend, struct ggml_cgraph * graph) {
    return graph->n_nodes ? ggml_backend_graph_compute_async(backend, graph) : GGML_STATUS_SUCCESS;
}

static void send(struct ggml_luce_split * split, const struct layer * l) {
    if (split->by_itself) {
        for (int i = 0; i < l->n_send; i++) {
            ggml_backend_tensor_copy_async(split->target, split->expert, l->from[i], l->to[i]);
        }
        return;
    }
    char * at[MAX_SEND];
    char * next = ggml_backend_buffer_get_base(split->staging);
    bool waits = false;
    for (int i = 0; i < l->n_send; i++) {
        at[i] = l->from[i]->data;
        if (!on_host(l->from[i])) {
            at[i] = next;
            ggml_backend_tensor_get_async(split->target, l->from[i], next, 0, ggml_nbytes(l->from[i]));
            next += ggml_nbytes(l->from[i]);
            waits = true;
        }
    }
    if (waits) {
        ggml_backend_synchronize(split->target);
    }
    for (int i = 0; i < l->n_send; i++) {
        ggml_backend_tensor_set_async(split->expert, l->to[i], at[i], 0, ggml_nbytes(l->to[i]));
    }
}

// what a layer's result becomes on its way: host memory where it is read from
static char * way(struct ggml_luce_split * split, const struct layer * l) {
    return on_host(l->into) ? l->into->data : on_host(l->result) ? l->result->data : ggml_backend_buffer_get_base(split->staging);
}

// The result leaves the expert device as soon as it is there, and stands behind nothing that the device is given later.
static void leave(struct ggml_luce_split * split, const struct layer * l) {
    if (!split->by_itself && way(split, l) != l->result->data) {
        ggml_backend_tensor_get_async(split->expert, l->result, way(split, l), 0, ggml_nbytes(l->result));
    }
    if (split->done != NULL) {
        ggml_backend_event_record(split->done, split->expert);
    }
}

static enum ggml_status take(struct ggml_luce_split * split, const struct layer * l) {
    if (split->by_itself) {
        // the target waits for this copy from here on; a stream of its own lets it overtake what the expert device does next
        ggml_backend_t from = split->copier != NULL ? split->copier : split->expert;
        if (split->copier != NULL) {
            ggml_backend_event_wait(split->copier, split->done);
        }
        ggml_backend_tensor_copy_async(from, split->target, l->result, l->into);
        return GGML_STATUS_SUCCESS;
    }
    char * at = way(split, l);
    if (at != l->result->data) {
        if (split->done != NULL) {
            ggml_backend_event_synchronize(split->done);
        } else {
            ggml_backend_synchronize(split->expert);
        }
    }
    if (split->is_lost != NULL && split->is_lost(split->expert)) {
        return GGML_STATUS_FAILED;
    }
    if (at != l->into->data) {
        ggml_backend_tensor_set_async(split->target, l->into, at, 0, ggml_nbytes(l->into));
    }
    return GGML_STATUS_SUCCESS;
}

static void record(ggml_backend_t backend, ggml_backend_event_t ** next) {
    if (*next != NULL) {
        ggml_backend_event_record(*(*next)++, backend);
    }
}

static enum ggml_status compute_expert(struct ggml_luce_split * split, struct layer * l) {
    record(split->expert, &split->expert_next);
    const enum ggml_status status = compute(split->expert, l->expert);
    record(split->expert, &split->expert_next);
    if (status == GGML_STATUS_SUCCESS) {
        leave(split, l);
    }
    return status;
}

// a layer up to where its result is needed
static enum ggml_status begin(struct ggml_luce_split * split, struct layer * l) {
    enum ggml_status status = compute(split->target, &l->before);
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    record(split->target, &split->target_next);
    send(split, l);
    // a CPU returns when it is done: whoever does not goes first
    const bool target_first = is_cpu(split->expert);
    status = target_first ? compute(split->target, &l->beside) : compute_expert(split, l);
    if (status == GGML_STATUS_SUCCESS) {
        status = target_first ? compute_expert(split, l) : compute(split->target, &l->beside);
    }
    record(split->target, &split->target_next);
    return status;
}

static enum ggml_status end(struct ggml_luce_split * split, const struct layer * l) {
    const enum ggml_status status = take(split, l);
    record(split->target, &split->target_next);
    return status;
}

static enum ggml_status compute_all(struct ggml_luce_split * const * splits, int n) {
    enum ggml_status status = GGML_STATUS_SUCCESS;
    for (int s = 0; s < n; s++) {
        splits[s]->target_next = splits[s]->target_events;
        splits[s]->expert_next = splits[s]->expert_events;
        record(splits[s]->target, &splits[s]->target_next);
        record(splits[s]->expert, &splits[s]->expert_next);
    }
    // layer by layer: while the target is at one stream's layer, the expert device is at the one before's
    for (int i = 0; i < splits[0]->n_layer; i++) {
        for (int s = 0; s < n && status == GGML_STATUS_SUCCESS; s++) {
            if (i > 0) {
                status = end(splits[s], &splits[s]->layers[i - 1]);
            }
            if (status == GGML_STATUS_SUCCESS) {
                status = begin(splits[s], &splits[s]->layers[i]);
            }
        }
    }
    for (int s = 0; s < n && status == GGML_STATUS_SUCCESS; s++) {
        if (splits[s]->n_layer > 0) {
            status = end(splits[s], &splits[s]->layers[splits[s]->n_layer - 1]);
        }
        if (status == GGML_STATUS_SUCCESS) {
            status = compute(splits[s]->target, &splits[s]->rest);
        }
        record(splits[s]->target, &splits[s]->target_next);
    }
    if (status != GGML_STATUS_SUCCESS) {
        ggml_backend_synchronize(splits[0]->target);
        ggml_backend_synchronize(splits[0]->expert);
    }
    return status;
}

enum ggml_status ggml_luce_split_compute(struct ggml_luce_split * split) {
    return compute_all(&split, 1);
}

// what a stream needs beside others: to know when its result is there, and to copy it past what the device does next
static bool make_stream(struct ggml_luce_split * split) {
    ggml_backend_dev_t device = ggml_backend_get_device(split->expert);
    if (split->done == NULL) {
        split->done = ggml_backend_event_new(device);
    }
    if (split->by_itself && split->copier == NULL) {
        split->copier = ggml_backend_dev_init(device, NULL);
    }
    return is_cpu(split->expert) || (split->done != NULL && (!split->by_itself || split->copier != NULL));
}

enum ggml_status ggml_luce_split_compute_streams(struct ggml_luce_split * const * splits, int n) {
    for (int s = 0; s < n; s++) {
        if (splits[s]->n_layer != splits[0]->n_layer || (n > 1 && !make_stream(splits[s]))) {
            return GGML_STATUS_FAILED;
        }
    }
    return n > 0 ? compute_all(splits, n) : GGML_STATUS_SUCCESS;
}

void ggml_luce_split_bytes(const struct ggml_luce_split * split, int64_t * sent, int64_t * received) {
    *sent     = 0;
    *received = 0;
    for (int i = 0; i < split->n_layer; i++) {
        for (int j = 0; j < split->layers[i].n_send; j++) {
            *sent += (int64_t) ggml_nbytes(split->layers[i].from[j]);
        }
        *received += (int64_t) ggml_nbytes(split->layers[i].result);
    }
}

void ggml_luce_split_record(struct ggml_luce_split * split, ggml_backend_event_t * target, ggml_backend_event_t * expert) {
    split->target_events = target;
    split->expert_events = expert;
}

void ggml_luce_split_free(struct ggml_luce_split * split) {
    if (split != NULL) {
        ggml_backend_event_free(split->done);
        ggml_backend_free(split->copier);
        ggml_backend_buffer_free(split->staging);
        free(split->layers);
        free(split);
    }
}
