#include "embed_texts.h"

#include <stdlib.h>
#include <string.h>

#include "session.h"

enum { BATCH = 32, MOST_TEXTS = 1 << 28 };

/* A text: where its ids begin, how many there are, and the row of its vector. */
typedef struct {
    int64_t start, length, row;
} Text;

/* Finds the texts, and refuses lengths that the bundle does not take. */
static int find_texts(const Texts *given, Text *found, Error *error) {
    int64_t start = 0, most = BUNDLE.of_texts.most;
    for (int64_t row = 0; row < given->count; row++) {
        int64_t length = given->lengths[row];
        if (length < 1 || length > most) {
            return FAIL(ATTN_ARGUMENT, "text %lld has %lld tokens, expected 1 to %lld",
                        (long long)row, (long long)length, (long long)most);
        }
        found[row] = (Text){start, length, row};
        start += length;
    }
    for (int64_t at = 0; given->types != NULL && start == given->total && at < start; at++) {
        if (given->types[at] < 0) return FAIL(ATTN_ARGUMENT, "a type is %lld", (long long)given->types[at]);
    }
    if (start == given->total) return ATTN_OK;
    return FAIL(ATTN_ARGUMENT, "the texts have %lld tokens, and there are %lld ids",
                (long long)start, (long long)given->total);
}

static int longest_first(const void *one, const void *other) {
    const Text *a = one, *b = other;
    if (a->length != b->length) return a->length < b->length ? 1 : -1;
    return a->row < b->row ? -1 : 1;
}

/* Returns the element of an input for a token of a text; of padding if the text has no such token. */
static int64_t element(const char *input, const Texts *given, const Text *text, int64_t token) {
    bool is_padding = token < 0 || token >= text->length;
    if (strcmp(input, "attention_mask") == 0) return !is_padding;
    if (strcmp(input, "input_ids") == 0) {
        return is_padding ? BUNDLE.of_texts.pad : given->ids[text->start + token];
    }
    return is_padding || given->types == NULL ? 0 : given->types[text->start + token];
}

/* Runs some texts, the longest first, and writes their vectors. `arrays` has room for all inputs. */
static int run_batch(Session *session, const Texts *given, const Text *texts, int64_t rows,
                     int64_t *arrays, float *vectors, Error *error) {
    int64_t longest = texts[0].length, width = BUNDLE.of_texts.width;
    int code = ATTN_OK;
    for (size_t i = 0; i < BUNDLE.input_count && code == ATTN_OK; i++, arrays += rows * longest) {
        for (int64_t at = 0; at < rows * longest; at++) {
            const Text *text = &texts[at / longest];
            int64_t before = BUNDLE.of_texts.pads_left ? longest - text->length : 0;
            arrays[at] = element(BUNDLE.inputs[i].name, given, text, at % longest - before);
        }
        attn_value value = {.name = BUNDLE.inputs[i].name, .dtype = INT64, .rank = 2,
                            .dims = {rows, longest}, .data = arrays, .bytes = rows * longest * 8};
        code = session_set(session, &value, false, error);
    }
    if (code == ATTN_OK) code = session_run(session, error);
    if (code != ATTN_OK) return code;
    const Tensor *output = session_output(session, BUNDLE.outputs[BUNDLE.of_texts.output].name);
    if (output == NULL || (int64_t)tensor_count(output) != rows * width) {
        return FAIL(ATTN_RUNTIME, "the graph does not give a vector of each text");
    }
    for (int64_t at = 0; at < rows * width; at++) {
        vectors[texts[at / width].row * width + at % width] = (float)tensor_get(output, (size_t)at);
    }
    return ATTN_OK;
}

/* Runs texts of about one length together: a quarter of a batch is padding at most. */
static int run_all(Session *session, const Texts *given, const Text *texts, float *vectors,
                   Error *error) {
    int64_t *arrays = calloc((size_t)(BATCH * texts[0].length) * BUNDLE.input_count, sizeof *arrays);
    int code = arrays != NULL ? ATTN_OK : FAIL(ATTN_MEMORY, "out of memory");
    for (int64_t first = 0, next; first < given->count && code == ATTN_OK; first = next) {
        next = first + 1;
        while (next < given->count && next - first < BATCH &&
               4 * texts[next].length >= 3 * texts[first].length) {
            next++;
        }
        code = run_batch(session, given, &texts[first], next - first, arrays, vectors, error);
    }
    free(arrays);
    return code;
}

int embed_texts(const Graphs *graphs, const Texts *given, float *vectors, int64_t size,
                Error *error) {
    int64_t width = BUNDLE.of_texts.width;
    if (width == 0) return FAIL(ATTN_STATE, "this bundle gives no vectors of texts");
    if (given->count < 1 || given->count > MOST_TEXTS) return FAIL(ATTN_ARGUMENT, "there are no texts");
    if (size / width < given->count || size % width != 0) {
        return FAIL(ATTN_ARGUMENT, "there is room for %lld numbers, expected %lld for each text",
                    (long long)size, (long long)width);
    }
    Session session;
    Text *texts = calloc((size_t)given->count, sizeof *texts);
    if (texts == NULL) return FAIL(ATTN_MEMORY, "out of memory");
    int code = find_texts(given, texts, error);
    if (code == ATTN_OK) code = session_open(graphs, &session, error);
    if (code == ATTN_OK) {
        qsort(texts, (size_t)given->count, sizeof *texts, longest_first);
        code = run_all(&session, given, texts, vectors, error);
        session_close(&session);
    }
    free(texts);
    return code;
}
