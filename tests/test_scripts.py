"""The scripts beside the command line."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from types import ModuleType

import pytest
from conftest import ROOT
from measuring.cuda_page import cuda_page

from attn_export.runtimes.engines.ort_cuda import no_cuda_device


def load(name: str) -> ModuleType:
    """Load a script as a module."""
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    loader.exec_module(module)
    return module


PROGRAMS = [
    path for path in sorted((ROOT / "scripts").iterdir())
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3")
]  # fmt: skip


@pytest.mark.parametrize("list_of_files", ["ruff.extend-include", "mypy.files"])
def test_every_program_is_linted_and_its_types_are_checked(list_of_files: str):
    """Check the lists, since ruff and mypy do not find files without a suffix."""
    tool, _, key = list_of_files.partition(".")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][tool]
    assert len(PROGRAMS) > 10
    missing = {f"scripts/{path.name}" for path in PROGRAMS} - set(settings[key])
    assert not missing


def test_every_page_of_results_has_a_script_and_names_its_commit():
    results = load("results")
    pages = {page.name for page in results.RESULTS.iterdir() if page.suffix != ".json"}
    assert {page for page in pages if results.stamp(page)["commit"] == "unknown"} == set()
    assert pages <= results.PAGES.keys()
    scripts = {each.split()[0] for each in results.PAGES.values()}
    assert scripts <= {path.name for path in PROGRAMS}


def test_gpu_check_without_a_gpu_says_why_it_did_not_run():
    if not no_cuda_device():
        pytest.fail("this test describes machines without a GPU")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check"], capture_output=True, text=True
    )
    assert done.returncode == 5
    assert done.stderr.startswith("gpu_check: not run: ")


def test_gpu_check_compares_a_runtime_with_torch_on_a_device():
    # On the CPU, so that all of it but the GPU is tried on every machine.
    row = load("gpu_check").check_model("mqa", "cpu", "ort-cpu")
    assert row["passed"]
    assert row["failed"] == []
    assert row["cases"] >= 30
    assert 0 < row["worst_torch"] < 1
    assert 0 < row["max_abs_to_torch_device"] < 1
    results = {"card": "none", "environment": {"versions": {"torch": "x"}}}
    assert "| mqa | yes |" in cuda_page(results | {"parity": [row], "kernels": [], "times": []})


@pytest.mark.usefixtures("need_dry_run")
@pytest.mark.extended
def test_gpu_check_runs_over_the_stand_in_and_finds_the_kernels_of_the_dry_run():
    before = sorted((ROOT / "docs" / "results").iterdir())
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check", "--stand-in", "--model", "mqa"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU: the stand-in libraries of dry runs" in done.stdout
    assert re.search(r"\| mqa \| decode \| \d+ \| yes \|", done.stdout)
    assert re.search(r"\| mqa \| prefill \| \d+ \| yes \|", done.stdout)
    assert re.search(r"\| mqa \| decode, B 8 \| [\d.]+ \| [\d.]+ \| [\d.]+ \| \S+ \|", done.stdout)
    assert sorted((ROOT / "docs" / "results").iterdir()) == before
