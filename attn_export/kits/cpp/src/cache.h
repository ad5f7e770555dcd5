// The KV cache of a decode: what one step gives is what the next one gets.
#pragma once

#include <vector>

#include "tensor.h"

namespace attention {

// Makes every output present_X the input past_X of the next step. Nothing is copied.
void feed_back(std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs);

// Whether an input is a cache.
bool is_cache(std::string_view input);

}  // namespace attention
