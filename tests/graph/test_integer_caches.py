"""Caches of integers are recognised by value, and not by the look of their nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import exported

from attn_export.graph.ir_helpers import constant_array, nodes_of
from attn_export.graph.lower.caches import QuantisedCache, quantised_cache
from attn_export.graph.lower.read import attentions_of

Edit = Callable[[ir.Model], None]


def model_of(kv_dtype: str, kv_scale: str = "per-tensor") -> ir.Model:
    fields = {"cache": "in-place", "attn_mask": "none", "rotary": "none"}
    return exported(kv_dtype=kv_dtype, kv_scale=kv_scale, **fields)[1].model.clone()


def cache_of(model: ir.Model) -> QuantisedCache | None:
    (attention,) = attentions_of(model)
    return quantised_cache(attention)


def other(op_type: str, new: str) -> Edit:
    def edit(model: ir.Model) -> None:
        for node in nodes_of(model, op_type):
            node.op_type = new

    return edit


def times(op_type: str, index: int, factor: float) -> Edit:
    """Multiply a constant input of the nodes of an operator."""

    def edit(model: ir.Model) -> None:
        for node in nodes_of(model, op_type):
            array = constant_array(node.inputs[index])
            if array is not None and array.size:
                changed = (array * factor).astype(array.dtype)
                node.replace_input_with(index, ir.val("forged", const_value=ir.tensor(changed)))

    return edit


def swapped_nibbles(model: ir.Model) -> None:
    for node in nodes_of(model, "Gather"):
        table = constant_array(node.inputs[0])
        if table is not None and table.shape == (256, 2):
            swapped = ir.tensor(np.ascontiguousarray(table[:, ::-1]))
            node.replace_input_with(0, ir.val("forged", const_value=swapped))


FORGED: dict[str, tuple[str, Edit]] = {
    "it rounds down": ("int4", other("Round", "Floor")),
    "a lower end": ("int4", times("Max", 1, 0.5)),
    "another offset": ("int4", times("Min", 1, 0.9)),
    "swapped nibbles": ("int4", swapped_nibbles),
    "it reads by another scale": ("int8", times("DequantizeLinear", 1, 1.01)),
    "it writes by another scale": ("int8", times("QuantizeLinear", 1, 1.01)),
}


@pytest.mark.parametrize(("kv_dtype", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("kv_scale", ["per-tensor", "per-channel"])
def test_a_cache_of_integers_is_found_with_its_scales(kv_dtype: str, bits: int, kv_scale: str):
    found = cache_of(model_of(kv_dtype, kv_scale))
    assert found is not None
    assert found.bits == bits
    assert found.k_scale.ndim == (0 if kv_scale == "per-tensor" else 3)
    assert found.cache.past_key.name == "past_key"


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_cache_is_not_taken_for_one(name: str):
    kv_dtype, edit = FORGED[name]
    model = model_of(kv_dtype)
    edit(model)
    assert cache_of(model) is None
