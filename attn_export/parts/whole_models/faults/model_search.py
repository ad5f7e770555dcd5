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

from attn_export.explain.comparison import Evidence, compare
from attn_export.explain.explanation import Cause, OutOfTime
from attn_export.explain.search import (
    AT_ONCE,
    EQUAL,
    FITS,
    STEPS,
    SURE,
    Search,
    Tried,
    first_of_each,
    rank,
)
from attn_export.parts.whole_models.faults.changed_configs import other_configs
from attn_export.parts.whole_models.faults.changed_models import (
    Edit,
    ModelFault,
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
    exchanged_parameters,
    other_frequencies,
    other_numbers,
    other_parameters,
    scaled_parameters,
)
from attn_export.parts.whole_models.lora_adapter import other_adapters
from attn_export.results import Arrays

_TABLES = (
    other_adapters, other_activations, other_inputs, other_masks, other_numbers, other_forwards,
    other_configs, other_frequencies, other_parameters, other_ends, exchanged_parameters,
    scaled_parameters,
)  # fmt: skip
"""What makes the faults of each table in a model, the most likely first."""

_ALONE = 0.1
"""If a fault leaves a smaller share unexplained, no others are tried beside it."""

_HELPS = 0.8
"""The largest share that one of two faults leaves unexplained alone."""

_EXACT = 1e-4
"""If a pair of faults leaves a smaller share, neither is sought again."""

_LIKELY = 0.2
"""The largest unexplained share of a cause."""

_ALIKE = 0.9
"""The least cosine for which the scale of a weight in one layer is sought: there are many."""

_UNRELATED = 0.3
"""The largest correlation with the reference of outputs of another checkpoint."""


_Fault = Tried[ModelFault]


class _ModelSearch(Search[ModelFault]):
    """A search for the faults that give a model the outputs of a wrong graph.

    `beside`: Edits of the model beside which they are made.
    """

    def __init__(
        self, model: nn.Module, run: Callable[[nn.Module], Arrays],
        got: Mapping[str, np.ndarray], out_of_time: OutOfTime, beside: Sequence[Edit] = (),
    ) -> None:  # fmt: skip
        self._model, self._run, self._got, every = model, run, got, run(model)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._beside = [edit for edit in beside if id(edit.owner) in self._paths]
        self._reference = {n: x for n, x in every.items() if np.issubdtype(x.dtype, np.floating)}
        evidence = Evidence({}, self._reference, got)
        super().__init__(self._outputs_with, [evidence], run_cost(model, every), out_of_time)

    def _outputs_with(self, fault: ModelFault, _: Evidence) -> Mapping[str, np.ndarray]:
        # A model that is built anew lacks the faults beside which others are made.
        edits = self._moved(self._beside, fault.model) if fault.model is not None else []
        with fault.applied(self._model) as model, changed(edits):
            return self._run(model)

    def in_model(self, only: str = "") -> list[_Fault]:
        """Try the faults in the whole model, or `only` those of one subject; the best first."""
        return self.everywhere(
            (fault for fault in table(self._model) if only in ("", fault.subject))
            for table in _TABLES
        )

    def in_parts(self, tried: Sequence[_Fault]) -> list[_Fault]:
        """Try the faults in one layer and in the places of one name, too; the best first.

        The layers that change the outputs that are wrong come first.
        """
        unlike = dict(self._unlike_layers())
        # A layer's own keys and values are right if what is wrong comes after them.
        most = max(sorted(set(unlike.values()))[:2], default=0)
        parts = [
            (unlike.get(layer_of(part.edits[0].at), 0), -one.first.cosine, number, part)
            for number, one in enumerate(tried)
            for part in one.fault.parts()
        ]
        parts = [each for each in parts if each[0] <= most]
        found = list(tried)
        for one in self.each(part for *_, part in sorted(parts, key=lambda each: each[:3])):
            fits = abs(one.first.cosine) > (_ALIKE if one.fault.is_weak else FITS)
            found += [one, *(self.fitted(one) if fits else ())]
            if min(one.unexplained for one in found) < EQUAL:
                break
        return sorted(found, key=rank)

    def _unlike_layers(self) -> Iterator[tuple[str, int]]:
        """Yield how many outputs are wrong and not changed by a layer's weights, or the reverse."""
        wrong = compare(self.cases[0], self._got).moved
        for at, layer in self._model.named_modules():
            if at and layer_of(at) == at:
                for one in self.each([ModelFault("", "", tuple(enlarged(layer)))]):
                    yield at, sum(a != b for a, b in zip(wrong, one.first.moved, strict=True))

    def tried_beside(self, first: ModelFault, only: str = "") -> tuple[_ModelSearch, list[_Fault]]:
        """Try the faults beside another; the best one."""
        edits = first.edits if first.model is None else ()
        with first.applied(self._model) as model:
            search = _ModelSearch(model, self._run, self._got, self.out_of_time, edits)
            tried = search.in_model(only)
        return search, [search._in(self._model, one) for one in tried[:1]]

    def _in(self, model: nn.Module, one: _Fault) -> _Fault:
        """Return a fault of this search's model as one of another."""
        if one.fault.again is not None:
            return dataclasses.replace(one, fault=one.fault.again(model))
        edits = (*self._moved(one.fault.edits, model),)
        return dataclasses.replace(one, fault=dataclasses.replace(one.fault, edits=edits))

    def _moved(self, edits: Iterable[Edit], to: nn.Module) -> list[Edit]:
        """Return edits of this model as those of another of the same modules."""
        paths = ((edit, self._paths.get(id(edit.owner))) for edit in edits)
        return [
            edit if path is None else dataclasses.replace(edit, owner=to.get_submodule(path))
            for edit, path in paths
        ]

    def refined(self, pair: list[_Fault], left: float) -> tuple[list[_Fault], float]:
        """Return a pair of faults, each sought again beside the other, and what they leave."""
        in_vain = 0
        for _ in range(STEPS):
            if in_vain == len(pair) or (left < _EXACT and not any(one.is_fit for one in pair)):
                break
            again, beside = pair
            search, tried = self.tried_beside(beside.fault, again.fault.subject)
            now = search.size / self.size * tried[0].unexplained if tried else 1.0
            is_round = now < EQUAL and again.is_fit and not tried[0].is_fit
            if is_round or now <= _HELPS * left:
                again, left, in_vain = tried[0], now, 0
            else:
                in_vain += 1
            pair = [beside, again]
        return pair, left

    def is_unrelated(self) -> bool:
        """Return whether no output resembles the reference."""
        pairs = ((self._got[name].ravel(), x.ravel()) for name, x in self._reference.items())
        with np.errstate(all="ignore"):  # outputs may be constant
            return all(abs(np.corrcoef(a, b)[0, 1]) < _UNRELATED for a, b in pairs)


