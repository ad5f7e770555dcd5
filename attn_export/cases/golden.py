"""Golden vectors on disk: `test_data_set_N/input_I.pb, output_I.pb` and an index.

The layout is ONNX's own for backend tests, so `onnx_test_runner` reads it too. Beside the
truth (`output_I.pb`) lies what the module itself gave (`eager_I.pb`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import BundleError
from attn_export.nouns import Allowed, Case, Golden

if TYPE_CHECKING:
    import numpy as np

INDEX = "index.json"


def write_inputs(folder: Path, number: int, case: Case) -> Path:
    """Write the inputs of a case, and return its folder."""
    case_folder = folder / f"test_data_set_{number}"
    case_folder.mkdir(parents=True)
    write_tensors(case_folder, "input", case.inputs)
    return case_folder


def write_golden(folder: Path, goldens: Sequence[Golden]) -> None:
    """Write the truth, eager's outputs and the index, beside inputs written before."""
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(f"the golden vectors in {folder} cannot be read: {error}") from error


def case_folders(folder: Path) -> tuple[list[str], list[tuple[str, Path]]]:
    """The names of the inputs, and the name and folder of every case, from the index alone.

    Raises:
        BundleError: If there is no index.
    """
    index = _read_index(folder)
    return index["inputs"], [(entry["name"], folder / entry["folder"]) for entry in index["cases"]]


def write_tensors(folder: Path, stem: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as `STEM_0.pb`, `STEM_1.pb` …, in their order."""
    from attn_export.cases.tensorfile import write_tensor

    for number, (name, array) in enumerate(arrays.items()):
        write_tensor(folder / f"{stem}_{number}.pb", name, array)


def read_tensors(folder: Path, stem: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read `STEM_0.pb`, `STEM_1.pb` … under these names.

    Raises:
        ValueError: If a file is no tensor, or a tensor of another name.
    """
    from attn_export.cases.tensorfile import read_tensor

    arrays = {}
    for number, name in enumerate(names):
        path = folder / f"{stem}_{number}.pb"
        found, arrays[name] = read_tensor(path)
        if found != name:
            raise ValueError(f"{path.name} holds {found!r}, expected {name!r}")
    return arrays


def read_outputs(folder: Path, count: int) -> dict[str, np.ndarray]:
    """Read `output_0.pb` … of a runtime, under the names that they carry."""
    from attn_export.cases.tensorfile import read_tensor

    return dict(read_tensor(folder / f"output_{number}.pb") for number in range(count))


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
        "sizes": dict(golden.case.sizes),
        "folder": f"test_data_set_{number}",
        "allowed": allowed,
        "unusable": dict(golden.unusable),
    }


def _read_case(folder: Path, index: dict[str, Any], entry: dict[str, Any]) -> Golden:
    here = folder / entry["folder"]
    case = Case(entry["name"], entry["kind"], entry["sizes"], {}, entry["about"])
    allowed = {
        name: None if a is None else Allowed(a["whole"], a["row"])
        for name, a in entry["allowed"].items()
    }
    return Golden(
        case,
        read_tensors(here, "output", index["outputs"]),
        read_tensors(here, "eager", index["outputs"]),
        allowed,
        entry["unusable"],
    )
