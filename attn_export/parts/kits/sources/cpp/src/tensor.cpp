#include "tensor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core.h"

namespace attention {

namespace {

int code_of(DType dtype) { return static_cast<int>(dtype); }

::Tensor empty_in_c(const std::string& name, DType dtype, const Dims& dims) {
    ::Error error;
    ::Tensor made;
    if (!::tensor_new(name.c_str(), code_of(dtype), dims.size(), dims.data(), &made, &error)) {
        throw std::invalid_argument(error.text);
    }
    return made;
}

}  // namespace

::Tensor in_c(const Tensor& tensor) {
    const Dims& dims = tensor.dims();
    if (dims.size() > MAX_RANK) {
        throw std::invalid_argument(tensor.name() + " has " + std::to_string(dims.size()) + " axes");
    }
    ::Tensor found{};
    found.name = const_cast<char*>(tensor.name().c_str());  // C code does not write to it
    found.dtype = code_of(tensor.dtype());
    found.rank = dims.size();
    std::copy(dims.begin(), dims.end(), found.dims);
    found.data = tensor.data();
    return found;
}

Tensor taken(::Tensor made) {
    std::shared_ptr<std::byte> elements(static_cast<std::byte*>(made.data),
                                        [made](std::byte*) mutable { ::tensor_free(&made); });
    return Tensor(made.name, static_cast<DType>(made.dtype), Dims(made.dims, made.dims + made.rank),
                  std::move(elements));
}

std::size_t element_bytes(DType dtype) {
    const std::size_t bytes = ::element_bytes(code_of(dtype));
    if (bytes > 0) return bytes;
    throw std::invalid_argument("the unknown type " + std::to_string(code_of(dtype)));
}

bool is_floating(DType dtype) { return ::is_floating(code_of(dtype)); }

std::string to_text(const Dims& dims) {
    std::string text = "[";
    for (std::size_t axis = 0; axis < dims.size(); axis++) {
        text += (axis ? ", " : "") + std::to_string(dims[axis]);
    }
    return text + "]";
}

// -- a tensor -----------------------------------------------------------------------------

Tensor::Tensor(std::string name, DType dtype, Dims dims)
    : Tensor(taken(empty_in_c(name, dtype, dims))) {}

Tensor::Tensor(std::string name, DType dtype, Dims dims, std::shared_ptr<std::byte> elements)
    : name_(std::move(name)), dtype_(dtype), dims_(std::move(dims)),
      elements_(std::move(elements)) {}

std::size_t Tensor::count() const {
    const ::Tensor held = in_c(*this);
    return ::tensor_count(&held);
}

double Tensor::get(std::size_t at) const {
    const ::Tensor held = in_c(*this);
    return ::tensor_get(&held, at);
}

void Tensor::set(std::size_t at, double value) {
    ::Tensor held = in_c(*this);
    ::tensor_set(&held, at, value);
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

std::int64_t largest(const Tensor& tensor, std::int64_t count) {
    const ::Tensor held = in_c(tensor);
    const std::int64_t found = ::tensor_largest(&held, count);
    if (found < 0) throw std::out_of_range(tensor.name() + " has the shape " + to_text(tensor.dims()));
    return found;
}

// -- blocks -------------------------------------------------------------------------------

void copy_block(Tensor& to, const Dims& to_at, const Tensor& from, const Dims& from_at,
                const Dims& sizes) {
    const std::size_t rank = sizes.size();
    ::Tensor target = in_c(to);
    const ::Tensor source = in_c(from);
    ::Error error;
    if (to_at.size() != rank || from_at.size() != rank || source.rank != rank ||
        target.rank != rank) {
        throw std::out_of_range(from.name() + ": a block has other axes than its tensors");
    }
    if (!::tensor_copy_block(&target, to_at.data(), &source, from_at.data(), sizes.data(),
                             &error)) {
        throw std::out_of_range(error.text);
    }
}

Tensor permuted(const Tensor& tensor, const std::vector<std::size_t>& order) {
    if (order.size() != tensor.dims().size()) {
        throw std::out_of_range(tensor.name() + " has another number of axes");
    }
    const ::Tensor from = in_c(tensor);
    ::Tensor to;
    ::Error error;
    if (!::tensor_permute(&from, order.data(), &to, &error)) {
        throw std::invalid_argument(error.text);
    }
    return taken(to);
}

}  // namespace attention
