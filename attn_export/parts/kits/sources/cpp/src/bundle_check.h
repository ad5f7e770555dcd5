// Checks that the bundle's folder holds the bundle that this project was generated for.
#pragma once

#include <filesystem>
#include <vector>

#include "bundle.h"

namespace attention {

// Returns the path of the graph. Throws std::runtime_error if a graph or the weights are no regular
// files.
std::filesystem::path graph_in(const std::filesystem::path& folder);

struct LoadedCase {
    std::vector<Tensor> inputs, truths;
};

// Reads a case and checks types, ranks and sizes: a fixed axis must have its size, and axes of the
// same name the same size in all tensors. Throws std::runtime_error if something is wrong.
LoadedCase read_case(const std::filesystem::path& folder, const Case& one);

}  // namespace attention
