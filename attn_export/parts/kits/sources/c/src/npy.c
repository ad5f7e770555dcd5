#include "npy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"

enum { MOST_BYTES = INT32_MAX, MOST_ROWS = 1 << 20 };

/* By the number that ONNX has for a type; .npy has none for bfloat16. */
static const char *const KINDS[] = {
    [FLOAT32] = "f4", [UINT8] = "u1",   [INT8] = "i1",    [UINT16] = "u2", [INT16] = "i2",  [INT32] = "i4",
    [INT64] = "i8",   [BOOL] = "b1",    [FLOAT16] = "f2", [FLOAT64] = "f8", [UINT32] = "u4", [UINT64] = "u8",
    [BFLOAT16] = "u2",
};

/* Reads the type and the sizes of a header. */
static bool read_header(const char *header, attn_value *value) {
    char kind[3] = "", sizes[200] = "";
    int read = sscanf(header, " { 'descr' : '%*1[<|]%2[a-z0-9]' , 'fortran_order' : False , 'shape' : (%199[0-9, ]",
                      kind, sizes);
    for (int dtype = 1; read >= 1 && dtype <= BFLOAT16 && value->dtype == 0; dtype++) {
        if (KINDS[dtype] != NULL && strcmp(KINDS[dtype], kind) == 0) value->dtype = dtype;
    }
    for (char *size = sizes, *end; value->rank < ATTN_MAX_RANK; size = end + strspn(end, ", ")) {
        value->dims[value->rank] = strtoll(size, &end, 10);
        if (end == size) return value->dtype != 0 && *size == '\0';
        value->rank++;
    }
    return false;
}

/* Sets the input to the rows of a file, again from the first until there are `rows`. */
static int set_rows(Session *session, const char *path, attn_value *value, int64_t rows,
                    const unsigned char *data, size_t size, Error *error) {
    size_t in_file = value->rank > 0 && value->dims[0] > 0 ? (size_t)value->dims[0] : 0;
    if (in_file == 0 || size == 0 || size % in_file != 0 || rows < 1 || rows > MOST_ROWS) {
        return FAIL(ATTN_ARGUMENT, "%s has %zu bytes in %zu rows, and %lld rows are wanted", path_end(path), size, in_file,
                    (long long)rows);
    }
    size_t bytes = size / in_file * (size_t)rows;
    unsigned char *array = malloc(bytes);
    if (array == NULL) return FAIL(ATTN_MEMORY, "out of memory for %s", path_end(path));
    for (size_t at = 0; at < bytes; at++) array[at] = data[at % size];
    value->dims[0] = rows;
    value->data = array;
    value->bytes = (int64_t)bytes;
    int code = session_set(session, value, true, error);
    if (code != ATTN_OK) free(array);
    return code;
}

int npy_load(Session *session, const char *name, const char *path, int64_t rows, Error *error) {
    unsigned char *file;
    size_t size, start = 10;
    if (!file_read(path, MOST_BYTES, &file, &size, error)) return ATTN_ARGUMENT;
    attn_value value = {.name = name};
    bool is_npy = size > start && memcmp(file, "\x93NUMPY\x01", 7) == 0;
    if (is_npy) start += file[8] + 256u * file[9];
    is_npy = is_npy && start <= size && file[start - 1] == '\n';
    if (is_npy) file[start - 1] = '\0';
    int code = is_npy && read_header((const char *)file + 10, &value)
                   ? set_rows(session, path, &value, rows, file + start, size - start, error)
                   : FAIL(ATTN_ARGUMENT, "%s is no .npy of numbers in C order", path_end(path));
    free(file);
    return code;
}

int npy_save(const Tensor *tensor, const char *path, Error *error) {
    const char *kind = KINDS[tensor->dtype];
    char sizes[200] = "", header[400];
    for (size_t axis = 0, at = 0; axis < tensor->rank; axis++) {
        at += (size_t)snprintf(sizes + at, sizeof sizes - at, "%lld,", (long long)tensor->dims[axis]);
    }
    snprintf(header, sizeof header, "{'descr': '%c%s', 'fortran_order': False, 'shape': (%s), }",
             element_bytes(tensor->dtype) == 1 ? '|' : '<', kind, sizes);
    FILE *file = fopen(path, "wb");
    size_t bytes = tensor_bytes(tensor);
    bool written = file != NULL && fprintf(file, "\x93NUMPY\x01%c\x76\x01%-373s\n", 0, header) == 384 &&
                   fwrite(tensor->data, 1, bytes, file) == bytes;
    if (file != NULL) written = fclose(file) == 0 && written;
    return written ? ATTN_OK : FAIL(ATTN_ARGUMENT, "%s cannot be written", path_end(path));
}
