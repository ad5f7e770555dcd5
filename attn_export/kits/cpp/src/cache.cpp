#include "cache.h"

namespace attention {

namespace {
constexpr std::string_view PAST = "past_", PRESENT = "present_", LENGTHS = "past_length";
}

bool is_cache(std::string_view input) {
    return input.substr(0, PAST.size()) == PAST && input != LENGTHS;
}

void feed_back(std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) {
    for (Tensor& input : inputs) {
        if (!is_cache(input.name())) continue;
        const Tensor* present = find(outputs, std::string(PRESENT) + input.name().substr(PAST.size()));
        if (present != nullptr) input = present->renamed(input.name());
    }
}

}  // namespace attention
