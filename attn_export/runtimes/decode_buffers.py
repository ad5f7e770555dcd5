"""The graphs of a `DecodeSession`, its preallocated KV caches, and a session bound to buffers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.cases.draw import concrete_shape
from attn_export.dialect_names import CUDA, ORT, PORTABLE, STANDARD
from attn_export.errors import BundleError, RuntimeFailure, UsageError, choose, one_line
from attn_export.interface import Shape
from attn_export.runtimes.decode_inputs import CAPACITY, QUERY_LEN
from attn_export.runtimes.engines.ort_cpu import (
    CPU_PROVIDER,
    array_of,
    sdk,
    session_options,
    value_on,
)
from attn_export.runtimes.engines.ort_cuda import CudaEngine, OrtCuda, cuda_session, no_cuda_device
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphFile, Manifest
from attn_export.system_info import missing_package
from attn_export.tensorfile import numpy_dtype

# -- the graphs of a bundle ---------------------------------------------------------------------

PREFERRED = {"cpu": (ORT, STANDARD, PORTABLE), "cuda": (CUDA, STANDARD, ORT, PORTABLE)}
"""The dialects to choose from on each device, the fastest first."""


def check_device(device: str) -> None:
    """Raise an error if graphs cannot run on a device."""
    if not isinstance(device, str) or device not in PREFERRED:
        raise UsageError(f"unknown device {device!r}; {choose(device, PREFERRED)}")
    reason = no_cuda_device() if device == "cuda" else ""
    if reason:
        raise RuntimeFailure(f"no decoding on CUDA here: {reason}")


def select_graphs(
    files: Sequence[GraphFile], dialect: str | None, folder: Path, preferred: Sequence[str]
) -> list[GraphFile]:
    """Return the graphs of one dialect. The first takes all sizes, later ones are faster."""
    there = sorted({file.dialect for file in files})
    if dialect is not None and not (isinstance(dialect, str) and dialect in there):
        raise UsageError(f"{folder} has no {dialect} graphs; it has {', '.join(there)}")
    selected_dialect = dialect or next((name for name in preferred if name in there), "")
    chosen = sorted(
        (file for file in files if file.dialect == selected_dialect),
        key=lambda file: (len(file.fixed), QUERY_LEN in file.fixed),
    )
    if not chosen or chosen[0].fixed:
        raise BundleError(f"{folder} has no graph for any number of queries; build it again")
    return chosen


# -- preallocated KV caches ---------------------------------------------------------------------


class Caches:
    """One preallocated buffer for each cache of a graph, in the graph's order of axes.

    Attributes:
        values: The buffers as an `OrtValue` each, by input. Unwritten elements are 0.
    """

    def __init__(
        self,
        axes: Mapping[str, Shape],
        dtype: np.dtype,
        batch: int,
        capacity: int,
        device: str,
    ) -> None:
        self._axes, self._dtype, self._device = dict(axes), dtype, device
        self.batch, self.capacity = batch, capacity
        self._put({name: self._zeros(name, capacity) for name in axes})

    def grow(self, capacity: int) -> None:
        """Grow to at least this capacity and keep the cached keys and values."""
        old_arrays, capacity = self._current_arrays(), max(capacity, self.capacity)
        arrays = {name: self._zeros(name, capacity) for name in old_arrays}
        for name, array in old_arrays.items():
            arrays[name][tuple(slice(size) for size in array.shape)] = array
        self._put(arrays)
        self.capacity = capacity  # only now: there may be no memory for the arrays

    def rows(self, rows: np.ndarray) -> Caches:
        """Return new caches, whose batch element i is element ``rows[i]``: int64 `[new batch]`."""
        new = copy.copy(self)
        new.batch = len(rows)
        batch_axes = {name: axes.index("batch") for name, axes in self._axes.items()}
        new._put({
            name: np.ascontiguousarray(np.take(array, rows, axis=batch_axes[name]))
            for name, array in self._current_arrays().items()
        })  # fmt: skip
        return new

    def write(self, name: str, array: np.ndarray) -> None:
        """Replace the contents of a buffer.

        `array`: The new contents, of the buffer's shape and dtype.
        """
        if self._device == "cpu":
            self._arrays[name][...] = array
        else:
            self.values[name].update_inplace(value_on(np.ascontiguousarray(array)))

    def _put(self, arrays: dict[str, np.ndarray]) -> None:
        self.values = {name: value_on(array, self._device) for name, array in arrays.items()}
        # An OrtValue on the CPU uses the memory of its array: the arrays must live as long.
        self._arrays = arrays if self._device == "cpu" else {}

    def _current_arrays(self) -> dict[str, np.ndarray]:
        if self._device == "cpu":
            return self._arrays
        return {name: array_of(value) for name, value in self.values.items()}

    def _zeros(self, name: str, capacity: int) -> np.ndarray:
        sizes = {"batch": self.batch, CAPACITY: capacity}
        # Not np.empty: unwritten values get the weight 0, and 0 * NaN is NaN.
        return np.zeros(concrete_shape(self._axes[name], sizes), self._dtype)


# -- an ONNX Runtime session with fixed buffers -------------------------------------------------


def load_session(graph: Path, threads: int | None, device: str) -> Any:
    """Return an ONNX Runtime session whose threads spin between runs, as steps follow closely.

    `threads`: Their number; those above the number of cores would only wait. None for all cores.
    """
    threads = min(threads or 0, Limits.default().threads)
    try:
        onnxruntime = sdk()
    except ImportError as error:
        raise RuntimeFailure(missing_package("onnxruntime")) from error
    options = session_options(threads, graph, spin=True)
    try:
        if device == "cpu":
            return onnxruntime.InferenceSession(graph, options, providers=[CPU_PROVIDER])
        OrtCuda().prepare()
        engine = CudaEngine(graph, *cuda_session(threads, {}))
    except Exception as error:
        raise RuntimeFailure(f"ONNX Runtime refuses {graph}: {one_line(error)}") from error
    if engine.objection():
        raise RuntimeFailure(f"{graph}: {engine.objection()}; choose another dialect")
    return engine.session


class BoundGraph:
    """A session with a buffer for every input and output.

    Attributes:
        outputs: The buffers of the other outputs, which the next `run` overwrites.
    """

    def __init__(
        self,
        session: Any,
        manifest: Manifest,
        sizes: Mapping[str, int],
        caches: Mapping[str, Any],
        graph_file: GraphFile,
    ) -> None:
        bound = graph_file.bound
        self.sizes = dict(sizes)
        self._session, self._binding = session, session.io_binding()
        self.inputs = {
            name: self._buffer(signature.shape, graph_file.dtypes.get(name, signature.dtype))
            for name, signature in manifest.inputs.items()
            if name not in caches
        }
        self.outputs = {
            name: self._buffer(signature.shape, signature.dtype)
            for name, signature in manifest.outputs.items()
            if name not in bound
        }
        values = {**caches, **{name: value_on(array) for name, array in self.inputs.items()}}
        for name, value in values.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, source in bound.items():
            self._binding.bind_ortvalue_output(name, values[source])
        self._order = [*bound, *self.outputs]  # the order in which outputs are bound
        # ONNX Runtime infers 0 keys for the weights that `Attention` returns, and refuses buffers
        # of other shapes. Such outputs are copied after each run.
        inferred = {output.name: output.shape for output in session.get_outputs()}
        self._copied = [n for n, a in self.outputs.items() if not _matches(a.shape, inferred[n])]
        for name, array in self.outputs.items():
            if name in self._copied:
                self._binding.bind_output(name)
            else:
                self._binding.bind_ortvalue_output(name, value_on(array))

    def run(self) -> None:
        """Run once."""
        for name in self._copied:  # else ONNX Runtime would reuse the result of the last run
            self._binding.bind_output(name)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise RuntimeFailure(f"ONNX Runtime failed: {one_line(error)}") from error
        if self._copied:
            results = dict(zip(self._order, self._binding.get_outputs(), strict=True))
            for name in self._copied:
                self.outputs[name][...] = array_of(results[name])

    def _buffer(self, axes: Shape, dtype: str) -> np.ndarray:
        return np.zeros(concrete_shape(axes, self.sizes), numpy_dtype(dtype))


def _matches(shape: tuple[int, ...], inferred: list[int | str | None]) -> bool:
    return all(not isinstance(dim, int) or dim == n for n, dim in zip(shape, inferred, strict=True))
