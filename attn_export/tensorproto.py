"""Parser and serialiser of ONNX TensorProto messages, without numpy or onnx.

Four fields of the protobuf message `TensorProto` are used: dims (1), data_type (2), name (8) and
raw_data (9). These are the fields that `onnx.numpy_helper` writes; see
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.

The Python kit ships this file, so it must not import other files of this package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip
"""The supported dtypes, by their numbers in `TensorProto.DataType`."""

CODES = {name: code for code, name in DTYPES.items()}
"""The numbers in `TensorProto.DataType`, by dtype."""

DIMS, DATA_TYPE, NAME, RAW_DATA = 1, 2, 8, 9
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MOST_DIMS, LARGEST_DIM = 8, 2**31 - 1
_LARGEST_FIELD = 2**29 - 1


@dataclasses.dataclass(frozen=True)
class TensorMessage:
    """A tensor with raw data.

    Attributes:
        dims: The shape.
    """

    name: str
    dtype: str
    dims: list[int]
    raw: bytes


def parse(data: bytes) -> TensorMessage:
    """Parse a message."""
    dims: list[int] = []
    dtype, name, raw = None, "", None
    for field, value in fields(data):
        if field == DIMS and isinstance(value, int):
            dims.append(value)
        elif field == DIMS and isinstance(value, bytes):  # packed, as some writers do
            dims += _packed(value)
        elif field == DATA_TYPE and isinstance(value, int):
            dtype = DTYPES.get(value)
        elif field == NAME and isinstance(value, bytes):
            name = value.decode()
        elif field == RAW_DATA and isinstance(value, bytes):
            raw = value
    # Tensors without elements may have no data.
    if dtype is None or (raw is None and 0 not in dims):
        raise ValueError("no tensor with raw data")
    if len(dims) > MOST_DIMS or max(dims, default=0) > LARGEST_DIM:
        raise ValueError(f"the dims {str(dims)[:80]}, which no tensor has")
    return TensorMessage(name, dtype, dims, raw or b"")


def serialise(message: TensorMessage) -> bytes:
    """Serialise a tensor."""
    code = CODES[message.dtype]
    return (
        b"".join(_key(DIMS, VARINT) + _varint(size) for size in message.dims)
        + _key(DATA_TYPE, VARINT)
        + _varint(code)
        + _bytes(NAME, message.name.encode())
        + _bytes(RAW_DATA, message.raw)
    )


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        field, wire_type = key >> 3, key & 7
        if not 1 <= field <= _LARGEST_FIELD:
            raise ValueError("no protobuf message")
        if wire_type == VARINT:
            value, at = _read_varint(data, at)
            yield field, value
            continue
        if wire_type == BYTES:
            length, at = _read_varint(data, at)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise ValueError("no protobuf message")
        if at + length > len(data):
            raise ValueError("a message that was cut off")
        yield field, data[at : at + length]
        at += length


def _packed(data: bytes) -> list[int]:
    numbers, at = [], 0
    while at < len(data):
        number, at = _read_varint(data, at)
        numbers.append(number)
    return numbers


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80 and value < 2**64:
            return value, at
        shift += 7
    raise ValueError("a message that was cut off")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(value)) + value
