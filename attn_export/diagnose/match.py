"""Search for the known mistake that reproduces a runtime's numbers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attn_export.diagnose.evaluate import Evaluation, NotComputedError, Values
from attn_export.diagnose.explanation import Late
from attn_export.diagnose.in_activations import activation_mistakes
from attn_export.diagnose.in_attention import (
    attention_mistakes,
    rotary_mistakes,
    scale_mistake,
    softcap_mistake,
    softcap_of,
    swapped_heads,
)
from attn_export.diagnose.in_block_cache import block_mistakes
from attn_export.diagnose.in_graph import (
    input_mistakes,
    mask_mistakes,
    precision_mistakes,
    value_mistakes,
)
from attn_export.diagnose.in_integer_cache import cache_mistakes, stale_scales
from attn_export.diagnose.in_integers import fitted_weight_mistakes, weight_mistakes
from attn_export.diagnose.mistake import Mistake
from attn_export.parity.measures import eps
from attn_export.tensorfile import Array, is_floating

if TYPE_CHECKING:
    import onnx

KEPT = 12
"""Number of mistakes that are tried on all cases: those that account best for the first one.

One that is the cause has to account for every case that fails.
"""

ROUNDINGS = 256
"""Number of roundings of the output's type by which a mistake may differ from what came out."""

FAR = 10.0
"""Weight of a NaN or an infinity in the wrong place, in root mean squares of the output."""

CONVINCING = 0.02
"""A mistake that leaves less than this of the error unexplained needs no fitting."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One case: its right and its actual outputs.

    Attributes:
        inputs: By name.
        values: The values of the right graph, in float64.
        right: Its outputs.
        actual: The outputs that are to be explained.
    """

    inputs: Mapping[str, Array]
    values: Values
    right: Mapping[str, Array]
    actual: Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Match:
    """A mistake that reproduces the outputs.

    Attributes:
        unexplained: The distance that is left, as a share of the error: 0 explains all of it.
        exact: Whether the rest of the error is only rounding.
    """

    mistake: Mistake
    unexplained: float
    exact: bool


def matches(
    evaluation: Evaluation, evidence: Sequence[Evidence], late: Late = lambda: False
) -> list[Match]:
    """Return the mistakes that account for the numbers, the best first.

    Args:
        evaluation: The right graph.
        evidence: Cases that failed first, then some that passed; the first one matters most.
        late: Whether time is over.
    """
    first = evidence[:1]
    screened = list(_tried(_all(evaluation, evidence[0]), evaluation, first, late))
    screened.sort(key=_order)
    if not screened or screened[0].unexplained > CONVINCING:
        more = itertools.chain(
            _pairs(evaluation),
            fitted_weight_mistakes(evaluation),
            _fitted(evaluation, first, late),
        )
        screened += _tried(more, evaluation, first, late)
        screened.sort(key=_order)
    best = (match.mistake for match in screened[:KEPT])
    found = sorted(_tried(best, evaluation, evidence, late), key=_order)
    return [match for match in found if match.unexplained <= 1 - match.mistake.share]


def _order(match: Match) -> float:
    return round(match.unexplained, 3)  # rounding is not to decide between two that fit


def unexplained_share(
    mistake: Mistake, evaluation: Evaluation, evidence: Sequence[Evidence]
) -> tuple[float, bool]:
    """Return the share of the error that a mistake leaves, and whether that is only rounding.

    Args:
        mistake: The mistake.
        evaluation: The right graph.
        evidence: Cases with their actual outputs.
    """
    left = total = 0.0
    rounding = True
    for case in evidence:
        given = mistake.outputs(evaluation, case.inputs, case.values)
        for name, right in case.right.items():
            actual = case.actual[name]
            apart = _distance(given[name], actual, right)
            left += apart
            total += _distance(right, actual, right)
            if is_floating(actual.dtype):
                rounding &= math.sqrt(apart) <= ROUNDINGS * eps(actual.dtype)
    return (math.sqrt(left / total) if total else math.inf), rounding


def _all(evaluation: Evaluation, case: Evidence) -> Iterator[Mistake]:
    # Of two that give the same numbers the simpler one comes first.
    return itertools.chain(
        input_mistakes(evaluation, case.values),
        value_mistakes(evaluation),
        weight_mistakes(evaluation),
        activation_mistakes(evaluation),
        cache_mistakes(evaluation),
        block_mistakes(evaluation),
        mask_mistakes(evaluation, case.values),
        rotary_mistakes(evaluation),
        attention_mistakes(evaluation),
        precision_mistakes(),
    )


def _tried(
    mistakes: Iterable[Mistake], evaluation: Evaluation, evidence: Sequence[Evidence], late: Late
) -> Iterator[Match]:
    for mistake in mistakes:
        if late():
            return
        try:
            with np.errstate(all="ignore"):
                left, rounding = unexplained_share(mistake, evaluation, evidence)
        except (NotComputedError, ValueError, IndexError, AssertionError, TypeError, KeyError):
            continue  # it does not fit these shapes
        if left < 1:
            yield Match(mistake, left, rounding)


def _distance(x: Array, actual: Array, right: Array) -> float:
    """Return the mean square distance, relative to the right output's."""
    if x.shape != actual.shape:
        return FAR * FAR
    if not x.size:
        return 0.0
    x, y = (a.astype(np.float64) for a in (x, actual))
    finite = right[np.isfinite(right)].astype(np.float64)
    scale = math.sqrt(float(np.square(finite).mean())) if finite.size else 0.0
    scale = scale or 1.0
    usable = np.isfinite(x) & np.isfinite(y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    apart = np.where(usable, (np.where(usable, x, 0) - np.where(usable, y, 0)) / scale, FAR)
    return float(np.square(np.where(same, 0.0, apart)).mean())


def _attentions(evaluation: Evaluation) -> list[onnx.NodeProto]:
    return [node for node in evaluation.nodes if node.op_type == "Attention"]


def _pairs(evaluation: Evaluation) -> Iterator[Mistake]:
    for node in _attentions(evaluation):
        yield from swapped_heads(evaluation, node)


def _fitted(evaluation: Evaluation, cases: Sequence[Evidence], late: Late) -> Iterator[Mistake]:
    """Yield the best factor on the scale and the softcap of each node, and on a cache's scales."""
    makers: list[Callable[[float], Mistake]] = []
    for node in _attentions(evaluation):
        makers.append(functools.partial(scale_mistake, evaluation, node))
        if softcap_of(node):
            makers.append(functools.partial(softcap_mistake, evaluation, node))
    for make in (*makers, *stale_scales(evaluation)):
        if late():
            return

        def left(log: float, make: Callable[[float], Mistake] = make) -> float:
            return unexplained_share(make(math.exp(log)), evaluation, cases)[0]

        yield make(math.exp(_lowest(left)))


def _lowest(of: Callable[[float], float]) -> float:
    """Return the argument, between the logs of 1/8 and 8, that minimises a function."""
    grid = np.linspace(-math.log(8), math.log(8), 25)
    found = [of(float(x)) for x in grid]
    middle = int(np.argmin(found))
    low, high = float(grid[max(middle - 1, 0)]), float(grid[min(middle + 1, len(grid) - 1)])
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(30):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if of(a) < of(b) else (a, high)
    return (low + high) / 2
