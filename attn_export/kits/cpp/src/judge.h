// The rule by which an output passes, in double: relative L2 error, over the whole and over every
// row of the last axis, within what the bundle allows; rows that have to be 0 are 0; NaN and
// infinities are where the truth has them. Integers and bools are equal. Rows of the batch that the
// bundle names are not compared.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tensor.h"

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

struct Limits {
    double whole, row;
};

// What is allowed of one output of one case.
struct Tolerance {
    std::optional<Limits> limits;  // floating point outputs have them
    std::string_view unusable;     // why the output is no evidence, or empty
};

enum class Status { passed, failed, unusable };

struct Verdict {
    Status status = Status::passed;
    std::string why;   // empty where it passed
    double share = 0;  // of what is allowed; 1 is the limit
};

// Throws std::out_of_range where the truth does not have a row that is ignored.
Verdict judge(const Tensor& got, const Tensor& truth, const Tolerance& tolerance,
              Rows<std::int64_t> ignored_rows);

}  // namespace attention
