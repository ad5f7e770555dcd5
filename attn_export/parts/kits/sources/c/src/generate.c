/*
 * Continues a prompt with a whole model, and prints the ids of the tokens as they come.
 *
 *     generate ID,ID,... [TOKENS [BUNDLE]]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attn_export.h"
#include "read_ids.h"

static int generate(attn_handle session, const int64_t *prompt, int64_t length, int64_t count) {
    const char *between = "";
    int64_t token;
    int code = attn_start(session, prompt, length, count);
    while (code == ATTN_OK && (code = attn_next(session, &token)) == ATTN_OK) {
        printf("%s%lld", between, (long long)token);
        fflush(stdout);
        between = " ";
    }
    return code;
}

/* Runs the encoder of an encoder-decoder on ids, whose place the first id of its decoder takes. */
static int encode(attn_handle bundle, attn_handle session, int64_t *ids, int64_t *length) {
    int64_t count = 0;
    int code = attn_get(bundle, ATTN_ENCODER_INPUTS, &count);
    if (code != ATTN_OK || count == 0) return code;
    int64_t *mask = calloc((size_t)*length + 1, sizeof *mask);
    for (int64_t at = 0; mask != NULL && at < *length; at++) mask[at] = 1;
    attn_value values[4] = {{.dtype = 7, .rank = 2, .dims = {1, *length}, .bytes = *length * 8}};
    values[1] = values[0];
    values[0].data = ids;
    values[1].data = mask;
    code = attn_encode(session, values, count);
    if (code == ATTN_OK) code = attn_get(bundle, ATTN_FIRST, ids);
    *length = 1;
    free(mask);
    return code;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: generate ID,ID,... [TOKENS [BUNDLE]]\n");
        return 2;
    }
    const char *wanted = argc > 2 ? argv[2] : "64", *folder = argc > 3 ? argv[3] : BUNDLE_FOLDER;
    attn_handle bundle = 0, session = 0;
    int64_t *prompt = calloc(strlen(argv[1]) + 1, sizeof *prompt);
    int64_t *counts = calloc(strlen(wanted) + 1, sizeof *counts);
    int code = ATTN_MEMORY;
    if (prompt != NULL && counts != NULL) {
        int64_t length = read_ids(argv[1], prompt);
        int64_t count = read_ids(wanted, counts) == 1 ? counts[0] : 0;
        code = attn_open(ATTN_ABI_VERSION, folder, getenv("ORT_DYLIB_PATH"), 0, 1, &bundle);
        if (code == ATTN_OK) code = attn_session(bundle, &session);
        if (code == ATTN_OK) code = encode(bundle, session, prompt, &length);
        if (code == ATTN_OK) code = generate(session, prompt, length, count);
    }
    if (code == ATTN_END) printf("\n");
    else fprintf(stderr, "generate: %s\n", attn_last_error());
    attn_close(session);
    attn_close(bundle);
    free(counts);
    free(prompt);
    return code == ATTN_END ? 0 : 2;
}
