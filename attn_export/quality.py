"""Distance of a quantised model from the model with its own weights, and budgets for it.

This is never part of a verdict: verdicts are about the model that the integers stand for.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from attn_export.errors import UsageError, printable

MEASURES = {"sqnr": ">=", "cosine": ">=", "row": "<=", "kl": "<=", "top1": ">="}
"""Measures of budgets with their signs: SQNR in dB, cosine, largest relative error of a row, and
the two of `LogitDistance`."""

OF_LOGITS = ("kl", "top1")
"""The measures of an output that is read as logits."""

SHARES = ("cosine", "top1")
"""The measures that are at most 1."""

ATTENDED = "attention"
"""The part before the output projection, in which the heads are still apart."""

NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclasses.dataclass(frozen=True)
class Distance:
    """Distance of one part of a quantised model from the same part with its own weights.

    Attributes:
        part: An output, a head of it, or a weight that alone is quantised.
        sqnr: Signal over noise, 10·log10(‖f‖² / ‖q − f‖²) in dB.
        cosine: Of the angle between f and q, as vectors.
        row: The largest ‖q_row − f_row‖ / ‖f_row‖ over rows of the last axis.
    """

    part: str
    sqnr: float
    cosine: float
    row: float


@dataclasses.dataclass(frozen=True)
class Split:
    """Parts of what quantising one tensor alone changes in the first output.

    Attributes:
        part: The tensor: a weight, the keys or the values of the cache, or the activations.
        rounding: SQNR in dB with the part of each error that is at most half a step; None where
            there is none.
        clipped: SQNR in dB with what lies beyond, of values outside the range of the integers.
        share: The share of such values.
    """

    part: str
    rounding: float | None
    clipped: float | None
    share: float

    @property
    def sentence(self) -> str:
        """The figures in words."""
        rounding = "nothing" if self.rounding is None else f"{self.rounding:.1f} dB"
        clipped = "nothing" if self.clipped is None else f"{self.clipped:.1f} dB"
        share = f" ({self.share:.2%} of its values)" if self.share else ""
        return f"{self.part}: rounding {rounding}, clipping {clipped}{share}"


@dataclasses.dataclass(frozen=True)
class LogitDistance:
    """Distance of the first output of a quantised model, where it is read as logits.

    Attributes:
        part: The output.
        kl: KL(softmax(f) ‖ softmax(q)) over the last axis, in nats, as a mean of rows.
        top1: The share of rows whose largest element is the same in both.
    """

    part: str
    kl: float
    top1: float


@dataclasses.dataclass(frozen=True)
class Budget:
    """A limit on the distance of every output: ``sqnr>=30``."""

    measure: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read a budget.

        Raises:
            UsageError: If it is something else.
        """
        for name, sign in MEASURES.items():
            left, found, right = (word.strip() for word in text.partition(sign))
            if left == name and found and NUMBER.fullmatch(right):
                if name in SHARES and float(right) > 1:
                    raise UsageError(f"{name} is at most 1, as in {name}>=0.99; got {right}")
                return cls(name, float(right))
        wanted = ", ".join(f"{name}{sign}NUMBER" for name, sign in MEASURES.items())
        raise UsageError(f"a budget is {wanted}, as in sqnr>=30; got {printable(text, 40)!r}")

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.measure}{MEASURES[self.measure]}{self.limit:.15g}"

    def is_met(self, distance: Distance | LogitDistance) -> bool:
        """Return whether a part is within the budget."""
        value: float = getattr(distance, self.measure)
        return value <= self.limit if MEASURES[self.measure] == "<=" else value >= self.limit


@dataclasses.dataclass(frozen=True)
class Quality:
    """Distances of a quantised model from its unquantised one.

    Attributes:
        outputs: Of each output.
        heads: Of each head: of outputs that have heads, and of the attention before `out_proj`.
        weights: Of the first output, with one weight alone quantised, or the cache, its keys or its
            values, or the activations.
        budgets: The limits for outputs.
        logits: Of the first output as logits, if a budget is about that.
        splits: Of the first output, with one tensor alone quantised: rounding and clipped values.
    """

    outputs: tuple[Distance, ...]
    heads: tuple[Distance, ...]
    weights: tuple[Distance, ...]
    budgets: tuple[Budget, ...]
    logits: LogitDistance | None = None
    splits: tuple[Split, ...] = ()

    @property
    def missed(self) -> tuple[str, ...]:
        """A sentence for each output and budget that it misses, with what matters most."""
        return tuple(
            f"{part.part}: {budget.measure} {getattr(part, budget.measure):.4g}, budget {budget}"
            f"{self._worst(part)}"
            for budget in self.budgets
            for part in self._parts_of(budget)
            if not budget.is_met(part)
        )

    def shown(self) -> list[tuple[str, Distance]]:
        """Return the outputs, the worst head and the weights, each with words to put before it."""
        head = worst(self.heads)
        return [
            *(("", each) for each in self.outputs),
            *((("worst head: ", head),) if head else ()),
            *(("only ", each) for each in self.weights),
        ]

    @property
    def logits_sentence(self) -> str:
        """The figures of the first output as logits, if a budget is about that."""
        found = self.logits
        if found is None:
            return ""
        return f"{found.part} as logits: KL {found.kl:.3g} nats, top1 {found.top1:.2%}"

    def _parts_of(self, budget: Budget) -> Sequence[Distance | LogitDistance]:
        if budget.measure in OF_LOGITS:
            return [self.logits] if self.logits else []
        return self.outputs

    def _worst(self, part: Distance | LogitDistance) -> str:
        # heads of outputs that have none are those of the attention before it
        names = (f"{part.part} head ", f"{ATTENDED} head ")
        own = [[h for h in self.heads if h.part.startswith(name)] for name in names]
        said = [
            ("the worst head is", worst(own[0] or own[1])),
            ("most matters", worst(self.weights)),
        ]
        return "".join(
            f"; {words} {each.part} ({each.sqnr:.1f} dB)" for words, each in said if each
        )


def worst(distances: Sequence[Distance]) -> Distance | None:
    """Return the one of the least SQNR, or None of none."""
    return min(distances, key=lambda each: each.sqnr, default=None)


def parse_budgets(texts: Iterable[str]) -> tuple[Budget, ...]:
    """Read budgets.

    Raises:
        UsageError: If one is none.
    """
    return tuple(Budget.parse(text) for text in texts)


def is_finite(distance: Distance) -> bool:
    """Return whether all figures are numbers: a part without noise has no SQNR."""
    return all(map(math.isfinite, (distance.sqnr, distance.cosine, distance.row)))
