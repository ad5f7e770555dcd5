"""Equal values that a module ranks: the elements of its outputs that their order decides.

PyTorch does not say in which order `topk` gives equal values; ONNX's `TopK` takes the lowest index
first. Whole numbers that a module takes from values nearer to each other than rounding differ too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_export.errors import counted
from attn_export.parity.judge import TIES, TIES_ADVICE
from attn_export.parity.measures import distance, without_rows
from attn_export.parity.operations import RANKING, OperationMode, name_of
from attn_export.results import Arrays, Golden
from attn_export.tensorfile import is_floating

SAME = 1e-9
"""The largest relative difference of two float64 runs of one meaning."""

Order = Callable[[int], Tensor]
"""Returns the numbers 0 to n - 1 in the order in which equal values are taken."""


def _at_random(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


ORDERS: tuple[Order, ...] = (torch.arange, lambda n: torch.arange(n - 1, -1, -1), _at_random)
"""The first is that of ONNX."""


class TieOrder(OperationMode):
    """Rank equal values in a given order.

    Args:
        order: Returns the order for a number of values.
    """

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        name = name_of(func)
        if name not in RANKING or func._schema.is_mutable or not args[0].dim():
            return func(*args, **kwargs)
        given = {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        } | kwargs
        x, axis = args[0], given.get("dim", -1)
        if given.get("stable"):  # which has one order
            return func(*args, **kwargs)
        down = bool(given.get("largest", True) if name == "topk" else given.get("descending"))
        order = self._order(x.shape[axis]).to(x.device)
        values, places = x.index_select(axis, order).sort(dim=axis, descending=down, stable=True)
        count = given.get("k", x.shape[axis])
        return values.narrow(axis, 0, count), order[places.narrow(axis, 0, count)]


def with_ties(
    golden: Golden, truth: Arrays, orders: Sequence[Arrays], rounded: Sequence[Arrays]
) -> Golden:
    """Return a case with the elements that ties decide, no evidence where ONNX's order shows.

    Args:
        golden: The case.
        truth: Its float64 outputs.
        orders: The same with equal values ranked by each of `ORDERS`; may be empty.
        rounded: Runs that round at random, for outputs of whole numbers; may be empty.
    """

    def others(runs: Sequence[Arrays], name: str) -> list[np.ndarray]:
        return [without_rows(run[name], truth[name], golden.case.ignored_rows) for run in runs]

    tied: dict[str, np.ndarray] = {}
    unusable = dict(golden.unusable)
    for name, t in truth.items():
        ranked = others(orders, name)
        whole = not is_floating(t.dtype)
        mask = _changed(t, [*ranked, *others(rounded, name)] if whole else ranked[:1])
        found = distance(ranked[0], t) if ranked else None
        shows = found is not None and not max(found.whole, found.row) <= SAME
        if shows or (whole and mask.any()):
            tied[name] = mask
        if shows:
            unusable[name] = (
                f"{TIES}: {int(mask.sum())} of {counted(t.size, 'element')} of {name} depend on "
                f"the order of equal values, which PyTorch's topk does not define; {TIES_ADVICE}"
            )
    return dataclasses.replace(golden, unusable=unusable, tied=tied)


def whole_numbers(outputs: Mapping[str, np.ndarray]) -> bool:
    """Return whether an output has whole numbers or bools."""
    return any(not is_floating(array.dtype) for array in outputs.values())


def _changed(t: np.ndarray, runs: Sequence[np.ndarray]) -> np.ndarray:
    """Return a mask of the elements that are not the same in all runs."""
    found = np.zeros(t.shape, bool)
    for run in runs:
        found |= (run != t) & ~((run != run) & (t != t)) if run.shape == t.shape else True
    return found
