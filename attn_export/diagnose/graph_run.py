"""One graph in one runtime: its cases run and judged with the given options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.bundle import GOLDEN, graph_files
from attn_export.errors import UsageError
from attn_export.parity.golden import case_folders, read_golden, read_inputs
from attn_export.parity.judge import judge
from attn_export.results import DECODE, Arrays, Golden, GraphFile
from attn_export.runtimes.axis_order import to_case_layout, to_graph_layout
from attn_export.runtimes.process import RunResult, run_once
from attn_export.runtimes.protocol import Limits, Options, Runtime


@dataclasses.dataclass(frozen=True)
class KnownCase:
    """A case of the bundle with its inputs and its truth."""

    name: str
    sizes: Mapping[str, int]
    inputs: Arrays
    golden: Golden

    @property
    def size(self) -> int:
        """The number of input elements."""
        return sum(array.size for array in self.inputs.values())


@dataclasses.dataclass(frozen=True)
class GraphRunner:
    """A graph in a runtime.

    Attributes:
        path: The graph's file.
        form: The differences from the bundle's signature.
        runtime: The runtime.
        options: Options of the engine, as the user set them.
        limits: For each process.
    """

    path: Path
    form: GraphFile
    runtime: Runtime
    options: Options
    limits: Limits

    def run(self, cases: Mapping[str, Arrays], options: Options | None = None) -> RunResult:
        """Run cases, with options beside the user's.

        Args:
            cases: Inputs of each case, by its name.
            options: Options of the engine; they override the user's.
        """
        wanted = {**self.options, **(options or {})}
        return run_once(self.runtime, self.path, cases, self.limits, self.form, wanted)

    def trial(self, cases: Iterable[KnownCase], options: Options | None = None) -> GraphRun:
        """Run and judge those of the bundle's cases that the graph takes.

        Args:
            cases: The cases.
            options: Options of the engine; they override the user's.
        """
        taken = [case for case in cases if self.form.takes(case.sizes)]
        ran = self.run({case.name: case.inputs for case in taken}, options)
        failed = [case for case in taken if not self.passes(case.golden, ran, case.name)]
        passed = [case for case in taken if case not in failed]
        return GraphRun(ran, tuple(sorted(failed, key=lambda c: c.size)), tuple(passed))

    def passes(self, golden: Golden, ran: RunResult, name: str) -> bool:
        """Return whether the outputs of a case are right.

        Args:
            golden: The expected outputs, and the allowed errors.
            ran: The run.
            name: The name of the case.
        """
        outputs = ran.outputs.get(name)
        if outputs is None:
            return False
        return _passes(golden, outputs)

    def fed(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return inputs in the layout of the graph itself."""
        return to_graph_layout(inputs, self.form.layouts, self.form.dtypes)

    def from_outputs(self, outputs: Arrays) -> dict[str, np.ndarray]:
        """Return outputs of the graph itself in the layout of the bundle."""
        return to_case_layout(outputs, self.form.layouts)


@dataclasses.dataclass(frozen=True)
class GraphRun:
    """Result of running cases.

    Attributes:
        failed: The smallest first.
    """

    ran: RunResult
    failed: tuple[KnownCase, ...]
    passed: tuple[KnownCase, ...]

    @property
    def mended(self) -> bool:
        """Return whether every case ran and passed."""
        return self.ran.outcome == "ran" and not self.failed


def is_right(golden: Golden, outputs: Arrays) -> bool:
    """Return whether float64 outputs, once rounded, pass the judge.

    Args:
        golden: The expected outputs, and the allowed errors.
        outputs: Float64 outputs, by name.
    """
    narrow = {
        name: array.astype(golden.expected[name].dtype) if name in golden.expected else array
        for name, array in outputs.items()
    }
    return _passes(golden, narrow)


def _passes(golden: Golden, outputs: Arrays) -> bool:
    verdicts = judge("", "", golden, outputs)
    return all(verdict.status in ("passed", "unusable") for verdict in verdicts)


def known_cases(folder: Path, only: str | None) -> list[KnownCase]:
    """Return the cases of a bundle, without whole decodes.

    Args:
        folder: The folder of the bundle.
        only: The name of the one case to return; None for all.

    Raises:
        UsageError: If there is none of this name, or it is a whole decode.
    """
    names, stored = case_folders(folder / GOLDEN)
    goldens = {golden.case.name: golden for golden in read_golden(folder / GOLDEN)}
    if only is not None:
        stored = [case for case in stored if case.name == only]
        if not stored:
            raise UsageError(f"there is no case {only!r}; choose from {', '.join(goldens)}")
        if stored[0].kind == DECODE:
            raise UsageError(f"{only} is a whole decode, which explain cannot take apart")
    return [
        KnownCase(case.name, case.sizes, read_inputs(case, names), goldens[case.name])
        for case in stored
        if case.kind != DECODE
    ]


def forms_of_bundle(manifest: Mapping[str, Any], graph: Path | None) -> list[GraphFile]:
    """Return the graphs to examine: the bundle's, or another one in place of one of them.

    Args:
        manifest: The manifest.
        graph: Another graph to examine; None for those of the bundle.
    """
    forms = graph_files(manifest)
    if graph is None:
        return forms
    return [form for form in forms if form.name == graph.name] or [GraphFile(graph.name)]
