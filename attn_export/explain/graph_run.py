"""Runs of one graph in one runtime, judged by the bundle's golden vectors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from attn_export.bundle.golden import read_golden, read_inputs, stored_cases
from attn_export.bundle.manifest import GOLDEN
from attn_export.errors import UsageError, choose
from attn_export.judge.judge import judge
from attn_export.measures import fill_ignored_rows, measure
from attn_export.results import WHOLE_DECODE, Arrays, Golden
from attn_export.runtimes.process import RunResult, run_once
from attn_export.runtimes.protocol import Limits, Options, Runtime
from attn_export.runtimes.worker import to_case_layout, to_graph_layout
from attn_export.schema import GraphFile, Manifest
from attn_export.tensorfile import is_floating


@dataclasses.dataclass(frozen=True)
class GoldenCase:
    """A case of the bundle with its inputs and its expected outputs.

    Attributes:
        inputs: The inputs by name, in the bundle's axis order.
    """

    name: str
    sizes: Mapping[str, int]
    inputs: Arrays
    golden: Golden

    @property
    def size(self) -> int:
        """The number of input elements."""
        return sum(array.size for array in self.inputs.values())

    def compared(self, name: str, got: np.ndarray) -> np.ndarray:
        """Return an output with the reference in the rows that are not compared."""
        rows, reference = self.golden.case.ignored_rows, self.golden.expected[name]
        if got.shape != reference.shape:
            return got
        return fill_ignored_rows(got, reference, rows, self.golden.determined.get(name, ()))


@dataclasses.dataclass(frozen=True)
class GraphRunner:
    """A graph file, with the runtime, options and limits to run it with.

    Attributes:
        graph_file: Its differences from the inputs and outputs that the bundle states.
    """

    path: Path
    graph_file: GraphFile
    runtime: Runtime
    options: Options
    limits: Limits

    def run(self, cases: Mapping[str, Arrays], options: Options | None = None) -> RunResult:
        """Return the result of running cases in a process of their own."""
        merged = {**self.options, **(options or {})}
        return run_once(self.runtime, self.path, cases, self.limits, self.graph_file, merged)

    def trial(self, cases: Iterable[GoldenCase], options: Options | None = None) -> GraphRun:
        """Return the judged result of running the cases that the graph accepts."""
        accepted = [
            dataclasses.replace(case, golden=case.golden.of_graph(self.graph_file))
            for case in cases
            if self.graph_file.takes(case.sizes)
        ]
        ran = self.run({case.name: case.inputs for case in accepted}, options)
        ran = _with_failed_separate(ran, accepted)
        failed = [case for case in accepted if not passes(case.golden, ran.outputs.get(case.name))]
        passed = [case for case in accepted if case not in failed]
        return GraphRun(ran, tuple(sorted(failed, key=lambda c: c.size)), tuple(passed))

    def to_graph_layout(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Convert inputs or outputs from the bundle's axis order and types to the graph file's."""
        return to_graph_layout(arrays, self.graph_file.layouts, self.graph_file.dtypes)

    def to_case_layout(self, outputs: Arrays) -> dict[str, np.ndarray]:
        """Convert outputs from the axis order of the graph file to the bundle's."""
        return to_case_layout(outputs, self.graph_file.layouts)


@dataclasses.dataclass(frozen=True)
class GraphRun:
    """Result of running and judging cases.

    Attributes:
        failed: The cases that gave no output or failed the judge, the smallest first.
        passed: The other cases, in the order in which they ran.
    """

    ran: RunResult
    failed: tuple[GoldenCase, ...]
    passed: tuple[GoldenCase, ...]

    @property
    def all_passed(self) -> bool:
        """True if every case ran and passed."""
        return self.ran.outcome == "ran" and not self.failed

    def groups(self) -> list[list[GoldenCase]]:
        """Return failed cases of large errors, and those of much smaller ones; no empty lists."""
        errors = {case.name: _error(case, self.ran.outputs.get(case.name)) for case in self.failed}
        least = max(filter(math.isfinite, errors.values()), default=0.0) / _APART
        large = [case for case in self.failed if errors[case.name] >= least]
        small = [case for case in self.failed if errors[case.name] < least]
        return [group for group in (large, small) if group]


_APART = 30.0
"""The ratio of errors from which on they are thought to have two causes."""


def _error(case: GoldenCase, outputs: Arrays | None) -> float:
    """Return the largest relative error of an output; infinite if one has another shape."""
    largest = 0.0
    for name, reference in case.golden.expected.items():
        got = None if outputs is None else outputs.get(name)
        if got is None or got.shape != reference.shape:
            return math.inf
        if is_floating(reference.dtype):
            largest = max(largest, measure(case.compared(name, got), reference).whole)
    return largest


def is_right(golden: Golden, outputs: Arrays) -> bool:
    """Return whether float64 outputs, once rounded, pass the judge."""
    rounded = {
        name: array.astype(golden.expected[name].dtype) if name in golden.expected else array
        for name, array in outputs.items()
    }
    return passes(golden, rounded)


def passes(golden: Golden, outputs: Arrays | None) -> bool:
    """Return whether outputs pass the judge."""
    if outputs is None:
        return False
    verdicts = judge("", "", golden, outputs)
    return all(verdict.status in ("passed", "unusable") for verdict in verdicts)


def _with_failed_separate(ran: RunResult, cases: Iterable[GoldenCase]) -> RunResult:
    """Take the outputs of runs with separate buffers where they fail, and the others pass."""
    goldens = {case.name: case.golden for case in cases}
    only_separate = {
        name: outputs
        for name, outputs in ran.separate.items()
        if passes(goldens[name], ran.outputs[name]) and not passes(goldens[name], outputs)
    }
    return dataclasses.replace(
        ran, outputs={**ran.outputs, **only_separate}, separate=only_separate
    )


def golden_cases(
    folder: Path, only: str | None, *, keeps_non_finite: bool = True
) -> list[GoldenCase]:
    """Return the cases of a bundle, without whole decodes."""
    names, stored = stored_cases(folder / GOLDEN)
    goldens = {golden.case.name: golden for golden in read_golden(folder / GOLDEN)}
    if not keeps_non_finite:
        goldens = {n: dataclasses.replace(g, determined={}) for n, g in goldens.items()}
    if only is not None:
        stored = [case for case in stored if case.name == only]
        if not stored:
            raise UsageError(f"there is no case {only!r}; {choose(only, goldens)}")
        if stored[0].kind == WHOLE_DECODE:
            raise UsageError(f"{only} is a whole decode, which explain cannot take apart")
    return [
        GoldenCase(case.name, case.sizes, read_inputs(case, names), goldens[case.name])
        for case in stored
        if case.kind != WHOLE_DECODE
    ]


def graph_files_to_examine(manifest: Manifest, graph: Path | None) -> list[GraphFile]:
    """Return the graphs to examine: those of the bundle, or only the user's own graph.

    `graph`: The user's graph, which has the description of the bundle's graph of the same file
    name; None to examine those of the bundle.
    """
    if graph is None:
        return [*manifest.graphs.values()]
    return [manifest.graphs.get(graph.name) or GraphFile(graph.name)]
