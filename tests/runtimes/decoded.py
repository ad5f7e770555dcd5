"""Bundles for tests of decoding, and the float64 outputs of their modules for whole sequences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_spec
from shared import once

from attn_export import DecodeSession, Subject, build
from attn_export.cases import fixed_cases
from attn_export.cases.coverage import Cover
from attn_export.commands import build as jobs_build
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import numpy_dtype

Arrays = dict[str, np.ndarray]

SPECS: dict[str, AttentionSpec] = {
    name: small_spec(cache="in-place", **changes)
    for name, changes in {
        "gqa, rotary, mask": {"rotary": "half"},
        "mqa, window, positions": {
            "num_kv_heads": 1, "rotary": "interleaved", "position_ids": True, "window_left": 40,
            "attn_mask": "none",
        },
        "mha, weights, float mask": {
            "num_kv_heads": 4, "v_head_dim": 6, "attn_weights": True,
            "attn_mask": "float[B,1,L,S]",
        },
        "mqa, float16": {"num_kv_heads": 1, "dtype": "float16", "attn_mask": "none"},
        "learned keys": {
            "add_bias_kv": True, "add_zero_attn": True, "sinks": True, "attn_weights": True,
        },
        "bfloat16": {"dtype": "bfloat16", "attn_mask": "none"},
        "gqa, window, float16": {
            "embed_dim": 64, "rotary": "half", "window_left": 40, "dtype": "float16",
            "attn_mask": "none",
        },
        "not causal": {"causal": False, "attn_mask": "none"},
        "plain": {"embed_dim": 16, "num_kv_heads": 4, "attn_mask": "none"},
    }.items()
}  # fmt: skip

DIALECTS = {
    "gqa, window, float16": ["standard", "cuda"],
    "gqa, rotary, mask": ["standard", "portable", "ort"],
    "mqa, window, positions": ["standard", "portable", "ort"],
}
JUDGED = "mha, weights, float mask"
"""The spec whose bundle is built with a whole decode, in two runtimes."""


def bundle_of(name: str) -> Path:
    """Return a bundle of one of `SPECS`, built once for all processes of the tests."""

    return once(f"decoding/{list(SPECS).index(name)}", lambda folder: _build(name, folder))


def _build(name: str, folder: Path) -> None:
    """Build a bundle; with few cases if it has no whole decode."""
    whole = name == JUDGED
    with pytest.MonkeyPatch.context() as patch:
        if not whole:
            patch.setattr(Cover, "choose", lambda *_, **__: [])
            patch.setattr(fixed_cases, "_decode_case", lambda *_: (None, ""))
            patch.setattr(jobs_build, "_judge_in_float32", lambda *_: None)
        few = DIALECTS.get(name, ["standard", "ort"])
        report = build(
            SPECS[name], folder, dialects=["all"] if whole else few,
            runtimes=["ort-cpu", "onnx-reference"] if whole else ["ort-cpu"],
        )  # fmt: skip
    assert report.passed


@functools.cache
def subject_of(name: str) -> Subject:
    return Subject.from_spec(SPECS[name])


def whole(name: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """Return the module's float64 outputs for a sequence from its start."""
    subject = subject_of(name)
    B, T = inputs["query"].shape[:2]
    spec = subject.spec
    empty = {n: (B, spec.num_kv_heads, T, d) for n, d in (
        ("past_key", spec.head_dim), ("past_value", spec.v_head_dim),
    )}  # fmt: skip
    given = {n: torch.from_numpy(x.astype(np.float64) if x.dtype.kind not in "bi" else x)
             for n, x in inputs.items()}  # fmt: skip
    given |= {n: torch.zeros(shape, dtype=torch.float64) for n, shape in empty.items()}
    given["past_length"] = torch.zeros(B, dtype=torch.int64)
    with torch.inference_mode():
        found = subject.call(_precise(name), given)
    return {n: x.numpy() for n, x in found.items()}


@functools.cache
def _precise(name: str) -> torch.nn.Module:
    return Subject.from_spec(SPECS[name]).module.double()


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A batch of random sequences, from which pieces can be taken."""

    name: str
    inputs: Arrays

    @classmethod
    def random(cls, name: str, batch: int, tokens: int, seed: int = 0) -> Sequence:
        spec, rng = SPECS[name], np.random.default_rng(seed)
        dtype = numpy_dtype(spec.dtype)
        inputs = {"query": rng.standard_normal((batch, tokens, spec.embed_dim)).astype(dtype)}
        if spec.mask:
            rows = tokens if "L" in spec.mask.axes else 1
            shown = rng.random((batch, 1, rows, tokens)) < 0.7
            shown[..., 0] = True
            scores = rng.standard_normal(shown.shape).astype(dtype)
            is_bool = spec.mask.dtype == "bool"
            inputs["attn_mask"] = shown if is_bool else np.where(shown, scores, dtype.type("-inf"))
        if spec.position_ids:
            inputs["position_ids"] = rng.integers(0, 500, (batch, tokens))
        return cls(name, inputs)

    def piece(self, start: int, stop: int) -> Arrays:
        """Return the inputs of some tokens; masks cover the keys up to the last token."""
        piece = {n: x[:, start:stop] for n, x in self.inputs.items() if n != "attn_mask"}
        if "attn_mask" in self.inputs:
            mask = self.inputs["attn_mask"][..., :stop]
            piece["attn_mask"] = mask if mask.shape[2] == 1 else mask[:, :, start:stop]
        return piece

    def reference(self) -> Arrays:
        return whole(self.name, self.inputs)


def close(name: str, actual: np.ndarray, wanted: np.ndarray) -> None:
    """Assert equality within the rounding of the spec's type, for values of the order 1."""
    assert actual.dtype == numpy_dtype(SPECS[name].dtype)
    allowed = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 4e-2}[SPECS[name].dtype]
    np.testing.assert_allclose(actual.astype(np.float64), wanted, rtol=allowed, atol=allowed)


def open_session(
    name: str, dialect: str | None = None, block: int = 32, **options: int
) -> DecodeSession:
    return DecodeSession(bundle_of(name), dialect=dialect, block=block, threads=1, **options)
