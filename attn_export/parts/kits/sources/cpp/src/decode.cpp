// Example of decoding with the KV cache: a prompt, then tokens one by one. The inputs are random
// numbers instead of the hidden states that your program would pass to the layer.
//
//     decode [TOKENS [BUNDLE]]
#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <random>

#include "bundle.h"
#include "cache.h"
#include "graphs.h"
#include "text.h"

using namespace attention;

namespace {

constexpr std::int64_t PROMPT = 8, TOKENS = 64, MOST_TOKENS = 1 << 20, KEYS_OF_OTHERS = 16;

// Sizes of one step: the number of new tokens, of cached tokens, and the cache's capacity.
struct Step {
    std::int64_t new_tokens, held, capacity;
};

std::int64_t size_of(const Axis& axis, const Step& step) {
    if (axis.name.empty()) return axis.size;
    if (axis.name == "batch") return 1;
    if (axis.name == "query_len") return step.new_tokens;
    if (axis.name == "past_len") return step.held;
    if (axis.name == "total_len") return step.held + step.new_tokens;
    if (axis.name == "capacity") return step.capacity;
    return KEYS_OF_OTHERS;  // an axis of your own module: choose its size here
}

// Fills an input: masks have no effect, positions count, states are random.
void fill(Tensor& tensor, const Step& step) {
    static std::mt19937 generator(0);
    std::uniform_int_distribution<int> sixty_fourths(-64, 64);
    for (std::size_t at = 0; at < tensor.count(); at++) {
        double value = 0;
        if (tensor.dtype() == DType::boolean) {
            value = 1;
        } else if (tensor.name() == "past_length") {
            value = static_cast<double>(step.held);
        } else if (tensor.name() == "position_ids") {
            value = static_cast<double>(step.held + static_cast<std::int64_t>(at) % step.new_tokens);
        } else if (is_floating(tensor.dtype()) && tensor.name() != "attn_mask") {
            value = sixty_fourths(generator) / 64.0;
        }
        tensor.set(at, value);
    }
}

// Makes the inputs of a step. Caches start empty; later they are outputs of the last step.
void make_inputs(const Step& step, std::vector<Tensor>& inputs) {
    inputs.resize(bundle().inputs.size());
    for (std::size_t i = 0; i < inputs.size(); i++) {
        const End& end = bundle().inputs[i];
        if (!end.present.empty() && step.held > 0) continue;
        Dims dims;
        for (const std::size_t axis : end.order) dims.push_back(size_of(end.axes[axis], step));
        inputs[i] = Tensor(std::string(end.name), end.dtype, dims);
        if (end.present.empty()) fill(inputs[i], step);
    }
}

void run_step(Graphs& graphs, const Step& step, std::vector<Tensor>& inputs) {
    make_inputs(step, inputs);
    const std::vector<Tensor> outputs = graphs.run(inputs);
    // Your program would use *find(outputs, "output") here.
    feed_back(inputs, outputs);
}

double now_ms() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(now).count();
}

void decode(const std::filesystem::path& folder, std::int64_t tokens) {
    ModelOptions options;
    options.spin = true;
    Graphs graphs(folder, options);
    std::vector<Tensor> inputs;
    const std::int64_t capacity = PROMPT + tokens;
    double start = now_ms();
    run_step(graphs, {PROMPT, 0, capacity}, inputs);
    std::cout << "prompt of " << PROMPT << " tokens: " << now_ms() - start << " ms\n";
    start = now_ms();
    for (std::int64_t held = PROMPT; held < capacity; held++) {
        run_step(graphs, {1, held, capacity}, inputs);
    }
    std::cout << tokens << " tokens: " << (now_ms() - start) / static_cast<double>(tokens)
              << " ms per token, cache " << (bundle().bound.empty() ? "fed back" : "written in place")
              << "; " << one_line(bundle().decode.empty() ? bundle().graph : bundle().decode) << '\n';
}

}  // namespace

int main(int argc, char** argv) {
    const std::int64_t tokens = argc > 1 ? std::strtoll(argv[1], nullptr, 10) : TOKENS;
    if (tokens < 1 || tokens > MOST_TOKENS) {
        std::cerr << "decode: give a number of tokens from 1 to " << MOST_TOKENS << '\n';
        return 2;
    }
    if (bundle().cache == Cache::none) {
        std::cout << one_line(bundle().name) << " has no KV cache: there is nothing to decode\n";
        return 0;
    }
    std::cout << std::fixed << std::setprecision(3);
    try {
        decode(argc > 2 ? argv[2] : BUNDLE_FOLDER, tokens);
        return 0;
    } catch (const std::exception& error) {
        std::cerr << "decode: " << one_line(error.what()) << '\n';
        return 2;
    }
}
