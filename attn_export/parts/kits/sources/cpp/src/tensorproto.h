// Reading of ONNX TensorProto files, with the fields dims, data_type, name and raw_data.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tensor.h"

namespace attention {

// Returns the end of a path, short enough for an error message.
std::string path_end(const std::filesystem::path& path);

// Throws std::runtime_error unless the path leads to a regular file. Data of pipes and devices may
// have no end.
void check_regular(const std::filesystem::path& path);

// Reads a regular file of at most 256 MiB. Throws std::runtime_error where it holds no tensor.
Tensor read_tensor(const std::filesystem::path& path);

// Reads FOLDER/STEM_0.pb, FOLDER/STEM_1.pb ..., whose tensors must have these names in order.
std::vector<Tensor> read_tensors(const std::filesystem::path& folder, const std::string& stem,
                                 const std::vector<std::string>& names);

}  // namespace attention
