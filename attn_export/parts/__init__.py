"""Optional parts of the package: each folder here is one, and may be removed.

A part imports the core. The core imports no part: it reads `PART` of each folder that is there, and
imports a module of a part when it is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Part:
    """What a part adds to the core: modules by name.

    Attributes:
        commands: The module of each command. It holds `NAME_command`.
        installs: The module that installs what has a name. It holds `install(name, say)`.
        tests_need: The names of what the part's tests need to be installed.
    """

    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    installs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tests_need: Sequence[str] = ()


@functools.cache
def parts() -> tuple[Part, ...]:
    """Return the parts whose folders are there, in the order of their names."""
    names = sorted(file.parent.name for file in Path(__file__).parent.glob("*/__init__.py"))
    return tuple(import_module(f"{__name__}.{name}").PART for name in names)
