// Runs every golden case of the bundle through one loaded graph and judges what comes out.
//
//     self_test [BUNDLE]
//
// Ends with 0 where all is right, 1 where a number is wrong, 2 where the bundle cannot be read or
// ONNX Runtime refuses the graph.
#include <algorithm>
#include <exception>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <string>

#include "bundle.h"
#include "replay.h"
#include "tensorproto.h"

using namespace attention;

namespace {

std::string one_line(std::string text) {
    for (char& c : text) {
        if (c == '\n' || c == '\r') c = ' ';
    }
    return text;
}

// What is wrong with the outputs of a case, or empty; `worst` is their share of what is allowed.
std::string problem_of(const Case& one, const std::vector<Tensor>& outputs,
                       const std::vector<Tensor>& truths, double& worst) {
    for (const Tensor& output : outputs) {
        if (find(truths, output.name()) == nullptr) return output.name() + ": nobody asked for it";
    }
    for (std::size_t i = 0; i < truths.size(); i++) {
        const std::string& name = truths[i].name();
        const Tensor* got = find(outputs, name);
        if (got == nullptr) return name + ": it is missing";
        const Verdict verdict = judge(*got, truths[i], one.tolerances[i]);
        if (!verdict.passed()) return name + ": " + verdict.why;
        worst = std::max(worst, verdict.share);
    }
    return "";
}

// Runs a case, judges it, prints one line; whether it passed.
template <typename Run>
bool passes(const Case& one, std::string_view how, const std::vector<Tensor>& truths, Run run) {
    double worst = 0;
    std::string problem;
    try {
        problem = problem_of(one, run(), truths, worst);
    } catch (const std::exception& error) {
        problem = one_line(error.what());
    }
    if (!problem.empty()) {
        std::cout << "FAIL " << one.name << how << "  " << problem << '\n';
        return false;
    }
    std::cout << "ok   " << one.name << how << "  " << worst << " of allowed";
    for (std::size_t i = 0; i < truths.size(); i++) {
        const auto why = one.tolerances[i].unusable;
        if (!why.empty()) std::cout << "; " << truths[i].name() << " is not judged: " << why;
    }
    std::cout << '\n';
    return true;
}

// Whether all cases passed; throws where the bundle cannot be read or the graph is refused.
bool self_test(const std::filesystem::path& folder) {
    const Bundle& known = bundle();
    Model model(folder / known.graph);
    std::size_t passed = 0;
    const auto inputs_of = [&](const Case& one) {
        return read_tensors(folder / "golden" / one.folder, "input", names_of(known.inputs));
    };
    const auto truths_of = [&](const Case& one) {
        return read_tensors(folder / "golden" / one.folder, "output", names_of(known.outputs));
    };
    for (const Case& one : known.cases) {
        const auto inputs = inputs_of(one);
        passed += passes(one, "", truths_of(one), [&] { return model.run(inputs, known.bound); });
    }
    if (known.replay) {
        const Case& one = known.cases[*known.replay];
        const auto inputs = inputs_of(one), truths = truths_of(one);
        passed += passes(one, " token by token", truths,
                         [&] { return replay(model, inputs, truths); });
    }
    const std::size_t count = known.cases.size() + (known.replay ? 1 : 0);
    std::cout << known.name << ": " << passed << " of " << count << " passed, ONNX Runtime "
              << onnxruntime_version() << '\n';
    return passed == count;
}

}  // namespace

int main(int argc, char** argv) {
    std::cout << std::fixed << std::setprecision(3);
    try {
        return self_test(argc > 1 ? argv[1] : BUNDLE_FOLDER) ? 0 : 1;
    } catch (const std::exception& error) {
        std::cerr << "self_test: " << one_line(error.what()) << '\n';
        return 2;
    }
}
