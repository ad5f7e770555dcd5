"""Search for the fault that makes a model's float64 run equal a wrong graph's outputs.

Each fault is made in the whole model first, then beside another, then in one layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from attn_export.explain.explanation import Cause, OutOfTime
from attn_export.parts.whole_models.faults.changed_configs import other_configs
from attn_export.parts.whole_models.faults.changed_models import (
    Edit,
    Variant,
    changed,
    enlarged,
    layer_of,
    run_cost,
)
from attn_export.parts.whole_models.faults.modules import (
    other_activations,
    other_ends,
    other_forwards,
    other_inputs,
    other_masks,
)
from attn_export.parts.whole_models.faults.parameters import (
    SCALED,
    exchanged_parameters,
    other_frequencies,
    other_numbers,
    other_parameters,
    scaled_parameters,
)
from attn_export.parts.whole_models.lora_adapter import other_adapters

_Run = Callable[[nn.Module], Mapping[str, np.ndarray]]

_ROWS = (
    other_adapters, other_activations, other_inputs, other_masks, other_numbers, other_forwards,
    other_configs, other_frequencies, other_parameters, other_ends, exchanged_parameters,
    scaled_parameters,
)  # fmt: skip
"""Sources of wrong variants of a model, the most likely first."""

_EQUAL = 1e-3
"""A fault that leaves a smaller share of the error unexplained ends the search: others of another
source could only be as good."""

_SURE = 0.01
"""If a fault leaves a smaller share unexplained, no others are tried in single layers."""

_ALONE = 0.1
"""If a fault leaves a smaller share unexplained, no others are tried beside it."""

_HELPS = 0.8
"""The largest share that one of two faults leaves unexplained alone."""

_EXACT = 1e-4
"""If a pair of faults leaves a smaller share, neither is sought again."""

_LIKELY = 0.2
"""The largest unexplained share of a cause."""

_BESIDE = 3
"""The number of faults beside which others are tried."""

_FITS = 0.5
"""The least cosine between the error and that of a wrong number, of either sign, for which a better
one is sought."""

_ALIKE = 0.9
"""The same for the scale of a weight in one layer: there are many."""

_STEPS = 6
"""The number of numbers that are tried then."""

_MOVED = 2e-6
"""The least difference of an output, relative to its size, that is no rounding."""

_UNRELATED = 0.3
"""The largest correlation with the truth of outputs of another checkpoint."""

_FAR = 10.0
"""The error of an element that is not finite, in root mean squares of the output."""


@dataclasses.dataclass(frozen=True)
class _TriedFault:
    """A fault that was made in a model.

    Attributes:
        unexplained: The share of the error that it leaves.
        cosine: That of its error and the error to explain.
        ratio: The length of the latter in its direction, in lengths of its error.
        moved: Which outputs it changes.
        is_fit: Whether its number was sought; not that of a round one that explains all.
    """

    variant: Variant
    unexplained: float
    cosine: float
    ratio: float
    moved: Sequence[bool]
    is_fit: bool = False


def _order_of(tried: _TriedFault) -> float:
    """Return what to sort faults by, the best first."""
    # Noise must not decide between faults that fit alike, nor a fit go before another fault.
    left = round(tried.unexplained, 4) + (_EQUAL if tried.is_fit else 0)
    return max(left, _EQUAL) if tried.variant.kind == SCALED else left


def _said_of(one: _TriedFault) -> str:
    """Return what is wrong; a number that was sought is no more than a fit."""
    return f"{one.variant.sentence} (a fit)" if one.is_fit else one.variant.sentence


class _Search:
    """Search for the faults that give a model the outputs of a wrong graph."""

    def __init__(
        self, model: nn.Module, run: _Run, got: Mapping[str, np.ndarray], out_of_time: OutOfTime,
        beside: Sequence[Edit] = (),
    ) -> None:  # fmt: skip
        self._model, self._run, self._out_of_time = model, run, out_of_time
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._beside = [edit for edit in beside if id(edit.owner) in self._paths]
        self._got, self._truth = got, run(model)
        self._cost = run_cost(model, self._truth)
        self._names = [n for n in got if np.issubdtype(self._truth[n].dtype, np.floating)]
        self._errors = self._differences(got)
        self._error = np.concatenate(self._errors)
        self.size = float(np.linalg.norm(self._error))

    def _differences(self, outputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the differences of outputs from the truth, each relative to its size."""
        differences = []
        for name in self._names:
            right = self._truth[name].ravel()
            with np.errstate(all="ignore"):
                difference = outputs[name].astype(np.float64).ravel() - right
                difference /= np.linalg.norm(right) or 1.0
            far = _FAR / math.sqrt(right.size or 1)
            differences.append(np.nan_to_num(difference, nan=far, posinf=far, neginf=-far))
        return differences

    def everywhere(self, only: str = "") -> list[_TriedFault]:
        """Try the faults in the whole model, or `only` those of one subject; the best first."""
        tried: list[_TriedFault] = []
        for row in _ROWS if self.size else ():
            tried += self._each(v for v in row(self._model) if only in ("", v.subject))
            if any(one.unexplained < _EQUAL for one in tried):
                break
        numbers = (one for one in tried if one.variant.other and abs(one.cosine) > _FITS)
        if min((one.unexplained for one in tried), default=1.0) >= _SURE:
            for one in _first_of_each(sorted(numbers, key=_rank)):
                tried += self._fitted(one)
        return sorted(tried, key=_order_of)

    def in_parts(self, tried: Sequence[_TriedFault]) -> list[_TriedFault]:
        """Try the faults in one layer and in the places of one name, too; the best first.

        The layers that change the outputs that are wrong come first.
        """
        unlike = dict(self._unlike_layers())
        # A layer's own keys and values are right if what is wrong comes after them.
        most = max(sorted(set(unlike.values()))[:2], default=0)
        parts = [
            (unlike.get(layer_of(part.edits[0].at), 0), -one.cosine, number, part)
            for number, one in enumerate(tried)
            for part in one.variant.parts()
        ]
        parts = [each for each in parts if each[0] <= most]
        found = list(tried)
        for one in self._each(part for *_, part in sorted(parts, key=lambda each: each[:3])):
            least = _ALIKE if one.variant.kind == SCALED else _FITS
            found += [one, *(self._fitted(one) if abs(one.cosine) > least else ())]
            if min(one.unexplained for one in found) < _EQUAL:
                break
        return sorted(found, key=_order_of)

    def _unlike_layers(self) -> Iterator[tuple[str, int]]:
        """Yield how many outputs are wrong and not changed by a layer's weights, or the reverse."""
        wrong = [float(np.linalg.norm(error)) > _MOVED for error in self._errors]
        for at, layer in self._model.named_modules():
            if at and layer_of(at) == at:
                edits = tuple(enlarged(layer))
                for one in self._each([Variant("", "", edits)]):
                    yield at, sum(a != b for a, b in zip(wrong, one.moved, strict=True))

    def _each(self, variants: Iterable[Variant]) -> Iterator[_TriedFault]:
        for variant in variants:
            if self._out_of_time(self._cost):
                return
            try:
                edits = self._beside_in(variant)
                with variant.applied(self._model) as model, changed(edits):
                    differences = self._differences(self._run(model))
            except Exception:  # impossible in this model, in as many ways as there are models
                continue
            moved = [float(np.linalg.norm(each)) > _MOVED for each in differences]
            step = np.concatenate(differences)
            length, along = float(np.linalg.norm(step)), float(step @ self._error)
            if length:
                left = float(np.linalg.norm(self._error - step)) / self.size
                yield _TriedFault(
                    variant, left, along / (length * self.size), along / length**2, moved
                )

    def _beside_in(self, variant: Variant) -> list[Edit]:
        """Return the edits beside which faults are made, for a variant that is built anew."""
        return self._moved(self._beside, variant.model) if variant.model is not None else []

    def _moved(self, edits: Iterable[Edit], to: nn.Module) -> list[Edit]:
        """Return edits of this model as those of another of the same modules."""
        paths = ((edit, self._paths.get(id(edit.owner))) for edit in edits)
        return [
            edit if path is None else dataclasses.replace(edit, owner=to.get_submodule(path))
            for edit, path in paths
        ]

    def _fitted(self, tried: _TriedFault) -> list[_TriedFault]:
        """Try other wrong numbers, each as far from the right one as the error suggests.

        Returns:
            Those tried, with round numbers near the last one first.
        """
        found: list[_TriedFault] = []
        other, last = tried.variant.other, (0.0, 0.0)
        for _ in range(_STEPS):
            if other is None or tried.variant.numbers is None or tried.unexplained < _EQUAL:
                break
            if found and abs(tried.ratio - 1) < _EQUAL:
                break  # no other number explains more
            # A secant through the two last numbers, the first of which is the right one.
            right, wrong = tried.variant.numbers
            before, reached = last if found else (right, 0.0)
            last = wrong, 1 / tried.ratio
            slope = (last[1] - reached) / (wrong - before) if wrong != before else 0.0
            number = max(wrong + (1 - last[1]) / slope, wrong / 4) if slope else 0.0
            after = list(self._each([other(number)])) if number > 0 else []
            if not after:
                break
            tried = dataclasses.replace(after[0], is_fit=True)
            found.append(tried)
        if other is None or not found:
            return found
        near = self._each(map(other, tried.variant.round_numbers()))
        return [*(dataclasses.replace(x, is_fit=x.unexplained >= _EQUAL) for x in near), *found]

    def tried_beside(self, first: Variant, only: str = "") -> tuple[_Search, list[_TriedFault]]:
        """Try the faults beside another; the best first."""
        edits = first.edits if first.model is None else ()
        with first.applied(self._model) as model:
            search = _Search(model, self._run, self._got, self._out_of_time, edits)
            tried = search.everywhere(only)
        return search, [search._in(self, one) for one in tried[:1]]

    def _in(self, plain: _Search, one: _TriedFault) -> _TriedFault:
        """Return a fault of this search's model as one of another's."""
        again = one.variant.again
        moved = (
            dataclasses.replace(
                one.variant, edits=(*self._moved(one.variant.edits, plain._model),)
            )
            if again is None else again(plain._model)
        )  # fmt: skip
        return dataclasses.replace(one, variant=moved)

    def refined(self, pair: list[_TriedFault], left: float) -> tuple[list[_TriedFault], float]:
        """Return a pair of faults, each sought again beside the other, and what they leave."""
        in_vain = 0
        for _ in range(_STEPS):
            if in_vain == len(pair) or (left < _EXACT and not any(one.is_fit for one in pair)):
                break
            again, beside = pair
            search, tried = self.tried_beside(beside.variant, again.variant.subject)
            now = search.size / self.size * tried[0].unexplained if tried else 1.0
            is_round = now < _EQUAL and again.is_fit and not tried[0].is_fit
            if is_round or now <= _HELPS * left:
                again, left, in_vain = tried[0], now, 0
            else:
                in_vain += 1
            pair = [beside, again]
        return pair, left

    def is_unrelated(self) -> bool:
        """Return whether no output resembles the truth."""
        pairs = ((self._got[name].ravel(), self._truth[name].ravel()) for name in self._names)
        with np.errstate(all="ignore"):  # outputs may be constant
            return all(abs(np.corrcoef(a, b)[0, 1]) < _UNRELATED for a, b in pairs)


