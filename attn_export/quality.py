"""Distance of a quantised model from the float model, and budgets for it.

It is no part of a verdict: verdicts compare runtimes with the reference of the quantised model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from attn_export.errors import UsageError, first_few, printable
from attn_export.schema import Distance

MEASURES = {"sqnr": ">=", "cosine": ">=", "row": "<=", "kl": "<=", "top1": ">="}
"""The measures of budgets, with their relations to the limit: SQNR in dB, cosine, the largest
relative error of a last-axis slice, and the two measures of `LogitDistance`."""

OF_LOGITS = ("kl", "top1")
"""The measures for outputs that are logits."""

_SHOWN = 12
"""The most outputs that a table has: the most distant ones."""

_SHARES = ("cosine", "top1")
"""The measures whose limit is at most 1."""

FLOATING = "none"
"""The type of weights that are not rounded."""

NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def parse_bound(
    text: str, signs: Mapping[str, str], number: re.Pattern[str]
) -> tuple[str, str] | None:
    """Return the measure and the limit of a text such as ``sqnr>=30``; None if it has no such form.

    `signs`: The relation of each measure to its limit.
    """
    for name, sign in signs.items():
        measure, relation, limit = (word.strip() for word in text.partition(sign))
        if measure == name and relation and number.fullmatch(limit):
            return name, limit
    return None


@dataclasses.dataclass(frozen=True)
class LogitDistance:
    """Distance of an output of a quantised model from the float model, as logits.

    Attributes:
        kl: The mean of KL(softmax(f) ‖ softmax(q)) over the slices along the last axis, in nats.
        top1: The share of slices whose largest element is at the same index in both.
    """

    part: str
    kl: float
    top1: float


@dataclasses.dataclass(frozen=True)
class Loss:
    """Distance of the first output from the float model, if a part alone is rounded.

    Attributes:
        part: What is rounded: ``"weights alone"``, or the name of a layer or of a projection.
        sqnr: As in `Distance`; infinite if it changes nothing.
        top1: As in `LogitDistance`.
    """

    part: str
    sqnr: float
    top1: float

    def share_of(self, other: Loss) -> float:
        """Return its power over that of another loss."""
        return 10 ** ((other.sqnr - self.sqnr) / 10)


@dataclasses.dataclass(frozen=True)
class Budget:
    """A limit on the distance of every output, such as ``sqnr>=30``."""

    measure: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse a budget such as ``sqnr>=30``."""
        bound = parse_bound(text, MEASURES, NUMBER)
        if bound:
            name, limit = bound
            if name in _SHARES and float(limit) > 1:
                raise UsageError(f"{name} is at most 1, as in {name}>=0.99; got {limit}")
            return cls(name, float(limit))
        formats = ", ".join(f"{name}{sign}NUMBER" for name, sign in MEASURES.items())
        raise UsageError(f"a budget is {formats}, as in sqnr>=30; got {printable(text, 40)!r}")

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.measure}{MEASURES[self.measure]}{self.limit:.15g}"

    def is_met(self, distance: Distance | LogitDistance) -> bool:
        """Return whether a part is within the budget."""
        value: float = getattr(distance, self.measure)
        return value <= self.limit if MEASURES[self.measure] == "<=" else value >= self.limit


