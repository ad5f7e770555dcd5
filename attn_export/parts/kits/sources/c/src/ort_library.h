/* ONNX Runtime's shared library, which is loaded when it is needed first. */
#ifndef ORT_LIBRARY_H
#define ORT_LIBRARY_H

#include <onnxruntime_c_api.h>

#include "error.h"

/*
 * Loads it from a path, or NULL: from where the system finds it. Once in a process: another library
 * later is an error.
 */
bool ort_load(const char *path, Error *error);

/* After it was loaded. */
const OrtApi *ort(void);
const char *ort_version(void);

#endif
