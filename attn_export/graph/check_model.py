"""Input and result of a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx

from attn_export.dialect_names import STANDARD
from attn_export.results import GraphFile
from attn_export.spec import Shape


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected properties of a graph; read from a spec or a manifest.

    Attributes:
        inputs: Name and shape of every input; dynamic axes by name.
        outputs: Name and shape of every output.
        dialect: One of `DIALECTS`.
        attentions: The required number of `Attention` nodes; None if unknown.
        ours: Whether the graph is of our own module, whose operators are all known.
    """

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    dialect: str = STANDARD
    attentions: int | None = None
    ours: bool = False


def expected_of(file: GraphFile, whole: Expected) -> Expected:
    """Return the expected properties of one graph of a bundle.

    Args:
        file: The differences of the graph from the signature.
        whole: The expected properties of the graph in the standard dialect.
    """

    def own(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        fixed = {
            name: tuple(file.fixed.get(str(axis), axis) for axis in shape)
            for name, shape in shapes.items()
        }
        return {
            name: tuple(shape[axis] for axis in file.layouts.get(name, range(len(shape))))
            for name, shape in fixed.items()
        }

    return dataclasses.replace(
        whole,
        inputs=own(whole.inputs),
        outputs=own(whole.outputs),
        dialect=file.dialect,
        attentions=whole.attentions if file.dialect == STANDARD else None,
    )


@dataclasses.dataclass(frozen=True)
class Checked:
    """A graph under check.

    Attributes:
        proto: Without external data.
        path: The file; its external data is beside it.
        expected: The expected properties; None for a file of unknown origin.
    """

    proto: onnx.ModelProto
    path: Path
    expected: Expected | None


@dataclasses.dataclass(frozen=True)
class CheckFinding:
    """Something wrong with a graph.

    Attributes:
        check: The name of the check.
        message: The description and the remedy.
        is_warning: Whether the ONNX standard allows it.
    """

    check: str
    message: str
    is_warning: bool = False


Check = Callable[[Checked], Iterator[str]]


def shape_of(value: onnx.ValueInfoProto) -> Shape | None:
    """Return the declared shape: sizes, names, or "" for an axis without either."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param
        for dim in value.type.tensor_type.shape.dim
    )


def show(shape: Shape | None) -> str:
    """Format a shape as text."""
    return "unknown" if shape is None else f"[{', '.join(str(axis) or '?' for axis in shape)}]"
