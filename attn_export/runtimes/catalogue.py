"""Every runtime, by name."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attn_export.errors import UsageError

if TYPE_CHECKING:
    from attn_export.runtimes.protocol import Runtime

DEFAULT = ("ort-cpu", "ort-cuda")
"""The runtimes of a job that names none. Without a GPU, ort-cuda is reported as not run."""

ENGINES = sorted(
    file.stem.replace("_", "-")
    for file in Path(__file__).with_name("engines").glob("*.py")
    if file.stem != "__init__"
)
"""The names of the runtimes in `engines/`. A module is imported when its runtime is first used:
importing all of them takes a tenth of the time of `verify`."""

NAMES = (*dict.fromkeys((*DEFAULT, *ENGINES)),)
"""The names of all runtimes of the core, in the order in which they are listed."""


@runtime_checkable
class RuntimesOfPart(Protocol):
    """A module of a part with runtimes."""

    def runtimes_of(self, name: str) -> Sequence[Runtime]:
        """Return the runtimes that a name stands for: one, or more for a name that has a form."""
        ...


@runtime_checkable
class RuntimeFamily(RuntimesOfPart, Protocol):
    """A module of a part: runtimes whose names have one form."""

    def listed(self) -> Iterable[tuple[Runtime, str]]:
        """Return the runtimes that `attn-export runtimes` lists, each with what it says of it."""
        ...


def runtime(name: str) -> Runtime:
    """Return the runtime of this name; UsageError if the name stands for several."""
    first, *others = runtimes_of(name)
    if others:
        raise UsageError(f"{name} stands for {1 + len(others)} runtimes; name one of them")
    return first


@functools.cache
def runtimes_of(name: str) -> Sequence[Runtime]:
    """Return the runtimes that a name stands for: one, or more for a name such as a part's."""
    if name in ENGINES:
        return [import_module(f"attn_export.runtimes.engines.{name.replace('-', '_')}").RUNTIME()]
    from attn_export.parts import module_of, parts

    forms = {
        form: module
        for part in parts()
        for form, module in (*part.runtimes.items(), *part.references.items())
    }
    found: RuntimesOfPart | None = module_of(name, forms)
    if found is None:
        raise UsageError(f"unknown runtime {name!r}; choose from {', '.join(all_names())}, all")
    return found.runtimes_of(name)


def all_names() -> tuple[str, ...]:
    """Return the names of the runtimes that `all` stands for: first the core's, then parts'."""
    from attn_export.parts import parts

    return (*NAMES, *(name for part in parts() for name in part.runtimes if name.islower()))


def all_runtimes() -> tuple[Runtime, ...]:
    """Return the runtimes that `all` stands for, whose modules are then imported."""
    return tuple(map(runtime, all_names()))


def packages() -> Mapping[str, Sequence[str]]:
    """Return the PyPI packages of each runtime that pip installs, by its name."""
    return {kind.name: kind.packages for kind in map(runtime, ENGINES) if kind.packages}


def required() -> list[str]:
    """Return the names of the runtimes in `engines/` that the tests require by default."""
    return [name for name in ENGINES if runtime(name).required]


def runtimes_of_parts() -> Iterator[tuple[Runtime, str]]:
    """Yield the runtimes of forms that parts list, each with what is said of it."""
    from attn_export.parts import parts

    forms = {form: module for part in parts() for form, module in part.runtimes.items()}
    for module in (module for form, module in forms.items() if not form.islower()):
        family: RuntimeFamily = import_module(module)
        yield from family.listed()
