"""Runs of a graph that differ in how values are rounded, node by node beside each other.

A run computes only what differs from the run that it is based on.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal

import numpy as np
from onnx import NodeProto

from attn_export.float64.evaluate import is_float
from attn_export.float64.streamed import MOST_HELD_BYTES, joined
from attn_export.measures import measure
from attn_export.parts.value_ranges.float_formats import FloatFormat
from attn_export.parts.value_ranges.range_rule import MOST_OF_ONE
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph
from attn_export.tensorfile import Array, to_float64

_STEP = 2**13
"""The number of elements that take as long as the fixed work of a node."""

_FLOAT32 = FloatFormat.of("float32")

RoundingKind = Literal["full", "free", "limits"]
"""Whether values are rounded as the format holds them, as it would with all exponents, or only
where the limits of the format concern them."""


@dataclasses.dataclass(frozen=True, eq=False)
class RoundedRun:
    """How a run rounds.

    Attributes:
        rounding: What it does with a value that has the narrow format.
        kept: The indices of the nodes that read and make float32.
        narrow: Values that have the narrow format though nodes around them are kept.
        clipped: Weights whose elements are limited to the largest number before they are rounded.
        base: The run that gives what does not differ; it has no base itself.
    """

    rounding: RoundingKind = "full"
    kept: Set[int] = frozenset()
    narrow: Set[str] = frozenset()
    clipped: Set[str] = frozenset()
    base: RoundedRun | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A value that was made in a run.

    Attributes:
        name: Its name.
        node: The index of the node that makes it; -1 for inputs and weights.
        made: The array, as the node makes it.
        read: The array as nodes in the narrow format read it.
    """

    name: str
    node: int
    made: Array
    read: Array


class _Made:
    """A value as kept nodes read it, and as others do: None until one does."""

    __slots__ = ("narrow", "wide")

    def __init__(self, wide: Any, narrow: Any) -> None:
        self.wide, self.narrow = wide, narrow


_OfRuns = dict[RoundedRun, _Made]
"""A value in the runs in which it is not that of their base."""

_Observer = Callable[[RoundedRun, Seen], None]


class Lockstep:
    """Runs of a graph with a narrow format.

    `narrow`: The types of the values that have the format.  [default: those narrower than float32,
        and if the graph has none, all]
    """

    def __init__(
        self, graph: StreamedGraph, format_: FloatFormat, narrow: Set[str] = frozenset()
    ) -> None:
        self.graph, self.format = graph, format_
        self.narrow_dtypes = narrow or graph.narrow_dtypes() or {"float32", "float64"}
        self.all_nodes = frozenset(range(len(graph.nodes)))
        self.forms: dict[tuple[RoundingKind, str], Array] = {}
        self.memory: dict[str, tuple[Any, _Made]] = {}
        self._inputs: Mapping[str, Array] = {}
        self._free = MOST_HELD_BYTES
        self.seconds = [0.0] * len(graph.nodes)
        """The time that the first run took in each node."""
        self.work = [0] * len(graph.nodes)
        """The elements that each node reads and makes in the first run, and what a step costs."""

    def wide(self) -> RoundedRun:
        """Return a run in float32, which is what a narrow format is compared with."""
        return RoundedRun(kept=self.all_nodes)

    def remember(self, name: str, array: Any, made: _Made) -> None:
        """Hold a value in float32 for later runs, as long as there is room."""
        self._free -= 2 * array.nbytes if isinstance(array, np.ndarray) else 0
        if self._free > 0:
            self.memory[name] = array, made

    def share(self, first: int) -> float:
        """Return the share of the work of a run that is done from a node on."""
        return sum(self.work[max(first, 0) :]) / max(1, sum(self.work))

    def apart(self, run: RoundedRun, base: RoundedRun) -> Set[int]:
        """Return the nodes that do not do what they do in the base if they read the same."""
        nodes = set(run.kept ^ base.kept)
        if (run.rounding, run.clipped) != (base.rounding, base.clipped):
            nodes |= self.all_nodes - run.kept
        for name in run.narrow ^ base.narrow:
            maker = self.graph.maker.get(name)
            nodes |= self.graph.readers.get(name, set()) if maker is None else {maker}
        return nodes

    def run(
        self,
        inputs: Mapping[str, Array],
        runs: Sequence[RoundedRun],
        observe: _Observer | None = None,
    ) -> list[dict[str, Any]]:
        """Return the graph outputs of each run.

        `runs`: A base comes before the runs that are based on it.
        """
        if inputs is not self._inputs:
            self._inputs, self.memory, self._free = inputs, {}, MOST_HELD_BYTES
        return _Pass(self, inputs, runs, observe).outputs()


