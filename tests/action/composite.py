"""A small interpreter of composite actions: conditions, expressions, environment, outputs.

https://docs.github.com/actions/reference/workflows-and-actions/metadata-syntax: what `action.yml`
uses of it, and nothing else; an expression that it does not know is an error.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.S)
TERM = re.compile(
    r"inputs\.(?P<input>[\w-]+)|steps\.(?P<step>[\w-]+)\.outputs\.(?P<output>[\w-]+)|'(?P<text>[^']*)'"
    r"|(?:runner|github)\.\w+"
)
# As the service runs `shell: bash`.
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")


@dataclasses.dataclass
class ActionResult:
    """Result of an action.

    Attributes:
        code: Of the first step that failed; 0 where none did.
        outputs: Of the action.
        used: The inputs of each step that uses another action, by that action.
        summary: The markdown of the job's page.
        log: What was printed.
    """

    code: int
    outputs: dict[str, str]
    used: dict[str, dict[str, str]]
    summary: str
    log: str


class Composite:
    """An action, which runs in a folder with inputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content: dict[str, Any] = yaml.safe_load((folder / "action.yml").read_text())

    def run(
        self, inputs: Mapping[str, str], workspace: Path, temporary: Path,
        environment: Mapping[str, str],
    ) -> ActionResult:  # fmt: skip
        """Run it, as a job whose workspace is a folder does."""
        known = self.content["inputs"]
        assert inputs.keys() <= known.keys()
        values = {name: inputs.get(name, of.get("default", "")) for name, of in known.items()}
        steps: dict[str, dict[str, str]] = {}
        ran = ActionResult(0, {}, {}, "", "")
        summary = temporary / "summary.md"
        summary.touch()
        for step in self.content["runs"]["steps"]:
            if not holds(step.get("if", "success()"), values, steps, failed=ran.code != 0):
                continue
            if "uses" in step:
                given = {name: text(t, values, steps) for name, t in step["with"].items()}
                ran.used[step["uses"].partition("@")[0]] = given
                continue
            done, outputs = self._shell(step, values, steps, workspace, temporary, environment)
            steps[step.get("id", "")] = outputs
            ran.log += done.stdout
            ran.code = ran.code or done.returncode
        ran.summary = summary.read_text()
        for name, of in self.content["outputs"].items():
            ran.outputs[name] = text(of["value"], values, steps)
        return ran

    def _shell(
        self, step: Mapping[str, Any], inputs: Mapping[str, str],
        steps: Mapping[str, Mapping[str, str]], workspace: Path, temporary: Path,
        environment: Mapping[str, str],
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:  # fmt: skip
        assert step["shell"] == "bash"
        script, outputs = temporary / "step.sh", temporary / "outputs"
        script.write_text(text(step["run"], inputs, steps))
        outputs.write_text("")
        own = {name: text(value, inputs, steps) for name, value in step.get("env", {}).items()}
        done = subprocess.run(
            [*BASH, str(script)], cwd=workspace, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={
                **os.environ, "GITHUB_ACTIONS": "true", "GITHUB_ACTION_PATH": str(self.folder),
                "GITHUB_OUTPUT": str(outputs), "GITHUB_STEP_SUMMARY": str(temporary / "summary.md"),
                "RUNNER_TEMP": str(temporary), **environment, **own,
            },
        )  # fmt: skip
        return done, outputs_in(outputs.read_text())


def text(
    template: object, inputs: Mapping[str, str], steps: Mapping[str, Mapping[str, str]]
) -> str:
    """Return a text with each expression replaced by its value."""
    return EXPRESSION.sub(lambda found: term(found[1].strip(), inputs, steps), str(template))


def term(words: str, inputs: Mapping[str, str], steps: Mapping[str, Mapping[str, str]]) -> str:
    """Return the value of an input, of an output, or of a text in quotes."""
    found = TERM.fullmatch(words)
    assert found, f"unknown expression: {words}"
    if found["input"]:
        return inputs[found["input"]]
    if found["step"]:
        return steps.get(found["step"], {}).get(found["output"], "")
    return words if found["text"] is None else found["text"]


def holds(
    condition: str, inputs: Mapping[str, str], steps: Mapping[str, Mapping[str, str]], *,
    failed: bool,
) -> bool:  # fmt: skip
    """Return whether a step runs: `a != b`, `success()` and `!cancelled()`, joined by `&&`."""
    words = condition.strip().removeprefix("${{").removesuffix("}}")
    parts = [part.strip() for part in words.split("&&")]
    # A condition that names no status is one of success.
    if "!cancelled()" not in parts and failed:
        return False
    for part in parts:
        if part not in ("success()", "!cancelled()"):
            left, right = (term(side.strip(), inputs, steps) for side in part.split("!="))
            if left == right:
                return False
    return True


def outputs_in(file: str) -> dict[str, str]:
    """Return the outputs that a step wrote: `name=value`, or `name<<END`, lines, `END`."""
    found, rest = {}, iter(file.split("\n"))
    for line in rest:
        if "<<" in line:
            name, end = line.split("<<", 1)
            value = []
            while (more := next(rest)) != end:
                value.append(more)
            found[name] = "\n".join(value)
        elif line:
            name, _, found[name] = line.partition("=")
    return found
