"""A graph on disk: one file, or its weights once in `weights.safetensors`."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.numpy
from ir_graphs import model_of, value, weight
from onnx import numpy_helper
from small_graphs import exported

from attn_export.graph import save
from attn_export.graph.checks import check_graph
from attn_export.graph.save import WEIGHTS, save_graph, tensor_places, write_tensors

LARGE = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"}
"""The initialisers of a small spec that take 1024 bytes or more: 4, 2, 2 and 4 KiB."""


@pytest.fixture
def everything_large(monkeypatch):
    """Make weights external from 1 byte on."""
    monkeypatch.setattr(save, "EXTERNAL_ABOVE", 1)


def values_of(model: ir.Model) -> dict[str, np.ndarray]:
    return {name: v.const_value.numpy() for name, v in model.graph.initializers.items()}


def location_of(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


# -- below the threshold ----------------------------------------------------------------------


def test_a_small_graph_is_one_file(tmp_path):
    assert save_graph(exported()[1].model, tmp_path / "model.onnx") == ["model.onnx"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    loaded = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert not any(tensor.external_data for tensor in loaded.graph.initializer)


@pytest.mark.parametrize(
    ("threshold", "files"), [(12 << 10, 1), ((12 << 10) - 1, 2)], ids=["at it", "above it"]
)
def test_only_more_bytes_than_the_threshold_are_external(threshold, files, monkeypatch, tmp_path):
    monkeypatch.setattr(save, "EXTERNAL_ABOVE", threshold)
    assert len(save_graph(exported()[1].model, tmp_path / "model.onnx")) == files


def test_the_threshold_is_64_mib():
    assert save.EXTERNAL_ABOVE == 64 << 20


# -- above it ---------------------------------------------------------------------------------


def test_a_large_graph_has_its_weights_beside_it(everything_large, tmp_path):
    written = save_graph(exported()[1].model, tmp_path / "model.onnx")
    assert sorted(written) == sorted(path.name for path in tmp_path.iterdir())
    assert written == ["model.onnx", WEIGHTS]


def test_external_weights_are_read_by_onnx_as_they_were(everything_large, tmp_path):
    model = exported()[1].model
    save_graph(model, tmp_path / "model.onnx")
    loaded = onnx.load(tmp_path / "model.onnx")
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in loaded.graph.initializer}
    expected = values_of(model)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_external_weights_are_read_by_safetensors_under_their_names(everything_large, tmp_path):
    model = exported()[1].model
    save_graph(model, tmp_path / "model.onnx")
    found = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    assert set(found) == LARGE
    for name, array in found.items():
        np.testing.assert_array_equal(array, values_of(model)[name])


def test_external_data_points_into_the_file_by_offset(everything_large, tmp_path):
    save_graph(exported()[1].model, tmp_path / "model.onnx")
    data = (tmp_path / WEIGHTS).read_bytes()
    loaded = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    external = {t.name: location_of(t) for t in loaded.graph.initializer if t.external_data}
    assert set(external) == LARGE
    for name, entries in external.items():
        assert entries["location"] == WEIGHTS
        start = int(entries["offset"])
        stored = data[start : start + int(entries["length"])]
        assert stored == values_of(exported()[1].model)[name].tobytes()


def test_small_constants_stay_in_the_graph(everything_large, tmp_path):
    model = exported()[1].model
    save_graph(model, tmp_path / "model.onnx")
    loaded = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    inline = {tensor.name for tensor in loaded.graph.initializer if not tensor.external_data}
    assert inline == set(model.graph.initializers) - LARGE
    assert {"q_proj.bias", "int64[1]_1"} <= inline


def test_a_graph_with_external_weights_has_no_findings_and_loads_in_a_runtime(
    everything_large, tmp_path
):
    subject, graph = exported()
    save_graph(graph.model, tmp_path / "model.onnx")
    assert check_graph(tmp_path / "model.onnx", subject.expected()) == []
    onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])


def test_a_cut_off_weights_file_is_found(everything_large, tmp_path):
    save_graph(exported()[1].model, tmp_path / "model.onnx")
    weights = tmp_path / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "external_data" in {finding.check for finding in check_graph(tmp_path / "model.onnx")}


# -- in both cases ----------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 64 << 20], ids=["external", "inline"])
def test_saving_leaves_the_model_as_it_was(threshold, monkeypatch, tmp_path):
    monkeypatch.setattr(save, "EXTERNAL_ABOVE", threshold)
    model = exported()[1].model
    before = ir.to_proto(model).SerializeToString()
    tensors = {name: v.const_value for name, v in model.graph.initializers.items()}
    save_graph(model, tmp_path / "model.onnx")
    assert all(model.graph.initializers[name].const_value is t for name, t in tensors.items())
    assert ir.to_proto(model).SerializeToString() == before


def test_a_save_that_fails_leaves_the_model_as_it_was(everything_large, monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError("no space left")

    model = exported()[1].model
    before = ir.to_proto(model).SerializeToString()
    monkeypatch.setattr(ir, "save", refuse)
    with pytest.raises(OSError, match="no space left"):
        save_graph(model, tmp_path / "model.onnx")
    assert ir.to_proto(model).SerializeToString() == before


@pytest.mark.parametrize("threshold", [1, 64 << 20], ids=["external", "inline"])
def test_the_same_graph_gives_the_same_bytes(threshold, monkeypatch, tmp_path):
    monkeypatch.setattr(save, "EXTERNAL_ABOVE", threshold)
    content = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        names = save_graph(exported()[1].model, folder / "model.onnx")
        content.append({name: (folder / name).read_bytes() for name in names})
    assert content[0] == content[1]


# -- tensors of other kinds -------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(600, dtype=np.float16).reshape(2, 300), np.arange(600.0),
        np.arange(600, dtype=np.int64), np.arange(1200, dtype=np.uint8), np.ones(1200, bool),
        np.arange(600).astype(ml_dtypes.bfloat16),
        np.asfortranarray(np.arange(600, dtype=np.float32).reshape(20, 30)),
    ],
    ids=["float16", "float64", "int64", "uint8", "bool", "bfloat16", "transposed in memory"],
)  # fmt: skip
def test_a_tensor_comes_back_whatever_its_type_and_layout(array, everything_large, tmp_path):
    w, y = weight("w", array), value("y", *array.shape)
    y.dtype = w.dtype
    model = model_of([], [y], [ir.node("Identity", [w], outputs=[y])], [w])
    save_graph(model, tmp_path / "model.onnx")
    (tensor,) = onnx.load(tmp_path / "model.onnx").graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), array)


def test_weights_are_written_in_parts_and_as_safetensors_reads_them(monkeypatch, tmp_path):
    monkeypatch.setattr(save, "PART", 1000)
    arrays = {
        "a": np.arange(70 * 90, dtype=np.float32).reshape(70, 90).T,
        "b": np.arange(5, dtype=np.uint8),
        "c": np.arange(2 * 3 * 500, dtype=np.float64).reshape(2, 3, 500).transpose(1, 2, 0),
        "d": np.arange(6, dtype=np.int64)[::2],
        "e": np.array(1.5, np.float16),
        "f": np.zeros((0, 3), np.float32),
    }
    path = tmp_path / WEIGHTS
    write_tensors(path, {name: ir.tensor(array, name=name) for name, array in arrays.items()})
    found = safetensors.numpy.load_file(path)
    assert found.keys() == arrays.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)
    for name, (offset, _) in tensor_places(path).items():
        assert offset % arrays[name].itemsize == 0


def test_saving_takes_no_copy_of_the_weights(tmp_path):
    array = np.ones((3000, 8000), np.float32).T
    tensors = {"w": ir.tensor(array)}
    tracemalloc.start()
    try:
        write_tensors(tmp_path / WEIGHTS, tensors)
        assert tracemalloc.get_traced_memory()[1] < 2.2 * save.PART < array.nbytes
    finally:
        tracemalloc.stop()


def test_the_places_of_tensors_are_those_of_the_file(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.float32), "a": np.arange(3, dtype=np.uint8)}
    path = tmp_path / WEIGHTS
    safetensors.numpy.save_file(arrays, path, metadata={"made by": "a test"})
    data = path.read_bytes()
    places = tensor_places(path)
    assert places.keys() == arrays.keys()
    for name, (offset, length) in places.items():
        assert data[offset : offset + length] == arrays[name].tobytes()
