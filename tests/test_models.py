"""The specs of `models/`, built at their real dimensions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT, interface_of
from shared import extended

from attn_export import AttentionSpec, build, verify
from attn_export.bundle.manifest import read_bundle
from attn_export.cases.plan import plan_cases
from attn_export.commands.check import check

SPECS = sorted((ROOT / "models").glob("*.toml"))
LARGE = {"llama-3-8b", "falcon-7b", "gpt-oss-20b", "mistral-7b", "phi-3-mini"}
FAR = {
    "gpt-oss-20b", "t5-base-decoder", "gemma-3-1b", "qwen2-0.5b", "falcon-7b", "mla",
    "deepseek-v2-lite",
}  # fmt: skip
"""Models with a case of distant keys: beyond their window or last bucket, or, where the caches are
small enough, beyond the positions that float16 or bfloat16 counts."""
IN_ALL_DIALECTS = {"gqa-in-place", "mqa", "gpt2", "llama-3.2-1b", "whisper-small-encoder"}
"""Models built in all dialects here. `scripts/build_models` does so for all models."""
TOO_FAR = {"gemma-2-2b", "mistral-7b", "phi-3-mini"}
"""Models whose windows are too long for such a case."""
DEFAULT = {"qwen2-0.5b"}
"""The model that is tested by default, of real dimensions; the README builds another."""
BY_SCRIPT = LARGE - {"phi-3-mini"}
"""Large models that only `scripts/build_models` builds, because phi-3-mini covers them here."""


def test_the_models_are_the_ones_that_the_project_promises():
    assert {path.stem for path in SPECS} == LARGE | {
        "mha", "mqa", "gqa", "mla", "gqa-in-place", "cross", "bert-base",
        "whisper-small-cross", "gpt2",
        "qwen3-0.6b", "deepseek-v2-lite",
        "gemma-2-2b", "gpt-neox-410m", "bloom-560m", "t5-base-decoder", "qwen2-0.5b",
        "llama-3.2-1b", "gemma-3-1b", "bart-base-cross", "whisper-small-encoder",
    }  # fmt: skip


@pytest.mark.parametrize(
    "path",
    extended(
        [path for path in SPECS if path.stem not in BY_SCRIPT], lambda path: path.stem in DEFAULT
    ),
    ids=lambda path: path.stem,
)
@pytest.mark.every(3)
def test_a_model_passes_and_its_bundle_is_whole(path: Path, tmp_path: Path):
    spec = AttentionSpec.from_toml(path)
    dialects = ["all"] if path.stem in IN_ALL_DIALECTS else ["standard"]
    report = build(
        spec, tmp_path / path.stem, name=path.stem, runtimes=["ort-cpu"], dialects=dialects
    )
    assert report.passed
    cases = {verdict.case for verdict in report.verdicts}
    assert len(cases) >= 34
    assert sum(case.startswith("shape_") for case in cases) >= 7
    for graph in (tmp_path / path.stem).glob("*.onnx"):
        assert check(graph) == []
    if path.stem in LARGE | IN_ALL_DIALECTS:
        assert verify(tmp_path / path.stem, runtimes=["ort-cpu"]).passed
    files = read_bundle(tmp_path / path.stem).files
    assert ("weights.safetensors" in files) == (path.stem in LARGE | IN_ALL_DIALECTS)
    golden = tmp_path / path.stem / "golden"
    assert sum(f.stat().st_size for f in golden.rglob("*.pb")) <= 33 * 2**20
    assert ("far_keys" in cases) == (path.stem in FAR)
    notes = " ".join(json.loads((tmp_path / path.stem / "report.json").read_text())["notes"])
    assert ("no case reaches the end of the window" in notes) == (path.stem in TOO_FAR)
    plan = plan_cases(interface_of(spec))
    missed = any("limited in size" in note for note in plan.notes)
    assert ("limited in size" in notes) == missed
