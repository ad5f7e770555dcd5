#include "session.h"

#include <stdlib.h>
#include <string.h>

#include "bundle_check.h"
#include "cache.h"

enum { MOST_KEYS = 1 << 24 };

static const int64_t ORIGIN[MAX_RANK] = {0};

int session_open(const Graphs *graphs, Session *session, Error *error) {
    *session = (Session){.graphs = graphs, .output_count = model_output_count(graphs->any)};
    session->inputs = calloc(BUNDLE.input_count + 1, sizeof(Tensor));
    session->outputs = calloc(session->output_count + 1, sizeof(Tensor));
    session->given = calloc(BUNDLE.input_count + 1, sizeof(bool));
    if (session->inputs != NULL && session->outputs != NULL && session->given != NULL) {
        return ATTN_OK;
    }
    session_close(session);
    return FAIL(ATTN_MEMORY, "out of memory for a session");
}

void session_close(Session *session) {
    tensors_free(session->inputs, BUNDLE.input_count);
    tensors_free(session->outputs, session->output_count);
    free(session->inputs);
    free(session->outputs);
    free(session->given);
    free(session->held);
    free(session->prompt);
    *session = (Session){0};
}

/* -- inputs ------------------------------------------------------------------------------ */

static bool is_length(const End *end) { return strcmp(end->name, "past_length") == 0; }

/* Returns whether an input is the session's from a prefill on. */
static bool is_state(const End *end) { return end->present != NULL || is_length(end); }

bool has_default(const End *end) {
    return is_state(end) || strcmp(end->name, "position_ids") == 0 ||
           strcmp(end->name, "logit_index") == 0 ||
           (BUNDLE.knows_mask && strcmp(end->name, "attn_mask") == 0);
}

static const Axis *axis_of(const End *end, size_t at) { return &end->axes[end->order[at]]; }

/* Returns the axis of the graph with this name, or the rank if there is none. */
static size_t find_axis(const End *end, const char *name) {
    size_t at = 0;
    while (at < end->rank &&
           (axis_of(end, at)->name == NULL || strcmp(axis_of(end, at)->name, name) != 0)) {
        at++;
    }
    return at;
}

/* Returns whether an input is what the decoder takes of the encoder. */
static bool is_encoded(const End *end) { return find_axis(end, "encoded_len") < end->rank; }

bool is_held_by(int said, int dtype) {
    bool half = dtype == FLOAT16 || dtype == BFLOAT16;
    return said == dtype || said == 0 || said == UINT8 || (half && said == UINT16);
}

/* Makes a tensor that points to the elements of a value, which must be those of an input. */
static int tensor_of(const End *end, const attn_value *value, Tensor *tensor, Error *error) {
    size_t wanted, element = element_bytes(end->dtype);
    if (!is_held_by(value->dtype, end->dtype) || value->rank < 0 || (size_t)value->rank != end->rank) {
        return FAIL(ATTN_ARGUMENT, "%.60s has type %d and rank %d, expected type %d and rank %zu",
                    end->name, (int)value->dtype, (int)value->rank, end->dtype, end->rank);
    }
    for (size_t i = 0; i < end->rank; i++) {
        const Axis *axis = axis_of(end, i);
        if (axis->name != NULL || axis->size == value->dims[i]) continue;
        return FAIL(ATTN_ARGUMENT, "%.60s has %lld in axis %zu, expected %lld", end->name,
                    (long long)value->dims[i], i, (long long)axis->size);
    }
    if (!bytes_of(end->name, end->dtype, end->rank, value->dims, &wanted, error)) {
        return ATTN_ARGUMENT;
    }
    if (value->bytes < 0 || (uint64_t)value->bytes != wanted) {
        return FAIL(ATTN_ARGUMENT, "%.60s has %lld bytes, expected the %zu of its axes", end->name,
                    (long long)value->bytes, wanted);
    }
    if (wanted > 0 && (value->data == NULL || (uintptr_t)value->data % element != 0)) {
        return FAIL(ATTN_ARGUMENT, "%.60s is not at a multiple of %zu bytes", end->name, element);
    }
    static int64_t nothing;
    Tensor set = {.dtype = end->dtype, .rank = end->rank, .data = wanted > 0 ? value->data : &nothing};
    memcpy(set.dims, value->dims, end->rank * sizeof *set.dims);
    if (!tensor_rename(&set, end->name, error)) return ATTN_MEMORY;
    *tensor = set;
    return ATTN_OK;
}

