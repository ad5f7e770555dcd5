"""Roles of dynamic axes and caches, found by what they do in runs, never by their names.

Cases are planned for a batch, queries, a past and keys: each has sizes of its own, such as an empty
past. The axes of a user's module or of a foreign graph may have any names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.errors import AttnExportError
from attn_export.interface import BATCH, KEYS, KNOWN, PAST, QUERIES, Roles, Shape
from attn_export.results import Arrays

_MOST_LEAST = 8
"""The largest size that may be the least of an axis, as that of a kernel or a norm. With larger
ones the user states it."""

DRAWS, MANY = 2, 12
"""The number of draws with which an axis is tried as the batch, and the size for which it is tried:
inputs drawn by a user's function may tell few elements apart by chance."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a module or graph.

    Attributes:
        joined: The results of all concatenations within, in order.
    """

    outputs: Arrays
    joined: Sequence[Any]


_RunTrial = Callable[[Mapping[str, np.ndarray]], Trial]
"""Function that runs the module or graph on inputs; it raises AttnExportError if it cannot."""

_DrawTrial = Callable[[Mapping[str, int], str], Mapping[str, np.ndarray]]
"""Function that draws inputs of the example's sizes with some of them changed, from a seed."""


def find_roles(
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    sums: Mapping[str, str],
    draw: _DrawTrial,
    run: _RunTrial,
) -> Roles:
    """Return what the axes of a module or graph do, by runs of it.

    - An axis is a *past* if an input is the start of a concatenation along it, of which the rest
      depends on other inputs. Its output, if it is one, is the next step's cache.
    - Where nothing is found so, a sum of two axes has a past: the one that no output has, or that
      an output continues.
    - The *batch* is an axis along which no element of an output depends on the inputs at others.
    - *Queries* are the axis that most of the other outputs have, and *keys* the only one left.

    `inputs`: The shape of every input, with names for dynamic axes.
    `outputs`: The shape of every output, likewise.
    """
    finder = _Finder(inputs, outputs, sums, draw, run)
    try:
        pasts, caches = finder.pasts()
    except AttnExportError:
        return Roles()  # it does not run; the capture or the cases say why
    batch = finder.batch([axis for axis in finder.free if axis not in pasts])
    left = [axis for axis in finder.free if axis not in (batch, *pasts)]
    queries = finder.queries(left, caches)
    keys = finder.only_of_tokens([axis for axis in left if axis != queries])
    found = {BATCH: batch, QUERIES: queries, PAST: next(iter(pasts), ""), KEYS: keys}
    names = {axis: role for role, axis in found.items() if axis}
    taken = {*finder.free, *sums, *KNOWN}
    roles = set(names.values())
    for axis in (*finder.free, *sums):
        if axis not in names and axis in (KNOWN if axis in finder.free else roles):
            names[axis] = next(n for i in itertools.count(2) if (n := f"{axis} {i}") not in taken)
    least = {axis: int(not finder.runs_without(axis)) for axis in pasts}
    with contextlib.suppress(AttnExportError):  # a function of the user may not draw all sizes
        least |= finder.least_sizes(left, batch)
    return Roles({axis: name for axis, name in names.items() if axis != name}, least, caches)


