"""Constructs of `transformers` that cannot be exported: the line, and the alternative."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from real_classes import IDS, TOKENS, B, L, decoder, model

from attn_export import Subject, build
from attn_export.errors import AttnExportError


def windows() -> Subject:
    return decoder("mistral", windows=True)


def types_of_zeros() -> Subject:
    inputs = {"input_ids": IDS, "token_type_ids": torch.zeros(B, L, dtype=torch.int64)}
    return Subject(model("bert"), inputs, dict.fromkeys(inputs, TOKENS), ["hidden", "pooled"])


REFUSED: dict[Callable[[], Subject], str] = {
    windows: r"axis 'past_len' \(past.0.0.shape\[2\]\) was narrowed to \[6, int_oo\] "
    r"\(cache_utils.py:\d+\)",
    types_of_zeros: r"token_type_ids is 0 everywhere in the example, and integers are tried within",
}


@pytest.mark.parametrize("subject", REFUSED, ids=lambda function: function.__name__)
def test_an_unexportable_construct_is_named_with_the_remedy(subject, tmp_path):
    with pytest.raises(AttnExportError) as caught:
        build(subject(), tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"])
    assert re.search(REFUSED[subject], str(caught.value)), str(caught.value)
