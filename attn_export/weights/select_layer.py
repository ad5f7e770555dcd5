"""Choice of one attention layer of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from attn_export.errors import WeightsError
from attn_export.weights.layouts import Layout, recognise
from attn_export.weights.source import TensorSource, listed, shown

CROSS, DECODER, ENCODER = "cross", "decoder", "encoder"

_CROSS_NAMES: Final = frozenset({
    "encoder_attn", "EncDecAttention", "crossattention", "cross_attn", "cross_attention",
    "src_attn", "enc_attn", "enc_dec_attention", "multihead_attn",
})  # fmt: skip
"""Names of modules in which a decoder attends to an encoder."""
_TOWERS: Final = frozenset({
    "vision_tower", "vision_model", "visual", "vision_encoder", "audio_tower", "audio_model",
})  # fmt: skip
"""Names of modules that encode images or audio for a language model."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerMatch:
    """One attention layer of a checkpoint.

    Attributes:
        prefix: The prefix of its tensors' names, with the dot.
        role: `CROSS`, `DECODER`, `ENCODER`, or "" if the prefix does not tell.
    """

    prefix: str
    layout: Layout
    layer: int | None
    role: str

    @property
    def tower(self) -> str:
        """The encoder of images or audio that it belongs to, or ""."""
        return next((word for word in self.prefix.split(".") if word in _TOWERS), "")

    @property
    def shown(self) -> str:
        """The prefix in the format of ``--layer``."""
        return self.prefix.removesuffix(".") or "(no prefix)"


def parse_layer(layer: str | None, role: str | None) -> tuple[int, str]:
    """Return the number and role of the layer that ``--layer`` means without tensors."""
    words = (layer or "0").strip(".").split(".")
    number, role_in_prefix = _number_in(words), _role(words)
    if number is None and not role_in_prefix:
        raise WeightsError(
            f"--layer {shown(layer or '')!r} has no number; without tensors give one, as in 3 "
            "or decoder.layers.3.encoder_attn"
        )
    return number or 0, role_in_prefix or role or ""


def choose_layer(source: TensorSource, layer: str | None, role: str | None) -> LayerMatch:
    """Return the attention layer that the user chose."""
    layers = [_match(prefix, layout) for prefix, layout in recognise(source.files).items()]
    layers.sort(key=lambda match: (match.layer is None, match.layer or 0, match.prefix))
    if not layers:
        raise WeightsError(
            f"{source.path} has no attention of a known layout; give the model's own code by "
            f"--module PATH.py:FUNCTION; its tensors are {listed(source.files)}"
        )
    matches = _filter_layers(layers, layer)
    if not matches:
        raise WeightsError(
            f"{source.path} has no attention {shown(layer or 'of layer 0')!r}; give one of these "
            f"as --layer: {listed(match.shown for match in layers)}"
        )
    with_role = _filter_roles(matches, role)
    if len(with_role) != 1:
        raise WeightsError(
            f"{source.path} has {len(matches)} attentions that may be meant; give one of these "
            f"as --layer: {listed(match.shown for match in with_role or matches)}"
        )
    return with_role[0]


def _match(prefix: str, layout: Layout) -> LayerMatch:
    words = prefix.split(".")
    return LayerMatch(prefix, layout, _number_in(words), _role(words))


def _number_in(words: Sequence[str]) -> int | None:
    """Return the first number among the words of a prefix."""
    return next((number for number in map(_number, words) if number is not None), None)


def _role(words: Sequence[str]) -> str:
    """Return the role that the words of a prefix tell, or ""."""
    if _CROSS_NAMES.intersection(words):
        return CROSS
    return next((word for word in words if word in (DECODER, ENCODER)), "")


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _filter_layers(layers: Sequence[LayerMatch], layer: str | None) -> list[LayerMatch]:
    """Return the layers with a number or a prefix; for None those of layer 0, or the only layer."""
    if layer is None and len(layers) == 1:
        return list(layers)
    number = 0 if layer is None else _number(layer)
    if number is None:
        return _filter_prefixes(layers, f"{layer}")
    numbered = [match for match in layers if match.layer == number]
    # Image and audio encoders count only if no other layer has the number.
    outside_towers = [match for match in numbered if not match.tower]
    unnumbered = [match for match in layers if match.layer is None and layer is None]
    return outside_towers or numbered or unnumbered


def _filter_prefixes(layers: Sequence[LayerMatch], text: str) -> list[LayerMatch]:
    """Return the layers whose prefix is a text; else those whose prefix ends or starts with it."""
    text = text.strip(".") + "."
    equal = [match for match in layers if match.prefix == text]
    ending = [match for match in layers if match.prefix.endswith(f".{text}")]
    return equal or ending or [match for match in layers if match.prefix.startswith(text)]


def _filter_roles(matches: Sequence[LayerMatch], role: str | None) -> list[LayerMatch]:
    """Return the layers that may have a role; all if there is only one, or the role is None."""
    if len(matches) == 1 or role is None:
        return list(matches)
    if role == CROSS:
        return [match for match in matches if match.role == CROSS]
    self_attentions = [match for match in matches if match.role != CROSS]
    other = ENCODER if role == DECODER else DECODER
    return [match for match in self_attentions if match.role != other] or self_attentions
