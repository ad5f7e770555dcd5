"""Text as a model generates it: cut before a stop text, and harmless where it is printed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np


def rows_of(tokens: Iterator[np.ndarray], count: int) -> list[Iterator[int]]:
    """Return the tokens of each batch element; steps run as far as one of them is read."""
    return [_row(each, at) for at, each in enumerate(itertools.tee(tokens, count))]


def _row(tokens: Iterator[np.ndarray], at: int) -> Iterator[int]:
    return itertools.takewhile(lambda token: token >= 0, (int(token[at]) for token in tokens))


def until(pieces: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield text up to the first of the stop texts, which may span pieces."""
    held = ""
    for piece in pieces:
        held += piece
        found = [at for stop in stops if (at := held.find(stop)) >= 0]
        if found:
            yield held[: min(found)]
            return
        begun = (n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n]))
        shown = len(held) - max(begun, default=0)
        yield held[:shown]
        held = held[shown:]
    yield held


def harmless(pieces: Iterator[str], between: str) -> Iterator[str]:
    """Yield texts as they come, with nothing that a terminal or a CI system would obey."""
    line = ""
    for number, piece in enumerate(pieces):
        safe = between if number else ""
        for char in piece:
            begun = (line + char).lstrip()
            is_command = begun == "::" or begun.endswith("##[")
            is_shown = (char.isprintable() or char in "\n\t") and not is_command
            line = "" if char == "\n" else begun[-3:]
            safe += char if is_shown else f"\\x{ord(char):02x}" if is_command else ascii(char)[1:-1]
        yield safe


def json_line(value: Mapping[str, object]) -> str:
    """Return a line of JSON, with nothing that a terminal or a CI system would obey."""
    return json.dumps(value).replace("##[", "##\\u005b")
