"""Every layout: weights that were written in it are read back bitwise."""

from __future__ import annotations

import pytest
import torch
from checkpoints import (
    BERT,
    FALCON,
    GPT2,
    LLAMA,
    MODERN,
    NANOGPT,
    NEOX,
    OUT_PROJ,
    PHI3,
    T5,
    TORCH,
    VIT,
    equal,
    one_after_another,
    packed,
    random_weights,
    renamed,
    save,
    spec_of,
    t5,
    under,
    with_added_keys,
)  # fmt: skip
from torch import nn

from attn_export.attention.module import Attention
from attn_export.errors import WeightsError
from attn_export.weights.checkpoint import load_checkpoint
from attn_export.weights.layouts import LAYOUTS, recognise

MHA = {"num_kv_heads": 6}
MQA = {"num_kv_heads": 1}
CROSS = {"cross": True, "kdim": 7, "vdim": 9, **MHA}
T5_BIAS = {"relative_buckets": 8, "relative_max_distance": 20, **MHA}

ROWS = [
    ("Llama", "model.layers.0.self_attn.", LLAMA, {}),
    ("Llama without model.", "layers.0.self_attn.", LLAMA, {}),
    ("Gemma 3 with pictures", "model.language_model.layers.0.self_attn.", LLAMA, {}),
    ("LLaVA", "language_model.model.layers.0.self_attn.", LLAMA, {}),
    ("Qwen2", "model.layers.0.self_attn.", LLAMA, {"bias": "q,k,v"}),
    ("Qwen3", "model.layers.0.self_attn.", LLAMA, {"qk_norm": "rms"}),
    ("LayerNorm of heads", "model.layers.0.self_attn.", LLAMA, {"qk_norm": "layer"}),
    ("gpt-oss", "model.layers.0.self_attn.", LLAMA, {"sinks": True, "bias": "all"}),
    ("Dv is not D", "model.layers.0.self_attn.", LLAMA, {"v_head_dim": 3, "bias": "all"}),
    ("Phi-3", "model.layers.0.self_attn.", PHI3, {}),
    ("Phi-3 with biases", "model.layers.0.self_attn.", PHI3, {"bias": "q,k,v"}),
    ("Falcon MQA", "transformer.h.0.self_attention.", FALCON, MQA),
    ("Falcon GQA", "transformer.h.0.self_attention.", FALCON, {"bias": "all"}),
    ("Falcon MHA", "transformer.h.0.self_attention.", NEOX, MHA),
    ("GPT-2", "h.0.attn.", GPT2, {**MHA, "bias": "all"}),
    ("GPT-2 within a model", "transformer.h.0.attn.", GPT2, {**MHA, "bias": "all"}),
    ("nanoGPT", "transformer.h.0.attn.", NANOGPT, MHA),
    ("GPT-NeoX", "gpt_neox.layers.0.attention.", NEOX, {**MHA, "bias": "all"}),
    ("BLOOM", "transformer.h.0.self_attention.", NEOX, {**MHA, "bias": "all", "alibi": True}),
    ("BERT", "bert.encoder.layer.0.attention.", BERT, {**MHA, "bias": "all"}),
    ("RoBERTa", "roberta.encoder.layer.0.attention.", BERT, {**MHA, "bias": "all"}),
    ("T5's encoder", "encoder.block.0.layer.0.SelfAttention.", t5, T5_BIAS),
    ("T5's decoder", "decoder.block.0.layer.0.SelfAttention.", t5, {**T5_BIAS, "causal": True}),
    ("T5 across", "decoder.block.0.layer.1.EncDecAttention.", T5, CROSS),
    ("Whisper", "model.encoder.layers.0.self_attn.", OUT_PROJ, {**MHA, "bias": "q,v,out"}),
    ("BART across", "model.decoder.layers.0.encoder_attn.", OUT_PROJ, {**CROSS, "bias": "all"}),
    ("ours, relative bias", "", OUT_PROJ, {**T5_BIAS, "bias": "all"}),
    ("ours, sinks", "attention.", OUT_PROJ, {"sinks": True, "qk_norm": "rms"}),
    ("ours, an added key", "", OUT_PROJ, {"add_bias_kv": True}),
    ("torch, an added key", "", with_added_keys(TORCH), {**MHA, "add_bias_kv": True}),
    ("o_proj at the root", "", LLAMA, {}),
    (
        "The Annotated Transformer", "encoder.layers.0.self_attn.",
        renamed("linears.0", "linears.1", "linears.2", "linears.3"), {**MHA, "bias": "all"},
    ),
    ("ViT", "encoder.layer.0.attention.", VIT, {"bias": "all"}),
    ("DistilBERT", "attention.", renamed("q_lin", "k_lin", "v_lin", "out_lin"), {"bias": "all"}),
    ("ModernBERT", "attn.", MODERN, MHA),
    ("MPT", "attn.", packed("Wqkv", "out_proj", one_after_another), MHA),
    ("w_q", "", renamed("w_q", "w_k", "w_v", "fc"), {**MHA, "bias": "all"}),
    ("w_o", "attn.", renamed("w_q", "w_k", "w_v", "w_o"), {}),
    ("w_concat", "attn.", renamed("w_q", "w_k", "w_v", "w_concat"), {}),
    ("w_qs", "slf_attn.", renamed("w_qs", "w_ks", "w_vs", "fc"), {}),
    ("q_linear", "", renamed("q_linear", "k_linear", "v_linear", "out"), {"bias": "all"}),
    ("o_linear", "mha.", renamed("q_linear", "k_linear", "v_linear", "o_linear"), {}),
    ("torch", "self_attn.", TORCH, {**MHA, "bias": "all"}),
    ("torch without biases", "", TORCH, MHA),
]  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "write", "changes"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS]
)
def test_a_layout_gives_back_what_was_written_into_it(prefix, write, changes, tmp_path):
    spec = spec_of(**changes)
    weights = random_weights(spec)
    path = save(tmp_path, under(prefix, write(spec, weights)))
    loaded = load_checkpoint(path, spec=spec)
    assert equal(loaded.weights, weights)
    assert loaded.spec == spec
    Attention(loaded.spec).load_state_dict(loaded.weights)


