"""The inputs of a graph whose values are looked at: a user's, stored cases, or random ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnx import ValueInfoProto

from attn_export.cases.draw import add_sums, axis_names, draw_inputs
from attn_export.errors import GraphError, UsageError, printable
from attn_export.export.given_inputs import fitting, read_given
from attn_export.float64.bounded import refuse_unfit
from attn_export.graph.ranges import declared_outputs, described_inputs
from attn_export.graph.signature_check import dtype_name
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph
from attn_export.results import Case
from attn_export.tensorfile import Array
from attn_export.truth.graph_reference import GraphRuns

_MOST_SETS = 32
"""The largest number of stored cases that are used."""

_BATCH, _LENGTH = 2, 16
"""Sizes of free axes of random inputs."""

RANDOM = "ranges are those of random inputs; give real ones with --inputs FILE.npz"


@dataclasses.dataclass(frozen=True)
class InputSets:
    """Sets of inputs by name, and a note on what they are."""

    sets: Sequence[Mapping[str, Array]]
    note: str


def user_sets(graph: StreamedGraph, sources: Sequence[str]) -> InputSets:
    """Return the inputs in files and those that functions return.

    `sources`: ``FILE.npz`` or ``PATH.py:FUNCTION``, whose function returns arrays by name, or
    several such mappings.
    """
    sets: list[Mapping[str, Array]] = []
    for source in sources:
        given = read_given(source, graph.inputs, takes_prompts=False)
        sets += [_checked(graph, each, source) for each in given.sets]
    return InputSets(sets, f"inputs of {', '.join(sources)}")


def planned_sets(cases: Iterable[Case], source: str) -> InputSets:
    """Return the inputs of cases that are plain random numbers."""
    sets = [case.inputs for case in cases][:_MOST_SETS]
    return InputSets(sets, f"inputs of {len(sets)} cases of {source}; {RANDOM}")


def random_sets(graph: StreamedGraph) -> InputSets:
    """Return random inputs of sizes at which a graph runs."""
    model = graph.model
    inputs, known_sums, notes = described_inputs(model, {})
    names = set(graph.inputs)
    inputs = {name: input_ for name, input_ in inputs.items() if name in names}
    runs = GraphRuns(graph, inputs, declared_outputs(model), str(graph.path))
    axes = axis_names(inputs, known_sums)
    sums = runs.sums(axes, known_sums, model)
    if sums is None:
        raise GraphError(
            f"{graph.path} cannot be evaluated at random sizes; give inputs with --inputs "
            f"FILE.npz: {runs.problem}"
        )
    free = [axis for axis in axes if axis not in sums]
    for length in (_LENGTH, 4, _BATCH, 1):
        sizes = {axis: _BATCH if "batch" in axis.lower() else length for axis in free}
        if runs.runs(add_sums(sizes, sums)):
            drawn = draw_inputs(inputs, add_sums(sizes, sums), seed_words=("ranges",))
            return InputSets([drawn], "; ".join((RANDOM, *notes)))
    raise GraphError(f"{graph.path} runs at no small sizes; give inputs with --inputs FILE.npz")


def _checked(graph: StreamedGraph, given: Mapping[str, Any], source: str) -> dict[str, Array]:
    """Return arrays in the types of a graph's inputs; raise UsageError if they do not fit."""
    values = {v.name: v for v in graph.model.graph.input if v.name in graph.inputs}
    for name, input_ in described_inputs(graph.model, {})[0].items():
        refuse_unfit(name, dataclasses.replace(input_, shape=()), graph.path)
    for name in values:
        if name not in given:
            raise UsageError(
                f"--inputs {source} lacks {printable(name, 60)}; the inputs of {graph.path} are "
                f"{printable(', '.join(values), 200)}"
            )
    return {
        name: fitting(
            given[name], name, dtype_name(value), _shape(value), source, "the graph"
        )
        for name, value in values.items()
    }  # fmt: skip


def _shape(value: ValueInfoProto) -> tuple[int | str, ...] | None:
    """Return the declared axes of an input, with "?" for those without a size."""
    kind = value.type.tensor_type
    sizes = (d.dim_value if d.HasField("dim_value") else "?" for d in kind.shape.dim)
    return (*sizes,) if kind.HasField("shape") else None
