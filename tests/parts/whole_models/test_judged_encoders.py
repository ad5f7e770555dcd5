"""Models without tokens or caches, judged by transformers' model."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from tiny_encoders import _IMAGE, _TEXT, tiny_encoder
from tiny_pairs import _T5, _WHISPER

from attn_export.errors import AttnExportError
from attn_export.parts.whole_models import compare_models
from attn_export.parts.whole_models.export_layouts import End, Entry
from attn_export.parts.whole_models.model_reference import reference_of

BATCH, LENGTH = "batch", "query_len"
PROMISES = frozenset({"batch", "left", "right", "chunk", "chunks"})


def _made(name: str, **fields: object) -> object:
    config = getattr(transformers, f"{name}Config")(**fields)
    of = {"OpenAIGPT": "LMHeadModel", "UMT5": "EncoderModel", "Whisper": "ForAudioClassification"}
    return getattr(transformers, name + of.get(name, "Model"))(config).eval()


_GPT = {"vocab_size": 64, "n_positions": 40, "n_embd": 32, "n_layer": 1, "n_head": 4}
MODELS = {
    "vit": (lambda: tiny_encoder("vit"), "pixel_values", {"pooler_output": (BATCH, 32)}),
    "hubert": (lambda: tiny_encoder("hubert"), "sound", {"last_hidden_state": (BATCH, "", 32)}),
    "openai-gpt": (lambda: _made("OpenAIGPT", **_GPT), "text", {"logits": (BATCH, LENGTH, 64)}),
    "umt5": (lambda: _made("UMT5", **_T5), "text", {"last_hidden_state": (BATCH, LENGTH, 32)}),
    "whisper": (lambda: _made("Whisper", **_WHISPER), "input_features", {"logits": (BATCH, 2)}),
    "clip": (
        lambda: _made("CLIP", text_config=_TEXT, vision_config=_IMAGE, projection_dim=16), "both",
        {
            "logits_per_image": (BATCH, BATCH),
            "text_model_output.last_hidden_state": (BATCH, LENGTH, 32),
        },
    ),
}  # fmt: skip
"""Models, what their graphs take, and axes of outputs."""


def _entry(takes: str, outputs: dict[str, End]) -> Entry:
    features = {"pixel_values": (BATCH, 3, "h", "w"), "input_features": (BATCH, 8, 24)}
    named = {
        "sound": ["input_values"],
        "text": ["input_ids"],
        "both": ["input_ids", "pixel_values"],
    }
    inputs = {
        name: End(
            name, "features" if name in features or takes == "sound" else "ids",
            "int64" if name == "input_ids" else "float32", features.get(name, ("b", "s")),
        )
        for name in named.get(takes, [takes])
    }  # fmt: skip
    if takes not in features:
        inputs["attention_mask"] = End("attention_mask", "mask", "int64", ("b", "s"))
    return Entry(Path("model.onnx"), "model", "", inputs, outputs)


@pytest.mark.parametrize("kind", MODELS)
def test_cases_of_a_model_without_caches_have_its_sizes(kind):
    make, takes, shapes = MODELS[kind]
    ends = {n: End(n, "value", "float32", s, usual=n) for n, s in shapes.items()}
    reference = reference_of(make(), _entry(takes, ends), PROMISES)
    assert reference.interface.output_shapes == shapes
    case = reference.plan().cases[-1]
    expected = reference.oracle(0.0).golden(case).expected
    assert {name: len(array) for name, array in expected.items()} == dict.fromkeys(
        shapes, case.sizes[BATCH]
    )


@pytest.mark.parametrize(
    ("make", "takes", "shape", "count"),
    [
        (MODELS["openai-gpt"][0], "text", (BATCH, LENGTH, 64), 1),
        (lambda: tiny_encoder("bert", "BertForMaskedLM"), "text", (BATCH, LENGTH, 64), 0),
        (lambda: tiny_encoder("vit", "ViTForImageClassification"), "pixel_values", (BATCH, 2), 0),
    ],
)
def test_only_decoders_have_a_note_on_greedy_tokens(make, takes, shape, count):
    ends = {"logits": End("logits", "value", "float32", shape, usual="logits")}
    reference = reference_of(make(), _entry(takes, ends), PROMISES)
    oracle = reference.oracle(0.0)
    case = reference.plan().cases[0]
    oracle.golden(case)
    assert sum(note.startswith("greedy tokens") for note in oracle.notes(case)) == count


@pytest.mark.parametrize(
    ("usual", "axes", "advice"),
    [("vector", 2, "pooler_output=vector"), ("vector", 4, ""), ("sentence_embedding", 2, "")],
)  # fmt: skip
def test_advice_to_name_an_output_is_given_where_it_helps(usual, axes, advice):
    ends = {usual: End(usual, "value", "float32", (BATCH,) * axes, usual=usual)}
    with pytest.raises(AttnExportError, match="is no output of the model") as raised:
        reference_of(tiny_encoder("vit"), _entry("pixel_values", ends), PROMISES)
    assert advice in str(raised.value)
    assert ("--name" in str(raised.value)) == bool(advice)


def test_an_output_may_be_given_a_name():
    ends = {"vector": End("vector", "value", "float32", (BATCH, 32), usual="pooler_output")}
    reference = reference_of(tiny_encoder("vit"), _entry("pixel_values", ends), PROMISES)
    assert reference.interface.output_shapes == {"vector": (BATCH, 32)}


@pytest.mark.parametrize(("axes", "shape"), [((BATCH, 1, 64), 3), ((BATCH, 64), 2)])
def test_graphs_with_the_last_logits_alone_are_judged_by_those(axes, shape):
    ends = {"logits": End("logits", "value", "float32", axes, usual="logits")}
    reference = reference_of(_made("OpenAIGPT", **_GPT), _entry("text", ends), PROMISES)
    assert reference.interface.output_shapes == {"logits": axes}
    right = next(case for case in reference.plan().cases if case.name.startswith("right"))
    golden = reference.oracle(0.0).golden(right)
    assert golden.expected["logits"].ndim == shape


@pytest.mark.parametrize(
    ("name", "budget"),
    [("model", ""), ("model_q4", "sqnr>=6"), ("decoder_model_merged_fp16", "sqnr>=50"),
     ("model_quantized", "sqnr>=20"), ("decoder_with_past", "")],
)  # fmt: skip
def test_variants_of_a_graph_have_a_budget(name, budget):
    entry = Entry(Path(f"{name}.onnx"), name, "", {}, {})
    assert "".join(map(str, compare_models._budgets_of(entry))) == budget
