"""The runtime's own process: `python -m attn_export.runtimes.worker NAME LIMITS`.

Exchanges JSON, one object a line. It sends `ready`; it receives a graph and cases as files; it
sends `loaded`, then `case` for each, then `done`, or `failed`. Tensors travel as ONNX TensorProto
files, so that a runner in any language can do the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.errors import one_line
from attn_export.runtimes.axis_order import to_case_layout, to_graph_layout
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.ipc import (
    EventWriter,
    jobs_from_stdin,
    limit_memory,
    outcome_of,
    private_stdout,
)
from attn_export.runtimes.protocol import Engine, Runtime, Tunable
from attn_export.tensorfile import ArrayDict, read_tensors, write_tensors

# -- whole decodes, step by step ----------------------------------------------------------------

# One sequence is fed step by step into buffers that grow. The outputs of the steps are joined, and
# compared with the truth of one run on the whole sequence.

Axes = Mapping[str, Sequence[str | int]]

BATCH, NEW, CAPACITY_AXIS = "batch", "query_len", "capacity"
PAST, PRESENT, LENGTHS = "past_", "present_", "past_length"

BLOCK = 64
"""Number of keys by which the buffers grow."""

PROMPT, CHUNK, EVERY = 5, 3, 10
"""The tokens of the first step; later steps take one, but `CHUNK` at once every `EVERY` tokens."""


Run = Callable[[ArrayDict], ArrayDict]


def decode(run: Run, inputs: ArrayDict, axes: Axes, fixed: Mapping[str, int]) -> ArrayDict:
    """Decode sequences: all rows together, or one after the other where the graph takes one row.

    Args:
        run: Runs the graph once.
        inputs: Of the whole sequences; the caches among them are empty, and as long.
        axes: The names of the axes of every input and output.
        fixed: The axes that have one size in the graph, as in `GraphFile`.

    Returns:
        The outputs that one run on `inputs` should give.

    Raises:
        ValueError: If an output of a step has not the sizes of the step.
        Exception: Any error of `run`.
    """
    single = fixed.get(NEW) == 1
    if fixed.get(BATCH) != 1:
        return _decode(run, inputs, axes, single=single)
    batch = {name: axes[name].index(BATCH) for name in axes if BATCH in axes[name]}
    rows = []
    for row in range(inputs["query"].shape[batch["query"]]):
        own = {
            name: array.take([row], axis=batch[name]) if name in batch else array
            for name, array in inputs.items()
        }
        rows.append(_decode(run, own, axes, single=single))
    return {
        name: np.concatenate([row[name] for row in rows], batch[name]) if name in batch else array
        for name, array in rows[0].items()
    }


def _decode(run: Run, inputs: ArrayDict, axes: Axes, *, single: bool) -> ArrayDict:
    """Decode all rows together; see `decode`."""
    total = inputs["query"].shape[axes["query"].index(NEW)]
    capacity_axes = {
        n: axes[n].index(CAPACITY_AXIS)
        for n in inputs
        if n.startswith(PAST) and CAPACITY_AXIS in axes[n]
    }
    caches = {name: _fit(inputs[name], at, 0) for name, at in capacity_axes.items()}
    cache_length = capacity = 0
    steps: dict[str, list[np.ndarray]] = {}
    for count in _counts(total, single=single):
        if cache_length + count > capacity:
            capacity += BLOCK
            caches = {name: _fit(caches[name], at, capacity) for name, at in capacity_axes.items()}
        outputs = run(_piece(inputs, axes, cache_length, count, capacity) | caches)
        _check(outputs, axes, {NEW: count, CAPACITY_AXIS: capacity}, cache_length)
        for name, array in outputs.items():
            if NEW in axes.get(name, ()):
                part = _keys_as_whole(array, axes[name], capacity, total)
                steps.setdefault(name, []).append(part)
        caches = {name: outputs[PRESENT + name.removeprefix(PAST)] for name in capacity_axes}
        cache_length += count
    return {
        name: np.concatenate(steps[name], axes[name].index(NEW))
        if name in steps
        else _keys_as_whole(last, axes.get(name, ()), capacity, total)
        for name, last in outputs.items()
    }


def _counts(total: int, *, single: bool) -> Iterator[int]:
    """Yield the number of tokens of each step."""
    done = 0
    while done < total:
        chunk = CHUNK if done % EVERY == PROMPT - CHUNK else 1
        wanted = 1 if single else chunk if done else PROMPT
        count = min(wanted, total - done)
        yield count
        done += count


def _piece(
    inputs: ArrayDict, axes: Axes, cache_length: int, count: int, capacity: int
) -> ArrayDict:
    """Return the inputs of some new tokens, without the caches; masks cover `capacity` keys."""
    keys = cache_length + count
    piece = {}
    for name, array in inputs.items():
        part = array
        for at, axis in enumerate(axes[name]):
            if axis == NEW:
                part = part.take(range(cache_length, keys), axis=at)
            elif axis == CAPACITY_AXIS:
                part = _fit(_fit(part, at, keys), at, capacity)
        piece[name] = part
    return piece | {LENGTHS: np.full_like(inputs[LENGTHS], cache_length)}


def _check(outputs: ArrayDict, axes: Axes, sizes: Mapping[str, int], cache_length: int) -> None:
    """Raise ValueError for an output of other sizes: cut and put together it might look right."""
    for name, array in outputs.items():
        named = axes.get(name, array.shape)
        wanted = [
            sizes.get(str(axis), size) for axis, size in zip(named, array.shape, strict=False)
        ]
        if len(named) != array.ndim or list(array.shape) != wanted:
            raise ValueError(
                f"{name} is {list(array.shape)} where its axes are {list(named)}, after "
                f"{cache_length} tokens, with {sizes[NEW]} new ones and room for "
                f"{sizes[CAPACITY_AXIS]}"
            )


def _keys_as_whole(
    array: np.ndarray, axes: Sequence[str | int], capacity: int, total: int
) -> np.ndarray:
    """Return an output whose axis of keys is cut to `total`; learned keys stay last."""
    for at, axis in enumerate(axes):
        if isinstance(axis, str) and axis not in (BATCH, NEW):
            keys, learned = np.split(array, [capacity], axis=at)
            array = np.concatenate([_fit(keys, at, total), learned], axis=at)
    return array


def _fit(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Return an array of another size along an axis: cut, or padded with zeros."""
    shape = list(array.shape)
    shape[axis] = size
    fitted = np.zeros(shape, array.dtype)
    kept = tuple(slice(min(sizes)) for sizes in zip(array.shape, shape, strict=True))
    fitted[kept] = array[kept]
    return fitted


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
        taken = to_graph_layout(inputs, layouts, job["dtypes"])
        return to_case_layout(engine.run(taken, job["bound"]), layouts)

    if not whole_decode:
        return run(inputs)
    return decode(run, inputs, job["axes"], job["fixed"])


if __name__ == "__main__":
    main()
