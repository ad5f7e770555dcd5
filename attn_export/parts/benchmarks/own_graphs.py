"""Candidates that run an ONNX graph in ONNX Runtime.

Graphs whose export needs torch are written by a separate process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.parts.benchmarks.feeds import Feed, Prepared, empty, filled
from attn_export.parts.benchmarks.measurements import Candidate, Work
from attn_export.runtimes.child import ChildFailedError, call_in_child
from attn_export.runtimes.engines.ort_cpu import (
    CPU_PROVIDER,
    dtype_name,
    sdk,
    session_options,
    value_on,
)
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphFile

# -- graphs that a process with torch writes ----------------------------------------------------


EXPORT_SECONDS = 600.0
"""Time limit of an export, which takes seconds to minutes. Its memory is limited as that of the
process that calls it is."""


def ensure_graph_file(options: Mapping[str, Any]) -> Path:
    """Return the graph file of a candidate; if it is missing, run its ``export`` job first."""
    file = Path(options["file"])
    if "export" in options and not file.exists():
        make_graph(options["export"], file)
    return file


def make_graph(job: Mapping[str, Any], file: Path) -> None:
    """Export a graph in a process of its own."""
    arguments = {**job, "file": str(file)}
    limits = dataclasses.replace(Limits.default(), seconds=EXPORT_SECONDS, memory_mib=None)
    try:
        call_in_child(arguments.pop("function"), arguments, limits)
    except ChildFailedError as error:
        raise RuntimeError(f"the export failed: {error}") from error


# -- graphs as candidates -----------------------------------------------------------------------


def graph_options(
    file: Path, inputs: Mapping[str, Feed], outputs: Mapping[str, Feed], **others: object
) -> dict[str, Any]:
    """Return the options of a candidate that runs a graph, as `make_in_ort` takes them."""
    return {
        "file": str(file),
        "inputs": {name: feed.to_json() for name, feed in inputs.items()},
        "outputs": {name: feed.to_json() for name, feed in outputs.items()},
        **others,
    }


def as_candidate(
    name: str,
    folder: Path,
    graph: GraphFile,
    inputs: Mapping[str, Feed],
    outputs: Mapping[str, Feed],
    work: Work,
) -> Candidate:
    """Return a candidate that runs a graph in ONNX Runtime."""
    graph_inputs = {
        name: dataclasses.replace(feed, dtype=graph.dtypes.get(name, feed.dtype))
        for name, feed in inputs.items()
    }
    options = graph_options(
        folder / graph.name, graph_inputs, outputs,
        layouts={name: list(axes) for name, axes in graph.layouts.items()},
        bound=dict(graph.bound),
    )  # fmt: skip
    return Candidate(name, "ours", "graph", options, work)


# -- a graph in ONNX Runtime, with inputs and outputs bound as in a serving loop ----------------


def make_in_ort(options: Mapping[str, Any], threads: int) -> Prepared:
    """Return a graph with bound inputs and outputs, a run of which returns their arrays by name.

    `options`: Plain values by name: ``file``, the graph; ``inputs`` and ``outputs``, feeds by name;
    outputs without one are allocated each run; ``layouts``, for some names the permutation of the
    feed's axes that the graph expects; ``bound``, for some outputs the input into whose memory they
    are written; ``export``, see `ensure_graph_file`.
    """
    file = ensure_graph_file(options)
    session = sdk().InferenceSession(
        file, session_options(threads, file, spin=True), providers=[CPU_PROVIDER]
    )
    binding, arrays = _bind(session, options)

    def run() -> object:
        session.run_with_iobinding(binding)
        return arrays  # the binding does not keep the memory of the arrays alive

    return Prepared(run, {"provider": CPU_PROVIDER, "bound": sorted(arrays)})


def _bind(session: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """Bind the graph's inputs and outputs. The arrays must live as long as the binding."""
    binding = session.io_binding()
    arrays: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    for number, arg in enumerate(session.get_inputs()):
        feed = _feed(options, "inputs", arg.name)
        arrays[arg.name] = filled(feed, seed=number)
        values[arg.name] = ort_value(arrays[arg.name])
        binding.bind_ortvalue_input(arg.name, values[arg.name])
    for arg in session.get_outputs():
        input_name = options.get("bound", {}).get(arg.name)
        if input_name is None and arg.name not in options["outputs"]:
            binding.bind_output(arg.name)
            continue
        if input_name is None:
            # Memory is not touched here: the first run must include the pages of its outputs.
            feed = dataclasses.replace(
                _feed(options, "outputs", arg.name), dtype=dtype_name(arg.type)
            )
            arrays[arg.name] = empty(feed)
            values[arg.name] = ort_value(arrays[arg.name])
        binding.bind_ortvalue_output(arg.name, values[input_name or arg.name])
    return binding, arrays


def _feed(options: Mapping[str, Any], side: str, name: str) -> Feed:
    """Return the feed of an input or output, with its axes in the order of the graph."""
    if name not in options[side]:
        raise ValueError(f"the graph has {name}, for which no sizes are given")
    feed = Feed.from_json(options[side][name])
    axes = options.get("layouts", {}).get(name)
    return feed.transpose(axes) if axes else feed


def ort_value(array: np.ndarray) -> Any:
    """Return an ONNX Runtime value that shares the memory of an array of any shape."""
    value = value_on(array)
    if array.size and value.data_ptr() != array.ctypes.data:
        raise RuntimeError("this ONNX Runtime copies arrays instead of sharing their memory")
    return value
