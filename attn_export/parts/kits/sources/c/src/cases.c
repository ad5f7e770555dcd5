#include "cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attn_export.h"
#include "bundle_check.h"
#include "replay.h"
#include "tensorproto.h"

/* Where the line on a case is written. */
typedef struct {
    char *text;
    size_t size;
} Line;

/* A case in memory: inputs, true outputs, and the outputs of a run. */
typedef struct {
    Tensor *inputs, *references, *outputs;
    size_t output_count;
} Loaded;

static void unload(Loaded *loaded) {
    tensors_free(loaded->inputs, BUNDLE.input_count);
    tensors_free(loaded->references, BUNDLE.output_count);
    free(loaded->inputs);
    free(loaded->references);
    free(loaded->outputs);
}

static bool load(const char *bundle, const Case *one, size_t output_count, Loaded *loaded,
                 Error *error) {
    size_t most = output_count > BUNDLE.output_count ? output_count : BUNDLE.output_count;
    *loaded = (Loaded){
        calloc(BUNDLE.input_count + 1, sizeof(Tensor)),
        calloc(BUNDLE.output_count + 1, sizeof(Tensor)),
        calloc(most + 1, sizeof(Tensor)),
        output_count,
    };
    char folder[3072];
    int length = snprintf(folder, sizeof folder, "%s/golden/%s", bundle, one->folder);
    bool read = loaded->inputs != NULL && loaded->references != NULL && loaded->outputs != NULL;
    if (!read) fail(error, "out of memory");
    if (length < 0 || (size_t)length >= sizeof folder) read = fail(error, "the path is too long");
    read = read &&
           tensors_read(folder, "input", BUNDLE.input_names, BUNDLE.input_count, loaded->inputs,
                        error) &&
           tensors_read(folder, "output", BUNDLE.output_names, BUNDLE.output_count,
                        loaded->references, error) &&
           case_fits(folder, loaded->inputs, loaded->references, error);
    if (!read) unload(loaded);
    return read;
}

/* -- one case ---------------------------------------------------------------------------- */

static bool say_failed(Line to, const char *name, const char *how, const char *output,
                       const char *why) {
    write_line(to.text, to.size, "FAIL %.200s%s  %.200s%s%s", name, how, output, *output ? ": " : "", why);
    return false;
}

/* Returns whether the names of the outputs are those in the bundle. */
static bool named_right(const Tensor *outputs, size_t count, const char *name, const char *how,
                        Line to) {
    for (size_t i = 0; i < count; i++) {
        size_t known = 0;
        while (known < BUNDLE.output_count &&
               strcmp(BUNDLE.output_names[known], outputs[i].name) != 0) {
            known++;
        }
        if (known == BUNDLE.output_count) {
            return say_failed(to, name, how, outputs[i].name, "unexpected output");
        }
    }
    return true;
}

static bool judge_case(const Case *one, const char *how, Tensor *outputs, size_t count,
                       const Tensor *references, Line to) {
    double worst = 0;
    Verdict uncompared = {PASSED, 0, ""}; /* of the first output that is not compared */
    const char *unproven = NULL;          /* its name */
    if (!named_right(outputs, count, one->name, how, to)) return false;
    for (size_t i = 0; i < BUNDLE.output_count; i++) {
        const char *output = BUNDLE.output_names[i];
        Tensor *got = tensor_find(outputs, count, output);
        if (got == NULL) return say_failed(to, one->name, how, output, "it is missing");
        Verdict verdict;
        Error error;
        if (!judge(got, &references[i], &one->tolerances[i], one->ignored, &verdict, &error)) {
            return say_failed(to, one->name, how, output, error.text);
        }
        if (verdict.status == FAILED) return say_failed(to, one->name, how, output, verdict.why);
        if (verdict.share > worst) worst = verdict.share;
        if (verdict.status == UNCOMPARED && unproven == NULL) {
            uncompared = verdict;
            unproven = output;
        }
    }
    if (unproven != NULL) {
        write_line(to.text, to.size, "not-compared %.200s%s  %.200s: %s", one->name, how, unproven, uncompared.why);
        return false;
    }
    write_line(to.text, to.size, "ok   %.200s%s  %.3f of tolerance", one->name, how, worst);
    return true;
}

static bool passes(const Graphs *graphs, const Case *one, Loaded *loaded, Line to) {
    Error error;
    if (!to_graph(loaded->inputs, &error) ||
        !graphs_run(graphs, loaded->inputs, loaded->outputs, &error)) {
        return say_failed(to, one->name, "", "", error.text);
    }
    bool passed = from_graph(loaded->outputs, loaded->output_count, &error)
                      ? judge_case(one, "", loaded->outputs, loaded->output_count, loaded->references, to)
                      : say_failed(to, one->name, "", "", error.text);
    tensors_free(loaded->outputs, loaded->output_count);
    return passed;
}

static bool passes_token_by_token(const Graphs *graphs, const Case *one, Loaded *loaded,
                                  Line to) {
    const char *how = " token by token";
    Error error;
    if (!replay(graphs, loaded->inputs, loaded->references, loaded->outputs, &error)) {
        return say_failed(to, one->name, how, "", error.text);
    }
    bool passed = judge_case(one, how, loaded->outputs, BUNDLE.output_count, loaded->references, to);
    tensors_free(loaded->outputs, BUNDLE.output_count);
    return passed;
}

int case_test(const Graphs *graphs, const char *bundle, size_t at, char *line, size_t size,
              Error *error) {
    Loaded loaded;
    Line to = {line, size};
    bool by_token = at == BUNDLE.case_count;
    const Case *one = by_token ? BUNDLE.replay : &BUNDLE.cases[at];
    if (!load(bundle, one, model_output_count(graphs->any), &loaded, error)) return ATTN_BUNDLE;
    bool passed = by_token ? passes_token_by_token(graphs, one, &loaded, to)
                           : passes(graphs, one, &loaded, to);
    unload(&loaded);
    return passed ? ATTN_OK : ATTN_MISMATCH;
}
