// A golden case run token by token, which must give the same as the whole case at once.
#pragma once

#include <vector>

#include "graphs.h"

namespace attention {

// Returns one tensor per output of the bundle, with the results of all steps. `inputs` are those of
// the whole case; `truths` are its true outputs, of which only shapes are used. Both must match the
// signature. Throws if the outputs of a step have an unexpected shape.
std::vector<Tensor> replay(Graphs& graphs, const std::vector<Tensor>& inputs,
                           const std::vector<Tensor>& truths);

}  // namespace attention
