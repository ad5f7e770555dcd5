/* A golden case fed token by token, as a decode goes: it has to give what the whole gives. */
#ifndef REPLAY_H
#define REPLAY_H

#include "graphs.h"

/*
 * Fills `wholes`, one for each output of the bundle, with what all steps gave. `inputs` are those
 * of the whole case, `truths` its outputs, for their shapes; both fit the signature.
 */
bool replay(const Graphs *graphs, const Tensor *inputs, const Tensor *truths, Tensor *wholes,
            Error *error);

#endif
