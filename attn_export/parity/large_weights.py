"""Large weights in float64 runs: widened where they are used, never all at once.

A float64 copy of a module takes twice the memory of its weights. A weight of more than `LARGE`
elements therefore stays as it is, shared with the module, and is widened for each operation that
reads it. The numbers are those of a float64 copy, bit by bit, unless the module looks at the types
of its weights. A product with a weight of more than `WHOLE` elements goes by blocks of columns; its
sums may differ by the rounding of float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from attn_export.attention.wide_buffers import NARROW

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
    found = copy.deepcopy(module, dict(shared))
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
