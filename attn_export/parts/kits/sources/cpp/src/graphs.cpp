#include "graphs.h"

#include "bundle_check.h"

namespace attention {

namespace {

// Returns whether the inputs have one token for each batch element.
bool is_single(const std::vector<Tensor>& inputs) {
    for (std::size_t i = 0; i < inputs.size(); i++) {
        const Rows<Axis> axes = bundle().inputs[i].axes;
        for (std::size_t axis = 0; axis < axes.size(); axis++) {
            if (axes[axis].name == "query_len") return inputs[i].dims()[axis] == 1;
        }
    }
    return false;
}

bool is_ordered(Rows<std::size_t> order) {
    for (std::size_t axis = 0; axis < order.size(); axis++) {
        if (order[axis] != axis) return false;
    }
    return true;
}

}  // namespace

Graphs::Graphs(const std::filesystem::path& folder, ModelOptions options)
    : any_(graph_in(folder), options) {
    if (!bundle().decode.empty()) single_.emplace(folder / bundle().decode, options);
}

std::vector<Tensor> Graphs::run(const std::vector<Tensor>& inputs) {
    Model& model = single_ && is_single(inputs) ? *single_ : any_;
    return model.run(inputs, bundle().bound);
}

std::vector<Tensor> to_graph(std::vector<Tensor> inputs) {
    for (std::size_t i = 0; i < inputs.size(); i++) {
        const Rows<std::size_t> order = bundle().inputs[i].order;
        if (!is_ordered(order)) inputs[i] = permuted(inputs[i], {order.begin(), order.end()});
    }
    return inputs;
}

std::vector<Tensor> from_graph(std::vector<Tensor> outputs) {
    for (const End& end : bundle().outputs) {
        for (Tensor& output : outputs) {
            const bool is_it = output.name() == end.name && output.dims().size() == end.order.size();
            if (!is_it || is_ordered(end.order)) continue;
            std::vector<std::size_t> back(end.order.size());
            for (std::size_t axis = 0; axis < back.size(); axis++) back[end.order[axis]] = axis;
            output = permuted(output, back);
        }
    }
    return outputs;
}

}  // namespace attention
