"""The subject of `attn-export build --model`: a decoder with caches in place.

It is exported as `CapturedDecoder`, and judged by the model as transformers runs it: with its own
caches and masks.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from attn_export.bundle.manifest import MANIFEST, read_manifest
from attn_export.cases.draw import TRACED_SIZES, FunctionInputs, Sizes, draw_inputs, generator
from attn_export.cases.plan import Plan
from attn_export.commands.reference import Reference
from attn_export.dialect_names import MODEL
from attn_export.errors import ExportError, UsageError, one_line
from attn_export.export.subject import Subject
from attn_export.export.trees import Axis, named_axes, to_torch
from attn_export.parts import ModelKeywords
from attn_export.parts.whole_models.built_cases import BuiltCases, with_index
from attn_export.parts.whole_models.built_encoder import (
    BuiltCrossEncoder,
    BuiltEncoder,
    crossed_end,
    crossed_of,
)
from attn_export.parts.whole_models.bundle_text import files_of
from attn_export.parts.whole_models.cross_capture import CapturedCrossDecoder
from attn_export.parts.whole_models.export_layouts import End, Entry, Promise
from attn_export.parts.whole_models.loaded_model import in_dtype, load_to_build, type_of
from attn_export.parts.whole_models.model_capture import CapturedDecoder, CapturedLayers
from attn_export.parts.whole_models.model_cases import (
    across,
    prompts,
    situations,
)
from attn_export.parts.whole_models.model_oracle import ModelOracle, is_large_model
from attn_export.parts.whole_models.model_part import ModelPart, cut_model
from attn_export.parts.whole_models.model_reference import (
    cache_shapes,
    judged_by_model,
    limits_of,
)
from attn_export.parts.whole_models.model_rewrites import rewrite_weights
from attn_export.parts.whole_models.own_call import OwnCall
from attn_export.parts.whole_models.quantised_decoder import (
    QuantisedModelOracle,
    QuantisedWeights,
)
from attn_export.parts.whole_models.rounded_cache import RoundedCache, rounded_cache
from attn_export.results import WHOLE_DECODE
from attn_export.runtimes.decode_inputs import (
    CAPACITY,
    ENCODED,
    HIDDEN,
    IDS,
    LOGIT_COUNT,
    LOGIT_INDEX,
    NEXT_HIDDEN,
    PAST_LENGTH,
)
from attn_export.spec import Input, Shape
from attn_export.spec.inputs import BATCH, PAST, QUERIES, Roles
from attn_export.spec.low_precision import FLOAT16

_SUMS: Final = {CAPACITY: f"{PAST} + {QUERIES}"}
"""In cases that are drawn, caches are filled by the longest past and the new tokens."""

_PROMISES: Final[frozenset[Promise]] = frozenset({"batch", "chunk", "chunks", "ragged"})
_MOST_CASES = 32


def subject_of_model(
    model: Any, *, all_logits: bool = False, dtype: str = "float32", kv_dtype: str = "none",
    layers: str = "",
    max_len: int = 0, weights_dtype: str = "none",
) -> Subject:  # fmt: skip
    """Return a subject for a decoder of transformers.

    `model`: The folder of a checkpoint, or a model of transformers.
    `all_logits`: Whether all logits are wanted, so that there is no input `logit_index`.
    `dtype`: The type of weights, caches and logits.
    `kv_dtype`: ``"float16"`` for the caches of a decoder, or none for the type of the model.
    `layers`: The first and the last layer of a part of a decoder, such as ``"0-3"``; "" for all.
    `max_len`: The most tokens of a decoder's cache; 0 for all positions of the model.
    `weights_dtype`: The integers that weights of a decoder are rounded to, or none.
    """
    is_ours, (loaded, notes) = isinstance(model, str | Path), load_to_build(model, dtype)
    weights, rounds, part = None, rounded_cache(kv_dtype), None
    changes = {"weights_dtype": weights_dtype, "kv_dtype": kv_dtype, "layers": layers or "none"}
    for name, value in changes.items():
        if value != "none" and (not loaded.can_generate() or loaded.config.is_encoder_decoder):
            raise UsageError(f"{name} {value} is for decoders; leave it out")
        if value not in ("none", layers) and dtype != "float32":
            raise UsageError(f"{name} {value} is for float32, not for dtype {dtype}; leave one out")
    if not is_ours and (weights_dtype != "none" or layers):
        loaded = copy.deepcopy(loaded)
    if layers:
        part = cut_model(loaded, layers, len(_caches_of(loaded)) // 2)
    if weights_dtype != "none":
        weights = QuantisedWeights(loaded, weights_dtype)
        notes = *notes, *weights.notes
    if loaded.can_generate():
        subject: Subject = _BuiltModel(
            loaded, notes, max_len=max_len, all_logits=all_logits, weights=weights, rounds=rounds,
            part=part,
        )  # fmt: skip
    elif max_len:
        raise UsageError(f"max_len {max_len} is for decoders; leave it out")
    else:
        subject = BuiltEncoder(loaded, notes)
    subject.files = files_of(loaded, Path(model) if is_ours else None)
    # Windows renames no folder with a file that is mapped.
    subject.maps_weights = is_ours and not weights and os.name == "posix" and is_large_model(loaded)
    if loaded.config.is_encoder_decoder:
        subject.encoder = BuiltCrossEncoder(loaded, notes)
    return subject


def built_graphs(folder: Path) -> tuple[list[str], ModelKeywords]:
    """Return the graphs of a bundle of a whole model that take its inputs as they are, if any.

    Returns:
        Their names, and the options that they were built with, as far as inputs show them.
    """
    if not (folder / MANIFEST).is_file():
        return [], {}
    manifest = read_manifest(folder)
    is_ours = PAST_LENGTH in manifest.inputs and not {IDS, HIDDEN}.isdisjoint(manifest.inputs)
    graphs = [
        name
        for name, file in manifest.graphs.items()
        if is_ours and not (file.fixed or file.layouts or file.dtypes)
    ]
    types = {each.dtype for each in manifest.ends.values()}
    options: ModelKeywords = {
        "all_logits": LOGIT_INDEX not in manifest.inputs,
        "kv_dtype": FLOAT16 if {FLOAT16, "float32"} <= types else "none",
    }
    if is_ours:
        options["dtype"] = next(iter(manifest.outputs.values())).dtype
    if not {HIDDEN, NEXT_HIDDEN}.isdisjoint(manifest.ends):
        numbers = [int(name.split("_")[2]) for name in manifest.ends if name.startswith("past_key")]
        options["layers"] = f"{min(numbers)}-{max(numbers)}"
    return graphs, options


def built_reference(subject: _BuiltModel, reduce: Callable[[Path], tuple[str, ...]]) -> Reference:
    """Return the reference for a graph that was built of a model."""
    interface, plan = subject.interface(), subject.plan()
    return judged_by_model(subject, interface, plan, lambda _: subject.own_oracle(), reduce=reduce)


class _BuiltModel(Subject):
    """A decoder with caches in place.

    `capacity` is at least the longest past and the new tokens: it is their sum in inputs that are
    drawn, and larger in some cases.
    """

    def __init__(
        self, model: Any, notes: tuple[str, ...], *, max_len: int = 0, all_logits: bool = False,
        weights: QuantisedWeights | None = None, rounds: RoundedCache | None = None,
        part: ModelPart | None = None,
    ) -> None:  # fmt: skip
        caches, crossed = _caches_of(model, part), crossed_of(model)
        self.limits = limits_of(model, max_len)
        stored = FLOAT16 if rounds else type_of(model)
        self._entry = _entry_of(caches, crossed, type_of(model), stored, part)
        self.has_narrow_caches = bool(rounds)
        tokens = Input((BATCH, QUERIES), "int64", 0, self.limits.vocabulary - 1)
        logits = (BATCH, QUERIES if all_logits else LOGIT_COUNT, self.limits.vocabulary)
        name, out, captured = IDS, "logits", CapturedCrossDecoder if crossed else CapturedDecoder
        if part and not part.begins:
            name, captured = HIDDEN, CapturedLayers
            tokens = Input((BATCH, QUERIES, part.width), type_of(model))
        if part and not part.ends:
            out, logits, all_logits = NEXT_HIDDEN, (BATCH, QUERIES, part.width), True
        self._described = {
            name: tokens,
            PAST_LENGTH: Input((BATCH,), "int64", 0, PAST),
            **(
                {}
                if all_logits
                else {LOGIT_INDEX: Input((BATCH, LOGIT_COUNT), "int64", 0, QUERIES)}
            ),
            **{f"past_{name}": Input(shape, stored) for name, shape in caches.items()},
            **crossed,
        }
        self._outputs = {out: logits, **{f"present_{n}": s for n, s in caches.items()}}
        sizes = {**TRACED_SIZES, LOGIT_COUNT: 3, ENCODED: 9, CAPACITY: TRACED_SIZES["total_len"]}
        example = to_torch(self._drawn(sizes, generator("example")))
        example[PAST_LENGTH] = torch.tensor([3, TRACED_SIZES[PAST]])
        most = {axis: Axis(axis, max=self.limits.positions) for axis in (QUERIES, CAPACITY)}
        axes = {
            name: {at: most.get(axis, axis) for at, axis in named_axes(given.shape).items()}
            for name, given in self._described.items()
        }
        decoder = captured(model).eval()
        super().__init__(decoder, example, axes, list(self._outputs), notes=notes)
        decoder.prove(example)
        decoder.kv_scales = rounds
        self.sums = _SUMS
        self.example_sizes = {axis: sizes[axis] for axis in (*self.example_sizes, PAST)}
        self.oracle, self.rewrite, self._weights = self.own_oracle, rewrite_weights, weights
        self.in_float32 = lambda: _BuiltModel(
            in_dtype(model, (), "float32")[0], (), max_len=max_len, all_logits=all_logits, part=part
        )
        if weights:
            self.rewrite, decoder.float_weights = weights.rewrite, weights.floats
        self.roles = Roles(caches={f"present_{name}": f"past_{name}" for name in caches})

    def input_descriptions(self) -> dict[str, Input]:
        """Return the description of every input, by name."""
        return FunctionInputs(self._described, self._drawn)

    def output_shapes(self) -> dict[str, Shape]:
        """Return the shape of every output; dynamic axes by name."""
        return self._outputs

    def _drawn(self, sizes: Sizes, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return random inputs, whose pasts fit into the caches."""
        inputs = draw_inputs(self._described, sizes, seed_words=(int(random.integers(2**31)),))
        return with_index(inputs, sizes, random)

    def plan(self) -> Plan:
        """Return the cases: a cover of lengths and pasts, and those across windows and chunks."""
        limits = dataclasses.replace(self.limits, cases=min(_MOST_CASES, self.limits.cases))
        axes = {name: given.shape for name, given in self._described.items()} | self._outputs
        maker = BuiltCases(self._entry, limits, axes, pads_left=False)
        cover = situations(self._entry, limits, _PROMISES)
        chosen = [
            each
            for each in (*cover, *prompts(limits), *across(limits))
            if each.kind != WHOLE_DECODE and (each.tokens == "random" or self._entry.one("ids"))
        ]
        return Plan(maker.cases(tuple(chosen)), (), self.interface(), is_settled=True)

    def own_oracle(self) -> ModelOracle:
        """Return the source of the truth: the model as transformers runs it."""
        axes = {name: named_axes(given.shape) for name, given in self._described.items()}
        module: Any = self.module
        call = OwnCall(module.model, self._entry, module.kv_scales).eval()
        subject = Subject(call, lambda *_: dict(self.inputs), axes, list(self.outputs))
        subject.roles, subject.has_narrow_caches = self.roles, self.has_narrow_caches
        if self._weights or call.rounds:
            return QuantisedModelOracle(subject, self._weights)
        return ModelOracle(subject, 0.0)


