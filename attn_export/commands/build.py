"""The job behind `build`: export a subject, check the graphs, run them, and write the bundle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.bundle.manifest import (
    GOLDEN,
    PAGE,
    REPORT,
    SPEC,
    dimensions,
    staging,
    write_manifest,
)
from attn_export.commands import bundle_graphs
from attn_export.dialect_names import MODEL, STANDARD, check_dialects
from attn_export.errors import UsageError, printable
from attn_export.graph import IrGraph
from attn_export.judge.gate import Gate, cpu_notes
from attn_export.quality import Budget, Quality, parse_budgets
from attn_export.report.data import to_json
from attn_export.report.html import to_html
from attn_export.report.progress import Progress
from attn_export.results import BASE, Report
from attn_export.runtimes.pool import Pool, Selection
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphFile
from attn_export.spec import AttentionSpec
from attn_export.spec.fields import SEED
from attn_export.system_info import check_installed, environment
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    from attn_export.export.subject import Subject
    from attn_export.results import Golden, RuntimeRun, Verdict

WIDE = "in float32"
"""The name in the report of the graph of a float16 or bfloat16 subject in float32."""


def build(
    subject: Subject | AttentionSpec | Callable[[], Subject],
    output: Path | str | None = None,
    *,
    name: str = "attention",
    dialects: Sequence[str] = ("all",),
    runtimes: Sequence[str] = (),
    require: Sequence[str] = (),
    atol: float | None = None,
    rtol: float | None = None,
    budgets: Sequence[str] = (),
    seed: int = 0,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Report:
    """Export a subject, check and run its graphs, judge the outputs, and write the bundle.

    Args:
        subject: A subject, a function that returns it, or a spec, whose module gets seeded weights.
        output: The bundle's folder. Default: `models/NAME`.
        name: The name of the bundle in the report.
        dialects: The dialects of the graphs, or ``"all"`` for those that fit.
        runtimes: Names of runtimes, ``"all"`` or ``"-NAME"``. Default: ort-cpu and ort-cuda;
            the latter is not run without a GPU.
        require: Names of runtimes that must run at least one graph.
        atol: An additional limit: |r − eager| ≤ atol + rtol·|eager|, where r is a runtime's output.
        rtol: See `atol`.
        budgets: Limits for the error of a quantised model against the float model: ``sqnr>=30``.
        seed: The seed for the weights of a spec's module.
        limits: The limits of each runtime's process.
        progress: Receiver of progress.

    Returns:
        The report. The bundle is in `output` if the report passed, else in `OUTPUT.failed`.

    Raises:
        UsageError: If a name or budget is unknown, torch is missing or `output` cannot be written.
        ExportError: If the module cannot be exported as it is.
        GraphError: If a check refuses a graph.
    """
    _check_name(name)
    options = _Options(
        Selection.of(runtimes, require), parse_budgets(budgets),
        check_dialects(dialects, bundle_graphs.ALL), Gate(atol, rtol),
        limits or Limits.default(), progress or Progress(),
    )  # fmt: skip
    check_installed("torch")
    with staging(Path(output or Path("models") / name)) as stage:
        report = _build_in(stage.folder, subject, seed, name, options)
        folder = stage.publish(failed=not report.passed)
    return dataclasses.replace(report, model=folder / MODEL)


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of one build."""

    selection: Selection
    budgets: tuple[Budget, ...]
    dialects: tuple[str, ...]
    gate: Gate
    limits: Limits
    progress: Progress


def _check_name(name: str) -> None:
    if name != printable(name):
        raise UsageError(
            f"the name {printable(name, 80)} must be one printable line; choose another"
        )


def _build_in(
    folder: Path,
    subject: Subject | AttentionSpec | Callable[[], Subject],
    seed: int,
    name: str,
    options: _Options,
) -> Report:
    """Write the bundle to a folder, and return the report."""
    # The runtimes' processes import their SDKs while this one imports torch.
    first, limits = bundle_graphs.first_graphs(options.dialects), options.limits
    with scratch() as out, Pool(options.selection, first, limits) as pool:
        options.progress.phase("importing torch")
        from attn_export.commands.golden_vectors import budgets_of
        from attn_export.export.subject import Subject

        if isinstance(subject, AttentionSpec):
            subject = Subject.from_spec(subject, seed=seed)
        elif callable(subject):
            subject = subject()
        options = dataclasses.replace(options, budgets=budgets_of(subject, options.budgets))
        in_float32 = _judge_in_float32(subject, options)
        work = _Work(folder, out, pool, options)
        judged = work.judge(subject)
        report = _report(name, in_float32, judged, subject)
        work.write(subject, judged, report)
    return report


def _judge_in_float32(subject: Subject, options: _Options) -> _Judged | None:
    """Judge a subject of narrower types in float32 too: rounding could hide a wrong scale."""
    if not subject.narrow_dtypes():
        return None
    from attn_export.export.export import in_float32

    options = dataclasses.replace(options, gate=Gate(), dialects=(STANDARD,), budgets=())
    first, limits = [GraphFile(MODEL)], options.limits
    with scratch() as folder, scratch() as out, Pool(options.selection, first, limits) as pool:
        judged = _Work(folder, out, pool, options).judge(in_float32(subject))
    return judged.renamed(WIDE)


