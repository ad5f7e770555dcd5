"""What `range` writes, and that it writes over nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Cli
from onnx import TensorProto, helper
from range_graphs import CASES, WIDTH, RangeCase

from attn_export.parts.value_ranges import mixed_graph
from attn_export.parts.value_ranges.range_flow import InputSets, ranges_of

CASE = CASES["squares of a norm, absorbed"]
WIDE = np.random.default_rng(0).standard_normal((WIDTH, 64)) / 8
LARGE = RangeCase(
    [("MatMul", "x wide", "y"), ("MatMul", "y b", "out")], {"wide": WIDE, "b": WIDE.T}
)
SETS = InputSets([LARGE.inputs()], "drawn")


def test_an_operator_called_like_a_path_is_no_file(cli: Cli, tmp_path: Path):
    victim = tmp_path / "victim.onnx"
    victim.write_text("mine")
    node = helper.make_node(str(victim.with_suffix("")), ["x"], ["y"], domain="any")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4]) for name in "xy"]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("any", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save_model(model, tmp_path / "model.onnx")
    assert cli("range", "model.onnx").returncode == 4
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("model.onnx", "model.onnx is the file to read"), ("link.onnx", "is the file to read"),
        ("same.onnx", "is the file to read"), ("weights.onnx", "holds weights of model.onnx"),
        ("text.onnx", "is not an ONNX model; choose another"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_output_is_kept(output: str, message: str, cli: Cli, tmp_path: Path):
    path = CASE.write(tmp_path / "model.onnx")
    onnx.save_model(
        CASE.model(), path, save_as_external_data=True, location="weights.onnx", size_threshold=0
    )
    (tmp_path / "link.onnx").symlink_to(path)
    (tmp_path / "same.onnx").hardlink_to(path)
    (tmp_path / "text.onnx").write_text("mine")
    before = (tmp_path / output).read_bytes()
    done = cli("range", "model.onnx", "--fix", output)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert (tmp_path / output).read_bytes() == before


def test_weights_of_a_large_graph_have_a_name_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mixed_graph, "_EMBEDDED_BELOW", 0)
    path, output = LARGE.write(tmp_path / "model.onnx"), tmp_path / "out.onnx"
    other = tmp_path / "out.onnx.data"
    other.write_text("another model's")

    def fix(dtype: str) -> set[str]:
        ranges_of(path, SETS, (), dtype, output)
        onnx.load_model(output)
        return {each.name for each in tmp_path.glob("out.onnx.*.data")}

    first, again = fix("float16"), fix("float16")
    assert len(first) == 1
    assert again == first
    (tmp_path / "shares.onnx").write_bytes(output.read_bytes())
    rename = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if target == output:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fix("bfloat16")
    types = {each.data_type for each in onnx.load_model(output).graph.initializer}
    assert TensorProto.BFLOAT16 not in types
    assert len(fix("bfloat16")) == 2  # another graph has the first one's
    (tmp_path / "shares.onnx").unlink()
    assert first.isdisjoint(fix("float16") - first)
    assert len(fix("bfloat16")) == 1
    assert other.read_text() == "another model's"
