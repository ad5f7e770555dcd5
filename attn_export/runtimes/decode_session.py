"""`DecodeSession`: drives a bundle whose KV caches are written in place.

The session allocates the buffers of the cache and binds each both as an input and as an output of
the graph. A step writes its keys and values there. Where the graph can write into its input, the
cache is copied only when it grows or is reordered.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.bundle.manifest import bundle_spec, read_bundle
from attn_export.errors import RuntimeFailure, UsageError, one_line, printable
from attn_export.optional_parts import model_hook
from attn_export.runtimes.decode_buffers import PREFERRED, check_device, load_session, select_graphs
from attn_export.runtimes.decode_inputs import (
    HIDDEN,
    IDS,
    MASK,
    MOST_KEYS,
    NEXT_HIDDEN,
    PAST_LENGTH,
    arrays_of,
    lengths_of,
    moved_right,
    rows_of,
    whole_number,
    whole_numbers,
)
from attn_export.runtimes.decode_state import DecodeState
from attn_export.schema import Manifest
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import ArrayDict

BLOCK = 128

_MOST_THREADS = 1024
"""The largest number of threads."""


class DecodeSession:
    """Decoding with an attention layer or a whole model, in ONNX Runtime.

    Some graphs cannot write a cache into the buffer of their input: those with sinks, learned keys
    or bfloat16. For them the session copies the cache at every step. Threads take turns with a
    session: a call while another runs raises an error.

    Args:
        bundle: The folder of a bundle with ``cache = "in-place"``, or of a whole model.
        dialect: The dialect of the graphs. Default: the fastest one that the bundle has.
        block: The number of keys by which a full cache grows.
        threads: The number of threads for computing, at most one for each core. Default: the
            choice of ONNX Runtime, all cores.
        device: ``"cpu"``, or ``"cuda"``, which keeps the cache in the memory of the GPU.

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
        check_device(device)
        block = whole_number("block", block, MOST_KEYS)
        if threads is not None:
            threads = whole_number("threads", threads, _MOST_THREADS)
        if not isinstance(bundle, str | Path):
            raise UsageError(f"bundle is a {type(bundle).__name__}; give the path of its folder")
        folder = Path(bundle)
        manifest = read_bundle(folder)
        self._spec = _spec_in_place(folder, manifest)
        files = select_graphs(manifest.shipped, dialect, folder, PREFERRED[device])
        sessions = [(file, load_session(folder / file.name, threads, device)) for file in files]
        sums = self._spec.relations if self._spec else {}
        self._state = DecodeState(manifest, sums, sessions, block, device)
        self._lock = threading.Lock()

    @property
    def lengths(self) -> np.ndarray:
        """The number of cached keys of each batch element, int64 `[B]`."""
        return self._state.lengths.copy()

    @property
    def mark(self) -> object:
        """What is another object after each change of the cache."""
        return self._state.lengths

    @property
    def capacity(self) -> int:
        """The number of keys of a batch element for which there is memory; 0 before `prefill`."""
        return self._state.caches.capacity if self._state.caches else 0

    def prefill(
        self,
        query: np.ndarray,
        *,
        lengths: Sequence[int] | None = None,
        more: int = 0,
        **inputs: np.ndarray,
    ) -> ArrayDict:
        """Discard the cache, and run the prompts of a new batch.

        Args:
            query: `[B, L, E]`; of a whole model, token ids `[B, L]`.
            lengths: The number of tokens of each prompt, `[B]`, where prompts of different
                lengths are padded on the right to L tokens. Requires causal attention, in which
                no token attends to the padding after it. Whatever inputs hold there is replaced
                by 0, and outputs are meaningless. Default: L for each.
            more: The number of tokens that will follow. More than the bundle takes are refused now.
            inputs: The other inputs of the bundle without the caches, such as `position_ids`.
                The axis of keys of `attn_mask` has the size L. Of a whole model, `logit_index`,
                the positions whose logits are wanted, int64 `[B, K]`, by default the last token of
                each prompt; and in place of lengths, `attention_mask [B, L]`, 0 where prompts are
                padded, left or right. Of a decoder, what its encoder gives, and
                `encoder_attention_mask`; steps take them, too, without being given them.

        Returns:
            The outputs by name, without the caches: `output [B, L, E]`, and `attn_weights` if
            the bundle has them, with as many keys as the mask; of a whole model,
            `logits [B, K, V]`.

        Raises:
            UsageError: If an input is missing, unknown, or of another shape or type, an id is not
                in the vocabulary, or another thread uses the session. The cache is unchanged then.
        """
        if not isinstance(more, int) or more < 0:
            raise UsageError(f"more is {printable(str(more), 60)}; give a whole number from 0")
        name = self._state.tokens
        mask = inputs.pop(MASK, None) if name == IDS else None
        if mask is not None and lengths is not None:
            raise UsageError(f"{MASK} and lengths say the same; give one of them")
        with self._alone():
            arrays = arrays_of({name: query, **inputs})
            counts = lengths_of(lengths, *arrays[name].shape[:2])
            if mask is not None:
                arrays[name], counts = moved_right(arrays[name], mask)
            return self._prefill(arrays, counts, more)

    def _prefill(self, arrays: ArrayDict, counts: np.ndarray, more: int) -> ArrayDict:
        state = self._state.empty(len(counts))
        state.check(arrays, counts, more)
        length = arrays[state.tokens].shape[1]
        if self._spec is not None and not self._spec.causal and (counts < length).any():
            raise UsageError(
                "without causal attention tokens see the padding after them; leave lengths out "
                "and give prompts of one length"
            )
        # The memory of the old caches, from which a step must not continue after an error.
        self._state = self._state.empty(0)
        outputs = state.run(arrays, counts)
        self._state = state
        return outputs

    def step(self, query: np.ndarray, *, copy: bool = True, **inputs: np.ndarray) -> ArrayDict:
        """Run L new tokens, usually one, for every batch element.

        Args:
            query: `[B, L, E]`, or token ids `[B, L]`, with the batch size of the cache.
            copy: Whether outputs are copies. The next run may overwrite others.
            inputs: As for `prefill`. The axis of keys of `attn_mask` has the size
                ``lengths.max() + L``. `logit_index` is by default the last new token.

        Returns:
            The same outputs as `prefill`.

        Raises:
            UsageError: If `prefill` was not called, an input is missing, unknown, or of another
                shape or type, or another thread uses the session.
        """
        with self._alone():
            state = self._state
            if not inputs and state.takes_next(query):
                return state.next(query, copy=copy)
            arrays = arrays_of({state.tokens: query, **inputs})
            if state.caches is None:
                raise UsageError("a step without a prompt; call prefill first")
            rows, length = arrays[state.tokens].shape[:2]
            if len(state.lengths) != rows:
                raise UsageError(
                    f"{state.tokens} has {rows} rows, the cache {len(state.lengths)}; give as "
                    "many, or call prefill"
                )
            counts = np.full(rows, length, np.int64)
            state.check(arrays, counts)
            return state.run(arrays, counts)

    def reorder(self, rows: Sequence[int]) -> None:
        """Let batch element i continue from the cache of element ``rows[i]``, as in beam search.

        Args:
            rows: Indices of batch elements, `[N]` with N ≥ 1. The batch size becomes N.

        Raises:
            UsageError: If `prefill` was not called, an index is out of range, or another thread
                uses the session.
        """
        with self._alone():
            self._state = self._chosen(rows)

    def fork(self, rows: Sequence[int]) -> DecodeSession:
        """Return a session that continues from copies of some caches, with the same graphs.

        Args:
            rows: As for `reorder`.

        Raises:
            UsageError: As for `reorder`.
        """
        with self._alone():
            other = copy.copy(self)
            other._state, other._lock = self._chosen(rows), threading.Lock()
            return other

    def rewind(self, count: int | Sequence[int]) -> None:
        """Forget the last tokens of every batch element, such as drafts that were rejected.

        Args:
            count: The number of tokens, for all batch elements or for each.

        Raises:
            UsageError: If a batch element has fewer tokens, or another thread uses the session.
        """
        with self._alone():
            counts, held = whole_numbers(count), self.lengths
            fits = counts is not None and counts.shape in ((), held.shape) and held.size > 0
            if counts is None or not fits or (counts < 0).any() or (counts > held).any():
                raise UsageError(f"{count} tokens cannot be forgotten; there are {held.tolist()}")
            self._state.lengths = held - counts

    def generate(self, ids: np.ndarray, count: int, **options: Any) -> Iterator[np.ndarray]:
        """Discard the cache, and continue the prompts of a new batch with a whole model.

        Args:
            ids: Token ids, `[B, L]`.
            count: The most tokens to generate.
            options: ``temperature`` (0, the default, takes the largest logit), ``top_k``,
                ``top_p``, ``repetition_penalty`` and ``seed`` of draws; ``stop``, the ids that end
                a batch element; `lengths` or `attention_mask` of `prefill`; and ``encoded``, its
                inputs of a decoder.

        Returns:
            An iterator over the next token of each batch element, int64 `[B]`, which is -1 after
            its end. It ends when all have ended, and raises UsageError once the session has been
            used for something else.

        Raises:
            UsageError: As for `prefill`; or if an option is out of range.
        """
        tokens: Iterator[np.ndarray] = model_hook("generate", ())(self, ids, count, **options)
        return tokens

    def _chosen(self, rows: Sequence[int]) -> DecodeState:
        """Return a state with copies of the caches of some batch elements."""
        if self._state.caches is None:
            raise UsageError("there is no cache; call prefill first")
        return self._state.rows(rows_of(rows, len(self.lengths)))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise UsageError("another thread uses this session; give each thread one of its own")
        try:
            yield
        except MemoryError as error:
            raise RuntimeFailure(f"there is not enough memory: {one_line(error)}") from error
        finally:
            self._lock.release()


def _spec_in_place(folder: Path, manifest: Manifest) -> AttentionSpec | None:
    """Return the spec of a layer with a cache in place; None for such a whole model."""
    spec = bundle_spec(folder, manifest)
    is_model = next(iter(manifest.inputs)) == IDS and PAST_LENGTH in manifest.inputs
    if spec is None and not {HIDDEN, NEXT_HIDDEN}.isdisjoint(manifest.ends):
        raise UsageError(f"{folder} has some layers of a model; a session takes whole ones")
    if not (spec.in_place if spec else is_model):
        raise UsageError(
            f'{folder} has no cache that is written in place; build it with cache = "in-place"'
        )
    return spec
