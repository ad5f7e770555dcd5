"""Choice of one attention of a checkpoint, and the error if it is ambiguous."""

from __future__ import annotations

import pytest
from checkpoints import LLAMA, OUT_PROJ, T5, equal, random_weights, save, spec_of, under

from attn_export.errors import WeightsError
from attn_export.weights.checkpoint import load_checkpoint

MHA = spec_of(num_kv_heads=6)
CAUSAL = spec_of(num_kv_heads=6, causal=True)
CROSS = spec_of(num_kv_heads=6, cross=True)

BART = ["model.encoder.layers.{}.self_attn", "model.decoder.layers.{}.self_attn",
        "model.decoder.layers.{}.encoder_attn"]  # fmt: skip
T5_MODEL = ["encoder.block.{}.layer.0.SelfAttention", "decoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.1.EncDecAttention"]  # fmt: skip
ANNOTATED = ["encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn",
             "decoder.layers.{}.src_attn"]  # fmt: skip


def model(tmp_path, prefixes, write=OUT_PROJ, layers=2):
    """Save a checkpoint of several attentions; return it with the weights of each."""
    stored, weights = {}, {}
    for layer in range(layers):
        for prefix in prefixes:
            name = prefix.format(layer)
            weights[name] = random_weights(MHA, len(weights))
            stored |= under(f"{name}." if name else "", write(MHA, weights[name]))
    return save(tmp_path, stored), weights


@pytest.mark.parametrize(
    ("prefixes", "write"), [(BART, OUT_PROJ), (T5_MODEL, T5), (ANNOTATED, LLAMA)],
    ids=["BART", "T5", "annotated"],
)  # fmt: skip
@pytest.mark.parametrize(("spec", "which"), [(MHA, 0), (CAUSAL, 1), (CROSS, 2)])
@pytest.mark.parametrize("layer", [None, "1"])
def test_a_spec_chooses_between_encoder_decoder_and_across(
    prefixes, write, spec, which, layer, tmp_path
):
    path, weights = model(tmp_path, prefixes, write)
    loaded = load_checkpoint(path, spec=spec, layer=layer)
    assert equal(loaded.weights, weights[prefixes[which].format(layer or 0)])


def test_without_a_spec_the_error_lists_what_to_give(tmp_path):
    path, _ = model(tmp_path, BART)
    config = '{"model_type": "bart", "d_model": 24, "encoder_attention_heads": 6}'
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(WeightsError, match="3 attentions that may be meant") as error:
        load_checkpoint(path, layer="1")
    for prefix in BART:
        assert prefix.format(1) in str(error.value)
    narrow = spec_of(num_kv_heads=6, head_dim=4, bias="all")
    one = under("model.encoder.layers.0.self_attn.", OUT_PROJ(narrow, random_weights(narrow)))
    assert load_checkpoint(save(tmp_path, one)).spec == narrow


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        ("model.decoder.layers.1.self_attn", "model.decoder.layers.1.self_attn"),
        ("model.decoder.layers.1.self_attn.", "model.decoder.layers.1.self_attn"),
        ("decoder.layers.1.self_attn", "model.decoder.layers.1.self_attn"),
        ("model.encoder.layers.1", "model.encoder.layers.1.self_attn"),
        ("encoder_attn", None),
        ("1.encoder_attn", "model.decoder.layers.1.encoder_attn"),
    ],
)
def test_a_prefix_may_be_whole_or_a_part_of_it(layer, found, tmp_path):
    path, weights = model(tmp_path, BART)
    if found is None:
        with pytest.raises(WeightsError, match="2 attentions that may be meant"):
            load_checkpoint(path, spec=MHA, layer=layer)
    else:
        assert equal(load_checkpoint(path, spec=MHA, layer=layer).weights, weights[found])


def test_a_whole_prefix_counts_before_a_part(tmp_path):
    path, weights = model(tmp_path, ["self_attn", "model.self_attn"], layers=1)
    assert equal(load_checkpoint(path, spec=MHA, layer="self_attn").weights, weights["self_attn"])


@pytest.mark.parametrize("layer", ["7", "decoder.layers.7", "x", "-1", "", "9" * 5000, "²"])
def test_a_layer_that_is_not_there_is_an_error_that_lists_those_that_are(layer, tmp_path):
    path, _ = model(tmp_path, BART, layers=3)
    with pytest.raises(WeightsError) as error:
        load_checkpoint(path, spec=MHA, layer=layer)
    assert "model.encoder.layers.0.self_attn" in str(error.value)
    assert "and 3 more" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize("prefix", ["", "attn", "model.layers.7.self_attn"])
def test_the_only_attention_is_taken_without_being_named(prefix, tmp_path):
    path, weights = model(tmp_path, [prefix], layers=1)
    assert equal(load_checkpoint(path, spec=MHA).weights, weights[prefix])


def test_layer_0_is_the_default_and_numbers_are_numbers(tmp_path):
    path, weights = model(tmp_path, ["model.layers.{}.self_attn"], layers=12)
    for layer, number in ((None, 0), ("1", 1), ("11", 11), ("01", 1)):
        loaded = load_checkpoint(path, spec=MHA, layer=layer)
        assert equal(loaded.weights, weights[f"model.layers.{number}.self_attn"])
        assert f"model.layers.{number}.self_attn of model.safetensors" in loaded.notes[0]


def test_without_a_layer_0_there_is_no_default(tmp_path):
    path, _ = model(tmp_path, ["first.attn", "second.attn"], layers=1)
    with pytest.raises(WeightsError, match=r"first\.attn, second\.attn"):
        load_checkpoint(path, spec=MHA)


def test_a_vision_tower_does_not_stand_in_the_way(tmp_path):
    prefixes = ["vision_tower.encoder.layers.{}.self_attn", "language_model.layers.{}.self_attn"]
    path, weights = model(tmp_path, prefixes)
    assert equal(
        load_checkpoint(path, spec=MHA).weights, weights["language_model.layers.0.self_attn"]
    )
    tower = load_checkpoint(path, spec=MHA, layer="vision_tower.encoder.layers.0.self_attn")
    assert equal(tower.weights, weights["vision_tower.encoder.layers.0.self_attn"])


def test_a_checkpoint_without_attention_says_what_it_has(tmp_path):
    path = save(tmp_path, under("model.", {f"fc{n}.weight": WEIGHT for n in range(9)}))
    with pytest.raises(
        WeightsError,
        match=r"no attention of a known layout; .* by --module.*fc0.*and 3 more",
    ):
        load_checkpoint(path, spec=MHA)


WEIGHT = random_weights(MHA)["q_proj.weight"]
