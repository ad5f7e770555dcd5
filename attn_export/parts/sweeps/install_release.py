"""Installation of other releases of runtimes, each in a folder of its own."""

from __future__ import annotations

import json
import re
import sys

from attn_export.errors import UsageError
from attn_export.parts.sweeps.release import MARK, NPM, VERSION, WHEELS, Release, release_of
from attn_export.runtimes import javascript
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.install import pip
from attn_export.runtimes.install_folder import Say, new_installation, pip_command, run_command


def install(name: str, say: Say) -> None:
    """Install a release if it is missing."""
    release = runtime(name)
    if not isinstance(release, Release):
        raise UsageError(f"{name!r} is not a release of a runtime; give ort-cpu{MARK}1.25.1")
    if not release.unavailable():
        return
    if release.npm_package:
        version = release.measured
        javascript.install_release(release.folder, release.npm_package, version, say)
        return
    wheels = [f"{package}=={release.measured}" for package in release.wheels]
    say(f"installing {', '.join(wheels)} …")
    with new_installation(release.folder, " ".join(wheels)) as new:
        # Without dependencies: numpy and others are those of this environment.
        options = ("--quiet", "--target", str(new), "--no-deps", "--only-binary=:all:")
        pip("install", *options, *wheels)


def published(base: str) -> list[str]:
    """Return the published releases of a runtime without previews, the oldest first."""
    if base in NPM:
        versions = json.loads(_output("npm", "view", NPM[base], "versions", "--json"))
    elif base in WHEELS:
        index = ("--python", sys.executable, "index", "versions", WHEELS[base][0])
        listed = _output(*pip_command(*index)).partition("Available versions:")[2]
        versions = re.findall(r"[^\s,]+", listed.partition("\n")[0])
    else:
        raise UsageError(f"{base} has no releases; choose from {', '.join([*WHEELS, *NPM])}")
    names = [f"{base}{MARK}{version}" for version in versions if VERSION.fullmatch(version)]
    return sorted(names, key=release_of)


def _output(*command: str) -> str:
    return run_command(command, f"{' '.join(command[-4:])} failed", "^.+")
