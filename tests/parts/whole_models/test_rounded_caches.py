"""Decoders that are built with caches in float16."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from shared import once
from tiny_decoders import tiny_decoder

from attn_export import DecodeSession, Subject, build, verify
from attn_export.commands.compare import compare_models
from attn_export.export.trees import to_numpy, to_torch
from attn_export.measures import measure
from attn_export.parts.whole_models.build.rounded_cache import RoundedCache


def model():
    return tiny_decoder("llama", num_hidden_layers=1)


def bundle():
    """Return a bundle with caches in float16, and that its build passed."""

    def make(folder):
        subject = Subject.from_model(model(), kv_dtype="float16")
        assert build(subject, folder, dialects=("ort",), runtimes=["ort-cpu"]).passed

    return once("models/llama-float16-cache", make)


def test_caches_in_float16_are_written_by_the_operator_and_judged_twice():
    graph = onnx.load(bundle() / "model.ort.onnx", load_external_data=False).graph
    types = {each.name: each.type.tensor_type.elem_type for each in (*graph.input, *graph.output)}
    assert types["past_key_0"] == types["present_value_0"] == onnx.TensorProto.FLOAT16
    assert types["logits"] == onnx.TensorProto.FLOAT
    report = verify(bundle(), runtimes=["ort-cpu"])
    assert report.passed
    logits = report.quality.outputs[0]
    assert logits.part == "logits"
    assert 60 < logits.sqnr < 110
    assert [str(budget) for budget in report.quality.budgets] == ["sqnr>=50"]


def test_a_session_keeps_the_types_of_caches():
    prompt = np.array([[1, 2, 3]])
    tokens = [int(row[0]) for row in DecodeSession(bundle()).generate(prompt, 8)]
    with torch.inference_mode():
        wanted = model().generate(
            torch.from_numpy(prompt), do_sample=False, max_new_tokens=8, eos_token_id=None
        )
    assert tokens == wanted[0, 3:].tolist()


def beyond(subject):
    """Return the outputs of the captured module that are not right in a case."""
    golden = subject.oracle(0.0).golden(subject.plan().cases[0])
    with torch.inference_mode():
        outputs = to_numpy(subject.call(subject.module, to_torch(golden.case.inputs)))
    return {
        name
        for name, reference in golden.expected.items()
        if measure(outputs[name], reference).row > golden.tolerance[name].row
    }


def test_a_cache_of_another_type_is_found():
    subject = Subject.from_model(model(), kv_dtype="float16")
    assert not beyond(subject)

    class Coarser(RoundedCache):
        def __call__(self, layer, *pair):
            return tuple((x * 1.002).to(x.dtype) for x in super().__call__(layer, *pair))

    subject.module.kv_scales = Coarser()
    assert beyond(subject) == {"logits", "present_key_0", "present_value_0"}


@pytest.mark.extended
def test_a_bundle_with_caches_in_float16_is_judged_by_its_model():
    assert compare_models(model(), bundle()).passed


def test_values_near_a_tie_become_either_neighbour():
    rounds = RoundedCache()
    exact = torch.tensor([1 + 2**-11, 1.25, -3.0]).double().reshape(1, 1, 3, 1)
    (key, _), noisy = rounds(0, exact, exact), exact * (1 + 1e-7)
    assert key.flatten().tolist() == [1, 1.25, -3]
    with rounds.drawing(range(8)):
        key, _ = rounds(0, torch.cat([noisy] * 8), torch.cat([noisy] * 8))
    assert torch.equal(key[:, :, 1:], torch.cat([exact] * 8)[:, :, 1:])
    assert {*key[:, 0, 0].flatten().tolist()} == {1, 1 + 2**-10}
