"""Installation of runtimes: `python -m attn_export.runtimes.install [--system-packages] [NAME …]`.

Without names, it installs the runtimes that the tests need. Only with `--system-packages` may it
change the system, as root. It is tested on Debian 12.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection

from attn_export.errors import RuntimeFailure, UsageError, choose, one_line
from attn_export.interruption import end_on_signal
from attn_export.optional_parts import module_of, parts
from attn_export.runtimes.catalogue import packages, required, runtime

ALL = "all"
SYSTEM_PACKAGES = "--system-packages"
"""The argument that allows a command to change the system."""

_OF_PARTS = {name: module for part in parts() for name, module in part.installs.items()}
"""The module that installs what a part adds, by its name or the form of its names."""


def needed() -> tuple[str, ...]:
    """Return what the tests need: runtimes, and what the tests of parts name."""
    return (*required(), *(name for part in parts() for name in part.tests_need))


def main() -> int:
    """Install the named runtimes and return the exit code."""
    end_on_signal()
    named = tuple(name for name in sys.argv[1:] if name != SYSTEM_PACKAGES)
    known = packages()
    names = named or tuple(
        name for name in needed() if name in known or module_of(name, _OF_PARTS) is not None
    )
    if named == (ALL,):
        names = (*known, *(name for name in _OF_PARTS if name.islower()))
    unknown = [name for name in names if name not in known and module_of(name, _OF_PARTS) is None]
    if unknown:
        say(f"unknown runtime {unknown[0]!r}; {choose(unknown[0], (*known, *_OF_PARTS, ALL))}")
        return 2
    try:
        install(names)
    except UsageError as error:
        say(one_line(error))
        return 2
    except (RuntimeFailure, OSError) as error:
        say(one_line(error))
        return 1
    return 0


def install(names: Collection[str]) -> None:
    """Install runtimes that are missing or outdated."""
    wheels = [
        wheel
        for name, wheels in packages().items()
        if name in names and runtime(name).unavailable()
        for wheel in wheels
    ]
    if wheels:
        say(f"installing {', '.join(wheels)} …")
        pip("install", "--quiet", *wheels)
    for name in names:
        installer = module_of(name, _OF_PARTS)
        if installer is not None:
            installer.install(name, say)


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"attn-export: {text}\n")
    sys.stderr.flush()


def pip_command(*arguments: str) -> list[str]:
    """Return a command of the base interpreter's pip, as this environment may have none."""
    return [getattr(sys, "_base_executable", sys.executable), "-m", "pip", *arguments]


def pip(*arguments: str) -> None:
    """Run pip for this environment."""
    command = pip_command("--python", sys.executable, *arguments)
    completed = subprocess.run(command, stdout=sys.stderr, check=False)
    if completed.returncode:
        raise RuntimeFailure(f"pip {' '.join(arguments)} failed; what it said is above")


if __name__ == "__main__":
    sys.exit(main())
