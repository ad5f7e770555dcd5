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
from measuring.timing import command, interleaved

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


@pytest.mark.usefixtures("need_dry_run")
@pytest.mark.extended
def test_gpu_check_judges_a_whole_model_and_finds_the_launches_of_the_dry_run(tmp_path):
    script = load("gpu_check")
    fields = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 1024,
        "head_dim": 64,
    }  # fmt: skip
    whole, bundle = tmp_path / "tiny float16", tmp_path / "tiny float16" / "bundle"
    script.prepare(whole, "llama", "float16", fields)
    rows = list(script.verdicts("tiny float16", bundle, "ort-cpu", script.LIMITS))
    assert [row["step"] for row in rows][3:] == [
        "model.cuda.onnx", "model.cuda.decode.onnx", "model.cuda.prefill.onnx",
    ]  # fmt: skip
    assert all(row["passed"] and row["right"] == row["outputs"] > 0 for row in rows)
    results = {"card": "none", "environment": {"versions": {}}, "parity": [], "kernels": []}
    page = cuda_page(results | {"times": [], "whole": rows})
    assert re.search(r"\| tiny float16 \| model.cuda.decode.onnx \| (\d+) \| \1 \| 0\.\d+ \|", page)
    (bundle / "weights.safetensors").unlink()  # others are made for the times
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check", "--stand-in", "--whole", tmp_path],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for step in ("decode", "decode, B 8"):
        assert f"| tiny float16 | {step} | 16 | 16 | 11 | yes | 0 |" in done.stdout
    assert re.search(r"\| tiny float16 \| prefill \| [\d.]+ \| \S \| [\d.]+ \|", done.stdout)


def test_a_new_row_takes_the_place_of_that_of_the_same_model_and_step():
    rows = [{"model": "a", "step": "decode", "error": "x"}, {"model": "b"}]
    for row in ({"model": "a", "step": "decode"}, {"model": "a", "step": "prefill"}):
        load("gpu_check").put(rows, row)
    assert rows == [
        {"model": "a", "step": "decode"}, {"model": "a", "step": "prefill"}, {"model": "b"},
    ]  # fmt: skip


@pytest.mark.extended
def test_the_bare_script_of_the_benchmark_exports_the_module_that_the_job_builds(tmp_path):
    script = load("bench_build").BARE
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bare.onnx").is_file()


def test_a_first_round_and_unused_runs_are_not_counted():
    calls: list[str] = []
    times = interleaved(
        {"own": lambda: calls.append("own") or 3.0, "measured": lambda: calls.append("measured")},
        2, runs=2, unused=1, clean=lambda: calls.append("clean"),
    )  # fmt: skip
    assert times["own"] == [3.0] * 4
    assert len(times["measured"]) == 4
    assert all(0 < seconds < 1 for seconds in times["measured"])
    assert calls == [*["own", "clean"] * 3, *["measured", "clean"] * 3] * 3


def test_a_command_that_prints_its_time_is_counted_by_it(tmp_path):
    words = [sys.executable, "-c", "print(0.25)"]
    assert command(words, tmp_path, prints_time=True)() == 0.25
    assert command(words, tmp_path)() is None
    with pytest.raises(subprocess.CalledProcessError):
        command([sys.executable, "-c", "1 / 0"], tmp_path)()


def test_bench_large_counts_the_memory_of_processes_that_a_command_starts():
    held = "import time; held = b'x' * (96 << 20); time.sleep(1)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    used = load("bench_large").measure_usage([sys.executable, "-c", starts])
    assert 96 << 20 < used.peak < 160 << 20
    assert used.seconds > 1


def test_bench_large_states_the_goals_beside_what_it_measured():
    script = load("bench_large")
    measured = {name: script.Usage(3 << 30, 7.0) for name in script.COMMANDS}
    row = {"weights": 1 << 30, **measured, "save": [1.2, 1.5, 1.3], "raw": [1.0, 1.0, 1.1]}
    page = script.to_markdown([row])
    assert "| 1.00 GiB | 3.50 GiB | 3.00 GiB, 7 s |" in page
    assert "| 1.00 GiB | 1.30 s (1.20 to 1.50) | 1.00 s (1.00 to 1.10) | 1.30 | ≤ 1.3 |" in page
