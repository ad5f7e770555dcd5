"""A graph under check, with checks of its validity, shapes and dynamic axes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx

from attn_export.dialect_names import STANDARD
from attn_export.errors import one_line
from attn_export.interface import Shape
from attn_export.schema import GraphFile


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected properties of a graph; read from a spec or a manifest.

    Attributes:
        inputs: The shape of every input, by name; dynamic axes are names.
        outputs: The shape of every output, by name.
        attentions: The required number of `Attention` nodes; None if unknown.
        ours: Whether the graph is of attn-export's own module, whose operators are all known.
        exact: As in `GraphFile`.
    """

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    dialect: str = STANDARD
    attentions: int | None = None
    ours: bool = False
    exact: str = ""


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
        exact=file.exact,
        attentions=standard.attentions if file.dialect == STANDARD else None,
    )


MOST_ELEMENTS = 2**38
"""The largest number of elements of a value: a terabyte in float32."""

_MOST_LISTED = 2**20
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
        listed = max(self.sizes.values(), default=0) <= _MOST_LISTED
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

RULES: dict[Check, bool] = {}
"""The checks that were defined so far, in order, and whether each is a rule of this project."""


def standard_rule(check: Check) -> Check:
    """Add a check of what ONNX or what is expected demands: its findings are errors."""
    RULES[check] = False
    return check


def project_rule(check: Check) -> Check:
    """Add a check of what ONNX does not demand: graphs from other tools get warnings."""
    RULES[check] = True
    return check


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


# -- ONNX validity and declared shapes ----------------------------------------------------------


@standard_rule
def onnx_checker(graph: CheckedGraph) -> Iterator[str]:
    """Run the full onnx checker."""
    try:
        # By path: only so are external data, and models over 2 GiB, checked.
        onnx.checker.check_model(str(graph.path), full_check=True)
    except onnx.shape_inference.InferenceError as error:
        yield f"shapes do not fit: {one_line(error)}; correct the node or the declared shape"
    except Exception as error:  # its own, and what damaged files make of it
        yield f"{one_line(error)}; export it again or correct the node"


@standard_rule
def value_sizes(graph: CheckedGraph) -> Iterator[str]:
    """Check that no value of a known size has more elements than any memory holds."""
    for name, count in graph.sizes.items():
        if count > MOST_ELEMENTS:
            yield f"{name} has {count} elements, which no memory holds; correct what gives its size"


@standard_rule
def strict_shape_inference(graph: CheckedGraph) -> Iterator[str]:
    """Run shape inference in strict mode, which fails at the first operator it cannot infer."""
    try:
        graph.infer(graph.proto, check_type=True, strict_mode=True)
    except Exception as error:  # its own, and what damaged files make of it
        yield f"{one_line(error)}; correct the node's inputs or attributes"


@standard_rule
def declared_shapes(graph: CheckedGraph) -> Iterator[str]:
    """Compare declared shapes with inferred ones."""
    for name, declared, found in graph.shapes:
        if found is not None and not _agree(declared, found):
            yield f"{name} is declared {show(declared)} but is {show(found)}; declare that"


@project_rule
def empty_axes(graph: CheckedGraph) -> Iterator[str]:
    """Check that axes are declared 0 only where inference gives 0: some exporters mean "any"."""
    for name, declared, found in graph.shapes:
        if 0 in declared and not (found and 0 in found):
            yield f"{name} is declared {show(declared)}: no tensor has an axis of 0; name it"


def _agree(declared: Shape, inferred: Shape) -> bool:
    # A declared size must equal the inferred one, unless inference cannot determine it: "", unk__N,
    # or 0 for an unknown total length of `Attention`. A declared name agrees with anything.
    sizes = zip(declared, inferred, strict=False)
    return len(declared) == len(inferred) and all(
        d == f or not f or str(f).startswith("unk__") for d, f in sizes if isinstance(d, int)
    )


# -- inputs and outputs ---------------------------------------------------------------------------


@standard_rule
def signature(graph: CheckedGraph) -> Iterator[str]:
    """Check names and order of inputs and outputs against the expected ones."""
    if graph.expected is None:
        return
    for label, values, expected in (
        ("inputs", graph.proto.graph.input, list(graph.expected.inputs)),
        ("outputs", graph.proto.graph.output, list(graph.expected.outputs)),
    ):
        names = [value.name for value in values]
        if names != expected:
            yield f"{label} are {', '.join(names)}, expected {', '.join(expected)}; export it again"


@standard_rule
def dynamic_axes(graph: CheckedGraph) -> Iterator[str]:
    """Check that the axes of inputs and outputs have the expected sizes and names."""
    if graph.expected is None:
        return
    all_expected = {**graph.expected.inputs, **graph.expected.outputs}
    for value in (*graph.proto.graph.input, *graph.proto.graph.output):
        shape, expected = shape_of(value), all_expected.get(value.name)
        if expected is None:
            continue
        if shape is None or len(shape) != len(expected):
            yield f"{value.name} is {show(shape)}, expected {show(expected)}; export it again"
            continue
        for axis, (actual, wanted) in enumerate(zip(shape, expected, strict=True)):
            if actual == wanted or wanted == "":  # "" expects no name
                continue
            place = f"axis {axis} of {value.name}"
            if isinstance(wanted, str) and isinstance(actual, int):
                yield f"{place} is fixed at {actual}, expected the dynamic axis {wanted!r}; name it"
            elif isinstance(wanted, int) and isinstance(actual, int):
                yield f"{place} is {actual}, expected {wanted}; export it again"
            else:
                yield f"{place} is {actual or '?'!r}, expected {wanted!r}; rename it"


@project_rule
def named_axes(graph: CheckedGraph) -> Iterator[str]:
    """Check that every axis of inputs and outputs has a size or a name."""
    for value in (*graph.proto.graph.input, *graph.proto.graph.output):
        shape = shape_of(value)
        if shape is None:
            yield f"{value.name} has no declared shape; declare it, dynamic axes by name"
        elif "" in shape:
            yield f"axis {shape.index('')} of {value.name} has neither size nor name; name it"
