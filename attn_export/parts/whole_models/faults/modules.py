"""Known faults in what modules of transformers' models compute, in their masks and inputs.

Nothing here is for one type of model: modules are found by the names of their classes, functions by
their names in transformers.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.activations import ACT2CLS, ACT2FN
from transformers.cache_utils import DynamicLayer

from attn_export.bundle.text_inputs import VECTOR
from attn_export.parts.whole_models.faults.changed_configs import fields_of
from attn_export.parts.whole_models.faults.changed_models import Edit, ModelFault, by_place, changed
from attn_export.parts.whole_models.sentence_model import POOLED, POOLINGS

# -- what modules compute -----------------------------------------------------------------------

_Forward = Callable[..., Any]


def _without_mean(norm: Any, old: _Forward) -> _Forward:
    """Return an RMS norm that subtracts the mean, or a LayerNorm that does not."""
    if not isinstance(norm, nn.LayerNorm):
        return lambda x: old(x - x.mean(-1, keepdim=True))

    def forward(x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
        return x if norm.bias is None else x + norm.bias

    return forward


def _routed(weigh: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, _Forward], _Forward]:
    """Return routers with other weights of the experts, from all logits and those chosen."""

    def change(_: Any, old: _Forward) -> _Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            logits, weights, indices = old(*args, **kwargs)
            return logits, weigh(logits, indices).to(weights.dtype), indices

        return forward

    return change


def _within(name: str, change: Callable[[_Forward], _Forward]) -> Callable[[Any, _Forward], Any]:
    """Return attention in which a function of the model's file is another."""

    def within(module: Any, old: _Forward) -> _Forward | None:
        file = sys.modules[type(module).__module__]
        function: _Forward | None = getattr(file, name, None)
        if function is None:
            return None
        new = change(function)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with changed([Edit("", file, name, new)]):
                return old(*args, **kwargs)

        return forward

    return within


def _other_pairs(old: _Forward) -> _Forward:
    """Return rotary positions for interleaved pairs where they are halves, and the reverse."""

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        halves = torch.equal(*cos.chunk(2, -1))
        interleaved = not halves and torch.equal(cos[..., ::2], cos[..., 1::2])
        size = cos.shape[-1] * (1 if halves or interleaved else 2)
        order = torch.arange(size).view((2, -1) if interleaved else (-1, 2)).t().flatten()

        def moved(x: Tensor, order: Tensor) -> Tensor:
            return torch.cat([x[..., order], x[..., size:]], -1)

        rotated = old(moved(q, order), moved(k, order), cos, sin, *args, **kwargs)
        return tuple(moved(x, order.argsort()) for x in rotated)

    return apply


def _pooled(mode: str, module: Any, _: _Forward) -> _Forward | None:
    """Return another pooling; None if it is the module's own."""
    own = module.modes == (mode,)
    return None if own else lambda tokens, mask: POOLINGS[mode](tokens, mask)


def _normalised(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**outputs, VECTOR: nn.functional.normalize(outputs[VECTOR], dim=-1)}


_ROTATE = functools.partial(_within, "apply_rotary_pos_emb")
_REPEAT = functools.partial(_within, "repeat_kv")

