"""Hostile inputs given to commands, and what came of each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from hostile.bundles import made

Fate = Literal["clean", "traceback", "hang", "crash", "wrong code", "wrong line", "escaped"]

SECONDS = 60.0
"""The time after which a command hangs: reading has a limit, and a runtime takes a few seconds."""

CODES = {0, 2, 4, 5, 6, 7}
STORE = "s"
LINE = 320
"""The largest length of a line of an error, its name included."""

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclasses.dataclass(frozen=True)
class Tried:
    """An input and what came of it.

    Attributes:
        kind: The kind of the input.
        number: Makes it again.
        words: The command.
        fate: Whether it was clean, or else what was wrong.
        shown: What was printed.
    """

    kind: str
    number: int
    words: tuple[str, ...]
    fate: Fate
    shown: str


class Runner:
    """A process that runs commands, started again where one ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def answer(self, words: Sequence[str]) -> dict[str, Any] | Fate:
        """Return the exit code and the output of a command, or how it ended the process."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(list(words)) + "\n")
        process.stdin.flush()
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        line = process.stdout.readline()
        late = not timer.is_alive()
        timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.close()
        return "hang" if late else "crash"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, str(Path(__file__).with_name("runner.py"))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL, env={**os.environ, "GITHUB_ACTIONS": ""},
            )  # fmt: skip
        return self._process


def tried(bundle: Path, folder: Path, numbers: Sequence[int], kinds: list[str]) -> Iterator[Tried]:
    """Yield what comes of hostile inputs.

    Args:
        bundle: A good bundle.
        folder: For the inputs; nothing outside of each one's own place may change.
        numbers: The inputs.
        kinds: Their kinds, in turn.
    """
    with contextlib.closing(Runner()) as runner:
        for number in numbers:
            trial_folder = folder / str(number)
            trial_folder.mkdir()
            kind, words = made(bundle, trial_folder / "in", number, kinds)
            before = state_of(trial_folder)
            answer = runner.answer(words)
            fate, shown = judged(words, answer)
            if fate == "clean" and not (before <= state_of(trial_folder)):
                fate = "escaped"
            yield Tried(kind, number, tuple(words), fate, shown)
            shutil.rmtree(trial_folder)


def state_of(trial_folder: Path) -> set[tuple[str, int, int]]:
    """Return the files below a folder, and when they were changed: none of them may be."""
    found = set()
    for path in trial_folder.rglob("*"):
        if path.parent.name == STORE:
            continue  # SQLite writes into the folder of a store that it reads
        state = path.lstat()
        if not stat.S_ISDIR(state.st_mode):
            found.add((str(path), state.st_ino, state.st_mtime_ns))
    return found


def judged(words: Sequence[str], answer: dict[str, Any] | Fate) -> tuple[Fate, str]:
    """Return whether an answer is clean, and what was printed."""
    if isinstance(answer, str):
        return answer, ""
    shown = answer["err"] + answer["out"]
    lines = answer["err"].splitlines()
    messages = [line for line in lines if line.startswith("attn-export: ")]
    if "Traceback" in shown or "internal error" in shown:
        return "traceback", shown
    if answer["code"] not in CODES:
        return "wrong code", shown
    if CONTROL.search(shown) or any(line.startswith("::") for line in shown.splitlines()):
        return "wrong line", shown
    # Checks and verdicts have lines of their own; what refused the file has one.
    refused = answer["code"] in (2, 7)
    if refused and (len(messages) != 1 or len(lines) != 1):
        return "wrong line", shown
    if any(len(line) > LINE for line in messages):
        return "wrong line", shown
    return "clean", shown


def summary(results: Sequence[Tried]) -> str:
    """Return a table of the fates by kind."""
    kinds = sorted({each.kind for each in results})
    counts = Counter((each.kind, each.fate) for each in results)
    fates = ("clean", "traceback", "hang", "crash", "wrong code", "wrong line", "escaped")
    lines = [f"{'kind':<12}{'tried':>8}" + "".join(f"{fate:>12}" for fate in fates)]
    for kind in kinds:
        row = [counts[kind, fate] for fate in fates]
        lines.append(f"{kind:<12}{sum(row):>8}" + "".join(f"{count:>12}" for count in row))
    total = [sum(counts[kind, fate] for kind in kinds) for fate in fates]
    lines.append(f"{'all':<12}{sum(total):>8}" + "".join(f"{count:>12}" for count in total))
    return "\n".join(lines)
