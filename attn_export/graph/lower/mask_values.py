"""Subgraph that computes a mask, and its evaluation on sizes and artificial data."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import Size
from attn_export.graph.ir_helpers import dims, reference_model
from attn_export.graph.lower.mask_trials import MaskTrial, MaskTrials
from attn_export.tensorfile import Array

ValueArrays = Mapping[ir.Value, Array]

_Evaluate = Callable[[MaskTrial, ValueArrays], dict[ir.Value, Array]]
"""Function that runs nodes in a trial, with the data that they read, and returns their values."""

MOST_NODES = 300
"""The largest number of nodes of a subgraph."""

_NEVER = frozenset({"Attention", "Bernoulli", "Multinomial"})
"""Operators, besides Random ones, that are no part of a mask or not deterministic."""

SMALL = 16
"""Constants of more elements are tables, of which lengths matter and not values."""

_NO_LENGTH = 1_000_000
"""Larger numbers are no lengths, but ends of slices or values of masks."""

_MOST_NUMBERS = 32
"""The largest number of different numbers in a mask for which sizes are tried."""

_CURVED = frozenset({
    "Acosh", "Asinh", "Atan", "Erf", "Log", "Pow", "Sigmoid", "Softsign", "Sqrt", "Tanh",
})  # fmt: skip
"""Nonlinear operators, by which a number may take effect at a length other than its own."""


class MaskGraph:
    """Subgraph that computes a mask.

    Attributes:
        nodes: The nodes, in an order in which they can run.
        data: The inputs of the subgraph that are neither sizes nor constants.
        data_dependent: `data`, and the values that are computed from it.
    """

    def __init__(self, mask: ir.Value, trials: MaskTrials) -> None:
        self.mask, self.trials = mask, trials
        self._lengths = None if trials.cache is None else trials.cache.lengths
        self.nodes: list[ir.Node] = []
        self.data: set[ir.Value] = set()
        self.data_dependent: set[ir.Value] = set()
        self._sized: set[ir.Value] = set()
        self._constants: dict[ir.Value, Array] = {}
        self._find()

    def _find(self) -> None:
        """Collect the nodes depth first, so that each comes after those that it reads."""
        done: set[ir.Value | ir.Node] = set()
        stack: list[ir.Value | ir.Node] = [self.mask]
        while stack:
            item = stack.pop()
            if isinstance(item, ir.Node):
                self._list(item)
            elif item not in done:
                done.add(item)
                node = self._maker_of(item)
                if node is not None and node not in done:
                    done.add(node)
                    stack += [node, *(value for value in node.inputs if value is not None)]

    def _maker_of(self, value: ir.Value) -> ir.Node | None:
        """Return the node that computes a value; None if the value is an input of the subgraph."""
        node, constant = value.producer(), ir.convenience.get_const_tensor(value)
        if value is self._lengths or (node is not None and self._is_size(node)):
            self._sized.add(value)
        elif constant is not None:
            self._constants[value] = constant.numpy()
        elif node is None or not _can_run(node) or len(self.nodes) > MOST_NODES:
            self.data.add(value)
            self.data_dependent.add(value)
        else:
            return node
        return None

    def _list(self, node: ir.Node) -> None:
        self.nodes.append(node)
        if any(value in self.data_dependent for value in node.inputs):
            self.data_dependent.update(node.outputs)

    def _is_size(self, node: ir.Node) -> bool:
        source = node.inputs[0] if node.op_type in ("Shape", "Size") and node.inputs else None
        known = map(self.trials.is_known, _requested_sizes(node) if source is not None else ())
        return source is not None and bool(dims(source)) and all(known)

    def required_trials(self) -> Iterator[MaskTrial]:
        """Yield trials of small sizes, then those that the numbers in the mask require."""
        small = self.trials.small()
        yield from small
        known = self._known_values(small)
        if any(node.op_type in _CURVED and not _is_known(node, known) for node in self.nodes):
            raise ValueError("a mask bends its lengths")
        numbers = {math.ceil(n) for array in known.values() for n in _lengths_in(array) if n > 2}
        tables = {n for array in known.values() if array.size > SMALL for n in array.shape} - {1}
        if len(numbers) > _MOST_NUMBERS:
            raise ValueError("a mask has too many numbers")
        yield from self.trials.refuting(numbers, self._reach(known), tables)

    def _known_values(self, trials: Sequence[MaskTrial]) -> dict[ir.Value, Array]:
        """Return the values that do not depend on sizes or data: constants and values of them."""
        known = dict(self._constants)
        if len(trials) > 1:
            nodes = [x for node in self.nodes for x in node.outputs]
            free = [x for x in nodes if x.name and x not in self.data_dependent]
            evaluate = self.evaluator(free)
            one, other = (evaluate(trial, {}) for trial in trials[:2])
            known |= {x: one[x] for x in free if np.array_equal(one[x], other[x])}
        return known

    def _reach(self, known: ValueArrays) -> int:
        """Return an upper bound of the length from which the numbers of the mask take effect.

        Numbers that are added, or belong to several parts of a rule, take effect at their sum, and
        those after a division by n at n times themselves: ``(i - j) // 64 - 3 <= 4`` hides keys
        from distance 512 on.
        """
        units: dict[ir.Value | None, float] = {}  # the length that 1 stands for in each value
        reach = 0.0
        for node in self.nodes:
            if _is_known(node, known):
                continue
            input_unit = max((units.get(value, 1.0) for value in node.inputs), default=1.0)
            unit = input_unit * _divisor(node, known)
            units |= dict.fromkeys(node.outputs, unit)
            constants = [
                known[value] for value in node.inputs if value is not None and value in known
            ]
            reach += sum(unit * (max(_lengths_in(array), default=0.0) + 1) for array in constants)
        return math.ceil(min(reach, _NO_LENGTH))

    def evaluator(self, outputs: Sequence[ir.Value], cut: Collection[ir.Value] = ()) -> _Evaluate:
        """Return a function that computes values from sizes and data."""
        wanted, nodes = set(outputs) - set(cut), list[ir.Node]()
        for node in reversed(self.nodes):
            if wanted.intersection(node.outputs):
                nodes.append(node)
                wanted |= {value for value in node.inputs if value is not None} - set(cut)
        read = {value for node in nodes for value in node.inputs if value is not None}
        computed = {value for node in nodes for value in node.outputs} - set(cut)
        inputs = read - computed
        constants = {x: array for x, array in self._constants.items() if x in read}
        model = reference_model(nodes[::-1], inputs, outputs)

        def evaluate(trial: MaskTrial, data: ValueArrays) -> dict[ir.Value, Array]:
            known = {**constants, **self._sizes(trial), **data}
            with np.errstate(all="ignore"):
                arrays = model.run(None, {str(value.name): known[value] for value in inputs})
            return dict(zip(outputs, arrays, strict=True))

        return evaluate

    @functools.cached_property
    def _evaluate_mask(self) -> _Evaluate:
        return self.evaluator([self.mask])

    def mask_in(self, trial: MaskTrial, data: ValueArrays | None = None) -> Array | None:
        """Return the mask in a trial, `[B, H or 1, L, S]`; None if a table is too short for it."""
        try:
            mask = self._evaluate_mask(trial, data or {})[self.mask]
            return broadcast_to_scores(mask, trial)
        except Exception:
            tables = [array for array in self._constants.values() if array.size > SMALL]
            lengths = [n for array in tables for n in array.shape if n > 1]
            if trial.keys > min(lengths, default=trial.keys):
                return None
            raise

    def _sizes(self, trial: MaskTrial) -> dict[ir.Value, Array]:
        """Return the values that are sizes, in a trial."""
        return {
            value: trial.past if value is self._lengths else _size(value, self.trials, trial)
            for value in self._sized
        }


def _is_known(node: ir.Node, known: ValueArrays) -> bool:
    return all(value in known for value in node.outputs)


def _lengths_in(array: Array) -> list[float]:
    """Return the numbers of a small array that may be lengths.

    A fraction f may be a factor on a length, or the visible part of a length. It takes effect at
    1 / f and at 1 / (1 - f).
    """
    if array.size > SMALL or array.dtype.kind not in "iuf":
        return []
    numbers = [float(abs(number)) for number in array.ravel().tolist()]
    fractions = [n for n in numbers if 0 < n < 1]
    numbers += [1 / n for n in fractions] + [1 / (1 - n) for n in fractions]
    return [n for n in numbers if n < _NO_LENGTH]


def _divisor(node: ir.Node, known: ValueArrays) -> float:
    """Return the largest constant by which a node divides; 1 for other nodes."""
    if node.op_type not in ("Div", "Mul"):
        return 1.0
    operands = node.inputs[1:] if node.op_type == "Div" else node.inputs
    arrays = [known[value] for value in operands if value is not None and value in known]
    small = [np.abs(array).ravel().tolist() for array in arrays if array.size <= SMALL]
    numbers: list[float] = [n for of_array in small for n in of_array]
    if node.op_type == "Mul":
        numbers = [1 / n for n in numbers if 0 < n < 1]
    return max([1.0, *numbers])


def broadcast_to_scores(mask: Array, trial: MaskTrial) -> Array:
    """Return a mask broadcast to `[B, H or 1, L, S]`."""
    heads = mask.shape[-3] if mask.ndim > 2 else 1
    return np.broadcast_to(mask, (len(trial.past), heads, trial.queries, trial.keys))


def _can_run(node: ir.Node) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type in _NEVER or "Random" in node.op_type:
        return False
    kinds = {attribute.type for attribute in node.attributes.values()}
    return not kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}


def _requested_sizes(node: ir.Node) -> tuple[Size, ...]:
    """Return the sizes of the axes that a Shape or Size reads."""
    source = node.inputs[0]
    assert source is not None
    whole = dims(source)
    if node.op_type == "Size":
        return whole
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(whole))
    return whole[start:end]


def _size(value: ir.Value, trials: MaskTrials, trial: MaskTrial) -> Array:
    node = value.producer()
    assert node is not None
    array = np.array(
        [trials.known_size(size, trial.sizes) for size in _requested_sizes(node)], np.int64
    )
    return array if node.op_type == "Shape" else np.asarray(array.prod())
