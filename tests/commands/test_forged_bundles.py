"""Bundles whose manifest or spec was edited with new digests, so that `verify` would try less."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shared

from attn_export import verify
from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.errors import BundleError

Content = dict[str, Any]
STANDARD, PORTABLE = "model.onnx", "model.portable.onnx"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a bundle of links to the files of another: one is replaced, and none changed."""
    source = shared.bundle_of("append")
    return Path(shutil.copytree(source, tmp_path / "copy", copy_function=os.link))


def forge(folder: Path, change: Callable[[Path, Content], object]) -> None:
    content = manifest_content(folder)
    (folder / "manifest.json").unlink()
    change(folder, content)
    write_manifest(folder, content)


def entry(name: str, **fields: object) -> Callable[[Path, Content], object]:
    return lambda _, content: content["graphs"][name].update(fields)


def move(folder: Path, content: Content, name: str, new: str, **fields: object) -> None:
    (folder / name).rename(folder / new)
    content["graphs"][new] = content["graphs"].pop(name) | fields


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace(old, new))


FORGED: dict[str, tuple[Callable[[Path, Content], object], str]] = {
    "a graph that no entry lists": (
        lambda _, content: content["graphs"].pop(STANDARD),
        "model.onnx is a graph of which no manifest.json says anything",
    ),
    "a graph that was never listed": (
        lambda folder, _: shutil.copy(folder / STANDARD, folder / "Model.ONNX"),
        "Model.ONNX is a graph of which no manifest.json says anything",
    ),
    "a feature that no runtime has": (
        entry(STANDARD, features=["opset 27"]),
        "model.onnx gives no reason for this: ort-cpu .* does not do opset 27",
    ),
    "a dialect that a runtime is not for": (
        entry(PORTABLE, dialect="ort"),
        "model.portable.onnx gives no reason for this: it is not for the ort dialect",
    ),
    "a graph in float32 that is called one for CUDA": (
        lambda folder, content: move(folder, content, STANDARD, "model.cuda.onnx", dialect="cuda"),
        "model.cuda.onnx is said to be for CUDA, and it does not compute in half precision",
    ),
    "an axis that is not fixed": (
        entry(STANDARD, fixed={"query_len": 1}),
        "query_len is said to be 1 in model.onnx, where it is query_len",
    ),
    "axes in another order": (
        entry(STANDARD, layouts={"past_key": [0, 1, 3, 2]}),
        "past_key is .* in model.onnx, not ",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_claim_that_the_file_does_not_show_is_damage(name: str, copy: Path):
    change, message = FORGED[name]
    forge(copy, change)
    with pytest.raises(BundleError, match=message):
        verify(copy, runtimes=["ort-cpu", "onnx-reference"])


def test_a_spec_that_hides_quantised_weights_is_damage(tmp_path: Path):
    source = shared.few_bits_bundle()
    folder = Path(shutil.copytree(source, tmp_path / "copy", copy_function=os.link))

    def hide(folder: Path, _: Content) -> None:
        replace_text(folder / "spec.toml", "int4", "none")
        (folder / "golden" / "quality.json").unlink()

    forge(folder, hide)
    with pytest.raises(BundleError, match=r"quantises .*, and the spec says that nothing does"):
        verify(folder, runtimes=["ort-cpu"])


def test_a_bundle_of_several_without_its_manifest_is_damage(copy: Path):
    other = Path(shutil.copytree(copy, copy.with_name("other")))
    (other / "manifest.json").rename(other / "manifest.txt")
    with pytest.raises(BundleError, match=r"other/model\.onnx is a graph of which no manifest"):
        verify(copy.parent)


def test_a_budget_allows_a_float_graph_no_more_than_its_types_do(copy: Path):
    def loosen(folder: Path, content: Content) -> None:
        for name in ("model.ort.onnx", "model.ort.decode.onnx", PORTABLE):
            content["graphs"].pop(name, None)
            (folder / name).unlink(missing_ok=True)
        (folder / "spec.toml").unlink()
        path = folder / "golden" / "index.json"
        index = json.loads(path.read_text())
        for case in index["cases"]:
            case["allowed"] = {n: {"whole": math.inf, "row": math.inf} for n in case["allowed"]}
        path.unlink()
        path.write_text(json.dumps(index | {"budgets": ["sqnr>=1"]}))
        for file in folder.glob("golden/*/output_0.pb"):
            data = bytearray(file.read_bytes())
            data[-1] = data[-1] ^ 1  # the exponent of the last element
            file.unlink()
            file.write_bytes(data)

    forge(copy, loosen)
    assert verify(copy, runtimes=["ort-cpu"]).exit_code == 6
