"""Builds of modules with tuples, dicts, constants and integers as inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import right_graphs
from torch import nn

from attn_export import Subject
from attn_export.errors import UsageError
from attn_export.export.call_results import find_results
from attn_export.export.nested import InputTree

X = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
BATCH = {0: "batch", 1: "query_len"}


class Nested(nn.Module):
    """Module that takes a pair within a dict and a constant, and returns a dict with a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)

    def forward(self, tokens, state, *, double=False):
        embedded = self.embedding(tokens) * (2 if double else 1)
        first, second = state["pair"]
        return {"sum": embedded + first, "state": (first * second, second - embedded)}


def nested(**changes: Any) -> Subject:
    given = {
        "inputs": {
            "tokens": torch.arange(6).reshape(2, 3) + 4,
            "state": {"pair": (X, X + 1)},
            "double": True,
        },
        "axes": {"tokens": BATCH, "state.pair.0": BATCH, "state.pair.1": BATCH},
        "outputs": ["sum", "product", "difference"],
    }
    return Subject(Nested().eval(), **(given | changes))


def test_nested_inputs_and_outputs_are_those_of_the_graph():
    graph = right_graphs(nested())["model.onnx"]
    assert [x.name for x in graph.input] == ["tokens", "state.pair.0", "state.pair.1"]
    assert [x.name for x in graph.output] == ["sum", "product", "difference"]


def test_integers_are_tried_within_the_range_of_the_example():
    wanted = nested().input_descriptions()["tokens"]
    assert (wanted.low, wanted.high) == (4, 9)
    drawn = {int(t) for case in nested().plan().cases for t in case.inputs["tokens"].ravel()}
    assert drawn == set(range(4, 10))


def test_arguments_are_rebuilt_as_they_were():
    given = {"a": X, "b": [X, {"c": None, "d": (X, 3)}], "e": "text"}
    tree = InputTree.flatten(given)
    assert list(tree.tensors) == ["a", "b.0", "b.1.d.0"]
    assert tree.rebuild({"a": 1, "b.0": 2, "b.1.d.0": 3}) == {
        "a": 1, "b": [2, {"c": None, "d": (3, 3)}], "e": "text",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": {"tokens": object(), "state": None}}, "tokens is object; inputs are tensors"),
        ({"axes": {"pair": BATCH}}, "axes names the input 'pair', which is not one of: tokens"),
        ({"inputs": {"tokens": X.double(), "state": None}}, "tokens is float64; inputs are one of"),
    ],
    ids=["an object", "axes of nothing", "float64"],
)
def test_an_unfit_structure_is_named(changes: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        nested(**changes)


@pytest.mark.parametrize(
    ("returned", "names", "values"),
    [
        (X, ["y"], [X]),
        ({"b": X + 1, "a": X}, ["a", "b"], [X, X + 1]),
        ({"b": X + 1, "a": X}, ["first", "second"], [X + 1, X]),
        ((X, None, [X + 1]), ["a", "b"], [X, X + 1]),
    ],
    ids=["tensor", "dict by its keys", "dict in its order", "None is left out"],
)
def test_outputs_get_their_names(returned: Any, names: list[str], values: list[torch.Tensor]):
    tree, results = find_results(lambda _: returned, InputTree.flatten({}), names)
    found = results.of(lambda _: returned, tree, {})
    assert list(found) == names
    assert all(torch.equal(found[n], v) for n, v in zip(names, values, strict=True))


class Echo(nn.Module):
    def forward(self, x):
        y = x * 2
        return x, y, y, y


def test_outputs_that_are_an_input_or_each_other_are_outputs_of_their_own():
    subject = Subject(Echo().eval(), {"x": X}, {"x": BATCH}, ["same", "twice", "again", "third"])
    right_graphs(subject)
