"""A graph in ONNX Runtime on the CPU, everything bound, as in a serving loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.bench.feeds import Feed, Prepared, empty, filled
from attn_export.bench.own_graphs import file_of
from attn_export.runtimes.ort_cpu import PROVIDER, sdk, session_options, value_on


def make(options: Mapping[str, Any], threads: int) -> Prepared:
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
