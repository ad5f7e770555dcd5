"""The subject of `attn-export build --model` for a model without caches, such as an encoder.

It is exported as `CapturedEncoder`, and judged by the model as transformers runs it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from attn_export.bundle.text_inputs import VECTOR
from attn_export.cases.draw import (
    MAX_SIZE,
    TRACED_SIZES,
    FunctionInputs,
    Interface,
    Sizes,
    generator,
)
from attn_export.cases.plan import Plan
from attn_export.dialect_names import MODEL
from attn_export.errors import ExportError, one_line
from attn_export.export.quantised_linears import default_budget
from attn_export.export.subject import Subject
from attn_export.export.trees import Axis, named_axes, to_torch
from attn_export.interface import BATCH, QUERIES, Input, Shape
from attn_export.parts.whole_models.build.cross_capture import ENCODER_MASK
from attn_export.parts.whole_models.build.encoder_capture import CapturedEncoder, CrossStates
from attn_export.parts.whole_models.build.quantised_decoder import (
    QuantisedWeights,
    oracle_of_integers,
)
from attn_export.parts.whole_models.build.rewrites import rewrite_weights
from attn_export.parts.whole_models.encoder_inputs import EncoderCases, least_length, main_input
from attn_export.parts.whole_models.export_layouts import BUILT, Entry, Promise, built_ends
from attn_export.parts.whole_models.loaded_model import in_dtype, type_of
from attn_export.parts.whole_models.model_caches import cache_shapes
from attn_export.parts.whole_models.model_call import ModelCall
from attn_export.parts.whole_models.model_cases import CaseLimits, Situation, situations
from attn_export.parts.whole_models.model_oracle import ModelOracle
from attn_export.parts.whole_models.model_reference import limits_of
from attn_export.runtimes.decode_inputs import ENCODED

_INNER = re.compile(r"loss|extract_features|\w*hidden_states?(?<!last_hidden_state)")
"""The fields of a model's output that are no outputs of the graph."""

_PROMISES: Final[frozenset[Promise]] = frozenset({"batch", "left", "right"})
_MOST_CASES = 24


