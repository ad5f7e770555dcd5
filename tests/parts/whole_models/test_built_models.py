"""Whole decoders built with caches in place, judged by the model as transformers runs it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tiny_decoders import BUILT, REFUSED, STATES, built, checkpoint_of, tiny_decoder
from tiny_encoders import tiny_encoder
from transformers import (
    CONFIG_MAPPING,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.masking_utils import causal_mask_function

from attn_export import DecodeSession, Subject, verify
from attn_export.commands.bundle_graphs import lower_all
from attn_export.commands.compare import compare_models
from attn_export.errors import ExportError, UsageError, WeightsError
from attn_export.export.export import export
from attn_export.export.mapped_weights import map_weights
from attn_export.export.trees import to_numpy, to_torch
from attn_export.graph.save import WEIGHTS, save_graphs, tensor_places
from attn_export.measures import fill_ignored_rows
from attn_export.parts.whole_models.build import model as built_model
from attn_export.parts.whole_models.export_layouts import read_export

EXPORTS = Path(__file__).with_name("exports")

FEW = ("biogpt", "deepseek_v3", "gemma2", "gpt_oss", "llama4_text")
"""The types that are compared by default: learned positions, windows, chunks, sinks, softcap."""


def kinds(*few: str) -> list[Any]:
    return [pytest.param(kind, marks=() if kind in few else pytest.mark.extended) for kind in BUILT]


def worst_error(subject: Subject, count: int | None = None) -> tuple[float, str]:
    """Return the largest relative error of the captured module in the first cases, and its case."""
    oracle, worst = subject.oracle(0.0), (0.0, "")
    for case in subject.plan().cases[:count]:
        reference = oracle.reference(case.inputs)
        with torch.inference_mode():
            outputs = to_numpy(subject.call(subject.module, to_torch(case.inputs)))
        for name, array in outputs.items():
            judged = case.judged_rows.get(name, ())
            array = fill_ignored_rows(array, reference[name], case.ignored_rows, judged)
            error = np.abs(array - reference[name]).max() / np.abs(reference[name]).max()
            worst = max(worst, (float(error), case.name))
    return worst


@pytest.mark.parametrize("kind", kinds(*FEW))
def test_a_captured_decoder_is_the_model_as_transformers_runs_it(kind):
    error, case = worst_error(Subject.from_model(tiny_decoder(kind)))
    assert error < 5e-6, case


def test_cases_reach_across_windows_and_chunks_and_have_pasts_of_unequal_length():
    cases = Subject.from_model(tiny_decoder("mistral")).plan().cases
    for case in cases:
        lengths = case.inputs["past_length"]
        assert case.inputs["past_key_0"].shape[2] >= lengths.max() + case.sizes["query_len"]
    across = next(case for case in cases if case.name == "across_8")
    assert across.inputs["past_length"].tolist() == [6, 9, 0]
    # A window beyond the usual lengths is crossed by one token.
    far = tiny_decoder("mistral", sliding_window=900, max_position_embeddings=1000)
    assert any(
        case.inputs["past_length"].max() >= 900 for case in Subject.from_model(far).plan().cases
    )


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mistral", {}),
        pytest.param("llama4_text", {}, marks=pytest.mark.extended),
        pytest.param(
            "gemma3_text", {"use_bidirectional_attention": True}, marks=pytest.mark.extended
        ),
    ],
)
def test_a_mask_that_is_dropped_is_found(kind, fields, monkeypatch):
    subject = Subject.from_model(tiny_decoder(kind, **fields))
    assert worst_error(subject)[0] < 5e-6
    masks: dict[str, Callable[..., Any]] = AttentionMaskInterface._global_mapping
    ours = masks["attn_export"]

    def causal(**given: Any) -> Any:
        return ours(**{**given, "mask_function": causal_mask_function})

    monkeypatch.setitem(masks, "attn_export", causal)
    assert worst_error(subject)[0] > 1e-3


def test_cases_keep_to_the_most_tokens_of_a_cache():
    model = tiny_decoder("mistral")
    subject, longer = (Subject.from_model(model, max_len=most) for most in (20, 40))
    assert subject.bounds["capacity"][-1] == 20
    tokens, more = (
        max(case.sizes["query_len"] + case.sizes["past_len"] for case in each.plan().cases)
        for each in (subject, longer)
    )
    assert 8 < tokens <= 20 < more <= 40


SCALED = {"original_max_position_embeddings": 20, "rope_theta": 10000.0, "rope_type": "longrope",
          "short_factor": [1.0] * 8, "long_factor": [1.5, 2, 3, 4, 5, 6, 7, 8]}  # fmt: skip


@pytest.mark.parametrize("kind", ["phi3", "llama"])
@pytest.mark.every(2)
def test_a_decoder_whose_keys_change_at_a_length_takes_fewer_tokens(kind, monkeypatch):
    own = {"original_max_position_embeddings": 20} if kind == "phi3" else {}
    model = tiny_decoder(kind, rope_parameters=SCALED, **own)
    subject = Subject.from_model(model)
    assert subject.bounds["capacity"][-1] == 20
    assert "the graphs take 20 tokens at most: beyond 20 tokens, the longrope" in subject.notes[0]
    with pytest.raises(UsageError, match=r"max_len 30: beyond 20 tokens, .* give at most 20"):
        Subject.from_model(model, max_len=30)
    # Any other model that depends on more than its caches is found by decoding.
    monkeypatch.setattr(built_model, "step_limit", lambda _: None)
    with pytest.raises(ExportError, match=r"more than its caches and positions: at token \d+"):
        Subject.from_model(model)


@pytest.mark.parametrize("most", [-1, 15, 41])
def test_more_tokens_than_positions_are_refused(most):
    with pytest.raises(UsageError, match=f"max_len {most}: give 16 to 40, as many as the model"):
        Subject.from_model(tiny_decoder("llama"), max_len=most)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_decoder_with_attention_of_its_own_is_refused(kind):
    with pytest.raises(
        ExportError, match=f"{kind} (has attention of its own|takes no position_ids)"
    ):
        Subject.from_model(tiny_decoder(kind))


@pytest.mark.parametrize("kind", STATES)
def test_a_decoder_that_keeps_something_else_is_refused_by_what_it_keeps(kind):
    with pytest.raises(ExportError, match=f"^{kind} .*{re.escape(STATES[kind][1])}"):
        Subject.from_model(tiny_decoder(kind))


def tiny_gemma3() -> Any:
    """Return a decoder with a tower for images."""
    text = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16,
            "num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 64,
            "max_position_embeddings": 40, "layer_types": ["full_attention"] * 2}  # fmt: skip
    image = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
             "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = CONFIG_MAPPING["gemma3"](
        text_config=text, vision_config=image, mm_tokens_per_image=1, image_token_id=60,
        boi_token_id=61, eoi_token_id=62,
    )  # fmt: skip
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


TOWER = "model.vision_tower, model.multi_modal_projector"


@pytest.mark.parametrize(
    ("model", "beside", "lacks", "advice"),
    [
        (tiny_gemma3, (), TOWER, "export them by --module"),
        (
            lambda: tiny_decoder("llama"), ("adapter_config.json",),
            "an adapter (adapter_config.json)", "merge it",
        ),
        (
            tiny_gemma3, ("adapter_config.json",), f"an adapter (adapter_config.json); {TOWER}",
            "merge it",
        ),
    ],
    ids=["tower", "adapter", "both"],
)  # fmt: skip
def test_what_the_graphs_lack_is_refused_or_noted_first(model, beside, lacks, advice, tmp_path):
    model().save_pretrained(tmp_path)
    for name in beside:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=f"{re.escape(lacks)}: .*{advice}.* or give --text-only"):
        Subject.from_model(tmp_path)
    notes = Subject.from_model(tmp_path, text_only=True).notes
    assert notes[0].startswith("left out, and not in the graphs: ")
    assert lacks in notes[0]


def test_all_outputs_of_an_encoder_are_those_of_its_graph():
    subject = Subject.from_model(tiny_encoder("yolos", "YolosForObjectDetection"))
    assert subject.outputs == ("logits", "pred_boxes", "last_hidden_state")
    assert Subject.from_model(tiny_encoder("esm")).notes == (
        "left out, and not in the graphs: contact_head",
    )


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(WeightsError):
        Subject.from_model(tmp_path)
    with pytest.raises(UsageError, match="got int"):
        Subject.from_model(3)


@pytest.mark.parametrize("kind", kinds("mistral"))
def test_a_decoder_that_is_built_of_a_folder_gives_the_tokens_of_generate(kind):
    bundle = built(kind)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(bundle), dtype=torch.float32)
    report = verify(bundle, runtimes=["ort-cpu"])
    assert report.passed
    graphs = {"model.onnx", "model.portable.onnx", "model.ort.onnx"}
    assert graphs <= {v.graph for v in report.verdicts}
    nodes = [node.op_type for node in onnx.load(bundle / "model.onnx").graph.node]
    assert nodes.count("Attention") * 2 == nodes.count("TensorScatter") > 0
    assert decoded(bundle, 30) == generated(model, 30)


def test_a_graph_of_a_bundle_is_judged_without_it(tmp_path):
    bundle = built("mistral")
    for name in ("model.onnx", WEIGHTS):
        shutil.copy(bundle / name, tmp_path)
    report = compare_models(checkpoint_of(bundle), tmp_path / "model.onnx")
    assert report.passed
    assert report.notes[0].startswith("layout: attn-export (model.onnx); ")
    with pytest.raises(UsageError, match=r"--layout optimum: the layout of .* is attn-export"):
        compare_models(checkpoint_of(bundle), bundle, layout="optimum")
    with pytest.raises(UsageError, match=r"--layout attn-export: the layout of .* is mobius"):
        read_export(EXPORTS / "gpt2" / "mobius", "attn-export")


@pytest.mark.extended
def test_a_bundle_is_judged_by_the_model_of_a_checkpoint(tmp_path):
    bundle = built("mistral")
    report = compare_models(checkpoint_of(bundle), bundle, output=tmp_path / "out")
    assert report.passed
    assert {v.graph for v in report.verdicts} == {
        "model/model.onnx", "model.portable/model.portable.onnx",
    }  # fmt: skip
    assert verify(tmp_path / "out", runtimes=["ort-cpu"]).passed
    config = AutoModelForCausalLM.from_pretrained(checkpoint_of(bundle)).config
    config.sliding_window = 9
    other = AutoModelForCausalLM.from_pretrained(checkpoint_of(bundle), config=config)
    report = compare_models(other, bundle)
    assert not report.passed
    assert "sliding_window is 8 where the config says 9" in report.explanations[0]


PROMPTS = np.array([[5, 9, 33, 7, 21, 8], [0, 0, 6, 40, 3, 11], [0, 0, 0, 0, 0, 50]])
PADDED = np.array([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])


def generated(model: Any, count: int) -> list[list[int]]:
    """Return the greedy tokens of transformers after prompts that are padded on the left."""
    with torch.inference_mode():
        tokens = model.generate(
            torch.from_numpy(PROMPTS), attention_mask=torch.from_numpy(PADDED), do_sample=False,
            max_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return [row[PROMPTS.shape[1] :] for row in tokens.tolist()]


def decoded(folder: Path, count: int) -> list[list[int]]:
    """Return the greedy tokens of a bundle after the same prompts."""
    tokens = DecodeSession(folder).generate(PROMPTS, count, attention_mask=PADDED)
    return np.stack(list(tokens), 1).tolist()


def test_weights_are_read_from_the_file_of_the_bundle_once_it_is_written(tmp_path):
    subject = Subject.from_model(
        tiny_decoder("qwen2", num_hidden_layers=1, tie_word_embeddings=True)
    )
    before = {name: tensor.clone() for name, tensor in subject.module.state_dict().items()}
    graphs, _ = lower_all(export(subject), ("standard",))
    save_graphs({"a": graphs[0].model, "b": graphs[0].model}, tmp_path)
    places = tensor_places(tmp_path / WEIGHTS)
    map_weights(subject.module, [graphs[0].model], tmp_path / WEIGHTS)
    after = subject.module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    with (tmp_path / WEIGHTS).open("r+b") as file:  # what is mapped changes with the file
        for start, size in places.values():
            file.seek(start)
            file.write(bytes(size))
    read = {name for name, tensor in after.items() if not tensor.any()}
    layer = "model.model.layers.0."
    assert read >= {"model.model.embed_tokens.weight", f"{layer}self_attn.k_proj.weight"}
    assert read >= {f"{layer}mlp.{name}_proj.weight" for name in ("up", "gate", "down")}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            tiny_decoder("llama"), {"kv_dtype": "int8"},
            "kv_dtype of a whole model is float16 or none; got 'int8'",
        ),
        (tiny_encoder("bert"), {"kv_dtype": "float16"}, "is for decoders; leave it out"),
        (
            tiny_decoder("llama"), {"cache": "none"},
            "of a whole model is in-place or append; got 'none'",
        ),
        (
            tiny_encoder("bert"), {"cache": "append"},
            "cache append is for decoders; leave it out",
        ),
    ],
)  # fmt: skip
def test_caches_that_a_model_does_not_take_are_refused(model, options, message):
    with pytest.raises(UsageError, match=message):
        Subject.from_model(model, **options)
