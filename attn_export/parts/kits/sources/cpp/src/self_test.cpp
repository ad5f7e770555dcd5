// Self-test: runs every golden case of the bundle and judges its outputs.
//
//     self_test [BUNDLE]
//
// Exit code 0: all cases passed; 1: a case failed or is no evidence; 2: the bundle cannot be read,
// or ONNX Runtime refuses a graph.
#include <algorithm>
#include <exception>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <string>

#include "bundle.h"
#include "bundle_check.h"
#include "graphs.h"
#include "replay.h"
#include "text.h"

using namespace attention;

namespace {

// Combines the verdicts on the outputs of a case: failed if one failed, else unusable if one is.
// The share is the largest one.
Verdict judge_all(const Case& one, const std::vector<Tensor>& outputs,
                  const std::vector<Tensor>& truths) {
    for (const Tensor& output : outputs) {
        if (find(truths, output.name()) == nullptr) {
            return {Status::failed, "unexpected output " + output.name()};
        }
    }
    Verdict all;
    for (std::size_t i = 0; i < truths.size(); i++) {
        const std::string& name = truths[i].name();
        const Tensor* got = find(outputs, name);
        if (got == nullptr) return {Status::failed, name + ": it is missing"};
        Verdict verdict = judge(*got, truths[i], one.tolerances[i], one.ignored_rows);
        if (!verdict.why.empty()) verdict.why = name + ": " + verdict.why;
        if (verdict.status == Status::failed) return verdict;
        all.share = std::max(all.share, verdict.share);
        if (all.status == Status::passed && verdict.status == Status::unusable) all = verdict;
    }
    return all;
}

// Runs and judges a case, prints a line, and returns whether it passed.
template <typename Run>
bool passes(const Case& one, std::string_view how, const std::vector<Tensor>& truths, Run run) {
    Verdict verdict;
    try {
        verdict = judge_all(one, run(), truths);
    } catch (const std::exception& error) {
        verdict = {Status::failed, error.what()};
    }
    if (verdict.status == Status::passed) {
        std::cout << "ok   " << one_line(one.name) << how << "  " << verdict.share << " of allowed\n";
        return true;
    }
    const char* is = verdict.status == Status::failed ? "FAIL " : "unusable ";
    std::cout << is << one_line(one.name) << how << "  " << one_line(verdict.why) << '\n';
    return false;
}

// Returns whether all cases passed. Throws if the bundle cannot be read or a graph is refused.
bool self_test(const std::filesystem::path& folder) {
    const Bundle& known = bundle();
    Graphs graphs(folder);
    std::size_t passed = 0;
    for (const Case& one : known.cases) {
        const LoadedCase loaded = read_case(folder, one);
        passed += passes(one, "", loaded.truths,
                         [&] { return from_graph(graphs.run(to_graph(loaded.inputs))); });
    }
    if (known.replay) {
        const Case& one = known.cases[*known.replay];
        const LoadedCase loaded = read_case(folder, one);
        passed += passes(one, " token by token", loaded.truths,
                         [&] { return replay(graphs, loaded.inputs, loaded.truths); });
    }
    const std::size_t count = known.cases.size() + (known.replay ? 1 : 0);
    std::cout << one_line(known.name) << ": " << passed << " of " << count << " passed, ONNX Runtime "
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
