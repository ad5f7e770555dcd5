"""Changes of a model of transformers, and models of its config with one field changed.

Nothing here is for one type of model: fields are found by their names.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.truth.float64_mode import is_large

# -- changes of a model -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Edit:
    """Another value of an attribute, a parameter, a submodule, or the forward of a module.

    Attributes:
        at: The path of what it changes; "" if it is everywhere.
    """

    at: str
    owner: Any
    name: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Variant:
    """A wrong variant of a model.

    Attributes:
        kind: The kind of the mistake, in a word or two.
        sentence: What is wrong, as a clause.
        model: The variant, if it is built anew; its layers are then the values of the edits.
        numbers: The right number and the wrong one, if it is a number that is wrong.
        other: The variant with another wrong number.
    """

    kind: str
    sentence: str
    edits: tuple[Edit, ...]
    model: nn.Module | None = None
    numbers: tuple[float, float] | None = None
    other: Callable[[float], Variant] | None = None

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Return the variant of the model, which is as before at the end of the block."""
        with changed(self.edits if self.model is None else ()):
            yield self.model or model

    def parts(self) -> Iterator[Variant]:
        """Yield the mistake in one layer, or in the places of one name, only."""
        keys = (layer_of, _stack_of, starred)
        groups = [group for key in keys for group in _grouped(self.edits, key)]
        places = {frozenset(edit.at for edit in group) for group in groups}
        # A variant that is built anew differs in more than its layers.
        most = len({edit.at for edit in self.edits}) + (self.model is not None)
        yield from (self._only(at) for at in sorted(places, key=sorted) if len(at) < most)

    def _only(self, places: frozenset[str]) -> Variant:
        kept = tuple(edit for edit in self.edits if edit.at in places)
        sentence = f"{self.sentence}, in {_common(places)} only"
        other = self.other
        again = None if other is None else lambda number: other(number)._only(places)
        return Variant(self.kind, sentence, kept, None, self.numbers, again)


@contextlib.contextmanager
def changed(edits: Iterable[Edit]) -> Iterator[None]:
    """Change what edits say inside this block."""
    with contextlib.ExitStack() as stack:
        for edit in edits:
            if edit.name == "forward" and edit.name not in vars(edit.owner):
                stack.callback(delattr, edit.owner, edit.name)
            else:
                stack.callback(setattr, edit.owner, edit.name, getattr(edit.owner, edit.name))
            setattr(edit.owner, edit.name, edit.value)
        yield


def starred(path: str) -> str:
    """Return a path with ``*`` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def layer_of(path: str) -> str:
    """Return the path of the layer that a path is in: up to the first number; "" if in none."""
    found = re.match(r".*?\.\d+(?=\.|$)", path)
    return found[0] if found else ""


def _stack_of(path: str) -> str:
    return layer_of(path).rpartition(".")[0]


def _common(paths: Iterable[str]) -> str:
    """Return the longest path that all begin with; with ``*`` if they are in several layers."""
    paths = list(paths)
    if len({layer_of(path) for path in paths}) > 1:
        paths = [starred(path) for path in paths]
    split = zip(*(path.split(".") for path in paths), strict=False)
    same = itertools.takewhile(lambda names: len(set(names)) == 1, split)
    return ".".join(names[0] for names in same) or "the model"


def _grouped(edits: Iterable[Edit], key: Callable[[str], str]) -> list[list[Edit]]:
    """Return edits by a key of their paths, without those whose key is ""."""
    groups: dict[str, list[Edit]] = {}
    for edit in edits:
        groups.setdefault(key(edit.at), []).append(edit)
    groups.pop("", None)
    return list(groups.values())


def by_place(kind: str, sentence: str, edits: Sequence[Edit]) -> Iterator[Variant]:
    """Yield a mistake everywhere, in what has the same parents or name, and in each place."""
    seen = set()
    endings = (functools.partial(_ending, -2), functools.partial(_ending, -1))
    keys: Sequence[Callable[[str], str]] = (_everywhere, *endings, _named, starred)
    for key in keys:
        for group in _grouped(edits, key):
            places = tuple(edit.at for edit in group)
            if places not in seen:
                seen.add(places)
                where = _named(places[0]) if key is _named else _common(places)
                yield Variant(kind, sentence.format(where), tuple(group))


def _everywhere(_: str) -> str:
    return "all"


def _ending(end: int, path: str) -> str:
    return ".".join(starred(path).split(".")[:end])


def _named(path: str) -> str:
    return ".".join(starred(path).split(".")[-2:]).removeprefix("*.")


# -- another config -----------------------------------------------------------------------------

Other = tuple[str, Any, str]
"""The kind of a mistake in a field of a config, its value, and what is wrong."""

_BASES = (10000.0, 500000.0, 1000000.0)
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


def other_configs(model: Any) -> Iterator[Variant]:
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
            options += [("rotary part", "partial_rotary_factor", p) for p in (1.0, 0.5, 0.25)]
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
) -> Variant:  # fmt: skip
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
    # The error of a softcap is linear in this power of it, which is 0 if there is none.
    power = -2.0 if kind == "softcap" else 1.0
    if type(new) is not float or (type(old) is not float and (old is not None or power > 0)):
        return Variant(kind, sentence, edits, built)

    def other(number: float) -> Variant:
        about = f"{name} is {number ** (1 / power):.6g} where the config says {old}"
        return _with_field(model, field, kind, number ** (1 / power), about)

    numbers = (0.0 if old is None else old**power, new**power)
    return Variant(kind, sentence, edits, built, numbers, other)


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
        built = type(model)._from_config(
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
