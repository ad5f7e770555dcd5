#include "attn_export.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "bundle_check.h"
#include "cases.h"
#include "embed_texts.h"
#include "npy.h"
#include "ort_library.h"

/* -- errors ------------------------------------------------------------------------------ */

static _Thread_local Error last;

const char *attn_last_error(void) { return last.text; }

#define REFUSE(code, ...) refused(code, fail(&last, __VA_ARGS__))

/* -- handles ----------------------------------------------------------------------------- */

enum { SLOTS = 1 << 12 };

/* An open bundle, until its handle and the last of its sessions are closed. */
typedef struct {
    Graphs graphs;
    char *folder;
    int owners;
} Opened;

typedef struct {
    Session session;
    Opened *of;
} Held;

typedef enum { NOTHING, BUNDLES, SESSIONS, EITHER } Kind;

typedef struct {
    attn_handle handle;
    Kind kind;
    int users; /* calls that use it now */
    void *object;
} Slot;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Slot slots[SLOTS];
static uint64_t opened; /* how many handles there were: none is given twice */

/* Returns the object of a handle for one call, which must leave() it; NULL with a code if refused. */
static void *enter(attn_handle handle, Kind kind, int *code) {
    void *object = NULL;
    pthread_mutex_lock(&lock);
    Slot *slot = &slots[handle % SLOTS];
    bool is = slot->kind != NOTHING && slot->handle == handle &&
              (kind == EITHER || slot->kind == kind);
    *code = !is ? ATTN_HANDLE : slot->kind == SESSIONS && slot->users > 0 ? ATTN_BUSY : ATTN_OK;
    if (*code == ATTN_OK) {
        slot->users++;
        object = slot->object;
    }
    pthread_mutex_unlock(&lock);
    if (*code == ATTN_HANDLE) {
        fail(&last, "%llu is no open %s", (unsigned long long)handle,
             kind == BUNDLES ? "bundle" : kind == SESSIONS ? "session" : "handle");
    } else if (*code == ATTN_BUSY) {
        fail(&last, "another thread uses this session");
    }
    return object;
}

static int leave(attn_handle handle, int code, const Error *error) {
    pthread_mutex_lock(&lock);
    slots[handle % SLOTS].users--;
    pthread_mutex_unlock(&lock);
    if (error != NULL && error->text[0] != '\0') last = *error;
    return code;
}

/* Calls a function on the object of a handle, for the caller's `held` or `bundle`. */
#define CALL(type, object, handle, kind, call)                      \
    do {                                                            \
        int code;                                                   \
        Error error = {""};                                         \
        type *object = enter(handle, kind, &code);                  \
        return object == NULL ? code : leave(handle, call, &error); \
    } while (0)
#define WITH_SESSION(handle, call) CALL(Held, held, handle, SESSIONS, call)

static int need(bool given) { return given ? ATTN_OK : REFUSE(ATTN_ARGUMENT, "an argument is NULL"); }

static int add(Kind kind, void *object, attn_handle *handle) {
    int code = ATTN_MEMORY;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < SLOTS && code != ATTN_OK; i++) {
        uint64_t next = ++opened;
        Slot *slot = &slots[next % SLOTS];
        if (slot->kind != NOTHING) continue;
        *slot = (Slot){next, kind, 0, object};
        *handle = next;
        code = ATTN_OK;
    }
    pthread_mutex_unlock(&lock);
    return code == ATTN_OK ? code : REFUSE(code, "%d handles are open; close some", SLOTS);
}

/* Adds or removes an owner of a bundle, and frees it after the last one. */
static void own(Opened *bundle, int change) {
    pthread_mutex_lock(&lock);
    bool free_it = (bundle->owners += change) == 0;
    pthread_mutex_unlock(&lock);
    if (!free_it) return;
    graphs_close(&bundle->graphs);
    free(bundle->folder);
    free(bundle);
}

static void close_session(Held *held) {
    session_close(&held->session);
    own(held->of, -1);
    free(held);
}

