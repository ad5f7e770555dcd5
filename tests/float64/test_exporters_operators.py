"""Operators that exporters of whole models write, in float64 beside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from exporters_nodes import (
    ALL,
    PLACES,
    REST,
    ROTARY,
    Array,
    D,
    Operands,
    X,
    grouped,
    int32,
    model_of,
)

from attn_export.float64.evaluate import Evaluation, NotComputedError

ROUNDED = 5e-6
"""The largest difference of float32, of numbers of about 1."""


def run(model: onnx.ModelProto, operands: Operands) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {n: a for n, a in operands.items() if a is not None})


def computed(case: tuple[str, str, Operands, Mapping[str, Any], str]) -> Mapping[str, Any]:
    return Evaluation(model_of(*case)).values({n: a for n, a in case[2].items() if a is not None})


def valid(
    name: str, array: Array, operands: Operands, attributes: Mapping[str, Any]
) -> list[Array]:
    """Return an output; a cache in place up to the last token of each batch element."""
    counts, past = (operands.get(n) for n in ("seqlens_k", "past_key"))
    if counts is None or past is None or name == "y" or past.shape[2] != array.shape[2]:
        return [array]
    ends = counts + 1
    if attributes.get("sliding_window_cache"):
        ends = np.where(ends > 6, ends - 3 * -(-(ends - 6) // 3), ends)  # 6 tokens, 4 in sight
    return [x[:, :end] for x, end in zip(array, ends, strict=True)]


@pytest.mark.parametrize("name", ALL)
def test_the_meaning_is_that_of_onnx_runtime(name: str):
    _, _, operands, attributes, outputs = ALL[name]
    values = computed(ALL[name])
    for output, expected in zip(outputs.split(), run(model_of(*ALL[name]), operands), strict=True):
        found = values[output]
        dtype = np.float64 if expected.dtype.kind == "f" else expected.dtype
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        pair = (valid(output, x, operands, attributes) for x in (found, expected))
        for parts in zip(*pair, strict=True):
            np.testing.assert_allclose(*parts, ROUNDED, ROUNDED)


@pytest.mark.parametrize(
    ("of_case", "operands", "attributes", "says"),
    [
        ("RotaryEmbedding", {}, {"is_packed_batching": 1}, "with is_packed_batching"),
        ("GroupQueryAttention, rotary", {"13": X, "14": X, "15": X}, {}, "with input 14"),
        ("GroupQueryAttention, prompt", {}, {"qk_output": 1}, "with qk_output"),
        ("GroupQueryAttention, position", {"position_ids": PLACES[:, :1] - 1}, {}, "before 0"),
        ("GroupQueryAttention, one token", {"seqlens_k": int32(5, -1)}, {}, "seqlens_k counts"),
        ("MultiHeadAttention, all keys", {"key": None, "value": None}, {}, "packed queries"),
        ("MultiHeadAttention, lengths", {"key_padding_mask": int32(*range(8))}, {}, "padding of"),
        ("MoE", {}, {"activation_type": "gelu"}, "MoE with the activation gelu"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(
    of_case: str, operands: Operands, attributes: Mapping[str, Any], says: str
):
    op, domain, whole, known, outputs = ALL[of_case]
    whole = {**whole, **operands}
    evaluation = Evaluation(model_of(op, domain, whole, {**known, **attributes}, outputs))
    with pytest.raises(NotComputedError, match=f"^{op} node cannot be computed: .*{says}"):
        evaluation.values({n: a for n, a in whole.items() if a is not None})


def test_onnx_runtime_gives_all_rows_of_a_prompt_the_positions_of_the_first():
    places = np.array([[5, 6, 7, 8], [0, 0, 0, 1]])
    op, domain, operands, attributes, outputs = grouped(4, [0, 0], **ROTARY, position_ids=places)
    model = model_of(op, domain, operands, attributes, outputs)
    evaluation = Evaluation(model)
    values = reference = evaluation.values({n: a for n, a in operands.items() if a is not None})
    wrong = evaluation.attention(
        evaluation.nodes[0], values, {"positions": lambda positions, _: positions[[0, 0]]}
    )
    found = dict(zip(outputs.split(), run(model, operands), strict=True))
    for name in ("y", "keys"):
        assert np.abs(found[name] - reference[name])[1].max() > 0.1
    for name, array in found.items():
        np.testing.assert_allclose(array, wrong[name], ROUNDED, ROUNDED)


def test_statistics_that_no_runtime_gives_are_no_values():
    op, domain, operands, attributes, _ = REST["SkipLayerNormalization with biases"]
    values = computed((op, domain, operands, attributes, "y mean inverse sum"))
    assert [name for name in ("mean", "inverse") if isinstance(values[name], Array)] == []
    assert computed(REST["SkipLayerNormalization"])[""] is None


def test_a_cache_in_place_keeps_what_lies_behind_its_tokens():
    """ONNX Runtime keeps it if both caches share a buffer, and writes zeros if they do not."""
    case = ALL["GroupQueryAttention, cache in place"]
    kept = computed(case)["keys"][:, :, case[2]["seqlens_k"].max() + 1 :]
    np.testing.assert_array_equal(kept, case[2]["past_key"][:, :, -kept.shape[2] :])
    assert kept.shape[2] == 3


def test_a_table_of_more_channels_is_read_row_by_row():
    """ONNX Runtime reads it as if its rows had the rotated channels alone."""
    case = op, domain, operands, attributes, outputs = REST["RotaryEmbedding of some channels"]
    wide = {
        name: np.tile(array, (1, D // 8)) if name.endswith("cache") else array
        for name, array in operands.items()
        if array is not None
    }
    read = computed((op, domain, wide, attributes, outputs))["y"]
    np.testing.assert_array_equal(read, computed(case)["y"])
    misread = run(model_of(op, domain, wide, attributes, outputs), wide)[0]
    assert np.abs(read - misread).max() > 0.1
