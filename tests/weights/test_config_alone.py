"""A config.json without tensors, and one of a model with several towers."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import OUT_PROJ, random_weights, save, under
from configs import GQA, MHA, SIZES

from attn_export import Subject
from attn_export.errors import WeightsError
from attn_export.spec import AttentionSpec
from attn_export.weights.checkpoint import load_checkpoint


@pytest.mark.parametrize(
    ("prefix", "causal"), [("text_model", True), ("vision_model", False), ("audio_model", None)]
)
def test_each_tower_has_its_own_config(prefix, causal, tmp_path):
    spec = AttentionSpec.from_dict(MHA)
    towers = {"text": SIZES, "vision": SIZES}
    config = {f"{name}_config": {"model_type": f"clip_{name}_model", **keys}
              for name, keys in towers.items()}  # fmt: skip
    prefix = f"{prefix}.encoder.layers.0.self_attn."
    path = save(tmp_path, under(prefix, OUT_PROJ(spec, random_weights(spec))), config)
    if causal is None:
        with pytest.raises(WeightsError, match="no 'audio_config'"):
            load_checkpoint(path)
    else:
        assert load_checkpoint(path).spec.causal is causal


def test_a_config_alone_builds_with_seeded_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **GQA}))
    first, same, other = (
        Subject.from_checkpoint(tmp_path, seed=seed, cache="append") for seed in (1, 1, 2)
    )
    assert first.spec.cache == "append"
    assert any("random weights" in note for note in first.notes)
    weights = [subject.module.q_proj.weight for subject in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        ({"model_type": "shiny"}, {}, r"model_type 'shiny'.*--module PATH.py:FUNCTION"),
        ({"model_type": "deberta"}, {}, "disentangled attention.*--module PATH.py:FUNCTION"),
        ({"num_hidden_layers": 4}, {"layer": "4"}, "num_hidden_layers 4, so .* no layer 4"),
        (
            {"model_type": "t5", "num_layers": 2, "num_decoder_layers": 6},
            {"layer": "2", "fields": {"causal": False}},
            "num_layers 2, so .* no layer 2",
        ),
        (
            {"model_type": "whisper", "num_hidden_layers": 8, "decoder_layers": 2},
            {"layer": "5", "fields": {"causal": True}},
            "decoder_layers 2, so .* no layer 5",
        ),
        ({}, {"layer": "self_attn"}, "'self_attn' has no number"),
        ({}, {"pool_kv_heads": 1}, "no tensors beside it"),
        ({"hidden_size": None}, {}, "no 'hidden_size'"),
    ],
)
def test_a_config_alone_that_does_not_suffice_is_refused(keys, options, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **GQA, **keys}))
    with pytest.raises(WeightsError, match=message):
        load_checkpoint(tmp_path, **options)