/* Makes a tensor the input that the caller has set. */
static void give(Session *session, size_t at, Tensor *tensor) {
    tensor_free(&session->inputs[at]);
    session->inputs[at] = *tensor;
    session->given[at] = true;
    *tensor = (Tensor){0};
}

int session_set(Session *session, attn_value *value, bool owns, Error *error) {
    size_t at = 0, bytes;
    while (at < BUNDLE.input_count && strcmp(BUNDLE.inputs[at].name, value->name) != 0) at++;
    if (at == BUNDLE.input_count) return FAIL(ATTN_ARGUMENT, "there is no input %.60s", value->name);
    const End *end = &BUNDLE.inputs[at];
    if (session->held != NULL && is_state(end)) {
        return FAIL(ATTN_STATE, "%.60s is kept by the session while it decodes", end->name);
    }
    bool makes = value->data == NULL && value->bytes == 0 && value->rank == (int32_t)end->rank;
    if (makes) {
        if (!bytes_of(end->name, end->dtype, end->rank, value->dims, &bytes, error)) return ATTN_ARGUMENT;
        value->data = calloc(bytes + 1, 1);
        if (value->data == NULL) return FAIL(ATTN_MEMORY, "out of memory for %.60s", end->name);
        value->bytes = (int64_t)bytes;
    }
    Tensor set = {0};
    int code = tensor_of(end, value, &set, error);
    if (code == ATTN_OK) {
        if (owns || makes) set.owner = value->data, set.release = free;
        give(session, at, &set);
    } else if (makes) {
        free(value->data);
        value->data = NULL;
        value->bytes = 0;
    }
    return code;
}

/* Frees what the session made for a decode. */
static void forget(Session *session) {
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        if (!session->given[i]) tensor_free(&session->inputs[i]);
    }
    tensors_free(session->outputs, session->output_count);
    free(session->held);
    session->held = NULL;
    session->ran = false;
}

/* Returns the size of an axis in the inputs that the caller has set, or -1. */
static int64_t given_size(const Session *session, const char *name) {
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        const End *end = &BUNDLE.inputs[i];
        size_t at = find_axis(end, name);
        if (session->given[i] && at < end->rank) return session->inputs[i].dims[at];
    }
    return -1;
}

int64_t session_held(const Session *session) {
    int64_t most = 0;
    for (int64_t row = 0; session->held != NULL && row < session->batch; row++) {
        if (session->held[row] > most) most = session->held[row];
    }
    return most;
}

/* -- what the session sets of a step ----------------------------------------------------- */

typedef struct {
    int64_t held, tokens;
    const int64_t *lengths; /* of each row its new tokens, or NULL: all */
} Step;

static int64_t size_of(const Session *session, const Axis *axis, const Step *step) {
    const char *name = axis->name;
    if (name == NULL) return axis->size;
    if (strcmp(name, "batch") == 0) return session->batch;
    if (strcmp(name, "query_len") == 0) return step->tokens;
    if (strcmp(name, "past_len") == 0) return step->held;
    if (strcmp(name, "total_len") == 0) return step->held + step->tokens;
    if (strcmp(name, "capacity") == 0) return session->capacity;
    if (strcmp(name, "logit_count") == 0) return 1;
    return given_size(session, name);
}

/* Returns the value of an element that the session sets; caches are 0. */
static double value_of(const Session *session, const End *end, const Tensor *tensor, size_t at,
                       const Step *step) {
    size_t per_row = session->batch > 0 ? tensor_count(tensor) / (size_t)session->batch : 1;
    size_t row = per_row > 0 ? at / per_row : 0;
    int64_t held = session->held[row < (size_t)session->batch ? row : 0];
    if (is_length(end)) return (double)held;
    if (strcmp(end->name, "position_ids") == 0) {
        return (double)(held + (int64_t)at % step->tokens);
    }
    if (strcmp(end->name, "logit_index") == 0) {
        return (double)((step->lengths != NULL ? step->lengths[row] : step->tokens) - 1);
    }
    return end->dtype == BOOL; /* a mask that hides nothing: True, or 0 to add */
}

