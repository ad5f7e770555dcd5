"""`Attention` nodes lowered for ONNX Runtime, compared with the reference evaluator."""

from __future__ import annotations

import pytest
from ort_lowered import ALL, compare_with_reference


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(3)
def test_a_form_gives_what_the_reference_gives(name: str):
    compare_with_reference(ALL[name])
