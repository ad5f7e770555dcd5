"""Models whose weights are integers: rounded as the model is loaded, and stored in the graph.

The reference of these, and of decoders with rounded caches, knows the model before, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attn_export.bundle.quality_vectors import CASES, MOST_ROWS
from attn_export.errors import ExportError, first_few
from attn_export.export.given_inputs import OWN
from attn_export.export.quantised_linears import WIDEST, IntegerLinears, QuantisedLinears
from attn_export.export.subject import Subject
from attn_export.export.trees import to_numpy, to_torch
from attn_export.interface import BATCH, QUERIES, Shape
from attn_export.measures import fill_ignored_rows, measure
from attn_export.parts.whole_models.build.fitted_weights import Fit
from attn_export.parts.whole_models.build.rewrites import rewrite_weights
from attn_export.parts.whole_models.model_oracle import ModelOracle
from attn_export.parts.whole_models.unit_oracle import UnitOracle
from attn_export.parts.whole_models.unit_weights import ChangedWeights, is_by_unit, is_placeholder
from attn_export.parts.whole_models.weight_losses import Product, WeightLosses
from attn_export.quality import Budget, Quality
from attn_export.quantiser import SEARCH, QuantisedWeight
from attn_export.reference.float64_mode import widened_arrays
from attn_export.reference.operations import math_backend
from attn_export.reference.oracle import Oracle
from attn_export.results import Arrays, Case, Golden
from attn_export.runtimes.run_options import Progress
from attn_export.schema import Tolerance
from attn_export.temp_folders import in_file

BUDGET_OF_CACHE = Budget("sqnr", 50.0)
"""The default budget of a cache in float16."""


class _ModelLinears(IntegerLinears):
    """Weights of a model's linear layers that are integers in its graphs.

    Attributes:
        rounds_inputs: Whether products with them round their inputs to 8 bits.
    """

    rounds_inputs: bool

    def products(self, model: nn.Module) -> Iterator[Product]:
        """Yield the products with integers in the model, or in what holds it."""
        paths = {id(module): path for path, module in model.named_modules()}
        for layer, _, weight, _ in self._places:
            yield self._product(paths[id(layer)], weight)

    def _product(self, path: str, weight: QuantisedWeight) -> Product:
        block = (self.rounds_inputs and weight.product_block) or 0
        inputs, outputs = weight.integers.shape
        rows = functools.partial(_rows, weight)
        return Product(path, rows, (outputs, inputs), block, weight.stored_bytes, weight.order)


class CheckpointWeights(_ModelLinears):
    """The weights of a model that are integers in its checkpoint.

    `may_round`: Whether products that MatMulNBits computes round their inputs.
    """

    def __init__(
        self, model: Any, integers: Mapping[str, QuantisedWeight], *, may_round: bool
    ) -> None:
        super().__init__()
        for path, weight in integers.items():
            place, _, name = path.rpartition(".")
            self._places.append((model.get_submodule(place), name, weight, True))
        self.rounds_inputs = may_round and any(x.product_block for x in integers.values())

    def rewrite(self, model: ir.Model) -> None:
        """Pack products, and store the weights of a graph that are integers as these."""
        rewrite_weights(model, self.located().kind_of)
        if left := self.store(model):
            raise ExportError(
                f"the graph reads {first_few(left)} in another way than products do, and the "
                "checkpoint holds integers; give the checkpoint in full precision"
            )


class QuantisedWeights(_ModelLinears, QuantisedLinears):
    """The weights of a model's linear layers, rounded in place.

    An output layer that shares the weight of the embeddings gets one of its own.
    """

    def __init__(
        self,
        model: Any,
        dtype: str,
        *,
        rounds_inputs: bool = False,
        keep: Mapping[str, str] | None = None,
        rounding: str = SEARCH,
    ) -> None:
        self.rounds_inputs = rounds_inputs
        self._changed = ChangedWeights(model) if is_by_unit(model) else None
        head = model.get_output_embeddings()
        super().__init__(model, dtype, by_input=(Conv1D,), head=head, keep=keep, rounding=rounding)

    def read(self, layer: nn.Module, name: str) -> Tensor:
        """Return a weight of the module, which may lie in the checkpoint."""
        if self._changed and is_placeholder(layer.get_parameter(name)):
            return self._changed.read(layer, name)
        return super().read(layer, name)

    def replace(
        self, layer: nn.Module, name: str, weight: QuantisedWeight, by_output: bool
    ) -> QuantisedWeight:
        """Let a layer have a weight that is rounded; if it is large, its integers lie in a file."""
        if not (self._changed and is_placeholder(layer.get_parameter(name))):
            return super().replace(layer, name, weight, by_output)
        stored = _in_files(weight)

        def rounded(rows: slice) -> Tensor:
            exact = stored.by_output(rows) if by_output else stored.dequantised()[rows]
            return torch.from_numpy(exact)

        self._changed.change(layer, name, rounded)
        return stored

    def products_in(self, dtype: str) -> Iterator[Product]:
        """Yield the same products with integers of another type, while the model is as before."""
        for path, places in self.places.items():
            for layer, name in places:
                weight = self.form(path, layer, name, dtype)
                yield self._product(path, _in_files(weight) if self._changed else weight)

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Let the model have its weights before rounding in this block."""
        with super().as_before(), self._changed.as_before() if self._changed else nullcontext():
            yield

    def undo(self) -> None:
        """Let the model have its weights before rounding again; these integers are then no use."""
        super().undo()
        if self._changed:
            self._changed.undo()

    def rewrite(self, model: ir.Model) -> None:
        """Pack products, and store the weights of a graph that are rounded as integers."""
        rewrite_weights(model, self.located().kind_of)
        self.store(model)


