"""The inputs and outputs of the graph of a decoder that is built, and what they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attn_export.dialect_names import MODEL
from attn_export.errors import ExportError
from attn_export.parts.whole_models.build.encoder import crossed_end, crossed_of
from attn_export.parts.whole_models.build.part import ModelPart
from attn_export.parts.whole_models.export_layouts import End, Entry
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
from attn_export.spec import Input, Shape
from attn_export.spec.inputs import BATCH, PAST, QUERIES, TOTAL


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
    tokens, logits = End(IDS, "ids", "int64", (BATCH, QUERIES)), End("logits", "value", dtype, ())
    described = Input((BATCH, QUERIES), "int64", 0, vocabulary - 1)
    shape: Shape = (BATCH, QUERIES if all_logits else LOGIT_COUNT, vocabulary)
    if part and not part.begins:
        described = Input((BATCH, QUERIES, part.width), dtype)
        tokens = End(HIDDEN, "features", dtype, described.shape)
    if part and not part.ends:
        logits, shape, all_logits = dataclasses.replace(logits, name=NEXT_HIDDEN), (), True
        shape = (BATCH, QUERIES, part.width)

    def ends(start: Any, length: str) -> Iterator[End]:
        for (name, layer), (count, size) in heads.items():
            axes = BATCH, count, length, size
            yield End(f"{start}_{name}_{layer}", start, stored, axes, layer, name)

    pasts = [*ends("past", PAST if appends else CAPACITY)]
    presents = [*ends("present", TOTAL if appends else CAPACITY)]
    inputs = {tokens.name: described, PAST_LENGTH: Input((BATCH,), "int64", 0, PAST)}
    written = [End(PAST_LENGTH, "write at", "int64", (BATCH,))]
    if appends:
        del inputs[PAST_LENGTH], written[0]
    if not all_logits:
        inputs[LOGIT_INDEX] = Input((BATCH, LOGIT_COUNT), "int64", 0, QUERIES)
    inputs |= {end.name: Input(end.shape, stored) for end in pasts} | crossed
    by_name, named = (
        {end.name: end for end in each}
        for each in (
            [tokens, *written, *pasts, *(crossed_end(*x, dtype) for x in crossed.items())],
            [logits, *presents],
        )
    )
    return _BuiltInterface(
        Entry(Path(MODEL), "model", "attn-export", by_name, named),
        inputs, {logits.name: shape, **{end.name: end.shape for end in presents}},
        {new.name: old.name for new, old in zip(presents, pasts, strict=True)},
        appends, bool(crossed),
    )  # fmt: skip


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
