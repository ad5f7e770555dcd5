"""The main job: spec or subject → graph → checks → cases → runtimes → bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import GOLDEN, MODEL, REPORT, SPEC, staging, write_manifest
from attn_export.environment import environment, versions
from attn_export.errors import GraphError, UsageError
from attn_export.nouns import Report
from attn_export.parity.gate import Gate
from attn_export.report.data import to_json
from attn_export.report.progress import Progress
from attn_export.runtimes.pool import Pool, Selection
from attn_export.runtimes.protocol import Limits
from attn_export.scratch import scratch
from attn_export.spec import AttentionSpec

if TYPE_CHECKING:
    from attn_export.export import Exported
    from attn_export.nouns import Golden, RuntimeRun, Verdict
    from attn_export.subject import Subject

DIALECTS = ("standard",)
WIDE = "in float32"
CAST_NOTE = (
    "weights, inputs and outputs are bfloat16 and are cast to float32 in the graph: few runtimes "
    "compute in bfloat16, and ONNX Runtime on the CPU does not"
)
ORT_NEEDED = "1.28"
"""The first ONNX Runtime whose CPU `Attention` passes every case: measured on 1.22 to 1.31, of
which 1.22 lacks the opset, and 1.23 to 1.27 give NaN or numbers out of nowhere for a fully masked
row."""


def build(
    subject: Subject | AttentionSpec,
    output: Path | str | None = None,
    *,
    name: str = "attention",
    dialects: Sequence[str] = ("all",),
    runtimes: Sequence[str] = (),
    require: Sequence[str] = (),
    atol: float | None = None,
    rtol: float | None = None,
    seed: int = 0,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Report:
    """Export, check, run, judge, and write the bundle.

    Args:
        subject: What to build: a spec, whose module gets seeded weights, or a subject.
        output: The bundle's folder. Default `models/NAME`.
        name: What the report calls it.
        dialects: Forms of the graph, or ``"all"``.
        runtimes: Which to run. Default ort-cpu, and ort-cuda where there is a GPU.
        require: Which have to run: one that cannot is a failure.
        atol: A gate beside the judge's rule: |r − eager| ≤ atol + rtol·|eager|.
        rtol: See `atol`.
        seed: For the weights of a spec's module.
        limits: What each runtime's process may take.
        progress: Told what is going on.

    Returns:
        The report. The bundle lies in `output` if it passed, else in `OUTPUT.failed`.

    Raises:
        UsageError: If a name is unknown or `output` cannot be written.
        ExportError: If the module cannot be exported as it is.
        GraphError: If a check refuses the graph.
    """
    selection = Selection.of(runtimes, require)
    _check_dialects(dialects)
    limits, progress = limits or Limits.default(), progress or Progress()
    with staging(Path(output or Path("models") / name)) as stage:
        # The runtimes' processes import their SDKs while this one imports torch.
        with scratch() as out, Pool(selection, [MODEL], limits) as pool:
            progress.phase("importing torch")
            subject = _subject_of(subject, seed)
            settled = _settled(subject, selection, limits, progress)
            work = _Work(stage.folder, out, pool, Gate(atol, rtol), progress)
            judged = work.judge(subject)
            report = _report(name, settled, judged)
            work.write(subject, judged.exported, report)
        stage.publish(failed=not report.passed)
    return report


def _subject_of(subject: Subject | AttentionSpec, seed: int) -> Subject:
    from attn_export.subject import Subject

    return subject if isinstance(subject, Subject) else Subject.from_spec(subject, seed=seed)


def _settled(
    subject: Subject, selection: Selection, limits: Limits, progress: Progress
) -> _Judged | None:
    """What the same module gives in float32, if it is of fewer bits.

    Rounding to 8 or 11 bits hides a wrong scale: what the graph means is settled without it.
    """
    if not subject.narrow_dtypes():
        return None
    with scratch() as folder, scratch() as out, Pool(selection, [MODEL], limits) as pool:
        judged = _Work(folder, out, pool, Gate(), progress).judge(subject.in_float32())
    return judged.under(WIDE)


def _report(name: str, settled: _Judged | None, judged: _Judged) -> Report:
    if settled is None:
        return Report(name, judged.runs, judged.verdicts, environment(), judged.notes)
    ran = tuple(run for run in settled.runs if run.outcome != "not run")
    return Report(
        name,
        (*ran, *judged.runs),
        (*settled.verdicts, *judged.verdicts),
        environment(),
        judged.notes,
    )


@dataclasses.dataclass(frozen=True)
class _Judged:
    """What came of one graph."""

    exported: Exported
    runs: tuple[RuntimeRun, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    def under(self, graph: str) -> _Judged:
        """The same, with another name for the graph."""
        runs = tuple(dataclasses.replace(run, graph=graph) for run in self.runs)
        verdicts = tuple(dataclasses.replace(v, graph=graph) for v in self.verdicts)
        return _Judged(self.exported, runs, verdicts, self.notes)


@dataclasses.dataclass(frozen=True)
class _Work:
    folder: Path
    out: Path
    pool: Pool
    gate: Gate
    progress: Progress

    def judge(self, subject: Subject) -> _Judged:
        """Export, check, run in all cases, compare."""
        from attn_export.parity.replay import judge_pool

        exported = self._export(subject)
        goldens, notes = self._golden(subject)
        runs, verdicts = judge_pool(self.pool, goldens, self.out, self.gate, self.progress.advance)
        if "bfloat16" in subject.narrow_dtypes().values():
            notes = (*notes, CAST_NOTE)
        return _Judged(exported, runs, verdicts, notes)

    def _export(self, subject: Subject) -> Exported:
        self.progress.phase("exporting")
        from attn_export.export import export
        from attn_export.graph.checks import check_graph
        from attn_export.graph.save import save_graph

        exported = export(subject)
        save_graph(exported.model, self.folder / MODEL)
        self.progress.phase("checking the graph")
        findings = check_graph(self.folder / MODEL, subject.expected())
        if findings:
            first, *more = (f"{finding.check}: {finding.message}" for finding in findings)
            raise GraphError(first + (f" (and {len(more)} more findings)" if more else ""))
        return exported

    def _golden(self, subject: Subject) -> tuple[list[Golden], tuple[str, ...]]:
        """Write the cases, set the runtimes to work on them, and meanwhile ask for the truth."""
        from attn_export.cases.golden import write_golden, write_inputs
        from attn_export.cases.probes import BASE
        from attn_export.parity.influence import check_influence
        from attn_export.parity.oracle import Oracle

        plan = subject.plan()
        folder = self.folder / GOLDEN
        written = [(c.name, write_inputs(folder, i, c)) for i, c in enumerate(plan.cases)]
        self.pool.start(self.folder, list(subject.inputs), written, self.out)
        self.progress.expect(len(plan.cases) * (1 + len(self.pool.workers)))
        narrow = bool(subject.narrow_dtypes())
        oracle, goldens = Oracle(subject, settled=narrow), []
        for case in plan.cases:
            goldens.append(oracle.golden(case))
            self.progress.advance(f"float64 truth: {case.name}")
        # In few bits the allowed error is a large part of all: the wide run has settled it.
        check_influence(goldens, *([1.0] if narrow else []))
        write_golden(folder, goldens)
        base = next(case for case in plan.cases if case.name == BASE)
        return goldens, (*subject.notes, *plan.notes, *oracle.notes(base))

    def write(self, subject: Subject, exported: Exported, report: Report) -> None:
        """Write what belongs into the bundle beside the graph and the golden vectors."""
        folder = self.folder
        if subject.spec is not None:
            (folder / SPEC).write_text(subject.spec.to_toml(), encoding="utf-8")
        (folder / REPORT).write_text(to_json(report), encoding="utf-8")
        expected = subject.expected()
        manifest: dict[str, Any] = {
            "name": report.name,
            "versions": versions(),
            "needs": {
                "opset": exported.model.opset_imports[""],
                "ir_version": exported.model.ir_version,
                "onnxruntime": ORT_NEEDED,
            },
            "graphs": {
                MODEL: {
                    "dialect": expected.dialect,
                    "attentions": expected.attentions,
                    "ours": expected.ours,
                    "nodes": exported.origins,
                }
            },
            "inputs": _signature(subject),
            "outputs": {name: {"shape": list(shape)} for name, shape in expected.outputs.items()},
            "weights": "linear weights are stored [in, out], as MatMul reads them",
        }
        write_manifest(folder, manifest)


def _signature(subject: Subject) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": wanted.dtype, "shape": list(wanted.shape)}
        for name, wanted in subject.input_values().items()
    }


def _check_dialects(names: Sequence[str]) -> None:
    for name in names:
        if name not in (*DIALECTS, "all"):
            raise UsageError(f"unknown dialect {name!r}; choose from {', '.join(DIALECTS)}, all")
