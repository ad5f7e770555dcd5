// A bundle in ONNX Runtime, through the C library in `library/`; `attn_export.h` is its reference, and
// has the numbers of what `get` tells, and of codes.
//
// Threads may share a bundle. A session is used by one at a time, and a second one meanwhile gets an
// Error; do not destroy or move what another thread uses.
//
// Arrays that are set as inputs stay yours: they are not copied, and must stay where they are until the
// session is destroyed or the input is set anew. What `output` gives lies in the session, until the
// next call that runs it, changes it, or destroys it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attn_export.h"

namespace attn {

using Dims = std::vector<std::int64_t>;

// A code of attn_export.h, and one line.
struct Error : std::runtime_error {
    Error(int of, const std::string& text) : std::runtime_error(text), code(of) {}
    int code;
};
inline void check(int code) {
    if (code != ATTN_OK) throw Error(code, attn_last_error());
}

// Elements in place, in C order.
template <typename T>
struct Array {
    Dims dims;
    const T* data;
    std::size_t size;
    const T* begin() const { return data; }
    const T* end() const { return data + size; }
    const T& operator[](std::size_t at) const { return data[at]; }
};

// The type of elements: float16 and bfloat16 are std::uint16_t, and the bytes of any type std::byte.
template <typename T>
constexpr int dtype() {
    if (std::is_same_v<T, std::byte>) return 2;
    if (std::is_same_v<T, bool>) return 9;
    if (std::is_floating_point_v<T>) return sizeof(T) == 4 ? 1 : 11;
    constexpr int codes[2][9] = {{0, 2, 4, 0, 12, 0, 0, 0, 13}, {0, 3, 5, 0, 6, 0, 0, 0, 7}};
    return codes[std::is_signed_v<T>][sizeof(T)];
}

// A handle with one owner, which closes it.
class Handle {
public:
    Handle() = default;
    Handle(Handle&& other) noexcept : value_(std::exchange(other.value_, 0)) {}
    Handle& operator=(Handle&& other) noexcept { return std::swap(value_, other.value_), *this; }
    ~Handle() { if (value_ != 0) attn_close(value_); }
    attn_handle operator*() const { return value_; }
    attn_handle* to() { return &value_; }
    std::int64_t get(int what) const {
        std::int64_t value = 0;
        check(attn_get(value_, what, &value));
        return value;
    }
private:
    attn_handle value_ = 0;  // which is none, as after a move
};

// Inputs, outputs, and the caches in between.
class Session {
public:
    explicit Session(Handle handle) : handle_(std::move(handle)) {}

