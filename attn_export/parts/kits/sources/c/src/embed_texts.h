/* Vectors of texts, by an encoder. */
#ifndef EMBED_TEXTS_H
#define EMBED_TEXTS_H

#include "graphs.h"

/* Texts one after the other: the ids of their tokens, the types of these or NULL, and their lengths. */
typedef struct {
    const int64_t *ids, *types, *lengths;
    int64_t total, count;
} Texts;

/* Writes the vector of each text. Returns a code of attn_export.h. */
int embed_texts(const Graphs *graphs, const Texts *texts, float *vectors, int64_t size,
                Error *error);

#endif
