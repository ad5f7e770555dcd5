// Tests the bundle, runs it on an array of your own, decodes, generates, and embeds.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "attn_export.hpp"

constexpr char USAGE[] = "usage: attn self-test [BUNDLE] | run IN.npy BATCH OUT.npy [BUNDLE] | "
                         "decode TOKENS [BUNDLE] | generate ID,ID,... TOKENS [BUNDLE] | embed ID,ID,...";
attn::Error wrong(const std::string& text) { return {ATTN_ARGUMENT, text}; }

// Reads numbers with commas between them and after them; what is no number is -1.
attn::Dims numbers(const std::string& text) {
    attn::Dims found;
    std::istringstream words(text);
    for (std::string word; std::getline(words, word, ',');) {
        char* end = nullptr;
        found.push_back(std::strtoll(word.c_str(), &end, 10));
        if (end == word.c_str() || *end != '\0') found.back() = -1;
    }
    return found;
}
std::int64_t number(const std::string& text) { return numbers(text + ',').front(); }

bool self_test(const attn::Bundle& bundle) {
    std::int64_t count = bundle.get(ATTN_CASES), good = 0;
    for (std::int64_t index = 0; index < count; index++) {
        const auto [passed, line] = bundle.test_case(index);
        good += passed;
        std::cout << line << '\n';
    }
    std::cout << bundle.name() << ": " << good << " of " << count << " passed, ONNX Runtime "
              << bundle.runtime_version() << '\n';
    return good == count;
}

// Runs the bundle on the rows of a file, which are repeated until there are `batch`.
void run(const attn::Bundle& bundle, const std::string& path, std::int64_t batch, const std::string& out) {
    const std::string input = bundle.inputs()[0].name, output = bundle.outputs()[0].name;
    attn::Session session = bundle.session();
    session.load_input(input, path, batch);
    session.prefill();
    session.save_output(output, out);
    std::cout << out << ": " << output << '\n';
}

// Sets the inputs that a session does not make to zeros, for some tokens; returns their arrays.
auto set_zeros(const attn::Bundle& bundle, attn::Session& session, std::int64_t tokens) {
    std::vector<std::vector<std::byte>> arrays;
    for (const attn_value& input : bundle.inputs()) {
        if (!input.needed) continue;
        attn::Dims dims(input.dims, input.dims + input.rank);
        std::int64_t bytes = input.element_bytes;
        for (std::size_t at = 0; at < dims.size(); at++) {
            if (dims[at] < 0) dims[at] = input.axes[at] == std::string("query_len") ? tokens : 1;
            bytes *= dims[at];
        }
        session.set_input(input.name, dims, arrays.emplace_back(static_cast<std::size_t>(bytes)));
    }
    return arrays;
}

void decode(const attn::Bundle& bundle, std::int64_t tokens) {
    if (tokens < 1) throw wrong("TOKENS is a number from 1");
    if (bundle.get(ATTN_CACHE) == 0) throw wrong(bundle.name() + " has no KV cache to decode with");
    attn::Session session = bundle.session();
    auto arrays = set_zeros(bundle, session, 8);
    session.prefill(8 + 64);
    arrays = set_zeros(bundle, session, 1);
    const auto start = std::chrono::steady_clock::now();
    for (std::int64_t made = 0; made < tokens; made++) {
        // Your program would write the next token into its array here, and read `output`.
        if (made > 0 && made % 64 == 0) session.rewind(64);
        session.step();
    }
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    std::cout << tokens << " tokens: " << time.count() / static_cast<double>(tokens) << " ms per token, "
              << session.get(ATTN_HELD) << " held\n";
}

void generate(const attn::Bundle& bundle, const attn::Dims& ids, std::int64_t count) {
    attn::Session session = bundle.session();
    session.start(ids, count);
    while (const auto token = session.next()) std::cout << *token << ' ' << std::flush;
    std::cout << '\n';
}

// Prints the vectors of texts, in each word but the first the ids of one.
bool embed(const std::vector<std::string>& words, const char* ort) {
    const std::vector<std::string> ids(words.begin() + 1, words.end());
    std::vector<attn::Dims> texts;
    for (const std::string& text : ids) texts.push_back(numbers(text));
    const std::vector<float> vectors = attn::Bundle(BUNDLE_FOLDER, ort).embed(texts);
    const std::size_t width = vectors.size() / texts.size();
    std::cout.precision(9);
    for (std::size_t at = 0; at < vectors.size(); at++) std::cout << vectors[at] << ((at + 1) % width == 0 ? '\n' : ' ');
    return true;
}

bool command(const std::vector<std::string>& words) {
    const std::string what = words.empty() ? "" : words[0];
    const char* ort = std::getenv("ORT_DYLIB_PATH");
    if (what == "embed" && words.size() > 1) return embed(words, ort != nullptr ? ort : "");
    const std::size_t count = what == "self-test" ? 1 : what == "decode" ? 2 : what == "generate" ? 3 : 4;
    if ((count == 4 && what != "run") || words.size() < count || words.size() > count + 1) throw wrong(USAGE);
    const std::string folder = words.size() > count ? words[count] : BUNDLE_FOLDER;
    const attn::Bundle bundle(folder, ort != nullptr ? ort : "", 0, what == "decode" || what == "generate");
    if (what == "self-test") return self_test(bundle);
    if (what == "run") run(bundle, words[1], number(words[2]), words[3]);
    if (what == "decode") decode(bundle, number(words[1]));
    if (what == "generate") generate(bundle, numbers(words[1]), number(words[2]));
    return true;
}

int main(int argc, char** argv) try {
    return command({argv + std::min(argc, 1), argv + argc}) ? 0 : 1;
} catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 2;
}
