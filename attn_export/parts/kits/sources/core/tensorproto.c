#include "tensorproto.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"

enum { DIMS = 1, DATA_TYPE = 2, NAME = 8, RAW_DATA = 9 };
/* Largest size of a file. All stored test cases together take 32 MiB at most. */
enum { MOST_BYTES = 1 << 28 };
enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };
enum { LARGEST_FIELD = (1 << 29) - 1 };

typedef struct {
    const unsigned char *at, *end;
} Reader;

/* One field of a message: a number, or bytes. */
typedef struct {
    uint64_t number;
    bool is_bytes;
    uint64_t value;
    Reader bytes;
} Field;

static bool read_varint(Reader *reader, uint64_t *value) {
    *value = 0;
    for (unsigned shift = 0; shift < 64 && reader->at < reader->end; shift += 7) {
        unsigned char byte = *reader->at++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (shift == 63 && byte > 1) return false; /* more than 64 bits */
        if (byte < 0x80) return true;
    }
    return false;
}

static bool read_field(Reader *reader, Field *field) {
    uint64_t key, length;
    if (!read_varint(reader, &key)) return false;
    *field = (Field){.number = key >> 3};
    if (field->number < 1 || field->number > LARGEST_FIELD) return false;
    switch (key & 7) {
        case VARINT: return read_varint(reader, &field->value);
        case FIXED64: length = 8; break;
        case FIXED32: length = 4; break;
        case BYTES:
            if (!read_varint(reader, &length)) return false;
            break;
        default: return false;
    }
    if (length > (uint64_t)(reader->end - reader->at)) return false;
    field->is_bytes = true;
    field->bytes = (Reader){reader->at, reader->at + length};
    reader->at += length;
    return true;
}

static bool add_dim(int64_t *dims, size_t *rank, uint64_t size) {
    if (*rank == MAX_RANK || size > INT32_MAX) return false;
    dims[(*rank)++] = (int64_t)size;
    return true;
}

static const char NO_AXES[] = "its axes are more than 8, or a size is not of 0 to 2^31 - 1";

/* Copies a name, which must be UTF-8 without zero bytes. Returns NULL for others. */
static char *copy_name(Reader bytes) {
    size_t length = bytes.at ? (size_t)(bytes.end - bytes.at) : 0;
    char *name = malloc(length + 1);
    if (name == NULL) return NULL;
    if (length > 0) memcpy(name, bytes.at, length);
    name[length] = '\0';
    if (strlen(name) == length && is_utf8(name)) return name;
    free(name);
    return NULL;
}

static bool parse(Reader message, Tensor *tensor, Error *error) {
    int64_t dims[MAX_RANK];
    size_t rank = 0;
    int dtype = 0;
    Reader name_bytes = {0}, raw = {0};
    while (message.at < message.end) {
        Field field;
        if (!read_field(&message, &field)) return fail(error, "the message was cut off");
        if (field.number == DIMS && !field.is_bytes) {
            if (!add_dim(dims, &rank, field.value)) return fail(error, "%s", NO_AXES);
        } else if (field.number == DIMS) { /* packed, as other writers may do */
            while (field.bytes.at < field.bytes.end) {
                uint64_t size;
                if (!read_varint(&field.bytes, &size) || !add_dim(dims, &rank, size)) {
                    return fail(error, "%s", NO_AXES);
                }
            }
        } else if (field.number == DATA_TYPE && !field.is_bytes) {
            dtype = field.value < 32 ? (int)field.value : 0;
        } else if (field.number == NAME && field.is_bytes) {
            name_bytes = field.bytes;
        } else if (field.number == RAW_DATA && field.is_bytes) {
            raw = field.bytes;
        }
    }
    /* Compare with the number of bytes before allocating: wrong sizes could be of any amount. */
    size_t length = raw.at ? (size_t)(raw.end - raw.at) : 0, wanted = element_bytes(dtype);
    if (wanted == 0) return fail(error, "its type %d is unknown", dtype);
    for (size_t axis = 0; axis < rank; axis++) {
        bool fits = dims[axis] == 0 || wanted <= SIZE_MAX / (uint64_t)dims[axis];
        wanted = fits ? wanted * (size_t)dims[axis] : SIZE_MAX;
    }
    if (length != wanted) {
        return fail(error, "it holds %zu bytes where its axes ask for %zu", length, wanted);
    }
    char *name = copy_name(name_bytes);
    if (name == NULL) return fail(error, "its name is not UTF-8 without zero bytes, or is too long");
    bool made = tensor_new(name, dtype, rank, dims, tensor, error);
    free(name);
    if (!made) return false;
    if (length > 0) memcpy(tensor->data, raw.at, length);
    return true;
}

bool tensor_read(const char *path, Tensor *tensor, Error *error) {
    unsigned char *bytes;
    size_t size;
    *tensor = (Tensor){0};
    if (!file_read(path, MOST_BYTES, &bytes, &size, error)) return false;
    Error why;
    bool read = parse((Reader){bytes, bytes + size}, tensor, &why);
    free(bytes);
    return read || fail(error, "%s holds no tensor: %s", path_end(path), why.text);
}

bool tensors_read(const char *folder, const char *stem, const char *const *names, size_t count,
                  Tensor *tensors, Error *error) {
    for (size_t i = 0; i < count; i++) {
        char path[4096];
        int length = snprintf(path, sizeof path, "%s/%s_%zu.pb", folder, stem, i);
        if (length < 0 || (size_t)length >= sizeof path) {
            tensors_free(tensors, i);
            return fail(error, "the path of %s is too long", path_end(folder));
        }
        if (!tensor_read(path, &tensors[i], error)) {
            tensors_free(tensors, i);
            return false;
        }
        if (strcmp(tensors[i].name, names[i]) != 0) {
            fail(error, "%s holds %.60s, expected %.60s", path_end(path), tensors[i].name, names[i]);
            tensors_free(tensors, i + 1);
            return false;
        }
    }
    return true;
}
