// Texts for a terminal: names come from files, and may hold what would move a cursor.
#pragma once

#include <string>
#include <string_view>

namespace attention {

// One line of at most 300 bytes; what is no printable character of UTF-8 becomes a "?".
std::string one_line(std::string_view text);

}  // namespace attention
