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
    int threads = 0;    // for computing; 0: as many as ONNX Runtime chooses
    bool spin = false;  // waiting threads spin: best where runs follow each other closely
};

// Outputs that are to be written into the buffers of inputs, as a cache in place is:
// {{"present_key", "past_key"}}.
using Bindings = std::vector<std::pair<std::string, std::string>>;

// What ONNX Runtime refuses is thrown as Ort::Exception, which is a std::exception.
class Model {
public:
    explicit Model(const std::filesystem::path& graph, ModelOptions options = {});
    ~Model();
    Model(Model&&) noexcept;
    Model& operator=(Model&&) noexcept;

    // Runs once. The outputs come in the graph's order; those that are bound share the elements
    // of their input, all others have elements of their own.
    std::vector<Tensor> run(const std::vector<Tensor>& inputs, const Bindings& bound = {});

    const std::vector<std::string>& output_names() const;

private:
    struct Loaded;  // so that whoever uses a model needs not compile ONNX Runtime's headers
    std::unique_ptr<Loaded> loaded_;
};

// The version of ONNX Runtime that is really there.
std::string onnxruntime_version();

}  // namespace attention
