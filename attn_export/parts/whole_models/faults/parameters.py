"""Known faults in parameters and numbers of models of transformers.

Nothing here is for one type of model: they are found by their names.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.explain.search import Number
from attn_export.parts.whole_models.faults.changed_configs import fields_of
from attn_export.parts.whole_models.faults.changed_models import (
    Edit,
    ModelFault,
    by_place,
    layer_of,
    starred,
)
from attn_export.reference.float64_mode import is_large

# -- parameters ---------------------------------------------------------------------------------

_NORM, _POSITION = r".*(norm|ln_)\w*\.weight", r".*(pos\w*emb|emb\w*pos|wpe)\w*\.weight"
_FUSED = r".*(qkv|c_attn|query_key_value)\w*\.bias"
_GATE_UP = r".*\.gate_up\w*(\.weight)?"


def _part_of_bias(number: int) -> Callable[[Tensor], Tensor | None]:
    """Return a bias of queries, keys and values in which one of them is 0."""

    def without(x: Tensor) -> Tensor | None:
        parts = [0 * part if i == number else part for i, part in enumerate(x.chunk(3))]
        return torch.cat(parts) if x.shape[0] % 3 == 0 else None

    return without


def _rearranged(x: Tensor, sizes: tuple[int, int], axis: int) -> Tensor:
    split: Tensor = x.unflatten(axis, sizes)
    return split.transpose(axis - 1, axis).flatten(axis - 1, axis)


_PARAMETERS: Sequence[tuple[str, str, str, Callable[[Tensor], Tensor | None]]] = (
    ("bias", r".*bias", "{} is missing", torch.zeros_like),
    *(("bias", _FUSED, f"{{}} is missing for {what}", _part_of_bias(number))
      for number, what in enumerate(("queries", "keys", "values"))),
    ("norm offset", _NORM, "{} has 1 subtracted", lambda x: x - 1),
    ("norm offset", _NORM, "{} has 1 added", lambda x: x + 1),
    ("norm weight", _NORM, "{} is missing", torch.ones_like),
    ("sinks", r".*\.sinks?", "{} are ignored", lambda x: torch.full_like(x, -1e30)),
    ("sinks", r".*\.sinks?", "{} are 0", torch.zeros_like),
    ("position embedding", _POSITION, "{} is missing", torch.zeros_like),
    ("token types", r".*token_type\w*\.weight", "{} is missing", torch.zeros_like),
    *(("position embedding", _POSITION, f"{{}} is read {by:+} rows away",
       functools.partial(torch.roll, shifts=-by, dims=0)) for by in (1, -1, 2, -2)),
    *(("gate and up", _GATE_UP, "the halves of {} are exchanged",
       lambda x, axis=axis: x.roll(x.shape[axis] // 2, axis)) for axis in (-1, -2)),
    *(("gate and up", _GATE_UP, "gate and up in {} are interleaved, or the reverse",
       functools.partial(_rearranged, sizes=sizes, axis=axis))
      for axis in (-1, -2) for sizes in ((2, -1), (-1, 2))),
    ("gate and up", _GATE_UP, "gate and up in {} are exchanged",
     lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
    ("transposed weight", r".*weight", "{} is transposed",
     lambda x: x.mT if x.ndim > 1 and x.shape[-1] == x.shape[-2] else None),
)  # fmt: skip
"""Changes of parameters: kind, pattern of the path, what is wrong, change; None if impossible."""


def other_parameters(model: nn.Module) -> Iterator[ModelFault]:
    """Yield models with changed parameters."""
    for kind, pattern, sentence, change in _PARAMETERS:
        edits = []
        for path, old in model.named_parameters(remove_duplicate=False):
            if re.fullmatch(pattern, path, re.I) and old.ndim and not is_large(old):
                place, _, name = path.rpartition(".")
                try:
                    new = change(old.detach())
                except RuntimeError:
                    continue  # the axis is odd
                if new is not None:
                    value = nn.Parameter(new, requires_grad=False)
                    edits.append(Edit(path, model.get_submodule(place), name, value))
        yield from by_place(kind, sentence, edits)


def scaled_parameters(model: nn.Module) -> Iterator[ModelFault]:
    """Yield models with the parameters of one name multiplied by a number."""
    named: dict[str, list[tuple[str, Any, str, Tensor]]] = {}
    for path, old in model.named_parameters():
        place, _, name = path.rpartition(".")
        if not is_large(old):
            found = (path, model.get_submodule(place), name, old.detach())
            named.setdefault(starred(path), []).append(found)
    yield from (_scaled(path, places, _NEAR) for path, places in named.items())


def _scaled(path: str, places: Sequence[tuple[str, Any, str, Tensor]], number: float) -> ModelFault:
    edits = tuple(
        Edit(at, module, name, nn.Parameter(old * number, requires_grad=False))
        for at, module, name, old in places
    )
    wrong = Number(1.0, number, functools.partial(_scaled, path, places))
    effect = f"{path} is multiplied by {number:.6g}"
    return ModelFault("weight scale", effect, edits, number=wrong, is_weak=True)


def exchanged_parameters(model: nn.Module) -> Iterator[ModelFault]:
    """Yield models in which neighbouring modules, or layers, have each other's parameters."""
    modules = dict(model.named_modules())
    pairs: dict[str, list[Edit]] = {}
    for at, parent in modules.items():
        if layer_of(at) and not isinstance(parent, nn.ModuleList):
            for (one, a), (other, b) in itertools.combinations(parent.named_children(), 2):
                edits = list(_swapped(f"{at}.{one}", a, f"{at}.{other}", b))
                if edits and len(edits) == 2 * len(list(a.parameters())):
                    sentence = f"{starred(at)}.{one} and {starred(at)}.{other} are exchanged"
                    pairs.setdefault(sentence, []).extend(edits)
    for sentence, edits in pairs.items():
        yield ModelFault("exchanged", sentence, tuple(edits))
    for one, other in itertools.pairwise(filter(None, dict.fromkeys(map(layer_of, modules)))):
        edits = list(_swapped(one, modules[one], other, modules[other]))
        yield ModelFault("layers", f"{one} and {other} are exchanged", tuple(edits))