@dataclasses.dataclass(frozen=True)
class Quality:
    """Distances of a quantised model from the float model.

    Attributes:
        of_logits: The distance of the first output as logits, if a budget limits it; or that of
            each output of a runtime that holds logits.
        sentences: Those of `missed`, if these are the distances of several models.
        causes: The losses by what is rounded, each with what those before it round.
        layers: The loss of each layer alone, the largest first.
        projections: Those of the projections in the first of these.
        kept: The types of weights that have another one than most, by the paths of their modules.
    """

    outputs: tuple[Distance, ...]
    budgets: tuple[Budget, ...]
    of_logits: tuple[LogitDistance, ...] = ()
    sentences: tuple[str, ...] | None = None
    causes: tuple[Loss, ...] = ()
    layers: tuple[Loss, ...] = ()
    projections: tuple[Loss, ...] = ()
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def joined(cls, qualities: Mapping[str, Quality]) -> Quality | None:
        """Return the distances of several models, whose names stand before their parts."""
        of_all: list[tuple[str, Any]] = list(qualities.items())
        if not of_all:
            return None
        return cls(
            tuple(replace(x, part=model + x.part) for model, q in of_all for x in q.outputs),
            tuple(dict.fromkeys(budget for _, q in of_all for budget in q.budgets)),
            tuple(
                dataclasses.replace(x, part=model + x.part) for model, q in of_all
                for x in q.of_logits
            ),
            sentences=tuple(model + sentence for model, q in of_all for sentence in q.missed),
            kept={model + path: of for model, q in of_all for path, of in q.kept.items()},
            **{
                name: tuple(
                    dataclasses.replace(x, part=model + x.part) for model, q in of_all
                    for x in getattr(q, name)
                )
                for name in ("causes", "layers", "projections")
            },
        )  # fmt: skip

    def beside(self, other: Quality | None) -> Quality:
        """Return these distances and others, which the same budgets limit."""
        if other is None:
            return self
        whole = [
            Loss(f"whole, {distance.part}", distance.sqnr, logits.top1)
            for distance in other.outputs
            for logits in other.of_logits
            if distance.part == logits.part and self.causes
        ]
        return dataclasses.replace(
            self, outputs=(*self.outputs, *other.outputs), causes=(*self.causes, *whole),
            of_logits=(*self.of_logits, *other.of_logits),
        )  # fmt: skip

    @property
    def logits(self) -> LogitDistance | None:
        """The first distance of logits, if there is one."""
        return next(iter(self.of_logits), None)

    @property
    def missed(self) -> tuple[str, ...]:
        """A sentence for each missed budget of an output."""
        if self.sentences is not None:
            return self.sentences
        return tuple(
            f"{part.part}: {budget.measure} {getattr(part, budget.measure):.4g}, budget {budget}"
            for budget in self.budgets
            for part in self._parts_of(budget)
            if not budget.is_met(part)
        )

    def measures(self, budget: Budget) -> bool:
        """Return whether there is a distance that a budget limits."""
        return budget.measure not in OF_LOGITS or bool(self.of_logits)

    def shown(self) -> list[Distance]:
        """Return the distances for a table: the largest, in the order of the outputs."""
        least = sorted(self.outputs, key=lambda distance: distance.sqnr)[:_SHOWN]
        return [distance for distance in self.outputs if distance in least]

    @property
    def logits_sentence(self) -> str:
        """The distances of logits in words; "" if there are none."""
        return "; ".join(
            f"{each.part} as logits: KL {each.kl:.3g} nats, top1 {each.top1:.2%}"
            for each in self.of_logits
        )

    def _parts_of(self, budget: Budget) -> Sequence[Distance | LogitDistance]:
        if budget.measure in OF_LOGITS:
            return self.of_logits
        return self.outputs


def kept_notes(kept: Mapping[str, str]) -> list[str]:
    """Return notes on the weights that have other types, by the paths of their modules."""
    kinds = {of: "floating" if of == FLOATING else f"in {of}" for of in sorted({*kept.values()})}
    paths = {how: sorted(p for p, own in kept.items() if own == of) for of, how in kinds.items()}
    return [f"kept {how}: {first_few(some)}" for how, some in paths.items()]


def is_logits(output: str) -> bool:
    """Return whether an output of a whole model holds logits, by its name."""
    return output.endswith("logits")


def is_finite(distance: Distance) -> bool:
    """Return whether all figures are finite. The SQNR of a part without noise is not."""
    return all(map(math.isfinite, (distance.sqnr, distance.cosine, distance.row)))
