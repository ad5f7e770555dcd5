/*
 * Self-test: runs every test case of the bundle and judges its outputs.
 *
 *     self_test [BUNDLE]
 *
 * Exit code 0: all cases passed; 1: a case failed or is not compared; 2: the bundle cannot be read,
 * or ONNX Runtime refuses a graph.
 */
#include <stdio.h>
#include <stdlib.h>

#include "attn_export.h"

int main(int argc, char **argv) {
    const char *folder = argc > 1 ? argv[1] : BUNDLE_FOLDER;
    attn_handle bundle = 0;
    int64_t count = 0, passed = 0;
    int code = attn_open(ATTN_ABI_VERSION, folder, getenv("ORT_DYLIB_PATH"), 0, 0, &bundle);
    if (code == ATTN_OK) code = attn_get(bundle, ATTN_CASES, &count);
    for (int64_t i = 0; i < count && code == ATTN_OK; i++) {
        char line[512];
        code = attn_test_case(bundle, i, line, sizeof line);
        passed += code == ATTN_OK;
        if (code == ATTN_MISMATCH) code = ATTN_OK;
        if (code == ATTN_OK) puts(line);
    }
    if (code != ATTN_OK) {
        fprintf(stderr, "self_test: %s\n", attn_last_error());
        attn_close(bundle);
        return 2;
    }
    printf("%.200s: %lld of %lld passed, ONNX Runtime %s\n", attn_text(bundle, ATTN_NAME),
           (long long)passed, (long long)count, attn_text(bundle, ATTN_RUNTIME_VERSION));
    attn_close(bundle);
    return passed == count ? 0 : 1;
}
