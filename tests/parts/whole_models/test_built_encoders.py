"""Models without caches built, judged by the model as transformers runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from shared import once
from test_built_models import worst_error
from tiny_encoders import BUILT, REFUSED, tiny_encoder
from transformers import (
    CONFIG_MAPPING,
    AttentionMaskInterface,
    ShieldGemma2ForImageClassification,
)

from attn_export import Subject, build, verify
from attn_export.commands.main import run
from attn_export.errors import ExportError

FEW = ("clip", "clip_text_model", "roberta", "siglip_vision_model")
"""The types that are compared by default: causal masks, positions by ids, images, and both."""


def built_bert() -> Path:
    """Return a bundle of a tiny BERT, built once from the folder of a checkpoint."""

    def make(folder: Path) -> None:
        checkpoint = Path(f"{folder}.checkpoint")
        fields = {"num_hidden_layers": 1, "max_position_embeddings": 16}
        model = tiny_encoder("bert", "BertForSequenceClassification", **fields)
        model.save_pretrained(checkpoint)
        options = ("--output", str(folder), "--runtime", "ort-cpu", "--quiet")
        assert run(["build", "--model", str(checkpoint), *options]) == 0

    return once("models/bert", make)


@pytest.mark.parametrize("kind", FEW)
def test_a_captured_encoder_is_the_model_as_transformers_runs_it(kind):
    error, case = worst_error(Subject.from_model(tiny_encoder(kind)))
    assert error < 5e-6, case


@pytest.mark.extended
@pytest.mark.parametrize("kind", BUILT)
def test_an_encoder_that_is_built_passes_in_all_dialects(kind, tmp_path):
    subject = Subject.from_model(tiny_encoder(kind))
    report = build(subject, tmp_path / "out", runtimes=["ort-cpu"])
    assert report.passed, str(report)
    graphs = {"model.onnx", "model.portable.onnx", "model.ort.onnx"}
    assert {v.graph for v in report.verdicts} == graphs
    nodes = [node.op_type for node in onnx.load(tmp_path / "out/model.onnx").graph.node]
    assert nodes.count("Attention") == (4 if kind in ("clip", "siglip") else 2)


def test_an_encoder_is_built_from_a_folder_with_its_own_inputs_and_outputs():
    bundle = built_bert()
    assert verify(bundle, runtimes=["ort-cpu"]).passed
    graph = onnx.load(bundle / "model.onnx").graph
    assert [x.name for x in graph.input] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [x.name for x in graph.output] == ["logits"]
    assert [node.op_type for node in graph.node].count("Attention") == 1


def test_outputs_of_a_last_token_that_is_padding_and_sees_nothing_are_not_compared():
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"sliding_window": 4, "max_position_embeddings": 96}
    image = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    image |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    config = CONFIG_MAPPING["shieldgemma2"](
        text_config=text, vision_config=image, mm_tokens_per_image=4, image_token_index=60,
        boi_token_index=61, eoi_token_index=62, yes_token_index=5, no_token_index=6,
    )  # fmt: skip
    model = ShieldGemma2ForImageClassification(config).eval()
    cases = Subject.from_model(model, text_only=True).plan().cases
    judged = {case.name: case.judged_rows for case in cases if case.name.startswith("right_")}
    assert judged
    assert all(rows == {"logits": (), "probabilities": ()} for rows in judged.values())


def test_images_beside_a_text_that_is_not_compared_are_judged_and_their_logits_are_not():
    (case,) = (
        case
        for case in Subject.from_model(tiny_encoder("clip")).plan().cases
        if case.name == "left_4"
    )
    assert case.ignored_rows == (0, 1)
    wanted = {"text_embeds": (1,), "image_embeds": (0, 1)}
    assert case.judged_rows == {"logits_per_image": (), "logits_per_text": (), **wanted}


def test_a_decoder_with_classes_is_judged_with_padding_which_has_its_token():
    model = tiny_encoder("llama", "LlamaForSequenceClassification", num_labels=3)
    cases = Subject.from_model(model).plan().cases
    right = [case for case in cases if case.name.startswith("right_")]
    assert right
    for case in right:
        assert case.judged_rows == {"logits": case.ignored_rows}
        hidden = case.inputs["attention_mask"] == 0
        assert (case.inputs["input_ids"][hidden] == model.config.pad_token_id).all()


@pytest.mark.parametrize("dialect", ["", ".portable", ".ort"])
@pytest.mark.every(2)
def test_padding_and_elements_that_are_all_padding_change_no_others(dialect):
    session = onnxruntime.InferenceSession(built_bert() / f"model{dialect}.onnx")

    def logits(ids: np.ndarray, mask: np.ndarray) -> Any:
        types = np.zeros_like(ids)
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        return session.run(None, given)[0]

    ids = np.random.default_rng(0).integers(3, 64, (3, 9))
    mask = np.array([[1] * 9, [1] * 5 + [0] * 4, [0] * 9])
    batch = logits(ids, mask)
    assert np.isfinite(batch).all()
    np.testing.assert_allclose(batch[:1], logits(ids[:1], mask[:1]), atol=1e-5)
    np.testing.assert_allclose(batch[1:2], logits(ids[1:2, :5], mask[1:2, :5]), atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "wav2vec2"])
@pytest.mark.every(2)
def test_a_mask_of_an_encoder_that_is_dropped_is_found(kind, monkeypatch):
    subject = Subject.from_model(tiny_encoder(kind))
    assert worst_error(subject)[0] < 5e-6
    masks: dict[str, Any] = AttentionMaskInterface._global_mapping
    ours = masks["attn_export"]
    monkeypatch.setitem(
        masks, "attn_export", lambda **given: ours(**{**given, "attention_mask": None})
    )
    assert worst_error(subject)[0] > 1e-3


@pytest.mark.parametrize("kind", REFUSED)
def test_an_encoder_with_attention_of_its_own_is_refused(kind):
    with pytest.raises(ExportError, match=f"{kind} has attention of its own: of 2 layers, 0 call"):
        Subject.from_model(tiny_encoder(kind))
