"""One mutant, and what a kind of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import onnx

Change = Callable[[onnx.ModelProto], None]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault at a place.

    Attributes:
        kind: The kind of fault.
        row: The letter of the row of faults that it belongs to.
        what: The fault and the place in words.
        change: Plants it into a copy of the graph.
    """

    kind: str
    row: str
    what: str
    change: Change


@dataclasses.dataclass(frozen=True)
class Setting:
    """Graph to mutate.

    Attributes:
        model: The graph, with its weights.
        heads: The number of query heads.
        kv_heads: The number of key/value heads.
        decodes: Whether it is for one query only.
    """

    model: onnx.ModelProto
    heads: int
    kv_heads: int
    decodes: bool


Kinds = Callable[[Setting], Iterator[Mutant]]
