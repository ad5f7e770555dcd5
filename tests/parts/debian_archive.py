"""An archive of Debian packages on this machine, with one package."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import lzma
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attn_export.parts import debian_packages

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


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Make an archive in a folder, and yield its URL."""
    index = folder / "dists" / "trixie" / "main" / "binary-amd64" / "Packages.xz"
    index.parent.mkdir(parents=True)
    (folder / "dev.deb").write_bytes(package())
    digest = hashlib.sha256(package()).hexdigest()
    text = "Package: other\nFilename: o.deb\n\n" + (
        f"Package: {debian_packages.HEADERS}\nDescription: headers\n long: text\n"
        f"Filename: dev.deb\nSHA256: {digest}\n\nPackage: last\n\n"
    )
    index.write_bytes(lzma.compress(text.encode()))
    handler = partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, *_: object) -> None:
        """Drop a line of the log."""
