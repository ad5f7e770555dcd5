"""The families of models whose config.json is known, read from `families.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of the attention of one `model_type`; `families.toml` explains the fields."""

    embed_dim: tuple[str, ...] = ("hidden_size",)
    num_heads: tuple[str, ...] = ("num_attention_heads",)
    num_kv_heads: str = ""
    head_dim: str = ""
    rules: tuple[str, ...]
    defaults: dict[str, Any] = {}
    bias: str | None = None
    bias_key: str = "attention_bias"
    slides: str | None = None


FAMILIES: Final[Mapping[str, Family]] = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, Family]
)

GEMMA3: Final = ("gemma3", "gemma3_text")
"""Both have the text model's keys; the first is the model with pictures around it."""


def family_of(model_type: str) -> Family | None:
    """Return the row of a `model_type`, or None."""
    return FAMILIES.get("gemma3_text" if model_type in GEMMA3 else model_type)
