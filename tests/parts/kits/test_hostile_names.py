"""Kits of a bundle whose names are code in some language: they stay names."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from evidence import rewritten
from javascript_kits import kit_of as script_kit
from native_kits import compile_kit, run
from shared import bundle_of, once

from attn_export.bundle.manifest import manifest_content
from attn_export.errors import BundleError
from attn_export.parts.kits.kit import write_kit

PIECES = (
    "'\"\\", '"""; import os; os.mkdir("ran")  #', "*/ ran; /*", "// ran", "{{7*7}}",
    "<script>ran</script>", "$(touch ran)", "`touch ran`", "größe", "..", "%s%n", "|",
    "';process.exit(7);'", "??/",
)  # fmt: skip
"""Texts that manifests may hold; control characters are refused when they are read."""

AXIS = " ".join(PIECES)
CASE = AXIS + "n" * 200
NAME = AXIS + "n" * 1500
FILE = "{{7+7}} größe .. %s%n;process.exit(7); #) ran(.onnx"


def hostile_bundle() -> Path:
    """Return a bundle of three cases, in which texts that may be any text are code."""

    def rename(index: dict) -> None:
        del index["cases"][3:]
        for number, entry in enumerate(index["cases"]):
            entry["name"] = f"{CASE}{number}"
            entry["about"] = NAME

    def make(folder: Path) -> None:
        bundle = bundle_of("append")
        text = json.dumps(manifest_content(bundle)).replace('"batch"', json.dumps(AXIS))
        manifest = json.loads(text)
        graphs = {FILE: manifest["graphs"]["model.onnx"]}
        renamed = {"inputs": manifest["inputs"], "outputs": manifest["outputs"]}
        versions = dict.fromkeys(manifest["versions"], NAME)
        first = folder.with_name("renamed")
        rewritten(bundle, first, rename)
        (first / "model.onnx").rename(first / FILE)
        rewritten(first, folder, name=NAME, graphs=graphs, versions=versions, **renamed)

    return once("hostile/names", make)


def ends_well(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """Assert that it passed, printed no control characters, and ran no name."""
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    assert all(line.isprintable() for line in done.stdout.splitlines())
    assert not list(folder.rglob("ran"))


@pytest.mark.every(3)
def test_the_c_kit_is_built_and_passes(need, tmp_path: Path):
    need("c")
    kit = write_kit("c", hostile_bundle(), tmp_path / "kit")
    compile_kit(kit, "Debug")
    ends_well(run(kit, "self_test"), tmp_path)


def test_the_python_kit_passes_and_its_settings_are_values(tmp_path: Path):
    kit = write_kit("python", hostile_bundle(), tmp_path / "kit")
    done = subprocess.run(
        [sys.executable, "-m", "attn_kit.self_test"], cwd=kit, capture_output=True, text=True
    )
    ends_well(done, tmp_path)
    settings = ast.parse((kit / "attn_kit" / "settings.py").read_text(encoding="ascii"))
    values = {
        node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]
        for node in settings.body if isinstance(node, ast.Assign)
    }  # fmt: skip
    assert (values["NAME"], values["GRAPH"]) == (NAME, FILE)
    assert values["AXES"]["query"][0] == AXIS
    assert tomllib.loads((kit / "pyproject.toml").read_text())["project"]["name"] == "attn-kit"


def test_the_node_kit_passes(need, tmp_path: Path):
    need("node")
    kit = script_kit("node", hostile_bundle(), tmp_path, "node")
    done = subprocess.run(
        ["node", "src/self_test.mjs"], cwd=kit, capture_output=True, text=True, check=False
    )
    ends_well(done, tmp_path)
    assert json.loads((kit / "kit.json").read_text())["graph"] == FILE


