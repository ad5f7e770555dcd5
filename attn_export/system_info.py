"""The environment of a result, without paths or host names; messages for missing packages."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attn_export.errors import UsageError

PACKAGES = ("attn-export", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime-gpu",
            "onnxruntime", "numpy")  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that may affect a result."""
    # Not imported above, so that `verify` starts its runtimes' processes early.
    from importlib.metadata import PackageNotFoundError, version

    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def environment() -> dict[str, Any]:
    """Return versions, system, number of cores and date."""
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def processor() -> str:
    """Return the name of the machine's processor."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def memory_here(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory of the machine, or those that its control groups allow.

    `root`: The folder of ``proc`` and ``sys``.
    """
    sizes = list[int]()
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in _limits_of_groups(root):
        try:
            sizes.append(int(file.read_text()))  # "max" if there is none
        except (OSError, ValueError):
            continue
    return min(sizes, default=None)


def _limits_of_groups(root: Path) -> Iterator[Path]:
    """Yield the files with limits of memory of the groups of this process, and those above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        for group in (Path(path), *Path(path).parents):
            yield folder / group.relative_to("/") / name


@functools.cache
def allow_many_files() -> None:
    """Raise the limit of open files, as far as it may be: each mapped array is one."""
    if os.name != "posix":
        return
    import resource

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


_FILES = 2**16
"""The number of files that may be open."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of <malloc.h>."""

REUSED, KEPT = 1 << 27, 1 << 28
"""Sizes in bytes: of the largest arrays whose memory is reused, and of the memory that is kept."""


def reuse_memory() -> None:
    """Have glibc keep freed memory for the next arrays, in this process.

    By default it returns the memory of large arrays to the system, which clears it each time. That
    takes several times as long as, for example, computing their difference.
    """
    if platform.libc_ver()[0] == "glibc":
        import ctypes

        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, REUSED)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)


FOR_TORCH = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
"""The environment of PyTorch in command lines.

By default its threads spin while they wait, and take the cores from the runtimes' processes: on a
busy machine, a build took up to three times as long. And large arrays come in pages of 4 KiB:
to hand them out and clear them took a fifth of the time of a build with 8B weights.
"""


def set_for_torch() -> None:
    """Set the environment of PyTorch, if it is not imported yet, where the user did not."""
    for name, value in FOR_TORCH.items():
        os.environ.setdefault(name, value)


# -- packages that are not installed ------------------------------------------------------------

EXTRAS = {
    "onnxruntime": "cpu",
    "torch": "build",
    "onnxscript": "build",
    "transformers": "models",
    "model_signing": "sign",
    "OpenSSL": "sign",
    "distributed": "sweep",
}
"""The extra of attn-export that includes a package."""


def install_command(*requirements: str) -> str:
    """Return a command that installs packages into this environment, even if it has no pip.

    attn-export itself, with extras, is `.[extra]`: it is on no package index.
    """
    quoted = " ".join(f"'{name}'" if set(name) & set("[<>") else name for name in requirements)
    if any(name.startswith(".[") for name in requirements):
        quoted += " in the clone of attn-export"
    if find_spec("pip"):
        return f"pip install {quoted}"
    prefix = Path(sys.prefix)
    if prefix.is_relative_to(Path.cwd()):
        prefix = prefix.relative_to(Path.cwd())
    return f"python3 -m pip --python {prefix} install {quoted}"


def missing_package(package: str, *requirements: str) -> str:
    """Return a message that a package is not installed, with the command that installs it."""
    extra = [f".[{EXTRAS[package]}]"] if package in EXTRAS else [package]
    return f"{package} is not installed; {install_command(*(requirements or extra))}"


def check_installed(package: str) -> None:
    """Raise an error if a package is not installed, before it is needed."""
    if find_spec(package) is None:
        raise UsageError(missing_package(package))
