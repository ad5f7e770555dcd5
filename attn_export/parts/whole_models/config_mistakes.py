"""Search for the mistake that makes a model's float64 run equal a wrong graph's outputs.

Each mistake is made in the whole model first, then beside another, then in one layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from attn_export.explain.explanation import Cause
from attn_export.parts.whole_models.changed_models import Edit, Variant, layer_of, other_configs
from attn_export.parts.whole_models.module_mistakes import (
    other_activations,
    other_ends,
    other_forwards,
    other_inputs,
    other_masks,
)
from attn_export.parts.whole_models.parameter_mistakes import (
    SCALED,
    exchanged_parameters,
    other_frequencies,
    other_numbers,
    other_parameters,
    scaled_parameters,
)
from attn_export.truth.float64_mode import is_large

_Run = Callable[[nn.Module], Mapping[str, np.ndarray]]

_ROWS = (
    other_activations, other_inputs, other_masks, other_numbers, other_forwards, other_configs,
    other_frequencies, other_parameters, other_ends, exchanged_parameters, scaled_parameters,
)  # fmt: skip
"""Sources of wrong variants of a model, the most likely first."""

_EQUAL = 1e-3
"""A mistake that leaves a smaller share of the error unexplained ends the search: others of another
source could only be as good."""

_SURE = 0.01
"""If a mistake leaves a smaller share unexplained, no others are tried in single layers."""

_ALONE = 0.1
"""If a mistake leaves a smaller share unexplained, no others are tried beside it."""

_HELPS = 0.8
"""The largest share that one of two mistakes leaves unexplained alone."""

_LIKELY = 0.2
"""The largest unexplained share of a cause."""

_BESIDE = 3
"""The number of mistakes beside which others are tried."""

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
class _Tried:
    """A mistake that was made in a model.

    Attributes:
        unexplained: The share of the error that it leaves.
        cosine: That of its error and the error to explain.
        ratio: The length of the latter in its direction, in lengths of its error.
        moved: Which outputs it changes.
    """

    variant: Variant
    unexplained: float
    cosine: float
    ratio: float
    moved: Sequence[bool]


class _Search:
    """Search for the mistakes that give a model the outputs of a wrong graph."""

    def __init__(
        self, model: nn.Module, run: _Run, got: Mapping[str, np.ndarray],
        out_of_time: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._model, self._run, self._out_of_time = model, run, out_of_time
        self._got, self._truth = got, run(model)
        self._names = [n for n in got if np.issubdtype(self._truth[n].dtype, np.floating)]
        self._errors = self._differences(got)
        self._error = np.concatenate(self._errors)
        self._size = float(np.linalg.norm(self._error))

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

    def everywhere(self) -> list[_Tried]:
        """Try the mistakes in the whole model; the best first."""
        tried: list[_Tried] = []
        for row in _ROWS if self._size else ():
            tried += self._each(row(self._model))
            if any(one.unexplained < _EQUAL for one in tried):
                break
        numbers = (one for one in tried if one.variant.other and abs(one.cosine) > _FITS)
        if min((one.unexplained for one in tried), default=1.0) >= _SURE:
            for one in sorted(numbers, key=_rank)[:_BESIDE]:
                tried += self._fitted(one)
        return sorted(tried, key=_order)

    def in_parts(self, tried: Sequence[_Tried]) -> list[_Tried]:
        """Try the mistakes in one layer and in the places of one name, too; the best first.

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
            if found[-1].unexplained < _EQUAL:
                break
        return sorted(found, key=_order)

    def _unlike_layers(self) -> Iterator[tuple[str, int]]:
        """Yield how many outputs are wrong and not changed by a layer's weights, or the reverse."""
        wrong = [float(np.linalg.norm(error)) > _MOVED for error in self._errors]
        for at, layer in self._model.named_modules():
            if at and layer_of(at) == at:
                edits = tuple(_enlarged(layer))
                for one in self._each([Variant("", "", edits)]):
                    yield at, sum(a != b for a, b in zip(wrong, one.moved, strict=True))

    def _each(self, variants: Iterable[Variant]) -> Iterator[_Tried]:
        for variant in variants:
            if self._out_of_time():
                return
            try:
                with variant.applied(self._model) as model:
                    differences = self._differences(self._run(model))
            except Exception:  # impossible in this model, in as many ways as there are models
                continue
            moved = [float(np.linalg.norm(each)) > _MOVED for each in differences]
            step = np.concatenate(differences)
            length, along = float(np.linalg.norm(step)), float(step @ self._error)
            if length:
                left = float(np.linalg.norm(self._error - step)) / self._size
                yield _Tried(variant, left, along / (length * self._size), along / length**2, moved)

    def _fitted(self, tried: _Tried) -> Iterator[_Tried]:
        """Try other wrong numbers, each as far from the right one as the error suggests."""
        for _ in range(_STEPS):
            other, numbers = tried.variant.other, tried.variant.numbers
            if other is None or numbers is None or tried.unexplained < _EQUAL:
                return
            right, wrong = numbers
            number = max(right + (wrong - right) * tried.ratio, wrong / 4)
            after = list(self._each([other(number)])) if number > 0 else []
            if not after:
                return
            tried = after[0]
            yield tried

    def is_unrelated(self) -> bool:
        """Return whether no output resembles the truth."""
        pairs = ((self._got[name].ravel(), self._truth[name].ravel()) for name in self._names)
        with np.errstate(all="ignore"):  # outputs may be constant
            return all(abs(np.corrcoef(a, b)[0, 1]) < _UNRELATED for a, b in pairs)


