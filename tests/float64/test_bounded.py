"""Graphs of unknown origin end `range` and `compare` in one line, in bounded work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.commands.main import run
from attn_export.errors import GraphError
from attn_export.float64 import bounded
from attn_export.parts.value_ranges.range_flow import ranges_of
from attn_export.reference.reference import read_reference

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
value = helper.make_tensor_value_info


def graph(
    type_: int = FLOAT, dims: Sequence[str | int] | None = ("b", 4),
    weights: Sequence[TensorProto] = (), nodes: Sequence[onnx.NodeProto] = (),
) -> onnx.ModelProto:  # fmt: skip
    """Return a model of one input and one output."""
    nodes = nodes or [helper.make_node("Identity", ["x"], ["y"])]
    ends = [value(name, type_, dims) for name in "xy"]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def weight(type_: int = FLOAT, dims: Sequence[int] = (4,), **fields: object) -> TensorProto:
    """Return a weight with its fields as they are given."""
    return TensorProto(name="w", data_type=type_, dims=dims, **fields)


def times(tensor: TensorProto) -> onnx.ModelProto:
    """Return a model that multiplies by a weight."""
    return graph(weights=[tensor], nodes=[helper.make_node("Mul", ["x", "w"], ["y"])])


def loop(steps: int, *, condition: bool = True) -> onnx.ModelProto:
    """Return a model of a loop in which nothing ends it before its number of steps."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Add", ["s", "s"], ["t"])],
        "body", [value("i", INT64, []), value("c", BOOL, []), value("s", FLOAT, None)],
        [value("d", BOOL, []), value("t", FLOAT, None)],
    )  # fmt: skip
    given = ["n", "on" if condition else "", "x"]
    weights = [numpy_helper.from_array(np.array(steps), "n"),
               numpy_helper.from_array(np.array(True), "on")]  # fmt: skip
    return graph(weights=weights, nodes=[helper.make_node("Loop", given, ["y"], body=body)])


def ends(name: str) -> onnx.ModelProto:
    """Return a model with another name of its output."""
    model = graph()
    model.graph.output[0].name = name
    return model


def cast(type_: int) -> onnx.ModelProto:
    """Return a model whose output has another type."""
    model = graph(nodes=[helper.make_node("Cast", ["x"], ["y"], to=type_)])
    model.opset_import[0].version = 23
    return model


def declared(type_: int) -> onnx.ModelProto:
    """Return a model whose output is declared to have another type than it has."""
    model = graph()
    model.graph.output[0].type.tensor_type.elem_type = type_
    return model


def opset(version: int) -> onnx.ModelProto:
    """Return a model of a version of the operators."""
    model = graph()
    model.opset_import[0].version = version
    return model


def located(location: str) -> onnx.ModelProto:
    """Return a model whose weight lies in a file."""
    tensor = weight(data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return times(tensor)


def called(operator: str) -> onnx.ModelProto:
    """Return a model with a node of an operator that nothing knows."""
    model = graph(nodes=[helper.make_node(operator, ["x"], ["y"], domain="d")])
    model.opset_import.append(helper.make_opsetid("d", 1))
    return model


HOSTILE: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "strings": (lambda: graph(TensorProto.STRING), "[xy] is (a string; let it be|object)"),
    "complex numbers": (lambda: graph(TensorProto.COMPLEX64), "[xy] is complex64"),
    "4 bits": (lambda: graph(TensorProto.INT4), "[xy] is int4"),
    "float8": (lambda: graph(TensorProto.FLOAT8E4M3FN), "[xy] is float8_e4m3fn"),
    "no type": (lambda: graph(0), "[xy] is of the type 0"),
    "a type that is none": (lambda: graph(99), "[xy] is of the type 99"),
    "a negative size": (lambda: graph(dims=[-1, 4]), "x has the size -1"),
    "a huge size": (lambda: graph(dims=[2**62, 4]), "elements, and 67108864 is the most"),
    "sizes that are huge together": (lambda: graph(dims=[2**20] * 4), "elements, and 67108864"),
    "no data": (lambda: times(weight()), "w cannot be read"),
    "too little data": (lambda: times(weight(dims=[10**10], raw_data=bytes(64))), "w cannot be"),
    "a negative weight": (lambda: times(weight(dims=[-1], raw_data=bytes(64))), "the size -1"),
    "a weight without a type": (lambda: times(weight(0, raw_data=bytes(16))), "w cannot be read"),
    "a location with a NUL": (lambda: located("w\0.bin"), "is missing"),
    "an operator with a NUL": (lambda: called("a\0b"), "is unknown, known functions"),
    "an output without a name": (lambda: ends(""), "an input or output has no name"),
    "an output that nothing gives": (lambda: ends("z"), "the output z is given by nothing"),
    "an output of 4 bits": (lambda: cast(TensorProto.FLOAT4E2M1), "y is float4_e2m1fn"),
    "an output of another type": (lambda: declared(TensorProto.FLOAT6E2M3), "y is float6_e2m3fn"),
    "an output of strings": (lambda: cast(TensorProto.STRING), "y is "),
    "an opset that is none": (lambda: opset(2**62), "is of the opset 4611686018427387904"),
    "random numbers": (
        lambda: graph(nodes=[helper.make_node("RandomNormal", [], ["y"], shape=[2**31])]),
        "draws random numbers",
    ),
    "an endless loop": (lambda: loop(2**63 - 1), "takes more than 2000 steps"),
    "a loop without a condition": (lambda: loop(2**40, condition=False), "takes more than 2000"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded, "MOST_STEPS", 2000)
    make, message = HOSTILE[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(make().SerializeToString())
    if name != "an output of another type":  # it is none of those that are computed
        with pytest.raises(GraphError, match=message):
            ranges_of(path, None, (), "float16")
    with pytest.raises(GraphError, match=message):
        read_reference(path, {}, {})


FINE: dict[str, Callable[[], onnx.ModelProto]] = {
    "a loop that ends": lambda: loop(900),
    "a size that is a sum of none": lambda: graph(dims=["past + new", 4]),
    "a size that is a sum of itself": lambda: graph(dims=["n + n", "n"]),
    "weights by another name": lambda: located("w.bin"),
}


@pytest.mark.parametrize("name", FINE)
def test_an_odd_graph_is_evaluated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded, "MOST_STEPS", 2000)
    (tmp_path / "first.bin").write_bytes(bytes(16))
    os.link(tmp_path / "first.bin", tmp_path / "w.bin")
    onnx.save_model(FINE[name](), tmp_path / "model.onnx")
    assert ranges_of(tmp_path / "model.onnx", None, (), "float16").analysis.values is not None
    read_reference(tmp_path / "model.onnx", {}, {})


def test_an_input_that_changes_nothing_is_an_error_of_the_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    zeros = weight(dims=[4], raw_data=bytes(16))
    onnx.save_model(times(zeros), tmp_path / "m.onnx")
    path = str(tmp_path / "m.onnx")
    assert run(["compare", path, path, "--runtime", "ort-cpu", "--quiet"]) == 4
    assert "changes no output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), "there are too few threads"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "there are too few threads"),
        (OSError(12, "Cannot allocate memory"), "there is too little memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "there is too little memory"),
    ],
)
def test_a_lack_of_memory_or_threads_is_called_so(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("attn_export.commands.main.cli.main", fail)
    assert run(["check", "x.onnx"]) == 1
    assert said in capsys.readouterr().err
