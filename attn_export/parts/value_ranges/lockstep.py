"""Runs of a graph that differ in how values are rounded, node by node beside each other.

A run computes only what differs from the run that it is based on, and a value is dropped after its
last reader.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import onnx

from attn_export.float64.evaluate import is_float
from attn_export.parts.value_ranges.float_formats import FloatFormat
from attn_export.parts.value_ranges.rounded_run import RoundedRun, RoundsTo, Seen, full
from attn_export.parts.value_ranges.streamed_graph import MOST_HELD, StreamedGraph
from attn_export.tensorfile import Array, to_float64

_BLOCK = 2**22
"""The number of elements of a weight that are multiplied together."""

_FLOAT32 = FloatFormat.of("float32")


class _Made:
    """A value as kept nodes read it, and as others do: None until one does."""

    def __init__(self, wide: Any, narrow: Any) -> None:
        self.wide, self.narrow = wide, narrow


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
        self.forms: dict[tuple[RoundsTo, str], Array] = {}
        self.memory: dict[int, Mapping[str, Any]] = {}
        self._inputs: Mapping[str, Array] = {}
        self._free = MOST_HELD
        self.seconds = np.zeros(len(graph.nodes))
        """The time that the first run took in each node."""

    def wide(self) -> RoundedRun:
        """Return a run in float32, which is what a narrow format is compared with."""
        return RoundedRun(full, kept=self.all_nodes)

    def remember(self, n: int, outputs: Mapping[str, Any]) -> None:
        """Hold the outputs of a node in float32 for later runs, as long as there is room."""
        self._free -= sum(x.nbytes for x in outputs.values() if isinstance(x, np.ndarray))
        if self._free > 0:
            self.memory[n] = outputs

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
            self._inputs, self.memory, self._free = inputs, {}, MOST_HELD
        return _Pass(self, inputs, runs, observe).outputs()


class _Pass:
    def __init__(
        self, lockstep: Lockstep, inputs: Mapping[str, Array], runs: Sequence[RoundedRun],
        observe: _Observer | None,
    ) -> None:  # fmt: skip
        self._of, self._graph, self._runs = lockstep, lockstep.graph, runs
        self._observe = observe
        self._values: dict[RoundedRun, dict[str, _Made]] = {run: {} for run in runs}
        self._rounded: dict[tuple[str, int], tuple[Array, Array]] = {}
        self._uses = Counter(self._graph.uses)
        self._indices: dict[int, Array] = {}
        self._is_first = not lockstep.seconds.any()
        for name in self._graph.inputs:
            self._put(name, -1, dict.fromkeys(runs, to_float64(inputs[name])))

    def outputs(self) -> list[dict[str, Any]]:
        """Compute all nodes, and return the graph outputs of each run."""
        for n in range(len(self._graph.nodes)):
            self._compute(n)
            for name in self._graph.reads[n]:
                self._uses[name] -= 1
                if not self._uses[name] and name not in self._graph.outputs:
                    for values in self._values.values():
                        values.pop(name, None)
            self._rounded.clear()
        return [{name: self._wide(run, name) for name in self._graph.outputs} for run in self._runs]

    def _compute(self, n: int) -> None:
        """Compute a node in each run in which it reads other values than in the base."""
        if not self._graph.reads[n] and self._graph.nodes[n].output[0] not in self._graph.producer:
            return  # the transposed form of a weight
        parts: list[dict[RoundedRun, Mapping[str, Any]]] = []
        for weights in self._weights(n):
            parts.append(self._computed(n, weights))
            self._rounded.clear()
        computed = {run: _joined([part[run] for part in parts]) for run in self._runs}
        for run in self._runs:
            if run.base and all(part[run] is part[run.base] for part in parts):
                computed[run] = computed[run.base]
        for name in self._graph.nodes[n].output:
            if name:
                self._put(name, n, {run: computed[run].get(name) for run in self._runs})

    def _computed(
        self, n: int, weights: Mapping[str, Array]
    ) -> dict[RoundedRun, Mapping[str, Any]]:  # fmt: skip
        names = self._graph.reads[n]
        inputs: dict[RoundedRun, list[Any]] = {}
        computed: dict[RoundedRun, Mapping[str, Any]] = {}
        for run in self._runs:
            inputs[run] = [self._read(run, name, n, weights) for name in names]
            like = run.base
            if like and all(map(_is_same, inputs[run], inputs[like])):
                computed[run] = computed[like]
                continue
            is_wide = run.kept is self._of.all_nodes and not like
            if is_wide and n in self._of.memory:
                computed[run] = self._of.memory[n]
                continue
            started = time.perf_counter()
            outputs = self._graph.compute(
                n, {"": None, **dict(zip(names, inputs[run], strict=True))}
            )
            if self._is_first and run is self._runs[0]:
                self._of.seconds[n] += time.perf_counter() - started
            known = computed[like] if like else {}
            for name, array in outputs.items():
                outputs[name] = known[name] if _is_equal(known.get(name), array) else array
            computed[run] = outputs
            if is_wide and not self._in_blocks(n):
                self._of.remember(n, outputs)
        return computed

    def _weights(self, n: int) -> Iterator[dict[str, Array]]:
        """Yield the weights of a node.

        Those of a large product come in blocks of columns, those of a table as the rows that are
        read, and the indices of these.
        """
        graph, node = self._graph, self._graph.nodes[n]
        names = [name for name in graph.reads[n] if self._is_weight(name)]
        large = [name for name in names if graph.is_large(name)]
        if self._in_blocks(n):
            stored = graph.stored(large[0])
            step = max(1, _BLOCK * stored.shape[-1] // stored.size)
            for start in range(0, stored.shape[-1], step):
                yield {large[0]: to_float64(np.asarray(stored[..., start : start + step]))}
        elif self._is_lookup(node, names) and large:
            stored, count = graph.stored(large[0]), len(graph.stored(large[0]))
            read = [self._read(run, node.input[1], n, {}) for run in self._runs]
            rows = np.unique(np.concatenate([each.reshape(-1) for each in read]))
            if not rows.size or rows[0] < -count or rows[-1] >= count:
                yield {large[0]: graph.weight(large[0])}  # the node raises an error
                return
            rows = np.unique(rows % count)
            self._indices = {id(each): np.searchsorted(rows, each % count) for each in read}
            yield {large[0]: to_float64(np.asarray(stored[rows]))}
            self._indices = {}
        else:
            yield {name: graph.weight(name) for name in names}

    def _in_blocks(self, n: int) -> bool:
        """Return whether a node is a product by a weight that is too large to hold."""
        node = self._graph.nodes[n]
        is_product = node.op_type == "MatMul" and self._graph.is_large(node.input[1])
        return is_product and self._graph.size(node.input[1]) > _BLOCK

    def _is_lookup(self, node: onnx.NodeProto, weights: Sequence[str]) -> bool:
        """Return whether a node takes rows of a table."""
        is_rows = not any(attribute.i for attribute in node.attribute)
        return node.op_type == "Gather" and is_rows and [*weights] == [node.input[0]]

    def _put(self, name: str, n: int, arrays: Mapping[RoundedRun, Any]) -> None:
        """Store a value of each run, as made and as read by nodes in the narrow format."""
        moved = n >= 0 and self._graph.moves(n)
        for run, array in arrays.items():
            made = _Made(array, array)
            is_wide = (n < 0 or n in run.kept) and name not in run.narrow
            if is_float(array) and self._is_narrow(name) and (is_wide or not moved):
                made.narrow = None if is_wide and n >= 0 else self._round(run, name, array)
                made.wide = made.narrow
                if is_wide:
                    made.wide = array if moved else self._in_float32(array)
            elif is_float(array) and n >= 0 and not moved and self._graph.dtypes[name] == "float32":
                made.wide = made.narrow = self._in_float32(array)  # as in the reference
            if self._observe and isinstance(array, np.ndarray):
                read = made.wide if made.narrow is None else made.narrow
                self._observe(run, Seen(name, n, array, read))
            base = run.base and self._made(run.base, name)
            if base and base.wide is made.wide and base.narrow is made.narrow:
                self._values[run].pop(name, None)
            else:
                self._values[run][name] = made

    def _round(self, run: RoundedRun, name: str, array: Array) -> Array:
        if name in run.clipped:
            array = np.clip(array, -self._of.format.largest, self._of.format.largest)
            return run.rounding(array, self._of.format.rounded(array))
        return run.rounding(array, self._rounded_to(self._of.format, array))

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
            narrow = is_float(array) and self._is_narrow(name) and not is_wide
            if not narrow or name in run.clipped or not self._graph.is_held(name):
                return self._round(run, name, array) if narrow else array
            key = run.rounding, name
            if key not in self._of.forms:
                self._of.forms[key] = self._round(run, name, array)
            return self._of.forms[key]
        made = self._made(run, name)
        if made is None:  # a value of a subgraph that has the name of a later one
            return None
        if made.narrow is None and n not in run.kept:
            made.narrow = self._round(run, name, made.wide)
        array = made.wide if n in run.kept else made.narrow
        return self._indices.get(id(array), array)

    def _made(self, run: RoundedRun | None, name: str) -> _Made | None:
        while run is not None:
            if name in self._values[run]:
                return self._values[run][name]
            run = run.base
        return None

    def _wide(self, run: RoundedRun, name: str) -> Any:
        if self._is_weight(name):
            return self._graph.weight(name)
        made = self._made(run, name)
        return made and made.wide

    def _is_weight(self, name: str) -> bool:
        return name not in self._graph.producer and name not in self._graph.inputs

    def _is_narrow(self, name: str) -> bool:
        return self._graph.dtypes.get(name) in self._of.narrow_dtypes


def _joined(parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the outputs of a node of which blocks of columns were computed."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}


def _is_same(one: object, other: object) -> bool:
    return one is other


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits."""
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype or one.dtype.hasobject:
        return False
    if not one.ndim or one.dtype.kind != "f":
        return np.array_equal(one, other)
    # Most arrays differ in the first row already.
    bits, others = (np.ascontiguousarray(x).view(np.int64) for x in (one, other))
    return np.array_equal(bits[:1], others[:1]) and np.array_equal(bits, others)
