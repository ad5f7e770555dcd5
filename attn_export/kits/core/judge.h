/*
 * The rule by which an output passes, in double: relative L2 error, over the whole and over every
 * row of the last axis, within what the bundle allows; rows that have to be 0 are 0; NaN and
 * infinities are where the truth has them. Integers and bools are equal. Rows of the batch that the
 * bundle names are not compared.
 */
#ifndef JUDGE_H
#define JUDGE_H

#include "tensor.h"

typedef struct {
    bool given; /* whether there are limits: floating point outputs have them */
    double whole, row;
    const char *unusable; /* why the output is no evidence, or NULL */
} Tolerance;

/* Rows of the batch, axis 0 of every output, that are not compared. */
typedef struct {
    const int64_t *rows;
    size_t count;
} IgnoredRows;

typedef enum { FAILED, UNUSABLE, PASSED } Status;

typedef struct {
    Status status;
    double share;  /* of what is allowed; 1 is the limit */
    char why[400]; /* it failed */
} Verdict;

/*
 * Puts the truth into the rows of `got` that are ignored, and compares. False where the truth does
 * not have such a row, or there is too little memory to judge.
 */
bool judge(Tensor *got, const Tensor *truth, const Tolerance *tolerance, IgnoredRows ignored,
           Verdict *verdict, Error *error);

#endif
