/* The KV cache of a decode: what one step gives is what the next one gets. */
#ifndef CACHE_H
#define CACHE_H

#include "tensor.h"

/* Makes every output `present_X` the input `past_X` of the next step; it is no output then. */
bool feed_back(Tensor *inputs, size_t input_count, Tensor *outputs, size_t output_count,
               Error *error);

#endif