def find_cause(
    model: Any, run: _Run, got: Mapping[str, np.ndarray], out_of_time: OutOfTime
) -> Cause | None:
    """Return the fault that gives a model the outputs of a wrong graph; None if none does.

    Args:
        model: The model in float64, as transformers runs it; it is as before in the end.
        run: Returns the float64 outputs of a model for the same inputs, by name.
        got: The outputs of the graph.
        out_of_time: Counts a trial run of some cost, and says whether to stop with what was found.
    """
    search = _Search(model, run, got, out_of_time)
    tried = search.everywhere()
    if not tried:
        return None
    if tried[0].unexplained > _LIKELY and search.is_unrelated():
        sentence = "no output resembles the model's: all layers differ, as in another checkpoint"
        return Cause("another checkpoint", sentence)
    chain, left = [tried[0]], tried[0].unexplained
    # One that explains nearly all is the cause of all, unless a pair leaves nothing.
    most = _ALONE if left >= _ALONE else _SURE
    for first in _helping(tried) if left >= _SURE else ():
        _, second = search.tried_beside(first.variant)
        both = first.unexplained * second[0].unexplained if second else left
        if both < left / 2:
            pair, both = search.refined([first, second[0]], both)
            if both < most:
                chain, left = pair, both
        if left < _EQUAL:
            break
    if left >= _SURE:
        best = search.in_parts(tried)[0]
        if best.unexplained < left / 2:
            chain, left = [best], best.unexplained
    is_fit = any(one.is_fit for one in chain)
    fits_all = chain[0].variant.kind == SCALED or len(chain) > 1
    if left > (_LIKELY if not is_fit else _EQUAL if fits_all else _SURE):
        return None
    said = ", and ".join(map(_said_of, chain))
    said += "".join(f", or {_said_of(one)}" for one in _as_good(tried, chain))
    share = math.floor((1 - left) * 1e4) / 1e4
    places = {edit.at for edit in chain[0].variant.edits}
    node = places.pop() if len(places) == len(chain) == 1 else ""
    sentence = f"{said} (explains {share:.2%} of the error)"
    return Cause(chain[0].variant.kind, sentence, node, "", left, is_fit)


