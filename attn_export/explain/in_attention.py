"""Known mistakes within an `Attention` node: scale, heads, causal mask, softcap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_export.explain.attention_steps import Change
from attn_export.explain.in_softmax import reweighed, softmax_changes
from attn_export.explain.mistake import Mistake, in_attention
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.explain.evaluate import Evaluation, Values

At = Mapping[str, Any]
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

OF_CAUSAL = frozenset({"causal dropped", "causal offset", "mask dropped beside causal"})
MANY_HEADS = 32
"""Of more, not every pair is tried."""


def attention_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the known mistakes of every `Attention` node."""
    for node in evaluation.nodes:
        if node.op_type == "Attention":
            causal = any(a.name == "is_causal" and a.i for a in node.attribute)
            for kind, says, changes in _known():
                if kind in (OF_CAUSAL if not causal else {"causal added"}):
                    continue  # there is none, or there is one already
                yield in_attention(evaluation, node, kind, says, **changes)
            if softcap_of(node):
                yield from _softcaps(evaluation, node)
            yield _keys_for_values(evaluation, node)


def swapped_heads(evaluation: Evaluation, node: onnx.NodeProto) -> Iterator[Mistake]:
    """Yield a mistake for each pair of query heads whose results are swapped.

    Args:
        evaluation: The graph, evaluated in float64.
        node: The node.
    """
    for a, b in itertools.combinations(range(MANY_HEADS), 2):
        says = f"the results of query heads {a} and {b} are swapped"
        yield in_attention(evaluation, node, "swapped heads", says, attended=_swap(a, b))


def scaled(evaluation: Evaluation, node: onnx.NodeProto, factor: float) -> Mistake:
    """Return the mistake of multiplying scores by `factor` times the right scale.

    Args:
        evaluation: The right graph.
        node: Its `Attention` node.
        factor: The factor on the scale.
    """
    says = f"the softmax scale is {factor:.4g} times what it should be"
    return in_attention(evaluation, node, "scale", says, scale=lambda scale, _: scale * factor)


def capped_at(evaluation: Evaluation, node: onnx.NodeProto, factor: float) -> Mistake:
    """Return the mistake of another softcap: `factor` times the right one.

    Args:
        evaluation: The right graph.
        node: Its `Attention` node.
        factor: The factor on the softcap.
    """

    def capped(_: Array, at: At) -> Array:
        softcap = softcap_of(node) * factor
        return np.asarray(softcap * np.tanh(at["products"] / softcap))

    says = f"the softcap is {factor:.4g} times what it should be"
    return in_attention(evaluation, node, "softcap", says, capped=capped)


def softcap_of(node: onnx.NodeProto) -> float:
    """Return the softcap of an `Attention` node; 0 if it has none."""
    return next((a.f for a in node.attribute if a.name == "softcap"), 0.0)


def _softcaps(evaluation: Evaluation, node: onnx.NodeProto) -> Iterator[Mistake]:
    softcap = softcap_of(node)

    def of_all(_: Array, at: At) -> Array:
        everything = np.where(at["visible"], at["products"] + at["added"], -np.inf)
        return np.asarray(softcap * np.tanh(everything / softcap))

    kind, says = "softcap", "there is no softcap"
    yield in_attention(evaluation, node, kind, says, capped=lambda _, at: at["products"])
    says = "the softcap is applied after the mask, so that hidden keys score -softcap"
    yield in_attention(evaluation, node, kind, says, scores=of_all, weights=reweighed)
    says = "scores are clipped at the softcap, without tanh"
    yield in_attention(
        evaluation, node, kind, says,
        capped=lambda _, at: np.clip(at["products"], -softcap, softcap),
    )  # fmt: skip


def _keys_for_values(evaluation: Evaluation, node: onnx.NodeProto) -> Mistake:
    def replaced(values: Values) -> dict[str, Array]:
        named = [*node.input, *[""] * 6]
        k, v, past_k, past_v = (values[named[i]] for i in (1, 2, 4, 5))
        if k is None or v is None or k.shape != v.shape:
            return {}
        crossed = {named[1]: v, named[2]: k, named[4]: past_v, named[5]: past_k}
        found = evaluation.attention(node, {**values, **crossed, "": None}, {})
        return {node.output[0]: found[node.output[0]]}

    return Mistake(
        "keys and values swapped", "keys are used as values, and values as keys",
        node.name, replaced,
    )  # fmt: skip


def _known() -> Iterator[tuple[str, str, dict[str, Change]]]:
    yield from _scales()
    yield from _heads()
    yield from _causal()
    yield from softmax_changes()


