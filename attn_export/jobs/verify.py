"""Replays a bundle's golden vectors in runtimes, on a machine that need not have torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attn_export.bundle import GOLDEN, MODEL, graph_files, read_bundle, read_manifest
from attn_export.cases.golden import case_folders, read_golden
from attn_export.environment import environment
from attn_export.errors import GraphError
from attn_export.nouns import GraphFile, Report
from attn_export.parity.baseline import against, read_baseline, write_baseline
from attn_export.parity.gate import Gate
from attn_export.report.progress import Progress
from attn_export.runtimes.pool import Pool, Selection
from attn_export.runtimes.protocol import Limits
from attn_export.scratch import scratch


def verify(
    bundle: Path | str,
    *,
    graph: Path | str | None = None,
    runtimes: Sequence[str] = (),
    require: Sequence[str] = (),
    atol: float | None = None,
    rtol: float | None = None,
    baseline: Path | str | None = None,
    update: bool = False,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a bundle's graphs, or another one in their place, against its golden vectors.

    Args:
        bundle: The bundle's folder.
        graph: An ONNX file to run instead of the bundle's own; one that is called as one of
            these is run as that is.
        runtimes: Which to run. Default ort-cpu, and ort-cuda where there is a GPU.
        require: Which have to run: one that cannot is a failure.
        atol: A gate beside the judge's rule: |r − eager| ≤ atol + rtol·|eager|.
        rtol: See `atol`.
        baseline: A file that remembers errors: an output that is much worse than there fails.
        update: Write what this run gave into `baseline`, if it passed, and compare with nothing.
        limits: What each runtime's process may take.
        progress: Told what is going on.

    Raises:
        UsageError: If a name is unknown, or there is no `baseline` to compare with.
        GraphError: If `graph` cannot be read.
        BundleError: If a file of the bundle is missing or was changed.
    """
    selection = Selection.of(runtimes, require)
    before = read_baseline(Path(baseline)) if baseline and not update else None
    folder, progress = Path(bundle), progress or Progress()
    manifest = read_manifest(folder)
    forms = graph_files(manifest)
    other = Path(graph) if graph else None
    if other is not None:
        if not other.is_file():
            raise GraphError(f"cannot read {other}: no such file")
        forms = [form for form in forms if form.name == other.name] or [GraphFile(other.name)]
    with scratch() as out, Pool(selection, forms, limits or Limits.default()) as pool:
        inputs, cases = case_folders(folder / GOLDEN)
        ends = {**manifest["inputs"], **manifest["outputs"]}
        axes = {name: entry["shape"] for name, entry in ends.items()}
        pool.start((other.parent if other else folder).absolute(), inputs, axes, cases, out)
        # While the runtimes start and run (numpy is imported only from here on): is everything
        # in the bundle as it was written?
        read_bundle(folder)
        if other is not None:
            _refuse_unreadable(other)
        goldens = read_golden(folder / GOLDEN)
        made_with = environment()
        progress.expect(pool.expected())
        from attn_export.parity.replay import judge_pool

        gate = Gate(atol, rtol)
        runs, verdicts = judge_pool(pool, goldens, axes, out, gate, progress.advance)
    drawn = other or folder / MODEL
    report = Report(manifest["name"], runs, verdicts, made_with, (), drawn)
    if before is not None:
        return against(report, before)
    if baseline and report.passed:
        write_baseline(Path(baseline), report)
    return report


def _refuse_unreadable(path: Path) -> None:
    from attn_export.graph.load import load_proto

    load_proto(path)
