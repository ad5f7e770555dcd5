"""The job behind `compare`: compare a graph of any origin with a module or another graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import staging
from attn_export.errors import UsageError
from attn_export.jobs.compared_graph import ComparedGraph
from attn_export.jobs.comparison import Comparison
from attn_export.parity.gate import Gate
from attn_export.report.progress import Progress
from attn_export.results import Report
from attn_export.runtimes.pool import Pool, Selection
from attn_export.runtimes.protocol import Limits
from attn_export.spec import AttentionSpec
from attn_export.system_info import check_installed
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    from attn_export.diagnose.explanation import Explanation
    from attn_export.export.subject import Subject
    from attn_export.jobs.reference import Reference


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
    """Run a graph in runtimes, and judge the outputs by the truth of a module or another graph.

    Args:
        reference: The module with its inputs, a spec, or an ONNX file.
        graph: The ONNX file to judge.
        names: The names of inputs and outputs in the graph, by the names in the reference. Others
            are matched by equal names, and the remaining ones by position.
        ranges: The smallest and largest value of integer inputs, if the reference is a graph.
        output: The folder for a bundle of the graph, the cases and the truth. Default: none.
        runtimes: Names of the runtimes. Default: ort-cpu, and ort-cuda if there is a GPU.
        require: Names of runtimes that must run at least one graph.
        atol: An additional limit: |r − eager| ≤ atol + rtol·|eager|, where r is a runtime's output.
        rtol: See `atol`.
        seed: The seed for the weights of a spec's module.
        reproduction: The folder to write a reproduction of a failure to; None for none.
        limits: The limits of each runtime's process.
        progress: Receiver of progress.

    Returns:
        The report, with the causes of failures. The bundle is in `output` if the report passed,
        else in `OUTPUT.failed`.

    Raises:
        UsageError: If a name is unknown, torch is missing or `output` cannot be written.
        GraphError: If a graph cannot be read, or its inputs or outputs cannot be matched.
        ExportError: If the module does not run at some sizes, or an input changes no output.
    """
    selection, path = Selection.of(runtimes, require), Path(graph)
    limits, progress = limits or Limits.default(), progress or Progress()
    check_installed("torch")
    compared = ComparedGraph.read(path, limits)
    read = functools.partial(_read_reference, reference, ranges or {}, seed)
    with _folder(output) as (folder, publish), scratch() as out:
        with Pool(selection, [compared.file], limits) as pool:
            work = Comparison(folder, out, pool, progress, compared, read, names or {})
            goldens, report = work.judge(Gate(atol, rtol))
        if output is not None or not report.passed:
            report = work.explain(report, goldens, reproduction, required=output is not None)
        bundle = publish(report)
    return dataclasses.replace(report, model=bundle or path)


def _read_reference(
    reference: Subject | AttentionSpec | Path | str,
    ranges: Mapping[str, tuple[int, int]],
    seed: int,
) -> Reference:
    from attn_export.jobs.reference import of_graph, of_module

    if isinstance(reference, str | Path):
        return of_graph(Path(reference), ranges)
    if ranges:
        raise UsageError("ranges are for two graphs; a module has those of its example inputs")
    return of_module(reference, seed)


def explain_graph(
    module: Subject | AttentionSpec,
    graph: Path | str,
    runtime_name: str,
    *,
    names: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Explanation:
    """Return an explanation of why a runtime's outputs for a graph differ from a module's.

    Args:
        module: The module with its inputs, or a spec.
        graph: The ONNX file.
        runtime_name: The runtime.
        names: The names of inputs and outputs in the graph, by those of the module.
        limits: The limits of each process.
        progress: Receiver of progress.
        **options: Further options of `explain`.

    Raises:
        AttnExportError: The errors of `compare` and `explain`.
    """
    from attn_export.jobs.explain import explain
    from attn_export.jobs.reference import of_module

    selection, path = Selection.of([runtime_name], ()), Path(graph)
    limits, progress = limits or Limits.default(), progress or Progress()
    check_installed("torch")
    compared = ComparedGraph.read(path, limits)
    with scratch() as folder, scratch() as out:
        with Pool(selection, [compared.file], limits) as pool:
            work = Comparison(
                folder, out, pool, progress, compared, lambda: of_module(module, 0), names or {}
            )
            goldens, report = work.judge(Gate())
        reference = work.bundle(report, goldens)
        return explain(
            folder, runtime_name, graph=folder / path.name, reference=reference, limits=limits,
            progress=progress, **options,
        )  # fmt: skip


@contextlib.contextmanager
def _folder(output: Path | str | None) -> Iterator[tuple[Path, Any]]:
    """Yield the folder to write to, and a function that publishes it and returns its final path."""
    if output is None:
        with scratch() as folder:
            yield folder, lambda _: None
        return
    with staging(Path(output)) as stage:
        yield stage.folder, lambda report: stage.publish(failed=not report.passed)
