// Continues a prompt with a whole model, and prints the ids of the tokens as they come.
//
//     generate ID,ID,… [TOKENS [BUNDLE]]
#include <cstdlib>
#include <exception>
#include <iostream>

#include "text.h"
#include "tokens.h"

using namespace attention;

namespace {

// Reads ids with commas between them; what is no id is -1.
std::vector<std::int64_t> ids_of(const char* text) {
    std::vector<std::int64_t> ids;
    while (*text != '\0') {
        char* end = nullptr;
        const long long id = std::strtoll(text, &end, 10);
        const bool ends = end != text && (*end == '\0' || (*end == ',' && end[1] != '\0'));
        ids.push_back(ends ? id : -1);
        if (!ends) break;
        text = *end == ',' ? end + 1 : end;
    }
    return ids;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::cerr << "usage: generate ID,ID,... [TOKENS [BUNDLE]]\n";
        return 2;
    }
    try {
        Graphs graphs(argc > 3 ? argv[3] : BUNDLE_FOLDER, {0, true});
        const auto counts = ids_of(argc > 2 ? argv[2] : "64");
        const char* between = "";
        generate(graphs, ids_of(argv[1]), counts.size() == 1 ? counts[0] : 0, [&](auto token) {
            std::cout << between << token << std::flush;
            between = " ";
        });
        std::cout << '\n';
        return 0;
    } catch (const std::exception& error) {
        std::cerr << "generate: " << one_line(error.what()) << '\n';
        return 2;
    }
}
