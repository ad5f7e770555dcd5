"""Process of one candidate: `python -m attn_export.bench.candidate_worker KIND MIB THREADS`.

The protocol is JSON, one object a line. On `prepare` it makes the candidate, runs it twice, sends
`prepared`; on `run` it sends `times`. Between its turns it blocks on the pipe.
"""

from __future__ import annotations

import gc
import importlib
import queue
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from attn_export.bench.memory import peak, reset_peak
from attn_export.bench.prepared import Prepared
from attn_export.errors import one_line
from attn_export.runtimes.ipc import (
    Voice,
    jobs_from_stdin,
    limit_memory,
    outcome_of,
    private_stdout,
)

KINDS = {
    "graph": "attn_export.bench.ort_graph",
    "openvino": "attn_export.bench.openvino_graph",
    "plain": "attn_export.bench.peers_plain",
    "spec": "attn_export.bench.peers_spec",
    "roof": "attn_export.bench.peers_roofline",
}
"""The module of every kind of candidate; each has `make(options, threads) -> Prepared`."""

Make = Callable[[Mapping[str, Any], int], Prepared]


def main() -> None:
    """Serve one candidate until the other process is gone."""
    kind, memory_mib, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    say = Voice(private_stdout())
    jobs = jobs_from_stdin()
    limit_memory(memory_mib)
    try:
        _serve(importlib.import_module(KINDS[kind]).make, threads, jobs, say)
    except Exception as error:
        say("failed", outcome=outcome_of(error), reason=one_line(error))


def _serve(make: Make, threads: int, jobs: queue.Queue[dict[str, Any] | None], say: Voice) -> None:
    prepared: Prepared | None = None
    while (job := jobs.get()) is not None:
        if job["do"] == "prepare":
            prepared = make(job["options"], threads)
            gc.collect()
            gc.disable()
            growth = _first_run(prepared)
            (latency,) = _times(prepared, 1)
            say("prepared", growth=growth, latency=latency, facts=prepared.facts)
        else:
            assert prepared is not None
            if job["warm"]:
                prepared.run()
            say("times", seconds=_times(prepared, job["runs"]))


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
