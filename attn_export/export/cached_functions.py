"""Users' functions that keep their results, called each time while a module is captured."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Take functools.lru_cache off the functions of a module's files, inside this block.

    A size that is traced cannot be a key, and what is made of it is of no use later.
    """
    kinds = {type(part) for part in module.modules()}
    kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.")}
    files = {id(file): file for kind in kinds if (file := sys.modules.get(kind.__module__))}
    before: list[tuple[Any, str, Any]] = [
        (owner, name, value)
        for owner in (*kinds, *files.values())
        for name, value in vars(owner).items()
        if isinstance(value, functools._lru_cache_wrapper)
    ]
    try:
        for owner, name, value in before:
            setattr(owner, name, value.__wrapped__)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
