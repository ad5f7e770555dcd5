"""The kits in Python and JavaScript, fed with broken bundles: one line, and no traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from evidence import change_index
from javascript_kits import kit_of as script_kit
from native_corpus import FILES, TENSORS, Broken, broken_bundles, broken_shapes
from test_native_kits import cases_of, small_bundle

from attn_export.parts.kits.kit import write_kit

SECONDS = 60
COMMANDS = {
    "python": [sys.executable, "-m", "attn_kit.self_test"], "node": ["node", "src/self_test.mjs"],
}  # fmt: skip
ENTRY = ("name", "folder", "allowed", "unusable", "ignored_rows")
WRONG = (None, "../..", [[]], {"output": 1}, {})


def _entry(field: str, value: object) -> Callable[[Path], None]:
    return lambda bundle: change_index(
        bundle, lambda index: index["cases"][0].update({field: value})
    )


def faults(bundle: Path) -> list[Broken]:
    """Return a third of the corpus's faults, and each field of the index with another type."""
    (fed, *_) = cases_of(bundle)
    files = [*broken_bundles(bundle, fed), *broken_shapes(bundle, fed)]
    found = [one for one in files[::3] if 1 not in one.codes]
    for field, value in zip(ENTRY, WRONG, strict=True):
        found.append(Broken(f"{field} is {value!r}", _entry(field, value)))
    for text in (
        "",
        "[",
        "null",
        "[" * 100_000,
        '{"cases": []}',
        '{"cases": {}}',
        '{"cases": [null]}',
        "\x1b[31m",
    ):
        found.append(
            Broken(
                f"an index of {text[:20]!r}",
                lambda folder, text=text: (folder / "golden" / "index.json").write_text(text),
            )
        )
    return found


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.every(3)
def test_no_fault_is_a_traceback(kind: str, need, tmp_path: Path):
    if kind == "node":
        need("node")
    bundle = small_bundle("append")
    kit = (
        script_kit("node", bundle, tmp_path, "node") if kind == "node"
        else write_kit("python", bundle, tmp_path / "kit", dialect="standard")
    )  # fmt: skip
    graph = json.loads((kit / "kit.json").read_text())["graph"] if kind == "node" else "model.onnx"
    found = {}
    for broken in faults(bundle):
        shutil.rmtree(kit / "bundle")
        shutil.copytree(bundle, kit / "bundle")
        broken.change(kit / "bundle")
        if broken.name.startswith("model.onnx") and graph != "model.onnx":
            continue
        done = subprocess.run(
            COMMANDS[kind], cwd=kit, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        lines = done.stderr.splitlines()
        if done.returncode != 2 or len(lines) != 1 or not lines[0].isprintable():
            found[broken.name] = (done.returncode, done.stderr[-600:], done.stdout[-200:])
        elif len(lines[0]) > 320:
            found[broken.name] = ("too long", lines[0])
    assert found == {}


def test_the_corpus_has_every_kind_of_fault():
    assert len(TENSORS) > 30
    assert {"a pipe", "zeros without end", "a file of a terabyte", "a folder"} <= {*FILES}
