"""Decisions that no input affects, such as the bucket of each distance, taken from another run.

A distance of 16 may lie exactly on the boundary of two buckets. Random rounding would put it into
either, and float64 perhaps not into that of float32, which changes the output by as much as another
bias does. Such a decision is no rounding error: float64 runs decide as the module itself does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from attn_export.reference.operations import OperationMode, name_of

DECIDING = frozenset(
    {"ceil", "floor", "floor_divide", "fmod", "remainder", "round", "sign", "trunc"}
)
"""Operations with floating results that jump. All operations with other results do, too."""


class Decisions(OperationMode):
    """Mode that records the decisions that no input affects, or repeats those of another run."""

    def __init__(self, inputs: Iterable[Tensor], repeated: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.made: list[Any] = []
        self._repeated = None if repeated is None else iter(repeated)
        self._dependent = set(map(_storage, inputs))

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = list(_tensors((args, kwargs.values())))
        dependent = any(_storage(x) in self._dependent for x in operands)
        result = func(*args, **kwargs)
        if not dependent and any(x.is_floating_point() for x in operands):
            result = self._settle(name_of(func) in DECIDING, result)
        for x in _tensors([result]):
            # Storages of freed values are used again.
            (self._dependent.add if dependent else self._dependent.discard)(_storage(x))
        return result

    def _settle(self, jumps: bool, result: Any) -> Any:
        """Return a result, that of the other run if it is a decision."""
        if isinstance(result, (tuple, list)):
            return type(result)(self._settle(jumps, x) for x in result)
        is_tensor = isinstance(result, Tensor)
        smooth = result.is_floating_point() or result.is_complex() if is_tensor else True
        if smooth and not jumps and not isinstance(result, (bool, int)):
            return result
        if self._repeated is None:
            self.made.append(result.clone() if is_tensor else result)
            return result
        other: Any = next(self._repeated, None)
        if type(other) is not type(result) or (is_tensor and other.shape != result.shape):
            self._repeated = iter(())  # this run takes another way
            return result
        return result.copy_(other) if is_tensor else other  # in place, as `floor_` has it


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif not isinstance(value, (str, bytes)) and isinstance(value, Iterable):
            yield from _tensors(value)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
