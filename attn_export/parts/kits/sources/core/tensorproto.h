/* Reading of ONNX TensorProto files, with the fields dims, data_type, name and raw_data. */
#ifndef TENSORPROTO_H
#define TENSORPROTO_H

#include "tensor.h"

/* Reads a regular file of at most 256 MiB. */
bool tensor_read(const char *path, Tensor *tensor, Error *error);

/* Reads FOLDER/STEM_0.pb, FOLDER/STEM_1.pb ..., whose tensors must have these names in order. */
bool tensors_read(const char *folder, const char *stem, const char *const *names, size_t count,
                  Tensor *tensors, Error *error);

#endif
