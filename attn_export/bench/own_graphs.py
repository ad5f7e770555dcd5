"""Graphs as candidates: in ONNX Runtime, in OpenVINO, or written by a process with torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.bench.feeds import Feed, Prepared, empty, filled
from attn_export.bench.measurements import Candidate, Cost
from attn_export.results import GraphFile
from attn_export.runtimes.ort_cpu import PROVIDER, sdk, session_options, value_on

# -- graphs that a process with torch writes, so that their users need none ---------------------


TAIL = 300
"""Number of characters kept of the output of a failed exporter."""


def file_of(options: Mapping[str, Any]) -> Path:
    """Return the file of a candidate; if it is missing, run its ``export`` job first.

    Raises:
        RuntimeError: If the exporter fails; with its message.
    """
    file = Path(options["file"])
    if "export" in options and not file.exists():
        make_graph(options["export"], file)
    return file


def make_graph(job: Mapping[str, Any], file: Path) -> None:
    """Do one job of `peers_export`.

    Args:
        job: The job, as JSON values.
        file: The file to write.

    Raises:
        RuntimeError: If it fails; with its message.
    """
    module = "attn_export.bench.peers_export"
    command = [sys.executable, "-P", "-m", module, json.dumps(job), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"the export failed: {said[-1][-TAIL:]}")


# -- one of our own graphs as a candidate, with all that its run needs --------------------------


def as_candidate(
    name: str,
    folder: Path,
    graph: GraphFile,
    inputs: Mapping[str, Feed],
    outputs: Mapping[str, Feed],
    work: Cost,
) -> Candidate:
    """Return a graph as a candidate in ONNX Runtime.

    Args:
        name: Its name in the contest.
        folder: The folder of the graph.
        graph: Its file, its layouts, and what is written in place.
        inputs: As the bundle states them.
        outputs: Likewise.
        work: The work of one run.
    """
    options = {
        "file": str(folder / graph.name),
        "inputs": {
            name: dataclasses.replace(feed, dtype=graph.dtypes.get(name, feed.dtype)).to_json()
            for name, feed in inputs.items()
        },
        "outputs": {name: feed.to_json() for name, feed in outputs.items()},
        "layouts": {name: list(axes) for name, axes in graph.layouts.items()},
        "bound": dict(graph.bound),
    }
    return Candidate(name, "ours", "graph", options, work)


# -- a graph in ONNX Runtime, everything bound, as in a serving loop ----------------------------


def make_in_ort(options: Mapping[str, Any], threads: int) -> Prepared:
    """Load a graph and bind it; a run gives the arrays that are bound, by name.

    Args:
        options: ``file``; ``inputs`` and ``outputs``, feeds by name (an output without one is
            allocated at every run); ``layouts``, by name the order in which the graph has the
            axes of a feed; ``bound``, by output the input whose memory it is written into;
            ``export``, see `file_of`.
        threads: Threads for computing. They spin within a run, as by default.

    Raises:
        Exception: Any error of the exporter or ONNX Runtime.
    """
    session = _session(file_of(options), threads)
    binding, arrays = _bind(session, options)

    def run() -> object:
        session.run_with_iobinding(binding)
        return arrays  # what is bound is not kept alive by the binding

    return Prepared(run, {"provider": PROVIDER, "bound": sorted(arrays)})


def _session(file: Path, threads: int) -> Any:
    options = session_options(threads, file, spin=True)
    return sdk().InferenceSession(file, options, providers=[PROVIDER])


def _bind(session: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """Bind what the graph has; the arrays must live as long as the binding."""
    binding = session.io_binding()
    arrays: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    for number, end in enumerate(session.get_inputs()):
        feed = _feed(options, "inputs", end.name)
        arrays[end.name] = filled(feed, seed=number)
        values[end.name] = ort_value(arrays[end.name])
        binding.bind_ortvalue_input(end.name, values[end.name])
    for end in session.get_outputs():
        shared = options.get("bound", {}).get(end.name)
        if shared is None and end.name not in options["outputs"]:
            binding.bind_output(end.name)
            continue
        if shared is None:
            # Untouched: that an output takes memory belongs to the first run.
            feed = dataclasses.replace(_feed(options, "outputs", end.name), dtype=_dtype(end))
            arrays[end.name] = empty(feed)
            values[end.name] = ort_value(arrays[end.name])
        binding.bind_ortvalue_output(end.name, values[shared or end.name])
    return binding, arrays


def _dtype(end: Any) -> str:
    """Return the numpy name of the type of an input or output."""
    name: str = end.type.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)


def _feed(options: Mapping[str, Any], side: str, name: str) -> Feed:
    """Return the feed of an input or output, in the order of the graph's axes."""
    if name not in options[side]:
        raise ValueError(f"the graph has {name}, for which no sizes are given")
    feed = Feed.from_json(options[side][name])
    axes = options.get("layouts", {}).get(name)
    return feed.laid_out(axes) if axes else feed


def ort_value(array: np.ndarray) -> Any:
    """Return an ONNX Runtime value that shares the memory of an array."""
    value = value_on(array)
    if array.size and value.data_ptr() != array.ctypes.data:
        raise RuntimeError("this ONNX Runtime copies arrays instead of sharing their memory")
    return value


# -- a graph in OpenVINO on the CPU, in float32 -------------------------------------------------


def make_in_openvino(options: Mapping[str, Any], threads: int) -> Prepared:
    """Load a graph; its inputs share memory, its outputs stay in OpenVINO's own.

    Args:
        options: ``file``, ``inputs``, feeds by name, and ``export``, see `file_of`.
        threads: Threads for computing.

    Raises:
        Exception: Any error of OpenVINO.
    """
    from attn_export.runtimes import openvino as openvino_runtime

    openvino = openvino_runtime.sdk()  # installed where it takes part only
    core = openvino.Core()
    model = core.read_model(file_of(options))
    config = {
        # By default it computes in bfloat16 where the processor can.
        "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1,
    }  # fmt: skip
    request = core.compile_model(model, "CPU", config).create_infer_request()
    arrays = []
    for number, port in enumerate(model.inputs):
        array = filled(Feed.from_json(options["inputs"][port.get_any_name()]), seed=number)
        request.set_tensor(port.get_any_name(), openvino.Tensor(array, shared_memory=True))
        arrays.append(array)

    def run() -> object:
        request.infer()
        return arrays

    return Prepared(run, {"device": "CPU", "precision": "f32"})
