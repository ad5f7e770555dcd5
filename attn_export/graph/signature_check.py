"""The inputs and outputs of a graph's file, held against those of a bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from attn_export.errors import GraphError
from attn_export.results import CHANGED, Case, Golden, GraphFile
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
    whose: str = "the bundle",
) -> GraphFile:
    """Return the description of a graph that replaces one of a bundle, or is compared.

    Args:
        model: The graph.
        path: The name of its file, for messages.
        form: The description of the graph in the bundle.
        inputs: The inputs that the bundle states.
        outputs: Its outputs.
        whose: The owner of these inputs and outputs, for messages.

    Returns:
        The form, with the axes fixed that have one size in this file.

    Raises:
        GraphError: If the graph has other inputs or outputs: names, dtypes, ranks or sizes.
    """
    given = inputs_of(model)
    fixed: dict[str, int] = {}
    for what, values, wanted in (
        ("inputs", given, inputs),
        ("outputs", list(model.graph.output), outputs),
    ):
        _refuse_other_names(path, what, [value.name for value in values], list(wanted), whose)
        for value in values:
            end, layout = wanted[value.name], form.layouts.get(value.name)
            shape = tuple(end.shape[axis] for axis in layout) if layout else end.shape
            _refuse_other_type(path, value, form.dtypes.get(value.name, end.dtype), whose)
            found = _fixed_axes(path, value, shape, whose)
            if what == "inputs":
                fixed |= found
    return dataclasses.replace(form, fixed=fixed)


def inputs_of(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that have to be given: those that no initialiser stands for."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def matched_names(
    path: str,
    what: str,
    found: Sequence[str],
    wanted: Sequence[str],
    names: Mapping[str, str],
    whose: str,
) -> dict[str, str]:
    """Return the graph's name of each input or output of a module or another graph.

    What `names` does not name has the same name, or else the same place among the rest.

    Args:
        path: The name of the graph's file, for messages.
        what: ``"inputs"`` or ``"outputs"``.
        found: The names in the graph, in order.
        wanted: The names of the module or of the other graph, in order.
        names: Names of the graph by those of the module, as the user gave them.
        whose: The owner of `wanted`, for messages.

    Raises:
        GraphError: If there are more of one than of the other, or two get one name.
    """
    chosen = {name: names[name] for name in wanted if name in names}
    chosen |= {n: n for n in wanted if n not in chosen and n in found and n not in chosen.values()}
    free = [name for name in found if name not in chosen.values()]
    open_ = [name for name in wanted if name not in chosen]
    if len(found) != len(wanted) or len(free) != len(open_):
        raise GraphError(
            f"{path} has the {what} {_listed(found)}; those of {whose} are {_listed(wanted)}"
        )
    chosen |= dict(zip(open_, free, strict=True))
    return {name: chosen[name] for name in wanted}


def _refuse_other_names(
    path: str, what: str, found: Sequence[str], wanted: Sequence[str], whose: str
) -> None:
    if set(found) != set(wanted):
        raise GraphError(
            f"{path} has the {what} {_listed(found)}; those of {whose} are {_listed(wanted)}"
        )


def dtype_name(value: onnx.ValueInfoProto) -> str:
    """Return the dtype of an input or output as numpy names it."""
    from onnx import helper

    code = value.type.tensor_type.elem_type
    try:
        return str(helper.tensor_dtype_to_np_dtype(code).name)
    except (KeyError, ValueError, TypeError):
        return f"of the type {code}"


def _refuse_other_type(path: str, value: onnx.ValueInfoProto, wanted: str, whose: str) -> None:
    found = dtype_name(value)
    if found != wanted:
        raise GraphError(f"{path}: {_shown(value.name)} is {found}; in {whose} it is {wanted}")


def _fixed_axes(path: str, value: onnx.ValueInfoProto, wanted: Shape, whose: str) -> dict[str, int]:
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
            f"{path}: {_shown(value.name)} has the shape {found}; in {whose} it is {list(wanted)}"
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


# -- names in a graph by those of a module ------------------------------------------------------

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class EndNames:
    """Names in a graph by the names of a module, or of another graph.

    Attributes:
        inputs: All inputs, in the module's order.
        outputs: All outputs, in the module's order.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    def case(self, case: Case) -> Case:
        """Return a case with the inputs as the graph names them."""
        changed = case.name.removeprefix(CHANGED)
        is_change = case.name.startswith(CHANGED) and changed in self.inputs
        return dataclasses.replace(
            case,
            name=f"{CHANGED}{self.inputs[changed]}" if is_change else case.name,
            inputs={self.inputs[name]: array for name, array in case.inputs.items()},
        )

    def golden(self, golden: Golden) -> Golden:
        """Return a case and its truth with inputs and outputs as the graph names them."""

        def renamed(values: Mapping[str, T]) -> dict[str, T]:
            return {self.outputs[name]: value for name, value in values.items()}

        return Golden(
            self.case(golden.case),
            renamed(golden.expected),
            renamed(golden.eager),
            renamed(golden.allowed),
            renamed(golden.unusable),
            renamed(golden.tied),
        )

    def note(self) -> str:
        """Return a note on the names that differ, or ""."""
        pairs = (*self.inputs.items(), *self.outputs.items())
        other = [f"{name} is {theirs}" for name, theirs in pairs if name != theirs]
        return f"in the graph, {', '.join(other)}" if other else ""
