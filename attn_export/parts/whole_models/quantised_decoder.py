"""Decoders whose weights are integers: rounded as the model is loaded, and stored in the graph.

The truth of these, and of decoders with rounded caches, knows the model before, too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attn_export.bundle.quality_vectors import logit_distance, output_distances, write_quality
from attn_export.errors import ExportError, UsageError, WeightsError, counted
from attn_export.export.mapped_weights import PARTS
from attn_export.export.subject import Subject
from attn_export.graph.quantised_weights import store_integers
from attn_export.parts.whole_models.model_oracle import ModelOracle
from attn_export.parts.whole_models.model_rewrites import rewrite_weights
from attn_export.quality import Budget, Quality
from attn_export.quantiser import QuantisedWeight, quantise
from attn_export.results import Arrays, Case, Golden
from attn_export.spec.inputs import BATCH, QUERIES
from attn_export.spec.low_precision import FLOAT16
from attn_export.tensorfile import is_floating
from attn_export.truth.stored_evidence import MOST_BYTES

_BLOCKS = {"int4": (32, 16), "int8": (0,)}
"""The numbers of inputs that may share a scale, by the dtype of weights; 0 for all of an output."""

_LEAST_SQNR = {"int4": 6.0, "int8": 20.0, FLOAT16: 50.0}
"""The default budget in dB. Logits sum up what all layers round, and random weights show most."""

_MOST_ROWS, _CASES = 64, 4
"""The most tokens of a case, and the number of cases, in which the distance is measured."""


class QuantisedWeights:
    """The weights of a model's linear layers, rounded in place.

    An output layer that shares the weight of the embeddings gets one of its own.

    Attributes:
        floats: The weights before, by the name of the parameter.
        budget: The limit of the distance from them, if the user gives none.
        notes: What was rounded, for the report.
    """

    def __init__(self, model: Any, dtype: str) -> None:
        if dtype not in _BLOCKS:
            raise UsageError(
                f"weights_dtype of a whole model is {', '.join(_BLOCKS)} or none; got {dtype!r}"
            )
        self.budget = Budget("sqnr", _LEAST_SQNR[dtype])
        self.floats: dict[str, Tensor] = {}
        self._integers: dict[int, QuantisedWeight] = {}
        head = model.get_output_embeddings()
        places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for path, layer in model.named_modules():
            is_linear = isinstance(layer, nn.Linear | Conv1D)
            if is_linear and (layer is head or places[id(layer.weight)] == 1):
                self._round(f"{path}.weight", layer, dtype)
        if not self.floats:
            raise ExportError(
                f"{model.config.model_type} has no linear layers to quantise; leave out "
                "--weights-dtype"
            )
        blocks = sorted({x.block for x in self._integers.values() if x.is_blocked})
        block = f"in blocks of {' and '.join(map(str, blocks))}" if blocks else "by output"
        rounded, total = (
            sum(x.numel() for x in each) for each in (self.floats.values(), model.parameters())
        )
        self.notes = (
            f"{counted(len(self.floats), 'weight')}, {rounded / total:.0%} of all numbers, are "
            f"{dtype} {block}; embeddings, norms and biases stay floating",
        )

    def _round(self, name: str, layer: nn.Linear | Conv1D, dtype: str) -> None:
        weight = layer.weight.detach()
        by_output = isinstance(layer, nn.Linear)  # [out, in]
        rows = weight.numpy().T if by_output else weight.numpy()
        block = next((b for b in _BLOCKS[dtype] if not b or len(rows) % b == 0), None)
        if block is None:
            raise ExportError(
                f"{name} has {len(rows)} inputs, no multiple of 16; give --weights-dtype int8"
            )
        try:
            integers = quantise(rows, dtype, block, symmetric=True)
        except ValueError as error:
            raise WeightsError(f"the weight {name} cannot be quantised: {error}") from error
        exact = integers.dequantised()
        self.floats[name] = weight
        layer.weight = nn.Parameter(
            torch.from_numpy(np.ascontiguousarray(exact.T) if by_output else exact),
            requires_grad=False,
        )
        self._integers[layer.weight.data_ptr()] = integers

    def rewrite(self, model: ir.Model) -> None:
        """Pack products, and store the weights of a graph that are rounded as integers."""
        rewrite_weights(model)
        stored: dict[str, QuantisedWeight] = {}
        for name, value in model.graph.initializers.items():
            if value.dtype != ir.DataType.FLOAT or value.const_value is None:
                continue
            arrays = value.meta.get(PARTS) or [value.const_value.numpy()]
            of = [self._integers.get(a.__array_interface__["data"][0]) for a in arrays]
            parts = [each for each in of if each is not None]
            if len(parts) == len(of) and all(a.ndim == 2 for a in arrays):
                stored[name] = _beside(parts)
        store_integers(model, stored)


def _beside(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Return weights of the same inputs as one."""
    first = weights[0]
    integers, scales = (
        np.concatenate([getattr(weight, name) for weight in weights], axis=1)
        for name in ("integers", "scales")
    )
    return QuantisedWeight(first.dtype, integers, scales, None, first.is_blocked)


