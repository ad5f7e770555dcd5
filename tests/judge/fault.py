"""Definition of a planted fault, and of the specs to which one applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from operator import attrgetter

from numpy_attention import Change

from attn_export.spec import AttentionSpec

Applies = Callable[[AttentionSpec], bool]


in_place = attrgetter("in_place")
is_causal = attrgetter("causal")
gives_weights = attrgetter("attn_weights")
has_rotary = attrgetter("has_rotary")
takes_positions = attrgetter("position_ids")
has_left = attrgetter("window_left")
has_right = attrgetter("window_right")
has_added_keys = attrgetter("added_keys")


def always(_: AttentionSpec) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        about: What is wrong, in a few words.
        at: The steps that are changed, and how.
        applies: Whether the change is a fault for a spec.
    """

    name: str
    about: str
    at: Mapping[str, Change]
    applies: Applies = always


def both(*conditions: Applies) -> Applies:
    return lambda spec: all(condition(spec) for condition in conditions)


def no(condition: Applies) -> Applies:
    return lambda spec: not condition(spec)


def has_cache(spec: AttentionSpec) -> bool:
    """Return whether there is an appended cache; one in place has its own faults."""
    return spec.has_cache and not spec.in_place


def is_causal_with_past(spec: AttentionSpec) -> bool:
    return spec.causal and has_cache(spec)


def float_mask(spec: AttentionSpec) -> bool:
    return spec.mask is not None and spec.mask.dtype == "float"


def bool_mask(spec: AttentionSpec) -> bool:
    return spec.mask is not None and spec.mask.dtype == "bool"


def mask_has(axis: str) -> Applies:
    return lambda spec: spec.mask is not None and axis in spec.mask.axes


def shares_some_heads(spec: AttentionSpec) -> bool:
    """Return whether blocks and tiles of heads differ: not for one K/V head, or one per query."""
    return spec.q_per_kv > 1 and spec.num_kv_heads > 1


def several_kv_heads(spec: AttentionSpec) -> bool:
    return spec.num_kv_heads > 1


def one_width(spec: AttentionSpec) -> bool:
    return spec.head_dim == spec.v_head_dim


def has_bias(projection: str) -> Applies:
    return lambda spec: spec.has_bias(projection)


def scales(spec: AttentionSpec) -> bool:
    return spec.softmax_scale != 1


def has_norm(spec: AttentionSpec) -> bool:
    return spec.qk_norm != "none"


def counts_positions(spec: AttentionSpec) -> bool:
    """Return whether rotary positions follow the past, and are no input."""
    return spec.has_rotary and not spec.position_ids


def scaling_is(scaling: str) -> Applies:
    return lambda spec: spec.rotary_scaling == scaling


def hides_something(spec: AttentionSpec) -> bool:
    return spec.mask is not None or spec.causal or spec.window_left is not None
