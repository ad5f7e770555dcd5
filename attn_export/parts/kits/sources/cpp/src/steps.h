// Steps of a decode at batch size 1, with the KV cache in between.
#pragma once

#include <functional>
#include <vector>

#include "graphs.h"

namespace attention {

// Sizes of one step: the number of new tokens, of cached tokens, and the cache's capacity.
struct Step {
    std::int64_t new_tokens, held, capacity;
};

// Sets the elements of an input, which is no cache and holds zeros.
using Fill = std::function<void(Tensor& tensor, const Step& step)>;

// Runs a step. The first one, which holds no tokens, makes the caches in `inputs`.
std::vector<Tensor> run_step(Graphs& graphs, const Step& step, const Fill& fill,
                             std::vector<Tensor>& inputs);

}  // namespace attention
