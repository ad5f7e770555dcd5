#include "judge.h"

#include <stdexcept>

#include "core.h"

namespace attention {

Verdict judge(const Tensor& got, const Tensor& truth, const Tolerance& tolerance,
              Rows<std::int64_t> ignored_rows) {
    // judge() writes the truth into ignored batch elements, so it gets a copy.
    const Tensor compared = ignored_rows.size() > 0 ? got.clone() : got;
    const Limits limits = tolerance.limits.value_or(Limits{0, 0});
    const std::string unusable(tolerance.unusable), beyond_limit(tolerance.beyond_limit);
    const ::Tolerance allowed = {tolerance.limits.has_value(), limits.whole, limits.row,
                                 unusable.empty() ? nullptr : unusable.c_str(),
                                 beyond_limit.empty() ? nullptr : beyond_limit.c_str()};
    ::Tensor actual = in_c(compared);
    const ::Tensor wanted = in_c(truth);
    ::Verdict found;
    ::Error error;
    if (!::judge(&actual, &wanted, &allowed, {ignored_rows.begin(), ignored_rows.size()}, &found,
                 &error)) {
        throw std::out_of_range(error.text);
    }
    if (found.status == ::UNUSABLE) return {Status::unusable, found.why};
    const Status status = found.status == ::PASSED ? Status::passed : Status::failed;
    return {status, found.why, found.share};
}

}  // namespace attention