class _Finder:
    """The arguments of `find_roles`, with one run."""

    def __init__(
        self, inputs: Mapping[str, Shape], outputs: Mapping[str, Shape], sums: Mapping[str, str],
        draw: _DrawTrial, run: _RunTrial,
    ) -> None:  # fmt: skip
        equal = Roles(
            {axis: text for axis, text in sums.items() if text in sums or text.isidentifier()}
        )
        self._inputs = {name: equal.shape(shape) for name, shape in inputs.items()}
        self._outputs = {name: equal.shape(shape) for name, shape in outputs.items()}
        self._sums = sums
        self._draw, self._run = draw, run
        named = [axis for shape in self._inputs.values() for axis in shape if isinstance(axis, str)]
        self.free = [axis for axis in dict.fromkeys(named) if axis not in sums]

    def pasts(self) -> tuple[list[str], dict[str, str]]:
        """Return the axes that act as a past, and the input of each output that is a cache."""
        self._values, self._others = self._draw({}, "roles"), self._draw({}, "other roles")
        before = _arrays(self._run(self._values))
        found: dict[str, None] = {}
        caches: dict[str, str] = {}
        for axis in self.free:
            held = {name: s.index(axis) for name, s in self._inputs.items() if axis in s}
            others = {n: a for n, a in self._others.items() if n not in held}
            after = _arrays(self._try({**self._values, **others})) if others else []
            for name, at in held.items():
                past = self._values[name]
                for (output, whole), (_, changed) in zip(before, after, strict=False):
                    rest = _rest(past, at, whole)
                    other = None if rest is None else _rest(past, at, changed)
                    if rest is None or other is None or np.array_equal(rest, other):
                        continue
                    found[axis] = None
                    if output and name not in caches.values():
                        start, _ = np.split(whole, [past.shape[at]], at)
                        if np.array_equal(start, past):
                            caches[output] = name
        return list(found or dict.fromkeys(self._terms_that_are_pasts())), caches

    def _terms_that_are_pasts(self) -> Iterator[str]:
        """Yield the term of each sum of two axes that is a past by the shapes alone."""
        for total, expression in self._sums.items():
            terms = [term.strip() for term in expression.split("+")]
            if len(terms) != 2 or not set(terms) <= set(self.free):
                continue
            grown = [t for t in terms if self._is_continued(t, total)]
            unseen = [t for t in terms if not any(t in s for s in self._outputs.values())]
            found = unseen if len(unseen) == 1 else grown
            if len(found) == 1:
                yield found[0]

    def _is_continued(self, axis: str, total: str) -> bool:
        shapes = [tuple(total if a == axis else a for a in s) for s in self._inputs.values()]
        return any(total in shape and shape in shapes for shape in self._outputs.values())

    def batch(self, axes: Sequence[str]) -> str:
        """Return the axis of the batch among some, or "" if there is none."""
        shapes = [*self._inputs.values(), *self._outputs.values()]

        def order(axis: str) -> tuple[int, int]:
            places = [shape.index(axis) for shape in shapes if axis in shape]
            return -len(places), min(places)

        seen = [a for a in axes if any(a in shape for shape in self._outputs.values())]
        seen.sort(key=order)
        independent = next(filter(self._is_independent, seen), "")
        if independent or len(seen) < 2:
            return independent
        # Elements of a batch may depend on one another, as with statistics over the batch.
        return seen[0] if all(s[:1] == (seen[0],) for s in self._outputs.values()) else ""

    def _is_independent(self, axis: str) -> bool:
        """Return whether an output at one index of an axis never depends on inputs at others."""
        for seed in range(DRAWS):
            try:
                values, others = (self._draw({axis: MANY}, f"{n} {seed}") for n in ("one", "other"))
                before = self._run(values).outputs
            except AttnExportError:
                values, others = (self._draw({}, f"{n} {seed}") for n in ("one", "other"))
                before = self._try(values).outputs
            for kept in (0, -1):
                changed = dict(values)
                for name, shape in self._inputs.items():
                    if axis in shape:
                        index = (slice(None),) * shape.index(axis) + (kept,)
                        changed[name] = others[name].copy()
                        changed[name][index] = values[name][index]
                after = self._try(changed).outputs
                for name, shape in self._outputs.items():
                    if axis in shape and not (
                        name in after and _is_equal_at(shape.index(axis), kept, before, after, name)
                    ):
                        return False
        return True

    def queries(self, axes: Sequence[str], caches: Mapping[str, str]) -> str:
        """Return the axis of queries among some, or "" if there is none."""
        shapes = [shape for name, shape in self._outputs.items() if name not in caches]
        counts = {axis: sum(axis in shape for shape in shapes) for axis in axes}
        most = max(counts.values(), default=0)
        if not most:
            return self.only_of_tokens(axes)
        return next(axis for axis, count in counts.items() if count == most)

    def only_of_tokens(self, axes: Sequence[str]) -> str:
        """Return the only one of some axes that an input of two or more axes has, or ""."""
        found = [a for a in axes if any(a in s and len(s) > 1 for s in self._inputs.values())]
        return found[0] if len(found) == 1 else ""

    def runs_without(self, axis: str) -> bool:
        """Return whether it runs at size 0 of an axis, and gives finite numbers."""
        try:
            trial = self._run(self._draw({axis: 0}, "empty"))
        except AttnExportError:
            return False
        return all(np.isfinite(a.astype(np.float64)).all() for a in trial.outputs.values())

    def least_sizes(self, axes: Sequence[str], batch: str) -> dict[str, int]:
        """Return the least size of each axis at which it runs, if it raises where all are 1."""
        one = {batch: 1} if batch else {}

        def runs(sizes: Mapping[str, int]) -> bool:
            return bool(self._try(self._draw({**one, **sizes}, "least")).outputs)

        common = range(1, _MOST_LEAST + 1)
        size = next((n for n in common if runs(dict.fromkeys(axes, n))), 1)
        least = dict.fromkeys(axes, size)
        for axis in axes if size > 1 else ():
            least[axis] = next(n for n in common if runs({**least, axis: n}))
        return {axis: low for axis, low in least.items() if low > 1}

    def _try(self, values: Arrays) -> Trial:
        """Return a run, without outputs if it raises."""
        try:
            return self._run(values)
        except AttnExportError:
            return Trial({}, ())


def _arrays(trial: Trial) -> list[tuple[str, np.ndarray]]:
    """Return the outputs of a run with their names, and its concatenations with the name ""."""
    return [*trial.outputs.items(), *(("", array) for array in trial.joined)]


def _rest(start: np.ndarray, axis: int, whole: np.ndarray) -> np.ndarray | None:
    """Return what follows an array in a concatenation along one of its axes; None if it is none.

    Within a module the axes may be in another order than in the input.
    """
    if whole.ndim != start.ndim:
        return None
    size = start.shape[axis]
    for order in itertools.permutations(range(start.ndim)):
        at = order.index(axis)
        others = [s for i, s in enumerate(whole.shape) if i != at]
        if whole.shape[at] <= size or others != [start.shape[i] for i in order if i != axis]:
            continue
        head, rest = np.split(whole, [size], axis=at)
        if np.array_equal(head, start.transpose(order)):
            return np.asarray(rest)
    return None


def _is_equal_at(axis: int, index: int, one: Arrays, other: Arrays, name: str) -> bool:
    """Return whether an output of two runs is equal, up to rounding, at an index of an axis."""
    first, second = (run[name].take(index, axis).astype(np.float64) for run in (one, other))
    return bool(np.allclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True))
