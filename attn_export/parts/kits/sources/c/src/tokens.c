#include "tokens.h"

#include <string.h>

static bool fits(const int64_t *prompt, size_t length, int64_t count, Error *error) {
    const Ids *ids = &BUNDLE.ids;
    if (ids->vocabulary == 0) return fail(error, "this bundle is no model that takes ids");
    if (length == 0) return fail(error, "the prompt has no token");
    for (size_t at = 0; at < length; at++) {
        if (prompt[at] >= 0 && prompt[at] < ids->vocabulary) continue;
        return fail(error, "there is no token %lld; ids are 0 to %lld", (long long)prompt[at],
                    (long long)ids->vocabulary - 1);
    }
    if (count >= 1 && count <= ids->most && (int64_t)length <= ids->most - count + 1) return true;
    return fail(error, "%zu tokens and %lld more: the bundle takes %lld", length, (long long)count,
                (long long)ids->most);
}

static void fill(Tensor *tensor, Step step, const void *tokens) {
    if (strcmp(tensor->name, "logit_index") == 0) {
        tensor_set(tensor, 0, (double)(step.new_tokens - 1));
    } else {
        memcpy(tensor->data, tokens, tensor_bytes(tensor));
    }
}

static bool ends_text(int64_t token) {
    for (size_t at = 0; at < BUNDLE.ids.end_count; at++) {
        if (BUNDLE.ids.ends[at] == token) return true;
    }
    return false;
}

bool generate(Decode *decode, const int64_t *prompt, size_t length, int64_t count, EachToken each,
              void *context, Error *error) {
    if (!fits(prompt, length, count, error)) return false;
    /* The last token is not run. */
    Step step = {(int64_t)length, 0, (int64_t)length + count - 1};
    const int64_t *tokens = prompt;
    int64_t next = 0;
    for (int64_t made = 0; made < count; made++) {
        if (!decode_step(decode, step, fill, tokens, error)) return false;
        const Tensor *logits = tensor_find(decode->outputs, decode->output_count, "logits");
        next = logits == NULL ? -1 : tensor_largest(logits, BUNDLE.ids.vocabulary);
        if (next < 0) return fail(error, "the graph gives no logits");
        each(next, context);
        if (ends_text(next)) return true;
        step = (Step){1, step.held + step.new_tokens, step.capacity};
        tokens = &next;
    }
    return true;
}
