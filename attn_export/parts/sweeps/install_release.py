"""Installation of other releases of runtimes, each in a folder of its own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

from attn_export.errors import UsageError
from attn_export.parts.installing import Say, new_installation, run_command
from attn_export.parts.sweeps.release import (
    MARK,
    VERSION,
    Release,
    npm_packages,
    release_of,
    wheels,
)
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.install import pip, pip_command


def install(name: str, say: Say) -> None:
    """Install a release if it is missing."""
    release = runtime(name)
    if not isinstance(release, Release):
        raise UsageError(f"{name!r} is not a release of a runtime; give ort-cpu{MARK}1.25.1")
    if not release.unavailable():
        return
    if release.npm_package:
        install_release: Callable[[str, Say], None] = release.base.install_release  # type: ignore[attr-defined]
        install_release(release.measured, say)
        return
    wheels = [f"{package}=={release.measured}" for package in release.wheels]
    say(f"installing {', '.join(wheels)} …")
    with new_installation(release.folder, " ".join(wheels)) as new:
        # Without dependencies: numpy and others are those of this environment.
        options = ("--quiet", "--target", str(new), "--no-deps", "--only-binary=:all:")
        pip("install", *options, *wheels)


def published(base: str) -> list[str]:
    """Return the published releases of a runtime without previews, the oldest first."""
    npm = npm_packages()
    if base in npm:
        versions = json.loads(_output("npm", "view", npm[base], "versions", "--json"))
    elif base in wheels():
        index = ("--python", sys.executable, "index", "versions", wheels()[base][0])
        listed = _output(*pip_command(*index)).partition("Available versions:")[2]
        versions = re.findall(r"[^\s,]+", listed.partition("\n")[0])
    else:
        raise UsageError(f"{base} has no releases; choose from {', '.join([*wheels(), *npm])}")
    names = [f"{base}{MARK}{version}" for version in versions if VERSION.fullmatch(version)]
    return sorted(names, key=release_of)


def _output(*command: str) -> str:
    return run_command(command, f"{' '.join(command[-4:])} failed", "^.+")
