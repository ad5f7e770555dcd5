"""Golden vectors: the inputs of each case, and the outputs that float64 gives for them.

Tensors are ONNX TensorProto messages, https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attn_kit.files import read, shown
from attn_kit.measures import Measures
from attn_kit.settings import AXES, INPUTS, OUTPUTS, ROUNDS_INPUTS
from attn_kit.tensorproto import TensorMessage, parse

FOLDER = re.compile(r"test_data_set_[0-9]+")


@dataclass(frozen=True)
class Case:
    """A case: inputs, and the rule by which outputs are judged.

    Attributes:
        name: The name of the case.
        inputs: The inputs by name.
        expected: The true outputs by name.
        tolerance: For each output the tolerance; None: it must be equal.
        uncompared: The reason, for each output that is not compared.
        ignored_rows: Batch elements that are not compared.
    """

    name: str
    inputs: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]
    tolerance: Mapping[str, Measures | None]
    uncompared: Mapping[str, str]
    ignored_rows: Sequence[int]


def cases(bundle: Path) -> Iterator[Case]:
    """Yield every case of a bundle.

    Raises:
        OSError: If a file is missing.
        ValueError: If a file is invalid.
    """
    folder = bundle / "golden"
    index = json.loads(read(folder / "index.json"))
    try:
        if not isinstance(index["cases"], list) or not index["cases"]:
            raise TypeError("there are no cases")
        for entry in index["cases"]:
            if not entry.get("shapes"):  # of a large model, some cases are stored in part
                yield _case(folder, entry)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"golden/index.json does not say how to judge: {type(error).__name__} {error}"
        ) from error


def _case(golden: Path, entry: Mapping[str, Any]) -> Case:
    name, uncompared = _text(entry["name"]), dict(entry["unusable"])
    if not FOLDER.fullmatch(entry["folder"]):
        raise ValueError(f"golden/index.json puts {name[:60]} into {entry['folder'][:60]!r}")
    folder = golden / entry["folder"]
    inputs, expected = (
        _tensors(folder, *kind) for kind in (("input", INPUTS), ("output", OUTPUTS))
    )
    _check_sizes(folder, {**inputs, **expected})
    errors = entry["rounded" if ROUNDS_INPUTS else "allowed"]
    tolerance = {output: _errors(errors[output]) for output in expected}
    if not isinstance(entry["ignored_rows"], list):
        raise TypeError("ignored_rows is no list")
    rows = [operator.index(row) for row in entry["ignored_rows"]]
    for output, reference in expected.items():
        # Negative numbers must be refused, because numpy would count them from the end.
        if reference.ndim and not all(0 <= row < len(reference) for row in rows):
            raise ValueError(f"{name[:60]} ignores rows that {output[:60]} does not have")
    uncompared = {output: _text(why) for output, why in uncompared.items()}
    return Case(name, inputs, expected, tolerance, uncompared, rows)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def _tensors(folder: Path, kind: str, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    tensors = {}
    for number, (name, dtype) in enumerate(dtypes.items()):
        path = folder / f"{kind}_{number}.pb"
        stored_name, array = read_tensor(path)
        where = f"{shown(path)}: {name[:60]}"
        if stored_name != name:
            raise ValueError(f"{shown(path)} holds {stored_name[:60]!r}, expected {name[:60]!r}")
        if array.dtype != np.dtype(dtype):
            raise ValueError(f"{where} has the type {array.dtype}, expected {dtype}")
        if array.ndim != len(AXES[name]):
            raise ValueError(f"{where} has the rank {array.ndim}, expected {len(AXES[name])}")
        tensors[name] = array
    return tensors


def _check_sizes(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Check that shapes match the signature, in which a named axis has one size in all tensors."""
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        expected = [
            axis if isinstance(axis, int) else sizes.setdefault(axis, size)
            for axis, size in zip(AXES[name], array.shape, strict=True)
        ]
        if list(array.shape) != expected:
            raise ValueError(
                f"{shown(folder)}: {name[:60]} has the shape {list(array.shape)}, "
                f"expected {expected}"
            )
    lengths, most = arrays.get("past_length"), sizes.get("capacity", 0) - sizes.get("query_len", 0)
    if lengths is not None and np.any((lengths < 0) | (lengths > most)):
        raise ValueError(
            f"{shown(folder)}: past_length holds {lengths.min()} to {lengths.max()}, expected 0 to "
            f"{most}: a step is written into the cache from there on"
        )


def _errors(tolerance: Mapping[str, float] | None) -> Measures | None:
    if tolerance is None:
        return None
    errors = Measures(tolerance["whole"], tolerance["row"])
    if errors.whole <= 0 or errors.row <= 0:
        raise ValueError(f"errors of {errors.whole} and {errors.row} are allowed")
    return errors


def read_tensor(path: Path) -> tuple[str, np.ndarray]:
    """Read a tensor file and return the name and the values of the tensor.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it holds no tensor with raw data.
    """
    data = read(path)
    try:
        message = parse(data)
        return message.name, _array(message)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{shown(path)} holds no tensor: {error}") from error


def _array(message: TensorMessage) -> np.ndarray:
    if message.dtype == "bfloat16":
        raise ValueError("it is of a type that numpy does not have")
    return np.frombuffer(message.raw, np.dtype(message.dtype).newbyteorder("<")).reshape(
        message.dims
    )
