"""The module or graph whose float64 run is the truth of a comparison."""

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
"""The most products of a weight and a row that a case next to a block of kernels may need."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """The module or graph that another graph is compared with.

    Attributes:
        whose: Its description in messages: ``"the module"``.
        inputs: Every input by name.
        outputs: The shape of every output; dynamic axes by name.
        dtypes: The dtype of every output.
        sums: Axes that are sums of others.
        takes: Whether it runs at some sizes of its dynamic axes, and soon enough.
        oracle: Returns the source of its truth, for a graph of at least this eps.
        notes: Notes for the reader of the report.
        notes_on: Returns further notes, from the truth of a case.
        narrow: Whether its types are narrower than float32.
        spec: The spec of a layer of ours.
        module: The subject; None for a graph.
        path: The file of a graph.
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
        """Return the cases of which the truth can be computed, and notes on the others.

        A module has to run at all sizes; a graph may have tables that end somewhere.

        Args:
            oracle: The source of the truth.
            cases: The cases that were planned.
        """
        return (cases, ()) if self.path is None else oracle.computable(cases)


def of_module(module: Any, seed: int) -> Reference:
    """Return the reference for a module.

    Args:
        module: A `Subject` or an `AttentionSpec`.
        seed: For the weights of a spec's module.

    Raises:
        UsageError: If it is neither.
        ExportError: If it does not run.
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
        "the module", subject.input_values(), subject.output_shapes(),
        output_dtypes(lambda: subject.call(subject.module, subject.inputs)),
        subject.sums, subject.takes,
        lambda least_eps: Oracle(subject, least_eps), subject.notes, truth_notes,
        bool(subject.narrow_dtypes()), subject.spec, subject,
    )  # fmt: skip


def of_graph(path: Path, ranges: Mapping[str, tuple[int, int]]) -> Reference:
    """Return the reference for a graph.

    Args:
        path: Its file.
        ranges: The least and the largest value of integer inputs, as the user gave them.

    Raises:
        UsageError: If `ranges` names no integer input.
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
    inputs, known, notes = described_inputs(model, ranges)
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

    axes = axis_names(inputs, known)
    sums = find_sums(axes, known, runs)
    if sums is None:
        raise GraphError(f"{path} cannot be evaluated in float64 at any sizes: {last}")
    if sums != known:
        said = ", ".join(f"{axis} = {terms}" for axis, terms in sums.items() if axis not in known)
        notes = (*notes, f"of the axes, {said}: {path.name} runs at no other sizes")

    def takes(sizes: Sizes) -> bool:
        every = add_sums({**dict.fromkeys(axes, 2), **sizes}, sums)
        return weights * math.prod(sizes.values()) <= MOST_WORK and runs(every)

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
    """Return whether the axes of outputs have the sizes of the inputs' axes that they name."""
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
            known = [n for n, wanted in inputs.items() if wanted.dtype.startswith(("int", "uint"))]
            raise UsageError(
                f"--range {printable(name, 60)}: {path} has no such integer input; choose from "
                f"{printable(', '.join(known) or 'none', 150)}"
            )
