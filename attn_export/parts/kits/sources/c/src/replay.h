/* A test case run token by token, which must give the same as the whole case at once. */
#ifndef REPLAY_H
#define REPLAY_H

#include "graphs.h"

/*
 * Fills `wholes`, one tensor per output of the bundle, with the results of all steps. `inputs` are
 * those of the whole case; `references` are its true outputs, of which only shapes are used. Both must
 * match the signature.
 */
bool replay(const Graphs *graphs, const Tensor *inputs, const Tensor *references, Tensor *wholes,
            Error *error);

#endif
