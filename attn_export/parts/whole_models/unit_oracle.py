"""The reference of a model by units: the runs of all cases pass each unit together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.errors import GraphError, counted
from attn_export.export.subject import Subject
from attn_export.export.trees import to_numpy, to_torch
from attn_export.heap import give_back
from attn_export.interface import Shape
from attn_export.parts.whole_models.layer_errors import recorded_layer, says
from attn_export.parts.whole_models.model_oracle import MEASURED, ModelOracle
from attn_export.parts.whole_models.unit_weights import in_step, is_by_unit, largest_unit
from attn_export.reference.decisions import Decisions
from attn_export.reference.float64_mode import widened_arrays
from attn_export.reference.notes import ChangedInputs
from attn_export.reference.operations import RoundingRecorder, math_backend
from attn_export.reference.ties import ORDERS, TieOrder
from attn_export.reference.tolerance import run_count
from attn_export.results import BASE, Arrays, Case, Golden, LayerError, TensorNames
from attn_export.tensorfile import is_floating, numpy_dtype

_LEAST_HELD, _MOST_HELD = 2**27, 2**30
"""The bytes of outputs of the runs that are made together, if they are of several cases: twice as
many as the weights of the largest unit take in float64, within these limits."""


def oracle_of_model(
    subject: Subject, least_eps: float, axes: Mapping[str, Shape], **of_float: Any
) -> ModelOracle:
    """Return the oracle of a whole model.

    `axes`: The shape of each output; dynamic axes by name.
    """
    if is_by_unit(subject.module) and not of_float:
        return UnitOracle(subject, least_eps, axes)
    return ModelOracle(subject, least_eps, **of_float)


def _say(phase: Callable[[str], None], about: str, number: int) -> None:
    phase(f"{about} {number + 1} of the model")


@dataclasses.dataclass
class _Runs:
    """What the runs of a case gave, and what some of them take from the first one.

    Attributes:
        eager: The outputs of the module itself.
        reference: Those of the float64 copy.
        noisy: Those of runs with random rounding.
        further: Those of a further run, which some oracles make.
        ranked: Those of float64 runs with each order of nearly equal scores.
        decisions: See `Decisions.made`.
        steps: See `RoundingRecorder.steps`.
    """

    decisions: list[Any]
    steps: list[tuple[str, float]]
    eager: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    reference: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    noisy: list[Arrays] = dataclasses.field(default_factory=list)
    further: Arrays = dataclasses.field(default_factory=dict)
    ranked: list[Arrays] = dataclasses.field(default_factory=list)


class UnitOracle(ModelOracle):
    """The oracle of a model that holds the weights of one unit at a time."""

    def __init__(self, subject: Subject, least_eps: float, axes: Mapping[str, Shape]) -> None:
        # A run that restored it would take weights away from other runs.
        super().__init__(subject.having(restores_state=False), least_eps)
        self._axes = axes
        self._changed: ChangedInputs | None = None
        self._export_tests: Sequence[str] | None = None
        self._made = dict[int, _Runs]()  # by the id of inputs

    def goldens(self, cases: Sequence[Case], phase: Callable[[str], None]) -> Iterator[Golden]:
        """Yield each case as `golden` returns it; `phase` is told which part of the model runs."""
        for group in self._groups(cases):
            # The inputs are alive as long as the cases, so that no others have their ids.
            runs = [run for case, noisy in group for run in self._runs_of(case, noisy)]
            runs += [run for case, _ in group for run in self.further_runs(case)]
            about = f"float64 reference of {counted(len(group), 'case')}, part"
            in_step(runs, functools.partial(_say, phase, about))
            if self._ranks:  # known by now
                ranked = [run for case, _ in group for run in self._ranked_runs(case)]
                in_step(ranked, functools.partial(_say, phase, f"ties of experts: {about}"))
            for case, _ in group:
                yield self.golden(case)
                if case.name != BASE:  # on which there are notes
                    del self._made[id(case.inputs)]
            give_back()

    def references(self, inputs: Sequence[Arrays]) -> list[Arrays]:
        """Return the outputs of several float64 runs, which are made together."""
        missing = [each for each in inputs if id(each) not in self._made]
        in_step([run for each in missing for run in self._runs_with(each)])
        return [self._made.pop(id(each)).reference for each in inputs]

    def changed(self, case: Case) -> ChangedInputs:
        """Return changed inputs of the case of which there are notes, the same at each call."""
        if self._changed is None or self._changed.case is not case:
            self._changed = super().changed(case)
        return self._changed

    def export_tests(self, inputs: Arrays) -> Sequence[str]:
        """Return what `find_export_tests` finds in a run, which was made with those of the case."""
        return super().export_tests(inputs) if self._export_tests is None else self._export_tests

    def further_runs(self, case: Case) -> Iterable[Callable[[], None]]:
        """Yield functions that make further runs of a case, beside those of its reference.

        Those of the base case are for notes on the model.
        """
        if case.name != BASE:
            return
        for inputs in self.changed(case).all:
            yield from self._runs_with(inputs)

        def find() -> None:
            self._export_tests = super(UnitOracle, self).export_tests(case.inputs)

        yield find

    def _ranked_runs(self, case: Case) -> Iterator[Callable[[], None]]:
        made = self._made[id(case.inputs)]

        def run(order: TieOrder) -> None:
            made.ranked.append(super(ModelOracle, self).reference(case.inputs, order))

        if all(is_floating(array.dtype) for array in made.eager.values()):
            yield from (functools.partial(run, order) for order in self._orders(made.eager))

    def _ranked(self, case: Case, eager: Arrays) -> list[Arrays]:
        made = self._made.get(id(case.inputs))
        return (made.ranked if made else []) or super()._ranked(case, eager)

    def _runs_with(self, inputs: Arrays) -> Iterator[Callable[[], None]]:
        return self._runs_of(Case("", "", {}, inputs, ""), 0)

    def _references_before(self, inputs: Sequence[Arrays]) -> list[Arrays]:
        self._made.clear()  # they are of the weights after rounding
        return self.references(inputs)  # the copy in float64 reads the weights before rounding, too

    def _groups(self, cases: Sequence[Case]) -> Iterator[list[tuple[Case, int]]]:
        """Yield the cases whose runs are made together, with the number of random runs of each."""
        group, held = list[tuple[Case, int]](), 0
        unit = 16 * largest_unit(self.subject.module)
        most = min(max(unit, _LEAST_HELD), _MOST_HELD)
        for number, case in enumerate(cases):
            like = self._like_outputs(case)
            noisy = run_count(like, case.contents)[1] if number < MEASURED else 0
            for_notes = 2 * len(self.changed(case).all) if case.name == BASE else 0
            runs = 3 + noisy + for_notes + len(ORDERS) * self._ranks
            size = runs * sum(8 * array.size for array in like.values())
            if group and held + size > most:
                yield group
                group, held = [], 0
            group.append((case, noisy))
            held += size
        yield group

    def _runs_of(self, case: Case, noisy: int) -> Iterator[Callable[[], None]]:
        """Yield functions that make the runs of a case: first that whose decisions others take."""
        types = self.subject.inputs
        tensors = {n: x.to(types[n].dtype) for n, x in to_torch(case.inputs).items()}
        decisions, steps = Decisions(tensors.values()), RoundingRecorder()
        made = self._made[id(case.inputs)] = _Runs(decisions.made, steps.steps)

        def eager() -> None:
            modes = decisions, *((steps,) if self._computes_in_float16 else ())
            with math_backend(*modes):
                outputs = self.subject.call(self.subject.module, tensors)
            made.eager = to_numpy(outputs)

        def reference() -> None:
            made.reference = super(ModelOracle, self).reference(case.inputs)

        def noise(number: int) -> None:
            made.noisy.append(run(number, widened_arrays(case.inputs)))

        yield from (eager, reference)
        if noisy:
            run = self.noisy_run(case, self._like_outputs(case))
            yield from (functools.partial(noise, number) for number in range(noisy))

    def _like_outputs(self, case: Case) -> dict[str, np.ndarray]:
        """Return arrays of the types and shapes of the outputs of a case, which take no memory."""
        call: Any = self.subject.module
        return {
            name: np.broadcast_to(
                np.zeros((), numpy_dtype(call.entry.outputs[name].dtype)),
                [case.sizes.get(x, 1) if isinstance(x, str) else x for x in shape],
            )
            for name, shape in self._axes.items()
        }

    def eager(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs of the module itself."""
        made = self._made.get(id(inputs))
        return made.eager if made else super().eager(inputs)

    def reference(self, inputs: Arrays, order: TieOrder | None = None) -> dict[str, np.ndarray]:
        """Return the outputs of the float64 copy."""
        made = self._made.get(id(inputs)) if order is None else None
        return made.reference if made else super().reference(inputs, order)

    def layers(
        self, graph: Path, case: Case, names: TensorNames
    ) -> tuple[Sequence[LayerError], str]:
        """Return the error of each layer of a graph in a case of it, and what that says."""
        unknown = "the model is too large for a search; its layers were not found in the graph"
        try:
            found = self.layer_errors(graph, case, names)
        except GraphError as error:
            return (), f"its layers are not compared: {error}"
        if found is None or not found.each:
            return (), unknown
        text = says(found.each)
        if found.wrong is not None and not case.ignored_rows:  # whose values may differ
            inputs = {name: case.inputs[other] for name, other in names.inputs.items()}
            where = self.precise, found.modules, found.wrong
            with self.places() as place, recorded_layer(*where, place, found.most) as steps:
                super(ModelOracle, self).reference(inputs)
            text += found.first_wrong_node(steps)
        return found.each, text

    def _noisy_runs(self, case: Case, eager: Arrays, *args: Any, **options: Any) -> list[Arrays]:
        made = self._made.get(id(case.inputs))
        return (made.noisy if made else []) or super()._noisy_runs(case, eager, *args, **options)

    def _decisions(self, inputs: Arrays) -> Callable[[Any], AbstractContextManager[Any]]:
        made = self._made.get(id(inputs))
        if made is None:
            return super()._decisions(inputs)
        # The list is filled unit by unit, ahead of those that read it.
        return lambda tensors: Decisions(tensors.values(), made.decisions)

    def _rounding_steps(self, inputs: Arrays) -> Sequence[tuple[str, float]]:
        made = self._made.get(id(inputs))
        return made.steps if made else super()._rounding_steps(inputs)
