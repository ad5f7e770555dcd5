#include "tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *copy_text(const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = malloc(size);
    return copy == NULL ? NULL : memcpy(copy, text, size);
}

/* -- allocation -------------------------------------------------------------------------- */

bool bytes_of(const char *name, int dtype, size_t rank, const int64_t *dims, size_t *bytes,
              Error *error) {
    bool empty = false;
    *bytes = element_bytes(dtype);
    if (*bytes == 0) return fail(error, "%.60s is of the unknown type %d", name, dtype);
    for (size_t axis = 0; axis < rank; axis++) {
        if (dims[axis] < 0) return fail(error, "%.60s has a negative size", name);
        empty = empty || dims[axis] == 0;
    }
    for (size_t axis = 0; axis < rank && !empty; axis++) {
        size_t size = (size_t)dims[axis];
        if (*bytes > SIZE_MAX / 2 / size) return fail(error, "%.60s is too large", name);
        *bytes *= size;
    }
    if (empty) *bytes = 0;
    return true;
}

bool tensor_new(const char *name, int dtype, size_t rank, const int64_t *dims, Tensor *tensor,
                Error *error) {
    *tensor = (Tensor){0};
    if (rank > MAX_RANK) {
        return fail(error, "%.60s has %zu axes; %d are the most", name, rank, MAX_RANK);
    }
    size_t bytes;
    if (!bytes_of(name, dtype, rank, dims, &bytes, error)) return false;
    tensor->name = copy_text(name);
    tensor->data = calloc(1, bytes > 0 ? bytes : 1);
    if (tensor->name == NULL || tensor->data == NULL) {
        free(tensor->name);
        free(tensor->data);
        *tensor = (Tensor){0};
        return fail(error, "out of memory for %.60s", name);
    }
    tensor->dtype = dtype;
    tensor->rank = rank;
    for (size_t axis = 0; axis < rank; axis++) tensor->dims[axis] = dims[axis];
    tensor->owner = tensor->data;
    tensor->release = free;
    return true;
}

void tensor_free(Tensor *tensor) {
    if (tensor->release != NULL) tensor->release(tensor->owner);
    free(tensor->name);
    *tensor = (Tensor){0};
}

void tensors_free(Tensor *tensors, size_t count) {
    for (size_t i = 0; tensors != NULL && i < count; i++) tensor_free(&tensors[i]);
}

bool tensor_rename(Tensor *tensor, const char *name, Error *error) {
    char *copy = copy_text(name);
    if (copy == NULL) return fail(error, "out of memory for %.60s", name);
    free(tensor->name);
    tensor->name = copy;
    return true;
}

Tensor *tensor_find(Tensor *tensors, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++) {
        if (tensors[i].name != NULL && strcmp(tensors[i].name, name) == 0) return &tensors[i];
    }
    return NULL;
}

/* -- sizes ------------------------------------------------------------------------------- */

size_t element_bytes(int dtype) {
    switch (dtype) {
        case BOOL: case INT8: case UINT8: return 1;
        case FLOAT16: case BFLOAT16: case INT16: case UINT16: return 2;
        case FLOAT32: case INT32: case UINT32: return 4;
        case FLOAT64: case INT64: case UINT64: return 8;
        default: return 0;
    }
}

bool is_floating(int dtype) {
    return dtype == FLOAT32 || dtype == FLOAT64 || dtype == FLOAT16 || dtype == BFLOAT16;
}

size_t tensor_count(const Tensor *tensor) {
    size_t count = 1;
    for (size_t axis = 0; axis < tensor->rank; axis++) count *= (size_t)tensor->dims[axis];
    return count;
}

size_t tensor_bytes(const Tensor *tensor) {
    return tensor_count(tensor) * element_bytes(tensor->dtype);
}

/* -- elements ---------------------------------------------------------------------------- */

static double from_half(uint16_t bits) {
    double sign = bits & 0x8000 ? -1.0 : 1.0;
    int exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
    if (exponent == 0x1f) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, -24);
    return sign * ldexp(fraction + 0x400, exponent - 25);
}

static uint16_t to_half(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    if (isnan(value)) return 0x7e00;
    if (size >= 65536.0) return (uint16_t)(sign | 0x7c00);
    if (size < ldexp(1, -14)) return (uint16_t)(sign | (uint16_t)ldexp(size, 24));
    int exponent;
    double fraction = frexp(size, &exponent); /* in [0.5, 1) */
    uint16_t kept = (uint16_t)(ldexp(fraction, 11) - 0x400);
    return (uint16_t)(sign | (exponent + 14) << 10 | kept);
}

