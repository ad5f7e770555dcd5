// The part in C that the kits for C and C++ share: tensors, their files and the judge. Its names are
// in the global namespace; only the sources that wrap them include this.
#pragma once

extern "C" {
#include "core/file.h"
#include "core/judge.h"
#include "core/tensorproto.h"
}

#include "tensor.h"

namespace attention {

// A tensor as C has it; it shares the elements. Throws std::invalid_argument where C has no such
// number of axes.
::Tensor in_c(const Tensor& tensor);

// A tensor that C made, which owns it from now on.
Tensor taken(::Tensor made);

}  // namespace attention
