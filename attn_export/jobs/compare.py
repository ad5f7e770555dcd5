"""Job that compares a graph of any origin with a module, or with another graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import GOLDEN, dimensions, staging
from attn_export.errors import AttnExportError, UsageError, printable
from attn_export.jobs.compared_graph import ComparedGraph
from attn_export.parity.gate import Gate
from attn_export.report.progress import Progress
from attn_export.results import BASE, Golden, Report, StoredCase
from attn_export.runtimes.pool import Pool, Selection
from attn_export.runtimes.protocol import Limits
from attn_export.spec import AttentionSpec
from attn_export.system_info import check_installed, environment
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    from attn_export.export.subject import Subject
    from attn_export.jobs.reference import Reference
    from attn_export.parity.plan import Plan

OTHER = "reference.onnx"
"""The name of the first of two graphs in the bundle of their comparison."""


def compare(
    reference: Subject | AttentionSpec | Path | str,
    graph: Path | str,
    *,
    names: Mapping[str, str] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    output: Path | str | None = None,
    runtimes: Sequence[str] = (),
    require: Sequence[str] = (),
    atol: float | None = None,
    rtol: float | None = None,
    seed: int = 0,
    reproduction: Path | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a graph in runtimes, and judge it by the float64 truth of a module or another graph.

    Args:
        reference: The module with its inputs, a spec, or an ONNX file.
        graph: The ONNX file to judge.
        names: The graph's names of inputs and outputs by those of the reference. What is not
            named has the same name, or else the same place among the rest.
        ranges: The least and the largest value of integer inputs of an ONNX file as reference.
        output: The folder for a bundle of the graph, the cases and the truth. Default: none.
        runtimes: Which to run. Default ort-cpu, and ort-cuda where there is a GPU.
        require: Which must run: one that cannot is a failure.
        atol: A gate beside the judge's rule: |r − eager| ≤ atol + rtol·|eager|.
        rtol: See `atol`.
        seed: For the weights of a spec's module.
        reproduction: The folder that reproduces a failure. None writes none.
        limits: The limits of each runtime's process.
        progress: Receiver of progress.

    Returns:
        The report, with the causes of wrong numbers. The bundle lies in `output` if it passed,
        else in `OUTPUT.failed`.

    Raises:
        UsageError: If a name is unknown, torch is missing or `output` cannot be written.
        GraphError: If a graph cannot be read, or has other inputs or outputs.
        ExportError: If the module does not run at some sizes, or an input changes no output.
    """
    selection, path = Selection.of(runtimes, require), Path(graph)
    limits, progress = limits or Limits.default(), progress or Progress()
    check_installed("torch")
    compared = ComparedGraph.read(path, limits)
    with _folder(output) as (folder, publish), scratch() as out:
        with Pool(selection, [compared.file], limits) as pool:
            found = _reference(reference, seed, ranges or {}, progress)
            compared = compared.matched_to(found, names or {})
            pool.add([compared.file])
            progress.phase("choosing the cases")
            work = _Work(folder, out, pool, progress, compared, found)
            goldens, notes = work.golden()
            report = work.report(goldens, notes, Gate(atol, rtol))
        if output is not None or not report.passed:
            report = work.explained(report, goldens, reproduction, required=output is not None)
        place = publish(report)
    return dataclasses.replace(report, model=place or path)


@contextlib.contextmanager
def _folder(output: Path | str | None) -> Iterator[tuple[Path, Any]]:
    """Yield the folder to write to, and the function that puts it into place."""
    if output is None:
        with scratch() as folder:
            yield folder, lambda _: None
        return
    with staging(Path(output)) as stage:
        yield stage.folder, lambda report: stage.publish(failed=not report.passed)


def _reference(
    reference: Any, seed: int, ranges: Mapping[str, tuple[int, int]], progress: Progress
) -> Reference:
    progress.phase("importing torch")
    from attn_export.jobs.reference import of_graph, of_module

    if isinstance(reference, str | Path):
        return of_graph(Path(reference), ranges)
    if ranges:
        raise UsageError("ranges are for two graphs; a module has those of its example inputs")
    return of_module(reference, seed)