    // Sets an input to `size` elements that stay yours; those of a cache in place are written.
    template <typename T>
    void set_input(const std::string& name, const Dims& dims, T* data, std::size_t size) {
        if (dims.size() > ATTN_MAX_RANK) throw Error(ATTN_ARGUMENT, name + " has too many axes");
        attn_value value{};
        value.name = name.c_str();
        value.dtype = dtype<T>();
        value.rank = static_cast<std::int32_t>(dims.size());
        for (std::size_t axis = 0; axis < dims.size(); axis++) value.dims[axis] = dims[axis];
        value.data = data;
        value.bytes = static_cast<std::int64_t>(size * sizeof(T));
        check(attn_set_input(*handle_, &value));
    }
    template <typename T>
    void set_input(const std::string& name, const Dims& dims, std::vector<T>& data) {
        set_input(name, dims, data.data(), data.size());
    }
    // Sets an input to the rows of a .npy file, again from the first until there are `rows`.
    void load_input(const std::string& name, const std::string& path, std::int64_t rows) {
        check(attn_load_input(*handle_, name.c_str(), path.c_str(), rows));
    }
    // Writes an output of the last run to a .npy file.
    void save_output(const std::string& name, const std::string& path) const {
        check(attn_save_output(*handle_, name.c_str(), path.c_str()));
    }
    // Returns an output of the last run, in place.
    template <typename T>
    Array<T> output(const std::string& name) const {
        attn_value value{};
        check(attn_output(*handle_, name.c_str(), dtype<T>(), &value));
        const auto size = static_cast<std::size_t>(value.bytes) / sizeof(T);
        return {Dims(value.dims, value.dims + value.rank), static_cast<const T*>(value.data), size};
    }
    std::int64_t get(int what) const { return handle_.get(what); }
    void run() { check(attn_run(*handle_)); }
    // `lengths`: of each row its tokens without the padding on the right; none: all.
    void prefill(std::int64_t capacity = 0, const Dims& lengths = {}) {
        check(attn_prefill(*handle_, capacity, lengths.empty() ? nullptr : lengths.data(),
                           static_cast<std::int64_t>(lengths.size())));
    }
    void step() { check(attn_step(*handle_)); }
    void rewind(std::int64_t tokens) { check(attn_rewind(*handle_, tokens)); }
    Session fork(const Dims& rows) const {
        Handle made;
        check(attn_fork(*handle_, rows.data(), static_cast<std::int64_t>(rows.size()), made.to()));
        return Session(std::move(made));
    }
    // Begins a text of at most `count` tokens after token ids.
    void start(const Dims& ids, std::int64_t count) {
        check(attn_start(*handle_, ids.data(), static_cast<std::int64_t>(ids.size()), count));
    }
    // Makes the next token; none after the one that ends the text.
    std::optional<std::int64_t> next() {
        std::int64_t token = 0;
        if (const int code = attn_next(*handle_, &token); code == ATTN_END) return std::nullopt;
        else check(code);
        return token;
    }
private:
    Handle handle_;
};

// An open bundle. It may be destroyed before its sessions, which then still work.
class Bundle {
public:
    // Opens a folder. `ort`: the path of ONNX Runtime's library; "": where the system finds it.
    explicit Bundle(const std::string& folder, const std::string& ort = "", int threads = 0,
                    bool spin = false) {
        const char* path = ort.empty() ? nullptr : ort.c_str();
        check(attn_open(ATTN_ABI_VERSION, folder.c_str(), path, threads, spin, handle_.to()));
    }
    // What attn_describe() tells: names, types, and fixed sizes or -1 where an axis has a name.
    std::vector<attn_value> inputs() const { return values(ATTN_INPUTS); }
    std::vector<attn_value> outputs() const { return values(ATTN_OUTPUTS); }
    std::int64_t get(int what) const { return handle_.get(what); }
    std::string name() const { return text(ATTN_NAME); }
    std::string runtime_version() const { return text(ATTN_RUNTIME_VERSION); }
    // Runs a test case; returns whether it passed, and a line.
    std::pair<bool, std::string> test_case(std::int64_t index) const {
        char line[512];
        const int code = attn_test_case(*handle_, index, line, sizeof line);
        if (code != ATTN_MISMATCH) check(code);
        return {code == ATTN_OK, line};
    }
    // Makes the vectors of texts of token ids, one after the other; `types` are those of all tokens.
    std::vector<float> embed(const std::vector<Dims>& texts, const Dims& types = {}) const {
        Dims ids, lengths;
        for (const Dims& text : texts) {
            ids.insert(ids.end(), text.begin(), text.end());
            lengths.push_back(static_cast<std::int64_t>(text.size()));
        }
        if (!types.empty() && types.size() != ids.size()) throw Error(ATTN_ARGUMENT, "types are not as many as ids");
        std::vector<float> vectors(texts.size() * static_cast<std::size_t>(get(ATTN_WIDTH)));
        check(attn_embed(*handle_, ids.data(), types.empty() ? nullptr : types.data(),
                         static_cast<std::int64_t>(ids.size()), lengths.data(),
                         static_cast<std::int64_t>(texts.size()), vectors.data(),
                         static_cast<std::int64_t>(vectors.size())));
        return vectors;
    }
    Session session() const {
        Handle made;
        check(attn_session(*handle_, made.to()));
        return Session(std::move(made));
    }
private:
    std::vector<attn_value> values(int kind) const {
        std::vector<attn_value> found(static_cast<std::size_t>(get(kind)));
        std::int64_t index = 0;
        for (attn_value& value : found) check(attn_describe(*handle_, kind, index++, &value));
        return found;
    }
    std::string text(int what) const {
        const char* found = attn_text(*handle_, what);
        return found != nullptr ? found : "";
    }
    Handle handle_;
};

}  // namespace attn
