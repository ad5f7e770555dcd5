/*
 * Reads tensors and judges outputs with the C code of the kits, for tests that compare languages.
 * Each line of stdin is a command, with fields that are separated by tabs; "-" is an absent field:
 *   read FILE
 *   judge OUTPUT REFERENCE WHOLE ROW UNCOMPARED BEYOND_LIMIT IGNORED_ROWS
 * Each line of stdout is the result of one command.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/judge.h"
#include "core/tensorproto.h"

enum { MOST_FIELDS = 8, MOST_ROWS = 16 };

static void print_hex(const void *data, size_t size) {
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size; i++) printf("%02x", bytes[i]);
}

static void read_file(char *const *field) {
    Tensor tensor;
    Error error;
    if (!tensor_read(field[1], &tensor, &error)) {
        printf("refused\t%s\n", error.text);
        return;
    }
    printf("read\t");
    print_hex(tensor.name, strlen(tensor.name));
    printf("\t%d\t", tensor.dtype);
    for (size_t axis = 0; axis < tensor.rank; axis++) {
        printf("%s%" PRId64, axis > 0 ? "," : "", tensor.dims[axis]);
    }
    printf("\t");
    print_hex(tensor.data, tensor_bytes(&tensor));
    printf("\n");
    tensor_free(&tensor);
}

static const char *text_or_null(const char *field) {
    return strcmp(field, "-") == 0 ? NULL : field;
}

static void judge_files(char *const *field) {
    static const char *const STATUS[] = {
        [FAILED] = "failed", [UNCOMPARED] = "unusable", [PASSED] = "passed",
    };
    Tensor got, reference;
    Error error;
    if (!tensor_read(field[1], &got, &error) || !tensor_read(field[2], &reference, &error)) {
        fprintf(stderr, "%s\n", error.text);
        exit(1);
    }
    Tolerance tolerance = {
        text_or_null(field[3]) != NULL, strtod(field[3], NULL), strtod(field[4], NULL),
        text_or_null(field[5]), text_or_null(field[6]),
    };
    int64_t rows[MOST_ROWS];
    size_t count = 0;
    char *at = field[7];
    while (text_or_null(field[7]) != NULL && count < MOST_ROWS && *at != '\0') {
        rows[count++] = strtoll(at, &at, 10);
        if (*at == ',') at++;
    }
    Verdict verdict;
    if (judge(&got, &reference, &tolerance, (IgnoredRows){rows, count}, &verdict, &error)) {
        printf("%s\t%.17g\t%s\n", STATUS[verdict.status], verdict.share, verdict.why);
    } else {
        printf("error\t0\t%s\n", error.text);
    }
    tensor_free(&got);
    tensor_free(&reference);
}

int main(void) {
    static char line[8192];
    while (fgets(line, sizeof line, stdin) != NULL) {
        char *field[MOST_FIELDS] = {0};
        size_t count = 0;
        line[strcspn(line, "\n")] = '\0';
        for (char *at = strtok(line, "\t"); at != NULL && count < MOST_FIELDS; count++) {
            field[count] = at;
            at = strtok(NULL, "\t");
        }
        if (count == 2 && strcmp(field[0], "read") == 0) {
            read_file(field);
        } else if (count == MOST_FIELDS && strcmp(field[0], "judge") == 0) {
            judge_files(field);
        } else {
            return 2;
        }
    }
    return 0;
}
