#include "judge.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The output and the reference, in double. */
typedef struct {
    const Tensor *reference;
    size_t count, row_length;
    double *r, *t;
} Widened;

/* -- messages of verdicts ---------------------------------------------------------------- */

static const char *place_text(const Tensor *tensor, size_t flat, char *buffer, size_t size) {
    int64_t at[MAX_RANK];
    for (size_t axis = tensor->rank; axis-- > 0; flat /= (size_t)tensor->dims[axis]) {
        at[axis] = (int64_t)(flat % (size_t)tensor->dims[axis]);
    }
    return dims_text(at, tensor->rank, buffer, size);
}

static void set_uncompared(Verdict *verdict, const char *reason) {
    verdict->status = UNCOMPARED;
    snprintf(verdict->why, sizeof verdict->why, "%s", reason);
}

static void failed_elements(Verdict *verdict, const char *what, size_t wrong, size_t first,
                            const Tensor *got, const Tensor *reference) {
    char place[128];
    verdict->status = FAILED;
    snprintf(verdict->why, sizeof verdict->why,
             "%s%zu of %zu elements, the first at %s: actual %.6g, expected %.6g", what, wrong,
             tensor_count(reference), place_text(reference, first, place, sizeof place),
             tensor_get(got, first), tensor_get(reference, first));
}

static void failed_size(Verdict *verdict, const char *over, double error, double tolerance,
                        const Widened *both) {
    size_t worst = 0;
    double largest = -1;
    for (size_t i = 0; i < both->count; i++) {
        double distance = isfinite(both->t[i]) ? fabs(both->r[i] - both->t[i]) : 0;
        if (distance > largest) {
            largest = distance;
            worst = i;
        }
    }
    char place[128];
    verdict->status = FAILED;
    snprintf(verdict->why, sizeof verdict->why,
             "relative error %.2e over %s, tolerance %.2e; worst at %s: actual %.6g, expected %.6g",
             error, over, tolerance, place_text(both->reference, worst, place, sizeof place),
             both->r[worst], both->t[worst]);
}

/* -- the rule ---------------------------------------------------------------------------- */

static void judge_exact(const Tensor *got, const Tensor *reference, Verdict *verdict) {
    size_t bytes = element_bytes(reference->dtype), wrong = 0, first = 0;
    const char *r = got->data, *t = reference->data;
    for (size_t i = 0; i < tensor_count(reference); i++) {
        if (memcmp(r + i * bytes, t + i * bytes, bytes) == 0) continue;
        if (wrong++ == 0) first = i;
    }
    if (wrong > 0) failed_elements(verdict, "", wrong, first, got, reference);
}

/* Returns 0 for a finite number, and different numbers for NaN and the two infinities. */
static int kind_of(double value) {
    if (isnan(value)) return 1;
    return isinf(value) ? (value > 0 ? 2 : 3) : 0;
}

static void judge_kinds(const Widened *both, const Tensor *got, Verdict *verdict) {
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < both->count; i++) {
        if (kind_of(both->r[i]) != kind_of(both->t[i]) && wrong++ == 0) first = i;
    }
    if (wrong == 0) return;
    failed_elements(verdict, "NaN or infinity in other places than in the reference; ", wrong,
                    first, got, both->reference);
}

/* Infinities were already compared. Here and below they count as 0. */
static double finite(double value) { return isfinite(value) ? value : 0; }

static void judge_zero_rows(const Widened *both, const Tensor *got, Verdict *verdict) {
    size_t wrong = 0, first = 0;
    for (size_t row = 0; row < both->count; row += both->row_length) {
        bool zero = true;
        for (size_t i = row; i < row + both->row_length; i++) zero = zero && !finite(both->t[i]);
        for (size_t i = row; zero && i < row + both->row_length; i++) {
            if (finite(both->r[i]) != 0 && wrong++ == 0) first = i;
        }
    }
    if (wrong == 0) return;
    failed_elements(verdict, "a row that must be 0 is not; ", wrong, first, got, both->reference);
}

