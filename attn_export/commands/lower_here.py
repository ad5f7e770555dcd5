"""Lowering of a graph of any origin, in the process of its own that `lower` starts."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.cases.draw import add_sums, axis_names, draw_inputs, fixed_shape
from attn_export.dialect_names import MICROSOFT, PORTABLE, STANDARD
from attn_export.errors import GraphError, counted, one_line
from attn_export.graph import IrGraph
from attn_export.graph.axis_names import SYMBOL, find_sums
from attn_export.graph.ir_helpers import every_node, nodes_of
from attn_export.graph.load import inlined, load_graph, load_proto
from attn_export.graph.lower import lower
from attn_export.graph.lower.dialects import NOTHING_TO_LOWER, Observed
from attn_export.graph.ranges import described_inputs, image_sizes, small_integers
from attn_export.graph.save import check_replaceable, external_files, replace_graph
from attn_export.interface import Input
from attn_export.measures import measure_strictly
from attn_export.output_folder import write_errors
from attn_export.runtimes.engines.ort_cpu import CPU_PROVIDER, sdk
from attn_export.temp_folders import scratch
from attn_export.tensorfile import ArrayDict


def lower_here(model: str, output: str, dialect: str) -> dict[str, Any]:
    """Lower a graph; return the fields of `LoweredFiles`, with plain paths."""
    source, target = Path(model), Path(output)
    graph = load_graph(source)
    weights = {path for path in external_files(graph) if path.exists()}
    is_foreign = nodes_of(graph, "Softmax") or any(n.domain == MICROSOFT for n in graph.graph)
    is_decomposed = not any(nodes_of(graph, name) for name in ("Attention", "LinearAttention"))
    runs = SourceRuns(source) if is_foreign else None
    if runs is not None and not runs.trials and is_decomposed:
        _refuse_untried(runs, source, dialect)
    graphs = lower(graph, dialect, observed=None if runs is None else runs.observed())
    recognised = graphs[""].recognised
    if dialect == STANDARD and not recognised and is_decomposed:
        raise GraphError(NOTHING_TO_LOWER.format(dialect=dialect))
    if runs is not None and recognised:
        _compare_with_source(runs, source, graphs)
    models = {
        target.with_suffix(f".{phase}{target.suffix}") if phase else target: result.model
        for phase, result in graphs.items()
    }
    with write_errors(output):
        for path in models:
            check_replaceable(path, source)
        beside = target.absolute().parent == source.absolute().parent
        for path, result in models.items():
            replace_graph(result, path, beside=beside, kept=weights)
    note = _ONLY_OPSET if is_decomposed else ""
    if recognised:
        became = "a node" if recognised == 1 else "nodes"
        note = f"{counted(recognised, 'attention')} written out in operators became {became}"
        if runs is not None and runs.loses_nan:
            note += "; a query of which all keys are hidden is NaN in it, and gets 0 in its place"
    operators = {
        str(path): dict(Counter(node.op_type for node in every_node(result.graph)))
        for path, result in models.items()
    }
    return {"operators": operators, "note": note}


def _refuse_untried(runs: SourceRuns, source: Path, dialect: str) -> None:
    """Refuse contrib attention in a graph that ran at no sizes."""
    if dialect in (STANDARD, PORTABLE) and runs.contrib:
        raise GraphError(
            f"{source}: {runs.contrib} cannot be compared with what takes its place, since the "
            f"graph runs in ONNX Runtime at no sizes that were tried ({runs.problem}); keep it as "
            "it is"
        )


_ONLY_OPSET = "there is no Attention node; only the opset was changed"


# -- graphs in which attention was recognised, against their source -----------------------------


def _compare_with_source(runs: SourceRuns, source: Path, graphs: Mapping[str, IrGraph]) -> None:
    """Raise GraphError unless graphs compute in ONNX Runtime what their source does."""
    with scratch() as folder:
        for phase, graph in graphs.items():
            path = folder / f"{phase or 'whole'}.onnx"
            replace_graph(graph.model, path, beside=False, kept=())
            problem = runs.difference(path, graph.file.fixed)
            if problem:
                raise GraphError(
                    f"{source}: attention is written out in it, and as one node {problem}; keep "
                    "the graph as it is"
                )


# -- runs of a graph in ONNX Runtime: shapes of its values, and a comparison --------------------

_MOST_FIXED = 200
"""The largest number of choices of fixed axes that are tried."""

_MOST_ERROR, _MOST_ROW_ERROR = 1e-3, 1e-2
"""The largest relative L2 distances that pass, of an output and of a row: sums in another order
differ by less, and a wrong mask or scale by far more."""

_SIZES = ((3, 5, 7, 9, 11, 13), (6, 9, 8, 7, 11, 10), (5, 3, 11, 7, 13, 9), (1, 1, 1, 1, 1, 1))
"""The sizes of the dynamic axes in each run: the first for the first axis, and so on, cyclic. But
for 1, none is the sum of two others: an axis that must be such a sum would fit by chance."""

_FACTORS = (1, 8, 32)
"""Factors on the sides of images, for graphs that only take multiples."""

_CONTENTS = {
    "random numbers": None, "rows of which all keys are masked": 0, "a first row of True": 1,
}  # fmt: skip
"""Contents of boolean masks and of those of 0 and 1, in the words of messages: random ones, or one
number in the first slice of axis 0."""


_COUNTING = "GroupQueryAttention"
"""The operator that reads how many keys there are, which must be at least as many as are new."""


class SourceRuns:
    """Runs of a graph at several sizes."""

    def __init__(self, path: Path) -> None:
        self._path, self._proto = path, inlined(load_proto(path))
        self._described, known, _ = described_inputs(self._proto, {})
        self._session = _session_of(path)
        self._counting = [n for n in self._proto.graph.node if n.op_type == _COUNTING]
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
            drawn = [dict(zip(free, itertools.cycle(sizes), strict=False)) for sizes in _SIZES]
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
        for factor in _FACTORS if sides else _FACTORS[:1]:
            found = []
            for sizes in _SIZES if axes else _SIZES[:1]:
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
            for (contents, fill), trial in itertools.product(_CONTENTS.items(), self.trials):
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
    return measured.whole <= _MOST_ERROR and measured.row <= _MOST_ROW_ERROR
