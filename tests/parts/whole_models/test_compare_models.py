"""Graphs of whole models that other exporters wrote, judged by transformers' model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from attn_export import assert_parity, verify
from attn_export.bundle.manifest import read_bundle
from attn_export.commands.compare import compare_models
from attn_export.errors import AttnExportError
from attn_export.measures import judged_rows
from attn_export.parts.whole_models.export_layouts import read_export
from attn_export.parts.whole_models.model_call import ModelCall
from attn_export.parts.whole_models.model_cases import CaseLimits, Situation, situations
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint
from attn_export.parts.whole_models.model_reference import reference_of
from attn_export.reference.reference import Reference
from attn_export.results import WHOLE_DECODE, Case
from attn_export.runtimes.engines.ort_cpu import OrtCpu
from attn_export.runtimes.run_options import RunOptions

EXPORTS = Path(__file__).parent / "exports"
RUN = RunOptions.of(runtimes=["ort-cpu"])

_OF_0 = "batch row 0 of position_ids is used for every batch row"
_NO_WINDOW = "sliding_window is none where the config says 8"
WRONG = {
    "gemma2/genai": ("model", "the scale of embeddings is 5.66"),
    "gemma2/mobius": ("model", "the scale of embeddings is 5.66"),
    "gemma2/optimum": ("model", "attn_logit_softcapping is None where the config says 8.0"),
    "gemma3_text/mobius": ("model", "the scale of attention is 0.25"),
    "gpt_oss/mobius": ("model", "truncate is True where the config says False"),
    "mistral/genai": ("model", _NO_WINDOW),
    "mistral/mobius": ("model", _NO_WINDOW),
    "mistral/mobius-static": ("model", _NO_WINDOW),
    "opt/mobius": ("model", "eps is 1e-06 where the model has 1e-05"),
    **{
        f"{name}/transformers-fused": ("prefill", _OF_0)
        for name in ("gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3")
    },
}
"""The graph that is wrong in an export, and the cause in the report's words."""

FEW = ("mistral/mobius-static",)
"""The exports that are judged by default; other tests judge right ones of gpt2 and bert."""


def exports() -> list[object]:
    found = [f"{path.parent.name}/{path.name}" for path in sorted(EXPORTS.glob("*/*/"))]
    marks = {name: () if name in FEW else pytest.mark.extended for name in found}
    return [
        pytest.param(name, marks=marks[name]) for name in found if not name.endswith("checkpoint")
    ]


@pytest.mark.parametrize("name", exports())
def test_an_export_is_judged_right_or_wrong_with_its_cause(name, tmp_path):
    folder = EXPORTS / name
    report = compare_models(folder.parent / "checkpoint", folder, RUN, output=tmp_path / "out")
    phase, cause = WRONG.get(name, ("", ""))
    wrong = {v.graph.split("/")[0] for v in report.verdicts if v.status != "passed"}
    assert wrong == ({phase} if phase else set())
    assert report.passed == (not phase)
    if phase:
        assert cause in report.explanations[0]
        if cause == _NO_WINDOW and "genai" not in name:  # which has other values
            assert "(model.layers.0.self_attn, modeling_mistral.py:" in report.explanations[0]
        return
    assert verify(tmp_path / "out", RUN).passed
    assert all(v.worst is None or v.worst < 1 for v in report.verdicts)


def test_evidence_replays_and_shows_a_graph_that_was_changed(tmp_path):
    folder = EXPORTS / "gpt2" / "mobius"
    out = tmp_path / "out"
    checkpoint = shutil.copytree(EXPORTS / "gpt2" / "checkpoint", tmp_path / "checkpoint")
    (checkpoint / "adapter_config.json").write_text("{}")
    report = compare_models(checkpoint, folder, RUN, output=out)
    assert report.passed
    assert report.notes[0].startswith("left out, and not in the graphs: an adapter (adapter_co")
    model = onnx.load(out / "model" / "model.onnx")
    weight = max(model.graph.initializer, key=lambda x: numpy_helper.to_array(x).size)
    array = numpy_helper.to_array(weight).copy()
    array.ravel()[5] *= 1.01
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    # OpenVINO loses NaN, for which no batch element with NaN is compared; padding has none.
    report = verify(out / "model", graph=tmp_path / "model.onnx", runtimes=["ort-cpu", "openvino"])
    assert {v.runtime for v in report.verdicts if v.status == "failed"} == {"ort-cpu", "openvino"}
    with pytest.raises(AttnExportError, match="holds several bundles; name one: model"):
        read_bundle(out)


