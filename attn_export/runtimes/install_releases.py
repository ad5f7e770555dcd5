"""Installation of other releases of runtimes, each into a folder of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

from attn_export.errors import UsageError
from attn_export.output_folder import take_place
from attn_export.runtimes import install_javascript
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.install_folder import STAMP, InstallError
from attn_export.runtimes.release import MARK, NPM, VERSION, WHEELS, Release, release_of
from attn_export.temp_folders import folder_beside


def install_release(name: str, say: Callable[[str], None]) -> None:
    """Install a release; quick where it is there.

    Args:
        name: The release: ``ort-cpu==1.25.1``.
        say: Receives a message before each long step.

    Raises:
        InstallError: If it cannot be installed.
        UsageError: If it is no release.
    """
    release = runtime(name)
    if not isinstance(release, Release):
        raise UsageError(f"{name!r} is no release of a runtime; give ort-cpu{MARK}1.25.1")
    if not release.unavailable():
        return
    if release.npm_package:
        version = release.measured
        install_javascript.install_release(release.folder, release.npm_package, version, say)
        return
    wheels = [f"{package}=={release.measured}" for package in release.wheels]
    say(f"installing {', '.join(wheels)} …")
    release.folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(release.folder) as new:
        # Without what they depend on: numpy and others are those of this environment.
        options = ("--quiet", "--target", str(new), "--no-deps", "--only-binary=:all:")
        pip("install", *options, *wheels)
        (new / STAMP).write_text(" ".join(wheels))
        take_place(new, release.folder)


def published(base: str) -> list[str]:
    """Return the releases of a runtime that its registry has, the oldest first: no previews.

    Args:
        base: The runtime.

    Raises:
        InstallError: If the registry does not answer.
        UsageError: If the runtime has no releases.
    """
    if base in NPM:
        found = json.loads(_output(["npm", "view", NPM[base], "versions", "--json"]))
    elif base in WHEELS:
        said = _output([*_pip_command(), "index", "versions", WHEELS[base][0]])
        found = re.findall(r"[^\s,]+", said.partition("Available versions:")[2].partition("\n")[0])
    else:
        raise UsageError(f"{base} has no releases; choose from {', '.join([*WHEELS, *NPM])}")
    names = [f"{base}{MARK}{version}" for version in found if VERSION.fullmatch(version)]
    return sorted(names, key=release_of)


def pip(*arguments: str) -> None:
    """Run pip for this environment, which may have no pip of its own.

    Raises:
        InstallError: If it fails.
    """
    done = subprocess.run([*_pip_command(), *arguments], stdout=sys.stderr, check=False)
    if done.returncode:
        raise InstallError(f"pip {' '.join(arguments)} failed; what it said is above")


def _pip_command() -> list[str]:
    base = getattr(sys, "_base_executable", sys.executable)
    return [base, "-m", "pip", "--python", sys.executable]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InstallError(f"{command[0]} is not there: {error.strerror}") from error
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), "no message")
        raise InstallError(f"{' '.join(command[-4:])} failed: {said[:200]}")
    return done.stdout
