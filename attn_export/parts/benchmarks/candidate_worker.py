"""A candidate's process, which calls `serve`.

The job `prepare` makes the candidate, runs it twice and is answered by `prepared`; the job `run` is
answered by `times`. After an error the process sends `failed` and ends.
"""

from __future__ import annotations

import gc
import re
import time
from pathlib import Path

from attn_export.parts.benchmarks.feeds import Make, Prepared
from attn_export.runtimes.child_main import Jobs, Send, load_function

_STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""The value that, written to `CLEAR`, sets VmHWM to the present VmRSS; see proc(5)."""

KINDS = {
    "graph": "attn_export.parts.benchmarks.own_graphs:make_in_ort",
    "roof": "attn_export.parts.benchmarks.torch_layers:make_roofline",
}
"""The function (options, threads) -> Prepared that makes each kind of candidate."""


def serve(send: Send, jobs: Jobs, kind: str, threads: str) -> None:
    """Make and run one candidate until the process is ended."""
    make: Make = load_function(KINDS.get(kind, kind))
    prepared: Prepared | None = None
    while True:
        job = jobs.get()
        if job["do"] == "prepare":
            prepared = make(job["options"], int(threads))
            gc.collect()
            gc.disable()
            loading = _status("VmHWM")
            growth = _first_run(prepared)
            (latency,) = _times(prepared, 1)
            peak = max(filter(None, (loading, _status("VmHWM"))), default=None)
            send("prepared", growth=growth, peak=peak, latency=latency, facts=prepared.facts)
        else:
            assert prepared is not None
            if job["warm"]:
                prepared.run()
            send("times", seconds=_times(prepared, job["runs"]))


def _first_run(prepared: Prepared) -> int | None:
    """Run once; return how much the memory of this process grew at most, in bytes, or None."""
    try:
        CLEAR.write_text(_RESET_PEAK)
    except OSError:  # not Linux, or not permitted
        prepared.run()
        return None
    before = _status("VmRSS")
    prepared.run()
    after = _status("VmHWM")
    return None if before is None or after is None else after - before


def _status(field: str) -> int | None:
    """Return the memory in bytes that a field of `_STATUS` states, or None."""
    try:
        text = _STATUS.read_text()
    except OSError:  # not Linux
        return None
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def _times(prepared: Prepared, runs: int) -> list[float]:
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        prepared.run()
        seconds.append(time.perf_counter() - started)
    return seconds
