"""Hostile arguments of a `DecodeSession`: each ends in one line, and spoils no other row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from attn_export import DecodeSession
from attn_export.errors import AttnExportError

E = 16
WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, 2**40, 2**80, float("nan"), "", "x", "\x1b[31m", [], [[]], {},
    [1, 2], [[1], [1, 2]], [None], b"x", np.nan, np.zeros((0,)), np.array("x"),
    np.array(2**63, np.uint64),
    np.zeros((2, 0, E), "f4"), np.zeros((2, 3, E), "f8"), np.zeros((2, 3, E), ">f4"),
    np.zeros((2, 3, E, 1), "f4"), np.array([object()]), np.ma.masked_array([1.0]), range(3),
    object(),
)  # fmt: skip
VALUES = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0.0)


def pick(random: np.random.Generator, choices: Any) -> Any:
    """Return one of some choices."""
    return choices[int(random.integers(len(choices)))]


def decode(bundle: Path, number: int) -> str:
    """Call a session with one thing wrong; return what was wrong about it, or a message.

    Args:
        bundle: A bundle with a cache in place, of a query `[B, L, 16]` alone.
        number: Determines the arguments.

    Raises:
        AssertionError: If an error is not one line, or a value reached another row.
    """
    random = np.random.default_rng(number)
    kinds: list[Callable[[Path, np.random.Generator], str]] = [
        _options,
        _arguments,
        _padding,
        _order,
    ]
    try:
        return kinds[number % len(kinds)](bundle, random)
    except AttnExportError as error:
        text = str(error)
        assert text.isprintable(), text
        assert len(text) <= 300, text
        return text


def _options(bundle: Path, random: np.random.Generator) -> str:
    name = pick(random, ["block", "threads", "device", "dialect", "bundle"])
    value = pick(random, WRONG)
    options: dict[str, Any] = {"bundle": bundle, "threads": 1, name: value}
    session = DecodeSession(**options)
    session.prefill(np.zeros((1, 1, E), "f4"))
    return f"accepts {name}"


def _arguments(bundle: Path, random: np.random.Generator) -> str:
    session, query = DecodeSession(bundle, threads=1, block=8), _query(random)
    session.prefill(query)
    value = pick(random, WRONG)
    calls: list[Callable[[], object]] = [
        lambda: session.prefill(value), lambda: session.step(value),
        lambda: session.prefill(query, lengths=value), lambda: session.reorder(value),
        lambda: session.step(query[:, :1], attn_mask=value),
        lambda: session.step(query[:, :1], past_length=value),
    ]  # fmt: skip
    pick(random, calls)()
    return "accepted"


def _padding(bundle: Path, random: np.random.Generator) -> str:
    session, query = DecodeSession(bundle, threads=1, block=8), _query(random)
    lengths = random.integers(1, query.shape[1] + 1, len(query))
    found = []
    for value in (0.0, pick(random, VALUES)):
        for row, length in enumerate(lengths):
            query[row, length:] = value
        first = session.prefill(query, lengths=lengths)["output"]
        found.append([*(first[row, :length] for row, length in enumerate(lengths)),
                      session.step(query[:, :1])["output"]])  # fmt: skip
    for wanted, got in zip(*found, strict=True):
        assert np.array_equal(wanted, got), "what padding holds changes an output"
    return "padding changes nothing"


def _order(bundle: Path, random: np.random.Generator) -> str:
    """Call a session in any order, writing into all that it gives: it holds what it was given."""
    session, held = DecodeSession(bundle, threads=1, block=8), _query(random)
    session.prefill(held)["output"][...] = np.nan
    for _ in range(int(random.integers(1, 7))):
        rows = random.integers(len(held), size=int(random.integers(1, 4)))
        count, new = int(random.integers(held.shape[1])), _query(random)
        call = pick(random, ["step", "reorder", "fork", "rewind", "prefill", "wrong", "lengths"])
        if call == "step":
            new = np.resize(new, (len(held), *new.shape[1:]))
            session.step(new)["output"][...] = np.nan
            held = np.concatenate([held, new], axis=1)
        elif call == "reorder":
            session.reorder(rows)
            held = held[rows]
        elif call == "fork":
            other = session.fork(rows)
            other.step(held[rows, :1])
            if random.random() < 0.5:
                session, held = other, np.concatenate([held[rows], held[rows, :1]], axis=1)
        elif call == "rewind":
            session.rewind(count)
            held = held[:, : held.shape[1] - count]
        elif call == "prefill":
            session.prefill(new)
            held = new.copy()
            new[...] = np.nan
        elif call == "wrong":
            with contextlib.suppress(AttnExportError):
                session.step(pick(random, WRONG))
        session.lengths[...] = 0
    assert session.lengths.tolist() == [held.shape[1]] * len(held)
    last = session.step(held[:, :1])["output"]
    whole = DecodeSession(bundle, threads=1).prefill(np.concatenate([held, held[:, :1]], axis=1))
    assert np.allclose(last, whole["output"][:, -1:], atol=1e-4), "it held something else"
    return "any order is right"


def _query(random: np.random.Generator) -> np.ndarray:
    shape = (int(random.integers(1, 4)), int(random.integers(2, 9)), E)
    return random.standard_normal(shape).astype("f4")
