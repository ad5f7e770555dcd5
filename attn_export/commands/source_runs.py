"""Runs of a graph of any origin in ONNX Runtime: shapes of its values, and a comparison."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.cases.draw import add_sums, axis_names, draw_inputs, fixed_shape
from attn_export.errors import one_line
from attn_export.graph.axis_names import SYMBOL, find_sums
from attn_export.graph.load import inlined, load_proto
from attn_export.graph.lower.dialects import Observed
from attn_export.graph.ranges import described_inputs, image_sizes, small_integers
from attn_export.interface import Input
from attn_export.measures import measure_strictly
from attn_export.runtimes.engines.ort_cpu import CPU_PROVIDER, sdk
from attn_export.tensorfile import ArrayDict

_MOST_FIXED = 200
"""The largest number of choices of fixed axes that are tried."""

MOST_ERROR, MOST_ROW_ERROR = 1e-3, 1e-2
"""The largest relative L2 distances that pass, of an output and of a row: sums in another order
differ by less, and a wrong mask or scale by far more."""

SIZES = ((3, 5, 7, 9, 11, 13), (6, 9, 8, 7, 11, 10), (5, 3, 11, 7, 13, 9), (1, 1, 1, 1, 1, 1))
"""The sizes of the dynamic axes in each run: the first for the first axis, and so on, cyclic. But
for 1, none is the sum of two others: an axis that must be such a sum would fit by chance."""

FACTORS = (1, 8, 32)
"""Factors on the sides of images, for graphs that only take multiples."""

CONTENTS = {
    "random numbers": None, "rows of which all keys are masked": 0, "a first row of True": 1,
}  # fmt: skip
"""Contents of boolean masks and of those of 0 and 1, in the words of messages: random ones, or one
number in the first slice of axis 0."""


COUNTING = "GroupQueryAttention"
"""The operator that reads how many keys there are, which must be at least as many as are new."""


class SourceRuns:
    """Runs of a graph at several sizes."""

    def __init__(self, path: Path) -> None:
        self._path, self._proto = path, inlined(load_proto(path))
        self._described, known, _ = described_inputs(self._proto, {})
        self._session = _session_of(path)
        self._counting = [n for n in self._proto.graph.node if n.op_type == COUNTING]
        self.problem, self.loses_nan = "", False
        contrib = [
            n for n in self._proto.graph.node if n.domain and n.op_type.endswith("Attention")
        ]
        labels = (n.name or f"{n.op_type} of {next(filter(None, n.output), '')}" for n in contrib)
        self.contrib = next(labels, "")
        self.inputs: Mapping[str, Input] = self._described
        self._sums: Mapping[str, str] = known
        self.trials = self._find_trials(known)

    def _find_trials(self, known: Mapping[str, str]) -> list[dict[str, int]]:
        """Return the sizes at which the graph runs, after its sums and fixed axes were found."""
        axes = axis_names(self._described, known)
        choices = itertools.chain(({},), image_sizes(self._proto, self._described))
        for sums in self._sums_of_counts():
            # The kernel takes several new keys after a past for one batch element only.
            self._sums = {**known, **sums}
            free = [axis for axis in axes if axis not in self._sums]
            drawn = [dict(zip(free, itertools.cycle(sizes), strict=False)) for sizes in SIZES]
            ones = [{axis: 1} for axis in free] or [{}]
            trials = [add_sums({**sizes, **one}, self._sums) for sizes in drawn for one in ones]
            found = [trial for trial in trials if self._runs(trial)]
            if len(found) > 1:
                return found if free else found[:1]
        return (
            self._first_trials(axes, known, choices)
            or self._first_trials(axes, find_sums(axes, known, self._runs), ({},))
            or self._first_trials(axes, known, self._single_sizes(axes))
        )

    def _sums_of_counts(self) -> Iterator[dict[str, str]]:
        """Yield the axis that may hold the keys of counting nodes: with other lengths they run."""
        described = self._described
        shapes = [x.shape for x in described.values() if 1 < len(x.shape) < 4]
        new = dict.fromkeys(shape[1] for shape in shapes)
        biases = [n.input[10] for n in self._counting if n.input[10:] and n.input[10] in described]
        totals = dict.fromkeys(described[name].shape[-1] for name in biases) | new
        for total, length in itertools.product(totals, new) if self._counting else ():
            if isinstance(total, str) and total != length:
                yield {total: str(length)}
        if any(name in described for n in self._counting for name in n.input[5:7]):
            yield {}

    def _first_trials(
        self, axes: Sequence[str], sums: Mapping[str, str] | None,
        choices: Iterable[Mapping[str, int]],
    ) -> list[dict[str, int]]:  # fmt: skip
        """Return the sizes of the first choice of fixed axes with which the graph runs, or []."""
        for fixed in itertools.islice(choices, _MOST_FIXED if sums is not None else 0):
            self.inputs = {
                name: dataclasses.replace(input_, shape=fixed_shape(input_.shape, fixed))
                for name, input_ in self._described.items()
            }
            self._sums = sums or {}
            free = [axis for axis in axes if axis not in fixed and axis not in self._sums]
            if trials := [*self._trials(free, fixed)]:
                return trials
        return []

    def _single_sizes(self, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yield sizes of a single axis that the graph may take alone, although it is dynamic."""
        numbers = {
            int(number) for tensor in small_integers(self._proto) for number in tensor.ravel()
            if 1 < number < 4096
        }  # fmt: skip
        for axis, number in itertools.product(axes, sorted(numbers)):
            yield {axis: number}

    def _trials(self, axes: Sequence[str], fixed: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Yield the sizes at which the graph runs, those of fixed axes included."""
        shapes = [input_.shape for input_ in self.inputs.values()]
        sides = {axis for shape in shapes if len(shape) > 3 for axis in shape[2:]} & {*axes}
        for factor in FACTORS if sides else FACTORS[:1]:
            found = []
            for sizes in SIZES if axes else SIZES[:1]:
                # Axes beyond the sixth get sizes of their own.
                trial = {
                    axis: (sizes[n % len(sizes)] + n // len(sizes))
                    * (factor if axis in sides else 1)
                    for n, axis in enumerate(axes)
                }
                trial = add_sums({**fixed, **trial}, self._sums)
                if self._runs(trial):
                    found.append(trial)
            if len(found) > 1 or (found and not axes):
                yield from found
                return

    def _runs(self, sizes: Mapping[str, int]) -> bool:
        try:
            self._session.run(None, self._feed(sizes))
        except Exception as error:  # ONNX Runtime's errors have no common base class
            if not self.problem or {*sizes.values()} <= {1}:
                self.problem = one_line(error)
            return False
        return True

    def _feed(self, sizes: Mapping[str, int], fill: int | None = None) -> ArrayDict:
        feed = draw_inputs(self.inputs, sizes, seed_words=("lower", str(fill)))
        for name, input_ in self.inputs.items():
            is_mask = input_.dtype == "bool" or (
                input_.dtype.startswith("int") and (input_.low, input_.high) == (0, 1)
            )
            if fill is not None and is_mask and feed[name].ndim:
                feed[name][:1] = fill
            if is_mask and self._counting and feed[name].ndim > 1:
                feed[name][:] = 1  # padding has no defined result
        for node in self._counting:
            self._count_keys(node, feed)
        return feed

    def _count_keys(self, node: Any, feed: ArrayDict) -> None:
        """Set how many keys a node has, where inputs say it."""
        lasts, total, bias = (dict(enumerate(node.input)).get(n, "") for n in (5, 6, 10))
        taken = feed.get(node.input[0])
        lengths = [array.shape[1] for array in feed.values() if array.ndim in (2, 3)]
        new = lengths[0] if taken is None and lengths else 1 if taken is None else taken.shape[1]
        keys = feed[bias].shape[-1] if bias in feed else new
        if total in feed:
            feed[total][...] = keys
        if lasts in feed:
            feed[lasts][...] = keys - 1

    def observed(self) -> Observed | None:
        """Return the shapes of all values in the runs; None if they cannot be seen."""
        if not self.trials:
            return None
        import onnx
        from onnx import helper

        model = onnx.ModelProto()
        model.CopyFrom(self._proto)
        names = [
            name
            for node in self._proto.graph.node
            if node.op_type not in _SEQUENCES
            for name in node.output
            if name
        ]
        del model.graph.output[:]
        for number, name in enumerate(names):
            model.graph.node.append(
                helper.make_node("Shape", [name], [f"attn_export.shape.{number}"])
            )
            model.graph.output.append(onnx.ValueInfoProto(name=f"attn_export.shape.{number}"))
        session = _session_of(model.SerializeToString(), self._path.absolute().parent)
        runs = [session.run(None, self._feed(trial)) for trial in self.trials]
        shapes = {
            name: tuple(tuple(run[number].tolist()) for run in runs)
            for number, name in enumerate(names)
        }
        return Observed(self._axes(), shapes)

    def _axes(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes in all runs of each axis that the inputs name."""
        axes = {}
        for value in self._proto.graph.input:
            if value.name in self.inputs:
                described = self._described[value.name].shape
                for dim, axis in zip(value.type.tensor_type.shape.dim, described, strict=True):
                    if dim.dim_param and isinstance(axis, str):
                        axes[dim.dim_param] = tuple(trial[axis] for trial in self.trials)
        return dict(sorted(axes.items(), key=lambda item: SYMBOL.fullmatch(item[0]) is None))

    def difference(self, other: Path, fixed: Mapping[str, int]) -> str:
        """Return a description of how another graph's outputs differ; "" if they agree."""
        if not self.trials:
            return "it could not be compared, since the graph runs at no sizes that were tried"
        try:
            session = _session_of(other)
            for (contents, fill), trial in itertools.product(CONTENTS.items(), self.trials):
                sizes = add_sums({**trial, **self._usual(fixed)}, self._sums)
                feed = self._feed(sizes, fill)
                first, second = (each.run(None, feed) for each in (self._session, session))
                if not all(itertools.starmap(_agree, zip(first, second, strict=True))):
                    return f"it gives other numbers, for {contents}"
                self.loses_nan |= any(map(_has_more_nan, first, second))
        except Exception as error:  # as in `_runs`
            return f"it could not be compared ({one_line(error)})"
        return ""

    def _usual(self, fixed: Mapping[str, int]) -> dict[str, int]:
        """Return fixed sizes by the names under which axes are drawn."""
        sizes = {}
        for value in self._proto.graph.input:
            shape = self._described[value.name].shape if value.name in self.inputs else ()
            for dim, axis in zip(value.type.tensor_type.shape.dim, shape, strict=False):
                if dim.dim_param in fixed and isinstance(axis, str):
                    sizes[axis] = fixed[dim.dim_param]
        return sizes


_SEQUENCES = frozenset({
    "Optional", "OptionalGetElement", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
    "SequenceInsert", "SequenceMap", "SplitToSequence",
})  # fmt: skip
"""Operators whose output may be no tensor."""


def _session_of(model: Path | bytes, folder: Path | None = None) -> Any:
    """Return a session of ONNX Runtime that computes each node as it is."""
    onnxruntime = sdk()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if folder is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder)
        )
    return onnxruntime.InferenceSession(model, options, providers=[CPU_PROVIDER])


def _has_more_nan(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype.kind == "f" and bool((np.isnan(one) & ~np.isnan(other)).any())


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.size:
        return True
    # Fully masked rows may be NaN in the first graph. They are not compared.
    is_number = ~np.isnan(one) if one.dtype.kind == "f" else np.ones(one.shape, bool)
    measured = measure_strictly(np.where(is_number, other, 0), np.where(is_number, one, 0))
    return measured.whole <= MOST_ERROR and measured.row <= MOST_ROW_ERROR
