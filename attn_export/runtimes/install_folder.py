"""Location of installed runtimes: programs in other languages, packages, and other releases."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "ATTN_EXPORT_RUNTIMES"
STAMP = "made-from"
"""The file in the folder of a runtime that identifies the sources of the installation."""

SETUP = "scripts/setup_runtimes"

CUDA_STAND_IN = "cuda-dry-run"
"""The folder of the libraries for dry runs of CUDA, and the name for installing them."""


class InstallError(Exception):
    """Failed installation. The message is one line with the remedy."""


def home() -> Path:
    """Return the folder of all runtimes.

    It is `$ATTN_EXPORT_RUNTIMES` if set, `.runtimes` in a checkout, or else a folder in the user's
    cache.
    """
    from_environment = os.environ.get(VARIABLE)
    if from_environment:
        return Path(from_environment)
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / SETUP).is_file():
        return checkout / ".runtimes"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "attn-export" / "runtimes"


def setup_command(name: str) -> str:
    """Return the command with which the user installs a runtime."""
    checkout = Path(__file__).resolve().parents[2]
    in_checkout = (checkout / SETUP).is_file() and Path(sys.prefix).parent == checkout
    return f"{SETUP} {name}" if in_checkout else f"python -m attn_export.runtimes.install {name}"


def digest(sources: Iterable[Path]) -> str:
    """Return the SHA-256 of the names and contents of files."""
    import hashlib  # not above: it would delay the start of every runtime's process

    sha256 = hashlib.sha256()
    for path in sorted(sources):
        sha256.update(f"{path.name}\0".encode())
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def missing(name: str, program: Path, sources: Iterable[Path]) -> str:
    """Return the reason that a program is missing or outdated, or "".

    Args:
        name: The name of the runtime.
        program: The path of the program.
        sources: The files that it is built from.
    """
    if not program.is_file():
        return f"it is not built here; run {setup_command(name)}"
    stamp = program.parent / STAMP
    if not stamp.is_file() or stamp.read_text() != digest(sources):
        return f"it was built from other sources; run {setup_command(name)}"
    return ""