def _scales() -> Iterator[tuple[str, str, dict[str, Change]]]:
    for says, of in SCALES.items():
        yield "scale", f"the softmax scale {says}", {"scale": _scale(of)}


def _heads() -> Iterator[tuple[str, str, dict[str, Change]]]:
    yield (
        "tiled heads",
        "query head h uses K/V head h % Hkv in place of h // (H / Hkv)",
        {"kv_head": lambda heads, at: np.arange(len(heads)) % at["keys"].shape[1]},
    )
    yield (
        "one K/V head for all",
        "every query head uses K/V head 0",
        {"kv_head": lambda heads, _: np.zeros_like(heads)},
    )
    yield (
        "heads not moved",
        "[B, H, L, Dv] is read as [B, L, H·Dv] without a transpose",
        {"attended": _not_moved},
    )
    yield (
        "heads interleaved",
        "heads are merged as [Dv, H] in place of [H, Dv]",
        {"attended": _interleaved},
    )
    yield (
        "past ignored",
        "past keys and values are not attended to",
        {"given": lambda given, at: given & (_keys(at) >= _past_of(at))},
    )
    yield (
        "past after new keys",
        "new keys and values come before those of the past",
        {"keys": _new_first, "values": _new_first},
    )


def _causal() -> Iterator[tuple[str, str, dict[str, Change]]]:
    def moved(by: int) -> Change:
        return lambda _, at: _below(at, at["offset"] + by)

    kind = "causal offset"
    yield "causal dropped", "the causal mask is not applied", {"causal": _all}
    yield kind, "query i sees one key too many: up to P + i + 1", {"causal": moved(1)}
    yield kind, "query i sees one key too few: up to P + i - 1", {"causal": moved(-1)}
    yield (
        kind,
        "query i sees keys up to i, as if there were no past",
        {"causal": lambda _, at: _below(at, 0)},
    )
    yield (
        kind,
        "query i sees keys up to S - L + i, the last query all of them",
        {"causal": lambda _, at: _below(at, _excess(at))},
    )
    yield (
        "causal added",
        "a causal mask is applied where there is none",
        {"causal": lambda causal, at: causal & _below(at, at["offset"])},
    )
    yield (
        "mask dropped beside causal",
        "the causal mask takes the place of the given one",
        {"given": _all, "added": lambda added, _: np.zeros_like(added)},
    )
    yield (
        "key always visible",
        "key 0 is always visible, whatever the masks hide",
        {"visible": lambda visible, at: visible | (_keys(at) == 0)},
    )
    yield (
        "key always visible",
        "each query sees its own key, whatever the masks hide",
        {"visible": lambda visible, at: visible | (_keys(at) == _queries(at) + at["offset"])},
    )
    yield (
        "last key dropped",
        "the last key is not attended to",
        {"given": lambda given, at: given & (_keys(at) < at["keys"].shape[2] - 1)},
    )
    yield (
        "first key dropped",
        "key 0 is not attended to",
        {"given": lambda g, at: g & (_keys(at) > 0)},
    )


# -- changes


def _scale(of: Callable[[float, float], float]) -> Change:
    return lambda scale, at: of(scale, at["queries"].shape[-1])


def _all(seen: Array, _: At) -> Array:
    return np.ones_like(seen)


def _below(at: At, offset: Any) -> Array:
    return np.asarray(_keys(at) <= _queries(at) + offset)


def _excess(at: At) -> int:
    L, S = at["products"].shape[-2:]
    return int(S - L)


def _keys(at: At) -> Array:
    return np.arange(at["keys"].shape[2])


def _queries(at: At) -> Array:
    return np.arange(at["queries"].shape[2])[:, None]


def _new_first(cached: Array, at: At) -> Array:
    return np.roll(cached, -_past_of(at), axis=2)


def _past_of(at: At) -> int:
    past = at["past"][0]
    return 0 if past is None else int(past.shape[2])


def _swap(a: int, b: int) -> Change:
    def change(attended: Array, _: At) -> Array:
        order = np.arange(attended.shape[1])
        order[[a, b]] = b, a
        return attended[:, order]

    return change


def _not_moved(attended: Array, _: At) -> Array:
    B, H, L, D = attended.shape
    return np.swapaxes(attended.reshape(B, L, H, D), 1, 2)


def _interleaved(attended: Array, _: At) -> Array:
    B, H, L, D = attended.shape
    merged = np.moveaxis(attended, 1, -1).reshape(B, L, D, H).reshape(B, L, H * D)
    return np.swapaxes(merged.reshape(B, L, H, D), 1, 2)
