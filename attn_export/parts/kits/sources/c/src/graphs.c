#include "graphs.h"

#include <string.h>

#include "bundle_check.h"

bool graphs_open(const char *bundle, ModelOptions options, Graphs *graphs, Error *error) {
    char path[3072];
    *graphs = (Graphs){0};
    bool opened = bundle_files(bundle, error) &&
                  bundle_path(bundle, BUNDLE.graph, path, sizeof path, error) &&
                  model_open(path, options, &graphs->any, error);
    if (opened && BUNDLE.decode != NULL) {
        opened = bundle_path(bundle, BUNDLE.decode, path, sizeof path, error) &&
                 model_open(path, options, &graphs->single, error);
    }
    if (opened && BUNDLE.encoder != NULL) {
        opened = bundle_path(bundle, BUNDLE.encoder, path, sizeof path, error) &&
                 model_open(path, options, &graphs->encoder, error);
    }
    if (!opened) graphs_close(graphs);
    return opened;
}

void graphs_close(Graphs *graphs) {
    model_close(graphs->any);
    model_close(graphs->single);
    model_close(graphs->encoder);
    *graphs = (Graphs){0};
}

/* Returns whether the inputs have one token for each batch element. */
static bool is_single(const Tensor *inputs) {
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        const End *end = &BUNDLE.inputs[i];
        for (size_t axis = 0; axis < end->rank; axis++) {
            const char *name = end->axes[axis].name;
            if (name != NULL && strcmp(name, "query_len") == 0) return inputs[i].dims[axis] == 1;
        }
    }
    return false;
}

bool graphs_run(const Graphs *graphs, const Tensor *inputs, Tensor *outputs, Error *error) {
    bool single = graphs->single != NULL && is_single(inputs);
    return model_run(single ? graphs->single : graphs->any, inputs, BUNDLE.input_count,
                     BUNDLE.bound, BUNDLE.bound_count, outputs, error);
}

/* -- the order of axes ------------------------------------------------------------------- */

static bool is_ordered(const End *end) {
    for (size_t axis = 0; axis < end->rank; axis++) {
        if (end->order[axis] != axis) return false;
    }
    return true;
}

static bool reorder(Tensor *tensor, const size_t *order, Error *error) {
    Tensor ordered = {0};
    if (!tensor_permute(tensor, order, &ordered, error)) return false;
    tensor_free(tensor);
    *tensor = ordered;
    return true;
}

bool to_graph(Tensor *inputs, Error *error) {
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        const End *end = &BUNDLE.inputs[i];
        if (!is_ordered(end) && !reorder(&inputs[i], end->order, error)) return false;
    }
    return true;
}

bool from_graph(Tensor *outputs, size_t count, Error *error) {
    for (size_t i = 0; i < BUNDLE.output_count; i++) {
        const End *end = &BUNDLE.outputs[i];
        Tensor *output = tensor_find(outputs, count, end->name);
        if (is_ordered(end) || output == NULL || output->rank != end->rank) continue;
        size_t back[MAX_RANK];
        for (size_t axis = 0; axis < end->rank; axis++) back[end->order[axis]] = axis;
        if (!reorder(output, back, error)) return false;
    }
    return true;
}
