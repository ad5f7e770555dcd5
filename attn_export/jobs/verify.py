"""Replays a bundle's golden vectors in runtimes, on a machine that need not have torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attn_export.bundle import GOLDEN, read_bundle, read_manifest
from attn_export.cases.golden import case_folders, read_golden
from attn_export.environment import environment
from attn_export.errors import GraphError
from attn_export.nouns import Report
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
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a bundle's graphs, or another one in their place, against its golden vectors.

    Args:
        bundle: The bundle's folder.
        graph: An ONNX file to run instead of the bundle's own.
        runtimes: Which to run. Default ort-cpu, and ort-cuda where there is a GPU.
        require: Which have to run: one that cannot is a failure.
        atol: A gate beside the judge's rule: |r − eager| ≤ atol + rtol·|eager|.
        rtol: See `atol`.
        limits: What each runtime's process may take.
        progress: Told what is going on.

    Raises:
        UsageError: If a name is unknown.
        GraphError: If `graph` cannot be read.
        BundleError: If a file of the bundle is missing or was changed.
    """
    selection = Selection.of(runtimes, require)
    folder, progress = Path(bundle), progress or Progress()
    manifest = read_manifest(folder)
    graphs = [Path(graph)] if graph else [folder / name for name in manifest["graphs"]]
    for path in graphs:
        if graph and not path.is_file():
            raise GraphError(f"cannot read {path}: no such file")
    with (
        scratch() as out,
        Pool(selection, [path.name for path in graphs], limits or Limits.default()) as pool,
    ):
        inputs, cases = case_folders(folder / GOLDEN)
        pool.start(graphs[0].parent.absolute(), inputs, cases, out)
        # While the runtimes start and run (numpy is imported only from here on): is everything
        # in the bundle as it was written?
        read_bundle(folder)
        if graph:
            _refuse_unreadable(graphs[0])
        goldens = read_golden(folder / GOLDEN)
        made_with = environment()
        progress.expect(len(cases) * len(pool.workers))
        from attn_export.parity.replay import judge_pool

        runs, verdicts = judge_pool(pool, goldens, out, Gate(atol, rtol), progress.advance)
    return Report(manifest["name"], runs, verdicts, made_with, ())


def _refuse_unreadable(path: Path) -> None:
    from attn_export.graph.load import load_proto

    load_proto(path)
