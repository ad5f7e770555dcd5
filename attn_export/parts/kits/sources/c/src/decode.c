/*
 * Example of decoding with the KV cache: a prompt, then tokens one by one. The inputs are random
 * numbers instead of the hidden states that your program would pass to the layer.
 *
 *     decode [TOKENS [BUNDLE]]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "steps.h"

enum { PROMPT = 8, TOKENS = 64, MOST_TOKENS = 1 << 20 };

/* Returns the value of an element: masks have no effect, positions count, states are random. */
static double value_of(const Tensor *tensor, size_t at, Step step) {
    if (tensor->dtype == BOOL) return 1;
    if (strcmp(tensor->name, "position_ids") == 0) {
        return (double)(step.held + (int64_t)at % step.new_tokens);
    }
    if (!is_floating(tensor->dtype) || strcmp(tensor->name, "attn_mask") == 0) return 0;
    return (rand() % 129 - 64) / 64.0;
}

static void fill(Tensor *tensor, Step step, const void *context) {
    (void)context;
    for (size_t at = 0; at < tensor_count(tensor); at++) {
        tensor_set(tensor, at, value_of(tensor, at, step));
    }
}

static double now_ms(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static bool run(Decode *decode, int64_t tokens, Error *error) {
    int64_t capacity = PROMPT + tokens;
    double start = now_ms();
    if (!decode_step(decode, (Step){PROMPT, 0, capacity}, fill, NULL, error)) return false;
    printf("prompt of %d tokens: %.3f ms\n", PROMPT, now_ms() - start);
    start = now_ms();
    for (int64_t held = PROMPT; held < capacity; held++) {
        if (!decode_step(decode, (Step){1, held, capacity}, fill, NULL, error)) return false;
        /* Your program would use tensor_find(decode->outputs, …, "output") here. */
    }
    print_line(stdout, "%lld tokens: %.3f ms per token, cache %s; %.200s", (long long)tokens,
               (now_ms() - start) / (double)tokens,
               BUNDLE.bound_count > 0 ? "written in place" : "fed back",
               BUNDLE.decode != NULL ? BUNDLE.decode : BUNDLE.graph);
    return true;
}

int main(int argc, char **argv) {
    long tokens = argc > 1 ? strtol(argv[1], NULL, 10) : TOKENS;
    if (tokens < 1 || tokens > MOST_TOKENS) {
        fprintf(stderr, "decode: give a number of tokens from 1 to %d\n", MOST_TOKENS);
        return 2;
    }
    if (BUNDLE.cache == NO_CACHE) {
        print_line(stdout, "%.200s has no KV cache: there is nothing to decode", BUNDLE.name);
        return 0;
    }
    Decode decode;
    Error error;
    bool decoded = decode_open(argc > 2 ? argv[2] : BUNDLE_FOLDER, &decode, &error) &&
                   run(&decode, tokens, &error);
    decode_close(&decode);
    if (!decoded) print_line(stderr, "decode: %s", error.text);
    return decoded ? 0 : 2;
}
