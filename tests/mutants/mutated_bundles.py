"""The small bundles that are mutated: each feature is in one of them at least."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attn_export
from attn_export import build
from attn_export.bundle.manifest import MANIFEST
from attn_export.spec import AttentionSpec

PACKAGE = Path(attn_export.__file__).parent
_CACHE = {"causal": True, "cache": "append"}
_MQA = {"num_kv_heads": 1, **_CACHE, "attn_mask": "bool[B,1,1,S]"}

SPECS: Mapping[str, Mapping[str, object]] = {
    "mqa": _MQA,
    "mha": {"attn_mask": "float[B,H,L,S]", "attn_weights": True},
    "gqa": {
        "num_kv_heads": 2, **_CACHE, "attn_mask": "bool[B,1,L,S]", "rotary": "half",
        "position_ids": True,
    },
    "cross": {
        "num_kv_heads": 2, "cross": True, "kdim": 24, "vdim": 20, "attn_mask": "bool[B,1,1,S]",
    },
    "in-place": {"num_kv_heads": 2, "causal": True, "cache": "in-place", "rotary": "half"},
    "in-place-mask": {
        "num_kv_heads": 1, "causal": True, "cache": "in-place", "attn_mask": "float[B,1,1,S]",
    },
    "rich": {
        "num_kv_heads": 2, **_CACHE, "attn_mask": "bool[B,1,1,S]", "rotary": "interleaved",
        "sinks": True, "softcap": 10.0, "window_left": 5, "qk_norm": "rms",
    },
    "mqa-float16": {**_MQA, "dtype": "float16"},
    "mqa-bfloat16": {**_MQA, "dtype": "bfloat16"},
}  # fmt: skip


def spec_of(name: str) -> AttentionSpec:
    """Return the spec of a bundle."""
    return AttentionSpec.from_dict({"embed_dim": 32, "num_heads": 4, **SPECS[name]})


def built(name: str, folder: Path) -> Path:
    """Return a bundle in all dialects; it is built where it is not there, or older than we are."""
    place = folder / name
    manifest = place / MANIFEST
    newest = max(path.stat().st_mtime for path in PACKAGE.rglob("*.py"))
    if not manifest.exists() or manifest.stat().st_mtime < newest:
        report = build(spec_of(name), place, name=name, runtimes=["ort-cpu"])
        assert report.passed, f"the bundle {name} did not pass"
    return place
