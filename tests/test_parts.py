"""Tests of the core in a copy of the package that has no parts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import shared
from conftest import ROOT
from package_files import FILES

from attn_export.errors import GraphError
from attn_export.export.operators import Operators
from attn_export.optional_parts import HOOKS, Part, module_of, parts
from attn_export.runtimes.catalogue import NAMES, packages

PARTS = sorted(file.parent.name for file in (ROOT / "attn_export" / "parts").glob("*/__init__.py"))


def copy_without(folder: Path, *gone: str) -> dict[str, str]:
    """Copy the package without some parts; return an environment in which it is imported."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "attn_export", folder / "attn_export", ignore=ignore)
    for part in gone:
        shutil.rmtree(folder / "attn_export" / "parts" / part)
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def run(env: dict[str, str], *arguments: str, cwd: Path, code: int = 0) -> str:
    """Return what a command writes to stdout, or to stderr if it fails, as it must with a code."""
    ran = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=cwd, capture_output=True, text=True
    )
    assert ran.returncode == code, ran.stderr
    return ran.stderr if code else ran.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a folder with the core alone, and the environment in which it is imported."""
    folder = tmp_path_factory.mktemp("core")
    return folder, copy_without(folder, *PARTS)


def test_every_part_says_what_it_adds():
    assert PARTS
    assert len(parts()) == len(PARTS)


def test_a_copy_without_parts_is_what_is_imported(bare: tuple[Path, dict[str, str]]):
    folder, env = bare
    code = "import attn_export.optional_parts as p; print(p.__file__, p.parts())"
    expected = f"{folder / 'attn_export' / 'optional_parts.py'} ()"
    assert run(env, "-c", code, cwd=folder).strip() == expected


def test_the_core_has_its_own_commands_without_parts(bare: tuple[Path, dict[str, str]]):
    folder, env = bare
    text = run(env, "-m", "attn_export", "--help", cwd=folder)
    assert "build" in text
    assert not {name for part in parts() for name in part.commands} & set(text.split())


def test_the_core_builds_and_verifies_without_parts(bare: tuple[Path, dict[str, str]]):
    folder, env = bare
    small = ("--embed-dim", "16", "--num-heads", "2", "--cache", "in-place", "--causal")
    few = ("--dialect", "ort", "--runtime", "ort-cpu")
    run(env, "-m", "attn_export", "build", *small, *few, "--output", "out", cwd=folder)
    graphs = {path.name for path in (folder / "out").glob("*.onnx")}
    assert graphs == {"model.ort.onnx", "model.ort.decode.onnx"}
    words = ("verify", "out", *few[2:], "--json", "report.json")
    run(env, "-m", "attn_export", *words, cwd=folder)
    assert json.loads((folder / "report.json").read_text())["signature"] is None
    said = run(env, "-m", "attn_export", "verify", "out", "--trust", "k.pem", cwd=folder, code=2)
    assert re.fullmatch(r".*--trust needs the part attestation, which is missing; .*\n", said)
    for option in (("--cpu", "haswell"), ("--runtime", "ort-cpu==1.27.0")):
        said = run(env, "-m", "attn_export", "verify", "out", *option, cwd=folder, code=2)
        assert re.fullmatch(r".*unknown runtime 'ort-cpu(@haswell|==1.27.0)'; .*choose.*\n", said)


def test_the_core_lists_and_installs_its_own_runtimes_without_parts(
    bare: tuple[Path, dict[str, str]],
):
    folder, env = bare
    listed = run(env, "-m", "attn_export", "runtimes", cwd=folder).splitlines()
    assert [line.split()[0] for line in listed] == list(NAMES)
    said = run(env, "-m", "attn_export.runtimes.install", "cpus", cwd=folder, code=2)
    *_, last = said.rstrip().rpartition("choose from ")
    assert set(last.split(", ")) == {*set(packages()).intersection(NAMES), "all"}


ANOTHER = """
from attn_export.runtimes.engines.onnx_reference import OnnxReference

class Another(OnnxReference):
    name = "one-more"
    packages = ("onnx",)

