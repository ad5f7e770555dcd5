#include "steps.h"

#include <stdlib.h>
#include <string.h>

#include "cache.h"

enum { KEYS_OF_OTHERS = 16 };

bool decode_open(const char *bundle, Decode *decode, Error *error) {
    *decode = (Decode){0};
    if (!graphs_open(bundle, (ModelOptions){.spin = true}, &decode->graphs, error)) return false;
    decode->output_count = model_output_count(decode->graphs.any);
    decode->inputs = calloc(BUNDLE.input_count + 1, sizeof(Tensor));
    decode->outputs = calloc(decode->output_count + 1, sizeof(Tensor));
    return (decode->inputs != NULL && decode->outputs != NULL) || fail(error, "out of memory");
}

void decode_close(Decode *decode) {
    if (decode->outputs != NULL) tensors_free(decode->outputs, decode->output_count);
    if (decode->inputs != NULL) tensors_free(decode->inputs, BUNDLE.input_count);
    free(decode->outputs);
    free(decode->inputs);
    graphs_close(&decode->graphs);
}

static int64_t size_of(const Axis *axis, Step step) {
    const char *name = axis->name;
    if (name == NULL) return axis->size;
    if (strcmp(name, "batch") == 0 || strcmp(name, "logit_count") == 0) return 1;
    if (strcmp(name, "query_len") == 0) return step.new_tokens;
    if (strcmp(name, "past_len") == 0) return step.held;
    if (strcmp(name, "total_len") == 0) return step.held + step.new_tokens;
    if (strcmp(name, "capacity") == 0) return step.capacity;
    return KEYS_OF_OTHERS; /* an axis of your own module: choose its size here */
}

/* Makes the inputs of a step. Caches start empty; later they are outputs of the last step. */
static bool make_inputs(Tensor *inputs, Step step, Fill fill, const void *context, Error *error) {
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        const End *end = &BUNDLE.inputs[i];
        if (end->present != NULL && step.held > 0) continue;
        int64_t dims[MAX_RANK];
        for (size_t axis = 0; axis < end->rank; axis++) {
            dims[axis] = size_of(&end->axes[end->order[axis]], step);
        }
        tensor_free(&inputs[i]);
        if (!tensor_new(end->name, end->dtype, end->rank, dims, &inputs[i], error)) return false;
        if (strcmp(end->name, "past_length") == 0) {
            tensor_set(&inputs[i], 0, (double)step.held);
        } else if (end->present == NULL) {
            fill(&inputs[i], step, context);
        }
    }
    return true;
}

bool decode_step(Decode *decode, Step step, Fill fill, const void *context, Error *error) {
    tensors_free(decode->outputs, decode->output_count);
    return make_inputs(decode->inputs, step, fill, context, error) &&
           graphs_run(&decode->graphs, decode->inputs, decode->outputs, error) &&
           feed_back(decode->inputs, BUNDLE.input_count, decode->outputs, decode->output_count,
                     error);
}
