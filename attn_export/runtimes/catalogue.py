"""Every runtime, by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from attn_export.errors import UsageError, choose
from attn_export.optional_parts import module_of, parts
from attn_export.runtimes.engines import ENGINES

if TYPE_CHECKING:
    from attn_export.runtimes.protocol import Runtime

DEFAULT = ("ort-cpu", "ort-cuda")
"""The runtimes of a job that names none. Without a GPU, ort-cuda is reported as not run."""

NAMES = (*dict.fromkeys((*DEFAULT, *ENGINES)),)
"""The names of all runtimes of the core, in the order in which they are listed."""


def runtime(name: str) -> Runtime:
    """Return the runtime of this name; UsageError if the name stands for several."""
    first, *others = runtimes_of(name)
    if others:
        raise UsageError(f"{name} stands for {1 + len(others)} runtimes; name one of them")
    return first


@functools.cache
def runtimes_of(name: str) -> Sequence[Runtime]:
    """Return the runtimes that a name stands for: one, or more for a name such as a part's."""
    forms = dict(ENGINES)
    if name not in forms:
        for part in parts():
            forms |= {**part.runtimes, **part.references}
    found = module_of(name, forms)
    if found is None:
        raise UsageError(f"unknown runtime {name!r}; {choose(name, (*all_names(), 'all'))}")
    runtimes: Sequence[Runtime] = (
        [found.RUNTIME()] if hasattr(found, "RUNTIME") else found.runtimes_of(name)
    )
    return runtimes


def all_names() -> tuple[str, ...]:
    """Return the names of the runtimes that `all` stands for: first the core's, then parts'."""
    return (*NAMES, *(name for part in parts() for name in part.runtimes if name.islower()))


def all_runtimes() -> tuple[Runtime, ...]:
    """Return the runtimes that `all` stands for, whose modules are then imported."""
    return tuple(map(runtime, all_names()))


def packages() -> Mapping[str, Sequence[str]]:
    """Return the PyPI packages of each runtime that pip installs, by its name."""
    return {kind.name: kind.packages for kind in all_runtimes() if kind.packages}


def required() -> list[str]:
    """Return the names of the runtimes that the tests require by default."""
    return [kind.name for kind in all_runtimes() if kind.required]


def runtimes_of_parts() -> Iterator[tuple[Runtime, str]]:
    """Yield the runtimes of forms that parts list, each with what is said of it."""
    forms = {form: module for part in parts() for form, module in part.runtimes.items()}
    for module in (module for form, module in forms.items() if not form.islower()):
        yield from import_module(module).listed()
