"""Models of transformers of the same config with one field changed.

Nothing here is for one type of model: fields are found by their names.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.explain.search import Number
from attn_export.parts.whole_models.faults.changed_models import Edit, ModelFault, changed, layer_of
from attn_export.reference.float64_mode import is_large

Other = tuple[str, Any, str]
"""The kind of a fault in a field of a config, its value, and what is wrong."""

_BASES = (10000.0, 500000.0, 1000000.0)
_PARTS = (1.0, 0.75, 0.5, 0.4, 0.25)
_NO_WINDOW = 2**30
_WINDOWS = (4, 8, 16, 32, 64, 128, 256, 512)

_UNRELATED = re.compile(
    r".*(drop|init|prob|token|cache|loss|coef|jitter|vocab|layers|heads|size|dim|width|version|"
    r"chunk|return|output_|dtype|mask_|_eps|epsilon|is_encoder|is_decoder|tie_).*|.*(hidden|ffn).*"
)
"""Fields that change no numbers, or the shapes of parameters, or are changed in modules."""


def fields_of(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the fields of a config and of those within it: where it is, name, value."""
    for within in ("", *config.sub_configs):
        inner = getattr(config, within) if within else config
        if inner is not None:
            yield from ((within, name, value) for name, value in vars(inner).items())


def other_configs(model: Any) -> Iterator[ModelFault]:
    """Yield the models of the config with one field changed."""
    for within, name, value in list(fields_of(model.config)):
        inner = getattr(model.config, within) if within else model.config
        for kind, new, sentence in _others(name, value, getattr(type(inner), name, None)):
            if new != value:
                # Configs have validators of their own, and models may have other parameters.
                with contextlib.suppress(Exception):
                    yield _with_field(model, (within, name), kind, new, sentence)


