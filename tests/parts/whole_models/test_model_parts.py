"""Some layers of decoders, built as graphs of their own."""

from __future__ import annotations

import pytest
import torch
from shared import once
from test_built_models import kinds, worst_error
from tiny_decoders import tiny_decoder
from tiny_encoders import tiny_encoder

from attn_export import DecodeSession, Subject, build
from attn_export.commands.compare import compare_models
from attn_export.commands.main import run
from attn_export.errors import ExportError, UsageError

KEYS, NEW = 5, 3


def ran(subject, **tokens):
    """Return the outputs of the module of a part, after a past of random keys."""
    inputs = {"past_length": torch.full((1,), KEYS), **tokens}
    for name, example in subject.inputs.items():
        if name.startswith("past_") and name not in inputs:
            random = torch.Generator().manual_seed(sum(name.encode()))
            shape = (1, example.shape[1], KEYS + NEW, example.shape[3])
            inputs[name] = torch.randn(shape, generator=random)
    with torch.inference_mode():
        return subject.call(subject.module, {name: inputs[name] for name in subject.inputs})


@pytest.mark.parametrize("kind", kinds("mistral"))
def test_parts_that_follow_each_other_give_the_logits_of_the_whole(kind):
    model, ids = tiny_decoder(kind), torch.tensor([[5, 9, 33]])
    whole = ran(Subject.from_model(model, all_logits=True), input_ids=ids)
    tokens, found = {"input_ids": ids}, {}
    for layer in range(model.config.get_text_config().num_hidden_layers):
        part = Subject.from_model(model, layers=f"{layer}-{layer}", all_logits=True)
        found |= (outputs := ran(part, **tokens))
        tokens = {"hidden_states": outputs.get("next_hidden_states")}
    assert found.keys() == {*whole, "next_hidden_states"}
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", kinds("gemma3_text", "gpt2"))
def test_a_part_is_that_of_the_model_as_transformers_runs_it(kind):
    model = tiny_decoder(kind)
    for layers in ("0-0", f"1-{model.config.get_text_config().num_hidden_layers - 1}"):
        error, case = worst_error(Subject.from_model(model, layers=layers), 12)
        assert error < 5e-6, case


def last():
    """Return a bundle of the second layer of a model."""

    def make(folder):
        subject = Subject.from_model(tiny_decoder("llama"), layers="1-1")
        assert build(subject, folder, dialects=("standard",), runtimes=["ort-cpu"]).passed

    return once("models/llama-1-1", make)


def test_a_session_refuses_a_part():
    with pytest.raises(UsageError, match="has some layers of a model; a session takes whole ones"):
        DecodeSession(last())


def test_verify_takes_a_bundle_of_a_part_as_evidence():
    assert run(["verify", str(last()), "--runtime", "ort-cpu"]) == 0


@pytest.mark.extended
def test_a_bundle_of_a_part_is_judged_by_the_same_layers():
    assert compare_models(tiny_decoder("llama"), last()).passed


def test_layers_that_see_more_than_hidden_states_are_refused():
    model, embedded = tiny_decoder("llama"), []
    model.model.embed_tokens.register_forward_hook(lambda *seen: embedded.append(seen[-1]))
    model.model.layers[1].register_forward_pre_hook(
        lambda _, given: (given[0] + embedded[-1], *given[1:])
    )
    with pytest.raises(ExportError, match="llama gives layers more than hidden states"):
        Subject.from_model(model, layers="1-1")


@pytest.mark.parametrize("layers", ["1-0", "0-2", "2-2", "-1", "1", "a-b", "0-0-1"])
def test_layers_that_are_not_there_are_refused(layers):
    with pytest.raises(UsageError, match="give A-B, the first and the last of the layers 0 to 1"):
        Subject.from_model(tiny_decoder("llama"), layers=layers)


def test_layers_of_what_is_no_decoder_are_refused(capsys):
    with pytest.raises(UsageError, match="layers 0-0 is for decoders; leave it out"):
        Subject.from_model(tiny_encoder("bert"), layers="0-0")
    assert run(["build", "--layers", "0-0", "--variant", "gqa"]) == 2
    assert "--layers without --model" in capsys.readouterr().err
