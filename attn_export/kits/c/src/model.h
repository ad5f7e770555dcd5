/* A graph in ONNX Runtime, on the CPU: open it once, run it as often as you like, close it. */
#ifndef MODEL_H
#define MODEL_H

#include "tensor.h"

typedef struct Model Model;

typedef struct {
    int threads; /* for computing; 0: as many as ONNX Runtime chooses */
    bool spin;   /* waiting threads spin: best where runs follow each other closely */
} ModelOptions;

/* An output that is to be written into the buffer of an input, as a cache in place is. */
typedef struct {
    const char *output, *input;
} Bound;

bool model_open(const char *graph, ModelOptions options, Model **model, Error *error);
void model_close(Model *model);

/* The version of ONNX Runtime that is really there. */
const char *model_version(void);

size_t model_output_count(const Model *model);
const char *model_output_name(const Model *model, size_t at);

/*
 * Runs once. `outputs` has room for `model_output_count` tensors, which come in the graph's order
 * and have to be freed; they live on when the next run comes. Those that are bound show the
 * elements of their input, which now holds them, and own nothing.
 */
bool model_run(Model *model, const Tensor *inputs, size_t input_count, const Bound *bound,
               size_t bound_count, Tensor *outputs, Error *error);

#endif