static int make_inputs(Session *session, const Step *step, Error *error) {
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        const End *end = &BUNDLE.inputs[i];
        if (session->given[i]) continue;
        if (end->present != NULL && session->inputs[i].data != NULL) continue;
        if (!has_default(end)) return FAIL(ATTN_ARGUMENT, "the input %.60s is not set", end->name);
        int64_t dims[MAX_RANK];
        for (size_t at = 0; at < end->rank; at++) {
            dims[at] = size_of(session, axis_of(end, at), step);
            if (dims[at] >= 0) continue;
            return FAIL(ATTN_ARGUMENT, "set %.60s: nothing says the size of its axis %.60s",
                        end->name, axis_of(end, at)->name);
        }
        tensor_free(&session->inputs[i]);
        if (!tensor_new(end->name, end->dtype, end->rank, dims, &session->inputs[i], error)) {
            return ATTN_MEMORY;
        }
        for (size_t at = 0; end->present == NULL && at < tensor_count(&session->inputs[i]); at++) {
            tensor_set(&session->inputs[i], at,
                       value_of(session, end, &session->inputs[i], at, step));
        }
    }
    return ATTN_OK;
}

/* -- runs -------------------------------------------------------------------------------- */

static int run(Session *session, Error *error) {
    if (!inputs_fit(session->inputs, error)) return ATTN_ARGUMENT;
    tensors_free(session->outputs, session->output_count);
    session->ran = graphs_run(session->graphs, session->inputs, session->outputs, error);
    return session->ran ? ATTN_OK : ATTN_RUNTIME;
}

int session_run(Session *session, Error *error) {
    forget(session);
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        if (session->given[i]) continue;
        return FAIL(ATTN_ARGUMENT, "the input %.60s is not set", BUNDLE.inputs[i].name);
    }
    return run(session, error);
}

const Tensor *session_output(const Session *session, const char *name) {
    if (!session->ran) return NULL;
    for (size_t i = 0; session->held != NULL && i < BUNDLE.input_count; i++) {
        const char *present = BUNDLE.inputs[i].present;
        if (present != NULL && strcmp(present, name) == 0) return &session->inputs[i];
    }
    return tensor_find(session->outputs, session->output_count, name);
}

/* Runs a step, after which its tokens are in the caches. */
static int take(Session *session, const Step *step, Error *error) {
    int64_t most = BUNDLE.cache == CACHE_IN_PLACE ? session->capacity
                   : BUNDLE.ids.most > 0          ? BUNDLE.ids.most
                                                  : MOST_KEYS;
    if (step->tokens < 1) return FAIL(ATTN_ARGUMENT, "there is no new token");
    if (step->tokens > most - step->held) {
        return FAIL(ATTN_ARGUMENT, "%lld tokens and %lld more: the caches take %lld",
                    (long long)step->held, (long long)step->tokens, (long long)most);
    }
    int code = make_inputs(session, step, error);
    if (code == ATTN_OK) code = run(session, error);
    if (code != ATTN_OK) return code;
    if (!feed_back(session->inputs, BUNDLE.input_count, session->outputs, session->output_count,
                   error)) {
        return ATTN_MEMORY;
    }
    for (int64_t row = 0; row < session->batch; row++) {
        session->held[row] += step->lengths != NULL ? step->lengths[row] : step->tokens;
    }
    return ATTN_OK;
}

static int check_lengths(const Session *session, const int64_t *lengths, int64_t count,
                         int64_t tokens, Error *error) {
    if (lengths == NULL) return ATTN_OK;
    if (BUNDLE.cache != CACHE_IN_PLACE) {
        return FAIL(ATTN_ARGUMENT, "rows of unlike lengths need a cache that is written in place");
    }
    if (count != session->batch) {
        return FAIL(ATTN_ARGUMENT, "there are %lld lengths of %lld rows", (long long)count,
                    (long long)session->batch);
    }
    for (int64_t row = 0; row < count; row++) {
        if (lengths[row] >= 1 && lengths[row] <= tokens) continue;
        return FAIL(ATTN_ARGUMENT, "a length is %lld, expected 1 to %lld", (long long)lengths[row],
                    (long long)tokens);
    }
    return ATTN_OK;
}

