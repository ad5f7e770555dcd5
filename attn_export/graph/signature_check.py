"""Comparison of a graph's inputs and outputs with those that a bundle or a reference states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attn_export.errors import GraphError
from attn_export.interface import Shape
from attn_export.schema import GraphFile

if TYPE_CHECKING:
    import onnx

    from attn_export.schema import TensorSignature


_MOST_NAMES = 12
"""The most names that a message lists."""


def match_graph_file(
    model: onnx.ModelProto,
    path: str,
    graph_file: GraphFile,
    inputs: Mapping[str, TensorSignature],
    outputs: Mapping[str, TensorSignature],
    whose: str = "the bundle",
    *,
    may_fix: bool = True,
) -> GraphFile:
    """Check the inputs and outputs of a graph that replaces one of a bundle, or is compared.

    Returns:
        The description, with the dynamic axes that have a fixed size in this file.
    """
    file_inputs = inputs_of(model)
    fixed: dict[str, int] = {}
    for label, values, stated in (
        ("inputs", file_inputs, inputs),
        ("outputs", list(model.graph.output), outputs),
    ):
        names = [value.name for value in values]
        if set(names) != set(stated):
            raise _other_names(path, label, names, list(stated), whose)
        for value in values:
            spec = stated[value.name]
            layout = graph_file.layouts.get(value.name, range(len(spec.shape)))
            shape = tuple(spec.shape[axis] for axis in layout)
            dtype, wanted = dtype_name(value), graph_file.dtypes.get(value.name, spec.dtype)
            if dtype != wanted:
                raise GraphError(
                    f"{path}: {_shown(value.name)} is {dtype}; in {whose} it is {wanted}"
                )
            fixed_here = _fixed_axes(path, value, shape, whose)
            if label == "inputs" or not may_fix:
                fixed |= fixed_here
    if fixed and not may_fix:
        shown = ", ".join(f"{_shown(axis)} is fixed at {size}" for axis, size in fixed.items())
        raise GraphError(
            f"{path}: {shown} in the graph, and dynamic in {whose}; export it with these axes "
            f"dynamic, or leave them unnamed in {whose}"
        )
    return replace(graph_file, fixed=fixed)


def inputs_of(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs without a default value: those that are no initialisers."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def matched_names(
    path: str,
    label: str,
    graph_names: Sequence[str],
    wanted: Sequence[str],
    names: Mapping[str, str],
    whose: str,
) -> dict[str, str]:
    """Return the graph's name of each input or output of a reference: a module or another graph.

    Names that `names` does not map match by equality, and the remaining ones by position.
    """
    chosen = {name: names[name] for name in wanted if name in names}
    chosen |= {
        n: n for n in wanted if n not in chosen and n in graph_names and n not in chosen.values()
    }
    unused = [name for name in graph_names if name not in chosen.values()]
    unmatched = [name for name in wanted if name not in chosen]
    if len(graph_names) != len(wanted) or len(unused) != len(unmatched):
        raise _other_names(path, label, graph_names, wanted, whose)
    chosen |= dict(zip(unmatched, unused, strict=True))
    return {name: chosen[name] for name in wanted}


def _other_names(
    path: str, label: str, graph_names: Sequence[str], wanted: Sequence[str], whose: str
) -> GraphError:
    return GraphError(
        f"{path} has the {label} {_listed(graph_names)}; those of {whose} are {_listed(wanted)}"
    )


def dtype_name(value: onnx.ValueInfoProto) -> str:
    """Return the dtype of an input or output as numpy names it."""
    from onnx import helper

    code = value.type.tensor_type.elem_type
    try:
        return str(helper.tensor_dtype_to_np_dtype(code).name)
    except (KeyError, ValueError, TypeError):
        return f"of the type {code}"


def _fixed_axes(path: str, value: onnx.ValueInfoProto, wanted: Shape, whose: str) -> dict[str, int]:
    """Return the sizes of stated dynamic axes that are fixed in the file."""
    if not value.type.tensor_type.HasField("shape"):
        return {}
    dims = value.type.tensor_type.shape.dim
    sizes = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims]
    same = len(sizes) == len(wanted) and all(
        isinstance(axis, str) or isinstance(size, str) or size == axis
        for size, axis in zip(sizes, wanted, strict=True)
    )
    if not same:
        raise GraphError(
            f"{path}: {_shown(value.name)} has the shape {sizes}; in {whose} it is {list(wanted)}"
        )
    return {
        axis or f"{value.name}.shape[{number}]": size
        for number, (size, axis) in enumerate(zip(sizes, wanted, strict=True))
        if isinstance(axis, str) and isinstance(size, int)
    }


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(_shown, names[:_MOST_NAMES])) + more or "none"


def _shown(name: str) -> str:
    return name if name.isidentifier() else repr(name)
