// The KV cache of a decode: cache outputs of one step are inputs of the next one.
#pragma once

#include <vector>

#include "tensor.h"

namespace attention {

// Moves each output present_X to the input past_X, for the next step. No elements are copied.
void feed_back(std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs);

// Returns whether an input is a cache.
bool is_cache(std::string_view input);

}  // namespace attention
