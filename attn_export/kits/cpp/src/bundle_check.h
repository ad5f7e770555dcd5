// Whether what lies in the bundle's folder is what this project was written for.
#pragma once

#include <filesystem>
#include <vector>

#include "bundle.h"

namespace attention {

// The path of the graph. Throws std::runtime_error where it or its weights are no regular files.
std::filesystem::path graph_in(const std::filesystem::path& folder);

struct LoadedCase {
    std::vector<Tensor> inputs, truths;
};

// Reads a case and checks types, ranks and sizes: an axis of a number has that size, and axes of
// one name have one size in all tensors. Throws std::runtime_error where something is wrong.
LoadedCase read_case(const std::filesystem::path& folder, const Case& one);

}  // namespace attention
