"""Float64 reference of modules that use float32 internally, or have large weights.

Many norms and softmaxes compute in float32 for any type of their input. A float64 copy of
such a module is exact to 1e-7 only, which is no reference for float32. Within `ComputeInFloat64`
every operation computes in float64, and the lines that request less are recorded. Large weights
are not copied in float64, which would take twice their memory: each operation widens those that it
reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention.positions import NARROW
from attn_export.export.module_state import copy_module
from attn_export.reference.operations import OperationMode, is_view, name_of
from attn_export.results import Arrays
from attn_export.tensorfile import to_float64

# -- large weights in float64 runs ---------------------------------------------------------------

LARGE = 2**22
"""The largest number of elements of a weight that is copied in float64: 32 MiB. With shared weights
that are widened whole, the results are bitwise those of a copy, unless the module tests types."""

WHOLE = 2**22
"""The largest number of elements that are widened at once: 32 MiB in float64. A product with a
larger weight is computed by blocks of columns; its sums may differ by the rounding of float64."""

_NARROWER = (torch.float32, *NARROW)
"""The types that are widened."""


def is_large(value: object) -> bool:
    """Return whether a value is a tensor too large to be copied in float64."""
    return isinstance(value, Tensor) and value.dtype in _NARROWER and value.numel() > LARGE


def widened_copy(module: nn.Module) -> nn.Module:
    """Return a copy in float64 that shares the large weights with the module, in their own type."""
    shared: dict[int, Tensor] = {id(b): b.detach() for b in module.buffers() if is_large(b)}
    for parameter in filter(is_large, module.parameters()):
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    copy = copy_module(module, shared)
    copy._apply(lambda t: t.double() if t.is_floating_point() and not is_large(t) else t)
    return copy


def column_blocks(weight: Tensor) -> Iterator[slice]:
    """Yield the blocks of columns of a matrix that are widened at a time."""
    rows, columns = weight.shape
    step = max(WHOLE // rows, 1)
    return (slice(start, start + step) for start in range(0, columns, step))


def widened_block(weight: Tensor, block: slice) -> Tensor:
    """Return a copy in float64 of columns of a matrix."""
    return weight[:, block].to(torch.float64, copy=True)


# -- float64 reference of modules that use float32 internally -------------------------------------


class ComputeInFloat64(OperationMode):
    """Mode that computes every operation in float64.

    Attributes:
        lines: The lines that request a narrower type, as ``file.py:12``, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.compute(func, args, kwargs)

    def compute(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the result of an operation in float64; the mode need not be entered."""
        args = [self._wide_dtype(x) if type(x) is torch.dtype else x for x in args]
        options = {
            name: self._wide_dtype(x) if type(x) is torch.dtype else x
            for name, x in options.items()
        }
        if func._schema.is_mutable:  # the tensor that it writes to must not be replaced
            return func(*args, **options)
        if any(map(is_large, args)):
            if is_view(func) or name_of(func) == "_to_copy":  # one copy, not two
                return func(*args, **options)
            if name_of(func) in ("mm", "addmm") and is_large(args[-1]):
                return _product(func, args, options)
            if name_of(func) == "embedding":  # it copies rows
                return widen(func(*args, **options))
        args = tuple(map(widen, args))
        options = {name: widen(x) for name, x in options.items()}
        if name_of(func) == "_grouped_mm":
            return _grouped_product(*args, **options)
        return widen(func(*args, **options))

    def _wide_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in _NARROWER:
            return dtype
        from attn_export.source_location import user_line  # our own layers never ask for a type

        self.lines[user_line()] = None
        return torch.float64


def widening_of(module: nn.Module) -> ComputeInFloat64 | None:
    """Return a mode for a copy by `widened_copy`; None if it has no large weights."""
    shared = any(is_large(parameter) for parameter in module.parameters())
    return ComputeInFloat64() if shared else None


def widened_arrays(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return floating arrays of any shape in float64, and others as they are."""
    return {name: to_float64(array) for name, array in arrays.items()}


def widen(value: Any) -> Any:
    """Return a value with its floating tensors in float64: a tensor, a tuple, a list or another.

    This is faster than `torch.utils._pytree`, which looks up the type of every container.
    """
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _NARROWER else value
    if type(value) in (tuple, list):
        return type(value)(map(widen, value))
    return value


def _product(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """Return the result of `mm(a, b)` or `addmm(bias, a, b)` with a large `b`."""
    *bias, a = map(widen, args[:-1])
    weight = args[-1]
    result: Tensor = a.new_empty(*a.shape[:-1], weight.shape[1])
    for block in column_blocks(weight):
        bias_block = (x[..., block] if x.shape[-1] > 1 else x for x in bias)
        result[..., block] = func(*bias_block, a, widened_block(weight, block), **options)
    return result


def _grouped_product(
    x: Tensor, weights: Tensor, offs: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Return each row times the matrix of its group: `_grouped_mm`, which is not in float64.

    `x` is `[N, K]`, sorted by group, or `[G, N, K]`; `weights` is `[G, K, M]`. `offs`, `[G]`, is
    the row at which each group ends. Rows after the last group are 0.
    """
    if offs is None:
        return x @ weights
    starts = [0, *offs.tolist()]
    products = [x[a:b] @ w for a, b, w in zip(starts, starts[1:], weights, strict=False)]
    padding = x.new_zeros(x.shape[0] - starts[-1], weights.shape[-1])
    return torch.cat([*products, padding])
