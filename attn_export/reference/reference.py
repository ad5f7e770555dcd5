"""What graphs are judged by: a layer, a module, a whole model or a graph, and its float64 run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_export.cases.draw import MAX_SIZE, Interface, add_sums, axis_names, draw_inputs, may_try
from attn_export.cases.roles import Trial, find_roles
from attn_export.errors import GraphError, UsageError, printable
from attn_export.graph.axis_names import Misfit, find_relations, find_sums
from attn_export.interface import Input, Roles, Shape, axes_in
from attn_export.spec import AttentionSpec
from attn_export.tensorproto import CODES

if TYPE_CHECKING:
    from attn_export.cases.draw import Sizes
    from attn_export.cases.plan import Plan
    from attn_export.export.subject import Subject
    from attn_export.reference.tolerance import BaseOracle

Notes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What graphs are judged by.

    Attributes:
        whose: The description in messages, such as ``"the module"``.
        dtypes: The dtype of each output, by name.
        plan: A function that returns the cases.
        oracle: A function that returns the oracle. Its argument is the least eps of
            the dtypes in the graphs to judge; 0 for graphs of the reference's own types.
        has_narrow_dtypes: Whether the reference has types narrower than float32.
        path: The path of a graph; None for a module.
        cause: See `ValueReference.cause`.
        reduce: Reduces the golden vectors of a comparison, if not as `oracle` does.
        undeclared: The outputs whose declared shapes are no promise, by their names in the graph.
        is_float_model: Whether it is the float model of a quantised graph: budgets limit its
            distance.
    """

    whose: str
    interface: Interface
    dtypes: Mapping[str, str]
    plan: Callable[[], Plan]
    oracle: Callable[[float], BaseOracle]
    notes: Notes
    has_narrow_dtypes: bool
    path: Path | None = None
    cause: Any = None
    reduce: Callable[[Path], Notes] | None = None
    undeclared: Collection[str] = ()
    is_float_model: bool = False


def of_module(module: Any) -> Reference:
    """Return the reference for a subject, or for the layer of a spec."""
    from attn_export.export.subject import Subject

    subject = Subject.from_spec(module) if isinstance(module, AttentionSpec) else module
    if not isinstance(subject, Subject):
        raise UsageError(
            "compare takes a Subject, an AttentionSpec or an ONNX file; got "
            f"{type(module).__name__}"
        )
    return of_subject(subject)


def of_subject(subject: Subject, interface: Interface | None = None) -> Reference:
    """Return the reference for a subject.

    `interface`: That from which cases are planned; by default that of the subject.
    """
    from attn_export.export.subject_checks import output_dtypes
    from attn_export.reference.oracle import Oracle

    interface = interface or subject.interface()
    return Reference(
        "the module", interface,
        output_dtypes(lambda: subject.call(subject.module, subject.inputs)),
        functools.partial(subject.plan, interface),
        subject.oracle or functools.partial(Oracle, subject), subject.notes,
        bool(subject.narrow_dtypes()),
    )  # fmt: skip


# -- a graph as the reference of another one: its axes, found by runs, and its reference ----------


def read_reference(
    reference: Any,
    ranges: Mapping[str, tuple[int, int]],
    relations: Mapping[str, str],
) -> Reference:
    """Return the reference for a module or a graph."""
    if isinstance(reference, str | Path):
        return _of_graph(Path(reference), ranges, relations)
    if ranges or relations:
        raise UsageError(
            "ranges and relations are for two graphs; a module has those of its example inputs and "
            "of its Subject"
        )
    module = reference() if callable(reference) else reference
    return module if isinstance(module, Reference) else of_module(module)


