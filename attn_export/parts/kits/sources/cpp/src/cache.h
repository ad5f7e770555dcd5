// The KV cache of a decode: cache outputs of one step are inputs of the next one.
#pragma once

#include <vector>

#include "tensor.h"

namespace attention {

// Moves each output that is a cache of the next step to its input. No elements are copied.
void feed_back(std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs);

}  // namespace attention
