"""Location of built programs in other languages and of their packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "ATTN_EXPORT_RUNTIMES"
STAMP = "made-from"
SETUP = "scripts/setup_runtimes"

CUDA_STAND_IN = "cuda-dry-run"
"""The folder of the libraries for dry runs of CUDA, and the name by which they are set up."""


class InstallError(Exception):
    """Failed installation; the message is one line with the remedy."""


def home() -> Path:
    """Return the folder: `$ATTN_EXPORT_RUNTIMES`; a checkout's `.runtimes`; the user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / SETUP).is_file():
        return checkout / ".runtimes"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "attn-export" / "runtimes"


def setup_command(name: str) -> str:
    """Return the command that builds a runtime's program, in a checkout or an installed package."""
    checkout = Path(__file__).resolve().parents[2]
    in_checkout = (checkout / SETUP).is_file() and Path(sys.prefix).parent == checkout
    return f"{SETUP} {name}" if in_checkout else f"python -m attn_export.runtimes.install {name}"


def digest(sources: Iterable[Path]) -> str:
    """Return the SHA-256 of files, names and bytes."""
    import hashlib  # costs every start of a runtime's process, and few need it

    whole = hashlib.sha256()
    for path in sorted(sources):
        whole.update(f"{path.name}\0".encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()


def missing(name: str, program: Path, sources: Iterable[Path]) -> str:
    """Return the reason that a program cannot be run, or "": it is missing or outdated.

    Args:
        name: The runtime.
        program: The path of the program.
        sources: The files that it is built from.
    """
    if not program.is_file():
        return f"it is not built here; run {setup_command(name)}"
    stamp = program.parent / STAMP
    if not stamp.is_file() or stamp.read_text() != digest(sources):
        return f"it was built from other sources; run {setup_command(name)}"
    return ""
