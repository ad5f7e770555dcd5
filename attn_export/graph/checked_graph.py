"""A graph under check: what is expected of it, its declared shapes, and what inference finds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx

from attn_export.dialect_names import STANDARD
from attn_export.schema import GraphFile
from attn_export.spec import Shape


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected properties of a graph; read from a spec or a manifest.

    Attributes:
        inputs: The shape of every input, by name; dynamic axes are names.
        outputs: The shape of every output, by name.
        attentions: The required number of `Attention` nodes; None if unknown.
        ours: Whether the graph is of attn-export's own module, whose operators are all known.
    """

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    dialect: str = STANDARD
    attentions: int | None = None
    ours: bool = False


def expected_of(file: GraphFile, standard: Expected) -> Expected:
    """Return the expected properties of one graph of a bundle."""

    def lay_out(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        laid_out = {}
        for name, shape in shapes.items():
            sizes = [file.fixed.get(str(axis), axis) for axis in shape]
            laid_out[name] = tuple(sizes[i] for i in file.layouts.get(name, range(len(sizes))))
        return laid_out

    return dataclasses.replace(
        standard,
        inputs=lay_out(standard.inputs),
        outputs=lay_out(standard.outputs),
        dialect=file.dialect,
        attentions=standard.attentions if file.dialect == STANDARD else None,
    )


MOST_ELEMENTS = 2**38
"""The largest number of elements of a value: a terabyte in float32."""

MOST_LISTED = 2**20
"""The largest number of elements with which inference lists the elements of values of one axis. It
takes a microsecond and 100 bytes for each."""


@dataclasses.dataclass(frozen=True)
class CheckedGraph:
    """A graph under check.

    Attributes:
        expected: The expected properties; None for a file of unknown origin.
    """

    proto: onnx.ModelProto
    path: Path
    expected: Expected | None

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each value of a known size, by ``"NAME of OPERATOR"``."""
        import onnx.inliner

        try:
            whole = onnx.inliner.inline_local_functions(_without_shapes(self.proto))
            inferred = onnx.shape_inference.infer_shapes(whole).graph
        except Exception:
            return {}  # `onnx_checker` says so.
        shapes = {v.name: shape_of(v) or ("",) for v in (*inferred.value_info, *inferred.output)}
        return {
            f"{name} of {node.op_type}": math.prod(map(int, shapes[name]))
            for node in whole.graph.node
            for name in node.output
            if all(isinstance(axis, int) for axis in shapes.get(name, ("",)))
        }

    def infer(self, model: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
        """Return a model with inferred shapes.

        They also follow from elements of values, unless those are too many to be listed.
        """
        listed = max(self.sizes.values(), default=0) <= MOST_LISTED
        return onnx.shape_inference.infer_shapes(model, data_prop=listed, **options)

    @functools.cached_property
    def shapes(self) -> list[tuple[str, Shape, Shape | None]]:
        """The name, the declared and the inferred shape of each value with a declared shape.

        Initialisers are left out, and there are none if inference fails.
        """
        try:
            inferred = self.infer(_without_shapes(self.proto)).graph
        except Exception:
            return []  # `strict_shape_inference` says so.
        produced = {v.name: shape_of(v) for v in (*inferred.value_info, *inferred.output)}
        model = self.proto.graph
        known = {tensor.name for tensor in model.initializer}
        return [
            (value.name, declared, produced.get(value.name))
            for value in (*model.input, *model.value_info, *model.output)
            if value.name not in known and (declared := shape_of(value)) is not None
        ]


def _without_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model that declares no shapes but those of its inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    for output in copy.graph.output:
        output.type.tensor_type.ClearField("shape")
    return copy


@dataclasses.dataclass(frozen=True)
class CheckFinding:
    """Defect of a graph.

    Attributes:
        is_warning: Whether the ONNX standard allows it, so that it is only a warning.
    """

    check: str
    message: str
    is_warning: bool = False


Check = Callable[[CheckedGraph], Iterator[str]]
"""Function that yields a message for each defect; its name is the name of the check."""


def shape_of(value: onnx.ValueInfoProto) -> Shape | None:
    """Return the declared shape, "" for an axis without size or name; None without a shape."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param
        for dim in value.type.tensor_type.shape.dim
    )


def show(shape: Shape | None) -> str:
    """Format a shape as text.

    `shape`: Sizes and names of axes; None if it is not known.
    """
    return "unknown" if shape is None else f"[{', '.join(str(axis) or '?' for axis in shape)}]"
