/*
 * One bundle behind a C ABI for programs in any language: open it, run it on arrays of your own,
 * decode with its caches, generate tokens, embed texts, replay its stored test cases.
 *
 * Results: every function that returns int returns one of the codes below; of anything but ATTN_OK
 * and ATTN_END, attn_last_error() is one line. Nothing exits, prints, or calls back.
 *
 * Handles are numbers that are checked at each call. One that is closed, made up, or of the other
 * kind gives ATTN_HANDLE. A bundle may be closed before its sessions, which then still work.
 *
 * Threads: every function may be called from every thread, and none waits for another. A bundle may
 * be used by several threads at once. A session is used by one thread at a time: a second call
 * meanwhile gives ATTN_BUSY, as does closing what a call uses. attn_last_error() is of the thread
 * that calls it, so read it in the thread of the call that failed.
 *
 * Memory: arrays that are set as inputs stay yours. They are not copied, and must stay where they
 * are until the session is closed or that input is set anew. What functions return as const char *
 * is the library's; what attn_output() gives is valid until the next call that runs the session,
 * changes it, or closes it.
 *
 * Elements lie in C order, and axes in the order of the graph, which attn_describe() tells.
 */
#ifndef ATTN_EXPORT_H
#define ATTN_EXPORT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ATTN_API __attribute__((visibility("default")))
#else
#define ATTN_API
#endif

/* Raised by every change after which a program compiled with the old header would go wrong. */
#define ATTN_ABI_VERSION 2
#define ATTN_MAX_RANK 8

typedef uint64_t attn_handle; /* 0 is never one */

enum {
    ATTN_OK = 0,
    ATTN_END = 1,      /* attn_next: there are no more tokens */
    ATTN_ARGUMENT = 2, /* a NULL, an index, a size, a type or a value that the bundle does not take */
    ATTN_HANDLE = 3,   /* the handle is closed, made up, or of the other kind */
    ATTN_BUSY = 4,     /* another thread uses it */
    ATTN_STATE = 5,    /* it does not fit what was called before, as a step without a prefill */
    ATTN_BUNDLE = 6,   /* a file of the bundle is missing, damaged or of another bundle */
    ATTN_RUNTIME = 7,  /* ONNX Runtime is missing, or refused something */
    ATTN_MISMATCH = 8, /* attn_test_case: a number is wrong, or the case is not compared */
    ATTN_VERSION = 9,  /* the program was written for another version of this ABI */
    ATTN_MEMORY = 10   /* out of memory, or more than 4,096 handles */
};

/* What attn_get() tells of a bundle, and of a session from ATTN_HELD on. */
enum {
    ATTN_INPUTS = 0, ATTN_OUTPUTS = 1, /* how many there are; kinds of attn_describe(), too */
    ATTN_CASES = 2,                    /* of attn_test_case() */
    ATTN_CACHE = 3,                    /* 0: none; 1: it grows by each step; 2: written in place */
    ATTN_VOCABULARY = 4,               /* of a whole model the number of token ids, else 0 */
    ATTN_MOST_TOKENS = 5,              /* of a whole model the most tokens of a text, else 0 */
    ATTN_WIDTH = 6,                    /* numbers that attn_embed() gives of a text; 0: it does not */
    ATTN_ENCODER_INPUTS = 7, /* of an encoder-decoder those of attn_encode(); of attn_describe(), too */
    ATTN_FIRST = 8,          /* of an encoder-decoder the id that its texts begin with, else -1 */
    ATTN_HELD = 16,                    /* tokens in the caches: of the longest row */
    ATTN_COPIED = 17 /* bytes of caches copied so far: by attn_fork(), and attn_rewind() */
};

/*
 * An input or output of a bundle, or an array for it. Types are those of ONNX (TensorProto.DataType).
 * An array for one may also be said to be of 0 or 2 (uint8), whatever it holds, and one of float16 or
 * bfloat16 of 4 (uint16).
 */
typedef struct {
    const char *name;
    int32_t dtype;
    int32_t element_bytes; /* of one element of that type */
    int32_t needed;        /* of an input: whether attn_prefill() and attn_step() need it from you */
    int32_t rank;
    int64_t dims[ATTN_MAX_RANK];     /* of an axis of the bundle its fixed size, or -1 */
    const char *axes[ATTN_MAX_RANK]; /* the names of the axes that may have any size, else NULL */
    void *data;
    int64_t bytes;
} attn_value;

/* What attn_text() tells of a bundle. */
enum { ATTN_NAME = 0, ATTN_RUNTIME_VERSION = 1 };

ATTN_API const char *attn_last_error(void);

