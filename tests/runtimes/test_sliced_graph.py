"""A graph of which one slice is loaded at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from attn_export.graph.load import mapped_data
from attn_export.runtimes import sliced_graph
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


def saved(text: str, folder: Path) -> Path:
    """Return a graph with random weights in a file."""
    random = np.random.default_rng(0)
    model = parser.parse_model(text)
    for weight in model.graph.initializer:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(weight.data_type)
        array = random.standard_normal(tuple(weight.dims), np.float32).astype(dtype)
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    path = folder / "graph.onnx"
    onnx.save_model(
        model, path, save_as_external_data=True, location="graph.data", size_threshold=0
    )
    return path


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Return a graph of three weights of 256 KiB, one transposed and one read by a branch."""
    return saved(GRAPH, tmp_path)


def test_slices_give_what_the_whole_graph_gives_and_hold_large_outputs_in_files(graph):
    made, in_files = [], 0
    engine = OrtCpu().load_in_slices(graph, 1, 2**18)
    whole = OrtCpu().load(graph, 1)
    random = np.random.default_rng(1)
    runs = [
        ({"x": random.standard_normal((rows, 256), np.float32), "flag": np.array(flag)}, {})
        for rows in (1, 100)
        for flag in (False, True)
    ]
    engine.expect(runs, lambda: made.append(None))
    assert engine.facts()["slices"] == 3
    assert len(made) == 3 * len(runs)
    for inputs, bound in runs:
        expected, found = whole.run(inputs, bound), engine.run(inputs, bound)
        assert expected.keys() == found.keys()
        for name, array in expected.items():
            assert np.array_equal(found[name], array), name
            in_files += isinstance(found[name], np.memmap)
    # Of the two runs of 100 rows, the last output of each; later slices read the first one.
    assert in_files == 2


NARROW = """
<ir_version: 10, opset_import: ["": 21]>
g (float16[n, 256] x, float[n, 256] y) => (float16[n, 256] first, float[n, 250] last)
<float16[256, 256] a = {0}, float16[256, 250] b = {0}> {
    first = MatMul(x, a)
    b_wide = Cast <to = 1> (b)
    last = MatMul(y, b_wide)
}
"""


def test_a_product_with_a_large_float16_weight_is_given_its_columns(tmp_path, monkeypatch):
    read, path = [], saved(NARROW, tmp_path)
    monkeypatch.setattr(
        sliced_graph, "mapped_data", lambda *args: read.append(mapped_data(*args)) or read[-1]
    )
    y = np.random.default_rng(1).standard_normal((5, 256), np.float32)
    inputs = {"x": y.astype(np.float16), "y": y}
    found = OrtCpu().load_in_slices(path, 1, 2**17).run(inputs, {})
    for name, array in OrtCpu().load(path, 1).run(inputs, {}).items():
        assert np.array_equal(found[name], array), name
    assert [weight.shape for weight in read] == [(256, 256), (256, 250)]


def test_a_slice_that_fails_in_one_run_leaves_the_others(graph):
    engine = OrtCpu().load_in_slices(graph, 1, 2**18)
    good = {"x": np.ones((2, 256), np.float32), "flag": np.array(True)}
    bad = {"x": np.ones((2, 255), np.float32), "flag": np.array(True)}
    engine.expect([(bad, {}), (good, {})], lambda: None)
    with pytest.raises(RuntimeError, match="255"):
        engine.run(bad, {})
    assert engine.run(good, {})["last"].shape == (2, 256)


def test_a_slice_that_lacks_memory_says_how_much_would_do(graph):
    def load(*_):
        raise RuntimeError("std::bad_alloc")

    engine = sliced_graph.SlicedEngine(graph, 2**17, load, {})
    with pytest.raises(RuntimeError, match=r"bad_alloc; the slice .* weights: --memory 2GiB"):
        engine.run({"x": np.ones((2, 256), np.float32), "flag": np.array(True)}, {})
