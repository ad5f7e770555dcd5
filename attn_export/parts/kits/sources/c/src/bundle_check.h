/* Checks that the bundle's folder holds the bundle that this project was generated for. */
#ifndef BUNDLE_CHECK_H
#define BUNDLE_CHECK_H

#include "bundle.h"

/* Checks that graphs and weights are regular files. */
bool bundle_files(const char *bundle, Error *error);
/* Writes the path of a file of the bundle to a buffer. */
bool bundle_path(const char *bundle, const char *name, char *path, size_t size, Error *error);

/*
 * Checks types, ranks and sizes of a case: a fixed axis must have its size, and axes of the same
 * name must have the same size in all tensors. `folder` is the case's folder, for messages.
 */
bool case_fits(const char *folder, const Tensor *inputs, const Tensor *references, Error *error);

/* Checks the same of the inputs of a run, whose axes are in the order of the graph. */
bool inputs_fit(const Tensor *inputs, Error *error);

#endif
