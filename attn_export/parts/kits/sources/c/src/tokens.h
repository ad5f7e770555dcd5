/* Tokens of a whole model, one after the other. */
#ifndef TOKENS_H
#define TOKENS_H

#include "steps.h"

typedef void (*EachToken)(int64_t token, void *context);

/*
 * Continues a prompt of `length` ids by at most `count` tokens, each that with the largest logit,
 * until one ends the text. Calls `each` with every token as it comes. Returns false if the bundle
 * takes no ids or not so many, the prompt is empty, or an id is not in the vocabulary.
 */
bool generate(Decode *decode, const int64_t *prompt, size_t length, int64_t count, EachToken each,
              void *context, Error *error);

#endif
