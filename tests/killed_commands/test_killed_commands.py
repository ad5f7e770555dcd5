"""Killed at any moment, a command leaves the old output or the new one, and the next run the rest.

`--kills N` sets how many random moments of each command are tried.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from shared import extended

from attn_export.bundle.manifest import read_bundle
from attn_export.output_folder import LIST, replaceable, sha256

pytestmark = pytest.mark.xdist_group("killed_commands")  # one process imports torch for all of them

RUNNER = Path(__file__).with_name("runner.py")
SPEC = "embed_dim = 8\nnum_heads = 1\n"
BUILD = ("build", "t.toml", "--runtime", "ort-cpu", "--dialect", "standard", "--quiet")
EXPLAIN = ("explain", "b", "--runtime", "ort-cpu", "--graph", "wrong.onnx", "--seconds", "1")

COMMANDS: dict[str, tuple[str, ...]] = {
    "build": (*BUILD, "--seed", "1", "--output", "out/b"),
    "lower": ("lower", "b/model.onnx", "--dialect", "portable", "--output", "out/x.onnx"),
    "explain": (*EXPLAIN, "--output", "out/e"),
}
BEFORE: dict[str, tuple[str, ...]] = {
    "build": (*BUILD, "--output", "out/b"),
    "lower": ("lower", "b/model.onnx", "--dialect", "standard", "--output", "out/x.onnx"),
    "explain": (*EXPLAIN, "--case", "base", "--output", "out/e"),
}
"""Commands that write the output that is replaced; other options give other files."""

CODES = {"explain": 6}
OUTPUTS = {"build": "b", "lower": "x.onnx", "explain": "e"}
STEPS = {"build": 2, "explain": 3}
"""Number of steps tried from the first that replaces; of others, which take less time, 4."""


@dataclasses.dataclass(frozen=True)
class Workplace:
    """A folder in which commands run and are killed."""

    folder: Path
    runner: subprocess.Popen[str]

    def run(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """Run a command; what became of it."""
        job = {
            "arguments": arguments, "cwd": str(self.folder), "said": str(self.folder / "said"),
            "temporary": str(self.folder / "tmp"), "memory": str(self.folder / "shm"), **options,
        }  # fmt: skip
        assert self.runner.stdin is not None
        assert self.runner.stdout is not None
        self.runner.stdin.write(json.dumps(job) + "\n")
        self.runner.stdin.flush()
        answer: dict[str, Any] = json.loads(self.runner.stdout.readline())
        assert answer["orphans"] == 0
        return answer

    def start(self, name: str) -> dict[str, str]:
        """Put the output there that a command is to replace; its files."""
        out, kept = self.folder / "out", self.folder / f"{name} before"
        shutil.rmtree(out)
        if not kept.exists():
            out.mkdir()
            self.finish(name, *BEFORE[name])
            shutil.copytree(out, kept)
        else:
            shutil.copytree(kept, out)
        return self.files()

    def finish(self, name: str, *arguments: str, **options: Any) -> dict[str, Any]:
        """Run a command to its end."""
        done = self.run(*arguments, **options)
        assert done["code"] == CODES.get(name, 0), done["said"]
        return done

    def files(self) -> dict[str, str]:
        """Return the digest of every file of the output, except those with a leading dot."""
        out = self.folder / "out"
        found = (path.relative_to(out) for path in sorted(out.rglob("*")))
        return {
            name.as_posix(): sha256(out / name) for name in found
            if (out / name).is_file() and not name.parts[0].startswith(".")
        }  # fmt: skip

    def check_whole(self, name: str) -> None:
        """Assert that every file of the output is there, and as it was written."""
        output = self.folder / "out" / OUTPUTS[name]
        assert output.exists()
        if name == "build":
            read_bundle(output)
        elif name == "lower":
            onnx.checker.check_model(output, full_check=True)
        else:
            replaceable(output, "explanation")
            listed = json.loads((output / LIST).read_text())["files"]
            assert all(sha256(output / file) == digest for file, digest in listed.items())

    def left(self) -> list[str]:
        """Return what a command has left beside its output and in temporary folders."""
        places = ("out", "tmp", "shm")
        found = [path.name for place in places for path in (self.folder / place).iterdir()]
        # torch makes one folder in every run, and keeps it.
        return sorted(
            name for name in found
            if name not in OUTPUTS.values() and not name.startswith("torchinductor_")
        )  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("kills")
    for name in ("out", "tmp", "shm"):
        (folder / name).mkdir()
    (folder / "t.toml").write_text(SPEC)
    with subprocess.Popen(
        [sys.executable, str(RUNNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as runner:
        place = Workplace(folder, runner)
        place.finish("build", *BUILD, "--output", "b")
        model = onnx.load(folder / "b" / "model.onnx")
        node = next(node for node in model.graph.node if node.op_type == "Attention")
        next(a for a in node.attribute if a.name == "scale").f = 0.2
        onnx.save(model, folder / "wrong.onnx")
        yield place
        assert runner.stdin is not None
        runner.stdin.close()


MOST_KILLS = 12
"""Number of runs after which a command must have been killed once."""


def kills(config: pytest.Config) -> int:
    """Return the number of random moments at which each command is killed."""
    return int(config.getoption("--kills") or (6 if config.getoption("--all") else 2))


@pytest.mark.parametrize("name", extended(COMMANDS, lambda name: name != "build"))
@pytest.mark.extended
def test_killed_at_random_moments(name: str, workplace: Workplace, request: pytest.FixtureRequest):
    before = workplace.start(name)
    whole = workplace.finish(name, *COMMANDS[name])
    after = workplace.files()
    workplace.start(name)
    draw, killed = random.Random(name), 0
    for number in range(MOST_KILLS):
        if number >= kills(request.config) and killed:
            break
        seconds = draw.uniform(0, whole["seconds"])
        code = workplace.run(*COMMANDS[name], seconds=seconds)["code"]
        killed += code == -9
        check_old_or_new(name, before, after, workplace)
    assert killed
    workplace.finish(name, *COMMANDS[name])
    assert workplace.left() == []
    workplace.check_whole(name)


REPLACED = [(name, exchange) for name in COMMANDS for exchange in (True, False)]
SLOW = {(name, exchange) for name in ("build", "explain") for exchange in (True, False)}
"""Commands that `--all` tries; `lower` replaces by the same code, quickly."""


@pytest.mark.parametrize(
    "how",
    extended(REPLACED, lambda how: how not in SLOW),
    ids=lambda how: f"{how[0]}-{'exchange' if how[1] else 'two renames'}",
)
@pytest.mark.every(3)
def test_killed_around_every_step_that_replaces(how: tuple[str, bool], workplace: Workplace):
    name, exchange = how
    before = workplace.start(name)
    steps = workplace.finish(name, *COMMANDS[name], exchange=exchange)["steps"]
    after = workplace.files()
    ineffective = {"mkdir"} if exchange else {"mkdir", "exchange"}
    numbers = [i for i, s in enumerate(steps[: STEPS.get(name, 4)]) if s not in ineffective]
    assert numbers
    for number in numbers:
        for early in (True, False):
            if workplace.files() != before:
                workplace.start(name)
            done = workplace.run(*COMMANDS[name], step=number, before=early, exchange=exchange)
            assert done["code"] == -9, (steps[number], done)
            if (workplace.folder / "out" / OUTPUTS[name]).exists():
                check_old_or_new(name, before, after, workplace)
            else:  # hidden until the next run
                assert not exchange
                assert workplace.left() != []
                workplace.run(*COMMANDS[name], swept="out")
                check_old_or_new(name, before, after, workplace)
    workplace.finish(name, *COMMANDS[name], exchange=exchange)
    assert workplace.left() == []
    workplace.check_whole(name)


def check_old_or_new(
    name: str, before: dict[str, str], after: dict[str, str], workplace: Workplace
) -> None:
    """Compare names, for reports have dates; the digests are checked against the lists."""
    workplace.check_whole(name)
    assert workplace.files().keys() in (before.keys(), after.keys())
