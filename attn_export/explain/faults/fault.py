"""Types of a known fault, and of a place of a graph where it may be made; shared changes."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from attn_export.explain.search import Hypothesis, Number
from attn_export.float64.attention_steps import StepChange
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

Changes = Mapping[str, StepChange]
"""What a fault does: the wrong value of each step of a place that it changes, by name."""

Compute = Callable[[Values, Changes], Mapping[str, Array]]
"""Function that computes a place with some steps changed, and returns values of the graph."""

NOTHING: Mapping[str, Any] = types.MappingProxyType({})

VERDICT = "verdict"
"""The key in `GraphPlace.given` of what is wrong, if it is not the graph or the runtime."""


@dataclasses.dataclass(frozen=True)
class GraphPlace:
    """A place of a graph, whose steps a fault may change.

    Attributes:
        name: What stands for ``{}`` in the effects of faults that are made here.
        node: The name of the node, graph input or initialiser; "" if it is everywhere.
        steps: The value of the graph that each step is, by name.
        given: What changes and effects may read beside the steps.
        compute: Computes the steps if they are no values of the graph.
    """

    name: str
    node: str
    steps: Mapping[str, str] = dataclasses.field(default_factory=dict)
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compute: Compute | None = None

    def replaced(self, values: Values, changes: Changes) -> Mapping[str, Array]:
        """Return the values of the graph that changed steps lead to, by name."""
        if self.compute is not None:
            return self.compute(values, changes)
        at = {**self.given, **{step: values.get(name) for step, name in self.steps.items()}}
        return {
            self.steps[step]: change(array_of(values, self.steps[step]), at)
            for step, change in changes.items()
        }


Locator = Callable[[Evaluation, Values], Iterable[GraphPlace]]
"""Function that finds the places of one sort in a graph, given the values of one case."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A known fault: a row of the table.

    It is made in a right graph, where it may give the wrong outputs, or in a wrong graph, where it
    may correct them.

    Attributes:
        at: Finds the places at which it may be made.
        kind: The kind of the fault, in a word or two: ``"scale"``. One that ends in
            ``"precision"`` is a fault of rounding.
        effect: Its effect as a clause: ``"the scales of {} are doubled"``.
        reading: Its name in the results of `probe`; "" if no probe tests it.
        factor: Gives effect and changes in their place, if a value is wrong by a factor.
    """

    at: Locator
    kind: str
    effect: str
    changes: Changes
    reading: str = ""
    factor: Factor | None = None


Factor = Callable[[GraphPlace, float], tuple[str, Changes]]
"""Function from a place and a factor to the effect and the changes of a value wrong by it."""

FIRST_FACTOR = 1.05
"""The factor that is tried first, from which a better one is sought."""

MOST_HEADS = 8
"""The number of query heads, from the first on, in each of which alone faults are tried."""


@dataclasses.dataclass(frozen=True)
class GraphFault(Hypothesis):
    """A fault made at a place of a graph."""

    place: GraphPlace
    changes: Changes

    @property
    def node(self) -> str:
        """The name of the node; "" if the fault is made everywhere."""
        return self.place.node

    def parts(self) -> Iterator[GraphFault]:
        """Yield the fault in one query head only; one beyond those of the node is impossible."""
        for head in range(self.place.given.get("heads", 0)):
            changes = {step: _in_head(head, change) for step, change in self.changes.items()}
            effect = f"in query head {head} alone, {self.effect}"
            yield dataclasses.replace(self, effect=effect, changes=changes, number=None)

    def values(self, evaluation: Evaluation, values: Values) -> Values:
        """Return the values of the graph with the fault, by name."""
        return evaluation.recompute(values, self.place.replaced(values, self.changes))


def made_at(place: GraphPlace, fault: Fault, factor: float = FIRST_FACTOR) -> GraphFault:
    """Return a fault at a place, wrong by a factor if it is one of a factor."""
    effect, changes, number = fault.effect, fault.changes, None
    if fault.factor is not None:
        effect, changes = fault.factor(place, factor)
        number = Number(1.0, factor, functools.partial(made_at, place, fault))
    text = effect.format(place.name, **place.given)
    return GraphFault(fault.kind, text, place, changes, number=number)


def _in_head(head: int, change: StepChange) -> StepChange:
    """Return a change that is made in one query head: of a step with an axis of heads, or of none.

    Keys and values have heads of their own, in which it cannot be made.
    """

    def changed(value: Any, at: Mapping[str, Any]) -> Array:
        H = at["queries"].shape[1]
        if head >= H:
            raise IndexError(head)
        wrong, right = (np.asarray(x) for x in (change(value, at), value))
        heads = np.arange(H) == head
        if right.ndim != 1 and (right.ndim < 4 or right.shape[1] in (1, H)):
            heads = heads.reshape(H, 1, 1)
        return np.where(heads, wrong, right)

    return changed


FaultRow = tuple[str, str, Changes]
"""Kind, effect and changes of a fault."""


def rows(at: Locator, *faults: FaultRow | tuple[str, str, Changes, str]) -> tuple[Fault, ...]:
    """Return the faults of one sort of places; the fourth element of a row is its reading."""
    return tuple(Fault(at, *row) for row in faults)


def by_factor(at: Locator, kind: str, effect: str, *steps: str) -> Fault:
    """Return the fault of steps that are wrong by a factor, the ``{factor}`` of its effect."""

    def factor(_: GraphPlace, by: float) -> tuple[str, Changes]:
        return effect.replace("{factor}", f"{by:.4g}"), dict.fromkeys(steps, times(by))

    return Fault(at, kind, effect, {}, factor=factor)


# -- changes ------------------------------------------------------------------------------------


def plain(function: Callable[[Any], Any]) -> StepChange:
    """Return the change by a function of the right value alone."""
    return lambda value, _: function(value)


def times(factor: float) -> StepChange:
    """Return the change to a multiple of the right value."""
    return lambda value, _: value * factor


def plus(by: float) -> StepChange:
    """Return the change to a value that is larger by a number."""
    return lambda value, _: value + by


def roll(by: int, axis: int) -> StepChange:
    """Return the change by which elements move along an axis, and come in again at its start."""
    return lambda value, _: np.roll(value, by, axis)


def constant(value: Any) -> StepChange:
    """Return the change to a value that is the same for all."""
    return lambda *_: value


def step(name: str) -> StepChange:
    """Return the change to the value of another step."""
    return lambda _, at: at[name]


def repeat_first(axis: int) -> StepChange:
    """Return the change by which the first slice along an axis stands for all."""

    def change(x: Array, _: object) -> Array:
        return np.broadcast_to(np.take(x, [0], axis), x.shape) if x.shape[axis] else x

    return change


def swap_neighbours(axis: int) -> StepChange:
    """Return the change that swaps elements 2i and 2i + 1 along an axis."""

    def swapped(q: Array, _: object) -> Array:
        x = np.moveaxis(q, axis, -1)
        return np.moveaxis(x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape), -1, axis)

    return swapped


def round_to_bfloat16(x: Array, _: object = None) -> Array:
    """Round an array of any shape to bfloat16; the result is float64."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


# -- places -------------------------------------------------------------------------------------


def array_of(values: Values, name: str) -> Array:
    """Return a value of any shape that must be there."""
    array = values[name]
    if array is None:
        raise ValueError(f"{name!r} has no value")
    return array


def together(parts: Sequence[Compute]) -> Compute:
    """Return a function that computes several places. They must give different values."""
    return lambda values, changes: {
        name: array for part in parts for name, array in part(values, changes).items()
    }


def node_place(node: onnx.NodeProto, name: str = "") -> GraphPlace:
    """Return the place of a node with its first output, its first input and its weight, if any."""
    steps = dict(zip(("input", "weight"), node.input[:2], strict=False))
    return GraphPlace(name, node.name, {"output": node.output[0], **steps})
