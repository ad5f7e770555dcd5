/* Whether what lies in the bundle's folder is what this project was written for. */
#ifndef BUNDLE_CHECK_H
#define BUNDLE_CHECK_H

#include "bundle.h"

/* Checks that graphs and weights are regular files. */
bool bundle_files(const char *bundle, Error *error);
/* The path of a file of the bundle into a buffer. */
bool bundle_path(const char *bundle, const char *name, char *path, size_t size, Error *error);

/*
 * Checks the types, ranks and sizes of a case: an axis of a number has that size, and axes of one
 * name have one size in all tensors. `folder` is that of the case, for what the error says.
 */
bool case_fits(const char *folder, const Tensor *inputs, const Tensor *truths, Error *error);

#endif
