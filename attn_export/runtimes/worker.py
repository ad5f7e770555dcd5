"""The runtime's own process: `python -m attn_export.runtimes.worker NAME LIMITS`.

Exchanges JSON, one object a line. It sends `ready`; it receives a graph and cases as files; it
sends `loaded`, then `case` for each, then `done`, or `failed`. Tensors travel as ONNX TensorProto
files, so that a runner in any language can do the same.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from attn_export.errors import one_line
from attn_export.runtimes.axis_order import in_order, laid_out
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.ipc import (
    EventWriter,
    jobs_from_stdin,
    limit_memory,
    outcome_of,
    private_stdout,
)
from attn_export.runtimes.protocol import Engine, Runtime, Tunable
from attn_export.runtimes.stepwise import decode
from attn_export.tensorfile import ArrayDict, read_tensors, write_tensors


def main() -> None:
    """Serve one graph, then end."""
    name, memory_mib, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    send = EventWriter(private_stdout())
    jobs = jobs_from_stdin()
    limit_memory(memory_mib)
    engine_kind = runtime(name)
    try:
        engine_kind.prepare()
        send("ready")
        job = jobs.get()
        if job is None:
            return
        _serve(_loaded(engine_kind, job, threads), job, send)
    except Exception as error:
        send("failed", outcome=outcome_of(error), reason=one_line(error))


def _loaded(kind: Runtime, job: dict[str, Any], threads: int) -> Engine:
    graph, options = Path(job["graph"]), job["options"]
    if not options:
        return kind.load(graph, threads)
    assert isinstance(kind, Tunable)
    return kind.load_with(graph, threads, options)


def _serve(engine: Any, job: dict[str, Any], send: EventWriter) -> None:
    send("loaded", facts=engine.facts())
    for case in job["cases"]:
        started = time.perf_counter()
        try:
            inputs = read_tensors(Path(case["inputs"]), "input", job["inputs"])
            outputs = _outputs(engine, inputs, job, whole_decode=case["decode"])
        except Exception as error:
            if outcome_of(error) != "refused":
                raise  # nothing more will come from this engine
            send("case", name=case["name"], error=one_line(error))
            continue
        _store(outputs, Path(case["outputs"]))
        send(
            "case",
            name=case["name"],
            outputs=len(outputs),
            seconds=time.perf_counter() - started,
        )
    send("done", objection=engine.objection())


def _store(outputs: ArrayDict, folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
        write_tensors(folder, "output", outputs)
    except OSError as error:
        raise RuntimeError(
            f"its outputs cannot be stored in the temporary folder: {error.strerror}; "
            "make room there, or name another by TMPDIR"
        ) from error


def _outputs(
    engine: Any, inputs: ArrayDict, job: dict[str, Any], *, whole_decode: bool
) -> ArrayDict:
    def run(inputs: ArrayDict) -> ArrayDict:
        layouts = job["layouts"]
        taken = laid_out(inputs, layouts, job["dtypes"])
        return in_order(engine.run(taken, job["bound"]), layouts)

    if not whole_decode:
        return run(inputs)
    return decode(run, inputs, job["axes"], job["fixed"])


if __name__ == "__main__":
    main()
