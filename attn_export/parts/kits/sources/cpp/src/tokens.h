// Tokens of a whole model, one after the other.
#pragma once

#include <functional>
#include <vector>

#include "graphs.h"

namespace attention {

// Continues a prompt by at most `count` tokens, each that with the largest logit, until one ends the
// text. Calls `each` with every token as it comes. Throws std::invalid_argument if the bundle takes
// no ids or not so many, the prompt is empty, or an id is not in the vocabulary.
void generate(Graphs& graphs, const std::vector<std::int64_t>& prompt, std::int64_t count,
              const std::function<void(std::int64_t)>& each);

}  // namespace attention
