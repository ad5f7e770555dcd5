"""The main job: spec or subject → graph → checks → cases → runtimes → bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import GOLDEN, MODEL, REPORT, SPEC, Staging, staging, write_manifest
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
    from attn_export.nouns import Golden
    from attn_export.subject import Subject

DIALECTS = ("standard",)
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
            work = _Work(stage, out, pool, Gate(atol, rtol), progress)
            report = work.run(subject, name, seed)
        stage.publish(failed=not report.passed)
    return report


@dataclasses.dataclass(frozen=True)
class _Work:
    stage: Staging
    out: Path
    pool: Pool
    gate: Gate
    progress: Progress

    def run(self, subject: Subject | AttentionSpec, name: str, seed: int) -> Report:
        self.progress.phase("importing torch")
        from attn_export.parity.replay import judge_pool
        from attn_export.subject import Subject

        if isinstance(subject, AttentionSpec):
            subject = Subject.from_spec(subject, seed=seed)
        exported = self._export(subject)
        goldens, notes = self._golden(subject)
        runs, verdicts = judge_pool(self.pool, goldens, self.out, self.gate, self.progress.advance)
        report = Report(name, runs, verdicts, environment(), notes)
        self._write(subject, exported, report)
        return report

    def _export(self, subject: Subject) -> Exported:
        self.progress.phase("exporting")
        from attn_export.export import export
        from attn_export.graph.checks import check_graph
        from attn_export.graph.save import save_graph

        exported = export(subject)
        save_graph(exported.model, self.stage.folder / MODEL)
        self.progress.phase("checking the graph")
        findings = check_graph(self.stage.folder / MODEL, subject.expected())
        if findings:
            first, *more = (f"{finding.check}: {finding.message}" for finding in findings)
            raise GraphError(first + (f" (and {len(more)} more findings)" if more else ""))
        return exported

    def _golden(self, subject: Subject) -> tuple[list[Golden], tuple[str, ...]]:
        """Write the cases, set the runtimes to work on them, and meanwhile ask for the truth."""
        from attn_export.cases.golden import write_golden, write_inputs
        from attn_export.parity.influence import check_influence
        from attn_export.parity.oracle import Oracle

        plan = subject.plan()
        folder = self.stage.folder / GOLDEN
        written = [(c.name, write_inputs(folder, i, c)) for i, c in enumerate(plan.cases)]
        self.pool.start(self.stage.folder, list(subject.inputs), written, self.out)
        self.progress.expect(len(plan.cases) * (1 + len(self.pool.workers)))
        oracle, goldens = Oracle(subject), []
        for case in plan.cases:
            goldens.append(oracle.golden(case))
            self.progress.advance(f"float64 truth: {case.name}")
        check_influence(goldens)
        write_golden(folder, goldens)
        return goldens, plan.notes

    def _write(self, subject: Subject, exported: Exported, report: Report) -> None:
        folder = self.stage.folder
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
