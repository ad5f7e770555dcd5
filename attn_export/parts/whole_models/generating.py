"""The flow of `generate`: prompts in batches to a model, and its tokens as text or ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from attn_export.bundle.text_ends import ENDS, Generation
from attn_export.errors import UsageError, printable
from attn_export.parts.whole_models.bundle_text import BundleText
from attn_export.parts.whole_models.encoder_decoder import EncoderDecoder, Start, decoder_of
from attn_export.parts.whole_models.generated_text import harmless, json_line, rows_of, until
from attn_export.parts.whole_models.generation import generate
from attn_export.parts.whole_models.prompts import encoded, is_text, padded, parse_ids, read_prompts
from attn_export.parts.whole_models.sound import features_of
from attn_export.report.progress import progress
from attn_export.runtimes.decode_session import DecodeSession

_Echo = Callable[..., None]

_TOGETHER = 8
"""The most prompts that are one batch."""


def print_generated(
    bundle: Path, echo: _Echo, *, prompt: str | None, ids: str | None, file: Path | None,
    sound: Path | None, is_chat: bool, stops: Sequence[str], count: int, threads: int | None,
    dialect: str | None, **options: Any,
) -> None:  # fmt: skip
    """Print what a model makes of prompts; the keywords are the options of `generate`.

    `echo`: Prints text; on stderr with ``err``, and without a line break if ``nl`` is False.
    `options`: Those of draws, None where the generation config decides.
    """
    if [prompt, ids, file, sound].count(None) != 3:
        raise UsageError("give one of --prompt TEXT, --ids 1,2,3, --prompts FILE and --sound FILE")
    given = read_prompts(file) if file else [parse_ids(ids) if ids is not None else prompt or ""]
    decoder = decoder_of(bundle)
    if sound and not decoder:
        raise UsageError(f"--sound is for encoder-decoders, and {bundle} is none; give a prompt")
    text = BundleText(decoder or bundle)
    texts = [text.has_tokenizer] if sound else [is_text(each) for each in given]
    _check_texts(texts, stops, is_chat=is_chat, is_heard=sound is not None)
    model: _Model = (EncoderDecoder if decoder else _Decoder)(
        bundle, text.generation, threads=threads, dialect=dialect
    )
    starts: list[Start] = (
        [features_of(sound, text.sound)] if sound
        else [encoded(each, text, is_chat=is_chat) for each in given]
    )  # fmt: skip
    ends = *text.generation.ends, *(each for stop in stops for each in text.special_ids(stop))
    draws = {"stop": ends, **_draws(text.generation, options, echo)}
    rows = zip(texts, _rows(model, starts, count, draws), strict=True)
    outputs = (
        (is_words, until(text.decode(before, row), stops) if is_words else map(str, row))
        for is_words, (before, row) in rows
    )
    if file is None:
        ((is_words, pieces),) = outputs
        for piece in harmless(pieces, "" if is_words else " "):
            echo(piece, nl=False)
        echo("")
    else:
        _print_lines(outputs, len(starts), echo)
    if not (sound or decoder or is_chat) and any(texts):
        echo("no chat template applied" + "; --chat applies it" * text.has_template, err=True)


def _check_texts(
    texts: Sequence[bool], stops: Sequence[str], *, is_chat: bool, is_heard: bool
) -> None:
    """Refuse options for text where ids, or a sound, were given."""
    if not all(stops):
        raise UsageError("--stop is empty; give a text")
    is_chat_wrong = is_chat and (is_heard or not all(texts))
    for flag, is_wrong in (("--chat", is_chat_wrong), ("--stop", stops and not all(texts))):
        if is_wrong:
            raise UsageError(f"{flag} is for text, which is not what was given; leave it out")


def _rows(
    model: _Model, starts: Sequence[Start], count: int, options: Mapping[str, Any]
) -> Iterator[tuple[Sequence[int], Iterator[int]]]:
    """Yield, for each prompt, the ids before its tokens, and these."""
    for first in range(0, len(starts), _TOGETHER):
        before, tokens = model.generate(starts[first : first + _TOGETHER], count, **options)
        yield from zip(before, rows_of(tokens, len(before)), strict=True)


def _print_lines(outputs: Iterable[tuple[bool, Iterator[str]]], count: int, echo: _Echo) -> None:
    """Print a line of JSON for each prompt, under a progress bar."""
    with progress(quiet=False) as bar:
        bar.expect(count)
        for is_words, pieces in outputs:
            ids_or_text = {"text": "".join(pieces)} if is_words else {"ids": [*map(int, pieces)]}
            with bar.hidden():
                echo(json_line(ids_or_text))
            bar.advance("generating")


class _Model(Protocol):
    """A model that generates tokens."""

    def generate(
        self, starts: Sequence[Start], count: int, **options: Any
    ) -> tuple[Sequence[Sequence[int]], Iterator[np.ndarray]]:
        """Return the ids before the first new token, and an iterator over the tokens `[B]`."""


class _Decoder:
    """A model whose prompts are continued."""

    def __init__(self, bundle: Path, said: Generation, **options: Any) -> None:
        self._session, self._said = DecodeSession(bundle, **options), said

    def generate(
        self, starts: Sequence[Start], count: int, **options: Any
    ) -> tuple[Sequence[Sequence[int]], Iterator[np.ndarray]]:
        """Return prompts and their next tokens; prompts are padded on the right."""
        ids, lengths = padded(starts)
        options = {**options, "lengths": lengths, "said": self._said}
        return [[*start] for start in starts], generate(self._session, ids, count, **options)


def _draws(said: Generation, options: dict[str, Any], echo: Callable[..., None]) -> dict[str, Any]:
    """Return the options of draws: those that were given, then those of the generation config."""
    given = {name: value for name, value in options.items() if value is not None}
    draws = {**said.draws(), **given}
    if said.draws().keys() - given.keys():
        shown = ", ".join(f"{name} {value}" for name, value in draws.items() if name != "seed")
        echo(f"by {ENDS}: {shown}; --temperature 0 takes the largest logits", err=True)
    if said.unused:
        echo(
            f"{ENDS} has, and generate does not use: {printable(', '.join(said.unused))}", err=True
        )
    return draws
