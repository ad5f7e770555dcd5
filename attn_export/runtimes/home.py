"""Where programs in other languages are built and their packages installed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "ATTN_EXPORT_RUNTIMES"
STAMP = "made-from"
SETUP = "scripts/setup_runtimes"


def home() -> Path:
    """The folder: `$ATTN_EXPORT_RUNTIMES`; in a checkout its `.runtimes`; else the user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / SETUP).is_file():
        return checkout / ".runtimes"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "attn-export" / "runtimes"


def digest(sources: Iterable[Path]) -> str:
    """The SHA-256 of files, names and bytes."""
    import hashlib  # costs every start of a runtime's process, and few need it

    whole = hashlib.sha256()
    for path in sorted(sources):
        whole.update(f"{path.name}\0".encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()


def missing(name: str, program: Path, sources: Iterable[Path]) -> str:
    """Why a program cannot be run, or "": it is not there, or was made from other sources."""
    if not program.is_file():
        return f"it is not built here; run {SETUP} {name}"
    stamp = program.parent / STAMP
    if not stamp.is_file() or stamp.read_text() != digest(sources):
        return f"it was built from other sources; run {SETUP} {name}"
    return ""
