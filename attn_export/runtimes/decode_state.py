"""The cached tokens of a batch, and runs of the graphs of a bundle that add to them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from attn_export.cases.draw import add_sums
from attn_export.errors import BundleError, UsageError
from attn_export.interface import Shape
from attn_export.runtimes.decode_buffers import BoundGraph, Caches
from attn_export.runtimes.decode_inputs import (
    CAPACITY,
    ENCODED,
    IDS,
    LOGIT_COUNT,
    LOGIT_INDEX,
    MOST_KEYS,
    PAST_LENGTH,
    QUERY_LEN,
    check_ids,
    check_inputs,
    clear_padding,
)
from attn_export.schema import GraphFile, Manifest
from attn_export.tensorfile import ArrayDict, numpy_dtype

_CACHE_AXES = {"batch", CAPACITY}
_AXES = {*_CACHE_AXES, QUERY_LEN, LOGIT_COUNT, ENCODED}
"""The axes whose sizes a session knows, in caches and elsewhere."""


def _check_axes(manifest: Manifest, sums: Mapping[str, str]) -> None:
    """Raise an error for a manifest, which anybody may write, whose axes have no size here."""
    ends = {**manifest.inputs, **manifest.outputs}
    axes = {name: {x for x in end.shape if isinstance(x, str)} for name, end in ends.items()}
    wrong = [n for n, of in axes.items() if not of <= {*_AXES, *sums}]
    wrong += [n for n in manifest.next_inputs.values() if axes[n] != _CACHE_AXES]
    wrong += [n for n in (PAST_LENGTH,) if n not in ends or [*ends[n].shape] != ["batch"]]
    if IDS in manifest.inputs:
        logits = manifest.outputs.get("logits")
        wrong += [] if logits and isinstance(logits.shape[-1], int) else ["logits"]
    if wrong:
        raise BundleError(f"a session cannot tell the sizes of {wrong[0]}; build the bundle again")


class DecodeState:
    """The caches of a batch.

    Args:
        sums: The axes that are sums of others.
        sessions: The graphs; the first takes all sizes, later ones are faster.
        block: The number of keys by which full caches grow.

    Attributes:
        tokens: The input that takes the new tokens.
        caches: None before the first run.
        lengths: The number of cached tokens of each batch element, int64 `[B]`.
        kept: Inputs of the first run that later ones take, too: what an encoder gives.
    """

    def __init__(
        self,
        manifest: Manifest,
        sums: Mapping[str, str],
        sessions: Sequence[tuple[GraphFile, Any]],
        block: int,
        device: str,
    ) -> None:
        self._manifest, self._sums, self._sessions = manifest, sums, sessions
        self._block, self._device = block, device
        self._pairs, self.tokens = manifest.next_inputs, next(iter(manifest.inputs))
        _check_axes(manifest, sums)
        # A model may have positions for so many tokens only.
        self._most = manifest.bounds.get(CAPACITY, (0, None))[1] or MOST_KEYS
        self.caches: Caches | None = None
        self._graph: BoundGraph | None = None
        self.lengths = np.zeros(0, np.int64)
        self.kept: ArrayDict = {}

    def empty(self, batch: int) -> Self:
        """Return a state without cached tokens."""
        return self._with(None, np.zeros(batch, np.int64), {})

    def rows(self, rows: np.ndarray) -> Self:
        """Return a state with copies of some batch elements: int64 `[new batch]`."""
        kept = {name: array[rows] for name, array in self.kept.items()}
        return self._with(self.caches and self.caches.rows(rows), self.lengths[rows], kept)

    def _with(self, caches: Caches | None, lengths: np.ndarray, kept: ArrayDict) -> Self:
        state = copy.copy(self)
        state.caches, state.lengths, state.kept, state._graph = caches, lengths, kept, None
        return state

    def check(self, arrays: ArrayDict, counts: np.ndarray, more: int = 0) -> None:
        """Check the inputs of a run, and add the positions of the logits that are wanted.

        `counts`: The new tokens of each batch element that are no padding, int64 `[B]`. `more`: The
        tokens that will follow one by one.
        """
        described = {
            name: signature
            for name, signature in self._manifest.inputs.items()
            if name not in (*self._pairs.values(), PAST_LENGTH)
        }
        for name, array in self.kept.items():
            arrays.setdefault(name, array)
        if LOGIT_INDEX in described:
            arrays.setdefault(LOGIT_INDEX, counts[:, None] - 1)
        sizes = self._sizes(arrays)
        keys = int(self.lengths.max()) + sizes[QUERY_LEN]
        check_inputs(arrays, described, sizes, keys)
        if self.tokens == IDS:
            check_ids(IDS, arrays[IDS], int(self._manifest.outputs["logits"].shape[-1]))
        if LOGIT_INDEX in arrays:
            check_ids(LOGIT_INDEX, arrays[LOGIT_INDEX], sizes[QUERY_LEN])
        total = max(keys, int((self.lengths + counts).max()) + more)
        if total > self._most:
            raise UsageError(f"there would be {total} tokens, and the bundle takes {self._most}")

    def run(self, arrays: ArrayDict, counts: np.ndarray) -> ArrayDict:
        """Run a graph on inputs that were checked."""
        sizes = self._sizes(arrays)
        keys, ends = int(self.lengths.max()) + sizes[QUERY_LEN], self.lengths + counts
        caches = self._caches_for(sizes["batch"], keys)
        last, graph = self._graph, self._graph_for({**sizes, CAPACITY: caches.capacity}, caches)
        for name, array in arrays.items():
            if graph is last and array is self.kept.get(name):  # it is there
                continue
            graph.inputs[name][tuple(slice(size) for size in array.shape)] = array
            axes = self._manifest.inputs[name].shape
            clear_padding(graph.inputs[name], axes, {QUERY_LEN: counts, CAPACITY: ends})
        self._compute(graph, caches, ends)
        # The caller may write into its arrays later.
        self.kept = {
            n: a if a is self.kept.get(n) else a.copy()
            for n, a in arrays.items()
            if ENCODED in self._manifest.inputs[n].shape
        }
        return {
            name: self._without_spare_keys(name, array, keys, caches.capacity)
            for name, array in graph.outputs.items()
            if name not in self._pairs
        }

    def takes_next(self, ids: object) -> bool:
        """Return whether these are one id each for the graph that ran last, and `next` runs it."""
        graph, caches = self._graph, self.caches
        if graph is None or caches is None or not isinstance(ids, np.ndarray):
            return False
        fits = self.tokens == IDS and ids.shape == (caches.batch, 1) and ids.dtype == np.int64
        same = graph.sizes[QUERY_LEN] == 1 and graph.sizes.get(LOGIT_COUNT, 0) < 2
        return fits and same and int(self.lengths.max()) < min(caches.capacity, self._most)

    def next(self, ids: np.ndarray, *, copy: bool) -> ArrayDict:
        """Run one token of each batch element, int64 `[B, 1]`, for which all buffers are there."""
        graph, caches = self._graph, self.caches
        assert graph is not None  # `takes_next` has checked it
        assert caches is not None
        check_ids(IDS, ids, int(self._manifest.outputs["logits"].shape[-1]))
        graph.inputs[IDS][...] = ids
        self._compute(graph, caches, self.lengths + 1)
        outputs = ((n, array) for n, array in graph.outputs.items() if n not in self._pairs)
        return {name: array.copy() if copy else array for name, array in outputs}

    def _compute(self, graph: BoundGraph, caches: Caches, ends: np.ndarray) -> None:
        """Run a graph, whose other inputs are there, and keep what it adds to the caches."""
        graph.inputs[PAST_LENGTH][...] = self.lengths
        graph.run()
        for present, past in self._pairs.items():
            if present not in self._sessions[0][0].bound:
                caches.write(past, graph.outputs[present])
        self.lengths = ends

    def _sizes(self, arrays: ArrayDict) -> dict[str, int]:
        batch, count = arrays[self.tokens].shape[:2]
        index = arrays.get(LOGIT_INDEX, np.zeros(0))
        sizes = {
            "batch": batch,
            QUERY_LEN: count,
            LOGIT_COUNT: index.shape[-1] if index.ndim else 0,
        }
        for name, array in arrays.items():
            axes = self._manifest.inputs[name].shape if name in self._manifest.inputs else ()
            if ENCODED in axes and array.ndim == len(axes):
                sizes.setdefault(ENCODED, array.shape[axes.index(ENCODED)])
        return sizes

    def _without_spare_keys(
        self, name: str, array: np.ndarray, keys: int, capacity: int
    ) -> np.ndarray:
        """Return a copy of an output whose axis of keys is cut from the capacity to `keys`."""
        last = self._manifest.outputs[name].shape[-1]
        if not isinstance(last, str):
            return array.copy()
        # Learned keys, if the layer has them, come after the capacity.
        return np.concatenate([array[..., :keys], array[..., capacity:]], axis=-1)

    def _caches_for(self, batch: int, keys: int) -> Caches:
        capacity = min(-(-keys // self._block) * self._block, self._most)
        if self.caches is None:
            self.caches = self._new_caches(batch, capacity)
        elif keys > self.caches.capacity:
            self.caches.grow(capacity)
        return self.caches

    def _new_caches(self, batch: int, capacity: int) -> Caches:
        axes: dict[str, Shape] = {}
        layouts = self._sessions[0][0].layouts
        for name in self._pairs.values():
            shape = self._manifest.inputs[name].shape
            axes[name] = tuple(shape[at] for at in layouts.get(name, range(len(shape))))
        dtype = numpy_dtype(self._manifest.inputs[next(iter(axes))].dtype)
        return Caches(axes, dtype, batch, capacity, self._device)

    def _graph_for(self, sizes: Mapping[str, int], caches: Caches) -> BoundGraph:
        """Return a graph for these sizes, bound to buffers; reuse the last one if it has the sizes.

        `capacity` is one of the sizes, so that a grown cache gets a new graph with new buffers.
        """
        sizes = add_sums(sizes, self._sums)
        if self._graph is None or self._graph.sizes != sizes:
            file, session = next(pair for pair in reversed(self._sessions) if pair[0].takes(sizes))
            self._graph = BoundGraph(session, self._manifest, sizes, caches.values, file)
        return self._graph
