#include "bundle_check.h"

#include <stdio.h>
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

/*
 * The tensors of a case of a folder, with axes as in the signature; or the inputs of a run, without
 * a folder and references, with axes as in the graph. As one list, inputs come before true outputs.
 */
typedef struct {
    const char *folder;
    const Tensor *inputs, *references;
} Tensors;

static size_t total(const Tensors *all) {
    return BUNDLE.input_count + (all->references != NULL ? BUNDLE.output_count : 0);
}

static const End *end_at(size_t at) {
    bool is_input = at < BUNDLE.input_count;
    return is_input ? &BUNDLE.inputs[at] : &BUNDLE.outputs[at - BUNDLE.input_count];
}

static const Tensor *tensor_at(const Tensors *all, size_t at) {
    return at < BUNDLE.input_count ? &all->inputs[at] : &all->references[at - BUNDLE.input_count];
}

/* Returns the axis of the signature that an axis of a tensor is. */
static const Axis *axis_at(const Tensors *all, const End *end, size_t i) {
    return &end->axes[all->folder != NULL ? i : end->order[i]];
}

/* Returns the size that an axis must have: its fixed size, or that of the first axis so named. */
static int64_t wanted_size(const Tensors *all, const Axis *axis) {
    for (size_t at = 0; axis->name != NULL && at < total(all); at++) {
        const End *end = end_at(at);
        for (size_t i = 0; i < end->rank; i++) {
            const char *name = axis_at(all, end, i)->name;
            if (name != NULL && strcmp(name, axis->name) == 0) return tensor_at(all, at)->dims[i];
        }
    }
    return axis->size;
}

/* Writes the file of a tensor, for a message; nothing if it is of no file. */
static const char *place_of(const Tensors *all, size_t at, char *place, size_t size) {
    bool is_input = at < BUNDLE.input_count;
    place[0] = '\0';
    if (all->folder == NULL) return place;
    snprintf(place, size, "%s/%s_%zu.pb: ", path_end(all->folder), is_input ? "input" : "output",
             is_input ? at : at - BUNDLE.input_count);
    return place;
}

static bool unfit(const Tensors *all, size_t at, const char *what, const char *is,
                  const char *wanted, Error *error) {
    char place[128];
    return fail(error, "%s%.60s has the %s %s, expected %s", place_of(all, at, place, sizeof place),
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
    for (size_t i = 0; i < end->rank; i++) sizes[i] = wanted_size(all, axis_at(all, end, i));
    if (memcmp(tensor->dims, sizes, end->rank * sizeof *sizes) == 0) return true;
    char is[64], wanted[64];
    return unfit(all, at, "shape", dims_text(tensor->dims, tensor->rank, is, sizeof is),
                 dims_text(sizes, end->rank, wanted, sizeof wanted), error);
}

/* Returns the number of values that an input may hold, from 0 on. A cache in place is written from
   past_length on, which nothing checks later. */
static int64_t value_count(const Tensors *all, const char *name) {
    int64_t tokens = wanted_size(all, &(Axis){"query_len", 1});
    int64_t capacity = wanted_size(all, &(Axis){"capacity", -1});
    if (strcmp(name, "past_length") == 0) return capacity < 0 ? INT64_MAX : capacity - tokens + 1;
    if (strcmp(name, "logit_index") == 0) return tokens;
    bool known = strcmp(name, "input_ids") == 0 && BUNDLE.ids.vocabulary > 0;
    return known ? BUNDLE.ids.vocabulary : INT64_MAX;
}

static bool values_fit(const Tensors *all, size_t at, Error *error) {
    const Tensor *values = tensor_at(all, at);
    const char *name = end_at(at)->name;
    int64_t count = value_count(all, name);
    for (size_t i = 0; count < INT64_MAX && i < tensor_count(values); i++) {
        double value = tensor_get(values, i);
        char place[128];
        if (value >= 0 && value < (double)count) continue;
        return fail(error, "%s%s holds %.0f, expected 0 to %lld",
                    place_of(all, at, place, sizeof place), name, value, (long long)(count - 1));
    }
    return true;
}

static bool tensors_fit(const Tensors *all, Error *error) {
    for (size_t at = 0; at < total(all); at++) {
        if (!form_fits(all, at, error)) return false;
    }
    for (size_t at = 0; at < total(all); at++) {
        if (!sizes_fit(all, at, error)) return false;
        if (at < BUNDLE.input_count && !values_fit(all, at, error)) return false;
    }
    return true;
}

bool case_fits(const char *folder, const Tensor *inputs, const Tensor *references, Error *error) {
    return tensors_fit(&(Tensors){folder, inputs, references}, error);
}

bool inputs_fit(const Tensor *inputs, Error *error) {
    Tensors all = {NULL, inputs, NULL};
    int64_t tokens = wanted_size(&all, &(Axis){"query_len", -1});
    int64_t past = wanted_size(&all, &(Axis){"past_len", -1});
    int64_t keys = wanted_size(&all, &(Axis){"total_len", -1});
    if (!tensors_fit(&all, error)) return false;
    if (tokens < 0 || past < 0 || keys < 0 || keys == past + tokens) return true;
    return fail(error, "total_len is %lld, expected the %lld of past_len and the %lld of query_len",
                (long long)keys, (long long)past, (long long)tokens);
}
