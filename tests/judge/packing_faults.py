"""Faults in a packed projection of queries, keys and values."""

from __future__ import annotations

from operator import attrgetter

import numpy_packing as packing
from fault import Fault, both, has_bias, one_width, several_kv_heads
from fault_changes import Array, At
from numpy_attention import Change

Rows = dict[str, Array]

# -- changes


def in_order(order: str) -> Change:
    return lambda _, at: packing.rows_in_order(at["spec"], order)


def by_kv_head(_: Rows, at: At) -> Rows:
    return packing.rows_by_kv_head(at["spec"])


def everywhere(change: Change) -> dict[str, Change]:
    return {"rows_of_weight": change, "rows_of_bias": change}


def exchanged(one: str, other: str) -> Change:
    return lambda rows, _: rows | {one: rows[other], other: rows[one]}


# -- where they apply

is_packed = attrgetter("packed_qkv")


# With one K/V head, head by head is one part after another.
PACKING = (
    Fault("packed_keys_first", "k, q, v", everywhere(in_order("kqv")), is_packed),
    Fault("packed_values_before_keys", "q, v, k", everywhere(in_order("qvk")), is_packed),
    Fault("packed_values_first", "v, q, k", everywhere(in_order("vqk")), is_packed),
    Fault("packed_keys_for_values", "k and v exchanged",
          everywhere(exchanged("k", "v")), both(is_packed, one_width)),
    Fault("packed_by_head", "q, k, v of one K/V head, then of the next",
          everywhere(by_kv_head), both(is_packed, several_kv_heads)),
    Fault("packed_weight_by_head", "the weight, not the bias",
          {"rows_of_weight": by_kv_head}, both(is_packed, several_kv_heads, has_bias("q"))),
    Fault("packed_bias_by_head", "the bias, not the weight",
          {"rows_of_bias": by_kv_head}, both(is_packed, several_kv_heads, has_bias("q"))),
    Fault("packed_bias_of_values_before_keys", "the bias as q, v, k",
          {"rows_of_bias": in_order("qvk")}, both(is_packed, has_bias("q"))),
)  # fmt: skip
