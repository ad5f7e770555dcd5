"""Values of a run with random rounding that no input affects, such as buckets of distances.

A distance of 16 may lie exactly on the boundary of two buckets. Random rounding would put it into
either, and change the output by as much as another bias does. Such a decision is no rounding
error: it is made from values that are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from attn_export.parity.operations import name_of
from attn_export.parity.rounding import RandomRounding

DECIDING = frozenset(
    {"ceil", "floor", "floor_divide", "fmod", "remainder", "round", "sign", "trunc"}
)
"""Operations with floating results that jump. All operations with other results do, too."""

MOST_TRACKED = 2**22
"""The largest number of elements of a value that is kept without rounding."""


class InputFreeRounding(RandomRounding):
    """Mode in which decisions that no input affects are made from exact values.

    Args:
        inputs: The inputs of the run.
        args: The arguments of `RandomRounding`.
        options: Its arguments by name.
    """

    def __init__(self, inputs: Iterable[Tensor], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dependent = set(map(_storage, inputs))
        self._exact: Any = WeakIdKeyDictionary()  # of rounded values, without rounding

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors((args, kwargs.values())))
        dependent = any(_storage(x) in self._dependent for x in tensors)
        exact = None
        if not dependent and any(x in self._exact for x in tensors):
            operands = [self._exact_of(x) for x in args]
            if func._schema.is_mutable and isinstance(operands[0], Tensor):
                operands[0] = operands[0].clone()
            exact = self._compute(func, operands, {n: self._exact_of(x) for n, x in kwargs.items()})
        result, unrounded = self._rounded_operation(func, args, kwargs)
        exact = unrounded if exact is None and not dependent else exact
        return self._settle(name_of(func), dependent, result, exact)

    def _settle(self, name: str, dependent: bool, result: Any, exact: Any) -> Any:
        """Return a result, exact if it is a decision; `exact` is None if it has no rounding."""
        for x in _tensors([result]):
            # Storages of freed values are used again.
            (self._dependent.add if dependent else self._dependent.discard)(_storage(x))
        if exact is None:
            return result
        if isinstance(result, (tuple, list)):
            return type(result)(
                self._settle(name, dependent, x, y) for x, y in zip(result, exact, strict=True)
            )
        if not isinstance(result, Tensor):
            return exact
        if name in DECIDING or not result.is_floating_point():
            self._exact.pop(result, None)
            return exact
        if result.numel() <= MOST_TRACKED:
            self._exact[result] = exact
        return result

    def _exact_of(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._exact.get(x, x)
        return type(x)(map(self._exact_of, x)) if type(x) in (tuple, list) else x


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif not isinstance(value, (str, bytes)) and isinstance(value, Iterable):
            yield from _tensors(value)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
