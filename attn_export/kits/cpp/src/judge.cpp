#include "judge.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace attention {

namespace {

using Numbers = std::vector<double>;

std::string number(const char* format, double value) {
    char text[40];
    std::snprintf(text, sizeof text, format, value);
    return text;
}

std::string actual_and_expected(const Tensor& got, const Tensor& truth, std::size_t flat) {
    Dims at(truth.dims().size());
    std::size_t rest = flat;
    for (std::size_t axis = at.size(); axis-- > 0;) {
        const auto size = static_cast<std::size_t>(truth.dims()[axis]);
        at[axis] = static_cast<std::int64_t>(rest % size);
        rest /= size;
    }
    return to_text(at) + ": actual " + number("%.6g", got.get(flat)) + ", expected " +
           number("%.6g", truth.get(flat));
}

Verdict failed(std::string why) { return {Status::failed, std::move(why)}; }

// Says how many elements are wrong and which is the first; empty where none is.
template <typename IsWrong>
std::string wrong_elements(const std::string& what, const Tensor& got, const Tensor& truth,
                           IsWrong is_wrong) {
    std::size_t wrong = 0, first = 0;
    for (std::size_t i = 0; i < truth.count(); i++) {
        if (is_wrong(i) && wrong++ == 0) first = i;
    }
    if (wrong == 0) return "";
    return what + std::to_string(wrong) + " of " + std::to_string(truth.count()) +
           " elements, the first at " + actual_and_expected(got, truth, first);
}

std::string form_problem(const Tensor& got, const Tensor& truth) {
    if (got.dtype() != truth.dtype()) {
        return "its type is " + std::to_string(static_cast<int>(got.dtype())) + ", expected " +
               std::to_string(static_cast<int>(truth.dtype()));
    }
    if (got.dims() == truth.dims()) return "";
    return "its shape is " + to_text(got.dims()) + ", expected " + to_text(truth.dims());
}

// The output with the truth in the rows of the batch that are not compared.
Tensor without_rows(const Tensor& got, const Tensor& truth, Rows<std::int64_t> rows) {
    if (rows.size() == 0 || truth.dims().empty()) return got;
    Tensor compared = got.clone();
    Dims at(truth.dims().size(), 0), sizes = truth.dims();
    sizes[0] = 1;
    for (const std::int64_t row : rows) {
        if (row < 0 || row >= truth.dims()[0]) {
            throw std::out_of_range("there is no row " + std::to_string(row) + " to ignore");
        }
        at[0] = row;
        copy_block(compared, at, truth, at, sizes);
    }
    return compared;
}

// 0 for a number, and one each for NaN and the infinities.
int kind_of(double value) {
    if (std::isnan(value)) return 1;
    return std::isinf(value) ? (value > 0 ? 2 : 3) : 0;
}

// Of infinite elements it is known by then that they agree: they count as 0.
double finite(double value) { return std::isfinite(value) ? value : 0; }

// For every element whether it lies in a row that is 0 in the truth.
std::vector<bool> in_zero_row(const Numbers& t, std::size_t row_length) {
    std::vector<bool> found(t.size());
    for (std::size_t row = 0; row < t.size(); row += row_length) {
        const auto begin = t.begin() + static_cast<std::ptrdiff_t>(row);
        const bool zero = std::all_of(begin, begin + static_cast<std::ptrdiff_t>(row_length),
                                      [](double value) { return finite(value) == 0; });
        std::fill_n(found.begin() + static_cast<std::ptrdiff_t>(row), row_length, zero);
    }
    return found;
}

// Relative L2 errors: of the whole, and the largest of a row.
Limits measure(const Numbers& r, const Numbers& t, std::size_t row_length) {
    double largest = 0, all_t = 0, all_d = 0, worst_row = 0;
    for (double value : t) largest = std::max(largest, std::fabs(finite(value)));
    if (largest == 0) return {0, 0};
    for (std::size_t row = 0; row < t.size(); row += row_length) {
        double row_t = 0, row_d = 0;
        for (std::size_t i = row; i < row + row_length; i++) {
            // Squares of shares of the largest element: those of the elements may overflow.
            const double share = finite(t[i]) / largest;
            const double difference = (finite(r[i]) - finite(t[i])) / largest;
            row_t += share * share;
            row_d += difference * difference;
        }
        if (row_t > 0) worst_row = std::max(worst_row, row_d / row_t);
        all_t += row_t;
        all_d += row_d;
    }
    return {std::sqrt(all_d / all_t), std::sqrt(worst_row)};
}

std::size_t worst_element(const Numbers& r, const Numbers& t) {
    std::size_t worst = 0;
    double largest = -1;
    for (std::size_t i = 0; i < t.size(); i++) {
        const double distance = std::fabs(finite(r[i]) - finite(t[i]));
        if (distance > largest) {
            largest = distance;
            worst = i;
        }
    }
    return worst;
}

Verdict within(const Tensor& got, const Tensor& truth, const Numbers& r, const Numbers& t,
               std::size_t row_length, const Limits& allowed) {
    const Limits found = measure(r, t, row_length);
    Verdict verdict;
    verdict.share = std::max(found.whole / allowed.whole, found.row / allowed.row);
    const auto too_far = [&](double error, double limit, const char* over) {
        verdict.status = Status::failed;
        verdict.why = "relative error " + number("%.2e", error) + " over " + over + ", allowed " +
                      number("%.2e", limit) + "; worst at " +
                      actual_and_expected(got, truth, worst_element(r, t));
    };
    if (!(found.whole <= allowed.whole)) {
        too_far(found.whole, allowed.whole, "the whole output");
    } else if (!(found.row <= allowed.row)) {
        too_far(found.row, allowed.row, "one row");
    }
    return verdict;
}

Verdict judge_numbers(const Tensor& got, const Tensor& truth, const Limits& allowed) {
    Numbers r(truth.count()), t(truth.count());
    for (std::size_t i = 0; i < t.size(); i++) {
        r[i] = got.get(i);
        t[i] = truth.get(i);
    }
    const auto row_length =
        truth.dims().empty() ? std::size_t{1} : static_cast<std::size_t>(truth.dims().back());
    std::string why = wrong_elements("NaN or infinity in other places than the truth has them; ",
                                     got, truth,
                                     [&](auto i) { return kind_of(r[i]) != kind_of(t[i]); });
    if (!why.empty()) return failed(why);
    const auto zero = in_zero_row(t, row_length);
    why = wrong_elements("a row that has to be 0 is not; ", got, truth,
                         [&](auto i) { return zero[i] && finite(r[i]) != 0; });
    return why.empty() ? within(got, truth, r, t, row_length, allowed) : failed(why);
}

std::string exact_problem(const Tensor& got, const Tensor& truth) {
    const std::size_t bytes = element_bytes(truth.dtype());
    return wrong_elements("", got, truth, [&](auto i) {
        return std::memcmp(got.data() + i * bytes, truth.data() + i * bytes, bytes) != 0;
    });
}

}  // namespace

Verdict judge(const Tensor& got, const Tensor& truth, const Tolerance& tolerance,
              Rows<std::int64_t> ignored_rows) {
    if (const auto why = form_problem(got, truth); !why.empty()) return failed(why);
    const Tensor compared = without_rows(got, truth, ignored_rows);
    if (!tolerance.unusable.empty()) return {Status::unusable, std::string(tolerance.unusable)};
    if (!is_floating(truth.dtype())) {
        const auto why = exact_problem(compared, truth);
        return why.empty() ? Verdict{} : failed(why);
    }
    if (!tolerance.limits) return failed("the golden vectors do not say what error is allowed");
    return truth.count() == 0 ? Verdict{} : judge_numbers(compared, truth, *tolerance.limits);
}

}  // namespace attention