def test_every_row_of_the_table_is_tested():
    used = set()
    for _, prefix, write, changes in ROWS:
        spec = spec_of(**changes)
        used |= {
            id(row) for row in recognise(under(prefix, write(spec, random_weights(spec)))).values()
        }
    untested = [row.name for row in LAYOUTS if id(row) not in used]
    # Ours with packed_qkv, and torch's with weights apart, have tests of their own below;
    # DeepSeek's are those of saved models.
    assert untested == [
        "DeepSeek", "DeepSeek without a latent of queries", "qkv_proj, out_proj",
        "torch.nn.MultiheadAttention",
    ]  # fmt: skip


@pytest.mark.parametrize("bias", ["all", "none", "q,k,v"])
def test_a_spec_with_one_projection_gets_one_from_any_layout(bias, tmp_path):
    apart, one = spec_of(bias=bias), spec_of(bias=bias, packed_qkv=True)
    weights = random_weights(apart)
    expected = PHI3(apart, weights)
    for number, write in enumerate((LLAMA, FALCON, PHI3)):
        path = save(tmp_path / str(number), under("attn.", write(apart, weights)))
        loaded = load_checkpoint(path, spec=one).weights
        assert torch.equal(loaded["qkv_proj.weight"], expected["qkv_proj.weight"])
        Attention(one).load_state_dict(loaded)
    own = save(tmp_path / "own", loaded)
    assert equal(load_checkpoint(own, spec=one).weights, loaded)
    assert equal(load_checkpoint(own, spec=apart).weights, weights)


# -- against the modules that the layouts are from ---------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}], ids=["", "bias_kv"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 14}], ids=["packed", "apart"])
def test_torchs_module_gives_the_same_output(widths, bias, extra, tmp_path):
    torch.manual_seed(1)
    module = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True, **widths, **extra).eval()
    if bias:
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    spec = spec_of(
        num_heads=4, num_kv_heads=4, head_dim=6, cross=bool(widths), bias=bias, **widths, **extra
    )
    path = save(tmp_path, under("layers.0.self_attn.", module.state_dict()))
    ours = Attention(spec).eval()
    ours.load_state_dict(load_checkpoint(path, spec=spec).weights)
    query = torch.randn(2, 5, 24)
    inputs = [query]
    if widths:
        inputs += [torch.randn(2, 7, 10), torch.randn(2, 7, 14)]
    key, value = inputs[1:] or (query, query)
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), module(query, key, value)[0])


def test_gpt2s_conv1d_is_the_same_projection(tmp_path):
    spec = spec_of(num_kv_heads=6, bias="all")
    weights = random_weights(spec)
    stored = GPT2(spec, weights)
    loaded = load_checkpoint(save(tmp_path, under("h.0.attn.", stored)), spec=spec).weights
    x = torch.randn(3, 24)
    q, k, v = (x @ stored["c_attn.weight"] + stored["c_attn.bias"]).split(30, dim=-1)
    for side, projected in (("q", q), ("k", k), ("v", v)):
        ours = x @ loaded[f"{side}_proj.weight"].T + loaded[f"{side}_proj.bias"]
        torch.testing.assert_close(ours, projected)
    attended = torch.randn(3, 30)
    theirs = attended @ stored["c_proj.weight"] + stored["c_proj.bias"]
    ours = attended @ loaded["out_proj.weight"].T + loaded["out_proj.bias"]
    torch.testing.assert_close(ours, theirs)


def test_a_square_c_attn_is_taken_as_gpt2s(tmp_path):
    # (6 + 2 * 1) * 3 = 24 = E: the shape does not say which way it lies.
    spec = spec_of(num_kv_heads=1, head_dim=3)
    weights = random_weights(spec)
    loaded = load_checkpoint(save(tmp_path, under("attn.", GPT2(spec, weights))), spec=spec)
    assert equal(loaded.weights, weights)


