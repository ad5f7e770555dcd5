#include "steps.h"

#include "cache.h"

namespace attention {

namespace {

constexpr std::int64_t KEYS_OF_OTHERS = 16;

std::int64_t size_of(const Axis& axis, const Step& step) {
    if (axis.name.empty()) return axis.size;
    if (axis.name == "batch" || axis.name == "logit_count") return 1;
    if (axis.name == "query_len") return step.new_tokens;
    if (axis.name == "past_len") return step.held;
    if (axis.name == "total_len") return step.held + step.new_tokens;
    if (axis.name == "capacity") return step.capacity;
    return KEYS_OF_OTHERS;  // an axis of your own module: choose its size here
}

// Makes the inputs of a step. Caches start empty; later they are outputs of the last step.
void make_inputs(const Step& step, const Fill& fill, std::vector<Tensor>& inputs) {
    inputs.resize(bundle().inputs.size());
    for (std::size_t i = 0; i < inputs.size(); i++) {
        const End& end = bundle().inputs[i];
        if (!end.present.empty() && step.held > 0) continue;
        Dims dims;
        for (const std::size_t axis : end.order) dims.push_back(size_of(end.axes[axis], step));
        inputs[i] = Tensor(std::string(end.name), end.dtype, dims);
        if (end.name == "past_length") inputs[i].set(0, static_cast<double>(step.held));
        else if (end.present.empty()) fill(inputs[i], step);
    }
}

}  // namespace

std::vector<Tensor> run_step(Graphs& graphs, const Step& step, const Fill& fill,
                             std::vector<Tensor>& inputs) {
    make_inputs(step, fill, inputs);
    std::vector<Tensor> outputs = graphs.run(inputs);
    feed_back(inputs, outputs);
    return outputs;
}

}  // namespace attention
