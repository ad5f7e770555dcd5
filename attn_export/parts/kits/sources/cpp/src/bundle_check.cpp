#include "bundle_check.h"

#include <map>
#include <stdexcept>

#include "tensorproto.h"

namespace attention {

namespace {

// Sizes of named axes: each is that of the first axis so named.
using Sizes = std::map<std::string_view, std::int64_t>;

std::runtime_error unfit(const std::string& file, const std::string& what, const std::string& is,
                         const std::string& wanted) {
    return std::runtime_error(file + " has the " + what + " " + is + ", expected " + wanted);
}

void check_form(const std::string& file, const End& end, const Tensor& tensor) {
    const auto code = [](DType dtype) { return std::to_string(static_cast<int>(dtype)); };
    if (tensor.dtype() != end.dtype) {
        throw unfit(file, "type", code(tensor.dtype()), code(end.dtype));
    }
    if (tensor.dims().size() != end.axes.size()) {
        throw unfit(file, "rank", std::to_string(tensor.dims().size()),
                    std::to_string(end.axes.size()));
    }
}

void check_sizes(const std::string& file, const End& end, const Tensor& tensor, Sizes& sizes) {
    Dims wanted;
    for (const Axis& axis : end.axes) {
        const std::int64_t is = tensor.dims()[wanted.size()];
        wanted.push_back(axis.name.empty() ? axis.size : sizes.emplace(axis.name, is).first->second);
    }
    if (wanted != tensor.dims()) throw unfit(file, "shape", to_text(tensor.dims()), to_text(wanted));
}

// Checks that the new tokens fit into the cache, into which they are written from past_length on.
void check_lengths(const std::string& file, const Tensor& lengths, const Sizes& sizes) {
    const auto capacity = sizes.find("capacity"), tokens = sizes.find("query_len");
    if (capacity == sizes.end() || tokens == sizes.end()) return;
    const std::int64_t most = capacity->second - tokens->second;
    for (std::size_t i = 0; i < lengths.count(); i++) {
        const double length = lengths.get(i);
        if (length >= 0 && length <= static_cast<double>(most)) continue;
        throw std::runtime_error(file + " holds " + std::to_string(length) + ", expected 0 to " +
                                 std::to_string(most));
    }
}

std::string named(const std::filesystem::path& folder, const char* stem, std::size_t at,
                  const Tensor& tensor) {
    return path_end(folder / (stem + std::to_string(at) + ".pb")) + ": " + tensor.name();
}

}  // namespace

std::filesystem::path graph_in(const std::filesystem::path& folder) {
    for (const std::string_view file : bundle().files) check_regular(folder / file);
    return folder / bundle().graph;
}

LoadedCase read_case(const std::filesystem::path& folder, const Case& one) {
    const auto place = folder / "golden" / one.folder;
    const Bundle& known = bundle();
    const LoadedCase loaded{read_tensors(place, "input", names_of(known.inputs)),
                            read_tensors(place, "output", names_of(known.outputs))};
    Sizes sizes;
    const auto check = [&](const char* stem, const auto& ends, const auto& tensors) {
        for (std::size_t i = 0; i < ends.size(); i++) {
            const std::string file = named(place, stem, i, tensors[i]);
            check_form(file, ends[i], tensors[i]);
            check_sizes(file, ends[i], tensors[i], sizes);
        }
    };
    check("input_", known.inputs, loaded.inputs);
    check("output_", known.outputs, loaded.truths);
    for (std::size_t i = 0; i < known.inputs.size(); i++) {
        if (known.inputs[i].name != "past_length") continue;
        check_lengths(named(place, "input_", i, loaded.inputs[i]), loaded.inputs[i], sizes);
    }
    return loaded;
}

}  // namespace attention
