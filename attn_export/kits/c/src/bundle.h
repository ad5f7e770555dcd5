/* What this project knows of its bundle. bundle.c was written from the bundle's index. */
#ifndef BUNDLE_H
#define BUNDLE_H

#include "judge.h"
#include "model.h"

/* An axis has one size, or a name where it may have any. */
typedef struct {
    const char *name;
    int64_t size;
} Axis;

/* An input or output of the graph. */
typedef struct {
    const char *name;
    int dtype;
    size_t rank;
    Axis axes[MAX_RANK];
    size_t order[MAX_RANK]; /* axis i is axes[order[i]] in the graph: a cache may be laid out otherwise */
} End;

/* A golden case: files below golden/, a tolerance for each output, and what is not compared. */
typedef struct {
    const char *name, *folder;
    const Tolerance *tolerances;
    IgnoredRows ignored;
} Case;

typedef enum { NO_CACHE, APPENDED_CACHE, CACHE_IN_PLACE } Cache;

typedef struct {
    const char *name, *graph;
    const char *decode; /* the graph for single tokens, or NULL */
    const char *const *files; /* those that ONNX Runtime opens: the graphs, their weights */
    size_t file_count;
    Cache cache;
    const End *inputs, *outputs;
    size_t input_count, output_count;
    const char *const *input_names, *const *output_names;
    const Bound *bound;
    size_t bound_count;
    const Case *cases;
    size_t case_count;
    const Case *replay; /* the case that is also fed token by token, or NULL */
} Bundle;

extern const Bundle BUNDLE;

#endif
