#include "replay.h"

#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "graphs.h"

static const int64_t ORIGIN[MAX_RANK] = {0};

static bool is_axis(const End *end, size_t axis, const char *name) {
    const char *is = end->axes[axis].name;
    return is != NULL && strcmp(is, name) == 0;
}

/* Returns the index of an axis of an input or output, or the rank if it has no such axis. */
static size_t axis_of(const End *end, const char *name) {
    size_t axis = 0;
    while (axis < end->rank && !is_axis(end, axis, name)) axis++;
    return axis;
}

/* Returns the number of tokens of a case, or 0 and an error if it cannot be run by token. */
static int64_t token_count(const Tensor *inputs, Error *error) {
    int64_t tokens = 0;
    for (size_t i = 0; i < BUNDLE.input_count && tokens == 0; i++) {
        size_t axis = axis_of(&BUNDLE.inputs[i], "query_len");
        if (axis < BUNDLE.inputs[i].rank) tokens = inputs[i].dims[axis];
    }
    if (tokens == 0) fail(error, "the case has no tokens to feed one by one");
    for (size_t i = 0; i < BUNDLE.input_count && tokens > 0; i++) {
        const End *end = &BUNDLE.inputs[i];
        size_t keys = axis_of(end, "total_len"), capacity = axis_of(end, "capacity");
        bool fits = (keys == end->rank || inputs[i].dims[keys] == tokens) &&
                    (capacity == end->rank || inputs[i].dims[capacity] >= tokens);
        if (fits) continue;
        fail(error, "%.60s has %lld keys, expected those of %lld tokens", end->name,
             (long long)inputs[i].dims[keys < end->rank ? keys : capacity], (long long)tokens);
        tokens = 0;
    }
    return tokens;
}

/* -- one step's inputs ------------------------------------------------------------------- */

/* Returns the part of an input for token `at`: its row, and the keys up to it. */
static bool cut(const Tensor *whole, const End *end, int64_t at, Tensor *part, Error *error) {
    int64_t sizes[MAX_RANK], from[MAX_RANK] = {0};
    for (size_t axis = 0; axis < whole->rank; axis++) {
        sizes[axis] = whole->dims[axis];
        if (is_axis(end, axis, "total_len")) sizes[axis] = at + 1;
        if (is_axis(end, axis, "query_len")) {
            sizes[axis] = 1;
            from[axis] = at;
        }
    }
    if (!tensor_new(whole->name, whole->dtype, whole->rank, sizes, part, error)) return false;
    return tensor_copy_block(part, ORIGIN, whole, from, sizes, error);
}

/* Sets the inputs of the next token. Caches are set for the first token only. */
static bool next_inputs(const Tensor *wholes, int64_t at, Tensor *step, Error *error) {
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        const End *end = &BUNDLE.inputs[i];
        if (end->present != NULL && at > 0) continue;
        tensor_free(&step[i]);
        if (!cut(&wholes[i], end, at, &step[i], error)) return false;
        if (strcmp(end->name, "past_length") != 0) continue;
        for (size_t row = 0; row < tensor_count(&step[i]); row++) {
            tensor_set(&step[i], row, (double)at);
        }
    }
    return at > 0 || to_graph(step, error);
}

/* -- concatenation of outputs ------------------------------------------------------------ */

/*
 * Copies the output of a step to its row of the whole output. If the last axis is one of keys, it
 * is shorter than that of the whole, in which later keys have 0. Learned keys, which belong to no
 * token, are last.
 */
