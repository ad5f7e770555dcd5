"""What a row of the table of fields says, and short forms of usual rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

DERIVED: Final = -1
"""The value of an integer field that is derived from other dimensions."""

LARGEST: Final = 2**20
"""The largest dimension, of which tables still fit into memory."""
HUGE: Final = 1e30
"""The largest factor, and 1 / HUGE the smallest one, so that float32 does not overflow."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Description of one field.

    Attributes:
        meaning: A phrase for the help of the command line and for docs/spec.md.
        usual: The text of the default, if the default value is not clear by itself.
        least: The smallest value; None, as `most`, if there is no range.
        choices: The allowed values, if there are only a few; else empty.
        needs: Other fields that must have one of these values, or be set if there are none, for
            this field to be set: to be another than its default.
        acts_with: Likewise, for this field to have an effect. It may be set without.
        excludes: Other fields that must not be set if this one is, and why not.
        in_config: Whether the config.json of a checkpoint determines the field.
        tries: Values with which tests try the field, if they are not all choices, or True.
        is_option: Whether the command line has an option for the field.
    """

    meaning: str
    usual: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    needs: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    acts_with: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    excludes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_config: bool = True
    tries: tuple[object, ...] = ()
    is_option: bool = True


KEY: Final = "field"
"""The key of the description in the metadata of a dataclass's field."""


def field(meaning: str, *default: Any, **attributes: Any) -> Any:
    """Return a dataclass field with a description; `attributes` are those of `Field`."""
    metadata = {KEY: Field(meaning=meaning, **attributes)}
    if default:
        return dataclasses.field(default=default[0], metadata=metadata)
    return dataclasses.field(metadata=metadata)


def size(meaning: str, *default: Any, **attributes: Any) -> Any:
    """Return a field for a dimension."""
    return field(meaning, *default, least=1, most=LARGEST, **attributes)


def factor(meaning: str, *default: Any, **attributes: Any) -> Any:
    """Return a field for a positive number."""
    return field(meaning, *default, **{"least": 1e-6, "most": 1e6, **attributes})


def count(meaning: str, *default: Any, **attributes: Any) -> Any:
    """Return a field for an integer that is at least 0."""
    return field(meaning, *default, least=0, most=2**31 - 1, **attributes)


TURNED: Final = {"rotary": ("half", "interleaved")}
UNPLACED: Final = {
    "cross": "key and query of cross-attention have no common positions; leave it out"
}
LATENT: Final = {"kv_latent_dim": "multi-head latent attention excludes it; leave it out"}
OF_LINEAR: Final = {"kind": ("linear",)}
NOT_LINEAR: Final = dict.fromkeys(
    (
        "kv_latent_dim", "cross", "packed_qkv", "attn_mask", "attn_weights", "rotary",
        "window_left", "window_right", "softcap", "alibi", "relative_buckets", "add_bias_kv",
        "add_zero_attn", "sinks", "dropout", "weights_dtype",
    ),
    "linear attention has none; leave it out",
)  # fmt: skip
"""What several fields need or exclude."""


def scaled(*kinds: str) -> dict[str, tuple[str, ...]]:
    """Return the `acts_with` of a field of some `rotary_scaling`."""
    return {"rotary_scaling": kinds}
