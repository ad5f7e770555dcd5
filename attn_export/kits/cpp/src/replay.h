// A golden case fed token by token, as a decode goes: it has to give what the whole gives.
#pragma once

#include <vector>

#include "graphs.h"

namespace attention {

// What all steps gave, put together: one tensor for each output of the bundle. `inputs` are those
// of the whole case, `truths` its outputs, for their shapes; both fit the signature. Throws where a
// step gives what cannot be put together.
std::vector<Tensor> replay(Graphs& graphs, const std::vector<Tensor>& inputs,
                           const std::vector<Tensor>& truths);

}  // namespace attention
