/*
 * Example of decoding with the KV cache: a prompt, then tokens one by one. The inputs are random
 * numbers instead of the hidden states that your program would pass to the layer.
 *
 *     decode [TOKENS [BUNDLE]]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bundle.h"
#include "cache.h"
#include "graphs.h"

enum { PROMPT = 8, TOKENS = 64, MOST_TOKENS = 1 << 20, KEYS_OF_OTHERS = 16 };

/* Sizes of one step: the number of new tokens, of cached tokens, and the cache's capacity. */
typedef struct {
    int64_t new_tokens, held, capacity;
} Step;

static int64_t size_of(const Axis *axis, Step step) {
    const char *name = axis->name;
    if (name == NULL) return axis->size;
    if (strcmp(name, "batch") == 0) return 1;
    if (strcmp(name, "query_len") == 0) return step.new_tokens;
    if (strcmp(name, "past_len") == 0) return step.held;
    if (strcmp(name, "total_len") == 0) return step.held + step.new_tokens;
    if (strcmp(name, "capacity") == 0) return step.capacity;
    return KEYS_OF_OTHERS; /* an axis of your own module: choose its size here */
}

/* Returns the value of an element: masks have no effect, positions count, states are random. */
static double value_of(const Tensor *tensor, size_t at, Step step) {
    if (tensor->dtype == BOOL) return 1;
    if (strcmp(tensor->name, "past_length") == 0) return (double)step.held;
    if (strcmp(tensor->name, "position_ids") == 0) {
        return (double)(step.held + (int64_t)at % step.new_tokens);
    }
    if (!is_floating(tensor->dtype) || strcmp(tensor->name, "attn_mask") == 0) return 0;
    return (rand() % 129 - 64) / 64.0;
}

/* Makes the inputs of a step. Caches start empty; later they are outputs of the last step. */
static bool make_inputs(Step step, Tensor *inputs, Error *error) {
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        const End *end = &BUNDLE.inputs[i];
        if (end->present != NULL && step.held > 0) continue;
        int64_t dims[MAX_RANK];
        for (size_t axis = 0; axis < end->rank; axis++) {
            dims[axis] = size_of(&end->axes[end->order[axis]], step);
        }
        tensor_free(&inputs[i]);
        if (!tensor_new(end->name, end->dtype, end->rank, dims, &inputs[i], error)) return false;
        if (end->present != NULL) continue;
        for (size_t at = 0; at < tensor_count(&inputs[i]); at++) {
            tensor_set(&inputs[i], at, value_of(&inputs[i], at, step));
        }
    }
    return true;
}

static bool run_step(const Graphs *graphs, Step step, Tensor *inputs, Tensor *outputs, Error *error) {
    size_t count = model_output_count(graphs->any);
    if (!make_inputs(step, inputs, error)) return false;
    if (!graphs_run(graphs, inputs, outputs, error)) return false;
    /* Your program would use tensor_find(outputs, count, "output") here. */
    bool fed = feed_back(inputs, BUNDLE.input_count, outputs, count, error);
    tensors_free(outputs, count);
    return fed;
}

static double now_ms(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static bool decode(const Graphs *graphs, int64_t tokens, Tensor *inputs, Tensor *outputs,
                   Error *error) {
    int64_t capacity = PROMPT + tokens;
    double start = now_ms();
    if (!run_step(graphs, (Step){PROMPT, 0, capacity}, inputs, outputs, error)) return false;
    printf("prompt of %d tokens: %.3f ms\n", PROMPT, now_ms() - start);
    start = now_ms();
    for (int64_t held = PROMPT; held < capacity; held++) {
        if (!run_step(graphs, (Step){1, held, capacity}, inputs, outputs, error)) return false;
    }
    print_line(stdout, "%lld tokens: %.3f ms per token, cache %s; %.200s", (long long)tokens,
               (now_ms() - start) / (double)tokens,
               BUNDLE.bound_count > 0 ? "written in place" : "fed back",
               BUNDLE.decode != NULL ? BUNDLE.decode : BUNDLE.graph);
    return true;
}

int main(int argc, char **argv) {
    long tokens = argc > 1 ? strtol(argv[1], NULL, 10) : TOKENS;
    if (tokens < 1 || tokens > MOST_TOKENS) {
        fprintf(stderr, "decode: give a number of tokens from 1 to %d\n", MOST_TOKENS);
        return 2;
    }
    if (BUNDLE.cache == NO_CACHE) {
        print_line(stdout, "%.200s has no KV cache: there is nothing to decode", BUNDLE.name);
        return 0;
    }
    Graphs graphs;
    Error error;
    bool decoded = graphs_open(argc > 2 ? argv[2] : BUNDLE_FOLDER, (ModelOptions){.spin = true},
                               &graphs, &error);
    if (decoded) {
        Tensor *inputs = calloc(BUNDLE.input_count + 1, sizeof *inputs);
        Tensor *outputs = calloc(model_output_count(graphs.any) + 1, sizeof *outputs);
        decoded = inputs != NULL && outputs != NULL
                      ? decode(&graphs, tokens, inputs, outputs, &error)
                      : fail(&error, "out of memory");
        tensors_free(inputs, BUNDLE.input_count);
        free(inputs);
        free(outputs);
    }
    graphs_close(&graphs);
    if (!decoded) print_line(stderr, "decode: %s", error.text);
    return decoded ? 0 : 2;
}
