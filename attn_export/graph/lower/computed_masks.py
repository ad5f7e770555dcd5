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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.graph.ir_helpers import nodes_of, optional_input
from attn_export.graph.lower.mask_trials import MaskTrial, MaskTrials
from attn_export.graph.lower.mask_values import SMALL, MaskGraph, Values, broadcast_to_scores
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.read import MASKED, AttentionNode, read_attention
from attn_export.tensorfile import Array

# -- A mask that is causal and hides keys for other reasons too: the other reasons alone --------


TrialValues = tuple[MaskTrial, Values]
"""A trial, and the values that it gave."""

DRAWN: dict[str, list[Any]] = {"b": [False, True], "i": [0, 1, 2], "u": [0, 1, 2]}
FLOATS = [0.0, 0.0, 1.0, -0.5, -np.inf, float(np.finfo(np.float32).min)]
"""Values that data is drawn from: enough to see whether a node passes it on."""


def remove_causal_part(
    model: ir.Model, mask_graph: MaskGraph, trials: MaskTrials
) -> ir.Value | None:
    """Return the mask without the part that is computed from sizes, if that part is causal.

    A value of sizes may be one number for all visible keys. If it meets data, this number takes its
    place. That is right if the mask stays the same for visible keys, and hides all others: both are
    verified by running it on data of all kinds.

    Args:
        model: Gets the nodes of the new mask.
        mask_graph: The nodes of the mask.
        trials: The sizes and inputs on which it is evaluated.

    Returns:
        The new mask, or None if there is no such part.
    """
    parts, last = _size_values(mask_graph, trials), mask_graph.mask.producer()
    if not parts or last is None:
        return None
    data_dependent_values = [
        x
        for node in mask_graph.nodes
        for x in node.outputs
        if x.name and x in mask_graph.data_dependent
    ]
    evaluate_mask, evaluate_rest = (
        mask_graph.evaluator([mask_graph.mask]),
        mask_graph.evaluator(data_dependent_values, cut=parts),
    )
    runs: list[TrialValues] = []
    for trial in mask_graph.trials():
        data = {value: _draw(value, trials, trial) for value in mask_graph.data}
        before = mask_graph.run_trial(evaluate_mask, trial, data)
        if before is None:
            continue
        after = evaluate_rest(mask_graph.sizes(trial), data | parts)
        if not _is_causal_split(before[mask_graph.mask], after[mask_graph.mask], trial):
            return None
        if trial.keys <= SMALL:
            runs.append((trial, data | after))
    return _rebuild(Builder(model, last), mask_graph, parts, trials, runs)


def _size_values(mask_graph: MaskGraph, trials: MaskTrials) -> dict[ir.Value, Array]:
    """Return the values of sizes that meet data, and the one number of each for visible keys."""
    operands = {
        value: None
        for node in mask_graph.nodes
        if not mask_graph.data_dependent.isdisjoint(node.outputs)
        for value in node.inputs
        if value is not None and value not in mask_graph.data_dependent
    }
    computed = {value for node in mask_graph.nodes for value in node.outputs}
    values = [value for value in operands if value in computed]
    evaluate = mask_graph.evaluator(values)
    numbers_by_value: dict[ir.Value, set[Any]] = {value: set() for value in values}
    for trial in trials.small():
        for value, array in evaluate(mask_graph.sizes(trial), {}).items():
            numbers_by_value[value] |= _visible_numbers(array, trial)
    ranks = {value: array.ndim for value, array in evaluate(mask_graph.sizes(trial), {}).items()}
    return {
        value: np.full([1] * ranks[value], next(iter(numbers)))
        for value, numbers in numbers_by_value.items()
        if len(numbers) == 1 and None not in numbers
    }


def _visible_numbers(array: Array, trial: MaskTrial) -> set[Any]:
    """Return the numbers of an array for visible keys; None if it is not as long as the scores."""
    if array.shape[-2:] != (trial.queries, trial.keys):
        return {None}
    broadcast = broadcast_to_scores(array, trial)
    return set(np.unique(broadcast[np.broadcast_to(trial.shown & trial.causal, broadcast.shape)]))


def _is_causal_split(before: Array, after: Array, trial: MaskTrial) -> bool:
    """Return whether two masks agree on visible keys, and the first hides all others."""
    before, after = broadcast_to_scores(before, trial), broadcast_to_scores(after, trial)
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
    choices = np.array(DRAWN.get(dtype.kind, FLOATS))
    return choices[random.integers(len(choices), size=shape)].astype(dtype)


