"""Programs that read tensors and judge outputs with the kits' code in C and JavaScript."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from shared import once

from attn_export.parts.kits.kit import KITS, LANGUAGES, copy_sources

SOURCES = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


def program(language: str) -> list[str]:
    """Return the command of the program in C or JavaScript."""
    if language == "js":
        need_tool("node")
        js = KITS / "js"
        return ["node", str(SOURCES / "read_tensors.mjs"), str(js / "tensorproto.mjs")]
    need_tool("cc")
    return [str(once("conformance", compile_program) / language)]


def need_tool(name: str) -> None:
    """Skip a test if a program is missing; fail it in CI, where all are installed."""
    if shutil.which(name) is not None:
        return
    if "CI" in os.environ:
        pytest.fail(f"there is no {name}")
    pytest.skip(f"there is no {name}")


@contextlib.contextmanager
def python_kit(folder: Path) -> Iterator[None]:
    """Let this process import the kit in Python, of no bundle, from a folder."""
    copy_sources(LANGUAGES["python"], folder)
    (folder / "attn_kit" / "settings.py").write_text(
        "AXES = INPUTS = OUTPUTS = {}\nROUNDS_INPUTS = False\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "attn_kit"]:
        del sys.modules[name]  # other tests have the kit in another folder


def compile_program(folder: Path) -> None:
    """Compile the program `c`; a warning is an error."""
    folder.mkdir(exist_ok=True)
    sources = [SOURCES / "conformance.c", *sorted((KITS / "core").glob("*.c"))]
    command = ["cc", "-std=c11", *WARNINGS, f"-I{KITS}", *sources, "-lm", "-o", "c"]
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def answers(language: str, commands: Sequence[str]) -> list[list[str]]:
    """Return the fields of the result of each command, as conformance.c describes them."""
    done = subprocess.run(
        program(language), input="".join(f"{each}\n" for each in commands), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands)
    return [line.split("\t") for line in lines]
