"""Decoders whose weights are integers: rounded as the model is loaded, and stored in the graph.

The truth of these, and of decoders with rounded caches, knows the model before, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attn_export.bundle.quality_vectors import CASES, MOST_ROWS
from attn_export.errors import ExportError, first_few
from attn_export.export.quantised_linears import IntegerLinears, QuantisedLinears
from attn_export.export.subject import Subject
from attn_export.interface import BATCH, QUERIES, Shape
from attn_export.parts.whole_models.build.rewrites import rewrite_weights
from attn_export.parts.whole_models.model_oracle import ModelOracle
from attn_export.parts.whole_models.unit_oracle import UnitOracle
from attn_export.parts.whole_models.unit_weights import (
    ChangedWeights,
    is_by_unit,
    is_placeholder,
)
from attn_export.quality import Budget
from attn_export.quantiser import QuantisedWeight
from attn_export.results import Arrays, Case, Golden
from attn_export.temp_folders import in_file

BUDGET_OF_CACHE = Budget("sqnr", 50.0)
"""The default budget of a cache in float16."""


class CheckpointWeights(IntegerLinears):
    """The weights of a model that are integers in its checkpoint."""

    def __init__(self, model: Any, integers: Mapping[str, QuantisedWeight]) -> None:
        super().__init__()
        for path, weight in integers.items():
            place, _, name = path.rpartition(".")
            self._places.append((model.get_submodule(place), name, weight, True))

    def rewrite(self, model: ir.Model) -> None:
        """Pack products, and store the weights of a graph that are integers as these."""
        rewrite_weights(model, self.located().kind_of)
        if left := self.store(model):
            raise ExportError(
                f"the graph reads {first_few(left)} in another way than products do, and the "
                "checkpoint holds integers; give the checkpoint in full precision"
            )


class QuantisedWeights(QuantisedLinears):
    """The weights of a model's linear layers, rounded in place.

    An output layer that shares the weight of the embeddings gets one of its own.
    """

    def __init__(self, model: Any, dtype: str) -> None:
        self._changed, self.dtype = ChangedWeights(model) if is_by_unit(model) else None, dtype
        super().__init__(model, dtype, by_input=(Conv1D,), head=model.get_output_embeddings())

    def read(self, layer: nn.Module, name: str) -> Tensor:
        """Return a weight of the module, which may lie in the checkpoint."""
        if self._changed and is_placeholder(layer.get_parameter(name)):
            return self._changed.read(layer, name)
        return super().read(layer, name)

    def replace(
        self, layer: nn.Module, name: str, weight: QuantisedWeight, *, by_output: bool
    ) -> QuantisedWeight:
        """Let a layer have a weight that is rounded; if it is large, its integers lie in a file."""
        if not (self._changed and is_placeholder(layer.get_parameter(name))):
            return super().replace(layer, name, weight, by_output=by_output)
        stored = dataclasses.replace(
            weight, integers=in_file(weight.integers), scales=in_file(weight.scales)
        )

        def rounded(rows: slice) -> Tensor:
            exact = stored.by_output(rows) if by_output else stored.dequantised()[rows]
            return torch.from_numpy(exact)

        self._changed.change(layer, name, rounded)
        return stored

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Let the model have its weights before rounding in this block."""
        with super().as_before(), self._changed.as_before() if self._changed else nullcontext():
            yield

    def rewrite(self, model: ir.Model) -> None:
        """Pack products, and store the weights of a graph that are rounded as integers."""
        rewrite_weights(model, self.located().kind_of)
        self.store(model)


class _QuantisedModelOracle(ModelOracle):
    """The source of the truth of a model with rounded weights or caches, which knows those before.

    `weights`: The rounded weights, if there are any.
    """

    def __init__(self, subject: Subject, weights: QuantisedWeights | None, *of_units: Any) -> None:
        super().__init__(subject, 0.0, *of_units)
        self.exactly = [name for name in subject.outputs if name.startswith("present_")]
        self._weights = weights

    def noisy_runs(self, case: Case, eager: Arrays, *args: Any, **options: Any) -> list[Arrays]:
        """Return runs with random rounding, in which values near a tie are rounded either way."""
        call: Any = self.precise
        if call.rounds:
            options["settled"] = call.rounds.drawing
        return super().noisy_runs(case, eager, *args, **options)

    def _measured_cases(self, goldens: Sequence[Golden]) -> list[int]:
        """Return the indices of the cases in which the distance is measured."""
        all_sizes = [golden.case.sizes for golden in goldens]
        tokens = {i: sizes[BATCH] * sizes[QUERIES] for i, sizes in enumerate(all_sizes)}
        few = [number for number, count in tokens.items() if count <= MOST_ROWS]
        return sorted(sorted(few, key=lambda number: -tokens[number])[:CASES])

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


class _QuantisedUnitOracle(_QuantisedModelOracle, UnitOracle):
    """The source of the truth of a model by units with rounded weights."""


def oracle_of_integers(
    subject: Subject, weights: QuantisedWeights | None, axes: Mapping[str, Shape]
) -> ModelOracle:
    """Return the source of the truth of a model with rounded weights or caches.

    `axes`: The shape of each output; dynamic axes by name.
    """
    if is_by_unit(subject.module):
        return _QuantisedUnitOracle(subject, weights, axes)
    return _QuantisedModelOracle(subject, weights)
