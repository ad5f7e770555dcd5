/* The test cases of the bundle, each run and judged. */
#ifndef CASES_H
#define CASES_H

#include "graphs.h"

/*
 * Runs a case, and writes a line on it. The case after the last one is BUNDLE.replay, token by token.
 * Returns a code of attn_export.h.
 */
int case_test(const Graphs *graphs, const char *bundle, size_t at, char *line, size_t size,
              Error *error);

#endif
