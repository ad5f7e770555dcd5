"""Access to the values of a config.json, and to the layers that it describes.

The keys and their defaults are those of the `configuration_*.py` of Hugging Face's transformers: a
config.json may lack keys that have the default of their model's class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attn_export.errors import WeightsError
from attn_export.weights.source import read_json, shown

CROSS, DECODER, ENCODER = "cross", "decoder", "encoder"
"""The roles of a layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """A config.json.

    Attributes:
        values: Its values, by key; for a model with images or audio, those of its language model.
        within: The start of its keys in messages, as of those within another key.
    """

    path: Path
    values: Mapping[str, Any]
    within: str = ""

    @classmethod
    def load(cls, path: Path) -> Config | None:
        """Return the config at a path, or None if there is no such file."""
        if not path.is_file():
            return None
        values = read_json(path, "the config")
        inner = values.get("text_config")
        if not isinstance(inner, dict):
            return cls(path, values)
        return cls(path, {"model_type": values.get("model_type"), **inner})

    @property
    def model_type(self) -> str:
        """The family of models, "" if the config lacks it."""
        return str(self.values.get("model_type") or "")

    def has(self, key: str) -> bool:
        """Return whether a key is there and not null."""
        return self.values.get(key) is not None

    def whole(self, key: str) -> int:
        """Return a whole number."""
        value = self.values.get(key)
        # Large integers cannot be converted to float; all values of a spec are far smaller.
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**50:
            raise self.invalid(key, "a whole number")
        return value

    def positive(self, key: str, value: object = None) -> float:
        """Return the positive finite number of a key; or check one in its list, `value`."""
        value = self.values.get(key) if value is None else value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1e300:
            return float(value)  # neither NaN nor infinity is in the range
        raise self.invalid(key, "a positive number", value)

    def flag(self, key: str) -> bool:
        """Return true or false; false if the key is missing or null."""
        value = self.values.get(key)
        if not isinstance(value, (bool, type(None))):
            raise self.invalid(key, "true or false")
        return bool(value)

    def inner(self, key: str) -> Config:
        """Return the object of a key; without values if the key is missing or null."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.invalid(key, "an object")
        return Config(self.path, value, within=f"{self.within}{key}.")

    def invalid(self, key: str, valid: str, value: object = None) -> WeightsError:
        """Return the error for a key that is missing or has an invalid value."""
        value, key = self.values.get(key) if value is None else value, f"{self.within}{key}"
        if value is None:
            return WeightsError(f"{self.path} has no {key!r}; it must be {valid}")
        return WeightsError(f"{self.path}: {key} must be {valid}; got {shown(repr(value))}")

    def unsupported(self, key: str, value: object, why: str) -> WeightsError:
        """Return the error for a value that our attention does not support."""
        return WeightsError(
            f"{self.path}: {self.within}{key} = {shown(repr(value))} is not supported: {why}"
        )


# -- one attention layer that a config.json describes -------------------------------------------


FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
"""The values of `layer_types` for layers without and with a sliding window."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigLayer:
    """One attention layer that a config.json describes.

    Attributes:
        slides: Whether the layer has a sliding window; False if all layers of the model are alike.
    """

    config: Config
    role: str
    number: int
    heads: int
    head_dim: int
    slides: bool
