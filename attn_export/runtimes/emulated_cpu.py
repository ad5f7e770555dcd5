"""ONNX Runtime on processors that this machine does not have, run by qemu's user emulation."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import UsageError
from attn_export.runtimes.install_folder import home, missing
from attn_export.runtimes.ort_cpu import OrtCpu

NAME = "cpus"
"""The folder below that of the runtimes, and the name by which it is set up."""

TABLE = Path(__file__).with_name("emulated_cpus.toml")
BASE = "ort-cpu"
ALL = "all"
PYTHON = "usr/bin/python3.11"

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
OPENBLAS = {**ONE_THREAD, "OPENBLAS_CORETYPE": "Nehalem"}
"""The environment of numpy, which is not what is tested, on x86: OpenBLAS does not know qemu's
Nehalem and Westmere, and runs instructions there that they do not have."""

MATTERS = re.compile(r"requested feature: \S+?\.((?:avx|amx|fma|f16c|sse|ssse)[\w-]*)")
"""A feature of qemu's warnings that decides which kernels run. Others, such as transactional
memory, do not."""


@dataclasses.dataclass(frozen=True)
class Cpu:
    """A processor.

    Attributes:
        machine: Its architecture, as `platform.machine` names it.
        model: Its name in qemu.
        float16: The products of float16 matrices that ONNX Runtime adds in half precision there:
            ``"all"``, ``"some"`` or ``"none"``.
        about: Its instructions, and machines that have it.
    """

    machine: str
    model: str
    float16: str
    about: str


@functools.cache
def table() -> Mapping[str, Any]:
    """Return the processors, and the packages and wheels that emulating them takes."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def cpus() -> Mapping[str, Cpu]:
    """Return the processors by name."""
    return {name: Cpu(**fields) for name, fields in table()["cpu"].items()}


def emulated(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the runtimes of processors: ``ort-cpu@haswell``.

    Args:
        names: Processors, or ``"all"`` for those that the emulator has.

    Raises:
        UsageError: If there is no processor of a name.
    """
    found: dict[str, None] = {}
    for name in names:
        if name == ALL:
            kinds = [EmulatedCpu(each) for each in cpus()]
            found |= {kind.name: None for kind in kinds if not kind.dropped()}
        else:
            found[EmulatedCpu(name).name] = None
    return tuple(found)


class EmulatedCpu(OrtCpu):
    """`ort-cpu@NAME`.

    Its process is the one of `ort-cpu`, started by the emulator: for x86 with this Python and its
    packages, for ARM with Debian's Python and ONNX Runtime's wheel for that architecture.

    Args:
        cpu: One of `cpus`.

    Attributes:
        time_factor: Factor on the time limits: emulated instructions take longer.
        launcher_mib: The memory of the emulator itself, in MiB.

    Raises:
        UsageError: If there is no such processor.
    """

    time_factor = 3.0
    launcher_mib = 256

    def __init__(self, cpu: str) -> None:
        cpu = cpu.lower()
        if cpu not in cpus():
            raise UsageError(f"unknown CPU {cpu!r}; choose from {', '.join(cpus())}, {ALL}")
        self.cpu = cpus()[cpu]
        self.name = f"{BASE}@{cpu}"
        self.device = f"{self.cpu.machine}, emulated"

    @property
    def _needs_other_python(self) -> bool:
        return self.cpu.machine != platform.machine()

    def version(self) -> str | None:
        """Return the version of ONNX Runtime for the processor's architecture."""
        if not self._needs_other_python:
            return super().version()
        pinned = table()[self.cpu.machine]["wheels"]
        (version,) = (w.partition("==")[2] for w in pinned if w.startswith("onnxruntime=="))
        return version if not self._not_installed() else None

    def unavailable(self) -> str:
        """Return the reason that it cannot be emulated here."""
        return self._not_installed() or self.dropped() or super().unavailable()

    def _not_installed(self) -> str:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return "CPUs are emulated on x86-64 Linux only"
        return missing(NAME, self._emulator(), [TABLE])

    def dropped(self) -> str:
        """Return the features that the emulator leaves out of the processor, as a reason, or ""."""
        if self.cpu.machine != "x86_64" or self._not_installed():
            return ""
        features = _dropped(str(self._emulator()), self.cpu.model)
        if not features:
            return ""
        return (
            f"the emulator has no {', '.join(features[:3])}{' …' if len(features) > 3 else ''}: "
            f"the kernels of {self.cpu.model} would not run; choose another CPU"
        )

    def _emulator(self) -> Path:
        return home() / NAME / f"qemu-{self.cpu.machine}"

    def launch_command(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str] | None]:
        """Return a command, and its environment, that runs Python on this processor.

        Args:
            arguments: The arguments after the path of the interpreter.
        """
        command = [str(self._emulator()), "-cpu", self.cpu.model]
        if not self._needs_other_python:
            return [*command, sys.executable, *arguments], {**os.environ, **OPENBLAS}
        root = home() / NAME / self.cpu.machine
        of_host = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME")
        environment = {name: text for name, text in os.environ.items() if name not in of_host}
        package = Path(__file__).resolve().parents[2]
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (root / "site", package)))
        environment |= ONE_THREAD
        return [*command, "-L", str(root), str(root / PYTHON), "-S", *arguments], environment


@functools.cache
def _dropped(emulator: str, model: str) -> tuple[str, ...]:
    done = subprocess.run(
        [emulator, "-cpu", model, "/bin/true"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return tuple(dict.fromkeys(MATTERS.findall(done.stderr)))
