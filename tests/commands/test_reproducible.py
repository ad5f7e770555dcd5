"""Bundles of one spec: the same bytes whatever the seed of hashes and the number of threads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import command, small_spec
from shared import extended

from attn_export.spec import AttentionSpec
from attn_export.truth.oracle import ONE_THREAD_BELOW

OF_THE_MACHINE = {"report.json", "report.html", "manifest.json"}
"""Files that state times and versions, or digests of such files."""

SPECS = {
    "grouped": small_spec(),
    "in place, float16": small_spec(cache="in-place", dtype="float16"),
    "several threads": AttentionSpec.from_dict({"embed_dim": 1024, "num_heads": 8, "bias": "none"}),
}


def bundle_of(spec: AttentionSpec, folder: Path, number: int) -> dict[str, bytes]:
    """Build in a process of its own, and return the files that have to be the same."""
    folder.mkdir()
    (folder / "spec.toml").write_text(spec.to_toml())
    done = subprocess.run(
        command(["build", "spec.toml", "--runtime", "ort-cpu", "--output", "bundle"]),
        cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": str(number + 1)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bundle = folder / "bundle"
    return {
        path.relative_to(bundle).as_posix(): path.read_bytes()
        for path in sorted(bundle.rglob("*"))
        if path.is_file() and path.name not in OF_THE_MACHINE
    }


@pytest.mark.parametrize("name", extended(SPECS, lambda name: name == "grouped"))
@pytest.mark.extended
def test_two_builds_give_the_same_bytes_in_every_file_but_what_states_the_machine(name, tmp_path):
    one, other = (bundle_of(SPECS[name], tmp_path / f"folder_{n}", n) for n in range(2))
    assert list(one) == list(other)
    assert [file for file in one if one[file] != other[file]] == []
    assert {"model.onnx", "weights.safetensors", "golden/index.json"} <= one.keys()


def test_one_of_the_specs_is_computed_by_several_threads():
    sizes = [4 * spec.embed_dim**2 for spec in SPECS.values()]
    assert max(sizes) > ONE_THREAD_BELOW
