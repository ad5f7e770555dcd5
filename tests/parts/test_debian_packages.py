"""Download of Debian packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from debian_archive import HEADERS, package, served

from attn_export.errors import RuntimeFailure
from attn_export.parts import debian_packages


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of an archive, which is the only one in use."""
    with served(tmp_path / "archive") as address:
        monkeypatch.setattr(debian_packages, "archives", lambda: (address,))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield tmp_path / "archive"


def test_the_headers_of_the_package_are_put_into_the_folder(archive: Path, tmp_path: Path):
    said: list[str] = []
    debian_packages.download_headers(tmp_path / "ort" / "include", said.append)
    found = {path.name: path.read_bytes() for path in (tmp_path / "ort" / "include").iterdir()}
    assert found == HEADERS
    assert said == ["downloading libonnxruntime-dev"]


def test_a_package_that_is_not_the_one_of_the_index_is_refused(archive: Path, tmp_path: Path):
    (archive / "dev.deb").write_bytes(package()[:-2] + b"xx")
    with pytest.raises(
        RuntimeFailure,
        match=r"dev.deb has not the digest .* put ONNX Runtime's headers of a release",
    ):
        debian_packages.download_headers(tmp_path / "ort" / "include", lambda _: None)
    assert not (tmp_path / "ort").exists()


def test_an_archive_that_cannot_be_reached_is_one_line(archive: Path, tmp_path: Path):
    (archive / "dev.deb").unlink()
    with pytest.raises(RuntimeFailure, match="404") as refused:
        debian_packages.download_headers(tmp_path / "ort" / "include", lambda _: None)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ort").exists()
