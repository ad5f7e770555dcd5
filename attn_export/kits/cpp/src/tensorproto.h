// Tensors in files: ONNX TensorProto, of which dims, data_type, name and raw_data are used.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tensor.h"

namespace attention {

// Throws std::runtime_error where the file holds no tensor.
Tensor read_tensor(const std::filesystem::path& path);

// Reads FOLDER/STEM_0.pb, FOLDER/STEM_1.pb ... into tensors, which have to bear these names.
std::vector<Tensor> read_tensors(const std::filesystem::path& folder, const std::string& stem,
                                 const std::vector<std::string>& names);

}  // namespace attention