class _Pass:
    def __init__(
        self, lockstep: Lockstep, inputs: Mapping[str, Array], runs: Sequence[RoundedRun],
        observe: _Observer | None,
    ) -> None:  # fmt: skip
        self._of, self._graph, self._runs = lockstep, lockstep.graph, runs
        self._observe = observe
        self._apart = {run: lockstep.apart(run, run.base) for run in runs if run.base}
        self._rounded: dict[tuple[str, int], tuple[Array, Array]] = {}
        self._indices: dict[int, Array] = {}
        self._is_first = not any(lockstep.seconds)
        self._values: dict[str, _OfRuns] = {
            name: self._of_runs(name, -1, dict.fromkeys(runs, to_float64(inputs[name])))
            for name in self._graph.inputs
        }

    def outputs(self) -> list[dict[str, Any]]:
        """Compute all nodes, and return the graph outputs of each run."""
        self._graph.walk(self._values, self._outputs_of, self._graph.outputs)
        return [{name: self._wide(run, name) for name in self._graph.outputs} for run in self._runs]

    def _outputs_of(self, node: NodeProto, values: Mapping[str, _OfRuns]) -> dict[str, _OfRuns]:
        """Return what a node makes in the runs that may not do what their base does."""
        n = self._graph.index[id(node)]
        if not self._graph.made[n]:
            return {}  # the transposed form of a weight
        runs = [
            run for run in self._runs
            if not run.base or n in self._apart[run]
            or any(run in values.get(name, ()) for name in self._graph.reads[n])
        ]  # fmt: skip
        parts: list[dict[RoundedRun, Mapping[str, Any]]] = []

        def read(name: str) -> list[Any]:
            return [self._read(run, name, n, {}) for run in runs]

        for weights, moved in self._graph.pieces(node, self._graph.weights_read[n], read):
            self._indices = moved
            parts.append(self._computed(n, runs, weights))
            if len(parts) > 1:
                self._rounded.clear()
        computed = parts[0] if len(parts) == 1 else _joined(parts, runs)
        made = {
            name: self._of_runs(name, n, {run: computed[run].get(name) for run in runs})
            for name in self._graph.made[n]
        }
        self._rounded.clear()
        self._indices = {}
        return made

    def _computed(
        self, n: int, runs: Sequence[RoundedRun], weights: Mapping[str, Array]
    ) -> dict[RoundedRun, Mapping[str, Any]]:
        names, memory = self._graph.reads[n], self._of.memory
        inputs: dict[RoundedRun, list[Any]] = {}
        computed: dict[RoundedRun, Mapping[str, Any]] = {}
        for run in runs:
            read = inputs[run] = [self._read(run, name, n, weights) for name in names]
            like = run.base
            if like and all(map(operator.is_, read, inputs[like])):
                computed[run] = computed[like]
                continue
            outputs = self._graph.made[n]
            is_known = run.kept is self._of.all_nodes and not like
            if is_known and all(name in memory for name in outputs):
                computed[run] = {name: memory[name][0] for name in outputs}
                continue
            values = {"": None, **dict(zip(names, read, strict=True))}
            started = time.perf_counter()
            found = computed[run] = self._graph.compute_node(self._graph.nodes[n], values)
            if self._is_first and run is self._runs[0]:
                self._of.seconds[n] += time.perf_counter() - started
                arrays = (x for x in (*read, *found.values()) if isinstance(x, np.ndarray))
                self._of.work[n] += _STEP + sum(x.size for x in arrays)
        return computed

    def _of_runs(self, name: str, n: int, arrays: Mapping[RoundedRun, Any]) -> _OfRuns:
        """Return a value of each run, as made and as read by nodes in the narrow format."""
        moved, dtype = n in self._graph.moving, self._graph.dtypes.get(name, "")
        is_narrow = dtype in self._of.narrow_dtypes
        found: _OfRuns = {}
        for run, array in arrays.items():
            is_in_float32 = n >= 0 and run.kept is self._of.all_nodes and not run.base
            if is_in_float32 and name in self._of.memory:
                made = self._of.memory[name][1]
            else:
                made = self._as_read(run, name, n, array, is_narrow=is_narrow, moved=moved)
                if is_in_float32 and not self._graph.in_blocks(self._graph.nodes[n]):
                    self._of.remember(name, array, made)
            if self._observe and isinstance(array, np.ndarray):
                read = made.wide if made.narrow is None else made.narrow
                self._observe(run, Seen(name, n, array, read))
            if not run.base or not _is_equal(made, found.get(run.base)):
                found[run] = made
        return found

    def _as_read(
        self, run: RoundedRun, name: str, n: int, array: Any, *, is_narrow: bool, moved: bool
    ) -> _Made:
        """Return a value as nodes read it."""
        made = _Made(array, array)
        is_wide = (n < 0 or n in run.kept) and name not in run.narrow
        if not is_float(array):
            return made
        if is_narrow and (is_wide or not moved):
            made.narrow = None if is_wide and n >= 0 else self._round(run, name, array)
            made.wide = made.narrow
            if is_wide:
                made.wide = array if moved else self._in_float32(array)
        elif n >= 0 and not moved and self._graph.dtypes[name] == "float32":
            made.wide = made.narrow = self._in_float32(array)  # as in the reference
        return made

    def _round(self, run: RoundedRun, name: str, array: Array) -> Array:
        if name in run.clipped:
            array = np.clip(array, -self._of.format.largest, self._of.format.largest)
        if run.rounding == "limits":
            return self._of.format.only_limited(array)
        rounded = self._rounded_to(self._of.format, array)
        return self._of.format.without_limits(array, rounded) if run.rounding == "free" else rounded

    def _in_float32(self, array: Array) -> Array:
        return self._rounded_to(_FLOAT32, array)

    def _rounded_to(self, format_: FloatFormat, array: Array) -> Array:
        """Return an array as a format holds it, the same object for the same array."""
        key = format_.name, id(array)
        if key not in self._rounded:
            self._rounded[key] = array, format_.rounded(array)
        return self._rounded[key][1]

    def _read(self, run: RoundedRun, name: str, n: int, weights: Mapping[str, Array]) -> Any:
        """Return a value as a node reads it."""
        if name in weights:
            array = weights[name]
            is_wide = n in run.kept and name not in run.narrow
            is_narrow = self._graph.dtypes.get(name) in self._of.narrow_dtypes
            narrow = not is_wide and is_float(array) and is_narrow
            if not narrow or name in run.clipped or not self._graph.is_held(name):
                return self._round(run, name, array) if narrow else array
            key = run.rounding, name
            if key not in self._of.forms:
                self._of.forms[key] = self._round(run, name, array)
            return self._of.forms[key]
        made = self._made(run, name)
        if made is None:  # a value of a subgraph that has the name of a later one
            return None
        if n in run.kept:
            array = made.wide
        else:
            if made.narrow is None:
                made.narrow = self._round(run, name, made.wide)
            array = made.narrow
        return self._indices.get(id(array), array) if self._indices else array

    def _made(self, run: RoundedRun, name: str) -> _Made | None:
        of_runs = self._values.get(name, {})
        made = of_runs.get(run)
        return of_runs.get(run.base) if made is None and run.base else made

    def _wide(self, run: RoundedRun, name: str) -> Any:
        if name not in self._graph.maker and name not in self._graph.inputs:
            return self._graph.weight(name)
        made = self._made(run, name)
        return made and made.wide


