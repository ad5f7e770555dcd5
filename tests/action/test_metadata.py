"""Metadata in `action.yml`, and descriptions of it elsewhere."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

ACTION = ROOT / "action"
CONTENT: dict[str, Any] = yaml.safe_load((ACTION / "action.yml").read_text())
STEPS: list[dict[str, Any]] = CONTENT["runs"]["steps"]
USES = re.compile(r"uses: \S+/attn-export/action@")
PAGES = [ROOT / "docs" / "ci.md", ACTION / "README.md"]


def schema(name: str) -> Any:
    """Return a published schema, as SchemaStore keeps it and check-jsonschema ships it."""
    from jsonschema import Draft7Validator  # takes 2 s, in every process that imports tests

    folder = files("check_jsonschema.builtin_schemas") / "vendor"
    return Draft7Validator(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))


def examples(page: Path) -> list[str]:
    """Return the pieces of YAML of a page that use the action."""
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.S)
    return [block for block in blocks if USES.search(block)]


def steps_in(block: str) -> list[dict[str, Any]]:
    """Return the steps of an example: a whole workflow, jobs, or steps alone."""
    content = yaml.safe_load(block)
    jobs = content["jobs"].values() if isinstance(content, dict) else [{"steps": content}]
    return [step for job in jobs for step in job["steps"]]


def test_it_is_what_the_published_schema_allows():
    schema("github-actions").validate(CONTENT)


def test_every_input_and_output_is_described_and_every_input_is_read():
    for part in ("inputs", "outputs"):
        assert all(value["description"].strip() for value in CONTENT[part].values())
    # An input that is required has no default, and the other way round.
    assert all(("default" in i) != i["required"] for i in CONTENT["inputs"].values())
    said = json.dumps(STEPS)
    assert all(f"inputs.{name} " in said for name in CONTENT["inputs"])


def test_nothing_is_pasted_into_a_shell():
    scripts = [step for step in STEPS if "run" in step]
    assert scripts
    for step in scripts:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]
        assert not any(word in step["run"] for word in ("eval", "`", "$("))


def test_other_actions_are_pinned_to_a_commit():
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name) for name in used)


def test_no_variable_that_it_sets_is_one_that_the_package_reads():
    names = {name for step in STEPS for name in step.get("env", {})}
    assert names
    assert all(name.startswith("ACTION_") for name in names)
    scripts = "".join((ACTION / name).read_text() for name in ("run.py", "install.py"))
    assert all(f'"{name}"' in scripts or f'"{name.removeprefix("ACTION_")}"' in scripts
               for name in names - {"ACTION_EXIT_CODE"})  # fmt: skip


def test_its_page_lists_every_input_and_output():
    text = (ACTION / "README.md").read_text()
    rows = set(re.findall(r"^\| `([\w-]+)` \|", text, flags=re.M))
    assert rows == CONTENT["inputs"].keys() | CONTENT["outputs"].keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_examples_give_inputs_that_there_are(page: Path):
    found = examples(page)
    assert found
    for block in found:
        for step in steps_in(block):
            if "/attn-export/action@" in step.get("uses", ""):
                assert step["with"].keys() <= CONTENT["inputs"].keys()
                assert "bundle" in step["with"] or "build" in step["with"]
            assert "${{" not in step.get("run", "")


def test_workflows_are_what_the_published_schema_allows():
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").iterdir()]
    texts += [block for page in PAGES for block in examples(page)]
    assert len(texts) > 5
    for text in texts:
        content = yaml.safe_load(text)
        if isinstance(content, list):  # an example of steps alone
            content = {"jobs": {"job": {"runs-on": "ubuntu-24.04", "steps": content}}}
        # YAML 1.1 reads the key `on` as true; some examples leave it out.
        content = {"on": "push"} | {"on" if k is True else k: v for k, v in content.items()}
        schema("github-workflows").validate(content)


def test_a_tag_runs_every_test():
    path = ROOT / ".github" / "workflows" / "release.yml"
    content = yaml.safe_load(path.read_text())
    assert content[True] == {"push": {"tags": ["v*"]}}
    commands = [step.get("run") for job in content["jobs"].values() for step in job["steps"]]
    assert "scripts/test --all" in commands
