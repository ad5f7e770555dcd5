"""The error of each layer of a graph, on the input that the layer has in the reference.

The graph is evaluated in float64 with the weights of one node in memory, and what a layer gives is
replaced by what it should give. So a wrong layer does not hide those behind it, and all that are
wrong are named. In the first of them, the first wrong node is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attn_export.errors import first_few, printable
from attn_export.explain.eager_values import ValueReference, first_unmatched_node
from attn_export.float64 import ReferenceStep
from attn_export.float64.evaluate import Values, is_float
from attn_export.float64.streamed import LARGE_ELEMENTS, StreamedEvaluation
from attn_export.measures import eps, measure_strictly
from attn_export.parts.whole_models.unit_weights import layer_lists
from attn_export.reference.operations import Recording
from attn_export.results import LayerError
from attn_export.tensorfile import is_floating

_NEAR = 0.9
"""The largest sine of the angle between what a wrong layer gives and what it should."""

_TRIED = 3
"""The number of values that are tried as the embeddings: those of tokens, positions, their sum."""

_MOST_ELEMENTS = 2**22
"""The largest number of elements of a value that is looked for in a layer."""

_WITHIN = 10.0
"""The error of a right value within a layer, over that of what a right layer gives."""


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """The error of each layer of a graph, and the values of the first one that is wrong.

    Attributes:
        each: None of them if the layers were not found.
        wrong: The place of the first wrong one in the order of `hidden_states`.
        values: Its values, computed from the reference's input, and small weights that it reads.
        modules: The layers of the model.
    """

    graph: StreamedEvaluation
    each: Sequence[LayerError] = ()
    wrong: int | None = None
    values: Values = dataclasses.field(default_factory=dict)
    modules: Sequence[nn.Module] = ()

    @property
    def most(self) -> int:
        """The largest number of elements of a value."""
        return max((x.size for x in self.values.values() if isinstance(x, np.ndarray)), default=0)

    def first_wrong_node(self, steps: Sequence[ReferenceStep]) -> str:
        """Return what the first wrong node of that layer computes; "" if it is not known.

        `steps`: What the reference computes in the layer.
        """
        near = _WITHIN * max((each.right for each in self.each), default=0.0)
        whose = ValueReference("the model", cause=lambda *_: None)  # it has the same input
        found = first_unmatched_node(self.graph, self.values, whose, steps, {}, near)
        if found is None:
            return ""
        return f"; its first wrong value: {found.location}; {found.says}"


def hidden_states(
    model: nn.Module, run: Callable[[], Any]
) -> tuple[list[nn.Module], list[np.ndarray]]:
    """Return the layers of a model that a run passes, what enters the first, what each gives.

    None are returned if it passes several lists of layers, or one more than once.
    """
    lists = layer_lists(model)
    found: list[list[np.ndarray]] = [[] for _ in lists]
    hooks = [
        hook
        for layers, states in zip(lists, found, strict=True)
        for hook in _state_hooks(layers, states)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    passed = [(x, states) for x, states in zip(lists, found, strict=True) if states]
    is_known = len(passed) == 1 and len(passed[0][1]) == len(passed[0][0]) + 1
    return passed[0] if is_known else ([], [])


def _state_hooks(layers: Sequence[nn.Module], states: list[np.ndarray]) -> Iterator[Any]:
    """Register hooks that add to `states` what enters the first layer, and what each gives."""

    def enter(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        states.append(_array(args[0] if args else given["hidden_states"]))

    def leave(_: nn.Module, __: Any, outputs: Any) -> None:
        states.append(_array(outputs[0] if isinstance(outputs, tuple) else outputs))

    yield layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    yield from (layer.register_forward_hook(leave) for layer in layers)


@contextlib.contextmanager
def recorded_layer(
    model: nn.Module, layers: Sequence[nn.Module], number: int,
    place: Callable[[], str] | None, most: int,
) -> Iterator[list[ReferenceStep]]:  # fmt: skip
    """Record what a model computes up to a state of `hidden_states`, from the one before it.

    The number of states stands for what follows the layers. A list is given, which the next run
    fills. Large weights are not in it.

    `layers`: Those that the run passes.
    `most`: The largest number of elements of what is recorded.
    """
    steps, recordings = list[ReferenceStep](), list[Recording]()
    opened, inside = contextlib.ExitStack(), layers[number - 1 : number]

    def start(_: nn.Module, args: tuple[Any, ...], given: Any) -> None:
        if recordings:
            return
        read = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        others = {id(x) for layer in layers if layer not in inside for x in layer.parameters()}
        weights = {
            name: x for name, x in (*inside, model)[0].named_parameters()
            if id(x) not in others and x.numel() < LARGE_ELEMENTS
        }  # fmt: skip
        tensors = weights | {f"input {n}": x for n, x in enumerate(read)}
        recordings.append(Recording(tensors, place, most))
        opened.enter_context(recordings[-1])

    def stop(*_: Any) -> None:
        if recordings and not steps:
            opened.close()
            steps.extend(recordings[-1].steps)

    if number == 0:
        handles = [
            model.register_forward_pre_hook(start, with_kwargs=True),
            layers[0].register_forward_pre_hook(stop),
            model.register_forward_hook(stop, always_call=True),  # if it raises before
        ]
    elif number <= len(layers):
        handles = [
            layers[number - 1].register_forward_pre_hook(start, with_kwargs=True),
            layers[number - 1].register_forward_hook(stop, always_call=True),
        ]
    else:
        handles = [
            layers[-1].register_forward_hook(start),
            model.register_forward_hook(stop, always_call=True),
        ]
    try:
        yield steps
    finally:
        for handle in handles:
            handle.remove()


def layer_errors(
    path: Path, inputs: Mapping[str, np.ndarray], states: Sequence[np.ndarray],
    outputs: Mapping[str, np.ndarray], rows: Sequence[int],
) -> LayerErrors:  # fmt: skip
    """Return the error of each layer of a graph.

    `states`: The reference of `hidden_states`, float64 `[B, L, E]`.
    `outputs`: The reference of outputs of the graph by name, which follow the layers.
    `rows`: The batch elements that are compared.
    """
    graph = StreamedEvaluation(path)
    ends = _ends(graph, inputs, states, rows)
    if ends is None:
        return LayerErrors(graph)
    reference = {**dict(zip(ends, states, strict=True)), **outputs}
    types = [
        onnx.helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
        for x in graph.model.graph.output
    ]
    most = max(LayerError.right, *(eps(dtype) / 2 for dtype in types if is_floating(dtype)))
    errors, within, wrong = dict[str, float](), dict[str, Any](), list[int]()
    constants = graph.weights() | {""}

    def compute(node: onnx.NodeProto, values: Values) -> Mapping[str, Any]:
        made = _with_sum(node, values, graph.compute_node(node, values))
        weights = {name: values[name] for name in node.input if name in graph.initializers}
        if constants.issuperset(node.input):
            constants.update(made)
        elif not wrong:
            kept = ((name, x) for name, x in made.items() if np.size(x) <= _MOST_ELEMENTS)
            within.update({**weights, **dict(kept)})
        for name in made.keys() & reference.keys():
            errors[name] = _distance(made[name], reference[name], rows)
            right = reference[name].reshape(np.shape(made[name]))
            if name == _sum_of(node):  # of which the other output is the norm
                first = values[node.input[0]] + (right - made[name])
                made = {**graph.compute_node(node, {**values, node.input[0]: first})}
            made[name] = right
            if not wrong and not errors[name] <= most:
                wrong.append(ends.index(name) if name in ends else len(ends))
            elif not wrong and name in ends:
                within.clear()
                within.update({**weights, **made})  # a fused norm is of the next layer
        return made

    graph.values(inputs, compute, kept=())
    names = ["the embeddings", *(f"layer {number}" for number in range(len(states) - 1))]
    rest = [("what follows the layers", name) for name in outputs if name in errors]
    every = [*zip(names, ends, strict=True), *rest]
    found = [LayerError(path.name, name, end, errors[end], most) for name, end in every]
    return LayerErrors(graph, found, wrong[0] if wrong else None, within)


def says(errors: Sequence[LayerError]) -> str:
    """Return what is wrong in words; "" if the layers were not found."""
    wrong = [each for each in errors if each.is_wrong]
    rest = max((x.error for x in errors if not x.is_wrong), default=0.0)
    if not wrong:
        right = f"in float64, all its layers are right, within {rest:.0e}"
        return f"{right}: the runtime computes something else" if errors else ""
    named = first_few([f"{x.name} (off by {x.error:.1e})" for x in wrong])
    first = printable(wrong[0].value, 100)
    return (
        f"on the reference's input, wrong: {named}; all others are within {rest:.0e}; the first "
        f"wrong one gives {first}"
    )


def _ends(
    graph: StreamedEvaluation, inputs: Mapping[str, np.ndarray], states: Sequence[np.ndarray],
    rows: Sequence[int],
) -> list[str] | None:  # fmt: skip
    """Return the values of a graph that layers give, by their angle to the reference's.

    Each is the nearest of those behind the end of the layer before it. If none is near the
    embeddings, they are wrong, and hide all layers: of the first values of their size, each is
    tried in their place, and the one after which the graph comes nearest to the reference is taken.
    """
    seen = _angles(graph, inputs, states, rows)
    if not any(angles[0][0] <= _NEAR for _, angles in seen):
        tried = [
            _angles(graph, inputs, states, rows, {name: states[0]}) for name, _ in seen[:_TRIED]
        ]
        seen = min(tried, key=lambda each: min(x[-1] for _, x in each), default=seen)
    ends, at = list[str](), 0
    for number in range(len(states)):
        angles = {n: seen[n][1][number] for n in range(at, len(seen))}
        if not any(angle <= _NEAR for angle, _ in angles.values()):
            return None
        # The first of those that are equal, since a Cast or a Reshape may follow; embeddings that
        # are not yet scaled have the same angle.
        best = min(angles, key=lambda n: [max(x, LayerError.right) for x in angles[n]])
        ends.append(seen[best][0])
        at = best + 1
    return ends


def _angles(
    graph: StreamedEvaluation, inputs: Mapping[str, np.ndarray], states: Sequence[np.ndarray],
    rows: Sequence[int], given: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> list[tuple[str, list[tuple[float, float]]]]:  # fmt: skip
    """Return how far each value of their size is from all states, in the order of the graph.

    `given`: Values to go on with in place of those that the graph has.
    """
    seen = list[tuple[str, list[tuple[float, float]]]]()

    def compute(node: onnx.NodeProto, values: Values) -> Mapping[str, Any]:
        made = _with_sum(node, values, graph.compute_node(node, values))
        for name in made.keys() & given.keys():
            made[name] = given[name].reshape(np.shape(made[name]))
        for name, value in made.items():
            if is_float(value) and value.size == states[0].size:
                seen.append((name, [_angle(value, state, rows) for state in states]))
        return made

    graph.values(inputs, compute, kept=())
    return seen


def _sum_of(node: onnx.NodeProto) -> str:
    """Return the name of the sum that a fused norm computes, which may be no output; else ""."""
    if not node.op_type.startswith("Skip"):
        return ""
    given = node.output[3] if len(node.output) > 3 else ""
    return given or f"the sum in {node.name or node.output[0]}"


def _with_sum(
    node: onnx.NodeProto, values: Values, made: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return what a node gives, with the sum that a fused norm computes."""
    name = _sum_of(node)
    if not name or name in made:
        return dict(made)
    bias = 4 if node.op_type == "SkipLayerNormalization" else 3
    terms: list[Any] = [values[x] for x in (*node.input[:2], *node.input[bias : bias + 1]) if x]
    return {**made, name: np.sum(np.broadcast_arrays(*terms), 0)}


def _angle(found: np.ndarray, right: np.ndarray, rows: Sequence[int]) -> tuple[float, float]:
    """Return how the angles, as a sine, and the scales of two arrays differ in batch elements.

    1 stands for angles of 90 degrees and more.
    """
    a, b = found.reshape(right.shape)[list(rows)], right[list(rows)]
    of_a, of_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if not 0 < of_a * of_b < math.inf:
        return 1.0, math.inf
    cosine = float(np.vdot(a, b)) / (of_a * of_b)
    sine = math.sqrt(max(1 - cosine, 0.0) * (1 + cosine)) if cosine > 0 else 1.0
    return sine, abs(of_a / of_b - 1)


def _distance(found: Any, right: np.ndarray, rows: Sequence[int]) -> float:
    """Return the relative L2 distance in some batch elements; infinite if sizes differ."""
    if not is_float(found) or found.size != right.size:
        return math.inf
    return measure_strictly(found.reshape(right.shape)[list(rows)], right[list(rows)]).whole


def _array(value: Tensor) -> np.ndarray:
    array: np.ndarray = value.detach().double().numpy()
    return array
