"""`DecodeSession`: drives a bundle whose KV cache is written in place.

The session allocates the buffers of the cache and binds each both as an input and as an output of
the graph. A step writes its keys and values there. Where the graph can write into its input, the
cache is copied only when it grows or is reordered.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from attn_export.bundle.manifest import bundle_spec, read_bundle
from attn_export.cases.draw import add_sums
from attn_export.dialect_names import CUDA, ORT, PORTABLE, STANDARD
from attn_export.errors import BundleError, RuntimeFailure, UsageError
from attn_export.runtimes.decode_buffers import (
    CAPACITY,
    BoundGraph,
    Caches,
    arrays_of,
    check_inputs,
    clear_padding,
    lengths_of,
    load_session,
    rows_of,
    whole_number,
)
from attn_export.runtimes.engines.ort_cuda import no_cuda_device
from attn_export.schema import GraphFile, Manifest
from attn_export.spec import AttentionSpec, Shape
from attn_export.tensorfile import ArrayDict, numpy_dtype

QUERY_LEN, PAST_LENGTH = "query_len", "past_length"
_PREFERRED = {"cpu": (ORT, STANDARD, PORTABLE), "cuda": (CUDA, STANDARD, ORT, PORTABLE)}
"""The dialects to choose from on each device, the fastest first."""

BLOCK = 512

MOST_THREADS, MOST_KEYS = 1024, 2**24
"""The largest number of threads, and the largest block."""


class DecodeSession:
    """Decoding with one attention layer, in ONNX Runtime.

    Some graphs cannot write a cache into the buffer of their input: those with sinks, learned keys
    or bfloat16. For them the session copies the cache at every step. Threads take turns with a
    session: a call while another runs raises an error.

    Args:
        bundle: The folder of a bundle with ``cache = "in-place"``.
        dialect: The dialect of the graphs. Default: the first of
            `_PREFERRED[device]` that the bundle has.
        block: The number of keys by which a full cache grows.
        threads: The number of threads for computing. Default: the choice of ONNX Runtime, all
            cores.
        device: ``"cpu"``, or ``"cuda"``, which keeps the cache in the memory of the GPU.

    Attributes:
        lengths: The number of cached keys of each batch element, int64 `[B]`.

    Raises:
        UsageError: If the bundle has no such cache or no graph of the dialect, the device is
            unknown, or a number is out of range.
        BundleError: If the bundle is damaged.
        RuntimeFailure: If ONNX Runtime is missing or refuses a graph, there is no GPU, or the
            attention does not run on it.
    """

    def __init__(
        self,
        bundle: Path | str,
        *,
        dialect: str | None = None,
        block: int = BLOCK,
        threads: int | None = None,
        device: str = "cpu",
    ) -> None:
        _check_device(device)
        self._block = whole_number("block", block, MOST_KEYS)
        threads = None if threads is None else whole_number("threads", threads, MOST_THREADS)
        if not isinstance(bundle, str | Path):
            raise UsageError(f"bundle is a {type(bundle).__name__}; give the path of its folder")
        folder = Path(bundle)
        self._manifest = read_bundle(folder)
        self._pairs = self._manifest.next_inputs
        self._spec = _spec_in_place(folder, self._manifest)
        files = _select_graphs(
            [*self._manifest.graphs.values()], dialect, folder, _PREFERRED[device]
        )
        self._bound = dict(files[0].bound)
        self._layouts = files[0].layouts
        self._device, self._lock = device, threading.Lock()
        self._sessions = [
            (file, load_session(folder / file.name, threads, device)) for file in files
        ]
        self._caches: Caches | None = None
        self._bound_graph: BoundGraph | None = None
        self.lengths = np.zeros(0, np.int64)

    @property
    def capacity(self) -> int:
        """The number of keys of a batch element for which there is memory; 0 before `prefill`."""
        return 0 if self._caches is None else self._caches.capacity

    def prefill(
        self, query: np.ndarray, *, lengths: Sequence[int] | None = None, **inputs: np.ndarray
    ) -> ArrayDict:
        """Discard the cache, and run the prompts of a new batch.

        Args:
            query: `[B, L, E]`.
            lengths: The number of tokens of each prompt, `[B]`, where prompts of different
                lengths are padded on the right to L tokens. Requires causal attention, in which
                no token attends to the padding after it. Whatever inputs hold there is replaced
                by 0, and outputs are meaningless. Default: L for each.
            inputs: The other inputs of the bundle without the caches, such as `position_ids`.
                The axis of keys of `attn_mask` has the size L.

        Returns:
            The outputs by name, without the caches: `output [B, L, E]`, and `attn_weights` if
            the bundle has them, with as many keys as the mask.

        Raises:
            UsageError: If an input is missing, unknown, or of another shape or type, or another
                thread uses the session. The cache is unchanged then.
        """
        with self._alone():
            return self._prefill(arrays_of({"query": query, **inputs}), lengths)

    def _prefill(self, arrays: ArrayDict, lengths: Sequence[int] | None) -> ArrayDict:
        B, L, _ = arrays["query"].shape
        self._check(arrays, np.zeros(B, np.int64))
        counts = lengths_of(lengths, B, L)
        if not self._spec.causal and (counts < L).any():
            raise UsageError(
                "without causal attention tokens see the padding after them; leave lengths out "
                "and give prompts of one length"
            )
        self._caches = self._bound_graph = None
        self.lengths = np.zeros(B, np.int64)
        try:
            return self._run(arrays, counts)
        except BaseException:
            self._caches = self._bound_graph = None  # a step must not continue from nothing
            raise

    def step(self, query: np.ndarray, **inputs: np.ndarray) -> ArrayDict:
        """Run L new tokens, usually one, for every batch element.

        Args:
            query: `[B, L, E]`, with the batch size of the cache.
            inputs: As for `prefill`. The axis of keys of `attn_mask` has the size
                ``lengths.max() + L``.

        Returns:
            The same outputs as `prefill`.

        Raises:
            UsageError: If `prefill` was not called, an input is missing, unknown, or of another
                shape or type, or another thread uses the session.
        """
        with self._alone():
            return self._step(arrays_of({"query": query, **inputs}))

    def _step(self, arrays: ArrayDict) -> ArrayDict:
        if self._caches is None:
            raise UsageError("a step without a prompt; call prefill first")
        B, L, _ = arrays["query"].shape
        if len(self.lengths) != B:
            raise UsageError(
                f"query has {B} rows, the cache {len(self.lengths)}; give as many, or call prefill"
            )
        self._check(arrays, self.lengths)
        return self._run(arrays, np.full(B, L, np.int64))

    def reorder(self, rows: Sequence[int]) -> None:
        """Let batch element i continue from the cache of element ``rows[i]``, as in beam search.

        Args:
            rows: Indices of batch elements, `[N]` with N ≥ 1. The batch size becomes N.

        Raises:
            UsageError: If `prefill` was not called, an index is out of range, or another thread
                uses the session.
        """
        with self._alone():
            if self._caches is None:
                raise UsageError("nothing to reorder; call prefill first")
            chosen = rows_of(rows, len(self.lengths))
            self._caches.reorder(chosen)
            self.lengths = self.lengths[chosen]
            self._bound_graph = None

    # -- one run -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise UsageError("another thread uses this session; give each thread one of its own")
        try:
            yield
        finally:
            self._lock.release()

    def _check(self, arrays: ArrayDict, cached: np.ndarray) -> None:
        described = {
            name: signature
            for name, signature in self._manifest.inputs.items()
            if name not in (*self._pairs.values(), PAST_LENGTH)
        }
        B, L, _ = arrays["query"].shape
        check_inputs(arrays, described, {"batch": B, "query_len": L}, int(cached.max()) + L)

    def _run(self, arrays: ArrayDict, counts: np.ndarray) -> ArrayDict:
        """Run the graph; `counts [B]` are the new tokens of each element that are no padding."""
        B, L, _ = arrays["query"].shape
        keys, ends = int(self.lengths.max()) + L, self.lengths + counts
        caches = self._caches_for(B, keys)
        graph = self._graph({"batch": B, "query_len": L, CAPACITY: caches.capacity}, caches)
        for name, array in arrays.items():
            graph.inputs[name][tuple(slice(size) for size in array.shape)] = array
            axes = self._manifest.inputs[name].shape
            clear_padding(graph.inputs[name], axes, {QUERY_LEN: counts, CAPACITY: ends})
        graph.inputs[PAST_LENGTH][...] = self.lengths
        graph.run()
        for present, past in self._pairs.items():
            if present not in self._bound:
                caches.write(past, graph.outputs[present])
        self.lengths = ends
        return {
            name: self._without_spare_keys(name, array, keys)
            for name, array in graph.outputs.items()
            if name not in self._pairs
        }

    def _without_spare_keys(self, name: str, array: np.ndarray, keys: int) -> np.ndarray:
        """Return a copy of an output whose axis of keys is cut from the capacity to `keys`."""
        last = self._manifest.outputs[name].shape[-1]
        if not isinstance(last, str):
            return array.copy()
        # Learned keys, if the layer has them, come after the capacity.
        return np.concatenate([array[..., :keys], array[..., self.capacity :]], axis=-1)

    def _caches_for(self, batch: int, keys: int) -> Caches:
        capacity = -(-keys // self._block) * self._block
        if self._caches is None:
            self._caches = self._new_caches(batch, capacity)
        elif keys > self._caches.capacity:
            self._caches.grow(capacity)
        return self._caches

    def _new_caches(self, batch: int, capacity: int) -> Caches:
        axes: dict[str, Shape] = {}
        for name in self._pairs.values():
            shape = self._manifest.inputs[name].shape
            axes[name] = tuple(shape[at] for at in self._layouts.get(name, range(len(shape))))
        dtype = numpy_dtype(self._manifest.inputs[next(iter(axes))].dtype)
        return Caches(axes, dtype, batch, capacity, self._device)

    def _graph(self, sizes: Mapping[str, int], caches: Caches) -> BoundGraph:
        """Return a graph for these sizes, bound to buffers; reuse the last one if it has the sizes.

        `capacity` is one of the sizes, so that a grown cache gets a new graph with new buffers.
        """
        sizes = add_sums(sizes, self._spec.relations)
        if self._bound_graph is None or self._bound_graph.sizes != sizes:
            file, session = next(pair for pair in reversed(self._sessions) if pair[0].takes(sizes))
            self._bound_graph = BoundGraph(session, self._manifest, sizes, caches.values, file)
        return self._bound_graph


def _spec_in_place(folder: Path, manifest: Manifest) -> AttentionSpec:
    spec = bundle_spec(folder, manifest)
    if spec is None or not spec.in_place:
        raise UsageError(
            f'{folder} has no cache that is written in place; build it with cache = "in-place"'
        )
    return spec


def _check_device(device: str) -> None:
    if not isinstance(device, str) or device not in _PREFERRED:
        raise UsageError(f"unknown device {device!r}; choose from {', '.join(_PREFERRED)}")
    reason = no_cuda_device() if device == "cuda" else ""
    if reason:
        raise RuntimeFailure(f"no decoding on CUDA here: {reason}")


def _select_graphs(
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
