/*
 * The rule by which an output passes, computed in double. The relative L2 error, over the whole
 * output and over every row of the last axis, must be within the bundle's tolerances.
 * Rows that are 0 in the reference must be 0. NaN and infinities must be at the same positions as in
 * the reference. Integers and bools must be equal. Batch elements that the bundle lists are ignored.
 */
#ifndef JUDGE_H
#define JUDGE_H

#include "tensor.h"

typedef struct {
    bool is_set; /* whether the limits are set, as for outputs of floating point */
    double whole, row;
    const char *uncompared; /* why the output is not compared, or NULL */
    /* The reason that the tolerance is too large, or NULL. Other errors are still judged. */
    const char *beyond_limit;
} Tolerance;

/* Batch elements (indices of axis 0 of every output) that are not compared. */
typedef struct {
    const int64_t *rows;
    size_t count;
} IgnoredRows;

typedef enum { FAILED, UNCOMPARED, PASSED } Status;

typedef struct {
    Status status;
    double share;  /* error divided by the tolerance */
    char why[400]; /* reason why it did not pass, or "" */
} Verdict;

/*
 * Judges `got`, in which ignored batch elements are first replaced by the reference. Returns false if
 * the reference has no such batch element, or if memory is exhausted.
 */
bool judge(Tensor *got, const Tensor *reference, const Tolerance *tolerance, IgnoredRows ignored,
           Verdict *verdict, Error *error);

#endif
