"""A mask that is causal and hides keys for other reasons too: the other reasons alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.graph.lower.mask_trials import Trial, Trials
from attn_export.graph.lower.mask_values import SMALL, MaskMaker, Values, over_scores
from attn_export.graph.lower.node_builder import Builder

Array = np.ndarray[Any, Any]

Tried = tuple[Trial, Values]
"""What there was in a trial."""

DRAWN: dict[str, list[Any]] = {"b": [False, True], "i": [0, 1, 2], "u": [0, 1, 2]}
FLOATS = [0.0, 0.0, 1.0, -0.5, -np.inf, float(np.finfo(np.float32).min)]
"""What data is made of: enough to see whether a node passes it on or not."""


def without_causal_part(model: ir.Model, maker: MaskMaker, trials: Trials) -> ir.Value | None:
    """Return the mask without the part that is computed from sizes, if that part is causal.

    A value of sizes may be one number for all visible keys. If it meets data, this number takes its
    place. That is right if the mask stays the same for visible keys, and hides all others: both are
    verified by running it on data of all kinds.

    Args:
        model: Gets the nodes of the new mask.
        maker: The nodes of the mask.
        trials: Where it is tried.

    Returns:
        The new mask, or None if there is no such part.
    """
    parts, last = _parts(maker, trials), maker.mask.producer()
    if not parts or last is None:
        return None
    made = [x for node in maker.nodes for x in node.outputs if x.name and x in maker.tainted]
    whole, rest = maker.evaluator([maker.mask]), maker.evaluator(made, cut=parts)
    tried: list[Tried] = []
    for trial in maker.trials():
        data = {value: _draw(value, trials, trial) for value in maker.data}
        before = maker.tried(whole, trial, data)
        if before is None:
            continue
        after = rest(maker.sizes(trial), data | parts)
        if not _is_split(before[maker.mask], after[maker.mask], trial):
            return None
        if trial.keys <= SMALL:
            tried.append((trial, data | after))
    return _built(Builder(model, last), maker, parts, trials, tried)


def _parts(maker: MaskMaker, trials: Trials) -> dict[ir.Value, Array]:
    """Return the values of sizes that meet data, and the one number of each for visible keys."""
    met = {
        value: None
        for node in maker.nodes
        if not maker.tainted.isdisjoint(node.outputs)
        for value in node.inputs
        if value is not None and value not in maker.tainted
    }
    made = {value for node in maker.nodes for value in node.outputs}
    values = [value for value in met if value in made]
    evaluate = maker.evaluator(values)
    found: dict[ir.Value, set[Any]] = {value: set() for value in values}
    for trial in trials.first():
        for value, array in evaluate(maker.sizes(trial), {}).items():
            found[value] |= _visible(array, trial)
    ranks = {value: array.ndim for value, array in evaluate(maker.sizes(trial), {}).items()}
    return {
        value: np.full([1] * ranks[value], next(iter(numbers)))
        for value, numbers in found.items()
        if len(numbers) == 1 and None not in numbers
    }


def _visible(array: Array, trial: Trial) -> set[Any]:
    """Return the numbers of an array for visible keys; None if it is not as long as the scores."""
    if array.shape[-2:] != (trial.queries, trial.keys):
        return {None}
    scores = over_scores(array, trial)
    return set(np.unique(scores[np.broadcast_to(trial.shown & trial.causal, scores.shape)]))


def _is_split(before: Array, after: Array, trial: Trial) -> bool:
    """Return whether two masks agree on visible keys, and the first hides all others."""
    before, after = over_scores(before, trial), over_scores(after, trial)
    same = (before == after) | ((before != before) & (after != after))
    hidden = ~before if before.dtype == np.bool_ else before == -np.inf
    seen, later = trial.shown & trial.causal, trial.shown & ~trial.causal
    return bool(((same | ~seen) & (hidden | ~later)).all())


def _draw(value: ir.Value, trials: Trials, trial: Trial) -> Array:
    if value.shape is None or value.dtype is None:
        raise ValueError(f"the shape of {value.name} is not known")
    shape = [trials.known(size, trial.sizes) for size in value.shape]
    kind = value.dtype.numpy()
    random = np.random.default_rng([trial.queries, trial.keys])
    choices = np.array(DRAWN.get(kind.kind, FLOATS))
    return choices[random.integers(len(choices), size=shape)].astype(kind)


def _built(
    op: Builder,
    maker: MaskMaker,
    parts: Mapping[ir.Value, Array],
    trials: Trials,
    tried: Sequence[Tried],
) -> ir.Value:
    """Build the nodes of the mask once more, with numbers in place of the parts."""
    new: dict[ir.Value | None, ir.Value] = {x: op.array(array) for x, array in parts.items()}
    for node in maker.nodes:
        if not any(value in new for value in node.inputs) or node.outputs[0] in new:
            continue
        same = _passed_on(node, parts, tried)
        if same is not None:
            new[node.outputs[0]] = new.get(same, same)
            continue
        inputs = [value if value is None else new.get(value, value) for value in node.inputs]
        attributes = {name: held.value for name, held in node.attributes.items()}
        made = op.several(node.op_type, inputs, len(node.outputs), **attributes)
        for old, value in zip(node.outputs, made, strict=True):
            value.dtype = ir.DataType.from_numpy(tried[0][1][old].dtype)
            value.shape = _shape(trials, [(trial, values[old].shape) for trial, values in tried])
            new[old] = value
    return new[maker.mask]


def _passed_on(
    node: ir.Node, parts: Mapping[ir.Value, Array], tried: Sequence[Tried]
) -> ir.Value | None:
    """Return an input that a node passes on unchanged, such as x in True and x, or x + 0."""
    if not any(value in parts for value in node.inputs) or len(node.outputs) != 1:
        return None
    for value in node.inputs:
        if value is not None and all(
            value in values and _identical(values[value], values[node.outputs[0]])
            for _, values in tried
        ):
            return value
    return None


def _identical(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _shape(trials: Trials, found: Sequence[tuple[Trial, tuple[int, ...]]]) -> ir.Shape:
    rank = len(found[0][1])
    axes = [[(trial, shape[axis]) for trial, shape in found] for axis in range(rank)]
    return ir.Shape([trials.axis(sizes) for sizes in axes])
