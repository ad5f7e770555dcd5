"""All readers of tensor files read the same, and refuse the same: Python, its kit, JS and C."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conformance import answers, python_kit
from onnx import TensorProto, helper, numpy_helper

from attn_export.tensorfile import numpy_dtype, read_tensor
from attn_export.tensorproto import CODES, DTYPES

BYTES_2_63 = b"\x80" * 9 + b"\x01"
FLOATS = TensorProto(name="x", dims=[2], data_type=1, raw_data=bytes(8)).SerializeToString()


def changed(**fields: object) -> bytes:
    """Return a message of two float32 with other fields."""
    tensor = TensorProto.FromString(FLOATS)
    for name, value in fields.items():
        tensor.ClearField(name)
        if isinstance(value, list):
            getattr(tensor, name).extend(value)
        else:
            setattr(tensor, name, value)
    return tensor.SerializeToString()


def good() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of messages that readers must read."""
    rng = np.random.default_rng(0)
    for name in DTYPES.values():
        dtype = numpy_dtype(name)
        for shape in [(), (0,), (2, 0, 3), (3, 2), (1,) * 8]:
            raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
            array = (raw & 1 if name == "bool" else raw).view(dtype).reshape(shape)
            yield f"{name} {list(shape)}", numpy_helper.from_array(array, "x").SerializeToString()
    extremes = np.array([-(2**63), 2**63 - 1, -1])
    yield "int64 extremes", numpy_helper.from_array(extremes, "x").SerializeToString()
    floats = np.array([np.nan, -0.0, np.inf, 5e-324])
    yield "float64 specials", numpy_helper.from_array(floats, "x").SerializeToString()
    halves = np.array([np.nan, 1e-40, -np.inf], ml_dtypes.bfloat16)
    yield "bfloat16 specials", numpy_helper.from_array(halves, "x").SerializeToString()
    for name in ("", "é 漢 🙂", "\ufeffwith a mark", "n" * 300, "tab\tand\nline"):
        yield f"name {name!r:.20}", changed(name=name)
    yield "packed dims", b"\x0a\x02\x01\x02" + changed(dims=[])
    yield "an empty run of dims", b"\x0a\x00" + FLOATS
    yield "the last name counts", FLOATS + b"\x42\x01y"
    yield "the last type counts", FLOATS + b"\x10\x06"
    yield "the last data count", FLOATS + b"\x4a\x08" + b"12345678"
    yield "fields of other types", FLOATS + b"\x12\x01\x06" + b"\x40\x05" + b"\x48\x05"
    yield "unknown fields", b"\xf9\x07" + bytes(8) + b"\xfd\x07" + bytes(4) + FLOATS
    yield "the largest field number", b"\xf8\xff\xff\xff\x0f\x01" + FLOATS
    yield "a long varint", b"\x10\x81\x80\x00" + changed(data_type=1)
    yield "no data of no elements", TensorProto(dims=[0], data_type=1).SerializeToString()
    yield "a large size of no elements", changed(dims=[0, 2**31 - 1], raw_data=b"")
    yield "doc and segment", changed(doc_string="made elsewhere")


