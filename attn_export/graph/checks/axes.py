"""Checks that the dynamic axes are dynamic, under one name each."""

from __future__ import annotations

from collections.abc import Iterator

from attn_export.graph.checks.model import Checked, shape_of, show


def signature(graph: Checked) -> Iterator[str]:
    """Check names and order of inputs and outputs against the expected ones."""
    if graph.expected is None:
        return
    for what, values, wanted in (
        ("inputs", graph.proto.graph.input, list(graph.expected.inputs)),
        ("outputs", graph.proto.graph.output, list(graph.expected.outputs)),
    ):
        names = [value.name for value in values]
        if names != wanted:
            yield f"{what} are {', '.join(names)}, expected {', '.join(wanted)}; export it again"


def dynamic_axes(graph: Checked) -> Iterator[str]:
    """Check that every expected dynamic axis is dynamic, under its one name, up to the outputs."""
    if graph.expected is None:
        return
    wanted = {**graph.expected.inputs, **graph.expected.outputs}
    for value in (*graph.proto.graph.input, *graph.proto.graph.output):
        shape, expected = shape_of(value), wanted.get(value.name)
        if expected is None:
            continue
        if shape is None or len(shape) != len(expected):
            yield f"{value.name} is {show(shape)}, expected {show(expected)}; export it again"
            continue
        for axis, (got, want) in enumerate(zip(shape, expected, strict=True)):
            if got == want or want == "":  # "" where the maker did not name it either
                continue
            where = f"axis {axis} of {value.name}"
            if isinstance(want, str) and isinstance(got, int):
                yield f"{where} is fixed at {got}, expected the dynamic axis {want!r}; name it"
            elif isinstance(want, int) and isinstance(got, int):
                yield f"{where} is {got}, expected {want}; export it again"
            else:
                yield f"{where} is {got or '?'!r}, expected {want!r}; rename it"


def named_axes(graph: Checked) -> Iterator[str]:
    """Check that every axis of inputs and outputs has a size or name; runtimes need it."""
    for value in (*graph.proto.graph.input, *graph.proto.graph.output):
        shape = shape_of(value)
        if shape is None:
            yield f"{value.name} has no declared shape; declare it, dynamic axes by name"
        elif "" in shape:
            yield f"axis {shape.index('')} of {value.name} has neither size nor name; name it"
