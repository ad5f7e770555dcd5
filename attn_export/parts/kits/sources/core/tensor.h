/* A plain tensor: a name, a type, dimensions, and elements in C order. */
#ifndef TENSOR_H
#define TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

#define MAX_RANK 8

/* Types of elements, as ONNX numbers them (TensorProto.DataType). */
enum {
    FLOAT32 = 1, UINT8 = 2, INT8 = 3, UINT16 = 4, INT16 = 5, INT32 = 6, INT64 = 7,
    BOOL = 9, FLOAT16 = 10, FLOAT64 = 11, UINT32 = 12, UINT64 = 13, BFLOAT16 = 16,
};

typedef struct {
    char *name;
    int dtype;
    size_t rank;
    int64_t dims[MAX_RANK];
    void *data;
    /* Argument of `release`, called by `tensor_free`. NULL if another tensor owns the elements. */
    void *owner;
    void (*release)(void *owner);
} Tensor;

/* Sets the number of bytes of a tensor. Returns false for sizes that no tensor has. */
bool bytes_of(const char *name, int dtype, size_t rank, const int64_t *dims, size_t *bytes,
              Error *error);
/* Allocates a tensor of zeros. */
bool tensor_new(const char *name, int dtype, size_t rank, const int64_t *dims, Tensor *tensor,
                Error *error);
/* Frees the memory of a tensor and sets it to {0}, which may be freed again. */
void tensor_free(Tensor *tensor);
void tensors_free(Tensor *tensors, size_t count);
bool tensor_rename(Tensor *tensor, const char *name, Error *error);

/* Returns the tensor of this name, or NULL. */
Tensor *tensor_find(Tensor *tensors, size_t count, const char *name);

/* Returns the size of an element in bytes, or 0 for an unknown type. */
size_t element_bytes(int dtype);
bool is_floating(int dtype);
size_t tensor_count(const Tensor *tensor);
size_t tensor_bytes(const Tensor *tensor);

/* Returns the element with this index in C order, as a double. */
double tensor_get(const Tensor *tensor, size_t at);
/* Sets an element. For float16 and bfloat16 the value is rounded towards 0. */
void tensor_set(Tensor *tensor, size_t at, double value);

/* Returns the index of the largest of the last `count` elements, the first one of equal ones; -1 if
 * there are fewer. */
int64_t tensor_largest(const Tensor *tensor, int64_t count);

/*
 * Copies a block of `sizes` from index `from_at` to index `to_at`. Returns false if types or ranks
 * differ, or if the block does not fit into both tensors.
 */
bool tensor_copy_block(Tensor *to, const int64_t *to_at, const Tensor *from,
                       const int64_t *from_at, const int64_t *sizes, Error *error);

/* Transposes a tensor: axis i of the result is axis `order[i]` of `from`. */
bool tensor_permute(const Tensor *from, const size_t *order, Tensor *to, Error *error);

/* Writes a shape such as "[2, 5, 64]" to a buffer. */
const char *dims_text(const int64_t *dims, size_t rank, char *buffer, size_t size);

#endif
