"""A float16 cache of a float32 layer: build, verify, decode and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import small_spec
from shared import extended, judged_graphs, passed_bundle

from attn_export import Subject, verify
from attn_export.errors import SpecError, WeightsError
from attn_export.graph.load import load_model
from attn_export.parts.low_precision.near_ties import TieFinder
from attn_export.parts.low_precision.rounding_sites import Numbers, Site
from attn_export.results import Case
from attn_export.runtimes.decode_session import DecodeSession
from attn_export.truth.oracle import Oracle

pytestmark = pytest.mark.xdist_group("test_float16_cache")  # its bundles are shared

SPECS = {
    "grouped": {"attn_mask": "none", "rotary": "half"},
    "one head for each": {"num_kv_heads": 4},
    "with norms, sinks and a cap": {"qk_norm": "rms", "sinks": True, "softcap": 5.0},
    "with learned keys": {"add_bias_kv": True, "causal": False, "attn_weights": True},
    "mask of heads": {"attn_mask": "float[H,1,S]", "num_kv_heads": 4},
    "with int8 weights and a window": {
        "weights_dtype": "int8", "window_left": 3, "packed_qkv": True,
    },
    "narrow values": {"attn_mask": "none", "v_head_dim": 3},
    "one head for all": {"num_kv_heads": 1, "attn_mask": "none", "head_dim": 16},
}  # fmt: skip
KEPT = ("grouped", "with learned keys")


def spec_of(name: str):
    return small_spec(**{"cache": "in-place", "kv_dtype": "float16", **SPECS[name]})


def bundle_of(name: str) -> Path:
    return passed_bundle(f"float16-cache/{name}", spec_of(name))


@pytest.mark.parametrize("name", extended(SPECS, lambda name: name in KEPT))
def test_every_form_keeps_float16(name: str):
    folder = bundle_of(name)
    assert judged_graphs(folder) >= {"model.onnx", "model.portable.onnx", "model.ort.onnx"}
    for path in folder.glob("*.onnx"):
        ends = load_model(path).graph
        types = {e.name: e.type.tensor_type.elem_type for e in (*ends.input, *ends.output)}
        of_cache = {t for n, t in types.items() if n.startswith(("past_", "present_")) and t != 7}
        assert of_cache == {onnx.TensorProto.FLOAT16}
        assert types["query"] == types["output"] == onnx.TensorProto.FLOAT


def test_prefill_and_decode_have_the_kernels_of_float32_caches():
    folder = bundle_of("grouped")
    prefill, decode = (
        {n.op_type for n in load_model(folder / f"model.ort{name}.onnx").graph.node}
        for name in ("", ".decode")
    )
    assert "If" in prefill, "an empty cache is left to GroupQueryAttention"
    assert "Attention" not in decode


def test_the_report_states_both_truths():
    report = verify(bundle_of("grouped"), runtimes=["ort-cpu"])
    assert report.quality is not None
    assert not report.quality.missed
    of_parts = {each.part: each.sqnr for each in report.quality.weights}
    assert of_parts.keys() == {"cached keys", "cached values"}
    assert min(of_parts.values()) > 66, "half a unit in the last place of 11 digits is that far"
    assert all(each.share == 0 for each in report.quality.splits), "float16 clips nothing"


def test_a_session_decodes():
    session = DecodeSession(bundle_of("grouped"))
    random = np.random.default_rng(0)
    tokens = random.standard_normal((2, 9, spec_of("grouped").embed_dim), np.float32)
    outputs = [session.prefill(query=tokens[:, :5])["output"]]
    outputs += [session.step(query=tokens[:, n : n + 1])["output"] for n in range(5, 9)]
    whole = DecodeSession(bundle_of("grouped")).prefill(query=tokens)["output"]
    # A value near a tie may be kept as its neighbour: a step of 2^-11 of it.
    assert np.abs(np.concatenate(outputs, axis=1) - whole).max() < 1e-3


def uncertain(oracle: Oracle, case: Case) -> tuple[Site, Numbers]:
    """Return the new keys and values of a case, and masks of those near a tie."""
    site, margins = TieFinder(oracle.precise, oracle.truth).cache_and_margins(case)
    return site, site.near(margins)


@pytest.mark.parametrize(
    ("name", "limit"),
    # float32 angles of rotary at 300 are as exact as a tenth of a step: more keys are uncertain
    [("one head for each", 5e-5), ("grouped", 1e-3)],
)
def test_large_keys_are_certain_and_small_ones_either_neighbour(name: str, limit: float):
    oracle = Oracle(Subject.from_spec(spec_of(name)))
    (case,) = (c for c in oracle.subject.plan().cases if c.kind == "decode")
    moved = oracle.move_off_ties(case)
    (_, was_near), (after, near) = (uncertain(oracle, case) for case in (case, moved))
    assert sum(int(x.sum()) for x in near) < sum(int(x.sum()) for x in was_near)
    for x, is_near in zip(after.values, near, strict=True):
        assert x[is_near].abs().median() < 0.2 * x.abs().median()
    golden = oracle.golden(moved)
    for output in ("present_key", "present_value"):
        assert golden.expected[output].dtype == np.float16
        assert golden.allowed[output].whole < limit, "rounding itself changes them by 2e-4"
    assert golden.allowed["output"].whole < 5e-5


def test_inputs_that_overflow_float16_are_scaled_down():
    oracle = Oracle(Subject.from_spec(spec_of("grouped")))
    loud = [case for case in oracle.subject.plan().cases if case.may_overflow]
    for case in loud:
        golden = oracle.usable(case)
        assert not golden.unusable, (case.name, golden.unusable)
        assert np.isfinite(golden.expected["output"]).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cache": "append"}, ["kv_dtype = 'float16'", 'cache = "in-place"']),
        ({"dtype": "float16"}, ["kv_dtype = 'float16'", "dtype = 'float16'", "leave dtype out"]),
        ({"kv_scale": "per-channel"}, ["kv_scale = 'per-channel'", "to one of int8, int4"]),
        (
            {"weights_dtype": "int8", "activations": "dynamic-int8"},
            ["kv_dtype = 'float16'", "activations = 'dynamic-int8'", "none, int8 or int4"],
        ),
    ],
    ids=lambda x: "" if isinstance(x, list) else next(iter(x)),
)  # fmt: skip
def test_a_spec_that_contradicts_itself_is_refused(fields: dict[str, object], words: list[str]):
    with pytest.raises(SpecError) as refusal:
        small_spec(**{"cache": "in-place", "kv_dtype": "float16", "attn_mask": "none", **fields})
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_it_has_no_scales(tmp_path: Path):
    path = tmp_path / "scales.npz"
    np.savez(path, k_scale=np.float32(1), v_scale=np.float32(1))
    with pytest.raises(WeightsError, match="kv_dtype = 'float16'; set kv_dtype to int8 or int4"):
        Subject.from_spec(spec_of("grouped"), kv_scales=path)
