// The rule by which an output passes, in double: relative L2 error, over the whole and over every
// row of the last axis, within what the bundle allows; rows that have to be 0 are 0; NaN and
// infinities are where the truth has them. Integers and bools are equal.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tensor.h"

namespace attention {

struct Limits {
    double whole, row;
};

// What is allowed of one output of one case.
struct Tolerance {
    std::optional<Limits> limits;  // floating point outputs have them
    std::string_view unusable;     // why the output is not judged, or empty
};

struct Verdict {
    std::string why;   // empty where it passed
    double share = 0;  // of what is allowed; 1 is the limit

    bool passed() const { return why.empty(); }
};

Verdict judge(const Tensor& got, const Tensor& truth, const Tolerance& tolerance);

}  // namespace attention
