"""Tests of mutants of the source: what is changed, and what a traced copy records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from measuring.code_mutants import RECORDER, chosen, mutants_of, planted, traced


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("x = a < b", {"x = (a <= b)"}),
        ("x = -a + b", {"x = (-a - b)", "x = a + b"}),
        ("x = a and not b", {"x = (a or not b)", "x = a and b"}),
        ("T = {'row': 2, 'a text': True}", {
            "T = {'row_': 2, 'a text': True}", "T = {'row': 3, 'a text': True}",
            "T = {'row': 2, 'a text': False}",
        }),
        ("def f(a: int = 1) -> 'C':\n    \"\"\"Doc.\"\"\"\n    return a", {
            "def f(a: int = 2) -> 'C':\n    \"\"\"Doc.\"\"\"\n    return a",
            "def f(a: int = 1) -> 'C':\n    \"\"\"Doc.\"\"\"\n    return None",
        }),
        ("f(é)", {"pass"}),
        ("import a\nx: int\ny = f'{a}'", set()),
    ],
)  # fmt: skip
def test_a_mutant_changes_one_place(source: str, changes: set[str]):
    mutants = list(mutants_of("f.py", source))
    assert {planted(source, mutant) for mutant in mutants} == changes
    assert len(mutants) == len(changes)


def test_a_sample_has_mutants_of_each_folder_and_depends_on_its_seed_alone():
    sources = {"a/x.py": "x = 1\n" * 500, "b/y.py": "y = 2\n" * 9}
    sample = chosen(sources, 50, seed=1)
    assert sample == chosen(sources, 50, seed=1) != chosen(sources, 50, seed=2)
    assert sum(mutant.file == "b/y.py" for mutant in sample) == 5


def test_a_traced_copy_records_functions_of_the_running_test_also_in_child_processes(
    tmp_path: Path,
):
    package = tmp_path / "attn_export"
    package.mkdir()
    source = (
        'def f():\n    """Doc."""\n    return 1\nclass C:\n    def g(self): return f()\nC().g()\n'
    )
    (package / "__init__.py").write_text(traced("x.py", source), encoding="utf-8")
    record = tmp_path / "ran.txt"
    (package / "_ran.py").write_text(RECORDER.format(file=str(record)), encoding="utf-8")
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import attn_export'])"
    env = {**os.environ, "PYTEST_CURRENT_TEST": "t.py::test_it (call)", "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", child], cwd=tmp_path, env=env, check=True)
    assert record.read_text().splitlines() == ["x.py:1\tt.py::test_it"]
