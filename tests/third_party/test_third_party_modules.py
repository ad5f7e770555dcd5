"""Third-party modules, which pass or are refused with the reason; `scripts/third_party` counts."""

from __future__ import annotations

import pytest
import torch
from shared import extended
from third_party.table import EVERY, NOT_ONE_NODE, REFUSED
from third_party.trial import quiet, tried

DEFAULT = {
    "MultiheadAttention", "cache, states", "polar within", "sinks", "x-transformers, shared heads",
}  # fmt: skip


@pytest.mark.parametrize("name", extended(EVERY, lambda name: name in DEFAULT))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.every(3)
def test_it_passes_and_has_a_form_for_ort(name: str):
    torch.manual_seed(0)
    try:
        with quiet():
            subject = EVERY[name]()
    except ImportError as error:
        pytest.skip(str(error))
    found = tried(subject, exporter=False)
    if name in REFUSED:
        assert found.outcome in ("refused", "failed")
        assert REFUSED[name] in found.said
        return
    assert found.outcome == "passed", found.said
    assert found.ort == (bool(found.softmax) and name not in NOT_ONE_NODE)