def reference_and_errors(
    name: str, chosen: Callable[[Case], bool] = lambda _: True
) -> tuple[Reference, dict[str, float]]:
    """Return the reference for an export's first graph, and its largest error in some cases."""
    folder = EXPORTS / name
    exported, model = read_export(folder), read_checkpoint(folder.parent / "checkpoint").load()
    entry = exported.entries[0]
    reference = reference_of(model, entry, exported.layout.promises)
    call, engine, errors = ModelCall(model, entry), OrtCpu().load(entry.path, threads=1), {}
    for case in filter(chosen, reference.plan().cases):
        got = engine.run({**case.inputs}, {}).values()
        right = call(**{name: torch.from_numpy(a) for name, a in case.inputs.items()})
        pairs = zip(got, (tensor.detach().numpy() for tensor in right), strict=True)
        errors[case.name] = max(float(np.abs(a - b).max()) for a, b in pairs)
    return reference, errors


def test_a_cache_that_rolls_is_judged_beyond_its_window():
    _, errors = reference_and_errors("gpt_oss/genai", lambda case: case.sizes["past_len"] > 8)
    assert "past_9" in errors
    assert len(errors) > 1
    assert max(errors.values()) < 1e-4


def test_sizes_at_which_the_angles_of_a_kind_of_layers_change_are_tried():
    folder = EXPORTS / "gemma3_text"
    model = read_checkpoint(folder / "checkpoint").load()
    model.config.rope_parameters["full_attention"]["original_max_position_embeddings"] = 41
    exported = read_export(folder / "optimum")
    plan = reference_of(model, exported.entries[0], exported.layout.promises).plan()
    assert {"past_40", "past_41", "past_42"} <= {case.name for case in plan.cases}


def test_what_a_graph_declares_wrongly_or_does_not_read_is_noted():
    reference, errors = reference_and_errors("t5/mobius")
    assert max(errors.values()) < 1e-4
    left_out, shapes, unread = reference.notes
    assert left_out == "left out, and not in the graphs: encoder"
    assert shapes.endswith("they should have: present.0.cross.key, present.0.cross.value")
    assert unread.endswith(": past_key_values.0.cross.key, past_key_values.0.cross.value")


def _vocabulary(config: dict[str, object]) -> None:
    config["vocab_size"] = 65


def _layers(config: dict[str, object]) -> None:
    config["num_hidden_layers"] = 1


