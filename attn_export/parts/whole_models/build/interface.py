"""The inputs and outputs of the graph of a decoder that is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.cases.draw import Sizes
from attn_export.dialect_names import MODEL
from attn_export.errors import ExportError
from attn_export.interface import BATCH, PAST, QUERIES, TOTAL, Input, Shape
from attn_export.parts.whole_models.build.encoder import crossed_of
from attn_export.parts.whole_models.build.part import ModelPart
from attn_export.parts.whole_models.export_layouts import BUILT, Entry, built_ends
from attn_export.parts.whole_models.loaded_model import type_of
from attn_export.parts.whole_models.model_caches import cache_shapes
from attn_export.runtimes.decode_inputs import (
    CAPACITY,
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


def with_index(
    inputs: dict[str, np.ndarray], sizes: Sizes, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return inputs with random positions of logits, if they have any, and the last one."""
    if LOGIT_INDEX in inputs:
        shape = sizes[BATCH], sizes[LOGIT_COUNT]
        inputs[LOGIT_INDEX] = random.integers(0, sizes[QUERIES], shape)
        inputs[LOGIT_INDEX][:, -1] = sizes[QUERIES] - 1
    return inputs
