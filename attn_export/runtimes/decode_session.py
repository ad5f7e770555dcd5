"""`DecodeSession`: drives a bundle whose KV cache is written in place.

Every step writes its keys and values into the session's own buffers, which ONNX Runtime is given
both as input and as output: nothing of the cache is copied but when it grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.bundle import SPEC, graph_files, read_bundle
from attn_export.dialect_names import CUDA, ORT, PORTABLE, STANDARD
from attn_export.errors import BundleError, RuntimeFailure, UsageError
from attn_export.parity.draw import add_sums
from attn_export.results import GraphFile
from attn_export.runtimes.decode_buffers import (
    CAPACITY,
    Axes,
    BoundGraph,
    Caches,
    arrays_of,
    check_inputs,
    lengths_of,
    load_session,
    rows_of,
)
from attn_export.runtimes.ort_cuda import no_cuda_device
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import ArrayDict, numpy_dtype

LENGTH, LENGTHS = "query_len", "past_length"
CACHES = {"present_key": "past_key", "present_value": "past_value"}
PREFERRED = {"cpu": (ORT, STANDARD, PORTABLE), "cuda": (CUDA, STANDARD, ORT, PORTABLE)}
"""The dialects by device, the fastest first."""
BLOCK = 512


class DecodeSession:
    """Decoding with one attention layer, in ONNX Runtime.

    Where a graph cannot write into its input (with sinks, learned keys or bfloat16), the cache is
    copied at every step.

    Args:
        bundle: The folder of a bundle with ``cache = "in-place"``.
        dialect: The dialect of the graphs. Default: the first of
            `PREFERRED[device]` that the bundle has.
        block: The number of keys by which a full cache grows.
        threads: For computing. Default: as many as ONNX Runtime chooses, all cores.
        device: ``"cpu"``, or ``"cuda"``: the cache stays in the memory of the GPU.

    Attributes:
        lengths: The number of keys of each row of the batch, int64 `[B]`.

    Raises:
        UsageError: If the bundle has no such cache, or not the dialect, or there is no such device.
        BundleError: If it is damaged.
        RuntimeFailure: If ONNX Runtime is missing or refuses a graph, there is no GPU, or the
            attention does not run there.
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
        found = read_bundle(Path(bundle))
        self._manifest: Mapping[str, Any] = found.manifest
        self._spec = _spec_of(found.folder)
        forms = _chosen(graph_files(found.manifest), dialect, found.folder, PREFERRED[device])
        self._bound = dict(forms[0].bound)
        self._layouts = forms[0].layouts
        if block < 1:
            raise UsageError(f"a cache cannot grow by blocks of {block}; give 1 or more")
        self._block, self._device = block, device
        self._sessions = [
            (form, load_session(found.folder / form.name, threads, device)) for form in forms
        ]
        self._caches: Caches | None = None
        self._ready: BoundGraph | None = None
        self.lengths = np.zeros(0, np.int64)

    @property
    def capacity(self) -> int:
        """The number of keys that each row can hold before the cache grows."""
        return 0 if self._caches is None else self._caches.capacity

    def prefill(
        self, query: np.ndarray, *, lengths: Sequence[int] | None = None, **inputs: np.ndarray
    ) -> ArrayDict:
        """Start anew with a prompt.

        Args:
            query: `[B, L, E]`.
            lengths: How many of a row's L tokens are its own, where prompts are of different
                lengths and padded on the right. Needs causal attention, in which no token sees
                the padding after it. Outputs for padding are meaningless.
            inputs: The bundle's other inputs but for the cache: `attn_mask`, whose axis of keys
                is as long as the longest row, `position_ids`.

        Returns:
            The outputs by name, but for the cache: `output [B, L, E]`, and `attn_weights` if
            the bundle has them, over as many keys as the mask.

        Raises:
            UsageError: If an input is missing, unknown, or of another shape or type; what the
                session held it still holds.
        """
        given = arrays_of({"query": query, **inputs})
        B, L, _ = given["query"].shape
        self._check(given, np.zeros(B, np.int64))
        own = lengths_of(lengths, B, L)
        if not self._spec.causal and (own < L).any():
            raise UsageError(
                "without causal attention tokens see the padding after them; leave lengths out "
                "and give prompts of one length"
            )
        self._caches = self._ready = None
        self.lengths = np.zeros(B, np.int64)
        return self._run(given, own)

    def step(self, query: np.ndarray, **inputs: np.ndarray) -> ArrayDict:
        """Decode one token for every row, or a few.

        Args:
            query: `[B, L, E]`; the batch is that of the prompt.
            inputs: As for `prefill`; a mask's axis of keys is as long as the longest row will be.

        Returns:
            As `prefill`.

        Raises:
            UsageError: If there was no prompt, or an input is missing, unknown, or of another
                shape or type.
        """
        if self._caches is None:
            raise UsageError("a step without a prompt; call prefill first")
        given = arrays_of({"query": query, **inputs})
        B, L, _ = given["query"].shape
        if len(self.lengths) != B:
            raise UsageError(
                f"query has {B} rows, the cache {len(self.lengths)}; give as many, or call prefill"
            )
        self._check(given, self.lengths)
        return self._run(given, np.full(B, L, np.int64))

    def reorder(self, rows: Sequence[int]) -> None:
        """Let row i go on from what row ``rows[i]`` has seen, as beam search does.

        Args:
            rows: Any number of them.

        Raises:
            UsageError: If there is no such row.
        """
        if self._caches is None:
            raise UsageError("nothing to reorder; call prefill first")
        chosen = rows_of(rows, len(self.lengths))
        self._caches.reorder(chosen)
        self.lengths = self.lengths[chosen]
        self._ready = None

    # -- one run -------------------------------------------------------------------------

    def _check(self, given: ArrayDict, held: np.ndarray) -> None:
        described = {
            name: entry
            for name, entry in self._manifest["inputs"].items()
            if name not in (*CACHES.values(), LENGTHS)
        }
        B, L, _ = given["query"].shape
        check_inputs(given, described, {"batch": B, "query_len": L}, int(held.max()) + L)

    def _run(self, given: ArrayDict, own: np.ndarray) -> ArrayDict:
        """Run once. `own`: the number of new tokens that each row keeps."""
        B, L, _ = given["query"].shape
        keys = int(self.lengths.max()) + L
        caches = self._with_capacity(B, keys)
        graph = self._graph({"batch": B, "query_len": L, CAPACITY: caches.capacity}, caches)
        for name, array in given.items():
            graph.inputs[name][tuple(slice(size) for size in array.shape)] = array
        graph.inputs[LENGTHS][...] = self.lengths
        graph.run()
        for present, past in CACHES.items():
            if present not in self._bound:
                caches.write(past, graph.outputs[present])
        self.lengths = self.lengths + own
        seen = (name for name in graph.outputs if name not in CACHES)
        return {name: self._seen(name, graph.outputs[name], keys) for name in seen}

    def _seen(self, name: str, array: np.ndarray, keys: int) -> np.ndarray:
        """Return a copy of an output, without unused capacity for keys."""
        last = self._manifest["outputs"][name]["shape"][-1]
        if not isinstance(last, str):
            return array.copy()
        # Beyond the capacity there may be learned keys.
        return np.concatenate([array[..., :keys], array[..., self.capacity :]], axis=-1)

    def _with_capacity(self, batch: int, keys: int) -> Caches:
        capacity = -(-keys // self._block) * self._block
        if self._caches is None:
            self._caches = self._new_caches(batch, capacity)
        elif keys > self._caches.capacity:
            self._caches.grow(capacity)
        return self._caches

    def _new_caches(self, batch: int, capacity: int) -> Caches:
        axes: dict[str, Axes] = {}
        dtype = ""
        for name in CACHES.values():
            dtype = self._manifest["inputs"][name]["dtype"]
            named = self._manifest["inputs"][name]["shape"]
            axes[name] = tuple(named[at] for at in self._layouts.get(name, range(len(named))))
        return Caches(axes, numpy_dtype(dtype), batch, capacity, self._device)

    def _graph(self, sizes: Mapping[str, int], caches: Caches) -> BoundGraph:
        """Return the graph for these sizes, bound to the buffers; reused while the sizes stay.

        One of them is the capacity: with it the buffers change.
        """
        sizes = add_sums(sizes, self._spec.relations)
        if self._ready is None or self._ready.sizes != sizes:
            form, session = next(each for each in reversed(self._sessions) if each[0].takes(sizes))
            self._ready = BoundGraph(session, self._manifest, sizes, caches.values, form)
        return self._ready


def _spec_of(folder: Path) -> AttentionSpec:
    spec = AttentionSpec.from_toml(folder / SPEC) if (folder / SPEC).is_file() else None
    if spec is None or not spec.in_place:
        raise UsageError(
            f'{folder} has no cache that is written in place; build it with cache = "in-place"'
        )
    return spec


def _check_device(device: str) -> None:
    if device not in PREFERRED:
        raise UsageError(f"unknown device {device!r}; choose from {', '.join(PREFERRED)}")
    reason = no_cuda_device() if device == "cuda" else ""
    if reason:
        raise RuntimeFailure(f"no decoding on CUDA here: {reason}")


def _chosen(
    forms: Sequence[GraphFile], dialect: str | None, folder: Path, preferred: Sequence[str]
) -> list[GraphFile]:
    """Return the graphs of one dialect, the best for one query last; the first takes all sizes."""
    there = {form.dialect for form in forms}
    if dialect is not None and dialect not in there:
        raise UsageError(f"{folder} has no {dialect} graphs; it has {', '.join(sorted(there))}")
    wanted = dialect or next((name for name in preferred if name in there), "")
    chosen = sorted(
        (form for form in forms if form.dialect == wanted),
        key=lambda form: (len(form.fixed), LENGTH in form.fixed),
    )
    if not chosen or chosen[0].fixed:
        raise BundleError(f"{folder} has no graph for any number of queries; build it again")
    return chosen
