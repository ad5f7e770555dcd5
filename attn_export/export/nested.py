"""Arguments and returned values of a module as flat, named tensors.

They may be within containers and any objects, such as a cache. Objects are taken apart by their
attributes and put together by `copy.deepcopy`, so no class has to be known or registered.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import re
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from keyword import iskeyword
from typing import Any, Self

import torch
from torch import Tensor, nn

from attn_export.errors import ExportError, UsageError, WeightsError, one_line, printable

_ADVICE = (
    (
        r"block_mask was created for block_mask\.shape=\((.*?)\)",
        r"a block mask of the sizes \1, which are not those of the inputs",
        "make it in forward: create_block_mask(mask_mod, None, None, q.shape[-2], k.shape[-2])",
    ),
    (
        r"NestedTensor",
        "a nested tensor, which lacks an operation",
        "pad and mask the sequences, and pass enable_nested_tensor=False to nn.TransformerEncoder",
    ),
)
"""Rows of a pattern that matches an error's text, the construct that causes it, and what to write
instead."""


def _cause_in_run(error: Exception) -> str:
    """Return why a run of a module raised, on one line."""
    for pattern, construct, instead in _ADVICE:
        if match := re.search(pattern, str(error)):
            return f"{match.expand(construct)}; {instead}"
    return one_line(error)


_CONSTANTS = (bool, int, float, str, type(None))
"""Types of constants in inputs. A constant becomes a part of the exported module."""

_WHOLE = (*_CONSTANTS, Tensor, nn.Module, type, types.ModuleType, types.FunctionType, enum.Enum)
"""Types that are not taken apart."""


@dataclasses.dataclass(frozen=True)
class Leaves:
    """What a nested value holds, by place: ``cache.layers.0.keys`` is ``cache.layers[0].keys``.

    Attributes:
        leaves: The tensors and constants.
        objects: The objects that have attributes, and named tuples.
        containers: The identities of all objects and containers.
    """

    leaves: dict[str, Any] = dataclasses.field(default_factory=dict)
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    containers: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, values: Mapping[str, Any], without: Collection[int] = ()) -> Self:
        """Return what values hold, by name; `without` are the identities of what is left out."""
        contents = cls()
        for name, value in values.items():
            contents._add(name, value, without)
        return contents

    def _add(self, place: str, value: Any, without: Collection[int]) -> None:
        if id(value) in without:
            return
        children = children_of(value)
        if children is None:
            self.leaves[place] = value
            return
        self.containers.add(id(value))
        if not _is_container(value):
            self.objects[place] = value
        for key, child in children:
            self._add(f"{place}.{key}", child, {*without, id(value)})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by place."""
        return {place: leaf for place, leaf in self.leaves.items() if isinstance(leaf, Tensor)}

    def owner(self, place: str) -> str:
        """Return the place of the outermost object that a place is in, or ""."""
        return next((owner for owner in self.objects if place.startswith(f"{owner}.")), "")


def _is_container(value: Any) -> bool:
    """Return whether a value is a plain tuple or list, or a dict of any kind."""
    return type(value) in (list, tuple) or isinstance(value, Mapping)


def children_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return what a container or an object holds with the keys or names; None if it is a leaf."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (list, tuple, deque)):
        return enumerate(value)
    if isinstance(value, _WHOLE) or hasattr(value, "node"):  # a size that torch traces
        return None
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    names = [n for s in slots for n in ((s,) if isinstance(s, str) else s) if hasattr(value, n)]
    names = [*getattr(value, "__dict__", ()), *(n for n in names if n != "__dict__")]
    return [(name, getattr(value, name)) for name in names] if names else None


