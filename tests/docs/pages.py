"""Pages of the documentation: their blocks, and a folder in which a page runs."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import shared
from conftest import ROOT, run_command
from tiny_llama import write_tiny_llama

from attn_export.parts.installing import home

WRITTEN = [
    page for pattern in ("*.md", "tutorials/*.md", "notes/*.md")
    for page in sorted((ROOT / "docs").glob(pattern))
]  # fmt: skip
"""Pages of the site that are written by hand, but for files about defects of runtimes."""

PAGES = [ROOT / "README.md", ROOT / "action" / "README.md", *WRITTEN]
FIRST = "scripts/attn-export build --variant mqa"
FENCE = re.compile(
    r"((?:^[^\n]+\n)*)\n?^```(\S*)(?: title=\"([\w./]+)\")?\n(.*?)^```$", flags=re.M | re.S
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: the paragraph above it, its language, the file that it is, and its text."""

    above: str
    kind: str
    file: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines that run, if it is a block of commands."""
        lines = self.text.splitlines() if self.kind == "sh" else []
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text(encoding="utf-8"))]


def after_the_first_command() -> Path:
    """Return a folder with the specs, a checkpoint, and all that the first command wrote."""

    def make(folder: Path) -> None:
        (folder / "models").mkdir(parents=True)
        for spec in (ROOT / "models").glob("*.toml"):
            shutil.copy(spec, folder / "models")
        shutil.copytree(ROOT / "docs" / "sweeps", folder / "docs" / "sweeps")
        write_tiny_llama(folder / "checkpoint")
        models = Path("tests", "parts", "whole_models")
        for name in ("exports/llama", "exports/mistral", "exports/whisper", "quantised/llama-int4"):
            shutil.copytree(ROOT / models / name, folder / models / name)
        (folder / ".runtimes").symlink_to(home())
        (folder / "first.txt").write_text(run(FIRST, folder))

    return shared.once("docs", make)


def run(line: str, folder: Path) -> str:
    """Run a command of a page in this environment, and return what it prints.

    A comment behind it may name the exit code that it ends with.
    """
    command, _, comment = line.partition("  # exit code ")
    program, *arguments = shlex.split(command)
    if program == "scripts/attn-export" and line != FIRST:
        done = run_command(arguments, folder)
    else:
        module = [sys.executable, "-m"]
        start = {
            "scripts/attn-export": [*module, "attn_export"],
            "pytest": [*module, "pytest"],
            ".venv/bin/python": [sys.executable],
            "model_signing": [*module, "model_signing"],
            "openssl": ["openssl"],
            "cmake": ["cmake"],
            "scripts/setup_runtimes": [*module, "attn_export.runtimes.install"],
            "layer-cpp/build/attn": [folder / program],
            "mine/build/mine": [folder / program],
        }[program]
        done = subprocess.run([*start, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == int(comment or 0), f"{line}: {done.stdout}{done.stderr}"
    return done.stdout
