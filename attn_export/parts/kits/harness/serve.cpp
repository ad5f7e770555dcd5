// Holds a graph and runs it for the process that started this one.
//
//     serve GRAPH THREADS
//
// parts/kits/program.py defines its messages on stdin and stdout. It ends with its input, or with exit
// code 1 if a message is invalid.
#include <exception>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>

#include "model.h"

using namespace attention;

namespace {

struct Request {
    std::vector<Tensor> inputs;
    Bindings bound;
};

// -- heard --------------------------------------------------------------------------------

std::string hear_line() {
    std::string line;
    if (!std::getline(std::cin, line)) throw std::runtime_error("the input ended within a request");
    return line;
}

// DTYPE RANK DIM ... NAME, then the elements.
Tensor hear_tensor() {
    const std::string line = hear_line();
    std::istringstream words(line);
    int dtype = 0;
    std::size_t rank = 0;
    Dims dims;
    words >> dtype >> rank;
    for (std::int64_t size; words && dims.size() < rank && words >> size;) dims.push_back(size);
    std::string name;
    if (!words || words.get() != ' ' || !std::getline(words, name)) {
        throw std::runtime_error(line.substr(0, 80) + " is no tensor");
    }
    const Tensor tensor(name, static_cast<DType>(dtype), dims);
    const auto bytes = static_cast<std::streamsize>(tensor.bytes());
    std::cin.read(reinterpret_cast<char*>(tensor.data()), bytes);
    if (std::cin.gcount() != bytes) throw std::runtime_error("the input ended within " + name);
    return tensor;
}

// `run INPUTS BOUND` and what follows it; nothing at the end of the input.
std::optional<Request> hear_request() {
    std::string line, word;
    if (!std::getline(std::cin, line)) return std::nullopt;
    std::istringstream words(line);
    std::size_t inputs = 0, bound = 0;
    if (!(words >> word >> inputs >> bound) || word != "run") {
        throw std::runtime_error(line.substr(0, 80) + " is no request");
    }
    Request request;
    while (request.inputs.size() < inputs) request.inputs.push_back(hear_tensor());
    while (request.bound.size() < bound) {
        const std::string pair = hear_line();
        const auto tab = pair.find('\t');
        if (tab == std::string::npos) throw std::runtime_error(pair + " is no bound output");
        request.bound.emplace_back(pair.substr(0, tab), pair.substr(tab + 1));
    }
    return request;
}

// -- said ---------------------------------------------------------------------------------

void say_error(const std::exception& error) {
    std::string text = error.what();
    for (char& c : text) {
        if (c == '\n' || c == '\r') c = ' ';
    }
    std::cout << "error " << text << '\n';
}

void say_tensor(const Tensor& tensor) {
    std::cout << static_cast<int>(tensor.dtype()) << ' ' << tensor.dims().size();
    for (std::int64_t size : tensor.dims()) std::cout << ' ' << size;
    std::cout << ' ' << tensor.name() << '\n';
    std::cout.write(reinterpret_cast<const char*>(tensor.data()),
                    static_cast<std::streamsize>(tensor.bytes()));
}

void answer(Model& model, const Request& request) {
    std::vector<Tensor> outputs;
    try {
        outputs = model.run(request.inputs, request.bound);
    } catch (const std::exception& error) {
        say_error(error);
        return;
    }
    std::cout << "outputs " << outputs.size() << '\n';
    for (const Tensor& output : outputs) say_tensor(output);
}

void serve(const char* graph, int threads) {
    std::optional<Model> model;
    try {
        ModelOptions options;
        options.threads = threads;
        model.emplace(graph, options);
    } catch (const std::exception& error) {
        say_error(error);
        return;
    }
    std::cout << R"(loaded {"version": ")" << onnxruntime_version()
              << R"(", "providers": ["CPUExecutionProvider"]})" << std::endl;
    while (const auto request = hear_request()) {
        answer(*model, *request);
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