static bool place(const Tensor *part, const End *end, int64_t at, int64_t tokens, Tensor *whole,
                  Error *error) {
    size_t query = axis_of(end, "query_len"), last = end->rank - 1;
    bool fits = part->rank == end->rank && part->dtype == whole->dtype;
    for (size_t axis = 0; fits && axis < end->rank; axis++) {
        bool grows = axis == last && end->axes[axis].name != NULL;
        fits = axis == query ? part->dims[axis] == 1
               : grows       ? part->dims[axis] <= whole->dims[axis]
                             : part->dims[axis] == whole->dims[axis];
    }
    int64_t learned = fits && part->dims[last] < whole->dims[last] ? whole->dims[last] - tokens : 0;
    if (!fits || learned < 0 || learned > part->dims[last]) {
        char is[128];
        return fail(error, "%.60s has the shape %s after %lld tokens", end->name,
                    dims_text(part->dims, part->rank, is, sizeof is), (long long)at);
    }
    int64_t to[MAX_RANK] = {0}, from[MAX_RANK] = {0}, sizes[MAX_RANK];
    memcpy(sizes, part->dims, sizeof sizes);
    to[query] = at;
    sizes[last] = part->dims[last] - learned;
    if (!tensor_copy_block(whole, to, part, from, sizes, error)) return false;
    to[last] = whole->dims[last] - learned;
    from[last] = part->dims[last] - learned;
    sizes[last] = learned;
    return tensor_copy_block(whole, to, part, from, sizes, error);
}

/* Outputs without an axis of queries, such as caches, are complete after the last step. */
static bool collect(Tensor *outputs, size_t count, int64_t at, int64_t tokens, Tensor *wholes,
                    Error *error) {
    for (size_t i = 0; i < BUNDLE.output_count; i++) {
        const End *end = &BUNDLE.outputs[i];
        const Tensor *part = tensor_find(outputs, count, end->name);
        if (part == NULL) return fail(error, "the output %.60s is missing", end->name);
        if (axis_of(end, "query_len") < end->rank) {
            if (!place(part, end, at, tokens, &wholes[i], error)) return false;
        } else if (at == tokens - 1) {
            tensor_free(&wholes[i]);
            if (!tensor_new(end->name, part->dtype, part->rank, part->dims, &wholes[i], error)) {
                return false;
            }
            if (!tensor_copy_block(&wholes[i], ORIGIN, part, ORIGIN, part->dims, error)) return false;
        }
    }
    return true;
}

static bool take_steps(const Graphs *graphs, const Tensor *inputs, Tensor *step, Tensor *outputs,
                       Tensor *wholes, Error *error) {
    int64_t tokens = token_count(inputs, error);
    if (tokens == 0) return false;
    size_t output_count = model_output_count(graphs->any);
    for (int64_t at = 0; at < tokens; at++) {
        bool stepped = next_inputs(inputs, at, step, error) &&
                       graphs_run(graphs, step, outputs, error);
        if (!stepped) return false;
        stepped = collect(outputs, output_count, at, tokens, wholes, error) &&
                  feed_back(step, BUNDLE.input_count, outputs, output_count, error);
        tensors_free(outputs, output_count);
        if (!stepped) return false;
    }
    return true;
}

bool replay(const Graphs *graphs, const Tensor *inputs, const Tensor *references, Tensor *wholes,
            Error *error) {
    Tensor *step = calloc(BUNDLE.input_count, sizeof *step);
    Tensor *outputs = calloc(model_output_count(graphs->any) + 1, sizeof *outputs);
    bool replayed = step != NULL && outputs != NULL;
    if (!replayed) fail(error, "out of memory");
    for (size_t i = 0; i < BUNDLE.output_count; i++) wholes[i] = (Tensor){0};
    for (size_t i = 0; replayed && i < BUNDLE.output_count; i++) {
        const Tensor *reference = &references[i];
        replayed = tensor_new(reference->name, reference->dtype, reference->rank, reference->dims, &wholes[i], error);
    }
    replayed = replayed && take_steps(graphs, inputs, step, outputs, wholes, error) &&
               from_graph(wholes, BUNDLE.output_count, error);
    if (!replayed) tensors_free(wholes, BUNDLE.output_count);
    tensors_free(step, step != NULL ? BUNDLE.input_count : 0);
    free(step);
    free(outputs);
    return replayed;
}
