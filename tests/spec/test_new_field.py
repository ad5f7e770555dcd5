"""A field of the spec takes three places: its row, where it acts, and the reference of tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PLACES = {
    "attn_export/spec/fields.py": (
        "    # Press et al. 2022.\n",
        '    limit: float | None = factor("queries are kept below it", None, tries=(0.4,))\n',
    ),
    "attn_export/attention/module.py": (
        "        attn_mask = self.score_bias(",
        "        q = q if self.spec.limit is None else q.clamp(max=self.spec.limit)\n",
    ),
    "tests/attention/numpy_attention.py": (
        "        new_k = _heads(",
        '        at["q"] = q = q if spec.limit is None else q.clip(max=spec.limit)\n',
    ),
}
"""Files with the place before which a line is added, and the line."""

TESTS = (
    "tests/attention/test_features.py::test_feature_equals_the_reference",
    "tests/spec/test_any_spec.py::test_any_spec_survives_toml",
)


@pytest.mark.extended
def test_a_field_of_three_lines_is_an_option_and_is_tested(tmp_path: Path):
    for folder in ("attn_export", "tests", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, (place, line) in PLACES.items():
        text = (tmp_path / file).read_text()
        assert text.count(place) >= 1
        (tmp_path / file).write_text(text.replace(place, line + place, 1))

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        return done.stdout

    assert "--limit" in run("attn_export", "build", "--help-all")
    passed = run("pytest", "-q", "-p", "no:cacheprovider", "-k", "limit or toml", *TESTS)
    assert "6 passed" in passed