int attn_close(attn_handle handle) {
    pthread_mutex_lock(&lock);
    Slot *slot = &slots[handle % SLOTS], found = *slot;
    bool is = found.kind != NOTHING && found.handle == handle, used = is && found.users > 0;
    if (is && !used) *slot = (Slot){0};
    pthread_mutex_unlock(&lock);
    if (!is) return REFUSE(ATTN_HANDLE, "%llu is no open handle", (unsigned long long)handle);
    if (used) return REFUSE(ATTN_BUSY, "another thread uses this handle");
    if (found.kind == BUNDLES) own(found.object, -1);
    else close_session(found.object);
    return ATTN_OK;
}

/* -- bundles ----------------------------------------------------------------------------- */

static int open_bundle(Opened *bundle, const char *folder, ModelOptions options, Error *error) {
    size_t length = strlen(folder);
    if (length == 0 || length > 2048) {
        return FAIL(ATTN_ARGUMENT, "the path of the bundle has %zu bytes, expected 1 to 2048", length);
    }
    bundle->folder = malloc(length + 1);
    if (bundle->folder == NULL) return FAIL(ATTN_MEMORY, "out of memory");
    memcpy(bundle->folder, folder, length + 1);
    if (!bundle_files(folder, error)) return ATTN_BUNDLE;
    return graphs_open(folder, options, &bundle->graphs, error) ? ATTN_OK : ATTN_RUNTIME;
}

