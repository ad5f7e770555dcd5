/* A graph in ONNX Runtime, on the CPU: open it once, run it as often as you like, close it. */
#ifndef MODEL_H
#define MODEL_H

#include "tensor.h"

typedef struct Model Model;

typedef struct {
    int threads; /* threads for computing; 0: the default of ONNX Runtime */
    bool spin;   /* threads spin while they wait: faster if runs follow each other closely */
} ModelOptions;

/* An output that is written into the buffer of an input, such as a cache in place. */
typedef struct {
    const char *output, *input;
} Bound;

bool model_open(const char *graph, ModelOptions options, Model **model, Error *error);
void model_close(Model *model);

/* The version of the ONNX Runtime library, which the first graph that is opened loads. */
const char *model_version(void);

size_t model_output_count(const Model *model);
const char *model_output_name(const Model *model, size_t at);

/*
 * Runs once. `outputs` must hold `model_output_count` tensors, in the graph's order. The
 * caller must free them; they stay valid after the next run. Bound outputs own no memory: they
 * point to the elements of their input, into which they were written.
 */
bool model_run(Model *model, const Tensor *inputs, size_t input_count, const Bound *bound,
               size_t bound_count, Tensor *outputs, Error *error);

#endif
