"""Bundles that older versions wrote, of layers with what has left since, too."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from conftest import ROOT, on

from attn_export import verify
from attn_export.errors import AttnExportError

OLD = {path.name[: -len(".tar.xz")]: path for path in (ROOT / "tests" / "old_bundles").iterdir()}
LEFT = {
    "0.2.0-int8-cache-and-weights": "kv_dtype = 'int8' was removed in 0.3.0",
    "0.2.0-int8-activations": "activations = 'dynamic-int8-per-block' was removed in 0.3.0",
}


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(OLD[name]) as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


@pytest.mark.parametrize("name", sorted(OLD))
def test_a_bundle_of_an_older_version_is_still_verified(name: str, tmp_path: Path):
    report = verify(unpacked(name, tmp_path), on("ort-cpu"))
    assert report.passed
    assert len(report.verdicts) > 20


@pytest.mark.parametrize("name", LEFT)
def test_what_has_left_cannot_be_computed_anew_and_one_sentence_says_so(name: str, tmp_path: Path):
    with pytest.raises(AttnExportError, match=LEFT[name]):
        verify(unpacked(name, tmp_path), on("ort-cpu"), recompute=True)
