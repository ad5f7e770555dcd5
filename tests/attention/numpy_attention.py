"""Reference for attention in plain numpy, written from the definitions.

It computes in the type of the query. Tests plant faults into it.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length (past
included), n added keys, P past length, D head width, Dv value head width.

Every intermediate value has a name and passes through `Steps.set`, where a fault can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy_added_keys as added_keys
import numpy_in_place as in_place
import numpy_packing as packing
import numpy_positions as positions

from attn_export.spec import AttentionSpec

LOWEST_SCORE = -1e30
"""Finite values of a float mask mean the same everywhere only above this."""

OUTPUTS = ("output", "present_key", "present_value", "attn_weights")

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
    """Attend as `spec` says, with faults planted at the steps that they are named after."""
    at = Steps(faults or {}, spec=spec, inputs=inputs, type=inputs["query"].dtype)
    w = at.set("parameters", _apart(at, parameters))
    with np.errstate(all="ignore"):  # -inf - -inf in rows that are masked, and faults' overflows
        at["P"] = _past(at)
        sources = [inputs["key"], inputs["value"]] if spec.cross else [inputs["query"]] * 2
        _set_turning(at)
        q = at.set("q", _heads(at, w, "q", inputs["query"], spec.num_heads))  # [B, H, L, D]
        new_k = _heads(at, w, "k", sources[0], spec.num_kv_heads)  # [B, Hkv, S - P, D]
        new_v = _project(w, "v_proj", sources[1], spec.num_kv_heads)
        present = _with_past(at, new_k, new_v)  # [B, Hkv, S, D], [B, Hkv, S, Dv]
        at.set("k", present[0]), at.set("v", present[1])
        at.set("added_pairs", added_keys.added_pairs(at))
        k, v = added_keys.with_added(at)  # [B, Hkv, S + n, D], [B, Hkv, S + n, Dv]
        head = at.set("kv_head", np.arange(spec.num_heads) // spec.q_per_kv)  # [H]
        scale = float(at.set("scale", spec.softmax_scale))
        scores = at.set("products", (q @ k[:, head].swapaxes(-1, -2)) * scale)  # + n
        if spec.softcap is not None:
            scores = at.set("capped", capped(scores, at.set("softcap", spec.softcap)))
        visible, added = _of_all_keys(at, w, scores.shape)
        scores = np.where(visible, scores + added, at.set("hidden_score", -np.inf))
        at.set("nothing", ~visible.any(axis=-1, keepdims=True))
        at.set("scores", scores)
        at.set("sinks", w["sinks"][:, None, None] if spec.sinks else None)  # [H, 1, 1]
        soft = at.set("softmax", softmax(at["scores"], sinks=at["sinks"]))
        soft = at.set("attn_weights", np.where(at["nothing"], 0.0, soft))
        attended = at.set("attended", soft @ v[:, head])  # [B, H, L, Dv]
        merged = at.set("merged", np.concatenate(list(attended.swapaxes(0, 1)), axis=-1))
        out = at.set("output", linear(w, "out_proj", merged))
    made = dict(zip(OUTPUTS, (out, *present, soft), strict=True))
    outputs: dict[str, np.ndarray] = at.set("outputs", {n: made[n] for n in spec.output_shapes()})
    assert at.planted == set(faults or {}), "a fault was planted at a step that is not taken"
    return outputs


def linear(w: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """Apply a linear layer, with its bias if it has one."""
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def softmax(scores: np.ndarray, axis: int = -1, sinks: np.ndarray | None = None) -> np.ndarray:
    """Compute softmax in the type of its argument; NaN if every score is -inf.

    Args:
        scores: `[B, H, L, S]`.
        axis: What sums to 1.
        sinks: `[H, 1, 1]`: one more score each, below the line only.
    """
    largest = scores.max(axis=axis, keepdims=True)
    if sinks is None:
        raised = np.exp(scores - largest)
        return raised / raised.sum(axis=axis, keepdims=True)
    largest = np.maximum(largest, sinks)
    raised = np.exp(scores - largest)
    return raised / (raised.sum(axis=axis, keepdims=True) + np.exp(sinks - largest))


def capped(scores: np.ndarray, softcap: float) -> np.ndarray:
    """Return scores between -softcap and softcap."""
    return softcap * np.tanh(scores / softcap)


def normed(
    at: Steps, of: str, x: np.ndarray, *, eps: float | None = None, kind: str = "",
    axes: tuple[int, ...] = (-1,),
) -> np.ndarray:  # fmt: skip
    """Normalise every head and position of queries or keys `[B, H, L, D]` over D."""
    spec, w = at["spec"], at["parameters"]
    if (kind or spec.qk_norm) == "layer":
        x = x - x.mean(axis=axes, keepdims=True)
    square = np.square(x).mean(axis=axes, keepdims=True)
    x = x / np.sqrt(square + (spec.norm_eps if eps is None else eps))
    x = x * w[f"{of}_norm.weight"]
    return x + w[f"{of}_norm.bias"] if f"{of}_norm.bias" in w else x


def _project(w: Mapping[str, np.ndarray], name: str, x: np.ndarray, heads: int) -> np.ndarray:
    y = linear(w, name, x)  # [B, len, heads * width]
    return np.stack(np.split(y, heads, axis=-1), axis=1)  # [B, heads, len, width]


def _apart(at: Steps, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters, those of a packed projection under three names."""
    if not at["spec"].packed_qkv:
        return dict(parameters)
    rows = packing.rows_in_order(at["spec"], "qkv")
    of_kind = {kind: at.set(f"rows_of_{kind}", rows) for kind in ("weight", "bias")}
    return packing.apart(parameters, of_kind)


