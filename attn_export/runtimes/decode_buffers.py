"""Buffers of keys and values that stay, and a graph in ONNX Runtime that reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.errors import RuntimeFailure, UsageError, one_line
from attn_export.results import GraphFile
from attn_export.runtimes.ort_cpu import PROVIDER, array_of, sdk, session_options, value_on
from attn_export.runtimes.ort_cuda import CudaEngine, OrtCuda, cuda_session
from attn_export.system_info import missing_package
from attn_export.tensorfile import ArrayDict, numpy_dtype

# -- buffers of keys and values with more capacity than keys ------------------------------------


CAPACITY = "capacity"
"""Name of the axis along which a cache is preallocated."""

Axes = tuple[str | int, ...]


class Caches:
    """One buffer for each cache of a graph, in the graph's order of axes.

    Args:
        axes: The axes of each, by name: ``("batch", 2, "capacity", 64)``.
        dtype: Of their elements.
        batch: Rows.
        capacity: The number of keys that fit.
        device: ``"cpu"`` or ``"cuda"``: where the buffers lie.

    Attributes:
        values: The buffers as values of ONNX Runtime, by the names of the graph's inputs.
            Unwritten elements are 0.
        batch: Rows.
        capacity: The number of keys that fit.
    """

    def __init__(
        self,
        axes: Mapping[str, Axes],
        dtype: np.dtype,
        batch: int,
        capacity: int,
        device: str = "cpu",
    ) -> None:
        self._axes, self._dtype, self._device = dict(axes), dtype, device
        self.batch, self.capacity = batch, capacity
        self._put({name: self._empty(name) for name in axes})

    def grow(self, capacity: int) -> None:
        """Grow to the given capacity; keep the held keys."""
        held, self.capacity = self._held(), max(capacity, self.capacity)
        arrays = {name: self._empty(name) for name in held}
        for name, array in held.items():
            arrays[name][tuple(slice(size) for size in array.shape)] = array
        self._put(arrays)

    def reorder(self, rows: np.ndarray) -> None:
        """Let row i hold what row ``rows[i]`` held; there may be more rows then, or fewer."""
        self.batch = len(rows)
        places = {name: axes.index("batch") for name, axes in self._axes.items()}
        self._put(
            {
                name: np.ascontiguousarray(np.take(array, rows, axis=places[name]))
                for name, array in self._held().items()
            }
        )

    def write(self, name: str, array: np.ndarray) -> None:
        """Replace what a buffer holds.

        Args:
            name: The input of the graph.
            array: Of the buffer's shape and type.
        """
        if self._device == "cpu":
            self._arrays[name][...] = array
        else:
            self.values[name].update_inplace(value_on(np.ascontiguousarray(array)))

    def _put(self, arrays: dict[str, np.ndarray]) -> None:
        self.values = {name: value_on(array, self._device) for name, array in arrays.items()}
        # Values on the CPU do not own their memory: these arrays have to live as long.
        self._arrays = arrays if self._device == "cpu" else {}

    def _held(self) -> dict[str, np.ndarray]:
        if self._device == "cpu":
            return self._arrays
        return {name: array_of(value) for name, value in self.values.items()}

    def _empty(self, name: str) -> np.ndarray:
        sizes = {"batch": self.batch, CAPACITY: self.capacity}
        # Not np.empty: unwritten values get weight 0, and 0 * NaN is NaN.
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in self._axes[name]]
        return np.zeros(shape, self._dtype)


# -- A graph in ONNX Runtime whose inputs and outputs lie in buffers that stay ------------------


def load_session(graph: Path, threads: int | None, device: str = "cpu") -> Any:
    """Return an ONNX Runtime session. Its threads spin, as steps follow closely.

    Args:
        graph: The file of the graph.
        threads: The number of threads.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        RuntimeFailure: If ONNX Runtime is missing or refuses the graph, or does not run its
            attention on the device.
    """
    try:
        onnxruntime = sdk()
    except ImportError as error:
        raise RuntimeFailure(missing_package("onnxruntime")) from error
    options = session_options(threads or 0, graph, spin=True)
    try:
        if device == "cuda":
            OrtCuda().prepare()
            engine = CudaEngine(graph, *cuda_session(threads or 0, {}))
        else:
            return onnxruntime.InferenceSession(graph, options, providers=[PROVIDER])
    except Exception as error:
        raise RuntimeFailure(f"ONNX Runtime refuses {graph}: {one_line(error)}") from error
    if engine.objection():
        raise RuntimeFailure(f"{graph}: {engine.objection()}; choose another dialect")
    return engine.session


class BoundGraph:
    """A session with a buffer for every input and output.

    Args:
        session: Of ONNX Runtime.
        manifest: The bundle's, for shapes and types.
        sizes: Of every dynamic axis.
        caches: The buffers of the caches, by input; values of ONNX Runtime.
        form: Outputs that lie in the buffer of an input, and types of inputs.

    Attributes:
        sizes: Of every dynamic axis.
        inputs: The buffers to write into, but for the caches.
        outputs: The buffers to read from, but for those of inputs; the next run overwrites them.
    """

    def __init__(
        self,
        session: Any,
        manifest: Mapping[str, Any],
        sizes: Mapping[str, int],
        caches: Mapping[str, Any],
        form: GraphFile,
    ) -> None:
        bound = form.bound
        self.sizes = dict(sizes)
        self._session, self._binding = session, session.io_binding()
        held = {name: entry for name, entry in manifest["inputs"].items() if name not in caches}
        self.inputs = {
            name: self._buffer(entry["shape"], form.dtypes.get(name, entry["dtype"]))
            for name, entry in held.items()
        }
        self.outputs = {
            name: self._buffer(entry["shape"], entry["dtype"])
            for name, entry in manifest["outputs"].items()
            if name not in bound
        }
        values = {**caches, **{name: value_on(array) for name, array in self.inputs.items()}}
        for name, value in values.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, source in bound.items():
            self._binding.bind_ortvalue_output(name, values[source])
        self._order = [*bound, *self.outputs]  # a binding has its outputs as they were bound
        # ONNX Runtime infers 0 keys for the weights that `Attention` returns, and refuses larger
        # buffers.
        believed = {output.name: output.shape for output in session.get_outputs()}
        self._copied = [n for n, a in self.outputs.items() if not _fits(a.shape, believed[n])]
        for name, array in self.outputs.items():
            if name in self._copied:
                self._binding.bind_output(name)
            else:
                self._binding.bind_ortvalue_output(name, value_on(array))

    def run(self) -> None:
        """Run once.

        Raises:
            RuntimeFailure: If ONNX Runtime does not.
        """
        for name in self._copied:  # or the last result would be its buffer
            self._binding.bind_output(name)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise RuntimeFailure(f"ONNX Runtime failed: {one_line(error)}") from error
        if self._copied:
            made = dict(zip(self._order, self._binding.get_outputs(), strict=True))
            for name in self._copied:
                self.outputs[name][...] = array_of(made[name])

    def _buffer(self, axes: list[str | int], dtype: str) -> np.ndarray:
        shape = [self.sizes[axis] if isinstance(axis, str) else axis for axis in axes]
        return np.zeros(shape, numpy_dtype(dtype))


def _fits(shape: tuple[int, ...], believed: list[int | str | None]) -> bool:
    return all(not isinstance(b, int) or b == size for size, b in zip(shape, believed, strict=True))


# -- checks of inputs ---------------------------------------------------------------------------

SHOWN = 60
"""Number of characters of a wrong value in a message."""


def arrays_of(inputs: Mapping[str, object]) -> ArrayDict:
    """Return the inputs as arrays.

    Raises:
        UsageError: If something is no array, or the queries are no `[B, L, E]` with L ≥ 1.
    """
    try:
        given = {name: np.asarray(array) for name, array in inputs.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"an input is no array: {one_line(error)}") from error
    query = given["query"]
    if query.ndim != 3:
        raise UsageError(f"query is {list(query.shape)}; give [batch, query_len, embed_dim]")
    if not query.shape[0] or not query.shape[1]:
        raise UsageError(f"query is {list(query.shape)}, which is empty; give one token or more")
    return given


def check_inputs(
    given: ArrayDict,
    described: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, int],
    keys: int,
) -> None:
    """Raise UsageError unless these are the inputs that are wanted.

    Args:
        given: By name.
        described: The dtype and the shape of each that is wanted, as a manifest has them.
        sizes: Of the batch and of the new tokens.
        keys: The number of keys of the longest row, with its new ones.
    """
    for name in sorted(set(described) ^ set(given)):
        problem = "is missing" if name in described else "is not wanted"
        raise UsageError(f"{name} {problem}; give {', '.join(described)}")
    for name, array in given.items():
        shape = [{**sizes, CAPACITY: keys}.get(axis, axis) for axis in described[name]["shape"]]
        if list(array.shape) != shape:
            raise UsageError(f"{name} is {list(array.shape)}, but should be {shape}")
        dtype = numpy_dtype(described[name]["dtype"])
        if array.dtype != dtype:
            raise UsageError(f"{name} is {array.dtype}; give {dtype}")


def lengths_of(lengths: Sequence[int] | None, rows: int, tokens: int) -> np.ndarray:
    """Return the number of own tokens of each row: int64 `[B]`; all of them by default.

    Args:
        lengths: The number of own tokens of each row, or None for all.
        rows: The number of rows.
        tokens: The number of tokens of the longest row.

    Raises:
        UsageError: If there is not one number for each row, or one is out of range.
    """
    if lengths is None:
        return np.full(rows, tokens, np.int64)
    own = _whole_numbers(lengths)
    if own is None or own.shape != (rows,) or (own < 1).any() or (own > tokens).any():
        raise UsageError(
            f"lengths are {_shown(lengths)}; give {rows} whole numbers from 1 to {tokens}, one for "
            "each row"
        )
    return own


def rows_of(rows: Sequence[int], batch: int) -> np.ndarray:
    """Return row numbers: int64, one or more.

    Args:
        rows: The rows to keep, in order.
        batch: The number of rows of the cache.

    Raises:
        UsageError: If there is no such row.
    """
    chosen = _whole_numbers(rows)
    if chosen is None or chosen.ndim != 1 or not chosen.size:
        raise UsageError(f"rows are {_shown(rows)}; give the number of a row for each new one")
    if (chosen < 0).any() or (chosen >= batch).any():
        raise UsageError(f"rows are {_shown(rows)}; the cache has rows 0 to {batch - 1}")
    return chosen


def _whole_numbers(values: object) -> np.ndarray | None:
    """Return the values as int64; None if they are not integers."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else None


def _shown(values: object) -> str:
    """Shorten values for a message of one line."""
    text = " ".join(str(values).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
