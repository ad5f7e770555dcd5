"""Download and extraction of Debian packages, and the tools that `c` and `cpp` require."""

from __future__ import annotations

import hashlib
import http.server
import io
import lzma
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from attn_export.runtimes import debian_packages
from attn_export.runtimes import native as ort_native
from attn_export.runtimes.install_folder import VARIABLE, InstallError

HEADERS = {"onnxruntime_c_api.h": b"/* c */\n", "onnxruntime_cxx_api.h": b"// c++ \n" * 9}


def package() -> bytes:
    """Return a Debian package with headers in two folders, and other files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in [*HEADERS.items(), ("libonnxruntime.so", b"elf")]:
            entry = tarfile.TarInfo(f"./usr/include/onnxruntime/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    members = (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data))
    package = b"!<arch>\n"
    for name, held in members:
        content = held if isinstance(held, bytes) else held.getvalue()
        package += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        package += content + b"\n" * (len(content) % 2)
    return package


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of an archive, which is the only one in use."""
    folder = tmp_path / "archive"
    index = folder / "dists" / "trixie" / "main" / "binary-amd64" / "Packages.xz"
    index.parent.mkdir(parents=True)
    (folder / "dev.deb").write_bytes(package())
    digest = hashlib.sha256(package()).hexdigest()
    text = "Package: other\nFilename: o.deb\n\n" + (
        f"Package: {debian_packages.HEADERS}\nDescription: headers\n long: text\n"
        f"Filename: dev.deb\nSHA256: {digest}\n\nPackage: last\n\n"
    )
    index.write_bytes(lzma.compress(text.encode()))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(debian_packages, "_archives", lambda: (address,))
        monkeypatch.setattr(debian_packages, "SNAPSHOT", f"{address}/snapshot")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield folder
        server.shutdown()


def test_the_headers_of_the_package_are_put_into_the_folder(archive: Path, tmp_path: Path):
    said: list[str] = []
    debian_packages.download_headers(tmp_path / "ort" / "include", said.append)
    found = {path.name: path.read_bytes() for path in (tmp_path / "ort" / "include").iterdir()}
    assert found == HEADERS
    assert said == ["downloading libonnxruntime-dev"]


def test_a_package_that_is_not_the_one_of_the_index_is_refused(archive: Path, tmp_path: Path):
    (archive / "dev.deb").write_bytes(package()[:-2] + b"xx")
    with pytest.raises(
        InstallError, match=r"dev.deb has not the digest .* put ONNX Runtime's headers of a release"
    ):
        debian_packages.download_headers(tmp_path / "ort" / "include", lambda _: None)
    assert not (tmp_path / "ort").exists()


def test_an_archive_that_cannot_be_reached_is_one_line(archive: Path, tmp_path: Path):
    (archive / "dev.deb").unlink()
    with pytest.raises(InstallError, match="404") as refused:
        debian_packages.download_headers(tmp_path / "ort" / "include", lambda _: None)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ort").exists()


def test_a_pinned_package_is_taken_where_the_archive_has_it(archive: Path):
    said: list[str] = []
    digest = hashlib.sha256(package()).hexdigest()
    found = debian_packages.fetch_pinned("dev.deb", digest, "trixie", said.append)
    assert found == package()
    assert not said


def test_a_pinned_package_of_another_digest_is_refused(archive: Path):
    with pytest.raises(InstallError, match=r"dev.deb cannot be .* it has not the digest 00"):
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


def test_a_missing_compiler_is_said_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "home"))
    with pytest.raises(InstallError, match=r"there is no C compiler .*apt-get install g\+\+ cmake"):
        ort_native.install(lambda _: None)


def test_an_error_of_the_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "home"))
    headers = tmp_path / "home" / "onnxruntime" / "include"
    headers.mkdir(parents=True)
    for name in HEADERS:
        (headers / name).write_text("#error these are no headers\n")
    with pytest.raises(InstallError, match=r"cmake failed: .*these are no headers") as refused:
        ort_native.install(lambda _: None)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "home" / "c").exists()
