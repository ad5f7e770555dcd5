/*
 * Continues a prompt with a whole model, and prints the ids of the tokens as they come.
 *
 *     generate ID,ID,... [TOKENS [BUNDLE]]
 */
#include <stdlib.h>
#include <string.h>

#include "tokens.h"

/* Reads ids with commas between them; what is no id is -1. Returns their number. */
static size_t read_ids(const char *text, int64_t *ids) {
    size_t count = 0;
    while (*text != '\0') {
        char *end = NULL;
        long long id = strtoll(text, &end, 10);
        bool ends = end != text && (*end == '\0' || (*end == ',' && end[1] != '\0'));
        ids[count++] = ends ? id : -1;
        if (!ends) break;
        text = *end == ',' ? end + 1 : end;
    }
    return count;
}

static void print_token(int64_t token, void *between) {
    printf("%s%lld", *(const char **)between, (long long)token);
    fflush(stdout);
    *(const char **)between = " ";
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: generate ID,ID,... [TOKENS [BUNDLE]]\n");
        return 2;
    }
    const char *wanted = argc > 2 ? argv[2] : "64", *between = "";
    int64_t *prompt = calloc(strlen(argv[1]) + 1, sizeof *prompt);
    int64_t *counts = calloc(strlen(wanted) + 1, sizeof *counts);
    Decode decode = {0};
    Error error;
    bool done = prompt != NULL && counts != NULL ? true : fail(&error, "out of memory");
    if (done) {
        size_t length = read_ids(argv[1], prompt);
        int64_t count = read_ids(wanted, counts) == 1 ? counts[0] : 0;
        done = decode_open(argc > 3 ? argv[3] : BUNDLE_FOLDER, &decode, &error) &&
               generate(&decode, prompt, length, count, print_token, &between, &error);
    }
    decode_close(&decode);
    free(counts);
    free(prompt);
    if (done) printf("\n");
    else print_line(stderr, "generate: %s", error.text);
    return done ? 0 : 2;
}
