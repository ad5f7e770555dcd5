"""Known pitfalls of exporting attention: each test shows the pitfall and that it is handled.

Where the trap is another library's, a first test shows that it is still there: when that fails,
the remedy has become unnecessary.
"""

from __future__ import annotations

import inspect
import math
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from agreement import right_graphs
from conftest import small_spec
from onnx import TensorProto, helper
from shared import extended
from torch import nn

from attn_export import Axis, Subject, build
from attn_export.errors import ExportError, GraphError
from attn_export.export.capture import broken_guards, sizes_to_try
from attn_export.export.export import export


class Branching(nn.Module):
    """A layer that takes another branch at some sizes."""

    def __init__(self, condition) -> None:
        super().__init__()
        self.condition = condition
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) if self.condition(x) else x * 2


def subject_of(module: nn.Module) -> Subject:
    (name,) = inspect.signature(module.forward).parameters
    axes = {name: {0: "batch", 1: "query_len"}}
    return Subject(module.eval(), {name: torch.randn(2, 6, 8)}, axes, ["y"])


# -- guards on sizes are dropped silently -------------------------------------------


@pytest.mark.parametrize(
    ("condition", "axis", "expected_text"),
    [
        (lambda x: x.shape[1] > 8, "query_len", ", 8]"),
        (lambda x: x.shape[1] <= 8, "query_len", ", 8]"),
        (lambda x: x.shape[0] < 40, "batch", "39]"),
        (lambda x: x.shape[1] >= 4, "query_len", "[4, "),
        (lambda x: x.shape[1] == 6, "query_len", "fixed at 6"),
    ],
)
def test_a_module_with_a_guard_on_a_size_is_refused_with_axis_and_range(
    condition, axis, expected_text
):
    with pytest.raises(ExportError, match=r"was (narrowed|fixed)") as caught:
        export(subject_of(Branching(condition)))
    message = str(caught.value)
    assert axis in message
    assert expected_text in message
    assert "\n" not in message
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("condition", "at"),
    [
        (lambda x: x.shape[1] == 1, "query_len = 1"),
        (lambda x: x.shape[0] == 1, "batch = 1"),
        (lambda x: x.shape[0] == x.shape[1], ""),
        (lambda x: x.shape[1] % 2 == 0, ""),
        (lambda x: x.shape[0] != 7, ""),
    ],
    ids=["L is 1", "B is 1", "B is L", "L is even", "B is not 7"],
)
def test_a_branch_that_leaves_no_range_is_refused_by_running_both_programs(condition, at):
    with pytest.raises(ExportError) as caught:
        export(subject_of(Branching(condition)))
    assert at in str(caught.value)
    assert "branch" in str(caught.value)


class Segments(nn.Module):
    """Rows in segments: `starts` without its first is as short as 1, where it broadcasts."""

    def forward(self, x, starts):
        segment = (torch.arange(x.shape[0])[:, None] >= starts[1:]).sum(-1)
        return (segment[:, None] == segment[None]).float() @ x


def test_a_slice_that_broadcasts_at_size_1_is_no_branch():
    inputs = {"x": torch.randn(6, 4), "starts": torch.tensor([0, 2, 3, 5])}
    axes = {"x": {0: "tokens"}, "starts": {0: Axis("starts", min=2)}}
    subject = Subject(Segments().eval(), inputs, axes, ["y"])
    assert 2 in {sizes["starts"] for sizes in sizes_to_try(subject)}
    export(subject)


def test_a_sum_that_is_narrowed_by_a_branch_is_refused():
    class Both(nn.Module):
        def forward(self, x, past):
            whole = torch.cat([past, x], 1)
            return whole.sum(1) if whole.shape[1] > 5 else whole.amax(1)

    inputs = {"x": torch.randn(2, 4, 8), "past": torch.randn(2, 5, 8)}
    axes = {"x": {0: "batch", 1: "n"}, "past": {0: "batch", 1: "m"}}
    with pytest.raises(ExportError, match="branch"):
        export(Subject(Both().eval(), inputs, axes, ["y"]))


@pytest.mark.parametrize(
    "bounds", [{"min": 2}, {"max": 2**30}, {"max": 40_000}], ids=["no end", "far", "large scores"]
)
def test_sizes_that_need_much_memory_are_not_tried(bounds):
    class Attention(nn.Module):
        longest = 0

        def forward(self, x):
            Attention.longest = max(x.shape[1], Attention.longest)
            assert x.shape[1] < 5000
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    axes = {"x": {0: "batch", 1: Axis("query_len", **bounds)}}
    subject = Subject(Attention().eval(), {"x": torch.randn(2, 5, 4)}, axes, ["y"])
    plan = subject.plan()
    assert subject.takes({"query_len": 1000})
    assert not subject.takes({"query_len": 2**20})
    assert Attention.longest < 5000
    assert any("no case reaches query_len" in note for note in plan.notes) == ("max" in bounds)