def _of_graph(
    path: Path, ranges: Mapping[str, tuple[int, int]], relations: Mapping[str, str]
) -> Reference:
    from attn_export.cases.plan import plan_cases
    from attn_export.export.trees import infer_output_shapes
    from attn_export.float64.evaluate import Evaluation
    from attn_export.graph.load import inlined, load_model, sound
    from attn_export.graph.ranges import (
        declared_outputs,
        described_inputs,
        floating_dtype,
        weight_count,
    )
    from attn_export.graph.signature_check import dtype_name
    from attn_export.reference.graph_oracle import GraphOracle

    with sound(path):
        model = inlined(load_model(path))
        for output in model.graph.output:
            if output.type.tensor_type.elem_type:
                _refuse_odd(str(path), output.name, dtype_name(output))
        inputs, known_sums, notes = described_inputs(model, ranges)
    _check_ranges(path, inputs, ranges)
    graph = GraphRuns(Evaluation(model, str(path)), inputs, declared_outputs(model), str(path))
    axes, weights = axis_names(inputs, known_sums), weight_count(model)
    _check_relations(path, axes, relations)
    known_sums |= relations
    sums = graph.sums(axes, known_sums, model)
    if sums is None:
        raise GraphError(
            f"{path} cannot be evaluated in float64 at any sizes; state axes that are equal or "
            f"sums with --relation AXIS=AXIS or AXIS=AXIS+AXIS: {graph.problem}"
        )
    if sums != known_sums:
        found = ", ".join(f"{axis} = {t}" for axis, t in sums.items() if axis not in known_sums)
        notes = (*notes, f"of the axes, {found}: {path.name} runs at no other sizes")

    equal = {axis: text for axis, text in sums.items() if text in axes and text != axis}
    sums = {axis: text for axis, text in sums.items() if axis not in equal}
    graph = graph.with_names(equal)
    axes = [axis for axis in axes if axis not in equal]

    def takes(sizes: Sizes) -> bool:
        all_sizes = add_sums({**dict.fromkeys(axes, 2), **sizes}, sums)
        return may_try(weights, all_sizes, sums) and graph.runs(all_sizes)

    shapes, dtype = infer_output_shapes(graph.shapes, axes, sums, {}), floating_dtype(model)
    roles = graph.roles(shapes, sums, dict.fromkeys(axes, 2))
    interface = Interface(graph.inputs, shapes, sums=sums, roles=roles)
    return Reference(
        path.name, interface,
        {o.name: dtype_name(o) for o in model.graph.output},
        lambda: plan_cases(interface, takes, MAX_SIZE),
        lambda least_eps: GraphOracle(graph.evaluation, path.name, dtype, shapes, least_eps),
        (*notes, f"eager is {path.name}, with each value rounded to {dtype.name}"),
        dtype.itemsize < 4, path=path,
    )  # fmt: skip


