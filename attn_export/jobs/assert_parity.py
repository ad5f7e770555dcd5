"""Parity as an assertion: in a test of the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.nouns import Report
from attn_export.scratch import scratch

BUNDLE = "bundle"


def assert_parity(
    of: Any,
    inputs: Mapping[str, Any] | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    *,
    outputs: Sequence[str] = ("output",),
    runtimes: Sequence[str] = (),
    require: Sequence[str] = (),
    dialects: Sequence[str] = ("all",),
    atol: float | None = None,
    rtol: float | None = None,
) -> Report:
    """Build a module, or verify a bundle, and assert that every runtime computes the same.

    Args:
        of: A `torch.nn.Module`, with its inputs; a `Subject`; an `AttentionSpec`; or the path of
            a bundle.
        inputs: Of a module: example tensors by name, as of `Subject`.
        axes: Of a module: the dynamic axes of each input, as of `Subject`.
        outputs: Of a module: names of its outputs, as of `Subject`.
        runtimes: Which to run. Default ort-cpu, and ort-cuda where there is a GPU.
        require: Which have to run.
        dialects: Forms of the graph; of a bundle all that it has.
        atol: A gate beside the judge's rule: |r − eager| ≤ atol + rtol·|eager|.
        rtol: See `atol`.

    Returns:
        The report, of which everything passed.

    Raises:
        AssertionError: If not: with the table, what failed, and why.
        AttnExportError: If it cannot be built or read at all.
    """
    report = parity_report(
        of, inputs, axes, outputs=outputs, runtimes=runtimes, require=require, dialects=dialects,
        atol=atol, rtol=rtol,
    )  # fmt: skip
    if not report.passed:
        raise AssertionError(failure(report))
    return report


def parity_report(
    of: Any,
    inputs: Mapping[str, Any] | None = None,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    *,
    outputs: Sequence[str] = ("output",),
    dialects: Sequence[str] = ("all",),
    **options: Any,
) -> Report:
    """The report of `assert_parity`, whatever it says."""
    if isinstance(of, str | os.PathLike):
        from attn_export.jobs.verify import verify

        return verify(Path(of), **options)
    from attn_export.jobs.build import build

    subject, name = _subject(of, inputs, axes, outputs)
    with scratch() as folder:
        return build(subject, folder / BUNDLE, name=name, dialects=dialects, **options)


def failure(report: Report) -> str:
    """What a failed assertion says: the report as in the terminal, plain."""
    from attn_export.report.terminal import to_text

    return f"no parity\n{to_text(report)}"


def _subject(
    of: Any,
    inputs: Mapping[str, Any] | None,
    axes: Mapping[str, Mapping[int, str]] | None,
    outputs: Sequence[str],
) -> tuple[Any, str]:
    from attn_export.spec import AttentionSpec
    from attn_export.subject import Subject

    if isinstance(of, AttentionSpec):
        return of, "attention"
    if isinstance(of, Subject):
        return of, type(of.module).__name__
    return Subject(of, inputs or {}, axes or {}, list(outputs)), type(of).__name__
