/* Facts about the bundle of this project. bundle.c was generated from the bundle's files. */
#ifndef BUNDLE_H
#define BUNDLE_H

#include "judge.h"
#include "model.h"

/* An axis: a fixed size, or a name if its size may differ from case to case. */
typedef struct {
    const char *name;
    int64_t size;
} Axis;

/* An input or output of the graph. */
typedef struct {
    const char *name;
    const char *present; /* of a cache, the output that it is in the next step; else NULL */
    int dtype;
    size_t rank;
    Axis axes[MAX_RANK];
    size_t order[MAX_RANK]; /* axis i of the graph is axes[order[i]] */
} End;

/* A test case: its folder in golden/, a tolerance per output, and batch elements to ignore. */
typedef struct {
    const char *name, *folder;
    const Tolerance *tolerances;
    IgnoredRows ignored;
} Case;

/*
 * Of a whole model: the number of its token ids and of tokens that a cache may hold, of an
 * encoder-decoder the id that begins a text, and the ids that end one. Of a layer, which takes no ids, 0.
 */
typedef struct {
    int64_t vocabulary, most, first;
    const int64_t *ends;
    size_t end_count;
} Ids;

/*
 * Of an encoder of texts: the most tokens of a text, the id of padding, the size of a vector, the output
 * that it is, and where shorter texts are padded. Of others, 0.
 */
typedef struct {
    int64_t most, pad, width;
    size_t output;
    bool pads_left;
} OfTexts;

typedef enum { NO_CACHE, APPENDED_CACHE, CACHE_IN_PLACE } Cache;

typedef struct {
    const char *name, *graph;
    const char *decode; /* the graph for single tokens, or NULL */
    const char *encoder; /* the graph of the encoder for this decoder, or NULL */
    const End *encoder_inputs;
    size_t encoder_input_count;
    const char *const *files; /* files that ONNX Runtime opens: graphs and weights */
    size_t file_count;
    Cache cache;
    const End *inputs, *outputs;
    size_t input_count, output_count;
    const char *const *input_names, *const *output_names;
    const Bound *bound;
    size_t bound_count;
    const Case *cases;
    size_t case_count;
    Ids ids;
    OfTexts of_texts;
    bool knows_mask; /* whether attn_mask means what this project says: True, or 0 to add, is seen */
    const Case *replay; /* the case that is also run token by token, or NULL */
} Bundle;

extern const Bundle BUNDLE;

#endif