def broken() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of messages that readers must refuse."""
    yield "nothing", b""
    for size in range(1, len(FLOATS)):
        yield f"cut after {size} bytes", FLOATS[:size]
    for kind in (0, 8, 14, 15, 17, 21, 22, 31, 99, 2**31 - 1):
        yield f"type {kind}", changed(data_type=kind)
    for dims in ([], [1], [3], [2, 0], [2**31], [2**62, 4], [2**63 - 1], [-1], [-2, -1], [1] * 9):
        yield f"dims {dims}", changed(dims=dims)
    for dims in ([0, 2**31], [0, 2**40], [0, -1], [0] * 9):
        yield f"dims {dims} without data", changed(dims=dims, raw_data=b"")
    yield "dims of 2**64 elements", changed(dims=[2**16] * 4, raw_data=b"")
    yield "dims of 2**64 + 2 elements", changed(dims=[2, 2**31 - 1] + [2**30] * 3)
    yield "no data", TensorProto(name="x", dims=[2], data_type=1).SerializeToString()
    yield "no data of a scalar", TensorProto(name="x", data_type=1).SerializeToString()
    for size in (0, 7, 9, 16):
        yield f"{size} bytes of data", changed(raw_data=bytes(size))
    floats = helper.make_tensor("x", TensorProto.FLOAT, [2], [1.0, 2.0])
    yield "float_data", floats.SerializeToString()
    strings = numpy_helper.from_array(np.array(["a"], object), "x")
    yield "strings", strings.SerializeToString()
    for name in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"a\x80"):
        yield f"name {name!r}", FLOATS + b"\x42" + bytes([len(name)]) + name
    ends = {
        "group": b"\x0b", "end of a group": b"\x0c", "wire type 6": b"\x0e", "wire type 7": b"\x0f",
        "half a varint": b"\x08\x80", "a cut packed size": b"\x0a\x01\x80",
        "a length beyond the end": b"\x4a\x7f", "a huge length": b"\x4a" + BYTES_2_63,
        "eleven bytes of a varint": b"\x08" + b"\x80" * 10 + b"\x01",
        "65 bits of a varint": b"\x10" + b"\x81" + b"\x80" * 8 + b"\x02",
        "65 bits of a packed size": b"\x0a\x0a" + b"\x81" + b"\x80" * 8 + b"\x02",
        "field 0": b"\x00\x01", "field 2**29": b"\x80\x80\x80\x80\x10\x01",
        "field 2**32 + 2": b"\x90\x80\x80\x80\x80\x01\x06",
        "field 2**60": b"\x80" * 9 + b"\x01\x01",
    }  # fmt: skip
    for name, end in ends.items():
        yield name, FLOATS + end


FILES = {**dict(good()), **dict(broken())}
GOOD = dict(good())


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tensors")
    paths = {name: folder / f"{number}.pb" for number, name in enumerate(FILES)}
    for name, path in paths.items():
        path.write_bytes(FILES[name])
    return paths


def fields_of(name: str, array: np.ndarray) -> list[str]:
    """Return a tensor as the programs print it."""
    dims = ",".join(map(str, array.shape))
    return ["read", name.encode().hex(), str(CODES[array.dtype.name]), dims, array.tobytes().hex()]


def by_python(path: Path, read=read_tensor) -> list[str]:
    try:
        return fields_of(*read(path))
    except ValueError as error:
        return ["refused", str(error)]


def test_python_reads_the_good_files_as_onnx_does_and_refuses_the_others(paths: dict[str, Path]):
    for name, path in paths.items():
        found = by_python(path)
        assert found[0] == ("read" if name in GOOD else "refused"), (name, found)
        if name in GOOD:
            tensor = TensorProto.FromString(FILES[name])
            assert found == fields_of(tensor.name, numpy_helper.to_array(tensor)), name


@pytest.mark.parametrize("language", ["js", "c"])
def test_other_languages_read_and_refuse_what_python_does(language: str, paths: dict[str, Path]):
    found = answers(language, [f"read\t{path}" for path in paths.values()])
    wrong = [
        (name, fields)
        for (name, path), fields in zip(paths.items(), found, strict=True)
        if fields != by_python(path) and not fields[0] == by_python(path)[0] == "refused"
    ]
    assert not wrong


def test_the_kit_in_python_reads_and_refuses_the_same(paths: dict[str, Path], tmp_path: Path):
    with python_kit(tmp_path):
        read = importlib.import_module("attn_kit.golden").read_tensor
    for name, path in paths.items():
        found, expected = by_python(path, read), by_python(path)
        if name.startswith("bfloat16"):
            assert "of a type that numpy does not have" in found[1]
        else:
            assert found == expected or found[0] == expected[0] == "refused", name
