"""One attention of a model with a config.json, as the rules of its family see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from attn_export.weights.config import Config

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

Pattern = Callable[[Config, int], bool]
"""Whether a layer has a window, by its number, where `layer_types` does not say."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One attention.

    Attributes:
        config: With the defaults of the family.
        role: As in `choice.Found`.
        number: The number of the layer.
        heads: H, the number of query heads.
        head_dim: D, the width of one head.
        slides: Whether it has a window, in a model where some layers have.
    """

    config: Config
    role: str
    number: int
    heads: int
    head_dim: int
    slides: bool


Rule = Callable[[Layer], dict[str, Any]]
"""Fields of the spec that one feature of a family sets."""


def slides(config: Config, pattern: Pattern | None, number: int) -> bool:
    """Return whether a layer has a window.

    Args:
        config: With the defaults of the family.
        pattern: The layers with one if `layer_types` is missing; None if all are alike.
        number: The number of the layer.

    Raises:
        WeightsError: If `layer_types` has no such layer, or a kind that is not known.
    """
    kinds = config.values.get("layer_types")
    if pattern is None:
        return False
    if kinds is None:
        return pattern(config, number)
    if not isinstance(kinds, list) or number >= len(kinds):
        raise config.wrong("layer_types", f"a list with an entry for layer {number}")
    if kinds[number] not in (FULL, SLIDING):
        raise config.refused("layer_types", kinds[number], f"known: {FULL}, {SLIDING}")
    return bool(kinds[number] == SLIDING)
