"""Faults between the projections and the softmax: norms of q and k, softcap, sinks."""

from __future__ import annotations

from operator import attrgetter

import fault_changes as c
import numpy as np
from fault import Applies, Fault, both, has_bias, has_norm, has_rotary, hides_something
from fault_changes import Array, At
from numpy_attention import Change, capped, normed
from numpy_positions import rotated

from attn_export.spec import AttentionSpec

# -- changes


def norm_of(name: str, **changes: object) -> Change:
    """Apply another norm to the projected values."""
    return lambda _, at: normed(at, name, at[f"projected_{name}"], **changes)


def norm_before_bias(name: str) -> Change:
    def change(x: Array, at: At) -> Array:
        bias = at["parameters"][f"{name}_proj.bias"].reshape(x.shape[1], 1, x.shape[-1])
        return normed(at, name, at[f"projected_{name}"] - bias) + bias

    return change


def without_weight(name: str) -> Change:
    key = f"{name}_norm.weight"
    return lambda parameters, _: parameters | {key: np.ones_like(parameters[key])}


def without_bias(name: str) -> Change:
    key = f"{name}_norm.bias"
    return lambda parameters, _: parameters | {key: np.zeros_like(parameters[key])}


def norm_after_rotary(x: Array, at: At) -> Array:
    turned = rotated(
        at["projected_q"], at["inv_freq"], at["positions"], at["layout"], at["magnitude"]
    )
    return normed(at, "q", turned)


def cap_after_mask(_: Array, at: At) -> Array:
    added = np.where(at["all_visible"], at["products"] + at["all_added"], np.float32(-np.inf))
    return capped(added, at["softcap"])


def cap_after_bias(_: Array, at: At) -> Array:
    scores = capped(at["products"] + at["all_added"], at["softcap"])
    return np.where(at["all_visible"], scores, np.float32(-np.inf))


# -- where they apply

has_softcap = attrgetter("softcap")
has_sinks = attrgetter("sinks")


def norm_is(kind: str) -> Applies:
    return lambda spec: spec.qk_norm == kind


def adds_something(spec: AttentionSpec) -> bool:
    with_mask = spec.mask is not None and spec.mask.dtype == "float"
    return with_mask or spec.alibi or spec.relative_buckets > 0


NORM = (
    *(Fault(f"no_norm_of_{name}", "left out",
            {f"normed_{name}": lambda _, at, name=name: at[f"projected_{name}"]}, has_norm)
      for name in "qk"),
    *(Fault(f"norm_of_{name}_before_bias", "norm(W x) + b",
            {f"normed_{name}": norm_before_bias(name)}, both(has_norm, has_bias(name)))
      for name in "qk"),
    *(Fault(f"norm_of_all_{name}_heads", "over H and D",
            {f"normed_{name}": norm_of(name, axes=(1, 3))}, has_norm)
      for name in "qk"),
    *(Fault(f"norm_of_{name}_without_eps", "eps 0",
            {f"normed_{name}": norm_of(name, eps=0.0)}, has_norm)
      for name in "qk"),
    Fault("norm_of_q_over_positions", "over L and D",
          {"normed_q": norm_of("q", axes=(2, 3))}, has_norm),
    Fault("layer_for_rms", "the mean taken off",
          {"normed_q": norm_of("q", kind="layer")}, norm_is("rms")),
    Fault("rms_for_layer", "the mean left in",
          {"normed_q": norm_of("q", kind="rms")}, norm_is("layer")),
    # A rotated vector has the same square as before, and only its weights show the order.
    Fault("norm_after_rotary", "of queries",
          {"rotated_q": norm_after_rotary}, both(has_norm, has_rotary)),
    *(Fault(f"norm_of_{name}_without_weight", "weight 1",
            {"parameters": without_weight(name)}, has_norm)
      for name in "qk"),
    *(Fault(f"norm_of_{name}_without_bias", "bias 0",
            {"parameters": without_bias(name)}, norm_is("layer"))
      for name in "qk"),
)  # fmt: skip

SOFTCAP = (
    Fault("no_softcap", "left out", {"capped": lambda _, at: at["products"]}, has_softcap),
    Fault("softcap_after_mask", "hidden keys score -softcap",
          {"scores": cap_after_mask}, both(has_softcap, hides_something)),
    Fault("softcap_after_bias", "of score + bias",
          {"scores": cap_after_bias}, both(has_softcap, adds_something)),
    Fault("softcap_1_percent_more", "1.01 of it",
          {"softcap": c.value(lambda cap: cap * 1.01)}, has_softcap),
    Fault("softcap_1_percent_less", "0.99 of it",
          {"softcap": c.value(lambda cap: cap * 0.99)}, has_softcap),
    Fault("softcap_clips", "clip for tanh",
          {"capped": lambda _, at: np.clip(at["products"], -at["softcap"], at["softcap"])},
          has_softcap),
)  # fmt: skip

SINKS = (
    Fault("no_sink", "left out", {"sinks": c.value(lambda _: None)}, has_sinks),
    Fault("no_sink_of_one_head", "the last",
          {"sinks": c.rows(-1, lambda s: s - np.inf)}, has_sinks),
    Fault("sink_of_next_head", "one head late",
          {"sinks": c.value(lambda s: np.roll(s, -1, axis=0))}, has_sinks),
    Fault("sink_subtracted", "-sink", {"sinks": c.value(np.negative)}, has_sinks),
    Fault("sink_is_zero", "1 below the line", {"sinks": c.value(np.zeros_like)}, has_sinks),
    Fault("sink_scaled", "by the factor of the scores",
          {"sinks": lambda s, at: s * np.float32(at["scale"])}, has_sinks),
)  # fmt: skip

SCORES = (*NORM, *SOFTCAP, *SINKS)
