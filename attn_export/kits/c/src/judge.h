/*
 * The rule by which an output passes, in double: relative L2 error, over the whole and over every
 * row of the last axis, within what the bundle allows; rows that have to be 0 are 0; NaN and
 * infinities are where the truth has them. Integers and bools are equal.
 */
#ifndef JUDGE_H
#define JUDGE_H

#include "tensor.h"

typedef struct {
    bool given; /* whether there are limits: floating point outputs have them */
    double whole, row;
    const char *unusable; /* why the output is not judged, or NULL */
} Tolerance;

typedef struct {
    bool passed;
    double share; /* of what is allowed; 1 is the limit */
    char why[400];
} Verdict;

/* False where there is too little memory to judge. */
bool judge(const Tensor *got, const Tensor *truth, const Tolerance *tolerance, Verdict *verdict,
           Error *error);

#endif
