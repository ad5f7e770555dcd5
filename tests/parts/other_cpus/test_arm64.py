"""The kits in C and C++ compiled for arm64, on emulated processors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from shared import bundle_of, once

from attn_export.parts.installing import VARIABLE, home
from attn_export.parts.other_cpus import install_cpus as arm64
from attn_export.parts.other_cpus.emulated_cpu import CPUS

pytest.importorskip("native_kits")
from native_kits import DIALECT, changed, scale

from attn_export.parts.kits.kit import write_kit

KITS = [("c", "append", "neoverse-n1"), ("cpp", "in-place", "cortex-a72")]


@pytest.fixture
def compiler(request: pytest.FixtureRequest) -> None:
    """Skip a test where the compiler is missing; fail it if `--require` names it."""
    reason = arm64.not_ready()
    if reason and arm64.ARM64_COMPILER in request.config.getoption("--require"):
        pytest.fail(f"{arm64.ARM64_COMPILER} is required: {reason}")
    if reason:
        pytest.skip(reason)


def kit_of(language: str, name: str) -> Path:
    """Return a kit that was built as the documentation says."""

    def make(kit: Path) -> None:
        write_kit(language, bundle_of(name), kit, DIALECT)
        toolchain = home() / arm64.ARM64_COMPILER / arm64.TOOLCHAIN
        for command in (
            ["-S", str(kit), "-B", str(kit / "build"), "--toolchain", str(toolchain)],
            ["--build", str(kit / "build")],
        ):
            done = subprocess.run(["cmake", *command], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr

    return once(f"kits/arm64-{language}-{name}", make)


@pytest.mark.extended
@pytest.mark.parametrize(("language", "name", "cpu"), KITS)
def test_its_self_test_runs_on_an_emulated_processor(
    language: str, name: str, cpu: str, compiler: None, tmp_path: Path
):
    kit = kit_of(language, name)
    program, *words = {"c": ["self_test"], "cpp": ["attn", "self-test"]}[language]
    program = kit / "build" / program
    assert program.read_bytes()[18:20] == b"\xb7\x00", "e_machine of an ELF file for aarch64"
    command = ["ctest", "--test-dir", str(kit / "build"), "--verbose"]
    done = subprocess.run(["env", f"QEMU_CPU={cpu}", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(list((kit / "bundle" / "golden").glob("test_data_set_*"))) + 1
    assert f"{name}: {count} of {count} passed" in done.stdout

    wrong = changed(kit / "bundle", tmp_path, scale)
    emulator = [home() / CPUS / "qemu-aarch64", "-cpu", cpu, "-L", home() / CPUS / "aarch64"]
    done = subprocess.run([*emulator, program, *words, wrong], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "output: relative error" in done.stdout


def test_without_the_compiler_the_reason_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert arm64.not_ready() == "it is not built here; run scripts/setup_runtimes arm64-compiler"
