#include "text.h"

#include <algorithm>

#include "core.h"

namespace attention {

std::string one_line(std::string_view text) {
    ::Error line;
    const auto most = std::min(text.size(), sizeof line.text - 1);
    ::fail(&line, "%.*s", static_cast<int>(most), text.data());
    return line.text;
}

}  // namespace attention
