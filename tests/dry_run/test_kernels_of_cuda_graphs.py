"""Kernels that the dialect `cuda` launches in dry runs, against the goals for one layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import small_spec
from shared import extended

from attn_export.dialect_names import CUDA
from attn_export.dry_run.architectures import architectures_named
from attn_export.dry_run.observed import Step
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph.lower import DECODE, Lowered, lower
from attn_export.graph.save import save_graphs
from attn_export.jobs.dry_run import observed

pytestmark = pytest.mark.usefixtures("need_dry_run")

SPECS: dict[str, tuple[dict[str, object], int]] = {
    "biases": ({"bias": True}, 8),
    "rotary, norms, window": (
        {"bias": False, "rotary": "half", "qk_norm": "rms", "window_left": 511}, 9,
    ),
    "rotary, one head of keys": ({"bias": False, "rotary": "half", "num_kv_heads": 1}, 9),
}  # fmt: skip
"""Fields beside float16, a cache in place and heads of 64, and the most launches of a step."""

DEFAULT = {("rotary, norms, window", "sm_80")}


def ran(graph: Lowered, folder: Path, arch: str, sizes: tuple[int, int, int]) -> Step:
    (card,) = architectures_named([arch])
    found = observed(folder, graph.file, card, sizes)
    assert not found.refused
    assert not [node for node in found.elsewhere if node.is_attention]
    (step,) = found.steps
    assert not step.stopped
    return step


@pytest.mark.parametrize(
    "pair",
    extended([(name, arch) for name in SPECS for arch in ("sm_80", "sm_90")], DEFAULT.__contains__),
    ids=str,
)
def test_a_step_launches_few_kernels_and_never_waits(pair: tuple[str, str], tmp_path: Path):
    name, arch = pair
    fields, most = SPECS[name]
    usual = {"embed_dim": 256, "attn_mask": "none", "cache": "in-place", "dtype": "float16"}
    forms = lower(export(Subject.from_spec(small_spec(**(usual | fields)))).model, CUDA)
    save_graphs({form.file.name: form.model for form in forms.values()}, tmp_path)
    step = ran(forms[DECODE], tmp_path, arch, (2, 1, 1023))
    assert step.attention == ("XQA",)
    assert step.launches <= most
    assert step.copied(by_nodes=True) == 0
    assert not step.waits
    assert not step.cache_copies
    prefill = ran(forms[""], tmp_path, arch, (1, 256, 0))
    assert "window" in name or "flash attention" in prefill.attention[0]
