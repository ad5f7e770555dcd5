"""The job behind `compare`: compare a graph of any origin with a module or another graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from attn_export.bundle.manifest import GOLDEN, dimensions, staging
from attn_export.commands.compared_graph import match_names, read_compared, write_bundle
from attn_export.errors import AttnExportError, printable
from attn_export.graph import Graph
from attn_export.judge.gate import Gate, cpu_notes
from attn_export.report.progress import Progress
from attn_export.results import BASE, Golden, Report
from attn_export.runtimes.pool import Pool, Selection
from attn_export.runtimes.protocol import Limits
from attn_export.schema import TensorSignature
from attn_export.spec import AttentionSpec
from attn_export.system_info import check_installed, environment
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    import onnx

    from attn_export.commands.reference import Reference
    from attn_export.explain.eager_values import ValueReference
    from attn_export.explain.explanation import Explanation
    from attn_export.export.subject import Subject
    from attn_export.graph.signature_check import TensorNames

OTHER = "reference.onnx"
"""The file name of the reference in the bundle of a comparison of two graphs."""


def compare(
    reference: Subject | AttentionSpec | Path | str | Callable[[], Subject],
    graph: Path | str,
    *,
    names: Mapping[str, str] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    relations: Mapping[str, str] | None = None,
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
    """Run a graph in runtimes, and judge the outputs by the truth of a module or another graph.

    `names`: `{name in the reference: name in the graph}`, of inputs and outputs. Others are matched
    by equal names, and the remaining ones by position.
    `ranges`: `{input of the reference: (smallest, largest)}`, inclusive, of integer inputs, if the
    reference is a graph. Default: as `graph/ranges` reads them from it.

    Returns:
        The report, with the causes of failures. The bundle is in `output` if the report passed,
        else in `OUTPUT.failed`.
    """
    from attn_export.commands.reference import read_reference

    selection, path = Selection.of(runtimes, require), Path(graph)
    limits, progress = limits or Limits.default(), progress or Progress()
    check_installed("torch")
    compared = read_compared(path, limits)
    with _bundle_folder(output) as (folder, publish), scratch() as out:
        with Pool(selection, [compared.file], limits) as pool:
            read = functools.partial(read_reference, reference, ranges or {}, relations or {}, seed)
            work = _Comparison.start(folder, out, pool, progress, compared, read, names or {})
            goldens, report = work.judge(Gate(atol, rtol))
        if output is not None or not report.passed:
            report = work.explain(report, goldens, reproduction, required=output is not None)
        return dataclasses.replace(report, model=publish(report) or path)


def explain_graph(
    module: Subject | AttentionSpec | Callable[[], Subject],
    graph: Path | str,
    runtime_name: str,
    *,
    case: str | None,
    options: Mapping[str, str],
    output: Path,
    seconds: float,
    progress: Progress,
) -> Explanation:
    """Return an explanation of why a runtime's outputs for a graph differ from a module's."""
    from attn_export.commands.explain import explain
    from attn_export.commands.reference import read_reference

    selection, path, limits = Selection.of([runtime_name], ()), Path(graph), Limits.default()
    check_installed("torch")
    compared = read_compared(path, limits)
    with scratch() as folder, scratch() as out:
        with Pool(selection, [compared.file], limits) as pool:
            work = _Comparison.start(
                folder, out, pool, progress, compared, lambda: read_reference(module, {}, {}, 0), {}
            )
            goldens, report = work.judge(Gate())
        reference = work.bundle(report, goldens)
        return explain(
            folder, runtime_name, case=case, graph=folder / path.name, options=options,
            output=output, seconds=seconds, reference=reference, limits=limits, progress=progress,
        )  # fmt: skip


@contextlib.contextmanager
def _bundle_folder(output: Path | str | None) -> Iterator[tuple[Path, Any]]:
    """Yield the folder to write to, and a function that publishes it and returns its final path.

    Without `output` the folder is temporary, and the function returns None.
    """
    if output is None:
        with scratch() as folder:
            yield folder, lambda _: None
        return
    with staging(Path(output)) as stage:
        yield stage.folder, lambda report: stage.publish(failed=not report.passed)


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """A graph, its reference, and the folder for the bundle of the comparison."""

    folder: Path
    out: Path
    pool: Pool
    progress: Progress
    reference: Reference
    compared: Graph[onnx.ModelProto]
    names: TensorNames

    @classmethod
    def start(
        cls, folder: Path, out: Path, pool: Pool, progress: Progress,
        compared: Graph[onnx.ModelProto], read: Callable[[], Reference], names: Mapping[str, str],
    ) -> _Comparison:  # fmt: skip
        """Read the reference while the runtimes start, and match the graph to it.

        `read` returns the reference. `names` are the names in the graph by those of the reference,
        as the user states them.
        """
        progress.phase("importing torch")
        reference = read()
        all_names = match_names(compared, reference, names)
        pool.add([compared.file])
        progress.phase("choosing the cases")
        return cls(folder, out, pool, progress, reference, compared, all_names)

    def _golden(self) -> tuple[list[Golden], tuple[str, ...]]:
        """Write the cases and run them; return them with their truth, and notes for the report."""
        from attn_export.bundle.golden import tried_note
        from attn_export.cases.plan import plan_cases
        from attn_export.commands.golden_vectors import golden_vectors
        from attn_export.graph.requirements import least_eps, precision_notes

        reference, model = self.reference, self.compared.model
        oracle = reference.oracle(least_eps(model))
        plan = plan_cases(reference.interface, reference.takes)
        cases, left_out = reference.computable(oracle, plan.cases)
        plan = dataclasses.replace(plan, cases=tuple(cases))
        start = functools.partial(
            self.pool.start, self.compared.path.parent.absolute(),
            list(self.names.inputs.values()), self.axes(), out=self.out,
        )  # fmt: skip
        goldens, notes = golden_vectors(
            self.folder / GOLDEN, plan, oracle, start, self.progress,
            is_own_layer=reference.interface.spec is not None,
            has_narrow_dtypes=reference.has_narrow_dtypes, names=self.names,
        )  # fmt: skip
        base = next(case for case in cases if case.name == BASE)
        return goldens, (
            *reference.notes, *self._name_notes(), *precision_notes(model), *left_out, *plan.notes,
            *notes, *reference.notes_on(oracle, base),
            tried_note([golden.case for golden in goldens]),
        )  # fmt: skip

    def _name_notes(self) -> Iterator[str]:
        """Yield a note on names that differ from the reference."""
        if note := self.names.note():
            yield note

    def axes(self) -> dict[str, tuple[str | int, ...]]:
        """Return the axes of every input and output of the graph, by name."""
        names, interface = self.names, self.reference.interface
        shapes = {names.inputs[n]: described.shape for n, described in interface.inputs.items()}
        shapes |= {names.outputs[n]: shape for n, shape in interface.output_shapes.items()}
        # A dynamic axis of an output that is no axis of an input has the name "".
        return {
            name: tuple(f"{name}.{at}" if axis == "" else axis for at, axis in enumerate(shape))
            for name, shape in shapes.items()
        }

    def judge(self, gate: Gate) -> tuple[list[Golden], Report]:
        """Run and judge all cases; return them with their truth, and the report."""
        from attn_export.judge.judge import undetermined_note
        from attn_export.judge.replay import judge_pool

        goldens, notes = self._golden()
        runs, verdicts = judge_pool(self.pool, goldens, self.axes(), gate, self.progress.advance)
        name = printable(self.compared.path.stem)
        inputs, outputs = self._ends(goldens[0])
        report = Report(
            name, runs, verdicts, environment(),
            (*notes, *undetermined_note(goldens), *cpu_notes(verdicts, goldens)),
            self.compared.path, dimensions=dimensions({**inputs, **outputs}),
        )  # fmt: skip
        return goldens, report

    def _ends(
        self, golden: Golden
    ) -> tuple[dict[str, TensorSignature], dict[str, TensorSignature]]:
        """Return the inputs, and the outputs, by name."""
        axes = self.axes()
        inputs, outputs = (
            {name: TensorSignature(array.dtype.name, axes[name]) for name, array in arrays.items()}
            for arrays in (golden.case.inputs, golden.expected)
        )
        return inputs, outputs

    def explain(
        self, report: Report, goldens: Sequence[Golden], reproduction: Path | None, *,
        required: bool,
    ) -> Report:  # fmt: skip
        """Complete the bundle, and return the report with the causes of failures.

        If the bundle cannot be completed, raise the error if it is `required`, else add a note.
        """
        from attn_export.commands.explain_failures import explain_failures

        try:
            reference = self.bundle(report, goldens)
        except AttnExportError as error:
            if required:
                raise
            return dataclasses.replace(report, notes=(*report.notes, f"not explained: {error}"))
        return explain_failures(
            report, self.folder, self.folder / self.compared.path.name, reference=reference,
            reproduction=reproduction, progress=self.progress,
        )  # fmt: skip

    def bundle(self, report: Report, goldens: Sequence[Golden]) -> ValueReference:
        """Complete the bundle, and return the source of correct values for `explain`."""
        from attn_export.explain.eager_values import ValueReference
        from attn_export.graph.load import load_proto

        compared, path, reference = self.compared, self.compared.path, self.reference
        graphs = [compared]
        if reference.path is not None and not self.names.note() and path.name != OTHER:
            # A graph of the same names shows `explain` the first wrong value.
            file = replace(compared.file, name=OTHER)
            graphs = [Graph(load_proto(reference.path), file, reference.path), compared]
        write_bundle(self.folder, graphs, self._ends(goldens[0]), report)
        return ValueReference(reference.whose, self._steps)

    def _steps(self, inputs: Mapping[str, Any]) -> Any:
        """Return the reference's operations on inputs, which have the names in the graph."""
        # Copies, because torch requires writable arrays.
        named = {name: inputs[other].copy() for name, other in self.names.inputs.items()}
        return self.reference.oracle(0.0).steps(named)