@dataclasses.dataclass(frozen=True)
class _Work:
    folder: Path
    out: Path
    pool: Pool
    progress: Progress
    compared: ComparedGraph
    reference: Reference

    def golden(self) -> tuple[list[Golden], tuple[str, ...]]:
        """Write the cases, start the runtimes on them, and compute the truth meanwhile."""
        from attn_export.graph.requirements import least_eps, precision_notes
        from attn_export.jobs.golden_vectors import golden_vectors
        from attn_export.parity.evidence import tried_note

        reference, model = self.reference, self.compared.model
        oracle, plan = reference.oracle(least_eps(model)), self.plan()
        cases, left_out = reference.computable(oracle, plan.cases)
        goldens, notes = golden_vectors(
            self.folder / GOLDEN, cases, oracle, self._start, self.progress,
            ours=reference.spec is not None, narrow=reference.narrow, names=self.compared.names,
        )  # fmt: skip
        tried = [golden.case for golden in goldens]
        base = next(case for case in cases if case.name == BASE)
        return goldens, (
            *reference.notes, *self._named(), *precision_notes(model), *left_out, *plan.notes,
            *notes, *reference.notes_on(oracle, base), tried_note(tried),
        )  # fmt: skip

    def plan(self) -> Plan:
        """Return the cases that the graph takes."""
        from attn_export.parity.plan import plan_cases
        from attn_export.parity.sizes import fixed_inputs, fixed_relations, fixed_shape, solved

        of, fixed = self.reference, self.compared.file.fixed
        if not fixed:
            return plan_cases(of.inputs, dict(of.outputs), of.spec, of.sums, of.takes)
        known = solved(fixed, of.sums)
        outputs = {name: fixed_shape(shape, known) for name, shape in of.outputs.items()}
        return plan_cases(
            fixed_inputs(of.inputs, known), outputs, None, fixed_relations(of.sums, known),
            lambda sizes: of.takes({**known, **sizes}),
        )  # fmt: skip

    def _named(self) -> Iterator[str]:
        """Yield notes on other names, and on axes of one size."""
        names, fixed = self.compared.names, self.compared.file.fixed
        if names and names.note():
            yield names.note()
        if fixed:
            sizes = ", ".join(f"{axis} {size}" for axis, size in fixed.items())
            yield f"the graph has fixed axes, and no other sizes were tried: {sizes}"

    def _start(self, written: Sequence[StoredCase]) -> int:
        names = self.compared.names
        assert names is not None
        place = self.compared.path.parent.absolute()
        self.pool.start(place, list(names.inputs.values()), self.axes(), written, self.out)
        return self.pool.expected()

    def axes(self) -> dict[str, tuple[str | int, ...]]:
        """Return the shape of every input and output of the graph, dynamic axes by name."""
        from attn_export.parity.sizes import fixed_shape, solved

        names, known = self.compared.names, solved(self.compared.file.fixed, self.reference.sums)
        assert names is not None
        shapes = {names.inputs[n]: wanted.shape for n, wanted in self.reference.inputs.items()}
        shapes |= {names.outputs[n]: shape for n, shape in self.reference.outputs.items()}
        # An axis that is none of the inputs' has a name of its own.
        return {
            name: tuple(
                f"{name}.{number}" if axis == "" else axis
                for number, axis in enumerate(fixed_shape(shape, known))
            )
            for name, shape in shapes.items()
        }

    def report(self, goldens: Sequence[Golden], notes: tuple[str, ...], gate: Gate) -> Report:
        """Return the verdicts on the graph in every runtime."""
        from attn_export.parity.replay import judge_pool

        runs, verdicts = judge_pool(
            self.pool, goldens, self.axes(), self.out, gate, self.progress.advance
        )
        name = printable(self.compared.path.stem)
        inputs, outputs = self._ends(goldens[0])
        return Report(
            name, runs, verdicts, environment(), notes, self.compared.path,
            dimensions=dimensions(inputs, outputs),
        )  # fmt: skip

    def _ends(self, golden: Golden) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return dtype and shape of the inputs and of the outputs, by name."""
        axes = self.axes()
        inputs, outputs = (
            {n: {"dtype": a.dtype.name, "shape": list(axes[n])} for n, a in arrays.items()}
            for arrays in (golden.case.inputs, golden.expected)
        )
        return inputs, outputs

    def explained(
        self,
        report: Report,
        goldens: Sequence[Golden],
        reproduction: Path | None,
        *,
        required: bool,
    ) -> Report:
        """Complete the bundle, and return the report with the causes of wrong numbers.

        Raises:
            UsageError: If the bundle is `required` and cannot be one.
        """
        from attn_export.explain.eager_values import Witness
        from attn_export.graph.load import load_proto
        from attn_export.jobs.compared_bundle import write_bundle
        from attn_export.jobs.explain_failures import explained

        one, path, of = self.compared, self.compared.path, self.reference
        graphs = {path.name: (path, one.model, one.file)}
        witness = Witness(of.whose, self._steps)
        try:
            if of.path is not None and not self._named_otherwise():
                # A right graph of the same names: what is wrong is found by comparing the two.
                file = dataclasses.replace(one.file, name=OTHER)
                graphs = {OTHER: (of.path, load_proto(of.path), file), **graphs}
            write_bundle(self.folder, graphs, self._ends(goldens[0]), report)
        except AttnExportError as error:
            if required:
                raise
            return dataclasses.replace(report, notes=(*report.notes, f"not explained: {error}"))
        return explained(
            report,
            self.folder,
            self.folder / path.name,
            witness=witness,
            reproduction=reproduction,
            progress=self.progress,
        )

    def _named_otherwise(self) -> bool:
        names = self.compared.names
        return names is None or bool(names.note()) or self.compared.path.name == OTHER

    def _steps(self, inputs: Mapping[str, Any]) -> Any:
        """Return the operations of the reference for inputs that are named as in the graph."""
        names = self.compared.names
        assert names is not None
        return self.reference.oracle(0.0).steps(
            {n: inputs[o].copy() for n, o in names.inputs.items()}  # torch asks for writable ones
        )
