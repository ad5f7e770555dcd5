// What this project knows of its bundle. bundle.cpp was written from the bundle's index.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "judge.h"
#include "model.h"

namespace attention {

// The rows of a table that is compiled in.
template <typename Row>
class Rows {
public:
    constexpr Rows() = default;
    template <std::size_t count>
    constexpr Rows(const Row (&rows)[count]) : first_(rows), count_(count) {}

    constexpr const Row* begin() const { return first_; }
    constexpr const Row* end() const { return first_ + count_; }
    constexpr std::size_t size() const { return count_; }
    constexpr const Row& operator[](std::size_t at) const { return first_[at]; }

private:
    const Row* first_ = nullptr;
    std::size_t count_ = 0;
};

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
};

// A golden case: files below golden/, and a tolerance for each output.
struct Case {
    std::string_view name, folder;
    Rows<Tolerance> tolerances;
};

enum class Cache { none, append, in_place };

struct Bundle {
    std::string_view name, graph;
    Cache cache;
    Rows<End> inputs, outputs;
    Rows<Case> cases;
    std::optional<std::size_t> replay;  // the case that is also fed token by token
    Bindings bound;
};

const Bundle& bundle();

std::vector<std::string> names_of(Rows<End> ends);

}  // namespace attention
