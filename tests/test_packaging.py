"""The wheel is built, installed in another environment, and used there."""

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

from attn_export import system_info
from attn_export.runtimes.catalogue import runtime
from attn_export.system_info import EXTRAS


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
    assert "tiny: passed" in out
    assert "passed" in run(script, "verify", "tiny", cwd=tmp_path, **where)
    assert (site / "attn_export" / "py.typed").is_file()


@pytest.mark.xdist_group("test_packaging")
def test_the_wheel_has_every_file_of_the_package(site: Path):
    left_out = {"__pycache__", "node_modules", "build"}
    here = {path.relative_to(ROOT) for path in (ROOT / "attn_export").rglob("*") if path.is_file()}
    there = {path.relative_to(site) for path in site.rglob("*")}
    assert {path for path in here if not left_out & set(path.parts)} <= there


def test_exporters_and_engines_are_installed_by_extras_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=;]", line)[0] for line in project["dependencies"]}
    assert not names & {"torch", "onnxscript", "matplotlib", "onnxruntime", "onnxruntime-gpu"}
    for package, extra in EXTRAS.items():
        project_name = "pyopenssl" if package == "OpenSSL" else package.replace("_", "-")
        assert any(
            line.startswith(project_name) for line in project["optional-dependencies"][extra]
        )


@pytest.mark.parametrize(
    ("package", "requirements", "pip", "says"),
    [
        (
            "torch",
            (),
            True,
            "torch is not installed; pip install '.[build]' in the clone of attn-export",
        ),
        ("tract", (), True, "tract is not installed; pip install tract"),
        ("OpenCV", ("cv2>=5",), True, "OpenCV is not installed; pip install 'cv2>=5'"),
        ("tract", (), False, "tract is not installed; python3 -m pip --python env install tract"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_a_command_that_exists_here(
    package, requirements, pip, says, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(system_info, "find_spec", lambda name: pip if name == "pip" else None)
    assert system_info.missing_package(package, *requirements) == says


@pytest.mark.parametrize(
    ("folders", "wrong"),
    [
        (("onnxruntime-1.31.dist-info", "onnxruntime_gpu-1.31.dist-info"), True),
        (("onnxruntime_gpu-1.31.dist-info", "onnxruntime_genai-0.9.dist-info"), False),
    ],
)
def test_two_packages_of_onnx_runtime_are_refused_with_what_to_do(
    folders, wrong, tmp_path, monkeypatch
):
    for name in (*folders, "onnxruntime"):
        (tmp_path / name).mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    said = runtime("ort-cpu").unavailable()
    assert said.startswith("onnxruntime and onnxruntime-gpu are installed and overwrite") == wrong
    assert "pip uninstall onnxruntime onnxruntime-gpu" in said or not wrong


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
@pytest.mark.extended
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
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["build"], *extras["gpu"]]
    wanted = {re.split(r"[><=;]", line)[0] for line in lines}
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
