"""The job behind `tune`: measure the forms of a bundle's `ort` graphs, and keep the fastest."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from attn_export.bundle.manifest import (
    EVIDENCE,
    SIGNATURE,
    bundle_spec,
    copy_bundle,
    manifest_content,
    read_bundle,
    read_report,
    refuse_exchange,
    staging,
    write_manifest,
)
from attn_export.commands.bundle_graphs import origin_of
from attn_export.commands.verify import verify
from attn_export.dialect_names import MODEL, ORT
from attn_export.errors import RuntimeFailure, UsageError, printable
from attn_export.parts.benchmarks.bench import Measuring
from attn_export.parts.benchmarks.bundle_candidates import RUNTIME, BundleCandidates
from attn_export.parts.benchmarks.measurements import BenchReport, Candidate, WorkloadResult
from attn_export.results import Report
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.child import limited
from attn_export.runtimes.run_options import Progress, RunOptions
from attn_export.schema import GraphFile, Manifest
from attn_export.temp_folders import scratch

FORMS = "attn_export.parts.benchmarks.ort_forms"
"""The module with the functions that lower graphs to forms. They are called in a child process."""

_FASTER = 0.97
"""The ratio of times up to which a form replaces the default form."""

PREFILL = (512, 2048)
"""The default numbers of new tokens without a past."""


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """The result of `tune`.

    Attributes:
        report: The report of the bundle with the selected forms; None if no form changed.
        left_out: The names of the bundle's signature and folder of statements, which are of the
            former graphs.
    """

    bench: BenchReport
    forms: Mapping[str, str]
    report: Report | None
    left_out: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit code of the report; 0 without one."""
        return 0 if self.report is None else self.report.exit_code


def tune(
    bundle: Path | str,
    *,
    runtimes: Sequence[str] = (),
    progress: Progress | None = None,
    **how: Any,
) -> TuningResult:
    """Measure the forms of a bundle's `ort` graphs on this machine, and keep the fastest of each.

    The graphs are lowered from `model.onnx` again. The bundle with the selected forms is verified,
    and replaces the old one if the report passes. It has no signature.

    `how`: The fields of `Measuring`.
    """
    folder, progress, measuring = Path(bundle), progress or Progress(), Measuring(**how)
    RunOptions.of(runtimes=runtimes)  # raises an error for unknown names, before it measures
    manifest = read_bundle(folder)
    files = _tunable_files(folder, manifest)
    spec = bundle_spec(folder, manifest)
    workloads = measuring.workloads(manifest, spec, PREFILL)
    source = str(folder / MODEL)
    with staging(folder) as stage:
        with refuse_exchange(folder), scratch() as out:
            candidates = BundleCandidates(folder, out, manifest, spec)
            progress.phase("lowering")
            forms = limited(
                f"{FORMS}:write_forms", source,
                model=source, output=str(out), names=[file.name for file in files],
            )  # fmt: skip
            planned = list(_planned(candidates, out, files, forms, workloads))
            bench = measuring.measure(manifest.name, planned, progress)
            current = {f.name: manifest.graphs[f.name].form for f in files}
            changed = _faster_forms(current, bench)
            report = _verified(stage.folder, folder, changed, bench, runtimes, progress)
        left_out = tuple(name for name in (SIGNATURE, EVIDENCE) if (folder / name).exists())
        if report is not None and report.passed:
            stage.publish()
    return TuningResult(bench, {**current, **changed}, report, left_out)


def _faster_forms(current: Mapping[str, str], bench: BenchReport) -> dict[str, str]:
    """Return the fastest form of each graph in which another one is faster than the current."""
    fastest = {name: _fastest(name, bench.workloads) for name in current}
    return {name: form for name, form in fastest.items() if form and form != current[name]}


def _tunable_files(folder: Path, manifest: Manifest) -> Sequence[GraphFile]:
    """Return the `ort` graphs of a bundle, or raise an error if none can be lowered and run."""
    files = [file for file in manifest.graphs.values() if file.dialect == ORT]
    if not files or MODEL not in manifest.graphs:
        raise UsageError(f"{folder} has no graph in the ort dialect beside {MODEL}; build all")
    reason = runtime(RUNTIME).unavailable()
    if reason:
        raise RuntimeFailure(f"tune needs ONNX Runtime: {reason}")
    return files


def _is_for(file: GraphFile, files: Sequence[GraphFile], sizes: Mapping[str, int]) -> bool:
    """Return whether a graph is used at these sizes: one with fixed sizes is preferred."""
    if not file.takes(sizes):
        return False
    return bool(file.fixed) or not any(f.fixed and f.takes(sizes) for f in files)


