// A graph in ONNX Runtime, on the CPU: load it once, run it as often as you like.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensor.h"

namespace attention {

struct ModelOptions {
    int threads = 0;    // threads for computing; 0: the default of ONNX Runtime
    bool spin = false;  // threads spin while they wait: faster if runs follow each other closely
};

// Outputs that are written into the buffers of inputs, such as a cache in place:
// {{"present_key", "past_key"}}.
using Bindings = std::vector<std::pair<std::string, std::string>>;

// Errors of ONNX Runtime are thrown as Ort::Exception, which is a std::exception.
class Model {
public:
    explicit Model(const std::filesystem::path& graph, ModelOptions options = {});
    ~Model();
    Model(Model&&) noexcept;
    Model& operator=(Model&&) noexcept;

    // Runs once. The outputs are in the graph's order. Bound outputs share the elements of their
    // input; all others own their elements.
    std::vector<Tensor> run(const std::vector<Tensor>& inputs, const Bindings& bound = {});

    const std::vector<std::string>& output_names() const;

private:
    struct Loaded;  // keeps ONNX Runtime's headers out of this file
    std::unique_ptr<Loaded> loaded_;
};

// The version of the ONNX Runtime library that was loaded.
std::string onnxruntime_version();

}  // namespace attention
