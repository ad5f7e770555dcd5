"""Float64 truth of modules that use float32 internally.

Many norms and softmaxes compute in float32 for any type of their input. A float64 copy of
such a module is good to 1e-7 only, which is no truth for float32. Within `ComputeInFloat64`
every such request is answered in float64, and the places are kept. Large weights are widened there
as well, where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention.positions import NARROW
from attn_export.export.module_state import copied
from attn_export.parity.operations import OperationMode, is_view, name_of
from attn_export.results import Arrays
from attn_export.tensorfile import is_floating

# -- large weights in float64 runs: widened where they are used, never all at once --------------

# A float64 copy of a module takes twice the memory of its weights. A weight of more than `LARGE`
# elements therefore stays as it is, shared with the module, and is widened for each operation
# that reads it. The numbers are those of a float64 copy, bit by bit, unless the module looks at
# the types of its weights. A product with a weight of more than `WHOLE` elements goes by blocks
# of columns; its sums may differ by the rounding of float64.


LARGE = 2**22
"""The largest number of elements of a weight of which there is a float64 copy: 32 MiB."""

WHOLE = 2**26
"""The largest number of elements that are widened at once: 512 MiB in float64."""

LESS = (torch.float32, *NARROW)
"""The types that are widened."""


def is_large(value: object) -> bool:
    """Return whether a value is a tensor that is widened only where it is used."""
    return isinstance(value, Tensor) and value.dtype in LESS and value.numel() > LARGE


def widened_copy(module: nn.Module) -> nn.Module:
    """Return a copy in float64 that shares the large weights with the module, in their own type.

    Raises:
        Exception: Whatever a module raises that cannot be copied.
    """
    shared: dict[int, Tensor]
    shared = {id(p): _sharing(p) for p in module.parameters() if is_large(p)}
    shared |= {id(b): b.detach() for b in module.buffers() if is_large(b)}
    found = copied(module, shared)
    found._apply(lambda t: t.double() if t.is_floating_point() and not is_large(t) else t)
    return found


def _sharing(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), requires_grad=False)


def product(
    a: Tensor, b: Tensor, change: Callable[[Tensor], Tensor], multiply: Callable[..., Tensor]
) -> Tensor:
    """Return a product with a large matrix, of which few columns are widened at once.

    Args:
        a: `[M, K]`, in float64.
        b: `[K, N]`.
        change: Applied to the columns in float64, which it may change in place.
        multiply: Takes `a`, columns of `b`, and their slice of the result.
    """
    if b.numel() <= WHOLE:
        return multiply(a, change(b.double()), slice(None))
    parts = [multiply(a, change(b[:, part].double()), part) for part in _columns(b)]
    return torch.cat(parts, -1)


def _columns(b: Tensor) -> Iterator[slice]:
    rows, columns = b.shape
    step = max(WHOLE // rows, 1)
    return (slice(start, start + step) for start in range(0, columns, step))


# -- float64 truth of modules that use float32 internally ---------------------------------------


class ComputeInFloat64(OperationMode):
    """Mode that computes every operation in float64.

    Attributes:
        places: The lines at which the module used less, as ``file.py:12``, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        return self.compute(func, args, kwargs)

    def compute(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the result of an operation in float64, also where the mode is not entered.

        Args:
            func: The operation.
            args: Its arguments by position.
            options: Its arguments by name.
        """
        args = [self._wide_dtype(x) if type(x) is torch.dtype else x for x in args]
        options = {
            name: self._wide_dtype(x) if type(x) is torch.dtype else x
            for name, x in options.items()
        }
        if func._schema.is_mutable:  # what is written into has to stay what it is
            return func(*args, **options)
        if any(map(is_large, args)):
            if is_view(func) or name_of(func) == "_to_copy":  # one copy, not two
                return func(*args, **options)
            if name_of(func) in ("mm", "addmm") and is_large(args[-1]):
                return _product(func, args, options)
        args = tuple(map(widened, args))
        options = {name: widened(x) for name, x in options.items()}
        if name_of(func) == "_grouped_mm":
            return _grouped_product(*args, **options)
        return widened(func(*args, **options))

    def _wide_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in LESS:
            return dtype
        from attn_export.source_location import user_line  # ours asks for no type

        self.places[user_line()] = None
        return torch.float64


def widening_of(module: nn.Module) -> ComputeInFloat64 | None:
    """Return the mode in which a copy by `widened_copy` computes; None if it shares no weights."""
    shared = any(is_large(parameter) for parameter in module.parameters())
    return ComputeInFloat64() if shared else None


def widened_arrays(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return floating arrays in float64, and others as they are.

    Args:
        arrays: Of any shapes, by name.
    """
    return {n: a.astype(np.float64) if is_floating(a.dtype) else a for n, a in arrays.items()}


def widened(value: Any) -> Any:
    """Return a value with its tensors in float64, as operators take and give them.

    It takes less time than `torch.utils._pytree`, which looks every container up.
    """
    if isinstance(value, Tensor):
        return value.double() if value.dtype in LESS else value
    if type(value) in (tuple, list):
        return type(value)(map(widened, value))
    return value


def _product(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """Return the product of a matrix with a large one; ``args`` may begin with what is added."""
    *added, a = map(widened, args[:-1])

    def multiply(a: Tensor, b: Tensor, part: slice) -> Tensor:
        found: Tensor = func(
            *(x[..., part] if x.shape[-1] > 1 else x for x in added), a, b, **options
        )
        return found

    return product(a, args[-1], lambda b: b, multiply)


def _grouped_product(
    x: Tensor, weights: Tensor, offs: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Return the product of rows with the matrix of their group, which PyTorch has not in float64.

    Args:
        x: `[N, K]`, sorted by group, or `[G, N, K]`.
        weights: `[G, K, M]`.
        offs: The row at which each group ends, `[G]`; None where `x` has an axis of groups.
    """
    if offs is None:
        return x @ weights
    starts = [0, *offs.tolist()]
    parts = [x[a:b] @ w for a, b, w in zip(starts, starts[1:], weights, strict=False)]
    rest = x.new_zeros(x.shape[0] - starts[-1], weights.shape[-1])
    return torch.cat([*parts, rest])
