"""Known limits of runtimes: the rows of the tables in their files."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """Something that a runtime was seen not to do.

    Attributes:
        features: A graph that has all of them, as `graph.features` names them, is concerned.
        says: The runtime's message, or a description of its error.
    """

    features: frozenset[str]
    says: str


def unsupported(*features: str, says: str) -> Unsupported:
    """Return a row of a runtime's table."""
    return Unsupported(frozenset(features), says)
