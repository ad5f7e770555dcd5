"""`AttentionSpec`: frozen, validated description of the attention layer to build.

Legend: B batch, L query length, S key length (past included), P past length,
E embed_dim, H num_heads, Hkv num_kv_heads, D head_dim, Dv v_head_dim, R rotary_dim,
C kv_latent_dim.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from attn_export.errors import SpecError, choose
from attn_export.interface import Input, Shape, Threshold, Traits
from attn_export.spec import rules
from attn_export.spec.fields import INT4_BLOCK, NO_MASK, REMOVED, SOFTMAX, AttentionFields
from attn_export.spec.rules import DTYPES, MaskSpec, divisors
from attn_export.untrusted_files import read_toml

_LAST_POSITION = 4095
"""The largest position id in test cases."""

_GROWN_BYTES = 24 * 2**20
"""Largest size in bytes if rotary frequencies change with the length, which no other case shows."""

_POSITIONS = {2050: Threshold("", 2 * 2**20), 258: Threshold("", 4 * 2**20)}
"""Distances to reach for rotary positions alone. float16 counts exactly up to 2048, and bfloat16
and bytes up to 256."""

__all__ = ["DTYPES", "VARIANTS", "AttentionSpec", "Input", "MaskSpec", "Shape"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(AttentionFields):
    """Description of one attention layer: dimensions, heads, mask, cache; see docs/spec.md.

    Raises:
        SpecError: If the values contradict each other; the message has the rule and the values.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", rules.parse_bias(self.bias))
        rules.check_types(self)
        rules.derive_fields(self)
        for rule in rules.RULES:
            rule(self)

    # -- derived values ------------------------------------------------------------

    @property
    def q_per_kv(self) -> int:
        """The number of query heads per key/value head, H // Hkv."""
        return self.num_heads // self.num_kv_heads

    @property
    def cache_widths(self) -> tuple[int, int]:
        """The widths of a cached key and value: D and Dv, or R and C with a latent (MLA)."""
        if self.kv_latent_dim:
            return self.rotary_dim, self.kv_latent_dim
        return self.head_dim, self.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores: `scale`, or 1/sqrt(D)."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)

    @property
    def mask(self) -> MaskSpec | None:
        """`attn_mask` parsed, or None without a mask."""
        return None if self.attn_mask == NO_MASK else MaskSpec.parse(self.attn_mask)

    @property
    def has_cache(self) -> bool:
        """True if `past_key` and `past_value` are inputs."""
        return self.cache in ("append", "in-place")

    @property
    def has_state(self) -> bool:
        """True if `past_state` is an input."""
        return self.cache == "state"

    @property
    def states(self) -> dict[str, Shape]:
        """The shape of each cache of linear attention, by its name after `past_`."""
        if self.cache != "state":
            return {}
        heads, Hkv, D = self.num_heads, self.num_kv_heads, self.head_dim
        channels = (heads + Hkv) * D + Hkv * self.v_head_dim
        conv = {"conv": ("batch", channels, self.conv_width - 1)} if self.conv_width else {}
        return {"state": ("batch", Hkv, D, self.v_head_dim), **conv}

    @property
    def in_place(self) -> bool:
        """True if new keys are written into a buffer, after `past_length` past keys."""
        return self.cache == "in-place"

    @property
    def has_rotary(self) -> bool:
        """True if queries and keys are rotated by their positions."""
        return self.rotary != "none"

    @property
    def turns_by_length(self) -> bool:
        """True if the rotary frequencies depend on the number of keys."""
        return self.rotary_scaling in ("dynamic", "longrope")

    @property
    def turn_magnitude(self) -> float:
        """The factor on rotated queries and keys; 1 unless `rotary_scaling` defines another.

        Sources: Peng et al. 2023, eq. 22 (yarn), and Ding et al. 2024, sec. 3.3 (longrope).
        """
        factor = self.rotary_factor
        usual = {
            "yarn": 0.1 * math.log(factor) + 1.0,
            "longrope": math.sqrt(
                1 + math.log(factor) / math.log(max(self.rotary_original_len, 2))
            ),
        }.get(self.rotary_scaling)
        if usual is None:
            return 1.0
        return usual if self.rotary_magnitude is None else self.rotary_magnitude

    def has_bias(self, projection: str) -> bool:
        """Return whether a projection, one of q, k, v and out, has a bias."""
        return self.bias == "all" or projection in self.bias.split(",")

    @property
    def traits(self) -> Traits:
        """What the cases of the layer depend on."""
        # Without a causal mask, tokens would see later tokens, which a decode does not have yet.
        # Some rotary scalings depend on the length at the time of a key.
        grows = self.has_state or (self.in_place and self.causal)
        return Traits(
            is_attention=True,
            hides_future=self.causal or self.window_right is not None,
            has_latent=self.kv_latent_dim > 0,
            has_softmax=self.kind == SOFTMAX,
            has_cache=self.has_cache,
            in_place=self.in_place,
            decodes=grows and not self.turns_by_length,
            thresholds={distance: about for distance, about in self._thresholds() if distance},
        )

    def _thresholds(self) -> Iterator[tuple[int, Threshold]]:
        """Yield the distances from query to key at which the computation changes."""
        if self.has_rotary and self.has_cache and not self.position_ids:
            yield from _POSITIONS.items()
        for length in (self.window_left, self.window_right):
            yield length or 0, Threshold("the end of the window")
        if self.relative_buckets:
            yield self.relative_max_distance, Threshold("the last of the relative positions")
        if self.turns_by_length and not self.position_ids:
            grows = Threshold("the change of the rotary frequencies", _GROWN_BYTES)
            yield self.rotary_original_len, grows

    @property
    def key_axis(self) -> str:
        """The name of S: the axis over which softmax runs."""
        if self.cross:
            return "key_len"
        return {"append": "total_len", "in-place": "capacity"}.get(self.cache, "query_len")

    @property
    def added_keys(self) -> int:
        """The number of keys that `add_bias_kv` and `add_zero_attn` add: 0 to 2."""
        return int(self.add_bias_kv) + int(self.add_zero_attn)

    @property
    def relations(self) -> dict[str, str]:
        """Axes that are sums of others, with their terms: ``total_len = past_len + query_len``."""
        terms = {"total_len": "past_len + query_len"} if self.cache == "append" else {}
        if self.added_keys and self.attn_weights:
            keys = terms.get("total_len", self.key_axis)
            terms["weights_len"] = f"{keys} + {self.added_keys}"
        return terms

    @property
    def sums(self) -> dict[str, str]:
        """Sums that hold for the sizes of test cases: `relations`, and one for the capacity.

        In the graph the capacity of a cache in place is free. In test cases it is ``past_len +
        query_len``, where ``past_len`` is the maximum of `past_length` and no axis.
        """
        if not self.in_place:
            return self.relations
        capacity = "past_len + query_len"
        return {"capacity": capacity} | {
            name: terms.replace("capacity", capacity) for name, terms in self.relations.items()
        }

    def inputs(self) -> dict[str, Input]:
        """Return the description of every graph input, by name, in order."""
        dtypes = {"attn_mask": "bool"} if self.mask and self.mask.dtype == "bool" else {}
        shapes = self.input_shapes()
        inputs = {
            name: Input(shape, dtypes.get(name, self.dtype)) for name, shape in shapes.items()
        }
        if self.in_place:
            inputs["past_length"] = Input(shapes["past_length"], "int64", 0, "past_len")
        if self.position_ids:
            # If frequencies change with the length, some cases are longer and some are not.
            last = self.rotary_original_len * 3 // 2 if self.turns_by_length else _LAST_POSITION
            inputs["position_ids"] = Input(shapes["position_ids"], "int64", 0, last)
        return inputs

    def input_shapes(self) -> dict[str, Shape]:
        """Return the shape of every graph input, by name, in order; dynamic axes by name."""
        shapes: dict[str, Shape] = {"query": ("batch", "query_len", self.embed_dim)}
        if self.cross:
            shapes["key"] = ("batch", self.key_axis, self.kdim)
            shapes["value"] = ("batch", self.key_axis, self.vdim)
        if self.mask:
            names: dict[str, str | int] = {
                "B": "batch", "H": self.num_heads, "L": "query_len", "S": self.key_axis, "1": 1,
            }  # fmt: skip
            shapes["attn_mask"] = tuple(names[axis] for axis in self.mask.axes)
        if self.has_cache:
            past = "capacity" if self.in_place else "past_len"
            for name, width in zip(("past_key", "past_value"), self.cache_widths, strict=True):
                shapes[name] = ("batch", self.num_kv_heads, past, width)
        shapes |= {f"past_{name}": shape for name, shape in self.states.items()}
        if self.in_place:
            shapes["past_length"] = ("batch",)
        if self.position_ids:
            shapes["position_ids"] = ("batch", "query_len")
        return shapes

    def output_shapes(self) -> dict[str, Shape]:
        """Return the shape of every graph output, by name, in order; dynamic axes by name."""
        shapes: dict[str, Shape] = {"output": ("batch", "query_len", self.embed_dim)}
        if self.has_cache:
            for name, width in zip(
                ("present_key", "present_value"), self.cache_widths, strict=True
            ):
                shapes[name] = ("batch", self.num_kv_heads, self.key_axis, width)
        shapes |= {f"present_{name}": shape for name, shape in self.states.items()}
        if self.attn_weights:
            keys = "weights_len" if self.added_keys else self.key_axis
            shapes["attn_weights"] = ("batch", self.num_heads, "query_len", keys)
        return shapes

    # -- conversion ----------------------------------------------------------------

    @classmethod
    def variant(cls, name: str, **changes: Any) -> Self:
        """Return a variant: E 512, H 8, causal, `attn_mask="bool[B,1,1,S]"`, `cache="append"`.

        Args:
            name: The variant: mha, mqa, gqa or mla.
            changes: Fields with other values.

        Raises:
            SpecError: If there is no such variant, or if a change contradicts it.
        """
        if name not in VARIANTS:
            raise SpecError(f"unknown variant {name!r}; {choose(str(name), VARIANTS)}")
        values = {**_USUAL, **changes}
        # Sizes first, since the fields of the variant depend on them.
        sizes = ("embed_dim", "num_heads", "head_dim")
        plain = cls.from_dict({size: values[size] for size in sizes if size in values})
        spec = cls.from_dict({**_usual_fields(name, plain), **values})
        _check_variant(name, spec)
        return spec

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a spec from plain values, by field.

        Raises:
            SpecError: If a key is unknown or missing, or a value is not allowed.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        usual: dict[str, object] = dict(REMOVED)
        if values.get("weights_dtype") == "int4":
            usual["block_size"] = INT4_BLOCK
        for name in values.keys() & REMOVED.keys():
            if values[name] != usual[name]:
                raise SpecError(
                    f"{name} = {str(values[name])[:60]!r} was removed in 0.3.0; leave "
                    "it out (of few bits are weights alone, by weights_dtype; whole models take "
                    "--kv-dtype float16)"
                )
        values = {name: value for name, value in values.items() if name not in REMOVED}
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = (
                    f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
                )
                raise SpecError(f"unknown key {key!r} in the spec; {hint}")
        for key in ("embed_dim", "num_heads"):
            if key not in values:
                raise SpecError(f"the spec has no {key!r}; add {key} = N")
        return cls(**values)

    @classmethod
    def from_toml(cls, path: Path | str, **changes: Any) -> Self:
        """Return a spec from a TOML file, with some fields changed.

        Args:
            path: The file.
            changes: The changed fields.

        Raises:
            SpecError: If the file cannot be read, is not TOML, or is no valid spec.
        """
        try:
            values = read_toml(Path(path))
        except OSError as error:
            raise SpecError(f"cannot read the spec {path}: {error.strerror}") from error
        except ValueError as error:
            raise SpecError(f"{path} is not TOML: {error}") from error
        try:
            return cls.from_dict(values | changes)
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, with derived ones, without fields that are None."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    def to_toml(self) -> str:
        """Return the spec as TOML that `from_toml` reads back to an equal spec."""
        # Strings, booleans, ints and finite floats are written alike in TOML and JSON.
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.to_dict().items())


