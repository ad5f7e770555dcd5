"""Types of a known fault, of a place where it may be made, and of evidence; shared changes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from attn_export.float64.attention_steps import StepChange
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

Changes = Mapping[str, StepChange]
"""What a fault does: the wrong value of each step of a place that it changes, by name."""

Compute = Callable[[Values, Changes], Mapping[str, Array]]
"""Function that computes a place with some steps changed, and returns values of the graph."""

NOTHING: Mapping[str, Any] = types.MappingProxyType({})


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
    """

    at: Locator
    kind: str
    effect: str
    changes: Changes
    reading: str = ""


Maker = Callable[[GraphPlace, float], Fault]
"""Function from a place and a factor to the fault of a value that is wrong by this factor."""

Fitted = tuple[Locator, Maker]


@dataclasses.dataclass(frozen=True)
class Match:
    """A fault made at a place, and how well it explains the error.

    Attributes:
        unexplained: The share of the error that it does not explain; 0 if it explains all.
        only: The rows in which it is made, as the end of a sentence; "" if in all.
    """

    fault: Fault
    place: GraphPlace
    unexplained: float = 1.0
    exact: bool = False
    only: str = ""

    @property
    def kind(self) -> str:
        """The kind of the fault."""
        return self.fault.kind

    @property
    def effect(self) -> str:
        """The effect of the fault at this place."""
        return self.fault.effect.format(self.place.name, **self.place.given)

    @property
    def node(self) -> str:
        """The name of the node; "" if the fault is made everywhere."""
        return self.place.node

    @property
    def is_rounding(self) -> bool:
        """Whether it is a fault of rounding, which is not repeated bit by bit."""
        return self.kind.endswith("precision")

    def outputs(self, evaluation: Evaluation, values: Values) -> dict[str, Array]:
        """Return the outputs of the graph with the fault, by name."""
        replaced = self.place.replaced(values, self.fault.changes)
        return evaluation.outputs_of(evaluation.recompute(values, replaced))


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Right and actual outputs of one case.

    Attributes:
        values: All values of the graph without a fault, in float64.
        right: The outputs of the graph without a fault, in float64.
        allowed: The relative error of each output that the judge allows, by name, if it passes the
            actual outputs. A cause must not predict a larger one.
    """

    values: Values
    right: Mapping[str, Array]
    actual: Mapping[str, Array]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    allowed: Mapping[str, float] = dataclasses.field(default_factory=dict)


FaultRow = tuple[str, str, Changes]
"""Kind, effect and changes of a fault."""


def rows(at: Locator, *faults: FaultRow | tuple[str, str, Changes, str]) -> tuple[Fault, ...]:
    """Return the faults of one sort of places; the fourth element of a row is its reading."""
    return tuple(Fault(at, *row) for row in faults)


def fitted(at: Locator, kind: str, effect: str, *steps: str) -> Fitted:
    """Return the fault of steps that are wrong by a factor, the ``{factor}`` of its effect."""

    def make(_: GraphPlace, factor: float) -> Fault:
        text = effect.replace("{factor}", f"{factor:.4g}")
        return Fault(at, kind, text, dict.fromkeys(steps, times(factor)))

    return at, make


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


WRONG_SCALES: Mapping[str, StepChange] = {
    "halved": times(0.5), "doubled": times(2), "squared": plain(np.square),
    "rounded to bfloat16": round_to_bfloat16,
}  # fmt: skip
"""Wrong scales of any tensor of integers."""


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
