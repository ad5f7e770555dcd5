"""The inputs and outputs of a graph's file, held against those of a bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attn_export.errors import GraphError
from attn_export.results import GraphFile
from attn_export.spec import Shape

if TYPE_CHECKING:
    import onnx

MOST_NAMES = 12
"""The most names that a message lists."""


@dataclasses.dataclass(frozen=True)
class End:
    """An input or output as a bundle states it.

    Attributes:
        shape: Its axes; dynamic ones by name.
        dtype: As numpy names it, or ``"bfloat16"``.
    """

    shape: Shape
    dtype: str


def form_of_file(
    model: onnx.ModelProto,
    path: str,
    form: GraphFile,
    inputs: Mapping[str, End],
    outputs: Mapping[str, End],
) -> GraphFile:
    """Return the description of a graph that replaces one of a bundle.

    Args:
        model: The graph.
        path: The name of its file, for messages.
        form: How the graph of the bundle is run.
        inputs: The inputs that the bundle states.
        outputs: Its outputs.

    Returns:
        The form, with the axes fixed that have one size in this file.

    Raises:
        GraphError: If the graph has other inputs or outputs: names, dtypes, ranks or sizes.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    given = [value for value in model.graph.input if value.name not in constants]
    fixed: dict[str, int] = {}
    for what, values, wanted in (
        ("inputs", given, inputs),
        ("outputs", list(model.graph.output), outputs),
    ):
        _refuse_other_names(path, what, [value.name for value in values], list(wanted))
        for value in values:
            end, layout = wanted[value.name], form.layouts.get(value.name)
            shape = tuple(end.shape[axis] for axis in layout) if layout else end.shape
            _refuse_other_type(path, value, end.dtype)
            found = _fixed_axes(path, value, shape)
            if what == "inputs":
                fixed |= found
    return dataclasses.replace(form, fixed=fixed)


def _refuse_other_names(path: str, what: str, found: Sequence[str], wanted: Sequence[str]) -> None:
    if set(found) != set(wanted):
        raise GraphError(
            f"{path} has the {what} {_listed(found)}; those of the bundle are {_listed(wanted)}"
        )


def _refuse_other_type(path: str, value: onnx.ValueInfoProto, wanted: str) -> None:
    from onnx import helper

    code = value.type.tensor_type.elem_type
    try:
        found = helper.tensor_dtype_to_np_dtype(code).name
    except (KeyError, ValueError, TypeError):
        found = f"of the type {code}"
    if found != wanted:
        raise GraphError(f"{path}: {_shown(value.name)} is {found}; in the bundle it is {wanted}")


def _fixed_axes(path: str, value: onnx.ValueInfoProto, wanted: Shape) -> dict[str, int]:
    """Return the sizes of dynamic axes that are fixed here."""
    if not value.type.tensor_type.HasField("shape"):
        return {}
    dims = value.type.tensor_type.shape.dim
    found = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims]
    same = len(found) == len(wanted) and all(
        isinstance(axis, str) or isinstance(size, str) or size == axis
        for size, axis in zip(found, wanted, strict=True)
    )
    if not same:
        raise GraphError(
            f"{path}: {_shown(value.name)} has the shape {found}; in the bundle it is "
            f"{list(wanted)}"
        )
    return {
        axis: size
        for size, axis in zip(found, wanted, strict=True)
        if isinstance(axis, str) and isinstance(size, int)
    }


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > MOST_NAMES else ""
    return ", ".join(map(_shown, names[:MOST_NAMES])) + more or "none"


def _shown(name: str) -> str:
    return name if name.isidentifier() else repr(name)
