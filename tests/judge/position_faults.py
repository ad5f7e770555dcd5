"""Faults in the effects of positions: rotary, windows, ALiBi, T5's relative bias.

How rotary positions are stretched, and position ids, are in `stretch_faults`.
"""

from __future__ import annotations

from operator import attrgetter

import fault_changes as c
import numpy as np
import numpy_positions as positions
from fault import (
    Applies,
    Fault,
    both,
    counts_positions,
    has_cache,
    has_left,
    has_right,
    has_rotary,
    is_causal,
    no,
)
from fault_changes import Array, At

from attn_export.spec import AttentionSpec

# -- changes


def theta_one_more(inv_freq: Array, at: At) -> Array:
    return c.frequencies_of(rotary_theta=at["spec"].rotary_theta + 1)(inv_freq, at)


def all_of_head(inv_freq: Array, at: At) -> Array:
    return c.frequencies_of(rotary_dim=at["spec"].head_dim)(inv_freq, at)


def wide_exponent(_: Array, at: At) -> Array:
    """Return the first of the frequencies of all of D: theta^(-2i/D) for theta^(-2i/R)."""
    return all_of_head(_, at)[: at["spec"].rotary_dim // 2]


def from_0(position: Array, at: At) -> Array:
    return position - at["P"]


def past_once_more(parts: list[tuple[Array, Array]], at: At) -> list[tuple[Array, ...]]:
    past_key, past_value = parts[0]
    counted = np.arange(at["P"])
    turned = positions.rotated(past_key, at["inv_freq"], counted, at["layout"], at["magnitude"])
    return [(turned, past_value), *parts[1:]]


def without_past(_: Array, at: At) -> Array:
    return positions.offsets(0, at["shape"])


def signed(_: Array, at: At) -> Array:
    return -at["offset"]


def of_one_side(_: Array, at: At) -> Array:
    return positions.buckets(at["offset"], at["spec"], both_sides=False)


def sides_swapped(_: Array, at: At) -> Array:
    return positions.buckets(-at["offset"], at["spec"], both_sides=True)


def one_further(buckets: Array, at: At) -> Array:
    return np.minimum(buckets + 1, at["spec"].relative_buckets - 1)


def half_of_buckets(_: Array, at: At) -> Array:
    return positions.buckets(-np.abs(at["offset"]), at["spec"], both_sides=True)


def without_logarithm(_: Array, at: At) -> Array:
    """Give every distance a bucket of its own, as far as there are buckets."""
    spec, offset = at["spec"], at["offset"]
    if spec.causal:
        return np.clip(-offset, 0, spec.relative_buckets - 1)
    count = spec.relative_buckets // 2
    return np.minimum(np.abs(offset), count - 1) + count * (offset > 0)


def relative_without_past(_: Array, at: At) -> Array:
    return positions.buckets(without_past(_, at), at["spec"], both_sides=not at["spec"].causal)


def of_next_head(weights: dict[str, Array], _: At) -> dict[str, Array]:
    name = "score_bias.relative_attention_bias.weight"
    return weights | {name: np.roll(weights[name], -1, axis=1)}


# -- where they apply

has_alibi = attrgetter("alibi")
has_buckets = attrgetter("relative_buckets")


def layout_is(layout: str) -> Applies:
    """Return a test for a layout; with one pair both layouts are the same."""
    return lambda spec: spec.rotary == layout and spec.rotary_dim > 2


def is_partial(spec: AttentionSpec) -> bool:
    return spec.has_rotary and spec.rotary_dim < spec.head_dim


def odd_heads(spec: AttentionSpec) -> bool:
    """Return whether the heads are no power of 2, whose slopes are those of the formula."""
    return spec.alibi and spec.num_heads & (spec.num_heads - 1) != 0


ROTARY = (
    Fault("rotary_missing", "q and k not rotated",
          {"inv_freq": c.value(np.zeros_like)}, has_rotary),
    Fault("rotary_theta_off_by_one", "10001 for 10000", {"inv_freq": theta_one_more}, has_rotary),
    Fault("rotary_interleaved_for_half", "pairs 2i and 2i + 1",
          {"layout": c.value(lambda _: "interleaved")}, layout_is("half")),
    Fault("rotary_half_for_interleaved", "pairs i and i + R/2",
          {"layout": c.value(lambda _: "half")}, layout_is("interleaved")),
    Fault("rotary_ignores_past", "new keys and queries start at 0",
          {"positions_q": from_0, "positions_k": from_0}, both(counts_positions, has_cache)),
    Fault("rotary_of_queries_ignores_past", "queries start at 0",
          {"positions_q": from_0}, both(counts_positions, has_cache)),
    Fault("rotary_one_late", "positions count from 1",
          {"positions_q": c.value(lambda p: p + 1), "positions_k": c.value(lambda p: p + 1)},
          both(counts_positions, has_cache)),
    Fault("rotary_of_past_twice", "the cache is rotated already",
          {"parts": past_once_more}, both(has_rotary, has_cache)),
    # Without a cache only differences of positions are seen, and two wrong signs are right.
    Fault("rotary_backwards", "by -angle",
          {"inv_freq": c.value(np.negative)}, both(has_rotary, has_cache)),
    Fault("rotary_of_keys_backwards", "k by -angle",
          {"rotated_k": lambda _, at: positions.rotated(
              at.get("normed_k", at["projected_k"]), -at["inv_freq"], at["positions"],
              at["layout"], at["magnitude"])}, has_rotary),
    Fault("rotary_positions_times_1.5", "a factor",
          {"inv_freq": c.value(lambda f: f * np.float32(1.5))}, has_rotary),
    Fault("rotary_in_reverse", "the last position first",
          {"positions_q": c.value(c.swap(-1)), "positions_k": c.value(c.swap(-1))},
          both(counts_positions, has_cache)),
    Fault("rotary_on_all_of_head", "R = D", {"inv_freq": all_of_head}, is_partial),
    Fault("rotary_exponent_of_head", "theta^(-2i/D)", {"inv_freq": wide_exponent}, is_partial),
)  # fmt: skip

WINDOW = (
    Fault("window_left_one_more", "one key too many",
          {"window_left": c.value(lambda w: w + 1)}, has_left),
    Fault("window_left_one_less", "one key too few",
          {"window_left": c.value(lambda w: w - 1)}, has_left),
    Fault("window_right_one_more", "one key too many",
          {"window_right": c.value(lambda w: w + 1)}, has_right),
    Fault("window_right_one_less", "one key too few",
          {"window_right": c.value(lambda w: w - 1)}, has_right),
    Fault("window_ignores_past", "query i is at i",
          {"window_offset": without_past}, both(has_left, has_cache)),
    Fault("window_left_dropped", "all keys before",
          {"window_left": c.value(lambda _: 10**6)}, has_left),
    Fault("window_right_dropped", "all keys after",
          {"window_right": c.value(lambda _: 10**6)}, has_right),
    Fault("window_sides_swapped", "left for right",
          {"window_offset": c.value(np.negative)},
          lambda spec: has_right(spec) and spec.window_left != spec.window_right),
)  # fmt: skip

ALIBI = (
    Fault("alibi_missing", "slopes of 0", {"slopes": c.value(np.zeros_like)}, has_alibi),
    Fault("causal_drops_alibi", "causal in its place",
          {"slopes": c.value(np.zeros_like)}, both(has_alibi, is_causal)),
    Fault("alibi_slope_of_next_head", "one head late",
          {"slopes": c.value(lambda s: np.roll(s, -1, axis=0))}, has_alibi),
    Fault("alibi_rises_after_the_query", "the sign reversed on the other side",
          {"distance": signed}, both(has_alibi, no(is_causal))),
    Fault("alibi_added", "farther keys score higher",
          {"slopes": c.value(np.negative)}, has_alibi),
    Fault("alibi_formula_of_power_of_2", "2^(-8h/H)",
          {"slopes": lambda s, _: positions.geometric(len(s))[:, None, None]}, odd_heads),
    Fault("alibi_scaled", "by the factor of the scores",
          {"slopes": lambda s, at: s * np.float32(at["scale"])}, has_alibi),
)  # fmt: skip

RELATIVE = (
    Fault("relative_bucket_off_by_one", "the next bucket", {"bucket": one_further}, has_buckets),
    Fault("relative_without_logarithm", "distances of their own throughout",
          {"bucket": without_logarithm}, has_buckets),
    Fault("relative_one_side_for_both", "keys after the query are at 0",
          {"bucket": of_one_side}, both(has_buckets, no(is_causal))),
    Fault("relative_same_on_both_sides", "the second half unused",
          {"bucket": half_of_buckets}, both(has_buckets, no(is_causal))),
    Fault("relative_sides_swapped", "the second half for keys before",
          {"bucket": sides_swapped}, both(has_buckets, no(is_causal))),
    Fault("relative_both_sides_for_one", "half of the buckets",
          {"bucket": half_of_buckets}, both(has_buckets, is_causal)),
    Fault("relative_ignores_past", "query i is at i",
          {"bucket": relative_without_past}, both(has_buckets, has_cache)),
    Fault("relative_of_next_head", "one head late",
          {"parameters": of_next_head}, has_buckets),
)  # fmt: skip

POSITIONS = (*ROTARY, *WINDOW, *ALIBI, *RELATIVE)
