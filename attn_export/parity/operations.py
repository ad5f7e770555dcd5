"""The operations of a run in PyTorch, those of them that round, and random numbers for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

EXACT = frozenset({
    "_local_scalar_dense", "_to_copy", "_unsafe_view", "abs", "alias", "amax", "amin", "arange",
    "argmax", "argmin", "argsort", "cat", "ceil", "chunk", "clamp", "clamp_max", "clamp_min",
    "clone", "constant_pad_nd", "copy", "detach", "diagonal", "embedding", "empty", "empty_like",
    "expand", "fill", "flip", "floor", "full", "full_like", "gather", "index", "index_put",
    "index_select", "lift_fresh", "masked_fill", "max", "maximum", "min", "minimum", "neg",
    "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "permute", "relu",
    "repeat", "repeat_interleave", "reshape", "roll", "round", "scalar_tensor", "scatter",
    "select", "select_scatter", "sign", "slice", "slice_scatter", "sort", "split",
    "split_with_sizes", "squeeze", "stack", "t", "topk", "transpose", "tril", "triu", "trunc",
    "unbind", "unfold", "unsqueeze", "view", "where", "zero", "zeros", "zeros_like",
})  # fmt: skip
"""Operations that round nothing: they move, choose or compare elements."""

Steps = Sequence[tuple[str, float]]
"""The operations of a run that round, in order, each with the eps of the type that it gives."""


class _Recording(TorchDispatchMode):
    """Recorder of the operations that round, and the eps of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[str, float]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation."""
        out = func(*args, **(kwargs or {}))
        name = name_of(func)
        if rounds(name, func, out):
            first = out if isinstance(out, Tensor) else out[0]
            self.steps.append((name, torch.finfo(first.dtype).eps))
        return out


def recorded_steps(run: Callable[[], Any]) -> Steps:
    """Return the operations of a run that round, with the eps of the types that they give."""
    recording = _Recording()
    with recording:
        run()
    return recording.steps


def name_of(func: Any) -> str:
    """Return the name of an operation; that of its form in place is the same."""
    name = str(func._schema.name).rpartition("::")[2]
    return name.rstrip("_") if func._schema.is_mutable else name


def rounds(name: str, func: Any, out: Any) -> bool:
    """Return whether an operation gives floating numbers that it computed.

    Args:
        name: The name of the operation.
        func: The operation.
        out: Its result.
    """
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if name in EXACT or not isinstance(first, Tensor) or not first.is_floating_point():
        return False
    return not is_view(func)


def is_view(func: Any) -> bool:
    """Return whether an operation gives a view of its input."""
    return any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)


# -- random numbers for runs that round at random -----------------------------------------------


class RandomNumbers:
    """Random numbers out of one table: drawing them anew would take as long as the products."""

    SIZE = 1 << 20

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return numbers between -1 and 1."""
        return self._of(_table(self.SIZE)[0], shape)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return numbers of a normal distribution."""
        return self._of(_table(self.SIZE)[1], shape)

    def _of(self, table: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a view of the table: in one piece, or for large shapes rows that overlap."""
        count, half = math.prod(shape), self.SIZE // 2
        start = int(torch.randint(half, (1,), generator=self._generator))
        if count <= half:
            return table[start : start + count].view(tuple(shape))
        width = shape[-1]
        rows = count // width
        step = (half - width) // rows
        if step < 1:
            return table.repeat(-(-count // self.SIZE))[:count].view(tuple(shape))
        strides = [step * math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1)]
        return table.as_strided(tuple(shape), (*strides, 1), start)


@functools.cache
def _table(size: int) -> tuple[Tensor, Tensor]:
    """Return uniform and normal random numbers, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return torch.rand(size, **options).mul_(2).sub_(1), torch.randn(size, **options)
