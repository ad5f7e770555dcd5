"""The subject of `attn-export build --model`: a decoder with caches in place.

It is exported as `CapturedDecoder`, and judged by the model as transformers runs it: with its own
caches and masks.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

from attn_export.cases.draw import (
    TRACED_SIZES,
    FunctionInputs,
    Interface,
    Sizes,
    draw_inputs,
    generator,
)
from attn_export.cases.plan import Plan
from attn_export.errors import UsageError, first_few, printable
from attn_export.export.quantised_linears import default_budget
from attn_export.export.subject import Subject
from attn_export.export.trees import Axis, named_axes, to_torch
from attn_export.interface import PAST, QUERIES, TOTAL, Input, Roles, Shape
from attn_export.optional_parts import ModelKeywords
from attn_export.parts.whole_models.build.call import OwnCall
from attn_export.parts.whole_models.build.capture import CapturedDecoder
from attn_export.parts.whole_models.build.cross_capture import CapturedCrossDecoder
from attn_export.parts.whole_models.build.encoder import BuiltCrossEncoder, BuiltEncoder
from attn_export.parts.whole_models.build.interface import heads_of, interface_of, with_index
from attn_export.parts.whole_models.build.part import ModelPart, cut_model
from attn_export.parts.whole_models.build.quantised_decoder import (
    BUDGET_OF_CACHE,
    CheckpointWeights,
    QuantisedWeights,
    oracle_of_integers,
)
from attn_export.parts.whole_models.build.rewrites import rewrite_weights
from attn_export.parts.whole_models.build.rounded_cache import FLOAT16, RoundedCache, rounded_cache
from attn_export.parts.whole_models.bundle_text import files_of
from attn_export.parts.whole_models.export_layouts import BUILT, LAYOUTS, Entry
from attn_export.parts.whole_models.integer_checkpoint import integers_of
from attn_export.parts.whole_models.loaded_model import (
    in_dtype,
    left_out_beside,
    left_out_note,
    left_out_of,
    load_to_build,
    type_of,
)
from attn_export.parts.whole_models.lora_adapter import merge_adapter
from attn_export.parts.whole_models.model_caches import step_limit
from attn_export.parts.whole_models.model_cases import (
    CaseLimits,
    CaseMaker,
    across,
    prompts,
    situations,
)
from attn_export.parts.whole_models.model_oracle import ModelOracle, is_large_model
from attn_export.parts.whole_models.model_reference import judged_by_model, limits_of
from attn_export.parts.whole_models.own_inputs import OwnInputs, own_notes, read_own
from attn_export.parts.whole_models.unit_oracle import oracle_of_model
from attn_export.parts.whole_models.unit_weights import is_by_unit, made_alike, unread_weights
from attn_export.quality import FLOATING, Budget
from attn_export.quantiser import FLOAT32_PRODUCTS, INTEGER_PRODUCTS, NEAREST, SEARCH
from attn_export.reference.reference import Reference
from attn_export.results import WHOLE_DECODE
from attn_export.runtimes.decode_inputs import (
    CAPACITY,
    ENCODED,
    HIDDEN,
    LOGIT_COUNT,
    NEXT_HIDDEN,
    PAST_LENGTH,
)
from attn_export.runtimes.run_options import Progress

_SUMS: Final = {CAPACITY: f"{PAST} + {QUERIES}"}
"""In cases that are drawn, caches are filled by the longest past and the new tokens."""

_PROMISES: Final = LAYOUTS[BUILT].promises
_MOST_CASES = 32

_DECODED_MOST, _DECODED_WORK = 1000, 2**33
"""The most tokens that are decoded from an empty cache, and of them times the weights."""

_IN_PLACE, _APPEND = "in-place", "append"


def subject_of_model(
    model: Any, *, adapter: Path | str | None = None, all_logits: bool = False,
    cache: str = _IN_PLACE, dtype: str = "float32", kv_dtype: str = "none", layers: str = "",
    max_len: int = 0, text_only: bool = False, weights_dtype: str = "none",
    accuracy_level: int | None = None, fit: bool = False, inputs: Sequence[Any] = (),
    keep: str | Mapping[str, str] = "", rounding: str = "",
    is_captured: bool = True,
) -> Subject:  # fmt: skip
    """Return a subject for a decoder of transformers.

    `model`: The folder of a checkpoint, or a model of transformers.
    `adapter`: The folder of a LoRA adapter, which is merged into the weights.
    `all_logits`: Whether all logits are wanted, so that there is no input `logit_index`.
    `cache`: How the caches of a decoder grow: ``"in-place"`` or ``"append"``.
    `dtype`: The type of weights, caches and logits.
    `kv_dtype`: ``"float16"`` for the caches of a decoder, or none for the type of the model.
    `layers`: The first and the last layer of a part of a decoder, such as ``"0-3"``; "" for all.
    `max_len`: The most tokens of a decoder's cache; 0 for all positions of the model.
    `text_only`: Whether towers, adapters and what else the graphs lack may be left out.
    `weights_dtype`: The integers that weights of linear layers are rounded to, or none.
    `accuracy_level`: 1 if products with these, or with integers of the checkpoint, in the dialect
        ``ort``, multiply floats; 4, or None, if they round their inputs to 8 bits, which is faster.
    `fit`: Whether `build` may leave some weights wider, so that its budgets hold.
    `inputs`: Files with inputs of the user's own, as of `compare`, which are cases, too. Budgets
        are then about them.
    `keep`: Names of modules whose weights stay floating, or get other integers, such as
        ``"lm_head,layers.0=int8"``, or the types by name.
    `rounding`: ``"search"`` for scales of int4 by the least squared error of each block, which is
        the default; ``"nearest"`` for those that clip nothing.
    `is_captured`: Whether a graph is made of it.
    """
    is_changed = adapter is not None
    # Narrow caches have a reference of their own, from a model that is in memory.
    is_changed |= is_captured and (kv_dtype != "none" or os.name != "posix")
    is_ours = isinstance(model, str | Path)
    loaded, notes = load_to_build(model, dtype, is_changed=is_changed, is_captured=is_captured)
    is_plain = adapter is None and weights_dtype == "none" and dtype == "float32"
    may_round = is_captured and accuracy_level != FLOAT32_PRODUCTS
    weights = _checkpoint_weights(model, loaded, is_plain=is_plain, may_round=may_round)
    if adapter is not None:
        notes = *notes, merge_adapter(adapter, model, loaded)
    rounds, part = rounded_cache(kv_dtype), None
    if accuracy_level is not None:
        _check_level(accuracy_level, has_integers=weights_dtype != "none" or weights is not None)
    _check_kept(keep, weights_dtype, kv_dtype, rounding, fits=fit)
    _check(
        loaded, dtype, weights_dtype=weights_dtype, kv_dtype=kv_dtype, cache=cache, layers=layers,
        inputs=", ".join(map(str, inputs)),
    )  # fmt: skip
    if not is_ours and (weights_dtype != "none" or layers):
        loaded = copy.deepcopy(loaded)
    if layers:
        part = cut_model(loaded, layers, len(heads_of(loaded)) // 2)
    round_weights = functools.partial(
        QuantisedWeights, loaded, weights_dtype, rounds_inputs=may_round,
        rounding=rounding or SEARCH,
    )  # fmt: skip
    rounded = round_weights(keep=_kept(keep)) if weights_dtype != "none" else None

    def built(rounded: QuantisedWeights | None, *told: str) -> Subject:
        subject = made_alike(loaded, functools.partial(make, rounded, told))
        # Windows renames no folder with a file that is mapped.
        maps_weights = (
            is_ours and not weights and not rounded and subject.unread is None
            and os.name == "posix" and is_large_model(loaded)
        )  # fmt: skip
        positions = limits_of(loaded).positions
        files = files_of(loaded, Path(model) if is_ours else None, positions)
        return subject.having(files=files, maps_weights=maps_weights)

    def make(rounded: QuantisedWeights | None, told: tuple[str, ...]) -> Subject:
        subject = _without_files(
            loaded, (*notes, *(rounded.notes if rounded else ()), *told), is_captured=is_captured,
            max_len=max_len, integers=weights, all_logits=all_logits, weights=rounded,
            rounds=rounds, part=part, appends=cache == _APPEND,
            read=functools.partial(read_own, inputs, folder=Path(model) if is_ours else None),
        )  # fmt: skip
        if layers:
            return subject
        beside = left_out_beside(Path(model), adapter) if is_ours else {}
        return _telling_left_out(subject, loaded, beside, accepts=text_only)

    subject = built(rounded)
    if not (fit and rounded):
        return subject
    fits = _fitting(subject, rounded, lambda kept, told: built(round_weights(keep=kept), told))
    return subject.having(fit=fits)


def _fitting(
    subject: Any, rounded: QuantisedWeights, build: Callable[[Mapping[str, str], str], Subject]
) -> Callable[[Sequence[Budget], Progress], Subject]:
    """Return a function that returns a subject with weights by which budgets hold.

    `rounded`: The weights of the subject, all of one type.
    `build`: Returns the subject with some of them wider, and with a note.
    """
    narrow = [rounded]

    def fitted(budgets: Sequence[Budget], progress: Progress) -> Subject:
        if not narrow:
            raise UsageError("the weights of this model were fitted before; load it again")
        found = subject.own_oracle().fitted(subject.plan().cases, budgets, progress)
        narrow.pop().undo()
        return build(*found)

    return fitted


def _without_files(
    loaded: Any, notes: tuple[str, ...], *, is_captured: bool, max_len: int,
    integers: CheckpointWeights | None, **options: Any,
) -> Subject:  # fmt: skip
    """Return the subject of a model; a decoder that is captured is proved.

    `integers`: Those of its checkpoint, if there are any.
    `options`: Those of decoders, and the weights that are rounded.
    """
    subject: Subject
    if loaded.can_generate():
        decoder = _BuiltModel(loaded, notes, max_len=max_len, integers=integers, **options)
        subject = decoder.proved() if is_captured else decoder
    elif max_len:
        raise UsageError(f"max_len {max_len} is for decoders; leave it out")
    elif integers:
        raise UsageError("weights of integers are built of decoders only; leave the model out")
    else:
        subject = BuiltEncoder(loaded, notes, options["weights"])
    if loaded.config.is_encoder_decoder:
        subject = subject.having(encoder=BuiltCrossEncoder(loaded, notes))
    return subject


def _checkpoint_weights(
    folder: Any, model: Any, *, is_plain: bool, may_round: bool
) -> CheckpointWeights | None:
    """Return the weights of a model that are integers in its checkpoint, if there are any.

    `is_plain`: Whether no option changes weights.
    `may_round`: As of `CheckpointWeights`.
    """
    integers = integers_of(model)
    if integers is None:
        return None
    if not is_plain:
        raise UsageError(
            f"{folder} holds weights of integers, which are built as they are, in float32; leave "
            "--adapter, --weights-dtype and --dtype out, or give the model before it was rounded"
        )
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise UsageError(
            f"{folder} holds weights of integers, which are built of decoders alone; give the "
            "model before it was rounded"
        )
    return CheckpointWeights(model, integers.weights, may_round=may_round)


def _telling_left_out(
    subject: Subject, model: Any, beside: Mapping[str, str], *, accepts: bool
) -> Subject:
    """Return the subject with notes on what its graphs lack; refuse that unless it is accepted."""
    parts = [subject, *([subject.encoder] if subject.encoder is not None else [])]
    unused = left_out_of(model, lambda: [x.call(x.module, x.inputs) for x in parts])
    # What a model that generates no text does not use is of no use to its callers.
    refused = {**beside, **(unused if model.can_generate() else {})}
    if refused and not accepts:
        raise UsageError(
            f"the graphs would lack {'; '.join(refused)}: {'; '.join(refused.values())}, or give "
            "--text-only to leave it out"
        )
    told = left_out_note({**beside, **unused})
    subject, *encoder = [part.having(notes=(*told, *part.notes)) for part in parts]
    return subject.having(encoder=encoder[0]) if encoder else subject


def _check(model: Any, dtype: str, **options: str) -> None:
    """Refuse options that are unknown, or for other models."""
    cache = options["cache"]
    if cache not in (_IN_PLACE, _APPEND):
        raise UsageError(f"cache of a whole model is {_IN_PLACE} or {_APPEND}; got {cache!r}")
    for name, value in options.items():
        if value in ("", "none", _IN_PLACE):
            continue
        is_encoder = not model.can_generate() and name == "weights_dtype"
        if model.config.is_encoder_decoder or not (model.can_generate() or is_encoder):
            raise UsageError(f"{name} {value} is for decoders; leave it out")
        if name not in ("layers", "inputs") and dtype != "float32":
            raise UsageError(f"{name} {value} is for float32, not for dtype {dtype}; leave one out")


def _check_kept(keep: Any, weights_dtype: str, kv_dtype: str, rounding: str, *, fits: bool) -> None:
    if rounding and (rounding not in (SEARCH, NEAREST) or weights_dtype != "int4"):
        raise UsageError(
            f"rounding is {SEARCH} or {NEAREST}, of weights_dtype int4; got {rounding!r} and "
            f"{weights_dtype}"
        )
    given = f"keep {printable(str(keep), 40)!r}" if keep else "fit"
    if (keep or fits) and weights_dtype == "none":
        raise UsageError(f"{given}: nothing is rounded; give weights_dtype")
    if fits and (keep or kv_dtype != "none"):
        other = given if keep else f"kv_dtype {kv_dtype}"
        raise UsageError(f"fit chooses types of weights by their loss alone; leave {other} out")


def _kept(text: str | Mapping[str, str]) -> Mapping[str, str]:
    """Return types of weights by names of modules, from a text as ``lm_head,layers.0=int8``."""
    if not isinstance(text, str):
        return text
    parts = (each.partition("=") for each in text.split(",") if text)
    return {name.strip(): of.strip() if equals else FLOATING for name, equals, of in parts}


def _check_level(level: int, *, has_integers: bool) -> None:
    if level not in (FLOAT32_PRODUCTS, INTEGER_PRODUCTS):
        raise UsageError(
            f"accuracy_level is {INTEGER_PRODUCTS} or {FLOAT32_PRODUCTS}; got {level!r}"
        )
    if not has_integers:
        raise UsageError(
            f"accuracy_level {level} is about products with integers; give weights_dtype, too"
        )


def built_options(entry: Entry) -> ModelKeywords:
    """Return the options that a graph was built with, as far as its inputs and outputs show."""
    ends = [*entry.inputs.values(), *entry.outputs.values()]
    layers = [end.layer for end in entry.having("past") if end.of == "decoder"]
    types = {end.dtype for end in ends}
    options: ModelKeywords = {
        "cache": _IN_PLACE if entry.one("write at") else _APPEND,
        "all_logits": entry.one("logits at") is None,
        "dtype": next(iter(entry.outputs.values())).dtype,
        "kv_dtype": FLOAT16 if {FLOAT16, "float32"} <= types else "none",
    }
    if {HIDDEN, NEXT_HIDDEN} & {end.name for end in ends}:
        options["layers"] = f"{min(layers)}-{max(layers)}"
    return options


def built_reference(
    subject: _BuiltModel, reduce: Callable[[Path], tuple[str, ...]],
    read: Callable[..., OwnInputs],
) -> Reference:  # fmt: skip
    """Return the reference for a graph that was built of a model.

    `read`: Reads the user's own inputs of graphs.
    """
    interface, plan, maker = subject.interface(), subject.plan(), subject.maker()
    module: Any = subject.module
    own = read([maker.entry], module.model)
    given = own.cases(maker, _PROMISES, pads_any=True)
    plan = dataclasses.replace(plan, cases=(*plan.cases, *given), notes=own_notes(own))
    return judged_by_model(subject, interface, plan, subject.own_oracle, reduce=reduce)


def _step_limits(model: Any, most: int) -> tuple[CaseLimits, tuple[str, ...]]:
    """Return what cases may hold, and a note if the model has more positions than a graph takes."""
    switch, limits = step_limit(model), limits_of(model, most)
    if switch is None or switch[0] >= limits.positions:
        return limits, ()
    size, kind = switch
    why = f"beyond {size} tokens, the {kind} angles of all keys change, also of those in a cache"
    if most:
        raise UsageError(f"max_len {most}: {why}; give at most {size}")
    return limits_of(model, size), (f"the graphs take {size} tokens at most: {why}",)


def _decoded_sizes(model: Any, limits: CaseLimits) -> tuple[list[int], tuple[str, ...]]:
    """Return the sizes that a decode from an empty cache crosses, and a note on the others."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    most, last = min(_DECODED_MOST, _DECODED_WORK // weights), limits.positions - 3
    sizes = sorted({8, *(min(size, last) for size in (*limits.thresholds, limits.positions))})
    left = [str(size) for size in limits.thresholds if most < size < limits.positions]
    told = f"no decode from an empty cache was tried across {first_few(left)} tokens"
    return [size for size in sizes if size <= max(most, 8)], (told,) if left else ()


