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
enum { ROOM = 64, FLOAT32 = 1, BOOL = 9 };

static double now_ms(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* Random numbers; of types that C has no name for, the zeros that are there. */
static void fill(const attn_value *value) {
    float *data = value->data;
    if (value->dtype == BOOL) memset(data, 1, (size_t)value->bytes);
    for (int64_t at = 0; value->dtype == FLOAT32 && at < value->bytes / 4; at++) {
        data[at] = (float)(rand() % 129 - 64) / 64;
    }
}

/* Sets the inputs that a session does not make itself, for some tokens. */
static int set_inputs(attn_handle bundle, attn_handle session, int64_t tokens) {
    int64_t count = 0;
    int code = attn_get(bundle, ATTN_INPUTS, &count);
    for (int64_t i = 0; i < count && code == ATTN_OK; i++) {
        attn_value value;
        code = attn_describe(bundle, ATTN_INPUTS, i, &value);
        if (code != ATTN_OK || !value.needed) continue;
        for (int32_t at = 0; at < value.rank; at++) {
            bool of_tokens = value.axes[at] != NULL && strcmp(value.axes[at], "query_len") == 0;
            if (value.dims[at] < 0) value.dims[at] = of_tokens ? tokens : 1;
        }
        code = attn_set_input(session, &value);
        if (code == ATTN_OK) fill(&value);
    }
    return code;
}

static int run(attn_handle bundle, attn_handle session, int64_t tokens, int64_t cache) {
    double start = now_ms();
    int code = set_inputs(bundle, session, PROMPT);
    if (code == ATTN_OK) code = attn_prefill(session, PROMPT + ROOM, NULL, 0);
    if (code == ATTN_OK) code = set_inputs(bundle, session, 1);
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
               (now_ms() - start) / (double)tokens, cache == 2 ? "written in place" : "fed back");
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
    attn_handle bundle = 0, session = 0;
    int64_t cache = 0;
    int code = attn_open(ATTN_ABI_VERSION, folder, getenv("ORT_DYLIB_PATH"), 0, 1, &bundle);
    if (code == ATTN_OK) code = attn_get(bundle, ATTN_CACHE, &cache);
    if (code == ATTN_OK && cache == 0) {
        printf("%.200s has no KV cache: there is nothing to decode\n", attn_text(bundle, ATTN_NAME));
    } else {
        if (code == ATTN_OK) code = attn_session(bundle, &session);
        if (code == ATTN_OK) code = run(bundle, session, tokens, cache);
    }
    if (code != ATTN_OK) fprintf(stderr, "decode: %s\n", attn_last_error());
    attn_close(session);
    attn_close(bundle);
    return code == ATTN_OK ? 0 : 2;
}
