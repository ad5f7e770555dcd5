#include "model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ort_library.h"

struct Model {
    const OrtApi *api;
    OrtEnv *env;
    OrtSession *session;
    OrtMemoryInfo *memory;
    char **output_names;
    size_t output_count;
};

const char *model_version(void) { return ort_version(); }

/* Returns whether a call succeeded. If not, sets the error to the message of ONNX Runtime. */
static bool ok(const OrtApi *api, OrtStatus *status, Error *error) {
    if (status == NULL) return true;
    fail(error, "%s", api->GetErrorMessage(status));
    api->ReleaseStatus(status);
    return false;
}

/* -- opening and closing ----------------------------------------------------------------- */

/* Returns whether ONNX Runtime may by default compute products of 8-bit integers inexactly here.
   x86 processors with AVX2 but without VNNI saturate sums of two products. ARM processors use one
   scale per row where a graph has one per tensor or per block. The options that prevent this make
   other processors slower. */
static bool may_be_inexact(void) {
#if defined(__GNUC__) && defined(__x86_64__)
    return !__builtin_cpu_supports("avx512vnni");
#else
    return true;
#endif
}

/* Returns whether the file of a graph contains a text. */
static bool has_name(const char *graph, const char *name) {
    FILE *file = fopen(graph, "rb");
    size_t matched = 0;
    int byte;
    if (file == NULL) return false;
    while (name[matched] != '\0' && (byte = getc(file)) != EOF) {
        while (matched > 0 && byte != name[matched]) {
            /* The longest prefix of the name that is a suffix of the bytes read so far. */
            size_t shorter = matched - 1;
            while (shorter > 0 && memcmp(name, name + matched - shorter, shorter) != 0) shorter--;
            matched = shorter;
        }
        if (byte == name[matched]) matched++;
    }
    fclose(file);
    return name[matched] == '\0';
}

/* Sets the options that make products of 8-bit integers exact, if the graph needs them. */
static bool make_exact(const OrtApi *api, OrtSessionOptions *options, const char *graph,
                       Error *error) {
    bool whole, by_block;
    if (!may_be_inexact()) return true;
    whole = has_name(graph, "MatMulInteger");
    /* The attribute accuracy_level = 4 of MatMulNBits, as it is encoded in the file. */
    by_block = has_name(graph, "accuracy_level\x18\x04");
    return (!whole ||
            ok(api, api->AddSessionConfigEntry(options, "session.x64quantprecision", "1"),
               error)) &&
           (!(whole || by_block) ||
            ok(api, api->AddSessionConfigEntry(options, "mlas.disable_kleidiai", "1"), error));
}

static bool make_session(Model *model, const char *graph, ModelOptions wanted, Error *error) {
    const OrtApi *api = model->api;
    OrtSessionOptions *options = NULL;
    bool made =
        ok(api, api->CreateSessionOptions(&options), error) &&
        ok(api, api->SetIntraOpNumThreads(options, wanted.threads), error) &&
        ok(api, api->SetInterOpNumThreads(options, 1), error) &&
        ok(api, api->SetSessionLogSeverityLevel(options, ORT_LOGGING_LEVEL_FATAL), error) &&
        ok(api,
           api->AddSessionConfigEntry(options, "session.intra_op.allow_spinning",
                                      wanted.spin ? "1" : "0"),
           error) &&
        /* Otherwise a product with dequantised weights rounds its inputs to 8 bits. */
        ok(api,
           api->AddSessionConfigEntry(options, "session.qdq_matmulnbits_accuracy_level", "1"),
           error) &&
        make_exact(api, options, graph, error) &&
        ok(api, api->CreateSession(model->env, graph, options, &model->session), error);
    if (options != NULL) api->ReleaseSessionOptions(options);
    return made;
}

static bool note_outputs(Model *model, Error *error) {
    const OrtApi *api = model->api;
    OrtAllocator *allocator;
    size_t count;
    if (!ok(api, api->GetAllocatorWithDefaultOptions(&allocator), error)) return false;
    if (!ok(api, api->SessionGetOutputCount(model->session, &count), error)) return false;
    model->output_names = calloc(count + 1, sizeof *model->output_names);
    if (model->output_names == NULL) return fail(error, "out of memory");
    for (size_t i = 0; i < count; i++) {
        char **name = &model->output_names[i];
        if (!ok(api, api->SessionGetOutputName(model->session, i, allocator, name), error)) {
            return false;
        }
        model->output_count = i + 1;
    }
    return true;
}

bool model_open(const char *graph, ModelOptions options, Model **model, Error *error) {
    *model = NULL;
    if (!ort_load(NULL, error)) return false;
    Model *made = calloc(1, sizeof *made);
    if (made == NULL) return fail(error, "out of memory");
    const OrtApi *api = made->api = ort();
    /* Errors come back as a status; a library does not print. */
    if (ok(api, api->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "model", &made->env), error) &&
        ok(api, api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &made->memory),
           error) &&
        make_session(made, graph, options, error) && note_outputs(made, error)) {
        *model = made;
        return true;
    }
    model_close(made);
    return false;
}

void model_close(Model *model) {
    if (model == NULL) return;
    const OrtApi *api = model->api;
    OrtAllocator *allocator = NULL;
    OrtStatus *status = api->GetAllocatorWithDefaultOptions(&allocator);
    if (status != NULL) api->ReleaseStatus(status);
    for (size_t i = 0; i < model->output_count && allocator != NULL; i++) {
        allocator->Free(allocator, model->output_names[i]);
    }
    free(model->output_names);
    if (model->session != NULL) api->ReleaseSession(model->session);
    if (model->memory != NULL) api->ReleaseMemoryInfo(model->memory);
    if (model->env != NULL) api->ReleaseEnv(model->env);
    free(model);
}

