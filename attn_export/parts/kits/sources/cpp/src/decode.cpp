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

#include "steps.h"
#include "text.h"

using namespace attention;

namespace {

constexpr std::int64_t PROMPT = 8, TOKENS = 64, MOST_TOKENS = 1 << 20;

// Fills an input: masks have no effect, positions count, states are random.
void fill(Tensor& tensor, const Step& step) {
    static std::mt19937 generator(0);
    std::uniform_int_distribution<int> sixty_fourths(-64, 64);
    for (std::size_t at = 0; at < tensor.count(); at++) {
        double value = 0;
        if (tensor.dtype() == DType::boolean) {
            value = 1;
        } else if (tensor.name() == "position_ids") {
            value = static_cast<double>(step.held + static_cast<std::int64_t>(at) % step.new_tokens);
        } else if (is_floating(tensor.dtype()) && tensor.name() != "attn_mask") {
            value = sixty_fourths(generator) / 64.0;
        }
        tensor.set(at, value);
    }
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
    run_step(graphs, {PROMPT, 0, capacity}, fill, inputs);
    std::cout << "prompt of " << PROMPT << " tokens: " << now_ms() - start << " ms\n";
    start = now_ms();
    for (std::int64_t held = PROMPT; held < capacity; held++) {
        // Your program would use *find(outputs, "output") of what this returns.
        run_step(graphs, {1, held, capacity}, fill, inputs);
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
