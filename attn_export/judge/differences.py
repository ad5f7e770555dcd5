"""Differences of the golden vectors in a bundle from those that are computed anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from attn_export.bundle.manifest import GOLDEN
from attn_export.judge.judge import judge
from attn_export.results import Golden, RuntimeRun, Verdict

STORED = "stored test cases"
"""The runtime name in the report under which the stored truth is judged."""

MORE = 1.1
"""The ratio of an allowed error to the computed one from which on they differ. That of eager, a
part of it, depends on the processor: 1.2 % were measured."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference of stored evidence from that which is computed anew.

    Attributes:
        text: The difference, without the name of the case.
        case: The name of the case; "" if it is of no case.
        is_of_case: Whether the case is another one, so that the rest cannot be compared.
        is_wrong: Whether the evidence does not count in a bundle of the same version.
    """

    text: str
    case: str = ""
    is_of_case: bool = False
    is_wrong: bool = False

    def __str__(self) -> str:
        """Return the difference on one line."""
        return f"{self.case}: {self.text}" if self.case else self.text


def compare_cases(recomputed: Sequence[Golden], stored: Sequence[Golden]) -> Iterator[Difference]:
    """Yield the differences of stored cases from computed ones, except those of the truth."""
    here, there = ({g.case.name: g for g in goldens} for goldens in (recomputed, stored))
    for name in {**here, **there}:
        if name not in there or name not in here:
            text = "is missing" if name in here else "is not among the cases that are computed"
            yield Difference(text, name, is_of_case=True, is_wrong=True)
            continue
        of_case = list(_labels_that_differ(here[name], there[name]))
        yield from (Difference(text, name, is_of_case=True, is_wrong=True) for text in of_case)
        if not of_case:
            yield from _compare_allowed(here[name], there[name])


def _labels_that_differ(new: Golden, old: Golden) -> Iterator[str]:
    for label in ("kind", "contents", "ignored_rows", "sizes"):
        values = [getattr(golden.case, label) for golden in (old, new)]
        if values[0] != values[1]:
            yield f"its {label} is {values[0]}, and {values[1]} is computed"
    for name in _other_inputs(new, old):
        yield f"its {name} is not the one that is computed"
    if new.unusable.keys() != old.unusable.keys():
        yield f"not compared are {sorted(old.unusable)}, and {sorted(new.unusable)} are computed"


def _other_inputs(new: Golden, old: Golden) -> list[str]:
    stored = old.case.inputs
    return [
        name
        for name, array in new.case.inputs.items()
        if (array.dtype, array.shape) != (stored[name].dtype, stored[name].shape)
        or array.tobytes() != stored[name].tobytes()
    ]


def _compare_allowed(new: Golden, old: Golden) -> Iterator[Difference]:
    for name, computed in new.allowed.items():
        allowed = old.allowed.get(name)
        if computed == allowed:
            continue  # also infinite ones, of cases that are no evidence
        if computed is None or allowed is None:
            text = f"the tolerance for {name} is {allowed}, and {computed} is computed"
            yield Difference(text, new.case.name, is_wrong=True)
            continue
        ratios = (allowed.whole / computed.whole, allowed.row / computed.row)
        if not (min(ratios) >= 1 / MORE and max(ratios) <= MORE):
            text = (
                f"the tolerance for {name} is {allowed.whole:.3g} of the whole and "
                f"{allowed.row:.3g} of a row, {max(ratios):.3g} times what is computed"
            )
            yield Difference(text, new.case.name, is_wrong=max(ratios) > MORE)


def judge_stored(
    recomputed: Sequence[Golden], stored: Sequence[Golden]
) -> tuple[tuple[RuntimeRun, ...], tuple[Verdict, ...]]:
    """Judge the stored truth of cases with equal inputs as if it were the output of a runtime.

    Returns:
        The run of that runtime, if there are such cases, and the verdicts.
    """
    by_name = {golden.case.name: golden for golden in stored}
    pairs = [(new, by_name.get(new.case.name)) for new in recomputed]
    verdicts = [
        verdict
        for new, old in pairs
        if old is not None and not _other_inputs(new, old)
        for verdict in judge(STORED, GOLDEN, new, old.expected)
    ]
    runs = (RuntimeRun(STORED, GOLDEN, "ran", "", True, {}),) if verdicts else ()
    return runs, tuple(verdicts)