@pytest.mark.parametrize("kind", ["c", "cpp", "node", "web", "python"])
def test_no_name_is_a_part_of_the_readme(kind: str, tmp_path: Path):
    bundle = hostile_bundle()
    if kind == "web":
        graphs = manifest_content(bundle)["graphs"]
        graphs[FILE]["dialect"] = "portable"
        bundle = rewritten(bundle, tmp_path / "portable", graphs=graphs)
    kit = write_kit(kind, bundle, tmp_path / "kit")
    plain = write_kit(kind, bundle_of("append"), tmp_path / "plain")
    hostile, wanted = ((folder / "README.md").read_text() for folder in (kit, plain))
    assert hostile.count("\n") == wanted.count("\n")
    assert hostile.count("```") == wanted.count("```")
    assert "\x1b" not in hostile
    outside = "".join(hostile.split("```")[::2])
    assert "<script>" not in outside
    assert "`touch" not in outside


Ends = Mapping[str, object]


def _input(name: str, shape: object) -> Ends:
    return {"inputs": {name: {"dtype": "float32", "shape": shape}}}


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (_input("query", ["batch"] * 9), r"manifest\.json was changed: .*shape"),
        (_input("query", [2**62, 16]), r"manifest\.json was changed: .*shape"),
        (_input("", ["batch"]), r"manifest\.json was changed: .*inputs"),
        (_input("q\x1b[31m", ["batch"]), r"manifest\.json was changed: .*inputs"),
        (_input("q" * 256, ["batch"]), r"manifest\.json was changed: .*inputs"),
        ({"inputs": {}}, r"manifest\.json was changed: .*puts"),
    ],
)
def test_a_bundle_that_no_kit_can_hold_is_refused_in_one_line(
    manifest: dict[str, object], says: str, tmp_path: Path
):
    bundle = rewritten(bundle_of("append"), tmp_path / "bundle", **manifest)
    with pytest.raises(BundleError, match=says) as refused:
        write_kit("c", bundle, tmp_path / "kit")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) <= 300


@pytest.mark.parametrize(
    "bound", [{"present_key": "past_value"}, {"output": "query"}, {"present_key": "past_key "}]
)
def test_a_cache_that_is_bound_to_another_input_is_refused(bound: dict[str, str], tmp_path: Path):
    graphs = manifest_content(bundle_of("append"))["graphs"]
    graphs["model.onnx"]["bound"] = bound
    bundle = rewritten(bundle_of("append"), tmp_path / "bundle", graphs=graphs)
    with pytest.raises(BundleError, match="binds"):
        write_kit("c", bundle, tmp_path / "kit", dialect="standard")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"caches": {"present_key": "attn_mask"}}, "attn_mask is not the cache"),
        ({"caches": {"present_key": "past_key", "present_value": "past_key"}}, "is not the cache"),
        ({"caches": {"gone": "past_key"}}, "is not the cache"),
        ({"caches": {"present_key": "gone\x1b[31m"}}, r"manifest\.json was changed: .*caches"),
        ({"roles": {"batch": "query_len"}}, "not those of one axis each"),
        ({"roles": {"gone": "batch"}}, "not those of one axis each"),
        ({"roles": {"batch": 3}}, r"manifest\.json was changed: .*roles"),
    ],
)  # fmt: skip
def test_roles_and_caches_are_checked_when_they_are_read(
    entry: dict[str, object], says: str, tmp_path: Path
):
    bundle = rewritten(bundle_of("append"), tmp_path / "bundle", **entry)
    with pytest.raises(BundleError, match=says):
        write_kit("c", bundle, tmp_path / "kit")


@pytest.mark.parametrize("name", ["query", "past_length ", "output"])
def test_an_input_of_another_type_must_be_one_of_integers(name: str, tmp_path: Path):
    graphs = manifest_content(bundle_of("append"))["graphs"]
    graphs["model.onnx"]["dtypes"] = {name: "int32"}
    bundle = rewritten(bundle_of("append"), tmp_path / "bundle", graphs=graphs)
    with pytest.raises(BundleError, match="as int32, which is not an input of int64"):
        write_kit("c", bundle, tmp_path / "kit", dialect="standard")
