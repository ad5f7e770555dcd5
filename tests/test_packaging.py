"""The wheel: built, installed elsewhere, used there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from conftest import ROOT


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_installs_and_works_outside_the_checkout(tmp_path: Path, bundle: Path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet",
        "--target", tmp_path / "site", wheel, cwd=tmp_path)  # fmt: skip
    where = {"PYTHONPATH": str(tmp_path / "site")}
    origin = run(sys.executable, "-c", "import attn_export; print(attn_export.__file__)",
                 cwd=tmp_path, **where)  # fmt: skip
    assert Path(origin.strip()).is_relative_to(tmp_path / "site")
    script = tmp_path / "site" / "bin" / "attn-export"
    out = run(script, "build", "--embed-dim", "16", "--num-heads", "2", "--output", "tiny",
              cwd=tmp_path, **where)  # fmt: skip
    assert "attention: passed" in out
    assert "passed" in run(script, "verify", "tiny", cwd=tmp_path, **where)
    assert (tmp_path / "site" / "attn_export" / "py.typed").is_file()


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
