// Reads tensors and judges outputs with the C++ code of the kits. conformance.c describes the
// commands and the results.
#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "judge.h"
#include "tensorproto.h"

using namespace attention;

namespace {

using Fields = std::vector<std::string>;

std::string hex(const void* data, std::size_t size) {
    static const char digits[] = "0123456789abcdef";
    const auto* bytes = static_cast<const unsigned char*>(data);
    std::string text;
    for (std::size_t i = 0; i < size; i++) {
        text += digits[bytes[i] >> 4];
        text += digits[bytes[i] & 15];
    }
    return text;
}

std::string join(const Dims& dims) {
    std::string text;
    for (const std::int64_t size : dims) text += (text.empty() ? "" : ",") + std::to_string(size);
    return text;
}

std::string read_file(const Fields& field) {
    try {
        const Tensor tensor = read_tensor(field.at(1));
        return "read\t" + hex(tensor.name().data(), tensor.name().size()) + '\t' +
               std::to_string(static_cast<int>(tensor.dtype())) + '\t' + join(tensor.dims()) + '\t' +
               hex(tensor.data(), tensor.bytes());
    } catch (const std::exception& error) {
        return std::string("refused\t") + error.what();
    }
}

Verdict judge_files(const Fields& field) {
    const auto text = [&](std::size_t at) { return field.at(at) == "-" ? "" : field.at(at); };
    const std::string unusable = text(5), beyond_limit = text(6);
    Tolerance tolerance{std::nullopt, unusable, beyond_limit};
    if (field.at(3) != "-") tolerance.limits = Limits{std::stod(field[3]), std::stod(field[4])};
    // `Rows` is a view of an array of constant size.
    static std::int64_t rows[2];
    std::size_t count = 0;
    std::istringstream ignored(text(7));
    for (std::string row; std::getline(ignored, row, ',');) rows[count++] = std::stoll(row);
    const Tensor got = read_tensor(field.at(1)), truth = read_tensor(field.at(2));
    if (count == 0) return judge(got, truth, tolerance, {});
    if (count == 1) rows[1] = rows[0];
    return judge(got, truth, tolerance, Rows<std::int64_t>(rows));
}

std::string judged(const Fields& field) {
    static const char* const status[] = {"passed", "failed", "unusable"};
    const Verdict verdict = judge_files(field);
    char share[32];
    std::snprintf(share, sizeof share, "%.17g", verdict.share);
    return std::string(status[static_cast<int>(verdict.status)]) + '\t' + share + '\t' + verdict.why;
}

}  // namespace

int main() {
    for (std::string line; std::getline(std::cin, line);) {
        Fields field;
        std::istringstream words(line);
        for (std::string word; std::getline(words, word, '\t');) field.push_back(word);
        std::cout << (field.at(0) == "read" ? read_file(field) : judged(field)) << '\n';
    }
}