def _set_turning(at: Steps) -> None:
    """Set the positions of the queries, and the rotation of one position."""
    spec = at["spec"]
    if not spec.has_rotary:
        return
    counted = np.arange(at["inputs"]["query"].shape[1])  # [L]
    counted = counted + (at["P"][:, 0, 0] if spec.in_place else at["P"])  # [L] or [B, L]
    position = at.set("positions", at["inputs"].get("position_ids", counted))  # [L] or [B, L]
    length = at.set("length", int(position.max()) + 1)
    at.set("inv_freq", positions.frequencies(spec, length).astype(at["type"]))
    at.set("layout", spec.rotary)
    at.set("magnitude", positions.magnitude(spec))


def _heads(
    at: Steps, w: Mapping[str, np.ndarray], of: str, x: np.ndarray, heads: int
) -> np.ndarray:
    """Project, normalise and rotate queries or keys."""
    spec = at["spec"]
    x = at.set(f"projected_{of}", _project(w, f"{of}_proj", x, heads))
    if spec.qk_norm != "none":
        x = at.set(f"normed_{of}", normed(at, of, x))
    if spec.has_rotary:
        position = at.set(f"positions_{of}", at["positions"])
        turning = (at["inv_freq"], position, at["layout"], at["magnitude"])
        x = at.set(f"rotated_{of}", positions.rotated(x, *turning))
    return x


def _past(at: Steps) -> Any:
    """Return P: a number, or `[B, 1, 1, 1]` if rows differ."""
    if at["spec"].in_place:
        return in_place.past_of_rows(at)
    return at["inputs"]["past_key"].shape[2] if at["spec"].has_cache else 0


def _with_past(at: Steps, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if at["spec"].in_place:
        k, v = at.set("kv", in_place.written(at, k, v))
        return k, v
    parts = [(k, v)]
    if at["spec"].has_cache:
        parts.insert(0, (at["inputs"]["past_key"], at["inputs"]["past_value"]))
    parts = at.set("parts", parts)
    k, v = at.set("kv", [np.concatenate(both, axis=2) for both in zip(*parts, strict=True)])
    return k, v


def _of_all_keys(
    at: Steps, w: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the visible keys and the bias of their scores: `[B, H, L, S + n]` both."""
    n = len(at["added_pairs"])
    at["shape"] = (*shape[:-1], shape[-1] - n)  # [B, H, L, S]
    visible, added = _mask(at, at["spec"], at["inputs"], at["shape"])
    added = added + _of_positions(at, w, at["shape"])
    columns = np.zeros((*shape[:-1], n))
    sees = at.set("sees_added_keys", columns == 0)
    bias = at.set("bias_of_added_keys", columns)
    visible = at.set("all_visible", added_keys.widened(visible, sees))
    return visible, at.set("all_added", added_keys.widened(added, bias))


def _of_positions(
    at: Steps, w: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> np.ndarray | float:
    """Return the bias of positions on the scores."""
    spec, added = at["spec"], 0.0
    offset = at.set("offset", positions.offsets(at["P"], shape))
    if spec.alibi_falcon:
        added = positions.falcon(spec, shape[-1]).astype(at["type"])
    elif spec.alibi:
        slopes = at.set("slopes", positions.slopes(spec.num_heads).astype(at["type"]))
        added = added - slopes * at.set("distance", np.abs(offset)).astype(at["type"])
    if spec.relative_buckets:
        bucket = positions.buckets(offset, spec, both_sides=not spec.causal)
        learned = w["score_bias.relative_attention_bias.weight"].T  # [H, buckets]
        of_heads = learned[:, at.set("bucket", bucket)]  # [H, L, S] or [H, B, 1, L, S]
        added = added + (of_heads[:, :, 0].swapaxes(0, 1) if spec.in_place else of_heads)
    return added


def _mask(
    at: Steps,
    spec: AttentionSpec,
    inputs: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the visible keys and the bias of their scores: `[B, H, L, S]` both."""
    mask = np.broadcast_to(inputs.get("attn_mask", np.True_), shape)
    mask = at.set("mask", mask)
    visible = mask if mask.dtype == np.bool_ else mask != -np.inf
    added = np.zeros(shape, at["type"])
    if mask.dtype != np.bool_:
        added = np.where(visible, np.maximum(mask, at["type"].type(LOWEST_SCORE)), 0.0)
    added = at.set("added", added)
    if spec.in_place:
        visible = visible & in_place.counted(at, shape)
    if spec.causal:
        visible = visible & at.set("causal", positions.offsets(at["P"], shape) <= 0)
    offset = at.set("window_offset", positions.offsets(at["P"], shape))
    if spec.window_left is not None:
        visible = visible & (offset >= -at.set("window_left", spec.window_left))
    if spec.window_right is not None:
        visible = visible & (offset <= at.set("window_right", spec.window_right))
    return at.set("visible", visible), added
