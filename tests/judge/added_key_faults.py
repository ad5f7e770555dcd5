"""Faults in the keys that `add_bias_kv` and `add_zero_attn` add after all others."""

from __future__ import annotations

from operator import attrgetter

import fault_changes as c
import numpy as np
import numpy_positions as positions
from fault import (
    Applies,
    Fault,
    both,
    gives_weights,
    has_added_keys,
    has_cache,
    has_right,
    has_rotary,
    mask_has,
    one_width,
    several_kv_heads,
)
from fault_changes import Array, Arrays, At
from numpy_added_keys import Pair, widened
from numpy_attention import Change

from attn_export.spec import AttentionSpec

Pairs = list[Pair]
LEARNED, ZERO = 0, -1
"""Their indices among the added keys."""

# -- changes


def learned(name: str, of: Change) -> dict[str, Change]:
    """Change the learned key or value of every head `[Hkv, D]`."""
    key = f"added_keys.{name}"
    return {"parameters": lambda w, at: w | {key: of(w[key], at)}}


def learned_exchanged(w: Arrays, _: At) -> Arrays:
    k, v = "added_keys.bias_k", "added_keys.bias_v"
    return w | {k: w[v], v: w[k]}


def next_head(heads: Array, _: At) -> Array:
    return np.roll(heads, -1, axis=0)


def missing(place: int) -> dict[str, Change]:
    kept = slice(1, None) if place == LEARNED else slice(-1)
    return {"added_pairs": c.value(lambda pairs: pairs[kept])}


def hidden(place: int) -> dict[str, Change]:
    """Hide added keys, as if the mask or the causal diagonal covered them."""
    return {"sees_added_keys": c.rows(np.s_[..., place], np.zeros_like)}


def seen_as_last_key(sees: Array, at: At) -> Array:
    """Widen the mask by its own last column."""
    return np.broadcast_to(at["visible"][..., -1:], sees.shape)


def mask_in_front(visible: Array, at: At) -> Array:
    """Widen the mask as if the added keys were the first."""
    return np.roll(visible, len(at["added_pairs"]), axis=-1)


def weights_in_front(weights: Array, at: At) -> Array:
    return np.roll(weights, len(at["added_pairs"]), axis=-1)


def weights_cut(weights: Array, at: At) -> Array:
    return weights[..., : at["shape"][-1]]


def weights_not_written(weights: Array, at: At) -> Array:
    return widened(weights_cut(weights, at), np.zeros((*at["shape"][:-1], len(at["added_pairs"]))))


def rotated_as_next(pairs: Pairs, at: At) -> Pairs:
    """Rotate the learned key to the position after the last."""
    (key, value), *others = pairs
    turning = (at["inv_freq"], np.array([at["length"]]), at["layout"], at["magnitude"])
    return [(positions.rotated(key, *turning), value), *others]


def appended_to_present(present: Array, at: At) -> Array:
    return np.concatenate([present, at["added_pairs"][LEARNED][0]], axis=2)


def offset_of_added(at: At) -> Array:
    """Return offsets `[L, n]`, as if positions continued."""
    *_, L, S = at["shape"]
    return positions.offsets(at["P"], (L, S + len(at["added_pairs"])))[..., S:]


def lowered_by_alibi(bias: Array, at: At) -> Array:
    slopes = positions.slopes(at["spec"].num_heads)
    return np.broadcast_to(-slopes * np.abs(offset_of_added(at)), bias.shape)


def seen_in_window(sees: Array, at: At) -> Array:
    return np.broadcast_to(offset_of_added(at) <= at["spec"].window_right, sees.shape)


def learned_not_capped(scores: Array, at: At) -> Array:
    place = np.s_[..., at["kv"][0].shape[2] + LEARNED]
    return c.rows(place, lambda _: at["products"][place])(scores, at)


# -- where they apply

has_learned = attrgetter("add_bias_kv")
has_zero = attrgetter("add_zero_attn")


def hides_last(spec: AttentionSpec) -> bool:
    """Return whether some case hides the last key."""
    return spec.causal or mask_has("S")(spec)


def has(field: str) -> Applies:
    return lambda spec: bool(getattr(spec, field))


ADDED_KEYS = (
    Fault("bias_key_missing", "no learned key", missing(LEARNED), has_learned),
    Fault("zero_key_missing", "no key of 0", missing(ZERO), has_zero),
    Fault("bias_key_is_zero", "its value as it is",
          learned("bias_k", c.value(np.zeros_like)), has_learned),
    Fault("bias_value_is_zero", "its key as it is",
          learned("bias_v", c.value(np.zeros_like)), has_learned),
    Fault("bias_key_of_next_head", "one K/V head late",
          learned("bias_k", next_head), both(has_learned, several_kv_heads)),
    Fault("bias_value_of_next_head", "one K/V head late",
          learned("bias_v", next_head), both(has_learned, several_kv_heads)),
    Fault("bias_key_for_value", "exchanged",
          {"parameters": learned_exchanged}, both(has_learned, one_width)),
    Fault("bias_key_hidden", "by the mask or the diagonal", hidden(LEARNED), has_learned),
    Fault("zero_key_hidden", "by the mask or the diagonal", hidden(ZERO), has_zero),
    Fault("added_keys_seen_as_last_key", "the mask's last column again",
          {"sees_added_keys": seen_as_last_key}, both(has_added_keys, hides_last)),
    Fault("mask_widened_in_front", "added keys first in the mask",
          {"all_visible": mask_in_front}, both(has_added_keys, hides_last)),
    Fault("zero_key_before_bias_key", "seen in the weights alone",
          {"added_pairs": c.value(lambda pairs: pairs[::-1])},
          both(has_learned, has_zero, gives_weights)),
    Fault("added_keys_before_others", "seen in the weights alone",
          c.output("attn_weights", weights_in_front), both(has_added_keys, gives_weights)),
    Fault("weights_without_added_keys", "S wide",
          c.output("attn_weights", weights_cut), both(has_added_keys, gives_weights)),
    Fault("weights_of_added_keys_not_written", "0",
          c.output("attn_weights", weights_not_written), both(has_added_keys, gives_weights)),
    Fault("bias_key_in_present", "appended to the cache",
          c.output("present_key", appended_to_present), both(has_learned, has_cache)),
    Fault("bias_key_rotated", "as that of the next position",
          {"added_pairs": rotated_as_next}, both(has_learned, has_rotary)),
    Fault("bias_key_not_capped", "its score as it is",
          {"capped": learned_not_capped}, both(has_learned, has("softcap"))),
    Fault("alibi_on_added_keys", "positions go on",
          {"bias_of_added_keys": lowered_by_alibi}, both(has_added_keys, has("alibi"))),
    Fault("window_on_added_keys", "positions go on",
          {"sees_added_keys": seen_in_window}, both(has_added_keys, has_right)),
)  # fmt: skip
