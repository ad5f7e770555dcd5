"""ONNX Runtime on CPUs that this machine does not have, emulated by qemu in user mode."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import UsageError, choose, first_few
from attn_export.parts.installing import ROOT, home, missing
from attn_export.runtimes.engines.ort_cpu import OrtCpu
from attn_export.runtimes.protocol import Runtime

CPUS = "cpus"
"""The folder of the emulators within that of the runtimes, and the name for installing them."""

TABLE = Path(__file__).with_name("emulated_cpus.toml")
ALL = "all"
PYTHON = "usr/bin/python3.11"

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
_OPENBLAS = {**ONE_THREAD, "OPENBLAS_CORETYPE": "Nehalem"}
"""Environment variables for numpy's OpenBLAS on emulated x86. It does not recognise qemu's Nehalem
and Westmere, and would run instructions that they do not have."""

_MATTERS = re.compile(r"requested feature: \S+?\.((?:avx|amx|fma|f16c|sse|ssse)[\w-]*)")
"""A regular expression of the CPU features in qemu's warnings by which libraries choose kernels.
Other features, such as transactional memory, do not matter."""


@dataclasses.dataclass(frozen=True)
class _Cpu:
    """A CPU model.

    Attributes:
        float16: The float16 matrix products that ONNX Runtime accumulates in float16 on this CPU:
            ``"all"``, ``"some"`` or ``"none"``.
    """

    machine: str
    model: str
    float16: str
    about: str


@functools.cache
def table() -> Mapping[str, Any]:
    """Return the content of `TABLE`: CPUs, and the packages and wheels for emulating them."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def cpus() -> Mapping[str, _Cpu]:
    """Return the CPUs, by name."""
    return {name: _Cpu(**fields) for name, fields in table()["cpu"].items()}


def runtimes_of(name: str) -> Sequence[Runtime]:
    """Return the runtime of a name such as ``ort-cpu@haswell``.

    ``ort-cpu@all`` are those that qemu emulates with all their features.
    """
    cpu = name.partition("@")[2]
    if cpu != ALL:
        return [_EmulatedCpu(cpu)]
    return [runtime for runtime in map(_EmulatedCpu, cpus()) if not runtime.missing_features()]


def listed() -> Iterator[tuple[Runtime, str]]:
    """Yield the runtime of every CPU, with its device and what the CPU is."""
    for name, cpu in cpus().items():
        runtime = _EmulatedCpu(name)
        yield runtime, f"{runtime.device}: {cpu.about}"


class _EmulatedCpu(OrtCpu):
    """The runtime `ort-cpu@NAME`: ONNX Runtime on an emulated CPU.

    The emulator starts the same worker process as for `ort-cpu`: on x86 with this Python and its
    packages, on ARM with Debian's Python and ONNX Runtime's wheel for ARM.
    """

    in_turn = True
    time_factor = 3.0  # emulated instructions take longer
    launcher_mib = 256

    def __init__(self, cpu: str) -> None:
        cpu = cpu.lower()
        if cpu not in cpus():
            raise UsageError(f"unknown CPU {cpu!r}; {choose(cpu, (*cpus(), ALL))}")
        self.cpu = cpus()[cpu]
        self.name = f"ort-cpu@{cpu}"
        self.device = f"{self.cpu.machine}, emulated"
        if self.cpu.float16 != "none":
            self.float16_sums = (
                f"it adds {self.cpu.float16} products of float16 in half precision, "
                "where others use float32"
            )

    @property
    def _needs_other_python(self) -> bool:
        return self.cpu.machine != platform.machine()

    def version(self) -> str | None:
        """Return the version of ONNX Runtime for the CPU's architecture; None if not installed."""
        if not self._needs_other_python:
            return super().version()
        pinned = table()[self.cpu.machine]["wheels"]
        (version,) = (w.partition("==")[2] for w in pinned if w.startswith("onnxruntime=="))
        return version if not self._not_installed() else None

    def unavailable(self) -> str:
        """Return the reason that it cannot be emulated here."""
        return self._not_installed() or self.missing_features() or super().unavailable()

    def _not_installed(self) -> str:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return "CPUs are emulated on x86-64 Linux only"
        return missing(CPUS, self._emulator(), [TABLE])

    def missing_features(self) -> str:
        """Return a reason that names the CPU features which qemu does not emulate, or ""."""
        if self.cpu.machine != "x86_64" or self._not_installed():
            return ""
        features = _missing_features(str(self._emulator()), self.cpu.model)
        if not features:
            return ""
        return (
            f"the emulator has no {first_few(features)}: "
            f"the kernels of {self.cpu.model} would not run; choose another CPU"
        )

    def _emulator(self) -> Path:
        return home() / CPUS / f"qemu-{self.cpu.machine}"

    def launch_command(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str] | None]:
        """Return the command that runs Python on this CPU, and its environment."""
        command = [str(self._emulator()), "-cpu", self.cpu.model]
        if not self._needs_other_python:
            return [*command, sys.executable, *arguments], {**os.environ, **_OPENBLAS}
        root = home() / CPUS / self.cpu.machine
        host_only = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME")
        environment = {name: text for name, text in os.environ.items() if name not in host_only}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (root / "site", ROOT)))
        environment |= ONE_THREAD
        return [*command, "-L", str(root), str(root / PYTHON), "-S", *arguments], environment


@functools.cache
def _missing_features(emulator: str, model: str) -> tuple[str, ...]:
    completed = subprocess.run(
        [emulator, "-cpu", model, "/bin/true"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return tuple(dict.fromkeys(_MATTERS.findall(completed.stderr)))
