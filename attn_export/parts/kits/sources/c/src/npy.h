/* Arrays of NumPy: a .npy as an input of a session, and a tensor as a .npy. */
#ifndef NPY_H
#define NPY_H

#include "session.h"

int npy_load(Session *session, const char *name, const char *path, int64_t rows, Error *error);
int npy_save(const Tensor *tensor, const char *path, Error *error);

#endif