def _as_good(tried: Sequence[_TriedFault], chain: Sequence[_TriedFault]) -> list[_TriedFault]:
    """Return the faults of other fields that explain all, too: a norm may hide their difference."""
    best = chain[0]
    if len(chain) > 1 or best.is_fit or best.unexplained >= _EQUAL:
        return []
    alike = [one for one in tried if not one.is_fit and _order_of(one) <= _order_of(best)]
    return [one for one in _first_of_each(alike) if one.variant.subject != best.variant.subject]


def _helping(tried: Sequence[_TriedFault]) -> list[_TriedFault]:
    """Return the best faults that help, one of each field or place, then fields' other values."""
    helping = [one for one in tried if one.unexplained < _HELPS]
    first = _first_of_each(helping)
    subjects = {one.variant.subject for one in first if one.variant.other is None}
    values = [one for one in helping if one.variant.subject in subjects]
    return list({one.variant.sentence: one for one in (*first, *values)}.values())[: 2 * _BESIDE]


def _first_of_each(tried: Iterable[_TriedFault]) -> list[_TriedFault]:
    """Return the first of faults, one of each field or place."""
    first: dict[str, _TriedFault] = {}
    for one in tried:
        first.setdefault(one.variant.subject, one)
    return list(first.values())[:_BESIDE]


def _rank(tried: _TriedFault) -> tuple[float, bool]:
    """Return what to sort numbers by; one of the config says more than the scale of a weight."""
    return -round(abs(tried.cosine), 2), tried.variant.kind == SCALED
