// Holds a graph and runs it for the process that started this one, on ONNX Runtime's C++ API.
//
//     serve GRAPH THREADS
//
// parts/kits/program.py defines its messages on stdin and stdout. It ends with its input, or with exit
// code 1 if a message is invalid.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// -- tensors --------------------------------------------------------------------------------

using Dims = std::vector<std::int64_t>;

struct Tensor {
    std::string name;
    int dtype = 0;  // as ONNX numbers types, and ONNX Runtime, too
    Dims dims;
    std::vector<char> elements;
};

// The bytes of an element by its type; 0: none that this program holds.
constexpr std::size_t ELEMENT_BYTES[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8, 0, 0, 2};

std::size_t bytes_of(const std::string& name, int dtype, const Dims& dims) {
    constexpr std::size_t most = std::numeric_limits<std::ptrdiff_t>::max();
    const bool listed = dtype > 0 && dtype < static_cast<int>(std::size(ELEMENT_BYTES));
    std::size_t bytes = listed ? ELEMENT_BYTES[dtype] : 0;
    if (bytes == 0) throw std::runtime_error("the unknown type " + std::to_string(dtype));
    for (const std::int64_t size : dims) {
        if (size < 0 || (size > 0 && bytes > most / static_cast<std::size_t>(size))) {
            throw std::runtime_error(name + " has the size " + std::to_string(size));
        }
        bytes *= static_cast<std::size_t>(size);
    }
    return bytes;
}

// -- messages that are read -----------------------------------------------------------------

struct Request {
    std::vector<Tensor> inputs;
    std::vector<std::pair<std::string, std::string>> bound;  // outputs, and the inputs they overwrite
};

std::string read_line() {
    std::string line;
    if (!std::getline(std::cin, line)) throw std::runtime_error("the input ended within a request");
    return line;
}

// DTYPE RANK DIM ... NAME, then the elements.
Tensor read_tensor() {
    const std::string line = read_line();
    std::istringstream words(line);
    std::size_t rank = 0;
    Tensor tensor;
    words >> tensor.dtype >> rank;
    for (std::int64_t size; words && tensor.dims.size() < rank && words >> size;) {
        tensor.dims.push_back(size);
    }
    if (!words || words.get() != ' ' || !std::getline(words, tensor.name)) {
        throw std::runtime_error(line.substr(0, 80) + " is no tensor");
    }
    const std::size_t bytes = bytes_of(tensor.name, tensor.dtype, tensor.dims);
    tensor.elements.reserve(bytes + 1);  // so that the pointer of an empty one is not null
    tensor.elements.resize(bytes);
    std::cin.read(tensor.elements.data(), static_cast<std::streamsize>(bytes));
    if (static_cast<std::size_t>(std::cin.gcount()) == bytes) return tensor;
    throw std::runtime_error("the input ended within " + tensor.name);
}

// `run INPUTS BOUND` and what follows it; nothing at the end of the input.
std::optional<Request> read_request() {
    std::string line, word;
    if (!std::getline(std::cin, line)) return std::nullopt;
    std::istringstream words(line);
    std::size_t inputs = 0, bound = 0;
    if (!(words >> word >> inputs >> bound) || word != "run") {
        throw std::runtime_error(line.substr(0, 80) + " is no request");
    }
    Request request;
    while (request.inputs.size() < inputs) request.inputs.push_back(read_tensor());
    while (request.bound.size() < bound) {
        const std::string pair = read_line();
        const auto tab = pair.find('\t');
        if (tab == std::string::npos) throw std::runtime_error(pair + " is no bound output");
        request.bound.emplace_back(pair.substr(0, tab), pair.substr(tab + 1));
    }
    return request;
}

// -- the graph ------------------------------------------------------------------------------

Ort::Env make_env() {
    // Must come first, because an older library lacks functions that the headers declare.
    if (OrtGetApiBase()->GetApi(ORT_API_VERSION) == nullptr) {
        throw std::runtime_error(std::string("ONNX Runtime ") + OrtGetApiBase()->GetVersionString() +
                                 " is older than the headers that this was built with");
    }
    // Otherwise ONNX Runtime collects events in the home folder and sends them to its maker.
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    return Ort::Env(ORT_LOGGING_LEVEL_ERROR, "serve");
}

// Returns whether ONNX Runtime may by default compute products of 8-bit integers inexactly here, as
// may_be_inexact in model.c of the kit in C.
bool may_be_inexact() {
#if defined(__GNUC__) && defined(__x86_64__)
    return !__builtin_cpu_supports("avx512vnni");
#else
    return true;
#endif
}