int attn_open(uint32_t abi, const char *folder, const char *onnxruntime, int32_t threads,
              int32_t spin, attn_handle *bundle) {
    if (abi != ATTN_ABI_VERSION) {
        return REFUSE(ATTN_VERSION, "the program is for version %u of the library, which has %d", abi,
                      ATTN_ABI_VERSION);
    }
    if (need(folder != NULL && bundle != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    if (threads < 0 || threads > 1024) {
        return REFUSE(ATTN_ARGUMENT, "threads are %d, expected 0 to 1024", (int)threads);
    }
    bool named = onnxruntime != NULL && onnxruntime[0] != '\0';
    if (!ort_load(named ? onnxruntime : NULL, &last)) return ATTN_RUNTIME;
    Opened *made = calloc(1, sizeof *made);
    if (made == NULL) return REFUSE(ATTN_MEMORY, "out of memory");
    made->owners = 1;
    int code = open_bundle(made, folder, (ModelOptions){threads, spin != 0}, &last);
    if (code == ATTN_OK) code = add(BUNDLES, made, bundle);
    if (code != ATTN_OK) own(made, -1);
    return code;
}

static int get_of_bundle(int32_t what, int64_t *value, Error *error) {
    switch (what) {
        case ATTN_INPUTS: *value = (int64_t)BUNDLE.input_count; return ATTN_OK;
        case ATTN_OUTPUTS: *value = (int64_t)BUNDLE.output_count; return ATTN_OK;
        case ATTN_CASES:
            *value = (int64_t)BUNDLE.case_count + (BUNDLE.replay != NULL);
            return ATTN_OK;
        case ATTN_CACHE: *value = BUNDLE.cache; return ATTN_OK;
        case ATTN_VOCABULARY: *value = BUNDLE.ids.vocabulary; return ATTN_OK;
        case ATTN_MOST_TOKENS: *value = BUNDLE.ids.most + BUNDLE.of_texts.most; return ATTN_OK;
        case ATTN_WIDTH: *value = BUNDLE.of_texts.width; return ATTN_OK;
        case ATTN_ENCODER_INPUTS: *value = (int64_t)BUNDLE.encoder_input_count; return ATTN_OK;
        case ATTN_FIRST: *value = BUNDLE.encoder != NULL ? BUNDLE.ids.first : -1; return ATTN_OK;
        default: return FAIL(ATTN_ARGUMENT, "a bundle does not tell %d", (int)what);
    }
}

static int get_of_session(const Session *session, int32_t what, int64_t *value) {
    *value = what == ATTN_HELD ? session_held(session) : session->copied;
    return ATTN_OK;
}

int attn_get(attn_handle handle, int32_t what, int64_t *value) {
    if (need(value != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    if (what == ATTN_HELD || what == ATTN_COPIED) {
        WITH_SESSION(handle, get_of_session(&held->session, what, value));
    }
    CALL(Opened, bundle, handle, BUNDLES, get_of_bundle(what, value, &error));
}

const char *attn_text(attn_handle handle, int32_t what) {
    int code;
    if (enter(handle, BUNDLES, &code) == NULL) return NULL;
    const char *text = what == ATTN_NAME              ? BUNDLE.name
                       : what == ATTN_RUNTIME_VERSION ? ort_version()
                                                      : NULL;
    if (text == NULL) fail(&last, "a bundle has no text %d", (int)what);
    leave(handle, ATTN_OK, NULL);
    return text;
}

static int describe(int32_t kind, int64_t index, attn_value *value, Error *error) {
    bool input = kind == ATTN_INPUTS, encoder = kind == ATTN_ENCODER_INPUTS;
    const End *ends = input ? BUNDLE.inputs : encoder ? BUNDLE.encoder_inputs : BUNDLE.outputs;
    int64_t count = (int64_t)(input     ? BUNDLE.input_count
                              : encoder ? BUNDLE.encoder_input_count
                                        : BUNDLE.output_count);
    if ((!input && !encoder && kind != ATTN_OUTPUTS) || index < 0 || index >= count) {
        return FAIL(ATTN_ARGUMENT, "there is no value %lld of kind %d", (long long)index, (int)kind);
    }
    const End *end = &ends[index];
    *value = (attn_value){.name = end->name, .dtype = end->dtype, .rank = (int32_t)end->rank};
    value->element_bytes = (int32_t)element_bytes(end->dtype);
    value->needed = input && !has_default(end);
    for (size_t at = 0; at < end->rank; at++) {
        const Axis *axis = &end->axes[end->order[at]];
        value->dims[at] = axis->name != NULL ? -1 : axis->size;
        value->axes[at] = axis->name;
    }
    return ATTN_OK;
}

int attn_describe(attn_handle handle, int32_t kind, int64_t index, attn_value *value) {
    if (need(value != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    CALL(Opened, bundle, handle, BUNDLES, describe(kind, index, value, &error));
}

static int test_case(const Opened *bundle, int64_t index, char *line, int64_t size, Error *error) {
    line[0] = '\0';
    if (index < 0 || index >= (int64_t)BUNDLE.case_count + (BUNDLE.replay != NULL)) {
        return FAIL(ATTN_ARGUMENT, "there is no case %lld", (long long)index);
    }
    int code = case_test(&bundle->graphs, bundle->folder, (size_t)index, line, (size_t)size, error);
    if (code == ATTN_MISMATCH) fail(error, "%s", line);
    return code;
}

int attn_test_case(attn_handle handle, int64_t index, char *line, int64_t size) {
    if (line == NULL || size < 1) return REFUSE(ATTN_ARGUMENT, "the line has no room");
    CALL(Opened, bundle, handle, BUNDLES, test_case(bundle, index, line, size, &error));
}

int attn_embed(attn_handle handle, const int64_t *ids, const int64_t *types, int64_t total,
               const int64_t *lengths, int64_t count, float *vectors, int64_t size) {
    if (need(ids != NULL && lengths != NULL && vectors != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    Texts texts = {ids, types, lengths, total, count};
    CALL(Opened, bundle, handle, BUNDLES, embed_texts(&bundle->graphs, &texts, vectors, size, &error));
}

/* -- sessions ---------------------------------------------------------------------------- */

/* Adds a session of a bundle, if it was made. */
static int add_session(int code, Held *held, Opened *of, attn_handle *session) {
    if (code != ATTN_OK) {
        free(held);
        return code;
    }
    held->of = of;
    own(of, 1);
    code = add(SESSIONS, held, session);
    if (code != ATTN_OK) close_session(held);
    return code;
}

static int new_session(Opened *bundle, attn_handle *session, Error *error) {
    Held *held = calloc(1, sizeof *held);
    if (held == NULL) return FAIL(ATTN_MEMORY, "out of memory");
    return add_session(session_open(&bundle->graphs, &held->session, error), held, bundle, session);
}

int attn_session(attn_handle handle, attn_handle *session) {
    if (need(session != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    CALL(Opened, bundle, handle, BUNDLES, new_session(bundle, session, &error));
}

static int new_fork(Held *from, const int64_t *rows, int64_t count, attn_handle *fork,
                    Error *error) {
    Held *held = calloc(1, sizeof *held);
    if (held == NULL) return FAIL(ATTN_MEMORY, "out of memory");
    return add_session(session_fork(&from->session, rows, count, &held->session, error), held,
                       from->of, fork);
}

int attn_fork(attn_handle handle, const int64_t *rows, int64_t count, attn_handle *fork) {
    if (need(rows != NULL && fork != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    WITH_SESSION(handle, new_fork(held, rows, count, fork, &error));
}

int attn_set_input(attn_handle handle, attn_value *value) {
    if (need(value != NULL && value->name != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    WITH_SESSION(handle, session_set(&held->session, value, false, &error));
}

int attn_load_input(attn_handle handle, const char *name, const char *path, int64_t rows) {
    if (need(name != NULL && path != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    WITH_SESSION(handle, npy_load(&held->session, name, path, rows, &error));
}

/* Returns an output of the last run, in `found`, if it has elements of this type. */
static int find_output(const Session *session, const char *name, int dtype, int64_t *index,
                       const Tensor **found, Error *error) {
    *index = 0;
    while (*index < (int64_t)BUNDLE.output_count && strcmp(BUNDLE.outputs[*index].name, name) != 0) ++*index;
    if (*index == (int64_t)BUNDLE.output_count) {
        return FAIL(ATTN_ARGUMENT, "there is no output %.60s", name);
    }
    *found = session_output(session, name);
    if (*found == NULL) return FAIL(ATTN_STATE, "%.60s is of no run", name);
    if (is_held_by(dtype, (*found)->dtype)) return ATTN_OK;
    return FAIL(ATTN_ARGUMENT, "%.60s has type %d, not %d", name, (*found)->dtype, dtype);
}

static int output(const Session *session, const char *name, int dtype, attn_value *value, Error *error) {
    const Tensor *found;
    int64_t index;
    int code = find_output(session, name, dtype, &index, &found, error);
    if (code == ATTN_OK) code = describe(ATTN_OUTPUTS, index, value, error);
    if (code != ATTN_OK) return code;
    value->dtype = found->dtype;
    value->element_bytes = (int32_t)element_bytes(found->dtype);
    value->rank = (int32_t)found->rank;
    for (size_t axis = 0; axis < found->rank; axis++) value->dims[axis] = found->dims[axis];
    value->data = found->data;
    value->bytes = (int64_t)tensor_bytes(found);
    return ATTN_OK;
}

int attn_output(attn_handle handle, const char *name, int32_t dtype, attn_value *value) {
    if (need(name != NULL && value != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    WITH_SESSION(handle, output(&held->session, name, dtype, value, &error));
}

static int save_output(const Session *session, const char *name, const char *path, Error *error) {
    const Tensor *found;
    int64_t index;
    int code = find_output(session, name, 0, &index, &found, error);
    return code == ATTN_OK ? npy_save(found, path, error) : code;
}

int attn_save_output(attn_handle handle, const char *name, const char *path) {
    if (need(name != NULL && path != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    WITH_SESSION(handle, save_output(&held->session, name, path, &error));
}

int attn_run(attn_handle handle) {
    WITH_SESSION(handle, session_run(&held->session, &error));
}

int attn_prefill(attn_handle handle, int64_t capacity, const int64_t *lengths, int64_t count) {
    WITH_SESSION(handle, session_prefill(&held->session, capacity, lengths, count, &error));
}

int attn_encode(attn_handle handle, const attn_value *values, int64_t count) {
    if (need(values != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    WITH_SESSION(handle, session_encode(&held->session, values, count, &error));
}

int attn_step(attn_handle handle) {
    WITH_SESSION(handle, session_step(&held->session, &error));
}

int attn_rewind(attn_handle handle, int64_t tokens) {
    WITH_SESSION(handle, session_rewind(&held->session, tokens, &error));
}

int attn_start(attn_handle handle, const int64_t *ids, int64_t length, int64_t count) {
    if (need(ids != NULL || length <= 0) != ATTN_OK) return ATTN_ARGUMENT;
    WITH_SESSION(handle, session_start(&held->session, ids, length, count, &error));
}

int attn_next(attn_handle handle, int64_t *token) {
    if (need(token != NULL) != ATTN_OK) return ATTN_ARGUMENT;
    WITH_SESSION(handle, session_next(&held->session, token, &error));
}
