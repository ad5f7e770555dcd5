"""Comparison of a graph of any origin with its reference: cases, truth, verdicts and bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import GOLDEN, dimensions
from attn_export.errors import AttnExportError, printable
from attn_export.jobs.compared_graph import ComparedGraph, write_bundle
from attn_export.parity.gate import Gate, cpu_notes
from attn_export.report.progress import Progress
from attn_export.results import BASE, Arrays, Golden, Report, StoredCase
from attn_export.runtimes.pool import Pool
from attn_export.schema import TensorSignature
from attn_export.system_info import environment

if TYPE_CHECKING:
    from attn_export.diagnose.eager_values import ValueReference
    from attn_export.jobs.reference import Reference
    from attn_export.parity.plan import Plan

OTHER = "reference.onnx"
"""The file name of the reference in the bundle of a comparison of two graphs."""


class Comparison:
    """A graph, its reference, and the folder for the bundle of the comparison.

    Args:
        folder: The folder of the bundle.
        out: The folder for the outputs of runtimes.
        pool: The processes of the runtimes.
        progress: Receiver of progress.
        compared: The graph to judge.
        read: A function that returns the reference. It is called while the runtimes start.
        names: The names in the graph by those of the reference, as the user states them.

    Attributes:
        compared: The graph with its axes of fixed sizes.
        names: The names of all inputs and outputs in the graph, by those of the reference.
        reference: The module or graph to compare with.
    """

    def __init__(
        self,
        folder: Path,
        out: Path,
        pool: Pool,
        progress: Progress,
        compared: ComparedGraph,
        read: Callable[[], Reference],
        names: Mapping[str, str],
    ) -> None:
        self.folder, self.out, self.pool, self.progress = folder, out, pool, progress
        progress.phase("importing torch")
        self.reference = read()
        self.compared, self.names = compared.match(self.reference, names)
        pool.add([self.compared.file])
        progress.phase("choosing the cases")

    def _golden(self) -> tuple[list[Golden], tuple[str, ...]]:
        """Write the cases, start the runtimes on them, and compute the truth meanwhile."""
        from attn_export.graph.requirements import least_eps, precision_notes
        from attn_export.jobs.golden_vectors import golden_vectors
        from attn_export.parity.golden import tried_note

        reference, model = self.reference, self.compared.model
        oracle, plan = reference.oracle(least_eps(model)), self.plan()
        cases, left_out = reference.computable(oracle, plan.cases)
        goldens, notes = golden_vectors(
            self.folder / GOLDEN, cases, oracle, self._start, self.progress,
            ours=reference.spec is not None, narrow=reference.narrow, names=self.names,
        )  # fmt: skip
        tried = [golden.case for golden in goldens]
        base = next(case for case in cases if case.name == BASE)
        return goldens, (
            *reference.notes, *self._name_notes(), *precision_notes(model), *left_out, *plan.notes,
            *notes, *reference.notes_on(oracle, base), tried_note(tried),
        )  # fmt: skip

    def plan(self) -> Plan:
        """Plan the cases, with the sizes that the graph has fixed."""
        from attn_export.parity.draw import Interface, solve_sizes, with_fixed_sizes
        from attn_export.parity.plan import plan_cases

        ref, fixed = self.reference, self.compared.file.fixed
        interface = Interface(ref.inputs, ref.outputs, ref.spec, ref.sums)
        if not fixed:
            return plan_cases(interface, ref.takes)
        sizes = solve_sizes(fixed, ref.sums)
        return plan_cases(
            with_fixed_sizes(interface, sizes), lambda free: ref.takes({**sizes, **free})
        )

    def _name_notes(self) -> Iterator[str]:
        """Yield notes on names that differ from the reference, and on axes of fixed sizes."""
        if self.names.note():
            yield self.names.note()
        fixed = self.compared.file.fixed
        if fixed:
            sizes = ", ".join(f"{axis} {size}" for axis, size in fixed.items())
            yield f"the graph has fixed axes, and no other sizes were tried: {sizes}"

    def _start(self, written: Sequence[StoredCase]) -> int:
        folder = self.compared.path.parent.absolute()
        self.pool.start(folder, list(self.names.inputs.values()), self.axes(), written, self.out)
        return self.pool.total_cases()

    def axes(self) -> dict[str, tuple[str | int, ...]]:
        """Return the axes of every input and output of the graph, by name."""
        from attn_export.parity.draw import fixed_shape, solve_sizes

        names = self.names
        fixed_sizes = solve_sizes(self.compared.file.fixed, self.reference.sums)
        shapes = {
            names.inputs[n]: described.shape for n, described in self.reference.inputs.items()
        }
        shapes |= {names.outputs[n]: shape for n, shape in self.reference.outputs.items()}
        # A dynamic axis of an output that is no axis of an input has the name "".
        return {
            name: tuple(
                f"{name}.{number}" if axis == "" else axis
                for number, axis in enumerate(fixed_shape(shape, fixed_sizes))
            )
            for name, shape in shapes.items()
        }

    def judge(self, gate: Gate) -> tuple[list[Golden], Report]:
        """Run all cases, and judge the outputs of every runtime by the user's tolerances too.

        Returns:
            The cases with their truth, and the report.
        """
        from attn_export.parity.replay import judge_pool

        goldens, notes = self._golden()
        runs, verdicts = judge_pool(
            self.pool, goldens, self.axes(), self.out, gate, self.progress.advance
        )
        name = printable(self.compared.path.stem)
        inputs, outputs = self._ends(goldens[0])
        report = Report(
            name, runs, verdicts, environment(), (*notes, *cpu_notes(verdicts, goldens)),
            self.compared.path, dimensions=dimensions({**inputs, **outputs}),
        )  # fmt: skip
        return goldens, report

    def _ends(
        self, golden: Golden
    ) -> tuple[dict[str, TensorSignature], dict[str, TensorSignature]]:
        """Return the inputs, and the outputs, by name."""
        axes = self.axes()

        def signatures(arrays: Arrays) -> dict[str, TensorSignature]:
            return {
                name: TensorSignature(array.dtype.name, axes[name])
                for name, array in arrays.items()
            }

        return signatures(golden.case.inputs), signatures(golden.expected)

    def explain(
        self, report: Report, goldens: Sequence[Golden], reproduction: Path | None, *,
        required: bool,
    ) -> Report:  # fmt: skip
        """Complete the bundle, and explain failures.

        Args:
            report: The report.
            goldens: The cases with their truth.
            reproduction: The folder to write a reproduction of a failure to; None for none.
            required: Whether to raise an error if the bundle cannot be completed.

        Returns:
            The report with the causes of failures.

        Raises:
            AttnExportError: If the bundle is `required` and cannot be completed.
        """
        from attn_export.jobs.explain_failures import explain_failures

        path = self.compared.path
        try:
            reference = self.bundle(report, goldens)
        except AttnExportError as error:
            if required:
                raise
            return dataclasses.replace(report, notes=(*report.notes, f"not explained: {error}"))
        return explain_failures(
            report, self.folder, self.folder / path.name, reference=reference,
            reproduction=reproduction, progress=self.progress,
        )  # fmt: skip

    def bundle(self, report: Report, goldens: Sequence[Golden]) -> ValueReference:
        """Complete the bundle.

        Args:
            report: The report.
            goldens: The cases with their truth.

        Returns:
            The source of correct values for `explain`.

        Raises:
            UsageError: If a manifest may not hold a name of the graph.
        """
        from attn_export.diagnose.eager_values import ValueReference
        from attn_export.graph.load import load_proto

        compared, path, reference = self.compared, self.compared.path, self.reference
        graphs = {path.name: (path, compared.model, compared.file)}
        if reference.path is not None and not self.names.note() and path.name != OTHER:
            # `explain` uses a correct graph of the same names to find the first wrong value.
            file = dataclasses.replace(compared.file, name=OTHER)
            graphs = {OTHER: (reference.path, load_proto(reference.path), file), **graphs}
        write_bundle(self.folder, graphs, self._ends(goldens[0]), report)
        return ValueReference(reference.whose, self._steps)

    def _steps(self, inputs: Mapping[str, Any]) -> Any:
        """Return the reference's operations on inputs, which have the names in the graph."""
        # Copies, because torch requires writable arrays.
        named = {name: inputs[other].copy() for name, other in self.names.inputs.items()}
        return self.reference.oracle(0.0).steps(named)