# -- arguments ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class InputTree:
    """Arguments of a module, flattened.

    Attributes:
        tensors: The tensors by name.
        places: The place of each tensor by name.
        constants: The constants outside objects, by place.
        changed: The names of the tensors that a call changes in place, which gets copies of them.
        counts: The tensor and axis whose size a number in an object is, by place.
    """

    tensors: Mapping[str, Tensor]
    places: Mapping[str, str]
    constants: Mapping[str, Any]
    changed: frozenset[str] = frozenset()
    counts: Mapping[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    _arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def flatten(cls, inputs: Mapping[str, Any]) -> Self:
        """Flatten copies of arguments; the same tensor in two places becomes two.

        Raises:
            UsageError: If there is something that is no dense tensor, constant or copyable object.
        """
        with _checked_inputs(inputs):
            arguments = {name: _own(name, value) for name, value in inputs.items()}
            contents = Leaves.of(arguments)
        tensors, constants = dict[str, Tensor](), dict[str, Any]()
        for place, leaf in contents.leaves.items():
            owner = contents.owner(place)
            if not isinstance(leaf, (Tensor, *_CONSTANTS)) and not owner:
                raise UsageError(
                    f"{place} is {type(leaf).__name__}; inputs are tensors, tuples, lists, dicts "
                    "and objects with them, and plain constants"
                )
            if isinstance(leaf, Tensor):
                tensors[place] = _dense(place, leaf)
            elif not owner:
                constants[place] = leaf
        return cls(tensors, {name: name for name in tensors}, constants, _arguments=arguments)

    def renamed(self, names: Mapping[str, str], changed: Iterable[str] = ()) -> Self:
        """Return the tree with the tensors in some places only, by other names.

        `names`: The names by place.
        `changed`: The places of the tensors that a call changes in place.
        """
        at = {name: place for place, name in names.items()}
        tensors = {name: self.tensors[place] for name, place in at.items()}
        return dataclasses.replace(
            self, tensors=tensors, places=at, changed=frozenset(names[place] for place in changed)
        )

    @functools.cached_property
    def keywords(self) -> dict[str, str]:
        """The name of each tensor by an identifier: keywords of a function of tensors alone."""
        keywords: dict[str, str] = {}
        for name in self.tensors:
            word = re.sub(r"\W", "_", name)
            word = word if word.isidentifier() and not iskeyword(word) else f"_{word}"
            keywords[word if word not in keywords else f"{word}_{len(keywords)}"] = name
        return keywords

    def rebuild(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return new arguments in which values, by name, replace the tensors."""
        memo = {id(each): each for each in self._shared}
        for name, tensor in self.tensors.items():
            memo[id(tensor)] = values[name].clone() if name in self.changed else values[name]
        arguments: dict[str, Any] = copy.deepcopy(dict(self._arguments), memo)
        for place, (name, axis) in self.counts.items():
            *path, last = place.split(".")
            set_child(functools.reduce(_child, path, arguments), last, values[name].shape[axis])
        return arguments

    @functools.cached_property
    def _shared(self) -> list[Any]:
        """The modules and constant tensors in the arguments, which are not copied."""
        leaves = Leaves.of(self._arguments).leaves.values()
        return [leaf for leaf in leaves if isinstance(leaf, (nn.Module, Tensor))]

    def by_name(self, given: Any) -> Any:
        """Return the axes that are given for tensors, or for places with some, by their names.

        What is given for a tensor, or for the inner one of two places, counts. Of the axes that are
        given for a place, each tensor has those that it can have.
        """
        if not isinstance(given, Mapping):
            return given
        found: dict[str, Any] = {}
        used: set[str] = set()
        for name, place in self.places.items():
            steps = place.split(".")
            keys = [name, *(".".join(steps[:count]) for count in range(len(steps), 0, -1))]
            there = [key for key in keys if key in given]
            used.update(there)
            axes = given[there[0]] if there else {}
            if there and there[0] not in (name, place) and isinstance(axes, Mapping):
                dims = range(self.tensors[name].dim())
                axes = {at: axis for at, axis in axes.items() if at in dims}
            if there:
                found[name] = axes
        return found | {key: value for key, value in given.items() if key not in used}

    def counting(self, numbers: Iterable[str], axes: Mapping[str, Mapping[int, str]]) -> Self:
        """Return the tree with numbers that are sizes of named axes of tensors beside them."""
        leaves = Leaves.of(self._arguments).leaves
        counts: dict[str, tuple[str, int]] = {}
        for place in numbers:
            beside = f"{place.rpartition('.')[0]}."
            for name, at in self.places.items():
                for axis in axes[name] if at.startswith(beside) else ():
                    if self.tensors[name].shape[axis] == leaves[place]:
                        counts.setdefault(place, (name, axis))
        return dataclasses.replace(self, counts=counts)


def _own(name: str, value: Any) -> Any:
    """Return a copy of an argument whose tensors are no others' and need no gradients."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_own(f"{name}.{index}", each) for index, each in enumerate(value))
    if type(value) is dict:
        return {key: _own(f"{name}.{key}", each) for key, each in value.items()}
    leaves = Leaves.of({name: value}).leaves.values()
    memo: dict[int, Any] = {id(leaf): leaf for leaf in leaves if isinstance(leaf, nn.Module)}
    memo |= {id(leaf): leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)}
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise UsageError(
            f"{name} is {type(value).__name__}, which cannot be copied ({one_line(error)}); pass "
            "the tensors in it"
        ) from error


def _child(value: Any, key: str) -> Any:
    return next(child for name, child in children_of(value) or () if str(name) == key)


def set_child(value: Any, key: str, number: Any) -> None:
    """Set what a container or an object, which may be frozen, holds by a key or name."""
    if isinstance(value, dict):
        value[next(each for each in value if str(each) == key)] = number
    elif isinstance(value, (list, deque)):
        value[int(key)] = number
    else:
        object.__setattr__(value, key, number)


# -- results of a call ----------------------------------------------------------------------------

RETURNED = "return"
"""The place of what a module returns; no parameter can have this name."""


@dataclasses.dataclass(frozen=True)
class Results:
    """The named outputs of a module.

    Attributes:
        names: The names that the user gave.
        places: The place of each output, by name; by default they are returned in this order.
        problem: What is wrong with the names.
        states: The input that takes an output in the next call, by output.
        changed: The outputs that are plain tensors which the call changes in place, by input.
        numbers: The places of the numbers in objects that the call changes.
    """

    names: Sequence[str]
    places: Mapping[str, str] | None = None
    states: Mapping[str, str] = dataclasses.field(default_factory=dict)
    changed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Sequence[str] = ()
    problem: UsageError | None = None

    def notes(self, tree: InputTree) -> list[str]:
        """Return what the user may not expect."""
        notes = [
            f"forward changes {name} in place; its value after that is the output {output}"
            for name, output in self.changed.items()
        ]
        kept = ", ".join(place for place in self.numbers if place not in tree.counts)
        says = f"forward changes {kept}, which is no tensor: in the graph it is as in the example"
        return [*notes, says] if kept else notes

    def of(
        self, call: Callable[[Any], Any], tree: InputTree, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the outputs of a call with these inputs, by name; see `Subject.call`."""
        arguments = tree.rebuild(inputs)
        try:
            returned = call(arguments)
        except WeightsError:
            raise
        except Exception as error:
            at = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in inputs.items())
            raise ExportError(f"the module raised at {at}: {_cause_in_run(error)}") from error
        return self.read(returned, arguments)

    def read(self, returned: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the outputs by name, from what a call returned and the arguments after it.

        Raises:
            UsageError: If there is none.
        """
        places = self.places
        if places is None:
            if self.problem is not None:
                raise self.problem
            places = dict(zip(self.names, Leaves.of({RETURNED: returned}).tensors(), strict=True))
        leaves = Leaves.of({RETURNED: returned, **arguments}).leaves
        for name, place in places.items():
            if not isinstance(leaves.get(place), Tensor):
                raise UsageError(
                    f"the module gives {name} as a tensor with the example, and as "
                    f"{type(leaves.get(place)).__name__} at other sizes; give it always"
                )
        return {name: leaves[place] for name, place in places.items()}


# -- refusals of inputs that are like no array ----------------------------------------------------


@contextlib.contextmanager
def _checked_inputs(inputs: Mapping[Any, Any]) -> Iterator[None]:
    """Refuse names that are no strings, and values that hold themselves, inside this block."""
    for name in inputs:
        if not isinstance(name, str):
            raise UsageError(f"inputs are named by strings; got {printable(repr(name), 60)}")
    try:
        yield
    except RecursionError as error:
        raise UsageError(f"inputs {', '.join(inputs)} are nested without end") from error


def _dense(place: str, tensor: Tensor) -> Tensor:
    """Return a tensor; raise an error if it is not like an array in memory."""
    if tensor.is_nested:
        raise UsageError(f"{place} is a nested tensor; pass a padded one, and a mask")
    if tensor.is_meta or hasattr(tensor, "fake_mode"):
        raise UsageError(f"{place} is a tensor without values; pass one with values")
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UsageError(f"{place} is a {kind} tensor; pass a dense one")
    return tensor
