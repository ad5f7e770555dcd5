"""The exported graph, fed in pieces: prefill, tokens, a chunk of several, with left padding."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import small_spec
from shared import extended

from attn_export import AttentionSpec, build
from attn_export.runtimes.engines.ort_cpu import OrtCpu

TOTAL, PADDING = 9, np.array([0, 2, 5])
FEATURES: dict[str, dict[str, object]] = {
    "rotary, gqa": {"rotary": "half", "num_kv_heads": 2},
    "rotary, window, mqa": {"rotary": "interleaved", "window_left": 3, "num_kv_heads": 1},
    "position ids, sinks, mha": {
        "rotary": "half", "position_ids": True, "sinks": True, "num_kv_heads": 4,
    },
    "position ids, sinks, gqa": {
        "rotary": "half", "position_ids": True, "sinks": True, "num_kv_heads": 2,
    },
    "alibi, window, gqa": {"alibi": True, "window_left": 4, "num_kv_heads": 2},
    "alibi, window, mha": {"alibi": True, "window_left": 4, "num_kv_heads": 4},
    "relative bias, learned key, mqa": {
        "relative_buckets": 4, "relative_max_distance": 6, "add_bias_kv": True, "num_kv_heads": 1,
    },
}  # fmt: skip
"""Features of keys of the past, with several numbers of heads that share them."""
DEFAULT = {list(FEATURES)[number] for number in (0, 3, 6)}


@pytest.mark.parametrize("name", extended(FEATURES, lambda name: name in DEFAULT))
@pytest.mark.every(3)
def test_pieces_equal_the_whole_at_every_step(name: str, tmp_path: Path):
    spec = small_spec(**FEATURES[name])
    assert build(spec, tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"]).passed
    engine = OrtCpu().load(tmp_path / "b" / "model.onnx", threads=1)
    whole = whole_sequence(spec)
    empty = {
        f"past_{what}": np.zeros((3, spec.num_kv_heads, 0, spec.head_dim), np.float32)
        for what in ("key", "value")
    }
    wanted = engine.run({**whole, **empty}, {})
    past = empty
    for start, stop in pairwise((0, 4, 5, 6, 9)):
        got = engine.run(piece_of(whole, past, start, stop), {})
        past = {f"past_{what}": got[f"present_{what}"] for what in ("key", "value")}
        close(got["output"], wanted["output"][:, start:stop])
        close(got["present_key"], wanted["present_key"][:, :, :stop])
        close(got["present_value"], wanted["present_value"][:, :, :stop])


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


def whole_sequence(spec: AttentionSpec) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    inputs = {
        "query": random.standard_normal((3, TOTAL, spec.embed_dim)).astype(np.float32),
        "attn_mask": (np.arange(TOTAL) >= PADDING[:, None])[:, None, None],
    }
    if spec.position_ids:
        inputs["position_ids"] = np.maximum(np.arange(TOTAL) - PADDING[:, None], 0)
    return inputs


def piece_of(
    whole: dict[str, np.ndarray], past: dict[str, np.ndarray], start: int, stop: int
) -> dict[str, np.ndarray]:
    along_queries = {n: x[:, start:stop] for n, x in whole.items() if n != "attn_mask"}
    return {**along_queries, "attn_mask": whole["attn_mask"][..., :stop], **past}
