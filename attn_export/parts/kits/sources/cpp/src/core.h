// The C code that the kits for C and C++ share: tensors, their files and the judge. Its names are
// in the global namespace, so only the sources that wrap it include this file.
#pragma once

extern "C" {
#include "core/file.h"
#include "core/judge.h"
#include "core/tensorproto.h"
}

#include "tensor.h"

namespace attention {

// Returns a C tensor that shares the elements. Throws std::invalid_argument if the rank is larger
// than MAX_RANK.
::Tensor in_c(const Tensor& tensor);

// Returns a tensor that takes ownership of a C tensor.
Tensor taken(::Tensor made);

}  // namespace attention
