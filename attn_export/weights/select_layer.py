"""Choice of one attention of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from attn_export.errors import WeightsError
from attn_export.weights.layouts import Layout, recognise
from attn_export.weights.source import TensorSource, listed, shown

CROSS, DECODER, ENCODER = "cross", "decoder", "encoder"

CROSS_NAMES: Final = frozenset({
    "encoder_attn", "EncDecAttention", "crossattention", "cross_attn", "cross_attention",
    "src_attn", "enc_attn", "enc_dec_attention", "multihead_attn",
})  # fmt: skip
"""Names in modules for the attention of a decoder to the encoder."""
TOWERS: Final = frozenset({
    "vision_tower", "vision_model", "visual", "vision_encoder", "audio_tower", "audio_model",
})  # fmt: skip
"""Encoders of pictures and sound beside a language model."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerMatch:
    """One attention of a checkpoint.

    Attributes:
        prefix: The prefix of its tensors' names, with the dot.
        layout: The layout in which it is stored.
        layer: Its number, None where the prefix has none.
        role: `CROSS`, `DECODER`, `ENCODER` or "" if the prefix does not show it.
    """

    prefix: str
    layout: Layout
    layer: int | None
    role: str

    @property
    def tower(self) -> str:
        """The encoder of pictures or sound that it belongs to, or ""."""
        return next((word for word in self.prefix.split(".") if word in TOWERS), "")

    @property
    def shown(self) -> str:
        """The prefix as ``--layer`` takes it."""
        return self.prefix.removesuffix(".") or "(no prefix)"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWanted:
    """An attention of a model without tensors.

    Attributes:
        layer: Its number.
        role: As in `LayerMatch`.
    """

    layer: int
    role: str

    @classmethod
    def parse(cls, layer: str | None, wanted: str | None) -> LayerWanted:
        """Return the attention that ``--layer`` names, layer 0 by default.

        Args:
            layer: A number, or a prefix of the names that its tensors would have.
            wanted: The role, where the prefix does not show it.

        Raises:
            WeightsError: If the prefix shows neither a number nor a role.
        """
        words = (layer or "0").strip(".").split(".")
        number, role = _number_in(words), _role(words)
        if number is None and not role:
            raise WeightsError(
                f"--layer {shown(layer or '')!r} has no number; without tensors give one, as in 3 "
                "or decoder.layers.3.encoder_attn"
            )
        return cls(number or 0, role or wanted or "")


def choose(source: TensorSource, layer: str | None, wanted: str | None) -> LayerMatch:
    """Return one attention.

    Args:
        source: The checkpoint.
        layer: A number or a prefix; layer 0, or the only one, without it.
        wanted: `CROSS`, `DECODER` or `ENCODER`, by which to choose where there are several.

    Raises:
        WeightsError: If there is none, or more than one that may be meant.
    """
    every = [_found(prefix, layout) for prefix, layout in recognise(source.files).items()]
    every.sort(key=lambda found: (found.layer is None, found.layer or 0, found.prefix))
    if not every:
        raise WeightsError(
            f"{source.path} has no attention of a known layout; give the model's own code by "
            f"--module PATH.py:FUNCTION; its tensors are {listed(source.files)}"
        )
    matching = _matching(every, layer)
    if not matching:
        raise WeightsError(
            f"{source.path} has no attention {shown(layer or 'of layer 0')!r}; give one of these "
            f"as --layer: {listed(found.shown for found in every)}"
        )
    meant = _meant(matching, wanted)
    if len(meant) != 1:
        raise WeightsError(
            f"{source.path} has {len(matching)} attentions that may be meant; give one of these "
            f"as --layer: {listed(found.shown for found in meant or matching)}"
        )
    return meant[0]


def _found(prefix: str, layout: Layout) -> LayerMatch:
    words = prefix.split(".")
    return LayerMatch(prefix, layout, _number_in(words), _role(words))


def _number_in(words: Sequence[str]) -> int | None:
    """Return the first number among the words of a prefix."""
    return next((number for number in map(_number, words) if number is not None), None)


def _role(words: Sequence[str]) -> str:
    """Return the role that the words of a prefix show, or ""."""
    if CROSS_NAMES.intersection(words):
        return CROSS
    return next((word for word in words if word in (DECODER, ENCODER)), "")


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _matching(every: Sequence[LayerMatch], layer: str | None) -> list[LayerMatch]:
    """Return the attentions of a number or a prefix; without either layer 0, or the only one."""
    if layer is None and len(every) == 1:
        return list(every)
    number = 0 if layer is None else _number(layer)
    if number is None:
        return _with_prefix(every, f"{layer}")
    numbered = [found for found in every if found.layer == number]
    beside = [found for found in numbered if not found.tower]
    unnumbered = [found for found in every if found.layer is None and layer is None]
    return beside or numbered or unnumbered


def _with_prefix(every: Sequence[LayerMatch], layer: str) -> list[LayerMatch]:
    """Return the attentions with exactly this prefix, else with it as a suffix, else as a start."""
    wanted = layer.strip(".") + "."
    exact = [found for found in every if found.prefix == wanted]
    ending = [found for found in every if found.prefix.endswith(f".{wanted}")]
    return exact or ending or [found for found in every if found.prefix.startswith(wanted)]


def _meant(matching: Sequence[LayerMatch], wanted: str | None) -> list[LayerMatch]:
    """Return the attentions of the wanted role, from an encoder and a decoder."""
    if len(matching) == 1 or wanted is None:
        return list(matching)
    if wanted == CROSS:
        return [found for found in matching if found.role == CROSS]
    own = [found for found in matching if found.role != CROSS]
    other = ENCODER if wanted == DECODER else DECODER
    return [found for found in own if found.role != other] or own
