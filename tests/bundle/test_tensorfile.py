"""Tensors as files: what onnx writes is read, what is written onnx reads, damage is noticed."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from attn_export.tensorfile import read_outputs, read_tensor, write_npz, write_tensor, write_tensors
from attn_export.tensorproto import DTYPES

quick = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@st.composite
def arrays(draw, shapes=shapes) -> np.ndarray:
    """Draw arrays of every type, with any bits: NaN payloads, infinities, subnormals."""
    dtype = numpy_dtype(draw(st.sampled_from(sorted(DTYPES.values()))))
    shape = draw(shapes)
    if dtype == np.bool_:
        return draw(hnp.arrays(dtype, shape))
    return draw(hnp.arrays(f"u{dtype.itemsize}", shape)).view(dtype)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "input_0.pb"


# -- there and back ---------------------------------------------------------------------------


@quick
@given(arrays(), st.text(max_size=9))
def test_every_array_comes_back_bit_by_bit(path, array, name):
    write_tensor(path, name, array)
    found, back = read_tensor(path)
    assert found == name
    assert same(back, array)


@quick
@given(arrays())
def test_onnx_reads_what_is_written(path, array):
    write_tensor(path, "query", array)
    tensor = TensorProto.FromString(path.read_bytes())
    assert tensor.name == "query"
    assert same(numpy_helper.to_array(tensor), array)


@quick
@given(arrays())
def test_the_bytes_are_those_that_onnx_writes(path, array):
    write_tensor(path, "query", array)
    tensor = numpy_helper.from_array(array, "query")
    assert path.read_bytes() == tensor.SerializeToString(deterministic=True)


@quick
@given(arrays())
def test_files_of_onnx_are_read(path, array):
    path.write_bytes(numpy_helper.from_array(array, "query").SerializeToString())
    name, back = read_tensor(path)
    assert name == "query"
    assert same(back, array)


@pytest.mark.parametrize("dtype", sorted(DTYPES.values()))
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (300,), (1, 1, 1, 1, 1)], ids=str)
def test_every_type_has_scalars_and_empty_arrays(path, dtype, shape):
    array = np.ones(shape, numpy_dtype(dtype))
    write_tensor(path, "x", array)
    assert same(read_tensor(path)[1], array)


@pytest.mark.parametrize(("code", "name"), DTYPES.items())
def test_the_codes_of_types_are_those_of_onnx(code, name):
    assert helper.tensor_dtype_to_np_dtype(code) == numpy_dtype(name)


def test_an_array_that_is_not_contiguous_is_written_in_its_order(path):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)[::2]
    write_tensor(path, "x", array)
    np.testing.assert_array_equal(read_tensor(path)[1], array)


def test_an_array_of_the_other_byte_order_keeps_its_values(path):
    array = np.array([1.0, 2.0], np.dtype(np.float32).newbyteorder())
    write_tensor(path, "x", array)
    np.testing.assert_array_equal(read_tensor(path)[1], array)


# -- what other writers may do ----------------------------------------------------------------


def test_packed_dims_are_read(path):
    tensor = numpy_helper.from_array(np.arange(600, dtype=np.int32).reshape(2, 300), "x")
    # Field 1 (dims) as one run of bytes: 2, then 300 in two of them.
    packed = b"\x0a\x03" + b"\x02" + b"\xac\x02"
    del tensor.dims[:]
    path.write_bytes(packed + tensor.SerializeToString())
    assert read_tensor(path)[1].shape == (2, 300)


def test_fields_of_no_interest_are_skipped(path):
    array = np.arange(3, dtype=np.float32)
    tensor = numpy_helper.from_array(array, "x")
    tensor.doc_string = "made elsewhere"
    tensor.metadata_props.add(key="a", value="b")
    tensor.segment.begin, tensor.segment.end = 0, 3
    fixed = b"\xf9\x07" + b"\0" * 8 + b"\xfd\x07" + b"\0" * 4  # field 127, 64 and 32 bits wide
    path.write_bytes(fixed + tensor.SerializeToString())
    assert same(read_tensor(path)[1], array)


@pytest.mark.parametrize(
    "tensor",
    [
        helper.make_tensor("x", TensorProto.FLOAT, [2], [1.0, 2.0]),
        helper.make_tensor("x", TensorProto.INT64, [], [7]),
        numpy_helper.from_array(np.array(["a"], object), "x"),
        helper.make_tensor("x", TensorProto.INT4, [2], [1, 2]),
        TensorProto(name="x", data_type=TensorProto.FLOAT),
        TensorProto(name="x", dims=[0]),
    ],
    ids=["float_data", "int64_data", "strings", "int4", "no data", "no type"],
)
def test_a_tensor_that_is_not_understood_is_refused(path, tensor):
    path.write_bytes(tensor.SerializeToString())
    with pytest.raises(ValueError, match=r"input_0\.pb holds no tensor with raw data"):
        read_tensor(path)


@pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", "U3", object])
def test_an_array_without_an_onnx_type_is_refused_by_name(path, dtype):
    with pytest.raises(ValueError, match=r"positions is of type .*, which has no ONNX type"):
        write_tensor(path, "positions", np.empty(2, dtype))
    assert not path.exists()


# -- damage -----------------------------------------------------------------------------------


@quick
@given(arrays(hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3)), st.data())
def test_a_file_that_was_cut_off_is_refused(path, array, data):
    write_tensor(path, "query", array)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(
        ValueError, match=r"cut off|no protobuf message|no tensor|reshape|decode|buffer size"
    ):
        read_tensor(path)


@pytest.mark.parametrize("more", [b"\0", b"\xff", b"\x08", b"\x4a\x7f", b"\x0b", b"\xff" * 11])
def test_bytes_that_are_no_field_are_refused(path, more):
    write_tensor(path, "x", np.ones(2, np.float32))
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(
        ValueError, match=r"cut off|no protobuf message|no tensor|reshape|decode|buffer size"
    ):
        read_tensor(path)


@quick
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=4),
    st.sampled_from([0, 1, 7, 8, 9, 10, 16, 17, 99]),
    st.binary(max_size=32),
)
def test_no_header_whatsoever_gives_another_error_or_other_sizes(path, dims, kind, raw):
    tensor = TensorProto(name="x", dims=dims, data_type=kind, raw_data=raw)
    path.write_bytes(tensor.SerializeToString())
    try:
        _, array = read_tensor(path)
    except ValueError:
        return
    assert list(array.shape) == dims
    assert array.nbytes == len(raw)


@quick
@given(st.binary(max_size=64))
def test_noise_gives_no_other_error(path, noise):
    path.write_bytes(noise)
    try:
        read_tensor(path)
    except ValueError:
        return


def test_arrays_of_any_name_are_written_into_one_file(tmp_path: Path):
    names = ("file", "args", "kwds", "self", "a.b", "a/b", "x")
    arrays = {name: np.arange(at, dtype=np.float32) for at, name in enumerate(names)}
    write_npz(tmp_path / "a.npz", arrays)
    with np.load(tmp_path / "a.npz") as found:
        assert {name: found[name].tolist() for name in found} == {
            name: array.tolist() for name, array in arrays.items()
        }


def test_large_outputs_are_views_of_their_files(tmp_path):
    arrays = {"small": np.arange(6.0).reshape(2, 3), "large": np.arange(2.0**14).reshape(2, -1)}
    write_tensors(tmp_path, "output", arrays)
    found = read_outputs(tmp_path, 2)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert [isinstance(array, np.memmap) for array in found.values()] == [False, True]
