/*
 * Example of decoding with the KV cache: a prompt, then tokens one by one. The inputs are random
 * numbers instead of the hidden states that your program would pass to the layer.
 *
 *     decode [TOKENS [BUNDLE]]
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "attn_export.h"

enum { PROMPT = 8, TOKENS = 64, MOST_TOKENS = 1 << 20 };
/* ROOM: tokens in the cache after the prompt; then this example goes back to the prompt. */
enum { ROOM = 64, MOST_INPUTS = 64, FLOAT32 = 1, BOOL = 9 };

static double now_ms(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* Random numbers; of types that C has no name for, zeros. */
static void fill(const attn_value *value) {
    float *data = value->data;
    for (int64_t at = 0; value->dtype == FLOAT32 && at < value->bytes / 4; at++) {
        data[at] = (float)(rand() % 129 - 64) / 64;
    }
}

/* Sets the inputs that a session does not make itself, for some tokens. */
static int set_inputs(attn_handle bundle, attn_handle session, int64_t tokens, void **arrays) {
    int64_t count = 0;
    int code = attn_get(bundle, ATTN_INPUTS, &count);
    for (int64_t i = 0; i < count && i < MOST_INPUTS && code == ATTN_OK; i++) {
        attn_value value;
        code = attn_describe(bundle, ATTN_INPUTS, i, &value);
        if (code != ATTN_OK || !value.needed) continue;
        value.bytes = value.element_bytes;
        for (int32_t at = 0; at < value.rank; at++) {
            bool of_tokens = value.axes[at] != NULL && strcmp(value.axes[at], "query_len") == 0;
            if (value.dims[at] < 0) value.dims[at] = of_tokens ? tokens : 1;
            value.bytes *= value.dims[at];
        }
        value.data = arrays[i] = realloc(arrays[i], (size_t)value.bytes + 1);
        if (value.data == NULL) return ATTN_MEMORY;
        memset(value.data, value.dtype == BOOL, (size_t)value.bytes);
        fill(&value);
        code = attn_set_input(session, i, &value);
    }
    return code;
}

static int run(attn_handle bundle, attn_handle session, int64_t tokens, void **arrays) {
    double start = now_ms();
    int64_t in_place = 0;
    int code = set_inputs(bundle, session, PROMPT, arrays);
    if (code == ATTN_OK) code = attn_prefill(session, PROMPT + ROOM, NULL, 0);
    if (code == ATTN_OK) code = attn_get(bundle, ATTN_CACHE, &in_place);
    if (code == ATTN_OK) code = set_inputs(bundle, session, 1, arrays);
    if (code != ATTN_OK) return code;
    printf("prompt of %d tokens: %.3f ms\n", PROMPT, now_ms() - start);
    start = now_ms();
    for (int64_t made = 0; made < tokens && code == ATTN_OK; made++) {
        /* Your program would write the next token into its array here, */
        if (made > 0 && made % ROOM == 0) code = attn_rewind(session, ROOM);
        if (code == ATTN_OK) code = attn_step(session);
        /* and use attn_output() here. */
    }
    if (code == ATTN_OK) {
        printf("%lld tokens: %.3f ms per token, cache %s\n", (long long)tokens,
               (now_ms() - start) / (double)tokens, in_place == 2 ? "written in place" : "fed back");
    }
    return code;
}

int main(int argc, char **argv) {
    long tokens = argc > 1 ? strtol(argv[1], NULL, 10) : TOKENS;
    if (tokens < 1 || tokens > MOST_TOKENS) {
        fprintf(stderr, "decode: give a number of tokens from 1 to %d\n", MOST_TOKENS);
        return 2;
    }
    const char *folder = argc > 2 ? argv[2] : BUNDLE_FOLDER;
    void *arrays[MOST_INPUTS] = {0};
    attn_handle bundle = 0, session = 0;
    int64_t cache = 0;
    int code = attn_open(ATTN_ABI_VERSION, folder, getenv("ORT_DYLIB_PATH"), 0, 1, &bundle);
    if (code == ATTN_OK) code = attn_get(bundle, ATTN_CACHE, &cache);
    if (code == ATTN_OK && cache == 0) {
        printf("%.200s has no KV cache: there is nothing to decode\n", attn_text(bundle, ATTN_NAME));
    } else {
        if (code == ATTN_OK) code = attn_session(bundle, &session);
        if (code == ATTN_OK) code = run(bundle, session, tokens, arrays);
    }
    if (code != ATTN_OK) fprintf(stderr, "decode: %s\n", attn_last_error());
    attn_close(session);
    attn_close(bundle);
    for (int i = 0; i < MOST_INPUTS; i++) free(arrays[i]);
    return code == ATTN_OK ? 0 : 2;
}
