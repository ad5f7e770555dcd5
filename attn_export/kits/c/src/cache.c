#include "cache.h"

#include <stdio.h>
#include <string.h>

bool feed_back(Tensor *inputs, size_t input_count, Tensor *outputs, size_t output_count,
               Error *error) {
    for (size_t i = 0; i < input_count; i++) {
        if (strncmp(inputs[i].name, "past_", 5) != 0) continue;
        char name[256];
        snprintf(name, sizeof name, "present_%s", inputs[i].name + 5);
        Tensor *present = tensor_find(outputs, output_count, name);
        /* A bound output was already written into its input. past_length has no output. */
        if (present == NULL || present->data == inputs[i].data) continue;
        if (!tensor_rename(present, inputs[i].name, error)) return false;
        Tensor old = inputs[i];
        inputs[i] = *present;
        *present = old;
        /* The output keeps its name, so that tensor_find still finds it. */
        if (!tensor_rename(present, name, error)) return false;
    }
    return true;
}
