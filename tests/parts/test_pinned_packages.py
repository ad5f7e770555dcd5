"""Debian packages with known digests: download, and extraction of their files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian_archive import package, served

from attn_export.errors import RuntimeFailure
from attn_export.parts import debian_packages


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of an archive, which is the only one in use."""
    with served(tmp_path / "archive") as address:
        monkeypatch.setattr(debian_packages, "archives", lambda: (address,))
        monkeypatch.setattr(debian_packages, "SNAPSHOT", f"{address}/snapshot")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield tmp_path / "archive"


def test_a_pinned_package_is_taken_where_the_archive_has_it(archive: Path):
    said: list[str] = []
    digest = hashlib.sha256(package()).hexdigest()
    found = debian_packages.fetch_pinned("dev.deb", digest, "trixie", said.append)
    assert found == package()
    assert not said


def test_a_pinned_package_of_another_digest_is_refused(archive: Path):
    with pytest.raises(RuntimeFailure, match=r"dev.deb cannot be .* it has not the digest 00"):
        debian_packages.fetch_pinned("dev.deb", "00", "trixie", lambda _: None)


def test_a_pinned_package_that_was_replaced_is_that_of_the_release(archive: Path):
    said: list[str] = []
    name = f"{debian_packages.HEADERS}_1.0_amd64.deb"
    found = debian_packages.fetch_pinned(f"pool/{name}", "00", "trixie", said.append)
    assert found == package()
    assert said == [f"Debian has no {name} any more; taking the libonnxruntime-dev of trixie"]


def test_a_package_is_unpacked_below_the_folder_without_absolute_links(tmp_path: Path):
    debian_packages.unpack(package(), tmp_path, lambda path: path.endswith("c_api.h"))
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [Path("usr/include/onnxruntime/onnxruntime_c_api.h")]
