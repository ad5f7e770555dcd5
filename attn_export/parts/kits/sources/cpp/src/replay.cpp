#include "replay.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "cache.h"

namespace attention {

namespace {

constexpr std::string_view NEW = "query_len", KEYS = "total_len", CAPACITY = "capacity",
                           LENGTHS = "past_length";

// Returns the index of an axis of an input or output, if it has the axis.
std::optional<std::size_t> axis_of(const End& end, std::string_view name) {
    const auto found = std::find_if(end.axes.begin(), end.axes.end(),
                                    [&](const Axis& axis) { return axis.name == name; });
    if (found == end.axes.end()) return std::nullopt;
    return static_cast<std::size_t>(found - end.axes.begin());
}

// Returns the number of tokens of a case. Throws if it cannot be run token by token.
std::int64_t token_count(const std::vector<Tensor>& inputs) {
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i < inputs.size() && tokens == 0; i++) {
        if (const auto axis = axis_of(bundle().inputs[i], NEW)) tokens = inputs[i].dims()[*axis];
    }
    if (tokens == 0) throw std::runtime_error("the case has no tokens to feed one by one");
    for (std::size_t i = 0; i < inputs.size(); i++) {
        const Dims& dims = inputs[i].dims();
        const auto keys = axis_of(bundle().inputs[i], KEYS), capacity = axis_of(bundle().inputs[i], CAPACITY);
        if ((!keys || dims[*keys] == tokens) && (!capacity || dims[*capacity] >= tokens)) continue;
        throw std::runtime_error(inputs[i].name() + " has the shape " + to_text(dims) +
                                 ", expected the keys of " + std::to_string(tokens) + " tokens");
    }
    return tokens;
}

// Returns the part of an input for token `at`: its row, and the keys up to it.
Tensor cut(const Tensor& whole, const End& end, std::int64_t at) {
    Dims sizes = whole.dims(), from(sizes.size(), 0);
    if (const auto keys = axis_of(end, KEYS)) sizes[*keys] = at + 1;
    if (const auto query = axis_of(end, NEW)) {
        sizes[*query] = 1;
        from[*query] = at;
    }
    Tensor part(whole.name(), whole.dtype(), sizes);
    copy_block(part, Dims(sizes.size(), 0), whole, from, sizes);
    return part;
}

// Sets the inputs of the next token. Caches are set for the first token only.
void next_inputs(const std::vector<Tensor>& wholes, std::int64_t at, std::vector<Tensor>& step) {
    for (std::size_t i = 0; i < wholes.size(); i++) {
        if (!bundle().inputs[i].present.empty() && at > 0) continue;
        step[i] = cut(wholes[i], bundle().inputs[i], at);
        if (wholes[i].name() != LENGTHS) continue;
        for (std::size_t row = 0; row < step[i].count(); row++) {
            step[i].set(row, static_cast<double>(at));
        }
    }
    if (at == 0) step = to_graph(std::move(step));
}

// Copies the output of a step to its row of the whole output. If the last axis is one of keys, it
// is shorter than that of the whole, in which later keys have 0. Learned keys, which belong to no
// token, are last.
void place(const Tensor& part, const End& end, std::size_t query, std::int64_t at,
           std::int64_t tokens, Tensor& whole) {
    const Dims &is = part.dims(), &wanted = whole.dims();
    const std::size_t last = end.axes.size() - 1;
    bool fits = is.size() == end.axes.size() && wanted.size() == is.size() && part.dtype() == whole.dtype();
    for (std::size_t axis = 0; fits && axis <= last; axis++) {
        const bool grows = axis == last && !end.axes[axis].name.empty();
        fits = axis == query ? is[axis] == 1
               : grows       ? is[axis] <= wanted[axis]
                             : is[axis] == wanted[axis];
    }
    const std::int64_t learned = fits && is[last] < wanted[last] ? wanted[last] - tokens : 0;
    if (!fits || learned < 0 || learned > is[last]) {
        throw std::runtime_error(std::string(end.name) + " has the shape " + to_text(is) + " after " +
                                 std::to_string(at) + " tokens");
    }
    Dims to(wanted.size(), 0), from(wanted.size(), 0), sizes = is;
    to[query] = at;
    sizes[last] = is[last] - learned;
    copy_block(whole, to, part, from, sizes);
    to[last] = wanted[last] - learned;
    from[last] = is[last] - learned;
    sizes[last] = learned;
    copy_block(whole, to, part, from, sizes);
}

std::runtime_error missing(std::string_view output) {
    return std::runtime_error("the output " + std::string(output) + " is missing");
}

}  // namespace

std::vector<Tensor> replay(Graphs& graphs, const std::vector<Tensor>& inputs,
                           const std::vector<Tensor>& truths) {
    const Bundle& known = bundle();
    const std::int64_t tokens = token_count(inputs);
    std::vector<Tensor> step(inputs.size()), wholes;
    for (const Tensor& truth : truths) {
        wholes.emplace_back(truth.name(), truth.dtype(), truth.dims());
    }
    for (std::int64_t at = 0; at < tokens; at++) {
        next_inputs(inputs, at, step);
        const std::vector<Tensor> outputs = graphs.run(step);
        for (std::size_t i = 0; i < wholes.size(); i++) {
            const End& end = known.outputs[i];
            const Tensor* part = find(outputs, end.name);
            if (part == nullptr) throw missing(end.name);
            if (const auto query = axis_of(end, NEW)) {
                place(*part, end, *query, at, tokens, wholes[i]);
            } else {
                wholes[i] = *part;  // complete after the last step, such as caches
            }
        }
        feed_back(step, outputs);
    }
    return from_graph(std::move(wholes));
}

}  // namespace attention
