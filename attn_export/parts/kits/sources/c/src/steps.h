/* Steps of a decode at batch size 1, with the KV cache in between. */
#ifndef STEPS_H
#define STEPS_H

#include "graphs.h"

/* Sizes of one step: the number of new tokens, of cached tokens, and the cache's capacity. */
typedef struct {
    int64_t new_tokens, held, capacity;
} Step;

/* Sets the elements of an input, which is no cache and holds zeros. */
typedef void (*Fill)(Tensor *tensor, Step step, const void *context);

/* The graphs and the memory of a decode. */
typedef struct {
    Graphs graphs;
    Tensor *inputs, *outputs;
    size_t output_count;
} Decode;

/* Opens the graphs of a bundle. Close it even after an error. */
bool decode_open(const char *bundle, Decode *decode, Error *error);
void decode_close(Decode *decode);

/*
 * Runs a step. The first one, which holds no tokens, makes the caches. The caller may read
 * `outputs` until the next step.
 */
bool decode_step(Decode *decode, Step step, Fill fill, const void *context, Error *error);

#endif
