"""Compilers of the languages whose kits call the C library: those that are here, or Debian's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TOOLCHAINS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "rust": (("cargo",), ("cargo",)),
    "go": (("go",), ("golang-go",)),
    "java": (("javac", "java"), ("openjdk-17-jdk-headless", "libjna-java")),
    "csharp": (("mcs", "mono"), ("mono-mcs", "mono-runtime")),
}
"""By language: its programs, and the packages of Debian that have them."""

JNA = Path("/usr/share/java/jna.jar")
"""The library of Java that calls C, which `javac` alone does not have."""


def install(name: str, say: Callable[[str], None]) -> None:
    """Install the compiler of a language, if there is none."""
    from attn_export.parts.installing import apt_install

    problem = _problem(name)
    if problem:
        apt_install(TOOLCHAINS[name][1], problem, say)


def not_ready(name: str) -> str:
    """Return what the kit of a language lacks here, with the remedy, or ""."""
    problem = _problem(name)
    return problem and f"{problem}; apt-get install {' '.join(TOOLCHAINS[name][1])}"


def required() -> Sequence[str]:
    """Return the languages that tests need: all in CI and where they can be installed."""
    everywhere = "CI" in os.environ or (os.geteuid() == 0 and shutil.which("apt-get") is not None)
    return [name for name in TOOLCHAINS if everywhere or not _problem(name)]


def _problem(name: str) -> str:
    for program in TOOLCHAINS[name][0]:
        if shutil.which(program) is None:
            return f"there is no {program}"
    return f"there is no {JNA}" if name == "java" and not JNA.is_file() else ""