@dataclasses.dataclass
class GraphRuns:
    """Runs of a graph in float64. `problem` is the reason that the first failed, or ""."""

    evaluation: Any
    inputs: Mapping[str, Input]
    declared: Mapping[str, Shape]
    name: str
    problem: str = ""

    def with_names(self, names: Mapping[str, str]) -> GraphRuns:
        """Return the runs of the same graph, with other names of some axes."""
        inputs = {
            name: dataclasses.replace(input_, shape=Roles(names).shape(input_.shape))
            for name, input_ in self.inputs.items()
        }
        declared = {name: Roles(names).shape(shape) for name, shape in self.declared.items()}
        return GraphRuns(self.evaluation, inputs, declared, self.name)

    def sums(
        self, axes: Sequence[str], known: Mapping[str, str], model: Any
    ) -> dict[str, str] | None:
        """Return the axes that must be sums of others, or equal; None if no choice runs."""
        from attn_export.float64.bounded import refuse_unfit

        for name, input_ in self.inputs.items():
            refuse_unfit(name, input_, self.name)
        shapes = (input_.shape for input_ in self.inputs.values())
        fixed = {size for shape in shapes for size in shape if isinstance(size, int)}
        fixed |= {size for tensor in model.graph.initializer for size in tensor.dims}
        found = find_relations(axes, known, fixed, self.misfit)
        return find_sums(axes, known, self.runs) if found is None else found

    def outputs(self, sizes: Sizes) -> Mapping[str, Any]:
        """Return the outputs at some sizes, by name."""
        drawn = draw_inputs(self.inputs, sizes, seed_words=("sizes",))
        found: Mapping[str, Any] = self.evaluation.outputs_at(drawn)
        for name, array in found.items():
            if isinstance(array, np.ndarray):
                _refuse_odd(self.name, name, array.dtype.name)
        return found

    def roles(self, shapes: Mapping[str, Shape], sums: Mapping[str, str], example: Sizes) -> Roles:
        """Return the roles of the axes.

        `shapes`: The shape of every output.
        """

        def draw(changed: Sizes, seed: str) -> Mapping[str, Any]:
            sizes = add_sums({**example, **changed}, sums)
            return draw_inputs(self.inputs, sizes, seed_words=(seed,))

        def run(arrays: Mapping[str, Any]) -> Trial:
            values = self.evaluation.values(arrays)
            nodes = (n for n in self.evaluation.nodes if n.op_type == "Concat")
            joined = [a for n in nodes if (a := values[n.output[0]]) is not None]
            return Trial(self.evaluation.outputs_of(values), joined)

        inputs = {name: input_.shape for name, input_ in self.inputs.items()}
        return find_roles(inputs, shapes, sums, draw, run)

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the outputs at some sizes, by name."""
        return {name: array.shape for name, array in self.outputs(sizes).items()}

    def runs(self, sizes: Sizes) -> bool:
        """Return whether the graph runs at some sizes, and the outputs fit the declared axes."""
        return self.misfit(sizes) is None

    def misfit(self, sizes: Sizes) -> Misfit | None:
        """Return the shapes that do not fit each other at some sizes, of operands or outputs."""
        from attn_export.float64.evaluate import NotComputedError

        nodes = self.evaluation.nodes
        try:
            shapes = self.shapes(sizes)
        except NotComputedError as error:
            if isinstance(error.__cause__, MemoryError):
                raise  # other small sizes take as much
            self.problem = self.problem or str(error)
            outputs = [next(iter(node.output), "") for node in nodes]
            return Misfit(outputs.index(error.output), error.shapes)
        for name, declared in self.declared.items():
            for axis, size in zip(declared, shapes.get(name, ()), strict=False):
                if sizes.get(str(axis), size) != size and len(declared) == len(shapes[name]):
                    return Misfit(len(nodes), [[sizes[str(axis)]], [size]])
        return None


def _refuse_odd(path: str, name: str, dtype: str) -> None:
    if dtype not in CODES:
        raise GraphError(
            f"{path}: the output {printable(name, 80)} is {dtype}, of which no tensor can be "
            "stored; cast it in the graph"
        )


def _check_relations(path: Path, axes: Sequence[str], relations: Mapping[str, str]) -> None:
    for axis, text in relations.items():
        terms = axes_in(text)
        for name in (axis, *terms):
            if name not in axes or (name != axis and name in relations):
                raise UsageError(
                    f"--relation {printable(f'{axis}={text}', 80)}: {printable(name, 60)} is no "
                    f"free axis of {path}; choose from {printable(', '.join(axes), 150)}"
                )
        if axis in terms:
            raise UsageError(f"--relation {printable(f'{axis}={text}', 80)} has {axis} twice")


def _check_ranges(
    path: Path, inputs: Mapping[str, Input], ranges: Mapping[str, tuple[int, int]]
) -> None:
    integers = [name for name, given in inputs.items() if given.dtype.startswith(("int", "uint"))]
    for name in ranges:
        if name not in integers:
            raise UsageError(
                f"--range {printable(name, 60)}: {path} has no such integer input; choose from "
                f"{printable(', '.join(integers) or 'none', 150)}"
            )
