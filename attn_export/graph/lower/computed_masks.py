"""Masks that a graph computes itself, from sizes alone: node attributes can replace them.

A mask is not recognised by its pattern, of which there are as many as authors, but by its values:
the nodes that make it are run at several sizes, and next to every number that occurs in them, so
that a window, or a rule that begins at some length, is seen. Masks that cannot be run stay.

- All visible: the mask goes.
- Causal (key j for query i if j <= P + i): `is_causal` replaces the mask.
- Causal and something that is computed from data, such as padding: `is_causal` says the first part,
  and the second stays as the mask (`mask_parts`).

Hidden is what is False or -inf. Of float32 also what is at most `HIDING`, where nothing else hides
keys: each row sees its own key then, beside which the weight of another is exactly 0 as long as no
score reaches 4e8. Were a row hidden by others, its weights would be spread over such keys, and
-1e4 is within the reach of scores: those masks stay.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.graph.ir_helpers import nodes_of, optional_input
from attn_export.graph.lower.mask_parts import without_causal_part
from attn_export.graph.lower.mask_trials import Trials
from attn_export.graph.lower.mask_values import MaskMaker, over_scores
from attn_export.graph.lower.read import MASKED, AttentionNode, read_attention

HIDING = -1e9
"""The largest finite float32 that hides a key from a row which sees another."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Replacement of a mask.

    Attributes:
        mask: None for nothing.
        causal: Whether the node must be causal.
    """

    mask: ir.Value | None
    causal: bool


def recognise_masks(model: ir.Model) -> None:
    """Remove from every `Attention` the part of its mask that its attributes express."""
    known: dict[object, Found | None] = {}
    for node in nodes_of(model, "Attention"):
        found = _known(model, node, known)
        if found is None:
            continue
        if found.causal:
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
        node.replace_input_with(3, found.mask)
        while node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)
    if any(known.values()):
        # What made the mask would count as a reader of the cache.
        common.RemoveUnusedNodesPass()(model)


def _known(model: ir.Model, node: ir.Node, known: dict[object, Found | None]) -> Found | None:
    """Return the replacement of a mask; layers that share a mask share the result."""
    if optional_input(node, 3) is None:
        return None
    try:
        a = read_attention(node)
        trials = Trials(model, a)
        key = (a.mask, a.causal, a.valid_keys, a.output(3) is None, *trials.lengths)
        if key not in known:
            known[key] = None
            known[key] = _found(model, a, trials)
        return known[key]
    except Exception:  # whatever is odd about a graph that others made: its mask stays
        return None


def _found(model: ir.Model, a: AttentionNode, trials: Trials) -> Found | None:
    of_others = a.valid_keys is not None and trials.cache is None
    if a.mask is None or of_others or (a.output(3) is not None and a.mode == MASKED):
        return None
    maker = MaskMaker(a.mask, None if trials.cache is None else trials.cache.lengths, trials)
    if a.mask not in maker.tainted:
        return _whole(maker, trials)
    if a.causal or not trials.appends:
        return None
    rest = without_causal_part(model, maker, trials)
    return None if rest is None else Found(rest, causal=True)


def _whole(maker: MaskMaker, trials: Trials) -> Found | None:
    """Return the replacement of a mask that is computed from sizes alone."""
    redundant = causal = True
    evaluate = maker.evaluator([maker.mask])
    for trial in maker.trials():
        values = maker.tried(evaluate, trial)
        if values is None:
            continue
        shown, hidden = _read(over_scores(values[maker.mask], trial))
        redundant = redundant and bool((shown | ~trial.shown).all())
        seen, later = trial.shown & trial.causal, trial.shown & ~trial.causal
        causal = causal and bool(((shown | ~seen) & (hidden | ~later)).all())
        if not redundant and not causal:
            return None
    if redundant:
        return Found(None, causal=False)
    return Found(None, causal=True) if trials.appends else None


def _read(mask: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return the keys that a mask shows, and those that it hides."""
    if mask.dtype == np.bool_:
        return mask, ~mask
    lowest = HIDING if mask.dtype == np.float32 else -np.inf
    return mask == 0, mask <= lowest
