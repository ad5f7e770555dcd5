"""The exported graph with one buffer, written in place: prompts of other lengths, then tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_spec

from attn_export import Subject
from attn_export.attention import Attention
from attn_export.export.export import export
from attn_export.graph.checks import check_graph
from attn_export.graph.save import save_graph
from attn_export.runtimes.engines.ort_cpu import OrtCpu

CAPACITY, TOKENS = 16, 4
PROMPTS = (7, 1, 4)
"""Length of the prompt of each row of the batch; all are padded to the longest."""

HEADS = {"mha": 4, "mqa": 1, "gqa": 2}
FEATURES: dict[str, dict[str, object]] = {
    "rotary, window": {"rotary": "half", "window_left": 3},
    "alibi, relative bias": {
        "alibi": True, "relative_buckets": 4, "relative_max_distance": 6, "attn_mask": "none",
    },
    "sinks, learned key": {"sinks": True, "add_bias_kv": True, "rotary": "interleaved"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("feature", "heads"), [(f, h) for f, h in zip(FEATURES, HEADS, strict=True)]
)
@pytest.mark.every(3)
def test_each_row_is_its_own_sequence_at_every_step(feature: str, heads: str, tmp_path: Path):
    spec = small_spec(**{"cache": "in-place", **FEATURES[feature]}, num_kv_heads=HEADS[heads])
    subject = Subject.from_spec(spec)
    save_graph(export(subject).model, tmp_path / "model.onnx")
    assert check_graph(tmp_path / "model.onnx", subject.expected()) == []
    engine = OrtCpu().load(tmp_path / "model.onnx", threads=1)
    random = np.random.default_rng(0)
    queries = random.standard_normal((3, max(PROMPTS) + TOKENS, 32)).astype(np.float32)
    wanted = [alone(subject.module, row) for row in queries]

    shape = (3, spec.num_kv_heads, CAPACITY, spec.head_dim)
    buffers = {f"past_{what}": np.full(shape, 1e3, np.float32) for what in ("key", "value")}
    lengths, new = np.zeros(3, np.int64), queries[:, : max(PROMPTS)]
    for step in range(TOKENS):
        inputs = {"query": new, **buffers, "past_length": lengths}
        if spec.mask:
            inputs["attn_mask"] = np.ones((3, 1, 1, CAPACITY), np.bool_)
        got = engine.run(inputs, {})
        # A shorter prompt's padding is written, and written over by the tokens that follow.
        count = np.array(PROMPTS) if step == 0 else np.ones(3, np.int64)
        for row in range(3):
            own = wanted[row][lengths[row] : lengths[row] + count[row]]
            np.testing.assert_allclose(got["output"][row, : count[row]], own, rtol=2e-5, atol=5e-6)
        buffers = {f"past_{what}": got[f"present_{what}"] for what in ("key", "value")}
        lengths = lengths + count
        new = np.stack([queries[row, lengths[row] : lengths[row] + 1] for row in range(3)])


def alone(module: torch.nn.Module, row: np.ndarray) -> np.ndarray:
    """Return the layer's output for one whole sequence without a cache, `[len, E]`."""
    spec = dataclasses.replace(module.spec, cache="none", attn_mask="none")
    other = Attention(spec).eval()
    other.load_state_dict(module.state_dict())
    with torch.no_grad():
        return other(torch.from_numpy(row[None]))[0].numpy()