/* A bfloat16 is the upper half of a float32. */
static double from_bfloat(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bfloat(double value) {
    float narrow = (float)value;
    uint32_t wide;
    memcpy(&wide, &narrow, sizeof wide);
    return isnan(value) ? 0x7fc0 : (uint16_t)(wide >> 16);
}

double tensor_get(const Tensor *tensor, size_t at) {
    const void *data = tensor->data;
    switch (tensor->dtype) {
        case FLOAT32: return ((const float *)data)[at];
        case FLOAT64: return ((const double *)data)[at];
        case FLOAT16: return from_half(((const uint16_t *)data)[at]);
        case BFLOAT16: return from_bfloat(((const uint16_t *)data)[at]);
        case BOOL: case UINT8: return ((const uint8_t *)data)[at];
        case INT8: return ((const int8_t *)data)[at];
        case UINT16: return ((const uint16_t *)data)[at];
        case INT16: return ((const int16_t *)data)[at];
        case UINT32: return ((const uint32_t *)data)[at];
        case INT32: return ((const int32_t *)data)[at];
        case UINT64: return (double)((const uint64_t *)data)[at];
        case INT64: return (double)((const int64_t *)data)[at];
        default: return NAN;
    }
}

int64_t tensor_largest(const Tensor *tensor, int64_t count) {
    int64_t found = 0, from = (int64_t)tensor_count(tensor) - count;
    if (count < 1 || from < 0) return -1;
    double most = tensor_get(tensor, (size_t)from);
    for (int64_t at = 1; at < count; at++) {
        double value = tensor_get(tensor, (size_t)(from + at));
        if (value <= most || value != value) continue;
        most = value;
        found = at;
    }
    return found;
}

void tensor_set(Tensor *tensor, size_t at, double value) {
    void *data = tensor->data;
    switch (tensor->dtype) {
        case FLOAT32: ((float *)data)[at] = (float)value; break;
        case FLOAT64: ((double *)data)[at] = value; break;
        case FLOAT16: ((uint16_t *)data)[at] = to_half(value); break;
        case BFLOAT16: ((uint16_t *)data)[at] = to_bfloat(value); break;
        case BOOL: ((uint8_t *)data)[at] = value != 0; break;
        case UINT8: ((uint8_t *)data)[at] = (uint8_t)value; break;
        case INT8: ((int8_t *)data)[at] = (int8_t)value; break;
        case UINT16: ((uint16_t *)data)[at] = (uint16_t)value; break;
        case INT16: ((int16_t *)data)[at] = (int16_t)value; break;
        case UINT32: ((uint32_t *)data)[at] = (uint32_t)value; break;
        case INT32: ((int32_t *)data)[at] = (int32_t)value; break;
        case UINT64: ((uint64_t *)data)[at] = (uint64_t)value; break;
        case INT64: ((int64_t *)data)[at] = (int64_t)value; break;
        default: break;
    }
}

/* -- blocks ------------------------------------------------------------------------------ */

static size_t flat_place(const Tensor *tensor, const int64_t *at, const int64_t *within) {
    size_t place = 0;
    for (size_t axis = 0; axis < tensor->rank; axis++) {
        place = place * (size_t)tensor->dims[axis] + (size_t)(at[axis] + within[axis]);
    }
    return place;
}

/* Returns whether a block fits into a tensor. The comparison avoids sums that may overflow. */
static bool holds_block(const Tensor *tensor, const int64_t *at, const int64_t *sizes) {
    for (size_t axis = 0; axis < tensor->rank; axis++) {
        int64_t size = tensor->dims[axis];
        if (sizes[axis] < 0 || sizes[axis] > size || at[axis] < 0 || at[axis] > size - sizes[axis]) {
            return false;
        }
    }
    return true;
}

bool tensor_copy_block(Tensor *to, const int64_t *to_at, const Tensor *from,
                       const int64_t *from_at, const int64_t *sizes, Error *error) {
    size_t bytes = element_bytes(from->dtype), rank = from->rank, run = 1;
    if (to->dtype != from->dtype || to->rank != rank || !holds_block(to, to_at, sizes) ||
        !holds_block(from, from_at, sizes)) {
        char block[64], is[64], wanted[64];
        return fail(error, "%.60s: a block of %s does not lie within both %s and %s", from->name,
                    dims_text(sizes, rank, block, sizeof block),
                    dims_text(from->dims, rank, is, sizeof is),
                    dims_text(to->dims, to->rank, wanted, sizeof wanted));
    }
    for (size_t axis = 0; axis < rank; axis++) {
        if (sizes[axis] == 0) return true;
    }
    if (rank > 0) run = (size_t)sizes[rank - 1];
    int64_t within[MAX_RANK] = {0};
    for (;;) {
        memcpy((char *)to->data + flat_place(to, to_at, within) * bytes,
               (const char *)from->data + flat_place(from, from_at, within) * bytes, run * bytes);
        /* Advance the index to the next row, over all axes but the last. */
        size_t axis = rank > 0 ? rank - 1 : 0;
        while (axis > 0 && ++within[axis - 1] == sizes[axis - 1]) within[--axis] = 0;
        if (axis == 0) return true;
    }
}

bool tensor_permute(const Tensor *from, const size_t *order, Tensor *to, Error *error) {
    size_t bytes = element_bytes(from->dtype), rank = from->rank;
    int64_t dims[MAX_RANK], steps[MAX_RANK], at[MAX_RANK] = {0};
    for (size_t axis = 0; axis < rank; axis++) {
        dims[axis] = from->dims[order[axis]];
        steps[axis] = 1;
        for (size_t inner = order[axis] + 1; inner < rank; inner++) steps[axis] *= from->dims[inner];
    }
    if (!tensor_new(from->name, from->dtype, rank, dims, to, error)) return false;
    size_t count = tensor_count(to);
    int64_t place = 0;
    for (size_t i = 0; i < count; i++) {
        memcpy((char *)to->data + i * bytes, (const char *)from->data + (size_t)place * bytes, bytes);
        /* Advance the index to the next element, over all axes. */
        for (size_t axis = rank; axis-- > 0;) {
            place += steps[axis];
            if (++at[axis] < dims[axis]) break;
            place -= steps[axis] * dims[axis];
            at[axis] = 0;
        }
    }
    return true;
}

const char *dims_text(const int64_t *dims, size_t rank, char *buffer, size_t size) {
    size_t used = (size_t)snprintf(buffer, size, "[");
    for (size_t axis = 0; axis < rank && used < size; axis++) {
        used += (size_t)snprintf(buffer + used, size - used, "%s%lld", axis ? ", " : "",
                                 (long long)dims[axis]);
    }
    if (used < size) snprintf(buffer + used, size - used, "]");
    return buffer;
}
