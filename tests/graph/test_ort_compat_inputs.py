"""Corrections of batches, scales and rotary caches that ONNX Runtime refuses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from attention_graphs import (
    D,
    H,
    attention_model,
    check_against_torch,
    draw,
    named,
    qkv,
    run_ort,
    torch_attention,
)
from ir_graphs import model_of, node_of, operators, value

from attn_export.graph import ort_compat

B, L = "batch", "query_len"

# -- batches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("single", ["q", "k", "v", "kv"])
def test_a_batch_of_1_is_repeated_for_the_others(single):
    inputs = [value(v.name, 1 if v.name in single else B, *v.shape[1:]) for v in qkv()]
    model = attention_model(inputs=inputs)
    with pytest.raises(Exception, match=r"inconsistent batch_size|dimension|batch"):
        run_ort(model, draw(model, named(2, 3, 5)))
    ort_compat.spread_batches(model)
    expands = operators(model).count("Expand")
    assert expands == len(single)
    for sizes in [(2, 3, 5), (1, 1, 1), (3, 1, 4)]:
        given = draw(model, named(*sizes))
        whole = {n: np.broadcast_to(a, (sizes[0], *a.shape[1:])).copy() for n, a in given.items()}
        np.testing.assert_allclose(run_ort(model, given)[0], torch_attention(whole), atol=2e-6)


def test_equal_batches_are_left_alone():
    for batch in (1, B):
        model = attention_model(inputs=[value(v.name, batch, *v.shape[1:]) for v in qkv()])
        ort_compat.spread_batches(model)
        assert operators(model) == ["Attention"]


# -- scales -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -0.3, -2.0])
def test_a_scale_that_is_not_positive_moves_into_the_query(scale):
    model = attention_model(attributes={"scale": scale})
    with pytest.raises(Exception, match="scale must be greater than 0"):
        run_ort(model, draw(model, named(2, 3, 5)))
    ort_compat.make_scales_positive(model)
    assert operators(model) == ["Mul", "Attention"]
    check_against_torch(model, scale=scale)


@pytest.mark.parametrize("attributes", [{}, {"scale": 0.3}])
def test_a_positive_scale_stays(attributes):
    model = attention_model(attributes=attributes)
    ort_compat.make_scales_positive(model)
    assert operators(model) == ["Attention"]
    assert node_of(model, "Attention").attributes.get_float("scale", 0) == pytest.approx(
        attributes.get("scale", 0)
    )


# -- rotary caches ----------------------------------------------------------------------------


def rotary_model(batch: str | int, *, rank: int = 4) -> ir.Model:
    shape = [B, H, L, D] if rank == 4 else [B, L, H * D]
    inputs = [value("x", *shape), *(value(n, batch, L, D // 2) for n in ("cos", "sin"))]
    y = value("y", *shape)
    node = ir.node("RotaryEmbedding", inputs, {"num_heads": H} if rank == 3 else {}, outputs=[y])
    return model_of(inputs, [y], [node])


@pytest.mark.parametrize("rank", [3, 4])
def test_rotary_caches_of_batch_1_are_repeated_for_the_batch(rank):
    model, whole = rotary_model(1, rank=rank), rotary_model(B, rank=rank)
    with pytest.raises(Exception, match="expected to have the same shape"):
        run_ort(model, draw(model, named(2, 3, 5)))
    ort_compat.spread_rotary_caches(model)
    assert operators(model) == ["Shape", "Concat", "Expand"] * 2 + ["RotaryEmbedding"]
    for batch, length in [(2, 3), (1, 1), (3, 1), (1, 5)]:
        given = draw(model, named(batch, length, 1))
        caches = {n: np.repeat(given[n], batch, axis=0) for n in ("cos", "sin")}
        np.testing.assert_array_equal(run_ort(model, given), run_ort(whole, {**given, **caches}))


def test_rotary_caches_with_the_batch_or_with_positions_stay():
    model = rotary_model(B)
    ort_compat.spread_rotary_caches(model)
    assert operators(model) == ["RotaryEmbedding"]
    model = rotary_model(1)
    node = node_of(model, "RotaryEmbedding")
    node.resize_inputs(4)
    node.replace_input_with(3, value("positions", B, L, dtype=ir.DataType.INT64))
    ort_compat.spread_rotary_caches(model)
    assert operators(model) == ["RotaryEmbedding"]
