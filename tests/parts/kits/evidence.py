"""Bundles with changed golden vectors: rows that are not compared, cases that prove nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from hostile.bundles import write_sealed

from attn_export.bundle.manifest import MANIFEST
from attn_export.output_folder import sha256
from attn_export.tensorfile import read_tensor, write_tensor

ONE_ROW = "nan_in_rows"
"""A case of which row 1 of the batch is NaN, and ignored, and the first and the last are not."""


Entry = dict[str, Any]
Change = Callable[[Entry], object]

REASON = 'eager has "NaN" \\ ??/ é */ here'
UNCOMPARED: Mapping[str, tuple[Change, str, str]] = {
    "base": (
        lambda entry: _allow(entry, {"whole": 1e9, "row": 1e9}), "unusable", "would be 1e+09",
    ),
    "changed_query": (
        lambda entry: _allow(entry, None), "failed", "give no tolerance",
    ),
    "changed_past_key": (
        lambda entry: _allow(entry, {"whole": math.inf, "row": math.inf}), "unusable",
        "would be inf",
    ),
    "changed_past_value": (
        lambda entry: _allow(entry, {"whole": 1e-6, "row": 0.2}), "unusable", "would be 0.2",
    ),
    "nan_in_rows_one_query": (
        lambda entry: entry["unusable"].update(output=REASON), "unusable", REASON,
    ),
}  # fmt: skip
"""By case: what is changed in the index, what the verdict is then, and what is said."""


def _ignore(rows: object) -> Change:
    return lambda entry: entry.update(ignored_rows=rows)


def _errors(**error: object) -> Change:
    return lambda entry: entry["allowed"].update(output=error)


NO_SUCH_ROW = _ignore([10**9])

BAD_ENTRIES: Mapping[str, Change] = {
    "a row below 0": _ignore([-1]),
    "a row that is half": _ignore([0.5]),
    "a row that is a text": _ignore(["0"]),
    "rows that are none": _ignore(None),
    "no rows": lambda entry: entry.pop("ignored_rows"),
    "an output without an error": lambda entry: entry["allowed"].pop("output"),
    "an error of 0": _errors(whole=0.0, row=1e-6),
    "an error below 0": _errors(whole=1e-6, row=-1e-6),
    "an error that is a text": _errors(whole="1}; int x = {1", row=1e-6),
    "an error of the whole alone": _errors(whole=1e-6),
    "no error in a table": _errors(),
}
"""Changes after which an index does not say how a case is judged."""


def _allow(entry: Entry, error: Mapping[str, float] | None) -> None:
    entry["allowed"] = dict.fromkeys(entry["allowed"], error)


def without_evidence(bundle: Path, folder: Path) -> Path:
    """Return a bundle with the cases of `UNCOMPARED`, and a name that needs quotes."""

    def change(index: dict[str, Any]) -> None:
        for entry in index["cases"]:
            if entry["name"] in UNCOMPARED:
                UNCOMPARED[entry["name"]][0](entry)

    return rewritten(bundle, folder, change, name=f"of {REASON}")


def change_ignored_row(bundle: Path) -> None:
    """Change the row of the case `ONE_ROW` that is ignored in its first reference."""
    path = folder_of(bundle, ONE_ROW) / "output_0.pb"
    name, array = read_tensor(path)
    array = array.copy()
    array[1] = 7.0
    write_tensor(path, name, array)


def folder_of(bundle: Path, name: str) -> Path:
    """Return the folder of a case of a bundle."""
    index = json.loads((bundle / "golden" / "index.json").read_text())
    (folder,) = (entry["folder"] for entry in index["cases"] if entry["name"] == name)
    return Path(bundle / "golden" / folder)


def change_first(bundle: Path, change: Change) -> None:
    """Change the first case in the index of a bundle."""
    change_index(bundle, lambda index: change(index["cases"][0]))


def change_index(bundle: Path, change: Change) -> None:
    """Change the index of a bundle, as `change` does."""
    path = bundle / "golden" / "index.json"
    index = json.loads(path.read_text())
    change(index)
    # JSON has no Infinity; what is too large for a number is one wherever it is read.
    path.write_text(json.dumps(index).replace("Infinity", "1e999"))


def rewritten(
    bundle: Path,
    folder: Path,
    change: Change = lambda _: None,
    **manifest: object,
) -> Path:
    """Copy a bundle with another index, changed manifest values and right digests.

    The manifest may hold values that `write_manifest` refuses: an attacker does not use it.
    """
    shutil.copytree(bundle, folder)
    change_index(folder, change)
    content = json.loads((folder / MANIFEST).read_text())
    files = {
        path.relative_to(folder).as_posix(): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    write_sealed(folder, {**content, **manifest, "files": files})
    return folder


def lines_of(output: str) -> dict[str, str]:
    """Return the first line of a self-test's output for each case, by the name of the case."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        _, name, *_ = (*line.split(), "", "")
        found.setdefault(name, line)
    return found


# -- the graph for single tokens ----------------------------------------------------------------


DECODE_GRAPH = "model.ort.decode.onnx"


def double_decoded(bundle: Path) -> None:
    """Double what the graph for single tokens gives, and no other."""
    path = bundle / DECODE_GRAPH
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        node.output[:] = ["once" if name == "output" else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Add", ["once", "once"], ["output"]))
    onnx.save(model, path)


def check_decode_graph(lines: Sequence[str]) -> None:
    """Check the lines of a self-test after `double_decoded`: what is token by token failed."""
    single = [line for line in lines if "token by token" in line or "replay of" in line]
    assert single
    assert all(line.startswith("FAIL") for line in single), single
    several = [line for line in lines if "base" in line]
    assert several
    assert all(line.startswith("ok") for line in several), several