def _swapped(at: str, one: nn.Module, other_at: str, other: nn.Module) -> Iterator[Edit]:
    """Yield edits that give two modules each other's parameters of the same name and shape."""
    others = dict(other.named_parameters())
    for path, a in one.named_parameters():
        b = others.get(path)
        if b is not None and a.shape == b.shape:
            place, _, name = path.rpartition(".")
            for to, module, value in ((at, one, b), (other_at, other, a)):
                yield Edit(f"{to}.{place}".strip("."), module.get_submodule(place), name, value)


# -- numbers ------------------------------------------------------------------------------------


def _scales(value: Any, module: Any, width: int) -> Sequence[float]:
    names = ("head_dim", "attention_head_size", "key_value_proj_dim")
    size = next((getattr(module, name) for name in names if hasattr(module, name)), 1)
    heads = getattr(module.config, "num_attention_heads", 1)
    return 1.0, size**-0.5, 1 / size, width**-0.5, (width / heads) ** -0.5, value * value


def _embedding_scales(value: Any, _: Any, width: int) -> Sequence[float]:
    return 1.0, width**0.5, float(torch.tensor(float(value)).bfloat16())


_NUMBERS: Sequence[tuple[str, str, str, str, Callable[[Any, Any, int], Sequence[float]]]] = (
    ("eps", "eps|variance_epsilon", ".*", "eps", lambda *_: (1e-5, 1e-6, 1e-12, 1e-8, 0.0)),
    ("scale", "scaling|scale|(softmax|attn)_scale|(inv_)?norm_factor", ".*Attention",
     "the scale of attention", _scales),
    ("embedding scale", "embed_scale", ".*", "the scale of embeddings", _embedding_scales),
    ("rotary scaling", ".*attention_scaling", ".*", "the factor on cos and sin", lambda *_: (1.0,)),
    ("experts", "top_k|num_experts_per_tok", ".*", "the number of experts per token",
     lambda value, *_: (value - 1, value + 1, 1)),
    ("router", r"\w*(scaling_factor|router\w*scale|route_scale)", ".*(Mo[Ee]|Router|Gate|Sparse).*",
     "the factor of routers", lambda *_: (1.0,)),
    ("activation", "alpha", ".*(Experts|MLP)", "alpha", lambda *_: (1.0, 1.702)),
    ("activation", "limit", ".*(Experts|MLP)", "limit", lambda *_: (1e30, 7.0, 1.0)),
)  # fmt: skip
"""Changes of numbers: kind, patterns of their name and of their module's class, what they are,
values from the present one, the module and the width of the model."""

