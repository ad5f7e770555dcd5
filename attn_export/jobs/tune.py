"""Job that measures the forms of a bundle's `ort` graphs here, and keeps the fastest of each."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from attn_export.bench.bundle_line_up import RUNTIME, Entrants
from attn_export.bench.measurements import BenchReport, Candidate, Contest
from attn_export.bundle import (
    PAGE,
    REPORT,
    SIGNATURE,
    Staging,
    graph_files,
    read_bundle,
    staging,
    write_manifest,
)
from attn_export.dialect_names import MODEL, ORT
from attn_export.errors import RuntimeFailure, UsageError, printable
from attn_export.jobs.bench import ROUNDS, TURN_SECONDS, measured, phases, spec_of
from attn_export.jobs.forms import origin_of
from attn_export.jobs.verify import verify
from attn_export.report.progress import Progress
from attn_export.report.statements import FOLDER as EVIDENCE
from attn_export.report.statements import NOT_RUN, read_report, write_statements
from attn_export.results import GraphFile, Report
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.child import limited
from attn_export.runtimes.pool import Selection
from attn_export.temp_folders import scratch

FORMS = "attn_export.graph.ort_forms"
"""The functions that lower, in a process with limits."""

FASTER = 0.97
"""A form takes the place of another if its times are this part of the other's, or less."""

PREFILL = (512, 2048)

GENERATED = ("format", "files", "digest")
"""Keys of a manifest that follow from the others."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Result of the job.

    Attributes:
        bench: The times of every form, by graph and sizes.
        forms: The form that each graph has now, by the graph's file name.
        report: What the judge says of the bundle with these graphs; None if none changed.
    """

    bench: BenchReport
    forms: Mapping[str, str]
    report: Report | None

    @property
    def exit_code(self) -> int:
        """0, or that of the report."""
        return 0 if self.report is None else self.report.exit_code


def tune(
    bundle: Path | str,
    *,
    batch: Sequence[int] = (),
    prefill: Sequence[int] = (),
    decode: Sequence[int] = (),
    rounds: int = ROUNDS,
    threads: int | None = None,
    runtimes: Sequence[str] = (),
    turn_seconds: float = TURN_SECONDS,
    progress: Progress | None = None,
) -> Tuned:
    """Measure the forms of a bundle's `ort` graphs on this machine, and keep the fastest of each.

    The graphs are lowered anew from `model.onnx`. The bundle with the new ones is verified before
    it takes the place of the old one, which stays if a verdict is not "passed". A signature is
    removed.

    Args:
        bundle: The bundle's folder.
        batch: Batch sizes. Default: 1.
        prefill: Numbers of new tokens without a past. Default: 512 and 2048.
        decode: Numbers of keys that one new token sees. Default: 2048, with a cache.
        rounds: Turns of each form.
        threads: For computing. Default: all cores.
        runtimes: Names of the runtimes that verify. Default: those of the bundle's report.
        turn_seconds: The length of a turn in seconds; one run at least.
        progress: Receiver of progress.

    Raises:
        UsageError: If the bundle has no graph to tune, or a name or size does not fit.
        RuntimeFailure: If ONNX Runtime is missing, or no form runs.
        BundleError: If a file of the bundle is missing or was changed.
        OutputError: If the bundle cannot be replaced.
    """
    folder, progress = Path(bundle), progress or Progress()
    Selection.of(runtimes, ())  # a wrong name is an error before anything is measured
    manifest = dict(read_bundle(folder).manifest)
    files = [file for file in graph_files(manifest) if file.dialect == ORT]
    if not files or MODEL not in manifest["graphs"]:
        raise UsageError(f"{folder} has no graph in the ort dialect beside {MODEL}; build all")
    reason = runtime(RUNTIME).unavailable()
    if reason:
        raise RuntimeFailure(f"tune needs ONNX Runtime: {reason}")
    spec = spec_of(folder, manifest)
    rows = phases(manifest, spec, batch, prefill, decode, PREFILL)
    with staging(folder) as stage, scratch() as out:
        progress.phase("lowering")
        made = _lowered(folder, files, out)
        entrants = Entrants(folder, out, manifest, spec)
        planned = [
            (f"{file.name}: {name}", sizes, _forms(entrants, out, file, made[file.name], sizes))
            for file in files if file.name in made
            for name, sizes in rows if _is_for(file, files, sizes)
        ]  # fmt: skip
        bench = measured(
            manifest["name"], planned, rounds=rounds, threads=threads,
            turn_seconds=turn_seconds, progress=progress,
        )  # fmt: skip
        fastest = {file.name: _fastest(file.name, bench.contests) for file in files}
        now = {name: entry.get("form", "kernels") for name, entry in manifest["graphs"].items()}
        changed = {n: form for n, form in fastest.items() if form and form != now[n]}
        forms = {file.name: changed.get(file.name, now[file.name]) for file in files}
        if not changed:
            return Tuned(bench, forms, None)
        report = _judged(stage, folder, changed, bench, runtimes, progress)
        if report.passed:
            stage.publish()
    return Tuned(bench, forms, report)


# -- the forms of each graph --------------------------------------------------------------------