RUNTIME = Another
"""


def test_a_runtime_that_is_one_file_is_listed_installed_and_run(bundle: Path, tmp_path: Path):
    env = copy_without(tmp_path, *PARTS)
    (tmp_path / "attn_export" / "runtimes" / "engines" / "one_more.py").write_text(ANOTHER)
    listed = run(env, "-m", "attn_export", "runtimes", cwd=tmp_path).splitlines()
    assert {line.split()[0] for line in listed} == {*NAMES, "one-more"}
    said = run(env, "-m", "attn_export.runtimes.install", "cpus", cwd=tmp_path, code=2)
    assert ", one-more, " in said
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    verify = ("verify", str(copy), "--runtime", "one-more")
    shown = run(env, "-m", "attn_export", *verify, cwd=tmp_path)
    assert "one-more" in shown
    assert "passed" in shown


def test_a_name_fits_a_form_whose_capital_letters_are_any_text():
    modules = {"cpus": "json", "NAME==VERSION": "csv"}
    names = {
        "cpus": "json",
        "ort-cpu==1.27.0": "csv",
        "==": "csv",
        "my-cpus": None,
        "ort-cpu": None,
    }
    found = {name: module_of(name, modules) for name in names}
    assert {name: module and module.__name__ for name, module in found.items()} == names


@pytest.mark.parametrize("part", parts(), ids=PARTS)
def test_every_module_that_a_part_names_has_what_the_core_reads(part: Part):
    for name, module in part.commands.items():
        assert callable(getattr(import_module(module), f"{name.replace('-', '_')}_command"))
    for name, module in part.runtimes.items():
        found = import_module(module)
        assert hasattr(found, "RUNTIME") or callable(found.runtimes_of)
        assert name.islower() or callable(found.listed)
    for module in part.references.values():
        assert callable(import_module(module).runtimes_of)
    for module in part.installs.values():
        assert callable(import_module(module).install)
    for module in part.dialects.values():
        assert callable(import_module(module).rewrite)
    installs = {name: module for each in parts() for name, module in each.installs.items()}
    assert all(module_of(name, installs) for name in part.tests_need)


@pytest.mark.parametrize("part", parts(), ids=PARTS)
def test_every_hook_of_a_part_is_known_and_there(part: Part):
    assert part.hooks.keys() <= HOOKS.keys()
    for name, module in part.hooks.items():
        found = getattr(import_module(module), name)
        assert callable(found) or found
        if name == "TRANSLATIONS":
            Operators(found)  # it checks names and functions


def test_every_hook_is_read_where_it_acts_and_has_a_part():
    core = "\n".join(path.read_text() for file, path in FILES.items() if file[:6] != "parts/")
    for name in HOOKS:
        assert re.search(rf'hooks?\("{name}"', core), name
        assert any(name in part.hooks for part in parts()), name


def test_the_core_names_no_part():
    core = {file: path for file, path in FILES.items() if not file.startswith("parts/")}
    named = rf"parts[./]({'|'.join(PARTS)})\b"
    assert [file for file, path in core.items() if re.search(named, path.read_text())] == []


def test_the_core_names_a_dialect_of_a_part_and_verifies_its_graphs(
    bare: tuple[Path, dict[str, str]],
):
    folder, env = bare
    bundle = shared.bundle_of("bfloat16")
    model = str(bundle / "model.onnx")
    lower = ("-m", "attn_export", "lower", model, "--dialect", "cuda", "--output", "out.onnx")
    said = run(env, *lower, cwd=folder, code=GraphError.exit_code)
    assert "this installation cannot lower graphs to the cuda dialect" in said
    shown = run(env, "-m", "attn_export", "verify", str(bundle), cwd=folder)
    assert "model.cuda.onnx" in (bundle / "report.json").read_text()
    assert "passed" in shown


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.every(4)
def test_the_modules_of_a_part_are_imported_without_the_other_parts(part: str, tmp_path: Path):
    env = copy_without(tmp_path, *(other for other in PARTS if other != part))
    folder = tmp_path / "attn_export" / "parts" / part
    names = sorted(file.stem for file in folder.glob("*.py"))
    code = (
        f"import {', '.join(f'attn_export.parts.{part}.{name}' for name in names)}; print('done')"
    )
    assert run(env, "-c", code, cwd=tmp_path) == "done\n"


def test_a_sweep_without_dry_runs_refuses_architectures(tmp_path: Path):
    env = copy_without(tmp_path, "cuda_dry_run")
    (tmp_path / "sweep.toml").write_text(
        'runtimes = ["ort-cpu"]\narchitectures = ["sm_80"]\n[[spec]]\nembed_dim = 32\n'
    )
    code = """
from pathlib import Path
from attn_export.errors import UsageError
from attn_export.parts.sweeps.cluster import resources_here
from attn_export.parts.sweeps.sweep_plan import read_plan
try:
    read_plan(Path("sweep.toml"))
except UsageError as error:
    print(error, "DRY_RUN" in resources_here())
"""
    said = run(env, "-c", code, cwd=tmp_path)
    expected = "sweep.toml has architectures; this installation cannot make dry runs of CUDA False"
    assert said.strip() == expected