_ROUNDS_INPUTS: ContextVar[bool] = ContextVar("rounds_inputs", default=False)
"""Whether the products of this run round their inputs to 8 bits."""

_MOST_OWN = 4096
"""The most tokens of the user's own inputs in which the distance is measured."""

_LEVELS_APART = 2.0
"""The factor on the distance of the model whose products round their inputs, for graphs that do."""


def _in_files(weight: QuantisedWeight) -> QuantisedWeight:
    integers, scales = in_file(weight.integers), in_file(weight.scales)
    return dataclasses.replace(weight, integers=integers, scales=scales)


def _rows(weight: QuantisedWeight, outputs: slice) -> Tensor:
    return torch.from_numpy(weight.by_output(outputs))


def _round_input(product: Product, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Round the input of a product, if this run does so."""
    x, *others = given
    return (product.round_input(x), *others) if _ROUNDS_INPUTS.get() else None


class _QuantisedModelOracle(ModelOracle):
    """The oracle of a model with rounded weights or caches, which knows those before.

    `weights`: Those that are rounded, or integers in the checkpoint, if there are any.
    """

    def __init__(self, subject: Subject, weights: _ModelLinears | None, *of_units: Any) -> None:
        super().__init__(subject, 0.0, *of_units)
        self.exactly = [name for name in subject.outputs if name.startswith("present_")]
        self._weights = weights if isinstance(weights, QuantisedWeights) else None
        self._rounds_inputs = subject.rounds_inputs
        for product in weights.products(subject.module) if weights else ():
            if product.block:
                own = self.precise.get_submodule(product.path)
                own.register_forward_pre_hook(functools.partial(_round_input, product))

    def golden(self, case: Case) -> Golden:
        """Return the case with its reference, and the tolerance of graphs that round inputs."""
        golden = super().golden(case)
        if not self._rounds_inputs:
            return golden
        with self._threads_for(case):
            run = self.with_rounded_inputs(golden.case.inputs)
        return dataclasses.replace(
            golden, rounded={n: _apart(golden, n, run[n]) for n in golden.expected}
        )

    def with_rounded_inputs(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a float64 run whose products round their inputs."""
        token = _ROUNDS_INPUTS.set(True)
        try:  # it decides by itself, as graphs do
            with math_backend(self.widening):
                outputs = self.subject.call(self.precise, to_torch(widened_arrays(inputs)))
            return to_numpy(outputs)
        finally:
            _ROUNDS_INPUTS.reset(token)

    def noisy_runs(self, case: Case, eager: Arrays, *args: Any, **options: Any) -> list[Arrays]:
        """Return runs with random rounding, in which values near a tie are rounded either way."""
        call: Any = self.precise
        if call.rounds:
            options["settled"] = call.rounds.drawing
        return super().noisy_runs(case, eager, *args, **options)

    def quality(
        self, folder: Path, goldens: Sequence[Golden], budgets: Sequence[Budget]
    ) -> tuple[Quality | None, Sequence[Golden]]:
        """Return the distance from the model before rounding, and where it comes from."""
        quality, goldens = super().quality(folder, goldens, budgets)
        if quality is None or self._weights is None:
            return quality, goldens
        quality = dataclasses.replace(quality, kept=self._weights.kept)
        chosen = [goldens[number].case.inputs for number in self._measured_cases(goldens)]
        with self._as_before():
            losses, rounds = self.weight_losses(chosen[: 1 if self._is_large else None])
            more = []
            if rounds:
                rounds.is_used = True
                every = losses.outputs([losses.products], rounds_inputs=self._rounds_inputs)
                more.append(losses.loss("with a float16 cache", every[0]))
                rounds.is_used = False
            return losses.split(quality, rounds_inputs=self._rounds_inputs, more=more), goldens

    def weight_losses(self, cases: Sequence[Arrays]) -> tuple[WeightLosses, Any]:
        """Return what measures the losses of weights, and what rounds caches, if anything does.

        The model has its weights before rounding meanwhile.
        """
        assert self._weights is not None
        of_float = self if is_by_unit(self.subject.module) else Oracle(self.subject)
        copy: Any = of_float.precise

        def call(inputs: Arrays) -> Arrays:
            with math_backend(of_float.widening):
                outputs = self.subject.call(copy, to_torch(widened_arrays(inputs)))
            return to_numpy(outputs)

        own: Any = self.subject.module
        products = list(self._weights.products(own.model))
        return WeightLosses(copy.model, call, products, cases), copy.rounds

    def fitted(
        self, cases: Sequence[Case], budgets: Sequence[Budget], progress: Progress
    ) -> tuple[dict[str, str], str]:
        """Return the types of weights with which budgets hold, and a note; the others are as now.

        `cases`: Those of the build.
        """
        with self.fitting([cases[at].inputs for at in _measured(cases)], budgets, progress) as fit:
            kept = fit.kept()
        return kept, fit.note(kept)

    @contextlib.contextmanager
    def fitting(
        self, inputs: Sequence[Arrays], budgets: Sequence[Budget], progress: Progress
    ) -> Iterator[Fit]:
        """Yield the search for types of weights with which budgets hold for some inputs."""
        weights = self._weights
        assert weights is not None
        with self._as_before():
            progress.phase("fitting types of weights")
            losses, _ = self.weight_losses(inputs)
            forms = {weights.dtype: losses.products}
            if weights.dtype != WIDEST:
                forms[WIDEST] = {x.path: x for x in weights.products_in(WIDEST)}
            yield Fit(losses, forms, budgets, self._rounds_inputs, progress)

    def _measured_cases(self, goldens: Sequence[Golden]) -> list[int]:
        """Return the indices of the cases in which the distance is measured."""
        return _measured([golden.case for golden in goldens])

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Let the model have its weights before rounding, and no rounded cache, in this block."""
        call: Any = self.subject.module
        with contextlib.ExitStack() as stack:
            if self._weights:
                stack.enter_context(self._weights.as_before())
            if call.rounds:
                call.rounds.is_used = False
            try:
                yield
            finally:
                if call.rounds:
                    call.rounds.is_used = True


def _measured(cases: Sequence[Case]) -> list[int]:
    """Return the indices of the cases in which the distance is measured: the user's, if any."""
    tokens = {at: case.sizes[BATCH] * case.sizes[QUERIES] for at, case in enumerate(cases)}
    own = [
        at for at, case in enumerate(cases) if case.name.startswith(OWN) and "_to_" not in case.name
    ]
    if own:
        before = itertools.accumulate(tokens[at] for at in own)
        return [at for at, count in zip(own, before, strict=True) if count <= _MOST_OWN] or own[:1]
    few = [number for number, count in tokens.items() if count <= MOST_ROWS]
    return sorted(sorted(few, key=lambda number: -tokens[number])[:CASES])


def _apart(golden: Golden, name: str, run: np.ndarray) -> Tolerance | None:
    """Return the tolerance of an output of graphs that round inputs, as this run did."""
    tolerance, reference = golden.tolerance[name], golden.expected[name]
    if tolerance is None:
        return None
    ignored = golden.case.ignored_rows, golden.determined.get(name, ())
    found = measure(fill_ignored_rows(run, reference, *ignored), reference)
    return Tolerance(
        max(tolerance.whole, _LEVELS_APART * found.whole),
        max(tolerance.row, _LEVELS_APART * found.row),
    )


class _QuantisedUnitOracle(_QuantisedModelOracle, UnitOracle):
    """The oracle of a model by units with rounded weights."""

    def with_rounded_inputs(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a float64 run whose products round their inputs."""
        made = self._made.get(id(inputs))
        return (made and made.further) or super().with_rounded_inputs(inputs)

    def further_runs(self, case: Case) -> Iterator[Callable[[], None]]:
        """Yield functions that make further runs of a case, beside those of its reference."""
        yield from super().further_runs(case)
        make = super().with_rounded_inputs

        def run() -> None:
            self._made[id(case.inputs)].further = make(case.inputs)

        if self._rounds_inputs:
            yield run


def oracle_of_integers(
    subject: Subject, weights: _ModelLinears | None, axes: Mapping[str, Shape]
) -> ModelOracle:
    """Return the oracle of a model with rounded weights or caches.

    `axes`: The shape of each output; dynamic axes by name.
    """
    if is_by_unit(subject.module):
        return _QuantisedUnitOracle(subject, weights, axes)
    return _QuantisedModelOracle(subject, weights)
