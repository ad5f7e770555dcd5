#include "tensorproto.h"

#include <stdexcept>

#include "core.h"

namespace attention {

std::string path_end(const std::filesystem::path& path) { return ::path_end(path.c_str()); }

void check_regular(const std::filesystem::path& path) {
    ::Error error;
    if (!::file_is_regular(path.c_str(), &error)) throw std::runtime_error(error.text);
}

Tensor read_tensor(const std::filesystem::path& path) {
    ::Error error;
    ::Tensor read;
    if (!::tensor_read(path.c_str(), &read, &error)) throw std::runtime_error(error.text);
    return taken(read);
}

std::vector<Tensor> read_tensors(const std::filesystem::path& folder, const std::string& stem,
                                 const std::vector<std::string>& names) {
    std::vector<const char*> wanted;
    for (const std::string& name : names) wanted.push_back(name.c_str());
    std::vector<::Tensor> read(names.size());
    ::Error error;
    if (!::tensors_read(folder.c_str(), stem.c_str(), wanted.data(), wanted.size(), read.data(),
                        &error)) {
        throw std::runtime_error(error.text);
    }
    std::vector<Tensor> tensors;
    for (const ::Tensor& each : read) tensors.push_back(taken(each));
    return tensors;
}

}  // namespace attention
