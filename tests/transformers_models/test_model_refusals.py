"""Constructs of `transformers` that cannot be exported: the line, and the alternative."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from real_classes import IDS, TOKENS, B, L, decoder, model
from transformers import DynamicCache

from attn_export import Subject, build
from attn_export.errors import AttnExportError


def windows() -> Subject:
    return decoder("mistral", windows=True)


def cache_in_the_outputs() -> Subject:
    return Subject(model("llama"), {"input_ids": IDS}, {"input_ids": TOKENS}, ["hidden"])


def cache_in_the_inputs() -> Subject:
    inputs = {"input_ids": IDS, "past_key_values": DynamicCache()}
    return Subject(model("llama"), inputs, {"input_ids": TOKENS}, ["hidden"])


def types_of_zeros() -> Subject:
    inputs = {"input_ids": IDS, "token_type_ids": torch.zeros(B, L, dtype=torch.int64)}
    return Subject(model("bert"), inputs, dict.fromkeys(inputs, TOKENS), ["hidden", "pooled"])


REFUSED: dict[Callable[[], Subject], str] = {
    windows: r"axis 'past_len' \(past.0.0.shape\[2\]\) was narrowed to \[6, int_oo\] "
    r"\(cache_utils.py:\d+\)",
    cache_in_the_outputs: r"it returns a DynamicCache; return the tensors in it, .*use_cache=False",
    cache_in_the_inputs: r"past_key_values is DynamicCache; inputs are tensors, tuples,",
    types_of_zeros: r"token_type_ids is 0 everywhere in the example, and integers are tried within",
}


@pytest.mark.parametrize("subject", REFUSED, ids=lambda function: function.__name__)
def test_an_unexportable_construct_is_named_with_the_remedy(subject, tmp_path):
    with pytest.raises(AttnExportError) as caught:
        build(subject(), tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"])
    assert re.search(REFUSED[subject], str(caught.value)), str(caught.value)
