"""The job behind `probe`: find how a runtime interprets attention."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from attn_export.errors import RuntimeFailure, UsageError
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.protocol import Limits
from attn_export.runtimes.run_options import Progress
from attn_export.system_info import environment
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    from attn_export.parts.probe.findings import Fingerprint

HUNG_AFTER = 60.0
"""The time limit of a graph or case in seconds. All are tiny; compiling one takes longest."""


def probe(name: str, *, progress: Progress | None = None) -> Fingerprint:
    """Run graphs on which runtimes differ in one runtime, and compare the outputs with others.

    Crashes, hangs and refusals are part of the result.

    Returns:
        The findings of all probes.
    """
    progress = progress or Progress()
    try:
        target = runtime(name)
    except UsageError as error:
        # "all" is no choice here.
        raise UsageError(str(error).removesuffix(", all")) from error
    reason = target.unavailable()
    if reason:
        raise RuntimeFailure(f"{name} cannot run here: {reason}")
    # These import numpy, which is not needed for the error that a runtime is missing.
    from attn_export.parts.probe.findings import Fingerprint
    from attn_export.parts.probe.run_probes import ProbeRunner, probes

    limits = dataclasses.replace(Limits.default(), seconds=HUNG_AFTER)
    with scratch() as folder:
        runner = ProbeRunner(target, probes(), folder, limits, progress.expect, progress.advance)
        rows = runner.rows()
    return Fingerprint(name, target.version() or "", rows, environment())
