"""The reference for a graph of a whole model: the model as transformers runs it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from attn_export.cases.draw import MAX_SIZE, Interface
from attn_export.cases.plan import Plan
from attn_export.errors import GraphError, UsageError, first_few
from attn_export.export.subject import Subject
from attn_export.export.trees import named_axes
from attn_export.graph.load import load_proto
from attn_export.interface import BATCH, KEYS, PAST, QUERIES, TOTAL, Roles, Shape
from attn_export.parts.whole_models.encoder_inputs import (
    EncoderCases,
    hides_tokens,
    least_length,
    main_input,
    named_shapes,
    output_shapes,
)
from attn_export.parts.whole_models.export_layouts import End, Entry, Promise
from attn_export.parts.whole_models.integer_weights import quantised_operators
from attn_export.parts.whole_models.loaded_model import left_out_note, left_out_of
from attn_export.parts.whole_models.model_caches import cache_shapes, step_limit
from attn_export.parts.whole_models.model_call import ModelCall
from attn_export.parts.whole_models.model_cases import CaseLimits, CaseMaker, situations
from attn_export.parts.whole_models.model_oracle import ModelOracle, is_large_model
from attn_export.parts.whole_models.own_inputs import OwnInputs
from attn_export.parts.whole_models.unit_oracle import oracle_of_model
from attn_export.quality import Budget
from attn_export.reference.reference import Reference, of_subject

MOST = 640
"""The largest number of positions in cases."""

_LARGE_CASES, _LARGE_TOKENS = 16, 900
"""The number of cases and of tokens that are tried of a large model, beside changes of inputs."""


def reference_of(
    model: Any,
    entry: Entry,
    promises: frozenset[Promise],
    reduce: Callable[[Path], tuple[str, ...]] | None = None,
    *,
    own: OwnInputs | None = None,
    of_float: Any = None,
    budgets: tuple[Budget, ...] = (),
    is_float_model: bool = False,
) -> Reference:
    """Return the reference for one graph, with the cases that its layout allows.

    `own`: The user's own inputs.
    `of_float`: The float model from which `budgets` limit the distance, if there are any.
    `is_float_model`: Whether the graph is quantised, and the model is not.
    """
    call, limits = ModelCall(model, entry).eval(), _limits_for(model, entry)
    axes = {name: _axes(end, entry, model) for name, end in entry.inputs.items()}
    _refuse_other_layers(entry, model)
    make_cases = functools.partial(
        CaseMaker if call.is_decoder else EncoderCases,
        entry, limits, pads_left="left" in promises,
    )  # fmt: skip
    maker = make_cases(axes=axes)
    fitting = _fitting(entry, promises)
    chosen = situations(entry, limits, fitting)
    # Axes of 1 in an example would be taken for fixed ones.
    least = 1 if entry.takes_one_token else 2
    shown = dataclasses.replace(chosen[0], new=(max(least, *chosen[0].new),) * len(chosen[0].new))
    example = {n: torch.from_numpy(a) for n, a in maker.inputs(shown, "example").items()}
    shapes: list[tuple[int, ...]] = []
    unused = left_out_of(model, lambda: shapes.extend(output_shapes(call, example)))
    if call.is_decoder:
        ends = zip(entry.outputs.items(), shapes, strict=True)
        out_axes = {name: _output_axes(end, shape, axes, entry) for (name, end), shape in ends}
    else:
        out_axes = named_shapes(call, shapes, maker, shown)
    maker = make_cases(axes={**axes, **out_axes})
    if isinstance(maker, EncoderCases):
        maker.hides = hides_tokens(call, example)
        maker.find_read_padding(call)
    named = {name: named_axes(shape) for name, shape in axes.items()}
    sums = {TOTAL: f"{PAST} + {QUERIES}"} if TOTAL in {a for s in axes.values() for a in s} else {}

    outputs = list(entry.outputs)
    subject = Subject(call, lambda *_: example, named, outputs, relations=sums)
    subject = subject.having(roles=Roles(caches=_caches(entry)))
    interface = Interface(subject.input_descriptions(), out_axes, sums=sums, roles=subject.roles)
    given = [*own.cases(maker, fitting)] if own else []
    for case in given:
        output_shapes(call, {n: torch.from_numpy(a) for n, a in case.inputs.items()}, case.about)
    plan = Plan((*maker.cases(chosen), *given), (), interface, is_settled=True)
    loose = {e.name for e in entry.outputs.values() if 0 < len(e.shape) != len(out_axes[e.name])}

    def make(least_eps: float) -> ModelOracle:
        # Of values that a float32 graph casts to a narrower type, no right one has any.
        is_narrow = least_eps > 0 and (
            is_half(entry.path)
            or bool(quantised_operators(entry.path))
            or any(weight.dtype != torch.float32 for weight in model.parameters())
        )
        return oracle_of_model(subject, least_eps if is_narrow else 0.0, out_axes)

    if budgets:
        exact = ModelCall(of_float, entry).eval()
        make = functools.partial(ModelOracle, subject, module=exact, budgets=budgets)
    return judged_by_model(
        subject, interface, plan, make, undeclared=loose, reduce=reduce,
        notes=(
            *left_out_note(unused), *subject.notes, *_notes(entry, loose, step_limit(model)),
        ),
        is_float_model=is_float_model or bool(budgets),
    )  # fmt: skip


def judged_by_model(
    subject: Subject, interface: Interface, plan: Plan, make: Callable[[float], ModelOracle],
    **fields: Any,
) -> Reference:  # fmt: skip
    """Return the reference for a graph whose reference is that of transformers' model.

    `make`: Makes its oracle of the least eps.
    """
    oracle = functools.cache(make)
    return dataclasses.replace(
        of_subject(subject, interface), whose="transformers' model", oracle=oracle,
        plan=lambda: plan, cause=lambda *seen: oracle(0.0).cause(*seen), **fields,
    )  # fmt: skip


def is_half(path: Path) -> bool:
    """Return whether most weights of a graph are in float16."""
    weights = [x for x in load_proto(path).graph.initializer if len(x.dims) > 1]
    half = [x for x in weights if x.data_type == onnx.TensorProto.FLOAT16]
    return 2 * len(half) > len(weights)


def _notes(entry: Entry, undeclared: set[str], switch: tuple[int, str] | None) -> Iterator[str]:
    """Yield notes on what a graph declares and does not do, and on what caches it needs."""
    if switch is not None and entry.having("past"):
        yield (
            f"beyond {switch[0]} tokens, the {switch[1]} angles of all keys change: a decode that "
            "comes there needs a cache that is computed anew, as transformers does"
        )
    if undeclared:
        shown = first_few(sorted(undeclared))
        yield f"declared with another number of axes than they should have: {shown}"
    if entry.unread:
        yield f"inputs that the graph does not read: {first_few(sorted(entry.unread))}"


_LEAST = 16
"""The least number of positions that cases need."""


def limits_of(model: Any, most: int = 0) -> CaseLimits:
    """Return what the cases of a model may hold, from its config.

    `most`: The largest number of positions; 0 for all that the model has.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_target_positions")
    longest = min([getattr(config, name, None) or MAX_SIZE for name in names] + _tables(model))
    if most and not _LEAST <= most <= longest:
        raise UsageError(f"max_len {most}: give {_LEAST} to {longest}, as many as the model has")
    longest = most or longest
    layers: Any = config.per_layer_config if config.is_heterogeneous else [config]
    thresholds = {
        getattr(layer, name, None)
        for layer in layers
        for name in ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
    }
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(x for x in rope.values() if isinstance(x, dict))):  # of kinds of layers
        thresholds.add(each.get("original_max_position_embeddings"))
    vocabulary = getattr(config, "vocab_size", None) or 1  # none of images
    ids = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    flat = {i for x in ids for i in (x if isinstance(x, list) else [x]) if i is not None}
    sizes = sorted(x for x in thresholds if isinstance(x, int) and (x < most or not most))
    limits = CaseLimits(
        vocabulary, min(longest, MOST), tuple(sizes),
        tuple(sorted(i for i in flat if 0 <= i < vocabulary)), _tying(model, vocabulary),
        min(filter(None, (getattr(x, "sliding_window", None) for x in layers)), default=0),
        positions=longest,
    )  # fmt: skip
    if is_large_model(model):
        limits = dataclasses.replace(limits, cases=_LARGE_CASES, tokens=_LARGE_TOKENS)
    return limits