def _enlarged(module: nn.Module) -> Iterator[Edit]:
    """Yield edits that make the parameters of a module larger."""
    for path, old in module.named_parameters():
        if not is_large(old):
            place, _, name = path.rpartition(".")
            value = nn.Parameter(old.detach() * 1.25, requires_grad=False)
            yield Edit("", module.get_submodule(place), name, value)


def find_cause(
    model: Any, run: _Run, got: Mapping[str, np.ndarray], out_of_time: Callable[[], bool]
) -> Cause | None:
    """Return the mistake that gives a model the outputs of a wrong graph; None if none does.

    Args:
        model: The model in float64, as transformers runs it; it is as before in the end.
        run: Returns the float64 outputs of a model for the same inputs, by name.
        got: The outputs of the graph.
        out_of_time: Says whether to stop with what was found.
    """
    search = _Search(model, run, got, out_of_time)
    tried = search.everywhere()
    if not tried:
        return None
    if tried[0].unexplained > _LIKELY and search.is_unrelated():
        sentence = "no output resembles the model's: all layers differ, as in another checkpoint"
        return Cause("another checkpoint", sentence)
    chain, left = [tried[0].variant], tried[0].unexplained
    for first in tried[:_BESIDE] if left >= _ALONE else ():
        if first.unexplained < _HELPS:
            with first.variant.applied(model) as changed:
                second = _Search(changed, run, got, out_of_time).everywhere()
            both = first.unexplained * second[0].unexplained if second else left
            if both < min(left / 2, _ALONE):
                chain, left = [first.variant, second[0].variant], both
    if left >= _SURE:
        best = search.in_parts(tried)[0]
        if best.unexplained < left / 2:
            chain, left = [best.variant], best.unexplained
    if left > (_EQUAL if chain[0].kind == SCALED else _LIKELY):
        return None
    said = ", and ".join(variant.sentence for variant in chain)
    share = math.floor((1 - left) * 1e4) / 1e4
    places = {edit.at for edit in chain[0].edits}
    node = places.pop() if len(places) == len(chain) == 1 else ""
    return Cause(chain[0].kind, f"{said} (explains {share:.2%} of the error)", node, "", left)


def _rank(tried: _Tried) -> tuple[float, bool]:
    """Return what to sort numbers by; one of the config says more than the scale of a weight."""
    return -round(abs(tried.cosine), 2), tried.variant.kind == SCALED


def _order(tried: _Tried) -> float:
    left = round(tried.unexplained, 4)  # noise must not decide between mistakes that fit alike
    return max(left, _EQUAL) if tried.variant.kind == SCALED else left
