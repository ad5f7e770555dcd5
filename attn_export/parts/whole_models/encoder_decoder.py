"""Tokens of an encoder-decoder, which is two bundles: the encoder runs once, then the decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.bundle.manifest import bundles_in, read_bundle, read_manifest
from attn_export.bundle.text_ends import ENDS, Generation
from attn_export.errors import (
    BundleError,
    RuntimeFailure,
    UsageError,
    first_few,
    one_line,
    printable,
)
from attn_export.parts.whole_models.generation import generate
from attn_export.parts.whole_models.prompts import padded
from attn_export.runtimes.decode_buffers import PREFERRED, load_session, select_graphs
from attn_export.runtimes.decode_inputs import IDS, MASK, QUERY_LEN, check_ids
from attn_export.runtimes.decode_session import DecodeSession
from attn_export.tensorfile import ArrayDict, numpy_dtype

_ENCODER, _DECODER = "encoder", "decoder"

Start = list[int] | np.ndarray
"""Token ids, or the features of a sound, `[mels, frames]`."""


def decoder_of(folder: Path) -> Path | None:
    """Return the bundle of the decoder, if these are two bundles of an encoder-decoder."""
    there = bundles_in(folder)
    return there[_DECODER] if there.keys() >= {_ENCODER, _DECODER} else None


class EncoderDecoder:
    """The graphs of an encoder-decoder.

    `said`: The decoder's generation config.
    """

    def __init__(
        self, folder: Path, said: Generation, *, threads: int | None, dialect: str | None
    ) -> None:
        self._said = said
        self._session = DecodeSession(folder / _DECODER, threads=threads, dialect=dialect)
        logits = read_manifest(folder / _DECODER).outputs["logits"]
        self._vocabulary = int(logits.shape[-1])
        manifest = read_bundle(folder / _ENCODER)
        file = select_graphs(manifest.shipped, dialect, folder / _ENCODER, PREFERRED["cpu"])[0]
        self._inputs, self._outputs = manifest.inputs, [*manifest.outputs]
        self._most = manifest.bounds.get(QUERY_LEN, (0, None))[1]
        self._encoder = load_session(folder / _ENCODER / file.name, threads, "cpu")

    def generate(
        self, starts: Sequence[Start], count: int, **options: Any
    ) -> tuple[Sequence[Sequence[int]], Iterator[np.ndarray]]:
        """Return the decoder's first ids, and an iterator over the next ones, int64 `[B]`.

        `starts`: Token ids that the encoder reads, or features that it hears.
        """
        encoded = self._encode(self._given(starts))
        first = self._start(encoded, len(starts))
        options = {**options, "encoded": encoded, "said": self._said}
        return first.tolist(), generate(self._session, first, count, **options)

    def _given(self, starts: Sequence[Start]) -> ArrayDict:
        """Return the inputs of the encoder."""
        name, signature = next(iter(self._inputs.items()))
        sounds = [each for each in starts if isinstance(each, np.ndarray)]
        if (name == IDS) == bool(sounds):
            other = "--prompt, --ids or --prompts" if name == IDS else "--sound FILE"
            raise UsageError(f"the encoder takes {name}; give {other}")
        if sounds:
            shape = [*signature.shape[1:]]
            for each in sounds:
                if [*each.shape] != shape:
                    raise UsageError(f"the features are {[*each.shape]}; the encoder takes {shape}")
            return {name: np.stack(sounds).astype(numpy_dtype(signature.dtype))}
        ids, lengths = padded(starts)
        longest = ids.shape[1]
        if self._most is not None and longest > self._most:
            raise UsageError(f"a prompt has {longest} tokens, and the encoder takes {self._most}")
        check_ids(IDS, ids, self._vocabulary)
        mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
        return {IDS: ids, **({MASK: mask} if MASK in self._inputs else {})}

    def _encode(self, given: ArrayDict) -> ArrayDict:
        """Return what the decoder takes of the encoder: keys, values, and which are padding."""
        if missing := [*self._inputs.keys() - given.keys()]:
            raise BundleError(f"the encoder takes {printable(first_few(missing))}; build it again")
        try:
            found = self._encoder.run(self._outputs, given)
        except Exception as error:  # as ONNX Runtime raises them
            raise RuntimeFailure(f"ONNX Runtime fails in the encoder: {one_line(error)}") from error
        mask = {f"encoder_{MASK}": given[MASK]} if MASK in given else {}
        return {**dict(zip(self._outputs, found, strict=True)), **mask}

    def _start(self, encoded: ArrayDict, rows: int) -> np.ndarray:
        """Return the decoder's first ids `[B, L]`, as transformers chooses them."""
        said = self._said
        first = said.bos_token_id if said.decoder_start_token_id is None else (
            said.decoder_start_token_id
        )  # fmt: skip
        if first is None:
            raise BundleError(f"{ENDS} has no decoder_start_token_id; build the bundle again")
        start: list[Any] = [first]
        if said.language is None and said.task is None:
            for at, token in said.forced_decoder_ids or ():
                start += [token] if at == len(start) else []
        if said.language is not None:
            start.append(_named(said.lang_to_id, f"<|{said.language.strip('<|>')}|>"))
        elif said.lang_to_id and (len(start) == 1 or start[1] is None):
            start[1:2] = [self._languages(encoded, np.full((rows, 1), first), said.lang_to_id)]
        if said.task is not None or (said.language is not None and said.task_to_id):
            start.append(_named(said.task_to_id, said.task or "transcribe"))
        timeless = said.no_timestamps_token_id
        if timeless is not None and np.any(start[-1] != timeless):
            start.append(timeless)
        columns = [np.broadcast_to(token, rows) for token in start if token is not None]
        return np.stack(columns, axis=1)

    def _languages(
        self, encoded: ArrayDict, start: np.ndarray, languages: dict[str, int]
    ) -> np.ndarray:
        """Return the likeliest language of each batch element, int64 `[B]`."""
        given: dict[str, Any] = encoded
        logits = self._session.prefill(start, **given)["logits"][:, -1]
        ids = np.array(sorted(languages.values()))
        check_ids("lang_to_id", ids, logits.shape[-1])
        likeliest: np.ndarray = ids[logits[:, ids].argmax(-1)]
        return likeliest


def _named(ids: dict[str, int] | None, name: str) -> int:
    if name not in (ids or {}):
        raise BundleError(f"{ENDS} has no token of {printable(name, 60)}; build the bundle again")
    return (ids or {})[name]
