"""`Attention` nodes lowered for ONNX Runtime, compared with the reference evaluator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from attention_forms import FORMS, IN_PLACE, SIZES, Form, attributes, bound_run, session
from onnx.reference import ReferenceEvaluator

from attn_export.graph import lower as forms_of
from attn_export.graph.lower import DECODE, KERNELS, Lowered, lower

FLASH = {
    f"{sharing}, {rank}, {name}": Form(
        heads=heads, packed=rank == "3-D", widths=(8, 8), own_keys=True, **options  # type: ignore[arg-type]
    )
    for sharing, heads in {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}.items()
    for rank in ("3-D", "4-D")
    for name, options in {
        "causal": {"attributes": attributes(is_causal=1)},
        "causal, softcap, scale": {"attributes": attributes(is_causal=1, softcap=0.7, scale=0.3)},
        "causal, padding": {"attributes": attributes(is_causal=1), "mask": ("B", 1, "L", "S")},
        "causal, float mask": {
            "attributes": attributes(is_causal=1), "mask": ("L", "S"), "mask_type": "float",
        },
        "causal, past": {"attributes": attributes(is_causal=1), "past": True, "outputs": 3},
        "causal, past, mask of each head": {
            "attributes": attributes(is_causal=1), "past": True, "outputs": 3,
            "mask": ("B", 4, "L", "S"),
        },
        "half, causal": {"attributes": attributes(is_causal=1), "half": True},
    }.items()
}  # fmt: skip
ALL = FORMS | IN_PLACE | FLASH


BLOCKS = forms_of.Form(block=3, products=True)
"""Of the lengths in `SIZES`, one is a block and a part of one."""


def lowered(form: Form, choice: forms_of.Form = KERNELS) -> dict[str, Lowered]:
    return lower(ir.from_proto(form.model()), "ort", choice)


@pytest.mark.parametrize("name", ALL)
def test_a_form_gives_what_the_reference_gives(name: str):
    compare_with_reference(ALL[name], KERNELS)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ALL)
def test_blocks_of_queries_give_what_the_reference_gives(name: str):
    form = ALL[name]
    compare_with_reference(form, BLOCKS)
    found = [node.op_type for node in lowered(form, BLOCKS)[""].model.graph]
    # Scores that are an output, a softmax of another type, a mask of one axis.
    other = "scores" in name or "softmax in" in name or "[S]" in name
    assert ("Loop" in found) != other


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ALL)
def test_kernels_in_blocks_give_what_the_reference_gives(name: str):
    form = ALL[name]
    compare_with_reference(form, forms_of.Form(block=3))
    found = [node.op_type for node in lowered(form, forms_of.Form(block=3))[""].model.graph]
    causal = ("is_causal", 1) in form.attributes and form.widths == (8, 8) and form.new == "L"
    odd = (
        len(form.mask) in (1, 3) or form.mask[-1:] not in ((), ("S",)) or (form.half and form.mask)
    )
    assert ("Scan" in found) == (causal and not odd)


@pytest.mark.parametrize("name", IN_PLACE)
def test_products_for_one_query_give_what_the_reference_gives(name: str):
    compare_with_reference(IN_PLACE[name], forms_of.Form(products=True))


def compare_with_reference(form: Form, choice: forms_of.Form) -> None:
    reference, tolerance = ReferenceEvaluator(form.model()), 4e-3 if form.half else 2e-6
    forms = lowered(form, choice)
    for phase, one in forms.items():
        engine = session(one.model)
        for B, L, N, P in SIZES:
            L = 1 if phase == DECODE else L
            if "short" in form.mask and N + P * form.past < 2:
                continue
            inputs = form.draw(B, L, 1 if phase == DECODE and form.new == "N" else N, P)
            with np.errstate(all="ignore"):
                wanted = reference.run(None, inputs)
            for got, other in zip(bound_run(engine, inputs, one), wanted, strict=True):
                assert got.dtype == other.dtype
                np.testing.assert_allclose(got, other, rtol=tolerance, atol=tolerance)