_FORWARDS: Sequence[tuple[str, str, str, Callable[[Any, _Forward], Any]]] = (
    ("rotary pairs", ".*Attention", "rotary pairs in {} are interleaved where the model has halves,"
     " or the reverse", _ROTATE(_other_pairs)),
    ("rotary", ".*Attention", "{} has no rotary positions",
     _ROTATE(lambda _: lambda q, k, *_, **__: (q, k))),
    ("rotary", ".*Attention", "{} rotates the other way", _ROTATE(
        lambda old: lambda q, k, cos, sin, *args, **kwargs: old(q, k, cos, -sin, *args, **kwargs))),
    ("rotary", ".*Attention", "{} does not rotate keys", _ROTATE(
        lambda old: lambda q, k, *args, **kwargs: (old(q, k, *args, **kwargs)[0], k))),
    ("rotary", ".*Attention", "{} does not rotate queries", _ROTATE(
        lambda old: lambda q, k, *args, **kwargs: (q, old(q, k, *args, **kwargs)[1]))),
    ("KV heads", ".*Attention", "KV heads in {} are tiled where the model repeats them",
     _REPEAT(lambda _: lambda x, count: x.repeat(1, count, 1, 1))),
    ("KV heads", ".*Attention", "{} has the first KV head for all", _REPEAT(
        lambda old: lambda x, count: old(x[:, :1].expand_as(x), count))),
    ("pooler", ".*Pooler", "{} reads the last token where the model reads the first",
     lambda _, old: lambda x: old(x.flip(1))),
    ("pooler", ".*Pooler", "{} reads the mean of the tokens where the model reads the first",
     lambda _, old: lambda x: old(x.mean(1, keepdim=True))),
    *(("pooling", "Pooling", f"{{}} takes {what} where the folder says otherwise",
       functools.partial(_pooled, mode)) for mode, what in POOLED.items()),
    ("pooling", "Pooling", "{} reads padding, too", lambda _, old: lambda tokens, mask:
     old(tokens, torch.ones_like(mask))),
    ("pooling", "Pooling", "{} takes the token at the number of tokens, which is the last one only "
     "where padding is on the right", lambda module, _: None if module.modes != ("lasttoken",) else
     lambda tokens, mask: tokens[torch.arange(len(mask)), mask.sum(1) - 1]),
    ("pooling", "Pooling", "{} takes the first slot, be it padding", lambda module, _:
     None if module.modes != ("cls",) else lambda tokens, _: tokens[:, 0]),
    ("pooling", "Normalize|Dense", "{} is missing", lambda *_: lambda x: x),
    ("pooling", "Dense", "{} has no activation", lambda module, _: lambda x: module.linear(x)),
    ("pooling", "SentenceModel", "the vector is divided by its length, which the folder does not "
     "ask for", lambda _, old: lambda **given: _normalised(old(**given))),
    ("norm", ".*Norm", "{} is missing", lambda *_: lambda x, *_, **__: x),
    ("norm mean", ".*Norm", "the mean is subtracted in {}, or the reverse", _without_mean),
    ("router", ".*Router", "weights of experts are not normalised in {}",
     _routed(lambda logits, at: logits.softmax(-1).gather(-1, at))),
    ("router", ".*Router", "weights of experts are normalised in {}",
     _routed(lambda logits, at: logits.gather(-1, at).softmax(-1))),
    ("router", ".*Router", "weights of experts are sigmoids in {}",
     _routed(lambda logits, at: logits.gather(-1, at).sigmoid())),
)  # fmt: skip
"""Other computations: kind, pattern of the class of modules, what is wrong, the forward from a
module and its own; None if it cannot be."""


def other_forwards(model: Any) -> Iterator[ModelFault]:
    """Yield models with modules that compute something else."""
    for kind, pattern, sentence, change in _FORWARDS:
        edits = [
            edit
            for at, module in model.named_modules()
            if re.fullmatch(pattern, type(module).__name__)
            for edit in _edited(at, module, change)
        ]
        yield from by_place(kind, sentence, edits)


def _edited(at: str, module: Any, change: Callable[[Any, _Forward], Any]) -> list[Edit]:
    old = module.forward
    new = change(module, old)
    return [] if new is None else [Edit(at, module, "forward", functools.wraps(old)(new))]


def other_ends(model: Any) -> Iterator[ModelFault]:
    """Yield models with other embeddings or logits."""
    try:
        last, first = model.get_output_embeddings(), model.get_input_embeddings()
    except NotImplementedError:  # of several towers
        return
    weight = getattr(first, "weight", None)
    if weight is None or weight.ndim != 2:  # of patches
        return
    ends: tuple[list[tuple[str, Any]], list[tuple[str, Any]]] = ([], [])
    for at, module in model.named_modules():
        if module is last or getattr(module, "weight", None) is weight:
            ends[module is last].append((at, module))
    for kind, found in zip(("embedding scale", "logits scale"), ends, strict=True):
        for power in (0.5, -0.5):
            times = _times(weight.shape[-1] ** power)
            edits = [edit for at, module in found for edit in _edited(at, module, times)]
            yield from by_place(kind, f"{{}} is multiplied by hidden_size ** {power}", edits)
    for at, module in ends[1]:
        if module.weight.shape == weight.shape and module.weight is not weight:
            edit = Edit(at, module, "weight", weight)
            yield ModelFault("tied head", f"{at} is tied to the embedding", (edit,))


def _times(factor: float) -> Callable[[Any, _Forward], _Forward]:
    return lambda _, old: lambda *args, **kwargs: old(*args, **kwargs) * factor


_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu", "relu", "quick_gelu", "relu2", "linear")


def other_activations(model: Any) -> Iterator[ModelFault]:
    """Yield models with another activation."""
    for _, field, value in fields_of(model.config):
        present = type(ACT2FN[value]) if isinstance(value, str) and value in ACT2CLS else None
        found = [(at, m) for at, m in model.named_modules() if type(m) is present]
        for new in _ACTIVATIONS if found else ():
            if type(ACT2FN[new]) is not present:
                edits = tuple(Edit(at, m, "forward", ACT2FN[new].forward) for at, m in found)
                sentence = f"{field} is {new} where the config says {value}"
                yield ModelFault("activation", sentence, edits)


# -- masks and inputs ---------------------------------------------------------------------------

_Arguments = Mapping[str, Any]


def _without_past(arguments: _Arguments) -> Tensor | None:
    mask: Tensor | None = arguments["attention_mask"]
    if mask is not None:
        new = torch.arange(mask.shape[1]) >= mask.shape[1] - arguments["q_length"]
        mask = mask * new
    return mask


