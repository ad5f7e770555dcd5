"""A graph of which one slice is loaded at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from attn_export.runtimes.engines.ort_cpu import OrtCpu

GRAPH = """
<ir_version: 10, opset_import: ["": 21]>
g (float[n, 256] x, bool flag) => (float[n, 256] first, float[n, 256] last)
<float[256, 256] a = {0}, float[256, 256] b = {0}, float[256, 256] c = {0}> {
    first = MatMul(x, a)
    b_t = Transpose <perm = [1, 0]> (b)
    second = MatMul(first, b_t)
    third = If (flag) <
        then_branch = yes () => (float[n, 256] p) { p = MatMul(second, c) },
        else_branch = no () => (float[n, 256] q) { q = Add(first, x) }
    >
    last = Add(third, first)
}
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Return a graph of three weights of 256 KiB, one transposed and one read by a branch."""
    random = np.random.default_rng(0)
    model = parser.parse_model(GRAPH)
    for weight in model.graph.initializer:
        array = random.standard_normal((256, 256), np.float32)
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    path = tmp_path / "graph.onnx"
    onnx.save_model(
        model, path, save_as_external_data=True, location="graph.data", size_threshold=0
    )
    return path


def test_slices_give_what_the_whole_graph_gives_and_hold_large_outputs_in_files(graph):
    slices, in_files = [], 0
    engine = OrtCpu().load_in_slices(graph, 1, 2**18)
    whole = OrtCpu().load(graph, 1)
    random = np.random.default_rng(1)
    runs = [
        ({"x": random.standard_normal((rows, 256), np.float32), "flag": np.array(flag)}, {})
        for rows in (1, 100)
        for flag in (False, True)
    ]
    engine.expect(runs, lambda: slices.append(None))
    assert len(slices) == engine.facts()["slices"] == 3
    for inputs, bound in runs:
        expected, found = whole.run(inputs, bound), engine.run(inputs, bound)
        assert expected.keys() == found.keys()
        for name, array in expected.items():
            assert np.array_equal(found[name], array), name
            in_files += isinstance(found[name], np.memmap)
    # Of the two runs of 100 rows, the last output of each; later slices read the first one.
    assert in_files == 2


def test_a_slice_that_fails_in_one_run_leaves_the_others(graph):
    engine = OrtCpu().load_in_slices(graph, 1, 2**18)
    good = {"x": np.ones((2, 256), np.float32), "flag": np.array(True)}
    bad = {"x": np.ones((2, 255), np.float32), "flag": np.array(True)}
    engine.expect([(bad, {}), (good, {})], lambda: None)
    with pytest.raises(RuntimeError, match="255"):
        engine.run(bad, {})
    assert engine.run(good, {})["last"].shape == (2, 256)
