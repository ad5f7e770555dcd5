"""Formatting of a checkpoint's content on one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

AT_MOST: Final = 6
"""So many things are listed, the rest is counted."""
LONGEST: Final = 400


def shown(name: str) -> str:
    """Return a name out of a file, printable and on one line."""
    plain = name if name.isprintable() else ascii(name)
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}…"


def listed(items: Iterable[str], separator: str = ", ") -> str:
    """Return the first items, and the number of further ones.

    Args:
        items: The items.
        separator: The text between two items.
    """
    every = [shown(item) for item in items]
    more = f"{separator}and {len(every) - AT_MOST} more" if len(every) > AT_MOST else ""
    return separator.join(every[:AT_MOST]) + more


def bracketed(shape: Sequence[int]) -> str:
    """Format a shape, as in ``[32, 64]``."""
    return f"[{', '.join(map(str, shape))}]"