BAD = {
    "the graphs of a model with other heads": ("gpt2/mobius", None, "has the shape"),
    "a folder without graphs": ("llama/checkpoint", None, "has no .onnx file"),
    "no folder": ("llama/none", None, "no such file"),
    "another vocabulary": ("llama/mobius", _vocabulary, "in another shape 2 tensors"),
    "another number of layers": ("llama/mobius", _layers, "its config does not, 9 tensors"),
}
"""Graphs, a change of the config of llama's checkpoint, and the error."""


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_is_refused_in_one_line(bad, tmp_path):
    graphs, change, message = BAD[bad]
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(EXPORTS / "llama" / "checkpoint", checkpoint)
    if change is not None:
        config = json.loads((checkpoint / "config.json").read_text())
        change(config)
        (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(AttnExportError, match=message) as raised:
        compare_models(checkpoint, EXPORTS / graphs, RUN)
    assert "\n" not in str(raised.value)


def test_data_that_was_cut_off_is_refused(tmp_path):
    graphs = tmp_path / "graphs"
    shutil.copytree(EXPORTS / "llama" / "transformers", graphs)
    for file in graphs.glob("*.data"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(AttnExportError, match="ends beyond the end"):
        compare_models(EXPORTS / "llama" / "checkpoint", graphs, RUN)


def test_names_that_no_layout_has_are_asked_for_and_may_be_given(tmp_path):
    model = onnx.load(EXPORTS / "gpt2" / "optimum" / "model.onnx")
    for node in model.graph.node:
        node.input[:] = ["tokens" if name == "input_ids" else name for name in node.input]
    next(x for x in model.graph.input if x.name == "input_ids").name = "tokens"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(AttnExportError, match="no layout has tokens; say what they are with"):
        read_export(tmp_path / "model.onnx")
    (entry,) = read_export(tmp_path / "model.onnx", names={"input_ids": "tokens"}).entries
    assert entry.inputs["tokens"].role == "ids"


@pytest.mark.parametrize(
    ("export", "title"),
    [
        ("llama/transformers", "transformers exporter"),
        ("llama/optimum", "names as of optimum-onnx"),
        ("llama/genai", "onnxruntime-genai"),
        ("llama/mobius", "mobius"),
        ("llama/mobius-static", "mobius, static cache"),
    ],
)
def test_a_layout_is_recognised(export, title):
    assert read_export(EXPORTS / export).layout.title == title


def test_caches_may_have_the_name_that_transformers_gives_them_from_5_24_on(tmp_path):
    right = EXPORTS / "llama" / "transformers"
    renamed = shutil.copytree(right, tmp_path / "renamed")
    for path in renamed.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            value.name = value.name.replace("past_key_values.", "cache.")
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [name.replace("past_key_values.", "cache.") for name in names]
        onnx.save(model, path)
    entries = [read_export(folder).entries for folder in (right, renamed)]
    assert any("cache.layers.0.keys" in name for name in entries[1][0].outputs)
    for before, after in zip(*entries, strict=True):
        for ends in ("inputs", "outputs"):
            old, new = (getattr(entry, ends).values() for entry in (before, after))
            assert [(x.role, x.layer) for x in new] == [(x.role, x.layer) for x in old]


def test_an_axis_of_an_output_that_is_called_1_has_any_size():
    path = EXPORTS / "t5" / "optimum" / "decoder_with_past_model.onnx"
    (entry,) = read_export(path).entries
    assert entry.outputs["logits"].shape == ("batch_size", "1", 64)
    reference = reference_of(read_checkpoint(path.parents[1] / "checkpoint").load(), entry,
                             frozenset({"batch", "chunk", "chunks"}))  # fmt: skip
    assert reference.interface.output_shapes["logits"] == ("batch", "query_len", 64)


def test_padding_is_no_token():
    left = Situation("x", "", new=(3, 1), past=(0, 0))
    right = dataclasses.replace(left, side="right")
    past = Situation("x", "", new=(1, 1), past=(2, 0))
    np.testing.assert_array_equal(left.valid(), [[1, 1, 1], [0, 0, 1]])
    np.testing.assert_array_equal(right.valid(), [[1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(past.valid(), [[1, 1, 1], [0, 0, 1]])


def test_a_small_number_of_cases_has_each_kind():
    (entry,) = read_export(EXPORTS / "llama" / "optimum").entries
    limits = CaseLimits(64, 128, thresholds=(8,), cases=12, tokens=200)
    chosen = situations(entry, limits, frozenset({"batch", "left", "chunk", "chunks"}))
    assert len(chosen) == 12
    assert sum(len(s.new) * max(s.new) for s in chosen) <= 200
    assert {s.name.split("_")[0] for s in chosen} >= {"base", "left", "past", "largest"}
    assert len({s.name for s in chosen}) == len(chosen)


@pytest.mark.parametrize(("name", "left_out"), [("mixtral", True), ("llama", False)])
def test_random_prompts_leave_out_the_padding_that_ties_a_router(name, left_out):
    model = read_checkpoint(EXPORTS / name / "checkpoint").load()
    model.get_input_embeddings().weight.data[7] = 0
    exported = read_export(EXPORTS / name / "mobius")
    plan = reference_of(model, exported.entries[0], exported.layout.promises).plan()
    assert any(7 in case.inputs["input_ids"] for case in plan.cases) != left_out


def test_tokens_that_a_tied_router_decides_are_not_counted():
    model = read_checkpoint(EXPORTS / "mixtral" / "checkpoint").load()
    router = model.model.layers[1].mlp.gate.weight.data
    router[1] = router[0]
    exported = read_export(EXPORTS / "mixtral" / "transformers")
    reference = reference_of(model, exported.entries[1], exported.layout.promises)
    plan, oracle, compared = reference.plan(), reference.oracle(0.0), dict[str, int]()
    for case in plan.cases[:4]:
        golden = oracle.golden(case)
        rows, determined = golden.case.ignored_rows, golden.determined.get("logits", ())
        judged = judged_rows(golden.expected["logits"].shape, rows, determined)
        compared[case.name] = 0 if "logits" in golden.tied else int(judged.sum())
    assert compared == {"base": 7, "left_4": 0, "largest_ids": 8, "right_4": 2}
    assert oracle.tokens == sum(compared.values())


@pytest.mark.parametrize("name", ["llama/mobius-static", "t5/optimum-merged", "bert/optimum"])
def test_a_threshold_that_is_a_usual_length_names_no_case_twice(name):
    exported = read_export(EXPORTS / name)
    limits = CaseLimits(64, 128, thresholds=(4, 9, 33, 65), special=(1,))
    for entry in exported.entries:
        names = [s.name for s in situations(entry, limits, exported.layout.promises)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["llama/mobius-static", "t5/optimum-merged", "gpt_oss/genai"])
def test_caches_of_every_kind_are_decoded_step_by_step(name):
    exported = read_export(EXPORTS / name)
    chosen = situations(exported.entries[0], CaseLimits(64, 64), exported.layout.promises)
    assert [s.new[0] for s in chosen if s.kind == WHOLE_DECODE] == [64]


def test_a_model_in_memory_is_compared():
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(EXPORTS / "bert" / "checkpoint")
    assert_parity(model, graphs=EXPORTS / "bert" / "optimum", runtimes=["ort-cpu"])


@pytest.mark.extended
def test_the_wrong_module_of_a_model_in_memory_is_named():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EXPORTS / "llama" / "checkpoint")
    model.model.norm.weight.data[3] *= 1.01
    with pytest.raises(AssertionError, match=r"model\.norm"):
        assert_parity(model, graphs=EXPORTS / "llama" / "mobius", runtimes=["ort-cpu"])
