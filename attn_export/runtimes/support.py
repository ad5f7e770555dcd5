"""What a runtime was seen not to do: rows of the table in its file."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """Something that a runtime was seen not to do.

    Attributes:
        features: A graph that has all of them, as `graph.features` names them, is concerned.
        says: What the runtime answers, or in which way it is wrong.
    """

    features: frozenset[str]
    says: str


def unsupported(*features: str, says: str) -> Unsupported:
    """A row of a runtime's table."""
    return Unsupported(frozenset(features), says)
