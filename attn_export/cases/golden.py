"""Golden vectors on disk: `test_data_set_N/input_I.pb, output_I.pb` and an index.

The layout is ONNX's own for backend tests, so `onnx_test_runner` reads it too. Beside the
truth (`output_I.pb`) lies what the module itself gave (`eager_I.pb`).

numpy comes in with the functions that need it: `verify` starts its runtimes' processes first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import BundleError, one_line
from attn_export.nouns import Allowed, Case, Golden, StoredCase

INDEX = "index.json"
FOLDER = re.compile(r"test_data_set_\d+")
LARGEST = 2**53
"""Whole numbers up to this are the same in every language that reads the index."""


def write_inputs(folder: Path, number: int, case: Case) -> StoredCase:
    """Write the inputs of a case."""
    from attn_export.tensorfile import write_tensors

    case_folder = folder / f"test_data_set_{number}"
    case_folder.mkdir(parents=True)
    write_tensors(case_folder, "input", case.inputs)
    return StoredCase(case.name, case_folder, case.sizes, case.kind)


def write_golden(folder: Path, goldens: Sequence[Golden]) -> None:
    """Write the truth, eager's outputs and the index, beside inputs written before."""
    from attn_export.tensorfile import write_tensors

    for number, golden in enumerate(goldens):
        case_folder = folder / f"test_data_set_{number}"
        write_tensors(case_folder, "output", golden.expected)
        write_tensors(case_folder, "eager", golden.eager)
    first = goldens[0]
    index = {
        "inputs": list(first.case.inputs),
        "outputs": list(first.expected),
        "cases": [_entry(number, golden) for number, golden in enumerate(goldens)],
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def read_golden(folder: Path) -> list[Golden]:
    """Read what `write_golden` wrote, but for the inputs: those are read by the runtimes.

    Raises:
        BundleError: If a file is missing or is not what the index says.
    """
    index = read_index(folder)
    try:
        return [_read_case(folder, index, entry) for entry in index["cases"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"the golden vectors in {folder} cannot be read: {error}") from error


def case_folders(folder: Path) -> tuple[list[str], list[StoredCase]]:
    """The names of the inputs, and every case, from the index alone.

    Raises:
        BundleError: If there is no index, or it was changed.
    """
    index = read_index(folder)
    cases = [
        StoredCase(entry["name"], folder / entry["folder"], dict(entry["sizes"]), entry["kind"])
        for entry in index["cases"]
    ]
    return list(index["inputs"]), cases


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index, and check every value that anything is done with: kits compile it.

    Raises:
        BundleError: If there is none, or it is not what `write_golden` wrote.
    """
    path = folder / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {one_line(error)}") from error
    try:
        _check(index)
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"{path} was changed: {one_line(error)}") from error
    return index


def _check(index: Mapping[str, Any]) -> None:
    for ends in ("inputs", "outputs"):
        if not _is_list(index[ends], _is_text):
            raise ValueError(f"{ends} are no names")
    for entry in index["cases"]:
        for name, is_right in ENTRY.items():
            if not is_right(entry[name]):
                raise ValueError(f"{name} of a case is {entry[name]!r}")
        missing = set(index["outputs"]) - set(entry["allowed"])
        if missing:
            raise ValueError(
                f"{entry['name']} does not say what error of {min(missing)} is allowed"
            )
    for part in ("name", "folder"):
        if len({entry[part] for entry in index["cases"]}) < max(len(index["cases"]), 1):
            raise ValueError(f"there are no cases, or two of one {part}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_reason(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_folder(value: object) -> bool:
    return isinstance(value, str) and FOLDER.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_error(value: object) -> bool:
    """Return whether a value is a number above 0, or NaN: the judge says of those what they are."""
    whole = type(value) is int and value <= LARGEST
    return (whole or isinstance(value, float)) and not value <= 0  # type: ignore[operator]


def _is_allowed(value: object) -> bool:
    if value is None:
        return True
    return _is_table(value, _is_error) and set(value) == {"whole", "row"}  # type: ignore[call-overload]


def _is_list(value: object, is_right: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(is_right, value))


def _is_table(value: object, is_right: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_right, value.values()))


ENTRY: Mapping[str, Callable[[object], bool]] = {
    "name": _is_text,
    "kind": _is_text,
    "about": _is_text,
    "contents": lambda value: _is_list(value, _is_text),
    "ignored_rows": lambda value: _is_list(value, _is_count),
    "sizes": lambda value: _is_table(value, _is_count),
    "folder": _is_folder,
    "allowed": lambda value: _is_table(value, _is_allowed),
    "unusable": lambda value: _is_table(value, _is_reason),
}
"""For each value of a case, whether it is of its type."""


def _entry(number: int, golden: Golden) -> dict[str, Any]:
    allowed = {
        name: None if a is None else {"whole": a.whole, "row": a.row}
        for name, a in golden.allowed.items()
    }
    return {
        "name": golden.case.name,
        "kind": golden.case.kind,
        "about": golden.case.about,
        "contents": list(golden.case.contents),
        "ignored_rows": list(golden.case.ignored_rows),
        "sizes": dict(golden.case.sizes),
        "folder": f"test_data_set_{number}",
        "allowed": allowed,
        "unusable": dict(golden.unusable),
    }


def _read_case(folder: Path, index: dict[str, Any], entry: dict[str, Any]) -> Golden:
    from attn_export.tensorfile import read_tensors

    here = folder / entry["folder"]
    case = Case(
        entry["name"], entry["kind"], entry["sizes"], {}, entry["about"],
        contents=tuple(entry["contents"]), ignored_rows=tuple(entry["ignored_rows"]),
    )  # fmt: skip
    allowed = {
        name: None if a is None else Allowed(a["whole"], a["row"])
        for name, a in entry["allowed"].items()
    }
    expected = read_tensors(here, "output", index["outputs"])
    for name, truth in expected.items():
        if truth.ndim and any(row >= len(truth) for row in case.ignored_rows):
            raise ValueError(f"{case.name} ignores rows that {name} does not have")
    return Golden(
        case,
        expected,
        read_tensors(here, "eager", index["outputs"]),
        allowed,
        entry["unusable"],
    )
