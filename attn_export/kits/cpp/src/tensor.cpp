#include "tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

namespace attention {

namespace {

std::size_t product(const Dims& dims, std::size_t most) {
    if (std::any_of(dims.begin(), dims.end(), [](auto size) { return size < 0; })) {
        throw std::invalid_argument("a negative size in " + to_text(dims));
    }
    if (std::find(dims.begin(), dims.end(), 0) != dims.end()) return 0;
    std::size_t count = 1;
    for (std::int64_t size : dims) {
        if (static_cast<std::uint64_t>(size) > most / count) {
            throw std::invalid_argument(to_text(dims) + " is too large");
        }
        count *= static_cast<std::size_t>(size);
    }
    return count;
}

double from_half(std::uint16_t bits) {
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    const int exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
    if (exponent == 0x1f) {
        return fraction ? std::numeric_limits<double>::quiet_NaN()
                        : sign * std::numeric_limits<double>::infinity();
    }
    if (exponent == 0) return sign * std::ldexp(fraction, -24);
    return sign * std::ldexp(fraction + 0x400, exponent - 25);
}

std::uint16_t to_half(double value) {
    const unsigned sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs(value);
    if (std::isnan(value)) return 0x7e00;
    if (size >= 65536.0) return static_cast<std::uint16_t>(sign | 0x7c00);
    if (size < std::ldexp(1.0, -14)) {
        return static_cast<std::uint16_t>(sign | static_cast<unsigned>(std::ldexp(size, 24)));
    }
    int exponent;
    const double fraction = std::frexp(size, &exponent);  // in [0.5, 1)
    const auto kept = static_cast<unsigned>(std::ldexp(fraction, 11)) - 0x400;
    return static_cast<std::uint16_t>(sign | static_cast<unsigned>(exponent + 14) << 10 | kept);
}

// A bfloat16 is the upper half of a float32.
double from_bfloat(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

std::uint16_t to_bfloat(double value) {
    if (std::isnan(value)) return 0x7fc0;
    const auto narrow = static_cast<float>(value);
    std::uint32_t wide;
    std::memcpy(&wide, &narrow, sizeof wide);
    return static_cast<std::uint16_t>(wide >> 16);
}

}  // namespace

std::size_t element_bytes(DType dtype) {
    switch (dtype) {
        case DType::boolean: case DType::int8: case DType::uint8: return 1;
        case DType::float16: case DType::bfloat16: case DType::int16: case DType::uint16: return 2;
        case DType::float32: case DType::int32: case DType::uint32: return 4;
        case DType::float64: case DType::int64: case DType::uint64: return 8;
    }
    throw std::invalid_argument("the unknown type " + std::to_string(static_cast<int>(dtype)));
}

bool is_floating(DType dtype) {
    return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16 ||
           dtype == DType::bfloat16;
}

std::string to_text(const Dims& dims) {
    std::string text = "[";
    for (std::size_t axis = 0; axis < dims.size(); axis++) {
        text += (axis ? ", " : "") + std::to_string(dims[axis]);
    }
    return text + "]";
}

// -- a tensor -----------------------------------------------------------------------------

Tensor::Tensor(std::string name, DType dtype, Dims dims)
    : name_(std::move(name)), dtype_(dtype), dims_(std::move(dims)) {
    const std::size_t one = element_bytes(dtype_);
    const std::size_t bytes = product(dims_, std::numeric_limits<std::ptrdiff_t>::max() / one) * one;
    auto* elements = new std::byte[std::max<std::size_t>(bytes, 1)]();
    elements_ = std::shared_ptr<std::byte>(elements, std::default_delete<std::byte[]>());
}

Tensor::Tensor(std::string name, DType dtype, Dims dims, std::shared_ptr<std::byte> elements)
    : name_(std::move(name)), dtype_(dtype), dims_(std::move(dims)),
      elements_(std::move(elements)) {}

std::size_t Tensor::count() const {
    return product(dims_, std::numeric_limits<std::size_t>::max());
}

double Tensor::get(std::size_t at) const {
    switch (dtype_) {
        case DType::float32: return as<float>()[at];
        case DType::float64: return as<double>()[at];
        case DType::float16: return from_half(as<std::uint16_t>()[at]);
        case DType::bfloat16: return from_bfloat(as<std::uint16_t>()[at]);
        case DType::boolean: case DType::uint8: return as<std::uint8_t>()[at];
        case DType::int8: return as<std::int8_t>()[at];
        case DType::uint16: return as<std::uint16_t>()[at];
        case DType::int16: return as<std::int16_t>()[at];
        case DType::uint32: return as<std::uint32_t>()[at];
        case DType::int32: return as<std::int32_t>()[at];
        case DType::uint64: return static_cast<double>(as<std::uint64_t>()[at]);
        case DType::int64: return static_cast<double>(as<std::int64_t>()[at]);
    }
    return std::numeric_limits<double>::quiet_NaN();
}

void Tensor::set(std::size_t at, double value) {
    switch (dtype_) {
        case DType::float32: as<float>()[at] = static_cast<float>(value); break;
        case DType::float64: as<double>()[at] = value; break;
        case DType::float16: as<std::uint16_t>()[at] = to_half(value); break;
        case DType::bfloat16: as<std::uint16_t>()[at] = to_bfloat(value); break;
        case DType::boolean: as<std::uint8_t>()[at] = value != 0; break;
        case DType::uint8: as<std::uint8_t>()[at] = static_cast<std::uint8_t>(value); break;
        case DType::int8: as<std::int8_t>()[at] = static_cast<std::int8_t>(value); break;
        case DType::uint16: as<std::uint16_t>()[at] = static_cast<std::uint16_t>(value); break;
        case DType::int16: as<std::int16_t>()[at] = static_cast<std::int16_t>(value); break;
        case DType::uint32: as<std::uint32_t>()[at] = static_cast<std::uint32_t>(value); break;
        case DType::int32: as<std::int32_t>()[at] = static_cast<std::int32_t>(value); break;
        case DType::uint64: as<std::uint64_t>()[at] = static_cast<std::uint64_t>(value); break;
        case DType::int64: as<std::int64_t>()[at] = static_cast<std::int64_t>(value); break;
    }
}

Tensor Tensor::renamed(std::string name) const {
    return Tensor(std::move(name), dtype_, dims_, elements_);
}

Tensor Tensor::clone() const {
    Tensor copy(name_, dtype_, dims_);
    std::memcpy(copy.data(), data(), bytes());
    return copy;
}

const Tensor* find(const std::vector<Tensor>& tensors, std::string_view name) {
    for (const Tensor& tensor : tensors) {
        if (tensor.name() == name) return &tensor;
    }
    return nullptr;
}

// -- blocks -------------------------------------------------------------------------------

namespace {

// Whether a block lies within a tensor. Compared so that no sum can overflow.
bool holds_block(const Tensor& tensor, const Dims& at, const Dims& sizes) {
    const Dims& dims = tensor.dims();
    if (at.size() != dims.size() || sizes.size() != dims.size()) return false;
    for (std::size_t axis = 0; axis < dims.size(); axis++) {
        if (sizes[axis] < 0 || sizes[axis] > dims[axis]) return false;
        if (at[axis] < 0 || at[axis] > dims[axis] - sizes[axis]) return false;
    }
    return true;
}

}  // namespace

void copy_block(Tensor& to, const Dims& to_at, const Tensor& from, const Dims& from_at,
                const Dims& sizes) {
    if (to.dtype() != from.dtype() || !holds_block(to, to_at, sizes) ||
        !holds_block(from, from_at, sizes)) {
        throw std::out_of_range(from.name() + ": a block of " + to_text(sizes) +
                                " does not lie within both " + to_text(from.dims()) + " and " +
                                to_text(to.dims()));
    }
    if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;
    const std::size_t bytes = element_bytes(from.dtype()), rank = sizes.size();
    const std::size_t run = rank ? static_cast<std::size_t>(sizes.back()) * bytes : bytes;
    Dims within(rank, 0);
    const auto place = [&](const Tensor& tensor, const Dims& at) {
        std::int64_t flat = 0;
        for (std::size_t axis = 0; axis < rank; axis++) {
            flat = flat * tensor.dims()[axis] + at[axis] + within[axis];
        }
        return tensor.data() + static_cast<std::size_t>(flat) * bytes;
    };
    for (;;) {
        std::memcpy(place(to, to_at), place(from, from_at), run);
        // The next row: an odometer over all axes but the last.
        std::size_t axis = rank ? rank - 1 : 0;
        while (axis > 0 && ++within[axis - 1] == sizes[axis - 1]) within[--axis] = 0;
        if (axis == 0) return;
    }
}

Tensor permuted(const Tensor& tensor, const std::vector<std::size_t>& order) {
    const Dims& from = tensor.dims();
    const std::size_t bytes = element_bytes(tensor.dtype()), rank = order.size();
    Dims dims, steps, at(rank, 0);
    for (const std::size_t axis : order) {
        dims.push_back(from[axis]);
        std::int64_t step = 1;
        for (std::size_t inner = axis + 1; inner < rank; inner++) step *= from[inner];
        steps.push_back(step);
    }
    Tensor to(tensor.name(), tensor.dtype(), dims);
    std::int64_t place = 0;
    for (std::size_t i = 0; i < to.count(); i++) {
        std::memcpy(to.data() + i * bytes, tensor.data() + static_cast<std::size_t>(place) * bytes,
                    bytes);
        // The next element: an odometer over all axes.
        for (std::size_t axis = rank; axis-- > 0;) {
            place += steps[axis];
            if (++at[axis] < dims[axis]) break;
            place -= steps[axis] * dims[axis];
            at[axis] = 0;
        }
    }
    return to;
}

}  // namespace attention