def _tying(model: Any, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens whose embedding is 0, as that of padding, in a mixture of experts."""
    config = model.config.get_text_config(decoder=True)
    if not any(re.match("(?!_).*experts", name) for name in vars(config)):
        return ()  # of models without tokens, transformers does not know the embeddings
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if weight is None or weight.ndim != 2:
        return ()
    found = torch.nonzero(~weight.any(-1)).flatten().tolist()
    return tuple(found) if len(found) < min(vocabulary, len(weight)) else ()


def _tables(model: Any) -> list[int]:
    """Return the positions of tables that begin with padding, fewer than the config says."""
    return [
        part.num_embeddings - part.padding_idx - 1
        for name, part in model.named_modules()
        if "position" in name and isinstance(part, nn.Embedding) and part.padding_idx is not None
    ]


def _limits_for(model: Any, entry: Entry) -> CaseLimits:
    """Return the limits of a model, with those of caches whose size a graph fixes."""
    limits = limits_of(model)
    sizes = [end.shape[1] for end in entry.having("past") if len(end.shape) == 3]
    longest = min([limits.longest, *(size for size in sizes if isinstance(size, int))])
    positions = min([limits.positions, *(size for size in sizes if isinstance(size, int))])
    least = least_length(model) if entry.one("features") else 1
    return dataclasses.replace(limits, longest=longest, positions=positions, least=least)


def _fitting(entry: Entry, promises: frozenset[Promise]) -> frozenset[Promise]:
    """Return the promises that the inputs of a graph can express."""
    missing: set[Promise] = set() if entry.one("mask") else {"left", "right"}
    if entry.one("features") and entry.one("ids"):
        missing.add("left")  # a score of a text and an image has an axis for each
    if any(end.rolls for end in entry.having("past")):
        missing.add("right")  # ONNX Runtime refuses it there
    if entry.takes_one_token:
        missing |= {"chunk", "chunks"}
    return promises - missing


def _caches(entry: Entry) -> dict[str, str]:
    """Return the input that takes each cache in the next step, by output."""
    pasts = {(end.layer, end.part, end.of): end.name for end in entry.having("past")}
    presents = ((end, pasts.get((end.layer, end.part, end.of))) for end in entry.having("present"))
    return {end.name: past for end, past in presents if past is not None}


def _axes(end: End, entry: Entry, model: Any) -> Shape:
    """Return the axes of an input: sizes, and names by its role."""
    past = entry.having("past")
    by_role: dict[str, Shape] = {
        "ids": (BATCH, QUERIES), "positions": (BATCH, QUERIES), "token types": (BATCH, QUERIES),
        "mask": (BATCH, TOTAL if past else QUERIES),
        "states": (BATCH, KEYS, getattr(model.config, "hidden_size", 0)),
        "states mask": (BATCH, KEYS), "write at": (BATCH,), "lengths": (BATCH,),
        "branch": end.shape, "window": (), "features": _feature_axes(end, model),
        "past": _cache_axes(end, model),
    }  # fmt: skip
    shape = by_role[end.role]
    if len(shape) != len(end.shape):
        raise GraphError(
            f"{entry.path}: {end.name} has the axes {list(end.shape)}, and is taken for "
            f"{end.role}: {list(shape)}"
        )
    # A size that the graph fixes is tried alone.
    return tuple(
        d if isinstance(d, int) and a in (BATCH, QUERIES) else a
        for a, d in zip(shape, end.shape, strict=True)
    )


def _feature_axes(end: End, model: Any) -> Shape:
    if end.role != "features" or all(isinstance(size, int) for size in end.shape[1:]):
        return BATCH, *end.shape[1:]
    return main_input(model.config, end.usual or end.name, str(end.dtype)).shape


def _cache_axes(end: End, model: Any) -> Shape:
    if len(end.shape) == 3:
        return (BATCH, *end.shape[1:])
    if end.role != "past":
        return ()
    heads, size = cache_shapes(model)[end.layer, end.of][end.part == "value"]
    if end.rolls:
        return BATCH, heads, limits_of(model).window, size
    return BATCH, heads, KEYS if end.of == "encoder" else PAST, size


def _refuse_other_layers(entry: Entry, model: Any) -> None:
    """Refuse a graph of another number of layers."""
    layers = {end.layer for end in (*entry.having("past"), *entry.having("present"))}
    if layers and layers != {layer for layer, _ in cache_shapes(model)}:
        expected = len({layer for layer, _ in cache_shapes(model)})
        raise GraphError(
            f"{entry.path} has caches of {len(layers)} layers, and the checkpoint's model of "
            f"{expected}; give the graphs of this checkpoint"
        )


def _output_axes(
    end: End, shape: tuple[int, ...], axes: Mapping[str, Shape], entry: Entry
) -> Shape:
    """Return the axes of an output, whose shape in the base case is known."""
    past = entry.having("past")
    query = 1 if entry.takes_one_token else QUERIES
    if end.role == "window":
        return ()
    if end.name.startswith("encoder_last"):
        return BATCH, KEYS, shape[2]
    if end.role == "present":
        cache = axes.get(_caches(entry).get(end.name, ""))
        if len(shape) == 3 or ((end.of == "encoder" or end.rolls) and cache):
            return cache or shape
        length = KEYS if end.of == "encoder" else TOTAL if past else query
        return BATCH, shape[1], length, shape[3]
    if len(shape) == 3 and entry.one("ids"):
        return BATCH, query, shape[2]
    return (BATCH, *shape[1:])
