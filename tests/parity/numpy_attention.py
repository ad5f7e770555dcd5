"""Attention once more, in plain numpy float32, from the definitions: a second implementation
that is right, and into which faults can be planted.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length (past
included), P past length, D head width, Dv value head width.

Every intermediate value has a name and passes through `Steps.set`, where a fault can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attn_export.spec import AttentionSpec

LOWEST_SCORE = -1e30
"""Finite values of a float mask mean the same everywhere only above this."""

OUTPUTS = ("output", "present_key", "present_value", "attn_weights")
PROJECTIONS = ("k_proj", "v_proj")

Change = Callable[[Any, Mapping[str, Any]], Any]
Faults = Mapping[str, Change]


class Steps(dict[str, Any]):
    """The values computed so far, by name; a fault replaces the one that it is planted at."""

    def __init__(self, faults: Faults, **known: Any) -> None:
        super().__init__(known)
        self._faults = faults
        self.planted: set[str] = set()

    def set(self, name: str, value: Any) -> Any:
        if name in self._faults:
            value = self._faults[name](value, self)
            self.planted.add(name)
        self[name] = value
        return value


def run(
    spec: AttentionSpec,
    parameters: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    faults: Faults | None = None,
) -> dict[str, np.ndarray]:
    """Attend as `spec` says, with faults planted at the steps that they are named after.

    Args:
        parameters: The module's `state_dict` as arrays.
        inputs: A case's inputs.
        faults: What to do wrong, by step.
    """
    at = Steps(faults or {}, spec=spec, inputs=inputs)
    w = at.set("parameters", dict(parameters))
    with np.errstate(all="ignore"):  # -inf - -inf in rows that are masked, and faults' overflows
        q = at.set("q", _project(w, "q_proj", inputs["query"], spec.num_heads))  # [B, H, L, D]
        present = _keys_and_values(at, w, spec, inputs)  # [B, Hkv, S, D], [B, Hkv, S, Dv]
        k, v = at.set("k", present[0]), at.set("v", present[1])
        head = at.set("kv_head", np.arange(spec.num_heads) // spec.q_per_kv)  # [H]
        scale = np.float32(at.set("scale", spec.softmax_scale))
        scores = (q @ k[:, head].swapaxes(-1, -2)) * scale  # [B, H, L, S]
        visible, added = _mask(at, spec, inputs, scores.shape)
        scores = np.where(visible, scores + added, at.set("hidden_score", np.float32(-np.inf)))
        at.set("nothing", ~visible.any(axis=-1, keepdims=True))
        soft = at.set("softmax", softmax(at.set("scores", scores)))
        soft = at.set("attn_weights", np.where(at["nothing"], np.float32(0), soft))
        attended = at.set("attended", soft @ v[:, head])  # [B, H, L, Dv]
        merged = at.set("merged", np.concatenate(list(attended.swapaxes(0, 1)), axis=-1))
        out = at.set("output", linear(w, "out_proj", merged))
    made = dict(zip(OUTPUTS, (out, *present, soft), strict=True))
    outputs: dict[str, np.ndarray] = at.set("outputs", {n: made[n] for n in spec.output_shapes()})
    assert at.planted == set(faults or {}), "a fault was planted at a step that is not taken"
    return outputs


def linear(w: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """A linear layer, with its bias where it has one."""
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Softmax in the type of its argument; NaN where every score is -inf."""
    raised = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return raised / raised.sum(axis=axis, keepdims=True)


def _project(w: Mapping[str, np.ndarray], name: str, x: np.ndarray, heads: int) -> np.ndarray:
    y = linear(w, name, x)  # [B, len, heads * width]
    return np.stack(np.split(y, heads, axis=-1), axis=1)  # [B, heads, len, width]


def _keys_and_values(
    at: Steps, w: Mapping[str, np.ndarray], spec: AttentionSpec, inputs: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    sources = [inputs["key"], inputs["value"]] if spec.cross else [inputs["query"]] * 2
    parts = [
        tuple(_project(w, n, x, spec.num_kv_heads) for n, x in zip(PROJECTIONS, sources, strict=1))
    ]
    if spec.has_cache:
        parts.insert(0, (inputs["past_key"], inputs["past_value"]))
    parts = at.set("parts", parts)
    at["P"] = inputs["past_key"].shape[2] if spec.has_cache else 0
    k, v = at.set("kv", [np.concatenate(both, axis=2) for both in zip(*parts, strict=True)])
    return k, v


def _mask(
    at: Steps,
    spec: AttentionSpec,
    inputs: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """Which keys a query sees, and what is added to their scores: `[B, H, L, S]` both."""
    mask = np.broadcast_to(inputs.get("attn_mask", np.True_), shape)
    mask = at.set("mask", mask)
    visible = mask if mask.dtype == np.bool_ else mask != -np.inf
    added = np.zeros(shape, np.float32)
    if mask.dtype != np.bool_:
        added = np.where(visible, np.maximum(mask, np.float32(LOWEST_SCORE)), np.float32(0))
    added = at.set("added", added)
    ones = np.ones(shape[-2:], np.bool_)
    if spec.causal:
        visible = visible & at.set("causal", np.tril(ones, at["P"]))
    return at.set("visible", visible), added
