"""Changes of a model of transformers: other values of its attributes, in all places or in some."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from attn_export.explain.search import Hypothesis
from attn_export.reference.float64_mode import is_large


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
class ModelFault(Hypothesis):
    """A fault made in a model.

    Attributes:
        model: The wrong model, if it is built anew; its layers are then the values of the edits.
        again: The same fault of another model, if it is built anew.
    """

    edits: tuple[Edit, ...]
    model: nn.Module | None = None
    again: Callable[[Any], ModelFault] | None = None

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Return the wrong model; the right one is as before at the end of the block."""
        with changed(self.edits if self.model is None else ()):
            yield self.model or model

    def parts(self) -> Iterator[ModelFault]:
        """Yield the fault in one layer, or in the places of one name, only."""
        keys = (layer_of, _stack_of, starred)
        groups = [group for key in keys for group in _grouped(self.edits, key)]
        places = {frozenset(edit.at for edit in group) for group in groups}
        # A model that is built anew differs in more than its layers.
        most = len({edit.at for edit in self.edits}) + (self.model is not None)
        yield from (self._only(at) for at in sorted(places, key=sorted) if len(at) < most)

    def _only(self, places: frozenset[str]) -> ModelFault:
        kept = tuple(edit for edit in self.edits if edit.at in places)
        number, effect = self.number, f"{self.effect}, in {_common(places)} only"
        if number is not None:
            other = number.other
            number = dataclasses.replace(number, other=lambda new: other(new)._only(places))
        return ModelFault(self.kind, effect, kept, number=number, is_weak=self.is_weak)


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


def by_place(kind: str, effect: str, edits: Sequence[Edit]) -> Iterator[ModelFault]:
    """Yield a fault everywhere, in what has the same parents or name, and in each place."""
    seen = set()
    endings = (functools.partial(_ending, -2), functools.partial(_ending, -1))
    keys: Sequence[Callable[[str], str]] = (_everywhere, *endings, _named, starred)
    for key in keys:
        for group in _grouped(edits, key):
            places = tuple(edit.at for edit in group)
            if places not in seen:
                seen.add(places)
                where = _named(places[0]) if key is _named else _common(places)
                yield ModelFault(kind, effect.format(where), tuple(group))


def _everywhere(_: str) -> str:
    return "all"


def _ending(end: int, path: str) -> str:
    return ".".join(starred(path).split(".")[:end])


def _named(path: str) -> str:
    return ".".join(starred(path).split(".")[-2:]).removeprefix("*.")


def run_cost(model: nn.Module, outputs: Mapping[str, np.ndarray]) -> float:
    """Return about how many seconds a run of a model in float64 takes, by its sizes."""
    rows = max((x.size // x.shape[-1] for x in outputs.values() if x.size and x.ndim), default=1)
    weights = sum(parameter.numel() for parameter in model.parameters())
    return 1e-3 * len(list(model.modules())) + rows * weights * 2e-10


def enlarged(module: nn.Module) -> Iterator[Edit]:
    """Yield edits that make the parameters of a module larger."""
    for path, old in module.named_parameters():
        if not is_large(old):
            place, _, name = path.rpartition(".")
            value = nn.Parameter(old.detach() * 1.25, requires_grad=False)
            yield Edit("", module.get_submodule(place), name, value)
