"""The wheel: built, installed elsewhere, used there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the installed wheel alone; its dependencies are those here."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet",
        "--target", folder / "site", wheel, cwd=folder)  # fmt: skip
    return folder / "site"


@pytest.mark.xdist_group("test_packaging")  # the wheel is built once
def test_a_wheel_installs_and_works_outside_the_checkout(site: Path, tmp_path: Path):
    where = {"PYTHONPATH": str(site)}
    origin = run(sys.executable, "-c", "import attn_export; print(attn_export.__file__)",
                 cwd=tmp_path, **where)  # fmt: skip
    assert Path(origin.strip()).is_relative_to(site)
    script = site / "bin" / "attn-export"
    out = run(script, "build", "--embed-dim", "16", "--num-heads", "2", "--output", "tiny",
              cwd=tmp_path, **where)  # fmt: skip
    assert "attention: passed" in out
    assert "passed" in run(script, "verify", "tiny", cwd=tmp_path, **where)
    assert (site / "attn_export" / "py.typed").is_file()


THEIRS = """
import attn_export, pytest


def test_a_bundle(parity):
    assert parity("small").passed
    print(attn_export.__file__)


@pytest.mark.parity("small")
def test_each_case(parity_case):
    parity_case.check()
"""


@pytest.mark.xdist_group("test_packaging")
def test_a_project_that_installs_the_wheel_has_the_plugin(site: Path, bundle: Path, tmp_path: Path):
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -W error\n")
    shutil.copytree(bundle, tmp_path / "small")
    said = run(sys.executable, "-P", "-m", "pytest", "-q", "-rP", "-n", "2", "--parity-report",
               "reports", "--parity-require", "ort-cpu", cwd=tmp_path,
               PYTHONPATH=str(site))  # fmt: skip
    assert str(site / "attn_export" / "__init__.py") in said
    assert re.search(r"\d\d passed in", said)
    # One of each kind for each process, and for the one that started them.
    kinds = [path.suffix for path in (tmp_path / "reports").iterdir()]
    assert set(kinds) == {".json", ".html"}
    assert {kinds.count(kind) for kind in set(kinds)} <= {2, 3}


def test_the_lock_has_every_dependency_within_its_range_and_torch_at_its_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[><=;]", line)[0] for line in project["dependencies"]}
    for name in ("requirements.lock", "requirements-test.lock"):
        lines = (ROOT / "scripts" / name).read_text().splitlines()
        pinned = (line.split(";")[0] for line in lines if not line.startswith("#"))
        pins = dict(line.lower().split("==") for line in pinned)
        assert pins["torch"] == "2.13.0"
        assert {n.replace("_", "-") for n in wanted} <= {n.replace("_", "-") for n in pins}
        assert not any("/" in line or "@" in line for line in lines if not line.startswith("#"))


def test_nothing_that_is_kept_names_a_path_of_a_machine():
    listed = run("git", "ls-files", "-z", cwd=ROOT) if (ROOT / ".git").exists() else ""
    for name in filter(None, listed.split("\0")):
        text = (ROOT / name).read_text(errors="replace")
        assert str(ROOT) not in text, name
