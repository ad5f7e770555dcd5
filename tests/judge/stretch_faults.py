"""Faults in the scaling of rotary positions, and in position ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import fault_changes as c
import ml_dtypes
import numpy as np
import numpy_positions as positions
from fault import Applies, Fault, both, counts_positions, has_cache, no, scaling_is, takes_positions
from fault_changes import Array, At
from numpy_attention import Change

from attn_export.spec import AttentionSpec

# -- changes


def grown(length: Callable[[At], int | Array], power: float | None = None) -> Change:
    """Return dynamic frequencies of another length, or with another power of the growth."""

    def change(_: Array, at: At) -> Array:
        spec = at["spec"]
        longest = np.maximum(length(at), spec.rotary_original_len)
        return positions.of_base(spec, positions.stretched_base(spec, longest, power))

    return change


def always_grown(_: Array, at: At) -> Array:
    """Grow by the whole factor at every length, even within the original one."""
    spec = at["spec"]
    power = spec.rotary_dim / (spec.rotary_dim - 2)
    return positions.of_base(spec, spec.rotary_theta * spec.rotary_factor**power)


def grown_within(_: Array, at: At) -> Array:
    """Let the growth fall below 1 within the original length."""
    base = positions.stretched_base(at["spec"], np.float64(at["length"]))
    return positions.of_base(at["spec"], base)


def grown_by_ratio(_: Array, at: At) -> Array:
    """Grow by length / original for factor * length / original - (factor - 1)."""
    ratio = max(at["length"] / at["spec"].rotary_original_len, 1)
    power = at["spec"].rotary_dim / (at["spec"].rotary_dim - 2)
    return positions.of_base(at["spec"], at["spec"].rotary_theta * ratio**power)


def past_regrown(parts: list[tuple[Array, Array]], at: At) -> list[tuple[Array, ...]]:
    """Rotate keys of the past to the base of the length at which they are read."""
    past_key, past_value = parts[0]
    counted = np.arange(at["P"])
    of_then = positions.frequencies(at["spec"], at["P"])
    turning = (counted, at["layout"], at["magnitude"])
    further = positions.rotated(past_key, at["inv_freq"] - of_then, *turning)
    return [(further, past_value), *parts[1:]]


def bounds_swapped(_: Array, at: At) -> Array:
    """Swap the stretched and the kept frequencies."""
    spec = at["spec"]
    plain = positions.frequencies(dataclasses.replace(spec, rotary_scaling="none"), 0)
    right = positions.frequencies(spec, 0)
    return plain + plain / np.float32(spec.rotary_factor) - right


def counted(position: Array, at: At) -> Array:
    """Count from the past on, in every row."""
    return np.broadcast_to(np.arange(at["P"], at["P"] + position.shape[1]), position.shape)


def counted_from_first(position: Array, _: At) -> Array:
    return position[:, :1] + np.arange(position.shape[1])


def rounded_to(kind: type) -> Callable[[Array], Array]:
    return lambda positions: positions.astype(np.float32).astype(kind).astype(np.int64)


def default_of(field: str) -> object:
    return next(f.default for f in dataclasses.fields(AttentionSpec) if f.name == field)


def with_default(field: str) -> Change:
    return c.frequencies_of(**{field: default_of(field)})


# -- where they apply


def changes_default(field: str, scaling: str) -> Applies:
    return lambda spec: spec.rotary_scaling == scaling and getattr(spec, field) != default_of(field)


def truncates(spec: AttentionSpec) -> bool:
    return spec.rotary_scaling == "yarn" and spec.rotary_truncate


def reaches_128(spec: AttentionSpec) -> bool:
    return spec.position_ids and spec.inputs()["position_ids"].high >= 128


is_dynamic = scaling_is("dynamic")

SCALING = (
    *(Fault(f"no_{scaling}_scaling", "plain frequencies",
            {"inv_freq": c.frequencies_of(rotary_scaling="none")}, scaling_is(scaling))
      for scaling in ("linear", "dynamic", "llama3", "yarn")),
    *(Fault(f"linear_for_{scaling}", "every pair stretched",
            {"inv_freq": c.frequencies_of(rotary_scaling="linear")}, scaling_is(scaling))
      for scaling in ("dynamic", "llama3", "yarn")),
    Fault("no_yarn_magnitude", "1", {"magnitude": c.value(lambda _: 1.0)}, scaling_is("yarn")),
    Fault("yarn_magnitude_on_scores_once", "its root on q and k",
          {"magnitude": c.value(np.sqrt)}, scaling_is("yarn")),
)  # fmt: skip

DYNAMIC = (
    Fault("dynamic_power_of_1", "1 for R/(R - 2)",
          {"inv_freq": grown(lambda at: at["length"], 1.0)}, is_dynamic),
    Fault("dynamic_length_one_less", "the last position for the length",
          {"inv_freq": grown(lambda at: at["length"] - 1)}, is_dynamic),
    Fault("dynamic_length_without_past", "L for P + L",
          {"inv_freq": grown(lambda at: at["inputs"]["query"].shape[1])},
          both(is_dynamic, has_cache)),
    Fault("dynamic_length_of_keys", "P + L for the largest position id",
          {"inv_freq": grown(lambda at: at["P"] + at["inputs"]["query"].shape[1])},
          both(is_dynamic, takes_positions)),
    Fault("dynamic_length_of_row", "each row of the batch its own",
          {"inv_freq": grown(lambda at: at["positions"].max(1, keepdims=True) + 1)},
          both(is_dynamic, takes_positions)),
    Fault("dynamic_length_of_query", "each query its own",
          {"inv_freq": grown(lambda at: at["positions"] + 1)}, is_dynamic),
    Fault("dynamic_grown_within_context", "the whole factor at any length",
          {"inv_freq": always_grown}, is_dynamic),
    Fault("dynamic_shrunk_within_context", "less than 1 at small lengths",
          {"inv_freq": grown_within}, is_dynamic),
    Fault("dynamic_growth_is_ratio", "length / original",
          {"inv_freq": grown_by_ratio}, is_dynamic),
    Fault("dynamic_past_regrown", "keys of the past on the new base",
          {"parts": past_regrown}, both(is_dynamic, has_cache, counts_positions)),
)  # fmt: skip

BOUNDS = (
    *(Fault(f"llama3_{which}_freq_default", f"{default_of(f'rotary_{which}_freq')}",
            {"inv_freq": with_default(f"rotary_{which}_freq")},
            changes_default(f"rotary_{which}_freq", "llama3"))
      for which in ("low", "high")),
    Fault("llama3_bounds_swapped", "low for high",
          {"inv_freq": bounds_swapped}, scaling_is("llama3")),
    *(Fault(f"yarn_beta_{which}_default", f"{default_of(f'rotary_beta_{which}')}",
            {"inv_freq": with_default(f"rotary_beta_{which}")},
            changes_default(f"rotary_beta_{which}", "yarn"))
      for which in ("fast", "slow")),
    Fault("yarn_truncated", "whole pairs for the bounds",
          {"inv_freq": c.frequencies_of(rotary_truncate=True)},
          both(scaling_is("yarn"), no(truncates))),
    Fault("yarn_not_truncated", "the bounds as they are",
          {"inv_freq": c.frequencies_of(rotary_truncate=False)}, truncates),
    Fault("yarn_magnitude_default", "0.1 ln(factor) + 1 for the one that is given",
          {"magnitude": lambda _, at: positions.magnitude(
              dataclasses.replace(at["spec"], rotary_magnitude=None))},
          changes_default("rotary_magnitude", "yarn")),
)  # fmt: skip

POSITION_IDS = (
    Fault("position_ids_ignored", "counted from the past",
          {"positions": counted}, takes_positions),
    Fault("position_ids_of_row_0", "row 0's for all",
          {"positions": c.value(c.first_of(0))}, takes_positions),
    Fault("position_ids_of_first_query", "counted from the first of a row",
          {"positions": counted_from_first}, takes_positions),
    Fault("position_ids_of_queries_only", "keys counted from the past",
          {"positions_k": counted}, takes_positions),
    # Without a cache only differences of positions are seen.
    Fault("position_ids_one_late", "each one more",
          {"positions_q": c.value(lambda p: p + 1), "positions_k": c.value(lambda p: p + 1)},
          both(takes_positions, has_cache)),
    Fault("position_ids_after_past", "the past added to them",
          {"positions": lambda p, at: p + at["P"]}, both(takes_positions, has_cache)),
    Fault("position_ids_in_8_bits", "128 becomes -128",
          {"positions": c.value(lambda p: p.astype(np.int8))}, reaches_128),
    # Positions of "dynamic" go a little beyond its context, which is short here.
    *(Fault(f"position_ids_in_{kind.__name__}", "rounded to its few bits",
            {"positions": c.value(rounded_to(kind))}, both(takes_positions, no(is_dynamic)))
      for kind in (ml_dtypes.bfloat16, np.float16)),
)  # fmt: skip

STRETCHED = (*SCALING, *DYNAMIC, *BOUNDS, *POSITION_IDS)
