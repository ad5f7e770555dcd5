"""The copy of a compared graph in its bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from attn_export.commands import compared_graph
from attn_export.graph.load import load_model, load_proto

GRAPH = """
<ir_version: 10, opset_import: ["": 21]>
g (float[2] x) => (float[2] y) <float[2] a = {1, 2}, float[2] b = {3, 4}, float[2] c = {5, 6}> {
    s = Add(x, a)
    t = Mul(s, b)
    y = Add(t, c)
}
"""


@pytest.mark.parametrize("limit", [0, 2**30], ids=["in a file", "embedded"])
def test_a_copy_holds_the_external_data_of_all_files(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parser.parse_model(GRAPH)
    for at, tensor in enumerate(model.graph.initializer[:2]):
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        onnx.external_data_helper.set_external_data(tensor, f"{at}.bin", 4)
        (tmp_path / f"{at}.bin").write_bytes(b"1234" + tensor.raw_data)
        tensor.ClearField("raw_data")
    path, target = tmp_path / "theirs.onnx", tmp_path / "bundle" / "model.onnx"
    path.write_bytes(model.SerializeToString())
    target.parent.mkdir()
    monkeypatch.setattr(compared_graph, "_EMBEDDED_BELOW", limit)
    compared_graph._copy_graph(path, load_proto(path), target)
    written = ["model.onnx"] if limit else ["model.onnx", "model.onnx.data"]
    assert sorted(file.name for file in target.parent.iterdir()) == written
    found = [onnx.numpy_helper.to_array(x) for x in load_model(target).graph.initializer]
    np.testing.assert_array_equal(found, [[1, 2], [3, 4], [5, 6]])
