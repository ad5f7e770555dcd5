"""Process of one candidate: `python -m attn_export.bench.candidate_worker KIND MIB THREADS`.

The protocol is JSON, one object a line. On `prepare` it makes the candidate, runs it twice, sends
`prepared`; on `run` it sends `times`. Between its turns it blocks on the pipe.
"""

from __future__ import annotations

import gc
import importlib
import queue
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attn_export.bench.feeds import Prepared
from attn_export.errors import one_line
from attn_export.runtimes.ipc import (
    EventWriter,
    jobs_from_stdin,
    limit_memory,
    outcome_of,
    private_stdout,
)

# -- memory of this process, current and peak (Linux; unknown on other systems) -----------------


STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""proc(5): writing 5 sets VmHWM to what VmRSS is now."""


def reset_peak() -> int | None:
    """Forget the peak so far; the bytes that are resident now, or None where unknown."""
    try:
        CLEAR.write_text(RESET_PEAK)
        return _status("VmRSS")
    except OSError:
        return None


def peak() -> int | None:
    """Return the peak of resident bytes since the reset, or None if unknown."""
    try:
        return _status("VmHWM")
    except OSError:
        return None


def _status(field: str) -> int | None:
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else None


# -- process of one candidate -------------------------------------------------------------------


KINDS = {
    "graph": ("own_graphs", "make_in_ort"),
    "openvino": ("own_graphs", "make_in_openvino"),
    "plain": ("peers_plain", "make_plain"),
    "spec": ("peers_spec", "make_layer"),
    "roof": ("peers_plain", "make_roofline"),
}
"""The module of every kind of candidate and a function of it: (options, threads) -> Prepared."""

Make = Callable[[Mapping[str, Any], int], Prepared]


def main() -> None:
    """Serve one candidate until the other process is gone."""
    kind, memory_mib, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    send = EventWriter(private_stdout())
    jobs = jobs_from_stdin()
    limit_memory(memory_mib)
    try:
        module, make = KINDS[kind]
        found = importlib.import_module(f"attn_export.bench.{module}")
        _serve(getattr(found, make), threads, jobs, send)
    except Exception as error:
        send("failed", outcome=outcome_of(error), reason=one_line(error))


def _serve(
    make: Make, threads: int, jobs: queue.Queue[dict[str, Any] | None], send: EventWriter
) -> None:
    prepared: Prepared | None = None
    while (job := jobs.get()) is not None:
        if job["do"] == "prepare":
            prepared = make(job["options"], threads)
            gc.collect()
            gc.disable()
            growth = _first_run(prepared)
            (latency,) = _times(prepared, 1)
            send("prepared", growth=growth, latency=latency, facts=prepared.facts)
        else:
            assert prepared is not None
            if job["warm"]:
                prepared.run()
            send("times", seconds=_times(prepared, job["runs"]))


def _first_run(prepared: Prepared) -> int | None:
    """Return the peak growth of this process in its first run, in bytes."""
    before = reset_peak()
    prepared.run()
    after = peak()
    return None if before is None or after is None else after - before


def _times(prepared: Prepared, runs: int) -> list[float]:
    found = []
    for _ in range(runs):
        started = time.perf_counter()
        prepared.run()
        found.append(time.perf_counter() - started)
    return found


if __name__ == "__main__":
    main()
