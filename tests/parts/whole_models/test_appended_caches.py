"""Decoders whose caches are inputs and outputs that grow."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from shared import once
from test_built_models import kinds, worst_error
from tiny_decoders import tiny_decoder

from attn_export import DecodeSession, Subject, build
from attn_export.commands.compare import compare_models
from attn_export.errors import UsageError


def bundle():
    """Return a bundle of a model with windows."""

    def make(folder):
        subject = Subject.from_model(tiny_decoder("mistral"), cache="append")
        assert build(subject, folder, dialects=("standard",), runtimes=["ort-cpu"]).passed

    return once("models/mistral-append", make)


@pytest.mark.parametrize("kind", kinds("llama4_text"))
def test_a_decoder_that_appends_is_the_model_as_transformers_runs_it(kind):
    subject = Subject.from_model(tiny_decoder(kind), cache="append")
    cases = subject.plan().cases
    assert {case.sizes["past_len"] for case in cases} > {0, 9}
    for case in cases:
        assert case.sizes["total_len"] == case.sizes["past_len"] + case.sizes["query_len"]
    error, case = worst_error(subject)
    assert error < 5e-6, case


def test_pasts_are_inputs_of_the_attention_nodes_and_give_the_tokens_of_generate():
    graph = onnx.load(bundle() / "model.onnx", load_external_data=False).graph
    nodes = [node for node in graph.node if node.op_type == "Attention"]
    assert [node.input[4] for node in nodes] == ["past_key_0", "past_key_1"]
    session = onnxruntime.InferenceSession(bundle() / "model.onnx")
    prompt, count = np.array([[5, 9, 33, 7]]), 12
    pasts = {
        given.name: np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32)
        for given in session.get_inputs()
        if given.name.startswith("past_")
    }
    names, ids, tokens = [each.name for each in session.get_outputs()], prompt, []
    for _ in range(count):
        given = {"input_ids": ids, "logit_index": np.array([[ids.shape[1] - 1]]), **pasts}
        outputs = dict(zip(names, session.run(None, given), strict=True))
        pasts = {name: outputs[name.replace("past_", "present_")] for name in pasts}
        ids = outputs["logits"][:, -1:].argmax(-1)
        tokens.append(int(ids[0, 0]))
    with torch.inference_mode():
        wanted = tiny_decoder("mistral").generate(
            torch.from_numpy(prompt), do_sample=False, max_new_tokens=count, eos_token_id=None
        )
    assert tokens == wanted[0, prompt.shape[1] :].tolist()


def test_a_session_refuses_caches_that_grow():
    with pytest.raises(UsageError, match="has no cache that is written in place"):
        DecodeSession(bundle())


@pytest.mark.extended
def test_a_bundle_that_appends_is_judged_by_its_model():
    assert compare_models(tiny_decoder("mistral"), bundle()).passed