def _report(name: str, wide: _Judged | None, judged: _Judged, subject: Subject) -> Report:
    wide_runs = wide.runs if wide else ()
    spec = subject.spec.to_toml() if subject.spec else ""
    inputs = bundle_graphs.input_signatures(subject)
    outputs = bundle_graphs.output_signatures(subject, judged.dtypes)
    return Report(
        name,
        (*(run for run in wide_runs if run.outcome != "not run"), *judged.runs),
        (*(wide.verdicts if wide else ()), *judged.verdicts),
        environment(), judged.notes, dimensions=dimensions({**inputs, **outputs}, spec),
        quality=judged.quality,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Judged:
    """The graphs of a subject with their verdicts."""

    exported: IrGraph
    graphs: tuple[IrGraph, ...]
    runs: tuple[RuntimeRun, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]
    dtypes: Mapping[str, str]
    quality: Quality | None = None

    def renamed(self, graph: str) -> _Judged:
        """Return the same result with another name for the graph."""
        runs = tuple(dataclasses.replace(run, graph=graph) for run in self.runs)
        verdicts = tuple(dataclasses.replace(v, graph=graph) for v in self.verdicts)
        return dataclasses.replace(self, runs=runs, verdicts=verdicts)


@dataclasses.dataclass(frozen=True)
class _Work:
    """One build: its folders, processes and options."""

    folder: Path
    out: Path
    pool: Pool
    options: _Options

    def judge(self, subject: Subject) -> _Judged:
        """Export and check the graphs of a subject, run all cases, and judge the outputs."""
        self.options.progress.phase("exporting")
        from attn_export.commands.golden_vectors import write_quality_of
        from attn_export.export.export import export
        from attn_export.judge.judge import undetermined_note
        from attn_export.judge.replay import buffers_note, judge_pool

        exported = export(subject)

        self.options.progress.phase("checking the graphs")
        graphs, left_out = bundle_graphs.lower_all(exported, self.options.dialects)
        bundle_graphs.save_checked(graphs, subject.expected(), self.folder)
        self.pool.add(graph.file for graph in graphs)
        goldens, notes = self._golden(subject)
        quality = write_quality_of(self.folder / GOLDEN, subject, goldens, self.options.budgets)
        axes = subject.expected().outputs
        runs, verdicts = judge_pool(
            self.pool, goldens, axes, self.options.gate, self.options.progress.advance
        )
        refuted = bundle_graphs.remove_refuted(self.folder, graphs, verdicts, self.options.dialects)
        if refuted:
            left_out = (*left_out, *refuted.values())
            graphs = [graph for graph in graphs if graph.file.name not in refuted]
            runs = tuple(run for run in runs if run.graph not in refuted)
            verdicts = tuple(verdict for verdict in verdicts if verdict.graph not in refuted)
        if "bfloat16" in subject.narrow_dtypes().values():
            notes = (*notes, *bundle_graphs.bfloat16_notes(graphs))
        dtypes = {name: array.dtype.name for name, array in goldens[0].expected.items()}
        bound = buffers_note(graph.file for graph in graphs)
        notes = (*notes, *bound, *undetermined_note(goldens), *cpu_notes(verdicts, goldens))
        return _Judged(
            exported, tuple(graphs), runs, verdicts, (*notes, *left_out), dtypes, quality
        )

    def _golden(self, subject: Subject) -> tuple[list[Golden], tuple[str, ...]]:
        """Write the cases, start the runtimes on them, and compute the truth meanwhile."""
        from attn_export.bundle.golden import fixed_note, tried_note
        from attn_export.commands.golden_vectors import golden_vectors
        from attn_export.truth.notes import truth_notes
        from attn_export.truth.oracle import Oracle

        plan, oracle = subject.plan(), Oracle(subject)
        spec = subject.spec  # only our own layers have whole decodes, which need the axes
        axes = {**spec.input_shapes(), **spec.output_shapes()} if spec else {}
        names = list(subject.inputs)
        start = functools.partial(self.pool.start, self.folder, names, axes, out=self.out)
        goldens, notes = golden_vectors(
            self.folder / GOLDEN, plan, oracle, start, self.options.progress,
            is_own_layer=spec is not None, has_narrow_dtypes=bool(subject.narrow_dtypes()),
        )  # fmt: skip
        cases = [golden.case for golden in goldens]
        on_module: tuple[str, ...] = ()
        if spec is None:
            base = next(case for case in cases if case.name == BASE)
            inputs = subject.input_descriptions()
            shapes = {name: described.shape for name, described in inputs.items()}
            on_module = (*fixed_note(shapes), *truth_notes(oracle, base))
        return goldens, (*subject.notes, *on_module, *plan.notes, *notes, tried_note(cases))

    def write(self, subject: Subject, judged: _Judged, report: Report) -> None:
        """Write the files of the bundle other than the graphs and the golden vectors."""
        folder = self.folder
        if subject.spec is not None:
            (folder / SPEC).write_text(subject.spec.to_toml(), encoding="utf-8")
            if subject.spec.kv_scales_from != SEED:
                from attn_export.export.user_scales import write_module_scales

                write_module_scales(folder, subject.module)
        (folder / REPORT).write_text(to_json(report), encoding="utf-8")
        (folder / PAGE).write_text(to_html(report), encoding="utf-8")
        content = bundle_graphs.manifest_of(
            report.name, subject, judged.exported.origins, judged.graphs, judged.dtypes
        )
        write_manifest(folder, content)
