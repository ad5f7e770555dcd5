"""The inputs and outputs of the graph of a decoder that is built, and its cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.cases.draw import Sizes, generator
from attn_export.dialect_names import MODEL
from attn_export.errors import ExportError
from attn_export.interface import BATCH, KEYS, PAST, QUERIES, TOTAL, Input, Shape
from attn_export.parts.whole_models.build.cross_capture import ENCODER_MASK
from attn_export.parts.whole_models.build.encoder import crossed_of
from attn_export.parts.whole_models.build.part import ModelPart
from attn_export.parts.whole_models.export_layouts import BUILT, Entry, built_ends
from attn_export.parts.whole_models.loaded_model import type_of
from attn_export.parts.whole_models.model_caches import cache_shapes
from attn_export.parts.whole_models.model_cases import CaseMaker, Situation
from attn_export.results import BASE, CHANGED, Arrays, Case
from attn_export.runtimes.decode_inputs import (
    CAPACITY,
    ENCODED,
    HIDDEN,
    IDS,
    LOGIT_COUNT,
    LOGIT_INDEX,
    NEXT_HIDDEN,
    PAST_LENGTH,
)


@dataclasses.dataclass(frozen=True)
class _BuiltInterface:
    """The inputs and outputs of a graph.

    Attributes:
        caches: The input of each cache by its output.
        appends: Whether caches grow by the new tokens, and are not written in place.
        crosses: Whether it takes what an encoder gives.
    """

    entry: Entry
    inputs: Mapping[str, Input]
    outputs: Mapping[str, Shape]
    caches: Mapping[str, str]
    appends: bool
    crosses: bool


def interface_of(
    model: Any, vocabulary: int, stored: str, part: ModelPart | None, *, all_logits: bool,
    appends: bool,
) -> _BuiltInterface:  # fmt: skip
    """Return the interface of the graph of a decoder, or of some of its layers.

    `stored`: The type of the caches.
    """
    dtype, crossed = type_of(model), crossed_of(model)
    heads = heads_of(model)
    if part:
        heads = {n: x for n, x in heads.items() if part.first <= n[1] <= part.last}
    tokens, described = IDS, Input((BATCH, QUERIES), "int64", 0, vocabulary - 1)
    rows = QUERIES if all_logits else LOGIT_COUNT
    logits: tuple[str, Shape] = "logits", (BATCH, rows, vocabulary)
    if part and not part.begins:
        tokens, described = HIDDEN, Input((BATCH, QUERIES, part.width), dtype)
    if part and not part.ends:
        logits, all_logits = (NEXT_HIDDEN, (BATCH, QUERIES, part.width)), True

    def caches(start: str, length: str) -> dict[str, Shape]:
        return {
            f"{start}_{name}_{layer}": (BATCH, count, length, size)
            for (name, layer), (count, size) in heads.items()
        }

    pasts = caches("past", PAST if appends else CAPACITY)
    presents = caches("present", TOTAL if appends else CAPACITY)
    inputs = {tokens: described}
    if not appends:
        inputs[PAST_LENGTH] = Input((BATCH,), "int64", 0, PAST)
    if not all_logits:
        inputs[LOGIT_INDEX] = Input((BATCH, LOGIT_COUNT), "int64", 0, QUERIES)
    inputs |= {name: Input(shape, stored) for name, shape in pasts.items()} | crossed
    outputs = dict([logits]) | presents
    entry = Entry(
        Path(MODEL), "model", BUILT,
        built_ends({name: (x.dtype, x.shape) for name, x in inputs.items()}),
        built_ends(
            {n: (stored if n in presents else dtype, x) for n, x in outputs.items()},
            are_outputs=True,
        ),
    )  # fmt: skip
    return _BuiltInterface(
        entry, inputs, outputs, dict(zip(presents, pasts, strict=True)), appends, bool(crossed)
    )


def heads_of(model: Any) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the number and the size of heads by ``"key"`` or ``"value"`` and layer."""
    kind, shapes = model.config.model_type, cache_shapes(model)
    layers = sorted(layer for layer, of in shapes if of == "decoder")
    crossed = sorted(layer for layer, of in shapes if of == "encoder")
    count = model.config.get_text_config().num_hidden_layers if not crossed else len(crossed)
    if layers != list(range(count)):
        raise ExportError(f"{kind} has layers without keys and values of their own")
    return {
        (name, layer): heads
        for layer in layers
        for name, heads in zip(("key", "value"), shapes[layer, "decoder"], strict=True)
    }


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

    def changed(self, base: Situation, name: str) -> Case | None:
        """Return the base case with other values of an input; None if it has no others."""
        if name not in (PAST_LENGTH, LOGIT_INDEX):
            return super().changed(base, name)
        inputs = self.inputs(base, base.name)
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
