#include "bundle_check.h"

#include <string.h>

#include "file.h"

bool bundle_path(const char *bundle, const char *name, char *path, size_t size, Error *error) {
    int length = snprintf(path, size, "%s/%s", bundle, name);
    return (length > 0 && (size_t)length < size) ||
           fail(error, "the path of %s is too long", path_end(name));
}

bool bundle_files(const char *bundle, Error *error) {
    char path[3072];
    for (size_t i = 0; i < BUNDLE.file_count; i++) {
        if (!bundle_path(bundle, BUNDLE.files[i], path, sizeof path, error)) return false;
        if (!file_is_regular(path, error)) return false;
    }
    return true;
}

/* The tensors of a case. As one list, its inputs come first and then its true outputs. */
typedef struct {
    const char *folder;
    const Tensor *inputs, *truths;
} Tensors;

static size_t total(void) { return BUNDLE.input_count + BUNDLE.output_count; }

static const End *end_at(size_t at) {
    bool is_input = at < BUNDLE.input_count;
    return is_input ? &BUNDLE.inputs[at] : &BUNDLE.outputs[at - BUNDLE.input_count];
}

static const Tensor *tensor_at(const Tensors *all, size_t at) {
    return at < BUNDLE.input_count ? &all->inputs[at] : &all->truths[at - BUNDLE.input_count];
}

/* Returns the size that an axis must have: its fixed size, or that of the first axis so named. */
static int64_t wanted_size(const Tensors *all, const Axis *axis) {
    for (size_t at = 0; axis->name != NULL && at < total(); at++) {
        const End *end = end_at(at);
        for (size_t i = 0; i < end->rank; i++) {
            const char *name = end->axes[i].name;
            if (name != NULL && strcmp(name, axis->name) == 0) return tensor_at(all, at)->dims[i];
        }
    }
    return axis->size;
}

static bool unfit(const Tensors *all, size_t at, const char *what, const char *is,
                  const char *wanted, Error *error) {
    bool is_input = at < BUNDLE.input_count;
    return fail(error, "%s/%s_%zu.pb: %.60s has the %s %s, expected %s", path_end(all->folder),
                is_input ? "input" : "output", is_input ? at : at - BUNDLE.input_count,
                end_at(at)->name, what, is, wanted);
}

static bool form_fits(const Tensors *all, size_t at, Error *error) {
    const Tensor *tensor = tensor_at(all, at);
    const End *end = end_at(at);
    char is[24], wanted[24];
    bool same_type = tensor->dtype == end->dtype;
    if (same_type && tensor->rank == end->rank) return true;
    snprintf(is, sizeof is, "%zu", same_type ? tensor->rank : (size_t)tensor->dtype);
    snprintf(wanted, sizeof wanted, "%zu", same_type ? end->rank : (size_t)end->dtype);
    return unfit(all, at, same_type ? "rank" : "type", is, wanted, error);
}

static bool sizes_fit(const Tensors *all, size_t at, Error *error) {
    const Tensor *tensor = tensor_at(all, at);
    const End *end = end_at(at);
    int64_t sizes[MAX_RANK];
    for (size_t i = 0; i < end->rank; i++) sizes[i] = wanted_size(all, &end->axes[i]);
    if (memcmp(tensor->dims, sizes, end->rank * sizeof *sizes) == 0) return true;
    char is[64], wanted[64];
    return unfit(all, at, "shape", dims_text(tensor->dims, tensor->rank, is, sizeof is),
                 dims_text(sizes, end->rank, wanted, sizeof wanted), error);
}

/* Checks that the new tokens fit into the cache, into which they are written from past_length on. */
static bool lengths_fit(const Tensors *all, size_t at, Error *error) {
    const Tensor *lengths = tensor_at(all, at);
    int64_t capacity = wanted_size(all, &(Axis){"capacity", -1});
    int64_t tokens = wanted_size(all, &(Axis){"query_len", 1});
    if (strcmp(end_at(at)->name, "past_length") != 0 || capacity < 0) return true;
    for (size_t i = 0; i < tensor_count(lengths); i++) {
        double length = tensor_get(lengths, i);
        if (length >= 0 && length <= (double)(capacity - tokens)) continue;
        return fail(error, "%s/input_%zu.pb: past_length holds %.0f, expected 0 to %lld",
                    path_end(all->folder), at, length, (long long)(capacity - tokens));
    }
    return true;
}

bool case_fits(const char *folder, const Tensor *inputs, const Tensor *truths, Error *error) {
    Tensors all = {folder, inputs, truths};
    for (size_t at = 0; at < total(); at++) {
        if (!form_fits(&all, at, error)) return false;
    }
    for (size_t at = 0; at < total(); at++) {
        if (!sizes_fit(&all, at, error) || !lengths_fit(&all, at, error)) return false;
    }
    return true;
}
