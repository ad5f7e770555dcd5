#include "cache.h"

#include "bundle.h"

namespace attention {

void feed_back(std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) {
    for (std::size_t i = 0; i < inputs.size(); i++) {
        const End& end = bundle().inputs[i];
        if (end.present.empty()) continue;
        const Tensor* present = find(outputs, end.present);
        if (present != nullptr) inputs[i] = present->renamed(std::string(end.name));
    }
}

}  // namespace attention
