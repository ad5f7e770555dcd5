"""The reference of a comparison: a module or graph, whose float64 run is the truth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import GraphError, UsageError, printable
from attn_export.parity.draw import add_sums
from attn_export.results import Case
from attn_export.spec import AttentionSpec, Input, Shape

if TYPE_CHECKING:
    from attn_export.export.subject import Subject
    from attn_export.parity.draw import Sizes

Notes = tuple[str, ...]

MOST_WORK = 2**30
"""The largest number of weights times the product of all sizes at which a graph is evaluated."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """The module or graph that another graph is compared with.

    Attributes:
        whose: The description in messages, such as ``"the module"``.
        inputs: The description of every input, by name.
        outputs: The shape of every output, with names for dynamic axes.
        dtypes: The dtype of every output.
        sums: Axes that are sums of others.
        takes: A function that returns whether the reference runs at some sizes in reasonable time.
        oracle: A function that returns the source of the truth. Its argument is the least eps of
            the dtypes in the graph to judge.
        notes: Notes for the reader of the report.
        notes_on: A function that returns further notes from the source of the truth and a case.
        narrow: Whether the reference has types narrower than float32.
        spec: The spec, if the reference is one of our own layers.
        module: The subject; None for a graph.
        path: The path of a graph; None for a module.
    """

    whose: str
    inputs: Mapping[str, Input]
    outputs: Mapping[str, Shape]
    dtypes: Mapping[str, str]
    sums: Mapping[str, str]
    takes: Callable[[Sizes], bool]
    oracle: Callable[[float], Any]
    notes: Notes
    notes_on: Callable[[Any, Case], Notes]
    narrow: bool
    spec: AttentionSpec | None = None
    module: Subject | None = None
    path: Path | None = None

    def computable(self, oracle: Any, cases: Sequence[Case]) -> tuple[Sequence[Case], Notes]:
        """Return the cases whose truth can be computed, and notes on the others.

        A module must run at all sizes. A graph may have tables, such as those of rotary
        embeddings, that are too short for some cases.

        Args:
            oracle: The source of the truth.
            cases: The planned cases.
        """
        return (cases, ()) if self.path is None else oracle.computable(cases)


def of_module(module: Any, seed: int) -> Reference:
    """Return the reference for a module.

    Args:
        module: A `Subject` or an `AttentionSpec`.
        seed: The seed for the weights of a spec's module.

    Raises:
        UsageError: If `module` is neither.
        ExportError: If the module does not run.
    """
    from attn_export.export.subject import Subject
    from attn_export.export.subject_checks import output_dtypes
    from attn_export.parity.notes import truth_notes
    from attn_export.parity.oracle import Oracle

    subject = Subject.from_spec(module, seed=seed) if isinstance(module, AttentionSpec) else module
    if not isinstance(subject, Subject):
        raise UsageError(
            "compare takes a Subject, an AttentionSpec or an ONNX file; got "
            f"{type(module).__name__}"
        )
    return Reference(
        "the module", subject.input_descriptions(), subject.output_shapes(),
        output_dtypes(lambda: subject.call(subject.module, subject.inputs)),
        subject.sums, subject.takes,
        lambda least_eps: Oracle(subject, least_eps), subject.notes, truth_notes,
        bool(subject.narrow_dtypes()), subject.spec, subject,
    )  # fmt: skip


def of_graph(path: Path, ranges: Mapping[str, tuple[int, int]]) -> Reference:
    """Return the reference for a graph.

    Args:
        path: The path of the graph.
        ranges: The smallest and largest value of integer inputs, as the user states them.

    Raises:
        UsageError: If `ranges` has a name that is no integer input.
        GraphError: If the file cannot be read, or cannot be evaluated in float64.
    """
    from attn_export.diagnose.evaluate import Evaluation, NotComputedError
    from attn_export.export.trees import infer_output_shapes
    from attn_export.graph.load import load_model
    from attn_export.graph.ranges import (
        declared_outputs,
        described_inputs,
        find_sums,
        floating_dtype,
        weights_of,
    )
    from attn_export.graph.signature_check import dtype_name
    from attn_export.parity.draw import axis_names, draw_inputs
    from attn_export.parity.graph_oracle import GraphOracle

    if not path.is_file():
        raise GraphError(f"cannot read {path}: no such file")
    model = load_model(path)
    inputs, known_sums, notes = described_inputs(model, ranges)
    _check_ranges(path, inputs, ranges)
    declared = declared_outputs(model)
    evaluation, weights = Evaluation(model, str(path)), weights_of(model)
    last = ""

    def run(sizes: Sizes) -> Mapping[str, Any]:
        drawn = draw_inputs(inputs, sizes, seed_words=("sizes",))
        return evaluation.outputs_of(evaluation.values(drawn))

    def runs(sizes: Sizes) -> bool:
        nonlocal last
        try:
            return _are_as_declared(run(sizes), declared, sizes)
        except NotComputedError as error:
            last = last or str(error)
            return False

    axes = axis_names(inputs, known_sums)
    sums = find_sums(axes, known_sums, runs)
    if sums is None:
        raise GraphError(f"{path} cannot be evaluated in float64 at any sizes: {last}")
    if sums != known_sums:
        relations = ", ".join(
            f"{axis} = {terms}" for axis, terms in sums.items() if axis not in known_sums
        )
        notes = (*notes, f"of the axes, {relations}: {path.name} runs at no other sizes")

    def takes(sizes: Sizes) -> bool:
        all_sizes = add_sums({**dict.fromkeys(axes, 2), **sizes}, sums)
        return weights * math.prod(sizes.values()) <= MOST_WORK and runs(all_sizes)

    def shapes_at(sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in run(sizes).items()}

    shapes, dtype = infer_output_shapes(shapes_at, axes, sums, {}), floating_dtype(model)
    return Reference(
        path.name, inputs, shapes, {o.name: dtype_name(o) for o in model.graph.output}, sums, takes,
        lambda least_eps: GraphOracle(evaluation, path.name, dtype, shapes, least_eps),
        (*notes, f"eager is {path.name}, with each value rounded to {dtype.name}"),
        lambda *_: (), dtype.itemsize < 4, path=path,
    )  # fmt: skip


def _are_as_declared(
    outputs: Mapping[str, Any], declared: Mapping[str, Shape], sizes: Sizes
) -> bool:
    """Return whether the shapes of outputs fit the named axes that the graph declares."""
    return all(
        sizes.get(str(axis), size) == size
        for name, shape in declared.items()
        if name in outputs and len(shape) == outputs[name].ndim
        for axis, size in zip(shape, outputs[name].shape, strict=True)
    )


def _check_ranges(
    path: Path, inputs: Mapping[str, Input], ranges: Mapping[str, tuple[int, int]]
) -> None:
    for name in ranges:
        if name not in inputs or not inputs[name].dtype.startswith(("int", "uint")):
            integer_inputs = [
                n for n, described in inputs.items() if described.dtype.startswith(("int", "uint"))
            ]
            raise UsageError(
                f"--range {printable(name, 60)}: {path} has no such integer input; choose from "
                f"{printable(', '.join(integer_inputs) or 'none', 150)}"
            )
