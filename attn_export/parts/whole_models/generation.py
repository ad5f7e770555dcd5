"""Tokens of a whole model one after the other: the largest logit, or a draw."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.bundle.text_ends import ENDS, Generation
from attn_export.errors import UsageError, printable
from attn_export.runtimes.decode_inputs import whole_number, whole_numbers
from attn_export.runtimes.decode_session import DecodeSession

_MOST = 2**24
"""The largest number of tokens, and the largest `top_k`."""

_ENDED = -1
"""What stands for the token of a batch element that has ended."""


def generate(
    session: DecodeSession,
    ids: np.ndarray,
    count: int,
    *,
    stop: Sequence[int] = (),
    lengths: Sequence[int] | None = None,
    attention_mask: np.ndarray | None = None,
    encoded: Mapping[str, np.ndarray] | None = None,
    said: Generation | None = None,
    **draws: Any,
) -> Iterator[np.ndarray]:
    """Return an iterator over the next token ids; see `DecodeSession.generate`.

    `said`: The generation config, whose tokens are forced and suppressed.
    """
    count, draw = whole_number("count", count, _MOST), _Draws.of(**draws)
    given = list(stop) if isinstance(stop, Collection) else stop
    ends = np.zeros(0, np.int64) if given == [] else whole_numbers(given)
    if ends is None or ends.ndim != 1:
        raise UsageError(f"stop is {printable(str(stop), 60)}; give token ids")
    masks = {} if attention_mask is None else {"attention_mask": attention_mask}
    if not isinstance(encoded or {}, Mapping):
        raise UsageError(f"encoded is a {type(encoded).__name__}; give arrays by name")
    # The last token is not run.
    inputs = {**masks, **(encoded or {})}
    logits = session.prefill(ids, lengths=lengths, more=count - 1, **inputs)["logits"]
    seen = np.zeros((len(logits), logits.shape[-1]), bool)
    if draw.repetition_penalty != 1:
        before = np.asarray(ids)
        held = np.arange(before.shape[1]) < session.lengths[:, None]
        if attention_mask is not None:
            held = np.asarray(attention_mask) != 0
        rows, columns = np.nonzero(held)
        seen[rows, before[rows, columns]] = True
    rules = _Rules(said or Generation(), logits.shape[-1], count, is_begun=np.shape(ids)[1] > 1)
    # The iterator starts at its first token, when the session may have another cache.
    return _tokens(session, session.mark, logits, count, ends, draw, seen, rules)


def _tokens(
    session: DecodeSession, mark: object, logits: np.ndarray, count: int, ends: np.ndarray,
    draw: _Draws, seen: np.ndarray, rules: _Rules,
) -> Iterator[np.ndarray]:  # fmt: skip
    """Yield tokens; `seen` says which there were before, bool `[B, V]`."""
    random, has_ended = np.random.default_rng(draw.seed), np.zeros(len(logits), bool)
    for number in range(count):
        allowed = rules.allowed(draw.penalised(logits[:, -1], seen), number)
        token = draw.next(allowed, random)
        seen[np.arange(len(token)), token] = True
        yield np.where(has_ended, _ENDED, token)
        if ends.size:
            has_ended |= np.isin(token, ends)
        if has_ended.all() or number == count - 1:
            return
        if session.mark is not mark:
            raise UsageError("the session was used for something else; generate again")
        logits = session.step(token[:, None], copy=False)["logits"]
        mark = session.mark


class _Rules:
    """The tokens that a generation config forces and suppresses, as transformers does.

    `size`: The number of tokens of the vocabulary.
    `count`: The most tokens to generate.
    `is_begun`: Whether there is more than one token before the first.
    """

    def __init__(self, said: Generation, size: int, count: int, *, is_begun: bool) -> None:
        first = None if is_begun else said.forced_bos_token_id
        # A single token is the last one.
        forced = {0: first, count - 1: said.forced_eos_token_id}
        self._forced = {at: token for at, token in forced.items() if token is not None}
        for token in self._forced.values():
            if token >= size:
                raise UsageError(f"{ENDS} forces token {token}; there are {size}")
        ids = np.arange(size)
        self._hidden = np.isin(ids, said.suppress_tokens or ())
        self._hidden_first = self._hidden | np.isin(ids, said.begin_suppress_tokens or ())
        self._first = 0 if first is None else 1

    def allowed(self, logits: np.ndarray, number: int) -> np.ndarray:
        """Return the logits `[B, V]` of a token, -inf where it may not be."""
        hidden = self._hidden_first if number == self._first else self._hidden
        if number in self._forced:
            hidden = np.arange(len(hidden)) != self._forced[number]
        return np.where(hidden, -np.inf, logits) if hidden.any() else logits


@dataclasses.dataclass(frozen=True)
class _Draws:
    """How tokens are drawn.

    Attributes:
        temperature: Divides the logits; 0 takes the largest.
        top_k: The number of the likeliest tokens to draw from; 0 for all.
        top_p: The share that the tokens to draw from have together, the likeliest first.
        repetition_penalty: Divides the positive logits of tokens that were there before, and
            multiplies the negative ones.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @classmethod
    def of(cls, **options: Any) -> _Draws:
        """Return checked options."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options.keys() - set(names):
            raise UsageError(
                f"unknown option {printable(name, 40)}; choose from {', '.join(names)}"
            )
        draws = cls(**options)
        for name, least, most, says in (
            ("temperature", 0, math.inf, "a number from 0"),
            ("top_p", math.ulp(0), 1.0, "a number above 0, at most 1"),
            ("repetition_penalty", math.ulp(0), math.inf, "a number above 0"),
            ("top_k", 0, _MOST, f"a whole number from 0 to {_MOST}"),
            ("seed", 0, 2**63, "a whole number from 0"),
        ):
            value = getattr(draws, name)
            kinds = int if says.startswith("a whole") else (int, float)
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not least <= value <= most or value == math.inf:
                raise UsageError(f"{name} is {printable(str(value), 40)}; give {says}")
        return draws

    def penalised(self, logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """Return logits `[B, V]` in which tokens that were there before are less likely."""
        if self.repetition_penalty == 1:
            return logits
        wide = logits.astype(np.float64)
        factor = np.where(wide < 0, self.repetition_penalty, 1 / self.repetition_penalty)
        return np.where(seen, wide * factor, wide)

    def next(self, logits: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return a token for each row of logits, `[B, V]`: int64 `[B]`."""
        if not self.temperature:
            greedy: np.ndarray = logits.argmax(-1)
            return greedy
        logits = logits.astype(np.float64)
        order = np.argsort(-logits, axis=-1, kind="stable")
        scores = np.take_along_axis(logits, order, axis=-1)
        with np.errstate(over="ignore"):
            shares = np.exp((scores - scores[:, :1]) / self.temperature)
        shares[:, self.top_k or len(shares[0]) :] = 0
        shares /= shares.sum(-1, keepdims=True)
        # The first tokens that have `top_p` together: those before which there is less.
        shares[shares.cumsum(-1) - shares >= self.top_p] = 0
        bounds = shares.cumsum(-1)
        at = (random.random((len(logits), 1)) * bounds[:, -1:] >= bounds).sum(-1)
        drawn: np.ndarray = np.take_along_axis(order, at[:, None], axis=-1)[:, 0]
        return drawn