_NAMED = re.compile("eps|per_tok|top_k|alpha|limit|scaling_factor|rout")
"""The fields of configs that hold such numbers."""

_NEAR = 1.05
"""The factor from the right number to one from which a wrong number is sought."""


def other_numbers(model: Any) -> Iterator[ModelFault]:
    """Yield models with other numbers in their modules."""
    width = model.config.get_text_config().hidden_size
    for kind, pattern, class_pattern, what, values in _NUMBERS:
        places: dict[float, list[tuple[str, Any, str, Any]]] = {}
        for at, module in model.named_modules():
            if re.fullmatch(class_pattern, type(module).__name__):
                for name in {**vars(module), **module._buffers}:
                    old = getattr(module, name) if re.fullmatch(pattern, name) else None
                    if isinstance(old, Tensor | float | int):
                        near = () if isinstance(old, int) else (_NEAR * float(old),)
                        for new in (*values(old, module, width), *near):
                            if new != old and (new > 0 or kind == "eps"):
                                places.setdefault(new, []).append((at, module, name, old))
        for new, found in places.items():
            old = found[0][3]
            named = (f for _, f, x in fields_of(model.config) if x == old and _NAMED.search(f))
            yield _numbered(kind, what, next(named, ""), found, new)


def _numbered(
    kind: str, what: str, field: str, places: Sequence[tuple[str, Any, str, Any]], new: float
) -> ModelFault:
    """Return a model with another number in some places, each with the number that it has."""
    edits = (
        Edit(at, module, name, old.new_tensor(new) if isinstance(old, Tensor) else new)
        for at, module, name, old in places
    )
    old = float(places[0][3])
    has = "the config says" if field else "the model has"
    sentence = f"{field or what} is {new:.6g} where {has} {old:.6g}"
    other = functools.partial(_numbered, kind, what, field, places)
    number = None if isinstance(places[0][3], int) else Number(old, new, other)
    return ModelFault(kind, sentence, tuple(edits), number=number)


def other_frequencies(model: Any) -> Iterator[ModelFault]:
    """Yield models with other frequencies of rotary positions: their base, or a factor on them."""
    places = [
        (at, module, name, module.get_buffer(name))
        for at, module in model.named_modules() if "Rotary" in type(module).__name__
        for name in module._buffers if re.fullmatch(r"(\w+_)?(?<!original_)inv_freq", name)
    ]  # fmt: skip

    base = (getattr(model.config, "rope_parameters", None) or {}).get("rope_theta", math.nan)

    def powered(number: float) -> ModelFault:
        edits = tuple(Edit(f"{at}.{name}", m, name, x**number) for at, m, name, x in places)
        sentence = f"rope_theta is {base**number:.6g} where the config says {base:.6g}"
        shown = (lambda x: base**x, lambda x: math.log(x, base))
        power = Number(1.0, number, powered, shown)
        return ModelFault("rotary base", sentence, edits, number=power)

    def scaled(number: float) -> ModelFault:
        edits = tuple(Edit(f"{at}.{name}", m, name, x * number) for at, m, name, x in places)
        sentence = f"rotary positions are multiplied by {number:.6g}"
        factor = Number(1.0, number, scaled)
        return ModelFault("rotary scaling", sentence, edits, number=factor)

    if places:
        yield from (powered(1.05), *map(scaled, (0.95, 0.5, 0.25, 0.125)))
