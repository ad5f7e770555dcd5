/*
 * The graphs of the bundle: one for any number of tokens and, if the bundle has it, one for single
 * tokens. In both, the axes of the cache may be in another order than in the signature.
 */
#ifndef GRAPHS_H
#define GRAPHS_H

#include "bundle.h"

typedef struct {
    Model *any, *single, *encoder; /* but for `any`, NULL where the bundle has none */
} Graphs;

bool graphs_open(const char *bundle, ModelOptions options, Graphs *graphs, Error *error);
void graphs_close(Graphs *graphs);

/* Runs the graph that suits the number of tokens. Inputs are in the order of the bundle. */
bool graphs_run(const Graphs *graphs, const Tensor *inputs, Tensor *outputs, Error *error);

/* Transposes the inputs from the signature's order of axes to the graph's. */
bool to_graph(Tensor *inputs, Error *error);
/* Transposes outputs from the graph's order of axes to the signature's. */
bool from_graph(Tensor *outputs, size_t count, Error *error);

#endif
