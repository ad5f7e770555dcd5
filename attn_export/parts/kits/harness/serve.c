/*
 * Holds a graph and runs it for the process that started this one.
 *
 *     serve GRAPH THREADS
 *
 * parts/kits/program.py defines its messages on stdin and stdout. It ends with its input, or with exit
 * code 1 if a message is invalid.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

enum { LONGEST_LINE = 1 << 16, MOST_TENSORS = 1 << 10 };

/* A request as it was heard. The names of bound outputs and inputs lie in `lines`. */
typedef struct {
    Tensor *inputs;
    Bound *bound;
    char **lines;
    size_t input_count, bound_count;
} Request;

/* -- heard ------------------------------------------------------------------------------- */

/* One line without its end; false at the end of the input. */
static bool hear_line(char *line, Error *error) {
    error->text[0] = '\0';
    if (fgets(line, LONGEST_LINE, stdin) == NULL) return false;
    size_t length = strlen(line);
    if (length == 0 || line[length - 1] != '\n') return fail(error, "a line has no end");
    line[length - 1] = '\0';
    return true;
}

/* A number that starts at `*text`, which then shows what follows it and a space. */
static bool take_number(char **text, int64_t *number) {
    char *end;
    *number = strtoimax(*text, &end, 10);
    if (end == *text || *number < 0 || (*end != ' ' && *end != '\0')) return false;
    *text = *end == ' ' ? end + 1 : end;
    return true;
}

/* DTYPE RANK DIM ... NAME, then the elements. */
static bool hear_tensor(char *line, Tensor *tensor, Error *error) {
    if (!hear_line(line, error)) return fail(error, "the input ended before a tensor");
    char *rest = line;
    int64_t dtype, rank, dims[MAX_RANK];
    bool read = take_number(&rest, &dtype) && take_number(&rest, &rank) && rank <= MAX_RANK;
    for (int64_t axis = 0; read && axis < rank; axis++) read = take_number(&rest, &dims[axis]);
    if (!read) return fail(error, "%.80s is no tensor", line);
    if (!tensor_new(rest, (int)dtype, (size_t)rank, dims, tensor, error)) return false;
    size_t bytes = tensor_bytes(tensor);
    if (fread(tensor->data, 1, bytes, stdin) == bytes) return true;
    return fail(error, "the input ended within %s", rest);
}

static bool hear_bound(char *line, char **kept, Bound *bound, Error *error) {
    if (!hear_line(line, error)) return fail(error, "the input ended before a bound output");
    *kept = malloc(strlen(line) + 1);
    if (*kept == NULL) return fail(error, "out of memory");
    char *tab = strchr(strcpy(*kept, line), '\t');
    if (tab == NULL) return fail(error, "%.80s is no bound output", line);
    *tab = '\0';
    *bound = (Bound){*kept, tab + 1};
    return true;
}

static void forget(Request *request) {
    tensors_free(request->inputs, request->input_count);
    for (size_t i = 0; request->lines != NULL && i < request->bound_count; i++) {
        free(request->lines[i]);
    }
    free(request->inputs);
    free(request->bound);
    free(request->lines);
}

/* `run INPUTS BOUND` and what follows it. */
static bool hear_request(char *line, Request *request, Error *error) {
    char *rest = line + strlen("run ");
    int64_t inputs = 0, bound = 0;
    bool read = strncmp(line, "run ", 4) == 0 && take_number(&rest, &inputs) &&
                take_number(&rest, &bound) && inputs <= MOST_TENSORS && bound <= MOST_TENSORS;
    if (!read) return fail(error, "%.80s is no request", line);
    *request = (Request){
        calloc((size_t)inputs + 1, sizeof *request->inputs),
        calloc((size_t)bound + 1, sizeof *request->bound),
        calloc((size_t)bound + 1, sizeof *request->lines),
        (size_t)inputs,
        (size_t)bound,
    };
    if (request->inputs == NULL || request->bound == NULL || request->lines == NULL) {
        return fail(error, "out of memory");
    }
    for (size_t i = 0; i < request->input_count; i++) {
        if (!hear_tensor(line, &request->inputs[i], error)) return false;
    }
    for (size_t i = 0; i < request->bound_count; i++) {
        if (!hear_bound(line, &request->lines[i], &request->bound[i], error)) return false;
    }
    return true;
}

/* -- said -------------------------------------------------------------------------------- */

static void say_tensor(const Tensor *tensor) {
    printf("%d %zu", tensor->dtype, tensor->rank);
    for (size_t axis = 0; axis < tensor->rank; axis++) printf(" %" PRId64, tensor->dims[axis]);
    printf(" %s\n", tensor->name);
    fwrite(tensor->data, 1, tensor_bytes(tensor), stdout);
}

static void answer(Model *model, const Request *request, Tensor *outputs) {
    Error error;
    size_t count = model_output_count(model);
    if (!model_run(model, request->inputs, request->input_count, request->bound,
                   request->bound_count, outputs, &error)) {
        printf("error %s\n", error.text);
        return;
    }
    printf("outputs %zu\n", count);
    for (size_t i = 0; i < count; i++) say_tensor(&outputs[i]);
    tensors_free(outputs, count);
}

static bool serve(Model *model, char *line, Tensor *outputs, Error *error) {
    while (hear_line(line, error)) {
        Request request = {0};
        bool heard = hear_request(line, &request, error);
        if (heard) answer(model, &request, outputs);
        forget(&request);
        if (!heard || fflush(stdout) != 0) return heard || error->text[0] == '\0';
    }
    return error->text[0] == '\0';
}

int main(int argc, char **argv) {
    Model *model = NULL;
    Error error;
    if (argc != 3) {
        fprintf(stderr, "usage: serve GRAPH THREADS\n");
        return 1;
    }
    ModelOptions options = {.threads = atoi(argv[2])};
    if (!model_open(argv[1], options, &model, &error)) {
        printf("error %s\n", error.text);
        return 0;
    }
    printf("loaded {\"version\": \"%s\", \"providers\": [\"CPUExecutionProvider\"]}\n",
           model_version());
    fflush(stdout);
    char *line = malloc(LONGEST_LINE);
    Tensor *outputs = calloc(model_output_count(model) + 1, sizeof *outputs);
    bool served = line != NULL && outputs != NULL ? serve(model, line, outputs, &error)
                                                  : fail(&error, "out of memory");
    free(line);
    free(outputs);
    model_close(model);
    if (!served) fprintf(stderr, "serve: %s\n", error.text);
    return served ? 0 : 1;
}