def _first_ones(mask: Tensor | None) -> Tensor | None:
    """Return a mask `[B, S]` with as many ones in each row, all at its begin."""
    return None if mask is None else mask.sort(-1, descending=True).values


_MASKS: Sequence[tuple[str, str, Callable[[_Arguments], _Arguments]]] = (
    ("padding", "padding is not masked", lambda _: {"attention_mask": None}),
    ("padding", "every batch element has the padding of element 0",
     lambda a: {"attention_mask": a["attention_mask"][:1].expand_as(a["attention_mask"])}),
    ("padding", "the mask is read as a number of tokens, the first ones, so padding on the left is "
     "seen", lambda a: {"attention_mask": _first_ones(a["attention_mask"])}),
    ("mask", "the mask is not causal",
     lambda _: {"mask_function": masking_utils.bidirectional_mask_function}),
    ("mask", "the mask is causal", lambda a: {"mask_function": masking_utils.and_masks(
        a["mask_function"], masking_utils.causal_mask_function)}),
    ("mask", "the causal mask is aligned to the first key", lambda _: {"q_offset": 0}),
    ("mask", "the causal mask shows each query the next key",
     lambda a: {"q_offset": a["q_offset"] + 1}),
    ("mask", "the causal mask hides each query's own key",
     lambda a: {"q_offset": a["q_offset"] - 1}),
    ("past", "keys of the past are masked", lambda a: {"attention_mask": _without_past(a)}),
)  # fmt: skip
"""Changes of masks: kind, what is wrong, other arguments of `sdpa_mask`, from those it is given."""


def other_masks(_: Any) -> Iterator[ModelFault]:
    """Yield models with other masks of attention."""
    old = masking_utils.sdpa_mask
    for kind, sentence, change in _MASKS:

        def mask(change: Any = change, **given: Any) -> Any:
            return old(**{**given, **change(given)})

        yield ModelFault(kind, sentence, (Edit("", masking_utils, "sdpa_mask", mask),))
    sentence = "keys and values of the past come after the new ones"
    yield ModelFault("past", sentence, (Edit("", DynamicLayer, "update", _past_last),))


_update = DynamicLayer.update


def _past_last(self: Any, keys: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    _update(self, keys, *args, **kwargs)
    self.keys, self.values = (x.roll(keys.shape[-2], -2) for x in (self.keys, self.values))
    return self.keys, self.values


_POSITIONS: Sequence[tuple[str, Callable[[Tensor, Tensor, Tensor | None], Any]]] = (
    ("every batch element has the positions of element 0", lambda own, *_: own[:1].expand_as(own)),
    ("positions count padding", lambda own, slots, _: slots.expand_as(own)),
    ("positions start at 0 in each call",
     lambda own, slots, _: (slots - slots[:, :1]).expand_as(own)),
    ("positions lack the past", lambda own, slots, _: (own - slots[:, :1]).clamp(min=0)),
    ("positions do not count padding", lambda own, _, mask: None if mask is None else
     (mask.cumsum(-1) - 1).clamp(min=0)[:, -own.shape[1] :]),
    ("positions are 1 too large", lambda own, *_: own + 1),
    ("positions are 1 too small", lambda own, *_: (own - 1).clamp(min=0)),
)  # fmt: skip
"""Other positions `[B, L]`, from those of a call, those of the slots `[1, L]`, and the mask."""


def other_inputs(model: Any) -> Iterator[ModelFault]:
    """Yield models that read their inputs otherwise."""
    for name in inspect.signature(model.forward).parameters:
        if name.endswith("position_ids"):
            prefix = name.removesuffix("position_ids")
            for sentence, change in _POSITIONS:
                edit = _call(model, functools.partial(_placed, prefix, change))
                yield ModelFault("positions", sentence, (edit,))
        elif re.fullmatch(r"\w*attention_mask|token_type_ids", name):
            kind = "padding" if "mask" in name else "token types"
            edit = _call(model, lambda _, name=name: {name: None})
            yield ModelFault(kind, f"{name} is ignored", (edit,))


def _call(model: Any, change: Callable[..., _Arguments]) -> Edit:
    old = model.forward

    @functools.wraps(old)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **{**kwargs, **change(kwargs)})

    return Edit("", model, "forward", forward)


def _placed(prefix: str, change: Callable[..., Any], given: _Arguments) -> _Arguments:
    """Return the argument with other positions, for a call of a model."""
    ids, cache = given.get(f"{prefix}input_ids"), given.get("cache", given.get("past_key_values"))
    if ids is None:
        return {}
    slots = torch.arange(ids.shape[1])[None] + (0 if cache is None else cache.get_seq_length())
    own = given.get(f"{prefix}position_ids")
    own = slots.expand(ids.shape) if own is None else own
    return {f"{prefix}position_ids": change(own, slots, given.get(f"{prefix}attention_mask"))}
