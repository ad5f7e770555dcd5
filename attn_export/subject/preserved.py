"""Restoration of a module's state after a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

Contents = dict[Any, Any] | list[Any] | set[Any]


@contextlib.contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module and its parts at the end of the block.

    A module may keep what it made in a call, such as a mask. What it keeps while it is captured
    holds no numbers. The tensors themselves are not copied.

    Args:
        module: The module; its attributes, and the dicts, lists and sets that they are, come back.
    """
    before = [
        (part, dict(vars(part)), [(value, value.copy()) for value in _containers(part)])
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, attributes, contents in before:
            vars(part).clear()
            vars(part).update(attributes)
            for value, held in contents:
                _restore(value, held)


def _containers(part: nn.Module) -> list[Contents]:
    return [value for value in vars(part).values() if type(value) in (dict, list, set)]


def _restore(value: Contents, held: Contents) -> None:
    """Restore the contents of a container."""
    if isinstance(value, list):
        value[:] = held
    else:
        value.clear()
        value.update(held)
