/* The KV cache of a decode: cache outputs of one step are inputs of the next one. */
#ifndef CACHE_H
#define CACHE_H

#include "tensor.h"

/* Moves each output that is a cache of the next step to its input. */
bool feed_back(Tensor *inputs, size_t input_count, Tensor *outputs, size_t output_count,
               Error *error);

#endif
