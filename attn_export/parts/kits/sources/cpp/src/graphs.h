// The graphs of the bundle: one for any number of tokens and, if the bundle has it, one for single
// tokens. In both, the axes of the cache may be in another order than in the signature.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "bundle.h"

namespace attention {

class Graphs {
public:
    // Throws std::runtime_error if graphs or weights are not regular files.
    explicit Graphs(const std::filesystem::path& folder, ModelOptions options = {});

    // Runs the graph that suits the number of tokens. Inputs are in the order of the bundle.
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