static void judge_sizes(const Widened *both, const Tolerance *tolerance, Verdict *verdict) {
    double largest = 0, all_t = 0, all_d = 0, worst_row = 0;
    for (size_t i = 0; i < both->count; i++) largest = fmax(largest, fabs(finite(both->t[i])));
    if (largest == 0) return;
    for (size_t row = 0; row < both->count; row += both->row_length) {
        double row_t = 0, row_d = 0;
        for (size_t i = row; i < row + both->row_length; i++) {
            /* Elements are divided by the largest one, so that their squares cannot overflow. */
            double t = finite(both->t[i]) / largest;
            double d = (finite(both->r[i]) - finite(both->t[i])) / largest;
            row_t += t * t;
            row_d += d * d;
        }
        if (row_t > 0) worst_row = fmax(worst_row, row_d / row_t);
        all_t += row_t;
        all_d += row_d;
    }
    double whole = sqrt(all_d / all_t), row = sqrt(worst_row);
    verdict->share = fmax(whole / tolerance->whole, row / tolerance->row);
    if (!(whole <= tolerance->whole)) {
        failed_size(verdict, "the whole output", whole, tolerance->whole, both);
    } else if (!(row <= tolerance->row)) {
        failed_size(verdict, "one row", row, tolerance->row, both);
    }
}

static void judge_limits(const Widened *both, const Tolerance *tolerance, Verdict *verdict) {
    if (tolerance->beyond_limit != NULL) {
        set_uncompared(verdict, tolerance->beyond_limit);
    } else if (!tolerance->is_set) {
        verdict->status = FAILED;
        snprintf(verdict->why, sizeof verdict->why,
                 "the stored test cases give no tolerance");
    } else {
        judge_sizes(both, tolerance, verdict);
    }
}

static bool same_form(const Tensor *got, const Tensor *reference, Verdict *verdict) {
    char is[128], wanted[128];
    if (got->dtype != reference->dtype) {
        snprintf(verdict->why, sizeof verdict->why, "its type is %d, expected %d", got->dtype,
                 reference->dtype);
        return false;
    }
    if (got->rank == reference->rank &&
        memcmp(got->dims, reference->dims, reference->rank * sizeof *reference->dims) == 0) {
        return true;
    }
    snprintf(verdict->why, sizeof verdict->why, "its shape is %s, expected %s",
             dims_text(got->dims, got->rank, is, sizeof is),
             dims_text(reference->dims, reference->rank, wanted, sizeof wanted));
    return false;
}

static bool ignore_rows(Tensor *got, const Tensor *reference, IgnoredRows ignored, Error *error) {
    int64_t at[MAX_RANK] = {0}, sizes[MAX_RANK];
    memcpy(sizes, reference->dims, sizeof sizes);
    sizes[0] = 1;
    for (size_t i = 0; reference->rank > 0 && i < ignored.count; i++) {
        at[0] = ignored.rows[i];
        if (at[0] < 0 || at[0] >= reference->dims[0]) {
            return fail(error, "there is no row %lld to ignore", (long long)at[0]);
        }
        if (!tensor_copy_block(got, at, reference, at, sizes, error)) return false;
    }
    return true;
}

static bool judge_numbers(const Tensor *got, const Tensor *reference, const Tolerance *tolerance,
                          Verdict *verdict, Error *error) {
    Widened both = {reference, tensor_count(reference), 1, NULL, NULL};
    if (both.count == 0) {
        judge_limits(&both, tolerance, verdict);
        return true;
    }
    if (reference->rank > 0) both.row_length = (size_t)reference->dims[reference->rank - 1];
    both.r = malloc(both.count * sizeof *both.r);
    both.t = malloc(both.count * sizeof *both.t);
    bool allocated = both.r != NULL && both.t != NULL;
    for (size_t i = 0; allocated && i < both.count; i++) {
        both.r[i] = tensor_get(got, i);
        both.t[i] = tensor_get(reference, i);
    }
    if (allocated) judge_kinds(&both, got, verdict);
    if (allocated && verdict->status == PASSED) judge_zero_rows(&both, got, verdict);
    if (allocated && verdict->status == PASSED) judge_limits(&both, tolerance, verdict);
    free(both.r);
    free(both.t);
    return allocated || fail(error, "out of memory");
}

bool judge(Tensor *got, const Tensor *reference, const Tolerance *tolerance, IgnoredRows ignored,
           Verdict *verdict, Error *error) {
    *verdict = (Verdict){FAILED, 0, ""};
    if (!same_form(got, reference, verdict)) return true;
    if (!ignore_rows(got, reference, ignored, error)) return false;
    if (tolerance->uncompared != NULL) {
        set_uncompared(verdict, tolerance->uncompared);
        return true;
    }
    verdict->status = PASSED;
    if (is_floating(reference->dtype)) return judge_numbers(got, reference, tolerance, verdict, error);
    judge_exact(got, reference, verdict);
    return true;
}