int session_prefill(Session *session, int64_t capacity, const int64_t *lengths, int64_t count,
                    Error *error) {
    forget(session);
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        if (!is_state(&BUNDLE.inputs[i]) || !session->given[i]) continue;
        session->given[i] = false; /* of a run before: the array is the caller's */
        tensor_free(&session->inputs[i]);
    }
    int64_t tokens = given_size(session, "query_len"), batch = given_size(session, "batch");
    int64_t most = BUNDLE.ids.most > 0 ? BUNDLE.ids.most : MOST_KEYS;
    if (batch < 1 || batch > MOST_KEYS || tokens < 1) {
        return FAIL(ATTN_ARGUMENT, "no input is set that has rows and tokens");
    }
    session->batch = batch;
    session->capacity = capacity != 0 ? capacity : tokens;
    if (session->capacity < 1 || session->capacity > most) {
        return FAIL(ATTN_ARGUMENT, "the capacity is %lld, expected 1 to %lld", (long long)capacity,
                    (long long)most);
    }
    int code = check_lengths(session, lengths, count, tokens, error);
    if (code != ATTN_OK) return code;
    session->held = calloc((size_t)batch, sizeof *session->held);
    if (session->held == NULL) return FAIL(ATTN_MEMORY, "out of memory");
    code = take(session, &(Step){0, tokens, lengths}, error);
    if (code != ATTN_OK) forget(session);
    return code;
}

static int check_decodes(const Session *session, Error *error) {
    if (session->held == NULL) return FAIL(ATTN_STATE, "there was no prefill");
    if (BUNDLE.cache == NO_CACHE) return FAIL(ATTN_STATE, "the bundle has no cache");
    return ATTN_OK;
}

int session_step(Session *session, Error *error) {
    int code = check_decodes(session, error);
    if (code != ATTN_OK) return code;
    if (given_size(session, "batch") != session->batch) {
        return FAIL(ATTN_ARGUMENT, "there are %lld rows; the caches have %lld",
                    (long long)given_size(session, "batch"), (long long)session->batch);
    }
    Step step = {session_held(session), given_size(session, "query_len"), NULL};
    return take(session, &step, error);
}

/* -- encoder --------------------------------------------------------------------------- */

enum { MOST_ENCODER_INPUTS = 4 };

/* Makes the inputs of the encoder, of one size where axes have one name. */
static int encoder_inputs(const attn_value *values, Tensor *inputs, Error *error) {
    for (size_t i = 0; i < BUNDLE.encoder_input_count; i++) {
        const End *end = &BUNDLE.encoder_inputs[i];
        int code = tensor_of(end, &values[i], &inputs[i], error);
        if (code != ATTN_OK) return code;
        if (end->rank == 2 && memcmp(inputs[i].dims, inputs[0].dims, 2 * sizeof(int64_t)) != 0) {
            return FAIL(ATTN_ARGUMENT, "%.60s has other axes than %.60s", end->name, inputs[0].name);
        }
        bool ids = strcmp(end->name, "input_ids") == 0;
        for (size_t at = 0; ids && at < tensor_count(&inputs[i]); at++) {
            double id = tensor_get(&inputs[i], at);
            if (id >= 0 && id < (double)BUNDLE.ids.vocabulary) continue;
            return FAIL(ATTN_ARGUMENT, "there is no token %.0f; ids are 0 to %lld", id,
                        (long long)BUNDLE.ids.vocabulary - 1);
        }
    }
    return ATTN_OK;
}

/* Gives the decoder what it takes: outputs of the encoder, and a copy of the mask. */
static int take_encoded(Session *session, Tensor *inputs, Tensor *outputs, size_t count,
                        Error *error) {
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        const End *end = &BUNDLE.inputs[i];
        if (!is_encoded(end)) continue;
        Tensor copy = {0}, *made = tensor_find(outputs, count, end->name);
        if (made == NULL) {
            Tensor *mask = tensor_find(inputs, BUNDLE.encoder_input_count, "attention_mask");
            if (mask == NULL) return FAIL(ATTN_RUNTIME, "the encoder gives no %.60s", end->name);
            made = &copy;
            if (!tensor_new(end->name, mask->dtype, mask->rank, mask->dims, made, error)) return ATTN_MEMORY;
            memcpy(made->data, mask->data, tensor_bytes(mask));
        }
        give(session, i, made);
    }
    return ATTN_OK;
}

