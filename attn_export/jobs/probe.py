"""Job that finds the meaning of attention in a runtime."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from attn_export.errors import RuntimeFailure, UsageError
from attn_export.report.progress import Progress
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.protocol import Limits, Runtime
from attn_export.system_info import environment
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    from attn_export.diagnose.findings import Fingerprint

HUNG_AFTER = 60.0
"""Seconds: graphs and cases are tiny; what takes longest is to compile one."""


def probe(name: str, *, progress: Progress | None = None) -> Fingerprint:
    """Probe a runtime where runtimes differ, and find those that agree with it.

    Crashes, hangs and refusals are part of the answer.

    Args:
        name: The runtime.
        progress: Receiver of progress.

    Raises:
        UsageError: If there is no such runtime.
        RuntimeFailure: If it cannot run here.
    """
    progress = progress or Progress()
    kind = _named(name)
    reason = kind.unavailable()
    if reason:
        raise RuntimeFailure(f"{name} cannot run here: {reason}")
    # numpy, which is not needed to find out that a runtime is missing.
    from attn_export.diagnose.findings import Fingerprint
    from attn_export.diagnose.run_probes import Comparison, probes

    limits = dataclasses.replace(Limits.default(), seconds=HUNG_AFTER)
    with scratch() as folder:
        rows = Comparison(kind, probes(), folder, limits, progress).rows()
    return Fingerprint(name, kind.version() or "", rows, environment())


def _named(name: str) -> Runtime:
    try:
        return runtime(name)
    except UsageError as error:
        # One at a time.
        raise UsageError(str(error).removesuffix(", all")) from error
