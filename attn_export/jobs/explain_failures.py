"""Job that adds the causes to a failed report, within a limit of time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.errors import AttnExportError, counted
from attn_export.interruption import ctrl_c_raises
from attn_export.parity.judge import TIES, TIES_ADVICE
from attn_export.report.progress import Progress
from attn_export.results import Report, Verdict

if TYPE_CHECKING:
    from attn_export.diagnose.eager_values import Witness

SECONDS = 20.0
"""After which no further experiment is begun: a failed test has to end too."""

RUNTIMES = 2
"""Number of runtimes whose failure is explained: others mostly fail for the same reason."""


def explained(
    report: Report,
    bundle: Path,
    graph: Path | None = None,
    *,
    seconds: float = SECONDS,
    witness: Witness | None = None,
    reproduction: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Return the report, with a sentence on each runtime whose numbers are wrong.

    Args:
        report: Of a build or of `verify`.
        bundle: The bundle that ran; of a failed build, the folder that it left.
        graph: The file that was run in its place.
        seconds: After which no further experiment is begun.
        witness: What the values of a wrong graph are compared with; see `explain`.
        reproduction: The folder that reproduces the failure of the first runtime. None writes none.
        progress: Receiver of progress.
    """
    # Of a runtime that ended early there is no more to find out; of one that went on there is.
    ran = {(run.runtime, run.graph) for run in report.runs if run.outcome == "ran"}
    failed = dict.fromkeys(
        v.runtime
        for v in report.verdicts
        if v.status == "failed" or (v.status == "error" and (v.runtime, v.graph) in ran)
    )
    sentences = ties_explained(report.verdicts)
    if not failed:
        return dataclasses.replace(report, explanations=(*sentences,)) if sentences else report
    from attn_export.jobs.explain import explain

    started = time.monotonic()
    for number, name in enumerate(list(failed)[:RUNTIMES]):
        left = seconds - (time.monotonic() - started)
        if left <= 0:
            break
        try:
            with ctrl_c_raises():
                found = explain(
                    bundle, name, graph=graph, seconds=left, witness=witness,
                    progress=progress, output=None if number else reproduction,
                )  # fmt: skip
        except AttnExportError as error:
            sentences.append(f"{name}: not explained: {error}")
            continue
        except KeyboardInterrupt:  # enough explained: the report is what was asked for
            sentences.append(f"{name}: not explained: interrupted")
            break
        if found.fault != "none":  # a gate or a baseline can fail what the rule lets pass
            sentences.append(found.sentence)
    return dataclasses.replace(report, explanations=(*sentences,))


def ties_explained(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a sentence on each output that the order of equal values decides."""
    cases: dict[str, set[str]] = {}
    for verdict in verdicts:
        if verdict.status == "unusable" and verdict.message.startswith(f"{TIES}:"):
            cases.setdefault(verdict.output, set()).add(verdict.case)
    return [
        f"{TIES}: in {counted(len(found), 'case')}, the order of equal values decides {output}; "
        f"{TIES_ADVICE}"
        for output, found in cases.items()
    ]
