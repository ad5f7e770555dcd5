/*
 * The graphs of the bundle: one for any number of tokens and, where there is one, that for single
 * tokens. Both hold the cache alike, which may be with its axes in another order.
 */
#ifndef GRAPHS_H
#define GRAPHS_H

#include "bundle.h"

typedef struct {
    Model *any, *single; /* `single` is NULL where there is none */
} Graphs;

bool graphs_open(const char *bundle, ModelOptions options, Graphs *graphs, Error *error);
void graphs_close(Graphs *graphs);

/* Runs the graph for the number of tokens; the inputs are those of the bundle, in its order. */
bool graphs_run(const Graphs *graphs, const Tensor *inputs, Tensor *outputs, Error *error);

/* Puts the axes of all inputs into the order of the graph. */
bool to_graph(Tensor *inputs, Error *error);
/* Puts the axes of outputs into the order of the bundle's signature. */
bool from_graph(Tensor *outputs, size_t count, Error *error);

#endif
