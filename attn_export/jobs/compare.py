"""Job that compares a graph of any origin with a module, or with another graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import GOLDEN, staging
from attn_export.errors import AttnExportError, GraphError, UsageError, printable
from attn_export.parity.gate import Gate
from attn_export.report.progress import Progress
from attn_export.results import BASE, Golden, GraphFile, Report, StoredCase
from attn_export.runtimes.limited import limited
from attn_export.runtimes.pool import Pool, Selection
from attn_export.runtimes.protocol import Limits
from attn_export.spec import AttentionSpec
from attn_export.system_info import environment
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    import onnx

    from attn_export.export.subject import Subject
    from attn_export.graph.end_names import EndNames
    from attn_export.jobs.reference import Reference
    from attn_export.parity.plan import Plan


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
        limits: The limits of each runtime's process.
        progress: Receiver of progress.

    Returns:
        The report, with the causes of wrong numbers. The bundle lies in `output` if it passed,
        else in `OUTPUT.failed`.

    Raises:
        UsageError: If a name is unknown or `output` cannot be written.
        GraphError: If a graph cannot be read, or has other inputs or outputs.
        ExportError: If the module does not run at some sizes, or an input changes no output.
    """
    selection, path = Selection.of(runtimes, require), Path(graph)
    limits, progress = limits or Limits.default(), progress or Progress()
    compared = _Compared.read(path, limits)
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
            report = work.explained(report, goldens, required=output is not None)
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
class _Compared:
    """The graph that is judged.

    Attributes:
        path: Its file.
        model: Its content, without external data.
        file: How it is run.
        names: Its names of inputs and outputs.
    """

    path: Path
    model: onnx.ModelProto
    file: GraphFile
    names: EndNames | None = None

    @classmethod
    def read(cls, path: Path, limits: Limits) -> _Compared:
        """Read a graph.

        Raises:
            GraphError: If it cannot be read.
        """
        from attn_export.graph.foreign import dialect_of
        from attn_export.graph.load import load_proto, refuse_bad_data

        if not path.is_file():
            raise GraphError(f"cannot read {path}: no such file")
        model = load_proto(path)
        refuse_bad_data(model, path)
        module = "attn_export.graph.foreign:foreign_features"
        found = tuple(limited(module, str(path), limits, path=str(path)))
        return cls(path, model, GraphFile(path.name, dialect_of(found), features=found))

    def matched_to(self, reference: Reference, names: Mapping[str, str]) -> _Compared:
        """Return the graph with its names, and the axes that have one size in it.

        Raises:
            UsageError: If `names` names what is not there.
            GraphError: If its inputs or outputs are not those of the reference.
        """
        from attn_export.graph.end_names import EndNames
        from attn_export.graph.signature_check import End, form_of_file, inputs_of, matched_names

        inputs = [value.name for value in inputs_of(self.model)]
        outputs = [value.name for value in self.model.graph.output]
        _check_names(self.path, names, reference, {*inputs, *outputs})
        shown, whose = str(self.path), reference.whose
        found = EndNames(
            matched_names(shown, "inputs", inputs, list(reference.inputs), names, whose),
            matched_names(shown, "outputs", outputs, list(reference.outputs), names, whose),
        )
        wanted_inputs = {
            found.inputs[n]: End(wanted.shape, wanted.dtype)
            for n, wanted in reference.inputs.items()
        }
        wanted_outputs = {
            found.outputs[n]: End(shape, reference.dtypes[n])
            for n, shape in reference.outputs.items()
        }
        file = form_of_file(
            self.model, shown, self.file, wanted_inputs, wanted_outputs, reference.whose
        )
        return dataclasses.replace(self, file=file, names=found)


def _check_names(
    path: Path, names: Mapping[str, str], reference: Reference, theirs: set[str]
) -> None:
    ours = {*reference.inputs, *reference.outputs}
    for name, other in names.items():
        if name not in ours or other not in theirs:
            where, unknown, known = (
                (reference.whose, name, ours) if name not in ours else (path, other, theirs)
            )
            raise UsageError(
                f"names: {where} has no input or output {printable(unknown, 60)}; choose from "
                f"{printable(', '.join(sorted(known)), 150)}"
            )


@dataclasses.dataclass(frozen=True)
class _Work:
    folder: Path
    out: Path
    pool: Pool
    progress: Progress
    compared: _Compared
    reference: Reference

    def golden(self) -> tuple[list[Golden], tuple[str, ...]]:
        """Write the cases, start the runtimes on them, and compute the truth meanwhile."""
        from attn_export.graph.foreign import least_eps, precision_notes
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
        return {name: fixed_shape(shape, known) for name, shape in shapes.items()}

    def report(self, goldens: Sequence[Golden], notes: tuple[str, ...], gate: Gate) -> Report:
        """Return the verdicts on the graph in every runtime."""
        from attn_export.parity.replay import judge_pool

        runs, verdicts = judge_pool(
            self.pool, goldens, self.axes(), self.out, gate, self.progress.advance
        )
        name = printable(self.compared.path.stem)
        return Report(name, runs, verdicts, environment(), notes, self.compared.path)

    def explained(self, report: Report, goldens: Sequence[Golden], *, required: bool) -> Report:
        """Complete the bundle, and return the report with the causes of wrong numbers.

        Raises:
            UsageError: If the bundle is `required` and cannot be one.
        """
        from attn_export.jobs.compared_bundle import write_bundle
        from attn_export.jobs.explain_failures import explained

        one, path = self.compared, self.compared.path
        graphs = {path.name: (path, one.model, one.file)}
        try:
            write_bundle(self.folder, graphs, goldens[0], self.axes(), report)
        except AttnExportError as error:
            if required:
                raise
            return dataclasses.replace(report, notes=(*report.notes, f"not explained: {error}"))
        return explained(report, self.folder, progress=self.progress)
