// Tensors in files: ONNX TensorProto, of which dims, data_type, name and raw_data are used.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tensor.h"

namespace attention {

// The end of a path, which says the most about it and fits into an error.
std::string path_end(const std::filesystem::path& path);

// Throws std::runtime_error unless the path leads to a regular file: what a pipe or a device gives
// may have no end.
void check_regular(const std::filesystem::path& path);

// Reads a regular file of at most 256 MiB. Throws std::runtime_error where it holds no tensor.
Tensor read_tensor(const std::filesystem::path& path);

// Reads FOLDER/STEM_0.pb, FOLDER/STEM_1.pb ... into tensors, which have to bear these names.
std::vector<Tensor> read_tensors(const std::filesystem::path& folder, const std::string& stem,
                                 const std::vector<std::string>& names);

}  // namespace attention
