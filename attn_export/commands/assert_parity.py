"""Assertion of parity for the user's own tests."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from attn_export.bundle.manifest import failed_folder
from attn_export.commands.build import build
from attn_export.commands.compare import compare, compare_models
from attn_export.commands.explain_failures import explain_failures
from attn_export.commands.verify import verify
from attn_export.errors import AttnExportError, UsageError
from attn_export.report.tables import matrix
from attn_export.results import Report
from attn_export.runtimes.run_options import RunKeywords, RunOptions
from attn_export.spec import AttentionSpec
from attn_export.temp_folders import scratch


def assert_parity(
    of: Any,
    inputs: Any = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    *,
    graph: Path | str | None = None,
    graphs: Path | str | None = None,
    names: Mapping[str, str] | None = None,
    outputs: Sequence[str] = ("output",),
    dialects: Sequence[str] = ("all",),
    **keywords: Unpack[RunKeywords],
) -> Report:
    """Assert that graphs compute the same as a module, a whole model, another graph or a bundle.

    Args:
        of: The reference: a `torch.nn.Module` with its inputs, a `Subject`, an `AttentionSpec`,
            the path of a bundle, or the path of an ONNX file to compare `graph` with.
        inputs: Example tensors of a module by name, or a function that draws them; see `Subject`.
            Of a whole model or an ONNX file your own inputs, which are cases, too: a file as
            `compare --inputs` takes it, arrays by name or several such mappings; of a whole model
            also prompts as lists of token ids or as texts.
        axes: The dynamic axes of each input of a module; see `Subject`.
        graph: An ONNX file of any origin to judge. Default: the graphs that a module is exported
            to, or those of a bundle.
        graphs: The folder of the graphs of a whole model to judge, which `of` is: a model of
            transformers, or the folder of its checkpoint.
        names: The names of inputs and outputs in `graph`, by the names in the reference. Others
            are matched by equal names, and the remaining ones by position.
        outputs: The names of the outputs of a module; see `Subject`.
        dialects: The dialects to export a module to. A bundle is run in all that it has.
        **keywords: How graphs are run and judged, as in `RunKeywords`.

    Returns:
        The report, which has passed.

    Raises:
        AssertionError: If the report has not passed. The message has its table, the failures and
            their reasons.
        AttnExportError: If a module cannot be exported, or a file cannot be read.
    """
    __tracebackhide__ = True  # pytest shows the line of the test instead of this function
    try:
        report = parity_report(
            of, inputs, axes, graph=graphs or graph, names=names, outputs=outputs,
            dialects=dialects, **keywords,
        )  # fmt: skip
    except AttnExportError as error:  # without a traceback: the message is complete
        raise error.with_traceback(None) from None
    if not report.passed:
        raise AssertionError(failure(report))
    return report


def parity_report(
    of: Any,
    *example: Any,
    graph: Path | str | None = None,
    names: Mapping[str, str] | None = None,
    outputs: Sequence[str] = ("output",),
    dialects: Sequence[str] = ("all",),
    reproduction: Path | None = None,
    **keywords: Unpack[RunKeywords],
) -> Report:
    """Return the report of `assert_parity`, passed or failed, with the causes of failures.

    `example`: The inputs, and the axes.
    """
    __tracebackhide__ = True
    inputs, axes = (*example, None, None)[:2]
    run = RunOptions.of(**keywords)
    explained = functools.partial(explain_failures, run=run, reproduction=reproduction)
    own = () if inputs is None else (inputs,)
    if graph is not None and _is_whole_model(of):
        _refuse(axes=axes)
        return compare_models(of, graph, run, names=names, inputs=own)
    if names is not None and graph is None:
        raise UsageError("names are those of a graph; give graph=FILE too")
    if isinstance(of, str | os.PathLike):
        if graph is not None and Path(of).is_file():
            _refuse(axes=axes)
            return compare(Path(of), graph, run, names=names, inputs=own, reproduction=reproduction)
        _refuse(inputs=inputs, axes=axes)
        replacement = None if graph is None else Path(graph)
        return explained(verify(Path(of), run, graph=replacement), Path(of), replacement)
    subject, name = _subject(of, outputs, inputs, axes)
    if graph is not None:
        return compare(subject, graph, run, names=names, reproduction=reproduction)
    with scratch() as folder, _trace_log_muted():
        bundle = folder / "bundle"
        report = build(subject, bundle, run, name=name, dialects=dialects)
        return explained(report, failed_folder(bundle))


def _is_whole_model(of: Any) -> bool:
    """Return whether a value is a model of transformers, or the folder of a checkpoint."""
    if isinstance(of, str | Path):
        return (Path(of) / "config.json").is_file()
    return any(base.__name__ == "PreTrainedModel" for base in type(of).__mro__)


def failure(report: Report) -> str:
    """Return the message of a failed assertion: the failures in one line, then the report."""
    from attn_export.report.terminal import to_text

    reasons = "; ".join(
        f"{reason} ({', '.join(graphs)})"
        for reason, graphs in matrix(report).reasons("red").items()
    )
    causes = "; ".join(report.explanations) or reasons
    headline = f"no parity: {causes}" if causes else "no parity: no runtime ran a case"
    return f"{headline}\n\n{to_text(report, '--parity-report DIR')}"


@contextlib.contextmanager
def _trace_log_muted() -> Iterator[None]:
    """Drop the records of PyTorch's trace log, which pytest would show with a failed test."""
    if "TORCH_TRACE" in os.environ:  # the user has enabled the log
        yield
        return
    log = logging.getLogger("torch.__trace")
    log.addFilter(_reject)  # setting `propagate` has no effect: PyTorch sets it while exporting
    try:
        yield
    finally:
        log.removeFilter(_reject)


def _reject(_: logging.LogRecord) -> bool:
    return False


def _refuse(**given: Any) -> None:
    """Raise UsageError if something is given that nothing would read."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} are those of a module, and this is none; leave them out")


def _subject(
    of: Any, outputs: Sequence[str], inputs: Any, axes: Mapping[str, Mapping[int, str]] | None
) -> tuple[Any, str]:
    from attn_export.export.subject import Subject

    if isinstance(of, AttentionSpec | Subject):
        _refuse(inputs=inputs, axes=axes)
    if isinstance(of, AttentionSpec):
        return of, "attention"
    if isinstance(of, Subject):
        return of, type(of.module).__name__
    return Subject(of, inputs or {}, axes or {}, list(outputs)), type(of).__name__
