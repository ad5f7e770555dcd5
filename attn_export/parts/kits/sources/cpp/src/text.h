// Texts for a terminal without control characters, which names in files may have.
#pragma once

#include <string>
#include <string_view>

namespace attention {

// Returns a line of at most 300 bytes, in which all but printable UTF-8 characters are "?".
std::string one_line(std::string_view text);

}  // namespace attention
