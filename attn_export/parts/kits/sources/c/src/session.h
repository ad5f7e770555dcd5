/* A session: the inputs and outputs of runs, and the caches between them. */
#ifndef SESSION_H
#define SESSION_H

#include "attn_export.h"
#include "graphs.h"

typedef struct {
    const Graphs *graphs;
    Tensor *inputs, *outputs; /* inputs in the order of the bundle, outputs in that of the graph */
    bool *given;              /* of each input, whether the caller has set it */
    size_t output_count;
    bool ran; /* whether there are outputs */
    int64_t *held; /* of each row, the tokens in its caches; NULL without a prefill */
    int64_t batch, capacity, copied;
    int64_t *prompt; /* of a text that was started, its ids */
    int64_t length, made, count, next;
} Session;

/* Functions that return int return a code of attn_export.h. FAIL gives one, and sets `error`. */
static inline int refused(int code, bool failed) { return failed ? ATTN_OK : code; }
#define FAIL(code, ...) refused(code, fail(error, __VA_ARGS__))

int session_open(const Graphs *graphs, Session *session, Error *error);
void session_close(Session *session);

/* Sets the input of the value's name. The session frees an array that it `owns`, or has made. */
int session_set(Session *session, attn_value *value, bool owns, Error *error);
int session_run(Session *session, Error *error);
int session_prefill(Session *session, int64_t capacity, const int64_t *lengths, int64_t count,
                    Error *error);
int session_encode(Session *session, const attn_value *values, int64_t count, Error *error);
int session_step(Session *session, Error *error);
int session_rewind(Session *session, int64_t tokens, Error *error);
int session_fork(Session *session, const int64_t *rows, int64_t count, Session *fork,
                 Error *error);
int session_start(Session *session, const int64_t *ids, int64_t length, int64_t count,
                  Error *error);
int session_next(Session *session, int64_t *token, Error *error);

/* Returns whether a prefill and a step make an input that the caller has not set. */
bool has_default(const End *end);

/* Returns an output of the last run, or the cache that it became; NULL without a run. */
const Tensor *session_output(const Session *session, const char *name);
/* Returns whether elements that are said to be of a type may be of this one: see attn_value. */
bool is_held_by(int said, int dtype);

/* The tokens of the longest row. */
int64_t session_held(const Session *session);

#endif