class BuiltEncoder(Subject):
    """A model without caches, with its own inputs: tokens, an image, or sound.

    `weights`: Those that are rounded, if any are.
    """

    def __init__(
        self, model: Any, notes: tuple[str, ...], weights: QuantisedWeights | None = None
    ) -> None:
        self._weights = weights
        inputs = _inputs_of(model)
        self._limits = _limits(model, inputs)
        ends = built_ends({name: (each.dtype, each.shape) for name, each in inputs.items()})
        entry = Entry(Path(MODEL), "model", BUILT, ends, {})
        axes = {name: each.shape for name, each in inputs.items()}
        self._maker = EncoderCases(entry, self._limits, axes, pads_left="input_ids" in inputs)
        self._described = FunctionInputs(inputs, self._drawn)
        # Of several frames: an axis of one would be taken for a fixed one.
        sizes = {**TRACED_SIZES, QUERIES: self._limits.least * 4 + 1}
        example = to_torch(self._drawn(sizes, generator("example")))
        names, own, layers = self._parts(model, entry, example)
        encoder = CapturedEncoder(own).eval()
        length = Axis(QUERIES, min=self._limits.least, max=self._limits.positions)
        named = {
            name: {at: length if axis == QUERIES else axis for at, axis in named_axes(of).items()}
            for name, of in axes.items()
        }
        super().__init__(encoder, example, named, names, notes=notes)
        self._maker.hides = encoder.prove(example, layers)
        self._outputs = super().output_shapes()
        types = {name: (type_of(model), shape) for name, shape in self._outputs.items()}
        outputs = built_ends(types, are_outputs=True)
        self._maker.entry = dataclasses.replace(entry, outputs=outputs)
        self._maker.axes = {**axes, **self._outputs}
        self._maker.find_read_padding(own)
        self._settle(
            oracle=self.own_oracle, rewrite=weights.rewrite if weights else rewrite_weights,
            in_float32=lambda: type(self)(*in_dtype(model, (), "float32")),
            budget=default_budget(weights.dtype) if weights else None,
            rounds_inputs=weights is not None and weights.rounds_inputs,
            kept=weights.kept if weights else {},
        )  # fmt: skip

    def _parts(
        self, model: Any, entry: Entry, example: Mapping[str, torch.Tensor]
    ) -> tuple[list[str], nn.Module, int]:
        """Return the names of the outputs, a module that gives them, and the number of layers."""
        names = _fields(model, example)
        outputs = built_ends(dict.fromkeys(names, (type_of(model), ())), are_outputs=True)
        own = ModelCall(model, dataclasses.replace(entry, outputs=outputs))
        return names, own, _layers(model)

    def input_descriptions(self) -> dict[str, Input]:
        """Return the description of every input, by name."""
        return self._described

    def output_shapes(self) -> dict[str, Shape]:
        """Return the shape of every output; dynamic axes by name."""
        return self._outputs

    def plan(self, interface: Interface | None = None) -> Plan:
        """Return the cases: lengths and padding, or batches of images."""
        cases = self._maker.cases(situations(self._maker.entry, self._limits, _PROMISES))
        return Plan(cases, (), interface or self.interface(), is_settled=True)

    def own_oracle(self, _: float = 0.0) -> ModelOracle:
        """Return the oracle: the model as transformers runs it."""
        module: Any = self.module
        subject = Subject(module.own, lambda *_: dict(self.inputs), self.axes, list(self.outputs))
        if self._weights is None:
            return ModelOracle(subject, 0.0)
        subject = subject.having(rounds_inputs=self.rounds_inputs)
        return oracle_of_integers(subject, self._weights, self._outputs)

    def _drawn(self, sizes: Sizes, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return random inputs; batch elements but the first are padded on the right."""
        length, count = sizes.get(QUERIES, 1), sizes[BATCH]
        least = min(self._limits.least, length)
        new = (length, *random.integers(least, length + 1, count - 1).tolist())
        seed = f"drawn_{random.integers(2**31)}"
        return self._maker.inputs(Situation(seed, "", new, (0,) * count, "right"), seed)


class BuiltCrossEncoder(BuiltEncoder):
    """The encoder of a model that has a decoder, whose layers' keys and values it gives."""

    def _parts(
        self, model: Any, _: Entry, __: Mapping[str, torch.Tensor]
    ) -> tuple[list[str], nn.Module, int]:
        names = [name for name in crossed_of(model) if name != ENCODER_MASK]
        return names, CrossStates(model), _layers(model) + len(names)


def crossed_of(model: Any) -> dict[str, Input]:
    """Return the inputs of the encoder's tokens: ``cross_key_0``, …, and which are padding."""
    if not model.config.is_encoder_decoder:
        return {}
    found = {
        f"cross_{part}_{layer}": Input((BATCH, heads, ENCODED, size), type_of(model))
        for (layer, of), pair in cache_shapes(model).items()
        if of == "encoder"
        for part, (heads, size) in zip(("key", "value"), pair, strict=True)
    }
    if model.main_input_name == "input_ids":  # others are of one length
        found[ENCODER_MASK] = Input((BATCH, ENCODED), "int64", 0, 1)
    return found


def _inputs_of(model: Any) -> dict[str, Input]:
    """Return the description of every input that the graph of a model has."""
    config, name = model.config, model.main_input_name
    accepted = inspect.signature(model.forward).parameters
    found = {name: main_input(config, name, type_of(model))}
    shape = found[name].shape
    if len(shape) == 2 and "attention_mask" in accepted:
        found["attention_mask"] = Input(shape, "int64", 0, 1)
    if name == "input_ids" and _has_image_tower(model):
        found["pixel_values"] = main_input(config, "pixel_values", type_of(model))
    types = getattr(config, "type_vocab_size", None) or 0
    if name == "input_ids" and "token_type_ids" in accepted and types > 1:
        found["token_type_ids"] = Input(shape, "int64", 0, types - 1, first=None)
    return found


def _has_image_tower(model: Any) -> bool:
    """Return whether a model compares texts with images, each by a tower, as CLIP does."""
    return hasattr(model, "get_image_features") and hasattr(model, "get_text_features")


def _limits(model: Any, inputs: Mapping[str, Input]) -> CaseLimits:
    """Return what cases may hold; some models have fewer positions than their config says."""
    if "input_ids" not in inputs:
        return CaseLimits(1, MAX_SIZE, least=least_length(model))
    limits = limits_of(model)
    return dataclasses.replace(limits, cases=min(_MOST_CASES, limits.cases))


def _layers(model: Any) -> int:
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if layers is None:
        raise ExportError(
            f"{model.config.model_type} has no num_hidden_layers; models without layers of one "
            "kind are not supported"
        )
    images = model.config.vision_config.num_hidden_layers if _has_image_tower(model) else 0
    return int(layers) + int(images)


def _fields(model: Any, example: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the fields of a model's output that are outputs of its graph."""
    try:
        with torch.inference_mode():
            result = model(**example)
    except Exception as error:  # as various as the models
        raise ExportError(f"{model.config.model_type} does not run: {one_line(error)}") from error
    batch = len(next(iter(example.values())))
    fields = [
        name
        for name, x in result.items()
        if isinstance(x, torch.Tensor) and x.ndim > 1 and len(x) == batch
        and x.is_floating_point() and not _INNER.fullmatch(name)
    ]  # fmt: skip
    if VECTOR in fields:
        return [VECTOR]
    if not fields:
        raise ExportError(f"{model.config.model_type} has no output that could be one of a graph")
    return fields