def _lowered(folder: Path, files: Sequence[GraphFile], out: Path) -> dict[str, dict[str, str]]:
    """Write the forms of graphs that have several to `out`, in a process with limits.

    Returns:
        The names of the files, by the name of the graph and that of the form.

    Raises:
        GraphError: If `model.onnx` cannot be lowered.
    """
    source = str(folder / MODEL)
    made: dict[str, dict[str, str]] = limited(
        f"{FORMS}:write_forms", source,
        model=source, output=str(out), names=[file.name for file in files],
    )  # fmt: skip
    return made


# -- choice, by times ---------------------------------------------------------------------------


def _is_for(file: GraphFile, files: Sequence[GraphFile], sizes: Mapping[str, int]) -> bool:
    """Return whether a graph runs these sizes: one for a single query runs no others."""
    if not file.takes(sizes):
        return False
    return bool(file.fixed) or not any(f.fixed and f.takes(sizes) for f in files)


def _forms(
    entrants: Entrants,
    out: Path,
    file: GraphFile,
    made: Mapping[str, str],
    sizes: Mapping[str, int],
) -> list[Candidate]:
    return [
        entrants.graph_candidate(form, out, dataclasses.replace(file, name=name), sizes)
        for form, name in made.items()
    ]


def _fastest(name: str, contests: Sequence[Contest]) -> str:
    """Return the form of a graph with the least times, their geometric mean over all sizes.

    The first form, that of every build, stays unless another is faster by more than `FASTER`.

    Raises:
        RuntimeFailure: If no form ran at all sizes.
    """
    of_graph = [contest for contest in contests if contest.name.startswith(f"{name}: ")]
    if not of_graph:
        return ""
    forms = [m.name for m in of_graph[0].measured]
    times = {
        form: statistics.geometric_mean(m.median for m in found if m is not None)
        for form in forms
        if all(found := [contest.named(form) for contest in of_graph])
    }
    if not times:
        reason = next((m.reason for c in of_graph for m in c.measured if not m.ran), "")
        raise RuntimeFailure(f"{name}: no form of it ran: {printable(reason, 200)}")
    best = min(times, key=lambda form: times[form])
    first = times.get(forms[0])
    return forms[0] if first is not None and times[best] > FASTER * first else best


# -- the bundle with other graphs ---------------------------------------------------------------


def _judged(
    stage: Staging,
    source: Path,
    forms: Mapping[str, str],
    bench: BenchReport,
    runtimes: Sequence[str],
    progress: Progress,
) -> Report:
    """Write the bundle with other forms of its graphs, and verify it.

    Args:
        stage: Where to write it.
        source: The bundle as it is.
        forms: The form of each graph that changes.
        bench: The times behind the choice.
        runtimes: Names of the runtimes that verify.
        progress: Receiver of progress.
    """
    from attn_export.graph.neighbourhood import read_neighbourhood
    from attn_export.report.data import to_json
    from attn_export.report.html import to_html

    folder = stage.folder
    manifest = {k: v for k, v in read_bundle(source).manifest.items() if k not in GENERATED}
    before = read_report(source)
    for path in source.iterdir():
        if path.name in (EVIDENCE, SIGNATURE):  # they are about the old graphs
            continue
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, folder / path.name)
    made = limited(
        f"{FORMS}:replace_forms", str(source / MODEL),
        model=str(source / MODEL), output=str(folder), forms=dict(forms),
    )  # fmt: skip
    graphs, origins = dict(manifest["graphs"]), manifest["graphs"][MODEL]["nodes"]
    for name, new in made.items():
        nodes = {node: origin_of(node, origins) for node in new["nodes"]}
        graphs[name] = {
            **graphs[name],
            "form": forms[name],
            "needs": {**graphs[name]["needs"], "onnxruntime": new["needs"]},
            "features": new["features"],
            "nodes": {node: origin for node, origin in nodes.items() if origin},
        }
    manifest["graphs"] = graphs
    manifest["tuning"] = {
        "processor": bench.environment["processor"],
        "threads": bench.threads,
        "milliseconds": {
            contest.name: {m.name: round(m.median * 1e3, 4) for m in contest.measured if m.ran}
            for contest in bench.contests
        },
    }
    write_manifest(folder, manifest)
    ran = {verdict.runtime for verdict in before.verdicts if verdict.status != NOT_RUN}
    report = verify(folder, runtimes=runtimes or sorted(ran), progress=progress)
    tuned = (_note(name, form, bench) for name, form in forms.items())
    notes = dict.fromkeys((*before.notes, *report.notes, *tuned))
    report = dataclasses.replace(report, notes=tuple(notes))
    (folder / REPORT).write_text(to_json(report), encoding="utf-8")
    drawing = read_neighbourhood(folder / MODEL)
    (folder / PAGE).write_text(to_html(report, drawing), encoding="utf-8")
    if (source / EVIDENCE).is_dir():
        write_statements(folder, manifest)
    write_manifest(folder, manifest)
    return report


def _note(name: str, form: str, bench: BenchReport) -> str:
    times = [
        f"{contest.name.partition(': ')[2]}: {contest.measured[0].median * 1e3:.3g} -> "
        f"{found.median * 1e3:.3g} ms"
        for contest in bench.contests
        if contest.name.startswith(f"{name}: ") and (found := contest.named(form))
    ]
    return f"{name} is tuned for {bench.environment['processor']}: {form} ({'; '.join(times)})"
