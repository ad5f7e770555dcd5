"""Replacement of masks that a graph computes from sizes by attributes of `Attention`.

A mask is recognised by its values, not by the pattern of its nodes, which differs from author to
author. The nodes are run at several sizes, and at lengths next to every number that occurs in them,
so that a window, or a rule that starts at some length, is noticed. Masks that cannot be run stay.

- If all keys are visible, the mask is removed.
- If the mask is causal (query i sees key j if j <= P + i), `is_causal` replaces it.
- If the mask combines a causal part with one that is computed from data, such as padding,
  `is_causal` replaces the first part, and the second stays as the mask.

False and -inf hide a key. So do numbers at or below `_HIDING` in a float32 mask that depends on
sizes alone: a causal mask shows each query its own key, beside which such a key has a weight of
exactly 0 unless a score reaches 4e8. Larger finite numbers, such as -1e4, are within the range of
scores: those masks stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.graph.ir_helpers import MASK_INPUT, nodes_of, optional_input
from attn_export.graph.lower.mask_trials import MaskTrial, MaskTrials
from attn_export.graph.lower.mask_values import SMALL, MaskGraph, ValueArrays, broadcast_to_scores
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.read import MASKED, AttentionNode, read_attention
from attn_export.tensorfile import Array

# -- masks with a causal part and one that is computed from data --------------------------------

_TrialValues = tuple[MaskTrial, ValueArrays]
"""A trial, and the values of the graph in it."""

_DRAWN: dict[str, list[Any]] = {"b": [False, True], "i": [0, 1, 2], "u": [0, 1, 2]}
_FLOATS = [0.0, 0.0, 1.0, -0.5, -np.inf, float(np.finfo(np.float32).min)]
"""Values from which artificial data is drawn: enough to see whether a node passes it on."""


def _remove_causal_part(model: ir.Model, mask_graph: MaskGraph) -> ir.Value | None:
    """Return the mask without its part that is computed from sizes; None unless that is causal.

    An operand that is computed from sizes, and is the same number for all visible keys, is replaced
    by this number where it is combined with data. This is right if the new mask equals the old one
    for visible keys, and the old one hides all others. Both are verified on random data.
    """
    parts, last = _size_values(mask_graph), mask_graph.mask.producer()
    if not parts or last is None:
        return None
    dependent = [x for node in mask_graph.nodes for x in node.outputs if x.name]
    dependent = [value for value in dependent if value in mask_graph.data_dependent]
    evaluate_rest = mask_graph.evaluator(dependent, cut=parts)
    runs: list[_TrialValues] = []
    for trial in mask_graph.required_trials():
        data = {value: _draw(value, mask_graph.trials, trial) for value in mask_graph.data}
        before = mask_graph.mask_in(trial, data)
        if before is None:
            continue
        after = evaluate_rest(trial, data | parts)
        if not _is_causal_split(before, broadcast_to_scores(after[mask_graph.mask], trial), trial):
            return None
        if trial.keys <= SMALL:
            runs.append((trial, data | after))
    return _rebuild(Builder(model, last), mask_graph, parts, runs)


def _size_values(mask_graph: MaskGraph) -> dict[ir.Value, Array]:
    """Return operands of data-dependent nodes that are one number for all visible keys."""
    computed = {value for node in mask_graph.nodes for value in node.outputs}
    operands = {
        value: None
        for node in mask_graph.nodes
        if not mask_graph.data_dependent.isdisjoint(node.outputs)
        for value in node.inputs
        if value in computed and value not in mask_graph.data_dependent
    }
    values = [value for value in operands if value is not None]
    evaluate = mask_graph.evaluator(values)
    numbers: dict[ir.Value, set[Any]] = {value: set() for value in values}
    ranks: dict[ir.Value, int] = {}
    for trial in mask_graph.trials.small():
        for value, array in evaluate(trial, {}).items():
            numbers[value] |= _visible_numbers(array, trial)
            ranks[value] = array.ndim
    return {
        value: np.full([1] * ranks[value], next(iter(found)))
        for value, found in numbers.items()
        if len(found) == 1 and None not in found
    }


def _visible_numbers(array: Array, trial: MaskTrial) -> set[Any]:
    """Return the numbers of an array for visible keys; {None} if its shape is not `[.., L, S]`."""
    if array.shape[-2:] != (trial.queries, trial.keys):
        return {None}
    broadcast = broadcast_to_scores(array, trial)
    return set(np.unique(broadcast[np.broadcast_to(trial.shown & trial.causal, broadcast.shape)]))


def _is_causal_split(before: Array, after: Array, trial: MaskTrial) -> bool:
    """Return whether two masks agree on causally visible keys, and the first hides all others."""
    same = (before == after) | ((before != before) & (after != after))
    hidden = ~before if before.dtype == np.bool_ else before == -np.inf
    visible, future = trial.shown & trial.causal, trial.shown & ~trial.causal
    return bool(((same | ~visible) & (hidden | ~future)).all())


def _draw(value: ir.Value, trials: MaskTrials, trial: MaskTrial) -> Array:
    if value.shape is None or value.dtype is None:
        raise ValueError(f"the shape of {value.name} is not known")
    shape = [trials.known_size(size, trial.sizes) for size in value.shape]
    dtype = value.dtype.numpy()
    random = np.random.default_rng([trial.queries, trial.keys])
    choices = np.array(_DRAWN.get(dtype.kind, _FLOATS))
    return choices[random.integers(len(choices), size=shape)].astype(dtype)


def _rebuild(
    op: Builder,
    mask_graph: MaskGraph,
    parts: Mapping[ir.Value, Array],
    runs: Sequence[_TrialValues],
) -> ir.Value:
    """Copy the nodes of the mask, with numbers in place of the operands in `parts`."""
    replacements = {value: op.array(array) for value, array in parts.items()}
    for node in mask_graph.nodes:
        is_replaced = node.outputs[0] in replacements
        if is_replaced or not any(value in replacements for value in node.inputs):
            continue
        passed_value = _passed_value(node, parts, runs)
        if passed_value is not None:
            replacements[node.outputs[0]] = replacements.get(passed_value, passed_value)
            continue
        copies = op.copy_node(node, replacements)
        for old, value in zip(node.outputs, copies, strict=True):
            value.dtype = ir.DataType.from_numpy(runs[0][1][old].dtype)
            shapes = [(trial, values[old].shape) for trial, values in runs]
            value.shape = _shape_over_trials(mask_graph.trials, shapes)
            replacements[old] = value
    return replacements[mask_graph.mask]


def _passed_value(
    node: ir.Node, parts: Mapping[ir.Value, Array], runs: Sequence[_TrialValues]
) -> ir.Value | None:
    """Return an input that a node passes on unchanged, such as x in And(True, x) or x + 0."""
    if not any(value in parts for value in node.inputs) or len(node.outputs) != 1:
        return None
    for value in node.inputs:
        if value is not None and all(
            value in values
            and values[value].shape == values[node.outputs[0]].shape
            and values[value].tobytes() == values[node.outputs[0]].tobytes()
            for _, values in runs
        ):
            return value
    return None


def _shape_over_trials(
    trials: MaskTrials, shapes: Sequence[tuple[MaskTrial, tuple[int, ...]]]
) -> ir.Shape:
    rank = len(shapes[0][1])
    axes = [[(trial, shape[axis]) for trial, shape in shapes] for axis in range(rank)]
    return ir.Shape([trials.axis_of_sizes(sizes) for sizes in axes])


# -- masks that are computed from sizes alone ---------------------------------------------------


_HIDING = -1e9
"""The largest finite float32 that hides a key from a query that sees another key."""


_MaskReplacement = tuple[ir.Value | None, bool]
"""The new mask of a node, or None for no mask; and whether the node gets `is_causal`."""


def recognise_masks(model: ir.Model) -> None:
    """Remove from every `Attention` the part of its mask that its attributes express."""
    replacements: dict[object, _MaskReplacement | None] = {}
    for node in nodes_of(model, "Attention"):
        replacement = _cached_replacement(model, node, replacements)
        if replacement is None:
            continue
        mask, causal = replacement
        if causal:
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
        node.replace_input_with(MASK_INPUT, mask)
        while node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)
    if any(replacements.values()):
        # The nodes of removed masks would count as readers of the KV cache, see `is_bound`.
        common.RemoveUnusedNodesPass()(model)


def _cached_replacement(
    model: ir.Model, node: ir.Node, replacements: dict[object, _MaskReplacement | None]
) -> _MaskReplacement | None:
    """Return the replacement of a node's mask; nodes that share a mask share the result."""
    if optional_input(node, MASK_INPUT) is None:
        return None
    try:
        a = read_attention(node)
        trials = MaskTrials(model, a)
        key = (a.mask, a.causal, a.valid_keys, a.output(3) is None, *trials.lengths)
        if key not in replacements:
            replacements[key] = None
            replacements[key] = _replacement(model, a, trials)
        return replacements[key]
    except Exception:  # foreign graphs may raise anything; the mask stays
        return None


