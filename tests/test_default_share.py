"""Tests of `default_share`, the selection of tests without --all, in a pytest run of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, small_spec
from default_share import long_cases

from attn_export import Subject

CONFTEST = """
from default_share import default_share

def pytest_configure(config):
    config.addinivalue_line("markers", "extended:")
    config.addinivalue_line("markers", "every(n):")

def pytest_collection_modifyitems(items):
    items[:], _ = default_share(items)
"""
TESTS = """
import pytest

@pytest.mark.every(3)
def test_one(): ...

@pytest.mark.every(3)
@pytest.mark.parametrize("x", range(8))
def test_axis(x): ...

@pytest.mark.every(2)
@pytest.mark.parametrize("x", "abc")
@pytest.mark.parametrize("y", "de")
def test_axes(x, y): ...

@pytest.mark.every(2)
@pytest.mark.parametrize(("x", "y"), [(1, 2), (3, 4), (5, 6)])
def test_pairs(x, y): ...

@pytest.mark.extended
def test_long(): ...

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_plain(x): ...
"""
RUN = [
    "test_one", "test_axis[0]", "test_axis[3]", "test_axis[6]",
    "test_axes[d-a]", "test_axes[d-b]", "test_axes[d-c]", "test_axes[e-a]", "test_axes[e-b]",
    "test_pairs[1-2]", "test_pairs[5-6]", "test_plain[1]",
]  # fmt: skip


def test_every_value_of_every_parameter_occurs_and_of_one_parameter_every_nth(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_x.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT / "tests"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    found = [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]
    assert found == RUN, done.stdout + done.stderr


def longest_sequence() -> int:
    """Return the largest number of queries in the cases of a small layer."""
    cases = Subject.from_spec(small_spec()).plan().cases
    return max(case.sizes["query_len"] for case in cases)


def test_cases_of_many_queries_are_left_to_all_and_to_long_cases(request: pytest.FixtureRequest):
    by_default = 1025 if request.config.getoption("--all") else 49
    assert longest_sequence() == by_default
    with long_cases():
        assert longest_sequence() == 1025
    assert longest_sequence() == by_default