Ort::SessionOptions session_options(const char* graph, int threads) {
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(threads);
    options.SetInterOpNumThreads(1);
    options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_ERROR);
    options.AddConfigEntry("session.intra_op.allow_spinning", "0");
    // Otherwise a product with dequantised weights rounds its inputs to 8 bits.
    options.AddConfigEntry("session.qdq_matmulnbits_accuracy_level", "1");
    std::string content;
    if (may_be_inexact()) {
        std::ifstream file(graph, std::ios::binary);
        content.assign(std::istreambuf_iterator<char>(file), {});
    }
    const auto has = [&](const char* name) { return content.find(name) != std::string::npos; };
    if (has("MatMulInteger")) options.AddConfigEntry("session.x64quantprecision", "1");
    // The attribute accuracy_level = 4 of MatMulNBits, as it is encoded in the file.
    if (has("MatMulInteger") || has("accuracy_level\x18\x04")) {
        options.AddConfigEntry("mlas.disable_kleidiai", "1");
    }
    return options;
}

class Graph {
public:
    Graph(const char* path, int threads)
        : env_(make_env()), session_(env_, path, session_options(path, threads)) {
        Ort::AllocatorWithDefaultOptions allocator;
        for (std::size_t i = 0; i < session_.GetOutputCount(); i++) {
            outputs_.emplace_back(session_.GetOutputNameAllocated(i, allocator).get());
        }
    }

    const std::vector<std::string>& outputs() const { return outputs_; }

    // Runs once. A bound output is written into the elements of its input.
    std::vector<Ort::Value> run(Request& request) {
        std::vector<const char*> input_names, output_names;
        std::vector<Ort::Value> given, made;
        for (Tensor& input : request.inputs) {
            input_names.push_back(input.name.c_str());
            given.push_back(value_of(input));
        }
        for (const std::string& name : outputs_) {
            output_names.push_back(name.c_str());
            made.emplace_back(nullptr);
        }
        for (const auto& [output, input] : request.bound) {
            made[place(output_names, output, "output")] =
                value_of(request.inputs[place(input_names, input, "input")]);
        }
        session_.Run(Ort::RunOptions{nullptr}, input_names.data(), given.data(), given.size(),
                     output_names.data(), made.data(), made.size());
        return made;
    }

private:
    Ort::Value value_of(Tensor& tensor) {
        return Ort::Value::CreateTensor(memory_, tensor.elements.data(), tensor.elements.size(),
                                        tensor.dims.data(), tensor.dims.size(),
                                        static_cast<ONNXTensorElementDataType>(tensor.dtype));
    }

    static std::size_t place(const std::vector<const char*>& names, const std::string& name,
                             const char* kind) {
        std::size_t at = 0;
        while (at < names.size() && names[at] != name) at++;
        if (at < names.size()) return at;
        throw std::invalid_argument(std::string("there is no ") + kind + ' ' + name);
    }

    Ort::Env env_;
    Ort::Session session_;
    Ort::MemoryInfo memory_ = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    std::vector<std::string> outputs_;
};

// -- messages that are written --------------------------------------------------------------

void say_error(const std::exception& error) {
    std::string text = error.what();
    for (char& c : text) {
        if (c == '\n' || c == '\r') c = ' ';
    }
    std::cout << "error " << text << '\n';
}

void say_tensor(const std::string& name, const Ort::Value& value) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const Dims dims = info.GetShape();
    std::cout << info.GetElementType() << ' ' << dims.size();
    for (const std::int64_t size : dims) std::cout << ' ' << size;
    std::cout << ' ' << name << '\n';
    std::cout.write(static_cast<const char*>(value.GetTensorRawData()),
                    static_cast<std::streamsize>(bytes_of(name, info.GetElementType(), dims)));
}

void answer(Graph& graph, Request& request) {
    std::vector<Ort::Value> outputs;
    try {
        outputs = graph.run(request);
    } catch (const std::exception& error) {
        say_error(error);
        return;
    }
    std::cout << "outputs " << outputs.size() << '\n';
    for (std::size_t i = 0; i < outputs.size(); i++) say_tensor(graph.outputs()[i], outputs[i]);
}

void serve(const char* path, int threads) {
    std::optional<Graph> graph;
    try {
        graph.emplace(path, threads);
    } catch (const std::exception& error) {
        say_error(error);
        return;
    }
    std::cout << R"(loaded {"version": ")" << OrtGetApiBase()->GetVersionString()
              << R"(", "providers": ["CPUExecutionProvider"]})" << std::endl;
    while (auto request = read_request()) {
        answer(*graph, *request);
        std::cout.flush();
    }
}

}  // namespace

int main(int argc, char** argv) {
    std::ios::sync_with_stdio(false);
    if (argc != 3) {
        std::cerr << "usage: serve GRAPH THREADS\n";
        return 1;
    }
    try {
        serve(argv[1], std::stoi(argv[2]));
        return 0;
    } catch (const std::exception& error) {
        std::cerr << "serve: " << error.what() << '\n';
        return 1;
    }
}
