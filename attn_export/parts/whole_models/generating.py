"""The flow of `generate`: prompts in batches to a model, and its tokens as text or ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from attn_export.bundle.text_ends import ENDS, Generation
from attn_export.commands.output import echo
from attn_export.errors import UsageError, printable
from attn_export.parts.whole_models.bundle_text import BundleText
from attn_export.parts.whole_models.encoder_decoder import EncoderDecoder, Start, decoder_of
from attn_export.parts.whole_models.generated_text import print_json, print_pieces, rows_of, until
from attn_export.parts.whole_models.generation import generate
from attn_export.parts.whole_models.prompts import encoded, is_text, parse_ids, read_prompts
from attn_export.parts.whole_models.sound import features_of
from attn_export.report.progress import progress
from attn_export.runtimes.decode_session import DecodeSession

_TOGETHER = 8
"""The most prompts that are one batch."""


def print_generated(
    bundle: Path, *, prompt: str | None, ids: str | None, file: Path | None, sound: Path | None,
    is_chat: bool, stops: Sequence[str], count: int, threads: int | None, dialect: str | None,
    **options: Any,
) -> None:  # fmt: skip
    """Print what a model makes of prompts; the arguments are the options of `generate`.

    `options`: Those of draws, None where the generation config decides.
    """
    if [prompt, ids, file, sound].count(None) != 3:
        raise UsageError("give one of --prompt TEXT, --ids 1,2,3, --prompts FILE and --sound FILE")
    if not all(stops):
        raise UsageError("--stop is empty; give a text")
    given = read_prompts(file) if file else [parse_ids(ids) if ids is not None else prompt or ""]
    decoder = decoder_of(bundle)
    if sound and not decoder:
        raise UsageError(f"--sound is for encoder-decoders, and {bundle} is none; give a prompt")
    text = BundleText(decoder or bundle)
    texts = [text.has_tokenizer] if sound else [is_text(each) for each in given]
    for flag, is_wrong in (
        ("--chat", is_chat and (sound or not all(texts))), ("--stop", stops and not all(texts)),
    ):  # fmt: skip
        if is_wrong:
            raise UsageError(f"{flag} is for text, which is not what was given; leave it out")
    model: _Model = (EncoderDecoder if decoder else _Decoder)(
        bundle, text.generation, threads=threads, dialect=dialect
    )
    starts: list[Start] = (
        [features_of(sound, text.sound)] if sound
        else [encoded(each, text, is_chat=is_chat) for each in given]
    )  # fmt: skip
    draws = _draws(text.generation, options)
    ends = *text.generation.ends, *(each for stop in stops for each in text.special_ids(stop))
    with progress(quiet=file is None) as bar:
        bar.expect(len(starts))
        for first in range(0, len(starts), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            before, tokens = model.generate(starts[some], count, stop=ends, **draws)
            rows = rows_of(tokens, len(before))
            for ids_before, row, gives_text in zip(before, rows, texts[some], strict=True):
                pieces = until(text.decode(ids_before, row), stops) if gives_text else map(str, row)
                if file is None:
                    print_pieces(pieces, "" if gives_text else " ")
                    continue
                found = {"text": "".join(pieces)} if gives_text else {"ids": [*map(int, pieces)]}
                with bar.hidden():
                    print_json(found)
                bar.advance("generating")
    if not (sound or decoder or is_chat) and any(texts):
        echo("no chat template applied" + "; --chat applies it" * text.has_template, err=True)


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
        prompts = [[*start] for start in starts]
        lengths = [len(prompt) for prompt in prompts]
        ids = np.array([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])
        options = {**options, "lengths": lengths, "said": self._said}
        return prompts, generate(self._session, ids, count, **options)


def _draws(said: Generation, options: dict[str, Any]) -> dict[str, Any]:
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
