"""Installing what `c` and `cpp` are built from: a Debian package, taken apart, from an archive."""

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

from attn_export.runtimes import install_ort_headers as ort_headers
from attn_export.runtimes import install_ort_native as ort_native
from attn_export.runtimes.install_folder import InstallError

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
    index = folder / "dists" / ort_headers.RELEASE / "main" / "binary-amd64" / "Packages.xz"
    index.parent.mkdir(parents=True)
    (folder / "dev.deb").write_bytes(package())
    digest = hashlib.sha256(package()).hexdigest()
    text = "Package: other\nFilename: o.deb\n\n" + (
        f"Package: {ort_headers.PACKAGE}\nDescription: headers\n long: text\n"
        f"Filename: dev.deb\nSHA256: {digest}\n\nPackage: last\n\n"
    )
    index.write_bytes(lzma.compress(text.encode()))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(ort_headers, "ARCHIVE", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(ort_headers, "_archives_of_this_machine", lambda: iter(()))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield folder
        server.shutdown()


def test_the_headers_of_the_package_are_put_into_the_folder(archive: Path, tmp_path: Path):
    said: list[str] = []
    ort_headers.bring_headers(tmp_path / "ort" / "include", said.append)
    found = {path.name: path.read_bytes() for path in (tmp_path / "ort" / "include").iterdir()}
    assert found == HEADERS
    assert said == ["downloading libonnxruntime-dev"]


def test_a_package_that_is_not_the_one_of_the_index_is_refused(archive: Path, tmp_path: Path):
    (archive / "dev.deb").write_bytes(package()[:-2] + b"xx")
    with pytest.raises(InstallError, match=r"dev.deb has not the digest .* put those of a release"):
        ort_headers.bring_headers(tmp_path / "ort" / "include", lambda _: None)
    assert not (tmp_path / "ort").exists()


def test_an_archive_that_cannot_be_reached_is_one_line(archive: Path, tmp_path: Path):
    (archive / "dev.deb").unlink()
    with pytest.raises(InstallError, match="404") as refused:
        ort_headers.bring_headers(tmp_path / "ort" / "include", lambda _: None)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ort").exists()


def test_a_missing_compiler_is_said_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallError, match=r"there is no C compiler .*apt-get install g\+\+ cmake"):
        ort_native.install(tmp_path / "home", lambda _: None)


def test_what_the_compiler_refuses_is_one_line(tmp_path: Path):
    headers = tmp_path / "home" / "onnxruntime" / "include"
    headers.mkdir(parents=True)
    for name in HEADERS:
        (headers / name).write_text("#error these are no headers\n")
    with pytest.raises(InstallError, match=r"cmake failed: .*these are no headers") as refused:
        ort_native.install(tmp_path / "home", lambda _: None)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "home" / "c").exists()
