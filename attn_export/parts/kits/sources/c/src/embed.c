/*
 * Prints the vector of each text, as an encoder makes it: of each word the ids of a text, with those
 * that its tokenizer adds.
 *
 *     embed ID,ID,... [ID,ID,...]...
 */
#include <stdio.h>
#include <string.h>

#include "attn_export.h"
#include "read_ids.h"

int main(int argc, char **argv) {
    int64_t *lengths = calloc((size_t)argc + 1, sizeof *lengths), total = 0, width = 0;
    size_t room = 1;
    for (int i = 1; i < argc; i++) room += strlen(argv[i]);
    int64_t *ids = calloc(room, sizeof *ids);
    float *vectors = NULL;
    attn_handle bundle = 0;
    if (argc < 2 || ids == NULL || lengths == NULL) {
        fprintf(stderr, "usage: embed ID,ID,... [ID,ID,...]...\n");
        return 2;
    }
    for (int i = 1; i < argc; i++) total += lengths[i - 1] = read_ids(argv[i], ids + total);
    int code = attn_open(ATTN_ABI_VERSION, BUNDLE_FOLDER, getenv("ORT_DYLIB_PATH"), 0, 0, &bundle);
    if (code == ATTN_OK) code = attn_get(bundle, ATTN_WIDTH, &width);
    if (code == ATTN_OK) {
        vectors = calloc((size_t)(width * (argc - 1)) + 1, sizeof *vectors);
        code = attn_embed(bundle, ids, NULL, total, lengths, argc - 1, vectors, width * (argc - 1));
    }
    for (int64_t at = 0; code == ATTN_OK && at < width * (argc - 1); at++) {
        printf("%.9g%c", vectors[at], (at + 1) % width == 0 ? '\n' : ' ');
    }
    if (code != ATTN_OK) fprintf(stderr, "embed: %s\n", attn_last_error());
    attn_close(bundle);
    free(vectors);
    free(lengths);
    free(ids);
    return code == ATTN_OK ? 0 : 2;
}