def test_falcons_view_of_its_packed_tensor_is_the_same_projection(tmp_path):
    spec = spec_of(embed_dim=30, head_dim=5)
    stored = FALCON(spec, random_weights(spec))
    loaded = load_checkpoint(save(tmp_path, under("h.0.attn.", stored)), spec=spec).weights
    x = torch.randn(2, 4, 30)
    fused = (x @ stored["query_key_value.weight"].T).view(2, 4, -1, 6 // 2 + 2, 5)
    for side, part in (
        ("q", fused[..., :-2, :]),
        ("k", fused[..., -2, :]),
        ("v", fused[..., -1, :]),
    ):
        ours = x @ loaded[f"{side}_proj.weight"].T
        torch.testing.assert_close(ours, part.reshape(2, 4, -1))


# -- what lies beside the weights ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "write", "changes", "extra"),
    [
        ("h.0.attn.", GPT2, MHA, {"bias": (1, 1, 8, 8), "masked_bias": ()}),
        ("gpt_neox.layers.0.attention.", NEOX, MHA, {
            "bias": (1, 1, 8, 8), "masked_bias": (), "rotary_emb.inv_freq": (2,),
        }),
        ("model.layers.0.self_attn.", LLAMA, {}, {"rotary_emb.inv_freq": (2,)}),
        ("encoder.layer.0.attention.", BERT, MHA, {
            "output.LayerNorm.weight": (24,), "output.LayerNorm.bias": (24,),
        }),
        ("encoder.layer.0.attention.", BERT, MHA, {
            "output.LayerNorm.gamma": (24,), "output.LayerNorm.beta": (24,),
        }),
        ("slf_attn.", renamed("w_qs", "w_ks", "w_vs", "fc"), MHA, {"layer_norm.weight": (24,)}),
    ],
    ids=["GPT-2", "GPT-NeoX", "Llama", "BERT", "BERT of TensorFlow", "w_qs"],
)  # fmt: skip
def test_masks_tables_and_the_norm_after_attention_are_not_left_over(
    prefix, write, changes, extra, tmp_path
):
    spec = spec_of(**changes)
    weights = random_weights(spec)
    stored = write(spec, weights) | {name: torch.ones(shape) for name, shape in extra.items()}
    assert equal(load_checkpoint(save(tmp_path, under(prefix, stored)), spec=spec).weights, weights)


def test_t5s_first_block_has_the_bias_of_all(tmp_path):
    spec = spec_of(**T5_BIAS, causal=True)
    first, third = random_weights(spec, 1), random_weights(spec, 2)
    name = "score_bias.relative_attention_bias.weight"
    bias = third.pop(name)
    stored = under("decoder.block.0.layer.0.SelfAttention.", t5(spec, first))
    stored |= under("decoder.block.2.layer.0.SelfAttention.", t5(spec, third))
    path = save(tmp_path, stored)
    loaded = load_checkpoint(path, spec=spec, layer="2")
    assert equal(loaded.weights, third | {name: first[name]})
    assert not torch.equal(loaded.weights[name], bias)
    assert any("relative bias of block 0" in note for note in loaded.notes)
    assert not any("block 0 is" in n for n in load_checkpoint(path, spec=spec, layer="0").notes)


def test_t5s_bias_is_left_over_where_the_spec_has_none(tmp_path):
    spec = spec_of(**T5_BIAS)
    stored = under("encoder.block.0.layer.0.SelfAttention.", t5(spec, random_weights(spec)))
    other = {n: t for n, t in random_weights(spec, 2).items() if "bias" not in n}
    stored |= under("encoder.block.1.layer.0.SelfAttention.", t5(spec, other))
    path = save(tmp_path, stored)
    with pytest.raises(
        WeightsError, match=r"block\.0\..*relative_attention_bias.weight is left over"
    ):
        load_checkpoint(path, spec=spec_of(**MHA), layer="1")


def test_gemma_3_is_known_by_its_norms_where_there_is_no_config(tmp_path):
    spec = spec_of(qk_norm="rms")
    weights = random_weights(spec)
    stored = under("model.layers.0.self_attn.", LLAMA(spec, weights))
    sibling = {"model.layers.0.pre_feedforward_layernorm.weight": torch.ones(24)}
    later = {"model.layers.0.laurel.linear_left.weight": torch.ones(24)}
    as_is = load_checkpoint(save(tmp_path / "qwen", stored), spec=spec)
    gemma = load_checkpoint(save(tmp_path / "gemma", stored | sibling), spec=spec)
    gemma_3n = load_checkpoint(save(tmp_path / "3n", stored | sibling | later), spec=spec)
    assert equal(as_is.weights, weights)
    assert equal(gemma_3n.weights, weights)
    for name in ("q_norm.weight", "k_norm.weight"):
        assert torch.equal(gemma.weights[name], weights[name] + 1)
    assert any("1 was added" in note for note in gemma.notes)
