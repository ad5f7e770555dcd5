"""A runtime's process, which calls `serve`.

It sends `ready` when the SDK is imported. Then it receives one job: paths of a graph and of the
cases. It sends `loaded`, a `slice` for each slice of a graph that runs in slices, a `case` for each
case, and `done`; or `failed` at any point. Tensors are passed as ONNX TensorProto files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.errors import one_line
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.child_main import Jobs, Send, outcome_of
from attn_export.runtimes.decode_steps import PAST_LENGTH, decode, decode_returned
from attn_export.runtimes.protocol import (
    SEPARATE,
    SEPARATE_BUFFERS,
    SLICES,
    Engine,
    Runtime,
    size_beside,
)
from attn_export.tensorfile import ArrayDict, mapped, read_tensors, write_tensors

# -- the layout of a graph ----------------------------------------------------------------------

Layouts = Mapping[str, Sequence[int]]
"""The permutation of axes of each input or output that a graph has transposed; see `GraphFile`."""


def to_graph_layout(
    inputs: Mapping[str, np.ndarray], layouts: Layouts, dtypes: Mapping[str, str]
) -> ArrayDict:
    """Return inputs, transposed and cast to the layout and dtypes of a graph."""

    def to_graph(name: str, array: np.ndarray) -> np.ndarray:
        if name in layouts:
            array = np.ascontiguousarray(array.transpose(layouts[name]))
        return array.astype(dtypes[name]) if name in dtypes else array

    return {name: to_graph(name, array) for name, array in inputs.items()}


def to_case_layout(outputs: Mapping[str, np.ndarray], layouts: Layouts) -> ArrayDict:
    """Return outputs of a graph, transposed back to the layout of the cases."""
    return {
        name: array.transpose(np.argsort(layouts[name])) if name in layouts else array
        for name, array in outputs.items()
    }


Job = Mapping[str, Any]
"""A job of `Worker.send_job`, or one of its cases."""


def serve(send: Send, jobs: Jobs, name: str, threads: str) -> None:
    """Load and run the graph of one job."""
    target = runtime(name)
    target.prepare()
    send("ready")
    job = jobs.get()
    engine = _loaded(target, job, int(threads))
    send("loaded", facts=engine.facts())
    engine.expect(_plain_runs(job), lambda: send("ran"))
    for case in job["cases"]:
        started = time.perf_counter()
        try:
            inputs = read_tensors(Path(case["inputs"]), "input", job["inputs"])
            outputs = _outputs(engine, inputs, job, case, separate=False)
            seconds = time.perf_counter() - started
            separate = _differing_separate(engine, inputs, outputs, job, case)
        except Exception as error:
            if outcome_of(error) != "refused":
                raise  # the engine can run no further case
            send("case", name=case["name"], error=one_line(error))
            continue
        folder = Path(case["outputs"])
        _store(outputs, folder)
        if separate:
            _store(separate, folder / SEPARATE)
        send(
            "case", name=case["name"], outputs=len(outputs), separate=len(separate), seconds=seconds
        )
    send("done", objection=engine.objection())


def _loaded(target: Runtime, job: Job, threads: int) -> Engine:
    """Return the graph of a job, in slices if its weights are larger than the job allows."""
    graph, most = Path(job["graph"]), job["slice_bytes"]
    if most is not None and not job["options"]:
        size = size_beside(graph)
        is_large = size > SLICES * most and job["cases"]
        if is_large and (engine := target.load_in_slices(graph, threads, most)):
            return engine
    return target.load(graph, threads, job["options"])


def _plain_runs(job: Job) -> Iterator[tuple[ArrayDict, Mapping[str, str]]]:
    """Yield the inputs and shared buffers of all runs that are not steps of a decode."""
    graph_file = job["graph_file"]
    for case in job["cases"]:
        if case["decode"]:
            continue
        folder = Path(case["inputs"])
        # Those of all runs are held at once.
        inputs = mapped(folder, "input", read_tensors(folder, "input", job["inputs"]))
        given = to_graph_layout(inputs, graph_file["layouts"], graph_file["dtypes"])
        yield given, graph_file["bound"]
        if graph_file["bound"]:
            yield given, {}


def _store(outputs: ArrayDict, folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
        write_tensors(folder, "output", outputs)
    except OSError as error:
        raise RuntimeError(
            f"its outputs cannot be stored in the temporary folder: {error.strerror}; "
            "free space there, or name another by TMPDIR"
        ) from error


def _outputs(
    engine: Engine, inputs: ArrayDict, job: Job, case: Job, *, separate: bool
) -> ArrayDict:
    graph_file = job["graph_file"]

    def run(inputs: Mapping[str, np.ndarray]) -> ArrayDict:
        given = to_graph_layout(inputs, graph_file["layouts"], graph_file["dtypes"])
        outputs = (
            _run_separately(engine, given) if separate else engine.run(given, graph_file["bound"])
        )
        return to_case_layout(outputs, graph_file["layouts"])

    if not case["decode"]:
        return run(inputs)
    if PAST_LENGTH not in inputs:  # not a layer of ours
        return decode_returned(run, inputs, job["axes"], job["caches"])
    return decode(run, inputs, job["axes"], graph_file["fixed"])


# -- runs in which no output shares the buffer of an input --------------------------------------


def _differing_separate(
    engine: Engine, inputs: ArrayDict, shared: ArrayDict, job: Job, case: Job
) -> ArrayDict:
    """Run a graph with a cache in place in buffers of its own, as a plain call of a runtime does.

    Returns:
        The outputs, if one of them differs in any bit from `shared`, the outputs of the run that
        shares buffers; else nothing.
    """
    graph_file = job["graph_file"]
    if not graph_file["bound"] or type(engine).run is Engine.run:  # which never shares buffers
        return {}
    try:
        separate = _outputs(engine, inputs, job, case, separate=True)
    except Exception as error:
        if outcome_of(error) != "refused":
            raise
        raise RuntimeError(f"{SEPARATE_BUFFERS}: {one_line(error)}") from error
    if not case["decode"] and _LEAVES_ROWS_UNSET in graph_file["features"]:
        _fill_unset_rows(separate, shared, inputs, graph_file["bound"])
    return {} if _equal_bits(separate, shared) else separate


def _run_separately(engine: Engine, inputs: ArrayDict) -> ArrayDict:
    """Run a graph without shared buffers, and check that its inputs stay as they were."""
    passed = {name: np.array(array) for name, array in inputs.items()}
    outputs: ArrayDict = engine.run(passed, {})
    for name, array in inputs.items():
        if not _equal_bits({name: array}, {name: passed[name]}):
            raise RuntimeError(f"the run changed its input {name}")
    return outputs


def _equal_bits(first: ArrayDict, second: ArrayDict) -> bool:
    return first.keys() == second.keys() and all(
        (array.shape, array.dtype, array.tobytes())
        == (second[name].shape, second[name].dtype, second[name].tobytes())
        for name, array in first.items()
    )


_LEAVES_ROWS_UNSET = "com.microsoft.GroupQueryAttention"
"""An operator that copies the rows of a cache up to the last new one. In a buffer of its own, it
leaves the others as the allocator returns them. No later step reads them."""


def _fill_unset_rows(
    separate: ArrayDict, shared: ArrayDict, inputs: ArrayDict, bound: Mapping[str, str]
) -> None:
    """Take rows `[B, Hkv, capacity, D]` behind the last one that was written from `shared`."""
    for name, source in bound.items():
        before, after, other = inputs[source], shared.get(name), separate.get(name)
        if after is None or other is None or not before.shape == after.shape == other.shape:
            continue  # the judge refuses it
        kept = (before == after) | ((before != before) & (after != after))  # NaN
        is_behind = np.flip(np.cumprod(np.flip(kept.all(axis=(1, 3)), 1), 1), 1)  # [B, capacity]
        separate[name] = np.where(is_behind[:, None, :, None], after, other)
