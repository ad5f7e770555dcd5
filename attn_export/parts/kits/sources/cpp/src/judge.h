// The rule by which an output passes, computed in double. The relative L2 error, over the whole
// output and over every row of the last axis, must be within the errors that the bundle allows.
// Rows that are 0 in the truth must be 0. NaN and infinities must be at the same positions as in
// the truth. Integers and bools must be equal. Batch elements that the bundle lists are ignored.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tensor.h"

namespace attention {

// A view of an array of constants.
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

// The errors allowed for an output of a case.
struct Tolerance {
    std::optional<Limits> limits;  // only for outputs of floating point
    std::string_view unusable;     // why the output is no evidence, or empty
    // The reason that the limits are no evidence, or empty. Other errors are still judged.
    std::string_view beyond_limit;
};

enum class Status { passed, failed, unusable };

struct Verdict {
    Status status = Status::passed;
    std::string why;   // empty where it passed
    double share = 0;  // error divided by the error allowed
};

// Throws std::out_of_range if the truth has no batch element that is to be ignored.
Verdict judge(const Tensor& got, const Tensor& truth, const Tolerance& tolerance,
              Rows<std::int64_t> ignored_rows);

}  // namespace attention
