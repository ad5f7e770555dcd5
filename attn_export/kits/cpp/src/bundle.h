// What this project knows of its bundle. bundle.cpp was written from the bundle's index.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "judge.h"
#include "model.h"

namespace attention {

// An axis has one size, or a name where it may have any.
struct Axis {
    std::string_view name;
    std::int64_t size;
};

// An input or output of the graph.
struct End {
    std::string_view name;
    DType dtype;
    Rows<Axis> axes;
    Rows<std::size_t> order;  // axis i is axes[order[i]] in the graph
};

// A golden case: files below golden/, a tolerance for each output, and the rows of the batch that
// are not compared.
struct Case {
    std::string_view name, folder;
    Rows<Tolerance> tolerances;
    Rows<std::int64_t> ignored_rows;
};

enum class Cache { none, append, in_place };

struct Bundle {
    std::string_view name, graph;
    std::string_view decode;       // the graph for single tokens, or ""
    Rows<std::string_view> files;  // those that ONNX Runtime opens: the graphs, their weights
    Cache cache;
    Rows<End> inputs, outputs;
    Rows<Case> cases;
    std::optional<std::size_t> replay;  // the case that is also fed token by token
    Bindings bound;
};

const Bundle& bundle();

std::vector<std::string> names_of(Rows<End> ends);

}  // namespace attention
