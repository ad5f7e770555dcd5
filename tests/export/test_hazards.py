"""Known pitfalls of exporting attention: each test shows the pitfall and that it is handled.

Where the trap is another library's, a first test shows that it is still there: when that fails,
the remedy has become unnecessary.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import small_spec
from onnx import TensorProto, helper
from shared import extended
from torch import nn

from attn_export import Axis, Subject, build
from attn_export.errors import ExportError, GraphError
from attn_export.export.capture import sizes_to_try
from attn_export.export.export import export
from attn_export.graph.checks import check_graph
from attn_export.graph.save import save_graph


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


def test_a_module_without_branches_passes_the_same_proof():
    export(subject_of(nn.Sequential(nn.Linear(8, 8), nn.GELU())))


def test_a_refused_module_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(ExportError):
        build(subject_of(Branching(lambda x: x.shape[1] > 8)), tmp_path / "out" / "bundle")
    assert not (tmp_path / "out").exists()


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
def test_masks_of_every_broadcast_shape_run_and_pass(mask: str, tmp_path: Path):
    report = build(
        small_spec(attn_mask=mask), tmp_path / "b", runtimes=["ort-cpu", "onnx-reference"]
    )
    assert report.passed


# -- fully masked rows ---------------------------------------------------------------


def decomposed_session() -> onnxruntime.InferenceSession:
    """Return a Softmax with a lowest-value mask, as exporters write a bool mask at opset 18."""
    nodes = [
        helper.make_node("Where", ["m", "s", "low"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["p"], axis=-1),
    ]
    inputs = [
        helper.make_tensor_value_info("s", TensorProto.FLOAT, ["l", "s_"]),
        helper.make_tensor_value_info("m", TensorProto.BOOL, ["l", "s_"]),
    ]
    low = helper.make_tensor("low", TensorProto.FLOAT, [], [float(np.finfo(np.float32).min)])
    output = helper.make_tensor_value_info("p", TensorProto.FLOAT, ["l", "s_"])
    graph = helper.make_graph(nodes, "g", inputs, [output], [low])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString())


def test_the_usual_export_turns_a_fully_masked_row_into_an_average():
    weights = decomposed_session().run(
        None, {"s": np.zeros((1, 4), np.float32), "m": np.zeros((1, 4), bool)}
    )[0]
    assert weights.tolist() == [[0.25] * 4]


@pytest.mark.parametrize(
    "mask",
    extended(
        ["bool[B,1,1,S]", "float[B,1,1,S]", "bool[B,H,L,S]", "float[L,S]"],
        lambda mask: mask in {"bool[B,1,1,S]", "float[L,S]"},
    ),
)
def test_a_fully_masked_row_is_0_in_eager_in_the_truth_and_on_every_runtime(
    mask: str, tmp_path: Path
):
    from attn_export.bundle.golden import read_golden
    from attn_export.tensorfile import read_tensors

    spec = small_spec(attn_mask=mask, attn_weights=True)
    report = build(
        spec, tmp_path / "b", runtimes=["ort-cpu", "onnx-reference"], dialects=["standard"]
    )
    assert report.passed
    folder = tmp_path / "b" / "golden"
    golden = next(g for g in read_golden(folder) if "fully_masked_rows" in g.case.contents)
    first = golden.expected["attn_weights"][0, 0, 0]
    assert not first.any()
    assert not golden.eager["attn_weights"][0, 0, 0].any()
    verdicts = [v for v in report.verdicts if v.case == golden.case.name]
    assert {(v.runtime, v.status) for v in verdicts} == {
        ("ort-cpu", "passed"),
        ("onnx-reference", "passed"),
    }
    assert read_tensors(folder / "test_data_set_0", "input", list(spec.input_shapes()))


# -- torch.onnx.export(verify=True) lets NaN pass; the judge does not ------------------


def test_a_module_that_gives_nan_does_not_pass(tmp_path: Path):
    class Root(nn.Module):
        def forward(self, x):
            return x.sqrt()  # NaN for every negative input, in the truth as well

    # NaN where the truth has NaN is right; what must not pass is NaN where it has none.
    report = build(subject_of(Root()), tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"])
    assert report.passed

    class Overflow(nn.Module):
        def forward(self, x):
            return (x * 1e30) * (x * 1e30) * 1e-60  # finite in float64 only

    report = build(
        subject_of(Overflow()), tmp_path / "c", runtimes=["ort-cpu"], dialects=["standard"]
    )
    assert report.exit_code == 6
    assert {v.status for v in report.verdicts if v.case == "base"} == {"unusable"}


# -- what stays in the file -----------------------------------------------------


def test_attention_at_an_opset_that_has_none_is_found_by_a_check(tmp_path: Path, bundle: Path):
    model = onnx.load(bundle / "model.onnx")
    model.opset_import[0].version = 18
    onnx.save(model, tmp_path / "m.onnx")
    assert "opset_version" in {finding.check for finding in check_graph(tmp_path / "m.onnx")}


def test_a_graph_exported_without_dynamic_axes_is_found_by_a_check(tmp_path: Path):
    subject = Subject.from_spec(small_spec())
    subject_static = Subject(subject.module, subject.inputs, {}, subject.outputs)
    save_graph(export(subject_static).model, tmp_path / "m.onnx")
    expected = subject.expected()
    found = [f for f in check_graph(tmp_path / "m.onnx", expected) if f.check == "dynamic_axes"]
    assert any("'batch'" in finding.message for finding in found)


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


def test_a_module_with_dropout_passes_in_eval_mode(tmp_path: Path):
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    assert build(
        subject_of(module), tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"]
    ).passed


# -- B >= 2, and capture of what cannot be captured -------------------------------------------


def test_most_cases_have_batches_over_1(bundle: Path):
    from attn_export.bundle.golden import read_golden

    goldens = read_golden(bundle / "golden")
    batches = [golden.case.sizes["batch"] for golden in goldens]
    assert sum(batch >= 2 for batch in batches) > len(batches) / 2


def test_a_branch_on_values_is_refused_in_one_line():
    with pytest.raises(ExportError, match=r"torch.export cannot capture") as caught:
        export(subject_of(Branching(lambda x: x.sum() > 0)))
    assert "\n" not in str(caught.value)


def test_a_refused_graph_is_one_line_with_the_check_that_refused(tmp_path: Path):
    class Double(nn.Module):
        def forward(self, x):
            return x.double() * 2.5

    with pytest.raises(GraphError, match=r"no_float64: .*float64") as caught:
        build(subject_of(Double()), tmp_path / "b")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
