"""Output elements that depend on the order of equal values, or of nearly equal ones, as of `topk`.

PyTorch does not define the order in which `topk` returns equal values; ONNX's `TopK` takes the
lowest index first. Integers that a module derives from values, such as indices, may also differ
where two values differ by less than rounding errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_export.errors import counted
from attn_export.measures import fill_ignored_rows, judged_rows, measure_strictly
from attn_export.reference.operations import RANKING, OperationMode, name_of
from attn_export.results import Arrays, Case, Golden
from attn_export.rule import TIES, TIES_ADVICE
from attn_export.tensorfile import is_floating

_SAME = 1e-9
"""The largest relative difference of two float64 runs that are equal but for rounding."""

_Order = Callable[[int], Tensor]
"""A function from a count n to the indices 0 to n - 1 in the order of preference among equals."""


ORDERS: tuple[_Order, ...] = (
    torch.arange,
    lambda n: torch.arange(n - 1, -1, -1),
    lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(n)),
)
"""Orders to try; the first is that of ONNX."""


class TieOrder(OperationMode):
    """Mode in which `sort` and `topk` return equal values in a given order.

    `near`: The distance of values that count as equal, relative to the largest of those ranked.
    """

    def __init__(self, order: _Order, near: float = 0.0) -> None:
        super().__init__()
        self._order, self._near = order, near

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name not in RANKING or func._schema.is_mutable or not args[0].dim():
            return func(*args, **kwargs)
        options = {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        } | kwargs
        x, axis = args[0], options.get("dim", -1)
        if options.get("stable"):  # the order of equal values is defined
            return func(*args, **kwargs)
        down = bool(options.get("largest", True) if name == "topk" else options.get("descending"))
        order = self._order(x.shape[axis]).to(x.device)
        ranked = self._in_steps(x, axis).index_select(axis, order)
        values, places = ranked.sort(dim=axis, descending=down, stable=True)
        count = options.get("k", x.shape[axis])
        indices = order[places.narrow(axis, 0, count)]
        return x.gather(axis, indices) if self._near else values.narrow(axis, 0, count), indices

    def _in_steps(self, x: Tensor, axis: int) -> Tensor:
        """Return values in steps, in which those near to each other are most often equal."""
        if not self._near or not x.is_floating_point():
            return x
        step = self._near * x.abs().amax(axis, keepdim=True)
        return torch.where(step > 0, (x / step).round(), x)


def mark_ties(
    golden: Golden, reference: Arrays, orders: Sequence[Arrays], rounded: Sequence[Arrays]
) -> Golden:
    """Mark the output elements that ties decide, and outputs that are not compared because of them.

    An output is not compared if ranking equal values in ONNX's order changes it.

    `reference`: Its float64 outputs.
    `orders`: The outputs of float64 runs with each of `ORDERS`; empty if the module ranks none.

    Returns:
        The case with these marks.
    """

    def select(runs: Sequence[Arrays], name: str) -> list[np.ndarray]:
        right, ignored = reference[name], golden.case.ignored_rows
        return [fill_ignored_rows(run[name], right, ignored) for run in runs]

    tied: dict[str, np.ndarray] = {}
    uncompared = dict(golden.uncompared)
    for name, t in reference.items():
        ranked = select(orders, name)
        whole = not is_floating(t.dtype)
        mask = _changed(t, [*ranked, *select(rounded, name)] if whole else ranked[:1])
        apart = measure_strictly(ranked[0], t) if ranked else None
        depends_on_order = apart is not None and not max(apart.whole, apart.row) <= _SAME
        if depends_on_order or (whole and mask.any()):
            tied[name] = mask
        if depends_on_order:
            uncompared[name] = (
                f"{TIES}: {int(mask.sum())} of {counted(t.size, 'element')} of {name} depend on "
                f"the order of equal values, which PyTorch's topk does not define; {TIES_ADVICE}"
            )
    return dataclasses.replace(golden, uncompared=uncompared, tied=tied)


def without_tied_rows(
    golden: Golden, reference: Arrays, orders: Sequence[Arrays]
) -> tuple[Case, int] | None:
    """Return a case without the rows that ties decide, and their number.

    A position whose experts have equal scores is not compared, nor are those that read it.

    `orders`: The float64 outputs in other orders of equal values.

    Returns:
        None if a batch element has no row left in an output, or the case no last position.
    """
    case, left, count = golden.case, dict[str, np.ndarray](), 0
    elements = set(case.ignored_rows)
    for name, t in reference.items():
        if t.ndim < 2 or not t.size:
            continue
        compared = judged_rows(t.shape, case.ignored_rows, golden.determined.get(name, ()))
        tied = np.zeros_like(compared)
        with np.errstate(invalid="ignore"):  # padding may be infinite
            for run in orders:
                far = np.linalg.norm(run[name] - t, axis=-1)
                tied |= far > _SAME * np.linalg.norm(t, axis=-1)
        tied &= compared
        left[name] = compared & ~tied
        elements |= set(np.flatnonzero(tied.reshape(len(t), -1).any(1)).tolist())
        count += int(tied.sum())
    if not count:
        return case, 0
    judged = {}
    for name, rows in left.items():
        by_element = rows.reshape(len(rows), -1)
        has_last = rows.ndim < 2 or rows[..., -1].any()
        if not by_element.any(1).all() or (len(elements) == len(rows) and not has_last):
            return None
        within = np.isin(np.arange(len(rows)), list(elements))[:, None]
        judged[name] = tuple(np.flatnonzero(by_element & within).tolist())
    ignored = tuple(sorted(elements))
    return dataclasses.replace(case, ignored_rows=ignored, judged_rows=judged), count


def _changed(t: np.ndarray, runs: Sequence[np.ndarray]) -> np.ndarray:
    """Return a mask of the elements of `t` that differ in any of the runs; NaN equals NaN."""
    changed = np.zeros(t.shape, bool)
    for run in runs:
        changed |= (run != t) & ~((run != run) & (t != t)) if run.shape == t.shape else True
    return changed