class QuantisedModelOracle(ModelOracle):
    """The source of the truth of a model with rounded weights or caches, which knows those before.

    `weights`: The rounded weights, if there are any.
    """

    def __init__(self, subject: Subject, weights: QuantisedWeights | None) -> None:
        super().__init__(subject, 0.0)
        self.exactly = [name for name in subject.outputs if name.startswith("present_")]
        self._floats = weights.floats if weights else {}
        self._budget = weights.budget if weights else Budget("sqnr", _LEAST_SQNR[FLOAT16])

    def noisy_runs(self, case: Case, eager: Arrays, *args: Any, **options: Any) -> list[Arrays]:
        """Return runs with random rounding, in which values near a tie are rounded either way."""
        call: Any = self.precise
        if call.rounds:
            options["settled"] = call.rounds.drawing
        return super().noisy_runs(case, eager, *args, **options)

    def quality(
        self, folder: Path, goldens: Sequence[Golden], budgets: Sequence[Budget]
    ) -> Quality:
        """Return the distance from the model before, and store its outputs with small evidence."""
        budgets = tuple(budgets) or (self._budget,)
        all_sizes = [golden.case.sizes for golden in goldens]
        tokens = {i: sizes[BATCH] * sizes[QUERIES] for i, sizes in enumerate(all_sizes)}
        few = [number for number, count in tokens.items() if count <= _MOST_ROWS]
        numbers = sorted(sorted(few, key=lambda number: -tokens[number])[:_CASES])
        chosen = [goldens[number] for number in numbers]
        with self._as_before():
            oracle = ModelOracle(self.subject, 0.0)
            floats = [_narrowed(oracle.truth(each.case.inputs), each.expected) for each in chosen]
        pairs = {
            name: [(f[name], g.expected[name]) for f, g in zip(floats, chosen, strict=True)]
            for name, array in chosen[0].expected.items()
            if is_floating(array.dtype)
        }
        outputs, _ = output_distances(pairs)
        of_logits = logit_distance(pairs, budgets)
        quality = Quality(tuple(outputs), (), (), budgets, of_logits=of_logits)
        if sum(file.stat().st_size for file in folder.rglob("*.pb")) <= MOST_BYTES:
            write_quality(folder, numbers, floats, quality)
        return quality

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Let the model have its weights before rounding, and no rounded cache, in this block."""
        call: Any = self.subject.module
        parameters = {name: call.model.get_parameter(name) for name in self._floats}
        rounded = {name: parameter.data for name, parameter in parameters.items()}
        try:
            if call.rounds:
                call.rounds.is_used = False
            for name, parameter in parameters.items():
                parameter.data = self._floats[name]
            yield
        finally:
            if call.rounds:
                call.rounds.is_used = True
            for name, parameter in parameters.items():
                parameter.data = rounded[name]


def _narrowed(outputs: Arrays, expected: Arrays) -> dict[str, np.ndarray]:
    return {name: outputs[name].astype(array.dtype) for name, array in expected.items()}
