"""Golden vectors on disk: `test_data_set_N/input_I.pb, output_I.pb` and an index.

The layout is ONNX's own for backend tests, so `onnx_test_runner` reads it too. Beside the
truth (`output_I.pb`) lies what the module itself gave (`eager_I.pb`).

numpy comes in with the functions that need it: `verify` starts its runtimes' processes first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import BundleError, one_line
from attn_export.nouns import Allowed, Case, Golden, StoredCase

INDEX = "index.json"


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
    index = _read_index(folder)
    try:
        return [_read_case(folder, index, entry) for entry in index["cases"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"the golden vectors in {folder} cannot be read: {error}") from error


def case_folders(folder: Path) -> tuple[list[str], list[StoredCase]]:
    """The names of the inputs, and every case, from the index alone.

    Raises:
        BundleError: If there is no index.
    """
    index = _read_index(folder)
    try:
        cases = [
            StoredCase(entry["name"], folder / entry["folder"], dict(entry["sizes"]), entry["kind"])
            for entry in index["cases"]
        ]
        return list(index["inputs"]), cases
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"{folder / INDEX} was changed: {one_line(error)}") from error


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{folder / INDEX} cannot be read: {error}") from error
    return index


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
        name: None if a is None else Allowed(_error(a["whole"]), _error(a["row"]))
        for name, a in entry["allowed"].items()
    }
    return Golden(
        case,
        read_tensors(here, "output", index["outputs"]),
        read_tensors(here, "eager", index["outputs"]),
        allowed,
        entry["unusable"],
    )


def _error(value: object) -> float:
    """Return an allowed error; how large one may be is the judge's to say."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"an allowed error is a number above 0; got {value!r}")
    return float(value)