def _rebuild(
    op: Builder,
    mask_graph: MaskGraph,
    parts: Mapping[ir.Value, Array],
    trials: MaskTrials,
    runs: Sequence[TrialValues],
) -> ir.Value:
    """Build the nodes of the mask once more, with numbers in place of the parts."""
    replacements: dict[ir.Value | None, ir.Value] = {
        x: op.array(array) for x, array in parts.items()
    }
    for node in mask_graph.nodes:
        if (
            not any(value in replacements for value in node.inputs)
            or node.outputs[0] in replacements
        ):
            continue
        passed_value = _passed_value(node, parts, runs)
        if passed_value is not None:
            replacements[node.outputs[0]] = replacements.get(passed_value, passed_value)
            continue
        inputs = [
            value if value is None else replacements.get(value, value) for value in node.inputs
        ]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        outputs = op.add_node(node.op_type, inputs, len(node.outputs), **attributes)
        for old, value in zip(node.outputs, outputs, strict=True):
            value.dtype = ir.DataType.from_numpy(runs[0][1][old].dtype)
            value.shape = _shape_over_trials(
                trials, [(trial, values[old].shape) for trial, values in runs]
            )
            replacements[old] = value
    return replacements[mask_graph.mask]


def _passed_value(
    node: ir.Node, parts: Mapping[ir.Value, Array], runs: Sequence[TrialValues]
) -> ir.Value | None:
    """Return an input that a node passes on unchanged, such as x in True and x, or x + 0."""
    if not any(value in parts for value in node.inputs) or len(node.outputs) != 1:
        return None
    for value in node.inputs:
        if value is not None and all(
            value in values and _identical(values[value], values[node.outputs[0]])
            for _, values in runs
        ):
            return value
    return None


def _identical(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _shape_over_trials(
    trials: MaskTrials, shapes: Sequence[tuple[MaskTrial, tuple[int, ...]]]
) -> ir.Shape:
    rank = len(shapes[0][1])
    axes = [[(trial, shape[axis]) for trial, shape in shapes] for axis in range(rank)]
    return ir.Shape([trials.axis_of_sizes(sizes) for sizes in axes])


# -- masks that a graph computes itself, from sizes alone ---------------------------------------


HIDING = -1e9
"""The largest finite float32 that hides a key from a row which sees another."""


@dataclasses.dataclass(frozen=True)
class ComputedMask:
    """Replacement of a mask.

    Attributes:
        mask: None for nothing.
        causal: Whether the node must be causal.
    """

    mask: ir.Value | None
    causal: bool


def recognise_masks(model: ir.Model) -> None:
    """Remove from every `Attention` the part of its mask that its attributes express."""
    cache: dict[object, ComputedMask | None] = {}
    for node in nodes_of(model, "Attention"):
        replacement = _cached_replacement(model, node, cache)
        if replacement is None:
            continue
        if replacement.causal:
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
        node.replace_input_with(3, replacement.mask)
        while node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)
    if any(cache.values()):
        # What made the mask would count as a reader of the cache.
        common.RemoveUnusedNodesPass()(model)


def _cached_replacement(
    model: ir.Model, node: ir.Node, cache: dict[object, ComputedMask | None]
) -> ComputedMask | None:
    """Return the replacement of a mask; layers that share a mask share the result."""
    if optional_input(node, 3) is None:
        return None
    try:
        a = read_attention(node)
        trials = MaskTrials(model, a)
        key = (a.mask, a.causal, a.valid_keys, a.output(3) is None, *trials.lengths)
        if key not in cache:
            cache[key] = None
            cache[key] = _replacement(model, a, trials)
        return cache[key]
    except Exception:  # whatever is odd about a graph that others made: its mask stays
        return None


def _replacement(model: ir.Model, a: AttentionNode, trials: MaskTrials) -> ComputedMask | None:
    foreign_lengths = a.valid_keys is not None and trials.cache is None
    if a.mask is None or foreign_lengths or (a.output(3) is not None and a.mode == MASKED):
        return None
    mask_graph = MaskGraph(a.mask, None if trials.cache is None else trials.cache.lengths, trials)
    if a.mask not in mask_graph.data_dependent:
        return _replacement_by_sizes(mask_graph, trials)
    if a.causal or not trials.appends:
        return None
    remaining_mask = remove_causal_part(model, mask_graph, trials)
    return None if remaining_mask is None else ComputedMask(remaining_mask, causal=True)


def _replacement_by_sizes(mask_graph: MaskGraph, trials: MaskTrials) -> ComputedMask | None:
    """Return the replacement of a mask that is computed from sizes alone."""
    redundant = causal = True
    evaluate = mask_graph.evaluator([mask_graph.mask])
    for trial in mask_graph.trials():
        values = mask_graph.run_trial(evaluate, trial)
        if values is None:
            continue
        shown, hidden = shown_and_hidden(broadcast_to_scores(values[mask_graph.mask], trial))
        redundant = redundant and bool((shown | ~trial.shown).all())
        visible, future = trial.shown & trial.causal, trial.shown & ~trial.causal
        causal = causal and bool(((shown | ~visible) & (hidden | ~future)).all())
        if not redundant and not causal:
            return None
    if redundant:
        return ComputedMask(None, causal=False)
    return ComputedMask(None, causal=True) if trials.appends else None


def shown_and_hidden(mask: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return the keys that a mask shows, and those that it hides."""
    if mask.dtype == np.bool_:
        return mask, ~mask
    lowest = HIDING if mask.dtype == np.float32 else -np.inf
    return mask == 0, mask <= lowest