def _replacement(model: ir.Model, a: AttentionNode, trials: MaskTrials) -> _MaskReplacement | None:
    foreign_lengths = a.valid_keys is not None and trials.cache is None
    if a.mask is None or foreign_lengths or (a.output(3) is not None and a.mode == MASKED):
        return None
    mask_graph = MaskGraph(a.mask, trials)
    if a.mask not in mask_graph.data_dependent:
        return _replacement_by_sizes(mask_graph)
    if a.causal or not trials.appends:
        return None
    remaining_mask = _remove_causal_part(model, mask_graph)
    return None if remaining_mask is None else (remaining_mask, True)


def _replacement_by_sizes(mask_graph: MaskGraph) -> _MaskReplacement | None:
    """Return the replacement of a mask that is computed from sizes alone, or None."""
    redundant = causal = True
    was_computed = False
    for trial, shown, hidden in shown_and_hidden(mask_graph):
        was_computed = True
        redundant = redundant and bool((shown | ~trial.shown).all())
        visible, future = trial.shown & trial.causal, trial.shown & ~trial.causal
        causal = causal and bool(((shown | ~visible) & (hidden | ~future)).all())
        if not redundant and not causal:
            return None
    if not was_computed:  # in any trial
        return None
    if redundant:
        return None, False
    return (None, True) if mask_graph.trials.appends else None


def shown_and_hidden(mask_graph: MaskGraph) -> Iterator[tuple[MaskTrial, Array, Array]]:
    """Yield trials of a mask that is computed from sizes alone, with the keys shown and hidden.

    Both are bool `[B, H or 1, L, S]`. Keys with other finite values are in neither.
    """
    for trial in mask_graph.required_trials():
        mask = mask_graph.mask_in(trial)
        if mask is None:
            continue
        if mask.dtype == np.bool_:
            yield trial, mask, ~mask
        else:
            lowest = _HIDING if mask.dtype == np.float32 else -np.inf
            yield trial, mask == 0, mask <= lowest
