"""Encoders and decoders built of one model, judged by the model as transformers runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from test_built_models import worst_error
from tiny_pairs import BUILT, REFUSED, tiny_pair
from transformers import AttentionMaskInterface

from attn_export import DecodeSession, Subject, verify
from attn_export.commands.main import run
from attn_export.errors import ExportError
from attn_export.parts.whole_models.build.cross_capture import CapturedCrossDecoder

COUNT = 24
"""The number of tokens that are decoded."""


def encoder_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return two texts of unequal length, or two sounds."""
    random = torch.Generator().manual_seed(1)
    if model.main_input_name == "input_ids":
        ids = torch.randint(3, 64, (2, 9), generator=random)
        mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
        return {"input_ids": ids * mask, "attention_mask": mask}
    shape = 2, model.config.num_mel_bins, 2 * model.config.max_source_positions
    return {"input_features": torch.randn(shape, generator=random)}


def generated(model: Any) -> list[list[int]]:
    """Return the greedy tokens of transformers."""
    options = {"max_new_tokens": COUNT, "num_beams": 1, "do_sample": False}
    # No token ends a text, nor is suppressed.
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        tokens = model.generate(**encoder_inputs(model), **options)
    return tokens[:, -COUNT:].tolist()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in ("t5", "whisper") else pytest.mark.extended) for k in BUILT],
)
def test_captured_modules_give_the_tokens_of_generate(kind):
    model = tiny_pair(kind)
    decoder = Subject.from_model(model)
    given = encoder_inputs(model)
    with torch.inference_mode():
        cross = decoder.encoder.call(decoder.encoder.module, given)
        if "attention_mask" in given:
            cross["encoder_attention_mask"] = given["attention_mask"]
        caches = {
            name: torch.zeros(2, x.shape[1], COUNT, x.shape[3])
            for name, x in decoder.inputs.items()
            if name.startswith("past_") and x.ndim == 4
        }
        token = torch.full((2, 1), model.config.decoder_start_token_id)
        tokens = []
        for at in range(COUNT):
            outputs = decoder.call(decoder.module, {
                "input_ids": token, "past_length": torch.full((2,), at),
                "logit_index": torch.zeros(2, 1, dtype=torch.int64), **caches, **cross,
            })  # fmt: skip
            token = outputs["logits"][:, -1].argmax(-1, keepdim=True)
            caches = {name: outputs[name.replace("past", "present")] for name in caches}
            tokens.append(token)
    assert torch.cat(tokens, 1).tolist() == generated(model)


def test_cross_caches_that_are_swapped_are_found(monkeypatch):
    subject = Subject.from_model(tiny_pair("whisper"))
    assert worst_error(subject, 6)[0] < 5e-6
    right = CapturedCrossDecoder._logits

    def swapped(self: Any, call: Any, ids: Any, own: Any, caches: dict[str, Any]) -> Any:
        keys = [name for name in caches if name.startswith("cross_key")]
        other = dict(zip(keys, [caches[name] for name in reversed(keys)], strict=True))
        return right(self, call, ids, own, {**caches, **other})

    monkeypatch.setattr(CapturedCrossDecoder, "_logits", swapped)
    assert worst_error(subject, 6)[0] > 1e-4


def test_the_padding_of_an_encoder_that_is_dropped_is_found(monkeypatch):
    subject = Subject.from_model(tiny_pair("t5"))
    masks: dict[str, Any] = AttentionMaskInterface._global_mapping
    ours = masks["attn_export"]
    monkeypatch.setitem(
        masks, "attn_export", lambda **given: ours(**{**given, "attention_mask": None})
    )
    assert worst_error(subject, 6)[0] > 1e-4
    assert worst_error(subject.encoder, 12)[0] > 1e-4


REFUSALS = {
    "led": "has attention of its own",
    "m2m_100": "counts positions for the whole batch; .* are not supported for it",
    "mvp": "has attention of its own",
    "pegasus_x": "does not run with a cache in place; .* are not supported",
    "speech_to_text": "takes input_features, whose sizes are not known",
    "switch_transformers": "does not run on two tokens and gives no cache; .* not supported",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_encoder_decoder_with_rules_of_its_own_is_refused(kind):
    with pytest.raises(ExportError, match=f"^{kind} {REFUSALS[kind]}"):
        Subject.from_model(tiny_pair(kind))


@pytest.mark.extended
@pytest.mark.parametrize("kind", BUILT)
def test_the_two_bundles_of_a_folder_give_the_tokens_of_generate(kind, tmp_path):
    model = tiny_pair(kind)
    model.save_pretrained(tmp_path / "checkpoint")
    out = tmp_path / "out"
    options = ("--output", str(out), "--runtime", "ort-cpu", "--quiet")
    for _ in range(2 if kind == "whisper" else 1):  # a folder of two bundles is replaced
        assert run(["build", "--model", str(tmp_path / "checkpoint"), *options]) == 0
    report = verify(out, runtimes=["ort-cpu"])
    assert report.passed
    graphs = ["model.onnx", "model.ort.onnx", "model.portable.onnx"]
    wanted = {f"{part}/{graph}" for part in ("encoder", "decoder") for graph in graphs}
    assert wanted <= {v.graph for v in report.verdicts}
    for part, count in (("encoder", 2), ("decoder", 4)):
        nodes = onnx.load(out / part / "model.onnx").graph.node
        assert [node.op_type for node in nodes].count("Attention") == count
    assert decoded(model, out) == generated(model)


def decoded(model: Any, folder: Path) -> list[list[int]]:
    """Return the greedy tokens of the two graphs."""
    given = {name: x.numpy() for name, x in encoder_inputs(model).items()}
    encoder = onnxruntime.InferenceSession(folder / "encoder" / "model.ort.onnx")
    names = [output.name for output in encoder.get_outputs()]
    encoded = dict(zip(names, encoder.run(None, given), strict=True))
    if "attention_mask" in given:
        encoded["encoder_attention_mask"] = given["attention_mask"]
    start = np.full((2, 1), model.config.decoder_start_token_id)
    session = DecodeSession(folder / "decoder")
    return np.stack(list(session.generate(start, COUNT, encoded=encoded)), 1).tolist()