size_t model_output_count(const Model *model) { return model->output_count; }

const char *model_output_name(const Model *model, size_t at) { return model->output_names[at]; }

/* -- run --------------------------------------------------------------------------------- */

/* ONNX Runtime values of one run: those that point to the inputs' elements, and the outputs. */
typedef struct {
    const char **input_names;
    OrtValue **inputs, **outputs;
    const Tensor **sources; /* of a bound output its input, else NULL */
} Run;

static void release_run(const Model *model, Run *run, size_t input_count) {
    for (size_t i = 0; run->inputs != NULL && i < input_count; i++) {
        if (run->inputs[i] != NULL) model->api->ReleaseValue(run->inputs[i]);
    }
    for (size_t i = 0; run->outputs != NULL && i < model->output_count; i++) {
        bool own = run->sources != NULL && run->sources[i] == NULL;
        if (own && run->outputs[i] != NULL) model->api->ReleaseValue(run->outputs[i]);
    }
    free(run->input_names);
    free(run->inputs);
    free(run->outputs);
    free(run->sources);
}

static bool show_inputs(const Model *model, const Tensor *inputs, size_t count, Run *run,
                        Error *error) {
    for (size_t i = 0; i < count; i++) {
        const Tensor *input = &inputs[i];
        run->input_names[i] = input->name;
        /* ONNX Runtime uses the same numbers for element types as ONNX. */
        OrtStatus *status = model->api->CreateTensorWithDataAsOrtValue(
            model->memory, input->data, tensor_bytes(input), input->dims, input->rank,
            (ONNXTensorElementDataType)input->dtype, &run->inputs[i]);
        if (!ok(model->api, status, error)) return false;
    }
    return true;
}

/* ONNX Runtime writes an output into a value that it is given: here that of the bound input. */
static bool bind_outputs(const Model *model, const Tensor *inputs, size_t input_count,
                         const Bound *bound, size_t bound_count, Run *run, Error *error) {
    for (size_t b = 0; b < bound_count; b++) {
        size_t from = 0, to = 0;
        while (from < input_count && strcmp(inputs[from].name, bound[b].input) != 0) from++;
        while (to < model->output_count &&
               strcmp(model->output_names[to], bound[b].output) != 0) {
            to++;
        }
        if (from == input_count) return fail(error, "there is no input %s", bound[b].input);
        if (to == model->output_count) return fail(error, "there is no output %s", bound[b].output);
        run->outputs[to] = run->inputs[from];
        run->sources[to] = &inputs[from];
    }
    return true;
}

static void release_value(void *value) { ort()->ReleaseValue(value); }

static bool described(const OrtApi *api, const OrtValue *value, Tensor *tensor, Error *error) {
    OrtTensorTypeAndShapeInfo *info = NULL;
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    if (!ok(api, api->GetTensorTypeAndShape(value, &info), error)) return false;
    bool known = ok(api, api->GetTensorElementType(info, &type), error) &&
                 ok(api, api->GetDimensionsCount(info, &tensor->rank), error);
    if (known && tensor->rank > MAX_RANK) known = fail(error, "an output has too many axes");
    known = known && ok(api, api->GetDimensions(info, tensor->dims, tensor->rank), error);
    tensor->dtype = (int)type;
    api->ReleaseTensorTypeAndShapeInfo(info);
    return known;
}

/* Makes a tensor of a value and takes ownership of the value. */
static bool take_output(const OrtApi *api, OrtValue **value, Tensor *tensor, Error *error) {
    if (!described(api, *value, tensor, error)) return false;
    if (!ok(api, api->GetTensorMutableData(*value, &tensor->data), error)) return false;
    tensor->owner = *value;
    tensor->release = release_value;
    *value = NULL;
    return true;
}

static bool take_outputs(const Model *model, Run *run, Tensor *outputs, Error *error) {
    for (size_t i = 0; i < model->output_count; i++) {
        Tensor *output = &outputs[i];
        if (run->sources[i] != NULL) {
            *output = *run->sources[i];
            output->name = NULL;
            output->owner = NULL;
            output->release = NULL;
        } else if (!take_output(model->api, &run->outputs[i], output, error)) {
            return false;
        }
        if (!tensor_rename(output, model->output_names[i], error)) return false;
    }
    return true;
}

bool model_run(Model *model, const Tensor *inputs, size_t input_count, const Bound *bound,
               size_t bound_count, Tensor *outputs, Error *error) {
    const OrtApi *api = model->api;
    size_t output_count = model->output_count;
    for (size_t i = 0; i < output_count; i++) outputs[i] = (Tensor){0};
    Run run = {
        calloc(input_count + 1, sizeof *run.input_names),
        calloc(input_count + 1, sizeof *run.inputs),
        calloc(output_count + 1, sizeof *run.outputs),
        calloc(output_count + 1, sizeof *run.sources),
    };
    bool ran = run.input_names != NULL && run.inputs != NULL && run.outputs != NULL &&
               run.sources != NULL;
    if (!ran) fail(error, "out of memory");
    ran = ran && show_inputs(model, inputs, input_count, &run, error) &&
          bind_outputs(model, inputs, input_count, bound, bound_count, &run, error) &&
          ok(api,
             api->Run(model->session, NULL, run.input_names, (const OrtValue *const *)run.inputs,
                      input_count, (const char *const *)model->output_names, output_count,
                      run.outputs),
             error) &&
          take_outputs(model, &run, outputs, error);
    if (!ran) tensors_free(outputs, output_count);
    release_run(model, &run, input_count);
    return ran;
}
