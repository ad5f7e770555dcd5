"""The kit in C with sanitizers, fed with broken bundles: no fault is a crash."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
from evidence import rewritten
from native_corpus import (
    RAN,
    READ,
    Broken,
    broken_bundles,
    broken_copy,
    broken_shapes,
    native_inputs,
)
from native_kits import DIALECT, compile_kit
from shared import bundle_of, once

from attn_export.bundle.golden import INDEX
from attn_export.parts.installing import home
from attn_export.parts.kits.kit import write_kit

SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
REPORTED = 86
"""The exit code of a program in which a sanitizer found something."""

SECONDS = 20
"""Time limit of one run: a hundred times what it takes."""

RANDOM = 10
"""Bundles broken at random for each kit; `try_all` takes any number."""


def small_bundle(name: str) -> Path:
    """Return a bundle of two cases, the first of which is fed token by token."""

    def keep(index: dict) -> None:
        def cost(entry: dict) -> int:
            return entry["sizes"]["batch"] * entry["sizes"]["query_len"]

        kind = "decode" if name == "in-place" else "shape"
        fed = [
            entry for entry in index["cases"]
            if entry["kind"] == kind and entry["sizes"]["past_len"] == 0
            and entry["sizes"]["query_len"] > 1
        ]  # fmt: skip
        others = [entry for entry in index["cases"] if entry["sizes"]["past_len"] > 0]
        index["cases"] = [min(fed, key=cost), min(others, key=cost)]

    def make(folder: Path) -> None:
        whole = rewritten(bundle_of(name), folder.with_name(f"{name}-whole"), keep)
        left_out = {path.name for path in (whole / "golden").iterdir()} - {*cases_of(whole), INDEX}
        few = folder.with_name(f"{name}-few")
        shutil.copytree(whole, few, ignore=lambda _, names: left_out & {*names})
        rewritten(few, folder)

    return once(f"hostile/{name}", make)


def cases_of(bundle: Path) -> list[str]:
    index = json.loads((bundle / "golden" / "index.json").read_text())
    return [entry["folder"] for entry in index["cases"]]


def sanitized_kit(name: str, bundle: Path | None = None) -> Path:
    """Return a kit whose programs end with `REPORTED` at the first wrong access."""

    def make(kit: Path) -> None:
        write_kit("c", bundle or small_bundle(name), kit, dialect=None if bundle else DIALECT)
        compile_kit(kit, "Debug", SANITIZERS)

    return once(f"hostile/c-{name}", make)


def need_sanitizers(request: pytest.FixtureRequest, folder: Path) -> None:
    """Skip a test if the compiler has no sanitizers; fail it if `--require` names c."""
    source = folder / "nothing.c"
    source.write_text("int main(void) { return 0; }\n")
    command = ["cc", *SANITIZERS.split(), source, "-o", folder / "nothing"]
    built = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not built or subprocess.run([folder / "nothing"], check=False).returncode != 0:
        is_required = "c" in request.config.getoption("--require")
        (pytest.fail if is_required else pytest.skip)("the compiler has no sanitizers")


def run(
    program: Path, bundle: Path, *words: str, seconds: float = SECONDS
) -> subprocess.CompletedProcess[bytes]:
    options = f"exitcode={REPORTED}:detect_leaks=0:max_allocation_size_mb=1024"
    options += ":allocator_may_return_null=1" if words else ""
    env = os.environ | {
        "ASAN_OPTIONS": options, "UBSAN_OPTIONS": f"exitcode={REPORTED}",
        # The sanitizer's dlopen knows nothing of where the program was told to look.
        "LD_LIBRARY_PATH": str(home() / "onnxruntime" / "lib"),
    }  # fmt: skip
    return subprocess.run(
        [program, bundle, *words], capture_output=True, env=env, timeout=seconds, check=False
    )


def problem(done: subprocess.CompletedProcess[bytes], codes: frozenset[int]) -> str:
    """Return the deviation of a program's end from the documentation, or ""."""
    out, err = (stream.decode("utf-8", "backslashreplace") for stream in (done.stdout, done.stderr))
    if done.returncode not in codes:
        return f"exit code {done.returncode}, expected one of {sorted(codes)}: {err[-1500:]}"
    lines = err.splitlines()
    if len(lines) != (done.returncode == READ) or any(len(line) > 320 for line in lines):
        return f"an error that is not one line: {err!r}"
    if not all(line.isprintable() for line in (*lines, *out.splitlines())):
        return f"characters that cannot be printed: {err!r} {out!r}"
    if done.returncode == RAN and "FAIL " not in out:
        return f"no case failed: {out!r}"
    return ""


def try_all(program: Path, bundle: Path, every: Iterable[Broken], folder: Path) -> dict[str, str]:
    """Return the problem of each broken bundle that caused one."""
    found = {}
    for broken in every:
        copy = broken_copy(bundle, folder / "broken", broken)
        try:
            says = problem(run(program, copy), broken.codes)
        except subprocess.TimeoutExpired:
            says = f"still running after {SECONDS} s"
        if says:
            found[broken.name] = says
    return found


@pytest.fixture(params=["append", "in-place"])
def kit(request: pytest.FixtureRequest, need, tmp_path: Path) -> tuple[Path, Path]:
    """Return the self-test with sanitizers, and the bundle that it was made for."""
    need("c")
    need_sanitizers(request, tmp_path)
    return sanitized_kit(request.param) / "build" / "self_test", small_bundle(request.param)


@pytest.mark.every(3)
def test_a_whole_bundle_passes(kit: tuple[Path, Path]):
    done = run(*kit)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" token by token  " in done.stdout


@pytest.mark.every(3)
def test_each_fault_is_one_line_and_the_documented_exit_code(kit: tuple[Path, Path], tmp_path):
    program, bundle = kit
    # The kit with another cache tries the other half.
    half = slice("in-place" in bundle.name, None, 2)
    every = list(broken_bundles(bundle, cases_of(bundle)[0]))[half]
    assert len(every) > 25
    assert try_all(program, bundle, every, tmp_path) == {}


@pytest.mark.every(3)
def test_each_shape_that_a_replay_cannot_take_is_refused(kit: tuple[Path, Path], tmp_path: Path):
    program, bundle = kit
    every = list(broken_shapes(bundle, cases_of(bundle)[0]))
    assert len(every) > 20
    assert try_all(program, bundle, every, tmp_path) == {}


@pytest.mark.every(3)
def test_faults_at_random_are_no_crash(kit: tuple[Path, Path], tmp_path: Path):
    program, bundle = kit
    drawn = native_inputs(random.Random(14), bundle, cases_of(bundle))
    assert try_all(program, bundle, islice(drawn, RANDOM), tmp_path) == {}