def _planned(
    candidates: BundleCandidates,
    out: Path,
    files: Sequence[GraphFile],
    forms: Mapping[str, Mapping[str, str]],
    workloads: Sequence[tuple[str, Mapping[str, int]]],
) -> Iterator[tuple[str, Mapping[str, int], list[Candidate]]]:
    """Yield the name, the sizes and the candidates of each workload of each graph."""
    for file in files:
        form_files = forms.get(file.name, {})
        for workload, sizes in workloads if form_files else ():
            if _is_for(file, files, sizes):
                measured = [
                    candidates.graph_candidate(form, out, replace(file, name=n), sizes)
                    for form, n in form_files.items()
                ]
                yield f"{file.name}: {workload}", sizes, measured


def _fastest(name: str, workloads: Sequence[WorkloadResult]) -> str:
    """Return the form of a graph with the smallest geometric mean of its times over all sizes.

    The first form, which `build` uses, is kept unless another takes at most `_FASTER` of its time.
    Return "" for a graph that was not measured.
    """
    graph_workloads = [workload for workload in workloads if workload.name.startswith(f"{name}: ")]
    if not graph_workloads:
        return ""
    forms = [m.name for m in graph_workloads[0].measured]
    times = {}
    for form in forms:
        results = [workload.named(form) for workload in graph_workloads]
        medians = [result.median for result in results if result is not None]
        if len(medians) == len(results):
            times[form] = statistics.geometric_mean(medians)
    if not times:
        reason = next((m.reason for c in graph_workloads for m in c.measured if not m.ran), "")
        raise RuntimeFailure(f"{name}: no form of it ran: {printable(reason, 200)}")
    best = min(times, key=times.__getitem__)
    first = times.get(forms[0])
    return forms[0] if first is not None and times[best] > _FASTER * first else best


# -- the bundle with the selected forms ---------------------------------------------------------


def _verified(
    folder: Path,
    source: Path,
    forms: Mapping[str, str],
    bench: BenchReport,
    runtimes: Sequence[str],
    progress: Progress,
) -> Report | None:
    """Write the bundle with other forms to a folder, and verify it.

    Returns:
        The report; None if no form changes.
    """
    if not forms:
        return None
    from attn_export.report.html import write_report

    copy_bundle(source, folder)
    content, before = manifest_content(folder), read_report(folder)
    content["graphs"] |= _replace_graphs(content["graphs"], source, folder, forms)
    content["tuning"] = {
        "processor": bench.environment["processor"],
        "threads": bench.threads,
        "milliseconds": {
            workload.name: {m.name: round(m.median * 1e3, 4) for m in workload.measured if m.ran}
            for workload in bench.workloads
        },
    }
    write_manifest(folder, content)
    verified = {verdict.runtime for verdict in before.verdicts if verdict.status != "not run"}
    report = verify(folder, runtimes=runtimes or sorted(verified), progress=progress)
    tuned = (_note(name, form, bench) for name, form in forms.items())
    notes = dict.fromkeys((*before.notes, *report.notes, *tuned))
    report = dataclasses.replace(report, notes=tuple(notes))
    write_report(folder, report, content)
    return report


def _replace_graphs(
    entries: Mapping[str, Any], source: Path, folder: Path, forms: Mapping[str, str]
) -> dict[str, Any]:
    """Write graphs in other forms to a folder; return their new entries in the manifest."""
    replaced = limited(
        f"{FORMS}:replace_forms", str(source / MODEL),
        model=str(source / MODEL), output=str(folder), forms=dict(forms),
    )  # fmt: skip
    changed = {}
    for name, new in replaced.items():
        nodes = {node: origin_of(node, entries[MODEL]["nodes"]) for node in new["nodes"]}
        changed[name] = {
            **entries[name],
            "form": forms[name],
            "needs": {**entries[name]["needs"], "onnxruntime": new["needs"]},
            "features": new["features"],
            "nodes": {node: origin for node, origin in nodes.items() if origin},
        }
    return changed


def _note(name: str, form: str, bench: BenchReport) -> str:
    times = [
        f"{workload.name.partition(': ')[2]}: {workload.measured[0].median * 1e3:.3g} -> "
        f"{measured.median * 1e3:.3g} ms"
        for workload in bench.workloads
        if workload.name.startswith(f"{name}: ") and (measured := workload.named(form))
    ]
    return f"{name} is tuned for {bench.environment['processor']}: {form} ({'; '.join(times)})"