/*
 * Opens the folder of the bundle that this library was built for. `abi` is ATTN_ABI_VERSION: a library
 * of another version gives ATTN_VERSION, since this and attn_last_error() are the same in all versions.
 * `onnxruntime` is the path of ONNX Runtime's shared library; NULL or "": where the system finds it. It is
 * loaded once in a process, and nothing in the bundle says from where. `threads` are those that
 * compute, 0: ONNX Runtime's default; with `spin` they wait actively, which is faster if runs
 * follow each other closely.
 */
ATTN_API int attn_open(uint32_t abi, const char *folder, const char *onnxruntime, int32_t threads,
                       int32_t spin, attn_handle *bundle);
ATTN_API int attn_close(attn_handle handle);

ATTN_API int attn_get(attn_handle handle, int32_t what, int64_t *value);
/* Returns NULL after an error. */
ATTN_API const char *attn_text(attn_handle bundle, int32_t what);

/* Tells all of an input (ATTN_INPUTS, ATTN_ENCODER_INPUTS) or output (ATTN_OUTPUTS) but its elements. */
ATTN_API int attn_describe(attn_handle bundle, int32_t kind, int64_t index, attn_value *value);

/*
 * Runs a test case and judges its outputs by the rule of the bundle. ATTN_OK: it passed.
 * `line` says how, in at most `size` bytes with a zero at the end; 512 hold any.
 */
ATTN_API int attn_test_case(attn_handle bundle, int64_t index, char *line, int64_t size);

/* -- sessions: inputs, outputs, and the caches in between ---------------------------------- */

ATTN_API int attn_session(attn_handle bundle, attn_handle *session);

/*
 * Sets an input: its name, dtype, rank, dims, data and bytes, which must be those of the bundle. With
 * data of NULL and bytes of 0, the session makes zeros, says where, and frees them when it is closed or
 * the input is set anew.
 */
ATTN_API int attn_set_input(attn_handle session, attn_value *value);
/* Sets an input to the rows of a .npy file, again from the first until there are `rows`. */
ATTN_API int attn_load_input(attn_handle session, const char *name, const char *path, int64_t rows);

/* Runs once with the inputs that were set, all of them. A cache in place is written in your array. */
ATTN_API int attn_run(attn_handle session);

/* Tells an output of the last run, in place. Of a cache that is the cache itself: do not write. */
ATTN_API int attn_output(attn_handle session, const char *name, int32_t dtype, attn_value *value);
/* Writes an output of the last run to a .npy file; bfloat16 as uint16. */
ATTN_API int attn_save_output(attn_handle session, const char *name, const char *path);

/*
 * Runs the first tokens of new texts. The session makes the caches; where they are written in
 * place, they take `capacity` tokens, 0: those of this call. `lengths` of `count` rows are the
 * tokens of each without its padding on the right; NULL: all. With a cache that grows, all rows are
 * as long. Of inputs that are not `needed` and not set, the session makes caches, past_length,
 * position_ids (counted on), logit_index (the last token of each row), and an attn_mask that hides
 * nothing.
 */
ATTN_API int attn_prefill(attn_handle session, int64_t capacity, const int64_t *lengths,
                          int64_t count);
/* Runs more tokens of each row. After an error the session is as it was before. */
ATTN_API int attn_step(attn_handle session);
/* Drops the last `tokens` tokens of each row. */
ATTN_API int attn_rewind(attn_handle session, int64_t tokens);
/* Makes a session that goes on from copies of the caches of `count` rows, in this order. */
ATTN_API int attn_fork(attn_handle session, const int64_t *rows, int64_t count,
                       attn_handle *fork);

/*
 * Runs the encoder of an encoder-decoder on arrays of all its inputs, which are not kept. The session
 * holds what the decoder takes of it until the next call; prefill, or start with ATTN_FIRST.
 */
ATTN_API int attn_encode(attn_handle session, const attn_value *values, int64_t count);

/* -- tokens of a whole model --------------------------------------------------------------- */

/* Begins a text of at most `count` tokens after `length` ids, of which the session takes a copy. */
ATTN_API int attn_start(attn_handle session, const int64_t *ids, int64_t length, int64_t count);
/* Makes the next token, that with the largest logit. ATTN_END after the one that ends the text. */
ATTN_API int attn_next(attn_handle session, int64_t *token);

/* -- vectors of texts ---------------------------------------------------------------------- */

/*
 * Makes the vectors of `count` texts, or their scores. `ids` are the tokens of one text after the
 * other, with those that a tokenizer adds; `lengths` says how many each text has, and `total` all;
 * `types` are the types of the tokens of pairs, NULL: 0. Texts of about one length run together, with
 * the padding that the model takes. `vectors` has room for `size` numbers, ATTN_WIDTH for each text.
 */
ATTN_API int attn_embed(attn_handle bundle, const int64_t *ids, const int64_t *types, int64_t total,
                        const int64_t *lengths, int64_t count, float *vectors, int64_t size);

#ifdef __cplusplus
}
#endif

#endif