class _BuiltModel(Subject):
    """A decoder with caches in place.

    `capacity` is at least the longest past and the new tokens: it is their sum in inputs that are
    drawn, and larger in some cases.
    """

    def __init__(
        self, model: Any, notes: tuple[str, ...], *, max_len: int = 0, all_logits: bool = False,
        weights: QuantisedWeights | None = None, rounds: RoundedCache | None = None,
        part: ModelPart | None = None, appends: bool = False,
        integers: CheckpointWeights | None = None,
        read: Callable[..., OwnInputs] = lambda *_: OwnInputs(),
    ) -> None:  # fmt: skip
        self.limits, told = _step_limits(model, max_len)
        self._has_all_layers = part is None
        notes = *notes, *told
        stored = FLOAT16 if rounds else type_of(model)
        self._ends = interface_of(
            model, self.limits.vocabulary, stored, part, all_logits=all_logits, appends=appends
        )
        own = read([self._ends.entry], model)
        self._own_notes = own_notes(own)
        self._own_cases = tuple(own.cases(self.maker(), _PROMISES, pads_any=True))
        sizes = {**TRACED_SIZES, LOGIT_COUNT: 3, ENCODED: 9, CAPACITY: TRACED_SIZES[TOTAL]}
        example = to_torch(self._drawn(sizes, generator("example")))
        if not appends:
            example[PAST_LENGTH] = torch.tensor([3, TRACED_SIZES[PAST]])
        most = {axis: Axis(axis, max=self.limits.positions) for axis in (QUERIES, CAPACITY)}
        most[PAST] = Axis(PAST, min=0, max=self.limits.positions - 1)
        axes = {
            name: {at: most.get(axis, axis) for at, axis in named_axes(given.shape).items()}
            for name, given in self._ends.inputs.items()
        }
        decoder = (CapturedCrossDecoder if self._ends.crosses else CapturedDecoder)(model).eval()
        sums = {TOTAL: f"{PAST} + {QUERIES}"} if appends else {}
        outputs = list(self._ends.outputs)
        super().__init__(decoder, example, axes, outputs, notes=notes, relations=sums)
        decoder.kv_scales = rounds
        if not appends:
            drawn = {axis: sizes[axis] for axis in (*self.example_sizes, PAST)}
            self._settle(sums=_SUMS, example_sizes=drawn)
        self._weights = linears = weights or integers

        def in_float32() -> _BuiltModel:
            wide = in_dtype(model, (), "float32")[0]

            def make() -> _BuiltModel:
                return _BuiltModel(
                    wide, (), max_len=max_len, all_logits=all_logits, part=part
                ).proved()

            subject = made_alike(wide, make)
            # Half the bytes on disk.
            return subject.having(stored_dtype=type_of(model)) if subject.unread else subject

        budget = BUDGET_OF_CACHE if rounds else None
        self._settle(
            oracle=self.own_oracle, rewrite=linears.rewrite if linears else rewrite_weights,
            unread=unread_weights(model) if is_by_unit(model) else None, in_float32=in_float32,
            budget=default_budget(weights.dtype) if weights else budget,
            rounds_inputs=linears is not None and linears.rounds_inputs,
            kept=weights.kept if weights else {}, has_narrow_caches=bool(rounds),
            roles=Roles(caches=self._ends.caches),
        )  # fmt: skip

    def proved(self) -> Self:
        """Refuse a model whose graph would compute something else, and note what is not tried."""
        decoder: Any = self.module
        decoder.prove(self.inputs)
        model = decoder.model
        # Of other types `in_float32` is decoded.
        if not (self._has_all_layers and type_of(model) == "float32") or self._ends.crosses:
            return self
        caches = {n: x for n, x in self.inputs.items() if n.startswith("past_") and x.ndim == 4}
        crossed, told = _decoded_sizes(model, self.limits)
        decoder.prove_decode(caches, crossed, self.limits.vocabulary)
        return self.having(notes=(*self.notes, *told))

    def input_descriptions(self) -> dict[str, Input]:
        """Return the description of every input, by name."""
        return FunctionInputs(self._ends.inputs, self._drawn)

    def output_shapes(self) -> dict[str, Shape]:
        """Return the shape of every output; dynamic axes by name."""
        return dict(self._ends.outputs)

    def _drawn(self, sizes: Sizes, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return random inputs, whose pasts fit into the caches."""
        inputs = draw_inputs(self._ends.inputs, sizes, seed_words=(int(random.integers(2**31)),))
        return with_index(inputs, sizes, random)

    def plan(self, interface: Interface | None = None) -> Plan:
        """Return the cases: a cover of lengths and pasts, those across windows, and the user's."""
        limits = dataclasses.replace(self.limits, cases=min(_MOST_CASES, self.limits.cases))
        entry, appends = self._ends.entry, self._ends.appends
        maker = self.maker()
        cover = situations(entry, limits, _PROMISES - ({"ragged"} if appends else set()))
        chosen = [
            each.with_equal_pasts() if appends else each
            for each in (*cover, *prompts(limits), *across(limits))
            if each.kind != WHOLE_DECODE and (each.tokens == "random" or entry.one("ids"))
        ]
        cases = *maker.cases(tuple(chosen)), *self._own_cases
        return Plan(cases, self._own_notes, interface or self.interface(), is_settled=True)

    def maker(self) -> CaseMaker:
        """Return what makes the inputs of cases."""
        axes = {n: x.shape for n, x in self._ends.inputs.items()} | dict(self._ends.outputs)
        return CaseMaker(self._ends.entry, self.limits, axes, pads_left=False)

    def own_oracle(self, _: float = 0.0) -> ModelOracle:
        """Return the oracle: the model as transformers runs it."""
        axes = {name: named_axes(given.shape) for name, given in self._ends.inputs.items()}
        module: Any = self.module
        call = OwnCall(module.model, self._ends.entry, module.kv_scales).eval()
        subject = Subject(
            call, lambda *_: dict(self.inputs), axes, list(self.outputs), relations=self.relations
        ).having(
            roles=self.roles, has_narrow_caches=self.has_narrow_caches,
            rounds_inputs=self.rounds_inputs,
        )  # fmt: skip
        if self.rounds_inputs or call.rounds or isinstance(self._weights, QuantisedWeights):
            return oracle_of_integers(subject, self._weights, self._ends.outputs)
        return oracle_of_model(subject, 0.0, self._ends.outputs)
