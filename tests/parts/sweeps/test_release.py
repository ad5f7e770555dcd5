"""Other releases of runtimes: their names, folders and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_export import verify
from attn_export.errors import UsageError
from attn_export.parts.installing import STAMP, VARIABLE
from attn_export.parts.sweeps.release import FOLDER, install, installed, published, release_of
from attn_export.runtimes.catalogue import runtime

BAD = [
    ("onnx-reference==1.0", "onnx-reference has no releases"),
    ("ort-cuda==1.0", "ort-cuda has no releases"),
    ("ort-cpu==", "is not a version"),
    ("ort-cpu==../../x", "is not a version"),
    ("ort-cpu==1.25.1.dev1", "is not a version"),
    ("ort-cpu==1.25.1 --index-url=x", "is not a version"),
    ("ort-cpu==" + "1" * 50, "is not a version"),
    ("ort-cpu@haswell==1.25.1", "unknown (CPU|runtime)"),
    ("nothing==1.0", "unknown runtime"),
]


@pytest.mark.parametrize(("name", "says"), BAD, ids=[name[:24] for name, _ in BAD])
def test_a_name_that_is_no_release_is_refused_in_one_line(name: str, says: str):
    with pytest.raises(UsageError, match=says) as error:
        runtime(name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) <= 300


def test_only_a_release_is_installed():
    with pytest.raises(UsageError, match="is not a release"):
        install("ort-cpu", print)
    with pytest.raises(UsageError, match="has no releases"):
        published("onnx-reference")


def test_a_release_that_is_not_installed_says_how_to_get_it(monkeypatch, tmp_path: Path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    kind = runtime("openvino==2025.1.0")
    assert kind.version() is None
    assert "run" in kind.unavailable()
    assert kind.unavailable().endswith("openvino==2025.1.0")
    assert installed() == []


def test_installed_releases_are_listed_with_the_oldest_first(monkeypatch, tmp_path: Path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for place in ("ort-cpu-1.9.0", "ort-cpu-1.28.0", "onnxruntime-web-1.30.0", "ort-cpu-evil"):
        (tmp_path / FOLDER / place).mkdir(parents=True)
        (tmp_path / FOLDER / place / STAMP).touch()
    (tmp_path / FOLDER / "ort-cpu-1.10.0").mkdir()  # without the stamp of a whole installation
    assert installed() == ["ort-cpu==1.9.0", "ort-cpu==1.28.0", "wasm==1.30.0", "webgpu==1.30.0"]
    assert release_of("ort-cpu==1.28.0") == ("ort-cpu", (1, 28, 0))
    assert release_of("ort-cpu") == ("ort-cpu", ())


def test_a_release_has_the_dialects_of_its_runtime_and_no_known_limits():
    kind, base = runtime("openvino==2025.1.0"), runtime("openvino")
    assert kind.dialects == base.dialects
    assert base.unsupported
    assert not kind.unsupported
    assert kind.measured == "2025.1.0"
    assert kind.in_turn


@pytest.mark.parametrize(
    ("version", "right"), [("1.27.0", False), ("1.28.0", True)], ids=["1.27", "1.28"]
)
def test_each_release_computes_by_its_own_kernels(version: str, right: bool, need, bundle: Path):
    """Compare rows of which all keys are masked, which are wrong before 1.28."""
    name = f"ort-cpu=={version}"
    need(name)
    report = verify(bundle, runtimes=[name])
    runs = [run for run in report.runs if run.runtime == name and run.outcome == "ran"]
    assert {run.facts["version"] for run in runs} == {version}
    wrong = {verdict.case for verdict in report.verdicts if verdict.status != "passed"}
    assert bool(wrong) is not right
