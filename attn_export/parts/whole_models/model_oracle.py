"""The reference of a whole model, and how it explains the wrong outputs of a graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from attn_export.errors import GraphError, counted
from attn_export.explain.explanation import Cause, OutOfTime
from attn_export.export.subject import Subject
from attn_export.export.trees import to_numpy, to_torch
from attn_export.measures import eps, fill_ignored_rows, judged_rows, measure
from attn_export.parts.whole_models.faults.model_search import find_cause
from attn_export.parts.whole_models.layer_errors import LayerErrors, hidden_states, layer_errors
from attn_export.parts.whole_models.lora_adapter import unmerged_products
from attn_export.parts.whole_models.unit_weights import LARGE, copy_by_unit, is_by_unit
from attn_export.reference.float64_mode import widened_arrays
from attn_export.reference.notes import code_notes, reference_notes
from attn_export.reference.operations import math_backend
from attn_export.reference.oracle import WIDER, Oracle
from attn_export.reference.stored_evidence import MOST_BYTES, reduce_if_large
from attn_export.reference.ties import ORDERS, TieOrder, without_tied_rows
from attn_export.results import BASE, CHANGED, Arrays, Case, Detail, Golden, LayerError, TensorNames
from attn_export.tensorfile import is_floating

MEASURED = 3
"""The number of cases of a large model, the first ones, whose rounding is measured by random runs.
For the others, the largest relative error of those is taken."""


def is_large_model(model: nn.Module) -> bool:
    """Return whether only few cases of a model are tried."""
    return sum(parameter.numel() for parameter in model.parameters()) > LARGE


class ModelOracle(Oracle):
    """The oracle of a whole model.

    Attributes:
        tokens: The number of positions whose logits were compared.
        ties: The number of those whose two largest logits differ by less than the tolerance.
        tied: The number of rows of outputs that the order of equal scores of experts decides.
    """

    def __init__(self, subject: Subject, least_eps: float, **of_float: Any) -> None:
        super().__init__(subject, least_eps, **of_float)
        self.tokens = self.ties = self.tied = 0
        self._is_large, self._errors = is_large_model(subject.module), list[dict[str, float]]()
        self._last: tuple[Arrays, dict[str, np.ndarray]] | None = None

    def widened(self, module: nn.Module) -> nn.Module:
        """Return a copy in float64, by units if the module is."""
        if is_by_unit(module):
            return copy_by_unit(module, lambda *_: torch.float64)
        return super().widened(module)

    def golden(self, case: Case) -> Golden:
        """Return the case with its reference, and count the tokens that it decides."""
        golden = super().golden(case)
        logits, tolerance = golden.expected.get("logits"), golden.tolerance.get("logits")
        is_left_out = "logits" in {*golden.uncompared, *golden.tied} or self.budgets
        if (
            logits is not None
            and tolerance is not None
            and not is_left_out
            and self._decodes(logits)
        ):
            # Ties of a router may have taken rows from the case.
            ignored, determined = golden.case.ignored_rows, golden.determined.get("logits", ())
            rows = logits[judged_rows(logits.shape, ignored, determined)].astype(float)
            least = np.partition(rows, -2)[:, -2:]
            sizes = np.linalg.norm(rows, axis=-1)
            margins = (least[:, 1] - least[:, 0]) / np.where(sizes > 0, sizes, 1.0)
            self.tokens += len(margins)
            # Each of the two logits may be off by the error of the row.
            self.ties += int((margins <= 2 * tolerance.row).sum())
        return golden

    def _decodes(self, logits: np.ndarray) -> bool:
        """Return whether logits decide tokens: not those of classes, or of masked tokens."""
        call: Any = self.subject.module
        return logits.shape[-1] > 1 and bool(call.model.can_generate())

    def _with_ties(self, golden: Golden, reference: Arrays) -> Golden:
        """Return the golden without the rows that ties of a router decide, anew if there are any.

        A case of which too little is left is marked, so that it is left out.
        """
        if not self._ranks or not all(is_floating(array.dtype) for array in reference.values()):
            return super()._with_ties(golden, reference)
        found = without_tied_rows(golden, reference, self._ranked(golden.case, golden.eager))
        if found is None:
            marked = super()._with_ties(golden, reference)
            is_fixed = golden.case.name == BASE or golden.case.name.startswith(CHANGED)
            tied = marked.tied or {name: np.ones(t.shape, bool) for name, t in reference.items()}
            uncompared = marked.uncompared if is_fixed else golden.uncompared
            return dataclasses.replace(marked, tied=tied, uncompared=uncompared)
        case, count = found
        self.tied += count
        return self._golden(case) if count else golden

    def _ranked(self, case: Case, eager: Arrays) -> list[Arrays]:
        """Return the outputs of a float64 run with each order of nearly equal scores."""
        return [self.reference(case.inputs, mode) for mode in self._orders(eager)]

    def _orders(self, eager: Arrays) -> list[TieOrder]:
        near = WIDER * max(eps(a.dtype) for a in eager.values() if is_floating(a.dtype))
        return [TieOrder(order, near) for order in ORDERS]

    def reference(self, inputs: Arrays, order: TieOrder | None = None) -> dict[str, np.ndarray]:
        """Return the outputs of the float64 copy; those of a large model are kept for the case."""
        if order is not None or not self._is_large:
            return super().reference(inputs, order)
        if self._last is None or self._last[0] is not inputs:
            self._last = inputs, super().reference(inputs)
        return self._last[1]

    def noisy_runs(self, case: Case, eager: Arrays, *args: Any, **options: Any) -> list[Arrays]:
        """Return runs with random rounding; of a large model, for the first cases alone."""
        if not self._is_large or len(self._errors) < MEASURED:
            runs = self._noisy_runs(case, eager, *args, **options)
            if self._is_large:
                reference = self.reference(case.inputs)
                self._errors.append({
                    name: max(measure(run[name], t).row for run in runs)
                    for name, t in reference.items()
                })  # fmt: skip
            return runs
        largest = {name: max(errors[name] for errors in self._errors) for name in self._errors[0]}
        reference = self.reference(case.inputs)
        return [{name: t * (1 + largest[name]) for name, t in reference.items()}]

    def _noisy_runs(self, case: Case, eager: Arrays, *args: Any, **options: Any) -> list[Arrays]:
        return super().noisy_runs(case, eager, *args, **options)

    def _can_stack_runs(self, inputs: Arrays) -> bool:
        """Return whether several runs may be stacked along the batch axis."""
        # An encoder-decoder may run each batch element by itself, with decisions of its own.
        config: Any = getattr(self.subject.module, "config", None)
        crosses = config is not None and config.is_encoder_decoder
        # Scores of texts by images have an axis for each of the two batches.
        crosses |= {"input_ids", "pixel_values"} <= inputs.keys()
        return not self._is_large and not crosses and all(map(self.has_batch, inputs))

    def notes(self, case: Case) -> tuple[str, ...]:
        """Return notes on the reference, and on the tokens of the cases that were computed."""
        changed = self.changed(case)
        of_reference = reference_notes(self, self.subject, changed)
        calls = self.export_tests(case.inputs)
        of_code = map(Detail, code_notes(self, self.widening, changed, calls))
        return (*self._tokens_note(), *of_reference, *of_code)

    def reduce(self, folder: Path) -> tuple[str, ...]:
        """Reduce golden vectors of many bytes to some positions, and return a note."""
        return reduce_if_large(folder, MOST_BYTES)

    def _tokens_note(self) -> tuple[str, ...]:
        """Return a note on the tokens that greedy decoding takes."""
        if not self.tokens:
            return (*self._tied_note(),)
        but = f"{counted(self.ties, 'tie')} within the tolerance"
        told = f"{self.tokens} positions; where logits pass, tokens are equal, but for {but}"
        return (Detail(f"greedy tokens: {told}"), *self._tied_note())

    def _tied_note(self) -> Iterator[str]:
        if self.tied:
            yield (
                f"equal scores: {counted(self.tied, 'row')} of outputs are not compared, since the "
                "model may choose any of several experts there, whose scores are equal"
            )

    def layers(
        self, graph: Path, case: Case, names: TensorNames
    ) -> tuple[Sequence[LayerError], str]:
        """Return the error of each layer of a graph, if found. The search for causes says more."""
        with contextlib.suppress(GraphError):
            found = self.layer_errors(graph, case, names)
            return found.each if found else (), ""
        return (), ""

    def layer_errors(self, graph: Path, case: Case, names: TensorNames) -> LayerErrors | None:
        """Return the error of each layer of a graph in a case of it; None if nothing is judged."""
        inputs = {name: case.inputs[other] for name, other in names.inputs.items()}
        made: list[Arrays] = []
        modules, states = hidden_states(
            self.precise, lambda: made.append(super(ModelOracle, self).reference(inputs))
        )
        rows = [n for n in range(len(states[0]) if states else 0) if n not in case.ignored_rows]
        if not rows:
            return None
        call: Any = self.subject.module
        ends = call.entry.outputs.items()
        follows = {name for name, end in ends if end.role not in ("present", "window")}
        outputs = {names.outputs[n]: x for n, x in made[0].items() if n in follows}
        given = {names.inputs[n]: np.array(x) for n, x in inputs.items()}
        found = layer_errors(graph, given, states, outputs, rows)
        return dataclasses.replace(found, modules=modules)

    @contextlib.contextmanager
    def places(self) -> Iterator[Callable[[], str]]:
        """Yield a function that returns the path of the module that runs."""
        call: Any = self.precise
        # First, so that its products have the places of their modules.
        with unmerged_products(call.model), _places(self.precise) as place:
            yield place

    def cause(self, golden: Golden, outputs: Arrays, out_of_time: OutOfTime) -> Cause | None:
        """Return the change of the model under which it gives the outputs of a case."""
        case, names = golden.case, list(golden.expected)
        call: Any = self.precise
        # Copies: arrays of files are not writable.
        inputs = {name: array.copy() for name, array in case.inputs.items()}
        tensors, model = to_torch(widened_arrays(inputs)), call.model

        def judged(arrays: Arrays) -> Arrays:
            """Return floating outputs; rows that are not judged are those of the reference."""
            return {
                name: fill_ignored_rows(
                    arrays[name], reference, case.ignored_rows, golden.determined.get(name, ())
                )
                for name, reference in golden.expected.items()
                if is_floating(reference.dtype)
            }

        def run(changed: nn.Module) -> Arrays:
            call.model = changed
            try:
                with math_backend(self.widening):
                    return judged(to_numpy(dict(zip(names, call(**tensors), strict=True))))
            finally:
                call.model = model

        return find_cause(model, run, judged(outputs), out_of_time)


@contextlib.contextmanager
def _places(module: nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the path of the submodule that runs."""
    running: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: running.append(name.removeprefix("model."))

    def leave(*_: object) -> None:
        running.pop()

    handles = []
    for name, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(enter(name)))
        handles.append(child.register_forward_hook(leave))
    try:
        yield lambda: running[-1] if running else ""
    finally:
        for handle in handles:
            handle.remove()
