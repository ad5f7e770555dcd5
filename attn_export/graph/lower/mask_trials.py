"""Sizes at which the nodes of a mask are run, with the visible keys at each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import SYMBOL, Size, known_equal
from attn_export.graph.ir_helpers import PAST_KEY_INPUT, dims, nodes_of, optional_input
from attn_export.graph.lower.caches import in_place_cache
from attn_export.graph.lower.read import AttentionNode

_FIRST = ((3, 4, 2), (1, 1, 0), (1, 5, 0), (2, 1, 6), (1, 7, 2), (3, 2, 5))
"""Sizes B, L, P that are always tried. They include B = 1, L = 1, L > P and L < P."""

_STEPS = (1, 10, -3)
"""Steps between the sizes of other axes: what a mask shows may depend on them, as on a past that is
not that of the node."""

_MOST = 20_000_000
"""The largest number of scores in a trial. A mask that needs more is not replaced."""


@dataclasses.dataclass(frozen=True)
class MaskTrial:
    """One choice of sizes, and the visible keys.

    Attributes:
        sizes: The size of every named axis of the graph inputs.
        past: The number of past keys of each batch element, int64 `[B]`.
        causal: Whether a key is not later than the query, bool `[B, 1, L, S]`.
        shown: Whether the node shows a key without its mask, bool `[B, 1, L, S]`.
    """

    sizes: Mapping[str, int]
    queries: int
    keys: int
    past: np.ndarray
    causal: np.ndarray
    shown: np.ndarray


class MaskTrials:
    """Trials for the mask of one node."""

    def __init__(self, model: ir.Model, a: AttentionNode) -> None:
        self._a, self.cache = a, in_place_cache(a)
        self._totals = dict(_totals(model))
        shapes = [dims(value) for value in model.graph.inputs]
        self._free = [
            name
            for name in dict.fromkeys(_symbol(size) for shape in shapes for size in shape)
            if name and name not in self._totals
        ]

    @property
    def lengths(self) -> tuple[str, ...]:
        """The names of the lengths of queries, keys and past."""
        a = self._a
        parts = (a.query, a.key, *([] if a.past_key is None else [a.past_key]))
        return tuple(str(dims(part)[-2]) for part in parts)

    @property
    def appends(self) -> bool:
        """Return whether there is one new key per query, so that the key of query i is P + i."""
        new = self._a.key if self.cache is None else self.cache.new_key
        one_per_query = bool(dims(new)) and known_equal(dims(new)[-2], dims(self._a.query)[-2])
        return one_per_query and (self.cache is not None or self._a.valid_keys is None)

    def small(self) -> list[MaskTrial]:
        """Return trials of small sizes."""
        return self._of(_FIRST)

    def refuting(
        self, numbers: Iterable[int], reach: int, tables: Iterable[int]
    ) -> list[MaskTrial]:
        """Return trials that would refute a replacement, where a rule takes effect.

        A window of n keys before the query's own hides a key from length n + 2 on. A rule for
        lengths of n or more has an effect from n or n + 1 on.

        `reach`: The largest length that the rule may need before it takes effect: the sum of
        numbers that are added, the product of divisors.
        """
        sizes: list[tuple[int, int, int]] = []
        for n in sorted(set(numbers)):
            sizes += [(1, n, 1), *((1, n + more, 0) for more in (0, 1, 3))]
            sizes += [(1, 3, n - 1), (1, 1, n), (2, 3, n + 2)]
        sizes += [(1, reach + 2, 0), (1, 3, reach + 1)]
        for n in sorted(set(tables)):
            sizes += [(1, 1, n - 1), (1, 2, n - 2), (1, n, 0)]
        if any(math.prod(self._lengths(self._bind(*size))) > _MOST for size in sizes):
            raise ValueError("numbers of a mask are beyond what can be tried")
        return self._of(sizes)

    def known_size(self, size: Size, sizes: Mapping[str, int]) -> int:
        """Return a size in a trial."""
        if isinstance(size, int):
            return size
        name = str(size.value or "")
        if name in self._totals:
            return sum(self.known_size(part, sizes) for part in self._totals[name])
        if name in sizes:
            return sizes[name]
        value = None
        if name and not SYMBOL.fullmatch(name):
            parts = SYMBOL.findall(name)
            value = size.evaluate({x: self.known_size(ir.SymbolicDim(x), sizes) for x in parts})
        if not isinstance(value, int):
            raise ValueError(f"the size {size} is not known")
        return int(value)

    def is_known(self, size: Size) -> bool:
        """Return whether a size is known in a trial."""
        try:
            self.known_size(size, self._bind(1, 1, 0))
        except ValueError:
            return False
        return True

    def axis_of_sizes(self, observed: Sequence[tuple[MaskTrial, int]]) -> Size:
        """Return a size or symbol that has the observed size in each trial."""
        sizes = {size for _, size in observed}
        if len(sizes) == 1:
            return sizes.pop()
        mask = () if self._a.mask is None else dims(self._a.mask)
        names = [ir.SymbolicDim(name) for name in (*self._free, *self._totals)]
        for name in (*names, *(size for size in mask if self.is_known(size))):
            if all(self.known_size(name, trial.sizes) == size for trial, size in observed):
                return name
        return ir.SymbolicDim(None)

    def _of(self, sizes: Iterable[tuple[int, int, int]]) -> list[MaskTrial]:
        trials: dict[tuple[tuple[str, int], ...], MaskTrial] = {}
        for (B, L, P), step in itertools.product(sizes, _STEPS):
            bound_sizes = self._bind(B, L, P, step)
            key = tuple(bound_sizes.items())
            queries, keys = self._lengths(bound_sizes)
            fits = self.cache is None or P + queries <= keys
            if key not in trials and fits:
                trials[key] = self._trial(bound_sizes, P)
        return list(trials.values())

    def _bind(self, B: int, L: int, P: int, step: int = 1) -> dict[str, int]:
        """Return a size for every axis name of the inputs.

        `step`: The step between sizes of other axes than B, L, P, one of `_STEPS`.
        """
        a = self._a
        bound = {_symbol(dims(a.query)[0]): B, _symbol(dims(a.query)[-2]): L}
        if a.past_key is not None:
            bound[_symbol(dims(a.past_key)[-2])] = P
        elif self.cache is not None:
            bound.setdefault(_symbol(dims(a.key)[-2]), P + L + 1)
        first = 2 if step > 0 else 2 - step * len(self._free)
        return {
            name: bound.get(name, first + step * index) for index, name in enumerate(self._free)
        }

    def _lengths(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return the numbers of queries and keys, L and S."""
        a = self._a
        past = 0 if a.past_key is None else self.known_size(dims(a.past_key)[-2], sizes)
        new = self.known_size(dims(a.key)[-2], sizes)
        return self.known_size(dims(a.query)[-2], sizes), past + new

    def _trial(self, sizes: Mapping[str, int], P: int) -> MaskTrial:
        a = self._a
        B = self.known_size(dims(a.query)[0], sizes)
        L, S = self._lengths(sizes)
        if self.cache is None:
            past = np.full(B, S - self.known_size(dims(a.key)[-2], sizes))
        else:  # batch elements of different lengths
            past = np.maximum(P - np.arange(B), 0)
        keys, rows = np.arange(S), np.arange(L)[:, None]
        before = past.reshape(B, 1, 1, 1)
        causal = keys <= before + rows
        shown = causal if a.causal else np.ones_like(causal)
        if a.valid_keys is not None:
            shown = shown & (keys < before + L)
        return MaskTrial(sizes, L, S, past, causal, shown)


def _totals(model: ir.Model) -> Iterator[tuple[str, tuple[Size, Size]]]:
    """Yield the names of total lengths, each with the past length and the new length."""
    for node in nodes_of(model, "Attention"):
        past, new = optional_input(node, PAST_KEY_INPUT), node.inputs[1]
        present = node.outputs[1] if len(node.outputs) > 1 else None
        if past is None or new is None or present is None:
            continue
        if dims(past) and dims(new) and dims(present):
            name, parts = _symbol(dims(present)[-2]), (dims(past)[-2], dims(new)[-2])
            if name and name not in map(_symbol, parts):
                yield name, parts


def _symbol(size: Size) -> str:
    """Return the name of an axis; "" if it has none."""
    name = "" if isinstance(size, int) else str(size.value or "")
    return name if SYMBOL.fullmatch(name) else ""
