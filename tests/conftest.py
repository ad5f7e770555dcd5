"""Shared fixtures of the tests: small specs, a built bundle, the command line."""

from __future__ import annotations

import gc
import logging
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import shared
import torch
from default_share import default_share, is_quick
from forking import fork_from_now_on, forking, run_forked, started_anew

from attn_export.cases.draw import Interface
from attn_export.runtimes.run_options import RunOptions
from attn_export.spec import AttentionSpec
from attn_export.system_info import reuse_memory, set_for_torch

ROOT = Path(__file__).resolve().parent.parent

# The tests run in two processes on two cores, beside the runtimes that they start.
torch.set_num_threads(1)
reuse_memory()
set_for_torch()  # as command lines do, which are forked from a server with this environment
# pytest would print these records of PyTorch's exporter with every failure.
logging.getLogger("torch.__trace").addFilter(lambda _: False)

Cli = Callable[..., subprocess.CompletedProcess[str]]

OBJECTS = 1_000_000
"""Number of new objects after which garbage is collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require", action="append", default=[], metavar="RUNTIME",
        help="fail, instead of skipping, where this runtime is not here",
    )  # fmt: skip
    parser.addoption("--all", action="store_true", help="run the tests marked `extended` too")
    parser.addoption(
        "--quick",
        action="store_true",
        help="run only the files that take least time: default_share.QUICK",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files before they are imported: with all, that alone takes long."""
    if not config.getoption("--quick") or not collection_path.match("test_*.py"):
        return None
    return True if not is_quick(str(collection_path.relative_to(ROOT / "tests"))) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests outside `default_share`, unless --all.

    Tests of whole models come first, because they take long: if they came last, one process would
    run them while the other is idle.
    """
    items.sort(key=lambda item: item.path.parent.name != "transformers_models")
    if config.getoption("--all"):
        return
    kept, left_out = default_share(items)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Disable automatic garbage collection, which takes a seventh of the time of an export.

    It would traverse the objects of all imported modules each time.
    """
    gc.disable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give weights that a test or its fixtures draw the same values in any order of the tests."""
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if gc.get_count()[0] > OBJECTS:
        gc.collect()
        gc.freeze()  # later collections need not traverse the objects that remain


@pytest.fixture(scope="session", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    all_tests = pytestconfig.getoption("--all")
    shared.use(tmp_path_factory, all_tests=all_tests)
    if not all_tests:
        fork_from_now_on()


@pytest.fixture(autouse=True)
def _memory_as_before() -> Iterator[None]:
    """Undo the limit of a command that ran in this process: sanitizers reserve terabytes."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.fixture
def need(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Skip a test if what a runtime needs is missing; fail it if `--require` names the runtime."""

    def check(name: str) -> None:
        reason = shared.missing(name)
        if reason and name in request.config.getoption("--require"):
            pytest.fail(f"{name} is required: {reason}")
        elif reason:
            pytest.skip(f"{name}: {reason}")

    return check


@pytest.fixture
def need_dry_run(need: Callable[[str], None]) -> None:
    """Skip a test where the stand-in of CUDA is missing."""
    need("cuda-dry-run")


@pytest.fixture
def kit_says(tmp_path: Path) -> Callable[..., str]:
    """Return what runs a program of a bundle's Python kit; skip the test without the part."""
    from attn_export.commands.main import run
    from attn_export.optional_parts import parts

    if not any("kit" in part.commands for part in parts()):
        pytest.skip("the part that writes kits is not there")

    def says(bundle: Path, program: str = "self_test", *arguments: str) -> str:
        kit = tmp_path / "kit"
        assert run(["kit", "python", str(bundle), "--output", str(kit), "--quiet"]) == 0
        command = [sys.executable, "-W", "error", "-m", f"attn_kit.{program}", *arguments]
        ran = subprocess.run(command, cwd=kit, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        shutil.rmtree(kit)
        return ran.stdout

    return says


def small_spec(**changes: object) -> AttentionSpec:
    """Return a small grouped-query spec with all features: E 32, H 4, Hkv 2, D 8."""
    values = {
        "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "causal": True,
        "attn_mask": "bool[B,1,1,S]", "cache": "append",
    } | changes  # fmt: skip
    return AttentionSpec.from_dict(values)


def on(*runtimes: str) -> RunOptions:
    """Return the options of runs in some runtimes."""
    return RunOptions.of(runtimes=runtimes)


def interface_of(spec: AttentionSpec) -> Interface:
    """Return the inputs and outputs of the layer of a spec."""
    return Interface(spec.inputs(), spec.output_shapes(), spec.traits, spec.sums)


@pytest.fixture(scope="session")
def bundle() -> Path:
    """Return a small bundle with one graph. Tests must copy it before they change it."""
    from attn_export import build

    def make(folder: Path) -> None:
        options = {"runtimes": ["ort-cpu"], "dialects": ["standard"]}
        assert build(small_spec(), folder, name="small", **options).passed

    return shared.once("small", make)


@pytest.fixture
def new_processes() -> Iterator[None]:
    """Start processes without forking, for tests of the start and the end of processes."""
    with started_anew():
        yield


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return a function that runs the command line in the temporary folder of the test."""

    def call(*arguments: str | Path, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return run_command(list(map(str, arguments)), cwd)

    return call


IMPORT_TORCH = {"build", "compare", "--recompute", "--sizes", "--module"}


def run_command(arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line, forked from a process that has imported what it needs."""
    if forking():
        with_torch = not IMPORT_TORCH.isdisjoint(arguments)
        return run_forked(arguments, cwd, with_torch=with_torch)
    return subprocess.run(command(arguments), cwd=cwd, capture_output=True, text=True)


def command(arguments: Sequence[str | Path]) -> list[str]:
    """Return the command line of this environment."""
    return [sys.executable, "-m", "attn_export", *map(str, arguments)]
