#include "tensorproto.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string_view>

namespace attention {

namespace {

enum FieldNumber { dims_field = 1, data_type_field = 2, name_field = 8, raw_data_field = 9 };
constexpr std::uintmax_t MOST_BYTES = 1 << 28;  // golden vectors take 32 MiB altogether
constexpr std::size_t MOST_AXES = 8;

enum WireType { varint = 0, fixed64 = 1, length_delimited = 2, fixed32 = 5 };

// Reads a protobuf message from its start to its end.
class Reader {
public:
    explicit Reader(std::string_view rest) : rest_(rest) {}

    bool done() const { return rest_.empty(); }

    std::uint64_t number() {
        std::uint64_t value = 0;
        for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
            const auto byte = static_cast<unsigned char>(rest_.front());
            rest_.remove_prefix(1);
            value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
            if (byte < 0x80) return value;
        }
        throw std::runtime_error("the message was cut off");
    }

    std::string_view bytes(std::uint64_t length) {
        if (length > rest_.size()) throw std::runtime_error("the message was cut off");
        const auto found = rest_.substr(0, static_cast<std::size_t>(length));
        rest_.remove_prefix(found.size());
        return found;
    }

private:
    std::string_view rest_;
};

struct Field {
    std::uint64_t number = 0, value = 0;
    bool is_bytes = false;
    std::string_view bytes;
};

Field next_field(Reader& reader) {
    const std::uint64_t key = reader.number();
    Field field;
    field.number = key >> 3;
    switch (key & 7) {
        case varint: field.value = reader.number(); return field;
        case fixed64: field.bytes = reader.bytes(8); break;
        case fixed32: field.bytes = reader.bytes(4); break;
        case length_delimited: field.bytes = reader.bytes(reader.number()); break;
        default: throw std::runtime_error("it is no protobuf message");
    }
    field.is_bytes = true;
    return field;
}

std::int64_t as_size(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        throw std::runtime_error("it has a negative size");
    }
    return static_cast<std::int64_t>(value);
}

Tensor parse(std::string_view message) {
    std::string name;
    Dims dims;
    std::uint64_t dtype = 0;
    std::string_view raw;
    for (Reader reader(message); !reader.done();) {
        const Field field = next_field(reader);
        if (field.number == dims_field && field.is_bytes) {  // packed, as other writers may do
            for (Reader sizes(field.bytes); !sizes.done();) dims.push_back(as_size(sizes.number()));
        } else if (field.number == dims_field) {
            dims.push_back(as_size(field.value));
        } else if (field.number == data_type_field && !field.is_bytes) {
            dtype = field.value;
        } else if (field.number == name_field && field.is_bytes) {
            name = field.bytes;
        } else if (field.number == raw_data_field && field.is_bytes) {
            raw = field.bytes;
        }
    }
    if (dims.size() > MOST_AXES) throw std::runtime_error("it has too many axes");
    const auto kind = static_cast<DType>(dtype < 32 ? static_cast<int>(dtype) : 0);
    // The bytes first: sizes that make no sense would ask for any amount of memory.
    const Tensor shape(name, kind, dims, nullptr);
    if (raw.size() != shape.bytes()) {
        throw std::runtime_error("it holds " + std::to_string(raw.size()) +
                                 " bytes where its axes " + to_text(dims) + " ask for " +
                                 std::to_string(shape.bytes()));
    }
    Tensor tensor(name, kind, dims);
    if (!raw.empty()) std::memcpy(tensor.data(), raw.data(), raw.size());
    return tensor;
}

}  // namespace

std::string path_end(const std::filesystem::path& path) {
    const std::string text = path.string();
    return text.substr(text.size() - std::min<std::size_t>(text.size(), 80));
}

void check_regular(const std::filesystem::path& path) {
    std::error_code error;
    const auto found = std::filesystem::status(path, error);
    if (!std::filesystem::exists(found)) throw std::runtime_error(path_end(path) + " is not there");
    if (!std::filesystem::is_regular_file(found)) {
        throw std::runtime_error(path_end(path) + " is not a regular file");
    }
}

Tensor read_tensor(const std::filesystem::path& path) {
    check_regular(path);
    const std::uintmax_t size = std::filesystem::file_size(path);
    if (size > MOST_BYTES) {
        throw std::runtime_error(path_end(path) + " has " + std::to_string(size) + " bytes; " +
                                 std::to_string(MOST_BYTES) + " are the most");
    }
    std::ifstream file(path, std::ios::binary);
    std::string content(static_cast<std::size_t>(size), '\0');
    if (!file.read(content.data(), static_cast<std::streamsize>(size))) {
        throw std::runtime_error(path_end(path) + " cannot be read");
    }
    try {
        return parse(content);
    } catch (const std::exception& error) {
        throw std::runtime_error(path_end(path) + " holds no tensor: " + error.what());
    }
}

std::vector<Tensor> read_tensors(const std::filesystem::path& folder, const std::string& stem,
                                 const std::vector<std::string>& names) {
    std::vector<Tensor> tensors;
    for (const std::string& name : names) {
        const auto path = folder / (stem + "_" + std::to_string(tensors.size()) + ".pb");
        tensors.push_back(read_tensor(path));
        const std::string& found = tensors.back().name();
        if (found != name) {
            throw std::runtime_error(path_end(path) + " holds " + found.substr(0, 60) +
                                     ", expected " + name.substr(0, 60));
        }
    }
    return tensors;
}

}  // namespace attention
