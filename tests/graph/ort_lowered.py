"""`Attention` nodes of many kinds, and their forms in ONNX Runtime beside the reference."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from attention_forms import FORMS, IN_PLACE, SIZES, Form, attributes, bound_run, session
from onnx.reference import ReferenceEvaluator

from attn_export.graph.lower import DECODE, lower

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


def compare_with_reference(form: Form) -> None:
    reference, tolerance = ReferenceEvaluator(form.model()), 4e-3 if form.half else 2e-6
    forms = lower(ir.from_proto(form.model()), "ort")
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
