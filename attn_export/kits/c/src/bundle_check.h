/* Whether what lies in the bundle's folder is what this project was written for. */
#ifndef BUNDLE_CHECK_H
#define BUNDLE_CHECK_H

#include "bundle.h"

/* Checks that graphs and weights are regular files; `graph` gets the path of the graph. */
bool bundle_files(const char *bundle, char *graph, size_t size, Error *error);

/*
 * Checks the types, ranks and sizes of a case: an axis of a number has that size, and axes of one
 * name have one size in all tensors. `folder` is that of the case, for what the error says.
 */
bool case_fits(const char *folder, const Tensor *inputs, const Tensor *truths, Error *error);

#endif
