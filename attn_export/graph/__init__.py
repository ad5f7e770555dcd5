"""ONNX graphs without torch: canonical form, checks, files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from attn_export.schema import GraphFile

if TYPE_CHECKING:
    import onnx_ir as ir

M = TypeVar("M")


@dataclasses.dataclass(frozen=True)
class Graph(Generic[M]):
    """A graph, and what is known of it.

    Attributes:
        model: The graph: an `ir.Model`, or the `ModelProto` of a file that is compared.
        file: Its file name in a bundle, and how it differs from the cases.
        path: The file that it was read from, if there is one.
        origins: The line of code of each node, by its name: ``package/file.py:line``.
        in_bfloat16: Returns the graph that computes in bfloat16, if `model` casts bfloat16 to
            float32; else None.
        recognised: The number of attentions that are written out in several operators in the
            source, and are one node here. If it is not 0, the graph must be compared with the
            source before it is used.
        notes: What was made of the source, for the report.
    """

    model: M
    file: GraphFile = dataclasses.field(default_factory=GraphFile)
    path: Path = Path()
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_bfloat16: Callable[[], M] | None = None
    recognised: int = 0
    notes: tuple[str, ...] = ()


IrGraph: TypeAlias = "Graph[ir.Model]"
