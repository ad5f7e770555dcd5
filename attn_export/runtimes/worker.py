"""The runtime's own process: `python -m attn_export.runtimes.worker NAME LIMITS`.

Speaks JSON, one object a line. It says `ready`; it is told a graph and cases as files; it says
`loaded`, then `case` for each, then `done`, or `failed`. Tensors travel as ONNX TensorProto
files, so that a runner in any language can do the same.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from attn_export.errors import one_line
from attn_export.runtimes.catalogue import runtime
from attn_export.tensorfile import read_tensors, write_tensors

OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory")


def main() -> None:
    """Serve one graph, then end."""
    name, memory_mib, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    say = Voice(_private_stdout())
    jobs = _jobs_from_stdin()
    _limit_memory(memory_mib)
    engine_kind = runtime(name)
    try:
        engine_kind.prepare()
        say("ready")
        job = jobs.get()
        if job is None:
            return
        _serve(engine_kind.load(Path(job["graph"]), threads), job, say)
    except Exception as error:
        say("failed", outcome=_outcome(error), reason=one_line(error))


class Voice:
    """Says events to the process that asked."""

    def __init__(self, channel: TextIO) -> None:
        self._channel = channel

    def __call__(self, event: str, **values: Any) -> None:
        """Say one event."""
        self._channel.write(json.dumps({"event": event, **values}) + "\n")
        self._channel.flush()


def _serve(engine: Any, job: dict[str, Any], say: Voice) -> None:
    say("loaded", facts=engine.facts())
    for case in job["cases"]:
        started = time.perf_counter()
        try:
            inputs = read_tensors(Path(case["inputs"]), "input", job["inputs"])
            outputs = engine.run(inputs)
        except Exception as error:
            if _outcome(error) == "out of memory":
                raise
            say("case", name=case["name"], error=one_line(error))
            continue
        folder = Path(case["outputs"])
        folder.mkdir(parents=True)
        write_tensors(folder, "output", outputs)
        say(
            "case",
            name=case["name"],
            outputs=len(outputs),
            seconds=time.perf_counter() - started,
        )
    say("done", objection=engine.objection())


def _private_stdout() -> TextIO:
    """The pipe to the other process; what engines print to stdout goes to stderr instead."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _jobs_from_stdin() -> queue.Queue[dict[str, Any] | None]:
    """Jobs as they come. When the other process is gone, so is this one, whatever it is doing."""
    jobs: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return jobs


def _limit_memory(mib: int) -> None:
    if mib <= 0:
        return
    import resource

    # RLIMIT_DATA counts what is allocated, not mapped files; RLIMIT_AS would refuse CUDA, which
    # reserves far more address space than it uses.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = mib << 20 if hard == resource.RLIM_INFINITY else min(mib << 20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _outcome(error: Exception) -> str:
    if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
        return "out of memory"
    return "refused"


if __name__ == "__main__":
    main()