def _others(name: str, value: Any, default: Any) -> Iterator[Other]:
    """Yield other values of a field of a config."""

    def other(kind: str, new: Any, text: Any = None) -> Other:
        shown = f"{new:.6g}" if type(new) is float else new
        return kind, new, f"{name} is {text or shown} where the config says {value}"

    if name == "rope_parameters" and value:
        yield from _ropes(value)
    elif name == "layer_types" and value:
        yield from _layer_types(value)
    elif re.fullmatch("sliding_window|.*attention_window|window_size|attention_chunk_size", name):
        if value:
            yield other("window", _NO_WINDOW, "none")
        sizes = (value - 1, value + 1, value // 2, value * 2) if value else _WINDOWS
        yield from (other("window", new) for new in sizes if new > 0)
    elif "softcap" in name:
        close = (1.05 * value,) if value else ()
        yield from (other("softcap", new) for new in (None, 50.0, 30.0, *close))
    elif isinstance(value, bool):
        if "bias" in name or not _UNRELATED.fullmatch(name):
            yield other("bias" if "bias" in name else "config", not value)
    elif isinstance(value, int | float | str) and not _UNRELATED.fullmatch(name):
        # From a number near the right one a wrong one is sought.
        near = (1.0, 1.05 * value) if isinstance(value, float) else (1,)
        yield from (other("config", x) for x in (default, *near) if type(x) is type(value))


def _layer_types(value: list[str]) -> Iterator[Other]:
    kinds = sorted({*value, "full_attention", "sliding_attention"})
    for kind in kinds:
        yield "layer types", [kind] * len(value), f"layer_types is {kind} in all layers"
    for by in (1, -1):
        turned = value[-by:] + value[:-by]
        yield "layer types", turned, f"layer_types is shifted by {by} layer"
    for at, kind in itertools.product(range(len(value)), kinds):
        sentence = f"layer_types[{at}] is {kind} where the config says {value[at]}"
        yield "layer types", [*value[:at], kind, *value[at + 1 :]], sentence


def _ropes(values: Mapping[str, Any]) -> Iterator[Other]:
    """Yield other parameters of rotary positions."""
    nested: dict[str, Any] = {k: v for k, v in values.items() if isinstance(v, dict)}
    bases = (*_BASES, *(other["rope_theta"] for other in nested.values()))
    for key, own in (nested or {"": dict(values)}).items():
        of = f" of {key}" if key else ""
        plain = {k: own[k] for k in ("rope_theta", "partial_rotary_factor") if k in own}
        options = [("rotary base", "rope_theta", base) for base in bases]
        if "partial_rotary_factor" in own:
            options += [("rotary part", "partial_rotary_factor", p) for p in _PARTS]
        numbers = {k: x for k, x in own.items() if type(x) in (int, float) and k not in plain}
        for name, x in numbers.items():
            options += [("rotary scaling", name, type(x)(new)) for new in (x * 2, x / 2)]
        options += [("rotary scaling", k, not x) for k, x in own.items() if type(x) is bool]
        for kind, name, new in options:
            shown, right = (str(x) if type(x) is bool else f"{x:g}" for x in (new, own[name]))
            sentence = f"{name}{of} is {shown} where the config says {right}"
            yield kind, _at(values, key, {**own, name: new}), sentence
        if own["rope_type"] != "default":
            new = _at(values, key, {**plain, "rope_type": "default"})
            yield "rotary scaling", new, f"the scaling of rotary positions{of} is missing"
        for other_key in nested.keys() - {key}:
            new = _at(values, key, nested[other_key])
            yield "rotary base", new, f"rope_parameters{of} are those of {other_key}"
    if len(nested) == 2:
        turned = dict(zip(nested, reversed(list(nested.values())), strict=True))
        sentence = f"rope_parameters of {' and '.join(nested)} are exchanged"
        yield "rotary base", {**values, **turned}, sentence


def _at(values: Mapping[str, Any], key: str, new: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, key: new} if key else dict(new)


def _with_field(
    model: Any, field: tuple[str, str], kind: str, new: Any, sentence: str
) -> ModelFault:  # fmt: skip
    """Return the model with another value of a field of its config."""
    (within, name), config = field, copy.deepcopy(model.config)
    inner = getattr(config, within) if within else config
    old = getattr(inner, name)
    setattr(inner, name, new)
    built = _rebuilt(model, config)
    edits = tuple(
        Edit(f"{at}.{number}", layers, number, built.get_submodule(f"{at}.{number}"))
        for at, layers in model.named_modules()
        if isinstance(layers, nn.ModuleList) and not layer_of(at)
        for number, _ in layers.named_children()
    )

    def again(model: Any) -> ModelFault:
        inner = getattr(model.config, within) if within else model.config
        value = _changed_as(old, new, getattr(inner, name))
        return _with_field(model, field, kind, value, sentence)

    if isinstance(new, dict):
        number = _number_within(model, field, kind, old, new)
    else:
        number = _number(model, field, kind, old, new)
    return ModelFault(kind, sentence, edits, built, again, number=number)


def _number(
    model: Any, field: tuple[str, str], kind: str, old: Any, new: Any
) -> Number | None:  # fmt: skip
    """Return a field's number to be sought; None if it is none."""
    # The error of a softcap is linear in this power of it, which is 0 if there is none.
    power = -2.0 if kind == "softcap" else 1.0
    if type(new) is not float or (type(old) is not float and (old is not None or power > 0)):
        return None

    def other(number: float) -> ModelFault:
        about = f"{field[1]} is {number ** (1 / power):.6g} where the config says {old}"
        return _with_field(model, field, kind, number ** (1 / power), about)

    shown = (lambda x: float(x ** (1 / power)), lambda x: float(x**power))
    return Number(0.0 if old is None else old**power, new**power, other, shown)


def _number_within(
    model: Any, field: tuple[str, str], kind: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Number | None:
    """Return the number of rotary positions to be sought; None if it is none."""
    places = list(_differing(old, new))
    if len(places) != 1 or not all(type(x) is float for x in places[0][1:]):
        return None
    ((path, right, wrong),) = places
    if path[-1] == "partial_rotary_factor":  # a number of elements
        return None
    # Angles follow the logarithm of their base.
    shown = (math.exp, math.log) if path[-1] == "rope_theta" else (float, float)

    def other(number: float) -> ModelFault:
        of = f" of {path[0]}" if path[1:] else ""
        new = shown[0](number)
        about = f"{path[-1]}{of} is {new:.6g} where the config says {right:g}"
        return _with_field(model, field, kind, _replaced(old, path, new), about)

    return Number(shown[1](right), shown[1](wrong), other, shown)


def _differing(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield the paths at which two nested dicts differ, with both values."""
    for key in old.keys() | new.keys():
        one, other = old.get(key), new.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from (((key, *path), *pair) for path, *pair in _differing(one, other))
        elif one != other:
            yield (key,), one, other


def _changed_as(old: Any, new: Any, value: Any) -> Any:
    """Return a value of a field changed as the old one to the new one."""
    if all(isinstance(each, dict) for each in (old, new, value)):
        places = list(_differing(old, new))
        if len(places) == 1:
            ((path, _, wrong),) = places
            return _replaced(value, path, wrong)
    return new


def _replaced(values: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    new = _replaced(values[key], (*rest,), value) if rest else value
    return {**values, key: new}


def _rebuilt(model: Any, config: Any) -> Any:
    """Return the model of another config, with the same parameters; new biases are 0.

    Raises:
        RuntimeError: If the parameters are others, or of other shapes.
    """
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        empty = value if value is None else nn.Parameter(value.to("meta"), requires_grad=False)
        register(self, name, empty)

    with changed([Edit("", nn.Module, "register_parameter", without_memory)]):
        built = model._from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
    built.load_state_dict(model.state_dict(), strict=False, assign=True)
    for path, parameter in list(built.named_parameters()):
        if parameter.is_meta:
            if not path.endswith("bias"):
                raise RuntimeError(f"{path} has no value")
            place, _, name = path.rpartition(".")
            zeros = torch.zeros(parameter.shape, dtype=torch.float64)
            setattr(built.get_submodule(place), name, nn.Parameter(zeros, requires_grad=False))
    built._apply(_widened)
    return built.eval()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() and not is_large(tensor) else tensor
