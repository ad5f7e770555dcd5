#include "text.h"

#include <algorithm>

namespace attention {

namespace {

constexpr std::size_t MOST_BYTES = 300;

// The bytes of a character that a terminal only shows; 0 where it does more, or is none.
std::size_t shown_bytes(std::string_view rest) {
    const auto byte = [&](std::size_t at) {
        return at < rest.size() ? static_cast<unsigned char>(rest[at]) : 0U;
    };
    const unsigned first = byte(0), second = byte(1);
    if (first < 0x80) return first >= 0x20 && first != 0x7f;
    const std::size_t count = first < 0xc2 || first > 0xf4 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    for (std::size_t i = 1; i < count; i++) {
        if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
    }
    const bool control = first == 0xc2 && second < 0xa0;
    // General punctuation has marks that turn the direction of writing or end a line.
    const bool punctuation = first == 0xe2 && (second == 0x80 || second == 0x81);
    const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
    const bool no_character = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
    return control || punctuation || overlong || no_character ? 0 : count;
}

}  // namespace

std::string one_line(std::string_view text) {
    std::string line;
    while (!text.empty()) {
        const std::size_t bytes = shown_bytes(text);
        if (line.size() + std::max<std::size_t>(bytes, 1) > MOST_BYTES) break;
        const bool space = text.front() == '\n' || text.front() == '\r' || text.front() == '\t';
        line += bytes > 0 ? std::string(text.substr(0, bytes)) : space ? " " : "?";
        text.remove_prefix(bytes > 0 ? bytes : 1);
    }
    return line;
}

}  // namespace attention
