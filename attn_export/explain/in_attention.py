"""Known mistakes within an `Attention` node."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx

from attn_export.explain.mistake import Mistake, array_of
from attn_export.float64.attention_steps import StepChange
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.float64.misreadings import MISREADINGS, Misreading, StepValues
from attn_export.tensorfile import Array

NEEDS_CAUSAL = frozenset({"causal dropped", "causal offset", "mask dropped beside causal"})
"""Kinds of misreadings that are possible in causal nodes only."""

MOST_HEADS = 32
"""The number of query heads, from the first on, of which every pair is tried."""

SINGLE_HEADS = 8
"""The number of query heads, from the first on, in each of which alone misreadings are tried."""


def attention_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the known mistakes of every `Attention` node."""
    for node in _attention_nodes(evaluation):
        for misreading in _possible_misreadings(node):
            kind, effect = misreading.kind, misreading.effect
            yield _step_mistake(evaluation, node, kind, effect, misreading.changes)
        yield _swap_keys_and_values(evaluation, node)


def _possible_misreadings(node: onnx.NodeProto) -> Iterator[Misreading]:
    causal = any(a.name == "is_causal" and a.i for a in node.attribute)
    impossible = {"causal added"} if causal else NEEDS_CAUSAL
    if not _has_softcap(node):
        impossible |= {"softcap"}
    return (misreading for misreading in MISREADINGS if misreading.kind not in impossible)


def head_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of single query heads: each misreading in one, and swaps of two.

    A head beyond those of the node raises IndexError, and `match` skips the mistake.
    """
    for node in _attention_nodes(evaluation):
        for a, b in itertools.combinations(range(MOST_HEADS), 2):
            effect = f"the results of query heads {a} and {b} are swapped"
            changes = {"attended": _swap_heads(a, b)}
            yield _step_mistake(evaluation, node, "swapped heads", effect, changes)
        for head, misreading in itertools.product(range(SINGLE_HEADS), _possible_misreadings(node)):
            effect = f"in query head {head} alone, {misreading.effect}"
            changes = {s: _in_head(head, change) for s, change in misreading.changes.items()}
            yield _step_mistake(evaluation, node, misreading.kind, effect, changes)


def fitted_scales_and_softcaps(evaluation: Evaluation) -> list[Callable[[float], Mistake]]:
    """Return functions from a factor to the mistake of a scale or softcap wrong by this factor."""

    def make(node: onnx.NodeProto, step: str, name: str, factor: float) -> Mistake:
        effect = f"{name} is {factor:.4g} times what it should be"
        return _step_mistake(evaluation, node, step, effect, {step: lambda x, _: x * factor})

    makers: list[Callable[[float], Mistake]] = []
    for node in _attention_nodes(evaluation):
        makers.append(functools.partial(make, node, "scale", "the softmax scale"))
        if len(node.input) > 3 and node.input[3]:
            makers.append(functools.partial(make, node, "mask_bias", "the mask"))
        if _has_softcap(node):
            makers.append(functools.partial(make, node, "softcap", "the softcap"))
    return makers


def _step_mistake(
    evaluation: Evaluation, node: onnx.NodeProto, kind: str, effect: str,
    changes: Mapping[str, StepChange],
) -> Mistake:  # fmt: skip
    """Return the mistake of changing steps of an `Attention` node."""
    return Mistake(
        kind, effect, node.name, lambda values: evaluation.attention(node, values, changes)
    )


def _attention_nodes(evaluation: Evaluation) -> list[onnx.NodeProto]:
    return [node for node in evaluation.nodes if node.op_type == "Attention"]


def _has_softcap(node: onnx.NodeProto) -> bool:
    return any(a.name == "softcap" and a.f for a in node.attribute)


def _swap_keys_and_values(evaluation: Evaluation, node: onnx.NodeProto) -> Mistake:
    names = [*node.input, *[""] * 6]
    k, v, past_k, past_v = (names[i] for i in (1, 2, 4, 5))

    def replaced(values: Values) -> dict[str, Array]:
        if array_of(values, k).shape != array_of(values, v).shape:
            return {}
        swapped = {k: values[v], v: values[k], past_k: values[past_v], past_v: values[past_k]}
        # An input that is left out has the name "". The outputs with the cache stay right.
        outputs = evaluation.attention(node, {**values, **swapped, "": None}, {})
        return {node.output[0]: outputs[node.output[0]]}

    return Mistake(
        "keys and values swapped", "keys are used as values, and values as keys",
        node.name, replaced,
    )  # fmt: skip


def _in_head(head: int, change: StepChange) -> StepChange:
    """Return a change that is made in one query head: of a step with an axis of heads, or of none.

    Keys and values have heads of their own, in which it cannot be made.
    """

    def changed(value: Any, steps: StepValues) -> Array:
        H = steps["queries"].shape[1]
        if head >= H:
            raise IndexError(head)
        wrong, right = (np.asarray(x) for x in (change(value, steps), value))
        heads = np.arange(H) == head
        if right.ndim != 1 and (right.ndim < 4 or right.shape[1] in (1, H)):
            heads = heads.reshape(H, 1, 1)
        return np.where(heads, wrong, right)

    return changed


def _swap_heads(a: int, b: int) -> StepChange:
    def change(attended: Array, _: StepValues) -> Array:
        order = np.arange(attended.shape[1])
        order[[a, b]] = b, a
        return attended[:, order]

    return change
