"""Cases of decoders that are built with caches in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from attn_export.cases.draw import Sizes, generator
from attn_export.parts.whole_models.build.cross_capture import ENCODER_MASK
from attn_export.parts.whole_models.model_cases import CaseMaker, Situation
from attn_export.results import BASE, CHANGED, Arrays, Case
from attn_export.runtimes.decode_inputs import (
    CAPACITY,
    ENCODED,
    LOGIT_COUNT,
    LOGIT_INDEX,
    PAST_LENGTH,
)
from attn_export.spec.inputs import BATCH, KEYS, PAST, QUERIES, TOTAL

_SPARE = (0, 1, 5, 64)
"""The number of slots of caches that stay free, in turns."""


def with_index(
    inputs: dict[str, np.ndarray], sizes: Sizes, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return inputs with random positions of logits, if they have any, and the last one."""
    if LOGIT_INDEX in inputs:
        shape = sizes[BATCH], sizes[LOGIT_COUNT]
        inputs[LOGIT_INDEX] = random.integers(0, sizes[QUERIES], shape)
        inputs[LOGIT_INDEX][:, -1] = sizes[QUERIES] - 1
    return inputs


class BuiltCases(CaseMaker):
    """Makes inputs of a graph with caches in place; all that it returns is judged."""

    def cases(self, all_situations: tuple[Situation, ...]) -> tuple[Case, ...]:
        """Return the cases of situations, and the base case with each input changed."""
        index = self.changed(all_situations[0], LOGIT_INDEX)
        return (*super().cases(all_situations), *([index] if index else []))

    def changed(self, base: Situation, name: str) -> Case | None:
        """Return the base case with other values of an input; None if it has no others."""
        if name not in (PAST_LENGTH, LOGIT_INDEX):
            return super().changed(base, name)
        inputs = self.inputs(base, base.name)
        if name not in inputs:
            return None
        inputs[name] = np.maximum(inputs[name] - 1, 0)
        inputs[name][:1] = 0
        case = dataclasses.replace(base, name=f"{CHANGED}{name}", about=f"another {name}")
        return self._case(case, inputs, base.valid())

    def own(self, name: str, about: str, given: Mapping[str, np.ndarray]) -> Case:
        """Return the case of inputs of the user's own, with the logits of all new tokens."""
        if LOGIT_INDEX in self.axes and LOGIT_INDEX not in given:
            batch, query = next(iter(given.values())).shape[:2]
            given = {**given, LOGIT_INDEX: np.tile(np.arange(query), (batch, 1))}
        return super().own(name, about, given)

    def _case(self, situation: Situation, inputs: Arrays, _: np.ndarray) -> Case:
        return Case(situation.name, situation.kind, self.sizes(situation), inputs, situation.about)

    def sizes(self, situation: Situation) -> dict[str, int]:
        """Return the sizes of the axes."""
        # Changes of the base case have its sizes.
        number = 1 if situation.name.startswith((BASE, CHANGED)) else sum(situation.name.encode())
        query, past = max(situation.new), max(situation.past)
        sizes = {BATCH: len(situation.new), QUERIES: query, PAST: past}
        if self.entry.one("write at"):
            sizes[CAPACITY] = past + query + _SPARE[number % len(_SPARE)]
        else:
            sizes[TOTAL] = past + query
        if any(end.of == "encoder" for end in self.entry.inputs.values()):
            sizes[ENCODED] = super().sizes(situation)[KEYS]
        return (
            sizes
            | ({LOGIT_COUNT: min(query, 1 + number % 3)} if LOGIT_INDEX in self.axes else {})
            | {axis: size for axis, size in situation.sizes.items() if axis in (KEYS, LOGIT_COUNT)}
        )

    def inputs(self, situation: Situation, seed: str) -> dict[str, np.ndarray]:
        """Return the inputs of the graph, in its order."""
        inputs = super().inputs(situation, seed)
        if LOGIT_INDEX in self.axes:
            inputs[LOGIT_INDEX] = np.zeros(0)
            with_index(inputs, self.sizes(situation), generator("whole", seed, LOGIT_INDEX))
        if ENCODER_MASK in inputs:  # batch elements but the first have less
            batch, keys = inputs[ENCODER_MASK].shape
            last = np.maximum(keys - 1 - np.arange(batch), 0)
            inputs[ENCODER_MASK][:] = np.arange(keys) <= last[:, None]
        return {name: inputs[name] for name in self.axes if name in inputs}
