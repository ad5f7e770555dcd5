"""Folders of what parts install, and the commands that fill them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from attn_export.errors import RuntimeFailure
from attn_export.output_folder import take_place
from attn_export.runtimes.install import SYSTEM_PACKAGES, pip_command
from attn_export.temp_folders import folder_beside

VARIABLE = "ATTN_EXPORT_RUNTIMES"
STAMP = "made-from"
"""The file in the folder of a runtime that identifies the sources of the installation."""

SETUP = "scripts/setup_runtimes"

ROOT = Path(__file__).resolve().parents[2]
"""The folder with the package `attn_export`: a checkout, or a folder of installed packages."""

ORT = "onnxruntime"
"""The folder of ONNX Runtime's headers and library, for programs in C and C++."""
HEADER = Path("include", "onnxruntime_cxx_api.h")
LIBRARY = "libonnxruntime.so"
LINKS = (LIBRARY, f"{LIBRARY}.1")
"""The names of the library for the linker, and for the loader when a program starts."""

Say = Callable[[str], None]
"""A receiver of progress messages."""


def home() -> Path:
    """Return the folder of all runtimes.

    It is `$ATTN_EXPORT_RUNTIMES` if set, `.runtimes` in a checkout, or else a folder in the user's
    cache.
    """
    from_environment = os.environ.get(VARIABLE)
    if from_environment:
        return Path(from_environment)
    if (ROOT / SETUP).is_file():
        return ROOT / ".runtimes"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "attn-export" / "runtimes"


def setup_command(name: str) -> str:
    """Return the command with which the user installs a runtime."""
    in_checkout = (ROOT / SETUP).is_file() and Path(sys.prefix).parent == ROOT
    return f"{SETUP} {name}" if in_checkout else f"python -m attn_export.runtimes.install {name}"


def digest(sources: Iterable[Path]) -> str:
    """Return the SHA-256 of the names and contents of files."""
    sha256 = hashlib.sha256()
    for path in sorted(sources):
        sha256.update(f"{path.name}\0".encode())
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def missing(name: str, program: Path, sources: Iterable[Path]) -> str:
    """Return the reason that a program is missing or outdated, or ""."""
    if not program.is_file():
        return f"it is not built here; run {setup_command(name)}"
    if stamp_of(program.parent) != digest(sources):
        return f"it was built from other sources; run {setup_command(name)}"
    return ""


def stamp_of(folder: Path) -> str:
    """Return the text of the file `STAMP` of a runtime's folder, or "" if there is none."""
    stamp = folder / STAMP
    return stamp.read_text() if stamp.is_file() else ""


@contextlib.contextmanager
def new_installation(folder: Path, stamp: str) -> Iterator[Path]:
    """Yield a folder to install into; at the end, let it replace `folder` in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder) as new:
        yield new
        (new / STAMP).write_text(stamp)
        take_place(new, folder)


# -- commands that build and download -----------------------------------------------------------


def run_command(
    command: Sequence[str | Path],
    failure: str,
    error: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command.

    `error`: A regular expression. The message quotes its first match in stderr, or else the first
    line of stderr.

    Returns:
        Its stdout.
    """
    try:
        completed = subprocess.run(
            [*map(str, command)],
            capture_output=True, text=True, check=False, cwd=folder, env=environment,
        )  # fmt: skip
    except OSError as reason:
        raise RuntimeFailure(f"{command[0]} is not there: {reason.strerror}") from reason
    if completed.returncode:
        found = re.search(error, completed.stderr, re.MULTILINE)
        lines = completed.stderr.strip().splitlines() or ["no message"]
        quoted = found[0] if found else lines[0]
        raise RuntimeFailure(f"{failure}: {' '.join(quoted.split())}")
    return completed.stdout


def apt_install(packages: Sequence[str], problem: str, say: Say, *, otherwise: str = "") -> None:
    """Install packages of Debian, as root and if the user allows it.

    `problem`: What is missing. `otherwise`: What else the user may do.
    """
    command = ("apt-get", "install", "-y", "--no-install-recommends", *packages)
    by_hand = f"{problem}; run: {' '.join(command)}{otherwise}"
    if SYSTEM_PACKAGES not in sys.argv[1:]:
        raise RuntimeFailure(f"{by_hand}, or let it be installed, as root, by {SYSTEM_PACKAGES}")
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeFailure(by_hand)
    say(f"apt-get install {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for each in (("apt-get", "update"), command):
        try:
            run_command(each, f"{' '.join(each)} failed", "^E:.*", environment=environment)
        except RuntimeFailure as error:
            raise RuntimeFailure(f"{error}; {by_hand}") from error


def download_wheels(wheels: Mapping[str, str], folder: Path, *options: str) -> list[Path]:
    """Download wheels with known digests from PyPI; return the paths of the wheels."""
    pins = folder / "requirements.txt"
    pins.write_text("".join(f"{wheel} --hash=sha256:{sha}\n" for wheel, sha in wheels.items()))
    command = pip_command(
        "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:",
        "--dest", str(folder), "--requirement", str(pins), *options,
    )  # fmt: skip
    run_command(command, "pip download failed", "^ERROR.*")
    return sorted(folder.glob("*.whl"))