def _caches_of(model: Any, part: ModelPart | None = None) -> dict[str, Shape]:
    """Return the axes of the caches: ``key_0``, ``value_0``, and so on."""
    kind = model.config.model_type
    try:
        shapes = cache_shapes(model)
    except Exception as error:  # as various as the models
        raise ExportError(f"{kind} has no keys and values: {one_line(error)}") from error
    layers = sorted(layer for layer, of in shapes if of == "decoder")
    crossed = sorted(layer for layer, of in shapes if of == "encoder")
    count = model.config.get_text_config().num_hidden_layers if not crossed else len(crossed)
    if layers != list(range(count)):
        raise ExportError(f"{kind} has layers without keys and values of their own")
    return {
        f"{name}_{layer}": (BATCH, heads, CAPACITY, size)
        for layer in (layers[part.first : part.last + 1] if part else layers)
        for name, (heads, size) in zip(("key", "value"), shapes[layer, "decoder"], strict=True)
    }


def _entry_of(
    caches: Mapping[str, Shape], crossed: Mapping[str, Input], dtype: str, stored: str,
    part: ModelPart | None,
) -> Entry:  # fmt: skip
    """Return what the inputs and outputs of the graph are.

    `stored`: The type of the caches.
    """

    def ends(start: str, role: Any) -> Iterator[End]:
        for name, shape in caches.items():
            part, _, layer = name.partition("_")
            yield End(f"{start}_{name}", role, stored, shape, int(layer), part)

    tokens = End(IDS, "ids", "int64", (BATCH, QUERIES))
    if part and not part.begins:
        tokens = End(HIDDEN, "features", dtype, (BATCH, QUERIES, part.width))
    inputs = (
        tokens, End(PAST_LENGTH, "write at", "int64", (BATCH,)),
        *ends("past", "past"), *(crossed_end(*each, dtype) for each in crossed.items()),
    )  # fmt: skip
    out = NEXT_HIDDEN if part and not part.ends else "logits"
    outputs = End(out, "value", dtype, ()), *ends("present", "present")
    by_name, named = ({end.name: end for end in each} for each in (inputs, outputs))
    return Entry(Path(MODEL), "model", "attn-export", by_name, named)
