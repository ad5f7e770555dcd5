// A plain tensor: a name, a type, dimensions, and elements in C order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace attention {

// Types of elements, as ONNX numbers them (TensorProto.DataType).
enum class DType : int {
    float32 = 1, uint8 = 2, int8 = 3, uint16 = 4, int16 = 5, int32 = 6, int64 = 7,
    boolean = 9, float16 = 10, float64 = 11, uint32 = 12, uint64 = 13, bfloat16 = 16,
};

// Returns the size of an element in bytes. Throws std::invalid_argument for an unknown type.
std::size_t element_bytes(DType dtype);
bool is_floating(DType dtype);

using Dims = std::vector<std::int64_t>;

// "[2, 5, 64]"
std::string to_text(const Dims& dims);

// A copy of a tensor shares its elements; `clone` copies them too.
class Tensor {
public:
    Tensor() = default;
    // A tensor of zeros that owns its elements.
    Tensor(std::string name, DType dtype, Dims dims);
    // A tensor of existing elements, which the pointer keeps alive.
    Tensor(std::string name, DType dtype, Dims dims, std::shared_ptr<std::byte> elements);

    const std::string& name() const { return name_; }
    DType dtype() const { return dtype_; }
    const Dims& dims() const { return dims_; }
    std::size_t count() const;
    std::size_t bytes() const { return count() * element_bytes(dtype_); }
    std::byte* data() const { return elements_.get(); }
    const std::shared_ptr<std::byte>& elements() const { return elements_; }

    // Pointer to the elements: as<float>() for float32, as<std::uint16_t>() for float16.
    template <typename T>
    T* as() const {
        if (sizeof(T) != element_bytes(dtype_)) {
            throw std::invalid_argument(name_ + " has elements of another size");
        }
        return reinterpret_cast<T*>(data());
    }

    // Returns the element with this index in C order, as a double.
    double get(std::size_t at) const;
    // Sets an element. For float16 and bfloat16 the value is rounded towards 0.
    void set(std::size_t at, double value);

    Tensor renamed(std::string name) const;
    Tensor clone() const;

private:
    std::string name_;
    DType dtype_ = DType::float32;
    Dims dims_;
    std::shared_ptr<std::byte> elements_;
};

// Returns the tensor of this name, or nullptr.
const Tensor* find(const std::vector<Tensor>& tensors, std::string_view name);

// Returns the index of the largest of the last `count` elements: the first one of equal ones. Throws
// std::out_of_range if there are fewer.
std::int64_t largest(const Tensor& tensor, std::int64_t count);

// Copies a block of `sizes` from index to index. Throws std::out_of_range if types or ranks differ,
// or if the block does not fit into both tensors.
void copy_block(Tensor& to, const Dims& to_at, const Tensor& from, const Dims& from_at,
                const Dims& sizes);

// Returns a transposed copy, whose axis i is axis `order[i]` of the tensor.
Tensor permuted(const Tensor& tensor, const std::vector<std::size_t>& order);

}  // namespace attention
