"""Forms that `tune` measures, compared with the reference evaluator."""

from __future__ import annotations

import pytest
from attention_forms import IN_PLACE
from ort_lowered import ALL, compare_with_reference, lowered

from attn_export.parts.benchmarks.ort_forms import FORMS, PRODUCTS
from attn_export.parts.benchmarks.query_blocks import in_blocks

BLOCKS, KERNEL_BLOCKS = in_blocks(3), in_blocks(3, by_kernel=True)
"""Of the lengths in `SIZES`, one is a block and a part of one."""


def test_each_form_has_a_name_of_its_own():
    assert len({form.name for form in FORMS}) == len(FORMS) == 10


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
    compare_with_reference(form, KERNEL_BLOCKS)
    found = [node.op_type for node in lowered(form, KERNEL_BLOCKS)[""].model.graph]
    causal = ("is_causal", 1) in form.attributes and form.widths == (8, 8) and form.new == "L"
    odd = (
        len(form.mask) in (1, 3) or form.mask[-1:] not in ((), ("S",)) or (form.half and form.mask)
    )
    assert ("Scan" in found) == (causal and not odd)


@pytest.mark.parametrize("name", IN_PLACE)
def test_products_for_one_query_give_what_the_reference_gives(name: str):
    compare_with_reference(IN_PLACE[name], PRODUCTS)
