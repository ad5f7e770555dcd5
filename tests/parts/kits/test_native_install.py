"""Installation of `c` and `cpp` without the tools that it requires."""

from __future__ import annotations

from pathlib import Path

import pytest
from debian_archive import HEADERS

from attn_export.errors import RuntimeFailure
from attn_export.parts.installing import VARIABLE
from attn_export.parts.kits.native import install


def test_a_missing_compiler_is_said_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "home"))
    with pytest.raises(
        RuntimeFailure, match=r"there is no C compiler .*apt-get install g\+\+ cmake"
    ):
        install("c", lambda _: None)


def test_an_error_of_the_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "home"))
    headers = tmp_path / "home" / "onnxruntime" / "include"
    headers.mkdir(parents=True)
    for name in HEADERS:
        (headers / name).write_text("#error these are no headers\n")
    with pytest.raises(RuntimeFailure, match=r"cmake failed: .*these are no headers") as refused:
        install("c", lambda _: None)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "home" / "c").exists()