def find_cause(
    model: Any, run: Callable[[nn.Module], Arrays], got: Mapping[str, np.ndarray],
    out_of_time: OutOfTime,
) -> Cause | None:  # fmt: skip
    """Return the fault that gives a model the outputs of a wrong graph; None if none does.

    Args:
        model: The model in float64, as transformers runs it; it is as before in the end.
        run: Returns the float64 outputs of a model for the same inputs, by name.
        got: The outputs of the graph.
        out_of_time: Counts a trial run of some cost, and says whether to stop with what was found.
    """
    search = _ModelSearch(model, run, got, out_of_time)
    tried = search.in_model()
    if not tried:
        return None
    if tried[0].unexplained > _LIKELY and search.is_unrelated():
        sentence = "no output resembles the model's: all layers differ, as in another checkpoint"
        return Cause("another checkpoint", sentence)
    chain, left = [tried[0]], tried[0].unexplained
    # One that explains nearly all is the cause of all, unless a pair leaves nothing.
    most = _ALONE if left >= _ALONE else SURE
    for first in _helping(tried) if left >= SURE else ():
        _, second = search.tried_beside(first.fault)
        both = first.unexplained * second[0].unexplained if second else left
        if both < left / 2:
            pair, both = search.refined([first, second[0]], both)
            if both < most:
                chain, left = pair, both
        if left < EQUAL:
            break
    if left >= SURE:
        best = search.in_parts(tried)[0]
        if best.unexplained < left / 2:
            chain, left = [best], best.unexplained
    is_fit = any(one.is_fit for one in chain)
    fits_all = chain[0].fault.is_weak or len(chain) > 1
    if left > (_LIKELY if not is_fit else EQUAL if fits_all else SURE):
        return None
    said = ", and ".join(map(_said_of, chain))
    said += "".join(f", or {_said_of(one)}" for one in _as_good(tried, chain))
    share = math.floor((1 - left) * 1e4) / 1e4
    places = {edit.at for edit in chain[0].fault.edits}
    node = places.pop() if len(places) == len(chain) == 1 else ""
    sentence = f"{said} (explains {share:.2%} of the error)"
    return Cause(chain[0].fault.kind, sentence, node, "", left, is_fit)


def _said_of(one: _Fault) -> str:
    """Return what is wrong; a number that was sought is no more than a fit."""
    return f"{one.fault.effect} (a fit)" if one.is_fit else one.fault.effect


def _as_good(tried: Sequence[_Fault], chain: Sequence[_Fault]) -> list[_Fault]:
    """Return the faults of other fields that explain all, too: a norm may hide their difference."""
    best = chain[0]
    if len(chain) > 1 or best.is_fit or best.unexplained >= EQUAL:
        return []
    alike = [one for one in tried if not one.is_fit and rank(one) <= rank(best)]
    return [one for one in first_of_each(alike) if one.fault.subject != best.fault.subject]


def _helping(tried: Sequence[_Fault]) -> list[_Fault]:
    """Return the best faults that help, one of each field or place, then fields' other values."""
    helping = [one for one in tried if one.unexplained < _HELPS]
    first = first_of_each(helping)
    subjects = {one.fault.subject for one in first if one.fault.number is None}
    values = [one for one in helping if one.fault.subject in subjects]
    return list({one.fault.effect: one for one in (*first, *values)}.values())[: 2 * AT_ONCE]
