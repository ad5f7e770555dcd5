"""Inputs of a `DecodeSession`, its preallocated KV caches, and a session bound to buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.cases.draw import concrete_shape
from attn_export.errors import RuntimeFailure, UsageError, one_line
from attn_export.runtimes.engines.ort_cpu import (
    CPU_PROVIDER,
    array_of,
    sdk,
    session_options,
    value_on,
)
from attn_export.runtimes.engines.ort_cuda import CudaEngine, OrtCuda, cuda_session
from attn_export.schema import GraphFile, Manifest, TensorSignature
from attn_export.spec import Shape
from attn_export.system_info import missing_package
from attn_export.tensorfile import ArrayDict, numpy_dtype

CAPACITY = "capacity"
"""Name of the axis along which a cache is preallocated."""

# -- inputs: checks, and what padding holds -----------------------------------------------------


def clear_padding(buffer: np.ndarray, axes: Shape, ends: Mapping[str, np.ndarray]) -> None:
    """Set elements of an input to 0 that belong to padding.

    No token attends to them, but a NaN or a large number in the cache would still be multiplied by
    the weight 0.

    `ends`: The size of each batch element along axes that are padded, int64 `[B]` by axis.
    """
    for axis in {*ends}.intersection(axes) if "batch" in axes else ():
        rows = np.moveaxis(buffer, (axes.index("batch"), axes.index(axis)), (0, 1))
        for row in np.flatnonzero(ends[axis] < rows.shape[1]):
            rows[row, ends[axis][row] :] = 0


SHOWN = 60
"""The number of characters of a wrong value that a message quotes."""


def arrays_of(inputs: Mapping[str, object]) -> ArrayDict:
    """Return the inputs as arrays."""
    try:
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"an input is not an array: {one_line(error)}") from error
    query = arrays["query"]
    if query.ndim != 3:
        raise UsageError(f"query is {list(query.shape)}; give [batch, query_len, embed_dim]")
    if not query.shape[0] or not query.shape[1]:
        raise UsageError(f"query is {list(query.shape)}, which is empty; give one token or more")
    return arrays


def check_inputs(
    arrays: ArrayDict,
    described: Mapping[str, TensorSignature],
    sizes: Mapping[str, int],
    keys: int,
) -> None:
    """Check that the inputs have the names, shapes and dtypes of the manifest."""
    for name in sorted(set(described) ^ set(arrays)):
        problem = "is missing" if name in described else "is not wanted"
        raise UsageError(f"{name} {problem}; give {', '.join(described)}")
    known = {**sizes, CAPACITY: keys}
    for name, array in arrays.items():
        axes = described[name].shape
        shape = [axis if isinstance(axis, int) else known.get(axis, axis) for axis in axes]
        if list(array.shape) != shape:
            raise UsageError(f"{name} is {list(array.shape)}, but should be {shape}")
        dtype = numpy_dtype(described[name].dtype)
        if array.dtype != dtype:
            raise UsageError(f"{name} is {array.dtype}; give {dtype}")


def whole_number(name: str, value: object, most: int) -> int:
    """Return an argument that must be a whole number from 1."""
    number = _whole_numbers(value)
    if number is None or number.ndim or not 1 <= number <= most:
        raise UsageError(f"{name} is {_shown(value)}; give a whole number from 1 to {most}")
    return int(number)


def lengths_of(lengths: Sequence[int] | None, rows: int, tokens: int) -> np.ndarray:
    """Return the number of tokens of each prompt without its padding, int64 `[B]`."""
    if lengths is None:
        return np.full(rows, tokens, np.int64)
    counts = _whole_numbers(lengths)
    if counts is None or counts.shape != (rows,) or counts.min() < 1 or counts.max() > tokens:
        raise UsageError(
            f"lengths are {_shown(lengths)}; give {rows} whole numbers from 1 to {tokens}, one for "
            "each row"
        )
    return counts


def rows_of(rows: Sequence[int], batch: int) -> np.ndarray:
    """Return the indices of batch elements as an int64 array `[N]` with N ≥ 1."""
    chosen = _whole_numbers(rows)
    if chosen is None or chosen.ndim != 1 or not chosen.size:
        raise UsageError(f"rows are {_shown(rows)}; give the number of a row for each new one")
    if (chosen < 0).any() or (chosen >= batch).any():
        raise UsageError(f"rows are {_shown(rows)}; the cache has rows 0 to {batch - 1}")
    return chosen


def _whole_numbers(values: object) -> np.ndarray | None:
    """Return the values as an int64 array; None if they are not integers."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else None


def _shown(values: object) -> str:
    """Shorten values for a message of one line."""
    text = " ".join(str(values).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"


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
        self._put({name: self._zeros(name) for name in axes})

    def grow(self, capacity: int) -> None:
        """Grow to at least this capacity and keep the cached keys and values."""
        old_arrays, self.capacity = self._current_arrays(), max(capacity, self.capacity)
        arrays = {name: self._zeros(name) for name in old_arrays}
        for name, array in old_arrays.items():
            arrays[name][tuple(slice(size) for size in array.shape)] = array
        self._put(arrays)

    def reorder(self, rows: np.ndarray) -> None:
        """Replace the caches of batch element i by those of ``rows[i]``: int64 `[new batch]`."""
        self.batch = len(rows)
        batch_axes = {name: axes.index("batch") for name, axes in self._axes.items()}
        self._put(
            {
                name: np.ascontiguousarray(np.take(array, rows, axis=batch_axes[name]))
                for name, array in self._current_arrays().items()
            }
        )

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

    def _zeros(self, name: str) -> np.ndarray:
        sizes = {"batch": self.batch, CAPACITY: self.capacity}
        # Not np.empty: unwritten values get the weight 0, and 0 * NaN is NaN.
        return np.zeros(concrete_shape(self._axes[name], sizes), self._dtype)


# -- an ONNX Runtime session with fixed buffers -------------------------------------------------


def load_session(graph: Path, threads: int | None, device: str) -> Any:
    """Return an ONNX Runtime session whose threads spin between runs, as steps follow closely."""
    try:
        onnxruntime = sdk()
    except ImportError as error:
        raise RuntimeFailure(missing_package("onnxruntime")) from error
    options = session_options(threads or 0, graph, spin=True)
    try:
        if device == "cpu":
            return onnxruntime.InferenceSession(graph, options, providers=[CPU_PROVIDER])
        OrtCuda().prepare()
        engine = CudaEngine(graph, *cuda_session(threads or 0, {}))
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