int session_encode(Session *session, const attn_value *values, int64_t count, Error *error) {
    Model *encoder = session->graphs->encoder;
    if (encoder == NULL) return FAIL(ATTN_STATE, "this bundle has no encoder");
    if (count != (int64_t)BUNDLE.encoder_input_count || count > MOST_ENCODER_INPUTS) {
        return FAIL(ATTN_ARGUMENT, "there are %lld values; the encoder takes %zu inputs",
                    (long long)count, BUNDLE.encoder_input_count);
    }
    Tensor inputs[MOST_ENCODER_INPUTS] = {{0}};
    size_t made = model_output_count(encoder);
    Tensor *outputs = calloc(made + 1, sizeof *outputs);
    int code = outputs == NULL ? FAIL(ATTN_MEMORY, "out of memory")
                               : encoder_inputs(values, inputs, error);
    if (code == ATTN_OK && !model_run(encoder, inputs, (size_t)count, NULL, 0, outputs, error)) {
        code = ATTN_RUNTIME;
    }
    if (code == ATTN_OK) {
        forget(session);
        code = take_encoded(session, inputs, outputs, made, error);
    }
    if (outputs != NULL) tensors_free(outputs, made);
    free(outputs);
    tensors_free(inputs, MOST_ENCODER_INPUTS);
    return code;
}

/* -- caches ------------------------------------------------------------------------------ */

/* Copies rows of a cache, NULL: all, and the tokens up to `tokens`, -1: all. */
static int copy_cache(Session *from, size_t at, const int64_t *rows, int64_t count, int64_t tokens,
                      Tensor *to, Error *error) {
    const End *end = &BUNDLE.inputs[at];
    const Tensor *cache = &from->inputs[at];
    size_t batch = find_axis(end, "batch"), past = find_axis(end, "past_len");
    int64_t sizes[MAX_RANK], place[MAX_RANK] = {0}, source[MAX_RANK] = {0};
    memcpy(sizes, cache->dims, sizeof sizes);
    if (tokens >= 0 && past < end->rank) sizes[past] = tokens;
    if (rows != NULL && batch < end->rank) sizes[batch] = count;
    if (!tensor_new(end->name, end->dtype, end->rank, sizes, to, error)) return ATTN_MEMORY;
    bool by_row = rows != NULL && batch < end->rank;
    if (by_row) sizes[batch] = 1;
    for (int64_t row = 0; row < (by_row ? count : 1); row++) {
        if (by_row) {
            place[batch] = row;
            source[batch] = rows[row];
        }
        if (!tensor_copy_block(to, by_row ? place : ORIGIN, cache, source, sizes, error)) {
            return ATTN_STATE;
        }
    }
    from->copied += (int64_t)tensor_bytes(to);
    return ATTN_OK;
}

int session_rewind(Session *session, int64_t tokens, Error *error) {
    int code = check_decodes(session, error);
    if (code != ATTN_OK) return code;
    for (int64_t row = 0; row < session->batch; row++) {
        if (tokens >= 0 && tokens <= session->held[row]) continue;
        return FAIL(ATTN_ARGUMENT, "%lld tokens cannot be dropped: row %lld has %lld",
                    (long long)tokens, (long long)row, (long long)session->held[row]);
    }
    if (tokens == 0) return ATTN_OK;
    int64_t kept = session_held(session) - tokens;
    Tensor *shorter = calloc(BUNDLE.input_count + 1, sizeof *shorter);
    if (shorter == NULL) return FAIL(ATTN_MEMORY, "out of memory");
    for (size_t i = 0; code == ATTN_OK && i < BUNDLE.input_count; i++) {
        const End *end = &BUNDLE.inputs[i];
        bool grows = end->present != NULL && find_axis(end, "past_len") < end->rank;
        if (grows) code = copy_cache(session, i, NULL, 0, kept, &shorter[i], error);
    }
    for (size_t i = 0; code == ATTN_OK && i < BUNDLE.input_count; i++) {
        if (shorter[i].data == NULL) continue;
        tensor_free(&session->inputs[i]);
        session->inputs[i] = shorter[i];
        shorter[i] = (Tensor){0};
    }
    for (int64_t row = 0; code == ATTN_OK && row < session->batch; row++) {
        session->held[row] -= tokens;
    }
    tensors_free(shorter, BUNDLE.input_count);
    free(shorter);
    return code;
}

