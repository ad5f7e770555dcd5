// The graphs of the bundle: one for any number of tokens and, where there is one, that for single
// tokens. Both hold the cache alike, which may be with its axes in another order.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "bundle.h"

namespace attention {

class Graphs {
public:
    // Throws std::runtime_error where graphs or weights are no regular files.
    explicit Graphs(const std::filesystem::path& folder, ModelOptions options = {});

    // Runs the graph for the number of tokens; the inputs are those of the bundle, in its order.
    std::vector<Tensor> run(const std::vector<Tensor>& inputs);

private:
    Model any_;
    std::optional<Model> single_;
};

// The inputs of the bundle's signature, with their axes in the order of the graph.
std::vector<Tensor> to_graph(std::vector<Tensor> inputs);

// Outputs of the graph, with their axes in the order of the bundle's signature.
std::vector<Tensor> from_graph(std::vector<Tensor> outputs);

}  // namespace attention
