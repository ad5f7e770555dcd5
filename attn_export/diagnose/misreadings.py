"""The known misreadings of attention: other ways to compute its steps.

`probe` finds the entry by which a runtime computes; `explain` applies each entry to a right graph
and compares the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np

from attn_export.diagnose.attention_steps import Change, softmax
from attn_export.tensorfile import Array

StepValues = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Misreading:
    """One way to compute attention other than its specification.

    Attributes:
        kind: Its kind, in a word or two: ``"scale"``.
        says: Its effect, as the rest of a sentence: ``"scores are multiplied by …"``.
        changes: The steps that it changes, by name.
        reading: Its name in the results of `probe`; "" where no probe tests for it.
    """

    kind: str
    says: str
    changes: Mapping[str, Change]
    reading: str = ""


SCALES: Mapping[str, Callable[[float, float], float]] = {
    "is 1/sqrt(head_dim)": lambda _, width: width**-0.5,
    "is 1/sqrt(head_dim + 1)": lambda _, width: (width + 1) ** -0.5,
    "is 1/sqrt(head_dim - 1)": lambda _, width: max(width - 1, 0.5) ** -0.5,
    "is missing: it is 1": lambda *_: 1.0,
    "is applied twice": lambda scale, _: scale * scale,
    "is its square root: applied to queries or keys alone": lambda scale, _: scale**0.5,
    "is sqrt(head_dim): divided by instead of multiplied": lambda _, width: width**0.5,
    "is 1/head_dim": lambda _, width: 1 / width,
}
"""Wrong scales, computed from the right scale and the head width."""


def _scales() -> Iterator[Misreading]:
    for says, of in SCALES.items():
        yield Misreading("scale", f"the softmax scale {says}", {"scale": _scale(of)})


def _heads() -> Iterator[Misreading]:
    yield Misreading(
        "tiled heads", "query head h uses K/V head h % Hkv in place of h // (H / Hkv)",
        {"kv_head": lambda heads, at: np.arange(len(heads)) % at["keys"].shape[1]}, "tiles",
    )  # fmt: skip
    yield Misreading(
        "one K/V head for all", "every query head uses K/V head 0",
        {"kv_head": lambda heads, _: np.zeros_like(heads)}, "the first",
    )  # fmt: skip
    yield Misreading(
        "heads not moved", "[B, H, L, Dv] is read as [B, L, H·Dv] without a transpose",
        {"attended": _not_moved},
    )  # fmt: skip
    yield Misreading(
        "heads interleaved", "heads are merged as [Dv, H] in place of [H, Dv]",
        {"attended": _interleaved},
    )  # fmt: skip
    yield Misreading(
        "past ignored", "past keys and values are not attended to",
        {"mask_visible": lambda given, at: given & (_keys(at) >= _past_of(at))},
    )  # fmt: skip
    yield Misreading(
        "past after new keys", "new keys and values come before those of the past",
        {"keys": _new_first, "values": _new_first},
    )  # fmt: skip


def _causal() -> Iterator[Misreading]:
    def moved(by: int) -> Change:
        return lambda _, at: _below(at, at["offset"] + by)

    kind = "causal offset"
    yield Misreading(
        "causal dropped", "the causal mask is not applied",
        {"causal": _all}, "all keys",
    )  # fmt: skip
    yield Misreading(kind, "query i sees one key too many: up to P + i + 1", {"causal": moved(1)})
    yield Misreading(kind, "query i sees one key too few: up to P + i - 1", {"causal": moved(-1)})
    yield Misreading(
        kind, "query i sees keys up to i, as if there were no past",
        {"causal": lambda _, at: _below(at, 0)}, "keys to i",
    )  # fmt: skip
    yield Misreading(
        kind, "query i sees keys up to S - L + i, the last query all of them",
        {"causal": lambda _, at: _below(at, len(_keys(at)) - len(_queries(at)))}, "keys to S-L+i",
    )  # fmt: skip
    yield Misreading(
        "causal added", "a causal mask is applied where there is none",
        {"causal": lambda causal, at: causal & _below(at, at["offset"])},
    )  # fmt: skip
    yield Misreading(
        "mask dropped beside causal", "the causal mask takes the place of the given one",
        {"mask_visible": _all, "mask_bias": lambda added, _: np.zeros_like(added)},
    )  # fmt: skip
    yield Misreading(
        "key always visible", "key 0 is always visible, whatever the masks hide",
        {"visible": lambda visible, at: visible | (_keys(at) == 0)},
    )  # fmt: skip
    yield Misreading(
        "key always visible", "each query sees its own key, whatever the masks hide",
        {"visible": lambda visible, at: visible | (_keys(at) == _queries(at) + at["offset"])},
    )  # fmt: skip
    yield Misreading(
        "last key dropped", "the last key is not attended to",
        {"mask_visible": lambda given, at: given & (_keys(at) < at["keys"].shape[2] - 1)},
    )  # fmt: skip
    yield Misreading(
        "first key dropped", "key 0 is not attended to",
        {"mask_visible": lambda g, at: g & (_keys(at) > 0)},
    )  # fmt: skip


def _rows() -> Iterator[Misreading]:
    kind = "fully masked rows"
    yield Misreading(
        kind, "a fully masked row is the mean of all values",
        {"weights": _masked(lambda w: np.full_like(w, 1 / max(w.shape[-1], 1)))}, "mean of values",
    )  # fmt: skip
    yield Misreading(
        kind, "a fully masked row is NaN",
        {"weights": _masked(lambda w: np.full_like(w, np.nan))}, "NaN",
    )  # fmt: skip
    yield Misreading(
        kind, "a fully masked row is the first value",
        {"weights": _masked(_first)}, "first value",
    )  # fmt: skip
    yield Misreading(
        kind, "hidden keys score the lowest number, so that a fully masked row attends to them",
        {"scores": lambda s, at: np.where(at["visible"], s, -1e30), "weights": _reweighed},
    )  # fmt: skip
    yield Misreading(
        "weak mask", "hidden keys score -10 in place of -inf",
        {"hidden": lambda *_: -10.0, "weights": _reweighed},
    )  # fmt: skip
    yield Misreading(
        "weak mask", "hidden keys score -1e4 in place of -inf",
        {"hidden": lambda *_: -1e4, "weights": _reweighed},
    )  # fmt: skip
    yield Misreading(
        "mask scaled",
        "what is added to the scores, masks among it, is multiplied by the softmax scale too",
        {"mask_bias": lambda added, at: added * at["scale"]},
    )  # fmt: skip
    yield Misreading(
        "mask values dropped", "of a float mask only -inf counts, its other values are dropped",
        {"mask_bias": lambda added, _: np.zeros_like(added)},
    )  # fmt: skip


def _softmaxes() -> Iterator[Misreading]:
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        yield Misreading(
            "softmax in low precision", f"the softmax is computed in {name}",
            {"scores": _through(dtype), "weights": _through(dtype)},
        )  # fmt: skip
        yield Misreading(
            "softmax in low precision", f"each step of the softmax is rounded to {name}",
            {"weights": _stepwise(dtype)},
        )  # fmt: skip
    yield Misreading(
        "softmax over queries", "the softmax is taken over the queries, not over the keys",
        {"weights": _over_queries},
    )  # fmt: skip
    yield Misreading(
        "softmax plus one", "1 is added to the sum of the softmax",
        {"weights": _plus_one},
    )  # fmt: skip


def _softcaps() -> Iterator[Misreading]:
    kind = "softcap"
    yield Misreading(
        kind, "there is no softcap",
        {"capped": lambda _, at: at["products"]},
    )  # fmt: skip
    yield Misreading(
        kind, "the softcap is applied after the mask, so that hidden keys score -softcap",
        {"scores": _capped_with_mask, "weights": _reweighed}, "after the mask",
    )  # fmt: skip
    yield Misreading(
        kind, "scores are clipped at the softcap, without tanh",
        {"capped": lambda _, at: np.clip(at["products"], -at["softcap"], at["softcap"])},
    )  # fmt: skip


# -- changes


def _scale(of: Callable[[float, float], float]) -> Change:
    return lambda scale, at: of(scale, at["queries"].shape[-1])


def _all(seen: Array, _: StepValues) -> Array:
    return np.ones_like(seen)


def _below(at: StepValues, offset: Any) -> Array:
    return np.asarray(_keys(at) <= _queries(at) + offset)


def _keys(at: StepValues) -> Array:
    return np.arange(at["keys"].shape[2])


def _queries(at: StepValues) -> Array:
    return np.arange(at["queries"].shape[2])[:, None]


def _new_first(cached: Array, at: StepValues) -> Array:
    return np.roll(cached, -_past_of(at), axis=2)


def _past_of(at: StepValues) -> int:
    past = at["past"][0]
    return 0 if past is None else int(past.shape[2])


def _not_moved(attended: Array, _: StepValues) -> Array:
    B, H, L, D = attended.shape
    return np.swapaxes(attended.reshape(B, L, H, D), 1, 2)


def _interleaved(attended: Array, _: StepValues) -> Array:
    B, H, L, D = attended.shape
    merged = np.moveaxis(attended, 1, -1).reshape(B, L, D, H).reshape(B, L, H * D)
    return np.swapaxes(merged.reshape(B, L, H, D), 1, 2)


def _nothing(at: StepValues, weights: Array) -> Array:
    seen = np.broadcast_to(at["visible"], weights.shape)
    return np.asarray(~seen.any(axis=-1, keepdims=True))


def _masked(of: Any) -> Change:
    return lambda weights, at: np.where(_nothing(at, weights), of(weights), weights)


def _first(weights: Array) -> Array:
    first = np.zeros_like(weights)
    first[..., :1] = 1
    return first


def _capped_with_mask(_: Array, at: StepValues) -> Array:
    everything = np.where(at["visible"], at["products"] + at["mask_bias"], -np.inf)
    return np.asarray(at["softcap"] * np.tanh(everything / at["softcap"]))


def _reweighed(_: Array, at: StepValues) -> Array:
    """Return the softmax of the changed scores, ignoring visibility."""
    return softmax(at["scores"], np.ones((1, 1), bool))


def _through(dtype: Any) -> Change:
    return lambda array, _: array.astype(np.float32).astype(dtype).astype(np.float64)


def _stepwise(dtype: Any) -> Change:
    def change(weights: Array, at: StepValues) -> Array:
        scores = at["scores"].astype(np.float32).astype(dtype)
        if not scores.size:
            return weights
        raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
        rounded = (raised / raised.sum(axis=-1, keepdims=True, dtype=dtype)).astype(np.float64)
        return np.where(_nothing(at, weights), weights, rounded)

    return change


def _over_queries(_: Array, at: StepValues) -> Array:
    scores: Array = at["scores"]
    largest = scores.max(axis=-2, keepdims=True, initial=-np.inf)
    raised: Array = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    return np.asarray(np.nan_to_num(raised / raised.sum(axis=-2, keepdims=True)))


def _plus_one(_: Array, at: StepValues) -> Array:
    raised = np.exp(at["scores"])
    return np.asarray(raised / (1 + raised.sum(axis=-1, keepdims=True)))


MISREADINGS: Final = (*_scales(), *_heads(), *_causal(), *_rows(), *_softmaxes(), *_softcaps())
READINGS: Final = {each.reading: each.changes for each in MISREADINGS if each.reading}
"""The changed steps of the readings that probes tell apart."""