int session_fork(Session *session, const int64_t *rows, int64_t count, Session *fork,
                 Error *error) {
    int code = check_decodes(session, error);
    if (code != ATTN_OK) return code;
    if (count < 1 || count > MOST_KEYS) return FAIL(ATTN_ARGUMENT, "there are no rows");
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] >= 0 && rows[i] < session->batch) continue;
        return FAIL(ATTN_ARGUMENT, "there is no row %lld; the caches have %lld",
                    (long long)rows[i], (long long)session->batch);
    }
    code = session_open(session->graphs, fork, error);
    if (code != ATTN_OK) return code;
    fork->batch = count;
    fork->capacity = session->capacity;
    fork->held = calloc((size_t)count, sizeof *fork->held);
    if (fork->held == NULL) code = FAIL(ATTN_MEMORY, "out of memory");
    for (int64_t i = 0; code == ATTN_OK && i < count; i++) fork->held[i] = session->held[rows[i]];
    for (size_t i = 0; code == ATTN_OK && i < BUNDLE.input_count; i++) {
        fork->given[i] = is_encoded(&BUNDLE.inputs[i]);
        if (BUNDLE.inputs[i].present == NULL && !fork->given[i]) continue;
        code = copy_cache(session, i, rows, count, -1, &fork->inputs[i], error);
    }
    if (code != ATTN_OK) session_close(fork);
    return code;
}

/* -- tokens ------------------------------------------------------------------------------ */

static bool ends_text(int64_t token) {
    for (size_t at = 0; at < BUNDLE.ids.end_count; at++) {
        if (BUNDLE.ids.ends[at] == token) return true;
    }
    return false;
}

int session_start(Session *session, const int64_t *ids, int64_t length, int64_t count,
                  Error *error) {
    const Ids *known = &BUNDLE.ids;
    if (known->most == 0) return FAIL(ATTN_ARGUMENT, "this bundle is no model that continues ids");
    if (length < 1) return FAIL(ATTN_ARGUMENT, "the prompt has no token");
    if (count < 1 || count > known->most || length > known->most - count + 1) {
        return FAIL(ATTN_ARGUMENT, "%lld tokens and %lld more: the bundle takes %lld",
                    (long long)length, (long long)count, (long long)known->most);
    }
    for (int64_t at = 0; at < length; at++) {
        if (ids[at] >= 0 && ids[at] < known->vocabulary) continue;
        return FAIL(ATTN_ARGUMENT, "there is no token %lld; ids are 0 to %lld", (long long)ids[at],
                    (long long)known->vocabulary - 1);
    }
    int64_t *prompt = malloc((size_t)length * sizeof *prompt);
    if (prompt == NULL) return FAIL(ATTN_MEMORY, "out of memory");
    memcpy(prompt, ids, (size_t)length * sizeof *prompt);
    /* Nothing of an earlier use stays: an input may point to the last prompt. */
    for (size_t i = 0; i < BUNDLE.input_count; i++) {
        session->given[i] = session->given[i] && is_encoded(&BUNDLE.inputs[i]);
    }
    forget(session);
    free(session->prompt);
    session->prompt = prompt;
    session->length = length;
    session->count = count;
    session->made = 0;
    return ATTN_OK;
}

int session_next(Session *session, int64_t *token, Error *error) {
    if (session->prompt == NULL) return FAIL(ATTN_STATE, "no text was started");
    bool first = session->made == 0;
    if (session->made == session->count || (!first && ends_text(session->next))) return ATTN_END;
    int64_t tokens = first ? session->length : 1;
    attn_value ids = {.name = "input_ids", .dtype = INT64, .rank = 2, .dims = {1, tokens},
                      .data = first ? session->prompt : &session->next, .bytes = tokens * 8};
    int code = session_set(session, &ids, false, error);
    /* The last token is not run. */
    if (code == ATTN_OK) {
        code = first ? session_prefill(session, session->length + session->count - 1, NULL, 0, error)
                     : session_step(session, error);
    }
    if (code != ATTN_OK) return code;
    const Tensor *logits = tensor_find(session->outputs, session->output_count, "logits");
    int64_t next = logits == NULL ? -1 : tensor_largest(logits, BUNDLE.ids.vocabulary);
    if (next < 0) return FAIL(ATTN_RUNTIME, "the graph gives no logits");
    session->next = *token = next;
    session->made++;
    return ATTN_OK;
}