# -- variants -----------------------------------------------------------------------------------

VARIANTS: Final = ("mha", "mqa", "gqa", "mla")

_USUAL: Final[Mapping[str, Any]] = {
    "embed_dim": 512, "num_heads": 8, "causal": True, "attn_mask": "bool[B,1,1,S]",
    "cache": "append",
}  # fmt: skip
"""Values of fields that all variants have by default."""


def _usual_fields(name: str, spec: AttentionFields) -> dict[str, Any]:
    """Return the fields of a variant that depend on E and H."""
    heads = spec.num_heads
    # MQA and MLA have one key/value head, and MHA has H. GQA has the largest divisor of H up to
    # H / 4, but at least 2 if H is even: 8 -> 2, 16 -> 4, 14 -> 2.
    quarter = max(d for d in divisors(heads) if d <= max(2, heads // 4))
    fields: dict[str, Any] = {"num_kv_heads": {"mha": heads, "gqa": quarter}.get(name, 1)}
    if name == "mla":
        # The proportions of DeepSeek-V2: one third of the D elements of a query is rotated, and the
        # latent is four times as wide as the other two thirds.
        plain = max(spec.embed_dim // heads, 4)
        rotated = plain // 4 * 2
        fields |= {
            "head_dim": plain + rotated, "v_head_dim": plain, "kv_latent_dim": 4 * plain,
            "rotary": "interleaved", "rotary_dim": rotated, "bias": "none",
        }  # fmt: skip
    return fields


def _check_variant(name: str, spec: AttentionFields) -> None:
    """Check that the dimensions of a spec are those of its variant."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    is_variant = {"mha": kv_heads == heads, "mqa": kv_heads == 1, "mla": spec.kv_latent_dim > 0}
    if not is_variant.get(name, 1 < kv_heads < heads):
        raise SpecError(
            f"{name} with num_heads {heads} and num_kv_heads {kv_heads}: MHA has as "
            "many of both, MQA one K/V head, GQA a number between, MLA a latent; choose another "
            "variant"
        )
