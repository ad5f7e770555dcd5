"""Faults in how a cache of integers is written and read: truth 1 catches each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from block_faults import OF_BLOCKS
from cache_faults import ANY, OF_BYTES, OF_CHANNELS, OF_TENSORS, Fault, Graph, wrong_outputs
from conftest import small_spec
from named_causes import first_cause
from shared import extended, once, passed_bundle

from attn_export import build
from attn_export.explain.known import made_in
from attn_export.float64.evaluate import Evaluation
from attn_export.graph.load import load_model
from attn_export.parts.low_precision.in_caches import IN_INTEGER_CACHES
from attn_export.results import StoredCase

pytestmark = pytest.mark.xdist_group("test_planted_caches")  # its bundles are shared

MIXED = "quantised activations"
"""The kind that runs with --all only: by default `test_planted_activations` has such a cache."""
SPECS = {
    "per tensor": {"rotary": "half", "attn_mask": "none"},
    MIXED: {
        "weights_dtype": "int8", "activations": "dynamic-int8", "rotary": "half",
        "attn_mask": "none",
    },
    # as many heads as channels, so that scales may be transposed
    "by channel": {
        "kv_scale": "per-channel", "num_heads": 8, "num_kv_heads": 8, "head_dim": 8,
        "attn_mask": "none",
    },
    "packed": {"rotary": "half", "attn_mask": "none", "kv_dtype": "int4"},
    "packed by channel": {
        "kv_scale": "per-channel", "num_heads": 8, "num_kv_heads": 8, "head_dim": 8,
        "attn_mask": "none", "kv_dtype": "int4",
    },
    "by block": {
        "kv_scale": "per-block", "head_dim": 64, "rotary": "half", "attn_mask": "none",
        "kv_dtype": "int4",
    },
}  # fmt: skip
MORE = pytest.mark.extended
CASES = ("base", "changed_past_key", "decode_300")
LOUD = ("outliers", "large_logits", "sharp")
"""The first case of each of these contents is tried as well: only large values are clipped."""


SHARED = {"per tensor": "per tensor", "packed": "int4", "by block": "int4 by block"}
"""Names that specs have in `test_quantised_cache`, whose bundles they are."""


def bundle_of(kind: str) -> Path:
    spec = small_spec(**{"cache": "in-place", "kv_dtype": "int8", **SPECS[kind]})
    if kind in SHARED:
        return passed_bundle(f"quantised-cache/{SHARED[kind]}", spec)

    def make(folder: Path) -> None:
        options = {"runtimes": ["ort-cpu"], "dialects": ["standard"]}
        assert build(spec, folder, name="few bits", **options).passed

    return once(f"planted-caches/{kind.replace(' ', '-')}", make)


PLANTED = [
    *(("per tensor", name, fault) for name, fault in (ANY | OF_TENSORS).items()),
    *(("by channel", name, fault) for name, fault in (ANY | OF_CHANNELS).items()),
    *((MIXED, name, fault) for name, fault in (ANY | OF_TENSORS).items()),
    *(("packed", name, fault) for name, fault in OF_BYTES.items()),
    *(("by block", name, fault) for name, fault in OF_BLOCKS.items()),
    *(("packed by channel", name, fault) for name, fault in (OF_BYTES | OF_CHANNELS).items()),
]


def chosen(cases: Sequence[StoredCase]) -> list[StoredCase]:
    loud = [next(c for c in cases if c.name.startswith(content)) for content in LOUD]
    return [*(c for c in cases if c.name in CASES), *loud]


@pytest.mark.parametrize("kind", extended(SPECS, lambda kind: kind != MIXED))
@pytest.mark.every(3)
def test_a_cache_that_is_kept_rightly_passes(kind: str):
    assert wrong_outputs(bundle_of(kind), None, chosen) == 0


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [each if each[0] != MIXED else pytest.param(*each, marks=MORE) for each in PLANTED],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.every(6)
def test_a_cache_that_is_kept_wrongly_fails(kind: str, name: str, fault: Fault):
    assert wrong_outputs(bundle_of(kind), fault, chosen) > 0, name


# -- causes -------------------------------------------------------------------------------------

UNNAMED = {"rounded from 0.1 on, not 0.5", "one scale of 64 stale", "quantised twice"}
"""Faults with a number of their own: no mistake that is known gives the same outputs."""
CAUSES = {
    "stale scales when": "stale scales", "stale scales and": "stale scales",
    "stale scales": "cache scale", "block": "block scale", "bounds": "block bounds",
    "bytes of": "cache layout", "mixing": "key rotation", "scale of the": "scale axis",
    "scale": "cache scale", "zero": "zero point", "quantised twice": "quantised twice",
    "rounded": "rounding",
    "new tokens read": "rounding", "clipped": "clipped range", "not clipped": "clipped range",
    "neighbouring channels": "nibble order", "halves swapped": "nibble order",
    "sign lost": "signedness", "read as two's complement": "signedness", "": "cache layout",
}  # fmt: skip
"""The kind of the cause that `explain` names first, by the start of a fault's name."""

SAME_OUTPUTS = {
    ("quantised activations", "scale of values doubled where it is read"): "activation scale"
}
"""Causes of faults that give the outputs of an earlier mistake: doubled values double the scale of
the activations that the last projection rounds, and change no integer."""

OFTEN = {
    ("packed", "halves swapped"), ("by channel", "scale of the wrong axis"),
    ("packed by channel", "stale scales where they are read"), ("per tensor", "rounded down"),
    ("per tensor", "rounded from 0.1 on, not 0.5"), ("packed", "zero of 7 where it is written"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [each if each[:2] in OFTEN else pytest.param(*each, marks=MORE) for each in PLANTED],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_cause_is_named_first(kind: str, name: str, fault: Fault):
    folder = bundle_of(kind)
    right = load_model(folder / "model.onnx")
    graph = Graph(right)
    fault(graph)
    wanted = next(cause for start, cause in CAUSES.items() if name.startswith(start))
    wanted = SAME_OUTPUTS.get((kind, name), wanted)
    assert first_cause(folder, right, graph.proto) == ("" if name in UNNAMED else wanted)


@pytest.mark.parametrize(
    ("kind", "impossible"),
    [("per tensor", "byte"), ("packed", "once more"), ("packed", "to the range of 4 bits")],
)
def test_only_mistakes_that_the_type_of_a_cache_allows_are_tried(kind: str, impossible: str):
    evaluation = Evaluation.load(bundle_of(kind) / "model.onnx")
    effects = [made.effect for made in made_in(IN_INTEGER_CACHES, evaluation, {})]
    assert effects
    assert not [effect for effect in effects if impossible in effect]
