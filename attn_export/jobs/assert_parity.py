"""Parity as an assertion: in a test of the user's own."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import AttnExportError, UsageError
from attn_export.results import Report
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    from attn_export.export.input_function import InputFunction

BUNDLE = "bundle"


def assert_parity(
    of: Any,
    inputs: Mapping[str, Any] | InputFunction | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    *,
    graph: Path | str | None = None,
    names: Mapping[str, str] | None = None,
    outputs: Sequence[str] = ("output",),
    runtimes: Sequence[str] = (),
    require: Sequence[str] = (),
    dialects: Sequence[str] = ("all",),
    atol: float | None = None,
    rtol: float | None = None,
) -> Report:
    """Build a module, compare a graph with it, or verify a bundle; assert that all is the same.

    Args:
        of: A `torch.nn.Module`, with its inputs; a `Subject`; an `AttentionSpec`; or the path of
            a bundle, or of an ONNX file that `graph` is compared with.
        inputs: Of a module: example tensors by name, or a function that draws them; see `Subject`.
        axes: Of a module: the dynamic axes of each input, as of `Subject`.
        graph: An ONNX file of any origin, which is judged by the module. Default: the module is
            exported.
        names: The names of inputs and outputs in `graph` by those of the module. What is not
            named has the same name, or else the same place among the rest.
        outputs: Of a module: names of its outputs, as of `Subject`.
        runtimes: Names of the runtimes. Default: ort-cpu, and ort-cuda where there is a GPU.
        require: Names of runtimes that must run.
        dialects: Forms of the graph; of a bundle all that it has.
        atol: A gate beside the judge's rule: |r − eager| ≤ atol + rtol·|eager|.
        rtol: See `atol`.

    Returns:
        The report, of which everything passed.

    Raises:
        AssertionError: If not; with the table, the failures and their reasons.
        AttnExportError: If it cannot be built or read at all.
    """
    __tracebackhide__ = True  # pytest shows the line of the test, not this function and its arrays
    try:
        report = parity_report(
            of, inputs, axes, graph=graph, names=names, outputs=outputs, runtimes=runtimes,
            require=require, dialects=dialects, atol=atol, rtol=rtol,
        )  # fmt: skip
    except AttnExportError as error:  # its one line says it all
        raise error.with_traceback(None) from None
    if not report.passed:
        raise AssertionError(failure(report))
    return report


def parity_report(
    of: Any,
    inputs: Mapping[str, Any] | InputFunction | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    *,
    graph: Path | str | None = None,
    names: Mapping[str, str] | None = None,
    outputs: Sequence[str] = ("output",),
    dialects: Sequence[str] = ("all",),
    reproduction: Path | None = None,
    **options: Any,
) -> Report:
    """Return the report of `assert_parity`, passed or failed; with the cause of wrong numbers.

    Args:
        of: A module, subject, spec or bundle.
        inputs: Example inputs of a module by name, or a function that draws them.
        axes: Dynamic axes of a module: names by input and index.
        graph: An ONNX file that the module is compared with.
        names: Names in `graph` by those of the module.
        outputs: Names of the outputs of a module.
        dialects: The dialects to check.
        reproduction: The folder that reproduces a failure. None writes none.
        **options: Further options of `build` or `verify`.
    """
    __tracebackhide__ = True
    from attn_export.jobs.explain_failures import explained

    if names is not None and graph is None:
        raise UsageError("names are those of a graph; give graph=FILE too")
    if isinstance(of, str | os.PathLike):
        if graph is not None and Path(of).is_file():
            from attn_export.jobs.compare import compare

            return compare(Path(of), graph, names=names, reproduction=reproduction, **options)
        from attn_export.jobs.verify import verify

        other = None if graph is None else Path(graph)
        report = verify(Path(of), graph=other, **options)
        return explained(report, Path(of), other, reproduction=reproduction)
    subject, name = _subject(of, inputs, axes, outputs)
    if graph is not None:
        from attn_export.jobs.compare import compare

        return compare(subject, graph, names=names, reproduction=reproduction, **options)
    from attn_export.jobs.build import build

    with scratch() as folder, _without_traces():
        report = build(subject, folder / BUNDLE, name=name, dialects=dialects, **options)
        return explained(report, folder / f"{BUNDLE}.failed", reproduction=reproduction)


def failure(report: Report) -> str:
    """Return the message of a failed assertion: the failures in one line, then the report."""
    from attn_export.report.tables import matrix
    from attn_export.report.terminal import to_text

    wrong = "; ".join(
        f"{reason} ({', '.join(graphs)})"
        for reason, graphs in matrix(report).reasons("red").items()
    )
    wrong = "; ".join(report.explanations) or wrong
    headline = f"no parity: {wrong}" if wrong else "no parity: no runtime ran a case"
    return f"{headline}\n\n{to_text(report, '--parity-report DIR')}"


@contextlib.contextmanager
def _without_traces() -> Iterator[None]:
    """Keep PyTorch's records for its own tools out of the log that pytest shows for a failure."""
    if "TORCH_TRACE" in os.environ:  # somebody wants them
        yield
        return
    log = logging.getLogger("torch.__trace")
    log.addFilter(_nothing)  # that it hands on what it gets is set anew while PyTorch exports
    try:
        yield
    finally:
        log.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False


def _subject(
    of: Any,
    inputs: Mapping[str, Any] | InputFunction | None,
    axes: Mapping[str, Mapping[int, str]] | None,
    outputs: Sequence[str],
) -> tuple[Any, str]:
    from attn_export.export.subject import Subject
    from attn_export.spec import AttentionSpec

    if isinstance(of, AttentionSpec):
        return of, "attention"
    if isinstance(of, Subject):
        return of, type(of.module).__name__
    return Subject(of, inputs or {}, axes or {}, list(outputs)), type(of).__name__
