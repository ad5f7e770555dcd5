// Facts about the bundle of this project. bundle.cpp was generated from the bundle's files.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "judge.h"
#include "model.h"

namespace attention {

// An axis: a fixed size, or a name if its size may differ from case to case.
struct Axis {
    std::string_view name;
    std::int64_t size;
};

// An input or output of the graph.
struct End {
    std::string_view name;
    std::string_view present;  // of a cache, the output that it is in the next step
    DType dtype;
    Rows<Axis> axes;
    Rows<std::size_t> order;  // axis i of the graph is axes[order[i]]
};

// A golden case: its folder in golden/, a tolerance for each output, and the batch elements that
// are not compared.
struct Case {
    std::string_view name, folder;
    Rows<Tolerance> tolerances;
    Rows<std::int64_t> ignored_rows;
};

// Of a whole model: the number of its token ids and of tokens that a cache may hold, and the ids
// that end a text. Of a layer, which takes no ids, 0.
struct Ids {
    std::int64_t vocabulary, most;
    Rows<std::int64_t> ends;
};

enum class Cache { none, append, in_place };

struct Bundle {
    std::string_view name, graph;
    std::string_view decode;       // the graph for single tokens, or ""
    Rows<std::string_view> files;  // files that ONNX Runtime opens: graphs and weights
    Cache cache;
    Rows<End> inputs, outputs;
    Rows<Case> cases;
    std::optional<std::size_t> replay;  // the case that is also run token by token
    Bindings bound;
    Ids ids;
};

const Bundle& bundle();

std::vector<std::string> names_of(Rows<End> ends);

}  // namespace attention