# -- masks whose L axis is 1 ---------------------------------------------------------


def attention_session(mask_shape: list[int | str]) -> onnxruntime.InferenceSession:
    shapes = {"q": ["b", 1, "l", 4], "k": ["b", 1, "l", 4], "v": ["b", 1, "l", 4]}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    ]
    inputs.append(helper.make_tensor_value_info("m", TensorProto.BOOL, mask_shape))
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 1, "l", 4])
    node = helper.make_node("Attention", ["q", "k", "v", "m"], ["y"])
    graph = helper.make_graph([node], "g", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def test_onnxruntime_still_refuses_a_key_padding_mask_that_the_checker_accepts():
    session = attention_session(["b", 1, 1, "l"])
    x = np.ones((2, 1, 3, 4), np.float32)
    with pytest.raises(Exception, match="q_sequence_length"):
        session.run(None, {"q": x, "k": x, "v": x, "m": np.ones((2, 1, 1, 3), bool)})


MASKS = ["bool[B,1,1,S]", "bool[1,S]", "bool[H,1,S]", "bool[1,1,1,S]", "float[B,H,1,S]",
         "float[1,S]", "bool[1,H,L,S]", "float[H,L,S]", "bool[B,1,L,S]", "float[L,S]"]  # fmt: skip
DEFAULT_MASKS = {"bool[1,S]", "float[B,H,1,S]", "bool[1,H,L,S]"}
"""Masks of two and four axes, with each axis as 1 and in full, bool and float."""


@pytest.mark.parametrize("mask", extended(MASKS, lambda mask: mask in DEFAULT_MASKS))
@pytest.mark.every(4)
def test_masks_of_every_broadcast_shape_run_and_pass(mask: str):
    right_graphs(Subject.from_spec(small_spec(attn_mask=mask)), "standard", "portable")


# -- torch.onnx.export(verify=True) lets NaN pass; the judge does not ------------------


def test_a_module_that_gives_nan_where_its_reference_has_none_does_not_pass(tmp_path: Path):
    class Overflow(nn.Module):
        def forward(self, x):
            return (x * 1e30) * (x * 1e30) * 1e-60  # finite in float64 only

    report = build(
        subject_of(Overflow()), tmp_path / "c", runtimes=["ort-cpu"], dialects=["standard"]
    )
    assert report.exit_code == 6
    assert {v.status for v in report.verdicts if v.case == "base"} == {"unusable"}


# -- what stays in the file -----------------------------------------------------


def test_no_stack_trace_and_no_path_is_left_in_the_file(bundle: Path):
    content = (bundle / "model.onnx").read_bytes()
    for trace in (b"stack_trace", b"site-packages", b".py", str(Path.cwd()).encode()):
        assert trace not in content


# -- train mode --------------------------------------------------------------------------


def test_a_module_in_train_mode_is_refused_by_the_name_of_the_part():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    module[1].train()
    with pytest.raises(ExportError, match=r"1 \(Dropout\) is in train mode.*\.eval\(\)"):
        Subject(module, {"input": torch.randn(2, 3, 8)}, {"input": {0: "batch"}}, ["y"])


# -- what a check refuses ----------------------------------------------------------------------


def test_a_refused_graph_is_one_line_with_the_check_that_refused(tmp_path: Path):
    class Double(nn.Module):
        def forward(self, x):
            return x.double() * 2.5

    with pytest.raises(GraphError, match=r"no_float64: .*float64") as caught:
        build(subject_of(Double()), tmp_path / "b")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("axes", "most", "breaks"), [(2, 40, 41), (7, 4096, 4097), (12, 9, 10)])
def test_sizes_that_break_a_guard_on_many_axes_are_found_in_little_memory(axes, most, breaks):
    names = [f"a{at}" for at in range(axes)]
    subject = SimpleNamespace(
        tree=SimpleNamespace(keywords={"x": "x"}), axes={"x": dict(enumerate(names))}, bounds={},
        relations={}, example_sizes=dict.fromkeys(names, 2), sizes_with=dict,
    )  # fmt: skip
    product = "*".join(f"L['x'].size()[{at}]" for at in range(axes))
    program = SimpleNamespace(_guards_code=[f"{product} <= {most}"])
    tracemalloc.start()
    try:
        (sizes,) = broken_guards(subject, program)
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()
    assert math.prod(sizes.values()) == breaks
