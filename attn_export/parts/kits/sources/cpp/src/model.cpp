#include "model.h"

#include <onnxruntime_cxx_api.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace attention {

namespace {

Ort::Env make_env() {
    // Must come first, because an older library lacks functions that the headers declare.
    if (OrtGetApiBase()->GetApi(ORT_API_VERSION) == nullptr) {
        throw std::runtime_error("ONNX Runtime " + onnxruntime_version() +
                                 " is older than the headers that this was built with");
    }
    // Otherwise ONNX Runtime collects events in the home folder and sends them to its maker.
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    return Ort::Env(ORT_LOGGING_LEVEL_ERROR, "model");
}

// Returns whether ONNX Runtime may by default compute products of 8-bit integers inexactly here.
// x86 processors with AVX2 but without VNNI saturate sums of two products. ARM processors use one
// scale per row where a graph has one per tensor or per block. The options that prevent this make
// other processors slower.
bool may_be_inexact() {
#if defined(__GNUC__) && defined(__x86_64__)
    return !__builtin_cpu_supports("avx512vnni");
#else
    return true;
#endif
}

std::string bytes_of(const std::filesystem::path& graph) {
    std::ifstream file(graph, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

Ort::SessionOptions session_options(const std::filesystem::path& graph, ModelOptions wanted) {
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(wanted.threads);
    options.SetInterOpNumThreads(1);
    options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_ERROR);
    options.AddConfigEntry("session.intra_op.allow_spinning", wanted.spin ? "1" : "0");
    // Otherwise a product with dequantised weights rounds its inputs to 8 bits.
    options.AddConfigEntry("session.qdq_matmulnbits_accuracy_level", "1");
    const std::string bytes = may_be_inexact() ? bytes_of(graph) : "";
    const auto has = [&](const char* name) { return bytes.find(name) != std::string::npos; };
    if (has("MatMulInteger")) options.AddConfigEntry("session.x64quantprecision", "1");
    // The attribute accuracy_level = 4 of MatMulNBits, as it is encoded in the file.
    if (has("MatMulInteger") || has("accuracy_level\x18\x04")) {
        options.AddConfigEntry("mlas.disable_kleidiai", "1");
    }
    return options;
}

// Returns a value that points to the elements of a tensor.
Ort::Value value_of(const Ort::MemoryInfo& memory, const Tensor& tensor) {
    // ONNX Runtime uses the same numbers for element types as ONNX.
    const auto type = static_cast<ONNXTensorElementDataType>(tensor.dtype());
    return Ort::Value::CreateTensor(memory, tensor.data(), tensor.bytes(), tensor.dims().data(),
                                    tensor.dims().size(), type);
}

// Returns a tensor that owns a value.
Tensor tensor_of(std::string name, Ort::Value value) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const auto dtype = static_cast<DType>(info.GetElementType());
    const auto owner = std::make_shared<Ort::Value>(std::move(value));
    auto* data = static_cast<std::byte*>(owner->GetTensorMutableRawData());
    return Tensor(std::move(name), dtype, info.GetShape(), std::shared_ptr<std::byte>(owner, data));
}

// Returns for each output the input into whose buffer it is written, or nullptr.
std::vector<const Tensor*> sources_of(const std::vector<std::string>& outputs,
                                      const std::vector<Tensor>& inputs, const Bindings& bound) {
    std::vector<const Tensor*> sources(outputs.size(), nullptr);
    for (const auto& [output, input] : bound) {
        const Tensor* source = find(inputs, input);
        if (source == nullptr) throw std::invalid_argument("there is no input " + input);
        std::size_t at = 0;
        while (at < outputs.size() && outputs[at] != output) at++;
        if (at == outputs.size()) throw std::invalid_argument("there is no output " + output);
        sources[at] = source;
    }
    return sources;
}

}  // namespace

struct Model::Loaded {
    Ort::Env env;
    Ort::Session session;
    Ort::MemoryInfo memory;
    std::vector<std::string> output_names;

    Loaded(const std::filesystem::path& graph, ModelOptions options)
        : env(make_env()), session(env, graph.c_str(), session_options(graph, options)),
          memory(Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault)) {
        Ort::AllocatorWithDefaultOptions allocator;
        for (std::size_t i = 0; i < session.GetOutputCount(); i++) {
            output_names.emplace_back(session.GetOutputNameAllocated(i, allocator).get());
        }
    }
};

Model::Model(const std::filesystem::path& graph, ModelOptions options)
    : loaded_(std::make_unique<Loaded>(graph, options)) {}

Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

const std::vector<std::string>& Model::output_names() const { return loaded_->output_names; }

std::vector<Tensor> Model::run(const std::vector<Tensor>& inputs, const Bindings& bound) {
    const auto& names = loaded_->output_names;
    const auto sources = sources_of(names, inputs, bound);
    std::vector<const char*> input_names, output_names;
    std::vector<Ort::Value> passed, made;
    for (const Tensor& input : inputs) {
        input_names.push_back(input.name().c_str());
        passed.push_back(value_of(loaded_->memory, input));
    }
    for (std::size_t i = 0; i < names.size(); i++) {
        output_names.push_back(names[i].c_str());
        // ONNX Runtime writes an output into the value that it is given.
        made.push_back(sources[i] ? value_of(loaded_->memory, *sources[i]) : Ort::Value{nullptr});
    }
    loaded_->session.Run(Ort::RunOptions{nullptr}, input_names.data(), passed.data(), passed.size(),
                 output_names.data(), made.data(), made.size());
    std::vector<Tensor> outputs;
    for (std::size_t i = 0; i < made.size(); i++) {
        outputs.push_back(sources[i] ? sources[i]->renamed(names[i])
                                     : tensor_of(names[i], std::move(made[i])));
    }
    return outputs;
}

std::string onnxruntime_version() { return OrtGetApiBase()->GetVersionString(); }

}  // namespace attention