def _joined(
    parts: Sequence[Mapping[RoundedRun, Mapping[str, Any]]], runs: Sequence[RoundedRun]
) -> dict[RoundedRun, Mapping[str, Any]]:
    """Return the outputs of a node of which blocks of columns were computed."""
    found: dict[RoundedRun, Mapping[str, Any]] = {}
    for run in runs:
        if run.base and all(part[run] is part[run.base] for part in parts):
            found[run] = found[run.base]
        else:
            found[run] = joined([part[run] for part in parts])
    return found


def _is_equal(one: _Made, other: _Made | None) -> bool:
    """Return whether nodes read the same bits of two values."""
    if other is None or (one.narrow is None) is not (other.narrow is None):
        return False
    is_one = one.narrow is one.wide and other.narrow is other.wide
    return _same_bits(one.wide, other.wide) and (is_one or _same_bits(one.narrow, other.narrow))


def _same_bits(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    if one.shape != other.shape or one.dtype != other.dtype or one.dtype.hasobject:
        return False
    if not one.ndim or one.dtype.kind != "f":
        return np.array_equal(one, other)
    # Most arrays differ in the first row already.
    return np.array_equal(_bits(one[:1]), _bits(other[:1])) and np.array_equal(
        _bits(one), _bits(other)
    )


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.int64)


# -- nodes that make rounding larger --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Amplified:
    """A value whose rounding a node makes larger, by a factor."""

    value: str
    node: int
    factor: float


def amplified(
    lockstep: Lockstep, inputs: Mapping[str, Array], run: RoundedRun
) -> list[_Amplified]:  # fmt: skip
    """Return the values whose rounding in a run some node makes much larger, the worst first."""
    wide, eps = lockstep.wide(), lockstep.format.eps
    made: dict[str, Array] = {}
    errors: dict[str, float] = {}

    def observe(seen_in: RoundedRun, seen: Seen) -> None:
        if seen_in is wide:
            made[seen.name] = seen.made
        elif is_float(seen.made):
            errors[seen.name] = measure(seen.read, made.pop(seen.name)).row
        else:  # the rounding of a float decides it
            errors[seen.name] = float(not np.array_equal(seen.made, made.pop(seen.name)))

    lockstep.run(inputs, (wide, run), observe)
    found: dict[str, _Amplified] = {}
    for n, node in enumerate(lockstep.graph.nodes):
        after = max((errors.get(name, 0.0) for name in node.output), default=0.0)
        if not after > MOST_OF_ONE * eps:
            continue
        for name in lockstep.graph.reads[n]:
            factor = after / max(errors.get(name, 0.0), eps / 4)
            known = found.get(name)
            if lockstep.graph.dtypes.get(name) and (known is None or factor > known.factor):
                found[name] = _Amplified(name, n, factor)
    return sorted(
        (each for each in found.values() if each.factor > MOST_OF_ONE), key=lambda a: -a.factor
    )
